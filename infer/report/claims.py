"""The papers' claims: measures each as claims.yaml says, with a 95 % interval over prompts and a verdict."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import ceil
from pathlib import Path
from typing import Any, NamedTuple
from warnings import catch_warnings

import numpy as np
import pandas as pd
from scipy import stats

from aerie.configs.errors import UserError
from aerie.configs.read import adapter, read_yaml
from aerie.infer.measure.record import FloatArray, Record
from aerie.infer.measure.statistics import RESAMPLES, group, grouped
from aerie.infer.report.tables import PAPERS, TASKS, rule_of
from aerie.model.storage import read_json

REGISTER = read_yaml(Path(__file__).with_name("claims.yaml"))[0]
CLAIMS = [
    {"paper": paper, **claim} for paper, claims in REGISTER["claims"].items() for claim in claims
]
MANY = 100_000  # prompts; beyond them no number of prompts is given
FEWEST = 6  # prompts that settle anything: five on one side are chance once in 16, more than 5 %
BATCH = 250  # resamples that are in memory at once
LEAST, PLACES = 10, 12  # nodes of a point, and points of a tree, in the pictures
Entry = Mapping[str, Any]
Sums = FloatArray  # [..., m] sums over prompts of a figure's columns


class Calibration(NamedTuple):
    """The tables of one `aerie calibrate`."""

    head: str
    method: str
    temperature: float
    tables: Mapping[str, pd.DataFrame]

    @classmethod
    def read(cls, directory: Path) -> "Calibration":
        tables = {path.stem: pd.read_parquet(path) for path in directory.glob("*.parquet")}
        laws = (
            tables["laws"]
            .groupby(["prompt", "cycle"])
            .tvd.agg(judged="size", distance="sum")
            .reset_index()
        )
        tables["cycles"] = tables["cycles"].merge(
            laws, on=["prompt", "cycle"]
        )  # for the expected length
        about = read_json(directory / "analysis.json")
        return cls(
            about.get("head") or "draft", about.get("method") or "", about["temperature"], tables
        )


@dataclass(frozen=True)
class Measured:
    """What a run measured, to judge claims by."""

    records: Sequence[Record]
    tuning: Mapping[str, Any] | None = None
    calibrations: Sequence[Calibration] = ()

    @cached_property
    def rows(self) -> list[list[Record]]:
        """The rows in the suite's order, without those with a failed answer, or with top-k or top-p."""
        plain = (record for record in self.records if record.sampling[1:] == (0, 1.0))
        return [[*members.records] for members in group(plain) if not members.failed]


class Estimate(NamedTuple):
    value: float
    low: float
    high: float
    prompts: int


class Side(NamedTuple):
    """A figure of sums, and their table, a line per prompt."""

    table: pd.DataFrame
    figure: Callable[[Sums], FloatArray]


def estimate(sides: Sequence[Side], claim: Entry, seed: int = 0) -> Estimate | None:
    """The figure of one side, or the difference or ratio of two, on the prompts of both; a bootstrap over prompts."""
    prompts, is_ratio = (
        sides[0].table.index.intersection(sides[-1].table.index),
        claim.get("as") == "ratio",
    )
    tables = [side.table.loc[prompts].to_numpy(dtype=np.float64) for side in sides]

    def of(drawn: Any, axis: int = -1) -> Any:  # [..., n] numbers of prompts
        with np.errstate(all="ignore"):
            values = [
                side.figure(table[drawn].sum(-2)) for side, table in zip(sides, tables, strict=True)
            ]
            return (
                values[0]
                if len(values) < 2
                else values[0] / values[1]
                if is_ratio
                else values[0] - values[1]
            )

    numbers, known = (
        np.arange(len(prompts)),
        min(int((table != 0).any(-1).sum()) for table in tables),
    )
    value = float(of(numbers)) if known else np.nan
    if not np.isfinite(value):
        return None
    if known < 2:  # known: prompts with data
        return Estimate(value, -np.inf, np.inf, known)
    if claim.get("statistic") == "share" and value in (
        0,
        1,
    ):  # alike on all prompts: Clopper and Pearson's interval
        low, high = stats.binomtest(round(value * known), known).proportion_ci()
        return Estimate(value, low, high, known)
    settings: dict[str, Any] = {"n_resamples": RESAMPLES, "batch": BATCH, "method": "percentile"}
    with catch_warnings(action="ignore"):  # about resamples with no figure, or an infinite one
        found = stats.bootstrap(
            (numbers,), of, vectorized=True, rng=np.random.default_rng(seed), **settings
        )
        low, high = np.nanpercentile(found.bootstrap_distribution, [2.5, 97.5])
    return Estimate(value, float(low), float(high), known)


