"""The input rows of a distillation: each is asked, or skipped for a reason."""

import heapq
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from hashlib import blake2b, sha256
from itertools import groupby
from pathlib import Path
from typing import Any

from aerie.configs.errors import LONE_SURROGATE, UserError
from aerie.configs.read import read_yaml
from aerie.configs.schema.data import DistillConfig, SourceConfig
from aerie.data.conversations import UNKNOWN_KEYS, UnusableRow, to_messages
from aerie.data.rows import RawRow, read_rows
from aerie.model.storage import digest

TEXTS = read_yaml(Path(__file__).with_name("prompts.yaml"))[0]
MARKER = re.compile(
    r"^[\s*#_]*(?:math(?:ematics)?\s+)?problem[\s*_]*:[\s*_]*", re.IGNORECASE | re.MULTILINE
)


@dataclass(frozen=True)
class InputRow:
    id: str
    place: str
    turns: tuple[str, ...] = ()
    system: str | None = None
    invent: str | None = None  # a request for the first question
    skip: str | None = None  # why it is not asked


def make_prompts(config: DistillConfig, questions: Iterable[str]) -> list[InputRow]:
    """Every input row of the sources; rows that overlap the evaluation's questions are skipped."""
    overlap, seen, prompts = Overlap(questions, config.ngram), set[str](), list[InputRow]()
    whole = partial(LONE_SURROGATE.sub, "\N{REPLACEMENT CHARACTER}")
    for number, source in enumerate(config.sources):
        rows: Iterable[tuple[int, RawRow]] = enumerate(
            read_rows(source.path, source.revision), start=1
        )
        if source.num_rows is not None:  # those with the smallest hashes of seed and row number
            order = f"{config.seed}/{number}"
            key_of = lambda item, order=order: sha256(f"{order}/{item[0]}".encode()).digest()  # noqa: E731
            rows = heapq.nsmallest(source.num_rows, rows, key_of)
        for count, row in rows:
            prompt = InputRow(f"{number}:{count}", row.source)
            try:
                system, turns, invent = _questions(row.value, source)
                asked = tuple(map(whole, turns[: config.max_turns]))
                system, invent = whole(system or source.system_prompt or ""), whole(invent)
                key = asked_key(system, (*asked, invent))
                skip = (
                    "the same prompt as an earlier row"
                    if key in seen
                    else overlap.reason(invent, system, *asked)
                )
                prompt = InputRow(
                    prompt.id, prompt.place, asked, system or None, invent or None, skip
                )
                seen.add(key)
            except UnusableRow as error:
                if error.reason == UNKNOWN_KEYS and row.number == 1:
                    raise UserError(f"{row.source} {error.sentence}") from error
                prompt = replace(prompt, skip=error.reason)
            copies = 1 if prompt.skip else source.samples
            prompts += [
                replace(prompt, id=f"{prompt.id}:{copy}") if copy else prompt
                for copy in range(copies)
            ]
    if all(prompt.skip for prompt in prompts):
        why = f"; the first: {prompts[0].place}: {prompts[0].skip}" if prompts else ""
        raise UserError(f"distill.sources: no row can be asked ({len(prompts):,} read{why})")
    return prompts


def asked_key(system: str | None, turns: Iterable[str]) -> str:
    """A key that ignores case and the number of blanks."""
    return digest([" ".join(text.casefold().split()) for text in (system or "", *turns)])


def plan_line(prompts: Sequence[InputRow]) -> str:
    skipped = Counter(prompt.skip for prompt in prompts if prompt.skip)
    reasons = "".join(f"; {count:,} skipped: {why}" for why, count in skipped.most_common())
    return f"{len(prompts):,} rows, {len(prompts) - skipped.total():,} to ask{reasons}"


