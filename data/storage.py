"""How states lie on the disk: as they are, rounded to bfloat16, or a byte a value with a scale per token and state.

With `encode` and `decode` the only place that knows the stored form. A state is one of the vectors that a token has:
last_hidden, or one tap.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from data.index import Form, StorageError

VALUES: dict[Form, torch.dtype] = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn, "int8": torch.int8}
LARGEST: dict[torch.dtype, float] = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}
SCALE_BYTES = 4
TOKEN_BYTES = 8  # its id and turn, int32 each
SAMPLE_TOKENS = 256  # of a shard, on which its error is measured


@dataclass(frozen=True)
class Storage:
    """dtype is that of the states as they are used, form that on the disk (None: the same)."""

    dtype: torch.dtype
    form: Form | None = None

    @property
    def values(self) -> torch.dtype:
        """The dtype of the stored values."""
        return self.dtype if self.form is None else VALUES[self.form]

    @property
    def is_scaled(self) -> bool:
        return self.values in LARGEST

    def state_bytes(self, hidden_size: int) -> int:
        """Bytes of one state of one token."""
        return hidden_size * self.values.itemsize + (SCALE_BYTES if self.is_scaled else 0)

    @property
    def name(self) -> str:
        """'float32', 'int8 for bfloat16'."""
        used = str(self.dtype).removeprefix("torch.")
        return used if self.form is None else f"{self.form} for {used}"


@dataclass(frozen=True)
class Encoded:
    """Stored states: values [..., S * D], scales float32 [..., S] of scaled ones, and which tokens are finite."""

    values: Tensor
    scales: Tensor | None
    finite: Tensor  # [...] bool

    def __getitem__(self, place: Any) -> "Encoded":
        return Encoded(self.values[place], None if self.scales is None else self.scales[place], self.finite[place])

    def cpu(self) -> "Encoded":
        return Encoded(self.values.cpu(), None if self.scales is None else self.scales.cpu(), self.finite.cpu())


def encode(states: Tensor, num_states: int, storage: Storage) -> Encoded:
    """The states [..., S * D] as they are stored; on their own device, so that less goes over the bus."""
    if not storage.is_scaled:
        values = states.to(storage.values)
        return Encoded(values, None, _finite(values, None, storage))
    apart = states.float().unflatten(-1, (num_states, -1))  # [..., S, D]
    largest = LARGEST[storage.values]
    smallest = torch.finfo(torch.float32).tiny  # of a state of zeros
    scales = (apart.abs().amax(-1) / largest).clamp_min(smallest)  # [..., S]
    values = apart / scales[..., None]
    if storage.values == torch.int8:
        values = values.round_()
    values = values.clamp_(-largest, largest).to(storage.values)
    values = values.flatten(-2)
    return Encoded(values, scales, _finite(values, scales, storage))


def decode(values: Tensor, scales: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The states [..., S * D] of stored values and their scales [..., S], as they are used."""
    if scales is None:
        return values.to(dtype)
    apart = values.float().unflatten(-1, (scales.shape[-1], -1))  # [..., S, D]
    return (apart * scales[..., None]).to(dtype).flatten(-2)


def _finite(values: Tensor, scales: Tensor | None, storage: Storage) -> Tensor:
    """[...] bool: what is read again is finite, which a float32 scale alone does not tell of float16."""
    return torch.isfinite(decode(values, scales, storage.dtype)).all(-1)


def measured_error(
    last_hidden: Tensor, taps: Tensor | None, num_taps: int, storage: Storage, logits: Callable[[Tensor], Tensor]
) -> StorageError:
    """What storing costs on some tokens: last_hidden [T, D], taps [T, L * D]; logits: the target's final transform."""
    parts = [(last_hidden, 1), *([(taps, num_taps)] if taps is not None else [])]
    values, dimensions = [], []
    restored = last_hidden
    for states, count in parts:
        stored = encode(states, count, storage)
        read = decode(stored.values, stored.scales, storage.dtype).to(states.dtype)
        restored = read if states is last_hidden else restored
        size = states.double().unflatten(-1, (count, -1)).square()  # [T, S, D]
        error = (read.double() - states.double()).unflatten(-1, (count, -1)).square()
        values += (error.sum((0, 2)) / size.sum((0, 2)).clamp_min(1e-300)).sqrt().tolist()
        dimensions += (error.sum(0) / size.sum(0).clamp_min(1e-300)).sqrt().mean(-1).tolist()
    p, q = (torch.softmax(logits(states).float(), -1) for states in (last_hidden, restored))  # [T, V]
    return StorageError(
        num_tokens=len(last_hidden),
        values=tuple(values),
        dimensions=tuple(dimensions),
        law=float((p - q).abs().sum(-1).mean() / 2),
        choice=float((p.argmax(-1) == q.argmax(-1)).float().mean()),
    )
