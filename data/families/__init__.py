"""The task families of the embedded corpus, by the name that Spec-Bench style files call a category."""

from data.families import conversion, functions, letters, passages, schedules, stories, tables
from data.families.turn import Family

FAMILIES: dict[str, Family] = {
    "arithmetic": stories.draw,
    "conversion": conversion.draw,
    "code": functions.draw,
    "table": tables.draw,
    "passage": passages.draw,
    "letter": letters.draw,
    "schedule": schedules.draw,
}
