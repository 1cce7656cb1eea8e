"""The model forwards of one answer's cycles, noted as they are made, to be made again bare."""

import functools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor
from transformers.generation.streamers import BaseStreamer

from aerie.configs.errors import UserError, warn
from aerie.data.progress import bar
from aerie.infer.decode.cache import PreallocatedCache
from aerie.infer.decode.engine import Generation, SpeculativeDecoder
from aerie.infer.decode.shape import Drafting
from aerie.infer.decode.tree import root_only
from aerie.infer.measure.bench import Bench
from aerie.infer.measure.record import OVERHEAD, Overhead, Record, Reference, read_as
from aerie.infer.measure.tasks import Prompt, encode_turn
from aerie.model.layers import KeyValueBuffer
from aerie.model.storage import write_json
from aerie.model.target import Target

Part = Literal["target", "draft"]


@dataclass(frozen=True)
class Call:
    """One forward: a function of a model, its arguments, and where the caches among them stood."""

    part: Part
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    lengths: tuple[tuple[Any, int, int], ...]  # (cache, length, pending)

    def again(self) -> Any:
        """What the forward returns when nothing but the forward is done."""
        for cache, length, pending in self.lengths:
            cache.length = length
            if isinstance(cache, PreallocatedCache):
                cache.pending = pending
        return self.function(*self.arguments, **self.keywords)


