"""A head written in another layout: completed with its target's embedding, read back, and compared bit for bit."""

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from aerie.configs.errors import UserError
from aerie.configs.schema.target_and_head import TargetConfig
from aerie.model.checkpoint import check_sizes, completed, head_facts
from aerie.model.formats.content import NUMBERED, Destination, Export, HeadContent, HeadFiles, unread
from aerie.model.formats.layouts import WRITABLE, Layout, read_content
from aerie.model.formats.sglang import SERVER, ZERO_BIAS
from aerie.model.heads import AnyConfig
from aerie.model.heads.eagle import EMBEDDING, Eagle3Config
from aerie.model.hub import head_directory, is_on_hub
from aerie.model.storage import CALIBRATOR, CONFIG, digests, directory_atomically, write_json
from aerie.model.target import VocabWeights, default_taps, fingerprint, fingerprints, load_config, load_vocab
from aerie.model.weights import write_tensors

BESIDE = ("recipe.yaml", "provenance.json")  # what goes along with the head
OF_AN_EXPORT = ("exported_from", SERVER, ZERO_BIAS)  # facts about one export, which the next does not inherit
BOOKKEEPING = {  # keys of config.json that say nothing about how a head drafts
    *("_name_or_path", "architectures", "auto_map", "bos_token_id", "dtype", "eos_token_id", "initializer_range"),
    *("pad_token_id", "torch_dtype", "transformers_version", "use_cache", "aerie", "aerie_kind", "model_type"),
    *("hidden_act", "mlp_bias", "tie_word_embeddings", "embed_requires_grad", "speculators_version"),
    *("speculators_model_type", "speculators_config", "transformer_layer_config", "eagle_config", "rope_theta"),
    *("rope_scaling", "rope_parameters", "sliding_window", "use_sliding_window", "max_window_layers", "layer_types"),
    *("max_sequence_length", "base_model_name_or_path", "pretraining_tp", "attention_bias", "layernorms", NUMBERED),
    "quantization_config",
}


@dataclasses.dataclass(frozen=True)
class TargetFacts:
    """A target without its trunk: its embedding and LM head, and what a server has to know of it."""

    path: str
    text_config: Any
    vocab: VocabWeights
    destination: Destination
    end_ids: tuple[int, ...] = ()  # the tokens at which its answers end

    @classmethod
    def load(cls, path: str, name: str | None = None, speculative_tokens: int | None = None) -> "TargetFacts":
        """Reads two tensors and the configuration. name is what servers are told to load (default: the path)."""
        config = TargetConfig(path)
        architectures = load_config(config).architectures
        text_config, vocab = load_vocab(config)
        positions = int(getattr(text_config, "max_position_embeddings", 0) or 0)
        blocks = int(text_config.num_hidden_layers)
        destination = Destination(name or path, tuple(architectures or ()), blocks, positions, speculative_tokens)
        try:
            stops = GenerationConfig.from_pretrained(path).eos_token_id
        except OSError:  # the file is optional
            stops = None
        end_ids = () if stops is None else (stops,) if isinstance(stops, int) else tuple(stops)
        return cls(path, text_config, vocab, destination, end_ids)

    @property
    def default_taps(self) -> tuple[int, ...] | None:
        """EAGLE-3's, None for a target that is too short for them."""
        blocks = self.destination.num_blocks
        return default_taps(blocks) if blocks >= 7 else None


@dataclasses.dataclass(frozen=True)
class Exported:
    """What was written, and what its reader would have to be told."""

    weights: Path
    num_tensors: int
    source_layout: str
    notes: tuple[str, ...]


def export(
    source: Path | str,
    to: str,
    output: Path,
    target: TargetFacts,
    after_blocks: tuple[int, ...] | None = None,
    any_target: bool = False,
) -> Exported:
    """Writes the head in layout `to` to the directory output, whole or absent.

    after_blocks are the taps of a published head that names none (default: the target's default ones). UserError for a
    head that belongs to another target, that names other taps, or that the layout cannot carry. any_target: a target of
    other weights than the head was trained on is only noted.
    """
    directory = head_directory(source)
    if not directory.is_dir():
        raise UserError(f"{source}: no such head directory")
    if directory.resolve() == output.resolve():
        raise UserError(f"--out {output}: is the head itself; name another directory")
    layout, files, content, state = read_complete(directory, target, after_blocks or target.default_taps)
    if after_blocks is not None:
        check_asked(content.config, after_blocks, files)
    facts = {name: value for name, value in head_facts(directory).items() if name not in OF_AN_EXPORT}
    other = other_weights(facts, target)
    if other is not None and not any_target:
        raise UserError(f"{source}: {other}; give its own target, or write it for this one with --any-target")
    written = WRITABLE[to](dataclasses.replace(content, tensors=state), target.destination)
    origin = {"layout": layout.name, "files": digests(directory)}
    dtype = str(state["fc.weight"].dtype).removeprefix("torch.")
    values = {**written.values, "aerie": {**facts, **written.values.get("aerie", {}), "exported_from": origin}}
    values |= {"dtype": dtype, "torch_dtype": dtype}  # transformers 5 and 4
    with directory_atomically(output) as place:
        weights = write_tensors(place, written.tensors, written.pickled)
        write_json(place / CONFIG, values)
        for name in BESIDE:
            if (directory / name).is_file():
                shutil.copyfile(directory / name, place / name)
        _, _, again, state_again = read_complete(place, target, None)
        positions = again.config.max_position_embeddings  # the one number that an export may raise
        same = dataclasses.replace(content.config, max_position_embeddings=positions) == again.config
        same = same and state.keys() == state_again.keys()
        if not (same and all(_same(state[name], state_again[name]) for name in state)):
            raise AssertionError(f"layout {to}: the head was read back otherwise than it was written")
    notes = [f"{other}: few of its drafts will be accepted"] if other is not None else []
    notes += [*content.guesses, *differences(files, content, written, target.destination.target), *written.notes]
    if (directory / CALIBRATOR).is_file():
        notes.append(f"{CALIBRATOR} left out: it is of the head as it lies in {directory}; servers do not read it")
    return Exported(output / weights.name, len(written.tensors), layout.name, tuple(notes))


