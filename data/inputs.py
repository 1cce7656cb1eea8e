"""The inputs of the data stages: local files or Hub ids, and the digests that identify them.

Nothing here imports torch.
"""

import hashlib
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from aerie.configs.errors import UserError
from aerie.configs.read import as_dict, require_regular
from aerie.configs.schema.heads import TargetConfig
from aerie.configs.schema.recipe import Recipe
from aerie.model.hub import require_target, weights_digest
from aerie.model.storage import FILE, Stage, file_digest, template_path

FEATURES_COMMAND = "aerie features --config RECIPE"  # builds and mends a feature cache
CACHE_INDEX = "index.json"  # of a feature cache; written last
ROW_SUFFIXES = (".json", ".jsonl", ".parquet", ".arrow", ".csv")
# Files that datasets' save_to_disk writes beside the rows.
DATASET_RECORDS = ("dataset_info.json", "dataset_dict.json", "state.json")
# owner/name[:[subset:]split], or owner/name:folder/*
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+((:[\w.-]+){0,2}|:[\w.-]+/\*)")


# the files of a target's directory, as glob patterns
WEIGHT_FILES = ("*.safetensors", "*.bin")
OTHER_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "vocab*",
    "merges.txt",
    "*.model",
    "*.py",
)
DECISIVE_FILE = re.compile(r"config\.json|.*\.(safetensors|bin|py)")  # on these the states depend


# --- digests ------------------------------------------------------------------------------------


def hashed_number(text: str, bits: int) -> int:
    """A number below 2**bits that looks random and depends on the text alone."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest(), "big") >> (256 - bits)


def sampled_digest(path: Path) -> str:
    """16 hex digits over the size, the first MiB (a safetensors header) and even samples."""
    num_bytes = path.stat().st_size
    hasher = hashlib.sha256(str(num_bytes).encode())
    with path.open("rb") as file:
        hasher.update(file.read(2**20))
        for sample in range(256):
            file.seek(num_bytes * sample // 256)
            hasher.update(file.read(4096))
    return hasher.hexdigest()[:16]


def weights_file_digest(path: Path) -> str:
    # Both digests, since the records of existing feature caches hold both.
    return sampled_digest(path) + weights_digest(path)[:16]


# --- the target ---------------------------------------------------------------------------------


def target_inputs(config: TargetConfig) -> dict[str, Any]:
    """What identifies a target; for a local directory, also the digests of its files."""
    require_target(config.path)
    inputs: dict[str, Any] = {
        "path": config.path,
        "revision": config.revision,
        "dtype": config.dtype,
    }
    directory = Path(config.path)
    if directory.is_dir():
        inputs["files"] = {}
        for pattern, digest_of in {
            **dict.fromkeys(OTHER_FILES, file_digest),
            **dict.fromkeys(WEIGHT_FILES, weights_file_digest),
        }.items():
            for path in filter(Path.is_file, directory.glob(pattern)):
                inputs["files"][path.name] = digest_of(path)
    if config.chat_template is not None:
        inputs["chat_template"] = file_digest(template_path(config.chat_template))
    return inputs


# --- conversations ------------------------------------------------------------------------------


def is_here(name: str) -> bool:
    """Whether a source of rows is on this machine; UserError if it can be nowhere."""
    path = Path(name).expanduser()
    is_file_name = name[0] == "." or path.suffix in (*ROW_SUFFIXES, ".txt", ".gz")
    if not path.exists() and (is_file_name or not HUB_NAME.fullmatch(name)):
        raise UserError(
            f"{name}: no such file or directory; "
            "write a data set of the Hub as OWNER/NAME or OWNER/NAME:SPLIT"
        )
    require_regular(path)
    return path.exists()


def row_files(directory: Path) -> list[Path]:
    """The files of rows below a directory, in order, without hidden files and aerie's records."""
    return [
        path
        for path in sorted(directory.rglob("[!.]*"))
        if path.suffix in ROW_SUFFIXES
        and path.name not in (FILE, *DATASET_RECORDS)
        and path.is_file()
    ]


def conversation_inputs(names: Iterable[str]) -> dict[str, str]:
    """A digest of each local file of rows, by path."""
    digests = dict[str, str]()
    for name in filter(is_here, names):
        path = Path(name)
        for file in row_files(path) if path.is_dir() else [path]:
            # weights_digest remembers a large file's digest, by its size and time.
            digests[str(file)] = weights_digest(file)[:16]
    return digests


# --- the feature cache --------------------------------------------------------------------------


def feature_stage(recipe: Recipe) -> Stage:
    features = as_dict(recipe.features)
    # These keys change no state; batch_tokens and server move states by rounding only.
    for key in ("batch_tokens", "mode", "shuffle_shards", "server"):
        features.pop(key, None)
    if features["after_blocks"] is None and not recipe.head.reads_taps:
        features["after_blocks"] = []
    inputs = {
        "target": target_inputs(recipe.target),
        "data": as_dict(recipe.data),
        "conversations": conversation_inputs(recipe.data.conversations),
        "features": features,
    }
    return Stage("features", recipe.root / "features", inputs, is_indexed=True)


def state_inputs(inputs: dict[str, Any]) -> dict[str, Any]:
    """What decides the states of given token ids: weights, dtypes and taps, not text."""
    target = {key: value for key, value in inputs["target"].items() if key != "chat_template"}
    if "files" in target:
        del target["path"]  # the same files at another path give the same states
        decisive = filter(DECISIVE_FILE.fullmatch, target["files"])
        target["files"] = {name: target["files"][name] for name in decisive}
    features = inputs["features"]
    return {"target": target} | {key: features[key] for key in ("after_blocks", "dtype", "storage")}


def changed_since(
    made_of: dict[str, Any], target: dict[str, Any], conversations: dict[str, str]
) -> str | None:
    """A file that changed since a cache was made from these inputs, or None."""
    # Files on another machine count as unchanged; opening the cache refuses another target.
    before = made_of["target"]
    then = {
        **before.get("files", {}),
        **made_of["conversations"],
        "target.chat_template": before.get("chat_template"),
    }
    now = {**conversations, "target.chat_template": target.get("chat_template")}
    if "files" in before and before["path"] == target["path"]:
        now |= target.get("files", {})
    return next((name for name in sorted(now) if then.get(name) != now[name]), None)
