"""How deep it would have paid to draft: at every cycle also a draft to a cap, verified and then forgotten.

Source: SVIP (arXiv 2411.18462), section 2.1 and figures 1 and 7b.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from aerie.configs.schema.decode import ConstantConfig, StaticConfig, TreeConfig
from aerie.infer.decode.cache import CachedLM
from aerie.infer.decode.drafters.multi_token import HydraDrafter, MedusaDrafter
from aerie.infer.decode.engine import SpeculativeDecoder
from aerie.infer.decode.proposer import Cycle, Drafting
from aerie.infer.decode.sampling import Sampler
from aerie.infer.decode.shape import Shape, make_shape
from aerie.infer.decode.tree import Tree
from aerie.infer.measure.record import IntArray


@dataclass(frozen=True)
class OracleArrays:
    """c cycles that drafted, as the policy left their starts; lengths are depths in tokens."""

    prompt: IntArray  # [c]
    position: IntArray  # [c] of the root in the text, the prompt included
    answered: IntArray  # [c] tokens of the answer so far
    proposed: IntArray  # [c] drafted by the policy
    accepted: IntArray  # [c]
    oracle: IntArray  # [c] accepted had drafting never stopped before the cap
    cap: IntArray  # [c] where it did stop; an oracle length equal to it may be longer


class OracleProposer:
    """A proposer that drafts to the cap first, has the target judge that, and then proposes as it would have anyway.

    The generator is set back, so that what is decoded does not change, and a sampled chain is a prefix of the longer.
    """

    def __init__(self, inner: Drafting, lm: CachedLM, shape: Shape) -> None:
        self.inner, self.lm, self.shape = inner, lm, shape
        self.tree: Tree | None = None  # the last counterfactual one
        self.logits = torch.empty(0)  # [N, V] of it
        self._sampler: Sampler | None = None

    @property
    def max_nodes(self) -> int:
        return max(self.inner.max_nodes, self.shape.max_nodes)

    @property
    def max_positions(self) -> int:
        return self.inner.max_positions

    @property
    def after_blocks(self) -> tuple[int, ...]:
        return self.inner.after_blocks

    def reset(self, prompt: Tensor, capacity: int, sampler: Sampler) -> None:
        self._sampler = sampler
        self.inner.reset(prompt, capacity + self.shape.draft_slots, sampler)

    def propose(self, root: Tensor, max_levels: int) -> Tree:
        assert self._sampler is not None, "reset first"
        state = self._sampler.generator.get_state()
        self.tree = self.shape.grow(self.inner.drafter, root, max_levels, self._sampler)
        self.logits = self.lm.extend(self.tree).logits  # the cycle's own forward writes over these rows
        self._sampler.generator.set_state(state)
        return self.inner.propose(root, max_levels)

    def commit(self, tokens: Tensor, features: Tensor, cycle: Cycle | None) -> None:
        self.inner.commit(tokens, features, cycle)


class OracleRecorder:
    """Called after each cycle of a decoder with an OracleProposer."""

    def __init__(self, proposer: OracleProposer, seed: int = 0) -> None:
        self.proposer = proposer
        self.prompt = 0
        self._prompt_tokens = 0
        self._seed = seed
        self._generator: torch.Generator | None = None
        self._rows: list[tuple[int, ...]] = []

    def start(self, prompt: int, prompt_tokens: int) -> None:
        """The next prompt, of this length."""
        self.prompt, self._prompt_tokens = prompt, prompt_tokens

    def __call__(self, cycle: Cycle) -> None:
        tree = self.proposer.tree
        if not cycle.tree.levels or tree is None or cycle.rule not in ("R0", "R1", "R2"):
            return
        if self._generator is None:
            self._generator = torch.Generator(self.proposer.logits.device).manual_seed(self._seed)
        length = oracle_length(cycle, tree, self.proposer.logits, self._generator)
        answered = cycle.position - self._prompt_tokens + 1
        row = (self.prompt, cycle.position, answered, cycle.tree.levels, cycle.verdict.accepted, length, tree.levels)
        self._rows.append(row)

    def arrays(self) -> OracleArrays:
        """What was collected so far."""
        values = np.array(self._rows, dtype=np.int64).reshape(-1, 7)
        return OracleArrays(*(values[:, column] for column in range(7)))


@contextmanager
def with_oracle(decoder: SpeculativeDecoder, tree: TreeConfig | None, levels: int) -> Iterator[OracleProposer | None]:
    """Drafts to `levels` too while the block runs; null for a decoder that does not draft from laws in this tree.

    The longer draft has the policy's tree without its stop rule: a static tree is as deep as it is, and Medusa and
    Hydra as their heads are many.
    """
    drafting = decoder.proposer
    if not isinstance(drafting, Drafting) or tree is None:
        yield None
        return
    if isinstance(drafting.drafter, MedusaDrafter | HydraDrafter):
        levels = min(levels, drafting.drafter.head.config.num_heads)
    deep = tree if isinstance(tree, StaticConfig) else replace(tree, levels=levels)
    shape = make_shape(replace(deep, stop=ConstantConfig()))
    proposer = OracleProposer(drafting, decoder.lm, shape)
    decoder.proposer = proposer
    try:
        yield proposer
    finally:
        decoder.proposer = drafting


def oracle_length(cycle: Cycle, tree: Tree, logits: Tensor, generator: torch.Generator) -> int:
    """How many tokens of a deeper tree, with the target's logits [N, V], the target takes, given what it did take.

    A sampled chain (R1) is a longer one's beginning: a refusal is the oracle's too, and after a chain that was wholly
    accepted the longer one's next tokens are judged. Where the target chooses (R0, R2) it is held to what it chose, and
    chooses anew from there on. Never less than what the policy had accepted, for that depth is the oracle's to choose.
    """
    accepted = cycle.verdict.accepted
    if cycle.rule == "R1":
        if accepted < cycle.tree.num_drafted:
            return accepted
        return _taken_on(cycle, tree, logits, generator)
    known = [*cycle.verdict.tokens, cycle.verdict.bonus]
    choices: list[int] = cycle.sampler.choose(logits).tolist() if cycle.rule == "R0" else []
    children = {
        (parent, token): node
        for node, (parent, token) in list(enumerate(zip(tree.parents.tolist(), tree.tokens.tolist(), strict=True)))[1:]
    }
    node = depth = 0
    while True:
        if depth < len(known):
            token = known[depth]
        else:
            token = choices[node] if choices else _drawn(cycle.sampler.law(logits[node : node + 1]), generator)
        if (node, token) not in children:
            return max(accepted, depth)
        node, depth = children[node, token], depth + 1


def _taken_on(cycle: Cycle, tree: Tree, logits: Tensor, generator: torch.Generator) -> int:
    """The tokens of a longer chain that are taken after those of the cycle's, all of which were."""
    start = len(cycle.tree)
    if not torch.equal(tree.tokens[:start], cycle.tree.tokens) or tree.proposal is None:
        return start - 1  # a device that does not repeat its own arithmetic
    p = cycle.sampler.law(logits)
    q = tree.proposal.over(p.shape[-1])
    for node in range(start, len(tree)):
        token = tree.tokens[node]
        uniform = torch.rand((), generator=generator, device=p.device)
        if not bool(uniform * q[node - 1, token] < p[node - 1, token]):
            return node - 1
    return len(tree) - 1


