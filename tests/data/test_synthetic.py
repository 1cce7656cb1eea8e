"""Laws of the embedded corpus: the same bytes, disjoint questions, right answers."""

import ast
import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import pytest

from aerie.configs.errors import UserError
from aerie.configs.schema.data import SyntheticConfig
from aerie.data.corpus.families import FAMILIES, Turn
from aerie.data.corpus.synthetic import opening_key, write_corpus

SMALL = SyntheticConfig(num_conversations=400, num_prompts=28)
DIGESTS = {
    "train.jsonl": "2459b486478b868e",
    "prompts.jsonl": "c56d3b887c2c66fa",
    "calibration.jsonl": "24116a86a4f89083",
}
EQUATION = re.compile(r"(\d+) ([-+*/]) (\d+) = (\d+)")
ROW = re.compile(r"^(\w+)(?: \| |,|: )(\d+)$", re.MULTILINE)
OPERATIONS: dict[str, Callable[[int, int], float]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "/": lambda a, b: a / b,
}
# What each function of the code family must do, written independently of its code; k is the constant of the question.
MEANING: dict[str, Callable[[Any, int], Any]] = {
    "adds up a list": lambda x, k: sum(x),
    "counts how many numbers": lambda x, k: len([v for v in x if v > k]),
    "keeps the numbers": lambda x, k: list(filter(lambda v: v > k, x)),
    "multiplies every": lambda x, k: [v * k for v in x],
    "largest": lambda x, k: sorted(x)[-1],
    "smallest": lambda x, k: sorted(x)[0],
    "reverses a string": lambda x, k: "".join(reversed(x)),
    "vowels": lambda x, k: sum(x.lower().count(v) for v in "aeiou"),
    "palindrome": lambda x, k: list(x.lower()) == list(reversed(x.lower())),
    "exclamation": lambda x, k: x.upper().ljust(len(x) + k, "!"),
    "first letters": lambda x, k: "".join(w[0] for w in x).upper(),
    "longest word": lambda x, k: next(w for w in x if len(w) == max(map(len, x))),
    "length of each": lambda x, k: list(map(len, x)),
    "factorial": lambda x, k: math.factorial(x),
    "Fibonacci": lambda x, k: round(((1 + 5**0.5) / 2) ** x / 5**0.5),
    "number is even": lambda x, k: x in range(0, 100, 2),
    "prime": lambda x, k: [d for d in range(1, x + 1) if x % d == 0] == [1, x],
    "digits of": lambda x, k: sum(map(int, str(x))),
    "counts down": lambda x, k: sorted(range(1, x + 1), reverse=True),
    "power": lambda x, k: x**k,
    "every second": lambda x, k: [v for i, v in enumerate(x) if i % 2 == 0],
    "every third": lambda x, k: [v for i, v in enumerate(x) if i % 3 == 0],
    "duplicates": lambda x, k: list(dict.fromkeys(x)),
    "average": lambda x, k: sum(x) / len(x) if x else 0,
    "greets": lambda x, k: ", ".join(["Hello, " + x] * k),
}


def drawn(family: str, count: int) -> Iterator[list[Turn]]:
    return (FAMILIES[family](Random(f"{family}/{index}")) for index in range(count))


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("corpus")
    assert write_corpus(SMALL, directory) == {"train.jsonl": 400, "prompts.jsonl": 28, "calibration.jsonl": 28}
    return directory


def test_a_seed_gives_the_bytes_that_it_always_gave_and_another_seed_others(corpus: Path, tmp_path: Path) -> None:
    write_corpus(SyntheticConfig(400, 28, seed=1), tmp_path)
    for name, digest in DIGESTS.items():
        assert hashlib.sha256((corpus / name).read_bytes()).hexdigest()[:16] == digest
        assert (tmp_path / name).read_bytes() != (corpus / name).read_bytes()


