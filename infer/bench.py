"""Every row on every prompt, interleaved in one process and one model load, appended to a JSONL as it goes."""

import itertools
import os
import resource
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from data.progress import bar
from infer.choices import sized
from infer.config import BenchConfig, MethodConfig, SamplingConfig
from infer.cycle_log import AnswerKey, CycleLog, Origin
from infer.cycle_recorder import CycleRecorder
from infer.decoders import Drafters, make_decoder
from infer.drafters.lookahead import Lookahead
from infer.engine import Generation, SpeculativeDecoder
from infer.methods import tree_of
from infer.records import Milliseconds, Record, Reference, TreeShape, line_of, read_records
from infer.tasks import Prompt, encode
from infer.tree import root_only
from infer.watch import watched
from model.errors import UserError
from model.files import write_json
from model.recipe import as_dict
from model.target import Target

REFERENCE_PROMPTS = 12
CYCLES = "cycles.jsonl"
SETTINGS = ("stop", "rank", "rerank", "children", "calibrated")  # of a tree, kept beside its sizes


@dataclass(frozen=True)
class Bench:
    """What is measured: the decoders of the rows on one target, and where the records go."""

    target: Target
    tokenizer: Any
    decoders: list[SpeculativeDecoder]
    kinds: list[str | None]  # of the rows' heads
    config: BenchConfig
    directory: Path

    @property
    def records_path(self) -> Path:
        return self.directory / "records.jsonl"

    @property
    def cycles_path(self) -> Path:
        return self.directory / CYCLES


def make_decoders(
    target: Target, rows: Sequence[MethodConfig], heads: Sequence[str | None]
) -> list[SpeculativeDecoder]:
    """One decoder per row with its head's directory; each head is loaded once."""
    drafters = Drafters(target)
    named = zip(rows, heads, strict=True)
    return [make_decoder(drafters, row, head, f"bench.rows.{number}") for number, (row, head) in enumerate(named)]


def tree_shape(row: MethodConfig) -> TreeShape | None:
    """What a record says of a row's tree; null for vanilla."""
    if row.method == "pld":
        length = row.lookup.length
        settings = {**as_dict(row.lookup), "longest_ngram": row.lookup.longest_ngram}
        return TreeShape("lookup", length, 1, length + 1, settings)
    if row.method == "lookahead":
        levels, nodes = row.lookahead.ngram - 1, Lookahead(row.lookahead).max_nodes
        return TreeShape("lookahead", levels, row.lookahead.guesses, nodes, as_dict(row.lookahead))
    tree = tree_of(row, "bench.rows")
    if tree is None:
        return None
    tree = sized(tree)
    settings = {key: value for key, value in as_dict(tree).items() if key in SETTINGS}
    return TreeShape(tree.shape, tree.levels, tree.k, tree.nodes, settings)


def run(bench: Bench, prompts: list[Prompt], seed: int) -> list[Record]:
    """Measures what records.jsonl does not hold yet, and returns all records.

    For each prompt the rows take turns, starting with another one each time, so that a drift of the machine's speed
    falls on all of them alike.
    """
    bench.directory.mkdir(parents=True, exist_ok=True)
    records = _known(bench)
    done: dict[AnswerKey, Record] = {(r.row, r.sampling, r.prompt_key): r for r in records}
    log = CycleLog(bench.cycles_path)
    log.keep(done)
    jobs = [(sampling, prompt) for sampling in bench.config.sampling for prompt in prompts]
    _warm_up(bench, prompts)
    total = len(jobs) * len(bench.decoders)
    with bench.records_path.open("a", encoding="utf-8") as file, bar(total, "answers", "bench") as progress:
        for number, (sampling, prompt) in enumerate(jobs):
            ids = encode(prompt.text, bench.tokenizer, bench.target)
            for offset in range(len(bench.decoders)):
                row = (number + offset) % len(bench.decoders)
                origin = _origin(bench.config.rows[row], row, sampling, prompt)
                if origin.key not in done:
                    done[origin.key], lines = _recorded(bench, origin, prompt, ids, seed + number)
                    if lines:
                        log.append(lines)  # before the record: without one they are dropped and measured again
                    file.write(line_of(done[origin.key]))
                    file.flush()
                    os.fsync(file.fileno())
                progress.update()
    return compared(list(done.values()))


