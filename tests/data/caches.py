"""Tiny rows, plans and caches for the tests of the feature cache."""

import random
from pathlib import Path
from typing import Any

from accelerate import PartialState

from aerie.configs.schema.data import FeaturesConfig
from aerie.data.chat import TokenRow
from aerie.data.feature_cache import CachePlan, FeatureCache
from aerie.data.features import LocalStates, extract, plan_cache
from aerie.data.tokens import TokenisedData
from aerie.model.target import Target
from aerie.model.target_files import load_config


def rows(count: int, seed: int = 0) -> list[TokenRow]:
    """Rows of 3 to 40 random tokens with one turn each."""
    chance, made = random.Random(seed), []
    for number in range(1, count + 1):
        ids = [chance.randrange(320) for _ in range(chance.randint(3, 40))]
        border = chance.randint(1, len(ids) - 2)
        turn_ids = [0] * border + [1] * (len(ids) - border)
        made.append(TokenRow(ids, turn_ids, f"rows.jsonl: row {number}"))
    return made


def plan(directory: Path, target: Target, data: TokenisedData, **features: Any) -> CachePlan:
    """A plan for a cache with several shards."""
    config = FeaturesConfig(**{"shard_tokens": 120, "batch_tokens": 128, **features})
    origin = {"target": {"dtype": target.recipe.dtype}, "features": list(config.after_blocks or ())}
    return plan_cache(
        directory, data, config, target.recipe.path, load_config(target.recipe), origin
    )


def write(target: Target, plan: CachePlan, **options: Any) -> Any:
    """Writes the cache in this process and returns its index."""
    source = LocalStates(target, plan.after_blocks)
    return extract(source, plan, PartialState(), {"data": {"max_length": 40}}, **options)[0]


def cache(directory: Path, target: Target, data: TokenisedData, **features: Any) -> FeatureCache:
    """Extracts the cache of these rows in this process."""
    write(target, plan(directory, target, data, **features))
    return FeatureCache.open(directory)


def contents(directory: Path) -> dict[str, bytes]:
    """Every file of a cache except the provenance, which contains times."""
    files = [
        path
        for path in sorted(directory.rglob("*"))
        if path.is_file() and path.name != "provenance.json"
    ]
    return {str(path.relative_to(directory)): path.read_bytes() for path in files}
