"""Records drafts once, at every place of some answers; from them, counts the cycles that any fixed tree would take."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from aerie.configs.schema.decode import DynamicConfig
from aerie.data.progress import start_progress
from aerie.infer.decode.engine import SpeculativeDecoder, Statistics
from aerie.infer.decode.methods import drafting
from aerie.infer.decode.shape import Cycle, Drafter, DynamicTree
from aerie.infer.measure.bench_files import Record
from aerie.model.target import Target

Integers = NDArray[np.int64]


class Recording(NamedTuple):
    """The drafts at P places of some answers: L levels of at most K rows (expanded nodes) of K children.

    Row r of level l + 1 is below node frontier[:, l, r] (row * K + child) of level l; children by falling confidence.
    """

    tokens: Integers  # [P, L, K, K] the target's ids; -1 where there is no node
    survival: NDArray[np.float32]  # [P, L, K, K] log survival; -inf where there is no node
    frontier: Integers  # [P, L, K]
    room: Integers  # [P] levels that were drafted: fewer than L where max_new_tokens leaves no room for more
    text: Integers  # [P, L] what the target wrote after each place; -1 beyond the answer's end
    answer: Integers  # [P] the answer's number, ascending
    left: Integers  # [P] tokens that the answer still had after the place's root


def record(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[Tensor],
    levels: int,
    k: int,
    max_new_tokens: int,
) -> Recording:
    """The widest draft at every place of the greedy answers to prompts [1, T]."""
    proposer = drafting(drafter, DynamicConfig(levels=levels, k=k))
    assert isinstance(proposer.shape, DynamicTree)
    proposer.shape.nodes = (
        1  # everything is drafted, and the root alone is verified: no place is skipped
    )
    proposer.keep = True
    decoder = SpeculativeDecoder(target, proposer)
    places, drafts = list[tuple[Any, ...]](), list[tuple[Any, ...]]()

    def keep(cycle: Cycle) -> None:
        if cycle.tree.pool is None:
            return  # the answer's last token, or the last but one, has no draft
        drafted = cycle.tree.pool.levels
        tokens, frontier = (
            np.full((levels, k, k), -1, dtype=np.int64),
            np.zeros((levels, k), dtype=np.int64),
        )
        survival = np.full((levels, k, k), -np.inf, dtype=np.float32)
        for depth, level in enumerate(drafted):
            rows = level.parents.shape[0]
            tokens[depth, :rows] = level.tokens.view(rows, k).cpu()
            survival[depth, :rows] = level.survival.view(rows, k).cpu()
            frontier[depth] = level.frontier.cpu()
        drafts.append((tokens, survival, frontier, len(drafted)))

    with start_progress(len(prompts), "answers", "drafts") as progress:
        for number, ids in enumerate(prompts):
            drafts.clear()
            answer = decoder.generate(
                ids, max_new_tokens=max_new_tokens, do_sample=False, on_cycle=keep
            ).new_ids
            padded = [*answer, *([-1] * levels)]
            for place, draft in enumerate(drafts, start=1):
                places.append((*draft, padded[place : place + levels], number, len(answer) - place))
            progress.update()
    return Recording(*map(np.array, zip(*places, strict=True)))


def path_ranks(recording: Recording, levels: int, k: int) -> tuple[Integers, Integers]:
    """Two arrays [P, levels], for a tree of this depth and k: the rank of the text's token at each depth among all
    candidates (the largest integer if the tree lacks it); and how many candidates, down to each level, are at least as
    good as that level's best one, itself included.

    Nodes that the recording did not expand have no children, so a narrower tree can only be underestimated.
    """
    places, _, full, _ = recording.tokens.shape
    at = np.arange(places)
    alive = np.zeros((places, full), dtype=bool)  # rows of this level that the small tree expands
    alive[:, 0] = True
    row = np.zeros(
        places, dtype=np.int64
    )  # the row below the text's own path; -1: the tree lacks the path
    pool: list[NDArray[np.float32]] = []
    as_good = np.empty((places, levels), dtype=np.int64)
    chosen = np.full(
        (places, levels), -1, dtype=np.int64
    )  # the text's candidate of each level in the whole pool
    for level in range(levels):
        allowed = alive[:, :, None] & (np.arange(full) < k)
        survival = np.where(allowed, recording.survival[:, level], -np.inf).astype(
            np.float32
        )  # [P, K, K]
        pool.append(survival.reshape(places, -1))
        as_good[:, level] = sum((each >= pool[-1].max(1, keepdims=True)).sum(1) for each in pool)
        hit = (recording.tokens[at, level, row] == recording.text[:, level, None]) & allowed[
            at, row
        ]  # [P, K]
        hit &= ((row >= 0) & (recording.text[:, level] >= 0))[:, None]
        flat = np.where(hit.any(1), row * full + hit.argmax(1), -1)
        chosen[:, level] = np.where(flat >= 0, level * full * full + flat, -1)
        best = np.argsort(-pool[-1], axis=1, kind="stable")[
            :, :k
        ]  # [P, k] the small tree's frontier
        wide = recording.frontier[:, level]  # [P, K] the recording's
        alive = (wide[:, :, None] == best[:, None]).any(-1) & np.isfinite(
            np.take_along_axis(pool[-1], wide, axis=1)
        )
        below = (wide == flat[:, None]) & alive & (flat >= 0)[:, None]
        row = np.where(below.any(1), below.argmax(1), -1)
    order = np.argsort(
        -np.concatenate(pool, axis=1), axis=1, kind="stable"
    )  # the earlier first where they tie
    ranks = np.take_along_axis(np.argsort(order, axis=1), chosen.clip(min=0), axis=1)
    return np.where(chosen >= 0, ranks, np.iinfo(np.int64).max), as_good


@dataclass(frozen=True)
class Cycles:
    """Counts over some answers; tokens exclude the prefill's."""

    tokens: int
    target_forwards: int
    draft_trees: int  # cycles that drafted (the last token of an answer may need no draft)
    draft_levels: float

    @property
    def tau(self) -> float:
        return self.tokens / self.target_forwards if self.target_forwards else 1.0


