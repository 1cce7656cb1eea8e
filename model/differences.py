"""What an export has that its source lacks, or the other way round: said, never dropped in silence."""

import dataclasses

from model.formats.content import Export, HeadContent, HeadFiles
from model.formats.taps import NUMBERED
from model.formats.unread import unread
from model.heads.eagle3 import EMBEDDING
from model.hub import is_on_hub

BOOKKEEPING = {  # keys of config.json that say nothing about how a head drafts
    *("_name_or_path", "architectures", "auto_map", "bos_token_id", "dtype", "eos_token_id", "initializer_range"),
    *("pad_token_id", "torch_dtype", "transformers_version", "use_cache", "aerie", "aerie_kind", "model_type"),
    *("hidden_act", "mlp_bias", "tie_word_embeddings", "embed_requires_grad", "speculators_version"),
    *("speculators_model_type", "speculators_config", "transformer_layer_config", "eagle_config", "rope_theta"),
    *("rope_scaling", "rope_parameters", "sliding_window", "use_sliding_window", "max_window_layers", "layer_types"),
    "quantization_config",
    *("max_sequence_length", "base_model_name_or_path", "pretraining_tp", "attention_bias", "layernorms", NUMBERED),
}


def differences(files: HeadFiles, content: HeadContent, made: Export, target: str) -> list[str]:
    """A sentence for each; files and content are the source's, target is what servers are told to load."""
    notes = _tensor_differences(files, made)
    carried = {field.name for field in dataclasses.fields(content.config)} | made.values.keys() | BOOKKEEPING
    lost = sorted(name for name, value in files.values.items() if name not in carried and value not in (None, False))
    if lost:
        notes.append(f"config.json's {', '.join(lost)} left out: this project does not know what they mean")
    notes += [f"left out: {text}" for text in unread(files.values)]
    is_speculators = "speculators_config" in made.values
    if content.speculative_tokens is not None and not is_speculators:
        notes.append(
            f"its {content.speculative_tokens} drafts per cycle are left out: such a server takes them on its "
            f"command line"
        )
    if is_speculators and not is_on_hub(target):
        notes.append(f"servers are told to load {target}, which is a local path; give its Hub id with --target-name")
    return notes


def _tensor_differences(files: HeadFiles, made: Export) -> list[str]:
    notes = []
    if EMBEDDING in made.tensors and EMBEDDING not in files.tensors:
        dtype = str(made.tensors[EMBEDDING].dtype).removeprefix("torch.")
        notes.append(f"{EMBEDDING} is added, the target's in {dtype}: not every reader takes it from the target")
    tables = [name for name in ("d2t", "t2d") if name in files.tensors and name not in made.tensors]
    if tables:
        notes.append(f"{' and '.join(tables)} left out: both vocabularies are one, and readers expect no tables then")
    for name in ("d2t", "t2d"):
        old, new = files.tensors.get(name), made.tensors.get(name)
        if old is not None and new is not None and old.dtype != new.dtype:
            kinds = [str(table.dtype).removeprefix("torch.") for table in (old, new)]
            notes.append(f"{name} holds {kinds[0]} and is written as {kinds[1]}, the same numbers, as readers expect")
    derived = sorted(name for name in files.tensors if name.endswith("rotary_emb.inv_freq"))
    if derived:
        notes.append(f"{', '.join(derived)} left out: config.json decides RoPE's frequencies")
    return notes
