"""The page's first words: what the figures say, a sentence for each part that was measured."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from aerie.configs.errors import UserError
from aerie.configs.schema.measure import CONTEXT
from aerie.infer.measure.record import OVERHEAD, SUITE, Asked, Overhead, Record, Reference, read_as, read_records
from aerie.infer.measure.statistics import (
    VANILLA,
    Group,
    distinct_ngrams,
    main_groups,
    row,
    summary_row,
    sweep_rows,
    tau_interval,
    told_apart,
)
from aerie.infer.report import papers, plots
from aerie.infer.report.papers import (
    LEAST_SPEED,
    LEAST_TAU,
    MOST_WASTE,
    TASKS,
    Beside,
    Line,
    Policies,
    Reasoning,
    Traced,
    beside,
    claims,
    from_json,
    length_sentence,
    length_words,
    lengths,
    lines_of,
    measured_constants,
    numeric,
    policy_tables,
    published_rules,
    reasoning_tables,
    traced,
    values_of,
)
from aerie.infer.report.plots import (
    DARK,
    LIGHT,
    context_picture,
    depth_picture,
    draft_picture,
    pictures,
    standalone,
    trace_picture,
    value_picture,
)
from aerie.infer.report.tables import (
    NOTHING,
    console_table,
    csv_table,
    identical_text,
    interval,
    is_lossy,
    label,
    markdown_table,
    ms_per_cycle,
    number,
    sampling_text,
    sweeps_csv,
    tree_text,
)
from aerie.model.storage import read_json, write_json, write_text

CLOSE = 0.15  # how far a predicted speedup may be off


def reading(summary: Mapping[str, Any], details: Mapping[str, Any]) -> list[str]:
    """The sentences, each true of these figures; the verdict on the outputs stands above them (infer/page.py)."""
    sentences = [*_rows(summary["rows"]), *_calibration(details.get("analysis")), *_tuning(details["tuning"])]
    for claim in details["deagle"]:
        sentences.append(f"DEAGLE’s claim, on the {claimed_on(claim)}: {_kept(claim)}")
    for comparison in details["lengths"]:
        sentences += [length_sentence(comparison, rule) for rule in published_rules(comparison)]
    return sentences


def claimed_on(claim: Mapping[str, Any]) -> str:
    """The head, and by which calibrator its confidence goes, where it goes by one."""
    confidence = f" with {claim['calibrated']} confidence" if claim.get("calibrated") else ""
    return f"{claim['head_path'] or claim['head']} head{confidence}"


def claim_words(claim: Mapping[str, Any]) -> list[str]:
    """The claim's numbers in words, with whether each holds."""
    largest, fixed, vote = claim["largest"], claim["fixed"][-1], claim["vote"][-1]
    words = [
        f"With room for {largest} levels the vote wastes {vote['draft_forwards_wasted']:,} draft forwards, the fixed "
        f"tree {fixed['draft_forwards_wasted']:,}"
        + (f": {claim['waste']:.2f} times as many. " if claim["waste"] is not None else ". ")
        + _holds(claim["waste_holds"], f"at most {MOST_WASTE:g} times as many"),
    ]
    if claim["tau"] is not None:
        words.append(
            f"There it has a tau of {vote['tau']:.2f}: {100 * claim['tau']:.1f} % of the fixed tree’s best over the "
            f"depths (at {claim['tau_best_depth']}). {_holds(claim['tau_holds'], f'at least {100 * LEAST_TAU:g} %')}"
        )
    if claim["modelled"] is not None:
        words.append(
            f"With the costs measured here its cycles are worth a speedup of {vote['modelled']:.2f}: "
            f"{100 * claim['modelled']:.1f} % of its own best over the depths (at {claim['modelled_best_depth']}). "
            f"{_holds(claim['modelled_holds'], f'at least {100 * LEAST_SPEED:g} %')}"
        )
    for wall in claim["wall"]:
        if wall["speed"] is not None:
            tree = f"the {'fixed' if wall['rule'] == 'fixed' else 'voting'} tree of at most {wall['depth']} levels"
            words.append(
                f"By the clock, paired by prompt, it is {wall['speed']:.2f} times as fast as {tree}"
                f"{_between(wall['speed_ci95'])}."
            )
    return words


