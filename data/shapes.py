"""The shapes in which conversations are published, and how each becomes a list of messages {role, content, ...}."""

import difflib
import json
from collections.abc import Mapping
from typing import Any

Message = dict[str, Any]

ROLES = {
    **dict.fromkeys(("human", "user", "prompter"), "user"),
    **dict.fromkeys(
        ("gpt", "assistant", "chatgpt", "gpt4", "gpt-4", "bing", "bard", "claude", "model", "bot", "ai"), "assistant"
    ),
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("tool", "observation", "function", "function_response", "tool_response"), "tool"),
}
LISTS = ("conversations", "messages", "conversation")
PAIRS = (
    ("prompt", "completion"),
    ("prompt", "response"),
    ("question", "answer"),
    ("instruction", "output"),
    ("instruction", "response"),
    ("problem", "solution"),
    ("query", "response"),
    ("input", "output"),
)
UNKNOWN_KEYS = "keys of no known shape"
SYSTEM_FIELDS = ("system", "system_prompt")
EXTRA_KEYS = ("reasoning_content", "reasoning", "thinking", "tool_calls", "tool_call_id", "name")


class UnusableRow(Exception):
    """A row that cannot be used: the reason (countable) and a sentence about this very row."""

    def __init__(self, reason: str, sentence: str) -> None:
        super().__init__(sentence)
        self.reason = reason
        self.sentence = sentence


def pair_fields(row: Mapping[str, Any], fields: tuple[str, str] | None) -> tuple[str, str] | None:
    """The names of the prompt and completion fields that the row has: the given ones, else the usual ones."""
    for pair in ([fields] if fields else []) + list(PAIRS):
        if all(row.get(name) is not None for name in pair):
            return pair
    return None


def is_pretokenised(row: Mapping[str, Any]) -> bool:
    """Whether the row holds token ids and their loss mask."""
    return row.get("input_ids") is not None and row.get("loss_mask") is not None


def to_messages(row: Mapping[str, Any], fields: tuple[str, str] | None) -> list[Message] | None:
    """The row's messages as they stand, or None when its keys match no known shape.

    Raises UnusableRow when the shape is known and the row breaks it (an odd role, a turn without text).
    """
    given = fields if fields and all(row.get(name) is not None for name in fields) else None
    turns = next((row[name] for name in LISTS if isinstance(row.get(name), list)), None)
    if turns is not None and given is None:
        messages = [_message(turn, number) for number, turn in enumerate(turns, start=1)]
    else:
        pair = pair_fields(row, fields)
        if pair is None:
            return None
        messages = _from_pair(row, pair)
    system = next((row[name] for name in SYSTEM_FIELDS if isinstance(row.get(name), str) and row[name].strip()), None)
    if system is not None and not any(message["role"] == "system" for message in messages):
        messages.insert(0, {"role": "system", "content": system})
    return messages


def read_tools(row: Mapping[str, Any]) -> Any | None:
    """The row's tool descriptions: a list, also when it is stored as JSON text; None without any."""
    tools = row.get("tools")
    if isinstance(tools, str) and tools.strip():
        try:
            tools = json.loads(tools)
        except json.JSONDecodeError as error:
            raise UnusableRow("tools are not JSON", f"'tools' is text and not JSON ({error.msg})") from error
    if tools and not isinstance(tools, list):
        raise UnusableRow("tools are no list", f"'tools' is {type(tools).__name__}; expected a list or its JSON")
    return tools or None


def explain_keys(row: Mapping[str, Any], fields: tuple[str, str] | None) -> str:
    """The sentence for a row of no known shape: its keys, what is expected, and the closest name."""
    keys = [str(key) for key in row]
    if fields:
        missing = next((name for name in fields if row.get(name) is None), fields[0])
        matches = difflib.get_close_matches(missing, keys, n=1, cutoff=0.5)
        hint = f"; did you mean {matches[0]!r}?" if matches else ""
        return (
            f"has keys {', '.join(keys)} and no {missing!r}, which the recipe's prompt and completion fields name{hint}"
        )
    known = [*LISTS, *dict.fromkeys(name for pair in PAIRS for name in pair), "input_ids", "loss_mask"]
    close = {key: difflib.get_close_matches(key, known, n=1, cutoff=0.7) for key in keys if key not in known}
    hint = next((f"did you mean {match[0]!r} instead of {key!r}? Or " for key, match in close.items() if match), "")
    return (
        f"has keys {', '.join(keys)}; expected conversations, messages, a pair such as prompt and completion or "
        f"question and answer, or input_ids and loss_mask; {hint}set data.prompt_field and data.completion_field"
    )


def _from_pair(row: Mapping[str, Any], pair: tuple[str, str]) -> list[Message]:
    prompt, completion = row[pair[0]], row[pair[1]]
    if isinstance(prompt, list) and isinstance(completion, list):
        return [_message(turn, number) for number, turn in enumerate([*prompt, *completion], start=1)]
    for name, value in zip(pair, (prompt, completion), strict=True):
        if not isinstance(value, str):
            raise UnusableRow("field is no text", f"{name!r} is {type(value).__name__}; expected text")
    context = row.get("input")
    if pair[0] == "instruction" and isinstance(context, str) and context.strip():
        prompt = f"{prompt}\n\n{context}"
    return [{"role": "user", "content": prompt}, {"role": "assistant", "content": completion}]


def _message(turn: Any, number: int) -> Message:
    """One turn, {from, value} or {role, content}, with the target's name of its role."""
    if not isinstance(turn, Mapping):
        raise UnusableRow("turn is no object", f"turn {number} is {type(turn).__name__}; expected {{from, value}}")
    spoken = turn.get("from") or turn.get("role")
    role = ROLES.get(str(spoken).strip().lower())
    if role is None:
        raise UnusableRow("unknown role", f"turn {number} is from {spoken!r}; expected human, gpt, system or tool")
    content = turn.get("value") if turn.get("value") is not None else turn.get("content")
    message: Message = {"role": role, "content": _text(content, number)}
    for key in EXTRA_KEYS:
        if turn.get(key) is not None:
            message[key] = turn[key]
    if isinstance(message.get("tool_calls"), list):
        message["tool_calls"] = [_tool_call(call) for call in message["tool_calls"]]
    return message


def _text(content: Any, number: int) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        parts = [part.get("text") if isinstance(part, Mapping) else part for part in content]
        texts = [part for part in parts if isinstance(part, str)]
        if len(texts) == len(parts):
            return "".join(texts)
    raise UnusableRow(
        "turn is not text", f"turn {number} holds {type(content).__name__}, not text; images are not read"
    )


def _tool_call(call: Any) -> Any:
    """The call with its arguments as an object: templates print them, and JSON text would be quoted twice."""
    if not isinstance(call, Mapping) or not isinstance(call.get("function"), Mapping):
        return call
    function = dict(call["function"])
    if isinstance(function.get("arguments"), str):
        try:
            arguments = json.loads(function["arguments"])
        except json.JSONDecodeError:
            return call
        function["arguments"] = arguments if isinstance(arguments, dict) else function["arguments"]
    return {**call, "function": function}
