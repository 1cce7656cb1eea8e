"""The target's answers, from this process or from servers, and the thinking in them."""

import asyncio
import os
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any, Literal, NamedTuple, Protocol, cast

from pydantic import ValidationError

from aerie.configs.errors import UserError, masked, warn
from aerie.configs.read import adapter
from aerie.configs.schema.data import AnswerSamplingConfig, ServerConfig
from aerie.data.chat import Chat, answer_text, render_prompt
from aerie.data.conversations import Conversation, Tally, system_turns
from aerie.data.forms import (
    CLOSE,
    IN_TAGS,
    OPEN,
    PROBE_ANSWER,
    PROBE_CALL,
    THOUGHT_FORMS,
    MessageForm,
)
from aerie.data.said import find_said, said_by
from aerie.data.shapes import Message
from aerie.data.tools import require_arguments, tool_calls_of
from aerie.data.values import UnusableRow
from aerie.model.storage import first_line

TOO_LONG = "too long for the target's context"
IS_TOO_LONG = re.compile(r"context length|max_model_len|too long|longer than", re.IGNORECASE)
IDS_KEY = "return_token_ids"  # vLLM's
WITHOUT_IDS = "an answer is learnt only if the chat template renders it as it was written"
UNKNOWN_MARKS = "the template does not say how the target writes a thought"
PAUSE_S = 1.0  # before a server that was away or busy is asked again
QUESTION: list[Message] = [{"role": "user", "content": "Hi"}]
# Characters that do not count where a text is compared with its tokens.
LOOSE = re.compile(rf"\s|\ufffd|{OPEN}|{CLOSE}")
# HTTP statuses, by what they mean here
REDIRECTS = (301, 302, 303, 307, 308)
WRONG_ADDRESS = (401, 403, 404)
REJECTED = (400, 413, 422)  # this row
BUSY = (429, 503)
# An answer's `finish`, by the server's finish_reason.
FINISHES = {"stop": "stop", "tool_calls": "stop", "length": "length"}


@dataclass(frozen=True)
class Answer:
    content: str
    finish: str  # 'stop' after an end-of-turn token; otherwise the answer is cut
    reasoning: str | None = None  # thinking, split from the content; blanks kept
    token_ids: tuple[int, ...] | None = None  # some servers leave out the end-of-turn token
    prompt_token_ids: tuple[int, ...] | None = None
    tool_calls: tuple[Any, ...] = ()  # calls that a server has split from the content
    text: str | None = None  # thinking and content together, if Thinking.read split them

    @property
    def is_cut(self) -> bool:
        return self.finish != "stop"

    @property
    def exact_text(self) -> str | None:
        """What the target wrote; None if a server split it and dropped what stood between."""
        if self.text is None and (self.reasoning is not None or self.tool_calls):
            return None
        return self.content if self.text is None else self.text


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
    tools: list[Any] | None = None


class Ask(Protocol):
    """Answers a conversation that ends with the user; the seed draws the answer's tokens.

    Raises Unanswered for this row, or UserError if no row can be answered.
    """

    def __call__(
        self, messages: Sequence[Message], seed: int, tools: list[Any] | None = None
    ) -> Awaitable[Answer]: ...


class Unanswered(Exception):
    """The error of a row without an answer: it is skipped, or failed and may be asked again."""

    def __init__(self, status: Literal["skipped", "failed"], why: str) -> None:
        super().__init__(why)
        self.status = status
        self.why = why


# --- thinking, and what is learnt -----------------------------------------------------------------


class Written(NamedTuple):
    """An answer as tokens."""

    prompt_ids: list[int]  # what the target has read
    answer_ids: list[int]  # with the end-of-turn token, unless the answer is cut


class Learnt(NamedTuple):
    """What is learnt from an outcome."""

    rows: list[dict[str, Any]]  # JSON-ready training rows
    answers: list[Written]  # up to the first that cannot be learnt
    why: str | None  # why that one cannot be learnt


