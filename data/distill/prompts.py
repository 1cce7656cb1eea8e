"""The input rows of a distillation: prompts drawn from the sources, and those that are skipped, each with its reason.

One file holds them all, the same for every job of a run: what is skipped here is an input row too and is accounted for.
"""

from __future__ import annotations

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
from aerie.configs.read import as_dict, validate
from aerie.configs.schema.data import DistillConfig, SamplingConfig, SourceConfig
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
    sampling: dict[str, Any] | None = None  # what the row changes of the recipe's
    skip: str | None = None


def make_prompts(config: DistillConfig, questions: Iterable[str]) -> list[Prompt]:
    """Every input row of the sources, in a fixed order; questions are the evaluation's, which no prompt may overlap.

    Raises UserError when a source cannot be read, when its first row has keys of no known shape, and when all rows are
    skipped.
    """
    overlap = Overlap(questions, config.ngram)
    seen: set[str] = set()
    prompts: list[Prompt] = []
    for number, source in enumerate(config.sources):
        for count, row in _drawn(source, number, config.seed):
            prompt = _prompt(row, source, f"{number}:{count}", config)
            if prompt.skip is None:
                prompt = replace(prompt, skip=_why_not(prompt, seen, overlap))
            copies = 1 if prompt.skip else source.samples
            prompts += [replace(prompt, id=f"{prompt.id}:{copy}") if copy else prompt for copy in range(copies)]
    if all(prompt.skip for prompt in prompts):
        why = f"; the first: {prompts[0].place}: {prompts[0].skip}" if prompts else ""
        raise UserError(f"distill.sources: no row can be asked ({len(prompts):,} read{why})")
    return prompts


def write_prompts(path: Path, prompts: list[Prompt]) -> None:
    """Writes the rows as JSONL, whole or not at all."""
    plain = ({name: value for name, value in asdict(prompt).items() if value is not None} for prompt in prompts)
    write_text(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in plain))


def read_prompts(path: Path) -> list[Prompt]:
    """The rows of write_prompts."""
    with path.open(encoding="utf-8") as handle:
        rows = [json.loads(line) for line in handle]
    return [Prompt(**{**row, "turns": tuple(row.get("turns", ()))}) for row in rows]


def asked_key(system: str | None, turns: Iterable[str]) -> str:
    """What makes two prompts the same: system prompt and questions, but for case and the width of blanks."""
    return digest([" ".join(text.casefold().split()) for text in (system or "", *turns)])


def sampling_of(prompt: Prompt, config: SamplingConfig) -> SamplingConfig:
    """The recipe's sampling with what the row changes of it."""
    if not prompt.sampling:
        return config
    return validate({**as_dict(config), **prompt.sampling}, SamplingConfig, f"{prompt.place}: sampling", {})


def _drawn(source: SourceConfig, number: int, seed: int) -> Iterator[tuple[int, RawRow]]:
    """The source's rows with their counts from 1: all, or num_rows of them in an order that the seed draws."""
    rows = enumerate(read_rows(source.path, source.revision), start=1)
    if source.num_rows is None:
        yield from rows
        return

    def key(item: tuple[int, RawRow]) -> bytes:
        return sha256(f"{seed}/{number}/{item[0]}".encode()).digest()

    yield from heapq.nsmallest(source.num_rows, rows, key=key)


def _prompt(row: RawRow, source: SourceConfig, identity: str, config: DistillConfig) -> Prompt:
    """The row as a prompt; one that cannot be used says why in skip."""
    plain = Prompt(identity, row.place, system=source.system_prompt)
    try:
        if not isinstance(row.value, Mapping):
            raise UnusableRow("row is no object", "")
        made = READERS[source.kind](row.value, plain, source)
    except UnusableRow as error:
        if error.reason == UNKNOWN_KEYS and row.number == 1:
            raise UserError(f"{row.place} {error.sentence}") from error
        return replace(plain, skip=error.reason)
    made = replace(
        made,
        turns=tuple(_whole(turn) for turn in made.turns[: config.max_turns]),
        system=None if made.system is None else _whole(made.system),
        invent=None if made.invent is None else _whole(made.invent),
    )
    sampling_of(made, config.sampling)  # refuses a row's own settings before anything is asked
    return made


def _whole(text: str) -> str:
    """The text without halves of surrogate pairs, which no tokenizer and no server takes."""
    return LONE_SURROGATE.sub("\N{REPLACEMENT CHARACTER}", text)


def _of_conversation(row: Mapping[str, Any], plain: Prompt, source: SourceConfig) -> Prompt:
    messages = to_messages(row, None)
    if messages is None:
        named = next((name for name in LISTS if name in row), None)
        if named is not None:
            raise UnusableRow("no user turn", f"{named!r} is {type(row[named]).__name__}; expected a list of turns")
        raise UnusableRow(UNKNOWN_KEYS, explain_keys(row, None))
    roles = {message["role"] for message in messages}
    if "tool" in roles or row.get("tools"):
        raise UnusableRow("the conversation calls tools", "")
    system = next((m["content"] for m in messages if m["role"] == "system" and m["content"].strip()), plain.system)
    turns: list[str] = []
    before = ""
    for message in messages:
        if message["role"] == "user" and message["content"].strip():
            if before == "user":
                turns[-1] += f"\n\n{message['content']}"
            else:
                turns.append(message["content"])
        before = message["role"]
    if not turns:
        raise UnusableRow("no user turn", f"its turns are {', '.join(sorted(roles)) or 'none'}")
    return replace(plain, turns=tuple(turns), system=system)


