"""Records decoding cycles as lines of cycles.jsonl, and as tables for calibration."""

import json
import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, fields
from itertools import accumulate, pairwise
from math import nan
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from aerie.configs.errors import UserError
from aerie.infer.decode.roles import Cycle
from aerie.infer.decode.sampling import entropy
from aerie.infer.decode.tree import Path as TokenPath
from aerie.infer.decode.tree import Tree
from aerie.infer.decode.verify import acceptance
from aerie.infer.measure.bench_files import Key, Origin
from aerie.model.storage import explained, first_line, write_atomically

# One cycle, ready for JSON. Times are in ms, logarithms are natural, None is unknown.
CycleRecord = dict[str, Any]
LawColumns = Callable[[Tree, Sequence[int]], CycleRecord]  # (tree, nodes) -> columns of the nodes
TableRow = tuple[Any, ...]


def judged_nodes(tree: Tree, path: Sequence[int]) -> Tensor:
    """Which nodes [N] the target judged: the children of accepted nodes.

    It judges neither the root nor passengers.
    """
    accepted = torch.tensor(path, device=tree.parents.device)
    is_judged = torch.isin(tree.parents, accepted)  # [N]
    is_judged[0] = False
    return is_judged if tree.passengers is None else is_judged & ~tree.passengers


def node_acceptance(cycle: Cycle) -> Tensor:
    """Each node's chance [N] of acceptance if its parent is accepted, in float64.

    R0: 0 or 1, right for judged nodes only. R1: min(1, p / q). R2: p(x). R3: the chance that the
    target refuses the earlier siblings and accepts this node, given the drawn tokens.
    """
    tree = cycle.tree
    if cycle.rule == "R0":
        outcome = torch.zeros(len(tree), dtype=torch.float64, device=tree.tokens.device)
        outcome[cycle.verdict.path] = 1.0
        return outcome
    p = cycle.sampler.law(cycle.step.logits)  # [N, V]
    if tree.draft_laws is None:
        return p[tree.parents, tree.tokens].double()
    return acceptance(tree, p).double()


class Recorder:
    """An `on_cycle` hook that records one answer, a mapping per cycle.

    - `node`: columns over the nodes, in level order.
    - `level` (DEAGLE, equations 22 to 26): the frontier's S_d, S_d / S_{d-1}, E_d without bonus.
    - `law`: q against p at accepted nodes.
    - `frontier`: the branches before reranking.
    - `stop_reason`: the stop rule, `levels`, `budget` (max_new_tokens) or `guess` (no laws); None
      if nothing was drafted.
    """

    def __init__(self, more_law_columns: LawColumns | None = None) -> None:
        """more_law_columns: makes additional columns of `law`."""
        self.records: list[CycleRecord] = []
        self.more_law_columns = more_law_columns

    def __call__(self, cycle: Cycle) -> None:
        tree = cycle.tree
        frontiers = [] if tree.pool is None else tree.pool.frontiers()
        masses = _level_masses(tree, frontiers)
        law = _law_columns(cycle)
        if law is not None and self.more_law_columns is not None:
            law |= self.more_law_columns(tree, law["node"])
        self.records.append(
            {
                "cycle": len(self.records),
                "pos_start": cycle.position,  # the root's position in prompt and answer
                "t_draft": cycle.draft_ms,
                "t_verify": cycle.verify_ms,
                "verify": cycle.rule,
                "draft_forwards": tree.draft_forwards,
                "drafted": tree.num_drafted,
                "depth": tree.levels,
                "nodes": len(tree),
                "accepted": cycle.verdict.accepted,
                "bonus_id": cycle.verdict.bonus,
                "new_tokens": cycle.new_tokens,  # cut at an end token and at max_new_tokens
                "stop_reason": self._stop_reason(cycle),
                "node": _node_columns(cycle),
                "level": {
                    "survival": masses,
                    "ratio": [
                        new / old if old > 0 else None for old, new in pairwise([1.0, *masses])
                    ],
                    "expected": list(accumulate(masses)),
                },
                "law": law,
                "frontier": _branches(frontiers),
            }
        )

    def _stop_reason(self, cycle: Cycle) -> str | None:
        tree = cycle.tree
        if tree.num_drafted == 0:
            return None
        if tree.pool is None:
            return "guess"
        if tree.pool.stopped_by:
            return tree.pool.stopped_by
        first_root = self.records[0]["pos_start"] if self.records else cycle.position
        answered = cycle.position - first_root + 1
        # one of the remaining tokens is the bonus token's
        room = cycle.sampler.decoding.max_new_tokens - answered - 1
        return "budget" if tree.levels >= room else "levels"


