"""The bench: its rows and sweeps, measuring through turns, kills and failures, references.

Every suite of configs/bench runs to its end, on miniatures with quirks of real models.
"""

import itertools
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pandas as pd
import pytest
import torch
import yaml
from transformers import GenerationConfig

from aerie.configs.errors import UserError
from aerie.configs.read import as_dict
from aerie.configs.schema.decode import METHODS, Method, MethodConfig
from aerie.configs.schema.heads import TargetConfig
from aerie.configs.schema.measure import BenchConfig, PromptsConfig, SamplingConfig, SweepConfig
from aerie.infer import main as infer
from aerie.infer.decode.calibrator import Calibrator
from aerie.infer.measure import bench as bench_module
from aerie.infer.measure.agreement import first_difference
from aerie.infer.measure.bench import CYCLES, Bench, measure_answers, run_reference
from aerie.infer.measure.bench_files import RECORDS, Record, line_of, read_records
from aerie.infer.measure.suite import SettledRow, read_suite, suite_file
from aerie.infer.measure.tasks import Prompt
from aerie.model.checkpoint import save_head
from aerie.model.storage import ROOT, digests, read_json, write_json
from aerie.model.target import Target
from aerie.model.target_files import load_tokenizer
from tests import tiny
from tests.infer.draws import make_head
from tests.infer.test_lossless import QWEN

TREE = {"levels": 3, "k": 2, "nodes": 6}
TREES: dict[Method, dict[str, int]] = {
    "vanilla": {},
    "eagle2": TREE,
    "pld": {},
    "eagle-chain": {"levels": 3},
}
ROWS = (
    *(MethodConfig.of(method, **tree) for method, tree in TREES.items()),
    MethodConfig.of("lookahead"),
)
PROMPTS = [
    Prompt("a", "count", ("Please count 4 boats.", "Now sort 5 owls.", "And 6 lamps.")),
    Prompt("b", "count", ("Please paint 9 stones.",)),
    Prompt("a", "draw", ("Please draw 3 letters.", "Again.")),
]
COLD, WARM = SamplingConfig(), SamplingConfig(1.0)
CONFIG = BenchConfig(
    PromptsConfig("p.jsonl", max_new_tokens=6), ROWS, (COLD, WARM), warmup_prompts=1, cycles=True
)
GREEDY = replace(CONFIG, sampling=(COLD,))
Measured = tuple[Path, list[Record]]
Place = tuple[Target, Any, str]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """A tiny target of 112 positions, its tokenizer and a head for it."""
    root = tmp_path_factory.mktemp("bench")
    recipe = TargetConfig(
        str(tiny.target(root / "target", eos_token_id=None, max_position_embeddings=112))
    )
    save_head(
        tiny.head(tiny.llama().get_input_embeddings().weight.detach(), scale=8.0), root / "head"
    )
    return Target.load(recipe), load_tokenizer(recipe), str(root / "head")


def bench(place: Place, directory: Path, config: BenchConfig = CONFIG) -> Bench:
    target, tokenizer, head = place

    def settle(row: MethodConfig, _: str) -> SettledRow:
        return SettledRow(row, head, "eagle1") if METHODS[row.method].heads else SettledRow(row)

    return Bench.open(target, tokenizer, read_suite(config, settle), directory)


@pytest.fixture(scope="module")
def measured(place: Place, tmp_path_factory: pytest.TempPathFactory) -> Measured:
    directory = tmp_path_factory.mktemp("measured")
    made = bench(place, directory)
    made.decoders[1].runners.graph_bytes = 2**20
    return directory, measure_answers(made, PROMPTS, seed=3)


def answers(records: Sequence[Record]) -> dict[object, tuple[int, ...]]:
    return {r.key: r.output_ids for r in records}


