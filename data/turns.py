"""What a row says: its turns, whatever columns hold them, each with a role and a text.

A key that nobody reads is counted as a reason; a row whose meaning needs such a key is left out.
The names that data sets use stand in shapes.yaml.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from aerie.data.marks import MARK_KEYS, mark_context, share_of
from aerie.data.shapes import SHAPES, Message
from aerie.data.tools import CALL_COLUMNS, TOOL_COLUMNS, calls_of, spoken_calls, tools_of
from aerie.data.values import UnusableRow, is_empty, is_text, read_object, unpacked

UNKNOWN_KEYS = "the row has no column that is known"

ROLES: dict[str, str] = {}  # the role of each name that data sets use
for _role, _names in SHAPES["roles"].items():
    ROLES |= dict.fromkeys(_names.split(), _role)
CALLERS = frozenset(SHAPES["calls"].split())
PAIRS = [tuple(pair) for pair in SHAPES["pairs"]]  # columns of a question and its answer
LISTS = ("conversations", "messages", "conversation")  # columns of turns
TOKEN_COLUMNS = ("input_ids", "loss_mask")
SYSTEM_COLUMNS = ("system", "system_prompt")
SPEAKER_KEYS = ("from", "role", "speaker")
TEXT_KEYS = ("value", "content", "text")
# Keys that mean the same; the first one that is filled is read.
SAME_KEYS = {
    "row": (LISTS, SYSTEM_COLUMNS),
    "message": (TEXT_KEYS, SPEAKER_KEYS),
    "part": (),
}

# What a turn may hold besides its text. A turn with one of SPOKEN_KEYS needs no text.
THOUGHT_KEYS = ("reasoning_content", "reasoning", "thinking", "thought")
SPOKEN_KEYS = (*THOUGHT_KEYS, "tool_calls")
EXTRA_KEYS = {"assistant": SPOKEN_KEYS, "tool": ("tool_call_id", "name")}
# The keys, and also the types, under which a part of a content holds a text.
THOUGHT_PARTS = ("thinking", "reasoning")
TEXT_PARTS = ("text", "input_text", "output_text", *THOUGHT_PARTS)
THOUGHT_END = "</think>"  # ends a thought inside a content

UNREADABLE_KEYS = frozenset(SHAPES["unreadable"].split())
MESSAGE_KEYS = {*SPEAKER_KEYS, *TEXT_KEYS, *TOOL_COLUMNS, *SHAPES["idle_of_message"].split()}
MESSAGE_KEYS_READ = {  # by role
    role: frozenset(MESSAGE_KEYS | MARK_KEYS | {*EXTRA_KEYS.get(role, ())})
    for role in SHAPES["roles"]
}
MESSAGE_KEYS_READ["assistant"] |= {"function_call"}
PART_KEYS_READ = frozenset({"type", *TEXT_PARTS, *SHAPES["idle_of_part"].split()})
ROW_KEYS_READ = frozenset(
    {*LISTS, *SYSTEM_COLUMNS, *TOOL_COLUMNS, *MARK_KEYS}
    | {*SHAPES["desired"].split(), *SHAPES["idle_of_row"].split()}
)


class RowTurns(NamedTuple):
    """What a row says, before it is mended."""

    messages: list[Message]  # with the key IS_CONTEXT in an answer that is not to be learnt
    tools: list[Any] | None
    unread: set[str]  # what nobody reads of the row, as reasons to count


# --- the columns of the turns ---------------------------------------------------------------------


def read_turns(row: Mapping[str, Any], fields: tuple[str, ...] = ()) -> RowTurns:
    """What a row says, and which of its answers are to be learnt; UnusableRow if none can be read.

    fields: the recipe's prompt and completion columns.
    """
    turns, columns = _turns_of(row, fields)
    for name in SHAPES["desired"].split():
        # A number may be a class; a CSV file holds texts.
        if name not in columns and str(row.get(name)).lower() == "false":
            raise UnusableRow("the answer is marked as not desired", name)
    read = messages_of(row, turns, columns, are_chosen=columns[:2] == fields)
    num_turns = len(turns)  # the row's system turn stands before them
    said = read.messages[-num_turns:] if turns else []
    return read._replace(unread=read.unread | mark_context(row, turns, said))


def read_token_row(row: Mapping[str, Any]) -> set[str]:
    """Reasons for keys besides a row's token ids; UnusableRow if a mark excludes the row."""
    beside = {name: value for name, value in row.items() if name not in TOKEN_COLUMNS}
    return _unread_keys(beside, [], [], (), False) | mark_context(beside, [], [])


