"""Runs of the real loop in this process, on a tiny head and random rows."""

import json
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState, GradientState

from aerie.configs.read import as_dict
from aerie.configs.schema.train import TrainConfig
from aerie.data.cache import CachedRow
from aerie.model.checkpoint import save_head
from aerie.train.launch import Launch, build_accelerator
from aerie.train.loop import Job, Loop, Outcome
from aerie.train.objectives.eagle import Eagle1Objective
from tests import tiny

ENDS = tiny.ends()


def config(**changes: Any) -> TrainConfig:
    values: dict[str, Any] = {
        "epochs": 3,
        "batch_size": 4,
        "learning_rate": 1e-2,
        "warmup_steps": 2,
        "eval_every": 0,
        "log_every": 1,
        **changes,
    }
    return TrainConfig(**values)


def job(directory: Path, settings: TrainConfig, rows: list[CachedRow] | None = None, **changes: Any) -> Job:
    """A job on 20 rows that writes below directory."""
    rows = tiny.rows(20) if rows is None else rows
    values: dict[str, Any] = {
        "kind": "eagle1",
        "module": tiny.head(ENDS.embedding, scale=5.0),
        "objective": Eagle1Objective(ENDS, settings),
        "train": rows,
        "lengths": [len(row.input_ids) for row in rows],
        "held_out": tiny.rows(4, seed=1),
        "config": settings,
        "output": directory / "head",
        "state": directory / "state",
        "metrics": directory / "metrics.jsonl",
        "save": lambda head, place, facts: save_head(head, place, **facts),
        **changes,
    }
    return Job(**values)


def sitting(made: Job, recipe: str = "recipe") -> tuple[Outcome, Loop]:
    """The job run by a fresh accelerator, as a new process would."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    torch.manual_seed(int(torch.randint(1 << 30, ()).item()))  # nothing may depend on the global generator
    accelerator = build_accelerator(made.config, Launch(), made.state)
    loop = Loop(made, accelerator, {"head": recipe, "train": as_dict(made.config)})
    loop.trackers.start(loop.progress.step, recipe, {"recipe": recipe})
    outcome = loop.run()
    accelerator.end_training()
    return outcome, loop


def lines(directory: Path) -> list[dict[str, Any]]:
    """The records of a run's metrics.jsonl."""
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def weights(loop: Loop) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in loop.module.named_parameters()}
