"""Rows of the bench that a server answers, against one that speaks as vLLM and SGLang do.

Its answers and cycles are those of a chain; a real vLLM answers in the last test.
"""

import json
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

from aerie.configs.errors import UserError
from aerie.configs.schema.decode import MethodConfig, ServedConfig
from aerie.configs.schema.heads import TargetConfig
from aerie.configs.schema.measure import BenchConfig, PromptsConfig, SamplingConfig
from aerie.infer.decode.engine import SpeculativeDecoder
from aerie.infer.measure.bench import Bench, measure_answers, run_reference
from aerie.infer.measure.bench_files import (
    RECORDS,
    SERVED_FILE,
    Record,
    ServedFile,
    line_of,
    read_as,
    read_records,
)
from aerie.infer.measure.served import compare_with_chains
from aerie.infer.measure.server import Counters, counted_drafts
from aerie.infer.measure.statistics import group, summary_row
from aerie.infer.measure.suite import SettledRow, read_suite
from aerie.infer.measure.tasks import Prompt
from aerie.infer.measure.tree_shape import TreeShape
from aerie.infer.report.page import write_report
from aerie.infer.report.tables import console_table
from aerie.model.storage import ROOT, read_json
from aerie.model.target import Target
from aerie.model.target_files import load_tokenizer
from tests import tiny
from tests.tiny import refused

pytest.importorskip("openai", reason="needs the extra 'distill' (pip install -e .[distill])")

LEVELS = 3
SIZES = {"hidden_size": 128, "max_position_embeddings": 112}  # heads of 32, which vLLM knows
PROMPTS = [
    Prompt("a", "count", ("Please count 4 boats.", "Now sort 5 owls.")),
    Prompt("b", "count", ("Please paint 9 stones.",)),
    Prompt("c", "draw", ("Please draw 3 letters.",)),
]
GREEDY = SamplingConfig()
MODELS = {"object": "list", "data": [{"id": "tiny", "object": "model", "owned_by": "vllm"}]}
VLLM = ROOT / ".venv-served" / "bin" / "vllm"


class Models:
    """A target, and drafts for it: the target with noise in its weights."""

    def __init__(self, root: Path) -> None:
        self.root = root
        recipe = TargetConfig(str(tiny.target(root / "target", **SIZES)), dtype="float32")
        self.target = Target.load(recipe)
        self.tokenizer = load_tokenizer(recipe)

    def draft(self, seed: int = 1) -> str:
        directory = self.root / f"draft-{seed}"
        if not directory.exists():
            tiny.target(directory, **SIZES)
            model = tiny.llama(**SIZES)
            generator = torch.Generator().manual_seed(seed)
            for weight in model.parameters():
                noise = torch.randn(weight.shape, generator=generator)
                weight.data.add_(noise, alpha=0.004)
            model.save_pretrained(directory)
        return str(directory)

    def bench(self, directory: Path, rows: Sequence[Any], **changes: Any) -> Bench:
        config = BenchConfig(
            PromptsConfig("p.jsonl", max_new_tokens=16),
            (MethodConfig.of("vanilla"), MethodConfig.of("sps", levels=LEVELS), *rows),
            (GREEDY,),
            warmup_prompts=1,
        )

        def settle(row: Any, _: str) -> SettledRow:
            is_chain = row.method == "sps"
            return SettledRow(row, self.draft(), "draft_lm") if is_chain else SettledRow(row)

        suite = read_suite(replace(config, **changes), settle)
        return Bench.open(self.target, self.tokenizer, suite, directory)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("served"))


# --- a server that drafts with a chain ------------------------------------------------------------


