"""The shape of a draft: a static tree (a chain is one) or a dynamic one."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, Literal, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from aerie.configs.schema.decode import Choice, DynamicConfig, StaticConfig, TreeConfig
from aerie.infer.decode.cache import TargetStep
from aerie.infer.decode.sampling import Sampler, argmax, draw, draw_children, race
from aerie.infer.decode.stop import STOPS, Growing, Stop, StopRead, last_of, on_device
from aerie.infer.decode.tree import Level, Pool, Proposal, Rule, Tree, ancestors, root_only, zeros
from aerie.infer.decode.verify import Verdict
from aerie.model.kv_cache import KeptRows

Children = Literal["best", "sampled"]
Calibrate = Callable[[Tensor], Tensor]  # log q, of any shape -> log confidence


def unchanged(log_q: Tensor) -> Tensor:
    return log_q


class Drafter:
    """Gives the draft's laws, node by node."""

    max_positions: int = 2**31  # tokens of prompt and answer
    max_levels: int = 2**31  # the deepest tree that it has modules for
    after_blocks: tuple[int, ...] = ()  # the taps that `commit` is given; none: last_hidden
    draft_rows: int = 0  # rows that `start` writes behind the kept ones
    forwards_per_tree: int | None = (
        None  # 1 where one forward yields all levels' laws; None: one per level
    )
    ids: Tensor | None = (
        None  # [Vd] the target's ids of the columns of log q; None: they are the target's own
    )
    is_fixed: bool = True  # reads nothing from the device
    forwards: tuple[
        tuple[Any, str], ...
    ] = ()  # (owner, attribute) of every function that runs a model, to be timed

    def reset(self, prompt: Tensor, kept: KeptRows, slots: int) -> None:
        """Begins a prompt [T], of which no row is kept yet; slots: the most nodes of a tree that `step` is given."""

    def commit(self, tokens: Tensor, features: Tensor, last: Tensor | None = None) -> None:
        """Reads new known tokens [n], and the target's feature of the token before each, [n, D] or with taps [n, L*D].

        last [1]: the row of the last known token, where other rows follow.
        """

    def start(self) -> Tensor:
        """log q [1, Vd] of the root's children; begins a new tree."""
        raise NotImplementedError

    def step(self, tokens: Tensor, parents: Tensor) -> Tensor:
        """log q [n, Vd] of the children of nodes with tokens [n]; parents [n] are rows of the last call."""
        raise NotImplementedError

    def target_ids(self, columns: Tensor) -> Tensor:
        """The target's ids of columns of log q."""
        return columns if self.ids is None else self.ids[columns]


class Shape:
    """draft_slots: the most nodes that one tree gives to `Drafter.step`."""

    is_chain = draws = False
    stop_read: StopRead = "each"

    def __init__(
        self, stop: Stop, levels: int, max_nodes: int, draft_slots: int, calibrate: Calibrate
    ) -> None:
        self.stop, self.calibrate = stop, calibrate
        self.levels, self.max_nodes, self.draft_slots = levels, max_nodes, draft_slots

    def grow(
        self, drafter: Drafter, root: Tensor, max_levels: int, sampler: Sampler, keep: bool = False
    ) -> Tree:
        """The tree under root [1], at most max_levels deep; keep: with its `pool`."""
        raise NotImplementedError

    def _pool(
        self,
        levels: list[Level],
        drafter: Drafter,
        ended: bool,
        kept: Tensor,
        reranked: bool = True,
    ) -> Pool:
        columns = torch.arange(levels[0].log_q.shape[-1], device=kept.device)
        return Pool(
            levels,
            kept,
            drafter.target_ids(columns),
            reranked,
            self.stop.config.rule if ended else None,
        )


