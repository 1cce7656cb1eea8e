"""Watching a tree changes no token, and tells each law, level and stop as the tree had them."""

import math
from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from aerie.configs.schema.decode import (
    ChainConfig,
    ConfidenceConfig,
    DynamicConfig,
    EntropyConfig,
    ProbabilitySumConfig,
    StaticConfig,
    StopConfig,
    TreeConfig,
)
from aerie.configs.schema.target_and_head import TargetConfig
from aerie.infer.decode.drafters.eagle import EagleDrafter
from aerie.infer.decode.drafters.multi_token import MedusaDrafter
from aerie.infer.decode.engine import SpeculativeDecoder
from aerie.infer.decode.methods import drafting
from aerie.infer.decode.proposer import CachedDrafter, Cycle, Drafting
from aerie.infer.decode.stop import Stop, entropy, make_stop
from aerie.infer.decode.tree import Level
from aerie.infer.measure.cycles import LINE, CycleLine, CycleRecorder, Growth, Origin, WatchedStop, watched
from aerie.model.target import Target
from tests import tiny

ORIGIN = Origin(1, "eagle2", 0.0, 0, 1.0, "count", "7", 0)
PROMPT = torch.tensor([[7, 9, 11, 23, 5]])
WIDE = DynamicConfig(levels=5, k=6, nodes=24)
CHAIN = ChainConfig(levels=4)
STATIC = StaticConfig(choices="eagle1")
MEDUSA = StaticConfig(choices=((0,), (1,), (2,), (0, 0), (0, 1), (1, 0)), children="best")


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(tiny.llama(eos_token_id=None), TargetConfig(path="tiny"))


def make_decoder(target: Target, tree: TreeConfig, kind: str = "eagle1") -> SpeculativeDecoder:
    embedding = target.ends.embedding.float()
    drafter: CachedDrafter
    if kind == "medusa":
        drafter = MedusaDrafter(tiny.multi_token_head("medusa", target.ends, noise=0.3, num_heads=2).eval())
    else:
        make: Any = tiny.head if kind == "eagle1" else tiny.eagle3_head
        drafter = EagleDrafter(make(embedding, scale=8.0).eval(), target)
    return SpeculativeDecoder(target, drafting(drafter, tree))


def settings(temperature: float, **more: Any) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(3)
    chosen = {"temperature": temperature, "do_sample": temperature > 0, "top_k": 0, "generator": generator, **more}
    return {"max_new_tokens": 12, **chosen}


def record(
    decoder: SpeculativeDecoder, temperature: float = 0.0, **more: Any
) -> tuple[list[tuple[Cycle, dict[Any, Tensor]]], list[CycleLine]]:
    """Every cycle with the laws of its tree by path, and its line."""
    seen = []
    with watched(decoder) as growth:
        assert growth is not None
        recorder = CycleRecorder(ORIGIN, growth)

        def watch(cycle: Cycle) -> None:
            recorder(cycle)
            seen.append((cycle, growth.laws() if cycle.tree.levels else {}))

        decoder.generate(PROMPT, on_cycle=watch, **settings(temperature, **more))
    return seen, [LINE.validate_json(line) for line in recorder.lines]


def paths_of(cycle: Cycle) -> list[tuple[int, ...]]:
    tree, paths = cycle.tree, [()]
    for node in range(1, len(tree)):
        paths.append((*paths[int(tree.parents[node])], int(tree.tokens[node])))  # type: ignore[arg-type]
    return paths  # type: ignore[return-value]


@pytest.mark.parametrize("tree", [WIDE, CHAIN, STATIC])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_watched_decoder_writes_the_same_tokens_and_forgets_its_watcher(
    target: Target, tree: TreeConfig, temperature: float
) -> None:
    decoder = make_decoder(target, tree)
    proposer = decoder.proposer
    assert isinstance(proposer, Drafting)
    parts = proposer.drafter, proposer.shape.stop
    alone = decoder.generate(PROMPT, **settings(temperature)).new_ids
    with watched(decoder) as growth:
        recorder = CycleRecorder(ORIGIN, growth)
        watching = decoder.generate(PROMPT, on_cycle=recorder, **settings(temperature)).new_ids
    assert watching == alone and recorder.lines
    assert (proposer.drafter, proposer.shape.stop) == parts
    with pytest.raises(RuntimeError), watched(decoder):
        raise RuntimeError
    assert (proposer.drafter, proposer.shape.stop) == parts


@pytest.mark.parametrize(
    ("tree", "kind", "temperature"),
    [(WIDE, "eagle1", 0.0), (WIDE, "eagle3", 1.0), (CHAIN, "eagle3", 0.0), (CHAIN, "eagle1", 0.7),
     (STATIC, "eagle1", 0.7), (replace(STATIC, children="replaced"), "eagle1", 1.0), (MEDUSA, "medusa", 0.0)],
)  # fmt: skip
def test_every_node_is_found_below_the_law_that_it_was_chosen_from(
    target: Target, tree: TreeConfig, kind: str, temperature: float
) -> None:
    decoder = make_decoder(target, tree, kind)
    assert isinstance(decoder.proposer, Drafting)
    ids = decoder.proposer.drafter.target_ids(torch.arange(320 if kind != "eagle3" else 107)).tolist()
    drafted = 0
    for (cycle, laws), line in zip(*record(decoder, temperature), strict=True):
        paths = paths_of(cycle)
        for node in range(1, len(cycle.tree)):
            law = laws[paths[node][:-1]]
            assert line.node.entropy[node] == pytest.approx(float(entropy(law)), rel=1e-5)
            if cycle.tree.proposal is not None:
                law = cycle.sampler.log_law(law[None])[0]
            assert float(law[ids.index(paths[node][-1])]) == pytest.approx(float(cycle.tree.confidence[node]), abs=1e-5)
            assert line.node.q[node] == pytest.approx(float(cycle.tree.confidence[node].exp()), rel=1e-6)
            drafted += 1
    assert drafted


