"""The report's pictures: each a short function from rows to SVG text, drawn with matplotlib."""

import io
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from aerie.configs.errors import UserError
from aerie.infer.measure.record import SummaryRow
from aerie.infer.measure.statistics import VANILLA
from aerie.infer.report.papers import Grid, Line, numeric
from aerie.infer.report.tables import label, ms_per_cycle

try:
    from matplotlib import rc_context
    from matplotlib.axes import Axes
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.ticker import MaxNLocator
except ImportError as error:
    raise UserError(f"report: matplotlib cannot be imported ({error}); pip install aerie[report]") from error

INK, MUTED, GRID, BAD, QUIET = "#1c2127", "#626a75", "#e3e0d8", "#b3261e", "#98a1ae"
SERIES = ("#c2570c", "#0f766e", "#5b4fc4", "#b7931a", "#b03a73", "#2f6fb5")
PARTS = {"draft": SERIES[3], "verify": SERIES[5], "commit": SERIES[4], "other": QUIET}
WIDTH, POINTS = 332.0, 72.0  # of a picture, in points, and points per inch
MAX_ROWS = 4  # in the pictures by depth
MIN_CYCLES = MIN_NODES = 10  # a share or mean of fewer is not drawn
DASHED = (0, (3, 3))
Curve = tuple[Iterable[Any], Iterable[Any], str, Any]  # x, y (null: no point), colour, line style
RC = {
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 10.5,
    "svg.fonttype": "none",  # text stays text: selectable, and in the page's own font
    "svg.hashsalt": "aerie",  # same data, same bytes
    "text.color": INK,
    "axes.titlesize": 10.5,
    "axes.titlelocation": "left",
    "axes.axisbelow": True,
    "lines.linewidth": 2.0,
    "lines.markersize": 4,
    "legend.frameon": False,
    "figure.constrained_layout.h_pad": 0.08,
    **dict.fromkeys(("axes.labelcolor", "axes.titlecolor", "xtick.color", "ytick.color"), MUTED),
    **dict.fromkeys(("axes.edgecolor", "grid.color"), GRID),
    **dict.fromkeys(("xtick.major.size", "ytick.major.size", "xtick.minor.size"), 0),
    **dict.fromkeys(("axes.spines.top", "axes.spines.right"), False),
    **dict.fromkeys(("figure.facecolor", "axes.facecolor"), "none"),
    "axes.grid": True,
}


def pictures(
    rows: Sequence[SummaryRow], details: Mapping[str, Any], grids: Sequence[Grid], contexts: Mapping[str, Grid]
) -> dict[str, str]:
    """Every picture that the figures allow, name -> an <svg> element without size; details as in details.json."""
    calibration, analysis, tuning = details["calibration"], details["analysis"], details["tuning"]
    parts = [[(ms, PARTS[part]) for part, ms in ms_per_cycle(row).items()] for row in rows]
    with rc_context(RC):
        figures = {
            "tau": _method_bars(rows, "tau", [row["tau_ci95"] for row in details["rows"]]),
            "speedup": _method_bars(rows, "speedup", [row.speedup_ci95 for row in rows]),
            "milliseconds": _row_bars(rows, parts, [sum(ms for ms, _ in each) for each in parts], " ms")[0],
            **_accepted(rows),
        }
        if calibration is not None and calibration["nodes"]:
            figures["reliability"] = _reliability(calibration)
        if analysis is not None:
            of_calibration = {**_nodes(analysis), **(_laws(analysis["laws"]) if analysis["laws"] else {})}
            figures |= {f"calibration-{name}": figure for name, figure in of_calibration.items()}
        if tuning is not None:
            figures["tuning-costs"] = _cost_curves(tuning["heads"])
        figures |= {grid.picture: _sweep(grid) for grid in grids if grid.picture is not None}
        if contexts:
            figures["sweep-contexts"] = _contexts(**contexts)
        return {name: _svg(figure, name) for name, figure in figures.items()}


