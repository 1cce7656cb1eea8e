"""What SVIP's and DEAGLE's figures need of a calibration's cycles.

These are oracle lengths, bounds, entropies, frontiers and feature errors. SVIP is arXiv 2411.18462.
q is the draft's law, p the target's; divergences are in nats.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple, cast

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from aerie.configs.schema.decode import ConstantConfig, StaticConfig, TreeConfig
from aerie.infer.decode.drafters import EagleDrafter
from aerie.infer.decode.engine import SpeculativeDecoder
from aerie.infer.decode.roles import Cycle, Traits, TreeProposer
from aerie.infer.decode.sampling import Decoding
from aerie.infer.decode.shape import make_shape
from aerie.infer.decode.tree import Pool, Tree, expanded_numbers
from aerie.infer.measure.calibrate import Observer, mean_of, reliability
from aerie.infer.measure.recorder import CycleRecord, Tables

PAPER_C = 0.18  # of SVIP's figure 4
POINTS = 80  # of the curves of figure 4
# tokens before a draft: edges of the buckets
CONTEXTS = (32, 64, 128, 256, 512, 1024, 2048, 4096, 6144, 8192)


class PaperObserver(Observer):
    """Adds the papers' columns and analyses to a calibration."""

    def __init__(self, oracle_levels: int | None) -> None:
        """oracle_levels: also draft this deep in each cycle; None: no oracle lengths."""
        self.oracle_levels = oracle_levels
        self.oracle: Oracle | None = None
        self.features: Features | None = None

    def attach(self, decoder: SpeculativeDecoder, tree: TreeConfig, seed: int) -> None:
        drafter = cast(TreeProposer, decoder.proposer).drafter
        if self.oracle_levels is not None:
            self.oracle = Oracle(decoder, tree, self.oracle_levels, seed)
            decoder.eager.proposer = self.oracle
        if isinstance(drafter, EagleDrafter):
            self.features = Features(decoder, drafter)

    def law_columns(self, tree: Tree, nodes: Sequence[int]) -> CycleRecord:
        return {} if self.features is None else self.features.errors(tree, nodes)

    def complete(self, tables: Tables) -> None:
        if self.oracle is not None:
            lengths = np.array(self.oracle.lengths, dtype=np.float64).reshape(-1, 2)
            tables["cycles"][["oracle", "cap"]] = lengths

    def analyse(self, tables: Tables, tasks: Sequence[str], bins: int) -> dict[str, Any]:
        analyses = super().analyse(tables, tasks, bins)
        frontier = tables["frontier"]
        if len(frontier):
            outcomes = {"confidence": frontier.survival, "acceptance": frontier.accepted}
            analyses["branches"] = reliability(pd.DataFrame(outcomes).astype(float), bins)
            analyses["levels"] = {"by_depth": level_table(frontier, tables["cycles"])}
        if len(tables["laws"]):
            analyses["laws"] = {
                "bounds": acceptance_bounds(tables["laws"], PAPER_C),
                "entropy": entropy_table(tables["laws"], tasks),
                **rejections(tables["laws"]),
            }
        if "oracle" in tables["cycles"]:
            analyses["oracle"] = oracle_summary(tables["cycles"])
        return analyses


# --- what is recorded: features, and oracle draft lengths ---


class Features:
    """Watches what both LM heads read: DEAGLE's features f and drafted f (equations 2 to 4)."""

    def __init__(self, decoder: SpeculativeDecoder, drafter: EagleDrafter) -> None:
        target = decoder.target
        self.true = torch.empty(0)  # [N, D] of the tree's nodes
        self.drafted: list[Tensor] = []  # [rows, D] by level
        drafter_logits = vars(drafter)["_logits"]
        target_logits = target.logits

        def draft_logits_watched(hidden: Tensor) -> Tensor:
            self.drafted.append(hidden)
            return cast(Tensor, drafter_logits(hidden))

        def target_logits_watched(last_hidden: Tensor, *rows: Any) -> Tensor:
            self.true = last_hidden
            return target_logits(last_hidden, *rows)

        vars(drafter)["_logits"] = draft_logits_watched
        vars(target)["logits"] = target_logits_watched
        lm_head = target.vocab.lm_head.float()  # [V, D]
        # its spectral norm, without its singular vectors
        norm = float(torch.linalg.eigvalsh(lm_head.T @ lm_head)[-1].sqrt())
        self.lm_head_norm = norm * target.vocab.scale

    def errors(self, tree: Tree, nodes: Sequence[int]) -> CycleRecord:
        """At these nodes: ||f - drafted f||, ||f||, and half of (||W|| ||f - drafted f||)^2."""
        pool = cast(Pool, tree.pool)
        expanded = expanded_numbers(pool.levels)
        # an oracle's longer tree stands before this tree
        drafted = torch.cat(self.drafted[-len(pool.levels) :])  # [expanded, D]
        self.drafted.clear()
        rows = [int((expanded == pool.kept[node]).nonzero()[0]) for node in nodes]
        error = (self.true[nodes] - drafted[rows]).double().norm(dim=-1)
        return {
            "feature_error": error.tolist(),
            "feature_norm": self.true[nodes].double().norm(dim=-1).tolist(),
            "kl_bound": ((self.lm_head_norm * error) ** 2 / 2).tolist(),
        }


