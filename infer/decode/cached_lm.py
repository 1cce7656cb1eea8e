"""A stock transformers LM with a preallocated cache; a tree reaches it as a 4-D mask and positions length + depth."""

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from transformers import DynamicCache

from aerie.model.kv_cache import KeptRows, KeyValueCache
from aerie.model.target import Target


@dataclass(frozen=True)
class TargetStep:
    """One forward of the target."""

    logits: Tensor  # [N, V], of the N nodes of a tree
    features: Tensor  # the taps [N, L*D] where a drafter asked for some, else last_hidden [N, D]


class CachedLM:
    cache: KeyValueCache  # of the text that `prefill` began

    def __init__(self, target: Target, after_blocks: tuple[int, ...] = ()) -> None:
        self.cache = KeyValueCache({}, KeptRows(0, target.device, target.dtype))
        self.target, self.after_blocks = target, after_blocks
        config, lowest = target.config, torch.finfo(target.dtype).min
        self._masked = torch.tensor(lowest, dtype=target.dtype, device=target.device)
        self._visible = torch.zeros_like(self._masked)
        self._window = int(getattr(config, "sliding_window", None) or 0)
        slides = self._window and getattr(config, "use_sliding_window", True)
        # without a list of kinds all layers slide, or none
        kinds = getattr(config, "layer_types", None) or [
            "sliding_attention" if slides else "full_attention"
        ]
        self._layer_kinds = sorted(set(kinds))

    def prefill(self, input_ids: Tensor, kept: KeptRows) -> TargetStep:
        """Reads a prompt [T]: logits [1, V] of its last token, features of all; the caller advances `kept`."""
        cache, taps = DynamicCache(), [*self.after_blocks]
        out = self.target.decoder(
            input_ids=input_ids[None],
            past_key_values=cache,
            use_cache=True,
            output_hidden_states=taps,
        )
        # the prompt goes through transformers' own cache and causal mask; its rows are then copied once
        rows = {  # a layer that shares an earlier layer's rows has none; MLA's values are narrower than its keys
            (number, name): getattr(layer, name)
            for number, layer in enumerate(cache.layers)
            for name in (("keys", "values") if layer.is_initialized else ())
        }
        if self.cache.kept is kept:
            self.cache.write(rows)
        else:
            self.cache = KeyValueCache(rows, kept)
        return self._step(out, last_only=True)

    def read(self, tokens: Tensor) -> TargetStep:
        """As `prefill`, for the prompt's next tokens [n]."""
        depth = self.cache.kept.positions[: len(tokens)]
        return self._step(self._forward(tokens, depth, depth[:, None] >= depth), last_only=True)

    @property
    def max_levels(self) -> int:
        """The deepest tree: with LongRoPE it may not reach where kept rows must be rotated anew."""
        left = (self.target.rope_switch or 0) - self.cache.kept.length - 1
        return left if left >= 0 else 2**31

    def extend(self, tokens: Tensor, depth: Tensor, mask: Tensor) -> TargetStep:
        """One forward of a tree's nodes [N]; mask [N, N]."""
        return self._step(self._forward(tokens, depth, mask))

    def append(self, tokens: Tensor, depth: Tensor, mask: Tensor) -> Tensor:
        """last_hidden [n, D] of tokens [n], which later calls see until `gather`; depth [m + n], mask [n, m + n].

        m: the rows appended since the last `gather`.
        """
        out = self._forward(tokens, depth, mask)
        self.cache.pending += tokens.shape[0]
        return cast(Tensor, out.last_hidden_state[0].to(self.target.device))

    def _forward(self, tokens: Tensor, depth: Tensor, mask: Tensor) -> Any:
        self.cache.begin(tokens.shape[0])
        positions = depth + self.cache.kept.free[:1]
        return self.target.decoder(
            input_ids=tokens[None],
            attention_mask=self._mask(positions, mask),
            position_ids=positions[None, -tokens.shape[0] :],
            past_key_values=self.cache,
            use_cache=True,
            output_hidden_states=[*self.after_blocks],  # no others are kept
        )

    def _step(self, out: Any, last_only: bool = False) -> TargetStep:
        device = self.target.device  # the LM head's
        last_hidden = features = out.last_hidden_state[0].to(device)  # [N, D]
        if self.after_blocks:
            features = torch.cat(
                [out.hidden_states[k][0].to(device) for k in self.after_blocks], dim=-1
            )
        return TargetStep(
            self.target.logits(last_hidden[-1:] if last_only else last_hidden), features
        )

    def _mask(self, positions: Tensor, mask: Tensor) -> Tensor | dict[str, Tensor]:
        # additive [1, 1, n, W], or one per kind of layer: the kept rows, and behind them m + n rows at these positions
        kept, (count, new), width = self.cache.kept, mask.shape, self.cache.width
        places, own = kept.free[:new], torch.where(mask, self._visible, self._masked)
        full = kept.mask[:width].expand(count, -1).index_copy(1, places, own)
        masks = {"full_attention": full[None, None]}
        # the cache is full-length, so the mask alone makes the sliding window, by positions
        if "sliding_attention" in self._layer_kinds:
            far = (
                positions[-count:, None] - kept.positions[:width].index_copy(0, places, positions)
                >= self._window
            )
            masks["sliding_attention"] = torch.where(far, self._masked, full)[None, None]
        kinds = self._layer_kinds
        return {kind: masks[kind] for kind in kinds} if len(kinds) > 1 else masks[kinds[0]]
