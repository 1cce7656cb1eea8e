"""The record of a run: one line per input row, appended when the row has ended, so that a killed job goes on.

A line is whole or it is the file's torn last one, which is cut off when the file is opened again. Nothing else is ever
rewritten: a failed row that is asked again gets a second line, which counts in place of the first.
"""

import fcntl
import json
import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from aerie.configs.errors import UserError
from aerie.data.distill.answer import SERVER_SKIPS, Answer
from aerie.data.progress import Share
from aerie.model.storage import digest

Status = Literal["done", "skipped", "failed"]
SYNC_SECONDS = 5.0  # what a crash of the machine may cost; a killed process loses nothing
FOLDER = "journal"
BEGINNING = re.compile(rb'\{"id": "([\w:.-]+)", "status": "(done|skipped|failed)", ')  # of a row's line


@dataclass(frozen=True)
class Outcome:
    """How an input row ended: with answers to its questions, or with why not."""

    id: str
    status: Status
    place: str
    why: str | None = None
    system: str | None = None
    turns: tuple[str, ...] = ()  # the questions that were asked
    answers: tuple[Answer, ...] = ()
    invented: Answer | None = None  # of which the first question was made

    @property
    def num_tokens(self) -> int:
        """Tokens that the target wrote."""
        asked = [*self.answers, *([] if self.invented is None else [self.invented])]
        return sum(answer.num_tokens for answer in asked)

    def line(self) -> str:
        """The JSON line."""
        values: dict[str, Any] = {"id": self.id, "status": self.status, "place": self.place}
        values |= {"why": self.why, "system": self.system}
        values |= {"turns": self.turns, "answers": [answer.as_dict() for answer in self.answers]}
        values["invented"] = None if self.invented is None else self.invented.as_dict()
        return json.dumps({name: value for name, value in values.items() if value}, ensure_ascii=False) + "\n"

    @classmethod
    def of(cls, values: dict[str, Any]) -> "Outcome":
        """From a parsed line."""
        return cls(
            id=values["id"],
            status=values["status"],
            place=values["place"],
            why=values.get("why"),
            system=values.get("system"),
            turns=tuple(values.get("turns", ())),
            answers=tuple(Answer.of(answer) for answer in values.get("answers", ())),
            invented=Answer.of(values["invented"]) if "invented" in values else None,
        )


def file_of(shard: Share) -> str:
    """The name of a job's journal."""
    return f"shard-{shard.index:05d}-of-{shard.count:05d}.jsonl"


class Journal:
    """One job's journal, open for appending; a context. UserError when another process has it, or it is another's."""

    def __init__(self, directory: Path, shard: Share, inputs: dict[str, Any]) -> None:
        """inputs decide the answers (JSON-ready): a journal made from others is refused."""
        self.path, self.shard = directory / FOLDER / file_of(shard), shard
        self._inputs = inputs
        self._synced = time.monotonic()

    def __enter__(self) -> "Journal":
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open("a+b")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._file.close()
            raise UserError(f"{self.path}: another process writes it; wait for it, or end it first") from error
        _cut_torn_line(self._file, self.path)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.fsync(self._file.fileno())
        self._file.close()

    def append(self, outcome: Outcome) -> None:
        """Writes one row's end; before the first, what the answers are made from."""
        if self._file.tell() == 0:
            header = {"journal": 1, "inputs_digest": digest(self._inputs), "inputs": self._inputs}
            self._write(json.dumps(header) + "\n")
        self._write(outcome.line())

    def _write(self, line: str) -> None:
        self._file.write(line.encode("utf-8", "replace"))
        self._file.flush()
        if time.monotonic() - self._synced > SYNC_SECONDS:
            os.fsync(self._file.fileno())
            self._synced = time.monotonic()


def journals(directory: Path) -> list[Path]:
    """All journals of a distillation."""
    return sorted((directory / FOLDER).glob("shard-*.jsonl"))


@dataclass(frozen=True)
class Place:
    """Where a row's line stands, without what is in it: answers with their ids are long."""

    id: str
    status: Status
    path: Path
    offset: int

    @property
    def is_open(self) -> bool:
        """Whether the row may end otherwise when it is asked again: it has failed, or a server has skipped it."""
        return self.status == "failed" or (self.status == "skipped" and self.read().why in SERVER_SKIPS)

    def read(self) -> Outcome:
        """The row; UserError when its line is damaged."""
        with self.path.open("rb") as handle:
            handle.seek(self.offset)
            try:
                return Outcome.of(json.loads(handle.readline()))
            except (ValueError, KeyError, TypeError) as error:
                raise _damaged(self.path, self.offset) from error


def ended_rows(path: Path, inputs: dict[str, Any]) -> Iterator[Place]:
    """The rows of one journal, without a torn last line; UserError when it was made from other inputs."""
    with path.open("rb") as handle:
        header = handle.readline()
        if not header.endswith(b"\n"):
            return
        made_from = _made_from(header)
        if made_from is None:
            raise _damaged(path, 0, "replace the journal, and the answers in it, with --overwrite")
        if made_from["inputs_digest"] != digest(inputs):
            found = made_from["inputs"]
            other = sorted(key for key in {*found, *inputs} if found.get(key) != inputs.get(key))
            raise UserError(
                f"{path}: holds answers made with another {' and '.join(other) or 'version'}; choose another --run, or "
                f"replace them with --overwrite"
            )
        offset = len(header)
        for line in handle:
            if not line.endswith(b"\n"):
                return
            match = BEGINNING.match(line)
            if match is None or not line.endswith(b"}\n"):
                raise _damaged(path, offset)
            status: Any = match[2].decode()
            yield Place(match[1].decode(), status, path, offset)
            offset += len(line)


def _made_from(header: bytes) -> dict[str, Any] | None:
    """A journal's first line; None where it is damaged. A row there says nothing of what the answers are made from."""
    try:
        found = json.loads(header)
    except ValueError:
        return None
    if not isinstance(found, dict) or not isinstance(found.get("inputs"), dict):
        return None
    return found if isinstance(found.get("inputs_digest"), str) else None


def _damaged(path: Path, offset: int, fix: str = "delete the line, its row is then asked again") -> UserError:
    return UserError(f"{path}: byte {offset:,}: no whole row; {fix}")


def forget_others(directory: Path, inputs: dict[str, Any]) -> None:
    """Deletes the journals that were made from other inputs, and those that do not say from which."""
    for path in journals(directory):
        with path.open("rb") as handle:
            header = handle.readline()
        if not header.endswith(b"\n"):
            continue
        made_from = _made_from(header)
        if made_from is None or made_from["inputs_digest"] != digest(inputs):
            path.unlink()


def _cut_torn_line(handle: Any, path: Path) -> None:
    """Leaves the file, open for reading and appending, with whole lines only and its position at the end."""
    end = handle.seek(0, os.SEEK_END)
    while end > 0:
        start = max(0, end - (1 << 16))
        handle.seek(start)
        found = handle.read(end - start).rfind(b"\n")
        if found >= 0:
            end = start + found + 1
            break
        end = start
    os.truncate(path, end)
    handle.seek(0, os.SEEK_END)
