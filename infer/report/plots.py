"""The report's pictures: each a short function from rows to SVG text, drawn with matplotlib."""

import io
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from aerie.configs.errors import UserError
from aerie.infer.measure.record import SummaryRow
from aerie.infer.measure.statistics import VANILLA
from aerie.infer.report.papers import Grid, Line, chains_of, numeric
from aerie.infer.report.tables import label, ms_per_cycle, sampling_text

try:
    from matplotlib import rc_context
    from matplotlib.axes import Axes
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.ticker import LogLocator, MaxNLocator
except ImportError as error:
    raise UserError(f"report: matplotlib cannot be imported ({error}); pip install aerie[report]") from error

INK, MUTED, GRID, BAD, QUIET = "#1c2127", "#626a75", "#e3e0d8", "#b3261e", "#98a1ae"
SERIES = ("#c2570c", "#0f766e", "#5b4fc4", "#b7931a", "#b03a73", "#2f6fb5")
PARTS = {"draft": SERIES[3], "verify": SERIES[5], "commit": SERIES[4], "other": QUIET}
WIDTH, POINTS = 332.0, 72.0  # of a picture, in points, and points per inch
MAX_ROWS = 4  # in the pictures by depth
MIN_CYCLES = MIN_NODES = 10  # a share or mean of fewer is not drawn
DASHED = (0, (3, 3))
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
    with rc_context(RC):
        figures = {
            "tau": _method_bars(rows, "tau", [row["tau_ci95"] for row in details["rows"]]),
            "speedup": _method_bars(rows, "speedup", [row.speedup_ci95 for row in rows]),
            "milliseconds": _cycle_milliseconds(rows),
        }
        if _drafting(rows):
            figures |= {"depth": _acceptance_by_depth(rows), "lengths": _accepted_lengths(rows)}
        if calibration is not None and calibration["nodes"]:
            figures["reliability"] = _reliability(calibration)
        if analysis is not None:
            figures |= {f"calibration-{name}": draw(part) for name, (part, draw) in _parts(analysis).items() if part}
        if tuning is not None:
            figures["tuning-costs"] = _cost_curves(tuning["heads"])
        figures |= {f"sweep-trace-{at}": _trace(trace["traces"]) for at, trace in enumerate(details["traces"])}
        figures |= {grid.picture: _sweep(grid) for grid in grids if grid.picture is not None}
        if contexts:
            figures["sweep-contexts"] = _contexts(**contexts)
        if contexts and chains_of(contexts["bucket"]):
            figures["sweep-drafts"] = _drafts(contexts["bucket"])
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


def _curve(axes: Axes, places: Iterable[Any], values: Iterable[float | None], colour: str, style: Any = "-") -> None:
    """A line through the values that are there."""
    points = [(place, value) for place, value in zip(places, values, strict=True) if value is not None]
    if points:
        axes.plot(*zip(*points, strict=True), color=colour, linestyle=style, marker="o")


def _unit(axes: Axes) -> None:
    """A vertical axis of shares."""
    axes.set(ylim=(-0.03, 1.05), yticks=[0, 0.5, 1])


# The rows: one horizontal bar each


