"""The model card of a shipped head: made from its files and the run's reports, nothing written by hand."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import yaml
from jinja2 import Environment, StrictUndefined

from aerie.configs.errors import UserError
from aerie.model.formats.common import SPECULATIVE_TOKENS
from aerie.model.formats.sglang import CHECKED
from aerie.model.hub import HUB_ID, is_on_hub
from aerie.model.storage import CONFIG, digests, read_json

NAMES = {"eagle1": "EAGLE-1 / EAGLE-2", "eagle3": "EAGLE-3", "medusa": "Medusa", "hydra": "Hydra"}
SGLANG_ALGORITHMS = {"eagle1": "EAGLE", "eagle3": "EAGLE3"}
NOT_IN_SGLANG = ("qkv_bias", "qk_norm", "norm_before_residual", "norm_before_fc")


@dataclass(frozen=True)
class CardFacts:
    """What a card is made of; the tables are the files' own."""

    repo: str
    found: dict[str, Any]  # of model.inspection
    target: str  # the name that people are told
    provenance: dict[str, Any] = field(default_factory=dict)
    recipe: dict[str, Any] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)  # report/summary.json
    calibration: dict[str, Any] = field(default_factory=dict)
    licence: str | None = None
    is_converted: bool = False  # written by `convert`


def render_card(facts: CardFacts) -> str:
    """README.md with its front matter (licence, base_model, tags)."""
    kind, layout = facts.found["kind"], facts.found["layout"]
    base_model = facts.target if is_on_hub(facts.target) else None
    front: dict[str, Any] = {"license": facts.licence, "base_model": base_model}
    front |= {"pipeline_tag": "text-generation", "tags": ["speculative-decoding", "draft-head", kind, "aerie"]}
    if layout == "speculators":
        front["tags"] += ["speculators", "vllm"]
    front["datasets"] = [name for name in sources(facts.recipe) if HUB_ID.fullmatch(name)]
    template = Path(__file__).with_name("card.md.jinja").read_text(encoding="utf-8")
    environment = Environment(undefined=StrictUndefined, autoescape=False, keep_trailing_newline=True)  # noqa: S701
    body = environment.from_string(template).render(
        title=facts.repo.rsplit("/", maxsplit=1)[-1],
        kind_name=NAMES[kind],
        target=facts.target,
        base_model=base_model,
        facts=_facts(facts),
        rows=[_row(row) for row in measured_rows(facts.summary, (None, kind))],
        setting=_setting(facts.summary),
        calibration=_calibration(facts.calibration),
        commands=commands(facts),
        origin=_origin(facts),
        made=_made(facts),
        licence=_licence(facts.licence),
    )
    known = {name: value for name, value in front.items() if value}
    return f"---\n{yaml.safe_dump(known, sort_keys=False)}---\n\n{body}"


def _made(facts: CardFacts) -> str:
    """What this project had to do with the head."""
    layout = facts.found["layout"]
    if layout == "aerie":
        return "trained with aerie"
    return f"in the {layout} layout, {'converted' if facts.is_converted else 'pushed'} with aerie"


def commands(facts: CardFacts) -> dict[str, str]:
    """How to decode with the head here, in vLLM and in SGLang, from the layout in which it lies in the repository."""
    here = f'python infer/main.py generate --target {facts.target} --head {facts.repo} --prompt "Why is the sky blue?"'
    return {"here": here, "vllm": _vllm(facts), "sglang": _sglang(facts)}


def _vllm(facts: CardFacts) -> str:
    if facts.found["kind"] not in SGLANG_ALGORITHMS:
        return f"# this project writes no {NAMES[facts.found['kind']]} head for vLLM; it decodes here"
    if facts.found["kind"] == "eagle3":
        place, before = _converted(facts, "speculators")
        return f"{before}vllm serve {place}"
    if "bias" in facts.found["options"]:
        return "# not possible: vLLM's EAGLE-1 has no fc.bias, this head has one"
    place, before = _converted(facts, "safeailab")
    speculative = json.dumps({"model": place, "method": "eagle", "num_speculative_tokens": SPECULATIVE_TOKENS})
    return f"{before}vllm serve {facts.target} --speculative-config '{speculative}'"