def messages_of(
    row: Mapping[str, Any], turns: list[Any], columns: tuple[str, ...], are_chosen: bool = False
) -> RowTurns:
    """What a row's turns say, with its system turn and its tools.

    columns: where the turns stand. are_chosen: the recipe names them, so no other column is needed.
    """
    messages = [_message(turn, number) for number, turn in enumerate(turns, start=1)]
    unread = _unread_keys(row, turns, messages, columns, are_chosen)
    tools = tools_of(row, turns)
    for name in SYSTEM_COLUMNS:
        if not isinstance(row.get(name), str | None):
            raise UnusableRow("a system column is not text", name)
    # A column cannot tell an empty system turn from none.
    system = next((row[name] for name in SYSTEM_COLUMNS if is_text(row.get(name))), None)
    said = [message["content"] for message in messages if message["role"] == "system"]
    if system and not said:
        messages.insert(0, {"role": "system", "content": system})
    elif system and system not in said:
        unread.add("a system column beside a system turn is not read")
    return RowTurns(messages, tools, unread)


def _turns_of(row: Mapping[str, Any], fields: tuple[str, ...]) -> tuple[list[Any], tuple[str, ...]]:
    """The row's own turns and their columns: the recipe's, else a list's, else a pair's."""
    pairs = [fields, *PAIRS] if fields else PAIRS
    filled = {name for name, value in row.items() if value is not None}
    pair = next((pair for pair in pairs if filled.issuperset(pair)), ())
    if pair and pair == fields:  # the recipe decides which columns the meaning needs
        return _turns_of_pair(row, pair)
    for name in LISTS:
        turns = _transposed(unpacked(row.get(name)))
        if isinstance(turns, list):
            return turns, (name,)
    if pair:
        require_context_columns(row, pair)
        return _turns_of_pair(row, pair)
    for name in LISTS:
        if name in filled:
            return turns_in_list(row, name), (name,)
    if any(name in row for name in LISTS):
        return [], ()
    expected = " and ".join(fields) or (
        "conversations, messages or a pair that data.prompt_field and data.completion_field name"
    )
    raise UnusableRow(UNKNOWN_KEYS, f"has keys {', '.join(map(str, row))}; expected {expected}")


def _transposed(turns: Any) -> Any:
    """The list of turns, also if a data set keeps one list for each key of a turn."""
    if isinstance(turns, list):
        return list(map(read_object, turns))
    if not isinstance(turns, Mapping) or not all(isinstance(part, list) for part in turns.values()):
        return turns
    if len({len(part) for part in turns.values()}) > 1:
        return turns
    return [dict(zip(turns, parts, strict=True)) for parts in zip(*turns.values(), strict=True)]


def turns_in_list(row: Mapping[str, Any], name: str) -> list[Any]:
    """The turns in a column; UnusableRow if the column holds no list."""
    turns = _transposed(unpacked(row[name]))
    if not isinstance(turns, list):
        raise UnusableRow("the turns are not a list", f"{name!r} is {type(row[name]).__name__}")
    return turns


def require_context_columns(row: Mapping[str, Any], read: tuple[str, ...]) -> None:
    """UnusableRow if the question needs a column that is not among those read."""
    for name in SHAPES["needed_by_pairs"].split():
        if name not in read and not is_empty(row.get(name)):
            raise UnusableRow(f'row key "{name}" cannot be read', "the question needs it")
    if "input" not in read and not isinstance(row.get("input"), str) and row.get("input"):
        raise UnusableRow('row key "input" is not text', "the question needs it")


