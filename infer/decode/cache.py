"""A stock transformers LM with a preallocated cache; a tree reaches it as a 4-D mask and positions length + depth."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import Cache

from aerie.infer.decode.tree import Tree
from aerie.model.target import Target


@dataclass(frozen=True)
class TargetStep:
    """One forward of the target."""

    logits: Tensor  # [N, V], of the N nodes of a tree
    features: Tensor  # the taps [N, L*D] where a drafter asked for some, else last_hidden [N, D]


class PreallocatedCache(Cache):
    """`length` rows are kept; the next forward sees `pending` rows after them too, and writes behind both."""

    def __init__(self, prefilled: DynamicCache, capacity: int) -> None:
        super().__init__(layers=[])
        self.length, self.pending = prefilled.get_seq_length(), 0
        # tensors of one device, dtype and shape share one, so that `keep` gathers them all at once
        self._groups: list[Tensor] = []  # [tensors, 1, KV, capacity, head_dim]
        self._rows: dict[tuple[int, str], Tensor] = {}  # views: each layer's keys and values
        alike: dict[Any, dict[tuple[int, str], Tensor]] = {}
        for index, layer in enumerate(prefilled.layers):
            for name in ("keys", "values") if layer.is_initialized else ():  # not where layers share an earlier one's
                rows = getattr(layer, name)  # MLA's values are narrower than its keys
                alike.setdefault((rows.device, rows.dtype, rows.shape), {})[index, name] = rows
        for group in alike.values():
            first = next(iter(group.values()))
            store = first.new_empty(len(group), *first.shape[:2], capacity, first.shape[-1])
            for view, (place, rows) in zip(store, group.items(), strict=True):
                view[:, :, : self.length] = rows
                self._rows[place] = view
            self._groups.append(store)

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any) -> Any:
        keys, values = self._rows[layer_idx, "keys"], self._rows[layer_idx, "values"]
        start, count = self.length + self.pending, key_states.shape[2]
        keys.narrow(2, start, count).copy_(key_states)
        values.narrow(2, start, count).copy_(value_states)
        return keys.narrow(2, 0, start + count), values.narrow(2, 0, start + count)

    def keep(self, path: list[int]) -> None:
        """Keeps the rows at these offsets (ascending) after `length` and forgets the others behind it."""
        count = len(path)
        # a chain's rows stand where they belong already
        if path and path[-1] != count - 1:
            for store in self._groups:
                index = torch.tensor(path, device=store.device) + self.length
                store.narrow(3, self.length, count).copy_(store.index_select(3, index))
        self.length += count
        self.pending = 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.length + self.pending


class CachedLM:
    cache: PreallocatedCache  # of the text that `prefill` began

    def __init__(self, target: Target, after_blocks: tuple[int, ...] = ()) -> None:
        self.target, self.after_blocks = target, after_blocks
        config = target.config
        self._window = int(getattr(config, "sliding_window", None) or 0)
        slides = self._window and getattr(config, "use_sliding_window", True)
        # without a list of kinds all layers slide, or none
        kinds = getattr(config, "layer_types", None) or ["sliding_attention" if slides else "full_attention"]
        self._layer_kinds = sorted(set(kinds))

    def prefill(self, input_ids: Tensor, capacity: int) -> TargetStep:
        """Of a prompt [T]: logits of its last token [1, V], features of all; capacity in rows."""
        cache, taps = DynamicCache(), [*self.after_blocks]
        out = self.target.decoder(
            input_ids=input_ids[None], past_key_values=cache, use_cache=True, output_hidden_states=taps
        )
        # the prompt goes through transformers' own cache and causal mask; its rows are then copied once
        self.cache = PreallocatedCache(cache, capacity)
        return self._step(out, last_only=True)

    @property
    def max_levels(self) -> int:
        """Of a tree: with LongRoPE no node may turn the rows that are kept."""
        left = (self.target.rope_switch or 0) - self.cache.length - 1
        return left if left >= 0 else 2**31

    def extend(self, tree: Tree) -> TargetStep:
        return self._step(self._forward(tree.tokens, tree.depth, tree.mask))

    def append(self, tokens: Tensor, depth: Tensor, mask: Tensor) -> Tensor:
        """last_hidden [n, D] of tokens [n], which later calls see until `keep`; depth [m + n], mask [n, m + n].

        m: the rows appended since the last `keep`.
        """
        out = self._forward(tokens, depth, mask)
        self.cache.pending += tokens.shape[0]
        last_hidden: Tensor = out.last_hidden_state[0].to(self.target.device)
        return last_hidden

    def keep(self, path: list[int]) -> None:
        self.cache.keep(path)

    def _forward(self, tokens: Tensor, depth: Tensor, mask: Tensor) -> Any:
        positions = depth[-tokens.shape[0] :] + self.cache.length
        return self.target.decoder(
            input_ids=tokens[None],
            attention_mask=self._mask(depth, mask),
            position_ids=positions[None],
            past_key_values=self.cache,
            use_cache=True,
            output_hidden_states=[*self.after_blocks],  # no others are kept
        )

    def _step(self, out: Any, last_only: bool = False) -> TargetStep:
        device = self.target.device  # the LM head's
        last_hidden = features = out.last_hidden_state[0].to(device)  # [N, D]
        if self.after_blocks:
            features = torch.cat([out.hidden_states[k][0].to(device) for k in self.after_blocks], dim=-1)
        return TargetStep(self.target.logits(last_hidden[-1:] if last_only else last_hidden), features)

    def _mask(self, depth: Tensor, mask: Tensor) -> Tensor | dict[str, Tensor]:
        # additive [1, 1, n, length + m + n], or one per kind of layer
        count, length, lowest = mask.shape[0], self.cache.length, torch.finfo(self.target.dtype).min
        full = torch.zeros(count, length + mask.shape[1], dtype=self.target.dtype, device=mask.device)
        full[:, length:].masked_fill_(~mask, lowest)
        masks = {"full_attention": full[None, None]}
        # the cache is full-length, so that a sliding window is a matter of positions
        if "sliding_attention" in self._layer_kinds:
            positions = torch.cat([torch.arange(length, device=mask.device), depth + length])
            far = positions[-count:, None] - positions[None] >= self._window
            masks["sliding_attention"] = full.masked_fill(far, lowest)[None, None]
        kinds = self._layer_kinds
        return {kind: masks[kind] for kind in kinds} if len(kinds) > 1 else masks[kinds[0]]
