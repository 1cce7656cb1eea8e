"""What a head's directory holds and whether it fits a target: a table for tools, one screen for people."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from aerie.configs.errors import UserError
from aerie.model.checkpoint import (
    check_sizes,
    expected_shapes,
    head_facts,
    is_targets,
    loading_checks,
    optional_of,
    rope_of,
    vocabulary_of,
)
from aerie.model.export import TargetFacts, check_asked, check_depth, other_weights
from aerie.model.formats.common import HeadContent, HeadFiles, open_taps, table, unread
from aerie.model.formats.layouts import read_config, read_content
from aerie.model.formats.sglang import SERVER
from aerie.model.heads import AnyConfig
from aerie.model.heads.eagle import EMBEDDING, Eagle3Config
from aerie.model.hub import head_directory
from aerie.model.storage import CONFIG

UNNAMED = (2, 3, 4)  # stands in where the files name no taps and no target is given: only their number matters
OPEN = {
    "unnamed": "names no taps: its target's default ones will be taken",
    "ambiguous": "numbers its taps in a way that only its target tells; give it with --target",
}
SCORES = ("step", "predicted_tau", "tau", "loss")
FLAGS = ("qk_norm", "fc_norm", "norm_output", "norm_before_residual", "norm_before_fc", "bias", "qkv_bias")


def inspect_head(
    path: Path | str, target: TargetFacts | None = None, after_blocks: tuple[int, ...] | None = None
) -> dict[str, Any]:
    """Everything about a head, JSON-ready. `problems` is empty for a head that loads (and fits the target, if given).

    after_blocks are the taps of a head that names none. UserError where the files cannot be read or are no head, or
    where they name other taps.
    """
    directory = head_directory(path)
    if not directory.is_dir():
        raise UserError(f"{path}: no such head directory")
    values = read_config(directory)
    state = None if target is not None or after_blocks is not None else open_taps(values, directory / CONFIG)
    known = after_blocks or (target.default_taps if target is not None else None)
    layout, files, content = read_content(directory, UNNAMED if state == "unnamed" else known)
    if after_blocks is not None:
        check_asked(content.config, after_blocks, files)
    config, facts = content.config, head_facts(directory)
    problems = _problems(files, content, facts, target)
    guesses, is_open = list(content.guesses), isinstance(config, Eagle3Config) and state is not None
    if is_open:
        guesses = [OPEN[str(state)], *guesses[1:]]  # the first is about the taps
    return {
        "path": str(path),
        "layout": layout.name,
        "kind": content.kind,
        "weights": files.weights_place.name,
        "target": {
            "recorded": _recorded_target(files.values, facts, files.config_place),
            "hidden_size": config.target_hidden_size if isinstance(config, Eagle3Config) else config.hidden_size,
            "vocab_size": config.vocab_size,
            **({} if target is None else {"given": target.path, "fits": not problems}),
        },
        "taps": list(config.after_blocks) if isinstance(config, Eagle3Config) and not is_open else None,
        "taps_open": state if is_open else None,
        "sizes": _sizes(config),
        "options": [name for name in FLAGS if getattr(config, name, False)],
        "parameters": _parameters(content.tensors),
        "vocabulary": _vocabulary(config, facts),
        "rope": {
            "theta": getattr(config, "rope_theta", None),
            "scaling": getattr(config, "rope_scaling", None),
            "max_position_embeddings": config.max_position_embeddings,
        },
        "embedding": _embedding(content, target),
        "left_out": sorted((expected_shapes(config).keys() - content.tensors.keys()) & optional_of(content)),
        "training": {name: facts[name] for name in SCORES if isinstance(facts.get(name), int | float)},
        "made_for": str(facts[SERVER]) if facts.get(SERVER) else None,
        "guesses": guesses,
        "remarks": [*unread(files.values), *([] if target is None else _remarks(config, target))],
        "problems": problems,
    }


def screen(found: dict[str, Any]) -> str:
    """The same for people, a line each."""
    target, sizes, rope, counts = found["target"], found["sizes"], found["rope"], found["parameters"]
    lines = [
        ("head", f"{found['kind']}, {found['layout']} layout ({found['weights']}): {found['path']}"),
        ("target", target["recorded"] or "not recorded"),
        ("made for", f"hidden size {target['hidden_size']:,}, vocabulary {target['vocab_size']:,}"),
        ("taps", _taps_line(found)),
        ("sizes", _sizes_line(sizes)),
        ("options", ", ".join(found["options"]) or "none"),
        (
            "parameters",
            f"{counts['own']:,} + {counts['lm_head']:,} LM head + {counts['embedding']:,} embedding; "
            f"{counts['dtype']}, {counts['bytes'] / 1e9:,.2f} GB",
        ),
        ("vocabulary", _vocabulary_line(found["vocabulary"])),
        ("rope", _rope_line(rope)),
        ("embedding", found["embedding"]),
        ("left out", ", ".join(found["left_out"]) or "nothing"),
        ("training", ", ".join(f"{k} {v:,.4g}" for k, v in found["training"].items()) or "not recorded"),
        *([("server", found["made_for"])] if found["made_for"] else []),
        *(("guessed", text) for text in found["guesses"]),
        *(("remark", text) for text in found["remarks"]),
        *(("PROBLEM", text) for text in found["problems"]),
    ]
    if "fits" in target:
        lines.append(("fits", f"{target['given']}: {'yes' if target['fits'] else 'no'}"))
    return "\n".join(f"{name:<11} {text}" for name, text in lines)


def _sizes_line(sizes: dict[str, int]) -> str:
    if "num_heads" in sizes:
        layer = ", and a prefix layer" if "intermediate_size" in sizes else ""
        return f"{sizes['num_heads']} heads of {sizes['num_layers']} block(s), width {sizes['hidden_size']:,}{layer}"
    return (
        f"{sizes['num_hidden_layers']} layer(s) of width {sizes['hidden_size']:,}, MLP "
        f"{sizes['intermediate_size']:,}, {sizes['num_attention_heads']} heads of {sizes['head_dim']} "
        f"({sizes['num_key_value_heads']} of keys and values)"
    )


def _rope_line(rope: dict[str, Any]) -> str:
    if rope["theta"] is None:
        return "none: no attention, any position"
    scaling = "no scaling" if rope["scaling"] is None else f"{rope['scaling'].get('rope_type')} scaling"
    return f"base {rope['theta']:,.0f}, {scaling}, {rope['max_position_embeddings']:,} positions"


def _problems(files: HeadFiles, content: HeadContent, facts: dict[str, Any], target: TargetFacts | None) -> list[str]:
    """What keeps the head from loading, or from fitting the target."""
    config, place = content.config, files.weights_place
    checks: list[Callable[[], object]] = list(loading_checks(content, place))
    if target is not None:
        head = str(place.parent)
        if {"d2t", "t2d"} <= content.tensors.keys():
            checks.append(lambda: _check_ends(content.tensors, place, target))
        checks.append(lambda: check_sizes(config, target.ends, head, target.path))
        checks.append(lambda: _check_weights(facts, target, head))
        checks.append(lambda: check_depth(config, target.destination.num_blocks, head, target.path))
    found = []
    for check in checks:
        try:
            check()
        except UserError as error:
            found.append(str(error))
    return list(dict.fromkeys(found))


def _check_ends(tensors: dict[str, Tensor], place: Path, target: TargetFacts) -> None:
    """UserError for a draft vocabulary without the end of the target's turns."""
    vocabulary = vocabulary_of(tensors, str(place))
    if vocabulary is not None and vocabulary.vocab_size == target.ends.embedding.shape[0]:
        vocabulary.check_ends(target.end_ids, str(place))


