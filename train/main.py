"""Trains the head that a recipe describes, and writes it to RUN/heads/KIND (or to `output`).

accelerate launch --config_file configs/accelerate/zero2.yaml train/main.py --config RECIPE \
    [--section.key VALUE ...]
"""

import sys
from pathlib import Path

if Path(sys.path[0]).resolve() == Path(__file__).resolve().parent:
    sys.path[0] = str(
        Path(__file__).resolve().parents[1] / "src"
    )  # imports the checkout's packages as aerie.*

import copy
import os
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from aerie.configs.errors import Arguments, UserError, exit_codes, rank, world_size
from aerie.configs.read import dump
from aerie.configs.schema.recipe import Recipe, add_arguments, load
from aerie.model.storage import Stage, status_file, working_alone, write_text
from aerie.train import resume

# No import above loads torch, so that --is-whole answers at once. Functions import the rest.
if TYPE_CHECKING:
    from aerie.train.jobs import Job
    from aerie.train.loop import Loop, Measure


@exit_codes()
def main() -> int:
    parser = Arguments("aerie train", description="Train a head or a small LM.", allow_abbrev=False)
    add_arguments(parser)
    parser.add_argument(
        "--is-whole",
        action="store_true",
        help="exit code 0 if nothing is left to do, else 1",
    )
    arguments, unknown = parser.parse_known_args()
    recipe = load(arguments, unknown)
    # The saves are outside the output, which holds only the head.
    state = recipe.root / "state" / resume.state_name(recipe)
    try:
        stage = Stage("train", recipe.head_output, resume.stage_inputs(recipe))
        is_whole = resume.is_whole(recipe, stage)
    except UserError:
        if arguments.is_whole:  # an earlier stage may not have written the target
            return 1
        raise
    if is_whole and resume.reads_servers(recipe) and rank() == 0:
        from aerie.data.state_server import sweep_states

        sweep_states(recipe.features.server, state)  # type: ignore[arg-type]
    if arguments.is_whole:
        return int(not is_whole)
    if is_whole:
        # A kill after the record was written may have left saves.
        if rank() == 0:
            resume.forget_saves(stage.output, state)
            print(f"train {recipe.head.kind}: whole, reused ({stage.output})", flush=True)
        return 0
    if not resume.reads_cache(recipe):  # a cache's rows have their date already
        from aerie.data.rendering import fix_date

        recipe = fix_date(recipe, is_stage=not arguments.plan)
        stage = Stage("train", recipe.head_output, resume.stage_inputs(recipe))
    if not arguments.overwrite:
        resume.require_own_output(stage, state)
    if arguments.plan:
        _print_plan(recipe, stage, arguments.overwrite)
        return 0
    with resume.StopRequest() as stop, status_file(recipe.root / "status.json", "train") as ended:
        ended["state"], code = _train(recipe, stage, arguments.overwrite, stop)
        ended["code"] = code
    return code


def _print_plan(recipe: Recipe, stage: Stage, overwrite: bool) -> None:
    """Prints what the training would take, after one rehearsed step."""
    from aerie.data.main import try_in_miniature
    from aerie.model.heads import HEADS
    from aerie.train import costs, jobs, processes, rehearsal

    processes.be_quiet()
    job = jobs.build_job(recipe, stage.output, overwrite, is_plan=True)
    if recipe.head.kind in HEADS:
        rehearsal.rehearse_head(job.objective.head.config, recipe.train)
    else:
        rehearsal.rehearse(job.objective)
    # Training would run the target, which a plan does not load, so a miniature runs instead.
    if resume.reads_online(recipe):
        try_in_miniature(recipe)
    text = costs.plan_text(recipe, job)
    if "LOCAL_RANK" in os.environ:  # a launcher's processes must connect once
        processes.build_accelerator(recipe.train, recipe.root).end_training()
    if rank() == 0:
        print(text, flush=True)


def _train(
    recipe: Recipe, stage: Stage, overwrite: bool, stop: resume.StopRequest
) -> tuple[str, int]:
    """Trains; returns (state, exit code)."""
    import torch

    from aerie.train import jobs, processes

    processes.be_quiet()
    if recipe.threads is not None:
        torch.set_num_threads(recipe.threads)
    # This comes before the Accelerator, because ZeRO-3 shards whatever is loaded later.
    job = jobs.build_job(recipe, stage.output, overwrite)
    measure = tau_measure(recipe, job) if getattr(recipe.train, "measure_prompts", 0) else None
    with job.servers or nullcontext():
        return _run_loop(recipe, stage, job, measure, stop)


