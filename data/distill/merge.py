"""All jobs' journals -> conversations to train on, one line per input row, and a summary."""

import json
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from data.distill.config import GateConfig
from data.distill.journal import Outcome, Place, ended_rows, journals
from data.distill.prompts import Prompt, asked_key
from data.distill.quality import FLAWS, flaws
from data.distill.rows import answer_ids, training_rows
from data.distill.thinking import Thinking
from model.errors import UserError
from model.files import write_atomically

EXAMPLES = 3  # rows shown for each flaw and of those without
SHOWN = 600  # characters of each text
CONVERSATIONS, OUTCOMES = "conversations.jsonl", "outcomes.jsonl"


class _NothingKept(Exception):
    """Leaves conversations that are there as they are."""


@dataclass
class Summary:
    """What the rows hold, JSON-ready but for the counters."""

    rows: int = 0
    status: Counter[str] = field(default_factory=Counter)
    why: Counter[str] = field(default_factory=Counter)  # of skipped and failed rows
    flaws: Counter[str] = field(default_factory=Counter)  # of done rows; one may have several
    dropped: int = 0  # done rows that the gate drops
    kept: int = 0
    training_rows: int = 0
    as_tokens: int = 0  # of those, rows of token ids
    answers: int = 0
    answer_tokens: int = 0
    repeats: int = 0  # lines about rows that another job had ended already: not used (failed rows asked again apart)
    lengths: list[int] = field(default_factory=list)  # tokens of each kept answer
    examples: dict[str, list[dict[str, str]]] = field(default_factory=dict)
    counts: Counter[int] = field(default_factory=Counter)  # token id -> how often it stands in kept answers
    vocab_size: int = 0

    def as_dict(self) -> dict[str, Any]:
        """The content of summary.json."""
        plain = ("rows", "dropped", "kept", "training_rows", "as_tokens", "answers", "answer_tokens", "repeats")
        values: dict[str, Any] = {name: getattr(self, name) for name in plain}
        values |= {name: dict(getattr(self, name).most_common()) for name in ("status", "why", "flaws")}
        return {**values, "lengths": self.quantiles(), "vocabulary": self.coverage()}

    def quantiles(self) -> dict[str, float]:
        """Tokens of a kept answer: least, quartiles, 95 % and most."""
        ordered = sorted(self.lengths)
        at = {"least": 0.0, "quarter": 0.25, "half": 0.5, "three_quarters": 0.75, "share_95": 0.95, "most": 1.0}
        return {name: ordered[round(share * (len(ordered) - 1))] for name, share in at.items()} if ordered else {}

    def coverage(self) -> dict[str, Any]:
        """How much of the vocabulary the answers use, and what share of their tokens its most frequent part covers."""
        total, ranked = sum(self.counts.values()), [count for _, count in self.counts.most_common()]
        sizes = [size for size in (1024, 4096, 8192, 16384, 32000, 65536) if size < self.vocab_size]
        covered = {str(size): sum(ranked[:size]) / total for size in sizes} if total else {}
        return {"size": self.vocab_size, "used": len(ranked), "tokens": total, "covered_by_most_frequent": covered}


def all_rows(directory: Path, inputs: dict[str, Any]) -> Iterator[Place]:
    """The rows of every job, in the journals' order; one that two jobs ended, or asked again, comes twice."""
    for path in journals(directory):
        yield from ended_rows(path, inputs)


def require_complete(prompts: Sequence[Prompt], ended: Collection[str], directory: Path) -> None:
    """UserError unless every input row has ended, and nothing else has."""
    missing = [prompt.id for prompt in prompts if prompt.id not in ended]
    if missing:
        raise UserError(
            f"{directory}: {len(missing):,} of {len(prompts):,} rows have not ended (the first: {missing[0]}); run "
            f"the jobs that are left, or all of them again: they go on where they stopped"
        )
    foreign = set(ended) - {prompt.id for prompt in prompts}
    if foreign:
        raise UserError(f"{directory}: {sorted(foreign)[0]} in the journals is no input row; use --overwrite")


