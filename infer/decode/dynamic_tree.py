"""EAGLE-2's dynamic tree (arXiv 2406.16858, sections 4.1 and 4.2).

Expansion gives the k best nodes of each level k children each. Reranking takes the best of all
candidates into the tree that the target verifies. The best are those most likely to survive: they
have the largest product of q down their path.

Candidates are numbered level after level, from the root's 0. Some tensors hold these numbers,
others hold places within one level, and the finished tree has numbers of its own. With k = 2,
three levels and six nodes:

    level        0 |   1 |       2 |        3
    candidates   0 | 1 2 | 3 4 5 6 | 7 8 9 10   numbers
    expanded       |   0 |     0 1 |      3 0   the frontier above; as numbers 0; 1 2; 6 3
    rows           | 0 0 | 0 0 1 1 | 0 0 1  1   which expanded node a candidate stands below
    frontier       | 0 1 |     3 0 |            places in this level: the k best, expanded next

    kept         0   1 2   3     6   7          the numbers of the six best candidates, ascending
    node         0   1 2   3     4   5          their places in the tree

Candidate 7 has row 0, so it stands below the expanded node at place 3, number 6, node 4.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from aerie.configs.schema.decode import DynamicConfig
from aerie.infer.decode.roles import Calibrate, Drafter, Grown, Shape, StopRead, unchanged
from aerie.infer.decode.sampling import Sampler, draw_children
from aerie.infer.decode.stop import Stop, on_device
from aerie.infer.decode.tree import (
    DraftLaws,
    Level,
    Tree,
    ancestors,
    expanded_numbers,
    repeated_range,
    zeros,
)


class DynamicTree(Shape):
    """EAGLE-2's tree; `calibrate` maps log q to log confidence."""

    is_dynamic = True

    def __init__(self, stop: Stop, config: DynamicConfig, calibrate: Calibrate) -> None:
        # draft_slots: each level passes k nodes to the drafter, which keeps a row for each. The
        # last level passes none, so these are k too many, but the width of a mask counts on them.
        super().__init__(stop, config.levels, config.nodes, config.levels * config.k)
        self.calibrate = calibrate
        self.k = config.k
        self.nodes = config.nodes
        self.draws = config.children == "sampled"
        # A rule that keeps state on the host cannot be read late.
        self.stop_read = config.stop_read if stop.reads_only else "each"

    def grow(self, drafter: Drafter, root: Tensor, max_levels: int, sampler: Sampler) -> Tree:
        draws = self.draws and sampler.decoding.do_sample
        # A pool records whether the rule ended the tree, and nothing may be drawn beyond a stop.
        reads: StopRead = "each" if self.keeps_pool or draws else self.stop_read
        return last_of(self._levels(drafter, root, max_levels, reads, sampler if draws else None))

    def grow_levels(self, drafter: Drafter, root: Tensor, max_levels: int) -> Iterator[Grown]:
        return self._levels(drafter, root, max_levels, "late", None)

    def _levels(
        self,
        drafter: Drafter,
        root: Tensor,
        max_levels: int,
        reads: StopRead,
        sampler: Sampler | None,
    ) -> Iterator[Grown]:
        """Yields after each level, before the next forward.

        reads: the stop rule answers with bools ("each"), or with tensors that nobody has waited for
        ("late"). sampler: draws the children; None: the children are the best tokens.
        """
        deepest = min(self.levels, max_levels)
        self.stop.begin(Tensor.tolist if reads == "each" else on_device)
        # The drafter read the text at its last commit, so it knows the law of the root's children.
        log_q = drafter.start()  # [1, Vd]
        expansion = self._expansion(drafter, log_q.shape[-1], sampler)
        expanded = repeated_range(1, 1, root.device)  # [1] the root
        above = zeros(1, root.device)  # [1] its log survival
        levels: list[Level] = []
        for depth in range(1, deepest + 1):
            # --- the children of every expanded node (section 4.1)
            level = expansion.below(depth, log_q, expanded, above)
            if depth < deepest or self.keeps_pool:
                level = expansion.with_frontier(level)
            levels.append(level)
            ends = depth < deepest and self.stop.ends(expansion.shown(level, self.stop))
            # A copy of the list: `last_of` may make this tree after deeper levels joined the list.
            yield Grown(ends, partial(self._finish, tuple(levels), root, expansion, ends))
            if depth == deepest:
                return
            # --- the k best of the level are expanded next
            expanded = level.frontier  # [r]
            above = level.frontier_survival  # [r]
            tokens = level.tokens.index_select(0, expanded)
            log_q = drafter.step(tokens, level.rows.index_select(0, expanded))  # [r, Vd]

    def _expansion(
        self, drafter: Drafter, vocab_size: int, sampler: Sampler | None
    ) -> "BestChildren":
        # A draft vocabulary may be smaller than OPT-Tree's k.
        k = min(self.k, vocab_size)
        if sampler is not None:
            return DrawnChildren(drafter, k, self.calibrate, sampler)
        # At most nodes - 1 candidates of a level get into the tree, so the level's k best suffice.
        if k >= self.nodes - 1 and self.calibrate is unchanged and not self.keeps_pool:
            return BestOfLevel(drafter, k, self.calibrate)
        return BestChildren(drafter, k, self.calibrate)

    def _finish(
        self, levels: tuple[Level, ...], root: Tensor, expansion: "BestChildren", ended: Any
    ) -> Tree:
        """The tree of the best candidates of these levels."""
        certain = zeros(1, root.device)
        # the root, which is certain, is candidate 0
        confidence = [certain, *(level.confidence for level in levels)]
        survival = [certain, *(level.survival for level in levels)]
        scores = torch.cat([*confidence, *survival]).view(2, -1)  # [2, C] of all candidates
        # An ablation replaces `_kept` by another order.
        kept = self._kept(levels, scores[1])  # [N]
        tree = tree_of_kept(kept, scores, levels, root, expansion)
        if levels[0].drawn_from is not None:
            tree = replace(tree, draft_laws=expansion.laws_of_kept(kept, levels))
        if self.keeps_pool:
            tree = self.with_pool(tree, levels, kept, expansion.drafter, ended)
        return tree

    def _kept(self, levels: tuple[Level, ...], survival: Tensor) -> Tensor:
        """Reranking (section 4.2): the numbers [N] of the best candidates, ascending.

        The nodes are connected, because no node survives better than its parent and the stable sort
        puts the shallower of two equals first.
        """
        best = survival.sort(descending=True, stable=True).indices[: self.nodes]
        return best.sort().values


