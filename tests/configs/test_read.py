"""A recipe says every problem at once, each with its place and a suggestion."""

from dataclasses import field
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from pydantic import Discriminator

from aerie.configs.errors import UserError
from aerie.configs.read import Section, dump, load


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

    def __post_init__(self) -> None:
        if self.radius < 0:
            raise ValueError("radius must not be negative")


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
    return load(path, Run, overrides)


@pytest.mark.parametrize(
    ("text", "overrides", "expected"),
    [
        ("name: a\noptim: {learning_rate: 3e-5, more: {x: 1e-2}}\n", (), Run("a", Optim(3e-5, more={"x": 0.01}))),
        ("name: a\n", ("optim.steps=7", "extra.steps=3"), Run("a", Optim(steps=7), Optim(steps=3))),
        # an anchor's other use stays as it is
        ("name: a\noptim: &o {steps: 2}\nextra: *o\n", ("extra.steps=3",), Run("a", Optim(steps=2), Optim(steps=3))),
        ("name: a\n", ("figure.kind=square", "figure.width=2.5"), Run("a", figure=Square(width=2.5))),
        (
            "name: a\nparts: [{steps: 1}, {steps: 2}]\n",
            ("parts.1.steps=7", "parts.0={steps: 5}"),
            Run("a", parts=(Optim(steps=5), Optim(steps=7))),
        ),
    ],
)
def test_overrides_reach_their_keys_and_the_resolved_recipe_loads_back_equal(
    tmp_path: Path, text: str, overrides: tuple[str, ...], expected: Run
) -> None:
    assert read(tmp_path / "r.yaml", text, *overrides) == expected
    assert read(tmp_path / "s.yaml", dump(expected)) == expected


@pytest.mark.parametrize(
    ("text", "problems"),
    [
        (
            "name: a\noptim:\n  lerning_rate: 1\n  stpes: 2\n",
            [
                "r.yaml:3: optim.lerning_rate: unknown key; did you mean 'optim.learning_rate'?",
                "r.yaml:4: optim.stpes: unknown key; did you mean 'optim.steps'?",
            ],
        ),
        ("name: a\noptim:\n  steps: many\n", ["r.yaml:3: optim.steps: input should be a valid integer"]),
        ("name: a\noptim:\n  steps: 0\n", ["r.yaml:2: optim: steps must be at least 1"]),
        ("name: a\nname: b\n", ["r.yaml:2: name: set twice"]),
        ("name: [\n", ["r.yaml:2: not YAML"]),
        ("optim: {}\n", ["r.yaml: name: required, and not set"]),
        ("name: a\nfigure: {kind: square, widht: 2}\n", ["r.yaml:2: figure.widht: unknown key; did you mean"]),
        ("name: a\nfigure: {kind: square, radius: 2}\n", ["r.yaml:2: figure.radius: unknown key; it belongs"]),
        ("name: a\nfigure: {kind: circle, radius: -1}\n", ["r.yaml:2: figure: radius must not be negative"]),
        ("name: a\nfigure: {kind: sqare}\n", ["r.yaml:2: figure: unknown kind 'sqare'; did you mean 'square'?"]),
        ("name: a\nfigure: {width: 2}\n", ["r.yaml:2: figure: needs a key 'kind': circle, square"]),
        ("name: a\nparts: [{}, {stpes: 2}]\n", ["r.yaml:2: parts.1.stpes: unknown key; did you mean 'parts.1.steps'?"]),
    ],
)  # fmt: skip
def test_every_problem_of_a_file_has_its_line_and_a_suggestion(tmp_path: Path, text: str, problems: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        read(tmp_path / "r.yaml", text)
    lines = str(caught.value).splitlines()
    assert len(lines) == len(problems)
    for line, problem in zip(lines, problems, strict=True):
        assert line.startswith(f"{tmp_path}/{problem}")


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("optim.stps=3", "--optim.stps: unknown key; did you mean 'optim.steps'?"),
        ("optim.steps=x", "--optim.steps: input should be a valid integer"),
        ("learning_rate=1", "--learning_rate: unknown key; did you mean 'optim.learning_rate'?"),  # of another section
        ("parts.2.steps=7", "--parts.2.steps: 2 is no position in a list of 2"),
        ("parts.0.step=7", "--parts.0.step: unknown key; did you mean 'parts.0.steps'?"),
        ("parts.0.steps.x=7", "--parts.0.steps.x: steps is not a section"),
    ],
)
def test_a_wrong_override_names_the_flag(tmp_path: Path, override: str, problem: str) -> None:
    with pytest.raises(UserError) as caught:
        read(tmp_path / "r.yaml", "name: a\nparts: [{steps: 1}, {steps: 2}]\n", override)
    assert str(caught.value).startswith(problem)
