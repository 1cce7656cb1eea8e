"""The papers' part of a report: their claims, their analyses of laws, and what they published."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from aerie.infer.measure.bootstrap import Side
from aerie.infer.papers.claims import REGISTER, claims_table, judge_claims, tau_prompts
from aerie.infer.papers.evidence import (
    FIGURES,
    Entry,
    Evidence,
    answers_meant,
    estimate_of,
    side_of_table,
    tables_by_head,
)
from aerie.infer.papers.published import TASK_NAMES, beside_published, published_grid
from aerie.infer.report.grids import LEVELS, is_numeric
from aerie.infer.report.page import Appendix, Findings
from aerie.infer.report.pictures import INK, LOOK, SERIES, Curve, draw_panels, svg_texts

LEAST_LINES = 10  # of a table, for a point of a picture
MOST_PLACES = 12  # of a tree, in the picture by place


class PicturePoint(NamedTuple):
    """As details.json has it."""

    x: float | str
    value: float
    low: float
    high: float


def papers_appendix(run: Path) -> Callable[[Findings], Appendix]:
    """What `write_report` calls with the run's figures."""

    def write_appendix(findings: Findings) -> Appendix:
        evidence = Evidence.read(run)
        lines = judge_claims(evidence)
        claims: dict[str, Any] = {
            "lines": [asdict(line) for line in lines],
            "pictures": claim_pictures(evidence),
        }
        laws = findings.analysis and findings.analysis["laws"]
        keys = ("ablation", LEVELS, "context")
        values = {
            "tau_prompts": tau_prompts(lines),
            "beside": beside_published(findings.rows, findings.by_task),
            "published": {key: published_grid(key) for key in keys},
            "task_names": TASK_NAMES,
        }
        return Appendix(
            template=Path(__file__).with_name("papers.html.jinja"),
            details={"claims": claims},
            pictures=draw_appendix(claims["pictures"], laws),
            files={"claims.md": claims_table(lines)},
            values=values,
        )

    return write_appendix


@rc_context(LOOK)
def draw_appendix(
    pictures: Mapping[str, Mapping[str, Any]], laws: Mapping[str, Any] | None
) -> dict[str, str]:
    figures = {name: draw_claim(picture) for name, picture in pictures.items()}
    if laws:
        figures["calibration-bounds"] = draw_bounds(laws["bounds"])
        figures["calibration-rejections"] = draw_rejections(laws)
    return svg_texts(figures)


# --- the pictures of claims.yaml ---


def claim_pictures(evidence: Evidence) -> dict[str, dict[str, Any]]:
    """The register's pictures that the run has points for; lines holds what was measured."""
    pictures = {}
    for name, picture in REGISTER["pictures"].items():
        lines = []
        prompts = shared_prompts(evidence, picture)
        for entry in picture["lines"]:
            if "table" in entry:
                sides_by_head = table_sides(evidence, entry)
            else:
                sides_by_head = row_sides(evidence, entry, prompts)
            for head, sides in sides_by_head.items():
                points = picture_points(entry, sides)
                if points:
                    lines.append({"label": f"{entry['label']}, {head}", "points": points})
        if lines:
            pictures[name] = {"published": {}, **picture, "lines": lines}
    return pictures


def picture_points(entry: Entry, sides: Sequence[tuple[Any, Side]]) -> list[PicturePoint]:
    """Those that have an interval; sides: with their x."""
    points = []
    for x, side in sides:
        measured = estimate_of(entry, [side])
        if measured and np.isfinite(measured.low):
            points.append(PicturePoint(x, measured.value, measured.low, measured.high))
    return points


def shared_prompts(evidence: Evidence, picture: Entry) -> set[str]:
    """The prompts that all rows of a picture answered."""
    entries = [entry for entry in picture["lines"] if "of" in entry]
    tables = [answers_meant(evidence, entry["of"], 0) for entry in entries]
    answers = pd.concat([table for table in tables if len(table)] or [pd.DataFrame()])
    if answers.empty:
        return set()
    rows = answers.groupby("prompt")["row"].nunique()
    return set(rows.index[rows == answers["row"].nunique()])


