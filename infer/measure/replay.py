"""Every draft of some answers, recorded once, from which any dynamic tree or chain is replayed without a model.

A replay counts cycles exactly; measured costs turn the counts into milliseconds.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from aerie.configs.schema.decode import DynamicConfig
from aerie.data.stage import bar
from aerie.infer.decode.engine import SpeculativeDecoder, Statistics
from aerie.infer.decode.methods import drafting
from aerie.infer.decode.shape import Cycle, Drafter, DynamicTree
from aerie.infer.decode.tree import Level
from aerie.model.target import Target

Floats = NDArray[np.float32]
Integers = NDArray[np.int64]


COST_PROMPTS, COST_REPETITIONS = 2, 3
TIMED_TOKENS = 48  # new tokens of one timed answer
# levels, k and nodes of the trees that are timed: two depths give the first level's cost and that of each further one
TIMED_TREES = (
    ((2, 1, 2), (8, 1, 4)), ((2, 2, 6), (8, 2, 8)), ((2, 4, 12), (8, 4, 16)), ((2, 8, 24), (8, 8, 32)),
    ((2, 10, 48), (8, 10, 60)),
)  # fmt: skip


@dataclass(frozen=True)
class Recording:
    """The drafts at the P places of some answers: L levels, at most K rows (expanded nodes) a level, K children a row.

    Row r of level l + 1 is below the node with flat index frontier[:, l, r] (row * K + child) of level l; level 0 has
    one row, below the root. Children stand by falling confidence.
    """

    tokens: Integers  # [P, L, K, K] the target's ids; -1 where there is no node
    survival: Floats  # [P, L, K, K] log survival; -inf where there is no node
    frontier: Integers  # [P, L, K]
    room: Integers  # [P] levels that were drafted: fewer than L where max_new_tokens leaves no room for more
    text: Integers  # [P, L] what the target wrote after each place; -1 beyond the answer's end
    answer: Integers  # [P] which answer the place belongs to; its places stand in order
    left: Integers  # [P] tokens that the answer still had after the place's root


def record(
    target: Target, drafter: Drafter, prompts: Sequence[Tensor], levels: int, k: int, max_new_tokens: int
) -> Recording:
    """The widest draft at every place of the greedy answers to prompts of token ids [1, T]."""
    proposer = drafting(drafter, DynamicConfig(levels=levels, k=k))
    assert isinstance(proposer.shape, DynamicTree)
    proposer.shape.nodes = 1  # everything is drafted, and the root alone is verified: no place is passed over
    proposer.keep = True
    decoder = SpeculativeDecoder(target, proposer)
    places: list[tuple[Any, ...]] = []
    for number, ids in enumerate(prompts):
        drafts: list[tuple[Any, ...]] = []

        def keep(cycle: Cycle, drafts: list[tuple[Any, ...]] = drafts) -> None:
            if cycle.tree.pool is not None:  # the answer's last token, or the last but one, has no draft
                drafts.append(_draft(cycle.tree.pool.levels, levels))

        answer = decoder.generate(ids, max_new_tokens=max_new_tokens, do_sample=False, on_cycle=keep).new_ids
        padded = [*answer, *([-1] * levels)]
        for place, draft in enumerate(drafts, start=1):
            places.append((*draft, padded[place : place + levels], number, len(answer) - place))
    return Recording(*map(np.array, zip(*places, strict=True)))


def _draft(drafted: Sequence[Level], levels: int) -> tuple[Any, ...]:
    """tokens, survival, frontier and room of one place of a Recording."""
    k = drafted[0].tokens.shape[0]
    tokens, frontier = np.full((levels, k, k), -1, dtype=np.int64), np.zeros((levels, k), dtype=np.int64)
    survival = np.full((levels, k, k), -np.inf, dtype=np.float32)
    for depth, level in enumerate(drafted):
        rows = level.parents.shape[0]
        tokens[depth, :rows] = level.tokens.view(rows, k).cpu()
        survival[depth, :rows] = level.survival.view(rows, k).cpu()
        frontier[depth] = level.frontier.cpu()
    return tokens, survival, frontier, len(drafted)


def path_ranks(recording: Recording, levels: int, k: int) -> Integers:
    """[P, levels]: where the text's own token at each depth stands among the candidates of a tree of this depth and k.

    0 is the best of all candidates of all levels by survival, ties going to the shallower; the largest integer where
    the tree does not have the token. Never falls with depth.

    A node that the wide recording did not expand has no children here either. It is one that k' > k rows outranked: its
    chance to be on the text's path is small, and the count of a tree can only be underestimated.
    """
    places, _, full, _ = recording.tokens.shape
    at = np.arange(places)
    alive = np.zeros((places, full), dtype=bool)  # rows of this level that the small tree expands
    alive[:, 0] = True
    row = np.zeros(places, dtype=np.int64)  # the row below the text's own path; -1: the path was left
    pool: list[Floats] = []
    chosen = np.full((places, levels), -1, dtype=np.int64)  # the text's candidate of each level in the whole pool
    for level in range(levels):
        allowed = alive[:, :, None] & (np.arange(full) < k)
        survival = np.where(allowed, recording.survival[:, level], -np.inf).astype(np.float32)  # [P, K, K]
        pool.append(survival.reshape(places, -1))
        hit = (recording.tokens[at, level, row] == recording.text[:, level, None]) & allowed[at, row]  # [P, K]
        hit &= ((row >= 0) & (recording.text[:, level] >= 0))[:, None]
        flat = np.where(hit.any(1), row * full + hit.argmax(1), -1)
        chosen[:, level] = np.where(flat >= 0, level * full * full + flat, -1)
        best = np.argsort(-pool[-1], axis=1, kind="stable")[:, :k]  # [P, k] the small tree's frontier
        wide = recording.frontier[:, level]  # [P, K] the recording's
        alive = (wide[:, :, None] == best[:, None]).any(-1) & np.isfinite(np.take_along_axis(pool[-1], wide, axis=1))
        below = (wide == flat[:, None]) & alive & (flat >= 0)[:, None]
        row = np.where(below.any(1), below.argmax(1), -1)
    order = np.argsort(-np.concatenate(pool, axis=1), axis=1, kind="stable")  # the earlier first where they tie
    ranks = np.take_along_axis(np.argsort(order, axis=1), chosen.clip(min=0), axis=1)
    return np.where(chosen >= 0, ranks, np.iinfo(np.int64).max)


def accepted(ranks: Integers, nodes: int) -> Integers:
    """[P] drafted tokens that a tree of this many nodes, the root among them, has accepted at each place."""
    count: Integers = np.logical_and.accumulate(ranks < nodes - 1, axis=1).sum(1)
    return count


@dataclass(frozen=True)
class Cycles:
    """What a tree does to some answers. draft_levels sums the levels drafted; tokens exclude the prefill's."""

    tokens: int
    target_forwards: int
    draft_trees: int  # cycles that drafted (the last token of an answer may need no draft)
    draft_levels: int

    @property
    def tau(self) -> float:
        return self.tokens / self.target_forwards if self.target_forwards else 1.0


