"""The commands of infer/main.py: each composes its stage from the recipe, the run and the head."""

import shlex
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from aerie.configs.errors import UserError, warn
from aerie.configs.read import as_dict, from_overrides, load
from aerie.configs.schema import decode
from aerie.configs.schema import recipe as pipeline
from aerie.configs.schema.decode import METHODS, USUAL, MethodConfig
from aerie.configs.schema.measure import PromptsConfig, SamplingConfig
from aerie.configs.schema.target_and_head import TargetConfig
from aerie.data.stage import target_inputs
from aerie.infer.decode.engine import make_decoder
from aerie.infer.decode.methods import Drafters, check_levels, find_head, heads_by_kind, kind_at
from aerie.infer.measure import bench as benches
from aerie.infer.measure import calibrate as calibration
from aerie.infer.measure import generate as generation
from aerie.infer.measure import lossless, reference, tasks
from aerie.infer.measure import suite as suites
from aerie.infer.measure import tune as tuning
from aerie.infer.measure.record import RECORDS, SUITE, line_of, read_records
from aerie.infer.measure.statistics import tau_difference
from aerie.model import storage
from aerie.model.hub import head_directory, is_on_hub
from aerie.model.target import Target, load_tokenizer

TUNABLE = ("eagle1", "eagle3", "draft_lm")  # whose trees `tune` searches; a static one comes from `calibrate`
OWN_TREES = {"bench": "its rows have trees of their own (bench.rows)", "calibrate": "its tree is calibrate.tree"}
TRAIN = "train the head with: accelerate launch train/main.py --config RECIPE"
Measure = Callable[[Target, Any], dict[str, Any]]  # (target, tokenizer) -> the facts of a stage's provenance


def bench(arguments: Namespace, unknown: list[str]) -> int:
    recipe, section = _recipe(arguments, unknown, "prompts and rows")
    section = replace(section, rows=(*section.rows, *(load(path, MethodConfig, []) for path in arguments.row)))
    suite = suites.suite_of(section)
    heads: list[str | None] = []
    for row, place in zip(suite.rows, suite.places, strict=True):
        if arguments.plan and row.head is not None and METHODS[row.method].heads and is_on_hub(row.head):
            heads.append(row.head)  # a plan fetches nothing
        else:
            heads.append(_head(row, recipe, arguments.head, place))
            check_levels(row.tree, heads[-1], place)

    def measure(target: Target, tokenizer: Any) -> dict[str, Any]:
        asked = tasks.pinned(section.prompts)
        prompts = tasks.load_prompts(asked)
        decoders = benches.make_decoders(target, suite.rows, heads, suite.places)
        kinds = [None if head is None else kind_at(Path(head)) for head in heads]
        made = benches.Bench(target, tokenizer, decoders, kinds, section, _paths(recipe).bench)
        storage.write_json(made.directory / SUITE, as_dict(suites.asked_of(section, prompts, target)))
        records = benches.run(made, prompts, recipe.seed)
        if section.reference:
            times, records = reference.measure_reference(made, records)
            print(reference.reference_text(times))
        if section.overhead:
            print("\n".join(map(reference.overhead_text, reference.measure_overhead(made, prompts))))
        storage.write_text(made.records_path, "".join(map(line_of, records)))
        failed = [record.message for record in records if record.status == "error"]
        told = f"; {len(failed)} failed: {failed[0]}" if failed else ""
        print(f"bench: {len(records)} answers -> {made.directory}{told}")
        return {"answers": len(records), "prompts": tasks.prompt_inputs(asked)}

    def sections() -> dict[str, Any]:
        trees = decode.digests(row.tree for row in suite.rows)
        return {"bench": as_dict(section), "threads": recipe.threads} | calibrators_of(suite.rows, heads) | trees

    plan = f"{suites.plan_text(section)} -> {_paths(recipe).bench}"
    return _stage(arguments, recipe, heads, sections, section.prompts, plan, measure)


def calibrators_of(rows: Sequence[MethodConfig], heads: Sequence[str | None]) -> dict[str, Any]:
    """The digests of the calibrators that rows decode by; nothing where none does. UserError where one is missing."""
    fits = {}
    for row, head in zip(rows, heads, strict=True):
        if head is not None and row.tree is not None and row.tree.calibrated:
            path = head_directory(head) / storage.CALIBRATOR
            if not path.is_file():
                fix = "fit it with: python infer/main.py calibrate --config RECIPE"
                raise UserError(f"{path}: no such file, and tree.calibrated needs it; {fix}")
            fits[head] = storage.file_digest(path)
    return {"calibrators": fits} if fits else {}