def row_sides(
    evidence: Evidence, entry: Entry, prompts: set[str]
) -> dict[str, list[tuple[float, Side]]]:
    """By head, the figure of each row beside its x, in the order of x."""
    sides: dict[str, list[tuple[float, Side]]] = {}
    if prompts:
        answers = answers_meant(evidence, entry["of"], 0)
        answers = answers[answers.prompt.isin(prompts)]
        for (head, _), row in answers.groupby(["label", "row"], sort=False):
            side = side_of_table(row, FIGURES[entry["figure"]])
            sides.setdefault(head, []).append((float(row.eval(entry["x"])), side))
    return {head: sorted(points, key=lambda point: point[0]) for head, points in sides.items()}


def table_sides(evidence: Evidence, entry: Entry) -> dict[str, list[tuple[Any, Side]]]:
    """By head, the figure of groups of a table's lines; of places in a tree, the most visited."""
    sides = {}
    for head, table in tables_by_head(evidence, entry, 0).items():
        by_x = table.groupby(table.eval(entry["x"]))
        groups = [(x, lines) for x, lines in by_x if len(lines) >= LEAST_LINES]
        if entry["x"] == "place":
            groups = sorted(groups, key=lambda group: -len(group[1]))[:MOST_PLACES]
            groups.sort(key=lambda group: (group[0].count("."), group[0]))  # from the root down
        sides[f"{head} head"] = [(x, side_of_table(lines, entry)) for x, lines in groups]
    return sides


def draw_claim(picture: Mapping[str, Any]) -> Figure:
    """A claim's lines with their intervals; the paper's points are hollow."""
    names = [line["label"] for line in picture["lines"]]
    colours = dict(zip(names, SERIES, strict=False))
    published_colours = dict(zip(picture["published"], SERIES[::-1], strict=False))
    legend = colours | published_colours
    figure, (axes,) = draw_panels({picture["title"]: ()}, picture["xlabel"], legend, 190.0)
    for line in picture["lines"]:
        colour = colours[line["label"]]
        x = [point.x for point in line["points"]]
        style = "-" if is_numeric(x) else "none"
        axes.plot(
            x, [point.value for point in line["points"]], color=colour, marker="o", linestyle=style
        )
        lows = [point.low for point in line["points"]]
        axes.vlines(x, lows, [point.high for point in line["points"]], color=colour, linewidth=1.0)
        if not is_numeric(x):
            axes.tick_params(axis="x", rotation=60, labelsize=8.5)
    for name, points in picture["published"].items():
        x, y = np.transpose(points)
        axes.plot(x, y, "o", color=published_colours[name], markerfacecolor="none")
    return figure


# --- SVIP's figures of laws, from analysis.json ---


def draw_bounds(bounds: Mapping[str, Any]) -> Figure:
    """SVIP's figure 4."""
    names = {
        "acceptance": "acceptance",
        "oracle": "oracle bound",
        "approximation": f"1 − √({bounds['c']:g} H)",
        "bretagnolle_huber": "Bretagnolle–Huber",
    }
    colours = (INK, SERIES[1], SERIES[0], SERIES[2])
    legend = dict(zip(names.values(), colours, strict=True))
    percent = np.linspace(0, 100, len(bounds["curve"]["acceptance"]))
    curves = [Curve(percent, bounds["curve"][key], legend[name]) for key, name in names.items()]
    xlabel = "laws, by their acceptance probability (%)"
    figure, (axes,) = draw_panels({"probability": curves}, xlabel, legend, 190.0)
    axes.set_ylim(-1.05, 1.05)
    return figure


def draw_rejections(laws: Mapping[str, Any]) -> Figure:
    """SVIP's figure 3."""
    legend = {"accepted": SERIES[1], "rejected": SERIES[0]}
    ranked = laws["sorted"]
    ranks = [Curve(ranked["ranks"], ranked[key], colour) for key, colour in legend.items()]
    panels = {
        "KL(q‖p), nats; place 0: the rejected token": [],
        "mean log q of the token of this rank": ranks,
    }
    figure, (above, below) = draw_panels(panels, "rank in the vocabulary", legend)
    for row in laws["before_rejection"]:
        colour = legend["rejected" if row["offset"] == 0 else "accepted"]
        above.bar(row["offset"], row["kl"] or 0.0, width=0.6, color=colour)
    above.xaxis.set_major_locator(MaxNLocator(integer=True))
    below.set_xscale("log", base=4)
    below.xaxis.set_major_formatter("{x:,.0f}")
    return figure
