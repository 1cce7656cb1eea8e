"""Answered conversations as rows to train on: text where the chat template gives the target's tokens back, else tokens.

Tokens it is where ids came with any of the answers, where an answer is cut (a template would end it, as the target did
not), and where the template rewrites what the target wrote (leaves its thinking out, or trims its blanks).
"""

from __future__ import annotations

import asyncio
import json
import math
import shutil
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any, TextIO

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from aerie.configs.errors import UserError
from aerie.configs.read import as_dict
from aerie.configs.schema.data import DistillConfig, GateConfig, SamplingConfig
from aerie.configs.schema.target_and_head import TargetConfig
from aerie.data.chat import target_end_ids
from aerie.data.conversations import Message, UnusableRow
from aerie.data.distill import prompts as personas
from aerie.data.distill.answer import Answer, Ask, Request, ServedTarget, Unanswered
from aerie.data.distill.gate import FLAWS, Thinking, flaws
from aerie.data.distill.journal import FOLDER, Journal, Outcome, Place, ended_rows, forget_others, journals
from aerie.data.distill.prompts import (
    OVERLAPS,
    Overlap,
    Prompt,
    asked_key,
    make_prompts,
    plan_line,
    read_prompts,
    sampling_of,
    skip_counts,
    write_prompts,
)
from aerie.data.inputs import named_inputs
from aerie.data.progress import Share, bar
from aerie.model.storage import FILE, Lock, Stage, digest, read_json, write_atomically, write_json, write_text
from aerie.model.target import load_tokenizer


def training_rows(outcome: Outcome, thinking: Thinking) -> list[dict[str, Any]]:
    """JSON-ready rows of a done outcome: one, or one per answer where later prompts do not begin with earlier ones."""
    turns = messages(outcome, thinking)
    places = [place for place, message in enumerate(turns) if message["role"] == "assistant"]
    answered = list(zip(places, outcome.answers, strict=True))
    have_ids = any(answer.token_ids is not None for answer in outcome.answers)
    if not have_ids and all(
        not answer.is_cut and thinking.gives_back(turns[: at + 1], answer) for at, answer in answered
    ):
        return [{"id": outcome.id, "messages": turns}]
    pairs = [
        (
            thinking.prompt_ids(turns[:at]) if answer.prompt_token_ids is None else list(answer.prompt_token_ids),
            answer_ids(answer, thinking),
        )
        for at, answer in answered
    ]
    return [{"id": outcome.id, **row} for row in _joined(pairs)]


def messages(outcome: Outcome, thinking: Thinking) -> list[Message]:
    """The conversation as it was asked and answered."""
    turns: list[Message] = [{"role": "system", "content": outcome.system}] if outcome.system else []
    for question, answer in zip(outcome.turns, outcome.answers, strict=True):
        turns += [{"role": "user", "content": question}, thinking.message(answer)]
    return turns


def answer_ids(answer: Answer, thinking: Thinking) -> list[int]:
    """The answer's tokens: those that came with it, or its text's, with the end-of-turn token where it has ended.

    Some servers leave that token out of the ids; it is what the target wrote, and has to be learnt.
    """
    ids = thinking.ids(thinking.spelt(answer)) if answer.token_ids is None else list(answer.token_ids)
    if answer.is_cut or (answer.token_ids is not None and ids and ids[-1] in thinking.end_ids):
        return ids
    end = thinking.end_id()
    return ids if end is None else [*ids, end]


def _joined(pairs: Sequence[tuple[list[int], list[int]]]) -> list[dict[str, list[int]]]:
    """Rows of ids and loss mask; an answer goes into the row of the one before while the next prompt begins with it."""
    rows: list[tuple[list[int], list[int]]] = []
    for prompt, answer in pairs:
        ids, mask = rows[-1] if rows else ([], [])
        if rows and prompt[: len(ids)] == ids:
            rows[-1] = ([*prompt, *answer], [*mask, *[0] * (len(prompt) - len(ids)), *[1] * len(answer)])
        else:
            rows.append(([*prompt, *answer], [0] * len(prompt) + [1] * len(answer)))
    return [{"input_ids": ids, "loss_mask": mask} for ids, mask in rows]


