"""Attacks on a feature cache through the commands: each is named, nothing is trained on it, no good shard is lost."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import PartialState
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from aerie.configs.errors import UserError, exit_code
from aerie.data import features
from aerie.data import main as data_main
from aerie.data.cache import FeatureCache
from aerie.data.features import HEADER_BYTES, ROW_BYTES, WRITING
from aerie.model.storage import Lock
from aerie.train import main as train_main
from tests import tiny
from tests.disks import mounted
from tests.train.kills import kill_at


def call(module: Any, *words: object) -> int:
    """The exit code of a command run in this process."""
    before, sys.argv = sys.argv, ["main.py", *map(str, words)]
    try:
        return exit_code(module.main)
    finally:
        sys.argv = before
        PartialState._reset_state()


def write_recipe(root: Path, run: Path, **features: Any) -> Path:
    values = {
        "run": str(run),
        "threads": 1,
        "target": {"path": str(root / "target"), "dtype": "float32"},
        "data": {"conversations": [str(root / "train.jsonl")], "max_length": 128, "held_out": 0.2},
        "features": {"shard_tokens": 500, "after_blocks": [1, 2, 3], **features},
        "head": {"kind": "eagle3", "draft_vocab_size": 160},
        "tree": {"levels": 4},
        "train": {"max_steps": 8, "batch_size": 8, "warmup_steps": 1, "unroll_steps": 1, "eval_every": 0},
    }
    path: Path = tiny.recipe(run.with_suffix(".yaml"), values)
    return path


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a target, conversations and a feature cache of some shards."""
    root = tmp_path_factory.mktemp("made")
    tiny.target(root / "target")
    tiny.write_conversations(root / "train.jsonl", 40)
    assert call(data_main, "features", "--config", write_recipe(root, root / "run")) == 0
    assert len(list((root / "run/features").glob("shard*"))) >= 4
    return root


@pytest.fixture
def recipe(made: Path, tmp_path: Path) -> Path:
    """A recipe with a copy of the cache that may be attacked."""
    shutil.copytree(made / "run/features", tmp_path / "run/features")
    return write_recipe(made, tmp_path / "run")


def cache_of(recipe: Path) -> Path:
    return recipe.with_suffix("") / "features"


def contents(recipe: Path) -> dict[str, bytes]:
    """The cache's files but for the provenance, which has times in it."""
    files = [path for path in cache_of(recipe).iterdir() if path.is_file() and path.name != "provenance.json"]
    return {path.name: path.read_bytes() for path in files}


def tensors_of(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    with safe_open(path, framework="pt") as handle:
        facts = handle.metadata()
    return load_file(path), facts


def change(path: Path, name: str, place: int, value: int) -> None:
    """Changes one number of a shard as a flipped bit on a disk would: nothing else of the file moves."""
    tensors, facts = tensors_of(path)
    tensors[name].view(-1)[place] = value
    save_file(tensors, path, metadata=facts)


def flip_states(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x10
    path.write_bytes(content)


def edit(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))


def widen_training(index: dict[str, Any]) -> None:
    """Moves a held-out row into the training split."""
    first, last = index["splits"]["train"]
    index["splits"] = {"train": [first, last + 1], "held_out": [last + 1, index["splits"]["held_out"][1]]}


SHARD = "shard-00001.safetensors"
ATTACKS: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "torn shard": (SHARD, lambda path: path.write_bytes(path.read_bytes()[:-100])),
    "flipped byte of a state": (SHARD, flip_states),
    "flipped token id": (SHARD, lambda path: change(path, "input_ids", 7, 99)),
    "flipped turn": (SHARD, lambda path: change(path, "turns", 3, 5)),
    "deleted shard": (SHARD, Path.unlink),
    "another shard in its place": (SHARD, lambda path: shutil.copy(path.with_name("shard-00000.safetensors"), path)),
    "stale index": ("index.json", lambda path: edit(path, widen_training)),
    "truncated index": ("index.json", lambda path: path.write_bytes(path.read_bytes()[:-200])),
    "no index": ("index.json", Path.unlink),
}


