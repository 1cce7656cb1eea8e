"""`infer/main.py tune`: one choice for all heads of a run, written as a method that runs, then measured."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor

from infer.bench import Bench, make_decoders, run
from infer.config import BenchConfig
from infer.hardware import describe
from infer.tasks import Prompt, encode, load_prompts
from infer.tuning.config import TuneConfig
from infer.tuning.measure import CHOSEN, PUBLISHED, Outcome, names, outcomes, rows, verdict
from infer.tuning.tune import Tuned, facts, tune_head, with_rules, write_choice
from model.files import write_json
from model.target import Target

TUNED = "tuned.yaml"
CONTENDER = 1.1  # stop rules are tried for heads whose best fixed tree is at most so many times slower than the best's


def tune(target: Target, tokenizer: Any, heads: Mapping[str, str], config: TuneConfig, output: Path) -> Tuned:
    """The fastest method of these heads (kind -> directory) as predicted; writes tuned.yaml and tune.json."""
    prompts = _encoded(load_prompts(config.prompts), tokenizer, target)
    new = config.prompts.max_new_tokens
    found = []
    for kind, head in heads.items():
        found.append(tune_head(target, kind, head, prompts, new, config.levels, config.k))
        print(_line(found[-1]), flush=True)
    fastest = max(one.predicted.speedup for one in found)
    contenders = [place for place, one in enumerate(found) if one.predicted.speedup * CONTENDER > fastest]
    for place in contenders:
        found[place] = with_rules(target, found[place], prompts, new, config.levels)
        print(_line(found[place]), flush=True)
    best = max((found[place] for place in contenders), key=lambda one: one.predicted.speedup)
    write_choice(output / TUNED, best, describe(target)["device"])
    write_json(output / "tune.json", {"chosen": best.kind, "heads": [facts(one) for one in found]})
    return best


def measure(target: Target, tokenizer: Any, best: Tuned, config: TuneConfig, output: Path, seed: int) -> dict[str, Any]:
    """The choice against vanilla, the published tree and the grid, in pairs of prompts; writes measured.json."""
    assert config.measure is not None
    prompts = load_prompts(config.measure)
    methods = rows(best.kind, best.choice, config.grid)
    heads = [None if method.method == "vanilla" else best.head for method in methods]
    section = BenchConfig(prompts=config.measure, rows=tuple(methods))
    kinds = [None if head is None else best.kind for head in heads]
    bench = Bench(target, tokenizer, make_decoders(target, methods, heads), kinds, section, output / "bench")
    bench.records_path.unlink(missing_ok=True)
    records = run(bench, prompts, seed)
    found = outcomes(methods, records, seed)
    said = verdict(found, best.predicted)
    write_json(output / "measured.json", {**said, "names": names(methods), "rows": [asdict(one) for one in found]})
    print(_measured_text(found, said))
    return said


def _encoded(prompts: Sequence[Prompt], tokenizer: Any, target: Target) -> list[Tensor]:
    return [encode(prompt.text, tokenizer, target) for prompt in prompts]


def _line(tuned: Tuned) -> str:
    predicted, published = tuned.predicted, tuned.published
    return (
        f"tune: {tuned.kind}: {names([tuned.choice])[0]}: predicted tau {predicted.tau:.2f}, speedup "
        f"{predicted.speedup:.2f} (published tree: {published.tau:.2f}, {published.speedup:.2f})"
    )


def _measured_text(found: Sequence[Outcome], said: Mapping[str, Any]) -> str:
    chosen, published, best = found[CHOSEN], found[PUBLISHED], said["against_best_of_grid"]
    lines = [
        f"measured: tau {chosen.tau or 0:.2f}, speedup {chosen.speedup or 0:.2f} {_interval(chosen.speedup_ci95)}; "
        f"predicted over measured {said['predicted_over_measured'] or 0:.3f}",
        f"against the published tree: {published.chosen_against_it or 0:.2f} times its speed "
        f"{_interval(published.chosen_against_it_ci95)}",
    ]
    if best is not None:
        lines.append(
            f"against the best of the grid: {best['chosen_against_it'] or 0:.2f} times its speed "
            f"{_interval(best['chosen_against_it_ci95'])}"
        )
    return "\n".join(lines)


def _interval(bounds: Sequence[float] | None) -> str:
    return "" if bounds is None else f"({bounds[0]:.2f}-{bounds[1]:.2f})"
