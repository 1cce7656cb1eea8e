"""The forms in which chat templates take the same conversation.

One template reads the arguments of a call as JSON text, another as an object; one reads a thought
in `reasoning_content`, another in `thinking`. A template that gets a form which it does not read
leaves the text out, or refuses the row.
"""

import json
from collections.abc import Callable, Iterator
from functools import cached_property, partial
from itertools import product
from typing import Any, NamedTuple, TypeVar

from aerie.data.conversations import Conversation
from aerie.data.shapes import Message
from aerie.data.turns import THOUGHT_KEYS
from aerie.data.values import UnusableRow

Rendering = TypeVar("Rendering")

BY_ORDER = "results of parallel calls paired with them by their order"
INVENTED = "pair"  # begins invented ids, of nine letters and digits, as some templates require
OPEN, CLOSE = "<think>", "</think>"  # of a thought inside the content
IN_TAGS = "<think> tags"  # names the form of a thought without a field


class MessageForm(NamedTuple):
    """One way to write a message; `change` returns messages that it does not concern unchanged."""

    name: str  # for a reader; "": as the row gives the message
    change: Callable[[Message], Message]


# --- thoughts -------------------------------------------------------------------------------------


def content_text(message: Message) -> str:
    """The text of a message's content, which may be a text, null or a list of parts."""
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    return "".join(part.get("text") or "" for part in content)


def split_thought(message: Message) -> tuple[list[str], str]:
    """An answer's thoughts, from its fields or from tags in its content, and the content's rest."""
    content = content_text(message)
    thoughts = [message[key] for key in THOUGHT_KEYS if message.get(key)]
    before, closed, after = content.partition(CLOSE)
    if not thoughts and closed:
        opening, _, thought = before.rpartition(OPEN)  # the prompt may have opened the tag
        return [thought], opening + after
    return list(dict.fromkeys(thoughts)), content


def _thought_as(key: str, message: Message) -> Message:
    if message["role"] != "assistant":
        return message
    thoughts, content = split_thought(message)
    if len(thoughts) != 1:  # one field cannot hold two different thoughts
        return message
    rest = {name: value for name, value in message.items() if name not in THOUGHT_KEYS}
    if key == IN_TAGS:
        thought = thoughts[0].strip("\n")
        return rest | {"content": f"{OPEN}\n{thought}\n{CLOSE}\n\n{content.lstrip()}"}
    return rest | {"content": content.lstrip("\n"), key: thoughts[0].strip("\n")}


# --- calls ----------------------------------------------------------------------------------------


def _arguments_as_text(message: Message) -> Message:
    if not message.get("tool_calls"):
        return message
    calls = []
    for call in message["tool_calls"]:
        function = call["function"]
        if not isinstance(function["arguments"], str):
            text = json.dumps(function["arguments"], ensure_ascii=False)
            function = {**function, "arguments": text}
        calls.append({**call, "function": function})
    return {**message, "tool_calls": calls}


def _null_content(message: Message) -> Message:
    has_calls = message.get("tool_calls") and not message["content"]
    return {**message, "content": None} if has_calls else message


def _as_given(message: Message) -> Message:
    return message


def _in_parts(message: Message) -> Message:
    """The message with its content in parts, as image processors take it."""
    return {**message, "content": [{"type": "text", "text": content_text(message)}]}


def one_by_one(conversation: Conversation) -> Conversation | None:
    """Parallel calls, given one after another with their results; None if a result is missing."""
    messages = list[Message]()
    context_only = set[int]()
    rest = list(enumerate(conversation.messages))
    while rest:
        index, message = rest.pop(0)
        calls = message.get("tool_calls") or [None]
        if len(calls) == 1:
            parts = [message]
        else:
            results = [following for _, following in rest[: len(calls)]]
            if [result["role"] for result in results] != ["tool"] * len(calls):
                return None
            del rest[: len(calls)]
            parts = _single_calls(message, results)
        if index in conversation.context_only:
            context_only.update(
                len(messages) + number
                for number, part in enumerate(parts)
                if part["role"] == "assistant"
            )
        messages += parts
    return conversation._replace(messages=tuple(messages), context_only=frozenset(context_only))