def make_shape(config: TreeConfig, calibrate: Calibrate = unchanged) -> Shape:
    """A tree's shape with its stop rule; calibrate maps log q to log confidence."""
    stop = STOPS[type(config.stop)](config.stop, config.levels, config.nodes)
    if isinstance(config, DynamicConfig):
        return DynamicTree(stop, config, calibrate)
    line = tuple((0,) * depth for depth in range(1, config.levels + 1))
    return StaticTree(
        stop, config.paths if isinstance(config, StaticConfig) else line, config.children, calibrate
    )


class StaticTree(Shape):
    """A tree of known form; a node has its parent's r-th best token, or r-th draw: R1, R3 (EAGLE-1).

    The stop rule is asked when a level's tokens are already in the tree: no drawn token is ever dropped.
    """

    def __init__(
        self, stop: Stop, choices: tuple[Choice, ...], children: Children, calibrate: Calibrate
    ) -> None:
        inner, levels = {choice[:-1] for choice in choices}, max(map(len, choices))
        super().__init__(stop, levels, len(choices) + 1, len(inner) - 1, calibrate)
        self.choices, self.children, self.is_chain = choices, children, levels == len(choices)
        self.draws = children != "best"

    def grow(
        self, drafter: Drafter, root: Tensor, max_levels: int, sampler: Sampler, keep: bool = False
    ) -> Tree:
        self.stop.begin()
        log_q = drafter.start()  # [rows, Vd], one row per node that is expanded
        form, nodes = _form(self.choices, log_q.shape[-1], root.device)
        levels, ended, watched = (
            min(len(form), max_levels),
            False,
            keep or type(self.stop) is not Stop,
        )
        sampled = self.draws and sampler.decoding.do_sample
        certain = above = zeros(1, root.device)  # log survival of the expanded nodes
        laws: list[Tensor] = []
        grown: list[Level] = []
        for depth, (expanded, rows, places, inner, parents, width) in enumerate(
            form[:levels], start=1
        ):
            law = sampler.law(log_q) if sampled else log_q
            if sampled:  # smaller q have no exact ratio in float32; q may be any law
                law = F.threshold(law, 1e-30, 0.0)
            if width == 1:
                columns = (draw(law, sampler.generator) if sampled else argmax(law))[:, None]
            else:
                columns = (race(law, sampler.generator) if sampled else law).topk(width).indices
            chances = picked(law.gather(-1, columns).flatten(), places)  # [n] of [rows, width]
            confidence = self.calibrate(chances.log() if sampled else chances)
            survival = picked(above, rows) + confidence
            tokens = drafter.target_ids(picked(columns.flatten(), places))
            # the frontier: nodes that have children in the form, the best first where a stop rule or a pool asks
            best_first = above = picked(survival, inner)
            frontier = inner
            if watched and len(inner) > 1:
                best_first, order = above.sort(descending=True, stable=True)
                frontier = inner.index_select(0, order)
            grown.append(
                Level(
                    depth, log_q, expanded, rows, tokens, confidence, survival, frontier, best_first
                )
            )
            laws.append(law)
            ended = depth < levels and self.stop.ends(grown[-1])
            if depth == levels or ended:
                break
            log_q = drafter.step(picked(tokens, inner), parents)
        token = torch.cat([root, *(level.tokens for level in grown)])  # [N]
        scores = [
            certain,
            *(level.confidence for level in grown),
            certain,
            *(level.survival for level in grown),
        ]
        confidence, survival = torch.cat(scores).view(2, -1)
        count, depth, proposal = len(token), len(grown), None
        parents, depths, mask, law_of, above_of = (part[:count] for part in nodes)
        mask = mask[:, :count]
        kept = _rows(count, 1, root.device)
        if sampled:
            rule: Rule = "R1" if self.is_chain else "R3"
            # where the processors leave fewer tokens than a node has children, the rest is dropped: one synchronisation
            if not self.is_chain:
                kept = (survival > float("-inf")).nonzero()[:, 0]
            q, law_of = torch.cat(laws), picked(law_of, kept)
            law_of = (
                law_of if depth == len(form) else law_of.clamp(max=len(q) - 1)
            )  # a leaf's law is not read
            known = above_of if len(kept) == count else None
            proposal = Proposal(rule, q.index_select(0, law_of), drafter.ids, known)
            if len(kept) < count:
                node = torch.zeros_like(parents).scatter_(
                    0, kept, torch.arange(len(kept), device=root.device)
                )
                parents, mask = node[parents[kept]], mask[kept][:, kept]
                token, depths, confidence, survival = (
                    part[kept] for part in (token, depths, confidence, survival)
                )
        pool = self._pool(grown, drafter, ended, kept, reranked=False) if keep else None
        return Tree(
            token, parents, depths, mask, confidence, survival, depth, depth, proposal, pool=pool
        )


