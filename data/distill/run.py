"""A distillation: input rows are asked, each row's end is a line in its share's journal, and all journals are merged.

A killed job loses the rows under way and no other: the same command asks what no journal has ended.
"""

import asyncio
import json
import os
import re
import shutil
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, BinaryIO

from pydantic import TypeAdapter

from aerie.configs.errors import UserError
from aerie.configs.read import as_dict
from aerie.configs.schema.data import DistillConfig
from aerie.configs.schema.target_and_head import TargetConfig
from aerie.data.chat import target_end_ids
from aerie.data.conversations import Message, UnusableRow
from aerie.data.distill.answer import Answer, Ask, Outcome, ServedTarget, Thinking, Unanswered
from aerie.data.distill.gate import Summary, judge
from aerie.data.distill.prompts import SOLVE, Overlap, Prompt, make_prompts, plan_line, problem_in
from aerie.data.stage import Share, bar, conversation_inputs
from aerie.model import storage
from aerie.model.storage import Lock, Manifest, Stage
from aerie.model.target import load_tokenizer

LINE = re.compile(rb'\{"id": "([\w:.-]+)", "status": "(done|skipped|failed)", .*\}\n')  # of a row in a journal
OUTCOME, PROMPTS = TypeAdapter(Outcome), TypeAdapter(list[Prompt])
Target = AbstractAsyncContextManager[Ask]


def ended_rows(directory: Path) -> dict[str, tuple[bool, Path, int]]:
    """By row: whether it is done, and the file and offset of its line in a journal; answers with ids are too long.

    A row that was asked again counts as it ended last. Torn and damaged lines are none, their rows are asked again.
    """
    rows: dict[str, tuple[bool, Path, int]] = {}
    for path in sorted((directory / "journal").glob("shard-*.jsonl")):
        offset = 0
        with path.open("rb") as file:
            for line in file:
                if (match := LINE.fullmatch(line)) and not rows.get(match[1].decode(), (False,))[0]:
                    rows[match[1].decode()] = (match[2] == b"done", path, offset)
                offset += len(line)
    return rows