def pairings(conversation: Conversation) -> Iterator[tuple[str, Conversation]]:
    """The conversation with results that name their calls, each with a note; last, as it is.

    Templates find a result's call by the call's id, or write the result's own name. Rows often have
    neither, and then the order pairs them. apply_template refuses a text with an invented id.
    """
    results_of = dict[
        int, list[int]
    ]()  # by the index of a message with calls: its results' indices
    for index, message in enumerate(conversation.messages):
        if message.get("tool_calls"):
            results = results_of[index] = []
        elif message["role"] == "tool" and results_of:
            results.append(index)
    for with_ids in (True, False) if results_of else ():
        messages = [dict(message) for message in conversation.messages]
        for index, results in results_of.items():
            _pair(messages[index], [messages[number] for number in results], with_ids)
        if tuple(messages) != conversation.messages:
            unnamed = [
                sum(not conversation.messages[number].get("tool_call_id") for number in results)
                for results in results_of.values()
            ]
            note = BY_ORDER if max(unnamed) > 1 else ""
            yield note, conversation._replace(messages=tuple(messages))
    yield "", conversation


def _pair(caller: Message, results: list[Message], with_ids: bool) -> None:
    """Gives results their calls' names; with_ids: also invents ids for both if neither has any."""
    calls = caller["tool_calls"]
    if len(results) > len(calls):
        return
    ids = [call.get("id") for call in calls] + [result.get("tool_call_id") for result in results]
    if with_ids and not any(ids):
        calls = [{**call, "id": f"{INVENTED}{n:05d}"} for n, call in enumerate(calls)]
        caller["tool_calls"] = calls
        for result, call in zip(results, calls, strict=False):
            result["tool_call_id"] = call["id"]
    by_id = {call.get("id"): call for call in calls}
    for result, in_order in zip(results, calls, strict=False):
        call = by_id.get(result.get("tool_call_id") or "", in_order)
        result.setdefault("name", call["function"]["name"])


def _single_calls(message: Message, results: list[Message]) -> list[Message]:
    """One message for each call, followed by its result: by the call's id, or else by order."""
    calls = message["tool_calls"]
    by_id = {result.get("tool_call_id"): result for result in results}
    ids = [call.get("id") for call in calls]
    if None not in ids and by_id.keys() == set(ids) and len(by_id) == len(ids):
        results = [by_id[number] for number in ids]
    parts = list[Message]()
    for call, result in zip(calls, results, strict=True):
        spoken = message if not parts else {"role": "assistant", "content": ""}
        parts += [{**spoken, "tool_calls": [call]}, result]
    return parts


# --- a template's forms ---------------------------------------------------------------------------

CONTENT_FORMS = (MessageForm("", _as_given), MessageForm("contents given in parts", _in_parts))
CALL_FORMS = (
    MessageForm("", _as_given),
    MessageForm("the arguments of calls given as text", _arguments_as_text),
    MessageForm("the content of calls given as null", _null_content),
    MessageForm(
        "the arguments of calls given as text, their content as null",
        lambda message: _null_content(_arguments_as_text(message)),
    ),
)
THOUGHT_FORMS = (
    MessageForm("", _as_given),
    *(MessageForm(f"thoughts given in {key}", partial(_thought_as, key)) for key in THOUGHT_KEYS),
    MessageForm(f"thoughts given in {IN_TAGS}", partial(_thought_as, IN_TAGS)),
)
PROBE_QUESTION: Message = {"role": "user", "content": "probequestion"}
PROBE_CALL: Message = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {
            "id": "probecall",
            "type": "function",
            "function": {"name": "probename", "arguments": {"probekey": "probevalue"}},
        }
    ],
}
PROBE_RESULT: Message = {
    "role": "tool",
    "content": "proberesult",
    "tool_call_id": "probecall",
    "name": "probename",
}
PROBE_ANSWER: Message = {"role": "assistant", "content": "probeanswer"}
PROBE_THOUGHT: Message = {**PROBE_ANSWER, "reasoning_content": "probethought"}


