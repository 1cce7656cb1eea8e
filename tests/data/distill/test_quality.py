"""The gate: flaws are found where they are and nowhere else, counted, and dropped or kept as the recipe says."""

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from aerie.configs.errors import UserError
from aerie.configs.schema.data import Action, GateConfig
from aerie.data.distill.answer import Answer
from aerie.data.distill.gate import flaws
from aerie.data.distill.journal import Journal, Outcome
from aerie.data.distill.prompts import Prompt
from aerie.data.distill.run import Job, histogram, merge, render
from aerie.data.progress import Share
from tests.data.distill.answering import config, thinking

GATE = GateConfig()
PROSE = (
    "A lighthouse keeper counts the ships that pass each night and writes their number into a book. "
    "In winter there are few, in spring many, and once a year a great fleet comes by with all its lamps lit. "
    "He adds the columns in the morning, checks them twice, and sends a copy to the harbour by the mail boat."
)


def row(*answers: Answer, questions: tuple[str, ...] = ("What does he count?", "And then?")) -> Outcome:
    return Outcome("0:1", "done", "x", None, None, questions[: len(answers)], answers)


def said(text: str, finish: str = "stop", question: str = "What does he count?") -> list[str]:
    return flaws(row(Answer(text, finish, 9), questions=(question,)), GATE)


def test_a_sound_answer_has_no_flaw() -> None:
    assert said(PROSE) == said("Four.") == said("$x^2 + 1 = 5$, so $x = 2$.") == []
    assert flaws(row(Answer(PROSE, "stop", 9), Answer("Then he sleeps.", "stop", 4)), GATE) == []


def test_cut_and_empty_answers() -> None:
    assert said(PROSE, "length") == ["cut"] and said(" \n") == ["empty"]
    assert flaws(row(Answer("", "stop", 9, reasoning=PROSE)), GATE) == ["empty"]
    assert flaws(row(Answer(PROSE, "stop", 9), Answer("Th", "length", 4)), GATE) == ["cut"]


def test_loops_at_the_end_and_answers_that_say_the_same_all_over() -> None:
    assert said(PROSE + " and so on" * 20) == ["loop"]
    assert said((PROSE + " ") * 5) == ["loop"]
    assert said(PROSE + " ha" * 4) == []  # five times and forty words are asked for
    assert said(PROSE + " again" * 39) == [] and said(PROSE + " again" * 40) == ["loop"]
    assert flaws(row(Answer(PROSE, "stop", 9, reasoning="wait " * 60)), GATE) == ["loop"]


@pytest.mark.parametrize("part", ["!", "! ", "?!", "🙂", "_", "0", "ha", "—\n"])
def test_symbols_and_letters_without_end_are_loops(part: str) -> None:
    assert said(f"{PROSE} {part * 500}") == said(f"{PROSE} {part * 500} \n") == ["loop"]
    assert said(f"{PROSE} {part * 20}") == said(f"{PROSE} {part * 20} {PROSE[:100]}") == []


def test_loops_without_blanks_are_found() -> None:
    question = "灯塔看守人数什么？"
    assert said("我们再想一想" * 200, question=question) == ["loop"]
    assert said("灯塔看守人每晚数经过的船只并把数字写进一本书里，冬天很少，春天很多。", question=question) == []
    assert said(f"{PROSE}\n{'=' * 100}") == said(f"The number is 1{'0' * 100}") == []


def test_answers_in_another_script_than_the_question() -> None:
    chinese = "灯塔看守人每晚数经过的船只并把数字写进一本书里，冬天很少，春天很多。"
    russian = "Смотритель маяка каждую ночь считает корабли и записывает их число в книгу."
    assert said(chinese) == said(russian) == ["language"]
    assert said(chinese, question="他数什么？") == []
    assert flaws(row(Answer(PROSE, "stop", 9, reasoning=chinese)), GATE) == ["language"]
    assert flaws(row(Answer(PROSE * 9, "stop", 9, reasoning=chinese)), replace(GATE, loop="keep"))[-1] == "language"
    assert flaws(row(Answer(PROSE, "stop", 9, reasoning=PROSE)), GATE) == []
    assert said(f"{PROSE} In Chinese: 灯塔。") == [] and said("Ω and Σ are Greek letters, like α and β.") == []


@pytest.mark.parametrize(
    "text",
    [
        "I'm sorry, but I can't help with that request.",
        "I am sorry, I cannot share this.",
        "I cannot assist with this.",
        "As an AI language model, I have no opinion.",
    ],
)
def test_refusals(text: str) -> None:
    assert said(text) == ["refusal"]


@pytest.mark.parametrize("text", ["I can help with that.", "He cannot help it.", PROSE + " I cannot help with that."])
def test_answers_that_are_no_refusals(text: str) -> None:
    assert said(text) == []


