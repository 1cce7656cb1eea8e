"""Rows as conversations: kept, mended or skipped, with counted reasons.

A row goes through two steps. `to_messages` finds its turns, whatever columns hold them, and gives
each a role and a text. `mend` makes a conversation of them that a chat template can render and that
ends with an answer. `load_conversations` takes each row through both; its `Tally` counts what was
changed or left out.
"""

import ast
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from aerie.configs.errors import UserError
from aerie.configs.read import read_yaml
from aerie.configs.schema.data import DataConfig
from aerie.data.inputs import hashed_number
from aerie.data.rows import RawRow, read_rows
from aerie.model.storage import digest

Message = dict[str, Any]  # role (user, assistant, system or tool), content, and maybe EXTRA_KEYS
TallyKind = Literal["skipped", "mended", "left out"]  # 'left out': turns or tokens

MAX_REASONS = 40  # a template's refusal may quote the text
UNKNOWN_KEYS = "keys of no known shape"

SHAPES = read_yaml(Path(__file__).with_name("shapes.yaml"))[0]
ROLES: dict[str, str] = {}  # the role of each name that data sets use
for _role, _names in SHAPES["roles"].items():
    ROLES |= dict.fromkeys(_names.split(), _role)
PAIRS = [tuple(pair) for pair in SHAPES["pairs"]]  # columns of a question and its answer
LISTS = ("conversations", "messages", "conversation")  # columns of turns
SYSTEM_COLUMNS = ("system", "system_prompt")

# What a turn may hold beside its text: a turn with one of SPOKEN_KEYS needs no text.
SPOKEN_KEYS = ("reasoning_content", "reasoning", "thinking", "tool_calls")
EXTRA_KEYS = (*SPOKEN_KEYS, "tool_call_id", "name")


class UnusableRow(UserError):
    """Carries a reason, which is counted, and a sentence about this row."""

    def __init__(self, reason: str, sentence: str) -> None:
        super().__init__(sentence or reason)
        self.reason = reason
        self.sentence = sentence


class Conversation(NamedTuple):
    """Messages that end with an answer, or tokens with a loss mask."""

    source: str  # 'file: row n'
    messages: tuple[Message, ...]
    tools: list[Any] | None = None
    tokens: tuple[list[int], list[int]] | None = None  # ids, and 1 for each that is learnt
    is_held_out: bool = False


@dataclass
class Tally:
    """Rows read; how often each (kind, reason) occurred, and where first."""

    rows: int = 0
    counts: Counter[tuple[TallyKind, str]] = field(default_factory=Counter)
    examples: dict[tuple[TallyKind, str], str] = field(default_factory=dict)

    def add(self, kind: TallyKind, reason: str, source: str, sentence: str = "") -> None:
        key = (kind, reason)
        if key not in self.counts and len(self.counts) >= MAX_REASONS:
            key = (kind, "other reasons")
        self.counts[key] += 1
        self.examples.setdefault(key, f"{source}: {sentence}" if sentence else source)

    def merge(self, tally: "Tally") -> None:
        """Adds another process's counts, except the number of rows read."""
        self.counts.update(tally.counts)
        self.examples = tally.examples | self.examples

    @property
    def kept(self) -> int:
        return self.rows - sum(n for (kind, _), n in self.counts.items() if kind == "skipped")

    def table(self) -> str:
        skipped = self.rows - self.kept
        text = f"conversations: {self.rows:,} read, {self.kept:,} kept, {skipped:,} skipped"
        # By kind, in TallyKind's order; then by count.
        for (kind, reason), count in sorted(
            self.counts.most_common(), key=lambda entry: get_args(TallyKind).index(entry[0][0])
        ):
            text += f"\n  {kind:<8} {count:>9,}  {reason} ({self.examples[kind, reason]})"
        return text

    def line(self) -> str:
        return "; ".join(" ".join(line.split()) for line in self.table().splitlines())


# --- rows -> conversations ----------------------------------------------------------------------


def load_conversations(config: DataConfig, tally: Tally) -> Iterator[Conversation]:
    """The usable conversations of every source, up to config.limit for training."""
    num_train = 0
    for row in chain.from_iterable(map(read_rows, config.conversations)):
        tally.rows += 1
        try:
            conversation = _conversation_of(row, config, tally)
        except UnusableRow as error:
            if error.reason == UNKNOWN_KEYS and row.number == 1:  # so will be all others
                raise UserError(f"{row.source} {error.sentence}") from error
            tally.add("skipped", error.reason, row.source, error.sentence)
            continue
        yield conversation
        num_train += not conversation.is_held_out
        if num_train == config.limit:
            return
    if tally.kept == 0:
        raise UserError(f"{', '.join(config.conversations)}: no usable {tally.line()}")


