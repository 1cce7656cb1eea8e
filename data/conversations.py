"""Conversations out of published rows: kept, mended or skipped, each change with a counted reason."""

from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from data.config import DataConfig
from data.shapes import UNKNOWN_KEYS, Message, UnusableRow, explain_keys, is_pretokenised, read_tools, to_messages
from data.sources import RawRow, read_rows
from data.tally import Tally
from model.errors import UserError
from model.files import digest

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