def _turns_of_pair(
    row: Mapping[str, Any], pair: tuple[str, ...]
) -> tuple[list[Any], tuple[str, ...]]:
    columns = pair
    questions = _turn_list(row[pair[0]])
    answers = _turn_list(row[pair[1]])
    if [] in (questions, answers) or (questions and unpacked(row[pair[1]]) == []):
        raise UnusableRow("an empty list of turns", f"{pair[0]!r} or {pair[1]!r}")
    if questions is None:
        prompt = row[pair[0]]
        if "input" not in pair and is_text(row.get("input")):  # Alpaca's
            if not isinstance(prompt, str):
                raise UnusableRow("a turn is not text", f"{pair[0]!r} has an 'input' beside it")
            prompt = f"{prompt}\n\n{row['input']}"
            columns = (*columns, "input")
        questions = [{"role": "user", "content": prompt}]
    if answers is None:
        thoughts = [name for name in THOUGHT_KEYS if is_text(row.get(name)) and name not in pair]
        columns = (*columns, *thoughts)
        answer = {"role": "assistant", "content": row[pair[1]]}
        answers = [answer | {name: row[name] for name in thoughts}]
    return [*questions, *answers], columns


def _turn_list(value: Any) -> list[Any] | None:
    """A column's list of turns; None if it holds something else."""
    turns = unpacked(value)
    if not isinstance(turns, list) or (not turns and isinstance(value, str)):  # the text "[]"
        return None
    turns = list(map(read_object, turns))
    are_turns = all(
        isinstance(turn, Mapping) and any(key in turn for key in SPEAKER_KEYS) for turn in turns
    )
    return turns if are_turns else None


# --- a turn ---------------------------------------------------------------------------------------


def _message(turn: Any, number: int) -> Message:
    if not isinstance(turn, Mapping):
        raise UnusableRow("a turn is not an object", f"turn {number} is {type(turn).__name__}")
    speaker = next((turn[key] for key in SPEAKER_KEYS if turn.get(key)), None)
    if speaker is None:
        keys = ", ".join(map(str, turn))
        raise UnusableRow(
            "a turn names no speaker",
            f"turn {number} has keys {keys}; expected from and value, or role and content",
        )
    name = str(speaker).strip().lower()
    role = "assistant" if name in CALLERS else ROLES.get(name)
    if role is None:
        raise UnusableRow(
            "a turn has an unknown role",
            f"turn {number} is from {speaker!r:.60}; expected human, gpt, system or tool",
        )
    text, thought = _text_of(turn, number)
    message: Message = {"role": role, "content": text}
    for key in EXTRA_KEYS.get(role, ()):
        if turn.get(key) is not None and turn[key] not in ([], {}):
            message[key] = turn[key]
    message.pop("tool_calls", None)
    if calls := calls_of(turn, role, number):
        message["tool_calls"] = calls
    if name in CALLERS and text:
        before, close, call = text.rpartition(THOUGHT_END)
        message |= {"content": before + close, "tool_calls": spoken_calls(call, turn, number)}
    for key in message.keys() - {"tool_calls"}:
        kinds = str | int if key == "tool_call_id" else str
        if not isinstance(message[key], kinds):
            raise UnusableRow("a turn is not text", f"turn {number}: {key} is not text")
    if thought:
        if role != "assistant" or (message.get("reasoning_content") or thought) != thought:
            raise UnusableRow("a thought inside a content cannot be read", f"turn {number}")
        message["reasoning_content"] = thought
    return message


def _text_of(turn: Mapping[str, Any], number: int) -> tuple[str, str]:
    """A turn's text and, from content in parts, its thought."""
    names = [name for name in TEXT_KEYS if turn.get(name) is not None]
    has_text = not turn.keys().isdisjoint(TEXT_KEYS)
    if not has_text and all(is_empty(turn.get(key)) for key in (*SPOKEN_KEYS, *CALL_COLUMNS)):
        keys = ", ".join(map(str, turn))
        raise UnusableRow("a turn has no text", f"turn {number} has keys {keys}; expected content")
    content = turn[names[0]] if names else ""
    thought = ""
    if isinstance(content, list):
        content, thought = _joined_parts(content, number)
    if not isinstance(content, str):
        raise UnusableRow(
            "a turn is not text", f"turn {number} holds {type(content).__name__}; expected text"
        )
    return content, thought


