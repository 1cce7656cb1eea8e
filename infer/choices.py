"""The nodes of a static tree as paths of child ranks: (0, 2) is the third child of the root's first."""

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from infer.config import TreeConfig
from model.errors import UserError
from model.files import file_digest
from model.recipe import STRICT, read_yaml, validate

Choice = tuple[int, ...]
PUBLISHED = Path(__file__).resolve().parent.parent / "configs" / "trees"


@dataclass(frozen=True)
class _File:
    __pydantic_config__ = STRICT
    choices: tuple[Choice, ...]


def inline(config: TreeConfig) -> tuple[Choice, ...]:
    """The nodes of a static tree in level order, read from the file where the recipe names one.

    UserError names what makes them no tree, or a gap between siblings that are to be sampled.
    """
    assert config.choices is not None, "only a static tree has choices"
    source, choices = "tree.choices", config.choices
    if isinstance(choices, str):
        path = _file(config) or PUBLISHED / f"{choices}.yaml"
        if not path.is_file():
            known = ", ".join(sorted(file.stem for file in PUBLISHED.glob("*.yaml")))
            raise UserError(f"tree.choices: {choices}: no such file (published trees: {known})")
        values, lines = read_yaml(path)
        source, choices = f"{path}: choices", validate(values, _File, str(path), lines).choices
    return ordered(choices, source, config.children != "best")


def digests(configs: Iterable[TreeConfig | None]) -> dict[str, dict[str, str]]:
    """{"choices": file -> digest} of the files that trees name, which may change under their names; empty without."""
    named = {str(config.choices): file for config in configs if config and (file := _file(config)) is not None}
    return {"choices": {name: file_digest(file) for name, file in sorted(named.items())}} if named else {}


def sized(config: TreeConfig) -> TreeConfig:
    """The configuration with the true levels, k and nodes of a static tree; any other as it is."""
    if config.shape != "static":
        return config
    choices = inline(config)
    return replace(
        config,
        levels=max(map(len, choices)),
        k=1 + max(max(choice) for choice in choices),
        nodes=1 + len(choices),
    )


def _file(config: TreeConfig) -> Path | None:
    """The file that a tree's choices name; null for a published tree, a list, and where there are none."""
    choices = config.choices
    return Path(choices) if isinstance(choices, str) and choices.endswith((".yaml", ".yml")) else None


def ordered(choices: Sequence[Choice], source: str, sampled: bool) -> tuple[Choice, ...]:
    """The choices in level order, siblings by rank; UserError (about source) when they are no tree.

    sampled: a node's child of rank r is then the token drawn r-th, and none of those drawn before it may be left out.
    """
    if not choices or () in choices:
        raise UserError(f"{source}: a tree has at least one path, and no empty one (the root is always there)")
    nodes = {(), *choices}
    if len(nodes) != len(choices) + 1:
        twice = next(choice for number, choice in enumerate(choices) if choice in choices[:number])
        raise UserError(f"{source}: {list(twice)} stands there twice; list each path once")
    for choice in choices:
        *above, rank = choice
        if rank < 0:
            raise UserError(f"{source}: {list(choice)} has a negative rank; ranks count from 0")
        if tuple(above) not in nodes:
            raise UserError(f"{source}: {list(choice)} is listed without its parent {above}; add the parent")
        if sampled and rank and (*above, rank - 1) not in nodes:
            raise UserError(
                f"{source}: {list(choice)} is listed without {[*above, rank - 1]}: leaving out a child that was drawn "
                f"would bias the output; list it too, or use children: best"
            )
    return tuple(sorted(choices, key=lambda choice: (len(choice), choice)))


def best_choices(accuracy: Sequence[Sequence[float]], num_choices: int) -> tuple[Choice, ...]:
    """The tree of num_choices drafted nodes with the most accepted tokens to expect, in level order.

    accuracy[depth][rank] is how often the child of this rank is the target's token, given that its parent was; depth 0
    is the root's children. Greedily adds the node with the largest product of accuracies along its path; fewer nodes
    when the table has no more. Source: Medusa (arXiv 2401.10774), section 2.3.3.
    """
    found: list[Choice] = []
    heap: list[tuple[float, int, Choice]] = []

    def offer(parent: Choice, chance: float) -> None:
        if len(parent) < len(accuracy):
            for rank, own in enumerate(accuracy[len(parent)]):
                if own > 0:
                    heapq.heappush(heap, (-chance * own, len(parent) + 1, (*parent, rank)))

    offer((), 1.0)
    while heap and len(found) < num_choices:
        chance, _, choice = heapq.heappop(heap)
        found.append(choice)
        offer(choice, -chance)
    return tuple(sorted(found, key=lambda choice: (len(choice), choice)))
