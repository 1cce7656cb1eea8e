"""What a row says: its turns, whatever columns hold them, each with a role and a text.

Keys that are not read are reasons to count; a row that means something else without one of them is
left out. The names that data sets use stand in shapes.yaml.
"""

import ast
import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from aerie.configs.errors import UserError
from aerie.configs.read import read_yaml

Message = dict[str, Any]  # role (user, assistant, system or tool), content, and maybe EXTRA_KEYS

UNKNOWN_KEYS = "keys of no known shape"

SHAPES = read_yaml(Path(__file__).with_name("shapes.yaml"))[0]
ROLES: dict[str, str] = {}  # the role of each name that data sets use
for _role, _names in SHAPES["roles"].items():
    ROLES |= dict.fromkeys(_names.split(), _role)
CALLERS = frozenset(SHAPES["calls"].split())
PAIRS = [tuple(pair) for pair in SHAPES["pairs"]]  # columns of a question and its answer
LISTS = ("conversations", "messages", "conversation")  # columns of turns
SYSTEM_COLUMNS = ("system", "system_prompt")
TOOL_COLUMNS = ("tools", "functions")
SPEAKER_KEYS = ("from", "role", "speaker")
TEXT_KEYS = ("value", "content", "text")
# The first of each that is filled is read.
SAME_KEYS = {
    "row": (LISTS, SYSTEM_COLUMNS, TOOL_COLUMNS),
    "message": (TEXT_KEYS, SPEAKER_KEYS, ("tool_calls", "function_call")),
}
ARGUMENT_KEYS = ("arguments", "parameters", "input", "args", "kwargs")  # of a call
CALL_KEYS = {"name", "id", "type", "index", "description", *ARGUMENT_KEYS}

# What a turn may hold beside its text: a turn with one of SPOKEN_KEYS needs no text.
THOUGHT_KEYS = ("reasoning_content", "reasoning", "thinking", "thought")
SPOKEN_KEYS = (*THOUGHT_KEYS, "tool_calls")
EXTRA_KEYS = (*SPOKEN_KEYS, "tool_call_id", "name")

IS_CONTEXT = "is_context"  # of a message while its row is read; no template sees it
LEARN_KEYS = frozenset(SHAPES["learn"].split())
IGNORE_KEYS = frozenset(SHAPES["ignore"].split())
UNREADABLE_KEYS = frozenset(SHAPES["unreadable"].split())
MESSAGE_KEYS = frozenset(
    {*SPEAKER_KEYS, *TEXT_KEYS, "function_call", *EXTRA_KEYS}
    | LEARN_KEYS
    | IGNORE_KEYS
    | set(SHAPES["idle_of_message"].split())
)
ROW_KEYS_READ = frozenset(
    {*LISTS, *SYSTEM_COLUMNS, *TOOL_COLUMNS} | LEARN_KEYS | set(SHAPES["idle_of_row"].split())
)


class UnusableRow(UserError):
    """Carries a reason, which is counted, and a sentence about this row."""

    def __init__(self, reason: str, sentence: str) -> None:
        super().__init__(": ".join(filter(None, (reason, sentence))))
        self.reason = reason
        self.sentence = sentence


class RowTurns(NamedTuple):
    """What a row says, before it is mended."""

    messages: list[Message]  # with the key IS_CONTEXT in an answer that is not to be learnt
    tools: list[Any] | None
    unread: set[str]  # what the row also holds, as reasons to count


# --- the columns of the turns ---------------------------------------------------------------------


def is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


def read_turns(row: Mapping[str, Any], fields: tuple[str, ...] = ()) -> RowTurns:
    """What a row says; fields: the recipe's prompt and completion columns."""
    turns, columns = _turns_of(row, fields)
    return messages_of(row, turns, columns, are_chosen=columns[:2] == fields)


