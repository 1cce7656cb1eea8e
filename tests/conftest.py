"""Quiets libraries, so that only the project writes to stdout; makes a disk that fills soon."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # do not ask the Hub for made-up names
os.environ.setdefault("OMP_NUM_THREADS", "1")  # a forked process cannot use its parent's threads
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def pytest_collection_modifyitems(items: list) -> None:
    items.sort(key=lambda item: "slurm" not in item.nodeid)  # SLURM's tests first: jobs take long


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    directory = tmp_path / "disk"
    directory.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(directory)]
    if os.geteuid() != 0 or subprocess.run(command, check=False).returncode != 0:
        pytest.skip("mounting a small tmpfs needs root")
    yield directory
    subprocess.run(["umount", "-l", str(directory)], check=True)