def test_no_question_is_in_two_of_the_three_files(corpus: Path) -> None:
    opened = {opening_key(_first(row)) for row in rows(corpus / "train.jsonl")}
    measuring = [opening_key(row["turns"][0]) for row in rows(corpus / "prompts.jsonl")]
    calibration = [opening_key(row["turns"][0]) for row in rows(corpus / "calibration.jsonl")]
    assert Counter(measuring + calibration).most_common(1)[0][1] == 1
    assert not opened & {*measuring, *calibration}


def test_a_family_with_few_questions_still_keeps_its_measuring_ones_out_of_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(FAMILIES, "letter", lambda generator: [Turn(f"Say {generator.randint(1, 12)}!", "No.")])
    write_corpus(SyntheticConfig(300, 28), tmp_path)
    held = {row["turns"][0] for name in ("prompts", "calibration") for row in rows(tmp_path / f"{name}.jsonl")}
    trained = {turn["value"] for row in rows(tmp_path / "train.jsonl") for turn in row["conversations"]}
    said = {f"Say {number}!" for number in range(1, 13)}
    assert len(said & held) == 8
    assert said & trained == said - held


def test_more_prompts_than_a_family_has_are_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(FAMILIES, "letter", lambda generator: [Turn(f"Say {generator.randint(0, 1)}", "No.")])
    with pytest.raises(UserError, match="num_prompts: no new letter question"):
        write_corpus(SyntheticConfig(10, 60), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_conversations_alternate_and_vary_in_length_and_system_turn(corpus: Path) -> None:
    lengths: Counter[int] = Counter()
    systems = 0
    for row in rows(corpus / "train.jsonl"):
        roles = [turn["from"] for turn in row["conversations"]]
        systems += roles[0] == "system"
        spoken = roles[roles[0] == "system" :]
        assert spoken == ["human", "gpt"] * (len(spoken) // 2)
        assert all(turn["value"].strip() == turn["value"] != "" for turn in row["conversations"])
        lengths[len(spoken) // 2] += 1
    assert set(lengths) == {1, 2, 3}
    assert 0.1 < systems / 400 < 0.3


def test_questions_go_through_the_families_in_turn(corpus: Path) -> None:
    for name in ("prompts.jsonl", "calibration.jsonl"):
        found = rows(corpus / name)
        assert Counter(row["category"] for row in found) == dict.fromkeys(FAMILIES, 4)
        assert {len(row["turns"]) for row in found} == {1, 2}
        assert all(len(row["turns"]) == len(row["reference"]) for row in found)


@pytest.mark.parametrize("family", list(FAMILIES))
def test_no_slot_is_left_open_and_follow_ups_differ_from_the_opening(family: str) -> None:
    for turns in drawn(family, 300):
        texts = [text for turn in turns for text in (turn.question, turn.answer)]
        assert len(turns) >= 2
        assert len(set(texts)) == len(texts)
        assert not any(re.search(r"\{\w*\}|  [a-z]|\(\)", text.partition("```")[0]) for text in texts), texts


@pytest.mark.parametrize("family", list(FAMILIES))
def test_every_family_gives_many_different_questions(family: str) -> None:
    assert len({opening_key(turns[0].question) for turns in drawn(family, 500)}) > 400


def test_every_equation_in_an_answer_holds() -> None:
    counted = 0
    for family in FAMILIES:
        for turns in drawn(family, 400):
            for left, sign, right, result in (e for turn in turns for e in EQUATION.findall(turn.answer)):
                assert OPERATIONS[sign](int(left), int(right)) == int(result), (family, left, sign, right, result)
                counted += 1
    assert counted > 2500


def test_a_story_ends_with_the_result_of_its_last_step() -> None:
    for turns in drawn("arithmetic", 600):
        result = EQUATION.findall(turns[0].answer)[-1][3]
        assert re.search(rf"\b{result}\b", turns[0].answer.rsplit(". ", 1)[1]), turns[0].answer


def test_the_numbers_of_a_story_are_enough_to_solve_it() -> None:
    """Every operand is stated in the question, in words or digits, or is the result of an earlier step."""
    implied = {"2", "3", "4", "5", "10"}  # half, a third, twice, ten percent
    for turns in drawn("arithmetic", 600):
        known = {*re.findall(r"\d+", turns[0].question), *implied}
        for left, _, right, result in EQUATION.findall(turns[0].answer):
            assert {left, right} <= known, turns[0]
            known.add(result)


def test_generated_functions_do_what_the_question_asks() -> None:
    seen = set()
    for turns in drawn("code", 600):
        code = re.findall(r"```python\n(.*?)\n```", turns[0].answer, re.DOTALL)[0]
        name = re.findall(r"def (\w+)", code)[0]
        scope: dict[str, Any] = {}
        exec(code, scope)  # noqa: S102 (our own corpus)
        meaning = next(key for key in MEANING if key in turns[0].question)
        constant = re.search(r"(?:than|by|of) (\d+)", turns[0].question)
        word = re.search(r"(one|two|three) (?:times|exclamation)", turns[0].question)
        k = int(constant[1]) if constant else ("one", "two", "three").index(word[1]) + 1 if word else 0
        example = turns[0].question
        value = _example(example)
        expected = MEANING[meaning](value, k)
        assert scope[name](value) == expected, (turns[0].question, code)
        assert repr(expected) in turns[0].answer
        for line in re.findall(r"assert (.*)", turns[1].answer):
            exec(f"assert {line}", scope)  # noqa: S102 (our own corpus)
        seen.add(meaning)
    assert seen == set(MEANING)


def test_sorted_filtered_and_totalled_tables_are_right() -> None:
    checked: Counter[str] = Counter()
    for turns in drawn("table", 800):
        question, answer = turns[0].question, turns[0].answer
        table = {name: int(number) for name, number in ROW.findall(question)}
        ascending = sorted(table, key=lambda name: table[name])
        if question.startswith("Sort this"):
            assert re.findall(r"(\w+) \((\d+)\)", answer) == [(name, str(table[name])) for name in ascending]
        elif question.startswith("Rank"):
            assert re.findall(r"\d\. (\w+) with", answer) == ascending[::-1]
        elif question.startswith("Keep only"):
            cut = int(re.findall(r"more than (\d+)\.", question)[0])
            kept = re.findall(r"stays?: (.*?)\. The rest", answer)[0]
            assert re.split(", | and ", kept) == [name for name in table if table[name] > cut]
        elif question.startswith("Add a final"):
            assert f"total | {sum(table.values())}" in answer
        elif question.startswith("Which rows"):
            assert f"is {ascending[0]}, while {ascending[-1]} is" in answer
        else:
            continue
        checked[question.split()[0]] += 1
    assert min(checked.values()) > 40
    assert len(checked) == 5


def test_the_parts_of_a_schedule_follow_each_other_without_gaps() -> None:
    for turns in drawn("schedule", 200):
        lengths = [int(number) for number in re.findall(r"(\d+) minutes", turns[0].question)]
        times = [int(h) * 60 + int(m) for h, m in re.findall(r"^(\d+):(\d\d) ", turns[0].answer, re.MULTILINE)]
        assert [later - earlier for earlier, later in pairwise(times)] == lengths
        assert any(f"{sum(lengths)} minutes, breaks" in turn.answer for turn in turns)


def test_letters_are_signed_by_the_sender_and_address_the_recipient() -> None:
    for turns in drawn("letter", 200):
        sender = turns[0].answer.rsplit("\n", 1)[1]
        recipient = re.findall(r"^\w+ (.*),\n", turns[0].answer)[0]
        assert sender in turns[0].question
        assert recipient in turns[0].question
        reply = next(turn.answer for turn in turns[1:] if turn.question.startswith("Now write"))
        assert reply.endswith(recipient)


def _first(row: dict[str, Any]) -> str:
    return next(turn["value"] for turn in row["conversations"] if turn["from"] == "human")


def _example(question: str) -> Any:
    """The literal that a code question gives as its example input."""
    found = re.findall(r"(?:return for|with|Use|example is) (\[.*?\]|'\w+'|\d+)", question)
    return ast.literal_eval(found[-1])
