"""A decoder that computes nothing twice: its parts' answers to calls that they have had before, in this order."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path as FilePath
from typing import Any, Protocol

import numpy as np
import torch
import yaml
from numpy.typing import NDArray
from torch import Tensor

from aerie.configs.errors import UserError
from aerie.configs.read import as_dict
from aerie.configs.schema.decode import (
    USUAL,
    ChainConfig,
    ConfidenceConfig,
    DynamicConfig,
    EntropyConfig,
    MarginalGainConfig,
    Method,
    MethodConfig,
    ProbabilitySumConfig,
    StopConfig,
    VoteConfig,
    published_tree,
)
from aerie.configs.schema.measure import BenchConfig, TuneConfig
from aerie.data.progress import bar
from aerie.infer.decode.cache import TargetStep
from aerie.infer.decode.calibrator import calibrate_of, unchanged
from aerie.infer.decode.engine import SpeculativeDecoder, Statistics
from aerie.infer.decode.methods import Drafters, drafting
from aerie.infer.decode.proposer import CachedDrafter, Cycle, Drafting, Proposer
from aerie.infer.decode.sampling import Decoding, Sampler
from aerie.infer.decode.shape import Drafter
from aerie.infer.decode.stop import Stop
from aerie.infer.decode.tree import Tree, root_only
from aerie.infer.measure.bench import Bench, describe, make_decoders, run
from aerie.infer.measure.record import Record
from aerie.infer.measure.statistics import group, row, speedups
from aerie.infer.measure.tasks import Prompt, encode, load_prompts
from aerie.model.hub import head_directory
from aerie.model.storage import CALIBRATOR, write_json, write_text
from aerie.model.target import Target

GrownConfig = ChainConfig | DynamicConfig  # trees whose depth can be searched
LM_CALLS = ("prefill", "extend", "keep")
DRAFTER_CALLS = ("reset", "commit", "start", "step")
PROPOSER_CALLS = ("reset", "propose", "commit")
SILENT = ("reset", "commit", "keep")  # calls without an answer, which can wait until there is something to answer

Path = tuple[int, ...]
Place = tuple[tuple[Path, ...], tuple[Path, ...]]  # the text, piece by piece, and the paths of the last answer's rows
NOWHERE: Place = ((), ())
Laws = dict[tuple[Decoding, int], tuple[Tensor, Tensor]]  # logits and their law


def remember(decoder: SpeculativeDecoder) -> SpeculativeDecoder:
    """The same decoder, whose target and draft head run once for each text and path, and whose trees grow once.

    For many short answers to one prompt. A tree of which anything is drawn at random grows anew every time;
    verification and the loop itself run as ever.
    """
    decoder.lm = Remembered(decoder.lm, LM_CALLS, NodeRows())  # type: ignore[assignment]
    if isinstance(decoder.proposer, Drafting):
        decoder.proposer.drafter = Remembered(decoder.proposer.drafter, DRAFTER_CALLS, LawRows())
    if decoder.proposer is not None:
        decoder.proposer = RememberedProposer(decoder.proposer)
    decoder.make_sampler = partial(RememberedSampler, laws={})
    return decoder


class Rows(Protocol):
    """Of calls that answer with a row for each node: how the rows, which depend on text and path, are told apart."""

    def place(self, before: Place, name: str, given: tuple[Any, ...]) -> Place:
        """The text that the object has read after a call, and the paths of the rows of its answer."""
        ...

    def split(self, answer: Any) -> Sequence[Any]: ...

    def joined(self, rows: Sequence[Any]) -> Any: ...


class NodeRows:
    """Those of a target's `extend`: one for each node of a tree."""

    def place(self, before: Place, name: str, given: tuple[Any, ...]) -> Place:
        text, paths = before
        if name == "extend":
            tree: Tree = given[0]
            return text, _paths(tree)
        return ((*text, paths[given[0][-1]]), ()) if name == "keep" else NOWHERE

    def split(self, answer: TargetStep) -> Sequence[Any]:
        columns = (answer.logits, answer.last_hidden, answer.taps)
        return list(zip(*(column for column in columns if column is not None), strict=True))

    def joined(self, rows: Sequence[Any]) -> TargetStep:
        logits, last_hidden, *taps = (torch.stack(column) for column in zip(*rows, strict=True))
        return TargetStep(logits, last_hidden, taps[0] if taps else None)


class LawRows:
    """Those of a drafter's `start` and `step`: a law for each node."""

    def place(self, before: Place, name: str, given: tuple[Any, ...]) -> Place:
        text, paths = before
        if name == "commit":
            return (*text, tuple(given[0].tolist())), ()
        if name == "start":
            return text, ((),)
        if name == "step":
            tokens, parents = (column.tolist() for column in given)
            return text, tuple((*paths[parent], token) for token, parent in zip(tokens, parents, strict=True))
        return NOWHERE

    def split(self, answer: Tensor) -> Sequence[Any]:
        return list(answer)

    def joined(self, rows: Sequence[Any]) -> Tensor:
        return torch.stack(list(rows))


class _State:
    """What an object answered last, and the states that further calls lead to."""

    def __init__(self, answer: Any, place: Place) -> None:
        self.answer, self.place = answer, place
        self.next: dict[Any, _State] = {}


