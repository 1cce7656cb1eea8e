"""What is asked of the target and what it answers, whoever carries it: a server or this process."""

import asyncio
import json
import random
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from aerie.configs.errors import UserError, warn
from aerie.configs.schema.data import SamplingConfig, ServerConfig
from aerie.data.conversations import Message


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


MAX_WAIT_S, CONNECT_S = 60.0, 10.0
TOO_MANY_REQUESTS = 429  # never a row's doing
BUSY, WRONG_SETUP, REFUSED = (408, TOO_MANY_REQUESTS, 502, 503, 504), (401, 403, 404), (400, 413, 422)
FIRST_REFUSALS = 8  # so many refused requests, and no answer to any other, are the recipe's doing, not the rows'
DOUBTED = 3  # times in a row that a server was too busy, before it is asked whether it answers at all
OVERLOADED = re.compile(r"queue|overload|capacity|too many|rate limit", re.IGNORECASE)  # nor is a 503 that says so
TOO_LONG = re.compile(
    r"context length|maximum context|max(?:imum)?[ _]model[ _]len|too long|longer than", re.IGNORECASE
)
FINISHES = {"stop": "stop", "eos": "stop", "eos_token": "stop", "length": "length", "max_tokens": "length"}
UNHEARD, UNHEARD_BUSY = 0, 5  # setbacks in a row that pass without a word
UNREACHABLE = ("ConnectError", "ConnectTimeout")  # of httpx, by whichever name the client imports it


@dataclass
class Server:
    """One base URL and how it does."""

    url: str
    client: Any
    under_way: int = 0
    down_until: float = 0.0
    setbacks: int = 0  # in a row, of those that are the server's own
    why: str = ""  # the last of them
    answers: int = 0
    is_doubted: bool = False  # too busy DOUBTED times in a row, which may be the rows' doing
    is_probed: bool = False  # asked whether it is, and nothing else meanwhile


