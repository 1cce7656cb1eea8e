"""Dropout whose masks are a function of seed, epoch, row and place: no neighbour, process or restart can move them."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from aerie.configs.schema.train import TrainConfig
from aerie.data.batches import Batch, empty_like, keyed_generator
from aerie.model.heads.multi_token import HydraHead, MedusaHead
from aerie.model.target import TargetEnds
from aerie.train import losses
from aerie.train.evaluate import chain_sums, likeliest, shifted, target_choices
from aerie.train.log import most_of_all
from aerie.train.objectives.step import StepOutput, Sums


@dataclass(frozen=True)
class KeyedDropout:
    """Drops entries of x [S, W], whose slots are those of one row after the other."""

    rate: float
    seeds: tuple[int, ...]  # of the rows
    counts: tuple[int, ...]  # slots of each row
    branch: int = 0

    @classmethod
    def of(cls, batch: Batch, slots: Tensor, rate: float, branch: int) -> "KeyedDropout | None":
        """For the chosen slots [B, T] of a batch and one branch of a head; None where nothing is to be dropped."""
        if rate == 0.0 or batch.seeds is None:
            return None
        return cls(rate, batch.seeds, tuple(slots.sum(1).tolist()), branch)

    def __call__(self, x: Tensor, place: int) -> Tensor:
        """x with each entry zero by the rate, else divided by its complement; other places have other masks."""
        kept = x.new_empty(x.shape)  # [S, W]
        for part, seed in zip(kept.split(self.counts), self.seeds, strict=True):
            own = keyed_generator(seed, self.branch, place).initial_seed()
            part.bernoulli_(1.0 - self.rate, generator=torch.Generator(x.device).manual_seed(own))
        return x * kept / (1.0 - self.rate)


def row_seeds(seed: int, epoch: int, rows: tuple[int, ...]) -> tuple[int, ...]:
    """What Batch.seeds holds in an epoch."""
    return tuple(keyed_generator(seed, epoch, row).initial_seed() for row in rows)


Totals = tuple[Tensor, Tensor, Tensor, Tensor]  # sums of label loss, law loss and hits [H]; the first head's alpha


class MultiTokenModule(nn.Module):
    """A head whose forward returns sums: under ZeRO-3 its LM heads are only whole inside their own forward."""

    def __init__(self, head: MedusaHead | HydraHead, config: TrainConfig) -> None:
        super().__init__()
        self.head = head
        self.settings = config
        self.loss = losses.loss_named(config.loss, config)

    @property
    def config(self) -> Any:
        return self.head.config

    def slots(self, batch: Batch) -> Tensor:
        """Where each head is supervised [H, B, T-1]; those of a head are among those of the one before."""
        return torch.stack([batch.supervised(k)[:, :-1] for k in range(self.head.config.num_heads)])

    def forward(self, batch: Batch, ends: TargetEnds) -> Totals:
        """Sums over the supervised slots of each head."""
        slots = self.slots(batch)
        if self.settings.gradient_checkpointing and torch.is_grad_enabled():
            outputs = checkpoint(self.outputs, batch, slots, ends, use_reentrant=False)
        else:
            outputs = self.outputs(batch, slots, ends)
        assert batch.features is not None
        states = batch.features[:, 1:][slots[0]]  # [S0, D]: at p + 1; whatever a later head asks for is among them
        number = slots[0].flatten().cumsum(0).view_as(slots[0]) - 1  # [B, T-1]
        width = slots.shape[-1]
        which = [shifted(number, k)[asked] for k, asked in enumerate(slots)]  # ascending, into the states
        tokens = [shifted(batch.input_ids, 2 + k)[:, :width][asked] for k, asked in enumerate(slots)]
        return self._compared(outputs, tokens, which, states, ends)

    def outputs(self, batch: Batch, slots: Tensor, ends: TargetEnds) -> list[Tensor]:
        """What each head's LM head is given at its slots, [S_k, D] for each of H."""
        assert batch.features is not None
        width, made = slots.shape[-1], []
        features = batch.features[:, :-1].to(next(self.head.parameters()).dtype)  # [B, T-1, D]
        if isinstance(self.head, HydraHead):
            features = self.head.prefix(features, (0, width))
        for k, asked in enumerate(slots):
            drop = KeyedDropout.of(batch, asked, self.settings.dropout, k)
            if isinstance(self.head, HydraHead):
                tokens = [shifted(batch.input_ids, 1 + back)[:, :width][asked] for back in range(k + 1)]
                embeddings = torch.cat([F.embedding(each, ends.embedding) for each in tokens], dim=-1)
                made.append(self.head.state(k, features[asked], embeddings, drop))
            else:
                made.append(self.head.state(k, features[asked], drop))
        return made

    def _compared(
        self, outputs: list[Tensor], tokens: list[Tensor], which: list[Tensor], states: Tensor, ends: TargetEnds
    ) -> Totals:
        """The sums, made for a few target states at a time with all the outputs that are compared with them."""
        at_once = max(1, self.settings.loss_chunk_slots // len(outputs))
        # ZeRO-3 gathers the LM heads at each call, so all processes must call them equally often
        groups = most_of_all(-(-states.shape[0] // at_once), states.device)
        if groups <= 1:
            return self._sums(outputs, tokens, which, states, ends)
        sizes = [(each // at_once).bincount(minlength=groups).tolist() for each in which]
        goals = [*states.split(at_once), *[states[:0]] * groups][:groups]
        columns = [
            list(zip(*[each.split(size) for each, size in zip(every, sizes, strict=True)], strict=True))
            for every in (outputs, tokens, [each % at_once for each in which])
        ]
        sums = [
            checkpoint(self._sums, *piece, ends, use_reentrant=False) for piece in zip(*columns, goals, strict=True)
        ]
        label, law, hits, alpha = (torch.stack(column).sum(0) for column in zip(*sums, strict=True))
        return label, law, hits, alpha

    def _sums(
        self, outputs: list[Tensor], tokens: list[Tensor], which: list[Tensor], states: Tensor, ends: TargetEnds
    ) -> Totals:
        with torch.no_grad():
            target = losses.TargetLaw.of_logits(ends.logits(states))
            choice = target.inside.argmax(-1)
        laws = [losses.log_law(self.head.laws(k, each, ends)) for k, each in enumerate(outputs)]  # [S_k, V]
        none = laws[0].new_zeros(len(laws))
        label, law = none, none
        if self.settings.label_weight:
            label = torch.stack([F.nll_loss(q, t, reduction="sum") for q, t in zip(laws, tokens, strict=True)])
        if self.settings.law_weight:
            law = torch.stack([self.loss(q, target.at(at)).sum() for q, at in zip(laws, which, strict=True)])
        with torch.no_grad():  # behind the loss: where it is made again for the backward pass, this is not
            hits = torch.stack([(q.argmax(-1) == choice[at]).sum() for q, at in zip(laws, which, strict=True)])
            alpha = losses.acceptance(laws[0], target.at(which[0]).whole).sum()
        return label, law, hits, alpha


class MultiTokenObjective:
    """The sum over heads k = 1, 2, ... of head_decay ** k times the label loss and the law loss, as they weigh."""

    score_name = "predicted_tau"

    def __init__(self, ends: TargetEnds, config: TrainConfig, num_heads: int) -> None:
        self.ends = ends
        self.config = config
        self.num_heads = num_heads
        parts = {"label": config.label_weight, "law": config.law_weight}
        self.terms = {  # name -> which sum, of which head, and its weight
            f"{part}_at_{k + 1}": (part, k, weight * config.head_decay ** (k + 1))
            for part, weight in parts.items()
            for k in range(num_heads)
            if weight
        }

    def prepare(self, batch: Batch, epoch: int) -> Batch:
        if batch.features is None and batch.num_tokens == 0:  # a process without rows
            batch = empty_like(batch, self.ends.embedding.shape[1], self.ends.embedding.dtype)
        if self.config.dropout == 0.0:
            return batch
        return replace(batch, seeds=row_seeds(self.config.seed, epoch, batch.rows))

    def divisors(self, batch: Batch) -> dict[str, int]:
        """Each head's own supervised slots: its loss is a mean over what it predicts."""
        counts = [int(batch.supervised(k).sum()) for k in range(self.num_heads)]
        return {name: counts[k] for name, (_, k, _) in self.terms.items()}

    def __call__(self, module: nn.Module, batch: Batch) -> StepOutput:
        label, law, hits, alpha = module(batch, self.ends)
        counts, sums = [batch.supervised(k).sum() for k in range(self.num_heads)], {"label": label, "law": law}
        terms = {name: (weight, sums[part][k], counts[k]) for name, (part, k, weight) in self.terms.items()}
        accuracy = {f"accuracy_at_{k + 1}": (hits[k], count) for k, count in enumerate(counts)}
        return StepOutput(terms, {**accuracy, "alpha": (alpha, counts[0])})

    @torch.no_grad()
    def evaluate(self, module: Any, batch: Batch) -> Sums:
        """A greedy chain of at most num_heads drafted tokens."""
        head, chunk, slots = module.head, self.config.loss_chunk_slots, module.slots(batch)
        choices = target_choices(batch, lambda states: likeliest(self.ends.logits, states, chunk))  # [B, T]
        hits = torch.zeros(slots.shape, device=slots.device)  # [H, B, T-1]
        for k, output in enumerate(module.outputs(batch, slots, self.ends)):
            drafted = likeliest(partial(head.laws, k, ends=self.ends), output, chunk)
            hits[k][slots[k]] = (drafted == shifted(choices, 1 + k)[:, : slots.shape[-1]][slots[k]]).float()
        depths = min(self.config.eval_depths, self.num_heads)
        return {**self(module, batch).sums(), **chain_sums(hits[:depths], slots[:depths].float())}

    def summarise(self, means: dict[str, float]) -> dict[str, float]:
        rest = {name: value for name, value in means.items() if name != "chain"}
        loss = sum(weight * means[name] for name, (_, _, weight) in self.terms.items())
        return {"predicted_tau": 1.0 + means["chain"], "loss": loss, **rest}
