"""A bench's sweeps expand into rows, each measured once, and nothing of a sweep stands among the rows."""

from typing import Any

import pytest

from aerie.configs.errors import UserError
from aerie.configs.read import validate
from aerie.configs.schema.decode import MethodConfig
from aerie.configs.schema.measure import BenchConfig, PromptsConfig, SamplingConfig, SweepConfig
from aerie.infer.measure.bench import asked_of, check_tasks, plan_text, suite_of
from aerie.infer.measure.tasks import Prompt

PROMPTS = [Prompt(str(n), task, f"{task} {n}") for n in range(3) for task in ("sums", "code")]
ROWS = (MethodConfig("vanilla"), MethodConfig("eagle2"))
RAW: tuple[dict[str, Any], ...] = ({"method": "vanilla"}, {"method": "eagle2"})
COLD, WARM = SamplingConfig(), SamplingConfig(1.0)


def bench(*sweeps: SweepConfig, **changes: object) -> BenchConfig:
    return BenchConfig(PromptsConfig("p.jsonl"), ROWS, sweeps=sweeps, **changes)  # type: ignore[arg-type]


def depths(**changes: object) -> SweepConfig:
    return SweepConfig("depth", "tree.levels", (7, 8), ({"method": "eagle2"},), **changes)  # type: ignore[arg-type]


def test_each_value_is_a_row_of_its_own_behind_the_benchs() -> None:
    suite = suite_of(bench(depths()))
    assert suite.rows[:2] == ROWS and [row.tree.levels for row in suite.rows[2:] if row.tree] == [7, 8]
    assert [(point.value, point.cell.row) for point in suite.points] == [(7, 2), (8, 3)]
    assert [cell.row for cell in suite.main] == [0, 1] and suite.baselines == ()
    assert suite.places[2:] == ("bench.sweeps.0 (tree.levels 7)", "bench.sweeps.0 (tree.levels 8)")


def test_equal_rows_are_measured_once() -> None:
    again = SweepConfig("again", "method", ("eagle2", "deagle"), ({"method": "eagle2"},))
    other = SweepConfig("other", "tree.levels", (8, 7), ({"method": "eagle2"},))
    suite = suite_of(bench(depths(), again, other))
    assert [point.cell.row for point in suite.points] == [2, 3, 1, 4, 3, 2]
    assert len(suite.rows) == 5


def test_a_sweep_asks_its_own_prompts_and_the_rows_all_of_them() -> None:
    suite = suite_of(bench(depths(tasks=("sums",), num_prompts=2)))
    asked = suite.rows_for(COLD, PROMPTS)
    assert [asked["sums", str(n)] for n in range(3)] == [[0, 1, 2, 3], [0, 1, 2, 3], [0, 1]]
    assert asked["code", "0"] == [0, 1] and suite.rows_for(WARM, PROMPTS) == {}


def test_temperatures_beside_the_benchs_bring_vanilla_along() -> None:
    sweep = SweepConfig("warmth", "temperature", (0.0, 0.5), ({"method": "eagle2"},), num_prompts=1)
    suite = suite_of(bench(sweep))
    half = SamplingConfig(0.5)
    assert [point.cell.sampling for point in suite.points] == [COLD, half] and len(suite.rows) == 2
    assert suite.samplings == (COLD, half)
    assert suite.rows_for(half, PROMPTS) == {("sums", "0"): [0, 1], ("code", "0"): [0, 1]}
    written = asked_of(bench(sweep), PROMPTS, 256)
    assert [(cell.row, cell.temperature) for cell in written.main] == [(0, 0.0), (1, 0.0)]
    assert [(p.row, p.temperature, p.prompts) for p in written.points][1] == (1, 0.5, (("sums", "0"), ("code", "0")))


def test_every_key_of_a_row_can_vary() -> None:
    base = {"method": "svip", "head": "heads/a", "tree": {"levels": 9}}
    for key, values in {
        "head": ("heads/b",),
        "tree.nodes": (7,),
        "tree.k": (3,),
        "tree.stop": ({"rule": "entropy", "h": 0.2},),
    }.items():
        (row,) = suite_of(bench(SweepConfig("s", key, values, (base,)))).rows[2:]
        assert row != validate(base, MethodConfig, "x", {}) and row.tree is not None and row.tree.levels == 9


@pytest.mark.parametrize(
    ("sweep", "message"),
    [
        (
            SweepConfig("s", "tree.depth", (6,), RAW[1:]),
            r"bench\.sweeps\.0 \(tree\.depth 6\): .*tree\.depth: unknown key",
        ),
        (SweepConfig("s", "tree.levels", ("six",), RAW[1:]), r"tree\.levels: input should be a valid integer"),
        (SweepConfig("s", "method.levels", (6,), RAW[1:]), "method is not a section"),
        (SweepConfig("s", "temperature", (-1,), RAW[1:]), "a temperature is a number"),
    ],
)
def test_a_key_or_a_value_that_no_row_has_is_refused(sweep: SweepConfig, message: str) -> None:
    with pytest.raises(UserError, match=message):
        suite_of(bench(sweep))


def test_a_task_without_prompts_and_names_that_meet_are_refused() -> None:
    with pytest.raises(UserError, match=r"bench\.sweeps\.0: no prompt is of task 'math'; tasks are sums, code"):
        check_tasks(bench(depths(tasks=("math",))), PROMPTS)
    for names in (("a", "a"), ("context",)):
        with pytest.raises(ValueError, match="need names that differ"):
            bench(*(SweepConfig(name, "tree.k", (2,), RAW[1:]) for name in names))
    with pytest.raises(ValueError, match="ascending"):
        bench(contexts=(256, 128))


def test_the_plan_says_how_much_it_is() -> None:
    assert plan_text(bench(depths())) == (
        "bench: 2 rows x 1 samplings x 80 prompts, at most 512 new tokens a turn, 1 sweeps of 2 points"
    )
