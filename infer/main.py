"""Decode with a draft head, calibrate, measure and tune it, report, and prove it lossless.

On several GPUs: accelerate launch infer/main.py bench (or calibrate, or tune).
"""

import shlex
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

if Path(sys.path[0]).resolve() == Path(__file__).resolve().parent:
    # the checkout's packages, as aerie.*
    sys.path[0] = str(Path(__file__).resolve().parents[1] / "src")

from aerie.configs.errors import (
    Arguments,
    UserError,
    exit_codes,
    rank,
    stop_on_signals,
    warn_of_lone_process,
    world_size,
)
from aerie.configs.read import as_dict, load_file, read_text, user_path, validate
from aerie.configs.schema import decode
from aerie.configs.schema.data import RenderConfig
from aerie.configs.schema.decode import METHODS, USUAL, Method, MethodConfig, ServedConfig
from aerie.configs.schema.measure import (
    BenchConfig,
    CalibrateConfig,
    PromptsConfig,
    SamplingConfig,
    TuneConfig,
)
from aerie.configs.schema.recipe import Recipe, add_arguments, load, pairs_of
from aerie.data.inputs import target_inputs
from aerie.data.questions import RowQuestion, read_prompts
from aerie.infer.command_inputs import (
    head_path,
    is_of_template,
    prompts_or_held_out,
    render_config,
    require_decodable,
    run_heads,
    target_of,
)
from aerie.infer.diagnosing import diagnose
from aerie.model import storage
from aerie.model.hub import head_directory, require_target

# No import of torch here: --help and mistakes must be answered at once.

SECTIONS = {"bench": BenchConfig, "calibrate": CalibrateConfig, "tune": TuneConfig}
ROW_KEYS = ("tree.", "lookup.", "lookahead.")  # generate and chat: keys that change the row
TRAINING_FACTS = ("steps", "total_steps", "tokens", "train_seconds", "ended")
TUNABLE = tuple(kind for kind, name in USUAL.items() if METHODS[name].tree["shape"] != "static")  # type: ignore[index]


def bench(arguments: Namespace, unknown: list[str]) -> int:
    """measure tau and speedup of every row of the recipe"""
    recipe, section = _load_section(arguments, unknown)
    from aerie.infer.decode.calibrator import load_calibrator
    from aerie.infer.measure.bench import run_bench
    from aerie.infer.measure.suite import read_suite

    usual = MethodConfig(USUAL[recipe.head.kind], recipe.tree)
    rows = section.rows or (MethodConfig.of("vanilla"), usual)
    row_schema: Any = decode.BenchRow
    rows += tuple(load_file(path, row_schema, []) for path in arguments.row)
    suite = read_suite(replace(section, rows=rows), run_heads(arguments, recipe).settle)
    if world_size() > 1 and any(isinstance(row.method, ServedConfig) for row in suite.rows):
        raise UserError(
            "bench.rows: a measured server must answer nobody else, but several processes would "
            "ask it at once; start one process"
        )
    inputs = _machine_inputs(recipe) | decode.choice_digests(row.method.tree for row in suite.rows)
    for row in suite.rows:
        if row.head and row.method.tree and row.method.tree.calibrated and not arguments.plan:
            directory = head_directory(row.head)
            load_calibrator(directory)  # reports a missing one before the target is loaded
            digest = storage.file_digest(directory / storage.CALIBRATOR)
            inputs.setdefault("calibrators", {})[row.head] = digest
    return _measure_stage(
        arguments,
        recipe,
        heads=[row.head for row in suite.rows],
        inputs=inputs,
        section=suite.config,
        plan=f"{len(suite.rows)} rows x {len(section.sampling)} samplings",
        measure=partial(run_bench, suite, recipe.root / "bench", recipe.seed),
    )


def calibrate(arguments: Namespace, unknown: list[str]) -> int:
    """measure how well confidence predicts acceptance, on held-out prompts; write a calibrator"""
    recipe, section = _load_section(arguments, unknown)
    method = section.method or USUAL[recipe.head.kind]
    row = MethodConfig(method, section.tree or decode.published_tree(method))
    if not METHODS[row.method].heads:
        raise UserError(
            f"calibrate.method: {row.method} drafts without a head, so there is no confidence to "
            "calibrate; name a method that has one"
        )
    from aerie.infer.decode.find_head import check_kind, kind_at
    from aerie.infer.measure.calibrate import run_calibration
    from aerie.infer.papers.analysis import PaperObserver

    if arguments.head is not None:
        check_kind(row.method, kind_at(arguments.head), "--head")
    settled = run_heads(arguments, recipe).settle(row, "calibrate")
    row = replace(settled.method, head=settled.head)
    observer = PaperObserver(section.oracle_levels)
    return _measure_stage(
        arguments,
        recipe,
        heads=[row.head],
        inputs=decode.choice_digests([row.tree]),
        section=section,
        plan=f"{row.method}, {as_dict(row.tree)}, {row.head}",
        measure=partial(
            run_calibration, row, section, recipe.root / "calibration", recipe.seed, observer
        ),
    )


