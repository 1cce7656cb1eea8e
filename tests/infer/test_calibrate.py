"""Calibration: summaries of recorded tables, calibrators, and static trees rebuilt from ranks.

What the papers' claims need beside recorded cycles: oracle lengths and feature errors.
"""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from aerie.configs.schema.decode import ChainConfig, DynamicConfig, StaticConfig, TreeConfig
from aerie.configs.schema.measure import CalibrateConfig, PromptsConfig
from aerie.infer.decode.cached_lm import TargetStep
from aerie.infer.decode.calibrator import FLOOR, Calibrator, load_calibrator
from aerie.infer.decode.proposers import tree_proposer
from aerie.infer.decode.roles import Cycle, unchanged
from aerie.infer.decode.tree import DraftLaws, Tree
from aerie.infer.decode.verify import Verdict
from aerie.infer.measure import calibrate
from aerie.infer.measure.recorder import FEATURE_COLUMNS
from aerie.infer.papers import analysis
from aerie.model.checkpoint import save_head
from aerie.model.storage import Stage, digests, write_json
from tests import tiny
from tests.infer.draws import decoder_of, make_target
from tests.infer.laws import sampler, tree_of
from tests.infer.test_main import Typing, shared, typing

__all__ = ["shared", "typing"]
WIDE = DynamicConfig(levels=3, k=4, nodes=8)
CHAIN = ChainConfig(levels=2)
MEDUSA = StaticConfig(choices=((0,), (1,), (0, 0)), children="best")
QUESTIONS = [
    calibrate.Question(torch.tensor([[7, 9, 11, 23, 5]]), "count"),
    calibrate.Question(torch.tensor([[8, 30, 12]]), "sort"),
]
SECTION = CalibrateConfig(PromptsConfig("none", max_new_tokens=14), ranks=6)


def nodes_of(confidence: Any, acceptance: Any, **more: Any) -> pd.DataFrame:
    return pd.DataFrame({"confidence": confidence, "acceptance": acceptance, **more})


def test_ece_and_brier_follow_from_the_bins() -> None:
    table = calibrate.reliability(nodes_of([0.1, 0.2, 0.6, 0.8, 1.0], [0.0, 1.0, 1.0, 0.0, 1.0]), 2)
    low, high = table["bins"]
    # the last bin includes its upper edge
    assert (low["high"], low["count"], high["count"]) == (0.5, 2, 3)
    assert (low["confidence"], low["acceptance"]) == (pytest.approx(0.15), pytest.approx(0.5))
    assert table["ece"] == pytest.approx((2 * abs(0.15 - 0.5) + 3 * abs(0.8 - 2 / 3)) / 5)
    assert table["brier"] == pytest.approx((0.01 + 0.64 + 0.16 + 0.64 + 0.0) / 5)
    # single-precision values on an edge belong to the bin above it
    edges = (np.arange(20, dtype=np.float32) / np.float32(20)).astype(np.float64)
    bins = calibrate.reliability(nodes_of(edges, np.zeros(20)))["bins"]
    assert [row["count"] for row in bins] == [1] * 20
    # acceptance probability 0.3: 0.3 * (0.5 - 1)^2 + 0.7 * 0.5^2
    assert calibrate.reliability(nodes_of([0.5], [0.3]))["brier"] == pytest.approx(0.25)


def test_the_summary_counts_by_depth() -> None:
    # cycle 0 accepts two tokens and misses the third level; cycle 1 accepts none of two siblings
    confidence, acceptance = [0.9, 0.7, 0.5, 0.6, 0.2], [1.0, 1.0, 0.0, 0.0, 0.0]
    nodes = nodes_of(confidence, acceptance, prompt=0, depth=[1, 2, 3, 1, 1])
    tables = {"nodes": nodes, "cycles": pd.DataFrame({"accepted": [2, 0]})}
    summary = calibrate.summarise(calibrate.RecordedCycles(tables, (), 0.0))
    names = ["nodes", "cycles", "survived", "conditional"]
    rows = pd.DataFrame(summary["by_depth"])[names].to_numpy().tolist()
    assert rows == [[3, 2, 0.5, 0.5], [1, 1, 0.5, 1.0], [1, 1, 0.0, 0.0]]
    nothing = calibrate.RecordedCycles({name: rows[:0] for name, rows in tables.items()}, (), 0.0)
    assert '"ece": null' in json.dumps(calibrate.summarise(nothing), allow_nan=False)


