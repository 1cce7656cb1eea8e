"""The command: plans, refusals in one line, a whole run, its reuse."""

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import PartialState
from transformers import AutoModelForCausalLM, AutoTokenizer

from aerie.configs.errors import exit_code
from aerie.configs.schema import recipe as pipeline
from aerie.configs.schema.target_and_head import TargetConfig
from aerie.data import main as data_main
from aerie.data.cache import FeatureCache
from aerie.infer.decode.drafters.eagle import EagleDrafter
from aerie.infer.decode.engine import SpeculativeDecoder
from aerie.infer.decode.shape import Drafting, make_shape
from aerie.model.checkpoint import head_facts, load_head, save_head
from aerie.model.heads.eagle import Eagle3Head
from aerie.model.target import Target, load_ends
from aerie.train import main as train_main
from tests import tiny

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A directory with a target, conversations, a recipe and its feature cache."""
    root = tmp_path_factory.mktemp("run")
    tiny.target(root / "target")
    tiny.write_conversations(root / "train.jsonl", 60)
    _write_recipe(root, {})
    assert _call(data_main, "features", "--config", root / "recipe.yaml") == 0
    yield root


def _write_recipe(root: Path, train: dict[str, Any], **sections: Any) -> Path:
    values = {
        "run": str(root / "run"),
        "threads": 1,
        "target": {"path": str(root / "target"), "dtype": "float32"},
        "data": {"conversations": [str(root / "train.jsonl")], "max_length": 128, "held_out": 0.3},
        "tree": {"levels": 4},
        "train": {"max_steps": 6, "batch_size": 8, "warmup_steps": 1, "log_every": 3, "eval_every": 3, **train},
        **sections,
    }
    return tiny.recipe(root / "recipe.yaml", values)


def _call(module: Any, *words: object) -> int:
    """The exit code of a command run in this process."""
    before = sys.argv, os.environ.get("TRANSFORMERS_VERBOSITY")
    sys.argv = ["main.py", *map(str, words)]
    try:
        return exit_code(module.main)
    finally:
        sys.argv = before[0]
        PartialState._reset_state()


def test_a_plan_prints_steps_tokens_and_bytes_and_writes_nothing(
    made: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(made.rglob("*"))
    assert _call(train_main, "--config", made / "recipe.yaml", "--plan") == 0
    out = capsys.readouterr().out
    assert "steps: 6 of 8 rows x 1 x 1 process" in out and "trained" in out and "MiB with gradients and Adam" in out
    assert sorted(made.rglob("*")) == before


def test_a_plan_writes_an_untrained_head_that_loads(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--config", made / "recipe.yaml", "--plan", "--init-to", tmp_path / "new")
    assert _call(train_main, *words) == 0
    assert load_head(tmp_path / "new").config.hidden_size == 32
    assert _call(train_main, *words) == 2
    assert "not empty" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--train.learning_rat", "1"], "did you mean 'train.learning_rate'?"),
        (["--run", "nowhere"], "nowhere/features: no such feature cache; build it with:"),
        (["--target", "/no/such/target"], "/no/such/target: no such target directory"),
        (["--data.max_length", "64"], "data.max_length: 128 there, 64 asked; rebuild with:"),
        (["--head.max_position_embeddings", "100"], "head.max_position_embeddings: 100 is less than data.max_length"),
        (["--init-to", "x"], "use it with --plan"),
        (["--head.init_from", "/no/head"], "/no/head: no such head directory"),
    ],
)
def test_mistakes_get_one_line_and_code_2(
    made: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    before = sorted(path for path in made.rglob("*") if path.name != "status.json")
    plan = [] if words[0] == "--init-to" else ["--plan"]
    assert _call(train_main, "--config", made / "recipe.yaml", *plan, *words) == 2
    error = capsys.readouterr().err
    assert said in error and len(error.strip().splitlines()) == 1
    assert sorted(path for path in made.rglob("*") if path.name != "status.json") == before


def test_processes_that_do_not_know_each_other_are_refused(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert _call(train_main, "--config", made / "recipe.yaml", "--output", tmp_path / "head") == 2
    assert "asked for 2 processes that train together and 1 does" in capsys.readouterr().err
    assert json.loads((made / "run/status.json").read_text()) == {"stage": "train", "state": "failed", "code": 2}
    assert not (tmp_path / "head").exists()


def test_a_run_is_trained_once_reused_and_never_overwritten_by_another(
    made: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = made / "recipe.yaml"
    assert _call(train_main, "--config", recipe, "--is-whole") == 1
    assert _call(train_main, "--config", recipe) == 0
    head = made / "run/heads/eagle1"
    facts, record = head_facts(head), json.loads((head / "provenance.json").read_text())
    assert load_head(head) and facts["step"] in (3, 6) and facts["predicted_tau"] >= 1
    assert record["steps"] == 6 and record["tokens"] > 0 and record["ended"] == "finished"
    assert json.loads((made / "run/status.json").read_text()) == {"stage": "train", "state": "done", "code": 0}
    assert (head / "recipe.yaml").is_file() and (made / "run/metrics.jsonl").is_file()
    assert _call(train_main, "--config", recipe, "--is-whole") == 0
    capsys.readouterr()
    assert _call(train_main, "--config", recipe) == 0
    assert "train eagle1: whole, reused" in capsys.readouterr().out
    written = (head / "model.safetensors").read_bytes()
    assert _call(train_main, "--config", recipe, "--train.seed", "5") == 2
    assert "train.seed: 0 there, 5 asked" in capsys.readouterr().err
    assert (head / "model.safetensors").read_bytes() == written
    assert _call(train_main, "--config", recipe, "--train.seed", "5", "--overwrite") == 0
    assert (head / "model.safetensors").read_bytes() != written


@pytest.mark.parametrize("kind", ["medusa", "hydra"])
def test_heads_of_another_kind_train_in_the_same_run_on_the_same_cache(
    made: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    cache, record = made / "run/features", made / "run/features/provenance.json"
    before = {path: path.stat().st_mtime_ns for path in cache.iterdir()}
    words = ("--config", made / "recipe.yaml", "--head.kind", kind, "--tree.levels", "null")
    assert _call(data_main, "features", *words) == 0
    assert "features: whole, reused" in capsys.readouterr().out
    assert _call(train_main, *words, "--train.measure_prompts", "2", "--train.measure_new_tokens", "8") == 0
    head = made / "run/heads" / kind
    assert load_head(head, ends=load_ends(TargetConfig(str(made / "target")))[1]).kind == kind
    assert head_facts(head)["predicted_tau"] >= 1 and head_facts(head)["tau"] >= 1
    inputs = json.loads((head / "provenance.json").read_text())["inputs"]
    assert inputs["features"] == json.loads(record.read_text())["inputs_digest"]
    assert {path: path.stat().st_mtime_ns for path in cache.iterdir()} == before
    lines = [json.loads(line) for line in (made / "run/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["kind"] == kind and "held_out_loss" in line] == [3, 6]


def test_files_that_no_run_has_made_are_never_overwritten(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "model.safetensors").write_text("precious")
    words = ("--config", made / "recipe.yaml", "--train.seed", "7", "--output", foreign)
    assert _call(train_main, *words) == 2
    assert "files that no run has made" in capsys.readouterr().err
    assert (foreign / "model.safetensors").read_text() == "precious"
    assert _call(train_main, *words, "--overwrite") == 0
    assert load_head(foreign)


def test_a_small_lm_is_trained_into_an_ordinary_directory(made: Path, tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "max_position_embeddings": 256}
    values = {
        "run": str(tmp_path / "run"),
        "output": str(tmp_path / "lm"),
        "threads": 1,
        "target": {"path": str(made / "target")},
        "data": {"conversations": [str(made / "train.jsonl")], "max_length": 128, "supervise": "all", "held_out": 0.3},
        "head": {"kind": "draft_lm", "num_hidden_layers": 2, **sizes},
        "train": {
            "max_steps": 12,
            "batch_size": 8,
            "learning_rate": 1e-2,
            "warmup_steps": 1,
            "eval_every": 6,
            "log_every": 6,
        },
    }
    recipe = tiny.recipe(tmp_path / "lm.yaml", values)
    assert _call(train_main, "--config", recipe) == 0
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    losses = [line["held_out_loss"] for line in lines if "held_out_loss" in line]
    assert losses[-1] < losses[0]
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "lm").config.num_hidden_layers == 2
    assert _call(train_main, "--config", recipe, "--is-whole") == 0


def _sps_recipe(made: Path, **head: Any) -> dict[str, Any]:
    """The sections of a draft LM for the target of `made`, which finds the feature cache of another recipe there."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "max_position_embeddings": 256}
    return {
        "run": str(made / "run"),
        "threads": 1,
        "target": {"path": str(made / "target"), "dtype": "float32"},
        "data": {"conversations": [str(made / "train.jsonl")], "max_length": 128, "held_out": 0.3},
        "head": {"kind": "draft_lm", "num_hidden_layers": 1, **sizes, **head},
        "train": {
            "distill": "kl",
            "token_weight": 0.0,  # the target's random laws are not those of the conversations
            "max_steps": 12,
            "batch_size": 8,
            "learning_rate": 1e-2,
            "warmup_steps": 1,
            "eval_every": 6,
            "log_every": 6,
        },
    }


