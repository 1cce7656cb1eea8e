"""The confidence rule is transformers'."""

import pytest
import torch
from transformers.generation.stopping_criteria import ConfidenceCriteria

from aerie.configs.schema.decode import ChainConfig, ConfidenceConfig, DynamicConfig
from aerie.infer.decode.shape import make_shape
from tests.infer.test_shape import GREEDY, TableDrafter


@pytest.mark.parametrize("threshold", [0.0, 0.4, 0.6, 0.8, 1.0])
def test_a_chain_ends_with_the_first_token_that_transformers_doubts(threshold: float) -> None:
    criterion, lengths = ConfidenceCriteria(threshold), set()
    for seed in range(12):
        drafter = TableDrafter(seed, sharpness=4.0)
        config = ChainConfig(levels=6, stop=ConfidenceConfig(threshold=threshold))
        tree = make_shape(config).grow(drafter, torch.tensor([2]), 6, GREEDY)
        path: tuple[int, ...] = ()
        for token in tree.tokens[1:].tolist():
            doubted = criterion(torch.tensor([[0, token]]), (drafter.law(path)[None],))
            path = (*path, token)
            assert doubted == (len(path) == tree.levels < 6) or len(path) == 6
        lengths.add(tree.levels)
        assert tree.draft_forwards == drafter.calls == tree.levels
    assert threshold in (0.0, 1.0) or len(lengths) > 2
    assert threshold > 0.0 or lengths == {6}
    assert threshold < 1.0 or lengths == {1}


def test_on_a_tree_the_best_ranked_node_is_asked() -> None:
    for seed in range(6):
        drafter = TableDrafter(seed)
        config = DynamicConfig(levels=6, k=3, nodes=19, stop=ConfidenceConfig(threshold=0.5))
        tree = make_shape(config).grow(drafter, torch.tensor([2]), 6, GREEDY)
        for depth in range(1, tree.levels + 1):
            nodes = [node for node in range(1, len(tree)) if int(tree.depth[node]) == depth]
            if not nodes:
                continue  # pruned
            best = max(nodes, key=lambda node: float(tree.survival[node]))
            assert (float(tree.confidence[best].exp()) < 0.5) == (depth == tree.levels) or depth == 6
