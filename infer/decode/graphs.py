"""How a cycle's functions are run: as they are (eager), as CUDA graphs (captured), or by torch.compile (compiled)."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from aerie.configs.errors import warn
from aerie.infer.decode.cache import TargetStep
from aerie.infer.decode.stop import Growing, last_of
from aerie.infer.decode.tree import Tree
from aerie.model.storage import first_line
from aerie.model.target import Target


def cycle_of(target: Target) -> str:
    """How its cycles are run: eager, captured or compiled."""
    own = "captured" if target.device.type == "cuda" else "eager"
    return own if target.recipe.cycle == "auto" else target.recipe.cycle


class Compiled:
    """A function of a cycle, compiled at its first call; where it cannot be, it runs as it is, and a line says so."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function, self._run = function, torch.compile(function, fullgraph=True)

    def __call__(self, *arguments: Any) -> Any:
        for argument in arguments:
            if isinstance(argument, Tensor) and len(argument) > 1:  # one form for all lengths
                torch._dynamo.maybe_mark_dynamic(argument, 0)
        try:
            return self._run(*arguments)
        except torch._dynamo.exc.TorchDynamoException as error:
            warn(f"target.cycle compiled: {self._function.__name__} runs as it is: {first_line(error)}")
            self._run = self._function
            return self._run(*arguments)


def bucket(length: int) -> int:
    """At most 64 more or a quarter more: the columns that a captured cycle looks at."""
    step = max(64, 1 << max(length.bit_length() - 3, 0))
    return -(-length // step) * step


def record(function: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
    """A function as a CUDA graph: what repeats its kernels, and its output, which they write anew."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = function()
    return graph.replay, output


def capture(decoder: Any, function: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
    """See `record`; no phase of an answer counts its time."""
    device = decoder.target.device
    before = torch.cuda.memory_reserved(device) if device.type == "cuda" else 0
    recorded = record(function)
    decoder.graph_bytes += torch.cuda.memory_reserved(device) - before if device.type == "cuda" else 0
    decoder.clock.lap(None)
    return recorded


class Captured:
    """A function of a cycle as CUDA graphs, one for arguments of each size.

    Where that cannot be, or gives other logits, its decoder goes on eagerly, and a line says so.
    """

    def __init__(self, decoder: Any, function: Callable[..., Any]) -> None:
        self._decoder, self._function = decoder, function
        self._graphs: dict[tuple[int, ...], tuple[Callable[[], None], list[Any], Any]] = {}

    def __call__(self, *arguments: Any) -> Any:
        if self._decoder.cycle == "eager":
            return self._function(*arguments)
        sizes = tuple(len(given) if isinstance(given, Tensor) else given for given in arguments)
        expected = None
        if sizes not in self._graphs:
            # once as it is, which also sets libraries up; a commit cannot be done twice
            expected = None if self._function == self._decoder.plain[2] else self._function(*arguments)
            inputs = [given.clone() if isinstance(given, Tensor) else given for given in arguments]
            try:
                replay, output = capture(self._decoder, partial(self._function, *inputs))
            except RuntimeError as error:  # too little memory is one
                return self._eagerly(arguments, first_line(error))
            self._graphs[sizes] = replay, inputs, output
        replay, inputs, output = self._graphs[sizes]
        for given, own in zip(arguments, inputs, strict=True):
            if isinstance(given, Tensor):
                own.copy_(given)
        replay()
        if isinstance(expected, TargetStep):
            apart = self._decoder.target.difference(output.logits, expected.logits)
            if apart is not None:
                return self._eagerly(arguments, f"its logits differ by {apart:.2g}")
        return output

    def _eagerly(self, arguments: tuple[Any, ...], why: str) -> Any:
        warn(f"target.cycle captured: {self._function.__name__} cannot be: {why}")
        self._decoder.cycle = "eager"
        return self._function(*arguments)


class CapturedLevels:
    """The draft of an adaptive tree: a CUDA graph of each level, and one of the tree that ends there."""

    def __init__(self, decoder: Any) -> None:
        self._decoder, self._graphs = decoder, list[Any]()

    def __call__(self, root: Tensor, max_levels: int) -> Tree:
        decoder, proposer = self._decoder, self._decoder.proposer
        if decoder.cycle == "eager":
            return proposer.propose(root, max_levels)
        if not self._graphs:
            self._root = root.clone()
            growing = proposer.propose_levels(self._root, max_levels)
            try:
                for _ in range(proposer.levels):
                    replay, (ends, finish) = capture(decoder, partial(next, growing))
                    self._graphs.append((replay, ends, *capture(decoder, finish)))
            except RuntimeError as error:
                warn(f"target.cycle captured: a level of the draft cannot be: {first_line(error)}")
                decoder.cycle = "eager"
                return proposer.propose(root, max_levels)
        self._root.copy_(root)
        return last_of(self._played(proposer.shape.stop_read == "each"))

    def _played(self, waits: bool) -> Iterator[Growing]:
        for replay, ends, replay_tree, tree in self._graphs:
            replay()
            yield bool(ends) if waits else ends, partial(played, replay_tree, tree)


def played(replay: Callable[[], None], output: Any) -> Any:
    replay()
    return output
