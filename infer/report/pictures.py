"""The report's pictures, as SVG."""

import io
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from aerie.configs.errors import UserError
from aerie.configs.read import read_yaml
from aerie.infer.measure.bench_files import SummaryRow
from aerie.infer.measure.statistics import VANILLA
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
MOST_ROWS = 4  # in the picture of acceptance by depth
LEAST_COUNT = 10  # a share or mean of fewer cycles or nodes is not drawn
MOST_DOTS = 50  # a curve of more points is drawn without dots
DASHED: Any = (0, (3, 3))
SHARES: dict[str, Any] = {"ylim": (-0.03, 1.05), "yticks": [0, 0.5, 1]}  # a vertical axis of them


class Curve(NamedTuple):
    x: Iterable[Any]
    y: Iterable[Any]  # None: no point
    colour: str
    style: Any = "-"


# --- what pictures are made of ---


def svg_texts(figures: Mapping[str, Figure]) -> dict[str, str]:
    """An <svg> element for each name; its ids begin with the name, as a page holds many."""
    texts = {}
    for name, figure in figures.items():
        buffer = io.StringIO()
        unsigned = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        FigureCanvasSVG(figure).print_svg(buffer, metadata=unsigned)
        head, rest = buffer.getvalue().split("<svg", 1)[1].split(">", 1)
        box = re.findall(r'viewBox="[^"]+"', head)[0]
        spaces = 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'
        text = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", f"<svg {spaces} {box}>{rest}")
        texts[name] = text.replace("'DejaVu Sans'", "var(--sans, 'DejaVu Sans')").strip() + "\n"
    return texts


def draw_panels(
    panels: Mapping[str, Sequence[Curve]],
    xlabel: str,
    legend: Mapping[str, str] | None = None,
    height: float = 116.0,
) -> tuple[Figure, list[Axes]]:
    """A panel of this height in points for each title, below a legend of name -> colour."""
    legend = legend or {}
    columns = 4 if max(map(len, legend), default=0) < 10 else 1
    legend_lines = -(-len(legend) // columns)
    total = (height + 42.0) * len(panels) + 16.0 * legend_lines + 14.0
    size = (WIDTH / POINTS_PER_INCH, total / POINTS_PER_INCH)
    figure = Figure(figsize=size, dpi=POINTS_PER_INCH, layout="constrained")
    all_axes: list[Axes] = list(figure.subplots(len(panels), squeeze=False)[:, 0])
    if legend:
        handles = [Line2D([], [], color=colour, linewidth=5.0) for colour in legend.values()]
        spacing: dict[str, Any] = {"ncols": columns, "handlelength": 1.0, "borderpad": 0.0}
        figure.legend(handles, list(legend), loc="outside upper left", **spacing)
    for axes, (title, curves) in zip(all_axes, panels.items(), strict=True):
        axes.set_title(title)
        for curve in curves:
            plot_curve(axes, curve)
    all_axes[-1].set_xlabel(xlabel)
    return figure, all_axes


def plot_curve(axes: Axes, curve: Curve) -> None:
    points = [point for point in zip(curve.x, curve.y, strict=True) if point[1] is not None]
    if points:  # else matplotlib narrows the axes
        dots = "o" if len(points) < MOST_DOTS else ""
        x, y = zip(*points, strict=True)
        axes.plot(x, y, color=curve.colour, linestyle=curve.style, marker=dots)


# --- the report's own ---


@rc_context(LOOK)
def draw_pictures(
    rows: SummaryRows,
    details: Mapping[str, Any],
    grids: Sequence[Grid],
    contexts: Mapping[str, Grid],
) -> dict[str, str]:
    """Every picture that the figures allow: name -> an <svg> element. details: details.json."""
    tau_intervals = [row["tau_ci95"] for row in details["rows"]]
    figures = {
        "tau": draw_bars(rows, "tau", tau_intervals),
        "speedup": draw_bars(rows, "speedup", [row.speedup_ci95 for row in rows]),
    }
    if drafting := [row for row in rows if row.tree and row.target_forwards]:
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
            panels, contexts["cumulative"], "tokens, the prompt included"
        )
    return svg_texts(figures)


