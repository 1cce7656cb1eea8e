"""The commands of infer/main.py: each composes its stage from the recipe, the run and the head."""

import argparse
import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from aerie.configs.errors import UserError, warn
from aerie.configs.read import as_dict, from_overrides, load
from aerie.configs.schema import recipe as pipeline
from aerie.configs.schema.decode import METHODS, USUAL, MethodConfig, TreeConfig, check_kind
from aerie.configs.schema.decode import digests as choice_digests
from aerie.configs.schema.measure import PromptsConfig, SamplingConfig
from aerie.configs.schema.target_and_head import TargetConfig
from aerie.data.inputs import target_inputs
from aerie.data.progress import bar
from aerie.infer.decode.engine import make_decoder
from aerie.infer.decode.methods import Drafters, check_levels, find_head, heads_by_kind, kind_at
from aerie.infer.measure import tune as tuning
from aerie.infer.measure.bench import (
    Bench,
    asked_of,
    begin_bench,
    default_device,
    describe,
    make_decoders,
    max_context,
    plan_text,
    prepare,
    run,
    suite_of,
)
from aerie.infer.measure.calibrate import rebuild, record, write_calibration
from aerie.infer.measure.generate import answer
from aerie.infer.measure.lossless import check_options, demonstrate
from aerie.infer.measure.record import RECORDS, SUITE, line_of, read_records
from aerie.infer.measure.reference import measure_overhead, measure_reference, overhead_text, reference_text
from aerie.infer.measure.statistics import tau_difference
from aerie.infer.measure.tasks import check_sources, encode, load_prompts, pinned, prompt_inputs
from aerie.model.hub import head_directory, is_on_hub
from aerie.model.storage import (
    CALIBRATOR,
    FILE,
    Stage,
    digests,
    file_digest,
    find_weights,
    read_json,
    with_status,
    write_json,
    write_text,
)
from aerie.model.target import Target, load_tokenizer

TUNABLE = ("eagle1", "eagle3", "draft_lm")  # whose trees `tune` searches; a static one comes from `calibrate`
OWN_TREES = {"bench": "its rows have trees of their own (bench.rows)", "calibrate": "its tree is calibrate.tree"}


def bench(arguments: argparse.Namespace, unknown: list[str]) -> int:
    recipe, paths = _recipe(arguments, unknown)
    section = _section(recipe.bench, "bench", "prompts and rows", arguments)
    section = replace(section, rows=(*section.rows, *(load(path, MethodConfig, []) for path in arguments.row)))
    suite = suite_of(section)
    heads: list[str | None] = []
    for row, place in zip(suite.rows, suite.places, strict=True):
        if arguments.plan and row.head is not None and METHODS[row.method].heads and is_on_hub(row.head):
            heads.append(row.head)  # a plan fetches nothing
        else:
            heads.append(_head(row, recipe, arguments.head, place))
            check_levels(row.tree, heads[-1], place)
    _check_inputs(recipe.target, heads, section.prompts)
    if arguments.plan:
        print(f"{plan_text(section)} -> {paths.bench}")
        return 0
    sections = {"bench": as_dict(section), "threads": recipe.threads, **calibrators_of(suite.rows, heads)}
    inputs = _inputs(recipe, heads, sections, section.prompts, [row.tree for row in suite.rows])
    stage = Stage("bench", paths.bench, inputs)

    def measure(target: Target, tokenizer: Any) -> dict[str, Any]:
        asked = pinned(section.prompts)
        prompts = load_prompts(asked)
        decoders = make_decoders(target, suite.rows, heads, suite.places)
        kinds = [None if head is None else kind_at(Path(head)) for head in heads]
        measured = Bench(target, tokenizer, decoders, kinds, section, stage.output)
        write_json(stage.output / SUITE, as_dict(asked_of(section, prompts, max_context(target))))
        records = run(measured, prompts, recipe.seed)
        if section.reference:
            reference, records = measure_reference(measured, records)
            print(reference_text(reference))
        if section.overhead:
            print("\n".join(overhead_text(row) for row in measure_overhead(measured, prompts)))
        write_text(measured.records_path, "".join(line_of(record) for record in records))
        failed = [record for record in records if record.status == "error"]
        told = f"; {len(failed)} failed: {failed[0].message}" if failed else ""
        print(f"bench: {len(records)} answers -> {stage.output}{told}")
        return {"hardware": describe(target), "answers": len(records), "prompts": prompt_inputs(asked)}

    return _measured(stage, recipe, arguments, measure)


