"""The bench: every row answers every prompt in one process; also transformers' generate, and bare forwards."""

import itertools
import logging
import os
import platform
import re
import resource
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor

from aerie.configs.errors import UserError
from aerie.configs.read import as_dict, validate
from aerie.configs.schema.decode import MethodConfig
from aerie.configs.schema.measure import BenchConfig
from aerie.data.chat import answer_text
from aerie.data.progress import start_progress
from aerie.infer.decode.cache import CachedLM
from aerie.infer.decode.engine import Clock, SpeculativeDecoder, make_decoder
from aerie.infer.decode.graphs import cycle_of
from aerie.infer.decode.methods import Drafters, kind_at
from aerie.infer.decode.sampling import Sampler, resolve
from aerie.infer.decode.shape import Drafting
from aerie.infer.decode.tree import root_only
from aerie.infer.measure import bench_files as results
from aerie.infer.measure.bench_files import (
    REFERENCE,
    Key,
    Origin,
    PromptKey,
    Record,
    Reference,
    line_of,
)
from aerie.infer.measure.recorder import Recorder, append_lines, keep_answers, lines_of
from aerie.infer.measure.suite import Suite, suite_of
from aerie.infer.measure.tasks import Prompt, encode_turn, load_prompts, pinned, prompt_inputs
from aerie.infer.measure.tree_shape import tree_shape
from aerie.model import storage
from aerie.model.hub import quieten
from aerie.model.kv_cache import KeptRows
from aerie.model.storage import (
    Foreign,
    Manifest,
    Stage,
    Whole,
    first_line,
    remove_temporaries,
    write_json,
    write_text,
)
from aerie.model.target import Target, context_of

CYCLES, JOB = "cycles.jsonl", "job.json"
WARM_UP_TOKENS = 24
REFERENCE_PROMPTS = 12  # that are timed
CYCLE_PHASES = ("draft", "verify", "commit", "other")  # of a cycle; they sum to its time
ROUNDING = 4.0  # in units of eps times the largest logit


@dataclass(frozen=True)
class Difference:
    """The first token that differs, and how far apart the two tokens' logits are in a plain forward."""

    prompt: int
    position: int
    ours: int  # -1: the answer ended before
    theirs: int
    gap: float
    rounding: float  # a gap that rounding can make in the target's dtype

    @property
    def margin(self) -> float:
        """The gap over what rounding can make; at most 1: rounding explains the difference."""
        return self.gap / self.rounding if self.rounding else float("inf")


def begin_bench(stage: Stage, overwrite: bool) -> None:
    """Keeps a stopped bench's answers to the same inputs; UserError for others, unless overwrite."""
    records, is_ended = stage.output / results.RECORDS, (stage.output / storage.FILE).is_file()
    checked = Manifest.check(stage.output, stage.inputs, name=JOB)
    if is_ended or not isinstance(checked, Whole):
        if records.is_file() and not overwrite:
            changed = checked.differences if isinstance(checked, Foreign) else str(checked)
            raise UserError(
                f"{records}: answers another recipe ({changed}); choose another --run, or add --overwrite"
            )
        for left in (storage.FILE, results.RECORDS, CYCLES, results.SUITE):
            (stage.output / left).unlink(missing_ok=True)
    remove_temporaries(stage.output)
    Manifest(inputs=stage.inputs).write(stage.output, JOB)


def load_quietly(config: Any, threads: int | None) -> Target:
    if threads is not None:
        torch.set_num_threads(threads)
    warnings.filterwarnings("ignore")
    quieten()
    logging.getLogger("torch").setLevel(logging.ERROR)
    return Target.load(config, "cuda" if torch.cuda.is_available() else "cpu")


