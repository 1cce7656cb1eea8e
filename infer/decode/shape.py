"""Trees of a known form (a chain, EAGLE-1's 25 nodes), and `make_shape` for any tree's settings."""

import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import pairwise
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from aerie.configs.schema.decode import (
    ChainConfig,
    Choice,
    DynamicConfig,
    StaticConfig,
    TreeConfig,
)
from aerie.infer.decode.dynamic_tree import DynamicTree
from aerie.infer.decode.roles import Calibrate, Drafter, Shape, unchanged
from aerie.infer.decode.sampling import Sampler, argmax, draw, race
from aerie.infer.decode.stop import STOPS, Stop
from aerie.infer.decode.tree import DraftLaws, Level, Tree, ancestors, repeated_range, zeros

# Float32 has no exact ratio p / q for a q below this, so the drafter never draws such a token. The
# answer stays lossless: q may be any distribution.
SMALLEST = 1e-30


class FormLevel(NamedTuple):
    """One level of a form: n nodes below r nodes of the level above.

    `grow` finds a level's tokens in a table [r, width] of each row's children, by rank. The form
    has some of the table's cells. Example: two rows of width 3, with ranks 0 1 2 and 0 2 in the
    form:

        table    0 1 2        rows   0 0 0 1 1
                 3 4 5        cells  0 1 2 3 5
    """

    expanded: Tensor  # [r] the nodes of the level above that have children, as places in that level
    rows: Tensor  # [n] which of the r nodes each node stands below
    cells: Tensor  # [n] where each node stands in the table: row * width + rank
    inner: Tensor  # [m] which of the n nodes have children
    inner_rows: Tensor  # [m] the rows of those m nodes
    width: int  # how many children are found per row


class TreeForm(NamedTuple):
    """A static tree's N nodes, in level order."""

    levels: list[FormLevel]
    parents: Tensor  # [N]
    depth: Tensor  # [N]
    mask: Tensor  # [N, N] ancestors or self
    # [N] each node's number among the nodes with children; 0 for a leaf, whose law nobody reads
    law_rows: Tensor
    host_parents: tuple[int, ...]  # `parents` on the host, for code that must not wait for a device


@cache
def form_of(choices: tuple[Choice, ...], vocab_size: int, device: torch.device) -> TreeForm:
    """The form of a tree with these paths of ranks, without ranks beyond the vocabulary."""
    # A node is the path of ranks that leads to it; the root's is empty.
    nodes: list[Choice] = [(), *(choice for choice in choices if max(choice) < vocab_size)]
    with_children = {node[:-1] for node in nodes[1:]}
    expanded = [node for node in nodes if node in with_children]
    by_depth: list[list[Choice]] = [[] for _ in range(1 + max(map(len, nodes)))]
    for node in nodes:
        by_depth[len(node)].append(node)
    tensor = partial(torch.tensor, dtype=torch.long, device=device)
    levels = [_form_level(above, here, with_children, tensor) for above, here in pairwise(by_depth)]
    # --- all levels together
    host_parents = tuple(nodes.index(node[:-1]) for node in nodes)
    parents_of = tensor(host_parents)
    law_rows = tensor([expanded.index(node) if node in with_children else 0 for node in nodes])
    depth = tensor([len(node) for node in nodes])
    mask = ancestors(parents_of, len(levels))
    return TreeForm(levels, parents_of, depth, mask, law_rows, host_parents)


def _form_level(
    above: list[Choice],
    here: list[Choice],
    with_children: set[Choice],
    tensor: Callable[[Any], Tensor],
) -> FormLevel:
    """The level of the nodes `here`, below those of the level above that have children."""
    parents = [node for node in above if node in with_children]
    # All rows get as many children as the level's highest rank needs.
    width = 1 + max(node[-1] for node in here)
    cells = tensor([parents.index(node[:-1]) * width + node[-1] for node in here])
    inner = tensor([place for place, node in enumerate(here) if node in with_children])
    rows = cells // width
    places = tensor([above.index(node) for node in parents])
    return FormLevel(places, rows, cells, inner, rows[inner], width)