def tree_of_kept(
    kept: Tensor,
    scores: Tensor,
    levels: tuple[Level, ...],
    root: Tensor,
    expansion: "BestChildren",
) -> Tree:
    """The tree of the candidates with the numbers kept [N], which ascend from the root's 0.

    scores [2, C]: log confidence and log survival of all candidates.
    """
    confidence, survival = scores.index_select(1, kept)
    tokens = torch.cat([root, *(level.tokens for level in levels)]).index_select(0, kept)
    rows, depth = expansion.rows_and_depths(levels).index_select(1, kept)
    # A node's index in the tree is the place of its number in `kept`. As `kept` ascends,
    # searchsorted finds the places of the parents' numbers. The root's row leads to the root
    # itself.
    parent_numbers = expanded_numbers(levels).index_select(0, rows)
    parents = torch.searchsorted(kept, parent_numbers)
    mask = ancestors(parents, len(levels))
    num_levels = len(levels)
    return Tree(tokens, parents, depth, mask, confidence, survival, num_levels, num_levels)


# --- how the children of a level are found


class BestChildren:
    """The k most probable tokens under every expanded node: EAGLE-2's expansion."""

    def __init__(self, drafter: Drafter, k: int, calibrate: Calibrate) -> None:
        self.drafter = drafter
        self.k = k
        self.calibrate = calibrate

    def below(self, depth: int, log_q: Tensor, expanded: Tensor, above: Tensor) -> Level:
        """The level, without its frontier, below expanded nodes [r].

        log_q [r, Vd]: their distributions; above [r]: their log survivals.
        """
        # the k best of each row: r * k candidates
        confidence, columns = log_q.topk(self.k, dim=-1)  # [r, k]
        return self._level(depth, log_q, expanded, above, confidence, columns)

    def _level(
        self,
        depth: int,
        log_q: Tensor,
        expanded: Tensor,
        above: Tensor,
        confidence: Tensor,
        columns: Tensor,
    ) -> Level:
        """The level of k children [r, k] per expanded node."""
        confidence = self.calibrate(confidence)
        survival = above[:, None] + confidence
        rows = repeated_range(len(log_q), self.k, log_q.device)
        tokens = self.drafter.target_ids(columns).flatten()
        return Level(depth, log_q, expanded, rows, tokens, confidence.flatten(), survival.flatten())

    def with_frontier(self, level: Level) -> Level:
        """The level with its frontier: the k best candidates, which are expanded next."""
        # Of equals any may be expanded: the others stay candidates, and only lack children.
        survival, frontier = level.survival.topk(self.k)
        return level._replace(frontier=frontier, frontier_survival=survival)

    def shown(self, level: Level, stop: Stop) -> Level:
        """What the stop rule may see of a level."""
        return level

    def rows_and_depths(self, levels: Sequence[Level]) -> Tensor:
        """By candidate, the root first: which expanded node is its parent, and its depth [2, C]."""
        sizes = tuple(len(level.tokens) for level in levels)
        return _regular_rows_and_depths(sizes, self.k, levels[0].tokens.device)

    def laws_of_kept(self, kept: Tensor, levels: tuple[Level, ...]) -> DraftLaws:
        """The distributions that the children of the kept nodes [N] were drawn from."""
        laws = torch.cat([cast(Tensor, level.drawn_from) for level in levels])  # [E, Vd]
        expanded = expanded_numbers(levels)  # [E]
        # From a candidate's number to its row of `laws`. A leaf gets row 0, which nobody reads.
        num_candidates = 1 + sum(len(level.tokens) for level in levels)
        row_of = kept.new_zeros(num_candidates)
        row_of.scatter_(0, expanded, torch.arange(len(expanded), device=kept.device))
        rows = row_of.index_select(0, kept)
        # Each expanded node has k candidates, in the order of their draws; candidate 1 is a first
        # draw.
        ranks = (kept - 1) % self.k
        q = laws.index_select(0, rows)
        return DraftLaws("R3", q, self.drafter.ids, ranks=ranks, width=self.k)