def standalone(svg: str) -> str:
    """The same picture as a file of its own, on white."""
    head, rest = svg.split(">", 1)
    style = "<style>svg{background:#fff;font-family:sans-serif}</style>"
    return f'<?xml version="1.0" encoding="utf-8"?>\n{head}>{style}{rest}'


def _svg(figure: Figure, name: str) -> str:
    """The figure as text; ids are prefixed with its name, for a page holds many."""
    buffer = io.StringIO()
    FigureCanvasSVG(figure).print_svg(buffer, metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    text = buffer.getvalue()
    head, rest = text[text.index("<svg") :].split(">", 1)
    box = re.findall(r'viewBox="[^"]+"', head)[0]
    text = f'<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" {box}>{rest}'
    text = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", text)
    return text.replace("'DejaVu Sans'", "var(--sans, 'DejaVu Sans')").strip() + "\n"


def _panels(
    titles: Sequence[str], legend: Sequence[tuple[str, str]] = (), heights: Sequence[float] = (116.0,), columns: int = 2
) -> tuple[Figure, list[Axes]]:
    """Axes under each title, of these heights in points, below a legend of (name, colour)."""
    heights = [*heights] * (len(titles) // len(heights))
    lines = -(-len(legend) // columns)
    total = sum(heights) + 42.0 * len(titles) + 16.0 * lines + 14.0
    figure = Figure(figsize=(WIDTH / POINTS, total / POINTS), dpi=POINTS, layout="constrained")
    panels = figure.subplots(len(titles), height_ratios=heights, squeeze=False)[:, 0]
    for axes, title in zip(panels, titles, strict=True):
        axes.set_title(title)
    if legend:
        handles = [Line2D([], [], color=colour, linewidth=5.0) for _, colour in legend]
        figure.legend(
            handles, [name for name, _ in legend], loc="outside upper left", ncols=columns, handlelength=1.0,
            borderpad=0.0, labelspacing=0.35, columnspacing=1.6, handletextpad=0.6,
        )  # fmt: skip
    return figure, list(panels)


def _lines(
    panels: Mapping[str, Sequence[Curve]], xlabel: str, legend: Sequence[tuple[str, str]] = (), height: float = 116.0
) -> tuple[Figure, list[Axes]]:
    """A panel under each title with its curves (x, y, colour, style), through the values that are there."""
    figure, every = _panels(list(panels), legend, [height], columns=1 if len(panels) > 1 else 2)
    for axes, curves in zip(every, panels.values(), strict=True):
        for places, values, colour, style in curves:
            points = [(place, value) for place, value in zip(places, values, strict=True) if value is not None]
            if points:
                axes.plot(*zip(*points, strict=True), color=colour, linestyle=style, marker="o")
    every[-1].set_xlabel(xlabel)
    return figure, every


def _unit(axes: Axes) -> None:
    """A vertical axis of shares."""
    axes.set(ylim=(-0.03, 1.05), yticks=[0, 0.5, 1])


# The rows: one horizontal bar each


def _row_bars(
    rows: Sequence[SummaryRow],
    bars: Sequence[Sequence[tuple[float, str]]],
    ends: Sequence[float],
    unit: str,
) -> tuple[Figure, Axes]:
    """A band for each row, the first on top: its label above stacked bars (value, colour), their sum at the end."""
    bands = max(2, len(rows))
    figure, (axes,) = _panels([""], list(PARTS.items()) if unit == " ms" else (), [44.0 * bands], columns=4)
    limit = 1.25 * max([1.0, *ends])
    for place, (row, members) in enumerate(zip(rows, bars, strict=True)):
        total = 0.0
        for value, colour in members:
            axes.barh(place, value, left=total, height=0.42, color=colour)
            total += value
        failed = "not measured" if row.status == "ok" else "failed: no figure"
        text, colour = (f"{total:.2f}{unit}", INK) if members else (failed, BAD)
        axes.annotate(label(row, rows), (0, place), (1, 16), textcoords="offset points", va="center", in_layout=False)
        axes.text(ends[place] + limit * 0.018, place, text, va="center", color=colour, weight="bold", in_layout=False)
    axes.set(xlim=(0, limit), ylim=(bands - 0.6, -0.6), yticks=[], xlabel="milliseconds per cycle")
    axes.grid(visible=False)
    axes.spines["left"].set_visible(False)
    return figure, axes


def _method_bars(rows: Sequence[SummaryRow], key: str, intervals: Sequence[list[float] | None]) -> Figure:
    """tau or speedup with its interval; a failed row says so and has no bar."""
    values: list[float | None] = [getattr(row, key) for row in rows]
    whiskers = [None if row.method == VANILLA else bounds for row, bounds in zip(rows, intervals, strict=True)]
    colours = [SERIES[at % len(SERIES)] if row.tree else QUIET for at, row in enumerate(rows)]
    bars = [[] if value is None else [(value, colour)] for value, colour in zip(values, colours, strict=True)]
    ends = [max(value or 0.0, bounds[1] if bounds else 0.0) for value, bounds in zip(values, whiskers, strict=True)]
    figure, axes = _row_bars(rows, bars, ends, "×" if key == "speedup" else "")
    axes.set_xlabel("tau (tokens per target forward)" if key == "tau" else "speedup over vanilla")
    axes.axvline(1.0, color=QUIET, linewidth=1.0, linestyle=DASHED, zorder=0)
    for place, bounds in enumerate(whiskers):
        if bounds:
            axes.plot(bounds, [place, place], color=INK, linewidth=1.3, marker="|", markersize=6)
    return figure


def _accepted(rows: Sequence[SummaryRow]) -> dict[str, Figure]:
    """What the MAX_ROWS rows of highest tau had accepted by depth, from their histograms."""
    candidates = [row for row in rows if row.tree and row.target_forwards]
    least = sorted((row.tau or 0.0 for row in candidates), reverse=True)[:MAX_ROWS][-1:]
    chosen = [row for row in candidates if [row.tau or 0.0] >= least][:MAX_ROWS]
    if not chosen:
        return {}
    legend = [(label(row, rows), colour) for row, colour in zip(chosen, SERIES, strict=False)]
    above: list[Curve] = []
    below: list[Curve] = []
    for row, (_, colour) in zip(chosen, legend, strict=True):
        histogram = np.array(row.accepted_histogram)
        reached = histogram[::-1].cumsum()[::-1]  # cycles that keep at least d draft tokens
        enough = np.flatnonzero(reached[:-1] >= MIN_CYCLES)
        above.append((range(1, len(reached)), reached[1:] / reached[0], colour, "-"))
        below.append((enough + 1, reached[enough + 1] / reached[enough], colour, "-"))
    panels = {"P(accepted ≥ d)": above, "P(accepted ≥ d | accepted ≥ d − 1)": below}
    depth, (first, second) = _lines(panels, "draft depth d", legend, 90.0)
    for axes in (first, second):
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        _unit(axes)
    second.set_xlim(first.get_xlim())
    return {"depth": depth}


# Calibration


def _confidence_curves(
    title: str, xlabel: str, curves: Sequence[tuple[str, Sequence[Mapping[str, Any]], str]], least: int = MIN_NODES
) -> tuple[Figure, Axes]:
    """Acceptance against confidence: the curves (name, bins, colour) and the diagonal."""
    drawn: list[Curve] = [([0, 1], [0, 1], MUTED, DASHED)]
    for _, bins, colour in curves:
        filled = [item for item in bins if item["count"] >= least]
        drawn.append(([item["confidence"] for item in filled], [item["acceptance"] for item in filled], colour, "-"))
    legend = [(name, colour) for name, _, colour in curves] if len(curves) > 1 else ()
    figure, (axes,) = _lines({title: drawn}, xlabel, legend, 190.0)
    axes.lines[0].set(marker="", linewidth=1.0)
    _unit(axes)
    axes.set(xlim=(-0.02, 1.02), xticks=[0, 0.25, 0.5, 0.75, 1])
    return figure, axes


def _reliability(calibration: Mapping[str, Any]) -> Figure:
    """Acceptance against confidence in bins, over the nodes of each bin."""
    bins = calibration["bins"]
    curves = [("all prompts", bins, SERIES[0])]
    figure, axes = _confidence_curves("acceptance", "confidence (q of the drafted token)", curves, least=1)
    counts = axes.twinx()
    middles = [(item["low"] + item["high"]) / 2 for item in bins]
    counts.bar(middles, [item["count"] for item in bins], width=0.86 / len(bins), color=QUIET, alpha=0.25)
    counts.set(yscale="log", ylabel="nodes in the bin (bars)")
    counts.grid(visible=False)
    return figure


def _nodes(analysis: Mapping[str, Any]) -> dict[str, Figure]:
    """Pictures of the drafted nodes: calibrators, depths and places in the tree."""
    figures = {}
    if scores := analysis["calibrator"]:
        fits = {"before": QUIET, "temperature": SERIES[1], "isotonic": SERIES[0]}
        held_out = [(fit, scores["held_out"][fit], colour) for fit, colour in fits.items()]
        curves = [(f"{fit}, ECE {one['ece']:.3f}", one["bins"], colour) for fit, one, colour in held_out]
        figures["calibrator"], _ = _confidence_curves("acceptance, held-out half", "confidence", curves)
    if depths := list(zip(analysis["by_depth"][:4], SERIES, strict=False)):
        curves = [(f"depth {one['depth']}, ECE {one['ece']:.3f}", one["bins"], colour) for one, colour in depths]
        figures["by-depth"], _ = _confidence_curves("acceptance", "confidence", curves)
    if places := analysis["positions"]:
        # a box per place over the prompts' own acceptance rates, as EAGLE-2's figure 5 has points
        figures["places"], (axes,) = _panels(["acceptance rate of each prompt"], heights=[170.0])
        names, at = ("whislo", "q1", "med", "q3", "whishi"), range(len(places))
        boxes = [dict(zip(names, one["quartiles"], strict=True)) for one in places]
        axes.bxp(boxes, positions=at, showfliers=False, showcaps=False, medianprops={"color": INK})
        axes.plot(at, [one["acceptance"] for one in places], "o", color=SERIES[0])
        axes.set_xticks(at, [one["position"] for one in places], rotation=60, fontsize=8.5)
        _unit(axes)
    return figures


def _laws(laws: Mapping[str, Any]) -> dict[str, Figure]:
    """Pictures of the draft's laws beside the target's: SVIP's figures 3 and 4."""
    figures = {}
    if laws["bounds"]:
        table = laws["bounds"][-1]
        names = {"acceptance": "acceptance", "oracle": "oracle bound", "approximation": f"1 − √({table['c']:g} H)"}
        names["bretagnolle_huber"] = "Bretagnolle–Huber"
        legend = list(zip(names.values(), (INK, SERIES[1], SERIES[0], SERIES[2]), strict=True))
        figures["bounds"], (axes,) = _panels(["probability"], legend, [190.0])
        for key, (_, colour) in zip(names, legend, strict=True):
            values = table["curve"][key]
            axes.plot(np.linspace(0, 100, len(values)), values, color=colour, linewidth=1.5)
        axes.set(ylim=(-1.05, 1.05), xlabel="laws, by their acceptance probability")
        axes.xaxis.set_major_formatter("{x:g} %")
    colours = {"accepted": SERIES[1], "rejected": SERIES[0]}
    ranks: list[Curve] = [(laws["sorted"]["ranks"], laws["sorted"][key], colours[key], "-") for key in colours]
    panels: dict[str, list[Curve]] = {"KL(q‖p), nats": [], "mean log q of the token of this rank": ranks}
    figures["rejections"], (above, below) = _lines(panels, "rank in the vocabulary", list(colours.items()))
    for row in laws["before_rejection"]:
        if row["kl"] is not None:
            above.bar(row["offset"], row["kl"], width=0.6, color=SERIES[0] if row["offset"] == 0 else SERIES[1])
    above.set(xlabel="place (0: the rejected token)")
    above.xaxis.set_major_locator(MaxNLocator(integer=True))
    below.set_xscale("log", base=4)
    below.xaxis.set_major_formatter("{x:,.0f}")
    return figures


# Sweeps and costs


def _along(panels: Mapping[str, tuple[Sequence[Line], Sequence[str]]], values: Sequence[Any], xlabel: str) -> Figure:
    """A panel each, title -> (lines, keys), over evenly spaced values: the first key solid, the second dashed."""
    lines, _ = next(iter(panels.values()))
    legend = [(line.label, colour) for line, colour in zip(lines, SERIES, strict=False)] if len(lines) > 1 else []
    curves: dict[str, list[Curve]] = {}
    for title, (members, keys) in panels.items():
        curves[title] = []
        for line, colour in zip(members, SERIES, strict=False):
            measured: list[Any] = list(line.points)
            places = [values.index(point.value) for point in measured]
            for key, style in zip(keys, ("-", DASHED), strict=False):
                figures = [getattr(point, key) for point in measured]
                if key.startswith("draft_"):
                    figures = [value and value / one.prompts for value, one in zip(figures, measured, strict=True)]
                curves[title].append((places, figures, colour, style))
    figure, every = _lines(curves, xlabel, legend, 96.0)
    for axes, title in zip(every, curves, strict=True):
        low, high = axes.get_ylim()
        axes.set_ylim(min(low, 1.0) if title.startswith(("tau", "speedup")) else 0.0, high)
        if title.startswith("speedup"):
            axes.axhline(1.0, color=MUTED, linewidth=1.0, linestyle=DASHED)
        axes.yaxis.set_major_formatter("{x:g}")
        axes.set_xlim(-0.4, len(values) - 0.6)
        axes.set_xticks(range(len(values)), [f"{value:g}" if numeric([value]) else str(value) for value in values])
    return figure


def _sweep(grid: Grid) -> Figure:
    """Tau and speedup by the value of a setting; for depths also the draft forwards, the wasted ones among them."""
    of_depth = (grid.picture or "").startswith("sweep-depths")
    panels: dict[str, tuple[Sequence[Line], Sequence[str]]] = {"tau": (grid.lines, ["tau"])}
    if of_depth:
        spent = ("draft_forwards", "draft_forwards_wasted")
        panels["draft forwards per prompt (dashed: wasted)"] = (grid.lines, spent)
    panels["speedup over vanilla"] = (grid.lines, ["speedup"])
    return _along(panels, grid.values, "largest depth" if of_depth else grid.key)


def _contexts(cumulative: Grid, bucket: Grid) -> Figure:
    """Speedup and tau along the context of the rows that get furthest the fastest."""
    ends = [(len(line.points), line.points[-1].speedup or 0.0) for line in cumulative.lines]
    chosen = sorted(sorted(range(len(ends)), key=lambda at: ends[at], reverse=True)[: len(SERIES)])
    panels = {
        "speedup from the start to a length": ([cumulative.lines[at] for at in chosen], ["speedup"]),
        "tau between a length and the one before": ([bucket.lines[at] for at in chosen], ["tau"]),
    }
    return _along(panels, cumulative.values, "tokens, the prompt included")


def _cost_curves(heads: Sequence[Mapping[str, Any]]) -> Figure:
    """v(N) above, and a further draft level by its width below: a line for each head."""
    legend = [(str(head["kind"]), SERIES[at % len(SERIES)]) for at, head in enumerate(heads)]
    verify: list[Curve] = []
    draft: list[Curve] = []
    for head, (_, colour) in zip(heads, legend, strict=True):
        nodes, widths = (sorted(head["costs_ms"][part], key=int) for part in ("verify", "draft"))
        verify.append(([int(n) for n in nodes], [head["costs_ms"]["verify"][n] for n in nodes], colour, "-"))
        draft.append(([int(k) for k in widths], [head["costs_ms"]["draft"][k][1] for k in widths], colour, "-"))
    panels = {"v(N): ms of a target forward by nodes with the root": verify, "ms of one more draft level": draft}
    figure, every = _lines(panels, "k: expanded nodes of the level", legend)
    for axes in every:
        axes.set(xlim=(0, None), ylim=(0, None))
    return figure
