"""The bench: its suite of rows and sweeps, measuring through turns, stops and failures, and the references."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from aerie.configs.errors import UserError
from aerie.configs.schema.decode import METHODS, Method, MethodConfig
from aerie.configs.schema.measure import BenchConfig, PromptsConfig, SamplingConfig, SweepConfig
from aerie.configs.schema.target_and_head import TargetConfig
from aerie.infer.decode.engine import SpeculativeDecoder, make_decoder
from aerie.infer.decode.methods import Drafters
from aerie.infer.measure import bench as module
from aerie.infer.measure.bench import PHASES, Bench, Stopwatch, make_decoders, measure_overhead, measure_reference, run
from aerie.infer.measure.lossless import PROMPT, write_miniature
from aerie.infer.measure.record import OVERHEAD, Overhead, Record, read_as, read_records
from aerie.infer.measure.suite import asked_of, suite_of
from aerie.infer.measure.tasks import Prompt
from aerie.model.checkpoint import save_head
from aerie.model.target import Target, load_tokenizer
from tests import tiny
from tests.configs.test_recipes import CONFIGS, load

TREE = {"levels": 3, "k": 2, "nodes": 6}
ROWS = (MethodConfig("vanilla"), MethodConfig.of("eagle2", **TREE), MethodConfig("pld"))
PROMPTS = [
    Prompt("a", "count", "Please count 4 boats.", ("Now sort 5 owls.", "And 6 lamps.")),
    Prompt("b", "count", "Please paint 9 stones."),
    Prompt("a", "draw", "Please draw 3 letters.", ("Again.",)),
]
COLD, WARM = SamplingConfig(), SamplingConfig(1.0)
CONFIG = BenchConfig(PromptsConfig("p.jsonl", max_new_tokens=6), ROWS, (COLD, WARM), warmup_prompts=1)
Measured = tuple[Path, list[Record]]
Place = tuple[Target, Any, str]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """A tiny target of 112 positions, its tokenizer and a head for it."""
    root = tmp_path_factory.mktemp("bench")
    recipe = TargetConfig(str(tiny.target(root / "target", eos_token_id=None, max_position_embeddings=112)))
    save_head(tiny.head(tiny.llama().get_input_embeddings().weight.detach(), scale=8.0), root / "head")
    return Target.load(recipe), load_tokenizer(recipe), str(root / "head")


def bench(place: Place, directory: Path, config: BenchConfig = CONFIG) -> Bench:
    target, tokenizer, head = place
    rows = suite_of(config).rows
    heads = [head if row.method == "eagle2" else None for row in rows]
    kinds = [None if head is None else "eagle1" for head in heads]
    return Bench(target, tokenizer, make_decoders(target, rows, heads), kinds, config, directory)


@pytest.fixture(scope="module")
def measured(place: Place, tmp_path_factory: pytest.TempPathFactory) -> Measured:
    directory = tmp_path_factory.mktemp("measured")
    return directory, run(bench(place, directory), PROMPTS, seed=3)


def answers(records: Sequence[Record]) -> dict[object, tuple[int, ...]]:
    return {r.key: r.output_ids for r in records}


def test_every_row_answers_every_turn_once_in_turns_and_says_what_it_cost(place: Place, measured: Measured) -> None:
    directory, records = measured
    written = read_records(directory / "records.jsonl")
    assert len(records) == len(ROWS) * 2 * (3 + 1 + 2) == len(answers(records))
    assert answers(written) == answers(records)
    assert [record.row for record in written[:: len(ROWS)]] == [n % len(ROWS) for n in range(len(records) // 3)]
    assert len({id(decoder.lm) for decoder in bench(place, directory).decoders}) == 1  # one cache for all
    for r in records:
        assert (r.status, r.new_tokens, r.identical) == ("ok", 6, True if r.temperature == 0 else None)
        assert r.ms is not None and len(r.cycle_ms) == r.target_forwards
        decode = r.ms.wall - r.ms.prefill
        assert 0.4 * decode < sum(r.cycle_ms) <= decode + 0.01
        assert sum(r.cycle_nodes) == r.draft_nodes and r.draft_forwards_wasted <= r.draft_forwards


def test_a_later_turn_follows_vanillas_answers_in_every_row(place: Place, measured: Measured) -> None:
    found = {(r.row, r.temperature, r.prompt_key): r for r in measured[1]}
    for temperature in (0.0, 1.0):
        first, second = (found[0, temperature, ("count", "a", turn)].text for turn in (0, 1))
        said = [PROMPTS[0].text, first, PROMPTS[0].more[0], second, PROMPTS[0].more[1]]
        turns = [{"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(said)]
        ids = place[1].apply_chat_template(turns, add_generation_prompt=True, tokenize=True, return_dict=False)
        for row in range(len(ROWS)):
            assert found[row, temperature, ("count", "a", 2)].prompt_ids == tuple(ids)
    assert len({found[row, 1.0, ("count", "a", 0)].text for row in range(len(ROWS))}) > 1  # answers of their own


def test_a_stopped_bench_measures_only_what_is_missing(place: Place, tmp_path: Path, measured: Measured) -> None:
    lines = (measured[0] / "records.jsonl").read_text().splitlines(keepends=True)
    records = tmp_path / "records.jsonl"
    records.write_text("".join(lines[:7]) + lines[7][:50])
    assert answers(run(bench(place, tmp_path), PROMPTS, seed=3)) == answers(measured[1])
    again = records.read_text().splitlines(keepends=True)
    assert again[:7] == lines[:7] and again[7:] != lines[7:]  # other times
    other = [replace(PROMPTS[0], more=("Now sort 5 owls.", "Stop.")), *PROMPTS[1:]]
    with pytest.raises(UserError, match="prompt 'a' of 'count' was another one; measure anew with --overwrite"):
        run(bench(place, tmp_path), other, seed=3)


def test_sampling_is_the_suites_own_and_not_the_generation_configs(
    place: Place, tmp_path: Path, measured: Measured, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = bench(place, tmp_path / "same")
    for name, value in {"do_sample": True, "top_k": 1, "top_p": 0.1, "min_p": 0.9, "temperature": 0.2}.items():
        monkeypatch.setattr(made.target.generation_config, name, value)
    assert answers(run(made, PROMPTS, seed=3)) == answers(measured[1])
    greedy = replace(CONFIG, sampling=(COLD, SamplingConfig(1.0, top_k=1)))
    assert len(set(answers(run(bench(place, tmp_path / "top-k", greedy), PROMPTS[1:2], seed=3)).values())) == 1


def broken(*_: Any, **__: Any) -> Any:
    raise torch.OutOfMemoryError("no memory\nsecond line")


@pytest.mark.parametrize("wrong", [0, 1])  # without vanilla's answer there is no later turn to ask
def test_a_failed_row_has_a_message_and_no_time_and_the_others_go_on(
    wrong: int, place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = bench(place, tmp_path, replace(CONFIG, sampling=(COLD,)))
    monkeypatch.setattr(made.decoders[wrong], "generate", broken)
    for r in run(made, PROMPTS, seed=3):
        if r.row == wrong and (r.turn == 0 or wrong):
            assert (r.status, r.message, r.ms, r.new_tokens) == ("error", "no memory", None, 0)
        else:
            assert r.status == ("error" if r.turn and not wrong else "ok")


def test_long_answers_end_at_the_context_alike_in_all_rows(place: Place, tmp_path: Path) -> None:
    long = replace(CONFIG, prompts=PromptsConfig("p.jsonl", max_new_tokens=500), sampling=(COLD,))
    made = bench(place, tmp_path, long)
    records = run(made, PROMPTS[1:2], seed=3)
    assert {r.prompt_tokens + r.new_tokens for r in records} == {112} and all(r.identical for r in records)
    assert all(r.identical_to_generate for r in measure_reference(made, records))


EAGLE2, SWEPT = (MethodConfig("vanilla"), MethodConfig("eagle2")), ({"method": "eagle2"},)
DEPTHS = SweepConfig("depth", "tree.levels", (4, 8), SWEPT)


def suite(*sweeps: SweepConfig) -> BenchConfig:
    return BenchConfig(PromptsConfig("p.jsonl"), EAGLE2, sweeps=sweeps)


def test_a_sweep_is_measured_on_its_prompts_beside_the_rows_and_vanilla(place: Place, tmp_path: Path) -> None:
    sweep = SweepConfig("depth", "tree.levels", (1, 3), ({"method": "eagle2", "tree": TREE},), num_prompts=1)
    warm = SweepConfig("warmth", "temperature", (0.7,), ({"method": "pld"},), (COLD,), tasks=("draw",))
    config = replace(CONFIG, sampling=(COLD,), sweeps=(sweep, warm))
    records = run(bench(place, tmp_path, config), PROMPTS, seed=3)
    found = {(r.row, r.temperature, r.task, r.prompt_id) for r in records if r.turn == 0}
    main = {(row, 0.0, p.task, p.prompt_id) for row in range(3) for p in PROMPTS}
    # level 3 is the bench's own row; level 1 is asked the first prompt of each task, 0.7 the drawing one, vanilla too
    extra = {(3, 0.0, "count", "a"), (3, 0.0, "draw", "a"), (0, 0.7, "draw", "a"), (2, 0.7, "draw", "a")}
    assert found == main | extra
    written = asked_of(config, PROMPTS, place[0])
    assert written.max_context == 112 and [cell.row for cell in written.main] == [0, 1, 2]
    points = [(point.row, point.temperature, point.value, point.prompts) for point in written.points]
    first = (("count", "a"), ("draw", "a"))
    assert points == [(3, 0.0, 1, first), (1, 0.0, 3, first), (2, 0.7, 0.7, first[1:])]


def test_each_value_of_a_sweep_is_a_row_behind_the_benchs_and_equal_rows_are_measured_once() -> None:
    again = SweepConfig("again", "method", ("eagle2", "deagle"), SWEPT)
    other = SweepConfig("other", "tree.levels", (8, 4), SWEPT)
    made = suite_of(suite(DEPTHS, again, other))
    assert made.rows[:2] == EAGLE2 and len(made.rows) == 5
    assert [cell.row for cell in made.points] == [2, 3, 1, 4, 3, 2] and [cell.row for cell in made.main] == [0, 1]
    base = {"method": "sps-svip", "tree": {"levels": 9}, "head": "heads/a"}
    for key, value in {"head": "b", "tree.stop": {"rule": "entropy", "h": 0.2}, "typical.epsilon": 0.2}.items():
        (row,) = suite_of(suite(SweepConfig("s", key, (value,), (base,)))).rows[2:]
        assert row != MethodConfig.of("sps-svip", "heads/a", levels=9) and row.method == "sps-svip"


def test_what_no_row_or_prompt_has_is_refused(place: Place, tmp_path: Path) -> None:
    for sweep, message in (
        (SweepConfig("s", "tree.depth", (6,), SWEPT), r"bench\.sweeps\.0 \(tree\.depth 6\): .*: unknown key"),
        (SweepConfig("s", "method.levels", (6,), SWEPT), "method is not a section"),
        (SweepConfig("s", "temperature", (-1,), SWEPT), "temperature: input should be"),
        (replace(DEPTHS, tasks=("math",)), r"bench\.sweeps\.0: no prompt is of task 'math'"),
    ):
        with pytest.raises(UserError, match=message):
            run(bench(place, tmp_path, replace(CONFIG, sweeps=(sweep,))), PROMPTS, seed=0)


@pytest.mark.parametrize("path", sorted((CONFIGS / "bench").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_row_and_every_point_of_a_suite_that_ships_is_a_way_of_decoding(path: Path) -> None:
    config = load(path).bench
    assert config is not None
    assert all((row.tree is None) == (METHODS[row.method].tree is None) for row in suite_of(config).rows)


IDS = torch.tensor([PROMPT])
HEADS: dict[Method, str | None] = {"vanilla": None, "lookahead": None, "sps": "draft_lm"}
HEADS |= {"medusa": "medusa", "hydra": "hydra", "eagle2": "eagle1", "eagle3": "eagle3"}
SETTINGS: dict[str, Any] = {"do_sample": False, "max_new_tokens": 24}


@pytest.fixture(scope="module")
def decoders(tmp_path_factory: pytest.TempPathFactory) -> dict[Method, SpeculativeDecoder]:
    directory = tmp_path_factory.mktemp("miniature")
    drafters = Drafters(Target.load(write_miniature(directory, vocabulary=48)))
    heads = {method: None if kind is None else str(directory / "heads" / kind) for method, kind in HEADS.items()}
    return {method: make_decoder(drafters, MethodConfig(method), head) for method, head in heads.items()}


@pytest.mark.parametrize("method", HEADS)
def test_there_are_as_many_forwards_as_the_statistics_count_and_the_decoder_is_unchanged(
    decoders: dict[Method, SpeculativeDecoder], method: Method
) -> None:
    drafted: list[bool] = []
    decoder, kind, watch = decoders[method], HEADS[method], Stopwatch()
    plain = decoder.generate(IDS, **SETTINGS)
    heard: dict[str, Any] = {"on_cycle": lambda cycle: drafted.append(cycle.tree.draft_forwards > 0)}
    with watch.on(decoder):
        out = decoder.generate(IDS, streamer=watch, **heard, **SETTINGS)
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
    assert watch.calls == Counter({"target": 2 * cycles, "draft": wanted[kind]})
    assert watch.ms["target"] > 0 and (watch.ms["draft"] > 0) == (kind is not None)
    assert out.new_ids == plain.new_ids == decoder.generate(IDS, **SETTINGS).new_ids
    assert watch.calls["target"] == 2 * cycles


def test_the_overhead_is_the_ratio_of_the_times_and_is_measured_once(
    decoders: dict[Method, SpeculativeDecoder], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With forwards that take a known time, everything is a ratio of what the engine counted; a broken row is out."""
    for name, value in {"NUM_PROMPTS": 1, "REPETITIONS": 1, "encode_turn": lambda *_: IDS}.items():
        monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(Stopwatch, "ms", property(lambda _: {"target": 2.0, "draft": 1.0}, lambda *_: None), False)
    monkeypatch.setattr(Stopwatch, "_timed", lambda _, part, device, call, *given, **named: call(*given, **named))
    methods: tuple[Method, ...] = ("vanilla", "lookahead", "eagle2")
    config = BenchConfig(PromptsConfig("q.jsonl", max_new_tokens=10), tuple(map(MethodConfig, methods)))
    used = [decoders[method] for method in methods]
    monkeypatch.setattr(used[1], "generate", broken)
    bench = Bench(used[0].target, None, used, [None, None, "eagle1"], config, tmp_path)
    measured = measure_overhead(bench, PROMPTS)
    assert [(row.row, row.method, row.prompts) for row in measured] == [(0, "vanilla", 1), (2, "eagle2", 1)]
    for row in measured:
        cycles = 2.0 / row.bare_target
        assert cycles == pytest.approx(round(cycles)) and row.bare_draft == pytest.approx(1.0 / cycles)
        assert row.overhead == pytest.approx(row.cycle * cycles / 3.0 - 1.0)
        assert sum(getattr(row, phase) for phase in PHASES) == pytest.approx(row.cycle)
    assert read_as(tmp_path / OVERHEAD, list[Overhead]) == measured
    monkeypatch.setattr(SpeculativeDecoder, "generate", None)
    assert measure_overhead(bench, PROMPTS) == measured