class BestOfLevel(BestChildren):
    """The k best candidates of the whole level, for trees of at most k + 1 nodes (OPT-Tree).

    One search over all distributions at once is much faster than one in each.
    """

    def below(self, depth: int, log_q: Tensor, expanded: Tensor, above: Tensor) -> Level:
        # A cell of [r, Vd] is row * Vd + column.
        survival, cells = (above[:, None] + log_q).flatten().topk(self.k)  # [k]
        rows = cells // log_q.shape[1]
        columns = cells % log_q.shape[1]
        tokens = self.drafter.target_ids(columns)
        return Level(depth, log_q, expanded, rows, tokens, log_q.take(cells), survival)

    def rows_and_depths(self, levels: Sequence[Level]) -> Tensor:
        sizes = tuple(len(level.tokens) for level in levels)
        num_expanded = tuple(len(level.expanded) for level in levels)
        rows = torch.cat([level.rows for level in levels])  # within each level
        rows = rows + _sizes_before(num_expanded, sizes, rows.device)
        return torch.stack([F.pad(rows, (1, 0)), _depths(sizes, rows.device)])


class DrawnChildren(BestChildren):
    """k draws without replacement under every expanded node (R3: RSD, arXiv 2402.14160).

    Lossless, because a draw's token does not decide whether the tree keeps the draw. Its score
    depends only on its place in the order and on the shape of q (`draw_children`). The proof is in
    docs/lossless.md.
    """

    def __init__(self, drafter: Drafter, k: int, calibrate: Calibrate, sampler: Sampler) -> None:
        super().__init__(drafter, k, calibrate)
        self.sampler = sampler

    def below(self, depth: int, log_q: Tensor, expanded: Tensor, above: Tensor) -> Level:
        # Children are drawn from q as the target's processors leave it, so that verification can
        # compare it with p.
        log_law = self.sampler.log_law(log_q, are_logarithms=True)
        confidence, columns, law = draw_children(log_law, self.k, self.sampler.generator)
        level = self._level(depth, log_q, expanded, above, confidence, columns)
        return level._replace(drawn_from=law)

    def with_frontier(self, level: Level) -> Level:
        # Ties go to the first, as in the final ranking.
        ranked = level.survival.sort(descending=True, stable=True)
        return level._replace(
            frontier=ranked.indices[: self.k], frontier_survival=ranked.values[: self.k]
        )

    def shown(self, level: Level, stop: Stop) -> Level:
        """The whole level for a rule that never changes the tree, else its best candidate alone.

        No deeper node ranks above that candidate, so a stop here cannot decide whether it is kept.
        """
        if stop.keeps_tree:
            return level
        best = level.frontier[:1]
        row = level.rows.index_select(0, best)
        zero = torch.zeros_like(best)
        return level._replace(
            log_q=level.log_q.index_select(0, row),
            expanded=level.expanded.index_select(0, row),
            rows=zero,
            tokens=level.tokens.index_select(0, best),
            confidence=level.confidence.index_select(0, best),
            survival=level.survival.index_select(0, best),
            frontier=zero,
            frontier_survival=level.frontier_survival[:1],
        )


