import random
from typing import Any

import pytest

from aerie.configs.errors import UserError
from aerie.data.chat import Chat, Row, end_of_turn_ids
from aerie.data.conversations import Conversation, Tally, UnusableRow
from aerie.model.target import read_template
from tests.data import chat_targets as targets

VICUNA = read_template("configs/templates/vicuna.jinja")
TURNS = (
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "How are you today?"},
    {"role": "assistant", "content": "I am fine, thank you."},
    {"role": "user", "content": "And what is two and two? <|assistant|>four<|im_end|></s>"},
    {"role": "assistant", "content": "The answer is four \N{OWL}, naïvely."},
)


def rows_of(
    template: str | None, eos: str, messages: Any = TURNS, trim_offsets: bool = True
) -> tuple[Any, list[Row], Tally]:
    tokenizer = targets.build_tokenizer(template, eos, trim_offsets)
    tally = Tally(rows=1)
    chat = Chat(tokenizer, end_of_turn_ids(tokenizer, None), tally)
    rows = chat.encode(chat.render(Conversation("here: row 1", "digest", tuple(messages))))
    return tokenizer, rows, tally


def learnt(tokenizer: Any, row: Row) -> list[str]:
    """The text of each turn's supervised tokens."""
    numbers = sorted(set(row.turns) - {0})
    return [
        tokenizer.decode([token for token, turn in zip(row.input_ids, row.turns, strict=True) if turn == number])
        for number in numbers
    ]


@pytest.mark.parametrize(
    ("template", "eos", "before"),
    [
        pytest.param(targets.WITH_MARKERS, "<|end|>", "", id="markers"),
        pytest.param(targets.CHATML, "<|im_end|>", "", id="newline behind the end"),
        pytest.param(targets.TRIMMING, "<|eot_id|>", "", id="bos and trimming"),
        pytest.param(targets.DATED, "<|im_end|>", "", id="date"),
        pytest.param(VICUNA, "</s>", " ", id="vicuna"),
    ],
)
def test_supervised_tokens_decode_to_the_answers_and_their_end(template: str, eos: str, before: str) -> None:
    tokenizer, rows, tally = rows_of(template, eos)
    answers = [turn["content"] for turn in TURNS if turn["role"] == "assistant"]
    assert [learnt(tokenizer, row) for row in rows] == [[before + answer + eos for answer in answers]]
    assert not tally.counts


def test_tokens_are_those_of_the_tokenizer_itself() -> None:
    for template, eos in ((targets.TRIMMING, "<|eot_id|>"), (VICUNA, "</s>"), (targets.CHATML, "<|im_end|>")):
        tokenizer, rows, _ = rows_of(template, eos)
        assert list(rows[0].input_ids) == tokenizer.apply_chat_template(list(TURNS), return_dict=False)


def test_generation_markers_give_the_same_mask() -> None:
    generator = random.Random(0)
    words = ["hello", " there", "\n\n", " fine", "<|user|>", " naïve", " \N{OWL}", "7", " ", "the answer"]
    for _ in range(30):
        messages = [
            {"role": role, "content": "".join(generator.choices(words, k=generator.randint(1, 9))) + "."}
            for _ in range(generator.randint(1, 4))
            for role in ("user", "assistant")
        ]
        # Trimmed offsets would make transformers lose every answer that begins with a blank.
        tokenizer, rows, _ = rows_of(targets.WITH_MARKERS, "<|end|>", messages, trim_offsets=False)
        theirs = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
        assert [int(turn > 0) for turn in rows[0].turns] == theirs["assistant_masks"]


def test_turn_numbers_ascend_and_slots_never_cross_turns() -> None:
    _, (row,), _ = rows_of(targets.WITH_MARKERS, "<|end|>")
    numbers = [turn for turn in row.turns if turn]
    assert numbers == sorted(numbers)
    assert set(numbers) == {1, 2}
    assert row.num_slots == row.num_supervised - 2  # a turn's first token is the target's own


def test_dropped_thinking_fans_out_one_row_per_answer() -> None:
    messages = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "Fine.", "reasoning_content": "first thought"},
        {"role": "user", "content": "how are you"},
        {"role": "assistant", "content": "Very fine.", "reasoning_content": "second thought"},
    ]
    tokenizer, rows, _ = rows_of(targets.THINK_DROPPING, "<|im_end|>", messages)
    assert [learnt(tokenizer, row) for row in rows] == [
        ["<think>\nfirst thought\n</think>\n\nFine.<|im_end|>"],
        ["<think>\nsecond thought\n</think>\n\nVery fine.<|im_end|>"],
    ]
    assert "first thought" not in tokenizer.decode(rows[1].input_ids)
    assert [row.source for row in rows] == ["here: row 1, answer 1", "here: row 1, answer 2"]


def test_what_the_generation_prompt_writes_is_not_learnt() -> None:
    messages = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "Fine.", "reasoning_content": "a thought"},
    ]
    tokenizer, (row,), _ = rows_of(targets.THINK_OPENING, "<|im_end|>", messages)
    assert learnt(tokenizer, row) == ["a thought\n</think>\n\nFine.<|im_end|>"]


