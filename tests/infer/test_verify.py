"""Verification: exact laws by enumeration, and the walk."""

import contextlib
import functools
import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor
from torch.nn import functional as F

from aerie.configs.schema.decode import (
    ConfidenceConfig,
    DynamicConfig,
    EntropyConfig,
    ExactConfig,
    MarginalGainConfig,
    ProbabilitySumConfig,
    StaticConfig,
    VoteConfig,
)
from aerie.infer.decode.sampling import Sampler, draw
from aerie.infer.decode.shape import make_shape
from aerie.infer.decode.tree import DraftLaws, Tree
from aerie.infer.decode.verify import (
    Verdict,
    acceptance,
    judge,
    read,
    walk,
)
from tests.infer.laws import SETTINGS, TableDrafter, sampler, tree_of

VOCAB = 5


def descent(tree: Tree, choice: Tensor) -> list[int]:
    """The path that follows the target's choices, node after node."""
    path = [0]
    parents = tree.parents.tolist()
    tokens = tree.tokens.tolist()
    rides = [False] * len(tree) if tree.passengers is None else tree.passengers.tolist()
    for node in range(1, len(tree)):
        if parents[node] == path[-1] and tokens[node] == int(choice[path[-1]]) and not rides[node]:
            path.append(node)
    return path


def random_tree(dice: torch.Generator, rule: Any) -> tuple[Tree, Tensor]:
    """A ragged tree of drawn children (R1: a chain) and the target's logits."""
    q, parents, depth, tokens = [], [0], [0], [0]
    for node in itertools.count():
        if node == len(parents) or len(parents) > 14:
            break
        q.append((1.5 * torch.randn(VOCAB, generator=dice)).softmax(-1))
        most = 1 if rule == "R1" else int(torch.randint(0 if node else 1, 4, (1,), generator=dice))
        if depth[node] < 3 and most:
            tokens += q[-1].multinomial(most, generator=dice).tolist()
            parents += [node] * most
            depth += [depth[node] + 1] * most
    laws = torch.cat([torch.stack(q), torch.zeros(len(parents) - len(q), VOCAB)])
    grown = replace(tree_of(tokens, parents), draft_laws=DraftLaws(rule, laws))
    return grown, torch.randn(len(parents), VOCAB, generator=dice)


@pytest.mark.parametrize("riding", [False, True])
def test_walk(riding: bool) -> None:
    """Random trees, with and without passengers, which look like children but are not."""
    lengths = set()
    for seed in range(300):
        tree, logits = random_tree(torch.Generator().manual_seed(seed), "R3")
        rides = torch.arange(len(tree)) % 3 == 2
        tree = replace(tree, passengers=rides if riding else None, draft_laws=None)
        choice = logits.argmax(-1)
        path = descent(tree, choice)
        verdict = read(walk(tree, choice), len(tree))
        assert verdict == Verdict(path, tree.tokens[path[1:]].tolist(), int(choice[path[-1]]))
        lengths.add(len(path))
    assert lengths == {1, 2, 3, 4}


def textbook(grown: Tree, p: Tensor, uniform: dict[int, list[float]]) -> tuple[list[int], Tensor]:
    """The path and the law of the bonus token, child after child, by these uniform numbers."""
    path, node = [0], 0
    while True:
        left, q = p[node].double(), grown.draft_laws.laws[node].double()
        children = [n for n in range(1, len(grown)) if int(grown.parents[n]) == node]
        for child, u in zip(children, uniform.get(node, []), strict=False):
            token = int(grown.tokens[child])
            if u < left[token] / q[token]:
                node = child
                path.append(child)
                break
            left = (left - q).clamp(min=0)
            left = left / left.sum()
            q[token] = 0.0
            q = q / q.sum()
        else:
            return path, left