def _sglang(facts: CardFacts) -> str:
    if facts.found["kind"] not in SGLANG_ALGORITHMS:
        return f"# SGLang has no {NAMES[facts.found['kind']]}; it decodes here"
    unknown = [name for name in NOT_IN_SGLANG if name in facts.found["options"]]
    if unknown:
        return f"# not possible: SGLang's draft modules do not know {', '.join(unknown)}, which this head has"
    place, before = _converted(facts, "sglang")
    return (
        f"# {_sglang_versions(facts)}\n"
        f"{before}python -m sglang.launch_server --model-path {facts.target} "
        f"--speculative-algorithm {SGLANG_ALGORITHMS[facts.found['kind']]} --speculative-draft-model-path {place} "
        f"--speculative-num-steps {SPECULATIVE_TOKENS} --speculative-eagle-topk 8 --speculative-num-draft-tokens 32"
    )


def _sglang_versions(facts: CardFacts) -> str:
    """Which SGLang reads the head as it is meant: its counting of the taps has changed, and its norms are recent."""
    if facts.found["kind"] != "eagle3":
        return "any SGLang that knows EAGLE"
    made = facts.found["made_for"] or f"SGLang {CHECKED}"
    recent = [name for name in ("fc_norm", "norm_output") if name in facts.found["options"]]
    return f"{made}, by its counting of the target's states" + (
        f"; 0.5.12 at least, for {' and '.join(recent)}" if recent else ""
    )


def _converted(facts: CardFacts, to: str) -> tuple[str, str]:
    """Where the head lies in layout `to`, and the command that puts it there."""
    if facts.found["layout"] == to:
        return facts.repo, ""
    return "draft", f"python model/main.py convert {facts.repo} --to {to} --target {facts.target} --out draft\n"


def _facts(facts: CardFacts) -> list[tuple[str, str]]:
    found, provenance, data = facts.found, facts.provenance, sources(facts.recipe)
    counts, rope = found["parameters"], found["rope"]
    table = [
        ("Target", facts.target),
        ("Head", f"{NAMES[found['kind']]}, {counts['own'] + counts['lm_head']:,} parameters, {counts['dtype']}"),
        ("Layout", f"{found['layout']} ({found['weights']})"),
    ]
    if found["kind"] == "eagle3":
        taps = "not determined by its files: the default ones of its target" if found["taps"] is None else found["taps"]
        table.append(("Reads", f"the target's hidden_states {taps} (0 is the embedding)"))
        vocabulary = found["vocabulary"]
        covered = "" if vocabulary["coverage"] is None else f", {vocabulary['coverage']:.2%} of the training answers"
        table.append(("Draft vocabulary", f"{vocabulary['draft']:,} of {vocabulary['target']:,} tokens{covered}"))
    if rope["theta"] is not None:
        table.append(("Positions", f"{rope['max_position_embeddings']:,}, RoPE base {rope['theta']:,.0f}"))
    if data:
        told = [last_part(name) if is_local_source(name) else name for name in data]
        table.append(("Conversations", ", ".join(f"`{name}`" for name in told)))
    counted = [f"{provenance[name]:,} {name}" for name in ("tokens", "steps") if isinstance(provenance.get(name), int)]
    if counted:
        table.append(("Training", ", ".join(counted)))
    return table


def _setting(summary: dict[str, Any]) -> list[str]:
    if not summary:
        return []
    hardware = ", ".join(f"{name} {value}" for name, value in summary.get("hardware", {}).items())
    return [f"Hardware: {hardware}. Commit {summary.get('commit') or 'unknown'}."]


def measured_rows(summary: dict[str, Any], kinds: tuple[str | None, ...]) -> list[dict[str, Any]]:
    """The rows of a report that did not fail, drafted by a head of one of these kinds (None: by none)."""
    own = summary.get("head", {}).get("kind")  # of reports whose rows do not say it
    return [
        row
        for row in summary.get("rows", [])
        if row.get("status") == "ok" and row.get("head", own if row.get("tree") else None) in kinds
    ]


def _tree(tree: dict[str, Any] | None) -> str:
    if not tree:
        return "-"
    shape = tree.get("shape", "dynamic")
    sizes = {"chain": ()}.get(shape, ("k", "nodes") if shape == "dynamic" else ("nodes",))
    parts = [f"{tree.get('levels')} levels", *(f"{name} {tree[name]}" for name in sizes if name in tree)]
    variant = [tree["variant"]] if tree.get("variant") else []
    return ", ".join([*(parts if shape == "dynamic" else [shape, *parts]), *variant])


