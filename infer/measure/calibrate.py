"""`calibrate`: decodes held-out prompts, and says how a head's confidence predicts acceptance.

Writes the recorded tables (*.parquet), calibration.json, analysis.json, calibrator.json (beside the head too), and for
a static tree choices.yaml.
"""

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, product
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.optimize import minimize_scalar
from scipy.special import log_expit, logit
from sklearn.isotonic import IsotonicRegression
from torch import Tensor

from aerie.configs.errors import warn
from aerie.configs.schema.decode import Choice, Fit, MethodConfig, StaticConfig, TreeConfig
from aerie.configs.schema.measure import CalibrateConfig
from aerie.data.progress import bar
from aerie.infer.decode.calibrator import FLOOR, Calibrator, save
from aerie.infer.decode.engine import SpeculativeDecoder, make_decoder
from aerie.infer.decode.methods import Drafters
from aerie.infer.decode.shape import Cycle
from aerie.infer.measure import bounds
from aerie.infer.measure.bounds import curve, held_out, levels_of, mean, reliability
from aerie.infer.measure.cycles import Recorder, Tables, joined, keep_pools, tables_of
from aerie.infer.measure.oracle import Oracle, summarise_oracle
from aerie.infer.measure.record import FloatArray
from aerie.model.storage import CALIBRATOR, digests, write_atomically, write_json, write_text
from aerie.model.target import Target

SCHEMA = 1  # of analysis.json
EDGE = 1e-7  # confidence 0 or 1 in single precision is not certainty
KINDS: tuple[Fit, ...] = ("temperature", "isotonic")
CHOICES = "choices.yaml"
REACH = 2  # a node is asked for all its children where the ranks on its path sum to no more than this


@dataclass(frozen=True)
class Recording:
    """The cycles of some prompts; tasks[prompt] names the prompt's task."""

    tables: Tables
    tasks: tuple[str, ...]
    temperature: float


def record(
    decoder: SpeculativeDecoder,
    tree: TreeConfig | None,
    questions: Iterable[tuple[Tensor, str]],
    section: CalibrateConfig,
    seed: int = 0,
) -> Recording:
    """Decodes prompts [1, T], each with its task. tree: the decoder's own, null where it grows none.

    Sampling has neither top_k nor top_p. With section.oracle_levels the cycles have the columns `oracle` and `cap`.
    """
    drafts = keep_pools(decoder)
    settings: dict[str, Any] = {"max_new_tokens": section.prompts.max_new_tokens, "do_sample": section.temperature > 0}
    if section.temperature > 0:
        settings |= {"temperature": section.temperature, "top_k": 0, "top_p": 1.0}
    oracle = None
    if section.oracle_levels is not None and drafts and tree is not None:
        oracle = Oracle(decoder, tree, section.oracle_levels, seed)
    tables, tasks = [], []
    for number, (ids, task) in enumerate(questions):
        recorder = Recorder()

        def on_cycle(cycle: Cycle, recorder: Recorder = recorder) -> None:
            recorder(cycle)
            if oracle is not None:
                oracle.on_cycle(cycle)

        generator = torch.Generator(ids.device).manual_seed(seed * 1_000_003 + number)
        done = decoder.generate(ids, on_cycle=on_cycle, generator=generator, **settings)
        tables.append(tables_of(number, recorder.records, done.sequences[0].tolist()))
        tasks.append(task)
    whole = joined(tables)
    if oracle is not None:
        whole["cycles"][["oracle", "cap"]] = np.array(oracle.lengths, dtype=np.float64).reshape(-1, 2)
    return Recording(whole, tuple(tasks), section.temperature)


