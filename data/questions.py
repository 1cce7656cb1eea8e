"""The questions in rows: every command reads them here, from the same columns as training.

A row's question stands in `turns` (texts that are asked one after another), in a list of messages,
or in one of QUESTION_COLUMNS. Its system turn and its tools come with it.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

from aerie.configs.errors import UserError, warn_once
from aerie.data.conversations import from_first_question, joined_speakers
from aerie.data.marks import IS_CONTEXT, MARK_KEYS
from aerie.data.rows import RawRow, read_rows
from aerie.data.shapes import SHAPES, Message
from aerie.data.turns import (
    LISTS,
    PAIRS,
    UNKNOWN_KEYS,
    messages_of,
    require_context_columns,
    turns_in_list,
)
from aerie.data.values import UnusableRow, is_text, unpacked

QUESTION_COLUMNS = SHAPES["questions"].split()
# Columns of answers, which a reader of questions leaves alone.
IDLE_COLUMNS = (*(answer for _, answer in PAIRS), *SHAPES["idle_of_question"].split())

NO_QUESTION = "the question is empty or is not text"


class RowQuestion(NamedTuple):
    """What a row asks."""

    before: tuple[Message, ...]  # what the target reads before the first turn
    turns: tuple[str, ...]  # asked one after another, each after the answers to those before
    tools: list[Any] | None = None
    unread: frozenset[str] = frozenset()  # what nobody reads of the row, as reasons to count
    calls_tools: bool = False  # the row has calls of tools, or their results


def read_question(value: Any, field: str | None = None, last_only: bool = False) -> RowQuestion:
    """What a row asks; UnusableRow if it asks nothing.

    field: the recipe's column of questions. last_only: only the last turn of a list of messages is
    asked, after the messages before it; otherwise the target answers each turn of the user.
    """
    row = value if isinstance(value, Mapping) else {"prompt": value}
    # Marks of what is learnt say nothing about a question.
    row = {name: cell for name, cell in row.items() if name not in MARK_KEYS}
    turns, columns, are_texts = _asked_in(row, field)
    read = messages_of(row, turns, (*columns, *IDLE_COLUMNS))
    for message in read.messages:
        message.pop(IS_CONTEXT, None)
        if message["role"] == "user" and not is_text(message["content"]):
            raise _no_question()
    if are_texts:
        before = tuple(message for message in read.messages if message["role"] == "system")
        question = RowQuestion(before, tuple(turn["content"] for turn in turns))
    elif last_only:
        question = _last_turn(read.messages)
    else:
        question = each_turn(read.messages)
    return question._replace(tools=read.tools, unread=frozenset(read.unread))


def each_turn(messages: Sequence[Message]) -> RowQuestion:
    """Each turn of the user before the first call or result of a tool."""
    messages = joined_speakers(from_first_question(list(messages), set()), set())
    first = next((i for i, message in enumerate(messages) if message["role"] == "user"), 0)
    before_tools = list(takewhile(lambda message: not _is_of_tools(message), messages))
    if any(message["role"] == "system" for message in before_tools[first:]):
        raise UnusableRow("a system turn stands between the questions", "")
    turns = tuple(message["content"] for message in before_tools if message["role"] == "user")
    if not turns:
        raise UnusableRow("no user turn", "")
    return RowQuestion(
        tuple(messages[:first]), turns, calls_tools=len(before_tools) < len(messages)
    )


def _last_turn(messages: Sequence[Message]) -> RowQuestion:
    """The last turn of the user or of a tool; answers after it are left out."""
    kept = joined_speakers(from_first_question(list(messages), set()), set())
    while kept and kept[-1]["role"] == "assistant":
        kept.pop()  # the target gives its own answer
    if not any(message["role"] == "user" for message in kept):
        raise UnusableRow("no user turn", "")
    calls_tools = any(map(_is_of_tools, kept))
    if kept[-1]["role"] != "user":
        return RowQuestion(tuple(kept), (), calls_tools=calls_tools)
    return RowQuestion(tuple(kept[:-1]), (kept[-1]["content"],), calls_tools=calls_tools)


def _is_of_tools(message: Message) -> bool:
    return message["role"] == "tool" or bool(message.get("tool_calls"))


def _asked_in(row: Mapping[str, Any], field: str | None) -> tuple[list[Any], tuple[str, ...], bool]:
    """The turns that a row asks, their columns, and whether each turn is a question's text."""
    filled = {name for name, cell in row.items() if cell is not None}
    trained = [prompt for prompt, answer in PAIRS if filled.issuperset((prompt, answer))]
    names = [field] if field else ["turns", *LISTS, *trained, *QUESTION_COLUMNS]
    name = next((name for name in names if row.get(name) is not None), None)
    if name is None:
        if row.keys() & set(names):
            raise _no_question()
        raise UnusableRow(
            UNKNOWN_KEYS,
            f"has keys {', '.join(map(str, row))}; the question must be in {' or '.join(names)}",
        )
    if name in LISTS:
        return turns_in_list(row, name), (name,), False
    texts = unpacked(row[name])
    if isinstance(texts, list) and texts and all(map(_is_message, texts)):
        return texts, (name,), False
    texts = texts if name == "turns" else row[name]
    if isinstance(texts, list | tuple):
        if not texts or not all(map(is_text, texts)):
            raise _no_question()
        return [{"role": "user", "content": text} for text in texts], (name,), True
    if not is_text(texts):
        raise _no_question()
    columns: tuple[str, ...] = (name,)
    if not field and name != "input":
        require_context_columns(row, columns)
        if is_text(row.get("input")):  # Alpaca's
            texts = f"{texts}\n\n{row['input']}"
            columns = (name, "input")
    return [{"role": "user", "content": texts}], columns, True


