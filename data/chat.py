"""Conversations as tokens with a loss mask, made with the tokenizer's own chat template.

The template shows where an answer is when it renders prefixes of the conversation. For the answer
at messages[i]:

    prompt = render(messages[:i], add_generation_prompt=True)    what the target reads
    text   = render(messages[:i + 1])                            what it has read and written

What `text` adds to `prompt` is learnt, up to its first end-of-turn token. One row carries all
answers if every `text` is a prefix of the last one. Otherwise, for example if the template drops
earlier thinking, each answer has a row of its own.

A template may leave out what a message says. So `Chat` looks up each text of the row (contents,
thoughts, the names and arguments of calls, tools) in the rendered text (said.py). If one is lost,
it tries the other forms that templates read (forms.py). If no form keeps all texts, the
conversation ends before the lost one, and is left out if no answer remains.
"""

import json
import re
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from os.path import commonprefix
from typing import Any, NamedTuple

from jinja2 import TemplateSyntaxError
from tokenizers import Tokenizer

from aerie.configs.errors import UserError, warn_once
from aerie.data.conversations import Conversation, Tally
from aerie.data.forms import (
    INVENTED,
    PROBE_ANSWER,
    PROBE_CALL,
    PROBE_QUESTION,
    PROBE_RESULT,
    Forms,
    content_text,
)
from aerie.data.rendering import REFUSALS, bound_to
from aerie.data.said import (
    MARK,
    SHORT_TEXT,
    LostText,
    UnusableMessage,
    find_said,
    require_said,
    said_before,
    said_by,
    with_marks,
    writes_python,
)
from aerie.data.shapes import Message
from aerie.data.values import UnusableRow
from aerie.model.storage import SHIPPED_TEMPLATE, first_line

# gpt-oss's harmony format: a channel's name is ordinary text between two special tokens
FINAL = re.compile(
    r"<\|channel\|>final.*?<\|message\|>(.*?)(?:<\|(?:end|return|call|start|channel)\|>|$)",
    re.DOTALL,
)


@dataclass(frozen=True)
class TokenRow:
    """A conversation's tokens with their loss mask."""

    input_ids: Sequence[int]  # [T]
    # [T], the loss mask: j in the j-th answer and its end-of-turn token, 0 where nothing is learnt
    turn_ids: Sequence[int]
    source: str  # 'file: row n'

    @property
    def num_supervised(self) -> int:
        return sum(1 for turn in self.turn_ids if turn)

    @property
    def num_slots(self) -> int:
        """How many slots p learn: those whose tokens p + 1 and p + 2 belong to one turn.

        Slot p holds the feature of token p, and token p + 1 (docs/words.md).
        """
        return sum(1 for first, second in pairwise(self.turn_ids[1:]) if first == second != 0)


class Span(NamedTuple):
    """Where an answer is in a rendered text, in characters."""

    start: int
    said_end: int  # after the message's last text; the template wrote what follows
    end: int


class Rendered(NamedTuple):
    """A row's text, before it is tokenised."""

    text: str
    answers: list[Span]  # ascending
    source: str


def shared_start(first: str, second: str) -> int:
    """How many characters two texts share from their start on."""
    return len(first) if second.startswith(first) else len(commonprefix([first, second]))  # noqa: RUF071


def apply_template(tokenizer: Any, messages: Sequence[Message], **settings: Any) -> Any:
    """The messages rendered by the tokenizer's chat template, as text or ids.

    UnusableRow if the template refuses these messages; UserError if it cannot render any.
    """
    name = tokenizer.name_or_path or "the tokenizer"
    if not tokenizer.chat_template:
        raise UserError(
            f"{name}: the tokenizer has no chat template; "
            f"name one with target.chat_template, such as {SHIPPED_TEMPLATE} for Vicuna"
        )
    try:
        template = tokenizer.get_chat_template(tools=settings.get("tools"))
        bound = bound_to(tokenizer).settings(template)
        settings = {"tokenize": False, "return_dict": False, **bound, **settings}
        text = tokenizer.apply_chat_template(list(messages), **settings)
        if isinstance(text, str):
            text.encode()
            if any(number in text for number in _invented_ids(messages)):
                raise UnusableRow("the template writes the ids of calls, but the row has none", "")
        return text
    except UnicodeEncodeError as error:
        raise UnusableRow("a text has half of a surrogate pair", "") from error
    except TemplateSyntaxError as error:
        raise UserError(
            f"{name}: the chat template's line {error.lineno}: {error.message}"
        ) from error
    except REFUSALS as error:
        raise UnusableRow(
            f"the chat template refuses the messages: {first_line(error)[:120]}", ""
        ) from error


