"""aerie run, status and keys: whole runs, and the keys of a recipe."""

import argparse
import dataclasses
import inspect
import json
import logging
import multiprocessing
import os
import re
import shlex
import shutil
import signal
import sys
import textwrap
import threading
import types
import typing
from collections.abc import Iterator
from contextlib import suppress
from datetime import datetime
from importlib import import_module
from importlib.util import find_spec
from math import inf
from pathlib import Path
from typing import Any

import yaml

from aerie.__main__ import OWNERS
from aerie.configs.errors import (
    REQUEUE,
    Arguments,
    Requeued,
    UserError,
    exit_codes,
    stop_on_signals,
)
from aerie.configs.read import TAGS, Place, Section, as_dict, dump, sections, suggestion, user_path
from aerie.configs.schema.recipe import Recipe, add_arguments, load
from aerie.data.inputs import feature_stage, is_here, target_inputs
from aerie.data.progress import format_bytes
from aerie.model.storage import (
    FILE,
    ROOT,
    Lock,
    Manifest,
    Stage,
    Whole,
    digest,
    read_json,
    sound_record,
    write_text,
)
from aerie.train import resume

STAGES = (
    "synthetic",
    "distill",
    "features",
    "train",
    "calibrate",
    "bench",
    "tune",
    "report",
)  # of a run, in order
PLACES = {
    "synthetic": "conversations",
    "distill": "distilled",
    "calibrate": "calibration",
}  # other stages: their names
KEY = re.compile(
    r"((?:^ +#.*\n)*)^    (\w+): .*?(  # .*)?$", re.MULTILINE
)  # with the comments above and beside
TYPES = {
    int: "integer",
    float: "number",
    str: "text",
    bool: "true | false",
    dict: "mapping",
    type(None): "null",
}
PAGE = """# Recipes: every key

A recipe is a YAML file with the sections below; only `run`, `target.path` and `data.conversations` are required.
Any key can also be set on the command line: `--train.learning_rate 1e-4`, `--bench.rows.1.tree.nodes 30` (`*` below
stands for a position in a list, from 0). A single value counts as a list of one, and `~` is the home directory in
every path. `aerie keys SECTION` prints a section.

This page is made from the schema by `aerie keys --markdown > docs/recipes.md`.
"""
FORK = multiprocessing.get_context("fork")
BOUNDS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}


@exit_codes()
def main() -> int:
    parser = Arguments("aerie", description="Runs and settings.", allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True)

    def add(command: Any, summary: str) -> argparse.ArgumentParser:
        options = commands.add_parser(
            command.__name__, help=summary, description=summary, allow_abbrev=False
        )
        options.set_defaults(run_command=command)
        return options

    options = add(run, "do what is left of a recipe, to the report")
    add_arguments(options)
    options.add_argument(
        "recipe", type=user_path, nargs="?", metavar="RECIPE.yaml", help="in place of --config"
    )
    options.add_argument(
        "--processes", type=int, help="processes of features and train (default: one per GPU)"
    )
    options = add(status, "what a run has, and what to type next")
    options.add_argument("directory", type=user_path, metavar="RUN", help="the run's directory")
    options = add(keys, "print the keys of a recipe: meaning, type, default")
    options.add_argument(
        "section",
        nargs="?",
        help="such as train, bench.prompts or tree.stop; default: the sections",
    )
    options.add_argument(
        "--markdown", action="store_true", help="print Markdown (default: every section)"
    )
    arguments, unknown = parser.parse_known_args()
    if unknown and arguments.command != "run":
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    stop_on_signals()
    return int(arguments.run_command(arguments, unknown))