def test_records(
    measured: Measured,
) -> None:
    """Every row answers every turn once, rows take turns, and a record says what it cost."""
    directory, records = measured
    written = read_records(directory / "records.jsonl")
    assert not (directory / "served.json").exists()  # no row is a server's
    assert len(records) == len(ROWS) * 2 * (3 + 1 + 2) == len(answers(records))
    assert answers(written) == answers(records)
    assert [record.row for record in written[:: len(ROWS)]] == [
        n % len(ROWS) for n in range(len(records) // len(ROWS))
    ]
    for r in records:
        assert (r.status, r.new_tokens, r.identical) == (
            "ok",
            6,
            True if r.temperature == 0 else None,
        )
        assert r.graph_bytes == (2**20 if r.row == 1 else 0)
        assert r.ms is not None and len(r.cycle_ms) == r.target_forwards
        decode = r.ms.wall - r.ms.prefill
        assert 0.4 * decode < sum(r.cycle_ms) <= decode + 0.01
        assert sum(r.cycle_nodes) == r.draft_nodes and r.draft_forwards_wasted <= r.draft_forwards


def test_later_turns(place: Place, measured: Measured) -> None:
    """A later turn follows vanilla's answers in every row."""
    found = {(r.row, r.temperature, r.prompt_key): r for r in measured[1]}
    for temperature in (0.0, 1.0):
        first, second = (found[0, temperature, ("count", "a", turn)].text for turn in (0, 1))
        said = [PROMPTS[0].turns[0], first, PROMPTS[0].turns[1], second, PROMPTS[0].turns[2]]
        turns = [
            {"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(said)
        ]
        ids = place[1].apply_chat_template(
            turns, add_generation_prompt=True, tokenize=True, return_dict=False
        )
        for row in range(len(ROWS)):
            assert found[row, temperature, ("count", "a", 2)].prompt_ids == tuple(ids)
    assert (
        len({found[row, 1.0, ("count", "a", 0)].text for row in range(len(ROWS))}) > 1
    )  # each row draws its own


def cycles_of(directory: Path) -> list[dict[str, Any]]:
    return tiny.read_rows(directory / CYCLES)


def test_cycles_and_records(measured: Measured) -> None:
    """A record's counts and its text follow from the recorded cycles of its answer."""
    directory, records = measured
    every = cycles_of(directory)
    names = ("row", "temperature", "task", "prompt_id", "turn")
    for record in records:
        key = [getattr(record, name) for name in names]
        cycles = [line for line in every if [line[name] for name in names] == key]
        text = [*record.prompt_ids, *record.output_ids]
        assert [line["cycle"] for line in cycles] == list(range(record.target_forwards))
        assert cycles[0]["pos_start"] == record.prompt_tokens
        kept = tuple(min(line["accepted"], line["new_tokens"]) for line in cycles)
        assert (kept, record.draft_nodes) == (record.accepted, sum(c["drafted"] for c in cycles))
        for line in cycles:
            node = line["node"]
            path = list(itertools.compress(node["token"], node["accepted"]))
            start, count = line["pos_start"], 1 + line["new_tokens"]
            assert text[start : start + count] == [*path, line["bonus_id"]][:count]


def test_killed(place: Place, tmp_path: Path, measured: Measured) -> None:
    """A killed bench measures only what is missing."""
    lines = (measured[0] / RECORDS).read_text().splitlines(keepends=True)
    cycles = (measured[0] / CYCLES).read_text().splitlines(keepends=True)
    records = tmp_path / RECORDS
    records.write_text("".join(lines[:7]) + lines[7][:50])
    whole = 1 + sum(
        json.loads(line)["target_forwards"] for line in lines[:7]
    )  # and one cycle of the unrecorded answer
    (tmp_path / CYCLES).write_text("".join(cycles[:whole]) + cycles[whole][:50])
    assert answers(measure_answers(bench(place, tmp_path), PROMPTS, seed=3)) == answers(measured[1])
    again = records.read_text().splitlines(keepends=True)
    assert again[:7] == lines[:7] and again[7:] != lines[7:]  # other times
    untimed = [
        [{**line, "t_draft": 0, "t_verify": 0} for line in cycles_of(path)]
        for path in (tmp_path, measured[0])
    ]
    assert untimed[0] == untimed[1]
    # answers that failed are measured again
    failed = line_of(replace(read_records(records)[3], status="error", message="no memory"))
    records.write_text("".join([*again[:3], failed, *again[4:]]))
    (tmp_path / CYCLES).write_text("".join(cycles + cycles[whole:]))
    assert answers(measure_answers(bench(place, tmp_path), PROMPTS, seed=3)) == answers(measured[1])
    assert [record.status for record in read_records(records)] == ["ok"] * len(again)
    edited = [replace(PROMPTS[0], turns=("Please count 5 boats.",)), *PROMPTS[1:]]
    message = r"records.jsonl: prompt 'a' of 'count' has changed; delete the file"
    tiny.refused(message, measure_answers, bench(place, tmp_path), edited, seed=3)
    (tmp_path / CYCLES).write_text("".join(cycles[:3]) + "{}\n")
    message = r"cycles.jsonl: a line is damaged .*; add --overwrite"
    tiny.refused(message, measure_answers, bench(place, tmp_path), PROMPTS, seed=3)


@pytest.mark.parametrize("call", ["append_lines", "remove_tree"])
def test_answers_of_several_processes_join_in_spite_of_a_kill(
    call: str, tmp_path: Path, measured: Measured, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kill after the cycles, or after the records, neither doubles nor loses a line."""
    cycles = (measured[0] / CYCLES).read_text().splitlines(keepends=True)
    lines = [line_of(record) for record in measured[1]]
    ends = [0, *itertools.accumulate(record.target_forwards for record in measured[1])]
    for part, answers in ((tmp_path, range(5)), (tmp_path / "process-1", range(5, 9))):
        part.mkdir(exist_ok=True)
        (part / RECORDS).write_text("".join(lines[answers.start : answers.stop]))
        (part / CYCLES).write_text("".join(cycles[ends[answers.start] : ends[answers.stop]]))
    real = getattr(bench_module, call)

    def killed(*arguments: Any) -> None:
        if arguments[0] != tmp_path / CYCLES:
            raise KeyboardInterrupt
        real(*arguments)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(bench_module, call, killed)
        bench_module.collect_answers(tmp_path)
    found = bench_module.collect_answers(tmp_path)
    assert [*found] == [record.key for record in measured[1][:9]]
    assert (tmp_path / RECORDS).read_text() == "".join(lines[:9])
    assert (tmp_path / CYCLES).read_text() == "".join(cycles[: ends[9]])
    assert not (tmp_path / "process-1").exists()


def test_sampling(
    place: Place, tmp_path: Path, measured: Measured, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What draws a token is the suite's, not the generation_config's."""
    made = bench(place, tmp_path / "same")
    for name, value in {
        "do_sample": True,
        "top_k": 1,
        "top_p": 0.1,
        "min_p": 0.9,
        "temperature": 0.2,
    }.items():
        monkeypatch.setattr(made.target.generation_config, name, value)
    assert answers(measure_answers(made, PROMPTS, seed=3)) == answers(measured[1])


OUT_OF_MEMORY = torch.OutOfMemoryError("no memory\nsecond line")


@pytest.mark.parametrize("wrong", [0, 1])  # later turns need vanilla's answer
def test_failed_row(
    wrong: int, place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failed row has a message and no time, and the others go on."""
    made = bench(place, tmp_path, GREEDY)
    monkeypatch.setattr(made.decoders[wrong], "generate", Mock(side_effect=OUT_OF_MEMORY))
    for r in measure_answers(made, PROMPTS, seed=3):
        if r.row == wrong and (r.turn == 0 or wrong):
            assert (r.status, r.message, r.ms, r.new_tokens) == ("error", "no memory", None, 0)
        else:
            assert r.status == ("error" if r.turn and not wrong else "ok")


def test_context_end(place: Place, tmp_path: Path) -> None:
    """Long answers end at the target's context, alike in all rows."""
    made = bench(
        place, tmp_path, replace(GREEDY, prompts=PromptsConfig("p.jsonl", max_new_tokens=500))
    )
    records = measure_answers(made, PROMPTS[1:2], seed=3)
    assert {r.prompt_tokens + r.new_tokens for r in records} == {112} and all(
        r.identical for r in records
    )
    assert all(r.identical_to_generate for r in run_reference(made, records))


def test_sweep(place: Place, tmp_path: Path) -> None:
    """A sweep is measured on its own prompts, beside the rows and vanilla, or refused."""
    sweep = SweepConfig(
        "depth", "tree.levels", (1, 3), ({"method": "eagle2", "tree": TREE},), num_prompts=1
    )
    warm = SweepConfig(
        "warmth", "temperature", (0.7,), ({"method": "pld"},), (COLD,), tasks=("draw",)
    )
    config = replace(GREEDY, sweeps=(sweep, warm))
    records = measure_answers(bench(place, tmp_path, config), PROMPTS, seed=3)
    found = {(r.row, r.temperature, r.task, r.prompt_id) for r in records if r.turn == 0}
    main = {(row, 0.0, p.task, p.prompt_id) for row in range(5) for p in PROMPTS}
    # level 3 is the bench's own row; level 1 gets each task's first prompt; 0.7 gets that of
    # `draw`, as vanilla does
    assert found == main | {
        (5, 0.0, "count", "a"),
        (5, 0.0, "draw", "a"),
        (0, 0.7, "draw", "a"),
        (2, 0.7, "draw", "a"),
    }
    written = suite_file(bench(place, tmp_path, config).suite, PROMPTS, None)
    assert len(written.main) == 5
    points = [
        (point.row, point.temperature, point.value, point.prompts) for point in written.points
    ]
    first = (("count", "a"), ("draw", "a"))
    assert points == [(5, 0.0, 1, first), (1, 0.0, 3, first), (2, 0.7, 0.7, first[1:])]
    for wrong, message in (
        (replace(sweep, vary="method.k"), r"bench\.sweeps\.0 \(method\.k 1\): there is no 'k'"),
        (replace(sweep, vary="tree.depth"), r"bench\.sweeps\.0 \(tree\.depth 1\): .*: unknown key"),
        (replace(warm, tasks=("math",)), r"bench\.sweeps\.0: bench.prompts has no task 'math'"),
    ):
        config = replace(GREEDY, sweeps=(wrong,))
        with pytest.raises(UserError, match=message):
            measure_answers(bench(place, tmp_path, config), PROMPTS, seed=3)


OF_2026 = ROOT / "configs" / "bench" / "2026.yaml"
SUITES = sorted({*ROOT.glob("configs/bench/*.yaml")} - {OF_2026})
LONG = ("deagle", "seeds", "seeds-full", "svip-qwq", "svip-mtbench")


class Miniatures:
    """Model name -> directory of a miniature target, draft or head."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def of(self, name: str, target: str = "") -> str:
        """The directory for a target or draft, or for a head of a target."""
        kinds = ("eagle3", "eagle1", "medusa", "hydra", "block")
        kind = next((kind for kind in kinds if kind.removesuffix("1") in name.lower()), None)
        place = self.root / (f"{kind} of {target}" if kind else name).replace("/", "-")
        if place.is_dir():
            return str(place)
        if kind is None:
            self._target(name, place)
        else:
            recipe = TargetConfig(self.of(target), dtype="float32")
            sizes = {"block_size": 17} if kind == "block" else {}
            save_head(make_head(Target.load(recipe), kind, **sizes), place)
            calibrator = Calibrator(1.0, (0.0, 1.0), (0.0, 1.0), head=digests(place))
            write_json(place / "calibrator.json", as_dict(calibrator))
        return str(place)

    def _target(self, name: str, place: Path) -> None:
        """Has rows beyond the tokenizer's; Vicuna has no template, and Qwen settings of its own."""
        tokenizer = tiny.tokenizer(chat_template=None if "vicuna" in name else tiny.TEMPLATE)
        tokenizer.add_special_tokens({"bos_token": "<s>"})  # Vicuna's template needs it
        model = tiny.llama(vocab_size=len(tokenizer) + 8)
        if name.startswith("Qwen"):
            ends = {"eos_token_id": [tokenizer.eos_token_id, 5], "pad_token_id": 4}
            model.generation_config = GenerationConfig(**QWEN, **ends)
        model.save_pretrained(place)
        tokenizer.save_pretrained(place)


def small(path: Path, made: Miniatures) -> Path:
    """The suite with miniatures for its models, one question per task and five new tokens."""
    values = yaml.safe_load(path.read_text())
    root, named = made.root, values["target"]["path"]
    values["target"]["path"] = made.of(named)
    values["target"].pop("device_map", None)
    values["run"] = str(root / f"run-{path.stem}")
    section = values.get("bench") or values["calibrate"]
    prompts = section["prompts"]
    prompts |= {"max_new_tokens": 5, "num_prompts": 1}
    question = {
        "question_id": 1,
        "turns": ["Please count 4 boats.", "Please sort 9 owls."],
        "level": 3,
        "category": "count",
    }
    questions = str(tiny.write_rows(root / "questions.jsonl", [question]))
    if "tasks" in prompts:
        prompts["tasks"] = [{"name": task["name"], "path": questions} for task in prompts["tasks"]]
    else:
        prompts["path"] = questions

    def with_heads(row: dict[str, Any]) -> dict[str, Any]:
        kinds = METHODS[row.get("method", "deagle")].heads
        if not kinds:
            return row
        usual = f"{named}-1.5B" if kinds == ("draft_lm",) else kinds[0]
        return {**row, "head": made.of(row.get("head") or usual, named)}

    if "calibrate" in values and "bench" not in values:
        section["oracle_levels"] = 6
        values["head"]["init_from"] = made.of(values["head"]["init_from"])
    for rows in [section, *section.get("sweeps", ())]:
        rows |= {"rows": [with_heads(row) for row in rows["rows"]]} if "rows" in rows else {}
    for sweep in section.get("sweeps", ()):
        if sweep["vary"] == "head":
            sweep["values"] = [made.of(name, named) for name in sweep["values"]]
    return tiny.recipe(root / f"{path.stem}.yaml", values)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Miniatures:
    return Miniatures(tmp_path_factory.mktemp("suites"))


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=[pytest.mark.slow] * (path.stem in LONG)) for path in SUITES],
    ids=lambda path: path.stem,
)
def test_suite(path: Path, made: Miniatures, capsys: Any) -> None:
    """A suite of configs/bench runs to its end."""
    recipe = small(path, made)
    values = yaml.safe_load(recipe.read_text())
    run = Path(values["run"])
    if "bench" not in values:
        assert (
            tiny.call(infer, "calibrate", "--config", recipe, "--head", values["head"]["init_from"])
            == 0
        )
        assert pd.read_parquet(run / "calibration" / "cycles.parquet").oracle.notna().any()
        return
    assert tiny.call(infer, "bench", "--config", recipe) == 0, capsys.readouterr().err
    records = read_records(run / "bench" / "records.jsonl")
    assert {record.status for record in records} == {"ok"}, [record.message for record in records][
        :1
    ]
    assert {record.row for record in records} >= set(range(len(values["bench"]["rows"])))
    for record in records:
        assert record.identical is not False or (
            record.margin is not None and record.margin <= 1.0
        ), (
            record.method,
            record.margin,
        )
    assert tiny.call(infer, "claims", run) == 0


@pytest.mark.slow
def test_report_of_2026(made: Miniatures, capsys: Any) -> None:
    """It runs to its end; its page has each set and its parts, the published figures, and which
    texts are longer than any that a head was trained on.
    """
    recipe = small(OF_2026, made)
    values = yaml.safe_load(recipe.read_text())
    for row in values["bench"]["rows"][1:]:
        Path(row["head"], "recipe.yaml").write_text("data: {max_length: 12}\n")
    assert tiny.call(infer, "bench", "--config", recipe) == 0
    told = capsys.readouterr().err
    assert "was trained on texts of up to 12 tokens" in told and "speed_bench_16k" in told
    assert tiny.call(infer, "report", "--config", recipe) == 0
    records = read_records(Path(values["run"]) / "bench" / "records.jsonl")
    assert {record.status for record in records} == {"ok"}
    report = Path(values["run"]) / "report"
    page = (report / "index.html").read_text()
    for text in ("Qwen3 8B, JetSpec, 256 nodes", "Qwen3 8B, DSpark", "9.64× / 10.76", "– / 6.17"):
        assert text in page
    assert "100% beyond 12<" in page
    by_task = read_json(report / "details.json")["by_task"]
    tasks = [row["task"] for row in by_task]
    assert {"speed_bench", "speed_bench-count", "math500", "math500-level3"} <= set(tasks)
    rows = read_json(report / "summary.json")["rows"]
    by_length = [row for row in by_task if row["task"] == "speed_bench_16k" and row["tree"]]
    assert {row["beyond_trained"] for row in by_length} == {1.0} and len(by_length) == 10
    assert not {"speed_bench", "math500"} & {row["task"] for row in rows}


def test_near_tie() -> None:
    """In 16 bits a near-tie is rounding, and any other difference is not."""
    model, ids = tiny.llama(), torch.tensor([[7, 9, 11, 23]])
    with torch.no_grad():
        order = model(ids).logits[0, -1].argsort(descending=True).tolist()
        best, twin, worst = order[0], order[1], order[-1]
        model.lm_head.weight[twin] = model.lm_head.weight[best]
    target = Target(model.bfloat16(), TargetConfig("tiny", dtype="bfloat16"))
    margins = [
        first_difference(target, ids, 0, ours, [best, 5]).margin for ours in ([twin], [worst], [])
    ]
    assert margins[0] <= 1 < margins[1] < margins[2] == float("inf")
