"""A recipe's problems are reported all at once, each with its place and a suggestion."""

from dataclasses import field
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from pydantic import Discriminator

from aerie.configs.errors import UserError
from aerie.configs.read import Section, dump, load_file


class Optim(Section):
    learning_rate: float = 1e-3
    steps: int = 10
    more: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError("steps must be at least 1")


class Circle(Section):
    kind: Literal["circle"] = "circle"
    radius: float = 1.0


class Square(Section):
    kind: Literal["square"] = "square"
    width: float = 1.0


class Run(Section):
    name: str
    optim: Optim = Optim()
    extra: Optim | None = None
    figure: Annotated[Circle | Square, Discriminator("kind")] = Circle()
    parts: tuple[Optim, ...] = ()


def read(path: Path, text: str, *overrides: str) -> Run:
    path.write_text(text, encoding="utf-8")
    return load_file(path, Run, overrides)


@pytest.mark.parametrize(
    ("text", "overrides", "expected"),
    [
        (
            "name: a\noptim: {learning_rate: 3e-5, more: {x: 1e-2}}\n",
            (),
            Run("a", Optim(3e-5, more={"x": 0.01})),
        ),
        ("name: a\n", ("optim.steps=7", "extra.steps=3"), Run("a", Optim(steps=7), Optim(steps=3))),
        # an override leaves other uses of the anchor alone
        (
            "name: a\noptim: &o {steps: 2}\nextra: *o\n",
            ("extra.steps=3",),
            Run("a", Optim(steps=2), Optim(steps=3)),
        ),
        (
            "name: a\n",
            ("figure.kind=square", "figure.width=2.5"),
            Run("a", figure=Square(width=2.5)),
        ),
        (
            "name: a\nparts: [{steps: 1}, {}]\n",
            ("parts.1.steps=7",),
            Run("a", parts=(Optim(steps=1), Optim(steps=7))),
        ),
    ],
)
def test_overrides_reach_their_keys_and_the_resolved_recipe_loads_back_equal(
    tmp_path: Path, text: str, overrides: tuple[str, ...], expected: Run
) -> None:
    assert read(tmp_path / "r.yaml", text, *overrides) == expected
    assert read(tmp_path / "s.yaml", dump(expected)) == expected


@pytest.mark.parametrize(
    ("text", "override", "problem"),
    [
        ("optim:\n  steps: many", "", "r.yaml:3: optim.steps: input should be a valid integer"),
        ("optim:\n  steps: 0", "", "r.yaml:2: optim: steps must be at least 1"),
        ("name: b", "", "r.yaml:2: name: set twice"),
        ("optim: [", "", "r.yaml:3: not YAML"),
        ("figure: {kind: sqare}", "", "r.yaml:2: figure: unknown 'sqare'; did you mean 'square'?"),
        (
            "parts: [{}, {stpes: 2}]",
            "",
            "r.yaml:2: parts.1.stpes: unknown key; did you mean 'parts.1.steps'?",
        ),
        ("", "parts.5.steps=1", "--parts.5.steps: there is no '5'"),
        (
            "",
            "learning_rate=1",
            "--learning_rate: unknown key; did you mean 'optim.learning_rate'?",
        ),  # another section's
        (  # every problem is said at once
            "optim:\n  lerning_rate: 1\n  stpes: 2",
            "",
            "r.yaml:3: optim.lerning_rate: unknown key; did you mean 'optim.learning_rate'?\n"
            "r.yaml:4: optim.stpes: unknown key; did you mean 'optim.steps'?",
        ),
    ],
)
def test_a_mistake_is_named_by_line_or_flag_with_a_suggestion(
    tmp_path: Path, text: str, override: str, problem: str
) -> None:
    with pytest.raises(UserError) as caught:
        read(tmp_path / "r.yaml", f"name: a\n{text}\n", *filter(None, [override]))
    assert str(caught.value).replace(f"{tmp_path}/", "").startswith(problem)
