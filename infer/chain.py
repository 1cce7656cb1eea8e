"""A draft without branches: gamma tokens in a row, drawn from the draft's law or its argmax."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from infer.calibration.calibrator import Calibrate, unchanged
from infer.sampling import Sampler, argmax, draw
from infer.stop import Level, Stop
from infer.tree import Proposal, Tree, draft_ids

if TYPE_CHECKING:
    from infer.shape import Drafter


class Chain:
    """gamma tokens in a row. Where the target samples, each is drawn from q under the target's own processors (R1).

    The stop rule is asked once a token stands in the chain, so that no token that was drawn is ever dropped, and its
    answer decides about the next one alone. Not sampled, and at temperature 0: the draft's argmax each (R2, R0).
    """

    def __init__(self, stop: Stop, levels: int, sampled: bool = True, calibrate: Calibrate = unchanged) -> None:
        self.stop, self.calibrate = stop, calibrate
        self.levels = levels
        self.sampled = sampled

    @property
    def max_nodes(self) -> int:
        return self.levels + 1

    @property
    def draft_slots(self) -> int:
        return self.levels

    def grow(self, drafter: "Drafter", root: Tensor, max_levels: int, sampler: Sampler) -> Tree:
        self.stop.begin()
        sampled = self.sampled and sampler.decoding.do_sample
        tokens, confidences = [root], [torch.zeros(1, device=root.device)]
        survival, levels = confidences[0], min(self.levels, max_levels)
        zero = torch.zeros(1, dtype=torch.long, device=root.device)
        log_q, forwards = drafter.start(), 1
        laws: list[Tensor] = []  # [1, Vd] each
        for depth in range(1, levels + 1):
            if depth > 1 and self.stop.declines(log_q, survival):
                break
            if sampled:
                laws.append(sampler.law(log_q))
                column = draw(laws[-1], sampler.generator)  # [1]
                confidence = laws[-1].gather(-1, column[:, None])[:, 0].log()  # [1]
            else:
                column = argmax(log_q)
                confidence = log_q.gather(-1, column[:, None])[:, 0]
            confidence = self.calibrate(confidence)
            token = drafter.target_ids(column)
            above, survival = survival, survival + confidence
            tokens.append(token)
            confidences.append(confidence)
            if depth == levels or self.stop.ends(Level(depth, confidence, survival, log_q, above, zero)):
                break
            log_q = drafter.step(token, zero)
            forwards += 1
        return _line(torch.cat(tokens), torch.cat(confidences), forwards, _proposal(drafter, laws))


def _proposal(drafter: "Drafter", laws: list[Tensor]) -> Proposal | None:
    """How the tokens were drawn from laws [1, Vd]; null where they were not."""
    if not laws:
        return None
    leaf = torch.zeros_like(laws[0])
    return Proposal("R1", torch.cat([*laws, leaf]), draft_ids(drafter.target_ids, leaf))


def _line(tokens: Tensor, confidence: Tensor, forwards: int, proposal: Proposal | None) -> Tree:
    count = tokens.shape[0]
    line = torch.arange(count, device=tokens.device)
    mask = torch.ones(count, count, dtype=torch.bool, device=tokens.device).tril_()
    survival = confidence.cumsum(0)
    return Tree(tokens, (line - 1).clamp_(min=0), line, mask, confidence, survival, count - 1, forwards, proposal)
