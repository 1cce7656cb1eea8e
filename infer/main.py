"""Decode with a draft head, calibrate it, measure it, tune its tree, compare, report, and prove that it is lossless."""

import shlex
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

if Path(sys.path[0]).resolve() == Path(__file__).resolve().parent:
    sys.path[0] = str(
        Path(__file__).resolve().parents[1] / "src"
    )  # the checkout's packages, as aerie.*

from aerie.configs.errors import Arguments, UserError, exit_codes, stop_on_signals, warn
from aerie.configs.read import as_dict, user_path, validate
from aerie.configs.read import load as load_row
from aerie.configs.schema import decode
from aerie.configs.schema.decode import METHODS, USUAL, Method, MethodConfig
from aerie.configs.schema.heads import TargetConfig
from aerie.configs.schema.measure import (
    BenchConfig,
    CalibrateConfig,
    HeldOutPrompts,
    SamplingConfig,
    TuneConfig,
)
from aerie.configs.schema.recipe import Recipe, RunPaths, add_arguments, load, pairs_of
from aerie.data.conversations import Message, read_prompts
from aerie.data.inputs import target_inputs
from aerie.model import storage
from aerie.model.hub import head_directory, is_on_hub, require_target

# No torch yet: --help and mistakes are answered at once.

TUNABLE = tuple(kind for kind, name in USUAL.items() if METHODS[name].tree["shape"] != "static")  # type: ignore[index]


def bench(arguments: Namespace, unknown: list[str]) -> int:
    """tau and speedup of every row of the recipe"""
    recipe, section, paths = _recipe(arguments, unknown)
    from aerie.infer.measure.bench import measured
    from aerie.infer.measure.bench_files import graphs_in
    from aerie.infer.measure.suite import suite_of

    rows = section.rows or (
        MethodConfig("vanilla"),
        MethodConfig(USUAL[recipe.head.kind], recipe.tree),
    )
    rows = (*rows, *(load_row(path, MethodConfig, []) for path in arguments.row))
    fitting = (
        _head(arguments, recipe, row, f"bench.rows.{number}").tree
        for number, row in enumerate(rows)
    )
    section = replace(
        section,
        rows=tuple(replace(row, tree=tree) for row, tree in zip(rows, fitting, strict=True)),
    )
    suite = suite_of(section)
    heads = [
        _head(arguments, recipe, row, place).head
        for row, place in zip(suite.rows, suite.places, strict=True)
    ]
    inputs: dict[str, Any] = {"threads": recipe.threads} | decode.digests(
        row.tree for row in suite.rows
    )
    digests = {
        head: storage.file_digest(path)
        for row, head in zip(suite.rows, heads, strict=True)
        if head and row.tree and row.tree.calibrated and not arguments.plan
        if (
            path := head_directory(head) / storage.CALIBRATOR
        ).is_file()  # else the decoder reports it
    }
    inputs |= {
        k: v
        for k, v in (("calibrators", digests), ("cycle", recipe.target.cycle))
        if v not in ({}, "auto")
    }
    graphs = graphs_in(paths.bench) if arguments.plan else ""
    plan = f"{len(suite.rows)} rows x {len(section.sampling)} samplings -> {paths.bench}{graphs}"
    work = partial(measured, section, heads, paths.bench, recipe.seed)
    return _stage(arguments, recipe, heads, inputs, section, plan, work)


def calibrate(arguments: Namespace, unknown: list[str]) -> int:
    """how confidence predicts acceptance, from decoding cycles on held-out prompts"""
    recipe, section, paths = _recipe(arguments, unknown)
    asked = MethodConfig(section.method or USUAL[recipe.head.kind], section.tree)
    if not METHODS[asked.method].heads:
        raise UserError(
            f"calibrate.method: {asked.method} has no head whose confidence could be measured"
        )
    from aerie.infer.decode.methods import check_kind, kind_at
    from aerie.infer.measure.calibrate import run_calibration
    from aerie.infer.papers.analysis import PaperObserver

    if arguments.head is not None:
        check_kind(asked.method, kind_at(arguments.head), "--head")
    asked = _head(arguments, recipe, asked, "calibrate")
    plan = f"{asked.method}, {as_dict(asked.tree)}, {asked.head} -> {paths.calibration}"
    observer = PaperObserver(section.oracle_levels)
    work = partial(run_calibration, asked, section, paths.calibration, recipe.seed, observer)
    return _stage(
        arguments, recipe, [asked.head], decode.digests([asked.tree]), section, plan, work
    )