class ServedTarget:
    """Asks the target at its servers; close it at the end."""

    def __init__(self, config: ServerConfig, model: str, api_key: str, has_answered: bool = False) -> None:
        """has_answered: in an earlier sitting, so that refusals are the rows' doing. UserError without `openai`."""
        self.config, self.model = config, model
        self._openai = openai = _library()
        # a server that takes no connection is down long before an answer with its thinking is late
        timeout = openai.Timeout(config.timeout_s, connect=min(CONNECT_S, config.timeout_s))
        self.servers = [
            Server(url, openai.AsyncOpenAI(base_url=url, api_key=api_key, timeout=timeout, max_retries=0))
            for url in config.urls
        ]
        self._changed = asyncio.Condition()
        self._last_good: float | None = None
        self._has_answered, self._refusals = has_answered, 0
        self._pending = 0  # requests that may still be answered, whether under way or not
        self._answers = self._without_ids = 0  # answers, and those without the token ids that were asked for
        self.retries = 0  # of all requests, for the record

    async def close(self) -> None:
        """Closes the connections, and says how many answers of only some came without the ids asked for."""
        if 0 < self._without_ids < self._answers:
            warn(
                f"{self._without_ids:,} of {self._answers:,} answers came without token ids "
                f"(distill.server.token_ids asks for them), and are tokenised again from their text"
            )
        for server in self.servers:
            await server.client.close()

    async def __call__(self, request: Request) -> Answer:
        """The answer; Unanswered for a row that has none, UserError when the run cannot go on."""
        try:
            self._pending += 1
            try:
                return await self._answer(request)
            finally:
                self._pending -= 1
                await self._tell()
        except _Refused as refusal:
            await self._require_an_answer(refusal)
            raise refusal.end from None

    async def _answer(self, request: Request) -> Answer:
        failures, met = 0, dict[str, int]()  # URL -> its answers when it was last too busy for this row
        while True:
            server = await self._free_server()
            setback = None
            try:
                if server.is_probed and not await self._is_up(server):
                    continue
                reply = await server.client.chat.completions.create(**self._body(request))
                answer = self._take(server, reply)
            except (self._openai.APIError, json.JSONDecodeError, _Malformed) as error:
                setback = self._judge(server, error, met)
            finally:
                await self._release(server)
            if setback is None:
                return answer
            if setback.counts:
                failures += 1
                if failures > self.config.retries:
                    raise Unanswered("failed", f"{setback.why}, {failures} times")
                self.retries += 1
                await asyncio.sleep(self._wait(failures, f"{request.seed}/{failures}"))

    def _body(self, request: Request) -> dict[str, Any]:
        sampling = request.sampling
        extra = dict(self.config.extra_body)
        if sampling.top_k is not None:
            extra["top_k"] = sampling.top_k
        if self.config.token_ids:
            extra["return_token_ids"] = True
        drawn = {"top_p": sampling.top_p, "seed": request.seed} if sampling.temperature > 0 else {}
        return {
            "model": self.model,
            "messages": list(request.messages),
            "temperature": sampling.temperature,
            "max_tokens": sampling.max_tokens,
            **drawn,
            **({"extra_body": extra} if extra else {}),
        }

    def _take(self, server: Server, reply: Any) -> Answer:
        """The reply's answer; the server is up, whatever it said before."""
        answer = _read(reply)
        self._has_answered = True
        self._answers += 1
        if self.config.token_ids and answer.token_ids is None:
            self._without_ids += 1
            if self._without_ids == 1:
                warn(
                    f"{server.url}: sends no token ids (distill.server.token_ids asks for them): answers are tokenised "
                    f"again from their text, which may not give the target's own tokens; serve with what knows "
                    f"return_token_ids, or set it to false"
                )
        self._count_answer(server)
        return answer

    def _count_answer(self, server: Server) -> None:
        self._last_good, server.setbacks, server.down_until = _now(), 0, 0.0
        server.answers, server.is_doubted = server.answers + 1, False

    async def _is_up(self, server: Server) -> bool:
        """Whether a server that is doubted may be asked: it answers a question of no row, or refuses it."""
        question = [{"role": "user", "content": "Hi"}]
        try:
            reply = await server.client.chat.completions.create(model=self.model, messages=question, max_tokens=1)
            if getattr(reply, "choices", None):
                self._count_answer(server)
        except (self._openai.APIError, json.JSONDecodeError) as error:
            if getattr(error, "status_code", None) in REFUSED:
                self._count_answer(server)
            else:
                self._judge(server, error, {})
        finally:
            server.is_probed = False
            await self._tell()
        return server.down_until <= _now()

    def _judge(self, server: Server, error: Exception, met: dict[str, int]) -> "_Setback":
        """What a failure means; raises what ends the row or the run. met: the row's."""
        if isinstance(error, self._openai.APIStatusError):
            return self._judge_status(server, error.status_code, error, met)
        if type(error.__cause__).__name__ in UNREACHABLE:
            return self._leave_alone(server, f"{server.url}: cannot be reached", None)
        if isinstance(error, self._openai.APITimeoutError):
            return _Setback(f"no answer within {self.config.timeout_s:g} s", counts=True)
        if isinstance(error, self._openai.APIConnectionError):
            return _Setback("the connection was cut", counts=True)
        return _Setback(f"no usable answer ({_first_line(error)})", counts=True)

    def _judge_status(self, server: Server, status: int, error: Any, met: dict[str, int]) -> "_Setback":
        message = _first_line(error)
        if status in BUSY:
            has_asked_for_time = "retry-after" in error.response.headers or OVERLOADED.search(message)
            can_be_row = status != TOO_MANY_REQUESTS and not (status == 503 and has_asked_for_time)
            if can_be_row and server.answers > met.get(server.url, server.answers):
                met[server.url] = server.answers
                return _Setback(f"HTTP {status}", counts=True)
            met[server.url] = server.answers
            setback = self._leave_alone(server, f"{server.url}: HTTP {status}", error.response.headers)
            server.is_doubted = can_be_row and server.setbacks >= DOUBTED
            return setback
        if status in WRONG_SETUP:
            raise UserError(
                f"{server.url}: HTTP {status} for model {self.model!r}: {message}; check distill.server.urls (they end "
                f"in /v1), distill.server.model, and the key in OPENAI_API_KEY"
            )
        if status in REFUSED:
            self._refusals += 1
            said = f"{server.url}: refuses every request: HTTP {status}: {message}"
            if TOO_LONG.search(message):
                fix = "lower distill.sampling.max_tokens, or give the server a longer context"
                raise _Refused(Unanswered("skipped", TOO_LONG_FOR_SERVER), f"{said}; {fix}")
            raise _Refused(Unanswered("failed", f"HTTP {status}: {message}"), said)
        return _Setback(f"HTTP {status}", counts=True)

    async def _require_an_answer(self, refusal: "_Refused") -> None:
        """Behind the first refusals holds a row back until another is answered; UserError when none can be any more."""

        def is_settled() -> bool:
            return self._has_answered or self._refusals < FIRST_REFUSALS or not self._pending

        async with self._changed:
            await self._changed.wait_for(is_settled)
        if not self._has_answered and self._refusals >= FIRST_REFUSALS:
            raise UserError(refusal.of_all)

    def _leave_alone(self, server: Server, why: str, headers: Mapping[str, str] | None) -> "_Setback":
        """Asks the server nothing for a while, longer each time; requests that fail together are one time."""
        now = _now()
        server.why, is_down = why, now < server.down_until
        asked = (headers or {}).get("retry-after", "")
        if re.fullmatch(r"\d+(\.\d+)?", asked):
            server.down_until = max(server.down_until, now + min(float(asked), MAX_WAIT_S))
        if is_down:
            return _Setback(why, counts=False)
        if server.setbacks == (UNHEARD if headers is None else UNHEARD_BUSY):
            warn(f"{why}; it is asked again for up to {self.config.patience_s:g} s (distill.server.patience_s)")
        server.setbacks += 1
        wait = self._wait(server.setbacks, server.url)
        server.down_until = max(server.down_until, now + wait)
        return _Setback(why, counts=False)

    def _wait(self, tries: int, key: str) -> float:
        """Seconds before the next try: doubled each time, up to a minute, between half of it and all."""
        longest = min(self.config.backoff_s * 2.0 ** min(tries - 1, 16), MAX_WAIT_S)
        return longest * (0.5 + 0.5 * random.Random(key).random())

    async def _free_server(self) -> Server:
        """The server with the fewest requests under way, once one is up and has room; this request is counted."""
        async with self._changed:
            while True:
                now = _now()
                if self._last_good is None:
                    self._last_good = now
                roomy = [
                    server
                    for server in self.servers
                    if server.under_way < self.config.concurrency and not server.is_probed
                ]
                ready = [server for server in roomy if server.down_until <= now]
                if ready:
                    chosen = min(ready, key=lambda server: server.under_way)
                    chosen.under_way += 1
                    chosen.is_probed = chosen.is_doubted
                    return chosen
                self._check_patience(now)
                wait = min((server.down_until - now for server in roomy), default=None)
                try:
                    await asyncio.wait_for(self._changed.wait(), wait)
                except TimeoutError:
                    continue

    async def _release(self, server: Server) -> None:
        server.under_way -= 1
        await self._tell()

    async def _tell(self) -> None:
        """Wakes all that wait for a change."""
        async with self._changed:
            self._changed.notify_all()

    def _check_patience(self, now: float) -> None:
        assert self._last_good is not None
        if now - self._last_good > self.config.patience_s and not any(server.under_way for server in self.servers):
            raise UserError(
                f"{', '.join(self.config.urls)}: no answer for {self.config.patience_s:g} s "
                f"(distill.server.patience_s); {', '.join(server.why for server in self.servers if server.why)}: "
                f"start the server again, then the same command goes on"
            )


