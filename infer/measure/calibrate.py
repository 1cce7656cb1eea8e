"""Measures how a head's confidence predicts acceptance; fits a calibrator and a static tree."""

import hashlib
import heapq
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import accumulate, product
from pathlib import Path
from typing import Any, NamedTuple, cast, get_args

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from scipy.optimize import minimize_scalar
from scipy.special import log_expit, logit
from sklearn.isotonic import IsotonicRegression
from torch import Tensor

from aerie.configs.errors import rank
from aerie.configs.schema.decode import Choice, Fit, MethodConfig, StaticConfig, TreeConfig
from aerie.configs.schema.measure import CalibrateConfig
from aerie.infer.decode.calibrator import FLOOR, Calibrator
from aerie.infer.decode.engine import SpeculativeDecoder, make_decoder
from aerie.infer.decode.find_head import kind_at
from aerie.infer.decode.loaded_heads import LoadedHeads
from aerie.infer.decode.roles import TreeProposer
from aerie.infer.decode.tree import Tree
from aerie.infer.measure.recorder import COLUMNS, CycleRecord, Recorder, Tables, tables_of
from aerie.infer.measure.shares import share_out
from aerie.infer.measure.statistics import FloatArray
from aerie.infer.measure.tasks import encode_turn, load_prompts
from aerie.model.storage import (
    CALIBRATOR,
    CHOICES,
    digests,
    write_atomically,
    write_json,
    write_text,
)
from aerie.model.target import Target

EDGE = 1e-7  # a confidence is kept this far from 0 and 1, where its logit is infinite
FITS: tuple[Fit, ...] = get_args(Fit)
SPLIT = 0  # the seed that splits the prompts into halves
# The probe tree gives a node all its children if the ranks on its path sum to at most this.
REACH = 2


class Question(NamedTuple):
    ids: Tensor  # [1, T]
    task: str


class Observer:
    """Adds measurements to a calibration; this one adds none. infer/papers/analysis.py has one."""

    def attach(self, decoder: SpeculativeDecoder, tree: TreeConfig) -> None:
        """Is called before the first prompt, and may replace the decoder's proposer."""

    def law_columns(self, tree: Tree, nodes: Sequence[int]) -> CycleRecord:
        """Returns more columns for the table `law`, with a value for each of these nodes."""
        return {}

    def complete(self, tables: Tables) -> None:
        """Is called after each prompt, and may add columns to the prompt's tables."""


@dataclass(frozen=True)
class RecordedCycles:
    """The recorded cycles of some prompts."""

    tables: Tables
    tasks: Sequence[str]  # one a prompt
    temperature: float


def run_calibration(
    method: MethodConfig,
    section: CalibrateConfig,
    output: Path,
    seed: int,
    observer: Observer,
    target: Target,
    tokenizer: Any,
) -> dict[str, Any]:
    """Writes the calibration's files (for a static tree also choices.yaml); returns its facts."""
    questions = [
        Question(encode_turn(prompt, (), tokenizer, target), prompt.task)
        for prompt in load_prompts(section.prompts)
    ]
    decoder = make_decoder(LoadedHeads(target), method, method.head)
    observer.attach(decoder, cast(TreeConfig, method.tree))
    recorded = record_cycles(decoder, questions, section, seed, observer)
    probed = None
    if isinstance(method.tree, StaticConfig):
        probed = record_ranks(method, questions, section, target)
    if rank() > 0:
        return {}
    print(*write_calibration(output, recorded, section.bins, method.head, method.method), sep="\n")
    if probed is not None:
        write_choices(output, method, probed, section)
    return {name: len(recorded.tables[name]) for name in ("nodes", "cycles")}


def record_cycles(
    decoder: SpeculativeDecoder,
    questions: Sequence[Question],
    section: CalibrateConfig,
    seed: int,
    observer: Observer,
) -> RecordedCycles:
    # every method with a head has a TreeProposer
    cast(TreeProposer, decoder.proposer).shape.keeps_pool = True
    decoder.runners.mode = "eager"  # an observer must see every forward, and speed does not count
    settings: dict[str, Any] = {"temperature": section.temperature, "top_k": 0, "top_p": 1.0}
    context = min(decoder.limits.values())

    def record(number: int) -> Tables:
        ids = questions[number].ids  # [1, T]
        # The target writes a first token even if the prompt fills the context.
        room = max(1, context - ids.shape[1])
        settings["max_new_tokens"] = min(section.prompts.max_new_tokens, room)
        # The large factor keeps the streams of different seeds apart.
        generator = torch.Generator(ids.device).manual_seed(seed * 1_000_003 + number)
        recorder = Recorder(observer.law_columns)
        generation = decoder.generate(ids, on_cycle=recorder, generator=generator, **settings)
        tables = tables_of(number, recorder.records, generation.sequences[0].tolist())
        observer.complete(tables)
        return tables

    answers = share_out(record, range(len(questions)), "prompts", "calibrate")
    tables = {}
    for name in COLUMNS:
        tables[name] = pd.concat([answer[name] for answer in answers], ignore_index=True)
    return RecordedCycles(tables, [question.task for question in questions], section.temperature)


