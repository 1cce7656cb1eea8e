"""accelerate's trackers (tensorboard, wandb, trackio) over several sittings of one run: one curve, no step twice."""

import secrets
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from model.files import explained, read_json, write_json
from train.resume import TRACKERS

PROJECT = "aerie"


class Trackers:
    """Logs to all trackers of an accelerator."""

    def __init__(self, accelerator: Accelerator, state: Path, reached: int) -> None:
        """reached: the last step that earlier sittings have logged, which may be past the save that is gone on from."""
        self.accelerator, self.state, self.reached = accelerator, state, reached

    def start(self, from_step: int, made_of: str, config: dict[str, Any]) -> None:
        """Opens them: a run of the same made_of (a digest) that was stopped goes on under its own id.

        What was logged after from_step, and is about to be logged again, is purged by tensorboard; wandb leaves out
        what it has, and to trackio, which would take a step twice, it is not sent.
        """
        if not self.accelerator.log_with:
            return
        known, run_id = False, ""
        if self.accelerator.is_main_process:
            known, run_id = self._id(made_of)
        resumed = {"id": run_id, "name": run_id, "resume": "allow"}
        options = {
            "tensorboard": {"purge_step": from_step + 1},
            "wandb": resumed,
            "trackio": {"name": run_id, "resume": "allow"},
        }
        self.accelerator.init_trackers(PROJECT, config=None if known else config, init_kwargs=options)

    def log(self, values: dict[str, float], step: int) -> None:
        """Logs values of a step, on the first process."""
        for tracker in self.accelerator.trackers:
            if tracker.name != "trackio" or step > self.reached:
                with explained(self.state.parent):
                    tracker.log(values, step=step)

    def _id(self, made_of: str) -> tuple[bool, str]:
        """(whether an earlier sitting has opened the trackers, the run's id there)."""
        path = self.state / TRACKERS
        if path.is_file():
            stored = read_json(path)
            if stored.get("made_of") == made_of:
                return True, str(stored["id"])
        run_id = f"{self.state.name}-{secrets.token_hex(4)}"
        write_json(path, {"id": run_id, "made_of": made_of})
        return False, run_id