def tune(arguments: Namespace, unknown: list[str]) -> int:
    """find the fastest tree for the run's heads on this machine; write it as YAML"""
    recipe, section = _load_section(arguments, unknown)
    from aerie.infer.decode.find_head import heads_by_kind
    from aerie.infer.measure.tune import check_apart, run_tuning

    directory = None if arguments.head else recipe.root / "heads"
    by_kind = heads_by_kind([arguments.head] if arguments.head else [], directory)
    heads = {kind: head for kind, head in by_kind.items() if kind in TUNABLE}
    if not heads:
        raise UserError(
            f"{directory or arguments.head}: holds no head of a kind that has a tree to tune "
            f"({', '.join(TUNABLE)}); name one with --head"
        )
    check_apart(section)
    return _measure_stage(
        arguments,
        recipe,
        heads=list(heads.values()),
        inputs=_machine_inputs(recipe),
        section=section,
        plan=", ".join(heads),
        measure=partial(run_tuning, heads, section, recipe.root / "tune", recipe.seed),
    )


def _load_section(arguments: Namespace, unknown: list[str]) -> tuple[Recipe, Any]:
    """The recipe, and the command's section with the prompts filled in."""
    recipe = load(arguments, unknown)
    command = arguments.command
    section = getattr(recipe, command) or SECTIONS[command]()
    # Half of the held-out prompts are for measuring, half for fitting: none serves both.
    part = 0 if command == "bench" else 1
    section = replace(section, prompts=prompts_or_held_out(section.prompts, recipe, part))
    if command == "tune" and section.measure is not None:
        section = replace(section, measure=prompts_or_held_out(section.measure, recipe, 0))
    return recipe, section


def _machine_inputs(recipe: Recipe) -> dict[str, Any]:
    """Settings on which measured times depend."""
    inputs: dict[str, Any] = {"threads": recipe.threads}
    if recipe.target.cycle != "auto":
        inputs["cycle"] = recipe.target.cycle
    return inputs


def _measure_stage(
    arguments: Namespace,
    recipe: Recipe,
    *,
    heads: Sequence[str | None],
    inputs: dict[str, Any],
    section: Any,
    plan: str,
    measure: Callable[..., dict[str, Any]],  # (target, tokenizer) -> facts
) -> int:
    """Runs a stage unless its output is complete; reports mistakes before it loads a model."""
    from aerie.data.rendering import (
        facts_of,
        fix_date,
        recipe_tokenizer,
        warn_of_other_arguments,
    )
    from aerie.infer.measure.bench import begin_bench, describe_machine, load_quietly
    from aerie.infer.measure.shares import connected
    from aerie.infer.measure.tasks import check_sources, prompt_inputs

    command = arguments.command
    spread = recipe.target.device_map
    if world_size() > 1 and spread is not None:
        raise UserError(
            f"target.device_map: {spread} spreads the target over all GPUs; start one process"
        )
    warn_of_lone_process()
    check_sources(section.prompts)
    require_decodable(recipe.target, heads)
    name = "calibration" if command == "calibrate" else command
    output = recipe.root / name
    if arguments.plan:
        print(f"{command}: {plan} -> {output}")
        return 0
    digests = {head: storage.digests(head_directory(head)) for head in heads if head is not None}
    settings = as_dict(section)
    if recipe.target.generation:
        settings["generation"] = recipe.target.generation
    inputs = {
        "target": target_inputs(recipe.target),
        "head": list(digests.values()),
        command: settings,
        **inputs,
        **facts_of(recipe.data),
        "prompts": prompt_inputs(section.prompts),
        "seed": recipe.seed,
    }
    stage = storage.Stage(name, output, inputs)
    is_whole = stage.is_whole()
    if arguments.is_whole:
        return 0 if is_whole else 1
    if is_whole:
        if rank() == 0:
            print(f"{command}: whole, reused ({output})")
        return 0
    recipe = fix_date(recipe)
    stage.inputs.update(facts_of(recipe.data))
    stage.require_own_directory(arguments.overwrite)
    warn_of_other_arguments(recipe.data, heads)
    is_first = rank() == 0
    # The first process holds the lock for all: the others would find it taken.
    with connected(), storage.working_alone(output, "measuring") if is_first else nullcontext():
        if name == "bench" and is_first:
            begin_bench(stage, arguments.overwrite)
        with storage.status_file(recipe.root / "status.json", command):
            target = load_quietly(recipe.target, recipe.threads)
            facts = measure(target, recipe_tokenizer(recipe.target, recipe.data))
            if is_first:
                counts = {"processes": facts.pop("processes", str(world_size()))}
                hardware = describe_machine(target) | counts
                stage.finish(hardware=hardware, heads=digests, **facts)
    return 0


