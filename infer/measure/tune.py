"""`tune`: the fastest method for a run's heads on this machine.

Every draft of some answers is recorded once; any fixed tree is replayed from it and priced with measured costs
(infer/measure/replay.py). Stop rules are decoded, priced the same way, and the finalists timed in turn with vanilla.
The choice is then measured on other prompts.
"""

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import yaml
from torch import Tensor

from aerie.configs.errors import UserError
from aerie.configs.read import as_dict
from aerie.configs.schema import decode as schema
from aerie.configs.schema.decode import USUAL, ChainConfig, DynamicConfig, Method, MethodConfig, StopConfig
from aerie.configs.schema.measure import BenchConfig, TuneConfig
from aerie.infer.decode.calibrator import calibrate_of
from aerie.infer.decode.engine import SpeculativeDecoder, Statistics
from aerie.infer.decode.methods import Drafters, drafting
from aerie.infer.measure import replay
from aerie.infer.measure.bench import Bench, describe, make_decoders, run
from aerie.infer.measure.statistics import group, speedups, summary_row
from aerie.infer.measure.tasks import encode, load_prompts
from aerie.model.hub import head_directory
from aerie.model.storage import CALIBRATOR, write_json, write_text
from aerie.model.target import Target

GrownConfig = ChainConfig | DynamicConfig  # trees whose depth can be searched
TUNED = "tuned.yaml"
NODES = (3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 60)  # of the trees that are replayed
SHOWN = 20  # of them in tune.json

# stop rules: every one is tried on a few prompts, the finalists on all of them and then timed
THRESHOLDS = (0.1, 0.2, 0.3, 0.45, 0.6)
ENTROPY_THRESHOLDS = (0.2, 0.3, 0.4, 0.5, 0.7)  # h; the published one is 0.3
CHECKS = (3, 5, 7)  # depths at which a shallow tree's probability sum is looked at
SCREENING, FINALISTS = 7, 2  # prompts, rules
TIMED_PROMPTS, TIMED_REPETITIONS = 6, 2
WORTH = 1.03  # a rule must be that much faster than a fixed tree: the best of twenty on few prompts flatters itself

# twelve trees that somebody would try by hand: (levels, k, nodes); k = 1: a chain
GRID = [(levels, k, nodes or levels + 1) for k, nodes, depths in (
    (1, None, (3, 5, 8)), (2, 12, (4, 6, 8)), (4, 24, (4, 6, 8)), (8, 60, (5, 7, 9)),
) for levels in depths]  # fmt: skip


@dataclass(frozen=True)
class Prediction:
    """A method's tree with what it is predicted to do; speedup is against plain decoding, in decode time."""

    method: Method
    tree: GrownConfig
    tau: float
    ms_per_token: float
    speedup: float

    def facts(self) -> dict[str, Any]:
        """As tune.json has it; a chain's tree has its k and nodes too."""
        return {**as_dict(self), "tree": {**as_dict(self.tree), "k": self.tree.k, "nodes": self.tree.nodes}}


def check_apart(config: TuneConfig) -> None:
    """UserError for a choice that would be measured on a prompt that it is made on."""
    texts = {prompt.text for prompt in load_prompts(config.prompts)}
    measured = load_prompts(config.measure) if config.measure else []
    shared = [prompt.prompt_id for prompt in measured if prompt.text in texts]
    if shared:
        raise UserError(f"tune.measure: the choice is made on its prompt {shared[0]!r} too; measure on others")


def tree_with(levels: int, k: int, nodes: int) -> GrownConfig:
    """A dynamic tree; with k = 1 a chain, verified whole."""
    return ChainConfig(levels=levels) if k == 1 else DynamicConfig(levels=levels, k=k, nodes=nodes)


def method_of(kind: str, tree: GrownConfig) -> Method:
    """The method that decodes with this fixed tree and a head of this kind."""
    return "eagle-chain" if tree.shape == "chain" and kind != "draft_lm" else USUAL[kind]


