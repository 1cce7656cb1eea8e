"""Conversations out of published rows: kept, mended or skipped, each change with a counted reason.

Known shapes: ShareGPT turns ({from, value}), messages ({role, content}), pairs such as prompt and completion, and rows
that come as tokens (input_ids, loss_mask).
"""

import difflib
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any, Literal

from aerie.configs.errors import UserError
from aerie.configs.schema.data import DataConfig
from aerie.data.sources import RawRow, read_rows
from aerie.model.storage import digest

Message = dict[str, Any]
Kind = Literal["skipped", "mended", "left out"]
MAX_REASONS = 40  # a template may put the text itself into its refusals; the rest is counted together
UNKNOWN_KEYS = "keys of no known shape"
ROLES = {
    **dict.fromkeys("human user prompter".split(), "user"),
    **dict.fromkeys("gpt assistant chatgpt gpt4 gpt-4 bing bard claude model bot ai".split(), "assistant"),
    **dict.fromkeys("system developer".split(), "system"),
    **dict.fromkeys("tool observation function function_response tool_response".split(), "tool"),
}
LISTS = ("conversations", "messages", "conversation")
PAIRS = [
    (prompt, completion)
    for prompt, completion in (
        pair.split("/")
        for pair in "prompt/completion prompt/response question/answer instruction/output instruction/response "
        "problem/solution query/response input/output".split()
    )
]
EXTRA_KEYS = ("reasoning_content", "reasoning", "thinking", "tool_calls", "tool_call_id", "name")


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


class UnusableRow(Exception):
    """A row that cannot be used: the reason (countable) and a sentence about this very row."""

    def __init__(self, reason: str, sentence: str) -> None:
        super().__init__(sentence)
        self.reason = reason
        self.sentence = sentence


@dataclass
class Tally:
    """Rows read, and for each (kind, reason) how often it occurred and where it did first.

    skipped: the whole conversation is not used. mended: used after a change. left out: a turn or a token of a used
    conversation is not learnt.
    """

    rows: int = 0
    counts: Counter[tuple[Kind, str]] = field(default_factory=Counter)
    examples: dict[tuple[Kind, str], str] = field(default_factory=dict)

    def add(self, kind: Kind, reason: str, place: str, sentence: str = "") -> None:
        """Counts one; place is 'file: row n', sentence what is special about this row."""
        key = (kind, reason)
        if key not in self.counts and len(self.counts) >= MAX_REASONS:
            key = (kind, "other reasons")
        self.counts[key] += 1
        self.examples.setdefault(key, f"{place}: {sentence}" if sentence else place)

    @property
    def skipped(self) -> int:
        return sum(count for (kind, _), count in self.counts.items() if kind == "skipped")

    @property
    def kept(self) -> int:
        """Conversations read and not skipped."""
        return self.rows - self.skipped

    def table(self) -> str:
        """The lines printed at the end: totals, then one line per reason, the most frequent first."""
        lines = [f"conversations: {self.rows:,} read, {self.kept:,} kept, {self.skipped:,} skipped"]
        for kind in ("skipped", "mended", "left out"):
            rows = [(reason, count) for (other, reason), count in self.counts.most_common() if other == kind]
            lines += [f"  {kind:<8} {count:>9,}  {reason} ({self.examples[kind, reason]})" for reason, count in rows]
        return "\n".join(lines)

    def sentence(self) -> str:
        """The skipped reasons on one line, for an error."""
        rows = [(key, count) for key, count in self.counts.most_common() if key[0] == "skipped"]
        reasons = [f"{count:,} x {key[1]} ({self.examples[key]})" for key, count in rows]
        return "; ".join([f"{self.rows:,} read, {self.kept:,} kept", *reasons])


def split_by_hash(content_digest: str, share: float) -> bool:
    """True when the conversation is held out: decided by its content, not by its place, so duplicates stay together."""
    value = int.from_bytes(sha256(content_digest.encode()).digest()[:8], "big")
    return value < share * 2**64


