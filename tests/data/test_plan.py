"""Laws of the cache's plan: what it says before anything is written, and what it refuses."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from aerie.configs.errors import UserError
from aerie.configs.schema.data import FeaturesConfig
from aerie.data.chat import Row
from aerie.data.features import CachePlan, estimate, plan_cache, require_space
from aerie.data.tokens import Share, TokenisedData
from tests.data import caches

SIZES = {
    "vocab_size": 320,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "max_position_embeddings": 64,
    "dtype": "bfloat16",
}
DATA = TokenisedData(train=caches.rows(9), held_out=caches.rows(2, seed=1))


def plan(directory: Path, data: TokenisedData = DATA, target_dtype: str = "auto", **features: Any) -> CachePlan:
    sizes = features.pop("sizes", {})
    config, hf_config = FeaturesConfig(**{"shard_tokens": 90, **features}), LlamaConfig(**{**SIZES, **sizes})
    return plan_cache(directory, data, config, "owner/target", hf_config, {"target": {"dtype": target_dtype}})


def test_the_estimate_counts_tokens_taps_and_bytes_and_writes_nothing(tmp_path: Path) -> None:
    made = plan(tmp_path / "features", after_blocks=(0, 3))
    tokens = sum(len(row.input_ids) for row in [*DATA.train, *DATA.held_out])
    assert (made.num_tokens, made.token_bytes) == (tokens, 8 + 3 * 32 * 2)
    assert f"11 rows, {tokens:,} tokens x 200 bytes (bfloat16)" in estimate(made, Share())
    assert not (tmp_path / "features").exists()


@pytest.mark.parametrize(
    ("target_dtype", "stored", "expected"),
    [("auto", None, torch.bfloat16), ("float32", None, torch.float32), ("float32", "float16", torch.float16)],
)
def test_states_are_stored_in_the_targets_dtype_unless_the_recipe_says_otherwise(
    tmp_path: Path, target_dtype: str, stored: str | None, expected: torch.dtype
) -> None:
    assert plan(tmp_path, target_dtype=target_dtype, dtype=stored).storage.dtype == expected


def test_a_cache_that_does_not_fit_on_the_disk_is_refused(tmp_path: Path) -> None:
    require_space(plan(tmp_path), Share())
    with pytest.raises(UserError, match=r"the cache needs .* TiB more \(.* bytes\) and the disk has .* free"):
        require_space(plan(tmp_path, sizes={"hidden_size": 2**40, "head_dim": 8}), Share())


def test_a_tap_that_the_target_does_not_have_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"features.after_blocks: 4 is no tap of owner/target, which has 4 blocks"):
        plan(tmp_path, after_blocks=(1, 4))


def test_a_row_longer_than_the_context_is_refused_by_place(tmp_path: Path) -> None:
    long = TokenisedData(train=[Row([1] * 65, [0] + [1] * 64, "a.jsonl: row 7")], held_out=[])
    with pytest.raises(UserError, match=r"a.jsonl: row 7: 65 tokens, but the context of owner/target is 64"):
        plan(tmp_path, long)


def test_a_token_id_without_an_embedding_row_is_refused_by_place(tmp_path: Path) -> None:
    foreign = TokenisedData(train=[Row([1, 320, 2], [0, 1, 1], "a.jsonl: row 7")], held_out=[])
    with pytest.raises(UserError, match=r"a.jsonl: row 7: token id 320 is outside the vocabulary of owner/target"):
        plan(tmp_path, foreign)