def tau_difference(
    records: Sequence[Record], of: Sequence[int], against: Sequence[int], seed: int = 0
) -> str:
    """The difference of tau between two sets of rows (numbers of bench.rows), each pooled, paired by prompt."""
    if len({record.sampling for record in records}) > 1:
        found = sorted({record.temperature for record in records})
        raise UserError(f"the bench has several samplings; choose one with --temperature: {found}")
    prompts = {record.prompt for record in records if record.row in (*of, *against)}
    good = [record for record in records if record.status == "ok"]
    for row in (*of, *against):
        if not prompts or {record.prompt for record in good if record.row == row} != prompts:
            raise UserError(
                f"row {row} of bench.rows (from 0) lacks answers; measure every prompt in all"
            )
    sides = [
        of_row([record for record in good if record.row in rows], "tau", None)
        for rows in (of, against)
    ]
    if (apart := estimate(sides, {}, seed)) is None:
        raise UserError("no answer has a cycle in both: all ended with their first token")
    one, two = (float(side.figure(side.table.sum().to_numpy())) for side in sides)
    how = f"95 %, paired bootstrap over {apart.prompts} prompts"
    return f"tau {one:.3f} against {two:.3f}: {apart.value:+.3f} [{apart.low:+.3f}, {apart.high:+.3f}] ({how})"


def mean(sums: Sums) -> FloatArray:  # of x: the columns are 1, x
    return sums[..., 1] / sums[..., 0]


def variance(sums: Sums) -> FloatArray:  # 1, x, x^2
    return sums[..., 2] / sums[..., 0] - mean(sums) ** 2


def correlation(sums: Sums) -> FloatArray:  # 1, x, y, x^2, xy, y^2
    count, x, y, xx, xy, yy = np.moveaxis(sums, -1, 0)
    return (xy / count - x * y / count**2) / np.sqrt(
        (xx / count - (x / count) ** 2) * (yy / count - (y / count) ** 2)
    )


def fitted(sums: Sums, law: str) -> FloatArray:  # 1, x, y, x < y, x^2
    """By how much SVIP's equation 14 (normal) or 9 (gamma), fitted by moments, misses the share of x below y."""
    count, x, y, below, xx = np.moveaxis(sums, -1, 0)
    mu, spread, limit = x / count, xx / count - (x / count) ** 2, y / count
    of_gamma = stats.gamma.cdf(limit, mu**2 / spread, scale=spread / mu)
    return (
        stats.norm.cdf(limit, mu, np.sqrt(spread)) if law == "normal" else of_gamma
    ) - below / count


def expected_length(sums: Sums) -> FloatArray:
    """Tokens a cycle, counted minus computed: (1 - alpha^(g + 1)) / (1 - alpha) (Leviathan et al.), alpha = 1 - TV."""
    count, kept, levels, judged, distance = np.moveaxis(sums, -1, 0)
    alpha = 1 - distance / judged
    return kept / count + 1 - (1 - alpha ** (levels / count + 1)) / (1 - alpha)


def by_group(sums: Sums) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Counts, means of x and of y of groups; the columns are all groups' counts, then their x, then their y."""
    count, x, y = np.moveaxis(sums.reshape(*sums.shape[:-1], 3, -1), -2, 0)
    return count, x / count, y / count


def calibration_error(sums: Sums) -> FloatArray:
    count, x, y = by_group(sums)
    return np.nansum(count * np.abs(x - y), -1) / count.sum(-1)


def growth(sums: Sums) -> FloatArray:
    """The power of y with which x grows: the slope of log mean x over log y."""
    _, x, y = by_group(sums)
    log_x, log_y = np.log(x), np.log(y)
    apart = log_y - np.nanmean(log_y, -1, keepdims=True)
    return np.nansum(apart * log_x, -1) / np.nansum(apart**2, -1)