class StaticTree(Shape):
    """A tree of known form: each node has its parent's r-th best token, or its parent's r-th draw.

    R1 verifies the draws of a chain, and R3 those of a tree (EAGLE-1). The stop rule is asked after
    a level's tokens have joined the tree, so it never drops a drawn token.
    """

    def __init__(
        self,
        stop: Stop,
        choices: tuple[Choice, ...],
        children: Literal["best", "sampled"],
        calibrate: Calibrate,
    ) -> None:
        levels = max(map(len, choices))
        with_children = {choice[:-1] for choice in choices}
        super().__init__(stop, levels, len(choices) + 1, len(with_children) - 1)
        self.calibrate = calibrate
        self.choices = choices
        self.is_chain = levels == len(choices)
        self.draws = children == "sampled"

    def grow(self, drafter: Drafter, root: Tensor, max_levels: int, sampler: Sampler) -> Tree:
        # at temperature 0 nothing is drawn: the children are the best tokens
        draws = self.draws and sampler.decoding.do_sample
        self.stop.begin()
        log_q = drafter.start()  # [1, Vd]
        form = form_of(self.choices, log_q.shape[-1], root.device)
        deepest = min(len(form.levels), max_levels)
        above = zeros(1, root.device)  # [r] log survival of the nodes that have children
        levels: list[Level] = []
        ended = False
        for depth, here in enumerate(form.levels[:deepest], start=1):
            # --- the table of every row's children, and from it the nodes of the form
            if draws:
                law = sampler.law(log_q)
                # Verification divides by q, so no token with a tiny q may be drawn.
                law = F.threshold(law, SMALLEST, 0.0)
                columns = drawn_columns(law, here.width, sampler)  # [r, width]
                confidence = picked(law.gather(-1, columns).flatten(), here.cells).log()  # [n]
            else:
                law = None
                columns = best_columns(log_q, here.width)
                confidence = picked(log_q.gather(-1, columns).flatten(), here.cells)
            confidence = self.calibrate(confidence)
            survival = picked(above, here.rows) + confidence  # [n]
            tokens = drafter.target_ids(picked(columns.flatten(), here.cells))  # [n]
            # --- the nodes that have children; a rule or a watcher gets them sorted, best first
            above = picked(survival, here.inner)  # [m], the next level's [r]
            frontier, best_first = here.inner, above
            if len(frontier) > 1 and (self.keeps_pool or type(self.stop) is not Stop):
                best_first, order = above.sort(descending=True, stable=True)
                frontier = frontier.index_select(0, order)
            level = Level(
                depth,
                log_q,
                here.expanded,
                here.rows,
                tokens,
                confidence,
                survival,
                frontier,
                best_first,
                law,
            )
            levels.append(level)
            # A stop at the last level would save nothing, so the rule is not asked there.
            ended = depth < deepest and bool(self.stop.ends(level))
            if depth == deepest or ended:
                break
            log_q = drafter.step(picked(tokens, here.inner), here.inner_rows)
        # --- the tree, with the distributions that its children were drawn from
        tree = self._tree(form, levels, root)
        kept = repeated_range(len(tree), 1, root.device)
        if draws:
            tree, kept = self._with_laws(tree, form, levels, drafter)
        if self.keeps_pool:
            tree = self.with_pool(tree, levels, kept, drafter, ended)
        return tree

    def _tree(self, form: TreeForm, levels: Sequence[Level], root: Tensor) -> Tree:
        """The form's nodes down to the last level that was drafted."""
        certain = zeros(1, root.device)
        tokens = torch.cat([root, *(level.tokens for level in levels)])  # [N]
        confidences = [certain, *(level.confidence for level in levels)]
        survivals = [certain, *(level.survival for level in levels)]
        # one cat for both: the launch of such a short kernel costs more than its work
        confidence, survival = torch.cat([*confidences, *survivals]).view(2, -1)
        count = len(tokens)
        mask = form.mask[:count, :count]
        parents, depth = form.parents[:count], form.depth[:count]
        num_levels = len(levels)
        return Tree(tokens, parents, depth, mask, confidence, survival, num_levels, num_levels)

    def _with_laws(
        self, tree: Tree, form: TreeForm, levels: Sequence[Level], drafter: Drafter
    ) -> tuple[Tree, Tensor]:
        """The tree with its draft laws, and the numbers [N] of its nodes in the form.

        If the processors leave a node fewer tokens than it has children, the missing children are
        dropped.
        """
        laws = torch.cat([cast(Tensor, level.drawn_from) for level in levels])  # [E, Vd]
        law_rows = form.law_rows[: len(tree)]
        kept = repeated_range(len(tree), 1, tree.tokens.device)
        host_parents: tuple[int, ...] | None = form.host_parents[: len(tree)]
        if not self.is_chain:  # a chain's first draw is never missing
            # The host needs the count, so it waits for the device here.
            kept = (tree.survival > float("-inf")).nonzero()[:, 0]
            law_rows = picked(law_rows, kept)
        if len(kept) < len(tree):
            tree = _only(tree, kept)
            host_parents = None
        if len(levels) < len(form.levels):
            # Nodes of the last level are leaves now. Their rows are missing, and nobody reads them.
            law_rows = law_rows.clamp(max=len(laws) - 1)
        rule: Literal["R1", "R3"] = "R1" if self.is_chain else "R3"
        draft_laws = DraftLaws(rule, laws.index_select(0, law_rows), drafter.ids, host_parents)
        return replace(tree, draft_laws=draft_laws), kept


