"""The bench: its suite of rows and sweeps, and measuring on a tiny target, through turns, stops and failures."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from aerie.configs.errors import UserError
from aerie.configs.schema.decode import METHODS, MethodConfig
from aerie.configs.schema.measure import BenchConfig, PromptsConfig, SamplingConfig, SweepConfig
from aerie.configs.schema.target_and_head import TargetConfig
from aerie.infer.measure.bench import Bench, jobs_of, make_decoders, run
from aerie.infer.measure.record import Record, read_records
from aerie.infer.measure.reference import measure_reference
from aerie.infer.measure.suite import asked_of, plan_text, suite_of
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


@dataclass(frozen=True)
class Place:
    """A tiny target of 112 positions, and a head for it."""

    target: Target
    tokenizer: Any
    head: str


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    root = tmp_path_factory.mktemp("bench")
    recipe = TargetConfig(str(tiny.target(root / "target", eos_token_id=None, max_position_embeddings=112)))
    save_head(tiny.head(tiny.llama().get_input_embeddings().weight.detach(), scale=8.0), root / "head")
    return Place(Target.load(recipe), load_tokenizer(recipe), str(root / "head"))


def bench(place: Place, directory: Path, config: BenchConfig = CONFIG) -> Bench:
    made = Bench(place.target, place.tokenizer, [], [], config, directory)
    heads = [place.head if row.method == "eagle2" else None for row in made.suite.rows]
    kinds = [None if head is None else "eagle1" for head in heads]
    return replace(made, decoders=make_decoders(place.target, made.suite.rows, heads), kinds=kinds)


@pytest.fixture(scope="module")
def measured(place: Place, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Record]]:
    directory = tmp_path_factory.mktemp("measured")
    return directory, run(bench(place, directory), PROMPTS, seed=3)


def answers(records: Sequence[Record]) -> dict[object, tuple[int, ...]]:
    return {(r.row, r.sampling, r.prompt_key): r.output_ids for r in records}


def test_every_row_answers_every_turn_once_and_the_warm_up_is_not_kept(measured: tuple[Path, list[Record]]) -> None:
    directory, records = measured
    assert len(records) == len(ROWS) * 2 * (3 + 1 + 2) == len(answers(records))
    assert answers(read_records(directory / "records.jsonl")) == answers(records)
    assert all(r.status == "ok" and r.new_tokens == 6 for r in records)
    assert all(r.identical for r in records if r.temperature == 0)
    assert all(r.identical is None for r in records if r.temperature == 1)


def test_a_later_turn_follows_vanillas_answers_in_every_row(place: Place, measured: tuple[Path, list[Record]]) -> None:
    found = {(r.row, r.temperature, r.prompt_key): r for r in measured[1]}
    for temperature in (0.0, 1.0):
        first, second = (found[0, temperature, ("count", "a", turn)] for turn in (0, 1))
        for turn in (1, 2):
            same = {found[row, temperature, ("count", "a", turn)].prompt_ids for row in range(len(ROWS))}
            assert len(same) == 1
        expected = [
            {"role": "user", "content": "Please count 4 boats."},
            {"role": "assistant", "content": first.text},
            {"role": "user", "content": "Now sort 5 owls."},
            {"role": "assistant", "content": second.text},
            {"role": "user", "content": "And 6 lamps."},
        ]
        ids = place.tokenizer.apply_chat_template(
            expected, add_generation_prompt=True, tokenize=True, return_dict=False
        )
        assert found[1, temperature, ("count", "a", 2)].prompt_ids == tuple(ids)
    texts = {found[row, 1.0, ("count", "a", 0)].text for row in range(len(ROWS))}
    assert len(texts) > 1  # rows sample answers of their own, and do not go on from them


def test_cycles_have_times_that_are_the_decodings_and_the_nodes_that_were_drafted(
    measured: tuple[Path, list[Record]],
) -> None:
    for record in measured[1]:
        assert record.ms is not None and len(record.cycle_ms) == record.target_forwards
        decode = record.ms.wall - record.ms.prefill
        assert 0.8 * decode < sum(record.cycle_ms) <= decode + 0.01
        assert sum(record.cycle_nodes) == record.draft_nodes
        assert record.draft_forwards_wasted <= record.draft_forwards


def test_the_rows_take_turns_in_going_first(place: Place, measured: tuple[Path, list[Record]]) -> None:
    firsts = [record.row for record in read_records(measured[0] / "records.jsonl")[:: len(ROWS)]]
    assert len(jobs_of(bench(place, measured[0]).suite, PROMPTS)) == len(firsts)
    assert firsts == [number % len(ROWS) for number in range(len(firsts))]


def test_a_stopped_bench_measures_what_is_missing_and_nothing_else(
    place: Place, tmp_path: Path, measured: tuple[Path, list[Record]]
) -> None:
    lines = (measured[0] / "records.jsonl").read_text().splitlines(keepends=True)
    records = tmp_path / "records.jsonl"
    records.write_text("".join(lines[:7]) + lines[7][:50])
    again = run(bench(place, tmp_path), PROMPTS, seed=3)
    assert answers(again) == answers(measured[1])
    assert records.read_text().splitlines(keepends=True)[:7] == lines[:7]
    assert records.read_text().splitlines(keepends=True)[7:] != lines[7:]  # other times


def test_a_prompt_that_changed_its_text_is_not_taken_for_the_old_one(
    place: Place, tmp_path: Path, measured: tuple[Path, list[Record]]
) -> None:
    (tmp_path / "records.jsonl").write_bytes((measured[0] / "records.jsonl").read_bytes())
    other = [replace(PROMPTS[0], more=("Now sort 5 owls.", "Stop.")), *PROMPTS[1:]]
    with pytest.raises(UserError, match="prompt 'a' of 'count' was another one; measure anew with --overwrite"):
        run(bench(place, tmp_path), other, seed=3)


def test_sampling_is_the_suites_own_and_not_what_the_targets_generation_config_asks_for(
    place: Place, tmp_path: Path, measured: tuple[Path, list[Record]], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = bench(place, tmp_path / "same")
    for name, value in {"do_sample": True, "top_k": 1, "top_p": 0.1, "min_p": 0.9, "temperature": 0.2}.items():
        monkeypatch.setattr(made.target.generation_config, name, value)
    assert answers(run(made, PROMPTS, seed=3)) == answers(measured[1])
    greedy = replace(CONFIG, sampling=(COLD, SamplingConfig(1.0, top_k=1)))
    found = answers(run(bench(place, tmp_path / "top-k", greedy), PROMPTS[1:2], seed=3))
    assert len(set(found.values())) == 1


def test_a_failed_row_has_a_message_and_no_time_and_the_others_go_on(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = bench(place, tmp_path, replace(CONFIG, sampling=(COLD,)))
    whole = made.decoders[1].generate

    def out_of_memory(ids: Any, **settings: Any) -> Any:
        if settings["max_new_tokens"] == 6 and ids.shape[1] > 40:
            raise torch.OutOfMemoryError("")
        return whole(ids, **settings)

    monkeypatch.setattr(made.decoders[1], "generate", out_of_memory)
    records = run(made, PROMPTS, seed=3)
    failed = [r for r in records if r.status == "error"]
    assert failed and {(r.row, r.message, r.ms, r.new_tokens) for r in failed} == {(1, "OutOfMemoryError", None, 0)}
    assert all(r.status == "ok" for r in records if r.row != 1) and len(records) == len(ROWS) * 6


def test_without_vanillas_answer_the_next_turn_is_an_error_that_says_so(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = bench(place, tmp_path, replace(CONFIG, sampling=(COLD,)))

    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no memory\nsecond line")

    monkeypatch.setattr(made.decoders[0], "generate", broken)
    records = run(made, PROMPTS[:1], seed=3)
    assert [r.status for r in records if r.turn == 0 and r.row] == ["ok", "ok"]
    assert {r.message for r in records if r.turn == 2} == {"turn 1 has no answer of vanilla to go on from: no memory"}


def test_long_answers_end_at_the_context_alike_in_all_rows(place: Place, tmp_path: Path) -> None:
    long = replace(CONFIG, prompts=PromptsConfig("p.jsonl", max_new_tokens=500), sampling=(COLD,))
    made = bench(place, tmp_path, long)
    records = run(made, PROMPTS[1:2], seed=3)
    assert {r.prompt_tokens + r.new_tokens for r in records} == {112} and all(r.identical for r in records)
    reference, _ = measure_reference(made, records)
    assert reference.identical_to_generate == reference.prompts == 1


def test_a_sweep_is_measured_on_its_prompts_beside_the_rows(place: Place, tmp_path: Path) -> None:
    sweep = SweepConfig("depth", "tree.levels", (1, 3), ({"method": "eagle2", "tree": TREE},), num_prompts=1)
    warm = SweepConfig("warmth", "temperature", (0.7,), ({"method": "pld"},), (COLD,), tasks=("draw",))
    records = run(bench(place, tmp_path, replace(CONFIG, sampling=(COLD,), sweeps=(sweep, warm))), PROMPTS, seed=3)
    found = {(r.row, r.temperature, r.task, r.prompt_id) for r in records if r.turn == 0}
    main = {(row, 0.0, p.task, p.prompt_id) for row in range(3) for p in PROMPTS}
    # level 3 is the bench's own row; level 1 is asked the first prompt of each task, 0.7 the drawing one, vanilla too
    extra = {(3, 0.0, "count", "a"), (3, 0.0, "draw", "a"), (0, 0.7, "draw", "a"), (2, 0.7, "draw", "a")}
    assert found == main | extra
    assert all(r.identical for r in records if r.temperature == 0)


def test_decoders_that_read_the_same_states_share_one_cache(place: Place, tmp_path: Path) -> None:
    assert len({id(decoder.lm) for decoder in bench(place, tmp_path).decoders}) == 1


# ------------------------------------------------------------------------------------------------------ the suite

EAGLE2, SWEPT = (MethodConfig("vanilla"), MethodConfig("eagle2")), ({"method": "eagle2"},)
TWO_TASKS = [Prompt(str(n), task, f"{task} {n}") for n in range(3) for task in ("sums", "code")]


def suite(*sweeps: SweepConfig) -> BenchConfig:
    return BenchConfig(PromptsConfig("p.jsonl"), EAGLE2, sweeps=sweeps)


def depths(**changes: Any) -> SweepConfig:
    return SweepConfig("depth", "tree.levels", (4, 8), SWEPT, **changes)


def test_each_value_of_a_sweep_is_a_row_behind_the_benchs_and_equal_rows_are_measured_once() -> None:
    again = SweepConfig("again", "method", ("eagle2", "deagle"), SWEPT)
    other = SweepConfig("other", "tree.levels", (8, 4), SWEPT)
    made = suite_of(suite(depths(), again, other))
    assert made.rows[:2] == EAGLE2 and len(made.rows) == 5 and made.baselines == ()
    assert made.places[2:4] == ("bench.sweeps.0 (tree.levels 4)", "bench.sweeps.0 (tree.levels 8)")
    assert [(cell.row, cell.point) for cell in made.points[:2]] == [
        (2, ("depth", "tree.levels", 4)), (3, ("depth", "tree.levels", 8))
    ]  # fmt: skip
    assert [cell.row for cell in made.points[2:]] == [1, 4, 3, 2] and [cell.row for cell in made.main] == [0, 1]


def test_a_sweep_asks_its_own_prompts_and_a_temperature_beside_the_benchs_brings_vanilla_along(place: Place) -> None:
    asked = suite_of(suite(depths(tasks=("sums",), num_prompts=2))).rows_for(TWO_TASKS)[COLD]
    assert [asked["sums", str(n)] for n in range(3)] == [[0, 1, 2, 3], [0, 1, 2, 3], [0, 1]]
    assert asked["code", "0"] == [0, 1]
    warmth = suite(SweepConfig("warmth", "temperature", (0.0, 0.5), SWEPT, num_prompts=1))
    half = SamplingConfig(0.5)
    assert suite_of(warmth).rows_for(TWO_TASKS)[half] == {("sums", "0"): [0, 1], ("code", "0"): [0, 1]}
    written = asked_of(warmth, TWO_TASKS, place.target)
    assert written.max_context == 112
    assert [(cell.row, cell.temperature) for cell in written.main] == [(0, 0.0), (1, 0.0)]
    point = written.points[1]
    assert (point.row, point.temperature, point.value, point.prompts) == (1, 0.5, 0.5, (("sums", "0"), ("code", "0")))


def test_every_key_of_a_row_can_vary() -> None:
    base = {"method": "sps-svip", "tree": {"levels": 9}, "head": "heads/a"}
    varied = {"head": "b", "tree.stop": {"rule": "entropy", "h": 0.2}, "typical.epsilon": 0.2}
    for key, value in varied.items():
        (row,) = suite_of(suite(SweepConfig("s", key, (value,), (base,)))).rows[2:]
        assert row != MethodConfig.of("sps-svip", "heads/a", levels=9) and row.method == "sps-svip"


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("tree.depth", 6, r"bench\.sweeps\.0 \(tree\.depth 6\): .*tree\.depth: unknown key"),
        ("tree.levels", "six", r"tree\.levels: input should be a valid integer"),
        ("method.levels", 6, "method is not a section"),
        ("temperature", -1, "a temperature is a number"),
    ],
)
def test_a_key_or_a_value_that_no_row_has_is_refused(key: str, value: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        suite_of(suite(SweepConfig("s", key, (value,), SWEPT)))


def test_a_task_without_prompts_and_names_that_meet_are_refused(place: Place, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"bench\.sweeps\.0: no prompt is of task 'math'; tasks are count, draw"):
        run(bench(place, tmp_path, replace(CONFIG, sweeps=(depths(tasks=("math",)),))), PROMPTS, seed=0)
    for names in (("a", "a"), ("context",)):
        with pytest.raises(ValueError, match="need names that differ"):
            suite(*(SweepConfig(name, "tree.k", (2,), SWEPT) for name in names))


def test_the_plan_says_how_much_it_is() -> None:
    told = "2 rows x 1 samplings x 80 prompts, at most 512 new tokens a turn, 1 sweeps of 2 points"
    assert plan_text(suite(depths())) == f"bench: {told}"


@pytest.mark.parametrize("path", sorted((CONFIGS / "bench").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_row_and_every_point_of_a_suite_that_ships_is_a_way_of_decoding(path: Path) -> None:
    config = load(path).bench
    assert config is not None and plan_text(config)
    made = suite_of(config)
    assert all((row.tree is None) == (METHODS[row.method].tree is None) for row in made.rows)
