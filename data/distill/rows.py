"""Answered conversations as rows to train on: text where the chat template gives the target's tokens back, else tokens.

Tokens it is where ids came with any of the answers, where an answer is cut (a template would end it, as the target did
not), and where the template rewrites what the target wrote (leaves its thinking out, or trims its blanks).
"""

from collections.abc import Sequence
from typing import Any

from data.distill.answer import Answer
from data.distill.journal import Outcome
from data.distill.thinking import Thinking
from data.shapes import Message


def training_rows(outcome: Outcome, thinking: Thinking) -> list[dict[str, Any]]:
    """JSON-ready rows of a done outcome: one, or one per answer where later prompts do not begin with earlier ones."""
    turns = messages(outcome, thinking)
    places = [place for place, message in enumerate(turns) if message["role"] == "assistant"]
    answered = list(zip(places, outcome.answers, strict=True))
    have_ids = any(answer.token_ids is not None for answer in outcome.answers)
    if not have_ids and all(
        not answer.is_cut and thinking.gives_back(turns[: at + 1], answer) for at, answer in answered
    ):
        return [{"id": outcome.id, "messages": turns}]
    pairs = [
        (
            thinking.prompt_ids(turns[:at]) if answer.prompt_token_ids is None else list(answer.prompt_token_ids),
            answer_ids(answer, thinking),
        )
        for at, answer in answered
    ]
    return [{"id": outcome.id, **row} for row in _joined(pairs)]


def messages(outcome: Outcome, thinking: Thinking) -> list[Message]:
    """The conversation as it was asked and answered."""
    turns: list[Message] = [{"role": "system", "content": outcome.system}] if outcome.system else []
    for question, answer in zip(outcome.turns, outcome.answers, strict=True):
        turns += [{"role": "user", "content": question}, thinking.message(answer)]
    return turns


def answer_ids(answer: Answer, thinking: Thinking) -> list[int]:
    """The answer's tokens: those that came with it, or its text's, with the end-of-turn token where it has ended.

    Some servers leave that token out of the ids; it is what the target wrote, and has to be learnt.
    """
    ids = thinking.ids(thinking.spelt(answer)) if answer.token_ids is None else list(answer.token_ids)
    if answer.is_cut or (answer.token_ids is not None and ids and ids[-1] in thinking.end_ids):
        return ids
    end = thinking.end_id()
    return ids if end is None else [*ids, end]


def _joined(pairs: Sequence[tuple[list[int], list[int]]]) -> list[dict[str, list[int]]]:
    """Rows of ids and loss mask; an answer goes into the row of the one before while the next prompt begins with it."""
    rows: list[tuple[list[int], list[int]]] = []
    for prompt, answer in pairs:
        ids, mask = rows[-1] if rows else ([], [])
        if rows and prompt[: len(ids)] == ids:
            rows[-1] = ([*prompt, *answer], [*mask, *[0] * (len(prompt) - len(ids)), *[1] * len(answer)])
        else:
            rows.append(([*prompt, *answer], [0] * len(prompt) + [1] * len(answer)))
    return [{"input_ids": ids, "loss_mask": mask} for ids, mask in rows]
