"""What answers were spent on, prompt by prompt, so that rows can be compared, mixed and resampled."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from infer.aggregate import RESAMPLES
from infer.records import FloatArray, Record

if TYPE_CHECKING:
    from infer.tuning.costs import Costs

Prompts = Sequence[tuple[str, str]]
COLUMNS = 5  # tokens after the prefill's, cycles, drafted tokens, accepted ones, modelled milliseconds
TOKENS, CYCLES, DRAFTED, ACCEPTED, MODELLED = range(COLUMNS)


@dataclass(frozen=True)
class Spending:
    """Ratios of sums over prompts; modelled: plain decoding's time per token over this one's, null without costs."""

    length: float  # drafted tokens in a cycle
    accept_rate: float | None
    tau: float
    modelled: float | None


def per_prompt(records: Sequence[Record], prompts: Prompts, costs: "Costs | None") -> FloatArray:
    """[n, COLUMNS]: the sums over each prompt's turns, of chains alone."""
    places = {prompt: place for place, prompt in enumerate(prompts)}
    table = np.zeros((len(prompts), COLUMNS))
    for one in records:
        if one.prompt in places:
            priced = 0.0 if costs is None else chain_ms(one, costs)
            spent = (one.new_tokens - 1, one.target_forwards, one.draft_nodes, sum(one.accepted), priced)
            table[places[one.prompt]] += spent
    return table


def chain_ms(record: Record, costs: "Costs") -> float:
    """What the cycles of chains cost: each verifies its own nodes, for v of the mean is not the mean of v."""
    trees = sum(nodes > 0 for nodes in record.cycle_nodes)
    verified = sum(costs.verify_ms(1 + nodes) for nodes in record.cycle_nodes)
    return costs.draft_ms(trees, record.draft_forwards, 1) + verified + record.target_forwards * costs.rest


def spending(cycle: FloatArray, costs: "Costs | None") -> Spending:
    """The ratios of what a mean cycle [COLUMNS] takes, or of any multiple of it."""
    drafted, modelled = float(cycle[DRAFTED]), float(cycle[MODELLED])
    return Spending(
        length=drafted / float(cycle[CYCLES]),
        accept_rate=float(cycle[ACCEPTED]) / drafted if drafted else None,
        tau=float(cycle[TOKENS] / cycle[CYCLES]),
        modelled=costs.plain * float(cycle[TOKENS]) / modelled if costs is not None and modelled else None,
    )


def mean_cycle(table: FloatArray) -> FloatArray:
    """[COLUMNS] what a cycle takes on average; its cycles are 1."""
    total: FloatArray = table.sum(0)
    return total / total[CYCLES]


def resampled_cycles(tables: Sequence[FloatArray], seed: int) -> FloatArray:
    """[RESAMPLES, tables, COLUMNS] the mean cycles when prompts are drawn anew, the same ones for all tables."""
    size = len(tables[0])
    generator = np.random.default_rng(seed)
    weights = generator.multinomial(size, np.full(size, 1.0 / size), size=RESAMPLES).astype(np.float64)  # [R, n]
    totals = np.stack([weights @ table for table in tables], axis=1)
    cycles: FloatArray = totals / totals[..., CYCLES : CYCLES + 1]
    return cycles


def mixed(constants: FloatArray, length: float) -> FloatArray:
    """[COLUMNS] the mean cycle of drafting so many tokens, from constants [m, COLUMNS] of growing lengths.

    Between two constants it is the mean cycle of taking now the one, now the other, as often as gives the length: all
    columns are linear in that share.
    """
    lengths = constants[:, DRAFTED]
    return np.array([np.interp(length, lengths, constants[:, column]) for column in range(COLUMNS)])
