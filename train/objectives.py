"""The objectives of draft heads. They return sums and the loop divides, so cutting a step into
other batches changes no gradient.

Slot p gets the feature of t_p and the token t_{p+1}; the head's output there predicts t_{p+2}. At
unroll step k = 0, 1, ... slot p predicts t_{p+2+k}. `Batch.supervised` says which slots learn.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from aerie.configs.schema.heads import Eagle1Train, Eagle3Train, MultiTokenTrain
from aerie.data.batches import Batch, keyed_generator
from aerie.model.heads.eagle import Eagle1Head, Eagle3Head
from aerie.model.heads.multi_token import HydraHead, MedusaHead
from aerie.model.unrolled_attention import UnrollMemory
from aerie.model.vocab_weights import VocabWeights
from aerie.train import losses
from aerie.train.losses import Piece, SumsAndCounts, argmax_in_chunks
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
    """The sums of a forward pass, and the counts that divide them."""

    terms: SumsAndCounts  # the parts of the loss
    metrics: SumsAndCounts  # only logged, without a gradient

    def total(self, weights: dict[str, float], scales: dict[str, float] | None = None) -> Tensor:
        """The weighted sum of all terms; scales gives each term one more factor."""
        scales = scales or dict.fromkeys(self.terms, 1.0)
        parts = [weights[name] * sums[0] * scales[name] for name, sums in self.terms.items()]
        return sum(parts[1:], parts[0])

    @classmethod
    def of_sums(cls, sums: losses.Sums, count: Tensor, terms: Iterable[str]) -> "StepOutput":
        """An output of sums that share one divisor. Sums that are no terms become metrics."""
        means = {name: (value, count) for name, value in sums.items()}
        return cls({name: means.pop(name) for name in terms}, means)

    def sums(self) -> SumsAndCounts:
        """Terms and metrics together, without gradients."""
        both = {**self.terms, **self.metrics}
        return {name: (value.detach(), count) for name, (value, count) in both.items()}


class Objective(nn.Module):
    """A head with its loss: what the loop trains.

    It is a module because ZeRO-3 gathers an LM head only inside the forward of the module that it
    has wrapped.
    """

    head: Any
    target: Any  # VocabWeights; None for a small LM that learns from tokens alone
    settings: Any  # the recipe's section `train`
    weights: dict[str, float]  # the weight of each term of `forward`
    is_random = False  # whether rows need seeds, for noise or dropout

    def __init__(self, head: Any, target: VocabWeights | None, settings: Any) -> None:
        super().__init__()
        self.head = head
        self.target = target
        self.settings = settings

    @property
    def config(self) -> Any:
        """The head's sizes. DeepSpeed also looks here for a model's width."""
        config = self.head.config
        return config.get_text_config() if hasattr(config, "get_text_config") else config

    @property
    def dtype(self) -> torch.dtype:
        """The head's dtype, to which features are cast."""
        return next(self.head.parameters()).dtype

    @property
    def chunk(self) -> int:
        """The number of slots whose laws are in memory at once."""
        return self.chunk_on(next(self.parameters()).is_cuda)

    def chunk_on(self, is_gpu: bool) -> int:
        # A column takes about 8 float32 numbers: logits, laws, the loss's intermediate results and
        # gradients. A GPU gets larger pieces, because each piece launches many kernels.
        most_bytes = 2**32 if is_gpu else 2**30
        columns = getattr(self.config, "draft_vocab_size", None) or self.config.vocab_size
        return self.settings.loss_chunk_slots or max(1, most_bytes // (32 * columns))

    def work(self, load: Load) -> Work:
        """The operations of a forward and a backward pass over these rows."""
        raise NotImplementedError

    def activations(self, tokens: int) -> Activations | None:
        """What one batch of this many tokens keeps on a GPU; None if there is no estimate."""
        return None

    def prepare(self, batch: Batch, epoch: int) -> Batch:
        """The batch with all that training needs; the prefetching thread calls this."""
        if batch.features is None and batch.num_tokens == 0 and self.target is not None:
            batch = self._with_zero_states(batch)
        if self.is_random:
            seed = self.settings.seed
            seeds = [keyed_generator(seed, epoch, row).initial_seed() for row in batch.rows]
            batch = replace(batch, seeds=tuple(seeds))
        return batch

    def _with_zero_states(self, batch: Batch) -> Batch:
        """The batch of a process without rows, with states of zeros. Such a process must call the
        module too, and padding adds nothing to the sums."""
        # `collate` made such a batch: two tokens of padding, none of them supervised.
        features = torch.zeros_like(self.target.embedding[:2], device="cpu")[None]  # [1, 2, D]
        num_taps = len(getattr(self.head.config, "after_blocks", ()))
        taps = features.repeat(1, 1, num_taps) if num_taps else None  # [1, 2, L*D]
        return replace(batch, features=features, taps=taps)

    def counts(self, batch: Batch) -> dict[str, Tensor]:
        """This batch's part of each term's divisor, from the token ids alone."""
        return dict.fromkeys(self.weights, batch.supervised().sum())

    def features(self, batch: Batch) -> Tensor:
        """Features [B, T-1, D] of all tokens but the last, in the head's dtype."""
        return batch.features[:, :-1].to(self.dtype)

    def choose(self, states: Tensor) -> Tensor:
        """The target's most likely tokens [S] after states [S, D]."""
        # All unroll steps of a slot share one chunk with its law, so fewer states fit into it.
        chunk = max(1, self.chunk // getattr(self.settings, "unroll_steps", 1))
        return argmax_in_chunks(self.target.logits, states, chunk)

    def draft_greedily(self, batch: Batch) -> Iterator[Tensor]:
        """Yields the tokens [S_k] of greedy chains at depth k = 0, 1, ..., drafted from every slot
        whose turn is long enough."""
        raise NotImplementedError

    def measure(self, batch: Batch) -> SumsAndCounts:
        """The sums of `forward`, and those of greedy chains.

        Chains give the accuracy of each depth, and `chain`: the sum over the starts of sum_k
        prod_{j<=k} hit_j, whose mean is the predicted tau - 1.
        """
        # For slot p at depth k the target chooses the same token as for slot p + k at depth 0. So
        # this looks the choices up once, and `shifted` gives those of depth k.
        choices = chosen_after(batch, batch.features, self.choose)  # [B, T]
        sums = self(batch).sums()
        hits = []
        for k, tokens in enumerate(self.draft_greedily(batch)):
            alive = batch.supervised(k)[:, :-1]  # [B, T-1]
            wanted = shifted(choices, 1 + k)[:, :-1][alive]  # [S_k]
            hit = torch.zeros(alive.shape, device=choices.device)  # [B, T-1]
            hit[alive] = (tokens == wanted).float()
            hits.append(hit)
            sums[f"accuracy_at_{k + 1}"] = (hit.sum(), alive.sum())
        # A chain ends at its first miss: the running product is 1 before the miss, and then 0.
        sums["chain"] = (torch.stack(hits).cumprod(0).sum(), sums["accuracy_at_1"][1])
        return sums

    def summarise(self, means: dict[str, float]) -> dict[str, float]:
        """The held-out measures, from the means of `measure`'s sums."""
        loss = sum(weight * means[name] for name, weight in self.weights.items())
        rest = {name: value for name, value in means.items() if name != "chain"}
        return {"predicted_tau": 1.0 + means["chain"], "loss": loss, **rest}


def shifted(x: Tensor, by: int) -> Tensor:
    """x [B, T] moved left by `by` (right if it is negative), with zeros in the gap."""
    return F.pad(x, (0, by))[:, by:] if by >= 0 else F.pad(x, (-by, 0))[:, :by]


def chosen_after(batch: Batch, states: Tensor, choose: Choose) -> Tensor:
    """The chosen tokens [B, T] after each position whose law a supervised slot needs; 0 elsewhere.

    states: [B, T or T-1, D].
    """
    # Only the states that are needed go through the LM head.
    needed = shifted(batch.supervised(), -1)  # [B, T]: slot p needs the law after t_{p+1}
    chosen = torch.zeros_like(batch.input_ids)
    chosen[needed] = choose(states[needed[:, : states.shape[1]]])
    return chosen


# --- the unroll of EAGLE heads ---


@dataclass(frozen=True)
class Slots:
    """Which of the B * T slots an unroll computes.

    Step 0 computes each document's slots up to its last supervised one; later steps compute only
    supervised slots. An example with two turns of four tokens and three steps:

        position                  0  1  2  3  4  5  6  7  8  9
        turn of its token         -  1  1  1  1  -  2  2  2  2
        steps supervised in       3  2  1  -  -  3  2  1  -  -

    Slot 0 predicts t_2, t_3 and t_4 from t_1; all three are in turn 1. Slot 2 predicts t_4 and, in
    the next step, t_5, which is in no turn. So supervised = [0 5 1 6 2 7], with the slots of most
    steps first, and sizes = [6 4 2]: step k computes supervised[: sizes[k]].

    In step k, slot p learns the target's law after t_{p+1+k}. Slot p + k learns the same law in
    step 0, so the law is computed once. `which` holds the index of slot p + k:

        which[0] = [0 1 2 3 4 5]    each slot itself
        which[1] = [2 3 4 5]        slots 1 6 2 7, one behind slots 0 5 1 6
        which[2] = [4 5]            slots 2 7, two behind slots 0 5

    The host computes all of this from the turn ids, so no step waits for the device.
    """

    supervised: Tensor  # [S], those of most steps first
    sizes: list[int]  # S_k, the number of slots in each step
    which: list[Tensor]  # per step [S_k], on the host: indices into `supervised`
    sequence: Tensor  # [N]: each document's slots up to its last supervised one
    rows: Tensor  # [S]: the index of each supervised slot in `sequence`
    documents: tuple[int, ...]  # the number of slots of each document in `sequence`

    @classmethod
    def of_batch(cls, batch: Batch, num_steps: int) -> "Slots":
        """The slots of a batch in num_steps unroll steps."""
        # A turn has no gaps, so a slot that is supervised in step k is supervised in all steps
        # before. This counts the steps of each slot: [B * T].
        steps = torch.stack([batch.supervised(k).flatten() for k in range(num_steps)]).sum(0)
        sizes = [int((steps > k).sum()) for k in range(num_steps)]
        supervised = steps.argsort(descending=True, stable=True)[: sizes[0]]
        number = torch.zeros_like(steps)  # [B * T], a slot's index in `supervised`
        number[supervised] = torch.arange(sizes[0])
        which = [number[supervised[:size] + k] for k, size in enumerate(sizes)]
        # Step 0 also computes unsupervised slots, because later slots attend to their keys.
        spans = batch.documents or batch.turn_ids.shape[1]
        parts = torch.arange(len(steps)).split(spans)
        # The flipped sum is positive up to a document's last supervised slot.
        lengths = [int((part.flip(0).cumsum(0) > 0).sum()) for part in steps.split(spans)]
        sequence = torch.cat([part[:length] for part, length in zip(parts, lengths, strict=True)])
        number[sequence] = torch.arange(len(sequence))  # now a slot's index in `sequence`
        device = batch.input_ids.device
        return cls(
            supervised.to(device, non_blocking=True),
            sizes,
            which,
            sequence.to(device, non_blocking=True),
            number[supervised].to(device, non_blocking=True),
            tuple(length for length in lengths if length),
        )

    def in_order(self, x: Tensor) -> Tensor:
        """x [S_k, ...] with its rows in slot order."""
        return x[self.supervised[: len(x)].argsort()]


def unroll(
    head: Any, batch: Batch, slots: Slots, features: Tensor, recomputes: bool = False
) -> Iterator[Tensor]:
    """Yields the outputs [S_k, D] of each step of the training-time test (EAGLE-3, figure 6).

    Step 0 reads the target's features [N, D] of slots.sequence; every later step reads the outputs
    of the step before. With recomputes, each step keeps only its input for the backward pass.
    """
    ids = batch.input_ids.flatten()  # [B * T]
    # Each conversation counts its own positions, also when several share a row.
    positions = batch.positions.flatten().to(ids.device, non_blocking=True)  # [B * T]
    last_position = head.config.max_position_embeddings - 1
    # A slot attends to the slots of step 0 up to itself, and in later steps only to itself.
    # Nothing reads the last layer's outputs of unsupervised slots, so that layer leaves them out.
    memories = [
        UnrollMemory(slots.documents, slots.rows, layer is head.blocks[-1]) for layer in head.blocks
    ]
    x = features  # [N, D]
    for step, size in enumerate(slots.sizes):
        if step == 0:
            computed = slots.sequence  # [N]
        else:
            computed = slots.supervised[:size]  # [S_k]
            x = x[:size]  # [S_k, D]: the slots whose turn has ended stood last
        # No index passes the end, because a computed slot is followed by the tokens that it learns.
        tokens = ids[computed + 1 + step]  # t_{p+1+k}: [N] in step 0, then [S_k]
        # No loss reads outputs beyond the head's positions; clamping keeps RoPE's look-up valid.
        at = (positions[computed] + step).clamp(max=last_position)
        run = partial(_run_checkpointed, head) if recomputes else head
        x = run(tokens[None], x[None], at[None], memories).squeeze(0)  # [S_k, D]
        yield x


def _run_checkpointed(
    head: Any, tokens: Tensor, x: Tensor, positions: Tensor, memories: list[UnrollMemory]
) -> Tensor:
    """head(...), which the backward pass computes a second time to save memory."""
    # The backward pass needs the lists as they are now; this step and later ones append to them.
    before = [_copied(memory) for memory in memories]

    def step(x: Tensor) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        # This function runs twice, and each run appends to the lists, so each gets copies.
        grown = [_copied(memory) for memory in before]
        out = head(tokens, x, positions, grown)
        return out, [(memory.keys[-1], memory.values[-1]) for memory in grown]

    out, pairs = checkpoint(step, x, use_reentrant=False)
    for memory, (key, value) in zip(memories, pairs, strict=True):
        memory.keys.append(key)
        memory.values.append(value)
    return cast(Tensor, out)


def _copied(memory: UnrollMemory) -> UnrollMemory:
    return replace(memory, keys=list(memory.keys), values=list(memory.values))


class Eagle1Objective(Objective):
    """Smooth-L1 on features plus a loss between the two laws, at supervised slots (EAGLE, arXiv
    2401.15077, section 4.1)."""

    def __init__(self, head: Eagle1Head, target: VocabWeights, settings: Eagle1Train) -> None:
        super().__init__(head, target, settings)
        self.weights = {
            "feature": settings.feature_weight,
            "classification": settings.classification_weight,
        }
        self.is_random = settings.feature_noise > 0
        head.gradient_checkpointing = settings.gradient_checkpointing

    def noise(self, batch: Batch, like: Tensor) -> Tensor:
        """Uniform noise [B, T, D] for features. Each row draws its own on the features' device, so
        other rows do not change it."""
        half = self.settings.feature_noise
        noise = torch.zeros(*batch.input_ids.shape, like.shape[-1], device=like.device)
        for row, length, seed in zip(noise, batch.lengths.tolist(), batch.seeds or (), strict=True):
            generator = torch.Generator(like.device).manual_seed(seed)
            row[:length].uniform_(-half, half, generator=generator)
        return noise

    def forward(self, batch: Batch) -> StepOutput:
        features = self.features(batch)  # [B, T-1, D]
        if batch.seeds is not None:
            features = features + self.noise(batch, features)[:, :-1].to(features.dtype)
        # The last position has no next token, so it is never supervised.
        slots = batch.supervised()[:, :-1]  # [B, T-1]
        # The head computes all slots, because later ones attend to them.
        outputs = self.head(  # [B, T-1, D]
            batch.input_ids[:, 1:], features, batch.positions[:, :-1].to(features.device)
        )
        predicted = outputs[slots].float()  # [S, D]
        true = batch.features[:, 1:][slots]  # [S, D]: slot p learns the feature of t_{p+1}
        # The target's LM head keeps its own dtype, as in decoding.
        with torch.autocast(outputs.device.type, enabled=False):
            pieces = losses.by_target_state(Piece.of_own_states(true, predicted), self.chunk)
            sums = losses.added(list(losses.by_piece(self._sums, pieces)))
        # Features are small, so this loss needs no pieces; only laws must be cut.
        sums["feature"] = losses.smooth_l1(predicted, true).sum()
        return StepOutput.of_sums(sums, slots.sum(), self.weights)

    def _sums(self, piece: Piece) -> losses.Sums:
        """Sums over a piece's slots: the loss between the laws, alpha, and how often both choose
        the same token."""
        ((predicted,),) = piece.columns  # [S, D]
        with torch.no_grad():
            law = losses.TargetLaw.of_logits(self.target.logits(piece.states))
        log_q = self.target.logits(predicted).float().log_softmax(-1)  # [S, V]
        loss = losses.LOSSES[self.settings.loss](log_q, law, self.settings).sum()
        with torch.no_grad():
            return {
                "classification": loss,
                "alpha": losses.acceptance_rate(log_q, law.whole).sum(),
                "greedy_agreement": (log_q.argmax(-1) == law.whole.argmax(-1)).sum(),
            }

    def draft_greedily(self, batch: Batch) -> Iterator[Tensor]:
        slots = Slots.of_batch(batch, self.settings.eval_depths)
        features = batch.features.flatten(0, 1)[slots.sequence].to(self.dtype)  # [N, D]
        for outputs in unroll(self.head, batch, slots, features):
            yield self.choose(slots.in_order(outputs))

    def work(self, load: Load) -> Work:
        return Work(
            MatrixSizes.of(self.head).body * load.tokens,
            attention_operations(self.head.config, load.pairs),
            # 2 for the target's law; 4 for the head's, as the frozen LM head needs no gradient
            (2 + 4) * self.target.lm_head.numel() * load.slots[0],
        )

    def activations(self, tokens: int) -> Activations:
        config = self.head.config
        layers = KeptNumbers.of(config, self.settings.gradient_checkpointing)
        ends = 5 * config.hidden_size  # tensors before and after the layers
        slots = min(tokens, self.chunk_on(is_gpu=True))
        return Activations(
            tokens * (layers.kept + layers.recomputed + ends), 6 * config.vocab_size * slots
        )


class PieceWithLaw(NamedTuple):
    """What soft cross-entropy needs from a piece."""

    mean_rows: Tensor  # [s, D], p^T W: the LM head's rows W, averaged with the target's law p
    laws: list[losses.TargetLaw]  # one law, in a list so that its last reader can free it
    choices: Tensor  # [s], the target's most likely tokens
    which: list[Tensor]  # per step [n_k], as in Piece
    outputs: list[Tensor]  # per step [n_k, D], the head's


class Eagle3Objective(Objective):
    """The training-time test (EAGLE-3, arXiv 2503.01840). The number of the first step's slots
    divides every step's loss."""

    def __init__(self, head: Eagle3Head, target: VocabWeights, settings: Eagle3Train) -> None:
        super().__init__(head, target, settings)
        self.weights = {
            f"loss_at_{k + 1}": settings.unroll_decay**k for k in range(settings.unroll_steps)
        }
        self.ids = head.vocabulary.ids.cpu()  # [Vd]

    def forward(self, batch: Batch) -> StepOutput:
        slots = Slots.of_batch(batch, self.settings.unroll_steps)
        fused = self.head.fuse(batch.taps.flatten(0, 1)[slots.sequence])  # [N, D]
        outputs = list(  # K x [S_k, D]
            unroll(self.head, batch, slots, fused, self.settings.gradient_checkpointing)
        )
        # In step 0, slot p learns the target's law after t_{p+1}.
        states = batch.features.flatten(0, 1)[slots.supervised + 1]  # [S, D]
        # The slots of a piece, over all steps, fill a chunk. All pieces have about the same size.
        most = max(1, self.chunk // self.settings.unroll_steps)
        num_pieces = max(1, -(-len(states) // most))
        at_once = max(1, -(-len(states) // num_pieces))
        # Slots of several steps that learn the same law share a piece, which computes the law once.
        pieces = losses.by_target_state(Piece(states, slots.which, [outputs]), at_once)
        if self.settings.loss == "soft_cross_entropy":
            parts = losses.by_piece(self._soft_cross_entropy_sums, pieces, self._with_law)
        else:
            parts = losses.by_piece(self._sums, pieces)
        sums = losses.added(list(parts))
        # The first step's number of slots divides all losses; each step's own divides its accuracy.
        counts = torch.tensor(slots.sizes).unbind()
        terms = {name: (sums["loss"][k], counts[0]) for k, name in enumerate(self.weights)}
        metrics = {f"accuracy_at_{k + 1}": (sums["hits"][k], n) for k, n in enumerate(counts)}
        metrics["alpha"] = (sums["alpha"], counts[0])
        metrics["in_vocabulary"] = (sums["in_vocabulary"], counts[0])
        return StepOutput(terms, metrics)

    def _with_law(self, piece: Piece) -> PieceWithLaw:
        """The piece with its laws. They need no gradient, so `by_piece` computes them once."""
        law, choices = losses.drafted_law(piece.states, self.target, self.ids)
        # ZeRO-3 gathers the weight only inside the module's own call.
        mean_rows = self.head.lm_head(law.log_p.exp(), is_law=True)
        return PieceWithLaw(mean_rows, [law], choices, piece.which, piece.columns[0])

    def _soft_cross_entropy_sums(self, piece: PieceWithLaw) -> losses.Sums:
        """The sums with H(p, q) = log sum_v exp(w_v h) - (p^T W) h. In this form no step copies a
        law."""
        slots = torch.cat(piece.which).to(piece.choices.device, non_blocking=True)  # [S]
        out = self.head.normed(torch.cat(piece.outputs))  # [S, D]
        normaliser, log_q = losses.LogNormaliser.apply(self.head.lm_head(out).float())
        loss = normaliser - (piece.mean_rows[slots].float() * out.float()).sum(-1)  # [S]
        return self._step_sums(loss, log_q, piece.choices[slots], piece.outputs, piece.laws)

    def _sums(self, piece: Piece) -> losses.Sums:
        """The sums with any other loss. To save memory, the backward pass computes the laws
        again."""
        law, choices = losses.drafted_law(piece.states, self.target, self.ids)
        slots = torch.cat(piece.which).to(choices.device, non_blocking=True)  # [S]
        out = self.head.normed(torch.cat(piece.columns[0]))  # [S, D]
        log_q = self.head.lm_head(out).float().log_softmax(-1)  # [S, Vd]
        of_slots = replace(law, slots=slots)
        loss = losses.LOSSES[self.settings.loss](log_q, of_slots, self.settings)  # [S]
        return self._step_sums(loss, log_q, choices[slots], piece.columns[0], [law])

    def _step_sums(
        self,
        loss: Tensor,
        log_q: Tensor,
        choice: Tensor,
        outputs: list[Tensor],
        laws: list[losses.TargetLaw],
    ) -> losses.Sums:
        """The loss and hits of each step [K], and the first step's alpha and number of choices in
        the draft vocabulary. The arguments hold all steps: loss [S], log q [S, Vd] and the target's
        choices [S]."""
        sizes = [len(output) for output in outputs]
        vocabulary = self.head.vocabulary
        inside = vocabulary.t2d[choice]  # [S]
        if self.settings.mask_outside_vocabulary:
            loss = loss * inside
        total = torch.stack([part.sum() for part in loss.split(sizes)])
        # This comes after the loss: the backward pass recomputes only up to there, so it does not
        # reach `pop`, which frees the law, a second time.
        with torch.no_grad():
            hits = (vocabulary.target_ids(log_q.argmax(-1)) == choice).split(sizes)
            return {
                "loss": total,
                "hits": torch.stack([part.sum() for part in hits]),
                # The first step reads each state once, in order, so its laws need no indices.
                "alpha": losses.acceptance_rate(log_q[: sizes[0]], laws.pop().whole).sum(),
                "in_vocabulary": inside[: sizes[0]].sum(),
            }

    def draft_greedily(self, batch: Batch) -> Iterator[Tensor]:
        head = self.head
        slots = Slots.of_batch(batch, self.settings.eval_depths)
        fused = head.fuse(batch.taps.flatten(0, 1)[slots.sequence])  # [N, D]
        for outputs in unroll(head, batch, slots, fused):
            draft_ids = argmax_in_chunks(head.logits, slots.in_order(outputs), self.chunk)
            # Drafts are in the vocabulary, so a target token outside it is always a miss.
            yield head.vocabulary.target_ids(draft_ids)

    def work(self, load: Load) -> Work:
        slots, all_slots = load.slots[0], sum(load.slots)  # of the first step, of all steps
        sizes = MatrixSizes.of(self.head)
        # fc, keys and values for all tokens; everything else for supervised slots only
        products = sizes.fc * load.tokens + sizes.keys_and_values * (load.tokens - slots)
        products += (sizes.body - sizes.fc) * all_slots
        attention = attention_operations(self.head.config, load.pairs) * self.settings.unroll_steps
        of_lm_head = 6 if self.head.lm_head.weight.requires_grad else 4
        laws = 2 * self.target.lm_head.numel() * slots + of_lm_head * sizes.lm_head * all_slots
        return Work(products, attention, laws)

    def activations(self, tokens: int) -> Activations:
        config = self.head.config
        layers = KeptNumbers.of(config, self.settings.gradient_checkpointing)
        slots = tokens * self.settings.unroll_steps
        return Activations(
            slots * (layers.kept + 7 * config.hidden_size) + tokens * layers.recomputed,
            4 * config.draft_vocab_size * min(slots, self.chunk_on(is_gpu=True)),
        )


# --- heads that draft several tokens ---


class Term(NamedTuple):
    """A term of an objective that has label and law losses."""

    part: str  # "label": cross-entropy to the text's token; "law": the loss to the target's law
    k: int  # number of the head, or position in the block, from 0
    weight: float


def label_and_law_terms(parts: dict[str, float], decays: Sequence[float]) -> dict[str, Term]:
    """A term for each part with a weight and each k; decays holds a factor for each k."""
    terms = {}
    for part, weight in parts.items():
        if weight:
            for k, decay in enumerate(decays):
                terms[f"{part}_at_{k + 1}"] = Term(part, k, weight * decay)
    return terms


@dataclass(frozen=True)
class KeyedDropout:
    """Dropout for head k. Its masks depend only on the row's seed, k and the layer."""

    rate: float
    seeds: tuple[int, ...]  # a seed for each row of the batch
    counts: list[int]  # the number of slots of each row
    k: int

    def __call__(self, x: Tensor, layer: int) -> Tensor:
        """x [S, W] after dropout: the input of a layer, or the output of the last layer."""
        kept = x.new_empty(x.shape)  # [S, W]
        for part, seed in zip(kept.split(self.counts), self.seeds, strict=True):
            keyed = keyed_generator(seed, self.k, layer).initial_seed()
            generator = torch.Generator(x.device).manual_seed(keyed)
            part.bernoulli_(1.0 - self.rate, generator=generator)
        return x * kept / (1.0 - self.rate)


class HeadSlots(NamedTuple):
    """The supervised slots of each head, and the target's states at those of head 0."""

    supervised: Tensor  # [K, B, T-1] bool, on the host: the slots of each head
    states: Tensor  # [S_0, D], the target's states, whose laws head 0 learns
    which: list[Tensor]  # per head [S_k]: for each slot, the index of its law in `states`


def head_slots(batch: Batch, num_heads: int) -> HeadSlots:
    """The slots of num_heads heads; head k = 0, 1, ... predicts t_{p+2+k} at slot p."""
    supervised = torch.stack([batch.supervised(k)[:, :-1] for k in range(num_heads)])  # [K, B, T-1]
    # Numbers the supervised slots of head 0 in order, which is their order in `states`.
    number = supervised[0].flatten().cumsum(0).view_as(supervised[0]) - 1  # [B, T-1]
    # Slot p of head k learns the same law as slot p + k of head 0.
    which = [shifted(number, k)[mask] for k, mask in enumerate(supervised)]
    return HeadSlots(supervised, batch.features[:, 1:][supervised[0]], which)


class MultiTokenObjective(Objective):
    """Medusa and Hydra: the label and law losses of head k = 1, 2, ... times head_decay ** k,
    divided by the number of head k's slots."""

    def __init__(
        self, head: MedusaHead | HydraHead, target: VocabWeights, settings: MultiTokenTrain
    ) -> None:
        super().__init__(head, target, settings)
        self.num_heads: int = head.config.num_heads
        parts = {"label": settings.label_weight, "law": settings.law_weight}
        decays = [settings.head_decay ** (k + 1) for k in range(self.num_heads)]
        self.terms = label_and_law_terms(parts, decays)
        self.weights = {name: term.weight for name, term in self.terms.items()}
        self.is_random = settings.dropout > 0

    def counts(self, batch: Batch) -> dict[str, Tensor]:
        return {name: batch.supervised(term.k).sum() for name, term in self.terms.items()}

    def forward(self, batch: Batch) -> StepOutput:
        slots = head_slots(batch, self.num_heads)
        recomputed = partial(checkpoint, self._outputs, use_reentrant=False)
        run = recomputed if self.settings.gradient_checkpointing else self._outputs
        outputs = run(batch, slots.supervised)
        tokens = [  # K x [S_k]
            shifted(batch.input_ids, 2 + k)[:, :-1][mask] for k, mask in enumerate(slots.supervised)
        ]
        piece = Piece(slots.states, slots.which, [outputs, tokens])
        pieces = losses.by_target_state(piece, max(1, self.chunk // self.num_heads))
        sums = losses.added(list(losses.by_piece(self._sums, pieces)))
        counts = slots.supervised.sum((1, 2))  # [K]
        terms = {
            name: (sums[term.part][term.k], counts[term.k]) for name, term in self.terms.items()
        }
        metrics = {f"accuracy_at_{k + 1}": (sums["hits"][k], n) for k, n in enumerate(counts)}
        metrics["alpha"] = (sums["alpha"], counts[0])
        return StepOutput(terms, metrics)

    def _outputs(self, batch: Batch, supervised: Tensor) -> list[Tensor]:
        """Outputs [S_k, D] of each head before its LM head, at the supervised slots [K, B, T-1]."""
        width = supervised.shape[-1]
        features = self.features(batch)  # [B, T-1, D]
        if isinstance(self.head, HydraHead):
            # Hydra++'s prefix layer attends to the whole text, so it runs before slots are picked.
            features = self.head.prefix(features, torch.arange(width, device=features.device))
        drop = None
        outputs = []
        for k, mask in enumerate(supervised):
            # Rows have no seeds without dropout, and held-out rows never have any.
            if batch.seeds is not None:
                drop = KeyedDropout(self.settings.dropout, batch.seeds, mask.sum(1).tolist(), k)
            path = []
            if isinstance(self.head, HydraHead):
                # Head k reads the embeddings of the tokens t_{p+1} to t_{p+k+1}.
                tokens = [shifted(batch.input_ids, n)[:, :width][mask] for n in range(1, k + 2)]
                embeddings = F.embedding(torch.stack(tokens, 1), self.target.embedding)
                path = [embeddings.flatten(1)]  # [S_k, (k + 1) * D]
            outputs.append(self.head.state(k, features[mask], *path, drop))
        return outputs

    def _sums(self, piece: Piece) -> losses.Sums:
        """Label loss, law loss and hits of each head [K], and the first head's alpha."""
        outputs, tokens = piece.columns
        with torch.no_grad():
            law = losses.TargetLaw.of_logits(self.target.logits(piece.states))
            choice = law.inside.argmax(-1)  # [s]
        log_qs = [  # K x [S_k, V]
            self.head.laws(k, output, self.target).float().log_softmax(-1)
            for k, output in enumerate(outputs)
        ]
        # A part without a weight stays 0; it is no term.
        label = of_law = list(log_qs[0].new_zeros(len(log_qs)))
        if self.settings.label_weight:
            label = [
                F.nll_loss(*pair, reduction="sum") for pair in zip(log_qs, tokens, strict=True)
            ]
        if self.settings.law_weight:
            of_law = []
            for log_q, slots in zip(log_qs, piece.which, strict=True):
                loss = losses.LOSSES[self.settings.loss]
                of_law.append(loss(log_q, replace(law, slots=slots), self.settings).sum())
        with torch.no_grad():
            hits = [
                (log_q.argmax(-1) == choice[slots]).sum()
                for log_q, slots in zip(log_qs, piece.which, strict=True)
            ]
            first_law = replace(law, slots=piece.which[0]).whole
            alpha = losses.acceptance_rate(log_qs[0], first_law).sum()
        sums = {"label": label, "law": of_law, "hits": hits}
        return {"alpha": alpha} | {name: torch.stack(parts) for name, parts in sums.items()}

    def draft_greedily(self, batch: Batch) -> Iterator[Tensor]:
        num_heads = min(self.settings.eval_depths, self.num_heads)
        outputs = self._outputs(batch, head_slots(batch, num_heads).supervised)
        for k, output in enumerate(outputs):
            logits = partial(self.head.laws, k, vocab=self.target)
            yield argmax_in_chunks(logits, output, self.chunk)

    def work(self, load: Load) -> Work:
        slots = load.slots[0]
        shared = self.target.lm_head.numel()
        sizes = MatrixSizes.of(self.head)
        # 6 for own LM heads, which are trained; 4 for the target's, which is frozen
        of_heads = 6 * sizes.lm_head or 4 * shared * self.num_heads
        attention = attention_operations(self.head.config, load.pairs)
        return Work(sizes.body * slots, attention, (2 * shared + of_heads) * slots)