def write_calibration(
    output: Path,
    recorded: RecordedCycles,
    bins: int,
    head: str | None,
    method: str | None,
) -> list[str]:
    """Writes all files but choices.yaml; returns lines for the user.

    It also writes the calibrator beside the head.
    """
    for name, table in recorded.tables.items():
        write_atomically(output / f"{name}.parquet", partial(table.to_parquet, index=False))
    summary = summarise(recorded, bins)
    write_json(output / "calibration.json", summary)
    scored = fit_and_score(recorded, bins)
    analysis = {
        **analyse(recorded, bins),
        "head": head and kind_at(head),
        "method": method,
        "calibrator": scored and scored.facts,
    }
    write_json(output / "analysis.json", analysis)
    line = f"calibrate: {summary['nodes']:,} drafted nodes of {summary['cycles']:,} cycles"
    if summary["nodes"]:
        line += f"; ECE {summary['ece']:.4f}, Brier {summary['brier']:.4f}"
    if scored is None:
        return [line, "calibrate: no calibrator, because one half of the prompts has no drafts"]
    write_calibrator(output, scored.calibrator, head)
    return [line, advice(scored)]


def write_calibrator(output: Path, calibrator: Calibrator, head: str | None) -> None:
    directories = output_directories(output, head)
    if len(directories) > 1:
        # Readers refuse the calibrator if the head's weights change.
        calibrator = replace(calibrator, head=digests(directories[1]))
    for directory in directories:
        write_json(directory / CALIBRATOR, asdict(calibrator))


def output_directories(output: Path, head: str | None) -> list[Path]:
    """The output directory and, unless the head is a Hub id, the head's directory."""
    if head is None or not Path(head).is_dir():
        return [output]
    return [output, Path(head)]


def mean_of(values: Any) -> float | None:
    return float(values.mean()) if len(values) else None


# --- summaries ---


def reliability(nodes: pd.DataFrame, bins: int = 20) -> dict[str, Any]:
    """ECE, Brier score and bins of equal width (EAGLE-2, section 3.2).

    A node with confidence c, accepted with probability a, has the expected squared error
    c^2 - 2ca + a.
    """
    confidence = nodes.confidence.to_numpy()
    acceptance = nodes.acceptance.to_numpy()
    # The tolerance puts a float32 such as 0.15, which may be 0.1499999, above its edge.
    index = np.clip(np.floor(confidence * bins + 1e-6).astype(np.int64), 0, bins - 1)
    counts = np.bincount(index, minlength=bins)
    confidences = np.bincount(index, weights=confidence, minlength=bins)  # sums by bin
    acceptances = np.bincount(index, weights=acceptance, minlength=bins)
    table = []
    for number, count in enumerate(counts.tolist()):
        table.append(
            {
                "low": round(number / bins, 9),
                "high": round((number + 1) / bins, 9),
                "count": count,
                "confidence": float(confidences[number] / count) if count else None,
                "acceptance": float(acceptances[number] / count) if count else None,
            }
        )
    ece = float(abs(confidences - acceptances).sum() / len(nodes)) if len(nodes) else None
    brier = mean_of(confidence**2 - 2.0 * confidence * acceptance + acceptance)
    return {"nodes": len(nodes), "ece": ece, "brier": brier, "bins": table}


def summarise(recorded: RecordedCycles, bins: int = 20) -> dict[str, Any]:
    """The facts of calibration.json.

    At depth d `survived` is P(accepted >= d), and `conditional` is
    P(accepted >= d | accepted >= d - 1).
    """
    nodes = recorded.tables["nodes"]
    cycles = recorded.tables["cycles"]
    by_depth = []
    reached = len(cycles)  # cycles that accepted at least depth - 1 tokens
    for depth in range(1, int(max([0, *nodes.depth, *cycles.accepted])) + 1):
        level = nodes[nodes.depth == depth]
        survived = int((cycles.accepted >= depth).sum())
        by_depth.append(
            {
                "depth": depth,
                "nodes": len(level),
                "confidence": mean_of(level.confidence),
                "acceptance": mean_of(level.acceptance),
                "cycles": reached,
                "survived": survived / len(cycles) if len(cycles) else None,
                "conditional": survived / reached if reached else None,
            }
        )
        reached = survived
    return {
        "temperature": recorded.temperature,
        "prompts": nodes.prompt.nunique(),
        **reliability(nodes, bins),
        "cycles": len(cycles),
        "by_depth": by_depth,
    }