def write_calibration(output: Path) -> None:
    """The files that `calibrate` writes for a tiny head, on 12 prompts of two tasks."""
    ids = [torch.tensor([[7, 9, 11 + number, 23, 5]]) for number in range(12)]
    questions = [
        calibrate.Question(tokens, ("sums", "code")[n % 2]) for n, tokens in enumerate(ids)
    ]
    decoder = decoder_of(make_target(), WIDE)
    observer = analysis.PaperObserver(oracle_levels=5)
    observer.attach(decoder, WIDE)
    recorded = calibrate.record_cycles(decoder, questions, SECTION, 0, observer)
    calibrate.write_calibration(output, recorded, 20, None, "eagle2")
    Stage("calibration", output, {}).finish()


def test_a_fit_lowers_the_ece_of_prompts_it_has_not_seen() -> None:
    generator = np.random.default_rng(0)
    confidence, uniform = generator.random(4000), generator.random(4000)
    accepted = (uniform < confidence**2).astype(np.float64)  # confidence c is accepted with c ** 2
    nodes = nodes_of(confidence, accepted, prompt=np.arange(4000) % 40)
    scored = calibrate.fit_and_score(calibrate.RecordedCycles({"nodes": nodes}, (), 0.0), bins=20)
    before, after = (scored.facts["held_out"][name] for name in ("before", "isotonic"))
    assert before["ece"] > 0.12 and after["ece"] < 0.06
    assert after["brier"] < before["brier"] and after["log_loss"] < before["log_loss"]
    lonely = calibrate.RecordedCycles({"nodes": nodes.assign(prompt=0)}, (), 0.0)
    assert calibrate.fit_and_score(lonely, bins=20) is None  # one prompt has no other half


def test_a_fit_is_logistic_and_isotonic_regression() -> None:
    confidence = np.random.default_rng(0).uniform(0.02, 0.98, 40_000)
    acceptance = 1 / (1 + ((1 - confidence) / confidence) ** (1 / 1.7))
    calibrator = calibrate.fit_calibrator(confidence, acceptance)
    assert calibrator.temperature == pytest.approx(1.7, rel=1e-3)
    # the middle two pool to one half
    calibrator = calibrate.fit_calibrator(np.array([0.1, 0.3, 0.5]), np.array([0.0, 1.0, 0.0]))
    assert calibrator.acceptance == pytest.approx((0.0, 0.5, 0.5))


def test_maps_keep_ranks_and_what_is_impossible() -> None:
    calibrator = Calibrator(2.0, (0.2, 0.6, 0.8), (0.1, 0.5, 0.9))
    # isotonic: linear between knots, constant outside; temperature: odds 4 become 2
    for fit, confidence, expected in (
        ("isotonic", [0.05, 0.2, 0.4, 0.7, 0.8, 1.0], [0.1, 0.1, 0.3, 0.7, 0.9, 0.9]),
        ("temperature", [0.8, 0.5, 1.0], [2 / 3, 0.5, 1.0]),
    ):
        to_acceptance = calibrator.map(fit)  # type: ignore[arg-type]
        assert to_acceptance(torch.tensor(confidence).log()).exp().tolist() == pytest.approx(
            expected
        )
        log_q = torch.randn(4, 50, generator=torch.Generator().manual_seed(0)).log_softmax(-1)
        log_q[0, 7] = float("-inf")
        mapped = to_acceptance(log_q)
        ranked = mapped.gather(-1, log_q.sort(-1, descending=True).indices)
        assert (ranked[:, 1:] <= ranked[:, :-1] + 1e-6).all() and (mapped <= 0).all()
        assert mapped[0, 7] == float("-inf") and mapped[1:].isfinite().all()
    certain = Calibrator(1.0, (0.1, 0.9), (0.0, 1.0)).map("isotonic")(torch.tensor([0.05]).log())
    assert certain.exp().item() == pytest.approx(FLOOR)  # zero never means impossible


