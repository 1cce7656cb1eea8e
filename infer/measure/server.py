"""Asks a server for a row's answers, and reads how many cycles they took.

vLLM tells the cycles in its reply if it was started with --per-request-spec-decode-metrics, and
counts them at /metrics otherwise. SGLang tells them in the reply's meta_info.
"""

import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

from aerie.configs.errors import UserError, masked
from aerie.configs.schema.decode import ServedConfig
from aerie.data.distill.answer import REDIRECTS, REJECTED, WRONG_ADDRESS, Unanswered
from aerie.infer.decode.sampling import Decoding
from aerie.infer.measure.bench_files import ServerFacts
from aerie.model.storage import first_line

# a line of /metrics: name, labels, value
COUNTER = re.compile(r"^vllm:(\w+)\{(.*)\} (\S+)$", re.MULTILINE)
POSITION = re.compile(r'position="(\d+)"')
SETTLE_S = 2.0  # a server counts an answer at most this long after sending it
RETRIES = 1


class Counters(NamedTuple):
    """vLLM's counters, summed over its engines since the server started."""

    drafts: int  # cycles that verified a draft
    draft_tokens: int
    accepted: tuple[int, ...]  # by position in the draft
    tokens: int  # of all answers
    prefill_ms: float

    def since(self, before: "Counters") -> "Counters":
        pairs = zip(self.accepted, before.accepted, strict=True)
        return Counters(
            self.drafts - before.drafts,
            self.draft_tokens - before.draft_tokens,
            tuple(now - then for now, then in pairs),
            self.tokens - before.tokens,
            self.prefill_ms - before.prefill_ms,
        )


@dataclass(frozen=True)
class Drafts:
    """What a server tells about the drafts of one answer."""

    cycles: int = 0  # 0: the server tells nothing
    draft_tokens: int = 0
    # by cycle, in no order, before the cut at the answer's end; empty: the server tells nothing
    accepted: tuple[int, ...] = ()


@dataclass(frozen=True)
class ServedAnswer:
    token_ids: tuple[int, ...]  # empty: the server sends none
    text: str
    new_tokens: int
    drafts: Drafts
    prefill_ms: float = 0.0
    wall_ms: float = 0.0


def read_counters(page: str) -> Counters | None:
    """The counters on a page of metrics; None if vLLM's are not there."""
    sums: dict[str, float] = {}
    accepted: dict[int, float] = {}
    for name, labels, value in COUNTER.findall(page):
        sums[name] = sums.get(name, 0.0) + float(value)
        if name == "spec_decode_num_accepted_tokens_per_pos_total":
            position = int(POSITION.findall(labels)[0])
            accepted[position] = accepted.get(position, 0.0) + float(value)
    if "generation_tokens_total" not in sums:
        return None
    return Counters(
        drafts=int(sums.get("spec_decode_num_drafts_total", 0)),
        draft_tokens=int(sums.get("spec_decode_num_draft_tokens_total", 0)),
        accepted=tuple(int(accepted[position]) for position in sorted(accepted)),
        tokens=int(sums["generation_tokens_total"]),
        prefill_ms=1000.0 * sums.get("request_prefill_time_seconds_sum", 0.0),
    )


def drafts_of(cycles: int, draft_tokens: int, counts: Sequence[int], new_tokens: int) -> Drafts:
    """The drafts of an answer. counts: how many cycles accepted 0, 1, ... draft tokens.

    vLLM does not count cycles without a draft, which prompt lookup has. Each made one token.
    """
    accepted = []
    for number, count in enumerate(counts):
        accepted += [number] * count
    undrafted = max(new_tokens - 1 - cycles - sum(accepted), 0)
    return Drafts(cycles + undrafted, draft_tokens, (*accepted, *[0] * undrafted))


def counted_drafts(counters: Counters, new_tokens: int) -> Drafts:
    """The drafts of one answer. counters: of this answer alone."""
    at_least = (counters.drafts, *counters.accepted, 0)
    counts = [more - fewer for more, fewer in pairwise(at_least)]
    return drafts_of(counters.drafts, counters.draft_tokens, counts, new_tokens)


