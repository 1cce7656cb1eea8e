"""Names a row's tree in records, summaries and tables, and aligns tables for a terminal."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from aerie.configs.read import as_dict
from aerie.configs.schema.decode import METHODS, MethodConfig, published_tree
from aerie.model.storage import digest, plainly


@dataclass(frozen=True)
class TreeShape:
    """The tree of a row."""

    shape: str  # dynamic, chain, static, lookup, lookahead or served
    levels: int
    k: int
    nodes: int  # with the root
    settings: dict[str, Any] = field(default_factory=dict)  # the method's other settings
    text: str | None = None  # the words for the sizes, if they are not the usual ones
    variant: str = ""  # the settings that differ from the method's published ones

    @property
    def words(self) -> str:
        """Words such as '6 levels, k 8, 16 nodes' or '5 levels, chain, stop entropy'."""
        sizes = {"chain": "chain", "static": f"static, {self.nodes} nodes"}
        size = sizes.get(self.shape, f"k {self.k}, {self.nodes} nodes")
        text = self.text or f"{self.levels} levels, {size}"
        return f"{text}, {self.variant}" if self.variant else text

    def as_dict(self) -> dict[str, Any]:
        """The tree for summary.json."""
        values = {key: value for key, value in vars(self).items() if value not in (None, "")}
        return values.pop("settings") | values


def tree_shape(row: MethodConfig) -> TreeShape | None:
    """A row's tree, or None for vanilla."""
    if row.options is not None:
        return TreeShape(
            METHODS[row.method].options or "",
            *row.options.sizes,
            settings=as_dict(row.options),
            text=row.options.text,
        )
    tree = row.tree
    if tree is None:
        return None
    published = published_tree(row.method)
    changes: dict[str, Any] = {}
    if tree.stop.rule != published.stop.rule:
        changes["stop"] = tree.stop.rule
    stop_defaults = as_dict(type(tree.stop)())
    for key, value in as_dict(tree.stop).items():
        if value != stop_defaults[key]:
            changes[key] = value
    usual = published if tree.shape == published.shape else type(tree)
    for key in ("rank", "rerank", "children", "choices", "calibrated", "stop_read"):
        value = getattr(tree, key, None)
        if value != getattr(usual, key, None):
            changes[key] = digest(value)[:6] if isinstance(value, tuple) else value
    settings = {"children": "best", **as_dict(tree)}
    for key in ("shape", "levels", "k", "nodes"):
        settings.pop(key, None)
    return TreeShape(tree.shape, tree.levels, tree.k, tree.nodes, settings, variant=_words(changes))


def aligned(
    headings: Sequence[str], rows: Iterable[Sequence[str]], to_the_right: Collection[str] = ()
) -> str:
    """A table for a terminal; to_the_right: the headings of columns with numbers."""
    columns = []
    for heading, *cells in zip(headings, *rows, strict=True):
        width = max(map(len, [heading, *cells]))
        pad = str.rjust if heading in to_the_right else str.ljust
        texts = [heading, "─" * width if heading else "", *cells]
        columns.append([pad(text, width) for text in texts])
    return "\n".join("  ".join(line).rstrip() for line in zip(*columns, strict=True))


def _words(value: Any) -> str:
    """Words such as 'stop entropy, h 0.5'."""
    if isinstance(value, dict):
        return ", ".join(f"{key.replace('_', ' ')} {_words(part)}" for key, part in value.items())
    if isinstance(value, list):
        return "/".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else plainly(value)
