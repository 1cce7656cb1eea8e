"""Runs a cycle's four functions: as they are (eager), by torch.compile, or as CUDA graphs.

A graph replays a function's kernels on the same tensors, and no Python runs. So a captured function
must not ask the device for a number (`tolist`, `bool`, a shape that depends on values). It must not
read a host number that changes from cycle to cycle, such as the text's length: it reads where the
text ends from tensors (`KeptRows.free`, `KeptRows.mask`). Each replay overwrites the results of the
last one. There is a set of graphs for each width, the number of cache columns that attention looks
at, rounded up (`bucket`).
"""

import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from aerie.configs.errors import warn
from aerie.infer.decode.cached_lm import CachedLM, TargetStep
from aerie.infer.decode.check import Form
from aerie.infer.decode.clock import Clock
from aerie.infer.decode.dynamic_tree import last_of
from aerie.infer.decode.roles import Grown, Proposer, Traits, TreeProposer
from aerie.infer.decode.sampling import Decoding, Sampler
from aerie.infer.decode.tree import Tree, root_only
from aerie.infer.decode.verify import Verdict, judge
from aerie.model.kv_cache import KeptRows
from aerie.model.storage import first_line
from aerie.model.target import Target


class CyclePlan(NamedTuple):
    """How one answer's cycles run draft, extend, judge and commit: eagerly, if in neither set."""

    compiled: frozenset[str] = frozenset()  # run by torch.compile
    # replayed as CUDA graphs, of the compiled function if there is one
    captured: frozenset[str] = frozenset()
    by_level: bool = False  # a draft has one graph per level, between which the host reads the rule
    draws: bool = False  # the draft draws random numbers

    @property
    def has_whole_trees(self) -> bool:
        """Trees stay deep at an answer's end: a whole captured tree is cheaper than a short one."""
        return "draft" in self.captured


def plan_cycle(mode: str, on_gpu: bool, traits: Traits, decoding: Decoding) -> CyclePlan:
    """How cycles run in this mode (see `mode_of`), for a proposer with these traits.

    |                          | captured                     | compiled, on a CPU              |
    |--------------------------|------------------------------|---------------------------------|
    | reads nothing            | draft, extend, judge, commit | draft (if none is drawn),       |
    |                          |                              | extend, commit                  |
    | reads the stop rule      | the same, one graph per      | extend                          |
    | (dynamic trees)          | level                        |                                 |
    | reads anything, a chain  | extend, commit               | extend                          |
    | (such as with a rule)    |                              |                                 |
    | reads anything, no chain | nothing: too many sizes      | extend                          |

    On a GPU, the mode compiled captures what torch.compile made of draft and extend.
    """
    reads = traits.reads
    compiled: set[str] = set()
    captured: set[str] = set()
    # --- CUDA graphs: each size of a function's arguments needs its own, so the sizes must be few
    if mode != "eager" and (mode == "captured" or on_gpu):
        if reads != "anything":
            captured = {"draft", "extend", "judge", "commit"}
        elif traits.has_few_sizes:
            captured = {"extend", "commit"}
        if decoding.of_text:  # processors of the text run on the host
            captured.discard("judge")
    # --- torch.compile, for functions that use no torch.Generator and do not read the device
    if mode == "compiled":
        compiled.add("extend")
        if reads == "nothing" and not traits.draws:
            compiled.add("draft")
        # A compiled function must run once before its capture, and a commit may run only once.
        if reads == "nothing" and not captured:
            compiled.add("commit")
    by_level = bool(captured) and reads == "stop rule"
    return CyclePlan(frozenset(compiled), frozenset(captured), by_level, traits.draws)


def mode_of(target: Target) -> str:
    """How the target's cycles run: eager, captured or compiled."""
    if target.recipe.cycle != "auto":
        return target.recipe.cycle
    # LongRoPE reads positions on the host, and a graph runs on one device.
    is_spread = len({*getattr(target.model, "hf_device_map", {}).values()}) > 1
    can_capture = target.device.type == "cuda" and target.rope_switch is None and not is_spread
    return "captured" if can_capture else "eager"


