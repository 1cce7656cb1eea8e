"""One line a cycle says everything that is measured elsewhere, and a bench that was killed records no cycle twice."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from aerie.configs.errors import UserError
from aerie.configs.schema.decode import LookaheadConfig, MethodConfig, PromptLookupConfig
from aerie.configs.schema.measure import BenchConfig, PromptsConfig, SamplingConfig
from aerie.configs.schema.target_and_head import TargetConfig
from aerie.infer.decode.drafters.eagle import EagleDrafter
from aerie.infer.decode.drafters.lookahead import Lookahead
from aerie.infer.decode.drafters.lookup import PromptLookup
from aerie.infer.decode.engine import SpeculativeDecoder
from aerie.infer.decode.methods import drafting
from aerie.infer.decode.proposer import Proposer
from aerie.infer.measure.bench import Bench, run
from aerie.infer.measure.bounds import by_depth, reliability
from aerie.infer.measure.cycles import CycleLine, CycleLog, NodeCollector, read_cycle_log
from aerie.infer.measure.record import CycleArrays
from aerie.infer.measure.statistics import group
from aerie.infer.measure.statistics import row as summary_row
from aerie.infer.measure.tasks import Prompt, encode
from aerie.model.target import Target
from tests import tiny

SMALL = {"levels": 3, "k": 3, "nodes": 8}
ROWS = (
    MethodConfig("vanilla"),
    MethodConfig.of("eagle2", **SMALL),
    MethodConfig.of("eagle-chain", levels=3),
    MethodConfig("pld"),
    MethodConfig("lookahead"),
)
PROMPTS = [Prompt(str(n), "count", f"Please count {n + 2} boats and {n + 2} boats.") for n in range(3)]


def make_decoder(target: Target, row: MethodConfig) -> SpeculativeDecoder:
    tree = row.tree
    if row.method == "vanilla":
        return SpeculativeDecoder(target)
    proposer: Proposer
    if tree is not None:
        head = tiny.head(target.ends.embedding.float(), scale=8.0)
        proposer = drafting(EagleDrafter(head.eval(), target), tree)
    else:
        proposer = PromptLookup(PromptLookupConfig()) if row.method == "pld" else Lookahead(LookaheadConfig())
    return SpeculativeDecoder(target, proposer)


def make_bench(directory: Path, samplings: int = 2, rows: tuple[MethodConfig, ...] = ROWS) -> Bench:
    target = Target(tiny.llama(eos_token_id=None), TargetConfig(path="tiny"))
    sampling = (SamplingConfig(), SamplingConfig(temperature=1.0))[:samplings]
    config = BenchConfig(
        PromptsConfig("none", max_new_tokens=10), rows, sampling, warmup_prompts=0, reference=False, cycles=True
    )
    decoders = [make_decoder(target, row) for row in rows]
    return Bench(target, tiny.tokenizer(), decoders, [None] * len(rows), config, directory)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[Bench, list[CycleLine]]:
    bench = make_bench(tmp_path_factory.mktemp("bench"))
    run(bench, PROMPTS, seed=5)
    return bench, list(read_cycle_log(bench.cycles_path))


def lines_of(lines: list[CycleLine], row: int, temperature: float) -> list[CycleLine]:
    return [line for line in lines if (line.row, line.temperature) == (row, temperature)]


def as_arrays(lines: list[CycleLine]) -> CycleArrays:
    """The calibration's nodes, from the file alone: those whose parent was accepted."""
    nodes: list[tuple[float, ...]] = []
    for line in lines:
        node = line.node
        for place in range(1, line.nodes):
            if node.accepted[node.parent[place]]:
                acceptance = float(node.accepted[place]) if line.temperature == 0 else node.p[place]
                values = (int(line.prompt_id), node.depth[place], node.q[place], node.survival[place], acceptance)
                assert None not in values
                nodes.append(values)  # type: ignore[arg-type]
    table = np.array(nodes)
    return CycleArrays(
        table[:, 0].astype(np.int64), table[:, 1].astype(np.int64), *table[:, 2:].T,
        accepted_length=np.array([line.accepted for line in lines]),
        cycle_prompt=np.array([int(line.prompt_id) for line in lines]), temperature=lines[0].temperature,
    )  # fmt: skip


def test_the_summary_of_every_row_follows_from_its_cycles(measured: tuple[Bench, list[CycleLine]]) -> None:
    bench, lines = measured
    for members in group(run(bench, PROMPTS, seed=5)):
        expected = summary_row(members)
        mine = lines_of(lines, members.first.row, members.first.temperature)
        kept = [min(line.accepted, line.new_tokens) for line in mine]
        assert sum(line.new_tokens for line in mine) / len(mine) == pytest.approx(expected["tau"])
        assert (
            np.bincount(kept, minlength=len(expected["accepted_histogram"])).tolist() == expected["accepted_histogram"]
        )
        assert sum(line.drafted for line in mine) == expected["draft_nodes"]
        assert sum(line.draft_forwards for line in mine) == expected["draft_forwards"]
        if expected["draft_nodes"]:
            assert sum(kept) / sum(line.drafted for line in mine) == pytest.approx(expected["accept_rate"])
        wasted = sum(line.draft_forwards - min(line.accepted, line.draft_forwards) for line in mine)
        assert wasted == expected["draft_forwards_wasted"]
        assert sum(line.t_draft for line in mine) == pytest.approx(expected["ms"]["draft"], abs=1e-3)
        assert sum(line.t_verify for line in mine) == pytest.approx(expected["ms"]["verify"], abs=1e-3)
        assert {line.verify for line in mine if line.drafted} <= {expected["verify"]}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("row", [1, 3])
