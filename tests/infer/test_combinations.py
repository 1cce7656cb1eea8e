"""Drafters, shapes and stop rules that no paper combined are lossless, and the rules end trees."""

from typing import Any

import pytest
import torch

from aerie.configs.schema.decode import (
    ConfidenceConfig,
    ConstantConfig,
    EntropyConfig,
    ExactConfig,
    HeuristicConfig,
    MarginalGainConfig,
    Method,
    MethodConfig,
    ProbabilitySumConfig,
    StopConfig,
    VoteConfig,
)
from aerie.configs.schema.measure import SamplingConfig
from aerie.infer.decode.tree import Tree
from aerie.infer.measure.lossless import ALPHA, VOCABULARY, SampledProver
from tests.infer.draws import greedy

RULES: dict[str, StopConfig] = {
    "constant": ConstantConfig(),
    "heuristic": HeuristicConfig(start=2),
    "entropy": EntropyConfig(h=0.5),
    "confidence": ConfidenceConfig(threshold=0.5),
    "vote": VoteConfig(signals=("probability",), probability_threshold=0.6),
    "probability_sum": ProbabilitySumConfig(checks=(1, 2), threshold=0.7),
    "marginal_gain": MarginalGainConfig(threshold=0.6),
    "exact": ExactConfig(),
}
SHAPES: dict[str, tuple[Method, str, dict[str, Any]]] = {  # method, kind of head, tree
    "draft LM, dynamic": (
        "sps",
        "draft_lm",
        {"shape": "dynamic", "levels": 4, "k": 3, "nodes": 10},
    ),
    "draft LM, static": ("sps", "draft_lm", {"shape": "static", "choices": "eagle1"}),
    "EAGLE-3, static": ("eagle", "eagle3", {}),
    "EAGLE-3, chain": ("eagle-chain", "eagle3", {}),
    "Medusa": ("medusa", "medusa", {}),
    "Hydra": ("hydra", "hydra", {}),
    "Medusa, dynamic": ("medusa", "medusa", {"shape": "dynamic", "levels": 4, "k": 3, "nodes": 10}),
    "draft LM, drawn": (
        "sps",
        "draft_lm",
        {"shape": "dynamic", "levels": 4, "k": 2, "nodes": 5, "children": "sampled"},
    ),
    "Medusa, drawn": (
        "medusa",
        "medusa",
        {"shape": "dynamic", "levels": 4, "k": 3, "nodes": 9, "children": "sampled"},
    ),
    "Hydra, chain": ("hydra", "hydra", {"shape": "chain", "levels": 4}),
    "block": ("block-tree", "block", {"levels": 4, "k": 3, "nodes": 10}),
    "block, chain": ("block-chain", "block", {"levels": 4}),
    "block, static": ("block-tree", "block", {"shape": "static", "choices": "eagle1"}),
}
DRAWN = "entropy vote confidence marginal_gain probability_sum heuristic vote".split()
DRAWN += "exact marginal_gain entropy".split()
DRAWN += "marginal_gain confidence entropy".split()
SAMPLED = dict(zip(SHAPES, DRAWN, strict=True))  # the rule with which each shape is sampled
ALL = [
    pytest.param(shape, rule, marks=() if SAMPLED[shape] == rule else pytest.mark.slow)
    for shape in SHAPES
    for rule in RULES
]


def asked(shape: str, rule: str) -> MethodConfig:
    method, _, changes = SHAPES[shape]
    return MethodConfig.of(method, **changes, stop=RULES[rule])


@pytest.mark.parametrize(("shape", "rule"), ALL)
def test_greedy(shape: str, rule: str, sampled: SampledProver) -> None:
    """Greedy answers are those of transformers, and the rule ends some trees."""
    generator = torch.Generator().manual_seed(5)
    prompts = [torch.randint(0, VOCABULARY, (1, 3 + 2 * n), generator=generator) for n in range(3)]
    decoder = sampled.decoder(asked(shape, rule), SHAPES[shape][1])
    trees: list[Tree] = []
    for ids in prompts:
        settings: dict[str, Any] = {"do_sample": False, "max_new_tokens": 16}
        written = decoder.generate(
            ids, on_cycle=lambda cycle: trees.append(cycle.tree), **settings
        ).sequences
        assert written.tolist() == greedy(sampled.target, ids, 16)
    deepest = decoder.proposer.shape.levels  # type: ignore[union-attr]
    levels = [tree.levels for tree in trees]
    assert (
        sum(0 < level < deepest for level in levels) > 2
        if rule != "constant"
        else max(levels) == deepest
    )
    for tree in trees:  # if one forward gives all laws, a rule saves only nodes to verify
        assert tree.draft_forwards == (
            min(tree.levels, 1) if shape.startswith(("Medusa", "block")) else tree.levels
        )


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "rule"), SAMPLED.items())
def test_sampled(shape: str, rule: str, sampled: SampledProver) -> None:
    """Sampled answers have the target's law."""
    found = sampled.prove(asked(shape, rule), SHAPES[shape][1], SamplingConfig(1.0), 1500, seed=0)
    assert found.accepted_per_answer > 0.1
    assert found.p_value > ALPHA / len(SAMPLED)
