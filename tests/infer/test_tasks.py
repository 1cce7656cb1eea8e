"""Measuring prompts: from question files, plain lines, and published sets at pinned commits."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import pytest

from aerie.configs.errors import warn_once
from aerie.configs.schema.data import DataConfig
from aerie.configs.schema.measure import HeldOutPrompts, PromptsConfig, TaskConfig
from aerie.data.conversations import Tally, load_conversations
from aerie.infer.measure.tasks import (
    ABSENT,
    TASKS,
    Prompt,
    check_sources,
    load_prompts,
    pinned,
    prompt_inputs,
    prompt_of,
    set_of,
)
from tests import tiny

BOXED = "\nPlease reason step by step, and put your final answer within \\boxed{}."
GPQA = {"Question": "Which?", "Correct Answer": "a"} | {
    f"Incorrect Answer {n}": "abcd"[n] for n in (1, 2, 3)
}
ANY = PromptsConfig("q.jsonl")
SPEED = {
    "question_id": "c0ffee",
    "category": "coding",
    "sub_category": "python",
    "turns": ["one", "two"],
    "source": "somewhere",
    "src_id": "3",
    "difficulty": "easy",
    "multiturn": True,
}
TEXTS_OF = {"mbpp": ("Add.", "assert a\nassert b"), "livecodebench": ("Sort.", "# YOUR CODE HERE")}
SYSTEM = {"role": "system", "content": "Be brief."}


def loaded(task: TaskConfig, **changes: Any) -> list[Prompt]:
    return load_prompts(PromptsConfig(tasks=(task,), **changes))


@pytest.mark.parametrize(
    ("name", "row", "identity", "turns"),
    [
        ("mt_bench", {"prompt": ["one", "two"], "prompt_id": 81}, "81", ("one", "two")),
        (
            "humaneval",
            {"task_id": "H/0", "prompt": "def f():"},
            "H/0",
            ("Complete the code I provided.\n\ndef f():",),
        ),
        ("gsm8k", {"question": "1 + {1}?", "answer": "#### 2"}, "5", ("1 + {1}?",)),
        ("alpaca", {"instruction": "Rate it.", "input": "A film"}, "5", ("Rate it.\n\nA film",)),
        (
            "cnn_dm",
            {"article": "News.", "highlights": "N", "id": "ab"},
            "ab",
            ("Summarize: News.",),
        ),
        (
            "math500",
            {"problem": "2x = 4", "level": 3, "unique_id": "t/1"},
            "t/1",
            (f"2x = 4{BOXED}",),
        ),
        ("aime25", {"problem": "2x = 4", "answer": "2", "id": "7"}, "7", (f"2x = 4{BOXED}",)),
        (
            "mbpp",
            {"prompt": "Add.", "test_list": ["assert a", "assert b"], "task_id": 11},
            "11",
            None,
        ),
        ("livecodebench", {"question_content": "Sort.", "question_id": "abc_d"}, "abc_d", None),
        ("speed_bench", SPEED, "c0ffee", ("one", "two")),
        ("speed_bench_16k", SPEED, "c0ffee", ("one", "two")),
    ],
)
def test_rows_of_tasks(name: str, row: dict[str, Any], identity: str, turns: object) -> None:
    """A row of each task becomes its prompt, and a foreign row is refused."""
    prompt = prompt_of(name, row, 5, "file: row 5", ANY)
    assert (prompt.prompt_id, prompt.turns) == (identity, turns or prompt.turns)
    assert all(text in prompt.turns[0] for text in TEXTS_OF.get(name, ())) and not prompt.unread
    parts = {"math500": "math500-level3", "speed_bench": "speed_bench-coding"}
    parts["speed_bench_16k"] = "speed_bench_16k-coding"
    assert prompt.task == parts.get(name, name) and set_of(prompt.task) == name
    tiny.refused(
        rf"file: row 5: a question of {name} needs the column '\w+'",
        prompt_of,
        name,
        {"foreign": 1},
        5,
        "file: row 5",
        ANY,
    )


def test_held_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without prompts, stages take what training never sees, and no two take the same."""
    data = DataConfig(
        (str(tiny.write_conversations(tmp_path / "rows.jsonl", 200)),), held_out=0.3, limit=100
    )
    rows = list(load_conversations(data, Tally()))
    one, other = (
        load_prompts(HeldOutPrompts(data=data, part=part, num_prompts=None)) for part in (0, 1)
    )
    assert all(rows[int(prompt.prompt_id) - 1].is_held_out for prompt in (*one, *other))
    asked, apart = ({prompt.turns[0] for prompt in prompts} for prompts in (one, other))
    assert (
        asked | apart == {row.messages[0]["content"] for row in rows if row.is_held_out}
        and not asked & apart
    )
    assert load_prompts(HeldOutPrompts(data=data, part=1, num_prompts=3)) == other[:3]
    assert {len(p.turns) for p in load_prompts(HeldOutPrompts(data=data, part=0, turns=9))} == {
        1,
        2,
        3,
    }
    lengths = sorted(len(text) for text in asked | apart)
    middle = lengths[len(lengths) // 2] + len('""')  # beside the JSON text of no tools
    shorter = replace(data, max_length=middle)
    short = load_prompts(HeldOutPrompts(data=shorter, part=0, num_prompts=None))
    assert 0 < len(short) < len(one)
    assert "more characters than data.max_length" in capsys.readouterr().err
    tiny.refused(
        "too few held-out conversations to measure with; raise data",
        load_prompts,
        HeldOutPrompts(data=replace(data, held_out=0.0), part=0),
    )


def test_gpqa_order() -> None:
    """Its answers stand in an order of the question's own, whatever the order of the columns."""
    text = prompt_of("gpqa_diamond", GPQA, 1, "x", ANY).turns[0]
    assert sorted(re.findall(r"^[A-D]\) (\w)$", text, re.MULTILINE)) == ["a", "b", "c", "d"]
    assert text == prompt_of("gpqa_diamond", dict(reversed(GPQA.items())), 9, "y", ANY).turns[0]
    rows = [{**GPQA, "Question": f"{n}?"} for n in range(20)]
    texts = [prompt_of("gpqa_diamond", row, 1, "x", ANY).turns[0] for row in rows]
    assert {re.findall(r"^(\w)\) a$", text, re.MULTILINE)[0] for text in texts} == set("ABCD")


def test_categories(
    tmp_path: Path,
) -> None:
    """Spec-Bench's file lists its tasks one after another."""
    rows = [
        {"question_id": n, "category": name, "turns": ["a\u2028b", "c"]}
        for n, name in enumerate([*["qa"] * 5, *["rag"] * 5, "math"])
    ]
    path = str(tmp_path / "question.jsonl")
    Path(path).write_text(
        "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8"
    )
    chosen = load_prompts(PromptsConfig(path, num_prompts=5))
    wanted = [("0", "qa"), ("1", "qa"), ("5", "rag"), ("6", "rag"), ("10", "math")]
    assert [(prompt.prompt_id, prompt.task) for prompt in chosen] == wanted
    assert (
        chosen[0].turns == ("a\u2028b", "c")
        and len(load_prompts(PromptsConfig(path, num_prompts=99))) == 11
    )
    mine = loaded(TaskConfig("mine", path), turns=1, system_prompt="Be brief.")
    assert mine[4] == Prompt("4", "mine", ("a\u2028b",), (SYSTEM,)) and len(mine) == 11
    (tmp_path / "p.txt").write_text("one\n\ntwo \nthree\n")
    assert [
        (prompt.prompt_id, prompt.turns[0])
        for prompt in load_prompts(PromptsConfig(str(tmp_path / "p.txt"), num_prompts=2))
    ] == [
        ("1", "one"),
        ("3", "two "),
    ]


def test_chosen_rows(tmp_path: Path) -> None:
    """A task gives its first rows, or drawn ones, and as many of each level."""
    path = str(tiny.write_rows(tmp_path / "g.jsonl", [{"question": f"q{n}"} for n in range(90)]))
    assert [p.turns[0] for p in loaded(TaskConfig("gsm8k", path))] == [
        f"q{n}" for n in range(80)
    ]  # 80 by default
    drawn = loaded(TaskConfig("gsm8k", path, num_prompts=6, seed=1), num_prompts=5)
    assert len(drawn) == 6 and {p.turns[0] for p in drawn} - {f"q{n}" for n in range(6)}
    assert drawn == loaded(TaskConfig("gsm8k", path, num_prompts=6, seed=1))
    assert drawn != loaded(TaskConfig("gsm8k", path, num_prompts=6, seed=2))
    levels = [{"problem": f"p{n}", "level": 1 + (n > 5), "unique_id": str(n)} for n in range(9)]
    path = str(tiny.write_rows(tmp_path / "m.jsonl", levels))
    assert [
        (p.task[-1], p.prompt_id) for p in loaded(TaskConfig("math500", path), num_prompts=4)
    ] == [
        ("1", "0"),
        ("2", "6"),
        ("1", "1"),
        ("2", "7"),
    ]


def test_absent_texts(tmp_path: Path, capsys: Any) -> None:
    """SPEED-Bench's references are counted and not asked; its categories take turns."""
    named = ["coding", "coding", "math", "coding", "math"]
    rows = [SPEED | {"question_id": str(n), "category": name} for n, name in enumerate(named)]
    rows[0] |= {"turns": [f"{ABSENT} FROM THE SOURCE", ""]}
    path = str(tiny.write_rows(tmp_path / "s.jsonl", rows))
    for task, wanted in {"speed_bench": ["1", "2", "3"], "speed_bench_1k": ["1", "2"]}.items():
        warn_once.cache_clear()
        prompts = loaded(TaskConfig(task, path), num_prompts=len(wanted))
        assert [prompt.prompt_id for prompt in prompts] == wanted
        assert f"(1 of {task}-coding)" in capsys.readouterr().err
    assert {prompt.task for prompt in loaded(TaskConfig("speed_bench", path))} == {
        "speed_bench-coding",
        "speed_bench-math",
    }
    rows[0] |= {"turns": [ABSENT]}
    tiny.write_rows(tmp_path / "s.jsonl", rows)
    assert len(load_prompts(PromptsConfig(path))) == 4
    tiny.write_rows(tmp_path / "s.jsonl", rows[:1])
    tiny.refused("holds no prompts", loaded, TaskConfig("speed_bench", path))


def test_files_of_a_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a repository has a script, its Parquet files are read at the pinned commit."""
    rows = datasets.Dataset.from_list([{"question_content": "Sort.", "question_id": "a"}])
    asked = {}
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **named: asked.update(named) or rows)
    (prompt,) = loaded(TaskConfig("livecodebench"))
    assert prompt.prompt_id == "a"
    files = "hf://datasets/livecodebench/code_generation_lite@{revision}/v6/*.parquet"
    assert asked["data_files"] == files.format_map(TASKS["livecodebench"])


def test_broken(tmp_path: Path) -> None:
    """Broken questions are one sentence."""
    twice = '{"question_id": 1, "turns": ["a"]}\n'
    for text, message in {
        '{"answer": "a"}\n': "the question must be in turns or conversations or messages",
        '{"turns": []}\n': "a text or a list of texts",
        "": "holds no prompts",
        twice + twice: "2 questions of .* have question_id",
    }.items():
        (tmp_path / "q.jsonl").write_text(text)
        tiny.refused(message, load_prompts, PromptsConfig(str(tmp_path / "q.jsonl")))


def test_subset_and_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`datasets` reads a directory as it reads the Hub's repository of that name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    repository = tmp_path / "openai" / "gsm8k"
    for split in ("train", "test"):
        tiny.write_rows(
            repository / "main" / f"{split}.jsonl", [{"question": f"{split} {n}"} for n in range(3)]
        )
    files = [{"split": split, "path": f"main/{split}.jsonl"} for split in ("train", "test")]
    configs = json.dumps([{"config_name": "main", "data_files": files}])
    (repository / "README.md").write_text(f"---\nconfigs: {configs}\n---\n")
    assert [
        (prompt.prompt_id, prompt.turns[0]) for prompt in loaded(TaskConfig("gsm8k"), num_prompts=2)
    ] == [
        ("1", "test 0"),
        ("2", "test 1"),
    ]


def test_pinned_commits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Published sets are read at their commits, others at the Hub's if it answers."""
    assert all(re.fullmatch("[0-9a-f]{40}", task["revision"]) for task in TASKS.values())
    gsm8k = TASKS["gsm8k"]["source"]
    own = TaskConfig("mine", gsm8k)
    config = PromptsConfig(tasks=(TaskConfig("gsm8k"), own, TaskConfig("alpaca", revision="v1")))
    revisions = [facts["revision"] for facts in prompt_inputs(config)]  # type: ignore[index]
    assert revisions == [TASKS["gsm8k"]["revision"], None, "v1"]
    known = {gsm8k: "2" * 40}  # alpaca is not reachable: its commit stays
    monkeypatch.setattr(
        "aerie.infer.measure.tasks.hub_commit", lambda name, revision: known.get(name)
    )
    assert [task.revision for task in pinned(config).tasks] == ["2" * 40, "2" * 40, "v1"]
    tiny.refused("give the path", check_sources, PromptsConfig(tasks=(TaskConfig("mt-bench"),)))