def cycles(recording: Recording, accepted_at: Integers, levels: int) -> Cycles:
    """The cycles that a tree of these levels needs for the recorded answers: each begins where the last one ended."""
    tokens = forwards = trees = drafted = 0
    for number in np.unique(recording.answer):
        places = recording.answer == number
        count, room = accepted_at[places].tolist(), recording.room[places].tolist()
        place, end = 0, int(recording.left[places][0])
        while place < end:
            has_draft = place < len(count)
            gain = min(count[place] + 1, end - place) if has_draft else 1
            forwards += 1
            trees += has_draft
            drafted += min(levels, room[place]) if has_draft else 0
            tokens += gain
            place += gain
    return Cycles(tokens, forwards, trees, drafted)


@dataclass(frozen=True)
class Costs:
    """Milliseconds of one cycle's parts. Widths and node counts that were not measured are interpolated."""

    draft: dict[int, tuple[float, float]]  # by k: one level, and each further one, of a tree with this frontier
    verify: dict[int, float]  # v(N) by nodes: a target forward over them with the choice among them
    rest: float  # what a drafting cycle costs beside them (committing)
    plain: float  # a whole cycle without drafting

    def draft_ms(self, trees: int, levels: int, k: int) -> float:
        """Of this many trees with so many levels in sum."""
        widths = sorted(self.draft)
        first, further = (float(np.interp(k, widths, [self.draft[width][part] for width in widths])) for part in (0, 1))
        return trees * first + max(levels - trees, 0) * further

    def verify_ms(self, nodes: float) -> float:
        """v(nodes)."""
        counts = sorted(self.verify)
        return float(np.interp(nodes, counts, [self.verify[count] for count in counts]))


