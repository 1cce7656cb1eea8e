"""What a later command makes of a training that ended early, and of a cache or a directory that is not what it was."""

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import PartialState

from aerie.configs.errors import exit_code
from aerie.data import main as data_main
from aerie.model.storage import Stage
from aerie.train import main as train_main
from tests import tiny


class Killed(BaseException):
    """Ends a command as SIGKILL would: nothing catches it."""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A directory with a target, conversations, a recipe and its feature cache."""
    root = tmp_path_factory.mktemp("made")
    tiny.target(root / "target")
    tiny.write_conversations(root / "train.jsonl", 40)
    values = {
        "run": str(root / "run"),
        "threads": 1,
        "target": {"path": str(root / "target"), "dtype": "float32"},
        "data": {"conversations": [str(root / "train.jsonl")], "max_length": 128, "held_out": 0.2},
        "tree": {"levels": 4},
        "train": {"max_steps": 3, "batch_size": 8, "warmup_steps": 1, "eval_every": 0},
    }
    tiny.recipe(root / "recipe.yaml", values)
    assert _call(data_main, "features", "--config", root / "recipe.yaml") == 0
    yield root


@pytest.fixture
def run(made: Path, tmp_path: Path) -> Path:
    """A run of its own, with the feature cache."""
    shutil.copytree(made / "run/features", tmp_path / "run/features")
    return tmp_path / "run"


def _call(module: Any, *words: object) -> int:
    """The exit code of a command run in this process."""
    before, sys.argv = sys.argv, ["main.py", *map(str, words)]
    try:
        return exit_code(module.main)
    finally:
        sys.argv = before
        PartialState._reset_state()


def _killed_at_its_end(*words: object) -> None:
    """A training that dies before its record is written."""
    with pytest.MonkeyPatch.context() as patched, pytest.raises(Killed):
        patched.setattr(Stage, "finish", lambda self, **facts: (_ for _ in ()).throw(Killed))
        _call(train_main, *words)


def test_a_damaged_record_of_the_cache_is_one_line_that_mends_it(
    made: Path, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words, record = ("--config", made / "recipe.yaml", "--run", run), run / "features/provenance.json"
    whole = json.loads(record.read_text())
    for damage in ({"stage": "features"}, {**whole, "inputs": {}}, []):
        record.write_text(json.dumps(damage))
        assert _call(train_main, *words, "--plan") == 2
        said = f"error: {record}: cannot be read; write it anew with: python data/main.py features --config RECIPE --o"
        error = capsys.readouterr().err
        assert error.startswith(said) and len(error.splitlines()) == 1
    assert _call(data_main, "features", *words, "--overwrite") == 0
    assert _call(train_main, *words, "--plan") == 0


def test_a_cache_made_anew_with_other_bits_is_taken_over_with_a_sentence(
    made: Path, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--config", made / "recipe.yaml", "--run", run)
    note = "note: feature cache: made anew from the same inputs, and not with the same bits"
    _killed_at_its_end(*words, "--train.save_every", "1")
    for batch_tokens, said in ((8192, False), (64, True)):
        shutil.rmtree(run / "features")
        assert _call(data_main, "features", *words, "--features.batch_tokens", batch_tokens) == 0
        capsys.readouterr()
        _killed_at_its_end(*words, "--train.save_every", "1")
        out = capsys.readouterr().out
        assert "going on from step 2 of 3" in out and (note in out) == said


def test_a_moved_run_and_one_by_another_name_are_continued(made: Path, run: Path) -> None:
    words, moved = ("--config", made / "recipe.yaml", "--run"), run.parent / "moved"
    _killed_at_its_end(*words, run)
    run.rename(moved)
    assert _call(train_main, *words, moved / "../moved", "--plan") == 0
    assert _call(train_main, *words, moved, "--output", moved / "heads/../heads/eagle1", "--plan") == 0
    (moved / "state/eagle1.begun").write_text(f"{moved / 'heads/eagle1'}\n")
    assert _call(train_main, *words, moved, "--plan") == 0
    (moved / "heads/eagle1").rename(moved / "heads/other")
    assert _call(train_main, *words, moved, "--output", moved / "heads/other", "--plan") == 2


def test_a_run_that_its_budget_ended_goes_on_with_another_and_as_no_other_run(
    made: Path, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--config", made / "recipe.yaml", "--run", run)
    assert _call(train_main, *words, "--train.max_seconds", "0") == 0
    assert _call(train_main, *words, "--train.max_seconds", "60", "--train.seed", "5") == 2
    assert "holds another train (train.max_seconds: 0.0 there, 60.0 asked; train.seed" in capsys.readouterr().err
    assert _call(train_main, *words, "--train.max_seconds", "60") == 0
    out = capsys.readouterr().out
    assert "note: train.max_seconds: 0.0 until now, 60.0 from here on" in out and "going on from step 1 of 3" in out
    record = json.loads((run / "heads/eagle1/provenance.json").read_text())
    assert (record["ended"], record["steps"]) == ("finished", 3)


def test_another_tree_is_another_training_where_it_measures_the_best_weights(
    made: Path, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words, other = ("--config", made / "recipe.yaml", "--run", run), ("--tree.levels", "3")
    measured = (*words, "--train.measure_prompts", "1", "--train.measure_new_tokens", "4")
    _killed_at_its_end(*measured, "--train.save_every", "1")
    assert _call(train_main, *measured, *other) == 2
    assert "step 2 of another recipe (tree.levels: 4 there, 3 asked); choose another --run" in capsys.readouterr().err
    assert _call(train_main, *measured) == 0
    assert _call(train_main, *measured, *other, "--is-whole") == 1
    assert _call(train_main, *words, "--overwrite") == 0
    assert _call(train_main, *words, *other, "--is-whole") == 0


def test_another_number_of_threads_goes_on_and_says_that_bits_may_differ(
    made: Path, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--config", made / "recipe.yaml", "--run", run)
    _killed_at_its_end(*words, "--train.save_every", "1")
    try:
        assert _call(train_main, *words, "--threads", "2") == 0
    finally:
        torch.set_num_threads(1)
    said = f"saved with cpu with 1 thread, torch {torch.__version__}, this is cpu with 2 threads, torch"
    error = capsys.readouterr().err
    assert said in error and "it goes on, not bit for bit as there" in error