def compared(records: list[Record]) -> list[Record]:
    """The greedy records with `identical` set against the vanilla row's tokens of the same prompt."""
    vanilla = {(r.sampling, r.prompt_key): r.output_ids for r in records if r.method == "vanilla" and r.status == "ok"}
    out = []
    for record in records:
        plain = vanilla.get((record.sampling, record.prompt_key))
        if record.status == "ok" and record.temperature == 0.0 and plain is not None:
            record = Record(**{**record.__dict__, "identical": record.output_ids == plain})
        out.append(record)
    return out


def measure_reference(bench: Bench, prompts: list[Prompt], records: list[Record]) -> tuple[Reference, list[Record]]:
    """transformers' generate on every greedy prompt, and the bare forwards replayed; writes reference.json.

    Returns the figures (medians over the first prompts, each timed all three ways in turn, prefill included) and the
    records with `identical_to_generate`.
    """
    greedy = [r for r in records if r.temperature == 0.0 and r.method == "vanilla" and r.status == "ok"]
    texts = {(prompt.task, prompt.prompt_id): prompt.text for prompt in prompts}
    answers: dict[tuple[str, str], tuple[int, ...]] = {}
    ms_per_token: dict[str, list[float]] = {"static": [], "bare": [], "vanilla": []}
    vanilla = SpeculativeDecoder(bench.target)
    new = bench.config.prompts.max_new_tokens
    with bar(len(greedy), "prompts", "reference") as progress:
        for number, record in enumerate(greedy):
            ids = encode(texts[record.prompt_key], bench.tokenizer, bench.target)
            seconds, answer = _timed(bench.target, lambda ids=ids: _generate(bench, ids))  # type: ignore[misc]
            answers[record.prompt_key] = tuple(answer)
            if number < REFERENCE_PROMPTS:
                bare, _ = _timed(bench.target, lambda ids=ids, answer=answer: _replay(vanilla, ids, answer))  # type: ignore[misc]
                plain, _ = _timed(
                    bench.target,
                    lambda ids=ids: vanilla.generate(ids, max_new_tokens=new, do_sample=False),  # type: ignore[misc]
                )
                for name, value in (("static", seconds), ("bare", bare), ("vanilla", plain)):
                    ms_per_token[name].append(1000 * value / len(answer))
            progress.update()
    checked = [
        Record(**{**r.__dict__, "identical_to_generate": r.output_ids == answers[r.prompt_key]})
        if r.status == "ok" and r.temperature == 0.0 and r.prompt_key in answers
        else r
        for r in records
    ]
    medians = {name: statistics.median(values) if values else 0.0 for name, values in ms_per_token.items()}
    reference = Reference(
        vanilla_ms_per_token=medians["vanilla"],
        bare_forward_ms_per_token=medians["bare"],
        prompts=len(greedy),
        identical_to_generate=sum(bool(r.identical_to_generate) for r in checked if r.method == "vanilla"),
        generate_static_ms_per_token=medians["static"],
    )
    write_json(bench.directory / "reference.json", asdict(reference))
    return reference, checked


