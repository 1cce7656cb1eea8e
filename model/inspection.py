"""Tells what a head's files hold, whether it fits its target, and which servers load it."""

import json
import re
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from aerie.configs.errors import UserError
from aerie.model import checkpoint
from aerie.model.export import check_taps
from aerie.model.formats.content import (
    COUNTS_OUTPUTS,
    TARGET_DTYPE,
    HeadContent,
    TargetFacts,
    dtype_name,
    nested,
    tap_numbers,
    unread,
    vllm_faults,
)
from aerie.model.formats.layouts import read_content
from aerie.model.heads import HEADS
from aerie.model.heads.eagle import EMBEDDING
from aerie.model.hub import head_directory
from aerie.model.storage import CONFIG, plainly, read_json

Taps = tuple[int, ...] | None
UNSURE = {  # why the taps of an EAGLE-3 head are in doubt
    "unnamed": "names no taps: aerie will take the target's default taps",
    "ambiguous": "only the target tells how the head's taps are numbered; give it with --target",
}
LLAMA_CPP = (
    "llama.cpp's converter reads such taps only from the layout speculators, and since its pull "
    "request 25794 (July 2026); else it silently gives the head hidden_states (2, n // 2, n - 3)"
)
ALSO_LOADED = {("vLLM", "eagle3", "safeailab")}  # tests/served: the same drafts
SGLANG_ALGORITHMS = {"eagle1": "EAGLE", "eagle3": "EAGLE3"}
SCORES = ("step", "predicted_tau", "tau", "loss")
LM_HEAD = re.compile(r"(laws\.lm_heads\.\d+|lm_head)\.\w+")


def inspect_head(
    path: Path | str, target: TargetFacts | None = None, after_blocks: Taps = None
) -> dict[str, Any]:
    """All facts about a head, as JSON takes them; no `problems`: it loads and fits the target.

    after_blocks: the taps, if the files name none. UserError if the files cannot be read.
    """
    directory = head_directory(path)
    values = nested(read_json(directory / CONFIG))
    facts = nested(values, "aerie")
    taps, taps_open = _taps_to_read(values, target, after_blocks)
    layout, files, content = read_content(directory, taps)
    check_taps(content.config, directory, after_blocks)
    config: Any = content.config
    kind = HEADS[content.kind]
    guesses = list(content.guesses)
    if not kind.has_draft_vocabulary:
        taps_open = None
    if taps_open is not None:
        guesses[0] = UNSURE[taps_open]  # the first one is about the taps
    problems, remarks = _judge(content, directory, files.weights_path, facts, target)
    verifier = nested(values, "speculators_config", "verifier")
    of_target = {
        "recorded": facts.get("target_path") or verifier.get("name_or_path"),
        "hidden_size": getattr(config, "target_hidden_size", config.hidden_size),
        "vocab_size": config.vocab_size,
        "dtype": facts.get(TARGET_DTYPE),
    }
    if target is not None:
        of_target["dtype"] = dtype_name(target.vocab.lm_head.dtype)
        of_target |= {"given": target.path, "fits": not problems}
    shown_taps = getattr(config, "after_blocks", None) if taps_open is None else None
    drafted = getattr(config, "draft_vocab_size", config.vocab_size)
    switches = [name for name, value in vars(config).items() if value is True]
    words = [(name, value) for name, value in vars(config).items() if isinstance(value, str)]
    return {
        "path": str(path),
        "layout": layout,
        "kind": content.kind,
        "weights": files.weights_path.name,
        "target": of_target,
        "taps": None if shown_taps is None else list(shown_taps),
        "taps_open": taps_open,
        "sizes": {
            name: getattr(config, name) for name in kind.sizes if getattr(config, name) is not None
        },
        "options": [*switches, *(f"{name}: {word}" for name, word in words if word != "silu")],
        "parameters": _count_parameters(content.tensors),
        "vocabulary": {
            "draft": drafted,
            "target": config.vocab_size,
            "coverage": (
                1.0
                if drafted == config.vocab_size
                else nested(facts, "draft_vocabulary").get("coverage")
            ),
        },
        "rope": {
            "theta": getattr(config, "rope_theta", None),
            "scaling": getattr(config, "rope_scaling", None),
            "max_position_embeddings": config.max_position_embeddings,
        },
        "embedding": _describe_embedding(content, target),
        "left_out": sorted(checkpoint.optional_of(content) - content.tensors.keys()),
        "training": {
            name: facts[name] for name in SCORES if isinstance(facts.get(name), int | float)
        },
        "template_arguments": facts.get("template_arguments") or {},
        "made_for": facts.get("made_for"),
        "servers": _judge_servers(content, target, layout, after_blocks),
        "method": content.method,
        "drafts": content.drafts,
        "guesses": guesses,
        "remarks": [*unread(values), *remarks],
        "problems": problems,
    }


