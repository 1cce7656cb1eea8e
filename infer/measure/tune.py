"""Finds the fastest method for a run's heads on this machine.

For greedy decoding it replays fixed trees from recorded drafts, decodes with stop rules, and times
the best of both. Sampled answers change with the tree, so at a temperature it times every tree.
Several processes share the decoding, but the first process alone times trees beside each other.
"""

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import chain, groupby
from pathlib import Path
from typing import Any

import yaml
from torch import Tensor

from aerie.configs.errors import UserError, rank
from aerie.configs.read import as_dict, read_yaml
from aerie.configs.schema.decode import (
    METHODS,
    USUAL,
    ChainConfig,
    ConfidenceConfig,
    ConstantConfig,
    DynamicConfig,
    EntropyConfig,
    ExactConfig,
    MarginalGainConfig,
    Method,
    MethodConfig,
    ProbabilitySumConfig,
    StopConfig,
    VoteConfig,
    published_tree,
)
from aerie.configs.schema.heads import KINDS
from aerie.configs.schema.measure import BenchConfig, SamplingConfig, TuneConfig
from aerie.infer.decode.calibrator import calibrate_of
from aerie.infer.decode.engine import SpeculativeDecoder, Statistics
from aerie.infer.decode.loaded_heads import LoadedHeads
from aerie.infer.decode.proposers import tree_proposer
from aerie.infer.decode.runners import mode_of
from aerie.infer.measure.bench import (
    Bench,
    describe_machine,
    forget_answers,
    measure_answers,
)
from aerie.infer.measure.prices import (
    Costs,
    cycle_ms,
    measure_costs,
    time_in_turns,
)
from aerie.infer.measure.replay import (
    CycleCounts,
    GrownConfig,
    count_cycles,
    path_ranks,
    record_drafts,
    replay_tree,
)
from aerie.infer.measure.shares import by_first, gather, my_share
from aerie.infer.measure.statistics import Group, group, speedups, summary_row
from aerie.infer.measure.suite import SettledRow, Suite
from aerie.infer.measure.tasks import check_sources, encode_turn, load_prompts
from aerie.infer.measure.tree_shape import tree_shape
from aerie.model.hub import head_directory
from aerie.model.storage import CALIBRATOR, write_json, write_text
from aerie.model.target import Target

CONSTANT = ConstantConfig()
TUNED = "tuned.yaml"
SEARCH = read_yaml(Path(__file__).with_name("tune.yaml"))[0]
CHOICE_ROW = 1  # the choice among `rows_to_measure`; vanilla is row 0


@dataclass(frozen=True)
class Prediction:
    """The predicted tau and speed of a method with this tree."""

    method: Method
    tree: GrownConfig
    tau: float
    ms_per_token: float
    speedup: float

    @property
    def row(self) -> MethodConfig:
        return MethodConfig(self.method, self.tree)

    def facts(self) -> dict[str, Any]:
        """The prediction as in tune.json; a chain has k and nodes there, too."""
        tree = {**as_dict(self.tree), "k": self.tree.k, "nodes": self.tree.nodes}
        return {**as_dict(self), "tree": tree, "name": row_name(self.row)}


def fastest_first(predictions: Iterable[Prediction]) -> list[Prediction]:
    return sorted(predictions, key=lambda prediction: prediction.ms_per_token)


def row_name(row: MethodConfig) -> str:
    """The method and its tree in the words of the report: 'eagle2, 6 levels, k 8, 16 nodes'."""
    tree = tree_shape(row)
    return row.method if tree is None else f"{row.method}, {tree.words}"


def check_apart(config: TuneConfig) -> None:
    """Raises UserError if tune.measure and tune.prompts share a prompt."""
    check_sources(config.measure or config.prompts)
    if config.measure is None:
        return
    texts = {prompt.turns[0] for prompt in load_prompts(config.prompts)}
    for prompt in load_prompts(config.measure):
        if prompt.turns[0] in texts:
            raise UserError(
                f"tune.measure: prompt {prompt.prompt_id!r} is in tune.prompts too; "
                "measure on other prompts"
            )


# --- the trees that are tried ---


def sized_tree(levels: int, k: int, nodes: int, stop: StopConfig = CONSTANT) -> GrownConfig:
    if k == 1:
        return ChainConfig(levels=levels)
    return DynamicConfig(levels=levels, k=k, nodes=nodes, stop=stop)


