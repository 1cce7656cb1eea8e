"""Calibrators: what they fit, what they map, what they leave alone, and when they are refused."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from aerie.configs.errors import UserError
from aerie.configs.read import from_overrides
from aerie.configs.schema.measure import CalibrateConfig
from aerie.infer.decode.calibrator import FLOOR, Calibrator, calibrate_of, load, save, unchanged
from aerie.infer.measure.calibrate import calibrated, fit, fit_and_score, fit_isotonic, fit_temperature, score
from aerie.infer.measure.record import CycleArrays
from aerie.model.storage import digests

KNOTS = Calibrator(2.0, (0.2, 0.6, 0.8), (0.1, 0.5, 0.9))


def arrays(seed: int, count: int = 4000, power: float = 2.0) -> CycleArrays:
    """An overconfident head: nodes of confidence c are accepted with c ** power."""
    generator = np.random.default_rng(seed)
    confidence = generator.random(count)
    acceptance = (generator.random(count) < confidence**power).astype(np.float64)
    prompt, none = generator.integers(0, 40, count), np.zeros(0, dtype=np.int64)
    return CycleArrays(prompt, np.ones(count, np.int64), confidence, confidence, acceptance, none, none, 0.0)


def test_isotonic_is_linear_between_its_knots_and_level_outside() -> None:
    confidence = torch.tensor([0.05, 0.2, 0.4, 0.7, 0.8, 1.0])
    found = KNOTS.map("isotonic")(confidence.log()).exp()
    assert found.tolist() == pytest.approx([0.1, 0.1, 0.3, 0.7, 0.9, 0.9])


def test_temperature_divides_the_log_odds() -> None:
    found = KNOTS.map("temperature")(torch.tensor([0.8, 0.5, 1.0]).log()).exp()
    assert found.tolist() == pytest.approx([1 / (1 + (1 / 4) ** 0.5), 0.5, 1.0])  # odds 4 become 2


@pytest.mark.parametrize("kind", ["temperature", "isotonic"])
def test_no_map_moves_ranks_nor_makes_a_token_possible_that_is_not(kind: str) -> None:
    log_q = torch.randn(4, 50, generator=torch.Generator().manual_seed(0)).log_softmax(-1)
    log_q[0, 7] = float("-inf")
    mapped = KNOTS.map(kind)(log_q)  # type: ignore[arg-type]
    ordered = mapped.gather(-1, log_q.sort(-1, descending=True).indices)
    assert (ordered[:, 1:] <= ordered[:, :-1] + 1e-6).all()
    assert mapped[0, 7] == float("-inf") and (mapped <= 0).all()
    assert mapped[1:].isfinite().all() and not mapped.isnan().any()


def test_an_isotonic_zero_is_no_impossibility() -> None:
    found = Calibrator(1.0, (0.1, 0.9), (0.0, 1.0)).map("isotonic")(torch.tensor([0.05]).log())
    assert found.exp().item() == pytest.approx(FLOOR)


def test_the_isotonic_fit_pools_neighbours_that_fall() -> None:
    # heights 0, 1, 0, 1 at four places: the middle two pool to one half; two nodes share the last place
    places, heights = fit_isotonic(np.array([0.1, 0.3, 0.5, 0.9, 0.9]), np.array([0.0, 1.0, 0.0, 1.0, 1.0]))
    assert places.tolist() == [0.1, 0.3, 0.5, 0.9]
    assert heights.tolist() == pytest.approx([0.0, 0.5, 0.5, 1.0])
    places, heights = fit_isotonic(np.linspace(0, 1, 9), np.ones(9))
    assert places.tolist() == [0.0, 1.0] and heights.tolist() == [1.0, 1.0]


def test_the_temperature_that_made_the_outcomes_is_found() -> None:
    generator = np.random.default_rng(0)
    confidence = generator.uniform(0.02, 0.98, 40_000)
    truth = 1 / (1 + ((1 - confidence) / confidence) ** (1 / 1.7))
    outcomes = (generator.random(40_000) < truth).astype(np.float64)
    assert fit_temperature(confidence, outcomes) == pytest.approx(1.7, rel=0.05)
    assert fit_temperature(confidence, truth) == pytest.approx(1.7, rel=1e-3)  # probabilities as outcomes


def test_a_fit_lowers_the_ece_of_prompts_that_it_has_not_seen() -> None:
    found = fit_and_score(arrays(0), bins=20)
    assert found is not None
    calibrator, scores = found
    before, after = scores["held_out"]["before"], scores["held_out"]["isotonic"]
    assert before["ece"] > 0.12 and after["ece"] < 0.04
    assert after["brier"] < before["brier"] and after["log_loss"] < before["log_loss"]
    assert scores["fit_nodes"] + scores["held_out_nodes"] == 4000
    assert scores["fit_prompts"] + scores["held_out_prompts"] == 40
    assert calibrator.scores["before"] == {key: before[key] for key in ("ece", "brier", "log_loss")}
    json.dumps(scores, allow_nan=False)


def test_the_other_half_decides_nothing_about_the_fit() -> None:
    from aerie.infer.measure.bounds import is_held_out

    one = arrays(0)
    held_out = np.array([is_held_out(int(prompt)) for prompt in one.prompt])
    changed = CycleArrays(**{**vars(one), "acceptance": np.where(held_out, 1.0, one.acceptance)})
    first, second = fit_and_score(one, 20), fit_and_score(changed, 20)
    assert first is not None and second is not None
    assert (first[0].temperature, first[0].acceptance) == (second[0].temperature, second[0].acceptance)


def test_one_prompt_has_no_other_half() -> None:
    one = arrays(0, count=10)
    assert fit_and_score(CycleArrays(**{**vars(one), "prompt": np.zeros(10, np.int64)}), 20) is None


def test_numpy_and_decoding_map_alike_and_scores_of_nothing_are_none() -> None:
    confidence = np.array([0.0, 0.3, 1.0])
    fitted = fit(np.array([0.1, 0.5, 0.9]), np.array([0.0, 0.5, 1.0]))
    assert calibrated(fitted, "isotonic", confidence).tolist() == pytest.approx([0.0, 0.25, 1.0])
    assert score(np.zeros(0), np.zeros(0), 20)["log_loss"] is None


def head_directory(path: Path) -> Path:
    path.mkdir()
    (path / "config.json").write_text("{}")
    (path / "model.safetensors").write_bytes(b"weights")
    return path


def test_it_is_saved_beside_the_head_and_refused_for_other_weights(tmp_path: Path) -> None:
    head = head_directory(tmp_path / "head")
    with pytest.raises(UserError, match="calibrate"):
        load(head)
    before = digests(head)
    save(Calibrator(2.0, KNOTS.confidence, KNOTS.acceptance, head=before), head)
    assert digests(head) == before  # it is no part of the head
    assert load(head).map("isotonic")(torch.tensor([0.4]).log()).exp().item() == pytest.approx(0.3)
    assert calibrate_of(None, tmp_path / "nowhere") is unchanged
    (head / "model.safetensors").write_bytes(b"other weights")
    with pytest.raises(UserError, match="other weights"):
        load(head)


@pytest.mark.parametrize(
    "change", [{"temperature": 0.0}, {"confidence": [0.9, 0.1, 0.5]}, {"acceptance": [0.5]}, {"acceptance": [0, 1, 2]}]
)
def test_a_calibrator_that_is_none_is_refused_in_one_line(tmp_path: Path, change: dict[str, object]) -> None:
    head = head_directory(tmp_path / "head")
    save(Calibrator(2.0, KNOTS.confidence, KNOTS.acceptance, head=digests(head)), head)
    values = json.loads((head / "calibrator.json").read_text())
    (head / "calibrator.json").write_text(json.dumps({**values, **change}))
    with pytest.raises(UserError, match=r"calibrator\.json") as refused:
        load(head)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("key", ["tree.calibrated=isotonic", "bins=0", "temperature=-1", "oracle_levels=0"])
def test_calibrate_refuses_what_it_cannot_measure(key: str) -> None:
    with pytest.raises(UserError, match="calibrate"):
        from_overrides(CalibrateConfig, ["prompts.path=q.jsonl", key], "command line")
