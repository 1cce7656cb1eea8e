"""The roles in a cycle.

A drafter gives distributions. A shape grows a tree from them. A proposer owns both and feeds them
the text. verify.py decides which drafted tokens are accepted, and engine.py holds the loop.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from aerie.infer.decode.cached_lm import TargetStep
from aerie.infer.decode.sampling import Decoding, Sampler
from aerie.infer.decode.stop import Stop
from aerie.infer.decode.tree import Level, Pool, Tree, root_only
from aerie.infer.decode.verify import Verdict
from aerie.model.kv_cache import KeptRows

UNBOUNDED = 2**31
# When the host reads the stop rule of a dynamic tree. each: before it launches the next level.
# late: while the device runs the next level.
StopRead = Literal["each", "late"]
# What a draft reads from the device. stop rule: only whether the rule ends the tree, and only
# between two levels.
DraftReads = Literal["nothing", "stop rule", "anything"]
Calibrate = Callable[[Tensor], Tensor]  # log q [..] -> log confidence [..]


def unchanged(log_q: Tensor) -> Tensor:
    return log_q


class Drafter:
    """Gives the head's distributions q, node by node.

    A text begins with `reset`, and with `commit` of the prompt. Each cycle calls `start`, `step`
    for each further level, and `commit` with the accepted tokens and the bonus token.
    """

    max_positions: int = UNBOUNDED  # the most tokens of prompt and answer together
    max_levels: int = UNBOUNDED  # the depth of the deepest tree that the head can draft
    after_blocks: tuple[int, ...] = ()  # the taps that `commit` takes; (): last_hidden
    draft_rows: int = 0  # rows of the cache that `start` writes behind the kept ones
    forwards_per_tree: int | None = None  # 1 if one forward serves all levels; None: one per level
    # [Vd] the target's id of each column of log q; None: the column is the id
    ids: Tensor | None = None
    reads_no_device: bool = True
    # (owner, attribute) of each function that runs a model; whoever counts forwards wraps these
    forwards: tuple[tuple[Any, str], ...] = ()

    def reset(self, prompt: Tensor, kept: KeptRows, slots: int) -> None:
        """Begins a prompt [T] before any of its rows is kept.

        slots: the most nodes that one tree passes to `step`.
        """

    def commit(self, tokens: Tensor, features: Tensor, last: Tensor | None = None) -> None:
        """Reads newly known tokens [n], each with the target's feature of the token before it.

        features: [n, D], or [n, L*D] with taps. last [1]: the row of the last known token, given if
        meaningless rows follow it.
        """

    def start(self) -> Tensor:
        """Begins a new tree; returns log q [1, Vd] of the root's children."""
        raise NotImplementedError

    def step(self, tokens: Tensor, parents: Tensor) -> Tensor:
        """log q [n, Vd] of the children of n nodes with these tokens.

        parents [n]: the row of each node's parent in what the last call returned.
        """
        raise NotImplementedError

    def target_ids(self, columns: Tensor) -> Tensor:
        """The target's ids of columns of log q."""
        return columns if self.ids is None else self.ids[columns]


class Grown(NamedTuple):
    """A tree that has grown one more level."""

    # whether this level is the last one: a bool, or a boolean tensor [] that nobody has read yet
    ends: Any
    finish: Callable[[], Tree]  # makes the tree that ends with this level


class Shape:
    """Chooses the nodes of a tree from a drafter's distributions."""

    is_chain: bool = False  # no node has siblings
    is_dynamic: bool = False  # `grow_levels` works
    draws: bool = False  # children are drawn from q, not picked by rank, if the target samples
    stop_read: StopRead = "each"
    # A watcher that wants to see all candidates sets this; every tree then has its `pool`.
    keeps_pool: bool = False

    def __init__(self, stop: Stop, levels: int, max_nodes: int, draft_slots: int) -> None:
        """draft_slots: the most nodes that one tree passes to `Drafter.step`."""
        self.stop = stop
        self.levels = levels
        self.max_nodes = max_nodes
        self.draft_slots = draft_slots

    def with_pool(
        self, tree: Tree, levels: Sequence[Level], kept: Tensor, drafter: Drafter, ended: bool
    ) -> Tree:
        """The tree with its pool. kept [N]: see `Pool`; ended: whether the stop rule ended it."""
        columns = torch.arange(levels[0].log_q.shape[-1], device=kept.device)
        ids = drafter.target_ids(columns)
        stopped_by = self.stop.config.rule if ended else None
        return replace(tree, pool=Pool(levels, kept, ids, self.is_dynamic, stopped_by))

    def grow(self, drafter: Drafter, root: Tensor, max_levels: int, sampler: Sampler) -> Tree:
        """The tree under root [1], at most max_levels deep."""
        raise NotImplementedError

    def grow_levels(self, drafter: Drafter, root: Tensor, max_levels: int) -> Iterator[Grown]:
        """Yields after each level of a dynamic tree; the host never waits for the device."""
        raise NotImplementedError