def read_prompts(path: Path | None, text: str | None, raw: bool = False) -> list[list[Message]]:
    """Prompts from a file's rows, or of a text; UserError if one is empty.

    raw: they get no chat template, so they have one turn each.
    """
    prompts = []
    for row in read_rows(str(path)) if path else [RawRow("--prompt", 1, text)]:
        try:
            messages = _prompt_messages(row.value)
        except UnusableRow as error:
            raise UserError(f"{row.source}: {error}; or prompt, question or turns") from error
        questions = [message["content"] for message in messages if message["role"] == "user"]
        if not questions or not all(map(is_text, questions)):
            raise UserError(f"{row.source}: the prompt is empty, or no text")
        if raw and len(messages) > 1:
            raise UserError(f"{row.source}: several turns need the chat template; leave --raw out")
        prompts.append(messages)
    if not prompts:
        raise UserError(f"{path}: holds no prompts")
    return prompts


def is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _prompt_messages(value: Any) -> list[Message]:
    row = value if isinstance(value, dict) else {"prompt": value}
    for name in ("turns", "question", "prompt"):
        if row.get(name) is not None:
            turns = row[name] if isinstance(row[name], list) else [row[name]]
            return [{"role": "user", "content": turn} for turn in turns]
    messages = to_messages(row)
    while messages and messages[-1]["role"] == "assistant":
        messages.pop()  # the target answers anew
    return messages


def _conversation_of(row: RawRow, config: DataConfig, tally: Tally) -> Conversation:
    if not isinstance(row.value, dict):
        raise UnusableRow("row is no object", f"is {type(row.value).__name__}")
    ids, mask = map(row.value.get, ("input_ids", "loss_mask"))
    if ids is not None and mask is not None:
        _check_tokens(ids, mask)
        return Conversation(row.source, (), None, (ids, mask), _is_held_out([ids, mask], config))

    # Both are given, or neither.
    fields = tuple(filter(None, (config.prompt_field, config.completion_field)))
    messages, changes = mend(to_messages(row.value, fields))
    for change in changes:
        tally.add("mended", change, row.source)
    tools = _unpacked(row.value.get("tools")) or None
    if not isinstance(tools, list | None):
        raise UnusableRow("tools are no list", f"'tools' is {type(tools).__name__}")
    # By what the row says, not by the recipe's system prompt: another prompt moves no row.
    is_held_out = _is_held_out([messages, tools], config)
    if config.system_prompt is not None and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": config.system_prompt}, *messages]
    return Conversation(row.source, tuple(messages), tools, None, is_held_out)


def _check_tokens(ids: Any, mask: Any) -> None:
    are_lists = isinstance(ids, list) and isinstance(mask, list) and len(ids) == len(mask)
    if not (
        are_lists
        and all(isinstance(number, int) for number in ids)
        and all(bit in (0, 1) for bit in mask)
    ):
        raise UnusableRow(
            "token ids and their mask do not fit", "expected integers, and as many 0 and 1"
        )


def _is_held_out(content: Any, config: DataConfig) -> bool:
    # By the content, so duplicates stay together.
    return hashed_number(digest(content), bits=64) < config.held_out * 2**64


# --- a row's turns ------------------------------------------------------------------------------


def to_messages(row: Mapping[str, Any], fields: tuple[str, ...] = ()) -> list[Message]:
    """The row's messages, not mended yet; fields: the recipe's prompt and completion columns."""
    turns = _turns_of(row, fields)
    messages = [_message(turn, number) for number, turn in enumerate(turns, start=1)]
    system = next((row[name] for name in SYSTEM_COLUMNS if is_text(row.get(name))), None)
    if system and not any(message["role"] == "system" for message in messages):
        messages.insert(0, {"role": "system", "content": system})
    return messages


def _turns_of(row: Mapping[str, Any], fields: tuple[str, ...]) -> list[Any]:
    """Turns as they stand in the row: from the recipe's columns, else a list, else a known pair."""
    pairs = [fields, *PAIRS] if fields else PAIRS
    filled = {name for name, value in row.items() if value is not None}
    pair = next((pair for pair in pairs if filled.issuperset(pair)), ())
    if pair and pair == fields:
        return _turns_of_pair(row, pair)
    for name in LISTS:
        turns = _unpacked(row.get(name))
        if isinstance(turns, list):
            return turns
    if pair:
        return _turns_of_pair(row, pair)
    if any(name in row for name in LISTS):
        return []
    expected = " and ".join(fields) or (
        "conversations, messages or a pair that data.prompt_field and data.completion_field name"
    )
    raise UnusableRow(UNKNOWN_KEYS, f"has keys {', '.join(map(str, row))}; expected {expected}")