def load_conversations(config: DataConfig, tally: Tally) -> Iterator[Conversation | TokenRow]:
    """The usable conversations of every source in the recipe's order, streamed; the tally counts all the others.

    Raises UserError when a source cannot be read, when the first row of a file has keys of no known shape, and when
    nothing is left at the end.
    """
    opened: set[str] = set()
    for name in config.conversations:
        for row in read_rows(name):
            tally.rows += 1
            try:
                conversation = _read(row, config, tally)
            except UnusableRow as error:
                if error.reason == UNKNOWN_KEYS and row.source not in opened:
                    raise UserError(f"{row.place} {error.sentence}") from error
                tally.add("skipped", error.reason, row.place, error.sentence)
            else:
                yield conversation
            opened.add(row.source)
    if tally.kept == 0:
        raise UserError(f"{', '.join(config.conversations)}: no usable conversation: {tally.sentence()}")


def _read(row: RawRow, config: DataConfig, tally: Tally) -> Conversation | TokenRow:
    value = row.value
    if not isinstance(value, dict):
        raise UnusableRow("row is no object", f"is {type(value).__name__}; expected an object with named fields")
    if value.get("input_ids") is not None and value.get("loss_mask") is not None:
        return _token_row(row)
    fields = None
    if config.prompt_field is not None and config.completion_field is not None:
        fields = (config.prompt_field, config.completion_field)
    raw = to_messages(value, fields)
    if raw is None:
        raise UnusableRow(UNKNOWN_KEYS, explain_keys(value, fields))
    tools = _tools(value)
    messages, changes = mend(raw)
    for reason, sentence in changes.items():
        tally.add("mended", reason, row.place, sentence)
    content = digest([messages, tools])
    if config.system_prompt is not None and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": config.system_prompt}, *messages]
    return Conversation(row.place, content, tuple(messages), tools)


def _token_row(row: RawRow) -> TokenRow:
    ids, mask = row.value["input_ids"], row.value["loss_mask"]
    are_lists = isinstance(ids, list) and isinstance(mask, list) and len(ids) == len(mask)
    if not (are_lists and all(isinstance(number, int) for number in ids) and all(value in (0, 1) for value in mask)):
        sentence = "input_ids and loss_mask must be lists of one length, of integers and of 0 and 1"
        raise UnusableRow("token ids and their mask do not fit", sentence)
    return TokenRow(row.place, digest([ids, mask]), tuple(ids), tuple(int(value) for value in mask))


def to_messages(row: Mapping[str, Any], fields: tuple[str, str] | None) -> list[Message] | None:
    """The row's messages as they stand, or None when its keys match no known shape.

    Raises UnusableRow when the shape is known and the row breaks it (an odd role, a turn without text).
    """
    pair = next((pair for pair in (fields, *PAIRS) if pair and all(row.get(name) is not None for name in pair)), None)
    turns = next((row[name] for name in LISTS if isinstance(row.get(name), list)), None)
    if pair is not None and (turns is None or pair == fields):
        prompt, completion = (row[name] for name in pair)
        context = row.get("input")
        if pair[0] == "instruction" and isinstance(context, str) and context.strip():
            prompt = f"{prompt}\n\n{context}"
        turns = [{"role": "user", "content": prompt}, {"role": "assistant", "content": completion}]
        if isinstance(prompt, list) and isinstance(completion, list):
            turns = [*prompt, *completion]
    if turns is None:
        return None
    messages = [_message(turn, number) for number, turn in enumerate(turns, start=1)]
    systems = [row[name] for name in ("system", "system_prompt") if isinstance(row.get(name), str)]
    system = next((text for text in systems if text.strip()), None)
    if system is not None and not any(message["role"] == "system" for message in messages):
        messages.insert(0, {"role": "system", "content": system})
    return messages


