"""Runs the bench: every row answers every prompt, and so does transformers' generate.

Several processes share the prompts. One process measures all rows of a prompt.
"""

import logging
import os
import platform
import re
import resource
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import accumulate, chain, pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor

from aerie.configs.errors import UserError, rank, warn_once, world_size
from aerie.configs.read import as_dict, validate
from aerie.configs.schema.decode import ServedConfig
from aerie.data.chat import answer_text
from aerie.data.distill.answer import Unanswered
from aerie.data.progress import start_progress
from aerie.infer.decode.cached_lm import CachedLM
from aerie.infer.decode.clock import Clock
from aerie.infer.decode.engine import Generation, SpeculativeDecoder, make_decoder
from aerie.infer.decode.loaded_heads import LoadedHeads
from aerie.infer.decode.roles import TreeProposer
from aerie.infer.decode.runners import mode_of
from aerie.infer.decode.sampling import Decoding, resolve
from aerie.infer.measure.agreement import with_margin
from aerie.infer.measure.bench_files import (
    RECORDS,
    REFERENCE,
    SERVED_FILE,
    SUITE,
    Cell,
    Key,
    Origin,
    PromptKey,
    Record,
    Reference,
    line_of,
    read_records,
)
from aerie.infer.measure.recorder import Recorder, append_lines, keep_answers, lines_of
from aerie.infer.measure.served import (
    keep_facts,
    measure_loads,
    record_facts,
    require_same_target,
    served_tree,
)
from aerie.infer.measure.server import Server
from aerie.infer.measure.shares import by_first, gather, my_share, share_out
from aerie.infer.measure.suite import Suite, rows_by_prompt, suite_file
from aerie.infer.measure.tasks import Prompt, encode_turn, load_prompts, pinned, prompt_inputs
from aerie.infer.measure.tree_shape import TreeShape, tree_shape
from aerie.model import storage
from aerie.model.hub import quieten
from aerie.model.storage import (
    Foreign,
    Manifest,
    Stage,
    Whole,
    first_line,
    remove_temporaries,
    remove_tree,
    write_json,
    write_text,
)
from aerie.model.target import Target, local_device
from aerie.model.target_files import context_of

CYCLES = "cycles.jsonl"
JOB = "job.json"
PROCESS = "process-{}"  # the directory of each process but the first
CHECKED_PROMPTS, CHECKED_TOKENS = 4, 16  # to check that a server has the target
CYCLE_PHASES = ("draft", "verify", "commit", "other")  # their times sum to the cycle's


def begin_bench(stage: Stage, overwrite: bool) -> None:
    """Keeps a stopped bench's answers to the same inputs; deletes others, or raises UserError."""
    has_records = any(stage.output.rglob(RECORDS))
    is_ended = (stage.output / storage.FILE).is_file()
    checked = Manifest.check(stage.output, stage.inputs, name=JOB)
    if is_ended or not isinstance(checked, Whole):
        if has_records and not overwrite:
            changed = checked.differences if isinstance(checked, Foreign) else str(checked)
            fix = "choose another --run, or add --overwrite"
            path = stage.output / RECORDS
            raise UserError(f"{path}: has the answers of another recipe ({changed}); {fix}")
        forget_answers(stage.output)
    remove_temporaries(stage.output)
    Manifest(inputs=stage.inputs).write(stage.output, JOB)


def forget_answers(directory: Path) -> None:
    for name in (storage.FILE, RECORDS, CYCLES, SUITE, SERVED_FILE):
        (directory / name).unlink(missing_ok=True)
    for part in directory.glob(PROCESS.format("*")):
        remove_tree(part)


def load_quietly(config: Any, threads: int | None) -> Target:
    """The target on this process's device; also silences the libraries' warnings."""
    if threads is not None:
        torch.set_num_threads(threads)
    warnings.filterwarnings("ignore")
    quieten()
    logging.getLogger("torch").setLevel(logging.ERROR)
    device = local_device()
    if device != "cpu":
        torch.cuda.set_device(device)  # clocks and CUDA graphs use the current device
    return Target.load(config, device)


def describe_machine(target: Target) -> dict[str, Any]:
    """The device, threads, dtype and cycle's mode for summary.json."""
    cpus = Path("/proc/cpuinfo")
    text = cpus.read_text(encoding="utf-8") if cpus.is_file() else ""
    model = re.search(r"^model name\s*: (.*)$", text, re.MULTILINE)
    device = model[1] if model else platform.processor() or platform.machine()
    if target.device.type == "cuda":
        device = torch.cuda.get_device_name(target.device)
    return {
        "device": device,
        "threads": torch.get_num_threads(),
        "dtype": str(target.dtype).removeprefix("torch."),
        "cycle": mode_of(target),
    }