def calibrate(arguments: Namespace, unknown: list[str]) -> int:
    recipe, section = _recipe(arguments, unknown, "prompts: {path: ...}")
    asked = MethodConfig(section.method or USUAL[recipe.head.kind], section.tree)
    if not METHODS[asked.method].heads:
        raise UserError(f"calibrate.method: {asked.method} has no head, and so no confidence that could be measured")
    _check_given(arguments.head, asked)
    head = _head(asked, recipe, arguments.head, "calibrate")
    check_levels(asked.tree, head, "calibrate")
    output = _paths(recipe).calibration

    def measure(target: Target, tokenizer: Any) -> dict[str, Any]:
        prompts = tasks.load_prompts(section.prompts)
        questions = [(tasks.encode(prompt.text, tokenizer, target), prompt.task) for prompt in prompts]
        decoder = make_decoder(Drafters(target), asked, head, "calibrate")
        recording = calibration.record(decoder, asked.tree, questions, section, recipe.seed)
        lines = calibration.write_calibration(
            output, recording, section.bins, head, lambda token: str(tokenizer.decode([token]))
        )
        rebuilt = calibration.rebuild(target, asked, head, questions, section, output)
        print("\n".join([*lines, *([rebuilt] if rebuilt else [])]))
        return {name: len(recording.tables[name]) for name in ("nodes", "cycles")}

    plan = (
        f"calibrate: {section.prompts.num_prompts} prompts x {section.prompts.max_new_tokens} new tokens, "
        f"{asked.method}, {_tree_text(asked)}, {head} -> {output}"
    )
    sections = {"calibrate": as_dict(section), **decode.digests([asked.tree])}
    return _stage(arguments, recipe, [head], lambda: sections, section.prompts, plan, measure)


def tune(arguments: Namespace, unknown: list[str]) -> int:
    recipe, section = _recipe(arguments, unknown, "prompts: {path: ...}")
    paths = _paths(recipe)
    heads = heads_by_kind([arguments.head] if arguments.head else [], None if arguments.head else paths.heads)
    heads = {kind: head for kind, head in heads.items() if kind in TUNABLE}
    if not heads:
        kinds = ", ".join(TUNABLE)
        raise UserError(f"{arguments.head or paths.heads}: no head of kind {kinds}; train one, or give --head")
    tasks.check_sources(section.measure or section.prompts)
    tuning.check_apart(section)

    def measure(target: Target, tokenizer: Any) -> dict[str, Any]:
        best = tuning.tune(target, tokenizer, heads, section, paths.tune)
        if section.measure is not None:
            tuning.measure(target, tokenizer, best, section, paths.tune, recipe.seed)
        print(f"tune: {paths.tune / tuning.TUNED} (generate --row FILE, bench --row FILE)")
        return {}

    plan = f"tune: {', '.join(heads)}, up to {section.levels} levels, k {section.k} -> {paths.tune / tuning.TUNED}"
    sections = {"tune": as_dict(section), "threads": recipe.threads}
    return _stage(arguments, recipe, list(heads.values()), lambda: sections, section.prompts, plan, measure)


def _stage(
    arguments: Namespace,
    recipe: pipeline.Recipe,
    heads: Sequence[str | None],
    sections: Callable[[], dict[str, Any]],
    prompts: PromptsConfig,
    plan: str,
    measure: Measure,
) -> int:
    """Runs a stage that is not done yet, after everything that can be refused before a model is loaded."""
    target_inputs(recipe.target)
    tasks.check_sources(prompts)
    _check_weights(heads)
    if arguments.plan:
        print(plan)
        return 0
    inputs = {  # everything that the measurement depends on, by content
        "target": target_inputs(recipe.target),
        "head": [storage.digests(head_directory(head)) for head in dict.fromkeys(heads) if head is not None],
        **sections(),
        "prompts": tasks.prompt_inputs(prompts),
        "seed": recipe.seed,
    }
    paths, name = _paths(recipe), {"calibrate": "calibration"}.get(arguments.command, arguments.command)
    stage = storage.Stage(name, getattr(paths, name), inputs)
    if stage.is_whole():
        print(f"{arguments.command}: whole, reused ({stage.output})")
        return 0
    stage.require_own_directory(arguments.overwrite)
    if name == "bench":
        benches.begin_bench(stage, arguments.overwrite)

    def work() -> tuple[str, int]:
        benches.prepare(recipe.threads)
        target = Target.load(recipe.target, benches.default_device())
        facts = measure(target, load_tokenizer(recipe.target))
        stage.finish(hardware=benches.describe(target), **facts)
        return "done", 0

    return storage.with_status(paths.status, arguments.command, work)


