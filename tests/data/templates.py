"""Conversations of every kind through the chat templates that trl ships: what each one keeps.

`python -m tests.data.templates` writes the table of docs/data.md.
"""

from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution
from itertools import groupby, product
from pathlib import Path
from typing import Any, NamedTuple

from aerie.data.chat import Chat, Rendered
from aerie.data.conversations import Conversation, Tally
from aerie.data.shapes import Message
from aerie.data.values import UnusableRow
from tests.data.chat_targets import build_tokenizer

PAGE = Path(__file__).parents[2] / "docs/data.md"
MARKERS = ("<!-- templates -->\n", "<!-- /templates -->\n")
END = "<|im_end|>"


def template_paths() -> list[Path]:
    """The templates in trl's wheel; none if it is not installed."""
    try:
        folder = Path(str(distribution("trl").locate_file("trl/chat_templates")))
    except PackageNotFoundError:
        return []
    return sorted(folder.glob("*.jinja"))


class Kind(NamedTuple):
    """What a conversation has."""

    system: str | None = None
    questions: int = 1
    has_thoughts: bool = False
    calls: str = ""  # one, parallel or nested, before the last answer
    content: str | None = ""  # beside the calls

    def conversation(self) -> Conversation:
        messages: list[Message] = []
        if self.system is not None:
            messages.append({"role": "system", "content": self.system})
        for number in range(self.questions):
            messages.append({"role": "user", "content": f"question{number} is asked"})
            if self.calls and number == self.questions - 1:
                messages += self._calls()
            answer = {"role": "assistant", "content": f"answer{number} is given"}
            if self.has_thoughts:
                answer["reasoning_content"] = f"thought{number} comes first"
            messages.append(answer)
        return Conversation("here: row 1", tuple(messages), TOOLS if self.calls else None)

    def _calls(self) -> Iterator[Message]:
        calls = CALLS[self.calls]
        caller: Message = {"role": "assistant", "content": self.content, "tool_calls": calls}
        if self.has_thoughts:
            caller["reasoning_content"] = "thoughtful call"
        yield caller
        for call in calls:
            name = call["function"]["name"]
            result = {"role": "tool", "content": f"result of {name}"}
            yield {**result, "tool_call_id": call["id"], "name": name}


def _call(number: int, arguments: dict[str, Any]) -> dict[str, Any]:
    function = {"name": f"lookup{number}", "arguments": arguments}
    return {"id": f"call{number:05d}", "type": "function", "function": function}


CALLS = {
    "one": [_call(0, {"city": "Paris"})],
    "parallel": [_call(0, {"city": "Paris"}), _call(1, {"city": "Rome"})],
    "nested": [_call(2, {"where": {"city": "Zürich", "days": [1, 23]}, "is_exact": True})],
}
VALUES = {"one": ["Paris"], "parallel": ["Paris", "Rome"], "nested": ["Zürich", "23"]}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": f"lookup{number}",
            "description": f"describes {number} things",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
    for number in range(3)
]
FEATURES = {
    "system turn": Kind(system="system says"),
    "empty system turn": Kind(system=""),
    "several turns": Kind(questions=2),
    "thought": Kind(has_thoughts=True),
    "call": Kind(calls="one"),
    "parallel calls": Kind(calls="parallel"),
    "nested arguments": Kind(calls="nested"),
    "text beside a call": Kind(calls="one", content="calling now"),
    "thoughtful call": Kind(has_thoughts=True, calls="one"),
}
KINDS = [
    *(Kind(*kind) for kind in product((None, "system says"), (1, 2), (False, True), ("", *CALLS))),
    *FEATURES.values(),
    Kind(calls="one", content=None),
    Kind(has_thoughts=True, calls="one", content="calling now"),
]


def render(template: str, kind: Kind) -> tuple[list[Rendered], Tally]:
    """What is learnt of a conversation; UnusableRow if it is left out, with the reason."""
    tokenizer = build_tokenizer(template, END)
    tally = Tally()
    return Chat(tokenizer, {tokenizer.eos_token_id}, tally).render(kind.conversation()), tally


def lost_texts(kind: Kind, rows: list[Rendered]) -> list[str]:
    """Texts of the conversation that are not where they belong: answers in spans, others not."""
    learnt = "".join(row.text[span.start : span.end] for row in rows for span in row.answers)
    learnt = learnt.replace("Z\\u00fcrich", "Zürich")
    lost = []
    for message in kind.conversation().messages:
        text = message["content"] or ""
        if message["role"] == "assistant":
            texts = [text, message.get("reasoning_content", "")]
            texts += [call["function"]["name"] for call in message.get("tool_calls", ())]
            lost += [part for part in texts if part not in learnt]
        elif text and (text in learnt or not all(text in row.text for row in rows[-1:])):
            lost.append(text)
    return lost + [value for value in VALUES.get(kind.calls, []) if value not in learnt]


def is_cut(tally: Tally) -> bool:
    """Whether a conversation ends before what the template loses, which is then counted."""
    losses = ("the template leaves out", "the template rewrites", "the template joins")
    return any(reason.startswith(losses) for _, reason in tally.counts)


def outcome(template: str, kind: Kind) -> str:
    try:
        _, tally = render(template, kind)
    except UnusableRow:
        return "no"
    if is_cut(tally):
        return "no"
    return "in another form" if any(sort == "mended" for sort, _ in tally.counts) else "yes"


def table() -> str:
    """Template x feature, one row for templates that keep the same."""
    cells = {
        path.stem: tuple(outcome(path.read_text("utf-8"), kind) for kind in FEATURES.values())
        for path in template_paths()
    }
    lines = [f"| template | {' | '.join(FEATURES)} |", "|---" * (len(FEATURES) + 1) + "|"]
    by_cells = sorted(cells, key=lambda name: (cells[name], name))
    for row, names in groupby(by_cells, key=cells.__getitem__):
        lines.append(f"| {', '.join(names)} | {' | '.join(row)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    before, rest = PAGE.read_text(encoding="utf-8").split(MARKERS[0])
    after = rest.split(MARKERS[1])[1]
    PAGE.write_text(before + MARKERS[0] + table() + MARKERS[1] + after, encoding="utf-8")


if __name__ == "__main__":
    main()
