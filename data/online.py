"""The target's states of a batch, made in the training step instead of read from a cache."""

from dataclasses import replace

import torch
from torch import Tensor

from data.batches import Batch
from model.target import Target


class OnlineFeatures:
    """Fills the features and taps that a cache would have held; what uses the batch cannot tell."""

    def __init__(self, target: Target, after_blocks: tuple[int, ...], dtype: torch.dtype | None = None) -> None:
        """dtype is that of the states (None: the target's)."""
        self.target = target
        self.after_blocks = after_blocks
        self.dtype = dtype or target.dtype

    def __call__(self, batch: Batch) -> Batch:
        """The batch with states, on its own device; one that has them already (of a process without rows) as it is."""
        if batch.features is not None:
            return batch
        ids, mask = _rows(batch)
        padded = not bool(mask.all())
        device = self.target.device
        output = self.target.features(ids.to(device), mask.long().to(device) if padded else None, self.after_blocks)
        taps = None if output.taps is None else self._states(output.taps, mask, batch)
        return replace(batch, features=self._states(output.last_hidden, mask, batch), taps=taps)

    def _states(self, states: Tensor, mask: Tensor, batch: Batch) -> Tensor:
        """[B, T, D] of the batch's own shape, zero in padding, as a cache yields them.

        A copy: autograd may not keep what inference mode has made.
        """
        states = states.to(batch.input_ids.device, self.dtype, copy=True)
        if batch.documents is not None:
            return states[mask][None]
        return states * mask[..., None]


def _rows(batch: Batch) -> tuple[Tensor, Tensor]:
    """Token ids [N, T] of the conversations, one a row, and the mask [N, T] of what is no padding."""
    longest = batch.input_ids.shape[1] if batch.documents is None else max(batch.documents)
    mask = torch.arange(longest, device=batch.input_ids.device) < batch.lengths[:, None]  # [N, T]
    if batch.documents is None:
        return batch.input_ids, mask
    ids = torch.zeros_like(mask, dtype=torch.long)
    ids[mask] = batch.input_ids[0]
    return ids, mask
