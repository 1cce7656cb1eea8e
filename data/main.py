"""The commands aerie init, synthetic, distill, show, features and check.

On several GPUs, start a command with: accelerate launch data/main.py.
"""

import sys
from pathlib import Path

if Path(sys.path[0]).resolve() == Path(__file__).resolve().parent:
    # Python started this file as a script: import the checkout's packages as aerie.*.
    sys.path[0] = str(Path(__file__).resolve().parents[1] / "src")

import argparse
import os
import shlex
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

from aerie.configs.errors import (
    Arguments,
    UserError,
    exit_codes,
    stop_on_signals,
    warn,
    world_size,
)
from aerie.configs.read import as_dict, override, user_path, validate
from aerie.configs.schema.data import AnswerSamplingConfig, DistillConfig
from aerie.configs.schema.heads import TargetConfig
from aerie.configs.schema.recipe import Recipe, add_arguments, load, pairs_of
from aerie.data.inputs import CACHE_INDEX, feature_stage, is_here, target_inputs
from aerie.data.progress import JobShare
from aerie.model.hub import quieten, require_target
from aerie.model.storage import (
    Manifest,
    Stage,
    Whole,
    directory_atomically,
    status_file,
    write_status,
    write_text,
)


@exit_codes()
def main() -> int:
    arguments, unknown = make_parser().parse_known_args()
    stop_on_signals()
    if arguments.command == "init":
        return init(arguments, unknown)
    recipe = load(arguments, unknown)
    try:
        return int(arguments.run_command(arguments, recipe))
    except UserError:
        if arguments.is_whole:
            return 1  # an earlier stage has not written what this one reads
        raise


def make_parser() -> Arguments:
    parser = Arguments(
        "aerie", description="Prepare conversations and the feature cache.", allow_abbrev=False
    )
    commands = parser.add_subparsers(dest="command", required=True)

    def add(command: Any, summary: str) -> argparse.ArgumentParser:
        options = commands.add_parser(
            command.__name__, help=summary, description=summary, allow_abbrev=False
        )
        add_arguments(options)
        options.set_defaults(run_command=command, is_whole=False, estimate=False)
        return options

    add(synthetic, "write the embedded corpus and train its tokenizer")

    distilling = add(distill, "have the target answer prompts")
    flag = partial(distilling.add_argument, action="store_true")
    flag("--merge", help="merge the answers of all shares, and ask nothing")
    flag("--retry-failed", help="ask this share's failed and skipped rows again")

    showing = add(show, "print conversations with the loss mask")
    showing.add_argument("--limit", type=int, default=3, help="print N rows (default: 3)")
    showing.add_argument(
        "--plain", action="store_true", help="mark learnt turns by brackets instead of colour"
    )

    caching = add(features, "run the target over the conversations and cache its states")
    flag = partial(caching.add_argument, action="store_true")
    flag("--verify", help="read every byte, also of a complete cache, and rebuild damaged shards")
    flag("--estimate", help="as --plan; also time some forwards, and print the hours needed")

    for shared in (caching, distilling):
        shared.add_argument(
            "--shard", default="1/1", metavar="I/N", help="make only the I-th of N shares"
        )
        shared.add_argument(
            "--is-whole", action="store_true", help="exit code 0 if nothing is left to do, else 1"
        )

    add(check, "read the whole feature cache; exit code 1 if a byte is wrong")

    summary = (
        "write a recipe that suits the target, the data and this machine; "
        "--section.key VALUE sets a key of the recipe (see aerie keys)"
    )
    starting = commands.add_parser("init", help=summary, description=summary, allow_abbrev=False)
    option = partial(starting.add_argument, required=True)
    option("--target", help="the target's directory or Hub id")
    option("--data", nargs="+", help="files or directories of conversations, or Hub ids")
    option("--out", type=user_path, metavar="RECIPE.yaml", help="the recipe to write")
    starting.add_argument(
        "--kind",
        choices=("eagle1", "eagle3", "medusa", "hydra"),
        help="kind of head (default: by the target's number of blocks)",
    )
    starting.add_argument("--run", help="the run's directory (default: runs/TARGET-KIND)")
    option = partial(starting.add_argument, metavar="URL", nargs="+", default=[])
    option("--server", help="vLLM servers that answer the data's questions and give states")
    option("--states-server", help="vLLM servers that give the states, if not those of --server")
    starting.add_argument(
        "--states",
        metavar="DIR",
        help="folder of the servers' states, as this machine sees it (default: RUN/states)",
    )
    return parser


