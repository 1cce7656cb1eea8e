"""The task families of the embedded corpus, by the name that Spec-Bench style files call a category."""

from aerie.data.corpus import conversion, families, functions, passages, stories
from aerie.data.corpus.families import Family

FAMILIES: dict[str, Family] = {
    "arithmetic": stories.draw,
    "conversion": conversion.draw,
    "code": functions.draw,
    "table": families.draw_tables,
    "passage": passages.draw,
    "letter": families.draw,
    "schedule": families.draw_schedules,
}