@dataclass(frozen=True)
class Job:
    """A distillation: where it is written and what its answers are made from (JSON-ready)."""

    directory: Path
    config: DistillConfig
    inputs: dict[str, Any]

    @classmethod
    def of(cls, directory: Path, config: DistillConfig, target: dict[str, Any], questions: Iterable[str]) -> "Job":
        """target is data.stage.target_inputs', questions are the texts that are held out, wherever they come from.

        How answers are carried (URLs, concurrency, this process) does not change what they are.
        """
        section = as_dict(config)
        server = section["server"] or {"model": None, "extra_body": {}, "token_ids": False}
        inputs = {name: section[name] for name in ("sources", "ngram", "max_turns", "seed", "sampling")}
        inputs["files"] = conversation_inputs([source.path for source in config.sources])
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
                storage.write_text(path, "".join(json.dumps(row) + "\n" for row in prompts))
                Manifest(inputs=self.inputs).write(self.directory, record)
            lock.forget()
        return PROMPTS.validate_python([json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()])

    def ask(
        self, prompts: list[Prompt], share: Share, retry: bool, target: Target, thinking: Thinking, overlap: Overlap
    ) -> None:
        """Asks the rows of a share that no journal has ended, each with one line at its end.

        retry: also those that ended without answers. UserError when another process has the share's journal.
        """
        path = self.directory / f"journal/shard-{share.index:05d}-of-{share.count:05d}.jsonl"
        server = self.config.server
        width = server.concurrency * len(server.urls) if server else 1

        async def ask_all(waiting: list[Prompt], file: BinaryIO, progress: Any) -> None:
            rows = iter(waiting)

            async def work(ask: Ask) -> None:
                for prompt in rows:
                    outcome = await self.interview(prompt, ask, thinking, overlap)
                    line = json.dumps(OUTCOME.dump_python(outcome, exclude_defaults=True), ensure_ascii=False)
                    with storage.explained(path):
                        file.write(f"{line}\n".encode("utf-8", "replace"))
                        file.flush()
                    progress.update(1)

            async with target as ask:
                await asyncio.gather(*(work(ask) for _ in range(width)))

        with Lock(path) as lock:
            if not lock.acquire(wait=False):
                raise UserError(f"{path}: another process writes it; wait for it, or end it first")
            ended = {row for row, (is_done, *_) in ended_rows(self.directory).items() if is_done or not retry}
            share_prompts = prompts[share.index - 1 :: share.count]
            waiting = [prompt for prompt in share_prompts if prompt.id not in ended]
            if waiting:
                (self.directory / storage.FILE).unlink(missing_ok=True)  # whole again when it is merged anew
                done = len(share_prompts) - len(waiting)
                with path.open("r+b") as file, bar(len(share_prompts), "row", "distill", done=done) as progress:
                    file.truncate(sum(len(line) for line in file if line.endswith(b"\n")))  # without a torn last line
                    file.seek(0, os.SEEK_END)
                    asyncio.run(ask_all(waiting, file, progress))

    async def interview(self, prompt: Prompt, ask: Ask, thinking: Thinking, overlap: Overlap) -> Outcome:
        """How a row ends; overlap is for problems that the target invents. UserError when the whole run has to end."""

        async def draw(messages: Sequence[Message], turn: str) -> Answer:
            # of the row and turn alone, whichever job and attempt asks
            seed = int.from_bytes(sha256(f"{self.config.seed}/{prompt.id}/{turn}".encode()).digest()[:4], "big") >> 1
            try:
                thinking.prompt(messages)
            except UnusableRow as error:
                raise Unanswered("skipped", error.reason) from error
            return thinking.read(await ask(messages, seed))

        if prompt.skip is not None:
            return Outcome(prompt.id, "skipped", prompt.place, prompt.skip)
        messages: list[Message] = [{"role": "system", "content": prompt.system}] if prompt.system else []
        answers, invented, turns = list[Answer](), None, prompt.turns
        try:
            if prompt.invent is not None:
                invented = await draw([{"role": "user", "content": prompt.invent}], "invent")
                problem = problem_in(invented.content)
                flaw = "is cut or empty" if invented.is_cut or not problem else overlap.reason(problem)
                if flaw:
                    raise Unanswered("skipped", f"the invented problem {flaw}")
                turns = (SOLVE.format(problem=problem),)
            for turn in turns:
                messages.append({"role": "user", "content": turn})
                answers.append(await draw(messages, str(len(answers))))
                messages.append(thinking.message(answers[-1]))
                if answers[-1].is_cut:  # the next question would follow half an answer
                    break
        except Unanswered as error:
            # A conversation that has outgrown the context, or met a filter, keeps the answers that are there.
            if error.status == "failed" or not answers:
                return Outcome(prompt.id, error.status, prompt.place, error.why)
        asked = turns[: len(answers)]
        return Outcome(prompt.id, "done", prompt.place, None, prompt.system, asked, tuple(answers), invented)

    def merge(self, prompts: Sequence[Prompt], thinking: Thinking, title: str) -> Summary:
        """Writes conversations, outcomes, summary and provenance: the same bytes however many jobs the answers took.

        UserError if rows are left, or if none is kept; conversations then stay as they were.
        """
        rows = ended_rows(self.directory)
        missing = [prompt.id for prompt in prompts if prompt.id not in rows]
        if missing:
            raise UserError(
                f"{self.directory}: {len(missing):,} of {len(prompts):,} rows have not ended (first: {missing[0]}); "
                f"run the jobs that are left, or all of them again: they go on where they stopped"
            )
        summary, ends = Summary(), list[str]()

        def outcomes() -> Iterator[Outcome]:
            for prompt in prompts:
                _, path, offset = rows[prompt.id]
                with path.open("rb") as file:
                    file.seek(offset)
                    yield OUTCOME.validate_json(file.readline())

        def write(conversations: Path) -> None:
            with conversations.open("w", encoding="utf-8", errors="replace") as file:
                file.writelines(judge(outcomes(), self.config.gate, thinking, summary, ends))
            if not summary.kept:
                reasons = "; ".join(f"{count:,} {why}" for why, count in (summary.flaws + summary.why).most_common())
                raise UserError(f"{self.directory}: no row is left to train on: {reasons}")

        storage.write_atomically(self.directory / "conversations.jsonl", write)
        storage.write_text(self.directory / "outcomes.jsonl", "".join(ends))
        storage.write_json(self.directory / "summary.json", vars(summary))
        storage.write_text(self.directory / "summary.html", summary.page(self.config, title))
        self.stage.finish(summary=vars(summary))
        return summary


def distilled(
    job: Job, options: Namespace, target: TargetConfig, questions: Sequence[str], make_local: Callable[[Thinking], Ask]
) -> int:
    """The exit code of one call of the command, with its options shard, merge, retry_failed and overwrite.

    questions are the evaluation's. make_local makes the target in this process, where the recipe has no server. One
    job alone merges at the end; several leave it to a call with --merge.
    """
    share, config, server = Share.of(options.shard), job.config, job.config.server
    if options.merge and (options.retry_failed or share.count > 1):
        raise UserError("--merge asks nothing; leave --retry-failed and --shard out")
    tokenizer = load_tokenizer(target)
    arguments = server.extra_body.get("chat_template_kwargs") if server else None
    thinking = Thinking(tokenizer, target_end_ids(target, tokenizer), arguments)
    job.stage.require_own_directory(options.overwrite)
    prompts = job.prompts(questions, options.overwrite)
    print(f"distill: {plan_line(prompts)}", flush=True)
    if not options.merge:
        asked: Target
        if server:
            asked = ServedTarget(server, server.model or target.path, config.sampling)
        else:
            asked = nullcontext(make_local(thinking))
        job.ask(prompts, share, options.retry_failed, asked, thinking, Overlap(questions, config.ngram))
        if share.count > 1:
            print(f"distill {share}: the share's rows have ended; when all jobs' have: distill --merge", flush=True)
            return 0
    summary = job.merge(prompts, thinking, target.path)
    status = summary.status
    ends = f"{summary.dropped:,} dropped by the gate, {status['skipped']:,} skipped, {status['failed']:,} failed"
    print(
        f"distill: {summary.kept:,} of {len(prompts):,} rows kept ({ends}): {job.directory / 'summary.html'}",
        flush=True,
    )
    return 0
