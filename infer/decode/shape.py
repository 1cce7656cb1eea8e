"""Where to draft: a chain, a static tree or a dynamic one, grown from a drafter's laws under a root token.

Below the shapes: the proposer that a cycle of the engine asks for its tree.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from aerie.configs.schema.decode import ChainConfig, Choice, DynamicConfig, StaticConfig, TreeConfig
from aerie.infer.decode.cache import TargetStep
from aerie.infer.decode.calibrator import Calibrate, unchanged
from aerie.infer.decode.sampling import Sampler, argmax, draw, race
from aerie.infer.decode.stop import Stop, make_stop
from aerie.infer.decode.tree import Level, Pool, Proposal, Tree, ancestors, draft_ids
from aerie.infer.decode.verify import Verdict

Children = Literal["best", "sampled", "replaced"]


class Drafter:
    """Proposes laws over its own vocabulary of Vd tokens: `start`, then `step`s, each below the one before."""

    max_positions: int = 2**31  # the longest text, prompt and answer, that it can draft for
    after_blocks: tuple[int, ...] = ()  # the taps that `commit` is given; none: it is given last_hidden

    def reset(self, prompt: Tensor, capacity: int) -> None:
        """A new prompt [T]; capacity is for prompt, answer and the nodes that are given to `step` for one tree."""

    def commit(self, tokens: Tensor, features: Tensor) -> None:
        """What is known now: n tokens [n], and for each the feature of the token before it, [n, D] or [n, L*D]."""

    def start(self) -> Tensor:
        """log q [1, Vd] of the root's children; begins a tree anew."""
        raise NotImplementedError

    def step(self, tokens: Tensor, parents: Tensor) -> Tensor:
        """log q [n, Vd] of the children of n nodes with tokens [n]; parents [n] index the rows of the last call."""
        raise NotImplementedError

    def target_ids(self, columns: Tensor) -> Tensor:
        """The target's token ids of columns of log q, of the same shape."""
        return columns

    def forwards(self) -> tuple[tuple[Any, str], ...]:
        """(owner, attribute) of every function that runs a model; none calls another. For whoever times them alone."""
        raise NotImplementedError


class Shape:
    """Grows one tree under a root token; calibrate maps the head's log q to the confidence that survival is made of."""

    def __init__(self, stop: Stop, levels: int, max_nodes: int, draft_slots: int, calibrate: Calibrate) -> None:
        """draft_slots: how many nodes are given to the drafter's `step` for one tree, at most."""
        self.stop, self.calibrate = stop, calibrate
        self.levels, self.max_nodes, self.draft_slots = levels, max_nodes, draft_slots

    def grow(self, drafter: Drafter, root: Tensor, max_levels: int, sampler: Sampler, keep: bool = False) -> Tree:
        """The tree under root [1], at most max_levels deep; sampler holds the target's processors and the generator.

        keep: the tree has its `pool`, all candidates that it was chosen from with their laws.
        """
        raise NotImplementedError

    def _pool(self, levels: list[Level], kept: Tensor, drafter: Drafter, ended: bool, reranked: bool = False) -> Pool:
        columns = torch.arange(levels[0].log_q.shape[-1], device=kept.device)
        return Pool(levels, kept, drafter.target_ids(columns), reranked, self.stop.config.rule if ended else None)


def make_shape(config: TreeConfig, calibrate: Calibrate = unchanged) -> Shape:
    """The shape that a recipe names."""
    stop = make_stop(config.stop, config.levels, config.nodes)
    match config:
        case ChainConfig():
            return Chain(stop, config.levels, config.children != "best", calibrate)
        case StaticConfig():
            return StaticTree(stop, config.paths, config.children, calibrate)
        case DynamicConfig():
            return DynamicTree(stop, config, calibrate)