def method_of(kind: str, tree: GrownConfig) -> Method:
    """The kind's method whose published tree has this shape and stop rule, or else this shape."""
    methods = {}  # stop rule -> method
    for method in KINDS[kind].methods:
        published = METHODS[method].tree
        if published and published["shape"] == tree.shape:
            methods[published["stop"]["rule"]] = method
    return methods.get(tree.stop.rule) or methods.get("constant", USUAL[kind])


def trees_up_to(levels: int, k: int, stop: StopConfig) -> list[GrownConfig]:
    """Every fixed tree to replay; trees with the same levels and k are neighbours."""
    trees: list[GrownConfig] = []
    for depth in range(1, levels + 1):
        trees.append(ChainConfig(levels=depth))
        for width in range(2, k + 1):
            most = 1 + width + (depth - 1) * width * width  # nodes before reranking drops some
            for nodes in SEARCH["nodes"]:
                if nodes <= most:
                    trees.append(sized_tree(depth, width, nodes, stop))
    return trees


def sampled_trees(levels: int, k: int, stop: StopConfig) -> list[GrownConfig]:
    """The trees to time at a temperature: chains, trees of the best children, of drawn ones."""
    best = [
        sized_tree(min(depth, levels), min(width, k), nodes, stop)
        for depth, width, nodes in SEARCH["sampled"]
    ]
    drawn = [replace(tree, children="sampled") for tree in best if isinstance(tree, DynamicConfig)]
    return list(dict.fromkeys([*best, *drawn]))  # small levels and k make some trees equal


def rules_for(kind: str, tree: GrownConfig, levels: int) -> list[GrownConfig]:
    """The fixed tree, allowed to grow to `levels`, with every stop rule at every threshold."""
    is_tree = tree.shape != "chain"  # on a chain the two rules of trees decide like votes
    checks = tuple(depth for depth in SEARCH["checks"] if depth < levels)
    stops: list[StopConfig] = [EntropyConfig(h=h) for h in SEARCH["entropy_thresholds"]]
    for threshold in SEARCH["thresholds"]:
        if kind == "draft_lm":
            stops.append(ConfidenceConfig(threshold=threshold))
        else:
            stops.append(VoteConfig(probability_threshold=threshold))
        if is_tree:
            stops.append(MarginalGainConfig(threshold=threshold))
        if is_tree and checks:
            stops.append(ProbabilitySumConfig(checks=checks, threshold=threshold))
    if is_tree and tree.stop.rule == "constant":
        stops.append(ExactConfig())
    return [replace(tree, levels=levels, stop=stop) for stop in stops]


# --- the search for one head ---


