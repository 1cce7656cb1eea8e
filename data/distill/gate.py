"""Flaws of an answered row, each by a rule that can be read: nothing is dropped without a count."""

import re
import unicodedata
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from jinja2 import TemplateError

from aerie.configs.errors import UserError
from aerie.configs.schema.data import GateConfig
from aerie.data.conversations import Message, UnusableRow
from aerie.data.distill.answer import Answer
from aerie.data.distill.journal import Outcome
from aerie.data.distill.prompts import words

FLAWS = ("cut", "empty", "loop", "language", "refusal", "repeated")
RUN = 10  # words of a run whose repetition counts
LEAST_RUNS = 40  # shorter answers repeat themselves by chance
LEAST_LETTERS = 20  # so many letters tell a script
LONGEST_PERIOD = 200  # words of a loop's round
SYMBOLS_OF_A_WORD = 3  # a line of 80 or 100 dashes is no loop, and so many zeros are none
LAST = re.compile(r"[^\W_]+|[\W_]+")  # of a text that is read backwards
OPENING = 200  # characters in which a refusal shows
SORRY = r"\bi(?:['’]?m| am) (?:\w+ )?(?:sorry|afraid)\b.{0,80}\b(?:can(?:no|['’])t|unable|not able|won['’]t)"
UNABLE = r"\bi (?:can(?:no|['’])t|won['’]t|am (?:unable|not able) to) (?:\w+ ){0,2}(?:help|assist|provide|comply)\b"
MACHINE = r"\bas an? (?:ai|artificial intelligence|(?:large )?language model)\b"
REFUSAL = re.compile(f"{SORRY}|{UNABLE}|{MACHINE}", re.IGNORECASE | re.DOTALL)


def flaws(outcome: Outcome, config: GateConfig) -> list[str]:
    """The names of a done row's flaws, in FLAWS' order; "repeated" needs the other rows and is not looked for."""
    found = set()
    for question, answer in zip(outcome.turns, outcome.answers, strict=True):
        if answer.is_cut:
            found.add("cut")
        if not answer.content.strip():
            found.add("empty")
        if any(is_loop(part, config) for part in (answer.reasoning or "", answer.content)):
            found.add("loop")
        if any(is_foreign(question, part, config.foreign_share) for part in (answer.reasoning or "", answer.content)):
            found.add("language")
        if is_refusal(answer):
            found.add("refusal")
    if not outcome.answers:
        found.add("empty")
    return [name for name in FLAWS if name in found]


def is_loop(text: str, config: GateConfig) -> bool:
    """Whether the text ends in the same words or symbols over and over, or mostly says what it has said before."""
    found = words(text)
    if _ends_in_rounds(found, config.loop_times, config.loop_words):
        return True
    if _ends_in_rounds(_last_symbols(text), config.loop_times, config.loop_words * SYMBOLS_OF_A_WORD):
        return True
    runs = [tuple(found[start : start + RUN]) for start in range(len(found) - RUN + 1)]
    return len(runs) >= LEAST_RUNS and 1.0 - len(set(runs)) / len(runs) >= config.repeated_share


def is_foreign(question: str, answer: str, share: float) -> bool:
    """Whether so large a share of the answer's letters is in scripts of which the question has none.

    Languages that share a script are not told apart.
    """
    asked, found = scripts(question), scripts(answer)
    letters = sum(found.values())
    if letters < LEAST_LETTERS or not asked:
        return False
    return sum(count for script, count in found.items() if script not in asked) / letters >= share


def scripts(text: str) -> Counter[str]:
    """Letters by script, as their Unicode names begin (LATIN, CYRILLIC); Japanese and Chinese are one."""
    found: Counter[str] = Counter()
    for letter, count in Counter(text).items():
        if letter.isalpha():
            name = unicodedata.name(letter, "").split(" ")[0]
            found["CJK" if name in ("CJK", "HIRAGANA", "KATAKANA") else name] += count
    return found


def is_refusal(answer: Answer) -> bool:
    """Whether the answer opens as English refusals do."""
    return REFUSAL.search(answer.content.strip()[:OPENING]) is not None


def _last_symbols(text: str) -> str:
    """What stands behind the text's last word, or the letters and digits of that word, without blanks."""
    last = LAST.match(text.rstrip()[::-1])
    return "".join(last[0][::-1].split()) if last else ""


def _ends_in_rounds(found: Sequence[str], times: int, least: int) -> bool:
    """Whether the last words are `times` equal rounds, together at least `least` words."""
    for period in range(1, min(LONGEST_PERIOD, len(found) // times) + 1):
        span = max(times, -(-least // period)) * period
        if span <= len(found) and all(found[-at] == found[-at - period] for at in range(1, span - period + 1)):
            return True
    return False


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
