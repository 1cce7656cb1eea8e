"""Conversations in files and Hub data sets: kept, mended or skipped, with counted reasons."""

import ast
import csv
import json
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import chain
from pathlib import Path
from typing import Any, Literal, NamedTuple

from aerie.configs.errors import LONE_SURROGATE, UserError
from aerie.configs.read import parse_json, read_yaml
from aerie.configs.schema.data import DataConfig
from aerie.data.inputs import ROW_SUFFIXES, is_here, row_files
from aerie.model.hub import readable_errors
from aerie.model.storage import digest, first_line

Message = dict[str, Any]
TallyKind = Literal["skipped", "mended", "left out"]  # 'left out': turns or tokens
MAX_REASONS = 40  # a template's refusal may quote the text
UNKNOWN_KEYS = "keys of no known shape"
SHAPES = read_yaml(Path(__file__).with_name("shapes.yaml"))[0]
ROLES = {name: role for role, names in SHAPES["roles"].items() for name in names.split()}
LISTS = ("conversations", "messages", "conversation")
THOUGHTS = (
    "reasoning_content",
    "reasoning",
    "thinking",
    "tool_calls",
)  # a turn with one of them needs no text


class RawRow(NamedTuple):
    place: str  # 'file: row n'
    number: int  # from 1; in JSONL the line
    value: Any


class Conversation(NamedTuple):
    """Messages that end with an answer, or tokens with a loss mask."""

    place: str
    messages: tuple[Message, ...]
    tools: Any | None = None
    tokens: tuple[list[int], list[int]] | None = None  # ids, and 1 for what is learnt
    is_held_out: bool = False


class UnusableRow(UserError):
    """Carries a reason, which is counted, and a sentence about this row."""

    def __init__(self, reason: str, sentence: str) -> None:
        super().__init__(sentence or reason)
        self.reason, self.sentence = reason, sentence


@dataclass
class Tally:
    """Rows read; how often each (kind, reason) occurred, and where first."""

    rows: int = 0
    counts: Counter[tuple[TallyKind, str]] = field(default_factory=Counter)
    examples: dict[tuple[TallyKind, str], str] = field(default_factory=dict)

    def add(self, kind: TallyKind, reason: str, place: str, sentence: str = "") -> None:
        key = (kind, reason)
        if key not in self.counts and len(self.counts) >= MAX_REASONS:
            key = (kind, "other reasons")
        self.counts[key] += 1
        self.examples.setdefault(key, f"{place}: {sentence}" if sentence else place)

    def merge(self, other: "Tally") -> None:
        """Adds another process's counts, except the number of rows read."""
        self.counts.update(other.counts)
        self.examples = other.examples | self.examples

    @property
    def kept(self) -> int:
        return self.rows - sum(
            count for (kind, _), count in self.counts.items() if kind == "skipped"
        )

    def table(self) -> str:
        lines = [
            f"conversations: {self.rows:,} read, {self.kept:,} kept, {self.rows - self.kept:,} skipped"
        ]
        for kind in ("skipped", "mended", "left out"):
            rows = [
                (reason, count)
                for (other, reason), count in self.counts.most_common()
                if other == kind
            ]
            lines += [
                f"  {kind:<8} {count:>9,}  {reason} ({self.examples[kind, reason]})"
                for reason, count in rows
            ]
        return "\n".join(lines)

    def line(self) -> str:
        return "; ".join(" ".join(line.split()) for line in self.table().splitlines())


def hub_commit(name: str, revision: str | None) -> str | None:
    """The commit of a Hub data set's revision (None: main); None if the Hub does not answer."""
    from huggingface_hub import HfApi

    repo = name.split(":")[0]
    with suppress(UserError), readable_errors(repo):
        return HfApi().dataset_info(repo, revision=revision).sha
    return None


