"""Records drafts at every position of greedy answers, and counts any fixed tree's cycles."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from aerie.configs.schema.decode import ChainConfig, DynamicConfig
from aerie.infer.decode.dynamic_tree import DynamicTree
from aerie.infer.decode.engine import SpeculativeDecoder, Statistics
from aerie.infer.decode.proposers import tree_proposer
from aerie.infer.decode.roles import Cycle, Drafter
from aerie.infer.measure.bench_files import Record
from aerie.infer.measure.shares import share_out
from aerie.model.target import Target

Integers = NDArray[np.int64]
GrownConfig = ChainConfig | DynamicConfig  # trees whose depth `tune` can search
NOWHERE = np.iinfo(np.int64).max  # the rank of a token that is no candidate


class RecordedDrafts(NamedTuple):
    """The drafts at P positions of some answers. A draft has L levels of K rows of K children.

    A row is an expanded node. Row r of level l + 1 expands node frontier[:, l, r] of level l, and
    a level numbers its nodes as row * K + child. Children are sorted by falling confidence.
    """

    tokens: Integers  # [P, L, K, K] the target's ids; -1 where there is no node
    survival: NDArray[np.float32]  # [P, L, K, K] log survival; -inf where there is no node
    frontier: Integers  # [P, L, K]
    room: Integers  # [P] levels that were drafted: fewer than L near max_new_tokens
    text: Integers  # [P, L] the target's next tokens; -1 beyond the answer's end
    answer: Integers  # [P] the answer's number, ascending
    left: Integers  # [P] how many tokens of the answer follow the draft's root


def record_drafts(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[Tensor],
    levels: int,
    k: int,
    max_new_tokens: int,
) -> RecordedDrafts:
    """The whole draft of width k at every position of the greedy answers to prompts [1, T]."""
    proposer = tree_proposer(drafter, DynamicConfig(levels=levels, k=k))
    assert isinstance(proposer.shape, DynamicTree)
    # The target verifies the root alone, so each cycle moves on by one position.
    proposer.shape.nodes = 1
    proposer.shape.keeps_pool = True
    decoder = SpeculativeDecoder(target, proposer)

    def record(number: int) -> dict[str, list[Any]]:
        """The columns of one answer's drafts."""
        columns: dict[str, list[Any]] = {name: [] for name in RecordedDrafts._fields}

        def keep_draft(cycle: Cycle) -> None:
            if cycle.tree.pool is None:
                return  # near the end of an answer nothing is drafted
            tokens = np.full((levels, k, k), -1, dtype=np.int64)
            survival = np.full((levels, k, k), -np.inf, dtype=np.float32)
            frontier = np.zeros((levels, k), dtype=np.int64)
            for depth, level in enumerate(cycle.tree.pool.levels):
                rows = level.expanded.shape[0]
                tokens[depth, :rows] = level.tokens.view(rows, k).cpu()
                survival[depth, :rows] = level.survival.view(rows, k).cpu()
                frontier[depth] = level.frontier.cpu()
            columns["tokens"].append(tokens)
            columns["survival"].append(survival)
            columns["frontier"].append(frontier)
            columns["room"].append(len(cycle.tree.pool.levels))

        answer = decoder.generate(
            prompts[number], max_new_tokens=max_new_tokens, do_sample=False, on_cycle=keep_draft
        ).new_ids
        padded = [*answer, *([-1] * levels)]
        # The root of the first draft is the answer's first token.
        for written in range(1, 1 + len(columns["room"])):
            columns["text"].append(padded[written : written + levels])
            columns["answer"].append(number)
            columns["left"].append(len(answer) - written)
        return columns

    answers = share_out(record, range(len(prompts)), "answers", "drafts")
    columns = {}
    for name in RecordedDrafts._fields:
        columns[name] = np.array([value for answer in answers for value in answer[name]])
    return RecordedDrafts(**columns)


class PathRanks(NamedTuple):
    """The ranks of the target's own text in trees of one depth and k."""

    # [P, levels] the rank by survival of the text's token among the candidates of all levels;
    # NOWHERE if it is no candidate
    ranks: Integers
    # [P, levels] how many candidates, down to this level, are at least as good as its best one
    as_good: Integers