def tune(arguments: Namespace, unknown: list[str]) -> int:
    """the fastest tree for the heads on this machine, as a YAML; its speed, predicted and measured"""
    recipe, section, paths = _recipe(arguments, unknown)
    from aerie.infer.decode.methods import heads_by_kind
    from aerie.infer.measure.tune import TUNED, check_apart, run_tuning

    heads = (
        heads_by_kind([arguments.head], None) if arguments.head else heads_by_kind([], paths.heads)
    )
    heads = {kind: head for kind, head in heads.items() if kind in TUNABLE}
    if not heads:
        raise UserError(
            f"{arguments.head or paths.heads}: no head of kind {', '.join(TUNABLE)}; give --head"
        )
    check_apart(section)
    plan = f"{', '.join(heads)} -> {paths.tune / TUNED}"
    work = partial(run_tuning, heads, section, paths.tune, recipe.seed)
    inputs = {"threads": recipe.threads} | (
        {} if recipe.target.cycle == "auto" else {"cycle": recipe.target.cycle}
    )
    return _stage(arguments, recipe, list(heads.values()), inputs, section, plan, work)


def _stage(
    arguments: Namespace,
    recipe: Recipe,
    heads: Sequence[str | None],
    inputs: dict[str, Any],
    section: Any,
    plan: str,
    measure: Callable[..., dict[str, Any]],  # (target, tokenizer) -> facts
) -> int:
    """Runs a stage unless it is done; reports mistakes before it loads a model."""
    from aerie.infer.measure.bench import begin_bench, describe, load_quietly
    from aerie.infer.measure.tasks import check_sources, prompt_inputs
    from aerie.model.target import load_tokenizer

    command = arguments.command
    check_sources(section.prompts)
    _check(recipe.target, heads)
    if arguments.plan:
        print(f"{command}: {plan}")
        return 0
    measured = {head: storage.digests(head_directory(head)) for head in filter(None, heads)}
    inputs = {
        "target": target_inputs(recipe.target),
        "head": list(measured.values()),
        command: as_dict(section)
        | ({"generation": given} if (given := recipe.target.generation) else {}),
        **inputs,
        "prompts": prompt_inputs(section.prompts),
        "seed": recipe.seed,
    }
    name = "calibration" if command == "calibrate" else command
    stage = storage.Stage(name, getattr(recipe.paths, name), inputs)
    if stage.is_whole():
        print(f"{command}: whole, reused ({stage.output})")
        return 0
    stage.require_own_directory(arguments.overwrite)
    with storage.working_alone(stage.output, "measuring"):
        if name == "bench":
            begin_bench(stage, arguments.overwrite)
        with storage.status_file(recipe.paths.status, command):
            target = load_quietly(recipe.target, recipe.threads)
            facts = measure(target, load_tokenizer(recipe.target))
            stage.finish(hardware=describe(target), heads=measured, **facts)
    return 0