def analyse(recorded: RecordedCycles, bins: int = 20) -> dict[str, Any]:
    """The facts of analysis.json without `head`, `method` and `calibrator`.

    `by_depth` and `by_task` hold curves like those of EAGLE-2's figure 6.
    """
    nodes = recorded.tables["nodes"]
    task_of = nodes.prompt.map(dict(enumerate(recorded.tasks)))
    return {
        "temperature": recorded.temperature,
        "prompts": len(recorded.tasks),
        "cycles": len(recorded.tables["cycles"]),
        "by_depth": [
            {"depth": depth, **_curve(nodes[nodes.depth == depth], bins)}
            for depth in sorted(set(nodes.depth.tolist()))
        ],
        "by_task": [
            {"task": task, **_curve(nodes[task_of == task], bins)}
            for task in dict.fromkeys(recorded.tasks)
        ],
    }


def _curve(nodes: pd.DataFrame, bins: int) -> dict[str, Any]:
    return {
        "confidence": mean_of(nodes.confidence),
        "acceptance": mean_of(nodes.acceptance),
        **reliability(nodes, bins),
    }


# --- the calibrator ---


class ScoredFit(NamedTuple):
    calibrator: Calibrator
    facts: dict[str, Any]  # analysis.json's `calibrator`


def fit_and_score(recorded: RecordedCycles, bins: int) -> ScoredFit | None:
    """Fits a calibrator on half of the prompts and scores it on the other half.

    Returns None if either half has no nodes.
    """
    nodes = recorded.tables["nodes"]
    is_held_out = held_out(nodes.prompt)
    if is_held_out.all() or not is_held_out.any():
        return None
    fitting = nodes[~is_held_out]
    held = nodes[is_held_out]
    calibrator = fit_calibrator(fitting.confidence.to_numpy(), fitting.acceptance.to_numpy())
    confidences = {"before": held.confidence.to_numpy()}
    with np.errstate(divide="ignore"):
        log_q = torch.from_numpy(np.log(confidences["before"])).float()
    for fit in FITS:  # in float32, as in decoding
        confidences[fit] = calibrator.map(fit)(log_q).exp().double().numpy()
    acceptance = held.acceptance.to_numpy()
    scores = {}  # for calibrator.json
    scores_with_bins = {}  # for analysis.json
    for name, confidence in confidences.items():
        sure = confidence.clip(FLOOR, 1.0 - FLOOR)
        loss = mean_of(-(acceptance * np.log(sure) + (1.0 - acceptance) * np.log1p(-sure)))
        table = reliability(held.assign(confidence=confidence), bins)
        scores[name] = {"ece": table["ece"], "brier": table["brier"], "log_loss": loss}
        scores_with_bins[name] = {**scores[name], "bins": table["bins"]}
    facts = {
        "temperature": calibrator.temperature,
        "fit_nodes": len(fitting),
        "fit_prompts": fitting.prompt.nunique(),
        "held_out_nodes": len(held),
        "held_out_prompts": held.prompt.nunique(),
        "held_out": scores_with_bins,
    }
    scored = replace(calibrator, decoded_at=recorded.temperature, scores=scores)
    return ScoredFit(scored, facts)


def held_out(prompts: pd.Series) -> NDArray[np.bool_]:
    """Whether each row [n] belongs to a held-out prompt; a hash holds out half of the prompts."""

    def is_odd(prompt: int) -> bool:
        return hashlib.sha256(f"{SPLIT}:{prompt}".encode()).digest()[0] % 2 == 1

    return prompts.map(is_odd).to_numpy(dtype=bool)


def fit_calibrator(confidence: FloatArray, acceptance: FloatArray) -> Calibrator:
    """Fits a calibrator to the confidences [n] and acceptances [n] (0, 1 or a chance) of nodes.

    `temperature` is the T that gives sigmoid(logit(c) / T) the least log loss. Isotonic regression
    gives the knots.
    """
    odds = logit(confidence.clip(EDGE, 1.0 - EDGE))

    def loss(log_temperature: float) -> float:
        scaled = odds / np.exp(log_temperature)
        return -float(
            (acceptance * log_expit(scaled) + (1.0 - acceptance) * log_expit(-scaled)).mean()
        )

    temperature = float(np.exp(minimize_scalar(loss, bounds=(-4.0, 4.0), method="bounded").x))
    knots = IsotonicRegression(y_min=0.0, y_max=1.0).fit(confidence, acceptance)
    return Calibrator(
        temperature, tuple(knots.X_thresholds_.tolist()), tuple(knots.y_thresholds_.tolist())
    )


