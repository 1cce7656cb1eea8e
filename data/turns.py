"""What a row says: its turns, whatever columns hold them, each with a role and a text.

Keys that are not read are reasons to count; a row that means something else without one of them is
left out. The names that data sets use stand in shapes.yaml.
"""

import ast
import json
from collections.abc import Iterable, Iterator, Mapping
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
TOKEN_COLUMNS = ("input_ids", "loss_mask")
SYSTEM_COLUMNS = ("system", "system_prompt")
TOOL_COLUMNS = ("tools", "functions")
SPEAKER_KEYS = ("from", "role", "speaker")
TEXT_KEYS = ("value", "content", "text")
# The first of each that is filled is read.
SAME_KEYS = {
    "row": (LISTS, SYSTEM_COLUMNS),
    "message": (TEXT_KEYS, SPEAKER_KEYS),
    "part": (),
}
CALL_COLUMNS = ("tool_calls", "function_call")
ARGUMENT_KEYS = ("arguments", "parameters", "input", "args", "kwargs")  # of a call
CALL_KEYS = {"name", "id", "type", "index", "description", *ARGUMENT_KEYS}

# What a turn may hold beside its text: a turn with one of SPOKEN_KEYS needs no text.
THOUGHT_KEYS = ("reasoning_content", "reasoning", "thinking", "thought")
SPOKEN_KEYS = (*THOUGHT_KEYS, "tool_calls")
EXTRA_KEYS = {"assistant": SPOKEN_KEYS, "tool": ("tool_call_id", "name")}
# Of a part of a content: the keys, and the types, under which it has a text.
THOUGHT_PARTS = ("thinking", "reasoning")
TEXT_PARTS = ("text", "input_text", "output_text", *THOUGHT_PARTS)

THOUGHT_END = "</think>"  # ends a thought inside a content
IS_CONTEXT = "is_context"  # of a message while its row is read; no template sees it
LEARN_KEYS = frozenset(SHAPES["learn"].split())
IGNORE_KEYS = frozenset(SHAPES["ignore"].split())
UNREADABLE_KEYS = frozenset(SHAPES["unreadable"].split())
MARKS = LEARN_KEYS | IGNORE_KEYS
SAYS_YES = frozenset(SHAPES["says_yes"])
SAYS_NO = frozenset(SHAPES["says_no"])
UNKNOWN_MARK = -1.0  # a share that no mark can have
MESSAGE_KEYS = {*SPEAKER_KEYS, *TEXT_KEYS, *TOOL_COLUMNS, *SHAPES["idle_of_message"].split()}
MESSAGE_KEYS_READ = {  # by role
    role: frozenset(MESSAGE_KEYS | MARKS | {*EXTRA_KEYS.get(role, ())}) for role in SHAPES["roles"]
}
MESSAGE_KEYS_READ["assistant"] |= {"function_call"}
PART_KEYS_READ = frozenset({"type", *TEXT_PARTS, *SHAPES["idle_of_part"].split()})
ROW_KEYS_READ = frozenset(
    {*LISTS, *SYSTEM_COLUMNS, *TOOL_COLUMNS, *MARKS}
    | {*SHAPES["desired"].split(), *SHAPES["idle_of_row"].split()}
)
MAX_DEPTH = 100  # of lists and objects in each other; templates write them by recursion


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


# --- values ---------------------------------------------------------------------------------------


def is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


class TwoValues:
    """Stands for the value of a key that an object has twice; no reader takes it for a value."""

    def __repr__(self) -> str:
        return "two values"


def object_of(pairs: Iterable[tuple[Any, Any]]) -> dict[Any, Any]:
    """The object that has these keys and values."""
    pairs = list(pairs)
    values = dict(pairs)
    if len(values) < len(pairs):
        for key, value in pairs:
            if values[key] != value:
                values[key] = TwoValues()
    return values


JSON = json.JSONDecoder(object_pairs_hook=object_of)
# What the parsers of JSON and of Python raise for a text that is not theirs, or nests too deeply
NOT_READ = (ValueError, SyntaxError, TypeError, RecursionError, MemoryError)


