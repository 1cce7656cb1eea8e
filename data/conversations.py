"""Rows out of files and Hub data sets, and the conversations in them: kept, mended or skipped, each change counted.

Known shapes: ShareGPT turns ({from, value}), messages ({role, content}), pairs such as prompt and completion, and rows
that come as tokens (input_ids, loss_mask). JSON is read with the standard library: rows of conversations differ in
their keys, which Arrow tables cannot hold, and an error can then name its line.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

from aerie.configs.errors import UserError
from aerie.configs.schema.data import DataConfig
from aerie.model.hub import readable_errors
from aerie.model.storage import FILE, digest, first_line

# ------------------------------------------------------------------------------------------------------------- rows

HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?(:[\w.-]+){0,2}")


@dataclass(frozen=True)
class RawRow:
    """One row of a source as it stands; number counts from 1 (in a JSONL file it is the line)."""

    source: str
    number: int
    value: Any

    @property
    def place(self) -> str:
        return f"{self.source}: row {self.number:,}"


def read_rows(name: str, revision: str | None = None) -> Iterator[RawRow]:
    """The rows of a file, of every file below a directory (by name), or of a Hub data set, in their order.

    A Hub name is 'owner/name', 'owner/name:split' or 'owner/name:subset:split'; the split is 'train' unless given. Its
    revision is a branch, tag or commit; files have none.
    Raises UserError for what is missing, unreadable or not the format that its suffix promises.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        files = [file for file in sorted(path.rglob("*")) if file.suffix in READERS and file.is_file()]
        files = [file for file in files if file.name != FILE and not file.name.startswith(".")]
        if not files:
            raise UserError(f"{path}: holds no {', '.join(READERS)} file")
    elif path.exists():
        files = [path]
    elif not HUB_NAME.fullmatch(name) or path.suffix in READERS:
        raise UserError(f"{name}: no such file or directory; name local files or Hub data sets (owner/name:split)")
    else:
        for number, value in enumerate(_hub_rows(name, revision), start=1):
            yield RawRow(name, number, value)
        return
    for file in files:
        if file.suffix not in READERS:
            raise UserError(f"{file}: cannot read {file.suffix or 'a file without suffix'}; expected {list(READERS)}")
        try:
            for number, value in READERS[file.suffix](file):
                yield RawRow(str(file), number, value)
        except (OSError, ValueError) as error:  # no permission, no UTF-8, no Parquet
            raise UserError(f"{file}: cannot be read ({first_line(error)})") from error


def is_local(name: str) -> bool:
    """Whether a name of rows is a file or directory that is there."""
    return Path(name).expanduser().exists()


def hub_commit(name: str, revision: str | None = None) -> str | None:
    """The commit that a Hub data set's revision (null: its main branch) is now; null where the Hub cannot be asked."""
    from huggingface_hub import HfApi

    repo = name.split(":")[0]
    try:
        with readable_errors(repo):
            commit = HfApi().dataset_info(repo, revision=revision).sha
    except UserError:
        return None
    return None if commit is None else str(commit)


def _read_jsonl(path: Path) -> Iterator[tuple[int, Any]]:
    with path.open(encoding="utf-8-sig") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                try:
                    yield number, json.loads(line)
                except json.JSONDecodeError as error:
                    raise UserError(f"{path}:{number}: not JSON ({error.msg} at column {error.colno})") from error


def _read_json(path: Path) -> Iterator[tuple[int, Any]]:
    """The items of an array, or the lines of JSONL that is named .json, as data sets of the Hub often are."""
    text = path.read_text(encoding="utf-8-sig")
    try:
        values = json.loads(text)
    except json.JSONDecodeError as error:
        if text.lstrip().startswith("["):
            raise UserError(f"{path}:{error.lineno}: not JSON ({error.msg}); expected an array of rows") from error
        yield from _read_jsonl(path)
    else:
        yield from enumerate(values if isinstance(values, list) else [values], start=1)


