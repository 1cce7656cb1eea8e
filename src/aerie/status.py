"""`aerie status`: what a run has, what is running, and what to type next."""

import argparse
import json
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from aerie.configs.errors import Arguments, UserError, exit_codes
from aerie.configs.read import user_path
from aerie.configs.schema.recipe import load
from aerie.data.progress import format_bytes
from aerie.model.storage import FILE, Lock, Manifest, Whole, read_json
from aerie.run import STAGES, stages_of


class LastStage(NamedTuple):
    """What a status file says: the stage that its writer ran last."""

    run: Path  # the run's directory
    name: str  # such as features, or distill 2/8 for a share
    state: str  # running, done, failed, interrupted, ...; killed: it no longer runs
    code: int  # the exit code


class StageState(NamedTuple):
    """What a stage has left in a run's directory."""

    name: str  # with the kind of head, where the stage is train
    state: str  # whole, damaged, running, stopped or absent
    facts: list[str]  # texts to print


@exit_codes()
def main() -> int:
    parser = Arguments("aerie status", description="What a run has, and what to type next.")
    parser.add_argument("directory", type=user_path, metavar="RUN", help="the run's directory")
    directory = parser.parse_args().directory
    # A directory inside a run, such as its head's, means the run.
    candidates = (directory, *directory.parents[:2])
    root = next((path for path in candidates if any(path.glob("status*.json"))), directory)
    paths = sorted(root.glob("status*.json"))
    if paths or not any(root.glob("*/status.json")):
        _print_run(root, [_read_status(path) for path in paths])
        return 0
    # A directory of runs.
    for path in sorted(root.glob("*/status.json")):
        last = _read_status(path)
        print(", ".join([_line(last), *_report_state(last.run / "report").facts]))
    return 0


def _print_run(root: Path, last_stages: list[LastStage]) -> None:
    """Prints a line for each status file, a line for each stage, and what is next."""
    running = ""
    for last in last_stages:
        if last.state == "running":
            running = last.name.split()[0]
    kinds, stages = _stage_states(root, running)
    recipe = root / "recipe.yaml"
    states = {stage.state for stage in stages}
    if states == {"absent"} and not recipe.exists():
        raise UserError(f"{root}: no run; name the directory that a recipe calls `run`")
    for last in last_stages:
        print(_line(last))
    for stage in stages:
        print(f"  {stage.name:<14} {stage.state:<8} {', '.join(stage.facts)}".rstrip())
    if running:
        print(f"next: wait for {running}")
    elif states == {"whole"}:
        print(f"next: {_next_of_whole_run(root, kinds[0])}")
    else:
        command = f"aerie run {recipe if recipe.exists() else f'RECIPE.yaml --run {root}'}"
        print(f"next: {command}{' --overwrite' if 'damaged' in states else ''}")


def _read_status(path: Path) -> LastStage:
    match read_json(path):
        case {"stage": str(name), "state": str(state), "code": int(code)}:
            last = LastStage(path.parent, name, state, code)
        case _:
            raise UserError(f"{path}: is not the status of a run; delete it")
    if last.state == "running":
        with suppress(OSError), Lock(path.with_name(f".{path.name}.lock")) as lock:
            if lock.acquire(wait=False) is True:  # a running stage would hold it
                return last._replace(state="killed", code=137)
    return last


def _line(last: LastStage) -> str:
    code = f", exit code {last.code}" if last.code else ""
    return f"{last.run}: {last.name} {last.state}{code}"


def _stage_states(root: Path, running: str) -> tuple[list[str], list[StageState]]:
    """The kinds of head, the recipe's first; and the stages that it has or that left something."""
    heads = root / STAGES["train"]
    kinds = sorted(path.name for path in heads.glob("[!.]*"))
    expected = ["features", "train", "calibrate", "bench", "report"]
    with suppress(UserError):  # without a recipe, the usual stages are expected
        recipe = load(argparse.Namespace(config=root / "recipe.yaml"), [])
        expected = stages_of(recipe)
        kinds = list(dict.fromkeys([recipe.head.kind, *kinds]))
    stages = []
    for stage, folder in STAGES.items():
        if stage == "report":
            stages.append(_report_state(root / folder))
        elif stage == "train":
            for kind in kinds or [""]:
                head = _folder_state(f"train {kind}", heads / kind)
                progress = _progress(root / "metrics.jsonl", kind)
                stages.append(head._replace(facts=[*progress, *head.facts]))
        else:
            stages.append(_folder_state(stage, root / folder))
    shown = []
    for stage_state in stages:
        stage = stage_state.name.split()[0]
        if stage == running and stage_state.state != "whole":
            stage_state = stage_state._replace(state="running")
        if stage in expected or stage_state.state != "absent":
            shown.append(stage_state)
    return kinds, shown


