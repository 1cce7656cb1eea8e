"""Finds the fastest method for a run's heads: replays fixed trees from recorded drafts, decodes and times the rest."""

import statistics
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby, product
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from torch import Tensor

from aerie.configs.errors import UserError
from aerie.configs.read import as_dict, read_yaml
from aerie.configs.schema import decode as schema
from aerie.configs.schema.decode import (
    USUAL,
    ChainConfig,
    DynamicConfig,
    Method,
    MethodConfig,
    StopConfig,
)
from aerie.configs.schema.heads import KINDS
from aerie.configs.schema.measure import BenchConfig, SamplingConfig, TuneConfig
from aerie.data.progress import start_progress
from aerie.infer.decode.engine import SpeculativeDecoder, Statistics
from aerie.infer.decode.graphs import cycle_of
from aerie.infer.decode.methods import Drafters, calibrate_of, drafting
from aerie.infer.decode.shape import Drafter
from aerie.infer.measure.bench import CYCLE_PHASES, Bench, describe, make_decoders, run
from aerie.infer.measure.bench_files import RECORDS
from aerie.infer.measure.replay import Cycles, counted, path_ranks, record, replayed
from aerie.infer.measure.statistics import group, speedups, summary_row
from aerie.infer.measure.suite import suite_of
from aerie.infer.measure.tasks import check_sources, encode_turn, load_prompts
from aerie.infer.measure.tree_shape import tree_shape
from aerie.model.hub import head_directory
from aerie.model.storage import CALIBRATOR, write_json, write_text
from aerie.model.target import Target

CONSTANT = schema.ConstantConfig()
GrownConfig = ChainConfig | DynamicConfig  # trees whose depth can be searched
TUNED = "tuned.yaml"
SEARCH = read_yaml(Path(__file__).with_name("tune.yaml"))[0]


@dataclass(frozen=True)
class Costs:
    """Milliseconds of one cycle's parts; k and nodes in between are interpolated."""

    draft: dict[int, tuple[float, float]]  # by k: the first level, and each further one
    verify: dict[int, float]  # v(N) by nodes: a target forward over them with the choice among them
    rest: float  # what a drafting cycle costs beside them (committing)
    plain: float  # a whole cycle without drafting

    def price(self, total: Cycles, k: int, nodes: float) -> float:
        widths, counts = sorted(self.draft), sorted(self.verify)
        first, further = (
            np.interp(k, widths, [self.draft[width][part] for width in widths]) for part in (0, 1)
        )
        verify, idle = np.interp([nodes, 1], counts, [self.verify[count] for count in counts])
        ms = (
            total.draft_trees * (first + verify)
            + max(total.draft_levels - total.draft_trees, 0) * further
        )
        ms += (total.target_forwards - total.draft_trees) * idle + total.target_forwards * self.rest
        return float(ms)


def in_turns(
    decoders: Sequence[SpeculativeDecoder],
    prompts: Sequence[Tensor],
    repetitions: int,
    name: str,
    new: int,
    temperature: float = 0.0,
) -> list[list[Statistics]]:
    """Answers of each decoder to prompts [1, T]; decoders take turns, so other work on the machine slows all alike.

    Answers are as long as the replayed ones, up to `timed_tokens`: an answer's last trees are short, and cost less.
    """
    sampling: dict[str, Any] = asdict(SamplingConfig(temperature))
    generator = torch.Generator(decoders[0].target.device).manual_seed(0)
    settings = {
        "max_new_tokens": min(new, SEARCH["timed_tokens"]),
        **sampling,
        "generator": generator,
        "timed": True,
    }
    for decoder in decoders:
        decoder.generate(prompts[0], **{**settings, "max_new_tokens": 12})
    turns: list[list[Statistics]] = [[] for _ in decoders]
    with start_progress(repetitions * len(prompts), "turns", name) as progress:
        for repetition, prompt in product(range(repetitions), prompts):
            for offset in range(len(decoders)):  # each repetition begins with another decoder
                place = (repetition + offset) % len(decoders)
                turns[place].append(decoders[place].generate(prompt, **settings).statistics)
            progress.update()
    return turns


