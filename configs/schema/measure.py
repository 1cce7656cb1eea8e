"""What is measured: prompts and tasks, the rows and sweeps of a bench, calibration and tuning."""

from dataclasses import dataclass
from math import inf
from typing import Any

from aerie.configs.read import STRICT
from aerie.configs.schema.decode import Method, MethodConfig, TreeConfig


@dataclass(frozen=True)
class TaskConfig:
    """One task; a file's rows and the Hub's become prompts alike (infer/measure/tasks.py).

    A row with `turns` (Spec-Bench, EAGLE's eagle/data) is a question as it stands.
    """

    __pydantic_config__ = STRICT
    name: str  # a published one (mt_bench, humaneval, gsm8k, ...), or a name of your own for the questions at `path`
    path: str | None = None  # a file, a directory or a Hub data set (owner/name:subset:split); null: the published one
    revision: str | None = None  # of a Hub data set; null: the published one's pinned commit, `path` as it is now
    num_prompts: int | None = None  # null: the section's
    seed: int | None = None  # draws the prompts from the whole set; null: the first ones

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError("a task needs a name")
        if self.num_prompts is not None and self.num_prompts < 1:
            raise ValueError("num_prompts must be at least 1")


@dataclass(frozen=True)
class PromptsConfig:
    """Measuring prompts: Spec-Bench style questions {question_id, category, turns}, lines of plain text, or tasks."""

    __pydantic_config__ = STRICT
    path: str | None = None  # a .jsonl file of questions, or of lines
    num_prompts: int | None = 80  # of the file, or of each task; null: all
    max_new_tokens: int = 512  # of each turn
    task: str | None = None  # the name of all questions of `path`; null: the file's categories
    tasks: tuple[TaskConfig, ...] = ()  # in place of path
    turns: int | None = None  # of each question at most; null: all
    system_prompt: str | None = None  # before each conversation

    def __post_init__(self) -> None:
        if (self.path is None) == (not self.tasks):
            raise ValueError("prompts come from a file (path) or from tasks; set one of them")
        if self.tasks and self.task is not None:
            raise ValueError("task names the questions of path, and tasks have names of their own; leave it out")
        names = [task.name for task in self.tasks]
        if len(set(names)) < len(names):
            raise ValueError(f"tasks: {next(name for name in names if names.count(name) > 1)} stands there twice")
        if self.turns is not None and self.turns < 1:
            raise ValueError("turns must be at least 1")
        if self.max_new_tokens < 1 or (self.num_prompts is not None and self.num_prompts < 1):
            raise ValueError("num_prompts and max_new_tokens are at least 1 (num_prompts: null takes the whole file)")


@dataclass(frozen=True)
class SamplingConfig:
    """Sampling of one bench pass; temperature 0 is argmax."""

    __pydantic_config__ = STRICT
    temperature: float = 0.0
    top_k: int = 0  # 0: off
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature < inf:
            raise ValueError(f"temperature must not be negative (0 is argmax), not {self.temperature:g}")
        if self.top_k < 0:
            raise ValueError(f"top_k must not be negative (0 switches it off), not {self.top_k}")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p is a share, more than 0 and at most 1, not {self.top_p:g}")


CONTEXT = "context"  # the sweep that contexts make


@dataclass(frozen=True)
class SweepConfig:
    """Rows measured once for each value of one setting; they go to `sweeps` of summary.json, never into its rows."""

    __pydantic_config__ = STRICT
    name: str
    vary: str  # a key of a row (tree.levels, tree.nodes, tree.k, method, head, lookup.length, ...), or temperature
    values: tuple[Any, ...]
    rows: tuple[dict[str, Any], ...]  # as the bench's, each read anew with every value in its place
    sampling: tuple[SamplingConfig, ...] = ()  # empty: the bench's
    tasks: tuple[str, ...] = ()  # names; empty: all
    num_prompts: int | None = None  # the first ones of each task; null: all

    def __post_init__(self) -> None:
        if not self.values or not self.rows:
            raise ValueError("a sweep needs values and rows")
        if self.num_prompts is not None and self.num_prompts < 1:
            raise ValueError("num_prompts must be at least 1")


