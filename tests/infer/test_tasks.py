"""Measuring prompts: from question files, plain lines, and published sets at pinned commits."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from aerie.configs.errors import UserError
from aerie.configs.schema.data import DataConfig
from aerie.configs.schema.measure import HeldOutPrompts, PromptsConfig, TaskConfig
from aerie.data.conversations import Tally, load_conversations
from aerie.infer.measure import tasks
from aerie.infer.measure.tasks import TASKS, Prompt, load_prompts, pinned, prompt_inputs, prompt_of
from tests import tiny

BOXED = "\nPlease reason step by step, and put your final answer within \\boxed{}."
GPQA = {"Question": "Which?", "Correct Answer": "a"} | {
    f"Incorrect Answer {n}": "abcd"[n] for n in (1, 2, 3)
}
ANY = PromptsConfig("q.jsonl")


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
    ],
)
def test_a_row_of_each_task_becomes_its_prompt(
    name: str, row: dict[str, Any], identity: str, turns: object
) -> None:
    prompt = prompt_of(name, row, 5, "file: row 5", ANY)
    assert (prompt.prompt_id, prompt.turns) == (identity, turns)
    assert prompt.task == ("math500-level3" if name == "math500" else name)
    with pytest.raises(UserError, match=rf"file: row 5: a question of {name} needs '\w+'"):
        prompt_of(name, {"foreign": 1}, 5, "file: row 5", ANY)


def test_a_recipe_without_prompts_asks_what_training_never_sees_and_no_two_stages_ask_the_same(
    tmp_path: Path,
) -> None:
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
    with pytest.raises(
        UserError, match="too few held-out conversations to measure with; raise data"
    ):
        load_prompts(HeldOutPrompts(data=replace(data, held_out=0.0), part=0))


def test_gpqa_lists_all_answers_in_an_order_of_its_own_that_never_changes() -> None:
    text = prompt_of("gpqa_diamond", GPQA, 1, "x", ANY).turns[0]
    assert sorted(line[3:] for line in text.splitlines() if line[1:3] == ") ") == [
        "a",
        "b",
        "c",
        "d",
    ]
    assert text == prompt_of("gpqa_diamond", dict(reversed(GPQA.items())), 9, "y", ANY).turns[0]
    others = [
        prompt_of("gpqa_diamond", {**GPQA, "Question": f"{n}?"}, 1, "x", ANY).turns[0]
        for n in range(20)
    ]
    assert {
        line[0] for text in others for line in text.splitlines() if line.endswith(") a")
    } == set("ABCD")


def test_a_file_of_questions_gives_as_many_of_each_category_whatever_the_task(
    tmp_path: Path,
) -> None:
    """Spec-Bench's file lists its tasks one after another."""
    names = [*["qa"] * 5, *["rag"] * 5, "math"]
    rows = [
        {"question_id": n, "category": name, "turns": ["a\u2028b", "c"]}
        for n, name in enumerate(names)
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
    assert mine[4] == Prompt("4", "mine", ("a\u2028b",), "Be brief.") and len(mine) == 11
    (tmp_path / "p.txt").write_text("one\n\ntwo \nthree\n")
    prompts = load_prompts(PromptsConfig(str(tmp_path / "p.txt"), num_prompts=2))
    assert [(prompt.prompt_id, prompt.turns[0]) for prompt in prompts] == [
        ("1", "one"),
        ("3", "two "),
    ]


def test_a_task_gives_its_first_rows_or_drawn_ones_and_levels_alike(tmp_path: Path) -> None:
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
    chosen = loaded(TaskConfig("math500", path), num_prompts=4)
    assert [(p.task[-1], p.prompt_id) for p in chosen] == [
        ("1", "0"),
        ("2", "6"),
        ("1", "1"),
        ("2", "7"),
    ]


def test_broken_questions_are_one_sentence(tmp_path: Path) -> None:
    twice = '{"question_id": 1, "turns": ["a"]}\n'
    for text, message in {
        '{"answer": "a"}\n': "a question needs 'turns or prompt or question",
        '{"turns": []}\n': "a text or a list of texts",
        "": "holds no prompts",
        twice + twice: "stands there 2 times",
    }.items():
        (tmp_path / "q.jsonl").write_text(text)
        with pytest.raises(UserError, match=message):
            load_prompts(PromptsConfig(str(tmp_path / "q.jsonl")))


def test_a_data_set_is_read_by_its_subset_and_split(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    prompts = loaded(TaskConfig("gsm8k"), num_prompts=2)
    assert [(prompt.prompt_id, prompt.turns[0]) for prompt in prompts] == [
        ("1", "test 0"),
        ("2", "test 1"),
    ]


def test_published_sets_are_read_at_pinned_commits_others_at_the_hubs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert all(re.fullmatch("[0-9a-f]{40}", task["revision"]) for task in TASKS.values())
    gsm8k = TASKS["gsm8k"]["source"]
    named = (TaskConfig("gsm8k"), TaskConfig("mine", gsm8k), TaskConfig("alpaca", revision="v1"))
    asked = PromptsConfig(tasks=named)
    sources = [(each["source"], each["revision"]) for each in prompt_inputs(asked)]  # type: ignore[index]
    assert sources == [
        (gsm8k, TASKS["gsm8k"]["revision"]),
        (gsm8k, None),
        (TASKS["alpaca"]["source"], "v1"),
    ]
    known = {gsm8k: "2" * 40}  # alpaca is not reachable: its commit stays
    monkeypatch.setattr(tasks, "hub_commit", lambda name, revision: known.get(name))
    assert [task.revision for task in pinned(asked).tasks] == ["2" * 40, "2" * 40, "v1"]
    with pytest.raises(UserError, match="give the path"):
        tasks.check_sources(PromptsConfig(tasks=(TaskConfig("mt-bench"),)))
