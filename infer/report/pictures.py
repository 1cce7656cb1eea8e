"""The report's pictures, as SVG."""

import io
import math
import re
from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike

from aerie.configs.errors import UserError
from aerie.configs.read import read_yaml
from aerie.infer.measure.statistics import SERVED, VANILLA
from aerie.infer.report.grids import LEVELS, Grid, is_numeric
from aerie.infer.report.tables import SummaryRows, label

try:
    from matplotlib import rc_context
    from matplotlib.axes import Axes
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.ticker import MaxNLocator
except ImportError as error:
    raise UserError(
        f"report: matplotlib cannot be imported ({error}); pip install aerie[report]"
    ) from error

LOOK = read_yaml(Path(__file__).with_name("pictures.yaml"))[0]
INK = LOOK["text.color"]
MUTED = LOOK["axes.labelcolor"]
BAD = "#b3261e"
QUIET = "#98a1ae"
SERIES = ("#c2570c", "#0f766e", "#5b4fc4", "#b7931a", "#b03a73", "#2f6fb5")
WIDTH = 332.0  # of a picture, in points
POINTS_PER_INCH = 72.0
LEAST_COUNT = 10  # a share or mean of fewer cycles or nodes is not drawn
DASHED: Any = (0, (3, 3))
FIT_NAMES = {"before": "the head’s own", "temperature": "temperature", "isotonic": "isotonic"}
ACCURACY = "accuracy by depth, and greedy agreement"  # titles of panels
TAU = "tau by decoding (grey: predicted)"
SPACES = 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'
SHARES: dict[str, Any] = {"ylim": (-0.03, 1.05), "yticks": [0, 0.5, 1]}  # a vertical axis of them


class Curve(NamedTuple):
    x: ArrayLike
    y: ArrayLike  # None or nan: no point
    colour: str
    style: Any = "-"


# --- what pictures are made of ---


def svg_texts(figures: Mapping[str, Figure]) -> dict[str, str]:
    """An <svg> element for each name; its ids begin with the name, as a page holds many."""
    texts = {}
    for name, figure in figures.items():
        buffer = io.StringIO()
        no_metadata = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        FigureCanvasSVG(figure).print_svg(buffer, metadata=no_metadata)
        head, rest = buffer.getvalue().split("<svg", 1)[1].split(">", 1)
        box = re.findall(r'viewBox="[^"]+"', head)[0]
        text = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", f"<svg {SPACES} {box}>{rest}")
        texts[name] = text.replace("'DejaVu Sans'", "var(--sans, 'DejaVu Sans')").strip() + "\n"
    return texts


def draw_panels(
    panels: Mapping[str, Sequence[Curve]],
    xlabel: str,
    legend: Mapping[str, str] | None = None,  # name -> colour
    height: float = 116.0,  # of a panel, in points
) -> tuple[Figure, list[Axes]]:
    """A panel for each title, below the legend."""
    legend = legend or {}
    columns = 4 if max(map(len, legend), default=0) < 10 else 1
    legend_height = 16.0 * math.ceil(len(legend) / columns)
    total = (height + 42.0) * len(panels) + legend_height + 14.0
    inches = (WIDTH / POINTS_PER_INCH, total / POINTS_PER_INCH)
    figure = Figure(inches, dpi=POINTS_PER_INCH, layout="constrained")
    if legend:
        handles = [Line2D([], [], color=colour, linewidth=5.0) for colour in legend.values()]
        spacing: dict[str, Any] = {"ncols": columns, "handlelength": 1.0, "borderpad": 0.0}
        figure.legend(handles, list(legend), loc="outside upper left", **spacing)
    all_axes: list[Axes] = list(figure.subplots(len(panels), squeeze=False)[:, 0])
    all_axes[-1].set_xlabel(xlabel)
    for axes, (title, curves) in zip(all_axes, panels.items(), strict=True):
        axes.set_title(title)
        for curve in curves:
            y = np.array(curve.y, dtype=np.float64)  # None becomes nan
            known = np.isfinite(y)
            if known.any():  # else matplotlib narrows the axes
                look = {"color": curve.colour, "linestyle": curve.style}
                dots = "o" if known.sum() < 50 else ""
                axes.plot(np.array(curve.x)[known], y[known], marker=dots, **look)
    return figure, all_axes


