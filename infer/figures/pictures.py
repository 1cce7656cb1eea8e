"""The sweeps' pictures, as SVG text: tau, forwards and speedup along depths, context lengths and other settings."""

from collections.abc import Sequence
from typing import Any

from infer.calibration.panels import stacked
from infer.figures.context_tables import Contexts, chains_of
from infer.figures.depths import Depths
from infer.figures.lines import Line, numeric, values_of
from infer.figures.traces import Traced
from infer.palette import MUTED, RC, SERIES, themed
from model.errors import UserError

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