def price(counted: Cycles, k: int, nodes: float, costs: Costs) -> float:
    """Milliseconds of these cycles, each verifying so many nodes."""
    idle = counted.target_forwards - counted.draft_trees
    return (
        costs.draft_ms(counted.draft_trees, counted.draft_levels, k)
        + counted.draft_trees * costs.verify_ms(nodes)
        + idle * costs.verify_ms(1)
        + counted.target_forwards * costs.rest
    )


def in_turns(
    decoders: Sequence[SpeculativeDecoder], prompts: Sequence[Tensor], repetitions: int, name: str
) -> list[list[Statistics]]:
    """Greedy answers of each decoder to the prompts [1, T], so many times.

    All answer in turn, so that other work on the machine slows one as much as the others; medians leave it out.
    """
    for decoder in decoders:
        decoder.generate(prompts[0], max_new_tokens=12, do_sample=False)
    settings: dict[str, Any] = {"max_new_tokens": TIMED_TOKENS, "do_sample": False, "timed": True}
    turns = []
    with bar(repetitions * len(prompts), "turns", name) as progress:
        for repetition, prompt in product(range(repetitions), prompts):
            answers: dict[int, Statistics] = {}
            for offset in range(len(decoders)):  # each repetition begins with another decoder
                place = (repetition + offset) % len(decoders)
                answers[place] = decoders[place].generate(prompt, **settings).statistics
            turns.append([answers[place] for place in sorted(answers)])
            progress.update()
    return [list(answers) for answers in zip(*turns, strict=True)]


def cycle_ms(answer: Statistics) -> float:
    """Milliseconds of a mean cycle, the prefill apart."""
    return (answer.ms["wall"] - answer.ms["prefill"]) / max(answer.target_forwards, 1)


def measure_costs(target: Target, drafter: Drafter, prompts: Sequence[Tensor]) -> Costs:
    """What a drafter's trees cost on the first prompts [1, T]: medians over answers; v(N) is kept from falling."""

    def per_cycle(answers: Sequence[Statistics], *phases: str) -> float:
        return statistics.median(sum(one.ms[phase] for phase in phases) / one.target_forwards for one in answers)

    trees = [DynamicConfig(levels=levels, k=k, nodes=nodes) for pair in TIMED_TREES for levels, k, nodes in pair]
    decoders = [SpeculativeDecoder(target), *(SpeculativeDecoder(target, drafting(drafter, tree)) for tree in trees)]
    plain, *others = in_turns(decoders, prompts[:COST_PROMPTS], COST_REPETITIONS, "costs")
    draft = {}
    for at in range(0, len(trees), 2):  # a width's shallow and deep tree
        pair = others[at : at + 2]
        levels = [statistics.mean(one.draft_forwards / one.target_forwards for one in answers) for answers in pair]
        times = [per_cycle(answers, "draft") for answers in pair]
        slope = max(float(np.polyfit(levels, times, 1)[0]), 0.0)
        draft[trees[at].k] = (float(np.mean(np.array(times) - slope * (np.array(levels) - 1))), slope)
    verify = np.array([per_cycle(answers, "verify") for answers in (plain, *others)])
    # the middle between the rising curves around the values: more nodes never cost less
    verify = (np.maximum.accumulate(verify) + np.minimum.accumulate(verify[::-1])[::-1]) / 2
    return Costs(
        draft,
        dict(zip([1, *(tree.nodes for tree in trees)], verify.tolist(), strict=True)),
        per_cycle([answer for answers in others for answer in answers], "commit", "other"),
        statistics.median(map(cycle_ms, plain)),
    )
