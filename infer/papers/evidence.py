"""Finds the answers and laws of a run that an entry of claims.yaml means, and their figures."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import combinations_with_replacement
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats

from aerie.configs.read import adapter
from aerie.infer.measure.bench_files import Record, read_records
from aerie.infer.measure.bootstrap import Estimate, PromptSums, Side, estimate
from aerie.infer.measure.prices import Costs
from aerie.infer.measure.replay import count_cycles
from aerie.infer.measure.stage_facts import calibrations_of
from aerie.infer.measure.statistics import FloatArray, group
from aerie.model.storage import read_json

Entry = Mapping[str, Any]  # in claims.yaml: a claim, one of its sides, or a line of a picture
# figures of answers -> a statistic of the columns that `answer_line` writes
FIGURES: dict[str, Entry] = {
    "tau": {"statistic": "ratio", "value": ["forwards", "tokens"]},
    "length": {"statistic": "ratio", "value": ["forwards", "drafted"]},  # drafted tokens per cycle
    "accept_rate": {"statistic": "ratio", "value": ["drafted", "accepted"]},
    "modelled": {"statistic": "ratio", "value": ["modelled_ms", "tokens"]},
    "wasted": {"statistic": "mean", "value": "wasted"},
    "identical": {"statistic": "mean", "value": "identical"},
}
# An entry means such rows by default, because the papers calibrate nothing and draw no trees.
UNLESS_SAID = {"calibrated": "no", "is_drawn": False}


@dataclass(frozen=True)
class CalibrationTables:
    """The tables of one `aerie calibrate`."""

    head: str  # the kind of head
    method: str
    temperature: float
    tables: Mapping[str, pd.DataFrame]

    @classmethod
    def read(cls, directory: Path) -> "CalibrationTables":
        tables = {path.stem: pd.read_parquet(path) for path in directory.glob("*.parquet")}
        # expected_length needs each cycle's number of judged laws and the sum of their TV
        keys = ["prompt", "cycle"]
        by_cycle = tables["laws"].groupby(keys).tvd.agg(judged="size", distance="sum")
        tables["cycles"] = tables["cycles"].merge(by_cycle.reset_index(), on=keys)
        about = read_json(directory / "analysis.json")
        head = about.get("head") or "draft"
        return cls(head, about.get("method") or "", about["temperature"], tables)


@dataclass(frozen=True)
class Evidence:
    """The measurements by which claims are judged."""

    records: Sequence[Record]
    costs: Mapping[str, Costs] = field(default_factory=dict)  # by kind of head, from `tune`
    calibrations: Sequence[CalibrationTables] = ()

    @classmethod
    def read(cls, run: Path) -> "Evidence":
        tuning = run / "tune" / "tune.json"
        return cls(
            read_records(run / "bench" / "records.jsonl"),
            read_costs(read_json(tuning)) if tuning.is_file() else {},
            [CalibrationTables.read(path) for path in calibrations_of(run)],
        )

    @cached_property
    def answers(self) -> pd.DataFrame:
        """A line for each answer, except those of rows with a failed answer, top-k or top-p."""
        plain = [record for record in self.records if (record.top_k, record.top_p) == (0, 1.0)]
        lines = []
        for members in group(plain):
            if not members.failed:
                lines += [answer_line(answer, self.costs) for answer in members.records]
        table = pd.DataFrame(lines)
        if lines:
            paths = table.path.replace("", np.nan).groupby(table.kind)
            table.path = table.path.where(paths.transform("nunique") > 1, "")
            table["label"] = (table.kind + " head " + table.path).str.rstrip()
        return table


def read_costs(tuning: Mapping[str, Any]) -> dict[str, Costs]:
    """The costs in tune.json by kind of head; validation turns JSON's keys into numbers."""
    heads = tuning["heads"]
    return {head["kind"]: adapter(Costs).validate_python(head["costs_ms"]) for head in heads}


def answer_line(answer: Record, costs: Mapping[str, Costs]) -> dict[str, Any]:
    """The columns of an answer: its row's settings, and counts for figures (NaN: unknown)."""
    tree = answer.tree.as_dict() if answer.tree else {}
    stop = tree.get("stop", {"rule": "constant"})
    is_rounding = answer.margin is not None and answer.margin <= 1
    family = answer.tree and replace(answer.tree, levels=0, variant="")
    return {
        "row": answer.row,
        "kind": str(answer.head),
        "path": answer.head_path or "",
        "method": answer.method,
        "temperature": answer.temperature,
        "rule": stop_name(stop),
        "is_drawn": (tree.get("shape"), tree.get("children")) == ("dynamic", "sampled"),
        "family": repr(family),  # equal for trees that differ in depth alone
        **{name: tree.get(name) for name in ("shape", "rank", "rerank")},
        **{name: tree.get(name, 0) for name in ("levels", "k", "nodes")},
        **{name: stop.get(name) for name in ("h", "bonus")},
        "calibrated": tree.get("calibrated") or "no",
        "prompt": repr(answer.prompt),
        "forwards": answer.target_forwards or np.nan,
        "tokens": answer.new_tokens - 1,
        "wasted": answer.draft_forwards_wasted,
        "drafted": answer.draft_nodes,
        "accepted": sum(answer.accepted),
        "modelled_ms": modelled_ms([answer], costs),
        # Rounding explains a margin of up to 1, so this is no difference.
        "identical": None if answer.identical is None else answer.identical or is_rounding,
    }