def _is_message(value: Any) -> bool:
    return isinstance(value, Mapping) and not value.keys().isdisjoint(("role", "from"))


def _no_question() -> UnusableRow:
    sentence = "a question is a text or a list of texts, none empty"
    return UnusableRow(NO_QUESTION, sentence)


# --- of a file, or of the command line ------------------------------------------------------------


def read_prompts(
    path: Path | None,
    text: str | None,
    raw: bool = False,
    field: str | None = None,
    system_prompt: str | None = None,
) -> list[RowQuestion]:
    """The prompts in a file's rows, or the one prompt `text`; UserError if one is empty.

    raw: prompts get no chat template, so each must be a single turn. field: the recipe's column of
    questions, which is read in rows that have it. system_prompt: the recipe's, for prompts without
    a system turn.
    """
    prompts = []
    unread = []
    for row in read_rows(str(path)) if path else [RawRow("--prompt", 1, text)]:
        try:
            has_field = isinstance(row.value, Mapping) and field in row.value
            question = read_question(row.value, field if has_field else None, last_only=True)
        except UnusableRow as error:
            is_empty = error.reason == NO_QUESTION
            why = "the prompt is empty or is not text" if is_empty else str(error)
            raise UserError(f"{row.source}: {why}") from error
        if raw and (question.before or question.tools or len(question.turns) > 1):
            raise UserError(
                f"{row.source}: a system turn, tools or several turns need the chat template; "
                "leave out --raw"
            )
        if system_prompt is not None and not raw:
            question = question._replace(before=with_system(question.before, system_prompt))
        prompts.append(question)
        unread.append((row.source, question.unread))
    if not prompts:
        raise UserError(f"{path}: holds no prompts")
    tell_unread(str(path), unread)
    return prompts


def with_system(before: tuple[Message, ...], prompt: str) -> tuple[Message, ...]:
    """The messages before a question; `prompt` becomes the system turn if they have none."""
    if before and before[0]["role"] == "system":
        return before
    return {"role": "system", "content": prompt}, *before


def tell_unread(source: str, unread: Iterable[tuple[str, Iterable[str]]]) -> None:
    """Warns once of what nobody reads in the rows of a source.

    unread: for each row, its place and the reasons to count.
    """
    places = defaultdict[str, list[str]](list)  # by reason
    for place, reasons in unread:
        for reason in sorted(reasons):
            places[reason].append(place)
    largest_first = sorted(places.items(), key=lambda item: -len(item[1]))
    listed = [f"{why} ({len(rows):,} rows, first: {rows[0]})" for why, rows in largest_first]
    if listed:
        warn_once(f"{source}: {'; '.join(listed)}")