def from_json(value: Any) -> Any:
    """What a text of JSON holds; anything else as it is."""
    if isinstance(value, str):
        with suppress(ValueError, RecursionError):
            decoded = json.loads(value)
            return decoded if is_plain(decoded) else value
    return value


def unpacked(value: Any, brackets: tuple[str, ...] = ("[",)) -> Any:
    """The list in a column, also if it is JSON or, as pandas writes into a CSV cell, Python."""
    if isinstance(value, str) and value.lstrip().startswith(brackets):
        for read in (JSON.decode, ast.literal_eval):
            with suppress(*NOT_READ):
                return read(value.strip())
    return value


def read_object(value: Any) -> Any:
    """The object or the list in a text of JSON, as `datasets` writes an item, or of Python."""
    return unpacked(value, ("[", "{"))


def is_plain(value: Any) -> bool:
    """Whether a value is one of JSON, of at most MAX_DEPTH levels."""
    level = [value]
    for _ in range(MAX_DEPTH):
        inner = list[Any]()
        for part in level:
            if isinstance(part, dict):
                inner += part.keys()
                inner += part.values()
                if not all(isinstance(key, str) for key in part):
                    return False
            elif isinstance(part, list):
                inner += part
            elif not isinstance(part, str | int | float | None):
                return False
        if not inner:
            return True
        level = inner
    return False


def _transposed(turns: Any) -> Any:
    """The list of turns, also where a data set keeps a list for each key of a turn."""
    if isinstance(turns, list):
        return list(map(read_object, turns))
    if not isinstance(turns, Mapping) or not all(isinstance(part, list) for part in turns.values()):
        return turns
    if len({len(part) for part in turns.values()}) > 1:
        return turns
    return [dict(zip(turns, parts, strict=True)) for parts in zip(*turns.values(), strict=True)]


def _is_empty(value: Any) -> bool:
    """Whether a value says nothing; Arrow fills in nulls where another row has a value."""
    try:
        if isinstance(value, Mapping):
            return all(map(_is_empty, value.values()))
        if isinstance(value, list | tuple):
            return all(map(_is_empty, value))
    except RecursionError:  # hundreds of levels
        return False
    return value is None or (isinstance(value, str) and value.strip() in ("", "[]", "{}"))


# --- the columns of the turns ---------------------------------------------------------------------


def read_turns(row: Mapping[str, Any], fields: tuple[str, ...] = ()) -> RowTurns:
    """What a row says, and which of its answers are to be learnt.

    fields: the recipe's prompt and completion columns.
    """
    turns, columns = _turns_of(row, fields)
    for name in SHAPES["desired"].split():
        # A number may be that of a class; a CSV file has texts.
        if name not in columns and str(row.get(name)).lower() == "false":
            raise UnusableRow("the answer is marked as not desired", name)
    read = messages_of(row, turns, columns, are_chosen=columns[:2] == fields)
    num_turns = len(turns)  # the row's system turn stands before them
    said = read.messages[-num_turns:] if turns else []
    return read._replace(unread=read.unread | _mark_context(row, turns, said))


def read_token_row(row: Mapping[str, Any]) -> set[str]:
    """Reasons for keys beside a row's token ids; UnusableRow if it is not to be learnt."""
    beside = {name: value for name, value in row.items() if name not in TOKEN_COLUMNS}
    return _unread_keys(beside, [], [], (), False) | _mark_context(beside, [], [])


