"""Answers of the target, in this process or from servers, and the thinking in its chat template."""

import asyncio
import os
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

from pydantic import ValidationError

from aerie.configs.errors import UserError, masked, warn
from aerie.configs.read import adapter
from aerie.configs.schema.data import AnswerSamplingConfig, ServerConfig
from aerie.data.chat import answer_text, apply_template
from aerie.data.conversations import Message
from aerie.data.forms import CLOSE, OPEN
from aerie.model.storage import first_line

TOO_LONG = "too long for the target's context"
IS_TOO_LONG = re.compile(r"context length|max_model_len|too long|longer than", re.IGNORECASE)
PAUSE_S = 1.0  # before a server that was away or busy is asked again
QUESTION: list[Message] = [{"role": "user", "content": "Hi"}]
# Left out where a text is compared with its tokens.
LOOSE = re.compile(rf"\s|\ufffd|{OPEN}|{CLOSE}")
# HTTP statuses, by what they mean here
REDIRECTS = (301, 302, 303, 307, 308)
WRONG_ADDRESS = (401, 403, 404)
REJECTED = (400, 413, 422)  # this row
BUSY = (429, 503)


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
    """How an input row ended."""

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
        self.status = status
        self.why = why


# --- thinking -----------------------------------------------------------------------------------


