"""What a head's directory holds and whether it fits a target: a table for tools, one screen for people."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from aerie.configs.errors import UserError
from aerie.model.checkpoint import (
    check_content,
    check_sizes,
    head_facts,
    is_targets,
    optional_of,
    rope_of,
)
from aerie.model.export import TargetFacts, check_asked, check_depth, other_weights
from aerie.model.formats.content import HeadContent, HeadFiles, open_taps, take, unread
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
SIZES: tuple[str, ...] = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
SIZES += ("head_dim", "num_hidden_layers", "num_heads", "num_layers")
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
    config, facts, tensors = content.config, head_facts(directory), content.tensors
    problems = _problems(files, content, facts, target)
    guesses, is_open = list(content.guesses), isinstance(config, Eagle3Config) and state is not None
    if is_open:
        guesses = [OPEN[str(state)], *guesses[1:]]  # the first is about the taps
    verifier = take(take(values, "speculators_config", dict, files.config_place, {}), "verifier", dict, directory, {})
    recorded = facts.get("target_path") or verifier.get("name_or_path")
    floats = {name: value for name, value in tensors.items() if value.is_floating_point()}
    lm_head = [name for name in floats if re.fullmatch(r"(laws\.lm_heads\.\d+|lm_head)\.\w+", name)]
    shared = sum(floats[name].numel() for name in (EMBEDDING, *lm_head) if name in floats)
    counted = facts.get("draft_vocabulary")
    draft = config.draft_vocab_size if isinstance(config, Eagle3Config) else config.vocab_size
    coverage = counted.get("coverage") if isinstance(counted, dict) else None
    return {
        "path": str(path),
        "layout": layout.name,
        "kind": content.kind,
        "weights": files.weights_place.name,
        "target": {
            "recorded": None if recorded is None else str(recorded),
            "hidden_size": config.target_hidden_size if isinstance(config, Eagle3Config) else config.hidden_size,
            "vocab_size": config.vocab_size,
            **({} if target is None else {"given": target.path, "fits": not problems}),
        },
        "taps": list(config.after_blocks) if isinstance(config, Eagle3Config) and not is_open else None,
        "taps_open": state if is_open else None,
        "sizes": {name: size for name in SIZES if (size := getattr(config, name, None)) is not None},
        "options": [name for name in FLAGS if getattr(config, name, False)],
        "parameters": {
            "own": sum(value.numel() for value in floats.values()) - shared,
            "lm_head": sum(floats[name].numel() for name in lm_head),
            "embedding": floats[EMBEDDING].numel() if EMBEDDING in floats else 0,
            "dtype": "+".join(sorted({str(value.dtype).removeprefix("torch.") for value in floats.values()})),
            "bytes": sum(value.numel() * value.element_size() for value in tensors.values()),
        },
        "vocabulary": {
            "draft": draft,
            "target": config.vocab_size,
            "coverage": 1.0 if draft == config.vocab_size else coverage,
        },
        "rope": {
            "theta": getattr(config, "rope_theta", None),
            "scaling": getattr(config, "rope_scaling", None),
            "max_position_embeddings": config.max_position_embeddings,
        },
        "embedding": _embedding(content, target),
        "left_out": sorted(optional_of(content) - tensors.keys()),
        "training": {name: facts[name] for name in SCORES if isinstance(facts.get(name), int | float)},
        "made_for": str(facts[SERVER]) if facts.get(SERVER) else None,
        "guesses": guesses,
        "remarks": [*unread(values), *([] if target is None else _remarks(config, target))],
        "problems": problems,
    }


def screen(head: dict[str, Any]) -> str:
    """The same for people, a line each."""
    taps = head["taps"] or ("not determined without its target" if head["kind"] == "eagle3" else "none")
    lines = [("head", f"{head['kind']}, {head['layout']} layout ({head['weights']}): {head['path']}")]
    lines.append(("taps", f"hidden_states {taps}"))
    for name in ("target", "sizes", "parameters", "vocabulary", "rope", "training"):
        shown = (
            f"{key} {value:,}" if isinstance(value, int) else f"{key} {value}" for key, value in head[name].items()
        )
        lines.append((name, ", ".join(shown) or "not recorded"))
    lines += [("options", ", ".join(head["options"]) or "none"), ("embedding", head["embedding"])]
    lines += [("left out", ", ".join(head["left_out"]) or "nothing"), ("made for", head["made_for"] or "any server")]
    for name, sentences in (("guessed", "guesses"), ("remark", "remarks"), ("PROBLEM", "problems")):
        lines += [(name, sentence) for sentence in head[sentences]]
    return "\n".join(f"{name:<11} {text}" for name, text in lines)


def _problems(files: HeadFiles, content: HeadContent, facts: dict[str, Any], target: TargetFacts | None) -> list[str]:
    """What keeps the head from loading, or from fitting the target."""
    place, problems = files.weights_place, []

    def check_tensors() -> None:
        vocabulary = check_content(content, place)
        if vocabulary is not None and target and vocabulary.vocab_size == target.vocab.embedding.shape[0]:
            vocabulary.check_ends(target.end_ids, str(place))

    def check_weights() -> None:
        other = None if target is None else other_weights(facts, target)
        if other is not None:
            raise UserError(f"{place.parent}: {other}; give its own target")

    checks: list[Callable[[], object]] = [check_tensors]
    if target is not None:
        config, head = content.config, str(place.parent)
        checks.append(lambda: check_sizes(config, target.vocab, head, target.path))
        checks.append(check_weights)
        checks.append(lambda: check_depth(config, target.destination.num_blocks, head, target.path))
    for check in checks:
        try:
            check()
        except UserError as error:
            problems.append(str(error))
    return list(dict.fromkeys(problems))


def _remarks(config: AnyConfig, target: TargetFacts) -> list[str]:
    """What is no obstacle, but where a low tau would come from."""
    remarks, theta = [], rope_of(target.text_config)[0]
    base = getattr(config, "rope_theta", None)
    if base is not None and base != theta:
        remarks.append(f"base of RoPE {base:,.0f}, the target's is {theta:,.0f}")
    positions = target.destination.max_position_embeddings
    if config.max_position_embeddings < positions:
        remarks.append(f"drafts up to position {config.max_position_embeddings:,}, the target goes to {positions:,}")
    return remarks


def _embedding(content: HeadContent, target: TargetFacts | None) -> str:
    table = content.tensors.get(EMBEDDING)
    if table is None:
        return "not in the file: the target's" if content.is_embedding_optional else "none of its own"
    if target is None:
        return "in the file"
    if table.shape != target.vocab.embedding.shape:
        return "in the file, of its own width"
    return "in the file, the target's own" if is_targets(table, target.vocab) else "in the file, NOT the target's"