def init(arguments: argparse.Namespace, unknown: list[str]) -> int:
    if arguments.out.exists():
        raise UserError(f"--out: {arguments.out} exists already; name another file")
    requested = {
        "target": {"path": arguments.target},
        "data": {"conversations": arguments.data},
        "run": arguments.run,
        "head": {"kind": arguments.kind} if arguments.kind else {},
    }
    override(pairs_of(unknown), requested, {})
    require_target(validate(requested["target"], TargetConfig, "--target", {}).path)
    for name in arguments.data:
        is_here(name)
    quieten()
    from aerie.data.first_recipe import recipe_files
    from aerie.data.served_recipe import Servers

    servers = None
    if arguments.server:
        servers = Servers(arguments.server, arguments.states_server, arguments.states)
    elif arguments.states_server or arguments.states:
        raise UserError(
            "--states-server and --states work only with --server; name the servers that answer"
        )
    files = recipe_files(requested, arguments.out, servers)
    for path, text in files.items():
        if path.exists() and path.read_text(encoding="utf-8") != text:
            raise UserError(f"{path}: exists already; name another --out, or remove this file")
    for path, text in files.items():
        write_text(path, text)
    print(f"{files[arguments.out]}\nwritten: {', '.join(map(str, files))}; what to type next:")
    print(f"aerie run {shlex.quote(str(arguments.out))}")
    return 0


def synthetic(arguments: argparse.Namespace, recipe: Recipe) -> int:
    config = recipe.synthetic
    if config is None:
        raise UserError(
            f"{arguments.config}: has no section 'synthetic'; "
            "copy the one of configs/draft_lm/embedded.yaml"
        )
    inputs = {"synthetic": as_dict(config)}
    corpus = Stage("corpus", recipe.root / "conversations", inputs)
    tokenizer = Stage("tokenizer", recipe.root / "tokenizer", inputs)
    if corpus.is_whole() and tokenizer.is_whole():
        return _reuse(arguments, corpus, recipe.root / "status.json")
    for stage in (corpus, tokenizer):
        stage.require_own_directory(arguments.overwrite)
        if not arguments.overwrite and not stage.is_whole() and any(stage.output.glob("*")):
            raise UserError(
                f"{stage.output}: holds other files; "
                "choose another --run, or replace them with --overwrite"
            )
    if arguments.plan:
        print(f"synthetic: {config.num_conversations:,} conversations to {corpus.output}")
        return 0

    with status_file(recipe.root / "status.json", "synthetic"):
        quieten()
        from aerie.data.rows import read_rows
        from aerie.data.synthetic import train_tokenizer, write_corpus

        with (
            directory_atomically(corpus.output) as conversations,
            directory_atomically(tokenizer.output) as directory,
        ):
            counts = write_corpus(config, conversations)
            texts = list[str]()
            for row in read_rows(str(conversations / "train.jsonl")):
                texts += [turn["value"] for turn in row.value["conversations"]]
            trained = train_tokenizer(texts, config.vocab_size)
            trained.save_pretrained(directory)
            replace(tokenizer, output=directory).finish(vocab_size=len(trained))
            replace(corpus, output=conversations).finish(rows=counts)
        print(
            f"synthetic: {counts} rows in {corpus.output}; "
            f"{len(trained):,} tokens in {tokenizer.output}",
            flush=True,
        )
    return 0


def distill(arguments: argparse.Namespace, recipe: Recipe) -> int:
    """Makes RUN/distilled, or one share of it; with --plan, only counts the prompts."""
    section = recipe.distill
    if section is None:
        raise UserError(
            f"{arguments.config}: has no section 'distill'; copy one from configs/distill"
        )
    from aerie.data.distill.distillation import run_distillation
    from aerie.data.distill.prompts import make_prompts, plan_line
    from aerie.data.rendering import fix_date

    share = JobShare.of(arguments.shard)
    quieten()
    status = _status(recipe, "distill", share)
    questions = _measuring_questions(recipe, section)
    job = _distillation(recipe, section, questions)
    if job.stage.is_whole() and not arguments.retry_failed:
        return _reuse(arguments, job.stage, status)
    if arguments.is_whole:
        return 1
    if arguments.plan:
        print(f"distill: {plan_line(make_prompts(section, questions))} to {job.directory}")
        return 0
    recipe = fix_date(recipe)
    job = _distillation(recipe, section, questions)
    make_local = partial(_local_target, recipe, section.sampling)
    with status_file(status, f"distill {share}" if share.count > 1 else "distill"):
        run_distillation(job, arguments, recipe.target, make_local, recipe.data)
    return 0