def _row(row: dict[str, Any]) -> dict[str, str]:
    interval = row.get("speedup_ci95")
    speedup = _number(row.get("speedup"))
    if interval and row.get("method") != "vanilla":
        speedup += f" ({_number(interval[0])}-{_number(interval[1])})"
    identical = row.get("identical")
    law = "NOT lossless" if "not lossless" in str(row.get("verify", "")) else "lossless in law"
    return {
        "method": str(row.get("method")),
        "tree": _tree(row.get("tree")),
        "task": str(row.get("task", "-")),
        "temperature": f"{row.get('temperature', 0):g}",
        "prompts": str(row.get("prompts", "-")),
        "tau": _number(row.get("tau")),
        "speedup": speedup,
        "tokens_per_s": _number(row.get("tokens_per_s"), 0),
        "identical": law if identical is None else f"{identical}/{row.get('prompts')}",
    }


def _calibration(calibration: dict[str, Any]) -> dict[str, str] | None:
    if not calibration:
        return None
    return {
        name: _number(calibration.get(name), 4 if name != "temperature" else 1)
        for name in ("temperature", "ece", "brier")
    }


def _origin(facts: CardFacts) -> list[str]:
    provenance = facts.provenance
    if not provenance:
        return ["There is no record of its training in these files."]
    state = {True: ", with uncommitted changes", False: "", None: ""}[provenance.get("dirty")]
    versions = ", ".join(f"{name} {value}" for name, value in provenance.get("versions", {}).items())
    return [
        f"Commit {provenance.get('commit') or 'unknown'}{state}; command `{' '.join(provenance.get('argv', []))}`.",
        f"Versions: {versions}.",
        "`recipe.yaml` is the whole recipe, `provenance.json` what went into it by digest.",
    ]


def _licence(licence: str | None) -> str:
    if licence is None:
        return "No licence was given for these weights. The target's own licence applies to what it writes."
    return f"Licence of these weights: {licence}. The target has its own."


def _number(value: Any, digits: int = 2) -> str:
    return f"{value:.{digits}f}" if isinstance(value, int | float) else "-"


MEASURE = "python infer/main.py bench --overwrite, then report"


@dataclass(frozen=True)
class Measured:
    """A run's report/summary.json, empty where nothing is proven, and its calibration.json where that is proven."""

    summary: dict[str, Any]
    calibration: Path | None = None
    notes: tuple[str, ...] = ()


def measured(directory: Path, run: Path | None, without_results: bool) -> Measured:
    """What the run measured with the head in directory, or with the head that it was exported from.

    bench/provenance.json and calibration/provenance.json hold the digests of the heads that were measured; without the
    first the results of report/ are nobody's. UserError for results that are not proven; without_results: a note.
    """
    if run is None:
        return Measured({})
    notes = []
    summary, place = json_table(run / "report" / "summary.json"), run / "calibration" / "calibration.json"
    doubt = _doubt(directory, run / "bench") if summary else None
    if doubt is not None and not without_results:
        raise UserError(f"{doubt}; measure this one with: {MEASURE}; or ship without results: --without-results")
    if doubt is not None:
        notes.append(f"report/summary.json left out: {doubt}")
        summary = {}
    doubt = _doubt(directory, run / "calibration")
    if doubt is None and place.is_file():
        return Measured(summary, place, tuple(notes))
    if place.is_file() or "calibration" in summary:
        notes.append(f"calibration left out: {doubt or f'{place} is missing'}")
    return Measured({name: value for name, value in summary.items() if name != "calibration"}, None, tuple(notes))


def json_table(path: Path) -> dict[str, Any]:
    """A JSON file's table, empty where there is no such file."""
    if not path.is_file():
        return {}
    found = read_json(path)
    return found if isinstance(found, dict) else {}


def _doubt(directory: Path, stage: Path) -> str | None:
    """Why a stage's output is not this head's, None where it is."""
    inputs = json_table(stage / "provenance.json").get("inputs")
    used = inputs.get("head") if isinstance(inputs, dict) else None
    heads = [head for head in (used if isinstance(used, list) else [used]) if isinstance(head, dict) and head]
    if not heads:
        return f"{stage}: holds no record of the head that was measured (provenance.json)"
    facts = json_table(directory / CONFIG).get("aerie")
    origin = facts.get("exported_from") if isinstance(facts, dict) else None
    files = origin.get("files") if isinstance(origin, dict) else None
    known = [digests(directory), files if isinstance(files, dict) else {}]
    if any(head.items() <= own.items() for head in heads for own in known):
        return None
    return f"{stage}: was measured with another head than {directory}"


