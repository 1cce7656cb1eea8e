"""Decode with a draft head, calibrate it, measure it, compare, report, and prove that it is lossless."""

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

if sys.path and Path(sys.path[0]).resolve() == Path(__file__).resolve().parent:
    sys.path[0] = str(Path(__file__).resolve().parent.parent)  # the checkout, not infer/

import pipeline
from data.inputs import target_inputs
from data.provenance import Stage, with_status
from infer.begin import begin_bench, calibrators_of, check_inputs, check_settings, check_weights, inputs_of
from infer.choices import sized
from infer.config import TUNABLE, BenchConfig, Method, MethodConfig
from infer.demonstrate import add_options, demonstrate, options_of
from infer.heads import check_levels, find_head, heads_by_kind, kind_at
from infer.methods import METHODS, check_kind, tree_of, usual_method
from infer.quiet import prepare
from infer.suite import asked_of, plan_text, suite_of
from infer.tasks import sources_facts
from infer.tuning.config import TuneConfig
from model.config import TargetConfig
from model.errors import UserError, exit_code
from model.files import read_json, write_json
from model.hub import is_on_hub
from model.recipe import as_dict, from_overrides, load

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from infer.engine import SpeculativeDecoder
    from model.target import Target


def main() -> int:
    arguments, unknown = _parser().parse_known_args()
    run: dict[str, Any] = {
        "generate": _generate,
        "calibrate": _calibrate,
        "bench": _bench,
        "tune": _tune,
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
    generate.add_argument("--row", type=Path, metavar="FILE.yaml", help="a method with its tree, as `tune` writes it")
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
        ("tune", "the tree that suits the heads on this machine, as a YAML; and how well that was predicted"),
        ("report", "summary.json and index.html from what was measured"),
        ("compare", "the difference of tau between rows of a bench, in pairs of prompts, with an interval"),
    ):
        pipeline.add_arguments(commands.add_parser(name, help=text))
    compare = commands.choices["compare"]
    commands.choices["bench"].add_argument(
        "--row", type=Path, action="append", default=[], metavar="FILE.yaml", help="one more row, as `tune` writes it"
    )
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
    tree = tree_of(asked, "generate")
    check_levels(tree, head, "generate")
    check_weights([head])
    target_inputs(target_config)
    settings = {name: getattr(arguments, name) for name in ("max_new_tokens", "temperature", "top_k", "top_p")}
    check_settings(settings)
    if arguments.plan:
        grown = as_dict(sized(tree)) if tree else "no tree"
        print(f"generate: {target_config.path}, {asked.method} with {head or 'no head'}, {grown}")
        return 0
    prepare(threads)
    from infer.generate import Question, Traces, answer

    question = Question(arguments.prompt, arguments.raw, arguments.seed, settings)
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
    asked = _asked(arguments, usual, own)
    if asked.method == usual and arguments.row is None:
        tree = pipeline.load(arguments, [*others, *(f"--{word}" for word in own if word.startswith("tree."))]).tree
        asked = replace(asked, tree=tree)
    _check_given(arguments.head, asked.method)
    if arguments.head is None and recipe.head.kind in _heads(asked.method):
        return recipe.target, asked, _present(paths.head(recipe), asked.method), recipe.threads
    found = find_head(asked, paths.heads, recipe.head.kind, arguments.head, "--method")
    return recipe.target, asked, found, recipe.threads