def report(arguments: Namespace, unknown: list[str]) -> int:
    """summary.json and index.html from what was measured"""
    recipe = load(arguments, unknown)
    paths = recipe.paths
    if arguments.plan:
        print(f"report: {paths.bench} and {paths.calibration} -> {paths.report}")
        return 0
    from aerie.infer.measure.stage_facts import run_facts
    from aerie.infer.papers.appendix import papers_appendix
    from aerie.infer.report.page import write_report
    from aerie.infer.report.tables import console_table
    from aerie.infer.report.training import count_parameters, stopped_by_budget

    again, target = f"--config {arguments.config}", Path(recipe.target.path)
    facts_of = run_facts(paths, again, recipe.target)
    measured, own = facts_of[paths.bench], paths.head(recipe)
    head = arguments.head or min(
        map(Path, measured.get("heads", ())), key=own.__ne__, default=own
    )  # bench --head's
    made = {
        path: storage.sound_record(path)
        for path in (target, paths.features, head, *sorted(paths.heads.glob("*")))
    }
    made |= facts_of
    commands = []  # that made the run
    for words in filter(None, (facts.get("argv") for facts in made.values())):
        launch = (
            ["accelerate", "launch"]
            if words[0] in ("data/main.py", "train/main.py")
            else ["python"]
        )
        commands.append(shlex.join([*(launch if words[0].endswith(".py") else []), *words]))
    trainings = dict[str, dict[str, Any]]()
    for path in (path for path, record in made.items() if record.get("stage") == "train"):
        names = ("steps", "total_steps", "tokens", "train_seconds", "ended")
        name = "target" if path == target else f"{path.name} head"
        trainings[name] = {
            "parameters": count_parameters(path),
            **{name: made[path].get(name) for name in names},
        }
    facts = {
        "run": str(recipe.run),
        "commit": measured.get("commit"),
        "target": {
            "name": recipe.target.path,
            "dtype": recipe.target.dtype,
            "parameters": count_parameters(target),
        },
        "head": {"kind": recipe.head.kind, "name": str(head), "parameters": count_parameters(head)},
        "hardware": measured.get("hardware", {}),
        "commands": [*commands, f"aerie report {again}"],
        "trainings": trainings,
    }
    papers = papers_appendix(paths.root)
    rows = write_report(paths.bench, paths.calibration, paths.report, facts, recipe.seed, papers)
    print(console_table(rows))
    for name, words in stopped_by_budget(trainings).items():
        print(f"{name}: training {words}")
    print(f"\nreport: {paths.report / 'index.html'}")
    return 0


def results(arguments: Namespace, unknown: list[str]) -> int:
    """the tables of runs in Markdown, with commit and hardware, as in docs/results.md"""
    from aerie.infer.measure.stage_facts import measured_facts
    from aerie.infer.papers.claims import claims_of_report
    from aerie.infer.report.tables import report_results

    for bench in (RunPaths(run).bench for run in arguments.runs):
        if (bench / storage.FILE).is_file():  # else only the report is left
            measured_facts(bench, f"--run {bench.parent}")
    names = []
    text = ""
    for run in arguments.runs:
        report = RunPaths(run).report
        results = report_results(run, report)
        names.append(results.run)
        text += results.text + claims_of_report(report, results.run)
    print(
        f"# Results\n\nWritten by `aerie results {shlex.join(names)}` from the runs' reports. ",
        end="",
    )
    print(f"What the columns mean: [metrics.md](metrics.md).\n{text}", end="")
    return 0


def claims(arguments: Namespace, unknown: list[str]) -> int:
    """which of the papers' claims hold in a run: verdicts, with intervals, in Markdown"""
    from aerie.infer.measure.stage_facts import run_facts
    from aerie.infer.papers.claims import claims_table, judge_claims, tau_prompts
    from aerie.infer.papers.evidence import Evidence

    paths = RunPaths(arguments.claims_of)
    run_facts(paths, f"--run {paths.root}")
    lines = judge_claims(Evidence.read(paths.root))
    print(f"{claims_table(lines)}\n{tau_prompts(lines)}")
    print(
        f"\nPictures beside the published points: {paths.report / 'index.html'}#claims (aerie report)"
    )
    return 0


def compare(arguments: Namespace, unknown: list[str]) -> int:
    """the difference in tau between rows of a bench, paired by prompt, with an interval"""
    recipe = load(arguments, unknown)
    from aerie.infer.measure.bench_files import RECORDS, read_records
    from aerie.infer.measure.bootstrap import tau_difference
    from aerie.infer.measure.stage_facts import measured_facts
    from aerie.infer.report.tables import row_labels

    if (recipe.paths.bench / storage.FILE).is_file():  # else it is under way
        measured_facts(recipe.paths.bench, f"--config {arguments.config}")
    records = read_records(recipe.paths.bench / RECORDS)
    if arguments.temperature is not None:
        records = [record for record in records if record.temperature == arguments.temperature]
    of, against = arguments.of, arguments.against
    difference = tau_difference(records, of, against, recipe.seed)
    print(f"{row_labels(records, of)} against {row_labels(records, against)}:\n{difference}")
    return 0


