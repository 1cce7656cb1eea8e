"""What a cycle costs beyond its model forwards: each row's decoding against the same forwards replayed bare."""

import statistics
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from torch import Tensor

from data.progress import bar
from infer.bench import Bench
from infer.engine import SpeculativeDecoder
from infer.records import OVERHEAD, Overhead, read_overhead
from infer.tape import Tape, taped
from infer.tasks import Prompt, encode_turn
from model.errors import UserError, warn
from model.files import write_json

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
        return read_overhead(path)
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
