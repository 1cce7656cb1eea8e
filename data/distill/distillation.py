"""A distillation: each share writes its ended rows to a journal, and a merge joins the journals."""

import asyncio
import json
import re
import time
import unicodedata
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from jinja2 import Template
from pydantic import TypeAdapter

from aerie.configs.errors import UserError
from aerie.configs.read import as_dict
from aerie.configs.schema.data import DistillConfig, GateConfig, RenderConfig
from aerie.configs.schema.heads import TargetConfig
from aerie.data.conversations import system_turns
from aerie.data.distill.answer import (
    Answer,
    Ask,
    Outcome,
    ServedTarget,
    Thinking,
    Unanswered,
)
from aerie.data.distill.prompts import (
    TEXTS,
    InputRow,
    Overlap,
    asked_key,
    make_prompts,
    plan_line,
    problem_in,
    words,
)
from aerie.data.inputs import conversation_inputs, hashed_number
from aerie.data.progress import JobShare, start_progress
from aerie.data.rendering import recipe_tokenizer
from aerie.data.shapes import Message
from aerie.data.values import UnusableRow
from aerie.model import storage
from aerie.model.storage import Lock, Manifest, Stage
from aerie.model.target_files import target_end_ids

# of a row in a journal
JOURNAL_LINE = re.compile(rb'\{"id": "([\w:.-]+)", "status": "(done|skipped|failed)", .*\}\n')
OUTCOME = TypeAdapter(Outcome)
INPUT_ROWS = TypeAdapter(list[InputRow])
SUMMARY_PAGE = Path(__file__).with_name("summary.html.jinja")

# --- flaws of answers ---------------------------------------------------------------------------

# a loop at a text's end
LOOP_TIMES = 5  # fewest rounds
LOOP_WORDS = 40  # least length
LOOP_CHARACTERS = 240
LONGEST_PERIOD = 200  # words or characters in a round
# many runs of words that occur twice
RUN_WORDS = 10
LEAST_RUNS = 40
REPEATED_SHARE = 0.6
# another script than the question's
LEAST_LETTERS = 20
FOREIGN_SHARE = 0.3
# a refusal
OPENING = 200  # characters that are searched
SORRY = (
    r"\bi(?:['’]?m| am) (?:\w+ )?(?:sorry|afraid)\b.{0,80}"
    r"\b(?:can(?:no|['’])t|unable|not able|won['’]t)"
)
UNABLE = (
    r"\bi (?:can(?:no|['’])t|won['’]t|am (?:unable|not able) to) (?:\w+ ){0,2}"
    r"(?:help|assist|provide|comply)\b"
)
MACHINE = r"\bas an? (?:ai|artificial intelligence|(?:large )?language model)\b"
REFUSAL = re.compile(f"{SORRY}|{UNABLE}|{MACHINE}", re.IGNORECASE | re.DOTALL)


def flaws(outcome: Outcome) -> list[str]:
    """A done row's flaws, except "repeated", which needs the other rows."""
    answers = outcome.answers
    parts = []  # a question, and the thinking or the content that answers it
    for question, answer in zip(outcome.turns, answers, strict=True):
        parts += [(question, answer.reasoning or ""), (question, answer.content)]
    rules = {
        "cut": any(answer.is_cut for answer in answers),
        "empty": not all(answer.content.strip() or answer.tool_calls for answer in answers),
        "loop": any(_is_loop(part) for _, part in parts),
        "language": any(_is_foreign(question, part) for question, part in parts),
        "refusal": any(REFUSAL.search(answer.content.strip()[:OPENING]) for answer in answers),
    }
    return [name for name, is_flawed in rules.items() if is_flawed]


def _is_loop(text: str) -> bool:
    split = words(text)
    runs = [tuple(split[start : start + RUN_WORDS]) for start in range(len(split) - RUN_WORDS + 1)]
    return (
        _ends_in_rounds(split, LOOP_WORDS)
        or _ends_in_rounds("".join(text.split()), LOOP_CHARACTERS)
        or (len(runs) >= LEAST_RUNS and 1.0 - len(set(runs)) / len(runs) >= REPEATED_SHARE)
    )