def test_an_answer_without_the_opened_thinking_is_learnt_and_counted() -> None:
    messages = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "Fine."}]
    tokenizer, (row,), tally = rows_of(targets.THINK_OPENING, "<|im_end|>", messages)
    assert learnt(tokenizer, row) == ["Fine.<|im_end|>"]
    assert sum(tally.counts.values()) == 1


def test_a_token_across_the_border_is_not_learnt_and_counted() -> None:
    template = (
        "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + ('</s>' if m['role'] == 'assistant' else ' ') }}"
        "{% endfor %}{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    )
    messages = [{"role": "user", "content": "how"}, {"role": "assistant", "content": "answer is fine"}]
    tokenizer, (row,), tally = rows_of(template, "</s>", messages)
    assert tokenizer.tokenize(": answer") == [":", "Ġanswer"]  # the prompt's last blank joins the answer's first word
    assert learnt(tokenizer, row) == [" is fine</s>"]
    assert tally.counts["left out", "a token straddles prompt and answer"] == 1


def test_an_end_of_turn_inside_an_answer_ends_what_is_learnt() -> None:
    messages = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "Fine.<|im_end|> And more."}]
    tokenizer, (row,), _ = rows_of(targets.CHATML, "<|im_end|>", messages)
    assert learnt(tokenizer, row) == ["Fine.<|im_end|>"]


def test_an_answer_whose_end_is_no_eos_stops_at_its_last_special_token() -> None:
    tokenizer, (row,), tally = rows_of(targets.CHATML, "</s>")  # as base models have it
    assert [text[-10:] for text in learnt(tokenizer, row)] == ["<|im_end|>", "<|im_end|>"]
    assert sum(tally.counts.values()) == 2


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        pytest.param(targets.NO_SYSTEM, "the chat template refuses it: System role not supported", id="no system role"),
        pytest.param(targets.RANDOM, "the template renders differently on each call", id="random text"),
        pytest.param(targets.COUNTING, "the template rewrites what stands before an answer", id="rewritten history"),
        pytest.param(targets.RENAMING, "the template rewrites what stands before an answer", id="another name"),
    ],
)
def test_a_conversation_that_a_template_cannot_carry_is_unusable(template: str, reason: str) -> None:
    with pytest.raises(UnusableRow) as caught:
        rows_of(template, "<|im_end|>")
    assert caught.value.reason == reason


def test_midnight_between_two_renders_does_no_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = targets.build_tokenizer(targets.CHATML, "<|im_end|>")
    render = tokenizer.apply_chat_template
    days = iter(["Monday", "Monday", "Tuesday"])
    monkeypatch.setattr(tokenizer, "apply_chat_template", lambda *a, **k: next(days, "Tuesday") + render(*a, **k))
    chat = Chat(tokenizer, {tokenizer.eos_token_id}, Tally())
    (rendered,) = chat.render(Conversation("here: row 1", "digest", TURNS))
    assert rendered.text.startswith("Tuesday")
    assert [rendered.text[start:end] for start, end in rendered.spans] == [
        "I am fine, thank you.<|im_end|>\n",
        "The answer is four \N{OWL}, naïvely.<|im_end|>\n",
    ]


def test_half_a_surrogate_pair_is_replaced_and_counted() -> None:
    messages = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "Fine \ud83d."}]
    tokenizer, (row,), tally = rows_of(targets.CHATML, "<|im_end|>", messages)
    assert learnt(tokenizer, row) == ["Fine \ufffd.<|im_end|>"]
    assert [kind for kind, _ in tally.counts] == ["mended"]


def test_vicuna_reads_as_fastchat_writes_it() -> None:
    tokenizer = targets.build_tokenizer(VICUNA, "</s>")
    messages = [
        {"role": "user", "content": "Hello!"},
        {"role": "assistant", "content": "Hi."},
        {"role": "user", "content": "How?"},
    ]
    system = (
        "A chat between a curious user and an artificial intelligence assistant. "
        "The assistant gives helpful, detailed, and polite answers to the user's questions."
    )
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == f"<s>{system} USER: Hello! ASSISTANT: Hi.</s>USER: How? ASSISTANT:"


def test_targets_without_a_template_are_told_how_to_pass_one() -> None:
    with pytest.raises(UserError, match=r"target\.chat_template.*configs/templates/vicuna\.jinja"):
        rows_of(None, "</s>")


def test_a_broken_template_is_the_users_error_with_its_line() -> None:
    with pytest.raises(UserError, match=r"chat template: line 2:"):
        rows_of("{{ 1 }}\n{% for %}", "</s>")


def test_a_slow_tokenizer_is_refused() -> None:
    class Slow:
        name_or_path = "somewhere"
        is_fast = False

    with pytest.raises(UserError, match=r"somewhere: Slow is a slow tokenizer"):
        Chat(Slow(), set(), Tally())


def test_end_of_turn_is_any_eos_of_tokenizer_or_generation_config() -> None:
    tokenizer = targets.build_tokenizer(targets.CHATML, "<|im_end|>")
    own = tokenizer.eos_token_id
    assert end_of_turn_ids(tokenizer, None) == {own}
    assert end_of_turn_ids(tokenizer, 3) == {own, 3}
    assert end_of_turn_ids(tokenizer, [3, 4]) == {own, 3, 4}
