"""Decoding cycles as records: lines of cycles.jsonl, tables for calibration, and oracle draft lengths."""

import json
import os
from collections.abc import Collection, Sequence
from dataclasses import asdict, fields, replace
from itertools import accumulate, pairwise
from math import nan
from pathlib import Path
from typing import Any, cast

import pandas as pd
import torch
from torch import Tensor

from aerie.configs.errors import UserError
from aerie.configs.schema.decode import ConstantConfig, StaticConfig, TreeConfig
from aerie.infer.decode.engine import SpeculativeDecoder
from aerie.infer.decode.sampling import Sampler, entropy
from aerie.infer.decode.shape import Cycle, Drafting, make_shape
from aerie.infer.decode.tree import Pool, Tree
from aerie.infer.decode.verify import acceptance as acceptance_of_drawn
from aerie.infer.measure.bench_files import Key, Origin
from aerie.model.kv_cache import KeptRows
from aerie.model.storage import explained, first_line, write_atomically

Record = dict[str, Any]


def asked(tree: Tree, path: list[int]) -> Tensor:
    """Which nodes [N] the target judged: those below an accepted node. Not the root, nor passengers."""
    on_path = torch.zeros(len(tree), dtype=torch.bool, device=tree.tokens.device)
    on_path[path] = True
    below = on_path[tree.parents]
    below[0] = False
    return below if tree.passengers is None else below & ~tree.passengers


def acceptance(cycle: Cycle) -> Tensor:
    """Per node [N], float64, given its parent's acceptance: 0 or 1 (R0; of `asked` nodes only), else a chance.

    R2: p(x). R1: min(1, p / q). R3: that earlier siblings are refused and it is accepted, given the drawn tokens.
    """
    tree = cycle.tree
    if cycle.rule == "R0":
        outcome = torch.zeros(len(tree), dtype=torch.float64, device=tree.tokens.device)
        outcome[cycle.verdict.path] = 1.0
        return outcome
    p = cycle.sampler.law(cycle.step.logits)  # [N, V]
    chances = (
        p[tree.parents, tree.tokens] if tree.proposal is None else acceptance_of_drawn(tree, p)
    )
    return chances.double()


class States:
    """Keeps the last inputs of both LM heads: DEAGLE's features f and drafted f (equations 2 to 4)."""

    def __init__(self, decoder: SpeculativeDecoder) -> None:
        drafter, target = cast(Drafting, decoder.proposer).drafter, decoder.target
        self.true, self.drafted = (
            torch.empty(0),
            list[Tensor](),
        )  # [N, D] of the tree's nodes; [rows, D] by level
        drafter_logits, target_logits = vars(drafter)["_logits"], target.logits

        def of_draft(hidden: Tensor) -> Tensor:
            self.drafted.append(hidden)
            return cast(Tensor, drafter_logits(hidden))

        def of_target(last_hidden: Tensor, *rows: Any) -> Tensor:
            self.true = last_hidden
            return target_logits(last_hidden, *rows)

        vars(drafter)["_logits"], vars(target)["logits"] = of_draft, of_target
        lm_head = (
            target.vocab.lm_head.float()
        )  # [V, D]; its spectral norm without its singular vectors
        self.norm = (
            float(torch.linalg.eigvalsh(lm_head.T @ lm_head)[-1].sqrt()) * target.vocab.scale
        )

    def errors(self, tree: Tree, nodes: Sequence[int]) -> Record:
        """Columns of `law` at these nodes: ||f - drafted f||, ||f||, and half of (||W|| ||f - drafted f||)^2."""
        pool = cast(Pool, tree.pool)
        numbers = torch.cat([level.parents for level in pool.levels])  # of the expanded candidates
        drafted = torch.cat(
            self.drafted[-len(pool.levels) :]
        )  # an oracle's longer tree stands before
        rows = [int((numbers == pool.kept[node]).nonzero()[0]) for node in nodes]
        self.drafted.clear()
        error = (self.true[nodes] - drafted[rows]).double().norm(dim=-1)
        columns = {"feature_error": error, "feature_norm": self.true[nodes].double().norm(dim=-1)}
        columns["kl_bound"] = (self.norm * error) ** 2 / 2
        return {name: values.tolist() for name, values in columns.items()}


