"""The input rows of a distillation: prompts drawn from the sources, and those that are skipped, each with its reason.

One file holds them all, the same for every job of a run: what is skipped here is an input row too and is accounted for.
"""

import heapq
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from data.chat import LONE_SURROGATE
from data.distill import personas
from data.distill.config import DistillConfig, SamplingConfig, SourceConfig
from data.distill.overlap import Overlap
from data.shapes import LISTS, UNKNOWN_KEYS, UnusableRow, explain_keys, to_messages
from data.sources import RawRow, read_rows
from model.errors import UserError
from model.files import digest, write_text
from model.recipe import as_dict, validate

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
        return replace(plain, invent=personas.invention(row))
    return replace(plain, turns=(personas.question_of(row),))


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
