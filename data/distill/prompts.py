"""The input rows of a distillation: prompts drawn from the sources, and those that are skipped, each with its reason.

One file holds them all, the same for every job of a run: what is skipped here is an input row too and is accounted for.
"""

import heapq
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from hashlib import blake2b, sha256
from typing import Any

from aerie.configs.errors import UserError
from aerie.configs.schema.data import DistillConfig, SourceConfig
from aerie.data.chat import LONE_SURROGATE
from aerie.data.conversations import UNKNOWN_KEYS, RawRow, UnusableRow, read_rows, to_messages
from aerie.model.storage import digest

QUESTION_FIELDS = ("prompt", "question", "problem", "instruction", "query", "input", "text")
PERSONA_FIELDS = ("input persona", "persona", "input_persona")
PROBLEM_FIELDS = ("synthesized text", "synthesized_text", "problem")
INVENT = (
    "Invent one demanding mathematics problem that this person could meet at work or in daily life.\n\n"
    "Person: {persona}\n\n"
    "Give every number that the solution needs and ask for at most two results. "
    "Begin with 'Problem:' and do not solve it."
)
SOLVE = "{problem}\n\nSolve this step by step, check the result, and state it at the end."
MARKER = re.compile(r"^[\s*#_]*(?:math(?:ematics)?\s+)?problem[\s*_]*:[\s*_]*", re.IGNORECASE | re.MULTILINE)
DUPLICATE, OVERLAPS = "the same prompt as an earlier row", "overlaps an evaluation question"


@dataclass(frozen=True)
class Prompt:
    """One input row: its questions, asked one after the other.

    invent: a request whose answer is made into the first question; skip: why the row is not asked at all.
    """

    id: str
    place: str
    turns: tuple[str, ...] = ()
    system: str | None = None
    invent: str | None = None
    skip: str | None = None


def make_prompts(config: DistillConfig, questions: Iterable[str]) -> list[Prompt]:
    """Every input row of the sources, in a fixed order; questions are the evaluation's, which no prompt may overlap.

    Raises UserError when a source cannot be read, when its first row has keys of no known shape, and when all rows are
    skipped.
    """
    overlap, seen, prompts = Overlap(questions, config.ngram), set[str](), list[Prompt]()
    for number, source in enumerate(config.sources):
        rows: Iterable[tuple[int, RawRow]] = enumerate(read_rows(source.path, source.revision), start=1)
        if source.num_rows is not None:  # those with the smallest hashes of the seed and their number
            order = f"{config.seed}/{number}"
            key_of = lambda item, order=order: sha256(f"{order}/{item[0]}".encode()).digest()  # noqa: E731
            rows = heapq.nsmallest(source.num_rows, rows, key_of)
        for count, row in rows:
            prompt = Prompt(f"{number}:{count}", row.place)
            try:
                prompt = _prompt(prompt, row.value, source, config.max_turns)
                texts = [prompt.invent or "", prompt.system or "", *prompt.turns]
                key = asked_key(prompt.system, (*prompt.turns, prompt.invent or ""))
                prompt = replace(prompt, skip=DUPLICATE if key in seen else overlap.reason(*texts))
                seen.add(key)
            except UnusableRow as error:
                if error.reason == UNKNOWN_KEYS and row.number == 1:
                    raise UserError(f"{row.place} {error.sentence}") from error
                prompt = replace(prompt, skip=error.reason)
            copies = 1 if prompt.skip else source.samples
            prompts += [replace(prompt, id=f"{prompt.id}:{copy}") if copy else prompt for copy in range(copies)]
    if all(prompt.skip for prompt in prompts):
        why = f"; the first: {prompts[0].place}: {prompts[0].skip}" if prompts else ""
        raise UserError(f"distill.sources: no row can be asked ({len(prompts):,} read{why})")
    return prompts


def asked_key(system: str | None, turns: Iterable[str]) -> str:
    """What makes two prompts the same: system prompt and questions, but for case and the width of blanks."""
    return digest([" ".join(text.casefold().split()) for text in (system or "", *turns)])


def plan_line(prompts: Sequence[Prompt]) -> str:
    """The rows, those to ask and those to skip by reason, on one line."""
    skipped = Counter(prompt.skip for prompt in prompts if prompt.skip)
    reasons = "".join(f"; {count:,} skipped: {why}" for why, count in skipped.most_common())
    return f"{len(prompts):,} rows, {len(prompts) - skipped.total():,} to ask{reasons}"


