"""How a head's confidence predicts acceptance. q is the draft's law, p the target's; divergences are in nats."""

import hashlib
import heapq
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import accumulate, product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from scipy.optimize import minimize_scalar
from scipy.special import log_expit, logit
from sklearn.isotonic import IsotonicRegression
from torch import Tensor

from aerie.configs.schema.decode import Choice, Fit, MethodConfig, StaticConfig
from aerie.configs.schema.measure import CalibrateConfig
from aerie.data.progress import start_progress
from aerie.infer.decode.drafters import EagleDrafter
from aerie.infer.decode.engine import SpeculativeDecoder, make_decoder
from aerie.infer.decode.methods import FLOOR, Calibrator, Drafters, kind_at
from aerie.infer.decode.shape import Drafting
from aerie.infer.measure.cycles import COLUMNS, Oracle, Recorder, States, Tables, tables_of
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

SCHEMA, EDGE = 2, 1e-7  # of analysis.json; least distance to 0 and 1, which float32 may round to
KINDS: tuple[Fit, ...] = ("temperature", "isotonic")
SPLIT = 0  # seed of the halves of the prompts
REACH = (
    2  # a node has all its children in the probe where the ranks on its path sum to at most this
)
PAPER_C = 0.18  # of SVIP's figure 4
POINTS = 80  # of the curves of figure 4
CONTEXTS = (
    32,
    64,
    128,
    256,
    512,
    1024,
    2048,
    4096,
    6144,
    8192,
)  # tokens before a draft: edges of the buckets


@dataclass(frozen=True)
class Recording:
    """The cycles of some prompts; tasks[prompt] names the prompt's task."""

    tables: Tables
    tasks: tuple[str, ...]
    temperature: float


def record(
    decoder: SpeculativeDecoder,
    tree: Any,  # TreeConfig or None
    questions: Sequence[tuple[Tensor, str]],
    section: CalibrateConfig,
    seed: int = 0,
) -> Recording:
    """Decodes prompts [1, T] with their tasks; with oracle_levels, `cycles` has the columns oracle and cap too."""
    proposer, oracle, tables = decoder.proposer, None, []
    assert isinstance(proposer, Drafting)  # as for every method with a head
    proposer.keep = True
    if section.oracle_levels is not None and tree is not None:
        oracle = Oracle(decoder, tree, section.oracle_levels, seed)
    decoder.cycle = "eager"  # no speed is measured, and `States` must see every forward
    states = States(decoder) if isinstance(proposer.drafter, EagleDrafter) else None
    settings: dict[str, Any] = {"temperature": section.temperature, "top_k": 0, "top_p": 1.0}
    longest = min(decoder.limits.values())
    with start_progress(len(questions), "prompts", "calibrate") as progress:
        for number, (ids, _) in enumerate(questions):
            settings["max_new_tokens"] = min(
                section.prompts.max_new_tokens, max(1, longest - ids.shape[1])
            )
            recorder, generator = (
                Recorder(states),
                torch.Generator(ids.device).manual_seed(seed * 1_000_003 + number),
            )
            text = decoder.generate(
                ids, on_cycle=recorder, generator=generator, **settings
            ).sequences[0]
            tables.append(tables_of(number, recorder.records, text.tolist()))
            progress.update()
    whole = {
        name: pd.concat([part[name] for part in tables], ignore_index=True) for name in COLUMNS
    }
    if oracle is not None:
        whole["cycles"][["oracle", "cap"]] = np.array(oracle.lengths, dtype=np.float64).reshape(
            -1, 2
        )
    return Recording(whole, tuple(task for _, task in questions), section.temperature)


