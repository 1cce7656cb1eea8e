"""`calibrate`: decodes held-out prompts, and says how a head's confidence predicts acceptance.

Writes the recorded tables (*.parquet), calibration.json, analysis.json, calibrator.json (beside the head too), and for
a static tree choices.yaml.
"""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from scipy.optimize import minimize_scalar
from scipy.special import log_expit, logit
from sklearn.isotonic import IsotonicRegression
from torch import Tensor

from aerie.configs.schema.decode import Choice, ConstantConfig, Fit, MethodConfig, StaticConfig, TreeConfig
from aerie.configs.schema.measure import CalibrateConfig
from aerie.data.stage import bar
from aerie.infer.decode.calibrator import FLOOR, Calibrator, save
from aerie.infer.decode.drafters.multi_token import HydraDrafter, MedusaDrafter
from aerie.infer.decode.engine import SpeculativeDecoder, make_decoder
from aerie.infer.decode.methods import Drafters
from aerie.infer.decode.sampling import Sampler
from aerie.infer.decode.shape import Cycle, Drafting, make_shape
from aerie.infer.decode.tree import Tree
from aerie.infer.measure import bounds
from aerie.infer.measure.bounds import curve, held_out, mean, reliability
from aerie.infer.measure.cycles import COLUMNS, Recorder, Tables, keep_pools, tables_of
from aerie.infer.measure.record import FloatArray
from aerie.model.storage import digests, write_atomically, write_json, write_text
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
    questions: Sequence[tuple[Tensor, str]],
    section: CalibrateConfig,
    seed: int = 0,
) -> Recording:
    """Decodes prompts [1, T], each with its task. tree: the decoder's own, null where it grows none.

    Sampling has neither top_k nor top_p. With section.oracle_levels the cycles have the columns `oracle` and `cap`.
    """
    drafts, oracle = keep_pools(decoder), None
    if section.oracle_levels is not None and drafts and tree is not None:
        oracle = Oracle(decoder, tree, section.oracle_levels, seed)
    settings: dict[str, Any] = {"do_sample": section.temperature > 0, "temperature": section.temperature, "top_k": 0}
    settings |= {"top_p": 1.0, "max_new_tokens": section.prompts.max_new_tokens}
    tables = []
    with bar(len(questions), "prompts", "calibrate") as progress:
        for number, (ids, _) in enumerate(questions):
            recorder, generator = Recorder(), torch.Generator(ids.device).manual_seed(seed * 1_000_003 + number)
            text = decoder.generate(ids, on_cycle=recorder, generator=generator, **settings).sequences[0]
            tables.append(tables_of(number, recorder.records, text.tolist()))
            progress.update()
    whole = {name: pd.concat([part[name] for part in tables], ignore_index=True) for name in COLUMNS}
    if oracle is not None:
        whole["cycles"][["oracle", "cap"]] = np.array(oracle.lengths, dtype=np.float64).reshape(-1, 2)
    return Recording(whole, tuple(task for _, task in questions), section.temperature)


class Oracle(Drafting):
    """Drafts to a cap at every cycle, has the target judge that, forgets it, and proposes as it would have anyway.

    The generator is set back, so that what is decoded does not change, and a sampled chain is a prefix of the longer.
    The longer draft has the policy's tree without its stop rule: a static tree is as deep as it is, and Medusa and
    Hydra as their heads are many. Source: SVIP (arXiv 2411.18462), section 2.1.
    """

    def __init__(self, decoder: SpeculativeDecoder, tree: TreeConfig, levels: int, seed: int = 0) -> None:
        """Takes the place of the decoder's own proposer."""
        own = decoder.proposer
        assert isinstance(own, Drafting)
        super().__init__(own.drafter, own.shape, own.forwards_per_tree)
        self.keep = own.keep
        if isinstance(own.drafter, MedusaDrafter | HydraDrafter):
            levels = min(levels, own.drafter.head.config.num_heads)
        deep = tree if isinstance(tree, StaticConfig) else replace(tree, levels=levels)
        self.longer = make_shape(replace(deep, stop=ConstantConfig()))
        self.max_nodes = max(own.max_nodes, self.longer.max_nodes)
        self.lm, self.generator = decoder.lm, torch.Generator(decoder.target.device).manual_seed(seed)
        self.lengths: list[tuple[int | None, int | None]] = []  # oracle length and cap of each cycle; null: no draft
        decoder.proposer = self

    def reset(self, prompt: Tensor, capacity: int, sampler: Sampler) -> None:
        super().reset(prompt, capacity + self.longer.draft_slots, sampler)

    def propose(self, root: Tensor, max_levels: int) -> Tree:
        assert self._sampler is not None, "reset first"
        state = self._sampler.generator.get_state()
        self.tree = self.longer.grow(self.drafter, root, max_levels, self._sampler)
        self.logits = self.lm.extend(self.tree).logits  # [N, V]; the cycle's own forward writes over these rows
        self._sampler.generator.set_state(state)
        return super().propose(root, max_levels)

    def commit(self, tokens: Tensor, features: Tensor, cycle: Cycle | None) -> None:
        """Notes too how many tokens of the longer draft the target would have taken at this cycle."""
        super().commit(tokens, features, cycle)
        if cycle is not None:
            is_judged = cycle.tree.levels > 0 and cycle.rule in ("R0", "R1", "R2")
            length = oracle_length(cycle, self.tree, self.logits, self.generator) if is_judged else None
            self.lengths.append((length, self.tree.levels if is_judged else None))


