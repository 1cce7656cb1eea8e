"""Input rows: every row of a source is asked or skipped for a reason, and none is near an evaluation question."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from aerie.configs.errors import UserError
from aerie.configs.schema.data import DistillConfig, SamplingConfig, SourceConfig
from aerie.data.distill.prompts import (
    Prompt,
    make_prompts,
    plan_line,
    problem_in,
    read_prompts,
    sampling_of,
    words,
    write_prompts,
)
from tests.data.distill.answering import config, write_rows

LONG = "one two three four five six seven eight nine ten eleven twelve thirteen fourteen"


def made(path: Path, rows: list[Any], questions: tuple[str, ...] = (), **keys: Any) -> list[Prompt]:
    source = SourceConfig(str(write_rows(path / "rows.jsonl", rows)), **keys)
    return make_prompts(DistillConfig(sources=(source,), ngram=8), questions)


def test_human_turns_are_asked_in_their_order_and_answers_are_left_behind(tmp_path: Path) -> None:
    turns = [("system", "Be brief."), ("human", "First?"), ("gpt", "An old answer."), ("human", "Second?")]
    row = {"conversations": [{"from": role, "value": text} for role, text in turns]}
    assert made(tmp_path, [row]) == [
        Prompt("0:1", f"{tmp_path}/rows.jsonl: row 1", ("First?", "Second?"), system="Be brief.")
    ]
    joined = {"messages": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]}
    assert made(tmp_path, [joined])[0].turns == ("a\n\nb",)


def test_rows_that_cannot_be_asked_are_skipped_with_their_reason(tmp_path: Path) -> None:
    rows = [
        {"messages": [{"role": "user", "content": "Why?"}]},
        {"messages": [{"role": "assistant", "content": "Because."}]},
        {"messages": [{"role": "user", "content": " WHY? "}]},
        {"messages": [{"role": "user", "content": "x"}, {"role": "tool", "content": "3"}]},
        {"messages": [{"role": "narrator", "content": "x"}]},
        "text",
    ]
    found = made(tmp_path, rows)
    assert [prompt.skip for prompt in found] == [
        None,
        "no user turn",
        "the same prompt as an earlier row",
        "the conversation calls tools",
        "unknown role",
        "row is no object",
    ]
    assert plan_line(found).startswith("6 rows, 1 to ask with up to 1 requests; 1 skipped: ")


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({"prompt": None}, "an empty question"),
        ({"turns": []}, "an empty question"),
        ({"prompt": 5}, "turn is not text"),
        ({"turns": "Why?"}, None),
        ({"turns": ["Why?", None]}, "turn is not text"),
        ({"turns": [None, {"role": "user", "content": "Why?"}]}, "turn is not text"),
        ({"turns": None, "question": "Why?"}, None),
        ({"prompt": "Why?", "system": 5}, "system is not text"),
        ({"prompt": "Why?", "system": ["Be brief."]}, "system is not text"),
        ({"prompt": "Why?", "system": None}, None),
    ],
)
def test_a_row_of_a_prompt_file_that_holds_no_text_is_skipped_wherever_it_stands(
    tmp_path: Path, row: dict[str, Any], why: str | None
) -> None:
    for rows in ([row, {"prompt": "And then?"}], [{"prompt": "And then?"}, row]):
        found = {str(prompt.turns): prompt.skip for prompt in made(tmp_path, rows, kind="prompts")}
        assert found == {"('And then?',)": None, "()" if why else "('Why?',)": why}


def test_a_conversation_without_turns_is_skipped_wherever_it_stands(tmp_path: Path) -> None:
    found = made(tmp_path, [{"messages": None}, {"messages": [{"role": "user", "content": "Why?"}]}])
    assert [prompt.skip for prompt in found] == ["no user turn", None]


def test_no_prompt_shares_a_run_of_words_with_an_evaluation_question(tmp_path: Path) -> None:
    rows = [{"prompt": text} for text in (f"Well, {LONG.upper()}!", "one two three four five six seven, eh", "Why so?")]
    found = made(tmp_path, rows, (f"Say: {LONG}", "why so"), kind="prompts")
    near = "overlaps an evaluation question"
    assert [prompt.skip for prompt in found] == [near, None, near]
    later = {"messages": [{"role": "user", "content": "Hello"}, {"role": "user", "content": LONG}]}
    assert made(tmp_path, [later, {"messages": [{"role": "user", "content": "?!"}]}], (LONG,))[0].skip == near


def test_system_prompts_and_personas_are_looked_through_as_questions_are(tmp_path: Path) -> None:
    near = "overlaps an evaluation question"
    rows = [{"prompt": "Well?", "system": f"Know that {LONG}"}, {"prompt": "Well?", "system": "Know that."}]
    assert [prompt.skip for prompt in made(tmp_path, rows, (LONG,), kind="prompts")] == [near, None]
    personas = [{"persona": f"One who says {LONG}"}, {"persona": "A baker"}]
    found = made(tmp_path, personas, (LONG,), kind="personas", ask="problem")
    assert [prompt.skip for prompt in found] == [near, None]


def test_instructions_that_many_evaluation_questions_share_are_no_overlap(tmp_path: Path) -> None:
    rows = [{"prompt": f"Prove it. {LONG}"}]
    questions = tuple(f"{LONG} question {n} about {n * n}" for n in range(20))
    assert made(tmp_path, rows, questions, kind="prompts")[0].skip is None
    with pytest.raises(UserError, match="no row can be asked"):
        made(tmp_path, rows, questions[:1], kind="prompts")


def test_a_question_that_several_sections_name_is_found_all_the_same(tmp_path: Path) -> None:
    rows = [{"prompt": f"Prove it. {LONG[4:]}"}, {"prompt": "Why so?"}]
    found = made(tmp_path, rows, (f"Say: {LONG}",) * 6, kind="prompts")
    assert [prompt.skip for prompt in found] == ["overlaps an evaluation question", None]


def test_a_whole_question_is_found_though_many_share_all_of_its_words(tmp_path: Path) -> None:
    questions = (*(f"{LONG} question {n} about {n * n}" for n in range(20)), LONG)
    found = made(
        tmp_path, [{"prompt": LONG}, {"prompt": f"Prove it. {LONG}!"}, {"prompt": LONG[4:]}], questions, kind="prompts"
    )
    near = "overlaps an evaluation question"
    assert [prompt.skip for prompt in found] == [near, near, None]


def test_added_sentences_do_not_hide_a_short_evaluation_question(tmp_path: Path) -> None:
    near, questions = "overlaps an evaluation question", ("Simplify $\\sqrt{180}$.", "Go on.")
    row = {"input persona": "A tiler", "synthesized text": "Problem: Simplify $\\sqrt{180}$!"}
    other = {"input persona": "A tiler", "synthesized text": "Problem: Simplify $\\sqrt{181}$!"}
    assert [prompt.skip for prompt in made(tmp_path, [row, other], questions, kind="personas")] == [near, None]
    rows = [{"prompt": text} for text in ("Go on!", "Go on with it.", "Please simplify: sqrt 180?")]
    assert [prompt.skip for prompt in made(tmp_path, rows, questions, kind="prompts")] == [near, None, near]


def test_text_without_blanks_is_looked_through_by_its_characters(tmp_path: Path) -> None:
    near, questions = "overlaps an evaluation question", ("一列火车以每小时六十公里的速度行驶，多久到达？", "为什么？")
    texts = (
        "请仔细回答：一列火车以每小时六十公里的速度行驶，多久到达？谢谢",
        "一列火车每天行驶三十公里",
        "天空为什么是蓝色的？",
        "为什么",
    )
    found = made(tmp_path, [{"prompt": text} for text in texts], questions, kind="prompts")
    assert [prompt.skip for prompt in found] == [near, None, None, near]
    thai = made(
        tmp_path,
        [{"prompt": "ช่วยตอบ กรุงเทพมหานครเป็นเมืองหลวงของประเทศไทยใช่ไหม นะ"}, {"prompt": "ไทย"}],
        ("กรุงเทพมหานครเป็นเมืองหลวงของประเทศไทยใช่ไหม",),
        kind="prompts",
    )
    assert [prompt.skip for prompt in thai] == [near, None]
    assert words("GPT4在2024年 ok ひらがな") == [*"gpt4 在 2024 年 ok ひ ら が な".split()]


def test_signs_and_system_prompts_tell_prompts_apart(tmp_path: Path) -> None:
    asked = [("3 + 4", "a"), ("3 - 4", "a"), ("3  +\n4", "a"), ("3 + 4", "b"), ("3 + 4", None)]
    found = made(tmp_path, [{"prompt": text, "system": system} for text, system in asked], kind="prompts")
    assert [prompt.skip is None for prompt in found] == [True, True, False, True, True]


def test_halves_of_surrogate_pairs_are_replaced(tmp_path: Path) -> None:
    assert made(tmp_path, [{"prompt": "So \ud83d what?"}], kind="prompts")[0].turns == ("So \ufffd what?",)


def test_the_seed_draws_the_rows_and_samples_have_ids_of_their_own(tmp_path: Path) -> None:
    rows = [{"prompt": f"Question {n}?"} for n in range(50)]
    source = SourceConfig(str(write_rows(tmp_path / "rows.jsonl", rows)), "prompts", num_rows=10, samples=2)
    drawn = {seed: make_prompts(DistillConfig(sources=(source,), seed=seed), ()) for seed in (0, 1)}
    assert drawn[0] == make_prompts(DistillConfig(sources=(source,)), ())
    assert {p.turns for p in drawn[0]} != {p.turns for p in drawn[1]}
    assert len(drawn[0]) == len({prompt.id for prompt in drawn[0]}) == 20
    assert len({prompt.turns for prompt in drawn[0]}) == 10


def test_personas_are_asked_for_a_problem_or_for_the_solution_of_theirs(tmp_path: Path) -> None:
    row = {"input persona": "A beekeeper in Crete", "synthesized text": "**Math problem:** 3 hives hold 9 frames each."}
    solved, unsolved = made(tmp_path, [row, {"input persona": "A baker"}], kind="personas")
    assert solved.turns[0].startswith("3 hives hold 9 frames each.\n\n") and solved.invent is None
    assert unsolved.skip == "row has no problem"
    invented = made(tmp_path, [row, {"persona": "A baker"}, {"persona": "A baker"}], kind="personas", ask="problem")
    assert ["A beekeeper in Crete" in (p.invent or "") for p in invented] == [True, False, False]
    assert [p.skip for p in invented] == [None, None, "the same prompt as an earlier row"]


def test_the_problem_in_an_answer_is_what_follows_its_last_marker() -> None:
    assert problem_in("Sure!\n\n**Problem:** Two trains leave.\nWhen?") == "Two trains leave.\nWhen?"
    assert problem_in("Two trains leave.") == "Two trains leave."
    assert problem_in("My problem: no marker at a line's start") == "My problem: no marker at a line's start"


def test_a_row_of_a_prompt_file_may_change_the_sampling_and_no_more(tmp_path: Path) -> None:
    found = made(tmp_path, [{"prompt": "Why?", "sampling": {"temperature": 0.2}}], kind="prompts")
    assert sampling_of(found[0], SamplingConfig(max_tokens=9)) == SamplingConfig(temperature=0.2, max_tokens=9)
    with pytest.raises(UserError, match=r"rows\.jsonl: row 1: sampling: temprature: unknown key; did you mean"):
        made(tmp_path, [{"prompt": "Why?", "sampling": {"temprature": 0.2}}], kind="prompts")
    with pytest.raises(UserError, match="sampling is float; expected an object"):
        made(tmp_path, [{"prompt": "Why?", "sampling": 0.2}], kind="prompts")


def test_a_first_row_of_no_known_shape_is_refused_with_its_keys(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"row 1 has keys text2, turns; a prompt stands under question$"):
        made(tmp_path, [{"text2": "Why?", "turns": ["Why?"]}], kind="prompts", field="question")
    with pytest.raises(UserError, match=r"row 1 has keys text2; a prompt stands under prompt or .* text, or in turns$"):
        made(tmp_path, [{"text2": "Why?"}], kind="prompts")
    with pytest.raises(UserError, match=r"row 1 has keys body; expected conversations, messages"):
        made(tmp_path, [{"body": "Why?"}])


def test_prompts_come_back_from_their_file_as_they_were(tmp_path: Path) -> None:
    rows = [{"prompt": "Why?", "sampling": {"top_p": 0.5}}, {"prompt": ""}, {"turns": ["a", "b"], "system": "s"}]
    found = [*made(tmp_path, rows, kind="prompts"), replace(Prompt("9:9", "x"), invent="Invent ½ a problem.")]
    write_prompts(tmp_path / "prompts.jsonl", found)
    assert read_prompts(tmp_path / "prompts.jsonl") == found
    assert "invent" not in json.loads((tmp_path / "prompts.jsonl").read_text().splitlines()[0])


def test_contradictory_sources_are_refused() -> None:
    with pytest.raises(ValueError, match="field belongs to prompts, this source holds personas"):
        SourceConfig("x", "personas", field="question")
    with pytest.raises(ValueError, match="ask belongs to personas"):
        SourceConfig("x", ask="problem")
    with pytest.raises(ValueError, match="name at least one"):
        config(sources=())
