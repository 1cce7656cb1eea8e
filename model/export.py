"""Writes heads in other layouts, and tells what a head holds."""

import dataclasses
import re
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from aerie.configs.errors import UserError
from aerie.model import checkpoint
from aerie.model.formats.content import (
    COUNTS_OUTPUTS,
    HeadContent,
    HeadFiles,
    TargetFacts,
    table,
    tap_numbers,
    unread,
)
from aerie.model.formats.eagle_layouts import SERVER, ZERO_BIAS
from aerie.model.formats.layouts import read_content, write_tensors
from aerie.model.heads import HEADS, AnyConfig
from aerie.model.heads.eagle import EMBEDDING, Eagle3Config
from aerie.model.hub import RECORDS, head_directory, is_on_hub
from aerie.model.storage import (
    CONFIG,
    Manifest,
    digests,
    directory_atomically,
    plainly,
    read_json,
    write_json,
)

OF_AN_EXPORT = ("exported_from", SERVER, ZERO_BIAS)  # the next export does not copy these
BOOKKEEPING = re.compile(  # keys of config.json that are read, reported by `unread`, or not needed
    r"_name_or_path|architectures|auto_map|\w+_token_id|(torch_)?dtype|initializer_range|transformers_version|use_cache"
    r"|aerie(_kind)?|model_type|hidden_act|tie_word_embeddings|embed_requires_grad|speculators_\w+|eagle_config|rope_\w+"
    r"|transformer_layer_config|(use_)?sliding_window|max_window_layers|layer_types|max_sequence_length|layernorms"
    r"|base_model_name_or_path|pretraining_tp|(attention|mlp)_bias|quantization_config|(eagle_)?aux_hidden_state_layer_ids"
    r"|dflash_config|num_target_layers|tap_convention|draft_vocab_size|markov_head_type"
)


def export(
    source: Path | str,
    to: str,
    output: Path,
    target: TargetFacts,
    after_blocks: tuple[int, ...] | None = None,
    any_target: bool = False,  # other weights are a note, no error
    pickled: bool = True,  # SafeAILab's layout, as published
) -> tuple[str, list[str]]:
    """Writes the head to output in layout `to`; returns its own layout, and notes."""
    directory = head_directory(source)
    layout, files, content = read_content(directory, after_blocks or target.default_taps)
    state = _completed(files, content, target)
    check_taps(content.config, directory, after_blocks, target)
    facts = {
        name: value
        for name, value in table(files.values, "aerie").items()
        if name not in OF_AN_EXPORT
    }
    other = target.other_weights(facts.get("target"))
    if other is not None and not any_target:
        raise UserError(f"{source}: {other}; give its own target, or --any-target")
    formats = HEADS[content.kind].formats
    if formats is None:
        raise UserError(f"--to {to}: carries EAGLE heads, and this is a {content.kind} head")
    values, new, added = formats.write(to, dataclasses.replace(content, tensors=state), target)
    facts |= {
        **values.get("aerie", {}),
        "exported_from": {"layout": layout, "files": digests(directory)},
    }
    dtype = str(state["fc.weight"].dtype).removeprefix("torch.")
    with directory_atomically(output) as place:
        write_tensors(place, new, pickled=pickled and to == "safeailab")
        write_json(place / CONFIG, {**values, "aerie": facts, "dtype": dtype, "torch_dtype": dtype})
        written = Manifest.of(place).files
        for name in RECORDS[:2]:
            if (directory / name).is_file():
                shutil.copyfile(directory / name, place / name)
        with suppress(UserError):  # a pushed head's record was rewritten: no manifest
            dataclasses.replace(Manifest.read(directory), files=written).write(place)
        _, files_again, again = read_content(place)
        state_again = _completed(files_again, again, target)
        positions = again.config.max_position_embeddings  # an export may raise it
        same = (
            dataclasses.replace(content.config, max_position_embeddings=positions) == again.config
        )
        same = same and state.keys() == state_again.keys()
        for name in state if same else ():
            one, two = (tensors[name].contiguous() for tensors in (state, state_again))
            same = (
                same
                and one.dtype == two.dtype
                and torch.equal(one.view(torch.uint8), two.view(torch.uint8))
            )
        if not same:
            raise AssertionError(
                f"layout {to}: the head was read back otherwise than it was written"
            )
    notes = [f"{other}: few of its drafts will be accepted"] if other is not None else []
    notes += content.guesses
    if EMBEDDING in new and EMBEDDING not in files.tensors:
        dtype = str(new[EMBEDDING].dtype).removeprefix("torch.")
        notes.append(f"{EMBEDDING} is added, the target's in {dtype}")
    if "d2t" in files.tensors and "d2t" not in new:
        notes.append("d2t and t2d left out: both vocabularies are equal")
    carried = vars(content.config).keys() | values.keys()
    for name, value in files.values.items():
        if name not in carried and not BOOKKEEPING.fullmatch(name) and value not in (None, False):
            notes.append(f"config.json's {name} left out: its meaning is not known here")
    notes += [f"left out: {text}" for text in unread(files.values)]
    drafts, is_speculators = content.speculative_tokens, "speculators_config" in values
    if drafts is not None and not is_speculators:
        notes.append(
            f"its {drafts} drafts per cycle are left out: set them on the server's command line"
        )
    if is_speculators and not is_on_hub(target.name):
        notes.append(
            f"servers are told to load {target.name}, a local path; give its Hub id with --target-name"
        )
    return layout, [*notes, *added]


