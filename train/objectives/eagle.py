"""EAGLE-1's objective: predict the next feature, and the law that the target's LM head makes of it.

Slot p is given the feature of t_p (with noise, in training) and the token t_{p+1}; it should return the feature of
t_{p+1}, from which the target would draw t_{p+2}. Source: EAGLE (arXiv 2401.15077), section 4.1.
"""

from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from aerie.configs.schema.train import TrainConfig
from aerie.data.batches import Batch, empty_like, keyed_generator
from aerie.model.heads.eagle import Eagle3Head
from aerie.model.layers import UnrollMemory
from aerie.model.target import TargetEnds
from aerie.train import losses
from aerie.train.evaluate import chain_hits, chain_sums, likeliest, shifted, target_choices
from aerie.train.log import most_of_all
from aerie.train.losses import drafted_law
from aerie.train.objectives.step import StepOutput, Sums

SCALED_LENGTH = 512  # of the published code's noise, which shrinks with the sequence


class Eagle1Objective:
    """Smooth-L1 on features plus a loss between the two laws, at supervised slots only."""

    score_name = "predicted_tau"

    def __init__(self, ends: TargetEnds, config: TrainConfig) -> None:
        self.ends = ends
        self.config = config

    def prepare(self, batch: Batch, epoch: int) -> Batch:
        width = self.ends.embedding.shape[1]
        if batch.features is None and batch.num_tokens == 0:  # a process without rows
            batch = empty_like(batch, width, self.ends.embedding.dtype)
        return with_noise(batch, width, self.config, epoch)

    def divisors(self, batch: Batch) -> dict[str, int]:
        count = int(batch.supervised().sum())
        return {"feature": count, "classification": count}

    def __call__(self, module: nn.Module, batch: Batch) -> StepOutput:
        assert batch.features is not None
        dtype = next(module.parameters()).dtype
        tokens = batch.input_ids[:, 1:]  # [B, T-1]
        given = batch.features[:, :-1].to(dtype)  # [B, T-1, D]
        if batch.noise is not None:
            given = given + batch.noise[:, :-1].to(dtype)
        slots = batch.supervised()[:, :-1]  # [B, T-1]
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)  # [B, T-1]
        predicted = module(tokens, given, positions)[slots]  # [S, D]
        true = batch.features[:, 1:][slots]  # [S, D]
        classification, alpha, agreement = law_sums(predicted, true, self.ends, self.config)
        count = slots.sum()
        return StepOutput(
            {
                "feature": (self.config.feature_weight, losses.smooth_l1(predicted, true).sum(), count),
                "classification": (self.config.classification_weight, classification, count),
            },
            {"alpha": (alpha, count), "greedy_agreement": (agreement, count)},
        )

    @torch.no_grad()
    def evaluate(self, module: Any, batch: Batch) -> Sums:
        assert batch.features is not None
        chunk = self.config.loss_chunk_slots
        choose = lambda states: likeliest(self.ends.logits, states, chunk)  # noqa: E731
        start = batch.features[:, :-1].to(next(module.parameters()).dtype)
        choices = target_choices(batch, choose)
        sums = chain_sums(*chain_hits(module, batch, start, choices, choose, self.config.eval_depths))
        return {**sums, **self(module, replace(batch, noise=None)).sums()}

    def summarise(self, means: dict[str, float]) -> dict[str, float]:
        rest = {name: value for name, value in means.items() if name != "chain"}
        loss = (
            self.config.feature_weight * means["feature"] + self.config.classification_weight * means["classification"]
        )
        return {"predicted_tau": 1.0 + means["chain"], "loss": loss, **rest}


def with_noise(batch: Batch, width: int, config: TrainConfig, epoch: int) -> Batch:
    """The batch with uniform noise for its features of this width, drawn row by row so that no neighbour can move it.

    Source: EAGLE, section 4.1 (U(-0.1, 0.1)); the published code also multiplies by 512 / length.
    """
    if config.feature_noise == 0.0:
        return batch
    noise = torch.zeros(*batch.input_ids.shape, width)  # [B, T, D]
    for at, (row, length) in enumerate(zip(batch.rows, batch.lengths.tolist(), strict=True)):
        half = config.feature_noise * (SCALED_LENGTH / length if config.noise_length_scaling and length else 1.0)
        noise[at, :length].uniform_(-half, half, generator=keyed_generator(config.seed, epoch, row))
    return replace(batch, noise=noise)


def law_sums(predicted: Tensor, true: Tensor, ends: TargetEnds, config: TrainConfig) -> tuple[Tensor, Tensor, Tensor]:
    """Summed loss between the laws, alpha and greedy agreement of S slots [S, D], holding a chunk of laws at once."""
    loss, chunk = losses.loss_named(config.loss, config), config.loss_chunk_slots
    pieces = list(zip(predicted.split(chunk), true.split(chunk), strict=True))
    if len(pieces) <= 1:
        return _law_sums(predicted, true, ends, loss)
    sums = [checkpoint(_law_sums, drafted, goal, ends, loss, use_reentrant=False) for drafted, goal in pieces]
    classification, alpha, agreement = (torch.stack(column).sum() for column in zip(*sums, strict=True))
    return classification, alpha, agreement