def _run_loop(
    recipe: Recipe, stage: Stage, job: "Job", measure: "Measure | None", stop: resume.StopRequest
) -> tuple[str, int]:
    """Runs the loop and records its end; returns (state, exit code)."""
    from aerie.train import processes
    from aerie.train.loop import Loop

    accelerator = processes.build_accelerator(recipe.train, recipe.root / "trackers" / job.kind)
    is_first = accelerator.is_main_process
    # The first process holds the lock for all; the others would find it taken.
    with working_alone(job.state, "training") if is_first else nullcontext():
        if job.objective.target is not None:
            job.objective.target = job.objective.target.to(accelerator.device)
        loop = Loop(job, accelerator, stage.inputs, measure)
        # Only now, because the loop may refuse a save, and then an earlier output must stay.
        if is_first:
            resume.begin_output(stage.output, job.state)
        ending = loop.run(stop)
        # After a signal the output keeps its marker, with which the next sitting goes on.
        if is_first and ending not in resume.EXIT_CODES:
            _finish(recipe, stage, loop, ending)
        # The module goes first, because the end of the process group could wait for it.
        del loop
        accelerator.free_memory()
        accelerator.end_training()
    return ending if ending in resume.EXIT_CODES else "done", resume.EXIT_CODES.get(ending, 0)


def _finish(recipe: Recipe, stage: Stage, loop: "Loop", ending: str) -> None:
    """Records the finished output, and removes its saves."""
    from aerie.data.rendering import facts_of

    progress = loop.progress
    write_text(stage.output / "recipe.yaml", dump(recipe))
    stage.finish(
        steps=progress.step,
        total_steps=loop.total,
        best_step=progress.best_step,
        tokens=progress.tokens,
        processes=loop.world,
        train_seconds=round(progress.seconds, 1),
        ended=ending,
        held_out=loop.held_out,
        **facts_of(recipe.data),
    )
    # Only now, because after a kill before this the training goes on from the last save.
    resume.forget_saves(stage.output, loop.job.state)
    done = (
        f"{progress.step:,} steps in {progress.seconds:,.0f} s, best at step {progress.best_step:,}"
    )
    if ending == "budget":
        done += (
            f"; stopped by the time budget (train.max_seconds {recipe.train.max_seconds:g}) "
            f"at step {progress.step:,} of {loop.total:,}"
        )
    print(f"train {recipe.head.kind}: {done}: {stage.output}", flush=True)


def tau_measure(recipe: Recipe, job: "Job") -> "Measure":
    """A function from a head to {'tau': tau}. It decodes held-out prompts greedily, and each
    process decodes a share."""
    import torch

    from aerie.infer.decode.check import checked_lm
    from aerie.infer.decode.engine import SpeculativeDecoder
    from aerie.infer.decode.proposers import tree_proposer
    from aerie.model.heads import HEADS
    from aerie.train.processes import all_reduce

    target: Any = job.target
    tree: Any = recipe.tree
    # A tree needs a mask over its branches, and not every model reads one.
    checked_lm(target, form="chain" if tree.shape == "chain" else "tree")
    # Every process decodes a share of the prompts; `all_reduce` sums over the processes.
    prompts = _held_out_prompts(recipe, job)[rank() :: world_size()]
    settings: Any = recipe.train

    def measure(head: Any) -> dict[str, float]:
        # The target's device is that of its LM head, if it has several.
        copied = copy.deepcopy(head).to(target.device)
        drafter = HEADS[recipe.head.kind].drafter(copied, target)
        decoder = SpeculativeDecoder(target, tree_proposer(drafter, tree))
        totals = torch.zeros(2, dtype=torch.float64)  # new tokens after the first, cycles
        # One prompt at a time, because tau counts tokens and does not depend on speed.
        for ids in prompts:
            answer = decoder.generate(
                torch.tensor([ids], device=target.device),
                max_new_tokens=settings.measure_new_tokens,
                do_sample=False,
            )
            cycle_tokens = answer.statistics.cycle_tokens
            totals += torch.tensor([sum(cycle_tokens), len(cycle_tokens)])
        tokens, count = all_reduce(totals.to(next(head.parameters()).device)).tolist()
        return {"tau": tokens / count if count else 1.0}

    return measure


def _held_out_prompts(recipe: Recipe, job: "Job") -> list[list[int]]:
    """The tokens before the first answer of held-out conversations, if head and target have room
    for them and for an answer; UserError if no prompt fits."""
    import torch

    from aerie.model.target_files import context_of

    target: Any = job.target
    settings: Any = recipe.train
    positions = job.objective.config.max_position_embeddings
    context = context_of(target.config) or positions
    room = min(context, positions) - settings.measure_new_tokens
    prompts: list[list[int]] = []
    for input_ids, turn_ids in job.rows.held_out_tokens():
        first = int(torch.as_tensor(turn_ids).nonzero()[0])
        if 0 < first <= room and len(prompts) < settings.measure_prompts:
            prompts.append(torch.as_tensor(input_ids[:first]).tolist())
    if not prompts:
        raise UserError(
            f"train.measure_prompts: no held-out conversation opens with at most {room:,} tokens; "
            "raise data.held_out or lower train.measure_new_tokens"
        )
    return prompts


if __name__ == "__main__":
    sys.exit(main())
