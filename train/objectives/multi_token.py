"""The objective of Medusa and Hydra heads: labels and laws for each of the tokens to come."""

from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from aerie.configs.schema.train import MultiTokenTrain
from aerie.data.batches import Batch, keyed_generator
from aerie.model.heads.multi_token import HydraHead, MedusaHead
from aerie.model.target import VocabWeights
from aerie.train import losses
from aerie.train.objectives.base import Objective, StepOutput, Sums, chain_sums, likeliest, shifted, target_choices

Totals = tuple[Tensor, ...]  # sums of label loss, law loss and hits [H]; the first head's alpha


@dataclass(frozen=True)
class KeyedDropout:
    """Drops entries of x [S, W], whose slots are those of one row after the other.

    The masks are a function of seed, epoch, row and place: no neighbour, process or restart can move them.
    """

    rate: float
    seeds: tuple[int, ...]  # of the rows
    counts: tuple[int, ...]  # slots of each row
    branch: int = 0  # of the head

    def __call__(self, x: Tensor, place: int) -> Tensor:
        """x with each entry zero by the rate, else divided by its complement; other places have other masks."""
        kept = x.new_empty(x.shape)  # [S, W]
        for part, seed in zip(kept.split(self.counts), self.seeds, strict=True):
            # A generator per row: a row keeps its mask whatever stands beside it in the batch.
            keyed = keyed_generator(seed, self.branch, place).initial_seed()
            part.bernoulli_(1.0 - self.rate, generator=torch.Generator(x.device).manual_seed(keyed))
        return x * kept / (1.0 - self.rate)