# --- the report's own ---


@rc_context(LOOK)
def draw_pictures(
    rows: SummaryRows,
    details: Mapping[str, Any],
    grids: Sequence[Grid],
    contexts: Mapping[str, Grid],
) -> dict[str, str]:
    """Every picture that the figures allow: name -> an <svg> element. details: details.json."""
    intervals = [row["tau_ci95"] for row in details["rows"]]
    figures = {"tau": draw_bars(rows, "tau", "tau (tokens per target forward)", intervals)}
    own = [row for row in rows if row.method != SERVED]
    intervals = [row.speedup_ci95 for row in own]
    figures["speedup"] = draw_bars(own, "speedup", "speedup over vanilla", intervals, "×")
    # some servers count cycles, and not what they accept
    if drafting := [row for row in rows if row.tree and any(row.accepted_histogram or ())]:
        figures["depth"] = draw_acceptance(drafting)
    if details["calibration"] is not None and details["calibration"]["nodes"]:
        figures["reliability"] = draw_reliability(details["calibration"]["bins"])
    if details["analysis"] is not None:
        figures |= draw_calibration(details["analysis"])
    if details["tuning"] is not None:
        figures["tuning-costs"] = draw_costs(details["tuning"]["heads"])
    for kind, curves in details["training"]["curves"].items():
        figures[f"training-{kind}"] = draw_training(curves)
    for grid in grids:
        if grid.picture:
            figures[grid.picture] = draw_sweep(grid)
    if contexts:
        panels = {
            "speedup from the start to a length": along_values(contexts["cumulative"], "speedup"),
            "tau between a length and the one before": along_values(contexts["bucket"], "tau"),
        }
        figures["sweep-contexts"] = draw_along(
            panels, contexts["bucket"], "tokens, the prompt included"
        )
    return svg_texts(figures)


def draw_bars(
    rows: SummaryRows, key: str, xlabel: str, intervals: Sequence[Any], unit: str = ""
) -> Figure:
    """tau or speedup with its interval, a band for each row; a failed row has no bar."""
    bands = max(2, len(rows))
    figure, (axes,) = draw_panels({"": ()}, xlabel, height=44.0 * bands)
    ends = [  # of each row's bar or interval
        max(getattr(row, key) or 0.0, *(bounds or [0.0]))
        for row, bounds in zip(rows, intervals, strict=True)
    ]
    limit = 1.25 * max([1.0, *ends])
    look: dict[str, Any] = {"va": "center", "in_layout": False}
    for band, (row, bounds) in enumerate(zip(rows, intervals, strict=True)):
        value = getattr(row, key)
        if value is None:
            text = "not measured" if row.status == "ok" else "failed: no figure"
        else:
            text = f"{value:.2f}{unit}"
            # with few rows, the colours of the picture by depth
            colour = SERIES[(band - 1) % len(SERIES)] if row.tree else QUIET
            axes.barh(band, value, height=0.42, color=colour)
        if bounds and row.method != VANILLA:
            axes.plot(bounds, [band, band], color=INK, linewidth=1.3, marker="|", markersize=6)
        axes.annotate(label(row, rows), (0, band), (1, 16), textcoords="offset points", **look)
        ink = BAD if value is None else INK
        axes.text(ends[band] + limit * 0.018, band, text, color=ink, weight="bold", **look)
    axes.set(xlim=(0, limit), ylim=(bands - 0.6, -0.6), yticks=[])
    axes.grid(visible=False)
    axes.spines["left"].set_visible(False)
    axes.axvline(1.0, color=QUIET, linewidth=1.0, linestyle=DASHED, zorder=0)
    return figure