class Server:
    def __init__(self, config: ServedConfig, location: str) -> None:
        """location: the row's place in the recipe, for errors."""
        try:
            import openai
        except ImportError as error:
            raise UserError(f"{location}: needs openai: pip install -e .[distill]") from error
        self.config = config
        self.base_url = config.url.rstrip("/").removesuffix("/v1")
        self.url = masked(self.base_url)  # for messages and files
        self.errors = openai.APIError
        timeout = openai.Timeout(config.timeout_s, connect=min(10.0, config.timeout_s))
        self.client = openai.OpenAI(
            base_url=f"{self.base_url}/v1",
            api_key=os.environ.get("OPENAI_API_KEY") or "none",
            timeout=timeout,
            max_retries=RETRIES,
            # A redirect would send the key and the prompts to another address.
            http_client=openai.DefaultHttpxClient(follow_redirects=False, timeout=timeout),
        )
        self.facts = self._ask_facts(location)

    # --- what the server serves ---

    def _ask_facts(self, location: str) -> ServerFacts:
        try:
            cards = {card.id: card for card in self.client.models.list().data}
        except self.errors as error:
            raise UserError(f"{location}: {self._fault(error)}") from error
        served = ", ".join(cards) or "no model"
        model = self.config.model
        if model is None and len(cards) != 1:
            raise UserError(f"{location}: {self.url} serves {served}; choose one with `model`")
        if model is not None and model not in cards:
            raise UserError(f"{location}.model: {self.url} serves {served}, not {model}")
        card = cards[model or next(iter(cards))]
        counters = self.counters()
        return ServerFacts(
            name=self.config.name,
            url=self.url,
            model=card.id,
            root=getattr(card, "root", None),
            server=" ".join(filter(None, (card.owned_by, self._version()))),
            draft_tokens=len(counters.accepted) if counters else 0,
            max_positions=getattr(card, "max_model_len", None),
        )

    def _version(self) -> str:
        try:
            reply: Any = self._get("version", dict[str, Any])
            return str(reply["version"])
        except (self.errors, LookupError, TypeError, ValueError):
            return ""

    def counters(self) -> Counters | None:
        try:
            return read_counters(str(self._get("metrics", str)))
        except self.errors:
            return None

    def _get(self, page: str, kind: Any) -> Any:
        return self.client.with_options(base_url=self.base_url).get(f"/{page}", cast_to=kind)

    # --- answers ---

    def answer(self, prompt_ids: Sequence[int], decoding: Decoding, seed: int) -> ServedAnswer:
        """The answer to a prompt; raises Unanswered if the server refuses the prompt.

        Raises UserError if the server is away, or answers others at the same time.
        """
        before = self.counters()
        start = time.perf_counter()
        reply = self.complete(prompt_ids, decoding, seed)
        wall_ms = 1000.0 * (time.perf_counter() - start)
        answer = self.read(reply)
        drafts = answer.drafts
        prefill_ms = 0.0
        if before is not None:
            counted = self._counted_since(before, answer.new_tokens)
            prefill_ms = counted.prefill_ms
            if not drafts.cycles:
                drafts = counted_drafts(counted, answer.new_tokens)
        return replace(answer, drafts=drafts, prefill_ms=min(prefill_ms, wall_ms), wall_ms=wall_ms)

    def complete(self, prompt_ids: Sequence[int], decoding: Decoding, seed: int) -> Any:
        """openai's reply to a prompt; raises Unanswered or UserError like `answer`."""
        try:
            return self.client.completions.create(**self._body(prompt_ids, decoding, seed))
        except self.errors as error:
            status = getattr(error, "status_code", None)
            if status in REJECTED:
                raise Unanswered("skipped", f"{self.url}: {_reason(error)}") from error
            is_final = status in REDIRECTS or status in WRONG_ADDRESS
            if not is_final and self._is_up():  # the fault is the prompt's
                raise Unanswered("failed", f"{self.url}: {_reason(error)}") from error
            raise UserError(self._fault(error)) from error

    def _body(self, prompt_ids: Sequence[int], decoding: Decoding, seed: int) -> dict[str, Any]:
        unknown = sorted(set(decoding.of_text) - {"repetition_penalty"})
        if unknown:
            raise UserError(
                f"{self.url}: the target's generation_config sets {', '.join(unknown)}, which a "
                "server does not apply; switch it off with --target.generation"
            )
        # Send every setting, as servers have defaults of their own. The end ids are the target's.
        extra = {
            "top_k": decoding.top_k or -1,
            "min_p": decoding.min_p,
            "repetition_penalty": decoding.of_text.get("repetition_penalty", 1.0),
            "stop_token_ids": sorted(decoding.eos_token_ids),
            "ignore_eos": True,
            "return_token_ids": True,
            "return_meta_info": True,  # a key of SGLang's
        }
        body: dict[str, Any] = {
            "model": self.facts.model,
            "prompt": list(prompt_ids),
            "max_tokens": decoding.max_new_tokens,
            "temperature": decoding.temperature,
            "top_p": decoding.top_p,
            "seed": seed,
            "extra_body": {**extra, **self.config.extra_body},
        }
        if decoding.stop_strings:
            body["stop"] = list(decoding.stop_strings)
        return body

    def read(self, reply: Any) -> ServedAnswer:
        """Reads the answer from a reply; raises Unanswered if it holds no whole answer."""
        try:
            choice = reply.choices[0]
            ids = tuple(map(int, getattr(choice, "token_ids", None) or ()))
            new_tokens = len(ids) or int(reply.usage.completion_tokens)
            if choice.finish_reason not in ("stop", "length") or not new_tokens:
                raise ValueError
            drafts = _drafts_in(reply, choice, new_tokens)
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise Unanswered("failed", f"{self.url}: the reply holds no whole answer") from error
        return ServedAnswer(ids, str(choice.text), new_tokens, drafts)

    def _counted_since(self, before: Counters, new_tokens: int) -> Counters:
        """The counters of one answer; raises UserError if they count other answers, too."""
        deadline = time.monotonic() + SETTLE_S
        while True:
            now = self.counters()
            counted = now.since(before) if now else None
            if counted is not None and counted.tokens == new_tokens:
                return counted
            if time.monotonic() > deadline:
                count = "no" if counted is None else counted.tokens
                raise UserError(
                    f"{self.url}: counted {count} tokens for an answer of {new_tokens}; stop all "
                    "other requests to the server, then run the same command again"
                )
            time.sleep(0.02)

    def _is_up(self) -> bool:
        """Whether the server answers another prompt."""
        client = self.client.with_options(max_retries=0)
        try:
            client.completions.create(model=self.facts.model, prompt="a", max_tokens=1)
        except self.errors:
            return False
        return True

    def _fault(self, error: Exception) -> str:
        status = getattr(error, "status_code", None)
        fix = "start the server, then run the same command again"
        if status in REDIRECTS or status in WRONG_ADDRESS:
            fix = "check url, model and OPENAI_API_KEY"
        return f"{self.url}: {_reason(error)}; {fix}"


def _reason(error: Exception) -> str:
    return masked(first_line(error))[:200]


def _drafts_in(reply: Any, choice: Any, new_tokens: int) -> Drafts:
    """The drafts that a reply of vLLM or SGLang tells about."""
    metrics: Mapping[str, Any] = getattr(reply, "metrics", None) or {}
    vllm: Mapping[str, Any] = metrics.get("speculative_decoding") or {}
    if vllm:
        counts = vllm["acceptance_histogram"]
        return drafts_of(sum(counts), int(vllm["num_draft_tokens"]), counts, new_tokens)
    sglang: Mapping[str, Any] = getattr(choice, "meta_info", None) or {}
    return Drafts(int(sglang.get("spec_verify_ct") or 0))