def analyse(recording: Recording, name: Callable[[int], str], bins: int = 20) -> dict[str, Any]:
    """The content of analysis.json but for the calibrator; name gives a token id's text.

    A part is null where nothing was recorded for it.
    """
    cycles, nodes, laws, frontier = (recording.tables[name] for name in ("cycles", "nodes", "laws", "frontier"))
    task_of = nodes.prompt.map(dict(enumerate(recording.tasks)))
    branches = reliability(frontier.survival.to_numpy(), frontier.accepted.to_numpy(dtype=np.float64), bins)
    return {
        "schema": SCHEMA,
        "temperature": recording.temperature,
        "prompts": len(recording.tasks),
        "cycles": len(cycles),
        "by_depth": [{"depth": int(depth), **curve(part, bins)} for depth, part in nodes.groupby("depth")],
        "by_task": [{"task": task, **curve(nodes[task_of == task], bins)} for task in dict.fromkeys(recording.tasks)],
        "positions": bounds.by_place(nodes),
        "branches": branches if len(frontier) else None,
        "levels": {"by_depth": bounds.level_table(levels_of(frontier, cycles))} if len(frontier) else None,
        "laws": {
            "inequalities": bounds.token_inequalities(laws),
            "deagle": bounds.deagle_bound(laws, bins),
            "bounds": [bounds.acceptance_bounds(laws, c) for c in bounds.PAPER_CS],
            "ratio": bounds.entropy_ratio(laws),
            "by_c": bounds.shares_by_c(laws),
            "entropy": bounds.entropy_by_outcome(laws, recording.tasks),
            "before_rejection": bounds.divergence_before_rejection(laws),
            "sorted": bounds.sorted_laws(laws),
            "tokens": bounds.token_table(laws, name),
        }
        if len(laws)
        else None,
        "oracle": summarise_oracle(cycles) if "oracle" in cycles else None,
    }


def write_calibration(
    output: Path, recording: Recording, bins: int, head: str | None, name: Callable[[int], str]
) -> list[str]:
    """Writes every file of a calibration but for choices.yaml; the lines tell what was found."""
    nodes, cycles = recording.tables["nodes"], recording.tables["cycles"]
    for table, rows in recording.tables.items():
        write_atomically(output / f"{table}.parquet", partial(rows.to_parquet, index=False))
    summary = bounds.summarise(nodes, cycles, recording.temperature, bins)
    fitted = fit_and_score(recording, bins)
    write_json(output / "calibration.json", summary)
    write_json(output / "analysis.json", {**analyse(recording, name, bins), "calibrator": fitted and fitted[1]})
    measured = f"; ECE {summary['ece']:.4f}, Brier {summary['brier']:.4f}" if len(nodes) else ""
    lines = [f"calibrate: {len(nodes):,} drafted nodes of {len(cycles):,} cycles{measured}"]
    if fitted is None:
        return [*lines, "calibrate: no calibrator: one half of the prompts drafted nothing"]
    calibrator, scores = fitted
    before, by_temperature, isotonic = (scores["held_out"][kind]["ece"] for kind in ("before", *KINDS))
    lines.append(
        f"calibrate: on {scores['held_out_prompts']} prompts that the calibrator was not fitted on: ECE "
        f"{before:.4f} before, {by_temperature:.4f} by temperature {scores['temperature']:.3f}, {isotonic:.4f} isotonic"
    )
    beside = Path(head) if head is not None and Path(head).is_dir() else None
    if beside is not None:
        calibrator = replace(calibrator, head=digests(beside))
    save(calibrator, output)
    if beside is None:
        return [*lines, *([f"calibrate: {head} is no directory, so the calibrator stays in {output}"] if head else [])]
    try:
        save(calibrator, beside)
    except OSError as error:
        warn(f"{beside}: {CALIBRATOR} cannot be written ({error.strerror or error}); it stays in {output}")
        return lines
    decode = "decode by it with --tree.calibrated temperature or isotonic"
    return [*lines, f"calibrate: {beside / CALIBRATOR}: {decode}"]


