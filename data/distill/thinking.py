"""Where an answer's thinking stands: told apart from the content, and put where the target's chat template has it."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from jinja2 import TemplateError

from data.distill.answer import Answer
from data.shapes import Message, UnusableRow
from model.errors import UserError

OPEN, CLOSE = "<think>", "</think>"
PROBE_THOUGHT, PROBE_CONTENT = "thoughtprobe", "contentprobe"


class Thinking:
    """Reads and places thinking as one tokenizer's chat template does."""

    def __init__(self, tokenizer: Any, end_ids: set[int], template_arguments: Mapping[str, Any] | None = None) -> None:
        """end_ids are the target's end-of-turn tokens, template_arguments what its server renders prompts with.

        UserError for a tokenizer without chat template.
        """
        self.tokenizer = tokenizer
        self.template_arguments = dict(template_arguments or {})
        self.end_ids = end_ids
        if not getattr(tokenizer, "chat_template", None):
            name = getattr(tokenizer, "name_or_path", "") or "the tokenizer"
            raise UserError(f"{name}: the tokenizer has no chat template; name one with target.chat_template")
        self._place = self._find_place()
        question: list[Message] = [{"role": "user", "content": "?"}]
        self.is_opened = self.prompt(question).rstrip().endswith(OPEN)

    def read(self, answer: Answer) -> Answer:
        """The answer with thinking in tags told apart from its content, where the prompt or the answer begins it.

        A closing tag in another answer is part of its content. Blank thinking that a server sent is none, unless the
        prompt opens it: then the target has closed it at once.
        """
        text = answer.content
        if _is_blank(answer) and (not self.is_opened or CLOSE in text):
            answer = replace(answer, reasoning=None)
        begins = text.lstrip().startswith(OPEN)
        if answer.reasoning is not None or not (begins or self.is_opened):
            return answer
        thought, closed, content = text.partition(CLOSE)
        if not closed and not answer.is_cut:
            return answer
        return replace(answer, reasoning=thought.partition(OPEN)[2] if begins else thought, content=content, raw=text)

    def message(self, answer: Answer) -> Message:
        """The answer as a turn of the conversation, its thinking where the template looks for it."""
        if not answer.reasoning or _is_blank(answer):
            return {"role": "assistant", "content": answer.content}
        if self._place == "field" or self._place is None:
            content = {"role": "assistant", "content": answer.content.lstrip("\n")}
            return content if self._place is None else {**content, "reasoning_content": answer.reasoning.strip("\n")}
        if answer.raw is not None:
            begins = answer.raw.lstrip().startswith(OPEN)
            return {"role": "assistant", "content": answer.raw if begins else f"{OPEN}\n{answer.raw}"}
        return {"role": "assistant", "content": self._spelt(answer, opened=False)}

    def spelt(self, answer: Answer) -> str:
        """The answer as the target wrote it after the generation prompt, which may have opened the tag.

        Where a server told the thinking apart, its blanks are lost and stand here as they usually are.
        """
        return self._spelt(answer, self.is_opened) if answer.raw is None else answer.raw

    def _spelt(self, answer: Answer, opened: bool) -> str:
        if answer.reasoning is None or (_is_blank(answer) and not opened):
            return answer.content
        start = "" if opened else f"{OPEN}\n"
        thought = answer.reasoning.strip("\n")
        if answer.is_cut and not answer.content:
            return f"{start}{thought}"
        content = answer.content.lstrip("\n")
        return f"{start}{thought}\n{CLOSE}\n\n{content}"

    def gives_back(self, messages: Sequence[Message], answer: Answer) -> bool:
        """Whether the template renders the answer, the last of the messages, as the target read and wrote it.

        Training renders text without the server's arguments, so here it is rendered without them too.
        """
        text = self._rendered(messages, False, {})
        return text.startswith(self.prompt(messages[:-1]) + self.spelt(answer))

    def prompt(self, messages: Sequence[Message]) -> str:
        """What the target reads before it answers; UnusableRow when the template refuses the conversation."""
        return self._rendered(messages, True)

    def prompt_ids(self, messages: Sequence[Message]) -> list[int]:
        """The tokens of `prompt`."""
        return self.ids(self.prompt(messages))

    def ids(self, text: str) -> list[int]:
        """The tokens of a text as it is."""
        found: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return found

    def end_id(self) -> int | None:
        """The token with which the template ends an answer; null where none of the target's stands there."""
        messages: list[Message] = [{"role": "user", "content": "?"}, {"role": "assistant", "content": PROBE_CONTENT}]
        text = self._rendered(messages, False)
        tail = self.ids(text[text.rfind(PROBE_CONTENT) + len(PROBE_CONTENT) :])
        return next((token for token in tail if token in self.end_ids), self.tokenizer.eos_token_id)

    def _find_place(self) -> str | None:
        """'field' (reasoning_content), 'content' (in tags), or None where the template shows neither."""
        answer = Answer(PROBE_CONTENT, "stop", 0, reasoning=PROBE_THOUGHT)
        forms: dict[str, Message] = {
            "field": {"role": "assistant", "content": PROBE_CONTENT, "reasoning_content": PROBE_THOUGHT},
            "content": {"role": "assistant", "content": self._spelt(answer, opened=False)},
        }
        for name, message in forms.items():
            messages = [{"role": "user", "content": "?"}, message]
            try:
                text = self._rendered(messages, False)
            except UnusableRow:
                continue
            if PROBE_THOUGHT in text:
                return name
        return None

    def _rendered(
        self, messages: Sequence[Message], opens_answer: bool, arguments: Mapping[str, Any] | None = None
    ) -> str:
        given = {**(self.template_arguments if arguments is None else arguments), "tokenize": False}
        try:
            text = self.tokenizer.apply_chat_template(
                list(messages), **{**given, "add_generation_prompt": opens_answer}
            )
        except (TemplateError, TypeError, ValueError, LookupError) as error:
            message = (str(error) or type(error).__name__).splitlines()[0]
            raise UnusableRow(f"the chat template refuses it: {message[:120]}", "") from error
        return str(text)


def _is_blank(answer: Answer) -> bool:
    """Whether a server sent thinking with nothing in it."""
    return answer.raw is None and answer.reasoning is not None and not answer.reasoning.strip()