def _level_masses(tree: Tree, frontiers: Sequence[tuple[list[TokenPath], Tensor]]) -> list[float]:
    """S_d of each level: the summed survival of its frontier.

    A tree without a pool has no frontiers, so all nodes of its levels count.
    """
    if tree.pool is not None:
        return [float(survival.exp().sum()) for _, survival in frontiers]
    survival = tree.survival.exp()  # [N]
    if tree.passengers is not None:
        survival = survival * ~tree.passengers
    return [float(survival[tree.depth == d].sum()) for d in range(1, tree.levels + 1)]


def _branches(frontiers: Sequence[tuple[list[TokenPath], Tensor]]) -> list[tuple[TokenPath, float]]:
    """(tokens from the root's child to the node, survival) of every node in the frontiers."""
    branches: list[tuple[TokenPath, float]] = []
    for paths, survival in frontiers:
        branches += zip(paths, survival.exp().tolist(), strict=True)
    return branches


def _node_columns(cycle: Cycle) -> CycleRecord:
    tree = cycle.tree
    p = cycle.sampler.law(cycle.step.logits)  # [N, V]
    is_drafted = torch.arange(len(tree), device=tree.tokens.device) > 0  # [N]
    if tree.passengers is not None:
        is_drafted &= ~tree.passengers
    entropies: dict[int, float] = {}  # node -> entropy of the law of its children
    if tree.pool is not None and (laws := tree.pool.log_laws()):
        stacked = torch.stack(list(laws.values()))  # [M, Vd]
        entropies = dict(zip(laws, entropy(stacked.exp()).tolist(), strict=True))
    parents = tree.parents.tolist()
    path = set(cycle.verdict.path)
    return {
        "token": tree.tokens.tolist(),
        "parent": parents,  # the root is its own parent
        "depth": tree.depth.tolist(),
        "q": _where_known(tree.confidence.double().exp(), is_drafted),
        "survival": _where_known(tree.survival.double().exp(), is_drafted),
        "entropy": [entropies.get(parent) if node else None for node, parent in enumerate(parents)],
        # at temperature 0 p is the plain softmax
        "p": _where_known(p[tree.parents, tree.tokens], is_drafted),
        "acceptance": _where_known(node_acceptance(cycle), judged_nodes(tree, cycle.verdict.path)),
        "accepted": [node in path for node in range(len(tree))],
        "passenger": None if tree.passengers is None else tree.passengers.tolist(),
    }


def _where_known(values: Tensor, is_known: Tensor) -> list[float | None]:
    pairs = zip(values.tolist(), is_known.tolist(), strict=True)
    return [value if known else None for value, known in pairs]