def _timed(target: Target, work: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds of work, and what it returned."""
    started = _now(target)
    result = work()
    return _now(target) - started, result


def _known(bench: Bench) -> list[Record]:
    """Records of an earlier call; a line that was cut by a kill is dropped and measured again."""
    path = bench.records_path
    if not path.is_file():
        return []
    raw = path.read_bytes()
    whole = raw[: raw.rfind(b"\n") + 1]
    if whole != raw:
        with path.open("r+b") as file:
            file.truncate(len(whole))
    return read_records(path)


def _warm_up(bench: Bench, prompts: list[Prompt]) -> None:
    for prompt in prompts[: bench.config.warmup_prompts]:
        ids = encode(prompt.text, bench.tokenizer, bench.target)
        for decoder in bench.decoders:
            decoder.generate(ids, max_new_tokens=min(24, bench.config.prompts.max_new_tokens), do_sample=False)


def _origin(config: MethodConfig, row: int, sampling: SamplingConfig, prompt: Prompt) -> Origin:
    return Origin(row, config.method, **asdict(sampling), task=prompt.task, prompt_id=prompt.prompt_id, turn=0)


def _recorded(bench: Bench, origin: Origin, prompt: Prompt, ids: Tensor, seed: int) -> tuple[Record, list[str]]:
    """One answer as a record, and the lines of its cycles where the recipe asks for them; none for a failure."""
    if not bench.config.cycles:
        return _measure(bench, origin, prompt, ids, seed), []
    with watched(bench.decoders[origin.row]) as growth:
        recorder = CycleRecorder(origin, growth)
        record = _measure(bench, origin, prompt, ids, seed, recorder)
    return record, recorder.lines if record.status == "ok" else []


def _measure(
    bench: Bench, origin: Origin, prompt: Prompt, ids: Tensor, seed: int, recorder: CycleRecorder | None = None
) -> Record:
    """One answer as a record; a failure is a record with its message and no time."""
    common: dict[str, Any] = {
        **{name: value for name, value in asdict(origin).items() if name != "turn"},
        "head": bench.kinds[origin.row],
        "tree": tree_shape(bench.config.rows[origin.row]),
        "prompt_tokens": ids.shape[1],
        "prompt_ids": tuple(ids[0].tolist()),
        "prompt_text": prompt.text,
    }
    generator = torch.Generator(bench.target.device).manual_seed(seed)
    try:
        generation = bench.decoders[origin.row].generate(
            ids,
            max_new_tokens=bench.config.prompts.max_new_tokens,
            do_sample=origin.temperature > 0,
            temperature=origin.temperature,
            top_k=origin.top_k,
            top_p=origin.top_p,
            generator=generator,
            on_cycle=recorder,
            timed=True,
        )
    except (UserError, RuntimeError) as error:
        return Record(**common, verify="none", status="error", message=str(error).splitlines()[0])
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
        "target_forwards": counted.target_forwards,
        "draft_forwards": counted.draft_forwards,
        "draft_forwards_wasted": counted.draft_forwards_wasted,
        "draft_nodes": counted.draft_nodes,
        "ms": Milliseconds(**counted.ms),
        "peak_memory_gib": peak_memory_gib(),
    }


def peak_memory_gib() -> float:
    """The most memory that this process has held: of the GPU where there is one, else resident."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def _generate(bench: Bench, ids: Tensor) -> list[int]:
    """The new tokens of transformers' own greedy generate with a static cache."""
    model = bench.target.model
    with torch.inference_mode():
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=bench.config.prompts.max_new_tokens,
            cache_implementation="static",
            disable_compile=True,
        )
    answer: list[int] = out[0, ids.shape[1] :].tolist()
    return answer


@torch.inference_mode()
def _replay(vanilla: SpeculativeDecoder, ids: Tensor, answer: list[int]) -> None:
    """The bare target forwards that write this answer: no choice, no stop rule, no statistics."""
    tokens = torch.tensor(answer, device=ids.device)
    vanilla.lm.prefill(ids[0], ids.shape[1] + len(answer) + 1)
    for position in range(len(answer) - 1):
        vanilla.lm.extend(root_only(tokens[position : position + 1]))
        vanilla.lm.keep([0])


def _now(target: Target) -> float:
    if target.device.type == "cuda":
        torch.cuda.synchronize(target.device)
    return time.perf_counter()