def clocked(
    device: torch.device, work: Callable[..., Any], *arguments: Any, **settings: Any
) -> tuple[float, Any]:
    """(milliseconds of the call, its result)"""
    clock = Clock({}, device.type == "cuda")
    result = work(*arguments, **settings)
    return clock.lap(None), result


@dataclass(frozen=True)
class Bench:
    target: Target
    tokenizer: Any
    suite: Suite
    directory: Path
    # by row of the suite; each row has a decoder or a server
    decoders: dict[int, SpeculativeDecoder]
    servers: dict[int, Server]

    @classmethod
    def open(cls, target: Target, tokenizer: Any, suite: Suite, directory: Path) -> "Bench":
        """Makes a decoder or a server for each row; decoders with the same taps share a cache."""
        drafters = LoadedHeads(target)
        caches: dict[tuple[int, ...], CachedLM] = {}
        decoders = {}
        servers = {}
        for number, row in enumerate(suite.rows):
            if isinstance(row.method, ServedConfig):
                servers[number] = Server(row.method, f"bench row {number}")
                continue
            decoder = make_decoder(drafters, row.method, row.head)
            decoder.eager.lm = caches.setdefault(decoder.lm.after_blocks, decoder.lm)
            if suite.config.cycles and isinstance(decoder.proposer, TreeProposer):
                decoder.proposer.shape.keeps_pool = True  # the recorder reads the candidates
            decoders[number] = decoder
        return cls(target, tokenizer, suite, directory, decoders, servers)

    def tree_of(self, row: int) -> TreeShape | None:
        method = self.suite.rows[row].method
        if isinstance(method, ServedConfig):
            return served_tree(self.servers[row].facts)
        return tree_shape(method)

    def settings(self, ids: Tensor) -> dict[str, Any]:
        """The settings of a greedy answer to ids [1, T], as long as every row has room."""
        length = ids.shape[1]
        limits = list(
            chain.from_iterable(decoder.limits.values() for decoder in self.decoders.values())
        )
        limits += filter(None, (server.facts.max_positions for server in self.servers.values()))
        # A row without room for the prompt will fail, so its limit does not count.
        room = min((limit - length for limit in limits if limit > length), default=1)
        most = self.suite.config.prompts.max_new_tokens
        return {"max_new_tokens": min(most, room), "do_sample": False}

    def sampled(self, ids: Tensor, cell: Cell) -> dict[str, Any]:
        """The settings of a row's answer to ids [1, T].

        The suite says how tokens are drawn; penalties and stop strings are generation_config's.
        """
        return self.settings(ids) | {
            "do_sample": cell.temperature > 0,
            "temperature": cell.temperature,
            "top_k": cell.top_k,
            "top_p": cell.top_p,
            "min_p": 0.0,
        }


def run_bench(
    suite: Suite, output: Path, seed: int, target: Target, tokenizer: Any
) -> dict[str, Any]:
    """Runs the bench and returns its facts; raises UserError if every answer failed."""
    source = by_first(partial(pinned, suite.config.prompts))
    prompts = load_prompts(source)
    bench = Bench.open(target, tokenizer, suite, output)
    warn_of_longer_texts(bench, prompts)
    records = measure_answers(bench, prompts, seed)
    failed = [record for record in records if record.status == "error"]
    if len(failed) == len(records):
        raise UserError(
            f"{output}: all {len(records)} answers failed; the first: {failed[0].message}"
        )
    if suite.config.reference:
        records = run_reference(bench, records)
    if rank() > 0:
        return {}
    write_json(output / SUITE, as_dict(suite_file(suite, prompts, context_of(target.config))))
    write_text(output / RECORDS, "".join(map(line_of, records)))
    reason = f"; the first: {failed[0].message}" if failed else ""
    print(f"bench: {len(records)} answers -> {output}; {len(failed)} failed{reason}")
    return {
        "answers": len(records),
        "prompts": prompt_inputs(source),
        "trained_lengths": suite.trained_lengths,
        "processes": " and ".join(map(str, sorted({record.processes for record in records}))),
    }


def warn_of_longer_texts(bench: Bench, prompts: Sequence[Prompt]) -> None:
    """Warns of tasks whose texts may be longer than those that a head was trained on."""
    ends: dict[str, int] = {}  # task -> length at which its longest first answer may end
    for prompt in prompts:
        ids = encode_turn(prompt, (), bench.tokenizer, bench.target)
        end = ids.shape[1] + bench.settings(ids)["max_new_tokens"]
        ends[prompt.task] = max(end, ends.get(prompt.task, 0))
    for row, length in bench.suite.trained_lengths.items():
        longer = [f"{task} ({end:,})" for task, end in ends.items() if end > length]
        if longer:
            warn_once(
                f"{bench.suite.rows[row].head}: was trained on texts of up to {length:,} tokens, "
                f"and these may be longer: {', '.join(longer)}; "
                "the target may accept fewer drafts there"
            )


