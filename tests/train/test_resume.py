"""Laws of resuming: the continued run is the unbroken one, bit for bit; what cannot continue it is refused."""

import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from aerie.configs.errors import UserError
from aerie.configs.schema.train import TrainConfig
from aerie.model import storage as saves
from aerie.model.checkpoint import head_facts, load_head
from aerie.train import loop, resume
from aerie.train import resume as best
from aerie.train.loop import Loop, Outcome
from aerie.train.resume import Progress
from tests.train.kills import Interrupted, ended_by, kill_at
from tests.train.sittings import config, job, lines, sitting, weights

KEYS = (
    "kind",
    "step",
    "epoch",
    "loss",
    "grad_norm",
    "learning_rate",
    "alpha",
    "held_out_loss",
    "held_out_predicted_tau",
)
# Every step is logged in company, most saves lie between two log lines, and the best of the evaluations changes.
BUSY = {"log_every": 4, "save_every": 3, "eval_every": 5}


def same(one: Path, first: tuple[Outcome, Loop], other: Path, second: tuple[Outcome, Loop]) -> None:
    """Asserts that two finished runs in two directories cannot be told apart but by their clocks."""
    for name, value in weights(first[1]).items():
        assert weights(second[1])[name].equal(value), name
    mine, yours = (made[1].optimizer.state_dict()["state"] for made in (first, second))
    assert all(yours[number][key].equal(value) for number in mine for key, value in mine[number].items())
    moved = {"made_of": {}, "seconds": 0.0}
    assert second[0].progress.moved(**moved) == first[0].progress.moved(**moved)
    assert second[0].held_out == first[0].held_out
    records = [[{key: line.get(key) for key in KEYS} for line in lines(place)] for place in (one, other)]
    assert records[0] == records[1]
    assert {path.name for path in (one / "head").iterdir()} == {path.name for path in (other / "head").iterdir()}
    for path in (one / "head").iterdir():
        assert (other / "head" / path.name).read_bytes() == path.read_bytes(), path.name


@pytest.mark.parametrize(
    ("number", "state", "code"),
    [(signal.SIGINT, "interrupted", 130), (signal.SIGTERM, "requeue", 75), (signal.SIGUSR1, "requeue", 75)],
)
def test_a_run_stopped_by_a_signal_goes_on_bit_for_bit(
    tmp_path: Path, number: signal.Signals, state: str, code: int
) -> None:
    settings = config(accumulation=2, batch_size=2, eval_every=4, log_every=4)
    whole = sitting(job(tmp_path / "whole", settings))
    stopped, _ = sitting(job(tmp_path / "cut", settings, objective=Interrupted(settings, at_call=11, number=number)))
    assert (stopped.state, stopped.code, stopped.progress.step) == (state, code, 6)
    assert (tmp_path / "cut/state/latest").read_text() == "step-00000006\n"
    continued = sitting(job(tmp_path / "cut", settings))
    same(tmp_path / "whole", whole, tmp_path / "cut", continued)


def test_a_run_killed_again_and_again_is_the_undisturbed_one(tmp_path: Path) -> None:
    settings = config(**BUSY)
    whole = sitting(job(tmp_path / "whole", settings))
    for at_call in (2, 5, 4, 1, 7):
        dies = job(tmp_path / "cut", settings, objective=Interrupted(settings, at_call, signal.SIGKILL))
        assert ended_by(lambda dies=dies: sitting(dies)) == -signal.SIGKILL
    assert [folder.name for folder in saves.folders(tmp_path / "cut/state")] == ["step-00000012", "step-00000009"]
    continued = sitting(job(tmp_path / "cut", settings))
    same(tmp_path / "whole", whole, tmp_path / "cut", continued)


POINTS: dict[str, tuple[Any, str, int]] = {
    "before anything of the second save is written": (saves, "write", 4),  # the first and third are best weights
    "before its record": (saves, "write_json", 4),
    "before it is durable": (saves, "sync_tree", 4),
    "before it has its name": (saves.Path, "rename", 4),
    "before the directory knows it": (saves, "sync_directory", 4),
    "before it is the latest": (resume, "write_text", 2),
    "before an older one goes": (saves, "remove", 1),
    "while older ones go": (saves.shutil, "rmtree", 9),
    "before the best weights are the output": (best, "publish", 2),
    "while the best weights become the output": (best, "write_atomically", 3),
    "before forgotten weights go": (best, "forget_others", 2),
    "before the last evaluation": (loop, "load_weights", 4),
}