def calibrators_of(rows: Sequence[MethodConfig], heads: Sequence[str | None]) -> dict[str, Any]:
    """The digests of the calibrators that rows decode by; nothing where none does. UserError where one is missing."""
    fits = {}
    for row, head in zip(rows, heads, strict=True):
        if head is not None and row.tree is not None and row.tree.calibrated:
            path = head_directory(head) / CALIBRATOR
            if not path.is_file():
                fix = "fit it with: python infer/main.py calibrate --config RECIPE"
                raise UserError(f"{path}: no such file, and tree.calibrated needs it; {fix}")
            fits[head] = file_digest(path)
    return {"calibrators": fits} if fits else {}


def calibrate(arguments: argparse.Namespace, unknown: list[str]) -> int:
    recipe, paths = _recipe(arguments, unknown)
    section = _section(recipe.calibrate, "calibrate", "prompts: {path: ...}", arguments)
    asked = MethodConfig(section.method or USUAL[recipe.head.kind], section.tree)
    if not METHODS[asked.method].heads:
        raise UserError(f"calibrate.method: {asked.method} has no head, and so no confidence that could be measured")
    _check_given(arguments.head, asked)
    head = _head(asked, recipe, arguments.head, "calibrate")
    check_levels(asked.tree, head, "calibrate")
    _check_inputs(recipe.target, [head], section.prompts)
    inputs = _inputs(recipe, [head], {"calibrate": as_dict(section)}, section.prompts, [asked.tree])
    stage = Stage("calibration", paths.calibration, inputs)
    if arguments.plan:
        print(
            f"calibrate: {section.prompts.num_prompts} prompts x {section.prompts.max_new_tokens} new tokens, "
            f"{asked.method}, {as_dict(asked.tree) if asked.tree else 'no tree'}, {head} -> {paths.calibration}"
        )
        return 0

    def measure(target: Target, tokenizer: Any) -> dict[str, Any]:
        prompts = load_prompts(section.prompts)
        encoded = [encode(prompt.text, tokenizer, target) for prompt in prompts]
        decoder = make_decoder(Drafters(target), asked, head, "calibrate")
        with bar(len(prompts), "prompts", "calibrate") as progress:

            def questions() -> Iterator[tuple[Tensor, str]]:
                for ids, prompt in zip(encoded, prompts, strict=True):
                    yield ids, prompt.task
                    progress.update()

            recording = record(decoder, asked.tree, questions(), section, recipe.seed)
        names = lambda token: str(tokenizer.decode([token]))  # noqa: E731
        lines = write_calibration(stage.output, recording, section.bins, head, names)
        rebuilt = rebuild(target, asked, head, encoded, section, stage.output)
        print("\n".join([*lines, *([rebuilt] if rebuilt else [])]))
        return {"nodes": len(recording.tables["nodes"]), "cycles": len(recording.tables["cycles"])}

    return _measured(stage, recipe, arguments, measure)


