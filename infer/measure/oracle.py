"""How deep it would have paid to draft: at every cycle also a draft to a cap, verified and then forgotten.

Source: SVIP (arXiv 2411.18462), section 2.1 and figures 1 and 7b.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from aerie.configs.schema.decode import ConstantConfig, StaticConfig, TreeConfig
from aerie.infer.decode.drafters.multi_token import HydraDrafter, MedusaDrafter
from aerie.infer.decode.engine import SpeculativeDecoder
from aerie.infer.decode.sampling import Sampler
from aerie.infer.decode.shape import Cycle, Drafting, make_shape
from aerie.infer.decode.tree import Tree

CONTEXTS = (32, 64, 128, 256, 512, 1024, 2048, 4096, 6144, 8192)


class Oracle(Drafting):
    """A proposer that drafts to the cap first, has the target judge that, and then proposes as it would have anyway.

    The generator is set back, so that what is decoded does not change, and a sampled chain is a prefix of the longer.
    The longer draft has the policy's tree without its stop rule: a static tree is as deep as it is, and Medusa and
    Hydra as their heads are many.
    """

    def __init__(self, decoder: SpeculativeDecoder, tree: TreeConfig, levels: int, seed: int = 0) -> None:
        """Takes the place of the decoder's own proposer."""
        own = decoder.proposer
        assert isinstance(own, Drafting)
        super().__init__(own.drafter, own.shape, own.forwards_per_tree)
        self.keep = own.keep
        if isinstance(own.drafter, MedusaDrafter | HydraDrafter):
            levels = min(levels, own.drafter.head.config.num_heads)
        deep = tree if isinstance(tree, StaticConfig) else replace(tree, levels=levels)
        self.longer = make_shape(replace(deep, stop=ConstantConfig()))
        self.max_nodes = max(own.max_nodes, self.longer.max_nodes)
        self.lm, self.generator = decoder.lm, torch.Generator(decoder.target.device).manual_seed(seed)
        self.lengths: list[tuple[int | None, int | None]] = []  # oracle length and cap of each cycle; null: no draft
        decoder.proposer = self

    def reset(self, prompt: Tensor, capacity: int, sampler: Sampler) -> None:
        super().reset(prompt, capacity + self.longer.draft_slots, sampler)

    def propose(self, root: Tensor, max_levels: int) -> Tree:
        assert self._sampler is not None, "reset first"
        state = self._sampler.generator.get_state()
        self.tree = self.longer.grow(self.drafter, root, max_levels, self._sampler)
        self.logits = self.lm.extend(self.tree).logits  # [N, V]; the cycle's own forward writes over these rows
        self._sampler.generator.set_state(state)
        return super().propose(root, max_levels)

    def on_cycle(self, cycle: Cycle) -> None:
        """Notes how many tokens of the longer draft the target would have taken at this cycle."""
        if not cycle.tree.levels or cycle.rule not in ("R0", "R1", "R2"):
            self.lengths.append((None, None))
        else:
            self.lengths.append((oracle_length(cycle, self.tree, self.logits, self.generator), self.tree.levels))


def oracle_length(cycle: Cycle, tree: Tree, logits: Tensor, generator: torch.Generator) -> int:
    """How many tokens of a deeper tree, with the target's logits [N, V], the target takes, given what it did take.

    A sampled chain (R1) is a longer one's beginning: a refusal is the oracle's too, and after a chain that was wholly
    accepted the longer one's next tokens are judged. Where the target chooses (R0, R2) it is held to what it chose, and
    chooses anew from there on. Never less than what the policy had accepted, for that depth is the oracle's to choose.
    """
    accepted, start = cycle.verdict.accepted, len(cycle.tree)
    if cycle.rule == "R1":
        if accepted < cycle.tree.num_drafted:
            return accepted
        if not torch.equal(tree.tokens[:start], cycle.tree.tokens) or tree.proposal is None:
            return accepted  # a device that does not repeat its own arithmetic
        p = cycle.sampler.law(logits)  # [N, V]
        q = tree.proposal.over(p.shape[-1])  # [N, V]
        for node in range(start, len(tree)):
            drafted, uniform = tree.tokens[node], torch.rand((), generator=generator, device=p.device)
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
            token = int(cycle.sampler.law(logits[node : node + 1]).multinomial(1, generator=generator))
        if (node, token) not in children:
            return max(accepted, depth)
        node, depth = children[node, token], depth + 1


def summarise_oracle(cycles: pd.DataFrame, edges: Sequence[int] = CONTEXTS) -> dict[str, Any]:
    """What the cycles that drafted say of the oracle: their columns are position, levels, accepted, oracle and cap.

    by_context: per bucket of the root's place in the text (previous edge, edge]. `variance` is that of the oracle
    length (figure 1), `delta` the mean of proposed minus oracle (figure 7b), and `censored` the share of cycles whose
    oracle length may be longer than the cap.

    upper_bound: the policy's row, and that of an oracle which drafts exactly what will be accepted, at the same cycle
    starts. tau counts the bonus token and cycles that were cut by an answer's end in full, so it is above a bench's own
    tau. The oracle's is the most that any rule for the length of this draft can reach.
    """
    drafted = cycles.dropna(subset="oracle")
    buckets, low = [], 0
    for edge in (*edges, None):
        here = drafted[(drafted.position > low) & (drafted.position <= (edge or float("inf")))]
        if len(here):
            buckets.append({"above": low, "up_to": edge, **_lengths(here)})
        low = edge or low
    bound: dict[str, Any] = {"cycles": len(drafted), "policy": None, "oracle": None}
    if len(drafted):
        levels, accepted, oracle = (float(drafted[name].mean()) for name in ("levels", "accepted", "oracle"))
        bound["policy"] = {"tau": accepted + 1.0, "levels": levels, "wasted_levels": levels - accepted}
        bound["oracle"] = {"tau": oracle + 1.0, "levels": oracle, "wasted_levels": 0.0}
    return {"all": _lengths(drafted) if len(drafted) else None, "by_context": buckets, "upper_bound": bound}


def _lengths(here: pd.DataFrame) -> dict[str, Any]:
    return {
        "cycles": len(here),
        "oracle": float(here.oracle.mean()),
        "variance": float(here.oracle.var(ddof=0)),
        "proposed": float(here.levels.mean()),
        "delta": float((here.levels - here.oracle).mean()),
        "censored": float((here.oracle >= here.cap).mean()),
    }