class Recorder:
    """An `on_cycle` hook that records one answer, a mapping per cycle; times in ms, natural logarithms, None: unknown.

    `node`: columns over the nodes in level order. `level` (DEAGLE, equations 22 to 26): S_d of the frontier, S_d /
    S_{d-1}, E_d without the bonus token. `law`: q against p at accepted nodes. `frontier`: branches before reranking.
    `stop_reason`: the stop rule, `levels`, `budget` (max_new_tokens), `guess` (no laws); None: nothing drafted.
    """

    def __init__(self, states: States | None = None) -> None:
        self.records: list[Record] = []
        self.states = states

    def __call__(self, cycle: Cycle) -> None:
        tree, pool, verdict = cycle.tree, cycle.tree.pool, cycle.verdict
        frontiers, reason = [], "guess" if tree.num_drafted else None
        if pool is not None:
            frontiers = pool.frontiers()[: tree.levels]
            masses = [float(survival.exp().sum()) for _, survival in frontiers]
            answered = (
                cycle.position
                - (self.records[0]["pos_start"] if self.records else cycle.position)
                + 1
            )
            room = (
                cycle.sampler.decoding.max_new_tokens - answered - 1
            )  # the bonus token takes one place
            if tree.num_drafted:
                reason = pool.stopped_by or ("budget" if tree.levels >= room else "levels")
        else:
            survival = tree.survival.exp() * (1 if tree.passengers is None else ~tree.passengers)
            masses = [
                float(survival[tree.depth == depth].sum()) for depth in range(1, tree.levels + 1)
            ]
        branches = [
            pair
            for names, survival in frontiers
            for pair in zip(names, survival.exp().tolist(), strict=True)
        ]
        record = {
            "cycle": len(self.records),
            "pos_start": cycle.position,  # of the root, in prompt and answer
            "t_draft": cycle.draft_ms,
            "t_verify": cycle.verify_ms,
            "verify": cycle.rule,
            "draft_forwards": tree.draft_forwards,
            "drafted": tree.num_drafted,
            "depth": tree.levels,
            "nodes": len(tree),
            "accepted": verdict.accepted,
            "bonus_id": verdict.bonus,
            "new_tokens": cycle.new_tokens,  # up to the end token and max_new_tokens
            "stop_reason": reason,
            "node": _node_columns(cycle),
            "level": {
                "survival": masses,
                "ratio": [new / old if old > 0 else None for old, new in pairwise([1.0, *masses])],
                "expected": list(accumulate(masses)),
            },
            "law": _law_columns(cycle, self.states),
            "frontier": branches,
        }
        self.records.append(record)


def _node_columns(cycle: Cycle) -> Record:
    tree, path = cycle.tree, set(cycle.verdict.path)
    p = cycle.sampler.law(cycle.step.logits)  # [N, V]
    drafted = torch.arange(len(tree), device=tree.tokens.device) > 0
    if tree.passengers is not None:
        drafted &= ~tree.passengers
    laws = {} if tree.pool is None else tree.pool.log_laws()
    entropies = (
        dict(zip(laws, entropy(torch.stack(list(laws.values())).exp()).tolist(), strict=True))
        if laws
        else {}
    )
    parents = tree.parents.tolist()

    def column(values: Tensor, known: Tensor) -> list[float | None]:
        return [
            value if is_known else None
            for value, is_known in zip(values.tolist(), known.tolist(), strict=True)
        ]

    return {
        "token": tree.tokens.tolist(),
        "parent": parents,  # the root is its own
        "depth": tree.depth.tolist(),
        "q": column(tree.confidence.double().exp(), drafted),
        "survival": column(tree.survival.double().exp(), drafted),
        "entropy": [entropies.get(parent) if node else None for node, parent in enumerate(parents)],
        "p": column(p[tree.parents, tree.tokens], drafted),  # at temperature 0 of the plain softmax
        "acceptance": column(acceptance(cycle), asked(tree, cycle.verdict.path)),
        "accepted": [node in path for node in range(len(tree))],
        "passenger": None if tree.passengers is None else tree.passengers.tolist(),
    }


