"""Block heads in speculators 0.9 (dflash, and dspark with a path correction; vLLM loads both) and as z-lab publishes
them (SGLang loads these). Tensors have our names in all three."""

from typing import Any

from transformers import Qwen3Config

from aerie.configs.errors import UserError
from aerie.model.formats import content
from aerie.model.formats.eagle_layouts import LAYER, SERVER, TYPE, speculators_values
from aerie.model.heads.block import BlockConfig

TAPS = "aux_hidden_state_layer_ids"
CONFIDENCE: content.Rule = (
    r"^confidence_head\..*$",
    "",
)  # DSpark's; ours is measured by `aerie calibrate`
FROM_TARGET: content.Rule = (r"^(embed_tokens|lm_head|verifier_lm_head|verifier_norm)\.weight$", "")


def read_block(files: content.HeadFiles, layout: str) -> content.HeadContent:
    values, place, is_speculators = files.values, files.config_path, layout == "speculators"
    extra = values if is_speculators else content.nested(values, "dflash_config")
    given = content.nested(values, LAYER) if is_speculators else values
    layer = Qwen3Config(**given).to_dict()  # speculators leaves out Qwen3's defaults
    draft, kinds = (
        values.get("draft_vocab_size", layer["vocab_size"]),
        {*(layer.get("layer_types") or [])},
    )
    correction = values.get("markov_head_type", "vanilla")
    unknown = {
        f"a draft vocabulary of {draft:,} tokens": draft != layer["vocab_size"],
        f"layers of {given.get('model_type')}": given.get("model_type", "qwen3") != "qwen3",
        "layers with a sliding window": bool(kinds - {"full_attention"}),
        "projections with biases": layer["attention_bias"],
        f"a path correction of type {correction!r}": correction not in ("vanilla", "gated"),
    }
    if refused := [what for what, is_there in unknown.items() if is_there]:
        raise UserError(f"{place}: a block head with {', '.join(refused)} is not supported")
    numbers = (
        extra.get(TAPS)
        if is_speculators
        else [number + 1 for number in extra.get("target_layer_ids") or []]
    )
    named = {**values, content.NUMBERED: numbers or None}
    taps, guesses = content.read_taps(named, files.after_blocks, place, is_speculators=True)
    options = {
        "after_blocks": taps,
        "block_size": values.get("block_size") or extra.get("block_size"),
        "mask_token_id": extra.get("mask_token_id"),
        "sample_from_anchor": values.get("sample_from_anchor", values.get(TYPE) == "dspark"),
        "markov_rank": values.get("markov_rank", 256) if values.get(TYPE) == "dspark" else 0,
        "markov_head": correction,
    }
    if any(name.startswith("confidence_head.") for name in files.tensors):
        guesses.append(
            "its confidence head is left out: aerie calibrate measures what confidence is worth"
        )
    tensors = content.renamed(files.tensors, (CONFIDENCE, FROM_TARGET))
    config = content.configured(BlockConfig, {**content.read_sizes(layer, place), **options}, place)
    return content.HeadContent(
        config, tensors, tuple(guesses), speculative_tokens=content.proposed_tokens(values)
    )


def refuse_block(layout: str, config: Any, target: content.TargetFacts | None = None) -> None:
    """As `refuse_eagle`; `sglang` is z-lab's layout."""
    lost = ["in_block causal"] if config.in_block == "causal" else []
    lost += ["anchor_feature"] if config.anchor_feature else []
    lost += (
        [f"markov_order {config.markov_order}"]
        if config.markov_rank and config.markov_order > 1
        else []
    )
    fix = "decode it with aerie" if lost else "serve it with vLLM (--to speculators)"
    if layout == "sglang":
        lost += [name for name in ("markov_rank", "sample_from_anchor") if getattr(config, name)]
        lost += ["the tap 0"] if 0 in config.after_blocks else []
    if layout == "safeailab":
        lost = ["a block head"]
    if lost:
        raise UserError(f"--to {layout}: cannot carry {', '.join(lost)}; {fix}")


def write_block(
    layout: str, head: content.HeadContent, target: content.TargetFacts
) -> content.Export:
    """As `write_eagle`."""
    config: Any = head.config
    refuse_block(layout, config)
    sizes, notes = content.write_sizes(config, target)
    sizes |= {"model_type": "qwen3", "attention_bias": False}
    if layout == "sglang":
        extra = {
            "mask_token_id": config.mask_token_id,
            "target_layer_ids": [k - 1 for k in config.after_blocks],
        }
        values = {"architectures": ["DFlashDraftModel"], **sizes, "block_size": config.block_size}
        values |= {
            "dflash_config": extra,
            "num_target_layers": target.text_config.num_hidden_layers,
        }
        return {**values, "aerie": {SERVER: "SGLang"}}, head.tensors, notes
    algorithm = "dspark" if config.markov_rank else "dflash"
    if algorithm == "dflash" and config.sample_from_anchor:
        notes.append(
            "sample_from_anchor: speculators warns that servers may not draft so from a dflash head"
        )
    values = {
        "architectures": ["DSparkDraftModel" if config.markov_rank else "DFlashDraftModel"],
        **speculators_values(
            algorithm, config, target, head.speculative_tokens or config.num_places, sizes
        ),
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "sample_from_anchor": config.sample_from_anchor,
        TAPS: list(config.after_blocks),
        "aerie": {SERVER: "vLLM"},
    }
    if config.markov_rank:
        values |= {"markov_rank": config.markov_rank, "markov_head_type": config.markov_head}
        values |= {"enable_confidence_head": False, "confidence_head_with_markov": False}
    return values, head.tensors, notes


BLOCK = content.Formats(read_block, refuse_block, write_block)
