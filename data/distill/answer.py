"""Answers of the target, in this process or from servers, and the thinking in its chat template."""

import asyncio
import os
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any, Literal, cast

from pydantic import ValidationError

from aerie.configs.errors import LONE_SURROGATE, UserError, masked, warn
from aerie.configs.read import adapter
from aerie.configs.schema.data import AnswerSamplingConfig, ServerConfig
from aerie.data.chat import answer_text, apply_template
from aerie.data.conversations import Message
from aerie.model.storage import first_line

TOO_LONG = "too long for the target's context"
IS_TOO_LONG = re.compile(r"context length|max_model_len|too long|longer than", re.IGNORECASE)
CONNECT_S = 10.0
PAUSE_S = 1.0  # before a server that was away or busy is asked again
QUESTION: list[Message] = [{"role": "user", "content": "Hi"}]
OPEN, CLOSE = "<think>", "</think>"
LOOSE = re.compile(
    rf"\s|\ufffd|{OPEN}|{CLOSE}"
)  # left out where a text is compared with its tokens


@dataclass(frozen=True)
class Answer:
    content: str
    finish: str  # 'stop' after an end-of-turn token; otherwise it is cut
    reasoning: str | None = None  # thinking, split from the content; blanks kept
    token_ids: tuple[int, ...] | None = None  # some servers leave out the end-of-turn token
    prompt_token_ids: tuple[int, ...] | None = None

    @property
    def is_cut(self) -> bool:
        return self.finish != "stop"


@dataclass(frozen=True)
class Outcome:
    id: str
    status: Literal["done", "skipped", "failed"]
    place: str
    why: str | None = None
    system: str | None = None
    turns: tuple[str, ...] = ()  # the questions that were asked
    answers: tuple[Answer, ...] = ()
    invented: Answer | None = None  # holds the first question


# (conversation that ends with the user, seed) -> the answer
Ask = Callable[[Sequence[Message], int], Awaitable[Answer]]


class Unanswered(Exception):
    def __init__(self, status: Literal["skipped", "failed"], why: str) -> None:
        super().__init__(why)
        self.status, self.why = status, why