# name -> figure, and the columns of each line of a table beside its count
STATISTICS: dict[str, tuple[Callable[[Sums], FloatArray], Callable[..., list[Any]]]] = {
    "mean": (mean, lambda x: [x]),
    "share": (mean, lambda x: [x]),
    "variance": (variance, lambda x: [x, x * x]),
    "correlation": (correlation, lambda x, y: [x, y, x * x, x * y, y * y]),
    "normal": (partial(fitted, law="normal"), lambda x, y: [x, y, x < y, x * x]),
    "gamma": (partial(fitted, law="gamma"), lambda x, y: [x, y, x < y, x * x]),
    "expected_length": (expected_length, lambda *columns: [*columns]),
    "calibration_error": (calibration_error, lambda x, y: [x, y]),
    "growth": (growth, lambda x, y: [x, y]),
}


def of_table(table: pd.DataFrame, entry: Entry) -> Side:
    """A side of a table. Of entry: `value`, one expression of the columns or several; `where`, lines; `by`, groups."""
    figure, columns_of = STATISTICS[entry.get("statistic", "mean")]
    chosen = table.query(entry["where"]) if "where" in entry else table
    expressions = map(chosen.eval, np.atleast_1d(entry["value"]))
    values = [
        np.broadcast_to(np.asarray(value, dtype=np.float64), len(chosen)) for value in expressions
    ]
    known, every = np.isfinite(np.stack(values)).all(0), table.prompt.unique()
    columns = [np.ones(known.sum()), *columns_of(*(value[known] for value in values))]
    groups = [
        chosen.prompt[known].to_numpy(),
        *([chosen.eval(entry["by"])[known].to_numpy()] if "by" in entry else []),
    ]
    sums = pd.DataFrame(np.stack(columns, -1)).groupby(groups).sum()
    sums = sums.unstack(fill_value=0.0) if "by" in entry else sums
    return Side(sums.reindex(every, fill_value=0.0), figure)


# (denominator, numerator) of an answer; a row's figure is a ratio of their sums
FIGURES: dict[str, Callable[[Record, Mapping[str, Any] | None], tuple[float | None, float]]] = {
    "tau": lambda one, _: (one.target_forwards, one.new_tokens - 1),
    "wasted": lambda one, _: (1, one.draft_forwards_wasted),
    "accept_rate": lambda one, _: (one.draft_nodes, sum(one.accepted)),
    "length": lambda one, _: (one.target_forwards, one.draft_nodes),  # drafted tokens a cycle
    "modelled": lambda one, tuning: (modelled_ms([one], tuning), one.new_tokens - 1),
    # greedy answers that are vanilla's; a margin of up to 1 is rounding, and no difference
    "identical": lambda one, _: (
        one.identical is not None,
        one.identical or (one.margin is not None and one.margin <= 1),
    ),
}


def of_row(row: Sequence[Record], figure: str, tuning: Mapping[str, Any] | None) -> Side:
    sums = pd.DataFrame([FIGURES[figure](one, tuning) for one in row], dtype=np.float64)
    return Side(sums.groupby(pd.Series([one.prompt for one in row])).sum(min_count=1), mean)


def modelled_ms(answers: Sequence[Record], tuning: Mapping[str, Any] | None) -> float | None:
    """Milliseconds of a row's cycles, at the costs that `tune` measured for its kind of head."""
    heads, tree = tuning["heads"] if tuning else (), answers[0].tree
    costs = next((head["costs_ms"] for head in heads if head["kind"] == answers[0].head), None)
    if costs is None or tree is None:
        return None
    from aerie.infer.measure.replay import counted
    from aerie.infer.measure.tune import Costs

    total, nodes = counted(answers)
    return float(
        adapter(Costs).validate_python(costs).price(total, tree.k, nodes)
    )  # JSON's keys are texts


def candidates(run: Measured, wanted: Entry, temperature: float) -> dict[str, list[list[Record]]]:
    """The rows that fit `wanted`, by head."""
    found: dict[str, list[list[Record]]] = {}
    asked = {
        "calibrated": None,
        "is_drawn": False,
        "temperature": temperature,
        **wanted,
    }  # the papers draw no trees
    paths = grouped(
        {(one.head, one.head_path) for one in run.records if one.head_path}, lambda pair: pair[0]
    )
    for row in run.rows:
        first, tree = row[0], row[0].tree
        facts = {"calibrated": None, "temperature": first.temperature, "method": first.method}
        facts |= {} if tree is None else {**tree.as_dict(), "rule": rule_of(tree)}
        facts["is_drawn"] = (facts.get("shape"), facts.get("children")) == ("dynamic", "sampled")
        if all(
            _fits(facts.get(key), value)
            for key, value in asked.items()
            if key not in ("pick", "head")
        ):
            name = f"{first.head} head{f' {first.head_path}' if len(paths.get(first.head, ())) > 1 else ''}"
            found.setdefault("any" if wanted.get("head") == "any" else name, []).append(row)
    return found


