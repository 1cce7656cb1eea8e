"""Conversations as tokens with a loss mask, made by rendering prefixes with the tokenizer's own chat template.

For the answer at messages[i], `prompt` = render(messages[:i], add_generation_prompt=True) and `text` =
render(messages[:i + 1]). What `text` adds to `prompt` is learnt, up to its first end-of-turn token. One row carries all
turns if every `text` is a prefix of the last one; otherwise (a template drops earlier thinking) each turn is a row.
"""

import re
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise
from os.path import commonprefix
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError
from tokenizers import Tokenizer

from aerie.configs.errors import LONE_SURROGATE, UserError
from aerie.data.conversations import Conversation, Message, Tally, UnusableRow
from aerie.model.storage import SHIPPED_TEMPLATE, first_line

# A row's text, its answers as ascending (start, end) in characters (end exclusive), and its source.
Rendered = tuple[str, list[tuple[int, int]], str]
# gpt-oss's harmony format: a channel's name is ordinary text between two special tokens
FINAL = re.compile(
    r"<\|channel\|>final.*?<\|message\|>(.*?)(?:<\|(?:end|return|call|start|channel)\|>|$)",
    re.DOTALL,
)


@dataclass(frozen=True)
class TokenRow:
    input_ids: Sequence[int]
    turn_ids: Sequence[
        int
    ]  # per token: j in the j-th answer and its end-of-turn token; 0: not learnt
    source: str  # 'file: row n'

    @property
    def num_supervised(self) -> int:
        return sum(1 for turn in self.turn_ids if turn)

    @property
    def num_slots(self) -> int:
        """The number of slots p that learn: tokens p + 1 and p + 2 are of one turn."""
        return sum(1 for first, second in pairwise(self.turn_ids[1:]) if first == second != 0)


def shared_start(first: str, second: str) -> int:
    """How many characters two texts share from their start on."""
    return len(first) if second.startswith(first) else len(commonprefix([first, second]))  # noqa: RUF071


def apply_template(tokenizer: Any, messages: Sequence[Message], **settings: Any) -> Any:
    """The messages rendered by the tokenizer's chat template, text or ids; UnusableRow if it refuses them."""
    name = tokenizer.name_or_path or "the tokenizer"
    if not tokenizer.chat_template:
        fix = f"name one with target.chat_template, such as {SHIPPED_TEMPLATE} for Vicuna"
        raise UserError(f"{name}: the tokenizer has no chat template; {fix}")
    try:
        return tokenizer.apply_chat_template(
            list(messages), **{"tokenize": False, "return_dict": False, **settings}
        )
    except TemplateSyntaxError as error:
        raise UserError(f"{name}: chat template: line {error.lineno}: {error.message}") from error
    except (
        TemplateError,
        TypeError,
        ValueError,
        ArithmeticError,
        LookupError,
        RecursionError,
    ) as error:
        raise UnusableRow(f"the chat template refuses it: {first_line(error)[:120]}", "") from error


def answer_text(tokenizer: Any, ids: Sequence[int]) -> str:
    """The text for a reader: without special tokens; if the answer has channels, only its `final` messages."""
    if "<|channel|>" in tokenizer.get_added_vocab() and "<|channel|>" in (
        text := tokenizer.decode(ids)
    ):
        return "".join(FINAL.findall(text))
    return str(tokenizer.decode(ids, skip_special_tokens=True))


class Chat:
    """Renders and tokenises conversations; end_ids are the target's end-of-turn tokens."""

    def __init__(self, tokenizer: Any, end_ids: Collection[int], tally: Tally) -> None:
        self.tokenizer, self.end_ids, self.tally = tokenizer, frozenset(end_ids), tally
        if not getattr(tokenizer, "is_fast", False):
            fault = "a slow tokenizer has no character offsets; use one with tokenizer.json"
            raise UserError(f"{tokenizer.name_or_path}: {fault}")
        added = tokenizer.added_tokens_decoder.items()
        self.special_ids = {
            *tokenizer.all_special_ids,
            *(number for number, token in added if token.special),
        }
        # Without the post-processor, which adds special tokens and trims blanks off the offsets.
        self.backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
        self.backend.post_processor = None
        self.backend.no_truncation()
        self.backend.no_padding()

    def render(self, conversation: Conversation, supervise_all: bool = False) -> list[Rendered]:
        """One text with the spans of its answers, or one text per answer if the template rewrites earlier text."""
        messages, source = conversation.messages, conversation.place
        if supervise_all:
            whole = self._text(conversation, len(messages), False)
            return [(whole, [(0, len(whole))], source)]
        answers = [
            index for index, message in enumerate(messages) if message["role"] == "assistant"
        ]
        spans, texts = (
            list[tuple[int, int]](),
            [self._text(conversation, index + 1, False) for index in answers],
        )
        for index, text in zip(answers, texts, strict=True):
            prompt = self._text(conversation, index, True)
            # The prompt may open '<think>' for an answer without thinking, which then begins where the two differ.
            start = shared_start(prompt, text)
            if start < len(prompt):
                if start <= len(self._text(conversation, index, False)):
                    raise UnusableRow(
                        "the template rewrites what stands before an answer", f"message {index + 1}"
                    )
                self.tally.add(
                    "left out",
                    "the generation prompt's last part is not in the answer's render",
                    source,
                )
            spans.append((start, len(text)))
        if all(texts[-1].startswith(text) for text in texts):
            return [(texts[-1], spans, source)]
        rows = enumerate(zip(texts, spans, strict=True), start=1)
        return [(text, [span], f"{source}, answer {number}") for number, (text, span) in rows]

    def encode(self, rendered: Sequence[Rendered]) -> list[TokenRow]:
        """Each text as token ids [T] and turn ids [T]."""
        rows = []
        # Half of a UTF-16 pair: no tokenizer takes it.
        texts = [LONE_SURROGATE.sub("\N{REPLACEMENT CHARACTER}", text) for text, _, _ in rendered]
        encodings = self.backend.encode_batch(texts, add_special_tokens=False)
        for (text, spans, source), whole, encoding in zip(rendered, texts, encodings, strict=True):
            if whole != text:
                self.tally.add("mended", "half of a surrogate pair replaced", source)
            ids = array("i", encoding.ids)
            turn_ids = array("i", bytes(ids.itemsize * len(ids)))  # zeros
            starts, ends = ([offsets[side] for offsets in encoding.offsets] for side in (0, 1))
            for number, (start, end) in enumerate(spans, start=1):
                first, stop = bisect_left(starts, start), bisect_right(ends, end)
                if first > 0 and ends[first - 1] > start:
                    self.tally.add("left out", "a token straddles prompt and answer", source)
                last = next((at for at in range(first, stop) if ids[at] in self.end_ids), None)
                if last is None:  # base models: up to the answer's last special token
                    self.tally.add(
                        "left out",
                        "the answer's end is none of the target's end-of-turn tokens",
                        source,
                    )
                    last = next(
                        (
                            at
                            for at in range(stop - 1, first - 1, -1)
                            if ids[at] in self.special_ids
                        ),
                        stop - 1,
                    )
                turn_ids[first : last + 1] = array("i", [number]) * (last + 1 - first)
            rows.append(TokenRow(ids, turn_ids, source))
        return rows

    def _text(self, conversation: Conversation, end: int, add_generation_prompt: bool) -> str:
        options = {"add_generation_prompt": add_generation_prompt, "tools": conversation.tools}
        return apply_template(self.tokenizer, conversation.messages[:end], **options)