class Spy(Stop):
    """Never stops; notes the frontier's mass of each level that it is asked about."""

    def __init__(self) -> None:
        self.trees: list[list[float]] = []

    def begin(self) -> None:
        self.trees.append([])

    def ends(self, level: Level) -> bool:
        self.trees[-1].append(float(level.alive.exp().sum()))
        return False


@pytest.mark.parametrize("tree", [WIDE, replace(WIDE, rank="confidence"), replace(WIDE, k=3, nodes=16), CHAIN])
@pytest.mark.parametrize("kind", ["eagle1", "eagle3"])
def test_level_masses_are_those_that_a_stop_rule_sees(target: Target, tree: TreeConfig, kind: str) -> None:
    decoder, spy = make_decoder(target, tree, kind), Spy()
    assert isinstance(decoder.proposer, Drafting)
    decoder.proposer.shape.stop = spy
    lines = [line for line in record(decoder)[1] if line.depth]
    assert len(spy.trees) == len(lines) > 1
    for line, seen in zip(lines, spy.trees, strict=True):
        masses = line.level.survival
        assert len(masses) == line.depth and len(seen) >= line.depth - 1 > -1
        assert masses[: len(seen)] == pytest.approx(seen[: len(masses)], rel=1e-5)
        above = [1.0, *masses]
        assert line.level.ratio == pytest.approx([b / a for a, b in zip(above, masses, strict=False)], rel=1e-5)
        assert line.level.expected == pytest.approx(torch.tensor(masses).cumsum(0).tolist(), rel=1e-5)
        assert all(new <= old + 1e-6 for old, new in zip(above, masses, strict=False))


@pytest.mark.parametrize("sampling", [{"temperature": 1.0}, {"temperature": 0.6, "top_p": 0.8}])
@pytest.mark.parametrize("kind", ["eagle1", "eagle3"])
def test_distances_are_those_of_the_laws_that_verification_compares(
    target: Target, sampling: dict[str, float], kind: str
) -> None:
    compared = 0
    for (cycle, _), line in zip(*record(make_decoder(target, CHAIN, kind), **sampling), strict=True):
        if line.law is None:
            continue
        assert cycle.tree.proposal is not None and line.law.node == tuple(range(line.depth))
        p = cycle.sampler.law(cycle.step.logits).double()
        q = cycle.tree.proposal.over(p.shape[-1]).double()
        for node in line.law.node:
            some = q[node] > 0
            kl = float((q[node][some] * (q[node][some] / p[node][some]).log()).sum())
            assert line.law.kl[node] is None if math.isinf(kl) else line.law.kl[node] == pytest.approx(kl, abs=1e-4)
            assert line.law.tvd[node] == pytest.approx(0.5 * float((p[node] - q[node]).abs().sum()), abs=1e-4)
            ranked = line.law.rank_log_q[node]
            assert (ranked is not None) == (node in cycle.verdict.path)
            if ranked is not None:
                sharpest = q[node].sort(descending=True).values.log()
                finite = [value for value in ranked if value is not None]
                assert finite == pytest.approx(sharpest[[2**n - 1 for n in range(len(finite))]].tolist(), abs=1e-4)
            compared += 1
    assert compared > 4


def test_a_greedy_tree_is_compared_with_the_plain_softmax(target: Target) -> None:
    for (cycle, laws), line in zip(*record(make_decoder(target, WIDE)), strict=True):
        paths = paths_of(cycle)
        log_p = cycle.step.logits.log_softmax(-1)
        for node in range(1, len(cycle.tree)):
            place = int(cycle.tree.parents[node])
            assert line.node.p[node] == pytest.approx(float(log_p[place, paths[node][-1]].exp()), rel=1e-4, abs=1e-7)
        for node, kl in zip(line.law.node if line.law else (), line.law.kl if line.law else (), strict=True):
            law = laws[paths[node]]
            assert kl == pytest.approx(float((law.exp() * (law - log_p[node])).sum()), abs=1e-3)


@pytest.mark.parametrize("config", get_args(get_args(StopConfig)[0]))
def test_a_rule_is_named_as_recipes_name_it(config: Any) -> None:
    assert WatchedStop(make_stop(config(), 6, 60)).name == config().rule


@pytest.mark.parametrize(
    ("tree", "reason"),
    [
        (replace(WIDE, stop=EntropyConfig(c=1.0, h=0.01)), "entropy"),
        (replace(WIDE, stop=EntropyConfig(c=1.0, h=0.01, over="per_node")), "entropy"),
        (replace(CHAIN, stop=ConfidenceConfig(threshold=1.0)), "confidence"),
        (replace(WIDE, stop=ProbabilitySumConfig(checks=(2,), threshold=1.0)), "probability_sum"),
        (WIDE, "levels"),
    ],
)
def test_the_rule_that_ends_a_tree_is_its_stop_reason(target: Target, tree: TreeConfig, reason: str) -> None:
    lines = record(make_decoder(target, tree))[1]
    assert lines[0].stop_reason == reason
    assert lines[0].depth == (5 if reason == "levels" else 2 if reason == "probability_sum" else 1)
    assert {line.stop_reason for line in lines} <= {reason, "budget", "levels", None}


def test_only_drafting_from_laws_can_be_watched(target: Target) -> None:
    with watched(SpeculativeDecoder(target)) as growth:
        assert growth is None
    with watched(make_decoder(target, CHAIN)) as growth:
        assert isinstance(growth, Growth)
