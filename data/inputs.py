"""What the data stages are made from: local files or Hub ids, and the digests that identify them.

Nothing here imports torch.
"""

import hashlib
import re
from collections.abc import Callable, Iterable
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
ROW_SUFFIXES = (".json", ".jsonl", ".parquet", ".csv")
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+(:[\w.-]+){0,2}")  # owner/name[:[subset:]split]

# sampled digests
WHOLE_FILE_BYTES = 10**9  # longer files are sampled
HEADER_BYTES = 2**20  # of a safetensors file, the header
SAMPLES = 256
SAMPLE_BYTES = 4096

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
DECISIVE_FILE = re.compile(r"config\.json|.*\.(safetensors|bin|py)")  # decides the states
READERS_KEYS = ("batch_tokens", "mode", "shuffle_shards")  # of `features`: they change no state


# --- digests ------------------------------------------------------------------------------------


def hashed_number(text: str, bits: int) -> int:
    """A number of so many bits that looks random and depends on the text alone."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest(), "big") >> (256 - bits)


def sampled_digest(path: Path) -> str:
    """16 hex digits over the size, the first MiB and even samples."""
    num_bytes = path.stat().st_size
    hasher = hashlib.sha256(str(num_bytes).encode())
    with path.open("rb") as file:
        hasher.update(file.read(HEADER_BYTES))
        for sample in range(SAMPLES):
            file.seek(num_bytes * sample // SAMPLES)
            hasher.update(file.read(SAMPLE_BYTES))
    return hasher.hexdigest()[:16]


def sampled_if_large(path: Path) -> str:
    return file_digest(path) if path.stat().st_size <= WHOLE_FILE_BYTES else sampled_digest(path)


def weights_file_digest(path: Path) -> str:
    # Both, since every feature cache has recorded it so.
    return sampled_digest(path) + weights_digest(path)[:16]


# --- the target ---------------------------------------------------------------------------------


def target_inputs(config: TargetConfig) -> dict[str, Any]:
    """What identifies a target: digests of a local one's files; a Hub id needs none."""
    require_target(config.path)
    inputs: dict[str, Any] = {
        "path": config.path,
        "revision": config.revision,
        "dtype": config.dtype,
    }
    directory = Path(config.path)
    if directory.is_dir():
        inputs["files"] = _digests_of(directory, OTHER_FILES, sampled_if_large)
        inputs["files"] |= _digests_of(directory, WEIGHT_FILES, weights_file_digest)
    if config.chat_template is not None:
        inputs["chat_template"] = file_digest(template_path(config.chat_template))
    return inputs


def _digests_of(
    directory: Path, patterns: Iterable[str], digest_of: Callable[[Path], str]
) -> dict[str, str]:
    digests = dict[str, str]()
    for pattern in patterns:
        digests |= {
            path.name: digest_of(path) for path in directory.glob(pattern) if path.is_file()
        }
    return digests


# --- conversations ------------------------------------------------------------------------------


def is_here(name: str) -> bool:
    """Whether a source of rows is on this machine; UserError if it can be nowhere."""
    path = Path(name).expanduser()
    is_file_name = name[0] == "." or path.suffix in (*ROW_SUFFIXES, ".txt", ".gz")
    if not path.exists() and (is_file_name or not HUB_NAME.fullmatch(name)):
        raise UserError(
            f"{name}: no such file or directory; "
            "a data set of the Hub is OWNER/NAME or OWNER/NAME:SPLIT"
        )
    require_regular(path)
    return path.exists()


def row_files(directory: Path) -> list[Path]:
    """The files of rows below a directory, in order; not hidden ones, nor the project's records."""
    return [
        path
        for path in sorted(directory.rglob("*"))
        if path.suffix in ROW_SUFFIXES
        and path.name != FILE
        and path.name[0] != "."
        and path.is_file()
    ]


def conversation_inputs(
    names: Iterable[str], digest_of: Callable[[Path], str] = sampled_if_large
) -> dict[str, str]:
    """A digest of each local file of rows, by path."""
    digests = dict[str, str]()
    for name in names:
        if Path(name).is_file():
            digests[name] = digest_of(Path(name))
        elif Path(name).is_dir():
            digests |= {str(path): digest_of(path) for path in row_files(Path(name))}
        else:
            is_here(name)
    return digests


# --- the feature cache --------------------------------------------------------------------------


def feature_stage(recipe: Recipe) -> Stage:
    features = as_dict(recipe.features)
    for key in READERS_KEYS:  # batch_tokens moves a state by rounding only
        del features[key]
    if features["after_blocks"] is None and not recipe.head.reads_taps:
        features["after_blocks"] = []
    inputs = {
        "target": target_inputs(recipe.target),
        "data": as_dict(recipe.data),
        "conversations": conversation_inputs(recipe.data.conversations),
        "features": features,
    }
    return Stage("features", recipe.paths.features, inputs, is_indexed=True)


def state_inputs(inputs: dict[str, Any]) -> dict[str, Any]:
    """What decides the states of given token ids: weights, dtypes and taps, not text."""
    target = {key: value for key, value in inputs["target"].items() if key != "chat_template"}
    if "files" in target:
        del target["path"]  # the same files at another path give the same states
        target["files"] = {
            name: digest
            for name, digest in target["files"].items()
            if DECISIVE_FILE.fullmatch(name)
        }
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
