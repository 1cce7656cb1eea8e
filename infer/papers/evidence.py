"""Which answers and laws of a run an entry of claims.yaml means, and their figures."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from scipy import stats

from aerie.configs.read import adapter
from aerie.infer.measure.bench_files import Record, read_records
from aerie.infer.measure.bootstrap import (
    Estimate,
    Side,
    Sums,
    estimate,
    ratio_of_sums,
    side_of_answers,
    tau_columns,
)
from aerie.infer.measure.prices import Costs
from aerie.infer.measure.replay import count_cycles
from aerie.infer.measure.stage_facts import calibrations_of
from aerie.infer.measure.statistics import FloatArray, group, grouped
from aerie.infer.measure.tree_shape import TreeShape
from aerie.model.storage import read_json

Entry = Mapping[str, Any]  # of claims.yaml: a claim, one of its sides, or a line of a picture
Tuning = Mapping[str, Any]  # tune.json
Answers = Sequence[Record]  # of one row at one sampling


class CalibrationTables(NamedTuple):
    """The tables of one `aerie calibrate`."""

    head: str  # its kind
    method: str
    temperature: float
    tables: Mapping[str, pd.DataFrame]

    @classmethod
    def read(cls, directory: Path) -> "CalibrationTables":
        tables = {path.stem: pd.read_parquet(path) for path in directory.glob("*.parquet")}
        # a cycle's expected length is computed from how many laws it judged, and their distances
        keys = ["prompt", "cycle"]
        by_cycle = tables["laws"].groupby(keys).tvd.agg(judged="size", distance="sum")
        tables["cycles"] = tables["cycles"].merge(by_cycle.reset_index(), on=keys)
        about = read_json(directory / "analysis.json")
        head = about.get("head") or "draft"
        return cls(head, about.get("method") or "", about["temperature"], tables)


@dataclass(frozen=True)
class Evidence:
    """What claims are judged by."""

    records: Answers
    tuning: Tuning | None = None
    calibrations: Sequence[CalibrationTables] = ()

    @classmethod
    def read(cls, run: Path) -> "Evidence":
        tuning = run / "tune" / "tune.json"
        return cls(
            read_records(run / "bench" / "records.jsonl"),
            read_json(tuning) if tuning.is_file() else None,
            [CalibrationTables.read(path) for path in calibrations_of(run)],
        )

    @cached_property
    def rows(self) -> list[Answers]:
        """The rows in the suite's order, but those with a failed answer, top-k or top-p."""
        plain = [record for record in self.records if (record.top_k, record.top_p) == (0, 1.0)]
        return [members.records for members in group(plain) if not members.failed]


# --- figures of answers ---


def modelled_columns(tuning: Tuning | None, answer: Record) -> tuple[float | None, float]:
    return modelled_ms([answer], tuning), answer.new_tokens - 1


def modelled_ms(answers: Answers, tuning: Tuning | None) -> float | None:
    """Milliseconds of a row's cycles, at the costs that `tune` measured for its kind of head."""
    costs = {head["kind"]: head["costs_ms"] for head in tuning["heads"]} if tuning else {}
    first = answers[0]
    if first.head not in costs or first.tree is None:
        return None
    # validated, for the keys of JSON are texts
    prices = adapter(Costs).validate_python(costs[first.head])
    return float(prices.price(count_cycles(answers), first.tree.k))


def identical_columns(answer: Record) -> tuple[float, float]:
    """Whether a greedy answer is vanilla's; a margin of up to 1 is rounding, no difference."""
    is_rounding = answer.margin is not None and answer.margin <= 1
    return answer.identical is not None, bool(answer.identical) or is_rounding


def figure_columns(name: str, tuning: Tuning | None) -> Callable[[Record], Any]:
    """(denominator, numerator) of an answer; a row's figure is the ratio of their sums."""
    columns: dict[str, Callable[[Record], Any]] = {
        "tau": tau_columns,
        "wasted": lambda answer: (1, answer.draft_forwards_wasted),
        "accept_rate": lambda answer: (answer.draft_nodes, sum(answer.accepted)),
        "length": lambda answer: (answer.target_forwards, answer.draft_nodes),  # drafted per cycle
        "modelled": partial(modelled_columns, tuning),  # tokens per modelled millisecond
        "identical": identical_columns,
    }
    return columns[name]


# --- which rows of the bench an entry means ---


def rows_by_head(evidence: Evidence, entry: Entry, temperature: float) -> dict[str, list[Answers]]:
    """The rows that fit the entry, by head; under 'any' where it takes any head."""
    # unless the entry says otherwise: the papers calibrate nothing, and draw no trees
    wanted = {"calibrated": None, "is_drawn": False, "temperature": temperature, **entry}
    wanted = {key: value for key, value in wanted.items() if key not in ("pick", "head")}
    heads = {(record.head, record.head_path) for record in evidence.records if record.head_path}
    paths = grouped(heads, lambda head: head[0])
    rows: dict[str, list[Answers]] = {}
    for answers in evidence.rows:
        first = answers[0]
        facts = row_facts(first)
        if all(_fits(facts.get(key), value) for key, value in wanted.items()):
            name = f"{first.head} head"
            if len(paths.get(first.head, ())) > 1:
                name += f" {first.head_path}"
            rows.setdefault("any" if entry.get("head") == "any" else name, []).append(answers)
    return rows


