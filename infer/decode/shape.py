"""A draft without branches: gamma tokens in a row, drawn from the draft's law or its argmax."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

import torch
from torch import Tensor

from aerie.configs.schema.decode import Choice, TreeConfig, inline, sized
from aerie.infer.decode.calibrator import Calibrate, unchanged
from aerie.infer.decode.sampling import Sampler, argmax, draw, race
from aerie.infer.decode.stop import Level, Stop, make_stop
from aerie.infer.decode.tree import Candidates, Proposal, Tree, ancestors, draft_ids

if TYPE_CHECKING:
    pass


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


if TYPE_CHECKING:
    pass

Children = Literal["best", "sampled", "replaced"]


class StaticTree:
    """Gives every node of the form the child of its rank: the r-th most probable token, or the r-th that was drawn.

    Where the target samples, children are drawn from q under the target's own processors: `sampled` without replacement
    (R3, EAGLE-1), `replaced` with (R4, SpecInfer). `best` ones, and all at temperature 0, are q's most probable tokens
    (R2, R0). A law that the processors leave fewer tokens than a node has children gives it fewer children: the places
    are drafted below and dropped at the end, which is the one synchronisation; no token that was drawn is ever dropped.
    """

    def __init__(
        self, stop: Stop, choices: tuple[Choice, ...], children: Children, calibrate: Calibrate = unchanged
    ) -> None:
        self.stop, self.calibrate = stop, calibrate
        self.choices, self.children = choices, children
        self._forms: dict[tuple[int, torch.device], _Form] = {}

    @property
    def levels(self) -> int:
        return max(map(len, self.choices))

    @property
    def max_nodes(self) -> int:
        return len(self.choices) + 1

    @property
    def draft_slots(self) -> int:
        return len({choice[:-1] for choice in self.choices if len(choice) > 1})

    def grow(self, drafter: "Drafter", root: Tensor, max_levels: int, sampler: Sampler) -> Tree:
        self.stop.begin()
        log_q, forwards = drafter.start(), 1  # [rows, Vd], one row per node that is expanded
        form = self._form(log_q.shape[-1], root.device)
        sampled = self.children != "best" and sampler.decoding.do_sample
        zero = torch.zeros(1, device=root.device)
        tokens, confidences, survivals, above = [root], [zero], [zero], zero
        laws: list[Tensor] = []
        levels = min(len(form.levels), max_levels)
        for depth, level in enumerate(form.levels[:levels], start=1):
            chances, columns = self._children(log_q, level.width, sampler, laws if sampled else None)
            confidence = self.calibrate(chances[level.rows, level.ranks])  # [n]
            survival = above[level.rows] + confidence
            tokens.append(drafter.target_ids(columns[level.rows, level.ranks]))
            confidences.append(confidence)
            survivals.append(survival)
            inner = level.inner
            alive, order = survival[inner].sort(descending=True, stable=True)
            best = inner[order]
            if depth == levels or self.stop.ends(Level(depth, confidence[best], alive, log_q, above, level.rows[best])):
                break
            log_q = drafter.step(tokens[-1][inner], level.rows[inner])
            forwards += 1
            above = survival[inner]
        drafted = _Drafted(torch.cat(tokens), torch.cat(confidences), torch.cat(survivals), len(tokens) - 1, forwards)
        if not sampled:
            return _tree(form, drafted, None)
        rows = torch.cat(laws)
        places = form.law_rows[: drafted.tokens.shape[0]].clamp(max=rows.shape[0] - 1)  # a leaf's law is not read
        rule: Literal["R3", "R4"] = "R3" if self.children == "sampled" else "R4"
        return _survivors(_tree(form, drafted, Proposal(rule, rows[places], draft_ids(drafter.target_ids, rows))))

    def _children(
        self, log_q: Tensor, width: int, sampler: Sampler, laws: list[Tensor] | None
    ) -> tuple[Tensor, Tensor]:
        """log q and the columns of `width` children of each row [rows, width]; laws, where given, gets q [rows, Vd]."""
        if laws is None:
            chances, columns = log_q.topk(width)
            return chances, columns
        law = sampler.law(log_q)
        laws.append(law)
        if self.children == "replaced":
            columns = law.multinomial(width, replacement=True, generator=sampler.generator)
        else:
            columns = race(law, sampler.generator).topk(width).indices
        return law.gather(-1, columns).log(), columns

    def _form(self, vocab_size: int, device: torch.device) -> "_Form":
        """The form as tensors, without the ranks that a draft vocabulary of this size has no tokens for."""
        key = (vocab_size, device)
        if key not in self._forms:
            self._forms[key] = _make_form([c for c in self.choices if max(c) < vocab_size], device)
        return self._forms[key]


@dataclass(frozen=True)
class _FormLevel:
    """The n nodes of one level."""

    rows: Tensor  # [n] which expanded node of the level above each stands below
    ranks: Tensor  # [n]
    inner: Tensor  # [m] those of them that have children
    width: int  # children to be found per row


@dataclass(frozen=True)
class _Form:
    """What is known of a static tree before anything is drafted."""

    levels: list[_FormLevel]
    parents: Tensor  # [N]
    depth: Tensor  # [N]
    mask: Tensor  # [N, N]
    law_rows: Tensor  # [N] which of the laws, in the order of expansion, a node's children come from; 0 for a leaf


@dataclass(frozen=True)
class _Drafted:
    tokens: Tensor  # [n], n <= N where the stop rule ended growth
    confidence: Tensor
    survival: Tensor
    levels: int
    forwards: int


def _make_form(choices: list[Choice], device: torch.device) -> _Form:
    """The form of choices in level order."""
    nodes: list[Choice] = [(), *choices]
    parents = {choice[:-1] for choice in choices}
    expanded = [node for node in nodes if node in parents]
    place = {node: number for number, node in enumerate(nodes)}
    levels = []
    for depth in range(1, 1 + max(map(len, nodes))):
        here = [node for node in nodes if len(node) == depth]
        above = [node for node in expanded if len(node) == depth - 1]
        levels.append(
            _FormLevel(
                rows=torch.tensor([above.index(node[:-1]) for node in here], device=device),
                ranks=torch.tensor([node[-1] for node in here], device=device),
                inner=torch.tensor([n for n, node in enumerate(here) if node in parents], device=device).long(),
                width=1 + max(node[-1] for node in here),
            )
        )
    above_of = torch.tensor([place[node[:-1]] for node in nodes], device=device)
    return _Form(
        levels=levels,
        parents=above_of,
        depth=torch.tensor([len(node) for node in nodes], device=device),
        mask=ancestors(above_of, len(levels)),
        law_rows=torch.tensor([expanded.index(node) if node in parents else 0 for node in nodes], device=device),
    )


def _tree(form: _Form, drafted: _Drafted, proposal: Proposal | None) -> Tree:
    count = drafted.tokens.shape[0]
    return Tree(
        tokens=drafted.tokens,
        parents=form.parents[:count],
        depth=form.depth[:count],
        mask=form.mask[:count, :count],
        confidence=drafted.confidence,
        survival=drafted.survival,
        levels=drafted.levels,
        draft_forwards=drafted.forwards,
        proposal=proposal,
    )


def _survivors(tree: Tree) -> Tree:
    """The tree without the places that no token was left for (their own or an ancestor's chance is zero)."""
    assert tree.proposal is not None
    kept = (tree.survival > float("-inf")).nonzero()[:, 0]
    if kept.shape[0] == len(tree):
        return tree
    place = torch.zeros_like(tree.parents).scatter_(0, kept, torch.arange(kept.shape[0], device=kept.device))
    return Tree(
        tokens=tree.tokens[kept],
        parents=place[tree.parents[kept]],
        depth=tree.depth[kept],
        mask=tree.mask[kept][:, kept],
        confidence=tree.confidence[kept],
        survival=tree.survival[kept],
        levels=tree.levels,
        draft_forwards=tree.draft_forwards,
        proposal=Proposal(tree.proposal.rule, tree.proposal.laws[kept], tree.proposal.ids),
    )


class Drafter(Protocol):
    """Proposes laws over its own vocabulary of Vd tokens, which `target_ids` maps to the target's.

    One tree is `start`, then any number of `step`s, each over children of the step before. `start` begins anew.
    """

    def start(self) -> Tensor:
        """log q [1, Vd] of the root's children."""
        ...

    def step(self, tokens: Tensor, parents: Tensor) -> Tensor:
        """log q [n, Vd] of the children of n nodes with tokens [n]; parents [n] index the rows of the last call."""
        ...

    def target_ids(self, columns: Tensor) -> Tensor:
        """The target's token ids of columns of log q, of the same shape."""
        ...


class Shape(Protocol):
    """Grows one tree under a root token."""

    stop: Stop

    @property
    def levels(self) -> int:
        """The deepest that it drafts."""
        ...

    @property
    def max_nodes(self) -> int: ...

    @property
    def draft_slots(self) -> int:
        """How many nodes are given to the drafter's `step` for one tree, at most."""
        ...

    def grow(self, drafter: Drafter, root: Tensor, max_levels: int, sampler: Sampler) -> Tree:
        """The tree under root [1], at most max_levels deep; sampler holds the target's processors and the generator."""
        ...


def make_shape(config: TreeConfig, calibrate: Calibrate = unchanged) -> Shape:
    """The shape that a recipe names; calibrate maps the head's log q to the confidence that survival is made of."""
    config = sized(config)
    stop = make_stop(config)
    if config.shape == "chain":
        return Chain(stop, config.levels, config.children != "best", calibrate)
    if config.shape == "static":
        return StaticTree(stop, inline(config), config.children or "sampled", calibrate)
    return DynamicTree(stop, config, calibrate)


class DynamicTree:
    """EAGLE-2's tree: expand the k most probable paths of each level, then keep the best nodes of all levels.

    Survival never grows along a path, so the best `nodes` by survival are connected once ties go to the shallower node:
    candidates stand shallow-first and the sort is stable. Deterministic, so pruning it leaves the output's law alone.
    Ablations: `rank` by confidence expands the nodes with the largest confidence of their own, and keeps those with
    the largest smallest confidence on their path, which is the rule "by confidence, with all ancestors"; without
    `rerank` every level's frontier is kept.
    Source: EAGLE-2 (arXiv 2406.16858), sections 4.1 (expansion), 4.2 (reranking) and 5.2 (ablations).
    """

    def __init__(self, stop: Stop, config: TreeConfig, calibrate: Calibrate = unchanged) -> None:
        self.stop, self.calibrate = stop, calibrate
        self.levels, self.k, self.nodes = config.levels, config.k, config.nodes
        self.by_survival, self.rerank = config.rank == "survival", config.rerank
        self._rows = torch.empty(0, dtype=torch.long)  # of a level's candidates, in order: k times 0, k times 1, ...

    @property
    def max_nodes(self) -> int:
        return self.nodes

    @property
    def draft_slots(self) -> int:
        return self.levels * self.k

    def grow(self, drafter: Drafter, root: Tensor, max_levels: int, sampler: Sampler) -> Tree:
        pool = Candidates(root)
        self.stop.begin()
        levels = min(self.levels, max_levels)
        log_q, forwards = drafter.start(), 1  # [1, Vd]
        frontier = torch.zeros(1, dtype=torch.long, device=root.device)  # pool indices of the expanded nodes
        above = lowest = torch.zeros(1, device=root.device)  # their survival; their path's smallest confidence
        k = min(self.k, log_q.shape[-1])
        row_of = self._row_of(k, root.device)
        for depth in range(1, levels + 1):
            if depth > 1 and self.stop.declines(log_q, above):
                break
            chances, columns = log_q.topk(k, dim=-1)  # [rows, k]
            chances = self.calibrate(chances)
            grown = above[:, None] + chances
            confidence, survival, tokens = chances.flatten(), grown.flatten(), drafter.target_ids(columns).flatten()
            score = survival if self.by_survival else torch.minimum(lowest[:, None], chances).flatten()
            first = pool.add(tokens, frontier, confidence, survival, score)
            if depth == levels and self.rerank:
                break
            best = (survival if self.by_survival else confidence).topk(k).indices
            if not self.rerank:
                pool.pick(best + first)
            if depth == levels:
                break
            rows, alive = row_of.index_select(0, best), survival.index_select(0, best)
            level = Level(depth, confidence.index_select(0, best), alive, log_q, above, rows, survival)
            kept = self._expanded(level)
            if kept is not None:
                best, rows, alive = best[kept], rows[kept], alive[kept]
            if best.shape[0] == 0:
                break
            log_q = drafter.step(tokens.index_select(0, best), rows)
            forwards += 1
            frontier, above = best + first, alive
            lowest = above if self.by_survival else score.index_select(0, best)
        return pool.tree(pool.best(self.nodes) if self.rerank else pool.picked(), k, forwards)

    def _row_of(self, k: int, device: torch.device) -> Tensor:
        if self._rows.shape[0] != k * k or self._rows.device != device:
            self._rows = torch.arange(k, device=device).repeat_interleave(k)
        return self._rows

    def _expanded(self, level: Level) -> Tensor | None:
        """Which of the frontier's nodes [k] the stop rule lets grow, null: all; none of them: the tree ends."""
        if self.stop.ends(level):
            return torch.zeros_like(level.rows, dtype=torch.bool)
        return self.stop.expands(level)
