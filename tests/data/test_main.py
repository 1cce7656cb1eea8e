"""Laws of the data commands, run through the real command line."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from aerie.configs.errors import exit_code
from aerie.data.cache import FeatureCache
from aerie.data.main import main
from tests import tiny

ROOT = Path(__file__).resolve().parents[2]
Command = Callable[..., int]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Command:
    torch.set_num_threads(1)

    def run(*words: object) -> int:
        monkeypatch.setattr(sys, "argv", ["data/main.py", *(str(word) for word in words)])
        return exit_code(main)

    return run


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """A recipe over a tiny target and 24 conversations, in several shards."""
    return tiny.recipe(
        tmp_path / "recipe.yaml",
        {
            "run": str(tmp_path / "run"),
            "threads": 1,
            "target": {"path": str(tiny.target(tmp_path / "target"))},
            "data": {"conversations": [str(tiny.write_conversations(tmp_path / "rows.jsonl", 24))], "held_out": 0.2},
            "features": {"shard_tokens": 400, "batch_tokens": 256},
        },
    )


def files(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def status(run: Path) -> Any:
    return json.loads((run / "status.json").read_text())


def refusal(capsys: pytest.CaptureFixture[str]) -> str:
    """The one line on standard error."""
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: "), lines
    return lines[0]


def test_features_are_written_once_and_then_reused(
    command: Command, recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command("features", "--config", recipe, "--is-whole") == 1
    assert command("features", "--config", recipe) == 0
    assert "24 read, 24 kept" in capsys.readouterr().out
    before = files(tmp_path / "run")
    assert status(tmp_path / "run") == {"stage": "features", "state": "done", "code": 0}
    cache = FeatureCache.open(tmp_path / "run" / "features")
    assert len(cache.split("train")) + len(cache.split("held_out")) == len(cache) == 24
    assert command("features", "--config", recipe, "--is-whole") == 0
    assert capsys.readouterr().out == ""
    assert command("features", "--config", recipe) == 0
    assert capsys.readouterr().out == f"features: whole, reused ({tmp_path / 'run' / 'features'})\n"
    assert files(tmp_path / "run") == before


def test_a_whole_cache_is_reported_without_importing_torch(command: Command, recipe: Path) -> None:
    assert command("features", "--config", recipe) == 0
    words = ["data/main.py", "features", "--config", str(recipe)]
    script = (
        f"import sys; sys.argv = {words}; from aerie.data.main import main; main(); assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("features: whole, reused")


def test_a_lost_shard_makes_the_cache_incomplete_and_comes_back(command: Command, recipe: Path, tmp_path: Path) -> None:
    assert command("features", "--config", recipe) == 0
    shard = tmp_path / "run" / "features" / "shard-00001.safetensors"
    before = shard.read_bytes()
    shard.unlink()
    assert command("features", "--config", recipe, "--is-whole") == 1
    assert command("features", "--config", recipe) == 0
    assert shard.read_bytes() == before


def test_the_plan_counts_rows_tokens_and_bytes_and_writes_nothing(
    command: Command, recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "target" / "model.safetensors").write_bytes(b"weights are not read")
    assert command("features", "--config", recipe, "--plan", "--features.after_blocks", "[1]") == 0
    out = capsys.readouterr().out
    assert "features: 24 rows, " in out and " tokens x 264 bytes (float32)" in out
    assert not (tmp_path / "run").exists()


def test_an_eagle3_head_gets_the_default_taps_and_the_cache_says_which(
    command: Command, recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command("features", "--config", recipe, "--head.kind", "eagle3") == 2
    line = capsys.readouterr().err
    assert (
        "has 4 blocks, and the default taps (2, n//2, n-3) need at least 7; name its taps in features.after_blocks"
        in line
    )
    assert command("features", "--config", recipe, "--head.kind", "eagle3", "--features.after_blocks", "[]") == 2
    assert "an eagle3 head fuses at least one tap" in capsys.readouterr().err
    deep = tiny.target(tmp_path / "deep", num_blocks=8)
    changed = ("--config", recipe, "--target", deep, "--run", tmp_path / "deep_run", "--head.kind", "eagle3")
    assert command("features", *changed) == 0
    cache = FeatureCache.open(tmp_path / "deep_run" / "features", {"after_blocks": [2, 4, 5]})
    taps = cache[0].taps
    assert taps is not None and taps.shape[1] == 3 * 32
    assert command("features", *changed, "--is-whole") == 0


BAD_INPUTS: dict[str, tuple[list[str], str]] = {
    "missing conversations": (["--data.conversations", "[gone.jsonl]"], "gone.jsonl: no such file"),
    "missing target": (["--target", "./gone"], "./gone: no such target directory"),
    "missing template": (["--target.chat_template", "gone.jinja"], "gone.jinja: no such file"),
    "a tap too deep": (["--features.after_blocks", "[4]"], "features.after_blocks: 4 is no tap"),
    "descending taps": (["--features.after_blocks", "[2, 1]"], "after_blocks must ascend"),
    "unknown dtype": (["--features.dtype", "float8"], "--features.dtype: "),
    "unknown option": (["--features.batch_token", "4"], "did you mean 'features.batch_tokens'?"),
    "not an integer": (["--data.limit", "many"], "--data.limit: "),
}


@pytest.mark.parametrize("words,expected", BAD_INPUTS.values(), ids=BAD_INPUTS)
def test_bad_input_exits_with_2_and_one_line_and_overwrites_nothing(
    words: list[str],
    expected: str,
    command: Command,
    recipe: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert command("features", "--config", recipe) == 0
    before = files(tmp_path / "run" / "features")
    capsys.readouterr()
    assert command("features", "--config", recipe, "--overwrite", *words) == 2
    assert expected in refusal(capsys)
    assert files(tmp_path / "run" / "features") == before


def test_a_target_without_a_template_is_refused_with_the_way_to_pass_one(
    command: Command, recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bare = tiny.target(tmp_path / "bare", chat_template=None)
    assert command("features", "--config", recipe, "--target", bare) == 2
    assert "target.chat_template" in refusal(capsys)
    assert status(tmp_path / "run") == {"stage": "features", "state": "failed", "code": 2}
    assert list(files(tmp_path / "run")) == ["status.json"]


def test_another_recipes_cache_is_refused_and_replaced_only_with_overwrite(
    command: Command, recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command("features", "--config", recipe) == 0
    before = files(tmp_path / "run")
    capsys.readouterr()
    changed = ("--config", recipe, "--features.after_blocks", "[0]")
    assert command("features", *changed) == 2
    line = refusal(capsys)
    assert "features.after_blocks: [] there, [0] asked" in line and "--overwrite" in line
    assert files(tmp_path / "run") == before
    assert command("features", *changed, "--overwrite") == 0
    assert FeatureCache.open(tmp_path / "run" / "features", {"after_blocks": [0]})[0].taps is not None


def test_an_unfinished_cache_of_another_recipe_is_not_mixed_in(
    command: Command, recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command("features", "--config", recipe) == 0
    for name in ("provenance.json", "index.json"):
        (tmp_path / "run" / "features" / name).unlink()
    before = files(tmp_path / "run" / "features")
    capsys.readouterr()
    assert command("features", "--config", recipe, "--dtype", "bfloat16") == 2
    assert "was made from other rows or by another target" in refusal(capsys)
    assert files(tmp_path / "run" / "features") == before


def test_shares_fill_one_cache_and_only_the_last_makes_it_whole(
    command: Command, recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    assert command("features", "--config", recipe, "--shard", "2/3") == 0
    assert "share 2/3 is written" in capsys.readouterr().out
    assert json.loads((run / "status-features-2-of-3.json").read_text())["state"] == "share-done"
    assert command("features", "--config", recipe, "--is-whole") == 1
    assert command("check", "--config", recipe) == 1
    assert "index.json: missing" in capsys.readouterr().out
    assert command("features", "--config", recipe, "--shard", "3/2") == 2
    assert "--shard: 3/2 is no share; write i/n" in refusal(capsys)
    assert command("features", "--config", recipe) == 0  # another number goes on
    assert command("features", "--config", recipe, "--is-whole") == 0
    assert command("check", "--config", recipe) == 0
    assert "24 rows, " in capsys.readouterr().out
    (run / "status.json").unlink()
    assert command("features", "--config", recipe, "--shard", "1/3") == 0
    assert "features: whole, reused" in capsys.readouterr().out
    assert json.loads((run / "status-features-1-of-3.json").read_text())["state"] == "done"
    assert not (run / "status.json").exists()
    assert command("features", "--config", recipe, "--shard", "1/1") == 0
    assert status(run)["state"] == "done"


def test_a_flipped_byte_is_named_by_check_and_mended_by_verify(
    command: Command, recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command("features", "--config", recipe) == 0
    shard = tmp_path / "run" / "features" / "shard-00001.safetensors"
    before = shard.read_bytes()
    shard.write_bytes(before[:-9] + bytes([before[-9] ^ 1]) + before[-8:])
    capsys.readouterr()
    assert command("check", "--config", recipe) == 1
    out = capsys.readouterr().out
    assert out.startswith("shard-00001.safetensors: row ") and "1 problem; " in out and "--verify" in out
    assert command("features", "--config", recipe, "--verify", "--plan") == 0
    assert shard.read_bytes() != before
    assert command("features", "--config", recipe, "--verify") == 0
    assert shard.read_bytes() == before and command("check", "--config", recipe) == 0


def test_the_estimate_times_the_target_and_writes_nothing(
    command: Command, recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command("features", "--config", recipe, "--estimate", "--features.storage", "int8") == 0
    out = capsys.readouterr().out
    assert " tokens x 44 bytes (int8 for float32)" in out and re.search(r"tok/s \(measured now.* take \d.* h;", out)
    assert not (tmp_path / "run").exists()


def test_the_forms_error_is_printed_and_another_form_is_another_cache(
    command: Command, recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command("features", "--config", recipe, "--features.storage", "fp8") == 0
    assert re.search(r"fp8 for float32: relative error of a dimension: last state \d", capsys.readouterr().out)
    assert command("features", "--config", recipe) == 2
    assert "features.storage: fp8 there, None asked" in refusal(capsys)
    assert command("features", "--config", recipe, "--features.mode", "online", "--features.storage", "fp8") == 2
    assert "storage and shuffle_shards are of a cache" in refusal(capsys)


def test_reading_is_measured_beside_the_steps_of_the_last_training(
    command: Command, recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command("features", "--config", recipe) == 0
    capsys.readouterr()
    assert command("read", "--config", recipe, "--steps", "2") == 0
    out = capsys.readouterr().out
    assert "GB/s" in out and "2 steps, " in out and "has trained nothing yet" in out
    record = {"kind": "eagle1", "step": 1, "step_ms": 20.0, "data_wait_share": 0.5}
    (tmp_path / "run" / "metrics.jsonl").write_text(json.dumps(record) + "\n")
    assert command("read", "--config", recipe, "--steps", "2", "--features.shuffle_shards", "1") == 0
    out = capsys.readouterr().out
    assert "beside steps of 10 ms, " in out and "really trained waited 50.0%" in out
    for step_ms in ("-5", "0", "nan", "inf"):
        assert command("read", "--config", recipe, "--step-ms", step_ms) == 2
        assert f"--step-ms: must be a positive number of milliseconds, not {step_ms}" in refusal(capsys)


def test_show_marks_the_answers(command: Command, recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("show", "--config", recipe, "--limit", "2") == 0
    out = capsys.readouterr().out
    assert out.count("supervised") == 2 and "\x1b[32m" in out
    assert command("show", "--config", recipe, "--limit", "1", "--plain") == 0
    plain = capsys.readouterr().out
    answer = tiny.conversations(1)[0]["conversations"][1]["value"]
    assert "\x1b" not in plain and f"[1:{answer}<|end|>]" in plain


def test_the_corpus_and_its_tokenizer_are_written_whole_and_reused(
    command: Command, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    section = {"num_conversations": 30, "num_prompts": 8, "vocab_size": 400}
    values = {"run": str(run), "target": {"path": str(run / "tokenizer")}, "synthetic": section}
    recipe = tiny.recipe(
        tmp_path / "r.yaml", {**values, "data": {"conversations": [str(run / "conversations/train.jsonl")]}}
    )
    assert command("synthetic", "--config", recipe, "--plan") == 0
    assert not run.exists()
    assert command("synthetic", "--config", recipe) == 0
    before = files(run)
    assert {"conversations/train.jsonl", "conversations/prompts.jsonl", "conversations/calibration.jsonl"} < set(before)
    assert {"tokenizer/tokenizer.json", "tokenizer/provenance.json", "conversations/provenance.json"} < set(before)
    capsys.readouterr()
    assert command("synthetic", "--config", recipe) == 0
    assert "synthetic: whole, reused" in capsys.readouterr().out
    assert files(run) == before
    assert command("show", "--config", recipe, "--plain") == 0  # the tokenizer's own template marks the answers
    assert "<|assistant|>[1:" in capsys.readouterr().out
    assert command("synthetic", "--config", recipe, "--synthetic.seed", "1") == 2
    assert "synthetic.seed: 0 there, 1 asked" in refusal(capsys)
    assert files(run) == before


def test_the_corpus_does_not_replace_files_that_are_not_its_own(
    command: Command, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = tmp_path / "run" / "conversations" / "mine.jsonl"
    mine.parent.mkdir(parents=True)
    mine.write_text("{}\n")
    values = {"run": str(tmp_path / "run"), "target": {"path": "none/none"}, "data": {"conversations": ["none/none"]}}
    recipe = tiny.recipe(tmp_path / "r.yaml", {**values, "synthetic": {"num_conversations": 10}})
    assert command("synthetic", "--config", recipe) == 2
    assert "holds files that this stage did not write" in refusal(capsys)
    assert mine.read_text() == "{}\n"


def launch(recipe: Path, run: Path, *launcher: str, changes: tuple[str, ...] = ()) -> None:
    """Runs the features command in a process of its own, in another directory than the checkout."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    words = [*launcher, str(ROOT / "data" / "main.py"), "features", "--config", str(recipe), f"--run={run}", *changes]
    done = subprocess.run(words, cwd=recipe.parent, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert ("process 1 of 2" in done.stderr) == (len(launcher) > 1)


@pytest.mark.slow
def test_two_processes_write_the_same_bytes_as_one(recipe: Path, tmp_path: Path) -> None:
    zero = str(ROOT / "configs" / "accelerate" / "zero1.yaml")
    launch(recipe, tmp_path / "one", sys.executable)
    launch(recipe, tmp_path / "two", sys.executable, "-m", "accelerate.commands.launch", "--config_file", zero)
    one, two = files(tmp_path / "one" / "features"), files(tmp_path / "two" / "features")
    assert len([name for name in one if name.startswith("shard-")]) >= 3
    assert {name: text for name, text in one.items() if name != "provenance.json"} == {
        name: text for name, text in two.items() if name != "provenance.json"
    }


@pytest.mark.slow
def test_a_killed_extraction_goes_on_to_the_same_bytes(recipe: Path, tmp_path: Path) -> None:
    launch(recipe, tmp_path / "whole", sys.executable, changes=("--features.shard_tokens", "40"))
    cut, kills = tmp_path / "cut" / "features", 0
    words = [sys.executable, str(ROOT / "data" / "main.py"), "features", "--config", str(recipe)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    for least in (2, 9):  # shards that lie there when it is killed
        child = subprocess.Popen(
            [*words, f"--run={cut.parent}", "--features.shard_tokens", "40"],
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        while child.poll() is None and len(list(cut.glob("shard-*"))) < least:
            time.sleep(0.001)
        child.send_signal(signal.SIGKILL)
        kills += child.wait(timeout=60) == -signal.SIGKILL
        assert not (cut / "provenance.json").exists() or child.returncode == 0
    assert kills >= 1
    (cut / ".tmpleft").write_bytes(b"as safetensors leaves it")
    launch(recipe, cut.parent, sys.executable, changes=("--features.shard_tokens", "40"))
    one, two = files(tmp_path / "whole" / "features"), files(cut)
    assert len(one) > 20 and {**one, "provenance.json": b""} == {**two, "provenance.json": b""}