def describe(target: Target) -> dict[str, Any]:
    """Device, threads, dtype and cycle, as summary.json has them."""
    cpus = (
        Path("/proc/cpuinfo").read_text(encoding="utf-8") if Path("/proc/cpuinfo").is_file() else ""
    )
    model = re.search(r"^model name\s*: (.*)$", cpus, re.MULTILINE)
    device = model[1] if model else platform.processor() or platform.machine()
    if target.device.type == "cuda":
        device = torch.cuda.get_device_name(target.device)
    facts = {
        "device": device,
        "threads": torch.get_num_threads(),
        "dtype": str(target.dtype).removeprefix("torch."),
    }
    return facts | {"cycle": cycle_of(target)}


@dataclass(frozen=True)
class Bench:
    target: Target
    tokenizer: Any
    decoders: list[SpeculativeDecoder]  # of the suite's rows
    kinds: list[str | None]  # of the rows' heads
    config: BenchConfig
    suite: Suite
    directory: Path

    def settings(self, ids: Tensor) -> dict[str, Any]:
        """Greedy decoding of a prompt [1, T], alike for every row and as long as there is room."""
        # a limit that the prompt alone exceeds does not count: its row fails
        limits = {limit for decoder in self.decoders for limit in decoder.limits.values()}
        room = min((limit - ids.shape[1] for limit in limits if limit > ids.shape[1]), default=1)
        return {"max_new_tokens": min(self.config.prompts.max_new_tokens, room), "do_sample": False}


def make_decoders(
    target: Target, rows: Sequence[MethodConfig], heads: Sequence[str | None]
) -> list[SpeculativeDecoder]:
    """One decoder per row with its head's directory; those that read the same target states share a cache."""
    drafters, shared = Drafters(target), dict[tuple[int, ...], CachedLM]()
    decoders = [make_decoder(drafters, *named) for named in zip(rows, heads, strict=True)]
    for decoder in decoders:
        decoder.lm = shared.setdefault(decoder.lm.after_blocks, decoder.lm)
    return decoders


def measured(
    section: BenchConfig,
    heads: Sequence[str | None],
    output: Path,
    seed: int,
    target: Target,
    tokenizer: Any,
) -> dict[str, Any]:
    """Runs the bench; returns its facts."""
    asked, kinds = pinned(section.prompts), [head and kind_at(head) for head in heads]
    prompts, longest = load_prompts(asked), context_of(target.config)
    suite = suite_of(section, prompts)
    bench = Bench(
        target, tokenizer, make_decoders(target, suite.rows, heads), kinds, section, suite, output
    )
    what = results.SuiteFile(suite.main, suite.points, section.by_task, section.contexts, longest)
    write_json(output / results.SUITE, as_dict(what))
    records = run(bench, prompts, seed)
    if records and all(record.status == "error" for record in records):
        raise UserError(f"{output}: all {len(records)} answers failed: {records[0].message}")
    if section.reference:
        records = run_reference(bench, records)
    write_text(output / results.RECORDS, "".join(map(line_of, records)))
    failed = [record.message for record in records if record.status == "error"]
    print(f"bench: {len(records)} answers -> {output}; {len(failed)} failed", *failed[:1])
    return {"answers": len(records), "prompts": prompt_inputs(asked)}


