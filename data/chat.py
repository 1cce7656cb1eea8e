"""Conversations as tokens with a loss mask, made by rendering prefixes with the tokenizer's own chat template.

For the assistant turn at messages[i], `prompt` = render(messages[:i], add_generation_prompt=True) is what the target
reads before it answers, and `text` = render(messages[:i + 1]) is that and the answer. What `text` adds to `prompt` is
the assistant's; the tokens of it up to its first end-of-turn token are learnt. Tokens that the generation prompt writes
are not learnt. When every `text` is a prefix of the whole conversation's render, one row carries all turns. When not
(templates that drop earlier thinking), each turn is a row of its own.
"""

import re
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from os.path import commonprefix
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError
from tokenizers import Tokenizer

from aerie.configs.errors import UserError
from aerie.configs.schema.target_and_head import TargetConfig
from aerie.data.conversations import Conversation, Tally, UnusableRow
from aerie.model.storage import SHIPPED_TEMPLATE, first_line

# The text of one row, its assistant turns as (start, end) in characters (end exclusive, ascending), and its source.
Rendered = tuple[str, list[tuple[int, int]], str]
ATTEMPTS = 3  # renders of one conversation before a template that writes the time counts as unstable
LONE_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True)
class Row:
    """Tokens of one training row, and its loss mask: turns[t] is 0 where token t is not learnt, j in the j-th answer.

    Turn numbers ascend along the row; a turn's end-of-turn token belongs to it. source is 'file: row n'.
    """

    input_ids: Sequence[int]
    turns: Sequence[int]
    source: str

    @property
    def num_supervised(self) -> int:
        return sum(1 for turn in self.turns if turn)

    @property
    def num_slots(self) -> int:
        """Slots p that training supervises: tokens p + 1 and p + 2 belong to the same turn."""
        return sum(1 for first, second in pairwise(self.turns[1:]) if first == second != 0)


def shared_start(first: str, second: str) -> int:
    """The number of characters that both texts begin with."""
    return len(first) if second.startswith(first) else len(commonprefix([first, second]))  # noqa: RUF071


def target_end_ids(config: TargetConfig, tokenizer: Any) -> set[int]:
    """The ids at which the target stops: the tokenizer's EOS and those of its generation config, which is optional."""
    from transformers import GenerationConfig

    ids: set[int | None] = {tokenizer.eos_token_id}
    with suppress(OSError):
        stops = GenerationConfig.from_pretrained(config.path, revision=config.revision).eos_token_id
        ids.update(stops if isinstance(stops, list) else [stops])
    return {number for number in ids if number is not None}