class Thinking:
    """Splits thinking from answers and puts it back, as one tokenizer's chat template does.

    An answer's tokens come from the server, or from the template's own render of the answer if that
    holds all that the answer says. No text is put together here.
    """

    def __init__(
        self, tokenizer: Any, end_ids: set[int], template_arguments: Mapping[str, Any] | None = None
    ) -> None:
        self.tokenizer = tokenizer
        self.end_ids = end_ids
        # `chat` renders as the target reads; `training` has no arguments of a server.
        self.chat = Chat(tokenizer, end_ids, Tally(), template_arguments)
        self.training = Chat(tokenizer, end_ids, Tally()) if template_arguments else self.chat
        # The generation prompt may open the thinking.
        self.is_opened = self.prompt(QUESTION).rstrip().endswith(OPEN)
        self.num_ids = max(tokenizer.get_vocab().values()) + 1
        self.end_id = cache(self._find_end_id)

    def read(self, answer: Answer) -> Answer:
        """The answer, with its thinking split from its content if the server has not done so."""
        content = answer.content
        thought = answer.reasoning
        # Blank thinking from a server counts as none, unless the prompt opens it.
        if thought is not None and (thought.strip() or (self.is_opened and CLOSE not in content)):
            return answer
        thought, closed, rest = content.partition(CLOSE)
        begins_with_it = self.is_opened or thought.lstrip().startswith(OPEN)
        if begins_with_it and (closed or answer.is_cut):
            thought = thought if self.is_opened else thought.partition(OPEN)[2]
            return replace(answer, reasoning=thought, content=rest, text=content)
        return replace(answer, reasoning=None)

    def problem(self, answer: Answer, messages: Sequence[Message]) -> str | None:
        """Why an answer from `read` cannot be what the target wrote after messages; else None."""
        text = f"{answer.reasoning or ''}{answer.content}"
        if answer.token_ids is None:
            is_special = self.chat.special_ids & {*self.ids(text)}
            return "the answer spells a special token" if is_special else None
        ids = [*answer.token_ids, *(answer.prompt_token_ids or ())]
        if not 0 <= min(ids, default=0) <= max(ids, default=0) < self.num_ids:
            return f"its token ids are outside the {self.num_ids:,} of the target's tokenizer"
        decode = self.tokenizer.decode
        prompt_ids = answer.prompt_token_ids
        question = decode(self.ids(messages[-1]["content"]))
        if prompt_ids and _loosely(question) not in _loosely(decode(prompt_ids)):
            return "its prompt token ids do not spell the prompt"
        ids = [token for token in answer.token_ids if token not in self.end_ids]
        spelt = {_loosely(answer_text(self.tokenizer, ids)), _loosely(decode(ids))}
        is_spelt = bool(spelt & {_loosely(text), _loosely(answer.content)})
        if answer.exact_text is None and not is_spelt:  # its parts stand between other marks
            is_spelt = not find_said(said_by(self.message(answer)), decode(ids))[0]
        return None if is_spelt else "its token ids do not spell its text"

    # --- as the template reads it -----------------------------------------------------------------

    @cached_property
    def thought_form(self) -> MessageForm:
        """How the template reads thoughts: in a field, or as tags in the content if in no field."""
        return next(iter(self.chat.forms.thoughts), THOUGHT_FORMS[-1])

    def message(self, answer: Answer) -> Message:
        """The answer as the chat template expects it in a conversation."""
        thought = (answer.reasoning or "").strip("\n")
        content = answer.content if answer.reasoning is None else answer.content.lstrip("\n")
        message: Message = {"role": "assistant", "content": content}
        if answer.tool_calls:
            message["tool_calls"] = list(answer.tool_calls)
        if not thought.strip():
            return message
        if self.thought_form == THOUGHT_FORMS[-1] and answer.text is not None:
            return message | {"content": f"{OPEN}\n" * self.is_opened + answer.text}
        return self.thought_form.change({**message, "reasoning_content": thought})

    def prompt(self, messages: Sequence[Message], tools: list[Any] | None = None) -> str:
        """What the target reads before it answers; UnusableRow if a text of it would be lost."""
        conversation = Conversation("", tuple(messages), tools)
        return render_prompt(self.tokenizer, conversation, **self.chat.template_arguments)

    def ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    # --- as tokens --------------------------------------------------------------------------------

    def written(
        self, answer: Answer, messages: Sequence[Message], tools: list[Any] | None = None
    ) -> Written:
        """An answer from `read` after messages, as tokens; UnusableRow if they are not known."""
        if answer.token_ids is None:
            return self._rendered(answer, messages, tools)
        ids = list(answer.token_ids)
        prompt_ids = list(answer.prompt_token_ids or self.ids(self.prompt(messages, tools)))
        if not answer.is_cut and not self.end_ids.intersection(ids[-1:]):
            end = self.end_id(bool(answer.tool_calls))
            ids += [] if end is None else [end]
        return Written(prompt_ids, ids)

    def _rendered(
        self, answer: Answer, messages: Sequence[Message], tools: list[Any] | None
    ) -> Written:
        """An answer that came without ids, as the template renders it.

        UnusableRow if the render is not known to be what the target wrote.
        """
        if answer.is_cut:
            raise UnusableRow("an answer is cut and came without token ids", "")
        has_thought = bool((answer.reasoning or "").strip())
        # <think> tags would be a guess, unless the prompt opens one: the target may write [THINK].
        knows_no_tags = answer.exact_text is None and has_thought and not self.is_opened
        if knows_no_tags and self.thought_form == THOUGHT_FORMS[-1]:
            raise UnusableRow(UNKNOWN_MARKS, "")
        earlier = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        conversation = Conversation(
            "", (*messages, self.message(answer)), tools, context_only=frozenset(earlier)
        )
        self.chat.tally = Tally()
        [rendered] = self.chat.render(conversation)
        [row] = self.chat.encode([rendered])
        for kind, reason in self.chat.tally.counts:
            if knows_no_tags and IN_TAGS in reason:
                raise UnusableRow(UNKNOWN_MARKS, "")
            if kind == "left out":
                raise UnusableRow(reason, "")
        first = row.turn_ids.index(1)
        ids = list(row.input_ids[first : first + row.num_supervised])
        start, _, end = rendered.answers[0]
        body = rendered.text[start:end]
        for end_text in self.chat.end_texts:
            body = body.partition(end_text)[0]
        # Some tokenizers drop a text's first blank.
        spelt = self.tokenizer.decode(ids[:-1], clean_up_tokenization_spaces=False)
        # If the answer has no thought, the server dropped an empty one, or the target wrote none.
        has_empty_thought = answer.exact_text is None and not has_thought and CLOSE in body
        if has_empty_thought or answer.exact_text not in (None, body, spelt):
            raise UnusableRow("the template does not render an answer as the target wrote it", "")
        if find_said(said_by(conversation.messages[-1]), self.tokenizer.decode(ids))[0]:
            raise UnusableRow("an end-of-turn token stands inside an answer", "")
        return Written(list(row.input_ids[:first]), ids)

    def _find_end_id(self, is_call: bool) -> int | None:
        """The token with which the template ends an answer, or a call of a tool."""
        probe = PROBE_CALL if is_call else PROBE_ANSWER
        with suppress(UnusableRow):
            [row] = self.chat.encode(self.chat.render(Conversation("", (*QUESTION, probe))))
            last = row.input_ids[row.turn_ids.index(1) + row.num_supervised - 1]
            if last in self.end_ids:
                return last
        if is_call:
            return self.end_id(False)
        return min(self.end_ids) if len(self.end_ids) == 1 else None

    # --- training rows ----------------------------------------------------------------------------

    def learnt(self, outcome: Outcome) -> Learnt:
        """The training rows of a done row, up to the first answer whose tokens are not known.

        They hold text if training renders it as the target wrote it, else token ids.
        """
        messages = system_turns(outcome.system)
        answers = list[Written]()
        why = None
        for question, answer in zip(outcome.turns, outcome.answers, strict=True):
            before = [*messages, {"role": "user", "content": question}]
            try:
                answers.append(self.written(answer, before, outcome.tools))
            except UnusableRow as error:
                why = error.reason
                break
            messages = [*before, self.message(answer)]
        if not answers:
            return Learnt([], answers, why)
        are_ids = any(answer.token_ids is not None for answer in outcome.answers)
        conversation = Conversation("", tuple(messages), outcome.tools)
        if are_ids or not self._is_rendered_in_training(conversation, answers):
            return Learnt(_rows_of_tokens(outcome.id, answers), answers, why)
        tools = {"tools": outcome.tools} if outcome.tools else {}
        return Learnt([{"id": outcome.id, **tools, "messages": messages}], answers, why)

    def training_rows(self, outcome: Outcome) -> list[dict[str, Any]]:
        """JSON-ready training rows of a done row; [] if no answer of it can be learnt."""
        return self.learnt(outcome).rows

    def _is_rendered_in_training(
        self, conversation: Conversation, answers: Sequence[Written]
    ) -> bool:
        """Whether training makes the very tokens of the answers and of what stands before them."""
        try:
            rows = self.training.encode(self.training.render(conversation))
        except UnusableRow:
            return False
        rows = rows * len(answers) if len(rows) == 1 else rows  # one row has all answers
        if len(rows) != len(answers):  # training ends the conversation earlier
            return False
        for row, (prompt_ids, answer_ids) in zip(rows, answers, strict=True):
            ids = [*prompt_ids, *answer_ids]
            if list(row.input_ids[: len(ids)]) != ids:
                return False
            are_learnt = [turn > 0 for turn in row.turn_ids[len(prompt_ids) - 1 : len(ids)]]
            if are_learnt != [False] + [True] * len(answer_ids):
                return False
        return True


