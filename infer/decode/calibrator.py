"""Confidence -> the acceptance that it stood for on held-out prompts: what survival and stop rules can be made of.

Any map will do for a lossless output: it decides which nodes are drafted, and never what is drawn or accepted.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field, PositiveFloat
from torch import Tensor
from torch.nn import functional as F

from aerie.configs.errors import UserError
from aerie.configs.read import Section, validate
from aerie.configs.schema.decode import Fit, Share
from aerie.model.storage import CALIBRATOR, digests, read_json, write_json

FLOOR = 1e-4  # no token is impossible because a few held-out prompts never had it
Calibrate = Callable[[Tensor], Tensor]  # log q, of any shape -> log confidence


def unchanged(log_q: Tensor) -> Tensor:
    """The head's own confidence."""
    return log_q


@dataclass(frozen=True)
class Calibrator(Section):
    """Two fits of acceptance to confidence c, each monotone, so that neither moves the ranks below one node.

    temperature: sigmoid(logit(c) / temperature). isotonic: linear between the knots, level outside of them.
    """

    temperature: PositiveFloat
    confidence: Annotated[tuple[Share, ...], Field(min_length=1)]  # the knots' places, ascending
    acceptance: tuple[Share, ...]  # their heights, never falling
    decoded_at: float = 0.0  # temperature of the decoding that it was fitted on
    head: dict[str, str] = field(default_factory=dict)  # digests of the head's files
    scores: dict[str, Any] = field(default_factory=dict)  # on prompts that it was not fitted on

    def __post_init__(self) -> None:
        knots = (self.confidence, self.acceptance)
        if len(knots[0]) != len(knots[1]) or any(list(values) != sorted(values) for values in knots):
            raise ValueError("confidence and acceptance are the knots' places and heights, one each and ascending")

    def map(self, kind: Fit) -> Calibrate:
        """The map of log q that keeps -inf, which means that there is no such token."""
        return self._by_temperature if kind == "temperature" else _Isotonic(self)

    def _by_temperature(self, log_q: Tensor) -> Tensor:
        # logit(c) = log c - log(1 - c)
        odds = log_q - torch.log1p(-log_q.exp().clamp(max=1.0))  # +inf at q = 1
        return F.logsigmoid(odds / self.temperature)


def save(calibrator: Calibrator, directory: Path) -> None:
    """Writes calibrator.json into a directory."""
    write_json(directory / CALIBRATOR, asdict(calibrator))


def load(head: Path) -> Calibrator:
    """The calibrator beside a head; UserError where there is none, or where it was fitted for other weights."""
    path, fix = head / CALIBRATOR, "fit it with: python infer/main.py calibrate --config RECIPE"
    if not path.is_file():
        raise UserError(f"{path}: no such file, and tree.calibrated needs it; {fix}")
    calibrator = validate(read_json(path), Calibrator, str(path), {})
    if calibrator.head != digests(head):
        raise UserError(f"{path}: was fitted for other weights than those beside it; {fix}")
    return calibrator


def calibrate_of(kind: Fit | None, head: Path) -> Calibrate:
    """What tree.calibrated asks for, from the head's directory; null: the head's own confidence."""
    return unchanged if kind is None else load(head).map(kind)


class _Isotonic:
    """Linear between the knots (places, heights) [K], level outside of them."""

    def __init__(self, calibrator: Calibrator) -> None:
        self._values = calibrator.confidence, calibrator.acceptance
        self._knots: dict[torch.device, tuple[Tensor, Tensor]] = {}  # once for each device

    def __call__(self, log_q: Tensor) -> Tensor:
        if log_q.device not in self._knots:
            places, heights = (torch.tensor(values, device=log_q.device) for values in self._values)
            self._knots[log_q.device] = places, heights
        places, heights = self._knots[log_q.device]
        q = log_q.exp()
        # the knots on both sides of each q; outside of them the two are the same knot
        right = torch.searchsorted(places, q.contiguous()).clamp(max=places.shape[0] - 1)
        left = (right - 1).clamp(min=0)
        width = (places[right] - places[left]).clamp(min=torch.finfo(places.dtype).tiny)
        share = ((q - places[left]) / width).clamp(0.0, 1.0)
        mapped = torch.lerp(heights[left], heights[right], share).clamp(min=FLOOR).log()
        return torch.where(log_q == float("-inf"), log_q, mapped)