class Thinking:
    """Splits thinking from answers and puts it back, as one tokenizer's chat template does."""

    def __init__(
        self, tokenizer: Any, end_ids: set[int], template_arguments: Mapping[str, Any] | None = None
    ) -> None:
        self.tokenizer, self.end_ids, self.template_arguments = (
            tokenizer,
            end_ids,
            dict(template_arguments or {}),
        )
        self.is_opened = self.prompt(QUESTION).rstrip().endswith(OPEN)  # by the generation prompt
        self.has_field = "reasoning_content" in str(
            tokenizer.chat_template
        )  # otherwise thinking is in the content
        text = self.prompt(
            [*QUESTION, {"role": "assistant", "content": "contentprobe"}], is_whole=True
        )
        after_answer = self.ids(text.rpartition("contentprobe")[2])
        self.end_id = next(
            (token for token in after_answer if token in end_ids), tokenizer.eos_token_id
        )
        self.num_ids = max(tokenizer.get_vocab().values()) + 1
        self.special_ids = {
            number for number, token in tokenizer.added_tokens_decoder.items() if token.special
        }

    def read(self, answer: Answer) -> Answer:
        """The answer, with its thinking split from its content."""
        content, thought = answer.content, answer.reasoning
        # A server's blank thinking is none, unless the prompt opens it. Stripped line breaks are put back.
        if thought is not None and (thought.strip() or (self.is_opened and CLOSE not in content)):
            is_open = answer.is_cut and not content
            thought = "\n" * (not self.is_opened) + thought.strip("\n") + "\n" * (not is_open)
            return replace(
                answer, reasoning=thought, content=content and "\n\n" + content.lstrip("\n")
            )
        thought, closed, rest = content.partition(CLOSE)
        if (self.is_opened or thought.lstrip().startswith(OPEN)) and (closed or answer.is_cut):
            thought = thought if self.is_opened else thought.partition(OPEN)[2]
            return replace(answer, reasoning=thought, content=rest)
        return replace(answer, reasoning=None)

    def problem(self, answer: Answer, messages: Sequence[Message]) -> str | None:
        """Why an answer from `read` cannot be what the target wrote after messages; None if it can."""
        text = f"{answer.reasoning or ''}{answer.content}"
        if LONE_SURROGATE.search(text):
            return "the answer holds half of a surrogate pair"
        if answer.token_ids is None:
            return (
                "the answer spells a special token"
                if self.special_ids & {*self.ids(text)}
                else None
            )
        ids = [*answer.token_ids, *(answer.prompt_token_ids or ())]
        if not 0 <= min(ids, default=0) <= max(ids, default=0) < self.num_ids:
            return f"token ids outside the {self.num_ids:,} of the target's tokenizer"
        asked = self.ids(messages[-1]["content"])
        asked_text, read = (
            self.tokenizer.decode(some) for some in (asked, answer.prompt_token_ids or asked)
        )
        if LOOSE.sub("", asked_text) not in LOOSE.sub("", read):
            return "its prompt token ids do not spell the prompt"
        ids = [token for token in answer.token_ids if token not in self.end_ids]
        decoded = (answer_text(self.tokenizer, ids), self.tokenizer.decode(ids))
        said = {LOOSE.sub("", words) for words in (text, answer.content)}
        return (
            None
            if said & {LOOSE.sub("", words) for words in decoded}
            else "its token ids do not spell its text"
        )

    def message(self, answer: Answer) -> Message:
        thought, content = answer.reasoning or "", answer.content
        content = content if answer.reasoning is None else content.lstrip("\n")
        if thought.strip() and self.has_field:
            return {
                "role": "assistant",
                "content": content,
                "reasoning_content": thought.strip("\n"),
            }
        if thought.strip():
            content = f"{OPEN}\n" * self.is_opened + self.written(answer)
        return {"role": "assistant", "content": content}

    def written(self, answer: Answer) -> str:
        """What the target wrote after the generation prompt, which may have opened the tag."""
        if answer.reasoning is None:
            return answer.content
        is_open = answer.is_cut and not answer.content
        return (
            OPEN * (not self.is_opened) + answer.reasoning + CLOSE * (not is_open) + answer.content
        )

    def prompt(self, messages: Sequence[Message], is_whole: bool = False) -> str:
        """What the target reads before it answers; is_whole: the conversation as training renders it."""
        settings = {} if is_whole else self.template_arguments
        return apply_template(
            self.tokenizer, messages, **{**settings, "add_generation_prompt": not is_whole}
        )

    def ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def answer_ids(self, answer: Answer) -> list[int]:
        """The answer's tokens, with the end-of-turn token, which some servers leave out."""
        ids = self.ids(self.written(answer)) if answer.token_ids is None else list(answer.token_ids)
        has_end = (
            answer.is_cut or self.end_id is None or (answer.token_ids and ids[-1] in self.end_ids)
        )
        return ids if has_end else [*ids, self.end_id]

    def training_rows(self, outcome: Outcome) -> list[dict[str, Any]]:
        """JSON-ready training rows of a done row: one, or one per answer if later prompts rewrite earlier tokens.

        They are text if training renders it as the target wrote it; else (token ids, a cut answer, a rewrite) tokens.
        """
        turns: list[Message] = (
            [{"role": "system", "content": outcome.system}] if outcome.system else []
        )
        prompts, is_text = list[str](), True
        for question, answer in zip(outcome.turns, outcome.answers, strict=True):
            turns.append({"role": "user", "content": question})
            prompts.append(self.prompt(turns))
            turns.append(self.message(answer))
            is_text = is_text and answer.token_ids is None and not answer.is_cut
            is_text = is_text and self.prompt(turns, is_whole=True).startswith(
                prompts[-1] + self.written(answer)
            )
        if is_text:
            return [{"id": outcome.id, "messages": turns}]
        rows: list[dict[str, Any]] = []
        for text, answer in zip(prompts, outcome.answers, strict=True):
            prompt = (
                self.ids(text) if answer.prompt_token_ids is None else list(answer.prompt_token_ids)
            )
            before = rows[-1]["input_ids"] if rows else []
            mask = rows.pop()["loss_mask"] if rows and prompt[: len(before)] == before else []
            ids = self.answer_ids(answer)
            mask = [*mask, *[0] * (len(prompt) - len(mask)), *[1] * len(ids)]
            rows.append({"id": outcome.id, "input_ids": [*prompt, *ids], "loss_mask": mask})
        return rows


def local_target(
    decode: Callable[[list[int], int], list[int]], thinking: Thinking, room: int
) -> Ask:
    """decode: (prompt ids, seed) -> answer ids; room: a prompt's most tokens."""

    async def ask(messages: Sequence[Message], seed: int) -> Answer:
        prompt = thinking.ids(thinking.prompt(messages))
        if len(prompt) > room:
            raise Unanswered("skipped", TOO_LONG)
        ids = decode(prompt, seed)
        has_ended = bool(ids) and ids[-1] in thinking.end_ids
        text = answer_text(thinking.tokenizer, ids[:-1] if has_ended else ids)
        return Answer(text, "stop" if has_ended else "length", None, tuple(ids), tuple(prompt))

    return ask


