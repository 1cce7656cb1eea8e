"""Whatever ends a tree, the target's text is what is written; and every rule can be named in a recipe."""

import typing
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from aerie.configs.schema.decode import (
    ChainConfig,
    ConfidenceConfig,
    ConstantConfig,
    DynamicConfig,
    EntropyConfig,
    HeuristicConfig,
    MarginalGainConfig,
    ProbabilitySumConfig,
    StopConfig,
    TreeConfig,
    VoteConfig,
)
from aerie.infer.decode.shape import make_shape
from aerie.infer.decode.stop import make_stop
from aerie.model.heads.eagle import Eagle1Head
from aerie.model.target import Target
from tests import tiny
from tests.infer.draws import LEVEL, draw, tiny_vocabulary
from tests.infer.stops.levels import level_of
from tests.infer.test_engine import decoder, greedy, make_target, prompts
from tests.infer.test_shape import GREEDY, TableDrafter

TREE = DynamicConfig(levels=6, k=4, nodes=20)
CHAIN = ChainConfig(levels=6)
STOPS: dict[str, StopConfig] = {
    "heuristic": HeuristicConfig(start=3),
    "confidence": ConfidenceConfig(),
    "entropy": EntropyConfig(),
    "entropy weighted": EntropyConfig(over="value_weighted"),
    "entropy minimum": EntropyConfig(over="minimum"),
    "entropy per node": EntropyConfig(over="per_node"),
    "vote": VoteConfig(),
    "vote selected": VoteConfig(over="selected"),
    "probability_sum": ProbabilitySumConfig(checks=(2, 4)),
    "marginal_gain": MarginalGainConfig(),
}
ABLATIONS = {
    "without value": replace(TREE, rank="confidence"),
    "without reranking": replace(TREE, rerank=False, nodes=25),
    "without both": replace(TREE, rank="confidence", rerank=False, nodes=25),
}


@cache
def subject() -> tuple[Target, Eagle1Head]:
    target = make_target()
    return target, tiny.head(target.vocab.embedding.float(), scale=8.0)


@cache
def alone(prompt: int) -> list[int]:
    """What the target writes by itself."""
    ids = prompts(20)[prompt]
    return greedy(subject()[0], ids, 12)[0]


def written(tree: TreeConfig, prompt: int) -> list[int]:
    """What is written with these trees."""
    target, head = subject()
    generation = decoder(target, tree, head).generate(prompts(20)[prompt], do_sample=False, max_new_tokens=12)
    return list(generation.sequences[0].tolist())


def trees(name: str) -> list[TreeConfig]:
    """An ablation, or a rule in both shapes."""
    return [ABLATIONS[name]] if name in ABLATIONS else [replace(tree, stop=STOPS[name]) for tree in (TREE, CHAIN)]


@pytest.mark.parametrize("name", [*STOPS, *ABLATIONS])
def test_greedy_output_equals_generate_whatever_ends_the_tree(name: str) -> None:
    assert all(written(tree, 2) == alone(2) for tree in trees(name))


@pytest.mark.slow
@pytest.mark.parametrize("name", [*STOPS, *ABLATIONS])
def test_greedy_output_equals_generate_on_twenty_prompts(name: str) -> None:
    """The shapes take turns."""
    for prompt in range(20):
        shapes = trees(name)
        assert written(shapes[prompt % len(shapes)], prompt) == alone(prompt)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["entropy per node", "vote", "without both"])
def test_sampled_text_has_the_targets_law_whatever_ends_the_tree(name: str) -> None:
    """5,000 draws of four tokens, trees of up to two levels; children are deterministic (rule R2)."""
    target = tiny_vocabulary()
    tree = ABLATIONS[name] if name in ABLATIONS else replace(TREE, stop=STOPS[name])
    proposer = decoder(target, tree).proposer
    assert proposer is not None
    p, accepted = draw(target, proposer, torch.tensor([[1, 5, 3]]), 5000, 4, 1.0, 1.0)
    assert p > LEVEL and accepted > 0.05


@pytest.mark.parametrize("name", STOPS)
def test_every_rule_ends_some_trees_early_and_wastes_no_forward(name: str) -> None:
    levels = set()
    for shape in (TREE, CHAIN):
        for seed in range(10):
            drafter = TableDrafter(seed)
            tree = make_shape(replace(shape, stop=STOPS[name])).grow(drafter, torch.tensor([2]), 6, GREEDY)
            assert drafter.calls == tree.draft_forwards == tree.levels
            levels.add(tree.levels)
    assert min(levels) < 6


class Reads(TorchDispatchMode):
    """Counts what would make a GPU wait: a number read from a tensor, or a shape that depends on values."""

    count = 0

    def __torch_dispatch__(
        self, func: typing.Any, types: typing.Any, args: typing.Any = (), kwargs: typing.Any = None
    ) -> typing.Any:
        name = func.overloadpacket.__name__
        boolean = name == "index" and any(i is not None and i.dtype == torch.bool for i in args[1])
        self.count += name in ("_local_scalar_dense", "nonzero", "masked_select") or boolean
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["constant", *STOPS])
@pytest.mark.parametrize("shape", [TREE, CHAIN])
def test_a_stop_rule_reads_at_most_one_number_a_level(name: str, shape: TreeConfig) -> None:
    config = shape if name == "constant" else replace(shape, stop=STOPS[name])
    rule, width = make_stop(config.stop, 6, 20), 1 if shape is CHAIN else 4
    laws = torch.randn(width, 9, generator=torch.Generator().manual_seed(0)).log_softmax(-1)
    rule.begin()
    for depth in range(1, 6):
        level = level_of(depth, laws, list(range(width)), [0.95**depth] * width)
        with Reads() as reads:
            ended = rule.ends(level)
            mask = rule.expands(level)
            if mask is not None:
                torch.arange(width)[mask]
        expected = 0 if name in ("constant", "heuristic") or (name == "probability_sum" and depth not in (2, 4)) else 1
        assert reads.count <= expected
        assert ended in (False, True)


def test_every_config_has_its_rule_and_the_default_is_a_constant_depth() -> None:
    configs = typing.get_args(typing.get_args(StopConfig)[0])
    assert TREE.stop == ConstantConfig() and len({type(make_stop(config(), 6, 7)) for config in configs}) == len(
        configs
    )
    assert len({config().rule for config in configs}) == len(configs)
