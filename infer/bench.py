"""Every row on every prompt, interleaved in one process and one model load, appended to a JSONL as it goes."""

import itertools
import os
import resource
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from data.progress import bar
from infer.cached_lm import CachedLM
from infer.config import BenchConfig, MethodConfig, SamplingConfig
from infer.cycle_log import AnswerKey, CycleLog, Origin
from infer.cycle_recorder import CycleRecorder
from infer.decoders import Drafters, make_decoder
from infer.engine import Generation, SpeculativeDecoder
from infer.hardware import max_context
from infer.records import Milliseconds, Record, line_of, read_records
from infer.suite import Suite, check_tasks, suite_of
from infer.tasks import Prompt, encode_turn
from infer.variant import tree_shape
from infer.watch import watched
from model.errors import UserError
from model.target import Target

CYCLES = "cycles.jsonl"


@dataclass(frozen=True)
class Bench:
    """What is measured: the decoders of the rows on one target, and where the records go."""

    target: Target
    tokenizer: Any
    decoders: list[SpeculativeDecoder]  # of the suite's rows
    kinds: list[str | None]  # of the rows' heads
    config: BenchConfig
    directory: Path

    @cached_property
    def suite(self) -> Suite:
        return suite_of(self.config)

    @property
    def records_path(self) -> Path:
        return self.directory / "records.jsonl"

    @property
    def cycles_path(self) -> Path:
        return self.directory / CYCLES

    def max_new_tokens(self, prompt_tokens: int) -> int:
        """The length of an answer to a prompt, the same for every row: what the recipe asks, as far as there is room.

        The room is that of the target's context and of every drafter's positions, but for those that the prompt alone
        overruns: their rows fail, and shorten nobody else's answers.
        """
        limits = [decoder.proposer.max_positions for decoder in self.decoders if decoder.proposer is not None]
        limits.append(max_context(self.target) or sys.maxsize)
        room = min((limit - prompt_tokens for limit in limits if limit > prompt_tokens), default=1)
        return min(self.config.prompts.max_new_tokens, room)


def make_decoders(
    target: Target, rows: Sequence[MethodConfig], heads: Sequence[str | None], places: Sequence[str] | None = None
) -> list[SpeculativeDecoder]:
    """One decoder per row with its head's directory; each head is loaded once.

    Decoders that read the same states of the target share its key/value cache: they answer one after the other.
    """
    drafters = Drafters(target)
    places = places or [f"bench.rows.{number}" for number in range(len(rows))]
    named = zip(rows, heads, places, strict=True)
    decoders = [make_decoder(drafters, row, head, place) for row, head, place in named]
    shared: dict[tuple[int, ...], CachedLM] = {}
    for decoder in decoders:
        decoder.lm = shared.setdefault(decoder.lm.after_blocks, decoder.lm)
    return decoders


@dataclass(frozen=True)
class Job:
    """One turn of one prompt at one sampling, and the rows that answer it."""

    number: int
    sampling: SamplingConfig
    prompt: Prompt
    turn: int
    rows: list[int]

    def key(self, row: int, turn: int) -> AnswerKey:
        """What finds this row's answer to a turn of this prompt."""
        sampling = (self.sampling.temperature, self.sampling.top_k, self.sampling.top_p)
        return row, sampling, (self.prompt.task, self.prompt.prompt_id, turn)


def jobs_of(suite: Suite, prompts: Sequence[Prompt]) -> list[Job]:
    """What is measured, in order: the turns of a prompt follow each other, for each sampling in turn."""
    jobs: list[Job] = []
    for sampling in suite.samplings:
        asked = suite.rows_for(sampling, prompts)
        for prompt in prompts:
            rows = asked.get((prompt.task, prompt.prompt_id), [])
            for turn in range(len(prompt.turns) if rows else 0):
                jobs.append(Job(len(jobs), sampling, prompt, turn, rows))
    return jobs


def run(bench: Bench, prompts: list[Prompt], seed: int) -> list[Record]:
    """Measures what records.jsonl does not hold yet, and returns all records.

    For each prompt the rows take turns, starting with another one each time, so that a drift of the machine's speed
    falls on all of them alike. A conversation's later turns follow the answers of the vanilla row, in every row: all
    rows read the same prompt.
    """
    check_tasks(bench.config, prompts)
    bench.directory.mkdir(parents=True, exist_ok=True)
    jobs = jobs_of(bench.suite, prompts)
    done: dict[AnswerKey, Record] = {(r.row, r.sampling, r.prompt_key): r for r in _known(bench, prompts)}
    log = CycleLog(bench.cycles_path)
    log.keep(done)
    _warm_up(bench, prompts)
    total = sum(len(job.rows) for job in jobs)
    with bench.records_path.open("a", encoding="utf-8") as file, bar(total, "answers", "bench") as progress:
        for job in jobs:
            for offset in range(len(job.rows)):
                row = job.rows[(job.number + offset) % len(job.rows)]
                key = job.key(row, job.turn)
                if key not in done:
                    done[key], lines = _recorded(bench, job, row, done, seed + job.number)
                    if lines:
                        log.append(lines)  # before the record: without one they are dropped and measured again
                    file.write(line_of(done[key]))
                    file.flush()
                    os.fsync(file.fileno())
                progress.update()
    return compared(list(done.values()), bench.suite.vanilla)


def compared(records: list[Record], baseline: int) -> list[Record]:
    """The greedy records with `identical` set against the tokens of the baseline row at the same turn."""
    plain = {(r.sampling, r.prompt_key): r.output_ids for r in records if r.row == baseline and r.status == "ok"}
    out = []
    for record in records:
        expected = plain.get((record.sampling, record.prompt_key))
        if record.status == "ok" and record.temperature == 0.0 and expected is not None:
            record = Record(**{**record.__dict__, "identical": record.output_ids == expected})
        out.append(record)
    return out