def report(arguments: Namespace, unknown: list[str]) -> int:
    """write summary.json and index.html from what the run measured"""
    recipe = load(arguments, unknown)
    run = recipe.root
    if arguments.plan:
        print(f"report: {run / 'bench'} and {run / 'calibration'} -> {run / 'report'}")
        return 0
    from aerie.infer.measure.stage_facts import run_facts
    from aerie.infer.papers.appendix import papers_appendix
    from aerie.infer.report.page import write_report
    from aerie.infer.report.tables import console_table
    from aerie.infer.report.training import count_parameters, stopped_by_budget

    again = f"--config {arguments.config}"
    target = Path(recipe.target.path)
    stage_facts = run_facts(run, again, recipe.target)
    measured = stage_facts[run / "bench"]
    head = arguments.head or recipe.head_output
    heads = measured.get("heads", {})
    if not arguments.head and heads and str(head) not in heads:
        head = Path(next(iter(heads)))  # the bench had a --head
    sources = (target, run / "features", head, *sorted(run.glob("heads/*")))
    records = {path: storage.sound_record(path) for path in sources} | stage_facts
    trainings = {}
    for path, record in records.items():
        if record.get("stage") == "train":
            name = "target" if path == target else f"{path.name} head"
            figures = {key: record.get(key) for key in TRAINING_FACTS}
            trainings[name] = {"parameters": count_parameters(path), **figures}
    commands = [_command_line(record["argv"]) for record in records.values() if "argv" in record]
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
    papers = partial(papers_appendix, run)
    rows = write_report(
        run / "bench", run / "calibration", run / "report", facts, recipe.seed, papers
    )
    print(console_table(rows))
    for name, words in stopped_by_budget(trainings).items():
        print(f"{name}: training {words}")
    print(f"\nreport: {run / 'report/index.html'}")
    return 0


def _command_line(words: list[str]) -> str:
    """The command that started a stage, from its sys.argv."""
    if words[0] in ("data/main.py", "train/main.py"):
        words = ["accelerate", "launch", *words]
    elif words[0].endswith(".py"):
        words = ["python", *words]
    return shlex.join(words)


def results(arguments: Namespace, unknown: list[str]) -> int:
    """fill the tables of Markdown pages from the runs that they name, as in docs/results.md"""
    from aerie.infer.report.tables import page_with_results

    for page in arguments.pages:
        storage.write_text(page, page_with_results(read_text(page), page))
    return 0


def claims(arguments: Namespace, unknown: list[str]) -> int:
    """print which of the papers' claims hold in a run: verdicts with intervals, in Markdown"""
    from aerie.infer.measure.stage_facts import run_facts
    from aerie.infer.papers.claims import claims_table, judge_claims
    from aerie.infer.papers.evidence import Evidence

    run = arguments.claims_of
    run_facts(run, f"--run {run}")
    print(claims_table(judge_claims(Evidence.read(run))))
    print(
        f"Pictures beside the published points: {run / 'report/index.html'}#claims (aerie report)"
    )
    return 0


