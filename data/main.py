"""The data commands.

python data/main.py synthetic|distill|show|features|check|read --config RECIPE [--section.key VALUE ...]
accelerate launch data/main.py features --config RECIPE
python data/main.py features --config RECIPE --shard 1/8
"""

import sys
from pathlib import Path

if Path(sys.path[0]).resolve() == Path(__file__).resolve().parent:
    sys.path[0] = str(Path(__file__).resolve().parents[1] / "src")  # the checkout's packages, as aerie.*

import argparse
import os
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

from aerie.configs.errors import UserError, exit_code, stop_on_signals
from aerie.configs.read import as_dict
from aerie.configs.schema import recipe as pipeline
from aerie.data.cache import is_complete
from aerie.data.inputs import feature_inputs, target_inputs
from aerie.data.tokens import Share
from aerie.model.storage import Stage, with_status, write_status

BARRIER = timedelta(hours=12)  # processes wait for the slowest shard of the others


def main() -> int:
    """The exit code of the command in sys.argv."""
    parser = argparse.ArgumentParser(description="Conversations, loss masks and the feature cache.", allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True)
    chosen: dict[str, Callable[[argparse.Namespace, pipeline.Recipe], int]] = {}
    for command, summary in (
        (synthetic, "write the embedded corpus and train its tokenizer"),
        (distill, "have the target answer prompts"),
        (show, "print conversations with the loss mask"),
        (features, "run the target over the conversations and cache its states"),
        (check, "read every byte of the feature cache and say what is wrong where; exit code 1 if anything is"),
        (read, "measure how fast the feature cache is read in training's order"),
    ):
        name = command.__name__
        options = commands.add_parser(name, help=summary, description=f"{summary.capitalize()}.", allow_abbrev=False)
        pipeline.add_arguments(options)
        chosen[name] = command
        if name == "show":
            options.add_argument("--limit", type=int, default=3, help="how many rows (3)")
            options.add_argument("--plain", action="store_true", help="brackets instead of colour")
        if name == "features":
            _feature_options(options)
        if name == "read":
            options.add_argument("--steps", type=int, default=50, help="training steps whose rows are read (50)")
            options.add_argument("--step-ms", type=float, help="a step's own time (the last one in metrics.jsonl)")
        if name == "distill":
            options.add_argument("--shard", default="1/1", metavar="I/N", help="this job's share of the rows (1/1)")
            options.add_argument("--merge", action="store_true", help="ask nothing; put the jobs' answers together")
            options.add_argument(
                "--retry-failed",
                action="store_true",
                help="ask failed rows, and those a server skipped, again; with --shard those of this job's share alone",
            )
        if name == "distill":
            options.add_argument("--is-whole", action="store_true", help="exit code 0 if nothing is left to do, else 1")
    arguments, unknown = parser.parse_known_args()
    stop_on_signals()
    return chosen[arguments.command](arguments, pipeline.load(arguments, unknown))


def _feature_options(options: argparse.ArgumentParser) -> None:
    options.add_argument("--is-whole", action="store_true", help="exit code 0 if nothing is left to do, else 1")
    options.add_argument("--shard", metavar="I/N", help="make the I-th of N shares (1/N to N/N), as an array job does")
    options.add_argument("--verify", action="store_true", help="read a whole cache too, and mend what is broken in it")
    options.add_argument("--estimate", action="store_true", help="like --plan, with hours from a few timed forwards")


def synthetic(arguments: argparse.Namespace, recipe: pipeline.Recipe) -> int:
    """Writes RUN/conversations and RUN/tokenizer, or reuses them."""
    if recipe.synthetic is None:
        raise UserError(
            f"{arguments.config}: no section 'synthetic'; the embedded corpus needs one (configs/embedded.yaml)"
        )
    root, inputs = Path(recipe.run), {"synthetic": as_dict(recipe.synthetic)}
    stages = [
        Stage("corpus", pipeline.RunPaths(root).conversations, inputs),
        Stage("tokenizer", root / "tokenizer", inputs),
    ]
    if all(stage.is_whole() for stage in stages):
        return _reuse("synthetic", stages[0], None if arguments.plan else pipeline.RunPaths(root).status)
    for stage in stages:
        _require_own(stage, arguments.overwrite)
    if arguments.plan:
        config, where = recipe.synthetic, stages[0].output
        print(f"synthetic: {config.num_conversations:,} conversations, 2 x {config.num_prompts:,} prompts to {where}")
        return 0
    return with_status(pipeline.RunPaths(root).status, "synthetic", lambda: ("done", _write_synthetic(recipe, *stages)))


