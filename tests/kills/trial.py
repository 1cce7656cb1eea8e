"""Kills at random moments: a stage is started, killed, started again, until one start ends by itself."""

import random
import shutil
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from tests.kills.stages import Stage, half_written
from tests.kills.starts import Python, kill, watched

NEW, MIDDLE, FULL = "before its first write", "between writes", "after its last write"
UNBORN, ENDED = "before the command began", "after its end"  # these count for nothing
COUNTED = (NEW, MIDDLE, FULL)


@dataclass
class Tally:
    """What the kills of one stage met, and what became of the runs."""

    stage: str
    kills: dict[str, int] = field(default_factory=lambda: dict.fromkeys((*COUNTED, UNBORN, ENDED), 0))
    cold: int = 0  # of those that count: of a command that was started from nothing
    torn: int = 0  # of those that count: a file was half written
    continued: int = 0  # starts of the same command after a kill that counts
    runs: int = 0
    equal: int = 0
    differences: list[str] = field(default_factory=list)

    @property
    def counted(self) -> int:
        return sum(self.kills[moment] for moment in COUNTED)

    def add(self, differences: list[str]) -> None:
        """Counts a run that has ended."""
        self.runs += 1
        self.equal += not differences
        self.differences += differences

    def numbers(self) -> list[int]:
        """The cells of its line, without the name."""
        counted = [self.counted, *(self.kills[moment] for moment in COUNTED)]
        return [
            *counted,
            self.torn,
            self.cold,
            self.continued,
            self.runs,
            self.equal,
            self.kills[UNBORN],
            self.kills[ENDED],
        ]


def table(tallies: Iterable[Tally]) -> str:
    """The tallies, one stage a line, and their sums."""
    rows = {tally.stage: tally.numbers() for tally in tallies}
    rows["all"] = [sum(column) for column in zip(*rows.values(), strict=True)]
    apart = (f"({moment})" for moment in (UNBORN, ENDED))
    heads = ["stage", "kills", *COUNTED, "in a write", "cold", "continued", "runs", "equal", *apart]
    widths = [max(len(head), 8) for head in heads]
    lines = [heads, *([name, *map(str, row)] for name, row in rows.items())]
    return "\n".join("  ".join(map(str.rjust, line, widths)) for line in lines)


@dataclass(frozen=True)
class Undisturbed:
    """A stage that has run without a kill, and how long it takes by each way of starting it."""

    stage: Stage
    seconds: dict[str, float]

    @classmethod
    def of(cls, stage: Stage, run: Path, pythons: Iterable[Python]) -> "Undisturbed":
        """Runs it in `run`, which is what later runs are held against, and once more beside it for each other way."""
        seconds: dict[str, float] = {}
        for python in pythons:
            place = run.with_name(f"{run.name}-{stage.name}-{python.name}") if seconds else run
            if place != run:
                stage.begin(place)
            started = time.monotonic()
            code = watched(python.start(stage.words(place), log_of(place)), None, partial(stage.glance, place))
            seconds[python.name] = time.monotonic() - started
            assert code == 0, log_of(place).read_text(encoding="utf-8")[-2000:]
            assert stage.differences(place) == []
        return cls(stage, seconds)


def trial(known: Undisturbed, python: Python, run: Path, chance: random.Random, tally: Tally, wanted: int) -> None:
    """One run, killed at random moments while the tally has fewer kills than wanted; then compared, and removed."""
    stage = known.stage
    stage.begin(run)
    code = None
    while code is None:
        moment = chance.random() * known.seconds[python.name] if tally.counted < wanted else None
        code = _sitting(stage, python, run, moment, tally)
    tally.add(compared(stage, run, code))


def compared(stage: Stage, run: Path, code: int) -> list[str]:
    """Where a run that has ended differs from the undisturbed one; one that does not is removed."""
    said = log_of(run).read_text(encoding="utf-8", errors="replace")
    found = stage.differences(run) if code == 0 else [f"exit code {code}: {said[-600:].strip()}"]
    if not found:
        shutil.rmtree(run)
        log_of(run).unlink()
    return [f"{run.name}: {each}" for each in found]


def _sitting(stage: Stage, python: Python, run: Path, moment: float | None, tally: Tally) -> int | None:
    """One start, killed after `moment` seconds: None, or its exit code where it has ended before."""
    before = stage.written(run), set(half_written(run)), _begun(run)
    running = python.start(stage.words(run), log_of(run))
    code = watched(running, moment, partial(stage.glance, run))
    if code is None:
        code = kill(running)
    if code >= 0:
        tally.kills[ENDED] += moment is not None
        return code
    if stage.is_whole(run):
        tally.kills[ENDED] += 1
    elif _begun(run) == before[2]:
        tally.kills[UNBORN] += 1
    else:
        share = stage.written(run)
        tally.kills[FULL if share == 1.0 else MIDDLE if share > before[0] else NEW] += 1
        tally.torn += bool(set(half_written(run)) - before[1])
        tally.cold += python.name == "cold"
        tally.continued += 1
    return None


def _begun(run: Path) -> int | None:
    """Changes as soon as a command has begun its work there."""
    status = run / "status.json"
    return status.stat().st_mtime_ns if status.is_file() else None


def log_of(run: Path) -> Path:
    """What the commands print that work there."""
    return run.with_name(f"{run.name}.log")
