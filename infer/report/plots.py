"""Colours of the report's pictures: matplotlib draws with stand-ins that become CSS variables, for light and dark."""

import io
import re
from collections.abc import Callable, Sequence
from typing import Any

from aerie.configs.errors import UserError
from aerie.infer.report.papers import Contexts, Depths, Line, Traced, chains_of, numeric, values_of
from aerie.infer.report.tables import label, ms_per_cycle, sampling_text, tree_text

try:
    from matplotlib import rc_context
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure
except ImportError as error:
    raise UserError(f"report: matplotlib cannot be imported ({error}); pip install aerie[report]") from error

# colours that matplotlib writes and themed() turns into variables; each must be unique in the SVG
INK, MUTED, GRID, SURFACE, BAD, QUIET = "#000001", "#000002", "#000003", "#000004", "#000005", "#000006"
SERIES = ("#000011", "#000012", "#000013", "#000014", "#000015", "#000016")
VARIABLES = {
    INK: "ink", MUTED: "muted", GRID: "grid", SURFACE: "surface", BAD: "bad", QUIET: "quiet",
    **{colour: f"series-{number}" for number, colour in enumerate(SERIES, start=1)},
}  # fmt: skip
LIGHT = {
    "ink": "#1c2127", "muted": "#626a75", "grid": "#e3e0d8", "surface": "#ffffff", "bad": "#b3261e",
    "quiet": "#98a1ae", "series-1": "#c2570c", "series-2": "#0f766e", "series-3": "#5b4fc4", "series-4": "#b7931a",
    "series-5": "#b03a73", "series-6": "#2f6fb5",
}  # fmt: skip
DARK = {
    "ink": "#ebe8e1", "muted": "#9ca5b1", "grid": "#2c333d", "surface": "#171b21", "bad": "#ff8a80",
    "quiet": "#6b7686", "series-1": "#f2a65a", "series-2": "#45bdae", "series-3": "#a79bff", "series-4": "#e3cf6b",
    "series-5": "#f08cb8", "series-6": "#7db6f2",
}  # fmt: skip
RC = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 10.5,
    "svg.fonttype": "none",  # text stays text: selectable, and in the page's own font
    "svg.hashsalt": "aerie",  # same data, same bytes
    "text.color": INK,
    "axes.edgecolor": GRID,
    "axes.labelcolor": MUTED,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "lines.linewidth": 2.0,
    "legend.frameon": False,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
}