@pytest.mark.slow
@pytest.mark.parametrize("point", POINTS)
def test_a_kill_at_any_point_of_a_save_costs_nothing_but_time(tmp_path: Path, undisturbed: Any, point: str) -> None:
    settings = config(**SHORT)
    module, name, call = POINTS[point]

    def dies() -> None:
        kill_at(module, name, call)
        sitting(job(tmp_path / "cut", settings, measure=growing))

    assert ended_by(dies) == -signal.SIGKILL
    continued = sitting(job(tmp_path / "cut", settings, measure=growing))
    same(undisturbed[0], undisturbed[1], tmp_path / "cut", continued)
    left = [path.name for path in (tmp_path / "cut").rglob("*") if path.name.endswith((".tmp", ".old"))]
    assert left == []


SHORT = {"epochs": 2, "save_every": 3, "eval_every": 2, "keep_last": 1}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, tuple[Outcome, Loop]]:
    """A short run that nothing has stopped."""
    directory = tmp_path_factory.mktemp("undisturbed")
    return directory, sitting(job(directory, config(**SHORT), measure=growing))


def growing(head: Any) -> dict[str, float]:
    """Something that grows with the steps in place of a measured tau, so that each evaluation has the best weights."""
    return {"tau": 1.0 / float(head.fc.weight.norm())}


def cut(directory: Path, settings: TrainConfig, at_call: int = 8) -> None:
    """A sitting that dies in the given step, after saves."""
    with pytest.raises(RuntimeError, match="power cut"):
        sitting(job(directory, settings, objective=Interrupted(settings, at_call, None)))


def test_metrics_are_those_of_the_unbroken_run_also_between_two_lines(tmp_path: Path) -> None:
    settings = config(log_every=5, save_every=3)
    sitting(job(tmp_path / "whole", settings))
    cut(tmp_path / "cut", settings)
    sitting(job(tmp_path / "cut", settings))
    losses = [[line["loss"] for line in lines(tmp_path / run) if "loss" in line] for run in ("whole", "cut")]
    assert losses[0] == losses[1] and len(losses[0]) == 3


def test_the_output_is_that_of_the_save_whatever_was_measured_after_it(tmp_path: Path) -> None:
    scores = iter([2.0, 1.0, 5.0])  # the save of step 2 lies before the third
    seen: list[torch.Tensor] = []

    def measure(head: Any) -> dict[str, float]:
        seen.append(head.fc.weight.clone())
        return {"tau": next(scores, 0.5)}

    settings = config(max_steps=5, eval_every=1, save_every=2)
    with pytest.raises(RuntimeError, match="power cut"):
        sitting(job(tmp_path, settings, measure=measure, objective=Interrupted(settings, 4, None)))
    assert head_facts(tmp_path / "head")["tau"] == 5.0
    outcome, _ = sitting(job(tmp_path, settings, measure=measure))  # another machine measures other values
    assert outcome.progress.best == ((2.0, 1),)
    assert head_facts(tmp_path / "head")["tau"] == 2.0 and load_head(tmp_path / "head").fc.weight.equal(seen[0])


def test_an_output_that_was_removed_comes_back_with_its_score(tmp_path: Path) -> None:
    settings = config(eval_every=2, save_every=4)
    whole = sitting(job(tmp_path / "whole", settings))
    cut(tmp_path / "cut", settings)
    for path in (tmp_path / "cut/head").iterdir():
        path.unlink()
    same(tmp_path / "whole", whole, tmp_path / "cut", sitting(job(tmp_path / "cut", settings)))


@pytest.mark.slow
def test_a_tracker_goes_on_in_the_same_run_and_has_no_step_twice(tmp_path: Path) -> None:
    settings = config(log_every=1, save_every=4, trackers=("tensorboard",))
    whole = sitting(job(tmp_path / "whole", settings))
    for at_call in (7, 2):
        time.sleep(1)  # tensorboard orders its files by the second
        dies = job(tmp_path / "cut", settings, objective=Interrupted(settings, at_call, signal.SIGKILL))
        assert ended_by(lambda dies=dies: sitting(dies)) == -signal.SIGKILL
    time.sleep(1)
    same(tmp_path / "whole", whole, tmp_path / "cut", sitting(job(tmp_path / "cut", settings)))
    curves = []
    for run in ("whole", "cut"):
        files = list((tmp_path / run).rglob("events.out.tfevents.*"))
        places = {path.parent for path in files if path.parent.name == "aerie"}
        assert len(places) == 1 and len(files) - 1 == len([path for path in files if path.parent in places])
        read = EventAccumulator(str(places.pop())).Reload()
        curves.append({tag: [(e.step, e.value) for e in read.Scalars(tag)] for tag in read.Tags()["scalars"]})
    for tag in ("train/loss", "train/grad_norm", "held_out/held_out_predicted_tau"):
        assert curves[0][tag] == curves[1][tag], tag
    assert [step for step, _ in curves[1]["train/loss"]] == list(range(1, 16))


