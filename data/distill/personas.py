"""Math problems for personas: our templates, and the rows of PersonaHub that fill them.

PersonaHub (Chan et al., arXiv 2406.20094) publishes personas under `input persona` (or `persona`), and in its subset
`math` a problem made for each under `synthesized text`. Its licence is CC BY-NC-SA 4.0.
"""

import re
from collections.abc import Mapping
from typing import Any

from data.shapes import UnusableRow

PERSONA_FIELDS = ("input persona", "persona", "input_persona")
PROBLEM_FIELDS = ("synthesized text", "synthesized_text", "problem")
INVENT = (
    "Invent one demanding mathematics problem that this person could meet at work or in daily life.\n\n"
    "Person: {persona}\n\n"
    "Give every number that the solution needs and ask for at most two results. "
    "Begin with 'Problem:' and do not solve it."
)
SOLVE = "{problem}\n\nSolve this step by step, check the result, and state it at the end."
MARKER = re.compile(r"^[\s*#_]*(?:math(?:ematics)?\s+)?problem[\s*_]*:[\s*_]*", re.IGNORECASE | re.MULTILINE)


def invention(row: Mapping[str, Any]) -> str:
    """The request for a problem for the row's persona; UnusableRow when it has none."""
    return INVENT.format(persona=_text(row, PERSONA_FIELDS, "persona"))


def question_of(row: Mapping[str, Any]) -> str:
    """The request to solve the problem that the row has; UnusableRow when it has none."""
    return solution_request(problem_in(_text(row, PROBLEM_FIELDS, "problem")))


def solution_request(problem: str) -> str:
    """The request to solve a problem."""
    return SOLVE.format(problem=problem)


def problem_in(text: str) -> str:
    """The problem in an answer: what follows its last 'Problem:', or all of it."""
    found = list(MARKER.finditer(text))
    return (text[found[-1].end() :] if found else text).strip()


def _text(row: Mapping[str, Any], names: tuple[str, ...], what: str) -> str:
    value = next((row[name] for name in names if isinstance(row.get(name), str) and row[name].strip()), None)
    if value is None:
        keys = ", ".join(map(str, row))
        raise UnusableRow(f"row has no {what}", f"has keys {keys or 'none'}; a {what} stands under {names[0]!r}")
    return str(value).strip()
