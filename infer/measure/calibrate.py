"""Every table of the calibration from what was recorded: the content of analysis.json."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import minimize_scalar
from scipy.special import log_expit, logit
from sklearn.isotonic import IsotonicRegression
from torch import Tensor

from aerie.configs.errors import UserError, warn
from aerie.configs.schema.decode import TreeConfig
from aerie.infer.decode.calibrator import FLOOR, Calibrator, Kind, save
from aerie.infer.decode.engine import SpeculativeDecoder
from aerie.infer.decode.proposer import Cycle
from aerie.infer.measure.bounds import (
    PAPER_C,
    FrontierArrays,
    FrontierRecorder,
    LawArrays,
    LawRecorder,
    LevelArrays,
    PositionArrays,
    PositionRecorder,
    bounds,
    branch_reliability,
    brier,
    by_position,
    deagle_bound,
    divergence_before_rejection,
    ece,
    entropy_by_outcome,
    is_held_out,
    level_reliability,
    ratio_distribution,
    reliability,
    shares_by_c,
    sorted_laws,
    summarise,
    token_inequalities,
    token_table,
)
from aerie.infer.measure.cycles import NodeCollector, watched
from aerie.infer.measure.oracle import OracleArrays, OracleRecorder, summarise_oracle, with_oracle
from aerie.infer.measure.record import CycleArrays, FloatArray, write_cycles
from aerie.model.storage import CALIBRATOR, digests, write_atomically, write_json

FILE = "analysis.json"
SCHEMA = 1


def analyse(recording: Recording, name: Callable[[int], str], bins: int = 20) -> dict[str, Any]:
    """The tables, JSON-ready; name gives a token id's text. A part is null where nothing was recorded for it."""
    nodes, laws = recording.nodes, recording.laws
    task_of = np.array(recording.tasks, dtype=np.str_)[nodes.prompt] if nodes.prompt.size else np.zeros(0, np.str_)
    depths = sorted({int(depth) for depth in nodes.depth})
    tasks = list(dict.fromkeys(recording.tasks))
    return {
        "schema": SCHEMA,
        "temperature": nodes.temperature,
        "prompts": len(recording.tasks),
        "cycles": int(nodes.accepted_length.size),
        "by_depth": [{"depth": depth, **_curve(nodes, nodes.depth == depth, bins)} for depth in depths],
        "by_task": [{"task": task, **_curve(nodes, task_of == task, bins)} for task in tasks],
        "positions": by_position(recording.positions),
        "branches": None if recording.frontier is None else branch_reliability(recording.frontier, bins),
        "levels": None if recording.levels is None else level_reliability(recording.levels, bins),
        "laws": None if laws is None or not laws.tvd.size else analyse_laws(laws, recording.tasks, name, bins),
        "oracle": None if recording.oracle is None else summarise_oracle(recording.oracle),
    }


def analyse_laws(laws: LawArrays, tasks: tuple[str, ...], name: Callable[[int], str], bins: int) -> dict[str, Any]:
    """What is said of laws alone: DEAGLE's inequalities, SVIP's bounds, and rejected tokens."""
    return {
        "inequalities": token_inequalities(laws),
        "deagle": deagle_bound(laws, bins),
        "bounds": [bounds(laws, c) for c in PAPER_C],
        "ratio": ratio_distribution(laws),
        "by_c": shares_by_c(laws),
        "entropy": entropy_by_outcome(laws, tasks),
        "before_rejection": divergence_before_rejection(laws),
        "sorted": sorted_laws(laws),
        "tokens": token_table(laws, name),
    }


def _curve(nodes: CycleArrays, here: NDArray[np.bool_], bins: int) -> dict[str, Any]:
    """Bins, ECE and Brier of some nodes (EAGLE-2, figure 6)."""
    confidence, acceptance = nodes.confidence[here], nodes.acceptance[here]
    table = reliability(confidence, acceptance, bins)
    return {
        "nodes": int(confidence.size),
        "confidence": float(confidence.mean()) if confidence.size else None,
        "acceptance": float(acceptance.mean()) if acceptance.size else None,
        "ece": ece(table),
        "brier": brier(confidence, acceptance),
        "bins": [asdict(item) for item in table],
    }


def write_calibration(
    output: Path, recording: Recording, bins: int, head: str | None, name: Callable[[int], str]
) -> list[str]:
    """Writes cycles.npz, recorded.npz, calibration.json and analysis.json, and calibrator.json also beside the head.

    The lines tell what was found. name gives a token id's text.
    """
    nodes = recording.nodes
    write_cycles(output / "cycles.npz", nodes)
    recording.write(output)
    summary = summarise(nodes, bins)
    fitted = fit_and_score(nodes, bins)
    tables = analyse(recording, name, bins)
    tables["calibrator"] = None if fitted is None else fitted[1]
    write_json(output / "calibration.json", summary)
    write_json(output / FILE, tables)
    lines = [
        f"calibrate: {len(nodes.prompt):,} drafted nodes of {len(nodes.accepted_length):,} cycles"
        + (f"; ECE {summary['ece']:.4f}, Brier {summary['brier']:.4f}" if len(nodes.prompt) else "")
    ]
    if fitted is None:
        return [*lines, "calibrate: no calibrator: one half of the prompts drafted nothing"]
    lines.append(calibrator_text(fitted[1]))
    lines += _save(fitted[0], output, head)
    return lines


def calibrator_text(scores: dict[str, Any]) -> str:
    """One line: ECE on the held-out half before and after."""
    held_out = scores["held_out"]
    return (
        f"calibrate: on {scores['held_out_prompts']} prompts that the calibrator was not fitted on: ECE "
        f"{held_out['before']['ece']:.4f} before, {held_out['temperature']['ece']:.4f} by temperature "
        f"{scores['temperature']:.3f}, {held_out['isotonic']['ece']:.4f} isotonic"
    )