def path_ranks(drafts: RecordedDrafts, levels: int, k: int) -> PathRanks:
    """The ranks for trees of these levels and k, which may not exceed the recorded drafts'.

    Nodes that the recording did not expand have no children, so the replay can only underestimate
    a narrower tree.
    """
    count = len(drafts.tokens)
    width = drafts.tokens.shape[-1]
    positions = np.arange(count)
    expanded = np.zeros((count, width), dtype=bool)  # [P, K] rows that the narrower tree has
    expanded[:, 0] = True
    # [P] the row of the text's last token; -1 where the tree has left the text's path
    row = np.zeros(count, dtype=np.int64)
    survivals: list[NDArray[np.float32]] = []  # of each level's candidates, [P, K * K]
    as_good = np.empty((count, levels), dtype=np.int64)
    # the text's candidate at each level, numbered through all levels
    chosen = np.full((count, levels), -1, dtype=np.int64)
    for level in range(levels):
        # (1) the narrower tree's candidates
        is_candidate = expanded[:, :, None] & (np.arange(width) < k)  # [P, K, K]
        survival = np.where(is_candidate, drafts.survival[:, level], -np.inf).astype(np.float32)
        survival = survival.reshape(count, -1)  # [P, K * K]
        survivals.append(survival)
        so_far = np.concatenate(survivals, axis=1)  # [P, (level + 1) * K * K]
        as_good[:, level] = (so_far >= survival.max(1, keepdims=True)).sum(1)
        # (2) the candidate that the text took
        text = drafts.text[:, level]
        is_taken = drafts.tokens[positions, level, row] == text[:, None]  # [P, K]
        is_taken &= is_candidate[positions, row] & ((row >= 0) & (text >= 0))[:, None]
        taken = np.where(is_taken.any(1), row * width + is_taken.argmax(1), -1)  # [P]
        chosen[:, level] = np.where(taken >= 0, level * width * width + taken, -1)
        # (3) the recorded rows of the next level that the narrower tree expands, too
        frontier = np.argsort(-survival, axis=1, kind="stable")[:, :k]  # [P, k]
        recorded = drafts.frontier[:, level]  # [P, K]
        is_real = np.isfinite(np.take_along_axis(survival, recorded, axis=1))
        expanded = (recorded[:, :, None] == frontier[:, None]).any(-1) & is_real
        below = (recorded == taken[:, None]) & expanded & (taken >= 0)[:, None]
        row = np.where(below.any(1), below.argmax(1), -1)
    # A stable sort: of two equal candidates the earlier comes first, as in the tree's reranking.
    order = np.argsort(-so_far, axis=1, kind="stable")
    ranks = np.take_along_axis(np.argsort(order, axis=1), chosen.clip(min=0), axis=1)
    return PathRanks(np.where(chosen >= 0, ranks, NOWHERE), as_good)


@dataclass(frozen=True)
class CycleCounts:
    """Counts of decoding cycles, summed over some answers."""

    tokens: int  # without the prefill's
    target_forwards: int  # without the prefill
    draft_trees: int  # cycles with a draft; the last token of an answer may need none
    draft_levels: int
    nodes: float = field(compare=False)  # what a cycle with a draft verifies, on average

    @property
    def tau(self) -> float:
        return self.tokens / self.target_forwards if self.target_forwards else 1.0


def replay_tree(drafts: RecordedDrafts, path: PathRanks, tree: GrownConfig) -> CycleCounts:
    """Counts the cycles of a fixed tree whose stop rule is constant or exact.

    path: the ranks for the tree's levels and k.
    """
    # The tree keeps the root and the nodes - 1 best candidates, and accepts the text's path as far
    # as it is kept.
    accepted = np.logical_and.accumulate(path.ranks < tree.nodes - 1, axis=1).sum(1)  # [P]
    depth = np.full(len(path.ranks), tree.levels)  # [P] drafted levels
    if tree.stop.rule == "exact":
        # Drafting ends at a level once nodes as good as the level's best fill the tree.
        goes_on = path.as_good[:, :-1] < tree.nodes - 1
        depth = 1 + np.logical_and.accumulate(goes_on, axis=1).sum(1)
    depth = np.minimum(depth, drafts.room)
    tokens = forwards = trees = levels = 0
    for number in np.unique(drafts.answer):
        is_here = drafts.answer == number
        accepted_here = accepted[is_here].tolist()
        depth_here = depth[is_here].tolist()
        end = int(drafts.left[is_here][0])
        tokens += end
        position = 0
        while position < end:
            forwards += 1
            if position < len(depth_here):
                trees += 1
                levels += depth_here[position]
                position += accepted_here[position]
            position += 1  # the bonus token
    return CycleCounts(tokens, forwards, trees, levels, tree.nodes)


def count_cycles(answers: Sequence[Statistics] | Sequence[Record]) -> CycleCounts:
    """Counts the cycles of decoded answers."""
    tokens = forwards = trees = levels = nodes = 0
    for answer in answers:
        tokens += answer.new_tokens - 1
        forwards += answer.target_forwards
        # old records lack draft_levels
        levels += max(answer.draft_levels, answer.draft_forwards)
        nodes += answer.draft_nodes
        trees += sum(drafted > 0 for drafted in answer.cycle_nodes)
    return CycleCounts(tokens, forwards, trees, levels, 1 + nodes / max(trees, 1))
