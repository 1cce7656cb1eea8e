"""What becomes of the answers: flaws by rules that can be read, rows to train on, counts of what was dropped."""

import json
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jinja2 import Template

from aerie.configs.schema.data import DistillConfig, GateConfig
from aerie.data.conversations import Message
from aerie.data.distill.answer import Answer, Outcome, Thinking
from aerie.data.distill.prompts import asked_key, words

FLAWS = ("cut", "empty", "loop", "language", "refusal", "repeated")
LOOP_TIMES, LOOP_WORDS, LOOP_CHARACTERS = 5, 40, 240  # so often the same at the end, together at least so long
LONGEST_PERIOD = 200  # words or characters of a loop's round
RUN, LEAST_RUNS, REPEATED_SHARE = 10, 40, 0.6  # words of a run; of so many runs, the share that was there before
LEAST_LETTERS, FOREIGN_SHARE = 20, 0.3  # letters that tell a script; those in a script that the question has none of
OPENING = 200  # characters in which a refusal shows
SORRY = r"\bi(?:['’]?m| am) (?:\w+ )?(?:sorry|afraid)\b.{0,80}\b(?:can(?:no|['’])t|unable|not able|won['’]t)"
UNABLE = r"\bi (?:can(?:no|['’])t|won['’]t|am (?:unable|not able) to) (?:\w+ ){0,2}(?:help|assist|provide|comply)\b"
MACHINE = r"\bas an? (?:ai|artificial intelligence|(?:large )?language model)\b"
REFUSAL = re.compile(f"{SORRY}|{UNABLE}|{MACHINE}", re.IGNORECASE | re.DOTALL)


def flaws(outcome: Outcome) -> list[str]:
    """The names of a done row's flaws, in FLAWS' order; "repeated" needs the other rows and is not looked for."""
    answers = outcome.answers
    pairs = zip(outcome.turns, answers, strict=True)
    parts = [(question, part) for question, answer in pairs for part in (answer.reasoning or "", answer.content)]
    rules = {
        "cut": any(answer.is_cut for answer in answers),
        "empty": not all(answer.content.strip() for answer in answers),
        "loop": any(is_loop(part) for _, part in parts),
        "language": any(is_foreign(question, part) for question, part in parts),
        "refusal": any(REFUSAL.search(answer.content.strip()[:OPENING]) for answer in answers),
    }
    return [name for name, is_flawed in rules.items() if is_flawed]


def is_loop(text: str) -> bool:
    """Whether the text ends in the same words or symbols over and over, or mostly says what it has said before."""
    split = words(text)
    if _ends_in_rounds(split, LOOP_WORDS) or _ends_in_rounds("".join(text.split()), LOOP_CHARACTERS):
        return True
    runs = [tuple(split[start : start + RUN]) for start in range(len(split) - RUN + 1)]
    return len(runs) >= LEAST_RUNS and 1.0 - len(set(runs)) / len(runs) >= REPEATED_SHARE