def tune(arguments: argparse.Namespace, unknown: list[str]) -> int:
    recipe, paths = _recipe(arguments, unknown)
    section = _section(recipe.tune, "tune", "prompts: {path: ...}", arguments)
    heads = heads_by_kind([arguments.head] if arguments.head else [], None if arguments.head else paths.heads)
    heads = {kind: head for kind, head in heads.items() if kind in TUNABLE}
    if not heads:
        kinds = ", ".join(TUNABLE)
        raise UserError(f"{arguments.head or paths.heads}: no head of kind {kinds}; train one, or give --head")
    for prompts in (section.prompts, section.measure or section.prompts):
        _check_inputs(recipe.target, list(heads.values()), prompts)
    sections = {"tune": as_dict(section), "threads": recipe.threads}
    stage = Stage("tune", paths.tune, _inputs(recipe, list(heads.values()), sections, section.prompts))
    tuning.check_apart(section)
    if arguments.plan:
        print(f"tune: {', '.join(heads)}, up to {section.levels} levels, k {section.k} -> {paths.tune / 'tuned.yaml'}")
        return 0

    def measure(target: Target, tokenizer: Any) -> dict[str, Any]:
        best = tuning.tune(target, tokenizer, heads, section, stage.output)
        if section.measure is not None:
            tuning.measure(target, tokenizer, best, section, stage.output, recipe.seed)
        print(f"tune: {stage.output / tuning.TUNED} (generate --row FILE, bench --row FILE)")
        return {"hardware": describe(target)}

    return _measured(stage, recipe, arguments, measure)


def _measured(
    stage: Stage,
    recipe: pipeline.Recipe,
    arguments: argparse.Namespace,
    measure: Callable[[Target, Any], dict[str, Any]],
) -> int:
    """Runs a stage that is not done yet; measure(target, tokenizer) returns the facts of its provenance."""
    if stage.is_whole():
        print(f"{arguments.command}: whole, reused ({stage.output})")
        return 0
    stage.require_own_directory(arguments.overwrite)
    if stage.name == "bench":
        begin_bench(stage, arguments.overwrite)

    def work() -> tuple[str, int]:
        prepare(recipe.threads)
        stage.finish(**measure(Target.load(recipe.target, default_device()), load_tokenizer(recipe.target)))
        return "done", 0

    return with_status(pipeline.RunPaths(Path(recipe.run)).status, arguments.command, work)


def report(arguments: argparse.Namespace, unknown: list[str]) -> int:
    recipe, paths = _recipe(arguments, unknown)
    if arguments.plan:
        print(f"report: {paths.bench} and {paths.calibration} -> {paths.report}")
        return 0
    from aerie.infer.report.page import Facts, write_report
    from aerie.infer.report.tables import console_table

    head = arguments.head or paths.head(recipe)
    measured, trained = _provenance(paths.bench), _provenance(head)
    if not measured:
        records = paths.bench / RECORDS
        count = records.read_bytes().count(b"\n") if records.is_file() else None
        begun = "nothing was measured yet" if count is None else f"only {count:,} answers of a bench that was stopped"
        raise UserError(f"{paths.bench}: {begun}; run: python infer/main.py bench --config {arguments.config}")
    commands = []  # that made the run, as the provenance of each stage has them
    for directory in (paths.features, head, paths.calibration, paths.bench, paths.tune):
        words = _provenance(directory).get("argv")
        if words:
            launched = words[0] in ("data/main.py", "train/main.py")
            commands.append(f"{'accelerate launch' if launched else 'python'} {shlex.join(words)}")
    training: dict[str, Any] = {
        name: trained[name] for name in ("training_tokens", "steps", "seconds") if name in trained
    }
    facts = Facts(
        run=str(recipe.run),
        commit=measured.get("commit"),
        target={"name": recipe.target.path, "dtype": recipe.target.dtype},
        head={"kind": recipe.head.kind, "name": str(head), **training},
        hardware=measured.get("hardware", {}),
        commands=(*commands, f"python infer/main.py report --config {arguments.config}"),
    )
    rows = write_report(paths.bench, paths.calibration, paths.report, facts, seed=recipe.seed)
    print(console_table(rows))
    print(f"\nreport: {paths.report / 'index.html'}")
    return 0


def _provenance(directory: Path) -> dict[str, Any]:
    return dict(read_json(directory / FILE)) if (directory / FILE).is_file() else {}


