"""Greedy answers beside those of transformers' own generate, token for token, the edge cases of a cycle among them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from infer.engine import Generation, SpeculativeDecoder, end_ids
from infer.proposer import Cycle
from model.target import Target

LENGTHS = (32, 3, 12, 4, 20, 6)  # max_new_tokens of the prompts, in turn
EDGES = ("rejected", "accepted", "ended", "cut")
ROUNDING = 4.0  # in units of eps times the largest logit; storing two logits alone can cost 1


@dataclass(frozen=True)
class Reference:
    """A prompt [1, T] and what the target alone writes after it: generate(do_sample=False).

    Greedy text does not look ahead, so a shorter answer, or one that ends at another end token, is a beginning of it.
    """

    ids: Tensor
    answer: list[int]


@dataclass(frozen=True)
class Difference:
    """The first token that differs, with how far the two tokens' logits are apart in a plain forward."""

    prompt: int
    position: int
    ours: int
    theirs: int
    gap: float
    rounding: float  # a gap that rounding can make in the target's dtype

    @property
    def within_rounding(self) -> bool:
        return self.gap <= self.rounding


@dataclass
class GreedyResult:
    """How many prompts were answered identically every time, and in how many answers each edge case was met.

    rejected: every drafted token was refused. accepted: every draft was accepted down to its deepest node. ended: an
    end token inside an accepted path. cut: max_new_tokens inside a path that a longer answer accepts.
    """

    prompts: int = 0
    identical: int = 0
    edges: dict[str, int] = field(default_factory=lambda: dict.fromkeys(EDGES, 0))
    differences: list[Difference] = field(default_factory=list)

    def holds(self, exact: bool) -> bool:
        """Whether all answers are identical; where they need not be exactly, up to rounding."""
        return not self.differences or (not exact and all(each.within_rounding for each in self.differences))


def reference(target: Target, ids: Tensor) -> Reference:
    """The target's own greedy answer to ids [1, T], as long as any that is compared with it."""
    with torch.inference_mode():
        out = target.model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=max(LENGTHS)
        )
    return Reference(ids, out[0, ids.shape[1] :].tolist())


def compare_greedy(
    decoder: SpeculativeDecoder, references: Sequence[Reference], tick: Callable[[], object] = lambda: None
) -> GreedyResult:
    """Every prompt answered once, then again with an end token, and with a limit, inside a path that was accepted."""
    result = GreedyResult()
    for number, known in enumerate(references):
        tries = _Tries(decoder, known, number)
        tries.run("free", max_new_tokens=LENGTHS[number % len(LENGTHS)])
        tries.end_inside_a_path()
        tries.cut_a_path()
        result.prompts += 1
        result.identical += tries.difference is None
        for edge in tries.edges:
            result.edges[edge] += 1
        if tries.difference is not None:
            result.differences.append(tries.difference)
        tick()
    return result


@dataclass(frozen=True)
class _Answer:
    """One answer and its cycles: drafted tokens accepted, and the depth of the deepest one drafted."""

    generation: Generation
    accepted: list[int]
    depths: list[int]

    @property
    def drafts(self) -> list[tuple[int, int]]:
        return [(took, depth) for took, depth in zip(self.accepted, self.depths, strict=True) if depth]

    def paths(self) -> list[tuple[int, int, int]]:
        """For each cycle: how many tokens stood before it, how many of its drafted ones were taken, how many in all."""
        found, before = [], 1
        for accepted, tokens in zip(self.accepted, self.generation.statistics.cycle_tokens, strict=True):
            found.append((before, min(accepted, tokens), tokens))
            before += tokens
        return found


class _Tries:
    """The answers to one prompt."""

    def __init__(self, decoder: SpeculativeDecoder, known: Reference, number: int) -> None:
        self.decoder, self.known, self.number = decoder, known, number
        self.ends = end_ids(decoder.target)
        self.edges: list[str] = []
        self.difference: Difference | None = None
        self.answer: _Answer | None = None

    def run(self, name: str, max_new_tokens: int, end: int | None = None) -> _Answer:
        accepted: list[int] = []
        depths: list[int] = []

        def watch(cycle: Cycle) -> None:
            tree = cycle.tree
            guessed = tree.depth if tree.passengers is None else tree.depth[~tree.passengers]
            accepted.append(cycle.verdict.accepted)
            depths.append(int(guessed.max()))

        settings: dict[str, Any] = {} if end is None else {"eos_token_id": [end, *self.ends]}
        generation = self.decoder.generate(
            self.known.ids, do_sample=False, max_new_tokens=max_new_tokens, on_cycle=watch, **settings
        )
        wanted = self.known.answer[:max_new_tokens]
        if end is not None and end in wanted:
            wanted = wanted[: wanted.index(end) + 1]
        self._compare(generation.new_ids, wanted)
        found = _Answer(generation, accepted, depths)
        if name == "free":
            self.answer = found
        if found.drafts and not any(took for took, _ in found.drafts):
            self.edges.append("rejected")
        if found.drafts and all(took == depth for took, depth in found.drafts):
            self.edges.append("accepted")
        return found

    def end_inside_a_path(self) -> None:
        """Again, with a token that was drafted and accepted as an end token; one that did not stand before it."""
        assert self.answer is not None
        text = self.answer.generation.new_ids
        for before, taken, _ in self.answer.paths():
            for place in range(before, before + taken):
                if text.index(text[place]) == place and text[place] not in self.ends:
                    again = self.run("ended", len(text), text[place])
                    _, inside, tokens = again.paths()[-1] if again.paths() else (0, 0, 1)
                    self.edges += ["ended"] * (inside == tokens)
                    return

    def cut_a_path(self) -> None:
        """Again, with a limit inside the longest cycle."""
        assert self.answer is not None
        before, taken, tokens = max(self.answer.paths(), key=lambda path: path[2], default=(0, 0, 0))
        if taken and tokens > 1:
            self.run("cut", before + max(1, tokens - 1))
            self.edges.append("cut")

    def _compare(self, ours: list[int], theirs: list[int]) -> None:
        if ours == theirs or self.difference is not None:
            return
        pairs = zip(ours, theirs, strict=False)
        place = next((at for at, (one, other) in enumerate(pairs) if one != other), min(len(ours), len(theirs)))
        one, other = (text[place] if place < len(text) else -1 for text in (ours, theirs))
        gap, rounding = float("inf"), 0.0
        if min(one, other) >= 0:
            gap, rounding = _gap(self.decoder.target, self.known.ids, ours[:place], one, other)
        self.difference = Difference(self.number, place, one, other, gap, rounding)


def _gap(target: Target, ids: Tensor, before: list[int], one: int, other: int) -> tuple[float, float]:
    """How far two tokens' logits are apart after a text, and how far rounding alone can move them."""
    text = torch.cat([ids, torch.tensor([before], dtype=ids.dtype, device=ids.device)], dim=1)
    with torch.inference_mode():
        logits = target.model(text).logits[0, -1].float()
    return float((logits[one] - logits[other]).abs()), ROUNDING * torch.finfo(target.dtype).eps * float(
        logits.abs().max()
    )