def messages_of(
    row: Mapping[str, Any], turns: list[Any], columns: tuple[str, ...], are_chosen: bool = False
) -> RowTurns:
    """What a row's turns say, with its system turn and its tools.

    columns: those of the turns; are_chosen: the recipe names them, so no other column is needed.
    """
    messages = [_message(turn, number) for number, turn in enumerate(turns, start=1)]
    unread = _unread_keys(row, turns, columns, are_chosen)
    unread |= _mark_context(row, turns, messages)
    tools = _tools_of(row, turns)
    for name in SYSTEM_COLUMNS:
        if not isinstance(row.get(name), str | None):
            raise UnusableRow("a system column is no text", name)
    system = next((row[name] for name in SYSTEM_COLUMNS if is_text(row.get(name))), None)
    said = [message["content"] for message in messages if message["role"] == "system"]
    if system and not said:
        messages.insert(0, {"role": "system", "content": system})
    elif system and system not in said:
        unread.add("a system column beside a system turn is not read")
    return RowTurns(messages, tools, unread)


def _turns_of(row: Mapping[str, Any], fields: tuple[str, ...]) -> tuple[list[Any], tuple[str, ...]]:
    """Turns as they stand in the row, and their columns: the recipe's, else a list, else a pair."""
    pairs = [fields, *PAIRS] if fields else PAIRS
    filled = {name for name, value in row.items() if value is not None}
    pair = next((pair for pair in pairs if filled.issuperset(pair)), ())
    if pair and pair == fields:  # the recipe's word for what the row's meaning needs
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


def turns_in_list(row: Mapping[str, Any], name: str) -> list[Any]:
    """The turns in a column; UnusableRow if it holds no list."""
    turns = _transposed(unpacked(row[name]))
    if not isinstance(turns, list):
        raise UnusableRow("the turns are no list", f"{name!r} is {type(row[name]).__name__}")
    return turns


def require_context_columns(row: Mapping[str, Any], read: tuple[str, ...]) -> None:
    """UnusableRow if a column without which the question means nothing is not read."""
    for name in SHAPES["needed_by_pairs"].split():
        if name not in read and not _is_empty(row.get(name)):
            raise UnusableRow(f'row key "{name}" cannot be read', "its question needs it")


def _turns_of_pair(
    row: Mapping[str, Any], pair: tuple[str, ...]
) -> tuple[list[Any], tuple[str, ...]]:
    columns = pair
    questions = _turn_list(row[pair[0]])
    if questions is None:
        prompt = row[pair[0]]
        if "input" not in pair and is_text(row.get("input")):  # Alpaca's
            prompt = f"{prompt}\n\n{row['input']}"
            columns = (*columns, "input")
        questions = [{"role": "user", "content": prompt}]
    answers = _turn_list(row[pair[1]])
    if answers is None:
        thoughts = [name for name in THOUGHT_KEYS if is_text(row.get(name)) and name not in pair]
        columns = (*columns, *thoughts)
        answer = {"role": "assistant", "content": row[pair[1]]}
        answers = [answer | {name: row[name] for name in thoughts}]
    return [*questions, *answers], columns


def _turn_list(value: Any) -> list[Any] | None:
    """A column's list of turns; None if it holds something else."""
    turns = unpacked(value)
    are_turns = isinstance(turns, list) and all(
        isinstance(turn, Mapping) and any(key in turn for key in SPEAKER_KEYS) for turn in turns
    )
    return turns if are_turns else None


def from_json(value: Any) -> Any:
    """What a text of JSON holds; anything else as it is."""
    if isinstance(value, str):
        with suppress(ValueError):
            return json.loads(value)
    return value


