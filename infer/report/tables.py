"""Rows of the summary in words and as text tables."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from aerie.configs.errors import UserError
from aerie.configs.read import read_text, read_yaml
from aerie.infer.measure.bench_files import Record, SummaryRow
from aerie.infer.measure.stage_facts import measured_facts
from aerie.infer.measure.statistics import VANILLA, group, identity, told_apart
from aerie.infer.measure.tree_shape import aligned
from aerie.model.storage import FILE, read_json

SummaryRows = Sequence[SummaryRow]
NOTHING = "–"
AT = " at T "  # in the name of a column: 'tau at T 1'
RESULTS = re.compile(
    r"(<!-- results (\S+): (.+?) -->\n)(.*?)(<!-- /results -->)", re.DOTALL
)  # the mark, with run and columns; the table; the end
TEXT_COLUMNS: dict[str, list[str]] = read_yaml(Path(__file__).with_name("columns.yaml"))[0]


def tree_text(row: SummaryRow) -> str:
    return NOTHING if row.tree is None else row.tree.words


def sampling_text(row: SummaryRow) -> str:
    """'0', '1', or '0.6, top-p 0.8'."""
    if row.temperature == 0:
        return "0"
    top_k = f", top-k {row.top_k}" if row.top_k else ""
    top_p = f", top-p {row.top_p:g}" if row.top_p < 1 else ""
    return f"{row.temperature:g}{top_k}{top_p}"


def label(row: SummaryRow, rows: SummaryRows) -> str:
    """Method, tree, and the sampling where the rows have several."""
    words = [row.method] if row.tree is None else [row.method, tree_text(row)]
    if len({sampling_text(alternative) for alternative in rows}) > 1:
        words.append(f"T {sampling_text(row)}")
    return ", ".join(words)


def method_text(row: SummaryRow) -> str:
    """'eagle (children sampled)': the method, with what it does not have from its paper."""
    variant = row.tree.variant if row.tree else ""
    return f"{row.method} ({variant})" if variant else row.method


def row_labels(records: Sequence[Record], rows: Sequence[int]) -> str:
    """'row 2 (eagle2, 6 levels, k 10, 60 nodes)' of each row."""
    groups = group(records)
    identities = told_apart([identity(members) for members in groups])
    labels = {}
    for members, row in zip(groups, identities, strict=True):
        labels[members.first.row] = f"row {members.first.row} ({label(row, identities)})"
    return " and ".join(labels[row] for row in dict.fromkeys(rows))


def number(value: float | None, digits: int = 2, unit: str = "") -> str:
    return NOTHING if value is None else f"{value:.{digits}f}{unit}"


def speedup_interval(row: SummaryRow) -> str:
    bounds = row.speedup_ci95
    if bounds is None or row.method == VANILLA:
        return NOTHING
    return f"{bounds[0]:.2f}–{bounds[1]:.2f}"


def beyond_text(row: SummaryRow) -> str:
    if not row.beyond_trained:
        return ""
    return f"{row.beyond_trained:.0%} beyond {row.trained_length:,}"


def identical_text(row: SummaryRow) -> str:
    if row.identical is None:
        return NOTHING
    return f"{row.identical}/{row.identical + (row.mismatch or 0)}"


def ms_per_cycle(row: SummaryRow) -> dict[str, float]:
    """Decode milliseconds per cycle by part; empty where the row has none."""
    if row.ms is None or not row.target_forwards:
        return {}
    parts = ("draft", "verify", "commit", "other")
    return {part: getattr(row.ms, part) / row.target_forwards for part in parts}


def text_cells(row: SummaryRow) -> dict[str, str]:
    """A row's cells by the names of columns.yaml; a failed row has an error in place of figures."""
    cells = {
        "method": row.method,
        "tree": tree_text(row),
        "task": row.task,
        "T": sampling_text(row),
        "prompts": str(row.prompts),
    }
    if row.status != "ok":
        return {**cells, "error": f"error: {row.message}"}
    return cells | {
        "tau": number(row.tau),
        "tau (macro)": number(row.tau_macro),
        "speedup": number(row.speedup, unit="x"),
        "95 % interval": speedup_interval(row),
        "tokens/s": number(row.tokens_per_s, 1),
        "identical": identical_text(row),
        "accept rate": number(row.accept_rate, 3),
    }


