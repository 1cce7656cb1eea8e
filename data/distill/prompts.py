"""The input rows of a distillation: each is asked, or skipped for a reason."""

import heapq
import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import chain
from pathlib import Path
from typing import Any

from aerie.configs.errors import UserError
from aerie.configs.read import read_yaml
from aerie.configs.schema.data import DistillConfig, SourceConfig
from aerie.data.inputs import hashed_number
from aerie.data.questions import read_question, tell_unread
from aerie.data.rows import RawRow, read_rows
from aerie.data.turns import UNKNOWN_KEYS
from aerie.data.values import UnusableRow
from aerie.model.storage import digest

TEXTS = read_yaml(Path(__file__).with_name("prompts.yaml"))[0]
MARKER = re.compile(
    r"^[\s*#_]*(?:math(?:ematics)?\s+)?problem[\s*_]*:[\s*_]*", re.IGNORECASE | re.MULTILINE
)


@dataclass(frozen=True)
class InputRow:
    id: str  # 'source:row', and ':copy' of a further sample
    place: str  # 'file: row n'
    turns: tuple[str, ...] = ()
    system: str | None = None
    invent: str | None = None  # a request for the first question
    skip: str | None = None  # why it is not asked
    tools: list[Any] | None = None


def make_prompts(config: DistillConfig, questions: Iterable[str]) -> list[InputRow]:
    """Every input row of the sources; rows that overlap the evaluation's questions are skipped."""
    overlap = Overlap(questions, config.ngram)
    seen = set[str]()
    prompts = list[InputRow]()
    for number, source in enumerate(config.sources):
        unread = list[tuple[str, frozenset[str]]]()
        for count, row in _drawn_rows(source, f"{config.seed}/{number}"):
            prompt = InputRow(f"{number}:{count}", row.source)
            try:
                prompt, unread_keys = _with_question(prompt, row.value, source, config.max_turns)
                unread.append((row.source, unread_keys))
            except UnusableRow as error:
                if error.reason == UNKNOWN_KEYS and row.number == 1:  # as all others will be
                    raise UserError(f"{row.source} {error.sentence}") from error
                prompts.append(replace(prompt, skip=error.reason))
                continue
            tools = [json.dumps(prompt.tools)] if prompt.tools else []
            key = asked_key(prompt.system, (*prompt.turns, prompt.invent or "", *tools))
            skip = overlap.reason(prompt.invent or "", prompt.system or "", *prompt.turns)
            if key in seen:
                skip = "the same prompt as an earlier row"
            seen.add(key)
            prompts.append(replace(prompt, skip=skip))
            for copy in range(1, 1 if skip else source.samples):
                prompts.append(replace(prompt, id=f"{prompt.id}:{copy}"))
        tell_unread(source.path, unread)
    if all(prompt.skip for prompt in prompts):
        first = f"; the first: {prompts[0].place}: {prompts[0].skip}" if prompts else ""
        raise UserError(f"distill.sources: no row can be asked ({len(prompts):,} read{first})")
    return prompts


def _drawn_rows(source: SourceConfig, seed: str) -> Iterable[tuple[int, RawRow]]:
    """A source's rows with their numbers; if num_rows is set, those with the lowest hashes."""
    rows = enumerate(read_rows(source.path, source.revision), start=1)
    if source.num_rows is None:
        return rows
    return heapq.nsmallest(
        source.num_rows, rows, key=lambda pair: hashed_number(f"{seed}/{pair[0]}", bits=256)
    )


def asked_key(system: str | None, turns: Iterable[str]) -> str:
    """A key of what is asked, which ignores case and the number of blanks."""
    return digest([" ".join(text.casefold().split()) for text in (system or "", *turns)])


def plan_line(prompts: Sequence[InputRow]) -> str:
    skipped = Counter(filter(None, (prompt.skip for prompt in prompts)))
    firsts = {prompt.skip: prompt.place for prompt in reversed(prompts)}
    reasons = [
        f"; {count:,} skipped: {why} (first: {firsts[why]})" for why, count in skipped.most_common()
    ]
    return f"{len(prompts):,} rows, {len(prompts) - skipped.total():,} to ask{''.join(reasons)}"