def report(arguments: Namespace, unknown: list[str]) -> int:
    recipe = pipeline.load(arguments, unknown)
    paths = _paths(recipe)
    if arguments.plan:
        print(f"report: {paths.bench} and {paths.calibration} -> {paths.report}")
        return 0
    from aerie.infer.report.page import Facts, write_report
    from aerie.infer.report.tables import console_table

    head = arguments.head or paths.head(recipe)
    stages = (paths.features, head, paths.calibration, paths.bench, paths.tune)
    made = {path: storage.read_json(path / storage.FILE) for path in stages if (path / storage.FILE).is_file()}
    if paths.bench not in made:
        records = paths.bench / RECORDS
        count = records.read_bytes().count(b"\n") if records.is_file() else None
        begun = "nothing was measured yet" if count is None else f"only {count:,} answers of a bench that was stopped"
        raise UserError(f"{paths.bench}: {begun}; run: python infer/main.py bench --config {arguments.config}")
    commands = []  # that made the run
    for words in (facts["argv"] for facts in made.values() if facts.get("argv")):
        launched = words[0] in ("data/main.py", "train/main.py")
        commands.append(f"{'accelerate launch' if launched else 'python'} {shlex.join(words)}")
    trained = made.get(head, {})
    training = {name: trained[name] for name in ("training_tokens", "steps", "seconds") if name in trained}
    facts = Facts(
        run=str(recipe.run),
        commit=made[paths.bench].get("commit"),
        target={"name": recipe.target.path, "dtype": recipe.target.dtype},
        head={"kind": recipe.head.kind, "name": str(head)} | training,
        hardware=made[paths.bench].get("hardware", {}),
        commands=(*commands, f"python infer/main.py report --config {arguments.config}"),
    )
    print(console_table(write_report(paths.bench, paths.calibration, paths.report, facts, seed=recipe.seed)))
    print(f"\nreport: {paths.report / 'index.html'}")
    return 0


def compare(arguments: Namespace, unknown: list[str]) -> int:
    from aerie.infer.report.tables import names

    recipe = pipeline.load(arguments, unknown)
    records = read_records(_paths(recipe).bench / RECORDS)
    if arguments.temperature is not None:
        records = [record for record in records if record.temperature == arguments.temperature]
    difference = tau_difference(records, arguments.of, arguments.against, recipe.seed)
    print(f"{names(records, arguments.of)} against {names(records, arguments.against)}:\n{difference}")
    return 0


def verify(arguments: Namespace, unknown: list[str]) -> int:
    lossless.check_options(arguments)
    if arguments.config is None:
        if arguments.target is None or unknown:
            raise UserError(f"verify needs --config RECIPE, or --target and no {' '.join(unknown) or 'recipe'}")
        config = TargetConfig(arguments.target, dtype=arguments.dtype or "float32", device_map=arguments.device_map)
        return lossless.demonstrate(arguments, config, heads_by_kind(arguments.head, None))
    recipe = pipeline.load(arguments, unknown)
    config = recipe.target if arguments.dtype else replace(recipe.target, dtype="float32")
    section, rows = recipe.bench or recipe.calibrate, recipe.bench.rows if recipe.bench else ()
    heads = heads_by_kind(arguments.head, _paths(recipe).heads)
    if not arguments.head:
        heads |= {kind_at(row.head): row.head for row in rows if row.head is not None}
    return lossless.demonstrate(arguments, config, heads, section.prompts if section else None, rows, recipe.threads)