def _row_bars(
    rows: Sequence[SummaryRow],
    bars: Sequence[Sequence[tuple[float, str]]],
    ends: Sequence[float],
    unit: str,
    xlabel: str,
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
    axes.set(xlim=(0, limit), ylim=(bands - 0.6, -0.6), yticks=[], xlabel=xlabel)
    axes.grid(visible=False)
    axes.spines["left"].set_visible(False)
    return figure, axes


def _method_bars(rows: Sequence[SummaryRow], key: str, intervals: Sequence[list[float] | None]) -> Figure:
    """tau or speedup with its interval; a failed row says so and has no bar."""
    values: list[float | None] = [getattr(row, key) for row in rows]
    whiskers = [None if row.method == VANILLA else bounds for row, bounds in zip(rows, intervals, strict=True)]
    bars = [[] if value is None else [(value, colour)] for value, colour in zip(values, _colours(rows), strict=True)]
    ends = [max(value or 0.0, bounds[1] if bounds else 0.0) for value, bounds in zip(values, whiskers, strict=True)]
    xlabel = "tau (tokens per target forward)" if key == "tau" else "speedup over vanilla"
    figure, axes = _row_bars(rows, bars, ends, "×" if key == "speedup" else "", xlabel)
    axes.axvline(1.0, color=QUIET, linewidth=1.0, linestyle=DASHED, zorder=0)
    for place, bounds in enumerate(whiskers):
        if bounds:
            axes.plot(bounds, [place, place], color=INK, linewidth=1.3, marker="|", markersize=6)
    return figure


def _cycle_milliseconds(rows: Sequence[SummaryRow]) -> Figure:
    """Decode milliseconds of a mean cycle by part."""
    bars = [[(ms, PARTS[part]) for part, ms in ms_per_cycle(row).items()] for row in rows]
    return _row_bars(rows, bars, [sum(ms for ms, _ in each) for each in bars], " ms", "milliseconds per cycle")[0]


def _colours(rows: Sequence[SummaryRow]) -> list[str]:
    """The quiet colour for vanilla, one for every row that drafts, beginning anew at each sampling."""
    colours: list[str] = []
    for at, row in enumerate(rows):
        before = [other for other in rows[:at] if other.tree and sampling_text(other) == sampling_text(row)]
        colours.append(SERIES[len(before) % len(SERIES)] if row.tree and row.status == "ok" else QUIET)
    return colours


def _drafting(rows: Sequence[SummaryRow]) -> list[tuple[SummaryRow, str, str]]:
    """(row, label, colour) of the MAX_ROWS rows of highest tau, in the table's order; no failed one."""
    candidates = [row for row in rows if row.tree and row.target_forwards]
    least = sorted((row.tau or 0.0 for row in candidates), reverse=True)[:MAX_ROWS][-1:]
    chosen = [row for row in candidates if [row.tau or 0.0] >= least][:MAX_ROWS]
    return [(row, label(row, rows), colour) for row, colour in zip(chosen, SERIES, strict=False)]


def _acceptance_by_depth(rows: Sequence[SummaryRow]) -> Figure:
    """P(accepted length >= d) and the same given d - 1, from the rows' histograms."""
    chosen = _drafting(rows)
    titles = ["P(accepted ≥ d)", "P(accepted ≥ d | accepted ≥ d − 1)"]
    figure, (above, below) = _panels(titles, [item[1:] for item in chosen], [90.0], columns=1)
    for row, _, colour in chosen:
        reached = np.cumsum((row.accepted_histogram or [0])[::-1])[::-1]  # cycles that keep at least d draft tokens
        enough = np.flatnonzero(reached[:-1] >= MIN_CYCLES)
        _curve(above, range(1, len(reached)), reached[1:] / reached[0], colour)
        _curve(below, enough + 1, reached[enough + 1] / reached[enough], colour)
    for axes in (above, below):
        _unit(axes)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    below.set(xlim=above.get_xlim(), xlabel="draft depth d")
    return figure


def _accepted_lengths(rows: Sequence[SummaryRow]) -> Figure:
    """Share of cycles by number of accepted draft tokens, side by side."""
    chosen = _drafting(rows)
    figure, (axes,) = _panels(["share of cycles"], [item[1:] for item in chosen], [210.0], columns=1)
    width = 0.84 / len(chosen)
    for at, (row, _, colour) in enumerate(chosen):
        histogram, offset = row.accepted_histogram or [0], (at - (len(chosen) - 1) / 2) * width
        shares = [100 * count / sum(histogram) for count in histogram]
        axes.bar([length + offset for length in range(len(histogram))], shares, width=width * 0.9, color=colour)
    axes.grid(visible=False, axis="x")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_formatter("{x:g} %")
    axes.set_xlabel("accepted draft tokens in a cycle")
    return figure


# Calibration


def _parts(analysis: Mapping[str, Any]) -> dict[str, tuple[Any, Callable[[Any], Figure]]]:
    """Each picture's part of analysis.json, empty where it was not measured, and what draws it."""
    laws, oracle, branches = analysis["laws"] or {}, analysis["oracle"] or {}, analysis["branches"]
    return {
        "calibrator": (analysis["calibrator"], _calibrator),
        "by-depth": (analysis["by_depth"], _by_depth),
        "places": (analysis["positions"], _places),
        "branches": (branches if branches and branches["nodes"] else None, _branches),
        "levels": ((analysis["levels"] or {}).get("by_depth"), _levels),
        "bounds": (laws.get("bounds"), _bounds),
        "ratio": (laws["ratio"] if laws and laws["ratio"]["laws"] else None, _ratio),
        "by-c": (laws.get("by_c"), _by_c),
        "rejections": (laws, _rejections),
        "oracle": (oracle.get("by_context"), _oracle),
    }


def _confidence_curves(
    title: str, xlabel: str, curves: Sequence[tuple[str, Sequence[Mapping[str, Any]], str]], least: int = MIN_NODES
) -> tuple[Figure, Axes]:
    """Acceptance against confidence: the curves (name, bins, colour) and the diagonal."""
    legend = [(name, colour) for name, _, colour in curves] if len(curves) > 1 else ()
    figure, (axes,) = _panels([title], legend, [190.0])
    axes.plot([0, 1], [0, 1], color=MUTED, linewidth=1.0, linestyle=DASHED)
    for _, bins, colour in curves:
        filled = [item for item in bins if item["count"] >= least]
        _curve(axes, [item["confidence"] for item in filled], [item["acceptance"] for item in filled], colour)
    _unit(axes)
    axes.set(xlim=(-0.02, 1.02), xticks=[0, 0.25, 0.5, 0.75, 1], xlabel=xlabel)
    return figure, axes


def _reliability(calibration: Mapping[str, Any]) -> Figure:
    """Acceptance against confidence in bins, on all prompts and on two halves, above the nodes of each bin."""
    halves, bins = calibration["halves"], calibration["bins"]
    curves = [
        ("fit half", halves["fit"]["bins"], SERIES[1]),
        ("held-out half", halves["held_out"]["bins"], SERIES[2]),
        ("all prompts", bins, SERIES[0]),
    ]
    figure, axes = _confidence_curves("acceptance", "confidence (q of the drafted token)", curves, least=1)
    counts = axes.twinx()
    middles = [(item["low"] + item["high"]) / 2 for item in bins]
    counts.bar(middles, [item["count"] for item in bins], width=0.86 / len(bins), color=QUIET, alpha=0.25)
    counts.set_yscale("log")
    counts.yaxis.set_major_locator(LogLocator(numticks=4))
    counts.minorticks_off()
    counts.grid(visible=False)
    counts.set_ylabel("nodes in the bin (bars)")
    return figure


def _calibrator(scores: Mapping[str, Any]) -> Figure:
    """The held-out half: the head's own confidence, and after each fit."""
    fits = (("before", QUIET), ("temperature", SERIES[1]), ("isotonic", SERIES[0]))
    held_out = scores["held_out"]
    curves = [(f"{fit}, ECE {held_out[fit]['ece']:.3f}", held_out[fit]["bins"], colour) for fit, colour in fits]
    return _confidence_curves("acceptance, held-out half", "confidence", curves)[0]


def _by_depth(rows: Sequence[Mapping[str, Any]]) -> Figure:
    curves = [
        (f"depth {row['depth']}, ECE {row['ece']:.3f}", row["bins"], SERIES[at]) for at, row in enumerate(rows[:4])
    ]
    return _confidence_curves("acceptance", "confidence", curves)[0]


def _branches(branches: Mapping[str, Any]) -> Figure:
    xlabel = "survival of the branch (product of q)"
    return _confidence_curves("whole branch accepted", xlabel, [("", branches["bins"], SERIES[0])])[0]


def _places(rows: Sequence[Mapping[str, Any]]) -> Figure:
    """A box per place of the tree over the prompts' own acceptance rates, as EAGLE-2's figure 5 has points."""
    figure, (axes,) = _panels(["acceptance rate of each prompt"], heights=[170.0])
    names = ("whislo", "q1", "med", "q3", "whishi")
    axes.bxp(
        [dict(zip(names, row["quartiles"], strict=True)) for row in rows], positions=range(len(rows)), showfliers=False,
        showcaps=False, patch_artist=True, boxprops={"facecolor": SERIES[5] + "8c", "edgecolor": "none"},
        medianprops={"color": INK}, whiskerprops={"color": QUIET},
    )  # fmt: skip
    axes.plot(range(len(rows)), [row["acceptance"] for row in rows], "o", color=SERIES[0])
    axes.set_xticks(range(len(rows)), [row["position"] for row in rows], rotation=60, fontsize=8.5)
    _unit(axes)
    return figure


def _shares(
    title: str, rows: Sequence[Mapping[str, Any]], x: str, series: Mapping[str, tuple[str, str]]
) -> tuple[Figure, Axes]:
    """Curves of shares; series: key -> (name, colour)."""
    figure, (axes,) = _panels([title], list(series.values()), [170.0])
    for key, (_, colour) in series.items():
        _curve(axes, [row[x] for row in rows], [row[key] for row in rows], colour)
    _unit(axes)
    return figure, axes


def _levels(rows: Sequence[Mapping[str, Any]]) -> Figure:
    """S_d beside how often the frontier, and the verified tree, holds what the target writes."""
    series = {
        "mass": ("S_d", QUIET),
        "held": ("held by the frontier", SERIES[1]),
        "reached": ("accepted ≥ d", SERIES[0]),
    }
    figure, axes = _shares("share of cycles", rows, "depth", series)
    axes.set(xticks=[row["depth"] for row in rows], xlabel="draft depth d")
    return figure


def _by_c(rows: Sequence[Mapping[str, Any]]) -> Figure:
    """How often the approximation keeps its promise as c varies, and how much of it is left."""
    series = {
        "holds": ("holds for acceptance", SERIES[0]), "conservative": ("below the oracle", SERIES[1]),
        "gamma": ("by the Gamma fit", SERIES[2]), "bound": ("its mean", QUIET),
    }  # fmt: skip
    figure, axes = _shares("share of laws", rows, "c", series)
    axes.set(xscale="log", xlabel="c")
    axes.set_xticks([0.02, 0.05, 0.1, 0.2, 0.5, 1, 2], ["0.02", "0.05", "0.1", "0.2", "0.5", "1", "2"])
    return figure


def _bounds(tables: Sequence[Mapping[str, Any]]) -> Figure:
    """The acceptance probability of every law, in order, and its lower bounds (SVIP, figure 4)."""
    series = {
        "bretagnolle_huber": ("Bretagnolle–Huber", SERIES[2]),
        "approximation": (f"1 − √({tables[-1]['c']:g} H)", SERIES[0]),
        "oracle": ("oracle bound", SERIES[1]),
        "acceptance": ("acceptance", INK),
    }
    figure, (axes,) = _panels(["probability"], list(series.values())[::-1], [190.0])
    for key, (_, colour) in series.items():
        values = tables[-1]["curve"][key]
        places = [100.0 * place / max(1, len(values) - 1) for place in range(len(values))]
        axes.plot(places, values, color=colour, linewidth=2.0 if key == "acceptance" else 1.0)
    axes.set_ylim(-1.05, 1.05)
    axes.xaxis.set_major_formatter("{x:g} %")
    axes.set_xlabel("laws, by their acceptance probability")
    return figure


def _ratio(ratio: Mapping[str, Any]) -> Figure:
    """The entropy ratio - 1 of the laws, and the Gamma law fitted to it (SVIP, appendix C)."""
    legend = [("laws", SERIES[5]), ("Gamma fit", INK)]
    figure, (axes,) = _panels(["share of laws"], legend[: 2 if ratio["expected"] else 1], [150.0])
    width = ratio["edges"][1] - ratio["edges"][0]
    middles = [edge + width / 2 for edge in ratio["edges"]]
    axes.bar(middles, [100 * count / ratio["laws"] for count in ratio["counts"]], width=width * 0.86, color=SERIES[5])
    if ratio["expected"]:
        axes.plot(middles, [100 * count / ratio["laws"] for count in ratio["expected"]], color=INK, linewidth=1.4)
    axes.set_xticks([0, 1, 2, 3, 4, 5], ["0", "1", "2", "3", "4", "≥5"])
    axes.yaxis.set_major_formatter("{x:g} %")
    axes.set_xlabel("entropy ratio − 1 = KL(q‖p) ÷ H(q)")
    return figure


def _rejections(laws: Mapping[str, Any]) -> Figure:
    """KL(q||p) at a rejected token and before it, and the sorted laws of accepted and rejected tokens (figure 3)."""
    colours = {"accepted": SERIES[1], "rejected": SERIES[0]}
    titles = ["KL(q‖p), nats", "mean log q of the token of this rank"]
    figure, (above, below) = _panels(titles, list(colours.items()))
    rows = [row for row in laws["before_rejection"] if row["kl"] is not None]
    offsets = [row["offset"] for row in rows]
    above.bar(
        offsets, [row["kl"] for row in rows], width=0.6, color=[SERIES[0] if at == 0 else SERIES[1] for at in offsets]
    )
    above.set_xticks(offsets, ["rejected" if at == 0 else f"{at}".replace("-", "−") for at in offsets], fontsize=9)
    above.grid(visible=False, axis="x")
    for key, colour in colours.items():
        _curve(below, laws["sorted"]["ranks"], laws["sorted"][key], colour)
    below.set_xscale("log", base=4)
    below.xaxis.set_major_formatter("{x:,.0f}")
    below.set_xlabel("rank in the vocabulary")
    return figure


def _oracle(rows: Sequence[Mapping[str, Any]]) -> Figure:
    """The oracle draft length's variance, and proposed minus oracle, by context length (SVIP, figures 1 and 7b)."""
    shown = [row for row in rows if row["cycles"] >= MIN_NODES] or rows
    figure, (above, below) = _panels(["variance of the oracle draft length", "proposed − oracle, tokens"])
    _curve(above, range(len(shown)), [row["variance"] for row in shown], SERIES[0])
    _curve(below, range(len(shown)), [row["delta"] for row in shown], SERIES[1])
    above.set_ylim(bottom=0)
    below.axhline(0.0, color=MUTED, linewidth=1.0, linestyle=DASHED)
    names = [f">{row['above']:,}" if row["up_to"] is None else f"≤{row['up_to']:,}" for row in shown]
    for axes in (above, below):
        axes.set_xticks(range(len(shown)), names)
    below.set_xlabel("tokens before the draft, the prompt included")
    return figure


# Sweeps, traces and costs


def _along(panels: Mapping[str, tuple[Sequence[Line], Sequence[str]]], values: Sequence[Any], xlabel: str) -> Figure:
    """A panel each, title -> (lines, keys), over evenly spaced values: the first key solid, the second dashed."""
    lines, _ = next(iter(panels.values()))
    legend = [(line.label, colour) for line, colour in zip(lines, SERIES, strict=False)] if len(lines) > 1 else []
    columns = 2 if max(len(line.label) for line in lines) < 26 else 1
    figure, every = _panels(list(panels), legend, [96.0], columns)
    for axes, (title, (members, keys)) in zip(every, panels.items(), strict=True):
        for line, colour in zip(members, SERIES, strict=False):
            for key, style in zip(keys, ("-", DASHED), strict=False):
                places = [values.index(point.value) for point in line.points]
                _curve(axes, places, [_figure(point, key) for point in line.points], colour, style)
        low, high = axes.get_ylim()
        axes.set_ylim(min(low, 1.0) if title.startswith(("tau", "speedup")) else 0.0, high)
        if title.startswith("speedup"):
            axes.axhline(1.0, color=MUTED, linewidth=1.0, linestyle=DASHED)
        axes.yaxis.set_major_formatter("{x:g}")
        axes.set_xlim(-0.4, len(values) - 0.6)
        axes.set_xticks(range(len(values)), [f"{value:g}" if numeric([value]) else str(value) for value in values])
    every[-1].set_xlabel(xlabel)
    return figure


def _figure(point: Any, key: str) -> float | None:
    """A figure of a point: draft forwards per prompt, drafted tokens per cycle, others as they are."""
    value: float | None = getattr(point, key)
    if value is None:
        return None
    return value / {"draft_nodes": point.target_forwards}.get(key, point.prompts if key.startswith("draft_") else 1)


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
    """Speedup up to each length, and tau between two, of the rows that get furthest the fastest."""
    ends = [(len(line.points), line.points[-1].speedup or 0.0) for line in cumulative.lines]
    chosen = sorted(sorted(range(len(ends)), key=lambda at: ends[at], reverse=True)[: len(SERIES)])
    panels = {
        "speedup from the start to a length": ([cumulative.lines[at] for at in chosen], ["speedup"]),
        "tau between a length and the one before": ([bucket.lines[at] for at in chosen], ["tau"]),
    }
    return _along(panels, cumulative.values, "tokens, the prompt included")


def _drafts(bucket: Grid) -> Figure:
    """A chain's mean draft length, and the share of it that is accepted, of each bucket of context."""
    lines = chains_of(bucket)
    panels = {
        "drafted tokens per cycle": (lines, ["draft_nodes"]),
        "accepted share of the drafted tokens": (lines, ["accept_rate"]),
    }
    return _along(panels, bucket.values, "tokens, the prompt included")


def _trace(lines: Sequence[Mapping[str, Any]]) -> Figure:
    """A panel for each rule: what every cycle of one answer drafted (light) and had accepted (dark)."""
    legend = [("drafted", SERIES[1]), ("accepted", SERIES[0])]
    figure, panels = _panels([f"drafted tokens, {line['rule']}" for line in lines], legend, [62.0])
    for axes, line in zip(panels, lines, strict=True):
        for key, colour in legend:
            axes.vlines(line["begins"], 0, line[key], color=colour)
        axes.set_xlim(0, max(other["begins"][-1] for other in lines) + 1)
        axes.set_ylim(0, max(max(other["drafted"]) for other in lines) + 1)
    panels[-1].set_xlabel("new tokens so far, at the cycle’s start")
    return figure


def _cost_curves(heads: Sequence[Mapping[str, Any]]) -> Figure:
    """v(N) above, and a further draft level by its width below: a line for each head."""
    legend = [(str(head["kind"]), SERIES[at % len(SERIES)]) for at, head in enumerate(heads)]
    titles = ["v(N): ms of a target forward by nodes with the root", "ms of one more draft level"]
    figure, (verify, draft) = _panels(titles, legend)
    for head, (_, colour) in zip(heads, legend, strict=True):
        nodes, widths = (sorted(head["costs_ms"][part], key=int) for part in ("verify", "draft"))
        _curve(verify, [int(n) for n in nodes], [head["costs_ms"]["verify"][n] for n in nodes], colour)
        _curve(draft, [int(k) for k in widths], [head["costs_ms"]["draft"][k][1] for k in widths], colour)
    for axes in (verify, draft):
        axes.set(xlim=(0, None), ylim=(0, None))
    draft.set_xlabel("k: expanded nodes of the level")
    return figure