def picked(x: Tensor, places: Tensor) -> Tensor:
    """x [n, ..] at ascending places [m]; if m is n, each place occurs once: x itself."""
    return x if len(places) == len(x) else x.index_select(0, places)


@cache
def _form(
    choices: tuple[Choice, ...], vocab_size: int, device: torch.device
) -> tuple[list[Any], list[Any]]:
    """By level: expanded [rows], rows [n], places [n], inner [m], parents [m], width. For all N nodes: parents, depth,
    mask, laws; and the parents on the host.

    expanded: the nodes of the level above that have children; rows: which of these is each node's parent;
    width: how many children are found per row; places: row * width + rank; inner: which nodes have children; parents:
    the inner nodes' rows.
    laws [N]: the number of the law that a node's children come from, 0 for a leaf.
    """
    nodes: list[Choice] = [(), *(choice for choice in choices if max(choice) < vocab_size)]
    with_children = {node[:-1] for node in nodes[1:]}
    expanded = [node for node in nodes if node in with_children]
    tensor, levels = partial(torch.tensor, dtype=torch.long, device=device), []
    for depth in range(1, 1 + max(map(len, nodes))):
        here = [node for node in nodes if len(node) == depth]
        above = [node for node in expanded if len(node) == depth - 1]
        width = 1 + max(node[-1] for node in here)
        places = tensor([above.index(node[:-1]) * width + node[-1] for node in here])
        inner = tensor([place for place, node in enumerate(here) if node in with_children])
        rows = places // width
        levels.append((tensor([*map(nodes.index, above)]), rows, places, inner, rows[inner], width))
    above_of = tuple(nodes.index(node[:-1]) for node in nodes)
    parents = tensor(above_of)
    law_of = tensor([expanded.index(node) if node in with_children else 0 for node in nodes])
    return levels, [
        parents,
        tensor([*map(len, nodes)]),
        ancestors(parents, len(levels)),
        law_of,
        above_of,
    ]


