"""Flaws of an answered row, each by a rule that can be read: nothing is dropped without a count."""

import re
import unicodedata
from collections import Counter
from collections.abc import Sequence

from data.distill.answer import Answer
from data.distill.config import GateConfig
from data.distill.journal import Outcome
from data.distill.overlap import words

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
