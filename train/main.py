"""Trains what the recipe's section `head` names, and writes it to RUN/heads/KIND (or the recipe's `output`).

accelerate launch --config_file configs/accelerate/zero2.yaml train/main.py --config RECIPE [--section.key VALUE ...]
python train/main.py --config RECIPE --plan
"""

import sys
from pathlib import Path

if Path(sys.path[0]).resolve() == Path(__file__).resolve().parent:
    sys.path[0] = str(Path(__file__).resolve().parents[1] / "src")  # the checkout's packages, as aerie.*

import argparse
import copy
import os
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

from aerie.configs import read as yaml_recipe
from aerie.configs.errors import UserError, exit_code
from aerie.configs.read import as_dict
from aerie.configs.schema import recipe as pipeline
from aerie.configs.schema.train import require_read
from aerie.data.inputs import COMMAND, changed_since, conversation_inputs
from aerie.model.storage import FILE, Stage, digest, read_json, remove_temporaries, with_status, write_text
from aerie.train import resume
from aerie.train.jobs import cache_record, cache_states, reads_cache, train_inputs
from aerie.train.launch import answered, be_quiet
from aerie.train.resume import Output

if TYPE_CHECKING:
    from aerie.train.jobs import Source
    from aerie.train.loop import Job, Measure, Outcome, Save


@dataclass(frozen=True)
class Setting:
    """One call: its recipe, its stage, and what it was asked to do besides training."""

    recipe: pipeline.Recipe
    stage: Stage
    overwrite: bool

    @property
    def paths(self) -> pipeline.RunPaths:
        return pipeline.RunPaths(Path(self.recipe.run))

    @property
    def output(self) -> Output:
        return Output(self.stage, self.paths.root, self.paths.state(_state_name(self.recipe)))


def main() -> int:
    """The exit code of the command in sys.argv."""
    parser = argparse.ArgumentParser(description="Train a draft head, or a small LM.", allow_abbrev=False)
    pipeline.add_arguments(parser)
    parser.add_argument("--is-whole", action="store_true", help="exit code 0 if nothing is left to do, else 1")
    parser.add_argument("--init-to", type=Path, help="with --plan: write the untrained module there, ready to load")
    parser.add_argument(
        "--compare-objective",
        type=int,
        metavar="BATCHES",
        help="time eagle3's objective against its plain form, and stop",
    )
    arguments, unknown = parser.parse_known_args()
    recipe = pipeline.load(arguments, unknown)
    require_read(recipe.train, recipe.head.kind)
    output = pipeline.RunPaths(Path(recipe.run)).head(recipe)
    if arguments.is_whole and not _has_inputs(recipe):
        return 1
    setting = Setting(recipe, Stage("train", output, stage_inputs(recipe)), arguments.overwrite)
    if arguments.is_whole:
        return 0 if _is_whole(setting) else 1
    if recipe.train.measure_prompts and recipe.data.held_out == 0:
        raise UserError(
            "train.measure_prompts: decodes held-out conversations, and data.held_out is 0; set one of them"
        )
    _require_fresh_cache(setting)
    if arguments.compare_objective is not None:
        return _compare(setting, arguments.compare_objective)
    if _is_whole(setting) and arguments.init_to is None:
        if _rank() == 0:
            _forget_saves(setting)
            print(f"train {recipe.head.kind}: whole, reused ({output})", flush=True)
        return 0
    if not arguments.overwrite:
        setting.output.require_own()
    if arguments.init_to is not None and not arguments.plan:
        raise UserError("--init-to: writes an untrained module without training; use it with --plan")
    if arguments.plan:
        return _plan(setting, arguments.init_to)
    return with_status(setting.paths.status, "train", lambda: answered(lambda: _train(setting)))


def _is_whole(setting: Setting) -> bool:
    """Whether nothing is left to do: the stage is whole, and so is what it was made of."""
    made_of = _cache_made_of(setting)
    same = made_of is None or digest(made_of["data"]) == digest(as_dict(setting.recipe.data))
    return setting.stage.is_whole() and same and _changed_since_cached(setting) is None


