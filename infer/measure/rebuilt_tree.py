"""How often a head's r-th guess is the target's token, by depth: what a static tree is rebuilt from."""

import heapq
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, product
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from aerie.configs.schema.decode import Choice, MethodConfig, StaticConfig
from aerie.configs.schema.measure import CalibrateConfig
from aerie.data.progress import bar
from aerie.infer.decode.methods import Drafters, make_decoder
from aerie.infer.decode.proposer import Cycle
from aerie.model.storage import write_text
from aerie.model.target import Target


class RankCollector:
    """Called after each cycle of a tree of best children; `accuracy` is what `best_choices` takes.

    A child counts once its parent is on the accepted path: only then was it asked. It is accepted or not at T = 0, and
    with the target's probability of its token at T > 0 (R2). The tree should hold every rank that is to be ranked, at
    every depth: siblings without a gap, such as EAGLE-1's tree or Medusa's.
    """

    def __init__(self, levels: int, k: int) -> None:
        self._asked = torch.zeros(levels, k, dtype=torch.double)
        self._accepted = torch.zeros(levels, k, dtype=torch.double)

    def __call__(self, cycle: Cycle) -> None:
        tree = cycle.tree
        assert tree.proposal is None, "a child that was drawn has no rank"
        on_path = set(cycle.verdict.path)
        parents = tree.parents.tolist()
        depth = tree.depth.tolist()
        if cycle.sampler.decoding.do_sample:
            law = cycle.sampler.law(cycle.step.logits)
            chance = law[tree.parents, tree.tokens].tolist()
        else:
            chance = [float(node in on_path) for node in range(len(tree))]
        siblings: dict[int, int] = {}
        for node in range(1, len(tree)):
            parent = parents[node]
            rank = siblings.get(parent, 0)
            siblings[parent] = rank + 1
            if parent in on_path and depth[node] <= self._asked.shape[0] and rank < self._asked.shape[1]:
                self._asked[depth[node] - 1, rank] += 1
                self._accepted[depth[node] - 1, rank] += chance[node]

    def accuracy(self) -> list[list[float]]:
        """The shares [levels][k], 0 for a rank that was never asked."""
        shares: list[list[float]] = (self._accepted / self._asked.clamp(min=1)).tolist()
        return shares


CHOICES = "choices.yaml"
REACH = 2  # a node is asked for all its children where the ranks on its path sum to no more than this


def rebuild(
    target: Target,
    asked: MethodConfig,
    head: str | None,
    prompts: Sequence[Tensor],
    section: CalibrateConfig,
    output: Path,
) -> str | None:
    """One line about the tree of section.nodes nodes that suits the head best; null for a method without a static tree.

    Decodes the prompts [1, T] greedily with a wide tree, and writes choices.yaml into the output directory, and beside
    the head where that is a directory.
    """
    tree = asked.tree
    if not isinstance(tree, StaticConfig):
        return None
    collector = RankCollector(tree.levels, section.ranks)
    wide = replace(asked, tree=replace(tree, choices=probe(tree, section.ranks)), typical=None)
    decoder = make_decoder(Drafters(target), wide, head, "calibrate")
    with bar(len(prompts), "prompts", "ranks") as progress:
        for ids in prompts:
            decoder.generate(ids, max_new_tokens=section.prompts.max_new_tokens, do_sample=False, on_cycle=collector)
            progress.update()
    accuracy = collector.accuracy()
    choices = rebuilt(tree, accuracy, section.nodes)
    places = [output, *([Path(head)] if head is not None and Path(head).is_dir() else [])]
    for place in places:
        _write(place / CHOICES, choices, asked.method)
    return (
        f"{asked.method}: a tree of {len(choices)} drafted nodes rebuilt from the head's ranks, expected tau "
        f"{expected_tau(choices, accuracy):.2f} ({expected_tau(tree.paths, accuracy):.2f} for the tree it replaces); "
        f"use it with: --tree.choices {places[-1] / CHOICES}"
    )


def probe(tree: StaticConfig, ranks: int) -> tuple[Choice, ...]:
    """The tree's nodes and so many ranks below every likely node, as deep as the tree."""
    asked = {*tree.paths}
    for depth in range(tree.levels):
        for path in product(range(min(ranks, REACH + 1)), repeat=depth):
            if sum(path) <= REACH:
                asked |= {(*path, rank) for rank in range(ranks)}
    return tuple(sorted(asked, key=lambda choice: (len(choice), choice)))


def rebuilt(tree: StaticConfig, accuracy: Sequence[Sequence[float]], nodes: int | None) -> tuple[Choice, ...]:
    """The tree of so many nodes with the root (null: as many as the tree has) that can expect the longest paths.

    accuracy[depth][rank] is RankCollector's. Where siblings are drawn, a tree may not leave a rank out before another:
    then no rank counts as better than those before it.
    """
    if tree.children != "best":
        accuracy = [list(accumulate(shares, min)) for shares in accuracy]
    return best_choices(accuracy, (nodes or tree.nodes) - 1)


def best_choices(accuracy: Sequence[Sequence[float]], num_choices: int) -> tuple[Choice, ...]:
    """The tree of num_choices drafted nodes with the most accepted tokens to expect, in level order.

    accuracy[depth][rank] is how often the child of this rank is the target's token, given that its parent was; depth 0
    is the root's children. Greedily adds the node with the largest product of accuracies along its path; fewer nodes
    when the table has no more. Source: Medusa (arXiv 2401.10774), section 2.3.3.
    """
    nodes: list[Choice] = []
    heap: list[tuple[float, int, Choice]] = []

    def offer(parent: Choice, chance: float) -> None:
        if len(parent) < len(accuracy):
            for rank, own in enumerate(accuracy[len(parent)]):
                if own > 0:
                    heapq.heappush(heap, (-chance * own, len(parent) + 1, (*parent, rank)))

    offer((), 1.0)
    while heap and len(nodes) < num_choices:
        chance, _, choice = heapq.heappop(heap)
        nodes.append(choice)
        offer(choice, -chance)
    return tuple(sorted(nodes, key=lambda choice: (len(choice), choice)))


def expected_tau(choices: Sequence[Choice], accuracy: Sequence[Sequence[float]]) -> float:
    """Tokens per cycle of a static tree, the bonus token included, were the levels independent of each other."""

    def chance(choice: Choice) -> float:
        return prod(accuracy[depth][rank] if rank < len(accuracy[depth]) else 0.0 for depth, rank in enumerate(choice))

    return 1.0 + sum(map(chance, choices))


def _write(path: Path, choices: Sequence[Choice], method: str) -> None:
    listed = "".join(f"  - {list(choice)}\n" for choice in choices)
    about = f"{len(choices)} drafted nodes for {method}, rebuilt by `calibrate` from this head's own rank accuracies."
    write_text(path, f"# {about}\nchoices:\n{listed}")