# (prompt's ids, sampling, seed) -> the answer's ids, its end-of-turn token included
Decode = Callable[[list[int], SamplingConfig, int], list[int]]


class LocalTarget:
    """Asks a target in this process, one request after the other."""

    def __init__(self, decode: Decode, thinking: Thinking, context: int | None) -> None:
        """context: the positions that the target has for prompt and answer together (null: no limit)."""
        self.decode, self.thinking, self.context = decode, thinking, context

    async def __call__(self, request: Request) -> Answer:
        """The answer; Unanswered when the prompt leaves no room for max_tokens."""
        prompt, sampling = self.thinking.prompt_ids(request.messages), request.sampling
        if self.context is not None and len(prompt) + sampling.max_tokens > self.context:
            raise Unanswered("skipped", "too long for the target's context with max_tokens")
        ids = self.decode(prompt, sampling, request.seed)
        ended = bool(ids) and ids[-1] in self.thinking.end_ids
        text = self._text(ids[:-1] if ended else ids)
        return Answer(
            content=text,
            finish="stop" if ended else "length",
            num_tokens=len(ids),
            token_ids=tuple(ids),
            prompt_token_ids=tuple(prompt),
        )

    def _text(self, ids: list[int]) -> str:
        tokenizer: Any = self.thinking.tokenizer
        return str(tokenizer.decode(ids, skip_special_tokens=True))


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


TEMPLATE = "summary.html.jinja"
BINS = 24
FREQUENT = 24  # tokens named


