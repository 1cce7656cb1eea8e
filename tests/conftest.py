"""Quiet libraries: what a test reads from stdout is the project's own."""

import os

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a made-up name is not asked for
os.environ.setdefault("OMP_NUM_THREADS", "1")  # a fork cannot use its parent's threads
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def pytest_collection_modifyitems(items: list) -> None:
    items.sort(key=lambda item: "slurm" not in item.nodeid)  # they wait
