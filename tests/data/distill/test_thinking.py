"""Thinking goes where the template expects it; training rows hold what the target wrote."""

from dataclasses import replace
from itertools import compress
from pathlib import Path
from typing import Any

import pytest

from aerie.configs.schema.data import DataConfig
from aerie.data.conversations import Tally
from aerie.data.distill.answer import Answer, Outcome, Thinking
from aerie.data.tokens import tokenize
from tests.data.chat_targets import CHATML, THINK_DROPPING, THINK_OPENING, TRIMMING, build_tokenizer
from tests.data.distill.answering import thinking
from tests.tiny import write_rows

# As in QwQ's and DeepSeek's: the text before </think> is left out of every answer.
THINK_LESS = CHATML.replace("m['content']", "m['content'].split('</think>')[-1]")
THOUGHT_FOUR = "<think>\n2 + 2\n</think>\n\nfour"


def of(template: str) -> Thinking:
    tokenizer = build_tokenizer(template, "<|im_end|>")
    return Thinking(tokenizer, {tokenizer.eos_token_id})


def rows_of(reader: Thinking, *answers: Answer) -> list[dict[str, Any]]:
    questions = ("a?", "b?")[: len(answers)]
    return reader.training_rows(Outcome("0:1", "done", "x", None, None, questions, answers))


def learnt(rows: list[dict[str, Any]], reader: Thinking, path: Path) -> list[str]:
    """The text of each row that training supervises."""
    config = DataConfig((str(write_rows(path / "rows.jsonl", rows)),), held_out=0.0)
    read = tokenize(config, reader.tokenizer, reader.end_ids, Tally()).train
    return [reader.tokenizer.decode([*compress(row.input_ids, row.turn_ids)]) for row in read]


@pytest.mark.parametrize(
    ("template", "text", "is_rendered"),
    [
        (THINK_OPENING, "2 + 2\n</think>\n\nfour", True),
        (THINK_OPENING, "2 + 2</think>four", False),
        (THINK_DROPPING, THOUGHT_FOUR, True),
        (THINK_DROPPING, "<think>\n\n2 + 2\n</think>\nfour", False),
        (CHATML, "<think>2 + 2</think>four", True),
        (THINK_LESS, "<think>2 + 2</think>four", False),
    ],
)
def test_learnt_is_written(template: str, text: str, is_rendered: bool, tmp_path: Path) -> None:
    """What is learnt is what the target wrote: by its ids, or where the template writes it."""
    reader = of(template)
    read = reader.read(Answer(text, "stop"))
    parts = ((read.reasoning or "").strip(), read.content.strip(), read.exact_text)
    assert parts == ("2 + 2", "four", text)
    rows = rows_of(reader, read)
    assert ["messages" in row for row in rows] == [True] * is_rendered
    rows = rows or rows_of(reader, replace(read, token_ids=tuple(reader.ids(text))))
    assert learnt(rows, reader, tmp_path)[0].endswith(f"{text}<|im_end|>")
    # thinking that a server returns separately goes where the template looks for it
    told_apart = reader.message(reader.read(Answer("four", "stop", reasoning="2 + 2")))
    fields = (
        {"content": "four", "reasoning_content": "2 + 2"}
        if template in (THINK_OPENING, THINK_DROPPING)
        else {"content": THOUGHT_FOUR}
    )
    assert told_apart == {"role": "assistant", **fields}


def test_cut_and_blank_thinking() -> None:
    """Thinking may be cut or blank, and content may hold a closing tag."""
    opened, plain, blank = of(THINK_OPENING), of(CHATML), Answer("four", "stop", reasoning="\n")
    cut = opened.read(Answer("2 +", "length"))
    assert (cut.reasoning, cut.content, cut.exact_text) == ("2 +", "", "2 +")
    closing = Answer("DeepSeek ends its thoughts with </think>.", "stop")
    assert plain.read(closing) == closing and plain.read(blank) == Answer("four", "stop")
    assert rows_of(opened, opened.read(blank)) == []  # the prompt has opened the tag


