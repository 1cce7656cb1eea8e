"""A distillation: input rows are asked, each row's end is a line in its share's journal, and all journals are merged.

A killed job loses the rows under way and no other: the same command asks what no journal has ended.
"""

import asyncio
import json
import os
import re
import shutil
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import TypeAdapter, ValidationError

from aerie.configs.errors import UserError
from aerie.configs.read import as_dict
from aerie.configs.schema.data import DistillConfig
from aerie.configs.schema.target_and_head import TargetConfig
from aerie.data.chat import target_end_ids
from aerie.data.conversations import Message, UnusableRow
from aerie.data.distill.answer import FILTERED, TOO_LONG, Answer, Ask, Outcome, ServedTarget, Unanswered
from aerie.data.distill.gate import Summary, judge
from aerie.data.distill.prompts import OVERLAPS, SOLVE, Overlap, Prompt, make_prompts, plan_line, problem_in
from aerie.data.distill.thinking import Thinking
from aerie.data.inputs import named_inputs
from aerie.data.progress import Share, bar
from aerie.model import storage
from aerie.model.storage import Lock, Manifest, Stage
from aerie.model.target import load_tokenizer

BEGINNING = re.compile(rb'\{"id": "([\w:.-]+)", "status": "(done|skipped|failed)", ')  # of a row's line
OUTCOME, PROMPTS = TypeAdapter(Outcome), TypeAdapter(list[Prompt])


class Ended(NamedTuple):
    """Where the line of an ended row stands, without what is in it: answers with their ids are long."""

    id: str
    may_retry: bool  # it has failed, or a server has skipped it: another server, or other settings, may answer
    path: Path
    offset: int

    def read(self) -> Outcome:
        """The row; UserError when its line is damaged."""
        with self.path.open("rb") as handle:
            handle.seek(self.offset)
            try:
                return OUTCOME.validate_json(handle.readline())
            except ValidationError as error:
                raise _damaged(self.path, self.offset) from error


def ended_rows(directory: Path) -> Iterator[Ended]:
    """The rows of every job, in the journals' order; one that was asked again comes twice. Torn last lines are none."""
    for path in sorted((directory / "journal").glob("shard-*.jsonl")):
        offset = 0
        with path.open("rb") as handle:
            for line in handle:
                if not line.endswith(b"\n"):
                    break
                match = BEGINNING.match(line)
                if match is None or not line.endswith(b"}\n"):
                    raise _damaged(path, offset)
                is_servers = match[2] == b"skipped" and json.loads(line)["why"] in (TOO_LONG, FILTERED)
                yield Ended(match[1].decode(), match[2] == b"failed" or is_servers, path, offset)
                offset += len(line)


def _damaged(path: Path, offset: int) -> UserError:
    return UserError(f"{path}: byte {offset:,}: no whole row; delete the line, its row is then asked again")


@contextmanager
def journal(directory: Path, share: Share) -> Iterator[Callable[[Outcome], None]]:
    """Yields what appends a row to a share's journal, which ends in a whole line then.

    UserError when another process has it.
    """
    path = directory / "journal" / f"shard-{share.index:05d}-of-{share.count:05d}.jsonl"
    with Lock(path) as lock:
        if not lock.acquire(wait=False):
            raise UserError(f"{path}: another process writes it; wait for it, or end it first")
        with path.open("r+b") as file:
            file.truncate(sum(len(line) for line in file if line.endswith(b"\n")))
            file.seek(0, os.SEEK_END)

            def append(outcome: Outcome) -> None:
                values = OUTCOME.dump_python(outcome, exclude_defaults=True)
                with storage.explained(path):
                    file.write((json.dumps(values, ensure_ascii=False) + "\n").encode("utf-8", "replace"))
                    file.flush()

            try:
                yield append
            finally:
                os.fsync(file.fileno())


