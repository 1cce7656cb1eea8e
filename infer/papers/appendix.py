"""Makes the papers' part of a report: their claims, pictures, and published figures."""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from matplotlib import rc_context
from matplotlib.figure import Figure

from aerie.infer.papers.claims import REGISTER, claims_table, judge_claims
from aerie.infer.papers.evidence import Entry, Evidence, estimate_of, side_of_table, tables_by_head
from aerie.infer.papers.published import TASK_NAMES, beside_published
from aerie.infer.report.grids import is_numeric
from aerie.infer.report.page import Appendix, Findings
from aerie.infer.report.pictures import LEAST_COUNT, LOOK, SERIES, draw_panels, svg_texts


class PicturePoint(NamedTuple):
    """A point of a picture in details.json, with its 95 % interval."""

    x: float | str
    value: float
    low: float
    high: float


@rc_context(LOOK)
def papers_appendix(run: Path, findings: Findings) -> Appendix:
    """The papers' part of the report of a run. findings: the figures that the report has read."""
    evidence = Evidence.read(run)
    lines = judge_claims(evidence)
    pictures = claim_pictures(evidence)
    comparisons = beside_published(findings.rows, findings.by_task)
    tasks = set().union(*(line.points for line in comparisons))
    return Appendix(
        template=Path(__file__).with_name("papers.html.jinja"),
        details={"claims": {"lines": [asdict(line) for line in lines], "pictures": pictures}},
        pictures=svg_texts({name: draw_claim(picture) for name, picture in pictures.items()}),
        files={"claims.md": claims_table(lines)},
        values={
            "comparisons": comparisons,
            "task_names": {task: name for task, name in TASK_NAMES.items() if task in tasks},
        },
    )


def claim_pictures(evidence: Evidence) -> dict[str, dict[str, Any]]:
    """The register's pictures for which the run has points; their `lines` hold these points."""
    pictures = {}
    for name, picture in REGISTER["pictures"].items():
        lines = []
        for entry in picture["lines"]:
            for head, table in tables_by_head(evidence, entry, 0).items():
                if points := picture_points(table, entry):
                    lines.append({"label": f"{entry['label']}, {head} head", "points": points})
        if lines:
            pictures[name] = {"published": {}, **picture, "lines": lines}
    return pictures


def picture_points(table: pd.DataFrame, entry: Entry) -> list[PicturePoint]:
    """A point for each group of the table's lines whose figure has an interval."""
    points = []
    for x, lines in table.groupby(table.eval(entry["x"])):
        if len(lines) >= LEAST_COUNT:
            measured = estimate_of(entry, [side_of_table(lines, entry)])
            if measured and np.isfinite(measured.low):
                points.append(PicturePoint(x, measured.value, measured.low, measured.high))
    return points


def draw_claim(picture: Mapping[str, Any]) -> Figure:
    """Draws the measured lines with their intervals, and the paper's points hollow."""
    names = [line["label"] for line in picture["lines"]]
    colours = dict(zip(names, SERIES, strict=False))
    published_colours = dict(zip(picture["published"], SERIES[::-1], strict=False))
    legend = colours | published_colours
    figure, (axes,) = draw_panels({picture["title"]: ()}, picture["xlabel"], legend, 190.0)
    for line in picture["lines"]:
        colour = colours[line["label"]]
        x, values, lows, highs = zip(*line["points"], strict=True)
        axes.plot(x, values, color=colour, marker="o", linestyle="-" if is_numeric(x) else "none")
        axes.vlines(x, lows, highs, color=colour, linewidth=1.0)
        if not is_numeric(x):
            axes.tick_params(axis="x", rotation=60, labelsize=8.5)
    for name, points in picture["published"].items():
        x, y = np.transpose(points)
        axes.plot(x, y, "o", color=published_colours[name], markerfacecolor="none")
    return figure