class HeadTuning:
    """The search for one head: `search` ranks fixed trees, `refine` times the best and chooses."""

    costs: Costs
    published: Prediction  # of the head's usual method
    choice: Prediction  # the best so far

    def __init__(
        self, target: Target, kind: str, head: str, prompts: Sequence[Tensor], config: TuneConfig
    ) -> None:
        """prompts: token ids [1, T] each."""
        self.target = target
        self.kind = kind
        self.head = head
        self.prompts = prompts
        self.drafter = LoadedHeads(target).of(head)
        self.config = replace(config, levels=min(config.levels, self.drafter.max_levels))
        self.k = 1 if kind == "draft_lm" else config.k  # all methods of a draft LM are chains
        self.max_new_tokens = config.prompts.max_new_tokens
        # On a CPU a rule's answer can be read at once, so the exact rule saves levels for free.
        is_read = mode_of(target) == "eager" and target.device.type == "cpu"
        self.stop: StopConfig = ExactConfig() if is_read else CONSTANT
        self.fixed: Prediction | None = None  # the best tree without a threshold, once timed
        self.trees: list[Prediction] = []  # fixed trees, the fastest first
        self.rules: list[Prediction] = []  # trees with a stop rule, the fastest first

    def search(self) -> None:
        """Measures the costs; sets `trees`, `choice` and `published`."""

    def refine(self) -> None:
        """Times the best candidates; sets `fixed` and `choice`."""

    def usual_tree(self) -> GrownConfig:
        """The published tree, cut to the search's levels and k."""
        tree = published_tree(USUAL[self.kind])
        tree = replace(tree, levels=min(tree.levels, self.config.levels))
        if isinstance(tree, DynamicConfig):
            tree = replace(tree, k=min(tree.k, self.k))
        return tree

    def decoder(self, tree: GrownConfig) -> SpeculativeDecoder:
        calibrate = calibrate_of(tree.calibrated, self.head)
        return SpeculativeDecoder(self.target, tree_proposer(self.drafter, tree, calibrate))

    def time_trees(
        self,
        trees: Sequence[GrownConfig],
        prompts: Sequence[Tensor],
        repetitions: int,
        label: str,
    ) -> list[list[Statistics]]:
        """Statistics of the target's own answers, then of each tree's, at the tuned temperature."""
        decoders = [SpeculativeDecoder(self.target), *map(self.decoder, trees)]
        arguments = (decoders, prompts, repetitions, label)
        return by_first(
            partial(time_in_turns, *arguments, self.max_new_tokens, self.config.temperature)
        )

    def measure_costs(self) -> Costs:
        arguments = (self.target, self.drafter, self.prompts, self.max_new_tokens)
        return by_first(partial(measure_costs, *arguments))

    def facts(self) -> dict[str, Any]:
        """tune.json's entry of this head."""
        return {
            "kind": self.kind,
            "head": self.head,
            "costs_ms": asdict(self.costs),
            "choice": self.choice.facts(),
            "published": self.published.facts(),
            "fixed": self.fixed and self.fixed.facts(),
            "trees": [prediction.facts() for prediction in self.trees],
            "rules": [prediction.facts() for prediction in self.rules],
        }


class GreedyTuning(HeadTuning):
    """Replays all fixed trees from recorded greedy answers, then tries stop rules on the best."""

    def search(self) -> None:
        if rank() == 0:
            print(
                f"tune: {self.kind}: tries every tree of up to {self.config.levels} levels and k "
                f"{self.k} on {len(self.prompts)} answers of up to {self.max_new_tokens} tokens, "
                "then stop rules",
                file=sys.stderr,
                flush=True,
            )
        self.drafts = record_drafts(
            self.target,
            self.drafter,
            self.prompts,
            self.config.levels,
            self.k,
            self.max_new_tokens,
        )
        self.costs = self.measure_costs()
        trees = trees_up_to(self.config.levels, self.k, self.stop)
        self.trees = self.replay(trees)[: SEARCH["shown"]]
        self.choice = self.trees[0]
        (self.published,) = self.replay([self.usual_tree()])

    def replay(self, trees: Iterable[GrownConfig]) -> list[Prediction]:
        """Predictions for fixed trees, the fastest first.

        Trees with the same levels and k must be neighbours, as they share a pass over the drafts.
        """
        predictions = []
        for (levels, k), alike in groupby(trees, key=lambda tree: (tree.levels, tree.k)):
            path = path_ranks(self.drafts, levels, k)
            for tree in alike:
                predictions.append(self.predict(tree, replay_tree(self.drafts, path, tree)))
        return fastest_first(predictions)

    def decode(self, trees: Iterable[GrownConfig], prompts: Sequence[Tensor]) -> list[Prediction]:
        """Decodes with each tree and prices its cycles; returns predictions, the fastest first."""
        predictions = []
        for tree in trees:
            decoder = self.decoder(tree)
            answers = []
            for ids in my_share(prompts):
                answer = decoder.generate(ids, max_new_tokens=self.max_new_tokens, do_sample=False)
                answers.append(answer.statistics)
            everyones = list(chain.from_iterable(gather(answers)))
            predictions.append(self.predict(tree, count_cycles(everyones)))
        return fastest_first(predictions)

    def predict(self, tree: GrownConfig, counts: CycleCounts) -> Prediction:
        ms = self.costs.price(counts, tree.k) / max(counts.tokens, 1)
        method = method_of(self.kind, tree)
        return Prediction(method, tree, counts.tau, ms, self.costs.plain / ms)

    def refine(self) -> None:
        """Times the best stop rules beside the best fixed trees and the published tree."""
        fixed = self.trees[: SEARCH["fixed"]]
        timed = self.time_again([*fixed, self.published, *self.best_rules()])
        self.fixed = fastest_first(timed[: len(fixed)])[0]
        self.published = timed[len(fixed)]
        self.rules = fastest_first(timed[len(fixed) + 1 :])
        self.choice = self.fixed
        if self.rules and self.rules[0].ms_per_token * SEARCH["worth"] < self.fixed.ms_per_token:
            self.choice = self.rules[0]

    def best_rules(self) -> list[Prediction]:
        few = self.prompts[: SEARCH["screening_prompts"]]
        rules = self.decode(rules_for(self.kind, self.trees[0].tree, self.config.levels), few)
        if (head_directory(self.head) / CALIBRATOR).is_file():
            best = rules[: SEARCH["calibrated"]]
            calibrated = [replace(rule.tree, calibrated="isotonic") for rule in best]
            rules = fastest_first([*rules, *self.decode(calibrated, few)])
        finalists = rules[: SEARCH["finalists"]]
        predictions = self.decode([rule.tree for rule in finalists], self.prompts)
        if mode_of(self.target) == "captured":  # here the host waits for each answer of a rule
            late = [
                replace(rule.tree, stop_read="late")
                for rule in finalists
                if isinstance(rule.tree, DynamicConfig)
            ]
            predictions += self.decode(late, self.prompts)
        return predictions

    def time_again(self, predictions: Sequence[Prediction]) -> list[Prediction]:
        """The predictions with measured times; tau stays, because more prompts gave it.

        The predicted times leave out what a stop rule and a calibrator take, and what a cycle
        costs because its tree differs from the last one.
        """
        prompts = self.prompts[: SEARCH["timed_prompts"]]
        trees = [prediction.tree for prediction in predictions]
        plain, *drafted = self.time_trees(trees, prompts, SEARCH["timed_repetitions"], "finalists")
        timed = []
        for prediction, answers in zip(predictions, drafted, strict=True):
            ms = cycle_ms(answers) / prediction.tau
            timed.append(replace(prediction, ms_per_token=ms, speedup=cycle_ms(plain) / ms))
        return timed


