"""What is asked of the target, what it answers, how an input row ends, and the client of servers that carry it.

openai's client retries what a moment may mend (cut connections, timeouts, 408, 429, 5xx) and paces itself. What it
gives up on is the row's doing only if the server answers something else; otherwise the row waits for the server.
"""

import asyncio
import json
import os
import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from aerie.configs.errors import UserError, warn
from aerie.configs.schema.data import SamplingConfig, ServerConfig
from aerie.data.conversations import Message

TOO_LONG, FILTERED = "too long for the server's context", "the server's content filter"
QUESTION: list[Message] = [{"role": "user", "content": "Hi"}]
CONNECT_S = 10.0  # a server that takes no connection is away long before an answer with its thinking is late
PAUSE_S = 1.0  # before a server that was away or busy is asked again; the client itself has waited before
FINISHES = {"stop": "stop", "eos": "stop", "eos_token": "stop", "length": "length", "max_tokens": "length"}
IS_TOO_LONG = re.compile(r"context length|max(imum)? context|max(imum)?[ _]model[ _]len|too long|longer than", re.I)
IS_BUSY = re.compile(r"queue|overload|capacity|too many|rate limit", re.I)  # in a 503: SGLang's 429


@dataclass(frozen=True)
class Answer:
    """One answer. finish is 'stop' when it ended with an end-of-turn token; another reason means that it is cut.

    reasoning is the thinking where something told it apart from the content, raw the text before Thinking did so.
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


@dataclass(frozen=True)
class Outcome:
    """How an input row ended: with answers to its questions, or with why not."""

    id: str
    status: Literal["done", "skipped", "failed"]
    place: str
    why: str | None = None
    system: str | None = None
    turns: tuple[str, ...] = ()  # the questions that were asked
    answers: tuple[Answer, ...] = ()
    invented: Answer | None = None  # of which the first question was made


# (the conversation so far, which ends with the user; a seed of the row and turn alone) -> the answer
Ask = Callable[[Sequence[Message], int], Awaitable[Answer]]


class Unanswered(Exception):
    """A request that gets no answer: its row is skipped (nothing is wrong) or has failed (try it again)."""

    def __init__(self, status: Literal["skipped", "failed"], why: str) -> None:
        super().__init__(why)
        self.status, self.why = status, why


class Malformed(Exception):
    """A reply that holds no answer."""


@dataclass
class Server:
    """One base URL and how it does."""

    url: str
    client: Any
    room: asyncio.Semaphore
    under_way: int = 0
    is_away: bool = False  # its last request was given up


class ServedTarget:
    """Asks the target at its servers; a context that begins with a short question and closes the connections."""

    def __init__(self, config: ServerConfig, model: str, sampling: SamplingConfig) -> None:
        try:
            import openai
        except ImportError as error:
            raise UserError("distill.server needs the package openai: pip install -e .[distill]") from error
        self.config, self.model, self.sampling = config, model, sampling
        self.errors = (openai.APIError, json.JSONDecodeError, Malformed)
        timeout = openai.Timeout(config.timeout_s, connect=min(CONNECT_S, config.timeout_s))
        api_key = os.environ.get("OPENAI_API_KEY") or "none"
        settings = {"api_key": api_key, "timeout": timeout, "max_retries": config.retries}
        self.servers = [
            Server(url, openai.AsyncOpenAI(base_url=url, **settings), asyncio.Semaphore(config.concurrency))
            for url in config.urls
        ]
        self.last_answer: float | None = None

    async def __aenter__(self) -> "ServedTarget":
        """UserError unless a short question is answered in the way that rows are asked: else all of them would fail."""
        try:
            await self(QUESTION, 0)
        except Unanswered as error:
            raise UserError(
                f"{', '.join(self.config.urls)}: no answer to a short question: {error.why}; check distill.sampling "
                f"(max_tokens must leave room for prompts) and distill.server.extra_body"
            ) from error
        return self

    async def __aexit__(self, *_: object) -> None:
        for server in self.servers:
            await server.client.close()

    async def __call__(self, messages: Sequence[Message], seed: int) -> Answer:
        """The answer; Unanswered for a row that gets none, UserError when the run cannot go on."""
        now, strikes = asyncio.get_running_loop().time, 0
        self.last_answer = self.last_answer or now()
        while True:
            with_room = [server for server in self.servers if not server.room.locked()] or self.servers
            server = min(with_room, key=lambda server: (server.is_away, server.under_way))
            server.under_way += 1
            try:
                async with server.room:
                    return await self._complete(server, server.client, self._body(messages, seed))
            except self.errors as error:
                why, may_be_row = self._judge(server, error)
            finally:
                server.under_way -= 1
            is_late = now() - self.last_answer > self.config.patience_s
            if (may_be_row or is_late) and await self._is_up(server):
                strikes += may_be_row
                if strikes > 1:  # the first may have met the end of an outage
                    raise Unanswered("failed", why)
            elif is_late:
                raise UserError(
                    f"{server.url}: {why}; no server has answered for {self.config.patience_s:g} s "
                    f"(distill.server.patience_s): start it again, then the same command goes on"
                )
            elif not server.is_away:
                server.is_away = True
                warn(f"{server.url}: {why}; it is asked again for {self.config.patience_s:g} s")
            await asyncio.sleep(PAUSE_S)

    def _body(self, messages: Sequence[Message], seed: int) -> dict[str, Any]:
        sampling, extra = self.sampling, dict(self.config.extra_body)
        if sampling.top_k is not None:
            extra["top_k"] = sampling.top_k
        if self.config.token_ids:
            extra["return_token_ids"] = True
        drawn = {"top_p": sampling.top_p, "seed": seed} if sampling.temperature > 0 else {}
        limits = {"temperature": sampling.temperature, "max_tokens": sampling.max_tokens, "extra_body": extra or None}
        return {"messages": list(messages), **limits, **drawn}

    async def _complete(self, server: Server, client: Any, body: dict[str, Any]) -> Answer:
        """The answer in a server's reply; Malformed where there is none that ended by itself or by its length."""
        reply = await client.chat.completions.create(model=self.model, **body)
        choice = next(iter(getattr(reply, "choices", None) or []), None)
        if choice is None:
            raise Malformed("the reply has no choices")
        if choice.finish_reason == "content_filter":
            raise Unanswered("skipped", FILTERED)
        if choice.finish_reason not in FINISHES:
            raise Malformed(f"finish_reason {choice.finish_reason!r}")
        self.last_answer = asyncio.get_running_loop().time()
        server.is_away = False
        message, ids = choice.message, getattr(choice, "token_ids", None)
        prompt_ids = getattr(reply, "prompt_token_ids", None)
        thoughts = [getattr(message, name, None) for name in ("reasoning_content", "reasoning")]
        return Answer(
            content=message.content or "",
            finish=FINISHES[choice.finish_reason],
            num_tokens=reply.usage.completion_tokens if reply.usage else 0,
            reasoning=max((text for text in thoughts if text is not None), key=len, default=None),
            token_ids=tuple(ids) if ids and prompt_ids else None,
            prompt_token_ids=tuple(prompt_ids) if ids and prompt_ids else None,
        )

    async def _is_up(self, server: Server) -> bool:
        """Whether a server answers a short question of no row, so that it is the row that it cannot answer."""
        try:
            client = server.client.with_options(max_retries=0)
            await self._complete(server, client, {"messages": QUESTION, "max_tokens": 1})
        except self.errors:
            return False
        return True

    def _judge(self, server: Server, error: Any) -> tuple[str, bool]:
        """Why a request was given up, and whether the row may be the reason; raises what ends the row or the run."""
        status, why = getattr(error, "status_code", None), (str(error).splitlines() or ["?"])[0][:200]
        if status in (401, 403, 404):
            raise UserError(
                f"{server.url}: {why}; check distill.server.urls (they end in /v1), distill.server.model "
                f"({self.model}), and the key in OPENAI_API_KEY"
            ) from error
        if status in (400, 413, 422):
            is_too_long = IS_TOO_LONG.search(why)
            raise Unanswered("skipped" if is_too_long else "failed", TOO_LONG if is_too_long else why) from error
        if status == 503 and ("retry-after" in error.response.headers or IS_BUSY.search(why)):
            return why, False
        is_unreachable = "Connect" in type(error.__cause__).__name__  # httpx: ConnectError, ConnectTimeout
        return why, status != 429 and not is_unreachable