def _rows_of_tokens(name: str, answers: Sequence[Written]) -> list[dict[str, Any]]:
    """One row with all answers; a further row begins where a prompt rewrites earlier tokens."""
    rows: list[dict[str, Any]] = []
    ids, mask = list[int](), list[int]()
    for prompt_ids, answer_ids in answers:
        if prompt_ids[: len(ids)] == ids and rows:
            rows.pop()  # this row goes on
        else:
            mask = []
        ids = [*prompt_ids, *answer_ids]
        mask = [*mask, *[0] * (len(prompt_ids) - len(mask)), *[1] * len(answer_ids)]
        rows.append({"id": name, "input_ids": ids, "loss_mask": mask})
    return rows


def _loosely(text: str) -> str:
    return LOOSE.sub("", text)


# --- who answers --------------------------------------------------------------------------------


def local_target(
    decode: Callable[[list[int], int], list[int]], thinking: Thinking, room: int
) -> Ask:
    """An `Ask` by `decode`, which maps prompt ids and a seed to answer ids.

    room: the most tokens of a prompt; a longer one is skipped.
    """

    async def ask(messages: Sequence[Message], seed: int, tools: list[Any] | None = None) -> Answer:
        prompt = thinking.ids(thinking.prompt(messages, tools))
        if len(prompt) > room:
            raise Unanswered("skipped", TOO_LONG)
        ids = decode(prompt, seed)
        has_ended = bool(ids) and ids[-1] in thinking.end_ids
        text = answer_text(thinking.tokenizer, ids[:-1] if has_ended else ids)
        return Answer(text, "stop" if has_ended else "length", None, tuple(ids), tuple(prompt))

    return ask


