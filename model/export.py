"""Writes a head in another layout, reads it back, and checks that both are equal."""

import dataclasses
import re
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from aerie.configs.errors import UserError
from aerie.model import checkpoint
from aerie.model.formats.content import (
    TARGET_DTYPE,
    HeadContent,
    HeadFiles,
    TargetFacts,
    dtype_name,
    nested,
    unread,
    vllm_faults,
)
from aerie.model.formats.eagle_layouts import SERVER, ZERO_BIAS
from aerie.model.formats.layouts import read_content, write_tensors
from aerie.model.heads import HEADS, AnyConfig
from aerie.model.heads.eagle import EMBEDDING
from aerie.model.hub import PROVENANCE, head_directory, is_on_hub
from aerie.model.storage import CONFIG, Manifest, digests, directory_atomically, write_json

OF_AN_EXPORT = ("exported_from", SERVER, ZERO_BIAS)  # the next export does not copy these
# Keys of config.json that we read, that `unread` reports, or that nobody needs.
BOOKKEEPING = re.compile(
    r"_name_or_path|architectures|auto_map|\w+_token_id|(torch_)?dtype|initializer_range"
    r"|transformers_version|use_cache|aerie(_kind)?|model_type|hidden_act|tie_word_embeddings"
    r"|embed_requires_grad|speculators_\w+|eagle_config|rope_\w+|transformer_layer_config"
    r"|(use_)?sliding_window|max_window_layers|layer_types|max_sequence_length|layernorms"
    r"|base_model_name_or_path|pretraining_tp|(attention|mlp)_bias|quantization_config"
    r"|(eagle_)?aux_hidden_state_layer_ids|dflash_config|num_target_layers|tap_convention"
    r"|draft_vocab_size|markov_head_type|medusa_\w+"
)


def export(
    source: Path | str,
    to: str,
    output: Path,
    target: TargetFacts,
    after_blocks: tuple[int, ...] | None = None,
    any_target: bool = False,  # a target with other weights is a note, no error
    pickled: bool = True,  # SafeAILab's layout gets a pickle, as published
) -> tuple[str, list[str]]:
    """Writes the head to output in layout `to`; returns its old layout, and notes.

    UserError if the layout cannot carry the head, or the head is another target's.
    """
    directory = head_directory(source)
    layout, files, content = read_content(directory, after_blocks or target.default_taps)
    state = _complete(files, content, target)
    check_taps(content.config, directory, after_blocks, target)
    facts = nested(files.values, "aerie")
    mismatch = target.other_weights(facts.get("target"))
    if mismatch is not None and not any_target:
        raise UserError(f"{source}: {mismatch}; give the head's own target, or add --any-target")
    to, server_notes = _layout_for(to, content)
    values, tensors, layout_notes = HEADS[content.kind].formats.write(
        to, dataclasses.replace(content, tensors=state), target
    )
    dtype = dtype_name(checkpoint.dtype_of(state))
    values["aerie"] = {
        **{name: value for name, value in facts.items() if name not in OF_AN_EXPORT},
        **values.get("aerie", {}),
        "exported_from": {"layout": layout, "files": digests(directory)},
        TARGET_DTYPE: dtype_name(target.vocab.lm_head.dtype),
    }
    values |= {"dtype": dtype, "torch_dtype": dtype}
    with directory_atomically(output) as temporary:
        write_tensors(temporary, tensors, pickled=pickled and to == "safeailab")
        write_json(temporary / CONFIG, values)
        _copy_records(directory, temporary)
        _check_written(temporary, to, content, state, target)
    notes = [] if mismatch is None else [f"{mismatch}: few of its drafts will be accepted"]
    notes += [*server_notes, *content.guesses]
    notes += _tensor_notes(files.tensors, tensors)
    notes += _key_notes(files.values, vars(content.config).keys() | values.keys())
    is_speculators = "speculators_config" in values
    if content.speculative_tokens is not None and not is_speculators:
        notes.append(
            f"its number of drafts per cycle, {content.speculative_tokens}, is left out: "
            "set it on the server's command line"
        )
    if is_speculators and not is_on_hub(target.name):
        notes.append(
            f"config.json tells servers to load {target.name}, a local path; "
            "give its Hub id with --target-name"
        )
    return layout, [*notes, *layout_notes]