def advice(scored: ScoredFit) -> str:
    eces = {name: scores["ece"] for name, scores in scored.facts["held_out"].items()}
    best = min(eces, key=lambda name: eces[name])
    figures = ", ".join(f"{ece:.4f} {name}" for name, ece in eces.items())
    use = "use no calibrator" if best == "before" else f"use it with --tree.calibrated {best}"
    return (
        f"calibrate: ECE on the {scored.facts['held_out_prompts']} held-out prompts is {figures}; "
        f"{use}"
    )


# --- a static tree, rebuilt ---


def record_ranks(
    method: MethodConfig, questions: Sequence[Question], section: CalibrateConfig, target: Target
) -> RecordedCycles:
    """Decodes greedily with a wider static tree, which shows how often each rank is accepted."""
    tree = cast(StaticConfig, method.tree)
    probe = replace(method, tree=replace(tree, choices=probe_choices(tree, section.ranks)))
    greedy = replace(section, temperature=0.0)
    decoder = make_decoder(LoadedHeads(target), probe, method.head)
    return record_cycles(decoder, questions, greedy, 0, Observer())


def write_choices(
    output: Path, method: MethodConfig, recorded: RecordedCycles, section: CalibrateConfig
) -> None:
    """Writes the best static tree for this head as choices.yaml, and also beside the head."""
    tree = cast(StaticConfig, method.tree)
    accuracy = rank_accuracy(recorded.tables["nodes"], tree.levels, section.ranks)
    choices = rebuild_tree(tree, accuracy, section.nodes)
    size = f"{len(choices)} drafted nodes"
    lines = [
        f"# {size} for {method.method}, rebuilt from how often each rank was accepted",
        "choices:",
        *(f"  - {list(choice)}" for choice in choices),
    ]
    for directory in output_directories(output, method.head):
        path = directory / CHOICES  # the last path is the head's, if the head is a directory
        write_text(path, "\n".join(lines) + "\n")
    print(f"calibrate: rebuilt {method.method}'s tree: {size}; use it with --tree.choices {path}")


def probe_choices(tree: StaticConfig, ranks: int) -> tuple[Choice, ...]:
    """The tree's nodes and, for every node within REACH, `ranks` children."""
    choices = {*tree.paths}
    for depth in range(tree.levels):
        for path in product(range(min(ranks, REACH + 1)), repeat=depth):
            if sum(path) <= REACH:
                choices |= {(*path, rank) for rank in range(ranks)}
    return tuple(choices)


def rank_accuracy(nodes: pd.DataFrame, levels: int, ranks: int) -> list[list[float]]:
    """The mean acceptance [levels][ranks] by depth and rank among siblings; 0 without nodes."""
    rank = nodes.place.str.rsplit(".", n=1).str[-1].astype(int)
    shares = nodes.groupby([nodes.depth, rank]).acceptance.mean().unstack()
    shares = shares.reindex(index=range(1, levels + 1), columns=range(ranks))
    return shares.fillna(0.0).to_numpy().tolist()


def rebuild_tree(
    tree: StaticConfig, accuracy: Sequence[Sequence[float]], nodes: int | None
) -> tuple[Choice, ...]:
    """The tree with the longest expected path (Medusa, section 2.3.3).

    nodes: the new tree's size with the root; None keeps the old size. A tree of drawn siblings may
    not skip a rank, so there no rank counts as better than an earlier one.
    """
    if tree.children != "best":
        accuracy = [list(accumulate(shares, min)) for shares in accuracy]
    choices: set[Choice] = set()
    # (-chance that the whole path is accepted, depth, node); a parent leaves before its children
    heap: list[tuple[float, int, Choice]] = [(-1.0, 0, ())]
    while heap and len(choices) < (nodes or tree.nodes):
        chance, depth, choice = heapq.heappop(heap)
        choices.add(choice)
        if depth == len(accuracy):
            continue
        for child, share in enumerate(accuracy[depth]):
            if share > 0:
                heapq.heappush(heap, (chance * share, depth + 1, (*choice, child)))
    return tuple(sorted(choices - {()}, key=lambda choice: (len(choice), choice)))