def merged(place: Path, outcomes: list[Outcome], gate: GateConfig = GATE) -> tuple[dict[str, object], list[str], str]:
    """summary, the ids that are kept, the page."""
    prompts = [Prompt(outcome.id, "x", ("a",)) for outcome in outcomes]
    place.mkdir(exist_ok=True)
    with Journal(place, Share(), {}) as journal:
        for outcome in outcomes:
            journal.append(outcome)
    summary = merge(place, prompts, {}, gate, thinking())
    page = render(summary, config(gate=gate), "a <target>", thinking().tokenizer)
    kept = [line.split('"')[3] for line in (place / "conversations.jsonl").read_text().splitlines()]
    return summary.as_dict(), kept, page


def outcomes() -> list[Outcome]:
    good, problem = row(Answer(PROSE, "stop", 9)), Answer("Problem: 2 + 2?", "stop", 5)
    made = [
        good,
        row(Answer("", "length", 9)),
        row(Answer("I cannot help with that.", "stop", 9)),
        replace(good, invented=problem, turns=("2 + 2?",)),
        replace(good, invented=problem, turns=("2  + 2?",)),
        Outcome("", "skipped", "x", "an empty question"),
        Outcome("", "failed", "x", "HTTP 500, 6 times"),
    ]
    return [replace(outcome, id=f"0:{place}") for place, outcome in enumerate(made)]


def test_flaws_are_counted_and_the_recipe_says_what_is_dropped(tmp_path: Path) -> None:
    summary, kept, _ = merged(tmp_path / "a", outcomes())
    assert kept == ["0:0", "0:2", "0:3"]
    assert summary["flaws"] == {"cut": 1, "empty": 1, "refusal": 1, "repeated": 1}
    assert (summary["rows"], summary["kept"], summary["dropped"]) == (7, 3, 2)
    assert summary["status"] == {"done": 5, "skipped": 1, "failed": 1}
    assert summary["why"] == {"skipped: an empty question": 1, "failed: HTTP 500, 6 times": 1}
    other = replace(GATE, cut="keep", empty="keep", refusal="drop", repeated="keep")
    assert merged(tmp_path / "b", outcomes(), other)[1] == ["0:0", "0:1", "0:3", "0:4"]


def test_invented_problems_that_differ_in_a_sign_are_no_repeats(tmp_path: Path) -> None:
    first, second = (replace(outcomes()[3], id=str(n), turns=(f"2 {sign} 2?",)) for n, sign in enumerate("+-"))
    summary, kept, _ = merged(tmp_path, [first, second])
    assert kept == ["0", "1"] and summary["flaws"] == {}


def test_the_page_says_it_all_and_escapes_what_it_was_told(tmp_path: Path) -> None:
    hostile = [*outcomes(), replace(row(Answer("<script>alert(1)</script> no", "stop", 9)), id="0:9")]
    _, _, page = merged(tmp_path, hostile)
    assert "4 of 8 input rows are kept" in page and "failed: HTTP 500, 6 times" in page
    assert "a &lt;target&gt;" in page and "<script" not in page and "http://" not in page
    for flaw in ("cut", "empty", "loop", "language", "refusal", "repeated"):
        assert f"<tr><td>{flaw}</td>" in page


def test_nothing_left_to_train_on_is_refused_behind_the_summary_and_what_was_there_stays(tmp_path: Path) -> None:
    def finish(cut: Action) -> None:
        job = Job(tmp_path, config(gate=replace(GATE, cut=cut)), {}, {})
        job.finish([Prompt("0:1", "x", ("a",))], thinking(), "target")

    with Journal(tmp_path, Share(), {}) as journal:
        journal.append(row(Answer("half an", "length", 9)))
    finish("keep")
    before = (tmp_path / "conversations.jsonl").read_bytes()
    with pytest.raises(UserError, match=r"no row is left to train on: 1 with flaw 'cut'; see summary\.html"):
        finish("drop")
    assert (tmp_path / "conversations.jsonl").read_bytes() == before != b""
    assert json.loads((tmp_path / "summary.json").read_text())["flaws"] == {"cut": 1}
    assert "0 of 1 input rows are kept" in (tmp_path / "summary.html").read_text()
    assert '"kept": false' in (tmp_path / "outcomes.jsonl").read_text()
    assert not (tmp_path / "provenance.json").exists() and not list(tmp_path.glob(".*.tmp"))


def test_the_histogram_holds_every_length_once() -> None:
    lengths = [1, 5, 5, 300, 77, 301]
    bins = histogram(lengths, 512)
    assert sum(count for _, count, _ in bins) == len(lengths) and max(height for _, _, height in bins) == 1.0
    assert bins[-1][0] <= 301 and all(first < second for (first, *_), (second, *_) in pairwise(bins))
    assert histogram([], 512)[0][1] == 0
