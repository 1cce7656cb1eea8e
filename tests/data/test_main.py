"""Laws of the data commands, run through the real command line."""

import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from aerie.configs.errors import UserError
from aerie.data import main
from aerie.data.feature_cache import FeatureCache
from aerie.train import main as train
from tests import tiny
from tests.data.caches import contents
from tests.tiny import call
from tests.train.sittings import ended
from tests.train.test_main import write_recipe as recipe_for
from tests.train.test_processes import forked


def write_recipe(root: Path, directory: Path) -> Path:
    """A recipe for the target and conversations in root; its run is directory/run."""
    sections = {
        "run": str(directory / "run"),
        "features": {"shard_tokens": 300, "batch_tokens": 256},
    }
    return recipe_for(
        directory / "recipe.yaml",
        root,
        {"max_steps": 2, "batch_size": 32, "eval_every": 0},
        **sections,
    )


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a target, conversations, a recipe, and a run with a cache of some shards."""
    root = tmp_path_factory.mktemp("made")
    tiny.target(root / "target")
    tiny.write_conversations(root / "train.jsonl", 24)
    assert call(main, "features", "--config", write_recipe(root, root)) == 0
    return root


@pytest.fixture
def recipe(made: Path, tmp_path: Path) -> Path:
    """A recipe with a copy of the cache."""
    shutil.copytree(made / "run", tmp_path / "run")
    return write_recipe(made, tmp_path)


@pytest.fixture
def features(recipe: Path) -> Path:
    return recipe.parent / "run/features"


def refusal(capsys: pytest.CaptureFixture[str]) -> str:
    """The only line on standard error that is no progress."""
    (line,) = re.findall(r"^(?!features: |check: ).+$", capsys.readouterr().err, re.MULTILINE)
    assert line.startswith("error: ")
    return str(line)


def test_features_command(
    recipe: Path, features: Path, made: Path, tmp_path: Path, capsys: Any
) -> None:
    """Features are planned without weights written once and then reused."""
    whole, words = contents(features), ("features", "--config", recipe)
    shutil.rmtree(features)
    assert call(main, *words, "--estimate", "--features.storage", "int8") == 0
    out = capsys.readouterr().out
    assert " tokens x 44 bytes (int8 for float32)" in out and re.search(
        r"tok/s \(measured now.* take \d.* h;", out
    )
    bare = shutil.copytree(made / "target", tmp_path / "target")
    weights = bare / "model.safetensors"
    weights.write_bytes(
        weights.read_bytes()[:-10_000] + b"\xff" * 10_000
    )  # only their header is read
    assert call(main, *words, "--plan", "--target", bare, "--features.after_blocks", "[1]") == 0
    assert " tokens x 264 bytes (float32)" in capsys.readouterr().out and not features.exists()
    assert call(main, *words, "--is-whole") == 1 and call(main, *words) == 0
    assert "24 read, 24 kept" in capsys.readouterr().out
    assert contents(features) == whole and len(FeatureCache.open(features)) == 24
    assert (
        call(main, *words) == 0
        and capsys.readouterr().out == f"features: whole, reused ({features})\n"
    )


def test_overwrite(recipe: Path, features: Path, capsys: Any) -> None:
    """Another recipes cache is replaced only with overwrite."""
    before, changed = (
        contents(features),
        ("features", "--config", recipe, "--features.storage", "fp8"),
    )
    assert call(main, *changed) == 2 and contents(features) == before
    assert re.search(r"features\.storage: None before, fp8 now.*--overwrite", refusal(capsys))
    assert call(main, *changed, "--overwrite") == 0
    assert re.search(
        r"fp8 for float32: relative error of a dimension .*: \d", capsys.readouterr().out
    )
    assert FeatureCache.open(features, {"storage": "fp8"})[0].scales is not None


def test_the_error_of_a_small_form_is_told_before_shards_are_written(
    recipe: Path, features: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def refuse(*_: Any) -> None:
        raise UserError("the first shard cannot be written")

    monkeypatch.setattr("aerie.data.features.extract", refuse)
    words = ("features", "--config", recipe, "--features.storage", "fp8", "--overwrite")
    assert call(main, *words) == 2
    assert "relative error of a dimension" in capsys.readouterr().out


def test_share_is_no_cache(recipe: Path, features: Path, capsys: Any) -> None:
    """A share is no cache and is continued by any other."""
    whole, words = contents(features), ("features", "--config", recipe)
    shutil.rmtree(features)
    assert (
        call(main, *words, "--shard", "2/3") == 0
        and "share 2/3 is written" in capsys.readouterr().out
    )
    assert call(main, *words, "--is-whole") == 1 and call(train, "--config", recipe) == 2
    assert call(main, *words) == 0 and contents(features) == whole


def test_synthetic_and_show(tmp_path: Path, capsys: Any) -> None:
    """The corpus and its tokenizer are written whole reused and shown."""
    run = tmp_path / "run"
    values: dict[str, Any] = {"run": str(run), "target": {"path": str(run / "tokenizer")}}
    values["synthetic"] = {"num_conversations": 30, "num_prompts": 8, "vocab_size": 400}
    values["data"] = {"conversations": [str(run / "conversations/train.jsonl")]}
    words = ("--config", tiny.recipe(tmp_path / "recipe.yaml", values))
    assert call(main, "synthetic", *words, "--plan") == 0 and not run.exists()
    assert call(main, "synthetic", *words) == 0
    before = contents(run)
    assert (
        call(main, "synthetic", *words) == 0
        and "synthetic: whole, reused" in capsys.readouterr().out
    )
    turns = tiny.read_rows(run / "conversations/train.jsonl")[0]["conversations"]
    answer = next(turn["value"] for turn in turns if turn["from"] == "gpt")
    for option, shown in ((), f"\x1b[32m{answer}"), (("--plain",), f"[1:{answer}<|end|>]"):
        assert (
            call(main, "show", *words, "--limit", "1", *option) == 0
            and shown in capsys.readouterr().out
        )
    assert call(main, "synthetic", *words, "--synthetic.seed", "1") == 2
    assert "synthetic.seed: 0 before, 1 now" in refusal(capsys)
    assert {**contents(run), "status.json": b""} == {**before, "status.json": b""}


@pytest.mark.slow
def test_two_processes(recipe: Path, features: Path, tmp_path: Path) -> None:
    """Two processes write the same bytes as one."""
    words, log = ("features", "--config", recipe, "--run", tmp_path / "two"), tmp_path / "log"
    assert [*map(ended, forked("zero1", log, *words, command=main))] == [0, 0], log.read_text()
    assert "process 1 of 2" in log.read_text()
    assert contents(tmp_path / "two/features") == contents(features)