class MultiTokenObjective(Objective):
    """The sum over heads k = 1, 2, ... of head_decay ** k times the label loss and the law loss, as they weigh.

    Each head's sums are divided by its own supervised slots: its loss is a mean over what it predicts.
    """

    head: MedusaHead | HydraHead
    target: VocabWeights
    settings: MultiTokenTrain

    def __init__(self, head: MedusaHead | HydraHead, target: VocabWeights, settings: MultiTokenTrain) -> None:
        super().__init__(head, target, settings)
        self.num_heads: int = head.config.num_heads
        # A term of weight zero is not computed.
        self.terms = {  # name -> which sum, of which head
            f"{part}_at_{k + 1}": (part, k)
            for part, weight in (("label", settings.label_weight), ("law", settings.law_weight))
            for k in range(self.num_heads)
            if weight
        }
        parts = {"label": settings.label_weight, "law": settings.law_weight}
        self.weights = {name: parts[part] * settings.head_decay ** (k + 1) for name, (part, k) in self.terms.items()}

    # Seeds and not masks travel with the batch: a mask is drawn on the device, as wide as the block that it is for.
    def prepare(self, batch: Batch, epoch: int) -> Batch:
        batch = super().prepare(batch, epoch)
        if self.settings.dropout == 0.0:
            return batch
        seeds = (keyed_generator(self.settings.seed, epoch, row).initial_seed() for row in batch.rows)
        return replace(batch, seeds=tuple(seeds))

    def counts(self, batch: Batch) -> dict[str, Tensor]:
        counts = [batch.supervised(k).sum() for k in range(self.num_heads)]
        return {name: counts[k] for name, (_, k) in self.terms.items()}

    def slots(self, batch: Batch) -> Tensor:
        """Where each head is supervised [H, B, T-1]; those of a head are among those of the one before."""
        return torch.stack([batch.supervised(k)[:, :-1] for k in range(self.num_heads)])

    def forward(self, batch: Batch) -> StepOutput:
        assert batch.features is not None
        slots = self.slots(batch)
        if self.settings.gradient_checkpointing and torch.is_grad_enabled():
            outputs = checkpoint(self._outputs, batch, slots, use_reentrant=False)
        else:
            outputs = self._outputs(batch, slots)
        # The target's states at p + 1 of the first head's slots [S0, D]; a later head asks for some of the same ones.
        states = batch.features[:, 1:][slots[0]]
        number = slots[0].flatten().cumsum(0).view_as(slots[0]) - 1  # [B, T-1], into the states
        width = slots.shape[-1]
        which = [shifted(number, k)[asked] for k, asked in enumerate(slots)]
        tokens = [shifted(batch.input_ids, 2 + k)[:, :width][asked] for k, asked in enumerate(slots)]
        at_once = max(1, self.settings.loss_chunk_slots // self.num_heads)
        pieces = losses.by_target_state(states, which, [outputs, tokens], at_once)
        sums = losses.remade(self._sums, pieces)
        label, law, hits, alpha = losses.added([sums(*piece) for piece in pieces])
        counts = [batch.supervised(k).sum() for k in range(self.num_heads)]
        totals = {"label": label, "law": law}
        return StepOutput(
            {name: (totals[part][k], counts[k]) for name, (part, k) in self.terms.items()},
            {
                **{f"accuracy_at_{k + 1}": (hits[k], count) for k, count in enumerate(counts)},
                "alpha": (alpha, counts[0]),
            },
        )

    def _outputs(self, batch: Batch, slots: Tensor) -> list[Tensor]:
        """What each head's LM head is given at its slots, [S_k, D] for each of H."""
        assert batch.features is not None
        width, made = slots.shape[-1], []
        features = batch.features[:, :-1].to(next(self.head.parameters()).dtype)  # [B, T-1, D]
        if isinstance(self.head, HydraHead):
            features = self.head.prefix(features, (0, width))
        for k, asked in enumerate(slots):
            drop = None
            if self.settings.dropout and batch.seeds is not None:
                drop = KeyedDropout(self.settings.dropout, batch.seeds, tuple(asked.sum(1).tolist()), k)
            if isinstance(self.head, HydraHead):
                # Head k is given the embeddings of the tokens from t_{p+k+1} back to t_{p+1}.
                tokens = [shifted(batch.input_ids, 1 + back)[:, :width][asked] for back in range(k + 1)]
                embeddings = torch.cat([F.embedding(ids, self.target.embedding) for ids in tokens], dim=-1)
                made.append(self.head.state(k, features[asked], embeddings, drop))
            else:
                made.append(self.head.state(k, features[asked], drop))
        return made

    def _sums(self, states: Tensor, which: list[Tensor], outputs: list[Tensor], tokens: list[Tensor]) -> Totals:
        with torch.no_grad():
            target = losses.TargetLaw.of_logits(self.target.logits(states))
            choice = target.inside.argmax(-1)
        # All heads are compared with the same target states, whose laws are made once.
        laws = [losses.log_law(self.head.laws(k, out, self.target)) for k, out in enumerate(outputs)]  # [S_k, V]
        label = law = laws[0].new_zeros(len(laws))
        if self.settings.label_weight:
            label = torch.stack([F.nll_loss(q, t, reduction="sum") for q, t in zip(laws, tokens, strict=True)])
        if self.settings.law_weight:
            loss = losses.LOSSES[self.settings.loss]
            found = [loss(q, target.at(at), self.settings).sum() for q, at in zip(laws, which, strict=True)]
            law = torch.stack(found)
        # Behind the loss: where that is made again for the backward pass, this is not.
        with torch.no_grad():
            hits = torch.stack([(q.argmax(-1) == choice[at]).sum() for q, at in zip(laws, which, strict=True)])
            alpha = losses.acceptance(laws[0], target.at(which[0]).whole).sum()
        return label, law, hits, alpha

    def measure(self, batch: Batch) -> Sums:
        """A greedy chain of at most num_heads drafted tokens."""
        chunk, slots = self.settings.loss_chunk_slots, self.slots(batch)
        choices = target_choices(batch, lambda states: likeliest(self.target.logits, states, chunk))  # [B, T]
        hits = torch.zeros(slots.shape, device=slots.device)  # [H, B, T-1]
        for k, output in enumerate(self._outputs(batch, slots)):
            drafted = likeliest(partial(self.head.laws, k, vocab=self.target), output, chunk)
            hits[k][slots[k]] = (drafted == shifted(choices, 1 + k)[:, : slots.shape[-1]][slots[k]]).float()
        depths = min(self.settings.eval_depths, self.num_heads)
        return {**self(batch).sums(), **chain_sums(hits[:depths], slots[:depths].float())}
