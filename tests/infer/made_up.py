"""Made-up answers, reference times and calibration nodes for the tests of aggregation and report."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from aerie.infer.measure.calibrate import summarise
from aerie.infer.measure.record import Milliseconds, Record, TreeShape, line_of
from aerie.model.storage import write_json, write_text

TREES = {
    "vanilla": None,
    "eagle2": TreeShape("dynamic", 6, 8, 16),
    "eagle2-wide": TreeShape("dynamic", 8, 8, 48),
    "eagle-chain": TreeShape("chain", 5, 1, 6),
}
WORDS = "Each crate holds 12 jars , so 7 crates hold 84 . <b>Bold</b> & then she gives away 9 of them ; 75 stay".split()


def record(**changes: Any) -> Record:
    """A greedy answer of one vanilla prompt: 5 new tokens in 4 forwards, 10 ms of prefill and 40 of decoding."""
    values = {"row": 0, "method": "vanilla", "tree": None, "verify": "R0", "temperature": 0.0, "top_k": 0, "top_p": 1.0}
    values |= {"task": "sums", "prompt_id": "0", "new_tokens": 5, "accepted": (0,) * 4, "cycle_tokens": (1,) * 4}
    values |= {"target_forwards": 4, "ms": milliseconds(prefill=10.0, wall=50.0)}
    return Record(**{**values, **changes})  # type: ignore[arg-type]


def milliseconds(prefill: float, wall: float, draft: float = 0.0) -> Milliseconds:
    """Times whose verify part takes what prefill and draft leave."""
    return Milliseconds(prefill, draft, wall - prefill - draft, 0.0, 0.0, wall)


def drafted(tokens: tuple[int, ...], **changes: Any) -> Record:
    """An answer of a drafting row whose cycles gave these tokens, bonus included."""
    forwards = {"target_forwards": len(tokens), "draft_forwards": 6 * len(tokens), "draft_nodes": 15 * len(tokens)}
    counts = {"new_tokens": sum(tokens) + 1, "accepted": tuple(n - 1 for n in tokens), "cycle_tokens": tokens}
    values = {"row": 1, "method": "eagle2", "tree": TREES["eagle2"], "identical": True, "identical_to_generate": True}
    return record(**{**values, **counts, **forwards, **changes})


def write_run(root: Path, temperatures: tuple[float, ...] = (0.0,), failing: bool = False) -> tuple[Path, Path]:
    """A made-up run of 12 prompts in three tasks: the bench and the calibration directory."""
    generator = np.random.default_rng(0)
    lines = []
    for temperature in temperatures:
        for prompt in range(12):
            output = generator.integers(0, 400, size=64).tolist()
            for row, method in enumerate(TREES):
                lines.append(line_of(_answer(generator, row, method, temperature, prompt, output)))
            if failing:  # prompt 7 of this row did not fit
                wide: dict[str, Any] = {"row": len(TREES), "tree": TreeShape("dynamic", 12, 10, 96)}
                if prompt == 7:
                    message = "needs 530 positions; the target has 512 <max_position_embeddings>"
                    wide |= {"status": "error", "message": message, "ms": None}
                lines.append(line_of(drafted((3, 1), prompt_id=str(prompt), temperature=temperature, **wide)))
    bench, calibration = root / "bench", root / "calibration"
    write_text(bench / "records.jsonl", "".join(lines))
    reference = {"generate_static_ms_per_token": 7.9, "generate_dynamic_ms_per_token": 6.4, "prompts": 12}
    reference |= {"bare_forward_ms_per_token": 4.8, "vanilla_ms_per_token": 5.0, "identical_to_generate": 12}
    write_json(bench / "reference.json", reference)
    write_json(calibration / "calibration.json", summarise(*nodes_and_cycles(generator), 0.0))
    return bench, calibration


def nodes_and_cycles(generator: np.random.Generator, num_cycles: int = 400) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The asked nodes of a slightly overconfident head over 12 prompts, and their cycles."""
    accepted = np.minimum(generator.geometric(0.25, size=num_cycles) - 1, 6)
    rows = []
    for cycle, length in enumerate(accepted.tolist()):
        survival = 1.0
        for depth in range(1, min(length + 1, 6) + 1):
            confidence = float(generator.beta(5, 1) if depth <= length else generator.beta(1, 2))
            survival *= confidence
            rows.append((cycle % 12, cycle, depth, "0", confidence, survival, float(depth <= length)))
    names = ["prompt", "cycle", "depth", "place", "confidence", "survival", "acceptance"]
    cycles = pd.DataFrame({"prompt": np.arange(num_cycles) % 12, "cycle": np.arange(num_cycles), "accepted": accepted})
    return pd.DataFrame(rows, columns=names), cycles


def _answer(
    generator: np.random.Generator, row: int, method: str, temperature: float, prompt: int, output: list[int]
) -> Record:
    tree = TREES[method]
    tokens: list[int] = []
    while sum(tokens) < 63:
        longest = 1 if tree is None else tree.levels + 1
        tokens.append(min(int(generator.geometric(0.2)), longest, 63 - sum(tokens)))
    cycles, is_greedy = len(tokens), True if temperature == 0 else None
    verify = cycles * (4.8 if tree is None else 5.0 + 0.09 * tree.nodes) * float(generator.uniform(0.95, 1.05))
    parts = (9.0, 0.0 if tree is None else cycles * 0.62 * tree.levels, verify, 0.15 * cycles, 0.2 * cycles)
    words = [str(word) for word in generator.choice(WORDS, size=64)]
    ends = np.cumsum([1, *tokens])
    texts = (words[0], *("".join(f" {w}" for w in words[a:b]) for a, b in pairwise(ends)))
    return drafted(
        tuple(tokens),
        row=row,
        method=method.removesuffix("-wide"),
        tree=tree,
        verify="R0" if is_greedy else "R2",
        temperature=temperature,
        task=("sums", "units", "letters")[prompt % 3],
        prompt_id=str(prompt),
        prompt_tokens=20,
        prompt_ids=tuple(range(20)),
        prompt_text="How many jars stay? <script>alert(1)</script>",
        output_ids=tuple(output),
        text="".join(texts),
        cycle_texts=texts,
        draft_forwards=0 if tree is None else tree.levels * cycles,
        draft_nodes=0 if tree is None else (tree.nodes - 1) * cycles,
        ms=Milliseconds(*parts, sum(parts)),
        identical=is_greedy,
        identical_to_generate=is_greedy,
        peak_memory_gib=0.6,
    )
