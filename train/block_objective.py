"""The objective of block heads: blocks start at random anchors in answers, and each position of a
block learns the target's law."""

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from aerie.configs.schema.heads import BlockTrain
from aerie.data.batches import Batch
from aerie.model.heads.block import BlockHead
from aerie.model.vocab_weights import VocabWeights
from aerie.train import losses
from aerie.train.losses import Piece, SumsAndCounts
from aerie.train.objectives import Objective, StepOutput, label_and_law_terms
from aerie.train.workload import (
    Activations,
    KeptNumbers,
    Load,
    MatrixSizes,
    Work,
    attention_width,
)


class BlockSlots(NamedTuple):
    """Blocks and what they learn. k = 0, 1, ... counts the drafted positions of a block."""

    supervised: Tensor  # [B, A, K] bool, on the host
    blocks: list[Tensor]  # per k [S_k], on the host: the supervised ones of the B * A blocks
    piece: Piece  # its columns: outputs [S_k, D], tokens before [S_k, n], labels [S_k]


class BlockObjective(Objective):
    """Label and law losses of position k = 0, 1, ... times place_decay ** k, divided by the number
    of supervised positions (arXiv 2602.06036).

    A block at anchor a drafts t_{a+1}, t_{a+2}, ... Position k is supervised if t_{a+1+k} is in the
    turn of t_a.
    """

    is_random = True

    def __init__(self, head: BlockHead, target: VocabWeights, settings: BlockTrain) -> None:
        super().__init__(head, target, settings)
        self.depths = range(head.config.num_drafted)
        parts = {"law": settings.law_weight, "label": settings.label_weight}
        self.terms = label_and_law_terms(parts, [settings.place_decay**k for k in self.depths])
        self.weights = {name: term.weight for name, term in self.terms.items()}
        head.gradient_checkpointing = settings.gradient_checkpointing

    def draw_blocks(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Anchors [B, A] and supervised positions [B, A, K] bool, both on the host. Zeros fill up a
        row's anchors.

        Each row's seed draws at most `train.anchors` of its slots. Without seeds, in evaluation,
        the anchors are evenly spread.
        """
        # A row's blocks depend only on its seed: any process draws the same ones, at any time.
        drawn = []
        for row, slots in enumerate(batch.supervised()):
            # At slot p, t_{p+1} and t_{p+2} share a turn, so a block at p + 1 has a token to learn.
            possible = slots.nonzero()[:, 0] + 1
            count = min(len(possible), self.settings.anchors)
            if batch.seeds is None:
                chosen = torch.linspace(0, max(len(possible) - 1, 0), count).round().long()
            else:
                generator = torch.Generator().manual_seed(batch.seeds[row])
                order = torch.randperm(len(possible), generator=generator)
                chosen = order[:count].sort().values
            drawn.append(possible[chosen])
        # The extra row makes A >= 1: a process without supervised tokens must call the head, too.
        extra = torch.zeros(1, dtype=torch.long)
        anchors = pad_sequence([*drawn, extra], batch_first=True)[:-1]  # [B, A]
        drafted = anchors[..., None] + 1 + torch.arange(len(self.depths))  # [B, A, K] positions
        turn_ids = F.pad(batch.turn_ids, (0, len(self.depths)))
        # Beyond the row's end the turn is 0, and no anchor is in turn 0.
        of_anchor = turn_ids.gather(1, anchors)  # [B, A]
        of_drafted = turn_ids.gather(1, drafted.flatten(1)).view_as(drafted)  # [B, A, K]
        is_block = anchors > 0  # zeros only fill up a row
        return anchors, (of_drafted == of_anchor[..., None]) & is_block[..., None]

    def counts(self, batch: Batch) -> dict[str, Tensor]:
        _, supervised = self.draw_blocks(batch)
        return dict.fromkeys(self.weights, supervised.sum())

    def forward(self, batch: Batch) -> StepOutput:
        slots = self._draft(batch)
        pieces = losses.by_target_state(slots.piece, max(1, self.chunk // len(self.depths)))
        sums = losses.added(list(losses.by_piece(self._sums, pieces)))
        count = slots.supervised.sum()
        terms = {name: (sums[term.part][term.k], count) for name, term in self.terms.items()}
        counts = slots.supervised.sum((0, 1))  # [K]
        metrics = {f"accuracy_at_{k + 1}": (sums["hits"][k], counts[k]) for k in self.depths}
        metrics |= {f"alpha_at_{k + 1}": (sums["alpha"][k], counts[k]) for k in self.depths}
        return StepOutput(terms, metrics)

    def _draft(self, batch: Batch) -> BlockSlots:
        """Draws blocks, and runs the head over them."""
        device = batch.input_ids.device
        ids = batch.input_ids.flatten()  # [B * T]
        anchors, supervised = self.draw_blocks(batch)
        # The host makes all indices from the turn ids, so no step waits for the device.
        blocks = [supervised[..., k].flatten().nonzero()[:, 0] for k in self.depths]  # K x [S_k]
        # (1) the head
        at = anchors.to(device, non_blocking=True)
        tokens = batch.input_ids.gather(1, at)  # [B, A]
        # The head returns only the drafting rows of a block: K states each.
        states = self.head(tokens, batch.taps, at, self.target.embedding)  # [B, A, K, D]
        states = states.flatten(0, 1)  # [B * A, K, D]
        # (2) the target's laws: that of t_{a+1+k} comes from the state of the token before it.
        # Blocks overlap, and `unique` makes sure that a law is computed once.
        row_starts = torch.arange(0, len(ids), batch.input_ids.shape[1])  # [B]
        flat_anchors = (row_starts[:, None] + anchors).flatten()  # [B * A], positions in B * T
        before = [flat_anchors[numbers] + k for k, numbers in enumerate(blocks)]  # K x [S_k]
        needed, which = torch.cat(before).unique(return_inverse=True)  # [S], [sum of S_k]
        # (3) for each position: its output, the tokens before it, and the token that it learns
        windows = self._last_tokens(batch.input_ids)  # [B * T, n]
        outputs = []
        previous = []
        labels = []
        for k, (numbers, positions) in enumerate(zip(blocks, before, strict=True)):
            on_device = positions.to(device, non_blocking=True)
            outputs.append(states[numbers.to(device, non_blocking=True), k])
            previous.append(windows[on_device])
            labels.append(ids[on_device + 1])
        true = batch.features.flatten(0, 1)[needed.to(device, non_blocking=True)]
        of_depths = list(which.split([len(numbers) for numbers in blocks]))
        return BlockSlots(supervised, blocks, Piece(true, of_depths, [outputs, previous, labels]))

    def _last_tokens(self, ids: Tensor) -> Tensor:
        """The last n tokens [B * T, n] up to each position, which correct the law of the next
        token."""
        n = self.head.config.markov_order
        # Copies of the first token stand before the text.
        filled = torch.cat([ids[:, :1].expand(-1, n - 1), ids], dim=1)  # [B, T + n - 1]
        return filled.unfold(1, n, 1).flatten(0, 1)

    def _laws(self, outputs: Tensor, before: Tensor) -> Tensor:
        """log q [S, V] of outputs [S, D], corrected by the tokens [S, n] before them."""
        # The target's LM head keeps its own dtype, as in decoding.
        with torch.autocast(outputs.device.type, enabled=False):
            outputs = outputs.float()
            return self.head.correct(self.target.logits(outputs), before, outputs).log_softmax(-1)

    def _sums(self, piece: Piece) -> losses.Sums:
        """The sums of each position [K]."""
        outputs, previous, labels = piece.columns
        with torch.no_grad(), torch.autocast(piece.states.device.type, enabled=False):
            law = losses.TargetLaw.of_logits(self.target.logits(piece.states))
        # One call of the LM head serves all positions; `sizes` splits them again.
        slots = torch.cat(piece.which).to(piece.states.device, non_blocking=True)  # [S]
        law = replace(law, slots=slots)
        log_q = self._laws(torch.cat(outputs), torch.cat(previous))  # [S, V]
        of_law = of_label = log_q.new_zeros(len(log_q))
        if self.settings.law_weight:
            of_law = losses.LOSSES[self.settings.loss](log_q, law, self.settings)
        if self.settings.label_weight:
            of_label = F.nll_loss(log_q, torch.cat(labels), reduction="none")
        with torch.no_grad():
            hits = log_q.argmax(-1) == law.log_p.argmax(-1)[slots]
            alpha = losses.acceptance_rate(log_q, law.whole)
        columns = {"law": of_law, "label": of_label, "hits": hits, "alpha": alpha}
        sizes = [len(output) for output in outputs]
        for name, column in columns.items():
            columns[name] = torch.stack([part.sum() for part in column.split(sizes)])
        return columns

    def measure(self, batch: Batch) -> SumsAndCounts:
        """The sums of `forward`, and those of greedy chains from the anchors. Each position is
        corrected by the text's own tokens, not by drafted ones."""
        slots = self._draft(batch)
        outputs, previous, _ = slots.piece.columns
        choices = self.choose(slots.piece.states)
        # A block's chain ends at its first miss or at the end of its turn. hits: [B * A, depths]
        hits = torch.zeros(slots.supervised.shape[:2].numel(), self.settings.eval_depths)
        for k in self.depths[: self.settings.eval_depths]:
            parts = zip(outputs[k].split(self.chunk), previous[k].split(self.chunk), strict=True)
            drafted = torch.cat([self._laws(*part).argmax(-1) for part in parts])
            wanted = choices[slots.piece.which[k].to(choices.device)]
            hits[slots.blocks[k], k] = (drafted == wanted).float().cpu()
        sums = self(batch).sums()
        return {**sums, "chain": (hits.cumprod(1).sum(), slots.supervised[..., 0].sum())}

    def work(self, load: Load) -> Work:
        config = self.head.config
        sizes = MatrixSizes.of(self.head)
        shared = self.target.lm_head.numel()
        blocks = min(load.slots[0], load.rows * self.settings.anchors)
        # Attention's two products count like weights, as many as the keys of a row of text.
        products = 2 * config.num_hidden_layers * attention_width(config)
        products *= load.tokens // load.rows
        # fc, keys and values for all tokens; everything else for the blocks' rows only
        of_text = (sizes.fc + sizes.keys_and_values) * load.tokens
        of_blocks = (sizes.body - sizes.fc + products) * blocks * config.block_size
        laws = 2 * shared * load.slots[0]
        laws += (4 * shared + 3 * sizes.path_correction) * blocks * config.num_drafted
        return Work(of_text + of_blocks, 0, laws)

    def activations(self, tokens: int) -> Activations:
        config = self.head.config
        layers = KeptNumbers.of(config, self.settings.gradient_checkpointing)
        blocks = min(tokens, self.settings.batch_size * self.settings.anchors)
        rows = blocks * config.block_size
        # fc, keys and values of the text, beside those of the blocks' rows
        kv_width = config.num_key_value_heads * config.head_dim
        of_text = tokens * (5 * config.hidden_size + 2 * kv_width * config.num_hidden_layers)
        ends = 7 * config.hidden_size + of_text // rows
        numbers = rows * (layers.kept + ends) + tokens * layers.recomputed
        # A chunk counts the target's states, and slots of several blocks share a state.
        chunk = self.chunk_on(is_gpu=True) * max(1, rows // tokens) // config.block_size
        return Activations(numbers, 6 * config.vocab_size * min(rows, chunk))