def verify(arguments: Namespace, unknown: list[str]) -> int:
    """prove that methods are lossless; exit code 1 where one is not"""
    recipe = load(arguments, unknown) if arguments.config else None
    if recipe is None and (arguments.target is None or unknown):
        raise UserError("verify needs --config RECIPE, or --target without keys of a recipe")
    from aerie.infer.decode.methods import heads_by_kind, kind_at
    from aerie.infer.measure.lossless import demonstrate

    if recipe is None:
        return demonstrate(
            arguments, _target(arguments, "float32"), heads_by_kind(arguments.head, None)
        )
    target = recipe.target if arguments.dtype else replace(recipe.target, dtype="float32")
    section, rows = recipe.bench or recipe.calibrate, recipe.bench.rows if recipe.bench else ()
    heads = heads_by_kind(arguments.head, recipe.paths.heads)
    if not arguments.head:
        heads |= {kind_at(row.head): row.head for row in rows if row.head is not None}
    prompts = (
        section.prompts if section and (section.prompts.path or section.prompts.tasks) else None
    )
    return demonstrate(arguments, target, heads, prompts, recipe.threads)


def generate(arguments: Namespace, unknown: list[str]) -> int:
    """answers to prompts, streamed (accepted draft tokens are green) or as JSON"""
    pairs_of(unknown)  # reports a mistyped option before a missing one
    path, text = arguments.prompts, arguments.prompt
    if (path is None) == (text is None):
        raise UserError(
            "generate needs either --prompt TEXT (--prompt - reads stdin) or --prompts FILE.jsonl"
        )
    prompts = read_prompts(
        path, sys.stdin.read().removesuffix("\n") if text == "-" else text, arguments.raw
    )
    return _decode(arguments, unknown, prompts)


def chat(arguments: Namespace, unknown: list[str]) -> int:
    """talk with the target; accepted draft tokens are green"""
    return _decode(arguments, unknown)


def _check_sampling(arguments: Namespace) -> None:
    if arguments.max_new_tokens is not None and arguments.max_new_tokens < 1:
        raise UserError(f"--max-new-tokens: must be at least 1, not {arguments.max_new_tokens}")
    names = ("temperature", "top_k", "top_p")
    sampling = {name: value for name in names if (value := getattr(arguments, name)) is not None}
    validate(sampling, SamplingConfig, "sampling", {})
    if not arguments.temperature and {"top_k", "top_p"} & {*sampling}:
        raise UserError("--top-k and --top-p: greedy decoding draws nothing; add --temperature 1")