def draw_acceptance(rows: SummaryRows) -> Figure:
    """Acceptance by depth of the rows of highest tau."""
    best = sorted(rows, key=lambda row: row.tau or 0.0, reverse=True)[:4]
    chosen = [row for row in rows if row in best]  # in the order of the table
    legend = {label(row, rows): colour for row, colour in zip(chosen, SERIES, strict=False)}
    survived = []
    conditional = []
    for row, colour in zip(chosen, SERIES, strict=False):
        # cycles that keep at least d draft tokens: the histogram summed from its end
        reached = np.array(row.accepted_histogram)[::-1].cumsum()[::-1]  # [levels + 1]
        survived.append(Curve(range(1, len(reached)), reached[1:] / reached[0], colour))
        enough = np.flatnonzero(reached[:-1] >= LEAST_COUNT)
        conditional.append(Curve(enough + 1, reached[enough + 1] / reached[enough], colour))
    panels = {"P(accepted ≥ d)": survived, "P(accepted ≥ d | accepted ≥ d − 1)": conditional}
    figure, (above, below) = draw_panels(panels, "draft depth d", legend, 90.0)
    for axes in (above, below):
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set(**SHARES)
    below.set_xlim(above.get_xlim())
    return figure


def draw_confidence(
    title: str,
    curves: Mapping[str, Sequence[Mapping[str, Any]]],  # name -> bins
    colours: Sequence[str] = SERIES,
    least: int = LEAST_COUNT,  # nodes of a bin that is drawn
) -> Figure:
    """Acceptance against confidence."""
    lines = [Curve([0, 1], [0, 1], MUTED, DASHED)]
    for bins, colour in zip(curves.values(), colours, strict=False):
        filled = [row for row in bins if row["count"] >= least]
        acceptance = [row["acceptance"] for row in filled]
        lines.append(Curve([row["confidence"] for row in filled], acceptance, colour))
    legend = dict(zip(curves, colours, strict=False)) if len(curves) > 1 else None
    figure, (axes,) = draw_panels(
        {title: lines}, "confidence (q of the drafted token)", legend, 190.0
    )
    axes.lines[0].set(marker="", linewidth=1.0)
    axes.set(**SHARES, xlim=(-0.02, 1.02), xticks=[0, 0.25, 0.5, 0.75, 1])
    return figure


def draw_reliability(bins: Sequence[Mapping[str, Any]]) -> Figure:
    figure = draw_confidence("acceptance", {"all prompts": bins}, least=1)
    counts = figure.axes[0].twinx()
    table = pd.DataFrame(bins)
    middles = (table.low + table.high) / 2
    counts.bar(middles, table["count"], width=0.86 / len(bins), color=QUIET, alpha=0.25)
    counts.set(yscale="log", ylabel="nodes in the bin (bars)")
    counts.grid(visible=False)
    return figure


def draw_calibration(analysis: Mapping[str, Any]) -> dict[str, Figure]:
    figures = {}
    if analysis["calibrator"]:
        curves = {
            f"{FIT_NAMES[fit]}, ECE {scores['ece']:.3f}": scores["bins"]
            for fit, scores in analysis["calibrator"]["held_out"].items()
        }
        figures["calibration-calibrator"] = draw_confidence(
            "acceptance, held-out half", curves, (QUIET, SERIES[1], SERIES[0])
        )
    if depths := analysis["by_depth"][:4]:
        curves = {f"depth {row['depth']}, ECE {row['ece']:.3f}": row["bins"] for row in depths}
        figures["calibration-by-depth"] = draw_confidence("acceptance", curves)
    return figures