class SampledTuning(HeadTuning):
    """Times every tree at the tuned temperature.

    `search` times all trees on some of the prompts, `refine` times the best again on all prompts.
    """

    def search(self) -> None:
        self.costs = self.measure_costs()
        trees = [self.usual_tree(), *sampled_trees(self.config.levels, self.k, self.stop)]
        self.published, *predictions = self.time(
            trees, self.prompts[: SEARCH["sampled_prompts"]], "trees"
        )
        self.trees = fastest_first(predictions)
        self.choice = self.trees[0]

    def refine(self) -> None:
        best = [self.published, *self.trees[: SEARCH["sampled_finalists"]]]
        timed = self.time([prediction.tree for prediction in best], self.prompts, "finalists")
        self.published = timed[0]
        self.fixed = fastest_first(timed)[0]
        self.choice = self.fixed

    def time(
        self, trees: Sequence[GrownConfig], prompts: Sequence[Tensor], label: str
    ) -> list[Prediction]:
        plain, *drafted = self.time_trees(trees, prompts, 1, label)
        predictions = []
        for tree, answers in zip(trees, drafted, strict=True):
            tau = count_cycles(answers).tau
            speedup = tau * cycle_ms(plain) / cycle_ms(answers)
            ms = self.costs.plain / speedup  # per token
            predictions.append(Prediction(method_of(self.kind, tree), tree, tau, ms, speedup))
        return predictions


# --- the command ---


def run_tuning(
    heads: Mapping[str, str],
    config: TuneConfig,
    output: Path,
    seed: int,
    target: Target,
    tokenizer: Any,
) -> dict[str, Any]:
    """Writes tune.json, and the fastest method as tuned.yaml; returns no facts.

    heads: their directories by kind.
    """
    prompts = [
        encode_turn(prompt, (), tokenizer, target) for prompt in load_prompts(config.prompts)
    ]
    make_tuning = SampledTuning if config.temperature > 0 else GreedyTuning
    tunings = []
    for kind, head in heads.items():
        tuning = make_tuning(target, kind, head, prompts, config)
        tuning.search()
        tunings.append(tuning)
    best = max(tunings, key=lambda tuning: tuning.choice.speedup)
    best.refine()
    if rank() == 0:
        write_choice(best, tunings, output)
    measure_choice(best, tokenizer, config, output, seed)
    return {}