def check_taps(
    config: AnyConfig,
    place: Path,
    after_blocks: tuple[int, ...] | None = None,
    target: TargetFacts | None = None,
) -> None:
    own = getattr(config, "after_blocks", None)
    if after_blocks not in (None, own):
        asked, read = (
            ",".join(map(str, after_blocks or ())),
            "no taps" if own is None else list(own),
        )
        raise UserError(f"--after-blocks {asked}: {place / CONFIG} says that the head reads {read}")
    if (
        own is not None
        and target is not None
        and own[-1] >= (count := target.text_config.num_hidden_layers)
    ):
        here = f"{target.path} has {count} blocks"
        raise UserError(f"{place}: reads states after blocks {list(own)}, and {here}")


def _completed(files: HeadFiles, content: HeadContent, target: TargetFacts) -> dict[str, Tensor]:
    checkpoint.check_sizes(
        content.config, target.vocab, str(files.config_place), target.path, target.text_config
    )
    state = checkpoint.completed(content, target.vocab, files.weights_place)
    if EMBEDDING not in content.tensors and EMBEDDING in state:
        state[EMBEDDING] = state[EMBEDDING].to(state["fc.weight"].dtype)
    return state


OPEN = {
    "unnamed": "names no taps: the target's default ones will be taken",
    "ambiguous": "only the target tells how its taps are numbered; give it with --target",
}
SCORES = ("step", "predicted_tau", "tau", "loss")


