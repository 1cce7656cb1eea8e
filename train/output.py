"""Whose the files of an output directory are: of this training, over or under way, of another one, or of none."""

from dataclasses import dataclass
from pathlib import Path

from data.provenance import FILE, Stage, sound_record
from model.errors import UserError
from model.files import digest, write_text
from train import resume, saves


@dataclass(frozen=True)
class Output:
    """A training's output directory, the run's directory, and that of the training's saves below it."""

    stage: Stage
    run: Path
    state: Path

    @property
    def begun(self) -> Path:
        """Names the output of a training that is under way: what lies there without provenance is this run's own."""
        return self.state.parent / f"{self.state.name}.begun"

    def require_own(self) -> None:
        """UserError for a directory with another training's output, or with files that no training of this run made."""
        if self._is_unfinished():
            return
        self.stage.require_own_directory(overwrite=False)
        output = self.stage.output
        if (output / FILE).is_file() or not output.is_dir() or not any(output.iterdir()) or self._is_begun():
            return
        raise UserError(
            f"{output}: holds files that no run has made; name another output, or replace them with --overwrite"
        )

    def begin(self) -> None:
        """From here on what lies in the directory is this training's; a run that is moved keeps what is inside it."""
        output, run = self.stage.output.resolve(), self.run.resolve()
        write_text(self.begun, f"{output.relative_to(run) if output.is_relative_to(run) else output}\n")
        (self.stage.output / FILE).unlink(missing_ok=True)

    def end(self) -> None:
        """The record in the directory says from here on whose it is."""
        self.begun.unlink(missing_ok=True)

    def _is_begun(self) -> bool:
        if not self.begun.is_file():
            return False
        name = self.begun.read_text(encoding="utf-8").strip()
        places = (self.run / name, Path(name))  # the second as an earlier version wrote it
        return self.stage.output.resolve() in [place.resolve() for place in places]

    def _is_unfinished(self) -> bool:
        """Whether a budget ended this very training, but for settings that move no weight, and its saves are there."""
        record = sound_record(self.stage.output)
        if record.get("ended") != "budget" or not saves.folders(self.state):
            return False
        then, now = (digest(resume.decisive(inputs)) for inputs in (record["inputs"], self.stage.inputs))
        return then == now
