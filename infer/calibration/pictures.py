"""The calibration's pictures, as SVG text: reliability, places, branches, bounds, rejections and oracle lengths."""

from collections.abc import Callable
from typing import Any

from infer.calibration.panels import stacked
from infer.palette import INK, MUTED, QUIET, RC, SERIES, SURFACE, themed
from model.errors import UserError

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


def pictures(analysis: dict[str, Any]) -> dict[str, str]:
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