def messages_of(
    row: Mapping[str, Any], turns: list[Any], columns: tuple[str, ...], are_chosen: bool = False
) -> RowTurns:
    """What a row's turns say, with its system turn and its tools.

    columns: those of the turns; are_chosen: the recipe names them, so no other column is needed.
    """
    messages = [_message(turn, number) for number, turn in enumerate(turns, start=1)]
    unread = _unread_keys(row, turns, messages, columns, are_chosen)
    tools = _tools_of(row, turns)
    for name in SYSTEM_COLUMNS:
        if not isinstance(row.get(name), str | None):
            raise UnusableRow("a system column is no text", name)
    # A column cannot tell an empty system turn from none.
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
    if "input" not in read and not isinstance(row.get("input"), str) and row.get("input"):
        raise UnusableRow('row key "input" is no text', "its question needs it")


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
                raise UnusableRow("turn is not text", f"{pair[0]!r} has an 'input' beside it")
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
    for key in EXTRA_KEYS.get(role, ()):
        if turn.get(key) is not None and turn[key] not in ([], {}):
            message[key] = turn[key]
    message.pop("tool_calls", None)
    if calls := _calls_of(turn, role, number):
        message["tool_calls"] = calls
    if name in CALLERS and text:
        before, close, call = text.rpartition(THOUGHT_END)
        message |= {"content": before + close, "tool_calls": _spoken_calls(call, turn, number)}
    for key in message.keys() - {"tool_calls"}:
        kinds = str | int if key == "tool_call_id" else str
        if not isinstance(message[key], kinds):
            raise UnusableRow("turn is not text", f"turn {number}: {key} is no text")
    if thought:
        if role != "assistant" or (message.get("reasoning_content") or thought) != thought:
            raise UnusableRow("a thought in a content cannot be read", f"turn {number}")
        message["reasoning_content"] = thought
    return message


def _calls_of(turn: Mapping[str, Any], role: str, number: int) -> list[Any]:
    """The calls of tools of a turn; none if it has none."""
    calls = list[Any]()
    for key in CALL_COLUMNS:
        if turn.get(key) is None or _is_empty(turn[key]):
            continue
        if role != "assistant":
            raise UnusableRow("a turn that is no answer calls tools", f"turn {number}")
        same = calls
        calls = tool_calls_of(turn[key], number)
        require_arguments(calls, number)
        if same and [call["function"] for call in same] != [call["function"] for call in calls]:
            raise UnusableRow("a turn has two sets of calls", f"turn {number}")
        calls = same or calls
    return calls


def _spoken_calls(text: str, turn: Mapping[str, Any], number: int) -> list[Any]:
    """The calls in ShareGPT's turn of calls."""
    calls = read_object(text)
    if isinstance(calls, str):
        raise UnusableRow("a call is no JSON", f"turn {number}: {text.strip()!r:.60}")
    return _calls_of({**turn, "function_call": calls}, "assistant", number)


def _text_of(turn: Mapping[str, Any], number: int) -> tuple[str, str]:
    """A turn's text and, from content in parts, its thought."""
    names = [name for name in TEXT_KEYS if turn.get(name) is not None]
    has_text = not turn.keys().isdisjoint(TEXT_KEYS)
    if not has_text and all(_is_empty(turn.get(key)) for key in (*SPOKEN_KEYS, *CALL_COLUMNS)):
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
    texts, thoughts = list[str](), list[str]()
    for part in map(read_object, parts):
        if isinstance(part, str) and len(parts) == 1:
            part = {"text": part}
        if isinstance(part, str):  # parts of one text, or several answers to choose from
            raise UnusableRow("a turn holds several texts", f"turn {number} has {len(parts)}")
        kind = str(part.get("type") or "text") if isinstance(part, Mapping) else "text"
        filled = list[str]()
        if isinstance(part, Mapping) and kind in TEXT_PARTS:
            filled = [key for key in TEXT_PARTS if part.get(key) is not None]
        if not filled:
            raise UnusableRow("turn is not text", f"turn {number} has a part of type {kind!r}")
        said = list[str]()
        for key in filled:
            text = part[key]
            if isinstance(text, list):  # Mistral's thought is in parts itself
                text = "".join(_joined_parts(text, number))
            if not isinstance(text, str):
                raise UnusableRow("turn is not text", f"turn {number} has a part of type {kind!r}")
            if text in said:
                continue
            said.append(text)
            is_thought = kind in THOUGHT_PARTS or key in THOUGHT_PARTS
            (thoughts if is_thought else texts).append(text)
    return "".join(texts), "".join(thoughts)


# --- tools and their calls ------------------------------------------------------------------------


