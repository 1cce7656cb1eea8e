"""The objective of block heads: blocks at random places of answers, and the target's law at each of their places."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from aerie.configs.schema.heads import BlockTrain
from aerie.data.batches import Batch
from aerie.model.heads.block import BlockHead
from aerie.model.target import VocabWeights
from aerie.train import losses
from aerie.train.losses import SumsAndCounts, Totals
from aerie.train.objectives import Objective, StepOutput
from aerie.train.workload import (
    Activations,
    KeptNumbers,
    Load,
    MatrixSizes,
    Work,
    attention_width,
)


class BlockObjective(Objective):
    """Place k's law and label loss times place_decay ** (k - 1), divided by all supervised places (arXiv 2602.06036).

    A block at anchor a drafts t_{a+1}, t_{a+2}, ...; place k is supervised where t_a and t_{a+k} are of one turn.
    """

    is_random = True

    def __init__(self, head: BlockHead, target: VocabWeights, settings: BlockTrain) -> None:
        super().__init__(head, target, settings)
        self.places = range(head.config.num_places)
        parts = {"law": settings.law_weight, "label": settings.label_weight}
        self.terms = {
            f"{part}_at_{k + 1}": (part, k) for part in parts if parts[part] for k in self.places
        }
        self.weights = {
            name: parts[part] * settings.place_decay**k for name, (part, k) in self.terms.items()
        }
        head.gradient_checkpointing = settings.gradient_checkpointing

    def blocks(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Anchors [B, A], with zeros after a row's last, and supervised places [B, A, K] bool, on the host.

        Rows' seeds draw at most `train.anchors` each; without seeds (evaluation) they are evenly spread.
        """
        # A row's blocks depend on its seed alone: not on the process that draws them, nor on a restart.
        drawn, limit = [], self.settings.anchors
        for row, slots in enumerate(
            batch.supervised()
        ):  # slot p: t_{p+1} and t_{p+2} are of one turn
            found = slots.nonzero()[:, 0] + 1
            count = min(len(found), limit)
            if batch.seeds is None:
                chosen = torch.linspace(0, max(len(found) - 1, 0), count).round().long()
            else:
                seeded = torch.Generator().manual_seed(batch.seeds[row])
                chosen = torch.randperm(len(found), generator=seeded)[:count].sort().values
            drawn.append(found[chosen])
        # The extra row makes A >= 1: a process without supervised tokens still calls the head.
        anchors = pad_sequence([*drawn, torch.zeros(1, dtype=torch.long)], batch_first=True)[:-1]
        places = anchors[..., None] + 1 + torch.arange(len(self.places))  # [B, A, K]
        turn_ids = F.pad(batch.turn_ids, (0, len(self.places)))
        own, asked = (turn_ids.gather(1, at.flatten(1)).view_as(at) for at in (anchors, places))
        return anchors, (asked == own[..., None]) & (anchors > 0)[..., None]

    def counts(self, batch: Batch) -> dict[str, Tensor]:
        return dict.fromkeys(self.weights, self.blocks(batch)[1].sum())

    def forward(self, batch: Batch) -> StepOutput:
        _, asked, slots = self._drafted(batch)
        states, laws, *columns = slots
        pieces = losses.by_target_state(
            states, laws, columns, max(1, self.chunk // len(self.places))
        )
        law, label, hits, alpha = losses.summed([*losses.by_piece(self._sums, pieces)])
        count, counts, totals = asked.sum(), asked.sum((0, 1)), {"law": law, "label": label}
        terms = {name: (totals[part][k], count) for name, (part, k) in self.terms.items()}
        metrics = {f"accuracy_at_{k + 1}": (hits[k], counts[k]) for k in self.places}
        return StepOutput(
            terms, {**metrics, **{f"alpha_at_{k + 1}": (alpha[k], counts[k]) for k in self.places}}
        )

    def _drafted(self, batch: Batch) -> tuple[list[Tensor], Tensor, tuple[Any, ...]]:
        """(each place's blocks [S_k] that supervise it; supervised places [B, A, K]; arguments of by_target_state: the
        target's states, which of them each slot asks for, and per place outputs, previous tokens and own tokens)."""
        (anchors, asked), device = self.blocks(batch), batch.input_ids.device
        known = anchors.to(device, non_blocking=True)
        tokens = batch.input_ids.gather(1, known)
        outputs = self.head(tokens, batch.taps, known, self.target.embedding).flatten(
            0, 1
        )  # [B * A, K, D]
        which = [asked[..., k].flatten().nonzero()[:, 0] for k in self.places]
        flat = (torch.arange(len(anchors))[:, None] * batch.input_ids.shape[1] + anchors).flatten()
        # place k drafts t_{a+k} (k = 1, ...): the target's law of it is at a + k - 1, where the token before stands
        before = [flat[blocks] + k for k, blocks in enumerate(which)]
        # Blocks overlap: a state that several places ask for has its law computed once.
        needed, laws = torch.cat(before).unique(return_inverse=True)
        moved = [
            [x.to(device, non_blocking=True) for x in some] for some in (which, before, [needed])
        ]
        ids, sizes = batch.input_ids, [len(blocks) for blocks in which]
        n = self.head.config.markov_order  # the first token also fills the places before it
        ends = (
            torch.cat([ids[:, :1].expand(-1, n - 1), ids], dim=1).unfold(1, n, 1).flatten(0, 1)
        )  # [B * T, n]
        columns = [[outputs[blocks, k] for k, blocks in enumerate(moved[0])]]
        columns += [[ends[at] for at in moved[1]], [ids.flatten()[at + 1] for at in moved[1]]]
        return (
            which,
            asked,
            (batch.features.flatten(0, 1)[moved[2][0]], [*laws.split(sizes)], *columns),
        )

    def _laws(self, outputs: Tensor, before: Tensor) -> Tensor:
        """log q [S, V] of outputs [S, D]."""
        # The target's LM head stays in its own dtype, as in decoding.
        with torch.autocast(outputs.device.type, enabled=False):
            outputs = outputs.float()
            return self.head.correct(self.target.logits(outputs), before, outputs).log_softmax(-1)

    def _sums(
        self,
        states: Tensor,
        which: list[Tensor],
        outputs: list[Tensor],
        before: list[Tensor],
        labels: list[Tensor],
    ) -> Totals:
        """Sums of law loss, label loss, hits and alpha, [K] each."""
        with torch.no_grad(), torch.autocast(states.device.type, enabled=False):
            law = losses.TargetLaw.of_logits(self.target.logits(states))
        slots, sizes = (
            torch.cat(which).to(states.device, non_blocking=True),
            [len(some) for some in outputs],
        )
        log_q, law = (
            self._laws(torch.cat(outputs), torch.cat(before)),
            replace(law, slots=slots),
        )  # [S, V]
        of_law = of_label = log_q.new_zeros(len(log_q))
        if self.settings.law_weight:
            of_law = losses.LOSSES[self.settings.loss](log_q, law, self.settings)
        if self.settings.label_weight:
            of_label = F.nll_loss(log_q, torch.cat(labels), reduction="none")
        with torch.no_grad():
            hits = log_q.argmax(-1) == law.log_p.argmax(-1)[slots]
            alpha = losses.acceptance_rate(log_q, law.whole)
        columns = (x.split(sizes) for x in (of_law, of_label, hits, alpha))
        return tuple(torch.stack([part.sum() for part in column]) for column in columns)

    def measure(self, batch: Batch) -> SumsAndCounts:
        """Of greedy chains from the anchors; each place is given the text's own previous tokens."""
        which, asked, (states, laws, outputs, before, _) = self._drafted(batch)
        choices = self.choose(states)
        hits = torch.zeros(asked.shape[:2].numel(), self.settings.eval_depths)
        for k in self.places[: self.settings.eval_depths]:
            pieces = zip(outputs[k].split(self.chunk), before[k].split(self.chunk), strict=True)
            drafted = torch.cat([self._laws(*piece).argmax(-1) for piece in pieces])
            hits[which[k], k] = (drafted == choices[laws[k].to(drafted.device)]).float().cpu()
        return {**self(batch).sums(), "chain": (hits.cumprod(1).sum(), asked[..., 0].sum())}

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
        laws += (4 * shared + 3 * sizes.path_correction) * blocks * config.num_places
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
