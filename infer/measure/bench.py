"""What a bench asks: which rows are decoded with which sampling on which prompts, sweeps expanded into rows.

A sweep's row that equals one of the bench's, or another sweep's, is measured once and shown in both.
"""

import copy
import itertools
import os
import platform
import resource
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from aerie.configs.errors import UserError
from aerie.configs.read import as_dict, validate
from aerie.configs.schema.decode import MethodConfig
from aerie.configs.schema.measure import BenchConfig, PromptsConfig, SamplingConfig, SweepConfig
from aerie.configs.schema.target_and_head import TargetConfig
from aerie.data.inputs import target_inputs
from aerie.data.progress import bar
from aerie.infer.decode.cache import CachedLM
from aerie.infer.decode.engine import Generation, SpeculativeDecoder, make_decoder
from aerie.infer.decode.methods import Drafters
from aerie.infer.measure.cycles import AnswerKey, Origin, Recorder, append_lines, keep_answers, keep_pools, lines_of
from aerie.infer.measure.record import (
    Asked,
    AskedCell,
    AskedPoint,
    Milliseconds,
    Record,
    line_of,
    read_records,
    tree_shape,
)
from aerie.infer.measure.tasks import Prompt, check_sources, encode_turn, prompt_inputs
from aerie.model.hub import head_directory, is_on_hub
from aerie.model.storage import (
    CALIBRATOR,
    Stage,
    digests,
    file_digest,
    find_weights,
    read_json,
    remove_temporaries,
    write_json,
)
from aerie.model.target import Target

TEMPERATURE = "temperature"
PromptKey = tuple[str, str]


@dataclass(frozen=True)
class Cell:
    """One row at one sampling, on all prompts or on the first ones of some tasks."""

    row: int  # of Suite.rows
    sampling: SamplingConfig
    tasks: tuple[str, ...] = ()
    num_prompts: int | None = None

    def prompts(self, prompts: Sequence[Prompt]) -> list[PromptKey]:
        """(task, prompt_id) of the prompts that the cell asks."""
        counts: dict[str, int] = {}
        found = []
        for prompt in prompts:
            counts[prompt.task] = number = counts.get(prompt.task, 0) + 1
            in_time = self.num_prompts is None or number <= self.num_prompts
            if in_time and (not self.tasks or prompt.task in self.tasks):
                found.append((prompt.task, prompt.prompt_id))
        return found


@dataclass(frozen=True)
class Point:
    """One value of a sweep, for one row at one sampling."""

    sweep: str
    key: str
    value: Any
    cell: Cell


@dataclass(frozen=True)
class Suite:
    """The rows of the recipe and, behind them, those of its sweeps."""

    rows: tuple[MethodConfig, ...]
    places: tuple[str, ...]  # of each row in the recipe, for messages
    main: tuple[Cell, ...]
    points: tuple[Point, ...]
    baselines: tuple[Cell, ...]  # vanilla, where a sweep samples as the bench does not

    @property
    def vanilla(self) -> int:
        """The row that every speedup is against, and whose answers are the history of later turns."""
        return next(number for number, row in enumerate(self.rows) if row.method == "vanilla")

    @property
    def cells(self) -> tuple[Cell, ...]:
        """Everything that is measured; a cell may be part of another."""
        return (*self.main, *(point.cell for point in self.points), *self.baselines)

    @property
    def samplings(self) -> tuple[SamplingConfig, ...]:
        return tuple(dict.fromkeys(cell.sampling for cell in self.cells))

    def rows_for(self, sampling: SamplingConfig, prompts: Sequence[Prompt]) -> dict[PromptKey, list[int]]:
        """The rows that answer each prompt with this sampling, vanilla among them; none: the prompt is left out."""
        asked: dict[PromptKey, set[int]] = {(prompt.task, prompt.prompt_id): set() for prompt in prompts}
        for cell in self.cells:
            if cell.sampling == sampling:
                for key in cell.prompts(prompts):
                    asked[key].add(cell.row)
        return {key: sorted(rows) for key, rows in asked.items() if rows}


def asked_of(bench: BenchConfig, prompts: Sequence[Prompt], max_context: int | None) -> Asked:
    """What the bench asks of these prompts."""
    suite = suite_of(bench)
    main = tuple(AskedCell(cell.row, **as_dict(cell.sampling)) for cell in suite.main)
    points = tuple(
        AskedPoint(
            each.cell.row, **as_dict(each.cell.sampling),
            sweep=each.sweep, key=each.key, value=each.value, prompts=tuple(each.cell.prompts(prompts)),
        )
        for each in suite.points
    )  # fmt: skip
    return Asked(main, points, bench.by_task, bench.contexts, max_context)


