"""Guesses become a tree that verification can walk: shared beginnings once, passengers beside."""

import math

import torch

from aerie.infer.decode.drafters.lookup import Trie
from aerie.infer.decode.verify import walk
from tests.infer.test_shape import check_connected


def test_guesses_share_their_beginning_and_siblings_differ() -> None:
    trie = Trie()
    for guess in ((1, 2, 3), (1, 2, 4), (5, 2, 3), (1, 2, 3)):
        trie.guess(guess)
    tree, places = trie.tree(torch.tensor([9]))
    check_connected(tree)
    assert tree.tokens.tolist() == [9, 1, 5, 2, 2, 3, 4, 3]
    assert tree.depth.tolist() == [0, 1, 1, 2, 2, 3, 3, 3] and tree.levels == 3
    assert tree.passengers is None and len(places) == 8
    siblings = list(zip(tree.parents.tolist()[1:], tree.tokens.tolist()[1:], strict=True))
    assert len(set(siblings)) == len(siblings)


def test_confidence_is_the_share_of_the_parents_guesses() -> None:
    trie = Trie()
    for guess in ((1, 2), (1, 3), (4, 2)):
        trie.guess(guess)
    tree, _ = trie.tree(torch.tensor([9]))  # 9; 1, 4; 2, 3, 2
    third, half = math.log(1 / 3), math.log(1 / 2)
    torch.testing.assert_close(tree.confidence, torch.tensor([0.0, third - 2 * half + half, third, half, half, 0.0]))
    torch.testing.assert_close(tree.survival, (tree.mask.float() @ tree.confidence))


def test_a_passenger_is_never_accepted_though_its_token_is_right() -> None:
    trie = Trie()
    near = trie.ride(1, 0)
    far = trie.ride(2, near)
    trie.guess((3, 4))
    tree, places = trie.tree(torch.tensor([9]))
    check_connected(tree)
    assert tree.passengers is not None and tree.levels == 2
    assert [int(tree.tokens[places[node]]) for node in (near, far)] == [1, 2]
    assert tree.passengers.tolist() == [place in (places[near], places[far]) for place in range(5)]
    agreeing = walk(tree, torch.full((5,), 1))
    assert agreeing.tokens == [] and agreeing.bonus == 1
    choice = torch.zeros(5, dtype=torch.long)
    choice[0] = 3
    choice[tree.tokens == 3] = 4
    assert walk(tree, choice).tokens == [3, 4]
