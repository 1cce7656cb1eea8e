"""The objectives of EAGLE heads: predicted features and laws (EAGLE-1), and the training-time test (EAGLE-3).

Slot p is given the feature of t_p and the token t_{p+1}; from what it returns the target would draw t_{p+2}.
"""

from dataclasses import replace
from typing import cast

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from aerie.configs.schema.train import Eagle1Train, Eagle3Train
from aerie.data.batches import Batch, keyed_generator
from aerie.model.heads.eagle import Eagle1Head, Eagle3Head
from aerie.model.layers import UnrollMemory
from aerie.model.target import VocabWeights
from aerie.train import losses
from aerie.train.objectives import base
from aerie.train.objectives.base import Objective, StepOutput, Sums, shifted


class Eagle1Objective(Objective):
    """Smooth-L1 on features plus a loss between the two laws, at supervised slots only.

    Source: EAGLE (arXiv 2401.15077), section 4.1.
    """

    head: Eagle1Head
    target: VocabWeights
    settings: Eagle1Train

    def __init__(self, head: Eagle1Head, target: VocabWeights, settings: Eagle1Train) -> None:
        super().__init__(head, target, settings)
        self.weights = {"feature": settings.feature_weight, "classification": settings.classification_weight}
        head.gradient_checkpointing = settings.gradient_checkpointing

    def prepare(self, batch: Batch, epoch: int) -> Batch:
        """With uniform noise for the features, drawn row by row so that no neighbour in the batch can move it."""
        batch, half = super().prepare(batch, epoch), self.settings.feature_noise
        if half == 0.0:
            return batch
        noise = torch.zeros(*batch.input_ids.shape, self.target.embedding.shape[1])  # [B, T, D]
        for at, (row, length) in enumerate(zip(batch.rows, batch.lengths.tolist(), strict=True)):
            noise[at, :length].uniform_(-half, half, generator=keyed_generator(self.settings.seed, epoch, row))
        return replace(batch, noise=noise)

    def counts(self, batch: Batch) -> dict[str, Tensor]:
        return dict.fromkeys(self.weights, batch.supervised().sum())

    def forward(self, batch: Batch) -> StepOutput:
        assert batch.features is not None
        dtype = next(self.head.parameters()).dtype
        tokens = batch.input_ids[:, 1:]  # [B, T-1]
        given = batch.features[:, :-1].to(dtype)  # [B, T-1, D]
        if batch.noise is not None:
            given = given + batch.noise[:, :-1].to(dtype)
        slots = batch.supervised()[:, :-1]  # [B, T-1]
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)  # [B, T-1]
        # Slots that are not supervised are computed, too: later ones attend to them.
        predicted = self.head(tokens, given, positions)[slots].float()  # [S, D]
        true = batch.features[:, 1:][slots]  # [S, D]
        # Under autocast the target's LM head stays in its own dtype, as it is in decoding.
        with torch.autocast(predicted.device.type, enabled=False):
            pieces = losses.in_chunks([predicted, true], self.settings.loss_chunk_slots)
            sums = losses.remade(self._sums, pieces)
            classification, alpha, agreement = losses.added([sums(*piece) for piece in pieces])
        feature, count = losses.smooth_l1(predicted, true).sum(), slots.sum()
        return StepOutput(
            {"feature": (feature, count), "classification": (classification, count)},
            {"alpha": (alpha, count), "greedy_agreement": (agreement, count)},
        )

    def _sums(self, predicted: Tensor, true: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Loss between the laws, alpha and greedy agreement over S slots [S, D]."""
        with torch.no_grad():
            law = losses.TargetLaw.of_logits(self.target.logits(true))
        log_q = losses.log_law(self.target.logits(predicted))  # [S, V]
        loss = losses.LOSSES[self.settings.loss](log_q, law, self.settings).sum()
        with torch.no_grad():
            agreement = log_q.argmax(-1) == law.whole.argmax(-1)
            return loss, losses.acceptance(log_q, law.whole).sum(), agreement.sum()

    def measure(self, batch: Batch) -> Sums:
        assert batch.features is not None

        def choose(states: Tensor) -> Tensor:
            return base.likeliest(self.target.logits, states, self.settings.loss_chunk_slots)

        start = batch.features[:, :-1].to(next(self.head.parameters()).dtype)
        hits = base.chain_hits(
            self.head, batch, start, base.target_choices(batch, choose), choose, self.settings.eval_depths
        )
        return {**base.chain_sums(*hits), **self(replace(batch, noise=None)).sums()}


Totals = tuple[Tensor, ...]  # sums of loss [K] and hits [K]; of the first step's alpha, and its choices in vocabulary


class Eagle3Objective(Objective):
    """The sum over unroll steps of unroll_decay ** k times a loss between the draft's and the target's law.

    Source: EAGLE-3 (arXiv 2503.01840), training-time test. Every step's sum is divided by the slots of the first.
    """

    head: Eagle3Head
    target: VocabWeights
    settings: Eagle3Train

    def __init__(self, head: Eagle3Head, target: VocabWeights, settings: Eagle3Train) -> None:
        super().__init__(head, target, settings)
        self.weights = {f"loss_at_{k + 1}": settings.unroll_decay**k for k in range(settings.unroll_steps)}

    def counts(self, batch: Batch) -> dict[str, Tensor]:
        return dict.fromkeys(self.weights, batch.supervised().sum())

    def forward(self, batch: Batch) -> StepOutput:
        assert batch.features is not None
        num_steps, chunk = self.settings.unroll_steps, self.settings.loss_chunk_slots
        slots = torch.stack([batch.supervised(k)[:, :-1] for k in range(num_steps)])  # [K, B, T-1]
        outputs = self._unroll(batch, slots)  # [S, D]
        # The target's states at p + 1 of the first step's slots [S0, D]; a later step asks for some of the same ones.
        states = batch.features[:, 1:][slots[0]]
        number = slots[0].flatten().cumsum(0).view_as(slots[0]) - 1  # [B, T-1], into the states
        which = [shifted(number, k)[asked] for k, asked in enumerate(slots)]
        # A step's outputs are told apart again when their losses are summed.
        steps = torch.cat([torch.full_like(places, k) for k, places in enumerate(which)])  # [S]
        pieces = losses.by_target_state(states, [torch.cat(which)], [[outputs], [steps]], max(1, chunk // num_steps))
        sums = losses.remade(self._sums, pieces)
        loss, hits, alpha, inside = losses.added([sums(*piece) for piece in pieces])
        counts = [batch.supervised(k).sum() for k in range(num_steps)]
        return StepOutput(
            {f"loss_at_{k + 1}": (loss[k], counts[0]) for k in range(num_steps)},
            {
                **{f"accuracy_at_{k + 1}": (hits[k], counts[k]) for k in range(num_steps)},
                "alpha": (alpha, counts[0]),
                "in_vocabulary": (inside, counts[0]),
            },
        )

    def _unroll(self, batch: Batch, slots: Tensor) -> Tensor:
        """The head's outputs [S, D] at the supervised slots [K, B, T-1], step after step."""
        assert batch.taps is not None
        width = slots.shape[-1]
        begin, limit = batch.positions[:, :width], self.head.config.max_position_embeddings
        # Keys and values of the steps so far; a slot sees the first step up to itself, and its own of later steps.
        memories = [UnrollMemory(batch.documents) for _ in range(self.head.config.num_hidden_layers)]
        x = self.head.fuse(batch.taps[:, :-1])  # [B, T-1, D]
        outputs = []
        for step, supervised in enumerate(slots):
            tokens = shifted(batch.input_ids, 1 + step)[:, :width]
            x = self._step(tokens, x, (begin + step).clamp(max=limit - 1), memories)
            outputs.append(x[supervised])
        return torch.cat(outputs)

    def _step(self, tokens: Tensor, x: Tensor, positions: Tensor, memories: list[UnrollMemory]) -> Tensor:
        """One unroll step; its keys and values join the memories."""
        if not (self.settings.gradient_checkpointing and torch.is_grad_enabled()):
            return self.head.unroll(tokens, x, positions, memories)
        # The step is made again in the backward pass from what it saw. Hence the copies of the lists: the memories will
        # have grown by then, and would be another sequence.
        before = [(list(memory.keys), list(memory.values)) for memory in memories]

        def made(given: Tensor) -> tuple[Tensor, ...]:
            seen = [replace(memory, keys=[*k], values=[*v]) for memory, (k, v) in zip(memories, before, strict=True)]
            out = self.head.unroll(tokens, given, positions, seen)
            return out, *(tensor for memory in seen for tensor in (memory.keys[-1], memory.values[-1]))

        out, *pairs = checkpoint(made, x, use_reentrant=False)
        for memory, key, value in zip(memories, pairs[::2], pairs[1::2], strict=True):
            memory.keys.append(key)
            memory.values.append(value)
        return cast(Tensor, out)

    def _sums(self, states: Tensor, which: list[Tensor], outputs: list[Tensor], steps: list[Tensor]) -> Totals:
        (slots,), (out,), (step_of,), vocabulary = which, outputs, steps, self.head.vocabulary
        law, choices = losses.drafted_law(states, self.target, vocabulary.ids)
        law, choice = law.at(slots), choices[slots]  # choice [S]
        inside = vocabulary.t2d[choice]
        log_q = losses.log_law(self.head.logits(out))  # [S, Vd]
        loss = losses.LOSSES[self.settings.loss](log_q, law, self.settings)
        if self.settings.mask_outside_vocabulary:
            loss = loss * inside
        steps_of = F.one_hot(step_of, self.settings.unroll_steps).T  # [K, S]
        total = (steps_of * loss).sum(-1)
        # Behind the loss: where that is made again for the backward pass, this is not.
        with torch.no_grad():
            hits = vocabulary.target_ids(log_q.argmax(-1)) == choice
            first = step_of == 0
            alpha = losses.acceptance(log_q[first], law.at(slots[first]).whole).sum()
            return total, (steps_of * hits).sum(-1), alpha, (first * inside).sum()

    def measure(self, batch: Batch) -> Sums:
        assert batch.taps is not None
        head, chunk = self.head, self.settings.loss_chunk_slots
        none = torch.zeros(0, dtype=torch.long, device=batch.input_ids.device)

        def choices(states: Tensor) -> Tensor:
            return torch.cat([losses.drafted_law(some, self.target, none)[1] for some in states.split(chunk)])

        def drafted(states: Tensor) -> Tensor:  # a target token outside the draft vocabulary is always a miss
            return head.vocabulary.target_ids(base.likeliest(head.logits, states, chunk))

        start = head.fuse(batch.taps[:, :-1])
        hits = base.chain_hits(
            head, batch, start, base.target_choices(batch, choices), drafted, self.settings.eval_depths
        )
        return {**self(batch).sums(), **base.chain_sums(*hits)}