def trees_up_to(levels: int, k: int) -> Iterator[GrownConfig]:
    """Every tree up to these levels and k that has as many candidates as nodes."""
    for depth in range(1, levels + 1):
        yield ChainConfig(levels=depth)
        for width in range(2, k + 1):
            candidates = width + (depth - 1) * width * width
            yield from (tree_with(depth, width, nodes) for nodes in NODES if nodes <= candidates + 1)


def counted(answers: Sequence[Statistics]) -> tuple[replay.Cycles, float]:
    """The cycles of a decoder's answers, and the mean of the nodes that a drafting cycle verifies."""
    trees = sum(nodes > 0 for one in answers for nodes in one.cycle_nodes)
    total = replay.Cycles(
        tokens=sum(one.new_tokens - 1 for one in answers),
        target_forwards=sum(one.target_forwards for one in answers),
        draft_trees=trees,
        draft_levels=sum(one.draft_forwards for one in answers),
    )
    return total, 1 + sum(one.draft_nodes for one in answers) / max(trees, 1)


def rules_for(kind: str, tree: GrownConfig, levels: int) -> list[tuple[Method, GrownConfig]]:
    """Every stop rule at every threshold for a head's best fixed tree, given room to grow to `levels`."""
    checks = tuple(depth for depth in CHECKS if depth < levels)
    rules: dict[Method, list[StopConfig]] = {
        "svip": [schema.EntropyConfig(h=h) for h in ENTROPY_THRESHOLDS],
        "deagle": [schema.VoteConfig(probability_threshold=value) for value in THRESHOLDS],
        "ddd": [schema.ProbabilitySumConfig(checks=checks, threshold=value) for value in THRESHOLDS if checks],
        "opt-tree": [schema.MarginalGainConfig(threshold=value) for value in THRESHOLDS],
    }
    if kind == "draft_lm":
        confidences = [schema.ConfidenceConfig(threshold=value) for value in THRESHOLDS]
        rules = {"sps-svip": rules["svip"], "sps-confidence": [*confidences]}
    elif tree.shape == "chain":
        rules = {"eagle-chain": rules["svip"] + rules["deagle"]}
    return [(method, replace(tree, levels=levels, stop=stop)) for method, stops in rules.items() for stop in stops]


