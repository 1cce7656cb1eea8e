"""Decoding cycles turned into arrays: every drafted node whose parent was accepted, untried siblings included."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from infer.calibration.acceptance import acceptance, asked
from infer.proposer import Cycle
from infer.records import CycleArrays


class NodeCollector:
    """Called after each cycle of each prompt; `arrays` stacks what was seen.

    A node counts once its parent is on the accepted path: only then was its own acceptance asked. At T = 0, and under
    typical acceptance, it is accepted or not; else its acceptance is the chance that the tree's own rule takes it: p(x)
    under R2, and where children were sampled what is left for it by the siblings before it (R1, R3, R4).
    """

    def __init__(self) -> None:
        self.prompt = 0
        self._nodes: list[Tensor] = []  # [n, 5] per cycle: prompt, depth, confidence, survival, acceptance
        self._cycles: list[tuple[int, int]] = []
        self._temperature = 0.0

    def __call__(self, cycle: Cycle) -> None:
        tree = cycle.tree
        chances = acceptance(cycle)
        if cycle.sampler.decoding.do_sample:
            self._temperature = cycle.sampler.decoding.temperature
        rows = torch.stack(
            [
                torch.full_like(chances, self.prompt),
                tree.depth.double(),
                tree.confidence.double().exp(),
                tree.survival.double().exp(),
                chances,
            ],
            dim=1,
        )
        self._nodes.append(rows[asked(tree, cycle.verdict.path)].cpu())
        self._cycles.append((cycle.verdict.accepted, self.prompt))

    def arrays(self) -> CycleArrays:
        """What was collected so far."""
        nodes = torch.cat(self._nodes).numpy() if self._nodes else np.zeros((0, 5))
        cycles = np.array(self._cycles, dtype=np.int64).reshape(-1, 2)
        columns: Sequence[np.ndarray] = [nodes[:, column] for column in range(5)]
        return CycleArrays(
            prompt=columns[0].astype(np.int64),
            depth=columns[1].astype(np.int64),
            confidence=columns[2].clip(0.0, 1.0),
            survival=columns[3].clip(0.0, 1.0),
            acceptance=columns[4].clip(0.0, 1.0),
            accepted_length=cycles[:, 0],
            cycle_prompt=cycles[:, 1],
            temperature=self._temperature,
        )
