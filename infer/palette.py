"""Colours of the report's pictures: matplotlib draws with stand-ins that become CSS variables, for light and dark."""

import io
import re

from model.errors import UserError

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