def _fits(fact: Any, wanted: Any) -> bool:
    if isinstance(wanted, dict):
        return isinstance(fact, dict) and all(
            _fits(fact.get(key), value) for key, value in wanted.items()
        )
    return fact == wanted or (
        isinstance(wanted, list) and (fact in wanted or fact == tuple(wanted))
    )


def sizes(row: Sequence[Record], names: Sequence[str] = ("levels",)) -> list[int]:
    return [getattr(row[0].tree, name, 0) for name in names]


def by_depth(rows: Sequence[list[Record]]) -> list[list[Record]]:
    """The rows whose tree differs from another's in depth alone, the deepest first."""
    alike = grouped(
        rows, lambda row: row[0].tree and str(replace(row[0].tree, levels=0, variant=""))
    )
    several = [
        row
        for kin in alike.values()
        if any(sizes(row) != sizes(kin[0]) for row in kin)
        for row in kin
    ]
    return sorted(several, key=sizes, reverse=True)


def by_rows(run: Measured, claim: Entry, temperature: float) -> dict[str, Estimate]:
    figure, same, found = claim["figure"], claim.get("same", ()), dict[str, Estimate]()
    against = claim.get("against") or {}
    others = candidates(run, against, temperature) if against else {}
    for head, rows in candidates(run, claim["of"], temperature).items():
        for row in (by_depth(rows) if claim["of"].get("pick") == "deepest" else rows)[:1]:
            rivals = [
                other for other in others.get(head, others.get("any", [])) if other is not row
            ]
            measured = [
                of_row(o, figure, run.tuning) for o in rivals if sizes(o, same) == sizes(row, same)
            ]
            sides = [of_row(row, figure, run.tuning)]
            sides += (
                [best_of(measured if against.get("pick") == "best" else measured[:1])]
                if measured
                else []
            )
            if (measured or not against) and (one := estimate(sides, claim)):
                found[head] = one
    return found


def best_of(rows: Sequence[Side]) -> Side:
    """The highest of some rows' figures, on the prompts that all have; each resample picks its own."""

    def highest(sums: Sums) -> FloatArray:
        values = mean(sums.reshape(*sums.shape[:-1], -1, 2))
        return np.fmax.reduce(np.where(np.isfinite(values), values, np.nan), axis=-1)

    return Side(pd.concat([row.table for row in rows], axis=1, join="inner"), highest)


def tables_of(run: Measured, entry: Entry, temperature: float) -> dict[str, pd.DataFrame]:
    """By head, the table that entry names, of the first calibration that fits."""
    meant = (
        one
        for one in run.calibrations
        if one.temperature == temperature and one.method in entry["method"]
    )
    by_head = grouped((one for one in meant if entry["table"] in one.tables), lambda one: one.head)
    return {head: first.tables[entry["table"]] for head, (first, *_) in by_head.items()}


def by_tables(run: Measured, claim: Entry, temperature: float) -> dict[str, Estimate]:
    """Estimates by head; a side may name its own."""
    found, tables = dict[str, Estimate](), tables_of(run, claim, temperature)
    shared = {name: claim[name] for name in ("statistic", "by", "where") if name in claim}
    entries = [{**shared, **entry} for entry in (claim["of"], claim.get("against")) if entry]
    for head in tables:
        heads = [entry.get("head", head) for entry in entries]
        if heads[0] == head and tables.keys() >= {*heads}:
            with suppress(pd.errors.UndefinedVariableError):  # calibrated without oracle lengths
                sides = [
                    of_table(tables[name], entry)
                    for name, entry in zip(heads, entries, strict=True)
                ]
                if measured := estimate(sides, claim):
                    found[f"{head} head"] = measured
    return found


