"""Everything that the trained weights depend on, told without torch."""

from pathlib import Path
from typing import Any

from data.config import DataConfig, FeaturesConfig
from data.index import COMMAND
from data.inputs import conversation_inputs, sampled_digest, target_inputs
from data.provenance import FILE, sound_record
from model.config import HeadConfig, TargetConfig
from model.errors import UserError
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
    online = features.mode == "online"
    without_target = head.kind == "draft_lm" and train.distill is None
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


def cache_record(cache: Path) -> dict[str, Any] | None:
    """What a feature cache's provenance.json says, None without one; UserError where it is damaged."""
    if not (cache / FILE).is_file():
        return None
    if record := sound_record(cache):
        return record
    raise UserError(f"{cache / FILE}: cannot be read; write it anew with: {COMMAND} --overwrite")
