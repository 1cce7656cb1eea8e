"""What is measured: prompts, a bench, calibration and tuning."""

from typing import Annotated, Any

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt

from aerie.configs.read import Many, Place, Section, Some, ascending, distinct, key
from aerie.configs.schema.data import DataConfig, QuestionsConfig, by_name
from aerie.configs.schema.decode import BenchRow, Method, TreeConfig
from aerie.configs.schema.heads import Seed


class TaskConfig(QuestionsConfig):
    """A task. A row with the key `turns` (Spec-Bench) is already a question."""

    num_prompts: PositiveInt | None = key(
        "number of its prompts; null takes the section's", default=None
    )
    seed: Seed | None = key(
        "seed to draw the prompts from the whole set; null takes the first ones", default=None
    )


class PromptsConfig(Section):
    """Measuring prompts: a file, tasks, or questions of held-out conversations (data.held_out)."""

    path: Place | None = key(
        "a .jsonl file of questions {question_id, category, turns}, or a text file with one "
        "question a line",
        default=None,
    )
    num_prompts: PositiveInt | None = key(
        "prompts of the file, or of each task; null takes all", default=80
    )
    max_new_tokens: PositiveInt = key("the most new tokens of each turn", default=512)
    task: str | None = key(
        "one name for all questions of `path`; null takes the file's categories", default=None
    )
    tasks: Annotated[Many[Annotated[TaskConfig, by_name]], distinct] = key(
        "published sets, in place of path", default=()
    )
    turns: PositiveInt | None = key(
        "the most turns of a question; null takes all, but only the first of held-out "
        "conversations",
        default=None,
    )
    system_prompt: str | None = key("the system turn before each question", default=None)

    def __post_init__(self) -> None:
        if self.tasks and (self.path, self.task) != (None, None):
            raise ValueError(
                "prompts come from a file (path, with task) or from tasks; leave one of them out"
            )


class HeldOutPrompts(PromptsConfig, kw_only=True):
    """The prompts of a recipe that names none: questions of held-out conversations."""

    data: DataConfig
    part: int = key("0 takes the first, third, ... of them, 1 the others")


class SamplingConfig(Section):
    """How to draw the target's tokens."""

    temperature: NonNegativeFloat = key("0 is greedy", default=0.0)
    top_k: NonNegativeInt = key("0 switches it off", default=0)
    top_p: Annotated[float, Field(gt=0, le=1)] = key("1 switches it off", default=1.0)


CONTEXT = "context"  # the sweep that `contexts` makes


class SweepConfig(Section):
    """Rows that are measured for each value of one setting (`sweeps` of summary.json)."""

    name: str = key("the sweep's name in summary.json and the report")
    vary: str = key(
        "the setting that varies: a key of a row (tree.levels, tree.nodes, tree.k, method, "
        "head, lookup.length, ...), or temperature"
    )
    values: Some[Any] = key("the values of that setting")
    rows: Some[dict[str, Any]] = key("rows like those of the bench")
    sampling: Many[SamplingConfig] = key(
        "the sampling settings; empty takes the bench's", default=()
    )
    tasks: Many[str] = key("names of tasks; empty takes all", default=())
    num_prompts: PositiveInt | None = key(
        "number of the first prompts of each task; null takes all", default=None
    )


class BenchConfig(Section):
    """Decodes every prompt with every row in turn; one process decodes all rows of a prompt."""

    prompts: PromptsConfig = key("the prompts to decode", default=PromptsConfig())
    rows: Many[BenchRow] = key(
        "methods, vanilla among them, and servers; empty means vanilla, and the usual method of "
        "the head with `tree`",
        default=(),
    )
    sampling: Annotated[Some[SamplingConfig], distinct] = key(
        "the sampling settings; every row is measured with each of them",
        default=(SamplingConfig(),),
    )
    warmup_prompts: NonNegativeInt = key(
        "number of prompts to decode before the clock starts (Spec-Bench: 3)", default=2
    )
    reference: bool = key(
        "whether transformers' generate answers too, against the clock", default=True
    )
    cycles: bool = key(
        "whether to record every cycle with its nodes and levels (cycles.jsonl)", default=False
    )
    by_task: bool = key(
        "whether summary.json has a row for each task; false pools the tasks", default=False
    )
    sweeps: Annotated[Many[SweepConfig], distinct] = key(
        "series of rows in which one setting varies", default=()
    )
    contexts: Annotated[Many[PositiveInt], ascending] = key(
        "lengths of prompt and answer, in tokens, at which a sweep splits answers: up to each "
        "length, and between neighbours",
        default=(),
    )

    def __post_init__(self) -> None:
        if self.rows and not any(row.method == "vanilla" for row in self.rows):
            raise ValueError(
                "rows must contain vanilla, the base of every speedup; add {method: vanilla}"
            )

    @property
    def asks_servers(self) -> bool:
        return any(row.method == "served" for row in self.rows)


class CalibrateConfig(Section):
    """Measures on held-out prompts how well confidence predicts acceptance."""

    prompts: PromptsConfig = key("prompts that the bench does not use", default=PromptsConfig())
    method: Method | None = key(
        "the method to measure; null means the usual one of the recipe's head", default=None
    )
    tree: TreeConfig | None = key("changes to the method's tree", default=None)
    bins: PositiveInt = key("number of bars in the reliability diagram", default=20)
    temperature: NonNegativeFloat = key("temperature of the decoding", default=0.0)
    oracle_levels: PositiveInt | None = key(
        "each cycle also drafts this deep, to find the oracle length (SVIP: 40)", default=None
    )
    ranks: PositiveInt = key(
        "how many of a distribution's best tokens a rebuilt static tree tries", default=10
    )
    nodes: Annotated[int, Field(ge=2)] | None = key(
        "number of nodes of the rebuilt tree, the root included; null keeps the number",
        default=None,
    )

    def __post_init__(self) -> None:
        if self.tree is not None and self.tree.calibrated is not None:
            raise ValueError(
                "calibrate measures the head's own confidence; leave tree.calibrated out"
            )


class TuneConfig(Section):
    """The search for a head's fastest tree on this machine."""

    prompts: PromptsConfig = key(
        "prompts from which tune predicts; by default, at most 24 held-out conversations with "
        "128 new tokens each",
        default=PromptsConfig(num_prompts=24, max_new_tokens=128),
    )
    measure: PromptsConfig | None = key(
        "other prompts, on which tune times its choice; null leaves the timing out", default=None
    )
    levels: Annotated[int, Field(ge=2)] = key("depth of the deepest tree", default=10)
    k: Annotated[int, Field(ge=2)] = key("width of the widest frontier", default=10)
    grid: bool = key("whether to time a grid of twelve trees too", default=False)
    temperature: NonNegativeFloat = key(
        "temperature of the decoding. Above 0, tune decodes chains and trees with best and with "
        "drawn children, but tries no stop rules",
        default=0.0,
    )

    def __post_init__(self) -> None:
        if self.grid and self.measure is None:
            raise ValueError(
                "grid: true times twelve trees on the prompts of `measure`; set measure"
            )
        if self.prompts.max_new_tokens < 4:
            raise ValueError(
                "prompts.max_new_tokens: an answer needs some cycles to be timed; set at least 4"
            )