def inspect_head(
    path: Path | str, target: TargetFacts | None = None, after_blocks: tuple[int, ...] | None = None
) -> dict[str, Any]:
    """All about a head, JSON-ready; `problems` is empty if it loads and fits the target."""
    directory = head_directory(path)
    values, state = table(read_json(directory / CONFIG)), None
    taps, numbers = after_blocks, tap_numbers(values)
    if target is not None:
        taps = taps or target.default_taps
    elif taps is None and "after_blocks" not in values:
        is_open = values.get("architectures") == [COUNTS_OUTPUTS] and numbers and numbers[0] != 1
        state = "ambiguous" if is_open else None if numbers else "unnamed"
        taps = None if numbers else (2, 3, 4)  # only their number matters
    layout, files, content = read_content(directory, taps)
    check_taps(content.config, directory, after_blocks)
    config: Any = content.config
    facts, tensors, guesses = table(values, "aerie"), content.tensors, list(content.guesses)
    is_eagle3 = isinstance(config, Eagle3Config)
    state = state if is_eagle3 else None
    if state is not None:
        guesses[0] = OPEN[state]  # the first is about the taps
    problems, remarks = list[str](), list(unread(values))

    def passed(said: list[str], check: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return check(*arguments)
        except UserError as error:
            said.append(str(error))
            return None

    kind, servers = HEADS[content.kind], dict[str, Any]()
    for server, to in kind.servers.items():
        refused = ["vLLM stops at fc.bias"] if to == "safeailab" and config.bias else []
        passed(refused, kind.formats.refuse, to, config, target)
        servers[server] = {"layout": to, "refused": refused}
    vocabulary = passed(problems, checkpoint.check_content, content, files.weights_place)
    if target is not None:
        if vocabulary is not None:
            passed(problems, vocabulary.check_ends, target.end_ids, str(files.weights_place))
        passed(
            problems,
            checkpoint.check_sizes,
            config,
            target.vocab,
            str(directory),
            target.path,
            target.text_config,
        )
        passed(problems, check_taps, config, directory, None, target)
        other = target.other_weights(facts.get("target"))
        problems += [f"{directory}: {other}"] if other else []
        remarks += checkpoint.position_warnings(config, target.text_config, str(directory))
    embedding = (
        "not in the file: the target's" if content.is_embedding_optional else "none of its own"
    )
    if EMBEDDING in tensors:
        is_own = None if target is None else checkpoint.is_targets(tensors[EMBEDDING], target.vocab)
        embedding = (
            "in the file"
            + {None: "", True: ", the target's own", False: ", NOT the target's"}[is_own]
        )
    recorded = facts.get("target_path") or table(values, "speculators_config", "verifier").get(
        "name_or_path"
    )
    floats = {name: value for name, value in tensors.items() if value.is_floating_point()}
    counts = {"own": 0, "lm_head": 0, "embedding": 0}
    for name, value in floats.items():
        is_lm_head = re.fullmatch(r"(laws\.lm_heads\.\d+|lm_head)\.\w+", name)
        counts["lm_head" if is_lm_head else "embedding" if name == EMBEDDING else "own"] += (
            value.numel()
        )
    worded = [
        f"{name}: {value}"
        for name, value in vars(config).items()
        if isinstance(value, str) and value != "silu"
    ]
    draft = config.draft_vocab_size if is_eagle3 else config.vocab_size
    coverage = (
        1.0 if draft == config.vocab_size else table(facts, "draft_vocabulary").get("coverage")
    )
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
        "taps": list(config.after_blocks)
        if hasattr(config, "after_blocks") and state is None
        else None,
        "taps_open": state,
        "sizes": {
            name: size for name in kind.sizes if (size := getattr(config, name, None)) is not None
        },
        "options": [*(name for name, value in vars(config).items() if value is True), *worded],
        "parameters": {
            **counts,
            "dtype": "+".join(
                sorted({str(value.dtype).removeprefix("torch.") for value in floats.values()})
            ),
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
        "training": {
            name: facts[name] for name in SCORES if isinstance(facts.get(name), int | float)
        },
        "made_for": facts.get("made_for"),
        "servers": servers,
        "guesses": guesses,
        "remarks": remarks,
        "problems": problems,
    }


def screen(head: dict[str, Any]) -> str:
    taps = head["taps"] or (
        "not determined without its target" if head["kind"] == "eagle3" else "none"
    )
    lines = [
        ("head", f"{head['kind']}, {head['layout']} layout ({head['weights']}): {head['path']}")
    ]
    lines.append(("taps", f"hidden_states {taps}"))
    for name in ("target", "sizes", "parameters", "vocabulary", "rope", "training"):
        shown = (f"{key} {plainly(value)}" for key, value in head[name].items())
        lines.append((name, ", ".join(shown) or "not recorded"))
    lines += [("options", ", ".join(head["options"]) or "none"), ("embedding", head["embedding"])]
    lines += [
        ("left out", ", ".join(head["left_out"]) or "nothing"),
        ("made for", head["made_for"] or "not recorded"),
    ]
    for server, to in head["servers"].items():
        lines.append(
            (
                server,
                "; ".join(to["refused"])
                or f"loads it in the layout {to['layout']} (aerie convert)",
            )
        )
    for name, sentences in (("guessed", "guesses"), ("remark", "remarks"), ("PROBLEM", "problems")):
        lines += [(name, sentence) for sentence in head[sentences]]
    return "\n".join(f"{name:<11} {text}" for name, text in lines)