def tool_calls_of(calls: Any, number: int) -> list[Any]:
    """The calls as OpenAI writes them, with arguments as an object where they are one.

    A template would quote JSON text twice.
    """
    calls = read_object(calls)
    if isinstance(calls, Mapping):
        calls = [calls]
    if not isinstance(calls, list):
        raise UnusableRow("tool calls are no list", f"turn {number}")
    return [_call_of(read_object(call), number) for call in calls]


def _call_of(call: Any, number: int) -> dict[str, Any]:
    function = call
    if isinstance(call, Mapping) and call.get("function"):
        function = read_object(call["function"])
    if not isinstance(function, Mapping) or not is_text(function.get("name")):
        raise UnusableRow("a tool call names no function", f"turn {number}")
    holders = [call, function]
    odd = (call.keys() - {"function"} | function.keys()) - CALL_KEYS
    odd = {key for key in odd if not all(_is_empty(holder.get(key)) for holder in holders)}
    rest = {key: value for key, value in call.items() if key in ("id", "type", "index")}
    odd |= {key for key, value in rest.items() if not isinstance(value, str | int | None)}
    if odd:
        raise UnusableRow(f'call key "{min(map(str, odd))}" cannot be read', f"turn {number}")
    values = [holder[key] for holder in holders for key in ARGUMENT_KEYS if holder.get(key)]
    values = [object_or_text(value) for value in values]
    if any(value != values[0] for value in values) or call.get("name") not in (
        None,
        function["name"],
    ):
        raise UnusableRow("a tool call says two things", f"turn {number}")
    named_call = {"name": function["name"], "arguments": values[0] if values else {}}
    return {**rest, "type": "function", "function": named_call}


def object_or_text(arguments: Any) -> Any:
    """The arguments of a call as an object, or as they are if they are none."""
    value = read_object(arguments)
    return value if isinstance(value, dict) and is_plain(value) else arguments


def require_arguments(calls: list[Any], number: int) -> None:
    """UnusableRow if the arguments of a call are no object of JSON."""
    for call in calls:
        arguments = call["function"]["arguments"]
        if not isinstance(arguments, dict) or not is_plain(arguments):
            raise UnusableRow(
                "the arguments of a call are no JSON object", f"turn {number}: {arguments!r:.60}"
            )


def _tools_of(row: Mapping[str, Any], turns: list[Any]) -> list[Any] | None:
    """The tools of a row or of one of its turns, each as OpenAI writes it."""
    tools: list[Any] | None = None
    for holder in (row, *turns):
        for name in TOOL_COLUMNS:
            if holder.get(name) and not _is_empty(holder[name]):
                more = _tools_as_openai(holder[name])
                if tools not in (None, more):
                    raise UnusableRow("the row has several sets of tools", "")
                tools = more
    return tools


def _tools_as_openai(tools: Any) -> list[Any]:
    tools = read_object(tools)
    if isinstance(tools, Mapping) and not tools.keys().isdisjoint(("function", "name")):
        tools = [tools]
    if not isinstance(tools, list):
        raise UnusableRow("tools are no list", f"'tools' is {type(tools).__name__}")
    as_openai = list[Any]()
    for tool in map(read_object, tools):
        is_object = isinstance(tool, Mapping) and is_plain(tool)
        if not is_object or not isinstance(tool.get("function", {}), Mapping):
            raise UnusableRow("a tool is no object", f"{tool!r:.60}")
        is_bare = "function" not in tool and "name" in tool
        as_openai.append({"type": "function", "function": tool} if is_bare else tool)
    return as_openai


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
            is_yes = holder == "part" and key in MARKS and _share_of(key, value) == 1
            if _is_empty(value) or is_said or is_yes:
                continue
            is_needed = key in UNREADABLE_KEYS or (holder == "part" and key in MARKS)
            if is_needed and not (are_chosen and holder == "row"):
                raise UnusableRow(f'{holder} key "{key}" cannot be read', "")
            unread.add(f'{holder} key "{key}" is not read')
        for same in SAME_KEYS[holder]:
            filled = [key for key in same if key in values and not _is_empty(values[key])]
            for key in filled[1:]:
                if values[key] != values[filled[0]] and key not in columns:
                    reason = f'{holder} key "{key}" is not read, as there is "{filled[0]}"'
                    unread.add(reason)
    return unread