@pytest.mark.parametrize(("rule", "on_host"), [("R1", True), ("R3", True), ("R3", False)])
def test_textbook(rule: str, on_host: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ragged trees: all nodes at once against child after child, with the same uniform numbers.

    on_host: whether the host knows the families, as in static trees.
    """
    bonus: list[Tensor] = []

    def remembering(law: Tensor, generator: torch.Generator) -> Tensor:
        bonus.append(law[0] / law[0].sum())
        return draw(law, generator)

    monkeypatch.setattr("aerie.infer.decode.verify.draw", remembering)
    lengths = set()
    for seed in range(150):
        grown, logits = random_tree(torch.Generator().manual_seed(seed), rule)
        families = Counter(grown.parents.tolist()[1:])
        inner = sorted(families, key=lambda parent: -families[parent])
        width = max(families.values())
        if not on_host:
            above = grown.parents.tolist()
            ranks = torch.tensor([above[1:node].count(above[node]) for node in range(len(above))])
            grown = replace(grown, draft_laws=replace(grown.draft_laws, ranks=ranks, width=3))
            inner = sorted(range(len(above)), key=lambda node: -families[node])[:-1]
            width = min(3, len(above) - 1)
        table = torch.rand(len(inner), width, generator=torch.Generator().manual_seed(seed))
        path, law = textbook(
            grown, logits.softmax(-1), dict(zip(inner, table.tolist(), strict=True))
        )
        verdict = read(judge(grown, logits, sampler(1.0, 1.0, seed)), len(grown))
        assert verdict.path == path
        assert verdict.tokens == grown.tokens[path[1:]].tolist()
        torch.testing.assert_close(bonus[-1].double(), law, atol=1e-5, rtol=0)
        assert law[verdict.bonus] > 0
        lengths.add(len(path))
    assert lengths == {1, 2, 3, 4}


Text = tuple[int, ...]


class Small(TableDrafter):
    """Laws over three tokens; narrow: below the first level the draft has only two of them."""

    def __init__(self, seed: int, narrow: bool = False) -> None:
        super().__init__(seed)
        self.narrow = narrow

    def law(self, path: Text, of_target: bool = False) -> Tensor:
        seed = (
            sum(31**at * (token + 2) for at, token in enumerate(path))
            + 7919 * (1 + self.seed)
            + of_target
        )
        logits = 1.5 * torch.randn(3, generator=torch.Generator().manual_seed(seed))
        if self.narrow and path and not of_target:
            logits[path[-1]] = float("-inf")
        return logits.log_softmax(-1)


def every_tree(
    config: DynamicConfig, chosen: Sampler, drafter: Small
) -> Iterator[tuple[float, Tree]]:
    """Yields every outcome of the draws below all nodes, with its probability."""
    waiting: list[tuple[tuple[Any, ...], float]] = [((), 1.0)]
    while waiting:
        script, chance = waiting.pop()
        orders = iter(script)

        def scripted(
            laws: Tensor,
            k: int,
            _: Any,
            known: Any = orders,
            script: Any = script,
            at: float = chance,
        ) -> Any:
            if (order := next(known, None)) is not None:
                return torch.tensor(order)[:, :k], torch.arange(k) >= (laws > 0).sum(
                    -1, keepdim=True
                )
            for order in itertools.product(itertools.permutations(range(3)), repeat=len(laws)):
                share = 1.0
                for row, tokens in zip(laws.double().tolist(), order, strict=True):
                    for rank, token in enumerate(tokens):
                        left = sum(row[later] for later in tokens[rank:])
                        if left > 0:
                            share *= row[token] / left
                        else:  # of the orders of missing tokens one counts
                            share *= list(tokens[rank:]) == sorted(tokens[rank:])
                if share > 0:
                    waiting.append(((*script, order), at * share))
            raise LookupError

        with pytest.MonkeyPatch.context() as patch, contextlib.suppress(LookupError):
            patch.setattr("aerie.infer.decode.sampling.distinct_draws", scripted)
            yield chance, make_shape(config).grow(drafter, torch.tensor([0]), config.levels, chosen)


@functools.cache
def law_of(drafter: Small, chosen: Sampler, path: Text = ()) -> Counter[Text]:
    """The target's law of what is left of three tokens."""
    return written(None, drafter, chosen, 0, path)


def written(
    tree: Tree | None, drafter: Small, chosen: Sampler, node: int = 0, path: Text = ()
) -> Counter[Text]:
    """The law of the first three tokens by recursive rejection; without a tree the target's."""
    if len(path) == 3:
        return Counter({path: 1})
    law, reached = Counter[Text](), 1.0
    left = chosen.law(drafter.law(path, of_target=True)[None])[0].double()
    if tree is not None and tree.draft_laws is not None:
        q = tree.draft_laws.over(3)[node].double()  # a copy
        children = (tree.parents == node) & (tree.depth > 0) & tree.survival.isfinite()
        for child in children.nonzero()[:, 0].tolist():
            token = int(tree.tokens[child])
            accepted = min(1.0, float(left[token] / q[token]))
            for text, share in written(tree, drafter, chosen, child, (*path, token)).items():
                law[text] += reached * accepted * share
            reached *= 1 - accepted
            left, q[token] = (left - q).clamp(min=0), 0.0
            left, q = (law / law.sum() if law.sum() > 0 else law for law in (left, q))
    for token, chance in enumerate((reached * left).tolist()):
        if chance > 0:
            for text, share in law_of(drafter, chosen, (*path, token)).items():
                law[text] += chance * share
    return law


def misfit(
    config: DynamicConfig,
    narrow: bool = False,
    temperature: float = 1.0,
    top_p: float = 1.0,
    seed: int = 0,
) -> float:
    """Pearson's statistic of 100,000 texts that have the law that is written exactly."""
    chosen, drafter, law = sampler(temperature, top_p), Small(seed, narrow), Counter[Text]()
    for chance, tree in every_tree(config, chosen, drafter):
        for text, share in written(tree, drafter, chosen).items():
            law[text] += chance * share
    wanted = law_of(drafter, chosen)
    return 1e5 * sum((law[text] - chance) ** 2 / chance for text, chance in wanted.items())


drawn = functools.partial(DynamicConfig, k=2, children="sampled")


@pytest.mark.parametrize(
    "sizes", [{"nodes": 3}, {"nodes": 4}, {"nodes": 6, "k": 3}, {"rerank": False}]
)
@pytest.mark.parametrize(("temperature", "top_p"), SETTINGS)
def test_drawn_trees_exact_law(sizes: Any, temperature: float, top_p: float) -> None:
    """Drawn trees write the law of the target: all draws of children, enumerated.

    There are fewer draws if the processors leave fewer tokens.
    """
    assert misfit(drawn(levels=2, **sizes), False, temperature, top_p) < 1e-3


@pytest.mark.parametrize(
    "rule",
    [
        ProbabilitySumConfig(checks=(2,), threshold=0.6244),
        ProbabilitySumConfig(checks=(1, 2), threshold=0.6),
        VoteConfig(signals=("probability",), probability_threshold=0.6),
        MarginalGainConfig(threshold=0.6),
        ConfidenceConfig(threshold=0.77),
        EntropyConfig(h=0.3),
        ExactConfig(),
    ],
)
def test_stop_rules_exact_law(rule: Any) -> None:
    """Whatever rule ends drawn trees, they write the law of the target."""
    config = drawn(levels=3, nodes=3 if isinstance(rule, ExactConfig) else 4, stop=rule)
    assert misfit(config, narrow=True, seed=1) < 1e-3
    levels = {
        tree.levels for _, tree in every_tree(config, sampler(1.0, 1.0), Small(1, narrow=True))
    }
    if isinstance(rule, ExactConfig):
        assert levels == {2}
    assert len(levels) == 2 or isinstance(rule, EntropyConfig | ConfidenceConfig | ExactConfig)


def test_missing_children() -> None:
    """The draft is sure of one token, the target takes another: nine of ten draws are missing."""
    first = torch.zeros(1, dtype=torch.long)
    sure = torch.full((20,), float("-inf")).index_fill(0, first, 0.0)
    drafter = TableDrafter(0)
    drafter.law = lambda _: sure  # type: ignore[method-assign]
    grown = make_shape(drawn(levels=2, nodes=20, k=10)).grow(drafter, first, 2, sampler(1.0, 1.0))
    p = F.one_hot(torch.ones(len(grown), dtype=torch.long), 20).float()
    assert (acceptance(grown, p) == 0).all()


def test_tiny_chances() -> None:
    """A refusal bends nothing if all but the first token have a chance of 1e-38."""
    drafter, law = TableDrafter(0), torch.tensor([8.73, 0.0, 0.05, -0.05]).log_softmax(-1)
    drafter.law = lambda _: law  # type: ignore[method-assign]
    cool, shape = (
        sampler(0.1, 1.0, 5),
        make_shape(StaticConfig(choices=((0,), (1,)), children="sampled")),
    )
    logits, first = torch.tensor([0.1, 0.0, 0.1, 0.05]), torch.zeros(4)
    for _ in range(2000):
        grown = shape.grow(drafter, torch.tensor([3]), 1, cool)
        verdict = read(judge(grown, logits.expand(len(grown), -1), cool), len(grown))
        first[(*verdict.tokens, verdict.bonus)[0]] += 1
    assert chisquare(first.double(), 2000 * (10 * logits).double().softmax(-1)).pvalue > 1e-3
