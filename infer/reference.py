"""What the vanilla row is held against: transformers' own generate, and the row's bare forwards replayed."""

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from data.progress import bar
from infer.bench import Bench
from infer.engine import SpeculativeDecoder
from infer.records import Record, Reference
from infer.tree import root_only
from model.files import write_json
from model.target import Target

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
    started = _now(target)
    result = work()
    return _now(target) - started, result


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


def _now(target: Target) -> float:
    if target.device.type == "cuda":
        torch.cuda.synchronize(target.device)
    return time.perf_counter()