class ServedTarget:
    """Asks the target on its servers. A row fails if one rejects it, or errs on it alone; else it waits."""

    def __init__(self, config: ServerConfig, model: str, sampling: AnswerSamplingConfig) -> None:
        try:
            import openai
        except ImportError as error:
            raise UserError("distill.server needs openai: pip install -e .[distill]") from error
        self.config, self.errors = config, (openai.APIError, ValueError, RecursionError)
        timeout = openai.Timeout(config.timeout_s, connect=min(CONNECT_S, config.timeout_s))
        httpx = import_module(
            openai.DefaultAsyncHttpxClient.__mro__[-2].__module__.partition(".")[0]
        )  # or "httpx2"

        class Client(openai.DefaultAsyncHttpxClient):
            async def send(self, request: Any, **options: Any) -> Any:
                try:
                    async with asyncio.timeout(config.timeout_s):  # openai's limit is for each read
                        return await super().send(request, **options)
                except TimeoutError as error:
                    raise httpx.ReadTimeout("", request=request) from error

        settings = {
            "api_key": os.environ.get("OPENAI_API_KEY") or "none",
            "max_retries": config.retries,
        }
        self.clients = dict[str, Any]()
        for url in config.urls:
            client = Client(follow_redirects=False, timeout=timeout)
            self.clients[url] = openai.AsyncOpenAI(
                base_url=url, http_client=client, timeout=timeout, **settings
            )
        self.under_way, self.away = dict.fromkeys(config.urls, 0), set[str]()
        extra = {
            **config.extra_body,
            **({} if sampling.top_k is None else {"top_k": sampling.top_k}),
        }
        extra |= {"return_token_ids": True} if config.token_ids else {}
        self.body: dict[str, Any] = {
            "model": model,
            "max_tokens": sampling.max_tokens,
            "extra_body": extra or None,
        }
        self.body |= {"temperature": sampling.temperature, "top_p": sampling.top_p}
        self.last_answer = 0.0  # by the loop's clock

    async def __aenter__(self) -> "ServedTarget":
        self.last_answer = asyncio.get_running_loop().time()
        try:
            await self(QUESTION, 0)  # if it fails, all rows would
        except Unanswered as error:
            fix = "check distill.sampling (max_tokens) and distill.server.extra_body"
            raise UserError(
                f"{', '.join(self.clients)}: no answer to a question: {error.why}; {fix}"
            ) from error
        return self

    async def __aexit__(self, *_: object) -> None:
        for client in self.clients.values():
            await client.close()

    async def __call__(self, messages: Sequence[Message], seed: int) -> Answer:
        now, strikes, patience = asyncio.get_running_loop().time, 0, self.config.patience_s
        while True:
            url = min(self.clients, key=lambda url: self.under_way[url] + (url in self.away))
            self.under_way[url] += 1
            try:
                answer = await self._complete(
                    self.clients[url], messages=list(messages), seed=seed, **self.body
                )
                self.away.discard(url)
                return answer
            except self.errors as error:
                status, why = getattr(error, "status_code", None), masked(first_line(error))[:200]
                if status in (
                    301,
                    302,
                    303,
                    307,
                    308,
                ):  # the new address would get the key and the prompts
                    reply: Any = getattr(error, "response", None)
                    fix = f"redirects to {reply.headers.get('location')}; if you trust that URL, put it"
                    raise UserError(f"{url}: {fix} in distill.server.urls") from error
                if status in (401, 403, 404):
                    fix = f"check distill.server.urls (.../v1), model ({self.body['model']}) and OPENAI_API_KEY"
                    raise UserError(f"{url}: {why}; {fix}") from error
                if status in (400, 413, 422):
                    is_too_long = IS_TOO_LONG.search(why)
                    raise Unanswered(
                        *("skipped", TOO_LONG) if is_too_long else ("failed", why)
                    ) from error
            finally:
                self.under_way[url] -= 1
            is_late = now() - self.last_answer > patience
            if (is_late or status not in (429, 503)) and await self._is_up(url):
                strikes += 1
                if strikes > 1:  # the first error may be from the end of an outage
                    raise Unanswered("failed", why)
            elif is_late:
                fault = f"no server has answered for {patience:g} s (distill.server.patience_s)"
                raise UserError(f"{url}: {why}; {fault}; start it again, then run the same command")
            elif url not in self.away:
                self.away.add(url)
                warn(f"{url}: {why}; it is asked again for {patience:g} s")
            await asyncio.sleep(PAUSE_S)

    async def _complete(self, client: Any, **body: Any) -> Answer:
        reply = await client.chat.completions.create(**body)
        try:
            if not getattr(reply, "choices", None) or reply.choices[0].finish_reason not in (
                "stop",
                "length",
            ):
                raise ValueError("the reply holds no whole answer")
            choice, self.last_answer = reply.choices[0], asyncio.get_running_loop().time()
            ids, prompt_ids = (
                getattr(choice, "token_ids", None),
                getattr(reply, "prompt_token_ids", None),
            )
            thought = getattr(choice.message, "reasoning_content", None)
            thought = thought or getattr(choice.message, "reasoning", thought)
            made = {"content": choice.message.content or "", "finish": choice.finish_reason}
            made |= {"token_ids": ids, "prompt_token_ids": prompt_ids} if ids and prompt_ids else {}
            return cast(Answer, adapter(Answer).validate_python({**made, "reasoning": thought}))
        except (ValidationError, AttributeError, TypeError, LookupError) as error:
            raise Unanswered(
                "skipped", "the server's reply has no text, or token ids that are no numbers"
            ) from error

    async def _is_up(self, url: str) -> bool:
        # Asks another question: if that is answered, the row is at fault.
        client = self.clients[url].with_options(max_retries=0)
        try:
            await self._complete(client, model=self.body["model"], messages=QUESTION, max_tokens=1)
        except self.errors:
            return False
        self.away.discard(url)
        return True
