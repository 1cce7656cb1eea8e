"""The input rows of a distillation: prompts drawn from the sources, and those that are skipped, each with its reason.

One file holds them all, the same for every job of a run: what is skipped here is an input row too and is accounted for.
"""

import heapq
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from hashlib import blake2b, sha256
from pathlib import Path
from typing import Any

from aerie.configs.errors import UserError
from aerie.configs.schema.data import DistillConfig, SourceConfig
from aerie.data.chat import LONE_SURROGATE
from aerie.data.conversations import LISTS, UNKNOWN_KEYS, UnusableRow, explain_keys, to_messages
from aerie.data.sources import RawRow, read_rows
from aerie.model.storage import digest, write_text

QUESTION_FIELDS = ("prompt", "question", "problem", "instruction", "query", "input", "text")
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
        for count, row in _drawn(source, number, config.seed):
            prompt = _prompt(row, source, f"{number}:{count}", config)
            if prompt.skip is None:
                key = asked_key(prompt.system, (*prompt.turns, prompt.invent or ""))
                sent = [text for text in (prompt.system, prompt.invent, *prompt.turns) if text is not None]
                why = DUPLICATE if key in seen else OVERLAPS if any(text in overlap for text in sent) else None
                seen.add(key)
                prompt = replace(prompt, skip=why)
            copies = 1 if prompt.skip else source.samples
            prompts += [replace(prompt, id=f"{prompt.id}:{copy}") if copy else prompt for copy in range(copies)]
    if all(prompt.skip for prompt in prompts):
        why = f"; the first: {prompts[0].place}: {prompts[0].skip}" if prompts else ""
        raise UserError(f"distill.sources: no row can be asked ({len(prompts):,} read{why})")
    return prompts


def write_prompts(path: Path, prompts: Sequence[Prompt]) -> None:
    """Writes the rows as JSONL, whole or not at all."""
    plain = ({name: value for name, value in asdict(prompt).items() if value is not None} for prompt in prompts)
    write_text(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in plain))


def read_prompts(path: Path) -> list[Prompt]:
    """The rows of write_prompts."""
    with path.open(encoding="utf-8") as handle:
        return [Prompt(**{**row, "turns": tuple(row["turns"])}) for row in map(json.loads, handle)]


def asked_key(system: str | None, turns: Iterable[str]) -> str:
    """What makes two prompts the same: system prompt and questions, but for case and the width of blanks."""
    return digest([" ".join(text.casefold().split()) for text in (system or "", *turns)])


def plan_line(prompts: Sequence[Prompt]) -> str:
    """The rows, those to ask and those to skip by reason, on one line."""
    asked = [prompt for prompt in prompts if prompt.skip is None]
    skipped = Counter(prompt.skip for prompt in prompts if prompt.skip is not None)
    requests = sum(len(prompt.turns) + (prompt.invent is not None) * 2 for prompt in asked)
    reasons = "".join(f"; {count:,} skipped: {why}" for why, count in skipped.most_common())
    return f"{len(prompts):,} rows, {len(asked):,} to ask with up to {requests:,} requests{reasons}"


def _drawn(source: SourceConfig, number: int, seed: int) -> Iterable[tuple[int, RawRow]]:
    """The source's rows with their counts from 1: all, or num_rows of them in an order that the seed draws."""
    rows = enumerate(read_rows(source.path, source.revision), start=1)
    if source.num_rows is None:
        return rows
    return heapq.nsmallest(
        source.num_rows, rows, key=lambda item: sha256(f"{seed}/{number}/{item[0]}".encode()).digest()
    )


def _prompt(row: RawRow, source: SourceConfig, identity: str, config: DistillConfig) -> Prompt:
    """The row as a prompt; one that cannot be used says why in skip."""
    plain = Prompt(identity, row.place, system=source.system_prompt)
    try:
        if not isinstance(row.value, Mapping):
            raise UnusableRow("row is no object", "")
        prompt = READERS[source.kind](row.value, plain, source)
    except UnusableRow as error:
        if error.reason == UNKNOWN_KEYS and row.number == 1:
            raise UserError(f"{row.place} {error.sentence}") from error
        return replace(plain, skip=error.reason)
    turns = tuple(_whole(turn) for turn in prompt.turns[: config.max_turns])
    return replace(prompt, turns=turns, system=_whole(prompt.system), invent=_whole(prompt.invent))


def _whole(text: Any) -> Any:
    """The text without halves of surrogate pairs, which no tokenizer and no server takes."""
    return text and LONE_SURROGATE.sub("\N{REPLACEMENT CHARACTER}", text)