def compare(arguments: Namespace, unknown: list[str]) -> int:
    """print the difference in tau between rows of a bench, paired by prompt, with an interval"""
    recipe = load(arguments, unknown)
    from aerie.infer.measure.bench_files import RECORDS, read_records
    from aerie.infer.measure.bootstrap import tau_difference
    from aerie.infer.measure.served import compare_with_chains
    from aerie.infer.measure.stage_facts import measured_facts
    from aerie.infer.report.tables import DraftsText, row_labels

    if (recipe.root / "bench" / storage.FILE).is_file():  # else the bench is still running
        measured_facts(recipe.root / "bench", f"--config {arguments.config}")
    records = read_records(recipe.root / "bench" / RECORDS)
    if arguments.temperature is not None:
        records = [record for record in records if record.temperature == arguments.temperature]
    mine, theirs = (row_labels(records, rows) for rows in (arguments.of, arguments.against))
    difference = tau_difference(records, arguments.of, arguments.against, recipe.seed)
    print(f"{mine} against {theirs}:\n{difference}")
    for comparison in compare_with_chains(records, {*arguments.of, *arguments.against}):
        print(": ".join(DraftsText.of(comparison)))
    return 0


def verify(arguments: Namespace, unknown: list[str]) -> int:
    """prove that methods are lossless; exit with code 1 if one is not"""
    recipe = load(arguments, unknown) if arguments.config else None
    pairs = pairs_of(unknown)
    if recipe is None and not (arguments.target and all(map(is_of_template, pairs))):
        raise UserError(
            "verify needs --config RECIPE, or --target; with --target only keys of data may be set"
        )
    from aerie.data.rendering import fix_date
    from aerie.infer.decode.find_head import heads_by_kind, kind_at
    from aerie.infer.measure.lossless import run_verify

    target = recipe.target if recipe else target_of(arguments)
    if not arguments.dtype:  # in float32, rounding explains no difference
        target = replace(target, dtype="float32")
    heads = heads_by_kind(arguments.head, recipe.root / "heads" if recipe else None)
    if recipe and recipe.bench and not arguments.head:
        heads |= {kind_at(row.head): row.head for row in recipe.bench.rows if row.head is not None}
    section = recipe and (recipe.bench or recipe.calibrate)
    prompts = section.prompts if section else PromptsConfig()
    render = render_config(None, pairs)
    if recipe:
        render = fix_date(recipe, is_stage=False).data
    threads = recipe.threads if recipe else None
    return run_verify(arguments, target, heads, prompts, render, threads)


def generate(arguments: Namespace, unknown: list[str]) -> int:
    """answer prompts, as a stream (accepted draft tokens are green) or as JSON"""
    pairs_of(unknown)  # reports a mistyped option before a missing prompt
    text = arguments.prompt
    if (arguments.prompts is None) == (text is None):
        raise UserError(
            "generate needs either --prompt TEXT (--prompt - reads stdin) or --prompts FILE.jsonl"
        )
    if text == "-":
        text = sys.stdin.read().removesuffix("\n")
    return _decode(
        arguments, unknown, partial(read_prompts, arguments.prompts, text, arguments.raw)
    )


def chat(arguments: Namespace, unknown: list[str]) -> int:
    """talk with the target; accepted draft tokens are green"""
    return _decode(arguments, unknown)


def _check_sampling(arguments: Namespace) -> None:
    """UserError for a sampling option that is out of range or has no effect."""
    flags = {name: getattr(arguments, name) for name in ("temperature", "top_k", "top_p")}
    sampling = {name: value for name, value in flags.items() if value is not None}
    validate(sampling, SamplingConfig, "sampling", {})
    if arguments.max_new_tokens is not None and arguments.max_new_tokens < 1:
        raise UserError(f"max_new_tokens must be at least 1, not {arguments.max_new_tokens}")
    if not arguments.temperature and ("top_k" in sampling or "top_p" in sampling):
        raise UserError(
            "--top-k and --top-p have no effect on greedy decoding; add --temperature 1"
        )


