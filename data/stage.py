"""The inputs of a stage, a job's share of it, and its progress bar; nothing here imports torch."""

import hashlib
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any, TypeVar

from tqdm import tqdm

from aerie.configs.errors import UserError, rank
from aerie.configs.read import as_dict, require_regular
from aerie.configs.schema.heads import TargetConfig
from aerie.configs.schema.recipe import Recipe
from aerie.model.hub import require_target, weights_digest
from aerie.model.storage import FILE, Stage, file_digest, template_path

T = TypeVar("T")
COMMAND = "aerie features --config RECIPE"  # builds and mends a feature cache
INDEX = "index.json"  # of a feature cache; written last
WHOLE_FILE_BYTES = 10**9  # longer files are sampled
SAMPLES, SAMPLE_BYTES = 256, 4096
OTHER_FILES = "config.json generation_config.json tokenizer* special_tokens_map.json added_tokens.json".split()
OTHER_FILES += "chat_template* vocab* merges.txt *.model *.py".split()
ROW_SUFFIXES = (".json", ".jsonl", ".parquet", ".csv")
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+(:[\w.-]+){0,2}")
LINE_SECONDS = 10.0  # between two progress lines of a log file
LINE = (
    "{desc}: {percentage:3.0f}% of {total_fmt}{unit}, {rate_noinv_fmt}, {remaining} left{postfix}"
)
OPEN_LINE = "{desc}: {n_fmt}{unit}, {rate_noinv_fmt}"


def size(num_bytes: float) -> str:
    power = 3 if num_bytes >= 2**30 else 2 if num_bytes >= 2**20 else 1
    return f"{num_bytes / 2 ** (10 * power):,.1f} {' KMG'[power]}iB"


def sampled_if_large(path: Path) -> str:
    return file_digest(path) if path.stat().st_size <= WHOLE_FILE_BYTES else sampled_digest(path)


def target_inputs(config: TargetConfig) -> dict[str, Any]:
    """What identifies a target: digests of a local one's files; a Hub id needs none."""
    inputs: dict[str, Any] = {
        "path": config.path,
        "revision": config.revision,
        "dtype": config.dtype,
    }
    directory = Path(config.path)
    require_target(config.path)
    if directory.is_dir():
        # both digests: so all feature caches have recorded it
        weights = dict.fromkeys(
            ("*.safetensors", "*.bin"), lambda one: sampled_digest(one) + weights_digest(one)[:16]
        )
        patterns = dict.fromkeys(OTHER_FILES, sampled_if_large) | weights
        found = [
            (path, read) for pattern, read in patterns.items() for path in directory.glob(pattern)
        ]
        inputs["files"] = {path.name: read(path) for path, read in found if path.is_file()}
    if config.chat_template is not None:
        inputs["chat_template"] = file_digest(template_path(config.chat_template))
    return inputs


def is_here(name: str) -> bool:
    """Whether a source of rows is on this machine; UserError if not, and it cannot be a Hub data set."""
    path = Path(name).expanduser()
    is_file = name[0] == "." or path.suffix in (*ROW_SUFFIXES, ".txt", ".gz")
    if not path.exists() and (is_file or not HUB_NAME.fullmatch(name)):
        raise UserError(
            f"{name}: no such file or directory; a data set of the Hub is OWNER/NAME or OWNER/NAME:SPLIT"
        )
    require_regular(path)
    return path.exists()


def row_files(directory: Path) -> list[Path]:
    files = [
        path
        for path in sorted(directory.rglob("*"))
        if path.suffix in ROW_SUFFIXES and path.is_file()
    ]
    return [path for path in files if path.name != FILE and not path.name.startswith(".")]


def conversation_inputs(
    names: Iterable[str], read: Callable[[Path], str] = sampled_if_large
) -> dict[str, str]:
    digests = {}
    for name in names:
        if Path(name).is_file():
            digests[name] = read(Path(name))
        elif Path(name).is_dir():
            digests |= {str(path): read(path) for path in row_files(Path(name))}
        else:
            is_here(name)
    return digests


def feature_stage(recipe: Recipe) -> Stage:
    # batch_tokens moves a state by rounding only; the others concern readers.
    readers = ("batch_tokens", "mode", "shuffle_shards")
    features = {key: value for key, value in as_dict(recipe.features).items() if key not in readers}
    if features["after_blocks"] is None and not recipe.head.reads_taps:
        features["after_blocks"] = []
    data = {
        "data": as_dict(recipe.data),
        "conversations": conversation_inputs(recipe.data.conversations),
    }
    inputs = {"target": target_inputs(recipe.target), **data, "features": features}
    return Stage("features", recipe.paths.features, inputs, is_indexed=True)


def state_inputs(inputs: dict[str, Any]) -> dict[str, Any]:
    """What decides the states of given token ids: weights, dtypes and taps, not text."""
    target = {key: value for key, value in inputs["target"].items() if key != "chat_template"}
    if "files" in target:
        del target["path"]
        decisive = re.compile(r"config\.json|.*\.(safetensors|bin|py)")
        target["files"] = {
            name: value for name, value in target["files"].items() if decisive.fullmatch(name)
        }
    return {
        "target": target,
        **{key: inputs["features"][key] for key in ("after_blocks", "dtype", "storage")},
    }


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


def sampled_digest(path: Path) -> str:
    """16 hex digits over size, first MiB (a safetensors header) and even samples."""
    size = path.stat().st_size
    hasher = hashlib.sha256(str(size).encode())
    with path.open("rb") as handle:
        hasher.update(handle.read(1 << 20))
        for sample in range(SAMPLES):
            handle.seek(size * sample // SAMPLES)
            hasher.update(handle.read(SAMPLE_BYTES))
    return hasher.hexdigest()[:16]


@dataclass(frozen=True)
class Share:
    """Every count-th item, from the index-th on (counted from 1)."""

    index: int = 1
    count: int = 1

    @classmethod
    def of(cls, text: str) -> "Share":
        first, _, second = text.partition("/")
        if not (first.isdecimal() and second.isdecimal() and 1 <= int(first) <= int(second)):
            raise UserError(f"--shard: {text} is no share; write i/n with i from 1 to n")
        return cls(int(first), int(second))

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"

    def part(self, items: Sequence[T]) -> Sequence[T]:
        return items[self.index - 1 :: self.count]


ALL = Share()


class _Lines(StringIO):
    def write(self, text: str) -> int:
        line = text.replace("\r", "").strip()
        return sys.stderr.write(line and f"{line}\n")


def bar(total: int | None, unit: str, description: str, done: int = 0) -> "tqdm[Any]":
    """The first process's bar on standard error; in a log, lines. It is cleared if it has no total.

    `done` does not count in the rate.
    """
    options: dict[str, Any] = {"file": sys.stderr, "dynamic_ncols": True}
    if not sys.stderr.isatty():
        form = OPEN_LINE if total is None else LINE
        options = {"file": _Lines(), "bar_format": form, "mininterval": LINE_SECONDS, "delay": 1e-9}
    options |= {
        "unit": f" {unit}",
        "unit_scale": total is None or total >= 1000,
        "leave": total is not None,
    }
    return tqdm(desc=description, total=total, initial=done, disable=rank() != 0, **options)
