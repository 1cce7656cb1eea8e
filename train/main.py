"""Trains what the recipe's section `head` names, and writes it to RUN/heads/KIND (or the recipe's `output`).

accelerate launch --config_file configs/accelerate/zero2.yaml train/main.py --config RECIPE [--section.key VALUE ...]
python train/main.py --config RECIPE --plan
"""

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1]) if Path(sys.path[0]) == Path(__file__).parent else sys.path[0]

import argparse
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pipeline
from data.inputs import conversation_inputs, sampled_digest, target_inputs
from data.provenance import FILE, Stage, write_status
from model import recipe as yaml_recipe
from model.errors import UserError, exit_code
from model.files import digest, read_json, write_text
from model.recipe import as_dict

if TYPE_CHECKING:
    from train.loop import Job


@dataclass(frozen=True)
class Setting:
    """One call: its recipe, its stage, and what it was asked to do besides training."""

    recipe: pipeline.Recipe
    stage: Stage
    overwrite: bool

    @property
    def paths(self) -> pipeline.RunPaths:
        return pipeline.RunPaths(Path(self.recipe.run))


def main() -> int:
    """The exit code of the command in sys.argv."""
    parser = argparse.ArgumentParser(description="Train a draft head, or a small LM.", allow_abbrev=False)
    pipeline.add_arguments(parser)
    parser.add_argument("--is-whole", action="store_true", help="exit code 0 if nothing is left to do, else 1")
    parser.add_argument("--init-to", type=Path, help="with --plan: write the untrained module there, ready to load")
    arguments, unknown = parser.parse_known_args()
    recipe = pipeline.load(arguments, unknown)
    output = pipeline.RunPaths(Path(recipe.run)).head(recipe)
    if arguments.is_whole and not _has_inputs(recipe):
        return 1
    setting = Setting(recipe, Stage("train", output, stage_inputs(recipe)), arguments.overwrite)
    if setting.stage.is_whole() and arguments.init_to is None:
        if not arguments.is_whole and _rank() == 0:
            print(f"train {recipe.head.kind}: whole, reused ({output})", flush=True)
        return 0
    if arguments.is_whole:
        return 1
    setting.stage.require_own_directory(arguments.overwrite)
    if arguments.init_to is not None and not arguments.plan:
        raise UserError("--init-to: writes an untrained module without training; use it with --plan")
    if arguments.plan:
        return _plan(setting, arguments.init_to)
    return _with_status(setting)


def stage_inputs(recipe: pipeline.Recipe) -> dict[str, Any]:
    """Everything that the trained weights depend on, told without torch."""
    logging_only = ("log_every", "save_every", "trackers", "profile_steps")
    train = {name: value for name, value in as_dict(recipe.train).items() if name not in logging_only}
    inputs: dict[str, Any] = {"target": target_inputs(recipe.target), "head": as_dict(recipe.head), "train": train}
    if recipe.head.kind == "draft_lm":
        inputs |= {"data": as_dict(recipe.data), "conversations": conversation_inputs(recipe.data)}
    else:
        features = pipeline.RunPaths(Path(recipe.run)).features / FILE
        inputs["features"] = read_json(features)["inputs_digest"] if features.is_file() else None
    if recipe.head.init_from is not None:
        weights = sorted(Path(recipe.head.init_from).glob("*.safetensors"))
        inputs["init_from"] = {path.name: sampled_digest(path) for path in weights}
    return inputs


def _has_inputs(recipe: pipeline.Recipe) -> bool:
    """False while the stage before has not written the target (or its tokenizer): then nothing can be whole."""
    path = Path(recipe.target.path)
    return path.is_dir() or not (
        path.is_absolute() or recipe.target.path.startswith(".") or recipe.target.path.count("/") > 1
    )