def themed(figure: Figure, name: str) -> str:
    """The figure as an <svg> element without size: ids prefixed with name, colours as var(--...)."""
    buffer = io.StringIO()
    with rc_context(RC):
        FigureCanvasSVG(figure).print_svg(buffer, metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    head, rest = text.split(">", 1)
    box = re.search(r'viewBox="[^"]+"', head)
    assert box is not None
    text = f'<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" {box.group()}>{rest}'
    text = re.sub(r'\bid="', f'id="{name}-', text)
    text = re.sub(r'href="#', f'href="#{name}-', text).replace("url(#", f"url(#{name}-")
    for colour, variable in VARIABLES.items():
        text = text.replace(colour, f"var(--{variable})")
    return text.replace("'DejaVu Sans'", "var(--sans, 'DejaVu Sans')").strip() + "\n"


def standalone(svg: str) -> str:
    """The same picture as a file of its own: with the palettes of light and dark and a background."""
    light = "".join(f"--{name}:{value};" for name, value in LIGHT.items())
    dark = "".join(f"--{name}:{value};" for name, value in DARK.items())
    style = (
        f"<style>svg{{{light}background:var(--surface);font-family:sans-serif}}"
        f"@media(prefers-color-scheme:dark){{svg{{{dark}}}}}</style>"
    )
    head, rest = svg.split(">", 1)
    return f'<?xml version="1.0" encoding="utf-8"?>\n{head}>{style}{rest}'


try:
    from matplotlib import rc_context
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator
except ImportError as error:
    raise UserError(f"report: matplotlib cannot be imported ({error}); pip install aerie[report]") from error

WIDTH = 332.0
POINTS = 72.0  # units per inch: one SVG unit is one point
LEFT, RIGHT, BOTTOM = 42.0, 8.0, 38.0  # units around axes that have ticks
MAX_SERIES = 4
MIN_CYCLES = 10  # a share of fewer cycles is not drawn
PARTS = ("draft", "verify", "commit", "other")
PART_COLOURS = (SERIES[3], SERIES[5], SERIES[4], QUIET)


def pictures(
    rows: Sequence[dict[str, Any]], tau_intervals: Sequence[list[float] | None], calibration: dict[str, Any] | None
) -> dict[str, str]:
    """Every picture that the rows and the calibration allow, name -> SVG text."""
    with rc_context(RC):
        found = {
            "tau": method_bars(rows, "tau", tau_intervals),
            "speedup": method_bars(rows, "speedup", [row.get("speedup_ci95") for row in rows]),
            "milliseconds": cycle_milliseconds(rows),
        }
        if drafting_rows(rows):
            found["depth"] = acceptance_by_depth(rows)
            found["lengths"] = accepted_lengths(rows)
        if calibration is not None and calibration["nodes"]:
            found["reliability"] = reliability_curve(calibration)
    return found


def method_bars(rows: Sequence[dict[str, Any]], key: str, intervals: Sequence[list[float] | None]) -> str:
    """One horizontal bar per row for row[key] (tau or speedup) with its interval; a failed row says so and has none."""
    figure, axes = _row_axes(len(rows))
    values = [row.get(key) for row in rows]
    tops = [bounds[1] for bounds in intervals if bounds is not None]
    limit = max([1.0, *(value for value in values if value is not None), *tops]) * 1.18
    colours = row_colours(rows)
    for position, (row, value, bounds) in enumerate(zip(rows, values, intervals, strict=True)):
        _row_label(axes, row, position, rows)
        if value is None:
            _no_bar(axes, row, position)
            continue
        axes.barh(position, value, height=0.42, color=colours[position])
        end = value
        if bounds is not None and row["method"] != "vanilla":
            axes.plot(bounds, [position, position], color=INK, linewidth=1.3, marker="|", markersize=6)
            end = max(value, bounds[1])
        text = f"{value:.2f}" + ("×" if key == "speedup" else "")
        axes.text(end + limit * 0.018, position, text, va="center", ha="left", fontweight="bold")
        axes.plot([1.0, 1.0], [position - 0.24, position + 0.24], color=INK, linewidth=1.0, linestyle=(0, (2, 2)))
    axes.set_xlim(0, limit)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_xlabel("tau (tokens per target forward)" if key == "tau" else "speedup over vanilla")
    return themed(figure, key)


def acceptance_by_depth(rows: Sequence[dict[str, Any]]) -> str:
    """P(accepted length >= d) and the same given d - 1, for the rows of highest tau, from their histograms."""
    chosen = drafting_rows(rows)
    colours = drafting_colours(rows)
    figure, top = _with_legend([label(row, rows) for row in chosen], colours, 286.0)
    panel = (top - 20.0 - 34.0 - BOTTOM) / 2
    above = _axes(figure, BOTTOM + panel + 34.0, panel)
    below = _axes(figure, BOTTOM, panel)
    for row, colour in zip(chosen, colours, strict=True):
        histogram = row["accepted_histogram"]
        depths = range(1, len(histogram))
        reached = [sum(histogram[depth:]) for depth in range(len(histogram))]
        above.plot(depths, [reached[d] / reached[0] for d in depths], color=colour, marker="o", markersize=4)
        enough = [depth for depth in depths if reached[depth - 1] >= MIN_CYCLES]
        below.plot(enough, [reached[d] / reached[d - 1] for d in enough], color=colour, marker="o", markersize=4)
    for axes, name in ((above, "P(accepted ≥ d)"), (below, "P(accepted ≥ d | accepted ≥ d − 1)")):
        axes.set_ylim(0, 1.05)
        axes.set_yticks([0, 0.5, 1])
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_title(name, loc="left", fontsize=10.5, color=MUTED, pad=6)
    below.set_xlim(above.get_xlim())
    above.tick_params(labelbottom=False)
    below.set_xlabel("draft depth d")
    return themed(figure, "depth")


def accepted_lengths(rows: Sequence[dict[str, Any]]) -> str:
    """Share of cycles by number of accepted draft tokens, side by side for the rows of highest tau."""
    chosen = drafting_rows(rows)
    colours = drafting_colours(rows)
    figure, top = _with_legend([label(row, rows) for row in chosen], colours, 286.0)
    axes = _axes(figure, BOTTOM, top - BOTTOM - 6.0)
    width = 0.84 / len(chosen)
    for number, (row, colour) in enumerate(zip(chosen, colours, strict=True)):
        histogram = row["accepted_histogram"]
        offset = (number - (len(chosen) - 1) / 2) * width
        shares = [100 * count / sum(histogram) for count in histogram]
        axes.bar([length + offset for length in range(len(histogram))], shares, width=width * 0.9, color=colour)
    axes.grid(visible=False, axis="x")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(nbins=5, integer=True, steps=[1, 2, 5, 10]))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0f} %"))
    axes.set_xlabel("accepted draft tokens in a cycle")
    return themed(figure, "lengths")