def _rows(rows: Sequence[dict[str, Any]]) -> list[str]:
    drafting = [row for row in rows if row["status"] == "ok" and row["tree"] is not None]
    found = []
    longest = max((row for row in drafting if row["tau"]), key=lambda row: row["tau"], default=None)
    if longest is not None:
        found.append(
            f"A target forward yields {longest['tau']:.2f} tokens on average with {label(longest, rows)}, the most of "
            "any row; without drafting it yields one."
        )
    fastest = max((row for row in drafting if row["speedup"]), key=lambda row: row["speedup"], default=None)
    if fastest is not None:
        lossy = ", which is NOT lossless" if is_lossy(fastest) else ""
        found.append(
            f"The fastest row, {label(fastest, rows)}, decodes at {fastest['speedup']:.2f} times the speed of the "
            f"target alone{_between(fastest.get('speedup_ci95'))}{lossy}."
        )
    return found


def _calibration(analysis: Mapping[str, Any] | None) -> list[str]:
    scores = analysis and analysis.get("calibrator")
    if not scores:
        return []
    before, fits = scores["held_out"]["before"]["ece"], ("temperature", "isotonic")
    after = {fit: scores["held_out"][fit]["ece"] for fit in fits}
    best = min(fits, key=lambda fit: after[fit])
    change = "lowers" if after[best] < before else "does not lower"
    return [
        f"On prompts that it has not seen, the calibrator {change} the expected calibration error: {before:.4f} "
        f"before, {after['temperature']:.4f} with a temperature, {after['isotonic']:.4f} isotonic."
    ]


def _tuning(tuning: Mapping[str, Any] | None) -> list[str]:
    chosen = tuning and next((head for head in tuning["heads"] if head["kind"] == tuning["chosen"]), None)
    if not chosen:
        return []
    assert tuning is not None
    choice, usual = chosen["choice"], chosen["published"]
    found = [
        f"Tuned to this machine: {choice['method']} on the {chosen['kind']} head with {_tree(choice['tree'])}, "
        f"predicted to be {choice['speedup']:.2f} times as fast as the target alone; its published tree "
        f"({_tree(usual['tree'])}): {usual['speedup']:.2f} times."
    ]
    measured = tuning.get("measured")
    ratio = (measured or {}).get("predicted_over_measured") or 0.0
    against = measured["against_published"] if measured else None
    if measured and against and against["chosen_against_it"] is not None:
        found.append(
            f"Measured on other prompts, the choice has {against['chosen_against_it']:.2f} times the speed of the "
            f"published tree{_between(against['chosen_against_it_ci95'])}.{_best_of_grid(measured)} Predicted over "
            f"measured speedup is {number(ratio, 3)}: {'' if abs(ratio - 1) <= CLOSE else 'NOT '}within "
            f"{100 * CLOSE:g} %."
        )
    return found


def _best_of_grid(measured: Mapping[str, Any]) -> str:
    """The choice against the best of the grid, chosen on these very prompts; nothing where no grid was timed."""
    best = measured.get("against_best_of_grid")
    if not best or best["chosen_against_it"] is None:
        return ""
    times = f"{best['chosen_against_it']:.2f} times{_between(best['chosen_against_it_ci95'])}"
    return f" Against the best of a grid it has {times}."


def _kept(claim: Mapping[str, Any]) -> str:
    """Which of the claim's parts hold, at the largest depth."""
    parts = {
        "wasted forwards": claim["waste_holds"],
        "tau": claim["tau_holds"],
        "modelled speed": claim["modelled_holds"],
    }
    groups = {
        "holds for {}": [name for name, held in parts.items() if held],
        "does not hold for {}": [name for name, held in parts.items() if held is False],
        "was not checked for {}": [name for name, held in parts.items() if held is None],
    }
    said = "; ".join(words.format(" and ".join(names)) for words, names in groups.items() if names)
    return (
        f"with room for {claim['largest']} levels it {said} (T {claim['temperature']:g}, {claim['prompts']} prompts)."
    )


