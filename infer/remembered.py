"""A part of a decoder that computes nothing twice: its answer to calls that it has had before, in this order."""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from infer.engine import SpeculativeDecoder
from infer.proposer import Drafting
from infer.tree import Tree

LM_CALLS = ("prefill", "extend", "keep")
DRAFTER_CALLS = ("reset", "commit", "start", "step")


def remember(decoder: SpeculativeDecoder) -> SpeculativeDecoder:
    """The same decoder, whose target and draft head run once for each history of calls since the prompt.

    For many short answers to one prompt. Shapes, stop rules, verification and the loop itself run as ever.
    """
    decoder.lm = Remembered(decoder.lm, LM_CALLS)  # type: ignore[assignment]
    if isinstance(decoder.proposer, Drafting):
        decoder.proposer.drafter = Remembered(decoder.proposer.drafter, DRAFTER_CALLS)
    return decoder


class _State:
    """What an object answered last, and the states that further calls lead to."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer
        self.next: dict[Any, _State] = {}


class Remembered:
    """Stands for an object whose answers depend on the calls since the first of `calls`, and on nothing else.

    A call that continues a known history is answered from memory; for one that does not, the whole history is put to
    the object itself.
    """

    def __init__(self, inner: Any, calls: tuple[str, ...]) -> None:
        self._inner, self._calls = inner, calls
        self._start = self._state = _State(None)
        self._history: list[tuple[str, tuple[Any, ...]]] = []
        self._told = 0  # how many calls of this history the object has had

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._inner, name)
        return partial(self._call, name, attribute) if name in self._calls else attribute

    def _call(self, name: str, method: Callable[..., Any], *given: Any) -> Any:
        if name == self._calls[0]:
            self._state, self._history, self._told = self._start, [], 0
        self._history.append((name, given))
        key = (name, *map(_key, given))
        if key not in self._state.next:
            for earlier, arguments in self._history[self._told : -1]:
                getattr(self._inner, earlier)(*arguments)
            self._state.next[key] = _State(method(*given))
            self._told = len(self._history)
        self._state = self._state.next[key]
        return self._state.answer


def _key(argument: Any) -> Any:
    """Something to look an argument up by: the bytes of tensors, all of a tree that a forward depends on."""
    if isinstance(argument, Tensor):
        return (tuple(argument.shape), argument.cpu().numpy().tobytes())
    if isinstance(argument, Tree):
        return tuple(map(_key, (argument.tokens, argument.depth, argument.mask)))
    return tuple(argument) if isinstance(argument, list) else argument
