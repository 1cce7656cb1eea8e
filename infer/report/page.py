"""The report: its page, pictures and files."""

import io
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from aerie.configs.errors import UserError
from aerie.configs.read import read_yaml
from aerie.infer.measure import record as files
from aerie.infer.measure import statistics
from aerie.infer.report import claims, tables
from aerie.infer.report.tables import LEVELS, Grid, Line, Rows, label, numeric
from aerie.model.storage import plainly, write_json, write_text

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

RC = read_yaml(Path(__file__).with_name("pictures.yaml"))[0]
INK, MUTED, BAD, QUIET = RC["text.color"], RC["axes.labelcolor"], "#b3261e", "#98a1ae"
SERIES = ("#c2570c", "#0f766e", "#5b4fc4", "#b7931a", "#b03a73", "#2f6fb5")
WIDTH, POINTS = 332.0, 72.0  # of a picture, in points, and points per inch
MAX_ROWS = 4  # in the pictures by depth
MIN_CYCLES = MIN_NODES = 10  # a share or mean of fewer is not drawn
MANY = 50  # points of a curve, which is drawn without dots
DASHED = (0, (3, 3))
SHARES: dict[str, Any] = {"ylim": (-0.03, 1.05), "yticks": [0, 0.5, 1]}  # a vertical axis of them
ALONE = '<?xml version="1.0" encoding="utf-8"?>\n'  # before a picture's own file, and its style
STYLE = "<style>svg{background:#fff;font-family:sans-serif}</style>"
Curve = tuple[Iterable[Any], Iterable[Any], str, Any]  # x, y (None: no point), colour, line style


def pictures(
    rows: Rows, details: dict[str, Any], grids: list[Grid], contexts: dict[str, Grid]
) -> dict[str, str]:
    """Every picture that the figures allow, name -> an <svg> element; details as in details.json."""
    calibration, analysis, tuning = details["calibration"], details["analysis"], details["tuning"]
    with rc_context(RC):
        figures = {"tau": _bars(rows, "tau", [row["tau_ci95"] for row in details["rows"]])}
        figures["speedup"] = _bars(rows, "speedup", [row.speedup_ci95 for row in rows])
        if drafting := [row for row in rows if row.tree and row.target_forwards]:
            figures["depth"] = _accepted(drafting)
        if calibration is not None and calibration["nodes"]:
            bins = calibration["bins"]
            figures["reliability"], axes = _confidence("acceptance", {"all prompts": bins}, least=1)
            counts, middles = axes.twinx(), [(item["low"] + item["high"]) / 2 for item in bins]
            counts.bar(
                middles,
                [item["count"] for item in bins],
                width=0.86 / len(bins),
                color=QUIET,
                alpha=0.25,
            )
            counts.set(yscale="log", ylabel="nodes in the bin (bars)")
            counts.grid(visible=False)
        if analysis is not None:
            figures |= _nodes(analysis)
            figures |= _laws(analysis["laws"]) if analysis["laws"] else {}
        if tuning is not None:
            figures["tuning-costs"] = _costs(tuning["heads"])
        for kind, curves in details["training"]["curves"].items():
            figures[f"training-{kind}"] = _training(curves)
        for grid in (one for one in grids if one.picture):
            panels = {"tau": (grid.lines, ["tau"])}
            if grid.key == LEVELS:
                spent = ["draft_forwards", "draft_forwards_wasted"]
                panels["draft forwards per prompt (dashed: wasted)"] = (grid.lines, spent)
            panels["speedup over vanilla"] = (grid.lines, ["speedup"])
            figures[grid.picture] = _along(
                panels, grid.values, "largest depth" if grid.key == LEVELS else grid.key
            )
        for name, picture in details["claims"]["pictures"].items():
            figures[name] = _beside_published(picture)
        if contexts:
            panels = {
                "speedup from the start to a length": (contexts["cumulative"].lines, ["speedup"])
            }
            panels["tau between a length and the one before"] = contexts["bucket"].lines, ["tau"]
            figures["sweep-contexts"] = _along(
                panels, contexts["bucket"].values, "tokens, the prompt included"
            )
        return {name: _svg(figure, name) for name, figure in figures.items()}


