"""The numbers by which SGLang is told an EAGLE-3 head's taps: they depend on its version and on the target.

Without numbers SGLang reads (2, n // 2, n - 3). Most of its models add one to every number; DeepSeek's and two more do
so up to 0.5.12, and from 0.5.13 on only to numbers that begin with 1. Source: set_eagle3_layers_to_capture of SGLang
0.5.10 to 0.5.23.
"""

from dataclasses import dataclass

from model.errors import UserError

CHECKED = "0.5.10 to 0.5.23"
ADDS_ONE = (
    "ApertusForCausalLM",
    "Gemma3ForCausalLM",
    "Gemma3ForConditionalGeneration",
    "Glm4MoeForCausalLM",
    "GptOssForCausalLM",
    "InternLM3ForCausalLM",
    "LlamaForCausalLM",
    "MiniMaxM2ForCausalLM",
    "MistralForCausalLM",
    "Phi3ForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen2MoeForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
    "Qwen3NextForCausalLM",
)
BY_THE_FIRST = (
    "DeepseekV2ForCausalLM",
    "DeepseekV3ForCausalLM",
    "DeepseekV32ForCausalLM",
    "Glm4MoeLiteForCausalLM",
    "KimiK25ForConditionalGeneration",
)
INSTEAD = "serve it with vLLM (--to speculators)"


@dataclass(frozen=True)
class Numbers:
    """What config.json says (None: nothing, SGLang reads its default) and the versions that read these very taps."""

    values: list[int] | None
    versions: str


def sglang_numbers(
    after_blocks: tuple[int, ...], default: tuple[int, ...] | None, architectures: tuple[str, ...]
) -> Numbers:
    """The numbers for these taps of a target of these architectures; UserError where SGLang has none for them."""
    if after_blocks == default:
        return Numbers(None, CHECKED)
    if after_blocks[0] == 2:  # begins with 1 when written, so one is added by every rule
        return Numbers([k - 1 for k in after_blocks], CHECKED)
    taps = list(after_blocks)
    if any(name in BY_THE_FIRST for name in architectures):
        if after_blocks[0] == 1:
            raise UserError(f"--to sglang: cannot carry the taps {taps}: one is added to what begins with 1; {INSTEAD}")
        return Numbers(taps, "0.5.13 to 0.5.23")
    if not any(name in ADDS_ONE for name in architectures):
        what = ", ".join(architectures) or "a target of unknown architecture"
        raise UserError(f"--to sglang: cannot carry the taps {taps}: no rule known for {what}; {INSTEAD}")
    if after_blocks[0] == 0:
        raise UserError(f"--to sglang: cannot carry the taps {taps}: SGLang has no number for the embedding; {INSTEAD}")
    return Numbers([k - 1 for k in after_blocks], CHECKED)
