"""The commands as a user runs them: bench, calibrate, report and generate on a tiny target, and what they refuse."""

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from aerie.model.checkpoint import save_head
from tests import tiny

ROOT = Path(__file__).resolve().parents[2]


def questions(path: Path, count: int) -> Path:
    rows = [{"question_id": n, "category": "count", "turns": [f"Please count {n + 2} boats."]} for n in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    target = tiny.target(tmp_path / "target")
    head = tiny.head(tiny.llama().get_input_embeddings().weight.detach(), scale=8.0)
    save_head(head, tmp_path / "run" / "heads" / "eagle1")
    prompts = {"path": str(questions(tmp_path / "q.jsonl", 3)), "num_prompts": 3, "max_new_tokens": 12}
    tree = {"levels": 3, "k": 3, "nodes": 8}
    values: dict[str, Any] = {
        "run": str(tmp_path / "run"),
        "threads": 1,
        "target": {"path": str(target)},
        "data": {"conversations": ["none.jsonl"]},
        "tree": tree,
        "calibrate": {"prompts": prompts, "tree": tree},
        "bench": {
            "prompts": prompts,
            "warmup_prompts": 1,
            "sampling": [{"temperature": 0.0}, {"temperature": 1.0}],
            "rows": [
                {"method": "vanilla"},
                {"method": "eagle2", "tree": tree},
                {"method": "eagle-chain", "tree": {"levels": 3}},
            ],
        },
    }
    return tiny.recipe(tmp_path / "recipe.yaml", values)


def run(*arguments: str, check: bool = True) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "infer/main.py", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    if check:
        assert done.returncode == 0, done.stderr
    return done


def refused(*arguments: str) -> str:
    """The one line of a refusal, with exit code 2 and no traceback."""
    done = run(*arguments, check=False)
    assert done.returncode == 2, (done.returncode, done.stderr)
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    assert len(lines) == 1 and "Traceback" not in done.stderr, done.stderr
    return lines[0]


@pytest.mark.slow
def test_bench_calibrate_and_report_end_to_end_and_go_on_after_a_kill(recipe: Path, tmp_path: Path) -> None:
    run("bench", "--config", str(recipe))
    records = tmp_path / "run" / "bench" / "records.jsonl"
    rows = [json.loads(line) for line in records.read_text().splitlines()]
    assert len(rows) == 3 * 3 * 2 and all(row["status"] == "ok" for row in rows)
    greedy = [row for row in rows if row["temperature"] == 0]
    assert all(row["identical"] and row["identical_to_generate"] for row in greedy)
    assert {row["verify"] for row in rows if row["temperature"] == 1} == {"R1", "R2"}  # the chain is sampled
    # a kill in the middle of a line: the rest is measured again, what was whole is kept
    lines = records.read_text().splitlines(keepends=True)
    records.write_text("".join(lines[:5]) + lines[5][:40])
    (tmp_path / "run" / "bench" / "provenance.json").unlink()
    run("bench", "--config", str(recipe))
    again = [json.loads(line) for line in records.read_text().splitlines()]
    key = ("row", "temperature", "prompt_id")
    assert sorted([r[k] for k in key] + r["output_ids"] for r in again) == sorted(
        [r[k] for k in key] + r["output_ids"] for r in rows
    )
    assert any(r["ms"] == rows[0]["ms"] for r in again)
    assert "whole, reused" in run("bench", "--config", str(recipe)).stdout
    run("calibrate", "--config", str(recipe))
    out = run("report", "--config", str(recipe)).stdout
    assert "eagle2" in out and "index.html" in out
    summary = json.loads((tmp_path / "run" / "report" / "summary.json").read_text())
    assert summary["schema"] == 1 and len(summary["rows"]) == 6
    assert summary["rows"][0]["tau"] == 1.0


@pytest.mark.slow
def test_a_bench_that_is_killed_goes_on_where_it_stopped_and_loses_no_finished_prompt(
    recipe: Path, tmp_path: Path
) -> None:
    prompts = questions(tmp_path / "many.jsonl", 10)
    command = ("bench", "--config", str(recipe), "--bench.prompts.path", str(prompts), "--bench.reference", "false")
    command += ("--bench.prompts.num_prompts", "10", "--bench.prompts.max_new_tokens", "24", "--bench.cycles", "true")
    records, total = tmp_path / "run" / "bench" / "records.jsonl", 10 * 3 * 2
    process = subprocess.Popen(
        [sys.executable, "infer/main.py", *command], cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 240
    while not (records.is_file() and records.read_bytes().count(b"\n") >= 9):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    kept = [json.loads(line) for line in records.read_bytes().decode().split("\n")[:-1]]
    assert 9 <= len(kept) < total and not (records.parent / "provenance.json").exists()
    run(*command)
    rows = [json.loads(line) for line in records.read_text().splitlines()]
    found = {(row["row"], row["temperature"], row["prompt_id"]): row for row in rows}
    assert len(rows) == len(found) == total
    for row in kept:
        again = found[row["row"], row["temperature"], row["prompt_id"]]
        assert {**again, "identical": None} == {**row, "identical": None}  # measured times and all
    lines = (records.parent / "cycles.jsonl").read_text().splitlines()
    assert len(lines) == sum(row["target_forwards"] for row in rows)


@pytest.mark.slow
def test_a_changed_bench_is_refused_and_overwritten_only_when_told(recipe: Path, tmp_path: Path) -> None:
    run("bench", "--config", str(recipe), "--bench.reference", "false")
    before = (tmp_path / "run" / "bench" / "records.jsonl").read_bytes()
    changed = ("bench", "--config", str(recipe), "--bench.reference", "false", "--bench.prompts.max_new_tokens", "6")
    assert "--overwrite" in refused(*changed)
    assert (tmp_path / "run" / "bench" / "records.jsonl").read_bytes() == before
    run(*changed, "--overwrite")
    row = json.loads((tmp_path / "run" / "bench" / "records.jsonl").read_text().splitlines()[0])
    assert row["new_tokens"] <= 6


@pytest.mark.slow
@pytest.mark.parametrize("method", ["eagle2", "eagle-chain", "vanilla"])
def test_generate_streams_the_same_text_with_every_method(recipe: Path, method: str) -> None:
    arguments = ("generate", "--config", str(recipe), "--prompt", "Please count 4 boats.", "--max-new-tokens", "12")
    done = run(*arguments, "--method", method)
    assert "tau" in done.stderr
    assert done.stdout == run(*arguments, "--method", "vanilla").stdout


@pytest.mark.slow
def test_an_eagle3_heads_directory_alone_says_how_to_decode(recipe: Path, tmp_path: Path) -> None:
    head = tiny.eagle3_head(tiny.llama().get_input_embeddings().weight.detach(), ids=torch.arange(200), scale=8.0)
    save_head(head, tmp_path / "head3")
    target, head3 = str(tmp_path / "target"), str(tmp_path / "head3")
    arguments = ("generate", "--target", target, "--prompt", "Please count 4 boats.", "--max-new-tokens", "12")
    done = run(*arguments, "--head", head3)
    assert done.stdout == run(*arguments, "--method", "vanilla").stdout
    planned = run(*arguments, "--head", head3, "--plan").stdout
    assert "eagle3 with" in planned and "'levels': 8" in planned
    assert "this is an eagle3 head; give another head, or method eagle3" in refused(
        *arguments, "--head", head3, "--method", "eagle2"
    )
    rows = json.dumps([{"method": "vanilla"}, {"method": "eagle3", "tree": {"levels": 3, "k": 3, "nodes": 8}}])
    run("bench", "--config", str(recipe), "--head", head3, "--bench.rows", rows)
    records = [json.loads(line) for line in (tmp_path / "run" / "bench" / "records.jsonl").read_text().splitlines()]
    greedy = [row for row in records if row["method"] == "eagle3" and row["temperature"] == 0]
    assert len(greedy) == 3 and all(row["identical"] and row["identical_to_generate"] for row in greedy)


def test_a_plan_measures_nothing(recipe: Path, tmp_path: Path) -> None:
    for command in ("bench", "calibrate", "report"):
        run(command, "--config", str(recipe), "--plan")
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["heads"]


def test_bad_inputs_are_one_line_and_exit_code_two(recipe: Path, tmp_path: Path) -> None:
    config = ("--config", str(recipe))
    assert "No such file" in refused("bench", "--config", str(tmp_path / "none.yaml"))
    assert "did you mean 'bench.prompts.num_prompts'" in refused("bench", *config, "--bench.prompts.num_promts", "3")
    assert "no such target directory" in refused("bench", *config, "--target", str(tmp_path / "gone"))
    assert "no such file of prompts" in refused("bench", *config, "--bench.prompts.path", str(tmp_path / "gone.jsonl"))
    assert "train the head" in refused("calibrate", *config, "--head", str(tmp_path / "gone"))
    assert "nothing was measured yet" in refused("report", *config)
    assert "needs --config" in refused("generate", "--prompt", "x")
    assert not (tmp_path / "run" / "bench").exists()


@pytest.mark.slow
def test_what_only_loading_shows_is_one_line_too(recipe: Path, tmp_path: Path) -> None:
    config = ("--config", str(recipe), "--prompt", "count")
    assert "exceeds the target's context" in refused("generate", *config, "--max-new-tokens", "900")
    other = tiny.target(tmp_path / "other", hidden_size=64)
    assert "belongs to another target" in refused("generate", *config, "--target", str(other))
    bare = tiny.target(tmp_path / "bare", chat_template=None)
    assert "no chat template" in refused("generate", *config, "--target", str(bare), "--method", "vanilla")


def test_a_row_drafts_with_its_own_head_unless_another_is_given(recipe: Path, tmp_path: Path) -> None:
    own, other = tmp_path / "run/heads/eagle1", tmp_path / "other"
    shutil.copytree(own, other)
    row = tmp_path / "row.yaml"
    row.write_text(f"method: deagle\nhead: {other}\n")
    words = ("--row", str(row), "--prompt", "hi", "--plan")
    for start in (("--config", str(recipe)), ("--target", str(tmp_path / "target"))):
        assert f"deagle with {other}," in run("generate", *start, *words).stdout
        assert f"deagle with {own}," in run("generate", *start, *words, "--head", str(own)).stdout
    row.write_text(f"method: deagle\nhead: {tmp_path / 'gone'}\n")
    assert "train the head" in refused("generate", "--config", str(recipe), *words)


def test_calibrate_measures_the_head_that_is_given_or_none(recipe: Path, tmp_path: Path) -> None:
    config = ("calibrate", "--config", str(recipe), "--plan")
    own = tmp_path / "run/heads/eagle1"
    assert f", {own} -> " in run(*config).stdout
    head = tiny.eagle3_head(tiny.llama().get_input_embeddings().weight.detach(), ids=torch.arange(200), scale=8.0)
    save_head(head, tmp_path / "head3")
    assert "this is an eagle3 head" in refused(*config, "--head", str(tmp_path / "head3"))
    assert "pld has no head" in refused(*config, "--calibrate.method", "pld")


def test_a_method_has_its_own_tree_and_a_head_that_it_cannot_use_is_refused(recipe: Path, tmp_path: Path) -> None:
    config = ("generate", "--config", str(recipe), "--prompt", "hi", "--plan")
    assert "'levels': 3, 'k': 2, 'nodes': 8" in run(*config, "--tree.k", "2").stdout  # the recipe's, and its change
    assert "'levels': 8, 'k': 10, 'nodes': 60" in run(*config, "--method", "deagle").stdout  # the published one
    assert "pld with no head" in run(*config, "--method", "pld", "--lookup.length", "4").stdout
    head = str(tmp_path / "run" / "heads" / "eagle1")
    assert "medusa drafts with medusa, and this is an eagle1 head" in refused(
        *config, "--method", "medusa", "--head", head
    )
    assert "pld needs no head" in refused(*config, "--method", "pld", "--head", head)
    bare = ("generate", "--target", str(tmp_path / "target"), "--head", head, "--prompt", "hi")
    assert "--dtype: input should be" in refused(*bare, "--dtype", "float17")
    assert "temperature must not be negative" in refused(*bare, "--temperature", "-1")
