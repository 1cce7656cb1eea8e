"""What is measured: prompts, a bench, calibration and tuning."""

from typing import Annotated, Any

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt

from aerie.configs.read import Many, Place, Section, Some, ascending, distinct, key
from aerie.configs.schema.data import DataConfig, QuestionsConfig, by_name
from aerie.configs.schema.decode import BenchRow, Method, TreeConfig
from aerie.configs.schema.heads import Seed


class TaskConfig(QuestionsConfig):
    """One task. A row with the key `turns` (Spec-Bench) is already a question."""

    num_prompts: PositiveInt | None = key("null: the section's", default=None)
    seed: Seed | None = key(
        "draws the prompts from the whole set; null: takes the first ones", default=None
    )


class PromptsConfig(Section):
    """Measuring prompts: a file, tasks, or questions of held-out conversations (data.held_out)."""

    path: Place | None = key(
        "a .jsonl file of questions {question_id, category, turns}, or a text with one a line",
        default=None,
    )
    num_prompts: PositiveInt | None = key(
        "prompts of the file, or of each task; null: all", default=80
    )
    max_new_tokens: PositiveInt = key("new tokens of each turn", default=512)
    task: str | None = key("one name for all of `path`; null: the file's categories", default=None)
    tasks: Annotated[Many[Annotated[TaskConfig, by_name]], distinct] = key(
        "published sets, in place of path", default=()
    )
    turns: PositiveInt | None = key(
        "most turns of a question; null: all, but of held-out conversations the first", default=None
    )
    system_prompt: str | None = key("the system turn before each conversation", default=None)

    def __post_init__(self) -> None:
        if self.tasks and (self.path, self.task) != (None, None):
            raise ValueError(
                "prompts come from a file (path, with task) or from tasks; set one of them"
            )


class HeldOutPrompts(PromptsConfig, kw_only=True):
    """The prompts of a recipe that names none: held-out questions."""

    data: DataConfig
    part: int = key("0: the first, third, ... of them; 1: the others")


class SamplingConfig(Section):
    """How the target's tokens are drawn."""

    temperature: NonNegativeFloat = key("0: greedy", default=0.0)
    top_k: NonNegativeInt = key("0: off", default=0)
    top_p: Annotated[float, Field(gt=0, le=1)] = key("1: off", default=1.0)


CONTEXT = "context"  # the sweep that `contexts` makes


class SweepConfig(Section):
    """Rows measured once for each value of one setting (`sweeps` of summary.json)."""

    name: str = key("of the sweep in summary.json and the report")
    vary: str = key(
        "a key of a row (tree.levels, tree.nodes, tree.k, method, head, lookup.length, ...), "
        "or temperature"
    )
    values: Some[Any] = key("the values of that setting")
    rows: Some[dict[str, Any]] = key("rows like the bench's")
    sampling: Many[SamplingConfig] = key("empty: the bench's", default=())
    tasks: Many[str] = key("names; empty: all", default=())
    num_prompts: PositiveInt | None = key("the first ones of each task; null: all", default=None)


class BenchConfig(Section):
    """Runs every row on every prompt, interleaved; all rows of a prompt in one process."""

    prompts: PromptsConfig = key("what is asked", default=PromptsConfig())
    rows: Many[BenchRow] = key(
        "methods, vanilla among them, and servers; empty: vanilla, and the head's usual one with "
        "`tree`",
        default=(),
    )
    sampling: Annotated[Some[SamplingConfig], distinct] = key(
        "every row is measured with each of these", default=(SamplingConfig(),)
    )
    warmup_prompts: NonNegativeInt = key(
        "decoded before the clock starts (Spec-Bench: 3)", default=2
    )
    reference: bool = key("also answer with transformers' generate, timed", default=True)
    cycles: bool = key(
        "also record every cycle with its nodes and levels (cycles.jsonl)", default=False
    )
    by_task: bool = key(
        "summary.json has a row for each task; false: the tasks pooled", default=False
    )
    sweeps: Annotated[Many[SweepConfig], distinct] = key(
        "series of rows in which one setting varies", default=()
    )
    contexts: Annotated[Many[PositiveInt], ascending] = key(
        "lengths, in tokens of prompt and answer, that split answers for a sweep: up to each, "
        "and between neighbours",
        default=(),
    )

    def __post_init__(self) -> None:
        if self.rows and not any(row.method == "vanilla" for row in self.rows):
            raise ValueError("rows must contain the vanilla row: speedup is measured against it")

    @property
    def asks_servers(self) -> bool:
        return any(row.method == "served" for row in self.rows)


class CalibrateConfig(Section):
    """How confidence predicts acceptance on held-out prompts."""

    prompts: PromptsConfig = key("other prompts than the bench's", default=PromptsConfig())
    method: Method | None = key("null: the usual one of the recipe's head", default=None)
    tree: TreeConfig | None = key("changes to the method's tree", default=None)
    bins: PositiveInt = key("bars of the reliability diagram", default=20)
    temperature: NonNegativeFloat = key("temperature of the decoding", default=0.0)
    oracle_levels: PositiveInt | None = key(
        "also draft this deep in each cycle: the oracle draft length (SVIP: 40)", default=None
    )
    ranks: PositiveInt = key(
        "how many of a law's best tokens a rebuilt static tree tries", default=10
    )
    nodes: Annotated[int, Field(ge=2)] | None = key(
        "nodes of the rebuilt tree, with the root; null: as many as before", default=None
    )

    def __post_init__(self) -> None:
        if self.tree is not None and self.tree.calibrated is not None:
            raise ValueError(
                "calibrate measures the head's own confidence; leave tree.calibrated out"
            )


class TuneConfig(Section):
    """The search for the fastest tree of a head on this machine."""

    prompts: PromptsConfig = key(
        "tune predicts from these; default: at most 24 held-out conversations, 128 new tokens each",
        default=PromptsConfig(num_prompts=24, max_new_tokens=128),
    )
    measure: PromptsConfig | None = key(
        "other prompts, on which the choice is timed; null: it is not timed", default=None
    )
    levels: Annotated[int, Field(ge=2)] = key("the deepest tree", default=10)
    k: Annotated[int, Field(ge=2)] = key("the widest frontier", default=10)
    grid: bool = key("also time a grid of twelve trees", default=False)
    temperature: NonNegativeFloat = key(
        "of the decoding; above 0, chains and trees with best and with drawn children are "
        "decoded, but no stop rules",
        default=0.0,
    )

    def __post_init__(self) -> None:
        if self.grid and self.measure is None:
            raise ValueError("grid: true times twelve trees on the prompts of `measure`; set them")
        if self.prompts.max_new_tokens < 4:
            raise ValueError(
                "prompts.max_new_tokens: an answer needs some cycles to be timed; give at least 4"
            )
