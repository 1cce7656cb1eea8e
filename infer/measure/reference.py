"""What decoding is held against: transformers' generate, and a row's model forwards replayed with nothing between."""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal
from unittest.mock import patch

import torch
from torch import Tensor
from transformers.generation.streamers import BaseStreamer

from aerie.configs.errors import UserError, warn
from aerie.data.progress import bar
from aerie.infer.decode.cache import PreallocatedCache
from aerie.infer.decode.engine import SpeculativeDecoder
from aerie.infer.decode.shape import Drafting
from aerie.infer.decode.tree import root_only
from aerie.infer.measure.bench import Bench
from aerie.infer.measure.record import OVERHEAD, REFERENCE, Overhead, PromptKey, Record, Reference, read_as
from aerie.infer.measure.tasks import Prompt, encode_turn
from aerie.model.layers import KeyValueBuffer
from aerie.model.storage import write_json

REFERENCE_PROMPTS = 12  # that are timed in all three ways
NUM_PROMPTS, REPETITIONS = 4, 6  # of the overhead
PHASES = ("draft", "verify", "commit", "other")
Part = Literal["target", "draft"]


def measure_reference(bench: Bench, records: list[Record]) -> tuple[Reference, list[Record]]:
    """transformers' generate on every greedy prompt, and the bare forwards replayed; writes reference.json.

    Returns the figures (medians over the first prompts, each timed all three ways in turn, prefill included) and the
    records with `identical_to_generate`.
    """
    target, vanilla = bench.target, SpeculativeDecoder(bench.target)
    greedy = [r for r in records if r.temperature == 0.0 and r.row == bench.suite.vanilla and r.status == "ok"]
    answers: dict[PromptKey, tuple[int, ...]] = {}
    seconds: dict[str, list[float]] = {"static": [], "bare": [], "vanilla": []}

    def timed(name: str, work: Callable[..., Any], *arguments: Any, **settings: Any) -> Any:
        started = _now(target.device)
        result = work(*arguments, **settings)
        seconds[name].append(_now(target.device) - started)
        return result

    with bar(len(greedy), "prompts", "reference") as progress, torch.inference_mode():
        for number, record in enumerate(greedy):
            ids = torch.tensor([record.prompt_ids], device=target.device)
            settings: dict[str, Any] = {"max_new_tokens": bench.max_new_tokens(ids.shape[1]), "do_sample": False}
            static = {"attention_mask": torch.ones_like(ids), "cache_implementation": "static", "disable_compile": True}
            out = timed("static", target.model.generate, ids, **settings, **static)
            answer = out[0, ids.shape[1] :].tolist()
            answers[record.prompt_key] = tuple(answer)
            if number < REFERENCE_PROMPTS:
                timed("bare", _forwards_alone, vanilla, ids, answer)
                timed("vanilla", vanilla.generate, ids, **settings)
            progress.update()
    tokens = [len(answer) for answer in answers.values()][:REFERENCE_PROMPTS]
    medians = {
        name: statistics.median(1000 * s / n for s, n in zip(times, tokens, strict=False)) if times else 0.0
        for name, times in seconds.items()
    }
    checked = [
        replace(r, identical_to_generate=r.output_ids == answers[r.prompt_key])
        if r.status == "ok" and r.temperature == 0.0 and r.prompt_key in answers
        else r
        for r in records
    ]
    reference = Reference(
        vanilla_ms_per_token=medians["vanilla"],
        bare_forward_ms_per_token=medians["bare"],
        prompts=len(greedy),
        identical_to_generate=sum(bool(r.identical_to_generate) for r in checked if r.row == bench.suite.vanilla),
        generate_static_ms_per_token=medians["static"],
    )
    write_json(bench.directory / REFERENCE, asdict(reference))
    return reference, checked


def reference_text(reference: Reference) -> str:
    """The three times on one line."""
    return (
        f"ms per token, prefill included: vanilla {reference.vanilla_ms_per_token:.2f}, its bare forwards "
        f"{reference.bare_forward_ms_per_token:.2f}, transformers' generate with a static cache "
        f"{reference.generate_static_ms_per_token:.2f}"
    )


def _forwards_alone(vanilla: SpeculativeDecoder, ids: Tensor, answer: list[int]) -> None:
    """The target forwards that write this answer: no choice, no stop rule, no statistics."""
    tokens = torch.tensor(answer, device=ids.device)
    vanilla.lm.prefill(ids[0], ids.shape[1] + len(answer) + 1)
    for position in range(len(answer) - 1):
        vanilla.lm.extend(root_only(tokens[position : position + 1]))
        vanilla.lm.keep([0])


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


@dataclass(frozen=True)
class Call:
    """One forward: a function of a model, its arguments, and where the caches among them stood."""

    part: Part
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    lengths: tuple[tuple[Any, int, int], ...]  # (cache, length, pending)


