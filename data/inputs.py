"""What a stage is made from, as digests of content. Nothing here imports torch: a whole stage is reported at once."""

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from aerie.configs.errors import UserError
from aerie.configs.read import as_dict
from aerie.configs.schema.data import DataConfig, FeaturesConfig
from aerie.configs.schema.target_and_head import TargetConfig
from aerie.model.storage import FILE, file_digest, template_path

COMMAND = "python data/main.py features --config RECIPE"  # builds and mends a feature cache
INDEX = "index.json"  # of a feature cache; written last
WHOLE_FILE_BYTES = 10**9  # longer files are sampled
SAMPLES, SAMPLE_BYTES = 256, 4096
WEIGHT_FILES = ("*.safetensors", "*.bin")
OTHER_FILES = (
    "config.json generation_config.json tokenizer* special_tokens_map.json added_tokens.json chat_template* vocab* "
    "merges.txt *.model *.py"
).split()
ROW_SUFFIXES = (".json", ".jsonl", ".parquet")


def target_inputs(config: TargetConfig) -> dict[str, Any]:
    """The target's path, dtype and digests of its files; weights are sampled, the rest is read whole.

    A Hub id is its own identity: pin target.revision where it may move.
    """
    inputs: dict[str, Any] = {"path": config.path, "revision": config.revision, "dtype": config.dtype}
    directory = Path(config.path)
    if directory.is_dir():
        others = {path for pattern in OTHER_FILES for path in directory.glob(pattern) if path.is_file()}
        weights = {path for pattern in WEIGHT_FILES for path in directory.glob(pattern)}
        inputs["files"] = {
            **{path.name: _content(path) for path in sorted(others)},
            **{path.name: sampled_digest(path) for path in sorted(weights)},
        }
    elif directory.exists() or config.path.startswith((".", "/", "~")) or config.path.count("/") > 1:
        raise UserError(f"{config.path}: no such target directory (target.path is a local directory or a Hub id)")
    if config.chat_template is not None:
        inputs["chat_template"] = file_digest(template_path(config.chat_template))
    return inputs


def conversation_inputs(config: DataConfig) -> dict[str, str]:
    """A digest for each local conversation file."""
    return named_inputs(config.conversations)


def named_inputs(names: Iterable[str]) -> dict[str, str]:
    """A digest for each local file of rows that is named, or lies below a named directory; Hub names have none."""
    digests = {}
    for name in names:
        path = Path(name)
        if path.is_file():
            digests[name] = _content(path)
        elif path.is_dir():
            files = sorted(file for file in path.rglob("*") if file.suffix in ROW_SUFFIXES and file.is_file())
            digests.update({str(file): _content(file) for file in files if file.name != FILE})
    return digests


def feature_inputs(target: TargetConfig, data: DataConfig, features: FeaturesConfig) -> dict[str, Any]:
    """Everything that the feature cache depends on.

    features.batch_tokens is left out: it moves a state by rounding only, and a run that met a full memory goes on with
    a smaller one. So are features.mode and shuffle_shards, which concern whoever reads the cache.
    """
    section = as_dict(features)
    del section["batch_tokens"], section["mode"], section["shuffle_shards"]
    return {
        "target": target_inputs(target),
        "data": as_dict(data),
        "conversations": conversation_inputs(data),
        "features": section,
    }


def state_inputs(inputs: dict[str, Any]) -> dict[str, Any]:
    """The part of feature_inputs that decides the states of given token ids: weights, dtypes and taps, not text."""
    target = {key: value for key, value in inputs["target"].items() if key != "chat_template"}
    if "files" in target:
        del target["path"]
        deciding = (".safetensors", ".bin", ".py")
        target["files"] = {
            name: value
            for name, value in target["files"].items()
            if name == "config.json" or Path(name).suffix in deciding
        }
    section = inputs["features"]
    return {"target": target, **{key: section[key] for key in ("after_blocks", "dtype", "storage")}}


def changed_since(made_of: dict[str, Any], target: dict[str, Any], conversations: dict[str, str]) -> str | None:
    """The name of a file that changed after a cache was made of `made_of` (feature_inputs then), or None.

    target and conversations are target_inputs and conversation_inputs now. Files that are not here now count as
    unchanged: the cache may have been made on another machine. Another target's files are not compared: opening the
    cache refuses another target.
    """
    before = made_of["target"]
    then = {**before.get("files", {}), **made_of["conversations"], "target.chat_template": before.get("chat_template")}
    now = {**conversations, "target.chat_template": target.get("chat_template")}
    if "files" in before and before["path"] == target["path"]:
        now |= target.get("files", {})
    return next((name for name in sorted(now) if now[name] != then.get(name)), None)


def sampled_digest(path: Path) -> str:
    """16 hex digits over a file's size, its first MiB (a safetensors header) and evenly spaced samples."""
    size = path.stat().st_size
    hasher = hashlib.sha256(str(size).encode())
    with path.open("rb") as handle:
        hasher.update(handle.read(1 << 20))
        for sample in range(SAMPLES):
            handle.seek(size * sample // SAMPLES)
            hasher.update(handle.read(SAMPLE_BYTES))
    return hasher.hexdigest()[:16]


def _content(path: Path) -> str:
    return file_digest(path) if path.stat().st_size <= WHOLE_FILE_BYTES else sampled_digest(path)
