"""The rows of the table in docs/exports.md: a head, its layout, and what vLLM must do with it."""

from dataclasses import dataclass, field
from typing import Any

SAME = "the same drafts"
OTHER = "other drafts"
STOPS = "vLLM stops"
REFUSED = "refused"
TAPS = (2, 4, 7)  # of a target with 8 blocks


@dataclass(frozen=True)
class Row:
    name: str
    kind: str  # of the head; "": there is no head
    head: dict[str, Any] = field(default_factory=dict)  # changes to the recipe's section `head`
    expected: str = SAME
    to: str = "vllm"  # the layout that export writes
    taps: tuple[int, ...] = TAPS
    pickled: bool = False
    drafted_tokens: int | None = None  # size of the draft vocabulary; None: all tokens
    is_mended: bool = False  # engine.py mends vLLM's fault in the keys of several layers
    speculative: dict[str, Any] | None = None  # vLLM's; None: as `aerie inspect` prints it

    @property
    def trained(self) -> tuple[Any, ...]:
        """The key of the row's head: rows with equal keys share a trained head."""
        is_refused = self.expected == REFUSED  # such a head needs no training
        return self.kind, str(self.head), self.taps, self.drafted_tokens, is_refused


def _row(name: str, kind: str, expected: str = SAME, **changes: Any) -> Row:
    """A row of the table. Changes that are no fields of Row go to the head's section."""
    of_row = {key: changes.pop(key) for key in [*changes] if key in Row.__dataclass_fields__}
    return Row(name, kind, changes, expected, **of_row)


EAGLE31 = {"fc_norm": True, "norm_output": True, "norm_before_residual": True}
BLOCK = {"markov_rank": 0}
ROWS = [
    _row("EAGLE-1", "eagle1"),
    _row("EAGLE-1, as a pickle", "eagle1", pickled=True),
    _row("EAGLE-1, two layers", "eagle1", num_hidden_layers=2),
    _row("EAGLE-1, `bias`", "eagle1", REFUSED, bias=True),
    _row("EAGLE-1, `bias`", "eagle1", OTHER, bias=True, to="safeailab"),
    _row("EAGLE-3", "eagle3", taps=(2, 4, 5)),
    _row("EAGLE-3, as SafeAILab publishes it", "eagle3", to="safeailab", taps=(2, 4, 5)),
    _row("EAGLE-3, `norm_before_residual`", "eagle3", norm_before_residual=True),
    _row("EAGLE-3, `norm_before_fc`", "eagle3", norm_before_fc=True),
    _row("EAGLE-3, `fc_norm`", "eagle3", fc_norm=True),
    _row("EAGLE-3, `norm_output`", "eagle3", norm_output=True),
    _row("EAGLE-3.1: the last two and `norm_before_residual`", "eagle3", **EAGLE31),
    _row("EAGLE-3, `qk_norm`", "eagle3", qk_norm=True),
    _row("EAGLE-3, two layers", "eagle3", num_hidden_layers=2),
    _row("EAGLE-3, grouped keys", "eagle3", num_key_value_heads=1),
    _row("EAGLE-3, `hidden_size` of its own", "eagle3", hidden_size=96, num_attention_heads=3),
    _row("EAGLE-3, draft vocabulary", "eagle3", drafted_tokens=200),
    _row("EAGLE-3, two taps", "eagle3", taps=(2, 6)),
    _row("EAGLE-3, four taps", "eagle3", taps=(1, 3, 5, 7)),
    _row("EAGLE-3, taps with the embedding", "eagle3", taps=(0, 4, 7)),
    _row("EAGLE-3, default taps", "eagle3", to="sglang", taps=(2, 4, 5)),
    _row("EAGLE-3, other taps", "eagle3", OTHER, to="sglang", taps=(2, 4, 6)),
    _row("block", "block", **BLOCK),
    _row("block", "block", to="sglang", **BLOCK),
    _row("block, two taps", "block", taps=(3, 6), **BLOCK),
    _row("block, two layers (mended)", "block", is_mended=True, num_hidden_layers=2, **BLOCK),
    _row("block, `sample_from_anchor`", "block", REFUSED, sample_from_anchor=True, **BLOCK),
    _row("block, `in_block: causal`", "block", REFUSED, in_block="causal", **BLOCK),
    _row("block, `anchor_feature`", "block", REFUSED, anchor_feature=True, **BLOCK),
    _row("block with a correction", "block", STOPS, markov_rank=8),
    _row("block, `markov_order: 2`", "block", REFUSED, markov_rank=8, markov_order=2),
    _row("block, `markov_head: gated`", "block", REFUSED, markov_rank=8, markov_head="gated"),
    _row("Medusa", "medusa", num_heads=3),
    _row("Medusa, two residual blocks", "medusa", num_heads=3, num_layers=2),
    _row("Medusa, `lm_head: target`", "medusa", REFUSED, lm_head="target"),
    _row("Hydra", "hydra", REFUSED),
    _row("draft LM", "draft_lm"),
    # It must be the last row, because engines after it failed. It also drafts end tokens.
    _row(
        "none: prompt lookup",
        "",
        expected=OTHER,
        speculative={"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 2},
    ),
]
