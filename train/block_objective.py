"""The objective of block heads: blocks at random anchors in answers, and the target's law at each
position of a block."""

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from aerie.configs.schema.heads import BlockTrain
from aerie.data.batches import Batch
from aerie.model.heads.block import BlockHead
from aerie.model.target import VocabWeights
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
    """Blocks and what they learn; k = 0, 1, ... counts the drafted positions of a block."""

    supervised: Tensor  # [B, A, K] bool, on the host
    blocks: list[Tensor]  # of each k, on the host [S_k]: the blocks of B * A that are supervised
    piece: Piece  # columns: outputs [S_k, D], the tokens before [S_k, n], labels [S_k]


class BlockObjective(Objective):
    """Position k's law and label loss times place_decay ** k (k = 0, 1, ...), divided by all
    supervised positions (arXiv 2602.06036).

    A block at anchor a drafts t_{a+1}, t_{a+2}, ...; t_{a+1+k} is supervised where it is of
    the same turn as t_a.
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
        """Anchors [B, A], with zeros after a row's last, and supervised positions [B, A, K] bool;
        both on the host.

        Rows' seeds draw at most `train.anchors` each; without seeds (in evaluation) they are evenly
        spread."""
        # A row's blocks depend on its seed alone: not on the process that draws them, nor on when
        # it was started.
        drawn = []
        for row, slots in enumerate(batch.supervised()):
            # Slot p: t_{p+1} and t_{p+2} are of one turn, so a block at p + 1 can learn something.
            possible = slots.nonzero()[:, 0] + 1
            count = min(len(possible), self.settings.anchors)
            if batch.seeds is None:
                chosen = torch.linspace(0, max(len(possible) - 1, 0), count).round().long()
            else:
                generator = torch.Generator().manual_seed(batch.seeds[row])
                order = torch.randperm(len(possible), generator=generator)
                chosen = order[:count].sort().values
            drawn.append(possible[chosen])
        # The extra row makes A >= 1: a process without supervised tokens still calls the head.
        extra = torch.zeros(1, dtype=torch.long)
        anchors = pad_sequence([*drawn, extra], batch_first=True)[:-1]  # [B, A]
        drafted = anchors[..., None] + 1 + torch.arange(len(self.depths))  # [B, A, K] positions
        turn_ids = F.pad(batch.turn_ids, (0, len(self.depths)))
        # Beyond the row's end the turn is 0, which no anchor is of.
        of_anchor = turn_ids.gather(1, anchors)  # [B, A]
        of_drafted = turn_ids.gather(1, drafted.flatten(1)).view_as(drafted)  # [B, A, K]
        is_block = anchors > 0  # the others fill up a row
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
        """Draws blocks and runs the head over them."""
        device = batch.input_ids.device
        ids = batch.input_ids.flatten()  # [B * T]
        anchors, supervised = self.draw_blocks(batch)
        # All indices are made on the host, from the turn ids: no step waits for the device.
        blocks = [supervised[..., k].flatten().nonzero()[:, 0] for k in self.depths]
        # (1) the head
        at = anchors.to(device, non_blocking=True)
        tokens = batch.input_ids.gather(1, at)  # [B, A]
        # Of a block only the drafting rows come back: K states each.
        states = self.head(tokens, batch.taps, at, self.target.embedding)  # [B, A, K, D]
        states = states.flatten(0, 1)  # [B * A, K, D]
        # (2) the target's laws. That of t_{a+1+k} is at a + k, where the token before it stands.
        # Blocks overlap: a law that several of them learn is computed once.
        row_starts = torch.arange(0, len(ids), batch.input_ids.shape[1])  # [B]
        flat_anchors = (row_starts[:, None] + anchors).flatten()
        before = [flat_anchors[numbers] + k for k, numbers in enumerate(blocks)]  # K x [S_k]
        needed, which = torch.cat(before).unique(return_inverse=True)
        # (3) what each position is given, and what it shall draft
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
        """The n tokens [B * T, n] up to each position; they correct the law of the next one."""
        n = self.head.config.markov_order
        # The first token also fills what is before it.
        filled = torch.cat([ids[:, :1].expand(-1, n - 1), ids], dim=1)  # [B, T + n - 1]
        return filled.unfold(1, n, 1).flatten(0, 1)

    def _laws(self, outputs: Tensor, before: Tensor) -> Tensor:
        """log q [S, V] of outputs [S, D], after tokens [S, n]."""
        # The target's LM head stays in its own dtype, as in decoding.
        with torch.autocast(outputs.device.type, enabled=False):
            outputs = outputs.float()
            return self.head.correct(self.target.logits(outputs), before, outputs).log_softmax(-1)

    def _sums(self, piece: Piece) -> losses.Sums:
        """Sums of each position [K]."""
        outputs, previous, labels = piece.columns
        with torch.no_grad(), torch.autocast(piece.states.device.type, enabled=False):
            law = losses.TargetLaw.of_logits(self.target.logits(piece.states))
        # All positions in one call of the LM head; `sizes` splits them again.
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
        """Measures greedy chains from the anchors; each position gets the text's earlier tokens."""
        slots = self._draft(batch)
        outputs, previous, _ = slots.piece.columns
        choices = self.choose(slots.piece.states)
        # A block's chain ends at its first miss, or where its turn does.
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
        # attention's two products are counted like weights: a row meets the keys of a row of text
        products = 2 * config.num_hidden_layers * attention_width(config)
        products *= load.tokens // load.rows
        # fc, keys and values of all tokens; the rest of the blocks' rows alone
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
        # not only the blocks' rows: fc, keys and values of the text
        kv_width = config.num_key_value_heads * config.head_dim
        of_text = tokens * (5 * config.hidden_size + 2 * kv_width * config.num_hidden_layers)
        ends = 7 * config.hidden_size + of_text // rows
        numbers = rows * (layers.kept + ends) + tokens * layers.recomputed
        # a chunk counts the target's states, which the slots of several blocks share
        chunk = self.chunk_on(is_gpu=True) * max(1, rows // tokens) // config.block_size
        return Activations(numbers, 6 * config.vocab_size * min(rows, chunk))