def judged(claim: Entry, one: Estimate) -> tuple[str, str, int | None]:
    """Verdict, a sentence why, and the prompts whose interval settles it; the rules are those of claims.yaml."""
    low, high, effect = (
        claim.get("at_least", -np.inf),
        claim.get("at_most", np.inf),
        claim.get("effect", 0.0),
    )
    is_share, is_inside = claim.get("statistic") == "share", low <= one.value <= high
    if is_share and (low == 1 or high == 0):
        if not is_inside:
            return "does not hold", "One counterexample is enough.", None
        if one.prompts > 1:
            return "holds", f"No counterexample on {one.prompts} prompts.", None
    if one.prompts < FEWEST:
        return "open", f"Too few prompts: a verdict takes {FEWEST} at least.", FEWEST
    margin = np.float64(effect / 2 or min(abs(one.value - low), abs(one.value - high)))
    with np.errstate(all="ignore"):
        enough = one.prompts * ((one.high - one.low) / 2 / margin) ** 2
        if is_share and one.value in (0, 1):
            enough = np.log(0.025) / np.log1p(
                -margin
            )  # the exact interval ends at 0.025 ** (1 / prompts)
    needed = max(FEWEST, ceil(enough)) if enough < MANY else None
    sides = [(low, f"at least {low:g}"), (high, f"at most {high:g}")]
    within = " and ".join(text for limit, text in sides if np.isfinite(limit))
    if (one.low > low and one.high < high) or (not effect and one.low >= low and one.high <= high):
        return "holds", f"The whole interval is {within}.", needed
    if one.high < low or one.low > high:
        return "does not hold", f"No part of the interval is {within}.", needed
    if one.high < low + effect or one.low > high - effect:
        return (
            "does not hold",
            f"The interval ends less than {effect:g} beyond the limit, too little to count.",
            needed,
        )
    settles = (
        f"{needed:,} prompts would settle it"
        if needed
        else f"more than {MANY:,} prompts would settle it"
    )
    return "open", f"Too few prompts: the interval is partly {within}; {settles}.", needed


def judge(run: Measured) -> list[dict[str, Any]]:
    """A line for each claim, head and temperature, as details.json has it."""
    lines = []
    for number, claim in enumerate(CLAIMS, start=1):
        about = {name: claim[name] for name in ("id", "paper", "place", "claim")}
        empty = dict.fromkeys(
            ("head", "temperature", "value", "low", "high", "prompts", "ours", "prompts_needed")
        )
        for temperature in claim.get("temperatures", [0]):
            told = claim.get("published", "")
            told = told if isinstance(told, str) else published(told, temperature, claim.get("as"))
            line = {"number": number, **about, **empty, "published": told}
            if "out_of_reach" in claim:
                lines.append({**line, "verdict": "out of reach", "why": claim["out_of_reach"]})
                continue
            line["temperature"] = temperature
            found = (by_tables if "table" in claim else by_rows)(run, claim, temperature)
            for head, one in found.items():
                verdict, why, needed = judged(claim, one)
                form = claim.get(
                    "form",
                    "{:+.2f}" if claim.get("as", "") == "" and "against" in claim else "{:.2f}",
                )
                between = f"{form.format(one.low)} to {form.format(one.high)}"
                if not 0 < one.high - one.low < np.inf:  # all resamples agree
                    between = (
                        "one prompt" if one.prompts < 2 else f"alike on all {one.prompts} prompts"
                    )
                figures = {
                    name: number if np.isfinite(number) else None
                    for name, number in one._asdict().items()
                }
                figures |= {
                    "ours": f"{form.format(one.value)} [{between}] {claim.get('unit', '')}",
                    "head": head,
                }
                lines.append(
                    {**line, **figures, "prompts_needed": needed, "verdict": verdict, "why": why}
                )
            if not found:
                lines.append({**line, "verdict": "open", "why": f"Not measured: {claim['needs']}."})
    return lines


def published(figures: Entry, temperature: float, how: str | None = None) -> str:
    """The range of published.csv's figures of method `of` against another's, as differences or ratios."""
    about = [name for name in PAPERS[0] if name not in TASKS]
    table = pd.DataFrame(PAPERS).melt(about, var_name="task", value_name="cell")
    table["cell"] = pd.to_numeric(table.cell.str.split("/").str[int(figures["figure"] == "tau")])
    meant = table.source.str.startswith(figures["source"]) & (
        table.temperature.astype(float) == temperature
    )
    meant &= table["value"] == str(figures["value"]) if "value" in figures else True
    sides = table[meant].pivot_table("cell", ["model", "key", "value", "task"], "method", "last")
    one, other = sides.reindex(columns=[figures["of"], figures["against"]]).dropna().to_numpy().T
    values, form = (one / other, "{:.2f}") if how == "ratio" else (one - other, "{:+.2f}")
    return (
        f"{form.format(min(values))} to {form.format(max(values))} ({len(values)} figures)"
        if len(values)
        else ""
    )


