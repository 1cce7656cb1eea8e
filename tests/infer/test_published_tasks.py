"""The published tasks' rows become the prompts of their sources, from files and through `datasets` alike."""

import json
import re
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from aerie.configs.errors import UserError
from aerie.configs.schema.measure import PromptsConfig, TaskConfig
from aerie.infer.measure.tasks import (
    TASKS,
    Prompt,
    check_sources,
    load_prompts,
    pinned,
    prompt_inputs,
    question,
    revision_of,
    source_of,
    sources_facts,
)

GPQA = {"Question": "Which?", "Correct Answer": "a", "Record ID": "rec7"} | {
    f"Incorrect Answer {n}": letter for n, letter in ((1, "b"), (2, "c"), (3, "d"))
}
GSM8K = "openai/gsm8k:main:test"
BOXED = "\nPlease reason step by step, and put your final answer within \\boxed{}."


def written(path: Path, rows: list[dict[str, Any]]) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def loaded(task: TaskConfig, **changes: Any) -> list[Prompt]:
    return load_prompts(PromptsConfig(tasks=(task,), **changes))


@pytest.mark.parametrize(
    ("name", "row", "identity", "turns"),
    [
        ("mt_bench", {"prompt": ["one", "two"], "prompt_id": 81}, "81", ("one", "two")),
        (
            "humaneval",
            {"task_id": "HE/0", "prompt": "def f():"},
            "HE/0",
            ("Complete the code I provided.\n\ndef f():",),
        ),
        ("gsm8k", {"question": "1 + 1?", "answer": "#### 2"}, "5", ("1 + 1?",)),
        ("alpaca", {"instruction": "Rate it.", "input": "A film"}, "5", ("Rate it.\n\nA film",)),
        ("alpaca", {"instruction": "Sing.", "input": ""}, "5", ("Sing.",)),
        ("cnn_dm", {"article": "News.", "highlights": "N", "id": "ab"}, "ab", ("Summarize: News.",)),
        ("natural_questions", {"question": "who", "answer": ["x"]}, "5", ("who",)),
        ("math500", {"problem": "2x = 4", "level": 3, "unique_id": "t/1"}, "t/1", (f"2x = 4{BOXED}",)),
        ("aime", {"id": 0, "problem": "p"}, "0", (f"p{BOXED}",)),
    ],
)
def test_a_row_of_each_task_becomes_its_prompt(name: str, row: dict[str, Any], identity: str, turns: object) -> None:
    found = question(name, row, 5, "file: row 5")
    assert (found.identity, found.turns) == (identity, turns)
    assert found.part == ("level3" if name == "math500" else None)
    missing = {key: value for key, value in row.items() if key not in TASKS[name].needs}
    with pytest.raises(UserError, match=rf"file: row 5: a question needs '\w+' to be one of {name}"):
        question(name, missing, 5, "file: row 5")


def test_gpqa_lists_all_answers_in_an_order_of_its_own_that_never_changes() -> None:
    text = question("gpqa_diamond", GPQA, 1, "x").turns[0]
    assert sorted(line[3:] for line in text.splitlines() if line[1:3] == ") ") == ["a", "b", "c", "d"]
    assert text == question("gpqa_diamond", dict(reversed(GPQA.items())), 9, "y").turns[0]
    places = set()
    for number in range(20):
        lines = question("gpqa_diamond", {**GPQA, "Question": f"{number}?"}, 1, "x").turns[0].splitlines()
        places.add(next(line[0] for line in lines if line.endswith(") a")))
    assert places == set("ABCD")


def test_a_file_of_questions_is_taken_as_it_is_whatever_the_task(tmp_path: Path) -> None:
    path = written(tmp_path / "question.jsonl", [{"question_id": 9, "category": "code", "turns": ["def f", "and g"]}])
    (prompt,) = loaded(TaskConfig("humaneval", path))
    assert prompt == Prompt("9", "humaneval", "def f", ("and g",))
    (mine,) = loaded(TaskConfig("mine", path), turns=1, system_prompt="Be brief.")
    assert mine == Prompt("9", "mine", "def f", (), "Be brief.")


def test_math_is_asked_evenly_by_level_and_each_level_is_a_task(tmp_path: Path) -> None:
    rows = [{"problem": f"p{n}", "level": 1 + (n > 5), "unique_id": str(n)} for n in range(9)]
    found = loaded(TaskConfig("math500", written(tmp_path / "m.jsonl", rows)), num_prompts=4)
    assert [(p.task, p.prompt_id) for p in found] == [
        ("math500-level1", "0"),
        ("math500-level2", "6"),
        ("math500-level1", "1"),
        ("math500-level2", "7"),
    ]


