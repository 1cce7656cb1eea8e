"""The points of a sweep as lines: one per row of the recipe, along the values that it was given."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from infer.table import sampling_text, tree_text
from model.files import digest

SIZES = ("levels", "k", "nodes")
OF_ITS_OWN = ("tree.stop", "tree.rank", "tree.calibrated", "tree.children")  # keys that leave a tree's sizes alone


@dataclass(frozen=True)
class Line:
    """One row of a sweep; points are rows of the summary's `sweeps`, one for each value at which it was measured."""

    label: str  # what tells it from the sweep's other lines
    points: tuple[dict[str, Any], ...]

    def at(self, value: Any) -> dict[str, Any] | None:
        """The point with this value."""
        return next((point for point in self.points if point["value"] == value), None)


def lines_of(points: Sequence[dict[str, Any]]) -> list[Line]:
    """The lines of a sweep, in the order of its points; two that look alike stay two."""
    found: dict[tuple[str, int], list[dict[str, Any]]] = {}
    seen: dict[tuple[str, str], int] = {}
    for point in points:
        alike = identity(point)
        value = digest(point["value"])
        number = seen.get((alike, value), 0)
        seen[alike, value] = number + 1
        found.setdefault((alike, number), []).append(point)
    members = list(found.values())
    return [Line(name, tuple(each)) for name, each in zip(_labels([each[0] for each in members]), members, strict=True)]


def values_of(lines: Sequence[Line]) -> list[Any]:
    """Every value of the lines, numbers by size, others in the order of the sweep."""
    found: list[Any] = []
    for line in lines:
        found += [point["value"] for point in line.points if point["value"] not in found]
    return sorted(found) if numeric(found) else found


def numeric(values: Sequence[Any]) -> bool:
    """Whether an axis can have these values."""
    return all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)


def identity(point: dict[str, Any]) -> str:
    """What a point shares with the others of its line: everything but the key that varies, and what follows from it."""
    key = point["key"]
    names = ["method", "head", "head_path", "temperature", "top_k", "top_p"]
    gone = {"head": ("head", "head_path"), "method": ("method",), "temperature": ("temperature",)}.get(key, ())
    tree = None if key == "method" or point["tree"] is None else _rest_of(point["tree"], key)
    return digest([[point[name] for name in names if name not in gone], tree])


def _rest_of(tree: dict[str, Any], key: str) -> dict[str, Any]:
    rest = {name: value for name, value in tree.items() if name not in ("text", "variant")}
    if tree["shape"] == "chain" or not tree.get("rerank", True):
        rest.pop("nodes")  # follows from the other sizes
    section, *path = key.split(".")
    if not path:
        return rest
    if section != "tree" or (path[0] not in SIZES and not key.startswith(OF_ITS_OWN)):
        rest = {name: value for name, value in rest.items() if name not in SIZES}
    return _without(rest, path)


def _without(values: dict[str, Any], path: Sequence[str]) -> dict[str, Any]:
    """The mapping without the entry at this path."""
    name, *deeper = path
    if not deeper or not isinstance(values.get(name), dict):
        return {key: value for key, value in values.items() if key != name}
    return {**values, name: _without(values[name], deeper)}


def _labels(firsts: Sequence[dict[str, Any]]) -> list[str]:
    """The method, and of its other words those in which the lines differ."""
    words = [_words(point) for point in firsts]
    names = [name for name in words[0] if len({each[name] for each in words}) > 1] if words else []
    kept = [name for name in words[0] if name == "method" or name in names] if words else []
    return [", ".join(each[name] for name in kept if each[name]) or "all" for each in words]


def _words(point: dict[str, Any]) -> dict[str, str]:
    key, tree = point["key"], point["tree"] or {}
    leaf = key.split(".")[-1].replace("_", " ")
    variant = [part for part in str(tree.get("variant", "")).split(", ") if not part.startswith(f"{leaf} ")]
    head = "" if key == "head" else f"{point.get('head_path') or point.get('head')} head"
    return {
        "method": "" if key == "method" else point["method"],
        "variant": "" if key == "method" else ", ".join(variant),
        "head": head,
        "sampling": "" if key == "temperature" else f"T {sampling_text(point)}",
        "sizes": "" if key == "method" or key.split(".")[-1] in SIZES else tree_text({**point, "tree": _plain(point)}),
    }


def _plain(point: dict[str, Any]) -> dict[str, Any] | None:
    tree = point["tree"]
    return None if tree is None else {name: value for name, value in tree.items() if name not in ("variant", "text")}