def _turns_of_pair(row: Mapping[str, Any], pair: tuple[str, ...]) -> list[Any]:
    prompt, completion = (row[name] for name in pair)
    if isinstance(prompt, list) and isinstance(completion, list):  # of messages
        return [*prompt, *completion]
    if pair[0] == "instruction" and is_text(row.get("input")):  # Alpaca's
        prompt = f"{prompt}\n\n{row['input']}"
    return [{"role": "user", "content": prompt}, {"role": "assistant", "content": completion}]


def _unpacked(value: Any) -> Any:
    """The list in a column, also if it is JSON or, as pandas writes into a CSV cell, Python."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        for read in (json.loads, ast.literal_eval):
            with suppress(ValueError, SyntaxError):
                return read(value.strip())
    return value


def _message(turn: Any, number: int) -> Message:
    turn = turn if isinstance(turn, Mapping) else {"from": turn}
    speaker = turn.get("from") or turn.get("role")
    role = ROLES.get(str(speaker).strip().lower())
    if role is None:
        raise UnusableRow(
            "unknown role",
            f"turn {number} is from {speaker!r:.60}; expected human, gpt, system or tool",
        )
    content = turn.get("value")
    content = _joined_parts(turn.get("content") if content is None else content)
    if not isinstance(content, str | None):
        raise UnusableRow(
            "turn is not text", f"turn {number} holds {type(content).__name__}; images are not read"
        )
    message: Message = {"role": role, "content": content or ""}
    message |= {key: turn[key] for key in EXTRA_KEYS if turn.get(key) is not None}
    if isinstance(message.get("tool_calls"), list):
        message["tool_calls"] = [_tool_call(call) for call in message["tool_calls"]]
    return message


def _joined_parts(content: Any) -> Any:
    """The text of content in parts ({type: text, text: ...}); any other content as it is."""
    if not isinstance(content, list):
        return content
    texts: list[Any] = [part.get("text") if isinstance(part, Mapping) else part for part in content]
    with suppress(TypeError):  # a part is no text
        return "".join(texts)
    return content


def _tool_call(call: Any) -> Any:
    # Makes the arguments an object: a template would quote JSON text twice.
    with suppress(TypeError, KeyError, ValueError):
        if isinstance(arguments := json.loads(call["function"]["arguments"]), dict):
            return {**call, "function": {**call["function"], "arguments": arguments}}
    return call


# --- mending ------------------------------------------------------------------------------------


def mend(messages: list[Message]) -> tuple[list[Message], set[str]]:
    """Messages that a template can render, and what changed; UnusableRow without an answer."""
    changes = set[str]()
    mended = _before_empty_turn(messages, changes)
    mended = _from_first_question(mended, changes)
    mended = _joined_speakers(mended, changes)
    ends = [index for index, message in enumerate(mended, 1) if message["role"] == "assistant"]
    if not ends:
        roles = [message["role"] for message in messages]
        reason = "no answer to a user's turn" if "assistant" in roles else "no assistant turn"
        raise UnusableRow(reason, f"turns: {', '.join([*roles, *sorted(changes)])}")
    if ends[-1] < len(mended):
        changes.add("turns after the last answer cut")
    return mended[: ends[-1]], changes


def _before_empty_turn(messages: list[Message], changes: set[str]) -> list[Message]:
    """Without empty system turns, up to an empty turn: what follows it has lost its context."""
    kept = list[Message]()
    for message in messages:
        is_said = message["content"].strip() or any(message.get(key) for key in SPOKEN_KEYS)
        if is_said or message["role"] == "tool":  # a tool may well return nothing
            kept.append(message)
        elif message["role"] == "system":
            changes.add("empty system turn dropped")
        else:
            changes.add("cut before an empty turn")
            break
    return kept


def _from_first_question(messages: list[Message], changes: set[str]) -> list[Message]:
    """The system turns before the first question, and all turns from there on."""
    roles = [message["role"] for message in messages]
    first = roles.index("user") if "user" in roles else len(roles)
    leading = [message for message in messages[:first] if message["role"] == "system"]
    if len(leading) < first:
        changes.add("began with the assistant; that turn dropped")
    return [*leading, *messages[first:]]


def _joined_speakers(messages: list[Message], changes: set[str]) -> list[Message]:
    """With turns in a row by one speaker as one turn; turns with more than a text stay apart."""
    joined = list[Message]()
    for message in messages:
        role = message["role"]
        before = joined[-1] if joined else {}
        are_texts = message.keys() == before.keys() == {"role", "content"}
        if are_texts and before["role"] == role != "tool":
            # A new message: the old one is the row's.
            joined[-1] = {"role": role, "content": f"{before['content']}\n\n{message['content']}"}
            changes.add(f"two turns of the {role} in a row joined")
        else:
            joined.append(message)
    return joined