def unpacked(value: Any) -> Any:
    """The list in a column, also if it is JSON or, as pandas writes into a CSV cell, Python."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        for read in (json.loads, ast.literal_eval):
            with suppress(ValueError, SyntaxError):
                return read(value.strip())
    return value


def _transposed(turns: Any) -> Any:
    """The list of turns, also where a data set keeps a list for each key of a turn."""
    if not isinstance(turns, Mapping) or not all(isinstance(part, list) for part in turns.values()):
        return turns
    if len({len(part) for part in turns.values()}) > 1:
        return turns
    return [dict(zip(turns, parts, strict=True)) for parts in zip(*turns.values(), strict=True)]


def _is_empty(value: Any) -> bool:
    """Whether a value says nothing; Arrow fills in nulls where another row has a value."""
    if isinstance(value, Mapping):
        return all(map(_is_empty, value.values()))
    if isinstance(value, list | tuple):
        return all(map(_is_empty, value))
    return value is None or (isinstance(value, str) and value.strip() in ("", "[]", "{}"))


# --- a turn ---------------------------------------------------------------------------------------


def _message(turn: Any, number: int) -> Message:
    if not isinstance(turn, Mapping):
        raise UnusableRow("a turn is no object", f"turn {number} is {type(turn).__name__}")
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
            "unknown role",
            f"turn {number} is from {speaker!r:.60}; expected human, gpt, system or tool",
        )
    text, thought = _text_of(turn, number)
    message: Message = {"role": role, "content": text}
    if thought:
        message["reasoning_content"] = thought
    message |= {key: turn[key] for key in EXTRA_KEYS if turn.get(key) is not None}
    calls = message.pop("tool_calls", None) or turn.get("function_call")
    if name in CALLERS:
        calls = text
        message["content"] = ""
    if not _is_empty(calls):
        message["tool_calls"] = tool_calls_of(calls, number)
    for key in message.keys() & THOUGHT_KEYS:
        if not isinstance(message[key], str):
            raise UnusableRow("turn is not text", f"turn {number}: {key} is no text")
    return message


def _text_of(turn: Mapping[str, Any], number: int) -> tuple[str, str]:
    """A turn's text and, from content in parts, its thought."""
    names = [name for name in TEXT_KEYS if turn.get(name) is not None]
    has_text = not turn.keys().isdisjoint(TEXT_KEYS)
    if not has_text and all(_is_empty(turn.get(key)) for key in (*SPOKEN_KEYS, "function_call")):
        keys = ", ".join(map(str, turn))
        raise UnusableRow("a turn has no text", f"turn {number} has keys {keys}; expected content")
    content = turn[names[0]] if names else ""
    thought = ""
    if isinstance(content, list):
        content, thought = _joined_parts(content, number)
    if not isinstance(content, str):
        raise UnusableRow(
            "turn is not text", f"turn {number} holds {type(content).__name__}; expected text"
        )
    return content, thought


def _joined_parts(parts: list[Any], number: int) -> tuple[str, str]:
    """The text and the thought of content in parts ({type: text, text: ...})."""
    texts: dict[str, list[str]] = {"text": [], "thinking": []}
    for part in parts:
        kind = str(part.get("type") or "text") if isinstance(part, Mapping) else "text"
        kind = {"input_text": "text", "output_text": "text", "reasoning": "thinking"}.get(
            kind, kind
        )
        text = part
        if isinstance(part, Mapping):
            text = part.get(kind) if part.get(kind) is not None else part.get("text")
        if isinstance(text, list):  # Mistral's thought is in parts itself
            text = _joined_parts(text, number)[0]
        if kind not in texts or not isinstance(text, str):
            raise UnusableRow("turn is not text", f"turn {number} has a part of type {kind!r}")
        texts[kind].append(text)
    return "".join(texts["text"]), "".join(texts["thinking"])


def tool_calls_of(calls: Any, number: int) -> list[Any]:
    """The calls as OpenAI writes them, with arguments as an object where they are one.

    A template would quote JSON text twice.
    """
    calls = from_json(calls)
    if isinstance(calls, Mapping):
        calls = [calls]
    if not isinstance(calls, list):
        raise UnusableRow("tool calls are no list", f"turn {number}")
    as_openai = []
    for call in calls:
        function = call.get("function") or call if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not is_text(function.get("name")):
            raise UnusableRow("a tool call names no function", f"turn {number}")
        if odd := function.keys() - CALL_KEYS:
            raise UnusableRow(f'call key "{min(odd)}" cannot be read', f"turn {number}")
        holders = [call, function]
        values = [holder[key] for holder in holders for key in ARGUMENT_KEYS if holder.get(key)]
        arguments: Any = values[0] if values else {}
        value = from_json(arguments)
        if isinstance(value, dict):
            arguments = value
        rest = {key: value for key, value in call.items() if key in ("id", "type", "index")}
        named_call = {"name": function["name"], "arguments": arguments}
        as_openai.append({**rest, "type": "function", "function": named_call})
    return as_openai