def _message(turn: Any, number: int) -> Message:
    """One turn, {from, value} or {role, content}, with the target's name of its role."""
    if not isinstance(turn, Mapping):
        raise UnusableRow("turn is no object", f"turn {number} is {type(turn).__name__}; expected {{from, value}}")
    speaker = turn.get("from") or turn.get("role")
    role = ROLES.get(str(speaker).strip().lower())
    if role is None:
        raise UnusableRow("unknown role", f"turn {number} is from {speaker!r}; expected human, gpt, system or tool")
    content = turn.get("value") if turn.get("value") is not None else turn.get("content")
    if isinstance(content, list):  # parts: {type: text, text}
        parts = [part.get("text") if isinstance(part, Mapping) else part for part in content]
        texts = [part for part in parts if isinstance(part, str)]
        content = "".join(texts) if len(texts) == len(parts) else content
    if content is not None and not isinstance(content, str):
        sentence = f"turn {number} holds {type(content).__name__}, not text; images are not read"
        raise UnusableRow("turn is not text", sentence)
    extra = {key: turn[key] for key in EXTRA_KEYS if turn.get(key) is not None}
    if isinstance(extra.get("tool_calls"), list):
        extra["tool_calls"] = [_tool_call(call) for call in extra["tool_calls"]]
    return {"role": role, "content": content or "", **extra}


def _tool_call(call: Any) -> Any:
    """The call with its arguments as an object: templates print them, and JSON text would be quoted twice."""
    try:
        arguments = json.loads(call["function"]["arguments"])
    except (TypeError, KeyError, ValueError):
        return call
    return {**call, "function": {**call["function"], "arguments": arguments}} if isinstance(arguments, dict) else call


def _tools(row: Mapping[str, Any]) -> Any | None:
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
    expected = (
        f"{' and '.join(fields)}, as the recipe's prompt and completion fields say"
        if fields
        else "conversations, messages, a pair such as prompt and completion or question and answer, or input_ids and "
        "loss_mask; or set data.prompt_field and data.completion_field"
    )
    known = fields or [*LISTS, *dict.fromkeys(name for pair in PAIRS for name in pair), "input_ids", "loss_mask"]
    matches = {key: difflib.get_close_matches(key, known, n=1, cutoff=0.5) for key in keys if key not in known}
    hint = next((f"; did you mean {names[0]!r} instead of {key!r}?" for key, names in matches.items() if names), "")
    return f"has keys {', '.join(keys)}; expected {expected}{hint}"


def mend(messages: list[Message]) -> tuple[list[Message], dict[str, str]]:
    """Messages that a template can render, and for each kind of change that this took a sentence about the first.

    Raises UnusableRow when no answer to a user's turn is left.
    """
    changes: dict[str, str] = {}
    kept: list[Message] = []
    for number, message in enumerate(messages, start=1):
        role, thoughts = message["role"], ("reasoning_content", "reasoning", "thinking", "tool_calls")
        if message["content"].strip() or role == "tool" or any(message.get(key) for key in thoughts):
            kept.append(message)  # a tool may well return nothing
        elif role == "system":
            changes.setdefault("empty system turn dropped", f"turn {number} is empty")
        else:  # what follows an empty turn has lost its context
            changes["cut before an empty turn"] = f"turn {number} ({role}) is empty"
            break
    first_user = next((index for index, message in enumerate(kept) if message["role"] == "user"), len(kept))
    leading = [message for message in kept[:first_user] if message["role"] == "system"]
    if len(leading) < first_user:
        changes["began with the assistant; that turn dropped"] = f"turn 1 is the {kept[0]['role']}'s"
    joined: list[Message] = []
    for message in [*leading, *kept[first_user:]]:
        role = message["role"]
        is_text = role != "tool" and set(message) == {"role", "content"}  # turns that carry more stay as they are
        if joined and is_text and joined[-1]["role"] == role and set(joined[-1]) == {"role", "content"}:
            joined[-1] = {"role": role, "content": joined[-1]["content"] + "\n\n" + message["content"]}
            reason = f"two turns of the {role} in a row joined"
            changes.setdefault(reason, f"turn {len(joined)} has a second part")
        else:
            joined.append(message)
    answers = [index for index, message in enumerate(joined) if message["role"] == "assistant"]
    if not answers:
        roles = [message["role"] for message in messages]
        why = next((f" ({sentence})" for sentence in changes.values()), "")
        reason = "no assistant turn" if "assistant" not in roles else "no answer to a user's turn"
        raise UnusableRow(reason, f"its turns are {', '.join(roles) or 'none'}{why}")
    if answers[-1] + 1 < len(joined):
        changes["turns after the last answer cut"] = f"ends with a turn of the {joined[-1]['role']}"
    return joined[: answers[-1] + 1], changes
