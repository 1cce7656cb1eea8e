"""Asks one job's share of the prompts, many at a time, and writes how each ended."""

import asyncio
import time
from collections.abc import Sequence
from hashlib import sha256
from typing import Any

from data.distill import personas
from data.distill.answer import Answer, Ask, Request, Unanswered
from data.distill.config import DistillConfig
from data.distill.journal import Journal, Outcome
from data.distill.overlap import Overlap
from data.distill.prompts import OVERLAPS, Prompt, sampling_of
from data.distill.thinking import Thinking
from data.progress import bar
from data.shapes import Message, UnusableRow


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