@dataclass(frozen=True)
class Job:
    """A distillation: where it is written and what its answers are made from (JSON-ready)."""

    directory: Path
    config: DistillConfig
    inputs: dict[str, Any]

    @classmethod
    def of(cls, directory: Path, config: DistillConfig, target: dict[str, Any], questions: Iterable[str]) -> "Job":
        """target is data.inputs.target_inputs', questions are the texts that are held out, wherever they come from.

        How answers are carried (URLs, concurrency, this process) does not change what they are.
        """
        section = as_dict(config)
        server = section["server"] or {"model": None, "extra_body": {}, "token_ids": False}
        inputs = {name: section[name] for name in ("sources", "ngram", "max_turns", "seed", "sampling")}
        inputs["files"] = named_inputs([source.path for source in config.sources])
        inputs["held_out"] = storage.digest(sorted(set(questions)))
        inputs["server"] = {name: server[name] for name in ("model", "extra_body", "token_ids")}
        return cls(directory, config, {**inputs, "target": target})

    @property
    def stage(self) -> Stage:
        """The whole stage, its gate included."""
        return Stage("distill", self.directory, {**self.inputs, "gate": as_dict(self.config.gate)})

    def prompts(self, questions: Iterable[str], overwrite: bool) -> list[Prompt]:
        """The input rows, made once and then read; UserError when those that are there are another recipe's.

        overwrite replaces theirs and deletes the answers to them. Jobs that start together do so one after the other.
        """
        path, record = self.directory / "prompts.jsonl", "prompts.json"
        with Lock(self.directory / ".prompts.lock") as lock:
            lock.acquire()
            found = Manifest.check(self.directory, self.inputs, name=record)
            if isinstance(found, storage.Foreign):
                if not overwrite:
                    raise UserError(
                        f"{self.directory}: holds prompts and answers of another recipe ({found.differences}); "
                        f"choose another --run, or replace them with --overwrite"
                    )
                shutil.rmtree(self.directory / "journal", ignore_errors=True)
            if not isinstance(found, storage.Whole):
                prompts = PROMPTS.dump_python(make_prompts(self.config, questions), exclude_defaults=True)
                storage.write_text(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in prompts))
                files = {path.name: (path.stat().st_size, storage.file_digest(path))}
                Manifest(files, self.inputs, {"rows": len(prompts)}).write(self.directory, record)
            lock.forget()
        with path.open(encoding="utf-8") as file:
            return PROMPTS.validate_python([json.loads(line) for line in file])

    def sit(self, prompts: Sequence[Prompt], share: Share, retry_failed: bool, interview: "Interview") -> None:
        """Asks the rows of a share that no journal has ended, each with one line at its end."""
        with journal(self.directory, share) as append:
            ended = {row.id for row in ended_rows(self.directory) if not (retry_failed and row.may_retry)}
            own = [prompt for position, prompt in enumerate(prompts) if position in share]
            waiting = [prompt for prompt in own if prompt.id not in ended]
            if not waiting:
                return
            (self.directory / storage.FILE).unlink(missing_ok=True)  # what was whole is so again when it is merged anew
            counts, rows = Counter[str](), iter(waiting)

            async def work(ask: Ask, shown: Any) -> None:
                for prompt in rows:
                    outcome = await interview(prompt, ask)
                    append(outcome)
                    counts[outcome.status] += 1
                    shown.set_postfix_str(f"{counts['skipped']:,} skipped, {counts['failed']:,} failed", refresh=False)
                    shown.update(1)

            async def work_together() -> None:
                async with interview.carrier() as ask:
                    with bar(len(own), "row", "distill", done=len(own) - len(waiting)) as shown:
                        width = min(interview.width, len(waiting))
                        workers = [asyncio.create_task(work(ask, shown)) for _ in range(width)]
                        try:
                            await asyncio.gather(*workers)
                        finally:
                            for worker in workers:
                                worker.cancel()
                            await asyncio.gather(*workers, return_exceptions=True)

            asyncio.run(work_together())
        ends = ", ".join(f"{counts[status]:,} {status}" for status in ("done", "skipped", "failed"))
        print(f"distill {share}: {ends}", flush=True)

    def merge(self, prompts: Sequence[Prompt], thinking: Thinking, title: str) -> Summary:
        """Writes conversations, outcomes, summary and provenance: the same bytes however many jobs the answers took.

        UserError if rows are left; where none is kept, too, behind its summary, and conversations stay as they were.
        """
        rows: dict[str, Ended] = {}
        for row in ended_rows(self.directory):
            if row.id not in rows or rows[row.id].may_retry:
                rows[row.id] = row
        missing = [prompt.id for prompt in prompts if prompt.id not in rows]
        if missing:
            raise UserError(
                f"{self.directory}: {len(missing):,} of {len(prompts):,} rows have not ended (first: {missing[0]}); "
                f"run the jobs that are left, or all of them again: they go on where they stopped"
            )
        summary = Summary()

        def write(conversations: Path) -> None:
            nonlocal summary
            with conversations.open("w", encoding="utf-8", errors="replace") as file:
                summary, ends = judge((rows[prompt.id].read() for prompt in prompts), self.config.gate, thinking, file)
            storage.write_text(self.directory / "outcomes.jsonl", "".join(ends))
            storage.write_json(self.directory / "summary.json", summary.as_dict())
            storage.write_text(self.directory / "summary.html", summary.page(self.config, title))
            if not summary.kept:
                (self.directory / storage.FILE).unlink(missing_ok=True)
                reasons = "; ".join(f"{count:,} {why}" for why, count in (summary.flaws + summary.why).most_common())
                raise UserError(f"{self.directory}: no row is left to train on: {reasons}; see summary.html there")

        storage.write_atomically(self.directory / "conversations.jsonl", write)
        self.stage.finish(summary=summary.as_dict())
        return summary


