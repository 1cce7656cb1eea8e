"""A real server in front of the target: what it answers is the target's own, and no fault loses or doubles a row."""

import importlib.util
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import tiny
from tests.data.distill.answering import KEEP, distill, local_recipe, outcomes
from tests.data.distill.faults import Proxy, TargetServer
from tests.tiny import read_rows, write_rows

ROOT = Path(__file__).resolve().parents[3]
MISSING = [name for name in ("openai", "fastapi", "uvicorn") if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(MISSING), reason=f"needs {', '.join(MISSING)} (pip install -e .[distill,dev])"),
]
ROWS, TOKENS = 24, 16
JOURNAL = "run/distilled/journal/shard-00001-of-00001.jsonl"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TargetServer]:
    place = tmp_path_factory.mktemp("server")
    made = TargetServer(tiny.target(place / "target"), place / "home")
    made.start()
    yield made
    made.kill()


def recipe(place: Path, server: TargetServer, url: str | None, **settings: Any) -> Path:
    """A recipe of two-turn conversations; url null: in process."""
    questions = [{"turns": [f"Please count {n} boats.", f"And {n} owls?"]} for n in range(ROWS)]
    section: dict[str, Any] = {
        "sources": [{"path": str(write_rows(place / "questions.jsonl", questions)), "kind": "prompts"}],
        "sampling": {"temperature": 0.0, "max_tokens": TOKENS},
        "gate": KEEP,
        "server": {"urls": [url], "concurrency": 2, "timeout_s": 4.0, **settings} if url else None,
    }
    return local_recipe(place, server.target, section)


def texts(place: Path) -> list[tuple[str, tuple[str, ...]]]:
    """(id, answers) of every row, in order; the journal has no other line."""
    assert len(read_rows(place / JOURNAL)) == ROWS
    return [(row.id, tuple(answer.content for answer in row.answers)) for row in outcomes(place / "run")]


def wait_for(lines: int, place: Path) -> None:
    until = time.monotonic() + 120.0
    while time.monotonic() < until:
        if (place / JOURNAL).is_file() and (place / JOURNAL).read_bytes().count(b"\n") >= lines:
            return
        time.sleep(0.01)


@pytest.fixture(scope="module")
def own(server: TargetServer, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, tuple[str, ...]]]:
    """What the target writes in process, which is what transformers decodes and what is trained on."""
    place = tmp_path_factory.mktemp("own")
    assert distill(recipe(place, server, None)) == 0
    model, tokenizer = tiny.llama(), tiny.tokenizer()
    for number, row in enumerate(read_rows(place / "run/distilled/conversations.jsonl")[:4]):
        messages = [{"role": "user", "content": f"Please count {number} boats."}]
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")["input_ids"]
        written = model.generate(ids, max_new_tokens=TOKENS, do_sample=False)[0].tolist()
        assert row["input_ids"][: len(written)] == written
        assert row["loss_mask"][: len(written)] == [0] * ids.shape[1] + [1] * (len(written) - ids.shape[1])
    assert any(len(answers) == 2 for _, answers in texts(place))
    return texts(place)


def test_no_row_is_lost_or_doubled_by_broken_answers_or_a_killed_job_or_server(
    server: TargetServer, own: list[tuple[str, tuple[str, ...]]], tmp_path: Path
) -> None:
    def crash() -> None:
        wait_for(12, tmp_path)
        server.kill()
        time.sleep(0.5)
        server.start()

    chance, kinds = random.Random(3), ["429", "500", "cut", "half", "slow"]
    first, crashing = iter(kinds), threading.Thread(target=crash, daemon=True)  # each fault at least once
    faults = lambda *_: next(first, "") or chance.choice([""] * 5 + kinds[:4])  # noqa: E731
    with Proxy(faults, port=server.port, slow_s=5.0) as proxy:
        path = recipe(tmp_path, server, proxy.url, retries=20)
        words = [sys.executable, str(ROOT / "data/main.py"), "distill", "--config", str(path)]
        running = subprocess.Popen(words, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"})
        wait_for(6, tmp_path)
        running.kill()
        assert running.wait(30) == -signal.SIGKILL
        crashing.start()
        assert distill(path) == 0
        crashing.join(120)
    assert not crashing.is_alive() and texts(tmp_path) == own and next(first, None) is None
