"""The texts that a message says, and whether a rendered text holds them."""

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from aerie.data.conversations import Conversation
from aerie.data.forms import content_text, split_thought
from aerie.data.shapes import Message
from aerie.data.turns import THOUGHT_KEYS
from aerie.data.values import UnusableRow, from_json

MARK = "\ue000"  # a character of private use, as are those after it; no text has them
SHORT_TEXT = 12  # characters; the template's own words may hold a text shorter than this
SPEAKERS = {"user": "a user's turn", "system": "a system turn", "tool": "the result of a tool"}
# Other spellings of JSON's words, as Python has them.
WORDS = {"true": "True", "false": "False", "null": "None"}


class Said(NamedTuple):
    """A text that a message says, or that the tools say."""

    part: str  # what the text is, in words
    text: str
    message_index: int = -1  # -1: of the tools


class UnusableMessage(UnusableRow):
    """The error of a message that cannot be used; the conversation may end before it."""

    def __init__(self, reason: str, index: int, sentence: str = "") -> None:
        super().__init__(reason, sentence or f"message {index + 1}")
        self.index = index


class LostText(UnusableMessage):
    """The error of a text that the template leaves out."""

    def __init__(self, lost: Said) -> None:
        # The tools' texts are in no message, so the sentence quotes them.
        sentence = json.dumps(lost.text[:60]) if lost.message_index < 0 else ""
        super().__init__(f"the template leaves out {lost.part}", lost.message_index, sentence)


def said_by(message: Message, index: int = 0, with_thoughts: bool = True) -> Iterator[Said]:
    """The texts of a message: its content, its thoughts, the names and arguments of its calls."""
    if message["role"] != "assistant":
        yield Said(SPEAKERS.get(message["role"], "a turn"), content_text(message), index)
        return
    thoughts, content = split_thought(message)
    yield Said("the text of an answer", content, index)
    for thought in thoughts if with_thoughts else ():
        yield Said("the thinking of an answer", thought, index)
    for call in message.get("tool_calls") or ():
        for text in (call["function"]["name"], *_leaves(call["function"]["arguments"])):
            yield Said("the call of a tool", text, index)


def with_marks(message: Message, index: int) -> tuple[Message, dict[str, Said]]:
    """An answer with a mark at the end of each of its texts, and the text of each mark."""
    marks = dict[str, Said]()

    def mark(part: str, value: Any) -> Any:
        if isinstance(value, str) and value.strip():
            sign = chr(ord(MARK) + 1 + len(marks))
            marks[sign] = Said(part, value, index)
            return value + sign
        if isinstance(value, Mapping):
            return {key: mark(part, inner) for key, inner in value.items()}
        return [mark(part, inner) for inner in value] if isinstance(value, list) else value

    marked = dict(message)
    if isinstance(message["content"], str):
        marked["content"] = mark("the text of an answer", message["content"])
    for key in THOUGHT_KEYS:
        if key in message:
            marked[key] = mark("the thinking of an answer", message[key])
    calls = []
    for call in message.get("tool_calls") or ():
        given = call["function"]["arguments"]
        arguments = mark("the call of a tool", from_json(given))
        if isinstance(given, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        calls.append({**call, "function": {**call["function"], "arguments": arguments}})
    return (marked | {"tool_calls": calls} if calls else marked), marks


def said_before(conversation: Conversation, indices: range) -> Iterator[Said]:
    """The texts of messages that stand before an answer; before the first one, also the tools'.

    The thoughts of earlier answers are not among them: templates may drop those, and the target
    then answers without them.
    """
    for tool in (conversation.tools or ()) if indices.start == 0 else ():
        for text in _described(tool.get("function") or tool):
            yield Said("the tools", text)
    for index in indices:
        yield from said_by(conversation.messages[index], index, with_thoughts=False)


def _described(schema: Mapping[str, Any]) -> Iterator[str]:
    """What a JSON schema says in words: names, descriptions and the values to choose from."""
    for key, part in schema.items():
        if key in ("name", "description", "const") and isinstance(part, str):
            yield part
        elif key == "enum" and isinstance(part, list):
            yield from (choice for choice in part if isinstance(choice, str))
        elif isinstance(part, Mapping):
            if key == "properties":
                yield from part
            inner = part.values() if key in ("properties", "$defs", "definitions") else [part]
            for schema_part in inner:
                if isinstance(schema_part, Mapping):
                    yield from _described(schema_part)
        elif isinstance(part, list):  # anyOf, oneOf, allOf
            for choice in part:
                if isinstance(choice, Mapping):
                    yield from _described(choice)


def _leaves(value: Any) -> Iterator[str]:
    """The keys and values of a call's arguments, also if they are JSON text."""
    parts = from_json(value)
    if isinstance(parts, Mapping):
        for key, part in parts.items():
            yield str(key)
            yield from _leaves(part)
    elif isinstance(parts, list):
        for part in parts:
            yield from _leaves(part)
    elif isinstance(value, str):
        yield value
    else:
        yield json.dumps(value)  # a number, true, false or null


def find_said(said: Iterable[Said], text: str) -> tuple[list[Said], int]:
    """What a text leaves out of `said`, and where the last item that it holds ends.

    Blanks and JSON's escapes do not count. The longest items are looked up first, and a place in
    the text serves one item only: two equal calls need two places.
    """
    lost = list[Said]()
    last_end = 0
    items = sorted((item for item in said if item.text.strip()), key=lambda item: -len(item.text))
    for number, item in enumerate(items):
        spelling = next((spelt for spelt in _spellings(item.text) if spelt in text), None)
        if spelling is not None:
            start = text.index(spelling)
            end = start + len(spelling)
            last_end = max(last_end, end)
            if number + 1 < len(items):
                text = text[:start] + "\0" * len(spelling) + text[end:]
        elif "".join(item.text.split()) not in "".join(text.split()):
            lost.append(item)  # else the text has it with other blanks, at an unknown place
    return lost, last_end


def require_said(said: Iterable[Said], text: str) -> int:
    """Where the last item of `said` ends in a text; LostText if the text leaves one out."""
    lost, end = find_said(said, text)
    if lost:
        raise LostText(min(lost, key=lambda item: item.message_index))  # the first message's
    return end


def _spellings(text: str) -> Iterator[str]:
    """A text as it is, and as JSON writes it."""
    text = text.strip()
    yield text
    yield json.dumps(text, ensure_ascii=False)[1:-1]
    yield json.dumps(text)[1:-1]
    if text in WORDS:
        yield WORDS[text]


def writes_python(message: Message, text: str) -> bool:
    """Whether a template wrote a call's arguments as Python writes an object, not as JSON."""
    calls = message.get("tool_calls") or ()
    objects = [call["function"]["arguments"] for call in calls]
    return any(str(value) in text for value in objects if isinstance(value, dict) and value)