def write_calibration(
    output: Path, recording: Recording, bins: int, head: str | None, method: str | None = None
) -> list[str]:
    """Writes all files but choices.yaml (calibrator.json beside the head too); returns lines for the user."""
    nodes, cycles = recording.tables["nodes"], recording.tables["cycles"]
    for table, rows in recording.tables.items():
        write_atomically(output / f"{table}.parquet", partial(rows.to_parquet, index=False))
    summary = summarise(nodes, cycles, recording.temperature, bins)
    fitted = fit_and_score(recording, bins)
    write_json(output / "calibration.json", summary)
    about = {"head": head and kind_at(head), "method": method, "calibrator": fitted and fitted[1]}
    write_json(output / "analysis.json", {**analyse(recording, bins), **about})
    measured = f"; ECE {summary['ece']:.4f}, Brier {summary['brier']:.4f}" if len(nodes) else ""
    line = f"calibrate: {len(nodes):,} drafted nodes of {len(cycles):,} cycles{measured}"
    if fitted is None:
        return [line, "calibrate: no calibrator: one half of the prompts drafted nothing"]
    calibrator, scores = fitted
    places = places_of(output, head)
    if len(places) > 1:
        calibrator = replace(calibrator, head=digests(places[1]))
    for place in places:
        write_json(place / CALIBRATOR, asdict(calibrator))
    found = {fit: scores["held_out"][fit]["ece"] for fit in ("before", *KINDS)}
    eces, best = (
        ", ".join(f"{ece:.4f} {fit}" for fit, ece in found.items()),
        min(found, key=found.__getitem__),
    )
    advice = "use none of them" if best == "before" else f"use it with --tree.calibrated {best}"
    on = f"{scores['held_out_prompts']} prompts that the calibrator was not fitted on"
    return [line, f"calibrate: ECE on {on}: {eces}; {advice}"]


def places_of(output: Path, head: str | None) -> list[Path]:
    """The output directory, and the head's where it is a directory."""
    return [output, *([Path(head)] if head is not None and Path(head).is_dir() else [])]


def mean(values: Any) -> float | None:
    return float(values.mean()) if len(values) else None


def reliability(nodes: pd.DataFrame, bins: int = 20) -> dict[str, Any]:
    """ECE, Brier score and bins of equal width (EAGLE-2, section 3.2).

    With an acceptance probability a, confidence c has the expected squared error c^2 - 2ca + a.
    """
    confidence, acceptance = nodes.confidence.to_numpy(), nodes.acceptance.to_numpy()
    # the tolerance keeps float32 values such as 0.15 (stored as 0.15000001 or 0.1499999) on the side of their edge
    index = np.clip(np.floor(confidence * bins + 1e-6).astype(np.int64), 0, bins - 1)
    counts = np.bincount(index, minlength=bins)
    sums = np.stack(
        [np.bincount(index, weights=values, minlength=bins) for values in (confidence, acceptance)]
    )
    table = []
    for place, (count, (of_confidence, of_acceptance)) in enumerate(
        zip(counts.tolist(), sums.T.tolist(), strict=True)
    ):
        bounds = {
            "low": round(place / bins, 9),
            "high": round((place + 1) / bins, 9),
            "count": count,
        }
        means = (
            {"confidence": of_confidence / count, "acceptance": of_acceptance / count}
            if count
            else {}
        )
        table.append({**bounds, "confidence": None, "acceptance": None, **means})
    ece = float(abs(sums[0] - sums[1]).sum() / len(nodes)) if len(nodes) else None
    brier = mean(confidence**2 - 2.0 * confidence * acceptance + acceptance)
    return {"nodes": len(nodes), "ece": ece, "brier": brier, "bins": table}


def held_out(prompts: pd.Series) -> NDArray[np.bool_]:
    """Which rows [n] are of held-out prompts: half of them, chosen by hash."""
    chosen = [
        n for n in prompts.unique() if hashlib.sha256(f"{SPLIT}:{n}".encode()).digest()[0] % 2 == 1
    ]
    return np.asarray(prompts.isin(chosen), dtype=bool)


def summarise(
    nodes: pd.DataFrame, cycles: pd.DataFrame, temperature: float, bins: int = 20
) -> dict[str, Any]:
    """calibration.json. At depth d `survived` is P(accepted >= d), `conditional` the same given accepted >= d - 1."""
    deepest = int(max([0, *nodes.depth, *cycles.accepted]))
    reached = [int((cycles.accepted >= depth).sum()) for depth in range(deepest + 1)]
    by_depth = []
    for depth in range(1, deepest + 1):
        here, before = nodes[nodes.depth == depth], reached[depth - 1]
        row = {"depth": depth, "nodes": len(here), "confidence": mean(here.confidence)}
        row |= {"acceptance": mean(here.acceptance), "cycles": before}
        row |= {"survived": reached[depth] / len(cycles) if len(cycles) else None}
        by_depth.append(row | {"conditional": reached[depth] / before if before else None})
    whole = {"prompts": nodes.prompt.nunique(), **reliability(nodes, bins)}
    return {"temperature": temperature, **whole, "cycles": len(cycles), "by_depth": by_depth}