def console_table(rows: SummaryRows) -> str:
    names = [*TEXT_COLUMNS["console"], "error"]
    lines = []
    for row in rows:
        cells = text_cells(row)
        lines.append([cells.get(name, "") for name in names])
    table = aligned([*names[:-1], ""], lines, to_the_right=("tau", "speedup", "identical"))
    columns, served = served_table(rows)
    return f"{table}\n\n{aligned(columns, served)}" if served else table


def shares_text(shares: Sequence[float] | None) -> str:
    """'.62 .41 .30': by position."""
    return " ".join(f"{share:.2f}".lstrip("0") for share in shares) if shares else NOTHING


def load_texts(row: SummaryRow) -> dict[str, tuple[str, str]]:
    """Tokens/s, and how many answers were vanilla's or failed, by names such as '8 at once'."""
    texts = {}
    for load in row.served["at_once"] if row.served else ():
        words = []
        if load["compared"]:
            words.append(f"identical {load['identical']}/{load['compared']}")
        if load["failed"]:
            words.append(f"{load['failed']} failed")
        texts[f"{load['at_once']} at once"] = (number(load["tokens_per_s"], 1), ", ".join(words))
    return texts


def load_names(rows: SummaryRows) -> list[str]:
    return list(dict.fromkeys(name for row in rows for name in load_texts(row)))


class DraftsText(NamedTuple):
    """A served row's drafts beside those of a chain."""

    verdict: str  # 'the same drafts'
    cycles: str  # '362 = 362 cycles of row 1 in 20 answers'

    @classmethod
    def of(cls, chain: Mapping[str, Any]) -> "DraftsText":
        """chain: of SummaryRow.served."""
        verdict = "the same drafts"
        sign = "="
        if chain["differing"]:
            verdict = "other drafts"
            sign = "against"
        if chain["other_from"] is not None:
            verdict += f" from position {chain['other_from']} on"
        cycles = f"{chain['cycles']} {sign} {chain['chain_cycles']} cycles"
        return cls(verdict, f"{cycles} of row {chain['row']} in {chain['answers']} answers")


def served_cells(row: SummaryRow) -> dict[str, str]:
    """What is known of a served row alone, by column."""
    served = row.served or {}
    loads = {name: " ".join(filter(None, texts)) for name, texts in load_texts(row).items()}
    return {
        "row": served["name"],
        "T": sampling_text(row),
        "server": f"{served['server']}, {served['model']}",
        "tau": number(row.tau),
        "server's own": number(served["mean_acceptance_length"]),
        "accepted by position": shares_text(served["accepted_by_position"]),
        "tokens/s": number(row.tokens_per_s, 1),
        **loads,
        "drafts": ": ".join(DraftsText.of(served["chain"])) if served["chain"] else NOTHING,
    }


def served_table(rows: SummaryRows) -> tuple[list[str], list[list[str]]]:
    """The columns and lines of the rows that a server answered."""
    lines = [served_cells(row) for row in rows if row.served]
    columns = list(dict.fromkeys(name for line in lines for name in line))
    return columns, [[line.get(name, NOTHING) for name in columns] for line in lines]


def markdown_table(rows: SummaryRows) -> str:
    columns = TEXT_COLUMNS["markdown"]
    text = f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}\n"
    for row in rows:
        cells = text_cells(row)
        cells.setdefault("tau", cells.get("error", NOTHING))
        line = " | ".join(cells.get(name, NOTHING).replace("|", "\\|") for name in columns)
        text += f"| {' '.join(line.splitlines())} |\n"
    columns, served = served_table(rows)
    if served:
        text += f"\n| {' | '.join(columns)} |\n|{'---|' * len(columns)}\n"
        text += "".join(f"| {' | '.join(cells)} |\n" for cells in served)
    return text


def csv_table(rows: SummaryRows, *, are_points: bool = False) -> str:
    """One line per row, unrounded; points of sweeps begin with sweep, key, value and span."""
    lines = []
    for row in rows:
        values = row.as_dict()
        tree: dict[str, Any] = {"tree": None}
        if row.tree is not None:
            tree = {**row.tree.as_dict(), "tree": tree_text(row)}
        times = {f"ms_{part}": ms for part, ms in (values.get("ms") or {}).items()}
        low, high = row.speedup_ci95 or (None, None)
        lines.append({**values, **tree, **times, "speedup_low": low, "speedup_high": high})
    columns = TEXT_COLUMNS["csv"]
    if are_points:
        columns = ["sweep", "key", "value", "span", *columns]
    table = pd.DataFrame(lines, columns=columns, dtype=object)
    return table.to_csv(index=False, lineterminator="\n")


