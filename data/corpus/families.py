"""The task families of the embedded corpus, by the name that Spec-Bench style files call a category.

A family is a YAML file: `draw` says what is drawn, in this order, `turns` which texts make the conversation, and the
rest are texts and tables. Rules and slots are Jinja expressions over what was drawn before. The order of the draws
decides the bytes of the corpus: a rule that moves changes every conversation.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from itertools import accumulate
from pathlib import Path
from random import Random
from typing import Any

import yaml
from jinja2 import Environment, StrictUndefined

SMALL_NUMBERS = "zero one two three four five six seven eight nine ten eleven twelve".split()


@dataclass(frozen=True)
class Turn:
    """What the user asks and what the assistant answers."""

    question: str
    answer: str


@dataclass(frozen=True)
class Person:
    """A name and its pronouns."""

    name: str
    he: str
    his: str
    him: str


def in_words(number: int) -> str:
    """'seven' for 7; digits above twelve."""
    return SMALL_NUMBERS[number] if number < len(SMALL_NUMBERS) else str(number)


def listing(parts: list[str]) -> str:
    """'a, b and c'."""
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def clock(minutes: int) -> str:
    """'9:05' for 545 minutes after midnight."""
    return f"{minutes // 60}:{minutes % 60:02d}"


def result_of(code: str, name: str, argument: str) -> str:
    """What the function `name`, which code defines, returns for an argument; all of them are our own texts."""
    scope: dict[str, Any] = {}
    exec(f"{code}\nresult = {name}({argument})", scope)
    return repr(scope["result"])


ENVIRONMENT = Environment(  # noqa: S701 (plain text, no HTML)
    variable_start_string="{", variable_end_string="}", undefined=StrictUndefined
)
ENVIRONMENT.filters |= {"in_words": in_words, "listing": listing, "clock": clock}
FUNCTIONS = {"accumulate": accumulate, "range": range, "repr": repr, "result_of": result_of, "zip": zip}
template_of = cache(ENVIRONMENT.from_string)


@cache
def _book(name: str) -> dict[str, Any]:
    """The content of a YAML file, its word lists split."""
    content: dict[str, Any] = yaml.safe_load(Path(__file__).with_name(f"{name}.yaml").read_text(encoding="utf-8"))
    return {**content, **{key: words.split() for key, words in content.pop("words", {}).items()}}


class Scene:
    """What was drawn so far for one task, and the functions with which its rules draw more."""

    def __init__(self, family: str, generator: Random) -> None:
        self.generator = generator
        self.values: dict[str, Any] = {
            **FUNCTIONS,
            **_book("words"),
            **_book(family),
            "choice": generator.choice,
            "sample": generator.sample,
            "random": generator.random,
            "integer": lambda low, high, step=1: generator.randrange(low, high + 1, step),
            "several": lambda count, options: [generator.choice(options) for _ in range(count)],
            "people": self.people,
            "draw": self.draw,
            "text": self.text,
        }
        # One context that reads self.values: a new one for each rule would take most of the time.
        self.context = template_of("").new_context(self.values, shared=True)

    def draw(self, rule: Any) -> Any:
        """One of a list; the value of an expression; of a mapping's rules each in turn, kept by name, the last's."""
        if isinstance(rule, list):
            return self.generator.choice(rule)
        if not isinstance(rule, Mapping):
            self.text(f"{{% set result = {rule} %}}")
            return self.context.vars["result"]
        value = None
        for name, part in rule.items():
            value = self.values[name] = self.draw(part)
        return value

    def text(self, template: str) -> str:
        """The text with its slots filled."""
        return "".join(template_of(template).root_render_func(self.context))

    def people(self, count: int) -> list[Person]:
        """Distinct people, women and men mixed."""
        women, men = self.values["women"], self.values["men"]
        names = self.generator.sample([*women, *men], count)
        return [
            Person(name, "she", "her", "her") if name in women else Person(name, "he", "his", "him") for name in names
        ]


def draw_task(family: str, generator: Random) -> list[Turn]:
    """The opening turn of one task of a family, and the follow-ups that build on it."""
    scene, book = Scene(family, generator), _book(family)
    scene.draw(book["draw"])
    return [Turn(scene.text(question), scene.text(answer)) for question, answer in scene.draw(book["turns"])]


FAMILIES: dict[str, Callable[[Random], list[Turn]]] = {
    name: partial(draw_task, name)
    for name in ("arithmetic", "conversion", "code", "table", "passage", "letter", "schedule")
}