def analyse(recording: Recording, bins: int = 20) -> dict[str, Any]:
    """analysis.json without `calibrator`; None: not recorded."""
    cycles, nodes, laws, frontier = (
        recording.tables[name] for name in ("cycles", "nodes", "laws", "frontier")
    )
    tasks, task_of = (
        list(dict.fromkeys(recording.tasks)),
        dict(enumerate(recording.tasks)),
    )  # prompt -> task
    parts: dict[str, Any] = {"branches": None, "levels": None, "laws": None, "oracle": None}
    if len(frontier):
        branches = pd.DataFrame(
            {"confidence": frontier.survival, "acceptance": frontier.accepted.astype(float)}
        )
        parts["branches"] = reliability(branches, bins)
        parts["levels"] = {"by_depth": level_table(frontier, cycles)}
    if len(laws):
        entropies = []
        for task in ["all", *(tasks if len(tasks) > 1 else ())]:
            part = laws if task == "all" else laws[laws.prompt.map(task_of) == task]
            means = {
                "accepted": mean(part.entropy[part.accepted]),
                "rejected": mean(part.entropy[~part.accepted]),
            }
            entropies.append({"task": task, "laws": len(part), **means})
        parts["laws"] = {
            "bounds": acceptance_bounds(laws, PAPER_C),
            "entropy": entropies,
            **rejections(laws),
        }
    if "oracle" in cycles:
        parts["oracle"] = oracle_summary(cycles)

    def curve(part: pd.DataFrame) -> dict[str, Any]:  # EAGLE-2, figure 6
        return {
            "confidence": mean(part.confidence),
            "acceptance": mean(part.acceptance),
            **reliability(part, bins),
        }

    return {
        "schema": SCHEMA,
        "temperature": recording.temperature,
        "prompts": len(recording.tasks),
        "cycles": len(cycles),
        "by_depth": [
            {"depth": int(depth), **curve(part)} for depth, part in nodes.groupby("depth")
        ],
        "by_task": [
            {"task": task, **curve(nodes[nodes.prompt.map(task_of) == task])} for task in tasks
        ],
        **parts,
    }


def level_table(frontier: pd.DataFrame, cycles: pd.DataFrame) -> list[dict[str, Any]]:
    """S_d (`mass`) and E_d (`expected`) by depth d of the cycles that drafted it (DEAGLE, equations 22 to 24).

    `held`: the target wrote a branch of the frontier; `reached`: d tokens of the verified tree were accepted.
    """
    levels = frontier.groupby(["prompt", "cycle", "depth"]).agg(
        mass=("survival", "sum"), held=("accepted", "any")
    )
    levels = levels.reset_index().merge(
        cycles[["prompt", "cycle", "accepted"]], on=["prompt", "cycle"]
    )
    levels["mass"], levels["reached"] = (
        levels.mass.clip(upper=1.0),
        levels.pop("accepted") >= levels.depth,
    )
    means: dict[str, Any] = {name: (name, "mean") for name in ("mass", "held", "reached")}
    table = levels.groupby("depth").agg(cycles=("mass", "size"), **means).reset_index()
    table["expected"] = table.mass.cumsum()
    return list(table.to_dict("records"))


def acceptance_bounds(laws: pd.DataFrame, c: float) -> dict[str, Any]:
    """SVIP's figure 4: beta = 1 - TV and three lower bounds (cut at -1), laws in the order of beta."""
    beta, kl = 1.0 - laws.tvd.to_numpy(), laws.kl_qp.to_numpy()
    bounds = {
        "oracle": 1.0 - np.sqrt(kl / 2.0),
        "approximation": 1.0 - np.sqrt(c * laws.entropy.to_numpy()),
        "bretagnolle_huber": 1.0 - np.sqrt(-np.expm1(-kl)),
    }
    parts, curves = (
        np.array_split(np.argsort(beta, kind="stable"), min(POINTS, len(beta))),
        {"acceptance": beta},
    )
    curves |= {name: values.clip(min=-1.0) for name, values in bounds.items()}
    return {
        "c": c,
        "curve": {name: [mean(values[part]) for part in parts] for name, values in curves.items()},
    }