def _layout_for(to: str, content: HeadContent) -> tuple[str, list[str]]:
    """The layout that `to` means for this head, and notes; UserError if vLLM would fail with it."""
    vllm_layout = HEADS[content.kind].servers.get("vLLM", to)
    faults = vllm_faults(content.config)
    if to != "vllm":
        faults = faults if to == vllm_layout else []
        return to, [f"{fault}: this directory is not for vLLM" for fault in faults]
    if faults:
        raise UserError(f"--to vllm: {faults[0]}; decode it with aerie")
    return vllm_layout, []


def check_taps(
    config: AnyConfig,
    directory: Path,
    after_blocks: tuple[int, ...] | None = None,
    target: TargetFacts | None = None,
) -> None:
    """UserError unless the head reads these taps (None: any), and the target has them."""
    taps = getattr(config, "after_blocks", None)
    if after_blocks not in (None, taps):
        words = ",".join(map(str, after_blocks or ()))
        raise UserError(
            f"--after-blocks {words}: {directory / CONFIG} says that the head reads "
            f"{'no taps' if taps is None else list(taps)}"
        )
    if taps is None or target is None:
        return
    count = target.text_config.num_hidden_layers
    if taps[-1] >= count:
        raise UserError(
            f"{directory}: reads states after blocks {list(taps)}, "
            f"but {target.path} has only {count} blocks"
        )


def _complete(files: HeadFiles, content: HeadContent, target: TargetFacts) -> dict[str, Tensor]:
    """All tensors of a head; UserError if it does not fit the target.

    An embedding that the file lacks is the target's, in the head's dtype.
    """
    checkpoint.check_sizes(
        content.config, target.vocab, str(files.config_path), target.path, target.text_config
    )
    state = checkpoint.complete_state(content, target.vocab, files.weights_path)
    if EMBEDDING not in content.tensors and EMBEDDING in state:
        state[EMBEDDING] = state[EMBEDDING].to(checkpoint.dtype_of(state))
    return state


def _copy_records(source: Path, destination: Path) -> None:
    """Copies the recipe and the manifest, which then lists the destination's files."""
    files = Manifest.of(destination).files
    for name in PROVENANCE:
        if (source / name).is_file():
            shutil.copyfile(source / name, destination / name)
    with suppress(UserError):  # a pushed head's record was rewritten, so it is no manifest
        dataclasses.replace(Manifest.read(source), files=files).write(destination)


def _check_written(
    directory: Path,
    layout: str,
    content: HeadContent,
    state: dict[str, Tensor],
    target: TargetFacts,
) -> None:
    """AssertionError unless the directory reads back as this head."""
    _, files, content_again = read_content(directory)
    state_again = _complete(files, content_again, target)
    if not _is_same(content.config, state, content_again.config, state_again):
        raise AssertionError(
            f"layout {layout}: the head that was read back differs from the one that was written"
        )


def _is_same(
    config: AnyConfig, state: dict[str, Tensor], again: AnyConfig, state_again: dict[str, Tensor]
) -> bool:
    """Whether both heads are equal bit for bit, but for positions, which an export may raise."""
    positions = again.max_position_embeddings
    return (
        dataclasses.replace(config, max_position_embeddings=positions) == again
        and state.keys() == state_again.keys()
        and all(_has_same_bits(tensor, state_again[name]) for name, tensor in state.items())
    )


def _has_same_bits(tensor: Tensor, again: Tensor) -> bool:
    # Compared as bytes, because 0.0 == -0.0.
    bits, bits_again = (part.contiguous().view(torch.uint8) for part in (tensor, again))
    return tensor.dtype == again.dtype and torch.equal(bits, bits_again)


def _tensor_notes(old: dict[str, Tensor], new: dict[str, Tensor]) -> list[str]:
    notes = []
    if EMBEDDING in new and EMBEDDING not in old:
        notes.append(f"{EMBEDDING} is added: the target's, in {dtype_name(new[EMBEDDING].dtype)}")
    if "d2t" in old and "d2t" not in new:
        notes.append("d2t and t2d are left out: both vocabularies are equal")
    return notes


def _key_notes(values: dict[str, Any], carried: set[str]) -> list[str]:
    """Notes about what the old config.json says and the new one does not."""
    notes = [
        f"config.json's {name} is left out: aerie does not know its meaning"
        for name, value in values.items()
        if value not in (None, False) and name not in carried and not BOOKKEEPING.fullmatch(name)
    ]
    return notes + [f"left out: {sentence}" for sentence in unread(values)]