class Thinking:
    """Splits thinking from answers and puts it back, as one tokenizer's chat template does."""

    def __init__(
        self, tokenizer: Any, end_ids: set[int], template_arguments: Mapping[str, Any] | None = None
    ) -> None:
        self.tokenizer = tokenizer
        self.end_ids = end_ids
        self.template_arguments = dict(template_arguments or {})
        # The generation prompt may open the thinking.
        self.is_opened = self.prompt(QUESTION).rstrip().endswith(OPEN)
        # The template's own field for it; without one, thinking is in the content.
        self.has_field = "reasoning_content" in str(tokenizer.chat_template)
        probe: Message = {"role": "assistant", "content": "contentprobe"}
        after_answer = self.rendered([*QUESTION, probe]).rpartition("contentprobe")[2]
        ends = (token for token in self.ids(after_answer) if token in end_ids)
        self.end_id = next(ends, tokenizer.eos_token_id)
        self.num_ids = max(tokenizer.get_vocab().values()) + 1
        added = tokenizer.added_tokens_decoder.items()
        self.special_ids = {number for number, token in added if token.special}

    def read(self, answer: Answer) -> Answer:
        """The answer, with its thinking split from its content."""
        content = answer.content
        thought = answer.reasoning
        # A server's blank thinking is none, unless the prompt opens it.
        if thought is not None and (thought.strip() or (self.is_opened and CLOSE not in content)):
            # The line breaks that the server has stripped are put back.
            before = "" if self.is_opened else "\n"
            after = "" if answer.is_cut and not content else "\n"
            return replace(
                answer,
                reasoning=before + thought.strip("\n") + after,
                content=content and "\n\n" + content.lstrip("\n"),
            )
        thought, closed, rest = content.partition(CLOSE)
        begins_with_it = self.is_opened or thought.lstrip().startswith(OPEN)
        if begins_with_it and (closed or answer.is_cut):
            thought = thought if self.is_opened else thought.partition(OPEN)[2]
            return replace(answer, reasoning=thought, content=rest)
        return replace(answer, reasoning=None)

    def problem(self, answer: Answer, messages: Sequence[Message]) -> str | None:
        """Why an answer from `read` cannot be what the target wrote after messages; else None."""
        text = f"{answer.reasoning or ''}{answer.content}"
        if answer.token_ids is None:
            is_special = self.special_ids & {*self.ids(text)}
            return "the answer spells a special token" if is_special else None
        ids = [*answer.token_ids, *(answer.prompt_token_ids or ())]
        if not 0 <= min(ids, default=0) <= max(ids, default=0) < self.num_ids:
            return f"token ids outside the {self.num_ids:,} of the target's tokenizer"
        decode = self.tokenizer.decode
        prompt_ids = answer.prompt_token_ids
        question = decode(self.ids(messages[-1]["content"]))
        if prompt_ids and _loosely(question) not in _loosely(decode(prompt_ids)):
            return "its prompt token ids do not spell the prompt"
        ids = [token for token in answer.token_ids if token not in self.end_ids]
        spelt = {_loosely(answer_text(self.tokenizer, ids)), _loosely(decode(ids))}
        is_spelt = spelt & {_loosely(text), _loosely(answer.content)}
        return None if is_spelt else "its token ids do not spell its text"

    def message(self, answer: Answer) -> Message:
        """The answer as the chat template expects it in a conversation."""
        thought = answer.reasoning or ""
        content = answer.content if answer.reasoning is None else answer.content.lstrip("\n")
        message = {"role": "assistant", "content": content}
        if thought.strip() and self.has_field:
            message["reasoning_content"] = thought.strip("\n")
        elif thought.strip():
            message["content"] = f"{OPEN}\n" * self.is_opened + self.written(answer)
        return message

    def written(self, answer: Answer) -> str:
        """What the target wrote after the generation prompt, which may have opened the tag."""
        if answer.reasoning is None:
            return answer.content
        opening = "" if self.is_opened else OPEN
        closing = "" if answer.is_cut and not answer.content else CLOSE
        return f"{opening}{answer.reasoning}{closing}{answer.content}"

    def prompt(self, messages: Sequence[Message]) -> str:
        """What the target reads before it answers."""
        settings = {**self.template_arguments, "add_generation_prompt": True}
        return str(apply_template(self.tokenizer, messages, **settings))

    def rendered(self, messages: Sequence[Message]) -> str:
        """The conversation as training renders it."""
        return str(apply_template(self.tokenizer, messages, add_generation_prompt=False))

    def ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def answer_ids(self, answer: Answer) -> list[int]:
        """The answer's tokens, with the end-of-turn token, which some servers leave out."""
        ids = self.ids(self.written(answer)) if answer.token_ids is None else list(answer.token_ids)
        has_end = bool(answer.token_ids) and ids[-1] in self.end_ids
        if answer.is_cut or has_end or self.end_id is None:
            return ids
        return [*ids, self.end_id]

    def training_rows(self, outcome: Outcome) -> list[dict[str, Any]]:
        """JSON-ready training rows of a done row.

        They are text if training renders it as the target wrote it; else (token ids, a cut answer,
        a template that rewrites) tokens. A row of tokens holds all answers, unless a later prompt
        rewrites earlier tokens: then another row begins.
        """
        messages = system_turns(outcome.system)
        prompts = list[str]()
        is_text = True
        for question, answer in zip(outcome.turns, outcome.answers, strict=True):
            messages.append({"role": "user", "content": question})
            prompts.append(self.prompt(messages))
            messages.append(self.message(answer))
            is_text = (
                is_text
                and answer.token_ids is None
                and not answer.is_cut
                and self.rendered(messages).startswith(prompts[-1] + self.written(answer))
            )
        if is_text:
            return [{"id": outcome.id, "messages": messages}]
        rows: list[dict[str, Any]] = []
        ids, mask = list[int](), list[int]()
        for text, answer in zip(prompts, outcome.answers, strict=True):
            prompt_ids = list(answer.prompt_token_ids or self.ids(text))
            if prompt_ids[: len(ids)] == ids and rows:
                rows.pop()  # this row goes on
            else:
                mask = []
            answer_ids = self.answer_ids(answer)
            ids = [*prompt_ids, *answer_ids]
            mask = [*mask, *[0] * (len(prompt_ids) - len(mask)), *[1] * len(answer_ids)]
            rows.append({"id": outcome.id, "input_ids": ids, "loss_mask": mask})
        return rows


def _loosely(text: str) -> str:
    return LOOSE.sub("", text)


def system_turns(system: str | None) -> list[Message]:
    return [{"role": "system", "content": system}] if system else []