class ServedTarget:
    """Asks the target on its servers.

    A row fails if a server rejects it, or if it fails on this row but answers another question.
    Otherwise the row waits until a server answers.
    """

    def __init__(self, config: ServerConfig, model: str, sampling: AnswerSamplingConfig) -> None:
        try:
            import openai
        except ImportError as error:
            raise UserError("distill.server needs openai: pip install -e .[distill]") from error
        self.config = config
        self.errors = (openai.APIError, TimeoutError, ValueError)
        # openai's timeout is for each read. This limit is for all tries, and ends slow replies.
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
        extra = {"top_k": sampling.top_k, IDS_KEY: bool(config.token_ids) or None}
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
        is_auto = self.config.token_ids == "auto"
        try:
            try:
                answer = await self(QUESTION, 0)  # if it fails, all rows would
            except Unanswered as error:
                if error.status == "skipped" or not is_auto:
                    raise
                self.body["extra_body"].pop(IDS_KEY)  # the server may reject a key of vLLM's
                answer = await self(QUESTION, 0)
        except Unanswered as error:
            raise UserError(
                f"{', '.join(self.clients)}: a test question got no answer ({error.why}); "
                "check distill.sampling (max_tokens) and distill.server.extra_body"
            ) from error
        if answer.token_ids is None:
            if is_auto:
                self.body["extra_body"].pop(IDS_KEY, None)
            print(f"distill: the server gives no token ids, so {WITHOUT_IDS}", flush=True)
        return self

    async def __aexit__(self, *_: object) -> None:
        for client in self.clients.values():
            await client.close()

    async def __call__(
        self, messages: Sequence[Message], seed: int, tools: list[Any] | None = None
    ) -> Answer:
        body = self.body | ({"tools": tools} if tools else {})
        strikes = 0
        while True:
            url = min(self.clients, key=self._load_of)
            self.under_way[url] += 1
            try:
                answer = await self._complete(
                    self.clients[url], messages=list(messages), seed=seed, **body
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
                warn(
                    f"{url}: {why}; it is asked again for up to {self.config.patience_s:g} s "
                    "(distill.server.patience_s)"
                )
            await asyncio.sleep(PAUSE_S)

    def _load_of(self, url: str) -> tuple[bool, int]:
        """A sort key: the least server is asked next; one that is away gets one row at a time."""
        under_way = self.under_way[url]
        return url in self.away and under_way > 0, under_way + (url in self.away)

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
        if getattr(reply, "kv_transfer_params", None):
            raise UserError(
                f"{masked(str(client.base_url))}: gives hidden states, and leaves a file for each "
                "answer; restart it without --speculative-config and --kv-transfer-config"
            )
        try:
            choices = getattr(reply, "choices", None)  # a proxy's page is a text
            if not choices or choices[0].finish_reason not in FINISHES:
                raise ValueError("the reply holds no whole answer")
            self.last_answer = asyncio.get_running_loop().time()
            return _answer_of(reply)
        except UnusableRow as error:
            raise Unanswered("skipped", error.reason) from error
        except (ValidationError, AttributeError, TypeError, LookupError) as error:
            raise Unanswered(
                "skipped", "the server's reply has no text, or token ids that are not numbers"
            ) from error

    async def _is_up(self, url: str) -> bool:
        # Ask another question; if the server answers it, the row is at fault.
        client = self.clients[url].with_options(max_retries=0)
        try:
            await self._complete(client, model=self.body["model"], messages=QUESTION, max_tokens=1)
        except self.errors:
            return False
        self.away.discard(url)
        return True


def _answer_of(reply: Any) -> Answer:
    choice = reply.choices[0]
    message = choice.message
    ids = getattr(choice, "token_ids", None)
    prompt_ids = getattr(reply, "prompt_token_ids", None)
    read_keys = {"id", "type", "function"}
    dumped = [
        call.model_dump(include=read_keys, exclude_unset=True) for call in message.tool_calls or ()
    ]
    calls = tool_calls_of(dumped, 1)
    if not ids:  # else the answer's tokens are known
        require_arguments(calls, 1)
    values: dict[str, Any] = {
        "content": message.content or "",
        "finish": FINISHES[choice.finish_reason],
        # vLLM has used both names.
        "reasoning": getattr(message, "reasoning_content", None)
        or getattr(message, "reasoning", None),
        "tool_calls": tuple(calls),
    }
    if ids:
        values |= {"token_ids": ids, "prompt_token_ids": prompt_ids}
    return cast(Answer, adapter(Answer).validate_python(values))
