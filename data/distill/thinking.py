"""The chat template's part: prompts, where thinking stands, the target in this process, and rows to train on.

A row is text where the template gives the target's tokens back. Otherwise it is tokens: where ids came with any of the
answers, where an answer is cut (a template would end it), and where the template rewrites what the target wrote.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from jinja2 import TemplateError

from aerie.configs.errors import UserError
from aerie.data.conversations import Message, UnusableRow
from aerie.data.distill.answer import Answer, Outcome, Unanswered

OPEN, CLOSE = "<think>", "</think>"
PROBE_THOUGHT, PROBE_CONTENT = "thoughtprobe", "contentprobe"
QUESTION: Message = {"role": "user", "content": "?"}


class Thinking:
    """Reads and places thinking as one tokenizer's chat template does."""

    def __init__(self, tokenizer: Any, end_ids: set[int], template_arguments: Mapping[str, Any] | None = None) -> None:
        """end_ids are the target's end-of-turn tokens, template_arguments what its server renders prompts with.

        UserError for a tokenizer without chat template.
        """
        if not getattr(tokenizer, "chat_template", None):
            name = getattr(tokenizer, "name_or_path", "") or "the tokenizer"
            raise UserError(f"{name}: the tokenizer has no chat template; name one with target.chat_template")
        self.tokenizer, self.end_ids = tokenizer, end_ids
        self.template_arguments = dict(template_arguments or {})
        self.is_opened = self.prompt([QUESTION]).rstrip().endswith(OPEN)
        message = {"role": "assistant", "content": PROBE_CONTENT, "reasoning_content": PROBE_THOUGHT}
        self.shows_field = self._shows_thought(message)
        tagged = f"{OPEN}\n{PROBE_THOUGHT}\n{CLOSE}\n\n{PROBE_CONTENT}"
        self.shows_tags = not self.shows_field and self._shows_thought({"role": "assistant", "content": tagged})

    def _shows_thought(self, message: Message) -> bool:
        try:
            return PROBE_THOUGHT in self._render([QUESTION, message], False, self.template_arguments)
        except UnusableRow:
            return False

    def read(self, answer: Answer) -> Answer:
        """The answer with thinking in tags told apart from its content, where the prompt or the answer begins it.

        A closing tag in another answer is part of its content. Blank thinking that a server sent is none, unless the
        prompt opens it: then the target has closed it at once.
        """
        text = answer.content
        if _is_blank(answer) and (not self.is_opened or CLOSE in text):
            answer = replace(answer, reasoning=None)
        begins = text.lstrip().startswith(OPEN)
        thought, closed, content = text.partition(CLOSE)
        if answer.reasoning is not None or not (begins or self.is_opened) or not (closed or answer.is_cut):
            return answer
        return replace(answer, reasoning=thought.partition(OPEN)[2] if begins else thought, content=content, raw=text)

    def message(self, answer: Answer) -> Message:
        """The answer as a turn of the conversation, its thinking where the template looks for it."""
        content = answer.content
        if not answer.reasoning or _is_blank(answer):
            return {"role": "assistant", "content": content}
        if self.shows_tags:
            return {"role": "assistant", "content": self.spelt(answer, is_opened=False)}
        shown = {"reasoning_content": answer.reasoning.strip("\n")} if self.shows_field else {}
        return {"role": "assistant", "content": content.lstrip("\n"), **shown}

    def spelt(self, answer: Answer, is_opened: bool | None = None) -> str:
        """The answer as the target wrote it after the generation prompt, which may have opened the tag.

        Where a server told the thinking apart, its blanks are lost and stand here as they usually are.
        """
        is_opened = self.is_opened if is_opened is None else is_opened
        if answer.raw is not None:
            return answer.raw if is_opened or answer.raw.lstrip().startswith(OPEN) else f"{OPEN}\n{answer.raw}"
        if answer.reasoning is None or (_is_blank(answer) and not is_opened):
            return answer.content
        thought = ("" if is_opened else f"{OPEN}\n") + answer.reasoning.strip("\n")
        if answer.is_cut and not answer.content:
            return thought
        content = answer.content.lstrip("\n")
        return f"{thought}\n{CLOSE}\n\n{content}"

    def gives_back(self, messages: Sequence[Message], answer: Answer) -> bool:
        """Whether training, which renders without the server's arguments, gets what the target read and wrote."""
        return self._render(messages, False, {}).startswith(self.prompt(messages[:-1]) + self.spelt(answer))

    def prompt(self, messages: Sequence[Message]) -> str:
        """What the target reads before it answers; UnusableRow when the template refuses the conversation."""
        return self._render(messages, True, self.template_arguments)

    def ids(self, text: str) -> list[int]:
        """The tokens of a text as it is."""
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def answer_ids(self, answer: Answer) -> list[int]:
        """The answer's tokens: those that came with it, or its text's, with the end-of-turn token where it has ended.

        Some servers leave that token out of the ids; it is what the target wrote, and has to be learnt.
        """
        ids = self.ids(self.spelt(answer)) if answer.token_ids is None else list(answer.token_ids)
        if answer.is_cut or (answer.token_ids is not None and ids and ids[-1] in self.end_ids):
            return ids
        text = self._render([QUESTION, {"role": "assistant", "content": PROBE_CONTENT}], False, self.template_arguments)
        tail = self.ids(text[text.rfind(PROBE_CONTENT) + len(PROBE_CONTENT) :])
        end = next((token for token in tail if token in self.end_ids), self.tokenizer.eos_token_id)
        return ids if end is None else [*ids, end]

    def _render(self, messages: Sequence[Message], opens_answer: bool, arguments: Mapping[str, Any]) -> str:
        settings = {**arguments, "tokenize": False, "add_generation_prompt": opens_answer}
        try:
            return str(self.tokenizer.apply_chat_template(list(messages), **settings))
        except (TemplateError, TypeError, ValueError, LookupError) as error:
            message = (str(error) or type(error).__name__).splitlines()[0]
            raise UnusableRow(f"the chat template refuses it: {message[:120]}", "") from error