def _invented_ids(messages: Sequence[Message]) -> Iterator[str]:
    for message in messages:
        for call in message.get("tool_calls") or ():
            if str(call.get("id") or "").startswith(INVENTED):
                yield call["id"]


def answer_text(tokenizer: Any, ids: Sequence[int]) -> str:
    """The text that a reader sees, without special tokens; of channels, only `final` messages."""
    if "<|channel|>" in tokenizer.get_added_vocab():
        text = tokenizer.decode(ids)
        if "<|channel|>" in text:
            return "".join(FINAL.findall(text))
    return str(tokenizer.decode(ids, skip_special_tokens=True))


def render_prompt(tokenizer: Any, conversation: Conversation, **settings: Any) -> str:
    """The text that the target reads before it answers, in the first form that loses nothing.

    If there is none: LostText if the template loses a text, UnusableRow if it refuses the messages.
    """

    def render(formed: Conversation) -> str:
        messages = formed.messages
        text = apply_template(
            tokenizer, messages, tools=formed.tools, **settings, add_generation_prompt=True
        )
        require_said(said_before(formed, range(len(messages))), text)
        return str(text)

    return Forms(render).first(render, conversation)[1]


def encode_prompt(
    tokenizer: Any, messages: Sequence[Message], tools: list[Any] | None = None
) -> list[int]:
    """The token ids that the target reads before it answers.

    Warns once if the template leaves out a text of the prompt in every form.
    """
    try:
        text = render_prompt(tokenizer, Conversation("", tuple(messages), tools))
    except LostText as error:
        warn_once(f"{tokenizer.name_or_path}: {error.reason}")
        text = apply_template(tokenizer, messages, tools=tools, add_generation_prompt=True)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


# --- conversations as tokens ----------------------------------------------------------------------