# --- answers ---


class TurnRows(NamedTuple):
    """A turn of a prompt, with the rows that answer it at one sampling, in order."""

    prompt: Prompt
    origins: list[Origin]


def measure_answers(bench: Bench, prompts: Sequence[Prompt], seed: int) -> list[Record]:
    """Measures the answers that records.jsonl lacks, and returns all records.

    All rows answer a turn in succession, so a slow minute slows all. Later turns follow vanilla's
    answers.
    """
    turns = turns_of(bench.suite, prompts)
    done = by_first(partial(whole_prompts, bench.directory, turns))
    require_same_texts(turns, done, bench.directory / RECORDS)
    directory = bench.directory
    if rank() > 0:
        directory /= PROCESS.format(rank())
    directory.mkdir(parents=True, exist_ok=True)
    keep_facts(directory, bench.servers)
    warm_up(bench, prompts)
    check_servers(bench, prompts)
    # A process takes all rows and turns of a prompt, as speeds are compared within a process.
    mine = {prompt.key for prompt in my_share(prompts)}
    my_turns = [(number, turn) for number, turn in enumerate(turns) if turn.prompt.key in mine]
    count = sum(len(turn.origins) for _, turn in my_turns)
    with start_progress(count, "answers", "bench") as progress:
        for number, turn in my_turns:
            for origin in turn.origins:
                if origin.key not in done:
                    record, cycles = measure_answer(bench, origin, turn.prompt, done, seed + number)
                    if cycles:  # before the record: cycles without a record are dropped
                        append_lines(directory / CYCLES, cycles)
                    append_lines(directory / RECORDS, [line_of(record)])
                    done[origin.key] = record
                progress.update()
    for theirs in gather(done):
        done |= theirs
    if rank() == 0 and world_size() > 1:
        collect_answers(bench.directory)
    # in the order of a single process
    done = {origin.key: done[origin.key] for turn in turns for origin in turn.origins}
    records = compared_with_vanilla(bench, done)
    measure_loads(bench.directory, bench.servers, records, partial(decoding_of, bench), seed)
    return records


def decoding_of(bench: Bench, record: Record) -> Decoding:
    ids = torch.tensor([record.prompt_ids])  # [1, T]
    return resolve(bench.target.generation_config, **bench.sampled(ids, record))


def turns_of(suite: Suite, prompts: Sequence[Prompt]) -> list[TurnRows]:
    """Every turn of every prompt at every sampling, in order."""
    turns: list[TurnRows] = []
    rows_of = rows_by_prompt(suite_file(suite, prompts, None), suite.vanilla, prompts)
    for sampling, by_prompt in rows_of.items():
        # A sweep's sampling may have fewer prompts.
        for prompt in (prompt for prompt in prompts if prompt.key in by_prompt):
            for turn in range(len(prompt.turns)):
                origins = [
                    Origin(row, *sampling, suite.rows[row].method.method, *prompt.key, turn)
                    for row in by_prompt[prompt.key]
                ]
                first = len(turns) % len(origins)
                turns.append(TurnRows(prompt, [*origins[first:], *origins[:first]]))
    return turns


def require_same_texts(turns: Sequence[TurnRows], done: Mapping[Key, Record], path: Path) -> None:
    """Raises UserError if a prompt changed, as in a data set without a commit."""
    for prompt, origins in turns:
        for record in filter(None, (done.get(origin.key) for origin in origins)):
            if record.prompt_text != prompt.turns[record.turn]:
                fault = f"{path}: prompt {record.prompt_id!r} of {record.task!r} has changed"
                raise UserError(f"{fault}; delete the file to measure all prompts again")


def collect_answers(directory: Path) -> dict[Key, Record]:
    """The good answers so far, after moving other processes' answers to the first one's files."""
    done: dict[Key, Record] = {}
    for part in (directory, *sorted(directory.glob(PROCESS.format("*")))):
        new = {record.key: record for record in read_good_records(part / RECORDS)}
        new = {key: record for key, record in new.items() if key not in done}
        cycles = part / CYCLES
        keep_answers(cycles, new)
        if part != directory:
            # Cycles come first: after a kill, the next call drops those without a record.
            if cycles.is_file():
                append_lines(directory / CYCLES, [cycles.read_text(encoding="utf-8")])
            append_lines(directory / RECORDS, [line_of(record) for record in new.values()])
            remove_tree(part)
        done |= new
    return done