def _plan(setting: Setting, init_to: Path | None) -> int:
    be_quiet()
    from train.plan import Plan

    job, vocab_size = _job(setting)
    config, output = setting.recipe.train, str(setting.stage.output)
    print(
        Plan.of(job.module, job.lengths, len(job.held_out), config, _world_size(), vocab_size).text(output), flush=True
    )
    if init_to is not None:
        if init_to.exists() and any(init_to.iterdir()):
            raise UserError(f"--init-to {init_to}: not empty; name a new directory")
        _saver(setting, init_to)(job.module.to(job.save_dtype), {"step": 0})
        print(f"untrained module: {init_to}", flush=True)
    return 0


def _train(setting: Setting) -> tuple[str, int]:
    """(state, exit code) of one sitting."""
    be_quiet()
    import torch

    from train.launch import Launch, build_accelerator
    from train.loop import Loop
    from train.resume import numerics

    recipe, stage = setting.recipe, setting.stage
    if recipe.threads is not None:
        torch.set_num_threads(recipe.threads)
    job, _ = _job(setting)  # before the Accelerator: under ZeRO-3 whatever is loaded later comes in shards
    local_rank = os.environ.get("LOCAL_RANK")
    uses_deepspeed = os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true"
    launch = Launch(None if local_rank is None else int(local_rank), _world_size(), uses_deepspeed)
    accelerator = build_accelerator(recipe.train, launch, setting.paths.root)
    if accelerator.is_main_process:
        setting.paths.root.mkdir(parents=True, exist_ok=True)
        (stage.output / FILE).unlink(missing_ok=True)
    if recipe.train.trackers:
        accelerator.init_trackers("aerie", config=_scalars(as_dict(recipe)))
    if hasattr(job.objective, "ends"):
        job.objective.ends = job.objective.ends.to(accelerator.device)
    identity = {**stage.inputs, "train": numerics(stage.inputs["train"])}
    outcome = Loop(job, accelerator, digest(identity)).run()
    if accelerator.is_main_process and outcome.code == 0:
        write_text(stage.output / "recipe.yaml", yaml_recipe.dump(recipe))
        progress = outcome.progress
        record = stage.finish(
            steps=progress.step,
            total_steps=outcome.total_steps,
            best_step=progress.best_step,
            tokens=progress.tokens,
            train_seconds=round(progress.seconds, 1),
            ended=outcome.state,
            processes=accelerator.num_processes,
            held_out=outcome.held_out,
        )
        print(
            f"train {job.kind}: {progress.step:,} steps, {progress.tokens:,} tokens in {progress.seconds:,.0f} s "
            f"({record['seconds']:,.0f} s with the start-up); best at step {progress.best_step:,}: {stage.output}",
            flush=True,
        )
    accelerator.end_training()
    return ("done" if outcome.code == 0 else outcome.state), outcome.code


def _job(setting: Setting) -> "tuple[Job, int]":
    """The job, and the vocabulary's size."""
    return _causal_lm_job(setting) if setting.recipe.head.kind == "draft_lm" else _eagle1_job(setting)


def _eagle1_job(setting: Setting) -> "tuple[Job, int]":
    from data.cache import FeatureCache
    from model.checkpoint import new_head
    from model.target import fingerprint, load_ends
    from train.loop import Job
    from train.objectives.eagle1 import Eagle1Objective

    recipe, config = setting.recipe, setting.recipe.train
    text_config, ends = load_ends(recipe.target)
    expected = {
        "target": fingerprint(text_config, ends),
        "after_blocks": list(recipe.features.after_blocks),
        "data": as_dict(recipe.data),
    }
    cache = FeatureCache.open(setting.paths.features, expected)
    head = new_head(recipe.head, text_config, ends, config.seed, recipe.target.path).float()
    head.gradient_checkpointing = config.gradient_checkpointing
    longest = recipe.data.max_length + max(recipe.tree.levels, config.eval_depths)
    if head.config.max_position_embeddings < longest:
        raise UserError(
            f"head.max_position_embeddings: {head.config.max_position_embeddings:,} is less than data.max_length "
            f"{recipe.data.max_length:,} + {longest - recipe.data.max_length} drafted levels; set it to {longest:,}"
        )
    train = cache.split("train")
    job = Job(
        kind=recipe.head.kind,
        module=head,
        objective=Eagle1Objective(ends, config),
        train=train,
        lengths=train.lengths,
        held_out=cache.split("held_out"),
        config=config,
        output=setting.stage.output,
        state=setting.paths.state(recipe.head.kind),
        metrics=setting.paths.root / "metrics.jsonl",
        save=_saver(setting, setting.stage.output, target=expected["target"]),
        save_dtype=ends.lm_head.dtype,
        overwrite=setting.overwrite,
    )
    return job, int(ends.embedding.shape[0])