def _law_sums(predicted: Tensor, true: Tensor, ends: TargetEnds, loss: losses.Loss) -> tuple[Tensor, Tensor, Tensor]:
    with torch.no_grad():
        target = losses.TargetLaw.of_logits(ends.logits(true))
    log_q = losses.log_law(ends.logits(predicted))  # [S, V]
    classification = loss(log_q, target).sum()
    with torch.no_grad():
        alpha = losses.acceptance(log_q, target.whole).sum()
        agreement = losses.greedy_agreement(log_q, target.whole).sum()
    return classification, alpha, agreement


Totals = tuple[Tensor, Tensor, Tensor, Tensor]  # sums of loss [K] and hits [K]; of the first step's alpha and choices


class UnrolledHead(nn.Module):
    """An EAGLE-3 head whose forward returns sums: under ZeRO-3 its LM head is only whole inside its own forward."""

    def __init__(self, head: Eagle3Head, config: TrainConfig) -> None:
        super().__init__()
        self.head = head
        self.settings = config
        self.loss = losses.loss_named(config.loss, config)

    @property
    def config(self) -> Any:
        return self.head.config

    def forward(self, batch: Batch, ends: TargetEnds) -> Totals:
        """Sums over the supervised slots of the K steps; the last counts choices inside the draft vocabulary."""
        slots = torch.stack([batch.supervised(k)[:, :-1] for k in range(self.settings.unroll_steps)])  # [K, B, T-1]
        outputs = self._unroll(batch, slots)
        assert batch.features is not None
        states = batch.features[:, 1:][slots[0]]  # [S0, D]: at p + 1; whatever a later step asks for is among them
        return self._compared(outputs, self._places(slots), states, ends)

    def _unroll(self, batch: Batch, slots: Tensor) -> Tensor:
        """The head's outputs [S, D] at the supervised slots, step after step."""
        assert batch.taps is not None
        width = slots.shape[-1]
        begin, limit = batch.positions[:, :width], self.head.config.max_position_embeddings
        memories = [UnrollMemory(batch.documents) for _ in range(self.head.config.num_hidden_layers)]
        x = self.head.fuse(batch.taps[:, :-1])  # [B, T-1, D]
        outputs = []
        for step, supervised in enumerate(slots):
            tokens = shifted(batch.input_ids, 1 + step)[:, :width]
            x = self._step(tokens, x, (begin + step).clamp(max=limit - 1), memories)
            outputs.append(x[supervised])
        return torch.cat(outputs)

    def _step(self, tokens: Tensor, x: Tensor, positions: Tensor, memories: list[UnrollMemory]) -> Tensor:
        """One unroll step; its keys and values join the memories.

        With gradient checkpointing it leaves only those and its output behind, and is made again in the backward pass
        from what it saw: hence the copies, for memories that grew meanwhile would be another sequence.
        """
        if not (self.settings.gradient_checkpointing and torch.is_grad_enabled()):
            return self.head.unroll(tokens, x, positions, None, memories)
        before = [(list(memory.keys), list(memory.values)) for memory in memories]

        def made(given: Tensor) -> tuple[Tensor, ...]:
            seen = [replace(memory, keys=[*k], values=[*v]) for memory, (k, v) in zip(memories, before, strict=True)]
            out = self.head.unroll(tokens, given, positions, None, seen)
            return out, *(tensor for memory in seen for tensor in (memory.keys[-1], memory.values[-1]))

        out, *pairs = checkpoint(made, x, use_reentrant=False)
        for memory, key, value in zip(memories, pairs[::2], pairs[1::2], strict=True):
            memory.keys.append(key)
            memory.values.append(value)
        return cast(Tensor, out)

    def _places(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """For each output its step [S] and which of the S0 target states it is compared with [S]."""
        number = slots[0].flatten().cumsum(0).view_as(slots[0]) - 1  # [B, T-1]
        which = [shifted(number, step)[supervised] for step, supervised in enumerate(slots)]
        steps = [torch.full_like(each, step) for step, each in enumerate(which)]
        return torch.cat(steps), torch.cat(which)

    def _compared(self, outputs: Tensor, places: tuple[Tensor, Tensor], states: Tensor, ends: TargetEnds) -> Totals:
        """The sums, made for a few target states at a time with all the outputs that are compared with them."""
        steps, which = places
        at_once = max(1, self.settings.loss_chunk_slots // self.settings.unroll_steps)
        # ZeRO-3 gathers the LM head at each call, so all processes must call it equally often
        groups = most_of_all(-(-states.shape[0] // at_once), outputs.device)
        if groups <= 1:
            return self._sums(outputs, steps, which, states, ends)
        order = which.argsort(stable=True)
        sizes = (which[order] // at_once).bincount(minlength=groups).tolist()
        outputs, steps, which = outputs[order], steps[order], which[order] % at_once
        empty = states[:0]
        goals = [*states.split(at_once), *[empty] * groups][:groups]
        columns = [each.split(sizes) for each in (outputs, steps, which)]
        sums = [
            checkpoint(self._sums, *piece, ends, use_reentrant=False) for piece in zip(*columns, goals, strict=True)
        ]
        loss, hits, alpha, inside = (torch.stack(column).sum(0) for column in zip(*sums, strict=True))
        return loss, hits, alpha, inside

    def _sums(self, outputs: Tensor, steps: Tensor, which: Tensor, states: Tensor, ends: TargetEnds) -> Totals:
        vocabulary = self.head.vocabulary
        target = drafted_law(states, ends, vocabulary.ids)
        choice = target.choice[which]  # [S]
        inside = vocabulary.t2d[choice]
        law = target.law.at(which)
        log_q = losses.log_law(self.head.logits(outputs))  # [S, Vd]
        loss = self.loss(log_q, law)
        if self.settings.mask_outside_vocabulary:
            loss = loss * inside
        step_of = F.one_hot(steps, self.settings.unroll_steps).T  # [K, S]
        by_step = lambda each: (step_of * each).sum(-1)  # noqa: E731
        total = by_step(loss)
        with torch.no_grad():  # behind the loss: where it is made again for the backward pass, this is not
            hits = vocabulary.target_ids(log_q.argmax(-1)) == choice
            first = steps == 0
            alpha = losses.acceptance(log_q[first], law.at(first).whole).sum()
            return total, by_step(hits), alpha, (first * inside).sum()


class Eagle3Objective:
    """The sum over steps of unroll_decay ** k times a loss between the draft's and the target's law."""

    score_name = "predicted_tau"

    def __init__(self, ends: TargetEnds, config: TrainConfig, num_taps: int) -> None:
        self.ends = ends
        self.config = config
        self.num_taps = num_taps

    def prepare(self, batch: Batch, epoch: int) -> Batch:
        if batch.features is None and batch.num_tokens == 0:  # a process without rows
            return empty_like(batch, self.ends.embedding.shape[1], self.ends.embedding.dtype, self.num_taps)
        return batch

    def divisors(self, batch: Batch) -> dict[str, int]:
        return {f"loss_at_{k + 1}": int(count) for k, count in enumerate(self._divisors(batch).tolist())}

    def __call__(self, module: nn.Module, batch: Batch) -> StepOutput:
        loss, hits, alpha, inside = module(batch, self.ends)
        counts, divisors = self._counts(batch), self._divisors(batch)
        terms, metrics = {}, {}
        for k in range(self.config.unroll_steps):
            terms[f"loss_at_{k + 1}"] = (self.config.unroll_decay**k, loss[k], divisors[k])
            metrics[f"accuracy_at_{k + 1}"] = (hits[k], counts[k])
        return StepOutput(terms, {**metrics, "alpha": (alpha, counts[0]), "in_vocabulary": (inside, counts[0])})

    @torch.no_grad()
    def evaluate(self, module: Any, batch: Batch) -> Sums:
        """A target token outside the draft vocabulary is never drafted: a miss."""
        assert batch.taps is not None
        head, chunk = module.head, self.config.loss_chunk_slots
        choices = target_choices(batch, lambda states: self._choices(states, chunk))
        drafted = lambda states: head.vocabulary.target_ids(likeliest(head.logits, states, chunk))  # noqa: E731
        start = head.fuse(batch.taps[:, :-1])
        sums = chain_sums(*chain_hits(head, batch, start, choices, drafted, self.config.eval_depths))
        return {**self(module, batch).sums(), **sums}

    def summarise(self, means: dict[str, float]) -> dict[str, float]:
        rest = {name: value for name, value in means.items() if name != "chain"}
        loss = sum(self.config.unroll_decay**k * means[f"loss_at_{k + 1}"] for k in range(self.config.unroll_steps))
        return {"predicted_tau": 1.0 + means["chain"], "loss": loss, **rest}

    def _choices(self, states: Tensor, chunk: int) -> Tensor:
        none = torch.zeros(0, dtype=torch.long, device=states.device)
        return torch.cat([drafted_law(some, self.ends, none).choice for some in states.split(chunk)])

    def _counts(self, batch: Batch) -> Tensor:
        """Supervised slots of each step [K]."""
        return torch.stack([batch.supervised(k).sum() for k in range(self.config.unroll_steps)])

    def _divisors(self, batch: Batch) -> Tensor:
        counts = self._counts(batch)
        return counts if self.config.divisor == "per_step" else counts[:1].expand_as(counts)