def _holds(held: bool | None, limit: str) -> str:
    if held is None:
        return f"There is no ratio to hold against the limit ({limit})."
    return f"The claim, {limit}, {'holds' if held else 'does NOT hold'} here."


def _between(bounds: Sequence[float] | None) -> str:
    """The interval, and on which side of 1 it lies."""
    if not bounds:
        return " (too few prompts for an interval)"
    side = "all above 1" if bounds[0] > 1 else "all below 1" if bounds[1] < 1 else "1 is in it"
    return f" (95 % {bounds[0]:.2f}–{bounds[1]:.2f}, {side})"


def _tree(tree: Mapping[str, Any]) -> str:
    if tree["shape"] == "chain":
        return f"a chain of at most {tree['levels']} tokens"
    if tree["shape"] == "static":
        return "its static tree"
    return f"at most {tree['levels']} levels, k {tree['k']} and {tree['nodes']} nodes"


PREFIX = "sweep-"


@dataclass(frozen=True)
class Varied:
    """A sweep over a setting that no paper's table is about."""

    name: str
    key: str
    values: tuple[Any, ...]
    lines: tuple[Line, ...]


@dataclass(frozen=True)
class Sections:
    """The tables, each with the name of its picture where it has one."""

    ablation: papers.Ablation | None
    depths: tuple[tuple[str, papers.Depths], ...]
    contexts: papers.Contexts | None
    varied: tuple[tuple[str | None, Varied], ...]
    policies: tuple[Policies, ...]
    traces: tuple[tuple[str, Traced], ...]
    reasoning: tuple[Reasoning, ...]
    beside: tuple[Beside, ...]

    @property
    def published(self) -> dict[str, Any]:
        """The papers' numbers that stand beside, for the template."""
        return {
            "tasks": tuple(TASKS.values()),
            "depth_columns": papers.PUBLISHED_COLUMNS,
            "depths": papers.PUBLISHED_depths,
            "lengths": papers.PUBLISHED_LENGTHS,
            "contexts": papers.PUBLISHED_context_tables,
            "greedy_lengths": papers.PUBLISHED_GREEDY_LENGTHS,
            "greedy_contexts": papers.PUBLISHED_GREEDY,
        }


def sections(
    rows: Sequence[dict[str, Any]],
    by_task: Sequence[dict[str, Any]],
    sweeps: Sequence[dict[str, Any]],
    traces: Sequence[dict[str, Any]] = (),
) -> Sections:
    """Everything that the rows (pooled over tasks), their parts, the sweeps and the details' traces allow."""
    varied = [
        (f"{PREFIX}{place}-{_file_name(one.name)}" if numeric(one.values) and len(one.values) > 1 else None, one)
        for place, one in enumerate(varied_tables(sweeps))
    ]
    tables = papers.depth_tables(sweeps)
    return Sections(
        papers.ablation(sweeps),
        tuple((f"{PREFIX}depths" + (f"-{place}" if place else ""), table) for place, table in enumerate(tables)),
        papers.context_tables(sweeps),
        tuple(varied),
        tuple(policy_tables(rows)),
        tuple((f"{PREFIX}trace-{place}", from_json(one)) for place, one in enumerate(traces)),
        tuple(reasoning_tables(rows, by_task)),
        tuple(beside(rows, by_task)),
    )


def varied_tables(sweeps: Sequence[dict[str, Any]]) -> list[Varied]:
    """The sweeps that are in no other table, each with its lines."""
    by_name: dict[str, list[dict[str, Any]]] = {}
    for point in sweeps:
        if point["sweep"] != CONTEXT and point["key"] not in papers.KEYS and not papers.is_of_depth(point):
            by_name.setdefault(point["sweep"], []).append(point)
    found = []
    for name, points in by_name.items():
        lines = lines_of(points)
        found.append(Varied(name, points[0]["key"], tuple(values_of(lines)), tuple(lines)))
    return found