# --- a row's questions, by the kind of its source -----------------------------------------------


def _with_question(
    prompt: InputRow, row: Any, source: SourceConfig, max_turns: int | None
) -> tuple[InputRow, frozenset[str]]:
    """The prompt with what a row asks, and what nobody reads of the row, as reasons to count."""
    if not isinstance(row, Mapping):
        raise UnusableRow("the row is not an object", "")
    prompt = replace(prompt, system=source.system_prompt)
    if source.kind == "personas":
        return _with_persona(prompt, row, source.ask == "problem"), frozenset()
    question = read_question(row, source.field)
    if question.calls_tools:  # nobody has the results of the target's own calls
        raise UnusableRow("the conversation calls tools", "")
    prompt = replace(prompt, turns=question.turns[:max_turns], tools=question.tools)
    if question.before:  # an empty system turn switches off a template's own
        system = "\n\n".join(message["content"] for message in question.before)
        prompt = replace(prompt, system=system)
    return prompt, question.unread


def _with_persona(prompt: InputRow, row: Mapping[str, Any], is_invented: bool) -> InputRow:
    """The prompt with the row's problem, or with the request to invent one for its persona."""
    kind = "persona" if is_invented else "problem"
    text = next((str(row[name]).strip() for name in TEXTS["fields"][kind] if row.get(name)), "")
    if not text:
        raise UnusableRow(f"the row has no {kind}", "")
    if is_invented:
        return replace(prompt, invent=TEXTS["invent"].format(persona=text))
    return replace(prompt, turns=(TEXTS["solve"].format(problem=problem_in(text)),))


def problem_in(text: str) -> str:
    """An invented problem without what the model wrote before it."""
    return MARKER.split(text)[-1].strip()


# --- overlap with the questions of an evaluation ------------------------------------------------

# Thai, Lao, Burmese, Khmer, kana and Chinese characters
UNSPACED = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3005-\u3007\u3040-\u30ff\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff"
    "\uf900-\ufaff\uff66-\uff9f\U00020000-\U0003ffff"
)
WORD = re.compile(rf"[{UNSPACED}]|[^\W{UNSPACED}]+")
# A run of words is an instruction if this share of the questions, and at least so many, hold it.
COMMON_SHARE = 0.1
COMMON_LEAST = 5


def words(text: str) -> list[str]:
    """Words in lower case; in scripts without spaces each character is a word."""
    return WORD.findall(text.lower())


class Overlap:
    """Finds texts that share a run of `size` words with an evaluation question.

    Common runs do not count. A question without another run is found if a text holds all of it.
    """

    def __init__(self, questions: Iterable[str], size: int) -> None:
        splits = {tuple(words(question)) for question in questions} - {()}
        counts = Counter(chain.from_iterable(_runs(split, size) for split in splits))
        limit = max(COMMON_LEAST, COMMON_SHARE * len(splits))
        # hashes of whole questions
        self._texts = set[bytes]().union(*(_runs(split, len(split)) for split in splits))
        # hashes of runs, by their number of words
        self._known_runs = {size: {run for run, count in counts.items() if count < limit}}
        for split in splits:
            # Shorter questions ("Go on.") are only compared with whole texts.
            if len(split) >= 4 and self._known_runs[size].isdisjoint(_runs(split, size)):
                self._known_runs.setdefault(len(split), set()).update(_runs(split, len(split)))

    def reason(self, *texts: str) -> str | None:
        """Why none of these texts may be asked; None if they may."""
        for split in map(words, texts):
            overlaps = any(runs & _runs(split, size) for size, runs in self._known_runs.items())
            if overlaps or self._texts & _runs(split, len(split)):
                return "overlaps an evaluation question"
        return None


def _runs(split: Sequence[str], size: int) -> set[bytes]:
    """Hashes of all runs of `size` words."""
    runs = (" ".join(split[start : start + size]) for start in range(len(split) - size + 1))
    return {blake2b(run.encode("utf-8", "replace"), digest_size=8).digest() for run in runs}
