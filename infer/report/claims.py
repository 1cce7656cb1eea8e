"""Two papers' claims on the records: DEAGLE's vote against fixed depths, SVIP's lengths against constants."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from aerie.infer.measure.record import Asked, FloatArray, Record, Sampling, TreeShape
from aerie.infer.measure.statistics import (
    Group,
    baselines_of,
    group,
    members_of,
    repeated_share,
    resamples,
    speedups,
    tau,
)
from aerie.model.storage import digest

if TYPE_CHECKING:
    from aerie.infer.measure.replay import Costs

LEVELS = "tree.levels"  # the key of a sweep over depths or lengths
RULE_NAMES = {
    "constant": "constant",
    "heuristic": "heuristic (+2, −1)",
    "entropy": "SVIP (entropy)",
    "confidence": "confidence",
    "vote": "DEAGLE (vote)",
    "probability_sum": "DDD (probability sum)",
    "marginal_gain": "OPT-Tree (marginal gain)",
}


def rule_of(tree: TreeShape) -> str:
    """'fixed', 'vote' (all three signals), its signals where it has fewer, or the name of another rule."""
    stop = tree.settings.get("stop", {"rule": "constant"})
    if stop["rule"] == "vote":
        return "vote" if len(stop["signals"]) == 3 else " and ".join(stop["signals"])
    return "fixed" if stop["rule"] == "constant" else str(stop["rule"])


def costs_of(tuning: Mapping[str, Any] | None, kind: str | None) -> "Costs | None":
    """What `tune` measured for a head of this kind, from the content of tune.json."""
    costs = next((head["costs_ms"] for head in (tuning or {"heads": ()})["heads"] if head["kind"] == kind), None)
    if costs is None:
        return None
    from aerie.infer.measure.replay import Costs  # imports torch

    draft = {int(k): (float(first), float(further)) for k, (first, further) in costs["draft"].items()}
    verify = {int(nodes): float(ms) for nodes, ms in costs["verify"].items()}
    return Costs(draft, verify, float(costs["rest"]), float(costs["plain"]))


# DEAGLE: a vote wastes less than half of a fixed tree's forwards and keeps tau and speed, however deep trees may grow

# at most this share of the fixed tree's wasted forwards, at least these of its best tau and the vote's own best speed
LIMITS = {"waste": 0.5, "tau": 0.97, "speed": 0.97}


def claims(
    records: Sequence[Record], asked: Asked | None, tuning: Mapping[str, Any] | None, seed: int = 0
) -> list[dict[str, Any]]:
    """The claim for each head, confidence and sampling with fixed and voting trees of the same depths and prompts.

    Ratios are of the vote: `waste` against the fixed tree's at the largest depth, `tau` against the fixed tree's best
    over the depths, `modelled` against the vote's own best, null where tune.json has no costs for this kind of head.
    `wall` is the speed of the vote at the largest depth over that of other trees, paired by prompt, with intervals.
    """
    trees: dict[tuple[Any, ...], dict[tuple[str, int], tuple[Record, ...]]] = {}
    for point in asked.points if asked else ():
        answers = members_of(records, point) if point.key == LEVELS else ()
        tree = answers[0].tree if answers else None
        if tree is None or tree.shape != "dynamic" or any(record.status != "ok" for record in answers):
            continue
        if rule_of(tree) in ("fixed", "vote"):
            first, alike = answers[0], digest([tree.k, tree.nodes, {**tree.settings, "stop": None}])
            confidence, prompts = tree.settings.get("calibrated"), tuple(sorted(point.prompts))
            key = (first.head, first.head_path, confidence, first.sampling, prompts, alike)
            trees.setdefault(key, {}).setdefault((rule_of(tree), tree.levels), answers)
    baselines, found = baselines_of(records), []
    for (kind, path, confidence, sampling, prompts, _), by_rule in trees.items():
        depths = sorted(depth for rule, depth in by_rule if rule == "fixed" and ("vote", depth) in by_rule)
        if len(depths) < 2:
            continue
        costs = costs_of(tuning, kind)
        spent: dict[str, list[dict[str, Any]]] = {
            rule: [
                {
                    "depth": depth,
                    "tau": tau(answers := by_rule[rule, depth]),
                    "draft_forwards": sum(record.draft_forwards for record in answers),
                    "draft_forwards_wasted": sum(record.draft_forwards_wasted for record in answers),
                    "speedup": speedups(Group(answers, baselines.get(sampling, {})).pairs)["speedup"],
                    "modelled": None if costs is None else _modelled(answers, costs),
                }
                for depth in depths
            ]
            for rule in ("fixed", "vote")
        }
        fixed, vote, largest = spent["fixed"], spent["vote"], depths[-1]
        best_tau = max(fixed, key=lambda one: one["tau"] or 0.0)
        best_speed = max(vote, key=lambda one: one["modelled"] or 0.0)
        waste = _ratio(vote[-1]["draft_forwards_wasted"], fixed[-1]["draft_forwards_wasted"])
        kept = _ratio(vote[-1]["tau"], best_tau["tau"])
        modelled = _ratio(vote[-1]["modelled"], best_speed["modelled"])
        # by the clock: against the fixed tree, the fixed tree of the best tau and the vote's own best, each once
        others = dict.fromkeys([("fixed", largest), ("fixed", best_tau["depth"])])
        if modelled is not None and best_speed["depth"] != largest:
            others["vote", best_speed["depth"]] = None
        ours = {record.prompt_key: record for record in by_rule["vote", largest]}
        wall = []
        for rule, depth in others:
            speed = speedups(
                [(ours[one.prompt_key], one) for one in by_rule[rule, depth] if one.prompt_key in ours], seed
            )
            wall.append({"rule": rule, "depth": depth, "speed": speed["speedup"], "speed_ci95": speed["speedup_ci95"]})
        found.append(
            {
                "head": kind, "head_path": path, "calibrated": confidence,
                "temperature": sampling[0], "top_k": sampling[1], "top_p": sampling[2],
                "prompts": len(prompts), "largest": largest, **spent,
                "waste": waste, "waste_holds": None if waste is None else waste <= LIMITS["waste"],
                "tau": kept, "tau_best_depth": best_tau["depth"],
                "tau_holds": None if kept is None else kept >= LIMITS["tau"],
                "modelled": modelled, "modelled_best_depth": None if modelled is None else best_speed["depth"],
                "modelled_holds": None if modelled is None else modelled >= LIMITS["speed"],
                "wall": wall,
            }
        )  # fmt: skip
    return found


def _modelled(answers: Sequence[Record], costs: "Costs") -> float | None:
    """Plain decoding's time per token over that of these trees' cycles, both as the costs have it."""
    drafts = sum(nodes > 0 for record in answers for nodes in record.cycle_nodes)
    tree = answers[0].tree
    if not drafts or tree is None:
        return None
    cycles = sum(record.target_forwards for record in answers)
    nodes = 1 + sum(record.draft_nodes for record in answers) / drafts
    ms = costs.draft_ms(drafts, sum(record.draft_forwards for record in answers), tree.k)
    ms += drafts * costs.verify_ms(nodes) + (cycles - drafts) * costs.verify_ms(1) + cycles * costs.rest
    return costs.plain * sum(record.new_tokens - 1 for record in answers) / ms


def _ratio(above: float | None, below: float | None) -> float | None:
    return None if above is None or not below else above / below


# SVIP: does a draft length that follows the draft pay, against a constant of the same mean and the best constant?

TOKENS, CYCLES, DRAFTED, ACCEPTED, MODELLED = range(5)  # tokens after the prefill's, ..., modelled milliseconds


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
    sweeps: dict[tuple[Any, Any, Sampling], dict[str, dict[int, Sequence[Record]]]] = {}
    for point in asked.points if asked else ():
        answers = members_of(records, point) if point.key == LEVELS else ()
        tree = _chain(answers)
        if tree is not None and tree.settings["stop"]["rule"] == "constant":
            by_settings = sweeps.setdefault((answers[0].head, answers[0].head_path, answers[0].sampling), {})
            by_settings.setdefault(digest(tree.settings), {}).setdefault(tree.levels, answers)
    baselines, found = baselines_of(records), []
    for (kind, path, sampling), by_settings in sweeps.items():
        constants = dict(sorted(next(iter(by_settings.values())).items()))  # of several sorts of chains the first
        prompts = set.intersection(*({one.prompt for one in answers} for answers in constants.values()))
        ours = [one for one in records if (one.head, one.head_path, one.sampling) == (kind, path, sampling)]
        rules: dict[str, Sequence[Record]] = {}
        for members in group(ours):
            tree = _chain(members.records)
            whole = prompts <= {one.prompt for one in members.records}
            if whole and tree is not None and tree.settings["stop"]["rule"] != "constant":
                rules.setdefault(digest([tree.levels, tree.settings]), members.records)
        if len(constants) < 2 or not prompts or not rules:
            continue
        chains = [[one for one in each if one.prompt in prompts] for each in (*constants.values(), *rules.values())]
        whole = all(one.cycle_nodes or not one.target_forwards for each in chains for one in each)
        costs = costs_of(tuning, kind) if whole else None  # records of an older version lack the cycles' nodes
        vanilla = {key: one for key, one in baselines.get(sampling, {}).items() if one.prompt in prompts}
        found.append(
            {
                "head": kind, "head_path": path, "temperature": sampling[0], "top_k": sampling[1], "top_p": sampling[2],
                "prompts": len(prompts), "repeated": repeated_share([one.output_ids for one in vanilla.values()]),
                **_compare(list(constants), chains, sorted(prompts), costs, vanilla, seed),
            }
        )  # fmt: skip
    return found


def _chain(answers: Sequence[Record]) -> TreeShape | None:
    """The tree of answers by chains with a stop rule; null for others, and where one failed or none decoded."""
    tree = answers[0].tree if answers else None
    good = all(one.status == "ok" for one in answers) and any(one.target_forwards for one in answers)
    return tree if good and tree is not None and tree.shape == "chain" and "stop" in tree.settings else None


def _compare(
    gammas: Sequence[int],
    chains: Sequence[Sequence[Record]],
    prompts: Sequence[tuple[str, str]],
    costs: "Costs | None",
    vanilla: Mapping[Any, Record],
    seed: int,
) -> dict[str, Any]:
    """`constants`, `best` and `rules`; chains are the constants' answers, by growing gamma, then the rules'."""
    tables = np.stack([_per_prompt(answers, prompts, costs) for answers in chains])  # [chains, n, 5]
    totals = tables.sum(1)
    cycles = totals / totals[:, CYCLES, None]  # [chains, 5] what a cycle takes on average; its cycles are 1
    drawn = np.einsum("rn,cnk->rck", resamples(len(prompts), seed), tables)
    drawn /= drawn[..., CYCLES, None]  # [resamples, chains, 5] the same, the same prompts drawn for all chains
    said = [
        {
            **_spending(cycle, costs),
            "speedup": speedups(Group(tuple(answers), dict(vanilla)).pairs)["speedup"],
            "repeated": repeated_share([one.output_ids for one in answers]),
        }
        for cycle, answers in zip(cycles, chains, strict=True)
    ]
    count = len(gammas)
    best = max(range(count), key=lambda at: said[at]["modelled"] or said[at]["speedup"] or 0.0)

    def against(at: int, other: FloatArray, others: FloatArray) -> dict[str, Any]:
        """What the other [5] spends, and how the chain at this place differs; others [resamples, 5]."""
        mine, spent = said[at], _spending(other, costs)
        accept = (
            None if None in (mine["accept_rate"], spent["accept_rate"]) else mine["accept_rate"] - spent["accept_rate"]
        )
        priced = mine["modelled"] is not None and spent["modelled"] is not None
        ratios = (
            drawn[:, at, TOKENS] * others[:, MODELLED] / (others[:, TOKENS] * drawn[:, at, MODELLED])
            if priced
            else None
        )
        return {
            **spent,
            "accept_difference": accept,
            "tau_difference": mine["tau"] - spent["tau"],
            "tau_ci95": _middle(drawn[:, at, TOKENS] - others[:, TOKENS]),
            "speed": mine["modelled"] / spent["modelled"] if priced else None,
            "speed_ci95": None if ratios is None else _middle(ratios),
        }

    def equal(at: int) -> dict[str, Any] | None:
        """The constant length with as many drafted tokens in a cycle."""
        length, reach = float(cycles[at, DRAFTED]), cycles[:count, DRAFTED]
        if not reach[0] <= length <= reach[-1]:
            return None
        above = max(int(np.searchsorted(reach, length)), 1)
        others = np.stack([_mixed(each[:count], float(each[at, DRAFTED])) for each in drawn])
        return {
            "below": gammas[above - 1],
            "above": gammas[above],
            "share": float((length - reach[above - 1]) / (reach[above] - reach[above - 1])),
            **against(at, _mixed(cycles[:count], length), others),
        }

    rules = []
    for at in range(count, len(chains)):
        first, tree = chains[at][0], chains[at][0].tree
        assert tree is not None
        rule = tree.settings["stop"]["rule"]
        rules.append(
            {
                "rule": rule, "name": RULE_NAMES.get(rule, rule), "method": first.method, "variant": tree.variant,
                **said[at], "equal": equal(at), "best": against(at, cycles[best], drawn[:, best]),
            }
        )  # fmt: skip
    constants = [{"gamma": gamma, **one} for gamma, one in zip(gammas, said, strict=False)]
    return {"constants": constants, "best": gammas[best], "rules": rules}


def _per_prompt(records: Sequence[Record], prompts: Sequence[tuple[str, str]], costs: "Costs | None") -> FloatArray:
    """[n, 5]: the sums over each prompt's turns, of chains alone."""
    table = np.zeros((len(prompts), 5))
    for one in records:
        ms = 0.0
        if costs is not None:  # each cycle verifies its own nodes, for v of the mean is not the mean of v
            drafts = sum(nodes > 0 for nodes in one.cycle_nodes)
            verified = sum(costs.verify_ms(1 + nodes) for nodes in one.cycle_nodes)
            ms = costs.draft_ms(drafts, one.draft_forwards, 1) + verified + one.target_forwards * costs.rest
        spent = (one.new_tokens - 1, one.target_forwards, one.draft_nodes, sum(one.accepted), ms)
        table[prompts.index(one.prompt)] += spent
    return table


def _spending(cycle: FloatArray, costs: "Costs | None") -> dict[str, Any]:
    """The ratios of a mean cycle [5]; modelled: plain decoding's time per token over this one's."""
    drafted, modelled = float(cycle[DRAFTED]), float(cycle[MODELLED])
    return {
        "length": drafted / float(cycle[CYCLES]),
        "accept_rate": float(cycle[ACCEPTED]) / drafted if drafted else None,
        "tau": float(cycle[TOKENS] / cycle[CYCLES]),
        "modelled": costs.plain * float(cycle[TOKENS]) / modelled if costs is not None and modelled else None,
    }


def _mixed(constants: FloatArray, length: float) -> FloatArray:
    """[5] the mean cycle of drafting so many tokens, from constants [m, 5] of growing lengths.

    Between two constants it is the mean cycle of taking now the one, now the other, as often as gives the length: all
    columns are linear in that share.
    """
    return np.array([np.interp(length, constants[:, DRAFTED], column) for column in constants.T])


def _middle(values: FloatArray) -> list[float]:
    low, high = np.percentile(values, [2.5, 97.5])
    return [float(low), float(high)]
