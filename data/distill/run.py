"""A distillation: each ended row is a line in its share's journal; at the end the journals are merged."""

import asyncio
import json
import re
import unicodedata
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any

from jinja2 import Template
from pydantic import TypeAdapter

from aerie.configs.errors import UserError
from aerie.configs.read import as_dict
from aerie.configs.schema.data import DistillConfig
from aerie.configs.schema.heads import TargetConfig
from aerie.data.conversations import Message, UnusableRow
from aerie.data.distill.answer import Answer, Ask, Outcome, ServedTarget, Thinking, Unanswered
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
from aerie.data.inputs import conversation_inputs
from aerie.data.progress import JobShare, start_progress
from aerie.model import storage
from aerie.model.storage import Lock, Manifest, Stage
from aerie.model.target import load_tokenizer, target_end_ids

JOURNAL_LINE = re.compile(
    rb'\{"id": "([\w:.-]+)", "status": "(done|skipped|failed)", .*\}\n'
)  # of a row in a journal
OUTCOME, PROMPTS = TypeAdapter(Outcome), TypeAdapter(list[InputRow])
Target = AbstractAsyncContextManager[Ask]
SUMMARY_PAGE = Path(__file__).with_name("summary.html.jinja")

LOOP_TIMES, LOOP_WORDS, LOOP_CHARACTERS = (
    5,
    40,
    240,
)  # a loop at a text's end: fewest rounds, least length
LONGEST_PERIOD = 200  # words or characters in a round
RUN, LEAST_RUNS, REPEATED_SHARE = 10, 40, 0.6  # words per run; fewest runs; share of repeated runs
LEAST_LETTERS, FOREIGN_SHARE = 20, 0.3  # fewest letters; share in scripts that the question lacks
OPENING = 200  # characters that are searched for a refusal
SORRY = r"\bi(?:['’]?m| am) (?:\w+ )?(?:sorry|afraid)\b.{0,80}\b(?:can(?:no|['’])t|unable|not able|won['’]t)"
UNABLE = r"\bi (?:can(?:no|['’])t|won['’]t|am (?:unable|not able) to) (?:\w+ ){0,2}(?:help|assist|provide|comply)\b"
MACHINE = r"\bas an? (?:ai|artificial intelligence|(?:large )?language model)\b"
REFUSAL = re.compile(f"{SORRY}|{UNABLE}|{MACHINE}", re.IGNORECASE | re.DOTALL)


def flaws(outcome: Outcome) -> list[str]:
    """A done row's flaws, except "repeated", which needs the other rows."""
    answers = outcome.answers
    pairs = zip(outcome.turns, answers, strict=True)
    parts = [
        (question, part)
        for question, answer in pairs
        for part in (answer.reasoning or "", answer.content)
    ]
    rules = {
        "cut": any(answer.is_cut for answer in answers),
        "empty": not all(answer.content.strip() for answer in answers),
        "loop": any(_is_loop(part) for _, part in parts),
        "language": any(_is_foreign(question, part) for question, part in parts),
        "refusal": any(REFUSAL.search(answer.content.strip()[:OPENING]) for answer in answers),
    }
    return [name for name, is_flawed in rules.items() if is_flawed]


