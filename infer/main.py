"""Decode with a draft head, calibrate it, measure it, compare, report, and prove that it is lossless."""

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

if sys.path and Path(sys.path[0]).resolve() == Path(__file__).resolve().parent:
    sys.path[0] = str(Path(__file__).resolve().parent.parent)  # the checkout, not infer/

import pipeline
from data.provenance import Stage, with_status
from infer.begin import begin_bench, check_inputs, inputs_of
from infer.choices import sized
from infer.config import Method, MethodConfig
from infer.demonstrate import add_options, demonstrate, options_of
from infer.heads import find_head, heads_by_kind, kind_at
from infer.methods import METHODS, check_kind, tree_of, usual_method
from infer.quiet import prepare
from infer.suite import Suite, asked_of, plan_text, suite_of
from infer.tasks import sources_facts
from model.config import TargetConfig
from model.errors import UserError, exit_code
from model.files import read_json, write_json
from model.hub import is_on_hub
from model.recipe import as_dict, from_overrides

if TYPE_CHECKING:
    from infer.engine import SpeculativeDecoder
    from model.target import Target


def main() -> int:
    arguments, unknown = _parser().parse_known_args()
    run: dict[str, Any] = {
        "generate": _generate,
        "calibrate": _calibrate,
        "bench": _bench,
        "report": _report,
        "compare": _compare,
        "verify": _verify,
    }
    return int(run[arguments.command](arguments, unknown))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python infer/main.py", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    generate = commands.add_parser("generate", help="stream an answer; accepted draft tokens are green")
    generate.add_argument("--prompt", required=True)
    generate.add_argument("--raw", action="store_true", help="the prompt as it is, without the chat template")
    generate.add_argument("--method", choices=get_args(Method), help="default: the usual one of the head")
    generate.add_argument("--max-new-tokens", type=int)
    generate.add_argument("--temperature", type=float)
    generate.add_argument("--top-k", type=int)
    generate.add_argument("--top-p", type=float)
    generate.add_argument("--seed", type=int, default=0)
    generate.add_argument("--show-tree", action="store_true", help="print the first draft tree")
    generate.add_argument("--save-tree", type=Path, metavar="PATH.json", help="write the first draft tree as JSON")
    generate.add_argument("--cycles", type=Path, metavar="PATH.jsonl", help="write a record of every cycle")
    pipeline.add_arguments(generate, config_required=False)
    for name, text in (
        ("calibrate", "how confidence predicts acceptance, from decoding cycles on held-out prompts"),
        ("bench", "tau and speedup of every row of the recipe"),
        ("report", "summary.json and index.html from what was measured"),
        ("compare", "the difference of tau between rows of a bench, in pairs of prompts, with an interval"),
    ):
        pipeline.add_arguments(commands.add_parser(name, help=text))
    compare = commands.choices["compare"]
    for name in ("of", "against"):
        compare.add_argument(f"--{name}", type=int, nargs="+", required=True, help="rows of bench.rows, from 0; pooled")
    compare.add_argument("--temperature", type=float, help="of the sampling that is compared, where there are several")
    for command in commands.choices.values():
        command.add_argument("--head", type=Path, help="a head directory (default: the run's own)")
    verify = commands.add_parser("verify", help="prove that methods are lossless; exit code 1 where one is not")
    pipeline.add_arguments(verify, config_required=False)
    add_options(verify)
    return parser


def _generate(arguments: argparse.Namespace, unknown: list[str]) -> int:
    target_config, asked, head, threads = _generation(arguments, unknown)
    tree = tree_of(asked, "tree")
    if arguments.plan:
        grown = as_dict(sized(tree)) if tree else "no tree"
        print(f"generate: {target_config.path}, {asked.method} with {head or 'no head'}, {grown}")
        return 0
    prepare(threads)
    from infer.generate import Question, Traces, answer

    question = Question(
        arguments.prompt,
        arguments.raw,
        arguments.seed,
        {name: getattr(arguments, name) for name in ("max_new_tokens", "temperature", "top_k", "top_p")},
    )
    answer(target_config, asked, head, question, Traces(arguments.show_tree, arguments.save_tree, arguments.cycles))
    return 0


