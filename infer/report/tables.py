"""A row of the summary in words, and the rows as text: a console table, Markdown and CSV."""

import csv
import io
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from aerie.infer.measure.record import Record, SummaryRow
from aerie.infer.measure.statistics import VANILLA, group, identity, told_apart

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
Item = TypeVar("Item")
Key = TypeVar("Key")


def grouped(items: Iterable[Item], key: Callable[[Item], Key]) -> dict[Key, list[Item]]:
    """The items by their key, both in order of appearance."""
    groups: dict[Key, list[Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def tree_text(row: SummaryRow) -> str:
    """'6 levels, k 8, 16 nodes', '5 levels, chain, stop entropy', '4 levels, static, 64 nodes'; a dash for vanilla.

    Settings other than the published ones are part of it, and so is that a row is not lossless.
    """
    tree = row.tree
    if tree is None:
        return NOTHING
    sizes = {"chain": "chain", "static": f"static, {tree.nodes} nodes"}.get(
        tree.shape, f"k {tree.k}, {tree.nodes} nodes"
    )
    parts = (tree.text or f"{tree.levels} levels, {sizes}", tree.variant, "NOT lossless" if is_lossy(row) else "")
    return ", ".join(part for part in parts if part)


def is_lossy(row: SummaryRow) -> bool:
    """Whether the row's verification does not keep the target's law (typical acceptance), even where it failed."""
    typical = row.tree is not None and "typical" in row.tree.settings and row.temperature > 0
    return typical or "not lossless" in row.verify


def sampling_text(row: SummaryRow | Record) -> str:
    """'0', '1', or '0.6, top-p 0.8'."""
    parts = [f"{row.temperature:g}"]
    if row.temperature > 0 and row.top_k:
        parts.append(f"top-k {row.top_k}")
    if row.temperature > 0 and row.top_p < 1:
        parts.append(f"top-p {row.top_p:g}")
    return ", ".join(parts)


def label(row: SummaryRow, rows: Sequence[SummaryRow]) -> str:
    """The row in a few words: method, tree, and its sampling where the rows have several."""
    words = [row.method] if row.tree is None else [row.method, tree_text(row)]
    if len({sampling_text(other) for other in rows}) > 1:
        words.append(f"T {sampling_text(row)}")
    return ", ".join(words)


def identical_text(row: SummaryRow) -> str:
    """'40/40'; a dash where nothing was compared."""
    return NOTHING if row.identical is None else f"{row.identical}/{row.identical + (row.mismatch or 0)}"


def number(value: float | None, digits: int = 2, unit: str = "") -> str:
    """The value with this many digits after the point and its unit, or a dash."""
    return NOTHING if value is None else f"{value:.{digits}f}{unit}"


def interval(row: SummaryRow) -> str:
    """The speedup's interval as '2.20–2.43'; a dash for vanilla, which is compared with itself."""
    bounds = row.speedup_ci95
    return NOTHING if bounds is None or row.method == VANILLA else f"{bounds[0]:.2f}–{bounds[1]:.2f}"


def ms_per_cycle(row: SummaryRow) -> dict[str, float]:
    """Decode milliseconds per cycle by part; empty for a row that failed or never decoded."""
    if row.ms is None or not row.target_forwards:
        return {}
    return {part: getattr(row.ms, part) / row.target_forwards for part in ("draft", "verify", "commit", "other")}


def console_table(rows: Sequence[SummaryRow]) -> str:
    """method, tree, T, tau, speedup, interval, identical: what a terminal shows at the end."""
    lines: list[Sequence[str]] = [CONSOLE_COLUMNS]
    for row in rows:
        cells = [row.method, tree_text(row), sampling_text(row)]
        if row.status == "ok":
            cells += [number(row.tau), number(row.speedup, unit="x"), interval(row), identical_text(row)]
        lines.append(cells)
    widths = [max(len(line[column]) for line in lines if column < len(line)) for column in range(len(CONSOLE_COLUMNS))]
    text = []
    for line in lines:
        padded = [
            cell.ljust(width) if name in ("method", "tree", "T", "95 % interval") else cell.rjust(width)
            for name, cell, width in zip(CONSOLE_COLUMNS, line, widths, strict=False)
        ]
        text.append("  ".join(padded).rstrip())
    for place, row in enumerate(rows, start=1):
        text[place] += f"  error: {row.message}" if row.status != "ok" else ""
    text.insert(1, "  ".join("─" * width for width in widths))
    return "\n".join(text)


def markdown_table(rows: Sequence[SummaryRow], sweeps: Sequence[SummaryRow] = ()) -> str:
    """The main table in GitHub's Markdown, and below it one for each sweep."""
    text = _markdown(MARKDOWN_COLUMNS, [_markdown_cells(row) for row in rows])
    for name, points in grouped(sweeps, lambda point: point.sweep).items():
        heads = [point.head_path or point.head or NOTHING for point in points]
        several = len(set(heads)) > 1
        cells = [
            [str(point.value) + (f", {point.span}" if point.span else ""), *[head] * several, *_markdown_cells(point)]
            for point, head in zip(points, heads, strict=True)
        ]
        columns = (str(points[0].key), *["head"] * several, *MARKDOWN_COLUMNS)
        text += f"\nSweep {_escaped(str(name))}:\n\n{_markdown(columns, cells)}"
    return text


def csv_table(rows: Sequence[SummaryRow]) -> str:
    """One line per row with every figure, unrounded; empty where there is none."""
    return _csv(CSV_COLUMNS, rows)


def sweeps_csv(points: Sequence[SummaryRow]) -> str:
    """The same for the points of the sweeps, each with its sweep, key and value."""
    return _csv((*SWEEP_COLUMNS, *CSV_COLUMNS), points)


def names(records: Sequence[Record], rows: Sequence[int]) -> str:
    """'row 2 (eagle2, 6 levels, k 10, 60 nodes)': the rows as tables name them, each once."""
    groups = group(records)
    every = told_apart([identity(members) for members in groups])
    labels = {
        members.first.row: f"row {members.first.row} ({label(row, every)})"
        for members, row in zip(groups, every, strict=True)
    }
    return " and ".join(labels.get(row, f"row {row}") for row in dict.fromkeys(rows))


def _csv(columns: Sequence[str], rows: Sequence[SummaryRow]) -> str:
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, columns, restval="", extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    for row in rows:
        values: dict[str, Any] = row.as_dict()
        times = {f"ms_{part}": value for part, value in (values.get("ms") or {}).items()}
        low, high = row.speedup_ci95 or (None, None)
        sizes = {} if row.tree is None else {"levels": row.tree.levels, "k": row.tree.k, "nodes": row.tree.nodes}
        text = "" if row.tree is None else tree_text(row)
        writer.writerow({**values, **sizes, **times, "speedup_low": low, "speedup_high": high, "tree": text})
    return buffer.getvalue()


def _markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    lines += [f"| {' | '.join(map(_escaped, cells))} |" for cells in rows]
    return "\n".join(lines) + "\n"


def _markdown_cells(row: SummaryRow) -> list[str]:
    """A row's cells, in the order of MARKDOWN_COLUMNS."""
    cells = [row.method, tree_text(row), row.task, sampling_text(row), str(row.prompts)]
    if row.status != "ok":
        return [*cells, f"error: {row.message}", *[NOTHING] * (len(MARKDOWN_COLUMNS) - len(cells) - 1)]
    speedup = number(row.speedup, unit="x") + (f" [{interval(row)}]" if interval(row) != NOTHING else "")
    cells += [number(row.tau), number(row.tau_macro), speedup, number(row.tokens_per_s, 1)]
    return [*cells, identical_text(row), number(row.accept_rate, 3)]


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