@pytest.mark.parametrize("tree", [WIDE, CHAIN, MEDUSA])
def test_calibrated_trees_write_the_same_text(tree: TreeConfig) -> None:
    """They are drafted from mapped confidence."""
    calibrator = Calibrator(3.0, (0.0, 0.5, 0.9), (0.05, 0.2, 0.9)).map("isotonic")
    answers, trees = [], []
    for calibrate_by in (unchanged, calibrator):
        decoder = decoder_of(make_target(), tree, "medusa" if tree is MEDUSA else "eagle1")
        decoder.eager.proposer = tree_proposer(decoder.proposer.drafter, tree, calibrate_by)  # type: ignore[union-attr]
        ids, first = QUESTIONS[0].ids, list[Cycle]()
        answers.append(
            decoder.generate(ids, max_new_tokens=12, do_sample=False, on_cycle=first.append).new_ids
        )
        trees.append(first[0].tree)
    plain, mapped = trees
    assert answers[0] == answers[1]
    assert plain.tokens[1] == mapped.tokens[1]  # a map keeps a law's ranks
    expected = float(calibrator(plain.confidence[1]))
    assert float(mapped.confidence[1]) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"head": {"model.safetensors": "0"}}, "other weights"),
        ({"confidence": [0.9, 0.1]}, r"calibrator\.json"),
        (None, r"calibrator\.json: no such file"),
    ],
)
def test_a_foreign_damaged_or_missing_calibrator_is_refused(
    tmp_path: Path, change: Any, message: str
) -> None:
    save_head(tiny.head(tiny.vocab().embedding), tmp_path)
    good = asdict(Calibrator(1.5, (0.1, 0.9), (0.2, 0.8), head=digests(tmp_path)))
    if change is not None:
        write_json(tmp_path / "calibrator.json", {**good, **change})
    tiny.refused(message, load_calibrator, tmp_path)


def test_ranks_count_where_they_were_judged() -> None:
    nodes = pd.DataFrame({"depth": [1, 1, 1, 1, 2], "place": ["0", "1", "0", "1", "0.1"]})
    accuracy = calibrate.rank_accuracy(nodes.assign(acceptance=[1.0, 0.0, 0.5, 0.0, 0.25]), 2, 3)
    assert accuracy == [[0.75, 0.0, 0.0], [0.0, 0.25, 0.0]]


@pytest.mark.parametrize(
    ("children", "nodes", "choices"),
    [("best", 4, ((0,), (2,), (0, 0))), ("sampled", 6, ((0,), (1,), (2,), (0, 0), (0, 1)))],
)
def test_a_rank_is_left_out_only_where_children_are_not_drawn(
    children: Any, nodes: int, choices: Any
) -> None:
    tree = StaticConfig(choices=((0,), (1,), (2,)), children=children)
    # the third guess is better than the second
    assert calibrate.rebuild_tree(tree, [[0.5, 0.1, 0.3], [0.4, 0.3]], nodes) == choices


def test_a_rebuilt_tree_stands_beside_the_head_and_writes_the_same_text(
    typing: Typing, shared: Path
) -> None:
    text = """
    aerie calibrate {config} --calibrate.method medusa --calibrate.tree '{shallow}' --overwrite
        --tree.choices {choices}
    {ask} --max-new-tokens 12 --method medusa --tree.choices {choices}
    """
    choices = "{root}/run/heads/medusa/" + calibrate.CHOICES
    rebuilt = typing(
        text.replace("{choices}", choices), shallow=f"{{choices: {shared}/shallow.yaml}}"
    )
    assert rebuilt == typing("{ask} --max-new-tokens 12 --method vanilla")


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
        observer.attach(decoder, tree)
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