def test_the_calibration_follows_from_the_cycles(
    measured: tuple[Bench, list[CycleLine]], row: int, temperature: float
) -> None:
    bench, lines = measured
    collector = NodeCollector()
    for number, prompt in enumerate(PROMPTS):
        collector.prompt = number
        bench.decoders[row].generate(
            encode(prompt.text, bench.tokenizer, bench.target), max_new_tokens=10, do_sample=temperature > 0,
            temperature=temperature, top_k=0, generator=torch.Generator().manual_seed(seed_of(number, temperature)),
            on_cycle=collector,
        )  # fmt: skip
    expected, found = collector.arrays(), as_arrays(lines_of(lines, row, temperature))
    for name in ("prompt", "depth", "accepted_length", "cycle_prompt"):
        assert getattr(found, name).tolist() == getattr(expected, name).tolist()
    for name in ("confidence", "survival", "acceptance"):
        np.testing.assert_allclose(getattr(found, name), getattr(expected, name), rtol=1e-6)
    tables = [reliability(arrays.confidence, arrays.acceptance) for arrays in (found, expected)]
    assert [(each.low, each.count) for each in tables[0]] == [(each.low, each.count) for each in tables[1]]
    # P(accepted length >= d), which S_d foresees
    for level in by_depth(expected):
        reached = [line.accepted >= level["depth"] for line in lines_of(lines, row, temperature)]
        assert np.mean(reached) == pytest.approx(level["survived"])


def seed_of(prompt: int, temperature: float) -> int:
    return 5 + prompt + (len(PROMPTS) if temperature else 0)


def test_texts_places_and_cycles_are_those_of_the_answer(measured: tuple[Bench, list[CycleLine]]) -> None:
    bench, lines = measured
    for record in run(bench, PROMPTS, seed=5):
        mine = [line for line in lines if line.key == (record.row, record.sampling, record.prompt_key)]
        assert [line.cycle for line in mine] == list(range(record.target_forwards))
        text = [*record.prompt_ids, *record.output_ids]
        assert mine[0].pos_start == record.prompt_tokens
        for line in mine:
            path = [token for token, kept in zip(line.node.token, line.node.accepted, strict=True) if kept]
            whole = [*path, line.bonus_id]
            assert text[line.pos_start : line.pos_start + 1 + line.new_tokens] == whole[: 1 + line.new_tokens]
        assert mine[-1].pos_start + mine[-1].new_tokens + 1 == len(text)


def test_why_each_tree_ended_is_said(measured: tuple[Bench, list[CycleLine]]) -> None:
    _, lines = measured
    reasons = [{line.stop_reason for line in lines_of(lines, row, 0.0)} for row in range(len(ROWS))]
    assert reasons[0] == {None}
    assert {"levels", "budget"} <= reasons[1] | reasons[2] <= {"levels", "budget", None}
    assert reasons[3] <= {"guess", None} and "guess" in reasons[3] | reasons[4] <= {"guess", None}
    for line in lines:
        if line.stop_reason == "budget":
            assert line.depth < 3
        if line.stop_reason == "levels":
            assert line.depth == 3
        assert (line.stop_reason is None) == (line.drafted == 0)


def test_a_killed_bench_records_no_cycle_twice(tmp_path: Path) -> None:
    bench = make_bench(tmp_path, samplings=1, rows=ROWS[:3])
    run(bench, PROMPTS[:2], seed=5)
    records, cycles = bench.records_path, bench.cycles_path
    whole = [(line.key, line.cycle, line.node) for line in read_cycle_log(cycles)]
    answers = records.read_text().splitlines(keepends=True)
    texts = cycles.read_text().splitlines(keepends=True)
    kept = {answer_of(line) for line in answers[:4]}
    last = max(number for number, line in enumerate(texts) if answer_of(line) in kept)
    for extra in (0, 1, 2):  # killed before, within and after the next answer's cycles: its record is not there yet
        records.write_text("".join(answers[:4]) + answers[4][: 30 * extra])
        cycles.write_text("".join(texts[: last + 1 + extra]) + texts[last + 1 + extra][:50])
        run(bench, PROMPTS[:2], seed=5)
        again = [(line.key, line.cycle, line.node) for line in read_cycle_log(cycles)]
        assert sorted(again, key=str) == sorted(whole, key=str)


def answer_of(line: str) -> tuple[Any, ...]:
    row = json.loads(line)
    return row["row"], row["temperature"], row["prompt_id"]


def test_without_the_option_there_is_no_file(tmp_path: Path) -> None:
    bench = make_bench(tmp_path)
    config = BenchConfig(bench.config.prompts, ROWS[:2], warmup_prompts=0, reference=False)
    run(Bench(bench.target, bench.tokenizer, bench.decoders[:2], [None, None], config, tmp_path), PROMPTS[:1], seed=5)
    assert bench.records_path.is_file() and not bench.cycles_path.exists()


def test_a_line_that_is_no_cycle_is_named(tmp_path: Path, measured: tuple[Bench, list[CycleLine]]) -> None:
    path = tmp_path / "cycles.jsonl"
    path.write_text(measured[0].cycles_path.read_text().splitlines(keepends=True)[0] + '{"row": 0}\n')
    with pytest.raises(UserError, match=r"cycles\.jsonl:2: method: Field required"):
        list(read_cycle_log(path))
    with pytest.raises(UserError, match=r"cycles\.jsonl:2: method"):
        CycleLog(path).keep([])