def distill(arguments: argparse.Namespace, recipe: pipeline.Recipe) -> int:
    """Writes RUN/distilled, or a job's share of it, or reuses it; with --plan only counts the prompts."""
    from aerie.data.distill.run import Job

    if recipe.distill is None:
        raise UserError(f"{arguments.config}: no section 'distill'; see configs/distill for some")
    shard = Share.of(arguments.shard)
    _be_quiet()
    status = _status(recipe, "distill", shard)
    try:
        target, questions = target_inputs(recipe.target), _evaluation_questions(recipe)
    except UserError:
        if arguments.is_whole:
            return 1  # the stage before has not written the target, or the evaluation's questions, yet
        raise
    job = Job.of(pipeline.RunPaths(Path(recipe.run)).distilled, recipe.distill, target, questions)
    if job.stage.is_whole() and not arguments.retry_failed:
        return 0 if arguments.is_whole else _reuse("distill", job.stage, None if arguments.plan else status)
    if arguments.is_whole:
        return 1
    if arguments.plan:
        from aerie.data.distill.prompts import make_prompts, plan_line

        print(f"distill: {plan_line(make_prompts(recipe.distill, questions))} to {job.directory}")
        return 0
    from aerie.data.distill.run import Sitting, distilled

    sitting = Sitting(shard, arguments.merge, arguments.retry_failed, arguments.overwrite)
    sitting.require_sense()
    key = os.environ.get("OPENAI_API_KEY") or "none"
    return with_status(
        status,
        f"distill {shard}" if shard.count > 1 else "distill",
        lambda: (
            "done",
            distilled(job, sitting, recipe.target, questions, lambda thinking: _local(recipe, thinking), key),
        ),
    )


def show(arguments: argparse.Namespace, recipe: pipeline.Recipe) -> int:
    """Prints the first rows with the supervised tokens in green (bracketed with --plain)."""
    if arguments.limit < 1:
        raise UserError(f"--limit: must be at least 1, not {arguments.limit}")
    if arguments.plan:
        print(f"show: {arguments.limit:,} rows of {', '.join(recipe.data.conversations)} through {recipe.target.path}")
        return 0
    _be_quiet()
    from aerie.data.features import tokenised
    from aerie.data.tokens import show as preview

    limit = arguments.limit if recipe.data.limit is None else min(arguments.limit, recipe.data.limit)
    data, tokenizer, tally = tokenised(recipe.target, replace(recipe.data, limit=limit), rank=0)
    print(preview([*data.train, *data.held_out], tokenizer, arguments.limit, color=not arguments.plain))
    print(f"\n{tally.table()}")
    return 0


def features(arguments: argparse.Namespace, recipe: pipeline.Recipe) -> int:
    """Writes RUN/features, or reuses it; with --plan only says what would be written."""
    share = Share.of(arguments.shard or "1/1")
    status = _status(recipe, "features", share)
    if recipe.features.mode == "online":
        if not arguments.is_whole:
            print(
                "features: features.mode is online: the target runs in the training step, nothing is cached", flush=True
            )
        return 0
    if recipe.features.after_blocks is None and recipe.head.kind != "eagle3":
        recipe = replace(recipe, features=replace(recipe.features, after_blocks=()))
    try:
        inputs = feature_inputs(recipe.target, recipe.data, recipe.features)
    except UserError:
        if arguments.is_whole:
            return 1  # the stage before has not written the target yet
        raise
    stage = Stage("features", pipeline.RunPaths(Path(recipe.run)).features, inputs)
    if stage.is_whole() and is_complete(stage.output) and not arguments.verify:
        is_asked = arguments.plan or arguments.estimate
        return 0 if arguments.is_whole else _reuse("features", stage, None if is_asked else status)
    if arguments.is_whole:
        return 1
    stage.require_own_directory(arguments.overwrite)
    words = (recipe.target, recipe.data, recipe.features, recipe.head, stage, share, arguments.overwrite)
    if arguments.plan or arguments.estimate:
        return _plan_features(recipe, words, arguments.estimate)
    return with_status(status, "features", lambda: _write_features(recipe, words))