def compare(arguments: argparse.Namespace, unknown: list[str]) -> int:
    from aerie.infer.report.tables import names

    recipe = pipeline.load(arguments, unknown)
    records = read_records(pipeline.RunPaths(Path(recipe.run)).bench / RECORDS)
    if arguments.temperature is not None:
        records = [record for record in records if record.temperature == arguments.temperature]
    difference = tau_difference(records, arguments.of, arguments.against, recipe.seed)
    print(f"{names(records, arguments.of)} against {names(records, arguments.against)}:\n{difference.text()}")
    return 0


def verify(arguments: argparse.Namespace, unknown: list[str]) -> int:
    check_options(arguments)
    if arguments.config is None:
        if arguments.target is None or unknown:
            raise UserError(f"verify needs --config RECIPE, or --target and no {' '.join(unknown) or 'recipe'}")
        config = TargetConfig(arguments.target, dtype=arguments.dtype or "float32", device_map=arguments.device_map)
        return demonstrate(arguments, config, heads_by_kind(arguments.head, None))
    recipe = pipeline.load(arguments, unknown)
    config = recipe.target if arguments.dtype else replace(recipe.target, dtype="float32")
    section = recipe.bench or recipe.calibrate
    rows = recipe.bench.rows if recipe.bench else ()
    named = {} if arguments.head else {kind_at(row.head): row.head for row in rows if row.head is not None}
    heads = {**heads_by_kind(arguments.head, pipeline.RunPaths(Path(recipe.run)).heads), **named}
    return demonstrate(arguments, config, heads, section.prompts if section else None, rows, recipe.threads)


def generate(arguments: argparse.Namespace, unknown: list[str]) -> int:
    recipe = None
    if arguments.config is None:
        target, asked, head = _without_recipe(arguments, unknown)
    else:
        # The recipe's tree is that of its head's usual method; another method has its published one.
        own, others = pipeline.method_words(unknown)
        recipe = pipeline.load(arguments, others)
        target, usual = recipe.target, USUAL[recipe.head.kind]
        asked = _asked(arguments, usual, own)
        if asked.method == usual and arguments.row is None:
            words = [f"--{word}" for word in own if word.startswith("tree.")]
            asked = replace(asked, tree=pipeline.load(arguments, [*others, *words]).tree)
        _check_given(arguments.head, asked)
        if arguments.head is not None:
            asked = replace(asked, head=None)  # --head goes before the row's
        head = _head(asked, recipe, arguments.head, "--method")
    check_levels(asked.tree, head, "generate")
    _check_weights([head])
    target_inputs(target)
    settings = {name: getattr(arguments, name) for name in ("max_new_tokens", "temperature", "top_k", "top_p")}
    _check_settings({name: value for name, value in settings.items() if value is not None})
    if arguments.plan:
        grown = as_dict(asked.tree) if asked.tree else "no tree"
        law = "" if asked.typical is None else "; typical acceptance, NOT lossless where tokens are sampled"
        print(f"generate: {target.path}, {asked.method} with {head or 'no head'}, {grown}{law}")
        return 0
    prepare(None if recipe is None else recipe.threads)
    answer(target, asked, head, arguments, settings)
    return 0


def _without_recipe(arguments: argparse.Namespace, unknown: list[str]) -> tuple[TargetConfig, MethodConfig, str | None]:
    headless = arguments.head is None and arguments.row is None
    if arguments.target is None or (headless and (arguments.method is None or METHODS[arguments.method].heads)):
        raise UserError(
            "generate needs --config RECIPE, or --target and --head (or --method vanilla, pld or lookahead)"
        )
    usual = arguments.method or ("vanilla" if arguments.head is None else USUAL[kind_at(arguments.head)])
    asked = _asked(arguments, usual, pipeline.method_words(unknown, alone=True)[0])
    words = {"path": arguments.target, "dtype": arguments.dtype, "device_map": arguments.device_map}
    given = [f"{key}={value}" for key, value in words.items() if value is not None]
    target = from_overrides(TargetConfig, given, "command line")
    _check_given(arguments.head, asked)
    if arguments.head is not None:
        return target, asked, str(arguments.head)
    if asked.head is None and METHODS[asked.method].heads:
        raise UserError(f"{arguments.row}: {asked.method} needs a head; give --head")
    return target, asked, asked.head