def _distillation(recipe: Recipe, config: DistillConfig, questions: list[str]) -> Any:
    from aerie.data.distill.distillation import Distillation
    from aerie.data.rendering import facts_of, with_template_arguments

    config = with_template_arguments(config, recipe.data)
    target = target_inputs(recipe.target)
    job = Distillation.of(recipe.root / "distilled", config, target, questions)
    job.inputs.update(facts_of(recipe.data))
    return job


def _measuring_questions(recipe: Recipe, config: DistillConfig) -> list[str]:
    """The questions that no training row may ask.

    They are those of all sets that the recipe measures with or names in distill.exclude.
    """
    from aerie.configs.schema.measure import PromptsConfig, TaskConfig
    from aerie.infer.measure.tasks import load_prompts

    sections = (recipe.bench, recipe.calibrate, recipe.tune)
    excluded = [TaskConfig(task.name, task.path, task.revision) for task in config.exclude]
    measured = [section.prompts for section in sections if section is not None]
    measured.append(PromptsConfig(tasks=tuple(excluded)))
    if recipe.tune is not None and recipe.tune.measure is not None:
        measured.append(recipe.tune.measure)
    questions = list[str]()
    for prompts in measured:
        if prompts.path or prompts.tasks:
            # The whole set, with the questions that the recipe's num_prompts leaves out.
            tasks = tuple(replace(task, num_prompts=None) for task in prompts.tasks)
            for prompt in load_prompts(replace(prompts, tasks=tasks, num_prompts=None, turns=None)):
                questions += prompt.turns
    return questions


def _local_target(recipe: Recipe, sampling: AnswerSamplingConfig, thinking: Any) -> Any:
    """An `Ask` that decodes in this process, with the run's draft head if there is one."""
    import torch

    from aerie.data.distill.answer import local_target
    from aerie.infer.decode.engine import SpeculativeDecoder
    from aerie.model.target import Target

    target = Target.load(recipe.target, _device(recipe))
    path = recipe.head_output
    head = str(path) if (path / "config.json").is_file() else None
    decoder = SpeculativeDecoder.from_pretrained(target, head, tree=recipe.tree)
    print(f"distill: {recipe.target.path} answers with {head or 'no draft head'}", flush=True)
    settings: dict[str, Any] = {
        "do_sample": sampling.temperature > 0,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": max(sampling.top_k or 0, 0),
        "max_new_tokens": sampling.max_tokens,
        "eos_token_id": sorted(thinking.end_ids),
    }

    def decode(prompt: list[int], seed: int) -> list[int]:
        generator = torch.Generator(target.device).manual_seed(seed)
        return decoder.generate(prompt, generator=generator, **settings).new_ids

    return local_target(decode, thinking, min(decoder.limits.values()) - sampling.max_tokens)


def show(arguments: argparse.Namespace, recipe: Recipe) -> int:
    limit = arguments.limit
    if limit < 1:
        raise UserError(f"--limit: must be at least 1, not {limit}")
    if arguments.plan:
        print(f"show: {limit:,} rows")
        return 0
    quieten()
    from aerie.data.rendering import fix_date
    from aerie.data.tokens import preview, tokenize_for_target

    recipe = fix_date(recipe, is_stage=False)
    config = replace(recipe.data, limit=min(limit, recipe.data.limit or limit))
    data, tokenizer, tally = tokenize_for_target(recipe.target, config)
    for row in [*data.train, *data.held_out][:limit]:
        print(f"{preview(row, tokenizer, not arguments.plain)}\n")
    print(tally.table())
    return 0


