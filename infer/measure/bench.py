"""The bench: every row answers every prompt, interleaved, in one process; what is measured is appended at once."""

import itertools
import logging
import os
import platform
import re
import resource
import sys
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import transformers

from aerie.configs.errors import UserError
from aerie.configs.schema.decode import MethodConfig
from aerie.configs.schema.measure import BenchConfig, SamplingConfig
from aerie.data.stage import bar
from aerie.infer.decode.cache import CachedLM
from aerie.infer.decode.engine import Generation, SpeculativeDecoder, make_decoder
from aerie.infer.decode.methods import Drafters
from aerie.infer.measure.cycles import Origin, Recorder, append_lines, keep_answers, keep_pools, lines_of
from aerie.infer.measure.record import (
    OVERHEAD,
    RECORDS,
    SUITE,
    Key,
    Milliseconds,
    Record,
    line_of,
    read_records,
    tree_shape,
)
from aerie.infer.measure.suite import Suite, suite_of
from aerie.infer.measure.tasks import Prompt, encode_turn
from aerie.model.storage import Manifest, Stage, Whole, remove_temporaries
from aerie.model.target import Target

CYCLES, JOB = "cycles.jsonl", "job.json"
WARM_UP_TOKENS = 24


def begin_bench(stage: Stage, overwrite: bool) -> None:
    """Makes the directory this bench's: answers of an earlier call stay if they were measured under the same inputs.

    UserError for answers of other inputs, unless overwrite: then they go.
    """
    records = stage.output / RECORDS
    if not isinstance(Manifest.check(stage.output, stage.inputs, name=JOB), Whole):
        if records.is_file() and not overwrite:
            raise UserError(
                f"{records}: holds answers of another recipe, head or target; "
                f"measure anew with --overwrite, or choose another --run"
            )
        for left in (RECORDS, CYCLES, OVERHEAD, SUITE):
            (stage.output / left).unlink(missing_ok=True)
    remove_temporaries(stage.output)
    Manifest(inputs=stage.inputs).write(stage.output, JOB)


def prepare(threads: int | None) -> None:
    """Threads as the recipe says (null: torch's choice), and no chatter from the libraries."""
    if threads is not None:
        torch.set_num_threads(threads)
    warnings.filterwarnings("ignore")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    logging.getLogger("torch").setLevel(logging.ERROR)


def default_device() -> str:
    """A GPU where there is one."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def describe(target: Target) -> dict[str, Any]:
    """The device's name, torch's threads and the target's dtype, as summary.json has them."""
    if target.device.type == "cuda":
        device = torch.cuda.get_device_name(target.device)
    else:
        cpus = Path("/proc/cpuinfo").read_text(encoding="utf-8") if Path("/proc/cpuinfo").is_file() else ""
        model = re.search(r"^model name\s*: (.*)$", cpus, re.MULTILINE)
        device = model[1] if model else platform.processor() or platform.machine()
    dtype = str(target.dtype).removeprefix("torch.")
    return {"device": device, "threads": torch.get_num_threads(), "dtype": dtype}


def max_context(target: Target) -> int | None:
    """The positions that the target was trained for; null where its configuration does not say."""
    return getattr(target.config, "max_position_embeddings", None)


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
        return self.directory / RECORDS

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

    def origin(self, row: int, method: str) -> Origin:
        prompt, sampling = self.prompt, asdict(self.sampling)
        return Origin(row, method, **sampling, task=prompt.task, prompt_id=prompt.prompt_id, turn=self.turn)

    def key(self, row: int, turn: int) -> Key:
        """What finds this row's answer to a turn of this prompt (Record.key)."""
        sampling = self.sampling
        return (
            row,
            (sampling.temperature, sampling.top_k, sampling.top_p),
            (self.prompt.task, self.prompt.prompt_id, turn),
        )


def jobs_of(suite: Suite, prompts: Sequence[Prompt]) -> list[Job]:
    """What is measured, in order: the turns of a prompt follow each other, for each sampling in turn."""
    jobs: list[Job] = []
    for sampling, asked in suite.rows_for(prompts).items():
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
    tasks = list(dict.fromkeys(prompt.task for prompt in prompts))
    for number, sweep in enumerate(bench.config.sweeps):
        foreign = [task for task in sweep.tasks if task not in tasks]
        if foreign:
            raise UserError(f"bench.sweeps.{number}: no prompt is of task {foreign[0]!r}; tasks are {', '.join(tasks)}")
    bench.directory.mkdir(parents=True, exist_ok=True)
    jobs = jobs_of(bench.suite, prompts)
    done = {record.key: record for record in _known(bench, prompts)}
    keep_answers(bench.directory / CYCLES, done)
    for prompt in prompts[: bench.config.warmup_prompts]:
        ids = encode_turn(prompt, (), bench.tokenizer, bench.target)
        for decoder in bench.decoders:
            try:
                new = min(WARM_UP_TOKENS, bench.config.prompts.max_new_tokens)
                decoder.generate(ids, max_new_tokens=new, do_sample=False)
            except (UserError, RuntimeError):
                continue  # its answers fail likewise, and their records say why
    total = sum(len(job.rows) for job in jobs)
    with bench.records_path.open("a", encoding="utf-8") as file, bar(total, "answers", "bench") as progress:
        for job in jobs:
            for offset in range(len(job.rows)):
                row = job.rows[(job.number + offset) % len(job.rows)]
                key = job.key(row, job.turn)
                if key not in done:
                    done[key], cycles = _answer(bench, job, row, done, seed + job.number)
                    if cycles:
                        # before the record: cycles without a record are dropped, and measured again
                        append_lines(bench.directory / CYCLES, cycles)
                    file.write(line_of(done[key]))
                    file.flush()
                    os.fsync(file.fileno())
                progress.update()
    return compared(list(done.values()), bench.suite.vanilla)