def reliability_curve(calibration: dict[str, Any]) -> str:
    """Acceptance against confidence in bins with the diagonal, and how many nodes are in each bin (log scale)."""
    figure, top = _with_legend(["all prompts", "fit half", "held-out half"], SERIES, 318.0, columns=3)
    counts = _axes(figure, BOTTOM, 52.0)
    curve = _axes(figure, BOTTOM + 80.0, top - BOTTOM - 80.0 - 22.0)
    curve.plot([0, 1], [0, 1], color=MUTED, linewidth=1.0, linestyle=(0, (3, 3)))
    halves = calibration["halves"]
    series = [
        (halves["fit"], SERIES[1], 4.0, ""),
        (halves["held_out"], SERIES[2], 4.0, ""),
        (calibration, SERIES[0], 5, "-"),
    ]
    for part, colour, size, line in series:
        filled = [item for item in part["bins"] if item["count"]]
        points = [item["confidence"] for item in filled], [item["acceptance"] for item in filled]
        curve.plot(*points, color=colour, linestyle=line, marker="o", markersize=size)
    filled = [item for item in calibration["bins"] if item["count"]]
    middles = [(item["low"] + item["high"]) / 2 for item in filled]
    widths = [(item["high"] - item["low"]) * 0.86 for item in filled]
    counts.bar(middles, [item["count"] for item in filled], width=widths, color=QUIET)
    counts.set_yscale("log")
    counts.set_ylim(bottom=0.8)
    counts.yaxis.set_major_locator(LogLocator(numticks=4))
    counts.yaxis.set_major_formatter(
        FuncFormatter(lambda value, _: f"{value:,.0f}" if value < 1e4 else f"{value / 1e3:,.0f}k")
    )
    counts.minorticks_off()
    curve.set_ylim(-0.02, 1.05)
    curve.set_yticks([0, 0.5, 1])
    for axes, name in ((curve, "acceptance"), (counts, "nodes in the bin")):
        axes.set_xlim(-0.02, 1.02)
        axes.set_xticks([0, 0.25, 0.5, 0.75, 1])
        axes.set_title(name, loc="left", fontsize=10.5, color=MUTED, pad=6)
    curve.tick_params(labelbottom=False)
    counts.set_xlabel("confidence (q of the drafted token)")
    return themed(figure, "reliability")


def cycle_milliseconds(rows: Sequence[dict[str, Any]]) -> str:
    """One stacked horizontal bar per row: decode milliseconds of a mean cycle by part."""
    figure, axes = _row_axes(len(rows), legend=PARTS)
    limit = max([sum(ms_per_cycle(row).values()) for row in rows] + [1e-9]) * 1.18
    for position, row in enumerate(rows):
        _row_label(axes, row, position, rows)
        parts = ms_per_cycle(row)
        if not parts:
            _no_bar(axes, row, position)
            continue
        left = 0.0
        for part, colour in zip(PARTS, PART_COLOURS, strict=True):
            axes.barh(position, parts[part], left=left, height=0.42, color=colour, edgecolor=SURFACE, linewidth=0.8)
            left += parts[part]
        axes.text(left + limit * 0.018, position, f"{left:.1f}", va="center", ha="left", fontweight="bold")
    axes.set_xlim(0, limit)
    axes.set_xlabel("milliseconds per cycle")
    return themed(figure, "milliseconds")