def _status(recipe: pipeline.Recipe, stage: str, share: Share) -> Path:
    """The run's status.json, or one of a share's own: jobs that work side by side do not write one file."""
    path = pipeline.RunPaths(Path(recipe.run)).status
    return path if share.count == 1 else path.with_name(f"status-{stage}-{share.index}-of-{share.count}.json")


def check(arguments: argparse.Namespace, recipe: pipeline.Recipe) -> int:
    """Says what is wrong with RUN/features, and 0 or 1."""
    directory = pipeline.RunPaths(Path(recipe.run)).features
    if arguments.plan:
        print(f"check: {directory}")
        return 0
    from aerie.data.features import check as findings

    found = findings(directory)
    print(found.text(directory), flush=True)
    return 1 if found.problems else 0


def read(arguments: argparse.Namespace, recipe: pipeline.Recipe) -> int:
    """Prints GB/s, and the share of a training step that is spent waiting."""
    paths, train = pipeline.RunPaths(Path(recipe.run)), recipe.train
    if arguments.steps < 1:
        raise UserError(f"--steps: must be at least 1, not {arguments.steps}")
    if arguments.step_ms is not None and not 0 < arguments.step_ms < float("inf"):
        raise UserError(f"--step-ms: must be a positive number of milliseconds, not {arguments.step_ms:g}")
    if arguments.plan:
        print(f"read: {arguments.steps:,} steps of {paths.features}")
        return 0
    import torch

    from aerie.data.batches import Order, ShardPools
    from aerie.data.cache import FeatureCache
    from aerie.data.features import last_step, measure

    torch.set_num_threads(1)
    rows, at_once = FeatureCache.open(paths.features).split("train"), recipe.features.shuffle_shards
    pools = None if at_once is None else ShardPools(rows.shards, at_once)
    order = Order(rows.lengths, train.seed, train.batch_size, train.accumulation, 1, pools)
    trained = last_step(paths.root / "metrics.jsonl", recipe.head.kind)
    step_ms = arguments.step_ms if trained is None else arguments.step_ms or trained[0]
    print(measure(rows, order, arguments.steps, None if step_ms is None else step_ms / 1000).text(), flush=True)
    if trained is not None:
        print(f"read: the last steps that were really trained waited {trained[1]:.1%} of their time")
    if step_ms is None:
        print(f"read: {paths.root} has trained nothing yet; name a step's time with --step-ms to see the waiting")
    return 0


def _write_synthetic(recipe: pipeline.Recipe, corpus: Stage, tokenizer: Stage) -> int:
    _be_quiet()
    import json

    from aerie.data.corpus.synthetic import train_tokenizer, write_corpus
    from aerie.model.storage import directory_atomically

    assert recipe.synthetic is not None
    with directory_atomically(corpus.output) as conversations, directory_atomically(tokenizer.output) as directory:
        counts = write_corpus(recipe.synthetic, conversations)
        lines = (conversations / "train.jsonl").read_text(encoding="utf-8").splitlines()
        texts = (turn["value"] for line in lines for turn in json.loads(line)["conversations"])
        trained = train_tokenizer(texts, recipe.synthetic.vocab_size)
        trained.save_pretrained(directory)
        replace(tokenizer, output=directory).finish(vocab_size=len(trained))
        replace(corpus, output=conversations).finish(rows=counts)
    written = ", ".join(f"{count:,} rows in {name}" for name, count in counts.items())
    print(f"synthetic: {written} ({corpus.output}); {len(trained):,} tokens in {tokenizer.output}", flush=True)
    return 0


def _local(recipe: pipeline.Recipe, thinking: Any) -> Any:
    """The target in this process, with the run's draft head where there is one."""
    import torch

    from aerie.configs.schema.decode import usual_tree
    from aerie.data.distill.run import LocalTarget
    from aerie.infer.decode.methods import usual_decoder
    from aerie.infer.measure.bench import default_device
    from aerie.model.target import Target

    assert recipe.distill is not None
    if recipe.threads is not None:
        torch.set_num_threads(recipe.threads)
    target = Target.load(recipe.target, default_device())
    head = pipeline.RunPaths(Path(recipe.run)).head(recipe)
    drafts = recipe.distill.decoder == "auto" and (head / "config.json").is_file()
    decoder = usual_decoder(
        target, str(head) if drafts else None, usual_tree(recipe.head.kind, recipe.tree) if drafts else None
    )
    print(f"distill: {recipe.target.path} answers in this process {f'with {head}' if drafts else 'alone'}", flush=True)

    def decode(prompt: list[int], sampling: Any, seed: int) -> list[int]:
        generation = decoder.generate(
            torch.tensor([prompt], device=target.device),
            generator=torch.Generator(target.device).manual_seed(seed),
            do_sample=sampling.temperature > 0,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=max(sampling.top_k or 0, 0),
            max_new_tokens=sampling.max_tokens,
            eos_token_id=sorted(thinking.end_ids),
        )
        return generation.new_ids

    limits = [getattr(target.config, "max_position_embeddings", None)]
    limits += [decoder.proposer.max_positions] if decoder.proposer is not None else []
    return LocalTarget(decode, thinking, min((limit for limit in limits if limit is not None), default=None))