def _only(tree: Tree, kept: Tensor) -> Tree:
    """The tree with only the nodes kept [n], which ascend and are connected."""
    # from a node's old number to its new one
    node = torch.zeros_like(tree.parents)
    node.scatter_(0, kept, torch.arange(len(kept), device=kept.device))
    return replace(
        tree,
        tokens=tree.tokens[kept],
        parents=node[tree.parents[kept]],
        depth=tree.depth[kept],
        mask=tree.mask[kept][:, kept],
        confidence=tree.confidence[kept],
        survival=tree.survival[kept],
    )


def drawn_columns(law: Tensor, width: int, sampler: Sampler) -> Tensor:
    """`width` draws without replacement [r, width] from each distribution [r, Vd]."""
    if width == 1:
        # a chain draws as the target does, with one random number
        return draw(law, sampler.generator)[:, None]
    return race(law, sampler.generator).topk(width).indices


def best_columns(log_q: Tensor, width: int) -> Tensor:
    """The `width` most probable columns [r, width] of each distribution [r, Vd]."""
    # for one column argmax is much faster than topk
    return argmax(log_q)[:, None] if width == 1 else log_q.topk(width).indices


def picked(values: Tensor, places: Tensor) -> Tensor:
    """values [n, ..] at ascending places [m].

    If m is n, every place occurs once, so these are the values themselves.
    """
    return values if len(places) == len(values) else values.index_select(0, places)


# By name, because decoding must not import infer/papers.
ABLATED_TREE = "aerie.infer.papers.ablations.AblatedTree"


def make_shape(config: TreeConfig, calibrate: Calibrate = unchanged) -> Shape:
    """A tree's shape with its stop rule; calibrate maps log q to log confidence."""
    stop = STOPS[type(config.stop)](config.stop, config.levels, config.nodes)
    if isinstance(config, ChainConfig):
        # a chain is the static tree of first children
        line = tuple((0,) * depth for depth in range(1, config.levels + 1))
        return StaticTree(stop, line, config.children, calibrate)
    if isinstance(config, StaticConfig):
        return StaticTree(stop, config.paths, config.children, calibrate)
    assert isinstance(config, DynamicConfig)
    kind: Any = pkgutil.resolve_name(ABLATED_TREE) if config.is_ablated else DynamicTree
    shape: Shape = kind(stop, config, calibrate)
    return shape