class Remembered:
    """Stands for an object whose answers depend on the calls since the first of `calls`, and on nothing else.

    A call that continues a known history, or whose rows are all known, is answered from memory; for another one the
    whole history is put to the object itself.
    """

    def __init__(self, inner: Any, calls: tuple[str, ...], rows: Rows | None = None) -> None:
        self._inner, self._calls, self._rows = inner, calls, rows
        self._start = self._state = _State(None, NOWHERE)
        self._known: dict[tuple[tuple[Path, ...], Path], Any] = {}  # rows by text and path
        self._history: list[tuple[str, tuple[Any, ...]]] = []
        self._told = 0  # how many calls of this history the object has had

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._inner, name)
        return partial(self._call, name, attribute) if name in self._calls else attribute

    def _call(self, name: str, method: Callable[..., Any], *given: Any) -> Any:
        if name == self._calls[0]:
            self._state, self._history, self._told = self._start, [], 0
        self._history.append((name, given))
        key = (name, *map(_key, given))
        if key not in self._state.next:
            self._state.next[key] = self._learned(name, method, given)
        self._state = self._state.next[key]
        return self._state.answer

    def _learned(self, name: str, method: Callable[..., Any], given: tuple[Any, ...]) -> _State:
        """The state after a call that this history has not had."""
        text, paths = place = NOWHERE if self._rows is None else self._rows.place(self._state.place, name, given)
        if name in SILENT:
            return _State(None, place)
        keys = [(text, path) for path in paths]
        if self._rows is None or not keys:
            return _State(self._asked(method, given), place)
        if not all(key in self._known for key in keys):
            self._known.update(zip(keys, self._rows.split(self._asked(method, given)), strict=True))
        return _State(self._rows.joined([self._known[key] for key in keys]), place)

    def _asked(self, method: Callable[..., Any], given: tuple[Any, ...]) -> Any:
        """The object's own answer to the last call of the history."""
        for earlier, arguments in self._history[self._told : -1]:
            getattr(self._inner, earlier)(*arguments)
        self._told = len(self._history)
        return method(*given)


class RememberedProposer:
    """Stands for a proposer, until it turns out to draw at random: from then on it is asked every time."""

    def __init__(self, proposer: Proposer) -> None:
        self._proposer = proposer
        self._asked: Any = Remembered(proposer, PROPOSER_CALLS)
        self._generator = torch.Generator()

    @property
    def max_nodes(self) -> int:
        return self._proposer.max_nodes

    @property
    def max_positions(self) -> int:
        return self._proposer.max_positions

    @property
    def after_blocks(self) -> tuple[int, ...]:
        return self._proposer.after_blocks

    def reset(self, prompt: Tensor, capacity: int, sampler: Sampler) -> None:
        self._generator = sampler.generator
        self._asked.reset(prompt, capacity, sampler)

    def propose(self, root: Tensor, max_levels: int) -> Tree:
        if self._asked is self._proposer:
            return self._proposer.propose(root, max_levels)
        before = self._generator.get_state()
        tree: Tree = self._asked.propose(root, max_levels)
        if not torch.equal(before, self._generator.get_state()):
            self._asked = self._proposer  # which has had this prompt's calls, or could not have drawn
        return tree

    def commit(self, tokens: Tensor, features: Tensor, cycle: Cycle | None) -> None:
        self._asked.commit(tokens, features, cycle)


class RememberedSampler(Sampler):
    """A sampler that puts no logits through the processors twice. The very same logits: what is remembered is."""

    def __init__(self, decoding: Decoding, generator: torch.Generator, laws: Laws) -> None:
        super().__init__(decoding, generator)
        self._laws = laws

    def law(self, logits: Tensor) -> Tensor:
        key = (self.decoding, id(logits))
        if key not in self._laws:
            self._laws[key] = (logits, super().law(logits))  # with the logits, so that no others get their id
        return self._laws[key][1]


def _paths(tree: Tree) -> tuple[Path, ...]:
    """The tokens down to every node, the root's with them."""
    tokens, parents = tree.tokens.tolist(), tree.parents.tolist()
    paths: list[Path] = [(tokens[0],)]
    for token, parent in zip(tokens[1:], parents[1:], strict=True):
        paths.append((*paths[parent], token))
    return tuple(paths)


def _key(argument: Any) -> Any:
    """Something to look an argument up by: the bytes of tensors, what an answer depends on of other things."""
    if isinstance(argument, Tensor):
        return (tuple(argument.shape), argument.cpu().numpy().tobytes())
    if isinstance(argument, Tree):
        return tuple(map(_key, (argument.tokens, argument.depth, argument.mask)))
    if isinstance(argument, Sampler):
        return argument.decoding
    if isinstance(argument, Cycle):
        return tuple(argument.verdict.path), tuple(argument.verdict.tokens), argument.verdict.bonus
    return tuple(argument) if isinstance(argument, list) else argument


def check_apart(config: TuneConfig) -> None:
    """UserError for a choice that would be measured on a prompt that it is made on."""
    if config.measure is None:
        return
    known = {prompt.text for prompt in load_prompts(config.prompts)}
    seen = next((prompt for prompt in load_prompts(config.measure) if prompt.text in known), None)
    if seen is not None:
        raise UserError(
            f"tune.measure: prompt {seen.prompt_id!r} is one of those that the choice is made on; measure on others"
        )


SHALLOW, DEEP = 2, 8  # two depths give the first level's cost and that of each further one
WIDTHS = (1, 2, 4, 8, 10)
NODES = (2, 4, 6, 8, 12, 16, 24, 32, 48, 60)


@dataclass(frozen=True)
class Costs:
    """Milliseconds of one cycle's parts. Widths and node counts that were not measured are interpolated.

    draft[k] is (one level, each further level) of a tree with frontier k; verify[n] is v(n), a target forward over n
    nodes with the choice among them; rest is what a drafting cycle costs beside them (committing); plain is a whole
    cycle without drafting.
    """

    draft: dict[int, tuple[float, float]]
    verify: dict[int, float]
    rest: float
    plain: float

    def draft_ms(self, trees: int, levels: int, k: int) -> float:
        """Of this many trees with so many levels in sum."""
        widths = sorted(self.draft)
        first, further = (float(np.interp(k, widths, [self.draft[width][part] for width in widths])) for part in (0, 1))
        return trees * first + max(levels - trees, 0) * further

    def verify_ms(self, nodes: float) -> float:
        """v(nodes)."""
        counts = sorted(self.verify)
        return float(np.interp(nodes, counts, [self.verify[count] for count in counts]))


def measure_costs(
    vanilla: SpeculativeDecoder, drafter: CachedDrafter, prompts: Sequence[Tensor], repetitions: int = 3
) -> Costs:
    """The costs of a drafter's trees on these prompts [1, T]: medians over prompts and repetitions."""
    shapes = _shapes()
    target = vanilla.target
    decoders = [vanilla, *(SpeculativeDecoder(target, drafting(drafter, tree)) for tree in shapes)]
    plain, *found = in_turns(decoders, prompts, repetitions, "costs")
    return _fitted(plain, dict(zip(shapes, found, strict=True)))