def draw_costs(heads: Sequence[Mapping[str, Any]]) -> Figure:
    legend = {}
    verify = []
    draft = []
    for head, colour in zip(heads, cycle(SERIES), strict=False):
        legend[str(head["kind"])] = colour
        by_nodes = pd.Series(head["costs_ms"]["verify"]).rename(int).sort_index()
        by_width = pd.Series(head["costs_ms"]["draft"]).rename(int).sort_index()
        verify.append(Curve(by_nodes.index, by_nodes, colour))
        draft.append(Curve(by_width.index, by_width.str[1], colour))
    panels = {
        "v(N): ms of a target forward by nodes with the root": verify,
        "ms of one more draft level": draft,
    }
    figure, all_axes = draw_panels(panels, "k: expanded nodes of the level", legend)
    for axes in all_axes:
        axes.set(xlim=(0, None), ylim=(0, None))
    return figure


def draw_training(curves: Mapping[str, Mapping[str, Any]]) -> Figure:
    """Solid: batches of the training; dashed: held out."""
    panels: dict[str, list[Curve]] = {"loss": [], ACCURACY: [], TAU: []}
    legend = {}
    for name, curve in curves.items():
        figure_name, _, depth = name.removeprefix("held_out_").partition("_at_")
        colour = MUTED if figure_name == "predicted_tau" else INK
        if depth:
            colour = SERIES[(int(depth) - 1) % len(SERIES)]
            legend[f"depth {depth}"] = colour
        elif figure_name == "greedy_agreement":
            legend["agreement"] = colour
        style = DASHED if name.startswith("held_out_") else "-"
        title = {"loss": "loss", "tau": TAU, "predicted_tau": TAU}.get(figure_name, ACCURACY)
        panels[title].append(Curve(curve["steps"], curve["values"], colour, style))
    drawn = {title: lines for title, lines in panels.items() if lines}
    figure, all_axes = draw_panels(drawn, "step", legend, 90.0)
    for axes, title in zip(all_axes, drawn, strict=True):
        axes.set(xlim=(0, None), **(SHARES if title == ACCURACY else {}))
    return figure


# --- sweeps: points over evenly spaced values ---


def draw_sweep(grid: Grid) -> Figure:
    """tau and speedup along the values; by depth also the draft forwards and the wasted ones."""
    panels = {"tau": along_values(grid, "tau")}
    if grid.key == LEVELS:
        wasted = along_values(grid, "draft_forwards_wasted", DASHED)
        forwards = along_values(grid, "draft_forwards")
        panels["draft forwards per prompt (dashed: wasted)"] = forwards + wasted
    panels["speedup over vanilla"] = along_values(grid, "speedup")
    return draw_along(panels, grid, "largest depth" if grid.key == LEVELS else grid.key)


def along_values(grid: Grid, key: str, style: Any = "-") -> list[Curve]:
    """A curve for each line, over the numbers of the grid's values; forwards are per prompt."""
    curves = []
    for line, colour in zip(grid.lines, SERIES, strict=False):
        x = [grid.values.index(point.value) for point in line.points]
        y = np.array([getattr(point, key) for point in line.points], dtype=np.float64)
        if key.startswith("draft_"):
            y /= [point.prompts for point in line.points]
        curves.append(Curve(x, y, colour, style))
    return curves


def draw_along(panels: Mapping[str, Sequence[Curve]], grid: Grid, xlabel: str) -> Figure:
    labels = [line.label for line in grid.lines]
    legend = dict(zip(labels, SERIES, strict=False)) if len(labels) > 1 else None
    figure, all_axes = draw_panels(panels, xlabel, legend, 96.0)
    ticks = [f"{value:g}" if is_numeric([value]) else str(value) for value in grid.values]
    for axes, title in zip(all_axes, panels, strict=True):
        starts_at_one = title.startswith(("tau", "speedup"))
        axes.set_ylim(min(axes.get_ylim()[0], 1.0) if starts_at_one else 0.0)
        if title.startswith("speedup"):
            axes.axhline(1.0, color=MUTED, linewidth=1.0, linestyle=DASHED)
        axes.yaxis.set_major_formatter("{x:g}")
        axes.set_xlim(-0.4, len(ticks) - 0.6)
        axes.set_xticks(range(len(ticks)), ticks)
    return figure