def _folder_state(name: str, folder: Path) -> StageState:
    """The state of a stage that writes a manifest, by its files' sizes and digests."""
    if not (folder / FILE).is_file():
        is_empty = not folder.is_dir() or not any(folder.iterdir())
        return StageState(name, "absent" if is_empty else "stopped", [])
    record = checked = Manifest.check(folder)
    if isinstance(record, Whole) and not record.manifest.files:
        # A feature cache has its files in its index.
        checked = Manifest.check(folder, content=False, name="index.json")
    if not isinstance(record, Whole) or not isinstance(checked, Whole):
        return StageState(name, "damaged", [str(checked)])
    facts = record.manifest.facts
    rows = facts.get("rows") or facts.get("summary", {}).get("kept")
    counts = {
        "rows": sum(rows.values()) if isinstance(rows, dict) else rows,
        "tokens": facts.get("tokens"),
        "answers": facts.get("answers"),
    }
    texts = ["stopped by the time budget"] if facts.get("ended") == "budget" else []
    texts += [f"{count:,} {noun}" for noun, count in counts.items() if count]
    if (tuned := folder / "tuned.yaml").is_file():
        first_line = tuned.read_text(encoding="utf-8").partition("\n")[0]
        texts.append(first_line.partition(": ")[2])
    finished = datetime.fromtimestamp((folder / FILE).stat().st_mtime)
    texts.append(format_bytes(sum(num_bytes for num_bytes, _ in checked.manifest.files.values())))
    texts += [f"{finished:%Y-%m-%d %H:%M}", f"{facts['seconds']:,.0f} s"]
    return StageState(name, "whole", texts)


def _report_state(folder: Path) -> StageState:
    summary = folder / "summary.json"
    if not summary.is_file():
        return _folder_state("report", folder)
    try:
        rows = [row for row in read_json(summary)["rows"] if row["status"] == "ok"]
        best = max(rows, key=lambda row: float(row["tau"]), default=None)
    except (UserError, KeyError, TypeError):
        return StageState("report", "damaged", [f"{summary}: is damaged"])
    if best is None:
        return StageState("report", "whole", [])
    text = f"best tau {best['tau']:.2f} ({best['method']}, {best['speedup'] or 0:.2f}x)"
    return StageState("report", "whole", [text])


def _progress(metrics: Path, kind: str) -> list[str]:
    """Texts: the last logged step of a head's training, and its best tau."""
    if not kind or not metrics.is_file():
        return []
    lines = metrics.read_text(encoding="utf-8", errors="replace").splitlines()
    # A kill may have cut the last line; another head may have trained in the same run.
    lines = [line for line in lines if line.startswith(f'{{"kind": "{kind}') and line[-1] == "}"]
    logged: dict[str, Any] = {}
    taus = []
    try:
        for record in map(json.loads, lines):
            if "loss" in record:
                logged = {"total_steps": 0, **record}
            if "held_out_tau" in record:
                taus.append(record["held_out_tau"])
        text = "step {step:,} of {total_steps:,}, loss {loss:.3g}, {tokens_per_s:,.0f} tokens/s"
        texts = [text.format(**logged)] if logged else []
        return texts + ([f"best tau {max(taus):.2f}"] if taus else [])
    except (ValueError, LookupError, TypeError):
        return [f"a line of {metrics} is damaged"]


def _next_of_whole_run(root: Path, kind: str) -> str:
    """What to type when every stage is whole: tune, or push; and where the report is."""
    summary = root / "report/summary.json"
    tuned = root / "tune/tuned.yaml"
    rows = read_json(summary)["rows"] if summary.is_file() else []
    speedups = [row.get("speedup") or 0 for row in rows if row["method"] != "vanilla"]
    if speedups and max(speedups) < 1 and not (root / "tune").is_dir():
        return (
            f"aerie tune --config {root / 'recipe.yaml'}, for a tree that suits this machine: "
            "none is faster than vanilla yet"
        )
    push = f"aerie push {root / STAGES['train'] / kind} --repo USER/NAME --dry-run"
    push += f"; see {root / 'report/index.html'}"
    return f"aerie chat --run {root} --row {tuned}; {push}" if tuned.is_file() else push