def cycle_ms(answers: Sequence[Statistics], phases: Sequence[str] = CYCLE_PHASES) -> float:
    """Milliseconds of these phases of a mean decoding cycle: the median over answers."""
    return statistics.median(
        sum(one.ms[name] for name in phases) / max(one.target_forwards, 1) for one in answers
    )


def measure_costs(target: Target, drafter: Drafter, prompts: Sequence[Tensor], new: int) -> Costs:
    """What a drafter's trees cost on the first prompts [1, T]: medians over answers."""
    sizes = (
        (min(levels, drafter.max_levels), k, nodes) for levels, k, nodes in SEARCH["timed_trees"]
    )
    trees = [DynamicConfig(levels=levels, k=k, nodes=nodes) for levels, k, nodes in sizes]
    decoders = [
        SpeculativeDecoder(target),
        *(SpeculativeDecoder(target, drafting(drafter, tree)) for tree in trees),
    ]
    plain, *others = in_turns(
        decoders, prompts[: SEARCH["cost_prompts"]], SEARCH["cost_repetitions"], "costs", new
    )
    draft = {}
    for at in range(0, len(trees), 2):  # a width's shallow and deep tree
        pair = others[at : at + 2]
        levels = [
            statistics.mean(one.draft_levels / one.target_forwards for one in answers)
            for answers in pair
        ]
        times = [cycle_ms(answers, ["draft"]) for answers in pair]
        slope = max(float(np.polyfit(levels, times, 1)[0]), 0.0)
        draft[trees[at].k] = (
            float(np.mean(np.array(times) - slope * (np.array(levels) - 1))),
            slope,
        )
    verify = np.array([cycle_ms(answers, ["verify"]) for answers in (plain, *others)])
    # the middle between the rising curves around the values: more nodes never cost less
    verify = (np.maximum.accumulate(verify) + np.minimum.accumulate(verify[::-1])[::-1]) / 2
    by_nodes = dict(zip([1, *(tree.nodes for tree in trees)], verify.tolist(), strict=True))
    drafting_answers = [one for answers in others for one in answers]
    return Costs(draft, by_nodes, cycle_ms(drafting_answers, ["commit", "other"]), cycle_ms(plain))


@dataclass(frozen=True)
class Prediction:
    """What a method's tree is predicted to do."""

    method: Method
    tree: GrownConfig
    tau: float
    ms_per_token: float
    speedup: float


def check_apart(config: TuneConfig) -> None:
    """UserError where a prompt of tune.measure is one of tune.prompts."""
    check_sources(config.measure or config.prompts)
    texts = {prompt.turns[0] for prompt in load_prompts(config.prompts)}
    for prompt in load_prompts(config.measure) if config.measure else []:
        if prompt.turns[0] in texts:
            raise UserError(
                f"tune.measure: prompt {prompt.prompt_id!r} is in tune.prompts too; measure on others"
            )


def tree_with(levels: int, k: int, nodes: int, stop: StopConfig = CONSTANT) -> GrownConfig:
    return (
        ChainConfig(levels=levels)
        if k == 1
        else DynamicConfig(levels=levels, k=k, nodes=nodes, stop=stop)
    )


def method_of(kind: str, tree: GrownConfig) -> Method:
    """The kind's method with the tree's shape and stop rule, else with its shape."""
    published = {name: schema.METHODS[name].tree or {} for name in KINDS[kind].methods}
    named = {
        own["stop"]["rule"]: name for name, own in published.items() if own["shape"] == tree.shape
    }
    return named.get(tree.stop.rule) or named.get("constant", USUAL[kind])