def _joined_parts(parts: list[Any], number: int) -> tuple[str, str]:
    """The text and the thought of content in parts ({type: text, text: ...})."""
    texts, thoughts = list[str](), list[str]()
    for part in map(read_object, parts):
        if isinstance(part, str) and len(parts) == 1:
            part = {"text": part}
        if isinstance(part, str):  # they may be parts of one text, or answers to choose from
            raise UnusableRow("a turn holds several texts", f"turn {number} has {len(parts)}")
        kind = str(part.get("type") or "text") if isinstance(part, Mapping) else "text"
        filled = list[str]()
        if isinstance(part, Mapping) and kind in TEXT_PARTS:
            filled = [key for key in TEXT_PARTS if part.get(key) is not None]
        if not filled:
            raise UnusableRow("a turn is not text", f"turn {number} has a part of type {kind!r}")
        said = list[str]()
        for key in filled:
            text = part[key]
            if isinstance(text, list):  # Mistral's thought is in parts itself
                text = "".join(_joined_parts(text, number))
            if not isinstance(text, str):
                raise UnusableRow(
                    "a turn is not text", f"turn {number} has a part of type {kind!r}"
                )
            if text in said:
                continue
            said.append(text)
            is_thought = kind in THOUGHT_PARTS or key in THOUGHT_PARTS
            (thoughts if is_thought else texts).append(text)
    return "".join(texts), "".join(thoughts)


# --- keys beside the text -------------------------------------------------------------------------


def _unread_keys(
    row: Mapping[str, Any],
    turns: list[Any],
    messages: list[Message],
    columns: tuple[str, ...],
    are_chosen: bool,
) -> set[str]:
    """Reasons for keys that are not read; UnusableRow for one that a turn's meaning needs."""
    unread = set[str]()
    holders = [("row", row, ROW_KEYS_READ.union(columns)), *_holders_in(turns, messages)]
    for holder, values, read in holders:
        for key in values.keys() - read:
            value = values[key]
            is_said = holder == "row" and any(value in turn.values() for turn in turns)
            is_yes = holder == "part" and key in MARK_KEYS and share_of(key, value) == 1
            if is_empty(value) or is_said or is_yes:
                continue
            is_needed = key in UNREADABLE_KEYS or (holder == "part" and key in MARK_KEYS)
            if is_needed and not (are_chosen and holder == "row"):
                raise UnusableRow(f'{holder} key "{key}" cannot be read', "")
            unread.add(f'{holder} key "{key}" is not read')
        for same in SAME_KEYS[holder]:
            filled = [key for key in same if key in values and not is_empty(values[key])]
            for key in filled[1:]:
                if values[key] != values[filled[0]] and key not in columns:
                    reason = f'{holder} key "{key}" is not read, since "{filled[0]}" is'
                    unread.add(reason)
    return unread


def _holders_in(
    turns: list[Any], messages: list[Message]
) -> Iterator[tuple[str, Mapping[str, Any], frozenset[str]]]:
    """Each message and part in the turns: what it is, its values, and the keys that are read."""
    for turn, message in zip(turns, messages, strict=True):
        yield "message", turn, MESSAGE_KEYS_READ[message["role"]]
        for key in TEXT_KEYS:
            if isinstance(turn.get(key), list):
                for part in _parts_in(turn[key]):
                    yield "part", part, PART_KEYS_READ


def _parts_in(content: list[Any]) -> Iterator[Mapping[str, Any]]:
    """The parts of a content, and the parts of a thought that is itself in parts."""
    for part in map(read_object, content):
        if isinstance(part, Mapping):
            yield part
            for key in TEXT_PARTS:
                if isinstance(part.get(key), list):
                    yield from _parts_in(part[key])