class OracleLength(NamedTuple):
    """Of one cycle; None: nothing was drafted, or no oracle is defined for the rule."""

    length: int | None
    cap: int | None  # the longest that the oracle could have found


class Oracle(TreeProposer):
    """A proposer that in each cycle also drafts to a cap, for the target to judge (SVIP, 2.1).

    The longer draft has no stop rule. The generator is set back after it, so decoding does not
    change, and a sampled chain is a prefix of the longer one.
    """

    def __init__(
        self, decoder: SpeculativeDecoder, tree: TreeConfig, levels: int, seed: int
    ) -> None:
        proposer = cast(TreeProposer, decoder.proposer)
        super().__init__(proposer.drafter, proposer.shape)
        if not isinstance(tree, StaticConfig):
            tree = replace(tree, levels=min(levels, proposer.drafter.max_levels))
        self.longer = make_shape(replace(tree, stop=ConstantConfig()))
        # the decoder makes room for the larger of both trees
        self.max_nodes = max(proposer.max_nodes, self.longer.max_nodes)
        self.draft_slots = max(proposer.draft_slots, self.longer.draft_slots)
        self.levels = max(proposer.shape.levels, self.longer.levels)
        self.lm = decoder.lm
        self.generator = torch.Generator(decoder.target.device).manual_seed(seed)
        self.lengths: list[OracleLength] = []

    def traits(self, decoding: Decoding) -> Traits:
        return super().traits(decoding)._replace(reads="anything")

    def propose(self, root: Tensor, max_levels: int) -> Tree:
        state = self._sampler.generator.get_state()
        self.tree = self.longer.grow(self.drafter, root, max_levels, self._sampler)
        # the cycle's own forward writes over the cache rows of this one
        logits = self.lm.extend(self.tree.tokens, self.tree.depth, self.tree.mask).logits  # [N, V]
        self.logits = self._sampler.with_text(logits, self.tree)
        self._sampler.generator.set_state(state)
        return super().propose(root, max_levels)

    def learn(self, new: list[int], cycle: Cycle | None) -> None:
        super().learn(new, cycle)
        if cycle is None:
            return
        if cycle.tree.levels > 0 and cycle.rule in ("R0", "R1", "R2"):
            length = oracle_length(cycle, self.tree, self.logits, self.generator)
            self.lengths.append(OracleLength(length, self.tree.levels))
        else:
            self.lengths.append(OracleLength(None, None))


def oracle_length(cycle: Cycle, tree: Tree, logits: Tensor, generator: torch.Generator) -> int:
    """How many tokens of a deeper tree the target would accept, given what it did accept.

    logits [N, V] are the target's after the deeper tree's nodes. R1: a refusal stands, and only
    tokens beyond a wholly accepted chain are judged. R0, R2: the target's choices stand, and it
    makes new ones beyond them. The length is never below what the cycle accepted.
    """
    if cycle.rule == "R1":
        return _oracle_of_drawn_chain(cycle, tree, logits, generator)
    choices = [*cycle.verdict.tokens, cycle.verdict.bonus]
    children: dict[tuple[int, int], int] = {}  # by parent and token
    for node, parent in enumerate(tree.parents.tolist()[1:], start=1):
        children[parent, int(tree.tokens[node])] = node
    node = depth = 0
    while True:
        if depth < len(choices):
            token = choices[depth]
        elif cycle.rule == "R0":
            token = int(cycle.sampler.choose(logits[node : node + 1]))
        else:
            p = cycle.sampler.law(logits[node : node + 1])  # [1, V]
            token = int(p.multinomial(1, generator=generator))
        if (node, token) not in children:
            return max(cycle.verdict.accepted, depth)
        node = children[node, token]
        depth += 1


def _oracle_of_drawn_chain(
    cycle: Cycle, tree: Tree, logits: Tensor, generator: torch.Generator
) -> int:
    start = len(cycle.tree)
    is_refused = cycle.verdict.accepted < cycle.tree.num_drafted
    # the device's arithmetic may not repeat: then this is another chain
    is_same_chain = torch.equal(tree.tokens[:start], cycle.tree.tokens)
    if is_refused or not is_same_chain or tree.draft_laws is None:
        return cycle.verdict.accepted
    p = cycle.sampler.law(logits)  # [N, V]
    q = tree.draft_laws.over(p.shape[-1])  # [N, V]
    for node in range(start, len(tree)):
        token = tree.tokens[node]
        uniform = torch.rand((), generator=generator, device=p.device)
        # accepted with probability min(1, p / q), the laws after the node's parent
        if not bool(uniform * q[node - 1, token] < p[node - 1, token]):
            return node - 1
    return len(tree) - 1


# --- what is made of it ---