def _prompt(plain: Prompt, row: Any, source: SourceConfig, max_turns: int | None) -> Prompt:
    """The row's questions, system prompt and request, or UnusableRow."""
    if not isinstance(row, Mapping):
        raise UnusableRow("row is no object", "")
    system, turns, invent = None, list[str](), ""
    if source.kind == "conversations":
        system, turns = _of_conversation(row)
    elif source.kind == "prompts":
        system, turns = _of_prompt(row, source.field)
    else:  # personas, as PersonaHub has them
        names, what = (PERSONA_FIELDS, "persona") if source.ask == "problem" else (PROBLEM_FIELDS, "problem")
        text = next((str(row[name]).strip() for name in names if row.get(name)), "")
        if not text:
            raise UnusableRow(f"row has no {what}", "")
        if source.ask == "problem":
            invent = INVENT.format(persona=text)
        else:
            turns = [SOLVE.format(problem=problem_in(text))]
    # No tokenizer and no server takes half of a surrogate pair, which scraped text has.
    whole = partial(LONE_SURROGATE.sub, "\N{REPLACEMENT CHARACTER}")
    system = whole(system or source.system_prompt or "") or None
    return replace(plain, turns=tuple(map(whole, turns[:max_turns])), system=system, invent=whole(invent) or None)


def _of_conversation(row: Mapping[str, Any]) -> tuple[str | None, list[str]]:
    """The system prompt and the user's turns of a conversation, two in a row as one."""
    messages = to_messages(row)
    if row.get("tools") or any(message["role"] == "tool" for message in messages):
        raise UnusableRow("the conversation calls tools", "")
    system, turns, before = None, list[str](), ""
    for message in messages:
        role, text = message["role"], message["content"]
        if role == "system" and text.strip():
            system = system or text
        elif role == "user" and text.strip():
            turns = [*turns[:-1], f"{turns[-1]}\n\n{text}"] if turns and before == "user" else [*turns, text]
        before = role
    if not turns:
        raise UnusableRow("no user turn", "")
    return system, turns


def _of_prompt(row: Mapping[str, Any], field: str | None) -> tuple[str | None, list[str]]:
    """The row's own system prompt and its question, or its list under turns."""
    names = (field,) if field else ("turns", *QUESTION_FIELDS)
    if not row.keys() & set(names):
        where = " or ".join(names)
        raise UnusableRow(UNKNOWN_KEYS, f"has keys {', '.join(map(str, row))}; a prompt stands under {where}")
    value = next((row[name] for name in names if row.get(name)), "")
    system, turns = row.get("system"), list(value) if isinstance(value, list | tuple) else [value]
    if not isinstance(system, str | None) or not all(isinstance(turn, str) and turn.strip() for turn in turns):
        raise UnusableRow("an empty question, or no text", "")
    return system, turns


def problem_in(text: str) -> str:
    """The problem in an answer: what follows its last 'Problem:', or all of it."""
    return MARKER.split(text)[-1].strip()


# Scripts that set no blanks between words: Thai, Lao, Burmese, Khmer, kana and Chinese characters.
UNSPACED = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3005-\u3007\u3040-\u30ff\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff"
    "\uf900-\ufaff\uff66-\uff9f\U00020000-\U0003ffff"
)
WORD = re.compile(rf"[{UNSPACED}]|[^\W{UNSPACED}]+")
COMMON_SHARE, COMMON_LEAST = 0.1, 5  # runs in so many of the questions are their instructions, not their content
LEAST_WORDS = 4  # questions of fewer words ("Go on.") are looked for as the whole text only


def words(text: str) -> list[str]:
    """Its words in lower case, without punctuation; where a script sets no blanks, each character is one."""
    return WORD.findall(text.lower())


class Overlap:
    """Hashes of the runs of `size` words of evaluation questions, but for runs that many of them share.

    A question that has no such run of its own (it is shorter, or all its runs are shared) counts as a run of its own
    length, so that sentences before and behind it do not hide it. A question that is named twice counts once.
    """

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
        """OVERLAPS if a text has a run in common with a question, or has a whole question in it."""
        for split in map(words, texts):
            runs = (hashes & _runs(split, size) for size, hashes in self._hashes.items())
            if self._whole & _runs(split, len(split)) or any(runs):
                return OVERLAPS
        return None


def _runs(split: list[str], size: int) -> set[bytes]:
    """Hashes of all runs of `size` words."""
    runs = (" ".join(split[start : start + size]) for start in range(len(split) - size + 1))
    return {blake2b(run.encode("utf-8", "replace"), digest_size=8).digest() for run in runs}
