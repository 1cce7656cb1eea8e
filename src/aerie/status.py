"""`aerie status` shows what a run has done, what is running, and what to type next."""

import json
from argparse import Namespace
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from aerie.__main__ import COMMANDS
from aerie.configs.errors import Arguments, UserError, exit_codes
from aerie.configs.read import user_path
from aerie.configs.schema.recipe import load
from aerie.data.progress import format_bytes
from aerie.model.storage import FILE, Lock, Manifest, Whole, read_json
from aerie.run import STAGES, stages_of


class StageState(NamedTuple):
    """What a stage has left in a run's directory."""

    name: str  # of the stage; that of train has the kind of head, too
    state: str  # whole, damaged, running, stopped or absent
    facts: list[str]  # texts to print


@exit_codes()
def main() -> int:
    """Prints a line for each status file and each stage, and what to type next."""
    parser = Arguments("aerie status", description=COMMANDS["status"].summary)
    parser.add_argument("directory", type=user_path, metavar="RUN", help="the run's directory")
    root = parser.parse_args().directory
    lines = []
    running = ""
    for path in sorted(root.glob("status*.json")):
        status = _read_status(path)
        code = f", exit code {status['code']}" if status["code"] else ""
        lines.append(f"{root}: {status['stage']} {status['state']}{code}")
        if status["state"] == "running":
            running = status["stage"].split()[0]
    recipe = root / "recipe.yaml"
    stages = _stage_states(root, running)
    states = {stage.state for stage in stages}
    if states == {"absent"} and not recipe.exists():
        raise UserError(f"{root}: no run; name the directory in the key `run` of a recipe")
    lines += [f"  {name:<14} {state:<8} {', '.join(facts)}" for name, state, facts in stages]
    if running:
        lines.append(f"next: wait for {running}")
    elif states == {"whole"}:
        head = next(stage.name.split()[1] for stage in stages if stage.name.startswith("train"))
        lines.append(f"next: {_next_of_whole_run(root, head)}")
    else:
        command = f"aerie run {recipe if recipe.exists() else f'RECIPE.yaml --run {root}'}"
        lines.append(f"next: {command}{' --overwrite' if 'damaged' in states else ''}")
    print("\n".join(lines))
    return 0


def _read_status(path: Path) -> dict[str, Any]:
    """What a stage last wrote about itself: stage (such as distill 2/8), state and exit code. The
    state is killed if a stage that calls itself running does not run any more."""
    status: dict[str, Any] = read_json(path)
    if status["state"] == "running":
        with suppress(OSError), Lock(path.with_name(f".{path.name}.lock")) as lock:
            if lock.acquire(wait=False) is True:  # a running stage holds the lock
                status |= {"state": "killed", "code": 137}
    return status


def _stage_states(root: Path, running: str) -> list[StageState]:
    """The states of the stages that the run's recipe asks for, and of any other stage that left
    files."""
    heads = root / STAGES["train"]
    kinds = sorted(path.name for path in heads.glob("[!.]*"))
    expected = ["features", "train", "calibrate", "bench", "report"]
    with suppress(UserError):  # without a recipe, the usual stages are expected
        recipe = load(Namespace(config=root / "recipe.yaml"), [])
        expected = stages_of(recipe)
        kinds = list(dict.fromkeys([recipe.head.kind, *kinds]))
    shown = []
    for stage, folder in STAGES.items():
        if stage == "report":
            states = [_report_state(root / folder)]
        elif stage == "train":
            states = [_head_state(root, kind) for kind in kinds or [""]]
        else:
            states = [_folder_state(stage, root / folder)]
        for stage_state in states:
            if stage == running and stage_state.state != "whole":
                stage_state = stage_state._replace(state="running")
            if stage in expected or stage_state.state != "absent":
                shown.append(stage_state)
    return shown


def _folder_state(name: str, folder: Path) -> StageState:
    """The state of a stage that writes a manifest, judged by the sizes and digests of its files."""
    if not (folder / FILE).is_file():
        is_empty = not folder.is_dir() or not any(folder.iterdir())
        return StageState(name, "absent" if is_empty else "stopped", _progress(folder))
    record = checked = Manifest.check(folder)
    if isinstance(record, Whole) and not record.manifest.files:
        # The files of a feature cache stand in its index.
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
    num_bytes = sum(size for size, _ in checked.manifest.files.values())
    finished = datetime.fromtimestamp((folder / FILE).stat().st_mtime)
    texts += [format_bytes(num_bytes), f"{finished:%Y-%m-%d %H:%M}", f"{facts['seconds']:,.0f} s"]
    return StageState(name, "whole", texts)


def _progress(folder: Path) -> list[str]:
    """How far an unfinished distillation or feature cache has come."""
    prompts = folder / "prompts.jsonl"
    if prompts.is_file():
        journals = folder.glob("journal/*.jsonl")
        ended = sum(len(path.read_bytes().splitlines()) for path in journals)
        return [f"{ended:,} of {len(prompts.read_bytes().splitlines()):,} rows have ended"]
    shards = [*folder.glob("shard-*.safetensors")]
    num_bytes = sum(path.stat().st_size for path in shards)
    return [f"shards: {len(shards):,}", format_bytes(num_bytes)] if shards else []


def _head_state(root: Path, kind: str) -> StageState:
    """The state of a training, with its last logged step and best tau."""
    name, state, facts = _folder_state(f"train {kind}", root / STAGES["train"] / kind)
    metrics = root / "metrics.jsonl"
    lines = metrics.read_text(encoding="utf-8").splitlines() if kind and metrics.is_file() else []
    # The run's other heads log there too, and a kill may have cut the last line.
    start = f'{{"kind": "{kind}'
    records = [json.loads(line) for line in lines if line.startswith(start) and line[-1] == "}"]
    logged = [record for record in records if "loss" in record]
    taus = [record["held_out_tau"] for record in records if "held_out_tau" in record]
    progress = [f"best tau {max(taus):.2f}"] if taus else []
    if logged:
        text = "step {step:,} of {total_steps:,}, loss {loss:.3g}, {tokens_per_s:,.0f} tokens/s"
        progress.insert(0, text.format(**logged[-1]))
    return StageState(name, state, progress + facts)


def _report_state(folder: Path) -> StageState:
    """The state of the report, with the best tau in it. A report has no manifest."""
    summary = folder / "summary.json"
    if not summary.is_file():
        return _folder_state("report", folder)
    rows = [row for row in read_json(summary)["rows"] if row["status"] == "ok"]
    best = sorted(rows, key=lambda row: -float(row["tau"]))[:1]
    text = "best tau {tau:.2f} ({method}, {speedup:.2f}x)"
    facts = [text.format(**row | {"speedup": row["speedup"] or 0}) for row in best]
    return StageState("report", "whole", facts)


def _next_of_whole_run(root: Path, kind: str) -> str:
    """What to type when every stage is whole: tune if no row is faster than vanilla and nothing is
    tuned yet, otherwise push."""
    summary = root / "report/summary.json"
    rows = read_json(summary)["rows"] if summary.is_file() else []
    is_slow = rows and all((row["speedup"] or 0) <= 1 for row in rows)  # vanilla's is 1
    if is_slow and not (root / STAGES["tune"]).is_dir():
        return (
            f"aerie tune --config {root / 'recipe.yaml'}, to find a faster tree: "
            "no row is faster than vanilla yet"
        )
    push = f"aerie push {root / STAGES['train'] / kind} --repo USER/NAME --dry-run"
    return f"{push}; see {root / 'report/index.html'}" if rows else push
