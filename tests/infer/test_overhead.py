"""The overhead of a bench's rows: measured once, written, read back, and made of the times it says."""

from pathlib import Path
from typing import Any

import pytest
import torch

from aerie.configs.schema.decode import DynamicConfig, MethodConfig
from aerie.configs.schema.measure import BenchConfig, PromptsConfig
from aerie.configs.schema.target_and_head import TargetConfig
from aerie.infer.decode.drafters.eagle import EagleDrafter
from aerie.infer.decode.engine import SpeculativeDecoder
from aerie.infer.decode.shape import Drafting, make_shape
from aerie.infer.measure import reference as module
from aerie.infer.measure.bench import Bench
from aerie.infer.measure.record import OVERHEAD, Overhead, read_as
from aerie.infer.measure.reference import PHASES, Tape, measure_overhead, overhead_text
from aerie.infer.measure.tasks import Prompt
from aerie.model.target import Target
from tests import tiny

TREE = DynamicConfig(levels=3, k=3, nodes=8)
PROMPTS = [Prompt(str(number), "count", f"Please count {number + 2} boats.") for number in range(3)]


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    """Vanilla and an EAGLE tree, two prompts, two turns."""
    monkeypatch.setattr(module, "NUM_PROMPTS", 2)
    monkeypatch.setattr(module, "REPETITIONS", 2)
    target = Target(tiny.llama(eos_token_id=None), TargetConfig("tiny"))
    head = tiny.head(target.ends.embedding.float(), scale=8.0).eval()
    rows = (MethodConfig("vanilla"), MethodConfig("eagle2"))
    decoders = [
        SpeculativeDecoder(target),
        SpeculativeDecoder(target, Drafting(EagleDrafter(head, target), make_shape(TREE))),
    ]
    config = BenchConfig(PromptsConfig("q.jsonl", max_new_tokens=10), rows)
    return Bench(target, tiny.tokenizer(), decoders, [None, "eagle1"], config, tmp_path)


def test_what_is_measured_is_written_read_back_and_not_measured_again(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = measure_overhead(bench, PROMPTS)
    assert read_as(bench.directory / OVERHEAD, list[Overhead]) == measured
    assert [(row.row, row.method, row.prompts, row.repetitions) for row in measured] == [
        (0, "vanilla", 2, 2),
        (1, "eagle2", 2, 2),
    ]
    assert measured[0].bare_draft == 0.0 < min(measured[1].bare_draft, measured[0].bare_target)

    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("measured again")

    monkeypatch.setattr(module, "taped", never)
    assert measure_overhead(bench, PROMPTS) == measured


def test_the_split_is_that_of_the_times_per_cycle(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a replay that takes a known time, everything is a ratio of what the engine counted."""
    counted = []
    generate = SpeculativeDecoder.generate

    def kept(self: SpeculativeDecoder, *arguments: Any, **settings: Any) -> Any:
        made = generate(self, *arguments, **settings)
        if settings.get("timed"):
            counted.append(made.statistics)
        return made

    monkeypatch.setattr(module, "NUM_PROMPTS", 1)
    monkeypatch.setattr(module, "REPETITIONS", 1)
    monkeypatch.setattr(SpeculativeDecoder, "generate", kept)
    monkeypatch.setattr(Tape, "replay", lambda tape, device: {"target": 0.002, "draft": 0.001})
    measured = measure_overhead(bench, PROMPTS)
    for row, statistics in zip(measured, counted, strict=True):
        ms, cycles = statistics.ms, statistics.target_forwards
        decoding = ms["wall"] - ms["prefill"]
        assert row.cycle == pytest.approx(decoding / cycles)
        assert row.overhead == pytest.approx(decoding / 3.0 - 1.0)
        assert (row.bare_target, row.bare_draft) == pytest.approx((2.0 / cycles, 1.0 / cycles))
        for phase in PHASES:
            assert getattr(row, phase) == pytest.approx(ms[phase] / cycles)
        assert row.draft + row.verify + row.commit + row.other == pytest.approx(row.cycle)


def test_a_row_that_fails_is_left_out_with_a_warning(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    target = bench.target
    short = tiny.head(target.ends.embedding.float(), max_position_embeddings=8)
    bench.decoders[1] = SpeculativeDecoder(target, Drafting(EagleDrafter(short, target), make_shape(TREE)))
    measured = measure_overhead(bench, PROMPTS)
    assert [row.row for row in measured] == [0]
    assert "warning: bench.rows.1: its overhead is not measured: prompt of" in capsys.readouterr().err


def test_measuring_leaves_the_rows_as_they_were(bench: Bench) -> None:
    ids = torch.tensor([[7, 8, 9]])
    settings: dict[str, Any] = {"do_sample": False, "max_new_tokens": 8}
    before = [decoder.generate(ids, **settings).new_ids for decoder in bench.decoders]
    names = [set(vars(owner)) for owner in (bench.target, bench.target.decoder)]
    measure_overhead(bench, PROMPTS[:1])
    assert [decoder.generate(ids, **settings).new_ids for decoder in bench.decoders] == before
    assert [set(vars(owner)) for owner in (bench.target, bench.target.decoder)] == names


def test_a_row_reads_as_one_sentence() -> None:
    row = Overhead(1, "eagle2", 4, 6, 0.125, 9.0, 3.0, 5.5, 0.25, 0.25, 5.5, 2.5)
    assert overhead_text(row) == (
        "row 1, eagle2: 9.00 ms a cycle, its forwards alone 8.00 (target 5.50, draft 2.50): overhead 12.5 %"
    )
