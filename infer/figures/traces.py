"""Draft lengths along one answer, rule by rule (SVIP, arXiv 2411.18462, figure 8)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from infer.aggregate import Group, PromptKey
from infer.figures.policies import NAMES
from infer.records import Record
from infer.table import sampling_text

MOST = 4  # rules in one picture


@dataclass(frozen=True)
class Trace:
    """One rule's cycles in one answer: where each begins (new tokens so far), what it drafted, what was accepted."""

    rule: str
    begins: tuple[int, ...]
    drafted: tuple[int, ...]
    accepted: tuple[int, ...]


@dataclass(frozen=True)
class Traced:
    """The chains of one head at one sampling, on the prompt whose shortest answer among the rules is the longest."""

    title: str
    traces: tuple[Trace, ...]


def traced(groups: Sequence[Group]) -> list[Traced]:
    """One for each head and sampling whose chains have two rules or more."""
    found: dict[tuple[str, str], dict[str, Group]] = {}
    for group in groups:
        tree = group.first.tree
        if tree is not None and tree.shape == "chain" and "stop" in tree.settings and not group.failed:
            place = (group.first.head_path or group.first.head or "", sampling_text(sampling_of(group.first)))
            found.setdefault(place, {}).setdefault(tree.settings["stop"]["rule"], group)
    pictures = []
    for (head, sampling), rules in found.items():
        shared = _longest(list(rules.values()))
        if len(rules) > 1 and shared is not None:
            answers = {rule: _answer(group, shared) for rule, group in list(rules.items())[:MOST]}
            traces = tuple(_trace(NAMES.get(rule, rule), record) for rule, record in answers.items())
            pictures.append(Traced(f"{head}, T {sampling}, prompt {shared[0]}/{shared[1]}", traces))
    return pictures


def from_json(value: Mapping[str, Any]) -> Traced:
    """What dataclasses.asdict made of one."""
    return Traced(value["title"], tuple(Trace(**one) for one in value["traces"]))


def sampling_of(record: Record) -> dict[str, float]:
    """As sampling_text reads it."""
    return {"temperature": record.temperature, "top_k": record.top_k, "top_p": record.top_p}


def _longest(groups: Sequence[Group]) -> PromptKey | None:
    """The prompt that every group has cycles for, with the most tokens in the shortest of its answers."""
    lengths: dict[PromptKey, list[int]] = {}
    for group in groups:
        for record in group.records:
            if record.cycle_nodes:
                lengths.setdefault(record.prompt_key, []).append(record.new_tokens)
    shared = {key: min(each) for key, each in lengths.items() if len(each) == len(groups)}
    return max(shared, key=lambda key: shared[key], default=None)


def _answer(group: Group, key: PromptKey) -> Record:
    return next(record for record in group.records if record.prompt_key == key)


def _trace(rule: str, record: Record) -> Trace:
    begins, at = [], 1  # the prefill's token
    for tokens in record.cycle_tokens:
        begins.append(at)
        at += tokens
    return Trace(rule, tuple(begins), record.cycle_nodes, record.accepted)
