"""`aerie run` runs every stage of a recipe that is not done yet, each in a process of its own."""

import argparse
import logging
import multiprocessing
import os
import shlex
import signal
import sys
import threading
import time
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from aerie.__main__ import COMMANDS
from aerie.configs.errors import (
    REQUEUE,
    Arguments,
    Requeued,
    UserError,
    exit_codes,
    stop_on_signals,
)
from aerie.configs.read import dump, user_path
from aerie.configs.schema.recipe import Recipe, add_arguments, load, pairs_of_flags
from aerie.data.inputs import feature_stage, is_here, target_inputs
from aerie.model.storage import ROOT, Stage, digest, sound_record, write_status, write_text
from aerie.train import resume

STAGES = {  # stages in their order -> the folder for the output, in the run's directory
    "synthetic": "conversations",
    "distill": "distilled",
    "features": "features",
    "train": "heads",  # a folder for each kind of head
    "calibrate": "calibration",
    "bench": "bench",
    "tune": "tune",
    "report": "report",
}
MEASURING = ("calibrate", "bench", "tune")
# What the stages import. They are forks, and start at once if this process has imported it.
LIBRARIES = (
    "accelerate.commands.launch",
    "deepspeed",
    "torch.distributed.run",
    "aerie.data.synthetic",
    "aerie.data.features",
    "aerie.train.loop",
    "aerie.infer.measure.calibrate",
    "aerie.infer.measure.tune",
    "aerie.infer.report.page",
    "transformers.models.llama.modeling_llama",
)


@exit_codes()
def main() -> int:
    """Runs the recipes one after another; returns the first exit code that is not 0."""
    parser = Arguments("aerie run", description=COMMANDS["run"].summary, allow_abbrev=False)
    add_arguments(parser)
    parser.add_argument(
        "recipes",
        type=user_path,
        nargs="*",
        metavar="RECIPE.yaml",
        help="recipes to run one after another, in place of --config",
    )
    parser.add_argument(
        "--processes",
        type=int,
        help="processes of features, train and the measuring stages (default: one per GPU)",
    )
    arguments, overrides = parser.parse_known_args()
    stop_on_signals()
    seconds: dict[str, float] = {}
    for path in arguments.recipes or [arguments.config]:
        arguments.config = path
        code = _run_recipe(arguments, overrides, seconds)
        if code:
            return code
    if not arguments.plan:
        by_stage = ", ".join(f"{stage} {value:.0f}" for stage, value in seconds.items())
        print(f"run: {sum(seconds.values()):.0f} s: {by_stage}", file=sys.stderr)
    return 0


def _run_recipe(
    arguments: argparse.Namespace, overrides: list[str], seconds: dict[str, float]
) -> int:
    """Runs a recipe's stages one after another, and adds their seconds to `seconds`; returns the
    first exit code that is not 0."""
    recipe = load(arguments, overrides)
    stages = stages_of(recipe)
    _require_usable_recipe(recipe, stages, arguments.overwrite)
    words = _stage_arguments(arguments, overrides)
    if arguments.plan:
        print("\n".join(f"aerie {stage} {shlex.join(words)}" for stage in stages))
        return 0
    write_text(recipe.root / "recipe.yaml", dump(recipe))
    began = time.monotonic()
    _import_libraries(is_whole=not is_left("train", words))
    seconds["start"] = seconds.get("start", 0.0) + time.monotonic() - began
    for number, stage in enumerate(stages, start=1):
        print(f"run: {stage} ({number} of {len(stages)})", file=sys.stderr, flush=True)
        began = time.monotonic()
        code = _run_in_child(stage, words, arguments.processes, recipe)
        if code:
            return code
        name = f"train {recipe.head.kind}" if stage == "train" else stage
        seconds[name] = seconds.get(name, 0.0) + time.monotonic() - began
    return 0


def _import_libraries(is_whole: bool) -> None:
    """Imports what the stages need, so that their forks start at once. It touches no GPU, which
    forks could not use after that."""
    import_module("transformers.models.auto")
    torch = import_module("torch")
    if is_whole or torch.backends.cuda.is_built():
        return
    for name in LIBRARIES:
        import_module(name)


def stages_of(recipe: Recipe) -> list[str]:
    """The names of the stages that a recipe asks for, in order."""
    # A recipe with its own output trains a target, which is measured only if a bench is set.
    is_measured = recipe.output is None or recipe.bench
    decodes_here = recipe.last_stage != "train"
    wanted = {
        "synthetic": recipe.synthetic,
        "distill": recipe.distill,
        "features": resume.reads_cache(recipe),
        "train": True,
        "calibrate": decodes_here and (is_measured or recipe.calibrate),
        "bench": decodes_here and is_measured,
        "tune": decodes_here and recipe.tune,
        "report": decodes_here and is_measured,
    }
    return [stage for stage in STAGES if wanted[stage]]