class DynamicTree(Shape):
    """EAGLE-2's tree (arXiv 2406.16858, sections 4.1, 4.2, 5.2) of the best children: pruning them changes no law.

    With drawn children (R3: RSD, arXiv 2402.14160) it grows alike, by scores that do not depend on a node's own token:
    see `draw_children`, and docs/lossless.md for the proof.
    """

    def __init__(self, stop: Stop, config: DynamicConfig, calibrate: Calibrate) -> None:
        super().__init__(stop, config.levels, config.nodes, config.levels * config.k, calibrate)
        self.k, self.nodes = config.k, config.nodes
        self.by_survival, self.rerank = config.rank == "survival", config.rerank
        self.draws, self.stop_read = (
            config.children == "sampled",
            config.stop_read if stop.reads_only else "each",
        )

    def grow(
        self, drafter: Drafter, root: Tensor, max_levels: int, sampler: Sampler, keep: bool = False
    ) -> Tree:
        sampled = self.draws and sampler.decoding.do_sample
        reads: StopRead = "each" if keep or sampled else self.stop_read
        return last_of(
            self.grow_levels(drafter, root, max_levels, reads, keep, sampler if sampled else None)
        )

    def grow_levels(
        self,
        drafter: Drafter,
        root: Tensor,
        max_levels: int,
        reads: StopRead,
        keep: bool = False,
        sampler: Sampler | None = None,
    ) -> Iterator[Growing]:
        """Yields after each level, before the next forward: whether it is the last, and a function that makes the tree.

        reads: "each" yields a bool; "late" a tensor [] that is not waited for. sampler: draws the children; None: they
        are the best ones.
        """
        self.stop.begin(Tensor.tolist if reads == "each" else on_device)
        levels, watched = min(self.levels, max_levels), keep or type(self.stop) is not Stop
        log_q = drafter.start()  # [1, Vd]
        k, certain = min(self.k, log_q.shape[-1]), zeros(1, root.device)
        # of the expanded nodes [r, 1]: log survival, and the least log confidence on their path
        above = lowest = certain[:, None]
        # the nodes expanded: their places in their level, and the number of that level's first candidate
        best, first, ended = _rows(1, 1, root.device), 0, cast(Any, False)
        # only the best nodes - 1 candidates of a level can be in the tree: OPT-Tree
        wide = (
            self.by_survival and self.rerank and self.calibrate is unchanged and k >= self.nodes - 1
        )
        wide = wide and not keep and sampler is None
        candidates, grown, laws = (
            [(root, certain, certain, certain, best, best)],
            cast(list[Level], []),
            [],
        )
        for depth in range(1, levels + 1):
            if wide:  # one search of all laws is much faster than one of each
                survival, cell = (above + log_q).flatten().topk(k)
                chances, columns, rows = (
                    log_q.take(cell),
                    cell % log_q.shape[1],
                    cell // log_q.shape[1],
                )
            else:
                if sampler is not None:
                    log_law = sampler.log_law(log_q, are_logarithms=True)
                    chances, columns, law = draw_children(log_law, k, sampler.generator)
                    laws.append(law)
                else:
                    chances, columns = log_q.topk(k, dim=-1)  # [r, k]: expansion (section 4.1)
                chances, rows = self.calibrate(chances), _rows(len(log_q), k, root.device)
                survival = (above + chances).flatten()
            token, confidence = drafter.target_ids(columns).flatten(), chances.flatten()
            # ranked by confidence, a node counts no more than the least sure node on its path
            score = survival if self.by_survival else torch.minimum(lowest, chances).flatten()
            expanded, is_last = best, depth == levels
            if not (
                is_last and self.rerank and not keep
            ):  # else nothing is left to be ranked level by level
                # the k best of the level are expanded next
                if sampler is not None:  # ties go to the first, as in the final ranking
                    best_first, best = (
                        part[:k] for part in survival.sort(descending=True, stable=True)
                    )
                else:
                    best_first, best = (survival if self.by_survival else confidence).topk(k)
                if not self.by_survival:
                    best_first = survival.index_select(0, best)
            # by level: its candidates and scores; their parents [r] (of a wide tree [n], one each); and its best
            parents = expanded.index_select(0, rows) if wide else expanded
            candidates.append((token, confidence, survival, score, parents, best))
            if keep or (watched and not is_last):
                above_of = expanded + first
                grown.append(
                    Level(
                        depth, log_q, above_of, rows, token, confidence, survival, best, best_first
                    )
                )
            if watched and not is_last:
                seen = (
                    grown[-1] if sampler is None or self.stop.keeps_tree else best_alone(grown[-1])
                )
                ended = self.stop.ends(seen)
            pool = partial(self._pool, [*grown], drafter, ended and not is_last) if keep else None
            draws = None if sampler is None else (drafter.ids, [*laws])
            finish = partial(self._tree, [*candidates], 1 if wide else k, pool, draws)
            yield not is_last and ended, finish
            if is_last:
                return
            log_q = drafter.step(token.index_select(0, best), rows.index_select(0, best))
            above, first = best_first[:, None], first + candidates[-2][0].shape[0]
            lowest = above if self.by_survival else score.index_select(0, best)[:, None]

    def _tree(
        self,
        candidates: list[tuple[Tensor, ...]],
        k: int,
        pool: Callable[[Tensor], Pool] | None,
        draws: tuple[Tensor | None, list[Tensor]] | None,
    ) -> Tree:
        """The tree of the root and each level's candidates, k per parent;
        draws: the target's ids of the laws' columns, and by level the laws that children were drawn from."""
        tokens, confidences, survivals, scores, (_, *above), frontiers = zip(
            *candidates, strict=True
        )
        both, depth = torch.cat([*confidences, *survivals]).view(2, -1), len(above)
        expanded = _numbers(tokens[:-1], above)
        # reranking (section 4.2): the best are connected, as the stable sort gives ties to the shallower node
        score = both[1] if self.by_survival else torch.cat(scores)
        ranked = (
            score.sort(descending=True, stable=True).indices[: self.nodes] if self.rerank else None
        )
        kept = (_numbers(tokens, frontiers) if ranked is None else ranked).sort().values  # [N]
        of, depth_of = _layout(tuple(map(len, above)), k, kept.device).index_select(1, kept)
        parents = torch.searchsorted(kept, expanded.index_select(0, of))  # [N]; the root is its own
        token = torch.cat(tokens).index_select(0, kept)
        confidence, survival = both.index_select(1, kept)
        proposal = None
        if draws is not None:
            law_of = kept.new_zeros(len(score)).scatter_(
                0, expanded, torch.arange(len(expanded), device=kept.device)
            )
            q = torch.cat(draws[1]).index_select(
                0, law_of.index_select(0, kept)
            )  # a leaf's law is not read
            proposal = Proposal("R3", q, draws[0], ranks=(kept - 1) % k, width=k)
        mask, made = ancestors(parents, depth), pool and pool(kept)
        return Tree(
            token,
            parents,
            depth_of,
            mask,
            confidence,
            survival,
            depth,
            depth,
            proposal,
            pool=made,
        )


