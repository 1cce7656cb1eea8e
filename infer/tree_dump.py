"""One draft tree shown: as indented text, and as JSON with confidences and survivals (EAGLE-2, figure 7)."""

import sys
from pathlib import Path
from typing import Any

from infer.proposer import Cycle
from infer.tree import describe
from model.files import write_json

SCHEMA = 1


class FirstTree:
    """Called after each cycle; prints the first tree that drafted something to stderr, or saves it, or both."""

    def __init__(self, tokenizer: Any, method: str, printed: bool, path: Path | None) -> None:
        """path: where the JSON goes; null: nowhere."""
        self.tokenizer, self.method = tokenizer, method
        self.printed, self.path = printed, path
        self.is_done = False

    def __call__(self, cycle: Cycle) -> None:
        if self.is_done or len(cycle.tree) == 1:
            return
        names = [self.tokenizer.decode([token]) for token in cycle.tree.tokens.tolist()]
        if self.printed:
            print("\n" + describe(cycle.tree, names), file=sys.stderr)
        if self.path is not None:
            write_json(self.path, {"schema": SCHEMA, "method": self.method, **as_json(cycle, names)})
        self.is_done = True


def as_json(cycle: Cycle, names: list[str]) -> dict[str, Any]:
    """The tree in level order with the text of each token, its confidence and survival, and whether it was accepted.

    The root's parent is null. The bonus token is the target's own, below the last accepted node.
    """
    tree, path = cycle.tree, set(cycle.verdict.path)
    columns = zip(
        names,
        tree.tokens.tolist(),
        tree.parents.tolist(),
        tree.depth.tolist(),
        tree.confidence.exp().tolist(),
        tree.survival.exp().tolist(),
        strict=True,
    )
    nodes = [
        {
            "node": node,
            "parent": parent if node else None,
            "depth": depth,
            "token": token,
            "text": text,
            "confidence": confidence,
            "survival": survival,
            "accepted": node in path,
        }
        for node, (text, token, parent, depth, confidence, survival) in enumerate(columns)
    ]
    if tree.passengers is not None:
        for node, rides in zip(nodes, tree.passengers.tolist(), strict=True):
            node["passenger"] = rides
    return {
        "position": cycle.position,
        "levels": tree.levels,
        "accepted": cycle.verdict.accepted,
        "bonus": cycle.verdict.bonus,
        "nodes": nodes,
    }