def _read_parquet(path: Path) -> Iterator[tuple[int, Any]]:
    from pyarrow import parquet  # type: ignore[import-untyped]

    batches = parquet.ParquetFile(path).iter_batches(batch_size=1024)
    yield from enumerate((row for batch in batches for row in batch.to_pylist()), start=1)


def _hub_rows(name: str, revision: str | None) -> Any:
    import datasets

    identifier, *parts = name.split(":")
    subset, split = parts[0] if len(parts) == 2 else None, parts[-1] if parts else "train"
    try:
        return datasets.load_dataset(identifier, subset, split=split, revision=revision)
    except (OSError, ValueError, RuntimeError) as error:
        raise UserError(
            f"{name}: no such file, and the Hub data set cannot be loaded: {first_line(error)} "
            f"(write owner/name, owner/name:split or owner/name:subset:split; of a gated one: hf auth login)"
        ) from error


READERS: dict[str, Callable[[Path], Iterator[tuple[int, Any]]]] = {
    ".json": _read_json,
    ".jsonl": _read_jsonl,
    ".parquet": _read_parquet,
}

# ---------------------------------------------------------------------------------------------------- conversations

Message = dict[str, Any]
Kind = Literal["skipped", "mended", "left out"]
UNKNOWN_KEYS = "keys of no known shape"
ROLES = {
    **dict.fromkeys("human user prompter".split(), "user"),
    **dict.fromkeys("gpt assistant chatgpt gpt4 gpt-4 bing bard claude model bot ai".split(), "assistant"),
    **dict.fromkeys("system developer".split(), "system"),
}
LISTS = ("conversations", "messages", "conversation")
PAIRS = [
    tuple(pair.split("/"))
    for pair in "prompt/completion prompt/response question/answer instruction/output instruction/response "
    "problem/solution query/response input/output".split()
]
THOUGHTS = ("reasoning_content", "reasoning", "thinking")  # a turn that has one need not have text


@dataclass(frozen=True)
class Conversation:
    """Messages that begin with (system and) user and end with the assistant; place is 'file: row n'.

    digest names the content alone, so a duplicate has the same one wherever it stands. tokens are (input_ids,
    loss_mask) of a row that came as tokens, without messages: 1 where the assistant must produce the token.
    """

    place: str
    digest: str
    messages: tuple[Message, ...]
    tokens: tuple[list[int], list[int]] | None = None


class UnusableRow(Exception):
    """A row that cannot be used: the reason (countable) and a sentence about this very row."""

    def __init__(self, reason: str, sentence: str = "") -> None:
        super().__init__(f"{reason}: {sentence}")
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
        self.counts[kind, reason] += 1
        self.examples.setdefault((kind, reason), f"{place}: {sentence}" if sentence else place)

    @property
    def kept(self) -> int:
        """Conversations read and not skipped."""
        return self.rows - sum(count for (kind, _), count in self.counts.items() if kind == "skipped")

    def lines(self) -> list[str]:
        """The totals, then one line per reason, the most frequent first."""
        reasons = [f"{key[0]} {count:,}: {key[1]} ({self.examples[key]})" for key, count in self.counts.most_common()]
        return [f"conversations: {self.rows:,} read, {self.kept:,} kept", *reasons]


def split_by_hash(content_digest: str, share: float) -> bool:
    """True when the conversation is held out: decided by its content, not by its place, so duplicates stay together."""
    value = int.from_bytes(sha256(content_digest.encode()).digest()[:8], "big")
    return value < share * 2**64


def load_conversations(config: DataConfig, tally: Tally) -> Iterator[Conversation]:
    """The usable conversations of every source in the recipe's order, streamed; the tally counts all the others.

    Raises UserError when a source cannot be read, when the first row of a file has keys of no known shape, and when
    nothing is left at the end.
    """
    for name in config.conversations:
        for row in read_rows(name):
            tally.rows += 1
            try:
                yield _read(row, config, tally)
            except UnusableRow as error:
                if error.reason == UNKNOWN_KEYS and row.number == 1:
                    raise UserError(f"{row.place} {error.sentence}") from error
                tally.add("skipped", error.reason, row.place, error.sentence)
    if tally.kept == 0:
        raise UserError(f"{', '.join(config.conversations)}: no usable {'; '.join(tally.lines())}")


