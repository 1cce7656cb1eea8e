"""The stop rule that a recipe names."""

from infer.config import TreeConfig
from infer.stop import Constant, Stop
from infer.stops.confidence import Confidence
from infer.stops.config import (
    ConfidenceConfig,
    EntropyConfig,
    HeuristicConfig,
    MarginalGainConfig,
    ProbabilitySumConfig,
    VoteConfig,
)
from infer.stops.entropy import Entropy
from infer.stops.heuristic import Heuristic
from infer.stops.marginal_gain import MarginalGain
from infer.stops.probability_sum import ProbabilitySum
from infer.stops.vote import Vote


def make_stop(tree: TreeConfig) -> Stop:
    """The stop rule of a tree. Whatever the rule, the tree's `levels` are the deepest."""
    match tree.stop:
        case HeuristicConfig() as config:
            return Heuristic(config, tree.levels)
        case EntropyConfig() as config:
            return Entropy(config)
        case ConfidenceConfig() as config:
            return Confidence(config)
        case VoteConfig() as config:
            return Vote(config, tree.nodes)
        case ProbabilitySumConfig() as config:
            return ProbabilitySum(config)
        case MarginalGainConfig() as config:
            return MarginalGain(config, tree.nodes)
        case _:
            return Constant(tree.levels)