def _decode(
    arguments: Namespace, unknown: list[str], prompts: list[list[Message]] | None = None
) -> int:
    """Answers the prompts (None: chats), as the command line or its recipe says."""
    command, given, row, recipe, pairs = (
        arguments.command,
        arguments.head,
        arguments.row,
        None,
        pairs_of(unknown),
    )
    if arguments.config is None:
        if arguments.target is None:
            raise UserError(f"{command} needs --config RECIPE, or --target with --head or --method")
        of_target = [pair.removeprefix("target.") for pair in pairs if pair.startswith("target.")]
        usual, target = "vanilla", _target(arguments, pairs=of_target)
        of_method = [pair for pair in pairs if not pair.startswith("target.")]
    else:
        of_method = [pair for pair in pairs if pair.startswith(("tree.", "lookup.", "lookahead."))]
        others = [f"--{pair}" for pair in pairs if pair not in of_method]
        recipe = load(arguments, others)
        usual, target = USUAL[recipe.head.kind], recipe.target
    require_target(target.path)
    _check_sampling(arguments)
    from aerie.infer.decode.engine import make_decoder
    from aerie.infer.decode.methods import Drafters, check_kind, check_levels, kind_at
    from aerie.infer.measure import generate as answers
    from aerie.infer.measure.bench import load_quietly
    from aerie.infer.measure.bench_files import graphs_in
    from aerie.model.target import load_tokenizer

    if recipe is None and given is not None:
        usual = USUAL[kind_at(given)]
    if row is None:
        asked = validate(
            {"method": arguments.method or usual}, MethodConfig, "command line", {}, of_method
        )
        if (
            recipe is not None and asked.method == usual
        ):  # the recipe's tree is for its head's usual method only
            words_of_tree = [f"--{word}" for word in of_method if word.startswith("tree.")]
            asked = replace(asked, tree=load(arguments, [*others, *words_of_tree]).tree)
    elif arguments.method is None:
        asked = load_row(row, MethodConfig, of_method)
    else:
        raise UserError("--row names a method; leave --method out")
    if given is not None:
        check_kind(
            asked.method, kind_at(given) if METHODS[asked.method].heads else "draft", "--head"
        )
        asked = replace(asked, head=str(given))
    if recipe is not None:
        asked = _head(arguments, recipe, asked, command)
    elif asked.head is None and METHODS[asked.method].heads:
        raise UserError(f"{asked.method} needs a head; give --head")
    else:
        asked = check_levels(asked, asked.head, command)
    _check(target, [asked.head])
    if arguments.plan:
        tree = as_dict(asked.tree) if asked.tree else "no tree"
        graphs = graphs_in(recipe.paths.bench, asked.method) if recipe else ""
        print(
            f"{command}: {target.path}, {asked.method} with {asked.head or 'no head'}, {tree}{graphs}"
        )
        return 0
    tokenizer = load_tokenizer(target)
    if not (tokenizer.chat_template or getattr(arguments, "raw", False)):
        fix = "give --target.chat_template FILE.jinja, or generate --raw"
        raise UserError(f"{target.path}: the tokenizer has no chat template; {fix}")
    decoder = make_decoder(
        Drafters(load_quietly(target, recipe.threads if recipe else None)), asked, asked.head
    )
    decoder.tokenizer = tokenizer
    work = answers.chat if prompts is None else partial(answers.generate, prompts)
    work(decoder, arguments)
    return 0


def _target(
    arguments: Namespace, dtype: str | None = None, pairs: Sequence[str] = ()
) -> TargetConfig:
    words = {"dtype": arguments.dtype or dtype, "device_map": arguments.device_map}
    pairs = [*pairs, *(f"{key}={word}" for key, word in words.items() if word)]
    return validate({"path": arguments.target}, TargetConfig, "--target", {}, pairs)


def _recipe(arguments: Namespace, unknown: list[str]) -> tuple[Recipe, Any, RunPaths]:
    recipe = load(arguments, unknown)
    name = arguments.command
    if any(word.startswith("--tree.") for word in unknown) and name in ("bench", "calibrate"):
        warn(
            f"--tree: {name} does not read it; set {'bench.rows' if name == 'bench' else 'calibrate.tree'}"
        )
    section = (
        getattr(recipe, name)
        or {"bench": BenchConfig, "calibrate": CalibrateConfig, "tune": TuneConfig}[name]()
    )
    for key, part in (
        ("prompts", int(name != "bench")),
        ("measure", 0),
    ):  # no prompt is both fitted and measured on
        prompts = getattr(section, key, None)
        if prompts is not None and prompts.path is None and not prompts.tasks:
            section = replace(
                section, **{key: HeldOutPrompts(**vars(prompts), data=recipe.data, part=part)}
            )
    return recipe, section, recipe.paths


def _head(arguments: Namespace, recipe: Recipe, asked: MethodConfig, place: str) -> MethodConfig:
    """A row with its own head, else --head or the recipe's where its kind fits, else the run's."""
    from aerie.infer.decode.methods import check_levels, find_head

    kinds = METHODS[asked.method].heads
    if arguments.plan and kinds and asked.head is not None and is_on_hub(asked.head):
        return asked
    given = arguments.head
    if given is None and recipe.head.kind in kinds:
        given = recipe.paths.head(recipe)
    head = find_head(asked, recipe.paths.heads, recipe.head.kind, given, place)
    return replace(check_levels(asked, head, place), head=head)


def _check(target: TargetConfig, heads: Sequence[str | None]) -> None:
    from aerie.model.target import load_config, only_trains

    if why := only_trains(load_config(target)):
        raise UserError(f"{target.path}: {why}")
    if target.chat_template is not None:
        storage.template_path(target.chat_template)
    for head in filter(None, heads):
        if not is_on_hub(head) and storage.find_weights(Path(head)) is None:
            raise UserError(
                f"{head}: holds no weights; train the head with: aerie train --config RECIPE"
            )