def run(arguments: argparse.Namespace, unknown: list[str]) -> int:
    """Runs each stage in its own process; returns the first failing exit code."""
    arguments.config = arguments.recipe or arguments.config
    recipe = load(arguments, unknown)
    stages, stop = _stages(recipe), None
    made_here = _require_files(recipe, stages)
    if not arguments.overwrite and all(Path(name).exists() for name in made_here):
        _require_own_outputs(recipe, stages)
    words = ["--config", str(arguments.config), *unknown, *["--overwrite"] * arguments.overwrite]
    flags = {
        name: getattr(arguments, name.replace("-", "_"))
        for name in ("run", "target", "dtype", "device-map")
    }
    words += [f"--{name}={value}" for name, value in flags.items() if value is not None]
    if resume.needs_target(recipe) and recipe.target.path not in made_here:
        targets = import_module("aerie.model.target")
        if why := targets.only_trains(
            targets.load_config(recipe.target)
        ):  # a run ends with measurements
            raise UserError(f"{recipe.target.path}: {why}; run aerie features and aerie train")
    if arguments.plan:
        print("\n".join(f"aerie {stage} {shlex.join(words)}" for stage in stages))
        return 0
    write_text(recipe.paths.root / "recipe.yaml", dump(recipe))
    import_module(
        "transformers.models.auto"
    )  # and torch: the stages start sooner; neither touches a GPU
    for number, stage in enumerate(stages, start=1):
        print(f"run: {stage} ({number} of {len(stages)})", file=sys.stderr, flush=True)
        # A fork: its end frees the stage's memory.
        child: Any = FORK.Process(target=_do, args=(stage, words, arguments.processes, recipe))
        child.start()
        while child.exitcode is None:
            try:
                child.join()
            except KeyboardInterrupt as raised:
                stop = raised
                os.kill(
                    child.pid, signal.SIGUSR1 if isinstance(raised, Requeued) else signal.SIGINT
                )
        if child.exitcode < 0:
            why = f"killed by signal {-child.exitcode}, often for lack of memory; run the same command again"
            print(f"\nerror: {stage}: {why}", file=sys.stderr)  # below a progress bar
        if child.exitcode:
            return child.exitcode if child.exitcode > 0 else 128 - child.exitcode
        if stop is not None:
            raise stop
    return 0


def _stages(recipe: Recipe) -> list[str]:
    # A model trained as a target is measured only if its recipe says so.
    measures = recipe.output is None or recipe.bench
    asked = vars(recipe) | {"features": resume.reads_cache(recipe), "report": measures}
    asked |= {"bench": measures, "calibrate": measures or recipe.calibrate}
    return [stage for stage in STAGES if asked[stage]]


def _require_files(recipe: Recipe, stages: list[str]) -> list[str]:
    """The inputs that stages make themselves; UserError, before hours of work, if another is missing."""
    asked = [
        section.prompts.path for section in (recipe.calibrate, recipe.bench, recipe.tune) if section
    ]
    names, root = (
        [recipe.target.path, *recipe.data.conversations, *filter(None, asked)],
        recipe.paths.root.absolute(),
    )
    made_here = [name for name in names if Path(name).absolute().is_relative_to(root)]
    for name in (name for name in names if name not in made_here):
        target_inputs(recipe.target) if name == recipe.target.path else is_here(name)
    if "report" in stages and find_spec("matplotlib") is None:
        raise UserError("report: matplotlib is not installed; pip install aerie[report]")
    for name in recipe.train.trackers:
        if find_spec(name) is None and find_spec(f"{name}X") is None:  # tensorboardX serves too
            raise UserError(f"train.trackers: {name} is not installed; run: pip install {name}")
    return made_here


def _require_own_outputs(recipe: Recipe, stages: list[str]) -> None:
    """UserError, before anything starts, if an output is of another recipe."""
    features, paths = feature_stage(recipe), recipe.paths
    train = Stage("train", paths.head(recipe), resume.stage_inputs(recipe))
    if resume.reads_cache(recipe):
        features.require_own_directory(overwrite=False)
        train.inputs["features"] = train.inputs["features"] or digest(features.inputs)
    resume.require_own_output(train, paths.state(resume.state_name(recipe)))
    for stage in (stage for stage in stages if stage in ("distill", "calibrate", "bench", "tune")):
        place = paths.root / PLACES.get(stage, stage)
        if made_of := sound_record(place).get("inputs"):
            Stage(stage, place, made_of | {"target": train.inputs["target"]}).require_own_directory(
                overwrite=False
            )
            if made_of.get("head") and not train.is_whole():
                what = f"holds the {stage} of another head than {train.output}, which is still to be trained"
                raise UserError(f"{place}: {what}; choose another --run, or add --overwrite")