def level_table(frontier: pd.DataFrame, cycles: pd.DataFrame) -> list[dict[str, Any]]:
    """DEAGLE's equations 22 to 24 by depth d, of the cycles that drafted it.

    `mass` is S_d and `expected` is E_d. `held`: the target wrote a branch of the frontier;
    `reached`: d tokens of the verified tree were accepted.
    """
    cycle = ["prompt", "cycle"]
    levels = frontier.groupby([*cycle, "depth"]).agg(
        mass=("survival", "sum"), held=("accepted", "any")
    )
    levels = levels.reset_index().merge(cycles[[*cycle, "accepted"]], on=cycle)
    levels["mass"] = levels.mass.clip(upper=1.0)
    levels["reached"] = levels.accepted >= levels.depth
    means: dict[str, Any] = {name: (name, "mean") for name in ("mass", "held", "reached")}
    table = levels.groupby("depth").agg(cycles=("mass", "size"), **means).reset_index()
    table["expected"] = table.mass.cumsum()
    return list(table.to_dict("records"))


def acceptance_bounds(laws: pd.DataFrame, c: float) -> dict[str, Any]:
    """SVIP's figure 4: beta = 1 - TV and three lower bounds (cut at -1), in the order of beta."""
    beta = 1.0 - laws.tvd.to_numpy()
    kl = laws.kl_qp.to_numpy()
    bounds = {
        "oracle": 1.0 - np.sqrt(kl / 2.0),
        "approximation": 1.0 - np.sqrt(c * laws.entropy.to_numpy()),
        "bretagnolle_huber": 1.0 - np.sqrt(-np.expm1(-kl)),
    }
    curves = {"acceptance": beta}
    curves |= {name: values.clip(min=-1.0) for name, values in bounds.items()}
    parts = np.array_split(np.argsort(beta, kind="stable"), min(POINTS, len(beta)))
    means = {}
    for name, values in curves.items():
        means[name] = [mean_of(values[part]) for part in parts]
    return {"c": c, "curve": means}


def entropy_table(laws: pd.DataFrame, tasks: Sequence[str]) -> list[dict[str, Any]]:
    """SVIP's table 1: q's mean entropy at accepted and at rejected tokens.

    tasks: of each prompt.
    """
    names = list(dict.fromkeys(tasks))
    task_of_row = laws.prompt.map(dict(enumerate(tasks)))
    parts = {"all": laws}
    if len(names) > 1:
        parts |= {name: laws[task_of_row == name] for name in names}
    rows = []
    for name, part in parts.items():
        accepted = mean_of(part.entropy[part.accepted])
        rejected = mean_of(part.entropy[~part.accepted])
        rows.append({"task": name, "laws": len(part), "accepted": accepted, "rejected": rejected})
    return rows


def rejections(laws: pd.DataFrame, most: int = 4) -> dict[str, Any]:
    """SVIP's figure 3.

    (a): mean KL(q||p) before a rejected token and at it (offset 0). (b): mean log q by rank.
    """
    kl = laws.set_index(["prompt", "cycle", "depth"]).kl_qp
    rejected = laws[~laws.followed]
    before = []
    for offset in range(-most, 1):
        # no law stands there where the cycle begins after it
        keys = [rejected.prompt, rejected.cycle, rejected.depth + offset]
        values = kl.reindex(pd.MultiIndex.from_arrays(keys))
        before.append({"offset": offset, "kl": mean_of(values[np.isfinite(values)])})
    ranked = np.stack(laws.ranked.to_list())  # [laws, ranks]
    curves: dict[str, Any] = {"ranks": [2**power for power in range(ranked.shape[1])]}
    for name, rows in (("accepted", laws.accepted), ("rejected", ~laws.accepted)):
        columns = ranked[np.asarray(rows)].T
        # null where a processor removed a token of that rank
        curves[name] = [mean_of(c) if np.isfinite(c).all() else None for c in columns]
    return {"before_rejection": before, "sorted": curves}


def oracle_summary(cycles: pd.DataFrame) -> dict[str, Any] | None:
    """Oracle lengths of the drafting cycles, also by context (SVIP, section 2.1, figures 1 and 7b).

    `delta`: mean of proposed minus oracle; `censored`: the share that reached the cap.
    """
    drafted = cycles.dropna(subset="oracle")
    if drafted.empty:
        return None
    edges = {float(edge): edge for edge in CONTEXTS}  # the last bucket has none
    rows = []
    buckets = pd.cut(drafted.position, [0, *CONTEXTS, np.inf])
    for bucket, part in drafted.groupby(buckets, observed=True):
        interval = cast(pd.Interval, bucket)
        limits = {"above": int(interval.left), "up_to": edges.get(interval.right)}
        rows.append({**limits, **_oracle_row(part)})
    return {"all": _oracle_row(drafted), "by_context": rows}


def _oracle_row(cycles: pd.DataFrame) -> dict[str, Any]:
    return {
        "cycles": len(cycles),
        "oracle": mean_of(cycles.oracle),
        "variance": float(cycles.oracle.var(ddof=0)),
        "delta": mean_of(cycles.levels - cycles.oracle),
        "censored": mean_of(cycles.oracle >= cycles.cap),
    }
