"""Calibrating a tiny run: the oracle, the calibrator, the trees that go by it, and static trees rebuilt from ranks."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from aerie.configs.errors import UserError
from aerie.configs.schema import decode as schema
from aerie.configs.schema.decode import DynamicConfig, MethodConfig, StaticConfig, TreeConfig
from aerie.configs.schema.measure import CalibrateConfig, PromptsConfig
from aerie.configs.schema.target_and_head import TargetConfig
from aerie.infer.decode.cache import TargetStep
from aerie.infer.decode.calibrator import FLOOR, Calibrator, load, save
from aerie.infer.decode.drafters.eagle import EagleDrafter
from aerie.infer.decode.drafters.lm import DraftLMDrafter
from aerie.infer.decode.drafters.multi_token import MedusaDrafter
from aerie.infer.decode.engine import SpeculativeDecoder, make_decoder
from aerie.infer.decode.methods import Drafters, drafting
from aerie.infer.decode.sampling import Decoding, Sampler
from aerie.infer.decode.shape import Cycle, Drafter
from aerie.infer.decode.tree import Proposal, Tree, ancestors
from aerie.infer.decode.verify import Verdict
from aerie.infer.measure import calibrate
from aerie.infer.measure.lossless import VOCABULARY, write_miniature
from aerie.model.storage import digests
from aerie.model.target import Target
from tests import tiny
from tests.infer.calibration.made_up import recording
from tests.infer.test_engine import greedy
from tests.infer.test_main import recipe, refused, run

__all__ = ["recipe"]
WIDE = DynamicConfig(levels=3, k=4, nodes=8)
CHAIN = schema.ChainConfig(levels=2)
MEDUSA = StaticConfig(choices=((0,), (1,), (0, 0)), children="best")
QUESTIONS = [(torch.tensor([[7, 9, 11, 23, 5]]), "count"), (torch.tensor([[8, 30, 12]]), "sort")]
SECTION = CalibrateConfig(PromptsConfig("none", max_new_tokens=14), ranks=6)
KNOTS = Calibrator(2.0, (0.2, 0.6, 0.8), (0.1, 0.5, 0.9))


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(tiny.llama(eos_token_id=None), TargetConfig(path="tiny"))


def decoder_of(target: Target, tree: TreeConfig, kind: str = "eagle1", **more: Any) -> SpeculativeDecoder:
    drafter: Drafter
    if kind == "itself":
        drafter = DraftLMDrafter(target, target)
    elif kind == "medusa":
        drafter = MedusaDrafter(tiny.multi_token_head("medusa", target.vocab, noise=0.3, num_heads=2).eval())
    else:
        make: Any = tiny.head if kind == "eagle1" else tiny.eagle3_head
        drafter = EagleDrafter(make(target.vocab.embedding.float(), scale=8.0).eval(), target)
    return SpeculativeDecoder(target, drafting(drafter, tree, **more))


def recorded(target: Target, tree: TreeConfig, kind: str = "eagle1", **settings: Any) -> calibrate.Recording:
    return calibrate.record(decoder_of(target, tree, kind), tree, QUESTIONS, replace(SECTION, **settings), seed=3)


@pytest.mark.parametrize(("tree", "kind"), [(WIDE, "eagle1"), (CHAIN, "eagle3"), (CHAIN, "itself"), (MEDUSA, "medusa")])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_an_oracle_changes_nothing_else_and_every_kind_of_draft_has_an_analysis(
    target: Target, tree: TreeConfig, kind: str, temperature: float
) -> None:
    plain = recorded(target, tree, kind, temperature=temperature)
    deep = recorded(target, tree, kind, temperature=temperature, oracle_levels=5)
    cycles = deep.tables["cycles"]
    for name, table in plain.tables.items():
        pd.testing.assert_frame_equal(table, deep.tables[name][list(table.columns)])
    drafted = cycles.dropna(subset="oracle")
    assert len(drafted) == (cycles.levels > 0).sum() > 0 and "oracle" not in plain.tables["cycles"]
    assert drafted.oracle.between(drafted.accepted, drafted.cap).all() and (drafted.cap >= drafted.levels).all()
    assert set(cycles.position - cycles.answered) == {4, 2}
    if kind == "itself":  # the target that drafts for itself is always right
        assert (drafted.oracle == drafted.cap).all() and drafted.cap.max() == 5
        laws = deep.tables["laws"]
        assert laws.tvd.max() < 1e-5 and laws.agrees.all() and laws.accepted.all()
    value = json.loads(json.dumps(calibrate.analyse(deep, str), allow_nan=False))
    assert value["prompts"] == 2 and [row["task"] for row in value["by_task"]] == ["count", "sort"]
    assert value["laws"]["inequalities"]["gap_above_tv"] == 0.0
    assert sum(row["nodes"] for row in value["by_task"]) == len(deep.tables["nodes"])


P, Q = torch.tensor([0.5, 0.3, 0.2, 0.0]), torch.tensor([0.2, 0.6, 0.1, 0.1])


def chain(tokens: list[int], drawn: bool = False) -> Tree:
    count = len(tokens) + 1
    line, zero = torch.arange(count), torch.zeros(count)
    parents, proposal = (line - 1).clamp(min=0), Proposal("R1", Q.expand(count, -1)) if drawn else None
    mask = ancestors(parents, count - 1)
    return Tree(torch.tensor([0, *tokens]), parents, line, mask, zero, zero, count - 1, count - 1, proposal)


@pytest.mark.parametrize(
    ("rule", "policy", "verdict", "deep", "shares"),
    [
        # R1, wholly accepted: token 1 is taken with .3 / .6, twice; token 2 always
        ("R1", [0], Verdict([0, 1], [0], 3), [0, 1, 1, 2], [0.0, 0.5, 0.25, 0.0, 0.25]),
        ("R1", [0, 1], Verdict([0, 1], [0], 3), [0, 1, 1, 2], [0.0, 1.0]),  # refused: its own length
        ("R1", [2], Verdict([0, 1], [2], 3), [0, 1, 1, 2], [0.0, 1.0]),  # another chain is not followed
        # R2: the bonus token is the deep chain's second, the rest is drawn
        ("R2", [0], Verdict([0, 1], [0], 1), [0, 1, 0, 0], [0.0, 0.0, 0.5, 0.25, 0.25]),
        ("R2", [0], Verdict([0, 1], [0], 2), [0, 1, 0, 0], [0.0, 1.0]),
        ("R0", [0], Verdict([0, 1], [0], 0), [0, 0, 0, 1], [0.0, 0.0, 0.0, 1.0]),  # argmax
        ("R0", [0], Verdict([0, 1], [0], 0), [1, 0], [0.0, 1.0]),  # reranking dropped the policy's path
    ],
)
def test_an_oracle_length_has_the_law_that_the_targets_own_choices_give_it(
    rule: str, policy: list[int], verdict: Verdict, deep: list[int], shares: list[float]
) -> None:
    trials, tree, longer = 1200, chain(policy, rule == "R1"), chain(deep, rule == "R1")
    sampler = Sampler(Decoding(rule != "R0", float(rule != "R0"), 0, 1.0, 0.0, 8), torch.Generator().manual_seed(0))
    logits, generator = P.log().expand(len(longer), -1), torch.Generator().manual_seed(0)
    cycle = Cycle(tree, TargetStep(logits, logits, None), verdict, sampler, rule)
    lengths = [calibrate.oracle_length(cycle, longer, logits, generator) for _ in range(trials)]
    found = np.bincount(lengths, minlength=len(shares)) / trials
    assert found.tolist() == pytest.approx([*shares, *[0.0] * (len(found) - len(shares))], abs=0.045)


# The calibrator


def test_a_fit_lowers_the_ece_of_prompts_that_it_has_not_seen() -> None:
    """Nodes of 40 prompts: those of confidence c are accepted with c ** 2."""
    generator = np.random.default_rng(0)
    confidence, uniform = generator.random(4000), generator.random(4000)
    accepted = (uniform < confidence**2).astype(np.float64)
    nodes = pd.DataFrame({"prompt": np.arange(4000) % 40, "confidence": confidence, "acceptance": accepted})
    found = calibrate.fit_and_score(recording(nodes=nodes), bins=20)
    assert found is not None
    before, after = found[1]["held_out"]["before"], found[1]["held_out"]["isotonic"]
    assert before["ece"] > 0.12 and after["ece"] < 0.06
    assert after["brier"] < before["brier"] and after["log_loss"] < before["log_loss"]
    assert found[1]["fit_nodes"] + found[1]["held_out_nodes"] == 4000
    assert found[0].scores["before"] == {key: before[key] for key in ("ece", "brier", "log_loss")}
    alone = calibrate.fit_and_score(recording(nodes=nodes.assign(prompt=0)), bins=20)
    assert alone is None  # one prompt has no other half


def test_the_fits_are_those_of_isotonic_and_logistic_regression() -> None:
    generator = np.random.default_rng(0)
    confidence = generator.uniform(0.02, 0.98, 40_000)
    truth = 1 / (1 + ((1 - confidence) / confidence) ** (1 / 1.7))
    assert calibrate.fit(confidence, truth).temperature == pytest.approx(1.7, rel=1e-3)  # probabilities as outcomes
    # heights 0, 1, 0, 1 at four places: the middle two pool to one half; two nodes share the last place
    fitted = calibrate.fit(np.array([0.1, 0.3, 0.5, 0.9, 0.9]), np.array([0.0, 1.0, 0.0, 1.0, 1.0]))
    assert fitted.confidence == (0.1, 0.3, 0.5, 0.9) and fitted.acceptance == pytest.approx((0.0, 0.5, 0.5, 1.0))


def test_maps_keep_ranks_and_what_is_impossible() -> None:
    found = KNOTS.map("isotonic")(torch.tensor([0.05, 0.2, 0.4, 0.7, 0.8, 1.0]).log()).exp()
    assert found.tolist() == pytest.approx([0.1, 0.1, 0.3, 0.7, 0.9, 0.9])  # linear between knots, level outside
    found = KNOTS.map("temperature")(torch.tensor([0.8, 0.5, 1.0]).log()).exp()
    assert found.tolist() == pytest.approx([1 / (1 + (1 / 4) ** 0.5), 0.5, 1.0])  # odds 4 become 2
    log_q = torch.randn(4, 50, generator=torch.Generator().manual_seed(0)).log_softmax(-1)
    log_q[0, 7] = float("-inf")
    for kind in ("temperature", "isotonic"):
        mapped = KNOTS.map(kind)(log_q)  # type: ignore[arg-type]
        ranked = mapped.gather(-1, log_q.sort(-1, descending=True).indices)
        assert (ranked[:, 1:] <= ranked[:, :-1] + 1e-6).all() and (mapped <= 0).all()
        assert mapped[0, 7] == float("-inf") and mapped[1:].isfinite().all()
    certain = Calibrator(1.0, (0.1, 0.9), (0.0, 1.0)).map("isotonic")(torch.tensor([0.05]).log())
    assert certain.exp().item() == pytest.approx(FLOOR)  # a zero is no impossibility


def test_it_is_saved_beside_the_head_and_refused_where_it_is_damaged(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    before = digests(tmp_path)
    save(replace(KNOTS, head=before), tmp_path)
    assert digests(tmp_path) == before and load(tmp_path).acceptance == KNOTS.acceptance  # it is no part of the head
    values = json.loads((tmp_path / "calibrator.json").read_text())
    for change in ({"temperature": 0.0}, {"confidence": [0.9, 0.1, 0.5]}, {"acceptance": [0.5]}):
        (tmp_path / "calibrator.json").write_text(json.dumps({**values, **change}))
        with pytest.raises(UserError, match=r"calibrator\.json"):
            load(tmp_path)


@pytest.mark.parametrize("kind", ["temperature", "isotonic"])
@pytest.mark.parametrize("tree", [WIDE, CHAIN, MEDUSA, replace(WIDE, rank="confidence")])
def test_calibrated_trees_are_drafted_from_mapped_confidence_and_write_the_same_text(
    target: Target, kind: Any, tree: TreeConfig
) -> None:
    calibrate = Calibrator(3.0, (0.0, 0.5, 0.9), (0.05, 0.2, 0.9)).map(kind)
    answers, trees = [], []
    for more in ({}, {"calibrate": calibrate}):
        cycles: list[Cycle] = []
        decoder = decoder_of(target, tree, "medusa" if tree is MEDUSA else "eagle1", **more)
        settings: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "on_cycle": cycles.append}
        answers.append(decoder.generate(QUESTIONS[0][0], **settings).new_ids)
        trees.append(cycles[0].tree)
    plain, mapped = trees
    assert answers[0] == answers[1]
    assert int(plain.tokens[1]) == int(mapped.tokens[1])  # no map moves a law's ranks
    assert float(mapped.confidence[1]) == pytest.approx(float(calibrate(plain.confidence[1:2])), abs=1e-5)


@pytest.mark.slow
def test_a_calibrator_is_fitted_used_and_refused_for_other_weights(recipe: Path, tmp_path: Path) -> None:
    head, config = tmp_path / "run" / "heads" / "eagle1", ("--config", str(recipe))
    rows = '[{"method": "vanilla"}, {"method": "eagle2", "tree": {"calibrated": "isotonic"}}]'
    bench = ("bench", *config, "--bench.rows", rows, "--bench.sampling", '[{"temperature": 0}]')
    assert "calibrator.json" in refused(*bench)
    out = run("calibrate", *config, "--calibrate.oracle_levels", "4")
    assert "not fitted on" in out and (head / "calibrator.json").is_file()
    calibration = tmp_path / "run" / "calibration"
    analysis = json.loads((calibration / "analysis.json").read_text())
    assert analysis["oracle"]["all"]["cycles"] > 0 and analysis["laws"]["inequalities"]["tv_above_bound"] == 0.0
    assert analysis["cycles"] == len(pd.read_parquet(calibration / "cycles.parquet"))
    run(*bench, "--bench.reference", "false")
    lines = (tmp_path / "run" / "bench" / "records.jsonl").read_text().splitlines()
    drafted = [row for row in map(json.loads, lines) if row["method"] == "eagle2"]
    assert drafted and all(row["identical"] for row in drafted)
    values = json.loads((head / "calibrator.json").read_text())
    (head / "calibrator.json").write_text(json.dumps({**values, "head": {"model.safetensors": "0"}}))
    assert "other weights" in refused(*bench, "--overwrite")


# A static tree, rebuilt

UNORDERED = [[0.5, 0.1, 0.3], [0.4, 0.3]]  # the third guess is better than the second


def test_ranks_count_where_they_were_asked() -> None:
    nodes = pd.DataFrame({"depth": [1, 1, 1, 1, 2], "place": ["0", "1", "0", "1", "0.1"]})
    nodes["acceptance"] = [1.0, 0.0, 0.5, 0.0, 0.25]
    assert calibrate.rank_accuracy({"nodes": nodes}, levels=2, ranks=3) == [[0.75, 0.0, 0.0], [0.0, 0.25, 0.0]]


def test_a_rank_is_left_out_only_where_children_are_not_drawn() -> None:
    best = StaticConfig(choices=((0,), (1,), (2,)), children="best")
    assert calibrate.rebuilt(best, UNORDERED, nodes=4) == ((0,), (2,), (0, 0))
    drawn = calibrate.rebuilt(replace(best, children="sampled"), UNORDERED, nodes=6)
    assert len(drawn) == 5 and StaticConfig(choices=drawn).paths == drawn


@pytest.mark.parametrize(("method", "kind"), [("hydra", "hydra"), ("eagle", "eagle3")])
def test_the_file_beside_the_head_is_a_tree_of_the_same_size_that_decodes_losslessly(
    method: Any, kind: str, tmp_path: Path
) -> None:
    target = Target.load(write_miniature(tmp_path / "miniature"))
    head, asked = str(tmp_path / "miniature" / "heads" / kind), MethodConfig(method)
    generator = torch.Generator().manual_seed(1)
    prompts = [(torch.randint(0, VOCABULARY, (1, 4 + n), generator=generator), "made up") for n in range(4)]
    line = calibrate.rebuild(target, asked, head, prompts, SECTION, tmp_path)
    assert line is not None and f"--tree.choices {head}/{calibrate.CHOICES}" in line
    assert (Path(head) / calibrate.CHOICES).read_bytes() == (tmp_path / calibrate.CHOICES).read_bytes()
    changed = MethodConfig.of(method, choices=str(Path(head) / calibrate.CHOICES))
    before, after = asked.tree, changed.tree
    assert before is not None and after is not None and after.nodes <= before.nodes
    written = make_decoder(Drafters(target), changed, head).generate(prompts[-1][0], do_sample=False, max_new_tokens=20)
    assert written.sequences.tolist() == greedy(target, prompts[-1][0], 20)