def best_alone(level: Level) -> Level:
    """The level with its best candidate alone: all that a stop rule may see of drawn children.

    No deeper node ranks above this candidate, so whether it is kept does not depend on a stop here.
    """
    first = level.frontier[:1]
    row, zero = level.rows.index_select(0, first), torch.zeros_like(first)
    of_row, of_first = ("log_q", "parents"), ("tokens", "confidence", "survival")
    parts = {name: getattr(level, name).index_select(0, row) for name in of_row}
    parts |= {name: getattr(level, name).index_select(0, first) for name in of_first}
    return replace(
        level, **parts, rows=zero, frontier=zero, frontier_survival=level.frontier_survival[:1]
    )


@cache
def _rows(count: int, k: int, device: torch.device) -> Tensor:
    return torch.arange(count, device=device).repeat_interleave(k)


def _numbers(levels: Sequence[Tensor], places: Sequence[Tensor]) -> Tensor:
    """Places within levels, as numbers through all candidates."""
    return torch.cat([*places]) + _firsts(
        tuple(map(len, levels)), tuple(map(len, places)), places[0].device
    )


@cache
def _firsts(sizes: tuple[int, ...], repeats: tuple[int, ...], device: torch.device) -> Tensor:
    before = torch.tensor([0, *sizes[:-1]]).cumsum(0)
    return before.repeat_interleave(torch.tensor(repeats)).to(device)


@cache
def _layout(counts: tuple[int, ...], k: int, device: torch.device) -> Tensor:
    """Of each candidate [2, C]: its parent's place among the expanded nodes, and its depth; counts: these by level."""
    places = torch.arange(sum(counts)).repeat_interleave(k)
    depths = torch.arange(1, 1 + len(counts)).repeat_interleave(k * torch.tensor(counts))
    return F.pad(torch.stack([places, depths]), (1, 0)).to(device)


@dataclass(frozen=True)
class Cycle:
    tree: Tree
    step: TargetStep
    verdict: Verdict
    sampler: Sampler
    rule: str = "R0"  # of verification
    position: int = 0  # the root's place in prompt and answer
    new_tokens: int = 0  # with the bonus token, up to the end token and max_new_tokens
    draft_ms: float = 0.0
    verify_ms: float = 0.0