def sweep_pictures(made: Sections) -> Mapping[str, str]:
    """name -> SVG text; the names start with PREFIX."""
    drawn = {name: depth_picture(name, table) for name, table in made.depths}
    drawn |= {name: value_picture(name, one.key, one.lines) for name, one in made.varied if name is not None}
    drawn |= {name: trace_picture(name, table) for name, table in made.traces}
    if made.contexts is not None:
        drawn[f"{PREFIX}contexts"] = context_picture(f"{PREFIX}contexts", made.contexts)
        if papers.chains_of(made.contexts):
            drawn[f"{PREFIX}drafts"] = draft_picture(f"{PREFIX}drafts", made.contexts)
    return drawn


def _file_name(name: str) -> str:
    """The name of a sweep as part of a file's name and of an id."""
    return "".join(letter if letter.isalnum() and letter.isascii() else "-" for letter in name)


TEMPLATE = "report.html.jinja"
TINTS = 4
REFERENCE_NAMES = {
    "generate_dynamic_ms_per_token": "transformers generate, dynamic cache",
    "generate_static_ms_per_token": "transformers generate, static cache",
    "vanilla_ms_per_token": "vanilla row",
    "bare_forward_ms_per_token": "bare forwards replayed",
}


@dataclass(frozen=True)
class Verdict:
    """Whether the greedy outputs are the target's own: state is good, partial (rows failed), bad or unknown."""

    state: str
    sentence: str
    identical: int
    compared: int


@dataclass(frozen=True)
class Segment:
    """The text of one cycle; tint 0 (nothing accepted, or the prefill) to TINTS."""

    text: str
    tint: int
    title: str


def render(
    summary: dict[str, Any],
    details: dict[str, Any],
    drawn: Mapping[str, str],
    samples: Sequence[tuple[str, Record]],
    commands: Sequence[str] = (),
) -> str:
    """The page's HTML."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(number=number, count=lambda value: f"{value:,}", fact=fact_text)
    environment.globals.update(
        tree_text=tree_text, sampling_text=sampling_text, identical_text=identical_text, interval=interval,
        ms_per_cycle=ms_per_cycle, label=label, nothing=NOTHING, tints=TINTS, claim_words=claim_words,
        claimed_on=claimed_on, length_words=length_words, measured_constants=measured_constants,
    )  # fmt: skip
    rows = summary["rows"]
    kept = [row for row in rows if row["status"] == "ok" and row["tree"] is not None]
    return environment.get_template(TEMPLATE).render(
        summary=summary,
        details=details,
        light=LIGHT,
        dark=DARK,
        pictures={name: Markup(svg) for name, svg in drawn.items()},  # noqa: S704 (our own SVG, its text escaped by matplotlib)
        title=title(summary),
        verdict=verdict(rows, details["rows"]),
        said=reading(summary, details),
        suite=sections(rows, details["by_task"], summary["sweeps"], details.get("traces", ())),
        best_tau=max((row for row in kept if row["tau"]), key=lambda row: row["tau"], default=None),
        best_speedup=max((row for row in kept if row["speedup"]), key=lambda row: row["speedup"], default=None),
        task_table=task_table(rows, details["by_task"]),
        references=reference_lines(details["reference"]),
        samples=[(name, record, segments(record)) for name, record in samples],
        commands=commands,
    )


def title(summary: dict[str, Any]) -> str:
    """'eagle1 head for NAME', or '5 draft heads for NAME' where the rows have several."""
    kinds = {row["head"] for row in summary["rows"] if row.get("head")}
    heads = f"{len(kinds)} draft heads" if len(kinds) > 1 else f"{summary['head'].get('kind', 'draft')} head"
    return f"{heads} for {summary['target'].get('name', summary['run'])}"


def verdict(rows: Sequence[dict[str, Any]], row_details: Sequence[dict[str, Any]]) -> Verdict:
    """What the comparison of greedy outputs showed, over every row that drafts; failed rows are named."""
    greedy = [(row, extra) for row, extra in zip(rows, row_details, strict=True) if _is_compared(row)]
    identical = sum(row["identical"] for row, _ in greedy)
    compared = sum(row["identical"] + row["mismatch"] for row, _ in greedy)
    generate = [extra for _, extra in greedy if extra["compared_to_generate"]]
    generate_identical = sum(extra["identical_to_generate"] for extra in generate)
    generate_compared = sum(extra["compared_to_generate"] for extra in generate)
    failed = sum(row["status"] != "ok" for row in rows)
    tail = f" {failed} of {len(rows)} rows failed and {'is' if failed == 1 else 'are'} not counted." if failed else ""
    lossy = sum(is_lossy(row) for row in rows)
    if lossy:
        tail += f" {lossy} sampled row{'s' * (lossy > 1)} with typical acceptance: NOT lossless."
    if not compared:
        return Verdict("unknown", f"No greedy output was compared with vanilla's.{tail}", 0, 0)
    sentence = f"{identical:,} of {compared:,} greedy outputs are token-identical to the vanilla row"
    if (generate_identical, generate_compared) == (identical, compared):
        sentence += " and to transformers’ generate."
    elif generate_compared:
        sentence += f", {generate_identical:,} of {generate_compared:,} to transformers’ generate."
    else:
        sentence += "; none was compared with transformers’ generate."
    whole = identical == compared and generate_identical == generate_compared
    state = ("partial" if failed or lossy else "good") if whole else "bad"
    return Verdict(state, sentence + tail, identical, compared)


def segments(record: Record) -> list[Segment]:
    """The answer's text by cycle, tinted by how many draft tokens the cycle kept."""
    most = max(record.accepted, default=0)
    parts = [Segment(record.cycle_texts[0], 0, "the prefill’s token")]
    for text, kept, new in zip(record.cycle_texts[1:], record.accepted, record.cycle_tokens, strict=False):
        tint = math.ceil(TINTS * kept / most) if most else 0
        parts.append(Segment(text, tint, f"{kept} accepted, {new} new"))
    return parts