def trees_up_to(levels: int, k: int, stop: StopConfig) -> Iterator[GrownConfig]:
    for depth in range(1, levels + 1):
        yield ChainConfig(levels=depth)
        for width in range(2, k + 1):
            most = 1 + width + (depth - 1) * width * width
            yield from (
                tree_with(depth, width, nodes, stop) for nodes in SEARCH["nodes"] if nodes <= most
            )


def sampled_trees(levels: int, k: int, stop: StopConfig) -> list[GrownConfig]:
    """The trees tried where tokens are sampled: chains, and trees of the best and of drawn children."""
    sizes = [
        (min(depth, levels), min(width, k), nodes) for depth, width, nodes in SEARCH["sampled"]
    ]
    trees = [tree_with(*each, stop) for each in sizes]
    drawn = [replace(tree, children="sampled") for tree in trees if isinstance(tree, DynamicConfig)]
    return [*dict.fromkeys([*trees, *drawn])]


def rules_for(kind: str, tree: GrownConfig, levels: int) -> list[GrownConfig]:
    """A fixed tree with room to grow to `levels`, with every stop rule at every threshold."""
    thresholds, checks = (
        SEARCH["thresholds"],
        tuple(depth for depth in SEARCH["checks"] if depth < levels),
    )
    stops: list[StopConfig] = [schema.EntropyConfig(h=h) for h in SEARCH["entropy_thresholds"]]
    if kind == "draft_lm":
        stops += [schema.ConfidenceConfig(threshold=value) for value in thresholds]
    else:
        stops += [schema.VoteConfig(probability_threshold=value) for value in thresholds]
    if tree.shape != "chain":  # on a chain they are votes
        stops += [
            schema.ProbabilitySumConfig(checks=checks, threshold=value)
            for value in thresholds
            if checks
        ]
        stops += [schema.MarginalGainConfig(threshold=value) for value in thresholds]
        stops += [schema.ExactConfig()] * (tree.stop.rule == "constant")
    return [replace(tree, levels=levels, stop=stop) for stop in stops]


