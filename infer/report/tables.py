"""A row of the summary in words, and the rows as text: a console table, Markdown and CSV."""

import csv
import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from aerie.infer.measure.record import Record, SummaryRow
from aerie.infer.measure.statistics import VANILLA, group, identity, told_apart

NOTHING = "–"
CONSOLE_COLUMNS = ("method", "tree", "T", "tau", "speedup", "95 % interval", "identical")
MARKDOWN_COLUMNS = (
    "method", "tree", "task", "T", "prompts", "tau", "tau (macro)", "speedup", "95 % interval", "tokens/s",
    "identical", "accept rate",
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
    lines = [dict(zip(CONSOLE_COLUMNS, CONSOLE_COLUMNS, strict=True)), *map(_cells, rows)]
    widths = {name: max(len(line.get(name, "")) for line in lines) for name in CONSOLE_COLUMNS}
    text = []
    for line in lines:
        padded = [
            line.get(name, "").ljust(width) if name in ("method", "tree", "T", "95 % interval")
            else line.get(name, "").rjust(width)
            for name, width in widths.items()
        ]  # fmt: skip
        text.append("  ".join(padded).rstrip() + (f"  {line['error']}" if "error" in line else ""))
    text.insert(1, "  ".join("─" * width for width in widths.values()))
    return "\n".join(text)


def markdown_table(rows: Sequence[SummaryRow], sweeps: Sequence[SummaryRow] = ()) -> str:
    """The main table in GitHub's Markdown, and below it one for each sweep."""
    text = _markdown(MARKDOWN_COLUMNS, map(_cells, rows))
    for name, points in grouped(sweeps, lambda point: point.sweep).items():
        key = str(points[0].key)
        cells = []
        for point in points:
            value = str(point.value) + (f", {point.span}" if point.span else "")
            cells.append({**_cells(point), "head": point.head_path or point.head or NOTHING, key: value})
        columns = tuple(dict.fromkeys((key, "head", *MARKDOWN_COLUMNS)))
        text += f"\nSweep {_escaped(str(name))}:\n\n{_markdown(columns, cells)}"
    return text


def csv_table(rows: Sequence[SummaryRow], sweeps: bool = False) -> str:
    """One line per row with every figure, unrounded; points of sweeps begin with their sweep, key and value."""
    buffer = io.StringIO()
    columns = (*(SWEEP_COLUMNS if sweeps else ()), *CSV_COLUMNS)
    writer = csv.DictWriter(buffer, columns, restval="", extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    for row in rows:
        values: dict[str, Any] = row.as_dict()
        times = {f"ms_{part}": value for part, value in (values.get("ms") or {}).items()}
        low, high = row.speedup_ci95 or (None, None)
        tree = {} if row.tree is None else {**row.tree.as_dict(), "tree": tree_text(row)}
        writer.writerow({**values, "tree": "", **tree, **times, "speedup_low": low, "speedup_high": high})
    return buffer.getvalue()


def names(records: Sequence[Record], rows: Sequence[int]) -> str:
    """'row 2 (eagle2, 6 levels, k 10, 60 nodes)': the rows as tables name them, each once."""
    groups = group(records)
    every = told_apart([identity(members) for members in groups])
    labels = {members.first.row: label(row, every) for members, row in zip(groups, every, strict=True)}
    return " and ".join(f"row {row} ({labels[row]})" for row in dict.fromkeys(rows))


def _cells(row: SummaryRow) -> dict[str, str]:
    """A row's texts by column; a row that failed has its error in place of figures."""
    cells = {"method": row.method, "tree": tree_text(row), "task": row.task, "T": sampling_text(row)}
    cells["prompts"] = str(row.prompts)
    if row.status != "ok":
        return {**cells, "error": f"error: {row.message}"}
    return cells | {
        "tau": number(row.tau),
        "tau (macro)": number(row.tau_macro),
        "speedup": number(row.speedup, unit="x"),
        "95 % interval": interval(row),
        "tokens/s": number(row.tokens_per_s, 1),
        "identical": identical_text(row),
        "accept rate": number(row.accept_rate, 3),
    }


def _markdown(columns: Sequence[str], rows: Iterable[Mapping[str, str]]) -> str:
    lines = [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    for row in rows:
        cells = {"tau": row.get("error", NOTHING), **row}
        lines.append(f"| {' | '.join(_escaped(cells.get(name, NOTHING)) for name in columns)} |")
    return "\n".join(lines) + "\n"


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