def _taps_to_read(
    values: dict[str, Any], target: TargetFacts | None, after_blocks: Taps
) -> tuple[Taps, str | None]:
    """The taps for a head whose files name none, and a key of UNSURE if they are in doubt."""
    if target is not None:
        return after_blocks or target.default_taps, None
    if after_blocks is not None or "after_blocks" in values:
        return after_blocks, None
    numbers = tap_numbers(values)
    if not numbers:
        return (2, 3, 4), "unnamed"  # without a target only the number of taps matters
    is_ambiguous = values.get("architectures") == [COUNTS_OUTPUTS] and numbers[0] != 1
    return None, "ambiguous" if is_ambiguous else None


@contextmanager
def _collected(sentences: list[str]) -> Iterator[None]:
    try:
        yield
    except UserError as error:
        sentences.append(str(error))


def _judge(
    content: HeadContent,
    directory: Path,
    weights: Path,
    facts: dict[str, Any],
    target: TargetFacts | None,
) -> tuple[list[str], list[str]]:
    """Why the head does not load or fit, and remarks."""
    config = content.config
    problems: list[str] = []
    vocabulary = None
    with _collected(problems):
        vocabulary = checkpoint.check_content(content, weights)
    if target is None:
        return problems, []
    if vocabulary is not None:
        with _collected(problems):
            vocabulary.check_ends(target.end_ids, str(weights))
    with _collected(problems):
        checkpoint.check_sizes(
            config, target.vocab, str(directory), target.path, target.text_config
        )
    with _collected(problems):
        check_taps(config, directory, None, target)
    mismatch = target.other_weights(facts.get("target"))
    if mismatch is not None:
        problems.append(f"{directory}: {mismatch}")
    remarks = checkpoint.position_warnings(config, target.text_config, str(directory))
    if content.kind == "eagle3" and getattr(config, "after_blocks", None) != target.default_taps:
        remarks.append(LLAMA_CPP)
    return problems, remarks


def _judge_servers(
    content: HeadContent, target: TargetFacts | None, layout: str, after_blocks: Taps
) -> dict[str, Any]:
    """By server: the layout that it loads, and why the head cannot be written in that layout.

    layout: the head's own; `as_it_is`: the server loads it, too. after_blocks: taps that the
    caller gave, which a server does not know.
    """
    kind = HEADS[content.kind]
    config: Any = content.config
    servers = {}
    for server, wanted in kind.servers.items():
        refused: list[str] = []
        if server == "vLLM":
            refused += vllm_faults(config)
        with _collected(refused):
            kind.formats.refuse(wanted, config, target)
        is_also_loaded = (server, content.kind, layout) in ALSO_LOADED and after_blocks is None
        as_it_is = not refused and (layout == wanted or is_also_loaded)
        servers[server] = {"layout": wanted, "as_it_is": as_it_is, "refused": refused}
    return servers


