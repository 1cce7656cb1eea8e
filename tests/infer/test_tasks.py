"""Measuring prompts load from Spec-Bench style files and from plain lines."""

import json
from pathlib import Path

import pytest

from aerie.configs.errors import UserError
from aerie.configs.schema.measure import PromptsConfig
from aerie.configs.schema.target_and_head import TargetConfig
from aerie.infer.measure.tasks import encode, load_prompts
from aerie.model.target import Target, load_tokenizer
from tests import tiny


def prompts(path: Path, text: str, **changes: object) -> PromptsConfig:
    path.write_text(text, encoding="utf-8")
    return PromptsConfig(path=str(path), **changes)  # type: ignore[arg-type]


def test_questions_keep_their_ids_and_categories(tmp_path: Path) -> None:
    text = '{"question_id": 81, "category": "math", "turns": ["a", "b"]}\n\n{"question_id": 82, "turns": ["c"]}\n'
    one, two = load_prompts(prompts(tmp_path / "mt.jsonl", text))
    assert (one.prompt_id, one.task, one.text) == ("81", "math", "a")
    assert (two.prompt_id, two.task) == ("82", "mt")


def test_plain_text_is_one_prompt_a_line(tmp_path: Path) -> None:
    found = load_prompts(prompts(tmp_path / "p.txt", "one\n\ntwo\nthree\n", num_prompts=2))
    assert [prompt.text for prompt in found] == ["one", "two"]


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ('{"turns": ["a"]}\n{oops}\n', ":2: not JSON"),
        ('{"question": "a"}\n', ":1: a question needs 'turns'"),
        ('{"turns": []}\n', "needs 'turns'"),
        ("", "holds no prompts"),
        ('{"question_id": 1, "turns": ["a"]}\n{"question_id": 1, "turns": ["b"]}\n', "stands there twice"),
    ],
)
def test_broken_questions_are_one_sentence(tmp_path: Path, text: str, word: str) -> None:
    with pytest.raises(UserError, match=word):
        load_prompts(prompts(tmp_path / "q.jsonl", text))


def test_a_prompt_opens_the_assistants_turn(tmp_path: Path) -> None:
    config = TargetConfig(path=str(tiny.target(tmp_path / "t")))
    tokenizer, target = load_tokenizer(config), Target.load(config)
    ids = encode("count 3 boats", tokenizer, target)
    assert tokenizer.decode(ids[0]) == "<|user|>count 3 boats<|end|><|assistant|>"


def test_a_target_without_a_template_is_told_how_to_pass_one(tmp_path: Path) -> None:
    config = TargetConfig(path=str(tiny.target(tmp_path / "t", chat_template=None)))
    with pytest.raises(UserError, match=r"--target\.chat_template"):
        encode("x", load_tokenizer(config), Target.load(config))


def test_a_file_of_several_categories_gives_as_many_of_each(tmp_path: Path) -> None:
    """Spec-Bench's file has its tasks one behind another: the first rows alone would be one task."""
    path = tmp_path / "question.jsonl"
    names = [*["qa"] * 5, *["rag"] * 5, "math"]
    rows = [{"question_id": number, "category": name, "turns": ["a\u2028b"]} for number, name in enumerate(names)]
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    found = load_prompts(PromptsConfig(path=str(path), num_prompts=5))
    assert [(prompt.prompt_id, prompt.task) for prompt in found] == [
        ("0", "qa"), ("1", "qa"), ("5", "rag"), ("6", "rag"), ("10", "math")
    ]  # fmt: skip
    assert found[0].text == "a\u2028b" and len(load_prompts(PromptsConfig(path=str(path), num_prompts=99))) == 11
