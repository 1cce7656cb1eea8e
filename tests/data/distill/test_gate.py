"""The gate: flaws are found where they are and nowhere else, counted, and dropped or kept as the recipe says."""

import json
from dataclasses import replace

import pytest

from aerie.configs.schema.data import GateConfig
from aerie.data.distill.answer import Answer, Outcome
from aerie.data.distill.gate import Summary, flaws, judge
from tests.data.distill.answering import config, thinking

GATE = GateConfig()
PROSE = (
    "A lighthouse keeper counts the ships that pass each night and writes their number into a book. "
    "In winter there are few, in spring many, and once a year a great fleet comes by with all its lamps lit. "
    "He adds the columns in the morning, checks them twice, and sends a copy to the harbour by the mail boat."
)
CHINESE = "灯塔看守人每晚数经过的船只并把数字写进一本书里，冬天很少，春天很多。"


def row(*answers: Answer, question: str = "What does he count?") -> Outcome:
    return Outcome("0:1", "done", "x", None, None, (question,) * len(answers), answers)


@pytest.mark.parametrize(
    ("name", "texts"),
    [
        ("", [PROSE, "Four.", "$x^2 + 1 = 5$, so $x = 2$.", f"{PROSE}\n{'=' * 100}", f"The number is 1{'0' * 100}"]),
        ("", [PROSE + " ha" * 4, PROSE + " again" * 39, f"{PROSE} {'!' * 20}"]),  # five times and forty words
        ("", [f"{PROSE} In Chinese: 灯塔。", "Ω and Σ are Greek letters, like α and β."]),
        ("", ["I can help with that.", "He cannot help it.", PROSE + " I cannot help with that."]),
        ("empty", [" \n"]),
        ("loop", [PROSE + " and so on" * 20, (PROSE + " ") * 5, PROSE + " again" * 40]),
        ("loop", [f"{PROSE} {part * 500}" for part in ("!", "?!", "🙂", "_", "0", "ha", "—\n")]),
        ("language", [CHINESE, "Смотритель маяка каждую ночь считает корабли и записывает их число в книгу."]),
        ("refusal", ["I'm sorry, but I can't help with that request.", "I am sorry, I cannot share this."]),
        ("refusal", ["I cannot assist with this.", "As an AI language model, I have no opinion."]),
    ],
)
def test_flaws_are_found_where_they_are(name: str, texts: list[str]) -> None:
    for text in texts:
        assert flaws(row(Answer(text, "stop", 9))) == ([name] if name else []), text


def test_thinking_and_every_turn_are_looked_at() -> None:
    sound = Answer(PROSE, "stop", 9)
    assert flaws(row(sound, Answer("Th", "length", 4))) == ["cut"]
    assert flaws(row(Answer("", "stop", 9, reasoning=PROSE))) == ["empty"]
    assert flaws(row(replace(sound, reasoning="wait " * 60))) == ["loop"]
    assert flaws(row(replace(sound, reasoning=CHINESE))) == ["language"]
    assert flaws(row(Answer(CHINESE, "stop", 9), question="他数什么？")) == []
    assert flaws(row(Answer("我们再想一想" * 200, "stop", 9), question="灯塔看守人数什么？")) == ["loop"]


def judged(outcomes: list[Outcome], gate: GateConfig = GATE) -> tuple[Summary, list[str]]:
    """The summary, and the ids that are kept."""
    summary, ends = Summary(), list[str]()
    kept = [json.loads(line)["id"] for line in judge(outcomes, gate, thinking(), summary, ends)]
    assert len(ends) == len(outcomes)
    return summary, kept


def test_flaws_are_counted_the_recipe_says_what_is_dropped_and_the_page_says_it_all() -> None:
    good, problem = row(Answer(PROSE, "stop", 9)), Answer("Problem: 2 + 2?", "stop", 5)
    made = [
        good,
        row(Answer("", "length", 9)),
        row(Answer("I cannot help with that.", "stop", 9)),
        replace(good, invented=problem, turns=("2 + 2?",)),
        replace(good, invented=problem, turns=("2  + 2?",)),
        replace(good, invented=problem, turns=("2 - 2?",)),
        row(Answer("<script>alert(1)</script> no", "stop", 9)),
        Outcome("", "skipped", "x", "an empty question"),
        Outcome("", "failed", "x", "HTTP 500"),
    ]
    rows = [replace(outcome, id=f"0:{place}") for place, outcome in enumerate(made)]
    summary, kept = judged(rows)
    values = vars(summary)
    assert kept == ["0:0", "0:2", "0:3", "0:5", "0:6"]
    assert values["flaws"] == {"cut": 1, "empty": 1, "refusal": 1, "repeated": 1}
    assert [values[name] for name in ("rows", "kept", "dropped", "training_rows", "answers")] == [9, 5, 2, 5, 5]
    assert values["status"] == {"done": 7, "skipped": 1, "failed": 1}
    assert values["why"] == {"skipped: an empty question": 1, "failed: HTTP 500": 1}
    other = replace(GATE, cut="keep", empty="keep", refusal="drop", repeated="keep")
    assert judged(rows, other)[1] == ["0:0", "0:1", "0:3", "0:4", "0:5", "0:6"]
    page = summary.page(config(), "a <target>")
    assert "5 of 9 input rows are kept" in page and "failed: HTTP 500" in page and "a &lt;target&gt;" in page