def whole_prompts(directory: Path, turns: Sequence[TurnRows]) -> dict[Key, Record]:
    """The good answers so far, except to prompts that another number of processes began.

    These are measured again, so that one device measures all rows of a prompt.
    """
    done = collect_answers(directory)
    begun = {turn.prompt.key for turn in turns for origin in turn.origins if origin.key not in done}
    whole = {
        key: record
        for key, record in done.items()
        if (record.task, record.prompt_id) not in begun or record.processes == world_size()
    }
    if len(whole) < len(done):
        write_text(directory / RECORDS, "".join(map(line_of, whole.values())))
        keep_answers(directory / CYCLES, whole)
    return whole


def read_good_records(path: Path) -> list[Record]:
    """The good records of an earlier call, after removing all others and a cut line."""
    if not path.is_file():
        return []
    os.truncate(path, path.read_bytes().rfind(b"\n") + 1)
    records = [record for record in read_records(path) if record.status == "ok"]
    write_text(path, "".join(map(line_of, records)))
    return records


def warm_up(bench: Bench, prompts: Sequence[Prompt]) -> None:
    config = bench.suite.config
    most = min(24, config.prompts.max_new_tokens)
    for prompt in prompts[: config.warmup_prompts]:
        ids = encode_turn(prompt, (), bench.tokenizer, bench.target)
        for decoder in bench.decoders.values():
            with suppress(UserError, RuntimeError):  # the row's records will have the message
                decoder.generate(ids, max_new_tokens=most, do_sample=False)


def check_servers(bench: Bench, prompts: Sequence[Prompt]) -> None:
    """Raises UserError if a server has another target; its answers also warm it up."""
    if not bench.servers:
        return
    texts = []
    for prompt in prompts[:CHECKED_PROMPTS]:
        texts.append(encode_turn(prompt, (), bench.tokenizer, bench.target)[0].tolist())
    settings = bench.settings(torch.tensor([max(texts, key=len)]))
    settings["max_new_tokens"] = min(CHECKED_TOKENS, settings["max_new_tokens"])
    decoding = resolve(bench.target.generation_config, **settings)
    for server in bench.servers.values():
        require_same_target(server, bench.target, texts, decoding)


def compared_with_vanilla(bench: Bench, done: Mapping[Key, Record]) -> list[Record]:
    """All records; the greedy ones say whether they equal vanilla's answers."""
    records = []
    for record in done.values():
        baseline = done[replace(record, row=bench.suite.vanilla).key]
        # some servers give no token ids
        if record.temperature == 0 and record.output_ids and baseline.status == "ok":
            identical = record.output_ids == baseline.output_ids
            record = replace(record, identical=identical, margin=None)
            if not identical:
                record = with_margin(bench.target, record, baseline.output_ids)
        records.append(record)
    return records


def measure_answer(
    bench: Bench, origin: Origin, prompt: Prompt, done: Mapping[Key, Record], seed: int
) -> tuple[Record, list[str]]:
    """The record of a row's answer (or failure), and the lines of its cycles.

    done: the answers so far, among them vanilla's to earlier turns.
    """
    row = bench.suite.rows[origin.row]
    facts = {
        **asdict(origin),
        "head": row.kind,
        "head_path": row.method.head,
        "tree": bench.tree_of(origin.row),
        "prompt_text": prompt.turns[origin.turn],
        "processes": world_size(),
    }
    history = []
    for turn in range(origin.turn):
        earlier = done[replace(origin, row=bench.suite.vanilla, turn=turn).key]
        if earlier.status != "ok":
            fault = f"vanilla has no answer to turn {turn + 1}: {earlier.message}"
            return Record(**facts, verify="none", status="error", message=fault), []
        history.append(earlier.text)
    ids = encode_turn(prompt, history, bench.tokenizer, bench.target)  # [1, T]
    facts |= {"prompt_tokens": ids.shape[1], "prompt_ids": tuple(ids[0].tolist())}
    if origin.row in bench.servers:
        return ask_server(bench, origin, ids, facts, seed), []
    recorder = Recorder()
    for device in range(torch.cuda.device_count()):
        torch.cuda.reset_peak_memory_stats(device)
    try:
        generation = decode_turn(bench, origin, ids, recorder, seed)
    except (UserError, RuntimeError) as error:
        return Record(**facts, verify="none", status="error", message=first_line(error)), []
    facts |= answer_facts(bench, origin.row, generation)
    return validate(facts, Record, "bench", {}), lines_of(origin, recorder.records)


