"""Watching a tree grow: the laws that its drafter proposed and the rule that ended it, for whoever records them."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Any

import numpy as np
import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from aerie.configs.errors import UserError
from aerie.configs.read import STRICT
from aerie.infer.decode.engine import SpeculativeDecoder
from aerie.infer.decode.proposer import CachedDrafter, Cycle, Drafting
from aerie.infer.decode.shape import DynamicTree, Shape
from aerie.infer.decode.stop import Stop, entropy
from aerie.infer.decode.tree import Level, Tree, describe
from aerie.infer.decode.verify import NOT_LOSSLESS
from aerie.infer.decode.verify import acceptance as of_drawn
from aerie.infer.measure.record import CycleArrays
from aerie.model.storage import write_atomically, write_json

Path = tuple[int, ...]  # the target's tokens below the root


class WatchedDrafter:
    """A drafter that keeps the laws of the tree being grown, and which nodes they are of."""

    def __init__(self, drafter: CachedDrafter) -> None:
        self.drafter = drafter
        self.laws: list[Tensor] = []  # log q [rows, Vd] of each call
        self.steps: list[tuple[Tensor, Tensor]] = []  # (tokens, parents) of each `step`

    @property
    def max_positions(self) -> int:
        return self.drafter.max_positions

    @property
    def after_blocks(self) -> tuple[int, ...]:
        return self.drafter.after_blocks

    def target_ids(self, columns: Tensor) -> Tensor:
        return self.drafter.target_ids(columns)

    def reset(self, prompt: Tensor, capacity: int) -> None:
        self.drafter.reset(prompt, capacity)

    def commit(self, tokens: Tensor, features: Tensor) -> None:
        self.drafter.commit(tokens, features)

    def start(self) -> Tensor:
        self.laws, self.steps = [self.drafter.start()], []
        return self.laws[0]

    def step(self, tokens: Tensor, parents: Tensor) -> Tensor:
        self.laws.append(self.drafter.step(tokens, parents))
        self.steps.append((tokens, parents))
        return self.laws[-1]


class WatchedStop(Stop):
    """A stop rule that says afterwards whether it was the rule that ended the tree."""

    def __init__(self, stop: Stop) -> None:
        self.stop = stop
        self.ended = False

    @property
    def name(self) -> str:
        """The rule as recipes call it."""
        return str(self.stop.config.rule)

    def reset(self) -> None:
        self.stop.reset()

    def begin(self) -> None:
        self.ended = False
        self.stop.begin()

    def ends(self, level: Level) -> bool:
        self.ended = self.stop.ends(level)
        return self.ended

    def expands(self, level: Level) -> Tensor | None:
        mask = self.stop.expands(level)
        self.ended = mask is not None and not bool(mask.any())
        return mask

    def learn(self, accepted: int, levels: int) -> None:
        self.stop.learn(accepted, levels)


class Growth:
    """What a watched proposer knows of the tree that it grew last."""

    def __init__(self, drafter: WatchedDrafter, stop: WatchedStop, shape: Shape) -> None:
        self.drafter, self.stop, self.shape = drafter, stop, shape

    def target_ids(self) -> Tensor:
        """The target's ids [Vd] of the laws' columns."""
        law = self.drafter.laws[0]
        return self.drafter.target_ids(torch.arange(law.shape[-1], device=law.device))

    def laws(self) -> dict[Path, Tensor]:
        """log q [Vd] of the children of each node that was expanded, by the node's path."""
        paths: list[Path] = [()]
        found: dict[Path, Tensor] = {(): self.drafter.laws[0][0]}
        for (tokens, parents), laws in zip(self.drafter.steps, self.drafter.laws[1:], strict=True):
            paths = _paths_below(paths, tokens, parents)
            found.update(zip(paths, laws, strict=True))
        return found

    def frontiers(self, levels: int) -> list[tuple[list[Path], Tensor]] | None:
        """Of each level of the tree the frontier before reranking: the paths of its nodes, and their log survival [k].

        As the shape itself chose them. Null for other shapes than a dynamic tree, whose nodes are all in the tree.
        """
        shape = self.shape
        if not isinstance(shape, DynamicTree):
            return None
        paths: list[Path] = [()]
        above = torch.zeros(1, device=self.drafter.laws[0].device)
        found = []
        for depth, log_q in enumerate(self.drafter.laws[:levels]):
            k = min(shape.k, log_q.shape[-1])
            chances, columns = log_q.topk(k, dim=-1)
            chances = shape.calibrate(chances)
            tokens = self.drafter.target_ids(columns).flatten()  # [rows * k]
            survival = (above[:, None] + chances).flatten()
            best = (survival if shape.by_survival else chances.flatten()).topk(k).indices
            chosen = zip((best // k).tolist(), tokens[best].tolist(), strict=True)
            found.append(([(*paths[row], token) for row, token in chosen], survival[best]))
            if depth < len(self.drafter.steps):
                places = {path: place for place, path in enumerate(found[-1][0])}
                paths = _paths_below(paths, *self.drafter.steps[depth])
                above = found[-1][1][[places[path] for path in paths]]
        return found

    def frontier_masses(self, levels: int) -> list[float] | None:
        """S_d of the tree's levels: the summed survival of the frontier of a dynamic tree, pruned nodes included.

        Null for other shapes, whose nodes are all in the tree.
        """
        found = self.frontiers(levels)
        return None if found is None else [float(survival.exp().sum()) for _, survival in found]


def _paths_below(paths: list[Path], tokens: Tensor, parents: Tensor) -> list[Path]:
    """The paths of nodes with tokens [n] below the nodes that parents [n] index."""
    return [(*paths[parent], token) for token, parent in zip(tokens.tolist(), parents.tolist(), strict=True)]


@contextmanager
def watched(decoder: SpeculativeDecoder) -> Iterator[Growth | None]:
    """Watches the trees of a decoder while the block runs; null where nothing is drafted from laws.

    Outside of it nothing is kept and nothing is asked: a decoder that is not watched does not know that it could be.
    """
    proposer = decoder.proposer
    if not isinstance(proposer, Drafting):
        yield None
        return
    drafter, stop = WatchedDrafter(proposer.drafter), WatchedStop(proposer.shape.stop)
    proposer.drafter, proposer.shape.stop = drafter, stop
    try:
        yield Growth(drafter, stop, proposer.shape)
    finally:
        proposer.drafter, proposer.shape.stop = drafter.drafter, stop.stop


Numbers = tuple[float | None, ...]
AnswerKey = tuple[int, tuple[float, int, float], tuple[str, str, int]]  # row, sampling, (task, prompt_id, turn)


@dataclass(frozen=True)
class Origin:
    """Whose cycles: the row of the recipe, its sampling, and the prompt. Turn 0 is a conversation's first."""

    __pydantic_config__ = STRICT
    row: int
    method: str
    temperature: float
    top_k: int
    top_p: float
    task: str
    prompt_id: str
    turn: int

    @property
    def key(self) -> AnswerKey:
        """What finds the record of the same answer."""
        return self.row, (self.temperature, self.top_k, self.top_p), (self.task, self.prompt_id, self.turn)


@dataclass(frozen=True)
class NodeColumns:
    """The tree's nodes in level order, the root first. Null: the root, passengers, and drafts without laws."""

    __pydantic_config__ = STRICT
    token: tuple[int, ...]
    parent: tuple[int, ...]  # the root is its own
    depth: tuple[int, ...]
    q: Numbers  # confidence: its chance under the law that it was chosen from
    survival: Numbers  # product of q along the path (EAGLE-2's value, DEAGLE's s)
    entropy: Numbers  # nats, of the head's law that it came from, before any processor
    p: Numbers  # its chance under the target, after the processors; at temperature 0 the plain softmax
    accepted: tuple[bool, ...]
    passenger: tuple[bool, ...] | None = None  # null: no node is one


@dataclass(frozen=True)
class LevelColumns:
    """The drafted levels d = 1, 2, ... (DEAGLE, equations 22 to 26), whether or not reranking kept their nodes."""

    __pydantic_config__ = STRICT
    survival: Numbers  # S_d: of the frontier of a dynamic tree, of all its nodes at depth d in any other
    ratio: Numbers  # rho_d = S_d / S_{d-1}, with S_0 = 1
    expected: Numbers  # E_d = S_1 + ... + S_d, without the bonus token


@dataclass(frozen=True)
class LawColumns:
    """The draft's laws q of those nodes of the tree that were expanded, against the target's law p at the same node.

    Where children are drawn from q both are after the processors, else q is as the head has it; at temperature 0 both
    are plain softmaxes.
    """

    __pydantic_config__ = STRICT
    node: tuple[int, ...]
    kl: Numbers  # KL(q || p) in nats; null: infinite
    tvd: Numbers  # total variation distance; 1 - tvd is alpha
    rank_log_q: tuple[Numbers | None, ...]  # log q of the 1st, 2nd, 4th, 8th ... token; null off the accepted path


@dataclass(frozen=True)
class CycleLine(Origin):
    """One cycle. tau is the mean of new_tokens; draft tokens kept are min(accepted, new_tokens)."""

    cycle: int  # 0 for the prompt's first
    pos_start: int  # the root's place in the text, the prompt included
    t_draft: float  # ms
    t_verify: float  # ms
    verify: str  # R0 to R4, or that it was not lossless
    draft_forwards: int
    drafted: int  # nodes without the root and passengers
    depth: int  # drafted levels, which a pruned tree need not reach
    nodes: int  # with the root, passengers included
    accepted: int  # draft tokens on the accepted path
    bonus_id: int
    new_tokens: int  # accepted and bonus, up to the end token and max_new_tokens
    stop_reason: str | None  # the rule, `levels`, `budget` (max_new_tokens), `guess` (no rule); null: nothing drafted
    node: NodeColumns
    level: LevelColumns
    law: LawColumns | None  # null: drafted without laws


LINE = TypeAdapter(CycleLine)


class CycleLog:
    """The file, to which whole answers are appended."""

    def __init__(self, path: FilePath) -> None:
        self.path = path

    def keep(self, answers: Collection[AnswerKey]) -> None:
        """Drops a line that was cut by a kill, and those of any other answer than these."""
        if not self.path.is_file():
            return

        def write(temporary: FilePath) -> None:
            with self.path.open("rb") as old, temporary.open("wb") as new:
                for number, line in enumerate(old, start=1):
                    if line.endswith(b"\n") and _parsed(line, f"{self.path}:{number}").key in answers:
                        new.write(line)

        write_atomically(self.path, write)

    def append(self, lines: list[str]) -> None:
        """Appends the lines of one answer and syncs them."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write("".join(lines))
            file.flush()
            os.fsync(file.fileno())


def read_cycle_log(path: FilePath) -> Iterator[CycleLine]:
    """Every line of the file; UserError (file:line) for what is none."""
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                yield _parsed(line, f"{path}:{number}")
    except OSError as error:
        raise UserError(
            f"{path}: {error.strerror or error}; record cycles with: python infer/main.py bench --bench.cycles true"
        ) from error


def _parsed(line: bytes, place: str) -> CycleLine:
    try:
        return LINE.validate_json(line)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        raise UserError(f"{place}: {key}: {first['msg']}; measure again with --overwrite") from error


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


def asked(tree: Tree, path: list[int]) -> Tensor:
    """Which nodes [N] stand below an accepted node: their own acceptance was asked. Not the root, nor passengers."""
    on_path = torch.zeros(len(tree), dtype=torch.bool, device=tree.tokens.device)
    on_path[path] = True
    below = on_path[tree.parents]
    below[0] = False
    return below if tree.passengers is None else below & ~tree.passengers


def acceptance(cycle: Cycle) -> Tensor:
    """Per node [N], in float64, given that its parent was accepted: 0 or 1 at temperature 0, else its chance.

    R2: p(x), tried or not. R1: min(1, p / q). R3 and R4: the same for the first sibling, and for a later one its chance
    that those before it are refused and it is taken, given which tokens were drawn. Typical acceptance, which has no
    chances, is 0 or 1 too. Where it is 0 or 1, only nodes that were `asked` have a meaning.
    """
    tree = cycle.tree
    if cycle.rule in ("R0", NOT_LOSSLESS):
        found = torch.zeros(len(tree), dtype=torch.float64, device=tree.tokens.device)
        found[cycle.verdict.path] = 1.0
        return found
    p = cycle.sampler.law(cycle.step.logits)  # [N, V]
    chances = p[tree.parents, tree.tokens] if tree.proposal is None else of_drawn(tree, p)
    return chances.double()


class NodeCollector:
    """Called after each cycle of each prompt; `arrays` stacks what was seen.

    A node counts once its parent is on the accepted path: only then was its own acceptance asked. At T = 0, and under
    typical acceptance, it is accepted or not; else its acceptance is the chance that the tree's own rule takes it: p(x)
    under R2, and where children were sampled what is left for it by the siblings before it (R1, R3, R4).
    """

    def __init__(self) -> None:
        self.prompt = 0
        self._nodes: list[Tensor] = []  # [n, 5] per cycle: prompt, depth, confidence, survival, acceptance
        self._cycles: list[tuple[int, int]] = []
        self._temperature = 0.0

    def __call__(self, cycle: Cycle) -> None:
        tree = cycle.tree
        chances = acceptance(cycle)
        if cycle.sampler.decoding.do_sample:
            self._temperature = cycle.sampler.decoding.temperature
        rows = torch.stack(
            [
                torch.full_like(chances, self.prompt),
                tree.depth.double(),
                tree.confidence.double().exp(),
                tree.survival.double().exp(),
                chances,
            ],
            dim=1,
        )
        self._nodes.append(rows[asked(tree, cycle.verdict.path)].cpu())
        self._cycles.append((cycle.verdict.accepted, self.prompt))

    def arrays(self) -> CycleArrays:
        """What was collected so far."""
        nodes = torch.cat(self._nodes).numpy() if self._nodes else np.zeros((0, 5))
        cycles = np.array(self._cycles, dtype=np.int64).reshape(-1, 2)
        columns: Sequence[np.ndarray] = [nodes[:, column] for column in range(5)]
        return CycleArrays(
            prompt=columns[0].astype(np.int64),
            depth=columns[1].astype(np.int64),
            confidence=columns[2].clip(0.0, 1.0),
            survival=columns[3].clip(0.0, 1.0),
            acceptance=columns[4].clip(0.0, 1.0),
            accepted_length=cycles[:, 0],
            cycle_prompt=cycles[:, 1],
            temperature=self._temperature,
        )


SCHEMA = 1


class FirstTree:
    """Called after each cycle; prints the first tree that drafted something to stderr, or saves it, or both."""

    def __init__(self, tokenizer: Any, method: str, printed: bool, path: FilePath | None) -> None:
        """path: where the JSON goes; null: nowhere."""
        self.tokenizer, self.method = tokenizer, method
        self.printed, self.path = printed, path
        self.is_done = False

    def __call__(self, cycle: Cycle) -> None:
        if self.is_done or len(cycle.tree) == 1:
            return
        names = [self.tokenizer.decode([token]) for token in cycle.tree.tokens.tolist()]
        if self.printed:
            print("\n" + describe(cycle.tree, names), file=sys.stderr)
        if self.path is not None:
            write_json(self.path, {"schema": SCHEMA, "method": self.method, **as_json(cycle, names)})
        self.is_done = True


def as_json(cycle: Cycle, names: list[str]) -> dict[str, Any]:
    """The tree in level order with the text of each token, its confidence and survival, and whether it was accepted.

    The root's parent is null. The bonus token is the target's own, below the last accepted node.
    """
    tree, path = cycle.tree, set(cycle.verdict.path)
    columns = zip(
        names,
        tree.tokens.tolist(),
        tree.parents.tolist(),
        tree.depth.tolist(),
        tree.confidence.exp().tolist(),
        tree.survival.exp().tolist(),
        strict=True,
    )
    nodes = [
        {
            "node": node,
            "parent": parent if node else None,
            "depth": depth,
            "token": token,
            "text": text,
            "confidence": confidence,
            "survival": survival,
            "accepted": node in path,
        }
        for node, (text, token, parent, depth, confidence, survival) in enumerate(columns)
    ]
    if tree.passengers is not None:
        for node, rides in zip(nodes, tree.passengers.tolist(), strict=True):
            node["passenger"] = rides
    return {
        "position": cycle.position,
        "levels": tree.levels,
        "accepted": cycle.verdict.accepted,
        "bonus": cycle.verdict.bonus,
        "nodes": nodes,
    }
