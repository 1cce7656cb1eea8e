"""The people, towns and small words that the task families draw from."""

from dataclasses import dataclass
from random import Random

WOMEN = (
    "Ada Alice Amara Anna Beth Carla Chloe Clara Dana Diana Elena Ella Emma Erin Esther Fatima Flora Grace Hana Hannah "
    "Helen Ida Ines Irene Iris Jane Julia Kate Laura Lena Lily Lucy Mara Maria Maya Mina Nadia Nina Nora Olga Olivia "
    "Paula Priya Rita Rosa Ruth Sara Sofia Tara Vera Yuki Zoe"
).split()
MEN = (
    "Adam Ahmed Alan Alex Anton Ben Boris Carl Chen Daniel David Diego Emil Eric Felix Finn Frank George Hassan Henry "
    "Hugo Ivan Jack Jacob James Jonas Karl Kofi Leo Liam Luca Luis Marco Mark Martin Max Milo Nils Noah Omar Oscar Otto "
    "Paul Pedro Peter Ravi Sam Simon Theo Thomas Victor Walter"
).split()
SURNAMES = (
    "Adler Baker Brandt Carter Castillo Chandra Cooper Dalton Evans Fischer Foster Garcia Grant Hansen Hughes Ito Keller "
    "Kim Larsen Lopez Mason Meyer Moreno Murphy Novak Okafor Olsen Parker Patel Price Quinn Reed Rossi Sato Shaw Silva "
    "Stone Turner Wagner Walsh Weber Young"
).split()
TOWNS = (
    "Ashford Bergen Bristol Calder Dover Elmwood Fairview Geneva Halden Ipswich Jasper Kent Linden Lisbon Milford Newport "
    "Oakdale Oslo Porto Quincy Ridgeway Salem Taunton Turin Utrecht Vernon Weston York"
).split()
WEEKDAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
MONTHS = "January February March April May June July August September October November December".split()
SMALL_NUMBERS = "zero one two three four five six seven eight nine ten eleven twelve".split()


@dataclass(frozen=True)
class Person:
    """A name and its pronouns."""

    name: str
    subject: str
    possessive: str
    object: str


def people(generator: Random, count: int) -> list[Person]:
    """Distinct people, women and men mixed."""
    chosen = generator.sample([(name, True) for name in WOMEN] + [(name, False) for name in MEN], count)
    return [Person(n, "she", "her", "her") if woman else Person(n, "he", "his", "him") for n, woman in chosen]


def multiple(generator: Random, low: int, high: int, step: int = 1) -> int:
    """A multiple of step in [low, high], both ends of which are multiples themselves."""
    return generator.randrange(low, high + 1, step)


def in_words(number: int) -> str:
    """'seven' for 7; digits above twelve."""
    return SMALL_NUMBERS[number] if number < len(SMALL_NUMBERS) else str(number)


def listing(parts: list[str]) -> str:
    """'a, b and c'."""
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def sentence(text: str) -> str:
    """The text with its first letter in upper case."""
    return text[:1].upper() + text[1:]
