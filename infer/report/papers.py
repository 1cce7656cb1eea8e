"""What answers were spent on, prompt by prompt, so that rows can be compared, mixed and resampled."""

import csv
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from aerie.configs.schema.measure import CONTEXT
from aerie.infer.measure.record import Asked, FloatArray, PromptKey, Record, Sampling
from aerie.infer.measure.statistics import (
    ALL_TASKS,
    RESAMPLES,
    SPANS,
    VANILLA,
    Group,
    baselines_of,
    group,
    members_of,
    repeated_share,
    speedups,
    tau,
)
from aerie.infer.report.tables import label, number, sampling_text, tree_text
from aerie.model.storage import digest

if TYPE_CHECKING:
    from aerie.infer.measure.replay import Costs


def told_apart(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A summary's rows; those that differ in nothing but their head have it in their tree's variant."""
    alike: dict[str, set[tuple[str | None, str | None]]] = {}
    for row in rows:
        alike.setdefault(digest([row["method"], row["tree"]]), set()).add((row["head"], row.get("head_path")))
    made = []
    for row in rows:
        heads = alike[digest([row["method"], row["tree"]])]
        if row["tree"] is None or len(heads) == 1:
            made.append(row)
            continue
        kinds = len({kind for kind, _ in heads})
        words = f"{row['head']} head" if kinds == len(heads) else f"head {row.get('head_path') or 'of the run'}"
        variant = ", ".join(part for part in (row["tree"].get("variant"), words) if part)
        made.append({**row, "tree": {**row["tree"], "variant": variant}})
    return made


Prompts = Sequence[tuple[str, str]]
COLUMNS = 5  # tokens after the prefill's, cycles, drafted tokens, accepted ones, modelled milliseconds
TOKENS, CYCLES, DRAFTED, ACCEPTED, MODELLED = range(COLUMNS)


@dataclass(frozen=True)
class Spending:
    """Ratios of sums over prompts; modelled: plain decoding's time per token over this one's, null without costs."""

    length: float  # drafted tokens in a cycle
    accept_rate: float | None
    tau: float
    modelled: float | None


def per_prompt(records: Sequence[Record], prompts: Prompts, costs: "Costs | None") -> FloatArray:
    """[n, COLUMNS]: the sums over each prompt's turns, of chains alone."""
    places = {prompt: place for place, prompt in enumerate(prompts)}
    table = np.zeros((len(prompts), COLUMNS))
    for one in records:
        if one.prompt in places:
            priced = 0.0 if costs is None else chain_ms(one, costs)
            spent = (one.new_tokens - 1, one.target_forwards, one.draft_nodes, sum(one.accepted), priced)
            table[places[one.prompt]] += spent
    return table


def chain_ms(record: Record, costs: "Costs") -> float:
    """What the cycles of chains cost: each verifies its own nodes, for v of the mean is not the mean of v."""
    trees = sum(nodes > 0 for nodes in record.cycle_nodes)
    verified = sum(costs.verify_ms(1 + nodes) for nodes in record.cycle_nodes)
    return costs.draft_ms(trees, record.draft_forwards, 1) + verified + record.target_forwards * costs.rest


def spending(cycle: FloatArray, costs: "Costs | None") -> Spending:
    """The ratios of what a mean cycle [COLUMNS] takes, or of any multiple of it."""
    drafted, modelled = float(cycle[DRAFTED]), float(cycle[MODELLED])
    return Spending(
        length=drafted / float(cycle[CYCLES]),
        accept_rate=float(cycle[ACCEPTED]) / drafted if drafted else None,
        tau=float(cycle[TOKENS] / cycle[CYCLES]),
        modelled=costs.plain * float(cycle[TOKENS]) / modelled if costs is not None and modelled else None,
    )


def mean_cycle(table: FloatArray) -> FloatArray:
    """[COLUMNS] what a cycle takes on average; its cycles are 1."""
    total: FloatArray = table.sum(0)
    return total / total[CYCLES]


def resampled_cycles(tables: Sequence[FloatArray], seed: int) -> FloatArray:
    """[RESAMPLES, tables, COLUMNS] the mean cycles when prompts are drawn anew, the same ones for all tables."""
    size = len(tables[0])
    generator = np.random.default_rng(seed)
    weights = generator.multinomial(size, np.full(size, 1.0 / size), size=RESAMPLES).astype(np.float64)  # [R, n]
    totals = np.stack([weights @ table for table in tables], axis=1)
    cycles: FloatArray = totals / totals[..., CYCLES : CYCLES + 1]
    return cycles


def mixed(constants: FloatArray, length: float) -> FloatArray:
    """[COLUMNS] the mean cycle of drafting so many tokens, from constants [m, COLUMNS] of growing lengths.

    Between two constants it is the mean cycle of taking now the one, now the other, as often as gives the length: all
    columns are linear in that share.
    """
    lengths = constants[:, DRAFTED]
    return np.array([np.interp(length, lengths, constants[:, column]) for column in range(COLUMNS)])


SIZES = ("levels", "k", "nodes")
OF_ITS_OWN = ("tree.stop", "tree.rank", "tree.calibrated", "tree.children")  # keys that leave a tree's sizes alone


@dataclass(frozen=True)
class Line:
    """One row of a sweep; points are rows of the summary's `sweeps`, one for each value at which it was measured."""

    label: str  # what tells it from the sweep's other lines
    points: tuple[dict[str, Any], ...]

    def at(self, value: Any) -> dict[str, Any] | None:
        """The point with this value."""
        return next((point for point in self.points if point["value"] == value), None)


def lines_of(points: Sequence[dict[str, Any]]) -> list[Line]:
    """The lines of a sweep, in the order of its points; two that look alike stay two."""
    found: dict[tuple[str, int], list[dict[str, Any]]] = {}
    seen: dict[tuple[str, str], int] = {}
    for point in points:
        alike = identity(point)
        value = digest(point["value"])
        number = seen.get((alike, value), 0)
        seen[alike, value] = number + 1
        found.setdefault((alike, number), []).append(point)
    members = list(found.values())
    return [Line(name, tuple(each)) for name, each in zip(_labels([each[0] for each in members]), members, strict=True)]


def values_of(lines: Sequence[Line]) -> list[Any]:
    """Every value of the lines, numbers by size, others in the order of the sweep."""
    found: list[Any] = []
    for line in lines:
        found += [point["value"] for point in line.points if point["value"] not in found]
    return sorted(found) if numeric(found) else found


def numeric(values: Sequence[Any]) -> bool:
    """Whether an axis can have these values."""
    return all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)