def run(bench: Bench, prompts: list[Prompt], seed: int) -> list[Record]:
    """Measures what records.jsonl lacks; returns all. Rows take turns; later turns follow vanilla's answers."""
    tasks = list(dict.fromkeys(prompt.task for prompt in prompts))
    for number, sweep in enumerate(bench.config.sweeps):
        if foreign := [task for task in sweep.tasks if task not in tasks]:
            raise UserError(
                f"bench.sweeps.{number}: no prompt is of task {foreign[0]!r}; tasks are {', '.join(tasks)}"
            )
    bench.directory.mkdir(parents=True, exist_ok=True)
    turns: list[tuple[Prompt, list[Origin]]] = []
    for (sampling, asked), prompt in itertools.product(
        bench.suite.rows_for(prompts).items(), prompts
    ):
        if rows := asked.get((prompt.task, prompt.prompt_id)):
            for turn in range(len(prompt.turns)):
                place = (prompt.task, prompt.prompt_id, turn)
                turns.append(
                    (
                        prompt,
                        [
                            Origin(row, *sampling, bench.suite.rows[row].method, *place)
                            for row in rows
                        ],
                    )
                )
    cycles_path, few = (
        bench.directory / CYCLES,
        min(WARM_UP_TOKENS, bench.config.prompts.max_new_tokens),
    )
    records_path = bench.directory / results.RECORDS
    done = {record.key: record for record in _known(records_path, prompts)}
    keep_answers(cycles_path, done)
    for prompt in prompts[: bench.config.warmup_prompts]:
        ids = encode_turn(prompt, (), bench.tokenizer, bench.target)
        for decoder in bench.decoders:
            with suppress(UserError, RuntimeError):  # the records will say why
                decoder.generate(ids, max_new_tokens=few, do_sample=False)
    with start_progress(sum(len(origins) for _, origins in turns), "answers", "bench") as progress:
        for number, (prompt, origins) in enumerate(turns):
            first = number % len(origins)
            for origin in (*origins[first:], *origins[:first]):
                if origin.key not in done:
                    record, cycles = _answer(bench, origin, prompt, done, seed + number)
                    if cycles:  # before the record: cycles without one are dropped
                        append_lines(cycles_path, cycles)
                    append_lines(records_path, [line_of(record)])
                    done[origin.key] = record
                progress.update()
    greedy = [r for r in done.values() if r.status == "ok" and r.temperature == 0]
    plain = {
        (r.sampling, r.prompt_key): r.output_ids for r in greedy if r.row == bench.suite.vanilla
    }
    for r in greedy:
        if (theirs := plain.get((r.sampling, r.prompt_key))) is not None:
            same = replace(r, identical=r.output_ids == theirs, margin=None)
            done[r.key] = same if same.identical else with_margin(bench, same, theirs)
    return list(done.values())


def _known(path: Path, prompts: Sequence[Prompt]) -> list[Record]:
    """Good records of an earlier call, without a last line that was cut and without answers that are there twice."""
    if not path.is_file():
        return []
    os.truncate(path, path.read_bytes().rfind(b"\n") + 1)
    texts = {
        (p.task, p.prompt_id, turn): text for p in prompts for turn, text in enumerate(p.turns)
    }
    records = results.read_records(path)
    for record in records:
        if record.prompt_text != texts.get(record.prompt_key):
            place = f"{path}: prompt {record.prompt_id!r} of {record.task!r}"
            raise UserError(f"{place} has changed; delete the file to measure anew")
    counts = Counter(record.key for record in records)
    known = [record for record in records if counts[record.key] == 1 and record.status == "ok"]
    if len(known) < len(records):
        write_text(path, "".join(map(line_of, known)))
    return known


