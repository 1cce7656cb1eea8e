"""Made-up answers, reference times and tunings for the tests of aggregation, report and claims."""

from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np

from aerie.configs.schema.decode import Method, MethodConfig
from aerie.infer.measure.bench_files import (
    Cell,
    Milliseconds,
    Record,
    SuiteFile,
    SweepPoint,
    line_of,
)
from aerie.infer.measure.tree_shape import TreeShape, tree_shape
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
        "new_tokens": 1 + cycles,
        "accepted": (0,) * cycles,
        "cycle_tokens": (1,) * cycles,
        "target_forwards": cycles,
        "ms": milliseconds(prefill=10.0, wall=50.0),
    }
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
    """An answer of 64 tokens: one by prefill, then geometric draws of tokens per cycle."""
    method, tree = list(TREES.items())[row]
    levels, nodes = (tree.levels, tree.nodes) if tree else (0, 1)
    tokens: list[int] = []
    while sum(tokens) < 63:
        tokens.append(min(int(generator.geometric(0.2)), levels + 1, 63 - sum(tokens)))
    cycles = len(tokens)
    is_greedy = True if temperature == 0 else None
    noise = float(generator.uniform(0.95, 1.05))
    parts = (9.0, 0.6 * levels * cycles, (5.0 + 0.09 * nodes) * cycles * noise, 0.3 * cycles, 0.0)
    words = [f" {word}" for word in generator.choice(WORDS, size=64)]
    ends = np.cumsum([0, 1, *tokens])
    texts = tuple("".join(words[first:end]) for first, end in pairwise(ends))
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
        draft_forwards=levels * cycles,
        draft_nodes=(nodes - 1) * cycles,
        ms=Milliseconds(*parts, sum(parts)),
        identical=is_greedy,
        identical_to_generate=is_greedy,
        peak_memory_gib=0.6,
    )


PROMPTS = (("sums", "a"), ("sums", "b"))
# A level costs 1 ms, verifying 2 ms for one node and 4 for 60, the rest 0.5 a cycle; a cycle
# without a draft costs 3 ms.
COSTS = {
    "draft": {"1": [1.0, 1.0], "10": [1.0, 1.0]},
    "verify": {"1": 2.0, "60": 4.0},
    "rest": 0.5,
    "plain": 3.0,
}
TREE_NAME = "eagle2, 6 levels, k 10, 60 nodes"
PREDICTED = {"name": TREE_NAME, "tau": 3.0, "ms_per_token": 2.0, "speedup": 1.5}
PREDICTIONS = {"choice": PREDICTED, "published": PREDICTED, "trees": [PREDICTED], "rules": []}
TUNING: dict[str, Any] = {
    "chosen": "eagle1",
    "heads": [{"kind": "eagle1", "costs_ms": COSTS, **PREDICTIONS}],
}


def tree_of(method: Method, **changes: Any) -> TreeShape:
    """A record's entry for a method's tree with these changes."""
    return tree_shape(MethodConfig.of(method, **changes))  # type: ignore[return-value]


def voting_answers() -> list[Record]:
    """Vanilla (row 0), then a fixed and a voting tree of 2 levels, then both of 4, on two prompts.

    Each tree also answers prompt c.
    """
    spent: list[tuple[Method, int, tuple[int, ...], int, int, float]] = [
        # method, levels, tokens of the cycles, draft forwards, wasted ones, decode ms
        ("eagle2", 2, (3, 1), 4, 2, 20.0),
        ("deagle", 2, (3, 1), 3, 1, 20.0),
        ("eagle2", 4, (4,), 4, 4, 10.0),
        ("deagle", 4, (3, 1), 3, 2, 16.0),
    ]
    records = [record(prompt_id=name) for _, name in PROMPTS]  # 4 decoded tokens in 40 ms
    for row, (method, levels, tokens, forwards, wasted, ms) in enumerate(spent, start=1):
        about: dict[str, Any] = {
            "row": row,
            "method": method,
            "tree": tree_of(method, levels=levels),
            "head": "eagle1",
        }
        drafts: dict[str, Any] = {
            "draft_forwards": forwards,
            "draft_forwards_wasted": wasted,
            "draft_nodes": 59 * len(tokens),
            "cycle_nodes": (59,) * len(tokens),
            "ms": milliseconds(10.0, 10.0 + ms),
        }
        records += [drafted(tokens, prompt_id=name, **about, **drafts) for _, name in PROMPTS]
        records.append(drafted((9, 9), prompt_id="c", **about))
    return records


def voting_suite() -> SuiteFile:
    """A sweep over the levels of `voting_answers` without prompt c; trees of 2 are also rows."""
    points = [
        SweepPoint(row, **GREEDY, sweep="d", key="tree.levels", value=levels, prompts=PROMPTS)
        for row, levels in enumerate((2, 2, 4, 4), start=1)
    ]
    return SuiteFile(tuple(Cell(row, **GREEDY) for row in (0, 1, 2)), tuple(points))