def identity(point: dict[str, Any]) -> str:
    """What a point shares with the others of its line: everything but the key that varies, and what follows from it."""
    key = point["key"]
    names = ["method", "head", "head_path", "temperature", "top_k", "top_p"]
    gone = {"head": ("head", "head_path"), "method": ("method",), "temperature": ("temperature",)}.get(key, ())
    tree = None if key == "method" or point["tree"] is None else _rest_of(point["tree"], key)
    return digest([[point[name] for name in names if name not in gone], tree])


def _rest_of(tree: dict[str, Any], key: str) -> dict[str, Any]:
    rest = {name: value for name, value in tree.items() if name not in ("text", "variant")}
    if tree["shape"] == "chain" or not tree.get("rerank", True):
        rest.pop("nodes")  # follows from the other sizes
    section, *path = key.split(".")
    if not path:
        return rest
    if section != "tree" or (path[0] not in SIZES and not key.startswith(OF_ITS_OWN)):
        rest = {name: value for name, value in rest.items() if name not in SIZES}
    return _without(rest, path)


def _without(values: dict[str, Any], path: Sequence[str]) -> dict[str, Any]:
    """The mapping without the entry at this path."""
    name, *deeper = path
    if not deeper or not isinstance(values.get(name), dict):
        return {key: value for key, value in values.items() if key != name}
    return {**values, name: _without(values[name], deeper)}


def _labels(firsts: Sequence[dict[str, Any]]) -> list[str]:
    """The method, and of its other words those in which the lines differ."""
    words = [_words(point) for point in firsts]
    names = [name for name in words[0] if len({each[name] for each in words}) > 1] if words else []
    kept = [name for name in words[0] if name == "method" or name in names] if words else []
    return [", ".join(each[name] for name in kept if each[name]) or "all" for each in words]


def _words(point: dict[str, Any]) -> dict[str, str]:
    key, tree = point["key"], point["tree"] or {}
    leaf = key.split(".")[-1].replace("_", " ")
    variant = [part for part in str(tree.get("variant", "")).split(", ") if not part.startswith(f"{leaf} ")]
    head = "" if key == "head" else f"{point.get('head_path') or point.get('head')} head"
    return {
        "method": "" if key == "method" else point["method"],
        "variant": "" if key == "method" else ", ".join(variant),
        "head": head,
        "sampling": "" if key == "temperature" else f"T {sampling_text(point)}",
        "sizes": "" if key == "method" or key.split(".")[-1] in SIZES else tree_text({**point, "tree": _plain(point)}),
    }


def _plain(point: dict[str, Any]) -> dict[str, Any] | None:
    tree = point["tree"]
    return None if tree is None else {name: value for name, value in tree.items() if name not in ("variant", "text")}


KEYS = ("tree.rank", "tree.rerank")
NAMES = {
    ("confidence", False): "without both",
    ("confidence", True): "without value",
    ("survival", False): "without reranking",
    ("survival", True): "EAGLE-2",
}
# Vicuna 7B at temperature 0: (speedup, tau) on MT-bench and on GSM8K
PUBLISHED = {
    ("confidence", False): ((2.81, 3.92), (2.85, 3.93)),
    ("confidence", True): ((3.21, 4.39), (2.93, 3.96)),
    ("survival", False): ((3.48, 4.86), (3.50, 4.85)),
    ("survival", True): ((3.62, 4.98), (3.63, 4.97)),
}


@dataclass(frozen=True)
class Ablated:
    """One of the four trees: what was measured, a column for each family, and what was published."""

    name: str
    measured: tuple[dict[str, Any] | None, ...]
    published: tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class Ablation:
    """The table; families are methods with their heads and samplings."""

    families: tuple[str, ...]
    rows: tuple[Ablated, ...]


def ablation(sweeps: Sequence[dict[str, Any]]) -> Ablation | None:
    """The ablation that the points of sweeps over tree.rank or tree.rerank make; null without any."""
    points = [point for point in sweeps if point["key"] in KEYS and point["tree"] and "rerank" in point["tree"]]
    families: dict[tuple[str, str | None, str], dict[tuple[str, bool], dict[str, Any]]] = {}
    for point in points:
        family = (point["method"], point["head_path"] or point["head"], sampling_text(point))
        families.setdefault(family, {})[point["tree"]["rank"], point["tree"]["rerank"]] = point
    if not families:
        return None
    rows = [
        Ablated(name, tuple(family.get(cell) for family in families.values()), PUBLISHED[cell])
        for cell, name in NAMES.items()
        if any(cell in family for family in families.values())
    ]
    return Ablation(tuple(f"{method}, {head}, T {sampling}" for method, head, sampling in families), tuple(rows))


if TYPE_CHECKING:
    from aerie.infer.measure.replay import Costs

MOST_WASTE = 0.5  # of the fixed tree's wasted draft forwards, both at the largest depth
LEAST_TAU = 0.97  # of the fixed tree's best over the depths
LEAST_SPEED = 0.97  # modelled, of the vote's own best over the depths
RULES = ("fixed", "vote")
Place = tuple[str | None, str | None, str | None, Sampling, tuple[tuple[str, str], ...], str]
Answers = tuple[Record, ...]


@dataclass(frozen=True)
class AtDepth:
    """What the answers of one rule took at one depth; modelled: the speedup that the measured costs predict of it."""

    depth: int
    tau: float | None
    draft_forwards: int
    draft_forwards_wasted: int
    speedup: float | None
    modelled: float | None