def fit(confidence: FloatArray, acceptance: FloatArray) -> Calibrator:
    """The calibrator of nodes [n] with these acceptances, outcomes or probabilities.

    temperature: the T of sigmoid(logit(c) / T) with the smallest expected log loss; on the log-odds of one token's
    confidence, not on the logits of the whole law, which no cycle needs to keep. isotonic: the knots of the never
    falling curve with the least squared error, both ends of each of its level pieces.
    """
    odds = logit(confidence.clip(EDGE, 1.0 - EDGE))

    def loss(log_temperature: float) -> float:
        scaled = odds / np.exp(log_temperature)
        return float(-(acceptance * log_expit(scaled) + (1.0 - acceptance) * log_expit(-scaled)).mean())

    temperature = float(np.exp(minimize_scalar(loss, bounds=(-4.0, 4.0), method="bounded").x))
    knots = IsotonicRegression(y_min=0.0, y_max=1.0).fit(confidence, acceptance)
    return Calibrator(temperature, tuple(knots.X_thresholds_.tolist()), tuple(knots.y_thresholds_.tolist()))


def calibrated(calibrator: Calibrator, kind: Fit, confidence: FloatArray) -> FloatArray:
    """The calibrated confidences [n], as decoding computes them."""
    with np.errstate(divide="ignore"):
        log_q = torch.from_numpy(np.log(confidence)).float()
    return calibrator.map(kind)(log_q).exp().double().numpy()


def fit_and_score(recording: Recording, bins: int, seed: int = 0) -> tuple[Calibrator, dict[str, Any]] | None:
    """A calibrator fitted on one half of the prompts and its scores on the other; null where a half has no nodes.

    Scores are ECE, Brier, expected log loss (nats) and bins, of the head's own confidence (`before`) and of both fits.
    """
    nodes = recording.tables["nodes"]
    chosen = held_out(nodes.prompt, seed)
    if chosen.all() or not chosen.any():
        return None
    mine, other = nodes[~chosen], nodes[chosen]
    calibrator = fit(mine.confidence.to_numpy(), mine.acceptance.to_numpy())
    acceptance, own = other.acceptance.to_numpy(), other.confidence.to_numpy()
    scores = {}
    after = {kind: calibrated(calibrator, kind, own) for kind in KINDS}
    for kind, confidence in (("before", own), *after.items()):
        sure = confidence.clip(FLOOR, 1.0 - FLOOR)
        loss = mean(-(acceptance * np.log(sure) + (1.0 - acceptance) * np.log1p(-sure)))
        table = reliability(confidence, acceptance, bins)
        scores[kind] = {"ece": table["ece"], "brier": table["brier"], "log_loss": loss, "bins": table["bins"]}
    plain = {kind: {key: value for key, value in table.items() if key != "bins"} for kind, table in scores.items()}
    return replace(calibrator, decoded_at=recording.temperature, scores=plain), {
        "temperature": calibrator.temperature,
        "knots": len(calibrator.confidence),
        "fit_nodes": len(mine),
        "fit_prompts": mine.prompt.nunique(),
        "held_out_nodes": len(other),
        "held_out_prompts": other.prompt.nunique(),
        "held_out": scores,
    }


# A static tree, rebuilt from how often a head's r-th guess is the target's token


def rebuild(
    target: Target,
    asked: MethodConfig,
    head: str | None,
    prompts: Sequence[Tensor],
    section: CalibrateConfig,
    output: Path,
) -> str | None:
    """One line about the tree of section.nodes nodes that suits the head best; null for a method without a static tree.

    Decodes the prompts [1, T] greedily with a wide tree, and writes choices.yaml into the output directory, and beside
    the head where that is a directory.
    """
    tree = asked.tree
    if not isinstance(tree, StaticConfig):
        return None
    wide = replace(asked, tree=replace(tree, choices=probe(tree, section.ranks)), typical=None)
    decoder = make_decoder(Drafters(target), wide, head, "calibrate")
    tables, new = [], section.prompts.max_new_tokens
    with bar(len(prompts), "prompts", "ranks") as progress:
        for number, ids in enumerate(prompts):
            recorder = Recorder()
            decoder.generate(ids, max_new_tokens=new, do_sample=False, on_cycle=recorder)
            tables.append(tables_of(number, recorder.records, []))
            progress.update()
    accuracy = rank_accuracy(joined(tables), tree.levels, section.ranks)
    choices = rebuilt(tree, accuracy, section.nodes)
    places = [output, *([Path(head)] if head is not None and Path(head).is_dir() else [])]
    about = (
        f"{len(choices)} drafted nodes for {asked.method}, rebuilt by `calibrate` from this head's own rank accuracies."
    )
    listed = "".join(f"  - {list(choice)}\n" for choice in choices)
    for place in places:
        write_text(place / CHOICES, f"# {about}\nchoices:\n{listed}")
    return (
        f"{asked.method}: a tree of {len(choices)} drafted nodes rebuilt from the head's ranks, expected tau "
        f"{expected_tau(choices, accuracy):.2f} ({expected_tau(tree.paths, accuracy):.2f} for the tree it replaces); "
        f"use it with: --tree.choices {places[-1] / CHOICES}"
    )


