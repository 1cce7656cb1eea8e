"""Conversations as tokens with a loss mask, made with the tokenizer's own chat template.

The template shows where an answer is when it renders prefixes of the conversation. For the answer
at messages[i]:

    prompt = render(messages[:i], add_generation_prompt=True)    what the target reads
    text   = render(messages[:i + 1])                            what it has read and written

What `text` adds to `prompt` is learnt, up to its first end-of-turn token. One row carries all
answers if every `text` is a prefix of the last one. Otherwise (a template drops earlier thinking)
each answer has a row of its own.
"""

import re
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise
from os.path import commonprefix
from typing import Any, NamedTuple

from jinja2 import TemplateError, TemplateSyntaxError
from tokenizers import Tokenizer

from aerie.configs.errors import UserError
from aerie.data.conversations import Conversation, Message, Tally, UnusableRow
from aerie.model.storage import SHIPPED_TEMPLATE, first_line

# gpt-oss's harmony format: a channel's name is ordinary text between two special tokens
FINAL = re.compile(
    r"<\|channel\|>final.*?<\|message\|>(.*?)(?:<\|(?:end|return|call|start|channel)\|>|$)",
    re.DOTALL,
)


@dataclass(frozen=True)
class TokenRow:
    input_ids: Sequence[int]
    # The loss mask, per token: j in the j-th answer and its end-of-turn token; 0: not learnt.
    turn_ids: Sequence[int]
    source: str  # 'file: row n'

    @property
    def num_supervised(self) -> int:
        return sum(1 for turn in self.turn_ids if turn)

    @property
    def num_slots(self) -> int:
        """The number of slots p that learn: tokens p + 1 and p + 2 are of one turn.

        A slot p has the feature of token p and the token p + 1 (docs/words.md).
        """
        return sum(1 for first, second in pairwise(self.turn_ids[1:]) if first == second != 0)


class Rendered(NamedTuple):
    """A row's text, before it is tokenised."""

    text: str
    answers: list[tuple[int, int]]  # ascending (start, end) in characters; the end is exclusive
    source: str


def shared_start(first: str, second: str) -> int:
    """How many characters two texts share from their start on."""
    return len(first) if second.startswith(first) else len(commonprefix([first, second]))  # noqa: RUF071


def apply_template(tokenizer: Any, messages: Sequence[Message], **settings: Any) -> Any:
    """The messages rendered by the tokenizer's chat template, as text or ids.

    UnusableRow if the template refuses these messages; UserError if it can render none.
    """
    name = tokenizer.name_or_path or "the tokenizer"
    if not tokenizer.chat_template:
        raise UserError(
            f"{name}: the tokenizer has no chat template; "
            f"name one with target.chat_template, such as {SHIPPED_TEMPLATE} for Vicuna"
        )
    settings = {"tokenize": False, "return_dict": False, **settings}
    try:
        return tokenizer.apply_chat_template(list(messages), **settings)
    except TemplateSyntaxError as error:
        raise UserError(f"{name}: chat template: line {error.lineno}: {error.message}") from error
    except (TemplateError, TypeError, ValueError, ArithmeticError, LookupError) as error:
        raise UnusableRow(f"the chat template refuses it: {first_line(error)[:120]}", "") from error


def answer_text(tokenizer: Any, ids: Sequence[int]) -> str:
    """The text for a reader: without special tokens; with channels, only the `final` messages."""
    if "<|channel|>" in tokenizer.get_added_vocab():
        text = tokenizer.decode(ids)
        if "<|channel|>" in text:
            return "".join(FINAL.findall(text))
    return str(tokenizer.decode(ids, skip_special_tokens=True))