def claims(
    records: Sequence[Record], asked: Asked | None, tuning: Mapping[str, Any] | None, seed: int = 0
) -> list[dict[str, Any]]:
    """The claim for each head, confidence and sampling with fixed and voting trees of the same depths and prompts.

    Ratios are of the vote: `waste` against the fixed tree's at the largest depth, `tau` against the fixed tree's best
    over the depths, `modelled` against the vote's own best, null where tune.json has no costs for this kind of head.
    `wall` is the speed of the vote at the largest depth over that of other trees, paired by prompt, with intervals.
    """
    if asked is None:
        return []
    baselines = baselines_of(records)
    found = []
    for (kind, path, calibrated, sampling, prompts, _), rules in _by_rule(records, asked).items():
        depths = sorted(set(rules.get("fixed", {})) & set(rules.get("vote", {})))
        if len(depths) > 1:
            answers = {rule: {depth: rules[rule][depth] for depth in depths} for rule in RULES}
            costs = costs_of(tuning, kind)
            spent = {
                rule: [
                    _spent(depth, members, baselines.get(sampling, {}), costs) for depth, members in by_depth.items()
                ]
                for rule, by_depth in answers.items()
            }
            found.append(
                {
                    "head": kind, "head_path": path, "calibrated": calibrated,
                    "temperature": sampling[0], "top_k": sampling[1], "top_p": sampling[2],
                    "prompts": len(prompts), "largest": depths[-1],
                    **{rule: [asdict(one) for one in each] for rule, each in spent.items()},
                    **held(spent["fixed"], spent["vote"]),
                }
            )  # fmt: skip
            found[-1]["wall"] = _wall(answers, found[-1], seed)
    return found


def held(fixed: Sequence[AtDepth], vote: Sequence[AtDepth]) -> dict[str, Any]:
    """The three ratios, at which depth the bests are, and whether each limit is kept (null where there is no ratio)."""
    best_tau = max(fixed, key=lambda one: one.tau or 0.0)
    best_speed = max(vote, key=lambda one: one.modelled or 0.0)
    waste = _ratio(vote[-1].draft_forwards_wasted, fixed[-1].draft_forwards_wasted)
    kept = _ratio(vote[-1].tau, best_tau.tau)
    modelled = _ratio(vote[-1].modelled, best_speed.modelled)
    return {
        "waste": waste,
        "waste_holds": None if waste is None else waste <= MOST_WASTE,
        "tau": kept,
        "tau_best_depth": best_tau.depth,
        "tau_holds": None if kept is None else kept >= LEAST_TAU,
        "modelled": modelled,
        "modelled_best_depth": None if modelled is None else best_speed.depth,
        "modelled_holds": None if modelled is None else modelled >= LEAST_SPEED,
    }


def costs_of(tuning: Mapping[str, Any] | None, kind: str | None) -> "Costs | None":
    """What `tune` measured for a head of this kind, from the content of tune.json."""
    heads = [] if tuning is None else [head for head in tuning["heads"] if head["kind"] == kind]
    if not heads:
        return None
    from aerie.infer.measure.replay import Costs

    costs = heads[0]["costs_ms"]
    draft = {int(k): (float(first), float(further)) for k, (first, further) in costs["draft"].items()}
    verify = {int(nodes): float(ms) for nodes, ms in costs["verify"].items()}
    return Costs(draft, verify, float(costs["rest"]), float(costs["plain"]))


def modelled_speedup(members: Answers, costs: "Costs") -> float | None:
    """Plain decoding's time per token over that of these answers' cycles, both as the costs have it."""
    from aerie.infer.measure.replay import Cycles, price

    trees = sum(nodes > 0 for record in members for nodes in record.cycle_nodes)
    if not trees or members[0].tree is None:
        return None
    counted = Cycles(
        tokens=sum(record.new_tokens - 1 for record in members),
        target_forwards=sum(record.target_forwards for record in members),
        draft_trees=trees,
        draft_levels=sum(record.draft_forwards for record in members),
    )
    nodes = 1 + sum(record.draft_nodes for record in members) / trees
    return costs.plain * counted.tokens / price(counted, members[0].tree.k, nodes, costs)


def _by_rule(records: Sequence[Record], asked: Asked) -> dict[Place, dict[str, dict[int, Answers]]]:
    """Answers by head, sampling, prompts and what else the trees are, then by rule and depth; no failed ones."""
    found: dict[Place, dict[str, dict[int, Answers]]] = {}
    for point in asked.points:
        members = members_of(records, point) if point.key == KEY else ()
        if members and members[0].tree is not None and members[0].tree.shape == "dynamic":
            first, tree = members[0], members[0].tree
            rule = rule_of(tree.settings)
            if rule in RULES and all(record.status == "ok" for record in members):
                rest = digest([tree.k, tree.nodes, {**tree.settings, "stop": None}])
                calibrated = tree.settings.get("calibrated")
                place = (first.head, first.head_path, calibrated, first.sampling, tuple(sorted(point.prompts)), rest)
                found.setdefault(place, {}).setdefault(rule, {}).setdefault(tree.levels, members)
    return found


def _spent(
    depth: int, members: Answers, baseline: Mapping[tuple[str, str, int], Record], costs: "Costs | None"
) -> AtDepth:
    pairs = [(record, baseline[record.prompt_key]) for record in members if record.prompt_key in baseline]
    return AtDepth(
        depth,
        tau(members),
        sum(record.draft_forwards for record in members),
        sum(record.draft_forwards_wasted for record in members),
        speedups(pairs)["speedup"],
        None if costs is None else modelled_speedup(members, costs),
    )


def _wall(answers: Mapping[str, Mapping[int, Answers]], claim: Mapping[str, Any], seed: int) -> list[dict[str, Any]]:
    """The speed of the vote at the largest depth, relative to each other tree that the claim names."""
    ours = {record.prompt_key: record for record in answers["vote"][claim["largest"]]}
    found = []
    for rule, depth in _others(claim):
        pairs = [(ours[one.prompt_key], one) for one in answers[rule][depth] if one.prompt_key in ours]
        speed = speedups(pairs, seed)
        found.append({"rule": rule, "depth": depth, "speed": speed["speedup"], "speed_ci95": speed["speedup_ci95"]})
    return found