def _stage_arguments(arguments: argparse.Namespace, overrides: list[str]) -> list[str]:
    """The command line of every stage, after the stage's name."""
    words = ["--config", str(arguments.config), *overrides]
    if arguments.overwrite:
        words.append("--overwrite")
    return words + [f"--{pair}" for pair in pairs_of_flags(arguments)]


# ---------------------------------------------------------------------------------------------
# Checks before anything starts, so that a mistake does not show after hours of work.


def _require_usable_recipe(recipe: Recipe, stages: list[str], overwrite: bool) -> None:
    """UserError if an input or a package is missing, or an output belongs to another recipe."""
    made_here = _require_inputs(recipe)
    _require_packages(recipe, stages)
    if not overwrite and all(Path(name).exists() for name in made_here):
        _require_own_outputs(recipe, stages)
    decodes_here = resume.needs_target(recipe) and recipe.last_stage != "train"
    if decodes_here and recipe.target.path not in made_here:
        target_files = import_module("aerie.model.target_files")
        if why := target_files.only_trains(target_files.load_config(recipe.target)):
            raise UserError(f"{recipe.target.path}: {why}; set last_stage: train")


def _require_inputs(recipe: Recipe) -> list[str]:
    """The inputs that the run's own stages make; UserError if any other input is missing."""
    names = [recipe.target.path, *recipe.data.conversations]
    for section in (recipe.calibrate, recipe.bench, recipe.tune):
        if section and section.prompts.path:
            names.append(section.prompts.path)
    root = recipe.root.absolute()
    made_here = []
    for name in names:
        if Path(name).absolute().is_relative_to(root):
            made_here.append(name)
        elif name == recipe.target.path:
            target_inputs(recipe.target)
        else:
            is_here(name)
    return made_here


def _require_packages(recipe: Recipe, stages: list[str]) -> None:
    """UserError if a stage needs a package that is not installed."""
    if "report" in stages and find_spec("matplotlib") is None:
        raise UserError("report: matplotlib is not installed; run: pip install aerie[report]")


def _require_own_outputs(recipe: Recipe, stages: list[str]) -> None:
    """UserError if an output belongs to another recipe, another target or another head."""
    features = feature_stage(recipe)
    train = Stage("train", recipe.head_output, resume.stage_inputs(recipe))
    if resume.reads_cache(recipe):
        features.require_own_directory(overwrite=False)
        train.inputs["features"] = train.inputs["features"] or digest(features.inputs)
    resume.require_own_output(train, recipe.root / "state" / resume.state_name(recipe))
    for stage in stages:
        if stage not in ("distill", "calibrate", "bench", "tune"):
            continue
        folder = recipe.root / STAGES[stage]
        made_of = sound_record(folder).get("inputs")
        if not made_of:
            continue
        made_now = made_of | {"target": train.inputs["target"]}
        Stage(stage, folder, made_now).require_own_directory(overwrite=False)
        if made_of.get("head") and not train.is_whole():
            raise UserError(
                f"{folder}: holds what {stage} made with another head than {train.output}, which "
                "is not trained yet; choose another --run, or add --overwrite"
            )


# ---------------------------------------------------------------------------------------------
# A stage runs in a child process, which starts one process per GPU for features, train and
# the measuring stages.


def _run_in_child(stage: str, words: list[str], processes: int | None, recipe: Recipe) -> int:
    """Runs a stage in a child process; returns its exit code. Passes Ctrl-C and SIGUSR1 on to the
    child, and raises them after its end."""
    stop = None
    # A fork, because its end frees the stage's memory.
    make_child = multiprocessing.get_context("fork").Process
    child: Any = make_child(target=_run_stage, args=(stage, words, processes, recipe))
    child.start()
    while child.exitcode is None:
        try:
            child.join()
        except KeyboardInterrupt as interrupt:
            stop = interrupt
            is_requeued = isinstance(interrupt, Requeued)
            os.kill(child.pid, signal.SIGUSR1 if is_requeued else signal.SIGINT)
    if child.exitcode < 0:
        return _killed(stage, -child.exitcode)
    if child.exitcode == 0 and stop is not None:
        raise stop
    return int(child.exitcode)


def _killed(what: str, number: int) -> int:
    """Prints that a signal killed a stage or process; returns the exit code for it."""
    # The newline ends the line of a progress bar.
    print(
        f"\nerror: {what}: killed by signal {number}, often for lack of memory; "
        "run the same command again",
        file=sys.stderr,
    )
    return 128 + number


