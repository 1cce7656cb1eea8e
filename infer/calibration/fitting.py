"""Fitting a calibrator on half of the prompts, and scoring it on the other half."""

from dataclasses import asdict, replace
from typing import Any

import numpy as np
import torch
from scipy.optimize import minimize_scalar
from scipy.special import log_expit, logit
from sklearn.isotonic import IsotonicRegression

from infer.calibrate import brier, ece, is_held_out, reliability
from infer.calibration.calibrator import FLOOR, Calibrator, Kind
from infer.records import CycleArrays, FloatArray

EDGE = 1e-7  # confidence 0 or 1 in single precision is not certainty
KINDS: tuple[Kind, ...] = ("temperature", "isotonic")


def fit(confidence: FloatArray, acceptance: FloatArray) -> Calibrator:
    """The calibrator of nodes [n] with these acceptances, outcomes or probabilities."""
    places, heights = fit_isotonic(confidence, acceptance)
    return Calibrator(fit_temperature(confidence, acceptance), tuple(map(float, places)), tuple(map(float, heights)))


def fit_temperature(confidence: FloatArray, acceptance: FloatArray) -> float:
    """The T of sigmoid(logit(c) / T) with the smallest expected log loss.

    On the log-odds of one token's confidence, not on the logits of the whole law, which no cycle needs to keep.
    """
    odds = logit(confidence.clip(EDGE, 1.0 - EDGE))

    def loss(log_temperature: float) -> float:
        scaled = odds / np.exp(log_temperature)
        return float(-(acceptance * log_expit(scaled) + (1.0 - acceptance) * log_expit(-scaled)).mean())

    return float(np.exp(minimize_scalar(loss, bounds=(-4.0, 4.0), method="bounded").x))


def fit_isotonic(confidence: FloatArray, acceptance: FloatArray) -> tuple[FloatArray, FloatArray]:
    """The knots of the never falling curve with the least squared error: both ends of each of its level pieces."""
    curve = IsotonicRegression(y_min=0.0, y_max=1.0).fit(confidence, acceptance)
    return curve.X_thresholds_, curve.y_thresholds_


def calibrated(calibrator: Calibrator, kind: Kind, confidence: FloatArray) -> FloatArray:
    """The calibrated confidences [n], as decoding computes them."""
    with np.errstate(divide="ignore"):
        log_q = torch.from_numpy(np.log(confidence)).float()
    return calibrator.map(kind)(log_q).exp().double().numpy()


def score(confidence: FloatArray, acceptance: FloatArray, bins: int) -> dict[str, Any]:
    """ECE, Brier and expected log loss (nats) of confidences against acceptances, with the bins."""
    table = reliability(confidence, acceptance, bins)
    sure = confidence.clip(FLOOR, 1.0 - FLOOR)
    loss = -(acceptance * np.log(sure) + (1.0 - acceptance) * np.log1p(-sure))
    return {
        "ece": ece(table),
        "brier": brier(confidence, acceptance),
        "log_loss": float(loss.mean()) if loss.size else None,
        "bins": [asdict(item) for item in table],
    }


def fit_and_score(arrays: CycleArrays, bins: int, seed: int = 0) -> tuple[Calibrator, dict[str, Any]] | None:
    """A calibrator fitted on one half of the prompts and its scores on the other; null where a half has no nodes.

    Both ways are scored, and the head's own confidence (`before`).
    """
    held_out = np.array([is_held_out(int(prompt), seed) for prompt in arrays.prompt], dtype=bool)  # [n]
    if held_out.all() or not held_out.any():
        return None
    calibrator = fit(arrays.confidence[~held_out], arrays.acceptance[~held_out])
    confidence, acceptance = arrays.confidence[held_out], arrays.acceptance[held_out]
    scores: dict[str, Any] = {
        "temperature": calibrator.temperature,
        "knots": len(calibrator.confidence),
        "fit_nodes": int((~held_out).sum()),
        "fit_prompts": int(np.unique(arrays.prompt[~held_out]).size),
        "held_out_nodes": int(held_out.sum()),
        "held_out_prompts": int(np.unique(arrays.prompt[held_out]).size),
        "held_out": {"before": score(confidence, acceptance, bins)},
    }
    for kind in KINDS:
        scores["held_out"][kind] = score(calibrated(calibrator, kind, confidence), acceptance, bins)
    plain = {
        name: {key: part[key] for key in ("ece", "brier", "log_loss")} for name, part in scores["held_out"].items()
    }
    return replace(calibrator, decoded_at=arrays.temperature, scores=plain), scores