def row_facts(record: Record) -> dict[str, Any]:
    """What entries say of a row: its method, its tree's settings and the name of its rule."""
    facts = {"calibrated": None, "temperature": record.temperature, "method": record.method}
    if record.tree is not None:
        facts |= {**record.tree.as_dict(), "rule": stop_name(record.tree)}
    is_drawn = facts.get("shape") == "dynamic" and facts.get("children") == "sampled"
    return facts | {"is_drawn": is_drawn}


def stop_name(tree: TreeShape) -> str:
    """'fixed', 'vote' (of all three signals), fewer signals by name, or another rule."""
    stop = tree.settings.get("stop", {"rule": "constant"})
    if stop["rule"] == "vote" and len(stop["signals"]) < 3:
        return " and ".join(stop["signals"])
    return "fixed" if stop["rule"] == "constant" else str(stop["rule"])


def _fits(fact: Any, wanted: Any) -> bool:
    if isinstance(wanted, dict):  # settings of a stop rule
        return isinstance(fact, dict) and wanted.items() <= fact.items()
    return fact in wanted if isinstance(wanted, list) else fact == wanted


def tree_sizes(answers: Answers, names: Sequence[str] = ("levels",)) -> list[int]:
    return [getattr(answers[0].tree, name, 0) for name in names]


def deepest_first(rows: Sequence[Answers]) -> list[Answers]:
    """The rows whose tree differs from another's in depth alone."""

    def without_depth(answers: Answers) -> Any:
        tree = answers[0].tree
        return tree and repr(replace(tree, levels=0, variant=""))

    families = grouped(rows, without_depth).values()
    several = []
    for family in families:
        if any(tree_sizes(row) != tree_sizes(family[0]) for row in family):
            several += family
    return sorted(several, key=tree_sizes, reverse=True)


def highest_of(sides: Sequence[Side]) -> Side:
    """The highest of several ratios, on the prompts that all have; each resample picks its own."""

    def highest(sums: Sums) -> FloatArray:
        ratios = ratio_of_sums(sums.reshape(*sums.shape[:-1], -1, 2))  # [..., rows]
        return np.fmax.reduce(np.where(np.isfinite(ratios), ratios, np.nan), axis=-1)

    return Side(pd.concat([side.table for side in sides], axis=1, join="inner"), highest)


def estimates_by_rows(evidence: Evidence, claim: Entry, temperature: float) -> dict[str, Estimate]:
    """By head, the claim's figure of a row, or how much it differs from that of another."""
    columns = figure_columns(claim["figure"], evidence.tuning)
    against = claim.get("against")
    others = rows_by_head(evidence, against, temperature) if against else {}
    estimates = {}
    for head, rows in rows_by_head(evidence, claim["of"], temperature).items():
        if claim["of"].get("pick") == "deepest":
            rows = deepest_first(rows)
        if not rows:
            continue
        row = rows[0]
        sides = [side_of_answers(row, columns)]
        if against:
            shared = claim.get("same", ())
            rivals = []
            for rival in others.get(head, others.get("any", ())):
                if rival is not row and tree_sizes(rival, shared) == tree_sizes(row, shared):
                    rivals.append(side_of_answers(rival, columns))
            if not rivals:
                continue
            sides.append(highest_of(rivals) if against.get("pick") == "best" else rivals[0])
        if measured := estimate_of(claim, sides):
            estimates[head] = measured
    return estimates


def estimate_of(claim: Entry, sides: Sequence[Side]) -> Estimate | None:
    is_share = claim.get("statistic") == "share"
    return estimate(sides, is_ratio=claim.get("as") == "ratio", is_share=is_share)


# --- figures of the tables of `aerie calibrate` ---


def variance(sums: Sums) -> FloatArray:  # of x; the columns are 1, x, x^2
    return sums[..., 2] / sums[..., 0] - ratio_of_sums(sums) ** 2


def correlation(sums: Sums) -> FloatArray:  # 1, x, y, x^2, xy, y^2
    count, x, y, xx, xy, yy = np.moveaxis(sums, -1, 0)
    spreads = (xx / count - (x / count) ** 2) * (yy / count - (y / count) ** 2)
    return (xy / count - x * y / count**2) / np.sqrt(spreads)


def misfit(sums: Sums, is_normal: bool) -> FloatArray:  # 1, x, y, x < y, x^2
    """Share of x below y by a law that is fitted by moments, minus the counted share.

    SVIP's equations 14 (normal law) and 9 (gamma law).
    """
    count, x, y, below, xx = np.moveaxis(sums, -1, 0)
    mean = x / count
    spread = xx / count - mean**2
    limit = y / count
    if is_normal:
        share = stats.norm.cdf(limit, mean, np.sqrt(spread))
    else:
        share = stats.gamma.cdf(limit, mean**2 / spread, scale=spread / mean)
    return share - below / count