def _evaluation_questions(recipe: pipeline.Recipe) -> list[str]:
    """All turns of the evaluation questions: of the sets that the recipe measures with, and of distill.exclude.

    They are whole sets, whatever part of them is measured, how far the answers go and what system prompt they have.
    """
    from aerie.configs.schema.measure import PromptsConfig, TaskConfig
    from aerie.infer.measure.tasks import load_prompts

    assert recipe.distill is not None
    tasks = tuple(TaskConfig(each.name, each.path, each.revision) for each in recipe.distill.exclude)
    wanted = [*recipe.measuring]
    wanted += [PromptsConfig(tasks=tasks)] if tasks else []
    wanted = [
        replace(each, tasks=tuple(replace(task, num_prompts=None) for task in each.tasks), num_prompts=None, turns=None)
        for each in wanted
    ]
    return [turn for prompts in wanted for prompt in load_prompts(prompts) for turn in prompt.turns]


def _plan_features(recipe: pipeline.Recipe, words: tuple[Any, ...], is_timed: bool) -> int:
    _be_quiet()
    from aerie.data.features import Sitting, planned, timed

    plan = planned(Sitting(*words), rank=0)[0]
    if is_timed:
        timed(Sitting(*words), plan, _device(recipe))
    return 0


def _write_features(recipe: pipeline.Recipe, words: tuple[Any, ...]) -> tuple[str, int]:
    _be_quiet()
    from aerie.data.features import Sitting, write

    _device(recipe)
    state = _processes(recipe)
    ended = write(Sitting(*words), state)
    state.destroy_process_group()
    return ended


def _device(recipe: pipeline.Recipe) -> str:
    """Where one process's target goes; sets the threads that the recipe asks for."""
    import torch

    if recipe.threads is not None:
        torch.set_num_threads(recipe.threads)
    return "cuda:0" if torch.cuda.is_available() else "cpu"


def _processes(recipe: pipeline.Recipe) -> Any:
    """accelerate's PartialState; UserError when the launcher started other processes than this one sees."""
    import torch
    from accelerate import PartialState

    launched = "LOCAL_RANK" in os.environ
    has_gpu = torch.cuda.is_available()
    state = PartialState(cpu=not has_gpu, timeout=BARRIER) if launched else PartialState()
    asked = int(os.environ.get("WORLD_SIZE", "1"))
    if asked != state.num_processes:
        raise UserError(
            f"WORLD_SIZE: the launcher asked for {asked} processes and {state.num_processes} answer; two processes on "
            f"a CPU go through configs/accelerate/zero1.yaml or torchrun"
        )
    if recipe.target.device_map is not None and state.num_processes > 1:
        raise UserError(
            f"target.device_map: {recipe.target.device_map} spreads the target over all GPUs, which "
            f"{state.num_processes} processes cannot share; start one process"
        )
    return state


def _require_own(stage: Stage, overwrite: bool) -> None:
    """UserError when the directory holds anything that is not this stage's."""
    stage.require_own_directory(overwrite)
    if not overwrite and not stage.is_whole() and stage.output.is_dir() and any(stage.output.iterdir()):
        raise UserError(
            f"{stage.output}: holds files that this stage did not write; choose another --run, or use --overwrite"
        )


def _reuse(name: str, stage: Stage, status: Path | None) -> int:
    """Says so, and in the status file if there is to be one."""
    print(f"{name}: whole, reused ({stage.output})", flush=True)
    if status is not None:
        write_status(status, name, "done")
    return 0


def _be_quiet() -> None:
    """Only our own lines: no advice and no loading bars of transformers, no forks warned about by tokenizers."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


if __name__ == "__main__":
    sys.exit(exit_code(main))