def _of_conversation(row: Mapping[str, Any], plain: Prompt, source: SourceConfig) -> Prompt:
    """The user's turns of a conversation, two in a row as one."""
    messages = to_messages(row, None)
    if messages is None:
        if any(name in row for name in LISTS):
            raise UnusableRow("no user turn", "")
        raise UnusableRow(UNKNOWN_KEYS, explain_keys(row, None))
    if row.get("tools") or any(message["role"] == "tool" for message in messages):
        raise UnusableRow("the conversation calls tools", "")
    spoken = [(message["role"], message["content"]) for message in messages]
    system = next((text for role, text in spoken if role == "system" and text.strip()), plain.system)
    turns: list[str] = []
    for at, (role, text) in enumerate(spoken):
        if role != "user" or not text.strip():
            continue
        if at and spoken[at - 1][0] == "user" and turns:
            turns[-1] += f"\n\n{text}"
        else:
            turns.append(text)
    if not turns:
        raise UnusableRow("no user turn", "")
    return replace(plain, turns=tuple(turns), system=system)


def _of_prompt(row: Mapping[str, Any], plain: Prompt, source: SourceConfig) -> Prompt:
    """The question of a row, or its list under turns, after its own system prompt."""
    names = (source.field,) if source.field else ("turns", *QUESTION_FIELDS)
    values = [row[name] for name in names if row.get(name) is not None]
    if not any(name in row for name in names):
        where = " or ".join(names)
        raise UnusableRow(UNKNOWN_KEYS, f"has keys {', '.join(map(str, row))}; a prompt stands under {where}")
    value = values[0] if values else []
    turns = list(value) if isinstance(value, list | tuple) else [value]
    system = row.get("system") or plain.system
    if not isinstance(system, str | None) or not all(isinstance(turn, str) for turn in turns):
        raise UnusableRow("a question or system prompt is not text", "")
    if not turns or not all(turn.strip() for turn in turns):
        raise UnusableRow("an empty question", "")
    return replace(plain, turns=tuple(turns), system=system)


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


def _of_persona(row: Mapping[str, Any], plain: Prompt, source: SourceConfig) -> Prompt:
    """A row of PersonaHub: the request to solve its problem, or to invent one for its persona first."""
    names, what = (PERSONA_FIELDS, "persona") if source.ask == "problem" else (PROBLEM_FIELDS, "problem")
    text = next((row[name].strip() for name in names if isinstance(row.get(name), str) and row[name].strip()), None)
    if text is None:
        raise UnusableRow(f"row has no {what}", "")
    if source.ask == "problem":
        return replace(plain, invent=INVENT.format(persona=text))
    return replace(plain, turns=(SOLVE.format(problem=problem_in(text)),))


def problem_in(text: str) -> str:
    """The problem in an answer: what follows its last 'Problem:', or all of it."""
    markers = list(MARKER.finditer(text))
    return (text[markers[-1].end() :] if markers else text).strip()


READERS = {"conversations": _of_conversation, "prompts": _of_prompt, "personas": _of_persona}

# Scripts that set no blanks between words: Thai, Lao, Burmese, Khmer, kana and Chinese characters.
UNSPACED = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3005-\u3007\u3040-\u30ff\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff"
    "\uf900-\ufaff\uff66-\uff9f\U00020000-\U0003ffff"
)
WORD = re.compile(rf"[{UNSPACED}]|[^\W{UNSPACED}]+")
CHARACTER = re.compile(f"[{UNSPACED}]")
COMMON_SHARE, COMMON_LEAST = 0.1, 5  # runs in so many of the questions are their instructions, not their content
LEAST_WORDS = 3  # questions of fewer words ("Go on.") are looked for as the whole text only
CHARACTERS_OF_A_WORD = 2  # in a script without blanks, as Chinese words mostly have


def words(text: str) -> list[str]:
    """Its words in lower case, without punctuation; where a script sets no blanks, each character is one."""
    return WORD.findall(text.lower())


class Overlap:
    """Hashes of the runs of `size` words of evaluation questions, but for runs that many of them share.

    A question that has no such run of its own (it is shorter, or all its runs are shared) counts as a run of its own
    length, so that sentences before and behind it do not hide it. A question that is named twice counts once.
    """

    def __init__(self, questions: Iterable[str], size: int) -> None:
        asked = [list(split) for split in dict.fromkeys(tuple(words(question)) for question in questions)]
        counts = Counter(key for split in asked for key in set(_runs(split, size)))
        least = max(COMMON_LEAST, COMMON_SHARE * len(asked))
        own = {key for key, count in counts.items() if count < least}
        self._hashes: dict[int, set[bytes]] = {size: own}
        self._whole = {_hash(split) for split in asked if split}
        for split in asked:
            num_words = sum(1.0 / CHARACTERS_OF_A_WORD if CHARACTER.match(word) else 1.0 for word in split)
            if num_words >= LEAST_WORDS and own.isdisjoint(_runs(split, size)):
                self._hashes.setdefault(len(split), set()).add(_hash(split))

    def __contains__(self, text: str) -> bool:
        """Whether the text has a run in common with a question, or has a whole question in it."""
        split = words(text)
        return _hash(split) in self._whole or any(
            key in hashes for size, hashes in self._hashes.items() for key in _runs(split, size)
        )


def _runs(split: list[str], size: int) -> Iterator[bytes]:
    return (_hash(split[start : start + size]) for start in range(len(split) - size + 1))


def _hash(split: list[str]) -> bytes:
    return blake2b(" ".join(split).encode("utf-8", "replace"), digest_size=8).digest()
