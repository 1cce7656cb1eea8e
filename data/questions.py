"""What rows ask: one reader for the questions of all commands, with the columns of training.

A row's question may stand in a column of texts to be asked in turn (`turns`), in a list of
messages, or in one of QUESTION_COLUMNS. Its system turn and its tools come with it.
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
# The columns of an answer, which is not read where a question is asked.
IDLE_COLUMNS = (*(answer for _, answer in PAIRS), *SHAPES["idle_of_question"].split())

NO_QUESTION = "an empty question, or no text"


class RowQuestion(NamedTuple):
    """What a row asks."""

    before: tuple[Message, ...]  # what the target reads before the first turn
    turns: tuple[str, ...]  # asked one after another, each after the answers to those before
    tools: list[Any] | None = None
    unread: frozenset[str] = frozenset()  # what the row also holds, as reasons to count
    calls_tools: bool = False  # it has calls of tools or their results


def read_question(value: Any, field: str | None = None, last_only: bool = False) -> RowQuestion:
    """What a row asks; UnusableRow if it asks nothing.

    field: the recipe's column. last_only: of messages, the last turn is asked, after the messages
    before it; otherwise each turn of the user is, after the target's own answers.
    """
    row = value if isinstance(value, Mapping) else {"prompt": value}
    # What a row says of learning is nothing to whoever asks.
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
    """Each turn of the user, up to one that a tool's result comes before."""
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
    """The last turn, of the user or of a tool, without an answer that follows it."""
    kept = joined_speakers(from_first_question(list(messages), set()), set())
    while kept and kept[-1]["role"] == "assistant":
        kept.pop()  # the target answers anew
    if not any(message["role"] == "user" for message in kept):
        raise UnusableRow("no user turn", "")
    calls_tools = any(map(_is_of_tools, kept))
    if kept[-1]["role"] != "user":
        return RowQuestion(tuple(kept), (), calls_tools=calls_tools)
    return RowQuestion(tuple(kept[:-1]), (kept[-1]["content"],), calls_tools=calls_tools)


def _is_of_tools(message: Message) -> bool:
    return message["role"] == "tool" or bool(message.get("tool_calls"))


def _asked_in(row: Mapping[str, Any], field: str | None) -> tuple[list[Any], tuple[str, ...], bool]:
    """The turns that a row asks, their columns, and whether they are texts, all to be asked."""
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
    """Prompts from a file's rows, or of a text; UserError if one is empty.

    raw: they get no chat template, so they are one turn each. field, system_prompt: the recipe's
    column of questions, for rows that have it, and its system turn, for prompts without one.
    """
    prompts = []
    unread = []
    for row in read_rows(str(path)) if path else [RawRow("--prompt", 1, text)]:
        try:
            has_field = isinstance(row.value, Mapping) and field in row.value
            question = read_question(row.value, field if has_field else None, last_only=True)
        except UnusableRow as error:
            is_empty = error.reason == NO_QUESTION
            why = "the prompt is empty, or no text" if is_empty else str(error)
            raise UserError(f"{row.source}: {why}") from error
        if raw and (question.before or question.tools or len(question.turns) > 1):
            raise UserError(f"{row.source}: several turns need the chat template; leave --raw out")
        if system_prompt is not None and not raw:
            question = question._replace(before=with_system(question.before, system_prompt))
        prompts.append(question)
        unread.append((row.source, question.unread))
    if not prompts:
        raise UserError(f"{path}: holds no prompts")
    tell_unread(str(path), unread)
    return prompts


def with_system(before: tuple[Message, ...], prompt: str) -> tuple[Message, ...]:
    """What is read before a question, with a system turn; one of its own stays."""
    if before and before[0]["role"] == "system":
        return before
    return {"role": "system", "content": prompt}, *before


def tell_unread(source: str, unread: Iterable[tuple[str, Iterable[str]]]) -> None:
    """Says once what the rows of a source also hold, and that nobody reads it.

    unread: each row's place and the reasons to count.
    """
    places = defaultdict[str, list[str]](list)  # of each reason
    for place, reasons in unread:
        for reason in sorted(reasons):
            places[reason].append(place)
    largest_first = sorted(places.items(), key=lambda item: -len(item[1]))
    listed = [f"{why} ({len(rows):,} rows, first: {rows[0]})" for why, rows in largest_first]
    if listed:
        warn_once(f"{source}: {'; '.join(listed)}")