class Chat:
    """Renders and tokenises conversations; end_ids are the target's end-of-turn tokens."""

    def __init__(
        self,
        tokenizer: Any,
        end_ids: Collection[int],
        tally: Tally,
        template_arguments: Mapping[str, Any] | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.template_arguments = dict(template_arguments or {})
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
        self.special_texts = [token.content for _, token in added if token.special]
        texts = [tokenizer.decode([number]) for number in sorted(self.end_ids)]
        self.end_texts = [text for text in texts if text]  # an id of another tokenizer has no text
        # Without the post-processor, which adds special tokens and trims blanks off the offsets.
        self.backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
        self.backend.post_processor = None
        self.backend.no_truncation()
        self.backend.no_padding()
        self.forms = Forms(self._render)
        self.closer = cache(self._find_closer)

    # --- where the answers are ------------------------------------------------------------------

    def render(self, conversation: Conversation) -> list[Rendered]:
        """One text with all answers, or a text per answer if the template rewrites earlier text.

        The conversation has at least one answer. It ends before the first message whose text the
        template loses in every form; UnusableRow if no answer is left.
        """
        try:
            form, (rendered, notes) = self.forms.first(self._render, conversation)
        except UnusableRow as error:
            return self._render_before(error, conversation)
        if form:
            self.tally.add("mended", form, conversation.source)
        for note in notes:
            self.tally.add("left out", note, conversation.source)
        calls_tools = bool(conversation.messages[-1].get("tool_calls"))
        return [self._closed(row, calls_tools) for row in rendered]

    def _render_before(self, error: UnusableRow, conversation: Conversation) -> list[Rendered]:
        """Renders up to the last answer before the lost text; raises `error` if there is none."""
        lost = max(getattr(error, "index", 0), 0)
        ends = [
            index
            for index, message in enumerate(conversation.messages[:lost], start=1)
            if message["role"] == "assistant" and index - 1 not in conversation.context_only
        ]
        if not ends:
            raise error
        self.tally.add("left out", error.reason, conversation.source, error.sentence)
        return self.render(conversation._replace(messages=conversation.messages[: ends[-1]]))

    def _render(self, conversation: Conversation) -> tuple[list[Rendered], list[str]]:
        """The texts, and notes on what they leave out."""
        messages = conversation.messages
        texts, spans, notes = list[str](), list[Span](), list[str]()
        is_one_text = True
        first = 0  # the first message that is not yet looked up in the text
        for index, message in enumerate(messages):
            if message["role"] != "assistant" or index in conversation.context_only:
                continue
            text, start, note = self._with_answer(conversation, index)
            notes += [note] if note else []
            before = texts[-1] if texts else ""
            if not text.startswith(before):
                is_one_text = False
                first = 0
                before = ""
            context = said_before(conversation, range(first, index))
            require_said(context, text[len(before) : start])
            said = list(said_by(message, index))
            said_end = start + require_said(said, text[start:])
            if len(said) > 1 and any(len(item.text.strip()) < SHORT_TEXT for item in said):
                self._require_short(conversation, index)
            if any(end in item.text for item in said for end in self.end_texts):
                notes.append("text after an end-of-turn token that an answer spells out")
                said_end = start
            if writes_python(message, text[start:]):
                raise UnusableMessage(
                    "the template writes the arguments of a call as Python", index
                )
            texts.append(text)
            spans.append(Span(start, said_end, len(text)))
            first = index + 1
        if is_one_text:
            return [Rendered(texts[-1], spans, conversation.source)], notes
        return [
            Rendered(text, [span], f"{conversation.source}, answer {number}")
            for number, (text, span) in enumerate(zip(texts, spans, strict=True), start=1)
        ], notes

    def _require_short(self, conversation: Conversation, index: int) -> None:
        """LostText if a short text of the answer is lost.

        The text might have been found in the template's own words ("id", "to"). So each thought,
        content and value of an argument gets a mark, which must stand in the rendered text.
        """
        messages = list(conversation.messages)
        messages[index], marked = with_marks(messages[index], index)
        answer = conversation._replace(messages=tuple(messages))
        text, start, _ = self._with_answer(answer, index)
        for mark, item in marked.items():
            if mark not in text[start:] and json.dumps(mark)[1:-1] not in text[start:]:
                raise LostText(item)

    def text(
        self, conversation: Conversation, end: int, add_generation_prompt: bool = False
    ) -> str:
        """The first `end` messages as the template renders them."""
        return str(
            apply_template(
                self.tokenizer,
                conversation.messages[:end],
                tools=conversation.tools,
                **self.template_arguments,
                add_generation_prompt=add_generation_prompt,
            )
        )

    def _with_answer(self, conversation: Conversation, index: int) -> tuple[str, int, str | None]:
        """The text up to the answer messages[index], where the answer begins, a note on a loss."""
        prompt = self.text(conversation, index, add_generation_prompt=True)
        text = self.text(conversation, index + 1)
        start = shared_start(prompt, text)
        if start == len(prompt):
            return text, start, None
        before_generation_prompt = self.text(conversation, index)
        if start <= len(before_generation_prompt):
            return self._with_rewritten_answer(conversation, index, prompt, text)
        # The prompt may open '<think>' for an answer without thinking. The answer then begins where
        # the two texts differ, but not inside a token: '<think>' and '<tool_call>' share '<t'.
        for special in self.special_texts:
            begin = text.find(special, max(0, start - len(special) + 1), start + len(special) - 1)
            start = begin if 0 <= begin < start else start
        return text, start, "the end of the generation prompt, which the rendered answer lacks"

    def _with_rewritten_answer(
        self, conversation: Conversation, index: int, prompt: str, text: str
    ) -> tuple[str, int, str | None]:
        """As _with_answer, for a template that rewrites earlier turns once it has the answer.

        gpt-oss drops the thoughts of calls as soon as an answer follows. The target has read the
        prompt, so the rendered answer is put after the prompt.
        """
        opening = prompt.removeprefix(self.text(conversation, index))
        message = conversation.messages[index]
        begin = text.rfind(opening) if 0 < len(opening) < len(prompt) else -1
        while begin >= 0:
            answer = text[begin + len(opening) :]
            if not find_said(said_by(message), answer)[0]:
                if self._joins_answers(conversation, index, opening, text[begin:].count(opening)):
                    raise UnusableMessage("the template joins an answer with an earlier one", index)
                return prompt + answer, len(prompt), None
            begin = text.rfind(opening, 0, begin)
        raise UnusableMessage("the template rewrites what stands before an answer", index)

    def _joins_answers(
        self, conversation: Conversation, index: int, opening: str, num_openings: int
    ) -> bool:
        """Whether an earlier answer stands after one of the last openings (as Gemma 4 does).

        A mark at the end of each earlier answer shows where it stands.
        """
        marked = tuple(
            message | {"content": content_text(message) + MARK}
            if message["role"] == "assistant" and content_text(message)
            else message
            for message in conversation.messages[:index]
        )
        messages = (*marked, *conversation.messages[index:])
        text = self.text(conversation._replace(messages=messages), index + 1)
        return any(MARK in part for part in text.split(opening)[-num_openings:])

    # --- how a turn ends ------------------------------------------------------------------------

    def _closed(self, rendered: Rendered, is_call: bool) -> Rendered:
        """Adds the last turn's end-of-turn token if the template leaves it to the next message."""
        start, said_end, end = rendered.answers[-1]
        closer = self.closer(is_call)
        if not closer or any(text in rendered.text[said_end:] for text in self.end_texts):
            return rendered
        last = Span(start, said_end, end + len(closer))
        return rendered._replace(
            text=rendered.text + closer, answers=[*rendered.answers[:-1], last]
        )

    def _find_closer(self, is_call: bool) -> str:
        """The end-of-turn token that is the next message's header (GLM), or ""."""
        turns = [PROBE_CALL, PROBE_RESULT] if is_call else [PROBE_ANSWER, PROBE_QUESTION]

        def find(talk: Conversation) -> str:
            start = len(self.text(talk, 1, add_generation_prompt=True))
            before = self.text(talk, 2)
            after = self.text(talk, 3)
            has_end = any(text in before[start:] for text in self.end_texts)
            if has_end or not after.startswith(before):
                return ""
            header = after.removeprefix(before).lstrip()
            return next((text for text in self.end_texts if header.startswith(text)), "")

        with suppress(UnusableRow):
            return self.forms.first(find, Conversation("", (PROBE_QUESTION, *turns)))[1]
        return ""

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
        for number, (start, said_end, end) in enumerate(rendered.answers, start=1):
            first = bisect_left(starts, start)
            stop = bisect_right(ends, end)  # a token that straddles the end is not the answer's
            if first > 0 and ends[first - 1] > start:  # the token before `first` is not learnt
                reason = "a token that straddles prompt and answer"
                self.tally.add("left out", reason, rendered.source)
            said = bisect_left(ends, said_end)
            last = self._end_of_turn(ids, range(first, stop), said, rendered.source)
            turn_ids[first : last + 1] = array("i", [number]) * (last + 1 - first)
        return TokenRow(ids, turn_ids, rendered.source)

    def _end_of_turn(self, ids: Sequence[int], answer: range, said: int, source: str) -> int:
        """The position of an answer's end-of-turn token, the last one that is learnt.

        said: the position of the last token that holds a text of the answer.
        """
        # Begins at the last text: a thought before it may have an end-of-turn token of its own.
        for position in range(max(said, answer.start), answer.stop):
            if ids[position] in self.end_ids:
                return position
        # The next message's header may end the turn.
        if answer.stop < len(ids) and ids[answer.stop] in self.end_ids:
            return answer.stop
        reason = "the end of an answer without an end-of-turn token of the target"
        self.tally.add("left out", reason, source)
        # Base models have no such token: learn up to the first special token after the text.
        for position in range(said, answer.stop):
            if ids[position] in self.special_ids:
                return position
        return answer.stop - 1