def suite_of(bench: BenchConfig) -> Suite:
    """The suite of a recipe; UserError, which names the place, for a key or a value that no row has."""
    rows = list(bench.rows)
    places = [f"bench.rows.{number}" for number in range(len(rows))]
    main = tuple(Cell(row, sampling) for sampling in bench.sampling for row in range(len(rows)))
    vanilla = next(number for number, row in enumerate(rows) if row.method == "vanilla")
    points: list[Point] = []
    baselines: dict[Cell, None] = {}
    for number, sweep in enumerate(bench.sweeps):
        for value in sweep.values:
            place = f"bench.sweeps.{number} ({sweep.vary} {value})"
            for asked, sampling in _varied(sweep, value, bench.sampling, place):
                if asked not in rows:
                    rows.append(asked)
                    places.append(place)
                points.append(Point(sweep.name, sweep.vary, value, _cell(rows.index(asked), sampling, sweep)))
                if sampling not in bench.sampling:
                    baselines[_cell(vanilla, sampling, sweep)] = None
    return Suite(tuple(rows), tuple(places), main, tuple(points), tuple(baselines))


def plan_text(bench: BenchConfig) -> str:
    """What a bench would measure, on one line."""
    suite, prompts = suite_of(bench), bench.prompts
    counts = [prompts.num_prompts if task.num_prompts is None else task.num_prompts for task in prompts.tasks]
    counts = counts or [prompts.num_prompts]
    many = "all" if None in counts else str(sum(count or 0 for count in counts))
    named = f" of {', '.join(task.name for task in prompts.tasks)}" if prompts.tasks else ""
    sweeps = f", {len(bench.sweeps)} sweeps of {len(suite.points)} points" if bench.sweeps else ""
    return (
        f"bench: {len(bench.rows)} rows x {len(bench.sampling)} samplings x {many} prompts{named}, at most "
        f"{prompts.max_new_tokens} new tokens a turn{sweeps}"
    )


def check_tasks(bench: BenchConfig, prompts: Sequence[Prompt]) -> None:
    """UserError for a sweep over a task that no prompt is of."""
    known = list(dict.fromkeys(prompt.task for prompt in prompts))
    for number, sweep in enumerate(bench.sweeps):
        foreign = [task for task in sweep.tasks if task not in known]
        if foreign:
            raise UserError(f"bench.sweeps.{number}: no prompt is of task {foreign[0]!r}; tasks are {', '.join(known)}")


def _cell(row: int, sampling: SamplingConfig, sweep: SweepConfig) -> Cell:
    return Cell(row, sampling, sweep.tasks, sweep.num_prompts)


def _varied(
    sweep: SweepConfig, value: Any, samplings: Sequence[SamplingConfig], place: str
) -> list[tuple[MethodConfig, SamplingConfig]]:
    """The sweep's rows with the value, at each of its samplings."""
    used = list(sweep.sampling or samplings)
    if sweep.vary == TEMPERATURE:
        if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
            raise UserError(f"{place}: a temperature is a number, 0 or more")
        used = list(dict.fromkeys(replace(sampling, temperature=float(value)) for sampling in used))
        rows = [validate(row, MethodConfig, place, {}) for row in sweep.rows]
    else:
        rows = [with_value(row, sweep.vary, value, place) for row in sweep.rows]
    return [(row, sampling) for sampling in used for row in rows]


def with_value(row: dict[str, Any], key: str, value: Any, place: str) -> MethodConfig:
    """A recipe's row with one dotted key set; UserError, naming the place, for what a recipe could not say there."""
    values = copy.deepcopy(row)
    *parents, leaf = key.split(".")
    section: Any = values
    for parent in parents:
        if section.get(parent) is None:
            section[parent] = {}
        section = section[parent]
        if not isinstance(section, dict):
            raise UserError(f"{place}: {parent} is not a section of a row")
    section[leaf] = value
    return validate(values, MethodConfig, place, {})


def begin_bench(stage: Stage, overwrite: bool) -> None:
    """A bench that was killed goes on only under the same inputs."""
    job, records = stage.output / "job.json", stage.output / "records.jsonl"
    same = job.is_file() and read_json(job) == stage.inputs
    if records.is_file() and not same:
        if not overwrite:
            raise UserError(
                f"{records}: holds answers of another recipe, head or target; "
                f"measure anew with --overwrite, or choose another --run"
            )
        records.unlink()
    if not same:
        for left in ("cycles.jsonl", "overhead.json", "suite.json"):
            (stage.output / left).unlink(missing_ok=True)
    remove_temporaries(stage.output)
    write_json(job, stage.inputs)