def drafting_rows(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows that pictures by depth show: the MAX_SERIES of highest tau, in the table's order; no failed one."""
    candidates = [row for row in rows if row["status"] == "ok" and row["tree"] is not None and row["target_forwards"]]
    best = sorted(candidates, key=lambda row: -row["tau"])[:MAX_SERIES]
    return [row for row in candidates if any(row is other for other in best)]


def row_colours(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The quiet colour for vanilla, one for every row that drafts, the same in every picture and sampling."""
    counts: dict[str, int] = {}
    found = []
    for row in rows:
        drafts = row["tree"] is not None and row["status"] == "ok"
        number = counts.get(sampling_text(row), 0)
        counts[sampling_text(row)] = number + drafts
        found.append(SERIES[number % len(SERIES)] if drafts else QUIET)
    return found


def drafting_colours(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Colours of drafting_rows: those of row_colours, unless two rows of a long table would share one."""
    chosen = drafting_rows(rows)
    found = [
        colour for row, colour in zip(rows, row_colours(rows), strict=True) if any(row is other for other in chosen)
    ]
    return found if len(set(found)) == len(found) else list(SERIES[: len(found)])


def _axes(figure: Figure, bottom: float, height: float) -> Axes:
    """Axes with ticks, over the whole width, at a bottom and height in units."""
    total = figure.get_figheight() * POINTS
    return figure.add_axes((LEFT / WIDTH, bottom / total, 1.0 - (LEFT + RIGHT) / WIDTH, height / total))


def _with_legend(names: Sequence[str], colours: Sequence[str], height: float, columns: int = 1) -> tuple[Figure, float]:
    """A figure of this height plus its legend on top, and the height in units below which axes may be."""
    lines = -(-len(names) // columns)
    total = height + 16.0 * lines
    figure = Figure(figsize=(WIDTH / POINTS, total / POINTS), dpi=POINTS)
    handles = [Line2D([], [], color=colour, linewidth=5.0) for colour in colours[: len(names)]]
    figure.legend(
        handles, names, loc="upper left", bbox_to_anchor=(0.0, 1.0), ncols=columns, handlelength=1.0, borderpad=0.0,
        borderaxespad=0.2, labelspacing=0.35, columnspacing=1.6, handletextpad=0.6,
    )  # fmt: skip
    return figure, height - 4.0


def _row_axes(num_rows: int, legend: Sequence[str] = ()) -> tuple[Figure, Axes]:
    """Axes with one 44-unit band per row, the first on top, room for a label above each bar."""
    bands = max(2, num_rows)
    height = bands * 44.0 + BOTTOM + 10.0
    if legend:
        figure, _ = _with_legend(legend, PART_COLOURS, height, columns=len(legend))
    else:
        figure = Figure(figsize=(WIDTH / POINTS, height / POINTS), dpi=POINTS)
    total = figure.get_figheight() * POINTS
    axes = figure.add_axes((5.0 / WIDTH, BOTTOM / total, 1.0 - 10.0 / WIDTH, bands * 44.0 / total))
    axes.set_ylim(bands - 0.6, -0.6)
    axes.set_yticks([])
    axes.grid(visible=False)
    axes.spines["left"].set_visible(False)
    return figure, axes


def _row_label(axes: Axes, row: dict[str, Any], position: int, rows: Sequence[dict[str, Any]]) -> None:
    words = [] if row["tree"] is None else [tree_text(row)]
    if len({sampling_text(other) for other in rows}) > 1:
        words.append(f"T {sampling_text(row)}")
    _beside(axes, row["method"], position, (1.0, 16.0), INK, "bold")
    _beside(axes, ", ".join(words), position, (10.0 + 6.6 * len(row["method"]), 16.0), MUTED)


def _no_bar(axes: Axes, row: dict[str, Any], position: int) -> None:
    text = "failed: no figure" if row["status"] != "ok" else "not measured"
    _beside(axes, text, position, (1.0, 0.0), BAD)


def _beside(
    axes: Axes, text: str, position: int, offset: tuple[float, float], colour: str, weight: str = "normal"
) -> None:
    """Text at an offset in units from the left end of the bar at position."""
    axes.annotate(
        text, (0, position), xytext=offset, textcoords="offset points", va="center", color=colour, fontweight=weight
    )


try:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
except ImportError as error:
    raise UserError(f"report: matplotlib cannot be imported ({error}); pip install aerie[report]") from error

TITLE = 22.0  # units above each panel
BETWEEN = 24.0  # below each panel but the last, for its ticks
LINE = 16.0  # of the legend


def stacked(
    titles: Sequence[str], legend: Sequence[tuple[str, str]] = (), panel: float = 116.0, columns: int = 2
) -> tuple[Figure, list[Axes]]:
    """A figure with one panel per title, the first on top, below a legend of (name, colour)."""
    lines = -(-len(legend) // columns)
    above = LINE * lines + (4.0 if legend else 0.0)
    total = above + len(titles) * (TITLE + panel) + (len(titles) - 1) * BETWEEN + BOTTOM
    figure = Figure(figsize=(WIDTH / POINTS, total / POINTS), dpi=POINTS)
    if legend:
        handles = [Line2D([], [], color=colour, linewidth=5.0) for _, colour in legend]
        figure.legend(
            handles, [name for name, _ in legend], loc="upper left", bbox_to_anchor=(0.0, 1.0), ncols=columns,
            handlelength=1.0, borderpad=0.0, borderaxespad=0.2, labelspacing=0.35, columnspacing=1.6,
            handletextpad=0.6,
        )  # fmt: skip
    found = []
    top = total - above
    for title in titles:
        bottom = top - TITLE - panel
        left, width = LEFT / WIDTH, 1.0 - (LEFT + RIGHT) / WIDTH
        axes = figure.add_axes((left, bottom / total, width, panel / total))
        axes.set_title(title, loc="left", fontsize=10.5, color=MUTED, pad=6)
        found.append(axes)
        top = bottom - BETWEEN
    return figure, found


try:
    from matplotlib import rc_context
    from matplotlib.axes import Axes
    from matplotlib.ticker import FuncFormatter, MaxNLocator
except ImportError as error:
    raise UserError(f"report: matplotlib cannot be imported ({error}); pip install aerie[report]") from error

MAX_CURVES = 4
MIN_NODES = 10  # a mean of fewer is not drawn
DASHED = (0, (3, 3))
NAMES = ("calibrator", "by-depth", "places", "branches", "levels", "bounds", "ratio", "by-c", "rejections", "oracle")


def calibration_pictures(analysis: dict[str, Any]) -> dict[str, str]:
    """Every picture that the analysis allows, name -> SVG text; the names start with calibration-."""
    laws, oracle = analysis["laws"], analysis["oracle"]
    wanted: dict[str, tuple[Any, Callable[[Any], str]]] = {
        "calibrator": (analysis["calibrator"], before_and_after),
        "by-depth": (analysis["by_depth"], curves_by_depth),
        "places": (analysis["positions"], acceptance_by_place),
        "branches": (analysis["branches"] and analysis["branches"]["nodes"] and analysis["branches"], branch_curve),
        "levels": (analysis["levels"] and analysis["levels"]["by_depth"], mass_by_depth),
        "bounds": (laws and laws["bounds"], sorted_bounds),
        "ratio": (laws and laws["ratio"]["laws"] and laws["ratio"], ratio_histogram),
        "by-c": (laws and laws["by_c"], shares_by_c),
        "rejections": (laws, around_rejections),
        "oracle": (oracle and oracle["by_context"], oracle_by_context),
    }
    with rc_context(RC):
        return {f"calibration-{name}": draw(value) for name, (value, draw) in wanted.items() if value}


def before_and_after(scores: dict[str, Any]) -> str:
    """Acceptance against confidence of the held-out half: the head's own, and after each fit."""
    held_out = scores["held_out"]
    legend = [
        (f"{name}, ECE {held_out[key]['ece']:.3f}", colour)
        for name, key, colour in (
            ("before", "before", QUIET),
            ("temperature", "temperature", SERIES[1]),
            ("isotonic", "isotonic", SERIES[0]),
        )
    ]
    figure, (axes,) = stacked(["acceptance, held-out half"], legend, panel=190.0)
    _diagonal(axes, "confidence")
    for (_, colour), key in zip(legend, ("before", "temperature", "isotonic"), strict=True):
        _curve(axes, held_out[key]["bins"], colour)
    return themed(figure, "calibration-calibrator")


def curves_by_depth(rows: list[dict[str, Any]]) -> str:
    """Acceptance against confidence at the shallowest depths."""
    shown = rows[:MAX_CURVES]
    legend = [(f"depth {row['depth']}, ECE {row['ece']:.3f}", SERIES[place]) for place, row in enumerate(shown)]
    figure, (axes,) = stacked(["acceptance"], legend, panel=190.0)
    _diagonal(axes, "confidence")
    for row, (_, colour) in zip(shown, legend, strict=True):
        _curve(axes, row["bins"], colour)
    return themed(figure, "calibration-by-depth")


def acceptance_by_place(rows: list[dict[str, Any]]) -> str:
    """A box per place of the tree over the prompts' own acceptance rates, as EAGLE-2's figure 5 has points."""
    figure, (axes,) = stacked(["acceptance rate of each prompt"], panel=170.0)
    for place, row in enumerate(rows):
        low, first, middle, third, high = row["quartiles"]
        axes.plot([place, place], [low, high], color=QUIET, linewidth=1.2)
        axes.bar(place, third - first, bottom=first, width=0.6, color=SERIES[5], alpha=0.55)
        axes.plot([place - 0.3, place + 0.3], [middle, middle], color=INK, linewidth=1.6)
        axes.plot([place], [row["acceptance"]], marker="o", markersize=4, color=SERIES[0], linestyle="")
    axes.set_xticks(range(len(rows)), [row["position"] for row in rows], rotation=60, fontsize=8.5)
    axes.tick_params(axis="x", pad=1)
    axes.set_ylim(-0.03, 1.05)
    axes.set_yticks([0, 0.5, 1])
    return themed(figure, "calibration-places")


def branch_curve(branches: dict[str, Any]) -> str:
    """How often a whole branch of the frontier is accepted, against its survival."""
    figure, (axes,) = stacked(["whole branch accepted"], panel=190.0)
    _diagonal(axes, "survival of the branch (product of q)")
    _curve(axes, branches["bins"], SERIES[0])
    return themed(figure, "calibration-branches")


def mass_by_depth(rows: list[dict[str, Any]]) -> str:
    """S_d beside how often the frontier, and the verified tree, holds what the target writes."""
    series = (
        ("S_d", "mass", QUIET),
        ("held by the frontier", "held", SERIES[1]),
        ("accepted ≥ d", "reached", SERIES[0]),
    )
    figure, (axes,) = stacked(["share of cycles"], [(name, colour) for name, _, colour in series], panel=170.0)
    depths = [row["depth"] for row in rows]
    for _, key, colour in series:
        axes.plot(depths, [row[key] for row in rows], color=colour, marker="o", markersize=4)
    axes.set_ylim(-0.03, 1.05)
    axes.set_yticks([0, 0.5, 1])
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("draft depth d")
    return themed(figure, "calibration-levels")


def sorted_bounds(tables: list[dict[str, Any]]) -> str:
    """The acceptance probability of every law, in order, and its lower bounds (SVIP, figure 4)."""
    table = tables[-1]
    series = (
        ("acceptance", "acceptance", INK),
        ("oracle bound", "oracle", SERIES[1]),
        (f"1 − √({table['c']:g} H)", "approximation", SERIES[0]),
        ("Bretagnolle–Huber", "bretagnolle_huber", SERIES[2]),
    )
    figure, (axes,) = stacked(["probability"], [(name, colour) for name, _, colour in series], panel=190.0)
    for _, key, colour in reversed(series):
        values = table["curve"][key]
        places = [100.0 * place / max(1, len(values) - 1) for place in range(len(values))]
        axes.plot(places, values, color=colour, linewidth=2.0 if key == "acceptance" else 1.0)
    axes.set_ylim(-1.05, 1.05)
    axes.set_yticks([-1, -0.5, 0, 0.5, 1])
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g} %"))
    axes.set_xlabel("laws, by their acceptance probability")
    return themed(figure, "calibration-bounds")


def ratio_histogram(ratio: dict[str, Any]) -> str:
    """The entropy ratio - 1 of the laws, and the Gamma law fitted to it (SVIP, appendix C)."""
    legend = [("laws", SERIES[5])] + ([("Gamma fit", INK)] if ratio["expected"] else [])
    figure, (axes,) = stacked(["share of laws"], legend, panel=150.0)
    edges, counts = ratio["edges"], ratio["counts"]
    width = edges[1] - edges[0]
    middles = [edge + width / 2 for edge in edges]
    axes.bar(middles, [100 * count / ratio["laws"] for count in counts], width=width * 0.86, color=SERIES[5])
    if ratio["expected"]:
        shares = [100 * count / ratio["laws"] for count in ratio["expected"]]
        axes.plot(middles, shares, color=INK, linewidth=1.4, marker="o", markersize=2.5)
    axes.set_xticks([0, 1, 2, 3, 4, 5], ["0", "1", "2", "3", "4", "≥5"])
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0f} %"))
    axes.set_xlabel("entropy ratio − 1 = KL(q‖p) ÷ H(q)")
    return themed(figure, "calibration-ratio")


def shares_by_c(rows: list[dict[str, Any]]) -> str:
    """How often the approximation keeps its promise as c varies, and how much of it is left."""
    series = (
        ("holds for the acceptance", "holds", SERIES[0]),
        ("below the oracle bound", "conservative", SERIES[1]),
        ("the same by the Gamma fit", "gamma", SERIES[2]),
        ("its mean", "bound", QUIET),
    )
    figure, (axes,) = stacked(["share of laws"], [(name, colour) for name, _, colour in series], panel=170.0, columns=1)
    for _, key, colour in series:
        points = [(row["c"], row[key]) for row in rows if row[key] is not None]
        axes.plot([c for c, _ in points], [value for _, value in points], color=colour, marker="o", markersize=3.5)
    axes.set_xscale("log")
    axes.set_xticks([0.02, 0.05, 0.1, 0.2, 0.5, 1, 2], ["0.02", "0.05", "0.1", "0.2", "0.5", "1", "2"])
    axes.minorticks_off()
    axes.set_ylim(-0.03, 1.05)
    axes.set_yticks([0, 0.5, 1])
    axes.set_xlabel("c")
    return themed(figure, "calibration-by-c")


def around_rejections(laws: dict[str, Any]) -> str:
    """KL(q||p) at a rejected token and before it, and the sorted laws of accepted and rejected tokens (figure 3)."""
    legend = [("accepted", SERIES[1]), ("rejected", SERIES[0])]
    figure, (above, below) = stacked(["KL(q‖p), nats", "mean log q of the token of this rank"], legend)
    rows = [row for row in laws["before_rejection"] if row["kl"] is not None]
    colours = [SERIES[0] if row["offset"] == 0 else SERIES[1] for row in rows]
    above.bar([row["offset"] for row in rows], [row["kl"] for row in rows], width=0.6, color=colours, edgecolor=SURFACE)
    above.set_xticks([row["offset"] for row in rows], [_place(row["offset"]) for row in rows], fontsize=9)
    above.grid(visible=False, axis="x")
    for key, colour in (("accepted", SERIES[1]), ("rejected", SERIES[0])):
        points = [(r, v) for r, v in zip(laws["sorted"]["ranks"], laws["sorted"][key], strict=True) if v is not None]
        below.plot([rank for rank, _ in points], [v for _, v in points], color=colour, marker="o", markersize=3.5)
    below.set_xscale("log", base=4)
    below.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    below.minorticks_off()
    below.set_xlabel("rank in the vocabulary")
    return themed(figure, "calibration-rejections")


def oracle_by_context(rows: list[dict[str, Any]]) -> str:
    """The oracle draft length's variance, and proposed minus oracle, by context length (SVIP, figures 1 and 7b)."""
    shown = [row for row in rows if row["cycles"] >= MIN_NODES] or rows
    figure, (above, below) = stacked(["variance of the oracle draft length", "proposed − oracle, tokens"])
    places = range(len(shown))
    above.plot(places, [row["variance"] for row in shown], color=SERIES[0], marker="o", markersize=4)
    above.set_ylim(bottom=0)
    below.plot(places, [row["delta"] for row in shown], color=SERIES[1], marker="o", markersize=4)
    below.axhline(0.0, color=MUTED, linewidth=1.0, linestyle=DASHED)
    names = [f">{row['above']:,}" if row["up_to"] is None else f"≤{row['up_to']:,}" for row in shown]
    above.set_xticks(places, [""] * len(shown))
    below.set_xticks(places, names)
    below.set_xlabel("tokens before the draft, the prompt included")
    return themed(figure, "calibration-oracle")


def _place(offset: int) -> str:
    return "rejected" if offset == 0 else f"{offset}".replace("-", "−")


def _diagonal(axes: Axes, name: str) -> None:
    axes.plot([0, 1], [0, 1], color=MUTED, linewidth=1.0, linestyle=DASHED)
    axes.set_xlim(-0.02, 1.02)
    axes.set_ylim(-0.02, 1.05)
    axes.set_xticks([0, 0.25, 0.5, 0.75, 1])
    axes.set_yticks([0, 0.5, 1])
    axes.set_xlabel(name)


def _curve(axes: Axes, bins: list[dict[str, Any]], colour: str) -> None:
    filled = [item for item in bins if item["count"] >= MIN_NODES]
    points = [item["confidence"] for item in filled], [item["acceptance"] for item in filled]
    axes.plot(*points, color=colour, marker="o", markersize=4)


try:
    from matplotlib import rc_context
    from matplotlib.axes import Axes
    from matplotlib.ticker import FuncFormatter
except ImportError as error:
    raise UserError(f"report: matplotlib cannot be imported ({error}); pip install aerie[report]") from error

PANEL = 96.0


def depth_picture(name: str, table: Depths) -> str:
    """Tau, draft forwards with the wasted ones among them (dashed), and speedup, by the largest depth."""
    titles = ["tau", "draft forwards per prompt (dashed: wasted)", "speedup over vanilla"]
    with rc_context(RC):
        figure, (tau, forwards, speed) = stacked(titles, _legend(table.lines), panel=PANEL)
        for line, colour in zip(table.lines, SERIES, strict=False):
            _draw(tau, line, colour, table.depths, "tau")
            for key, style in (("draft_forwards", "-"), ("draft_forwards_wasted", (0, (3, 3)))):
                _draw(forwards, line, colour, table.depths, key, style, per_prompt=True)
            _draw(speed, line, colour, table.depths, "speedup")
        _axis([tau, forwards, speed], table.depths, "largest depth")
        forwards.set_ylim(bottom=0)
        return themed(figure, name)


def value_picture(name: str, key: str, lines: Sequence[Line]) -> str:
    """Tau above and speedup below, by the value of a setting."""
    values = values_of(lines)
    with rc_context(RC):
        figure, (tau, speed) = stacked(["tau", "speedup over vanilla"], _legend(lines), panel=PANEL)
        for line, colour in zip(lines, SERIES, strict=False):
            _draw(tau, line, colour, values, "tau")
            _draw(speed, line, colour, values, "speedup")
        _axis([tau, speed], values, key)
        return themed(figure, name)


def context_picture(name: str, contexts: Contexts) -> str:
    """Speedup up to each length, and tau of each bucket, of the rows that are fastest at the greatest length."""
    lengths = list(contexts.lengths)
    with rc_context(RC):
        places = _fastest(contexts)
        shown = [contexts.cumulative[place] for place in places]
        titles = ["speedup from the start to a length", "tau between a length and the one before"]
        figure, (speed, tau) = stacked(titles, _legend(shown), panel=PANEL, columns=1)
        for place, colour in zip(places, SERIES, strict=False):
            _draw(speed, contexts.cumulative[place], colour, lengths, "speedup")
            _draw(tau, contexts.bucket[place], colour, lengths, "tau")
        _axis([speed, tau], lengths, "tokens, the prompt included")
        return themed(figure, name)


def draft_picture(name: str, contexts: Contexts) -> str:
    """A chain's mean draft length, and the share of it that is accepted, of each bucket of context."""
    lengths, lines = list(contexts.lengths), chains_of(contexts)
    with rc_context(RC):
        titles = ["drafted tokens per cycle", "accepted share of the drafted tokens"]
        figure, (length, rate) = stacked(titles, _legend(lines), panel=PANEL, columns=1)
        for line, colour in zip(lines, SERIES, strict=False):
            _draw(length, line, colour, lengths, "draft_length")
            _draw(rate, line, colour, lengths, "accept_rate")
        _axis([length, rate], lengths, "tokens, the prompt included")
        length.set_ylim(bottom=0)
        rate.set_ylim(0.0, 1.0)
        return themed(figure, name)


def trace_picture(name: str, table: Traced) -> str:
    """A panel for each rule: what every cycle of one answer drafted (light) and had accepted (dark)."""
    with rc_context(RC):
        titles = [f"drafted tokens, {trace.rule}" for trace in table.traces]
        figure, panels = stacked(titles, [("drafted", SERIES[1]), ("accepted", SERIES[0])], panel=62.0)
        highest = max(max(trace.drafted) for trace in table.traces)
        end = max(trace.begins[-1] for trace in table.traces) + 1
        for axes, trace in zip(panels, table.traces, strict=True):
            axes.vlines(trace.begins, 0, trace.drafted, color=SERIES[1], linewidth=2.0)
            axes.vlines(trace.begins, 0, trace.accepted, color=SERIES[0], linewidth=2.0)
            axes.set_xlim(0, end)
            axes.set_ylim(0, highest + 1)
        panels[-1].set_xlabel("new tokens so far, at the cycle’s start")
        return themed(figure, name)


def _fastest(contexts: Contexts) -> list[int]:
    """The places of as many lines as there are colours, in the table's order; those that get furthest come first."""
    ends = [(len(line.points), line.points[-1].get("speedup") or 0.0) for line in contexts.cumulative]
    return sorted(sorted(range(len(ends)), key=lambda place: ends[place], reverse=True)[: len(SERIES)])


def _legend(lines: Sequence[Line]) -> list[tuple[str, str]]:
    return [(line.label, colour) for line, colour in zip(lines, SERIES, strict=False)] if len(lines) > 1 else []


def _draw(
    axes: Axes, line: Line, colour: str, values: Sequence[Any], key: str, style: Any = "-", per_prompt: bool = False
) -> None:
    """A line's figure at its values; points that failed or were not measured are left out."""
    points = [
        (values.index(point["value"]), point[key] / (point["prompts"] if per_prompt else 1))
        for point in line.points
        if point.get(key) is not None
    ]
    axes.plot(*zip(*points, strict=True), color=colour, linestyle=style, marker="o", markersize=4) if points else None


def _axis(panels: Sequence[Axes], values: Sequence[Any], name: str) -> None:
    """Evenly spaced values on every panel, named on the lowest."""
    for axes in panels:
        axes.set_xticks(range(len(values)), [""] * len(values))
        axes.set_xlim(-0.4, len(values) - 0.6)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        low, high = axes.get_ylim()
        axes.set_ylim(min(low, 1.0), high)
        if "speedup" in axes.get_title(loc="left"):
            axes.axhline(1.0, color=MUTED, linewidth=1.0, linestyle=(0, (2, 2)))
    texts = [f"{value:g}" if numeric([value]) else str(value) for value in values]
    panels[-1].set_xticks(range(len(values)), texts)
    panels[-1].set_xlabel(name)


try:
    from matplotlib import rc_context
except ImportError as error:
    raise UserError(f"report: matplotlib cannot be imported ({error}); pip install aerie[report]") from error

TUNING_NAMES = ("costs",)


def tuning_pictures(tuning: dict[str, Any]) -> dict[str, str]:
    """name -> SVG text; the names start with tuning-."""
    with rc_context(RC):
        return {"tuning-costs": cost_curves(tuning["heads"])}


def cost_curves(heads: list[dict[str, Any]]) -> str:
    """v(N) above, and a further draft level by its width below: a line for each head."""
    colours = [SERIES[position % len(SERIES)] for position in range(len(heads))]
    legend = [(str(head["kind"]), colour) for head, colour in zip(heads, colours, strict=True)]
    figure, (verify, draft) = stacked(
        ["v(N): ms of a target forward by nodes with the root", "ms of one more draft level"], legend
    )
    for head, colour in zip(heads, colours, strict=True):
        costs = head["costs_ms"]
        nodes = sorted(costs["verify"], key=int)
        verify.plot(
            [int(n) for n in nodes], [costs["verify"][n] for n in nodes], color=colour, marker="o", markersize=3
        )
        widths = sorted(costs["draft"], key=int)
        draft.plot(
            [int(k) for k in widths], [costs["draft"][k][1] for k in widths], color=colour, marker="o", markersize=3
        )
    for axes in (verify, draft):
        axes.set_ylim(bottom=0)
        axes.set_xlim(left=0)
    draft.set_xlabel("k: expanded nodes of the level")
    return themed(figure, "tuning-costs")