def test_a_seed_draws_from_the_whole_set_and_a_tasks_own_number_counts(tmp_path: Path) -> None:
    path = written(tmp_path / "g.jsonl", [{"question": f"q{n}"} for n in range(50)])
    first = loaded(TaskConfig("gsm8k", path), num_prompts=5)
    drawn = loaded(TaskConfig("gsm8k", path, num_prompts=6, seed=1), num_prompts=5)
    assert [p.text for p in first] == [f"q{n}" for n in range(5)] and len(drawn) == 6
    assert drawn == loaded(TaskConfig("gsm8k", path, num_prompts=6, seed=1)) and {p.text for p in drawn} - {
        p.text for p in first
    }
    assert drawn != loaded(TaskConfig("gsm8k", path, num_prompts=6, seed=2))


def test_eighty_are_the_default(tmp_path: Path) -> None:
    path = written(tmp_path / "g.jsonl", [{"question": f"q{n}"} for n in range(90)])
    assert len(loaded(TaskConfig("gsm8k", path))) == 80


def test_what_is_no_task_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"task 'mt-bench': is none of mt_bench, .*give the path of its questions"):
        source_of(TaskConfig("mt-bench"))
    with pytest.raises(UserError, match=r"gone\.jsonl: no such file of prompts for task 'x'"):
        check_sources(PromptsConfig(tasks=(TaskConfig("x", str(tmp_path / "gone.jsonl")),)))
    with pytest.raises(ValueError, match="set one of them"):
        PromptsConfig()
    with pytest.raises(ValueError, match="gsm8k stands there twice"):
        PromptsConfig(tasks=(TaskConfig("gsm8k"), TaskConfig("gsm8k", "x")))


def test_a_data_set_is_read_through_datasets_by_its_subset_and_split(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`datasets` reads a directory as it reads the Hub's repository of that name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    repository = tmp_path / "openai" / "gsm8k"
    for split in ("train", "test"):
        written(repository / "main" / f"{split}.jsonl", [{"question": f"{split} {n}"} for n in range(3)])
    files = [{"split": split, "path": f"main/{split}.jsonl"} for split in ("train", "test")]
    (repository / "README.md").write_text(
        "---\nconfigs: " + json.dumps([{"config_name": "main", "data_files": files}]) + "\n---\n"
    )
    found = loaded(TaskConfig("gsm8k"), num_prompts=2)
    assert [(p.task, p.prompt_id, p.text) for p in found] == [("gsm8k", "1", "test 0"), ("gsm8k", "2", "test 1")]


class Api(BaseHTTPRequestHandler):
    """The Hub's answer about a data set, and nothing else."""

    def do_GET(self) -> None:
        revision = self.path.rsplit("/", 1)[-1]
        is_known = self.path.startswith("/api/datasets/openai/gsm8k")
        sha = {"v1": "1" * 40, "gsm8k": "2" * 40}.get(revision)
        body = json.dumps({"id": "openai/gsm8k", "sha": sha, "siblings": []} if is_known else {}).encode()
        self.send_response(200 if is_known else 404)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """Says nothing."""


def test_a_run_pins_the_commit_that_the_hub_names_and_records_it(monkeypatch: pytest.MonkeyPatch) -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Api)
    Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr("huggingface_hub.hf_api.constants.ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    asked = PromptsConfig(tasks=(TaskConfig("gsm8k", path=GSM8K), TaskConfig("alpaca", revision="abc")))
    now = pinned(asked)
    tagged = pinned(PromptsConfig(tasks=(TaskConfig("gsm8k", revision="v1"),)))
    server.shutdown()
    assert [task.revision for task in now.tasks] == ["2" * 40, "abc"]  # alpaca is not there: as it was asked
    assert tagged.tasks[0].revision == "1" * 40
    assert sources_facts(now)[0] == {"task": "gsm8k", "source": GSM8K, "revision": "2" * 40}
    assert prompt_inputs(asked) == [
        {"task": "gsm8k", "source": GSM8K, "revision": None},
        {"task": "alpaca", "source": "tatsu-lab/alpaca:train", "revision": "abc"},
    ]


def test_published_sets_are_read_at_pinned_commits() -> None:
    """Of the sets themselves; a path of one's own and a revision that is asked for go before."""
    for name, task in TASKS.items():
        assert re.fullmatch("[0-9a-f]{40}", task.revision), name
        assert revision_of(TaskConfig(name)) == task.revision
        assert revision_of(TaskConfig(name, revision="main")) == "main"
        assert revision_of(TaskConfig(name, path=task.source)) is None
    asked = PromptsConfig(tasks=(TaskConfig("gsm8k"),))
    assert (
        prompt_inputs(asked)
        == sources_facts(asked)
        == [{"task": "gsm8k", "source": GSM8K, "revision": TASKS["gsm8k"].revision}]
    )