def _shapes() -> list[GrownConfig]:
    """Every width at two depths, and every node count at least once."""
    shapes, pending = [], list(NODES)
    for k in WIDTHS:
        for levels in (SHALLOW, DEEP):
            most = k + (levels - 1) * k * k + 1
            nodes = next((count for count in pending if count <= most), None)
            if nodes is not None:
                pending.remove(nodes)
            shapes.append(_tree(levels, k, nodes or min(most, NODES[-1])))
    return [*shapes, *(_tree(DEEP, WIDTHS[-1], nodes) for nodes in pending)]


def _tree(levels: int, k: int, nodes: int) -> GrownConfig:
    return DynamicConfig(levels=levels, k=k, nodes=nodes)


def _fitted(plain: Sequence[Statistics], found: dict[GrownConfig, list[Statistics]]) -> Costs:
    draft: dict[int, tuple[float, float]] = {}
    for k in WIDTHS:
        points = [_per_tree(found[tree]) for tree in found if tree.k == k]  # (levels, ms) of a tree
        levels, times = np.array(points).T
        slope = max(float(np.polyfit(levels, times, 1)[0]), 0.0)
        draft[k] = (float(np.mean(times - slope * (levels - 1))), slope)
    counts = sorted({tree.nodes for tree in found})
    verify = {
        count: statistics.median(
            _each(one, "verify") for tree, members in found.items() if tree.nodes == count for one in members
        )
        for count in counts
    }
    verify[1] = statistics.median(_each(one, "verify") for one in plain)
    verify = dict(zip(sorted(verify), _rising([verify[count] for count in sorted(verify)]), strict=True))
    rest = [_each(one, "commit") + _each(one, "other") for members in found.values() for one in members]
    return Costs(draft, verify, statistics.median(rest), statistics.median(cycle_ms(one) for one in plain))


def _rising(values: Sequence[float]) -> list[float]:
    """The middle between the rising curves around the values: more nodes never cost less."""
    measured = np.array(values)
    above, below = np.maximum.accumulate(measured), np.minimum.accumulate(measured[::-1])[::-1]
    return [float(value) for value in (above + below) / 2]


def _each(counted: Statistics, phase: str) -> float:
    return counted.ms[phase] / counted.target_forwards


def _per_tree(members: Sequence[Statistics]) -> tuple[float, float]:
    """Mean levels of a tree, and the median of its drafting time. (A cycle without a draft costs next to nothing.)"""
    trees = [sum(1 for _ in one.cycle_tokens) for one in members]
    levels = statistics.mean(one.draft_forwards / count for one, count in zip(members, trees, strict=True))
    return levels, statistics.median(one.ms["draft"] / count for one, count in zip(members, trees, strict=True))


# twelve trees that somebody would try by hand: (levels, k, nodes); k = 1: a chain
GRID = (
    *((levels, 1, levels + 1) for levels in (3, 5, 8)),
    *((levels, 2, 12) for levels in (4, 6, 8)),
    *((levels, 4, 24) for levels in (4, 6, 8)),
    *((levels, 8, 60) for levels in (5, 7, 9)),
)
VANILLA, CHOSEN, PUBLISHED = 0, 1, 2  # rows; the grid follows


@dataclass(frozen=True)
class Outcome:
    """A row's measured speed, the chosen row's speed relative to it (paired, with a 95 % interval)."""

    method: MethodConfig
    tau: float | None
    speedup: float | None
    speedup_ci95: list[float] | None
    chosen_against_it: float | None
    chosen_against_it_ci95: list[float] | None


def rows(kind: str, choice: MethodConfig, grid: bool) -> list[MethodConfig]:
    """vanilla, the choice, the published method, and the grid where it is asked for."""
    named = [MethodConfig("vanilla"), choice, MethodConfig(USUAL[kind])]
    if grid:
        shapes = [one for one in GRID if one[1] == 1 or kind != "draft_lm"]
        named += [method_of(kind, _tree_search(levels, k, nodes)) for levels, k, nodes in shapes]
    return named


def outcomes(methods: Sequence[MethodConfig], records: Sequence[Record], seed: int) -> list[Outcome]:
    """What was measured of each row."""
    groups = {members.first.row: members for members in group(records)}
    chosen = {record.prompt_key: record for record in groups[CHOSEN].records if record.status == "ok"}
    found = []
    for number, method in enumerate(methods):
        members = groups[number]
        measured = row(members, seed)
        pairs = [(chosen[one.prompt_key], one) for one in members.records if one.prompt_key in chosen]
        against = speedups([(ours, one) for ours, one in pairs if one.status == "ok"], seed)
        found.append(
            Outcome(
                method,
                measured.get("tau"),
                measured.get("speedup"),
                measured.get("speedup_ci95"),
                against["speedup"],
                against["speedup_ci95"],
            )
        )
    return found


def names(methods: Sequence[MethodConfig]) -> list[str]:
    """What each row is called in a table."""
    found: list[str] = []
    for method in methods:
        tree = method.tree
        if tree is None:
            found.append(method.method)
            continue
        chain = tree.shape == "chain"
        shape = f"chain of {tree.levels}" if chain else f"{tree.levels} levels, k {tree.k}, {tree.nodes} nodes"
        rule = "" if tree.stop.rule == "constant" else f", {tree.stop.rule}"
        by = f", {tree.calibrated} confidence" if tree.calibrated else ""
        found.append(f"{method.method}, {shape}{rule}{by}")
    return found