def test_another_recipe_is_refused_with_what_differs_and_replaced_when_asked(tmp_path: Path) -> None:
    sitting(job(tmp_path, config(max_seconds=0.0)))
    with pytest.raises(UserError, match=r"step 1 of another recipe \(head: recipe there, other asked\).*--overwrite"):
        sitting(job(tmp_path, config(max_seconds=0.0)), recipe="other")
    with pytest.raises(UserError, match=r"another recipe \(train.learning_rate: 0.01 there, 0.02 asked\)"):
        sitting(job(tmp_path, config(learning_rate=2e-2)))
    anew, _ = sitting(job(tmp_path, config(max_seconds=0.0), overwrite=True), recipe="other")
    assert anew.progress.step == 1


def test_other_data_processes_and_engines_are_refused_each_with_its_sentence(tmp_path: Path) -> None:
    made_of = {"features": "aaaa", "conversations": {"a.jsonl": "1"}, "rows": "r", "train": {"log_every": 1}}
    fresh = Progress(made_of, 2, "ZeRO-2 bf16")
    resume.save(tmp_path, fresh.moved(step=7), lambda folder: None)
    for other, said in (
        (
            fresh.moved(made_of={**made_of, "features": "bbbb"}),
            r"step 7 on other data \(feature cache: aaaa there, bbbb",
        ),
        (
            fresh.moved(made_of={**made_of, "conversations": {"a.jsonl": "2"}}),
            r"on other data \(conversations.a.jsonl: 1 there, 2 asked\); choose another --run, or start anew",
        ),
        (fresh.moved(made_of={**made_of, "rows": "s"}), r"on other data \(token ids of the rows: r there, s asked\)"),
        (fresh.moved(world_size=4), r"saved by 2 processes, now there are 4; go on with --num_processes 2, or"),
        (fresh.moved(engine="plain bf16"), "saved under ZeRO-2 bf16, now it is plain bf16; go on as there, or"),
    ):
        with pytest.raises(UserError, match=said):
            resume.find(tmp_path, other, overwrite=False)
        assert resume.find(tmp_path, other, overwrite=True) == resume.Found(other)


def test_what_moves_no_weight_is_taken_over_with_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = config(save_every=4)
    whole = sitting(job(tmp_path / "whole", settings))
    cut(tmp_path / "cut", settings)
    continued = sitting(job(tmp_path / "cut", config(save_every=2, keep_last=3, loss_chunk_slots=512)))
    same(tmp_path / "whole", whole, tmp_path / "cut", continued)
    said = capsys.readouterr().out
    assert "note: train.save_every: 4 until now, 2 from here on; it moves no weight" in said
    assert "note: train.loss_chunk_slots: 4096 until now, 512 from here on; it moves weights by rounding only" in said
    assert "note: train.keep_last: 2 until now, 3 from here on" in said
    assert len(saves.folders(tmp_path / "cut/state")) == 3
    assert all(hasattr(settings, name) for name in resume.FREE)


def test_another_machine_goes_on_and_says_that_bits_may_differ(tmp_path: Path) -> None:
    resume.save(tmp_path, Progress({}, 1, "plain bf16", "NVIDIA A, torch 2.13.0", step=3), lambda folder: None)
    found = resume.find(tmp_path, Progress({}, 1, "plain bf16", "NVIDIA B, torch 2.13.0"), overwrite=False)
    assert found.progress.step == 3 and found.progress.machine == "NVIDIA B, torch 2.13.0"
    assert "saved with NVIDIA A, torch 2.13.0, this is NVIDIA B, torch 2.13.0" in found.warnings[0]


def test_a_larger_budget_goes_on_where_the_smaller_ended(tmp_path: Path) -> None:
    whole, unbroken = sitting(job(tmp_path / "whole", config()))
    sitting(job(tmp_path / "cut", config(max_seconds=0.0)))
    finished, continued = sitting(job(tmp_path / "cut", config(max_seconds=600.0)))
    assert finished.progress.step == whole.progress.step
    assert weights(continued)["fc.weight"].equal(weights(unbroken)["fc.weight"])


def test_two_trainings_do_not_write_the_same_saves(tmp_path: Path) -> None:
    refused = pytest.raises(UserError, match="another process is training there; wait for its end")
    with resume.training_alone(tmp_path / "state"), refused:
        resume.training_alone(tmp_path / "state")
    resume.training_alone(tmp_path / "state").release()
