"""The three stages that are killed, on a tiny target: how each begins, how far it is, and where two runs differ."""

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from aerie.data.cache import FeatureCache
from tests import tiny

ANSWER_CLOCKS = ("ms", "cycle_ms", "peak_memory_gib", "t_draft", "t_verify")  # of a record and of a cycle's line
STEP_CLOCKS = ("data_wait_share", "tokens_per_s", "step_ms", "peak_memory_gib")
PROMPTS, STEPS, SAVE_EVERY = 7, 72, 6


class Stage(Protocol):
    """A command of the pipeline, and the files that it leaves in a run's directory."""

    @property
    def name(self) -> str: ...

    @property
    def undisturbed(self) -> Path:
        """The run's directory in which no stage was ever killed."""

    def words(self, run: Path) -> list[str]:
        """The script and its arguments."""

    def begin(self, run: Path) -> None:
        """Puts there what the stages before have left."""

    def written(self, run: Path) -> float:
        """The share of what it writes one after the other that lies there whole, 0 to 1."""

    def is_whole(self, run: Path) -> bool:
        """Whether it has said that nothing is left to do."""

    def glance(self, run: Path) -> None:
        """Keeps what a later moment of the run will remove."""

    def differences(self, run: Path) -> list[str]:
        """Where what lies there is not what the undisturbed run has left."""


def prepare(root: Path) -> Path:
    """A directory with a target, conversations, questions and a recipe, which is returned."""
    tiny.target(root / "target")
    tiny.write_conversations(root / "train.jsonl", 1400)
    questions = [
        {"question_id": n, "category": "count", "turns": [f"Please count {n + 2} boats."]} for n in range(PROMPTS)
    ]
    (root / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in questions), encoding="utf-8")
    tree = {"levels": 3, "k": 3, "nodes": 8}
    values: dict[str, Any] = {
        "run": str(root / "undisturbed"),
        "threads": 1,
        "target": {"path": str(root / "target"), "dtype": "float32"},
        "data": {"conversations": [str(root / "train.jsonl")], "max_length": 128, "held_out": 0.1},
        "features": {"batch_tokens": 1024, "shard_tokens": 1024},
        "tree": tree,
        "train": {
            "max_steps": STEPS,
            "batch_size": 4,
            "accumulation": 2,
            "learning_rate": 1e-3,
            "warmup_steps": 8,
            "log_every": 1,
            "eval_every": 3 * SAVE_EVERY,
            "eval_conversations": 24,
            "save_every": SAVE_EVERY,
            "measure_prompts": 4,
            "measure_new_tokens": 16,
        },
        "bench": {
            "prompts": {"path": str(root / "questions.jsonl"), "num_prompts": PROMPTS, "max_new_tokens": 20},
            "warmup_prompts": 1,
            "cycles": True,
            "sampling": [{"temperature": 0.0}, {"temperature": 1.0}],
            "rows": [
                {"method": "vanilla"},
                {"method": "eagle2", "tree": tree},
                {"method": "eagle-chain", "tree": {"levels": 3}},
            ],
        },
    }
    return tiny.recipe(root / "recipe.yaml", values)


@dataclass(frozen=True)
class Features:
    """`data/main.py features`: the cache must be the same, byte for byte."""

    recipe: Path
    undisturbed: Path
    name: str = "features"

    def words(self, run: Path) -> list[str]:
        return ["data/main.py", "features", "--config", str(self.recipe), "--run", str(run)]

    def begin(self, run: Path) -> None:
        run.mkdir()

    def written(self, run: Path) -> float:
        return _count(run / "features", "shard-*") / max(_count(self.undisturbed / "features", "shard-*"), 1)

    def is_whole(self, run: Path) -> bool:
        return (run / "features/provenance.json").is_file()

    def glance(self, run: Path) -> None:
        pass

    def differences(self, run: Path) -> list[str]:
        found = _listing(self.undisturbed / "features", run / "features")
        shards = sorted((self.undisturbed / "features").glob("shard-*"))
        for name in ("index.json", *(path.name for path in shards)):
            found += _bytes(self.undisturbed / "features" / name, run / "features" / name)
        if found:
            return found
        pairs = zip(FeatureCache.open(self.undisturbed / "features"), FeatureCache.open(run / "features"), strict=True)
        for number, (one, other) in enumerate(pairs):
            if not (one.number == other.number and _same(_tensors(one), _tensors(other))):
                found.append(f"row {number}")
        return found


@dataclass(frozen=True)
class Training:
    """`train/main.py`: the weights kept, each state that was ever saved, and the losses must be the same bits."""

    recipe: Path
    undisturbed: Path
    name: str = "training"

    def words(self, run: Path) -> list[str]:
        return ["train/main.py", "--config", str(self.recipe), "--run", str(run)]

    def begin(self, run: Path) -> None:
        run.mkdir()
        (run / "features").symlink_to(self.undisturbed / "features")

    def written(self, run: Path) -> float:
        return max((_step(path) for path in _states(run)), default=0) / _last_saved()

    def is_whole(self, run: Path) -> bool:
        return (run / "heads/eagle1/provenance.json").is_file()

    def glance(self, run: Path) -> None:
        """Links each state under another name, as a finished run forgets them all."""
        for state in _states(run):
            kept = run / "seen" / state.name
            if not kept.exists():
                _link(state, kept)

    def differences(self, run: Path) -> list[str]:
        head = "heads/eagle1"
        found = _listing(self.undisturbed / head, run / head)
        found += _bytes(self.undisturbed / head / "model.safetensors", run / head / "model.safetensors")
        found += _bytes(self.undisturbed / head / "config.json", run / head / "config.json")
        for state in sorted((run / "seen").glob("step-*")):
            own = self.undisturbed / "seen" / state.name
            if not own.exists():  # the undisturbed run was looked at too seldom
                continue
            for name in ("model.safetensors", "optimizer.bin"):
                found += [] if _same(_stored(own / name), _stored(state / name)) else [f"{state.name}/{name}"]
        last = f"step-{_last_saved():08d}"
        found += [f"{last} was not seen in {place}" for place in (self.undisturbed, run) if not _seen(place, last)]
        found += [f"{path.name} is left" for path in _states(run)]
        lines = [_without(STEP_CLOCKS, _lines(place / "metrics.jsonl")) for place in (self.undisturbed, run)]
        return found + ([] if lines[0] == lines[1] else ["metrics.jsonl"])