def compared(records: list[Record], baseline: int) -> list[Record]:
    """The greedy records with `identical` set against the tokens of the baseline row at the same turn."""
    plain = {(r.sampling, r.prompt_key): r.output_ids for r in records if r.row == baseline and r.status == "ok"}

    def judged(record: Record) -> Record:
        expected = plain.get((record.sampling, record.prompt_key))
        if record.status != "ok" or record.temperature > 0 or expected is None:
            return record
        return replace(record, identical=record.output_ids == expected)

    return [judged(record) for record in records]


def _known(bench: Bench, prompts: Sequence[Prompt]) -> list[Record]:
    """Records of an earlier call; a line that a kill cut short is dropped and measured again.

    UserError when a record answers another prompt than the one that has its name now.
    """
    path = bench.records_path
    if not path.is_file():
        return []
    raw = path.read_bytes()
    with path.open("r+b") as file:
        file.truncate(raw.rfind(b"\n") + 1)
    texts = {(p.task, p.prompt_id, turn): text for p in prompts for turn, text in enumerate(p.turns)}
    records = read_records(path)
    for record in records:
        if record.prompt_text != texts.get(record.prompt_key):
            raise UserError(
                f"{path}: prompt {record.prompt_id!r} of {record.task!r} was another one; measure anew with --overwrite"
            )
    return records


def _answer(bench: Bench, job: Job, row: int, done: dict[Key, Record], seed: int) -> tuple[Record, list[str]]:
    """One answer as a record, and the lines of its cycles where the recipe asks for them.

    A failure is a record with its message and no time. Nothing is left to the target's generation_config, which may
    ask for top_k 50.
    """
    config, decoder = bench.suite.rows[row], bench.decoders[row]
    origin = job.origin(row, config.method)
    facts: dict[str, Any] = {
        **asdict(origin),
        "head": bench.kinds[row],
        "head_path": config.head,
        "tree": tree_shape(config),
        "prompt_text": job.prompt.turns[job.turn],
    }

    def failure(message: str) -> tuple[Record, list[str]]:
        return Record(**facts, verify="none", status="error", message=message), []

    earlier = [done[job.key(bench.suite.vanilla, turn)] for turn in range(job.turn)]
    for record in earlier:
        if record.status != "ok":
            return failure(f"turn {record.turn + 1} has no answer of vanilla to go on from: {record.message}")
    ids = encode_turn(job.prompt, [record.text for record in earlier], bench.tokenizer, bench.target)
    facts |= {"prompt_tokens": ids.shape[1], "prompt_ids": tuple(ids[0].tolist())}
    for device in range(torch.cuda.device_count()):
        torch.cuda.reset_peak_memory_stats(device)
    recorder = None
    if bench.config.cycles:
        recorder = Recorder()
        keep_pools(decoder)
    try:
        generation = decoder.generate(
            ids,
            max_new_tokens=bench.max_new_tokens(ids.shape[1]),
            do_sample=origin.temperature > 0,
            temperature=origin.temperature,
            top_k=origin.top_k,
            top_p=origin.top_p,
            min_p=0.0,
            generator=torch.Generator(bench.target.device).manual_seed(seed),
            on_cycle=recorder,
            timed=True,
        )
    except (UserError, RuntimeError) as error:
        return failure((str(error).strip() or type(error).__name__).splitlines()[0])
    record = Record(**facts, **_figures(generation, bench.tokenizer))
    return record, lines_of(origin, recorder.records) if recorder else []


def _figures(generation: Generation, tokenizer: Any) -> dict[str, Any]:
    """What a record says of an answer: its tokens and text, cycle by cycle, and what it cost."""
    counted, ids = generation.statistics, generation.new_ids
    ends = itertools.accumulate(counted.cycle_tokens, initial=1)
    texts = [tokenizer.decode(ids[:end], skip_special_tokens=True) for end in ends]
    if torch.cuda.is_available():
        peak = sum(torch.cuda.max_memory_allocated(device) for device in range(torch.cuda.device_count())) / 2**30
    else:  # the most that this process ever held
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return {
        "verify": counted.verify,
        "new_tokens": counted.new_tokens,
        "output_ids": tuple(ids),
        "text": texts[-1],
        "cycle_texts": (texts[0], *(later[len(earlier) :] for earlier, later in itertools.pairwise(texts))),
        "accepted": tuple(counted.accepted),
        "cycle_tokens": tuple(counted.cycle_tokens),
        "cycle_ms": tuple(round(ms, 4) for ms in counted.cycle_ms),
        "cycle_nodes": tuple(counted.cycle_nodes),
        "target_forwards": counted.target_forwards,
        "draft_forwards": counted.draft_forwards,
        "draft_forwards_wasted": counted.draft_forwards_wasted,
        "draft_nodes": counted.draft_nodes,
        "ms": Milliseconds(**counted.ms),
        "peak_memory_gib": peak,
    }
