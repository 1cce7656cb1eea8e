"""The model card of a shipped head: made from its files and the run's reports, nothing written by hand."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, StrictUndefined

from model.formats.content import SPECULATIVE_TOKENS
from model.formats.sglang_taps import CHECKED
from model.hub import HUB_ID, is_on_hub
from model.public import is_local_source, last_part, sources

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