class HeadTuning:
    """The search for one head; `choice` is the best that was found so far."""

    def __init__(self, target: Target, kind: str, head: str, prompts: Sequence[Tensor], config: TuneConfig) -> None:
        """Replays every fixed tree from greedy answers to prompts [1, T] that nothing is measured on."""
        self.target, self.kind, self.head, self.prompts, self.config = target, kind, head, prompts, config
        self.drafter = Drafters(target).of(head)
        k = 1 if kind == "draft_lm" else config.k  # its methods are chains
        self.recording = replay.record(target, self.drafter, prompts, config.levels, k, config.prompts.max_new_tokens)
        self.costs = replay.measure_costs(target, self.drafter, prompts)
        self.trees = self.replayed(trees_up_to(config.levels, k))[:SHOWN]
        usual = schema.published_tree(USUAL[kind])
        narrower = {"k": min(usual.k, k)} if isinstance(usual, DynamicConfig) else {}
        (self.published,) = self.replayed([replace(usual, levels=min(usual.levels, config.levels), **narrower)])
        self.rules: list[Prediction] = []
        self.fixed: Prediction | None = None  # the best tree without a rule, timed as it is; null: nothing was timed
        self.choice = self.trees[0]

    def decoder(self, tree: GrownConfig) -> SpeculativeDecoder:
        calibrate = calibrate_of(tree.calibrated, head_directory(self.head))
        return SpeculativeDecoder(self.target, drafting(self.drafter, tree, calibrate))

    def predicted(self, method: Method, tree: GrownConfig, total: replay.Cycles, nodes: float) -> Prediction:
        ms = replay.price(total, tree.k, nodes, self.costs) / max(total.tokens, 1)
        return Prediction(method, tree, total.tau, ms, self.costs.plain / ms)

    def replayed(self, trees: Iterable[GrownConfig]) -> list[Prediction]:
        """What fixed trees would have done, the fastest first; those of the same levels and k follow each other."""
        predictions = []
        for (levels, k), alike in groupby(trees, key=lambda tree: (tree.levels, tree.k)):
            ranks = replay.path_ranks(self.recording, levels, k)
            for tree in alike:
                total = replay.cycles(self.recording, replay.accepted(ranks, tree.nodes), levels)
                predictions.append(self.predicted(method_of(self.kind, tree), tree, total, tree.nodes))
        return sorted(predictions, key=lambda one: one.ms_per_token)

    def decoded(self, tried: Sequence[tuple[Method, GrownConfig]], prompts: Sequence[Tensor]) -> list[Prediction]:
        """What each tree does in greedy answers to prompts [1, T], at the costs, the fastest first: no clock."""
        predictions, new = [], self.config.prompts.max_new_tokens
        for method, tree in tried:
            decoder = self.decoder(tree)
            answers = [decoder.generate(ids, max_new_tokens=new, do_sample=False).statistics for ids in prompts]
            predictions.append(self.predicted(method, tree, *counted(answers)))
        return sorted(predictions, key=lambda one: one.ms_per_token)

    def timed(self, predictions: Sequence[Prediction]) -> list[Prediction]:
        """The predictions with the time of their trees' own cycles, taken in turn with vanilla's.

        The costs do not know what a stop rule and a calibrator take themselves, nor what trees that change from cycle
        to cycle do to a forward. tau stays: it comes from more prompts.
        """
        decoders = [SpeculativeDecoder(self.target), *(self.decoder(one.tree) for one in predictions)]
        plain, *others = replay.in_turns(decoders, self.prompts[:TIMED_PROMPTS], TIMED_REPETITIONS, "finalists")
        plain_ms = statistics.median(map(replay.cycle_ms, plain))
        timed = []
        for one, answers in zip(predictions, others, strict=True):
            ms = statistics.median(map(replay.cycle_ms, answers)) / one.tau
            timed.append(replace(one, ms_per_token=ms, speedup=plain_ms / ms))
        return timed

    def try_rules(self) -> None:
        """Stop rules for the best fixed tree, by the head's own confidence and by the calibrated one.

        What is left of them, the best fixed tree and the published one are timed as they are.
        """
        best = self.trees[0]
        tried = rules_for(self.kind, best.tree, self.config.levels)
        if (head_directory(self.head) / CALIBRATOR).is_file():
            tried += [(method, replace(tree, calibrated="isotonic")) for method, tree in tried]
        screened = self.decoded(tried, self.prompts[:SCREENING])
        finalists = self.decoded([(one.method, one.tree) for one in screened[:FINALISTS]], self.prompts)
        self.fixed, self.published, *finalists = self.timed([best, self.published, *finalists])
        self.rules = sorted(finalists, key=lambda one: one.ms_per_token)
        has_rule = self.rules and self.rules[0].ms_per_token * WORTH < self.fixed.ms_per_token
        self.choice = self.rules[0] if has_rule else self.fixed

    def facts(self) -> dict[str, Any]:
        """tune.json's entry of this head."""
        return {
            "kind": self.kind,
            "head": self.head,
            "costs_ms": asdict(self.costs),
            "choice": self.choice.facts(),
            "published": self.published.facts(),
            "fixed": self.fixed and self.fixed.facts(),
            "trees": [one.facts() for one in self.trees],
            "rules": [one.facts() for one in self.rules],
        }

    def line(self) -> str:
        choice, published = self.choice, self.published
        return (
            f"{self.kind}: {name_of(MethodConfig(choice.method, choice.tree))}: predicted tau {choice.tau:.2f}, "
            f"speedup {choice.speedup:.2f} (published tree: {published.tau:.2f}, {published.speedup:.2f})"
        )


