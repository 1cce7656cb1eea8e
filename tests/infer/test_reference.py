"""A row's model forwards, timed: as many as the statistics count, and no trace."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from aerie.configs.schema.decode import Method, MethodConfig
from aerie.configs.schema.measure import BenchConfig, PromptsConfig
from aerie.infer.decode.engine import SpeculativeDecoder, make_decoder
from aerie.infer.decode.methods import Drafters
from aerie.infer.measure import reference as module
from aerie.infer.measure.bench import Bench
from aerie.infer.measure.lossless import write_miniature
from aerie.infer.measure.record import OVERHEAD, Overhead, read_as
from aerie.infer.measure.reference import PHASES, Stopwatch, measure_overhead, overhead_text
from aerie.infer.measure.tasks import Prompt
from aerie.model.target import Target
from tests import tiny

IDS = torch.tensor([[1, 5, 3, 4, 1, 6, 3, 2, 7, 0, 5, 4, 2, 6, 1, 7, 3, 0, 4]])
ROWS: list[tuple[Method, str | None]] = [
    ("vanilla", None),
    ("lookahead", None),
    ("sps", "draft_lm"),
    ("medusa", "medusa"),
    ("hydra", "hydra"),
    ("eagle2", "eagle1"),
    ("eagle3", "eagle3"),
]
SETTINGS: dict[str, Any] = {"do_sample": False, "max_new_tokens": 24}
Decoder = Callable[[Method, str | None], SpeculativeDecoder]


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    directory = tmp_path_factory.mktemp("miniature")
    drafters = Drafters(Target.load(write_miniature(directory, vocabulary=48)))

    def make(method: Method, kind: str | None) -> SpeculativeDecoder:
        return make_decoder(drafters, MethodConfig(method), None if kind is None else str(directory / "heads" / kind))

    return make


@pytest.mark.parametrize(("method", "kind"), ROWS)
def test_there_are_as_many_forwards_as_the_statistics_count_and_the_decoder_is_unchanged(
    decoder: Decoder, method: Method, kind: str | None
) -> None:
    """The target's with their LM heads; the draft's by what each kind runs for a law, and to take in a cycle."""
    drafted: list[bool] = []
    speculative = decoder(method, kind)
    plain = speculative.generate(IDS, **SETTINGS)
    before = [set(vars(owner)) for owner in (speculative.target, speculative.target.decoder)]
    watch = Stopwatch()
    with watch.on(speculative):
        out = speculative.generate(
            IDS, streamer=watch, on_cycle=lambda cycle: drafted.append(cycle.tree.draft_forwards > 0), **SETTINGS
        )
    laws, cycles, trees = out.statistics.draft_forwards, out.statistics.target_forwards, sum(drafted)
    assert cycles == len(drafted) > 2 and (trees > 2 or kind is None)
    wanted = {
        None: 0,
        "draft_lm": 2 * laws,  # the LM and its LM head
        "medusa": laws,
        "hydra": laws + cycles,  # the prefix layer
        "eagle1": laws + (laws - trees) + cycles,  # LM heads; the head below the root; the head's true features
        "eagle3": laws + (laws - trees) + 2 * cycles,  # and their fusion
    }
    assert watch.calls == {"target": 2 * cycles, "draft": wanted[kind]}
    assert watch.seconds["target"] > 0 and (watch.seconds["draft"] > 0) == (kind is not None)
    assert [set(vars(owner)) for owner in (speculative.target, speculative.target.decoder)] == before
    assert out.new_ids == plain.new_ids == speculative.generate(IDS, **SETTINGS).new_ids
    assert watch.calls["target"] == 2 * cycles


@pytest.fixture
def bench(decoder: Decoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    """Vanilla and an EAGLE tree, two prompts, two turns."""
    monkeypatch.setattr(module, "NUM_PROMPTS", 2)
    monkeypatch.setattr(module, "REPETITIONS", 2)
    monkeypatch.setattr(module, "encode_turn", lambda *_: IDS)
    decoders = [decoder("vanilla", None), decoder("eagle2", "eagle1")]
    config = BenchConfig(PromptsConfig("q.jsonl", max_new_tokens=10), (MethodConfig("vanilla"), MethodConfig("eagle2")))
    return Bench(decoders[0].target, tiny.tokenizer(), decoders, [None, "eagle1"], config, tmp_path)


PROMPTS = [Prompt(str(number), "count", f"Please count {number + 2} boats.") for number in range(3)]


def test_the_overhead_is_the_ratio_of_the_times_and_is_measured_once(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With forwards that take a known time, everything is a ratio of what the engine counted."""
    monkeypatch.setattr(module, "NUM_PROMPTS", 1)
    monkeypatch.setattr(module, "REPETITIONS", 1)
    monkeypatch.setattr(
        Stopwatch, "seconds", property(lambda _: {"target": 0.002, "draft": 0.001}, lambda *_: None), False
    )
    counted, generate = [], SpeculativeDecoder.generate

    def kept(self: SpeculativeDecoder, *arguments: Any, **settings: Any) -> Any:
        out = generate(self, *arguments, **settings)
        counted.extend([out.statistics] if settings.get("timed") else [])
        return out

    monkeypatch.setattr(SpeculativeDecoder, "generate", kept)
    measured = measure_overhead(bench, PROMPTS)
    assert [(row.row, row.method, row.prompts, row.repetitions) for row in measured] == [
        (0, "vanilla", 1, 1), (1, "eagle2", 1, 1)
    ]  # fmt: skip
    for row, statistics in zip(measured, counted, strict=True):
        ms, cycles = statistics.ms, statistics.target_forwards
        decoding = ms["wall"] - ms["prefill"]
        assert row.cycle == pytest.approx(decoding / cycles) and row.overhead == pytest.approx(decoding / 3.0 - 1.0)
        assert (row.bare_target, row.bare_draft) == pytest.approx((2.0 / cycles, 1.0 / cycles))
        assert sum(getattr(row, phase) for phase in PHASES) == pytest.approx(row.cycle)
    assert read_as(bench.directory / OVERHEAD, list[Overhead]) == measured
    monkeypatch.setattr(SpeculativeDecoder, "generate", None)
    assert measure_overhead(bench, PROMPTS) == measured


def test_a_row_that_fails_is_left_out_with_a_warning(
    bench: Bench, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no memory\nmore")

    monkeypatch.setattr(bench.decoders[1], "generate", broken)
    measured = measure_overhead(bench, PROMPTS)
    assert [row.row for row in measured] == [0] and measured[0].bare_draft == 0.0 < measured[0].bare_target
    assert "warning: bench.rows.1: its overhead is not measured: no memory\n" in capsys.readouterr().err
    row = Overhead(1, "eagle2", 4, 6, 0.125, 9.0, 3.0, 5.5, 0.25, 0.25, 5.5, 2.5)
    assert overhead_text(row) == (
        "row 1, eagle2: 9.00 ms a cycle, its forwards alone 8.00 (target 5.50, draft 2.50): overhead 12.5 %"
    )