def _svg(figure: Figure, name: str) -> str:
    """The figure as text; ids begin with its name, as a page holds many."""
    buffer = io.StringIO()
    FigureCanvasSVG(figure).print_svg(
        buffer, metadata=dict.fromkeys(("Date", "Creator", "Format", "Type"))
    )
    head, rest = buffer.getvalue().split("<svg", 1)[1].split(">", 1)
    box = re.findall(r'viewBox="[^"]+"', head)[0]
    text = f'<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" {box}>{rest}'
    text = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", text)
    return text.replace("'DejaVu Sans'", "var(--sans, 'DejaVu Sans')").strip() + "\n"


def _figure(
    panels: Mapping[str, Sequence[Curve]],
    xlabel: str,
    legend: Mapping[str, str] | None = None,
    height: float = 116.0,
) -> tuple[Figure, list[Axes]]:
    """A panel of this height in points for each title, below a legend of name -> colour."""
    legend = legend or {}
    columns = 4 if max(map(len, legend), default=0) < 10 else 1
    total = (height + 42.0) * len(panels) + 16.0 * -(-len(legend) // columns) + 14.0
    figure = Figure(figsize=(WIDTH / POINTS, total / POINTS), dpi=POINTS, layout="constrained")
    every: list[Axes] = list(figure.subplots(len(panels), squeeze=False)[:, 0])
    if legend:
        handles = [Line2D([], [], color=colour, linewidth=5.0) for colour in legend.values()]
        figure.legend(
            handles,
            list(legend),
            loc="outside upper left",
            ncols=columns,
            handlelength=1.0,
            borderpad=0.0,
        )
    for axes, (title, curves) in zip(every, panels.items(), strict=True):
        axes.set_title(title)
        for places, values, colour, style in curves:
            points = [
                (place, value)
                for place, value in zip(places, values, strict=True)
                if value is not None
            ]
            if points:  # else matplotlib narrows the axes
                dots = "o" if len(points) < MANY else ""
                axes.plot(*zip(*points, strict=True), color=colour, linestyle=style, marker=dots)
    every[-1].set_xlabel(xlabel)
    return figure, every


def _bars(rows: Rows, key: str, intervals: Sequence[list[float] | None]) -> Figure:
    """tau or speedup with its interval, a band for each row under its label; a failed row has no bar."""
    bands, unit = max(2, len(rows)), "×" if key == "speedup" else ""
    xlabel = "speedup over vanilla" if unit else "tau (tokens per target forward)"
    figure, (axes,) = _figure({"": ()}, xlabel, height=44.0 * bands)
    ends = [
        max(getattr(row, key) or 0.0, *(bounds or [0.0]))
        for row, bounds in zip(rows, intervals, strict=True)
    ]
    limit = 1.25 * max([1.0, *ends])
    for place, (row, bounds) in enumerate(zip(rows, intervals, strict=True)):
        bar = (
            SERIES[(place - 1) % len(SERIES)] if row.tree else QUIET
        )  # with few rows, the colours of `_accepted`
        value, text, colour = (
            getattr(row, key),
            "not measured" if row.status == "ok" else "failed: no figure",
            BAD,
        )
        if value is not None:
            axes.barh(place, value, height=0.42, color=bar)
            text, colour = f"{value:.2f}{unit}", INK
        if bounds and row.method != statistics.VANILLA:
            axes.plot(bounds, [place, place], color=INK, linewidth=1.3, marker="|", markersize=6)
        axes.annotate(
            label(row, rows),
            (0, place),
            (1, 16),
            textcoords="offset points",
            va="center",
            in_layout=False,
        )
        axes.text(
            ends[place] + limit * 0.018,
            place,
            text,
            va="center",
            color=colour,
            weight="bold",
            in_layout=False,
        )
    axes.set(xlim=(0, limit), ylim=(bands - 0.6, -0.6), yticks=[])
    axes.grid(visible=False)
    axes.spines["left"].set_visible(False)
    axes.axvline(1.0, color=QUIET, linewidth=1.0, linestyle=DASHED, zorder=0)
    return figure


def _accepted(rows: Rows) -> Figure:
    """Acceptance by depth of the MAX_ROWS rows of highest tau."""
    best = sorted(rows, key=lambda row: row.tau or 0.0, reverse=True)[:MAX_ROWS]
    chosen = [row for row in rows if row in best]
    above, below, legend = list[Curve](), list[Curve](), {}
    for row, colour in zip(chosen, SERIES, strict=False):
        legend[label(row, rows)] = colour
        reached = np.array(row.accepted_histogram)[::-1].cumsum()[
            ::-1
        ]  # cycles that keep at least d draft tokens
        enough = np.flatnonzero(reached[:-1] >= MIN_CYCLES)
        above.append((range(1, len(reached)), reached[1:] / reached[0], colour, "-"))
        below.append((enough + 1, reached[enough + 1] / reached[enough], colour, "-"))
    panels = {"P(accepted ≥ d)": above, "P(accepted ≥ d | accepted ≥ d − 1)": below}
    figure, (first, second) = _figure(panels, "draft depth d", legend, 90.0)
    for axes in (first, second):
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set(**SHARES)
    second.set_xlim(first.get_xlim())
    return figure


def _confidence(
    title: str, curves: Mapping[str, Any], colours: Sequence[str] = SERIES, least: int = MIN_NODES
) -> tuple[Figure, Axes]:
    """Acceptance against confidence; curves: name -> bins."""
    drawn: list[Curve] = [([0, 1], [0, 1], MUTED, DASHED)]
    for bins, colour in zip(curves.values(), colours, strict=False):
        filled = [item for item in bins if item["count"] >= least]
        drawn.append(
            (
                [item["confidence"] for item in filled],
                [item["acceptance"] for item in filled],
                colour,
                "-",
            )
        )
    legend = dict(zip(curves, colours, strict=False)) if len(curves) > 1 else None
    figure, (axes,) = _figure({title: drawn}, "confidence (q of the drafted token)", legend, 190.0)
    axes.lines[0].set(marker="", linewidth=1.0)
    axes.set(**SHARES, xlim=(-0.02, 1.02), xticks=[0, 0.25, 0.5, 0.75, 1])
    return figure, axes


def _nodes(analysis: Mapping[str, Any]) -> dict[str, Figure]:
    figures = {}
    if scores := analysis["calibrator"]:
        fits = {"before": "the head’s own", "temperature": "temperature", "isotonic": "isotonic"}
        held_out = [(name, scores["held_out"][fit]) for fit, name in fits.items()]
        curves = {f"{name}, ECE {one['ece']:.3f}": one["bins"] for name, one in held_out}
        colours = (QUIET, SERIES[1], SERIES[0])
        figures["calibration-calibrator"], _ = _confidence(
            "acceptance, held-out half", curves, colours
        )
    if depths := analysis["by_depth"][:4]:
        curves = {f"depth {one['depth']}, ECE {one['ece']:.3f}": one["bins"] for one in depths}
        figures["calibration-by-depth"], _ = _confidence("acceptance", curves)
    return figures


def _laws(laws: Mapping[str, Any]) -> dict[str, Figure]:
    """SVIP's figures 3 and 4."""
    table = laws["bounds"]
    names = {
        "acceptance": "acceptance",
        "oracle": "oracle bound",
        "approximation": f"1 − √({table['c']:g} H)",
    }
    names["bretagnolle_huber"] = "Bretagnolle–Huber"
    legend = dict(zip(names.values(), (INK, SERIES[1], SERIES[0], SERIES[2]), strict=True))
    percent = np.linspace(0, 100, len(table["curve"]["acceptance"]))
    curves: list[Curve] = [
        (percent, table["curve"][key], legend[name], "-") for key, name in names.items()
    ]
    bounds, (axes,) = _figure(
        {"probability": curves}, "laws, by their acceptance probability (%)", legend, 190.0
    )
    axes.set_ylim(-1.05, 1.05)
    colours = {"accepted": SERIES[1], "rejected": SERIES[0]}
    ranks: list[Curve] = [
        (laws["sorted"]["ranks"], laws["sorted"][key], colours[key], "-") for key in colours
    ]
    panels = {
        "KL(q‖p), nats; place 0: the rejected token": [],
        "mean log q of the token of this rank": ranks,
    }
    rejections, (above, below) = _figure(panels, "rank in the vocabulary", colours)
    for row in laws["before_rejection"]:
        above.bar(
            row["offset"],
            row["kl"] or 0.0,
            width=0.6,
            color=SERIES[0] if row["offset"] == 0 else SERIES[1],
        )
    above.xaxis.set_major_locator(MaxNLocator(integer=True))
    below.set_xscale("log", base=4)
    below.xaxis.set_major_formatter("{x:,.0f}")
    return {"calibration-bounds": bounds, "calibration-rejections": rejections}


def _along(
    panels: Mapping[str, tuple[Sequence[Line], Sequence[str]]], values: Sequence[Any], xlabel: str
) -> Figure:
    """A panel per title -> (lines, keys) over evenly spaced values; the second key is dashed."""
    lines, _ = next(iter(panels.values()))
    legend = (
        {line.label: colour for line, colour in zip(lines, SERIES, strict=False)}
        if len(lines) > 1
        else None
    )
    curves: dict[str, list[Curve]] = {title: [] for title in panels}
    for title, (members, keys) in panels.items():
        for line, colour in zip(members, SERIES, strict=False):
            places = [values.index(point.value) for point in line.points]
            for key, style in zip(keys, ("-", DASHED), strict=False):
                figures = [getattr(point, key) for point in line.points]
                if key.startswith("draft_"):
                    figures = [
                        value and value / one.prompts
                        for value, one in zip(figures, line.points, strict=True)
                    ]
                curves[title].append((places, figures, colour, style))
    figure, every = _figure(curves, xlabel, legend, 96.0)
    for axes, title in zip(every, curves, strict=True):
        axes.set_ylim(min(axes.get_ylim()[0], 1.0) if title.startswith(("tau", "speedup")) else 0.0)
        if title.startswith("speedup"):
            axes.axhline(1.0, color=MUTED, linewidth=1.0, linestyle=DASHED)
        axes.yaxis.set_major_formatter("{x:g}")
        axes.set_xlim(-0.4, len(values) - 0.6)
        axes.set_xticks(
            range(len(values)),
            [f"{value:g}" if numeric([value]) else str(value) for value in values],
        )
    return figure


def _beside_published(picture: Mapping[str, Any]) -> Figure:
    """A claim's lines with their intervals; the paper's points are hollow."""
    lines = picture["lines"]
    legend = {line["label"]: colour for line, colour in zip(lines, SERIES, strict=False)}
    legend |= dict(zip(picture["published"], SERIES[::-1], strict=False))
    figure, (axes,) = _figure({picture["title"]: ()}, picture["xlabel"], legend, 190.0)
    for line in lines:
        x, y, low, high = zip(*line["points"], strict=True)
        axes.plot(
            x, y, color=legend[line["label"]], marker="o", linestyle="-" if numeric(x) else "none"
        )
        axes.vlines(x, low, high, color=legend[line["label"]], linewidth=1.0)
    for name, points in picture["published"].items():
        axes.plot(*zip(*points, strict=True), "o", color=legend[name], markerfacecolor="none")
    if not numeric([point[0] for line in lines for point in line["points"]]):
        axes.tick_params(axis="x", rotation=60, labelsize=8.5)
    return figure


def _costs(heads: Sequence[Mapping[str, Any]]) -> Figure:
    legend = {str(head["kind"]): SERIES[at % len(SERIES)] for at, head in enumerate(heads)}
    verify, draft = list[Curve](), list[Curve]()
    for head, colour in zip(heads, legend.values(), strict=True):
        of_nodes, of_widths = head["costs_ms"]["verify"], head["costs_ms"]["draft"]
        nodes, widths = sorted(of_nodes, key=int), sorted(of_widths, key=int)
        verify.append((list(map(int, nodes)), [of_nodes[count] for count in nodes], colour, "-"))
        draft.append((list(map(int, widths)), [of_widths[k][1] for k in widths], colour, "-"))
    panels = {
        "v(N): ms of a target forward by nodes with the root": verify,
        "ms of one more draft level": draft,
    }
    figure, every = _figure(panels, "k: expanded nodes of the level", legend)
    for axes in every:
        axes.set(xlim=(0, None), ylim=(0, None))
    return figure


def _training(curves: Mapping[str, Mapping[str, Any]]) -> Figure:
    """Solid: batches of the training; dashed: held out."""
    numbers = sorted({int(name.split("_at_")[1]) for name in curves if "_at_" in name})
    legend = {f"depth {number}": SERIES[at % len(SERIES)] for at, number in enumerate(numbers)}
    legend |= {"agreement": INK} if any("greedy_agreement" in name for name in curves) else {}
    shares = "accuracy by depth, and greedy agreement"
    panels: dict[str, list[Curve]] = {
        "loss": [],
        shares: [],
        "tau by decoding (grey: predicted)": [],
    }
    for name, curve in curves.items():
        key, _, depth = name.removeprefix("held_out_").partition("_at_")
        title = next((title for title in panels if key.endswith(title.split()[0])), shares)
        colour = legend.get(f"depth {depth}", MUTED if key == "predicted_tau" else INK)
        panels[title].append(
            (curve["steps"], curve["values"], colour, DASHED if name.startswith("held") else "-")
        )
    drawn = {title: lines for title, lines in panels.items() if lines}
    figure, every = _figure(drawn, "step", legend, 90.0)
    for axes, title in zip(every, drawn, strict=True):
        axes.set(xlim=(0, None), **(SHARES if title == shares else {}))
    return figure


SCHEMA, ANALYSIS, TINTS = (
    1,
    2,
    4,
)  # of summary.json and details.json, of analysis.json; and of the sample


def write_report(
    bench: Path, calibration: Path, output: Path, facts: dict[str, Any], seed: int
) -> Rows:
    """Writes every file of the report from two stages' directories; returns the rows over all tasks.

    facts: run, commit, target (with `name`), head (with `kind`), hardware and the commands that made the run. Where the
    suite asks for rows by task, summary.json and table.csv have these, the page and table.md the pooled ones.
    """
    records = files.read_records(bench / files.RECORDS)
    if not records:
        raise UserError(f"{bench / files.RECORDS}: holds no whole record; run: aerie bench")
    # without suite.json all rows are the bench's own
    asked = _read(bench / files.SUITE, files.Asked)
    asked = asked or files.Asked(tuple(files.AskedCell(one.row, *one.sampling) for one in records))
    cells, every = {(cell.row, cell.sampling) for cell in asked.main}, statistics.group(records)
    groups = [members for members in every if (members.first.row, members.first.sampling) in cells]
    rows = statistics.told_apart([statistics.summary_row(members, seed) for members in groups])
    by_task = [
        [statistics.summary_row(part, seed) for part in members.by_task()] for members in groups
    ]
    parts = {
        at: [replace(row, value=row.task) for row in each]
        for at, each in enumerate(by_task)
        if len(each) > 1
    }
    sweeps = statistics.sweep_rows(every, groups, asked, seed)
    curve, analysis = _read(calibration / "calibration.json"), _read(calibration / "analysis.json")
    if analysis is not None and analysis["schema"] != ANALYSIS:
        fix = "is of another version; make it again: aerie calibrate --overwrite"
        raise UserError(f"{calibration / 'analysis.json'}: {fix}")
    tune = bench.parent / "tune"
    if (tuning := _read(tune / "tune.json")) is not None:
        tuning |= {"measured": _read(tune / "measured.json"), "file": str(tune / "tuned.yaml")}
    trainings = facts.get("trainings", {})
    curves = tables.training_curves(bench.parent / "metrics.jsonl")
    reference = _read(bench / files.REFERENCE, files.Reference)
    extras = []
    for members in groups:
        good = [] if members.failed else members.records
        compared = [
            one.identical_to_generate for one in good if one.identical_to_generate is not None
        ]
        same = {"identical_to_generate": sum(compared), "compared_to_generate": len(compared)}
        apart = [one.margin for one in good if False in (one.identical, one.identical_to_generate)]
        told = [margin for margin in apart if margin is not None]
        figures = {
            "tau_ci95": statistics.tau_interval(good, seed),
            "margin": max(told, default=None),
        }
        figures |= {"differing": len(apart), "rounding": sum(margin <= 1 for margin in told)}
        extras.append(figures | (same if compared else dict.fromkeys(same)))
    calibrations = [*map(claims.Calibration.read, files.calibrations_of(bench.parent))]
    run = claims.Measured(records, tuning, calibrations)
    details: dict[str, Any] = {
        "schema": SCHEMA,
        "rows": extras,
        # row: its position in `rows`
        "by_task": [
            {"row": at, **part.as_dict()} for at, of_row in parts.items() for part in of_row
        ],
        "diversity": statistics.diversity(groups),
        "reference": None if reference is None else asdict(reference),
        "calibration": curve,
        "analysis": analysis,
        "tuning": tuning,
        "claims": {"lines": claims.judge(run), "pictures": claims.drawn(run)},
        "training": {"runs": trainings, "stopped": tables.stopped(trainings), "curves": curves},
    }
    grids, contexts = tables.sweep_grids(sweeps), tables.context_grids(sweeps)
    drawn = pictures(rows, details, grids, contexts)
    suite: dict[str, Any] = {
        "sweeps": grids,
        "contexts": contexts,
        "tasks": tables.task_grid(rows, parts),
    }
    suite["beside"] = tables.beside(rows, parts)
    suite["published"] = {key: tables.published(key) for key in ("ablation", LEVELS, "context")}
    texts = {f"{name}.svg": ALONE + svg.replace(">", f">{STYLE}", 1) for name, svg in drawn.items()}
    texts["index.html"] = render(
        facts, rows, details, suite=suite, drawn=drawn, sample=sample_answer(groups, rows)
    )
    shown = rows
    if asked.by_task:
        shown = statistics.told_apart([row for each in by_task for row in each])
        details["pooled"] = [row.as_dict() for row in rows]
    summary = {
        "schema": SCHEMA,
        **{name: value for name, value in facts.items() if name not in ("commands", "trainings")},
        "rows": [row.as_dict() for row in shown],
        "sweeps": [point.as_dict() for point in sweeps],
        "calibration": curve
        and {name: curve[name] for name in ("temperature", "ece", "brier", "bins")},
    }
    write_json(output / "summary.json", summary)
    write_json(output / "details.json", details)
    texts |= {"table.md": tables.markdown_table(rows), "table.csv": tables.csv_table(shown)}
    texts["claims.md"] = claims.markdown(details["claims"]["lines"])
    texts |= {"sweeps.csv": tables.csv_table(sweeps, sweeps=True)} if sweeps else {}
    for name, text in texts.items():
        write_text(output / name, text)
    for stale in {*output.glob("*.svg"), *output.glob("sweeps.csv")} - {
        output / name for name in texts
    }:
        stale.unlink()
    return rows


def render(facts: Mapping[str, Any], rows: Rows, details: Mapping[str, Any], **parts: Any) -> str:
    loader = FileSystemLoader(Path(__file__).parent)
    environment = Environment(trim_blocks=True, lstrip_blocks=True, loader=loader, autoescape=True)
    environment.undefined = StrictUndefined
    environment.filters.update(
        number=tables.number, fact=lambda value: plainly(value, tables.NOTHING)
    )
    kinds = {row.head for row in rows if row.head}
    drafting = [row for row in rows if row.status == "ok" and row.tree is not None]
    page = environment.get_template("report.html.jinja").render(
        tables=tables,
        tenth=claims.tenth(details["claims"]["lines"]),
        nothing=tables.NOTHING,
        facts=facts,
        heads=f"{len(kinds)} draft heads"
        if len(kinds) > 1
        else f"{facts['head'].get('kind', 'draft')} head",
        rows=rows,
        details=details,
        pictures={name: Markup(svg) for name, svg in parts.pop("drawn").items()},  # noqa: S704
        lossless=tables.lossless(rows, details["rows"]),
        best_tau=max(
            (row for row in drafting if row.tau), key=lambda row: row.tau or 0.0, default=None
        ),
        best_speedup=max(
            (row for row in drafting if row.speedup),
            key=lambda row: row.speedup or 0.0,
            default=None,
        ),
        tints=TINTS,
        **parts,
    )
    found = re.findall(r'<(h2|details) id="([\w-]+)">(?:<summary>)?([^<]+)', page)
    links = "".join(f'<a class="{tag}" href="#{place}">{text}</a>' for tag, place, text in found)
    return page.replace("<nav></nav>", f"<nav>{links}</nav>")


def sample_answer(groups: Sequence[statistics.Group], rows: Rows) -> dict[str, Any] | None:
    """From the fastest greedy row that drafts, the answer of median tau, with (text, tint, title) of each cycle.

    The tint, 0 to TINTS, grows with the draft tokens that the cycle kept.
    """
    drafting = [
        at
        for at, row in enumerate(rows)
        if row.status == "ok" and row.tree and row.temperature == 0
    ]
    fastest = sorted(drafting, key=lambda at: (rows[at].speedup or 0.0, at))[-1:]
    usable = [
        one for at in fastest for one in groups[at].records if one.cycle_texts and one.accepted
    ]
    if not usable:
        return None
    record = sorted(usable, key=lambda one: statistics.tau([one]) or 0.0)[len(usable) // 2]
    parts, most = [(record.cycle_texts[0], 0, "the prefill’s token")], max(record.accepted) or 1
    for text, kept, new in zip(
        record.cycle_texts[1:], record.accepted, record.cycle_tokens, strict=False
    ):
        parts.append((text, math.ceil(TINTS * kept / most), f"{kept} accepted, {new} new"))
    return {"record": record, "parts": parts, "tau": statistics.tau([record])}


def _read(path: Path, schema: Any = dict[str, Any]) -> Any:
    return files.read_as(path, schema) if path.is_file() else None