def oracle_length(cycle: Cycle, tree: Tree, logits: Tensor, generator: torch.Generator) -> int:
    """How many tokens of a deeper tree, with the target's logits [N, V], the target takes, given what it did take.

    A sampled chain (R1) is a longer one's beginning: a refusal is the oracle's too, and after a chain that was wholly
    accepted the longer one's next tokens are judged. Where the target chooses (R0, R2) it is held to what it chose, and
    chooses anew from there on. Never less than what the policy had accepted, for that depth is the oracle's to choose.
    """
    accepted, start = cycle.verdict.accepted, len(cycle.tree)
    if cycle.rule == "R1":
        if accepted < cycle.tree.num_drafted:
            return accepted
        if not torch.equal(tree.tokens[:start], cycle.tree.tokens) or tree.proposal is None:
            return accepted  # a device that does not repeat its own arithmetic
        p = cycle.sampler.law(logits)  # [N, V]
        q = tree.proposal.over(p.shape[-1])  # [N, V]
        for node in range(start, len(tree)):
            drafted, uniform = tree.tokens[node], torch.rand((), generator=generator, device=p.device)
            if not bool(uniform * q[node - 1, drafted] < p[node - 1, drafted]):
                return node - 1
        return len(tree) - 1
    known = [*cycle.verdict.tokens, cycle.verdict.bonus]
    pairs = zip(tree.parents.tolist(), tree.tokens.tolist(), strict=True)
    children = {(parent, token): node for node, (parent, token) in enumerate(pairs) if node}
    node = depth = 0
    while True:
        if depth < len(known):
            token = known[depth]
        elif cycle.rule == "R0":
            token = int(cycle.sampler.choose(logits[node : node + 1]))
        else:
            token = int(cycle.sampler.law(logits[node : node + 1]).multinomial(1, generator=generator))
        if (node, token) not in children:
            return max(accepted, depth)
        node, depth = children[node, token], depth + 1


