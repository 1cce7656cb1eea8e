"""Keys and values of a text: which rows are kept, and the buffers that hold them.

Each row belongs to one token. A draft's rows stand behind the kept ones until the target has
judged them:

    position   0   1  ...  length-1 |  length  length+1  ...          capacity-1
               kept rows            |  free rows
    visible    0   1  ...  length-1
    free                               length  length+1  ...
                                       `pending` rows, then those of the next forward
"""

import weakref
from itertools import product
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

# by (number of the layer, "keys" or "values"): rows [B, KV, n, head_dim]
LayerRows = dict[tuple[int, str], Tensor]
ROUNDED = 256  # rows; capacities are multiples, as a forward is compiled for each capacity


class KeptRows:
    """Which rows of a text are kept. All caches of the text share this object."""

    length: int  # on the host
    positions: Tensor  # [capacity]: 0, 1, ...
    free: Tensor  # [capacity], on the device: length, length + 1, ...
    # [W] the first W positions, at which attention looks: the kept rows, or some more if W must be
    # a fixed size
    visible: Tensor
    mask: Tensor  # [capacity], additive: 0 for kept rows, the dtype's lowest number for free ones

    def __init__(self, capacity: int, device: torch.device, dtype: torch.dtype) -> None:
        rounded = -(-capacity // ROUNDED) * ROUNDED
        self.positions = torch.arange(rounded, device=device)
        self.free = self.positions.clone()
        self.mask = torch.empty(rounded, dtype=dtype, device=device)
        self._lowest = torch.finfo(dtype).min
        # by decoder: its CUDA graphs, which read these tensors and this text's caches
        self.captured = weakref.WeakKeyDictionary[Any, dict[Any, Any]]()
        self.restart()

    def restart(self) -> None:
        """Begins a new text. The tensors stay in place, because CUDA graphs read them."""
        self.free.copy_(self.positions)
        self.mask.fill_(self._lowest)
        self.length = 0
        self.advance(0)

    def advance(self, count: int) -> None:
        """Keeps the next `count` rows. A negative count forgets the last ones."""
        length = self.length + count
        if count > 0:
            self.mask[self.length : length] = 0.0
        else:
            self.mask[length : self.length] = self._lowest
        self.length = length
        self.free.add_(count)
        self.visible = self.positions[:length]  # exact again; a captured cycle widens it


class KeyValueCache(Cache):
    """Keys and values of all layers in fixed buffers, for a head as for transformers' models.

    A forward sees the kept rows and `pending` rows behind them, and writes its own behind both.
    """

    def __init__(self, rows: LayerRows, kept: KeptRows) -> None:
        """rows: the first rows of each layer."""
        super().__init__(layers=[])
        self.kept = kept
        # How many rows this cycle has drafted so far; a drafter that writes rows adds to it.
        self.pending = 0
        self.width = 0  # how many rows the next forward sees, its own included
        kept.captured.clear()  # these graphs read the buffers of an older cache
        # Tensors of one device, dtype and shape share a buffer, so that `gather` moves them at
        # once.
        self._buffers: list[Tensor] = []  # [tensors, B, KV, capacity, head_dim]
        self._rows: LayerRows = {}  # views into the buffers: each layer's keys and values
        alike: dict[Any, LayerRows] = {}
        for name, part in rows.items():
            alike.setdefault((part.device, part.dtype, part.shape), {})[name] = part
        for group in alike.values():
            batch, heads, _, head_dim = next(iter(group.values())).shape
            sizes = (len(group), batch, heads, len(kept.positions), head_dim)
            # zeros, because attention multiplies hidden values by 0, and 0 * nan is nan
            buffer = next(iter(group.values())).new_zeros(sizes)
            self._rows |= zip(group, buffer, strict=True)
            self._buffers.append(buffer)
        self.write(rows)

    @classmethod
    def empty(cls, num_layers: int, config: Any, kept: KeptRows, like: Tensor) -> "KeyValueCache":
        """A head's empty cache with the dtype and device of `like`."""
        nothing = like.new_empty(1, config.num_key_value_heads, 0, config.head_dim)
        return cls(dict.fromkeys(product(range(num_layers), ("keys", "values")), nothing), kept)

    def write(self, rows: LayerRows) -> None:
        """Writes a new text's first rows."""
        for name, part in rows.items():
            self._rows[name][:, :, : part.shape[2]] = part

    def begin(self, count: int) -> Tensor:
        """The positions [count] at which the next forward's rows are written."""
        self.width = self.get_seq_length() + count
        self.written_at = self.kept.free[self.pending : self.pending + count]
        return self.written_at

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> Any:
        """Writes a layer's rows [B, KV, count, head_dim] at `written_at`.

        Returns the keys and values of the first `width` rows.
        """
        keys = self._rows[layer_idx, "keys"]
        values = self._rows[layer_idx, "values"]
        positions = self.written_at.to(keys.device)
        keys.index_copy_(2, positions, key_states)
        values.index_copy_(2, positions, value_states)
        return keys.narrow(2, 0, self.width), values.narrow(2, 0, self.width)

    def gather(self, offsets: Tensor) -> None:
        """Moves the free rows at these ascending offsets [n] to the first n free positions.

        Then the accepted path's rows stand in sequence, ready for `KeptRows.advance`, and no row is
        pending.
        """
        self.pending = 0
        destinations = self.kept.free[: offsets.shape[0]]
        sources = self.kept.free.index_select(0, offsets)
        for buffer in self._buffers:
            # index_select copies, so a row may move to a place from which another row is read.
            accepted = buffer.index_select(3, sources.to(buffer.device))
            buffer.index_copy_(3, destinations.to(buffer.device), accepted)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """The width that transformers gives the mask; see `KeptRows.visible`."""
        return self.kept.visible.shape[0] + self.pending