@dataclass(frozen=True)
class Cycle:
    """One cycle, as watchers (`on_cycle`) and `Proposer.learn` see it."""

    tree: Tree
    step: TargetStep
    verdict: Verdict
    sampler: Sampler
    rule: str = "R0"  # the rule of verification
    position: int = 0  # the root's index in prompt and answer
    new_tokens: int = 0  # tokens that the answer took, the bonus token included
    draft_ms: float = 0.0
    verify_ms: float = 0.0


class Traits(NamedTuple):
    """What `plan_cycle` (runners.py) must know about a proposer."""

    reads: DraftReads = "nothing"  # what `propose` and `commit` read
    draws: bool = False  # `propose` draws random numbers
    # It proposes chains, and its `commit` reads nothing: each length may have a CUDA graph.
    has_few_sizes: bool = False


class Proposer:
    """Gives each cycle its tree. This base class drafts nothing: plain decoding (`vanilla`)."""

    max_nodes: int = 1  # the most nodes of a tree, root and passengers included
    draft_slots: int = 0  # see Shape
    max_positions: int = UNBOUNDED  # see Drafter
    after_blocks: tuple[int, ...] = ()
    levels: int | None = 0  # the depth of the deepest tree; None: no bound
    is_chain: bool = True  # no node ever has siblings

    def traits(self, decoding: Decoding) -> Traits:
        return Traits()

    def reset(self, prompt: Tensor, kept: KeptRows, sampler: Sampler) -> None:
        """Begins a prompt [T] before any of its rows is kept."""

    def propose(self, root: Tensor, max_levels: int) -> Tree:
        """The tree under root [1], at most max_levels deep."""
        return root_only(root)

    def commit(self, tokens: Tensor, features: Tensor, last: Tensor | None = None) -> None:
        """See `Drafter.commit`. The prefill commits prompt[1:] and the answer's first token."""

    def learn(self, new: list[int], cycle: Cycle | None) -> None:
        """Takes the new tokens on the host; cycle is None after the prefill."""


class TreeProposer(Proposer):
    """Grows trees of one shape from a head's distributions."""

    def __init__(self, drafter: Drafter, shape: Shape) -> None:
        self.drafter = drafter
        self.shape = shape
        self.max_nodes = shape.max_nodes
        # a block head writes its whole block behind the text
        self.draft_slots = max(shape.draft_slots, drafter.draft_rows)
        self.max_positions = drafter.max_positions
        self.after_blocks = drafter.after_blocks
        self.levels = shape.levels
        self.is_chain = shape.is_chain

    def traits(self, decoding: Decoding) -> Traits:
        draws = self.shape.draws and decoding.do_sample
        has_few_sizes = self.is_chain and self.drafter.reads_no_device
        return Traits(self._reads(draws, decoding), draws, has_few_sizes)

    def _reads(self, draws: bool, decoding: Decoding) -> DraftReads:
        shape, stop = self.shape, self.shape.stop
        if not (self.drafter.reads_no_device and stop.reads_only) or shape.keeps_pool:
            return "anything"
        ends_early = type(stop) is not Stop
        if draws:
            # A static tree's missing children are found on the host, and the processors that read
            # the text run there.
            may_lack_children = not (shape.is_dynamic or shape.is_chain)
            reads_more = ends_early or may_lack_children or bool(decoding.of_text)
            return "anything" if reads_more else "nothing"
        if not ends_early:
            return "nothing"
        # Chains and static trees read their rule inside `grow`, in the middle of a draft.
        return "stop rule" if shape.is_dynamic else "anything"

    def reset(self, prompt: Tensor, kept: KeptRows, sampler: Sampler) -> None:
        self._sampler = sampler
        self.shape.stop.reset()
        self.drafter.reset(prompt, kept, self.draft_slots)

    def propose(self, root: Tensor, max_levels: int) -> Tree:
        tree = self.shape.grow(self.drafter, root, max_levels, self._sampler)
        return self.with_forwards(tree)

    def propose_levels(self, root: Tensor, max_levels: int) -> Iterator[Grown]:
        """Grows a tree level by level; the caller reads the stop rule's answers."""
        return self.shape.grow_levels(self.drafter, root, max_levels)

    def with_forwards(self, tree: Tree) -> Tree:
        """The tree with the number of forwards that it took."""
        forwards = self.drafter.forwards_per_tree
        return tree if forwards is None else replace(tree, draft_forwards=forwards)

    def commit(self, tokens: Tensor, features: Tensor, last: Tensor | None = None) -> None:
        self.drafter.commit(tokens, features, last)

    def learn(self, new: list[int], cycle: Cycle | None) -> None:
        if cycle is not None:
            self.shape.stop.learn(cycle.verdict.accepted, cycle.tree.levels)