class Chained(ThreadingHTTPServer):
    """Answers with a chain of aerie; `says`: where it tells its cycles; `fault`: see `_Handler`."""

    daemon_threads = True
    counts_bonus = False  # among the accepted drafts

    def __init__(self, models: Models, says: str = "counters", seed: int = 1) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}/v1"
        self.says = says
        self.fault = ""
        self.cards: dict[str, Any] = MODELS
        self.lock = threading.Lock()
        self.refuses: list[list[int]] = []
        self.bodies: list[dict[str, Any]] = []
        self.counts = dict.fromkeys(("drafts", "draft_tokens", "tokens"), 0)
        self.by_position = [0] * LEVELS
        self.decoder = SpeculativeDecoder.from_pretrained(
            models.target, models.draft(seed), method="sps", tree={"levels": LEVELS}
        )
        self.tokenizer = models.tokenizer

    def __enter__(self) -> "Chained":
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()

    def page(self) -> str:
        labels = '{engine="0",model_name="tiny"'
        lines = [
            f"vllm:spec_decode_num_drafts_total{labels}}} {self.counts['drafts']}.0",
            f"vllm:spec_decode_num_draft_tokens_total{labels}}} {self.counts['draft_tokens']}.0",
            f"vllm:generation_tokens_total{labels}}} {self.counts['tokens']}.0",
            f"vllm:request_prefill_time_seconds_sum{labels}}} 0.0",
        ]
        for position, count in enumerate(self.by_position):
            name = f'spec_decode_num_accepted_tokens_per_pos_total{labels},position="{position}"'
            lines.append(f"vllm:{name}}} {count}.0")
        return "\n".join(lines)

    def reply(self, body: dict[str, Any]) -> dict[str, Any]:
        if isinstance(body["prompt"], str):  # whether it is up
            return {"choices": [{"index": 0, "text": "a", "finish_reason": "length"}]}
        with self.lock:
            self.bodies.append(body)
            generation = self.decoder.generate(
                torch.tensor([body["prompt"]]),
                max_new_tokens=body["max_tokens"],
                do_sample=body["temperature"] > 0,
                temperature=body["temperature"],
            )
            accepted = list(generation.statistics.accepted)
            if accepted:  # counted before the cut at the answer's end
                accepted[-1] = LEVELS
            if self.counts_bonus:
                accepted = [min(count + 1, LEVELS) for count in accepted]
            histogram = [accepted.count(number) for number in range(LEVELS + 1)]
            self.counts["drafts"] += len(accepted)
            self.counts["draft_tokens"] += LEVELS * len(accepted)
            self.counts["tokens"] += len(generation.new_ids) + 5 * (self.fault == "shared")
            for count in accepted:
                for position in range(count):
                    self.by_position[position] += 1
        choice: dict[str, Any] = {
            "index": 0,
            "finish_reason": "length",
            "text": self.tokenizer.decode(generation.new_ids),
        }
        if self.says != "text":
            choice["token_ids"] = generation.new_ids
        if self.says == "meta_info":
            choice["meta_info"] = {"spec_verify_ct": len(accepted)}
        reply = {"choices": [choice], "usage": {"completion_tokens": len(generation.new_ids)}}
        if self.says == "reply":
            reply["metrics"] = {
                "speculative_decoding": {
                    "acceptance_histogram": histogram,
                    "num_draft_tokens": LEVELS * len(accepted),
                }
            }
        return reply


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # headers and content in one packet
    server: Chained

    def do_GET(self) -> None:
        pages = {"/v1/models": json.dumps(self.server.cards), "/version": '{"version": "0.32.0"}'}
        if self.server.says in ("counters", "reply"):
            pages["/metrics"] = self.server.page()
        text = pages.get(self.path)
        kind = "text/plain" if self.path == "/metrics" else "application/json"
        self.send(404 if text is None else 200, text or "{}", kind)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        fault = self.server.fault
        if fault.startswith("dies after "):
            number = int(fault.split()[-1])
            if len(self.server.bodies) >= number:
                self.close_connection = True
                return
        if body["prompt"] in self.server.refuses:
            error = {"error": {"message": "the prompt is longer than max_model_len"}}
            self.send(400, json.dumps(error), "application/json")
            return
        self.send(200, json.dumps(self.server.reply(body)), "application/json")

    def send(self, status: int, text: str, kind: str) -> None:
        content = text.encode()
        with suppress(OSError):  # the client may have gone
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

    def log_message(self, format: str, *arguments: object) -> None:
        """Prints nothing."""


