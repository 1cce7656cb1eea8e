"""What is measured: prompts, a bench, calibration and tuning."""

from typing import Annotated, Any

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt

from aerie.configs.read import Many, Place, Section, Some
from aerie.configs.schema.data import DataConfig, QuestionsConfig, by_name
from aerie.configs.schema.decode import Method, MethodConfig, TreeConfig
from aerie.configs.schema.heads import Seed


class TaskConfig(QuestionsConfig):
    """One task. A row with the key `turns` (Spec-Bench) is already a question."""

    num_prompts: PositiveInt | None = None  # null: the section's
    seed: Seed | None = None  # draws the prompts from the whole set; null: takes the first ones


class PromptsConfig(Section):
    """Measuring prompts: a file, tasks, or by default questions of held-out conversations (data.held_out)."""

    path: Place | None = (
        None  # a .jsonl file of questions {question_id, category, turns}, or a text with one a line
    )
    num_prompts: PositiveInt | None = 80  # of the file, or of each task; null: all
    max_new_tokens: PositiveInt = 512  # of each turn
    task: str | None = None  # one name for all of `path`; null: the file's categories
    tasks: Many[Annotated[TaskConfig, by_name]] = ()  # in place of path
    turns: PositiveInt | None = (
        None  # most turns of a question; null: all, but of held-out conversations the first
    )
    system_prompt: str | None = None  # before each conversation

    def __post_init__(self) -> None:
        if self.path is not None and self.tasks:
            raise ValueError("prompts come from a file (path) or from tasks; set one of them")
        if self.tasks and self.task is not None:
            raise ValueError(
                "task names the questions of path, and tasks have names of their own; leave it out"
            )
        names = [task.name for task in self.tasks]
        if len(set(names)) < len(names):
            raise ValueError(f"tasks: {max(names, key=names.count)} stands there twice")


class HeldOutPrompts(PromptsConfig, kw_only=True):
    """For a recipe that names none."""

    data: DataConfig
    part: int  # 0: the first, third, ... of them; 1: the others


class SamplingConfig(Section):
    temperature: NonNegativeFloat = 0.0  # 0: greedy
    top_k: NonNegativeInt = 0  # 0: off
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0  # 1: off


CONTEXT = "context"  # the sweep of contexts


class SweepConfig(Section):
    """Rows measured once for each value of one setting (`sweeps` of summary.json)."""

    name: str  # of the sweep in summary.json and the report
    vary: str  # a key of a row (tree.levels, tree.nodes, tree.k, method, head, lookup.length, ...), or temperature
    values: Some[Any]  # of that setting
    rows: Some[dict[str, Any]]  # as the bench's
    sampling: Many[SamplingConfig] = ()  # empty: the bench's
    tasks: Many[str] = ()  # names; empty: all
    num_prompts: PositiveInt | None = None  # the first ones of each task; null: all


class BenchConfig(Section):
    """Runs every row on every prompt, interleaved, in one process."""

    prompts: PromptsConfig = PromptsConfig()  # what is asked
    rows: Many[
        MethodConfig
    ] = ()  # methods, vanilla among them; empty: vanilla, and the head's usual one with `tree`
    sampling: Many[SamplingConfig] = (SamplingConfig(),)  # every row is measured with each of these
    warmup_prompts: NonNegativeInt = 2  # decoded before the clock starts (Spec-Bench: 3)
    reference: bool = True  # also time transformers' generate and the bare forwards
    cycles: bool = False  # also record every cycle with its nodes and levels (cycles.jsonl)
    by_task: bool = False  # summary.json has a row for each task; false: the tasks pooled
    sweeps: Many[SweepConfig] = ()  # series of rows in which one setting varies
    # lengths, in tokens of prompt and answer, that split answers for a sweep: up to each, and between neighbours
    contexts: Many[PositiveInt] = ()

    def __post_init__(self) -> None:
        if self.rows and not any(row.method == "vanilla" for row in self.rows):
            raise ValueError("rows must contain the vanilla row: speedup is measured against it")
        if not self.sampling or len(set(self.sampling)) < len(self.sampling):
            raise ValueError(
                "sampling is a list of different settings, such as [{temperature: 0.0}]"
            )
        names = [sweep.name for sweep in self.sweeps]
        if len(set(names)) < len(names) or CONTEXT in names:
            raise ValueError(f"sweeps need names that differ, and {CONTEXT} is that of contexts")
        if list(self.contexts) != sorted(set(self.contexts)):
            raise ValueError("contexts are lengths in tokens, ascending")


class CalibrateConfig(Section):
    """How confidence predicts acceptance on held-out prompts."""

    prompts: PromptsConfig = PromptsConfig()  # other prompts than the bench's
    method: Method | None = None  # null: the usual one of the recipe's head
    tree: TreeConfig | None = None  # changes to the method's tree
    bins: PositiveInt = 20  # of the reliability diagram
    temperature: NonNegativeFloat = 0.0  # of the decoding
    oracle_levels: PositiveInt | None = (
        None  # also draft this deep in each cycle: the oracle draft length (SVIP: 40)
    )
    ranks: PositiveInt = 10  # how many of a law's best tokens a rebuilt static tree tries
    nodes: Annotated[int, Field(ge=2)] | None = (
        None  # of the rebuilt tree, with the root; null: as many as before
    )

    def __post_init__(self) -> None:
        if self.tree is not None and self.tree.calibrated is not None:
            raise ValueError(
                "calibrate measures the head's own confidence; leave tree.calibrated out"
            )


class TuneConfig(Section):
    # to predict from; default: at most 24 held-out conversations, 128 new tokens each
    prompts: PromptsConfig = PromptsConfig(num_prompts=24, max_new_tokens=128)
    measure: PromptsConfig | None = None  # other prompts, to time the choice on; null: not timed
    levels: Annotated[int, Field(ge=2)] = 10  # the deepest tree
    k: Annotated[int, Field(ge=2)] = 10  # the widest frontier
    grid: bool = False  # also time a grid of twelve trees
    # of the decoding; above 0, chains and trees with best and with drawn children are decoded, but no stop rules
    temperature: NonNegativeFloat = 0.0

    def __post_init__(self) -> None:
        if self.grid and self.measure is None:
            raise ValueError("grid: true times twelve trees on the prompts of `measure`; set them")
        if self.prompts.max_new_tokens < 4:
            raise ValueError(
                "prompts.max_new_tokens: an answer needs some cycles to be timed; give at least 4"
            )
