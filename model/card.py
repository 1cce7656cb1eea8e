"""The model card of a shipped head, and what the world is told instead of local paths."""

import re
from collections.abc import Mapping
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from aerie.model.formats.content import SPECULATIVE_TOKENS
from aerie.model.formats.sglang import CHECKED
from aerie.model.hub import HUB_ID, is_on_hub
from aerie.model.storage import read_json

NAMES = {"eagle1": "EAGLE-1 / EAGLE-2", "eagle3": "EAGLE-3", "medusa": "Medusa", "hydra": "Hydra"}
NOT_IN_SGLANG = ("qkv_bias", "qk_norm", "norm_before_residual", "norm_before_fc")
NEW_IN_SGLANG = ("fc_norm", "norm_output")  # known from 0.5.12 on


def render_card(
    repo: str, head: dict[str, Any], target: str, records: dict[str, Any], summary: dict[str, Any], licence: str | None
) -> str:
    """README.md with its front matter (licence, base_model, tags, data sets, figures); the words are in card.md.jinja.

    head is `inspect_head`'s, target the name that people are told, records the shipped files as tables by their names,
    summary the report's. None of them holds a local path.
    """
    from huggingface_hub import EvalResult, ModelCard, ModelCardData

    kind, title = head["kind"], repo.rsplit("/", maxsplit=1)[-1]
    rows = measured_rows(summary, (None, kind))
    conversations = sources(records.get("recipe.yaml"))
    results = [
        EvalResult(
            task_type="text-generation",
            dataset_type=str(row.get("task", "prompts")),
            dataset_name=str(row.get("task", "prompts")),
            metric_type=metric,
            metric_name=f"{metric} ({row['method']}, temperature {row.get('temperature', 0):g})",
            metric_value=round(row[metric], 4),
        )
        for row in rows
        for metric in ("tau", "speedup")
        if row["method"] != "vanilla" and isinstance(row.get(metric), int | float)
    ]
    data = ModelCardData(
        license=licence,
        base_model=target if is_on_hub(target) else None,
        library_name="aerie",
        pipeline_tag="text-generation",
        tags=["speculative-decoding", "draft-head", kind, "aerie"]
        + (["speculators", "vllm"] if head["layout"] == "speculators" else []),
        datasets=[name for name in conversations if HUB_ID.fullmatch(name)] or None,
        model_name=title,
        eval_results=results or None,
    )
    provenance = records.get("provenance.json", {})
    options = head["options"]
    card = ModelCard.from_template(
        data,
        template_path=str(Path(__file__).with_name("card.md.jinja")),
        title=title,
        repo=repo,
        head=head,
        kind=kind,
        kind_name=NAMES[kind],
        target=target,
        is_on_hub=is_on_hub(target),
        is_converted="exported_from" in (records.get("config.json", {}).get("aerie") or {}),
        conversations=[last_part(name) if is_local_source(name) else name for name in conversations],
        counts=[f"{provenance[n]:,} {n}" for n in ("tokens", "steps") if isinstance(provenance.get(n), int)],
        summary=summary,
        rows=[_cells(row) for row in rows],
        calibration={name: _number(value, 4) for name, value in records.get("calibration.json", {}).items()},
        provenance=provenance,
        licence=licence,
        drafts=SPECULATIVE_TOKENS,
        sglang_lacks=[name for name in NOT_IN_SGLANG if name in options],
        sglang_versions=(head["made_for"] or f"SGLang {CHECKED}")
        if kind == "eagle3"
        else "any SGLang that knows EAGLE",
        sglang_recent=[name for name in NEW_IN_SGLANG if name in options],
    )
    return str(card)


def measured_rows(summary: dict[str, Any], kinds: tuple[str | None, ...]) -> list[dict[str, Any]]:
    """The rows of a report that did not fail, drafted by a head of one of these kinds (None: by none)."""
    reported = summary.get("head", {}).get("kind")  # of reports whose rows do not say it
    return [
        row
        for row in summary.get("rows", [])
        if row.get("status") == "ok" and row.get("head", reported if row.get("tree") else None) in kinds
    ]


def _cells(row: dict[str, Any]) -> list[str]:
    """A measured row as the cells of the card's table."""
    tree, interval, cell = row.get("tree"), row.get("speedup_ci95"), "-"
    if tree:
        shape = tree.get("shape", "dynamic")
        sizes = {"dynamic": ("k", "nodes"), "chain": ()}.get(shape, ("nodes",))
        parts = [f"{tree.get('levels')} levels", *(f"{name} {tree[name]}" for name in sizes if name in tree)]
        variant = [tree["variant"]] if tree.get("variant") else []
        cell = ", ".join([*(parts if shape == "dynamic" else [shape, *parts]), *variant])
    speedup = _number(row.get("speedup"))
    if interval and row.get("method") != "vanilla":
        speedup += f" ({_number(interval[0])}-{_number(interval[1])})"
    law = "NOT lossless" if "not lossless" in str(row.get("verify", "")) else "lossless in law"
    prompts, identical = row.get("prompts", "-"), row.get("identical")
    equal = law if identical is None else f"{identical}/{prompts}"
    place = [str(row.get("method")), cell, str(row.get("task", "-")), f"{row.get('temperature', 0):g}", str(prompts)]
    return [*place, _number(row.get("tau")), speedup, _number(row.get("tokens_per_s"), 0), equal]