def _generation(
    arguments: argparse.Namespace, unknown: list[str]
) -> tuple[TargetConfig, MethodConfig, str | None, int | None]:
    """Target, method, head and threads from a recipe, or from --target and --head alone.

    The recipe's `tree` is that of its head's usual method; another method has its published one.
    """
    if arguments.config is None:
        return _without_recipe(arguments, unknown)
    own, others = pipeline.method_words(unknown)
    recipe = pipeline.load(arguments, others)
    paths, usual = pipeline.RunPaths(Path(recipe.run)), usual_method(recipe.head.kind)
    asked = pipeline.method_from(arguments.method or usual, own)
    if asked.method == usual:
        tree = pipeline.load(arguments, [*others, *(f"--{word}" for word in own if word.startswith("tree."))]).tree
        asked = replace(asked, tree=tree)
    _check_given(arguments.head, asked.method)
    if arguments.head is None and recipe.head.kind in _heads(asked.method):
        return recipe.target, asked, _present(paths.head(recipe)), recipe.threads
    found = find_head(asked, paths.heads, recipe.head.kind, arguments.head, "--method")
    return recipe.target, asked, found, recipe.threads


def _without_recipe(
    arguments: argparse.Namespace, unknown: list[str]
) -> tuple[TargetConfig, MethodConfig, str | None, int | None]:
    if arguments.target is None or (arguments.head is None and (arguments.method is None or _heads(arguments.method))):
        raise UserError(
            "generate needs --config RECIPE, or --target and --head (or --method vanilla, pld or lookahead)"
        )
    method = arguments.method or usual_method(kind_at(arguments.head))
    words = {"path": arguments.target, "dtype": arguments.dtype, "device_map": arguments.device_map}
    given = [f"{key}={value}" for key, value in words.items() if value is not None]
    config = from_overrides(TargetConfig, given, "command line")
    _check_given(arguments.head, method)
    asked = pipeline.method_from(method, pipeline.method_words(unknown, alone=True)[0])
    return config, asked, None if arguments.head is None else str(arguments.head), None


def _check_given(head: Path | None, method: Method) -> None:
    """UserError for a --head that the method does not draft with."""
    if head is not None:
        check_kind(method, kind_at(head) if _heads(method) else "draft", "--head")


def _heads(method: Method) -> tuple[str, ...]:
    return METHODS[method].heads


def _present(head: Path) -> str:
    """The head's directory; UserError when there is none."""
    kind_at(head)
    return str(head)


def _calibrate(arguments: argparse.Namespace, unknown: list[str]) -> int:
    recipe, paths, head = _recipe(arguments, unknown)
    section = recipe.calibrate
    if section is None:
        raise UserError(f"{arguments.config}: has no section 'calibrate'; add one with prompts: {{path: ...}}")
    asked = MethodConfig(section.method or usual_method(recipe.head.kind), section.tree)
    tree = tree_of(asked, "calibrate.tree")
    used = _head_of(asked, recipe, paths, head, "calibrate")
    check_inputs(recipe.target, [used], section.prompts)
    stage = Stage(
        "calibration",
        paths.calibration,
        inputs_of(recipe.target, recipe.seed, [used], {"calibrate": as_dict(section)}, section.prompts),
    )
    if arguments.plan:
        print(
            f"calibrate: {section.prompts.num_prompts} prompts x {section.prompts.max_new_tokens} new tokens, "
            f"{asked.method}, {as_dict(sized(tree)) if tree else 'no tree'} -> {paths.calibration}"
        )
        return 0
    if stage.is_whole():
        print(f"calibrate: whole, reused ({paths.calibration})")
        return 0
    stage.require_own_directory(arguments.overwrite)
    return with_status(paths.status, "calibrate", lambda: _measure_calibration(recipe, asked, stage, used))