def draw_bars(rows: SummaryRows, key: str, intervals: Sequence[Sequence[float] | None]) -> Figure:
    """tau or speedup with its interval, a band for each row; a failed row has no bar."""
    bands = max(2, len(rows))
    unit = "×" if key == "speedup" else ""
    xlabel = "speedup over vanilla" if unit else "tau (tokens per target forward)"
    figure, (axes,) = draw_panels({"": ()}, xlabel, height=44.0 * bands)
    ends = []  # of each row's bar or interval
    for row, bounds in zip(rows, intervals, strict=True):
        ends.append(max(getattr(row, key) or 0.0, *(bounds or [0.0])))
    limit = 1.25 * max([1.0, *ends])
    texts: dict[str, Any] = {"va": "center", "in_layout": False}
    for band, (row, bounds) in enumerate(zip(rows, intervals, strict=True)):
        value = getattr(row, key)
        if value is not None:
            # with few rows, the colours of the picture by depth
            colour = SERIES[(band - 1) % len(SERIES)] if row.tree else QUIET
            axes.barh(band, value, height=0.42, color=colour)
            text = f"{value:.2f}{unit}"
        else:
            text = "not measured" if row.status == "ok" else "failed: no figure"
        if bounds and row.method != VANILLA:
            axes.plot(bounds, [band, band], color=INK, linewidth=1.3, marker="|", markersize=6)
        axes.annotate(label(row, rows), (0, band), (1, 16), textcoords="offset points", **texts)
        ink = BAD if value is None else INK
        axes.text(ends[band] + limit * 0.018, band, text, color=ink, weight="bold", **texts)
    axes.set(xlim=(0, limit), ylim=(bands - 0.6, -0.6), yticks=[])
    axes.grid(visible=False)
    axes.spines["left"].set_visible(False)
    axes.axvline(1.0, color=QUIET, linewidth=1.0, linestyle=DASHED, zorder=0)
    return figure


def draw_acceptance(rows: SummaryRows) -> Figure:
    """Acceptance by depth of the rows of highest tau."""
    best = sorted(rows, key=lambda row: row.tau or 0.0, reverse=True)[:MOST_ROWS]
    chosen = [row for row in rows if row in best]
    legend = {}
    survived, conditional = [], []
    for row, colour in zip(chosen, SERIES, strict=False):
        legend[label(row, rows)] = colour
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
    bins_by_name: Mapping[str, Any],
    colours: Sequence[str] = SERIES,
    least: int = LEAST_COUNT,
) -> Figure:
    """Acceptance against confidence; bins with fewer nodes than the least are left out."""
    curves = [Curve([0, 1], [0, 1], MUTED, DASHED)]
    for bins, colour in zip(bins_by_name.values(), colours, strict=False):
        filled = [entry for entry in bins if entry["count"] >= least]
        x = [entry["confidence"] for entry in filled]
        curves.append(Curve(x, [entry["acceptance"] for entry in filled], colour))
    legend = dict(zip(bins_by_name, colours, strict=False)) if len(bins_by_name) > 1 else None
    xlabel = "confidence (q of the drafted token)"
    figure, (axes,) = draw_panels({title: curves}, xlabel, legend, 190.0)
    axes.lines[0].set(marker="", linewidth=1.0)
    axes.set(**SHARES, xlim=(-0.02, 1.02), xticks=[0, 0.25, 0.5, 0.75, 1])
    return figure


def draw_reliability(bins: Sequence[Mapping[str, Any]]) -> Figure:
    figure = draw_confidence("acceptance", {"all prompts": bins}, least=1)
    counts = figure.axes[0].twinx()
    middles = [(entry["low"] + entry["high"]) / 2 for entry in bins]
    sizes = [entry["count"] for entry in bins]
    counts.bar(middles, sizes, width=0.86 / len(bins), color=QUIET, alpha=0.25)
    counts.set(yscale="log", ylabel="nodes in the bin (bars)")
    counts.grid(visible=False)
    return figure