@dataclass(frozen=True)
class BenchConfig:
    """What is measured: every row on every prompt, interleaved, in one process."""

    __pydantic_config__ = STRICT
    prompts: PromptsConfig
    rows: tuple[MethodConfig, ...]
    sampling: tuple[SamplingConfig, ...] = (SamplingConfig(),)
    warmup_prompts: int = 2
    reference: bool = True  # also time transformers' generate and the bare forwards
    overhead: bool = False  # also time each row's model forwards alone, on a few prompts (overhead.json)
    cycles: bool = False  # also record every cycle with its nodes and levels (cycles.jsonl); speeds stay comparable
    by_task: bool = False  # summary.json has a row for each task; false: the tasks pooled (details.json has each)
    sweeps: tuple[SweepConfig, ...] = ()
    # context lengths (prompt and answer, ascending) that split the answers into a sweep of their own, as far as the
    # target goes: from the start to each, and between each and the one before (SVIP, tables 2 and 5, figures 5 and 6)
    contexts: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not any(row.method == "vanilla" for row in self.rows):
            raise ValueError("rows must contain the vanilla row: speedup is measured against it")
        if not self.sampling or len(set(self.sampling)) < len(self.sampling):
            raise ValueError("sampling is a list of one or more different settings ([{temperature: 0.0}], for one)")
        if self.warmup_prompts < 0:
            raise ValueError(f"warmup_prompts must not be negative, not {self.warmup_prompts}")
        names = [sweep.name for sweep in self.sweeps]
        if len(set(names)) < len(names) or CONTEXT in names:
            raise ValueError(f"sweeps need names that differ, and {CONTEXT} is that of contexts")
        if list(self.contexts) != sorted(set(self.contexts)) or min(self.contexts, default=1) < 1:
            raise ValueError("contexts are lengths in tokens, ascending")


@dataclass(frozen=True)
class CalibrateConfig:
    """Decoding cycles on held-out prompts that show how confidence predicts acceptance."""

    __pydantic_config__ = STRICT
    prompts: PromptsConfig
    method: Method | None = None  # null: the usual one of the recipe's head
    tree: TreeConfig | None = None  # of the method, as a row's; a recipe names what differs from its published one
    bins: int = 20
    temperature: float = 0.0  # of the decoding
    oracle_levels: int | None = None  # also draft this deep at every cycle: the oracle draft length; SVIP: 40
    ranks: int = 10  # a static tree: how many of a law's best tokens are tried where the tree is rebuilt from them
    nodes: int | None = None  # of the rebuilt tree, with the root; null: as many as the tree that it replaces

    def __post_init__(self) -> None:
        if self.tree is not None and self.tree.calibrated is not None:
            raise ValueError("calibrate measures the head's own confidence; leave tree.calibrated out")
        if self.temperature < 0 or (self.oracle_levels is not None and self.oracle_levels < 1):
            raise ValueError("calibrate needs temperature >= 0 and oracle_levels >= 1 (null: no oracle)")
        if min(self.bins, self.ranks) < 1 or (self.nodes is not None and self.nodes < 2):
            raise ValueError("calibrate: bins and ranks are at least 1, nodes (which count the root) at least 2")


@dataclass(frozen=True)
class TuneConfig:
    """Which trees are searched, on which prompts they are predicted, and on which others the choice is measured."""

    __pydantic_config__ = STRICT
    prompts: PromptsConfig  # that predict; held out from training
    measure: PromptsConfig | None = None  # that the choice is then timed on, other ones; null: it is not measured
    levels: int = 10  # the deepest tree
    k: int = 10  # the widest frontier
    grid: bool = False  # also time a grid of twelve trees

    def __post_init__(self) -> None:
        if min(self.levels, self.k) < 2:
            raise ValueError("levels and k are at least 2")
        if self.grid and self.measure is None:
            raise ValueError("grid: true times twelve trees on the prompts of `measure`; set them")
