"""What a recipe may ask of a method: its tree with changes, and heads of the right kind."""

from dataclasses import fields, replace
from typing import Any

from infer.choices import sized
from infer.config import FREE, METHODS, USUAL, Method, MethodConfig, TreeChanges, TreeConfig
from model.errors import UserError

__all__ = ["METHODS", "USUAL", "check_kind", "tree_of", "usual_method", "usual_tree"]

NOTHING = TreeChanges()
OF_OTHER_SHAPES = {
    "chain": ("k", "nodes", "rank", "rerank", "choices"),
    "static": ("levels", "k", "nodes", "rank", "rerank"),
    "dynamic": ("choices",),
}


def usual_method(kind: str) -> Method:
    """How a head of this kind usually decodes; UserError for a kind that does not."""
    if kind not in USUAL:
        raise UserError(f"a head of kind {kind!r} does not draft; kinds that do: {', '.join(USUAL)}")
    return USUAL[kind]


def usual_tree(kind: str, changes: TreeChanges = NOTHING) -> TreeConfig:
    """The tree of a kind of head's usual method with a recipe's changes, a static one with its true size."""
    tree = tree_of(MethodConfig(usual_method(kind), changes), "tree")
    assert tree is not None, "every head has a tree"
    return sized(tree)


def tree_of(asked: MethodConfig, place: str) -> TreeConfig | None:
    """The method's published tree with what the recipe changes of it; null for a method that grows none.

    What belongs to another shape (a chain's k) is not looked at. UserError, which names the place in the recipe, when
    the changes make another method of it: a rule that no method of that shape has keeps the name of a constant one.
    """
    published = METHODS[asked.method].tree
    changes = _set(asked.tree)
    if published is None:
        if changes:
            raise UserError(f"{place}: {asked.method} grows no tree; leave {', '.join(changes)} out")
        return None
    shape = changes.get("shape", published.shape)
    if shape != published.shape:
        raise UserError(f"{place}: {asked.method} drafts a {published.shape} tree, not a {shape} one")
    changes = {key: value for key, value in changes.items() if key not in OF_OTHER_SHAPES[shape]}
    rule = changes["stop"].rule if "stop" in changes else published.stop.rule
    if rule != published.stop.rule and asked.method not in FREE:
        heads = {*METHODS[asked.method].heads}
        others = [
            name for name, each in METHODS.items() if heads & {*each.heads} and _alike(each.tree, published, rule)
        ]
        if others or published.stop.rule != "constant":
            fix = f"that is method {' or '.join(others)}" if others else f"leave tree.stop.rule {published.stop.rule}"
            raise UserError(f"{place}: {asked.method} with the stop rule {rule}: {fix}")
    if changes.get("rerank") is False and "nodes" not in changes:
        changes["nodes"] = changes.get("k", published.k) * changes.get("levels", published.levels) + 1
    if asked.method == "opt-tree" and "nodes" in changes and "k" not in changes:
        changes["k"] = changes["nodes"] - 1  # its frontier is as wide as its budget
    try:
        return replace(published, **changes)
    except ValueError as error:
        raise UserError(f"{place}: {error}") from error


def check_kind(method: Method, kind: str, place: str) -> None:
    """UserError, which names the place, when the method does not draft with this kind of head."""
    heads = METHODS[method].heads
    if kind in heads:
        return
    if not heads:
        raise UserError(f"{place}: {method} needs no head; leave it out")
    article = "an" if kind[0] in "aeiou" else "a"
    raise UserError(
        f"{place}: {method} drafts with {' or '.join(heads)}, and this is {article} {kind} head; "
        f"give another head, or method {USUAL.get(kind, 'vanilla')}"
    )


def _set(changes: TreeChanges) -> dict[str, Any]:
    values = {field.name: getattr(changes, field.name) for field in fields(changes)}
    return {name: value for name, value in values.items() if value is not None}


def _alike(one: TreeConfig | None, other: TreeConfig, rule: str) -> bool:
    """Whether a tree is of the other's shape, with this stop rule."""
    return one is not None and one.stop.rule == rule and one.shape == other.shape
