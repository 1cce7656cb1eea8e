"""Laws of the embedded tokenizer."""

from random import Random

import pytest
from transformers import PreTrainedTokenizerFast

from aerie.data.corpus.families import FAMILIES
from aerie.data.corpus.synthetic import train_tokenizer

TURNS = [("system", "Be brief."), ("user", "4 times 12?"), ("assistant", "It is 48.\n\n  More?"), ("user", "No.")]
CHAT = [{"role": role, "content": text} for role, text in (*TURNS, ("assistant", "Bye!"))]
RENDERED = (
    "<|system|>Be brief.<|end|><|user|>4 times 12?<|end|><|assistant|>It is 48.\n\n  More?<|end|>"
    "<|user|>No.<|end|><|assistant|>Bye!<|end|>"
)


def texts() -> list[str]:
    draws = (family(Random(f"{name}/{index}")) for name, family in FAMILIES.items() for index in range(40))
    return [text for turns in draws for turn in turns for text in (turn.question, turn.answer)]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return train_tokenizer(texts(), 700)


def test_the_same_texts_give_the_same_tokenizer_with_a_token_for_each_digit(tokenizer: PreTrainedTokenizerFast) -> None:
    again = train_tokenizer(iter(texts()), 700)
    assert again.backend_tokenizer.to_str() == tokenizer.backend_tokenizer.to_str() and len(tokenizer) == 700
    assert len(tokenizer("12345")["input_ids"]) == 5


def test_any_text_survives_a_round_trip(tokenizer: PreTrainedTokenizerFast) -> None:
    for text in (
        "for i in x:\n\n        y += 1\n",
        "  two  spaces ",
        "Grüße, 3.5 °C, 日本 🦅",
        "a\tb\r\n",
        *texts()[:50],
    ):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_the_template_masks_exactly_what_the_assistant_writes(tokenizer: PreTrainedTokenizerFast) -> None:
    assert tokenizer.apply_chat_template(CHAT, tokenize=False) == RENDERED
    encoded = tokenizer.apply_chat_template(CHAT, return_dict=True, return_assistant_tokens_mask=True)
    written = [t for t, own in zip(encoded["input_ids"], encoded["assistant_masks"], strict=True) if own]
    assert tokenizer.decode(written) == "It is 48.\n\n  More?<|end|>Bye!<|end|>"