def _decode(
    arguments: Namespace, unknown: list[str], read: Callable[..., list[RowQuestion]] | None = None
) -> int:
    """Answers the prompts that `read` gives (None: chats), as the command line or recipe says."""
    pairs = pairs_of(unknown)
    template_pairs = [pair for pair in pairs if is_of_template(pair)]
    if arguments.config is not None:
        row_pairs = [pair for pair in pairs if pair.startswith(ROW_KEYS)]
        unread = ROW_KEYS if arguments.row else ROW_KEYS[1:]  # a recipe has a tree as well
        others = [f"--{pair}" for pair in pairs if not pair.startswith(unread)]
        recipe = load(arguments, others, arguments.method)
        target = recipe.target
    elif arguments.target is not None:
        row_pairs = [pair for pair in pairs if not pair.startswith(("target.", "data."))]
        recipe = None
        target = target_of(arguments, [pair for pair in pairs if pair.startswith("target.")])
    else:
        raise UserError(
            f"{arguments.command} needs --config RECIPE, or --target with --head or --method"
        )
    system_prompt = recipe.data.system_prompt if recipe else None
    field = recipe.data.prompt_field if recipe else None
    prompts = read(field, system_prompt) if read else None
    require_target(target.path)
    _check_sampling(arguments)
    from aerie.data.rendering import fix_date, recipe_tokenizer, warn_of_other_arguments
    from aerie.infer.decode.engine import make_decoder
    from aerie.infer.decode.loaded_heads import LoadedHeads
    from aerie.infer.measure import generate as answers
    from aerie.infer.measure.bench import load_quietly

    row = _row_to_decode(arguments, recipe, row_pairs)
    require_decodable(target, [row.head])
    if arguments.plan:
        tree = as_dict(row.method.tree) if row.method.tree else "no tree"
        drafting = f"{row.method.method} with {row.head or 'no head'}, {tree}"
        print(f"{arguments.command}: {target.path}, {drafting}")
        return 0
    if recipe:
        render: RenderConfig = fix_date(recipe, is_stage=False).data
    else:
        render = render_config(row.head, template_pairs)
    warn_of_other_arguments(render, [row.head])
    tokenizer = recipe_tokenizer(target, render)
    if not (tokenizer.chat_template or getattr(arguments, "raw", False)):
        raise UserError(
            f"{target.path}: the tokenizer has no chat template; "
            "give --target.chat_template FILE.jinja, or use generate --raw"
        )
    loaded = load_quietly(target, recipe.threads if recipe else None)
    decoder = make_decoder(LoadedHeads(loaded), row.method, row.head)
    decoder.tokenizer = tokenizer
    if prompts is None:
        answers.run_chat(decoder, arguments, system_prompt)
    else:
        answers.answer_prompts(prompts, decoder, arguments)
    return 0


def _row_to_decode(arguments: Namespace, recipe: Recipe | None, pairs: list[str]) -> Any:
    """The settled row of --row, --method or the head; pairs: its changes on the command line."""
    from aerie.infer.decode.find_head import check_kind, kind_at
    from aerie.infer.measure.suite import fit_to_head

    usual = "vanilla"
    if recipe is not None:
        usual = USUAL[recipe.head.kind]
    elif arguments.head is not None:
        usual = USUAL[kind_at(arguments.head)]
    method = arguments.method or usual
    if arguments.row is not None:
        if arguments.method is not None:
            raise UserError(f"--method {arguments.method}: --row names a method; leave one out")
        row = load_file(arguments.row, MethodConfig, pairs)
    elif recipe is not None and method == usual:  # the recipe's tree includes the changes
        pairs = [pair for pair in pairs if not pair.startswith("tree.")]
        row = validate({"method": method}, MethodConfig, "command line", {}, pairs)
        row = replace(row, tree=recipe.tree)
    else:
        row = validate({"method": method}, MethodConfig, "command line", {}, pairs)
    if arguments.head is not None:
        check_kind(row.method, kind_at(arguments.head), "--head")
        row = replace(row, head=str(arguments.head))
    if recipe is not None:
        return run_heads(arguments, recipe).settle(row, arguments.command)
    if row.head is None and METHODS[row.method].heads:
        raise UserError(f"{row.method} drafts with a head; name it with --head")
    return fit_to_head(row, row.head, arguments.command)


