"""A head's calibrator: it maps the confidence of a drafted token to its chance of acceptance."""

from dataclasses import field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from pydantic import PositiveFloat
from torch import Tensor
from torch.nn import functional as F

from aerie.configs.errors import UserError
from aerie.configs.read import Section, validate
from aerie.configs.schema.decode import Fit
from aerie.configs.schema.heads import Share
from aerie.infer.decode.roles import Calibrate, unchanged
from aerie.model.hub import head_directory
from aerie.model.storage import CALIBRATOR, digests, read_json

FLOOR = 1e-4  # the least chance: a few held-out prompts cannot show that a token is impossible


class Calibrator(Section):
    """Two monotone fits of acceptance to confidence, as calibrator.json has them."""

    temperature: PositiveFloat  # of sigmoid(logit(c) / temperature)
    confidence: tuple[Share, ...]  # the knots of the isotonic fit, ascending
    acceptance: tuple[Share, ...]  # their heights, never falling
    decoded_at: float = 0.0  # the temperature of the cycles that it was fitted on
    head: dict[str, str] = field(default_factory=dict)  # digests of the head's files
    scores: dict[str, Any] = field(default_factory=dict)  # on prompts that it was not fitted on

    def __post_init__(self) -> None:
        columns = (self.confidence, self.acceptance)
        ascends = all(list(column) == sorted(column) for column in columns)
        if not ascends or len(self.confidence) != len(self.acceptance):
            raise ValueError("confidence and acceptance must be equally long and ascend")

    def map(self, kind: Fit) -> Calibrate:
        """The fit of this kind, from log q [..] to log chances [..] of acceptance."""
        return self._scaled if kind == "temperature" else self._isotonic

    def _scaled(self, log_q: Tensor) -> Tensor:
        # log(q / (1 - q)); +inf at q = 1
        logit = log_q - torch.log1p(-log_q.exp().clamp(max=1.0))
        return F.logsigmoid(logit / self.temperature)

    def _isotonic(self, log_q: Tensor) -> Tensor:
        """Linear between the knots, constant outside."""
        # This runs at every level, so the knots are copied to the device only once.
        knots, heights = _knots(self.confidence, self.acceptance, log_q.device)  # [K] each
        q = log_q.exp()
        right = torch.searchsorted(knots, q.contiguous()).clamp(max=knots.shape[0] - 1)
        left = (right - 1).clamp(min=0)
        width = (knots[right] - knots[left]).clamp(min=torch.finfo(knots.dtype).tiny)
        share = ((q - knots[left]) / width).clamp(0.0, 1.0)
        chance = torch.lerp(heights[left], heights[right], share).clamp(min=FLOOR)
        # A missing draw stays impossible.
        return torch.where(log_q == float("-inf"), log_q, chance.log())


@cache  # CUDA graphs read this tensor as long as they live
def _knots(
    confidence: tuple[float, ...], acceptance: tuple[float, ...], device: torch.device
) -> Tensor:
    return torch.tensor([confidence, acceptance], device=device)


def load_calibrator(head: Path) -> Calibrator:
    """The head's calibrator.json; UserError if it is missing or was fitted for other weights."""
    path = head / CALIBRATOR
    fix = "fit it with: aerie calibrate --config RECIPE"
    if not path.is_file():
        raise UserError(f"{path}: no such file, and tree.calibrated needs it; {fix}")
    calibrator = validate(read_json(path), Calibrator, str(path), {})
    if calibrator.head != digests(head):
        raise UserError(f"{path}: was fitted for other weights than those beside it; {fix}")
    return calibrator


def calibrate_of(kind: Fit | None, head: str) -> Calibrate:
    return unchanged if kind is None else load_calibrator(head_directory(head)).map(kind)
