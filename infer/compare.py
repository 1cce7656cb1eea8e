"""Two sets of bench rows on the same prompts, compared in pairs: the difference of their tau, with an interval."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from infer.aggregate import RESAMPLES, group, identity
from infer.records import Record
from infer.table import label
from infer.variant import told_apart
from model.errors import UserError

Key = tuple[float, int, float, str, str]


@dataclass(frozen=True)
class Difference:
    """tau of the rows `of` (pooled) against that of the rows `against`, and their difference."""

    of: float
    against: float
    difference: float
    ci95: tuple[float, float]
    prompts: int

    def text(self) -> str:
        """One line."""
        low, high = self.ci95
        return (
            f"tau {self.of:.3f} against {self.against:.3f}: {self.difference:+.3f} [{low:+.3f}, {high:+.3f}] "
            f"(95 %, paired bootstrap over {self.prompts} prompts)"
        )


def names(records: Sequence[Record], rows: Sequence[int]) -> str:
    """'row 2 (eagle2, 6 levels, k 10, 60 nodes)': the rows as tables name them, each once."""
    groups = group(records)
    every = told_apart([identity(members) for members in groups])
    found = {
        members.first.row: f"row {members.first.row} ({label(one, every)})"
        for members, one in zip(groups, every, strict=True)
    }
    return " and ".join(found.get(row, f"row {row}") for row in dict.fromkeys(rows))


def tau_difference(records: Sequence[Record], of: Sequence[int], against: Sequence[int], seed: int = 0) -> Difference:
    """The difference of tau between two sets of rows (numbers of bench.rows), each pooled over its rows.

    A row may stand for one of several seeds: a resampled prompt brings the answers of all rows of both sets. UserError
    for rows that were not measured, or that do not have all prompts.
    """
    if len({record.sampling for record in records}) > 1:
        settings = sorted({record.temperature for record in records})
        raise UserError(f"the bench has several samplings (temperatures {settings}); choose one with --temperature")
    ours, theirs = _per_prompt(records, of), _per_prompt(records, against)
    if ours.keys() != theirs.keys():
        missing = sorted(ours.keys() ^ theirs.keys())[0]
        raise UserError(
            f"rows {list(of)} and {list(against)}: prompt {missing[-1]!r} is not in both; measure it in all"
        )
    keys = sorted(ours)
    mine, other = np.array([ours[key] for key in keys]), np.array([theirs[key] for key in keys])  # [n, 2]
    generator = np.random.default_rng(seed)
    drawn = generator.integers(len(keys), size=(RESAMPLES, len(keys)))
    found = _tau(mine[drawn].sum(1)) - _tau(other[drawn].sum(1))
    low, high = np.percentile(found, [2.5, 97.5])
    one, two = float(_tau(mine.sum(0)[None])[0]), float(_tau(other.sum(0)[None])[0])
    return Difference(one, two, one - two, (float(low), float(high)), len(keys))


def _per_prompt(records: Sequence[Record], rows: Sequence[int]) -> dict[Key, NDArray[np.float64]]:
    """Tokens after the prefill's and target forwards of each prompt and sampling, summed over the rows."""
    found: dict[Key, NDArray[np.float64]] = {}
    for row in rows:
        members = [record for record in records if record.row == row and record.status == "ok"]
        if not members:
            raise UserError(f"row {row}: nothing was measured; rows are counted from 0 as in bench.rows")
        for record in members:
            key = (*record.sampling, *record.prompt)
            cost = np.array([record.new_tokens - 1, record.target_forwards], dtype=np.float64)
            found[key] = found.get(key, np.zeros(2)) + cost
    return found


def _tau(sums: NDArray[np.float64]) -> NDArray[np.float64]:
    return sums[:, 0] / np.maximum(sums[:, 1], 1.0)
