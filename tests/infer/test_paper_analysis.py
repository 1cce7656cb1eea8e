"""What the papers' claims need beside recorded cycles: oracle lengths and feature errors."""

from dataclasses import replace

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
    assert (drafted.oracle >= drafted.accepted).all()
    assert (laws.largest_gap <= laws.tvd + 1e-9).all()
    assert laws.feature_error.notna().all() == kind.startswith("eagle")
    if kind == "draft_lm":  # a target that drafts for itself is always right
        room = SECTION.prompts.max_new_tokens - drafted.answered - 1
        assert (drafted.oracle == room.clip(upper=5)).all() and drafted.oracle.max() == 5
        assert laws.tvd.max() < 1e-5 and laws.agrees.all() and laws.accepted.all()
    if kind == "eagle1" and temperature == 0:  # both laws come from one LM head: DEAGLE, equation 4
        assert (laws.kl_pq <= laws.kl_bound).all() and (laws.kl_pq > 0).any()
    parts = calibrate.analyse(runs[1])
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
