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
import torch

from aerie.configs.errors import exit_code
from aerie.data.main import main
from tests import tiny
from tests.data.distill.answering import outcomes, write_rows
from tests.data.distill.faults import Proxy, Script, TargetServer

ROOT = Path(__file__).resolve().parents[3]
MISSING = [name for name in ("openai", "fastapi", "uvicorn") if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(MISSING), reason=f"needs {', '.join(MISSING)} (pip install -e .[distill,dev])"),
]
ROWS, TOKENS = 24, 16


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
    served = {"urls": [url], "concurrency": 4, "retries": 20, "backoff_s": 0.05, "timeout_s": 4.0, **settings}
    section: dict[str, Any] = {
        "sources": [{"path": str(write_rows(place / "questions.jsonl", questions)), "kind": "prompts"}],
        "sampling": {"temperature": 0.0, "max_tokens": TOKENS},
        "gate": dict.fromkeys(("cut", "empty", "loop", "language", "refusal", "repeated"), "keep"),
        "server": served if url else None,
    }
    target, data = {"path": str(server.target)}, {"conversations": [str(place / "run/distilled/conversations.jsonl")]}
    return tiny.recipe(
        place / "recipe.yaml",
        {"run": str(place / "run"), "threads": 1, "target": target, "data": data, "distill": section},
    )


def distill(path: Path, *words: str) -> int:
    sys.argv = ["data/main.py", "distill", "--config", str(path), *words]
    torch.set_num_threads(1)
    return exit_code(main)


def texts(place: Path) -> list[tuple[str, tuple[str, ...]]]:
    """(id, answers) of every row, in order."""
    return [(row.id, tuple(answer.content for answer in row.answers)) for row in outcomes(place / "run")]


@pytest.fixture(scope="module")
def own(server: TargetServer, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, tuple[str, ...]]]:
    """What the target writes in process."""
    place = tmp_path_factory.mktemp("own")
    assert distill(recipe(place, server, None)) == 0
    found = texts(place)
    assert len(found) == ROWS and any(len(answers) == 2 for _, answers in found)
    return found


def test_greedy_answers_are_the_targets_own_through_the_server_and_in_process(
    server: TargetServer, own: list[tuple[str, tuple[str, ...]]], tmp_path: Path
) -> None:
    model, tokenizer = tiny.llama(), tiny.tokenizer()
    for number, (_, answers) in enumerate(own[:6]):
        messages = [{"role": "user", "content": f"Please count {number} boats."}]
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")["input_ids"]
        new = model.generate(ids, max_new_tokens=TOKENS, do_sample=False)[0, ids.shape[1] :]
        assert tokenizer.decode(new, skip_special_tokens=True) == answers[0]
    assert distill(recipe(tmp_path, server, f"http://127.0.0.1:{server.port}/v1")) == 0
    assert texts(tmp_path) == own


def test_no_row_is_lost_or_doubled_by_slow_busy_broken_and_cut_answers(
    server: TargetServer, own: list[tuple[str, tuple[str, ...]]], tmp_path: Path
) -> None:
    chance = random.Random(3)
    kinds = ["429", "500", "cut", "half", "slow"]
    faults = [kinds[place // 3] if place % 3 == 0 else "none" for place in range(3 * len(kinds))]
    faults += [chance.choice(["none"] * 5 + kinds[:4]) for _ in range(1000)]
    with Proxy(server.port, Script(faults.__getitem__, slow_s=5.0)) as proxy:
        assert distill(recipe(tmp_path, server, proxy.url)) == 0
        assert proxy.script.count > 3 * len(kinds)  # every kind of fault has met a request
    assert texts(tmp_path) == own
    journal = (tmp_path / "run/distilled/journal/shard-00001-of-00001.jsonl").read_text().splitlines()[1:]
    assert len(journal) == ROWS


def test_a_server_that_is_killed_and_started_again_costs_no_row(
    own: list[tuple[str, tuple[str, ...]]], server: TargetServer, tmp_path: Path
) -> None:
    done = threading.Event()
    path = recipe(tmp_path, server, f"http://127.0.0.1:{server.port}/v1", backoff_s=0.2, concurrency=2)

    def crash() -> None:
        journal = tmp_path / "run/distilled/journal/shard-00001-of-00001.jsonl"
        while not (journal.is_file() and journal.read_bytes().count(b"\n") > 4):
            time.sleep(0.01)
        server.kill()
        time.sleep(0.5)
        server.start()
        done.set()

    crashing = threading.Thread(target=crash, daemon=True)
    crashing.start()
    assert distill(path) == 0
    crashing.join(120)
    assert done.is_set() and texts(tmp_path) == own


def test_a_job_that_is_killed_at_five_random_moments_goes_on_to_the_same_rows(
    server: TargetServer, own: list[tuple[str, tuple[str, ...]]], tmp_path: Path
) -> None:
    chance = random.Random(5)
    with Proxy(server.port, Script()) as proxy:
        path = recipe(tmp_path, server, proxy.url, concurrency=1)
        journal = tmp_path / "run/distilled/journal/shard-00001-of-00001.jsonl"
        words = [sys.executable, str(ROOT / "data/main.py"), "distill", "--config", str(path)]
        moments = sorted(chance.sample(range(1, ROWS - 2), 5))  # rows that have ended
        for number, lines in enumerate(moments):
            kill = signal.SIGTERM if number % 2 else signal.SIGKILL
            running = subprocess.Popen(words, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"})
            while running.poll() is None and not (journal.is_file() and journal.read_bytes().count(b"\n") > lines):
                time.sleep(0.01)
            time.sleep(0.05 * chance.random())
            running.send_signal(kill)
            assert running.wait(30) == (130 if kill == signal.SIGTERM else -kill)
        assert distill(path) == 0
        answered = proxy.script.answered
    assert texts(tmp_path) == own
    assert len(journal.read_text().splitlines()) == ROWS + 1
    assert sum(answered.values()) <= sum(len(answers) for _, answers in own) + 5 * 2  # only what was under way, again