def _number(value: Any, digits: int = 2) -> str:
    return f"{value:.{digits}f}" if isinstance(value, int | float) else "-"


def json_table(path: Path) -> dict[str, Any]:
    """A JSON file's table, empty where there is no such file."""
    values = read_json(path) if path.is_file() else {}
    return values if isinstance(values, dict) else {}


# ------------------------------------------------------------------------------ no local path leaves the machine

PART = r"""[^\s'"\[\](){}<>,;=|]"""
ROOTED = re.compile(
    rf"(?<![\w./~\\-])(?!//)(?:~|[A-Za-z]:(?=[/\\]))?(?:/|\\\\|(?<=:)\\|(?:\.\./)+){PART}+"
    r"|(?<![\w./~-])~/?(?=\s|$)"
)
WHOLE_PATH = re.compile(r"~?/|~$|[A-Za-z]:[/\\]|\\\\|\.\./")
HOME = re.compile(r"(~|(/.*)?/(home|Users)/[^/]+|/root|[A-Za-z]:[/\\]Users[/\\][^/\\]+)[/\\]?")
DATA_SET = re.compile(r"[\w-][\w.-]*(/[\w.-]+)?(:[\w.-]+){0,2}")  # of the Hub, with its configuration and split
FILES = (".json", ".jsonl", ".parquet", ".csv", ".txt", ".gz", ".zst", ".arrow", ".yaml")


def public(value: Any, names: Mapping[str, str]) -> Any:
    """A record in which every text, keys included, has public names in place of local paths; see `public_names`."""
    if isinstance(value, dict):
        return {public(key, names): public(entry, names) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [public(entry, names) for entry in value]
    return _public_text(value, names) if isinstance(value, str) else value


def _public_text(text: str, names: Mapping[str, str]) -> str:
    if option := re.fullmatch(r"(--?[\w.-]+=)(.+)", text, re.DOTALL):
        return option[1] + _public_text(option[2], names)
    text = re.sub(r"\bfile://", "", text)
    for local in sorted(names, key=len, reverse=True):
        if text == local or text.startswith(f"{local}/"):
            return names[local] + text[len(local) :]
        if "/" in local:
            replacement = names[local].replace("\\", r"\\")
            text = re.sub(rf"(?<![\w./~-]){re.escape(local)}(?![\w.-])", replacement, text)
    if WHOLE_PATH.match(text) and "\n" not in text:
        return last_part(text.rstrip())
    return ROOTED.sub(lambda path: last_part(path[0]), text)


def public_names(target: str, records: Mapping[str, Any]) -> dict[str, str]:
    """Local spelling -> public name of the target, the conversations and the run that the records of a head name."""
    recipe, summary = records.get("recipe.yaml"), records.get("summary.json")
    spellings = [
        _at(records.get("config.json"), "aerie", "target_path"),
        _at(records.get("config.json"), "speculators_config", "verifier", "name_or_path"),
        _at(recipe, "target", "path"),
        _at(summary, "target", "name"),
        _at(records.get("provenance.json"), "inputs", "target", "path"),
    ]
    names = {name: target for name in spellings if isinstance(name, str) and not is_on_hub(name)}
    names |= {name: last_part(name) for name in sources(recipe) if is_local_source(name)}
    for run in (_at(recipe, "run"), _at(summary, "run")):
        if isinstance(run, str) and run:
            names.setdefault(run, last_part(run))
    return names


def sources(recipe: Any) -> list[str]:
    """The conversations that a recipe names."""
    names = _at(recipe, "data", "conversations")
    return [str(name) for name in names] if isinstance(names, list | tuple) else []


def is_local_source(name: str) -> bool:
    """Whether conversations are a file or folder of this machine and no data set of the Hub."""
    repository = name.split(":", maxsplit=1)[0]
    return name.endswith(FILES) or "/" not in name or not DATA_SET.fullmatch(name) or not is_on_hub(repository)


def last_part(path: str) -> str:
    """The last part of a path; "home" for somebody's home."""
    if HOME.fullmatch(path):
        return "home"
    return (PureWindowsPath if "\\" in path else PurePosixPath)(path).name.strip("~.") or "home"


def _at(table: Any, *keys: str) -> Any:
    """The entry under nested keys, None where a table is missing."""
    for key in keys:
        table = table.get(key) if isinstance(table, dict) else None
    return table