def task_table(rows: Sequence[dict[str, Any]], by_task: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """Tau and speedup of every drafting row by task: {"tasks": [name], "rows": [(row, [its part of each task])]}."""
    drafting = [position for position, row in enumerate(rows) if row["tree"] is not None and row["status"] == "ok"]
    if not by_task or not drafting:
        return None
    cells = {(item["task"], item["row"]): item for item in by_task}
    tasks = list(dict.fromkeys(item["task"] for item in by_task))
    return {
        "tasks": tasks,
        "rows": [(rows[position], [cells.get((task, position)) for task in tasks]) for position in drafting],
    }


def reference_lines(reference: dict[str, Any] | None) -> list[tuple[str, float, float]]:
    """(name, ms per token, times the vanilla row's) of what was timed, slowest first."""
    if reference is None:
        return []
    vanilla = reference["vanilla_ms_per_token"]
    lines = [
        (name, reference[key], reference[key] / vanilla)
        for key, name in REFERENCE_NAMES.items()
        if reference[key] is not None
    ]
    return sorted(lines, key=lambda line: -line[1])


def fact_text(value: Any) -> str:
    """A value of a fact as a person writes it."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {fact_text(item)}" for name, item in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(fact_text(item) for item in value)
    return NOTHING if value is None else str(value)


def _is_compared(row: dict[str, Any]) -> bool:
    return bool(
        row["status"] == "ok" and row["tree"] is not None and row["temperature"] == 0 and row["identical"] is not None
    )


__all__ = ["Facts", "console_table", "write_report"]

SCHEMA = 1
PICTURES = ("tau", "speedup", "milliseconds", "depth", "lengths", "reliability")
CALIBRATION_CONTRACT = ("temperature", "ece", "brier", "bins")


@dataclass(frozen=True)
class Facts:
    """What the records cannot say: which run, code, target, head and machine. The mappings are JSON-ready."""

    run: str
    commit: str | None
    target: dict[str, Any]  # "name" is used in the title
    head: dict[str, Any]  # "kind" is used in the title
    hardware: dict[str, Any]  # device, threads, dtype, ...
    commands: tuple[str, ...] = ()  # that made the run, shown at the end of the page


def write_report(bench: Path, calibration: Path, output: Path, facts: Facts, seed: int = 0) -> dict[str, Any]:
    """Writes every file of the report and returns the content of summary.json.

    bench holds records.jsonl with suite.json, and, when these were timed, reference.json and overhead.json; calibration
    holds calibration.json, or is absent and then left out. Where the suite asks for rows by task, these are what the
    tables have; the page shows them pooled. The seed is the bootstrap's. Raises UserError for missing or
    damaged input.
    """
    records_path = bench / "records.jsonl"
    records = read_records(records_path)
    if not records:
        raise UserError(f"{records_path}: holds no whole record; measure first with: python infer/main.py bench")
    asked = read_as(bench / SUITE, Asked) if (bench / SUITE).is_file() else None
    groups = main_groups(records, asked)
    curve = _calibration_report(calibration / "calibration.json")
    reference_path = bench / "reference.json"
    reference = read_as(reference_path, Reference) if reference_path.is_file() else None
    pooled = summarise(groups, curve, facts, seed)
    details = detail(groups, reference, curve, seed)
    details["overhead"] = _overhead(bench / OVERHEAD, groups)
    details["analysis"] = _analysis(calibration / "analysis.json")
    drawn = pictures(pooled["rows"], [item["tau_ci95"] for item in details["rows"]], curve)
    if details["analysis"] is not None:
        drawn |= plots.calibration_pictures(details["analysis"])
    details["tuning"] = tuning_of(bench.parent / "tune")
    if details["tuning"] is not None:
        drawn |= plots.tuning_pictures(details["tuning"])
    points, details["sweeps"] = sweep_rows(records, asked, seed)
    pooled["sweeps"] = [point.as_dict() for point in points]
    details["deagle"] = claims(records, asked, details["tuning"], seed)
    details["lengths"] = lengths(records, asked, details["tuning"], seed)
    details["traces"] = [asdict(one) for one in traced(groups)]
    drawn |= sweep_pictures(sections(pooled["rows"], details["by_task"], pooled["sweeps"], details["traces"]))
    samples = sample_answers(groups, pooled["rows"])
    page = render(pooled, details, drawn, samples, facts.commands)
    summary = dict(pooled)
    if asked is not None and asked.by_task:
        parts = [part for members in groups for part in members.by_task().values()]
        details["pooled"] = [{**one, **more} for one, more in zip(pooled["rows"], details["rows"], strict=True)]
        summary["rows"] = [one.as_dict() for one in told_apart([summary_row(part, seed) for part in parts])]
        details["rows"] = [_row_detail(part, seed) for part in parts]
    write_json(output / "summary.json", summary)
    write_json(output / "details.json", details)
    write_text(output / "table.md", markdown_table(summary))
    write_text(output / "table.csv", csv_table(summary))
    _write_or_remove(output / "sweeps.csv", sweeps_csv(summary) if summary["sweeps"] else None)
    _write_pictures(output, drawn)
    write_text(output / "index.html", page)
    return summary


def _write_pictures(output: Path, drawn: Mapping[str, str]) -> None:
    """Every picture as a file of its own; those of an earlier report on other input go."""
    sections = {"calibration": plots.NAMES, "tuning": plots.TUNING_NAMES}
    ours = {*PICTURES, *(f"{section}-{name}" for section, names in sections.items() for name in names)}
    ours |= {path.stem for path in output.glob(f"{PREFIX}*.svg")}
    for name in sorted(ours | set(drawn)):
        _write_or_remove(output / f"{name}.svg", standalone(drawn[name]) if name in drawn else None)


def _write_or_remove(path: Path, text: str | None) -> None:
    if text is None:
        path.unlink(missing_ok=True)
    else:
        write_text(path, text)


def summarise(groups: Sequence[Group], curve: dict[str, Any] | None, facts: Facts, seed: int = 0) -> dict[str, Any]:
    """The content of summary.json."""
    return {
        "schema": SCHEMA,
        "run": facts.run,
        "commit": facts.commit,
        "target": facts.target,
        "head": facts.head,
        "hardware": facts.hardware,
        "rows": [one.as_dict() for one in told_apart([summary_row(members, seed) for members in groups])],
        "sweeps": [],
        "calibration": None if curve is None else {name: curve[name] for name in CALIBRATION_CONTRACT},
    }


def detail(
    groups: Sequence[Group], reference: Reference | None, curve: dict[str, Any] | None, seed: int = 0
) -> dict[str, Any]:
    """The content of details.json: what the page shows beyond summary.json; `rows` are in the same order.

    Where the summary's rows are by task, `pooled` has the rows over all tasks, and by_task and overhead name those.
    """
    by_task = []
    for position, members in enumerate(groups):
        tasks = members.by_task()
        if len(tasks) > 1:
            by_task += [{"row": position, **row(part, seed)} for part in tasks.values()]
    return {
        "schema": SCHEMA,
        "rows": [_row_detail(members, seed) for members in groups],
        "by_task": by_task,
        "reference": None if reference is None else asdict(reference),
        "diversity": _diversity(groups),
        "calibration": curve,
    }


def sample_answers(groups: Sequence[Group], rows: Sequence[dict[str, Any]]) -> list[tuple[str, Record]]:
    """The answers of lowest, median and highest tau (named so) of the fastest greedy row that drafts."""
    candidates = [
        (values["speedup"] or 0.0, position)
        for position, values in enumerate(rows)
        if values["status"] == "ok" and values["tree"] is not None and values["temperature"] == 0
    ]
    if not candidates:
        return []
    _, fastest = max(candidates)
    usable = [record for record in groups[fastest].records if record.cycle_texts and record.target_forwards]
    usable.sort(key=lambda record: (record.new_tokens - 1) / record.target_forwards)
    places = {"lowest tau": 0, "median tau": len(usable) // 2, "highest tau": len(usable) - 1}
    if len(usable) < len(places):
        return [("answer", record) for record in usable]
    return [(name, usable[place]) for name, place in places.items()]


def _row_detail(members: Group, seed: int) -> dict[str, Any]:
    if members.failed:
        return {"tau_ci95": None, "identical_to_generate": None, "compared_to_generate": None}
    compared = [r.identical_to_generate for r in members.records if r.identical_to_generate is not None]
    return {
        "tau_ci95": tau_interval(members.records, seed),
        "identical_to_generate": sum(compared) if compared else None,
        "compared_to_generate": len(compared) or None,
    }


def _diversity(groups: Sequence[Group]) -> dict[str, Any] | None:
    """How varied the greedy answers are, measured on vanilla's (or else the first greedy row's); None without any."""
    greedy = [members for members in groups if members.first.temperature == 0 and not members.failed]
    if not greedy:
        return None
    chosen = next((members for members in greedy if members.first.method == VANILLA), greedy[0])
    distinct, total = distinct_ngrams([record.output_ids for record in chosen.records], size=4)
    return {
        "method": chosen.first.method,
        "answers": len(chosen.records),
        "distinct_4grams": distinct,
        "total_4grams": total,
        "distinct_4gram_share": distinct / total if total else None,
    }


def _overhead(path: Path, groups: Sequence[Group]) -> list[dict[str, Any]] | None:
    """overhead.json with each row's position among the summary's; None where it was not measured."""
    if not path.is_file():
        return None
    places = {members.first.row: position for position, members in reversed(list(enumerate(groups)))}
    measured = [each for each in read_as(path, list[Overhead]) if each.row in places]
    return [{**asdict(each), "position": places[each.row]} for each in measured] or None


def tuning_of(directory: Path) -> dict[str, Any] | None:
    """tune.json with measured.json, if there is one, under "measured"; None where nothing was tuned."""
    found, measured = directory / "tune.json", directory / "measured.json"
    if not found.is_file():
        return None
    return {**read_json(found), "measured": read_json(measured) if measured.is_file() else None}


def _calibration_report(path: Path) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    value = read_json(path)
    expected = (*CALIBRATION_CONTRACT, "nodes", "by_depth", "halves")
    missing = [name for name in expected if not isinstance(value, dict) or name not in value]
    if missing:
        raise UserError(f"{path}: missing {', '.join(missing)}; make it again with: python infer/main.py calibrate")
    assert isinstance(value, dict)
    return value


def _analysis(path: Path) -> dict[str, Any] | None:
    """analysis.json; None where calibrate wrote none, UserError where another version of it did."""
    if not path.is_file():
        return None
    value = read_json(path)
    if not isinstance(value, dict) or value.get("schema") != SCHEMA:
        raise UserError(f"{path}: of another version; make it again with: python infer/main.py calibrate --overwrite")
    return value
