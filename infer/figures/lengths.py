"""Is a length that follows the draft worth more than a constant one? SVIP's question, with the length held equal.

A rule that drafts less has the higher accept rate for that alone. So it stands here against drafting as many tokens on
average at a constant length, and against the best measured constant. Source: SVIP (arXiv 2411.18462), figures 6 and 7a.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np

from infer.aggregate import Sampling, baselines_of, group, speedups
from infer.diversity import repeated_share
from infer.figures.claim import costs_of
from infer.figures.depths import KEY
from infer.figures.policies import NAMES
from infer.figures.spending import (
    DRAFTED,
    MODELLED,
    TOKENS,
    Prompts,
    mean_cycle,
    mixed,
    per_prompt,
    resampled_cycles,
    spending,
)
from infer.records import FloatArray, Record
from infer.suite import Asked
from infer.sweeps import members_of
from model.files import digest

if TYPE_CHECKING:
    from infer.tuning.costs import Costs

CONSTANT = "constant"
Place = tuple[str | None, str | None, Sampling]
Answers = Sequence[Record]


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
        self, constants: Mapping[int, Answers], rules: Sequence[Answers], prompts: Prompts, costs: "Costs | None"
    ) -> None:
        self.gammas = sorted(constants)
        self.answers = [[one for one in constants[gamma] if one.prompt in set(prompts)] for gamma in self.gammas]
        self.rules = [[one for one in answers if one.prompt in set(prompts)] for answers in rules]
        self.costs = costs
        self.tables = [per_prompt(answers, prompts, costs) for answers in (*self.answers, *self.rules)]

    def facts(self, vanilla: Answers, seed: int) -> dict[str, Any]:
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
                    "rule": rule, "name": NAMES.get(rule, rule), "method": answers[0].method, "variant": tree.variant,
                    **said[at], "equal": self._equal(cycles, drawn, at), "best": self._against(
                        cycles[at], cycles[best], drawn[:, at], drawn[:, best]
                    ),
                }
            )  # fmt: skip
        constants = [{"gamma": gamma, **one} for gamma, one in zip(self.gammas, said, strict=False)]
        return {"constants": constants, "best": self.gammas[best], "rules": rules}

    def _said(self, cycle: FloatArray, answers: Answers, vanilla: Answers) -> dict[str, Any]:
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
            "tau_ci95": _interval(drawn[:, TOKENS] - others[:, TOKENS]),
            "speed": None,
            "speed_ci95": None,
        }
        if mine.modelled is not None and spent.modelled is not None:
            found["speed"] = mine.modelled / spent.modelled
            ratios = drawn[:, TOKENS] * others[:, MODELLED] / (others[:, TOKENS] * drawn[:, MODELLED])
            found["speed_ci95"] = _interval(ratios)
        return found


def _interval(values: FloatArray) -> list[float]:
    low, high = np.percentile(values, [2.5, 97.5])
    return [float(low), float(high)]


def _has_cycles(answers: Answers) -> bool:
    """Whether the nodes of every cycle were written down (not in records of an older version)."""
    return all(one.cycle_nodes or not one.target_forwards for one in answers)


def _constants(records: Sequence[Record], asked: Asked) -> dict[Place, dict[int, Answers]]:
    """Good answers of sweeps over the length of constant chains, by head and sampling, then by gamma.

    Chains that differ in more (their children's law, a calibrator) are the first ones' alone.
    """
    found: dict[Place, dict[int, Answers]] = {}
    kinds: dict[Place, str] = {}
    for point in asked.points:
        members = members_of(records, point) if point.key == KEY else ()
        if members and _is_chain(members) and _rule(members) == CONSTANT:
            first, tree = members[0], members[0].tree
            assert tree is not None
            place = (first.head, first.head_path, first.sampling)
            if kinds.setdefault(place, digest(tree.settings)) == digest(tree.settings):
                found.setdefault(place, {}).setdefault(tree.levels, members)
    return found


def _rules(records: Sequence[Record], place: Place, prompts: Prompts) -> list[Answers]:
    """Every row of chains of this head and sampling with another rule, that has good answers to all the prompts.

    A point of a sweep that is set as a row before it is left out.
    """
    kind, path, sampling = place
    ours = [one for one in records if (one.head, one.head_path, one.sampling) == (kind, path, sampling)]
    found: dict[str, Answers] = {}
    for members in group(ours):
        has_all = set(prompts) <= {one.prompt for one in members.records}
        if has_all and _is_chain(members.records) and _rule(members.records) != CONSTANT:
            tree = members.first.tree
            assert tree is not None
            found.setdefault(digest([tree.levels, tree.settings]), members.records)
    return list(found.values())


def _is_chain(answers: Answers) -> bool:
    first = answers[0].tree
    good = all(one.status == "ok" for one in answers) and any(one.target_forwards for one in answers)
    return first is not None and first.shape == "chain" and "stop" in first.settings and good


def _rule(answers: Answers) -> str:
    tree = answers[0].tree
    assert tree is not None
    return str(tree.settings["stop"]["rule"])