def rejections(laws: pd.DataFrame, most: int = 4) -> dict[str, Any]:
    """SVIP's figure 3: (a) mean KL(q||p) before and at (offset 0) a rejected token, (b) mean log q by rank."""
    kl, rejected = laws.set_index(["prompt", "cycle", "depth"]).kl_qp, laws[~laws.followed]
    before = []
    for offset in range(-most, 1):
        values = kl.reindex(
            pd.MultiIndex.from_arrays([rejected.prompt, rejected.cycle, rejected.depth + offset])
        )
        before.append({"offset": offset, "kl": mean(values[np.isfinite(values)])})
    ranked = np.stack(laws.ranked.to_list())
    means: dict[str, Any] = {"ranks": [2**power for power in range(ranked.shape[1])]}
    for name, rows in (("accepted", laws.accepted), ("rejected", ~laws.accepted)):
        columns = ranked[np.asarray(rows)].T
        means[name] = [mean(column) if np.isfinite(column).all() else None for column in columns]
    return {"before_rejection": before, "sorted": means}


def oracle_summary(cycles: pd.DataFrame) -> dict[str, Any] | None:
    """Oracle lengths of the drafting cycles, also by context (SVIP, arXiv 2411.18462, section 2.1, figures 1 and 7b).

    `delta`: mean of proposed minus oracle; `censored`: the share that reached the cap.
    """
    drafted = cycles.dropna(subset="oracle")
    if drafted.empty:
        return None
    edges = {float(edge): edge for edge in CONTEXTS}  # the last bucket has none
    buckets = drafted.groupby(pd.cut(drafted.position, [0, *CONTEXTS, np.inf]), observed=True)
    rows = []
    for bucket, here in [(None, drafted), *buckets]:
        row: dict[str, Any] = (
            {"above": int(bucket.left), "up_to": edges.get(bucket.right)} if bucket else {}
        )
        row |= {
            "cycles": len(here),
            "oracle": mean(here.oracle),
            "variance": float(here.oracle.var(ddof=0)),
        }
        rows.append(
            row
            | {"delta": mean(here.levels - here.oracle), "censored": mean(here.oracle >= here.cap)}
        )
    return {"all": rows[0], "by_context": rows[1:]}


def fit(confidence: FloatArray, acceptance: FloatArray) -> Calibrator:
    """The calibrator of nodes [n]: the T of sigmoid(logit(c) / T) with the least log loss, and the isotonic knots."""
    odds = logit(confidence.clip(EDGE, 1.0 - EDGE))

    def loss(log_temperature: float) -> float:
        scaled = odds / np.exp(log_temperature)
        return float(
            -(acceptance * log_expit(scaled) + (1.0 - acceptance) * log_expit(-scaled)).mean()
        )

    temperature = float(np.exp(minimize_scalar(loss, bounds=(-4.0, 4.0), method="bounded").x))
    knots = IsotonicRegression(y_min=0.0, y_max=1.0).fit(confidence, acceptance)
    return Calibrator(
        temperature, tuple(knots.X_thresholds_.tolist()), tuple(knots.y_thresholds_.tolist())
    )


def fit_and_score(recording: Recording, bins: int) -> tuple[Calibrator, dict[str, Any]] | None:
    """A calibrator fitted on half of the prompts, with its scores on the other; None if a half has no nodes."""
    nodes = recording.tables["nodes"]
    chosen = held_out(nodes.prompt)
    if chosen.all() or not chosen.any():
        return None
    mine, other = nodes[~chosen], nodes[chosen]
    calibrator = fit(mine.confidence.to_numpy(), mine.acceptance.to_numpy())
    acceptance, confidences = other.acceptance.to_numpy(), {"before": other.confidence.to_numpy()}
    with np.errstate(divide="ignore"):
        log_q = torch.from_numpy(np.log(confidences["before"])).float()
    for kind in KINDS:  # as decoding computes them
        confidences[kind] = calibrator.map(kind)(log_q).exp().double().numpy()
    scores, plain = {}, {}
    for name, confidence in confidences.items():
        sure = confidence.clip(FLOOR, 1.0 - FLOOR)
        loss = mean(-(acceptance * np.log(sure) + (1.0 - acceptance) * np.log1p(-sure)))
        table = reliability(other.assign(confidence=confidence), bins)
        plain[name] = {"ece": table["ece"], "brier": table["brier"], "log_loss": loss}
        scores[name] = {**plain[name], "bins": table["bins"]}
    facts = {
        "temperature": calibrator.temperature,
        "fit_nodes": len(mine),
        "fit_prompts": mine.prompt.nunique(),
    }
    facts |= {
        "held_out_nodes": len(other),
        "held_out_prompts": other.prompt.nunique(),
        "held_out": scores,
    }
    return replace(calibrator, decoded_at=recording.temperature, scores=plain), facts


