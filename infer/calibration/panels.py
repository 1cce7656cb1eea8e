"""Figures of stacked panels, as wide as the report's other pictures."""

from collections.abc import Sequence

from infer.palette import MUTED
from infer.plots import BOTTOM, LEFT, POINTS, RIGHT, WIDTH
from model.errors import UserError

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