@dataclass(frozen=True)
class _Setback:
    """Why a request has to be made again, and whether that counts against its row."""

    why: str
    counts: bool


class _Refused(Exception):
    """A request that the server does not take: the end of its row, and what to say if the server takes none."""

    def __init__(self, end: Unanswered, of_all: str) -> None:
        super().__init__(of_all)
        self.end, self.of_all = end, of_all


class _Malformed(Exception):
    """A reply that holds no answer."""


def _read(reply: Any) -> Answer:
    """The answer in a chat completion; _Malformed when there is none that ended by itself or by its length.

    Unanswered where a content filter ended it.
    """
    choices = getattr(reply, "choices", None)
    if not choices or getattr(choices[0], "message", None) is None:
        raise _Malformed("the reply has no choices")
    choice = choices[0]
    if choice.finish_reason == "content_filter":
        raise Unanswered("skipped", FILTERED)
    if choice.finish_reason not in FINISHES:
        raise _Malformed(f"finish_reason {choice.finish_reason!r}")
    message, usage = choice.message, getattr(reply, "usage", None)
    sent = [getattr(message, name, None) for name in ("reasoning_content", "reasoning")]
    thoughts = [text for text in sent if isinstance(text, str)]
    reasoning = next((text for text in thoughts if text.strip()), thoughts[0] if thoughts else None)
    ids, prompt_ids = getattr(choice, "token_ids", None), getattr(reply, "prompt_token_ids", None)
    whole = (ids, prompt_ids) if isinstance(ids, list) and isinstance(prompt_ids, list) else None
    return Answer(
        content=message.content or "",
        finish=FINISHES[choice.finish_reason],
        num_tokens=int(getattr(usage, "completion_tokens", 0) or 0),
        reasoning=reasoning,
        token_ids=tuple(whole[0]) if whole else None,
        prompt_token_ids=tuple(whole[1]) if whole else None,
    )


def _library() -> Any:
    try:
        import openai
    except ImportError as error:
        raise UserError(
            "distill.server: needs the package openai: pip install -e .[distill] (or set server: null)"
        ) from error
    return openai


def _now() -> float:
    return asyncio.get_running_loop().time()


def _first_line(error: Exception) -> str:
    body = getattr(error, "body", None)
    text = body.get("message") or body.get("detail") if isinstance(body, dict) else None
    lines = str(text or error).strip().splitlines()
    return (lines[0] if lines else type(error).__name__)[:200]