def _of_prompt(row: Mapping[str, Any], plain: Prompt, source: SourceConfig) -> Prompt:
    sampling = row.get("sampling")
    if sampling is not None and not isinstance(sampling, Mapping):
        raise UserError(
            f"{plain.place}: sampling is {type(sampling).__name__}; expected an object such as {{top_p: 1}}"
        )
    system = row.get("system") or plain.system
    if system is not None and not isinstance(system, str):
        raise UnusableRow("system is not text", f"'system' is {type(system).__name__}; expected text")
    turns = _questions(row, source.field)
    wrong = [turn for turn in turns if not isinstance(turn, str)]
    if wrong:
        raise UnusableRow("turn is not text", f"a question is {type(wrong[0]).__name__}; expected text")
    if not turns or not all(turn.strip() for turn in turns):
        raise UnusableRow("an empty question", "")
    return replace(plain, turns=turns, system=system, sampling=dict(sampling) if sampling else None)


def _questions(row: Mapping[str, Any], field: str | None) -> tuple[Any, ...]:
    """What stands where the row's questions belong, text or not; nothing where all of it is null."""
    if field is None and isinstance(row.get("turns"), list | tuple):
        return tuple(row["turns"])
    names = (field,) if field else (*QUESTION_FIELDS, "turns")
    if not any(name in row for name in names):
        where = field or f"{' or '.join(QUESTION_FIELDS)}, or in turns"
        raise UnusableRow(UNKNOWN_KEYS, f"has keys {', '.join(map(str, row)) or 'none'}; a prompt stands under {where}")
    found = [row[name] for name in names if row.get(name) is not None]
    return (next((value for value in found if isinstance(value, str)), found[0]),) if found else ()


def _of_persona(row: Mapping[str, Any], plain: Prompt, source: SourceConfig) -> Prompt:
    if source.ask == "problem":
        return replace(plain, invent=invention(row))
    return replace(plain, turns=(question_of(row),))


def _why_not(prompt: Prompt, seen: set[str], overlap: Overlap) -> str | None:
    """Why the prompt is not asked: asked already, or near an evaluation question; null: it is asked."""
    key = asked_key(prompt.system, (*prompt.turns, prompt.invent or ""))
    if key in seen:
        return DUPLICATE
    seen.add(key)
    sent = (prompt.system, prompt.invent, *prompt.turns)
    return OVERLAPS if any(text is not None and text in overlap for text in sent) else None


READERS = {"conversations": _of_conversation, "prompts": _of_prompt, "personas": _of_persona}


def skip_counts(prompts: Sequence[Prompt]) -> Counter[str]:
    """How many rows are skipped without being asked, by reason."""
    return Counter(prompt.skip for prompt in prompts if prompt.skip is not None)


def plan_line(prompts: Sequence[Prompt]) -> str:
    """The rows, those to ask and those to skip by reason, on one line."""
    skipped = skip_counts(prompts)
    asked = [prompt for prompt in prompts if prompt.skip is None]
    turns = sum(len(prompt.turns) + (prompt.invent is not None) * 2 for prompt in asked)
    reasons = "".join(f"; {count:,} skipped: {why}" for why, count in skipped.most_common())
    return f"{len(prompts):,} rows, {len(asked):,} to ask with up to {turns:,} requests{reasons}"


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


def invention(row: Mapping[str, Any]) -> str:
    """The request for a problem for the row's persona; UnusableRow when it has none."""
    return INVENT.format(persona=_text(row, PERSONA_FIELDS, "persona"))


def question_of(row: Mapping[str, Any]) -> str:
    """The request to solve the problem that the row has; UnusableRow when it has none."""
    return solution_request(problem_in(_text(row, PROBLEM_FIELDS, "problem")))


def solution_request(problem: str) -> str:
    """The request to solve a problem."""
    return SOLVE.format(problem=problem)


def problem_in(text: str) -> str:
    """The problem in an answer: what follows its last 'Problem:', or all of it."""
    found = list(MARKER.finditer(text))
    return (text[found[-1].end() :] if found else text).strip()


def _text(row: Mapping[str, Any], names: tuple[str, ...], what: str) -> str:
    value = next((row[name] for name in names if isinstance(row.get(name), str) and row[name].strip()), None)
    if value is None:
        keys = ", ".join(map(str, row))
        raise UnusableRow(f"row has no {what}", f"has keys {keys or 'none'}; a {what} stands under {names[0]!r}")
    return str(value).strip()


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
        self.size = size
        asked = [list(found) for found in dict.fromkeys(tuple(words(question)) for question in questions)]
        counts = Counter(key for found in asked for key in set(_runs(found, size)))
        least = max(COMMON_LEAST, COMMON_SHARE * len(asked))
        self._hashes: dict[int, set[bytes]] = {size: {key for key, count in counts.items() if count < least}}
        self._whole = {_hash(found) for found in asked if found}
        for found in asked:
            if _num_words(found) >= LEAST_WORDS and self._hashes[size].isdisjoint(_runs(found, size)):
                self._hashes.setdefault(len(found), set()).add(_hash(found))

    def __contains__(self, text: str) -> bool:
        """Whether the text has a run in common with a question, or has a whole question in it."""
        found = words(text)
        if _hash(found) in self._whole:
            return True
        return any(key in hashes for size, hashes in self._hashes.items() for key in _runs(found, size))


def _num_words(found: list[str]) -> float:
    """How many words these are, those of scripts without blanks estimated."""
    return sum(1.0 / CHARACTERS_OF_A_WORD if CHARACTER.match(word) else 1.0 for word in found)


def _runs(found: list[str], size: int) -> Iterator[bytes]:
    for start in range(len(found) - size + 1):
        yield _hash(found[start : start + size])


def _hash(found: list[str]) -> bytes:
    return blake2b(" ".join(found).encode("utf-8", "replace"), digest_size=8).digest()