def _check_weights(facts: dict[str, Any], target: TargetFacts, head_path: str) -> None:
    """UserError for a head that was trained on a target of the same sizes and other weights."""
    other = other_weights(facts, target)
    if other is not None:
        raise UserError(f"{head_path}: {other}; give its own target")


def _remarks(config: AnyConfig, target: TargetFacts) -> list[str]:
    """What is no obstacle, but where a low tau would come from."""
    remarks, theta = [], rope_of(target.text_config)[0]
    own = getattr(config, "rope_theta", None)
    if own is not None and own != theta:
        remarks.append(f"base of RoPE {own:,.0f}, the target's is {theta:,.0f}")
    positions = target.destination.max_position_embeddings
    if config.max_position_embeddings < positions:
        remarks.append(f"drafts up to position {config.max_position_embeddings:,}, the target goes to {positions:,}")
    return remarks


def _recorded_target(values: dict[str, Any], facts: dict[str, Any], place: Path) -> str | None:
    """The target that the files name."""
    verifier = table(table(values, "speculators_config", place), "verifier", place)
    found = facts.get("target_path") or verifier.get("name_or_path")
    return None if found is None else str(found)


def _taps_line(found: dict[str, Any]) -> str:
    if found["kind"] != "eagle3":
        return "none: reads the target's final state"
    return "not determined without its target" if found["taps"] is None else f"hidden_states {found['taps']}"


def _sizes(config: AnyConfig) -> dict[str, int]:
    names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    found = {name: getattr(config, name, None) for name in (*names, "num_hidden_layers", "num_heads", "num_layers")}
    return {name: value for name, value in found.items() if value is not None}


def _parameters(tensors: dict[str, Tensor]) -> dict[str, Any]:
    counts = {name: value.numel() for name, value in tensors.items() if value.is_floating_point()}
    lm_heads = [name for name in counts if re.fullmatch(r"(laws\.lm_heads\.\d+|lm_head)\.\w+", name)]
    embedding, lm_head = counts.pop(EMBEDDING, 0), sum(counts.pop(name) for name in lm_heads)
    dtypes = sorted({str(t.dtype).removeprefix("torch.") for t in tensors.values() if t.is_floating_point()})
    size = sum(value.numel() * value.element_size() for value in tensors.values())
    own = sum(counts.values())
    return {"own": own, "lm_head": lm_head, "embedding": embedding, "dtype": "+".join(dtypes), "bytes": size}


def _vocabulary(config: AnyConfig, facts: dict[str, Any]) -> dict[str, Any]:
    counted = facts.get("draft_vocabulary")
    draft = config.draft_vocab_size if isinstance(config, Eagle3Config) else config.vocab_size
    coverage = counted.get("coverage") if isinstance(counted, dict) else None
    return {"draft": draft, "target": config.vocab_size, "coverage": 1.0 if draft == config.vocab_size else coverage}


def _vocabulary_line(found: dict[str, Any]) -> str:
    if found["draft"] == found["target"]:
        return f"all {found['target']:,} tokens"
    share = f"{found['draft'] / found['target']:.1%}"
    coverage = found["coverage"]
    text = "not recorded" if coverage is None else f"{coverage:.2%} of the training answers"
    return f"{found['draft']:,} of {found['target']:,} tokens ({share}); coverage {text}"


def _embedding(content: HeadContent, target: TargetFacts | None) -> str:
    own = content.tensors.get(EMBEDDING)
    if own is None and not content.is_embedding_optional:
        return "none of its own"
    if own is None:
        return "not in the file: the target's"
    if target is None:
        return "in the file"
    if own.shape != target.ends.embedding.shape:
        return "in the file, of its own width"
    return "in the file, the target's own" if is_targets(own, target.ends) else "in the file, NOT the target's"
