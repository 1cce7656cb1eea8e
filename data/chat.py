"""Conversations as tokens with the assistant's turns marked, by rendering prefixes with the tokenizer's own template.

For the assistant turn at messages[i]: P = render(messages[:i], add_generation_prompt=True) is what the target reads
before it answers, F = render(messages[:i + 1]) is that and the answer. What F adds to P is the assistant's, up to its
first end-of-turn token. When every F is a prefix of the whole conversation's render, one row carries all turns; when
not (templates that drop earlier thinking or write something per call), each turn is a row of its own.
"""

import re
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError
from tokenizers import Encoding, Tokenizer

from aerie.configs.errors import UserError
from aerie.configs.schema.target_and_head import TargetConfig
from aerie.data.conversations import Conversation, Message, Tally, TokenRow, UnusableRow
from aerie.model.storage import SHIPPED_TEMPLATE

ATTEMPTS = 3  # renders of one conversation before a template that writes the time counts as unstable
LONE_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True)
class Row:
    """Tokens of one training row. turns[t] is 0 where token t is not learnt, j >= 1 in the j-th assistant turn.

    Turn numbers ascend along the row; a turn's end-of-turn token belongs to it. source is 'file: row n'.
    """

    input_ids: Sequence[int]
    turns: Sequence[int]
    source: str

    @property
    def num_supervised(self) -> int:
        return len(self.turns) - sum(1 for turn in self.turns if turn == 0)

    @property
    def num_slots(self) -> int:
        """Slots p that training supervises: tokens p + 1 and p + 2 belong to the same turn."""
        return sum(1 for first, second in pairwise(self.turns[1:]) if first == second != 0)


@dataclass(frozen=True)
class Rendered:
    """Text of one row and its assistant turns as (start, end) in characters, end exclusive, ascending."""

    text: str
    spans: tuple[tuple[int, int], ...]
    source: str


def end_of_turn_ids(tokenizer: Any, generation_eos: int | Sequence[int] | None) -> set[int]:
    """The ids at which the target stops: the tokenizer's EOS and eos_token_id of the generation config."""
    listed = [generation_eos] if isinstance(generation_eos, int) else list(generation_eos or [])
    return {*listed, *([] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id])}


def target_end_ids(config: TargetConfig, tokenizer: Any) -> set[int]:
    """end_of_turn_ids of a target's tokenizer and its generation config, which is optional."""
    from transformers import GenerationConfig

    try:
        stops = GenerationConfig.from_pretrained(config.path, revision=config.revision).eos_token_id
    except OSError:
        stops = None
    return end_of_turn_ids(tokenizer, stops)


