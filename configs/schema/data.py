"""The sections `synthetic`, `data` and `features` of a recipe."""

from dataclasses import dataclass, field
from typing import Any, Literal

from aerie.configs.read import STRICT


@dataclass(frozen=True)
class SyntheticConfig:
    """The embedded corpus: written by data/synthetic.py, the same bytes for the same seed."""

    __pydantic_config__ = STRICT
    num_conversations: int = 12000
    num_prompts: int = 120  # measuring prompts, disjoint from the conversations
    vocab_size: int = 2048  # of the byte-level BPE trained on the corpus
    seed: int = 0

    def __post_init__(self) -> None:
        if min(self.num_conversations, self.num_prompts) < 1 or self.vocab_size < 300:
            raise ValueError("need at least one conversation, one prompt and a vocabulary of 300")


@dataclass(frozen=True)
class DataConfig:
    """Which conversations, and how they become tokens and a loss mask."""

    __pydantic_config__ = STRICT
    conversations: tuple[str, ...]  # files (.json, .jsonl, .parquet), directories or Hub ids, in this order
    prompt_field: str | None = None  # for prompt/completion rows; null: the usual names are tried
    completion_field: str | None = None
    system_prompt: str | None = None  # put before conversations that have no system turn
    max_length: int = 2048  # tokens; longer conversations are cut
    held_out: float = 0.05  # share of conversations, by hash, that training never sees
    limit: int | None = None  # only the first conversations, after the hash split
    # all: every token but the first (how a target is trained from scratch)
    supervise: Literal["assistant", "all"] = "assistant"
    min_supervised_share: float = 0.01  # refuse to go on below this share of supervised tokens

    def __post_init__(self) -> None:
        if not self.conversations:
            raise ValueError("conversations is empty: name at least one file")
        if not 0.0 <= self.held_out < 1.0:
            raise ValueError("held_out is a share in [0, 1)")
        if self.max_length < 8:
            raise ValueError("max_length must be at least 8 tokens")
        if (self.prompt_field is None) != (self.completion_field is None):
            raise ValueError("prompt_field and completion_field go together")


@dataclass(frozen=True)
class FeaturesConfig:
    """The target's states of the conversations: cached before training, or made in each step."""

    __pydantic_config__ = STRICT
    mode: Literal["cached", "online"] = "cached"  # online: the target runs in the training step, nothing is written
    # Taps: the residual stream after k blocks. Null: what the head needs (EAGLE-1 none, EAGLE-3 (2, n//2, n-3)).
    after_blocks: tuple[int, ...] | None = None
    batch_tokens: int = 8192  # tokens of one target forward, padding included
    shard_tokens: int = 262144  # tokens of one safetensors shard
    # Of the states as training sees them; null: the target's.
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    # Of the states on the disk; null: dtype. fp8 (E4M3) and int8: a byte a value, a float32 scale per token and state.
    storage: Literal["bf16", "fp8", "int8"] | None = None
    shuffle_shards: int | None = None  # training draws rows from so many shards at a time; null: from all of them

    def __post_init__(self) -> None:
        if self.after_blocks is not None and list(self.after_blocks) != sorted(set(self.after_blocks)):
            found, sorted_once = list(self.after_blocks), sorted(set(self.after_blocks))
            raise ValueError(f"after_blocks must ascend without repeats, not {found}; did you mean {sorted_once}?")
        if min(self.batch_tokens, self.shard_tokens) < 1:
            raise ValueError("batch_tokens and shard_tokens must be positive")
        if self.mode == "online" and (self.storage is not None or self.shuffle_shards is not None):
            raise ValueError("storage and shuffle_shards are of a cache: leave them out with mode: online")
        if self.shuffle_shards is not None and self.shuffle_shards < 1:
            raise ValueError("shuffle_shards must be at least 1")


@dataclass(frozen=True)
class SourceConfig:
    """Where prompts come from."""

    __pydantic_config__ = STRICT
    path: str  # a file (.json, .jsonl, .parquet), a directory or a Hub data set (owner/name:subset:split)
    # conversations: their human turns, asked one after the other on the new history. prompts: a question per row.
    # personas: rows of PersonaHub, made into math problems by the templates of data/distill/prompts.py.
    kind: Literal["conversations", "prompts", "personas"] = "conversations"
    revision: str | None = None  # the Hub data set's commit
    num_rows: int | None = None  # drawn with distill.seed; null: all, in their order
    samples: int = 1  # answers to each row, with seeds of their own
    field: str | None = None  # prompts: the column of the question; null: the usual names are tried
    # personas: "solution" answers the problem that the row has, "problem" has the target invent one first.
    ask: Literal["solution", "problem"] = "solution"
    system_prompt: str | None = None  # before rows that have no system turn

    def __post_init__(self) -> None:
        if self.samples < 1 or (self.num_rows is not None and self.num_rows < 1):
            raise ValueError("samples and num_rows must be at least 1 (num_rows: null takes all)")
        for name, is_set, kind in (
            ("field", self.field is not None, "prompts"),
            ("ask", self.ask == "problem", "personas"),
        ):
            if is_set and self.kind != kind:
                raise ValueError(f"{name} belongs to {kind}, this source holds {self.kind}; leave it out")