def bucket(length: int) -> int:
    """The columns that a captured cycle looks at: length, rounded up by at most 64 or a quarter."""
    # Finer steps would need more graphs, and coarser steps more columns of attention.
    step = max(64, 1 << max(length.bit_length() - 3, 0))
    return -(-length // step) * step


class Runners:
    """Chooses a runner for each cycle: the one of the answer's plan, or eager for short trees."""

    def __init__(self, eager: "EagerRunner") -> None:
        target = eager.lm.target
        self.eager = eager
        self.mode = mode_of(target)  # becomes eager when a capture fails
        self.generator = torch.Generator(target.device)  # graphs draw from this one
        self.graph_bytes = 0  # memory of the graphs captured so far
        self._compiled: dict[str, Compiled] = {}  # by function, as each is compiled once

    def plan(self, decoding: Decoding) -> CyclePlan:
        on_gpu = self.eager.lm.target.device.type == "cuda"
        return plan_cycle(self.mode, on_gpu, self.eager.proposer.traits(decoding), decoding)

    def begin(self, plan: CyclePlan, kept: KeptRows, clock: Clock, sampler: Sampler) -> None:
        """Begins an answer."""
        self._plan = plan
        self._kept = kept
        self._clock = clock
        self._sampler = sampler
        # runs whatever the plan does not capture
        self._base = self.eager
        if plan.compiled:
            for name in plan.compiled - self._compiled.keys():
                self._compiled[name] = Compiled(getattr(self.eager, name))
            functions = {name: self._compiled[name] for name in plan.compiled}
            self._base = CompiledRunner(self.eager, functions)

    def runner_for(self, levels: int) -> "EagerRunner":
        """The runner of the next cycle, whose tree may be this deep."""
        plan, kept = self._plan, self._kept
        if self.mode == "eager":
            kept.captured.pop(self, None)  # frees the graphs from before the failure
            return self.eager
        # To compile or capture a short tree at the answer's end would serve only this cycle.
        if levels < (self.eager.proposer.levels or 0):
            return self.eager
        # Graphs see a rounded-up number of columns; the mask hides columns without a kept row.
        if plan.captured:
            kept.visible = kept.positions[: bucket(kept.length)]
        if plan.compiled:  # one compiled form serves all widths
            torch._dynamo.maybe_mark_dynamic(kept.visible, 0)
        if not plan.captured:
            return self._base
        # Graphs read this text's caches, so they live as long as its rows do.
        by_width = kept.captured.setdefault(self, {})
        key = (len(kept.visible), plan.by_level)
        if key not in by_width:
            # Graphs of all widths share memory, because they never run at once.
            pool = next((graphs.pool for graphs in by_width.values()), None)
            by_width[key] = Graphs(self, pool)
        return CapturedRunner(self._base, plan, by_width[key], self._clock, self._sampler)


class EagerRunner:
    """Runs the functions as they are."""

    def __init__(self, lm: CachedLM, proposer: Proposer, form: Form) -> None:
        self.lm = lm
        self.proposer = proposer
        self.form = form

    def draft(self, root: Tensor, max_levels: int) -> Tree:
        return self.proposer.propose(root, max_levels) if max_levels else root_only(root)

    def extend(self, tokens: Tensor, depth: Tensor, mask: Tensor) -> TargetStep:
        """The target's forward over a tree's nodes [N]."""
        return self.lm.extend(tokens, depth, mask)

    def judge(self, tree: Tree, logits: Tensor, sampler: Sampler) -> Tensor:
        return judge(tree, logits, sampler)

    def commit(
        self, nodes: Tensor, new: Tensor, features: Tensor, last: Tensor | None = None
    ) -> None:
        """Keeps the rows of the accepted path, nodes [n], and tells the proposer its n new tokens.

        last [1]: the row of the last accepted node, given if refused nodes follow.
        """
        if self.form == "tree":  # a chain's rows are in place already
            self.lm.cache.gather(nodes)
        self.proposer.commit(new, features.index_select(0, nodes), last)

    def accept(self, verdict: Verdict, features: Tensor) -> None:
        """Commits what the verdict accepted."""
        count = len(verdict.path)
        self.commit(verdict.nodes[:count], verdict.new[:count], features)


class CompiledRunner(EagerRunner):
    """Runs some of the functions, by name, as torch.compile made them."""

    def __init__(self, eager: EagerRunner, compiled: "dict[str, Compiled]") -> None:
        super().__init__(eager.lm, eager.proposer, eager.form)
        for name, function in compiled.items():
            setattr(self, name, function)


class Compiled:
    """A function of a cycle, compiled at its first call.

    If torch.compile fails, a warning says why, and the function runs as it is.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        # fullgraph: a function that breaks in two would be slower than as it is.
        # isolate_recompiles: torch keeps at most eight versions of a code, over all decoders.
        options: Any = {"fullgraph": True, "isolate_recompiles": True}
        self._function = function
        self._run = torch.compile(function, **options)

    def __call__(self, *arguments: Any) -> Any:
        # Compiled once for all lengths: the numbers of nodes and of accepted tokens change.
        for argument in arguments:
            if isinstance(argument, Tensor) and len(argument) > 1:
                torch._dynamo.maybe_mark_dynamic(argument, 0)
        try:
            return self._run(*arguments)
        except (
            torch._dynamo.exc.TorchDynamoException,
            torch._dynamo.exc.FailOnRecompileLimitHit,
        ) as error:
            name = self._function.__name__
            # A user's own model may do what torch.compile cannot follow. That is slower, not wrong.
            warn(
                f"target.cycle compiled: {name} cannot be compiled: {first_line(error)}; "
                "it runs eagerly"
            )
            self._run = self._function
            return self._run(*arguments)


class CapturedRunner(EagerRunner):
    """Replays the functions that the plan captures as CUDA graphs; `base` runs the others.

    If a capture fails or gives other logits, a warning says why, and later cycles run eagerly.
    """

    def __init__(
        self,
        base: EagerRunner,
        plan: CyclePlan,
        graphs: "Graphs",
        clock: Clock,
        sampler: Sampler,
    ) -> None:
        super().__init__(base.lm, base.proposer, base.form)
        self.base = base
        self.plan = plan
        self.graphs = graphs
        self.clock = clock
        # Graphs that draw or judge are captured for these settings.
        decoding = sampler.decoding
        self.laws = (decoding.temperature, decoding.top_k, decoding.top_p, decoding.min_p)

    def draft(self, root: Tensor, max_levels: int) -> Tree:
        if "draft" not in self.plan.captured or self.has_failed:
            return self.base.draft(root, max_levels)
        if self.plan.by_level:
            return self._draft_by_level(root, max_levels)
        # The processors' settings are part of the key only where the draft applies them.
        laws = self.laws if self.plan.draws else None
        return cast(Tree, self._replay("draft", laws, self.base.draft, root, max_levels))

    def _draft_by_level(self, root: Tensor, max_levels: int) -> Tree:
        graphs, proposer = self.graphs, cast(TreeProposer, self.proposer)
        if not graphs.levels:
            try:
                self.clock.exclude(graphs.capture_levels, proposer, root, max_levels)
            except RuntimeError as error:
                self._fail("a level of the draft", why_not(error))
                return self.base.draft(root, max_levels)
        # Reading each answer saves forwards, and reading it late hides the wait for it.
        waits = proposer.shape.stop_read == "each"
        return proposer.with_forwards(last_of(graphs.replay_levels(root, waits)))

    def extend(self, tokens: Tensor, depth: Tensor, mask: Tensor) -> TargetStep:
        """Compares the first two replays of each size with plain forwards, in different cycles."""
        step: TargetStep = self._replay("extend", None, self.base.extend, tokens, depth, mask)
        num_checked = self.graphs.checked.get(len(tokens), 0)
        if self.has_failed or num_checked == 2:
            return step
        # A forward that asks the host for the text's length would replay the length of its capture:
        # the logits would be right in that cycle, and wrong in the next one.
        self.graphs.checked[len(tokens)] = num_checked + 1
        plain: TargetStep = self.clock.exclude(super().extend, tokens, depth, mask)
        difference = self.clock.exclude(self.lm.target.difference, step.logits, plain.logits)
        if difference is None:
            return step
        self._fail("extend", f"its logits differ by {difference:.2g}")
        return plain

    def judge(self, tree: Tree, logits: Tensor, sampler: Sampler) -> Tensor:
        if "judge" not in self.plan.captured or self.has_failed:
            return self.base.judge(tree, logits, sampler)
        # The graph reads the very tensors that other graphs write, so it has no inputs of its own.
        key = (self.laws, tree.tokens, logits)
        function = partial(self.base.judge, tree, logits, sampler)
        return cast(Tensor, self._replay("judge", key, function))

    def accept(self, verdict: Verdict, features: Tensor) -> None:
        """Commits all of the verdict's nodes, so that the size is fixed; `last` ends the path."""
        count = len(verdict.path)
        last = self.lm.cache.kept.positions[count - 1 : count]
        arguments = (verdict.nodes, verdict.new, features, last)
        self._replay("commit", None, self.base.commit, *arguments)

    def _replay(self, name: str, key: Any, function: Callable[..., Any], *arguments: Any) -> Any:
        if self.has_failed:
            return function(*arguments)
        # The key has the tensors' lengths: all else about them is the same in every cycle.
        sizes = [len(part) if isinstance(part, Tensor) else part for part in arguments]
        graph_key = (name, key, *sizes)
        if graph_key not in self.graphs.by_key:
            runs_twice = name != "commit"  # a commit moves rows, so it may run only once
            try:
                self.clock.exclude(self.graphs.add, graph_key, function, arguments, runs_twice)
            except RuntimeError as error:  # such as too little memory
                self._fail(name, why_not(error))
                return function(*arguments)
        return self.graphs.by_key[graph_key].replay(arguments)

    def _fail(self, name: str, why: str) -> None:
        warn(f"target.cycle captured: {name} cannot be captured: {why}; cycles run eagerly")
        self.graphs.runners.mode = "eager"

    @property
    def has_failed(self) -> bool:
        return self.graphs.runners.mode == "eager"


def record_graph(
    function: Callable[[], Any], device: torch.device, pool: Any, generator: torch.Generator
) -> tuple[Callable[[], None], Any]:
    """A function's CUDA graph: its replay, which makes new draws, and the output of each replay."""
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream(device)
    graph.register_generator_state(generator)
    with torch.cuda.device(device), torch.cuda.graph(graph, pool, stream):
        output = function()
    return graph.replay, output


class Graph(NamedTuple):
    """One captured function."""

    play: Callable[[], None]
    inputs: list[Any]  # the graph's own tensors, from which it reads its arguments
    output: Any

    def replay(self, arguments: tuple[Any, ...] = ()) -> Any:
        for argument, read_from in zip(arguments, self.inputs, strict=True):
            if isinstance(argument, Tensor):
                # The graph reads its arguments where they stood at its capture.
                read_from.copy_(argument)
        self.play()
        return self.output


class Graphs:
    """The CUDA graphs of a decoder's cycle for one width."""

    def __init__(self, runners: Runners, pool: Any = None) -> None:
        """pool: the memory of other graphs, at least one of which still lives; None: new memory."""
        self.runners: Runners = weakref.proxy(
            runners
        )  # weak: runners' `KeptRows.captured` hold this
        self.device = runners.generator.device
        self.pool = pool
        if pool is None and self.device.type == "cuda":
            self.pool = torch.cuda.graph_pool_handle()
        self.by_key: dict[Any, Graph] = {}  # by function, settings and the sizes of its arguments
        # by level: the graph that grows it, and the graph of the tree that ends with it
        self.levels: list[tuple[Graph, Graph]] = []
        self.checked: dict[int, int] = {}  # by number of nodes: how many replays were compared

    def add(
        self, key: Any, function: Callable[..., Any], arguments: tuple[Any, ...], runs_twice: bool
    ) -> None:
        """Captures a call. runs_twice: makes it once before, to set libraries and tables up."""
        if runs_twice:
            state = self.runners.generator.get_state()
            function(*arguments)
            self.runners.generator.set_state(state)  # takes the draws of that call back
        # The graph reads its arguments from tensors of its own, which each replay fills.
        inputs = [part.clone() if isinstance(part, Tensor) else part for part in arguments]
        play, output = self._capture(partial(function, *inputs))
        self.by_key[key] = Graph(play, inputs, output)

    def capture_levels(self, proposer: TreeProposer, root: Tensor, max_levels: int) -> None:
        """Captures each level's growth, and the tree that ends with it."""
        for grown in proposer.propose_levels(root, max_levels):
            grown.finish()  # runs once eagerly, to set libraries and tables up
        # Each graph captures one step of this iterator, which reads the root from its own tensor.
        own_root = root.clone()
        growing = proposer.propose_levels(own_root, max_levels)
        levels = []
        for _ in range(max_levels):
            play, grown = self._capture(partial(next, growing))
            play_tree, tree = self._capture(grown.finish)
            # The root is the only input: later levels read what earlier graphs wrote.
            levels.append((Graph(play, [own_root], grown.ends), Graph(play_tree, [], tree)))
        self.levels = levels

    def _capture(self, function: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        """Calls `record_graph`, and counts the memory that it takes."""
        if self.device.type != "cuda":
            return record_graph(function, self.device, self.pool, self.runners.generator)
        # Freed blocks would hide what the capture reserves.
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved(self.device)
        try:
            return record_graph(function, self.device, self.pool, self.runners.generator)
        finally:
            self.runners.graph_bytes += torch.cuda.memory_reserved(self.device) - before

    def replay_levels(self, root: Tensor, waits: bool) -> Iterator[Grown]:
        """Yields each level. waits: reads the stop rule's answer before it launches the next."""
        self.levels[0][0].inputs[0].copy_(root)
        for level, tree in self.levels:
            level.play()
            yield Grown(bool(level.output) if waits else level.output, tree.replay)


def why_not(error: RuntimeError) -> str:
    # A broken capture also fails to end. That error's context is what broke the capture.
    return first_line(error.__context__ or error)
