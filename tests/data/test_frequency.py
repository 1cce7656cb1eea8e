"""Counting supervised tokens, and the draft vocabulary that is keyed to what was counted."""

from array import array
from pathlib import Path

import numpy as np
import pytest
import torch

from aerie.configs.errors import UserError
from aerie.data import tokens as frequency
from aerie.data.chat import end_of_turn_ids
from aerie.data.tokens import TokenisedData, count_tokens, draft_vocabulary, forced_ids
from tests import tiny
from tests.data import caches

ROWS = [([7, 3, 3, 4, 3], [0, 1, 1, 0, 2]), ([4, 9], [0, 1]), ([5], [0])]
ORIGIN = {"rows": "a", "tokenizer": "b"}


def test_only_supervised_tokens_count() -> None:
    assert count_tokens(ROWS, 10).tolist() == [0, 0, 0, 3, 0, 0, 0, 0, 0, 1]
    assert count_tokens([], 4).tolist() == [0, 0, 0, 0]


def test_rows_of_any_array_type_and_any_chunk_count_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = np.random.default_rng(0)
    rows = [(generator.integers(0, 50, n), generator.integers(0, 3, n)) for n in range(1, 40)]
    expected = count_tokens(rows, 50)
    assert expected.sum() == sum(int((turns != 0).sum()) for _, turns in rows)
    assert count_tokens(((array("i", ids), array("i", turns)) for ids, turns in rows), 50).tolist() == expected.tolist()
    tensors = ((torch.from_numpy(ids), torch.from_numpy(turns).int()) for ids, turns in rows)
    monkeypatch.setattr(frequency, "CHUNK_TOKENS", 17)
    assert count_tokens(tensors, 50).tolist() == expected.tolist()


def test_a_cache_is_counted_without_its_states(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = TokenisedData(train=caches.rows(11), held_out=caches.rows(4, seed=1))
    cache = caches.cache(tmp_path / "features", caches.load_target(tmp_path / "target"), data, after_blocks=(1, 3))
    train = cache.split("train")
    expected = count_tokens(((row.input_ids, row.turns) for row in data.train), 320)
    assert len(cache.contents.shards) > 1 and 0 < len(train) < len(cache)
    monkeypatch.setattr("aerie.data.cache._checksum", None)  # reading a state would fail
    assert count_tokens(train.tokens(), 320).tolist() == expected.tolist()


def test_special_and_end_of_turn_tokens_are_always_in() -> None:
    tokenizer = tiny.tokenizer()
    forced = forced_ids(tokenizer, end_of_turn_ids(tokenizer, 300), 320)
    assert forced == {*range(len(tiny.SPECIAL)), 300}
    assert forced_ids(tokenizer, {4000}, 320) == set(range(len(tiny.SPECIAL)))  # the LM head has no row for it
    counted = draft_vocabulary(ROWS, 8, 320, forced, ORIGIN)
    assert counted.vocabulary.t2d[sorted(forced)].all()
    assert set(counted.vocabulary.ids.tolist()) == {
        *forced,
        9,
        5,
    }  # 3 is special and frequent; 5 is the first of the rest


def test_coverage_is_that_of_the_counted_tokens_and_is_stored() -> None:
    counted = draft_vocabulary(ROWS, 1, 10, [], ORIGIN)
    assert counted.vocabulary.ids.tolist() == [3] and counted.coverage == 0.75 and counted.num_tokens == 4
    assert counted.facts() == {"key": counted.key, "size": 1, "coverage": 0.75, "counted_tokens": 4}
    assert "1 of 10 tokens cover 75.00% of 4 supervised tokens" in counted.line()


def test_the_key_follows_data_tokenizer_size_and_forced_ids() -> None:
    keys = {
        draft_vocabulary(ROWS, size, 10, forced, origin).key
        for size, forced, origin in (
            (4, [1], ORIGIN),
            (5, [1], ORIGIN),
            (4, [2], ORIGIN),
            (4, [1], {**ORIGIN, "rows": "c"}),
            (4, [1], {**ORIGIN, "tokenizer": "c"}),
        )
    }
    assert len(keys) == 5
    assert draft_vocabulary(ROWS, 4, 10, {1}, ORIGIN).key == draft_vocabulary(ROWS, 4, 10, [1], ORIGIN).key


def test_without_a_size_it_is_32000_or_the_whole_vocabulary() -> None:
    assert draft_vocabulary(ROWS, None, 10, [], ORIGIN).vocabulary.size == 10
    assert draft_vocabulary(ROWS, None, 40_000, [], ORIGIN).vocabulary.size == 32_000


def test_a_token_that_the_target_lacks_is_refused() -> None:
    with pytest.raises(UserError, match="the data hold token id 9, the target's vocabulary has 8"):
        count_tokens(ROWS, 8)