def test_a_draft_lm_learns_the_targets_laws_from_the_cache_and_alike_without_one(made: Path, tmp_path: Path) -> None:
    recipe = tiny.recipe(tmp_path / "sps.yaml", _sps_recipe(made))
    assert _call(data_main, "features", "--config", recipe) == 0  # whole: a draft LM asks for no taps
    output = made / "run/heads/draft_lm"
    assert _call(train_main, "--config", recipe) == 0
    lines = [json.loads(line) for line in (made / "run/metrics.jsonl").read_text().splitlines()]
    held_out = [line for line in lines if line["kind"] == "draft_lm-kl" and "held_out_distill" in line]
    assert held_out[-1]["held_out_distill"] < held_out[0]["held_out_distill"]
    assert held_out[-1]["held_out_predicted_tau"] >= 1.0
    lm = AutoModelForCausalLM.from_pretrained(output)
    assert lm.config.num_hidden_layers == 1 and lm.config.vocab_size == 320
    assert AutoTokenizer.from_pretrained(output).get_vocab() == tiny.tokenizer().get_vocab()
    assert _call(train_main, "--config", recipe, "--is-whole") == 0
    online = ("--config", recipe, "--run", tmp_path / "run", "--features.mode", "online")
    assert _call(train_main, *online) == 0
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "run/heads/draft_lm")
    torch.testing.assert_close(again.lm_head.weight, lm.lm_head.weight, rtol=1e-3, atol=1e-4)
    warm = ("--head.init_from", output, "--output", tmp_path / "warm", "--plan", "--init-to", tmp_path / "begun")
    assert _call(train_main, "--config", recipe, *warm) == 0
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "begun").lm_head.weight.equal(lm.lm_head.weight)