def _without_recipe(
    arguments: argparse.Namespace, unknown: list[str]
) -> tuple[TargetConfig, MethodConfig, str | None, int | None]:
    headless = arguments.head is None and arguments.row is None
    if arguments.target is None or (headless and (arguments.method is None or _heads(arguments.method))):
        raise UserError(
            "generate needs --config RECIPE, or --target and --head (or --method vanilla, pld or lookahead)"
        )
    usual = arguments.method or ("vanilla" if arguments.head is None else usual_method(kind_at(arguments.head)))
    asked = _asked(arguments, usual, pipeline.method_words(unknown, alone=True)[0])
    words = {"path": arguments.target, "dtype": arguments.dtype, "device_map": arguments.device_map}
    given = [f"{key}={value}" for key, value in words.items() if value is not None]
    config = from_overrides(TargetConfig, given, "command line")
    _check_given(arguments.head, asked.method)
    head = asked.head if arguments.head is None else str(arguments.head)
    if head is None and _heads(asked.method):
        raise UserError(f"{arguments.row}: {asked.method} needs a head; give --head")
    return config, asked, head, None


def _asked(arguments: argparse.Namespace, usual: Method, own: list[str]) -> MethodConfig:
    """The method of --row, or of --method, or the usual one, with what the command line changes of it."""
    if arguments.row is None:
        return pipeline.method_from(arguments.method or usual, own)
    if arguments.method is not None:
        raise UserError("--row names its method; leave --method out")
    return load(arguments.row, MethodConfig, own)


def _check_given(head: Path | None, method: Method) -> None:
    """UserError for a --head that the method does not draft with."""
    if head is not None:
        check_kind(method, kind_at(head) if _heads(method) else "draft", "--head")


def _heads(method: Method) -> tuple[str, ...]:
    return METHODS[method].heads


def _present(head: Path, method: Method) -> str:
    """The head's directory; UserError when there is none, or one that the method does not draft with."""
    check_kind(method, kind_at(head), str(head))
    return str(head)


def _calibrate(arguments: argparse.Namespace, unknown: list[str]) -> int:
    recipe, paths, head = _recipe(arguments, unknown)
    section = recipe.calibrate
    if section is None:
        raise UserError(f"{arguments.config}: has no section 'calibrate'; add one with prompts: {{path: ...}}")
    asked = MethodConfig(section.method or usual_method(recipe.head.kind), section.tree)
    tree = tree_of(asked, "calibrate")
    used = _head_of(asked, recipe, paths, head, "calibrate")
    check_levels(tree, used, "calibrate")
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
    from infer.calibration.files import write_calibration
    from infer.calibration.measure import Settings, record
    from infer.tasks import encode, load_prompts

    section = recipe.calibrate
    assert section is not None
    prompts = load_prompts(section.prompts)
    target, tokenizer, decoder = _decoder(recipe, asked, head)
    settings = Settings(section.prompts.max_new_tokens, section.temperature, section.oracle_levels, recipe.seed)
    with bar(len(prompts), "prompts", "calibrate") as progress:

        def questions() -> "Iterator[tuple[Tensor, str]]":
            for prompt in prompts:
                yield encode(prompt.text, tokenizer, target), prompt.task
                progress.update()

        recording = record(decoder, tree_of(asked, "calibrate.tree"), questions(), settings)
    lines = write_calibration(stage.output, recording, section.bins, head, lambda token: str(tokenizer.decode([token])))
    stage.finish(nodes=len(recording.nodes.prompt), cycles=len(recording.nodes.accepted_length))
    print("\n".join(lines))
    return "done", 0


def _bench(arguments: argparse.Namespace, unknown: list[str]) -> int:
    recipe, paths, head = _recipe(arguments, unknown)
    section = recipe.bench
    if section is None:
        raise UserError(f"{arguments.config}: has no section 'bench'; add one with prompts and rows")
    section = replace(section, rows=(*section.rows, *(load(path, MethodConfig, []) for path in arguments.row)))
    suite = suite_of(section)
    heads = []
    for row, place in zip(suite.rows, suite.places, strict=True):
        tree = tree_of(row, place)
        unseen = arguments.plan and row.head is not None and METHODS[row.method].heads and is_on_hub(row.head)
        heads.append(row.head if unseen else _head_of(row, recipe, paths, head, place))  # a plan fetches nothing
        if not unseen:
            check_levels(tree, heads[-1], place)
    check_inputs(recipe.target, heads, section.prompts)
    if arguments.plan:
        print(f"{plan_text(section)} -> {paths.bench}")
        return 0
    sections = {"bench": as_dict(section), "threads": recipe.threads, **calibrators_of(suite.rows, heads)}
    stage = Stage("bench", paths.bench, inputs_of(recipe.target, recipe.seed, heads, sections, section.prompts))
    if stage.is_whole():
        print(f"bench: whole, reused ({paths.bench})")
        return 0
    stage.require_own_directory(arguments.overwrite)
    begin_bench(stage, arguments.overwrite)
    return with_status(paths.status, "bench", lambda: _measure_bench(recipe, section, stage, heads))


