"""Calibration: summaries of recorded tables, the oracle, calibrators, and static trees rebuilt from ranks."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from aerie.configs.errors import UserError
from aerie.configs.schema import decode as schema
from aerie.configs.schema.decode import DynamicConfig, StaticConfig, TreeConfig
from aerie.configs.schema.measure import CalibrateConfig, PromptsConfig
from aerie.infer.decode.cache import TargetStep
from aerie.infer.decode.methods import FLOOR, Calibrator, drafting, load_calibrator
from aerie.infer.decode.shape import Cycle, unchanged
from aerie.infer.decode.tree import Proposal, Tree
from aerie.infer.decode.verify import Verdict
from aerie.infer.measure import calibrate
from aerie.infer.measure.cycles import oracle_length
from aerie.model.checkpoint import save_head
from aerie.model.storage import Stage, digests, write_json
from tests import tiny
from tests.infer.draws import decoder_of, make_target
from tests.infer.laws import sampler, tree_of
from tests.infer.test_main import Command, command, shared

__all__ = ["command", "shared"]
WIDE = DynamicConfig(levels=3, k=4, nodes=8)
CHAIN = schema.ChainConfig(levels=2)
MEDUSA = StaticConfig(choices=((0,), (1,), (0, 0)), children="best")
QUESTIONS = [(torch.tensor([[7, 9, 11, 23, 5]]), "count"), (torch.tensor([[8, 30, 12]]), "sort")]
SECTION = CalibrateConfig(PromptsConfig("none", max_new_tokens=14), ranks=6)


def reliability(confidence: Any, acceptance: Any, bins: int = 20) -> dict[str, Any]:
    return calibrate.reliability(
        pd.DataFrame({"confidence": confidence, "acceptance": acceptance}), bins
    )


def test_bins_hold_counts_and_means_and_ece_and_brier_follow() -> None:
    confidence, acceptance = [0.1, 0.2, 0.6, 0.8, 1.0], [0.0, 1.0, 1.0, 0.0, 1.0]
    found = reliability(confidence, acceptance, 2)
    low, high = found["bins"]
    assert (low["high"], low["count"], high["count"]) == (
        0.5,
        2,
        3,
    )  # the last bin includes its upper edge
    assert (low["confidence"], low["acceptance"]) == (pytest.approx(0.15), pytest.approx(0.5))
    assert found["ece"] == pytest.approx((2 * abs(0.15 - 0.5) + 3 * abs(0.8 - 2 / 3)) / 5)
    assert found["brier"] == pytest.approx((0.01 + 0.64 + 0.16 + 0.64 + 0.0) / 5)
    # acceptance probability 0.3: 0.3 * (0.5 - 1)^2 + 0.7 * 0.5^2
    assert reliability([0.5], [0.3])["brier"] == pytest.approx(0.25)
    # single-precision values on an edge belong to the bin above it
    edges = (np.arange(20, dtype=np.float32) / np.float32(20)).astype(np.float64)
    assert [item["count"] for item in reliability(edges, np.zeros(20))["bins"]] == [1] * 20


def test_the_summary_counts_nodes_and_accepted_lengths_by_depth_and_is_json_even_without_nodes() -> (
    None
):
    # cycle 0 accepts two tokens and misses the third level; cycle 1 accepts none of two siblings
    nodes = pd.DataFrame(
        {"prompt": 0, "depth": [1, 2, 3, 1, 1], "confidence": [0.9, 0.7, 0.5, 0.6, 0.2]}
    )
    nodes["acceptance"] = [1.0, 1.0, 0.0, 0.0, 0.0]
    by_depth = calibrate.summarise(nodes, pd.DataFrame({"accepted": [2, 0]}), 0.0)["by_depth"]
    found = [
        [row[name] for name in ("nodes", "cycles", "survived", "conditional")] for row in by_depth
    ]
    assert found == [[3, 2, 0.5, 0.5], [1, 1, 0.5, 1.0], [1, 1, 0.0, 0.0]]
    empty = pd.DataFrame({"accepted": []})
    value = json.loads(json.dumps(calibrate.summarise(nodes[:0], empty, 0.0), allow_nan=False))
    assert value["ece"] is None and value["by_depth"] == [] and len(value["bins"]) == 20
    assert 0 < calibrate.held_out(pd.Series(range(5))).sum() < 5


def test_equations_22_to_24_by_depth() -> None:
    frontier = pd.DataFrame({"prompt": 0, "cycle": [0, 0, 0, 1, 1], "depth": [1, 1, 2, 1, 2]})
    frontier["survival"], frontier["accepted"] = (
        [0.6, 0.3, 0.6, 0.7, 0.2],
        [True, False, True, True, False],
    )
    cycles = pd.DataFrame({"prompt": [0, 0], "cycle": [0, 1], "accepted": [1, 1]})
    names = ("cycles", "mass", "held", "reached", "expected")
    found = [[row[name] for name in names] for row in calibrate.level_table(frontier, cycles)]
    assert found == [pytest.approx([2, 0.8, 1.0, 1.0, 0.8]), pytest.approx([2, 0.4, 0.5, 0.0, 1.2])]


def test_figure_3a_looks_back_in_its_own_cycle() -> None:
    laws = pd.DataFrame(
        {"prompt": 0, "cycle": [0, 0, 0, 1, 2, 3], "depth": [1, 2, 3, 1, 1, 1], "accepted": False}
    )
    laws["followed"], laws["kl_qp"] = (
        [True, True, False, False, True, False],
        [0.1, 0.2, 3.0, 5.0, 9.0, np.inf],
    )
    laws["ranked"] = [[0.0]] * 6
    found = {row["offset"]: row["kl"] for row in calibrate.rejections(laws)["before_rejection"]}
    assert found == {
        -4: None,
        -3: None,
        -2: 0.1,
        -1: 0.2,
        0: 4.0,
    }  # within a cycle, infinities left out


def test_oracle_lengths_by_context() -> None:
    cycles = pd.DataFrame(
        {"position": [10, 32, 33, 64, 9000, 9001], "levels": [5, 5, 5, 3, 5, 0], "cap": 8}
    )
    cycles["accepted"], cycles["oracle"] = (
        [5, 2, 0, 3, 5, 0],
        [7, 2, 0, 8, 8, np.nan],
    )  # the last cycle drafted nothing
    found = calibrate.oracle_summary(cycles)
    assert found is not None and calibrate.oracle_summary(cycles[:0]) is None
    first, second, last = ([*row.values()] for row in found["by_context"])
    # above, up to, cycles, oracle, variance, delta, censored
    assert first == [0, 32, 2, 4.5, 6.25, 0.5, 0.0]  # oracles 7 and 2; deltas -2 and +3
    assert second[4:] == [16.0, 0.0, 0.5] and last[:3] == [8192, None, 1]


def write_calibration(output: Path) -> None:
    """The files that `calibrate` writes for a tiny head, on 12 prompts of two tasks."""
    questions = [
        (torch.tensor([[7, 9, 11 + n, 23, 5]]), ("sums", "code")[n % 2]) for n in range(12)
    ]
    made = calibrate.record(
        decoder_of(make_target(), WIDE), WIDE, questions, replace(SECTION, oracle_levels=5)
    )
    calibrate.write_calibration(output, made, bins=20, head=None, method="eagle2")
    Stage("calibration", output, {}).finish()


@pytest.mark.parametrize(
    ("tree", "kind"), [(WIDE, "eagle1"), (CHAIN, "eagle3"), (CHAIN, "draft_lm"), (MEDUSA, "medusa")]
)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_an_oracle_changes_nothing_else_and_every_kind_of_draft_has_an_analysis(
    tree: TreeConfig, kind: str, temperature: float
) -> None:
    sections = (
        replace(SECTION, temperature=temperature, oracle_levels=levels) for levels in (None, 5)
    )
    plain, deep = (
        calibrate.record(decoder_of(make_target(), tree, kind), tree, QUESTIONS, section, 3)
        for section in sections
    )
    cycles = deep.tables["cycles"]
    for name, table in plain.tables.items():
        pd.testing.assert_frame_equal(table, deep.tables[name][list(table.columns)])
    drafted = cycles.dropna(subset="oracle")
    assert len(drafted) == (cycles.levels > 0).sum() > 0 and "oracle" not in plain.tables["cycles"]
    assert (
        drafted.oracle.between(drafted.accepted, drafted.cap).all()
        and (drafted.cap >= drafted.levels).all()
    )
    if kind == "draft_lm":  # a target that drafts for itself is always right
        assert (drafted.oracle == drafted.cap).all() and drafted.cap.max() == 5
        table = deep.tables["laws"]
        assert table.tvd.max() < 1e-5 and table.agrees.all() and table.accepted.all()
    value = json.loads(json.dumps(calibrate.analyse(deep), allow_nan=False))
    assert [row["task"] for row in value["by_task"]] == ["count", "sort"]
    laws, is_eagle = deep.tables["laws"], kind.startswith("eagle")
    assert (
        laws.largest_gap <= laws.tvd + 1e-9
    ).all() and laws.feature_error.notna().all() == is_eagle
    if (
        kind == "eagle1" and temperature == 0
    ):  # both laws come from one LM head (DEAGLE, equation 4)
        assert (laws.kl_pq <= laws.kl_bound).all() and (laws.kl_pq > 0).any()
    assert sum(row["nodes"] for row in value["by_task"]) == len(deep.tables["nodes"])


P, Q = torch.tensor([0.5, 0.3, 0.2, 0.0]), torch.tensor([0.2, 0.6, 0.1, 0.1])
ACCEPTED = {
    "R0": Verdict([0, 1], [0], 0),
    "R1": Verdict([0, 1], [0], 3),
    "R2": Verdict([0, 1], [0], 1),
}


def chain(tokens: list[int], rule: str) -> Tree:
    count = len(tokens)
    proposal = Proposal("R1", Q.expand(count + 1, -1)) if rule == "R1" else None
    return replace(tree_of([0, *tokens], [0, *range(count)]), proposal=proposal)


@pytest.mark.parametrize(
    ("rule", "policy", "deep", "shares"),
    [
        # R1, the whole draft accepted: token 1 is accepted with .3 / .6, twice; token 2 always
        ("R1", [0], [0, 1, 1, 2], [0.0, 0.5, 0.25, 0.0, 0.25]),
        ("R1", [0, 1], [0, 1, 1, 2], [0.0, 1.0, 0.0, 0.0, 0.0]),  # a refusal keeps its own length
        ("R1", [2], [0, 1, 1, 2], [0.0, 1.0, 0.0, 0.0, 0.0]),  # another chain is not followed
        (
            "R2",
            [0],
            [0, 1, 0, 0],
            [0.0, 0.0, 0.5, 0.25, 0.25],
        ),  # the bonus is the second token, then draws follow
        ("R0", [0], [0, 0, 0, 1], [0.0, 0.0, 0.0, 1.0, 0.0]),  # argmax
    ],
)
def test_an_oracle_length_has_the_law_that_the_targets_own_choices_give_it(
    rule: str, policy: list[int], deep: list[int], shares: list[float]
) -> None:
    tree, longer, trials = chain(policy, rule), chain(deep, rule), 1200
    logits, generator = P.log().expand(len(longer), -1), torch.Generator().manual_seed(0)
    cycle = Cycle(
        tree, TargetStep(logits, logits), ACCEPTED[rule], sampler(float(rule != "R0"), 1.0), rule
    )
    lengths = [oracle_length(cycle, longer, logits, generator) for _ in range(trials)]
    assert np.bincount(lengths, minlength=5) / trials == pytest.approx(shares, abs=0.045)


def test_a_fit_is_isotonic_and_logistic_regression_and_lowers_the_ece_of_prompts_it_has_not_seen() -> (
    None
):
    generator = np.random.default_rng(0)
    confidence, uniform = generator.random(4000), generator.random(4000)
    accepted = (uniform < confidence**2).astype(np.float64)  # confidence c is accepted with c ** 2
    nodes = pd.DataFrame(
        {"prompt": np.arange(4000) % 40, "confidence": confidence, "acceptance": accepted}
    )
    found = calibrate.fit_and_score(calibrate.Recording({"nodes": nodes}, (), 0.0), bins=20)
    assert found is not None
    before, after = found[1]["held_out"]["before"], found[1]["held_out"]["isotonic"]
    assert before["ece"] > 0.12 and after["ece"] < 0.06
    assert after["brier"] < before["brier"] and after["log_loss"] < before["log_loss"]
    one = calibrate.Recording({"nodes": nodes.assign(prompt=0)}, (), 0.0)
    assert calibrate.fit_and_score(one, bins=20) is None  # one prompt has no other half
    confidence = generator.uniform(0.02, 0.98, 40_000)
    truth = 1 / (1 + ((1 - confidence) / confidence) ** (1 / 1.7))
    assert calibrate.fit(confidence, truth).temperature == pytest.approx(
        1.7, rel=1e-3
    )  # outcomes are probabilities
    # heights 0, 1, 0, 1 at four places: the middle two pool to one half; two nodes share the last place
    fitted = calibrate.fit(np.array([0.1, 0.3, 0.5, 0.9, 0.9]), np.array([0.0, 1.0, 0.0, 1.0, 1.0]))
    assert fitted.confidence == (0.1, 0.3, 0.5, 0.9) and fitted.acceptance == pytest.approx(
        (0.0, 0.5, 0.5, 1.0)
    )


def test_maps_keep_ranks_and_what_is_impossible() -> None:
    knots = Calibrator(2.0, (0.2, 0.6, 0.8), (0.1, 0.5, 0.9))
    found = knots.map("isotonic")(torch.tensor([0.05, 0.2, 0.4, 0.7, 0.8, 1.0]).log()).exp()
    assert found.tolist() == pytest.approx(
        [0.1, 0.1, 0.3, 0.7, 0.9, 0.9]
    )  # linear between knots, constant outside
    found = knots.map("temperature")(torch.tensor([0.8, 0.5, 1.0]).log()).exp()
    assert found.tolist() == pytest.approx([1 / (1 + (1 / 4) ** 0.5), 0.5, 1.0])  # odds 4 become 2
    log_q = torch.randn(4, 50, generator=torch.Generator().manual_seed(0)).log_softmax(-1)
    log_q[0, 7] = float("-inf")
    for kind in calibrate.KINDS:
        mapped = knots.map(kind)(log_q)
        ranked = mapped.gather(-1, log_q.sort(-1, descending=True).indices)
        assert (ranked[:, 1:] <= ranked[:, :-1] + 1e-6).all() and (mapped <= 0).all()
        assert mapped[0, 7] == float("-inf") and mapped[1:].isfinite().all()
    certain = Calibrator(1.0, (0.1, 0.9), (0.0, 1.0)).map("isotonic")(torch.tensor([0.05]).log())
    assert certain.exp().item() == pytest.approx(FLOOR)  # zero never means impossible


@pytest.mark.parametrize("tree", [WIDE, CHAIN, MEDUSA])
def test_calibrated_trees_are_drafted_from_mapped_confidence_and_write_the_same_text(
    tree: TreeConfig,
) -> None:
    mapping = Calibrator(3.0, (0.0, 0.5, 0.9), (0.05, 0.2, 0.9)).map("isotonic")
    answers, trees = [], []
    for calibrate_by in (unchanged, mapping):
        cycles: list[Cycle] = []
        decoder = decoder_of(make_target(), tree, "medusa" if tree is MEDUSA else "eagle1")
        decoder.proposer = drafting(decoder.proposer.drafter, tree, calibrate_by)  # type: ignore[union-attr]
        settings: dict[str, Any] = {
            "max_new_tokens": 12,
            "do_sample": False,
            "on_cycle": cycles.append,
        }
        answers.append(decoder.generate(QUESTIONS[0][0], **settings).new_ids)
        trees.append(cycles[0].tree)
    plain, mapped = trees
    assert answers[0] == answers[1]
    assert int(plain.tokens[1]) == int(mapped.tokens[1])  # a map keeps a law's ranks
    assert float(mapped.confidence[1]) == pytest.approx(
        float(mapping(plain.confidence[1:2])), abs=1e-5
    )


def test_a_calibrator_is_refused_for_other_weights_and_where_it_is_damaged_or_missing(
    tmp_path: Path,
) -> None:
    save_head(tiny.head(tiny.vocab().embedding), tmp_path)
    with pytest.raises(UserError, match=r"calibrator\.json"):
        load_calibrator(tmp_path)
    whole = asdict(Calibrator(1.5, (0.1, 0.9), (0.2, 0.8), head=digests(tmp_path)))
    wrong = {
        "other weights": {"head": {"model.safetensors": "0"}},
        r"calibrator\.json": {"confidence": [0.9, 0.1]},
    }
    for said, change in wrong.items():
        write_json(tmp_path / "calibrator.json", {**whole, **change})
        with pytest.raises(UserError, match=said):
            load_calibrator(tmp_path)


def test_ranks_count_where_they_were_asked_and_one_is_left_out_only_where_children_are_not_drawn() -> (
    None
):
    nodes = pd.DataFrame({"depth": [1, 1, 1, 1, 2], "place": ["0", "1", "0", "1", "0.1"]})
    nodes["acceptance"] = [1.0, 0.0, 0.5, 0.0, 0.25]
    assert calibrate.rank_accuracy({"nodes": nodes}, levels=2, ranks=3) == [
        [0.75, 0.0, 0.0],
        [0.0, 0.25, 0.0],
    ]
    best = StaticConfig(choices=((0,), (1,), (2,)), children="best")
    unordered = [[0.5, 0.1, 0.3], [0.4, 0.3]]  # the third guess is better than the second
    assert calibrate.rebuilt(best, unordered, nodes=4) == ((0,), (2,), (0, 0))
    drawn = calibrate.rebuilt(replace(best, children="sampled"), unordered, nodes=6)
    assert len(drawn) == 5 and StaticConfig(choices=drawn).paths == drawn


def test_a_rebuilt_tree_is_written_beside_the_head_and_writes_the_same_text(
    command: Command, shared: Path
) -> None:
    given = (
        "--calibrate.method",
        "medusa",
        "--calibrate.tree",
        "{choices: {root}/shallow.yaml}",
        "--overwrite",
    )
    code, out, _ = command("calibrate", *given)
    choices = str(shared / "run" / "heads" / "medusa" / calibrate.CHOICES)
    assert code == 0 and f"--tree.choices {choices}" in out
    rebuilt = ("--method", "medusa", "--tree.choices", choices)
    assert command("generate", *rebuilt)[:2] == command("generate", "--method", "vanilla")[:2]
