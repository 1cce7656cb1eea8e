"""Decoding with every recorder of the calibration attached."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from infer.calibration.frontier import FrontierArrays, FrontierRecorder, LevelArrays
from infer.calibration.laws import LawArrays, LawRecorder
from infer.calibration.oracle import OracleArrays, OracleRecorder, with_oracle
from infer.calibration.positions import PositionArrays, PositionRecorder
from infer.calibration.storage import write_arrays
from infer.collect import NodeCollector
from infer.config import TreeConfig
from infer.engine import SpeculativeDecoder
from infer.proposer import Cycle
from infer.records import CycleArrays
from infer.watch import watched

ARRAYS = "recorded.npz"
Watcher = Callable[[Cycle], None]


@dataclass(frozen=True)
class Settings:
    """How the held-out prompts are decoded."""

    max_new_tokens: int
    temperature: float = 0.0
    oracle_levels: int | None = None
    seed: int = 0


@dataclass(frozen=True)
class Recording:
    """What was seen; laws, frontier and levels are null for what drafts without laws, oracle where it was not asked."""

    nodes: CycleArrays
    tasks: tuple[str, ...]  # of the prompts, by their number
    positions: PositionArrays
    laws: LawArrays | None
    frontier: FrontierArrays | None
    levels: LevelArrays | None
    oracle: OracleArrays | None

    def write(self, directory: Path) -> None:
        """Writes recorded.npz; the nodes have a file of their own (infer/records.py)."""
        groups: dict[str, Any] = {
            name: getattr(self, name) for name in ("positions", "laws", "frontier", "levels", "oracle")
        }
        write_arrays(directory / ARRAYS, {name: group for name, group in groups.items() if group is not None})


def record(
    decoder: SpeculativeDecoder,
    tree: TreeConfig | None,
    questions: Iterable[tuple[Tensor, str]],
    settings: Settings,
    watchers: Sequence[Watcher] = (),
) -> Recording:
    """Decodes prompts [1, T], each with its task, and returns what the recorders saw; watchers see every cycle too.

    tree: the decoder's own, null where it grows none. Sampling has neither top_k nor top_p.
    """
    nodes, positions = NodeCollector(), PositionRecorder()
    tasks: list[str] = []
    with ExitStack() as stack:
        growth = stack.enter_context(watched(decoder))
        laws = None if growth is None else LawRecorder(growth)
        frontier = None if growth is None else FrontierRecorder(growth)
        levels = settings.oracle_levels
        proposer = None if levels is None else stack.enter_context(with_oracle(decoder, tree, levels))
        oracle = None if proposer is None else OracleRecorder(proposer, settings.seed)
        all_watchers = [each for each in (nodes, positions, laws, frontier, oracle, *watchers) if each is not None]

        def on_cycle(cycle: Cycle) -> None:
            for watcher in all_watchers:
                watcher(cycle)

        for number, (ids, task) in enumerate(questions):
            tasks.append(task)
            nodes.prompt = positions.prompt = number
            for recorder in (laws, frontier):
                if recorder is not None:
                    recorder.start(number)
            if oracle is not None:
                oracle.start(number, ids.shape[1])
            done = decoder.generate(ids, on_cycle=on_cycle, **_sampling(settings, number, ids.device))
            if frontier is not None:
                frontier.finish(done.sequences[0].tolist())
    return Recording(
        nodes=nodes.arrays(),
        tasks=tuple(tasks),
        positions=positions.arrays(),
        laws=None if laws is None else laws.arrays(),
        frontier=None if frontier is None else frontier.nodes(),
        levels=None if frontier is None else frontier.levels(),
        oracle=None if oracle is None else oracle.arrays(),
    )


def _sampling(settings: Settings, prompt: int, device: torch.device) -> dict[str, Any]:
    if settings.temperature == 0:
        return {"max_new_tokens": settings.max_new_tokens, "do_sample": False}
    return {
        "max_new_tokens": settings.max_new_tokens,
        "do_sample": True,
        "temperature": settings.temperature,
        "top_k": 0,
        "top_p": 1.0,
        "generator": torch.Generator(device).manual_seed(settings.seed * 1_000_003 + prompt),
    }
