"""One exchange of a generated conversation."""

from dataclasses import dataclass
from random import Random
from typing import Protocol


@dataclass(frozen=True)
class Turn:
    """What the user asks and what the assistant answers."""

    question: str
    answer: str


def merged(first: Turn, second: Turn) -> Turn:
    """Both questions in one turn, and both answers, each in a paragraph of its own."""
    gap = "\n\n" if "\n" in first.question else " "
    return Turn(f"{first.question}{gap}{second.question}", f"{first.answer}\n\n{second.answer}")


class Family(Protocol):
    """A task family: the first turn and the follow-ups that build on it, drawn afresh at each call."""

    def __call__(self, generator: Random) -> list[Turn]: ...