def generate(arguments: Namespace, unknown: list[str]) -> int:
    threads, given = None, arguments.head
    if arguments.config is None:
        headless = given is None and arguments.row is None
        if arguments.target is None or (headless and (arguments.method is None or METHODS[arguments.method].heads)):
            fix = "--target and --head (or --method vanilla, pld or lookahead)"
            raise UserError(f"generate needs --config RECIPE, or {fix}")
        asked = _asked(arguments, "vanilla" if given is None else USUAL[kind_at(given)], pipeline.pairs_of(unknown))
        words = {"path": arguments.target, "dtype": arguments.dtype, "device_map": arguments.device_map}
        target = from_overrides(TargetConfig, [f"{key}={word}" for key, word in words.items() if word], "command line")
        _check_given(given, asked)
        head = asked.head if given is None else str(given)
        if head is None and METHODS[asked.method].heads:
            raise UserError(f"{arguments.row}: {asked.method} needs a head; give --head")
    else:
        # The recipe's tree is that of its head's usual method; another method has its published one.
        of_method, others = pipeline.method_words(unknown)
        recipe = pipeline.load(arguments, others)
        target, threads, usual = recipe.target, recipe.threads, USUAL[recipe.head.kind]
        asked = _asked(arguments, usual, of_method)
        if asked.method == usual and arguments.row is None:
            words_of_tree = [f"--{word}" for word in of_method if word.startswith("tree.")]
            asked = replace(asked, tree=pipeline.load(arguments, [*others, *words_of_tree]).tree)
        _check_given(given, asked)
        head = _head(asked if given is None else replace(asked, head=None), recipe, given, "--method")
    check_levels(asked.tree, head, "generate")
    _check_weights([head])
    target_inputs(target)
    settings = {name: getattr(arguments, name) for name in ("max_new_tokens", "temperature", "top_k", "top_p")}
    _check_settings({name: value for name, value in settings.items() if value is not None})
    if arguments.plan:
        law = "" if asked.typical is None else "; typical acceptance, NOT lossless where tokens are sampled"
        print(f"generate: {target.path}, {asked.method} with {head or 'no head'}, {_tree_text(asked)}{law}")
        return 0
    benches.prepare(threads)
    generation.answer(target, asked, head, arguments, settings)
    return 0


def _asked(arguments: Namespace, usual: str, of_method: list[str]) -> MethodConfig:
    """The method of --row, or of --method, or the usual one, with what the command line changes of it."""
    if arguments.row is None:
        return pipeline.method_from(arguments.method or usual, of_method)
    if arguments.method is not None:
        raise UserError("--row names its method; leave --method out")
    return load(arguments.row, MethodConfig, of_method)


def _check_given(head: Path | None, asked: MethodConfig) -> None:
    """UserError for a --head that the method does not draft with."""
    if head is not None:
        decode.check_kind(asked.method, kind_at(head) if METHODS[asked.method].heads else "draft", "--head")


def _tree_text(asked: MethodConfig) -> str:
    return str(as_dict(asked.tree)) if asked.tree else "no tree"


def _paths(recipe: pipeline.Recipe) -> pipeline.RunPaths:
    return pipeline.RunPaths(Path(recipe.run))


def _recipe(arguments: Namespace, unknown: list[str], keys: str) -> tuple[pipeline.Recipe, Any]:
    """The recipe and the command's section of it; warns of overrides of `tree` to a command with trees of its own."""
    recipe = pipeline.load(arguments, unknown)
    for word in unknown:
        if word.startswith("--tree.") and arguments.command in OWN_TREES:
            warn(f"{word.partition('=')[0]}: {arguments.command} does not read it; {OWN_TREES[arguments.command]}")
    section = getattr(recipe, arguments.command)
    if section is None:
        raise UserError(f"{arguments.config}: has no section {arguments.command!r}; add one with {keys}")
    return recipe, section


def _head(asked: MethodConfig, recipe: pipeline.Recipe, given: Path | None, place: str) -> str | None:
    """The head that a row drafts with: its own, else --head or the recipe's own where its kind fits, else the run's."""
    paths = _paths(recipe)
    of_recipe = paths.head(recipe)
    if asked.head is None and given in (None, of_recipe) and recipe.head.kind in METHODS[asked.method].heads:
        decode.check_kind(asked.method, kind_at(of_recipe), str(of_recipe))
        return str(of_recipe)
    return find_head(asked, paths.heads, recipe.head.kind, None if given == of_recipe else given, place)


def _check_weights(heads: Sequence[str | None]) -> None:
    for head in heads:
        if head is not None and not is_on_hub(head) and storage.find_weights(Path(head)) is None:
            raise UserError(f"{head}: holds no weights; {TRAIN}")


def _check_settings(given: dict[str, Any]) -> None:
    """UserError for sampling settings, by transformers' names, that no sampler can have."""
    new_tokens = given.pop("max_new_tokens", 1)
    if new_tokens < 1:
        raise UserError(f"--max-new-tokens: must be at least 1, not {new_tokens}")
    try:
        SamplingConfig(**given)
    except ValueError as error:
        raise UserError(f"sampling: {error}") from error
    if given.keys() & {"top_k", "top_p"} and not given.get("temperature"):
        raise UserError(
            "--top-k and --top-p shape what is drawn, and greedy decoding draws nothing; add --temperature 1"
        )