def rank_accuracy(tables: Tables, levels: int, ranks: int) -> list[list[float]]:
    """[levels][ranks]: the mean acceptance of the nodes of this rank among their siblings; 0 for one never asked."""
    nodes = tables["nodes"]
    rank = nodes.place.str.rsplit(".", n=1).str[-1].astype(int)
    shares = nodes.groupby([nodes.depth, rank]).acceptance.mean().to_dict()
    return [[float(shares.get((depth, place), 0.0)) for place in range(ranks)] for depth in range(1, levels + 1)]


def probe(tree: StaticConfig, ranks: int) -> tuple[Choice, ...]:
    """The tree's nodes and so many ranks below every likely node, as deep as the tree."""
    asked = {*tree.paths}
    for depth in range(tree.levels):
        for path in product(range(min(ranks, REACH + 1)), repeat=depth):
            if sum(path) <= REACH:
                asked |= {(*path, rank) for rank in range(ranks)}
    return tuple(sorted(asked, key=lambda choice: (len(choice), choice)))


def rebuilt(tree: StaticConfig, accuracy: Sequence[Sequence[float]], nodes: int | None) -> tuple[Choice, ...]:
    """The tree of so many nodes with the root (null: as many as the tree has) that can expect the longest paths.

    Where siblings are drawn, a tree may not leave a rank out before another: then no rank counts as better than those
    before it.
    """
    if tree.children != "best":
        accuracy = [list(accumulate(shares, min)) for shares in accuracy]
    return best_choices(accuracy, (nodes or tree.nodes) - 1)


def best_choices(accuracy: Sequence[Sequence[float]], num_choices: int) -> tuple[Choice, ...]:
    """The tree of num_choices drafted nodes with the most accepted tokens to expect, in level order.

    accuracy[depth][rank] is how often the child of this rank is the target's token, given that its parent was; depth 0
    is the root's children. Greedily adds the node with the largest product of accuracies along its path; fewer nodes
    when the table has no more. Source: Medusa (arXiv 2401.10774), section 2.3.3.
    """
    nodes: list[Choice] = []
    heap: list[tuple[float, int, Choice]] = []

    def offer(parent: Choice, chance: float) -> None:
        if len(parent) < len(accuracy):
            for rank, own in enumerate(accuracy[len(parent)]):
                if own > 0:
                    heapq.heappush(heap, (-chance * own, len(parent) + 1, (*parent, rank)))

    offer((), 1.0)
    while heap and len(nodes) < num_choices:
        chance, _, choice = heapq.heappop(heap)
        nodes.append(choice)
        offer(choice, -chance)
    return tuple(sorted(nodes, key=lambda choice: (len(choice), choice)))


def expected_tau(choices: Sequence[Choice], accuracy: Sequence[Sequence[float]]) -> float:
    """Tokens per cycle of a static tree, the bonus token included, were the levels independent of each other."""
    known = {(depth, rank): share for depth, shares in enumerate(accuracy) for rank, share in enumerate(shares)}
    return 1.0 + sum(prod(known.get(place, 0.0) for place in enumerate(choice)) for choice in choices)