def expected_length(sums: Sums) -> FloatArray:
    """Tokens a cycle, counted minus computed from alpha = 1 - TV and g levels.

    Leviathan et al., equation 1: (1 - alpha^(g + 1)) / (1 - alpha).
    """
    count, accepted, levels, judged, distance = np.moveaxis(sums, -1, 0)
    alpha = 1 - distance / judged
    return accepted / count + 1 - (1 - alpha ** (levels / count + 1)) / (1 - alpha)


class GroupMeans(NamedTuple):
    """Of groups of a table's lines, each [..., groups]."""

    sizes: FloatArray
    x: FloatArray
    y: FloatArray

    @classmethod
    def of(cls, sums: Sums) -> "GroupMeans":
        """From columns that are all groups' counts, then their sums of x, then those of y."""
        count, x, y = np.moveaxis(sums.reshape(*sums.shape[:-1], 3, -1), -2, 0)
        return cls(count, x / count, y / count)


def calibration_error(sums: Sums) -> FloatArray:
    groups = GroupMeans.of(sums)
    gaps = groups.sizes * np.abs(groups.x - groups.y)
    return np.nansum(gaps, -1) / groups.sizes.sum(-1)


def growth(sums: Sums) -> FloatArray:
    """The power of y with which x grows: the slope of log mean x over log y."""
    groups = GroupMeans.of(sums)
    log_y = np.log(groups.y)
    centred = log_y - np.nanmean(log_y, -1, keepdims=True)
    return np.nansum(centred * np.log(groups.x), -1) / np.nansum(centred**2, -1)


class Statistic(NamedTuple):
    figure: Callable[[Sums], FloatArray]
    columns: Callable[..., list[Any]]  # what is summed over a table's lines, beside their count


FIT_COLUMNS = lambda x, y: [x, y, x < y, x * x]  # noqa: E731
STATISTICS = {
    "mean": Statistic(ratio_of_sums, lambda x: [x]),
    "share": Statistic(ratio_of_sums, lambda x: [x]),
    "variance": Statistic(variance, lambda x: [x, x * x]),
    "correlation": Statistic(correlation, lambda x, y: [x, y, x * x, x * y, y * y]),
    "normal": Statistic(partial(misfit, is_normal=True), FIT_COLUMNS),
    "gamma": Statistic(partial(misfit, is_normal=False), FIT_COLUMNS),
    "expected_length": Statistic(expected_length, lambda *values: [*values]),
    "calibration_error": Statistic(calibration_error, lambda x, y: [x, y]),
    "growth": Statistic(growth, lambda x, y: [x, y]),
}


def side_of_table(table: pd.DataFrame, entry: Entry) -> Side:
    """Of entry: `value`, one expression of the columns or several; `where`, lines; `by`, groups."""
    statistic = STATISTICS[entry.get("statistic", "mean")]
    prompts = table.prompt.unique()  # those without a chosen line count as zeros
    chosen = table.query(entry["where"]) if "where" in entry else table
    values = []
    for expression in np.atleast_1d(entry["value"]):
        value = np.asarray(chosen.eval(expression), dtype=np.float64)
        values.append(np.broadcast_to(value, len(chosen)))
    is_known = np.isfinite(np.stack(values)).all(0)
    columns = statistic.columns(*(value[is_known] for value in values))
    lines = pd.DataFrame(np.stack([np.ones(is_known.sum()), *columns], -1))
    by_prompt = chosen.prompt[is_known].to_numpy()
    if "by" in entry:
        groups = chosen.eval(entry["by"])[is_known].to_numpy()
        sums = lines.groupby([by_prompt, groups]).sum().unstack(fill_value=0.0)
    else:
        sums = lines.groupby(by_prompt).sum()
    return Side(sums.reindex(prompts, fill_value=0.0), statistic.figure)


def tables_by_head(evidence: Evidence, entry: Entry, temperature: float) -> dict[str, pd.DataFrame]:
    """The table that entry names, of each head's first calibration that fits."""
    tables: dict[str, pd.DataFrame] = {}
    for calibration in evidence.calibrations:
        is_meant = calibration.temperature == temperature and calibration.method in entry["method"]
        if is_meant and entry["table"] in calibration.tables:
            tables.setdefault(calibration.head, calibration.tables[entry["table"]])
    return tables


def estimates_by_tables(
    evidence: Evidence, claim: Entry, temperature: float
) -> dict[str, Estimate]:
    """By head, the claim's figure of a table; a side may name a head of its own."""
    tables = tables_by_head(evidence, claim, temperature)
    shared = {name: claim[name] for name in ("statistic", "by", "where") if name in claim}
    entries = [{**shared, **claim[side]} for side in ("of", "against") if side in claim]
    estimates = {}
    for head in tables:
        heads = [entry.get("head", head) for entry in entries]
        if heads[0] == head and tables.keys() >= {*heads}:
            with suppress(pd.errors.UndefinedVariableError):  # calibrated without oracle lengths
                sides = [
                    side_of_table(tables[name], entry)
                    for name, entry in zip(heads, entries, strict=True)
                ]
                if measured := estimate_of(claim, sides):
                    estimates[f"{head} head"] = measured
    return estimates