def _require_fresh_cache(setting: Setting) -> None:
    """UserError when the conversations or the target's files have changed since the feature cache was made."""
    changed = _changed_since_cached(setting)
    if changed is not None:
        raise UserError(f"{setting.paths.features}: made before {changed} changed; rebuild with: {COMMAND} --overwrite")


def _changed_since_cached(setting: Setting) -> str | None:
    """What is another file now than when the cache was made. Opening the cache tells of another section `data`."""
    made_of, data = _cache_made_of(setting), setting.recipe.data
    if made_of is None or digest(made_of["data"]) != digest(as_dict(data)):
        return None
    return changed_since(made_of, setting.stage.inputs["target"], conversation_inputs(data))


def _cache_made_of(setting: Setting) -> dict[str, Any] | None:
    """What the feature cache that this run reads was made of; None without one."""
    recipe = setting.recipe
    cached = reads_cache(recipe.head, recipe.features, recipe.train)
    made = cache_record(setting.paths.features) if cached else None
    return None if made is None else made["inputs"]


def _state_name(recipe: pipeline.Recipe) -> str:
    """The name of a training's states: a run may hold the small LM that is its target, and one that drafts for it."""
    kind, distill = recipe.head.kind, recipe.train.distill
    return kind if distill is None else f"{kind}-{distill}"


def stage_inputs(recipe: pipeline.Recipe) -> dict[str, Any]:
    """Everything that the trained weights depend on, told without torch."""
    cache = pipeline.RunPaths(Path(recipe.run)).features
    inputs = train_inputs(recipe.head, recipe.target, recipe.data, recipe.features, recipe.train, cache)
    if recipe.train.measure_prompts:  # measured tau, which is that of this tree, chooses the weights
        inputs["tree"] = as_dict(recipe.tree)
    return inputs


def _has_inputs(recipe: pipeline.Recipe) -> bool:
    """False while the stage before has not written the target (or its tokenizer): then nothing can be whole."""
    path = Path(recipe.target.path)
    return path.is_dir() or not (
        path.is_absolute() or recipe.target.path.startswith(".") or recipe.target.path.count("/") > 1
    )


def _plan(setting: Setting, init_to: Path | None) -> int:
    be_quiet()
    from aerie.train.jobs import Plan

    job, vocab_size = _job(setting, is_plan=True)
    config, output = setting.recipe.train, str(setting.stage.output)
    print(
        Plan.of(job.module, job.lengths, len(job.held_out), config, _world_size(), vocab_size).text(output), flush=True
    )
    if init_to is not None:
        if init_to.exists() and any(init_to.iterdir()):
            raise UserError(f"--init-to {init_to}: not empty; name a new directory")
        job.save(job.module.to(job.save_dtype), init_to, {"step": 0})
        print(f"untrained module: {init_to}", flush=True)
    return 0


def _compare(setting: Setting, count: int) -> int:
    """Prints what the objective's trimming saves on the recipe's first steps."""
    be_quiet()
    import torch

    from aerie.data.batches import Order, collate
    from aerie.train.compare import compare

    recipe = setting.recipe
    if recipe.head.kind != "eagle3" or recipe.train.packing or count < 1:
        raise UserError("--compare-objective: needs at least one batch, an eagle3 head and train.packing false")
    torch.set_num_threads(recipe.threads or torch.get_num_threads())
    job, _ = _job(setting)
    order, device = Order(job.lengths, recipe.train.seed, recipe.train.batch_size), _device()
    batches = [collate([job.train[row] for row in order.rows(step)], order.rows(step)) for step in range(count)]
    objective: Any = job.objective
    objective.ends = objective.ends.to(device)
    module: Any = job.module.to(device).train()
    load = lambda batch: (job.supply or (lambda same: same))(batch.to(device))  # noqa: E731
    print(compare(module, objective, batches, load).text(), flush=True)
    return 0


