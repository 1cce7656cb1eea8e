"""Which tasks a suite asks: published evaluation sets by name, or files of questions of one's own."""

from dataclasses import dataclass

from model.recipe import STRICT


@dataclass(frozen=True)
class TaskConfig:
    """One task; a file's rows and the Hub's become prompts alike (infer/published_tasks.py).

    A row with `turns` (Spec-Bench, EAGLE's eagle/data) is a question as it stands.
    """

    __pydantic_config__ = STRICT
    name: str  # a published one (mt_bench, humaneval, gsm8k, ...), or a name of your own for the questions at `path`
    path: str | None = None  # a file, a directory or a Hub data set (owner/name:subset:split); null: the published one
    revision: str | None = None  # the Hub data set's commit; null: NOT pinned, what was found is in provenance.json
    num_prompts: int | None = None  # null: the section's
    seed: int | None = None  # draws the prompts from the whole set; null: the first ones

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError("a task needs a name")
        if self.num_prompts is not None and self.num_prompts < 1:
            raise ValueError("num_prompts must be at least 1")
