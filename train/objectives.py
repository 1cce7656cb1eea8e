"""The objectives of draft heads. They return sums and the loop divides, so how a step is cut changes no gradient.

Slot p gets the feature of t_p and the token t_{p+1}; the head's output there predicts t_{p+2}.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from aerie.configs.schema.heads import Eagle1Train, Eagle3Train, MultiTokenTrain
from aerie.data.batches import Batch, keyed_generator
from aerie.model.heads.eagle import Eagle1Head, Eagle3Head
from aerie.model.heads.multi_token import HydraHead, MedusaHead
from aerie.model.target import VocabWeights
from aerie.model.unrolled_attention import UnrollMemory
from aerie.train import losses
from aerie.train.losses import SumsAndCounts, Totals, argmax_in_chunks
from aerie.train.workload import (
    Activations,
    KeptNumbers,
    Load,
    MatrixSizes,
    Work,
    attention_operations,
)

Choose = Callable[[Tensor], Tensor]  # states [S, D] -> token ids [S]


@dataclass(frozen=True)
class StepOutput:
    terms: SumsAndCounts
    metrics: SumsAndCounts

    def total(self, weights: dict[str, float], scales: dict[str, float] | None = None) -> Tensor:
        parts = [
            weights[name] * value * (scales[name] if scales else 1.0)
            for name, (value, _) in self.terms.items()
        ]
        return sum(parts[1:], parts[0])

    def sums(self) -> SumsAndCounts:
        return {
            name: (value.detach(), count)
            for name, (value, count) in {**self.terms, **self.metrics}.items()
        }


class Objective(nn.Module):
    """A module, because ZeRO-3 gathers an LM head only inside the forward of the module that it has wrapped."""

    head: Any
    target: Any  # VocabWeights; None: a small LM learns from tokens alone
    settings: Any  # the recipe's section `train`
    weights: dict[str, float]  # of the terms that forward returns
    is_random = False  # whether each row needs a seed, for noise or dropout

    def __init__(self, head: Any, target: VocabWeights | None, settings: Any) -> None:
        super().__init__()
        self.head, self.target, self.settings = head, target, settings

    @property
    def config(self) -> Any:
        """The head's sizes; DeepSpeed looks up a model's width here."""
        config = self.head.config
        return config.get_text_config() if hasattr(config, "get_text_config") else config

    @property
    def chunk(self) -> int:
        """Slots whose laws are held at once."""
        return self.chunk_on(next(self.parameters()).is_cuda)

    def chunk_on(self, is_gpu: bool) -> int:
        # about 8 float32 numbers a column: logits, laws, the loss, gradients; smaller pieces slow a GPU by launches
        most = 2**32 if is_gpu else 2**30
        columns = getattr(self.config, "draft_vocab_size", None) or self.config.vocab_size
        return self.settings.loss_chunk_slots or max(1, most // (32 * columns))

    def work(self, load: Load) -> Work:
        """What a forward and a backward pass over these rows take."""
        raise NotImplementedError

    def activations(self, tokens: int) -> Activations | None:
        """What one batch of this many tokens keeps on a GPU; None: not estimated."""
        return None

    def prepare(self, batch: Batch, epoch: int) -> Batch:
        """Adds what training needs to a batch, in the prefetching thread."""
        # A process without rows must call the module, too; padding adds nothing to the sums.
        if batch.features is None and batch.num_tokens == 0 and self.target is not None:
            embedding, num_taps = (
                self.target.embedding,
                len(getattr(self.head.config, "after_blocks", ())),
            )
            features = torch.zeros(
                *batch.input_ids.shape, embedding.shape[1], dtype=embedding.dtype
            )  # [1, 2, D]
            batch = replace(
                batch, features=features, taps=features.repeat(1, 1, num_taps) if num_taps else None
            )
        if self.is_random:
            seeds = (
                keyed_generator(self.settings.seed, epoch, row).initial_seed() for row in batch.rows
            )
            batch = replace(batch, seeds=tuple(seeds))
        return batch

    def counts(self, batch: Batch) -> dict[str, Tensor]:
        """The batch's share of each term's divisor, from the token ids alone."""
        return dict.fromkeys(self.weights, batch.supervised().sum())

    def features(self, batch: Batch) -> Tensor:
        """[B, T-1, D] of all tokens but the last, in the head's dtype."""
        return batch.features[:, :-1].to(next(self.head.parameters()).dtype)

    def choose(self, states: Tensor) -> Tensor:
        """The target's likeliest tokens [S] after states [S, D]."""
        chunk = max(1, self.chunk // getattr(self.settings, "unroll_steps", 1))
        return argmax_in_chunks(self.target.logits, states, chunk)

    def drafted(self, batch: Batch) -> Iterator[Tensor]:
        """For depth 0, 1, ...: tokens [S_k] of greedy chains, from every slot whose turn is long enough."""
        raise NotImplementedError

    def measure(self, batch: Batch) -> SumsAndCounts:
        """The sums of forward, and of its greedy chains predicted tau - 1 (per start sum_k prod_{j<=k} hit_j) and
        accuracies."""
        goals, hits, counts = (
            chosen_after(batch, batch.features, self.choose),
            list[Tensor](),
            list[Tensor](),
        )
        for k, tokens in enumerate(self.drafted(batch)):
            alive = batch.supervised(k)[:, :-1]  # [B, T-1]
            hit = torch.zeros(alive.shape, device=goals.device)
            hit[alive] = (tokens == shifted(goals, 1 + k)[:, :-1][alive]).float()
            hits.append(hit)
            counts.append(alive.sum())
        accuracies = {f"accuracy_at_{k + 1}": (hit.sum(), counts[k]) for k, hit in enumerate(hits)}
        chain = torch.stack(hits).cumprod(0).sum()
        return {**self(batch).sums(), "chain": (chain, counts[0]), **accuracies}

    def summarise(self, means: dict[str, float]) -> dict[str, float]:
        """Held-out measures from the means of measure's sums."""
        loss = sum(weight * means[name] for name, weight in self.weights.items())
        rest = {name: value for name, value in means.items() if name != "chain"}
        return {"predicted_tau": 1.0 + means["chain"], "loss": loss, **rest}


def shifted(x: Tensor, by: int) -> Tensor:
    """x [B, T] moved left by `by` (right if negative), filled up with zeros."""
    return F.pad(x, (0, by))[:, by:] if by >= 0 else F.pad(x, (-by, 0))[:, :by]


def target_states(batch: Batch, num_steps: int) -> tuple[Tensor, Tensor, list[Tensor]]:
    """(slots of each step [K, B, T-1], target states [S0, D] of the first step, each slot's index into them [S_k])."""
    slots = torch.stack([batch.supervised(k)[:, :-1] for k in range(num_steps)])  # [K, B, T-1]
    number = slots[0].flatten().cumsum(0).view_as(slots[0]) - 1  # [B, T-1], into the states
    return (
        slots,
        batch.features[:, 1:][slots[0]],
        [shifted(number, k)[asked] for k, asked in enumerate(slots)],
    )


def chosen_after(batch: Batch, states: Tensor, choose: Choose) -> Tensor:
    """Chosen tokens [B, T] after each position that a supervised slot asks for; states [B, T or T-1, D]; else 0."""
    asked = shifted(batch.supervised(), -1)  # [B, T]: slot p asks for the law after t_{p+1}
    chosen = torch.zeros_like(batch.input_ids)
    chosen[asked] = choose(states[asked[:, : states.shape[1]]])
    return chosen


@dataclass(frozen=True)
class Slots:
    """The slots of B*T that an unroll computes, in each step only supervised ones. From the turn ids, on the host."""

    supervised: Tensor  # [S]: those with most steps first, so that step k takes the first S_k
    sizes: list[int]  # S_k
    which: list[
        Tensor
    ]  # [S_k] each, on the host: slot p + k's place in `supervised`; its target state has the law
    sequence: Tensor  # [N]: each document's slots up to its last supervised one: the first step needs their keys
    places: Tensor  # [S]: of `supervised` in `sequence`
    documents: tuple[int, ...]  # lengths in `sequence`

    @classmethod
    def of_batch(cls, batch: Batch, num_steps: int) -> "Slots":
        # A turn has no gaps: a slot that is supervised in step k is so in all steps before.
        steps = torch.stack([batch.supervised(k).flatten() for k in range(num_steps)]).sum(
            0
        )  # [B*T]
        sizes = [int((steps > k).sum()) for k in range(num_steps)]
        supervised = steps.argsort(descending=True, stable=True)[: sizes[0]]
        number, spans = torch.zeros_like(steps), batch.documents or batch.turn_ids.shape[1]
        number[supervised] = torch.arange(sizes[0])
        which = [number[supervised[:size] + k] for k, size in enumerate(sizes)]
        lengths = [int((part.flip(0).cumsum(0) > 0).sum()) for part in steps.split(spans)]
        parts = torch.arange(len(steps)).split(spans)
        sequence = torch.cat([part[:length] for part, length in zip(parts, lengths, strict=True)])
        number[sequence] = torch.arange(len(sequence))
        indices = (
            x.to(batch.input_ids.device, non_blocking=True)
            for x in (supervised, sequence, number[supervised])
        )
        supervised, sequence, places = indices
        return cls(supervised, sizes, which, sequence, places, tuple(filter(None, lengths)))

    def in_order(self, x: Tensor) -> Tensor:
        """x [S_k, ...] in slot order."""
        return x[self.supervised[: len(x)].argsort()]


def unrolled(
    head: Any, batch: Batch, slots: Slots, x: Tensor, recomputes: bool = False
) -> Iterator[Tensor]:
    """Yields a head's outputs [S_k, D] step by step, from features x [N, D]; recomputes: checkpoints each step."""
    ids, limit = batch.input_ids.flatten(), head.config.max_position_embeddings
    positions = batch.positions.flatten().to(ids.device, non_blocking=True)
    # A slot attends to the first step up to itself, and to itself in later steps.
    memories = [
        UnrollMemory(slots.documents, slots.places, layer is head.blocks[-1])
        for layer in head.blocks
    ]
    x, run = x[None], partial(_checkpointed, head) if recomputes else head
    for step, size in enumerate(slots.sizes):
        taken = slots.supervised[:size] if step else slots.sequence
        # Outputs beyond the head's positions are not used; clamping makes the look-up valid.
        at = (positions[taken] + step).clamp(max=limit - 1)
        x = run(
            ids[taken + 1 + step][None],
            x.squeeze(0)[:size][None] if step else x,
            at[None],
            memories,
        )  # t_{p+1+k}
        yield x.squeeze(0)


def _checkpointed(
    head: Any, tokens: Tensor, x: Tensor, positions: Tensor, memories: list[UnrollMemory]
) -> Tensor:
    # Copies of the lists: by the backward pass the memories have grown.
    before = [(list(memory.keys), list(memory.values)) for memory in memories]

    def step(x: Tensor) -> Totals:
        seen = [
            replace(memory, keys=[*k], values=[*v])
            for memory, (k, v) in zip(memories, before, strict=True)
        ]
        out = head(tokens, x, positions, seen)
        return out, *(tensor for memory in seen for tensor in (memory.keys[-1], memory.values[-1]))

    out, *pairs = checkpoint(step, x, use_reentrant=False)
    for memory, key, value in zip(memories, pairs[::2], pairs[1::2], strict=True):
        memory.keys.append(key)
        memory.values.append(value)
    return cast(Tensor, out)


class Eagle1Objective(Objective):
    """Smooth-L1 on features plus a loss between the two laws, at supervised slots (EAGLE, arXiv 2401.15077, 4.1)."""

    def __init__(self, head: Eagle1Head, target: VocabWeights, settings: Eagle1Train) -> None:
        super().__init__(head, target, settings)
        self.weights = {
            "feature": settings.feature_weight,
            "classification": settings.classification_weight,
        }
        self.is_random = settings.feature_noise > 0
        head.gradient_checkpointing = settings.gradient_checkpointing

    def noise(self, batch: Batch, like: Tensor) -> Tensor:
        """Uniform noise [B, T, D] for features, drawn row by row on their device: other rows do not change it."""
        half = self.settings.feature_noise
        noise = torch.zeros(*batch.input_ids.shape, like.shape[-1], device=like.device)
        for row, length, seed in zip(noise, batch.lengths.tolist(), batch.seeds or (), strict=True):
            row[:length].uniform_(
                -half, half, generator=torch.Generator(like.device).manual_seed(seed)
            )
        return noise

    def forward(self, batch: Batch) -> StepOutput:
        given, slots = self.features(batch), batch.supervised()[:, :-1]  # [B, T-1, D], [B, T-1]
        if batch.seeds is not None:
            given = given + self.noise(batch, given)[:, :-1].to(given.dtype)
        # All slots are computed: later ones attend to them.
        positions = batch.positions[:, :-1].to(given.device)
        predicted = self.head(batch.input_ids[:, 1:], given, positions)[slots].float()  # [S, D]
        true = batch.features[:, 1:][slots]  # [S, D]
        # The target's LM head stays in its own dtype, as in decoding.
        with torch.autocast(predicted.device.type, enabled=False):
            pieces = losses.in_chunks([predicted, true], self.chunk)
            classification, alpha, agreement = losses.summed([*losses.by_piece(self._sums, pieces)])
        feature, count = losses.smooth_l1(predicted, true).sum(), slots.sum()
        terms = {"feature": (feature, count), "classification": (classification, count)}
        return StepOutput(terms, {"alpha": (alpha, count), "greedy_agreement": (agreement, count)})

    def _sums(self, predicted: Tensor, true: Tensor) -> Totals:
        """Sums of loss, alpha and greedy agreement over slots [S, D]."""
        with torch.no_grad():
            law = losses.TargetLaw.of_logits(self.target.logits(true))
        log_q = self.target.logits(predicted).float().log_softmax(-1)  # [S, V]
        loss = losses.LOSSES[self.settings.loss](log_q, law, self.settings).sum()
        with torch.no_grad():
            return (
                loss,
                losses.acceptance_rate(log_q, law.whole).sum(),
                (log_q.argmax(-1) == law.whole.argmax(-1)).sum(),
            )

    def drafted(self, batch: Batch) -> Iterator[Tensor]:
        slots = Slots.of_batch(batch, self.settings.eval_depths)
        given = batch.features.flatten(0, 1)[slots.sequence].to(
            next(self.head.parameters()).dtype
        )  # [N, D]
        return (self.choose(slots.in_order(x)) for x in unrolled(self.head, batch, slots, given))

    def work(self, load: Load) -> Work:
        slots = load.slots[0]
        shared = self.target.lm_head.numel()
        products = MatrixSizes.of(self.head).body * load.tokens
        # the target's law, and the head's with its gradient: the LM head is frozen
        laws = 2 * shared * slots + 4 * shared * slots
        return Work(products, attention_operations(self.head.config, load.pairs), laws)

    def activations(self, tokens: int) -> Activations:
        config = self.head.config
        layers = KeptNumbers.of(config, self.settings.gradient_checkpointing)
        ends = 5 * config.hidden_size  # before and behind the layers
        numbers = tokens * (layers.kept + ends) + tokens * layers.recomputed
        slots = min(tokens, self.chunk_on(is_gpu=True))
        return Activations(numbers, 6 * config.vocab_size * slots)


class Eagle3Objective(Objective):
    """The training-time test (EAGLE-3, arXiv 2503.01840); every step's loss is divided by the first step's slots."""

    def __init__(self, head: Eagle3Head, target: VocabWeights, settings: Eagle3Train) -> None:
        super().__init__(head, target, settings)
        self.weights = {
            f"loss_at_{k + 1}": settings.unroll_decay**k for k in range(settings.unroll_steps)
        }
        self.ids = head.vocabulary.ids.cpu()  # [Vd]

    def forward(self, batch: Batch) -> StepOutput:
        num_steps, chunk = self.settings.unroll_steps, self.chunk
        slots = Slots.of_batch(batch, num_steps)
        fused = self.head.fuse(batch.taps.flatten(0, 1)[slots.sequence])  # [N, D]
        outputs = [
            *unrolled(self.head, batch, slots, fused, self.settings.gradient_checkpointing)
        ]  # [S_k, D] each
        states = batch.features.flatten(0, 1)[slots.supervised + 1]  # [S, D]
        at_once = max(1, chunk // num_steps)
        at_once = max(
            1, -(-len(states) // max(1, -(-len(states) // at_once)))
        )  # pieces of equal size
        pieces = losses.by_target_state(states, slots.which, [outputs], at_once)
        once = {"once": self._with_law} if self.settings.loss == "soft_cross_entropy" else {}
        loss, hits, alpha, inside = losses.summed([*losses.by_piece(self._sums, pieces, **once)])
        counts = torch.tensor(slots.sizes).unbind()
        terms = {f"loss_at_{k + 1}": (loss[k], counts[0]) for k in range(num_steps)}
        accuracies = {f"accuracy_at_{k + 1}": (hits[k], counts[k]) for k in range(num_steps)}
        return StepOutput(
            terms, {**accuracies, "alpha": (alpha, counts[0]), "in_vocabulary": (inside, counts[0])}
        )

    def _with_law(self, states: Tensor, *rest: Any) -> tuple[Any, ...]:
        """What soft cross-entropy needs of states [S, D]: p^T W [S, D], with their law and likeliest tokens [S]."""
        law, choices = losses.drafted_law(states, self.target, self.ids)
        return self.head.lm_head(law.log_p.exp(), is_law=True), *rest, [law], choices

    def _sums(
        self,
        rows: Tensor,
        which: list[Tensor],
        outputs: list[Tensor],
        laws: Any = None,
        choices: Any = None,
    ) -> Totals:
        """Sums of loss [K], hits [K], and the first step's alpha and choices inside the draft vocabulary.

        rows: p^T W, or, without laws, the states: the backward pass then recomputes their law to save memory.
        """
        law: Any = None
        if laws is None:
            law, choices = losses.drafted_law(rows, self.target, self.ids)
        slots, vocabulary = (
            torch.cat(which).to(choices.device, non_blocking=True),
            self.head.vocabulary,
        )
        sizes, out = (
            [len(output) for output in outputs],
            self.head.normed(torch.cat(outputs)),
        )  # [S, D]
        choice = choices[slots]  # [S]
        inside = vocabulary.t2d[choice]
        if laws is None:
            log_q = self.head.lm_head(out).float().log_softmax(-1)  # [S, Vd]
            loss = losses.LOSSES[self.settings.loss](
                log_q, replace(law, slots=slots), self.settings
            )
        else:
            # H(p, q) = log sum_v exp(w_v h) - (p^T W) h: no law is copied for a step.
            normaliser, log_q = losses.LogNormaliser.apply(self.head.lm_head(out).float())
            loss = normaliser - (rows[slots].float() * out.float()).sum(-1)
        if self.settings.mask_outside_vocabulary:
            loss = loss * inside
        total = torch.stack([part.sum() for part in loss.split(sizes)])
        # After the loss, so that the backward pass does not recompute it.
        with torch.no_grad():
            law = law or laws.pop()  # not needed any more
            hits = (vocabulary.target_ids(log_q.argmax(-1)) == choice).split(sizes)
            alpha = losses.acceptance_rate(log_q[: sizes[0]], law.whole).sum()
            return (
                total,
                torch.stack([part.sum() for part in hits]),
                alpha,
                inside[: sizes[0]].sum(),
            )

    def drafted(self, batch: Batch) -> Iterator[Tensor]:
        head, slots = self.head, Slots.of_batch(batch, self.settings.eval_depths)
        steps = unrolled(head, batch, slots, head.fuse(batch.taps.flatten(0, 1)[slots.sequence]))
        # A target token outside the draft vocabulary is always a miss.
        return (
            head.vocabulary.target_ids(argmax_in_chunks(head.logits, slots.in_order(x), self.chunk))
            for x in steps
        )

    def work(self, load: Load) -> Work:
        slots, all_slots = load.slots[0], sum(load.slots)  # of the first step, of all steps
        sizes = MatrixSizes.of(self.head)
        # fc, keys and values of all tokens; the rest of supervised slots alone
        products = sizes.fc * load.tokens + sizes.keys_and_values * (load.tokens - slots)
        products += (sizes.body - sizes.fc) * all_slots
        attention = attention_operations(self.head.config, load.pairs) * self.settings.unroll_steps
        of_lm_head = 6 if self.head.lm_head.weight.requires_grad else 4
        laws = 2 * self.target.lm_head.numel() * slots + of_lm_head * sizes.lm_head * all_slots
        return Work(products, attention, laws)

    def activations(self, tokens: int) -> Activations:
        config = self.head.config
        layers = KeptNumbers.of(config, self.settings.gradient_checkpointing)
        ends = 7 * config.hidden_size
        slots = tokens * self.settings.unroll_steps
        numbers = slots * (layers.kept + ends) + tokens * layers.recomputed
        law_numbers = 4 * config.draft_vocab_size * min(slots, self.chunk_on(is_gpu=True))
        return Activations(numbers, law_numbers)


def keyed_dropout(
    rate: float, seeds: tuple[int, ...], counts: list[int], branch: int, x: Tensor, place: int
) -> Tensor:
    """Dropout on x [S, W] with `counts` slots per row; masks depend on the row's seed, branch and place alone."""
    kept = x.new_empty(x.shape)  # [S, W]
    for part, seed in zip(kept.split(counts), seeds, strict=True):
        keyed = keyed_generator(seed, branch, place).initial_seed()
        part.bernoulli_(1.0 - rate, generator=torch.Generator(x.device).manual_seed(keyed))
    return x * kept / (1.0 - rate)


class MultiTokenObjective(Objective):
    """Medusa and Hydra: head k's label and law loss times head_decay ** k (k = 1, 2, ...), divided by its own slots."""

    def __init__(
        self, head: MedusaHead | HydraHead, target: VocabWeights, settings: MultiTokenTrain
    ) -> None:
        super().__init__(head, target, settings)
        self.num_heads: int = head.config.num_heads
        parts = {"label": settings.label_weight, "law": settings.law_weight}
        self.terms = {
            f"{part}_at_{k + 1}": (part, k)
            for part in parts
            if parts[part]
            for k in range(self.num_heads)
        }
        self.weights = {
            name: parts[part] * settings.head_decay ** (k + 1)
            for name, (part, k) in self.terms.items()
        }
        self.is_random = settings.dropout > 0

    def counts(self, batch: Batch) -> dict[str, Tensor]:
        return {name: batch.supervised(k).sum() for name, (_, k) in self.terms.items()}

    def forward(self, batch: Batch) -> StepOutput:
        slots, states, which = target_states(batch, self.num_heads)
        recomputes = self.settings.gradient_checkpointing
        run = (
            partial(checkpoint, self._outputs, use_reentrant=False) if recomputes else self._outputs
        )
        outputs = run(batch, slots)
        tokens = [
            shifted(batch.input_ids, 2 + k)[:, : slots.shape[-1]][asked]
            for k, asked in enumerate(slots)
        ]
        at_once = max(1, self.chunk // self.num_heads)
        pieces = losses.by_target_state(states, which, [outputs, tokens], at_once)
        label, law, hits, alpha = losses.summed([*losses.by_piece(self._sums, pieces)])
        counts, totals = (
            [batch.supervised(k).sum() for k in range(self.num_heads)],
            {"label": label, "law": law},
        )
        accuracies = {f"accuracy_at_{k + 1}": (hits[k], count) for k, count in enumerate(counts)}
        terms = {name: (totals[part][k], counts[k]) for name, (part, k) in self.terms.items()}
        return StepOutput(terms, {**accuracies, "alpha": (alpha, counts[0])})

    def _outputs(self, batch: Batch, slots: Tensor) -> list[Tensor]:
        """Outputs [S_k, D] of each head, before its LM head."""
        width, outputs, drop, features = slots.shape[-1], [], None, self.features(batch)
        if isinstance(self.head, HydraHead):
            features = self.head.prefix(features, torch.arange(width, device=features.device))
        for k, asked in enumerate(slots):
            if self.settings.dropout and batch.seeds is not None:
                drop = partial(
                    keyed_dropout, self.settings.dropout, batch.seeds, asked.sum(1).tolist(), k
                )
            if isinstance(self.head, HydraHead):
                # Head k is given the embeddings of the tokens t_{p+1} to t_{p+k+1}.
                tokens = [
                    shifted(batch.input_ids, 1 + back)[:, :width][asked] for back in range(k + 1)
                ]
                embeddings = torch.cat(
                    [F.embedding(ids, self.target.embedding) for ids in tokens], dim=-1
                )
                outputs.append(self.head.state(k, features[asked], embeddings, drop))
            else:
                outputs.append(self.head.state(k, features[asked], drop))
        return outputs

    def _sums(
        self, states: Tensor, which: list[Tensor], outputs: list[Tensor], tokens: list[Tensor]
    ) -> Totals:
        """Sums of label loss, law loss and hits [H]; the first head's alpha."""
        with torch.no_grad():
            target = losses.TargetLaw.of_logits(self.target.logits(states))
            choice = target.inside.argmax(-1)
        laws = [
            self.head.laws(k, x, self.target).float().log_softmax(-1) for k, x in enumerate(outputs)
        ]  # [S_k, V]
        label = law = laws[0].new_zeros(len(laws))
        if self.settings.label_weight:
            label = torch.stack(
                [F.nll_loss(q, t, reduction="sum") for q, t in zip(laws, tokens, strict=True)]
            )
        if self.settings.law_weight:
            loss, sums = losses.LOSSES[self.settings.loss], []
            for q, slots in zip(laws, which, strict=True):
                sums.append(loss(q, replace(target, slots=slots), self.settings).sum())
            law = torch.stack(sums)
        with torch.no_grad():
            hits = torch.stack(
                [(q.argmax(-1) == choice[at]).sum() for q, at in zip(laws, which, strict=True)]
            )
            alpha = losses.acceptance_rate(laws[0], replace(target, slots=which[0]).whole).sum()
        return label, law, hits, alpha

    def drafted(self, batch: Batch) -> Iterator[Tensor]:
        depths = min(self.settings.eval_depths, self.num_heads)
        outputs = enumerate(self._outputs(batch, target_states(batch, depths)[0]))
        return (
            argmax_in_chunks(partial(self.head.laws, k, vocab=self.target), x, self.chunk)
            for k, x in outputs
        )

    def work(self, load: Load) -> Work:
        slots = load.slots[0]
        shared = self.target.lm_head.numel()
        sizes = MatrixSizes.of(self.head)
        # LM heads of its own are trained; the target's, which all future tokens may share, is not
        of_heads = 6 * sizes.lm_head or 4 * shared * self.num_heads
        return Work(
            sizes.body * slots,
            attention_operations(self.head.config, load.pairs),
            2 * shared * slots + of_heads * slots,
        )
