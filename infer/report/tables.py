"""The rows of a summary as text: a console table, Markdown, CSV, and the words the page uses for a row."""

import csv
import io
from collections.abc import Sequence
from typing import Any

from aerie.infer.measure.record import Record
from aerie.infer.measure.statistics import group, identity, told_apart

NOTHING = "–"
CONSOLE_COLUMNS = ("method", "tree", "T", "tau", "speedup", "95 % interval", "identical")
MARKDOWN_COLUMNS = (
    "method", "tree", "task", "T", "prompts", "tau", "tau (macro)", "speedup", "tokens/s", "identical", "accept rate",
)  # fmt: skip
CSV_COLUMNS = (
    "method", "tree", "levels", "k", "nodes", "head", "head_path", "task", "temperature", "top_k", "top_p",
    "verify", "prompts", "status",
    "new_tokens", "tau", "tau_macro", "tokens_per_s", "speedup", "speedup_low", "speedup_high",
    "speedup_mean_per_prompt", "speedup_with_prefill", "target_forwards", "draft_forwards", "draft_forwards_wasted",
    "draft_nodes", "accept_rate", "identical", "mismatch", "peak_memory_gib", "ms_prefill", "ms_draft", "ms_verify",
    "ms_commit", "ms_other", "ms_wall", "message",
)  # fmt: skip


SWEEP_COLUMNS = ("sweep", "key", "value", "span")


def tree_text(row: dict[str, Any]) -> str:
    """'6 levels, k 8, 16 nodes', '5 levels, chain, stop entropy', '4 levels, static, 64 nodes'; a dash for vanilla.

    What its method has otherwise is part of it, so that rows with different settings look different; a row that is not
    lossless says so.
    """
    text, variant = _tree_text(row), (row["tree"] or {}).get("variant")
    text = f"{text}, {variant}" if variant else text
    return f"{text}, NOT lossless" if is_lossy(row) else text


def is_lossy(row: dict[str, Any]) -> bool:
    """Whether the row's verification does not keep the target's law (typical acceptance), failed as it may have."""
    sampled_typical = "typical" in (row.get("tree") or {}) and row["temperature"] > 0
    return sampled_typical or "not lossless" in str(row.get("verify", ""))


def _tree_text(row: dict[str, Any]) -> str:
    tree = row["tree"]
    if tree is None:
        return NOTHING
    if tree.get("text"):
        return str(tree["text"])
    levels = f"{tree['levels']} levels"
    match tree.get("shape", "dynamic"):
        case "chain":
            return f"{levels}, chain"
        case "static":
            return f"{levels}, static, {tree['nodes']} nodes"
    return f"{levels}, k {tree['k']}, {tree['nodes']} nodes"


def sampling_text(row: dict[str, Any]) -> str:
    """'0', '1', or '0.6, top-p 0.8'."""
    parts = [f"{row['temperature']:g}"]
    if row["temperature"] > 0 and row["top_k"]:
        parts.append(f"top-k {row['top_k']}")
    if row["temperature"] > 0 and row["top_p"] < 1:
        parts.append(f"top-p {row['top_p']:g}")
    return ", ".join(parts)


def label(row: dict[str, Any], rows: Sequence[dict[str, Any]]) -> str:
    """The row in a few words: method, tree, and its sampling where the rows have several."""
    words = [row["method"]] if row["tree"] is None else [row["method"], tree_text(row)]
    if len({sampling_text(other) for other in rows}) > 1:
        words.append(f"T {sampling_text(row)}")
    return ", ".join(words)


def identical_text(row: dict[str, Any]) -> str:
    """'40/40'; a dash where nothing was compared."""
    identical = row.get("identical")
    return NOTHING if identical is None else f"{identical}/{identical + row['mismatch']}"


def number(value: float | None, digits: int = 2) -> str:
    """The value with this many digits after the point, or a dash."""
    return NOTHING if value is None else f"{value:.{digits}f}"


def interval(row: dict[str, Any]) -> str:
    """The speedup's interval as '2.20–2.43'; a dash for vanilla, which is compared with itself."""
    bounds = row.get("speedup_ci95")
    return NOTHING if bounds is None or row["method"] == "vanilla" else f"{bounds[0]:.2f}–{bounds[1]:.2f}"


def ms_per_cycle(row: dict[str, Any]) -> dict[str, float]:
    """Decode milliseconds per cycle by part; empty for a row that failed or never decoded."""
    if row["status"] != "ok" or not row["target_forwards"]:
        return {}
    return {part: row["ms"][part] / row["target_forwards"] for part in ("draft", "verify", "commit", "other")}