def _ends_in_rounds(units: Sequence[str], least: int) -> bool:
    """Whether the last `least` units or more repeat one run of units, at least LOOP_TIMES."""
    for period in range(1, min(LONGEST_PERIOD, len(units) // LOOP_TIMES) + 1):
        span = max(LOOP_TIMES, -(-least // period)) * period
        end = units[-span:]
        if span <= len(units) and end[period:] == end[:-period]:
            return True
    return False


def _is_foreign(question: str, answer: str) -> bool:
    known = set(_scripts(question))
    scripts = _scripts(answer)
    if not known or len(scripts) < LEAST_LETTERS:
        return False
    return sum(script not in known for script in scripts) / len(scripts) >= FOREIGN_SHARE


def _scripts(text: str) -> list[str]:
    # The script of each letter, such as LATIN; Japanese and Chinese count as one script.
    names = (unicodedata.name(letter, "?").split()[0] for letter in text if letter.isalpha())
    return ["CJK" if name in ("HIRAGANA", "KATAKANA") else name for name in names]


# --- the journals -------------------------------------------------------------------------------


class Ended(NamedTuple):
    """Where a journal holds an ended row."""

    is_done: bool
    path: Path
    offset: int  # of its line, in bytes


def ended_rows(directory: Path) -> dict[str, Ended]:
    """Each row's first done line, or else its last whole line, by the row's id."""
    rows: dict[str, Ended] = {}
    for path in sorted((directory / "journal").glob("shard-*.jsonl")):
        offset = 0
        with path.open("rb") as file:
            for line in file:
                if match := JOURNAL_LINE.fullmatch(line):
                    name = match[1].decode()
                    if name not in rows or not rows[name].is_done:
                        rows[name] = Ended(match[2] == b"done", path, offset)
                offset += len(line)
    return rows


@dataclass
class Merged:
    """What the merge of the journals has counted."""

    gate: GateConfig
    ends: list[dict[str, Any]] = field(default_factory=list)  # a line of outcomes.jsonl per row
    are_tokens: list[bool] = field(default_factory=list)  # per training row: is it of token ids?
    reasons: Counter[str] = field(default_factory=Counter)  # of skipped and failed rows
    flaws: Counter[str] = field(default_factory=Counter)  # of done rows; one may have several
    invented: set[str] = field(default_factory=set)  # keys of the problems

    def add(self, outcome: Outcome, thinking: Thinking, file: TextIO) -> None:
        """Counts a row, and writes its training rows if the gate keeps it."""
        end: dict[str, Any] = {"id": outcome.id, "status": outcome.status, "place": outcome.place}
        self.ends.append(end)
        if outcome.status != "done":
            end["why"] = outcome.why
            self.reasons[f"{outcome.status}: {outcome.why}"] += 1
            return
        names = flaws(outcome)
        if outcome.invented is not None:
            key = asked_key(outcome.system, outcome.turns[:1])
            if key in self.invented:
                names.append("repeated")
            self.invented.add(key)
        self.flaws.update(names)
        is_kept = all(getattr(self.gate, name) == "keep" for name in names)
        learnt = thinking.learnt(outcome)
        if is_kept and not learnt.rows:
            end |= {"status": "skipped", "why": learnt.why}
            self.reasons[f"skipped: {learnt.why}"] += 1
            return
        if is_kept and learnt.why is not None:
            self.reasons[f"ends early: {learnt.why}"] += 1
        end |= {
            "kept": is_kept,
            "flaws": names,
            "answers": len(learnt.answers),
            "tokens": sum(len(answer.answer_ids) for answer in learnt.answers),
        }
        for row in learnt.rows if is_kept else []:
            self.are_tokens.append("input_ids" in row)
            file.write(json.dumps(row, ensure_ascii=False) + "\n")

    def summary(self) -> dict[str, Any]:
        kept = [end for end in self.ends if end.get("kept")]
        status = Counter(end["status"] for end in self.ends)
        return {
            "rows": len(self.ends),
            "kept": len(kept),
            "dropped": status["done"] - len(kept),  # by the gate
            "training_rows": len(self.are_tokens),
            "as_tokens": sum(self.are_tokens),
            "answers": sum(end["answers"] for end in kept),
            "answer_tokens": sum(end["tokens"] for end in kept),
            "status": status,
            "why": self.reasons,
            "flaws": self.flaws,
        }


# --- the job ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Distillation:
    directory: Path
    config: DistillConfig
    inputs: dict[str, Any]  # JSON-ready, without the gate, which changes no answer
    questions: Sequence[str] = ()  # of the evaluation
    started: float = field(default_factory=time.time)

    @classmethod
    def of(
        cls,
        directory: Path,
        config: DistillConfig,
        target: dict[str, Any],
        questions: Sequence[str],
    ) -> "Distillation":
        """target: from data.inputs.target_inputs."""
        section = as_dict(config)
        # No URLs and no concurrency: they change no answer.
        server = section["server"] or {"model": None, "extra_body": {}, "token_ids": False}
        inputs = {
            **{
                name: section[name]
                for name in ("sources", "ngram", "max_turns", "seed", "sampling")
            },
            "files": conversation_inputs([source.path for source in config.sources]),
            "held_out": storage.digest(sorted(set(questions))),
            "server": {name: server[name] for name in ("model", "extra_body", "token_ids")},
            "target": target,
        }
        return cls(directory, config, inputs, questions)

    @property
    def stage(self) -> Stage:
        inputs = {**self.inputs, "gate": as_dict(self.config.gate)}
        return Stage("distill", self.directory, inputs, started=self.started)

    @cached_property
    def overlap(self) -> Overlap:
        return Overlap(self.questions, self.config.ngram)

    def prompts(self, overwrite: bool) -> list[InputRow]:
        """The input rows, made once; overwrite: replaces another recipe's rows and answers."""
        path = self.directory / "prompts.jsonl"
        record = path.with_suffix(".json").name
        with Lock(self.directory / ".prompts.lock") as lock:
            lock.acquire()
            checked = Manifest.check(self.directory, self.inputs, name=record)
            if isinstance(checked, storage.Foreign):
                if not overwrite:
                    raise UserError(
                        f"{self.directory}: holds prompts and answers of another recipe "
                        f"({checked.differences}); choose another --run, "
                        "or replace them with --overwrite"
                    )
                storage.remove_tree(self.directory / "journal")
            if not isinstance(checked, storage.Whole):
                prompts = make_prompts(self.config, self.questions)
                rows = INPUT_ROWS.dump_python(prompts, exclude_defaults=True)
                storage.write_text(path, "".join(json.dumps(row) + "\n" for row in rows))
                Manifest(inputs=self.inputs).write(self.directory, record)
            lock.path.unlink(missing_ok=True)
        lines = path.read_text(encoding="utf-8").splitlines()
        return INPUT_ROWS.validate_python([json.loads(line) for line in lines])

    def ask(
        self,
        prompts: list[InputRow],
        share: JobShare,
        retry: bool,
        target: AbstractAsyncContextManager[Ask],
        thinking: Thinking,
    ) -> None:
        """Asks a share's rows that have not ended; retry: also rows that ended without answers."""
        path = self.directory / f"journal/shard-{share.index:05d}-of-{share.count:05d}.jsonl"
        with Lock(path) as lock:
            if not lock.acquire(wait=False):
                raise UserError(f"{path}: another process is writing it; wait until it ends")
            rows = share.part(prompts)
            ended = {
                name for name, row in ended_rows(self.directory).items() if row.is_done or not retry
            }
            waiting = [prompt for prompt in rows if prompt.id not in ended]
            if not waiting:
                return
            # The output is whole again after the next merge.
            (self.directory / storage.FILE).unlink(missing_ok=True)
            with path.open("r+b") as file:  # cuts off a torn last line
                file.truncate(sum(len(line) for line in file if line.endswith(b"\n")))
            with start_progress(
                len(rows), "row", "distill", done=len(rows) - len(waiting)
            ) as progress:
                asyncio.run(self._interview_all(waiting, path, target, thinking, progress))

    async def _interview_all(
        self,
        prompts: Sequence[InputRow],
        journal: Path,
        target: AbstractAsyncContextManager[Ask],
        thinking: Thinking,
        progress: Any,
    ) -> None:
        """Several workers take the rows in turn; each ended row is a line in the journal."""
        queue = iter(prompts)

        async def work(ask: Ask) -> None:
            for prompt in queue:
                outcome = await self.interview(prompt, ask, thinking)
                row = OUTCOME.dump_python(outcome, exclude_defaults=True)
                line = json.dumps(row, ensure_ascii=False)
                with storage.explained(journal), journal.open("ab") as file:
                    file.write(f"{line}\n".encode("utf-8", "replace"))
                progress.update(1)

        server = self.config.server
        workers = server.concurrency * len(server.urls) if server else 1
        async with target as ask:
            await asyncio.gather(*(work(ask) for _ in range(workers)))

    async def interview(self, prompt: InputRow, ask: Ask, thinking: Thinking) -> Outcome:
        """Asks a row's questions, each after the new answers to those before."""
        if prompt.tools:
            ask = partial(ask, tools=prompt.tools)

        async def draw(messages: Sequence[Message], turn: str, is_learnt: bool = True) -> Answer:
            seed = hashed_number(f"{self.config.seed}/{prompt.id}/{turn}", bits=31)
            try:
                thinking.prompt(messages, prompt.tools)
                answer = thinking.read(await ask(messages, seed))
                if problem := thinking.problem(answer, messages):
                    raise Unanswered("skipped", problem)
                if is_learnt and not answer.is_cut:  # the gate judges cut answers
                    thinking.written(answer, messages, prompt.tools)
            except UnusableRow as error:
                raise Unanswered("skipped", error.reason) from error
            return answer

        if prompt.skip is not None:
            return Outcome(prompt.id, "skipped", prompt.place, prompt.skip)
        messages = system_turns(prompt.system)
        answers = list[Answer]()
        invented = None
        turns = prompt.turns
        try:
            if prompt.invent is not None:
                request = [{"role": "user", "content": prompt.invent}]
                invented = await draw(request, "invent", is_learnt=False)
                turns = (TEXTS["solve"].format(problem=self._problem(invented)),)
            for turn in turns:
                messages.append({"role": "user", "content": turn})
                answer = await draw(messages, str(len(answers)))
                answers.append(answer)
                messages.append(thinking.message(answer))
                # The next question would follow half an answer, or a call without its result.
                if answer.is_cut or answer.tool_calls:
                    break
        except Unanswered as error:
            # A conversation that has outgrown the context keeps its answers.
            if error.status == "failed" or not answers:
                return Outcome(prompt.id, error.status, prompt.place, error.why)
        return Outcome(
            prompt.id,
            "done",
            prompt.place,
            system=prompt.system,
            turns=turns[: len(answers)],
            answers=tuple(answers),
            invented=invented,
            tools=prompt.tools,
        )

    def _problem(self, invented: Answer) -> str:
        """The invented problem; Unanswered if it must not be asked."""
        problem = problem_in(invented.content)
        is_whole = problem and not invented.is_cut
        if flaw := self.overlap.reason(problem) if is_whole else "is cut or empty":
            raise Unanswered("skipped", f"the invented problem {flaw}")
        return problem

    def merge(self, prompts: Sequence[InputRow], thinking: Thinking) -> dict[str, Any]:
        """Writes conversations, outcomes and summary; the bytes do not depend on the shares."""
        rows = ended_rows(self.directory)
        missing = [prompt.id for prompt in prompts if prompt.id not in rows]
        if missing:
            raise UserError(
                f"{self.directory}: {len(missing):,} of {len(prompts):,} rows have not ended "
                f"(first: {missing[0]}); run the same jobs again"
            )
        merged = Merged(self.config.gate)

        def write(conversations: Path) -> None:
            with conversations.open("w", encoding="utf-8", errors="replace") as file:
                for prompt in prompts:
                    with rows[prompt.id].path.open("rb") as journal:
                        journal.seek(rows[prompt.id].offset)
                        outcome = OUTCOME.validate_json(journal.readline())
                    merged.add(outcome, thinking, file)
            if not merged.are_tokens:
                counts = (merged.flaws + merged.reasons).most_common()
                raise UserError(
                    f"{self.directory}: no row is left to train on: "
                    + "; ".join(f"{count:,} {reason}" for reason, count in counts)
                )

        storage.write_atomically(self.directory / "conversations.jsonl", write)
        storage.write_text(
            self.directory / "outcomes.jsonl",
            "".join(json.dumps(end, ensure_ascii=False) + "\n" for end in merged.ends),
        )
        summary = merged.summary()
        storage.write_json(self.directory / "summary.json", summary)
        page = Template(SUMMARY_PAGE.read_text(encoding="utf-8"), autoescape=True, trim_blocks=True)
        storage.write_text(
            self.directory / "summary.html",
            page.render(title=self.inputs["target"]["path"], config=self.config, **summary),
        )
        self.stage.finish(summary=summary)
        return summary


def run_distillation(
    job: Distillation,
    options: Namespace,
    target: TargetConfig,
    make_local: Callable[[Thinking], Ask],
    render: RenderConfig,
) -> None:
    """Runs `aerie distill`; make_local loads the target if the recipe has no server."""
    share = JobShare.of(options.shard)
    server = job.config.server
    if options.merge and (options.retry_failed or share.count > 1):
        raise UserError("--merge asks nothing; leave out --retry-failed and --shard")
    tokenizer = recipe_tokenizer(target, render)
    arguments = server.extra_body.get("chat_template_kwargs") if server else None
    thinking = Thinking(tokenizer, target_end_ids(target, tokenizer), arguments)
    job.stage.require_own_directory(options.overwrite)
    prompts = job.prompts(options.overwrite)
    print(f"distill: {plan_line(prompts)}", flush=True)
    if not options.merge:
        answers: AbstractAsyncContextManager[Ask] = (
            ServedTarget(server, server.model or target.path, job.config.sampling)
            if server
            else nullcontext(make_local(thinking))
        )
        job.ask(prompts, share, options.retry_failed, answers, thinking)
        if share.count > 1:
            print(
                f"distill: all rows of share {share} have ended; "
                "after the last share, run aerie distill --merge",
                flush=True,
            )
            return
    summary = job.merge(prompts, thinking)
    print(
        f"distill: {summary['kept']:,} of {len(prompts):,} rows kept "
        f"({summary['dropped']:,} dropped by the gate, {summary['status']['skipped']:,} skipped, "
        f"{summary['status']['failed']:,} failed): {job.directory / 'summary.html'}",
        flush=True,
    )