def calibrated(
    asked: MethodConfig,
    section: CalibrateConfig,
    output: Path,
    seed: int,
    target: Target,
    tokenizer: Any,
) -> dict[str, Any]:
    """Writes the calibration, returns its facts; for a static tree also choices.yaml, from a wider tree's answers."""
    questions = [
        (encode_turn(prompt, (), tokenizer, target), prompt.task)
        for prompt in load_prompts(section.prompts)
    ]
    recording = record(
        make_decoder(Drafters(target), asked, asked.head), asked.tree, questions, section, seed
    )
    print("\n".join(write_calibration(output, recording, section.bins, asked.head, asked.method)))
    tree, ranks = asked.tree, section.ranks
    facts = {name: len(recording.tables[name]) for name in ("nodes", "cycles")}
    if not isinstance(tree, StaticConfig):
        return facts
    wide = {*tree.paths}
    for depth in range(tree.levels):
        for path in product(range(min(ranks, REACH + 1)), repeat=depth):
            if sum(path) <= REACH:
                wide |= {(*path, rank) for rank in range(ranks)}
    probe = replace(asked, tree=replace(tree, choices=tuple(wide)))
    decoder = make_decoder(Drafters(target), probe, asked.head)
    recording = record(decoder, None, questions, replace(section, temperature=0.0))
    choices = rebuilt(tree, rank_accuracy(recording.tables, tree.levels, ranks), section.nodes)
    about = f"# {len(choices)} drafted nodes for {asked.method}, rebuilt from how often each rank was accepted"
    text = "".join(f"  - {list(choice)}\n" for choice in choices)
    for place in places_of(output, asked.head):
        write_text(place / CHOICES, f"{about}\nchoices:\n{text}")
    print(
        f"{asked.method}: a tree of {len(choices)} drafted nodes; use it with --tree.choices {place / CHOICES}"
    )
    return facts


def rank_accuracy(tables: Tables, levels: int, ranks: int) -> list[list[float]]:
    """[levels][ranks]: mean acceptance by depth and rank among siblings; 0 where none was asked."""
    nodes = tables["nodes"]
    rank = nodes.place.str.rsplit(".", n=1).str[-1].astype(int)
    shares = nodes.groupby([nodes.depth, rank]).acceptance.mean().to_dict()
    return [
        [float(shares.get((depth, place), 0.0)) for place in range(ranks)]
        for depth in range(1, levels + 1)
    ]


def rebuilt(
    tree: StaticConfig, accuracy: Sequence[Sequence[float]], nodes: int | None
) -> tuple[Choice, ...]:
    """The tree of so many nodes (root included; None: the tree's) with the longest expected path (Medusa, 2.3.3).

    A tree of drawn siblings may not skip a rank, so no rank counts as better than those before it.
    """
    if tree.children != "best":
        accuracy = [list(accumulate(shares, min)) for shares in accuracy]
    choices: set[Choice] = set()
    heap: list[tuple[float, int, Choice]] = [(-1.0, 0, ())]
    while heap and len(choices) < (nodes or tree.nodes):
        chance, depth, choice = heapq.heappop(heap)
        choices.add(choice)
        for rank, share in enumerate(accuracy[depth] if depth < len(accuracy) else ()):
            if share > 0:
                heapq.heappush(heap, (chance * share, depth + 1, (*choice, rank)))
    return tuple(sorted(choices - {()}, key=lambda choice: (len(choice), choice)))