class Chat:
    """Renders conversations and tokenises the renders; end_ids are the target's end-of-turn tokens.

    Raises UserError for a tokenizer without character offsets.
    """

    def __init__(self, tokenizer: Any, end_ids: Collection[int], tally: Tally) -> None:
        self.tokenizer = tokenizer
        self.end_ids = frozenset(end_ids)
        self.tally = tally
        self.name = getattr(tokenizer, "name_or_path", "") or "the tokenizer"
        if not getattr(tokenizer, "is_fast", False):
            raise UserError(
                f"{self.name}: {type(tokenizer).__name__} is a slow tokenizer, which cannot say which characters a "
                f"token covers; use a checkpoint with tokenizer.json"
            )
        self.special_ids = frozenset(tokenizer.all_special_ids) | {
            number for number, token in tokenizer.added_tokens_decoder.items() if token.special
        }
        # A copy without the last step of tokenisation, which only adds special tokens and trims blanks off the offsets.
        self.backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
        self.backend.post_processor = None
        self.backend.no_truncation()
        self.backend.no_padding()

    def render(self, conversation: Conversation, supervise_all: bool = False) -> list[Rendered]:
        """The conversation's rows: one, or one per assistant turn when the template rewrites earlier text.

        supervise_all gives one row whose only span is the whole text. Raises UnusableRow with the template's own
        message when the template refuses the conversation, UserError when there is no template or it is broken.
        """
        if not self.tokenizer.chat_template:
            raise UserError(
                f"{self.name}: the tokenizer has no chat template; name one with target.chat_template: FILE.jinja "
                f"({SHIPPED_TEMPLATE} ships for Vicuna targets)"
            )
        if supervise_all:
            whole = self._text(conversation, len(conversation.messages), False)
            return [self._rendered(whole, [(0, len(whole))], conversation.place)]
        for _ in range(ATTEMPTS):
            turns, is_stable = self._render_turns(conversation)
            if is_stable:
                break
        else:
            raise UnusableRow("the template renders differently on each call", "two renders of one conversation differ")
        whole = turns[-1][0]
        if all(whole.startswith(text) for text, _ in turns):
            return [self._rendered(whole, [span for _, span in turns], conversation.place)]
        return [
            self._rendered(text, [span], f"{conversation.place}, answer {number}")
            for number, (text, span) in enumerate(turns, start=1)
        ]

    def encode(self, rendered: Sequence[Rendered]) -> list[Row]:
        """The renders as tokens; one call per batch, which the tokenizer spreads over its threads."""
        encodings = self.backend.encode_batch([row.text for row in rendered], add_special_tokens=False)
        return [self._mark(row, encoding) for row, encoding in zip(rendered, encodings, strict=True)]

    def _render_turns(self, conversation: Conversation) -> tuple[list[tuple[str, tuple[int, int]]], bool]:
        """For each assistant turn the render that ends with it and its span there; False if the clock moved between."""
        turns = []
        is_plain = True
        for index, message in enumerate(conversation.messages):
            if message["role"] == "assistant":
                prompt = self._text(conversation, index, True)
                text = self._text(conversation, index + 1, False)
                is_plain = is_plain and text.startswith(prompt)
                turns.append((prompt, text, index))
        is_plain = is_plain and all(turns[-1][1].startswith(text) for _, text, _ in turns)
        if not is_plain and self._text(conversation, turns[0][2], True) != turns[0][0]:
            return [], False  # the first render, made again after the last: another date or time by now
        return [
            (text, (self._border(conversation, prompt, text, index), len(text))) for prompt, text, index in turns
        ], True

    def _border(self, conversation: Conversation, prompt: str, text: str, index: int) -> int:
        """Where the answer begins in text: behind the prompt, or behind what both share of the generation prompt.

        A generation prompt that opens '<think>' is no prefix of an answer that was stored without thinking.
        """
        if text.startswith(prompt):
            return len(prompt)
        history = self._text(conversation, index, False)
        border = common_start(prompt, text)
        if border <= len(history):
            sentence = f"turn {index + 1}: the text before the answer is another one once the answer is there"
            raise UnusableRow("the template rewrites what stands before an answer", sentence)
        self.tally.leave_out("the generation prompt's last part is not in the render of the answer", conversation.place)
        return border

    def _text(self, conversation: Conversation, end: int, add_generation_prompt: bool) -> str:
        messages: list[Message] = list(conversation.messages[:end])
        try:
            text = self.tokenizer.apply_chat_template(
                messages, tools=conversation.tools, tokenize=False, add_generation_prompt=add_generation_prompt
            )
        except TemplateSyntaxError as error:
            raise UserError(f"{self.name}: chat template: line {error.lineno}: {error.message}") from error
        except (TemplateError, TypeError, ValueError, ArithmeticError, LookupError) as error:
            message = (str(error) or type(error).__name__).splitlines()[0]
            raise UnusableRow(f"the chat template refuses it: {message[:120]}", "") from error
        return str(text)

    def _rendered(self, text: str, spans: list[tuple[int, int]], source: str) -> Rendered:
        if LONE_SURROGATE.search(text):  # half of a UTF-16 pair, common in scraped text; no tokenizer takes it
            text = LONE_SURROGATE.sub("\N{REPLACEMENT CHARACTER}", text)
            self.tally.mend("half of a surrogate pair replaced", source)
        return Rendered(text, tuple(spans), source)

    def _mark(self, rendered: Rendered, encoding: Encoding) -> Row:
        ids = array("i", encoding.ids)
        turns = array("i", bytes(ids.itemsize * len(ids)))
        offsets = encoding.offsets
        starts, ends = [start for start, _ in offsets], [end for _, end in offsets]
        for number, (start, end) in enumerate(rendered.spans, start=1):
            first = bisect_left(starts, start)
            if first > 0 and ends[first - 1] > start:
                self.tally.leave_out("a token straddles prompt and answer", rendered.source)
            stop = self._end_of_turn(ids, first, bisect_right(ends, end), rendered.source)
            turns[first:stop] = array("i", [number]) * (stop - first)
        return Row(ids, turns, rendered.source)

    def _end_of_turn(self, ids: "array[int]", first: int, stop: int, source: str) -> int:
        """One past the first end-of-turn token in [first, stop); without one past the last special token, or stop."""
        for position in range(first, stop):
            if ids[position] in self.end_ids:
                return position + 1
        self.tally.leave_out("the answer's end is none of the target's end-of-turn tokens", source)
        return next((at + 1 for at in range(stop - 1, first - 1, -1) if ids[at] in self.special_ids), stop)


def common_start(first: str, second: str) -> int:
    """The number of characters that both texts begin with."""
    pairs = zip(first, second, strict=False)
    return next((at for at, (one, other) in enumerate(pairs) if one != other), min(len(first), len(second)))


def whole_row(row: Row) -> Row:
    """The row with every token but the first in turn 1: how a target is trained from scratch."""
    return Row(row.input_ids, array("i", [0] + [1] * (len(row.input_ids) - 1))[: len(row.input_ids)], row.source)


def from_token_row(row: TokenRow, num_ids: int) -> Row:
    """A pretokenised row, each run of ones in its mask a turn; UserError for an id the target's vocabulary lacks."""
    largest = max(row.input_ids, default=0)
    if largest >= num_ids or min(row.input_ids, default=0) < 0:
        raise UserError(
            f"{row.place}: token id {largest:,} is outside the target's vocabulary ({num_ids:,}); "
            f"these rows were made with another tokenizer"
        )
    turns, number = array("i"), 0
    for value, run in groupby(row.loss_mask):
        number += value
        turns.extend(array("i", [number * value]) * len(list(run)))
    return Row(array("i", row.input_ids), turns, row.place)
