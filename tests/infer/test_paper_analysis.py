"""What the papers' figures need of recorded cycles: oracle lengths, frontiers, rejections."""

import json
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch

from aerie.configs.schema.decode import TreeConfig
from aerie.infer.decode.cache import TargetStep
from aerie.infer.decode.roles import Cycle
from aerie.infer.decode.tree import DraftLaws, Tree
from aerie.infer.decode.verify import Verdict
from aerie.infer.measure import calibrate
from aerie.infer.measure.recorder import FEATURE_COLUMNS
from aerie.infer.papers import analysis
from tests.infer.draws import decoder_of, make_target
from tests.infer.laws import sampler, tree_of
from tests.infer.test_calibrate import CHAIN, MEDUSA, QUESTIONS, SECTION, WIDE


def test_equations_22_to_24_by_depth() -> None:
    frontier = pd.DataFrame({"prompt": 0, "cycle": [0, 0, 0, 1, 1], "depth": [1, 1, 2, 1, 2]})
    frontier["survival"] = [0.6, 0.3, 0.6, 0.7, 0.2]
    frontier["accepted"] = [True, False, True, True, False]
    cycles = pd.DataFrame({"prompt": [0, 0], "cycle": [0, 1], "accepted": [1, 1]})
    table = pd.DataFrame(analysis.level_table(frontier, cycles))
    rows = table[["cycles", "mass", "held", "reached", "expected"]].to_numpy().tolist()
    assert rows == [pytest.approx([2, 0.8, 1.0, 1.0, 0.8]), pytest.approx([2, 0.4, 0.5, 0.0, 1.2])]


def test_figure_3a_looks_back_in_its_own_cycle() -> None:
    laws = pd.DataFrame({"prompt": 0, "cycle": [0, 0, 0, 1, 2, 3], "depth": [1, 2, 3, 1, 1, 1]})
    laws["accepted"] = False
    laws["followed"] = [True, True, False, False, True, False]
    laws["kl_qp"] = [0.1, 0.2, 3.0, 5.0, 9.0, np.inf]  # the infinity is left out
    laws["ranked"] = [[0.0]] * 6
    kl = {row["offset"]: row["kl"] for row in analysis.rejections(laws)["before_rejection"]}
    assert kl == {-4: None, -3: None, -2: 0.1, -1: 0.2, 0: 4.0}


def test_oracle_lengths_by_context() -> None:
    cycles = pd.DataFrame({"position": [10, 32, 33, 64, 9000, 9001], "cap": 8})
    cycles["levels"] = [5, 5, 5, 3, 5, 0]
    cycles["accepted"] = [5, 2, 0, 3, 5, 0]
    cycles["oracle"] = [7, 2, 0, 8, 8, np.nan]  # the last cycle drafted nothing
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