def read_complete(
    directory: Path, target: TargetFacts, after_blocks: tuple[int, ...] | None
) -> tuple[Layout, HeadFiles, HeadContent, dict[str, Tensor]]:
    """A head's layout, files, content and complete tensors; UserError where it does not fit the target.

    The target's embedding is taken in the head's precision.
    """
    layout, files, content = read_content(directory, after_blocks)
    check_sizes(content.config, target.vocab, str(directory), target.path)
    check_depth(content.config, target.destination.num_blocks, str(directory), target.path)
    state = completed(content, target.vocab, files.weights_place)
    if EMBEDDING not in content.tensors and EMBEDDING in state:
        state[EMBEDDING] = state[EMBEDDING].to(state["fc.weight"].dtype)
    return layout, files, content, state


def check_asked(config: AnyConfig, after_blocks: tuple[int, ...], files: HeadFiles) -> None:
    """UserError for taps that the head does not have."""
    if not isinstance(config, Eagle3Config):
        raise UserError(f"--after-blocks: {files.config_place.parent} reads no taps; leave the option out")
    if config.after_blocks != after_blocks:
        raise UserError(
            f"--after-blocks {','.join(map(str, after_blocks))}: {files.config_place} says that the head reads "
            f"{list(config.after_blocks)}; leave the option out, or correct that file if it is wrong"
        )


def check_depth(config: AnyConfig, num_blocks: int, head_path: str, target_path: str) -> None:
    """UserError for taps that the target does not have."""
    if isinstance(config, Eagle3Config) and max(config.after_blocks) >= num_blocks:
        raise UserError(
            f"{head_path}: reads the target's states after blocks {list(config.after_blocks)}, and {target_path} has "
            f"{num_blocks} blocks; give the target it was trained for"
        )


def other_weights(facts: dict[str, Any], target: TargetFacts) -> str | None:
    """A sentence about a head whose facts say that it was trained on other weights than the target's, else None.

    Rounding to a 16-bit dtype makes no other target.
    """
    recorded = facts.get("target")
    if recorded is None or recorded in fingerprints(target.text_config, target.vocab):
        return None
    here = fingerprint(target.text_config, target.vocab)
    return f"was trained on a target with other weights than {target.path} (fingerprint {recorded}, not {here})"


def _same(one: Tensor, two: Tensor) -> bool:
    """Bit for bit, so that not-a-number equals itself."""
    alike = one.dtype == two.dtype and one.shape == two.shape
    return alike and torch.equal(one.contiguous().view(torch.uint8), two.contiguous().view(torch.uint8))


def differences(files: HeadFiles, content: HeadContent, written: Export, target: str) -> list[str]:
    """A sentence for whatever the export has that its source lacks, or the other way round."""
    notes, old, new = [], files.tensors, written.tensors
    if EMBEDDING in new and EMBEDDING not in old:
        dtype = str(new[EMBEDDING].dtype).removeprefix("torch.")
        notes.append(f"{EMBEDDING} is added, the target's in {dtype}: not every reader takes it from the target")
    tables = [name for name in ("d2t", "t2d") if name in old]
    if dropped := [name for name in tables if name not in new]:
        notes.append(f"{' and '.join(dropped)} left out: both vocabularies are one, and readers expect no tables then")
    for name in tables:
        if name in new and old[name].dtype != new[name].dtype:
            dtypes = [str(table.dtype).removeprefix("torch.") for table in (old[name], new[name])]
            notes.append(f"{name} holds {dtypes[0]} and is written as {dtypes[1]}, the same numbers, as readers expect")
    if derived := sorted(name for name in old if name.endswith("rotary_emb.inv_freq")):
        notes.append(f"{', '.join(derived)} left out: config.json decides RoPE's frequencies")
    carried = {field.name for field in dataclasses.fields(content.config)} | written.values.keys() | BOOKKEEPING
    lost = sorted(name for name, value in files.values.items() if name not in carried and value not in (None, False))
    if lost:
        notes.append(f"config.json's {', '.join(lost)} left out: this project does not know what they mean")
    notes += [f"left out: {text}" for text in unread(files.values)]
    is_speculators = "speculators_config" in written.values
    if content.speculative_tokens is not None and not is_speculators:
        drafts = content.speculative_tokens
        notes.append(f"its {drafts} drafts per cycle are left out: such a server takes them on its command line")
    if is_speculators and not is_on_hub(target):
        notes.append(f"servers are told to load {target}, which is a local path; give its Hub id with --target-name")
    return notes