@exit_codes()
def _do(stage: str, words: list[str], processes: int | None, recipe: Recipe) -> None:
    """Runs a stage's main, here or in several processes (None: one per GPU), and exits with its code."""
    os.setpgid(0, 0)  # only `run` gets Ctrl-C, and passes it on once; its end is one too
    signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # ignored in a shell's background processes

    def follow() -> None:
        multiprocessing.parent_process().join()  # type: ignore[union-attr]
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=follow, daemon=True).start()
    stage_main = import_module(f"aerie.{OWNERS[stage]}.main").main
    command = [
        str(ROOT / OWNERS[stage] / "main.py"),
        *([] if stage == "train" else [stage]),
        *words,
    ]
    sys.argv = [*command, "--is-whole"]
    # A target on all GPUs leaves room for one process.
    has_target = (
        stage == "features"
        or not resume.reads_cache(recipe)
        or getattr(recipe.train, "measure_prompts", None)
    )
    processes = 1 if recipe.target.device_map is not None and has_target else processes
    if stage in ("features", "train") and processes != 1 and stage_main() == 1:
        import torch

        gpus = torch.cuda.device_count()
        if (processes or gpus) > 1:
            sys.exit(_launched(command, processes or gpus, "bf16" if gpus else "no"))
    sys.argv = command
    sys.exit(stage_main())


def _launched(command: list[str], processes: int, precision: str) -> int:
    """Returns the exit code of the first process that failed, or 0."""
    from accelerate.commands.launch import launch_command, launch_command_parser
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    logging.disable()  # of the launcher: each process prints its own error
    os.environ |= {
        "PET_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1",
        "PET_SHUTDOWN_TIMEOUT": "120",
    }
    options = [
        "--config_file",
        str(ROOT / "configs/accelerate/zero2.yaml"),
        "--num_processes",
        str(processes),
    ]
    try:
        launch_command(
            launch_command_parser().parse_args([*options, "--mixed_precision", precision, *command])
        )
    except ChildFailedError as error:
        ended = (-signal.SIGTERM, 128 + signal.SIGTERM)  # of processes that the launcher ended
        code = min(
            error.failures.values(), key=lambda one: (one.exitcode in ended, one.timestamp)
        ).exitcode
        return code if code > 0 else 128 - code
    except SignalException as error:
        return REQUEUE if error.sigval == signal.SIGUSR1 else 128 + int(error.sigval)
    return 0


def status(arguments: argparse.Namespace, unknown: list[str]) -> int:
    given, lines, states, running = arguments.directory, list[str](), set[str](), ""
    # A directory in a run, such as its head's, means the run; one of runs, each of them.
    root = next(
        (place for place in (given, *given.parents[:2]) if [*place.glob("status*.json")]), given
    )
    found = sorted(root.glob("status*.json")) or sorted(root.glob("*/status.json"))
    for path in found:
        match read_json(path):
            case {"stage": str(), "state": str(), "code": int()} as said:
                run = path.parent
            case _:
                raise UserError(f"{path}: is not the status of a run; delete it")
        with suppress(OSError), Lock(path.with_name(f".{path.name}.lock")) as lock:
            if (
                said["state"] == "running" and lock.acquire(wait=False) is True
            ):  # a running stage would hold it
                said |= {"state": "killed", "code": 137}
        running = said["stage"].split()[0] if said["state"] == "running" else running
        lines.append(
            f"{run}: {said['stage']} {said['state']}"
            + f", exit code {said['code']}" * (said["code"] != 0)
        )
        lines[-1] += "".join(
            f", {fact}" for fact in ([] if run == root else _state(run / "report")[1])
        )
    if found and found[0].parent != root:
        print("\n".join(lines))
        return 0
    stages, stored, heads = (
        ["features", "train", "calibrate", "bench", "report"],
        root / "recipe.yaml",
        root / "heads",
    )
    kinds = sorted(path.name for path in heads.glob("[!.]*"))
    with suppress(UserError):
        recipe = load(argparse.Namespace(config=stored), [])
        stages, kinds = _stages(recipe), list(dict.fromkeys([recipe.head.kind, *kinds]))
    for stage in STAGES:
        for kind in (kinds or [""]) if stage == "train" else [""]:
            state, facts = _state(
                heads / kind if stage == "train" else root / PLACES.get(stage, stage)
            )
            state = "running" if stage == running and state != "whole" else state
            if stage in stages or state != "absent":
                facts = [*_progress(root / "metrics.jsonl", kind), *facts]
                lines.append(f"  {f'{stage} {kind}':<14} {state:<8} {', '.join(facts)}".rstrip())
                states.add(state)
    if states == {"absent"} and not stored.exists():
        raise UserError(f"{root}: no run; name the directory that a recipe calls `run`")
    words = f"aerie run {stored if stored.exists() else f'RECIPE.yaml --run {root}'}"
    words += " --overwrite" if "damaged" in states else ""
    if states == {"whole"}:
        summary = root / "report/summary.json"
        words = f"aerie push {heads / kinds[0]} --repo USER/NAME --dry-run; see {summary.with_name('index.html')}"
        if (tuned := root / "tune/tuned.yaml").is_file():
            words = f"aerie chat --run {root} --row {tuned}; {words}"
        rows = (
            read_json(summary)["rows"] if summary.is_file() and not (root / "tune").is_dir() else []
        )
        speedups = [row.get("speedup") or 0 for row in rows if row["method"] != "vanilla"]
        if speedups and max(speedups) < 1:
            words = f"aerie tune --config {stored}, for a tree that suits this machine: none is faster than vanilla yet"
    print("\n".join([*lines, f"next: {f'wait for {running}' if running else words}"]))
    return 0