def _measure_calibration(
    recipe: pipeline.Recipe, asked: MethodConfig, stage: Stage, head: str | None
) -> tuple[str, int]:
    prepare(recipe.threads)
    from data.progress import bar
    from infer.calibrate import summarise
    from infer.collect import NodeCollector
    from infer.records import write_cycles
    from infer.tasks import encode, load_prompts

    section = recipe.calibrate
    assert section is not None
    prompts = load_prompts(section.prompts)
    target, tokenizer, decoder = _decoder(recipe, asked, head)
    collector = NodeCollector()
    with bar(len(prompts), "prompts", "calibrate") as progress:
        for collector.prompt, prompt in enumerate(prompts):
            ids = encode(prompt.text, tokenizer, target)
            decoder.generate(ids, max_new_tokens=section.prompts.max_new_tokens, do_sample=False, on_cycle=collector)
            progress.update()
    arrays = collector.arrays()
    write_cycles(stage.output / "cycles.npz", arrays)
    summary = summarise(arrays, section.bins)
    write_json(stage.output / "calibration.json", summary)
    stage.finish(nodes=len(arrays.prompt), cycles=len(arrays.accepted_length))
    print(
        f"calibrate: {len(arrays.prompt):,} drafted nodes of {len(arrays.accepted_length):,} cycles; "
        f"ECE {summary['ece']:.4f}, Brier {summary['brier']:.4f}"
    )
    return "done", 0


def _bench(arguments: argparse.Namespace, unknown: list[str]) -> int:
    recipe, paths, head = _recipe(arguments, unknown)
    section = recipe.bench
    if section is None:
        raise UserError(f"{arguments.config}: has no section 'bench'; add one with prompts and rows")
    suite = suite_of(section)
    heads = []
    for row, place in zip(suite.rows, suite.places, strict=True):
        tree_of(row, place)
        unseen = arguments.plan and row.head is not None and METHODS[row.method].heads and is_on_hub(row.head)
        heads.append(row.head if unseen else _head_of(row, recipe, paths, head, place))  # a plan fetches nothing
    check_inputs(recipe.target, heads, section.prompts)
    if arguments.plan:
        print(f"{plan_text(section, suite)} -> {paths.bench}")
        return 0
    stage = Stage(
        "bench",
        paths.bench,
        inputs_of(
            recipe.target, recipe.seed, heads, {"bench": as_dict(section), "threads": recipe.threads}, section.prompts
        ),
    )
    if stage.is_whole():
        print(f"bench: whole, reused ({paths.bench})")
        return 0
    stage.require_own_directory(arguments.overwrite)
    begin_bench(stage, arguments.overwrite)
    return with_status(paths.status, "bench", lambda: _measure_bench(recipe, suite, stage, heads))


def _measure_bench(recipe: pipeline.Recipe, suite: Suite, stage: Stage, heads: list[str | None]) -> tuple[str, int]:
    prepare(recipe.threads)
    section = recipe.bench
    assert section is not None
    from infer.bench import Bench, make_decoders, run
    from infer.hardware import default_device, describe, max_context
    from infer.overhead import measure_overhead, overhead_text
    from infer.records import line_of
    from infer.reference import measure_reference, reference_text
    from infer.sweeps import SUITE
    from infer.tasks import load_prompts, pinned
    from model.files import write_text
    from model.target import Target, load_tokenizer

    asked = pinned(section.prompts)
    prompts = load_prompts(asked)
    target = Target.load(recipe.target, default_device())
    decoders = make_decoders(target, suite.rows, heads, suite.places)
    kinds = [None if head is None else kind_at(Path(head)) for head in heads]
    bench = Bench(target, load_tokenizer(recipe.target), decoders, kinds, section, suite, stage.output)
    write_json(stage.output / SUITE, as_dict(asked_of(section, suite, prompts, max_context(target))))
    records = run(bench, prompts, recipe.seed)
    if section.reference:
        reference, records = measure_reference(bench, records)
        print(reference_text(reference))
    if section.overhead:
        print("\n".join(overhead_text(row) for row in measure_overhead(bench, prompts)))
    write_text(bench.records_path, "".join(line_of(record) for record in records))
    stage.finish(hardware=describe(target), answers=len(records), prompts=sources_facts(asked))
    failed = [record for record in records if record.status == "error"]
    print(
        f"bench: {len(records)} answers -> {stage.output}"
        + (f"; {len(failed)} failed: {failed[0].message}" if failed else "")
    )
    return "done", 0