def _law_columns(cycle: Cycle, states: States | None) -> Record | None:
    """The laws q of the children of accepted nodes, y the first child; p and q are what verification compares.

    q is after the processors if children are drawn from it, else the head's own. Temperature 0: plain softmaxes.
    """
    tree, path = cycle.tree, cycle.verdict.path
    if tree.pool is None or tree.levels == 0:
        return None
    parents, below = tree.parents.tolist(), asked(tree, path).nonzero()[:, 0].tolist()
    children = {node: [child for child in below if parents[child] == node] for node in path}
    nodes = [node for node in path if children[node]]
    laws, ids = tree.pool.log_laws(), tree.pool.ids
    raw = torch.stack([laws[node] for node in nodes])  # [M, Vd]
    log_q = (raw if tree.proposal is None else cycle.sampler.log_law(raw)).double().log_softmax(-1)
    log_p = cycle.sampler.log_law(cycle.step.logits[nodes]).double().log_softmax(-1)  # [M, V]
    q, p = log_q.exp(), log_p.exp()
    log_q_wide = torch.full_like(log_p, float("-inf")).index_copy_(1, ids, log_q)  # [M, V]
    gaps = (log_q_wide.exp() - p).abs()
    width = log_q.shape[-1]
    ranks = [2**power - 1 for power in range(width.bit_length()) if 2**power <= width]
    first = [children[node][0] for node in nodes]
    tokens, rows = tree.tokens[first], torch.arange(len(nodes), device=p.device)
    columns = {
        "depth": tree.depth[first],  # of y
        "token": tokens,
        "q": log_q_wide.exp()[rows, tokens],
        "p": p[rows, tokens],
        "acceptance": acceptance(cycle)[first],
        "top_q": q.max(-1).values,  # DEAGLE's c
        "agrees": ids[log_q.argmax(-1)] == log_p.argmax(-1),  # DEAGLE's alpha
        "tvd": 1.0 - torch.minimum(p[:, ids], q).sum(-1).clamp(max=1.0),  # 1 - tvd is alpha
        # infinite where the draft's vocabulary lacks a token that p allows, or a processor removed one that q allows
        "kl_pq": torch.where(p > 0, p * (log_p - log_q_wide), 0.0).sum(-1).clamp(min=0.0),
        "kl_qp": torch.where(q > 0, q * (log_q - log_p[:, ids]), 0.0).sum(-1).clamp(min=0.0),
        "entropy": entropy(q),
        "ranked": log_q.sort(-1, descending=True).values[:, ranks],
    }
    return {
        "node": nodes,
        **{name: values.tolist() for name, values in columns.items()},
        "accepted": [child in path for child in first],
        "followed": [any(child in path for child in children[node]) for node in nodes],
        "largest_gap": [
            float(gaps[row, tree.tokens[children[node]]].max()) for row, node in enumerate(nodes)
        ],
        **({} if states is None else states.errors(tree, nodes)),
    }


def lines_of(origin: Origin, records: Sequence[Record]) -> list[str]:
    """The lines of cycles.jsonl, without frontiers; numbers have 7 digits, and are null where they are not finite."""
    shown = [
        {name: value for name, value in record.items() if name != "frontier"} for record in records
    ]
    text = json.dumps([{**asdict(origin), **record} for record in shown])
    lines = json.loads(
        text,
        parse_float=lambda digits: float(f"{float(digits):.7g}"),
        parse_constant=lambda _: None,
    )
    return [json.dumps(line) + "\n" for line in lines]