HEAD: dict[str, Any] = {
    "type": head_path,
    "help": "the head's directory or Hub id (default: the run's)",
}
YAML_FILE: dict[str, Any] = {"type": user_path, "metavar": "FILE.yaml"}
ROWS: dict[str, Any] = {
    "type": int,
    "nargs": "+",
    "required": True,
    "help": "numbers of bench.rows, from 0; several rows are pooled",
}
SUBCOMMANDS = (
    generate,
    chat,
    calibrate,
    bench,
    tune,
    diagnose,
    report,
    results,
    claims,
    compare,
    verify,
)
DECODING: dict[str, dict[str, Any]] = {
    "--method": {"help": f"default: the head's usual one; {', '.join(get_args(Method))}"},
    "--row": {**YAML_FILE, "help": "a file with a method and its tree"},
    "--max-new-tokens": {"type": int},
    "--temperature": {"type": float},
    "--top-k": {"type": int, "help": "default: the generation_config's, else 0, all tokens"},
    "--top-p": {"type": float},
    "--seed": {"type": int, "default": 0},
    "--show-tree": {"action": "store_true", "help": "print the first draft tree of each answer"},
    "--profile": {
        "action": "store_true",
        "help": "print what a cycle costs: phases, kernels, bytes",
    },
}
IS_WHOLE: dict[str, dict[str, Any]] = {
    "--is-whole": {"action": "store_true", "help": "do nothing; exit with code 1 if work is left"},
}
COMMAND_OPTIONS: dict[str, dict[str, dict[str, Any]]] = {
    "generate": {
        "--prompt": {"help": "a text; - reads it from stdin"},
        "--prompts": {
            "metavar": "FILE.jsonl",
            "help": "rows with a column prompt, question, turns or messages",
        },
        "--raw": {
            "action": "store_true",
            "help": "give the prompt as it is, without the chat template",
        },
        "--json": {
            "action": "store_true",
            "help": "print one line of JSON per answer instead of a stream",
        },
        **DECODING,
    },
    "chat": DECODING,
    "calibrate": IS_WHOLE,
    "tune": IS_WHOLE,
    "bench": {
        "--row": {"action": "append", "default": [], **YAML_FILE, "help": "measure one more row"},
        **IS_WHOLE,
    },
    "diagnose": {
        "--prompts": {"type": user_path, "metavar": "FILE", "help": "default: the recipe's"},
        "--server": {"metavar": "URL", "help": "a server that drafts with the head"},
        "--trained-on": {
            "type": user_path,
            "metavar": "FILE",
            "help": "conversations that the head was trained on",
        },
        "--trained-target": {"help": "the target that the head was trained for, if it is another"},
        "--temperature": {
            "type": float,
            "help": "temperature of the answers (default: the generation_config's)",
        },
        "--num-prompts": {"type": int, "default": 24, "help": "the most prompts (default 24)"},
        "--mend": {
            "type": user_path,
            "metavar": "DIRECTORY",
            "help": "write the head here, read in the way that is accepted best",
        },
        "--json": {"action": "store_true", "help": "print the figures as JSON"},
        "--out": {
            "type": user_path,
            "metavar": "FILE.json",
            "help": "default: diagnose.json in the run, else in this directory",
        },
    },
    "results": {"pages": {"type": user_path, "nargs": "+", "metavar": "PAGE.md"}},
    "claims": {"claims_of": {"type": user_path, "metavar": "RUN"}},
    "compare": {
        "--of": ROWS,
        "--against": ROWS,
        "--temperature": {"type": float, "help": "compare only answers at this temperature"},
    },
    "verify": {
        "--head": {
            **HEAD,
            "action": "append",
            "default": [],
            "help": "the head's directory or Hub id; one head of each kind",
        },
        "--methods": {"default": ",".join(METHODS), "help": "such as eagle2,sps (default: all)"},
        "--prompts": {"type": int, "default": 20, "help": "prompts answered greedily (default 20)"},
        "--draws": {"type": int, "default": 2000, "help": "draws for each p-value (default 2000)"},
        "--seed": {"type": int, "default": 0, "help": "seed of the draws"},
        "--json": {"type": user_path, "help": "also write the results to this file"},
    },
}


@exit_codes()
def main() -> int:
    stop_on_signals()
    parser = Arguments("aerie", description=__doc__)
    subparsers = parser.add_subparsers(dest="command", required=True)
    for command in SUBCOMMANDS:
        subparser = subparsers.add_parser(command.__name__, help=command.__doc__)
        if command not in (results, claims):
            add_arguments(subparser)
        options = {"--head": HEAD} | COMMAND_OPTIONS.get(command.__name__, {})
        for flag, settings in options.items():
            subparser.add_argument(flag, **settings)
        subparser.set_defaults(run_command=command)
    arguments, unknown = parser.parse_known_args()
    if unknown and arguments.run_command in (results, claims):
        raise UserError(f"{unknown[0]}: aerie {arguments.command} has no such option")
    run = getattr(arguments, "run", None)
    if run and arguments.config is None:
        stored = user_path(run) / "recipe.yaml"
        if stored.is_file():
            arguments.config = stored
        elif arguments.target is None:
            raise UserError(
                f"{stored}: no such file; give --run a directory that has one, or --config RECIPE"
            )
    return int(arguments.run_command(arguments, unknown))


if __name__ == "__main__":
    sys.exit(main())
