"""Everything that the trained weights depend on, told without torch."""

from pathlib import Path
from typing import Any

from data.config import DataConfig, FeaturesConfig
from data.index import COMMAND, read_index
from data.inputs import conversation_inputs, sampled_digest, target_inputs
from data.provenance import FILE, sound_record
from model.config import HeadConfig, TargetConfig
from model.errors import UserError
from model.files import digest
from model.hub import head_directory
from model.recipe import as_dict
from train.config import TrainConfig

LOGGING_ONLY = ("log_every", "save_every", "keep_last", "keep_best", "trackers", "profile_steps")


def train_inputs(
    head: HeadConfig,
    target: TargetConfig,
    data: DataConfig,
    features: FeaturesConfig,
    train: TrainConfig,
    cache: Path,
) -> dict[str, Any]:
    """JSON-ready; cache is the feature cache's directory, which stands for its data where training reads it."""
    section = {name: value for name, value in as_dict(train).items() if name not in LOGGING_ONLY}
    inputs: dict[str, Any] = {"target": target_inputs(target), "head": as_dict(head), "train": section}
    online, without_target = features.mode == "online", _is_without_target(head, train)
    if without_target or online:
        inputs |= {"data": as_dict(data), "conversations": conversation_inputs(data)}
    if online:
        asked = as_dict(features)
        inputs["features"] = {name: asked[name] for name in ("mode", "after_blocks", "dtype")}
    elif not without_target:
        made = cache_record(cache)
        inputs["features"] = None if made is None else made["inputs_digest"]
        if features.after_blocks is not None:
            inputs["after_blocks"] = list(features.after_blocks)
        if features.shuffle_shards is not None:
            inputs["shuffle_shards"] = features.shuffle_shards
    if head.init_from is not None:
        place = head_directory(head.init_from)
        files = sorted(path for kind in ("config.json", "*.safetensors", "*.bin") for path in place.glob(kind))
        inputs["init_from"] = {path.name: sampled_digest(path) for path in files}
    return inputs


def reads_cache(head: HeadConfig, features: FeaturesConfig, train: TrainConfig) -> bool:
    """Whether training reads the target's states from a feature cache."""
    return features.mode != "online" and not _is_without_target(head, train)


def cache_states(cache: Path) -> str | None:
    """A digest of every bit of the feature cache's rows; None of a cache of before there were checksums.

    Caches that were made of the same inputs may differ in it by rounding.
    """
    checksums = [shard.checksum for shard in read_index(cache, sizes=False).shards]
    return None if None in checksums else digest(checksums)


def cache_record(cache: Path) -> dict[str, Any] | None:
    """What a feature cache's provenance.json says, None without one; UserError where it is damaged."""
    if not (cache / FILE).is_file():
        return None
    if record := sound_record(cache):
        return record
    raise UserError(f"{cache / FILE}: cannot be read; write it anew with: {COMMAND} --overwrite")


def _is_without_target(head: HeadConfig, train: TrainConfig) -> bool:
    return head.kind == "draft_lm" and train.distill is None
