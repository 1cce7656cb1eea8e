"""DEAGLE's claim, in numbers: what its vote saves and keeps where a tree may grow much deeper than it should.

That a large maximum depth wastes little, keeps tau and costs no speed is what the paper's figure 2 and tables 1 to 3
say; the three limits, to which the numbers are held, are ours.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from infer.aggregate import Sampling, baselines_of, speedups, tau
from infer.figures.depths import KEY, rule_of
from infer.records import Record
from infer.suite import Asked
from infer.sweeps import members_of
from model.files import digest

if TYPE_CHECKING:
    from infer.tuning.costs import Costs

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
    from infer.tuning.costs import Costs  # imports torch, which a report without costs does not need

    costs = heads[0]["costs_ms"]
    draft = {int(k): (float(first), float(further)) for k, (first, further) in costs["draft"].items()}
    verify = {int(nodes): float(ms) for nodes, ms in costs["verify"].items()}
    return Costs(draft, verify, float(costs["rest"]), float(costs["plain"]))


def modelled_speedup(members: Answers, costs: "Costs") -> float | None:
    """Plain decoding's time per token over that of these answers' cycles, both as the costs have it."""
    from infer.tuning.replay import Cycles
    from infer.tuning.search import price

    trees = sum(nodes > 0 for record in members for nodes in record.cycle_nodes)
    if not trees or members[0].tree is None:
        return None
    counted = Cycles(
        tokens=sum(record.new_tokens - 1 for record in members),
        target_forwards=sum(record.target_forwards for record in members),
        draft_trees=trees,
        draft_levels=sum(record.draft_forwards for record in members),
        accepted=sum(sum(record.accepted) for record in members),
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
