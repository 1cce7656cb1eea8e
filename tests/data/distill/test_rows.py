"""Thinking is put where the template has it, and rows to train on hold what the target wrote, token for token."""

import json
from pathlib import Path
from typing import Any

import pytest

from aerie.configs.errors import UserError
from aerie.configs.schema.data import DataConfig, ServerConfig
from aerie.data.chat import end_of_turn_ids
from aerie.data.conversations import Message, Tally
from aerie.data.distill.answer import Answer
from aerie.data.distill.gate import Thinking
from aerie.data.distill.journal import Outcome
from aerie.data.distill.run import training_rows
from aerie.data.tokens import TokenisedData, tokenize
from tests.data import chat_targets
from tests.data.distill.answering import thinking, write_rows

# As QwQ's and DeepSeek's: what stands before </think> is left out of every answer.
THINK_LESS = chat_targets.CHATML.replace("m['content']", "m['content'].split('</think>')[-1]")
IN_TAGS = chat_targets.CHATML


def of(template: str) -> Thinking:
    tokenizer = chat_targets.build_tokenizer(
        template, "<|eot_id|>" if template is chat_targets.TRIMMING else "<|im_end|>"
    )
    return Thinking(tokenizer, end_of_turn_ids(tokenizer, None))


def done(*answers: Answer, questions: tuple[str, ...] = ("a?", "b?", "c?")) -> Outcome:
    return Outcome("0:1", "done", "x", None, None, questions[: len(answers)], answers)


def tokens(rows: list[dict[str, Any]], reader: Thinking, path: Path) -> TokenisedData:
    """What the training reads of the rows."""
    config = DataConfig((str(write_rows(path / "rows.jsonl", rows)),), held_out=0.0)
    return tokenize(config, reader.tokenizer, reader.end_ids, Tally(), speaks=False)


def supervised(rows: list[dict[str, Any]], reader: Thinking, path: Path) -> list[str]:
    """The learnt text of each row."""
    return [
        reader.tokenizer.decode([t for t, turn in zip(row.input_ids, row.turns, strict=True) if turn])
        for row in tokens(rows, reader, path).train
    ]


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (chat_targets.THINK_DROPPING, {"role": "assistant", "content": "four", "reasoning_content": "2 + 2"}),
        (chat_targets.THINK_OPENING, {"role": "assistant", "content": "four", "reasoning_content": "2 + 2"}),
        (IN_TAGS, {"role": "assistant", "content": "<think>\n2 + 2\n</think>\n\nfour"}),
        (THINK_LESS, {"role": "assistant", "content": "four"}),
    ],
)
def test_thinking_stands_where_the_template_looks_for_it(template: str, message: dict[str, str]) -> None:
    reader = of(template)
    assert reader.message(Answer("four", "stop", 3, reasoning="2 + 2")) == message
    assert reader.message(Answer("four", "stop", 1)) == {"role": "assistant", "content": "four"}


def test_thinking_in_tags_is_told_apart_and_spelt_again_as_it_was() -> None:
    for template, text in (
        (IN_TAGS, "<think>\n2 + 2\n</think>\n\nfour"),
        (chat_targets.THINK_OPENING, "2 + 2\n</think>\n\nfour"),
    ):
        reader = of(template)
        read = reader.read(Answer(text, "stop", 9))
        assert (read.reasoning or "").strip() == "2 + 2" and read.content.strip() == "four"
        assert reader.spelt(read) == text
    cut = of(chat_targets.THINK_OPENING).read(Answer("2 +", "length", 3))
    assert (cut.reasoning, cut.content) == ("2 +", "")
    assert of(IN_TAGS).read(Answer("<think>\n2 +", "length", 3)).content == ""
    plain = Answer("2 + 2", "length", 3)
    assert of(IN_TAGS).read(plain) == plain
    served = Answer("four </think>", "stop", 3, reasoning="r")
    assert of(IN_TAGS).read(served) == served


@pytest.mark.parametrize(
    ("template", "text", "is_text"),
    [
        (chat_targets.THINK_OPENING, "2 + 2\n</think>\n\nfour", True),
        (chat_targets.THINK_OPENING, "2 + 2</think>four", False),
        (chat_targets.THINK_DROPPING, "<think>\n2 + 2\n</think>\n\nfour", True),
        (chat_targets.THINK_DROPPING, "<think>\n\n2 + 2\n</think>\nfour", False),
        (IN_TAGS, "<think>2 + 2</think>four", True),
        (THINK_LESS, "<think>2 + 2</think>four", False),
    ],
)
def test_what_is_learnt_is_what_the_target_wrote_and_not_how_thinking_is_usually_spelt(
    template: str, text: str, is_text: bool, tmp_path: Path
) -> None:
    reader = of(template)
    read = Answer.of(json.loads(json.dumps(reader.read(Answer(text, "stop", 9)).as_dict())))
    assert (read.reasoning or "").strip() == "2 + 2" and read.content.strip() == "four"
    rows = training_rows(done(read), reader)
    assert ("messages" in rows[0]) == is_text
    [learnt] = supervised(rows, reader, tmp_path)
    assert learnt.endswith(f"{text}<|im_end|>")


