"""Rows as text in which one sees what is learnt: the mask, looked at by a person."""

import re
from collections.abc import Iterator, Sequence
from itertools import groupby, islice
from typing import Any

from data.chat import Row, common_start

GREEN, DIM, RESET = "\x1b[32m", "\x1b[2m", "\x1b[0m"
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # a corpus must not steer the terminal


def show(rows: Sequence[Row], tokenizer: Any, limit: int, color: bool = True) -> str:
    """The first `limit` rows: a header line, then the text, learnt turns green (only in [turn:...] without color)."""
    return "\n\n".join(_row(row, tokenizer, color) for row in islice(rows, limit))


def excerpt(row: Row, tokenizer: Any, num_characters: int = 300) -> str:
    """One line out of the row around its first learnt token, learnt turns in [turn: ...], for an error message."""
    first = next((at for at, turn in enumerate(row.turns) if turn), 0)
    start, stop = max(0, first - 40), first + 120
    text = _marked(Row(row.input_ids[start:stop], row.turns[start:stop], row.source), tokenizer, color=False)
    line = repr(text)[1:-1]
    return f"'{line[:num_characters]}{'...' if len(line) > num_characters else ''}'"


def _row(row: Row, tokenizer: Any, color: bool) -> str:
    share = row.num_supervised / max(len(row.input_ids), 1)
    header = (
        f"{row.source} | {len(row.input_ids):,} tokens | {row.num_supervised:,} supervised ({share:.1%}) | "
        f"{len(set(row.turns) - {0})} turns"
    )
    return f"{header}\n{_marked(row, tokenizer, color)}"


def _marked(row: Row, tokenizer: Any, color: bool) -> str:
    parts = []
    for turn, text in _pieces(row, tokenizer):
        shown = CONTROL.sub(lambda match: f"\\x{ord(match[0]):02x}", text)
        if turn == 0:
            parts.append(shown)
        elif color:
            parts.append(f"{DIM}[{turn}:{RESET}{GREEN}{shown}{RESET}{DIM}]{RESET}")
        else:
            parts.append(f"[{turn}:{shown}]")
    return "".join(parts)


def _pieces(row: Row, tokenizer: Any) -> Iterator[tuple[int, str]]:
    """(turn, text) of each run: what decoding grows by, since a run alone may lose a blank or half a character."""
    before, position = "", 0
    for turn, run in groupby(row.turns):
        position += sum(1 for _ in run)
        text = tokenizer.decode(row.input_ids[:position], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        yield turn, text[common_start(before, text) :]
        before = text
