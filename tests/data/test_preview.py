from array import array

from aerie.data.chat import Row
from aerie.data.tokens import GREEN, RESET, excerpt, show
from tests.data import chat_targets as targets


def row_of(text: str, learnt: str) -> tuple[object, Row]:
    """A row whose learnt turn is the given part of text."""
    tokenizer = targets.build_tokenizer(None, "<|end|>")
    before = tokenizer.encode(text[: text.index(learnt)], add_special_tokens=False)
    turn = tokenizer.encode(learnt, add_special_tokens=False)
    after = tokenizer.encode(text[text.index(learnt) + len(learnt) :], add_special_tokens=False)
    turns = array("i", [0] * len(before) + [1] * len(turn) + [0] * len(after))
    return tokenizer, Row(before + turn + after, turns, "here: row 1")


def test_learnt_text_stands_in_brackets_or_in_green() -> None:
    tokenizer, row = row_of("<|user|>hello<|assistant|> fine \N{OWL}.<|end|> more", " fine \N{OWL}.<|end|>")
    plain = show([row], tokenizer, limit=1, color=False)
    header, text = plain.split("\n")
    assert text == "<|user|>hello<|assistant|>[1: fine \N{OWL}.<|end|>] more"
    assert header.startswith("here: row 1 | ")
    assert header.endswith("| 1 turns")
    assert f"{GREEN} fine \N{OWL}.<|end|>{RESET}" in show([row], tokenizer, limit=1)


def test_only_so_many_rows_are_shown() -> None:
    tokenizer, row = row_of("hello fine", " fine")
    assert show([row] * 5, tokenizer, limit=2).count("here: row 1") == 2


def test_text_cannot_steer_the_terminal() -> None:
    tokenizer, row = row_of("hello \x1b[2J\x07 fine", " fine")
    assert "hello \\x1b[2J\\x07[1: fine]" in show([row], tokenizer, limit=1, color=False)


def test_an_excerpt_is_one_short_line_around_the_first_learnt_token() -> None:
    tokenizer, row = row_of("hello\n" * 200 + "<|assistant|>fine\nfine<|end|>" + "hello\n" * 200, "fine\nfine<|end|>")
    line = excerpt(row, tokenizer, num_characters=400)
    assert "<|assistant|>[1:fine\\nfine<|end|>]" in line
    assert "\n" not in line
    assert len(line) < 410
