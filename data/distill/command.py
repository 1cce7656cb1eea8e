"""One sitting of a distillation: asks what is left of a job's share, and puts all shares together."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from data.chat import target_end_ids
from data.distill.answer import Ask
from data.distill.client import ServedTarget
from data.distill.job import Job
from data.distill.journal import Journal
from data.distill.overlap import Overlap
from data.distill.prompts import Prompt, plan_line
from data.distill.run import Interview
from data.distill.thinking import Thinking
from data.share import Share
from model.config import TargetConfig
from model.errors import UserError
from model.target import load_tokenizer


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