def verdict(found: Sequence[Outcome], predicted: Prediction) -> dict[str, Any]:
    """What measured.json says first: against the published tree, the best of the grid, and the prediction."""
    chosen, grid = found[CHOSEN], found[PUBLISHED + 1 :]
    best = max(grid, key=lambda one: one.speedup or 0.0, default=None)
    measured = chosen.speedup
    return {
        "against_published": asdict(found[PUBLISHED]),
        "against_best_of_grid": None if best is None else asdict(best),
        "predicted_over_measured": None if not measured else predicted.speedup / measured,
        "predicted_tau_over_measured": None if not chosen.tau else predicted.tau / chosen.tau,
    }


Floats = NDArray[np.float32]
Integers = NDArray[np.int64]


@dataclass(frozen=True)
class Recording:
    """The drafts at the P places of some answers: L levels, at most K rows (expanded nodes) a level, K children a row.

    Row r of level l + 1 is below the node with flat index frontier[:, l, r] (row * K + child) of level l; level 0 has
    one row, below the root. Children stand by falling confidence.
    """

    tokens: Integers  # [P, L, K, K] the target's ids; -1 where there is no node
    survival: Floats  # [P, L, K, K] log survival; -inf where there is no node
    frontier: Integers  # [P, L - 1, K]
    text: Integers  # [P, L] what the target wrote after each place; -1 beyond the answer's end
    answer: Integers  # [P] which answer the place belongs to; its places stand in order
    left: Integers  # [P] tokens that the answer still had after the place's root
    allowed: Integers  # [P] tokens that max_new_tokens still allowed after the place's root

    @property
    def levels(self) -> int:
        return self.tokens.shape[1]

    @property
    def k(self) -> int:
        return self.tokens.shape[2]


