"""Laws with known columns, for the tests of what is computed from them, and a whole analysis for the report's."""

from dataclasses import fields
from typing import Any

import numpy as np

from aerie.infer.measure.bounds import FLAGS, INTEGERS, FrontierArrays, LawArrays, LevelArrays, PositionArrays
from aerie.infer.measure.calibrate import Recording, analyse, fit_and_score
from aerie.infer.measure.oracle import OracleArrays
from tests.infer.made_up import cycles


def laws(count: int, **columns: Any) -> LawArrays:
    """Laws with these columns; what is left out is zero (ranked: one column)."""
    values: dict[str, Any] = {}
    for field in fields(LawArrays):
        kind = np.bool_ if field.name in FLAGS else np.int64 if field.name in INTEGERS else np.float64
        values[field.name] = np.zeros(count, dtype=kind)
        if field.name in columns:
            values[field.name] = np.array(columns[field.name], dtype=kind)
    if "ranked" not in columns:
        values["ranked"] = np.zeros((count, 1))
    return LawArrays(**values)


def analysis() -> dict[str, Any]:
    """The content of analysis.json for made-up nodes, laws, frontiers and oracle lengths of 12 prompts in two tasks."""
    generator = np.random.default_rng(0)
    nodes = cycles(generator)
    count, cells = nodes.prompt.size, 80
    places = generator.choice(["0", "1", "0.0", "0.1", "0.0.0"], count)
    p, q = generator.dirichlet(np.full(8, 0.4), cells), generator.dirichlet(np.full(8, 0.4), cells)
    accepted = generator.random(cells) < 0.7
    made = laws(
        cells, prompt=np.arange(cells) % 12, cycle=np.arange(cells) // 24, depth=1 + np.arange(cells) // 12 % 2,
        token=np.arange(cells) % 9, q=q.max(1), p=p[np.arange(cells), q.argmax(1)], acceptance=accepted,
        accepted=accepted, followed=accepted, top_q=q.max(1), agrees=accepted, tvd=1 - np.minimum(p, q).sum(1),
        kl_pq=(p * np.log(p / q)).sum(1), kl_qp=(q * np.log(q / p)).sum(1), entropy=-(q * np.log(q)).sum(1),
        ranked=np.sort(np.log(q))[:, [7, 6, 4, 0]],
    )  # fmt: skip
    frontier = FrontierArrays(nodes.prompt, nodes.depth, nodes.survival, nodes.acceptance > 0)
    levels = LevelArrays(
        nodes.prompt, nodes.prompt, nodes.depth, nodes.survival, nodes.acceptance > 0, nodes.acceptance > 0
    )
    integers = {name: generator.integers(1, 9, 60) for name in ("proposed", "accepted", "oracle")}
    oracle = OracleArrays(
        prompt=np.arange(60) % 12, position=generator.integers(20, 200, 60), answered=np.arange(60), cap=np.full(60, 9),
        **integers,
    )  # fmt: skip
    recording = Recording(
        nodes, ("sums", "code") * 6, PositionArrays(nodes.prompt, places.astype(np.str_), nodes.acceptance), made,
        frontier, levels, oracle,
    )  # fmt: skip
    fitted = fit_and_score(nodes, 20)
    assert fitted is not None
    return {**analyse(recording, lambda token: f"<script>{token}"), "calibrator": fitted[1]}