def _is_loop(text: str) -> bool:
    split = words(text)
    for units, least in ((split, LOOP_WORDS), ("".join(text.split()), LOOP_CHARACTERS)):
        for period in range(1, min(LONGEST_PERIOD, len(units) // LOOP_TIMES) + 1):
            span = max(LOOP_TIMES, -(-least // period)) * period
            if span <= len(units) and all(
                units[-at] == units[-at - period] for at in range(1, span - period + 1)
            ):
                return True
    runs = [tuple(split[start : start + RUN]) for start in range(len(split) - RUN + 1)]
    return len(runs) >= LEAST_RUNS and 1.0 - len(set(runs)) / len(runs) >= REPEATED_SHARE


def _is_foreign(question: str, answer: str) -> bool:
    asked, answered = set(_scripts(question)), _scripts(answer)
    foreign = sum(script not in asked for script in answered)
    return (
        bool(asked) and len(answered) >= LEAST_LETTERS and foreign / len(answered) >= FOREIGN_SHARE
    )


def _scripts(text: str) -> list[str]:
    # of each letter: LATIN, CYRILLIC; Japanese and Chinese are one
    names = (unicodedata.name(letter, "?").split()[0] for letter in text if letter.isalpha())
    return ["CJK" if name in ("HIRAGANA", "KATAKANA") else name for name in names]


def ended_rows(directory: Path) -> dict[str, tuple[bool, Path, int]]:
    """By row: whether it is done, and the file and offset of its first done line, else of its last whole line."""
    rows: dict[str, tuple[bool, Path, int]] = {}
    for path in sorted((directory / "journal").glob("shard-*.jsonl")):
        offset = 0
        with path.open("rb") as file:
            for line in file:
                if (match := JOURNAL_LINE.fullmatch(line)) and not rows.get(
                    match[1].decode(), (False,)
                )[0]:
                    rows[match[1].decode()] = (match[2] == b"done", path, offset)
                offset += len(line)
    return rows


@dataclass(frozen=True)
class Distillation:
    directory: Path
    config: DistillConfig
    inputs: dict[str, Any]  # JSON-ready, without the gate, which changes no answer
    questions: Sequence[str] = ()  # of the evaluation

    @classmethod
    def of(
        cls,
        directory: Path,
        config: DistillConfig,
        target: dict[str, Any],
        questions: Sequence[str],
    ) -> "Distillation":
        """target: from data.inputs.target_inputs. URLs and concurrency are no inputs: they change no answer."""
        section = as_dict(config)
        server = section["server"] or {"model": None, "extra_body": {}, "token_ids": False}
        inputs = {
            name: section[name] for name in ("sources", "ngram", "max_turns", "seed", "sampling")
        }
        inputs["files"] = conversation_inputs([source.path for source in config.sources])
        inputs["held_out"] = storage.digest(sorted(set(questions)))
        inputs["server"] = {name: server[name] for name in ("model", "extra_body", "token_ids")}
        return cls(directory, config, {**inputs, "target": target}, questions)

    @property
    def stage(self) -> Stage:
        return Stage("distill", self.directory, {**self.inputs, "gate": as_dict(self.config.gate)})

    @cached_property
    def overlap(self) -> Overlap:
        return Overlap(self.questions, self.config.ngram)

    def prompts(self, overwrite: bool) -> list[InputRow]:
        """The input rows, made once; overwrite replaces those of another recipe and their answers."""
        path, record = self.directory / "prompts.jsonl", "prompts.json"
        with Lock(self.directory / ".prompts.lock") as lock:
            lock.acquire()
            found = Manifest.check(self.directory, self.inputs, name=record)
            if isinstance(found, storage.Foreign):
                if not overwrite:
                    fault = f"{self.directory}: holds prompts and answers of another recipe ({found.differences})"
                    raise UserError(
                        f"{fault}; choose another --run, or replace them with --overwrite"
                    )
                storage.remove_tree(self.directory / "journal")
            if not isinstance(found, storage.Whole):
                prompts = PROMPTS.dump_python(
                    make_prompts(self.config, self.questions), exclude_defaults=True
                )
                storage.write_text(path, "".join(json.dumps(row) + "\n" for row in prompts))
                Manifest(inputs=self.inputs).write(self.directory, record)
            lock.path.unlink(missing_ok=True)
        return PROMPTS.validate_python(
            [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        )

    def ask(
        self,
        prompts: list[InputRow],
        share: JobShare,
        retry: bool,
        target: Target,
        thinking: Thinking,
    ) -> None:
        """Asks a share's rows that have not ended; retry: also those that ended without answers."""
        path = self.directory / f"journal/shard-{share.index:05d}-of-{share.count:05d}.jsonl"
        server = self.config.server
        with Lock(path) as lock:
            if not lock.acquire(wait=False):
                raise UserError(f"{path}: another process writes it; wait for it")
            ended = {
                row
                for row, (is_done, *_) in ended_rows(self.directory).items()
                if is_done or not retry
            }
            rows = share.part(prompts)
            waiting = [prompt for prompt in rows if prompt.id not in ended]
            if not waiting:
                return
            (self.directory / storage.FILE).unlink(
                missing_ok=True
            )  # whole again after the next merge
            done, queue = len(rows) - len(waiting), iter(waiting)
            with path.open("r+b") as file:
                file.truncate(
                    sum(len(line) for line in file if line.endswith(b"\n"))
                )  # without a torn last line
            with start_progress(len(rows), "row", "distill", done=done) as progress:

                async def work(ask: Ask) -> None:
                    for prompt in queue:
                        outcome = await self.interview(prompt, ask, thinking)
                        line = json.dumps(
                            OUTCOME.dump_python(outcome, exclude_defaults=True), ensure_ascii=False
                        )
                        with storage.explained(path), path.open("ab") as file:
                            file.write(f"{line}\n".encode("utf-8", "replace"))
                        progress.update(1)

                async def work_all() -> None:
                    async with target as ask:
                        workers = server.concurrency * len(server.urls) if server else 1
                        await asyncio.gather(*(work(ask) for _ in range(workers)))

                asyncio.run(work_all())

    async def interview(self, prompt: InputRow, ask: Ask, thinking: Thinking) -> Outcome:

        async def draw(messages: Sequence[Message], turn: str) -> Answer:
            seed = (
                int.from_bytes(
                    sha256(f"{self.config.seed}/{prompt.id}/{turn}".encode()).digest()[:4], "big"
                )
                >> 1
            )
            try:
                thinking.prompt(messages)
            except UnusableRow as error:
                raise Unanswered("skipped", error.reason) from error
            answer = thinking.read(await ask(messages, seed))
            if problem := thinking.problem(answer, messages):
                raise Unanswered("skipped", problem)
            return answer

        if prompt.skip is not None:
            return Outcome(prompt.id, "skipped", prompt.place, prompt.skip)
        messages: list[Message] = (
            [{"role": "system", "content": prompt.system}] if prompt.system else []
        )
        answers, invented, turns = list[Answer](), None, prompt.turns
        try:
            if prompt.invent is not None:
                invented = await draw([{"role": "user", "content": prompt.invent}], "invent")
                problem = problem_in(invented.content)
                flaw = (
                    "is cut or empty"
                    if invented.is_cut or not problem
                    else self.overlap.reason(problem)
                )
                if flaw:
                    raise Unanswered("skipped", f"the invented problem {flaw}")
                turns = (TEXTS["solve"].format(problem=problem),)
            for turn in turns:
                messages.append({"role": "user", "content": turn})
                answers.append(await draw(messages, str(len(answers))))
                messages.append(thinking.message(answers[-1]))
                if answers[-1].is_cut:  # the next question would follow half an answer
                    break
        except Unanswered as error:
            # A conversation that has outgrown the context keeps its answers.
            if error.status == "failed" or not answers:
                return Outcome(prompt.id, error.status, prompt.place, error.why)
        asked = turns[: len(answers)]
        return Outcome(
            prompt.id, "done", prompt.place, None, prompt.system, asked, tuple(answers), invented
        )

    def merge(self, prompts: Sequence[InputRow], thinking: Thinking) -> dict[str, Any]:
        """Writes conversations, outcomes and summary; the bytes do not depend on the number of jobs."""
        rows = ended_rows(self.directory)
        missing = [prompt.id for prompt in prompts if prompt.id not in rows]
        if missing:
            fault = (
                f"{len(missing):,} of {len(prompts):,} rows have not ended (first: {missing[0]})"
            )
            raise UserError(f"{self.directory}: {fault}; run the same jobs again")
        ends, made = (
            list[dict[str, Any]](),
            list[bool](),
        )  # per input row; per training row: is it of tokens?
        why, found, invented = Counter[str](), Counter[str](), set[str]()

        def write(conversations: Path) -> None:
            with conversations.open("w", encoding="utf-8", errors="replace") as file:
                for prompt in prompts:
                    _, path, offset = rows[prompt.id]
                    with path.open("rb") as journal:
                        journal.seek(offset)
                        outcome = OUTCOME.validate_json(journal.readline())
                    ends.append(
                        {"id": outcome.id, "status": outcome.status, "place": outcome.place}
                    )
                    if outcome.status != "done":
                        ends[-1]["why"] = outcome.why
                        why[f"{outcome.status}: {outcome.why}"] += 1
                        continue
                    names = flaws(outcome)
                    if outcome.invented is not None:
                        key = asked_key(outcome.system, outcome.turns[:1])
                        names += ["repeated"] if key in invented else []
                        invented.add(key)
                    found.update(names)
                    kept = all(getattr(self.config.gate, name) == "keep" for name in names)
                    tokens = sum(len(thinking.answer_ids(answer)) for answer in outcome.answers)
                    ends[-1] |= {
                        "kept": kept,
                        "flaws": names,
                        "answers": len(outcome.answers),
                        "tokens": tokens,
                    }
                    for row in thinking.training_rows(outcome) if kept else []:
                        made.append("input_ids" in row)
                        file.write(json.dumps(row, ensure_ascii=False) + "\n")
            if not made:
                reasons = "; ".join(
                    f"{count:,} {reason}" for reason, count in (found + why).most_common()
                )
                raise UserError(f"{self.directory}: no row is left to train on: {reasons}")

        storage.write_atomically(self.directory / "conversations.jsonl", write)
        lines = "".join(json.dumps(end, ensure_ascii=False) + "\n" for end in ends)
        storage.write_text(self.directory / "outcomes.jsonl", lines)
        kept, status = (
            [end for end in ends if end.get("kept")],
            Counter(end["status"] for end in ends),
        )
        summary = {
            "rows": len(ends),
            "kept": len(kept),
            "dropped": status["done"] - len(kept),  # by the gate
            "training_rows": len(made),
            "as_tokens": sum(made),  # of those, rows of token ids
            "answers": sum(end["answers"] for end in kept),
            "answer_tokens": sum(end["tokens"] for end in kept),
            "status": status,
            "why": why,  # of skipped and failed rows
            "flaws": found,  # of done rows; one may have several
        }
        storage.write_json(self.directory / "summary.json", summary)
        page = Template(SUMMARY_PAGE.read_text(encoding="utf-8"), autoescape=True, trim_blocks=True)
        text = page.render(title=self.inputs["target"]["path"], config=self.config, **summary)
        storage.write_text(self.directory / "summary.html", text)
        self.stage.finish(summary=summary)
        return summary


def run_distillation(
    job: Distillation,
    options: Namespace,
    target: TargetConfig,
    make_local: Callable[[Thinking], Ask],
) -> None:
    """Runs `aerie distill`; make_local loads the target if the recipe has no server."""
    share, server = JobShare.of(options.shard), job.config.server
    if options.merge and (options.retry_failed or share.count > 1):
        raise UserError("--merge asks nothing; leave --retry-failed and --shard out")
    tokenizer = load_tokenizer(target)
    arguments = server.extra_body.get("chat_template_kwargs") if server else None
    thinking = Thinking(tokenizer, target_end_ids(target, tokenizer), arguments)
    job.stage.require_own_directory(options.overwrite)
    prompts = job.prompts(options.overwrite)
    print(f"distill: {plan_line(prompts)}", flush=True)
    if not options.merge:
        served = (
            ServedTarget(server, server.model or target.path, job.config.sampling)
            if server
            else None
        )
        job.ask(
            prompts,
            share,
            options.retry_failed,
            served or nullcontext(make_local(thinking)),
            thinking,
        )
        if share.count > 1:
            print(
                f"distill {share}: its rows have ended; after the last share, run distill --merge",
                flush=True,
            )
            return
    summary = job.merge(prompts, thinking)
    status, page = summary["status"], job.directory / "summary.html"
    ends = f"{summary['dropped']:,} dropped by the gate, {status['skipped']:,} skipped, {status['failed']:,} failed"
    print(
        f"distill: {summary['kept']:,} of {len(prompts):,} rows kept ({ends}): {page}", flush=True
    )
