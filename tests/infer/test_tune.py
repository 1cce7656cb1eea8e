"""Replays count the same as the real decoder, costs turn counts into speeds, and the choice is measured."""

import json
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor

from aerie.configs.schema.decode import METHODS, ConstantConfig, ExactConfig, MethodConfig
from aerie.configs.schema.measure import PromptsConfig, TuneConfig
from aerie.infer.decode.engine import SpeculativeDecoder
from aerie.infer.decode.methods import Drafters, drafting
from aerie.infer.measure import replay, tune
from aerie.infer.measure.lossless import VOCABULARY, write_miniature
from aerie.model.target import Target
from tests.infer.test_main import Command, command, shared

__all__ = ["command", "shared"]

LEVELS, K, NEW = 5, 6, 20
COSTS = tune.Costs(
    draft={1: (1.0, 0.5), 3: (2.0, 1.0)}, verify={1: 10.0, 11: 20.0}, rest=1.0, plain=10.5
)


@pytest.fixture(scope="module")
def miniature(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Target, list[Tensor]]:
    directory, generator = tmp_path_factory.mktemp("miniature"), torch.Generator().manual_seed(2)
    prompts = [
        torch.randint(0, VOCABULARY, (1, 3 + number), generator=generator) for number in range(2)
    ]
    return directory / "heads", Target.load(write_miniature(directory), "cpu"), prompts


@pytest.mark.parametrize("kind", ["eagle1", "eagle3", "draft_lm", "block"])
def test_a_replay_counts_what_the_decoder_does(
    miniature: tuple[Path, Target, list[Tensor]], kind: str
) -> None:
    heads, target, prompts = miniature
    drafter = Drafters(target).of(str(heads / kind))
    recording = replay.record(target, drafter, prompts, LEVELS, K, NEW)

    sizes, levels_of = (
        ((1, K, 4), (5, K, 20), (4, K, 60), (4, 1, 5), (5, 3, 10)),
        {"constant": 0.0, "exact": 0.0},
    )
    for (levels, k, nodes), stop in product(sizes, (ConstantConfig(), ExactConfig())):
        tree = tune.tree_with(levels, k, nodes, stop)
        path = replay.path_ranks(recording, tree.levels, tree.k)
        ours = replay.replayed(recording, path, tree.levels, tree.nodes, tree.stop.rule == "exact")
        decoder = SpeculativeDecoder(target, drafting(drafter, tree))
        answers = [
            decoder.generate(ids, max_new_tokens=NEW, do_sample=False).statistics for ids in prompts
        ]
        real, _ = replay.counted(answers)
        levels_of[stop.rule] += real.draft_levels
        if k in (1, K):  # a chain, or as wide as the recording: exactly
            assert ours == real
        else:  # narrower: within a cycle per answer, never too good
            assert (
                ours.tokens == real.tokens
                and 0 <= ours.target_forwards - real.target_forwards <= len(prompts)
            )
    assert kind == "draft_lm" or levels_of["exact"] < levels_of["constant"]


def test_predictions_are_prices_of_cycles_and_dear_nodes_make_small_trees(miniature: Any) -> None:
    # two drafting cycles, three levels in all, with k 2 (1.5 and 0.75: between measured widths); one without
    expected = (2 * 1.5 + 0.75) + 2 * 15.0 + 10.0 + 3 * 1.0
    assert COSTS.price(replay.Cycles(6, 3, 2, 3), 2, 6) == pytest.approx(expected)
    heads, target, prompts = miniature
    made = object.__new__(tune.HeadTuning)
    made.kind, made.costs = "eagle1", COSTS
    made.recording = replay.record(
        target, Drafters(target).of(str(heads / "eagle1")), prompts, 2, 2, NEW
    )
    sizes = []
    for ms in (10.0, 900.0):
        made.costs = replace(COSTS, draft={1: (0.0, 0.0)}, verify={1: 10.0, 60: ms})
        sizes.append(made.replay(tune.trees_up_to(2, 2, ConstantConfig()))[0].tree.nodes)
    assert sizes[0] > sizes[1]
    shallow = Drafters(target).of(str(heads / "block"))  # shallower than the timed trees
    assert shallow.max_levels < 8 and tune.measure_costs(target, shallow, prompts, NEW).draft


@pytest.mark.parametrize("kind", ["eagle1", "eagle3", "draft_lm", "block"])
def test_every_rule_and_every_row_of_the_grid_is_a_method_of_its_kind(kind: str) -> None:
    chain, tree = tune.tree_with(4, 1, 5), tune.tree_with(4, 2, 9)
    choice = MethodConfig(tune.method_of(kind, chain), chain)
    rows = tune.measured_rows(kind, choice, grid=True)
    assert (
        max(row.tree.levels for row in tune.measured_rows(kind, choice, True, 5)[3:] if row.tree)
        == 5
    )
    for fixed in [chain] if kind == "draft_lm" else [chain, tree]:
        rows += [
            MethodConfig(tune.method_of(kind, one), one) for one in tune.rules_for(kind, fixed, 8)
        ]
    drawn = tune.sampled_trees(8, 1 if kind == "draft_lm" else 9, ExactConfig())
    rows += [MethodConfig(tune.method_of(kind, one), one) for one in drawn]
    for row in rows:
        assert row.method == "vanilla" or (
            kind in METHODS[row.method].heads and row.tree is not None
        )


def test_an_answer_too_short_to_be_timed_is_refused() -> None:
    with pytest.raises(ValueError, match="give at least 4"):
        TuneConfig(PromptsConfig(max_new_tokens=2))


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_choice_is_written_measured_and_taken_by_generate_and_bench(
    command: Command, shared: Path, temperature: float
) -> None:
    places: dict[str, Any] = {}
    for name, numbers in {"prompts": range(2), "measure": range(2, 4)}.items():
        (shared / f"{name}.txt").write_text("".join(f"Count {n} boats.\n" for n in numbers))
        places[name] = {"path": str(shared / f"{name}.txt"), "max_new_tokens": 8}
    section = json.dumps({**places, "levels": 2, "k": 2, "temperature": temperature})
    code, out, err = command(
        "tune", "--head", "{root}/run/heads/eagle1", "--tune", section, "--overwrite"
    )
    assert code == 0 and "measured: tau" in out, err
    folder = shared / "run/tune"
    chosen = yaml.safe_load((folder / "tuned.yaml").read_text())
    measured, found = (
        json.loads((folder / name).read_text()) for name in ("measured.json", "tune.json")
    )
    assert found["chosen"] == "eagle1" and found["heads"][0]["choice"]["method"] == chosen["method"]
    assert (
        measured["rows"][1]["method"]["method"] == chosen["method"]
        and measured["predicted_over_measured"] > 0
    )
    row = ("--row", str(folder / "tuned.yaml"))
    assert command("generate", *row, "--max-new-tokens", "8")[0] == 0
    # else, if both temperatures choose one tree, its bench would be reused
    own = ("--bench.reference", "false", "--bench.warmup_prompts", f"{temperature:g}")
    assert "16 answers" in command("bench", *row, *own, "--overwrite")[1]