@dataclass(frozen=True)
class Bench:
    """`infer/main.py bench`: the same answers in the same order, each once, and the same cycles; times are apart."""

    recipe: Path
    undisturbed: Path
    name: str = "bench"

    def words(self, run: Path) -> list[str]:
        return ["infer/main.py", "bench", "--config", str(self.recipe), "--run", str(run)]

    def begin(self, run: Path) -> None:
        shutil.copytree(self.undisturbed / "heads", run / "heads")

    def written(self, run: Path) -> float:
        records = run / "bench/records.jsonl"
        return records.read_bytes().count(b"\n") / (PROMPTS * 3 * 2) if records.is_file() else 0.0

    def is_whole(self, run: Path) -> bool:
        return (run / "bench/provenance.json").is_file()

    def glance(self, run: Path) -> None:
        pass

    def differences(self, run: Path) -> list[str]:
        found = _listing(self.undisturbed / "bench", run / "bench")
        for name in ("records.jsonl", "cycles.jsonl"):
            own, other = (_without(ANSWER_CLOCKS, _lines(place / "bench" / name)) for place in (self.undisturbed, run))
            found += [f"{name}: {len(other)} lines instead of {len(own)}"] if len(own) != len(other) else []
            found += [f"{name}:{at}" for at, pair in enumerate(zip(own, other, strict=False), 1) if pair[0] != pair[1]]
        keys = [(row["row"], row["temperature"], row["prompt_id"]) for row in _lines(run / "bench/records.jsonl")]
        expected = {(row, temperature, str(at)) for row in range(3) for temperature in (0, 1) for at in range(PROMPTS)}
        found += [f"answer {key} is lost" for key in sorted(expected - set(keys))]
        return found + [f"answer {key} is there twice" for key in sorted({key for key in keys if keys.count(key) > 1})]


def half_written(run: Path) -> list[Path]:
    """What a kill in the middle of a write has left: files under temporary names, and logs without a last newline."""
    logs = [path for path in run.rglob("*.jsonl") if path.stat().st_size and path.read_bytes()[-1:] != b"\n"]
    return [*run.rglob(".*.tmp"), *run.rglob(".tmp*"), *logs]


def _count(directory: Path, pattern: str) -> int:
    return len(list(directory.glob(pattern)))


def _listing(own: Path, other: Path) -> list[str]:
    names = [{path.name for path in place.iterdir()} if place.is_dir() else set() for place in (own, other)]
    return [f"{other / name}: {'missing' if name in names[0] else 'left'}" for name in sorted(names[0] ^ names[1])]


def _bytes(own: Path, other: Path) -> list[str]:
    if not other.is_file():
        return [f"{other}: missing"]
    return [] if own.read_bytes() == other.read_bytes() else [f"{other}: other bytes"]


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _without(names: tuple[str, ...], lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in line.items() if name not in names} for line in lines]


def _tensors(row: Any) -> list[Any]:
    return [row.input_ids, row.turns, row.last_hidden, row.taps]


def _states(run: Path) -> Iterator[Path]:
    return (run / "state").glob("*/step-*")


def _step(state: Path) -> int:
    return int(state.name.removeprefix("step-"))


def _last_saved() -> int:
    return (STEPS - 1) // SAVE_EVERY * SAVE_EVERY  # a run's last step ends it, and saves no state


def _seen(run: Path, name: str) -> bool:
    return (run / "seen" / name).is_dir()


def _link(state: Path, kept: Path) -> None:
    """Hard links to a state's files; nothing where the state is removed meanwhile."""
    begun = kept.with_name(f"{kept.name}.begun")
    shutil.rmtree(begun, ignore_errors=True)
    begun.mkdir(parents=True)
    try:
        for path in list(state.iterdir()):
            os.link(path, begun / path.name)
    except FileNotFoundError:
        return
    if (begun / "optimizer.bin").exists() and (begun / "model.safetensors").exists():
        begun.rename(kept)


def _stored(path: Path) -> Any:
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        return load_file(path)
    return torch.load(path, weights_only=True)


def _same(one: Any, other: Any) -> bool:
    """Whether two trees of tensors and numbers are the same bits."""
    if isinstance(one, torch.Tensor):
        return (
            isinstance(other, torch.Tensor)
            and one.dtype == other.dtype
            and one.shape == other.shape
            and bool(one.contiguous().view(-1).view(torch.uint8).equal(other.contiguous().view(-1).view(torch.uint8)))
        )
    if isinstance(one, dict):
        return isinstance(other, dict) and one.keys() == other.keys() and all(_same(one[k], other[k]) for k in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    return bool(one == other)