class HeadTuning:
    """The search for one head; `choice` is the best so far."""

    def __init__(
        self, target: Target, kind: str, head: str, prompts: Sequence[Tensor], config: TuneConfig
    ) -> None:
        """Replays all fixed trees from greedy answers to prompts [1, T]; if tokens are sampled, times some."""
        self.drafter = Drafters(target).of(head)
        config = replace(config, levels=min(config.levels, self.drafter.max_levels))
        self.target, self.kind, self.head, self.prompts, self.config = (
            target,
            kind,
            head,
            prompts,
            config,
        )
        self.max_new_tokens = config.prompts.max_new_tokens
        k = 1 if kind == "draft_lm" else config.k  # its methods are chains
        usual = schema.published_tree(USUAL[kind])
        narrower = {"k": min(usual.k, k)} if isinstance(usual, DynamicConfig) else {}
        usual = replace(usual, levels=min(usual.levels, config.levels), **narrower)
        # where a rule's answer costs next to nothing, levels that the tree cannot keep are not drafted
        is_read = cycle_of(target) == "eager" and target.device.type == "cpu"
        self.stop: StopConfig = schema.ExactConfig() if is_read else CONSTANT
        self.rules: list[Prediction] = []
        self.fixed: Prediction | None = (
            None  # the best tree without a threshold; None: nothing was timed
        )
        if config.temperature > 0:
            self.costs = measure_costs(target, self.drafter, prompts, self.max_new_tokens)
            few = prompts[: SEARCH["sampled_prompts"]]
            tried = [usual, *sampled_trees(config.levels, k, self.stop)]
            self.published, *trees = self.timed(tried, few, "trees")
            self.trees = sorted(trees, key=lambda one: one.ms_per_token)
            self.choice = self.trees[0]
            return
        self.announce(k)
        self.recording = record(
            target, self.drafter, prompts, config.levels, k, self.max_new_tokens
        )
        self.costs = measure_costs(target, self.drafter, prompts, self.max_new_tokens)
        every = self.replay(trees_up_to(config.levels, k, self.stop))
        self.trees = every[: SEARCH["shown"]]
        (self.published,) = self.replay([usual])
        self.choice = self.trees[0]

    def announce(self, k: int) -> None:
        """Says what will be tried, and about how long it takes, from an answer with the widest tree."""
        levels, new, asked = self.config.levels, self.max_new_tokens, len(self.prompts)
        widest = tree_with(levels, k, SEARCH["nodes"][-1], self.stop)
        for ids in self.prompts[:2]:  # the first warms up
            answer = (
                self.decoder(widest).generate(ids, max_new_tokens=new, do_sample=False).statistics
            )
        rules = len(rules_for(self.kind, widest, levels))
        answers = asked * (answer.tau + SEARCH["finalists"])
        answers += (rules + SEARCH["calibrated"]) * SEARCH["screening_prompts"]
        answers += (
            (1 + len(SEARCH["timed_trees"])) * SEARCH["cost_prompts"] * SEARCH["cost_repetitions"]
        )
        what = f"every tree of up to {levels} levels and k {k} on {asked} answers of up to {new} tokens"
        minutes = f"about {answers * answer.ms['wall'] / 60_000:.1f} min"
        print(
            f"tune: {self.kind}: {what}, then {rules} stop rules; {minutes}",
            file=sys.stderr,
            flush=True,
        )

    def decoder(self, tree: GrownConfig) -> SpeculativeDecoder:
        calibrate = calibrate_of(tree.calibrated, self.head)
        return SpeculativeDecoder(self.target, drafting(self.drafter, tree, calibrate))

    def predicted(self, tree: GrownConfig, total: Cycles, nodes: float) -> Prediction:
        ms = self.costs.price(total, tree.k, nodes) / max(total.tokens, 1)
        return Prediction(method_of(self.kind, tree), tree, total.tau, ms, self.costs.plain / ms)

    def replay(self, trees: Iterable[GrownConfig]) -> list[Prediction]:
        """Predictions of fixed trees, the fastest first; trees of like levels and k must be neighbours."""
        predictions = []
        for (levels, k), alike in groupby(trees, key=lambda tree: (tree.levels, tree.k)):
            path = path_ranks(self.recording, levels, k)
            for tree in alike:
                total = replayed(
                    self.recording, path, levels, tree.nodes, tree.stop.rule == "exact"
                )
                predictions.append(self.predicted(tree, total, tree.nodes))
        return sorted(predictions, key=lambda one: one.ms_per_token)

    def decoded(self, trees: Iterable[GrownConfig], prompts: Sequence[Tensor]) -> list[Prediction]:
        """Predictions of decoded trees, priced at the costs, the fastest first."""
        predictions, new = [], self.max_new_tokens
        for tree in trees:
            decoder = self.decoder(tree)
            answers = [
                decoder.generate(ids, max_new_tokens=new, do_sample=False).statistics
                for ids in prompts
            ]
            predictions.append(self.predicted(tree, *counted(answers)))
        return sorted(predictions, key=lambda one: one.ms_per_token)

    def timed(
        self, trees: Sequence[GrownConfig], prompts: Sequence[Tensor], name: str
    ) -> list[Prediction]:
        """Predictions of trees, timed in turn with the target alone, at the temperature that is tuned for."""
        decoders = [SpeculativeDecoder(self.target), *map(self.decoder, trees)]
        plain, *others = in_turns(
            decoders, prompts, 1, name, self.max_new_tokens, self.config.temperature
        )
        predictions = []
        for tree, answers in zip(trees, others, strict=True):
            tau, dear = counted(answers)[0].tau, cycle_ms(answers) / cycle_ms(plain)
            ms = dear * self.costs.plain
            predictions.append(
                Prediction(method_of(self.kind, tree), tree, tau, ms / tau, tau / dear)
            )
        return predictions

    def try_rules(self) -> None:
        """Tries stop rules on the best fixed tree; times the best rules, that tree and the published one.

        Where tokens are sampled there are no rules: the best trees on few prompts are timed on all.
        """
        best = self.trees[0]
        if self.config.temperature > 0:
            again = [
                one.tree for one in (self.published, *self.trees[: SEARCH["sampled_finalists"]])
            ]
            self.published, *finalists = self.timed(again, self.prompts, "finalists")
            self.choice = self.fixed = min(
                [self.published, *finalists], key=lambda one: one.ms_per_token
            )
            return
        few = self.prompts[: SEARCH["screening_prompts"]]
        screened = self.decoded(rules_for(self.kind, best.tree, self.config.levels), few)
        if (head_directory(self.head) / CALIBRATOR).is_file():
            again = [
                replace(one.tree, calibrated="isotonic") for one in screened[: SEARCH["calibrated"]]
            ]
            screened = sorted(screened + self.decoded(again, few), key=lambda one: one.ms_per_token)
        finalists = self.decoded(
            [one.tree for one in screened[: SEARCH["finalists"]]], self.prompts
        )
        if cycle_of(self.target) == "captured":  # here a rule's answer is a wait for the device
            trees = [one.tree for one in finalists if isinstance(one.tree, DynamicConfig)]
            finalists += self.decoded(
                [replace(tree, stop_read="late") for tree in trees], self.prompts
            )
        # the costs leave out what a stop rule, a calibrator and trees that change from cycle to cycle take
        fixed = self.trees[: SEARCH["fixed"]]
        predictions, timed = [*fixed, self.published, *finalists], []
        decoders = [
            SpeculativeDecoder(self.target),
            *(self.decoder(one.tree) for one in predictions),
        ]
        prompts = self.prompts[: SEARCH["timed_prompts"]]
        repetitions = SEARCH["timed_repetitions"]
        plain, *others = in_turns(decoders, prompts, repetitions, "finalists", self.max_new_tokens)
        for one, answers in zip(predictions, others, strict=True):
            ms = cycle_ms(answers) / one.tau  # tau comes from more prompts
            timed.append(replace(one, ms_per_token=ms, speedup=cycle_ms(plain) / ms))
        count = len(fixed)
        self.fixed = min(timed[:count], key=lambda one: one.ms_per_token)
        self.published, finalists = timed[count], timed[count + 1 :]
        self.rules = sorted(finalists, key=lambda one: one.ms_per_token)
        has_rule = (
            self.rules and self.rules[0].ms_per_token * SEARCH["worth"] < self.fixed.ms_per_token
        )
        self.choice = self.rules[0] if has_rule else self.fixed

    def facts(self) -> dict[str, Any]:
        """tune.json's entry of this head."""

        def of(one: Prediction) -> dict[str, Any]:
            tree = {**as_dict(one.tree), "k": one.tree.k, "nodes": one.tree.nodes}  # of a chain too
            return {
                **as_dict(one),
                "tree": tree,
                "name": name_of(MethodConfig(one.method, one.tree)),
            }

        facts: dict[str, Any] = {
            "kind": self.kind,
            "head": self.head,
            "costs_ms": asdict(self.costs),
        }
        facts |= {
            "choice": of(self.choice),
            "published": of(self.published),
            "fixed": self.fixed and of(self.fixed),
        }
        return facts | {"trees": list(map(of, self.trees)), "rules": list(map(of, self.rules))}


