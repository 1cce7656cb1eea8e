"""How a cycle's functions are run: as they are (eager), as CUDA graphs (captured), or by torch.compile (compiled)."""

import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from aerie.configs.errors import warn
from aerie.infer.decode.cache import TargetStep
from aerie.infer.decode.sampling import Sampler
from aerie.infer.decode.stop import Growing, last_of
from aerie.infer.decode.tree import Tree
from aerie.model.storage import first_line
from aerie.model.target import Target


def cycle_of(target: Target) -> str:
    """How the target's cycles are run: eager, captured or compiled."""
    if target.recipe.cycle != "auto":
        return target.recipe.cycle
    # LongRoPE reads positions on the host; a graph runs on one device
    spread = len({*getattr(target.model, "hf_device_map", {}).values()}) > 1
    return (
        "captured"
        if target.device.type == "cuda" and target.rope_switch is None and not spread
        else "eager"
    )


class Compiled:
    """A function of a cycle, compiled at its first call; if that fails, it runs as it is, with a warning."""

    def __init__(self, function: Callable[..., Any]) -> None:
        # apart from other decoders' versions of the same code, of which torch keeps at most eight
        options: Any = {"fullgraph": True, "isolate_recompiles": True}
        self._function, self._run = function, torch.compile(function, **options)

    def __call__(self, *arguments: Any) -> Any:
        for argument in arguments:
            if isinstance(argument, Tensor) and len(argument) > 1:  # compiled once for all lengths
                torch._dynamo.maybe_mark_dynamic(argument, 0)
        try:
            return self._run(*arguments)
        except (
            torch._dynamo.exc.TorchDynamoException,
            torch._dynamo.exc.FailOnRecompileLimitHit,
        ) as error:
            warn(
                f"target.cycle compiled: {self._function.__name__} runs as it is: {first_line(error)}"
            )
            self._run = self._function
            return self._run(*arguments)


