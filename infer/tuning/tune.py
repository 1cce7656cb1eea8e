"""Choosing method, depth, k, nodes and threshold for this machine, and writing the choice as a method that runs."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import yaml
from torch import Tensor

from infer.config import METHODS, Method, MethodConfig, TreeChanges, TreeConfig
from infer.decoders import Drafters, drafting
from infer.engine import SpeculativeDecoder
from infer.methods import usual_method, usual_tree
from infer.tuning.costs import Costs, measure_costs
from infer.tuning.recording import record
from infer.tuning.rules import by_calibrated_confidence, candidates, priced, timed
from infer.tuning.search import Prediction, predict, predictions
from model.files import write_text
from model.head_files import CALIBRATOR
from model.hub import head_directory
from model.recipe import as_dict
from model.target import Target

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
    recording = record(SpeculativeDecoder(target, drafting(drafter, TreeConfig())), prompts, levels, k, max_new_tokens)
    costs = measure_costs(plain, drafter, prompts[:COST_PROMPTS])
    trees = predictions(recording, costs)
    usual = usual_tree(kind)
    published = predict(replace(usual, levels=min(usual.levels, levels), k=min(usual.k, k)), recording, costs)
    return Tuned(kind, head, costs, trees[:SHOWN], [], published, method_of(kind, trees[0].tree), trees[0])


def with_rules(target: Target, tuned: Tuned, prompts: Sequence[Tensor], max_new_tokens: int, levels: int) -> Tuned:
    """Stop rules for the best fixed tree, given room to grow to `levels`: the choice where one is worth it.

    Every rule at every threshold on the first prompts, by the head's own confidence and, where `calibrate` left a
    calibrator beside it, by the calibrated one; the fastest of them then on all prompts. What is left, and the
    published tree, are timed as they are.
    """
    drafter, best = Drafters(target).of(tuned.head), tuned.trees[0]

    def prices(trees: Sequence[TreeConfig], some: Sequence[Tensor]) -> list[Prediction]:
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
        return replace(tuned, choice=_as_method(method, predicted.tree), predicted=predicted)
    return tuned


def method_of(kind: str, tree: TreeConfig) -> MethodConfig:
    """The method that decodes with this fixed tree."""
    chain = tree.shape == "chain" and kind != "draft_lm"
    return _as_method("eagle-chain" if chain else usual_method(kind), tree)


def write_choice(path: Path, tuned: Tuned, hardware: str) -> None:
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


def _as_method(method: Method, tree: TreeConfig) -> MethodConfig:
    """The method with those settings of the tree that differ from its published one."""
    published = METHODS[method].tree
    assert published is not None
    belongs = {"levels", "stop", "calibrated"} | (set() if tree.shape == "chain" else {"k", "nodes"})
    differing = {
        field.name: getattr(tree, field.name)
        for field in fields(tree)
        if field.name in belongs and getattr(tree, field.name) != getattr(published, field.name)
    }
    return MethodConfig(method, TreeChanges(**differing))