def _is_blank(answer: Answer) -> bool:
    """Whether a server sent thinking with nothing in it."""
    return answer.raw is None and answer.reasoning is not None and not answer.reasoning.strip()


def training_rows(outcome: Outcome, thinking: Thinking) -> list[dict[str, Any]]:
    """JSON-ready rows of a done outcome: one, or one per answer where later prompts do not begin with earlier ones."""
    turns: list[Message] = [{"role": "system", "content": outcome.system}] if outcome.system else []
    answered: list[tuple[int, Answer]] = []  # (how many turns stand before it, the answer)
    for question, answer in zip(outcome.turns, outcome.answers, strict=True):
        turns.append({"role": "user", "content": question})
        answered.append((len(turns), answer))
        turns.append(thinking.message(answer))
    if all(
        answer.token_ids is None and not answer.is_cut and thinking.gives_back(turns[: at + 1], answer)
        for at, answer in answered
    ):
        return [{"id": outcome.id, "messages": turns}]
    rows: list[dict[str, Any]] = []
    for at, answer in answered:
        given = answer.prompt_token_ids
        prompt = thinking.ids(thinking.prompt(turns[:at])) if given is None else list(given)
        before = rows[-1]["input_ids"] if rows else []
        mask = rows.pop()["loss_mask"] if rows and prompt[: len(before)] == before else []
        ids = thinking.answer_ids(answer)
        mask = [*mask, *[0] * (len(prompt) - len(mask)), *[1] * len(ids)]
        rows.append({"id": outcome.id, "input_ids": [*prompt, *ids], "loss_mask": mask})
    return rows


class LocalTarget:
    """Asks a target in this process, one request after the other."""

    def __init__(self, decode: Callable[[list[int], int], list[int]], thinking: Thinking, room: int | None) -> None:
        """decode: (prompt's ids, seed) -> the answer's, its end included; room: the most tokens of a prompt."""
        self.decode, self.thinking, self.room = decode, thinking, room

    async def __call__(self, messages: Sequence[Message], seed: int) -> Answer:
        """The answer; Unanswered when the prompt leaves no room for max_tokens."""
        prompt = self.thinking.ids(self.thinking.prompt(messages))
        if self.room is not None and len(prompt) > self.room:
            raise Unanswered("skipped", "too long for the target's context with max_tokens")
        ids = self.decode(prompt, seed)
        has_ended = bool(ids) and ids[-1] in self.thinking.end_ids
        text = str(self.thinking.tokenizer.decode(ids[:-1] if has_ended else ids, skip_special_tokens=True))
        finish = "stop" if has_ended else "length"
        return Answer(text, finish, len(ids), token_ids=tuple(ids), prompt_token_ids=tuple(prompt))
