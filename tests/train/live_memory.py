"""What a piece of code holds in memory, counted from the tensors that it makes, its backward pass included."""

import weakref
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveMemory(TorchDispatchMode):
    """While it is entered: the most bytes that were alive at once, and the largest tensor that was made."""

    def __init__(self) -> None:
        super().__init__()
        self.alive = self.peak = self.largest = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for made in tree_leaves(out):
            if isinstance(made, Tensor):
                self._count(made)
        return out

    def _count(self, made: Tensor) -> None:
        storage = made.untyped_storage()
        place, size = storage.data_ptr(), storage.nbytes()
        if place in self._known or size == 0:
            return
        self._known.add(place)
        self.alive += size
        self.peak = max(self.peak, self.alive)
        self.largest = max(self.largest, made.numel())
        weakref.finalize(storage, self._forget, place, size)

    def _forget(self, place: int, size: int) -> None:
        self._known.discard(place)
        self.alive -= size


def run(form: Any) -> LiveMemory:
    """The memory of form(), which returns a loss, and of the loss's backward pass."""
    with LiveMemory() as found:
        form().backward()
    return found