def replayed(
    recording: Recording,
    path: tuple[Integers, Integers],
    levels: int,
    nodes: int,
    is_exact: bool = False,
) -> Cycles:
    """The cycles of a tree of these levels and nodes, from the path_ranks of its k; is_exact: with the exact rule."""
    ranks, as_good = path
    accepted = np.logical_and.accumulate(ranks < nodes - 1, axis=1).sum(
        1
    )  # [P] drafted tokens at each place
    depth = np.full(len(ranks), levels)  # [P] levels of its draft, where there is room
    if is_exact:
        depth = 1 + np.logical_and.accumulate(as_good[:, :-1] < nodes - 1, axis=1).sum(1)
    tokens = forwards = trees = drafted = 0
    for number in np.unique(recording.answer):
        places = recording.answer == number
        count, room, deep = (each[places].tolist() for each in (accepted, recording.room, depth))
        place, end = 0, int(recording.left[places][0])
        tokens += end
        while place < end:
            forwards += 1
            if place < len(count):
                trees += 1
                drafted += min(deep[place], room[place])
                place += count[place]
            place += 1  # the target's own token
    return Cycles(tokens, forwards, trees, drafted)


def counted(answers: Sequence[Statistics] | Sequence[Record]) -> tuple[Cycles, float]:
    """The cycles of a decoder's answers, and the mean nodes that a drafting cycle verifies."""
    tokens, forwards = (
        sum(one.new_tokens - 1 for one in answers),
        sum(one.target_forwards for one in answers),
    )
    # records made before levels were counted have none
    levels = sum(max(one.draft_levels, one.draft_forwards) for one in answers)
    nodes = sum(one.draft_nodes for one in answers)
    trees = sum(drafted > 0 for one in answers for drafted in one.cycle_nodes)
    return Cycles(tokens, forwards, trees, levels), 1 + nodes / max(trees, 1)