def draw_calibration(analysis: Mapping[str, Any]) -> dict[str, Figure]:
    figures = {}
    if analysis["calibrator"]:
        curves = {}
        fits = {"before": "the head’s own", "temperature": "temperature", "isotonic": "isotonic"}
        for fit, name in fits.items():
            scores = analysis["calibrator"]["held_out"][fit]
            curves[f"{name}, ECE {scores['ece']:.3f}"] = scores["bins"]
        colours = (QUIET, SERIES[1], SERIES[0])
        title = "acceptance, held-out half"
        figures["calibration-calibrator"] = draw_confidence(title, curves, colours)
    if depths := analysis["by_depth"][:4]:
        curves = {f"depth {row['depth']}, ECE {row['ece']:.3f}": row["bins"] for row in depths}
        figures["calibration-by-depth"] = draw_confidence("acceptance", curves)
    return figures


def draw_costs(heads: Sequence[Mapping[str, Any]]) -> Figure:
    legend = {str(head["kind"]): SERIES[at % len(SERIES)] for at, head in enumerate(heads)}
    verify, draft = [], []
    for head, colour in zip(heads, legend.values(), strict=True):
        by_nodes = {int(nodes): ms for nodes, ms in head["costs_ms"]["verify"].items()}
        by_width = {int(k): ms[1] for k, ms in head["costs_ms"]["draft"].items()}
        verify.append(Curve(sorted(by_nodes), [by_nodes[n] for n in sorted(by_nodes)], colour))
        draft.append(Curve(sorted(by_width), [by_width[k] for k in sorted(by_width)], colour))
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
    depths = sorted({int(name.split("_at_")[1]) for name in curves if "_at_" in name})
    legend = {f"depth {depth}": SERIES[at % len(SERIES)] for at, depth in enumerate(depths)}
    if any("greedy_agreement" in name for name in curves):
        legend["agreement"] = INK
    shares = "accuracy by depth, and greedy agreement"
    tau = "tau by decoding (grey: predicted)"
    panels: dict[str, list[Curve]] = {"loss": [], shares: [], tau: []}
    for name, curve in curves.items():
        figure_name, _, depth = name.removeprefix("held_out_").partition("_at_")
        title = {"loss": "loss", "tau": tau, "predicted_tau": tau}.get(figure_name, shares)
        usual = MUTED if figure_name == "predicted_tau" else INK
        style = DASHED if name.startswith("held") else "-"
        colour = legend.get(f"depth {depth}", usual)
        panels[title].append(Curve(curve["steps"], curve["values"], colour, style))
    drawn = {title: lines for title, lines in panels.items() if lines}
    figure, all_axes = draw_panels(drawn, "step", legend, 90.0)
    for axes, title in zip(all_axes, drawn, strict=True):
        axes.set(xlim=(0, None), **(SHARES if title == shares else {}))
    return figure


# --- sweeps: points over evenly spaced values ---


def draw_sweep(grid: Grid) -> Figure:
    """tau and speedup along the values; by depth also the draft forwards and the wasted ones."""
    panels = {"tau": along_values(grid, "tau")}
    if grid.key == LEVELS:
        wasted = along_values(grid, "draft_forwards_wasted", DASHED)
        title = "draft forwards per prompt (dashed: wasted)"
        panels[title] = along_values(grid, "draft_forwards") + wasted
    panels["speedup over vanilla"] = along_values(grid, "speedup")
    return draw_along(panels, grid, "largest depth" if grid.key == LEVELS else grid.key)


def along_values(grid: Grid, key: str, style: Any = "-") -> list[Curve]:
    """A curve for each line, over the numbers of the grid's values; forwards are per prompt."""
    curves = []
    for line, colour in zip(grid.lines, SERIES, strict=False):
        x = [grid.values.index(point.value) for point in line.points]
        y = [along_value(point, key) for point in line.points]
        curves.append(Curve(x, y, colour, style))
    return curves


def along_value(point: SummaryRow, key: str) -> float | None:
    value: float | None = getattr(point, key)
    return value and value / point.prompts if key.startswith("draft_") else value


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