def _causal_lm_job(setting: Setting) -> "tuple[Job, int]":
    from data.chat import end_of_turn_ids
    from data.tally import Tally
    from data.tokens import statistics, tokenize
    from model.target import load_tokenizer
    from train.loop import Job
    from train.objectives.causal_lm import CausalLM, CausalLMObjective, new_causal_lm

    recipe, config = setting.recipe, setting.recipe.train
    tokenizer = load_tokenizer(recipe.target)
    data = tokenize(
        recipe.data, tokenizer, end_of_turn_ids(tokenizer, None), Tally(), disable_bar=None if _rank() == 0 else True
    )
    if _rank() == 0:
        print(f"train: {statistics(data.train).line()}", flush=True)
    lm = new_causal_lm(recipe.head, tokenizer, config.seed)
    if lm.config.max_position_embeddings < recipe.data.max_length:
        raise UserError(
            f"data.max_length: {recipe.data.max_length:,} is beyond head.max_position_embeddings "
            f"{lm.config.max_position_embeddings:,}; lower it, or raise that"
        )
    if config.gradient_checkpointing:
        lm.gradient_checkpointing_enable()
    job = Job(
        kind=recipe.head.kind,
        module=CausalLM(lm, config.loss_chunk_slots),
        objective=CausalLMObjective(),
        train=data.train,
        lengths=[len(row.input_ids) for row in data.train],
        held_out=data.held_out,
        config=config,
        output=setting.stage.output,
        state=setting.paths.state(recipe.head.kind),
        metrics=setting.paths.root / "metrics.jsonl",
        save=_saver(setting, setting.stage.output),
        overwrite=setting.overwrite,
    )
    return job, len(tokenizer)


def _saver(setting: Setting, directory: Path, **fixed: Any) -> Any:
    """A function of (module with whole weights, facts) that writes directory."""
    recipe = setting.recipe
    if recipe.head.kind == "draft_lm":
        from model.target import load_tokenizer
        from train.objectives.causal_lm import save_causal_lm

        tokenizer = load_tokenizer(recipe.target)
        return lambda module, facts: save_causal_lm(module.lm, tokenizer, directory)
    from model.checkpoint import save_head

    known = {"target_path": recipe.target.path, **fixed}
    return lambda module, facts: save_head(module, directory, **known, **facts)


def _with_status(setting: Setting) -> int:
    path, kind = setting.paths.status, "train"
    write_status(path, kind, "running")
    try:
        state, code = _train(setting)
    except KeyboardInterrupt:
        write_status(path, kind, "interrupted", 130)
        raise
    except UserError:
        write_status(path, kind, "failed", 2)
        raise
    except BaseException:
        write_status(path, kind, "failed", 1)
        raise
    write_status(path, kind, state, code)
    return code


def be_quiet() -> None:
    """Only our own lines: no advice and no loading bars of the libraries."""
    import logging
    import warnings

    import torch

    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else DeepSpeed prints that it found no GPU
    logging.getLogger("accelerate").setLevel(logging.ERROR)
    logging.getLogger("torch.distributed").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module=r"(deepspeed|accelerate|torch)\b")
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()


def _scalars(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested values as flat numbers and strings, which is all that trackers take."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            flat |= _scalars(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value if isinstance(value, int | float | str | bool) else str(value)
    return flat


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))


def _world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


if __name__ == "__main__":
    sys.exit(exit_code(main))