def _train(setting: Setting) -> tuple[str, int]:
    """(state, exit code) of one sitting."""
    be_quiet()
    import torch

    from aerie.train.launch import Launch, build_accelerator
    from aerie.train.log import flat
    from aerie.train.loop import Loop

    recipe, stage = setting.recipe, setting.stage
    if recipe.threads is not None:
        torch.set_num_threads(recipe.threads)
    job, _ = _job(setting)  # before the Accelerator: under ZeRO-3 whatever is loaded later comes in shards
    local_rank = os.environ.get("LOCAL_RANK")
    uses_deepspeed = os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true"
    launch = Launch(None if local_rank is None else int(local_rank), _world_size(), uses_deepspeed)
    curves = setting.paths.root / "trackers" / _state_name(recipe)
    accelerator = build_accelerator(recipe.train, launch, curves)
    with ExitStack() as alone:
        if accelerator.is_main_process:
            alone.enter_context(resume.training_alone(job.state))
        if hasattr(job.objective, "ends"):
            job.objective.ends = job.objective.ends.to(accelerator.device)
        loop = Loop(job, accelerator, _made_of(setting))
        if accelerator.is_main_process:
            setting.output.begin()
            remove_temporaries(stage.output)
        loop.trackers.start(loop.progress.step, digest(resume.decisive(loop.progress.made_of)), flat(as_dict(recipe)))
        outcome = loop.run()
        if accelerator.is_main_process and outcome.code == 0:
            _finish(setting, outcome, accelerator.num_processes)
        accelerator.end_training()
    return ("done" if outcome.code == 0 else outcome.state), outcome.code


def _made_of(setting: Setting) -> dict[str, Any]:
    """What a save says that its weights depend on: the stage's inputs, all settings, and the cache's very bits."""
    recipe = setting.recipe
    cached = reads_cache(recipe.head, recipe.features, recipe.train)
    states = cache_states(setting.paths.features) if cached else None
    return {**setting.stage.inputs, "train": as_dict(recipe.train), resume.STATES: states}


def _finish(setting: Setting, outcome: "Outcome", num_processes: int) -> None:
    """Marks the output as whole; only then the saves are forgotten: a kill before costs the steps since the last."""
    recipe, stage, progress = setting.recipe, setting.stage, outcome.progress
    write_text(stage.output / "recipe.yaml", yaml_recipe.dump(recipe))
    record = stage.finish(
        steps=progress.step,
        total_steps=outcome.total_steps,
        best_step=progress.best_step,
        best_steps=[step for _, step in progress.best],
        tokens=progress.tokens,
        train_seconds=round(progress.seconds, 1),
        ended=outcome.state,
        processes=num_processes,
        held_out=outcome.held_out,
    )
    setting.output.end()
    _forget_saves(setting)
    print(
        f"train {recipe.head.kind}: {progress.step:,} steps, {progress.tokens:,} tokens in {progress.seconds:,.0f} s "
        f"({record['seconds']:,.0f} s since the command began); best at step {progress.best_step:,}: {stage.output}",
        flush=True,
    )


def _forget_saves(setting: Setting) -> None:
    """Removes what a finished training would go on from; further best weights than the output stay (keep_best)."""
    from aerie.train import resume as best

    record, state = read_json(setting.stage.output / FILE), setting.paths.state(_state_name(setting.recipe))
    if record.get("ended") == "finished" and state.is_dir():
        resume.clear(state, is_over=True)
        steps = record.get("best_steps", [])
        best.clear_best(state, steps if len(steps) > 1 else ())


def _job(setting: Setting, is_plan: bool = False) -> "tuple[Job, int]":
    """The job, and how many tokens its laws are over; a plan loads no more of the target than its two ends."""
    from functools import partial

    from aerie.model.target import Target
    from aerie.train.jobs import (
        Frame,
        Request,
        cached_source,
        causal_lm_job,
        distilled_lm_job,
        draft_head_job,
        online_source,
    )

    recipe, paths, output = setting.recipe, setting.paths, setting.stage.output
    state, metrics = paths.state(_state_name(recipe)), paths.root / "metrics.jsonl"
    speaks, saver = _rank() == 0, partial(_saver, setting)
    frame = Frame(recipe.train, output, state, metrics, saver, setting.overwrite, speaks)
    request = Request(recipe.head, recipe.target, recipe.data, recipe.features)
    is_lm, distill = recipe.head.kind == "draft_lm", recipe.train.distill
    if is_lm and distill is None:
        return causal_lm_job(request, frame)
    online, measured = recipe.features.mode == "online", bool(recipe.train.measure_prompts)
    if recipe.target.device_map is not None and (online or measured) and _world_size() > 1:
        raise UserError(
            f"target.device_map: {recipe.target.device_map} spreads the target over all GPUs, which {_world_size()} "
            f"processes cannot share; start one process"
        )
    whole = None if is_plan or not (online or measured) else Target.load(recipe.target, _device())
    source = online_source(request, whole, speaks) if online else cached_source(paths.features, request, whole)
    if is_lm:
        return distilled_lm_job(source, frame)
    measure = partial(_measured_tau, setting, source) if measured and not is_plan else None
    assert recipe.tree is not None
    levels = recipe.tree.levels
    return draft_head_job(source, frame, levels, measure)


