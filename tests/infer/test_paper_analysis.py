"""What the papers' figures need of recorded cycles: oracle lengths, frontiers, rejections."""

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from aerie.configs.schema.decode import TreeConfig
from aerie.infer.decode.cached_lm import TargetStep
from aerie.infer.decode.roles import Cycle
from aerie.infer.decode.tree import DraftLaws, Tree
from aerie.infer.decode.verify import Verdict
from aerie.infer.measure import calibrate
from aerie.infer.measure.recorder import FEATURE_COLUMNS
from aerie.infer.papers import analysis
from tests.infer.draws import decoder_of, make_target
from tests.infer.laws import sampler, tree_of
from tests.infer.test_calibrate import CHAIN, MEDUSA, QUESTIONS, SECTION, WIDE


def table(names: str, rows: list[list[Any]]) -> pd.DataFrame:
    return pd.DataFrame(rows, columns=names.split()).assign(prompt=0)


def test_equations_22_to_24_by_depth() -> None:
    branches = [[0, 1, 0.6, True], [0, 1, 0.3, False], [0, 2, 0.6, True]]
    branches += [[1, 1, 0.7, True], [1, 2, 0.2, False]]
    cycles = table("cycle accepted", [[0, 1], [1, 1]])
    levels = analysis.level_table(table("cycle depth survival accepted", branches), cycles)
    names = ["cycles", "mass", "held", "reached", "expected"]
    expected = [[2, 0.8, 1.0, 1.0, 0.8], [2, 0.4, 0.5, 0.0, 1.2]]
    np.testing.assert_allclose(pd.DataFrame(levels)[names].astype(float), expected)


def test_figure_3a_looks_back_in_its_own_cycle() -> None:
    rows = [[0, 1, True, 0.1], [0, 2, True, 0.2], [0, 3, False, 3.0]]
    rows += [[1, 1, False, 5.0], [2, 1, True, 9.0], [3, 1, False, np.inf]]  # infinity is left out
    laws = table("cycle depth followed kl_qp", rows).assign(accepted=False, ranked=[[0.0]] * 6)
    kl = {row["offset"]: row["kl"] for row in analysis.rejections(laws)["before_rejection"]}
    assert kl == {-4: None, -3: None, -2: 0.1, -1: 0.2, 0: 4.0}


def test_oracle_lengths_by_context() -> None:
    rows = [[10, 5, 5, 7], [32, 5, 2, 2], [33, 5, 0, 0], [64, 3, 3, 8], [9000, 5, 5, 8]]
    rows += [[9001, 0, 0, np.nan]]  # nothing was drafted
    cycles = table("position levels accepted oracle", rows).assign(cap=8)
    summary = analysis.oracle_summary(cycles)
    assert summary is not None and analysis.oracle_summary(cycles[:0]) is None
    first, second, last = ([*row.values()] for row in summary["by_context"])
    # above, up to, cycles, oracle, variance, delta, censored
    assert first == [0, 32, 2, 4.5, 6.25, 0.5, 0.0]  # oracles 7 and 2; deltas -2 and +3
    assert second[4:] == [16.0, 0.0, 0.5] and last[:3] == [8192, None, 1]


@pytest.mark.parametrize(
    ("tree", "kind"), [(WIDE, "eagle1"), (CHAIN, "eagle3"), (CHAIN, "draft_lm"), (MEDUSA, "medusa")]
)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_an_observer_adds_columns_and_changes_nothing(
    tree: TreeConfig, kind: str, temperature: float
) -> None:
    """Every kind of draft has an analysis."""
    section = replace(SECTION, temperature=temperature)
    runs = []
    for observer in (calibrate.Observer(), analysis.PaperObserver(oracle_levels=5)):
        decoder = decoder_of(make_target(), tree, kind)
        observer.attach(decoder, tree, 3)
        runs.append(calibrate.record_cycles(decoder, QUESTIONS, section, 3, observer))
    plain, tables = (run.tables for run in runs)
    for name in plain:
        old = plain[name].drop(columns=list(FEATURE_COLUMNS), errors="ignore")
        pd.testing.assert_frame_equal(old, tables[name][list(old.columns)])
    cycles, laws = tables["cycles"], tables["laws"]
    drafted = cycles.dropna(subset="oracle")
    assert len(drafted) == (cycles.levels > 0).sum() > 0
    assert drafted.oracle.between(drafted.accepted, drafted.cap).all()
    assert (drafted.cap >= drafted.levels).all() and (laws.largest_gap <= laws.tvd + 1e-9).all()
    assert laws.feature_error.notna().all() == kind.startswith("eagle")
    if kind == "draft_lm":  # a target that drafts for itself is always right
        assert (drafted.oracle == drafted.cap).all() and drafted.cap.max() == 5
        assert laws.tvd.max() < 1e-5 and laws.agrees.all() and laws.accepted.all()
    if kind == "eagle1" and temperature == 0:  # both laws come from one LM head: DEAGLE, equation 4
        assert (laws.kl_pq <= laws.kl_bound).all() and (laws.kl_pq > 0).any()
    parts = calibrate.analyse(runs[1]) | observer.analyse(tables, runs[1].tasks, bins=20)
    assert json.loads(json.dumps(parts, allow_nan=False))["oracle"]["all"]["cycles"] == len(drafted)
    assert sum(row["nodes"] for row in parts["by_task"]) == len(tables["nodes"])


P, Q = torch.tensor([0.5, 0.3, 0.2, 0.0]), torch.tensor([0.2, 0.6, 0.1, 0.1])
VERDICTS = {
    "R0": Verdict([0, 1], [0], 0),
    "R1": Verdict([0, 1], [0], 3),
    "R2": Verdict([0, 1], [0], 1),
}


def chain(tokens: list[int], rule: str) -> Tree:
    count = len(tokens)
    draft_laws = DraftLaws("R1", Q.expand(count + 1, -1)) if rule == "R1" else None
    return replace(tree_of([0, *tokens], [0, *range(count)]), draft_laws=draft_laws)


@pytest.mark.parametrize(
    ("rule", "drafted", "deep", "shares"),
    [
        # the whole draft accepted: token 1 is accepted with .3 / .6, twice; token 2 always
        ("R1", [0], [0, 1, 1, 2], [0.0, 0.5, 0.25, 0.0, 0.25]),
        ("R1", [0, 1], [0, 1, 1, 2], [0.0, 1.0, 0.0, 0.0, 0.0]),  # a refusal keeps its own length
        ("R1", [2], [0, 1, 1, 2], [0.0, 1.0, 0.0, 0.0, 0.0]),  # another chain is not followed
        # the bonus is the second token, then draws follow
        ("R2", [0], [0, 1, 0, 0], [0.0, 0.0, 0.5, 0.25, 0.25]),
        ("R0", [0], [0, 0, 0, 1], [0.0, 0.0, 0.0, 1.0, 0.0]),  # argmax
    ],
)
def test_an_oracle_length_has_the_law_of_the_targets_choices(
    rule: str, drafted: list[int], deep: list[int], shares: list[float]
) -> None:
    longer, trials = chain(deep, rule), 1200
    logits, generator = P.log().expand(len(longer), -1), torch.Generator().manual_seed(0)
    step, draws = TargetStep(logits, logits), sampler(float(rule != "R0"), 1.0)
    cycle = Cycle(chain(drafted, rule), step, VERDICTS[rule], draws, rule)
    lengths = [analysis.oracle_length(cycle, longer, logits, generator) for _ in range(trials)]
    assert np.bincount(lengths, minlength=5) / trials == pytest.approx(shares, abs=0.045)
