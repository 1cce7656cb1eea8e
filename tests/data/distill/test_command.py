"""The distill command, run through the real command line with a tiny target in process."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml

from aerie.configs.errors import exit_code
from aerie.data.main import main
from tests import tiny
from tests.data.distill.answering import outcomes, write_rows

Command = Callable[..., int]
ROWS, TOKENS = 6, 12
KEEP = dict.fromkeys(("cut", "empty", "loop", "language", "refusal", "repeated"), "keep")


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Command:
    torch.set_num_threads(1)

    def run(*words: object) -> int:
        monkeypatch.setattr(sys, "argv", ["data/main.py", *(str(word) for word in words)])
        return exit_code(main)

    return run


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    rows = [{"prompt": f"Please count {number} boats."} for number in range(ROWS)]
    section = {
        "sources": [{"path": str(write_rows(tmp_path / "questions.jsonl", rows)), "kind": "prompts"}],
        "sampling": {"temperature": 0.0, "max_tokens": TOKENS},
        "gate": KEEP,
    }
    run = tmp_path / "run"
    return tiny.recipe(
        tmp_path / "recipe.yaml",
        {
            "run": str(run),
            "threads": 1,
            "target": {"path": str(tiny.target(tmp_path / "target"))},
            "data": {"conversations": [str(run / "distilled/conversations.jsonl")], "held_out": 0.0},
            "distill": section,
        },
    )


def test_greedy_answers_are_the_targets_own_and_are_what_is_trained_on(
    command: Command, recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command("distill", "--config", recipe) == 0
    assert f"distill: {ROWS} of {ROWS} rows kept" in capsys.readouterr().out
    model, tokenizer = tiny.llama(), tiny.tokenizer()
    trained = [json.loads(line) for line in (tmp_path / "run/distilled/conversations.jsonl").read_text().splitlines()]
    for number, row in enumerate(trained):
        messages = [{"role": "user", "content": f"Please count {number} boats."}]
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")["input_ids"]
        whole = model.generate(ids, max_new_tokens=TOKENS, do_sample=False)[0].tolist()
        assert row["input_ids"] == whole
        assert row["loss_mask"] == [0] * ids.shape[1] + [1] * (len(whole) - ids.shape[1])
    assert (tmp_path / "run/distilled/summary.html").read_text().startswith("<!doctype html>")
    assert json.loads((tmp_path / "run/status.json").read_text())["state"] == "done"
    assert command("features", "--config", recipe, "--features.after_blocks", "[]") == 0


@pytest.mark.slow
def test_a_whole_distillation_is_reused_and_another_recipes_is_refused(
    command: Command, recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command("distill", "--config", recipe, "--is-whole") == 1
    assert command("distill", "--config", recipe) == 0
    assert command("distill", "--config", recipe, "--is-whole") == 0
    before = (tmp_path / "run/distilled/outcomes.jsonl").read_bytes()
    capsys.readouterr()
    assert command("distill", "--config", recipe) == 0
    assert capsys.readouterr().out == f"distill: whole, reused ({tmp_path / 'run/distilled'})\n"
    other = ("--distill.sampling.max_tokens", "5")
    assert command("distill", "--config", recipe, *other) == 2
    assert "sampling.max_tokens: 12 there, 5 asked" in capsys.readouterr().err
    assert command("distill", "--config", recipe, *other, "--overwrite") == 0
    assert max(row.num_tokens for row in outcomes(tmp_path / "run")) == 5
    assert command("distill", "--config", recipe, "--overwrite") == 0
    assert (tmp_path / "run/distilled/outcomes.jsonl").read_bytes() == before


def test_another_gate_asks_nothing_again(
    command: Command, recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command("distill", "--config", recipe) == 0
    journal = tmp_path / "run/distilled/journal/shard-00001-of-00001.jsonl"
    before, num_cut = (
        journal.read_bytes(),
        sum(row.answers[0].is_cut for row in outcomes(tmp_path / "run")),
    )
    capsys.readouterr()
    command("distill", "--config", recipe, "--distill.gate.cut", "drop", "--overwrite")
    assert num_cut and f"{num_cut} with flaw 'cut'" in capsys.readouterr().err
    assert journal.read_bytes() == before


@pytest.mark.slow
def test_shards_are_merged_to_what_one_job_writes(
    command: Command, recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command("distill", "--config", recipe) == 0
    parts = ("distill", "--config", recipe, "--run", tmp_path / "parts")
    assert command(*parts, "--shard", "2/2") == 0
    assert command(*parts, "--merge") == 2
    assert "3 of 6 rows have not ended (the first: 0:1)" in capsys.readouterr().err
    assert command(*parts, "--shard", "1/2") == 0
    assert not (tmp_path / "parts/distilled/conversations.jsonl").exists()
    assert command(*parts, "--merge") == 0
    for name in ("outcomes.jsonl", "conversations.jsonl", "summary.json"):
        one, two = (tmp_path / run / "distilled" / name for run in ("run", "parts"))
        assert one.read_bytes() == two.read_bytes()


def test_a_job_that_finds_no_prompts_leaves_the_others_journals_alone(
    command: Command, recipe: Path, tmp_path: Path
) -> None:
    """Jobs that start together all make the prompts; a slower one must not undo what a faster one has begun."""
    assert command("distill", "--config", recipe, "--shard", "1/2") == 0
    (tmp_path / "run/distilled/prompts.json").unlink()
    assert command("distill", "--config", recipe, "--shard", "2/2") == 0
    assert command("distill", "--config", recipe, "--merge") == 0
    assert len(outcomes(tmp_path / "run")) == ROWS


def test_rows_that_shares_retried_are_merged_although_the_stage_was_whole(
    command: Command, recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command("distill", "--config", recipe) == 0
    before = (tmp_path / "run/distilled/outcomes.jsonl").read_bytes()
    journal = tmp_path / "run/distilled/journal/shard-00001-of-00001.jsonl"
    header, *lines = journal.read_text().splitlines(keepends=True)
    failed = json.dumps({"id": "0:2", "status": "failed", "place": "x", "why": "HTTP 500"}) + "\n"
    journal.write_text("".join([header, *(failed if '"id": "0:2"' in line else line for line in lines)]))
    assert command("distill", "--config", recipe, "--shard", "1/2", "--retry-failed") == 0
    assert command("distill", "--config", recipe, "--is-whole") == 0  # its share holds no failed row
    assert command("distill", "--config", recipe, "--shard", "2/2", "--retry-failed") == 0
    assert command("distill", "--config", recipe, "--is-whole") == 1
    assert command("distill", "--config", recipe, "--merge") == 0
    assert (tmp_path / "run/distilled/outcomes.jsonl").read_bytes() == before
    assert command("distill", "--config", recipe, "--is-whole") == 0


@pytest.mark.slow
def test_a_draft_head_changes_nothing_but_the_speed(
    command: Command, recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command("distill", "--config", recipe) == 0
    head = tmp_path / "drafted/heads/draft_lm"
    tiny.llama(num_blocks=1, seed=5).save_pretrained(head)
    tiny.tokenizer().save_pretrained(head)
    values = yaml.safe_load(recipe.read_text())
    values["head"] = {"kind": "draft_lm", "init_from": str(head)}
    drafted = tiny.recipe(tmp_path / "drafted.yaml", {**values, "run": str(tmp_path / "drafted")})
    capsys.readouterr()
    assert command("distill", "--config", drafted) == 0
    assert f"answers in this process with {head}" in capsys.readouterr().out
    assert outcomes(tmp_path / "drafted") == outcomes(tmp_path / "run")
    alone = ("--run", tmp_path / "alone", "--distill.decoder", "vanilla")
    assert command("distill", "--config", drafted, *alone) == 0
    assert outcomes(tmp_path / "alone") == outcomes(tmp_path / "run")


def test_the_recipes_own_measuring_prompts_are_never_asked(
    command: Command, recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    questions = [{"question_id": 1, "category": "a", "turns": ["Please count 3 boats."]}]
    values = yaml.safe_load(recipe.read_text())
    values["bench"] = {
        "prompts": {"path": str(write_rows(tmp_path / "bench.jsonl", questions)), "num_prompts": 1},
        "rows": [{"method": "vanilla"}],
    }
    for number, name in ((1, "prompts"), (2, "measure")):
        own = [{"question_id": number, "category": "a", "turns": [f"Please count {number} boats."]}]
        path = str(write_rows(tmp_path / f"{name}.jsonl", own))
        values.setdefault("tune", {})[name] = {"path": path, "num_prompts": 1}
    other = [{"turns": ["Please count 4 boats."]}]
    values["distill"]["exclude"] = [{"name": "ours", "path": str(write_rows(tmp_path / "ours.jsonl", other))}]
    path = tiny.recipe(tmp_path / "measured.yaml", values)
    assert command("distill", "--config", path, "--plan") == 0
    assert (
        "6 rows, 2 to ask with up to 2 requests; 4 skipped: overlaps an evaluation question" in capsys.readouterr().out
    )
    assert not (tmp_path / "run").exists()
    assert command("distill", "--config", path) == 0
    assert [row.status for row in outcomes(tmp_path / "run")] == ["done", *["skipped"] * 4, "done"]


def test_the_texts_held_out_are_part_of_what_the_answers_are_made_from_and_how_they_are_measured_is_not(
    command: Command, recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    turns = (["Please count 3 boats.", "Why?"], ["Please count 7 boats."])
    questions = [{"question_id": n, "category": "a", "turns": each} for n, each in enumerate(turns)]
    held_out = write_rows(tmp_path / "bench.jsonl", questions)
    values = yaml.safe_load(recipe.read_text())

    def measured(**prompts: object) -> Path:
        bench = {"prompts": prompts, "rows": [{"method": "vanilla"}]}
        return tiny.recipe(tmp_path / "measured.yaml", {**values, "bench": bench})

    assert command("distill", "--config", measured(path=str(held_out), num_prompts=2)) == 0
    as_tasks = [{"name": "ours", "path": str(write_rows(tmp_path / "moved.jsonl", questions[::-1])), "num_prompts": 1}]
    for prompts in (
        {"path": str(held_out), "num_prompts": 1, "max_new_tokens": 7, "turns": 1, "system_prompt": "Be brief."},
        {"tasks": as_tasks},
    ):
        assert command("distill", "--config", measured(**prompts), "--is-whole") == 0
    questions[1]["turns"] = ["Please count 4 boats."]
    write_rows(held_out, questions)
    assert command("distill", "--config", measured(path=str(held_out)), "--is-whole") == 1
    capsys.readouterr()
    assert command("distill", "--config", measured(path=str(held_out))) == 2
    assert "--overwrite" in capsys.readouterr().err
    held_out.unlink()
    assert command("distill", "--config", measured(path=str(held_out)), "--is-whole") == 1


def test_a_prompt_that_leaves_no_room_is_skipped(command: Command, recipe: Path, tmp_path: Path) -> None:
    write_rows(tmp_path / "questions.jsonl", [{"prompt": "Please. " * 300}, {"prompt": "Why?"}])
    assert command("distill", "--config", recipe) == 0
    long, short = outcomes(tmp_path / "run")
    assert (long.status, long.why) == ("skipped", "too long for the target's context with max_tokens")
    assert short.status == "done"


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--shard", "3/2"], "--shard: 3/2 is no share; write i/n"),
        (["--merge", "--retry-failed"], "--merge asks nothing, and --retry-failed asks again"),
        (["--merge", "--shard", "1/2"], "leave --shard 1/2 out"),
        (["--distill.gate.cut", "maybe"], "distill.gate.cut: input should be 'keep' or 'drop'"),
        (["--distill.server.urls", "[host]"], "host: a base URL looks like http://host:8000/v1"),
        (["--distill.sources", "[]"], "sources is empty"),
    ],
)
def test_contradictions_are_refused_in_a_line(
    command: Command, recipe: Path, capsys: pytest.CaptureFixture[str], words: list[str], line: str
) -> None:
    assert command("distill", "--config", recipe, *words) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and line in lines[0]


def test_a_recipe_without_the_section_is_told_where_there_is_one(
    command: Command, recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    values = yaml.safe_load(recipe.read_text())
    del values["distill"]
    path = tiny.recipe(tmp_path / "plain.yaml", values)
    assert command("distill", "--config", path) == 2
    assert "no section 'distill'; see configs/distill" in capsys.readouterr().err