def _law_columns(cycle: Cycle) -> CycleRecord | None:
    """Compares q with p for the children of accepted nodes; y is a node's first judged child.

    Verification compares the same laws: q is after the processors if children are drawn from it,
    else the head's own. At temperature 0 both are plain softmaxes.
    """
    tree = cycle.tree
    if tree.pool is None or tree.levels == 0:
        return None
    # --- the accepted nodes that have judged children ---
    children: dict[int, list[int]] = {}
    parents = tree.parents.tolist()
    for child in judged_nodes(tree, cycle.verdict.path).nonzero()[:, 0].tolist():
        children.setdefault(parents[child], []).append(child)
    nodes = [node for node in cycle.verdict.path if node in children]
    first = [children[node][0] for node in nodes]
    # --- the laws of these children ---
    laws = tree.pool.log_laws()
    raw = torch.stack([laws[node] for node in nodes])  # [M, Vd]
    is_drawn = tree.draft_laws is not None
    log_q = (cycle.sampler.log_law(raw) if is_drawn else raw).double().log_softmax(-1)  # [M, Vd]
    log_p = cycle.sampler.log_law(cycle.step.logits[nodes]).double().log_softmax(-1)  # [M, V]
    ids = tree.pool.ids  # [Vd]
    # q over the target's vocabulary: a token outside the draft vocabulary has probability 0
    log_q_wide = torch.full_like(log_p, float("-inf")).index_copy_(1, ids, log_q)  # [M, V]
    gaps = (log_q_wide.exp() - log_p.exp()).abs()  # [M, V]
    largest_gaps = [
        float(gaps[row, tree.tokens[children[node]]].max()) for row, node in enumerate(nodes)
    ]
    # --- the columns ---
    tokens = tree.tokens[first]  # [M]
    rows = torch.arange(len(nodes), device=tokens.device)
    columns = {
        "depth": tree.depth[first],  # of y
        "token": tokens,
        "q": log_q_wide.exp()[rows, tokens],
        "p": log_p.exp()[rows, tokens],
        "acceptance": node_acceptance(cycle)[first],
        **_compare_laws(log_p, log_q, log_q_wide, ids),
    }
    path = set(cycle.verdict.path)
    return {
        "node": nodes,
        **{name: values.tolist() for name, values in columns.items()},
        "accepted": [child in path for child in first],
        "followed": [not path.isdisjoint(children[node]) for node in nodes],
        "largest_gap": largest_gaps,
    }


def _compare_laws(
    log_p: Tensor, log_q: Tensor, log_q_wide: Tensor, ids: Tensor
) -> dict[str, Tensor]:
    """Columns [M] that compare p [M, V] with q [M, Vd], here also over all ids [M, V]."""
    p = log_p.exp()
    q = log_q.exp()
    return {
        "top_q": q.max(-1).values,  # DEAGLE's c
        "agrees": ids[log_q.argmax(-1)] == log_p.argmax(-1),  # DEAGLE's alpha
        "tvd": 1.0 - torch.minimum(p[:, ids], q).sum(-1).clamp(max=1.0),  # 1 - tvd is SVIP's beta
        # infinite if the draft vocabulary lacks a token that p allows, or a processor removed a
        # token that q allows
        "kl_pq": torch.where(p > 0, p * (log_p - log_q_wide), 0.0).sum(-1).clamp(min=0.0),
        "kl_qp": torch.where(q > 0, q * (log_q - log_p[:, ids]), 0.0).sum(-1).clamp(min=0.0),
        "entropy": entropy(q),
    }


def lines_of(origin: Origin, records: Sequence[CycleRecord]) -> list[str]:
    """The lines for cycles.jsonl, without frontiers.

    Numbers have 7 digits; null stands for a number that is not finite.
    """
    lines = []
    for record in records:
        line = {**asdict(origin), **record}
        del line["frontier"]
        rounded = json.loads(
            json.dumps(line),
            parse_float=lambda digits: float(f"{float(digits):.7g}"),
            parse_constant=lambda _: None,
        )
        lines.append(json.dumps(rounded) + "\n")
    return lines


def append_lines(path: Path, lines: Sequence[str]) -> None:
    with explained(path), path.open("a", encoding="utf-8") as file:
        file.write("".join(lines))
        file.flush()
        os.fsync(file.fileno())


