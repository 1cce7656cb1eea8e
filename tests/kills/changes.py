"""Kills just before each change to a file: where a stage begins, and where it ends.

Moments that are drawn over a stage's whole time seldom fall between two changes that follow each other at once.
"""

import re
import shutil
from functools import partial
from pathlib import Path

from tests.kills.stages import Stage
from tests.kills.starts import WarmPython, watched
from tests.kills.trial import compared, log_of

TAIL = {"features": 12, "training": 24, "bench": 12}  # changes before the end: there begins what is tried one by one


def from_the_start(stage: Stage, python: WarmPython, run: Path) -> tuple[int, list[str]]:
    """(kills, differences) of one run: its n-th sitting dies just before the n-th change that it makes to a file."""
    stage.begin(run)
    kills = 0
    while (code := _sitting(stage, python, run, kills + 1)) < 0:
        kills += 1
    return kills, compared(stage, run, code)


def to_the_end(stage: Stage, python: WarmPython, run: Path) -> tuple[int, list[str]]:
    """(kills, differences) of runs that died near their end once, then before the first, the second ... change on."""
    stage.begin(run)
    assert _sitting(stage, python, run, None) == 0
    total = int(re.findall(r"^changes: (\d+)$", log_of(run).read_text(encoding="utf-8"), re.MULTILINE)[-1])
    differences = compared(stage, run, 0)
    stage.begin(run)
    assert _sitting(stage, python, run, total - TAIL[stage.name]) < 0 and not stage.is_whole(run)
    almost = run.rename(run.with_name(f"{run.name}-almost"))
    kills, code = 0, -1
    while code < 0 and not differences:
        shutil.copytree(almost, run, symlinks=True)  # under the same name, which a training writes down
        code = _sitting(stage, python, run, kills + 1)
        kills += code < 0
        differences += compared(stage, run, _sitting(stage, python, run, None) if code < 0 else code)
    return kills, differences


def _sitting(stage: Stage, python: WarmPython, run: Path, fatal: int | None) -> int:
    """The exit code of one start that dies just before its fatal-th change."""
    code = watched(python.start(stage.words(run), log_of(run), run, fatal), None, partial(stage.glance, run))
    assert code is not None
    return code