@dataclass(frozen=True)
class Interview:
    """Turns a prompt into an outcome with the help of whoever answers; overlap is for problems that they invent."""

    carrier: Callable[[], AbstractAsyncContextManager[Ask]]
    width: int  # rows under way at a time
    thinking: Thinking
    config: DistillConfig
    overlap: Overlap

    async def __call__(self, prompt: Prompt, ask: Ask) -> Outcome:
        """How a row ends; UserError when the whole run has to."""

        async def draw(messages: Sequence[Message], turn: str) -> Answer:
            # 31 bits of the row and turn alone, whichever job and attempt draws them
            seed = int.from_bytes(sha256(f"{self.config.seed}/{prompt.id}/{turn}".encode()).digest()[:4], "big") >> 1
            try:
                self.thinking.prompt(messages)
            except UnusableRow as error:
                raise Unanswered("skipped", error.reason) from error
            return self.thinking.read(await ask(messages, seed))

        if prompt.skip is not None:
            return Outcome(prompt.id, "skipped", prompt.place, prompt.skip)
        messages: list[Message] = [{"role": "system", "content": prompt.system}] if prompt.system else []
        answers, invented, turns = list[Answer](), None, prompt.turns
        try:
            if prompt.invent is not None:
                invented = await draw([{"role": "user", "content": prompt.invent}], "invent")
                problem = problem_in(invented.content)
                if invented.is_cut or not problem:
                    raise Unanswered("skipped", "the invented problem is cut or empty")
                if problem in self.overlap:
                    raise Unanswered("skipped", f"the invented problem {OVERLAPS}")
                turns = (SOLVE.format(problem=problem), *turns)
            for turn in turns:
                messages.append({"role": "user", "content": turn})
                answers.append(await draw(messages, str(len(answers))))
                messages.append(self.thinking.message(answers[-1]))
                if answers[-1].is_cut:  # the next question would follow half an answer
                    break
        except Unanswered as error:
            # A conversation that has outgrown the context, or met a filter, keeps the answers that are there.
            if error.status == "failed" or not answers:
                return Outcome(prompt.id, error.status, prompt.place, error.why)
        asked = turns[: len(answers)]
        return Outcome(prompt.id, "done", prompt.place, None, prompt.system, asked, tuple(answers), invented)


def distilled(
    job: Job, options: Namespace, target: TargetConfig, questions: Sequence[str], make_local: Callable[[Thinking], Ask]
) -> int:
    """The exit code of one call of the command, with its options shard, merge, retry_failed and overwrite.

    questions are the evaluation's. make_local makes the target in this process, where the recipe has no server. One
    job alone merges at the end; several leave it to a call with --merge.
    """
    share, config, server = Share.of(options.shard), job.config, job.config.server
    if options.merge and (options.retry_failed or share.count > 1):
        raise UserError("--merge puts all jobs' rows together and asks nothing; leave --retry-failed and --shard out")
    tokenizer = load_tokenizer(target)
    thinking = Thinking(tokenizer, target_end_ids(target, tokenizer), server.template_arguments if server else None)
    job.stage.require_own_directory(options.overwrite)
    prompts = job.prompts(questions, options.overwrite)
    print(f"distill: {plan_line(prompts)}", flush=True)

    def carrier() -> AbstractAsyncContextManager[Ask]:
        if server is None:
            return nullcontext(make_local(thinking))
        return ServedTarget(server, server.model or target.path, config.sampling)

    if not options.merge:
        width = server.concurrency * len(server.urls) if server else 1
        interview = Interview(carrier, width, thinking, config, Overlap(questions, config.ngram))
        job.sit(prompts, share, options.retry_failed, interview)
        if share.count > 1:
            print(f"distill {share}: its rows have ended; when all jobs' have: distill --merge", flush=True)
            return 0
    summary = job.merge(prompts, thinking, target.path)
    print(
        f"distill: {summary.kept:,} of {len(prompts):,} rows kept ({summary.dropped:,} dropped by the gate, "
        f"{summary.status['skipped']:,} skipped, {summary.status['failed']:,} failed; --retry-failed asks again), "
        f"{sum(summary.lengths):,} tokens: {job.directory / 'summary.html'}",
        flush=True,
    )
    return 0
