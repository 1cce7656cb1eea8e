"""The report's pictures, as SVG text.

Every picture is WIDTH units wide: about one CSS pixel per unit both in a desktop column and on a phone.
"""

from collections.abc import Sequence
from typing import Any

from infer.palette import BAD, INK, MUTED, QUIET, RC, SERIES, SURFACE, themed
from infer.table import label, ms_per_cycle, sampling_text, tree_text
from model.errors import UserError

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