def read_rows(name: str, revision: str | None = None) -> Iterator[RawRow]:
    """The rows of a file, a directory's files, or a Hub data set 'owner/name[:[subset:]split]' (split: 'train')."""
    path = Path(name).expanduser()
    if not is_here(name):
        import datasets

        identifier, *parts = name.split(":")
        subset, split = parts[0] if len(parts) == 2 else None, parts[-1] if parts else "train"
        try:
            rows: Any = datasets.load_dataset(identifier, subset, split=split, revision=revision)
        except (OSError, ValueError, RuntimeError) as error:
            fix = "write owner/name:subset:split; for a gated one: hf auth login"
            raise UserError(f"{name}: no such data set: {first_line(error)} ({fix})") from error
        yield from (
            RawRow(f"{name}: row {number:,}", number, value)
            for number, value in enumerate(rows, start=1)
        )
        return
    files = row_files(path) if path.is_dir() else [path]
    if not files or files[0].suffix not in ROW_SUFFIXES:
        raise UserError(f"{path}: cannot be read; expected {', '.join(ROW_SUFFIXES)} files")
    for file in files:
        try:
            yield from (
                RawRow(f"{file}: row {number:,}", number, value)
                for number, value in _numbered(file)
            )
        except (OSError, ValueError, csv.Error) as error:  # no permission, no UTF-8, no Parquet
            raise UserError(f"{file}: cannot be read ({first_line(error)})") from error


def read_prompts(path: Path | None, text: str | None, raw: bool = False) -> list[list[Message]]:
    """Prompts from a file's rows, or of a text; UserError if one is empty. raw: no chat template, so one turn each."""
    prompts = []
    for row in read_rows(str(path)) if path else [RawRow("--prompt", 1, text)]:
        values = row.value if isinstance(row.value, dict) else {"prompt": row.value}
        turns = next(
            (values[name] for name in ("turns", "question", "prompt") if name in values), None
        )
        turns = turns if isinstance(turns, list | None) else [turns]
        try:
            messages = (
                to_messages(values)
                if turns is None
                else [{"role": "user", "content": turn} for turn in turns]
            )
        except UnusableRow as error:
            raise UserError(f"{row.place}: {error}; or prompt, question or turns") from error
        while messages and messages[-1]["role"] == "assistant":
            messages.pop()  # the target answers anew
        asked = [message["content"] for message in messages if message["role"] == "user"]
        if not asked or not all(map(is_text, asked)):
            raise UserError(f"{row.place}: the prompt is empty, or no text")
        if raw and len(messages) > 1:
            raise UserError(f"{row.place}: several turns need the chat template; leave --raw out")
        prompts.append(messages)
    if not prompts:
        raise UserError(f"{path}: holds no prompts")
    return prompts


def _numbered(path: Path) -> Iterator[tuple[int, Any]]:
    if path.suffix == ".parquet":
        from pyarrow import parquet  # type: ignore[import-untyped]

        batches = parquet.ParquetFile(path).iter_batches(batch_size=1024)
        yield from enumerate((row for batch in batches for row in batch.to_pylist()), start=1)
        return
    if path.suffix == ".csv":
        csv.field_size_limit(sys.maxsize)  # else 128 KiB, and a conversation may be longer
        with path.open(encoding="utf-8-sig", newline="") as file:
            yield from enumerate(csv.DictReader(file), start=1)
        return
    # An array's items, one object, or JSONL (often named .json on the Hub). Arrow's readers name no line.
    with path.open(encoding="utf-8-sig") as file:
        text, number = file.read().strip() if path.suffix == ".json" else "", 1
        try:
            value, end = parse_json(text, json.JSONDecoder().raw_decode) if text else (None, -1)
            if end == len(text):
                yield from enumerate(value if isinstance(value, list) else [value], start=1)
                return
            file.seek(0)
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield number, parse_json(line.strip())
        except UnicodeDecodeError:
            raise
        except ValueError as error:
            at, why = (
                number,
                first_line(error).partition(";")[0],
            )  # of a value that is too deep or too long
            if isinstance(error, json.JSONDecodeError):
                at, why = number + error.lineno - 1, f"{error.msg} at column {error.colno}"
            raise UserError(f"{path}:{at}: not JSON ({why}); mend or delete the line") from error