def drawn(run: Measured) -> dict[str, dict[str, Any]]:
    """The register's pictures that the run has points for: lines of [x, value, low, high] beside the published ones."""
    pictures = {}
    for name, picture in REGISTER["pictures"].items():
        rows = [candidates(run, entry["of"], 0) for entry in picture["lines"] if "of" in entry]
        prompts = [
            {one.prompt for one in row}
            for found in rows
            for of_head in found.values()
            for row in of_head
        ]
        shared, lines = set.intersection(*prompts) if prompts else set(), []
        for entry in picture["lines"]:
            made = (
                _sides_of_tables(run, entry)
                if "table" in entry
                else _sides_of_rows(run, entry, shared)
            )
            for head, sides in made.items():
                along = [(x, estimate([side], entry)) for x, side in sides]
                points = [
                    [x, one.value, one.low, one.high]
                    for x, one in along
                    if one and np.isfinite(one.low)
                ]
                lines += (
                    [{"label": f"{entry['label']}, {head}", "points": points}] if points else []
                )
        if lines:
            pictures[name] = {"published": {}, **picture, "lines": lines}
    return pictures


def _sides_of_rows(
    run: Measured, entry: Entry, prompts: set[Any]
) -> dict[str, list[tuple[Any, Side]]]:
    """By head, (x, side) of each row, both of these prompts alone."""
    found = {}
    for head, whole in candidates(run, entry["of"], 0).items() if prompts else ():
        rows = [[one for one in row if one.prompt in prompts] for row in whole]
        lengths = [float(mean(of_row(row, "length", None).table.sum().to_numpy())) for row in rows]
        places = lengths if entry["x"] == "length" else [sizes(row)[0] for row in rows]
        sides = [of_row(row, entry["figure"], run.tuning) for row in rows]
        found[head] = sorted(zip(places, sides, strict=True), key=lambda pair: pair[0])
    return found


def _sides_of_tables(run: Measured, entry: Entry) -> dict[str, list[tuple[Any, Side]]]:
    found = {}
    for head, table in tables_of(run, entry, 0).items():
        groups = [
            (x, part) for x, part in table.groupby(table.eval(entry["x"])) if len(part) >= LEAST
        ]
        if entry["x"] == "place":  # the most visited ones, from the root down
            groups = sorted(groups, key=lambda pair: -len(pair[1]))[:PLACES]
            groups.sort(key=lambda pair: (pair[0].count("."), pair[0]))
        found[f"{head} head"] = [(x, of_table(part, entry)) for x, part in groups]
    return found


def markdown(lines: Sequence[Mapping[str, Any]]) -> str:
    """A table, one line a claim."""
    text = (
        "| claim | published | here [95 %] | prompts | verdict | why |\n|---|---|---|---|---|---|\n"
    )
    for line in lines:
        ours = f"{line['ours']} ({line['head']}, T {line['temperature']:g})" if line["ours"] else ""
        cells = [
            f"{line['number']}. {line['claim']} ({line['paper']}, {line['place']})",
            line["published"],
            ours,
        ]
        cells += [str(line["prompts"] or ""), f"**{line['verdict']}**", line["why"]]
        text += f"| {' | '.join(cell.replace('|', '/') or '–' for cell in cells)} |\n"
    return text


def tenth(lines: Sequence[Mapping[str, Any]]) -> str:
    """How many prompts an interval of +-0.1 tau needs: the most over the claims whose effect is 0.2 tau."""
    about_tau = [
        one["id"] for one in CLAIMS if (one.get("figure"), one.get("effect")) == ("tau", 0.2)
    ]
    needed = sorted(
        one["prompts_needed"] for one in lines if one["id"] in about_tau and one["prompts_needed"]
    )
    words = "An interval of ±0.1 tau needs {:,} prompts here by the widest of {} differences, {:,} by the median one."
    return words.format(needed[-1], len(needed), needed[len(needed) // 2]) if needed else ""