def console_table(summary: dict[str, Any]) -> str:
    """method, tree, T, tau, speedup, interval, identical: what a terminal shows at the end."""
    lines: list[list[str]] = [list(CONSOLE_COLUMNS)]
    failures: dict[int, str] = {}
    for row in summary["rows"]:
        cells = [row["method"], tree_text(row), sampling_text(row)]
        if row["status"] == "ok":
            speedup = NOTHING if row["speedup"] is None else f"{row['speedup']:.2f}x"
            cells += [number(row["tau"]), speedup, interval(row), identical_text(row)]
        else:
            failures[len(lines)] = f"error: {row['message']}"
            cells += [""] * (len(CONSOLE_COLUMNS) - len(cells))
        lines.append(cells)
    widths = [max(len(line[column]) for line in lines) for column in range(len(CONSOLE_COLUMNS))]
    text = []
    for place, line in enumerate(lines):
        padded = [
            cell.ljust(width) if name in ("method", "tree", "T", "95 % interval") else cell.rjust(width)
            for name, cell, width in zip(CONSOLE_COLUMNS, line, widths, strict=True)
        ]
        shown = [*padded[:3], failures[place]] if place in failures else padded
        text.append("  ".join(shown).rstrip())
    text.insert(1, "  ".join("─" * width for width in widths))
    return "\n".join(text)


def markdown_table(summary: dict[str, Any]) -> str:
    """The main table in GitHub's Markdown, and below it one for each sweep."""
    text = _markdown(MARKDOWN_COLUMNS, [_markdown_cells(row) for row in summary["rows"]])
    by_sweep: dict[str, list[dict[str, Any]]] = {}
    for point in summary.get("sweeps", ()):
        by_sweep.setdefault(point["sweep"], []).append(point)
    for name, points in by_sweep.items():
        heads = (("head", lambda point: point.get("head_path") or point.get("head") or NOTHING),)
        several = [column for column in heads if len({column[1](point) for point in points}) > 1]
        columns = (points[0]["key"], *(column for column, _ in several), *MARKDOWN_COLUMNS)
        cells = [[_value(point), *(word(point) for _, word in several), *_markdown_cells(point)] for point in points]
        text += f"\nSweep {_markdown_cell(name)}:\n\n{_markdown(columns, cells)}"
    return text


def csv_table(summary: dict[str, Any]) -> str:
    """One line per row with every figure, unrounded; empty where there is none."""
    return _csv(CSV_COLUMNS, summary["rows"])


def sweeps_csv(summary: dict[str, Any]) -> str:
    """The same for the points of the sweeps, each with its sweep, key and value."""
    return _csv((*SWEEP_COLUMNS, *CSV_COLUMNS), summary["sweeps"])


def _csv(columns: Sequence[str], rows: Sequence[dict[str, Any]]) -> str:
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, columns, restval="", extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    for row in rows:
        low, high = row.get("speedup_ci95") or (None, None)
        times = {f"ms_{part}": value for part, value in row.get("ms", {}).items()}
        text = "" if row["tree"] is None else tree_text(row)
        sizes = {**(row["tree"] or {}), **times, "speedup_low": low, "speedup_high": high}
        writer.writerow({**row, **sizes, "tree": text})
    return buffer.getvalue()


def _markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    lines += [f"| {' | '.join(_markdown_cell(cell) for cell in cells)} |" for cells in rows]
    return "\n".join(lines) + "\n"


def _markdown_cells(row: dict[str, Any]) -> list[str]:
    """A row's cells, in the order of MARKDOWN_COLUMNS."""
    cells = [row["method"], tree_text(row), row["task"], sampling_text(row), str(row["prompts"])]
    if row["status"] != "ok":
        return [*cells, f"error: {row['message']}", *[NOTHING] * (len(MARKDOWN_COLUMNS) - len(cells) - 1)]
    speedup = NOTHING if row["speedup"] is None else f"{row['speedup']:.2f}x"
    if interval(row) != NOTHING:
        speedup += f" [{interval(row)}]"
    cells += [number(row["tau"]), number(row.get("tau_macro")), speedup, number(row["tokens_per_s"], 1)]
    return [*cells, identical_text(row), number(row["accept_rate"], 3)]


def _value(point: dict[str, Any]) -> str:
    """A point's value, and the span of one of a context length."""
    return f"{point['value']}, {point['span']}" if "span" in point else str(point["value"])


def _markdown_cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def names(records: Sequence[Record], rows: Sequence[int]) -> str:
    """'row 2 (eagle2, 6 levels, k 10, 60 nodes)': the rows as tables name them, each once."""
    groups = group(records)
    every = [one.as_dict() for one in told_apart([identity(members) for members in groups])]
    labels = {
        members.first.row: f"row {members.first.row} ({label(one, every)})"
        for members, one in zip(groups, every, strict=True)
    }
    return " and ".join(labels.get(row, f"row {row}") for row in dict.fromkeys(rows))
