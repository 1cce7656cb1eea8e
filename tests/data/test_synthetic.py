"""Laws of the embedded corpus: the same bytes, disjoint questions, right answers, exact masks."""

import hashlib
import operator
import re
from pathlib import Path
from random import Random

from aerie.configs.schema.data import SyntheticConfig
from aerie.data.synthetic import FAMILIES, draw_task, opening_key, train_tokenizer, write_corpus
from tests.tiny import read_rows

DIGESTS = {
    "train.jsonl": "2459b486478b868e",
    "prompts.jsonl": "c56d3b887c2c66fa",
    "calibration.jsonl": "24116a86a4f89083",
}
EQUATION = re.compile(r"(\d+) ([-+*/]) (\d+) = (\d+)")
OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}


def test_corpus_bytes(
    tmp_path: Path,
) -> None:
    """A seed gives the bytes that it always gave; no question is in two files."""
    corpus, other = tmp_path / "corpus", tmp_path / "other"
    write_corpus(SyntheticConfig(400, 28), corpus)
    write_corpus(SyntheticConfig(400, 28, seed=1), other)
    for name, digest in DIGESTS.items():
        assert hashlib.sha256((corpus / name).read_bytes()).hexdigest()[:16] == digest
        assert (other / name).read_bytes() != (corpus / name).read_bytes()
    opened = set[str]()
    for row in read_rows(corpus / "train.jsonl"):
        asked = (turn["value"] for turn in row["conversations"] if turn["from"] == "human")
        opened.add(opening_key(next(asked)))
    measuring = read_rows(corpus / "prompts.jsonl") + read_rows(corpus / "calibration.jsonl")
    keys = {opening_key(row["turns"][0]) for row in measuring}
    assert len(keys) == len(measuring) and opened.isdisjoint(keys)


def test_families() -> None:
    """Every family asks much, leaves no slot open, and calculates correctly."""
    equations = []
    for family in FAMILIES:
        drawn = [draw_task(family, Random(f"{family}/{index}")) for index in range(200)]
        assert len({opening_key(turns[0].question) for turns in drawn}) > 160
        for text in (text for turns in drawn for turn in turns for text in turn):
            assert not re.search(r"\{\w*\}|  [a-z]|\(\)", text.partition("```")[0]), text
            equations += EQUATION.findall(text)
    assert len(equations) > 1000
    assert all(
        OPERATIONS[sign](int(left), int(right)) == int(result)
        for left, sign, right, result in equations
    )


def test_tokenizer() -> None:
    """The tokenizer keeps any text; its template masks what the assistant writes, no more."""
    draws = (draw_task(name, Random(f"{name}/{index}")) for name in FAMILIES for index in range(40))
    texts = [text for turns in draws for turn in turns for text in turn]
    tokenizer = train_tokenizer(texts, 700)
    assert (
        len(tokenizer) == 700 and len(tokenizer("12345")["input_ids"]) == 5
    )  # a token for each digit
    odd = (
        "for i in x:\n\n        y += 1\n",
        "  two  spaces ",
        "Grüße, 3.5 °C, 日本 🦅",
        "a\tb\r\n",
    )
    for text in (*odd, *texts[:50]):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    turns = (
        ("system", "Be brief."),
        ("user", "4 * 12?"),
        ("assistant", "48.\n\n  More?"),
        ("assistant", "Bye!"),
    )
    chat = [{"role": role, "content": text} for role, text in turns]
    encoded = tokenizer.apply_chat_template(
        chat, return_dict=True, return_assistant_tokens_mask=True
    )
    written = [
        t for t, own in zip(encoded["input_ids"], encoded["assistant_masks"], strict=True) if own
    ]
    assert tokenizer.decode(written) == "48.\n\n  More?<|end|>Bye!<|end|>"