def load_conversations(config: DataConfig, tally: Tally) -> Iterator[Conversation]:
    """The usable conversations of every source, up to config.limit for training."""
    num_train = 0
    for row in chain.from_iterable(map(read_rows, config.conversations)):
        tally.rows += 1
        try:
            conversation = _conversation_of(row, config, tally)
        except RecursionError:
            tally.add("skipped", "nested too deeply", row.place)
        except UnusableRow as error:
            if error.reason == UNKNOWN_KEYS and row.number == 1:
                raise UserError(f"{row.place} {error.sentence}") from error
            tally.add("skipped", error.reason, row.place, error.sentence)
        else:
            yield conversation
            num_train += not conversation.is_held_out
            if config.limit is not None and num_train >= config.limit:
                return
    if tally.kept == 0:
        counts = tally.line().removeprefix("conversations: ")
        raise UserError(f"{', '.join(config.conversations)}: no usable conversation: {counts}")


def is_text(value: Any) -> bool:
    """Whether value is text that a tokenizer takes, and not blank."""
    return isinstance(value, str) and bool(value.strip()) and not LONE_SURROGATE.search(value)


def _conversation_of(row: RawRow, config: DataConfig, tally: Tally) -> Conversation:
    value = row.value
    if not isinstance(value, dict):
        raise UnusableRow("row is no object", f"is {type(value).__name__}")
    ids, mask, tools = value.get("input_ids"), value.get("loss_mask"), value.get("tools")
    if ids is not None and mask is not None:
        are_lists = isinstance(ids, list) and isinstance(mask, list) and len(ids) == len(mask)
        if not (
            are_lists
            and all(isinstance(number, int) for number in ids)
            and all(bit in (0, 1) for bit in mask)
        ):
            raise UnusableRow(
                "token ids and their mask do not fit", "expected integers, and as many 0 and 1"
            )
        return Conversation(row.place, (), None, (ids, mask), _is_held_out([ids, mask], config))
    fields = tuple(
        name for name in (config.prompt_field, config.completion_field) if name is not None
    )
    messages, reasons = mend(to_messages(value, fields))
    tools = _unpacked(tools)
    if tools and not isinstance(tools, list):
        raise UnusableRow("tools are no list", f"'tools' is {type(tools).__name__}")
    for reason in reasons:
        tally.add("mended", reason, row.place)
    is_held_out = _is_held_out([messages, tools or None], config)
    if config.system_prompt is not None and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": config.system_prompt}, *messages]
    return Conversation(row.place, tuple(messages), tools or None, None, is_held_out)


def _is_held_out(content: Any, config: DataConfig) -> bool:
    # By the content, so duplicates stay together.
    return (
        int.from_bytes(sha256(digest(content).encode()).digest()[:8], "big")
        < config.held_out * 2**64
    )


def to_messages(row: Mapping[str, Any], fields: tuple[str, ...] = ()) -> list[Message]:
    """The row's messages, not mended yet; fields: the recipe's prompt and completion columns."""
    pairs = [
        pair
        for pair in (fields, *SHAPES["pairs"])
        if pair and all(row.get(name) is not None for name in pair)
    ]
    turns = next(
        (turns for name in LISTS if isinstance(turns := _unpacked(row.get(name)), list)), None
    )
    if pairs and (turns is None or pairs[0] == fields):
        prompt, completion = (row[name] for name in pairs[0])
        context = row.get("input")
        if pairs[0][0] == "instruction" and isinstance(context, str) and context.strip():
            prompt = f"{prompt}\n\n{context}"
        turns = [{"role": "user", "content": prompt}, {"role": "assistant", "content": completion}]
        if isinstance(prompt, list) and isinstance(completion, list):
            turns = [*prompt, *completion]
    if turns is None and not any(name in row for name in LISTS):
        known = "conversations, messages or a pair that data.prompt_field and data.completion_field name"
        expected = " and ".join(fields) or known
        raise UnusableRow(UNKNOWN_KEYS, f"has keys {', '.join(map(str, row))}; expected {expected}")
    messages = [_message(turn, number) for number, turn in enumerate(turns or [], start=1)]
    values = (row.get(name) for name in ("system", "system_prompt"))
    system = next((value for value in values if isinstance(value, str) and value.strip()), None)
    if system and not any(message["role"] == "system" for message in messages):
        messages.insert(0, {"role": "system", "content": system})
    return messages


