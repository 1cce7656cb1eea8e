"""Decoding cycles turned into the lines of cycles.jsonl."""

import torch
from torch import Tensor

from infer.cycle_log import LINE, CycleLine, LawColumns, LevelColumns, NodeColumns, Numbers, Origin
from infer.proposer import Cycle
from infer.stops.entropy import entropy
from infer.tree import Tree
from infer.watch import Growth


class CycleRecorder:
    """Called after each cycle of one answer; `lines` are its lines of JSON, newlines included."""

    def __init__(self, origin: Origin, growth: Growth | None) -> None:
        """growth: of the watched decoder (infer/watch.py)."""
        self.origin, self.growth = origin, growth
        self.lines: list[str] = []
        self._prompt_tokens = 0

    def __call__(self, cycle: Cycle) -> None:
        if not self.lines:
            self._prompt_tokens = cycle.position
        tree, verdict = cycle.tree, cycle.verdict
        p = cycle.sampler.law(cycle.step.logits)  # [N, V]
        laws, entropies = self._laws(cycle)
        line = CycleLine(
            **vars(self.origin),
            cycle=len(self.lines),
            pos_start=cycle.position,
            t_draft=round(cycle.draft_ms, 4),
            t_verify=round(cycle.verify_ms, 4),
            verify=cycle.rule,
            draft_forwards=tree.draft_forwards,
            drafted=tree.num_drafted,
            depth=tree.levels,
            nodes=len(tree),
            accepted=verdict.accepted,
            bonus_id=verdict.bonus,
            new_tokens=cycle.new_tokens,
            stop_reason=self._stop_reason(cycle),
            node=_node_columns(cycle, p, entropies),
            level=self._level_columns(tree),
            law=laws,
        )
        self.lines.append(LINE.dump_json(line).decode() + "\n")

    def _stop_reason(self, cycle: Cycle) -> str | None:
        if cycle.tree.num_drafted == 0:
            return None
        if self.growth is None:
            return "guess"
        if self.growth.stop.ended:
            return self.growth.stop.name
        answered = cycle.position - self._prompt_tokens + 1
        left = cycle.sampler.decoding.max_new_tokens - answered - 1  # the bonus token takes one place
        return "budget" if left < self.growth.shape.levels else "levels"

    def _level_columns(self, tree: Tree) -> LevelColumns:
        found = self.growth.frontier_masses(tree.levels) if self.growth is not None and tree.levels else None
        masses = _node_masses(tree) if found is None else found
        above = [1.0, *masses]
        return LevelColumns(
            survival=_rounded(masses),
            ratio=_rounded([new / old if old > 0 else None for old, new in zip(above, masses, strict=False)]),
            expected=_rounded([sum(masses[: depth + 1]) for depth in range(len(masses))]),
        )

    def _laws(self, cycle: Cycle) -> tuple[LawColumns | None, dict[int, float | None]]:
        """The law columns, and the entropy of each expanded node's law by the node."""
        if self.growth is None or cycle.tree.levels == 0:
            return None, {}
        found = self.growth.laws()
        places = [(node, found[path]) for node, path in enumerate(_paths(cycle.tree)) if path in found]
        nodes = [node for node, _ in places]
        raw = torch.stack([law for _, law in places])  # [M, Vd]
        log_q = raw if cycle.tree.proposal is None else cycle.sampler.log_law(raw)
        log_p = cycle.sampler.log_law(cycle.step.logits[nodes])[:, self.growth.target_ids()]  # [M, Vd]
        q = log_q.exp()
        columns = LawColumns(
            node=tuple(nodes),
            kl=_numbers(torch.where(q > 0, q * (log_q - log_p), 0.0).sum(-1).clamp(min=0.0)),
            tvd=_numbers(1.0 - torch.minimum(log_p.exp(), q).sum(-1).clamp(max=1.0)),
            rank_log_q=_ranked(log_q, [node in cycle.verdict.path for node in nodes]),
        )
        return columns, dict(zip(nodes, _numbers(entropy(raw)), strict=True))


def _ranked(log_q: Tensor, wanted: list[bool]) -> tuple[Numbers | None, ...]:
    """log q of the 1st, 2nd, 4th, 8th ... token of the wanted laws [M, Vd]; null for the others."""
    width = log_q.shape[-1]
    ranks = [2**power - 1 for power in range(width.bit_length()) if 2**power <= width]
    found = (row[ranks] for row in log_q[wanted].sort(-1, descending=True).values)
    return tuple(_numbers(next(found)) if is_wanted else None for is_wanted in wanted)


def _node_columns(cycle: Cycle, p: Tensor, entropies: dict[int, float | None]) -> NodeColumns:
    tree, path = cycle.tree, set(cycle.verdict.path)
    parents = tree.parents.tolist()
    rides = None if tree.passengers is None else tuple(tree.passengers.tolist())
    chosen = [node > 0 and not (rides and rides[node]) for node in range(len(tree))]

    def column(values: Tensor) -> Numbers:
        return tuple(value if is_chosen else None for value, is_chosen in zip(_numbers(values), chosen, strict=True))

    return NodeColumns(
        token=tuple(tree.tokens.tolist()),
        parent=tuple(parents),
        depth=tuple(tree.depth.tolist()),
        q=column(tree.confidence.exp()),
        survival=column(tree.survival.exp()),
        entropy=_rounded([entropies.get(parent) if node else None for node, parent in enumerate(parents)]),
        p=column(p[tree.parents, tree.tokens]),
        accepted=tuple(node in path for node in range(len(tree))),
        passenger=rides,
    )


def _paths(tree: Tree) -> list[tuple[int, ...]]:
    """The tokens from the root, without it, down to each node."""
    paths: list[tuple[int, ...]] = [()]
    for token, parent in list(zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True))[1:]:
        paths.append((*paths[parent], token))
    return paths


def _node_masses(tree: Tree) -> list[float]:
    """The summed survival of the nodes of each level, passengers apart."""
    survival = tree.survival.exp()
    if tree.passengers is not None:
        survival = survival.masked_fill(tree.passengers, 0.0)
    return [float(survival[tree.depth == depth].sum()) for depth in range(1, tree.levels + 1)]


def _numbers(values: Tensor) -> Numbers:
    """The values [n] with as many digits as tell float32 values apart; null for what is not finite."""
    wide = values.detach().float().cpu()
    return tuple(
        float(str(value)) if finite else None
        for value, finite in zip(wide.numpy(), wide.isfinite().tolist(), strict=True)
    )


def _rounded(values: list[float | None] | list[float]) -> Numbers:
    return tuple(None if value is None else float(f"{value:.7g}") for value in values)