class Forms:
    """The forms that a template reads.

    render: renders a conversation, or raises UnusableRow if the template leaves out a part of it.
    """

    def __init__(self, render: Callable[[Conversation], Any]) -> None:
        self.render = render

    def holds(self, conversation: Conversation) -> bool:
        """Whether the template renders all that a conversation says, as it is given."""
        try:
            self.render(conversation)
        except UnusableRow:
            return False
        return True

    def first(
        self, render: Callable[[Conversation], Rendering], conversation: Conversation
    ) -> tuple[str, Rendering]:
        """The name of the first form that can be rendered, and what `render` returns for it.

        UnusableRow if there is none: the error of the form that got furthest in the conversation.
        """
        for note, paired in pairings(conversation):
            try:
                name, rendered = self._first(render, paired)
                return "; ".join(filter(None, (note, name))), rendered
            except UnusableRow as error:
                last = error
        raise last

    def _first(
        self, render: Callable[[Conversation], Rendering], conversation: Conversation
    ) -> tuple[str, Rendering]:
        try:
            return "", render(conversation)
        except UnusableRow as error:
            last = error
        for name, formed in self.of(conversation):
            try:
                return name, render(formed)
            except UnusableRow as error:
                # In a form with more or fewer messages, an index means another message.
                if len(formed.messages) == len(conversation.messages):
                    last = max(last, error, key=lambda lost: getattr(lost, "index", -1))
        raise last

    @cached_property
    def content(self) -> MessageForm:
        """The form of all contents; the row's own if the template reads none."""
        talk = Conversation("", (PROBE_QUESTION, PROBE_ANSWER))
        known = (form for form in CONTENT_FORMS if self.holds(changed(talk, form)))
        return next(known, CONTENT_FORMS[0])

    @cached_property
    def calls(self) -> list[MessageForm]:
        return [form for form in CALL_FORMS if self._reads(form, PROBE_CALL)]

    @cached_property
    def thoughts(self) -> list[MessageForm]:
        return [form for form in THOUGHT_FORMS if self._reads(form, PROBE_THOUGHT)]

    def _reads(self, form: MessageForm, answer: Message) -> bool:
        return self.holds(changed(Conversation("", (PROBE_QUESTION, answer)), form, self.content))

    def of(self, conversation: Conversation) -> Iterator[tuple[str, Conversation]]:
        """The conversation in other forms that the template reads, each with its name."""
        answers = [turn for turn in conversation.messages if turn["role"] == "assistant"]
        has_calls = any(answer.get("tool_calls") for answer in answers)
        has_thoughts = any(split_thought(answer)[0] for answer in answers)
        # The row's own forms come first, so that a row changes as little as possible.
        call_forms = dict.fromkeys([CALL_FORMS[0], *(self.calls if has_calls else ())])
        thought_forms = dict.fromkeys([THOUGHT_FORMS[0], *(self.thoughts if has_thoughts else ())])
        orders: list[tuple[str, Conversation]] = [("", conversation)]
        if any(len(answer.get("tool_calls") or ()) > 1 for answer in answers):
            single = one_by_one(conversation)
            orders += [("parallel calls given one by one", single)] if single else []
        first = conversation.messages[0]
        if first["role"] == "system" and not content_text(first).strip():
            orders += [("an empty system turn left out", _without_first(conversation))]
        for calls, thoughts, (order, ordered) in product(call_forms, thought_forms, orders):
            names = [calls.name, thoughts.name, self.content.name, order]
            if name := "; ".join(filter(None, names)):
                yield name, changed(ordered, calls, thoughts, self.content)


def _without_first(conversation: Conversation) -> Conversation:
    context_only = frozenset(index - 1 for index in conversation.context_only)
    return conversation._replace(messages=conversation.messages[1:], context_only=context_only)


def changed(conversation: Conversation, *forms: MessageForm) -> Conversation:
    """The conversation with its messages changed to each of these forms, in order."""
    messages = conversation.messages
    for form in forms:
        messages = tuple(map(form.change, messages))
    return conversation._replace(messages=messages)
