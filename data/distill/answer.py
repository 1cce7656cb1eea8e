"""What is asked of the target and what it answers, whoever carries it: a server or this process."""

from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal

from data.distill.config import SamplingConfig
from data.shapes import Message


@dataclass(frozen=True)
class Request:
    """One answer to draw: the conversation so far, which ends with the user. seed depends on the row and turn alone."""

    messages: tuple[Message, ...]
    sampling: SamplingConfig
    seed: int


@dataclass(frozen=True)
class Answer:
    """One answer. finish is 'stop' when it ended with an end-of-turn token; another reason means that it is cut.

    reasoning is the thinking where something told it apart from the content (data/distill/thinking.py does the rest).
    raw is the text before thinking was told apart in it, letter for letter; null where nothing was, or a server did.
    token_ids are the answer's, its end-of-turn token included, and prompt_token_ids what the target read before it.
    """

    content: str
    finish: str
    num_tokens: int
    reasoning: str | None = None
    token_ids: tuple[int, ...] | None = None
    prompt_token_ids: tuple[int, ...] | None = None
    raw: str | None = None

    @property
    def is_cut(self) -> bool:
        return self.finish != "stop"

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready, without what is not there."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    @classmethod
    def of(cls, values: dict[str, Any]) -> "Answer":
        """From as_dict's values."""
        ids: dict[str, Any] = {
            name: tuple(values[name]) for name in ("token_ids", "prompt_token_ids") if name in values
        }
        return cls(**{**values, **ids})


TOO_LONG_FOR_SERVER = "too long for the server's context"
FILTERED = "the server's content filter"
SERVER_SKIPS = (
    TOO_LONG_FOR_SERVER,
    FILTERED,
)  # another server, or other settings of it, may answer these: asked again on request

Ask = Callable[[Request], Awaitable[Answer]]


class Unanswered(Exception):
    """A request that will have no answer; its row ends as skipped (nothing is wrong) or as failed (try it again)."""

    def __init__(self, status: Literal["skipped", "failed"], why: str) -> None:
        super().__init__(why)
        self.status = status
        self.why = why