def render(summary: Summary, config: DistillConfig, title: str, tokenizer: Any) -> str:
    """The page's text."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["count"] = lambda value: f"{value:,}"
    environment.filters["percent"] = lambda share: f"{share:.1%}"
    frequent = [(tokenizer.decode([token]), count) for token, count in summary.counts.most_common(FREQUENT)]
    return environment.get_template(TEMPLATE).render(
        title=title,
        summary=summary,
        lengths=summary.quantiles(),
        vocabulary=summary.coverage(),
        flaws=[(name, summary.flaws[name], getattr(config.gate, name)) for name in FLAWS],
        bins=histogram(summary.lengths, config.sampling.max_tokens),
        frequent=frequent,
        sampling=config.sampling,
    )


def histogram(lengths: list[int], most: int) -> list[tuple[int, int, float]]:
    """(first length, how many, height in [0, 1]) of up to BINS equal bins from 0 to the longest answer."""
    top = max([*lengths, min(most, 8)])
    width = math.ceil((top + 1) / BINS)
    counts = [0] * math.ceil((top + 1) / width)
    for length in lengths:
        counts[length // width] += 1
    highest = max(counts) or 1
    return [(place * width, count, count / highest) for place, count in enumerate(counts)]


PROMPTS, RECORD, LOCK = "prompts.jsonl", "prompts.json", ".prompts.lock"


@dataclass(frozen=True)
class Job:
    """A distillation and its identity: what its prompts, its answers and its result are made from (JSON-ready)."""

    directory: Path
    config: DistillConfig
    prompt_inputs: dict[str, Any]
    answer_inputs: dict[str, Any]

    @classmethod
    def of(cls, directory: Path, config: DistillConfig, target: dict[str, Any], questions: Iterable[str]) -> Job:
        """target is data.inputs.target_inputs', questions are the texts that are held out, wherever they come from.

        How the answers are carried (URLs, concurrency, this process) does not change what they are; whether a
        server is asked for their token ids does.
        """
        section = as_dict(config)
        parts = {name: section[name] for name in ("sources", "ngram", "max_turns", "seed")}
        files = named_inputs([source.path for source in config.sources])
        prompts = {**parts, "files": files, "held_out": digest(sorted(set(questions)))}
        carried = section["server"] or {}
        asked = {"model": carried.get("model"), "extra_body": carried.get("extra_body") or {}}
        asked["token_ids"] = carried.get("token_ids", False)
        answers = {"prompts": digest(prompts), "target": target, "sampling": section["sampling"], "server": asked}
        return cls(directory, config, prompts, answers)

    @property
    def stage(self) -> Stage:
        """The whole stage, its gate included."""
        return Stage("distill", self.directory, {**self.answer_inputs, "gate": as_dict(self.config.gate)})

    def prompts(self, questions: Iterable[str], overwrite: bool) -> list[Prompt]:
        """The input rows, made once and then read; UserError when those that are there are another recipe's.

        overwrite: then theirs are replaced, and answers that were not made from this job's inputs are deleted.
        Jobs that start together do so one after the other: none deletes what another has begun.
        """
        with Lock(self.directory / LOCK) as lock:
            lock.acquire()
            found = self._prompts(questions, overwrite)
            lock.forget()
        return found

    def _prompts(self, questions: Iterable[str], overwrite: bool) -> list[Prompt]:
        record = self.directory / RECORD
        if record.is_file() and (self.directory / PROMPTS).is_file():
            if read_json(record)["inputs_digest"] == digest(self.prompt_inputs):
                if overwrite:
                    forget_others(self.directory, self.answer_inputs)
                return read_prompts(self.directory / PROMPTS)
            if not overwrite:
                raise UserError(
                    f"{self.directory}: holds the prompts of other sources or settings; choose another --run, or "
                    f"replace them, and the answers to them, with --overwrite"
                )
            shutil.rmtree(self.directory / FOLDER, ignore_errors=True)
        made = make_prompts(self.config, questions)
        write_prompts(self.directory / PROMPTS, made)
        facts = {"rows": len(made), "skipped": dict(skip_counts(made))}
        write_json(record, {"inputs_digest": digest(self.prompt_inputs), "inputs": self.prompt_inputs, **facts})
        return made

    def journal(self, shard: Share) -> Journal:
        """The journal of one share, to be opened."""
        return Journal(self.directory, shard, self.answer_inputs)

    def left(self, prompts: Sequence[Prompt], journal: Journal, retry_failed: bool) -> tuple[list[Prompt], int]:
        """The rows of a share that have not ended yet, and how many have; its failed ones may be taken up again.

        The journal is the share's, open, so that no other process ends these rows between this look and the asking.
        """
        places = all_rows(self.directory, self.answer_inputs)
        ended = {place.id for place in places if not (retry_failed and place.is_open)}
        own = [prompt for position, prompt in enumerate(prompts) if position in journal.shard]
        waiting = [prompt for prompt in own if prompt.id not in ended]
        return waiting, len(own) - len(waiting)

    def has_answers(self) -> bool:
        """Whether any row has been answered, in whichever share and sitting."""
        return any(place.status == "done" for place in all_rows(self.directory, self.answer_inputs))

    async def answer(
        self, waiting: Sequence[Prompt], begun: int, interview: Interview, journal: Journal, width: int
    ) -> dict[str, int]:
        """Asks the rows that are left; how many ended as what. What was whole is so again when it is merged anew."""
        if self.stage.is_whole():
            (self.directory / FILE).unlink(missing_ok=True)  # jobs may do so together
        return await answer_all(waiting, interview, journal, width, begun)

    def finish(self, prompts: Sequence[Prompt], thinking: Thinking, title: str) -> Summary:
        """Merges the journals; writes conversations, outcomes, summary and provenance.

        UserError if rows are left; where none is kept, too, behind its summary, and conversations stay as they were.
        """
        stage = self.stage
        summary = merge(self.directory, prompts, self.answer_inputs, self.config.gate, thinking)
        write_json(self.directory / "summary.json", summary.as_dict())
        write_text(self.directory / "summary.html", render(summary, self.config, title, thinking.tokenizer))
        if not summary.kept:
            (self.directory / FILE).unlink(missing_ok=True)  # what was whole had another summary
        require_kept(summary, self.directory)
        stage.finish(summary=summary.as_dict())
        return summary


class Interview:
    """Turns a prompt into an outcome with the help of whoever answers."""

    def __init__(self, ask: Ask, thinking: Thinking, config: DistillConfig, overlap: Overlap) -> None:
        """overlap is with the evaluation questions, for problems that the target invents."""
        self.ask, self.thinking, self.config, self.overlap = ask, thinking, config, overlap

    async def outcome(self, prompt: Prompt) -> Outcome:
        """How the row ends; UserError when the whole run has to."""
        if prompt.skip is not None:
            return Outcome(prompt.id, "skipped", prompt.place, prompt.skip)
        try:
            return await self._answered(prompt)
        except Unanswered as error:
            return Outcome(prompt.id, error.status, prompt.place, error.why)

    async def _answered(self, prompt: Prompt) -> Outcome:
        invented, turns = None, prompt.turns
        if prompt.invent is not None:
            invented = await self._draw(prompt, [{"role": "user", "content": prompt.invent}], "invent")
            turns = (self._question(invented), *turns)
        messages: list[Message] = [{"role": "system", "content": prompt.system}] if prompt.system else []
        answers: list[Answer] = []
        for turn in turns:
            messages.append({"role": "user", "content": turn})
            try:
                answer = await self._draw(prompt, messages, str(len(answers)))
            except Unanswered as error:
                if (
                    error.status == "skipped" and answers
                ):  # it has outgrown the context, or met a filter: keep what is there
                    break
                raise
            answers.append(answer)
            messages.append(self.thinking.message(answer))
            if answer.is_cut:  # the next question would follow half an answer
                break
        asked = turns[: len(answers)]
        return Outcome(prompt.id, "done", prompt.place, None, prompt.system, asked, tuple(answers), invented)

    async def _draw(self, prompt: Prompt, messages: Sequence[Message], turn: str) -> Answer:
        sampling = sampling_of(prompt, self.config.sampling)
        request = Request(tuple(messages), sampling, seed_of(self.config.seed, prompt.id, turn))
        try:
            self.thinking.prompt(messages)
        except UnusableRow as error:
            raise Unanswered("skipped", error.reason) from error
        return self.thinking.read(await self.ask(request))

    def _question(self, invented: Answer) -> str:
        """The request to solve an invented problem; Unanswered when it is none that can be used."""
        problem = personas.problem_in(invented.content)
        if invented.is_cut or not problem:
            raise Unanswered("skipped", "the invented problem is cut" if invented.is_cut else "no problem was invented")
        if problem in self.overlap:
            raise Unanswered("skipped", f"the invented problem {OVERLAPS}")
        return personas.solution_request(problem)


def seed_of(seed: int, identity: str, turn: str) -> int:
    """A request's own seed, 31 bits, whichever job and attempt draws it."""
    return int.from_bytes(sha256(f"{seed}/{identity}/{turn}".encode()).digest()[:4], "big") >> 1


