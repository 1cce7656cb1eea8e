"""A stock transformers LM with a preallocated cache.

A tree reaches the model as a 4-D mask and as positions: the text's length + the node's depth.
"""

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from transformers import DynamicCache

from aerie.model.kv_cache import KeptRows, KeyValueCache, LayerRows
from aerie.model.target import Target


@dataclass(frozen=True)
class TargetStep:
    """One forward of the target."""

    logits: Tensor  # [N, V], of the N nodes of a tree
    features: Tensor  # the taps [N, L*D] if the drafter reads some, else last_hidden [N, D]


class CachedLM:
    """The target with the cache of one text."""

    cache: KeyValueCache  # the cache of the text that `prefill` began

    def __init__(self, target: Target, after_blocks: tuple[int, ...] = ()) -> None:
        """after_blocks: the taps that become features; (): features are last_hidden."""
        self.target = target
        self.after_blocks = after_blocks
        self.cache = KeyValueCache({}, KeptRows(0, target.device, target.dtype))
        # Finite, because softmax would make nan of a row that sees nothing.
        lowest = torch.finfo(target.dtype).min
        self._masked = torch.tensor(lowest, dtype=target.dtype, device=target.device)
        self._visible = torch.zeros_like(self._masked)
        config = target.config
        self._window = int(getattr(config, "sliding_window", None) or 0)
        kinds = getattr(config, "layer_types", None)
        if kinds is None:  # without a list of kinds all layers slide, or none
            slides = self._window and getattr(config, "use_sliding_window", True)
            kinds = ["sliding_attention" if slides else "full_attention"]
        self._layer_kinds = sorted(set(kinds))

    def prefill(self, input_ids: Tensor, kept: KeptRows) -> TargetStep:
        """Reads a prompt [T]: gives logits [1, V] of its last token, and features of all tokens.

        The caller advances `kept`.
        """
        # The prompt goes through transformers' own cache and causal mask; its rows are then copied.
        cache = DynamicCache()
        output = self.target.decoder(
            input_ids=input_ids[None],
            past_key_values=cache,
            use_cache=True,
            output_hidden_states=[*self.after_blocks],
        )
        # by layer, as layers may differ in heads and widths
        rows: LayerRows = {}
        for number, layer in enumerate(cache.layers):
            if layer.is_initialized:  # a layer that shares an earlier layer's rows has none
                # apart, as latent attention has narrower values than keys
                rows[number, "keys"] = layer.keys
                rows[number, "values"] = layer.values
        if self.cache.kept is kept:
            self.cache.write(rows)
        else:
            self.cache = KeyValueCache(rows, kept)
        return self._step(output, last_only=True)

    def read(self, tokens: Tensor) -> TargetStep:
        """Reads the prompt's next tokens [n], as `prefill` reads its first."""
        depth = self.cache.kept.positions[: len(tokens)]
        # The mask is among the new tokens; every kept row is visible.
        mask = depth[:, None] >= depth  # [n, n] causal
        return self._step(self._forward(tokens, depth, mask), last_only=True)

    @property
    def max_levels(self) -> int:
        """The depth of the deepest tree; with LongRoPE it must end before the rotation changes."""
        # negative without a switch, and beyond it: then there is no limit
        left = (self.target.rope_switch or 0) - self.cache.kept.length - 1
        return left if left >= 0 else 2**31

    def extend(self, tokens: Tensor, depth: Tensor, mask: Tensor) -> TargetStep:
        """One forward over a tree's nodes [N]; mask [N, N]."""
        return self._step(self._forward(tokens, depth, mask))

    def append(self, tokens: Tensor, depth: Tensor, mask: Tensor) -> Tensor:
        """last_hidden [n, D] of tokens [n], whose rows later calls see until `gather`.

        depth [m + n] and mask [n, m + n] begin with the m rows appended since the last `gather`.
        """
        output = self._forward(tokens, depth, mask)
        self.cache.pending += tokens.shape[0]
        return cast(Tensor, output.last_hidden_state[0].to(self.target.device))

    def _forward(self, tokens: Tensor, depth: Tensor, mask: Tensor) -> Any:
        count = tokens.shape[0]
        # The new rows are written behind the kept and the pending ones.
        self.cache.begin(count)
        # Siblings stand in different rows, but at one position of the text.
        positions = depth + self.cache.kept.free[:1]
        return self.target.decoder(
            input_ids=tokens[None],
            attention_mask=self._mask(positions, mask),
            position_ids=positions[None, -count:],
            past_key_values=self.cache,
            use_cache=True,
            output_hidden_states=[*self.after_blocks],  # transformers keeps no others
        )

    def _step(self, output: Any, last_only: bool = False) -> TargetStep:
        device = self.target.device  # the LM head's
        last_hidden = output.last_hidden_state[0].to(device)  # [N, D]
        logits = self.target.logits(last_hidden[-1:] if last_only else last_hidden)
        if not self.after_blocks:
            return TargetStep(logits, last_hidden)
        taps = [output.hidden_states[block][0].to(device) for block in self.after_blocks]
        return TargetStep(logits, torch.cat(taps, dim=-1))

    def _mask(self, positions: Tensor, mask: Tensor) -> Tensor | dict[str, Tensor]:
        """The additive mask [1, 1, n, W], or one for each kind of layer.

        Its columns are the kept rows, all of which are visible, and the m + n rows at these
        positions, for which mask [n, m + n] decides.
        """
        kept = self.cache.kept
        width = self.cache.width
        num_new, num_drafted = mask.shape
        # the numbers of the rows behind the kept ones, which only the device knows
        rows = kept.free[:num_drafted]
        drafted = torch.where(mask, self._visible, self._masked)  # [n, m + n]
        full = kept.mask[:width].expand(num_new, -1).index_copy(1, rows, drafted)  # [n, W]
        masks = {"full_attention": full[None, None]}
        if "sliding_attention" in self._layer_kinds:
            # The cache holds the whole text: the mask alone makes the window, by text positions.
            position_of_row = kept.positions[:width].index_copy(0, rows, positions)  # [W]
            is_far = positions[-num_new:, None] - position_of_row >= self._window
            masks["sliding_attention"] = torch.where(is_far, self._masked, full)[None, None]
        if len(self._layer_kinds) == 1:
            return masks[self._layer_kinds[0]]
        # In Gemma and gpt-oss the kinds of layers alternate.
        return {kind: masks[kind] for kind in self._layer_kinds}
