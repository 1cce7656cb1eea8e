"""Replays count as decoding does, costs turn counts into speeds, and the choice is measured."""

import json
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import yaml
from torch import Tensor

from aerie.configs.schema.decode import METHODS, ConstantConfig, ExactConfig, MethodConfig
from aerie.configs.schema.measure import PromptsConfig, TuneConfig
from aerie.infer.decode.engine import SpeculativeDecoder
from aerie.infer.decode.methods import LoadedHeads, tree_proposer
from aerie.infer.measure import prices, replay, tune
from aerie.infer.measure.lossless import VOCABULARY, write_miniature
from aerie.infer.measure.prices import LevelCost
from aerie.model.target import Target
from tests.infer.test_main import Command, command, shared

__all__ = ["command", "shared"]

LEVELS, K, NEW = 5, 6, 20
KINDS = ["eagle1", "eagle3", "draft_lm", "block"]
COSTS = prices.Costs(
    draft={1: LevelCost(1.0, 0.5), 3: LevelCost(2.0, 1.0)},
    verify={1: 10.0, 11: 20.0},
    rest=1.0,
    plain=10.5,
)


class Miniature(NamedTuple):
    heads: Path
    target: Target
    prompts: list[Tensor]


@pytest.fixture(scope="module")
def miniature(tmp_path_factory: pytest.TempPathFactory) -> Miniature:
    directory, generator = tmp_path_factory.mktemp("miniature"), torch.Generator().manual_seed(2)
    lengths = (3, 4)
    prompts = [torch.randint(0, VOCABULARY, (1, n), generator=generator) for n in lengths]
    return Miniature(directory / "heads", Target.load(write_miniature(directory), "cpu"), prompts)


@pytest.mark.parametrize("kind", KINDS)
def test_a_replay_counts_what_the_decoder_does(miniature: Miniature, kind: str) -> None:
    target, prompts = miniature.target, miniature.prompts
    drafter = LoadedHeads(target).of(str(miniature.heads / kind))
    drafts = replay.record_drafts(target, drafter, prompts, LEVELS, K, NEW)
    sizes = ((1, K, 4), (5, K, 20), (4, K, 60), (4, 1, 5), (5, 3, 10))
    drafted_levels = {"constant": 0, "exact": 0}
    for (levels, k, nodes), stop in product(sizes, (ConstantConfig(), ExactConfig())):
        tree = tune.sized_tree(levels, k, nodes, stop)
        path = replay.path_ranks(drafts, tree.levels, tree.k)
        replayed = replay.replay_tree(drafts, path, tree)
        decoder = SpeculativeDecoder(target, tree_proposer(drafter, tree))
        answers = [decoder.generate(p, max_new_tokens=NEW, do_sample=False) for p in prompts]
        real = replay.count_cycles([answer.statistics for answer in answers])
        drafted_levels[stop.rule] += real.draft_levels
        if k in (1, K):  # a chain, or as wide as the recording: exactly
            assert replayed == real
        else:  # narrower: within a cycle per answer, never too good
            assert replayed.tokens == real.tokens
            assert 0 <= replayed.target_forwards - real.target_forwards <= len(prompts)
    assert kind == "draft_lm" or drafted_levels["exact"] < drafted_levels["constant"]


def test_a_price_is_the_sum_of_its_cycles() -> None:
    # two drafting cycles, three levels in all, with k 2 (1.5 and 0.75: between measured widths);
    # one without
    expected = (2 * 1.5 + 0.75) + 2 * 15.0 + 10.0 + 3 * 1.0
    assert COSTS.price(replay.CycleCounts(6, 3, 2, 3, 6), 2) == pytest.approx(expected)


def test_dear_nodes_make_small_trees(miniature: Miniature) -> None:
    head = str(miniature.heads / "eagle1")
    config = TuneConfig(PromptsConfig(max_new_tokens=NEW), levels=2, k=2)
    tuning = tune.GreedyTuning(miniature.target, "eagle1", head, miniature.prompts, config)
    tuning.drafts = replay.record_drafts(
        miniature.target, tuning.drafter, miniature.prompts, 2, 2, NEW
    )
    sizes = []
    for ms in (10.0, 900.0):
        tuning.costs = replace(COSTS, draft={1: LevelCost(0.0, 0.0)}, verify={1: 10.0, 60: ms})
        sizes.append(tuning.replay(tune.trees_up_to(2, 2, ConstantConfig()))[0].tree.nodes)
    assert sizes[0] > sizes[1]


def test_a_head_shallower_than_the_priced_trees_has_costs(miniature: Miniature) -> None:
    drafter = LoadedHeads(miniature.target).of(str(miniature.heads / "block"))
    assert drafter.max_levels < 8
    assert prices.measure_costs(miniature.target, drafter, miniature.prompts, NEW).draft


@pytest.mark.parametrize("kind", KINDS)
def test_every_tried_tree_is_a_method_of_its_kind(kind: str) -> None:
    chain = tune.sized_tree(4, 1, 5)
    rows = tune.rows_to_measure(kind, MethodConfig(tune.method_of(kind, chain), chain), grid=True)
    trees = tune.rules_for(kind, chain, 8)
    if kind != "draft_lm":
        trees += tune.rules_for(kind, tune.sized_tree(4, 2, 9), 8)
    trees += tune.sampled_trees(8, 1 if kind == "draft_lm" else 9, ExactConfig())
    rows += [MethodConfig(tune.method_of(kind, tree), tree) for tree in trees]
    assert all(kind in METHODS[row.method].heads and row.tree for row in rows[1:])
    shallow = tune.rows_to_measure(kind, rows[1], grid=True, max_levels=5)[3:]
    assert max(row.tree.levels for row in shallow if row.tree) == 5


def test_an_answer_too_short_to_be_timed_is_refused() -> None:
    with pytest.raises(ValueError, match="give at least 4"):
        TuneConfig(PromptsConfig(max_new_tokens=2))


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_choice_is_written_measured_and_taken_by_generate_and_bench(
    command: Command, shared: Path, temperature: float
) -> None:
    section: dict[str, Any] = {"levels": 2, "k": 2, "temperature": temperature}
    for name, numbers in {"prompts": range(2), "measure": range(2, 4)}.items():
        path = shared / f"{name}.txt"
        path.write_text("".join(f"Count {n} boats.\n" for n in numbers))
        section[name] = {"path": str(path), "max_new_tokens": 8}
    head = "{root}/run/heads/eagle1"
    code, out, err = command("tune", "--head", head, "--tune", json.dumps(section), "--overwrite")
    assert code == 0 and "measured: tau" in out, err
    folder = shared / "run/tune"
    chosen = yaml.safe_load((folder / "tuned.yaml").read_text())
    measured = json.loads((folder / "measured.json").read_text())
    tuned = json.loads((folder / "tune.json").read_text())
    assert tuned["chosen"] == "eagle1"
    assert tuned["heads"][0]["choice"]["method"] == chosen["method"]
    assert measured["rows"][1]["method"]["method"] == chosen["method"]
    assert measured["predicted_over_measured"] > 0
    row = ("--row", str(folder / "tuned.yaml"))
    assert command("generate", *row, "--max-new-tokens", "8")[0] == 0
    # else, if both temperatures choose one tree, its bench would be reused
    another = ("--bench.reference", "false", "--bench.warmup_prompts", f"{temperature:g}")
    assert "16 answers" in command("bench", *row, *another, "--overwrite")[1]