def _state(place: Path) -> tuple[str, list[str]]:
    """(whole, damaged, stopped or absent, facts to print)."""
    found: Any = Manifest.check(place)
    if (place / "summary.json").is_file() and not (place / FILE).exists():  # the report
        try:
            rows = [
                row for row in read_json(place / "summary.json")["rows"] if row["status"] == "ok"
            ]
            best = sorted(rows, key=lambda row: -float(row["tau"]))[:1]
        except (UserError, KeyError, TypeError):
            return "damaged", [f"{place / 'summary.json'}: is damaged"]
        return "whole", [
            f"best tau {row['tau']:.2f} ({row['method']}, {row['speedup'] or 0:.2f}x)"
            for row in best
        ]
    if not (place / FILE).is_file():
        return "stopped" if place.is_dir() and any(place.iterdir()) else "absent", []
    record = found
    if (
        isinstance(found, Whole) and not found.manifest.files
    ):  # a feature cache has them in its index
        record = Manifest.check(place, content=False, name="index.json")
    if not isinstance(record, Whole):
        return "damaged", [str(record)]
    facts, when = found.manifest.facts, datetime.fromtimestamp((place / FILE).stat().st_mtime)
    rows = facts.get("rows") or facts.get("summary", {}).get("kept")
    counts = {"rows": sum(rows.values()) if isinstance(rows, dict) else rows}
    counts |= {name: facts.get(name) for name in ("tokens", "answers")}
    told = ["stopped by the time budget"] if facts.get("ended") == "budget" else []
    told += [f"{count:,} {name}" for name, count in counts.items() if count]
    if (tuned := place / "tuned.yaml").is_file():
        told.append(tuned.read_text(encoding="utf-8").partition("\n")[0].partition(": ")[2])
    bytes_there = format_bytes(sum(num_bytes for num_bytes, _ in record.manifest.files.values()))
    return "whole", [*told, bytes_there, f"{when:%Y-%m-%d %H:%M}", f"{facts['seconds']:,.0f} s"]


def _progress(metrics: Path, kind: str) -> list[str]:
    """Texts: a head's last logged step, and its best tau."""
    lines = (
        metrics.read_text(encoding="utf-8", errors="replace").splitlines()
        if kind and metrics.is_file()
        else []
    )
    text = "step {step:,} of {total_steps:,}, loss {loss:.3g}, {tokens_per_s:,.0f} tokens/s"
    try:
        records = [
            json.loads(line)
            for line in lines
            if line.startswith(f'{{"kind": "{kind}') and line.endswith("}")
        ]
        taus = [record["held_out_tau"] for record in records if "held_out_tau" in record]
        logged = [{"total_steps": 0, **record} for record in records if "loss" in record]
        return [
            *(text.format(**record) for record in logged[-1:]),
            *([f"best tau {max(taus):.2f}"] if taus else []),
        ]
    except (ValueError, LookupError, TypeError):
        return [f"a line of {metrics} is damaged"]