def _answer(
    bench: Bench, origin: Origin, prompt: Prompt, done: dict[Key, Record], seed: int
) -> tuple[Record, list[str]]:
    """The record of an answer, or of its failure, and the lines of its cycles."""
    config, decoder = bench.suite.rows[origin.row], bench.decoders[origin.row]
    facts = {
        **asdict(origin),
        "head": bench.kinds[origin.row],
        "head_path": config.head,
        "tree": tree_shape(config),
    }
    facts["prompt_text"] = prompt.turns[origin.turn]
    earlier = [
        done[replace(origin, row=bench.suite.vanilla, turn=turn).key] for turn in range(origin.turn)
    ]
    for record in earlier:
        if record.status != "ok":
            message = (
                f"turn {record.turn + 1} has no answer of vanilla to go on from: {record.message}"
            )
            return Record(**facts, verify="none", status="error", message=message), []
    ids = encode_turn(prompt, [record.text for record in earlier], bench.tokenizer, bench.target)
    facts |= {"prompt_tokens": ids.shape[1], "prompt_ids": tuple(ids[0].tolist())}
    devices = range(torch.cuda.device_count())
    for device in devices:
        torch.cuda.reset_peak_memory_stats(device)
    recorder = Recorder()
    # what draws a token is the suite's own; penalties and stop strings are the target's generation_config's
    settings = {
        **bench.settings(ids),
        "do_sample": origin.temperature > 0,
        "min_p": 0.0,
        "timed": True,
    }
    settings |= {name: getattr(origin, name) for name in ("temperature", "top_k", "top_p")}
    if bench.config.cycles:
        if isinstance(decoder.proposer, Drafting):
            decoder.proposer.keep = True
        settings["on_cycle"] = recorder
    generator = torch.Generator(bench.target.device).manual_seed(seed)
    try:
        generation = decoder.generate(ids, generator=generator, **settings)
    except (UserError, RuntimeError) as error:
        return Record(**facts, verify="none", status="error", message=first_line(error)), []
    counted, answer = generation.statistics, generation.new_ids
    ends = itertools.accumulate(counted.cycle_tokens, initial=1)
    texts = [answer_text(bench.tokenizer, answer[:end]) for end in ends]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    if torch.cuda.is_available():
        peak = (sum(map(torch.cuda.max_memory_allocated, devices)) + decoder.graph_bytes) / 2**30
    facts |= {name: value for name, value in asdict(counted).items() if name != "decoding"} | {
        "new_tokens": counted.new_tokens,
        "target_forwards": counted.target_forwards,
        "output_ids": answer,
        "text": texts[-1],
        "cycle_texts": [
            texts[0],
            *(later[len(before) :] for before, later in itertools.pairwise(texts)),
        ],
        "cycle_ms": [round(ms, 4) for ms in counted.cycle_ms],
        "peak_memory_gib": peak,
        "graph_bytes": decoder.graph_bytes,
    }
    return validate(facts, Record, "bench", {}), lines_of(origin, recorder.records)


def difference(
    target: Target, ids: Tensor, number: int, ours: Sequence[int], theirs: Sequence[int]
) -> Difference:
    """The first difference between two unlike answers to ids [1, T]."""
    pairs = enumerate(itertools.zip_longest(ours, theirs, fillvalue=-1))
    place, (one, other) = next((at, pair) for at, pair in pairs if pair[0] != pair[1])
    if min(one, other) < 0:
        return Difference(number, place, one, other, float("inf"), 0.0)
    text = torch.cat(
        [ids, torch.tensor([[*ours[:place]]], dtype=ids.dtype, device=ids.device)], dim=1
    )
    sampler = Sampler(resolve(target.generation_config), torch.Generator(), ids[0])
    with torch.inference_mode():
        raw = target.model(text).logits[:, -1].float()
        logits = sampler.after(text, raw)[0]
    rounding = ROUNDING * torch.finfo(target.dtype).eps * float(raw.abs().max())
    return Difference(
        number, place, one, other, float((logits[one] - logits[other]).abs()), rounding
    )


def with_margin(bench: Bench, record: Record, theirs: Sequence[int]) -> Record:
    """The record of a different answer, with its margin; in float32 rounding explains none, so none is measured."""
    if bench.target.dtype == torch.float32:
        return record
    ids = torch.tensor([record.prompt_ids], device=bench.target.device)
    margin = difference(bench.target, ids, 0, record.output_ids, theirs).margin
    return replace(
        record, margin=max(margin, record.margin or 0.0)
    )  # if one ends earlier: infinite, null in JSON


def clocked(
    device: torch.device, work: Callable[..., Any], *arguments: Any, **settings: Any
) -> tuple[float, Any]:
    """(milliseconds, what the call returns)"""
    clock = Clock({}, device.type == "cuda")
    result = work(*arguments, **settings)
    return clock.lap(None), result


class ReferenceTimes(NamedTuple):
    """Milliseconds per token of one greedy answer, prefill included."""

    generate: float  # transformers' generate with a static cache, not compiled
    bare_forward: float  # the target's forwards alone, over the same tokens
    vanilla: float  # this engine without drafts