def _given_head(text: str) -> Path:
    return user_path(text) if is_on_hub(user_path(text)) else head_directory(user_path(text))


HEAD: dict[str, Any] = {"type": _given_head, "help": "a head directory (default: the run's own)"}
FILE: dict[str, Any] = {"type": user_path, "metavar": "FILE.yaml"}
ROWS: dict[str, Any] = {
    "type": int,
    "nargs": "+",
    "required": True,
    "help": "rows of bench.rows, from 0; pooled",
}
COMMANDS = (generate, chat, calibrate, bench, tune, report, results, claims, compare, verify)
DECODING: dict[str, dict[str, Any]] = {
    "--method": {"help": f"default: the usual one of the head; {', '.join(get_args(Method))}"},
    "--row": {**FILE, "help": "a method and its tree"},
    "--max-new-tokens": {"type": int},
    "--temperature": {"type": float},
    "--top-k": {"type": int},
    "--top-p": {"type": float},
    "--seed": {"type": int, "default": 0},
    "--show-tree": {"action": "store_true", "help": "print the first draft tree of each answer"},
    "--profile": {
        "action": "store_true",
        "help": "print what a cycle costs: phases, kernels, bytes",
    },
}
OPTIONS: dict[str, dict[str, dict[str, Any]]] = {
    "generate": {
        "--prompt": {"help": "a text; - reads it from stdin"},
        "--prompts": {
            "metavar": "FILE.jsonl",
            "help": "rows with prompt, question, turns or messages",
        },
        "--raw": {"action": "store_true", "help": "the prompt as it is, without the chat template"},
        "--json": {
            "action": "store_true",
            "help": "print one line of JSON per answer, and no stream",
        },
        **DECODING,
    },
    "chat": DECODING,
    "bench": {"--row": {"action": "append", "default": [], **FILE, "help": "one more row"}},
    "results": {"runs": {"type": user_path, "nargs": "+", "metavar": "RUN"}},
    "claims": {"claims_of": {"type": user_path, "metavar": "RUN"}},
    "compare": {
        "--of": ROWS,
        "--against": ROWS,
        "--temperature": {"type": float, "help": "of the answers compared"},
    },
    "verify": {
        "--head": {
            **HEAD,
            "action": "append",
            "default": [],
            "help": "a head directory; one of each kind",
        },
        "--methods": {"default": ",".join(METHODS), "help": "eagle2,sps,...; default: all"},
        "--prompts": {"type": int, "default": 20, "help": "greedy prompts (default 20)"},
        "--draws": {"type": int, "default": 2000, "help": "for each p-value (default 2000)"},
        "--seed": {"type": int, "default": 0, "help": "of the draws"},
        "--json": {"type": user_path, "help": "write the results to this file, too"},
    },
}


@exit_codes()
def main() -> int:
    stop_on_signals()
    parser = Arguments("aerie", description=__doc__)
    subparsers = parser.add_subparsers(dest="command", required=True)
    for run in COMMANDS:
        command = subparsers.add_parser(run.__name__, help=run.__doc__)
        if run not in (results, claims):
            add_arguments(command)
        for flag, settings in ({"--head": HEAD} | OPTIONS.get(run.__name__, {})).items():
            command.add_argument(flag, **settings)
        command.set_defaults(run_command=run)
    arguments, unknown = parser.parse_known_args()
    if unknown and arguments.run_command in (results, claims):
        raise UserError(f"{unknown[0]}: not an option of {arguments.command}")
    place = getattr(arguments, "run", None)
    if place and arguments.config is None:
        arguments.config = (
            stored if (stored := user_path(place) / "recipe.yaml").is_file() else None
        )
        if arguments.config is None and arguments.target is None:
            raise UserError(
                f"{stored}: no such file; give --run a directory that has one, or --config RECIPE"
            )
    return int(arguments.run_command(arguments, unknown))


if __name__ == "__main__":
    sys.exit(main())
