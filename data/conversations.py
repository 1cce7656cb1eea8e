"""Rows as conversations: kept, mended or skipped, with counted reasons.

A row goes through two steps. `read_turns` (turns.py) finds what it says. `mend` makes a
conversation of it that a chat template can render and that ends with an answer.
`load_conversations` takes each row through both; its `Tally` counts what was changed or left out.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Literal, NamedTuple

from aerie.configs.errors import UserError
from aerie.configs.schema.data import DataConfig
from aerie.data.inputs import hashed_number
from aerie.data.marks import IS_CONTEXT
from aerie.data.rows import RawRow, read_rows
from aerie.data.shapes import Message
from aerie.data.turns import SPOKEN_KEYS, TOKEN_COLUMNS, UNKNOWN_KEYS, read_token_row, read_turns
from aerie.data.values import UnusableRow, unpacked
from aerie.model.storage import digest

TallyKind = Literal["skipped", "mended", "left out"]  # 'left out': turns, tokens or keys

MAX_REASONS = 60  # a template's refusal may quote the text; others are counted together


class Conversation(NamedTuple):
    """Messages that end with an answer, or tokens with a loss mask."""

    source: str  # 'file: row n'
    messages: tuple[Message, ...]
    tools: list[Any] | None = None
    tokens: tuple[list[int], list[int]] | None = None  # ids, and 1 for each that is learnt
    is_held_out: bool = False
    context_only: frozenset[int] = frozenset()  # answers that are not learnt, by index


@dataclass
class Tally:
    """How many rows were read, how often each (kind, reason) occurred, and where it did first."""

    rows: int = 0
    counts: Counter[tuple[TallyKind, str]] = field(default_factory=Counter)
    examples: dict[tuple[TallyKind, str], str] = field(default_factory=dict)

    def add(self, kind: TallyKind, reason: str, source: str, sentence: str = "") -> None:
        # A key may have half of a surrogate pair, which no terminal prints.
        reason, sentence = (text.encode(errors="replace").decode() for text in (reason, sentence))
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
        for (kind, reason), count in self.counts.most_common():
            text += f"\n  {kind:<8} {count:>9,}  {reason} ({self.examples[kind, reason]})"
        return text

    def line(self) -> str:
        return "; ".join(" ".join(line.split()) for line in self.table().splitlines())


# --- rows -> conversations ----------------------------------------------------------------------


def load_conversations(config: DataConfig, tally: Tally) -> Iterator[Conversation]:
    """The usable conversations of every source, until config.limit of them are for training.

    UserError if there is none.
    """
    num_train = 0
    for row in chain.from_iterable(map(read_rows, config.conversations)):
        tally.rows += 1
        try:
            conversation = _conversation_of(row, config, tally)
        except RecursionError:
            tally.add("skipped", "the row's values nest too deeply", row.source)
            continue
        except UnusableRow as error:
            if error.reason == UNKNOWN_KEYS and row.number == 1:  # as all others will be
                raise UserError(f"{row.source} {error.sentence}") from error
            tally.add("skipped", error.reason, row.source, error.sentence)
            continue
        yield conversation
        num_train += not conversation.is_held_out
        if num_train == config.limit:
            return
    if tally.kept == 0:
        raise UserError(f"{', '.join(config.conversations)}: no row is usable; {tally.line()}")


def system_turns(system: str | None) -> list[Message]:
    """A list of the system turn; an empty text is a turn, which switches off a template's own."""
    return [] if system is None else [{"role": "system", "content": system}]