class Recorder:
    """A shape that drafts `levels` levels of k rows and hands out the root alone."""

    def __init__(self, levels: int, k: int) -> None:
        self.levels, self.k = levels, k
        self.stop = Stop()
        self.tokens: list[Tensor] = []  # of each place [L, K, K]
        self.survival: list[Tensor] = []
        self.frontier: list[Tensor] = []  # [L - 1, K]

    @property
    def max_nodes(self) -> int:
        return 1

    @property
    def draft_slots(self) -> int:
        return self.levels * self.k

    def grow(self, drafter: Drafter, root: Tensor, max_levels: int, sampler: Sampler, keep: bool = False) -> Tree:
        del max_levels, sampler, keep
        k = self.k
        tokens = torch.full((self.levels, k, k), -1, dtype=torch.long)
        survival = torch.full((self.levels, k, k), -torch.inf)
        frontier = torch.zeros(self.levels - 1, k, dtype=torch.long)
        log_q, above = drafter.start(), torch.zeros(1, device=root.device)
        for level in range(self.levels):
            chances, columns = log_q.topk(min(k, log_q.shape[-1]), dim=-1)  # [rows, k]
            rows, width = chances.shape
            grown, named = above[:, None] + chances, drafter.target_ids(columns)
            tokens[level, :rows, :width], survival[level, :rows, :width] = named.cpu(), grown.cpu()
            if level == self.levels - 1:
                break
            best = grown.flatten().topk(min(k, rows * width)).indices
            frontier[level, : best.shape[0]] = (best // width * k + best % width).cpu()
            log_q = drafter.step(named.flatten()[best], best // width)
            above = grown.flatten()[best]
        self.tokens.append(tokens)
        self.survival.append(survival)
        self.frontier.append(frontier)
        return root_only(root)


def record(
    decoder: SpeculativeDecoder, prompts: Sequence[Tensor], levels: int, k: int, max_new_tokens: int, seed: int = 0
) -> Recording:
    """The drafts of a decoder's drafter at every place of the greedy answers to prompts of token ids [1, T]."""
    assert isinstance(decoder.proposer, Drafting), "only a drafter in a shape can be recorded"
    parts: list[Recording] = []
    for number, ids in enumerate(prompts):
        recorder = Recorder(levels, k)
        watching = SpeculativeDecoder(decoder.target, Drafting(decoder.proposer.drafter, recorder))
        answer = watching.generate(ids, max_new_tokens=max_new_tokens, do_sample=False).new_ids
        if recorder.tokens:
            parts.append(_part(recorder, answer, number, max_new_tokens))
    return joined(parts)


def joined(parts: Sequence[Recording]) -> Recording:
    """Recordings of the same levels and k as one."""
    names = ("tokens", "survival", "frontier", "text", "answer", "left", "allowed")
    return Recording(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))


def _part(recorder: Recorder, answer: list[int], number: int, max_new_tokens: int) -> Recording:
    places, levels = len(recorder.tokens), recorder.levels  # the last token, or the last but one, has no draft
    padded = np.array([*answer, *([-1] * levels)], dtype=np.int64)
    place = np.arange(places)
    return Recording(
        tokens=torch.stack(recorder.tokens).numpy(),
        survival=torch.stack(recorder.survival).numpy(),
        frontier=torch.stack(recorder.frontier).numpy(),
        text=padded[place[:, None] + 1 + np.arange(levels)],
        answer=np.full(places, number),
        left=len(answer) - 1 - place,
        allowed=max_new_tokens - 1 - place,
    )


@dataclass(frozen=True)
class Cycles:
    """What a tree does to the recorded answers. draft_levels sums the levels drafted; tokens exclude the prefill's."""

    tokens: int
    target_forwards: int
    draft_trees: int  # cycles that drafted (the last token of an answer may need no draft)
    draft_levels: int
    accepted: int

    @property
    def tau(self) -> float:
        return self.tokens / self.target_forwards if self.target_forwards else 1.0


def path_ranks(recording: Recording, levels: int, k: int) -> Integers:
    """[P, levels]: as `_full_ranks`, no draft deeper than what max_new_tokens leaves beside the bonus token."""
    ranks = _full_ranks(recording, levels, k)
    room = np.minimum(recording.allowed - 1, levels)
    for depth in range(levels):
        late = np.flatnonzero(room == depth)
        if late.size:
            ranks[late] = np.iinfo(np.int64).max
            if depth:
                ranks[late, :depth] = _full_ranks(_places(recording, late), depth, k)
    return ranks


def _places(recording: Recording, index: Integers) -> Recording:
    return Recording(**{field.name: getattr(recording, field.name)[index] for field in fields(recording)})


def _full_ranks(recording: Recording, levels: int, k: int) -> Integers:
    """[P, levels]: where the text's own token at each depth stands among the candidates of a tree of this depth and k.

    0 is the best of all candidates of all levels by survival, ties going to the shallower; the number of candidates
    where the tree does not have the token. Never falls with depth.

    A node that the wide recording did not expand has no children here either. It is one that k' > k rows outranked: its
    chance to be on the text's path is small, and the count of a tree can only be underestimated.
    """
    assert levels <= recording.levels and k <= recording.k, "the recording is not that wide"
    places, full = recording.tokens.shape[0], recording.k
    at = np.arange(places)
    alive = np.zeros((places, full), dtype=bool)  # rows of this level that the small tree expands
    alive[:, 0] = True
    row = np.zeros(places, dtype=np.int64)  # the row below the text's own path; -1: the path was left
    pool: list[Floats] = []
    places_in_pool = np.full((places, levels), -1, dtype=np.int64)
    for level in range(levels):
        allowed = alive[:, :, None] & (np.arange(full) < k)
        survival = np.where(allowed, recording.survival[:, level], -np.inf).astype(np.float32)  # [P, K, K]
        pool.append(survival.reshape(places, -1))
        own = recording.tokens[at, level, row]  # [P, K]
        hit = (own == recording.text[:, level, None]) & allowed[at, row]
        hit &= ((row >= 0) & (recording.text[:, level] >= 0))[:, None]
        child = np.where(hit.any(1), hit.argmax(1), -1)
        flat = np.where(child >= 0, row * full + child, -1)
        places_in_pool[:, level] = np.where(flat >= 0, level * full * full + flat, -1)
        if level + 1 < levels:
            best = np.argsort(-pool[-1], axis=1, kind="stable")[:, :k]  # [P, k] the small tree's frontier
            wide = recording.frontier[:, level]  # [P, K] the recording's
            alive = (wide[:, :, None] == best[:, None]).any(-1)
            alive &= np.isfinite(np.take_along_axis(pool[-1], wide, axis=1)) & _first_of_each(wide)
            below = (wide == flat[:, None]) & alive & (flat >= 0)[:, None]
            row = np.where(below.any(1), below.argmax(1), -1)
    return _ranks(np.concatenate(pool, axis=1), places_in_pool)


def accepted(ranks: Integers, nodes: int) -> Integers:
    """[P] drafted tokens that a tree of this many nodes, the root among them, has accepted at each place."""
    count: Integers = np.logical_and.accumulate(ranks < nodes - 1, axis=1).sum(1)
    return count


def cycles(recording: Recording, accepted_at: Integers, levels: int) -> Cycles:
    """The cycles that a tree of these levels needs for the recorded answers: each begins where the last one ended."""
    tokens = forwards = trees = drafted = taken = 0
    for number in np.unique(recording.answer):
        places = np.flatnonzero(recording.answer == number)
        count, left = accepted_at[places].tolist(), recording.left[places].tolist()
        allowed = recording.allowed[places].tolist()
        place, end = 0, left[0]
        while place < end:
            here = place if place < len(count) else None  # the last token may have no draft
            gain = min(count[here] + 1, end - place) if here is not None else 1
            depth = min(levels, allowed[here] - 1) if here is not None else 0
            forwards += 1
            trees += depth > 0
            drafted += max(depth, 0)
            taken += min(count[here], gain) if here is not None else 0
            tokens += gain
            place += gain
    return Cycles(tokens, forwards, trees, drafted, taken)


def _first_of_each(values: Integers) -> np.ndarray[tuple[int, int], np.dtype[np.bool_]]:
    """[P, K] whether no earlier entry of the row is the same (a frontier narrower than K is padded with zeros)."""
    same = values[:, :, None] == values[:, None]
    first: np.ndarray[tuple[int, int], np.dtype[np.bool_]] = ~np.tril(same, -1).any(-1)
    return first


def _ranks(pool: Floats, chosen: Integers) -> Integers:
    """[P, levels] the ranks of chosen entries of pool [P, M] by falling value, the earlier first where they tie."""
    size = pool.shape[1]
    ranks = np.full(chosen.shape, size, dtype=np.int64)
    index = np.arange(size)
    for level in range(chosen.shape[1]):
        place = chosen[:, level]
        value = np.where(place >= 0, pool[np.arange(len(pool)), place], np.inf)[:, None]
        before = (pool > value) | ((pool == value) & (index < place[:, None]))
        ranks[:, level] = np.where(place >= 0, before.sum(1), size)
    return ranks


THRESHOLDS = (0.1, 0.2, 0.3, 0.45, 0.6)
ENTROPY_THRESHOLDS = (0.2, 0.3, 0.4, 0.5, 0.7)  # h; the published one is 0.3
REPETITIONS = 2  # of each finalist's timed answers
CHECKS = (3, 5, 7)  # depths at which a shallow tree's probability sum is looked at


@dataclass(frozen=True)
class Candidate:
    """A method with a stop rule, in a tree."""

    method: Method
    tree: GrownConfig


def candidates(kind: str, tree: GrownConfig, levels: int) -> list[Candidate]:
    """Every rule at every threshold for the tree of a head of this kind, given room to grow to `levels`."""
    grown = replace(tree, levels=levels)
    found: list[tuple[Method, StopConfig]]
    if kind == "draft_lm":
        found = [("sps-svip", EntropyConfig(h=h)) for h in ENTROPY_THRESHOLDS]
        found += [("sps-confidence", ConfidenceConfig(threshold=value)) for value in THRESHOLDS]
    elif tree.shape == "chain":
        rules: list[StopConfig] = [EntropyConfig(h=h) for h in ENTROPY_THRESHOLDS]
        rules += [VoteConfig(probability_threshold=value) for value in THRESHOLDS]
        found = [("eagle-chain", rule) for rule in rules]
    else:
        found = [("svip", EntropyConfig(h=h)) for h in ENTROPY_THRESHOLDS]
        found += [("deagle", VoteConfig(probability_threshold=value)) for value in THRESHOLDS]
        checks = tuple(depth for depth in CHECKS if depth < levels)
        found += [("ddd", ProbabilitySumConfig(checks=checks, threshold=value)) for value in THRESHOLDS if checks]
        found += [("opt-tree", MarginalGainConfig(threshold=value)) for value in THRESHOLDS]
    return [Candidate(method, replace(grown, stop=rule)) for method, rule in found]


def by_calibrated_confidence(kind: str, tree: GrownConfig, rules: Sequence[Candidate], levels: int) -> list[Candidate]:
    """The same rules, and trees of this k and nodes up to four levels deeper, by isotonic confidence.

    Calibrated survival ranks nodes and ends trees otherwise; a chain without a rule is the same chain.
    """
    found = [replace(one, tree=replace(one.tree, calibrated="isotonic")) for one in rules]
    if tree.shape != "chain":
        deeper = range(tree.levels, min(tree.levels + 4, levels) + 1, 2)
        method = USUAL[kind]
        found += [Candidate(method, replace(tree, levels=depth, calibrated="isotonic")) for depth in deeper]
    return found


def priced(
    target: Target,
    drafter: CachedDrafter,
    head: str,
    trees: Sequence[GrownConfig],
    prompts: Sequence[Tensor],
    max_new_tokens: int,
    costs: Costs,
) -> list[Prediction]:
    """What each tree of this head would do, from greedy answers to prompts [1, T] and the costs: counts, no clock."""
    found = []
    for tree in trees:
        decoder = _decoder(target, drafter, head, tree)
        answers = [decoder.generate(ids, max_new_tokens=max_new_tokens, do_sample=False).statistics for ids in prompts]
        counted, nodes = _counted(answers, max_new_tokens)
        each = price(counted, tree.k, nodes, costs) / max(counted.tokens, 1)
        found.append(Prediction(tree, counted.tau, each, costs.plain / each))
    return found


def timed(
    target: Target,
    drafter: CachedDrafter,
    head: str,
    found: Sequence[Prediction],
    prompts: Sequence[Tensor],
    costs: Costs,
) -> list[Prediction]:
    """The predictions at the pace of their trees' own cycles, timed in turn with vanilla's on prompts [1, T].

    The costs do not know what a stop rule and a calibrator take themselves, nor what trees that change from cycle to
    cycle do to a forward. tau stays: it comes from more prompts.
    """
    decoders = [SpeculativeDecoder(target), *(_decoder(target, drafter, head, one.tree) for one in found)]
    plain, *others = in_turns(decoders, prompts, REPETITIONS, "finalists")
    pace = costs.plain / statistics.median(cycle_ms(one) for one in plain)
    predictions = []
    for one, answers in zip(found, others, strict=True):
        counted, nodes = _counted(answers, TOKENS)
        took = sum(cycle_ms(answer) * answer.target_forwards for answer in answers)
        each = one.ms_per_token * pace * took / price(counted, one.tree.k, nodes, costs)
        predictions.append(Prediction(one.tree, one.tau, each, costs.plain / each))
    return predictions


def _decoder(target: Target, drafter: CachedDrafter, head: str, tree: GrownConfig) -> SpeculativeDecoder:
    calibrate = calibrate_of(tree.calibrated, head_directory(head)) if tree.calibrated else unchanged
    return SpeculativeDecoder(target, drafting(drafter, tree, calibrate))


def _counted(answers: Sequence[Statistics], max_new_tokens: int) -> tuple[Cycles, float]:
    """The cycles of a decoder's answers, and the mean of the nodes that a drafting cycle verifies."""
    forwards = sum(one.target_forwards for one in answers)
    drafted = sum(one.draft_nodes for one in answers)
    trees = sum(one.target_forwards - _idle(one.cycle_tokens, max_new_tokens) for one in answers)
    counted = Cycles(
        tokens=sum(one.new_tokens - 1 for one in answers),
        target_forwards=forwards,
        draft_trees=trees,
        draft_levels=sum(one.draft_forwards for one in answers),
        accepted=sum(sum(one.accepted) for one in answers),
    )
    return counted, 1 + drafted / max(trees, 1)


def _idle(cycle_tokens: Sequence[int], max_new_tokens: int) -> int:
    """Cycles that had no room for a draft: one token was left (0 or 1 of an answer)."""
    return int(bool(cycle_tokens) and sum(cycle_tokens) == max_new_tokens - 1 and cycle_tokens[-1] == 1)


NODES_search = (3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 60)


@dataclass(frozen=True)
class Prediction:
    """A tree with what it is predicted to do; speedup is against plain decoding, in decode time."""

    tree: GrownConfig
    tau: float
    ms_per_token: float
    speedup: float


def price(counted: Cycles, k: int, nodes: float, costs: Costs) -> float:
    """Milliseconds of these cycles, each verifying so many nodes."""
    idle = counted.target_forwards - counted.draft_trees
    return (
        costs.draft_ms(counted.draft_trees, counted.draft_levels, k)
        + counted.draft_trees * costs.verify_ms(nodes)
        + idle * costs.verify_ms(1)
        + counted.target_forwards * costs.rest
    )


def predict(tree: GrownConfig, recording: Recording, costs: Costs) -> Prediction:
    """What one dynamic tree or chain is predicted to do."""
    ranks = path_ranks(recording, tree.levels, tree.k)
    return _prediction(tree, cycles(recording, accepted(ranks, tree.nodes), tree.levels), costs)


def predictions(
    recording: Recording,
    costs: Costs,
    levels: Sequence[int] | None = None,
    widths: Sequence[int] | None = None,
    nodes: Sequence[int] = NODES_search,
) -> list[Prediction]:
    """Every tree of these levels, k and nodes (null: all that the recording holds), the fastest first.

    With k = 1 it is a chain, verified whole. A tree that has fewer candidates than nodes is left out.
    """
    found = []
    for depth in levels or range(1, recording.levels + 1):
        for k in widths or range(1, recording.k + 1):
            ranks = path_ranks(recording, depth, k)
            candidates = k + (depth - 1) * k * k
            for count in [depth + 1] if k == 1 else [count for count in nodes if count <= candidates + 1]:
                counted = cycles(recording, accepted(ranks, count), depth)
                found.append(_prediction(_tree_search(depth, k, count), counted, costs))
    return sorted(found, key=lambda one: one.ms_per_token)


def _tree_search(levels: int, k: int, nodes: int) -> GrownConfig:
    return ChainConfig(levels=levels) if k == 1 else DynamicConfig(levels=levels, k=k, nodes=nodes)


def _prediction(tree: GrownConfig, counted: Cycles, costs: Costs) -> Prediction:
    each = price(counted, tree.k, tree.nodes, costs) / max(counted.tokens, 1)
    return Prediction(tree, counted.tau, each, costs.plain / each)


TOKENS = 48  # new tokens of one timed answer


def in_turns(
    decoders: Sequence[SpeculativeDecoder], prompts: Sequence[Tensor], repetitions: int, name: str
) -> list[list[Statistics]]:
    """Greedy answers of each decoder to the prompts [1, T], so many times; the first decoder is vanilla.

    Vanilla answers in every turn, and what the others take counts in its cycles of that turn: a machine that other work
    slows down for a while slows all of a turn. The times given back are scaled to vanilla's median turn.
    """
    for decoder in decoders:
        decoder.generate(prompts[0], max_new_tokens=12, do_sample=False)
    turns: list[list[Statistics]] = []
    with bar(repetitions * len(prompts), "turns", name) as progress:
        for turn in range(repetitions):
            for prompt in prompts:
                order = [(turn + offset) % len(decoders) for offset in range(len(decoders))]
                answers = {
                    place: decoders[place]
                    .generate(prompt, max_new_tokens=TOKENS, do_sample=False, timed=True)
                    .statistics
                    for place in order
                }
                turns.append([answers[place] for place in range(len(decoders))])
                progress.update()
    return [list(answers) for answers in zip(*paced(turns), strict=True)]


def paced(turns: Sequence[Sequence[Statistics]]) -> list[list[Statistics]]:
    """Turns of answers, vanilla's first, with times as if vanilla had taken the same in each: its median."""
    usual = statistics.median(cycle_ms(turn[0]) for turn in turns)
    return [[_scaled(one, usual / cycle_ms(turn[0])) for one in turn] for turn in turns]


def cycle_ms(one: Statistics) -> float:
    """Milliseconds of a mean cycle, the prefill apart."""
    return (one.ms["wall"] - one.ms["prefill"]) / max(one.target_forwards, 1)


def _scaled(one: Statistics, factor: float) -> Statistics:
    return replace(one, ms={phase: value * factor for phase, value in one.ms.items()})


COST_PROMPTS = 2
SCREENING = 7  # prompts that every rule is tried on
FINALISTS = 2  # rules that are tried on all prompts
TIMED = 6  # prompts that the best tree, the finalists and the published tree are timed on
SHOWN = 20
WORTH = 1.03  # a rule must be that much faster than a fixed tree: the best of twenty on few prompts flatters itself


@dataclass(frozen=True)
class Tuned:
    """What was found for one head: the costs, the best trees, the finalists among the rules, and the choice."""

    kind: str
    head: str
    costs: Costs
    trees: list[Prediction]  # the best fixed ones by the costs alone, the fastest first
    rules: list[tuple[Method, Prediction]]  # as timed
    published: Prediction  # as timed, where anything was
    choice: MethodConfig
    predicted: Prediction
    fixed: Prediction | None = None  # the best tree without a rule, timed as it is; null: nothing was timed


def tune_head(
    target: Target, kind: str, head: str, prompts: Sequence[Tensor], max_new_tokens: int, levels: int, k: int
) -> Tuned:
    """The fastest fixed tree for a head on this machine, predicted from prompts [1, T] that nothing is measured on."""
    drafter = Drafters(target).of(head)
    plain = SpeculativeDecoder(target)
    if kind == "draft_lm":  # its methods are chains
        k = 1
    recording = record(
        SpeculativeDecoder(target, drafting(drafter, DynamicConfig())), prompts, levels, k, max_new_tokens
    )
    costs = measure_costs(plain, drafter, prompts[:COST_PROMPTS])
    trees = predictions(recording, costs)
    usual = published_tree(USUAL[kind])
    narrower = {"k": min(usual.k, k)} if isinstance(usual, DynamicConfig) else {}
    published = predict(replace(usual, levels=min(usual.levels, levels), **narrower), recording, costs)
    return Tuned(kind, head, costs, trees[:SHOWN], [], published, method_of(kind, trees[0].tree), trees[0])


def with_rules(target: Target, tuned: Tuned, prompts: Sequence[Tensor], max_new_tokens: int, levels: int) -> Tuned:
    """Stop rules for the best fixed tree, given room to grow to `levels`: the choice where one is worth it.

    Every rule at every threshold on the first prompts, by the head's own confidence and, where `calibrate` left a
    calibrator beside it, by the calibrated one; the fastest of them then on all prompts. What is left, and the
    published tree, are timed as they are.
    """
    drafter, best = Drafters(target).of(tuned.head), tuned.trees[0]

    def prices(trees: Sequence[GrownConfig], some: Sequence[Tensor]) -> list[Prediction]:
        return priced(target, drafter, tuned.head, trees, some, max_new_tokens, tuned.costs)

    tried = candidates(tuned.kind, best.tree, levels)
    if (head_directory(tuned.head) / CALIBRATOR).is_file():
        tried += by_calibrated_confidence(tuned.kind, best.tree, tried, levels)
    screened = zip(tried, prices([one.tree for one in tried], prompts[:SCREENING]), strict=True)
    kept = [one for one, _ in sorted(screened, key=lambda pair: pair[1].ms_per_token)[:FINALISTS]]
    finalists = prices([one.tree for one in kept], prompts)
    best, published, *finalists = timed(
        target, drafter, tuned.head, [best, tuned.published, *finalists], prompts[:TIMED], tuned.costs
    )
    rules = [(one.method, each) for one, each in zip(kept, finalists, strict=True)]
    rules.sort(key=_speed)
    tuned = replace(tuned, rules=rules, published=published, predicted=best, fixed=best)
    if rules and rules[0][1].ms_per_token * WORTH < best.ms_per_token:
        method, predicted = rules[0]
        return replace(tuned, choice=MethodConfig(method, predicted.tree), predicted=predicted)
    return tuned


def method_of(kind: str, tree: GrownConfig) -> MethodConfig:
    """The method that decodes with this fixed tree."""
    chain = tree.shape == "chain" and kind != "draft_lm"
    return MethodConfig("eagle-chain" if chain else USUAL[kind], tree)


def write_choice(path: FilePath, tuned: Tuned, hardware: str) -> None:
    """The choice as a YAML that `generate --row` and `bench --row` take, with its prediction in comments."""
    changes = {key: value for key, value in as_dict(tuned.choice.tree).items() if value is not None}
    values = {"method": tuned.choice.method, "head": tuned.head, "tree": changes}
    note = (
        f"# tuned on {hardware}: predicted tau {tuned.predicted.tau:.2f}, speedup {tuned.predicted.speedup:.2f}; "
        f"the published tree: {tuned.published.tau:.2f}, {tuned.published.speedup:.2f}\n"
    )
    write_text(path, note + yaml.safe_dump(values, sort_keys=False))


def facts(tuned: Tuned) -> dict[str, Any]:
    """tune.json's entry of one head."""
    return {
        "kind": tuned.kind,
        "head": tuned.head,
        "costs_ms": asdict(tuned.costs),
        "choice": {"method": tuned.choice.method, **_facts(tuned.predicted)},
        "published": _facts(tuned.published),
        "fixed": None if tuned.fixed is None else _facts(tuned.fixed),
        "trees": [_facts(one) for one in tuned.trees],
        "rules": [{"method": method, **_facts(one)} for method, one in tuned.rules],
    }


def _facts(one: Prediction) -> dict[str, Any]:
    return {
        "tree": as_dict(one.tree),
        "tau": one.tau,
        "ms_per_token": one.ms_per_token,
        "speedup": one.speedup,
    }


def _speed(pair: tuple[Method, Prediction]) -> float:
    return pair[1].ms_per_token


TUNED = "tuned.yaml"
CONTENDER = 1.1  # stop rules are tried for heads whose best fixed tree is at most so many times slower than the best's


def tune(target: Target, tokenizer: Any, heads: Mapping[str, str], config: TuneConfig, output: FilePath) -> Tuned:
    """The fastest method of these heads (kind -> directory) as predicted; writes tuned.yaml and tune.json."""
    prompts = _encoded(load_prompts(config.prompts), tokenizer, target)
    new = config.prompts.max_new_tokens
    found = []
    for kind, head in heads.items():
        found.append(tune_head(target, kind, head, prompts, new, config.levels, config.k))
        print(_line(found[-1]), flush=True)
    fastest = max(one.predicted.speedup for one in found)
    contenders = [place for place, one in enumerate(found) if one.predicted.speedup * CONTENDER > fastest]
    for place in contenders:
        found[place] = with_rules(target, found[place], prompts, new, config.levels)
        print(_line(found[place]), flush=True)
    best = max((found[place] for place in contenders), key=lambda one: one.predicted.speedup)
    write_choice(output / TUNED, best, describe(target)["device"])
    write_json(output / "tune.json", {"chosen": best.kind, "heads": [facts(one) for one in found]})
    return best


def measure(
    target: Target, tokenizer: Any, best: Tuned, config: TuneConfig, output: FilePath, seed: int
) -> dict[str, Any]:
    """The choice against vanilla, the published tree and the grid, in pairs of prompts; writes measured.json."""
    assert config.measure is not None
    prompts = load_prompts(config.measure)
    methods = rows(best.kind, best.choice, config.grid)
    heads = [None if method.method == "vanilla" else best.head for method in methods]
    section = BenchConfig(prompts=config.measure, rows=tuple(methods))
    kinds = [None if head is None else best.kind for head in heads]
    bench = Bench(target, tokenizer, make_decoders(target, methods, heads), kinds, section, output / "bench")
    bench.records_path.unlink(missing_ok=True)
    records = run(bench, prompts, seed)
    found = outcomes(methods, records, seed)
    said = verdict(found, best.predicted)
    write_json(output / "measured.json", {**said, "names": names(methods), "rows": [asdict(one) for one in found]})
    print(_measured_text(found, said))
    return said


def _encoded(prompts: Sequence[Prompt], tokenizer: Any, target: Target) -> list[Tensor]:
    return [encode(prompt.text, tokenizer, target) for prompt in prompts]


def _line(tuned: Tuned) -> str:
    predicted, published = tuned.predicted, tuned.published
    return (
        f"tune: {tuned.kind}: {names([tuned.choice])[0]}: predicted tau {predicted.tau:.2f}, speedup "
        f"{predicted.speedup:.2f} (published tree: {published.tau:.2f}, {published.speedup:.2f})"
    )


def _measured_text(found: Sequence[Outcome], said: Mapping[str, Any]) -> str:
    chosen, published, best = found[CHOSEN], found[PUBLISHED], said["against_best_of_grid"]
    lines = [
        f"measured: tau {chosen.tau or 0:.2f}, speedup {chosen.speedup or 0:.2f} {_interval(chosen.speedup_ci95)}; "
        f"predicted over measured {said['predicted_over_measured'] or 0:.3f}",
        f"against the published tree: {published.chosen_against_it or 0:.2f} times its speed "
        f"{_interval(published.chosen_against_it_ci95)}",
    ]
    if best is not None:
        lines.append(
            f"against the best of the grid: {best['chosen_against_it'] or 0:.2f} times its speed "
            f"{_interval(best['chosen_against_it_ci95'])}"
        )
    return "\n".join(lines)


def _interval(bounds: Sequence[float] | None) -> str:
    return "" if bounds is None else f"({bounds[0]:.2f}-{bounds[1]:.2f})"
