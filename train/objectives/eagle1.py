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
from train.evaluate import chain_hits
from train.objectives.step import StepOutput, Sums

SCALED_LENGTH = 512  # of the published code's noise, which shrinks with the sequence


class Eagle1Objective:
    """Smooth-L1 on features plus cross-entropy between the two laws, at supervised slots only."""

    score_name = "predicted_tau"

    def __init__(self, ends: TargetEnds, config: TrainConfig) -> None:
        self.ends = ends
        self.config = config

    def prepare(self, batch: Batch, epoch: int) -> Batch:
        if batch.features is None:  # a process without rows
            batch = empty_like(batch, self.ends.embedding.shape[1], self.ends.embedding.dtype)
        return with_noise(batch, self.config, epoch)

    def num_supervised(self, batch: Batch) -> int:
        return int(batch.supervised().sum())

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
        classification, alpha, agreement = law_sums(predicted, true, self.ends, self.config.loss_chunk_slots)
        count = slots.sum()
        return StepOutput(
            {
                "feature": (self.config.feature_weight, losses.smooth_l1(predicted, true), count),
                "classification": (self.config.classification_weight, classification, count),
            },
            {"alpha": (alpha, count), "greedy_agreement": (agreement, count)},
        )

    @torch.no_grad()
    def evaluate(self, module: Any, batch: Batch) -> Sums:
        hits, alive = chain_hits(module, self.ends, batch, self.config.eval_depths, self.config.loss_chunk_slots)
        starts = alive[0].sum()
        sums: Sums = {"chain": (hits.cumprod(0).sum(), starts)}
        for depth in range(self.config.eval_depths):
            sums[f"accuracy_at_{depth + 1}"] = (hits[depth].sum(), alive[depth].sum())
        return {**sums, **self(module, replace(batch, noise=None)).sums()}

    def summarise(self, means: dict[str, float]) -> dict[str, float]:
        rest = {name: value for name, value in means.items() if name != "chain"}
        loss = (
            self.config.feature_weight * means["feature"] + self.config.classification_weight * means["classification"]
        )
        return {"predicted_tau": 1.0 + means["chain"], "loss": loss, **rest}


def with_noise(batch: Batch, config: TrainConfig, epoch: int) -> Batch:
    """The batch with uniform noise for its features, drawn row by row so that no neighbour can move it.

    Source: EAGLE, section 4.1 (U(-0.1, 0.1)); the published code also multiplies by 512 / length.
    """
    if config.feature_noise == 0.0:
        return batch
    assert batch.features is not None
    noise = torch.zeros(batch.features.shape)  # [B, T, D]
    for at, (row, length) in enumerate(zip(batch.rows, batch.lengths.tolist(), strict=True)):
        width = config.feature_noise * (SCALED_LENGTH / length if config.noise_length_scaling and length else 1.0)
        noise[at, :length].uniform_(-width, width, generator=keyed_generator(config.seed, epoch, row))
    return replace(batch, noise=noise)


def law_sums(predicted: Tensor, true: Tensor, ends: TargetEnds, chunk: int) -> tuple[Tensor, Tensor, Tensor]:
    """Summed H(p, q), alpha and greedy agreement of S slots [S, D], holding the laws of `chunk` slots at once."""
    pieces = list(zip(predicted.split(chunk), true.split(chunk), strict=True))
    if len(pieces) <= 1:
        return _law_sums(predicted, true, ends)
    sums = [checkpoint(_law_sums, drafted, goal, ends, use_reentrant=False) for drafted, goal in pieces]
    classification, alpha, agreement = (torch.stack(column).sum() for column in zip(*sums, strict=True))
    return classification, alpha, agreement


def _law_sums(predicted: Tensor, true: Tensor, ends: TargetEnds) -> tuple[Tensor, Tensor, Tensor]:
    with torch.no_grad():
        target_law = losses.law(ends.logits(true))  # [S, V]
    draft_log_law = losses.log_law(ends.logits(predicted))  # [S, V]
    classification = losses.soft_cross_entropy(draft_log_law, target_law)
    with torch.no_grad():
        alpha = losses.acceptance(draft_log_law, target_law)
        agreement = losses.greedy_agreement(draft_log_law, target_law)
    return classification, alpha, agreement