def run_results(run: Path, columns: Sequence[str]) -> str:
    """These columns of a run's table and of its tuned row; then commit, hardware and claims."""
    if (run / "bench" / FILE).is_file():  # else only the report is left
        measured_facts(run / "bench", f"--run {run}")
    report = run / "report"
    summary = read_json(report / "summary.json")
    details = read_json(report / "details.json")
    try:
        facts = facts_line(summary, details)
        table = read_text(report / "table.md").split("\n\n")[0].splitlines()
        names, _, *lines = [line.strip("| ").split(" | ") for line in table]
        rows = [dict(zip(names, cells, strict=True)) for cells in lines]
        if measured := (details["tuning"] or {}).get("measured"):
            rows += [tuned_cells(measured)]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"{report}: is damaged; run: aerie report --run {run}") from error
    if any(AT in column for column in columns):
        rows = side_by_side(rows)
    known = dict.fromkeys(name for row in rows for name in row)
    if unknown := [column for column in columns if column not in known]:
        raise UserError(f"{report}: has no column {unknown[0]!r}, but {', '.join(known)}")
    text = f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}\n"
    for row in rows:
        text += f"| {' | '.join(row.get(name, NOTHING) for name in columns)} |\n"
    return f"{text}\n{facts}\n"


def facts_line(summary: Mapping[str, Any], details: Mapping[str, Any]) -> str:
    """The run, its commit and hardware, trainings cut short, and how many claims hold."""
    hardware = [f"{key} {value}" for key, value in summary["hardware"].items() if value]
    facts = f"`{summary['run']}`, commit `{summary['commit']}`: {', '.join(hardware)}."
    for training, words in details["training"]["stopped"].items():
        facts += f" {training}: {words}."
    claims = (details["claims"] or {"lines": []})["lines"]
    verdicts = Counter(line["verdict"] for line in claims if line["ours"])
    if verdicts:
        told = ", ".join(f"{verdict} {count}" for verdict, count in verdicts.items())
        facts += f" Verdicts on the papers' claims: {told}."
    return facts


def side_by_side(rows: Sequence[Mapping[str, str]]) -> list[dict[str, str]]:
    """Rows that differ in T alone as one row, which also has each cell as 'tau at T 1'."""
    merged: dict[tuple[str, str, int], dict[str, str]] = {}
    seen: Counter[tuple[str, str, str]] = Counter()  # two heads may have the same method and tree
    for row in rows:
        method, tree, temperature = row["method"], row["tree"], row["T"]
        first = merged.setdefault((method, tree, seen[method, tree, temperature]), dict(row))
        first |= {f"{name}{AT}{temperature}": cell for name, cell in row.items()}
        seen[method, tree, temperature] += 1
    return [*merged.values()]


def tuned_cells(measured: Mapping[str, Any]) -> dict[str, str]:
    """The chosen row of measured.json, by column."""
    chosen = [row["chosen_against_it"] for row in measured["rows"]].index(1.0)
    method, _, tree = measured["names"][chosen].partition(", ")
    low, high = measured["rows"][chosen]["speedup_ci95"]
    return {
        "method": f"{method} (tuned)",
        "tree": tree or NOTHING,
        "T": "0",
        "tau": number(measured["rows"][chosen]["tau"]),
        "speedup": number(measured["rows"][chosen]["speedup"], unit="x"),
        "95 % interval": f"{low:.2f}–{high:.2f}",
    }


def page_with_results(text: str, page: Path) -> str:
    """The page with what its marked runs measured; a run without a report leaves its table."""

    def filled(block: re.Match[str]) -> str:
        first, run, columns, _, last = block.groups()
        if not (Path(run) / "report/summary.json").is_file():
            print(f"{page}: {run} has no report; its table stays")
            return block[0]
        return first + run_results(Path(run), columns.split(", ")) + last

    text, found = RESULTS.subn(filled, text)
    if not found:
        raise UserError(f"{page}: has no <!-- results RUN: method, tau --> ... <!-- /results -->")
    return text