def _describe_embedding(content: HeadContent, target: TargetFacts | None) -> str:
    if EMBEDDING not in content.tensors:
        is_optional = content.is_embedding_optional
        return "not in the file: the target's" if is_optional else "none of its own"
    if target is None:
        return "in the file"
    is_targets = checkpoint.is_targets(content.tensors[EMBEDDING], target.vocab)
    return "in the file, " + ("the target's own" if is_targets else "NOT the target's")


def _count_parameters(tensors: dict[str, Tensor]) -> dict[str, Any]:
    counts = {"own": 0, "lm_head": 0, "embedding": 0}
    dtypes = set()
    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            continue
        part = "embedding" if name == EMBEDDING else "own"
        if LM_HEAD.fullmatch(name):
            part = "lm_head"
        counts[part] += tensor.numel()
        dtypes.add(dtype_name(tensor.dtype))
    size = sum(tensor.nbytes for tensor in tensors.values())
    return {**counts, "dtype": "+".join(sorted(dtypes)), "bytes": size}


def serve_command(head: dict[str, Any], server: str, target: str | None, draft: str) -> str:
    """The command with which a server serves a head; "": none is known.

    head: from `inspect_head`. draft: the head in the server's layout. target None: draft names it.
    """
    drafts = head["drafts"]
    if server == "vLLM":
        speculative = {"model": draft, "method": head["method"], "num_speculative_tokens": drafts}
        words = ["vllm", "serve", target or draft]
        words += ["--speculative-config", json.dumps(speculative)] if target else []
    elif head["kind"] in SGLANG_ALGORITHMS:
        words = ["python", "-m", "sglang.launch_server", "--model-path", str(target)]
        words += ["--speculative-algorithm", SGLANG_ALGORITHMS[head["kind"]]]
        words += ["--speculative-draft-model-path", draft, "--speculative-num-steps", str(drafts)]
        words += ["--speculative-eagle-topk", "8", "--speculative-num-draft-tokens", "32"]
    else:
        return ""
    # Servers turn float32 into a narrower dtype, which would change some greedy answers.
    words += ["--dtype", "float32"] if head["target"]["dtype"] == "float32" else []
    arguments = head["template_arguments"]
    if arguments and server == "vLLM":  # SGLang takes them from each request
        words += ["--default-chat-template-kwargs", json.dumps(arguments)]
    return shlex.join(words)


def screen(head: dict[str, Any]) -> str:
    """The facts of `inspect_head` as lines for people."""
    taps = head["taps"] or "none"
    if head["taps"] is None and head["kind"] == "eagle3":
        taps = "not determined without its target"
    lines = [
        ("head", f"{head['kind']}, {head['layout']} layout ({head['weights']}): {head['path']}"),
        ("taps", f"hidden_states {taps}"),
    ]
    for name in ("target", "sizes", "parameters", "vocabulary", "rope", "training"):
        pairs = [f"{key} {plainly(value)}" for key, value in head[name].items()]
        lines.append((name, ", ".join(pairs) or "not recorded"))
    lines += [
        ("options", ", ".join(head["options"]) or "none"),
        ("embedding", head["embedding"]),
        ("left out", ", ".join(head["left_out"]) or "nothing"),
        ("made for", head["made_for"] or "not recorded"),
    ]
    target = head["target"].get("given") or head["target"]["recorded"] or "TARGET"
    for name, server in head["servers"].items():
        layout = server["layout"]
        draft = "EXPORT"
        loads = f"loads it in the layout {layout} (aerie convert --out EXPORT)"
        if server["as_it_is"]:
            draft = head["path"]
            loads = "loads it as it is"
        lines.append((name, "; ".join(server["refused"]) or loads))
        command = serve_command(head, name, target, draft)
        if command and not server["refused"]:
            lines.append(("", command))
    for name, key in (("guessed", "guesses"), ("remark", "remarks"), ("PROBLEM", "problems")):
        lines += [(name, sentence) for sentence in head[key]]
    return "\n".join(f"{name:<11} {text}" for name, text in lines)
