"""Conversations out of published rows: kept, mended or skipped, each change with a counted reason."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any, Literal

from aerie.configs.errors import UserError
from aerie.configs.schema.data import DataConfig
from aerie.data.sources import RawRow, read_rows
from aerie.model.storage import digest

__all__ = ["Conversation", "Tally", "TokenRow", "load_conversations", "split_by_hash"]

JOINED_ROLES = ("user", "assistant", "system")


@dataclass(frozen=True)
class Conversation:
    """Messages that begin with (system and) user and end with the assistant; place is 'file: row n'.

    digest names the content alone, so a duplicate has the same one wherever it stands.
    """

    place: str
    digest: str
    messages: tuple[Message, ...]
    tools: Any | None = None


@dataclass(frozen=True)
class TokenRow:
    """A row that came as tokens: loss_mask[t] is 1 where the assistant must produce token t."""

    place: str
    digest: str
    input_ids: tuple[int, ...]
    loss_mask: tuple[int, ...]


def split_by_hash(content_digest: str, share: float) -> bool:
    """True when the conversation is held out: decided by its content, not by its place, so duplicates stay together."""
    value = int.from_bytes(sha256(content_digest.encode()).digest()[:8], "big")
    return value < share * 2**64


def load_conversations(config: DataConfig, tally: Tally) -> Iterator[Conversation | TokenRow]:
    """The usable conversations of every source in the recipe's order, streamed; the tally counts all the others.

    Raises UserError when a source cannot be read, when the first row of a file has keys of no known shape, and when
    nothing is left at the end.
    """
    fields = _given_fields(config)
    opened: set[str] = set()
    for name in config.conversations:
        for row in read_rows(name):
            tally.rows += 1
            try:
                kept = _read(row, fields, config.system_prompt, tally)
            except UnusableRow as error:
                if error.reason == UNKNOWN_KEYS and row.source not in opened:
                    raise UserError(f"{row.place} {error.sentence}") from error
                tally.skip(error.reason, row.place, error.sentence)
                continue
            finally:
                opened.add(row.source)
            yield kept
    if tally.kept == 0:
        raise UserError(f"{', '.join(config.conversations)}: no usable conversation: {tally.sentence()}")


def _given_fields(config: DataConfig) -> tuple[str, str] | None:
    if config.prompt_field is None or config.completion_field is None:
        return None
    return config.prompt_field, config.completion_field


def _read(row: RawRow, fields: tuple[str, str] | None, system: str | None, tally: Tally) -> Conversation | TokenRow:
    if not isinstance(row.value, dict):
        raise UnusableRow("row is no object", f"is {type(row.value).__name__}; expected an object with named fields")
    if is_pretokenised(row.value):
        return _token_row(row)
    raw = to_messages(row.value, fields)
    if raw is None:
        raise UnusableRow(UNKNOWN_KEYS, explain_keys(row.value, fields))
    tools = read_tools(row.value)
    messages, mends = mend(raw)
    for reason, sentence in dict(reversed(mends)).items():  # each reason once, with its first sentence
        tally.mend(reason, row.place, sentence)
    content = digest([messages, tools])
    if system is not None and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": system}, *messages]
    return Conversation(row.place, content, tuple(messages), tools)


def _token_row(row: RawRow) -> TokenRow:
    ids, mask = row.value["input_ids"], row.value["loss_mask"]
    if not (_all_integers(ids) and _all_integers(mask)):
        raise UnusableRow("token ids or mask are no integers", "input_ids and loss_mask must be lists of integers")
    if len(ids) != len(mask):
        sentence = f"input_ids has {len(ids):,} entries, loss_mask {len(mask):,}; they must be as long as each other"
        raise UnusableRow("mask and ids differ in length", sentence)
    if not set(mask) <= {0, 1}:
        odd = next(value for value in mask if value not in (0, 1))
        raise UnusableRow("mask is not 0 and 1", f"loss_mask holds {odd}; expected 0 and 1")
    return TokenRow(row.place, digest([ids, mask]), tuple(ids), tuple(int(value) for value in mask))


def _all_integers(values: Any) -> bool:
    return isinstance(values, list) and all(isinstance(value, int) for value in values)


def mend(messages: list[Message]) -> tuple[list[Message], list[tuple[str, str]]]:
    """Messages that a template can render, and (reason, sentence) of each change that this took.

    Raises UnusableRow when no answer to a user's turn is left.
    """
    mends: list[tuple[str, str]] = []
    roles = [message["role"] for message in messages]
    kept = _without_empty_turns(messages, mends)
    kept = _from_the_first_user(kept, mends)
    kept = _join_neighbours(kept, mends)
    last = max((index for index, message in enumerate(kept) if message["role"] == "assistant"), default=-1)
    if last < 0:
        why = f" ({mends[0][1]})" if mends else ""
        reason = "no assistant turn" if "assistant" not in roles else "no answer to a user's turn"
        raise UnusableRow(reason, f"its turns are {', '.join(roles) or 'none'}{why}")
    if last + 1 < len(kept):
        mends.append(("turns after the last answer cut", f"ends with a turn of the {kept[-1]['role']}"))
    return kept[: last + 1], mends


def _is_empty(message: Message) -> bool:
    thoughts = ("reasoning_content", "reasoning", "thinking", "tool_calls")
    return not message["content"].strip() and not any(message.get(key) for key in thoughts)


def _without_empty_turns(messages: list[Message], mends: list[tuple[str, str]]) -> list[Message]:
    """Without empty system turns, and without all that follows another empty turn: its context would be missing."""
    kept: list[Message] = []
    for number, message in enumerate(messages, start=1):
        if not _is_empty(message):
            kept.append(message)
        elif message["role"] == "system":
            mends.append(("empty system turn dropped", f"turn {number} is empty"))
        elif message["role"] == "tool":  # a tool may well return nothing
            kept.append(message)
        else:
            mends.append(("cut before an empty turn", f"turn {number} ({message['role']}) is empty"))
            break
    return kept


def _from_the_first_user(messages: list[Message], mends: list[tuple[str, str]]) -> list[Message]:
    """Without answers that stand before the first question."""
    first = next((index for index, message in enumerate(messages) if message["role"] == "user"), len(messages))
    leading = [message for message in messages[:first] if message["role"] == "system"]
    if len(leading) < first:
        mends.append(("began with the assistant; that turn dropped", f"turn 1 is the {messages[0]['role']}'s"))
    return leading + messages[first:]


def _join_neighbours(messages: list[Message], mends: list[tuple[str, str]]) -> list[Message]:
    """With neighbouring turns of one role as one turn; turns that carry more than text stay as they are."""
    kept: list[Message] = []
    for message in messages:
        role = message["role"]
        plain = set(message) == {"role", "content"}
        if (
            kept
            and plain
            and role in JOINED_ROLES
            and kept[-1]["role"] == role
            and set(kept[-1]) == {"role", "content"}
        ):
            kept[-1] = {"role": role, "content": kept[-1]["content"] + "\n\n" + message["content"]}
            mends.append((f"two turns of the {role} in a row joined", f"turn {len(kept)} has a second part"))
        else:
            kept.append(message)
    return kept


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


Kind = Literal["skipped", "mended", "left out"]
MAX_REASONS = 40  # a template may put the text itself into its refusals; the rest is counted together


@dataclass
class Finding:
    """How often one reason occurred, and the first place where it did."""

    count: int
    example: str


@dataclass
class Tally:
    """Rows read, and per reason a count with its first example.

    skipped: the whole conversation is not used. mended: used after a change. left out: a turn or a token of a used
    conversation is not learnt.
    """

    rows: int = 0
    findings: dict[tuple[Kind, str], Finding] = field(default_factory=dict)

    def skip(self, reason: str, place: str, sentence: str = "") -> None:
        """Counts a conversation that is not used; place is 'file: row n', sentence what is special about this one."""
        self._count("skipped", reason, place, sentence)

    def mend(self, reason: str, place: str, sentence: str = "") -> None:
        """Counts a conversation that is used after a change."""
        self._count("mended", reason, place, sentence)

    def leave_out(self, reason: str, place: str, sentence: str = "") -> None:
        """Counts a turn or token of a used conversation that is not learnt."""
        self._count("left out", reason, place, sentence)

    def total(self, kind: Kind) -> int:
        """How often anything of this kind happened."""
        return sum(finding.count for (found, _), finding in self.findings.items() if found == kind)

    @property
    def kept(self) -> int:
        """Conversations read and not skipped."""
        return self.rows - self.total("skipped")

    def table(self) -> str:
        """The lines printed at the end: totals, then one line per reason, the most frequent first."""
        lines = [f"conversations: {self.rows:,} read, {self.kept:,} kept, {self.total('skipped'):,} skipped"]
        for kind in ("skipped", "mended", "left out"):
            for reason, finding in self._of(kind):
                lines.append(f"  {kind:<8} {finding.count:>9,}  {reason} ({finding.example})")
        return "\n".join(lines)

    def sentence(self) -> str:
        """The skipped reasons on one line, for an error."""
        reasons = [f"{finding.count:,} x {reason} ({finding.example})" for reason, finding in self._of("skipped")]
        return "; ".join([f"{self.rows:,} read, {self.kept:,} kept", *reasons])

    def _of(self, kind: Kind) -> list[tuple[str, Finding]]:
        rows = [(reason, finding) for (found, reason), finding in self.findings.items() if found == kind]
        return sorted(rows, key=lambda row: -row[1].count)

    def _count(self, kind: Kind, reason: str, place: str, sentence: str) -> None:
        key: tuple[Kind, str] = (kind, reason)
        if key not in self.findings and len(self.findings) >= MAX_REASONS:
            key = (kind, "other reasons")
        if key in self.findings:
            self.findings[key].count += 1
        else:
            self.findings[key] = Finding(1, f"{place}: {sentence}" if sentence else place)