def served(server: Chained, **keys: Any) -> ServedConfig:
    return ServedConfig("served", server.url, **{"name": "chained", "at_once": (4,), **keys})


def served_group(records: Sequence[Record]) -> Any:
    return next(members for members in group(records) if members.first.method == "served")


def report_of(directory: Path, records: Sequence[Record]) -> tuple[dict[str, Any], str, str]:
    """The served row of summary.json, the table for a terminal, and the page."""
    (directory / RECORDS).write_text("".join(map(line_of, records)), encoding="utf-8")
    facts = {
        "run": "runs/served",
        "commit": None,
        "target": {"name": "tiny"},
        "head": {"kind": "draft_lm"},
        "hardware": {},
        "commands": [],
    }
    rows = write_report(directory, directory / "none", directory / "report", facts, 0)
    summary = read_json(directory / "report" / "summary.json")
    row = next(row for row in summary["rows"] if row["method"] == "served")
    page = (directory / "report" / "index.html").read_text(encoding="utf-8")
    return row, console_table(rows), page


@pytest.mark.parametrize("says", ["counters", "reply"])
def test_same_drafts(models: Models, tmp_path: Path, says: str) -> None:
    """A server that drafts what the chain drafts has its tau, its answers and the same drafts."""
    with Chained(models, says) as server:
        bench = models.bench(tmp_path, [served(server)])
        records = run_reference(bench, measure_answers(bench, PROMPTS, seed=3))
    vanilla, chain, row = (members.records for members in group(records))
    assert [r.status for r in row] == ["ok"] * 4
    assert [r.prompt_ids for r in row] == [r.prompt_ids for r in vanilla]
    assert [r.output_ids for r in row] == [r.output_ids for r in vanilla]
    assert all(r.identical and r.identical_to_generate for r in row)
    assert [r.target_forwards for r in row] == [r.target_forwards for r in chain]
    assert summary_row(served_group(records)).tau == summary_row(group(records)[1]).tau > 1.5
    [comparison] = compare_with_chains(records, {1, 2})
    assert comparison["differing"] == 0 and comparison["other_from"] is None
    written, table, page = report_of(tmp_path, records)
    assert written["tau"] < written["served"]["mean_acceptance_length"]
    assert written["speedup"] is None and written["identical"] == 4
    assert written["served"]["chain"]["cycles"] == comparison["cycles"]
    [load] = written["served"]["at_once"]
    assert (load["at_once"], load["answers"], load["identical"], load["failed"]) == (4, 8, 8, 0)
    words = f"the same drafts: {comparison['cycles']} = {comparison['cycles']} cycles of row 1"
    assert words in table and "<strong>" in page
    assert "the same drafts" in page and "before the answer is cut" in page


def test_other_drafts(models: Models, tmp_path: Path) -> None:
    """A server with another head writes the same answers, from other drafts."""
    with Chained(models, seed=2) as server:
        records = measure_answers(models.bench(tmp_path, [served(server)]), PROMPTS, seed=3)
    assert all(r.identical for r in records if r.method == "served")
    [comparison] = compare_with_chains(records, {1, 2})
    assert comparison["differing"] > 0 and comparison["cycles"] != comparison["chain_cycles"]
    assert "other drafts" in report_of(tmp_path, records)[1]


@pytest.mark.parametrize("says", ["meta_info", "ids", "text"])
def test_other_servers(models: Models, tmp_path: Path, says: str) -> None:
    """A server without vLLM's counters gives what it has: cycles, ids, or speed alone."""
    with Chained(models, says) as server:
        records = measure_answers(models.bench(tmp_path, [served(server)]), PROMPTS, seed=3)
    members = served_group(records)
    row = summary_row(members)
    assert row.status == "ok" and row.tokens_per_s
    assert row.identical == (None if says == "text" else 4)
    assert row.tau == (summary_row(group(records)[1]).tau if says == "meta_info" else None)
    written, table, _ = report_of(tmp_path, records)
    assert written["served"]["accepted_by_position"] is None
    # without counters nobody knows how long the drafts are
    assert written["served"]["chain"] is None and "chained" in table


