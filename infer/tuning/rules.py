"""Stop rules and calibrated confidence: tried on held-out prompts, decoded for their counts, priced by the costs."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from infer.calibration.calibrator import calibrate_of, unchanged
from infer.config import Method, TreeConfig
from infer.decoders import drafting
from infer.engine import SpeculativeDecoder, Statistics
from infer.methods import usual_method
from infer.proposer import CachedDrafter
from infer.stops.config import (
    ConfidenceConfig,
    EntropyConfig,
    MarginalGainConfig,
    ProbabilitySumConfig,
    StopConfig,
    VoteConfig,
)
from infer.tuning.costs import Costs
from infer.tuning.replay import Cycles
from infer.tuning.search import Prediction, price
from infer.tuning.turns import TOKENS, cycle_ms, in_turns
from model.hub import head_directory
from model.target import Target

THRESHOLDS = (0.1, 0.2, 0.3, 0.45, 0.6)
ENTROPY_THRESHOLDS = (0.2, 0.3, 0.4, 0.5, 0.7)  # h; the published one is 0.3
REPETITIONS = 2  # of each finalist's timed answers
CHECKS = (3, 5, 7)  # depths at which a shallow tree's probability sum is looked at


@dataclass(frozen=True)
class Candidate:
    """A method with a stop rule, in a tree."""

    method: Method
    tree: TreeConfig


def candidates(kind: str, tree: TreeConfig, levels: int) -> list[Candidate]:
    """Every rule at every threshold for the tree of a head of this kind, given room to grow to `levels`."""
    room = tree.nodes - tree.levels + levels if tree.shape == "chain" else tree.nodes
    grown = replace(tree, levels=levels, nodes=room)
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


def by_calibrated_confidence(kind: str, tree: TreeConfig, rules: Sequence[Candidate], levels: int) -> list[Candidate]:
    """The same rules, and trees of this k and nodes up to four levels deeper, by isotonic confidence.

    Calibrated survival ranks nodes and ends trees otherwise; a chain without a rule is the same chain.
    """
    found = [replace(one, tree=replace(one.tree, calibrated="isotonic")) for one in rules]
    if tree.shape != "chain":
        deeper = range(tree.levels, min(tree.levels + 4, levels) + 1, 2)
        method = usual_method(kind)
        found += [Candidate(method, replace(tree, levels=depth, calibrated="isotonic")) for depth in deeper]
    return found


def priced(
    target: Target,
    drafter: CachedDrafter,
    head: str,
    trees: Sequence[TreeConfig],
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


def _decoder(target: Target, drafter: CachedDrafter, head: str, tree: TreeConfig) -> SpeculativeDecoder:
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