PART = r"""[^\s'"\[\](){}<>,;=|]"""
ROOTED = re.compile(
    rf"(?<![\w./~\\-])(?!//)(?:~|[A-Za-z]:(?=[/\\]))?(?:/|\\\\|(?<=:)\\|(?:\.\./)+){PART}+"
    r"|(?<![\w./~-])~/?(?=\s|$)"
)
WHOLE = re.compile(r"~?/|~$|[A-Za-z]:[/\\]|\\\\|\.\./")
HOME = re.compile(r"(~|(/.*)?/(home|Users)/[^/]+|/root|[A-Za-z]:[/\\]Users[/\\][^/\\]+)[/\\]?")
OPTION = re.compile(r"(--?[\w.-]+=)(.+)", re.DOTALL)  # of a command line
SOURCE = re.compile(r"[\w-][\w.-]*(/[\w.-]+)?(:[\w.-]+){0,2}")  # a data set of the Hub, its configuration and split
FILES = (".json", ".jsonl", ".parquet", ".csv", ".txt", ".gz", ".zst", ".arrow", ".yaml")


def public(value: Any, names: Mapping[str, str]) -> Any:
    """The value with every text, keys included, made public; names are local spellings and what the world is told."""
    if isinstance(value, dict):
        return {public(key, names): public(entry, names) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [public(entry, names) for entry in value]
    return _text(value, names) if isinstance(value, str) else value


def public_names(target: str, records: Mapping[str, Any]) -> dict[str, str]:
    """Local spelling -> public name of the target, the conversations and the run that a head's records name.

    records are the tables of the files by their names.
    """
    config, recipe, summary = (records.get(name) for name in ("config.json", "recipe.yaml", "summary.json"))
    spelt = [
        _at(config, "aerie", "target_path"),
        _at(config, "speculators_config", "verifier", "name_or_path"),
        _at(recipe, "target", "path"),
        _at(summary, "target", "name"),
        _at(records.get("provenance.json"), "inputs", "target", "path"),
    ]
    names = {name: target for name in spelt if isinstance(name, str) and not is_on_hub(name)}
    for name in sources(recipe):
        if is_local_source(name):
            names[name] = last_part(name)
    for run in (_at(recipe, "run"), _at(summary, "run")):
        if isinstance(run, str) and run:
            names.setdefault(run, last_part(run))
    return names


def sources(recipe: Any) -> list[str]:
    """The conversations that a recipe names."""
    found = _at(recipe, "data", "conversations")
    return [str(name) for name in found] if isinstance(found, list | tuple) else []


def is_local_source(name: str) -> bool:
    """Whether conversations are a file or folder of the trainer's machine and no data set of the Hub."""
    return name.endswith(FILES) or name.count("/") == 0 or SOURCE.fullmatch(name) is None or not is_on_hub(_bare(name))


def last_part(path: str) -> str:
    """The last part of a path; "home" for somebody's home."""
    if HOME.fullmatch(path):
        return "home"
    kind = PureWindowsPath if "\\" in path else PurePosixPath
    return kind(path).name.strip("~.") or "home"


def _bare(name: str) -> str:
    """A data set's repository, without its configuration and split."""
    return name.split(":", maxsplit=1)[0]


def _text(text: str, names: Mapping[str, str]) -> str:
    if option := OPTION.fullmatch(text):
        return option[1] + _text(option[2], names)
    text = re.sub(r"\bfile://", "", text)
    for local in sorted(names, key=len, reverse=True):
        if text == local or text.startswith(f"{local}/"):
            return names[local] + text[len(local) :]
        if "/" in local:
            told = names[local].replace("\\", r"\\")
            text = re.sub(rf"(?<![\w./~-]){re.escape(local)}(?![\w.-])", told, text)
    if WHOLE.match(text) and "\n" not in text:
        return last_part(text.rstrip())
    return ROOTED.sub(lambda found: last_part(found[0]), text)


def _at(table: Any, *keys: str) -> Any:
    """The entry under nested keys, None where a table is missing."""
    for key in keys:
        table = table.get(key) if isinstance(table, dict) else None
    return table