def write_choice(best: HeadTuning, tunings: Sequence[HeadTuning], output: Path) -> None:
    choice = best.choice
    published = best.published
    line = (
        f"{best.kind}: {row_name(choice.row)}: predicted tau {choice.tau:.2f}, speedup "
        f"{choice.speedup:.2f} (published tree: {published.tau:.2f}, {published.speedup:.2f})"
    )
    print(f"tune: {line}", flush=True)
    tree = {key: value for key, value in as_dict(choice.tree).items() if value is not None}
    row = {"method": choice.method, "head": best.head, "tree": tree}
    chosen = yaml.safe_dump(row, sort_keys=False)
    device = describe_machine(best.target)["device"]
    write_text(output / TUNED, f"# tuned on {device}: {line}\n{chosen}")
    print(
        f"tune: wrote {output / TUNED}; use it with generate --row FILE or bench --row FILE",
        flush=True,
    )
    facts = {
        "chosen": best.kind,
        "temperature": best.config.temperature,
        "heads": [tuning.facts() for tuning in tunings],
    }
    write_json(output / "tune.json", facts)


def rows_to_measure(
    kind: str, choice: MethodConfig, grid: bool, max_levels: int = 2**31
) -> list[MethodConfig]:
    """Vanilla, the choice and the published row; with `grid` also trees a user tries by hand."""
    rows = [MethodConfig.of("vanilla"), choice, MethodConfig.of(USUAL[kind])]
    for levels, k, nodes in SEARCH["grid"] if grid else ():
        if levels <= max_levels and (k == 1 or kind != "draft_lm"):
            tree = sized_tree(levels, k, nodes)
            rows.append(MethodConfig(method_of(kind, tree), tree))
    return rows


def measure_choice(
    tuning: HeadTuning, tokenizer: Any, config: TuneConfig, output: Path, seed: int
) -> None:
    """Writes measured.json, the speed of each row on tune.measure, if the recipe sets that key."""
    if config.measure is None:
        return
    rows = rows_to_measure(tuning.kind, tuning.choice.row, config.grid, tuning.drafter.max_levels)
    section = BenchConfig(
        prompts=config.measure, rows=tuple(rows), sampling=(SamplingConfig(config.temperature),)
    )
    vanilla, *drafting_rows = rows
    settled = [SettledRow(row, tuning.head, tuning.kind) for row in drafting_rows]
    suite = Suite(section, (SettledRow(vanilla), *settled))
    bench = Bench.open(tuning.target, tokenizer, suite, output / "bench")
    by_first(partial(forget_answers, output / "bench"))
    records = measure_answers(bench, load_prompts(config.measure), seed)
    if rank() > 0:
        return
    groups = {members.first.row: members for members in group(records)}
    measured = []
    for number, row in enumerate(rows):
        measured.append(measured_row(row, groups[number], groups[CHOICE_ROW], seed))
    tau = measured[CHOICE_ROW]["tau"]
    speedup = measured[CHOICE_ROW]["speedup"]
    facts = {
        "names": [row_name(row) for row in rows],
        "rows": measured,
        "predicted_over_measured": tuning.choice.speedup / speedup if speedup else None,
        "predicted_tau_over_measured": tuning.choice.tau / tau if tau else None,
    }
    write_json(output / "measured.json", facts)
    print(
        f"measured: tau {tau or 0:.2f} (predicted {tuning.choice.tau:.2f}), "
        f"speedup {speedup or 0:.2f}"
    )


def measured_row(row: MethodConfig, members: Group, choice: Group, seed: int) -> dict[str, Any]:
    figures = summary_row(members, seed)
    # the choice's speed relative to this row, whose answers therefore serve as the baseline
    answers = {record.prompt_key: record for record in members.records if record.status == "ok"}
    relative = speedups(replace(choice, baseline=answers).pairs, seed)
    return {
        "method": as_dict(row),
        "tau": figures.tau,
        "speedup": figures.speedup,
        "speedup_ci95": figures.speedup_ci95,
        "chosen_against_it": relative["speedup"],
        "chosen_against_it_ci95": relative["speedup_ci95"],
    }
