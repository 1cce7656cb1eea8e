"""Laws of the embedded corpus: the same bytes, disjoint questions, right answers."""

import hashlib
import json
import operator
import re
from collections import Counter
from collections.abc import Iterator
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
OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}


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
    opened = {
        opening_key(next(turn["value"] for turn in row["conversations"] if turn["from"] == "human"))
        for row in rows(corpus / "train.jsonl")
    }
    measuring = [opening_key(row["turns"][0]) for row in rows(corpus / "prompts.jsonl")]
    calibration = [opening_key(row["turns"][0]) for row in rows(corpus / "calibration.jsonl")]
    assert Counter(measuring + calibration).most_common(1)[0][1] == 1
    assert not opened & {*measuring, *calibration}


def test_more_prompts_than_a_family_has_are_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(FAMILIES, "letter", lambda generator: [Turn(f"Say {generator.randint(0, 1)}", "No.")])
    with pytest.raises(UserError, match="num_prompts: no new letter question"):
        write_corpus(SyntheticConfig(10, 60), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_conversations_alternate_and_vary_in_length_and_system_turn(corpus: Path) -> None:
    spoken = [[turn["from"] for turn in row["conversations"]] for row in rows(corpus / "train.jsonl")]
    assert {tuple(roles) for roles in spoken} == {
        (*system, *("human", "gpt") * count) for system in ((), ("system",)) for count in (1, 2, 3)
    }


@pytest.mark.parametrize("family", list(FAMILIES))
def test_every_family_gives_many_questions_without_open_slots(family: str) -> None:
    for turns in drawn(family, 300):
        texts = [text for turn in turns for text in (turn.question, turn.answer)]
        assert len(turns) >= 2 and len(set(texts)) == len(texts)
        assert not any(re.search(r"\{\w*\}|  [a-z]|\(\)", text.partition("```")[0]) for text in texts), texts
    assert len({opening_key(turns[0].question) for turns in drawn(family, 500)}) > 400


def test_every_equation_in_an_answer_holds() -> None:
    counted = 0
    for family in FAMILIES:
        for turns in drawn(family, 400):
            for left, sign, right, result in (e for turn in turns for e in EQUATION.findall(turn.answer)):
                assert OPERATIONS[sign](int(left), int(right)) == int(result), (family, left, sign, right, result)
                counted += 1
    assert counted > 2500