def test_what_is_asked(models: Models, tmp_path: Path) -> None:
    """The body has all that draws a token, and the target's end ids; extra_body is added."""
    samplings = (GREEDY, SamplingConfig(0.7, 5, 0.9))
    with Chained(models, "ids") as server:
        row = served(server, extra_body={"priority": 1}, at_once=())
        bench = models.bench(tmp_path, [row], sampling=samplings)
        measure_answers(bench, PROMPTS[1:2], seed=3)
    greedy, sampled = (
        next(body for body in reversed(server.bodies) if body["temperature"] == temperature)
        for temperature in (0.0, 0.7)
    )
    assert (greedy["top_k"], greedy["top_p"], greedy["max_tokens"]) == (-1, 1.0, 16)
    assert (sampled["top_k"], sampled["top_p"], sampled["min_p"]) == (5, 0.9, 0.0)
    ends = [models.target.generation_config.eos_token_id]
    for body in (greedy, sampled):
        assert body["stop_token_ids"] == ends and body["ignore_eos"] and body["priority"] == 1


def test_server_dies(models: Models, tmp_path: Path) -> None:
    """A server that goes away stops the bench with a line; the same command goes on."""
    with Chained(models) as server:
        bench = models.bench(tmp_path, [served(server, timeout_s=5.0)])
        server.fault = "dies after 5"  # three answers show that the target is the same
        refused("start the server, .* same command", measure_answers, bench, PROMPTS, seed=3)
        before = read_records(tmp_path / RECORDS)
        assert sum(record.method == "served" for record in before) == 2
        server.fault = ""
        records = measure_answers(bench, PROMPTS, seed=3)
    assert [record for record in records if record.method == "served"][:2] == [
        replace(record, identical=True) for record in before if record.method == "served"
    ]
    assert compare_with_chains(records, {1, 2})[0]["differing"] == 0


def test_prompt_is_refused(models: Models, tmp_path: Path) -> None:
    """A prompt that the server refuses fails with the server's words; the others go on."""
    with Chained(models) as server:
        bench = models.bench(tmp_path, [served(server)])
        ids = bench.tokenizer.apply_chat_template(
            [{"role": "user", "content": PROMPTS[1].turns[0]}],
            add_generation_prompt=True,
            tokenize=True,
            return_dict=False,
        )
        server.refuses = [ids]
        records = [r for r in measure_answers(bench, PROMPTS, seed=3) if r.method == "served"]
    failed = [record for record in records if record.status == "error"]
    assert [record.prompt_id for record in failed] == ["b"] and len(records) == 4
    assert "longer than max_model_len" in str(failed[0].message)