@dataclass
class Tape(BaseStreamer):
    """The forwards of the cycles of one answer, in order.

    It begins with the second call of `put`: the engine hands out the prompt, prefills, and hands out the first token.
    """

    calls: list[Call] = field(default_factory=list)
    _put: int = 0

    def put(self, value: Tensor) -> None:
        self._put += 1

    def end(self) -> None:
        return

    def noting(self, part: Part, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, whose calls are noted."""

        @functools.wraps(function)
        def noted(*arguments: Any, **keywords: Any) -> Any:
            if self._put >= 2:
                lengths = tuple(_lengths([*arguments, *keywords.values()]))
                self.calls.append(Call(part, function, arguments, keywords, lengths))
            return function(*arguments, **keywords)

        return noted

    @torch.inference_mode()
    def replay(self, device: torch.device) -> dict[Part, float]:
        """Seconds of the target's and of the draft's forwards, made again in their order with nothing in between.

        Nothing gathers an accepted path's rows: once a branch was taken, later forwards read other numbers of the same
        shapes. A GPU is waited for where the engine waits too: between drafting and verifying.
        """
        seconds: dict[Part, float] = {"target": 0.0, "draft": 0.0}
        part, since = None, _now(device)
        for call in self.calls:
            if call.part != part:
                now = _now(device)
                if part is not None:
                    seconds[part] += now - since
                part, since = call.part, now
            call.again()
        if part is not None:
            seconds[part] += _now(device) - since
        return seconds


def taped(decoder: SpeculativeDecoder, ids: Tensor, **settings: Any) -> tuple[Tape, Generation]:
    """The forwards of an answer to ids [1, T], and the answer; UserError for a drafter that does not name its own."""
    tape = Tape()
    with _noted(tape, decoder):
        generation = decoder.generate(ids, streamer=tape, **settings)
    return tape, generation


@contextmanager
def _noted(tape: Tape, decoder: SpeculativeDecoder) -> Iterator[None]:
    target = decoder.target
    places: list[tuple[Part, Any, str]] = [("target", target.decoder, "forward"), ("target", target, "logits")]
    if isinstance(decoder.proposer, Drafting):
        places += [("draft", owner, name) for owner, name in decoder.proposer.drafter.forwards()]
    own = [(owner, name, vars(owner).get(name)) for _, owner, name in places]
    for part, owner, name in places:
        setattr(owner, name, tape.noting(part, getattr(owner, name)))
    try:
        yield
    finally:
        for owner, name, before in own:
            if before is None:  # it was a method of the class
                delattr(owner, name)
            else:
                setattr(owner, name, before)


def _lengths(values: list[Any]) -> Iterator[tuple[Any, int, int]]:
    for value in values:
        if isinstance(value, PreallocatedCache):
            yield value, value.length, value.pending
        elif isinstance(value, KeyValueBuffer):
            yield value, value.length, 0
        elif isinstance(value, list):
            yield from _lengths(value)


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


REFERENCE_PROMPTS = 12
Key = tuple[str, str, int]


def measure_reference(bench: Bench, records: list[Record]) -> tuple[Reference, list[Record]]:
    """transformers' generate on every greedy prompt, and the bare forwards replayed; writes reference.json.

    Returns the figures (medians over the first prompts, each timed all three ways in turn, prefill included) and the
    records with `identical_to_generate`.
    """
    greedy = [r for r in records if r.temperature == 0.0 and r.row == bench.suite.vanilla and r.status == "ok"]
    answers: dict[Key, tuple[int, ...]] = {}
    ms_per_token: dict[str, list[float]] = {"static": [], "bare": [], "vanilla": []}
    vanilla = SpeculativeDecoder(bench.target)
    with bar(len(greedy), "prompts", "reference") as progress:
        for number, record in enumerate(greedy):
            ids = torch.tensor([record.prompt_ids], device=bench.target.device)
            new = bench.max_new_tokens(ids.shape[1])
            seconds, answer = _timed(bench.target, lambda ids=ids: _generate(bench, ids))  # type: ignore[misc]
            answers[record.prompt_key] = tuple(answer)
            if number < REFERENCE_PROMPTS:
                bare, _ = _timed(bench.target, lambda ids=ids, answer=answer: _replay(vanilla, ids, answer))  # type: ignore[misc]
                plain, _ = _timed(
                    bench.target,
                    lambda ids=ids, new=new: vanilla.generate(ids, max_new_tokens=new, do_sample=False),  # type: ignore[misc]
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
        identical_to_generate=sum(bool(r.identical_to_generate) for r in checked if r.row == bench.suite.vanilla),
        generate_static_ms_per_token=medians["static"],
    )
    write_json(bench.directory / "reference.json", asdict(reference))
    return reference, checked


def reference_text(reference: Reference) -> str:
    """The three times on one line."""
    return (
        f"ms per token, prefill included: vanilla {reference.vanilla_ms_per_token:.2f}, its bare forwards "
        f"{reference.bare_forward_ms_per_token:.2f}, transformers' generate with a static cache "
        f"{reference.generate_static_ms_per_token:.2f}"
    )


def _timed(target: Target, work: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds of work, and what it returned."""
    started = _now_reference(target)
    result = work()
    return _now_reference(target) - started, result


def _generate(bench: Bench, ids: Tensor) -> list[int]:
    """The new tokens of transformers' own greedy generate with a static cache."""
    model = bench.target.model
    with torch.inference_mode():
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=bench.max_new_tokens(ids.shape[1]),
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


def _now_reference(target: Target) -> float:
    if target.device.type == "cuda":
        torch.cuda.synchronize(target.device)
    return time.perf_counter()


NUM_PROMPTS = 4
REPETITIONS = 6
PHASES = ("draft", "verify", "commit", "other")
TIMES = ("overhead", "cycle", *PHASES, "bare_target", "bare_draft")


def measure_overhead(bench: Bench, prompts: Sequence[Prompt]) -> list[Overhead]:
    """The overhead of each row on the first few prompts; writes overhead.json, and leaves one that is there alone.

    Decoding and replaying take turns, row by row and again, so that a drift of the machine's speed falls on all alike.
    A row that fails is left out, with a warning.
    """
    path = bench.directory / OVERHEAD
    if path.is_file():
        return read_as(path, list[Overhead])
    used = prompts[:NUM_PROMPTS]
    rows = range(len(bench.config.rows))
    found: list[list[dict[str, float]]] = [[] for _ in rows]
    with bar(len(used) * REPETITIONS, "turns", "overhead") as progress:
        for prompt in used:
            ids = encode_turn(prompt, (), bench.tokenizer, bench.target)
            settings: dict[str, Any] = {"max_new_tokens": bench.max_new_tokens(ids.shape[1]), "do_sample": False}
            tapes = {row: tape for row in rows if (tape := _tape(bench, row, ids, settings)) is not None}
            for repetition in range(REPETITIONS):
                for row, tape in tapes.items():
                    found[row].append(_times(bench.decoders[row], ids, settings, tape, repetition % 2 == 1))
                progress.update()
    measured = [
        Overhead(
            row,
            bench.config.rows[row].method,
            len(used),
            REPETITIONS,
            **{name: statistics.median(times[name] for times in found[row]) for name in TIMES},
        )
        for row in rows
        if found[row]
    ]
    write_json(path, [asdict(row) for row in measured])
    return measured


def overhead_text(row: Overhead) -> str:
    """'row 1, eagle2: 9.20 ms a cycle, its forwards alone 8.20 (target 5.60, draft 2.60): overhead 12.2 %'."""
    bare = row.bare_target + row.bare_draft
    return (
        f"row {row.row}, {row.method}: {row.cycle:.2f} ms a cycle, its forwards alone {bare:.2f} "
        f"(target {row.bare_target:.2f}, draft {row.bare_draft:.2f}): overhead {100 * row.overhead:.1f} %"
    )


def _tape(bench: Bench, row: int, ids: Tensor, settings: dict[str, Any]) -> Tape | None:
    """The row's forwards on this prompt; null where it fails, or answers without a cycle."""
    try:
        tape, _ = taped(bench.decoders[row], ids, **settings)
    except (UserError, RuntimeError) as error:
        warn(f"bench.rows.{row}: its overhead is not measured: {str(error).splitlines()[0]}")
        return None
    return tape if tape.calls else None


def _times(
    decoder: SpeculativeDecoder, ids: Tensor, settings: dict[str, Any], tape: Tape, bare_first: bool
) -> dict[str, float]:
    """One turn of decoding and one of its bare forwards, by the names of Overhead.

    Which of them comes first changes from turn to turn: the second one finds the processor's caches warm.
    """
    bare = tape.replay(decoder.target.device) if bare_first else {}
    counted = decoder.generate(ids, timed=True, **settings).statistics
    bare = bare or tape.replay(decoder.target.device)
    cycles, whole = counted.target_forwards, counted.ms["wall"] - counted.ms["prefill"]
    forwards = 1000 * sum(bare.values())
    return {
        "overhead": (whole - forwards) / forwards,
        "cycle": whole / cycles,
        **{phase: counted.ms[phase] / cycles for phase in PHASES},
        **{f"bare_{part}": 1000 * seconds / cycles for part, seconds in bare.items()},
    }