@cache
def _regular_rows_and_depths(sizes: tuple[int, ...], k: int, device: torch.device) -> Tensor:
    rows = repeated_range(sum(sizes) // k, k, device)
    return torch.stack([F.pad(rows, (1, 0)), _depths(sizes, device)])


@cache
def _depths(sizes: tuple[int, ...], device: torch.device) -> Tensor:
    depths = torch.arange(1, 1 + len(sizes)).repeat_interleave(torch.tensor(sizes))
    return F.pad(depths, (1, 0)).to(device)


@cache
def _sizes_before(sizes: tuple[int, ...], counts: tuple[int, ...], device: torch.device) -> Tensor:
    """0 counts[0] times, sizes[0] counts[1] times, sizes[0] + sizes[1] counts[2] times, ..."""
    before = torch.tensor([0, *sizes[:-1]]).cumsum(0)
    return before.repeat_interleave(torch.tensor(counts)).to(device)


# --- when the stop rule is read


def last_of(levels: Iterable[Grown]) -> Tree:
    """The tree that ends where its stop rule says so.

    An answer in a tensor is read while the device runs the next level.
    """
    # The unread answer for the level before, and the tree that ends with that level.
    before: tuple[Callable[[], bool], Callable[[], Tree]] | None = None
    for ends, finish in levels:
        if before is not None:
            ended, finish_before = before
            if ended():
                tree = finish_before()
                # This level's forward was launched for nothing.
                return replace(tree, draft_forwards=tree.draft_forwards + 1)
        before = (promise(ends), finish) if isinstance(ends, Tensor) else None
        if ends is True:
            break
    return finish()


def promise(answer: Tensor) -> Callable[[], bool]:
    """Starts to copy a boolean [] to the host; the returned function gives its value.

    That function waits for the copy alone, not for kernels that were launched later.
    """
    if not answer.is_cuda:
        return lambda: bool(answer)
    # Pinned memory: a copy to any other memory would wait for the device.
    on_host = torch.empty_like(answer, device="cpu", pin_memory=True)
    on_host.copy_(answer, non_blocking=True)
    event = torch.cuda.Event()
    event.record()

    def read() -> bool:
        event.synchronize()
        return bool(on_host)

    return read