# --- who answers --------------------------------------------------------------------------------


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
    """Asks the target on its servers.

    A row fails if a server rejects it, or errs on it alone. Otherwise it waits for a server.
    """

    def __init__(self, config: ServerConfig, model: str, sampling: AnswerSamplingConfig) -> None:
        try:
            import openai
        except ImportError as error:
            raise UserError("distill.server needs openai: pip install -e .[distill]") from error
        self.config = config
        self.errors = (openai.APIError, TimeoutError, ValueError)
        # openai's limit is for each read; this one, of all tries, stops a server that drips.
        self.limit_s = config.timeout_s * (config.retries + 1)
        timeout = openai.Timeout(config.timeout_s, connect=min(10.0, config.timeout_s))
        self.clients = {
            url: openai.AsyncOpenAI(
                base_url=url,
                api_key=os.environ.get("OPENAI_API_KEY") or "none",
                timeout=timeout,
                max_retries=config.retries,
                http_client=openai.DefaultAsyncHttpxClient(follow_redirects=False, timeout=timeout),
            )
            for url in config.urls
        }
        self.under_way = dict.fromkeys(config.urls, 0)  # requests
        self.away = set[str]()  # servers that do not answer
        self.last_answer = 0.0  # by the loop's clock
        extra = {"top_k": sampling.top_k, "return_token_ids": config.token_ids or None}
        chosen = {name: value for name, value in extra.items() if value is not None}
        self.body: dict[str, Any] = {
            "model": model,
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "extra_body": {**config.extra_body, **chosen},
        }

    async def __aenter__(self) -> "ServedTarget":
        self.last_answer = asyncio.get_running_loop().time()
        try:
            await self(QUESTION, 0)  # if it fails, all rows would
        except Unanswered as error:
            raise UserError(
                f"{', '.join(self.clients)}: no answer to a question: {error.why}; "
                "check distill.sampling (max_tokens) and distill.server.extra_body"
            ) from error
        return self

    async def __aexit__(self, *_: object) -> None:
        for client in self.clients.values():
            await client.close()

    async def __call__(self, messages: Sequence[Message], seed: int) -> Answer:
        strikes = 0
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
                why = masked(first_line(error))[:200]
                status = getattr(error, "status_code", None)
                self._raise_if_final(url, status, why, error)
            finally:
                self.under_way[url] -= 1
            waited = asyncio.get_running_loop().time() - self.last_answer
            is_late = waited > self.config.patience_s
            if (is_late or status not in BUSY) and await self._is_up(url):
                strikes += 1
                if strikes > 1:  # the first error may be from the end of an outage
                    raise Unanswered("failed", why)
            elif is_late:
                raise UserError(
                    f"{url}: {why}; no server has answered for {self.config.patience_s:g} s "
                    "(distill.server.patience_s); start it again, then run the same command"
                )
            elif url not in self.away:
                self.away.add(url)
                warn(f"{url}: {why}; it is asked again for {self.config.patience_s:g} s")
            await asyncio.sleep(PAUSE_S)

    def _raise_if_final(self, url: str, status: int | None, why: str, error: Any) -> None:
        """Raises if another try cannot help: UserError for all rows, Unanswered for this one."""
        if status in REDIRECTS:  # the new address would get the key and the prompts
            raise UserError(
                f"{url}: redirects to {error.response.headers.get('location')}; "
                "if you trust that URL, put it in distill.server.urls"
            ) from error
        if status in WRONG_ADDRESS:
            raise UserError(
                f"{url}: {why}; check distill.server.urls (.../v1), "
                f"model ({self.body['model']}) and OPENAI_API_KEY"
            ) from error
        if status in REJECTED:
            is_long = IS_TOO_LONG.search(why)
            end = Unanswered("skipped", TOO_LONG) if is_long else Unanswered("failed", why)
            raise end from error

    async def _complete(self, client: Any, **body: Any) -> Answer:
        async with asyncio.timeout(self.limit_s):
            reply = await client.chat.completions.create(**body)
        try:
            choices = getattr(reply, "choices", None)  # a proxy's page is a text
            if not choices or choices[0].finish_reason not in ("stop", "length"):
                raise ValueError("the reply holds no whole answer")
            self.last_answer = asyncio.get_running_loop().time()
            return _answer_of(reply)
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


def _answer_of(reply: Any) -> Answer:
    choice = reply.choices[0]
    ids = getattr(choice, "token_ids", None)
    prompt_ids = getattr(reply, "prompt_token_ids", None)
    values: dict[str, Any] = {
        "content": choice.message.content or "",
        "finish": choice.finish_reason,
        # vLLM has used both names.
        "reasoning": getattr(choice.message, "reasoning_content", None)
        or getattr(choice.message, "reasoning", None),
    }
    if ids and prompt_ids:
        values |= {"token_ids": ids, "prompt_token_ids": prompt_ids}
    return cast(Answer, adapter(Answer).validate_python(values))