class Chat:
    """Renders and tokenises conversations; end_ids are the target's end-of-turn tokens."""

    def __init__(self, tokenizer: Any, end_ids: Collection[int], tally: Tally) -> None:
        self.tokenizer = tokenizer
        self.end_ids = frozenset(end_ids)
        self.tally = tally
        if not getattr(tokenizer, "is_fast", False):
            raise UserError(
                f"{tokenizer.name_or_path}: a slow tokenizer has no character offsets; "
                "use one with tokenizer.json"
            )
        added = tokenizer.added_tokens_decoder.items()
        self.special_ids = {number for number, token in added if token.special}
        self.special_ids.update(tokenizer.all_special_ids)
        # Without the post-processor, which adds special tokens and trims blanks off the offsets.
        self.backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
        self.backend.post_processor = None
        self.backend.no_truncation()
        self.backend.no_padding()

    # --- where the answers are ------------------------------------------------------------------

    def render(self, conversation: Conversation) -> list[Rendered]:
        """One text with all answers, or a text per answer if the template rewrites earlier text.

        The conversation has at least one answer.
        """
        texts, spans = list[str](), list[tuple[int, int]]()
        for index, message in enumerate(conversation.messages):
            if message["role"] == "assistant":
                text = self.text(conversation, index + 1)
                texts.append(text)
                spans.append((self._answer_start(conversation, index, text), len(text)))
        if all(texts[-1].startswith(text) for text in texts):
            return [Rendered(texts[-1], spans, conversation.source)]
        return [
            Rendered(text, [span], f"{conversation.source}, answer {number}")
            for number, (text, span) in enumerate(zip(texts, spans, strict=True), start=1)
        ]

    def text(
        self, conversation: Conversation, end: int, add_generation_prompt: bool = False
    ) -> str:
        """The first `end` messages as the template renders them."""
        return str(
            apply_template(
                self.tokenizer,
                conversation.messages[:end],
                tools=conversation.tools,
                add_generation_prompt=add_generation_prompt,
            )
        )

    def _answer_start(self, conversation: Conversation, index: int, text: str) -> int:
        """Where the answer messages[index] begins in `text`, the conversation up to its end."""
        prompt = self.text(conversation, index, add_generation_prompt=True)
        start = shared_start(prompt, text)
        if start < len(prompt):
            # The prompt may open '<think>' for an answer without thinking, which then begins
            # where the two differ. That must be inside what the generation prompt adds.
            before_generation_prompt = self.text(conversation, index)
            if start <= len(before_generation_prompt):
                raise UnusableRow(
                    "the template rewrites what stands before an answer", f"message {index + 1}"
                )
            self.tally.add(
                "left out",
                "the generation prompt's last part is not in the answer's render",
                conversation.source,
            )
        return start

    # --- which tokens they are ------------------------------------------------------------------

    def encode(self, rendered: Sequence[Rendered]) -> list[TokenRow]:
        """Each text as token ids [T] and turn ids [T]."""
        texts = [row.text for row in rendered]
        encodings = self.backend.encode_batch(texts, add_special_tokens=False)
        return [self._token_row(*pair) for pair in zip(rendered, encodings, strict=True)]

    def _token_row(self, rendered: Rendered, encoding: Any) -> TokenRow:
        ids = array("i", encoding.ids)
        turn_ids = array("i", [0]) * len(ids)
        starts = [start for start, _ in encoding.offsets]
        ends = [end for _, end in encoding.offsets]
        for number, (start, end) in enumerate(rendered.answers, start=1):
            first = bisect_left(starts, start)
            stop = bisect_right(ends, end)  # a token that straddles the end is not the answer's
            if first > 0 and ends[first - 1] > start:  # the token before `first` is not learnt
                reason = "a token straddles prompt and answer"
                self.tally.add("left out", reason, rendered.source)
            last = self._end_of_turn(ids, range(first, stop), rendered.source)
            turn_ids[first : last + 1] = array("i", [number]) * (last + 1 - first)
        return TokenRow(ids, turn_ids, rendered.source)

    def _end_of_turn(self, ids: Sequence[int], answer: range, source: str) -> int:
        """The position of an answer's first end-of-turn token, the last one that is learnt."""
        for position in answer:
            if ids[position] in self.end_ids:
                return position
        reason = "the answer's end is none of the target's end-of-turn tokens"
        self.tally.add("left out", reason, source)
        # As of base models: learnt up to the answer's last special token.
        for position in reversed(answer):
            if ids[position] in self.special_ids:
                return position
        return answer.stop - 1
