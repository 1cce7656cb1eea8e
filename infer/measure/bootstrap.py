"""Estimates figures of sums over prompts, with 95 % bootstrap intervals paired by prompt."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from warnings import catch_warnings

import numpy as np
import pandas as pd
from scipy import stats

from aerie.configs.errors import UserError
from aerie.infer.measure.bench_files import Record
from aerie.infer.measure.statistics import RESAMPLES, FloatArray

IN_MEMORY = 250  # resamples held in memory at once
PromptSums = FloatArray  # [..., m]: sums over prompts of a table's m columns


class Side(NamedTuple):
    """A figure, or one of two figures to compare."""

    table: pd.DataFrame  # one line a prompt, m columns
    figure: Callable[[PromptSums], FloatArray]  # column sums [..., m] -> figures [...]


class Estimate(NamedTuple):
    """A figure with its 95 % interval."""

    value: float
    low: float
    high: float
    prompts: int  # with data on every side


def estimate(
    sides: Sequence[Side], *, is_ratio: bool = False, is_share: bool = False, seed: int = 0
) -> Estimate | None:
    """The figure of one side, or the difference of two (is_ratio: their ratio).

    Two sides are compared on the prompts that both have. Returns None if nothing was measured.
    is_share: the figure is a mean of zeros and ones.
    """
    prompts = sides[0].table.index.intersection(sides[-1].table.index)
    tables = [side.table.loc[prompts].to_numpy(dtype=np.float64) for side in sides]  # [n, m] each

    def figure_of(drawn: Any, axis: int = -1) -> Any:  # drawn: [..., n] numbers of prompts
        with np.errstate(all="ignore"):
            sums = [table[drawn].sum(-2) for table in tables]
            values = [side.figure(total) for side, total in zip(sides, sums, strict=True)]
            if len(values) == 1:
                return values[0]
            return values[0] / values[1] if is_ratio else values[0] - values[1]

    numbers = np.arange(len(prompts))
    with_data = min(int((table != 0).any(-1).sum()) for table in tables)
    value = float(figure_of(numbers)) if with_data else np.nan
    if not np.isfinite(value):
        return None
    if with_data < 2:
        return Estimate(value, -np.inf, np.inf, with_data)
    if is_share and value in (0, 1):
        # A share of 0 or 1 has no spread to resample, so it gets Clopper and Pearson's interval.
        exact = stats.binomtest(round(value * with_data), with_data).proportion_ci()
        return Estimate(value, exact.low, exact.high, with_data)
    with catch_warnings(action="ignore"):  # scipy warns of resamples without a finite figure
        resampled = stats.bootstrap(
            (numbers,),
            figure_of,
            n_resamples=RESAMPLES,
            batch=IN_MEMORY,
            method="percentile",
            vectorized=True,
            rng=np.random.default_rng(seed),
        ).bootstrap_distribution
        low, high = np.nanpercentile(resampled, [2.5, 97.5])
    return Estimate(value, float(low), float(high), with_data)


def tau_difference(
    records: Sequence[Record], rows: Sequence[int], against: Sequence[int], seed: int = 0
) -> str:
    """A line with the difference in tau between two sets of rows; each set is pooled.

    rows, against: numbers of bench.rows.
    """
    if len({record.sampling for record in records}) > 1:
        raise UserError("the bench has several samplings: choose one with --temperature")
    prompts = {record.prompt for record in records if record.row in (*rows, *against)}
    good = [record for record in records if record.status == "ok"]
    for row in (*rows, *against):
        if not prompts or {record.prompt for record in good if record.row == row} != prompts:
            raise UserError(
                f"row {row} of bench.rows (from 0) lacks answers; "
                "compare rows that answer every prompt"
            )
    sides = []
    for numbers in (rows, against):
        lines = [
            (*record.prompt, record.target_forwards, record.new_tokens - 1)
            for record in good
            if record.row in numbers
        ]
        sums = pd.DataFrame(lines).groupby([0, 1]).sum()  # by task and prompt_id
        sides.append(Side(sums, lambda sums: sums[..., 1] / sums[..., 0]))
    difference = estimate(sides, seed=seed)
    if difference is None:
        raise UserError(
            "tau cannot be compared: no prompt has an answer of two tokens or more on both sides"
        )
    mine, theirs = (float(side.figure(side.table.sum().to_numpy())) for side in sides)
    return (
        f"tau {mine:.3f} against {theirs:.3f}: {difference.value:+.3f} "
        f"[{difference.low:+.3f}, {difference.high:+.3f}] "
        f"(95 %, paired bootstrap; prompts: {difference.prompts})"
    )
