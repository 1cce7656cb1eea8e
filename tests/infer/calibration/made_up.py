"""Tables with known columns, for the tests of what is computed from them, and a whole analysis for the report's."""

from typing import Any

import numpy as np
import pandas as pd

from aerie.infer.measure.calibrate import Recording, analyse, fit_and_score
from aerie.infer.measure.cycles import COLUMNS, LAWS
from tests.infer.made_up import nodes_and_cycles

FLAGS = ("agrees", "accepted", "followed")


def laws(count: int, **columns: Any) -> pd.DataFrame:
    """Laws with these columns; what is left out is zero (ranked: one column)."""
    table = pd.DataFrame({name: columns.get(name, [0] * count) for name in ("prompt", "cycle", *LAWS)})
    table["ranked"] = columns.get("ranked", [[0.0]] * count)
    return table.astype(dict.fromkeys(FLAGS, bool))


def recording(**tables: pd.DataFrame) -> Recording:
    """A recording of 12 prompts in two tasks with these tables; the others are empty."""
    empty = {name: pd.DataFrame(columns=["prompt", "cycle", *names]) for name, names in COLUMNS.items()}
    return Recording({**empty, **tables}, ("sums", "code") * 6, 0.0)


def analysis() -> dict[str, Any]:
    """The content of analysis.json for made-up nodes, laws, frontiers and oracle lengths of 12 prompts in two tasks."""
    generator = np.random.default_rng(0)
    nodes, cycles = nodes_and_cycles(generator)
    nodes["place"] = generator.choice(["0", "1", "0.0", "0.1", "0.0.0"], len(nodes))
    cells = 80
    p, q = generator.dirichlet(np.full(8, 0.4), cells), generator.dirichlet(np.full(8, 0.4), cells)
    accepted = generator.random(cells) < 0.7
    made = laws(
        cells, prompt=np.arange(cells) % 12, cycle=np.arange(cells) // 24, depth=1 + np.arange(cells) // 12 % 2,
        token=np.arange(cells) % 9, q=q.max(1), p=p[np.arange(cells), q.argmax(1)], acceptance=accepted,
        accepted=accepted, followed=accepted, top_q=q.max(1), agrees=accepted, tvd=1 - np.minimum(p, q).sum(1),
        kl_pq=(p * np.log(p / q)).sum(1), kl_qp=(q * np.log(q / p)).sum(1), entropy=-(q * np.log(q)).sum(1),
        ranked=np.sort(np.log(q))[:, [7, 6, 4, 0]].tolist(),
    )  # fmt: skip
    frontier = nodes[["prompt", "cycle", "depth", "survival"]].assign(accepted=nodes.acceptance > 0)
    for name in ("levels", "oracle"):
        cycles[name] = generator.integers(1, 9, len(cycles))
    cycles["position"], cycles["cap"] = generator.integers(20, 200, len(cycles)), 9
    made_up = recording(nodes=nodes, cycles=cycles, laws=made, frontier=frontier)
    fitted = fit_and_score(made_up, 20)
    assert fitted is not None
    return {**analyse(made_up, lambda token: f"<script>{token}"), "calibrator": fitted[1]}