def keep_answers(path: Path, answers: Collection[Key]) -> None:
    """Keeps only the lines of these answers in cycles.jsonl, and drops a line that a kill cut."""

    def write(temporary: Path) -> None:
        with path.open("rb") as old, temporary.open("wb") as new:
            for text in old:
                if not text.endswith(b"\n"):
                    continue
                line = json.loads(text)
                if Origin(*(line[part.name] for part in fields(Origin))).key in answers:
                    new.write(text)

    try:
        if path.is_file():
            write_atomically(path, write)
    except (ValueError, LookupError, TypeError) as error:
        raise UserError(
            f"{path}: a line is damaged ({first_line(error)}); "
            "add --overwrite to measure everything again"
        ) from error


Tables = dict[str, pd.DataFrame]
# NaN, unless `aerie calibrate` measures an EAGLE head
FEATURE_COLUMNS = ("feature_error", "feature_norm", "kl_bound")
LAW_COLUMNS = (
    "node", "depth", "token", "q", "p", "acceptance", "top_q", "agrees", "tvd", "kl_pq", "kl_qp",
    "entropy", "accepted", "followed", "largest_gap", *FEATURE_COLUMNS,
)  # fmt: skip
COLUMNS = {  # the tables' columns after `prompt` and `cycle`, which tell a row's origin
    "cycles": ("position", "answered", "levels", "accepted", "rule"),
    "nodes": ("depth", "place", "confidence", "survival", "acceptance"),  # of judged nodes
    "laws": LAW_COLUMNS,
    "frontier": ("depth", "survival", "accepted"),  # of branches
}


def tables_of(prompt: int, records: Sequence[CycleRecord], text: list[int]) -> Tables:
    """The cycles of one answer as tables. text: the token ids of prompt and answer."""
    rows: dict[str, list[TableRow]] = {name: [] for name in COLUMNS}
    for number, record in enumerate(records):
        position = record["pos_start"]
        answered = position - records[0]["pos_start"] + 1
        parts = {
            "cycles": [(position, answered, record["depth"], record["accepted"], record["verify"])],
            "nodes": _node_rows(record["node"]),
            "laws": _law_rows(record["law"]),
            "frontier": _frontier_rows(record, tuple(text[position + 1 :])),
        }
        for name, part in parts.items():
            rows[name] += [(prompt, number, *row) for row in part]
    return {
        name: pd.DataFrame(rows[name], columns=["prompt", "cycle", *columns])
        for name, columns in COLUMNS.items()
    }


def _node_rows(node: CycleRecord) -> list[TableRow]:
    ranks = sibling_ranks(node["parent"])
    columns = (node["depth"], ranks, node["q"], node["survival"], node["acceptance"])
    return [row for row in zip(*columns, strict=True) if row[-1] is not None]


def _law_rows(law: CycleRecord | None) -> list[TableRow]:
    if law is None:
        return []
    columns = [law.get(name, [nan] * len(law["node"])) for name in LAW_COLUMNS]
    return list(zip(*columns, strict=True))


def _frontier_rows(record: CycleRecord, written: TokenPath) -> list[TableRow]:
    """A row for each branch that ends within the text. written: the text after the tree's root.

    Under R0 and R2 the target draws the text itself, so a branch in the text is accepted. Under R1
    and R3, with drawn children, a branch in the tree's accepted path is.
    """
    accepted = written
    if record["verify"] not in ("R0", "R2"):
        node = record["node"]
        pairs = zip(node["token"], node["accepted"], strict=True)
        accepted = tuple(token for token, is_accepted in pairs if is_accepted)[1:]
    rows = []
    for branch, survival in record["frontier"]:
        depth = len(branch)
        if depth <= len(written):
            rows.append((depth, survival, branch == accepted[:depth]))
    return rows


def sibling_ranks(parents: Sequence[int]) -> list[str]:
    """For each node [N], the ranks among siblings on the path from the root.

    The root has "", its first child "0", and that child's second child "0.1".
    """
    ranks = [""]
    counts = [0] * len(parents)
    for parent in parents[1:]:
        ranks.append(f"{ranks[parent]}.{counts[parent]}".removeprefix("."))
        counts[parent] += 1
    return ranks