@pytest.mark.parametrize("blank", ["", "\n"])
@pytest.mark.parametrize("template", [IN_TAGS, THINK_LESS, chat_targets.THINK_DROPPING])
def test_blank_thinking_of_a_server_is_none_and_no_tag_is_learnt(blank: str, template: str, tmp_path: Path) -> None:
    reader, sent = of(template), Answer("four", "stop", 2, reasoning=blank)
    assert reader.read(sent) == Answer("four", "stop", 2)
    assert reader.message(sent) == {"role": "assistant", "content": "four"} and reader.spelt(sent) == "four"
    [learnt] = supervised(training_rows(done(reader.read(sent)), reader), reader, tmp_path)
    assert learnt.endswith("four<|im_end|>") and "think" not in learnt
    tagged = reader.read(Answer("<think>2 + 2</think>four", "stop", 9, reasoning=blank))
    assert (tagged.reasoning, tagged.content) == ("2 + 2", "four")


def test_blank_thinking_that_the_prompt_has_opened_was_closed_by_the_target() -> None:
    reader, sent = of(chat_targets.THINK_OPENING), Answer("four", "stop", 2, reasoning="")
    assert reader.spelt(reader.read(sent)) == "\n</think>\n\nfour"
    untold = reader.read(Answer("2 + 2\n</think>\n\nfour", "stop", 9, reasoning=""))
    assert (untold.reasoning, reader.spelt(untold)) == ("2 + 2\n", "2 + 2\n</think>\n\nfour")


def test_a_closing_tag_in_an_answer_without_thinking_is_content(tmp_path: Path) -> None:
    reader, text = of(IN_TAGS), "DeepSeek ends its thoughts with </think>, Llama has none."
    assert reader.read(Answer(text, "stop", 9)) == Answer(text, "stop", 9)
    assert supervised(training_rows(done(reader.read(Answer(text, "stop", 9))), reader), reader, tmp_path) == [
        f"{text}<|im_end|>"
    ]


def test_rows_that_the_template_gives_back_stay_text(tmp_path: Path) -> None:
    reader = thinking()
    rows = training_rows(done(Answer("one.", "stop", 2), Answer("two.", "stop", 2)), reader)
    roles = [message["role"] for message in rows[0]["messages"]]
    assert len(rows) == 1 and roles == ["user", "assistant"] * 2
    assert supervised(rows, reader, tmp_path) == ["one.<|end|>two.<|end|>"]


def test_ids_that_came_with_the_answers_are_what_is_trained_on(tmp_path: Path) -> None:
    reader = thinking()
    first, end = reader.prompt_ids([{"role": "user", "content": "a?"}]), min(reader.end_ids)
    odd = [*reader.ids("o"), *reader.ids("ne"), end]  # not how the tokenizer would cut it
    second = [*first, *odd, *reader.ids("<|user|>b?<|end|><|assistant|>")]
    answers = [
        Answer("one", "stop", 3, token_ids=tuple(odd), prompt_token_ids=tuple(first)),
        Answer("two", "stop", 2, token_ids=(9, end), prompt_token_ids=tuple(second)),
    ]
    [row] = training_rows(done(*answers), reader)
    assert row["input_ids"] == [*second, 9, end]
    [read] = tokens([row], reader, tmp_path).train
    assert list(read.input_ids) == row["input_ids"]
    learnt = [token for token, turn in zip(read.input_ids, read.turns, strict=True) if turn]
    assert learnt == [*odd, 9, end] and len(set(read.turns)) == 3
    moved = Answer("two", "stop", 2, token_ids=(9, end), prompt_token_ids=(1, 2, 3))
    assert [row["input_ids"] for row in training_rows(done(answers[0], moved), reader)] == [
        [*first, *odd],
        [1, 2, 3, 9, end],
    ]