def _others(claim: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """Fixed at the largest depth, fixed at its best tau, and the vote at its own best modelled speed; each once."""
    largest = claim["largest"]
    yield "fixed", largest
    if claim["tau_best_depth"] != largest:
        yield "fixed", claim["tau_best_depth"]
    if claim["modelled_best_depth"] not in (None, largest):
        yield "vote", claim["modelled_best_depth"]


def _ratio(above: float | None, below: float | None) -> float | None:
    return None if above is None or not below else above / below


# SVIP, table 2: speedup on MT-bench at temperature 1, cumulative or by bucket (it does not say)
PUBLISHED_LENGTHS = (128, 256, 512, 1024, 2048, 4096)
PUBLISHED_context_tables = {
    "Vicuna 7B, EAGLE-2": (2.70, 2.62, 2.52, 2.41, 2.43, 1.24),
    "Vicuna 7B, EAGLE-2 and SVIP": (2.80, 2.76, 2.71, 2.69, 2.75, 1.41),
    "Vicuna 13B, EAGLE-2": (2.95, 2.90, 2.83, 2.74, 2.71, 1.53),
    "Vicuna 13B, EAGLE-2 and SVIP": (2.94, 2.99, 2.93, 2.86, 2.79, 1.64),
}

# SVIP, table 5: the same, greedy, with Qwen2.5 14B and a draft of 0.5B
PUBLISHED_GREEDY_LENGTHS = (128, 256, 512, 1024, 2048, 4096, 6144, 8192)
PUBLISHED_GREEDY = {
    "Qwen2.5 14B, 0.5B, constant": (1.05, 1.08, 1.15, 1.29, 1.44, 1.54, 1.60, 1.67),
    "Qwen2.5 14B, 0.5B, heuristic": (1.04, 1.06, 1.13, 1.32, 1.54, 1.72, 1.85, 1.97),
    "Qwen2.5 14B, 0.5B, SVIP": (1.30, 1.34, 1.42, 1.57, 1.74, 1.87, 1.98, 2.10),
}


@dataclass(frozen=True)
class Contexts:
    """Lines over the lengths, from the start and between a length and the one before; both in the same order."""

    lengths: tuple[int, ...]
    cumulative: tuple[Line, ...]
    bucket: tuple[Line, ...]


def chains_of(contexts: Contexts) -> list[Line]:
    """The buckets' lines of chains at the first sampling, with `draft_length`, tokens per cycle (SVIP, figure 6)."""
    chains = [line for line in contexts.bucket if line.points and line.points[0]["tree"]["shape"] == "chain"]
    return [
        Line(line.label, tuple({**p, "draft_length": p["draft_nodes"] / p["target_forwards"]} for p in line.points))
        for line in chains
        if line.points[0]["temperature"] == chains[0].points[0]["temperature"]
    ]


def context_tables(sweeps: Sequence[dict[str, Any]]) -> Contexts | None:
    """The rows of the context lengths that draft; null without any."""
    points = told_apart([point for point in sweeps if point["sweep"] == CONTEXT and point["tree"] is not None])
    if not points:
        return None
    names = dict.fromkeys(label(point, points) for point in points)
    found = {
        span: tuple(
            Line(name, tuple(p for p in points if p["span"] == span and label(p, points) == name)) for name in names
        )
        for span in SPANS
    }
    lengths = sorted({point["value"] for point in points})
    return Contexts(tuple(lengths), found["cumulative"], found["bucket"])


KEY = "tree.levels"
SIGNALS = 3
# DEAGLE, tables 2 and 4: speedup with Llama3 8B on MT-bench at temperature 0
PUBLISHED_COLUMNS = ("fixed (EAGLE-3)", "vote", "expectation", "momentum", "probability")
PUBLISHED_depths = {
    6: (3.73, 3.75, 3.73, 3.59, 3.56),
    8: (3.85, 3.95, 3.85, 3.77, 3.76),
    10: (3.80, 3.96, 3.84, 3.77, 3.78),
    12: (3.53, 3.92, 3.90, 3.69, 3.78),
    14: (3.40, 3.90, 3.88, 3.69, 3.75),
    16: (3.16, 3.89, 3.87, 3.63, 3.75),
    18: (3.01, 3.94, 3.88, 3.65, 3.77),
}


@dataclass(frozen=True)
class Depths:
    """What one head did at one sampling on the same prompts: a line for each rule that ends its trees."""

    title: str
    lines: tuple[Line, ...]

    @property
    def depths(self) -> list[int]:
        """Every depth that a line was measured at."""
        return values_of(self.lines)


def depth_tables(sweeps: Sequence[dict[str, Any]]) -> list[Depths]:
    """The points of every sweep over the depth of dynamic trees, by head, confidence, sampling and prompts."""
    groups: dict[tuple[Any, ...], dict[str, dict[int, dict[str, Any]]]] = {}
    for point in sweeps:
        if is_of_depth(point):
            calibrated = point["tree"].get("calibrated")
            head = f"{point['head_path'] or point['head']} head" + (f", {calibrated} confidence" if calibrated else "")
            place = (head, sampling_text(point), point["task"], point["prompts"])
            groups.setdefault(place, {}).setdefault(identity(point), {}).setdefault(point["value"], point)
    tables = []
    for (head, sampling, task, prompts), lines in groups.items():
        ordered = [tuple(by_depth[depth] for depth in sorted(by_depth)) for by_depth in lines.values()]
        where = "all tasks" if task == "all" else task
        title = f"{head}, T {sampling}, {prompts} prompt{'s' * (prompts != 1)} of {where}"
        tables.append(Depths(title, tuple(Line(rule_words(points[0]), points) for points in ordered)))
    return tables


def is_of_depth(point: dict[str, Any]) -> bool:
    """Whether a point is of a sweep over how deep a dynamic tree may be."""
    return point["key"] == KEY and bool(point["tree"]) and point["tree"].get("shape") == "dynamic"


def rule_of(tree: dict[str, Any]) -> str:
    """'fixed', 'vote' (all signals), one signal's name, or the name of another rule; of a summary's tree."""
    stop = tree.get("stop", {"rule": "constant"})
    if stop["rule"] == "vote":
        return "vote" if len(stop["signals"]) == SIGNALS else " and ".join(stop["signals"])
    return "fixed" if stop["rule"] == "constant" else str(stop["rule"])


def rule_words(point: dict[str, Any]) -> str:
    """The rule in words, with what else its row has otherwise."""
    rule, stop = rule_of(point["tree"]), point["tree"].get("stop", {"rule": "constant"})
    alone = stop["rule"] == "vote" and len(stop["signals"]) == 1
    words = {"fixed": f"fixed ({point['method']})", "vote": "vote (DEAGLE)"}.get(
        rule, f"{rule} alone" if alone else rule
    )
    variant = str(point["tree"].get("variant", "")).split(", ")
    return ", ".join([words, *(part for part in variant if part and not part.startswith("signals "))])


def length_words(comparison: Mapping[str, Any]) -> list[str]:
    """Two sentences for each rule as published: against the same mean length, against the best constant measured."""
    found, constants = [], measured_constants(comparison)
    for rule in published_rules(comparison):
        equal, best = rule["equal"], rule["best"]
        mine = f"{rule['name']} drafts {rule['length']:.2f} tokens in a cycle, {_figures(rule)}. "
        if equal is None:
            found.append(mine + "No constant of the sweep is as short or as long.")
        else:
            found.append(
                f"{mine}As many at a constant length, {_between(equal)}: {_figures(equal)}. {_against(rule, equal)}"
            )
        found.append(
            f"The best of {constants} on these prompts, {comparison['best']}: {_figures(best)}. {_against(rule, best)}"
        )
    return found


def length_sentence(comparison: Mapping[str, Any], rule: Mapping[str, Any]) -> str:
    """The verdicts alone, for the page's first words."""
    equal = "it was not measured" if rule["equal"] is None else _verdict(rule["equal"])
    return (
        f"{rule['name']} on the {comparison['head_path'] or comparison['head']} head, T {comparison['temperature']:g}, "
        f"{comparison['prompts']} prompts: drafts of {rule['length']:.2f} tokens on average. Against a constant length "
        f"of the same mean: {equal}. Against the best of {measured_constants(comparison)} on these prompts, "
        f"{comparison['best']}: {_verdict(rule['best'])}."
    )


def measured_constants(comparison: Mapping[str, Any]) -> str:
    """The constant lengths among which the best was looked for: 'gamma 1 to 8', 'gamma 1, 2 and 4'."""
    gammas = [one["gamma"] for one in comparison["constants"]]
    if len(gammas) > 2 and gammas == list(range(gammas[0], gammas[-1] + 1)):
        return f"gamma {gammas[0]} to {gammas[-1]}"
    return f"gamma {', '.join(map(str, gammas[:-1]))} and {gammas[-1]}"


def published_rules(comparison: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The rules with their papers' settings; what a sweep makes of them is in the table."""
    return [rule for rule in comparison["rules"] if not rule["variant"]]


def _between(equal: Mapping[str, Any]) -> str:
    shares = round(100 * equal["share"])
    if shares in (0, 100):
        return f"{equal['above' if shares else 'below']} in every cycle"
    return f"{equal['above']} in {shares} % of the cycles, {equal['below']} in the others (interpolated)"


def _figures(one: Mapping[str, Any]) -> str:
    modelled = "" if one["modelled"] is None else f", modelled speedup {one['modelled']:.2f}"
    return f"accept rate {number(one['accept_rate'])}, tau {one['tau']:.2f}{modelled}"


def _against(rule: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """The rule's differences from the other, with their intervals."""
    words = f"{rule['name']} against it: "
    words += "" if other["accept_difference"] is None else f"accept rate {other['accept_difference']:+.2f}, "
    tau = f"tau {other['tau_difference']:+.2f} ({_interval(other['tau_ci95'], '+.2f')})"
    if other["speed"] is None:
        return f"{words}{tau}; costs were not measured (tune)."
    return f"{words}{tau}, modelled speed {other['speed']:.3f} times ({_interval(other['speed_ci95'], '.3f')})."


def _verdict(other: Mapping[str, Any]) -> str:
    """Ahead, behind or neither, by the interval of the modelled speed; of tau where nothing was modelled."""
    if other["speed"] is not None:
        bounds, level, pattern, words = other["speed_ci95"], 1.0, ".2f", ("faster", "slower", "not told apart in speed")
        said = f"{other['speed']:.2f} times as modelled"
    else:
        bounds, level, pattern = other["tau_ci95"], 0.0, "+.2f"
        words = ("a larger tau", "a smaller tau", "not told apart in tau")
        said = f"{other['tau_difference']:+.2f}"
    side = 0 if bounds[0] > level else 1 if bounds[1] < level else 2
    return f"{words[side]} ({said}, {_interval(bounds, pattern)})"


def _interval(bounds: Sequence[float], pattern: str) -> str:
    return f"95 % {bounds[0]:{pattern}} to {bounds[1]:{pattern}}"


if TYPE_CHECKING:
    from aerie.infer.measure.replay import Costs

CONSTANT = "constant"
Place_lengths = tuple[str | None, str | None, Sampling]
Answers_lengths = Sequence[Record]


def lengths(
    records: Sequence[Record], asked: Asked | None, tuning: Mapping[str, Any] | None, seed: int = 0
) -> list[dict[str, Any]]:
    """The comparison for each head and sampling with a sweep of constant chains and another rule on its prompts.

    `constants` and `rules` say what each drafts, has accepted, yields and how often its answers repeat themselves;
    `modelled` is the speedup that the costs in tune.json predict of its cycles, null without costs of such a head. Each
    rule has `equal`, the constant length of the same mean between its neighbours `below` and `above`, null where no
    constant is that short or long, and `best`: of the measured constants the one of the largest modelled speed, of the
    largest speed by the clock without costs. Differences are the rule's minus the constant's, speeds are ratios,
    intervals are of 95 %, prompts drawn in pairs; the best is chosen on the same prompts, which flatters it.
    """
    if asked is None:
        return []
    baselines = baselines_of(records)
    found = []
    for place, constants in _constants(records, asked).items():
        kind, path, sampling = place
        prompts = sorted(set.intersection(*({one.prompt for one in answers} for answers in constants.values())))
        rules = _rules(records, place, prompts)
        if len(constants) > 1 and prompts and rules:
            costs = costs_of(tuning, kind)
            priced = costs if all(_has_cycles(one) for one in (*constants.values(), *rules)) else None
            vanilla = [one for one in baselines.get(sampling, {}).values() if one.prompt in set(prompts)]
            found.append(
                {
                    "head": kind, "head_path": path, "temperature": sampling[0], "top_k": sampling[1],
                    "top_p": sampling[2], "prompts": len(prompts),
                    "repeated": repeated_share([one.output_ids for one in vanilla]),
                    **_Comparison(constants, rules, prompts, priced).facts(vanilla, seed),
                }
            )  # fmt: skip
    return found


class _Comparison:
    """The constants of one head at one sampling, by gamma, and the other rules on the same prompts."""

    def __init__(
        self,
        constants: Mapping[int, Answers_lengths],
        rules: Sequence[Answers_lengths],
        prompts: Prompts,
        costs: "Costs | None",
    ) -> None:
        self.gammas = sorted(constants)
        self.answers = [[one for one in constants[gamma] if one.prompt in set(prompts)] for gamma in self.gammas]
        self.rules = [[one for one in answers if one.prompt in set(prompts)] for answers in rules]
        self.costs = costs
        self.tables = [per_prompt(answers, prompts, costs) for answers in (*self.answers, *self.rules)]

    def facts(self, vanilla: Answers_lengths, seed: int) -> dict[str, Any]:
        count = len(self.gammas)
        cycles = np.stack([mean_cycle(table) for table in self.tables])  # [m + rules, COLUMNS]
        drawn = resampled_cycles(self.tables, seed)  # [R, m + rules, COLUMNS]
        said = [self._said(cycles[at], answers, vanilla) for at, answers in enumerate((*self.answers, *self.rules))]
        best = max(range(count), key=lambda at: said[at]["modelled"] or said[at]["speedup"] or 0.0)
        rules = []
        for at, answers in enumerate(self.rules, start=count):
            tree = answers[0].tree
            assert tree is not None
            rule = tree.settings["stop"]["rule"]
            rules.append(
                {
                    "rule": rule, "name": NAMES_policies.get(rule, rule), "method": answers[0].method,
                    "variant": tree.variant,
                    **said[at], "equal": self._equal(cycles, drawn, at), "best": self._against(
                        cycles[at], cycles[best], drawn[:, at], drawn[:, best]
                    ),
                }
            )  # fmt: skip
        constants = [{"gamma": gamma, **one} for gamma, one in zip(self.gammas, said, strict=False)]
        return {"constants": constants, "best": self.gammas[best], "rules": rules}

    def _said(self, cycle: FloatArray, answers: Answers_lengths, vanilla: Answers_lengths) -> dict[str, Any]:
        base = {one.prompt_key: one for one in vanilla}
        pairs = [(one, base[one.prompt_key]) for one in answers if one.prompt_key in base]
        return {
            **asdict(spending(cycle, self.costs)),
            "speedup": speedups(pairs)["speedup"],
            "repeated": repeated_share([one.output_ids for one in answers]),
        }

    def _equal(self, cycles: FloatArray, drawn: FloatArray, at: int) -> dict[str, Any] | None:
        """The constant length with as many drafted tokens in a cycle, and the rule against it."""
        count, length = len(self.gammas), float(cycles[at, DRAFTED])
        reach = cycles[:count, DRAFTED]
        if not reach[0] <= length <= reach[-1]:
            return None
        above = max(int(np.searchsorted(reach, length)), 1)
        share = float((length - reach[above - 1]) / (reach[above] - reach[above - 1]))
        one = mixed(cycles[:count], length)
        others = np.stack([mixed(each[:count], float(each[at, DRAFTED])) for each in drawn])
        return {
            "below": self.gammas[above - 1], "above": self.gammas[above], "share": share,
            **self._against(cycles[at], one, drawn[:, at], others),
        }  # fmt: skip

    def _against(self, ours: FloatArray, other: FloatArray, drawn: FloatArray, others: FloatArray) -> dict[str, Any]:
        """What the other spends, and the rule's difference from it."""
        spent, mine = spending(other, self.costs), spending(ours, self.costs)
        accept = None if mine.accept_rate is None or spent.accept_rate is None else mine.accept_rate - spent.accept_rate
        found = {
            **asdict(spent),
            "accept_difference": accept,
            "tau_difference": mine.tau - spent.tau,
            "tau_ci95": _interval_lengths(drawn[:, TOKENS] - others[:, TOKENS]),
            "speed": None,
            "speed_ci95": None,
        }
        if mine.modelled is not None and spent.modelled is not None:
            found["speed"] = mine.modelled / spent.modelled
            ratios = drawn[:, TOKENS] * others[:, MODELLED] / (others[:, TOKENS] * drawn[:, MODELLED])
            found["speed_ci95"] = _interval_lengths(ratios)
        return found


def _interval_lengths(values: FloatArray) -> list[float]:
    low, high = np.percentile(values, [2.5, 97.5])
    return [float(low), float(high)]


def _has_cycles(answers: Answers_lengths) -> bool:
    """Whether the nodes of every cycle were written down (not in records of an older version)."""
    return all(one.cycle_nodes or not one.target_forwards for one in answers)


def _constants(records: Sequence[Record], asked: Asked) -> dict[Place_lengths, dict[int, Answers_lengths]]:
    """Good answers of sweeps over the length of constant chains, by head and sampling, then by gamma.

    Chains that differ in more (their children's law, a calibrator) are the first ones' alone.
    """
    found: dict[Place_lengths, dict[int, Answers_lengths]] = {}
    kinds: dict[Place_lengths, str] = {}
    for point in asked.points:
        members = members_of(records, point) if point.key == KEY else ()
        if members and _is_chain(members) and _rule(members) == CONSTANT:
            first, tree = members[0], members[0].tree
            assert tree is not None
            place = (first.head, first.head_path, first.sampling)
            if kinds.setdefault(place, digest(tree.settings)) == digest(tree.settings):
                found.setdefault(place, {}).setdefault(tree.levels, members)
    return found


def _rules(records: Sequence[Record], place: Place_lengths, prompts: Prompts) -> list[Answers_lengths]:
    """Every row of chains of this head and sampling with another rule, that has good answers to all the prompts.

    A point of a sweep that is set as a row before it is left out.
    """
    kind, path, sampling = place
    ours = [one for one in records if (one.head, one.head_path, one.sampling) == (kind, path, sampling)]
    found: dict[str, Answers_lengths] = {}
    for members in group(ours):
        has_all = set(prompts) <= {one.prompt for one in members.records}
        if has_all and _is_chain(members.records) and _rule(members.records) != CONSTANT:
            tree = members.first.tree
            assert tree is not None
            found.setdefault(digest([tree.levels, tree.settings]), members.records)
    return list(found.values())


def _is_chain(answers: Answers_lengths) -> bool:
    first = answers[0].tree
    good = all(one.status == "ok" for one in answers) and any(one.target_forwards for one in answers)
    return first is not None and first.shape == "chain" and "stop" in first.settings and good


def _rule(answers: Answers_lengths) -> str:
    tree = answers[0].tree
    assert tree is not None
    return str(tree.settings["stop"]["rule"])


NAMES_policies = {
    "constant": "constant",
    "heuristic": "heuristic (+2, −1)",
    "entropy": "SVIP (entropy)",
    "confidence": "confidence",
    "vote": "DEAGLE (vote)",
    "probability_sum": "DDD (probability sum)",
    "marginal_gain": "OPT-Tree (marginal gain)",
}
# SVIP, table 3: mean speedup of QwQ 32B with a draft of 1.5B on MATH-500, GPQA and AIME. Section 2 decodes QwQ
# greedily, table 3 does not say how: greedy is our reading.
PUBLISHED_policies = {"sps": 1.49, "sps-heuristic": 1.28, "sps-svip": 1.71}


@dataclass(frozen=True)
class Policy:
    """One rule's row of the summary; means are over the cycles."""

    name: str
    row: dict[str, Any]
    levels: float  # drafted in a cycle: a chain's draft length
    published: float | None  # speedup


@dataclass(frozen=True)
class Policies:
    """The rules of one head's chains or trees at one sampling."""

    title: str
    chain: bool
    rules: tuple[Policy, ...]


def policy_tables(rows: Sequence[dict[str, Any]]) -> list[Policies]:
    """A table for each head, shape and sampling of the summary's rows that has two rules or more; chains first."""
    groups: dict[tuple[bool, str, str], list[Policy]] = {}
    for row in rows:
        tree = row["tree"]
        if row["status"] != "ok" or not tree or "stop" not in tree or not row["target_forwards"]:
            continue
        if tree["shape"] in ("chain", "dynamic"):
            place = (tree["shape"] == "chain", row["head_path"] or row["head"], sampling_text(row))
            groups.setdefault(place, []).append(_policy(row))
    tables = [
        Policies(f"{head}, {'chains' if chain else 'trees'}, T {sampling}", chain, tuple(rules))
        for (chain, head, sampling), rules in groups.items()
        if len({rule.row["tree"]["stop"]["rule"] for rule in rules}) > 1
    ]
    return sorted(tables, key=lambda table: not table.chain)


def published_method(row: dict[str, Any]) -> str | None:
    """The method of SVIP's table 3 that a row stands beside: its own, as it is in the paper, greedy; null: none."""
    as_published = row["tree"]["shape"] == "chain" and not row["tree"].get("variant") and not row["temperature"]
    return row["method"] if as_published and row["method"] in PUBLISHED_policies else None


def _policy(row: dict[str, Any]) -> Policy:
    rule = row["tree"]["stop"]["rule"]
    published = PUBLISHED_policies.get(published_method(row) or "")
    return Policy(NAMES_policies.get(rule, rule), row, row["draft_forwards"] / row["target_forwards"], published)


TASKS = {
    "mean": "mean",
    "mt_bench": "MT-bench",
    "humaneval": "HumanEval",
    "gsm8k": "GSM8K",
    "alpaca": "Alpaca",
    "cnn_dm": "CNN/DM",
    "natural_questions": "NQ",
}


@dataclass(frozen=True)
class Figures:
    """A method's speedup and tau; null: not published, or not measured."""

    speedup: float | None
    tau: float | None

    def text(self) -> str:
        """'4.26× / 4.83'."""
        speedup = "" if self.speedup is None else f"{self.speedup:.2f}×"
        return f"{speedup} / {number(self.tau)}" if self.tau is not None else speedup


@dataclass(frozen=True)
class Published:
    """One line of a paper's table; cells by task, `mean` among them."""

    method: str
    model: str
    temperature: float
    source: str
    cells: dict[str, Figures]


@dataclass(frozen=True)
class Beside:
    """A line of the page's table; the cell `mean` of a row measured here is over all its tasks."""

    method: str
    model: str  # of a row measured here: its tree
    temperature: float
    source: str | None  # null: measured here
    cells: tuple[str, ...]  # in the order of TASKS


@cache
def published() -> tuple[Published, ...]:
    """Every line of published.csv."""
    with Path(__file__).with_name("published.csv").open(encoding="utf-8", newline="") as file:
        return tuple(
            Published(
                line["method"], line["model"], float(line["temperature"]), line["source"],
                {task: _figures_published(line[task]) for task in TASKS if line[task]},
            )
            for line in csv.DictReader(file)
        )  # fmt: skip


def beside(rows: Sequence[dict[str, Any]], by_task: Sequence[dict[str, Any]]) -> list[Beside]:
    """What was measured of each method and temperature, and below it what was published of the same.

    rows are pooled over tasks; by_task has their parts, with `row` the position among rows. A method of which nothing
    was published at its temperature is left out.
    """
    found: dict[tuple[str, float], list[Beside]] = {}
    for position, row in enumerate(rows):
        if row["status"] == "ok" and _known(row["method"], row["temperature"]):
            parts = {part["task"]: part for part in by_task if part["row"] == position and part["status"] == "ok"}
            cells = {task: Figures(part["speedup"], part["tau"]) for task, part in parts.items()}
            cells["mean" if row["task"] == ALL_TASKS else row["task"]] = Figures(row["speedup"], row["tau"])
            place = found.setdefault((row["method"], row["temperature"]), [])
            place.append(Beside(row["method"], tree_text(row), row["temperature"], None, _texts(cells)))
    return [
        line
        for (method, temperature), ours in found.items()
        for line in [
            *ours,
            *(
                Beside(method, each.model, temperature, each.source, _texts(each.cells))
                for each in _known(method, temperature)
            ),
        ]
    ]


def _known(method: str, temperature: float) -> list[Published]:
    return [each for each in published() if (each.method, each.temperature) == (method, temperature)]


def _texts(cells: dict[str, Figures]) -> tuple[str, ...]:
    return tuple(cells[task].text() if task in cells else "" for task in TASKS)


def _figures_published(cell: str) -> Figures:
    speedup, tau = (float(part) if part else None for part in cell.split("/"))
    return Figures(speedup, tau)


# QwQ 32B Preview with a draft of 1.5B; the last is the mean of the seven columns
PUBLISHED_TASKS = (*(f"math500-level{level}" for level in range(1, 6)), "gpqa_diamond", "aime")
PUBLISHED_reasoning = {
    "sps": (1.45, 1.50, 1.52, 1.56, 1.56, 1.25, 1.58, 1.49),
    "sps-heuristic": (1.29, 1.26, 1.27, 1.30, 1.33, 1.18, 1.34, 1.28),
    "sps-svip": (1.65, 1.68, 1.75, 1.78, 1.82, 1.52, 1.77, 1.71),
}
PUBLISHED_LENGTHS_reasoning = (1300, 1300, 1600, 2500, 3600, 3900, 6200)  # tokens of a mean answer


@dataclass(frozen=True)
class ByTask:
    """One rule's parts by task, null where a task failed; the mean is of the tasks' speedups."""

    name: str
    row: dict[str, Any]
    parts: tuple[dict[str, Any] | None, ...]
    mean: float | None
    published: tuple[float | None, ...]  # speedups of the tasks, behind them the mean


@dataclass(frozen=True)
class Reasoning:
    """The chains of one head at one sampling; lengths: new tokens of a mean answer of vanilla."""

    title: str
    tasks: tuple[str, ...]
    lengths: tuple[float | None, ...]
    published_lengths: tuple[int | None, ...]
    rules: tuple[ByTask, ...]


def reasoning_tables(rows: Sequence[dict[str, Any]], by_task: Sequence[dict[str, Any]]) -> list[Reasoning]:
    """A table for each comparison of chains whose answers are to several tasks; by_task names its row in `rows`."""
    tasks = tuple(dict.fromkeys(part["task"] for part in by_task))
    cells = {(part["row"], part["task"]): part for part in by_task if part["status"] == "ok"}
    places = {id(row): place for place, row in enumerate(rows)}
    found = []
    for table in policy_tables(rows) if tasks else []:
        if table.chain:
            sampling = _sampling(table.rules[0].row)
            vanilla = next(
                (place for place, row in enumerate(rows) if row["method"] == VANILLA and _sampling(row) == sampling), -1
            )
            rules = tuple(
                _by_task(policy.name, policy.row, [cells.get((places[id(policy.row)], task)) for task in tasks])
                for policy in table.rules
            )
            lengths = tuple(_length(cells.get((vanilla, task))) for task in tasks)
            known = dict(zip(PUBLISHED_TASKS, PUBLISHED_LENGTHS_reasoning, strict=True))
            found.append(Reasoning(table.title, tasks, lengths, tuple(known.get(task) for task in tasks), rules))
    return found


def _by_task(name: str, row: dict[str, Any], parts: Sequence[dict[str, Any] | None]) -> ByTask:
    speedups = [part["speedup"] for part in parts if part is not None and part["speedup"] is not None]
    mean = sum(speedups) / len(speedups) if len(speedups) == len(parts) else None
    figures = PUBLISHED_reasoning.get(published_method(row) or "", ())
    known = dict(zip((*PUBLISHED_TASKS, ""), figures, strict=False))
    tasks = [None if part is None else part["task"] for part in parts]
    published = tuple(None if task is None else known.get(task) for task in tasks)
    whole = set(PUBLISHED_TASKS) <= {task for task in tasks if task is not None}
    return ByTask(name, row, tuple(parts), mean, (*published, known.get("") if whole else None))


def _length(part: dict[str, Any] | None) -> float | None:
    return None if part is None else part["new_tokens"] / part["prompts"]


def _sampling(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["temperature"], row["top_k"], row["top_p"]


MOST = 4  # rules in one picture


@dataclass(frozen=True)
class Trace:
    """One rule's cycles in one answer: where each begins (new tokens so far), what it drafted, what was accepted."""

    rule: str
    begins: tuple[int, ...]
    drafted: tuple[int, ...]
    accepted: tuple[int, ...]


@dataclass(frozen=True)
class Traced:
    """The chains of one head at one sampling, on the prompt whose shortest answer among the rules is the longest."""

    title: str
    traces: tuple[Trace, ...]


def traced(groups: Sequence[Group]) -> list[Traced]:
    """One for each head and sampling whose chains have two rules or more."""
    found: dict[tuple[str, str], dict[str, Group]] = {}
    for group in groups:  # noqa: F402
        tree = group.first.tree
        if tree is not None and tree.shape == "chain" and "stop" in tree.settings and not group.failed:
            place = (group.first.head_path or group.first.head or "", sampling_text(sampling_of(group.first)))
            found.setdefault(place, {}).setdefault(tree.settings["stop"]["rule"], group)
    pictures = []
    for (head, sampling), rules in found.items():
        shared = _longest(list(rules.values()))
        if len(rules) > 1 and shared is not None:
            answers = {rule: _answer(group, shared) for rule, group in list(rules.items())[:MOST]}
            traces = tuple(_trace(NAMES_policies.get(rule, rule), record) for rule, record in answers.items())
            pictures.append(Traced(f"{head}, T {sampling}, prompt {shared[0]}/{shared[1]}", traces))
    return pictures


def from_json(value: Mapping[str, Any]) -> Traced:
    """What dataclasses.asdict made of one."""
    return Traced(value["title"], tuple(Trace(**one) for one in value["traces"]))


def sampling_of(record: Record) -> dict[str, float]:
    """As sampling_text reads it."""
    return {"temperature": record.temperature, "top_k": record.top_k, "top_p": record.top_p}


def _longest(groups: Sequence[Group]) -> PromptKey | None:
    """The prompt that every group has cycles for, with the most tokens in the shortest of its answers."""
    lengths: dict[PromptKey, list[int]] = {}
    for group in groups:  # noqa: F402
        for record in group.records:
            if record.cycle_nodes:
                lengths.setdefault(record.prompt_key, []).append(record.new_tokens)
    shared = {key: min(each) for key, each in lengths.items() if len(each) == len(groups)}
    return max(shared, key=lambda key: shared[key], default=None)


def _answer(group: Group, key: PromptKey) -> Record:
    return next(record for record in group.records if record.prompt_key == key)


def _trace(rule: str, record: Record) -> Trace:
    begins, at = [], 1  # the prefill's token
    for tokens in record.cycle_tokens:
        begins.append(at)
        at += tokens
    return Trace(rule, tuple(begins), record.cycle_nodes, record.accepted)