def _asked(arguments: argparse.Namespace, usual: Any, own: list[str]) -> MethodConfig:
    """The method of --row, or of --method, or the usual one, with what the command line changes of it."""
    if arguments.row is None:
        return pipeline.method_from(arguments.method or usual, own)
    if arguments.method is not None:
        raise UserError("--row names its method; leave --method out")
    return load(arguments.row, MethodConfig, own)


def _check_given(head: Path | None, asked: MethodConfig) -> None:
    """UserError for a --head that the method does not draft with."""
    if head is not None:
        check_kind(asked.method, kind_at(head) if METHODS[asked.method].heads else "draft", "--head")


def _recipe(arguments: argparse.Namespace, unknown: list[str]) -> tuple[pipeline.Recipe, pipeline.RunPaths]:
    """The recipe and its run's paths; warns of overrides of `tree` to a command that has trees of its own."""
    recipe = pipeline.load(arguments, unknown)
    for word in unknown:
        if word.startswith("--tree.") and arguments.command in OWN_TREES:
            warn(f"{word.partition('=')[0]}: {arguments.command} does not read it; {OWN_TREES[arguments.command]}")
    return recipe, pipeline.RunPaths(Path(recipe.run))


def _section(section: Any, name: str, keys: str, arguments: argparse.Namespace) -> Any:
    if section is None:
        raise UserError(f"{arguments.config}: has no section {name!r}; add one with {keys}")
    return section


def _head(asked: MethodConfig, recipe: pipeline.Recipe, given: Path | None, place: str) -> str | None:
    """The head that a row drafts with: its own, else --head or the recipe's own where its kind fits, else the run's."""
    paths = pipeline.RunPaths(Path(recipe.run))
    own = paths.head(recipe)
    if asked.head is None and given in (None, own) and recipe.head.kind in METHODS[asked.method].heads:
        check_kind(asked.method, kind_at(own), str(own))
        return str(own)
    return find_head(asked, paths.heads, recipe.head.kind, None if given == own else given, place)


def _inputs(
    recipe: pipeline.Recipe,
    heads: Sequence[str | None],
    sections: dict[str, Any],
    prompts: PromptsConfig,
    trees: Iterable[TreeConfig | None] = (),
) -> dict[str, Any]:
    """Everything that a measurement depends on, by content."""
    return {
        "target": target_inputs(recipe.target),
        "head": [digests(head_directory(head)) for head in dict.fromkeys(heads) if head is not None],
        **sections,
        **choice_digests(trees),
        "prompts": prompt_inputs(prompts),
        "seed": recipe.seed,
    }


def _check_inputs(target: TargetConfig, heads: Sequence[str | None], prompts: PromptsConfig) -> None:
    """Everything that can be refused before a model is loaded."""
    target_inputs(target)
    check_sources(prompts)
    _check_weights(heads)


def _check_weights(heads: Sequence[str | None]) -> None:
    for head in heads:
        if head is not None and not is_on_hub(head) and find_weights(Path(head)) is None:
            fix = "train the head with: accelerate launch train/main.py --config RECIPE"
            raise UserError(f"{head}: holds no weights; {fix}")


def _check_settings(given: dict[str, Any]) -> None:
    """UserError for sampling settings, by transformers' names, that no sampler can have."""
    new_tokens = given.pop("max_new_tokens", 1)
    if new_tokens < 1:
        raise UserError(f"--max-new-tokens: must be at least 1, not {new_tokens}")
    try:
        SamplingConfig(**given)
    except ValueError as error:
        option = next((name for name in given if str(error).startswith(name)), "sampling").replace("_", "-")
        raise UserError(f"--{option}: {error}") from error
    law = next((name for name in ("top_k", "top_p") if name in given), None)
    if law is not None and not given.get("temperature"):
        option = law.replace("_", "-")
        raise UserError(f"--{option}: shapes what is drawn, and greedy decoding draws nothing; add --temperature 1")