def _conversation_of(row: RawRow, config: DataConfig, tally: Tally) -> Conversation:
    if not isinstance(row.value, dict):
        raise UnusableRow("the row is not an object", f"it is a {type(row.value).__name__}")
    ids, mask = (unpacked(row.value.get(name)) for name in TOKEN_COLUMNS)
    if ids is not None and mask is not None:
        _check_tokens(ids, mask)
        for reason in read_token_row(row.value):
            tally.add("left out", reason, row.source)
        return Conversation(row.source, (), None, (ids, mask), _is_held_out([ids, mask], config))

    # A recipe gives both, or neither.
    fields = tuple(filter(None, (config.prompt_field, config.completion_field)))
    turns = read_turns(row.value, fields)
    messages, changes = mend(turns.messages)
    is_context = [message.pop(IS_CONTEXT, False) for message in messages]
    for change in changes:
        tally.add("mended", change, row.source)
    for reason in turns.unread:
        tally.add("left out", reason, row.source)
    # What the row says decides, so that another system prompt in the recipe moves no row.
    is_held_out = _is_held_out([messages, turns.tools], config)
    if config.system_prompt is not None and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": config.system_prompt}, *messages]
        is_context = [False, *is_context]
    context_only = frozenset(index for index, flag in enumerate(is_context) if flag)
    return Conversation(row.source, tuple(messages), turns.tools, None, is_held_out, context_only)


def _check_tokens(ids: Any, mask: Any) -> None:
    are_lists = isinstance(ids, list) and isinstance(mask, list) and len(ids) == len(mask)
    if not (
        are_lists
        and all(isinstance(number, int) for number in ids)
        and all(isinstance(bit, int) and bit in (0, 1) for bit in mask)
    ):
        raise UnusableRow(
            "token ids and their mask do not fit",
            "expected a list of integers, and a list of as many 0 and 1",
        )


def _is_held_out(content: Any, config: DataConfig) -> bool:
    # The content decides, so that duplicates stay together.
    return hashed_number(digest(content), bits=64) < config.held_out * 2**64


# --- mending ------------------------------------------------------------------------------------


def mend(messages: list[Message]) -> tuple[list[Message], set[str]]:
    """Messages that a template can render, and what changed; UnusableRow if no answer is left."""
    changes = set[str]()
    mended = _before_empty_turn(messages, changes)
    mended = from_first_question(mended, changes)
    mended = joined_speakers(mended, changes)
    ends = [
        index
        for index, message in enumerate(mended, start=1)
        if message["role"] == "assistant" and IS_CONTEXT not in message
    ]
    if not ends:
        roles = [message["role"] for message in messages]
        reason = "no answer to a user's turn" if "assistant" in roles else "no assistant turn"
        if any(IS_CONTEXT in message for message in mended):
            reason = "every answer is marked as not to be learnt"
        raise UnusableRow(reason, f"turns: {', '.join([*roles, *sorted(changes)])}")
    if ends[-1] < len(mended):
        changes.add("cut after the last answer that is learnt")
    return mended[: ends[-1]], changes


def _before_empty_turn(messages: list[Message], changes: set[str]) -> list[Message]:
    """The messages before the first empty turn; those after it have lost their context."""
    kept = list[Message]()
    for message in messages:
        is_said = message["content"].strip() or any(message.get(key) for key in SPOKEN_KEYS)
        # A tool may return nothing; an empty system turn switches off a template's own prompt.
        if not is_said and message["role"] not in ("tool", "system"):
            changes.add("cut before an empty turn")
            break
        kept.append(message)
    return kept


def from_first_question(messages: list[Message], changes: set[str]) -> list[Message]:
    """The system turns before the first question, and all turns from there on."""
    roles = [message["role"] for message in messages]
    first = roles.index("user") if "user" in roles else len(roles)
    leading = [message for message in messages[:first] if message["role"] == "system"]
    if len(leading) < first:
        changes.add("dropped the turns before the first question")
    return [*leading, *messages[first:]]


def joined_speakers(messages: list[Message], changes: set[str]) -> list[Message]:
    """Joins neighbouring turns of one speaker, except turns that hold more than a text."""
    joined = list[Message]()
    for message in messages:
        role = message["role"]
        before = joined[-1] if joined else {}
        are_texts = message.keys() == before.keys() == {"role", "content"}
        if are_texts and before["role"] == role != "tool":
            # Make a new message, since the old one belongs to the row.
            texts = [text for text in (before["content"], message["content"]) if text.strip()]
            joined[-1] = {"role": role, "content": "\n\n".join(texts)}
            changes.add(f"joined two turns of the {role} in a row")
        else:
            joined.append(message)
    return joined