@exit_codes()
def _run_stage(stage: str, words: list[str], processes: int | None, recipe: Recipe) -> None:
    """Runs a stage's main in this process, or in several (None means one per GPU), and exits."""
    os.setpgid(0, 0)  # so Ctrl-C reaches `aerie run` alone, which passes it on once
    # A shell makes its background processes ignore SIGINT.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Thread(target=_stop_with_parent, daemon=True).start()
    command = _command_of(stage, words)
    urls = urls_asked(recipe, stage)
    if urls and is_left(stage, words):
        _require_server(recipe, stage, urls)
    if stage in ("features", "train", *MEASURING):
        import torch

        gpus = torch.cuda.device_count()
        processes = _number_of_processes(stage, processes, recipe) or gpus
        if processes > 1 and is_left(stage, words):
            code = launch(command, processes, "bf16" if gpus else "no")
            if code not in (0, REQUEUE, 130):
                # The failure of another process may have ended the first, which writes the status.
                write_status(recipe.root / "status.json", stage, "failed", code)
            sys.exit(code)
    sys.argv = command
    sys.exit(COMMANDS[stage].run())


def _command_of(stage: str, words: list[str]) -> list[str]:
    """The words that run a stage: its script and the arguments."""
    package = COMMANDS[stage].module.partition(".")[0]
    script = str(ROOT / package / "main.py")
    return [script, *words] if stage == "train" else [script, stage, *words]


def is_left(stage: str, words: list[str]) -> bool:
    """Whether a stage still has something to do."""
    sys.argv = [*_command_of(stage, words), "--is-whole"]
    return COMMANDS[stage].run() == 1


def urls_asked(recipe: Recipe, stage: str) -> tuple[str, ...]:
    """The URLs of the servers that a stage asks."""
    from aerie.data.servers import urls_of_stage

    if stage == "train" and not resume.reads_servers(recipe):
        return ()
    return urls_of_stage(recipe, stage)


def _require_server(recipe: Recipe, stage: str, urls: Sequence[str]) -> None:
    """UserError if no server answers; it names the command that starts one."""
    from aerie.data.servers import command_of_stage
    from aerie.data.state_server import CONNECT_S, ServerFault, StateServer

    faults = []
    for url in urls:
        try:
            StateServer(url, CONNECT_S).exchange("GET", "/v1/models")
            return
        except ServerFault as fault:
            faults.append(f"{url}: {fault}")
    raise UserError(
        f"{stage}: no server answers ({'; '.join(faults)}); start one, then run the same command: "
        f"{command_of_stage(recipe, stage, urls[0])}"
    )


def _stop_with_parent() -> None:
    """Interrupts this process when `aerie run` ends, even if a signal that nobody can catch kills
    it."""
    multiprocessing.parent_process().join()  # type: ignore[union-attr]
    os.kill(os.getpid(), signal.SIGINT)


def _number_of_processes(stage: str, processes: int | None, recipe: Recipe) -> int | None:
    """How many processes a stage gets. One, if it spreads its target over all GPUs or asks the
    servers of a bench's rows; otherwise `processes`."""
    if stage == "bench" and recipe.bench and recipe.bench.asks_servers:
        return 1
    makes_features = stage == "features" and recipe.features.server is None
    loads_target = makes_features or stage in MEASURING or resume.runs_target(recipe)
    return 1 if recipe.target.device_map is not None and loads_target else processes


def launch(command: list[str], processes: int, precision: str) -> int:
    """Runs a script in several processes; returns the exit code of the first that failed, or 0."""
    import torch
    from accelerate.commands.launch import launch_command, launch_command_parser
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

    def order_of_failure(failure: ProcessFailure) -> tuple[bool, int]:
        # After the first failure the launcher ends the other processes by SIGTERM.
        was_ended = failure.exitcode in (-signal.SIGTERM, 128 + signal.SIGTERM)
        return was_ended, failure.timestamp

    logging.disable()  # the launcher's: each process prints its own error
    os.environ["PET_SIGNALS_TO_HANDLE"] = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"
    os.environ["PET_SHUTDOWN_TIMEOUT"] = "120"
    if precision == "no":  # without GPUs the processes are forks of this one and import nothing
        os.environ |= {"PET_RUN_PATH": "1", "PET_START_METHOD": "fork"}
        os.register_at_fork(after_in_child=_forget_handlers)
        if "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(1)  # torchrun sets a variable for this, too late for a fork
    options = ["--config_file", str(ROOT / "configs/accelerate/zero2.yaml")]
    options += ["--num_processes", str(processes), "--mixed_precision", precision]
    try:
        launch_command(launch_command_parser().parse_args([*options, *command]))
    except ChildFailedError as error:
        code = min(error.failures.values(), key=order_of_failure).exitcode
        return code if code > 0 else _killed("a process", -code)
    except SignalException as error:
        return REQUEUE if error.sigval == signal.SIGUSR1 else 128 + int(error.sigval)
    return 0


def _forget_handlers() -> None:
    """Undoes the signal handlers of torch's launcher, which its forks inherit."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1):
        signal.signal(number, signal.SIG_DFL)
