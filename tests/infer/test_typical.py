"""Typical acceptance is Medusa's rule, follows the target's argmax at temperature 0, and is not lossless."""

import math

import torch

from aerie.configs.schema.decode import TypicalConfig
from aerie.infer.decode.tree import Tree, ancestors
from aerie.infer.decode.verify import NOT_LOSSLESS, accept_typical, entropy, rule_of, verify
from tests.infer.laws import sampler

PUBLISHED = TypicalConfig()


def tree(tokens: list[int], parents: list[int], depth: list[int]) -> Tree:
    above, zero = torch.tensor(parents), torch.zeros(len(tokens))
    return Tree(
        torch.tensor(tokens), above, torch.tensor(depth), ancestors(above, 3), zero, zero, max(depth), max(depth)
    )


def rows(*laws: list[float]) -> torch.Tensor:
    return torch.tensor(laws)


def test_the_published_thresholds() -> None:
    assert (PUBLISHED.epsilon, PUBLISHED.delta) == (0.09, 0.3)


def test_a_sure_target_asks_for_epsilon_and_an_unsure_one_for_less() -> None:
    line = tree([0, 1], [0, 0], [0, 1])
    for chance, accepted in ((0.08, 0), (0.1, 1)):
        law = [0.0, chance, 0.62, 0.38 - chance]
        assert 0.3 * math.exp(-float(entropy(torch.tensor(law)))) > 0.1  # epsilon decides
        assert accept_typical(line, rows(law, law), PUBLISHED).accepted == accepted
    flat = [0.05] * 20  # delta exp(-H) = 0.3 / 20
    assert accept_typical(line, rows(flat, flat), PUBLISHED).accepted == 1
    assert accept_typical(line, rows(flat, flat), TypicalConfig(delta=1.1)).accepted == 0


def test_the_longest_typical_path_wins_and_then_the_most_probable() -> None:
    grown = tree([0, 1, 2, 1, 2, 3], [0, 0, 0, 1, 2, 2], [0, 1, 1, 2, 2, 2])
    root = [0.1, 0.5, 0.4, 0.0]
    never, often = [0.9, 0.0, 0.1, 0.0], [0.0, 0.0, 0.45, 0.55]
    verdict = accept_typical(grown, rows(root, never, often, root, never, often), PUBLISHED)
    assert (verdict.path, verdict.tokens, verdict.bonus) == ([0, 2, 5], [2, 3], 3)  # longer beats the likelier sibling
    alone = accept_typical(tree([0, 1, 2], [0, 0, 0], [0, 1, 1]), rows(root, never, often), PUBLISHED)
    assert alone.tokens == [1] and alone.bonus == 0


def test_a_paths_chance_is_the_product_of_its_nodes() -> None:
    grown = tree([0, 1, 2, 1, 1], [0, 0, 0, 1, 2], [0, 1, 1, 2, 2])
    first, second = [0.4, 0.3, 0.3], [0.3, 0.38, 0.32]  # 0.5 x 0.3 is less than 0.4 x 0.38, although 0.8 > 0.78
    verdict = accept_typical(grown, rows([0.1, 0.5, 0.4], first, second, first, second), PUBLISHED)
    assert verdict.path == [0, 2, 4]


def test_a_tree_of_one_is_the_greedy_token() -> None:
    verdict = accept_typical(tree([0], [0], [0]), rows([0.2, 0.5, 0.3]), PUBLISHED)
    assert (verdict.path, verdict.tokens, verdict.bonus) == ([0], [], 1)


def test_an_atypical_parent_takes_its_children_along() -> None:
    grown = tree([0, 1, 2], [0, 0, 1], [0, 1, 2])
    verdict = accept_typical(grown, rows([1.0, 0.0, 0.0], [0.0, 0.0, 1.0], [0.0, 1.0, 0.0]), PUBLISHED)
    assert (verdict.tokens, verdict.bonus) == ([], 0)


def test_it_is_named_not_lossless_and_its_output_has_another_law() -> None:
    hot, cold = sampler(1.0, 1.0), sampler(0.0, 1.0)
    assert rule_of(None, hot, PUBLISHED) == NOT_LOSSLESS and "not lossless" in NOT_LOSSLESS
    assert rule_of(None, cold, PUBLISHED) == "R0"
    line, law = tree([0, 1], [0, 0], [0, 1]), rows([0.5, 0.3, 0.2], [0.5, 0.3, 0.2])
    first = {verify(line, law.log(), hot, PUBLISHED).tokens[0] for _ in range(50)}
    assert first == {1}  # token 1 has probability 0.3, and always comes out


def test_at_temperature_zero_it_changes_nothing() -> None:
    line, logits = tree([0, 1], [0, 0], [0, 1]), rows([0.6, 0.4], [0.3, 0.7])
    assert verify(line, logits, sampler(0.0, 1.0), PUBLISHED).tokens == []
