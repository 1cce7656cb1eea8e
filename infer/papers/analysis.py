"""Adds the columns that SVIP's and DEAGLE's claims need to a calibration's tables.

They are oracle lengths (SVIP, arXiv 2411.18462) and the errors of drafted features (DEAGLE).
"""

from collections.abc import Sequence
from dataclasses import replace
from math import nan
from typing import Any, cast

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
from aerie.infer.measure.calibrate import Observer
from aerie.infer.measure.recorder import CycleRecord, Tables

# An oracle's seed is the answer's seed plus this, which no prompt's number reaches.
OWN_STREAM = 500_000


class PaperObserver(Observer):
    """Adds the papers' columns to a calibration's tables."""

    def __init__(self, oracle_levels: int | None) -> None:
        """oracle_levels: the depth of the additional draft of each cycle; None: no oracle."""
        self.oracle_levels = oracle_levels
        self.oracle: Oracle | None = None
        self.features: Features | None = None

    def attach(self, decoder: SpeculativeDecoder, tree: TreeConfig) -> None:
        drafter = cast(TreeProposer, decoder.proposer).drafter
        if self.oracle_levels is not None:
            self.oracle = Oracle(decoder, tree, self.oracle_levels)
            decoder.eager.proposer = self.oracle
        if isinstance(drafter, EagleDrafter):
            self.features = Features(decoder, drafter)

    def law_columns(self, tree: Tree, nodes: Sequence[int]) -> CycleRecord:
        return {} if self.features is None else self.features.errors(tree, nodes)

    def complete(self, tables: Tables) -> None:
        lengths = nan if self.oracle is None else self.oracle.lengths
        tables["cycles"]["oracle"] = pd.Series(lengths, tables["cycles"].index, dtype=float)


# --- features and oracle lengths ---


class Features:
    """Records what both LM heads read: DEAGLE's features f and drafted f (equations 2 to 4)."""

    def __init__(self, decoder: SpeculativeDecoder, drafter: EagleDrafter) -> None:
        target = decoder.target
        self.true = torch.empty(0)  # [N, D] the target's features at the tree's nodes
        self.drafted: list[Tensor] = []  # [rows, D] the drafted features, by level
        drafter_logits = drafter.logits
        target_logits = target.logits

        def draft_logits_watched(hidden: Tensor) -> Tensor:
            self.drafted.append(hidden)
            return drafter_logits(hidden)

        def target_logits_watched(last_hidden: Tensor, *rows: Any) -> Tensor:
            self.true = last_hidden
            return target_logits(last_hidden, *rows)

        drafter.logits = draft_logits_watched
        vars(target)["logits"] = target_logits_watched
        lm_head = target.vocab.lm_head.float()  # [V, D]
        # The largest eigenvalue gives the spectral norm without computing singular vectors.
        norm = float(torch.linalg.eigvalsh(lm_head.T @ lm_head)[-1].sqrt())
        self.lm_head_norm = norm * target.vocab.scale

    def errors(self, tree: Tree, nodes: Sequence[int]) -> CycleRecord:
        """For these nodes: ||f - drafted f||, ||f||, and half of (||W|| ||f - drafted f||)^2."""
        pool = cast(Pool, tree.pool)
        expanded = expanded_numbers(pool.levels)
        # The oracle's deeper tree, if there is one, was drafted first, so take the last levels.
        drafted = torch.cat(self.drafted[-len(pool.levels) :])  # [expanded, D]
        self.drafted.clear()
        rows = [int((expanded == pool.kept[node]).nonzero()[0]) for node in nodes]
        error = (self.true[nodes] - drafted[rows]).double().norm(dim=-1)
        return {
            "feature_error": error.tolist(),
            "feature_norm": self.true[nodes].double().norm(dim=-1).tolist(),
            "kl_bound": ((self.lm_head_norm * error) ** 2 / 2).tolist(),
        }


class Oracle(TreeProposer):
    """A proposer that also drafts up to `levels` in each cycle, for SVIP's oracle (section 2.1).

    The deeper draft has no stop rule. Afterwards the generator gets its old state back, so
    decoding does not change, and a sampled chain is a prefix of the deeper one.
    """

    def __init__(self, decoder: SpeculativeDecoder, tree: TreeConfig, levels: int) -> None:
        proposer = cast(TreeProposer, decoder.proposer)
        super().__init__(proposer.drafter, proposer.shape)
        if not isinstance(tree, StaticConfig):
            tree = replace(tree, levels=min(levels, proposer.drafter.max_levels))
        self.longer = make_shape(replace(tree, stop=ConstantConfig()))
        # The decoder must make room for the larger of the two trees.
        self.max_nodes = max(proposer.max_nodes, self.longer.max_nodes)
        self.draft_slots = max(proposer.draft_slots, self.longer.draft_slots)
        self.levels = max(proposer.shape.levels, self.longer.levels)
        self.lm = decoder.lm
        self.generator = torch.Generator(decoder.target.device)
        # by cycle of the answer; NaN: nothing was drafted, or the rule (R3) has no oracle
        self.lengths: list[float] = []

    def traits(self, decoding: Decoding) -> Traits:
        return super().traits(decoding)._replace(reads="anything")

    def propose(self, root: Tensor, max_levels: int) -> Tree:
        state = self._sampler.generator.get_state()
        self.tree = self.longer.grow(self.drafter, root, max_levels, self._sampler)
        # The cycle's own forward overwrites the cache rows of this forward.
        logits = self.lm.extend(self.tree.tokens, self.tree.depth, self.tree.mask).logits  # [N, V]
        self.logits = self._sampler.with_text(logits, self.tree)
        self._sampler.generator.set_state(state)
        return super().propose(root, max_levels)

    def learn(self, new: list[int], cycle: Cycle | None) -> None:
        super().learn(new, cycle)
        if cycle is None:  # A prompt begins. Its draws must not depend on earlier prompts.
            self.generator.manual_seed(self._sampler.generator.initial_seed() + OWN_STREAM)
            self.lengths = []
            return
        length = nan
        if cycle.tree.levels > 0 and cycle.rule in ("R0", "R1", "R2"):
            length = oracle_length(cycle, self.tree, self.logits, self.generator)
        self.lengths.append(length)


def oracle_length(cycle: Cycle, tree: Tree, logits: Tensor, generator: torch.Generator) -> int:
    """How many tokens of a deeper tree the target would accept, given what the cycle accepted.

    logits: the target's after the deeper tree's nodes [N, V]. Under R1 a refusal stands, and only
    tokens beyond a wholly accepted chain are judged. Under R0 and R2 the cycle's tokens stand, and
    the target chooses new ones beyond them. The length is at least what the cycle accepted.
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
    # If the device's arithmetic is not reproducible, the deeper chain may be another one.
    is_same_chain = torch.equal(tree.tokens[:start], cycle.tree.tokens)
    if is_refused or not is_same_chain or tree.draft_laws is None:
        return cycle.verdict.accepted
    p = cycle.sampler.law(logits)  # [N, V]
    q = tree.draft_laws.over(p.shape[-1])  # [N, V]
    for node in range(start, len(tree)):
        token = tree.tokens[node]
        uniform = torch.rand((), generator=generator, device=p.device)
        # Accept with probability min(1, p / q). A node's laws stand at its parent, node - 1.
        if not bool(uniform * q[node - 1, token] < p[node - 1, token]):
            return node - 1
    return len(tree) - 1
