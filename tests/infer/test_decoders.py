"""A head that was trained on another target is noticed when it is loaded; one on the same target never is."""

from pathlib import Path
from typing import Literal

import pytest
import torch

from aerie.configs.schema.target_and_head import TargetConfig
from aerie.infer.decode.methods import load_head_for
from aerie.model.checkpoint import save_head
from aerie.model.target import Target
from tests import tiny


def load(path: Path, dtype: Literal["float32", "bfloat16"] = "float32") -> Target:
    return Target.load(TargetConfig(str(path), dtype=dtype))


def warnings(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """The warnings on stderr, without the loader's progress bars."""
    return [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning: ")]


def saved(target: Target, directory: Path) -> str:
    """A head that says it was trained on this target."""
    save_head(tiny.head(target.vocab.embedding.float()), directory, target=target.fingerprint())
    return str(directory)


def test_other_weights_of_the_same_sizes_are_one_warning_with_the_fix(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own, other = load(tiny.target(tmp_path / "own")), load(tiny.target(tmp_path / "other", seed=1))
    head = saved(own, tmp_path / "head")
    load_head_for(own, head)
    assert warnings(capsys) == []
    load_head_for(other, head)
    lines = warnings(capsys)
    assert len(lines) == 1 and "trained on a target with other weights than" in lines[0]
    assert own.fingerprint() in lines[0] and "give its target" in lines[0]


def test_another_dtype_of_the_same_weights_is_no_other_target(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Weights of float32 or of bfloat16, used with as many digits as the head was trained with, with more or fewer."""
    full, half = tiny.target(tmp_path / "full"), tiny.target(tmp_path / "half")
    tiny.llama().to(torch.bfloat16).save_pretrained(half)
    for path, trained, used in (
        (half, "float32", "bfloat16"),
        (half, "bfloat16", "float32"),
        (full, "bfloat16", "float32"),
    ):
        head = saved(load(path, trained), tmp_path / trained)  # type: ignore[arg-type]
        load_head_for(load(path, used), head)  # type: ignore[arg-type]
    load_head_for(load(full, "bfloat16"), saved(load(full), tmp_path / "head"))
    assert warnings(capsys) == []


def test_a_head_that_names_no_target_is_taken_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = load(tiny.target(tmp_path / "target"))
    save_head(tiny.head(target.vocab.embedding.float()), tmp_path / "head")
    load_head_for(target, str(tmp_path / "head"))
    assert warnings(capsys) == []
