"""Which tasks a suite asks: published evaluation sets by name, or files of questions of one's own."""

from dataclasses import dataclass

from aerie.configs.read import STRICT


@dataclass(frozen=True)
class TaskConfig:
    """One task; a file's rows and the Hub's become prompts alike (infer/published_tasks.py).

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