def _read(row: RawRow, config: DataConfig, tally: Tally) -> Conversation:
    value = row.value
    if not isinstance(value, dict):
        raise UnusableRow("row is no object", f"is {type(value).__name__}; expected an object with named fields")
    ids, mask = value.get("input_ids"), value.get("loss_mask")
    if ids is not None and mask is not None:
        if not (len(ids) == len(mask) and all(isinstance(number, int) for number in ids) and {*mask} <= {0, 1}):
            raise UnusableRow("token ids and their mask do not fit", "expected as many integers as 0s and 1s")
        return Conversation(row.place, digest([ids, mask]), (), (ids, mask))
    fields = None
    if config.prompt_field is not None and config.completion_field is not None:
        fields = (config.prompt_field, config.completion_field)
    raw = to_messages(value, fields)
    if raw is None:
        raise UnusableRow(UNKNOWN_KEYS, explain_keys(value, fields))
    messages, changes = mend(raw)
    for reason in changes:
        tally.add("mended", reason, row.place)
    content = digest([messages, None])
    if config.system_prompt is not None and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": config.system_prompt}, *messages]
    return Conversation(row.place, content, tuple(messages))


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
        raise UnusableRow("unknown role", f"turn {number} is from {speaker!r}; expected human, gpt or system")
    content = turn.get("value") if turn.get("value") is not None else turn.get("content")
    if isinstance(content, list) and all(isinstance(part, Mapping) and "text" in part for part in content):
        content = "".join(part["text"] for part in content)  # parts: {type: text, text}
    if content is not None and not isinstance(content, str):
        raise UnusableRow("turn is not text", f"turn {number} holds {type(content).__name__}; images are not read")
    extra = {key: turn[key] for key in (*THOUGHTS, "name") if turn.get(key) is not None}
    return {"role": role, "content": content or "", **extra}


def explain_keys(row: Mapping[str, Any], fields: tuple[str, str] | None) -> str:
    """The sentence for a row of no known shape: its keys and what is expected."""
    expected = (
        f"{' and '.join(fields)}, as the recipe's prompt and completion fields say"
        if fields
        else f"{', '.join(LISTS)}, a pair such as prompt and completion or question and answer, or input_ids and "
        "loss_mask; or set data.prompt_field and data.completion_field"
    )
    return f"has keys {', '.join(map(str, row))}; expected {expected}"


def mend(messages: list[Message]) -> tuple[list[Message], list[str]]:
    """Messages that a template can render, and each kind of change that this took.

    Raises UnusableRow when no answer to a user's turn is left.
    """
    changes: list[str] = []
    kept: list[Message] = []
    for message in messages:
        if message["content"].strip() or any(message.get(key) for key in THOUGHTS):
            kept.append(message)
        elif message["role"] == "system":
            changes.append("empty system turn dropped")
        else:  # what follows an empty turn has lost its context
            changes.append("cut before an empty turn")
            break
    first_user = next((index for index, message in enumerate(kept) if message["role"] == "user"), len(kept))
    leading = [message for message in kept[:first_user] if message["role"] == "system"]
    if len(leading) < first_user:
        changes.append("began with the assistant; that turn dropped")
    joined: list[Message] = []
    for message in [*leading, *kept[first_user:]]:
        role = message["role"]
        if joined and joined[-1]["role"] == role and {*joined[-1], *message} == {"role", "content"}:
            joined[-1] = {"role": role, "content": joined[-1]["content"] + "\n\n" + message["content"]}
            changes.append(f"two turns of the {role} in a row joined")
        else:
            joined.append(message)
    answers = [index for index, message in enumerate(joined) if message["role"] == "assistant"]
    if not answers:
        roles = ", ".join(message["role"] for message in messages)
        raise UnusableRow("no answer to a user's turn", f"its turns are {roles or 'none'}")
    if answers[-1] + 1 < len(joined):
        changes.append("turns after the last answer cut")
    return joined[: answers[-1] + 1], list(dict.fromkeys(changes))