def outcome_of(*answers: Answer, **keys: Any) -> Outcome:
    return Outcome("0:1", "done", "x", None, None, ("a?", "b?")[: len(answers)], answers, **keys)


def test_headers_are_the_templates() -> None:
    """What a template writes around an answer comes from the template, or nothing is learnt."""
    header = "<|im_start|>final<s>"
    reader = of(
        CHATML.replace(
            "m['content'] +",
            "(('<think>' + m['thought'] + '</think>' if m['thought'] else '') + '@@'"
            " if m['role'] == 'assistant' else '') + m['content'] +",
        ).replace("@@", header)
    )
    split = Answer("four", "stop", reasoning="2 + 2")
    parted = reader.learnt(outcome_of(split))
    written = reader.tokenizer.decode(parted.answers[0].answer_ids)
    assert written == f"<think>2 + 2</think>{header}four<|im_end|>"
    assert parted.rows[0]["messages"][-1]["thought"] == "2 + 2"
    for answer, reason in (
        (Answer("four", "stop"), "the template does not render an answer as the target wrote it"),
        (Answer("fo", "length"), "an answer is cut and came without token ids"),
    ):
        assert reader.learnt(outcome_of(answer)) == ([], [], reason)
    unknown = of(CHATML).learnt(outcome_of(split))  # no tags of ours
    assert unknown.why == "the template does not say how the target writes a thought"
    lossy = of(CHATML).learnt(outcome_of(Answer("", "stop", tool_calls=(CALL,))))
    assert lossy.why == "the template leaves out the call of a tool"


CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}
# As in GLM's: a turn ends with the header of the next one.
NEXT_HEADER = (
    "{% set headers = {'user': '<|im_start|>', 'tool': '<s>', 'assistant': '<|im_end|>'} %}"
    "{% for m in messages %}{{ headers[m['role']] }}"
    "{{ m['content'] }}{% for c in m['tool_calls'] or [] %}{{ c['function'] | tojson }}{% endfor %}"
    "{% endfor %}{% if add_generation_prompt %}<|im_end|>{% endif %}"
)


def test_an_answer_ends_as_the_template_ends_it() -> None:
    """The end-of-turn token is the template's, also where it is the next message's header."""
    tokenizer = build_tokenizer(NEXT_HEADER, "<|end|>")
    ends = {tokenizer.convert_tokens_to_ids(text) for text in ("<|end|>", "<|im_start|>", "<s>")}
    reader = Thinking(tokenizer, ends)
    said = Answer("four", "stop")
    called = Answer("", "stop", tool_calls=(CALL,))
    by_ids = replace(called, token_ids=tuple(reader.ids("call")))
    for answer, end in (
        (said, "<|im_start|>"),
        (replace(said, token_ids=tuple(reader.ids("four"))), "<|im_start|>"),
        (called, "<s>"),
        (by_ids, "<s>"),
    ):
        [written] = reader.learnt(outcome_of(answer)).answers
        assert tokenizer.decode(written.answer_ids[-1]) == end


def test_arguments_of_the_template() -> None:
    """What a server renders with other arguments than training is kept as tokens."""
    tokenizer = build_tokenizer("{{ mode or '' }}" + CHATML, "<|im_end|>")
    for mode, is_text in (("quick", False), ("", True)):
        reader = Thinking(tokenizer, {tokenizer.eos_token_id}, {"mode": mode})
        [row] = reader.learnt(outcome_of(Answer("four", "stop"))).rows
        assert ("messages" in row) == is_text
        if not is_text:
            assert tokenizer.decode(row["input_ids"]).startswith("quick<|im_start|>user")