def test_the_end_is_learnt_where_a_server_leaves_it_out_of_the_ids(tmp_path: Path) -> None:
    reader = thinking()
    first, ids, end = reader.prompt_ids([{"role": "user", "content": "a?"}]), reader.ids("one"), min(reader.end_ids)
    second = [*first, *ids, end, *reader.ids("<|user|>b?<|end|><|assistant|>")]
    answers = [
        Answer("one", "stop", 3, token_ids=tuple(ids), prompt_token_ids=tuple(first)),
        Answer("and tw", "length", 3, token_ids=tuple(reader.ids("and tw")), prompt_token_ids=tuple(second)),
    ]
    rows = training_rows(done(*answers), reader)
    assert supervised(rows, reader, tmp_path) == ["one<|end|>and tw"]
    assert rows[0]["input_ids"] == [*second, *reader.ids("and tw")]


def test_ids_that_came_with_some_answers_are_trained_on_beside_the_others_text(tmp_path: Path) -> None:
    reader = thinking()
    first, end = reader.prompt_ids([{"role": "user", "content": "a?"}]), min(reader.end_ids)
    odd = [*reader.ids("the "), *reader.ids("boats"), end]
    assert odd != [*reader.ids("the boats"), end]
    given = Answer("the boats", "stop", 3, token_ids=tuple(odd), prompt_token_ids=tuple(first))
    rows = training_rows(done(given, Answer("two", "stop", 2)), reader)
    assert rows[0]["input_ids"][: len(first) + len(odd)] == [*first, *odd]
    assert "".join(supervised(rows, reader, tmp_path)) == "the boats<|end|>two<|end|>"


def test_a_cut_answer_has_no_end_of_turn_token(tmp_path: Path) -> None:
    reader = thinking()
    rows = training_rows(done(Answer("one.", "stop", 2), Answer("and tw", "length", 2)), reader)
    assert supervised(rows, reader, tmp_path) == ["one.<|end|>and tw"]


def test_thinking_that_the_template_leaves_out_is_learnt_all_the_same(tmp_path: Path) -> None:
    reader = of(THINK_LESS)
    answers = [Answer("four", "stop", 3, reasoning="2 + 2"), Answer("six", "stop", 3, reasoning="3 + 3")]
    rows = training_rows(done(*answers), reader)
    assert [set(row) for row in rows] == [{"id", "input_ids", "loss_mask"}] * 2  # the history has no thinking
    assert supervised(rows, reader, tmp_path) == [
        "<think>\n2 + 2\n</think>\n\nfour<|im_end|>",
        "<think>\n3 + 3\n</think>\n\nsix<|im_end|>",
    ]
    history = reader.tokenizer.decode(rows[1]["input_ids"])
    assert "four<|im_end|>" in history and "2 + 2" not in history


def test_answers_that_the_template_would_trim_are_kept_as_tokens(tmp_path: Path) -> None:
    reader = of(chat_targets.TRIMMING)
    rows = training_rows(done(Answer(" four\n", "stop", 3)), reader)
    assert supervised(rows, reader, tmp_path) == [" four\n<|eot_id|>"]
    assert "messages" in training_rows(done(Answer("four", "stop", 3)), reader)[0]


def test_prompts_are_rendered_with_the_servers_arguments_and_rows_of_text_are_not(tmp_path: Path) -> None:
    switched = IN_TAGS.replace("assistant\\n'", "assistant\\n' + ('' if thinks | default(true) else '<think></think>')")
    plain = of(switched)
    reader = Thinking(plain.tokenizer, plain.end_ids, {"thinks": False, "add_generation_prompt": False})
    question: list[Message] = [{"role": "user", "content": "a?"}]
    assert reader.prompt(question) == f"{plain.prompt(question)}<think></think>"
    answer = Answer("four", "stop", 2)
    assert "messages" in training_rows(done(answer), plain)[0]
    rows = training_rows(done(answer), reader)
    assert supervised(rows, reader, tmp_path) == ["four<|im_end|>"]
    assert "<think></think>" in reader.tokenizer.decode(rows[0]["input_ids"])


def test_the_servers_template_arguments_are_an_object() -> None:
    server = ServerConfig(("http://host/v1",), extra_body={"chat_template_kwargs": {"enable_thinking": False}})
    assert server.template_arguments == {"enable_thinking": False}
    with pytest.raises(ValueError, match="chat_template_kwargs is an object"):
        ServerConfig(("http://host/v1",), extra_body={"chat_template_kwargs": "off"})


def test_a_tokenizer_without_a_template_is_refused() -> None:
    with pytest.raises(UserError, match=r"no chat template; name one with target\.chat_template"):
        thinking(None)


def test_rows_are_plain_json() -> None:
    rows = training_rows(done(Answer("½ “four”", "stop", 3)), thinking())
    assert json.loads(json.dumps(rows)) == rows