def _measure_bench(
    recipe: pipeline.Recipe, section: BenchConfig, stage: Stage, heads: list[str | None]
) -> tuple[str, int]:
    prepare(recipe.threads)
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
    suite = suite_of(section)
    target = Target.load(recipe.target, default_device())
    decoders = make_decoders(target, suite.rows, heads, suite.places)
    kinds = [None if head is None else kind_at(Path(head)) for head in heads]
    bench = Bench(target, load_tokenizer(recipe.target), decoders, kinds, section, stage.output)
    write_json(stage.output / SUITE, as_dict(asked_of(section, prompts, max_context(target))))
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


def _tune(arguments: argparse.Namespace, unknown: list[str]) -> int:
    recipe, paths, _ = _recipe(arguments, unknown)
    section = recipe.tune
    if section is None:
        raise UserError(f"{arguments.config}: has no section 'tune'; add one with prompts: {{path: ...}}")
    heads = heads_by_kind([arguments.head] if arguments.head else [], None if arguments.head else paths.heads)
    heads = {kind: place for kind, place in heads.items() if kind in TUNABLE}
    if not heads:
        raise UserError(
            f"{arguments.head or paths.heads}: no head of kind {', '.join(TUNABLE)}; train one, or give --head"
        )
    for prompts in (section.prompts, section.measure or section.prompts):
        check_inputs(recipe.target, list(heads.values()), prompts)
    inputs = inputs_of(recipe.target, recipe.seed, list(heads.values()), {"tune": as_dict(section)}, section.prompts)
    stage = Stage("tune", paths.tune, {**inputs, "threads": recipe.threads})
    if arguments.plan:
        print(f"tune: {', '.join(heads)}, up to {section.levels} levels, k {section.k} -> {paths.tune / 'tuned.yaml'}")
        return 0
    if stage.is_whole():
        print(f"tune: whole, reused ({paths.tune})")
        return 0
    stage.require_own_directory(arguments.overwrite)
    return with_status(paths.status, "tune", lambda: _tune_heads(recipe, section, stage, heads))


def _tune_heads(recipe: pipeline.Recipe, section: TuneConfig, stage: Stage, heads: dict[str, str]) -> tuple[str, int]:
    prepare(recipe.threads)
    from infer.hardware import default_device, describe
    from infer.tuning.command import TUNED, measure, tune
    from model.target import Target, load_tokenizer

    target, tokenizer = Target.load(recipe.target, default_device()), load_tokenizer(recipe.target)
    best = tune(target, tokenizer, heads, section, stage.output)
    if section.measure is not None:
        measure(target, tokenizer, best, section, stage.output, recipe.seed)
    stage.finish(hardware=describe(target))
    print(f"tune: {stage.output / TUNED} (generate --row FILE, bench --row FILE)")
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
    from infer.compare import names, tau_difference
    from infer.records import read_records

    records = read_records(pipeline.RunPaths(Path(recipe.run)).bench / "records.jsonl")
    if arguments.temperature is not None:
        records = [record for record in records if record.temperature == arguments.temperature]
    difference = tau_difference(records, arguments.of, arguments.against, recipe.seed)
    print(f"{names(records, arguments.of)} against {names(records, arguments.against)}:\n{difference.text()}")
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
        return _present(head, asked.method)
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