class Tape(BaseStreamer):
    """The model forwards of the cycles of one answer, in order: pass it as streamer inside `with tape.noting(decoder)`.

    Calls count from the second `put` on: the engine hands out the prompt, prefills, and hands out the first token.
    """

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self._puts = 0

    def put(self, value: Tensor) -> None:
        self._puts += 1

    def end(self) -> None:
        return

    def noting(self, decoder: SpeculativeDecoder) -> ExitStack:
        """Notes the calls of the target and of the drafter's models while the block runs."""
        target = decoder.target
        places: list[tuple[Part, Any, str]] = [("target", target.decoder, "forward"), ("target", target, "logits")]
        if isinstance(decoder.proposer, Drafting):
            places += [("draft", owner, name) for owner, name in decoder.proposer.drafter.forwards()]
        stack = ExitStack()
        for part, owner, name in places:
            stack.enter_context(patch.object(owner, name, self._noted(part, getattr(owner, name))))
        return stack

    def _noted(self, part: Part, function: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*arguments: Any, **keywords: Any) -> Any:
            if self._puts >= 2:
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
        part, since = self.calls[0].part, _now(device)
        for call in self.calls:
            if call.part != part:
                now = _now(device)
                seconds[part] += now - since
                part, since = call.part, now
            for cache, length, pending in call.lengths:
                cache.length = length
                if isinstance(cache, PreallocatedCache):
                    cache.pending = pending
            call.function(*call.arguments, **call.keywords)
        seconds[part] += _now(device) - since
        return seconds


def _lengths(values: list[Any]) -> Iterator[tuple[Any, int, int]]:
    for value in values:
        if isinstance(value, PreallocatedCache):
            yield value, value.length, value.pending
        elif isinstance(value, KeyValueBuffer):
            yield value, value.length, 0
        elif isinstance(value, list):
            yield from _lengths(value)


def measure_overhead(bench: Bench, prompts: Sequence[Prompt]) -> list[Overhead]:
    """The overhead of each row on the first few prompts; writes overhead.json, and leaves one that is there alone.

    Decoding and replaying take turns, row by row and again, so that a drift of the machine's speed falls on all alike.
    A row that fails is left out, with a warning.
    """
    path, device = bench.directory / OVERHEAD, bench.target.device
    if path.is_file():
        return read_as(path, list[Overhead])
    used = prompts[:NUM_PROMPTS]
    times: dict[int, list[dict[str, float]]] = {}
    with bar(len(used) * REPETITIONS, "turns", "overhead") as progress:
        for prompt in used:
            ids = encode_turn(prompt, (), bench.tokenizer, bench.target)
            settings: dict[str, Any] = {"max_new_tokens": bench.max_new_tokens(ids.shape[1]), "do_sample": False}
            tapes = {}
            for row, decoder in enumerate(bench.decoders[: len(bench.config.rows)]):
                tape = Tape()
                try:
                    with tape.noting(decoder):
                        decoder.generate(ids, streamer=tape, **settings)
                except (UserError, RuntimeError) as error:
                    warn(f"bench.rows.{row}: its overhead is not measured: {str(error).splitlines()[0]}")
                    continue
                if tape.calls:  # an answer of one token has no cycle
                    tapes[row] = tape
            for repetition in range(REPETITIONS):
                for row, tape in tapes.items():
                    # which of them comes first changes: the second one finds the processor's caches warm
                    bare = tape.replay(device) if repetition % 2 else None
                    counted = bench.decoders[row].generate(ids, timed=True, **settings).statistics
                    bare = bare or tape.replay(device)
                    ms, cycles = counted.ms, counted.target_forwards
                    decoding, forwards = ms["wall"] - ms["prefill"], 1000 * sum(bare.values())
                    taken = {"overhead": (decoding - forwards) / forwards, "cycle": decoding / cycles}
                    taken |= {phase: ms[phase] / cycles for phase in PHASES}
                    taken |= {f"bare_{part}": 1000 * seconds / cycles for part, seconds in bare.items()}
                    times.setdefault(row, []).append(taken)
                progress.update()
    measured = []
    for row, turns in sorted(times.items()):
        medians = {name: statistics.median(turn[name] for turn in turns) for name in turns[0]}
        measured.append(Overhead(row, bench.config.rows[row].method, len(used), REPETITIONS, **medians))
    write_json(path, [asdict(row) for row in measured])
    return measured


def overhead_text(row: Overhead) -> str:
    """'row 1, eagle2: 9.20 ms a cycle, its forwards alone 8.20 (target 5.60, draft 2.60): overhead 12.2 %'."""
    bare = row.bare_target + row.bare_draft
    return (
        f"row {row.row}, {row.method}: {row.cycle:.2f} ms a cycle, its forwards alone {bare:.2f} "
        f"(target {row.bare_target:.2f}, draft {row.bare_draft:.2f}): overhead {100 * row.overhead:.1f} %"
    )
