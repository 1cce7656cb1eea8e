"""What becomes of the answers: each flaw by a rule that can be read, nothing dropped without a count."""

import json
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from aerie.configs.schema.data import DistillConfig, GateConfig
from aerie.data.distill.answer import Outcome
from aerie.data.distill.prompts import asked_key, words
from aerie.data.distill.thinking import Thinking, training_rows

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
    answered = list(zip(outcome.turns, outcome.answers, strict=True))
    parts = [(question, part) for question, answer in answered for part in (answer.reasoning or "", answer.content)]
    rules = {
        "cut": any(answer.is_cut for _, answer in answered),
        "empty": not answered or any(not answer.content.strip() for _, answer in answered),
        "loop": any(is_loop(part, config) for _, part in parts),
        "language": any(is_foreign(question, part, config.foreign_share) for question, part in parts),
        "refusal": any(REFUSAL.search(answer.content.strip()[:OPENING]) for _, answer in answered),
    }
    return [name for name, is_flawed in rules.items() if is_flawed]


def is_loop(text: str, config: GateConfig) -> bool:
    """Whether the text ends in the same words or symbols over and over, or mostly says what it has said before."""
    split = words(text)
    last = LAST.match(text.rstrip()[::-1])  # what stands behind the last word, or the letters of that word
    symbols = "".join(last[0][::-1].split()) if last else ""
    if _ends_in_rounds(split, config.loop_times, config.loop_words):
        return True
    if _ends_in_rounds(symbols, config.loop_times, config.loop_words * SYMBOLS_OF_A_WORD):
        return True
    runs = [tuple(split[start : start + RUN]) for start in range(len(split) - RUN + 1)]
    return len(runs) >= LEAST_RUNS and 1.0 - len(set(runs)) / len(runs) >= config.repeated_share


def _ends_in_rounds(split: Sequence[str], times: int, least: int) -> bool:
    """Whether the last words are `times` equal rounds, together at least `least` words."""
    for period in range(1, min(LONGEST_PERIOD, len(split) // times) + 1):
        span = max(times, -(-least // period)) * period
        if span <= len(split) and all(split[-at] == split[-at - period] for at in range(1, span - period + 1)):
            return True
    return False


def is_foreign(question: str, answer: str, share: float) -> bool:
    """Whether so large a share of the answer's letters is in scripts of which the question has none.

    Languages that share a script are not told apart.
    """
    asked, answered = scripts(question), scripts(answer)
    letters = sum(answered.values())
    if letters < LEAST_LETTERS or not asked:
        return False
    return sum(count for script, count in answered.items() if script not in asked) / letters >= share


def scripts(text: str) -> Counter[str]:
    """Letters by script, as their Unicode names begin (LATIN, CYRILLIC); Japanese and Chinese are one."""
    counts: Counter[str] = Counter()
    for letter, count in Counter(text).items():
        if letter.isalpha():
            name = unicodedata.name(letter, "").split(" ")[0]
            counts["CJK" if name in ("HIRAGANA", "KATAKANA") else name] += count
    return counts


EXAMPLES, SHOWN = 3, 600  # rows shown for each flaw and of those without, characters of each text
SHARES = {"least": 0.0, "quarter": 0.25, "half": 0.5, "three_quarters": 0.75, "share_95": 0.95, "most": 1.0}
BINS = 24


@dataclass
class Summary:
    """What the rows hold; as_dict is summary.json."""

    status: Counter[str] = field(default_factory=Counter)
    why: Counter[str] = field(default_factory=Counter)  # of skipped and failed rows
    flaws: Counter[str] = field(default_factory=Counter)  # of done rows; one may have several
    dropped: int = 0  # done rows that the gate drops
    kept: int = 0
    training_rows: int = 0
    as_tokens: int = 0  # of those, rows of token ids
    lengths: list[int] = field(default_factory=list)  # tokens of each kept answer
    examples: dict[str, list[dict[str, str]]] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        values = {name: value for name, value in vars(self).items() if name != "examples"}
        quantiles = np.quantile(self.lengths or [0], list(SHARES.values()), method="nearest").tolist()
        lengths = dict(zip(SHARES, quantiles, strict=True)) if self.lengths else {}
        totals = {"rows": sum(self.status.values()), "answers": len(self.lengths), "answer_tokens": sum(self.lengths)}
        return {**totals, **values, "lengths": lengths}

    def page(self, config: DistillConfig, title: str) -> str:
        """The HTML page."""
        folder = FileSystemLoader(Path(__file__).parent)
        environment = Environment(loader=folder, autoescape=True, undefined=StrictUndefined, trim_blocks=True)
        environment.filters["count"] = "{:,}".format
        counts, edges = np.histogram(self.lengths, BINS, (0, max([*self.lengths, BINS])))
        bins = [(int(edge), int(count)) for edge, count in zip(edges, counts, strict=False)]
        template = environment.get_template("summary.html.jinja")
        return template.render(
            title=title, examples=self.examples, names=FLAWS, config=config, bins=bins, **self.as_dict()
        )


def judge(outcomes: Iterable[Outcome], gate: GateConfig, thinking: Thinking, file: TextIO) -> tuple[Summary, list[str]]:
    """Writes the kept rows to a file to train on; returns the summary, and a JSON line of how each row ended."""
    summary, ends, asked = Summary(), list[str](), set[str]()
    for outcome in outcomes:
        summary.status[outcome.status] += 1
        end: dict[str, Any] = {"id": outcome.id, "status": outcome.status, "place": outcome.place}
        if outcome.status != "done":
            summary.why[f"{outcome.status}: {outcome.why}"] += 1
            end["why"] = outcome.why
        else:
            names = flaws(outcome, gate)
            if outcome.invented is not None:
                key = asked_key(outcome.system, outcome.turns[:1])
                names += ["repeated"] if key in asked else []
                asked.add(key)
            summary.flaws.update(names)
            _show(outcome, names, summary.examples)
            is_kept = not any(getattr(gate, name) == "drop" for name in names)
            lengths = [len(thinking.answer_ids(answer)) for answer in outcome.answers]
            rows = training_rows(outcome, thinking) if is_kept else []
            file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
            summary.kept, summary.dropped = summary.kept + is_kept, summary.dropped + (not is_kept)
            summary.training_rows += len(rows)
            summary.as_tokens += sum("input_ids" in row for row in rows)
            summary.lengths += lengths if is_kept else []
            end |= {"kept": is_kept, "flaws": names, "answers": len(lengths), "tokens": sum(lengths)}
        ends.append(json.dumps(end, ensure_ascii=False) + "\n")
    return summary, ends


def _show(outcome: Outcome, names: list[str], examples: dict[str, list[dict[str, str]]]) -> None:
    """Keeps the row as an example of each of its flaws (its last answer), or of a row without (its first)."""
    for name in names or ["none"]:
        shown, at = examples.setdefault(name, []), -1 if names else 0
        if len(shown) < EXAMPLES and outcome.answers:
            text = outcome.answers[at].content or outcome.answers[at].reasoning or ""
            excerpt = text if len(text) <= SHOWN else f"{text[: SHOWN // 2]} […] {text[-SHOWN // 2 :]}"
            shown.append({"id": outcome.id, "question": outcome.turns[at][:SHOWN], "answer": excerpt})