def test_a_draft_lm_learns_on_tokens_of_its_own_and_again_the_same(made: Path, tmp_path: Path) -> None:
    recipe = tiny.recipe(tmp_path / "sps.yaml", _sps_recipe(made))
    settings = ("--features.mode", "online", "--train.distill", "jsd", "--train.on_policy", "0.5")
    for run in ("one", "two"):
        assert _call(train_main, "--config", recipe, "--run", tmp_path / run, *settings) == 0
    one, two = ((tmp_path / run / "heads/draft_lm/model.safetensors").read_bytes() for run in ("one", "two"))
    assert one == two
    lines = [json.loads(line) for line in (tmp_path / "one/metrics.jsonl").read_text().splitlines()]
    held_out = [line["held_out_distill"] for line in lines if "held_out_distill" in line]
    assert held_out[-1] < held_out[0]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--train.measure_prompts", "2"], "train.measure_prompts: decodes with draft heads"),
        (["--train.packing", "true"], "train.packing: packs rows for eagle3"),
        (["--head.max_position_embeddings", "100"], "data.max_length: 128 is beyond"),
        (["--run", "nowhere"], "nowhere/features: no such feature cache; build it with:"),
        (["--head.init_from", "OTHER"], "a draft LM shares the tokenizer of its target"),
        (["--train.distill_weight", "0"], "distill_weight is positive"),
        (["--train.on_policy", "0.5"], "train.on_policy: a cache has no states of tokens that are yet to be drawn"),
    ],
)
def test_a_draft_lm_that_cannot_be_trained_so_is_refused(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    other = tiny.target(tmp_path / "other")
    text = (other / "tokenizer.json").read_text(encoding="utf-8")
    (other / "tokenizer.json").write_text(text.replace("<|system|>", "<|tool|>"), encoding="utf-8")
    recipe = tiny.recipe(tmp_path / "sps.yaml", _sps_recipe(made))
    words = [str(other) if word == "OTHER" else word for word in words]
    assert _call(train_main, "--config", recipe, "--output", tmp_path / "lm", "--plan", *words) == 2
    error = capsys.readouterr().err
    assert said in error and len(error.strip().splitlines()) == 1


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe for an EAGLE-3 head, with a target deep enough for the default taps and its feature cache."""
    root = tmp_path_factory.mktemp("deep")
    tiny.target(root / "target", num_blocks=7)
    tiny.write_conversations(root / "train.jsonl", 60)
    head = {"kind": "eagle3", "draft_vocab_size": 160}
    recipe = _write_recipe(root, {"unroll_steps": 3, "learning_rate": 1e-3}, head=head)
    assert _call(data_main, "features", "--config", recipe) == 0
    return root


def _held_out(run: Path) -> list[dict[str, float]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "held_out_loss" in line]


def test_an_eagle3_head_is_trained_from_the_cache_and_alike_without_one(
    deep: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = deep / "recipe.yaml"
    assert _call(train_main, "--config", recipe) == 0
    out = capsys.readouterr().out
    assert "draft vocabulary: 160 of 320 tokens cover" in out and "loss @1 " in out and "acc @1 " in out
    facts = head_facts(deep / "run/heads/eagle3")
    assert facts["draft_vocabulary"]["size"] == 160 and facts["step"] in (3, 6)
    head = load_head(deep / "run/heads/eagle3", ends=load_ends(TargetConfig(str(deep / "target")))[1])
    assert isinstance(head, Eagle3Head) and head.config.after_blocks == (2, 3, 4)
    words = ("--config", recipe, "--run", tmp_path / "run", "--features.mode", "online")
    assert _call(data_main, "features", *words) == 0 and not (tmp_path / "run/features").exists()
    assert _call(train_main, *words, "--plan") == 0
    assert _call(train_main, *words) == 0
    for found, expected in zip(_held_out(tmp_path / "run"), _held_out(deep / "run"), strict=True):
        assert found["held_out_loss"] == pytest.approx(expected["held_out_loss"], rel=1e-4)
        assert found["held_out_predicted_tau"] == pytest.approx(expected["held_out_predicted_tau"], rel=1e-3)
    assert _call(train_main, *words, "--is-whole") == 0


EAGLE3_MISTAKES = {
    "taps of a shallow target": (["--target", "{shallow}"], "has 4 blocks, and the default taps .* need at least 7"),
    "taps out of order": (["--features.after_blocks", "[4, 2, 3]"], r"not \[4, 2, 3\]; did you mean \[2, 3, 4\]\?"),
    "taps repeated": (["--features.after_blocks", "[2, 2, 4]"], r"without repeats, not \[2, 2, 4\]"),
    "a tap beyond the target": (["--features.after_blocks", "[2, 3, 9]"], "9 is no tap of .*, which has 7 blocks"),
    "a large draft vocabulary": (
        ["--head.draft_vocab_size", "400"],
        "400 is larger than the target's vocabulary of 320",
    ),
    "an unknown loss": (["--train.loss", "lk"], "--train.loss: input should be 'soft_cross_entropy', .* not 'lk'"),
}


@pytest.mark.parametrize("mistake", EAGLE3_MISTAKES)
@pytest.mark.parametrize("command", ["features", "train"])
def test_what_no_eagle3_head_can_have_is_one_line_before_anything_is_made(
    deep: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str, mistake: str
) -> None:
    words, said = EAGLE3_MISTAKES[mistake]
    if "{shallow}" in words:
        words = [words[0], str(tiny.target(tmp_path / "shallow"))]
    own = ["--output", tmp_path / "new"] if command == "train" else ["--run", tmp_path / "run"]
    module, first = (train_main, []) if command == "train" else (data_main, ["features"])
    assert _call(module, *first, "--config", deep / "recipe.yaml", "--plan", *own, *words) == 2
    error = capsys.readouterr().err
    assert re.search(said, error) and len(error.strip().splitlines()) == 1
    assert not (tmp_path / "new").exists() and not (tmp_path / "run").exists()


def test_a_cache_with_other_taps_is_refused_also_where_the_head_is_whole(
    deep: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--config", deep / "recipe.yaml", "--features.after_blocks", "[1, 3, 4]")
    said = r"built with after_blocks: \[2, 3, 4\] there, \[1, 3, 4\] asked; rebuild with: python data/main.py features"
    assert _call(train_main, *words, "--is-whole") == 1
    assert _call(train_main, *words, "--plan", "--overwrite") == 2
    assert re.search(said, capsys.readouterr().err)


@pytest.mark.parametrize("changed", ["train.jsonl", "target/tokenizer.json", "target/generation_config.json"])
def test_neither_cache_nor_draft_vocabulary_outlives_its_data_or_tokenizer(
    deep: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], changed: str
) -> None:
    file, words = deep / changed, ("--config", deep / "recipe.yaml", "--output", tmp_path / "head")
    online = (*words, "--plan", "--features.mode", "online")
    assert _call(train_main, *words, "--plan") == 0 and _call(train_main, *online) == 0
    _, key = re.findall(r"\(key (\w+)\)", capsys.readouterr().out)
    before = file.read_text()
    file.write_text(before.replace("boats", "ships") if changed == "train.jsonl" else before.replace("{", "{ ", 1))
    try:
        assert _call(train_main, *words, "--plan") == 2
        error = capsys.readouterr().err
        assert f"{file.name} changed; rebuild with: python data/main.py features" in error
        assert _call(train_main, *words, "--is-whole") == 1
        assert _call(train_main, *online) == 0
        fresh = re.findall(r"\(key (\w+)\)", capsys.readouterr().out)
        assert (fresh != [key]) == (changed == "train.jsonl")  # the other edits change no token
    finally:
        file.write_text(before)
    assert _call(train_main, *words, "--plan") == 0


def test_a_warm_start_keeps_its_vocabulary_says_its_coverage_and_must_be_able_to_end_a_turn(
    deep: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ends = load_ends(TargetConfig(str(deep / "target")))[1]
    for name, ids in (("good", torch.arange(0, 100)), ("endless", torch.arange(100, 200))):
        save_head(tiny.eagle3_head(ends.embedding, ids=ids, after_blocks=(2, 3, 4)), tmp_path / name)
    words = ("--config", deep / "recipe.yaml", "--output", tmp_path / "new", "--head.draft_vocab_size", "null")
    assert _call(train_main, *words, "--head.init_from", tmp_path / "endless", "--plan") == 2
    error = capsys.readouterr().err
    assert f"head.init_from: {tmp_path / 'endless'}: none of the target's end-of-turn tokens [3]" in error
    assert _call(train_main, *words, "--head.init_from", tmp_path / "good", "--train.max_steps", "1") == 0
    assert "draft vocabulary: 100 of 320 tokens cover" in capsys.readouterr().out
    stored = head_facts(tmp_path / "new")["draft_vocabulary"]
    assert stored["size"] == 100 and 0.0 < stored["coverage"] < 1.0


def test_positions_that_are_not_the_targets_are_noticed(deep: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--config", deep / "recipe.yaml", "--output", "nowhere", "--plan")
    assert _call(train_main, *words) == 0 and capsys.readouterr().err == ""
    assert _call(train_main, *words, "--head.rope_theta", "5e5", "--head.max_position_embeddings", "200") == 0
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("warning: head: the head's RoPE has base 500,000 and no scaling, its target's base 10,000")
    assert second.startswith("warning: head: max_position_embeddings is 200, its target's 256")


def test_packed_rows_train_the_same_head(deep: Path, tmp_path: Path) -> None:
    words = ("--config", deep / "recipe.yaml", "--train.max_steps", "3")
    heads = []
    for packed in ("false", "true"):
        output = tmp_path / packed
        assert _call(train_main, *words, "--output", output, "--train.packing", packed, "--overwrite") == 0
        heads.append(load_head(output, ends=load_ends(TargetConfig(str(deep / "target")))[1]).fc.weight)
    assert (heads[0] - heads[1]).abs().max() < 1e-4 * heads[0].abs().max()
    assert _call(train_main, *words, "--plan", "--head.kind", "eagle1", "--head.draft_vocab_size", "null") == 2


def test_the_objective_is_compared_with_its_plain_form(deep: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _call(train_main, "--config", deep / "recipe.yaml", "--compare-objective", "2") == 0
    assert "times as long" in capsys.readouterr().out
    assert (
        _call(train_main, "--config", deep / "recipe.yaml", "--train.packing", "true", "--compare-objective", "2") == 2
    )


def test_the_best_weights_are_chosen_by_the_tau_of_decoding_held_out_prompts(deep: Path, tmp_path: Path) -> None:
    measuring = ("--train.measure_prompts", "3", "--train.measure_new_tokens", "12")
    words = ("--config", deep / "recipe.yaml", "--output", tmp_path / "head", "--overwrite", *measuring)
    assert _call(train_main, *words) == 0
    measured = {line["step"]: line["held_out_tau"] for line in _held_out(deep / "run") if "held_out_tau" in line}
    assert set(measured) == {3, 6} and all(1.0 <= tau <= 5.0 for tau in measured.values())
    facts = head_facts(tmp_path / "head")
    assert facts["tau"] == max(measured.values()) == measured[facts["step"]]
    target = Target.load(TargetConfig(str(deep / "target"), dtype="float32"))
    head = load_head(tmp_path / "head", ends=target.ends)
    recipe = pipeline_recipe(deep / "recipe.yaml")
    cycles = [0, 0]
    for prompt in _prompts(deep, 3):
        decoder = SpeculativeDecoder(target, Drafting(EagleDrafter(head, target), make_shape(recipe.tree)))
        found = decoder.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False).statistics
        cycles = [cycles[0] + sum(found.cycle_tokens), cycles[1] + len(found.cycle_tokens)]
    assert facts["tau"] == pytest.approx(cycles[0] / cycles[1])


def _prompts(root: Path, count: int) -> list[list[int]]:
    """The tokens before the first answer of the first held-out rows."""
    rows = FeatureCache.open(root / "run/features").split("held_out")[:count]
    return [row.input_ids[: int(row.turns.nonzero()[0])].tolist() for row in rows]


def pipeline_recipe(path: Path) -> pipeline.Recipe:
    parser = argparse.ArgumentParser()
    pipeline.add_arguments(parser)
    return pipeline.load(*parser.parse_known_args(["--config", str(path)]))


def test_whether_a_run_is_whole_is_told_without_torch(made: Path) -> None:
    code = (
        "import sys; sys.argv = ['main.py', '--config', sys.argv[1], '--is-whole']\n"
        "from aerie.train import main\n"
        "main.main()\n"
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(made / "recipe.yaml")], cwd=ROOT, timeout=60, check=False)
    assert done.returncode == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--head.head_dim", "7"], "input should be a multiple of 2, not 7"),
        (["--head.hidden_size", "0"], "input should be greater than 0, not 0"),
        (["--head.rope_theta", "-1"], "input should be greater than 0, not -1"),
        (["--train.measure_prompts", "2", "--data.held_out", "0"], "data.held_out is 0"),
        (["--compare-objective", "0"], "needs at least one batch"),
    ],
)
def test_settings_that_cannot_train_are_one_line(
    deep: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    assert _call(train_main, "--config", deep / "recipe.yaml", "--output", tmp_path / "new", *words) == 2
    error = capsys.readouterr().err
    assert said in error and "Traceback" not in error and not (tmp_path / "new").exists()


def test_a_training_that_diverges_stops_and_keeps_nothing_of_it(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "aerie.train.losses.smooth_l1", lambda predicted, true: (predicted - true).sum(-1) * float("nan")
    )
    words = ("--config", made / "recipe.yaml", "--output", tmp_path / "lost", "--train.log_every", "1")
    assert _call(train_main, *words) == 2
    assert "the training diverged (nothing was kept); lower" in capsys.readouterr().err
    assert not (tmp_path / "lost" / "model.safetensors").exists()