def _drawn(law: Tensor, generator: torch.Generator) -> int:
    return int(law.multinomial(1, generator=generator))


CONTEXTS = (32, 64, 128, 256, 512, 1024, 2048, 4096, 6144, 8192)


def by_context(arrays: OracleArrays, edges: Sequence[int] = CONTEXTS) -> list[dict[str, Any]]:
    """Per bucket of the root's place in the text (previous edge, edge]: oracle and proposed lengths.

    `variance` is that of the oracle length (figure 1), `delta` the mean of proposed minus oracle (figure 7b), and
    `censored` the share of cycles whose oracle length may be longer than the cap. Source: SVIP (arXiv 2411.18462).
    """
    rows, low = [], 0
    for edge in (*edges, None):
        here = arrays.position > low if edge is None else (arrays.position > low) & (arrays.position <= edge)
        if here.any():
            rows.append({"above": low, "up_to": edge, **_statistics(arrays, here)})
        low = edge or low
    return rows


def upper_bound(arrays: OracleArrays) -> dict[str, Any]:
    """The policy's row, and that of an oracle which drafts exactly what will be accepted, at the same cycle starts.

    tau counts the bonus token and cycles that were cut by an answer's end in full, so it is above a bench's own tau.
    The oracle's is the most that any rule for the length of this draft can reach: its drafts are never refused, and a
    cycle in which nothing would be accepted drafts nothing.
    """
    proposed, accepted, oracle = (
        values.astype(np.float64) for values in (arrays.proposed, arrays.accepted, arrays.oracle)
    )
    if not proposed.size:
        return {"cycles": 0, "policy": None, "oracle": None}
    return {
        "cycles": int(proposed.size),
        "policy": {
            "tau": float(accepted.mean()) + 1.0,
            "levels": float(proposed.mean()),
            "wasted_levels": float((proposed - accepted).mean()),
        },
        "oracle": {"tau": float(oracle.mean()) + 1.0, "levels": float(oracle.mean()), "wasted_levels": 0.0},
    }


def summarise_oracle(arrays: OracleArrays) -> dict[str, Any]:
    """Everything that is said of the oracle."""
    everything = np.ones(arrays.oracle.size, dtype=bool)
    longest = int(arrays.oracle.max(initial=0))
    return {
        "all": _statistics(arrays, everything) if everything.size else None,
        "lengths": np.bincount(arrays.oracle, minlength=longest + 1).tolist(),
        "by_context": by_context(arrays),
        "upper_bound": upper_bound(arrays),
    }


def _statistics(arrays: OracleArrays, here: NDArray[np.bool_]) -> dict[str, Any]:
    oracle, proposed = arrays.oracle[here], arrays.proposed[here]
    return {
        "cycles": int(here.sum()),
        "oracle": float(oracle.mean()),
        "variance": float(oracle.var()),
        "proposed": float(proposed.mean()),
        "delta": float((proposed - oracle).mean()),
        "censored": float((oracle >= arrays.cap[here]).mean()),
    }