def _questions(row: Any, source: SourceConfig) -> tuple[str | None, list[str], str]:
    """System prompt, questions, and the request for a problem."""
    if not isinstance(row, Mapping):
        raise UnusableRow("row is no object", "")
    if source.kind == "personas":
        names = TEXTS["persona_fields"][source.ask]
        text = next((str(row[name]).strip() for name in names if row.get(name)), "")
        if not text:
            raise UnusableRow(
                f"row has no {'persona' if source.ask == 'problem' else 'problem'}", ""
            )
        if source.ask == "problem":
            return None, [], TEXTS["invent"].format(persona=text)
        return None, [TEXTS["solve"].format(problem=problem_in(text))], ""
    if source.kind == "prompts":
        names = [source.field] if source.field else ["turns", *TEXTS["question_fields"]]
        if not row.keys() & set(names):
            fix = f"the prompt must be in {' or '.join(names)}"
            raise UnusableRow(UNKNOWN_KEYS, f"has keys {', '.join(map(str, row))}; {fix}")
        value = next((row[name] for name in names if row.get(name)), "")
        system, turns = (
            row.get("system"),
            list(value) if isinstance(value, list | tuple) else [value],
        )
        if not isinstance(system, str | None) or not all(
            isinstance(turn, str) and turn.strip() for turn in turns
        ):
            raise UnusableRow("an empty question, or no text", "")
        return system, turns, ""
    said: dict[str, list[str]] = {"system": [], "user": [], "assistant": [], "tool": []}
    for role, group in groupby(
        to_messages(row), lambda message: str(message["role"])
    ):  # two turns in a row are one
        said[role].append(
            "\n\n".join(message["content"] for message in group if message["content"].strip())
        )
    if row.get("tools") or said["tool"]:
        raise UnusableRow("the conversation calls tools", "")
    turns = [text for text in said["user"] if text]
    if not turns:
        raise UnusableRow("no user turn", "")
    return next(filter(None, said["system"]), None), turns, ""


def problem_in(text: str) -> str:
    return MARKER.split(text)[-1].strip()


# Thai, Lao, Burmese, Khmer, kana and Chinese characters
UNSPACED = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3005-\u3007\u3040-\u30ff\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff"
    "\uf900-\ufaff\uff66-\uff9f\U00020000-\U0003ffff"
)
WORD = re.compile(rf"[{UNSPACED}]|[^\W{UNSPACED}]+")
COMMON_SHARE, COMMON_LEAST = 0.1, 5  # a run in so many questions is an instruction
LEAST_WORDS = 4  # shorter questions ("Go on.") are only compared with whole texts


def words(text: str) -> list[str]:
    """Words in lower case; in scripts without spaces each character is a word."""
    return WORD.findall(text.lower())


class Overlap:
    """Finds runs of `size` words from evaluation questions, but no common ones; a question without any is one run."""

    def __init__(self, questions: Iterable[str], size: int) -> None:
        asked = [list(split) for split in {tuple(words(question)) for question in questions}]
        counts = Counter(key for split in asked for key in _runs(split, size))
        limit = max(COMMON_LEAST, COMMON_SHARE * len(asked))
        self._hashes = {size: {key for key, count in counts.items() if count < limit}}
        self._whole = set[bytes]().union(*(_runs(split, len(split)) for split in asked if split))
        for split in asked:
            if len(split) >= LEAST_WORDS and self._hashes[size].isdisjoint(_runs(split, size)):
                self._hashes.setdefault(len(split), set()).update(_runs(split, len(split)))

    def reason(self, *texts: str) -> str | None:
        for split in map(words, texts):
            runs = (hashes & _runs(split, size) for size, hashes in self._hashes.items())
            if self._whole & _runs(split, len(split)) or any(runs):
                return "overlaps an evaluation question"
        return None


def _runs(split: list[str], size: int) -> set[bytes]:
    runs = (" ".join(split[start : start + size]) for start in range(len(split) - size + 1))
    return {blake2b(run.encode("utf-8", "replace"), digest_size=8).digest() for run in runs}