def analyse(recording: Recording, name: Callable[[int], str], bins: int = 20) -> dict[str, Any]:
    """The content of analysis.json but for the calibrator; name gives a token id's text.

    A part is null where nothing was recorded for it.
    """
    cycles, nodes, laws, frontier = (recording.tables[name] for name in ("cycles", "nodes", "laws", "frontier"))
    task_of = nodes.prompt.map(dict(enumerate(recording.tasks)))
    parts: dict[str, Any] = {"branches": None, "levels": None, "laws": None, "oracle": None}
    if len(frontier):
        outcomes = frontier.accepted.to_numpy(dtype=np.float64)
        parts["branches"] = reliability(frontier.survival.to_numpy(), outcomes, bins)
        parts["levels"] = {"by_depth": bounds.level_table(frontier, cycles)}
    if len(laws):
        parts["laws"] = {
            "inequalities": bounds.token_inequalities(laws),
            "deagle": bounds.deagle_bound(laws),
            "bounds": [bounds.acceptance_bounds(laws, c) for c in bounds.PAPER_CS],
            **bounds.entropy_ratio(laws),
            "entropy": bounds.entropy_by_outcome(laws, recording.tasks),
            "before_rejection": bounds.divergence_before_rejection(laws),
            "sorted": bounds.sorted_laws(laws),
            "tokens": bounds.token_table(laws, name),
        }
    if "oracle" in cycles:
        parts["oracle"] = bounds.oracle_summary(cycles)
    return {
        "schema": SCHEMA,
        "temperature": recording.temperature,
        "prompts": len(recording.tasks),
        "cycles": len(cycles),
        "by_depth": [{"depth": int(depth), **curve(part, bins)} for depth, part in nodes.groupby("depth")],
        "by_task": [{"task": task, **curve(nodes[task_of == task], bins)} for task in dict.fromkeys(recording.tasks)],
        "positions": bounds.by_place(nodes),
        **parts,
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
    eces = [f"{scores['held_out'][fit]['ece']:.4f} {fit}" for fit in ("before", *KINDS)]
    lines.append(
        f"calibrate: ECE on {scores['held_out_prompts']} prompts that the calibrator was not fitted on: "
        f"{', '.join(eces)}; decode by it with --tree.calibrated temperature or isotonic"
    )
    places = places_of(output, head)
    if len(places) > 1:
        calibrator = replace(calibrator, head=digests(places[1]))
    for place in places:
        save(calibrator, place)
    return lines


def places_of(output: Path, head: str | None) -> list[Path]:
    """Where files about a head go: the output directory, and beside the head where that is a directory."""
    return [output, *([Path(head)] if head is not None and Path(head).is_dir() else [])]


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
    acceptance, confidences = other.acceptance.to_numpy(), {"before": other.confidence.to_numpy()}
    with np.errstate(divide="ignore"):
        log_q = torch.from_numpy(np.log(confidences["before"])).float()
    for kind in KINDS:  # as decoding computes them
        confidences[kind] = calibrator.map(kind)(log_q).exp().double().numpy()
    scores, plain = {}, {}
    for name, confidence in confidences.items():
        sure = confidence.clip(FLOOR, 1.0 - FLOOR)
        loss = mean(-(acceptance * np.log(sure) + (1.0 - acceptance) * np.log1p(-sure)))
        table = reliability(confidence, acceptance, bins)
        plain[name] = {"ece": table["ece"], "brier": table["brier"], "log_loss": loss}
        scores[name] = {**plain[name], "bins": table["bins"]}
    return replace(calibrator, decoded_at=recording.temperature, scores=plain), {
        "temperature": calibrator.temperature,
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
    questions: Sequence[tuple[Tensor, str]],
    section: CalibrateConfig,
    output: Path,
) -> str | None:
    """One line about the tree of section.nodes nodes that suits the head best; null for a method without a static tree.

    Decodes the prompts greedily with a wide tree, and writes choices.yaml into the output directory and beside the
    head.
    """
    tree = asked.tree
    if not isinstance(tree, StaticConfig):
        return None
    wide = replace(asked, tree=replace(tree, choices=probe(tree, section.ranks)), typical=None)
    decoder = make_decoder(Drafters(target), wide, head, "calibrate")
    recording = record(decoder, None, questions, replace(section, temperature=0.0))
    choices = rebuilt(tree, rank_accuracy(recording.tables, tree.levels, section.ranks), section.nodes)
    places = places_of(output, head)
    origin = f"for {asked.method}, rebuilt by `calibrate` from this head's own rank accuracies"
    about = f"# {len(choices)} drafted nodes {origin}."
    for place in places:
        write_text(place / CHOICES, "\n".join([about, "choices:", *(f"  - {list(choice)}" for choice in choices), ""]))
    return (
        f"{asked.method}: a tree of {len(choices)} drafted nodes rebuilt from the head's ranks; "
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

    accuracy[depth][rank] is how often the child of this rank is the target's token, given that its parent was; depth 0
    is the root's children. Greedily adds the node with the largest product of accuracies along its path. Where siblings
    are drawn, a tree may not leave a rank out before another: then no rank counts as better than those before it.
    Source: Medusa (arXiv 2401.10774), section 2.3.3.
    """
    if tree.children != "best":
        accuracy = [list(accumulate(shares, min)) for shares in accuracy]
    choices: list[Choice] = []
    heap: list[tuple[float, int, Choice]] = [(-1.0, 0, ())]
    while heap and len(choices) < (nodes or tree.nodes):
        chance, depth, choice = heapq.heappop(heap)
        choices.append(choice)
        for rank, share in enumerate(accuracy[depth] if depth < len(accuracy) else ()):
            if share > 0:
                heapq.heappush(heap, (chance * share, depth + 1, (*choice, rank)))
    return tuple(sorted(choices[1:], key=lambda choice: (len(choice), choice)))
