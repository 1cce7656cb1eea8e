"""EAGLE-1's objective: predict the next feature, and the law that the target's LM head makes of it.

Slot p is given the feature of t_p (with noise, in training) and the token t_{p+1}; it should return the feature of
t_{p+1}, from which the target would draw t_{p+2}. Source: EAGLE (arXiv 2401.15077), section 4.1.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from data.batches import Batch, empty_like, keyed_generator
from model.target import TargetEnds
from train import losses
from train.config import TrainConfig
from train.evaluate import chain_hits, chain_sums, likeliest, target_choices
from train.objectives.step import StepOutput, Sums

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
