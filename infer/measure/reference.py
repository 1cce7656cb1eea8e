"""What decoding is held against: transformers' generate, and the time that a row spends in model forwards."""

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from typing import Any, Literal
from unittest.mock import patch

import torch
from torch import Tensor
from transformers.generation.streamers import BaseStreamer

from aerie.configs.errors import UserError, warn
from aerie.data.stage import bar
from aerie.infer.decode.engine import SpeculativeDecoder
from aerie.infer.decode.shape import Drafting
from aerie.infer.decode.tree import root_only
from aerie.infer.measure.bench import Bench
from aerie.infer.measure.record import OVERHEAD, REFERENCE, Overhead, PromptKey, Record, Reference, read_as
from aerie.infer.measure.tasks import Prompt, encode_turn
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


class Stopwatch(BaseStreamer):
    """The seconds that an answer's cycles spend in model forwards: pass it as streamer inside `with watch.on(decoder)`.

    It begins with the second `put`: the engine hands out the prompt, prefills, and hands out the first token.
    """

    def __init__(self) -> None:
        self.seconds: dict[Part, float] = {"target": 0.0, "draft": 0.0}
        self.calls: dict[Part, int] = {"target": 0, "draft": 0}
        self._puts = 0

    def put(self, value: Tensor) -> None:
        self._puts += 1
        if self._puts == 2:
            self.seconds, self.calls = {"target": 0.0, "draft": 0.0}, {"target": 0, "draft": 0}

    def end(self) -> None:
        return

    def on(self, decoder: SpeculativeDecoder) -> ExitStack:
        """Times the calls of the target and of the drafter's models, LM heads included, while the block runs."""
        target, stack = decoder.target, ExitStack()
        places: list[tuple[Part, Any, str]] = [("target", target.decoder, "forward"), ("target", target, "logits")]
        if isinstance(decoder.proposer, Drafting):
            places += [("draft", owner, name) for owner, name in decoder.proposer.drafter.forwards()]
        for part, owner, name in places:
            timed = self._timed(part, getattr(owner, name), target.device)
            stack.enter_context(patch.object(owner, name, timed))
        return stack

    def _timed(self, part: Part, function: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
        def timed(*arguments: Any, **keywords: Any) -> Any:
            started = _now(device)
            output = function(*arguments, **keywords)
            self.seconds[part] += _now(device) - started
            self.calls[part] += 1
            return output

        return timed


def measure_overhead(bench: Bench, prompts: Sequence[Prompt]) -> list[Overhead]:
    """The overhead of each row on the first few prompts; writes overhead.json, and leaves one that is there alone.

    An answer is decoded twice: as ever, and with its forwards timed one by one. Rows take turns, so that a drift of the
    machine's speed falls on all alike. A row that fails is left out, with a warning.
    """
    path, used = bench.directory / OVERHEAD, prompts[:NUM_PROMPTS]
    if path.is_file():
        return read_as(path, list[Overhead])
    times: dict[int, list[dict[str, float]]] = {row: [] for row in range(len(bench.config.rows))}
    with bar(len(used) * REPETITIONS, "turns", "overhead") as progress:
        for prompt in used:
            ids = encode_turn(prompt, (), bench.tokenizer, bench.target)
            settings: dict[str, Any] = {"max_new_tokens": bench.max_new_tokens(ids.shape[1]), "do_sample": False}
            for _ in range(REPETITIONS):
                for row in list(times):
                    try:
                        times[row] += _turn(bench.decoders[row], ids, settings)
                    except (UserError, RuntimeError) as error:
                        warn(f"bench.rows.{row}: its overhead is not measured: {str(error).splitlines()[0]}")
                        del times[row]
                progress.update()
    measured = []
    for row, turns in times.items():
        if not turns:
            continue
        medians = {name: statistics.median(turn[name] for turn in turns) for name in turns[0]}
        measured.append(Overhead(row, bench.config.rows[row].method, len(used), REPETITIONS, **medians))
    write_json(path, [asdict(row) for row in measured])
    return measured


def _turn(decoder: SpeculativeDecoder, ids: Tensor, settings: dict[str, Any]) -> list[dict[str, float]]:
    """The times of Overhead, in a list; an empty one for an answer of one token, which has no cycle."""
    watch, counted = Stopwatch(), decoder.generate(ids, timed=True, **settings).statistics
    with watch.on(decoder):
        decoder.generate(ids, streamer=watch, **settings)
    ms, cycles = counted.ms, counted.target_forwards
    if not cycles:
        return []
    decoding, forwards = ms["wall"] - ms["prefill"], 1000 * sum(watch.seconds.values())
    taken = {"overhead": (decoding - forwards) / forwards, "cycle": decoding / cycles}
    taken |= {phase: ms[phase] / cycles for phase in PHASES}
    return [taken | {f"bare_{part}": 1000 * seconds / cycles for part, seconds in watch.seconds.items()}]


def overhead_text(row: Overhead) -> str:
    """'row 1, eagle2: 9.20 ms a cycle, its forwards alone 8.20 (target 5.60, draft 2.60): overhead 12.2 %'."""
    bare = row.bare_target + row.bare_draft
    return (
        f"row {row.row}, {row.method}: {row.cycle:.2f} ms a cycle, its forwards alone {bare:.2f} "
        f"(target {row.bare_target:.2f}, draft {row.bare_draft:.2f}): overhead {100 * row.overhead:.1f} %"
    )