class Chain(Shape):
    """gamma tokens in a row: drawn from q where the target samples (R1), else the draft's argmax each (R2, R0)."""

    # The stop rule is asked once a token stands in the chain, so that no token that was drawn is ever dropped, and its
    # answer decides about the next one alone.
    def __init__(self, stop: Stop, levels: int, sampled: bool = True, calibrate: Calibrate = unchanged) -> None:
        super().__init__(stop, levels, levels + 1, levels, calibrate)
        self.sampled = sampled

    def grow(self, drafter: Drafter, root: Tensor, max_levels: int, sampler: Sampler, keep: bool = False) -> Tree:
        self.stop.begin()
        sampled = self.sampled and sampler.decoding.do_sample
        tokens, confidences = [root], [torch.zeros(1, device=root.device)]
        survival, levels = confidences[0], min(self.levels, max_levels)
        line = torch.arange(levels + 1, device=root.device)
        zero = line[:1]
        log_q, ended = drafter.start(), False  # [1, Vd]
        laws: list[Tensor] = []  # [1, Vd] each
        pool: list[Level] = []
        for depth in range(1, levels + 1):
            # q under the target's own processors: verification compares it with p under the same
            if sampled:
                laws.append(sampler.law(log_q))
                column = draw(laws[-1], sampler.generator)  # [1]
                confidence = laws[-1].gather(-1, column[:, None])[:, 0].log()  # [1]
            else:
                column = argmax(log_q)
                confidence = log_q.gather(-1, column[:, None])[:, 0]
            # the calibrated confidence decides how deep to draft, and never what is drawn or accepted
            confidence = self.calibrate(confidence)
            token = drafter.target_ids(column)
            survival = survival + confidence
            tokens.append(token)
            confidences.append(confidence)
            level = Level(depth, log_q, line[depth - 1 : depth], zero, token, confidence, survival, zero, survival)
            if keep:
                pool.append(level)
            ended = depth < levels and self.stop.ends(level)
            if depth == levels or ended:
                break
            log_q = drafter.step(token, zero)
        count, proposal = len(tokens), None
        if laws:  # the last node has no children, and its law is not read
            leaf = torch.zeros_like(laws[0])
            proposal = Proposal("R1", torch.cat([*laws, leaf]), draft_ids(drafter.target_ids, leaf))
        line, confidence = line[:count], torch.cat(confidences)
        mask = torch.ones(count, count, dtype=torch.bool, device=root.device).tril_()
        parents, survival, last = (line - 1).clamp_(min=0), confidence.cumsum(0), count - 1
        tree = Tree(torch.cat(tokens), parents, line, mask, confidence, survival, last, last, proposal)
        return replace(tree, pool=self._pool(pool, line, drafter, ended)) if keep else tree