def tuned(
    heads: Mapping[str, str],
    config: TuneConfig,
    output: Path,
    seed: int,
    target: Target,
    tokenizer: Any,
) -> dict[str, Any]:
    """Writes tune.json and, in tuned.yaml, the predicted fastest method with heads (kind -> directory)."""
    prompts = [
        encode_turn(prompt, (), tokenizer, target) for prompt in load_prompts(config.prompts)
    ]
    tunings = [HeadTuning(target, kind, head, prompts, config) for kind, head in heads.items()]
    best = max(tunings, key=lambda one: one.choice.speedup)
    best.try_rules()
    choice, published = best.choice, best.published
    line = (
        f"{best.kind}: {name_of(MethodConfig(choice.method, choice.tree))}: predicted tau {choice.tau:.2f}, "
        f"speedup {choice.speedup:.2f} (published tree: {published.tau:.2f}, {published.speedup:.2f})"
    )
    print(f"tune: {line}", flush=True)
    tree = {key: value for key, value in as_dict(choice.tree).items() if value is not None}
    chosen = yaml.safe_dump(
        {"method": choice.method, "head": best.head, "tree": tree}, sort_keys=False
    )
    write_text(output / TUNED, f"# tuned on {describe(target)['device']}: {line}\n{chosen}")
    write_json(
        output / "tune.json",
        {
            "chosen": best.kind,
            "temperature": config.temperature,
            "heads": [one.facts() for one in tunings],
        },
    )
    measure(target, tokenizer, best, config, output, seed)
    print(f"tune: {output / TUNED} (generate --row FILE, bench --row FILE)")
    return {}


