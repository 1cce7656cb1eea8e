"""Answers drawn in this process, by a decoding function that the caller brings."""

from collections.abc import Callable
from typing import Any

from data.distill.answer import Answer, Request, Unanswered
from data.distill.config import SamplingConfig
from data.distill.thinking import Thinking

# (prompt's ids, sampling, seed) -> the answer's ids, its end-of-turn token included
Decode = Callable[[list[int], SamplingConfig, int], list[int]]


class LocalTarget:
    """Asks a target in this process, one request after the other."""

    def __init__(self, decode: Decode, thinking: Thinking, context: int | None) -> None:
        """context: the positions that the target has for prompt and answer together (null: no limit)."""
        self.decode, self.thinking, self.context = decode, thinking, context

    async def __call__(self, request: Request) -> Answer:
        """The answer; Unanswered when the prompt leaves no room for max_tokens."""
        prompt, sampling = self.thinking.prompt_ids(request.messages), request.sampling
        if self.context is not None and len(prompt) + sampling.max_tokens > self.context:
            raise Unanswered("skipped", "too long for the target's context with max_tokens")
        ids = self.decode(prompt, sampling, request.seed)
        ended = bool(ids) and ids[-1] in self.thinking.end_ids
        text = self._text(ids[:-1] if ended else ids)
        return Answer(
            content=text,
            finish="stop" if ended else "length",
            num_tokens=len(ids),
            token_ids=tuple(ids),
            prompt_token_ids=tuple(prompt),
        )

    def _text(self, ids: list[int]) -> str:
        tokenizer: Any = self.thinking.tokenizer
        return str(tokenizer.decode(ids, skip_special_tokens=True))
