"""Marks of what is not to be learnt: on a row, on its turns, or in lists beside the turns."""

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from aerie.data.shapes import SHAPES, Message
from aerie.data.values import UnusableRow, is_empty, is_plain, unpacked

IS_CONTEXT = "is_context"  # a message's key while its row is read; no template sees it
LEARN_KEYS = frozenset(SHAPES["learn"].split())
IGNORE_KEYS = frozenset(SHAPES["ignore"].split())
MARK_KEYS = LEARN_KEYS | IGNORE_KEYS
SAYS_YES = frozenset(SHAPES["says_yes"])
SAYS_NO = frozenset(SHAPES["says_no"])
UNKNOWN_MARK = -1.0  # instead of a weight: nobody here understands the mark


def mark_context(row: Mapping[str, Any], turns: list[Any], messages: list[Message]) -> set[str]:
    """Marks as context the answers that are not to be learnt; returns reasons for odd marks."""
    unread = set[str]()
    if all(map(MARK_KEYS.isdisjoint, [row, *turns])):
        return unread
    answers = [message for message in messages if message["role"] == "assistant"]
    marks = list(zip(messages, turns, strict=True))
    for name in row:
        if name not in MARK_KEYS:
            continue
        flags = unpacked(row[name])
        if isinstance(flags, list) and flags:
            marked = {len(messages): messages, len(answers): answers}.get(len(flags))
            if marked is None:
                raise UnusableRow(
                    "there are more or fewer marks than turns",
                    f"{name!r} has {len(flags)} marks for {len(messages)} turns",
                )
            marks += [(message, {name: flag}) for message, flag in zip(marked, flags, strict=True)]
            continue
        share = share_of(name, flags)
        if share == 0:
            raise UnusableRow("the row is marked as not to be learnt", name)
        if share == UNKNOWN_MARK:
            raise UnusableRow(f'the mark in row key "{name}" is unknown', f"{flags!r:.60}")
        if share != 1:
            unread.add(f'row key "{name}" is not read')
    for message, flags in marks:
        for name in flags.keys() & MARK_KEYS:
            if message["role"] == "assistant":
                unread |= _mark_answer(message, name, flags[name])
            elif flags[name] is True and name in LEARN_KEYS:
                unread.add("a turn that is not an answer is marked to be learnt")
    return unread


def _mark_answer(message: Message, name: str, flag: Any) -> set[str]:
    """Marks an answer as context if its mark says so; returns a reason for an odd mark."""
    share = share_of(name, flag)
    if share in (0, UNKNOWN_MARK):
        message[IS_CONTEXT] = True
    if share == UNKNOWN_MARK:
        return {f'the mark "{name}" is unknown, so its answer is not learnt'}
    if share not in (0, 1):
        return {f'the mark "{name}" is neither 0 nor 1, so its whole answer is learnt'}
    return set()


def share_of(name: str, flag: Any) -> float:
    """The weight that a mark gives its turn: 0, 1, another weight up to 2, or UNKNOWN_MARK."""
    if name in IGNORE_KEYS:
        return {0.0: 1.0, 1.0: 0.0}.get(_number_in(flag, 0.0), UNKNOWN_MARK)
    return _number_in(flag, 1.0)


def _number_in(flag: Any, if_empty: float) -> float:
    """A mark's number, at most 2; false is 0, and true is 1."""
    if is_empty(flag):
        return if_empty
    if isinstance(flag, list) and is_plain(flag):
        numbers = {_number_in(part, if_empty) for part in flag}
        return numbers.pop() if len(numbers) == 1 else UNKNOWN_MARK
    if isinstance(flag, str):
        word = flag.strip().lower()
        if word in SAYS_NO | SAYS_YES:
            return float(word in SAYS_YES)
        with suppress(ValueError):
            flag = float(word)
    if isinstance(flag, int | float) and flag >= 0:
        return float(min(flag, 2))
    return UNKNOWN_MARK