def _tools_of(row: Mapping[str, Any], turns: list[Any]) -> list[Any] | None:
    """The tools of a row or of one of its turns, each as OpenAI writes it."""
    columns = [
        unpacked(holder[name])
        for name in TOOL_COLUMNS
        for holder in (row, *turns)
        if name in holder
    ]
    tools = next((column for column in columns if not _is_empty(column)), None)
    if tools is None:
        return None
    if not isinstance(tools, list):
        raise UnusableRow("tools are no list", f"'tools' is {type(tools).__name__}")
    as_openai = []
    for tool in map(from_json, tools):
        if not isinstance(tool, Mapping) or not isinstance(tool.get("function", {}), Mapping):
            raise UnusableRow("a tool is no object", f"{tool!r:.60}")
        is_bare = "function" not in tool and "name" in tool
        as_openai.append({"type": "function", "function": tool} if is_bare else tool)
    return as_openai


# --- keys beside the text -------------------------------------------------------------------------


def _unread_keys(
    row: Mapping[str, Any], turns: list[Any], columns: tuple[str, ...], are_chosen: bool
) -> set[str]:
    """Reasons for keys that are not read; UnusableRow for one that a turn's meaning needs."""
    unread = set[str]()
    known = ROW_KEYS_READ.union(columns)
    holders = [("row", row, known)] + [("message", turn, MESSAGE_KEYS) for turn in turns]
    for holder, values, read in holders:
        for key in values.keys() - read:
            value = values[key]
            is_said = holder == "row" and any(value in turn.values() for turn in turns)
            if _is_empty(value) or is_said:
                continue
            if key in UNREADABLE_KEYS and not (are_chosen and holder == "row"):
                raise UnusableRow(f'{holder} key "{key}" cannot be read', "")
            if key not in TOOL_COLUMNS:
                unread.add(f'{holder} key "{key}" is not read')
        for same in SAME_KEYS[holder]:
            filled = [key for key in same if key in values and not _is_empty(values[key])]
            for key in filled[1:]:
                if values[key] != values[filled[0]] and key not in columns:
                    reason = f'{holder} key "{key}" is not read, as there is "{filled[0]}"'
                    unread.add(reason)
    return unread


def _mark_context(row: Mapping[str, Any], turns: list[Any], messages: list[Message]) -> set[str]:
    """Marks the answers that their data set does not want to be learnt; reasons for odd marks."""
    unread = set[str]()
    if all(map((LEARN_KEYS | IGNORE_KEYS).isdisjoint, [row, *turns])):
        return unread
    answers = [message for message in messages if message["role"] == "assistant"]
    marks = list(zip(messages, turns, strict=True))
    for name in LEARN_KEYS & row.keys():
        flags = unpacked(row[name])
        if isinstance(flags, list):
            marked = {len(messages): messages, len(answers): answers}.get(len(flags))
            if marked is None:
                raise UnusableRow(
                    "the marks of turns to learn do not fit the turns",
                    f"{name!r} has {len(flags)} of them, for {len(messages)} turns",
                )
            marks += [(message, {name: flag}) for message, flag in zip(marked, flags, strict=True)]
        elif _is_no(flags):
            raise UnusableRow("the row is marked as not to be learnt", name)
        elif not (_is_empty(flags) or flags in (1, True, "1", "true", "True")):
            unread.add(f'row key "{name}" is not read')
    for message, flags in marks:
        learn_flags = [flags[name] for name in LEARN_KEYS & flags.keys()]
        if message["role"] == "assistant":
            ignored = [flags[name] for name in IGNORE_KEYS & flags.keys()]
            if any(map(_is_no, learn_flags)) or not all(
                _is_no(flag) or _is_empty(flag) for flag in ignored
            ):
                message[IS_CONTEXT] = True
        elif any(flag is True for flag in learn_flags):
            unread.add("a turn that is no answer is marked as to be learnt")
    return unread


def _is_no(flag: Any) -> bool:
    """Whether a mark says no: 0, false or their text."""
    if isinstance(flag, list):
        return bool(flag) and all(map(_is_no, flag))
    if isinstance(flag, str):
        return flag.strip().lower() in ("0", "0.0", "false", "f", "no", "n", "off")
    return isinstance(flag, bool | int | float) and not flag