def merge(
    directory: Path, prompts: Sequence[Prompt], inputs: dict[str, Any], gate: GateConfig, thinking: Thinking
) -> Summary:
    """Writes conversations.jsonl and outcomes.jsonl in the order of the prompts, and returns the summary.

    The same rows give the same bytes, however many jobs and sittings they took. One row at a time is in memory. Where
    no row is kept, conversations.jsonl stays as it is.
    """
    places: dict[str, Place] = {}
    summary = Summary(vocab_size=len(thinking.tokenizer))
    for place in all_rows(directory, inputs):
        before = places.get(place.id)
        if before is None or before.is_open:
            places[place.id] = place
        else:
            summary.repeats += 1
    require_complete(prompts, places, directory)
    ordered = [places[prompt.id] for prompt in prompts]

    def write(conversations: Path, outcomes: Path) -> None:
        with (
            conversations.open("w", encoding="utf-8", errors="replace") as rows,
            outcomes.open("w", encoding="utf-8", errors="replace") as ends,
        ):
            _write_rows(ordered, gate, thinking, summary, (rows, ends))
        if not summary.kept:
            raise _NothingKept

    def write_both(outcomes: Path) -> None:
        with suppress(_NothingKept):
            write_atomically(directory / CONVERSATIONS, lambda rows: write(rows, outcomes))

    write_atomically(directory / OUTCOMES, write_both)
    return summary


def require_kept(summary: Summary, directory: Path) -> None:
    """UserError with the reasons when no row is left to train on."""
    if not summary.kept:
        raise UserError(f"{directory}: no row is left to train on: {_reasons(summary)}; see summary.html there")


def _write_rows(
    ordered: Sequence[Place], gate: GateConfig, thinking: Thinking, summary: Summary, files: tuple[TextIO, TextIO]
) -> None:
    """Each row's conversations into the first file, how it ended into the second."""
    rows, ends = files
    asked: set[str] = set()
    for place in ordered:
        outcome = place.read()
        summary.rows += 1
        summary.status[outcome.status] += 1
        end: dict[str, Any] = {"id": outcome.id, "status": outcome.status, "place": outcome.place}
        if outcome.status != "done":
            summary.why[f"{outcome.status}: {outcome.why}"] += 1
            end["why"] = outcome.why
        else:
            found = _all_flaws(outcome, gate, asked)
            summary.flaws.update(found)
            _show(outcome, found, summary)
            is_kept = not any(getattr(gate, name) == "drop" for name in found)
            summary.dropped += not is_kept
            end |= {"kept": is_kept, "flaws": found, "answers": len(outcome.answers), "tokens": outcome.num_tokens}
            if is_kept:
                _keep(outcome, thinking, summary, rows)
        ends.write(json.dumps(end, ensure_ascii=False) + "\n")


def _all_flaws(outcome: Outcome, gate: GateConfig, asked: set[str]) -> list[str]:
    """The row's flaws, "repeated" among them where an invented problem is in asked, to which it is added."""
    found = flaws(outcome, gate)
    if outcome.invented is not None and outcome.turns:
        key = asked_key(outcome.system, outcome.turns[:1])
        found += ["repeated"] if key in asked else []
        asked.add(key)
    return found


def _keep(outcome: Outcome, thinking: Thinking, summary: Summary, handle: TextIO) -> None:
    rows = training_rows(outcome, thinking)
    summary.kept += 1
    summary.training_rows += len(rows)
    summary.as_tokens += sum("input_ids" in row for row in rows)
    for answer in outcome.answers:
        ids = answer_ids(answer, thinking)
        summary.answers += 1
        summary.answer_tokens += len(ids)
        summary.lengths.append(len(ids))
        summary.counts.update(ids)
    handle.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def _show(outcome: Outcome, found: list[str], summary: Summary) -> None:
    """Keeps the row as an example of each of its flaws, or of a row without."""
    for name in found or ["none"]:
        shown = summary.examples.setdefault(name, [])
        if len(shown) < EXAMPLES and outcome.answers:
            at = _flawed(outcome, name)
            answer = outcome.answers[at]
            text = answer.content or answer.reasoning or ""
            end = text if len(text) <= SHOWN else f"{text[: SHOWN // 2]} […] {text[-SHOWN // 2 :]}"
            shown.append({"id": outcome.id, "question": outcome.turns[at][:SHOWN], "answer": end})


def _flawed(outcome: Outcome, name: str) -> int:
    """The answer to show: the last of a conversation that ended in a flaw, else the first."""
    return len(outcome.answers) - 1 if name in FLAWS else 0


def _reasons(summary: Summary) -> str:
    flawed = [f"{count:,} with flaw '{name}'" for name, count in summary.flaws.most_common()]
    return "; ".join([*(f"{count:,} {why}" for why, count in summary.why.most_common()), *flawed])