def run_reference(bench: Bench, records: list[Record]) -> list[Record]:
    """Answers vanilla's greedy prompts with transformers' generate, and writes reference.json.

    Returns the records, the greedy ones with `identical_to_generate`.
    """
    vanilla = SpeculativeDecoder(bench.target)
    greedy = [record for record in records if record.temperature == 0.0 and record.status == "ok"]
    baseline = [record for record in greedy if record.row == bench.suite.vanilla]
    answers: dict[PromptKey, tuple[int, ...]] = {}
    times: list[ReferenceTimes] = []
    with start_progress(len(baseline), "prompts", "reference") as progress, torch.inference_mode():
        for number, record in enumerate(baseline):
            ids = torch.tensor([record.prompt_ids], device=bench.target.device)  # [1, T]
            generate_ms, answer = time_generate(bench, ids)
            answers[record.prompt_key] = tuple(answer.tolist())
            if number < REFERENCE_PROMPTS:
                bare_ms, _ = clocked(bench.target.device, forward_alone, vanilla, ids, answer)
                vanilla_ms = time_vanilla(bench, vanilla, ids)
                sums = (generate_ms, bare_ms, vanilla_ms)
                times.append(ReferenceTimes(*(ms / len(answer) for ms in sums)))
            progress.update()
    identical = {
        record.key: record.output_ids == answers[record.prompt_key]
        for record in greedy
        if record.prompt_key in answers
    }
    same_as_vanilla = sum(identical[record.key] for record in baseline)
    write_reference(bench.directory, times, len(baseline), same_as_vanilla)
    compared = []
    for record in records:
        record = replace(record, identical_to_generate=identical.get(record.key))
        if record.identical_to_generate is False:
            record = with_margin(bench, record, answers[record.prompt_key])
        compared.append(record)
    return compared


def time_generate(bench: Bench, ids: Tensor) -> tuple[float, Tensor]:
    """(milliseconds, new tokens) of transformers' greedy answer to ids [1, T]."""
    ms, sequences = clocked(
        bench.target.device,
        bench.target.model.generate,
        ids,
        attention_mask=torch.ones_like(ids),
        cache_implementation="static",
        disable_compile=True,
        tokenizer=bench.tokenizer,  # for stop strings
        **bench.settings(ids),
    )
    return ms, sequences[0, ids.shape[1] :]


def time_vanilla(bench: Bench, vanilla: SpeculativeDecoder, ids: Tensor) -> float:
    """Milliseconds of this engine's greedy answer to ids [1, T] without drafts."""
    if vanilla.cycle != "eager":  # the first answer of a length may capture or compile
        vanilla.generate(ids, **bench.settings(ids))
    return clocked(bench.target.device, vanilla.generate, ids, **bench.settings(ids))[0]


def forward_alone(vanilla: SpeculativeDecoder, ids: Tensor, answer: Tensor) -> None:
    """The target's forwards over the prompt ids [1, T] and then over the answer, token by token."""
    length = ids.shape[1] + len(answer) + 1
    kept = KeptRows(length, ids.device, vanilla.target.dtype)
    vanilla.lm.prefill(ids[0], kept)
    kept.advance(ids.shape[1])
    for position in range(len(answer) - 1):
        root = root_only(answer[position : position + 1])
        vanilla.lm.extend(root.tokens, root.depth, root.mask)
        kept.advance(1)


def write_reference(
    directory: Path, times: list[ReferenceTimes], prompts: int, identical: int
) -> None:
    """Writes and prints the medians over prompts; zeros without any prompt."""
    medians = ReferenceTimes(0.0, 0.0, 0.0)
    if times:
        medians = ReferenceTimes(*(median(column) for column in zip(*times, strict=True)))
    reference = Reference(
        vanilla_ms_per_token=medians.vanilla,
        bare_forward_ms_per_token=medians.bare_forward,
        prompts=prompts,
        identical_to_generate=identical,
        generate_static_ms_per_token=medians.generate,
    )
    write_json(directory / REFERENCE, asdict(reference))
    print(
        f"ms per token: vanilla {medians.vanilla:.2f}, bare forwards {medians.bare_forward:.2f}, "
        f"transformers' generate {medians.generate:.2f}"
    )