def _ends_in_rounds(units: Sequence[str], least: int) -> bool:
    """Whether the last units are LOOP_TIMES equal rounds, together at least `least` units."""
    for period in range(1, min(LONGEST_PERIOD, len(units) // LOOP_TIMES) + 1):
        span = max(LOOP_TIMES, -(-least // period)) * period
        if span <= len(units) and all(units[-at] == units[-at - period] for at in range(1, span - period + 1)):
            return True
    return False


def is_foreign(question: str, answer: str) -> bool:
    """Whether many of the answer's letters are in scripts of which the question has none."""
    asked, answered = scripts(question), scripts(answer)
    letters, foreign = answered.total(), sum(count for script, count in answered.items() if script not in asked)
    return bool(asked) and letters >= LEAST_LETTERS and foreign / letters >= FOREIGN_SHARE


def scripts(text: str) -> Counter[str]:
    """Letters by script, as their Unicode names begin (LATIN, CYRILLIC); Japanese and Chinese are one."""
    names = (unicodedata.name(letter, "?").split()[0] for letter in text if letter.isalpha())
    return Counter("CJK" if name in ("HIRAGANA", "KATAKANA") else name for name in names)


def training_rows(outcome: Outcome, thinking: Thinking) -> list[dict[str, Any]]:
    """JSON-ready rows of a done outcome: one, or one per answer where later prompts do not begin with earlier ones.

    A row is text where the template gives the target's text back as training renders it, without a server's arguments.
    Otherwise it is tokens: where ids came with any answer, where an answer is cut (a template would end it), and where
    the template rewrites what the target wrote.
    """
    turns: list[Message] = [{"role": "system", "content": outcome.system}] if outcome.system else []
    prompts: list[tuple[str, Answer]] = []
    is_text = True
    for question, answer in zip(outcome.turns, outcome.answers, strict=True):
        turns.append({"role": "user", "content": question})
        prompts.append((thinking.prompt(turns), answer))
        turns.append(thinking.message(answer))
        is_text = is_text and answer.token_ids is None and not answer.is_cut
        is_text = is_text and thinking.render(turns, False).startswith(prompts[-1][0] + thinking.written(answer))
    if is_text:
        return [{"id": outcome.id, "messages": turns}]
    rows: list[dict[str, Any]] = []
    for text, answer in prompts:
        prompt = thinking.ids(text) if answer.prompt_token_ids is None else list(answer.prompt_token_ids)
        before = rows[-1]["input_ids"] if rows else []
        mask = rows.pop()["loss_mask"] if rows and prompt[: len(before)] == before else []
        ids = thinking.answer_ids(answer)
        mask = [*mask, *[0] * (len(prompt) - len(mask)), *[1] * len(ids)]
        rows.append({"id": outcome.id, "input_ids": [*prompt, *ids], "loss_mask": mask})
    return rows


@dataclass
class Summary:
    """Counts of input rows, of training rows and of the kept answers; its variables are summary.json."""

    rows: int = 0
    kept: int = 0
    dropped: int = 0  # done rows that the gate drops
    training_rows: int = 0
    as_tokens: int = 0  # of those, rows of token ids
    answers: int = 0
    answer_tokens: int = 0
    status: Counter[str] = field(default_factory=Counter)
    why: Counter[str] = field(default_factory=Counter)  # of skipped and failed rows
    flaws: Counter[str] = field(default_factory=Counter)  # of done rows; one may have several

    def page(self, config: DistillConfig, title: str) -> str:
        """The HTML page."""
        text = Path(__file__).with_name("summary.html.jinja").read_text(encoding="utf-8")
        return Template(text, autoescape=True, trim_blocks=True).render(
            title=title, names=FLAWS, config=config, **vars(self)
        )


def judge(
    outcomes: Iterable[Outcome], gate: GateConfig, thinking: Thinking, summary: Summary, ends: list[str]
) -> Iterator[str]:
    """Lines of the kept rows to train on; counts into summary, and puts a JSON line of how each row ended into ends."""
    asked = set[str]()
    for outcome in outcomes:
        summary.rows += 1
        summary.status[outcome.status] += 1
        end: dict[str, Any] = {"id": outcome.id, "status": outcome.status, "place": outcome.place}
        if outcome.status != "done":
            summary.why[f"{outcome.status}: {outcome.why}"] += 1
            end["why"] = outcome.why
        else:
            names = flaws(outcome)
            if outcome.invented is not None:
                key = asked_key(outcome.system, outcome.turns[:1])
                names += ["repeated"] if key in asked else []
                asked.add(key)
            tokens = sum(len(thinking.answer_ids(answer)) for answer in outcome.answers)
            is_kept = not any(getattr(gate, name) == "drop" for name in names)
            summary.flaws.update(names)
            summary.dropped += not is_kept
            end |= {"kept": is_kept, "flaws": names, "answers": len(outcome.answers), "tokens": tokens}
            if is_kept:
                rows = training_rows(outcome, thinking)
                yield from (json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
                summary.kept += 1
                summary.training_rows += len(rows)
                summary.as_tokens += sum("input_ids" in row for row in rows)
                summary.answers += len(outcome.answers)
                summary.answer_tokens += tokens
        ends.append(json.dumps(end, ensure_ascii=False) + "\n")
