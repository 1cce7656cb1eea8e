"""What a head holds and whether it fits a target: a table for tools, one screen for people."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from aerie.configs.errors import UserError
from aerie.model import checkpoint
from aerie.model.export import check_taps, other_weights
from aerie.model.formats.content import COUNTS_OUTPUTS, TargetFacts, table, tap_numbers, unread
from aerie.model.formats.layouts import read_content
from aerie.model.heads.eagle import EMBEDDING, Eagle3Config
from aerie.model.hub import head_directory
from aerie.model.storage import CONFIG, read_json

UNNAMED = (2, 3, 4)  # stands in where neither files nor a target say the taps: only their number matters
OPEN = {
    "unnamed": "names no taps: the target's default ones will be taken",
    "ambiguous": "only the target tells how its taps are numbered; give it with --target",
}
SCORES = ("step", "predicted_tau", "tau", "loss")
SIZES: tuple[str, ...] = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
SIZES += ("head_dim", "num_hidden_layers", "num_heads", "num_layers")


def inspect_head(
    path: Path | str, target: TargetFacts | None = None, after_blocks: tuple[int, ...] | None = None
) -> dict[str, Any]:
    """Everything about a head, JSON-ready; `problems` is empty for one that loads and fits the target, if given."""
    directory = head_directory(path)
    values, state = table(read_json(directory / CONFIG)), None
    taps, numbers = after_blocks, tap_numbers(values)
    if target is not None:
        taps = taps or target.default_taps
    elif taps is None and "after_blocks" not in values:
        is_open = values.get("architectures") == [COUNTS_OUTPUTS] and numbers and numbers[0] != 1
        state = "ambiguous" if is_open else None if numbers else "unnamed"
        taps = None if numbers else UNNAMED
    layout, files, content = read_content(directory, taps)
    check_taps(content.config, directory, after_blocks)
    config: Any = content.config
    facts, tensors, guesses = table(values, "aerie"), content.tensors, list(content.guesses)
    is_eagle3 = isinstance(config, Eagle3Config)
    state = state if is_eagle3 else None
    if state is not None:
        guesses[0] = OPEN[state]  # the first is about the taps
    problems, remarks = [], list(unread(values))

    def passed(check: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return check(*arguments)
        except UserError as error:
            problems.append(str(error))
            return None

    vocabulary = passed(checkpoint.check_content, content, files.weights_place)
    if target is not None:
        if vocabulary is not None:
            passed(vocabulary.check_ends, target.end_ids, str(files.weights_place))
        passed(checkpoint.check_sizes, config, target.vocab, str(directory), target.path)
        passed(check_taps, config, directory, None, target)
        problems += [f"{directory}: {other}"] if (other := other_weights(facts, target)) else []
        remarks += checkpoint.position_warnings(config, target.text_config, str(directory))
    embedding = "not in the file: the target's" if content.is_embedding_optional else "none of its own"
    if EMBEDDING in tensors:
        is_own = None if target is None else checkpoint.is_targets(tensors[EMBEDDING], target.vocab)
        embedding = "in the file" + {None: "", True: ", the target's own", False: ", NOT the target's"}[is_own]
    recorded = facts.get("target_path") or table(values, "speculators_config", "verifier").get("name_or_path")
    floats = {name: value for name, value in tensors.items() if value.is_floating_point()}
    counts = {"own": 0, "lm_head": 0, "embedding": 0}
    for name, value in floats.items():
        is_lm_head = re.fullmatch(r"(laws\.lm_heads\.\d+|lm_head)\.\w+", name)
        counts["lm_head" if is_lm_head else "embedding" if name == EMBEDDING else "own"] += value.numel()
    draft = config.draft_vocab_size if is_eagle3 else config.vocab_size
    coverage = 1.0 if draft == config.vocab_size else table(facts, "draft_vocabulary").get("coverage")
    return {
        "path": str(path),
        "layout": layout,
        "kind": content.kind,
        "weights": files.weights_place.name,
        "target": {
            "recorded": recorded,
            "hidden_size": config.target_hidden_size if is_eagle3 else config.hidden_size,
            "vocab_size": config.vocab_size,
            **({} if target is None else {"given": target.path, "fits": not problems}),
        },
        "taps": list(config.after_blocks) if is_eagle3 and state is None else None,
        "taps_open": state,
        "sizes": {name: size for name in SIZES if (size := getattr(config, name, None)) is not None},
        "options": [name for name, value in vars(config).items() if value is True],
        "parameters": {
            **counts,
            "dtype": "+".join(sorted({str(value.dtype).removeprefix("torch.") for value in floats.values()})),
            "bytes": sum(value.numel() * value.element_size() for value in tensors.values()),
        },
        "vocabulary": {"draft": draft, "target": config.vocab_size, "coverage": coverage},
        "rope": {
            "theta": getattr(config, "rope_theta", None),
            "scaling": getattr(config, "rope_scaling", None),
            "max_position_embeddings": config.max_position_embeddings,
        },
        "embedding": embedding,
        "left_out": sorted(checkpoint.optional_of(content) - tensors.keys()),
        "training": {name: facts[name] for name in SCORES if isinstance(facts.get(name), int | float)},
        "made_for": facts.get("made_for"),
        "guesses": guesses,
        "remarks": remarks,
        "problems": problems,
    }


def screen(head: dict[str, Any]) -> str:
    taps = head["taps"] or ("not determined without its target" if head["kind"] == "eagle3" else "none")
    lines = [("head", f"{head['kind']}, {head['layout']} layout ({head['weights']}): {head['path']}")]
    lines.append(("taps", f"hidden_states {taps}"))
    for name in ("target", "sizes", "parameters", "vocabulary", "rope", "training"):
        shown = (f"{key} {format(value, ',' * isinstance(value, int))}" for key, value in head[name].items())
        lines.append((name, ", ".join(shown) or "not recorded"))
    lines += [("options", ", ".join(head["options"]) or "none"), ("embedding", head["embedding"])]
    lines += [("left out", ", ".join(head["left_out"]) or "nothing"), ("made for", head["made_for"] or "any server")]
    for name, sentences in (("guessed", "guesses"), ("remark", "remarks"), ("PROBLEM", "problems")):
        lines += [(name, sentence) for sentence in head[sentences]]
    return "\n".join(f"{name:<11} {text}" for name, text in lines)