def inputs_of(
    target: TargetConfig, seed: int, heads: Sequence[str | None], sections: dict[str, Any], prompts: PromptsConfig
) -> dict[str, Any]:
    """Everything that a measurement depends on, by content."""
    used = [head_directory(head) for head in dict.fromkeys(heads) if head is not None]
    return {
        "target": target_inputs(target),
        "head": [digests(head) for head in used],
        **sections,
        "prompts": prompt_inputs(prompts),
        "seed": seed,
    }


def calibrators_of(rows: Sequence[MethodConfig], heads: Sequence[str | None]) -> dict[str, Any]:
    """The digests of the calibrators that rows decode by; nothing where none does. UserError where one is missing."""
    asked = {
        head for row, head in zip(rows, heads, strict=True) if head is not None and row.tree and row.tree.calibrated
    }
    paths = {head: head_directory(head) / CALIBRATOR for head in sorted(asked)}
    for path in paths.values():
        if not path.is_file():
            raise UserError(
                f"{path}: no such file, and tree.calibrated needs it; fit it with: "
                f"python infer/main.py calibrate --config RECIPE"
            )
    return {"calibrators": {head: file_digest(path) for head, path in paths.items()}} if paths else {}


def check_inputs(target: TargetConfig, heads: Sequence[str | None], prompts: PromptsConfig) -> None:
    """Everything that can be refused before torch is imported."""
    target_inputs(target)
    check_sources(prompts)
    check_weights(heads)


def check_settings(settings: dict[str, Any]) -> None:
    """UserError for sampling settings, by transformers' names, that no sampler can have; null: not given."""
    given = {name: value for name, value in settings.items() if value is not None}
    if given.pop("max_new_tokens", 1) < 1:
        raise UserError(f"--max-new-tokens: must be at least 1, not {settings['max_new_tokens']}")
    try:
        SamplingConfig(**given)
    except ValueError as error:
        option = next((name for name in given if str(error).startswith(name)), "sampling").replace("_", "-")
        raise UserError(f"--{option}: {error}") from error
    law = next((name for name in ("top_k", "top_p") if name in given), None)
    if law is not None and not given.get("temperature"):
        option = law.replace("_", "-")
        raise UserError(f"--{option}: shapes what is drawn, and greedy decoding draws nothing; add --temperature 1")


def check_weights(heads: Sequence[str | None]) -> None:
    """UserError for a head's directory without weights."""
    for head in heads:
        if head is not None and not is_on_hub(head) and find_weights(Path(head)) is None:
            raise UserError(
                f"{head}: holds no weights; train the head with: accelerate launch train/main.py --config RECIPE"
            )


def default_device() -> str:
    """A GPU where there is one."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def describe(target: Target) -> dict[str, Any]:
    """The device's name, torch's threads and the target's dtype, as summary.json has them."""
    if target.device.type == "cuda":
        device = torch.cuda.get_device_name(target.device)
    else:
        names = [line.split(":", 1)[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
        device = names[0] if names else platform.processor() or platform.machine()
    return {
        "device": device,
        "threads": torch.get_num_threads(),
        "dtype": str(target.dtype).removeprefix("torch."),
    }


def max_context(target: Target) -> int | None:
    """The positions that the target was trained for; null where its configuration does not say."""
    found = getattr(target.config, "max_position_embeddings", None)
    return None if found is None else int(found)


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text(encoding="utf-8").splitlines()
    except OSError:
        return []


def prepare(threads: int | None) -> None:
    """Threads as the recipe says (null: torch's choice), and no chatter from the libraries."""
    import logging
    import warnings

    import torch
    import transformers

    if threads is not None:
        torch.set_num_threads(threads)
    warnings.filterwarnings("ignore")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    logging.getLogger("torch").setLevel(logging.ERROR)


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
    keep_answers(bench.cycles_path, done)
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
                        append_lines(
                            bench.cycles_path, lines
                        )  # before the record: without one they are dropped and measured again
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
    keep_pools(bench.decoders[row])
    recorder = Recorder()
    record = _measured(bench, origin, common, ids, seed, recorder)
    return record, lines_of(origin, recorder.records) if record.status == "ok" else []


def _measured(
    bench: Bench, origin: Origin, common: dict[str, Any], ids: Tensor, seed: int, recorder: Recorder | None = None
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