def stop_name(stop: Mapping[str, Any]) -> str:
    """'fixed', 'vote' (with all three signals), the names of fewer signals, or another rule."""
    if stop["rule"] == "vote" and len(stop["signals"]) < 3:
        return " and ".join(stop["signals"])
    return "fixed" if stop["rule"] == "constant" else str(stop["rule"])


def modelled_ms(answers: Sequence[Record], costs: Mapping[str, Costs]) -> float | None:
    """Milliseconds of a row's cycles at the costs of its kind of head; None if tune has none."""
    tree = answers[0].tree
    head_costs = costs.get(answers[0].head or "")
    if head_costs is None or tree is None:
        return None
    return float(head_costs.price(count_cycles(answers), tree.k))


# --- figures of tables ---
# Sums over a table's lines give a figure: the sum of 1, of the columns x, y, ..., and of their
# products x^2, xy, ..., y^2, ...


def ratio(sums: PromptSums) -> FloatArray:
    """The ratio of y to x."""
    return sums[..., 2] / sums[..., 1]


def mean(sums: PromptSums) -> FloatArray:
    return sums[..., 1] / sums[..., 0]


def variance(sums: PromptSums) -> FloatArray:
    return sums[..., 2] / sums[..., 0] - mean(sums) ** 2


def correlation(sums: PromptSums) -> FloatArray:
    count, x, y, xx, xy, yy = np.moveaxis(sums, -1, 0)
    spreads = (xx / count - (x / count) ** 2) * (yy / count - (y / count) ** 2)
    return (xy / count - x * y / count**2) / np.sqrt(spreads)


def misfit(sums: PromptSums, is_normal: bool) -> FloatArray:
    """The share of x below y under a law fitted by moments, minus the counted share.

    The law is SVIP's equation 14 (normal) or 9 (gamma). The third column is x < y.
    """
    count, x, y, below, xx = np.moveaxis(sums[..., :5], -1, 0)
    mu = x / count
    spread = xx / count - mu**2
    law = stats.gamma(mu**2 / spread, scale=spread / mu)
    if is_normal:
        law = stats.norm(mu, np.sqrt(spread))
    return law.cdf(y / count) - below / count


def expected_length(sums: PromptSums) -> FloatArray:
    """Counted minus computed tokens per cycle, with alpha = 1 - TV and g levels.

    Leviathan et al., equation 1, computes (1 - alpha^(g + 1)) / (1 - alpha).
    """
    count, accepted, levels, judged, distance = np.moveaxis(sums[..., :5], -1, 0)
    alpha = 1 - distance / judged
    return accepted / count + 1 - (1 - alpha ** (levels / count + 1)) / (1 - alpha)


def by_group(sums: PromptSums) -> FloatArray:
    """[3, ..., groups]: the groups' sizes, their sums of x, and their sums of y."""
    return np.moveaxis(sums.reshape(*sums.shape[:-1], 6, -1), -2, 0)[:3]


def calibration_error(sums: PromptSums) -> FloatArray:
    size, x, y = by_group(sums)
    return np.abs(x - y).sum(-1) / size.sum(-1)


def growth(sums: PromptSums) -> FloatArray:
    """The power of y with which x grows, which is the slope of log mean x over log mean y."""
    size, x, y = by_group(sums)
    log_y = np.log(y / size)
    centred = log_y - np.nanmean(log_y, -1, keepdims=True)
    return np.nansum(centred * np.log(x / size), -1) / np.nansum(centred**2, -1)


STATISTICS: dict[str, Callable[[PromptSums], FloatArray]] = {
    "ratio": ratio,
    "mean": mean,
    "share": mean,
    "variance": variance,
    "correlation": correlation,
    "normal": partial(misfit, is_normal=True),
    "gamma": partial(misfit, is_normal=False),
    "expected_length": expected_length,
    "calibration_error": calibration_error,
    "growth": growth,
}


def side_of_table(table: pd.DataFrame, entry: Entry) -> Side:
    """The table's side of an entry.

    The entry's `value` holds expressions of the columns, `where` chooses lines, `by` makes groups.
    """
    prompts = np.sort(table.prompt.unique())  # prompts without a chosen line count as zeros
    if "where" in entry:
        table = table.query(entry["where"])
    values = {name: table.eval(name) for name in np.atleast_1d(entry["value"])}
    columns = pd.DataFrame(values, index=table.index).astype(np.float64)
    columns = columns[np.isfinite(columns).all(axis=1)]
    vectors = columns.to_numpy().T
    products = [x * y for x, y in combinations_with_replacement(vectors, 2)]
    summed = [np.ones(len(columns)), *vectors, *products]
    lines = pd.DataFrame(np.stack(summed, -1), columns.index)
    groups = [table.prompt[lines.index]]
    if "by" in entry:
        groups.append(table.eval(entry["by"])[lines.index])
    sums = lines.groupby(groups).sum()
    if "by" in entry:
        sums = sums.unstack(fill_value=0.0)
    figure = STATISTICS[entry.get("statistic", "mean")]
    return Side(sums.reindex(prompts, fill_value=0.0), figure)