def tune(target: Target, tokenizer: Any, heads: Mapping[str, str], config: TuneConfig, output: Path) -> HeadTuning:
    """The fastest method of these heads (kind -> directory) as predicted; writes tuned.yaml and tune.json."""
    prompts = [encode(prompt.text, tokenizer, target) for prompt in load_prompts(config.prompts)]
    tunings = [HeadTuning(target, kind, head, prompts, config) for kind, head in heads.items()]
    best = max(tunings, key=lambda one: one.choice.speedup)
    best.try_rules()
    print(f"tune: {best.line()}", flush=True)
    changes = {key: value for key, value in as_dict(best.choice.tree).items() if value is not None}
    chosen = {"method": best.choice.method, "head": best.head, "tree": changes}
    note = f"# tuned on {describe(target)['device']}: {best.line()}\n"
    write_text(output / TUNED, note + yaml.safe_dump(chosen, sort_keys=False))
    write_json(output / "tune.json", {"chosen": best.kind, "heads": [one.facts() for one in tunings]})
    return best


# The choice on other prompts


def measured_rows(kind: str, choice: MethodConfig, grid: bool) -> list[MethodConfig]:
    """vanilla, the choice, the published method, and the grid where it is asked for."""
    trees = [tree_with(*sizes) for sizes in GRID if grid and (sizes[1] == 1 or kind != "draft_lm")]
    fixed = [MethodConfig("vanilla"), choice, MethodConfig(USUAL[kind])]
    return [*fixed, *(MethodConfig(method_of(kind, tree), tree) for tree in trees)]


def measure(target: Target, tokenizer: Any, best: HeadTuning, config: TuneConfig, output: Path, seed: int) -> None:
    """Writes measured.json: each row's speed, the choice's relative to it (paired by prompt), and the prediction's."""
    assert config.measure is not None
    predicted = best.choice
    methods = measured_rows(best.kind, MethodConfig(predicted.method, predicted.tree), config.grid)
    heads = [None if method.method == "vanilla" else best.head for method in methods]
    section = BenchConfig(prompts=config.measure, rows=tuple(methods))
    kinds = [None if head is None else best.kind for head in heads]
    bench = Bench(target, tokenizer, make_decoders(target, methods, heads), kinds, section, output / "bench")
    bench.records_path.unlink(missing_ok=True)
    groups = {members.first.row: members for members in group(run(bench, load_prompts(config.measure), seed))}
    chosen = {record.prompt_key: record for record in groups[1].records if record.status == "ok"}
    rows = []
    for number, method in enumerate(methods):
        figures = summary_row(groups[number], seed).as_dict()
        answers = [one for one in groups[number].records if one.prompt_key in chosen and one.status == "ok"]
        against = speedups([(chosen[one.prompt_key], one) for one in answers], seed)
        rows.append(
            {
                "method": as_dict(method),
                **{name: figures.get(name) for name in ("tau", "speedup", "speedup_ci95")},
                "chosen_against_it": against["speedup"],
                "chosen_against_it_ci95": against["speedup_ci95"],
            }
        )
    tau, speedup = rows[1]["tau"], rows[1]["speedup"]
    facts = {
        "predicted_over_measured": predicted.speedup / speedup if speedup else None,
        "predicted_tau_over_measured": predicted.tau / tau if tau else None,
        "names": [name_of(method) for method in methods],
        "rows": rows,
    }
    write_json(output / "measured.json", facts)
    print(f"measured: tau {tau or 0:.2f} (predicted {predicted.tau:.2f}), speedup {speedup or 0:.2f}")


def name_of(method: MethodConfig) -> str:
    """What a row is called in a table."""
    tree = method.tree
    if tree is None:
        return method.method
    shape = f"{tree.levels} levels, k {tree.k}, {tree.nodes} nodes"
    words = [method.method, f"chain of {tree.levels}" if tree.shape == "chain" else shape]
    words += [] if tree.stop.rule == "constant" else [tree.stop.rule]
    return ", ".join(words + ([f"{tree.calibrated} confidence"] if tree.calibrated else []))