class Proposer:
    max_nodes: int = 1  # of a tree, root and passengers included
    draft_slots: int = 0  # as of Shape
    max_positions: int = 2**31  # as of Drafter
    after_blocks: tuple[int, ...] = ()
    is_chain: bool = True  # no node ever has siblings
    is_fixed: bool = True  # `propose` and `commit` read nothing from the device
    draws: bool = False  # `propose` draws, from laws that look at no text
    grows_fixed: bool = (
        False  # `propose` reads only the stop rule's answers, between a dynamic tree's levels
    )
    commits_fixed: bool = False  # `commit` reads nothing from the device
    levels: int = 0  # of every tree, except short ones at an answer's end; 0: they differ

    def reset(self, prompt: Tensor, kept: KeptRows, sampler: Sampler) -> None:
        """Begins a prompt [T], of which no row is kept yet."""

    def propose(self, root: Tensor, max_levels: int) -> Tree:
        """The tree under root [1], at most max_levels deep; here the root alone: vanilla."""
        return root_only(root)

    def commit(self, tokens: Tensor, features: Tensor, last: Tensor | None = None) -> None:
        """See `Drafter.commit`; in the prefill the tokens are prompt[1:] and the answer's first."""

    def learn(self, new: list[int], cycle: Cycle | None) -> None:
        """Takes the new tokens, on the host; cycle is None for the prefill."""


class Drafting(Proposer):
    keep = False  # true: every tree has its pool

    def __init__(self, drafter: Drafter, shape: Shape) -> None:
        self.drafter, self.shape = drafter, shape
        self.max_nodes, self.draft_slots = (
            shape.max_nodes,
            max(shape.draft_slots, drafter.draft_rows),
        )
        self.max_positions = drafter.max_positions
        self.after_blocks, self.is_chain = drafter.after_blocks, shape.is_chain
        self.levels = shape.levels

    def reset(self, prompt: Tensor, kept: KeptRows, sampler: Sampler) -> None:
        self._sampler = sampler
        self.shape.stop.reset()
        self.drafter.reset(prompt, kept, self.draft_slots)
        stop, shape, is_dynamic = self.shape.stop, self.shape, isinstance(self.shape, DynamicTree)
        self.draws = shape.draws and sampler.decoding.do_sample
        fixed = self.drafter.is_fixed and stop.reads_only and not self.keep
        if self.draws:  # the host reads a stop rule, a static tree's missing children, laws that depend on the text
            self.is_fixed = fixed and type(stop) is Stop and (is_dynamic or shape.is_chain)
            self.is_fixed, self.grows_fixed = self.is_fixed and not sampler.decoding.of_text, False
        else:
            self.is_fixed = fixed and type(stop) is Stop
            self.grows_fixed = fixed and is_dynamic
        self.commits_fixed = self.drafter.is_fixed

    def propose(self, root: Tensor, max_levels: int) -> Tree:
        return self.counted(
            self.shape.grow(self.drafter, root, max_levels, self._sampler, self.keep)
        )

    def propose_levels(self, root: Tensor, max_levels: int) -> Iterator[Growing]:
        """Grows a tree of `grows_fixed` level by level; does not read the stop rule's answers."""
        assert isinstance(self.shape, DynamicTree)
        return self.shape.grow_levels(self.drafter, root, max_levels, "late")

    def counted(self, tree: Tree) -> Tree:
        """The tree with the forwards that it cost."""
        forwards = self.drafter.forwards_per_tree
        return tree if forwards is None else replace(tree, draft_forwards=forwards)

    def commit(self, tokens: Tensor, features: Tensor, last: Tensor | None = None) -> None:
        self.drafter.commit(tokens, features, last)

    def learn(self, new: list[int], cycle: Cycle | None) -> None:
        if cycle is not None:
            self.shape.stop.learn(cycle.verdict.accepted, cycle.tree.levels)
