"""What fills a cycle's tree: a drafter in a shape, or anything else that can guess how the text goes on."""

from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from aerie.infer.decode.cache import TargetStep
from aerie.infer.decode.sampling import Sampler
from aerie.infer.decode.shape import Drafter, Shape
from aerie.infer.decode.tree import Tree
from aerie.infer.decode.verify import Verdict


@dataclass(frozen=True)
class Cycle:
    """Everything about one cycle, for whoever measures: the tree, the target's answer, and what was accepted."""

    tree: Tree
    step: TargetStep
    verdict: Verdict
    sampler: Sampler
    rule: str = "R0"  # that judged the tree (infer/verify.py)
    position: int = 0  # the root's place in the text, the prompt included
    new_tokens: int = 0  # the verdict's tokens and the bonus token, up to the end token and max_new_tokens
    draft_ms: float = 0.0
    verify_ms: float = 0.0


class Proposer(Protocol):
    """Proposes one tree per cycle and is told what became of it."""

    @property
    def max_nodes(self) -> int:
        """Rows of the widest tree, root and passengers included."""
        ...

    @property
    def max_positions(self) -> int:
        """The longest text, prompt and answer, that it can draft for."""
        ...

    @property
    def after_blocks(self) -> tuple[int, ...]:
        """The taps that `commit` is given; none: it is given last_hidden."""
        ...

    def reset(self, prompt: Tensor, capacity: int, sampler: Sampler) -> None:
        """A new prompt [T]; capacity is the length of prompt, answer and one tree together."""
        ...

    def propose(self, root: Tensor, max_levels: int) -> Tree:
        """The tree under the last known token [1], at most max_levels deep."""
        ...

    def commit(self, tokens: Tensor, features: Tensor, cycle: Cycle | None) -> None:
        """What is known now: n tokens [n] and for each the feature of the token before it, [n, D] or [n, L*D].

        After the prefill these are the prompt's, without its first token, and the answer's first; cycle is then null.
        """
        ...


class CachedDrafter(Drafter, Protocol):
    """A drafter with memory: what `Drafting` needs beside the laws that a shape asks for."""

    @property
    def max_positions(self) -> int: ...

    @property
    def after_blocks(self) -> tuple[int, ...]: ...

    def reset(self, prompt: Tensor, capacity: int) -> None: ...

    def commit(self, tokens: Tensor, features: Tensor) -> None: ...


@runtime_checkable
class Forwards(Protocol):
    """A drafter that says where it calls its models, for whoever times these forwards alone."""

    def forwards(self) -> tuple[tuple[Any, str], ...]:
        """(owner, attribute) of every function that runs a model, LM heads included; none of them calls another."""
        ...


class Drafting:
    """A drafter, a shape and the shape's stop rule as one proposer.

    forwards_per_tree is for the record: 1 where one forward yields all levels' laws (Medusa), null for one a level.
    keep: every tree has its pool (Tree.pool), for whoever measures; set it before an answer begins.
    """

    keep = False

    def __init__(self, drafter: CachedDrafter, shape: Shape, forwards_per_tree: int | None = None) -> None:
        self.drafter, self.shape = drafter, shape
        self.forwards_per_tree = forwards_per_tree
        self._sampler: Sampler | None = None

    @property
    def max_nodes(self) -> int:
        return self.shape.max_nodes

    @property
    def max_positions(self) -> int:
        return self.drafter.max_positions

    @property
    def after_blocks(self) -> tuple[int, ...]:
        return self.drafter.after_blocks

    def reset(self, prompt: Tensor, capacity: int, sampler: Sampler) -> None:
        self._sampler = sampler
        self.shape.stop.reset()
        self.drafter.reset(prompt, capacity + self.shape.draft_slots)

    def propose(self, root: Tensor, max_levels: int) -> Tree:
        assert self._sampler is not None, "reset first"
        tree = self.shape.grow(self.drafter, root, max_levels, self._sampler, self.keep)
        return tree if self.forwards_per_tree is None else replace(tree, draft_forwards=self.forwards_per_tree)

    def commit(self, tokens: Tensor, features: Tensor, cycle: Cycle | None) -> None:
        self.drafter.commit(tokens, features)
        if cycle is not None:
            self.shape.stop.learn(cycle.verdict.accepted, cycle.tree.levels)
