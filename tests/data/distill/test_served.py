"""A real server in front of the target: what it answers is the target's own, and no fault loses or doubles a row."""

import importlib.util
import json
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
from tests.data.distill.answering import KEEP, distill, local_recipe, outcomes, read_rows, write_rows
from tests.data.distill.faults import Proxy, TargetServer, completion

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
        "server": {"urls": [url], "concurrency": 4, "timeout_s": 4.0, **settings} if url else None,
    }
    return local_recipe(place, server.target, section)


def texts(place: Path) -> list[tuple[str, tuple[str, ...]]]:
    """(id, answers) of every row, in order."""
    return [(row.id, tuple(answer.content for answer in row.answers)) for row in outcomes(place / "run")]


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
    found = texts(place)
    assert len(found) == ROWS and any(len(answers) == 2 for _, answers in found)
    return found


def test_no_row_is_lost_or_doubled_by_slow_busy_broken_and_cut_answers(
    server: TargetServer, own: list[tuple[str, tuple[str, ...]]], tmp_path: Path
) -> None:
    chance, kinds = random.Random(3), ["429", "500", "cut", "half", "slow"]
    first = iter(kinds)  # each at least once
    faults = lambda *_: next(first, "") or chance.choice([""] * 5 + kinds[:4])  # noqa: E731
    with Proxy(faults, port=server.port, slow_s=5.0) as proxy:
        assert distill(recipe(tmp_path, server, proxy.url, retries=20)) == 0
    assert texts(tmp_path) == own and next(first, None) is None
    assert len(read_rows(tmp_path / JOURNAL)) == ROWS


def test_a_server_that_is_killed_and_started_again_costs_no_row(
    own: list[tuple[str, tuple[str, ...]]], server: TargetServer, tmp_path: Path
) -> None:
    path = recipe(tmp_path, server, f"http://127.0.0.1:{server.port}/v1", concurrency=2)

    def crash() -> None:
        while not ((tmp_path / JOURNAL).is_file() and (tmp_path / JOURNAL).read_bytes().count(b"\n") > 3):
            time.sleep(0.01)
        server.kill()
        time.sleep(0.5)
        server.start()

    crashing = threading.Thread(target=crash, daemon=True)
    crashing.start()
    assert distill(path) == 0
    crashing.join(120)
    assert not crashing.is_alive() and texts(tmp_path) == own


def test_a_job_that_is_killed_goes_on_to_the_same_rows(
    server: TargetServer, own: list[tuple[str, tuple[str, ...]]], tmp_path: Path
) -> None:
    with Proxy(port=server.port) as proxy:
        path, journal = recipe(tmp_path, server, proxy.url, concurrency=1), tmp_path / JOURNAL
        words = [sys.executable, str(ROOT / "data/main.py"), "distill", "--config", str(path)]
        running = subprocess.Popen(words, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"})
        while running.poll() is None and not (journal.is_file() and journal.read_bytes().count(b"\n") > 5):
            time.sleep(0.01)
        running.kill()
        assert running.wait(30) == -signal.SIGKILL
        assert distill(path) == 0
    assert texts(tmp_path) == own and len(read_rows(journal)) == ROWS
    assert len(proxy.asked) <= sum(len(answers) for _, answers in own) + 2  # only what was under way, again


def test_the_persona_recipe_makes_conversations_with_their_thinking_out_of_personas(tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "persona.jsonl", [{"persona": "A baker"}, {"persona": "A beekeeper"}])
    sources = [{"path": str(rows), "kind": "personas", "ask": "problem", "samples": 2}]

    def answer(asked: dict[str, Any]) -> dict[str, Any]:
        assert asked["temperature"] == 0.7 and asked["top_k"] == -1 and asked["repetition_penalty"] == 1.0
        if "A baker" in asked["messages"][-1]["content"]:
            return completion(asked, "Problem: 2 + 2?")  # the same each time
        message = {"role": "assistant", "content": f"{asked['seed']}.", "reasoning_content": "Let me count."}
        return completion(asked, message=message)

    with Proxy(reply=answer) as proxy:
        words = ["--run", tmp_path / "run", "--target", tiny.target(tmp_path / "target"), "--distill.exclude", "[]"]
        words += ["--distill.server.urls", f"[{proxy.url}]", "--distill.sources", json.dumps(sources)]
        assert distill(ROOT / "configs/distill/qwq-personas.yaml", *words) == 0
    summary = json.loads((tmp_path / "run/distilled/summary.json").read_text())
    assert summary["status"] == {"done": 4} and summary["flaws"] == {"repeated": 1} and summary["kept"] == 3
    talks = [row["messages"] for row in read_rows(tmp_path / "run/distilled/conversations.jsonl")]
    assert all(talk[-1]["content"].startswith("<think>\nLet me count.\n</think>\n\n") for talk in talks)
    assert talks[0][0]["content"].startswith("2 + 2?\n\nSolve this")
