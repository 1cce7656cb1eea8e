"""A recipe says every problem at once, each with its place and a suggestion."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import pytest
from pydantic import Discriminator

from aerie.configs.errors import UserError
from aerie.configs.read import STRICT, dump, load


@dataclass(frozen=True)
class Optim:
    __pydantic_config__ = STRICT
    learning_rate: float = 1e-3
    steps: int = 10

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError("steps must be at least 1")


@dataclass(frozen=True)
class Circle:
    __pydantic_config__ = STRICT
    kind: Literal["circle"] = "circle"
    radius: float = 1.0

    def __post_init__(self) -> None:
        if self.radius < 0:
            raise ValueError("radius must not be negative")


@dataclass(frozen=True)
class Square:
    __pydantic_config__ = STRICT
    kind: Literal["square"] = "square"
    width: float = 1.0


Figure = Annotated[Circle | Square, Discriminator("kind")]


@dataclass(frozen=True)
class Drawing:
    __pydantic_config__ = STRICT
    figure: Figure = Circle()
    more: tuple[Optim, ...] = ()


@dataclass(frozen=True)
class Run:
    __pydantic_config__ = STRICT
    name: str
    optim: Optim = Optim()
    extra: Optim | None = None


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def refusal(path: Path, *overrides: str) -> list[str]:
    with pytest.raises(UserError) as caught:
        load(path, Run, list(overrides))
    return str(caught.value).splitlines()


def test_a_number_in_yaml_1_2_notation_is_a_number(tmp_path: Path) -> None:
    run = load(write(tmp_path / "r.yaml", "name: on\noptim: {learning_rate: 3e-5}\n"), Run, [])
    assert run.optim.learning_rate == 3e-5
    assert run.name == "on"  # YAML 1.1 would make it True


def test_an_override_wins_and_creates_missing_sections(tmp_path: Path) -> None:
    run = load(write(tmp_path / "r.yaml", "name: a\n"), Run, ["optim.steps=7", "extra.steps=3"])
    assert (run.optim.steps, run.extra) == (7, Optim(steps=3))


def test_an_override_does_not_reach_through_a_yaml_anchor(tmp_path: Path) -> None:
    text = "name: a\noptim: &same {steps: 2}\nextra: *same\n"
    run = load(write(tmp_path / "r.yaml", text), Run, ["extra.steps=3"])
    assert (run.optim.steps, run.extra) == (2, Optim(steps=3))


def test_every_unknown_key_is_named_with_its_line_and_a_suggestion(tmp_path: Path) -> None:
    path = write(tmp_path / "r.yaml", "name: a\noptim:\n  lerning_rate: 1\n  stpes: 2\n")
    problems = refusal(path)
    assert problems == [
        f"{path}:3: optim.lerning_rate: unknown key; did you mean 'optim.learning_rate'?",
        f"{path}:4: optim.stpes: unknown key; did you mean 'optim.steps'?",
    ]


def test_a_wrong_type_shows_the_value_and_the_line(tmp_path: Path) -> None:
    path = write(tmp_path / "r.yaml", "name: a\noptim:\n  steps: many\n")
    (problem,) = refusal(path)
    assert problem.startswith(f"{path}:3: optim.steps:") and "'many'" in problem


def test_a_value_that_the_section_refuses_has_the_sections_line(tmp_path: Path) -> None:
    path = write(tmp_path / "r.yaml", "name: a\noptim:\n  steps: 0\n")
    assert refusal(path) == [f"{path}:2: optim: steps must be at least 1"]


@pytest.mark.parametrize(
    ("text", "word"),
    [("name: a\nname: b\n", "twice"), ("- a\n", "mapping"), ("name: [\n", "not YAML"), ("optim: {}\n", "required")],
)
def test_broken_files_are_one_sentence(tmp_path: Path, text: str, word: str) -> None:
    (problem,) = refusal(write(tmp_path / "r.yaml", text))
    assert word in problem


def test_a_missing_file_is_one_sentence(tmp_path: Path) -> None:
    (problem,) = refusal(tmp_path / "none.yaml")
    assert "No such file" in problem


def test_a_wrong_override_names_the_flag(tmp_path: Path) -> None:
    path = write(tmp_path / "r.yaml", "name: a\n")
    assert "did you mean 'optim.steps'" in refusal(path, "optim.stps=3")[0]
    assert refusal(path, "optim.steps=x")[0].startswith("--optim.steps:")
    assert "did you mean 'optim'" in refusal(path, "optm.steps=3")[0]
    assert "did you mean 'optim.learning_rate'" in refusal(path, "learning_rate=1")[0]  # of another section


def test_the_resolved_recipe_loads_back_equal(tmp_path: Path) -> None:
    run = load(write(tmp_path / "r.yaml", "name: a\noptim: {learning_rate: 1e-7}\n"), Run, [])
    assert load(write(tmp_path / "s.yaml", dump(run)), Run, []) == run


def test_a_key_that_chooses_a_section_is_no_part_of_its_name(tmp_path: Path) -> None:
    path = tmp_path / "d.yaml"
    for text, problem in (
        ("figure:\n  kind: square\n  widht: 2\n", "3: figure.widht: unknown key; did you mean 'figure.width'?"),
        ("figure:\n  kind: circle\n  radius: -1\n", "1: figure: radius must not be negative"),
        ("figure: {kind: sqare}\n", "1: figure: unknown kind 'sqare'; did you mean 'square'?"),
        ("figure: {width: 2}\n", "1: figure: needs a kind: circle, square"),
        ("more: [{}, {stpes: 2}]\n", "1: more.1.stpes: unknown key; did you mean 'more.1.steps'?"),
    ):
        with pytest.raises(UserError) as caught:
            load(write(path, text), Drawing, [])
        assert str(caught.value) == f"{path}:{problem}"


def test_an_override_reaches_a_section_that_a_key_chooses(tmp_path: Path) -> None:
    path = write(tmp_path / "d.yaml", "{}\n")
    drawing = load(path, Drawing, ["figure.kind=square", "figure.width=2.5"])
    assert drawing.figure == Square(width=2.5)
    assert load(write(path, dump(drawing)), Drawing, []) == drawing
    with pytest.raises(UserError, match=r"--figure\.widht: unknown key; did you mean 'figure.width'"):
        load(path, Drawing, ["figure.kind=square", "figure.widht=2.5"])


def test_an_override_reaches_into_a_list_by_its_position(tmp_path: Path) -> None:
    path = tmp_path / "drawing.yaml"
    path.write_text("more: [{steps: 1}, {steps: 2}]\n")
    found = load(path, Drawing, ["more.1.steps=7", "more.0={steps: 5}"])
    assert [each.steps for each in found.more] == [5, 7]
    for name, message in (
        ("more.2.steps", "--more.2.steps: 2 is no position in a list of 2"),
        ("more.last.steps", "last is no position"),
        ("more.0.step", "--more.0.step: unknown key; did you mean 'more.0.steps'"),
        ("more.0.steps.x", "steps is not a section"),
    ):
        with pytest.raises(UserError, match=message):
            load(path, Drawing, [f"{name}=7"])