def test_ids_are_trained_on() -> None:
    """Ids that came with the answers are what is trained on."""
    reader = thinking()
    first, end = reader.ids(reader.prompt([{"role": "user", "content": "a?"}])), min(reader.end_ids)
    odd = [*reader.ids("o"), *reader.ids("ne")]  # the tokenizer itself would split it otherwise
    second = [*first, *odd, end, *reader.ids("<|user|>b?<|end|><|assistant|>")]
    follow_up = Answer("two", "stop", token_ids=(9, end), prompt_token_ids=tuple(second))
    for ids in ([*odd, end], odd):  # some servers leave out the end; it is learnt too
        given = Answer("one", "stop", token_ids=tuple(ids), prompt_token_ids=tuple(first))
        [row] = rows_of(reader, given, follow_up)
        assert row["input_ids"] == [*second, 9, end]
        assert [*compress(row["input_ids"], row["loss_mask"])] == [*odd, end, 9, end]
    moved = Answer("two", "stop", token_ids=(9, end), prompt_token_ids=(1, 2, 3))
    assert [row["input_ids"] for row in rows_of(reader, given, moved)] == [
        [*first, *odd, end],
        [1, 2, 3, 9, end],
    ]


def test_text_or_tokens(
    tmp_path: Path,
) -> None:
    """Rows are text where the template gives the answers back; others need ids."""
    reader, trimming = thinking(), of(TRIMMING)
    rows = rows_of(reader, Answer("one.", "stop"), Answer("½ “two”", "stop"))
    assert [message["role"] for message in rows[0]["messages"]] == ["user", "assistant"] * 2
    assert learnt(rows, reader, tmp_path) == ["one.<|end|>½ “two”<|end|>"]
    cut = rows_of(reader, Answer("one.", "stop"), Answer("and tw", "length"))
    assert learnt(cut, reader, tmp_path) == ["one.<|end|>"]
    blanks = Answer(" four\n", "stop")
    assert rows_of(trimming, blanks) == []
    blanks = replace(blanks, token_ids=tuple(trimming.ids(" four\n")))
    assert learnt(rows_of(trimming, blanks), trimming, tmp_path) == [" four\n<|im_end|>"]


def test_wrong_ids_are_named() -> None:
    """Ids and special tokens that are not what the target wrote are named."""
    reader, thoughts = thinking(), of(THINK_OPENING)
    end, said = min(reader.end_ids), reader.ids("four boats")
    asked = [{"role": "user", "content": "How many boats?"}]
    read = (1, *reader.ids("How many boats?"), 2)
    right = Answer("four boats", "stop", None, (*said, end), read)
    cut = replace(
        right, content="four  boats\ufffd", finish="length", token_ids=tuple(said)
    )  # servers change blanks
    thought = thoughts.read(
        Answer("four", "stop", "2 + 2", tuple(thoughts.ids("2 + 2\n</think>\n\nfour")), read)
    )
    assert [reader.problem(answer, asked) for answer in (right, cut)] == [
        thoughts.problem(thought, asked),
        None,
    ]
    assert reader.problem(right, asked) is None
    for changes, problem in (
        ({"content": "five boats"}, "its token ids do not spell its text"),
        (
            {"token_ids": (*said, 320)},
            "its token ids are outside the 320 of the target's tokenizer",
        ),
        ({"prompt_token_ids": (1, -1)}, "its token ids are outside"),
        (
            {"prompt_token_ids": (1, *reader.ids("How many owls?"))},
            "its prompt token ids do not spell the prompt",
        ),
        (
            {"token_ids": None, "content": "I write <|user|> now"},
            "the answer spells a special token",
        ),
    ):
        assert str(reader.problem(replace(right, **changes), asked)).startswith(problem), changes


def test_training_that_ends_earlier() -> None:
    """Rows are tokens where training, which lacks a server's argument, would lose a later turn."""
    kept = "(m['content'] if keep is defined or loop.index0 != 4 else '')"
    template = "{{ messages | length }}" + CHATML.replace("m['content']", kept)
    tokenizer = build_tokenizer(template, "<|im_end|>")
    reader = Thinking(tokenizer, {tokenizer.eos_token_id}, {"keep": True})
    answers = (Answer("one", "stop"), Answer("two", "stop"), Answer("three", "stop"))
    ended = Outcome("0:1", "done", "x", None, None, ("a?", "b?", "c?"), answers)
    texts = [tokenizer.decode(row["input_ids"]) for row in reader.training_rows(ended)]
    assert ["three" in text for text in texts] == [False, False, True]