def features(arguments: argparse.Namespace, recipe: Recipe) -> int:
    share = JobShare.of(arguments.shard)
    status = _status(recipe, "features", share)
    if recipe.features.mode == "online":
        if not arguments.is_whole:
            print("features: nothing is cached, since features.mode is online")
        return 0
    stage = feature_stage(recipe)
    # Compares sizes only; --verify and `check` read every byte.
    is_there = isinstance(Manifest.check(stage.output, content=False, name=CACHE_INDEX), Whole)
    if is_there and stage.is_whole() and not (arguments.verify or arguments.estimate):
        if recipe.features.server is not None:
            from aerie.data.state_server import sweep_states

            sweep_states(recipe.features.server, stage.output)
        return _reuse(arguments, stage, status)
    if arguments.is_whole:
        return 1
    quieten()
    from aerie.data.features import prepare, time_forwards, write
    from aerie.data.rendering import fix_date

    only_tells = arguments.plan or arguments.estimate
    recipe = fix_date(recipe, is_stage=not only_tells)
    stage = feature_stage(recipe)
    stage.require_own_directory(arguments.overwrite)
    if not only_tells:
        with status_file(status, "features") as ended:
            ended["state"] = write(recipe, stage, share, arguments.overwrite, _processes(recipe))
        return 0
    try_in_miniature(recipe)
    plan, _, _ = prepare(recipe, stage, share, arguments.overwrite)
    rehearse_training(recipe)
    if arguments.estimate:
        time_forwards(recipe, plan, share, _device(recipe))
    return 0


def try_in_miniature(recipe: Recipe) -> None:
    """Tries a tiny target of the same architecture.

    UserError if no head can be trained for it; a warning if aerie cannot decode with it.
    """
    from aerie.data.batches import check_padding
    from aerie.infer.decode.check import checked_lm
    from aerie.model.miniature import miniature
    from aerie.model.target_files import load_config, only_trains

    hf_config = load_config(recipe.target)
    small = miniature(hf_config, recipe.target)
    if small is None:
        return
    check_padding(small)
    try:
        checked_lm(small)
    except UserError as error:
        if not only_trains(hf_config):  # else `prepare` warns
            warn(str(error))


def rehearse_training(recipe: Recipe) -> None:
    """UserError if the recipe's new head cannot be trained on the target's states."""
    from aerie.model.heads import HEADS
    from aerie.model.target_files import load_config, taps_of
    from aerie.train.rehearsal import planned_config, rehearse_head

    # Not tried: a warm start, whose head may need a download, and a draft LM, which reads tokens.
    if recipe.head.kind not in HEADS or recipe.head.init_from is not None:
        return
    text_config = load_config(recipe.target).get_text_config()
    taps = taps_of(recipe, text_config.num_hidden_layers)
    rehearse_head(planned_config(recipe.head, text_config, taps), recipe.train)


def _processes(recipe: Recipe) -> Any:
    import torch
    from accelerate import PartialState

    _device(recipe)
    # Settings of a process that a launcher has started.
    options: dict[str, Any] = {
        "cpu": not torch.cuda.is_available(),
        "timeout": timedelta(hours=12),  # how long a process waits for the slowest shard of another
    }
    state = PartialState(**options if "LOCAL_RANK" in os.environ else {})
    if world_size() != state.num_processes:
        raise UserError(
            f"WORLD_SIZE: the launcher asked for {world_size()} processes, and "
            f"{state.num_processes} answer; on a CPU, launch with "
            "configs/accelerate/zero1.yaml or torchrun"
        )
    is_local = recipe.features.server is None
    if is_local and recipe.target.device_map is not None and state.num_processes > 1:
        raise UserError(
            f"target.device_map: {recipe.target.device_map} spreads the target over all GPUs; "
            "start one process"
        )
    return state


def check(arguments: argparse.Namespace, recipe: Recipe) -> int:
    if arguments.plan:
        print(f"check: {recipe.root / 'features'}")
        return 0
    from aerie.data.features import check_cache

    return check_cache(recipe.root / "features")


def _status(recipe: Recipe, stage: str, share: JobShare) -> Path:
    name = f"status-{stage}-{share.index}-of-{share.count}.json"
    return recipe.root / name if share.count > 1 else recipe.root / "status.json"


def _reuse(arguments: argparse.Namespace, stage: Stage, status: Path) -> int:
    if not arguments.is_whole:
        print(f"{arguments.command}: whole, reused ({stage.output})", flush=True)
        if not arguments.plan:
            write_status(status, arguments.command, "done")
    return 0


def _device(recipe: Recipe) -> str:
    import torch

    if recipe.threads is not None:
        torch.set_num_threads(recipe.threads)
    return "cuda:0" if torch.cuda.is_available() else "cpu"


if __name__ == "__main__":
    sys.exit(main())
