"""Input rows: each is asked or skipped with a reason; none is close to an evaluation question."""

from pathlib import Path
from typing import Any

import pytest

from aerie.configs.errors import UserError
from aerie.configs.schema.data import DistillConfig, SourceConfig
from aerie.data.distill.prompts import InputRow, make_prompts, plan_line
from tests.tiny import write_rows

LONG = "one two three four five six seven eight nine ten eleven twelve thirteen fourteen"
SHARED = tuple(f"{LONG} question {n} about {n * n}" for n in range(20))
NEAR = "overlaps an evaluation question"


def made(
    path: Path, rows: list[Any], questions: tuple[str, ...] = (), seed: int = 0, **keys: Any
) -> list[InputRow]:
    source = SourceConfig(str(write_rows(path / "rows.jsonl", rows)), **keys)
    return make_prompts(DistillConfig(sources=(source,), ngram=8, seed=seed), questions)


def skips(path: Path, texts: list[Any], questions: tuple[str, ...] = ()) -> list[str | None]:
    rows = [{"prompt": text} if isinstance(text, str) else text for text in texts]
    return [prompt.skip for prompt in made(path, rows, questions, kind="prompts")]


def said(*turns: tuple[str, str | None]) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


def test_human_turns_are_asked(
    tmp_path: Path,
) -> None:
    """Human turns are asked; rows that cannot be are skipped with their reason."""
    row = said(
        ("system", "Be brief."),
        ("human", "First?"),
        ("gpt", "An old answer."),
        ("human", "Second?"),
    )
    joined, place = said(("user", "a"), ("user", "b")), f"{tmp_path}/rows.jsonl: row"
    assert made(tmp_path, [row, joined]) == [
        InputRow("0:1", f"{place} 1", ("First?", "Second?"), system="Be brief."),
        InputRow("0:2", f"{place} 2", ("a\n\nb",)),
    ]
    rows = {
        None: said(("user", "Why?")),
        "no user turn": said(("assistant", "Because.")),
        "the same prompt as an earlier row": said(("user", " WHY? ")),
        "the conversation calls tools": said(("user", "x"), ("tool", None)),
        "row is no object": "text",
    }
    prompts = made(tmp_path, list(rows.values()))
    assert [prompt.skip for prompt in prompts] == list(rows)
    assert plan_line(prompts).startswith("5 rows, 1 to ask; 1 skipped: ")
    empty = [
        {"prompt": None},
        {"turns": []},
        {"prompt": 5},
        {"turns": ["a", None]},
        {"prompt": "Why?", "system": 5},
    ]
    usable = ["Why?", {"turns": None, "question": "a?"}]
    assert skips(tmp_path, usable + empty) == [None] * 2 + ["an empty question, or no text"] * 5


@pytest.mark.parametrize(
    ("questions", "texts", "expected"),
    [
        (
            (f"Say: {LONG}", "why so"),
            [f"Well, {LONG.upper()}!", LONG[:30], "Why so?"],
            [NEAR, None, NEAR],
        ),
        ((LONG,), [{"prompt": "a", "system": LONG}, "b"], [NEAR, None]),
        # instructions that many questions share do not count
        (SHARED, [f"Prove it. {LONG}"], [None]),
        # a short question must match whole
        ((*SHARED, LONG), [f"Prove it. {LONG}!", LONG[4:]], [NEAR, None]),
        (
            # each character is a word
            ("一列火车以每小时六十公里的速度行驶，多久到达？", "为什么？"),
            ["请回答：一列火车以每小时六十公里的速度行驶，", "一列火车每天行驶", "为什么"],
            [NEAR, None, NEAR],
        ),
    ],
)  # fmt: skip
def test_overlap(
    tmp_path: Path, questions: tuple[str, ...], texts: list[Any], expected: list[str | None]
) -> None:
    """No prompt shares a run of words with an evaluation question."""
    assert skips(tmp_path, texts, questions) == expected
    with pytest.raises(UserError, match="no row can be asked"):
        skips(tmp_path, [questions[-1]], (questions[-1],))


def test_seed_draws_rows(tmp_path: Path) -> None:
    """The seed draws the rows and samples have ids of their own."""
    rows = [{"prompt": f"Question {n}?"} for n in range(50)]
    keys: dict[str, Any] = {"kind": "prompts", "num_rows": 10, "samples": 2}
    first, again, other = (made(tmp_path, rows, seed=seed, **keys) for seed in (0, 0, 1))
    questions = {prompt.turns for prompt in first}
    assert first == again and questions != {prompt.turns for prompt in other}
    assert len(first) == len({prompt.id for prompt in first}) == 20 == 2 * len(questions)


def test_personas(tmp_path: Path) -> None:
    """Personas are asked for a problem or for the solution of theirs."""
    row = {
        "input persona": f"One who says {LONG}",
        "synthesized text": "**Math problem:** 3 hives hold 9 frames each.",
    }
    solved, unsolved = made(tmp_path, [row, {"input persona": "A baker"}], kind="personas")
    assert (
        solved.turns[0].startswith("3 hives hold 9 frames each.\n\n")
        and unsolved.skip == "row has no problem"
    )
    near, invented = made(
        tmp_path, [row, {"persona": "A baker"}], (LONG,), kind="personas", ask="problem"
    )
    assert "A baker" in (invented.invent or "") and invented.turns == () and near.skip == NEAR