def test_refused_servers(models: Models, tmp_path: Path) -> None:
    """No server, another model, another target, other clients, another server later: a line."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        gone = ServedConfig("served", f"http://127.0.0.1:{free.getsockname()[1]}")
    refused(r"bench row 2: .*Connection error.*; start the server", models.bench, tmp_path, [gone])
    with Chained(models) as server:
        wrong = served(server, model="large")
        refused("serves tiny, not large", models.bench, tmp_path, [wrong])
        card = MODELS["data"][0]
        server.cards = {"object": "list", "data": [card, {**card, "id": "b"}]}
        refused("serves tiny, b; choose one with `model`", models.bench, tmp_path, [served(server)])
        server.cards = MODELS
        server.fault = "shared"
        bench = models.bench(tmp_path / "shared", [served(server)])
        refused("stop all other requests", measure_answers, bench, PROMPTS, seed=3)
        server.fault = ""
        bench = models.bench(tmp_path / "later", [served(server, at_once=())])
        measure_answers(bench, PROMPTS[1:2], seed=3)
        server.cards = {"object": "list", "data": [{**card, "root": "other"}]}
        bench = models.bench(tmp_path / "later", [served(server)])
        refused("its root is other now, and was None", measure_answers, bench, PROMPTS, seed=3)
        server.cards = MODELS
        other = SpeculativeDecoder.from_pretrained(Target.load(other_target(tmp_path)))
        server.decoder = other
        bench = models.bench(tmp_path / "other", [served(server)])
        refused("serves another model", measure_answers, bench, PROMPTS, seed=3)


def other_target(root: Path) -> TargetConfig:
    return TargetConfig(str(tiny.target(root / "other-target", seed=5, **SIZES)))


def test_context_of_the_server(models: Models, tmp_path: Path) -> None:
    """Answers end, alike in all rows, where the server has no more room."""
    with Chained(models) as server:
        server.cards = {"object": "list", "data": [{**MODELS["data"][0], "max_model_len": 22}]}
        records = measure_answers(models.bench(tmp_path, [served(server)]), PROMPTS[1:2], seed=3)
    assert {record.prompt_tokens + record.new_tokens for record in records} == {22}


def test_steps_without_a_draft() -> None:
    """A step without a draft, which vLLM does not count, is a cycle that makes one token."""
    counters = Counters(drafts=3, draft_tokens=6, accepted=(2, 1), tokens=12, prefill_ms=0.0)
    # 3 drafts made 3 + 3 tokens, and the prefill one: five steps had none
    drafts = counted_drafts(counters, 12)
    assert (drafts.cycles, sorted(drafts.accepted)) == (8, [0, 0, 0, 0, 0, 0, 1, 2])
    # up to two accepted tokens were cut
    assert counted_drafts(counters, 5).cycles == 3


def made_up(method: str, accepted: list[int]) -> Record:
    shape = "chain" if method == "sps" else "served"
    settings = {"stop": {"rule": "constant"}}
    return Record(
        *(int(method == "served"), 0.0, 0, 1.0, method, "count", "a"),
        tree=TreeShape(shape, LEVELS, 1, LEVELS + 1, settings),
        verify="R0",
        output_ids=tuple(range(5)),
        new_tokens=1 + len(accepted) + sum(accepted),
        accepted=tuple(accepted),
        target_forwards=len(accepted),
    )


@pytest.mark.parametrize(
    ("accepted", "position"),
    [([1] * 70, 2), ([0] * 140, 1), ([3, 2, 3, 2] * 10, None)],
    ids=["the second token is wrong", "all are", "about as many, elsewhere"],
)
def test_other_from(accepted: list[int], position: int | None) -> None:
    """Drafts differ from the position on whose share the cut of last cycles does not explain."""
    chain = made_up("sps", [3, 3, 3, 1] * 10)
    [comparison] = compare_with_chains([chain, made_up("served", accepted)], {0, 1})
    assert comparison["other_from"] == position


# --- a real vLLM ----------------------------------------------------------------------------------


@pytest.mark.served
@pytest.mark.slow
def test_vllm(models: Models, tmp_path: Path) -> None:
    """vLLM with a draft LM takes the cycles of the chain, and writes vanilla's answers."""
    if not VLLM.exists():
        pytest.skip("no vLLM: make served sets it up in .venv-served")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    speculative = {
        "model": models.draft(),
        "method": "draft_model",
        "num_speculative_tokens": LEVELS,
    }
    command = [
        *(str(VLLM), "serve", models.target.recipe.path, "--port", str(port)),
        *("--dtype", "float32", "--enforce-eager"),
        *("--speculative-config", json.dumps(speculative)),
    ]
    settings = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    environment |= settings
    log = tmp_path / "vllm.log"
    row = ServedConfig("served", f"http://127.0.0.1:{port}", at_once=(8,))
    with log.open("w") as file:
        process = subprocess.Popen(
            command, env=environment, stdout=file, stderr=file, start_new_session=True
        )
    try:
        bench = None
        while bench is None:
            assert process.poll() is None, log.read_text()[-2000:]
            time.sleep(1.0)
            with suppress(UserError):  # until it answers
                bench = models.bench(tmp_path, [row])
        records = measure_answers(bench, PROMPTS, seed=3)
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(60)
    assert all(record.identical for record in records)
    [comparison] = compare_with_chains(records, {1, 2})
    assert comparison["differing"] == 0 and comparison["answers"] == 4
    [load] = read_as(tmp_path / SERVED_FILE, ServedFile).loads
    assert load.identical == load.compared == 16