def measured_rows(
    kind: str, choice: MethodConfig, grid: bool, max_levels: int = 2**31
) -> list[MethodConfig]:
    sizes = (each for each in SEARCH["grid"] if grid and each[0] <= max_levels)
    trees = [tree_with(*each) for each in sizes if each[1] == 1 or kind != "draft_lm"]
    searched = [MethodConfig(method_of(kind, tree), tree) for tree in trees]
    return [MethodConfig("vanilla"), choice, MethodConfig(USUAL[kind]), *searched]


def measure(
    target: Target, tokenizer: Any, best: HeadTuning, config: TuneConfig, output: Path, seed: int
) -> None:
    """Writes measured.json: each row's speed on other prompts, if any, and the choice's relative to it."""
    if config.measure is None:
        return
    predicted = best.choice
    choice = MethodConfig(predicted.method, predicted.tree)
    methods = measured_rows(best.kind, choice, config.grid, best.drafter.max_levels)
    kinds = [None, *([best.kind] * (len(methods) - 1))]
    decoders = make_decoders(target, methods, [kind and best.head for kind in kinds])
    section = BenchConfig(
        prompts=config.measure, rows=tuple(methods), sampling=(SamplingConfig(config.temperature),)
    )
    bench = Bench(target, tokenizer, decoders, kinds, section, suite_of(section), output / "bench")
    (output / "bench" / RECORDS).unlink(missing_ok=True)
    groups = {
        members.first.row: members
        for members in group(run(bench, load_prompts(config.measure), seed))
    }
    rows = []
    for number, method in enumerate(methods):
        figures = summary_row(groups[number], seed)
        answers = {one.prompt_key: one for one in groups[number].records if one.status == "ok"}
        against = speedups(
            replace(groups[1], baseline=answers).pairs, seed
        )  # the choice's speed relative to it
        row = {name: getattr(figures, name) for name in ("tau", "speedup", "speedup_ci95")}
        against = {f"chosen_against_it{end}": against[f"speedup{end}"] for end in ("", "_ci95")}
        rows.append({"method": as_dict(method), **row, **against})
    tau, speedup = rows[1]["tau"], rows[1]["speedup"]
    facts: dict[str, Any] = {"names": [name_of(method) for method in methods], "rows": rows}
    facts["predicted_over_measured"] = predicted.speedup / speedup if speedup else None
    facts["predicted_tau_over_measured"] = predicted.tau / tau if tau else None
    write_json(output / "measured.json", facts)
    print(
        f"measured: tau {tau or 0:.2f} (predicted {predicted.tau:.2f}), speedup {speedup or 0:.2f}"
    )


def name_of(method: MethodConfig) -> str:
    """'eagle2, 6 levels, k 8, 16 nodes': the method and its tree, as the report's rows have them."""
    tree = tree_shape(method)
    return method.method if tree is None else f"{method.method}, {tree.words}"
