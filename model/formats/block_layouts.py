"""Block heads in the layouts of speculators 0.9 and of z-lab.

vLLM loads speculators' dflash, and dspark, which has a path correction. SGLang loads z-lab's
layout. Tensors have our names in all three.
"""

from pathlib import Path
from typing import Any

from transformers import Qwen3Config

from aerie.configs.errors import UserError
from aerie.model.formats import content
from aerie.model.formats.eagle_layouts import LAYER, SERVER, TYPE, speculators_values
from aerie.model.heads.block import BlockConfig

TAPS = "aux_hidden_state_layer_ids"
# DSpark's confidence head; aerie calibrates the confidence that it measures itself
CONFIDENCE: content.RenameRule = (r"^confidence_head\..*$", "")
FROM_TARGET: content.RenameRule = (
    r"^(embed_tokens|lm_head|verifier_lm_head|verifier_norm)\.weight$",
    "",
)


def read_block(files: content.HeadFiles, layout: str) -> content.HeadContent:
    """A block head; UserError for options that our block heads do not have."""
    values, path = files.values, files.config_path
    if layout == "speculators":
        extra, layer = values, content.nested(values, LAYER)
        numbers = extra.get(TAPS)
    else:  # z-lab counts the outputs of blocks
        extra, layer = content.nested(values, "dflash_config"), values
        numbers = [number + 1 for number in extra.get("target_layer_ids") or []]
    is_dspark = values.get(TYPE) == "dspark"
    complete_layer = Qwen3Config(**layer).to_dict()  # speculators leaves out Qwen3's defaults
    _refuse_unknown(values, layer, complete_layer, path)
    taps, guesses = content.read_taps(
        {**values, content.NUMBERED: numbers}, files.after_blocks, path, is_speculators=True
    )
    options = {
        "after_blocks": taps,
        "block_size": values.get("block_size") or extra.get("block_size"),
        "mask_token_id": extra.get("mask_token_id"),
        "sample_from_anchor": values.get("sample_from_anchor", is_dspark),
        "markov_rank": values.get("markov_rank", 256) if is_dspark else 0,
        "markov_head": values.get("markov_head_type", "vanilla"),
    }
    if any(name.startswith("confidence_head.") for name in files.tensors):
        guesses.append(
            "its confidence head is left out: aerie calibrate measures confidence itself"
        )
    sizes = content.read_sizes(complete_layer, path)
    return content.HeadContent(
        content.configured(BlockConfig, {**sizes, **options}, path),
        content.renamed(files.tensors, (CONFIDENCE, FROM_TARGET)),
        tuple(guesses),
        speculative_tokens=content.proposed_tokens(values),
    )


def _refuse_unknown(
    values: dict[str, Any], layer: dict[str, Any], complete_layer: dict[str, Any], path: Path
) -> None:
    """UserError for a head of another form.

    layer: the layer's settings in the file; complete_layer: the same with Qwen3's defaults.
    """
    vocab_size = complete_layer["vocab_size"]
    draft_size = values.get("draft_vocab_size", vocab_size)
    correction = values.get("markov_head_type", "vanilla")
    model_type = layer.get("model_type", "qwen3")
    attention = {*(complete_layer.get("layer_types") or [])}
    unknown = {
        f"a draft vocabulary of {draft_size:,} tokens": draft_size != vocab_size,
        f"layers of {model_type}": model_type != "qwen3",
        "layers with a sliding window": attention - {"full_attention"},
        "projections with biases": complete_layer["attention_bias"],
        f"a path correction of type {correction!r}": correction not in ("vanilla", "gated"),
    }
    refused = [what for what, applies in unknown.items() if applies]
    if refused:
        raise UserError(f"{path}: a block head with {', '.join(refused)} is not supported")


def refuse_block(layout: str, config: Any, target: content.TargetFacts | None = None) -> None:
    """Refuses as `refuse_eagle` does; the layout `sglang` is z-lab's."""
    nowhere = {  # options that no server supports
        "in_block causal": config.in_block == "causal",
        "anchor_feature": config.anchor_feature,
        f"markov_order {config.markov_order}": config.markov_rank and config.markov_order > 1,
        # vLLM's runner V1 drafts rubbish, and V2 stops.
        "sample_from_anchor without markov_rank": config.sample_from_anchor
        and not config.markov_rank,
    }
    lost = [name for name, is_on in nowhere.items() if is_on]
    has_server = not lost and not content.vllm_faults(config)
    fix = "serve it with vLLM (--to speculators)" if has_server else "decode it with aerie"
    if layout == "sglang":
        lost += ["markov_rank"] if config.markov_rank else []
        if 0 in config.after_blocks:
            lost.append("the tap 0")
    if layout == "safeailab":
        lost = ["a block head"]
    if lost:
        raise UserError(f"--to {layout}: cannot carry {', '.join(lost)}; {fix}")


def write_block(
    layout: str, head: content.HeadContent, target: content.TargetFacts
) -> content.Export:
    """Like `write_eagle1`, for a block head."""
    config: Any = head.config
    refuse_block(layout, config)
    sizes, notes = content.write_sizes(config, target)
    sizes |= {"model_type": "qwen3", "attention_bias": False}
    if layout == "sglang":
        values = {
            "architectures": ["DFlashDraftModel"],
            **sizes,
            "block_size": config.block_size,
            "dflash_config": {
                "mask_token_id": config.mask_token_id,
                "target_layer_ids": [entry - 1 for entry in config.after_blocks],
            },
            "num_target_layers": target.text_config.num_hidden_layers,
            "aerie": {SERVER: "SGLang"},
        }
        return values, head.tensors, notes
    is_dspark = bool(config.markov_rank)
    values = {
        "architectures": ["DSparkDraftModel" if is_dspark else "DFlashDraftModel"],
        **speculators_values(head, target, sizes),
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "sample_from_anchor": config.sample_from_anchor,
        TAPS: list(config.after_blocks),
        "aerie": {SERVER: "vLLM"},
    }
    if is_dspark:
        values |= {
            "markov_rank": config.markov_rank,
            "markov_head_type": config.markov_head,
            "enable_confidence_head": False,
            "confidence_head_with_markov": False,
        }
    return values, head.tensors, notes


BLOCK = content.Formats(read_block, refuse_block, write_block)
