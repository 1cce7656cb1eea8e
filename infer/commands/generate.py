"""`generate`: streams an answer, with or without a recipe."""

import argparse
from dataclasses import replace
from pathlib import Path
from typing import get_args

from aerie.configs.errors import UserError
from aerie.configs.read import as_dict, from_overrides, load
from aerie.configs.schema import recipe as pipeline
from aerie.configs.schema.decode import USUAL, Method, MethodConfig
from aerie.configs.schema.target_and_head import TargetConfig
from aerie.data.inputs import target_inputs
from aerie.infer.commands.chosen import HEAD, Commands, check_given, kinds_of, present_head
from aerie.infer.decode.methods import check_levels, find_head, kind_at
from aerie.infer.measure.bench import check_settings, check_weights, prepare


def add(commands: Commands) -> None:
    """Adds the command's options."""
    generate = commands.add_parser("generate", help="stream an answer; accepted draft tokens are green")
    generate.add_argument("--prompt", required=True)
    generate.add_argument("--raw", action="store_true", help="the prompt as it is, without the chat template")
    generate.add_argument("--method", choices=get_args(Method), help="default: the usual one of the head")
    generate.add_argument("--row", type=Path, metavar="FILE.yaml", help="a method with its tree, as `tune` writes it")
    generate.add_argument("--max-new-tokens", type=int)
    generate.add_argument("--temperature", type=float)
    generate.add_argument("--top-k", type=int)
    generate.add_argument("--top-p", type=float)
    generate.add_argument("--seed", type=int, default=0)
    generate.add_argument("--show-tree", action="store_true", help="print the first draft tree")
    generate.add_argument("--save-tree", type=Path, metavar="PATH.json", help="write the first draft tree as JSON")
    generate.add_argument("--cycles", type=Path, metavar="PATH.jsonl", help="write a record of every cycle")
    pipeline.add_arguments(generate, config_required=False)
    generate.add_argument("--head", type=Path, help=HEAD)


def run(arguments: argparse.Namespace, unknown: list[str]) -> int:
    target_config, asked, head, threads = _generation(arguments, unknown)
    tree = asked.tree
    check_levels(tree, head, "generate")
    check_weights([head])
    target_inputs(target_config)
    settings = {name: getattr(arguments, name) for name in ("max_new_tokens", "temperature", "top_k", "top_p")}
    check_settings(settings)
    if arguments.plan:
        grown = as_dict(tree) if tree else "no tree"
        law = "" if asked.typical is None else "; typical acceptance, NOT lossless where tokens are sampled"
        print(f"generate: {target_config.path}, {asked.method} with {head or 'no head'}, {grown}{law}")
        return 0
    prepare(threads)
    from aerie.infer.measure.generate import Question, Traces, answer

    question = Question(arguments.prompt, arguments.raw, arguments.seed, settings)
    answer(target_config, asked, head, question, Traces(arguments.show_tree, arguments.save_tree, arguments.cycles))
    return 0


def _generation(
    arguments: argparse.Namespace, unknown: list[str]
) -> tuple[TargetConfig, MethodConfig, str | None, int | None]:
    """Target, method, head and threads from a recipe, or from --target and --head alone.

    The recipe's `tree` is that of its head's usual method; another method has its published one.
    """
    if arguments.config is None:
        return _without_recipe(arguments, unknown)
    own, others = pipeline.method_words(unknown)
    recipe = pipeline.load(arguments, others)
    paths, usual = pipeline.RunPaths(Path(recipe.run)), USUAL[recipe.head.kind]
    asked = _asked(arguments, usual, own)
    if asked.method == usual and arguments.row is None:
        tree = pipeline.load(arguments, [*others, *(f"--{word}" for word in own if word.startswith("tree."))]).tree
        asked = replace(asked, tree=tree)
    check_given(arguments.head, asked.method)
    if arguments.head is not None:
        asked = replace(asked, head=None)  # --head goes before the row's
    if arguments.head is None and asked.head is None and recipe.head.kind in kinds_of(asked.method):
        return recipe.target, asked, present_head(paths.head(recipe), asked.method), recipe.threads
    found = find_head(asked, paths.heads, recipe.head.kind, arguments.head, "--method")
    return recipe.target, asked, found, recipe.threads


def _without_recipe(
    arguments: argparse.Namespace, unknown: list[str]
) -> tuple[TargetConfig, MethodConfig, str | None, int | None]:
    headless = arguments.head is None and arguments.row is None
    if arguments.target is None or (headless and (arguments.method is None or kinds_of(arguments.method))):
        raise UserError(
            "generate needs --config RECIPE, or --target and --head (or --method vanilla, pld or lookahead)"
        )
    usual = arguments.method or ("vanilla" if arguments.head is None else USUAL[kind_at(arguments.head)])
    asked = _asked(arguments, usual, pipeline.method_words(unknown, alone=True)[0])
    words = {"path": arguments.target, "dtype": arguments.dtype, "device_map": arguments.device_map}
    given = [f"{key}={value}" for key, value in words.items() if value is not None]
    config = from_overrides(TargetConfig, given, "command line")
    check_given(arguments.head, asked.method)
    head = asked.head if arguments.head is None else str(arguments.head)
    if head is None and kinds_of(asked.method):
        raise UserError(f"{arguments.row}: {asked.method} needs a head; give --head")
    return config, asked, head, None


def _asked(arguments: argparse.Namespace, usual: Method, own: list[str]) -> MethodConfig:
    """The method of --row, or of --method, or the usual one, with what the command line changes of it."""
    if arguments.row is None:
        return pipeline.method_from(arguments.method or usual, own)
    if arguments.method is not None:
        raise UserError("--row names its method; leave --method out")
    return load(arguments.row, MethodConfig, own)