def estimate_of(claim: Entry, sides: Sequence[Side]) -> Estimate | None:
    is_share = claim.get("statistic") == "share"
    return estimate(sides, is_ratio=claim.get("as") == "ratio", is_share=is_share)


def estimates_by_head(evidence: Evidence, claim: Entry, temperature: float) -> dict[str, Estimate]:
    """The claim's figure, or its difference from another, for each head that has the figure."""
    sides_by_head = sides_of_tables if "table" in claim else sides_of_rows
    estimates = {}
    for head, sides in sides_by_head(evidence, claim, temperature).items():
        if measured := estimate_of(claim, sides):
            estimates[head] = measured
    return estimates


# --- claims about rows of the bench ---


def sides_of_rows(evidence: Evidence, claim: Entry, temperature: float) -> dict[str, list[Side]]:
    """By head: the sides of the claim's row and of the row that it is compared with."""
    if evidence.answers.empty:
        return {}
    figure = FIGURES[claim["figure"]]
    answers = answers_meant(evidence, claim["of"], temperature)
    if claim["of"].get("pick") == "deepest":
        answers = deepest_first(answers)
    sides = {}
    for head, of_head in answers.groupby("label", sort=False):
        row = of_head[of_head["row"] == of_head["row"].iloc[0]]
        of_row = side_of_table(row, figure)
        if "against" not in claim:
            sides[str(head)] = [of_row]
            continue
        rivals = answers_meant(evidence, claim["against"], temperature)
        rivals = rivals[~rivals.index.isin(row.index)]
        if claim["against"].get("head") != "any":
            rivals = rivals[rivals.label == head]
        same = list(claim.get("same", ()))  # sizes of the tree
        rivals = rivals[(rivals[same] == row[same].iloc[0]).all(axis=1)]
        by_row = rivals.groupby("row", sort=False)  # in the suite's order
        of_rivals = [side_of_table(lines, figure) for _, lines in by_row]
        if of_rivals:
            takes_best = claim["against"].get("pick") == "best"
            sides[str(head)] = [of_row, highest_of(of_rivals) if takes_best else of_rivals[0]]
    return sides


def answers_meant(evidence: Evidence, entry: Entry, temperature: float) -> pd.DataFrame:
    """The answers of the rows that the entry means."""
    answers = evidence.answers
    for name, wanted in {"temperature": temperature, **UNLESS_SAID, **entry}.items():
        if name not in ("pick", "head"):
            answers = answers[answers[name].isin(np.atleast_1d(wanted))]
    return answers


def deepest_first(answers: pd.DataFrame) -> pd.DataFrame:
    """The answers of rows with trees that differ in depth alone, by falling depth."""
    depths = answers.groupby(["label", "family"]).levels.transform("nunique")
    return answers[depths > 1].sort_values("levels", ascending=False, kind="stable")


def highest_of(sides: Sequence[Side]) -> Side:
    """The highest of several figures on the prompts that all have; a resample picks its own."""
    columns = len(sides[0].table.columns)

    def highest(sums: PromptSums) -> FloatArray:
        values = sides[0].figure(sums.reshape(*sums.shape[:-1], -1, columns))  # [..., sides]
        return np.fmax.reduce(np.where(np.isfinite(values), values, np.nan), axis=-1)

    return Side(pd.concat([side.table for side in sides], axis=1, join="inner"), highest)


# --- claims about the tables of `aerie calibrate` ---


def sides_of_tables(evidence: Evidence, claim: Entry, temperature: float) -> dict[str, list[Side]]:
    """By head: the claim's sides of its table. A side of the claim may name another head."""
    tables = tables_by_head(evidence, claim, temperature)
    entries = [{**claim, **claim[side]} for side in ("of", "against") if side in claim]
    sides = {}
    for head in tables:
        heads = [entry.get("head", head) for entry in entries]
        if heads[0] == head and tables.keys() >= set(heads):
            pairs = zip(heads, entries, strict=True)
            sides[f"{head} head"] = [side_of_table(tables[name], entry) for name, entry in pairs]
    return sides


def tables_by_head(evidence: Evidence, entry: Entry, temperature: float) -> dict[str, pd.DataFrame]:
    """By head: the table that the entry names, from the head's first calibration that fits."""
    tables: dict[str, pd.DataFrame] = {}
    for calibration in evidence.calibrations:
        fits = calibration.temperature == temperature and calibration.method in entry["method"]
        if fits and entry["table"] in calibration.tables:
            tables.setdefault(calibration.head, calibration.tables[entry["table"]])
    return tables