def _report(arguments: argparse.Namespace, unknown: list[str]) -> int:
    recipe, paths, head = _recipe(arguments, unknown)
    if arguments.plan:
        print(f"report: {paths.bench} and {paths.calibration} -> {paths.report}")
        return 0
    from infer.report import Facts, console_table, write_report

    measured = paths.bench / "provenance.json"
    if not measured.is_file():
        raise UserError(
            f"{paths.bench}: nothing was measured yet; run: python infer/main.py bench --config {arguments.config}"
        )
    facts = read_json(measured)
    provenance = head / "provenance.json"
    trained = read_json(provenance) if provenance.is_file() else {}
    summary = write_report(
        paths.bench,
        paths.calibration,
        paths.report,
        Facts(
            run=str(recipe.run),
            commit=facts.get("commit"),
            target={"name": recipe.target.path, "dtype": recipe.target.dtype},
            head={
                "kind": recipe.head.kind,
                "name": str(head),
                **{k: trained[k] for k in ("training_tokens", "steps", "seconds") if k in trained},
            },
            hardware=facts.get("hardware", {}),
            commands=_commands(arguments.config),
        ),
        seed=recipe.seed,
    )
    print(console_table({"rows": read_json(paths.report / "details.json").get("pooled", summary["rows"])}))
    print(f"\nreport: {paths.report / 'index.html'}")
    return 0


def _compare(arguments: argparse.Namespace, unknown: list[str]) -> int:
    recipe = pipeline.load(arguments, unknown)
    from infer.compare import tau_difference
    from infer.records import read_records

    records = read_records(pipeline.RunPaths(Path(recipe.run)).bench / "records.jsonl")
    if arguments.temperature is not None:
        records = [record for record in records if record.temperature == arguments.temperature]
    print(tau_difference(records, arguments.of, arguments.against, recipe.seed).text())
    return 0


def _verify(arguments: argparse.Namespace, unknown: list[str]) -> int:
    options = options_of(arguments)
    if arguments.config is None:
        if arguments.target is None or unknown:
            raise UserError(f"verify needs --config RECIPE, or --target and no {' '.join(unknown) or 'recipe'}")
        config = TargetConfig(arguments.target, dtype=arguments.dtype or "float32", device_map=arguments.device_map)
        return demonstrate(options, config, heads_by_kind(arguments.head, None))
    recipe = pipeline.load(arguments, unknown)
    config = recipe.target if arguments.dtype else replace(recipe.target, dtype="float32")
    section = recipe.bench or recipe.calibrate
    rows = recipe.bench.rows if recipe.bench else ()
    named = {} if arguments.head else {kind_at(row.head): row.head for row in rows if row.head is not None}
    heads = {**heads_by_kind(arguments.head, pipeline.RunPaths(Path(recipe.run)).heads), **named}
    return demonstrate(options, config, heads, section.prompts if section else None, rows, recipe.threads)


def _commands(config: Path) -> tuple[str, ...]:
    return (
        f"accelerate launch data/main.py features --config {config}",
        f"accelerate launch train/main.py --config {config}",
        f"python infer/main.py calibrate --config {config}",
        f"python infer/main.py bench --config {config}",
        f"python infer/main.py report --config {config}",
    )


def _recipe(arguments: argparse.Namespace, unknown: list[str]) -> tuple[pipeline.Recipe, pipeline.RunPaths, Path]:
    recipe = pipeline.load(arguments, unknown)
    paths = pipeline.RunPaths(Path(recipe.run))
    return recipe, paths, arguments.head or paths.head(recipe)


def _head_of(
    asked: MethodConfig, recipe: pipeline.Recipe, paths: pipeline.RunPaths, head: Path, place: str
) -> str | None:
    """The head that a row drafts with: --head or the recipe's own where its kind fits, else the run's of that kind."""
    if asked.head is None and recipe.head.kind in METHODS[asked.method].heads and head == paths.head(recipe):
        return _present(head)
    given = None if head == paths.head(recipe) else head
    return find_head(asked, paths.heads, recipe.head.kind, given, place)


def _decoder(
    recipe: pipeline.Recipe, asked: MethodConfig, head: str | None
) -> "tuple[Target, Any, SpeculativeDecoder]":
    from infer.decoders import Drafters, make_decoder
    from infer.hardware import default_device
    from model.target import Target, load_tokenizer

    target = Target.load(recipe.target, default_device())
    return target, load_tokenizer(recipe.target), make_decoder(Drafters(target), asked, head, "calibrate")


if __name__ == "__main__":
    sys.exit(exit_code(main))