def append_lines(path: Path, lines: Sequence[str]) -> None:
    with explained(path), path.open("a", encoding="utf-8") as file:
        file.write("".join(lines))
        file.flush()
        os.fsync(file.fileno())


def keep_answers(path: Path, answers: Collection[Key]) -> None:
    """Drops from cycles.jsonl a line that a kill cut off, and the lines of other answers."""

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
            f"{path}: a line is damaged ({first_line(error)}); add --overwrite"
        ) from error


def places(parents: Sequence[int]) -> list[str]:
    """Ranks among siblings from the root down ("0", "0.1", ...) of each node [N]; the root's is empty."""
    names, siblings = [""], [0] * len(parents)
    for parent in parents[1:]:
        names.append(f"{names[parent]}.{siblings[parent]}".removeprefix("."))
        siblings[parent] += 1
    return names


Tables = dict[str, pd.DataFrame]
FEATURES = (
    "feature_error",
    "feature_norm",
    "kl_bound",
)  # nan, except for EAGLE heads in `aerie calibrate`
LAWS = ("node", "depth", "token", "q", "p", "acceptance", "top_q", "agrees", "tvd", "kl_pq", "kl_qp", "entropy",
        "ranked", "accepted", "followed", "largest_gap", *FEATURES)  # fmt: skip
COLUMNS = {  # of the tables, after `prompt` and `cycle`, which identify a row
    "cycles": ("position", "answered", "levels", "accepted", "rule"),
    "nodes": ("depth", "place", "confidence", "survival", "acceptance"),  # of asked nodes
    "laws": LAWS,
    "frontier": ("depth", "survival", "accepted"),  # of branches
}


def tables_of(prompt: int, records: Sequence[Record], text: list[int]) -> Tables:
    """The cycles of one answer as tables; text has the token ids of prompt and answer.

    A frontier's branch is accepted where the target wrote it (R0, R2: the text is the target's own draw), or where the
    tree's path has it (children drawn: R1, R3). Branches beyond the text's end are left out.
    """
    rows: dict[str, list[tuple[Any, ...]]] = {name: [] for name in COLUMNS}
    for number, record in enumerate(records):
        position, node, law = record["pos_start"], record["node"], record["law"]
        answered = position - records[0]["pos_start"] + 1
        nodes = zip(
            node["depth"],
            places(node["parent"]),
            node["q"],
            node["survival"],
            node["acceptance"],
            strict=True,
        )
        written = tuple(text[position + 1 :])
        branches = [
            (branch, survival)
            for branch, survival in record["frontier"]
            if len(branch) <= len(written)
        ]
        if record["verify"] not in ("R0", "R2"):
            on_path = zip(node["token"], node["accepted"], strict=True)
            written = tuple(token for token, is_accepted in on_path if is_accepted)[1:]
        parts: dict[str, list[tuple[Any, ...]]] = {
            "cycles": [(position, answered, record["depth"], record["accepted"], record["verify"])],
            "nodes": [row for row in nodes if row[-1] is not None],
            "laws": list(zip(*(law.get(n) or [nan] * len(law["node"]) for n in LAWS), strict=True))
            if law
            else [],
            "frontier": [
                (len(branch), survival, branch == written[: len(branch)])
                for branch, survival in branches
            ],
        }
        for name, part in parts.items():
            rows[name] += [(prompt, number, *row) for row in part]
    return {
        name: pd.DataFrame(rows[name], columns=["prompt", "cycle", *COLUMNS[name]]) for name in rows
    }


