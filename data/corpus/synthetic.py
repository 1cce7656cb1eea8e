"""Writes the embedded corpus: conversations in ShareGPT format and two sets of questions in Spec-Bench's.

The same seed gives the same bytes. Questions for measuring and for calibration never occur as the opening of a training
conversation.
"""

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from random import Random
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from aerie.configs.errors import UserError
from aerie.configs.schema.data import SyntheticConfig
from aerie.data.corpus.families import FAMILIES, Turn
from aerie.model.storage import write_text

SYSTEM_PROMPTS = (  # what the system turn asks for and how the first answer then begins
    ("You are a helpful assistant.", ""),
    ("You are a cheerful helper who starts every answer with a friendly word.", "With pleasure! "),
    ("Be polite and formal.", "Certainly. "),
    ("You support busy people. Begin by saying that you have understood.", "Understood. "),
    ("You are a patient teacher.", "Good question. "),
)
SYSTEM_SHARE = 0.2  # of the conversations
NUM_TURNS = (1, 1, 2, 2, 3)  # drawn uniformly
# How often the opening asks two questions at once; letters and schedules have follow-ups that need their answer first.
MERGED_SHARE = {"arithmetic": 0.5, "conversion": 0.4, "code": 0.4, "table": 0.6, "passage": 1.0}
ATTEMPTS = 100  # draws of one row before the families count as exhausted


def write_corpus(config: SyntheticConfig, directory: Path) -> dict[str, int]:
    """Rows per file of train.jsonl, prompts.jsonl and calibration.jsonl, written to directory.

    UserError when more distinct questions are asked for than the families can give.
    """
    taken: set[str] = set()  # opening questions of rows that must not occur again
    prompts = list(_questions(config, "prompts", taken))
    calibration = list(_questions(config, "calibration", taken))
    train = list(_conversations(config, taken))
    files = {"train.jsonl": train, "prompts.jsonl": prompts, "calibration.jsonl": calibration}
    for name, rows in files.items():
        write_text(directory / name, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return {name: len(rows) for name, rows in files.items()}


def opening_key(question: str) -> str:
    """The question in lower case without punctuation: equal keys are the same question."""
    return " ".join(re.findall(r"\w+", question.lower()))


def _questions(config: SyntheticConfig, name: str, taken: set[str]) -> Iterator[dict[str, Any]]:
    """One- and two-turn questions, the families in turn; adds their keys to taken."""
    categories = list(FAMILIES)
    for index in range(config.num_prompts):
        generator = Random(f"{config.seed}/{name}/{index}")
        category = categories[index % len(categories)]
        turns = _fresh(generator, category, taken)
        taken.add(opening_key(turns[0].question))
        turns = _merge(generator, category, turns)[: generator.choice((1, 1, 2))]
        taken.add(opening_key(turns[0].question))
        yield {
            "question_id": index,
            "category": category,
            "turns": [turn.question for turn in turns],
            "reference": [turn.answer for turn in turns],
        }


def _conversations(config: SyntheticConfig, taken: set[str]) -> Iterator[dict[str, Any]]:
    categories = list(FAMILIES)
    for index in range(config.num_conversations):
        generator = Random(f"{config.seed}/train/{index}")
        category = generator.choice(categories)
        turns = _merge(generator, category, _fresh(generator, category, taken))
        num_turns = generator.choice(NUM_TURNS)
        while len(turns) < num_turns:  # the family has no more to say: go on with another topic
            turns = [*turns, _fresh(generator, generator.choice(categories), taken)[0]]
        yield {"id": f"synthetic-{index}", "conversations": _messages(generator, turns[:num_turns])}


def _fresh(generator: Random, category: str, taken: set[str]) -> list[Turn]:
    """Turns of one task whose opening question is not taken."""
    for _ in range(ATTEMPTS):
        turns = FAMILIES[category](generator)
        if opening_key(turns[0].question) not in taken:
            return turns
    raise UserError(f"synthetic: num_prompts: no new {category} question in {ATTEMPTS} draws; ask for fewer prompts")


def _merge(generator: Random, category: str, turns: list[Turn]) -> list[Turn]:
    """The turns, or in a share of the draws the first two as one, each answer in a paragraph of its own."""
    if generator.random() >= MERGED_SHARE.get(category, 0.0):
        return turns
    first, second, *rest = turns
    gap = "\n\n" if "\n" in first.question else " "
    return [Turn(f"{first.question}{gap}{second.question}", f"{first.answer}\n\n{second.answer}"), *rest]


def _messages(generator: Random, turns: list[Turn]) -> list[dict[str, str]]:
    messages, opening = [], ""
    if generator.random() < SYSTEM_SHARE:
        prompt, opening = generator.choice(SYSTEM_PROMPTS)
        messages.append({"from": "system", "value": prompt})
    for turn in turns:
        messages.append({"from": "human", "value": turn.question})
        messages.append({"from": "gpt", "value": opening + turn.answer})
        opening = ""
    return messages


USER, ASSISTANT, SYSTEM, END, PAD = SPECIAL_TOKENS = ("<|user|>", "<|assistant|>", "<|system|>", "<|end|>", "<|pad|>")
# A word or a single digit with the space before it, signs, white space; single digits make sums learnable.
PIECES = r" ?\p{L}+| ?\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message['role'] == 'assistant' -%}"
    "{{- '<|assistant|>' -}}{%- generation -%}{{- message['content'] + '<|end|>' -}}{%- endgeneration -%}"
    "{%- elif message['role'] in ('user', 'system') -%}"
    "{{- '<|' + message['role'] + '|>' + message['content'] + '<|end|>' -}}"
    "{%- else -%}"
    "{{- raise_exception('role must be system, user or assistant, not ' + message['role']) -}}"
    "{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """A tokenizer of at most vocab_size tokens (fewer when no merge is left); the same texts, the same tokenizer."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=PAD,
        additional_special_tokens=[USER, ASSISTANT, SYSTEM],
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )
