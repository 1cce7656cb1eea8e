"""What a recipe may ask of a method: its tree with changes, and heads of the right kind. A key that nobody reads is
refused."""

from dataclasses import fields, replace
from typing import Any

from infer.choices import sized
from infer.config import FREE, METHODS, USUAL, Method, MethodConfig, TreeChanges, TreeConfig
from infer.guess_config import OPTIONS
from infer.stops.config import beyond
from model.errors import UserError

__all__ = ["METHODS", "USUAL", "check_kind", "tree_of", "usual_method", "usual_tree"]

NOTHING = TreeChanges()
OF_OTHER_SHAPES = {
    "chain": ("k", "nodes", "rank", "rerank", "choices"),
    "static": ("levels", "k", "nodes", "rank", "rerank"),
    "dynamic": ("choices",),
}
INSTEAD = {  # of a key that a shape does not read
    "chain": "a chain has tree.levels",
    "static": "a static tree is its tree.choices",
    "dynamic": "method eagle drafts a static tree",
}


def usual_method(kind: str) -> Method:
    """How a head of this kind usually decodes; UserError for a kind that does not."""
    if kind not in USUAL:
        raise UserError(f"a head of kind {kind!r} does not draft; kinds that do: {', '.join(USUAL)}")
    return USUAL[kind]


def usual_tree(kind: str, changes: TreeChanges = NOTHING) -> TreeConfig:
    """The tree of a kind of head's usual method with a recipe's changes, a static one with its true size."""
    tree = tree_of(MethodConfig(usual_method(kind), changes), "recipe")
    assert tree is not None, "every head has a tree"
    return sized(tree)


def tree_of(asked: MethodConfig, place: str) -> TreeConfig | None:
    """The method's published tree with what the recipe changes of it; null for a method that grows none.

    UserError, which names the place in the recipe, for a key that the method or its shape does not read, and where the
    changes make another method of it: a rule that no method of that shape has keeps the name of a constant one.
    """
    published = METHODS[asked.method].tree
    changes = _set(asked.tree)
    _require_read(asked, changes, place)
    if published is None:
        return None
    shape = changes.get("shape", published.shape)
    _require_of_shape(asked.method, shape, changes, place)
    if shape == published.shape:
        _require_own_rule(asked.method, published, changes, place)
    else:
        published = TreeConfig(shape=shape, choices=changes.get("choices"))
    if changes.get("rerank") is False and "nodes" not in changes:
        changes["nodes"] = changes.get("k", published.k) * changes.get("levels", published.levels) + 1
    if asked.method == "opt-tree" and "nodes" in changes and "k" not in changes:
        changes["k"] = changes["nodes"] - 1  # its frontier is as wide as its budget
    try:
        tree = replace(published, **changes)
        unreached = beyond(tree.stop, sized(tree).levels)
    except ValueError as error:
        raise UserError(f"{place}: tree: {error}") from error
    except UserError as error:  # of the tree's choices
        raise UserError(f"{place}: {error}") from error
    if unreached is not None:
        raise UserError(f"{place}: tree: {unreached}")
    return tree


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


def _require_read(asked: MethodConfig, changes: dict[str, Any], place: str) -> None:
    """UserError for a section of the method's settings that it has no use for."""
    published = METHODS[asked.method]
    if published.tree is None and changes:
        keys = ", ".join(f"tree.{key}" for key in changes)
        instead = f" (its settings are in {published.options})" if published.options else ""
        raise UserError(
            f"{place}: {keys}: {asked.method} grows no tree; leave {'it' if len(changes) == 1 else 'them'} out{instead}"
        )
    for section in OPTIONS:
        if section != published.options and getattr(asked, section) is not None:
            owner = next(name for name, each in METHODS.items() if each.options == section)
            raise UserError(f"{place}: {section}: {asked.method} does not read it; leave it out, or use method {owner}")
    if asked.typical is not None and asked.method == "vanilla":
        raise UserError(f"{place}: typical: judges drafted tokens, and vanilla drafts none; leave it out")


def _require_of_shape(method: Method, shape: str, changes: dict[str, Any], place: str) -> None:
    """UserError for a shape that the method does not draft, and for a key that a tree of this shape does not read."""
    published = METHODS[method]
    assert published.tree is not None
    if shape not in (published.tree.shape, *published.shapes):
        named: dict[str, Method] = {"chain": "eagle-chain", "static": "eagle", "dynamic": "eagle2"}
        other = f", or use method {named[shape]}" if {*published.heads} & {*METHODS[named[shape]].heads} else ""
        raise UserError(
            f"{place}: tree.shape: {method} drafts a {_tree(published.tree.shape)}, not a {_tree(shape)}; "
            f"leave it out{other}"
        )
    unread = [key for key in OF_OTHER_SHAPES[shape] if key in changes]
    if unread:
        raise UserError(
            f"{place}: tree.{unread[0]}: {method} drafts a {_tree(shape)}, which has none; leave it out "
            f"({INSTEAD[shape]})"
        )
    if shape == "static" and published.tree.choices is None and "choices" not in changes:
        raise UserError(f"{place}: tree.choices: a static tree needs its nodes; name a file of them, or eagle1")


def _require_own_rule(method: Method, published: TreeConfig, changes: dict[str, Any], place: str) -> None:
    """UserError for a stop rule that makes another method of it."""
    rule = changes["stop"].rule if "stop" in changes else published.stop.rule
    if rule == published.stop.rule or method in FREE:
        return
    heads = {*METHODS[method].heads}
    others = [name for name, each in METHODS.items() if heads & {*each.heads} and _alike(each.tree, published, rule)]
    if others or published.stop.rule != "constant":
        fix = f"that is method {' or '.join(others)}" if others else f"leave tree.stop.rule {published.stop.rule}"
        raise UserError(f"{place}: {method} with the stop rule {rule}: {fix}")


def _tree(shape: str) -> str:
    return "chain" if shape == "chain" else f"{shape} tree"


def _set(changes: TreeChanges) -> dict[str, Any]:
    values = {field.name: getattr(changes, field.name) for field in fields(changes)}
    return {name: value for name, value in values.items() if value is not None}


def _alike(one: TreeConfig | None, other: TreeConfig, rule: str) -> bool:
    """Whether a tree is of the other's shape, with this stop rule."""
    return one is not None and one.stop.rule == rule and one.shape == other.shape