async def answer_all(
    prompts: Sequence[Prompt], interview: Interview, journal: Journal, width: int, begun: int = 0
) -> dict[str, int]:
    """How many rows ended as what, in this sitting; width of them are under way at a time.

    begun: rows of this share that earlier sittings have ended, for the bar.
    """
    counts = {"done": 0, "skipped": 0, "failed": 0}
    waiting = iter(prompts)
    started, tokens = time.monotonic(), 0
    with bar(begun + len(prompts), "row", "distill", done=begun) as shown:

        async def work() -> None:
            nonlocal tokens
            for prompt in waiting:
                outcome = await interview.outcome(prompt)
                journal.append(outcome)
                counts[outcome.status] += 1
                tokens += outcome.num_tokens
                rate = tokens / max(time.monotonic() - started, 1e-3)
                note: Any = f"{rate:,.0f} tok/s, {counts['skipped']:,} skipped, {counts['failed']:,} failed"
                shown.set_postfix_str(note, refresh=False)
                shown.update(1)

        workers = [asyncio.create_task(work()) for _ in range(max(1, min(width, len(prompts))))]
        try:
            await asyncio.gather(*workers)
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)
    return counts


@dataclass(frozen=True)
class Sitting:
    """What one call was asked to do."""

    shard: Share
    merge: bool  # ask nothing
    retry_failed: bool
    overwrite: bool

    def require_sense(self) -> None:
        """UserError for requests that contradict each other."""
        if self.merge and self.retry_failed:
            raise UserError("--merge asks nothing, and --retry-failed asks again; use one of them")
        if self.merge and self.shard.count > 1:
            raise UserError(f"--merge puts all jobs' rows together; leave --shard {self.shard} out")