def ask_server(
    bench: Bench, origin: Origin, ids: Tensor, facts: dict[str, Any], seed: int
) -> Record:
    """The record of a server's answer or refusal; raises UserError if the server is away."""
    decoding = resolve(bench.target.generation_config, **bench.sampled(ids, origin))
    try:
        answer = bench.servers[origin.row].answer(ids[0].tolist(), decoding, seed)
    except Unanswered as error:
        return Record(**facts, verify="server", status="error", message=error.why)
    text = answer_text(bench.tokenizer, answer.token_ids) if answer.token_ids else answer.text
    return validate(facts | record_facts(answer, text), Record, "bench", {})


def decode_turn(
    bench: Bench, origin: Origin, ids: Tensor, recorder: Recorder, seed: int
) -> Generation:
    settings = bench.sampled(ids, origin)
    if bench.suite.config.cycles:
        settings["on_cycle"] = recorder
    generator = torch.Generator(bench.target.device).manual_seed(seed)
    decoder = bench.decoders[origin.row]
    return decoder.generate(ids, generator=generator, timed=True, **settings)


def answer_facts(bench: Bench, row: int, generation: Generation) -> dict[str, Any]:
    """The counts, times and texts of a record."""
    statistics = generation.statistics
    decoder = bench.decoders[row]
    ends = accumulate(statistics.cycle_tokens, initial=1)
    texts = [answer_text(bench.tokenizer, generation.new_ids[:end]) for end in ends]
    added = [after[len(before) :] for before, after in pairwise(texts)]
    counts = asdict(statistics)
    del counts["decoding"]
    return counts | {
        "new_tokens": statistics.new_tokens,
        "target_forwards": statistics.target_forwards,
        "output_ids": generation.new_ids,
        "text": texts[-1],
        "cycle_texts": [texts[0], *added],
        "cycle_ms": [round(ms, 4) for ms in statistics.cycle_ms],
        "peak_memory_gib": peak_memory_gib(decoder),
        "graph_bytes": decoder.graph_bytes,
    }


def peak_memory_gib(decoder: SpeculativeDecoder) -> float:
    """The GPUs' peak since the last reset, with CUDA graphs; without GPUs, the process's."""
    if not torch.cuda.is_available():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    devices = range(torch.cuda.device_count())
    return (sum(map(torch.cuda.max_memory_allocated, devices)) + decoder.graph_bytes) / 2**30


# --- the reference ---


@torch.inference_mode()
def generate_answer(bench: Bench, record: Record) -> tuple[tuple[int, ...], float]:
    """transformers' answer to a record's prompt, and its milliseconds."""
    ids = torch.tensor([record.prompt_ids], device=bench.target.device)  # [1, T]
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
    return tuple(sequences[0, ids.shape[1] :].tolist()), ms


def run_reference(bench: Bench, records: list[Record]) -> list[Record]:
    """Compares vanilla's greedy answers with transformers' generate, and writes reference.json.

    Returns the records; the greedy ones get `identical_to_generate`. Without greedy answers there
    is nothing to compare.
    """
    greedy = [record for record in records if record.temperature == 0.0 and record.status == "ok"]
    baseline = [record for record in greedy if record.row == bench.suite.vanilla]
    if not baseline:
        return records
    generated = share_out(partial(generate_answer, bench), baseline, "prompts", "reference")
    if rank() > 0:
        return records
    generate_ms = [ms / len(answer) for answer, ms in generated]  # per token, prefill included
    answers: dict[PromptKey, tuple[int, ...]] = {}
    for record, (answer, _) in zip(baseline, generated, strict=True):
        answers[record.prompt_key] = answer
    identical = {
        record.key: record.output_ids == answers[record.prompt_key]
        for record in greedy
        if record.prompt_key in answers and record.output_ids
    }
    vanilla_ms = [record.ms.wall / record.new_tokens for record in baseline if record.ms]
    reference = Reference(
        vanilla_ms_per_token=median(vanilla_ms),
        generate_static_ms_per_token=median(generate_ms),
        prompts=len(baseline),
        identical_to_generate=sum(identical[record.key] for record in baseline),
    )
    write_json(bench.directory / REFERENCE, asdict(reference))
    print(
        f"ms per token: vanilla {reference.vanilla_ms_per_token:.2f}, "
        f"transformers' generate {reference.generate_static_ms_per_token:.2f}"
    )
    compared = []
    for record in records:
        record = replace(record, identical_to_generate=identical.get(record.key))
        if record.identical_to_generate is False:
            record = with_margin(bench.target, record, answers[record.prompt_key])
        compared.append(record)
    return compared