def _save(calibrator: Calibrator, output: Path, head: str | None) -> list[str]:
    if head is None:
        save(calibrator, output)
        return []
    place = Path(head)
    if not place.is_dir():
        save(calibrator, output)
        return [f"calibrate: {head} is no directory, so the calibrator stays in {output}"]
    calibrator = replace(calibrator, head=digests(place))
    save(calibrator, output)
    try:
        save(calibrator, place)
    except OSError as error:
        warn(f"{place}: {CALIBRATOR} cannot be written ({error.strerror or error}); it stays in {output}")
        return []
    return [f"calibrate: {place / CALIBRATOR}: decode by it with --tree.calibrated temperature or isotonic"]


T = TypeVar("T")


def write_arrays(path: Path, groups: Mapping[str, Any]) -> None:
    """Writes dataclasses of arrays atomically, each field as GROUP.FIELD."""
    values = {
        f"{name}.{field.name}": getattr(group, field.name) for name, group in groups.items() for field in fields(group)
    }

    def write(temporary: Path) -> None:
        with temporary.open("wb") as handle:  # a path without .npz would get the suffix appended
            np.savez_compressed(handle, **values)

    write_atomically(path, write)


def read_arrays(path: Path, group: str, kind: type[T]) -> T:
    """The dataclass of arrays that was written under this name; UserError when the file does not hold it."""
    fix = "collect it again with: python infer/main.py calibrate"
    try:
        with np.load(path, allow_pickle=False) as file:
            names = {field.name: f"{group}.{field.name}" for field in fields(kind)}  # type: ignore[arg-type]
            missing = sorted(set(names.values()) - set(file.files))
            if missing:
                raise UserError(f"{path}: missing {', '.join(missing)}; {fix}")
            return kind(**{field: file[name] for field, name in names.items()})
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}; {fix}") from error
    except (ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise UserError(f"{path}: not an npz file of arrays ({error}); {fix}") from error


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


ARRAYS = "recorded.npz"
Watcher = Callable[[Cycle], None]


@dataclass(frozen=True)
class Settings:
    """How the held-out prompts are decoded."""

    max_new_tokens: int
    temperature: float = 0.0
    oracle_levels: int | None = None
    seed: int = 0


@dataclass(frozen=True)
class Recording:
    """What was seen; laws, frontier and levels are null for what drafts without laws, oracle where it was not asked."""

    nodes: CycleArrays
    tasks: tuple[str, ...]  # of the prompts, by their number
    positions: PositionArrays
    laws: LawArrays | None
    frontier: FrontierArrays | None
    levels: LevelArrays | None
    oracle: OracleArrays | None

    def write(self, directory: Path) -> None:
        """Writes recorded.npz; the nodes have a file of their own (infer/records.py)."""
        groups: dict[str, Any] = {
            name: getattr(self, name) for name in ("positions", "laws", "frontier", "levels", "oracle")
        }
        write_arrays(directory / ARRAYS, {name: group for name, group in groups.items() if group is not None})


def record(
    decoder: SpeculativeDecoder,
    tree: TreeConfig | None,
    questions: Iterable[tuple[Tensor, str]],
    settings: Settings,
    watchers: Sequence[Watcher] = (),
) -> Recording:
    """Decodes prompts [1, T], each with its task, and returns what the recorders saw; watchers see every cycle too.

    tree: the decoder's own, null where it grows none. Sampling has neither top_k nor top_p.
    """
    nodes, positions = NodeCollector(), PositionRecorder()
    tasks: list[str] = []
    with ExitStack() as stack:
        growth = stack.enter_context(watched(decoder))
        laws = None if growth is None else LawRecorder(growth)
        frontier = None if growth is None else FrontierRecorder(growth)
        levels = settings.oracle_levels
        proposer = None if levels is None else stack.enter_context(with_oracle(decoder, tree, levels))
        oracle = None if proposer is None else OracleRecorder(proposer, settings.seed)
        all_watchers = [each for each in (nodes, positions, laws, frontier, oracle, *watchers) if each is not None]

        def on_cycle(cycle: Cycle) -> None:
            for watcher in all_watchers:
                watcher(cycle)

        for number, (ids, task) in enumerate(questions):
            tasks.append(task)
            nodes.prompt = positions.prompt = number
            for recorder in (laws, frontier):
                if recorder is not None:
                    recorder.start(number)
            if oracle is not None:
                oracle.start(number, ids.shape[1])
            done = decoder.generate(ids, on_cycle=on_cycle, **_sampling(settings, number, ids.device))
            if frontier is not None:
                frontier.finish(done.sequences[0].tolist())
    return Recording(
        nodes=nodes.arrays(),
        tasks=tuple(tasks),
        positions=positions.arrays(),
        laws=None if laws is None else laws.arrays(),
        frontier=None if frontier is None else frontier.nodes(),
        levels=None if frontier is None else frontier.levels(),
        oracle=None if oracle is None else oracle.arrays(),
    )


def _sampling(settings: Settings, prompt: int, device: torch.device) -> dict[str, Any]:
    if settings.temperature == 0:
        return {"max_new_tokens": settings.max_new_tokens, "do_sample": False}
    return {
        "max_new_tokens": settings.max_new_tokens,
        "do_sample": True,
        "temperature": settings.temperature,
        "top_k": 0,
        "top_p": 1.0,
        "generator": torch.Generator(device).manual_seed(settings.seed * 1_000_003 + prompt),
    }
