"""The model forwards of one answer's cycles, noted as they are made, to be made again bare."""

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor
from transformers.generation.streamers import BaseStreamer

from infer.cached_lm import PreallocatedCache
from infer.engine import Generation, SpeculativeDecoder
from infer.proposer import Drafting, Forwards
from model.errors import UserError
from model.layers import KeyValueBuffer

Part = Literal["target", "draft"]


@dataclass(frozen=True)
class Call:
    """One forward: a function of a model, its arguments, and where the caches among them stood."""

    part: Part
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    lengths: tuple[tuple[Any, int, int], ...]  # (cache, length, pending)

    def again(self) -> Any:
        """What the forward returns when nothing but the forward is done."""
        for cache, length, pending in self.lengths:
            cache.length = length
            if isinstance(cache, PreallocatedCache):
                cache.pending = pending
        return self.function(*self.arguments, **self.keywords)


@dataclass
class Tape(BaseStreamer):
    """The forwards of the cycles of one answer, in order.

    It begins with the second call of `put`: the engine hands out the prompt, prefills, and hands out the first token.
    """

    calls: list[Call] = field(default_factory=list)
    _put: int = 0

    def put(self, value: Tensor) -> None:
        self._put += 1

    def end(self) -> None:
        return

    def noting(self, part: Part, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, whose calls are noted."""

        @functools.wraps(function)
        def noted(*arguments: Any, **keywords: Any) -> Any:
            if self._put >= 2:
                lengths = tuple(_lengths([*arguments, *keywords.values()]))
                self.calls.append(Call(part, function, arguments, keywords, lengths))
            return function(*arguments, **keywords)

        return noted

    @torch.inference_mode()
    def replay(self, device: torch.device) -> dict[Part, float]:
        """Seconds of the target's and of the draft's forwards, made again in their order with nothing in between.

        Nothing gathers an accepted path's rows: once a branch was taken, later forwards read other numbers of the same
        shapes. A GPU is waited for where the engine waits too: between drafting and verifying.
        """
        seconds: dict[Part, float] = {"target": 0.0, "draft": 0.0}
        part, since = None, _now(device)
        for call in self.calls:
            if call.part != part:
                now = _now(device)
                if part is not None:
                    seconds[part] += now - since
                part, since = call.part, now
            call.again()
        if part is not None:
            seconds[part] += _now(device) - since
        return seconds


def taped(decoder: SpeculativeDecoder, ids: Tensor, **settings: Any) -> tuple[Tape, Generation]:
    """The forwards of an answer to ids [1, T], and the answer; UserError for a drafter that does not name its own."""
    tape = Tape()
    with _noted(tape, decoder):
        generation = decoder.generate(ids, streamer=tape, **settings)
    return tape, generation


@contextmanager
def _noted(tape: Tape, decoder: SpeculativeDecoder) -> Iterator[None]:
    target = decoder.target
    places: list[tuple[Part, Any, str]] = [("target", target.decoder, "forward"), ("target", target, "logits")]
    if isinstance(decoder.proposer, Drafting):
        drafter = decoder.proposer.drafter
        if not isinstance(drafter, Forwards):
            raise UserError(f"{type(drafter).__name__} does not say where it calls its models: it lacks `forwards`")
        places += [("draft", owner, name) for owner, name in drafter.forwards()]
    own = [(owner, name, vars(owner).get(name)) for _, owner, name in places]
    for part, owner, name in places:
        setattr(owner, name, tape.noting(part, getattr(owner, name)))
    try:
        yield
    finally:
        for owner, name, before in own:
            if before is None:  # it was a method of the class
                delattr(owner, name)
            else:
                setattr(owner, name, before)


def _lengths(values: list[Any]) -> Iterator[tuple[Any, int, int]]:
    for value in values:
        if isinstance(value, PreallocatedCache):
            yield value, value.length, value.pending
        elif isinstance(value, KeyValueBuffer):
            yield value, value.length, 0
        elif isinstance(value, list):
            yield from _lengths(value)


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
