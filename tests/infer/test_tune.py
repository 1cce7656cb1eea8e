"""Replays count as decoding does, costs turn counts into speeds, and the choice is measured."""

import json
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor

from aerie.configs.schema.decode import ConstantConfig, ExactConfig, MethodConfig
from aerie.configs.schema.heads import KINDS as KIND_SECTIONS
from aerie.infer.decode.engine import SpeculativeDecoder
from aerie.infer.decode.loaded_heads import LoadedHeads
from aerie.infer.decode.proposers import tree_proposer
from aerie.infer.measure import prices, replay, tune
from aerie.infer.measure.lossless import VOCABULARY, write_miniature
from aerie.model.storage import read_json
from aerie.model.target import Target
from tests.infer.test_main import Typing, shared, typing

__all__ = ["shared", "typing"]

LEVELS, K, NEW = 5, 6, 20
KINDS = ["eagle1", "eagle3", "draft_lm", "block"]
COSTS = prices.Costs(
    draft={1: prices.LevelCost(1.0, 0.5), 3: prices.LevelCost(2.0, 1.0)},
    verify={1: 10.0, 11: 20.0},
    rest=1.0,
    plain=10.5,
)


@pytest.fixture(scope="module")
def miniature(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Target, list[Tensor]]:
    directory, generator = tmp_path_factory.mktemp("miniature"), torch.Generator().manual_seed(2)
    prompts = [torch.randint(0, VOCABULARY, (1, n), generator=generator) for n in (3, 4)]
    return directory / "heads", Target.load(write_miniature(directory), "cpu"), prompts


@pytest.mark.parametrize("kind", KINDS)
def test_a_replay_counts_what_the_decoder_does(miniature: Any, kind: str) -> None:
    heads, target, prompts = miniature
    drafter = LoadedHeads(target).of(str(heads / kind))
    drafts = replay.record_drafts(target, drafter, prompts, LEVELS, K, NEW)
    sizes = ((1, K, 4), (5, K, 20), (4, K, 60), (4, 1, 5), (5, 3, 10))
    drafted_levels = {"constant": 0, "exact": 0}
    for size, stop in product(sizes, (ConstantConfig(), ExactConfig())):
        tree = tune.sized_tree(*size, stop)
        replayed = replay.replay_tree(drafts, replay.path_ranks(drafts, tree.levels, tree.k), tree)
        decoder = SpeculativeDecoder(target, tree_proposer(drafter, tree))
        answers = [decoder.generate(p, max_new_tokens=NEW, do_sample=False) for p in prompts]
        real = replay.count_cycles([answer.statistics for answer in answers])
        drafted_levels[stop.rule] += real.draft_levels
        # a chain, or as wide as the recording: exactly; narrower: within a cycle per answer, and
        # never too good
        more = replayed.target_forwards - real.target_forwards
        assert replayed == real or (tree.k == 3 and 0 <= more <= len(prompts))
        assert replayed.tokens == real.tokens
    assert kind == "draft_lm" or drafted_levels["exact"] < drafted_levels["constant"]


def test_a_price_is_the_sum_of_its_cycles() -> None:
    # two drafting cycles, three levels in all, with k 2 (1.5 and 0.75: between measured widths);
    # one without
    expected = (2 * 1.5 + 0.75) + 2 * 15.0 + 10.0 + 3 * 1.0
    counts = replay.CycleCounts(6, 3, 2, 3, nodes=6)
    assert COSTS.price(counts, 2) == pytest.approx(expected)
    # dear nodes cost a large tree more
    assert COSTS.price(replace(counts, nodes=11), 2) == pytest.approx(expected + 2 * 5.0)


def test_a_head_shallower_than_the_priced_trees_has_costs(miniature: Any) -> None:
    heads, target, prompts = miniature
    drafter = LoadedHeads(target).of(str(heads / "block"))
    assert drafter.max_levels < 8 and prices.measure_costs(target, drafter, prompts, NEW).draft


@pytest.mark.parametrize("kind", KINDS)
def test_every_tried_tree_is_a_method_of_its_kind(kind: str) -> None:
    widths = [1] if kind == "draft_lm" else [1, 2]
    trees = tune.sampled_trees(8, widths[-1], ExactConfig())
    for width in widths:
        trees += tune.rules_for(kind, tune.sized_tree(4, width, 9), 8)
    rows = [MethodConfig(tune.method_of(kind, tree), tree) for tree in trees]
    measured = tune.rows_to_measure(kind, rows[0], grid=True, max_levels=5)[1:]
    assert {row.method for row in rows + measured} <= {*KIND_SECTIONS[kind].methods}
    assert max(row.tree.levels for row in measured[2:] if row.tree) == 5


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_choice_is_written_measured_and_taken_by_generate_and_bench(
    typing: Typing, shared: Path, temperature: float
) -> None:
    section: dict[str, Any] = {"levels": 2, "k": 2, "temperature": temperature}
    for name, (first, second) in {"prompts": (0, 1), "measure": (2, 3)}.items():
        (shared / f"{name}.txt").write_text(f"Count {first} boats.\nCount {second} boats.\n")
        section[name] = {"path": str(shared / f"{name}.txt"), "max_new_tokens": 8}
    # The warm-up: if both temperatures choose one tree, its bench would be reused.
    text = """
    aerie tune {config} --head {root}/run/heads/eagle1 --tune '{section}' --overwrite
        measured: tau
    {ask} --row {root}/run/tune/tuned.yaml --max-new-tokens 8
    aerie bench {config} --row {root}/run/tune/tuned.yaml --bench.reference false --bench.warmup_prompts {warmup} --overwrite
        16 answers
    """  # noqa: E501
    typing(text, section=json.dumps(section), warmup=f"{temperature:g}")
    folder = shared / "run/tune"
    method = yaml.safe_load((folder / "tuned.yaml").read_text())["method"]
    measured, tuned = (read_json(folder / name) for name in ("measured.json", "tune.json"))
    assert method == measured["rows"][1]["method"]["method"] and tuned["chosen"] == "eagle1"
    assert method == tuned["heads"][0]["choice"]["method"]
    ms = [prediction["ms_per_token"] for prediction in tuned["heads"][0]["trees"]]
    assert ms == sorted(ms)
    assert measured["predicted_over_measured"] > 0