class StaticTree(Shape):
    """Gives every node of a known form the child of its rank: the r-th most probable token, or the r-th drawn.

    Where the target samples, children are drawn from q under the target's own processors: `sampled` without replacement
    (R3, EAGLE-1), `replaced` with (R4, SpecInfer). `best` ones, and all at temperature 0, are q's best (R2, R0).
    """

    def __init__(
        self, stop: Stop, choices: tuple[Choice, ...], children: Children, calibrate: Calibrate = unchanged
    ) -> None:
        inner = {choice[:-1] for choice in choices if len(choice) > 1}
        super().__init__(stop, max(map(len, choices)), len(choices) + 1, len(inner), calibrate)
        self.choices, self.children = choices, children
        self._forms: dict[tuple[int, torch.device], _Form] = {}

    def grow(self, drafter: Drafter, root: Tensor, max_levels: int, sampler: Sampler, keep: bool = False) -> Tree:
        self.stop.begin()
        log_q = drafter.start()  # [rows, Vd], one row per node that is expanded
        key = (log_q.shape[-1], root.device)
        if key not in self._forms:  # without the ranks that a draft vocabulary of this size has no tokens for
            self._forms[key] = _form([choice for choice in self.choices if max(choice) < key[0]], root.device)
        form = self._forms[key]
        sampled = self.children != "best" and sampler.decoding.do_sample
        zero = torch.zeros(1, device=root.device)
        tokens, confidences, survivals, above = [root], [zero], [zero], zero
        laws: list[Tensor] = []
        pool: list[Level] = []
        levels, ended = min(len(form.levels), max_levels), False
        for depth, at in enumerate(form.levels[:levels], start=1):
            if sampled:
                laws.append(sampler.law(log_q))
                if self.children == "replaced":
                    columns = laws[-1].multinomial(at.width, replacement=True, generator=sampler.generator)
                else:
                    columns = race(laws[-1], sampler.generator).topk(at.width).indices
                chances = laws[-1].gather(-1, columns).log()
            else:
                chances, columns = log_q.topk(at.width)  # [rows, width]
            confidence = self.calibrate(chances[at.rows, at.ranks])  # [n]
            survival = above[at.rows] + confidence
            tokens.append(drafter.target_ids(columns[at.rows, at.ranks]))
            confidences.append(confidence)
            survivals.append(survival)
            # the frontier: nodes that have children in the form, the best first, for the stop rule
            alive, order = survival[at.inner].sort(descending=True, stable=True)
            frontier = at.inner[order]
            level = Level(depth, log_q, at.parents, at.rows, tokens[-1], confidence, survival, frontier, alive)
            if keep:
                pool.append(level)
            ended = depth < levels and self.stop.ends(level)
            if depth == levels or ended:
                break
            log_q = drafter.step(tokens[-1][at.inner], at.rows[at.inner])
            above = survival[at.inner]
        confidence, survival = torch.cat(confidences), torch.cat(survivals)
        count, depth, proposal = confidence.shape[0], len(tokens) - 1, None
        kept = torch.arange(count, device=root.device) if keep else None
        if sampled:
            rows = torch.cat(laws)
            places = form.law_rows[:count].clamp(max=rows.shape[0] - 1)  # a leaf's law is not read
            rule: Literal["R3", "R4"] = "R3" if self.children == "sampled" else "R4"
            # A law that the processors leave fewer tokens than a node has children gives it fewer children. Their
            # places were drafted below, and are dropped here: the one synchronisation. No drawn token is ever dropped.
            kept = (survival > float("-inf")).nonzero()[:, 0]
            proposal = Proposal(rule, rows[places[kept]], draft_ids(drafter.target_ids, rows))
        pool_of = self._pool(pool, kept, drafter, ended) if keep and kept is not None else None
        parts = [torch.cat(tokens), form.parents[:count], form.depth[:count], form.mask[:count, :count]]
        parts += [confidence, survival]
        if kept is not None and kept.shape[0] < count:
            place = torch.zeros_like(parts[1]).scatter_(0, kept, torch.arange(kept.shape[0], device=kept.device))
            parts = [part[kept] for part in parts]
            parts[1], parts[3] = place[parts[1]], parts[3][:, kept]
        node_tokens, parents, depths, mask, confidence, survival = parts
        return Tree(node_tokens, parents, depths, mask, confidence, survival, depth, depth, proposal, pool=pool_of)


@dataclass(frozen=True)
class _FormLevel:
    """The n nodes of one level."""

    parents: Tensor  # [rows] the expanded nodes of the level above, in the tree's numbers
    rows: Tensor  # [n] which of them each node stands below
    ranks: Tensor  # [n]
    inner: Tensor  # [m] those of the n that have children
    width: int  # children to be found per row


@dataclass(frozen=True)
class _Form:
    """What a static tree is before anything is drafted."""

    levels: list[_FormLevel]
    parents: Tensor  # [N]
    depth: Tensor  # [N]
    mask: Tensor  # [N, N]
    law_rows: Tensor  # [N] which of the laws, in the order of expansion, a node's children come from; 0 for a leaf


def _form(choices: list[Choice], device: torch.device) -> _Form:
    """The form of choices in level order."""
    nodes: list[Choice] = [(), *choices]
    number = {node: place for place, node in enumerate(nodes)}
    with_children = {choice[:-1] for choice in choices}
    expanded = [node for node in nodes if node in with_children]

    def tensor(values: Iterable[int]) -> Tensor:
        return torch.tensor(list(values), dtype=torch.long, device=device)

    levels = []
    for depth in range(1, 1 + max(map(len, nodes))):
        here = [node for node in nodes if len(node) == depth]
        above = [node for node in expanded if len(node) == depth - 1]
        rows, ranks = tensor(above.index(node[:-1]) for node in here), [node[-1] for node in here]
        inner = tensor(place for place, node in enumerate(here) if node in with_children)
        levels.append(_FormLevel(tensor(number[node] for node in above), rows, tensor(ranks), inner, 1 + max(ranks)))
    parents = tensor(number[node[:-1]] for node in nodes)
    law_rows = tensor(expanded.index(node) if node in with_children else 0 for node in nodes)
    return _Form(levels, parents, tensor(map(len, nodes)), ancestors(parents, len(levels)), law_rows)