def bucket(length: int) -> int:
    """The columns that a captured cycle reads: length plus at most 64 or a quarter."""
    step = max(64, 1 << max(length.bit_length() - 3, 0))
    return -(-length // step) * step


def record(
    function: Callable[[], Any], device: torch.device, pool: Any, generator: torch.Generator
) -> tuple[Callable[[], None], Any]:
    """Captures a function as a CUDA graph: returns its replay (with new draws) and the output that this overwrites."""
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream(device)
    graph.register_generator_state(generator)
    with torch.cuda.device(device), torch.cuda.graph(graph, pool, stream):
        output = function()
    return graph.replay, output


class Graphs:
    """The CUDA graphs of a decoder's cycle for one width: of each function, for arguments of each size.

    If a capture fails or gives other logits, the decoder goes on eagerly, with a warning.
    """

    def __init__(self, decoder: Any, pool: Any = None) -> None:
        """pool: the memory of other graphs, of which one must still live: a pool is freed with its last graph."""
        self._decoder: Any = weakref.proxy(decoder)  # a proxy: its caches hold this
        self._device = decoder.target.device
        self.pool = pool or (
            torch.cuda.graph_pool_handle() if self._device.type == "cuda" else None
        )
        self._graphs: dict[Any, tuple[Callable[[], None], list[Any], Any]] = {}
        self._levels: list[tuple[Any, ...]] = []
        self._checked: dict[Any, int] = {}

    def _capture(self, function: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        """`record`, counting its memory."""
        decoder, on_gpu = self._decoder, self._device.type == "cuda"
        if on_gpu:
            torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved(self._device) if on_gpu else 0
        try:
            recorded = record(function, self._device, self.pool, decoder.generator)
        finally:
            decoder.graph_bytes += (
                torch.cuda.memory_reserved(self._device) - before if on_gpu else 0
            )
        return recorded

    def _eagerly(self, name: str, why: str) -> None:
        warn(f"target.cycle captured: {name} cannot be captured: {why}")
        self._decoder.cycle = "eager"

    def draft(self, root: Tensor, max_levels: int) -> Tree:
        """The same as the decoder's."""
        proposer = self._decoder.proposer
        if proposer.is_fixed:
            laws = self._decoder.laws if proposer.draws else None
            return self._run("draft", laws, self._function("draft"), root, max_levels)
        if not proposer.grows_fixed or self._decoder.cycle == "eager":
            return self._decoder.draft(root, max_levels)
        if not self._levels:
            try:
                self._levels = self._decoder.clock.exclude(self._capture_levels, root, max_levels)
            except RuntimeError as error:
                self._eagerly("a level of the draft", why_not(error))
                return self._decoder.draft(root, max_levels)
        self._root.copy_(root)
        return proposer.counted(last_of(self._played(proposer.shape.stop_read == "each")))

    def _capture_levels(self, root: Tensor, max_levels: int) -> list[tuple[Any, ...]]:
        proposer = self._decoder.proposer
        for _, finish in proposer.propose_levels(root, max_levels):
            finish()  # runs once as it is, to set libraries and tables up
        self._root, levels = root.clone(), list[tuple[Any, ...]]()
        growing = proposer.propose_levels(self._root, max_levels)
        for _ in range(proposer.levels):
            replay, (ends, finish) = self._capture(partial(next, growing))
            levels.append((replay, ends, *self._capture(finish)))
        return levels

    def _played(self, waits: bool) -> Iterator[Growing]:
        for replay, ends, replay_tree, tree in self._levels:
            replay()
            yield bool(ends) if waits else ends, partial(played, replay_tree, tree)

    def extend(self, tokens: Tensor, depth: Tensor, mask: Tensor) -> TargetStep:
        """The same as the decoder's; checks its logits the first two times: where it was captured, and elsewhere."""
        step: TargetStep = self._run("extend", None, self._function("extend"), tokens, depth, mask)
        tried = self._checked.get(len(tokens), 0)
        if self._decoder.cycle == "eager" or tried == 2:
            return step
        self._checked[len(tokens)] = tried + 1
        plain: TargetStep = self._decoder.clock.exclude(self._decoder.extend, tokens, depth, mask)
        apart = self._decoder.clock.exclude(
            self._decoder.target.difference, step.logits, plain.logits
        )
        if apart is not None:
            self._eagerly("extend", f"its logits differ by {apart:.2g}")
            return plain
        return step

    def judge(self, tree: Tree, logits: Tensor, sampler: Sampler) -> Tensor:
        """The same as the decoder's, on what graphs wrote."""
        decoder = self._decoder
        if (
            not (decoder.proposer.is_fixed or decoder.proposer.grows_fixed)
            or sampler.decoding.of_text
        ):
            return cast(Tensor, decoder.judge(tree, logits, sampler))
        key = decoder.laws, tree.tokens, logits
        return cast(Tensor, self._run("judge", key, partial(decoder.judge, tree, logits, sampler)))

    def commit(
        self, nodes: Tensor, new: Tensor, features: Tensor, last: Tensor | None = None
    ) -> None:
        self._run("commit", None, self._decoder.commit, nodes, new, features, last)

    def _function(self, name: str) -> Any:
        own = getattr(self._decoder, name)
        # a generator cannot be handed to torch.compile
        return (
            own
            if name == "draft" and self._decoder.proposer.draws
            else self._decoder.compiled.get(name, own)
        )

    def _tried(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Calls once to set libraries and tables up; takes its draws back."""
        state = self._decoder.generator.get_state()
        function(*arguments)
        self._decoder.generator.set_state(state)

    def _run(self, name: str, key: Any, function: Callable[..., Any], *arguments: Any) -> Any:
        if self._decoder.cycle == "eager":
            return function(*arguments)
        sizes = (
            name,
            key,
            *(len(given) if isinstance(given, Tensor) else given for given in arguments),
        )
        if sizes not in self._graphs:
            clock = self._decoder.clock
            if name != "commit":  # which cannot be done twice
                clock.exclude(self._tried, function, *arguments)
            inputs = [given.clone() if isinstance(given, Tensor) else given for given in arguments]
            try:
                replay, output = clock.exclude(self._capture, partial(function, *inputs))
            except RuntimeError as error:  # such as too little memory
                self._eagerly(name, why_not(error))
                return function(*arguments)
            self._graphs[sizes] = replay, inputs, output
        replay, inputs, output = self._graphs[sizes]
        for given, own in zip(arguments, inputs, strict=True):
            if isinstance(given, Tensor):
                own.copy_(given)
        replay()
        return output


def why_not(error: RuntimeError) -> str:
    return first_line(error.__context__ or error)  # what broke the capture: ending it fails, too


def played(replay: Callable[[], None], output: Any) -> Any:
    replay()
    return output