def _known(bench: Bench, prompts: Sequence[Prompt]) -> list[Record]:
    """Records of an earlier call; a line that was cut by a kill is dropped and measured again.

    UserError when a record answers another prompt than the one that has its name now.
    """
    path = bench.records_path
    if not path.is_file():
        return []
    raw = path.read_bytes()
    whole = raw[: raw.rfind(b"\n") + 1]
    if whole != raw:
        with path.open("r+b") as file:
            file.truncate(len(whole))
    texts = {(p.task, p.prompt_id, turn): text for p in prompts for turn, text in enumerate(p.turns)}
    records = read_records(path)
    for record in records:
        if record.prompt_text != texts.get(record.prompt_key):
            raise UserError(
                f"{path}: prompt {record.prompt_id!r} of {record.task!r} was another one; measure anew with --overwrite"
            )
    return records


def _warm_up(bench: Bench, prompts: list[Prompt]) -> None:
    """A few short answers of every row, of which nothing is kept."""
    for prompt in prompts[: bench.config.warmup_prompts]:
        ids = encode_turn(prompt, (), bench.tokenizer, bench.target)
        for decoder in bench.decoders:
            try:
                decoder.generate(ids, max_new_tokens=min(24, bench.config.prompts.max_new_tokens), do_sample=False)
            except (UserError, RuntimeError):
                continue  # its answers fail likewise, and their records say why


def _recorded(bench: Bench, job: Job, row: int, done: dict[AnswerKey, Record], seed: int) -> tuple[Record, list[str]]:
    """One answer as a record, and the lines of its cycles where the recipe asks for them; none for a failure."""
    config, prompt = bench.suite.rows[row], job.prompt
    origin = Origin(
        row, config.method, **asdict(job.sampling), task=prompt.task, prompt_id=prompt.prompt_id, turn=job.turn
    )
    common: dict[str, Any] = {
        **asdict(origin),
        "head": bench.kinds[row],
        "head_path": config.head,
        "tree": tree_shape(config),
        "prompt_text": prompt.turns[job.turn],
    }
    earlier = [done[job.key(bench.suite.vanilla, turn)] for turn in range(job.turn)]
    failed = next((record for record in earlier if record.status != "ok"), None)
    if failed is not None:
        message = f"turn {failed.turn + 1} has no answer of vanilla to go on from: {failed.message}"
        return Record(**common, verify="none", status="error", message=message), []
    ids = encode_turn(prompt, [record.text for record in earlier], bench.tokenizer, bench.target)
    common |= {"prompt_tokens": ids.shape[1], "prompt_ids": tuple(ids[0].tolist())}
    if not bench.config.cycles:
        return _measured(bench, origin, common, ids, seed), []
    with watched(bench.decoders[row]) as growth:
        recorder = CycleRecorder(origin, growth)
        record = _measured(bench, origin, common, ids, seed, recorder)
    return record, recorder.lines if record.status == "ok" else []


def _measured(
    bench: Bench, origin: Origin, common: dict[str, Any], ids: Tensor, seed: int, recorder: CycleRecorder | None = None
) -> Record:
    """One answer as a record; a failure is a record with its message and no time.

    Nothing is left to the target's generation_config, which may ask for top_k 50.
    """
    generator = torch.Generator(bench.target.device).manual_seed(seed)
    forget_peak_memory()
    try:
        generation = bench.decoders[origin.row].generate(
            ids,
            max_new_tokens=bench.max_new_tokens(ids.shape[1]),
            do_sample=origin.temperature > 0,
            temperature=origin.temperature,
            top_k=origin.top_k,
            top_p=origin.top_p,
            min_p=0.0,
            generator=generator,
            on_cycle=recorder,
            timed=True,
        )
    except (UserError, RuntimeError) as error:
        message = (str(error).strip() or type(error).__name__).splitlines()[0]
        return Record(**common, verify="none", status="error", message=message)
    return Record(**common, **_facts(generation, bench.tokenizer))


def _facts(generation: Generation, tokenizer: Any) -> dict[str, Any]:
    counted, ids = generation.statistics, generation.new_ids
    ends = [1]
    for count in counted.cycle_tokens:
        ends.append(ends[-1] + count)
    texts = [tokenizer.decode(ids[:end], skip_special_tokens=True) for end in ends]
    pieces = [texts[0], *(later[len(earlier) :] for earlier, later in itertools.pairwise(texts))]
    return {
        "verify": counted.verify,
        "new_tokens": counted.new_tokens,
        "output_ids": tuple(ids),
        "text": texts[-1],
        "cycle_texts": tuple(pieces),
        "accepted": tuple(counted.accepted),
        "cycle_tokens": tuple(counted.cycle_tokens),
        "cycle_ms": tuple(round(each, 4) for each in counted.cycle_ms),
        "cycle_nodes": tuple(counted.cycle_nodes),
        "target_forwards": counted.target_forwards,
        "draft_forwards": counted.draft_forwards,
        "draft_forwards_wasted": counted.draft_forwards_wasted,
        "draft_nodes": counted.draft_nodes,
        "ms": Milliseconds(**counted.ms),
        "peak_memory_gib": peak_memory_gib(),
    }


def forget_peak_memory() -> None:
    """Makes the next peak that of what follows, on GPUs; a process cannot forget the most that it was resident."""
    for device in range(torch.cuda.device_count()):
        torch.cuda.reset_peak_memory_stats(device)


def peak_memory_gib() -> float:
    """The most memory held: on all GPUs since it was forgotten, where there is one, else by this process ever."""
    if torch.cuda.is_available():
        return sum(torch.cuda.max_memory_allocated(device) for device in range(torch.cuda.device_count())) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
