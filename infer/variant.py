"""What a row of a bench was given: every setting for its record, and in a few words what its paper has otherwise."""

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

from infer.choices import sized
from infer.config import METHODS, MethodConfig, TreeConfig
from infer.methods import tree_of
from infer.records import TreeShape
from infer.stops.config import StopConfig
from model.files import digest
from model.recipe import as_dict

KEPT = ("stop", "rank", "rerank", "choices", "calibrated")  # of a tree, beside its sizes


def tree_shape(row: MethodConfig) -> TreeShape | None:
    """What a record says of a row's tree; null for vanilla."""
    options, typical = row.options, _typical(row)
    if options is not None:
        shape = METHODS[row.method].options
        assert shape is not None
        given = {**as_dict(options), **typical}
        return TreeShape(shape, *options.sizes, settings=given, text=options.text, variant=_words(typical))
    tree = tree_of(row, "bench.rows")
    if tree is None:
        return None
    size, published = sized(tree), METHODS[row.method].tree
    assert published is not None
    kept = {key: value for key, value in as_dict(tree).items() if key in KEPT}
    settings = {**kept, "children": _children(tree), **typical}
    words = _words({**_changes(tree, published), **typical})
    return TreeShape(size.shape, size.levels, size.k, size.nodes, settings, variant=words)


def told_apart(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A summary's rows; those that differ in nothing but their head have it in their tree's variant."""
    alike: dict[str, set[tuple[str | None, str | None]]] = {}
    for row in rows:
        alike.setdefault(digest([row["method"], row["tree"]]), set()).add((row["head"], row.get("head_path")))
    made = []
    for row in rows:
        heads = alike[digest([row["method"], row["tree"]])]
        if row["tree"] is None or len(heads) == 1:
            made.append(row)
            continue
        kinds = len({kind for kind, _ in heads})
        words = f"{row['head']} head" if kinds == len(heads) else f"head {row.get('head_path') or 'of the run'}"
        variant = ", ".join(part for part in (row["tree"].get("variant"), words) if part)
        made.append({**row, "tree": {**row["tree"], "variant": variant}})
    return made


def _changes(tree: TreeConfig, published: TreeConfig) -> dict[str, Any]:
    """The settings that are not the method's own, but for a tree's sizes."""
    found = _rule_changes(tree.stop, published.stop)
    if tree.rank != published.rank:
        found["rank"] = tree.rank
    if tree.rerank != published.rerank:
        found["rerank"] = tree.rerank
    usual = _children(published) if tree.shape == published.shape else _children(replace(tree, children=None))
    if _children(tree) != usual:
        found["children"] = tree.children
    if tree.choices != published.choices:
        named = isinstance(tree.choices, str)
        found["choices"] = tree.choices if named else digest(tree.choices)[:6]
    if tree.calibrated is not None:
        found["calibrated"] = tree.calibrated
    return found


def _rule_changes(stop: StopConfig, published: StopConfig) -> dict[str, Any]:
    found: dict[str, Any] = {} if stop.rule == published.rule else {"stop": stop.rule}
    plain = type(stop)()
    for field in fields(stop):
        value = getattr(stop, field.name)
        if value != getattr(plain, field.name):
            found[field.name] = value
    return found


def _children(tree: TreeConfig) -> str:
    return tree.children or ("best" if tree.shape == "dynamic" else "sampled")


def _typical(row: MethodConfig) -> dict[str, Any]:
    return {} if row.typical is None else {"typical": as_dict(row.typical)}


def _words(changes: dict[str, Any]) -> str:
    return ", ".join(f"{key.replace('_', ' ')} {_word(value)}" for key, value in changes.items())


def _word(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_word(item)}" for key, item in value.items())
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:g}"
    return "/".join(map(str, value)) if isinstance(value, tuple | list) else str(value)