class DynamicTree(Shape):
    """EAGLE-2's tree: expand the k most probable paths of each level, then keep the best nodes of all levels.

    Deterministic, so that pruning leaves the output's law alone. Source: EAGLE-2 (arXiv 2406.16858), sections 4.1
    (expansion), 4.2 (reranking) and 5.2 (ablations: rank by confidence, no reranking).
    """

    def __init__(self, stop: Stop, config: DynamicConfig, calibrate: Calibrate = unchanged) -> None:
        super().__init__(stop, config.levels, config.nodes, config.levels * config.k, calibrate)
        self.k, self.nodes = config.k, config.nodes
        self.by_survival, self.rerank = config.rank == "survival", config.rerank
        self._rows = torch.empty(0, dtype=torch.long)  # of a level's candidates, in order: k times 0, k times 1, ...

    def grow(self, drafter: Drafter, root: Tensor, max_levels: int, sampler: Sampler, keep: bool = False) -> Tree:
        self.stop.begin()
        levels, ended = min(self.levels, max_levels), False
        log_q, forwards = drafter.start(), 1  # [1, Vd]
        k = min(self.k, log_q.shape[-1])
        if self._rows.shape[0] != k * k or self._rows.device != root.device:
            self._rows = torch.arange(k, device=root.device).repeat_interleave(k)
        parents = torch.zeros(1, dtype=torch.long, device=root.device)  # [r] candidate numbers of the expanded nodes
        above = lowest = torch.zeros(1, device=root.device)  # [r] their survival; their path's smallest confidence
        # of all candidates, level by level; the root is the first
        tokens, confidences, survivals, scores = [root], [above], [above], [above]
        expanded, frontiers = [parents], [parents]
        firsts = [1]  # the number of each level's first candidate
        pool: list[Level] = []
        for depth in range(1, levels + 1):
            # expansion (section 4.1): k children for each expanded node
            chances, columns = log_q.topk(k, dim=-1)  # [r, k]
            chances = self.calibrate(chances)
            grown = above[:, None] + chances
            confidence, survival, token = chances.flatten(), grown.flatten(), drafter.target_ids(columns).flatten()
            # ranked by confidence, a node counts no more than the least sure node on its path: ancestors come along
            score = survival if self.by_survival else torch.minimum(lowest[:, None], chances).flatten()
            tokens.append(token)
            confidences.append(confidence)
            survivals.append(survival)
            scores.append(score)
            if depth == levels and self.rerank and not keep:
                break  # nothing is left to be ranked level by level
            # the k best of the level are expanded next
            best = (survival if self.by_survival else confidence).topk(k).indices
            alive, first = survival.index_select(0, best), firsts[-1]
            frontiers.append(best + first)
            rows = self._rows[: token.shape[0]]
            level = Level(depth, log_q, parents, rows, token, confidence, survival, best, alive)
            if keep:
                pool.append(level)
            if depth == levels:
                break
            ended = self.stop.ends(level)
            growing = None if ended else self.stop.expands(level)
            if growing is not None:
                best, alive = best[growing], alive[growing]
                ended = best.shape[0] == 0
            if ended:
                break
            log_q = drafter.step(token.index_select(0, best), rows.index_select(0, best))
            forwards += 1
            parents, above = best + first, alive
            lowest = above if self.by_survival else score.index_select(0, best)
            expanded.append(parents)
            firsts.append(first + token.shape[0])
        # Reranking (section 4.2). Survival never grows along a path, so the best by survival are connected once ties go
        # to the shallower node:
        # candidates stand shallow-first, and the sort is stable.
        ranked = torch.cat(scores).sort(descending=True, stable=True).indices[: self.nodes] if self.rerank else None
        kept = (torch.cat(frontiers) if ranked is None else ranked).sort().values  # [N]
        # candidate c > 0 is one of k below the expanded node number (c - 1) // k; the root is its own parent
        number = torch.cat(expanded).index_select(0, (kept - 1).clamp_(min=0).floor_divide_(k))
        of, count = torch.searchsorted(kept, number), len(firsts)  # [N]
        depth_of = torch.bucketize(kept, torch.tensor(firsts, device=kept.device), right=True)
        token, confidence, survival = (
            torch.cat(column).index_select(0, kept) for column in (tokens, confidences, survivals)
        )
        kept_pool = self._pool(pool, kept, drafter, ended, reranked=True) if keep else None
        mask = ancestors(of, count)
        return Tree(token, of, depth_of, mask, confidence, survival, count, forwards, pool=kept_pool)


