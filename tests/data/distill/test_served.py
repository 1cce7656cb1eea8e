"""A real server in front of the target answers as the target."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest

from tests import tiny
from tests.data.distill.answering import KEEP, distill, local_recipe, outcomes
from tests.tiny import read_rows, write_rows

for package in ("openai", "fastapi", "uvicorn"):
    pytest.importorskip(package, reason=f"needs {package} (pip install -e .[distill,dev])")
pytestmark = pytest.mark.slow
ROWS, TOKENS = 24, 16
JOURNAL = "run/distilled/journal/shard-00001-of-00001.jsonl"


@contextmanager
def served(target: Path, home: Path, port: int) -> Iterator[None]:
    """Runs `transformers serve` with a target during the block, and kills it at the end."""
    (home / "hub").mkdir(parents=True, exist_ok=True)
    words = [sys.executable, "-m", "transformers.cli.transformers", "serve", str(target)]
    words += f"--device cpu --dtype float32 --host 127.0.0.1 --port {port}".split()
    settings = {
        "HF_HUB_OFFLINE": "1",
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        "HF_HOME": str(home),
    }
    with (home / "log").open("ab") as log:
        process = subprocess.Popen(words, env={**os.environ, **settings}, stdout=log, stderr=log)
    try:
        for _ in range(1200):
            with suppress(OSError):
                urlopen(f"http://127.0.0.1:{port}/health")
                break
            time.sleep(0.1)
        yield
    finally:
        process.kill()
        process.wait()


def recipe(place: Path, target: Path, url: str | None) -> Path:
    """A recipe of two-turn conversations; url None: in process."""
    questions = [{"turns": [f"Please count {n} boats.", f"And {n} owls?"]} for n in range(ROWS)]
    section: dict[str, Any] = {
        "sources": [
            {"path": str(write_rows(place / "questions.jsonl", questions)), "kind": "prompts"}
        ],
        "sampling": {"temperature": 0.0, "max_tokens": TOKENS},
        "gate": KEEP,
        "server": {"urls": [url], "concurrency": 2, "timeout_s": 30.0, "retries": 0}
        if url
        else None,
    }
    return local_recipe(place, target, section)


def texts(place: Path) -> list[tuple[str, tuple[str, ...]]]:
    """(id, answers) of every row, in order; checks that the journal has no other line."""
    assert len(read_rows(place / JOURNAL)) == ROWS
    return [
        (row.id, tuple(answer.content for answer in row.answers)) for row in outcomes(place / "run")
    ]


def test_served_answers_are_the_targets(
    tmp_path: Path,
) -> None:
    """A server's answers are the target's own."""
    target = tiny.target(tmp_path / "target")
    own = tmp_path / "own"
    own.mkdir()
    assert distill(recipe(own, target, None)) == 0  # in process
    model = tiny.llama()
    for number, row in enumerate(read_rows(own / "run/distilled/conversations.jsonl")[:4]):
        messages = [{"role": "user", "content": f"Please count {number} boats."}]
        ids = tiny.tokenizer().apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt"
        )["input_ids"]
        written = model.generate(ids, max_new_tokens=TOKENS, do_sample=False)[0].tolist()
        mask = [0] * ids.shape[1] + [1] * (len(written) - ids.shape[1])
        assert row["input_ids"][: len(written)] == written
        assert row["loss_mask"][: len(written)] == mask
    assert any(len(answers) == 2 for _, answers in texts(own))

    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    path = recipe(tmp_path, target, f"http://127.0.0.1:{port}/v1")
    with served(target, tmp_path / "home", port):
        assert distill(path) == 0 and texts(tmp_path) == texts(own)