class Chat:
    """Renders conversations and tokenises the renders; end_ids are the target's end-of-turn tokens."""

    def __init__(self, tokenizer: Any, end_ids: Collection[int], tally: Tally) -> None:
        self.tokenizer, self.end_ids, self.tally = tokenizer, frozenset(end_ids), tally
        self.name = getattr(tokenizer, "name_or_path", "") or "the tokenizer"
        if not getattr(tokenizer, "is_fast", False):
            raise UserError(
                f"{self.name}: a slow tokenizer has no character offsets; use a checkpoint with tokenizer.json"
            )
        added = tokenizer.added_tokens_decoder.items()
        self.special_ids = {*tokenizer.all_special_ids, *(number for number, token in added if token.special)}
        # A copy without the last step of tokenisation, which only adds special tokens and trims blanks off the offsets.
        self.backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
        self.backend.post_processor = None
        self.backend.no_truncation()
        self.backend.no_padding()

    def render(self, conversation: Conversation, supervise_all: bool = False) -> list[Rendered]:
        """The conversation's rows: one, or one per assistant turn when the template rewrites earlier text.

        supervise_all gives one row whose only span is the whole text. UnusableRow where the template refuses the
        conversation, UserError when there is no template or it is broken.
        """
        if not self.tokenizer.chat_template:
            fix = f"name one with target.chat_template: FILE.jinja ({SHIPPED_TEMPLATE} ships for Vicuna targets)"
            raise UserError(f"{self.name}: the tokenizer has no chat template; {fix}")
        messages, source = conversation.messages, conversation.place
        if supervise_all:
            whole = self._text(conversation, len(messages), False)
            return [(whole, [(0, len(whole))], source)]
        answers = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        for _ in range(ATTEMPTS):
            prompts = [self._text(conversation, index, True) for index in answers]
            texts = [self._text(conversation, index + 1, False) for index in answers]
            whole, pairs = texts[-1], list(zip(texts, prompts, strict=True))
            is_plain = all(text.startswith(prompt) and whole.startswith(text) for text, prompt in pairs)
            # Where it is not, the clock of a template that writes the time may have moved between two renders.
            if is_plain or self._text(conversation, answers[0], True) == prompts[0]:
                break
        else:
            raise UnusableRow("the template renders differently on each call", "two renders of one conversation differ")
        spans = []
        for index, (text, prompt) in zip(answers, pairs, strict=True):
            # A generation prompt that opens '<think>' is no prefix of an answer that was stored without thinking: the
            # answer then begins behind what both share of the generation prompt.
            start = shared_start(prompt, text)
            if start < len(prompt):
                if start <= len(self._text(conversation, index, False)):
                    sentence = f"turn {index + 1}: the text before the answer is another one once the answer is there"
                    raise UnusableRow("the template rewrites what stands before an answer", sentence)
                self.tally.add(
                    "left out", "the generation prompt's last part is not in the render of the answer", source
                )
            spans.append((start, len(text)))
        if all(whole.startswith(text) for text in texts):
            return [(whole, spans, source)]
        rows = enumerate(zip(texts, spans, strict=True), start=1)
        return [(text, [span], f"{source}, answer {number}") for number, (text, span) in rows]

    def encode(self, rendered: Sequence[Rendered]) -> list[Row]:
        """The renders as tokens; one call per batch, which the tokenizer spreads over its threads."""
        rows = []
        # Half of a UTF-16 pair, common in scraped text: no tokenizer takes it.
        texts = [LONE_SURROGATE.sub("\N{REPLACEMENT CHARACTER}", text) for text, _, _ in rendered]
        encodings = self.backend.encode_batch(texts, add_special_tokens=False)
        for (text, spans, source), whole, encoding in zip(rendered, texts, encodings, strict=True):
            if whole != text:
                self.tally.add("mended", "half of a surrogate pair replaced", source)
            ids = array("i", encoding.ids)
            turns = array("i", bytes(ids.itemsize * len(ids)))  # zeros
            starts, ends = ([offsets[side] for offsets in encoding.offsets] for side in (0, 1))
            for number, (start, end) in enumerate(spans, start=1):
                # Every token that begins in the answer, up to its end-of-turn token.
                first, stop = bisect_left(starts, start), bisect_right(ends, end)
                if first > 0 and ends[first - 1] > start:
                    self.tally.add("left out", "a token straddles prompt and answer", source)
                last = next((at for at in range(first, stop) if ids[at] in self.end_ids), None)
                if last is None:  # base models: up to the answer's last special token
                    self.tally.add("left out", "the answer's end is none of the target's end-of-turn tokens", source)
                    last = next((at for at in range(stop - 1, first - 1, -1) if ids[at] in self.special_ids), stop - 1)
                turns[first : last + 1] = array("i", [number]) * (last + 1 - first)
            rows.append(Row(ids, turns, source))
        return rows

    def _text(self, conversation: Conversation, end: int, add_generation_prompt: bool) -> str:
        try:
            text = self.tokenizer.apply_chat_template(
                list(conversation.messages[:end]),
                tools=conversation.tools,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
            )
        except TemplateSyntaxError as error:
            raise UserError(f"{self.name}: chat template: line {error.lineno}: {error.message}") from error
        except (TemplateError, TypeError, ValueError, ArithmeticError, LookupError) as error:
            raise UnusableRow(f"the chat template refuses it: {first_line(error)[:120]}", "") from error
        return str(text)