def _unpacked(value: Any) -> Any:
    """The list in a column, also if it is JSON or Python text (as pandas writes into a CSV cell)."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        for read in (parse_json, ast.literal_eval):
            with suppress(
                ValueError, SyntaxError, RecursionError, MemoryError
            ):  # the last two: nested too deeply
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
    content = turn.get("value") if turn.get("value") is not None else turn.get("content")
    if isinstance(content, list):  # parts: {type: text, text}
        texts: list[Any] = [
            part.get("text") if isinstance(part, Mapping) else part for part in content
        ]
        content = "".join(texts) if all(isinstance(text, str) for text in texts) else content
    if content is not None and not isinstance(content, str):
        raise UnusableRow(
            "turn is not text", f"turn {number} holds {type(content).__name__}; images are not read"
        )
    message: Message = {"role": role, "content": content or ""}
    message |= {
        key: turn[key] for key in (*THOUGHTS, "tool_call_id", "name") if turn.get(key) is not None
    }
    if isinstance(message.get("tool_calls"), list):
        message["tool_calls"] = [_tool_call(call) for call in message["tool_calls"]]
    return message


def _tool_call(call: Any) -> Any:
    # Makes the arguments an object: a template would quote JSON text twice.
    with suppress(TypeError, KeyError, ValueError):
        if isinstance(arguments := parse_json(call["function"]["arguments"]), dict):
            return {**call, "function": {**call["function"], "arguments": arguments}}
    return call


def mend(messages: list[Message]) -> tuple[list[Message], set[str]]:
    """Messages that a template can render, and what changed; UnusableRow without an answer."""
    changes, kept, joined = set[str](), list[Message](), list[Message]()
    for message in messages:
        role = message["role"]
        if (
            message["content"].strip()
            or role == "tool"
            or any(message.get(key) for key in THOUGHTS)
        ):
            kept.append(message)  # a tool may well return nothing
        elif role == "system":
            changes.add("empty system turn dropped")
        else:  # what follows an empty turn has lost its context
            changes.add("cut before an empty turn")
            break
    first_user = next(
        (index for index, message in enumerate(kept) if message["role"] == "user"), len(kept)
    )
    leading = [message for message in kept[:first_user] if message["role"] == "system"]
    if len(leading) < first_user:
        changes.add("began with the assistant; that turn dropped")
    for message in [*leading, *kept[first_user:]]:
        role, before = message["role"], joined[-1] if joined else {}
        is_text = role != "tool" and message.keys() == before.keys() == {"role", "content"}
        if is_text and before["role"] == role:  # turns with more keys are not joined
            joined[-1] = {"role": role, "content": before["content"] + "\n\n" + message["content"]}
            changes.add(f"two turns of the {role} in a row joined")
        else:
            joined.append(message)
    end = next((at for at in range(len(joined), 0, -1) if joined[at - 1]["role"] == "assistant"), 0)
    if end == 0:
        roles = [message["role"] for message in messages]
        reason = "no answer to a user's turn" if "assistant" in roles else "no assistant turn"
        raise UnusableRow(reason, f"turns: {', '.join([*roles, *sorted(changes)])}")
    if end < len(joined):
        changes.add("turns after the last answer cut")
    return joined[:end], changes
