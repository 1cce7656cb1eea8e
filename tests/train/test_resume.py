"""Laws of resuming: the continued run is the unbroken one, bit for bit; states are whole or refused."""

import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from data.batches import Batch
from model.checkpoint import load_head
from model.errors import UserError
from tests.train.sittings import ENDS, config, job, sitting, weights
from train import resume
from train.objectives.eagle1 import Eagle1Objective
from train.resume import Progress


class Interrupted(Eagle1Objective):
    """Sends this process a signal, or fails, while a given step's batch is in the forward."""

    def __init__(self, settings: Any, at_call: int, number: signal.Signals | None) -> None:
        super().__init__(ENDS, settings)
        self.left, self.number = at_call, number

    def __call__(self, module: Any, batch: Batch) -> Any:
        self.left -= 1
        if self.left == 0:
            if self.number is None:
                raise RuntimeError("power cut")
            signal.raise_signal(self.number)
        return super().__call__(module, batch)


@pytest.mark.parametrize(
    ("number", "state", "code"), [(signal.SIGINT, "interrupted", 130), (signal.SIGUSR1, "requeue", 75)]
)
def test_a_run_stopped_by_a_signal_goes_on_bit_for_bit(
    tmp_path: Path, number: signal.Signals, state: str, code: int
) -> None:
    settings = config(accumulation=2, batch_size=2, eval_every=4)
    whole, unbroken = sitting(job(tmp_path / "whole", settings))
    stopped, _ = sitting(job(tmp_path / "cut", settings, objective=Interrupted(settings, at_call=11, number=number)))
    assert (stopped.state, stopped.code) == (state, code) and 0 < stopped.progress.step < whole.total_steps
    finished, continued = sitting(job(tmp_path / "cut", settings))
    assert finished.progress.step == whole.progress.step and finished.progress.tokens == whole.progress.tokens
    for name, value in weights(unbroken).items():
        assert weights(continued)[name].equal(value), name
    assert finished.held_out == whole.held_out and finished.progress.best_step == whole.progress.best_step
    assert load_head(tmp_path / "cut/head").fc.weight.equal(load_head(tmp_path / "whole/head").fc.weight)


def test_a_killed_run_goes_on_from_its_last_whole_state_and_repeats_no_metrics(tmp_path: Path) -> None:
    settings = config(save_every=4)
    _, unbroken = sitting(job(tmp_path / "whole", settings))
    with pytest.raises(RuntimeError, match="power cut"):
        sitting(job(tmp_path / "cut", settings, objective=Interrupted(settings, at_call=8, number=None)))
    assert (tmp_path / "cut/state/latest").read_text().strip() == "step-00000004"
    _, continued = sitting(job(tmp_path / "cut", settings))
    for name, value in weights(unbroken).items():
        assert weights(continued)[name].equal(value), name
    keys = ("step", "loss", "grad_norm")
    lines = [[_only(line, keys) for line in _lines(tmp_path / run / "metrics.jsonl")] for run in ("whole", "cut")]
    assert lines[0] == lines[1]


def test_states_of_another_recipe_or_number_of_processes_are_refused(tmp_path: Path) -> None:
    sitting(job(tmp_path, config(max_seconds=0.0)))
    with pytest.raises(UserError, match=r"step 1 of another recipe \(head: recipe there, other asked\).*--overwrite"):
        sitting(job(tmp_path, config(max_seconds=0.0)), recipe="other")
    with pytest.raises(UserError, match=r"saved by 1 processes, now there are 2.*--num_processes 1"):
        resume.find(tmp_path / "state", Progress("recipe", 2), overwrite=False)
    anew, _ = sitting(job(tmp_path, config(max_seconds=0.0), overwrite=True), recipe="other")
    assert anew.progress.step == 1


def test_a_larger_budget_goes_on_where_the_smaller_ended(tmp_path: Path) -> None:
    whole, unbroken = sitting(job(tmp_path / "whole", config()))
    sitting(job(tmp_path / "cut", config(max_seconds=0.0)))
    finished, continued = sitting(job(tmp_path / "cut", config(max_seconds=600.0)))
    assert finished.progress.step == whole.progress.step
    assert weights(continued)["fc.weight"].equal(weights(unbroken)["fc.weight"])


def test_a_crash_while_saving_leaves_the_state_before(tmp_path: Path) -> None:
    first = Progress("recipe", 1, step=3)
    resume.save(tmp_path, first, lambda folder: torch.save(1, folder / "weights"), 0, lambda: None)

    def fails(folder: Path) -> None:
        (folder / "half").write_text("half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        resume.save(tmp_path, first.moved(step=6), fails, 0, lambda: None)
    saved, folder = resume.find(tmp_path, Progress("recipe", 1), overwrite=False)
    assert saved == first and folder == tmp_path / "step-00000003"
    resume.save(tmp_path, first.moved(step=6), lambda folder: None, 0, lambda: None)
    assert [path.name for path in sorted(tmp_path.glob("*step*"))] == ["step-00000006"]


def test_only_keys_that_move_no_weight_are_free_to_change() -> None:
    settings = config()
    before = resume.numerics({"learning_rate": 1.0, "max_seconds": 5.0, "log_every": 3})
    assert before == {"learning_rate": 1.0} and hasattr(settings, "max_seconds")
    assert all(hasattr(settings, name) for name in resume.FREE)
    assert replace(settings, log_every=2) != settings


def _lines(path: Path) -> list[dict[str, Any]]:
    import json

    return [json.loads(line) for line in path.read_text().splitlines()]


def _only(record: dict[str, Any], keys: tuple[str, ...]) -> dict[str, Any]:
    return {key: record.get(key) for key in keys}