def _measured_tau(setting: Setting, source: "Source", head: Any) -> "Measure":
    """A function of the module that decodes held-out prompts greedily, a share of them in each process."""
    import torch

    from aerie.infer.decode.engine import SpeculativeDecoder
    from aerie.infer.decode.methods import drafting, make_drafter
    from aerie.train.log import all_reduce

    config, target = setting.recipe.train, source.target
    assert target is not None
    tree = setting.recipe.tree
    assert tree is not None
    context = getattr(source.text_config, "max_position_embeddings", None) or head.config.max_position_embeddings
    room = min(context, head.config.max_position_embeddings) - config.measure_new_tokens
    prompts = list(islice(_openings(source.held_out, room), config.measure_prompts))
    if not prompts:
        raise UserError(
            f"train.measure_prompts: no held-out conversation opens with at most {room:,} tokens; hold out more "
            f"(data.held_out), lower train.measure_new_tokens, or set measure_prompts to 0"
        )

    def measure(module: Any) -> dict[str, float]:
        beside = _beside(module, target.device)
        decoder = SpeculativeDecoder(target, drafting(make_drafter(_head_in(beside), target), tree))
        totals = torch.zeros(2, dtype=torch.float64)  # new tokens after the first, cycles
        for ids in prompts[_rank() :: _world_size()]:
            prompt = torch.tensor([ids], device=target.device)
            cycles = decoder.generate(prompt, max_new_tokens=config.measure_new_tokens, do_sample=False).statistics
            totals += torch.tensor([sum(cycles.cycle_tokens), len(cycles.cycle_tokens)])
        tokens, count = all_reduce(totals.to(next(module.parameters()).device)).tolist()
        return {"tau": tokens / count if count else 1.0}

    return measure


def _beside(module: Any, device: Any) -> Any:
    """The module, or its copy on the device: drafting is at the LM head of a target that spans several."""
    return module if next(module.parameters()).device == device else copy.deepcopy(module).to(device)


def _openings(rows: Any, room: int) -> "Iterator[list[int]]":
    """The tokens of each row before its first answer, where they are at least one and at most `room`."""
    for row in rows:
        first = next(place for place, turn in enumerate(list(row.turns)) if turn)
        if 0 < first <= room:
            yield [int(token) for token in row.input_ids[:first]]


def _saver(setting: Setting, **fixed: Any) -> "Save":
    """A function of (module with whole weights, directory, facts) that writes the directory."""
    recipe = setting.recipe
    if recipe.head.kind == "draft_lm":
        from aerie.model.target import load_tokenizer
        from aerie.train.objectives.lm import save_causal_lm

        tokenizer = load_tokenizer(recipe.target)
        return lambda module, directory, facts: save_causal_lm(module.lm, tokenizer, directory)
    from aerie.model.checkpoint import save_head

    known = {"target_path": recipe.target.path, **fixed}
    return lambda module, directory, facts: save_head(_head_in(module), directory, **known, **facts)


def _head_in(module: Any) -> Any:
    """The draft head, which EAGLE-3's objective trains inside a module of its own."""
    return getattr(module, "head", module)


def _device() -> str:
    """Where this process's share of the target goes."""
    import torch

    return f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if torch.cuda.is_available() else "cpu"


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))


def _world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


if __name__ == "__main__":
    sys.exit(exit_code(main))