class Oracle(Drafting):
    """A proposer that also drafts to a cap, without the stop rule, and has the target judge it (SVIP, section 2.1).

    The generator is set back, so that decoding does not change, and a sampled chain is a prefix of the longer one.
    """

    def __init__(
        self, decoder: SpeculativeDecoder, tree: TreeConfig, levels: int, seed: int = 0
    ) -> None:
        own = decoder.proposer
        assert isinstance(own, Drafting)
        super().__init__(own.drafter, own.shape)
        self.keep = own.keep
        levels = min(levels, own.drafter.max_levels)
        deep = tree if isinstance(tree, StaticConfig) else replace(tree, levels=levels)
        self.longer = make_shape(replace(deep, stop=ConstantConfig()))
        self.max_nodes = max(own.max_nodes, self.longer.max_nodes)
        self.draft_slots = max(own.draft_slots, self.longer.draft_slots)
        self.levels = max(own.levels, self.longer.levels)
        self.lm, self.generator = (
            decoder.lm,
            torch.Generator(decoder.target.device).manual_seed(seed),
        )
        self.lengths: list[
            tuple[int | None, int | None]
        ] = []  # oracle length and cap of each cycle
        decoder.proposer = self

    def reset(self, prompt: Tensor, kept: KeptRows, sampler: Sampler) -> None:
        super().reset(prompt, kept, sampler)
        self.is_fixed = False

    def propose(self, root: Tensor, max_levels: int) -> Tree:
        state = self._sampler.generator.get_state()
        self.tree = self.longer.grow(self.drafter, root, max_levels, self._sampler)
        tree = self.tree
        # [N, V]; the cycle's own forward writes over these rows
        logits = self.lm.extend(tree.tokens, tree.depth, tree.mask).logits
        self.logits = self._sampler.with_text(logits, tree)
        self._sampler.generator.set_state(state)
        return super().propose(root, max_levels)

    def learn(self, new: list[int], cycle: Cycle | None) -> None:
        super().learn(new, cycle)
        if cycle is not None:
            is_judged = cycle.tree.levels > 0 and cycle.rule in ("R0", "R1", "R2")
            length = (
                oracle_length(cycle, self.tree, self.logits, self.generator) if is_judged else None
            )
            self.lengths.append((length, self.tree.levels if is_judged else None))


def oracle_length(cycle: Cycle, tree: Tree, logits: Tensor, generator: torch.Generator) -> int:
    """How many tokens of a deeper tree, with its logits [N, V], the target would accept, given what it did accept.

    R1: a refusal stands, and only tokens beyond a wholly accepted chain are judged. R0, R2: the target's choices
    stand, and it makes new ones beyond them. Never fewer than the cycle accepted.
    """
    accepted, start = cycle.verdict.accepted, len(cycle.tree)
    if cycle.rule == "R1":
        is_same = torch.equal(tree.tokens[:start], cycle.tree.tokens)
        if accepted < cycle.tree.num_drafted or not is_same or tree.proposal is None:
            return accepted  # another chain: the device's arithmetic does not repeat
        p = cycle.sampler.law(logits)  # [N, V]
        q = tree.proposal.over(p.shape[-1])  # [N, V]
        for node in range(start, len(tree)):
            drafted, uniform = (
                tree.tokens[node],
                torch.rand((), generator=generator, device=p.device),
            )
            if not bool(uniform * q[node - 1, drafted] < p[node - 1, drafted]):
                return node - 1
        return len(tree) - 1
    known = [*cycle.verdict.tokens, cycle.verdict.bonus]
    pairs = zip(tree.parents.tolist(), tree.tokens.tolist(), strict=True)
    children = {(parent, token): node for node, (parent, token) in enumerate(pairs) if node}
    node = depth = 0
    while True:
        if depth < len(known):
            token = known[depth]
        elif cycle.rule == "R0":
            token = int(cycle.sampler.choose(logits[node : node + 1]))
        else:
            token = int(
                cycle.sampler.law(logits[node : node + 1]).multinomial(1, generator=generator)
            )
        if (node, token) not in children:
            return max(accepted, depth)
        node, depth = children[node, token], depth + 1