@dataclass(frozen=True)
class SamplingConfig:
    """How one answer is drawn."""

    __pydantic_config__ = STRICT
    temperature: float = 1.0  # the target's own law; 0: greedy
    top_p: float = 1.0
    top_k: int | None = None  # null: not sent, a server then has its own default; in process 0 is off
    max_tokens: int = 2048  # of one answer; what does not end within them is cut

    def __post_init__(self) -> None:
        if self.temperature < 0.0 or not 0.0 < self.top_p <= 1.0 or self.max_tokens < 1:
            raise ValueError("temperature is not negative, top_p is in (0, 1] and max_tokens at least 1")


@dataclass(frozen=True)
class ServerConfig:
    """Servers that speak OpenAI's chat completions (vLLM, SGLang, transformers serve), all with the same target."""

    __pydantic_config__ = STRICT
    urls: tuple[str, ...]  # base URLs, ending in /v1
    model: str | None = None  # the name that they serve; null: target.path
    concurrency: int = 64  # requests under way at each URL
    timeout_s: float = 1800.0  # of one request, once connected; an answer with its thinking can take long
    retries: int = 5  # of one request, by openai's client (cut connections, timeouts, 408, 429, 5xx)
    patience_s: float = 900.0  # without any answer of a server that is away or too busy; then the run stops
    token_ids: bool = False  # ask for the ids (vLLM: return_token_ids), which are then what is trained on
    extra_body: dict[str, Any] = field(default_factory=dict)  # put into every request (min_p, chat_template_kwargs)

    def __post_init__(self) -> None:
        if not self.urls or not all(url.startswith(("http://", "https://")) for url in self.urls):
            raise ValueError(f"urls names base URLs such as http://host:8000/v1, not {', '.join(self.urls) or 'none'}")
        if min(self.concurrency, self.timeout_s, self.patience_s) <= 0 or self.retries < 0:
            raise ValueError("concurrency, timeout_s and patience_s are positive, retries not negative")
        if not isinstance(self.template_arguments, dict):
            raise ValueError("extra_body.chat_template_kwargs is an object, such as {enable_thinking: false}")

    @property
    def template_arguments(self) -> dict[str, Any]:
        """What the servers render the chat template with, beside the messages."""
        return self.extra_body.get("chat_template_kwargs") or {}


Action = Literal["keep", "drop"]


@dataclass(frozen=True)
class GateConfig:
    """What becomes of answers with a flaw; each is counted either way."""

    __pydantic_config__ = STRICT
    cut: Action = "drop"  # does not end within max_tokens; kept, it is trained on without an end-of-turn token
    empty: Action = "drop"  # nothing behind the thinking
    loop: Action = "drop"
    language: Action = "drop"  # its thinking or its content, in another script than its question
    refusal: Action = "keep"  # the target does say so, and a draft head has to follow it
    repeated: Action = "drop"  # the same first question as an earlier row's (problems that the target invents repeat)


@dataclass(frozen=True)
class EvaluationConfig:
    """Questions that no prompt may overlap."""

    __pydantic_config__ = STRICT
    name: str  # of a published task (mt_bench, gsm8k, math500, ...), which says how the rows are read
    path: str | None = None  # a file, a directory or a Hub data set; null: the published one
    revision: str | None = None


@dataclass(frozen=True)
class DistillConfig:
    """Prompts in, conversations answered by the target out (RUN/distilled)."""

    __pydantic_config__ = STRICT
    sources: tuple[SourceConfig, ...]
    # null: the target answers in this process, with the run's draft head where there is one
    server: ServerConfig | None = None
    sampling: SamplingConfig = SamplingConfig()
    max_turns: int | None = None  # questions of a conversation at most
    exclude: tuple[EvaluationConfig, ...] = ()  # beside the recipe's own prompts of bench, calibrate and tune
    ngram: int = 13  # words in a row that a prompt may not share with an evaluation question
    gate: GateConfig = GateConfig()
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.sources:
            raise ValueError("sources is empty: name at least one")
        if self.ngram < 3 or (self.max_turns is not None and self.max_turns < 1):
            raise ValueError("ngram must be at least 3 and max_turns at least 1")