@pytest.mark.parametrize(("name", "attack"), ATTACKS.values(), ids=ATTACKS)
def test_an_attack_is_named_by_every_command_and_mended_without_touching_the_rest(
    name: str, attack: Callable[[Path], Any], recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = contents(recipe)
    times = {path.name: path.stat().st_mtime_ns for path in cache_of(recipe).glob("shard*")}
    attack(cache_of(recipe) / name)
    assert call(data_main, "check", "--config", recipe) == 1
    assert name in capsys.readouterr().out
    assert call(train_main, "--config", recipe) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert name in error and "data/main.py features" in error, error
    assert not (recipe.with_suffix("") / "heads/eagle3/config.json").exists()
    assert call(data_main, "features", "--config", recipe, "--verify") == 0
    assert contents(recipe) == before
    for path in cache_of(recipe).glob("shard*"):
        assert path.name == name or path.stat().st_mtime_ns == times[path.name]
    assert call(data_main, "check", "--config", recipe) == 0


@pytest.mark.parametrize("text", ["", "{", '{"stage": "features"}', None])
def test_a_broken_provenance_is_named_and_mended_without_making_a_shard_anew(
    text: str | None, recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before, path = contents(recipe), cache_of(recipe) / "provenance.json"
    times = {shard.name: shard.stat().st_mtime_ns for shard in cache_of(recipe).glob("shard*")}
    path.write_text(path.read_text().replace('"max_length": 128', '"max_length": 129') if text is None else text)
    assert call(data_main, "features", "--config", recipe) == 2
    assert "provenance.json: cannot be read; write it anew with --overwrite" in capsys.readouterr().err
    assert call(data_main, "features", "--config", recipe, "--overwrite") == 0
    assert contents(recipe) == before
    assert {shard.name: shard.stat().st_mtime_ns for shard in cache_of(recipe).glob("shard*")} == times


def test_a_cache_that_changes_under_a_training_is_noticed(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Another recipe's --overwrite between two readings of a shard."""
    cache = FeatureCache.open(cache_of(recipe))
    assert cache[0].number == 0
    assert call(data_main, "features", "--config", recipe, "--overwrite", "--features.after_blocks", "[0, 2, 3]") == 0
    with pytest.raises(UserError, match=r"is not the shard that index\.json lists"):
        list(cache)


def test_a_second_writer_of_another_recipe_is_refused_and_one_of_the_same_shares_the_work(
    recipe: Path, made: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, cache = contents(recipe), cache_of(recipe)
    shutil.rmtree(cache)
    assert call(data_main, "features", "--config", recipe, "--shard", "2/2") == 0
    before = contents(recipe)
    with Lock(cache / WRITING / "cache") as at_work:  # as a writer holds it
        assert at_work.acquire(shared=True)
        other = ("--features.after_blocks", "[0, 2, 3]", "--overwrite")
        assert call(data_main, "features", "--config", recipe, *other) == 2
        assert "another process is writing another cache there; wait for its end" in capsys.readouterr().err
        assert contents(recipe) == before
        assert call(data_main, "features", "--config", recipe) == 0
    assert contents(recipe) == whole


def die_at_shard(recipe: Path, share: str, number: int) -> None:
    """Makes a share of the cache in a process that is killed when its number-th shard is about to be written."""
    child = os.fork()
    if child == 0:
        kill_at(features.ShardBuffer, "save", number)
        call(data_main, "features", "--config", recipe, "--shard", share)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


def test_shares_of_any_number_are_continued_by_any_other_after_a_kill(recipe: Path) -> None:
    whole = contents(recipe)
    shutil.rmtree(cache_of(recipe))
    for share, number in (("1/3", 2), ("2/2", 2), ("1/1", 1)):  # none of them gets through
        die_at_shard(recipe, share, number)
        assert call(data_main, "features", "--config", recipe, "--is-whole") == 1
        assert call(train_main, "--config", recipe) == 2
    assert len(list(cache_of(recipe).glob("shard*"))) == 2
    assert call(data_main, "features", "--config", recipe, "--shard", "2/3") == 0
    assert call(data_main, "features", "--config", recipe) == 0
    assert contents(recipe) == whole


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize(
    ("in_all", "said"),
    [
        (True, "its logits of the tokens [1, 2, 3, 4] are not finite; its weights are broken"),
        (False, "the target's states are not finite in float32"),
    ],
)
def test_states_that_are_not_finite_are_found_when_they_are_written(
    bad: float, in_all: bool, said: str, made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(made / "target", tmp_path / "target")
    shutil.copy(made / "train.jsonl", tmp_path / "train.jsonl")
    weights = tmp_path / "target/model.safetensors"
    tensors, facts = tensors_of(weights)
    counts = torch.cat([ids for ids, _ in FeatureCache.open(made / "run/features").tokens()]).bincount()
    rare = int(torch.where(counts > 0, counts, len(counts)).argmin())  # in few conversations
    name = "model.layers.2.mlp.down_proj.weight" if in_all else "model.embed_tokens.weight"
    tensors[name][0 if in_all else rare, 0] = bad
    save_file(tensors, weights, metadata=facts)
    recipe = write_recipe(tmp_path, tmp_path / "run")
    assert call(data_main, "features", "--config", recipe) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert said in error and (in_all or "train.jsonl: row " in error), error
    assert not (cache_of(recipe) / "index.json").exists() and call(train_main, "--config", recipe) == 2
    for path in cache_of(recipe).glob("shard*"):
        assert torch.isfinite(load_file(path)["taps"]).all()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MiB in memory."""
    yield from mounted(tmp_path / "disk", 2048)


def test_a_full_disk_names_the_bytes_and_keeps_what_is_whole(
    small_disk: Path, made: Path, recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, filler = contents(recipe), small_disk / "filler"
    cache = FeatureCache.open(cache_of(recipe))
    planned = sum(cache.lengths) * cache.token_bytes + len(cache) * ROW_BYTES + len(cache.shards) * HEADER_BYTES
    tight = write_recipe(made, small_disk / "run")
    for room, said in (
        (planned // 2, f"the cache needs 0.9 MiB more ({planned:,} bytes) and the disk has 0.4 MiB free"),
        (planned + 8192, "the disk is full: this shard takes "),
    ):
        filler.unlink(missing_ok=True)
        filler.write_bytes(b"0" * (shutil.disk_usage(small_disk).free - room))
        assert call(data_main, "features", "--config", tight) == 2
        error = capsys.readouterr().err.strip().splitlines()[-1]
        assert said in error and not list(small_disk.rglob("*.tmp")), error
    written = [path.name for path in cache_of(tight).glob("shard*")]
    assert 0 < len(written) < len(cache.contents.shards) and all(
        contents(tight)[name] == whole[name] for name in written
    )
    assert call(train_main, "--config", tight) == 2
    filler.unlink()
    assert call(data_main, "features", "--config", tight) == 0 and contents(tight) == whole


def test_a_read_only_disk_is_one_line_and_what_is_there_can_be_checked(
    small_disk: Path, made: Path, recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(cache_of(recipe), small_disk / "run/features")
    frozen = write_recipe(made, small_disk / "run")
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    assert call(data_main, "check", "--config", frozen) == 0
    capsys.readouterr()
    for module, words in ((train_main, ()), (data_main, ("features", "--verify"))):
        assert call(module, *words[:1], "--config", frozen, *words[1:]) == 2
        error = capsys.readouterr().err.strip()
        assert "cannot be written (Read-only file system); choose another --run" in error and "Traceback" not in error