def distilled(
    job: Job,
    sitting: Sitting,
    target: TargetConfig,
    questions: Sequence[str],
    make_local: Callable[[Thinking], Ask],
    api_key: str,
) -> int:
    """The exit code of one sitting. make_local makes the target in this process, where the recipe has no server.

    questions are the evaluation's. One job alone merges at the end; several leave it to a call with `merge`.
    """
    tokenizer = load_tokenizer(target)
    server = job.config.server
    arguments = None if server is None else server.template_arguments
    thinking = Thinking(tokenizer, target_end_ids(target, tokenizer), arguments)
    job.stage.require_own_directory(sitting.overwrite)
    prompts = job.prompts(questions, sitting.overwrite)
    print(f"distill: {plan_line(prompts)}", flush=True)
    if not sitting.merge:
        with job.journal(sitting.shard) as journal:
            rows = job.left(prompts, journal, sitting.retry_failed)
            if rows[0]:
                overlap = Overlap(questions, job.config.ngram)

                async def ask() -> dict[str, int]:
                    if job.config.server is None:
                        return await _asked(job, journal, rows, make_local(thinking), thinking, overlap)
                    model = job.config.server.model or target.path
                    served = ServedTarget(job.config.server, model, api_key, job.has_answers())
                    try:
                        return await _asked(job, journal, rows, served, thinking, overlap)
                    finally:
                        await served.close()

                counts = ", ".join(f"{n:,} {name}" for name, n in asyncio.run(ask()).items())
                print(f"distill {sitting.shard}: {counts}", flush=True)
        if sitting.shard.count > 1:
            print(f"distill {sitting.shard}: its rows have ended; when all jobs' have: distill --merge", flush=True)
            return 0
    _finish(job, prompts, thinking, target.path)
    return 0


async def _asked(
    job: Job, journal: Journal, rows: tuple[Sequence[Prompt], int], ask: Ask, thinking: Thinking, overlap: Overlap
) -> dict[str, int]:
    server = job.config.server
    width = 1 if server is None else server.concurrency * len(server.urls)
    waiting, begun = rows
    return await job.answer(waiting, begun, Interview(ask, thinking, job.config, overlap), journal, width)


def _finish(job: Job, prompts: Sequence[Prompt], thinking: Thinking, title: str) -> None:
    summary = job.finish(prompts, thinking, title)
    failed = summary.status["failed"]
    print(
        f"distill: {summary.kept:,} of {summary.rows:,} rows kept ({summary.dropped:,} dropped by the gate, "
        f"{summary.status['skipped']:,} skipped, {failed:,} failed), {summary.answer_tokens:,} tokens: "
        f"{job.directory / 'summary.html'}" + ("; --retry-failed asks the failed ones again" if failed else ""),
        flush=True,
    )