@dataclass(frozen=True)
class Cycle:
    """Everything about one cycle, for whoever measures: the tree, the target's answer, and what was accepted."""

    tree: Tree
    step: TargetStep
    verdict: Verdict
    sampler: Sampler
    rule: str = "R0"  # that judged the tree (decode/verify.py)
    position: int = 0  # the root's place in the text, the prompt included
    new_tokens: int = 0  # the verdict's tokens and the bonus token, up to the end token and max_new_tokens
    draft_ms: float = 0.0
    verify_ms: float = 0.0


class Proposer:
    """Proposes one tree per cycle and is told what became of it: a drafter in a shape, or whatever else guesses."""

    max_nodes: int = 1  # rows of the widest tree, root and passengers included
    max_positions: int = 2**31  # the longest text, prompt and answer, that it can draft for
    after_blocks: tuple[int, ...] = ()  # the taps that `commit` is given; none: it is given last_hidden

    def reset(self, prompt: Tensor, capacity: int, sampler: Sampler) -> None:
        """A new prompt [T]; capacity is the length of prompt, answer and one tree together."""

    def propose(self, root: Tensor, max_levels: int) -> Tree:
        """The tree under the last known token [1], at most max_levels deep."""
        raise NotImplementedError

    def commit(self, tokens: Tensor, features: Tensor, cycle: Cycle | None) -> None:
        """What is known now: n tokens [n] and for each the feature of the token before it, [n, D] or [n, L*D].

        After the prefill these are the prompt's, without its first token, and the answer's first; cycle is then null.
        """


class Drafting(Proposer):
    """A drafter, a shape and the shape's stop rule as one proposer."""

    keep = False  # true: every tree has its pool (Tree.pool), for whoever measures; set it before an answer begins

    def __init__(self, drafter: Drafter, shape: Shape, forwards_per_tree: int | None = None) -> None:
        """forwards_per_tree: 1 where one forward yields all levels' laws (Medusa), null for one a level."""
        self.drafter, self.shape, self.forwards_per_tree = drafter, shape, forwards_per_tree
        self.max_nodes, self.max_positions = shape.max_nodes, drafter.max_positions
        self.after_blocks = drafter.after_blocks
        self._sampler: Sampler | None = None

    def reset(self, prompt: Tensor, capacity: int, sampler: Sampler) -> None:
        self._sampler = sampler
        self.shape.stop.reset()
        self.drafter.reset(prompt, capacity + self.shape.draft_slots)

    def propose(self, root: Tensor, max_levels: int) -> Tree:
        assert self._sampler is not None, "reset first"
        tree = self.shape.grow(self.drafter, root, max_levels, self._sampler, self.keep)
        return tree if self.forwards_per_tree is None else replace(tree, draft_forwards=self.forwards_per_tree)

    def commit(self, tokens: Tensor, features: Tensor, cycle: Cycle | None) -> None:
        self.drafter.commit(tokens, features)
        if cycle is not None:
            self.shape.stop.learn(cycle.verdict.accepted, cycle.tree.levels)
