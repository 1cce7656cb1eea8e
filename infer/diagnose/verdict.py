"""Finds the verdict, the first rule of verdict.yaml whose conditions hold, and prints a page."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from aerie.configs.read import adapter
from aerie.infer.diagnose.figures import DEPTHS, Symptoms, shown
from aerie.infer.diagnose.ladder import DROPS
from aerie.infer.diagnose.text import text_lines
from aerie.infer.measure.bootstrap import Estimate

IN_BRACES = re.compile(r"\{([\w.-]+)\}")


@dataclass(frozen=True)
class Condition:
    figure: str
    above: float | None = None
    below: float | None = None
    equals: Any = None
    present: bool = True  # false: the condition holds if the figure was not measured

    def holds(self, symptoms: Symptoms) -> bool:
        value = symptoms.values.get(self.figure)
        if value is None or not self.present:
            return (value is not None) == self.present
        low, high = (value.low, value.high) if isinstance(value, Estimate) else (value, value)
        if self.above is not None and not low > self.above:
            return False
        if self.below is not None and not high < self.below:
            return False
        return self.equals is None or value == self.equals


@dataclass(frozen=True)
class CauseRule:
    """An entry of verdict.yaml."""

    cause: str
    says: str
    fix: str
    when: tuple[Condition, ...]


@dataclass(frozen=True)
class Diagnosis:
    cause: str
    evidence: str
    fix: str

    @property
    def sentence(self) -> str:
        return f"{self.cause}: {self.evidence}; {self.fix}"


def read_rules() -> tuple[CauseRule, ...]:
    text = Path(__file__).with_name("verdict.yaml").read_text(encoding="utf-8")
    schema = adapter(tuple[CauseRule, ...])
    rules: tuple[CauseRule, ...] = schema.validate_python(yaml.safe_load(text))
    return rules


def find_cause(symptoms: Symptoms) -> Diagnosis:
    """The first cause whose conditions all hold; the last cause has no conditions."""

    def fill(text: str) -> str:
        return IN_BRACES.sub(lambda match: shown(symptoms.values.get(match[1])), text)

    rules = read_rules()
    rule = next(rule for rule in rules if all(each.holds(symptoms) for each in rule.when))
    return Diagnosis(rule.cause, fill(rule.says), fill(rule.fix))


LADDER = {
    "teacher_forced": "from every token",
    "chain": "chain, decoded here",
    "tree": "tree, decoded here",
    "server": "in the server",
    "reported": "as the server counts",
}


def page(diagnosis: Diagnosis, symptoms: Symptoms) -> str:
    """The verdict, the ladder and other figures for the terminal."""
    values = symptoms.values
    lines = [diagnosis.sentence]
    if "ladder.teacher_forced.tau" in values:
        lines += ["", f"{'':<22}{'tau':<20}loss"]
    steps = {step: words for step, words in LADDER.items() if f"ladder.{step}.tau" in values}
    for step, words in steps.items():
        drop, above = DROPS.get(step, ("", ""))
        loss = values.get(f"drop.{drop}.tau")
        lost = f"{drop} {shown(loss)} against: {LADDER[above]}" if loss else ""
        lines.append(f"{words:<22}{shown(values[f'ladder.{step}.tau']):<20}{lost}")
    for step, words in steps.items():
        positions = (values.get(f"ladder.{step}.{k}") for k in range(1, DEPTHS + 1))
        shares = "".join(f"{shown(share):<20}" for share in positions if share is not None)
        lines += [f"accepted at position 1, 2, ...: {words}", f"  {shares}"]
    lines += text_lines(symptoms)
    lines += [f"not measured: {name}: {why}" for name, why in symptoms.absent.items()]
    return "\n".join(lines)
