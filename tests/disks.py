"""A file system that is soon full."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB in memory."""
    yield from mounted(tmp_path / "disk", 1024)


def mounted(directory: Path, size_kib: int) -> Iterator[Path]:
    """The directory, as a tmpfs of this size until the next step of the iterator; skips where none can be mounted."""
    directory.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size_kib}k", "tmpfs", str(directory)]
    if os.geteuid() != 0 or subprocess.run(command, check=False).returncode != 0:
        pytest.skip("mounting a small tmpfs needs root")
    yield directory
    subprocess.run(["umount", "-l", str(directory)], check=True)
