"""aerie init --server writes a recipe for servers of answers and states; it runs to its report.

The servers here are stand-ins with a real target. tests/data/test_real_state_server.py has a vLLM.
"""

import json
import re
import socket
from pathlib import Path
from typing import Any

import pytest

from aerie.data import first_recipe
from tests import tiny
from tests.configs.test_recipes import load
from tests.data.distill.answering import KEEP
from tests.data.vllm_stand_in import VllmStandIn

URL = "http://127.0.0.1:{port}/v1"
INIT = f"aerie init --target target --data chats.jsonl --out r.yaml --server {URL} --run run"
LIMITS = """--kind eagle1 --threads 1 --train.max_steps 4 --bench.reference false
--bench.prompts.max_new_tokens 8 --calibrate.prompts.max_new_tokens 8
--distill.sampling.max_tokens 12 --distill.gate '{gate}'"""


@pytest.fixture
def port(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """The servers' port. The working directory has a target and conversations."""
    pytest.importorskip("openai", reason="needs the extra 'distill' (pip install -e .[distill])")
    monkeypatch.chdir(tmp_path)
    tiny.target(tmp_path / "target")
    tiny.write_conversations(tmp_path / "chats.jsonl", 60)
    with socket.create_server(("127.0.0.1", 0)) as unused:
        return int(unused.getsockname()[1])


def test_what_is_requested_wins(port: int, capfd: Any) -> None:
    """A user's own servers of states, questions and system prompt win over the defaults."""
    options = """--states-server http://b:1/v1 http://c:1/v1 --states /shared --distill.seed 3
    --bench.prompts.tasks [gsm8k] --calibrate.prompts.num_prompts 2 --data.system_prompt Be.
    --data.max_length 200"""
    text = """
    {init}
        # answers from http://127.0.0.1:{port}/v1 (start them now
        # hidden states from http://b:1/v1, http://c:1/v1 (start them now
        --port 1 --dtype float32 --max-model-len 201
    aerie init --target target --data chats.jsonl --out no.yaml --states /shared
        exit 2
        work only with --server
    aerie init --target target --data chats.jsonl --out no.yaml --server http://a:x/v1
        exit 2
        http://a:x/v1: Port could not be cast
    aerie init --target target --data owner/name --out hub.yaml --server http://a/v1
        written: hub.yaml;
    {bare} --out bare.yaml --data.limit 7 --bench null
        written: bare.yaml
    {bare} --out no.yaml --distill.server null
        exit 2
        do not set one of them to null
    aerie init --target target --data few.jsonl --out no.yaml --server http://a
        exit 2
        few.jsonl: 2 of 2 rows ask a question
        needs 3 or more
    """
    tiny.write_conversations(Path("few.jsonl"), 2)
    init = " ".join(f"{INIT} {options}".split()).format(port=port)
    bare = "aerie init --target target --data chats.jsonl --server http://a"
    tiny.session(text, capfd, init=init, port=port, bare=bare)
    recipe = load(Path("r.yaml"))
    assert recipe.distill is not None and recipe.features.server is not None
    assert (recipe.distill.seed, recipe.distill.sources[0].system_prompt) == (3, "Be.")
    assert recipe.data.conversations == ("run/distilled/conversations.jsonl",)
    assert recipe.data.system_prompt is None
    assert recipe.features.server.urls == ("http://b:1/v1", "http://c:1/v1")
    assert recipe.features.server.states == "/shared"
    assert recipe.bench is not None and recipe.bench.prompts.path is None
    assert recipe.calibrate is not None and recipe.calibrate.prompts.path == "r.calibrate.jsonl"
    assert recipe.calibrate.prompts.system_prompt == "Be."
    drawn = {path.name for path in Path().glob("*.calibrate.jsonl")}
    assert drawn == {"r.calibrate.jsonl", "bare.calibrate.jsonl"}
    assert not [*Path().glob("*.bench.jsonl")]  # no stage reads such questions
    short = load(Path("bare.yaml"))
    assert short.distill is not None and short.distill.server is not None and short.bench is None
    assert short.distill.server.urls == ("http://a/v1",) and short.distill.sources[0].num_rows == 7
    hub = load(Path("hub.yaml"))
    assert hub.bench is not None and hub.bench.prompts.tasks[0].name == "mt_bench"


def test_a_target_that_only_servers_hold(
    port: int, capfd: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run ends with the head, and the data may be questions alone."""
    monkeypatch.setattr(first_recipe, "MEMORY_SHARE", 0.0)
    questions = [{"question": f"What are {number} owls?"} for number in range(40)]
    tiny.write_rows(Path("chats.jsonl"), questions)
    text = """
    {init}
        so the run ends with the trained head
    aerie run r.yaml --plan
        aerie train
    """
    init = INIT.format(port=port)
    printed = tiny.session(text, capfd, init=init)
    assert re.findall("^aerie ([a-z]+)", printed, re.MULTILINE) == ["distill", "features", "train"]
    recipe = load(Path("r.yaml"))
    assert recipe.last_stage == "train" and recipe.bench is None
    assert [*Path().glob("r.*.jsonl")] == []


@pytest.mark.slow
def test_a_run_asks_for_its_servers_and_goes_on(port: int, capfd: Any) -> None:
    """A stage without its server, or with a server of another purpose, names the right command."""
    states = Path("run/states")
    names = {"port": port, "gate": json.dumps(KEEP)}
    init = " ".join(f"{INIT} {LIMITS}".split()).format(**names)
    text = """
    {init}
        # answers from http://127.0.0.1:{port}/v1
        # vllm serve target --port {port} --dtype float32
        "shared_storage_path": "
        aerie run r.yaml
    aerie run r.yaml
        exit 2
        distill: no server answers (http://127.0.0.1:{port}/v1:
        vllm serve target --port {port} --dtype float32
    """
    tiny.session(text, capfd, init=init, port=port)
    again = """
    aerie run r.yaml
        exit 2
        gives hidden states, and leaves a file for each answer; restart it without
    aerie status run
        distill stopped 0 of 60 rows have ended
    """
    with VllmStandIn(Path("target"), (4,), states, port):
        tiny.session(again, capfd)
    text = """
    aerie run r.yaml
        exit 2
        gives answers, but no states; restart it with:
        vllm serve target --port {port} --dtype float32 --max-model-len 48 --disable
    aerie status run
        distill whole
        features absent
    """
    with VllmStandIn(Path("target"), port=port):
        tiny.session(text, capfd, port=port)
    with VllmStandIn(Path("target"), (4,), states, port):
        tiny.session("aerie run r.yaml\n distill: whole, reused", capfd)
    text = """
    aerie run r.yaml
        features: whole, reused
    aerie status run
        report whole best tau
    """
    tiny.session(text, capfd)  # without a server
    assert not any(states.iterdir())
    asked = {prompt["id"] for prompt in tiny.read_rows(Path("run/distilled/prompts.jsonl"))}
    assert len(asked) == 60
    for path in Path().glob("r.*.jsonl"):
        for row in tiny.read_rows(path):
            skipped = [
                prompt["skip"]
                for prompt in tiny.read_rows(Path("run/distilled/prompts.jsonl"))
                if row["messages"][-1]["content"] in prompt["turns"]
            ]
            assert skipped and all(skipped)
