"""What a command works on: the recipe, its run, and the head that --head, a row or the run names."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from aerie.configs.errors import warn
from aerie.configs.schema import recipe as pipeline
from aerie.configs.schema.decode import METHODS, Method, MethodConfig, check_kind
from aerie.infer.decode.methods import find_head, kind_at

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]
else:
    Commands = object

HEAD = "a head directory (default: the run's own)"
OWN_TREES = {"bench": "its rows have trees of their own (bench.rows)", "calibrate": "its tree is calibrate.tree"}


def recipe_of(arguments: argparse.Namespace, unknown: list[str]) -> tuple[pipeline.Recipe, pipeline.RunPaths, Path]:
    """The recipe, its run's paths and its head; warns of overrides of `tree` to a command that has trees of its own."""
    recipe = pipeline.load(arguments, unknown)
    for word in unknown:
        if word.startswith("--tree.") and arguments.command in OWN_TREES:
            named = word.partition("=")[0]
            warn(f"{named}: {arguments.command} does not read it; {OWN_TREES[arguments.command]}")
    paths = pipeline.RunPaths(Path(recipe.run))
    return recipe, paths, arguments.head or paths.head(recipe)


def head_of(
    asked: MethodConfig, recipe: pipeline.Recipe, paths: pipeline.RunPaths, head: Path, place: str
) -> str | None:
    """The head that a row drafts with: --head or the recipe's own where its kind fits, else the run's of that kind."""
    if asked.head is None and recipe.head.kind in METHODS[asked.method].heads and head == paths.head(recipe):
        return present_head(head, asked.method)
    given = None if head == paths.head(recipe) else head
    return find_head(asked, paths.heads, recipe.head.kind, given, place)


def check_given(head: Path | None, method: Method) -> None:
    """UserError for a --head that the method does not draft with."""
    if head is not None:
        check_kind(method, kind_at(head) if kinds_of(method) else "draft", "--head")


def kinds_of(method: Method) -> tuple[str, ...]:
    return METHODS[method].heads


def present_head(head: Path, method: Method) -> str:
    """The head's directory; UserError when there is none, or one that the method does not draft with."""
    check_kind(method, kind_at(head), str(head))
    return str(head)
