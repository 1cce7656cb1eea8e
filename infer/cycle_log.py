"""cycles.jsonl: one line per decoding cycle with every drafted node, level and law, from which any figure is derived.

Off by default. A prompt's lines are written together and synced before its record is, so that after a kill the lines of
a prompt without a record are the only ones to drop.
"""

import os
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from model.errors import UserError
from model.files import write_atomically
from model.recipe import STRICT

Numbers = tuple[float | None, ...]
AnswerKey = tuple[int, tuple[float, int, float], tuple[str, str, int]]  # row, sampling, (task, prompt_id, turn)


@dataclass(frozen=True)
class Origin:
    """Whose cycles: the row of the recipe, its sampling, and the prompt. Turn 0 is a conversation's first."""

    __pydantic_config__ = STRICT
    row: int
    method: str
    temperature: float
    top_k: int
    top_p: float
    task: str
    prompt_id: str
    turn: int

    @property
    def key(self) -> AnswerKey:
        """What finds the record of the same answer."""
        return self.row, (self.temperature, self.top_k, self.top_p), (self.task, self.prompt_id, self.turn)


@dataclass(frozen=True)
class NodeColumns:
    """The tree's nodes in level order, the root first. Null: the root, passengers, and drafts without laws."""

    __pydantic_config__ = STRICT
    token: tuple[int, ...]
    parent: tuple[int, ...]  # the root is its own
    depth: tuple[int, ...]
    q: Numbers  # confidence: its chance under the law that it was chosen from
    survival: Numbers  # product of q along the path (EAGLE-2's value, DEAGLE's s)
    entropy: Numbers  # nats, of the head's law that it came from, before any processor
    p: Numbers  # its chance under the target, after the processors; at temperature 0 the plain softmax
    accepted: tuple[bool, ...]
    passenger: tuple[bool, ...] | None = None  # null: no node is one


@dataclass(frozen=True)
class LevelColumns:
    """The drafted levels d = 1, 2, ... (DEAGLE, equations 22 to 26), whether or not reranking kept their nodes."""

    __pydantic_config__ = STRICT
    survival: Numbers  # S_d: of the frontier of a dynamic tree, of all its nodes at depth d in any other
    ratio: Numbers  # rho_d = S_d / S_{d-1}, with S_0 = 1
    expected: Numbers  # E_d = S_1 + ... + S_d, without the bonus token


@dataclass(frozen=True)
class LawColumns:
    """The draft's laws q of those nodes of the tree that were expanded, against the target's law p at the same node.

    Where children are drawn from q both are after the processors, else q is as the head has it; at temperature 0 both
    are plain softmaxes.
    """

    __pydantic_config__ = STRICT
    node: tuple[int, ...]
    kl: Numbers  # KL(q || p) in nats; null: infinite
    tvd: Numbers  # total variation distance; 1 - tvd is alpha
    rank_log_q: tuple[Numbers | None, ...]  # log q of the 1st, 2nd, 4th, 8th ... token; null off the accepted path


@dataclass(frozen=True)
class CycleLine(Origin):
    """One cycle. tau is the mean of new_tokens; draft tokens kept are min(accepted, new_tokens)."""

    cycle: int  # 0 for the prompt's first
    pos_start: int  # the root's place in the text, the prompt included
    t_draft: float  # ms
    t_verify: float  # ms
    verify: str  # R0 to R4, or that it was not lossless
    draft_forwards: int
    drafted: int  # nodes without the root and passengers
    depth: int  # drafted levels, which a pruned tree need not reach
    nodes: int  # with the root, passengers included
    accepted: int  # draft tokens on the accepted path
    bonus_id: int
    new_tokens: int  # accepted and bonus, up to the end token and max_new_tokens
    stop_reason: str | None  # the rule, `levels`, `budget` (max_new_tokens), `guess` (no rule); null: nothing drafted
    node: NodeColumns
    level: LevelColumns
    law: LawColumns | None  # null: drafted without laws


LINE = TypeAdapter(CycleLine)


class CycleLog:
    """The file, to which whole answers are appended."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def keep(self, answers: Collection[AnswerKey]) -> None:
        """Drops a line that was cut by a kill, and those of any other answer than these."""
        if not self.path.is_file():
            return

        def write(temporary: Path) -> None:
            with self.path.open("rb") as old, temporary.open("wb") as new:
                for number, line in enumerate(old, start=1):
                    if line.endswith(b"\n") and _parsed(line, f"{self.path}:{number}").key in answers:
                        new.write(line)

        write_atomically(self.path, write)

    def append(self, lines: list[str]) -> None:
        """Appends the lines of one answer and syncs them."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write("".join(lines))
            file.flush()
            os.fsync(file.fileno())


def read_cycle_log(path: Path) -> Iterator[CycleLine]:
    """Every line of the file; UserError (file:line) for what is none."""
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                yield _parsed(line, f"{path}:{number}")
    except OSError as error:
        raise UserError(
            f"{path}: {error.strerror or error}; record cycles with: python infer/main.py bench --bench.cycles true"
        ) from error


def _parsed(line: bytes, place: str) -> CycleLine:
    try:
        return LINE.validate_json(line)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        raise UserError(f"{place}: {key}: {first['msg']}; measure again with --overwrite") from error
