"""Made-up answers and reference times for the tests of aggregation and report."""

from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np

from aerie.infer.measure.bench_files import Milliseconds, Record, line_of
from aerie.infer.measure.tree_shape import TreeShape
from aerie.model.storage import write_json, write_text

TREES = {
    "vanilla": None,
    "eagle2": TreeShape("dynamic", 6, 8, 16),
    "eagle2-wide": TreeShape("dynamic", 8, 8, 48),
    "eagle-chain": TreeShape("chain", 5, 1, 6),
}
GREEDY: dict[str, Any] = {"temperature": 0.0, "top_k": 0, "top_p": 1.0}
FAILED: dict[str, Any] = {"status": "error", "message": "no memory", "ms": None}
WORDS = (
    "Each crate holds 12 jars , so 7 crates hold 84 . <b>Bold</b> & then she gives away "
    "9 of them ; 75 stay"
).split()


def record(cycles: int = 4, **changes: Any) -> Record:
    """A greedy vanilla answer: a token by prefill in 10 ms, then one per cycle in 40 ms in all."""
    values = {
        "row": 0,
        "method": "vanilla",
        "tree": None,
        "verify": "R0",
        **GREEDY,
        "task": "sums",
        "prompt_id": "0",
    }
    values |= {"new_tokens": 1 + cycles, "accepted": (0,) * cycles, "cycle_tokens": (1,) * cycles}
    values |= {"target_forwards": cycles, "ms": milliseconds(prefill=10.0, wall=50.0)}
    return Record(**{**values, **changes})  # type: ignore[arg-type]


def milliseconds(prefill: float, wall: float, draft: float = 0.0) -> Milliseconds:
    """Times in which verify takes the rest after prefill and draft."""
    return Milliseconds(prefill, draft, wall - prefill - draft, 0.0, 0.0, wall)


def drafted(tokens: tuple[int, ...], **changes: Any) -> Record:
    """An answer of a drafting row with these tokens per cycle, bonus included."""
    forwards = {
        "target_forwards": len(tokens),
        "draft_forwards": 6 * len(tokens),
        "draft_nodes": 15 * len(tokens),
    }
    counts = {
        "new_tokens": sum(tokens) + 1,
        "accepted": tuple(n - 1 for n in tokens),
        "cycle_tokens": tokens,
    }
    values = {
        "row": 1,
        "method": "eagle2",
        "tree": TREES["eagle2"],
        "identical": True,
        "identical_to_generate": True,
    }
    return record(**{**values, **counts, **forwards, **changes})


def write_run(root: Path) -> None:
    """Writes a bench at two temperatures, of 12 prompts in three tasks; its last row fails once."""
    generator, lines = np.random.default_rng(0), list[str]()
    for temperature, prompt in product((0.0, 1.0), range(12)):
        output = generator.integers(0, 400, size=64).tolist()
        answers = [
            _answer(generator, row, temperature, prompt, output) for row in range(len(TREES))
        ]
        wide: dict[str, Any] = {"row": len(TREES), "tree": TreeShape("dynamic", 12, 10, 96)}
        if prompt == 7:
            message = "needs 530 positions; the target has 512 <max_position_embeddings>"
            wide |= {"status": "error", "message": message, "ms": None}
        answers.append(drafted((3, 1), prompt_id=str(prompt), temperature=temperature, **wide))
        lines += map(line_of, answers)
    write_text(root / "bench" / "records.jsonl", "".join(lines))
    reference = {
        "generate_static_ms_per_token": 7.9,
        "vanilla_ms_per_token": 5.0,
        "prompts": 12,
        "identical_to_generate": 12,
    }
    write_json(root / "bench" / "reference.json", reference)


def _answer(
    generator: np.random.Generator, row: int, temperature: float, prompt: int, output: list[int]
) -> Record:
    method, tree = list(TREES.items())[row]
    tokens: list[int] = []
    while sum(tokens) < 63:
        longest = 1 if tree is None else tree.levels + 1
        tokens.append(min(int(generator.geometric(0.2)), longest, 63 - sum(tokens)))
    cycles, is_greedy = len(tokens), True if temperature == 0 else None
    verify = (
        cycles
        * (4.8 if tree is None else 5.0 + 0.09 * tree.nodes)
        * float(generator.uniform(0.95, 1.05))
    )
    parts = (
        9.0,
        0.0 if tree is None else cycles * 0.62 * tree.levels,
        verify,
        0.15 * cycles,
        0.2 * cycles,
    )
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