def _holders_in(
    turns: list[Any], messages: list[Message]
) -> Iterator[tuple[str, Mapping[str, Any], frozenset[str]]]:
    """What has keys in the turns: its name, it, and the keys that are read."""
    for turn, message in zip(turns, messages, strict=True):
        yield "message", turn, MESSAGE_KEYS_READ[message["role"]]
        for key in TEXT_KEYS:
            if isinstance(turn.get(key), list):
                for part in _parts_in(turn[key]):
                    yield "part", part, PART_KEYS_READ


def _parts_in(content: list[Any]) -> Iterator[Mapping[str, Any]]:
    """The parts of a content, also those of a thought in parts."""
    for part in map(read_object, content):
        if isinstance(part, Mapping):
            yield part
            for key in TEXT_PARTS:
                if isinstance(part.get(key), list):
                    yield from _parts_in(part[key])


def _mark_context(row: Mapping[str, Any], turns: list[Any], messages: list[Message]) -> set[str]:
    """Marks the answers that their data set does not want to be learnt; reasons for odd marks."""
    unread = set[str]()
    if all(map(MARKS.isdisjoint, [row, *turns])):
        return unread
    answers = [message for message in messages if message["role"] == "assistant"]
    marks = list(zip(messages, turns, strict=True))
    for name in row:
        if name not in MARKS:
            continue
        flags = unpacked(row[name])
        if isinstance(flags, list) and flags:
            marked = {len(messages): messages, len(answers): answers}.get(len(flags))
            if marked is None:
                raise UnusableRow(
                    "the marks of turns to learn do not fit the turns",
                    f"{name!r} has {len(flags)} of them, for {len(messages)} turns",
                )
            marks += [(message, {name: flag}) for message, flag in zip(marked, flags, strict=True)]
            continue
        share = _share_of(name, flags)
        if share == 0:
            raise UnusableRow("the row is marked as not to be learnt", name)
        if share == UNKNOWN_MARK:
            raise UnusableRow(f'row key "{name}" is no mark that is known', f"{flags!r:.60}")
        if share != 1:
            unread.add(f'row key "{name}" is not read')
    for message, flags in marks:
        for name in flags.keys() & MARKS:
            if message["role"] == "assistant":
                unread |= _mark_answer(message, name, flags[name])
            elif flags[name] is True and name in LEARN_KEYS:
                unread.add("a turn that is no answer is marked as to be learnt")
    return unread


def _mark_answer(message: Message, name: str, flag: Any) -> set[str]:
    """Marks an answer as context if its mark says so; a reason for an odd mark."""
    share = _share_of(name, flag)
    if share in (0, UNKNOWN_MARK):
        message[IS_CONTEXT] = True
    if share == UNKNOWN_MARK:
        return {f'the mark "{name}" is none that is known: its answer is not learnt'}
    if share not in (0, 1):
        return {f'the mark "{name}" is neither 0 nor 1: its answer is learnt as a whole'}
    return set()


def _share_of(name: str, flag: Any) -> float:
    """How much a mark lets be learnt: 0, 1, another weight or UNKNOWN_MARK."""
    if name in IGNORE_KEYS:
        return {0.0: 1.0, 1.0: 0.0}.get(_number_in(flag, 0.0), UNKNOWN_MARK)
    return _number_in(flag, 1.0)


def _number_in(flag: Any, if_empty: float) -> float:
    """The number that a mark says, at most 2: 0 for false, 1 for true."""
    if _is_empty(flag):
        return if_empty
    if isinstance(flag, list) and is_plain(flag):
        numbers = {_number_in(part, if_empty) for part in flag}
        return numbers.pop() if len(numbers) == 1 else UNKNOWN_MARK
    if isinstance(flag, str):
        word = flag.strip().lower()
        if word in SAYS_NO | SAYS_YES:
            return float(word in SAYS_YES)
        with suppress(ValueError):
            flag = float(word)
    if isinstance(flag, int | float) and flag >= 0:
        return float(min(flag, 2))
    return UNKNOWN_MARK