def keys(arguments: argparse.Namespace, unknown: list[str]) -> int:
    section = re.sub(r"\.\d+(?=\.|$)", ".*", arguments.section or "")
    blocks = documented(section)
    if not blocks:
        raise UserError(
            f"{section}: no section or key of a recipe; {suggestion(section.split('.'), Recipe)}"
        )
    if arguments.markdown:
        lists = (
            "".join(f"- `{name}`: {words}\n" for name, words in rows.items())
            for _, _, rows in blocks
        )
        pages = [
            f"## {head}\n\n{text}{listed}"
            for (head, text, _), listed in zip(blocks, lists, strict=True)
        ]
        print("\n".join([*([] if section else [PAGE]), *pages]), end="")
        return 0
    width = min(120, shutil.get_terminal_size((120, 24)).columns)
    for head, text, rows in blocks if section else blocks[:1]:
        print(head.replace("`", ""), *textwrap.wrap(text, width - 2), sep="\n  ", end="\n\n")
        indent = " " * (max(map(len, rows), default=0) + 4)
        for name, words in rows.items():
            first = f"  {name}".ljust(len(indent))
            print(
                textwrap.fill(
                    words,
                    width,
                    initial_indent=first,
                    subsequent_indent=indent,
                    break_on_hyphens=False,
                )
            )
        print()
    if not section:
        print(
            "aerie keys SECTION prints the keys of one; a command line can set each of them: --section.key VALUE"
        )
    return 0


def documented(section: str = "") -> list[tuple[str, str, dict[str, str]]]:
    """(heading, text, {key: meaning (type; default)}) of each class at and below a section, or of one key."""
    found: dict[Any, dict[str, list[str]]] = {}  # class -> place -> kinds
    for cls, place, kind in sections(Recipe):
        found.setdefault(cls, {}).setdefault(place, []).append(kind)
    blocks, (parent, _, leaf) = [], section.rpartition(".")
    for cls, at in found.items():
        places = [place for place in at if f"{place}.".startswith(f"{section}." if section else "")]
        if not places and parent not in at:
            continue  # reading a class's source is slow
        own = {
            key: words
            for key, words in _keys(cls)
            if not (key in TAGS and any(map(any, at.values())))
        }
        if not places and parent in at and leaf in own:
            places, own = [parent], {leaf: own[leaf]}
        if places:
            kinds = " | ".join(
                dict.fromkeys(kind for place in places for kind in at[place] if kind)
            )
            kinds = kinds and f" ({re.sub(r'[|] [a-z]+: ', '| ', kinds)})"
            text = (
                "" if cls.__doc__.startswith(f"{cls.__name__}(") else f"{cls.__doc__}\n\n"
            )  # made by dataclass
            blocks.append(
                (
                    ", ".join(f"`{place}`" for place in places if place) + kinds or "A recipe",
                    text,
                    own,
                )
            )
    return blocks


def _keys(cls: Any) -> Iterator[tuple[str, str]]:
    """(key, meaning with type and default) of the class's own keys, from their comments."""
    fields = {field.name: field for field in dataclasses.fields(cls)}
    for above, name, behind in KEY.findall(inspect.getsource(cls)):
        if field := fields.get(name):
            value = (
                field.default
                if field.default_factory is dataclasses.MISSING
                else field.default_factory()
            )
            facts = _type(field.type)
            if value is dataclasses.MISSING:
                facts += "; required"
            elif not isinstance(value, Section):
                flow = yaml.safe_dump(as_dict(value), default_flow_style=True, width=inf)
                facts += f"; default {flow}".removesuffix("...\n").strip()
            yield name, " ".join([*re.findall("# (.*)", above + behind), f"({facts})"])


def _type(hint: Any) -> str:
    """Such as 'integer >= 1', 'chain | static', 'list of text | null'."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if hint == Place:
        return "path"
    if origin is typing.Annotated:
        rules = [
            rule for metadata in inner[1:] for rule in getattr(metadata, "metadata", [metadata])
        ]
        limits = {
            sign: getattr(rule, name)
            for rule in rules
            for name, sign in BOUNDS.items()
            if hasattr(rule, name)
        }
        bounds = [f"{sign} {limit:,.12g}" for sign, limit in limits.items()]
        return " ".join([_type(inner[0]), ", ".join(bounds)]).strip()
    if origin in (typing.Union, types.UnionType):
        return " | ".join(dict.fromkeys(map(_type, inner)))
    if origin is typing.Literal:
        return " | ".join(map(str, inner))
    if isinstance(hint, type) and issubclass(hint, Section):
        return "section"
    return (
        f"list of {_type(inner[0])}" if origin is tuple else TYPES.get(origin or hint, "anything")
    )
