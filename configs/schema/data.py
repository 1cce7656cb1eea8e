"""The sections `synthetic`, `data`, `features` and `distill` of a recipe."""

import datetime
from typing import Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    Field,
    JsonValue,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
)

from aerie.configs.read import Many, Place, Section, Some, ascending, key
from aerie.configs.schema.heads import Float, Seed, Share


class SyntheticConfig(Section):
    """A made-up corpus, with a tokenizer and measuring prompts."""

    num_conversations: PositiveInt = key("conversations to train on", default=12000)
    num_prompts: PositiveInt = key(
        "measuring prompts, disjoint from the conversations", default=120
    )
    vocab_size: Annotated[int, Field(ge=300)] = key(
        "size of the byte-level BPE that is trained on the corpus", default=2048
    )
    seed: Seed = key("decides the draws", default=0)


# What the chat template gets from transformers, or from another key.
TAKEN = (
    "messages",
    "conversation",
    "tools",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template",
    "strftime_now",
    "tokenize",
    "tokenizer_kwargs",
    "padding",
    "truncation",
    "max_length",
    "return_tensors",
    "return_dict",
    "return_assistant_tokens_mask",
    "sanitize_control_tokens",
)


def _without_dates(values: Any) -> Any:
    """YAML reads 2026-11-27 as a date; a template gets it as text."""
    if not isinstance(values, dict):
        return values
    is_date = datetime.date
    return {key: str(v) if isinstance(v, is_date) else v for key, v in values.items()}


# Left out of what is recorded while they say nothing, so that older records stay valid.
unless_set = Field(exclude_if=lambda value: not value)


class RenderConfig(Section, kw_only=True):
    """What the chat template gets beside the conversation."""

    template_arguments: Annotated[
        dict[str, JsonValue], BeforeValidator(_without_dates), unless_set
    ] = key(
        "given to the chat template by all stages, such as {enable_thinking: false}; on the "
        "command line: --data.template_arguments.KEY VALUE",
        default_factory=dict,
    )
    date: Annotated[datetime.date | None, unless_set] = key(
        "that a chat template with today's date writes; null: the day on which the run began, "
        "which the run keeps in RUN/date.txt",
        default=None,
    )

    def __post_init__(self) -> None:
        taken = sorted(self.template_arguments.keys() & {*TAKEN})
        if taken:
            raise ValueError(f"template_arguments: {taken[0]} is no argument of one's own")


class DataConfig(RenderConfig):
    """Which conversations, and how they become tokens and a loss mask."""

    conversations: Some[Place] = key(
        ".json, .jsonl, .parquet, .arrow or .csv files, directories or Hub ids"
    )
    prompt_field: str | None = key(
        "for prompt/completion rows; null: the usual names are tried", default=None
    )
    completion_field: str | None = key("the column of the answer, with prompt_field", default=None)
    system_prompt: str | None = key("the system turn of conversations without one", default=None)
    max_length: Annotated[int, Field(ge=8)] = key(
        "tokens; longer conversations are cut", default=2048
    )
    held_out: Annotated[float, Field(ge=0, lt=1)] = key(
        "the share that training never sees; a hash chooses it", default=0.05
    )
    limit: PositiveInt | None = key(
        "only the first conversations, after the hash split", default=None
    )
    supervise: Literal["assistant", "all"] = key(
        "what is learnt: the answers, or all: every token but the first", default="assistant"
    )
    min_supervised_share: Share = key(
        "the least share of supervised tokens; with less, the command stops", default=0.01
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.prompt_field is None) != (self.completion_field is None):
            raise ValueError("prompt_field and completion_field go together")


class StateServersConfig(Section):
    """vLLM servers of the target that give its states (extract_hidden_states)."""

    urls: Some[Annotated[str, Field(pattern="^https?://[^@]+$")]] = key(
        "base URLs, such as http://host:8000/v1; a key for them: OPENAI_API_KEY"
    )
    states: Place = key(
        "the folder to which the servers write (their shared_storage_path), as it is named here"
    )
    concurrency: PositiveInt = key("requests under way, for each URL, of each process", default=16)
    timeout_s: PositiveFloat = key("the longest that a server may take for one row", default=600.0)
    retries: NonNegativeInt = key(
        "of one row, on another server if there is one, with pauses of 1, 2, 4, ... s where "
        "none answers",
        default=5,
    )


class FeaturesConfig(Section):
    """The target's states, and how they are stored."""

    mode: Literal["cached", "online"] = key(
        "online: the target runs in the training step", default="cached"
    )
    after_blocks: Annotated[Many[NonNegativeInt], ascending] | None = key(
        "taps, the residual stream after k blocks; null: what the head needs (EAGLE-3: 2, "
        "n//2, n-3)",
        default=None,
    )
    batch_tokens: PositiveInt = key("tokens of one target forward, padding included", default=8192)
    shard_tokens: PositiveInt = key("tokens of one safetensors shard", default=262144)
    dtype: Float | None = key("the dtype that training reads; null: the target's", default=None)
    storage: Literal["bf16", "fp8", "int8"] | None = key(
        "on disk; null: dtype. fp8 (E4M3) and int8 take a byte per value, and a float32 scale "
        "per token and state",
        default=None,
    )
    shuffle_shards: PositiveInt | None = key(
        "training draws rows from so many shards at a time; null: all", default=None
    )
    server: Annotated[StateServersConfig | None, unless_set] = key(
        "null: the target runs in this process", default=None
    )

    def __post_init__(self) -> None:
        if self.mode == "online" and (self.storage or self.shuffle_shards):
            raise ValueError("storage and shuffle_shards are a cache's; drop them, or mode: online")


class SourceConfig(Section):
    """Where prompts come from."""

    path: Place = key(
        "a file (.json, .jsonl, .parquet, .arrow, .csv), a directory or a Hub data set "
        "(owner/name:subset:split)"
    )
    kind: Literal["conversations", "prompts", "personas"] = key(
        "human turns, asked after the new answers; one question per row; or rows of "
        "PersonaHub, made into math problems",
        default="conversations",
    )
    revision: str | None = key("the Hub data set's commit", default=None)
    num_rows: PositiveInt | None = key(
        "drawn with distill.seed; null: all, in their order", default=None
    )
    samples: PositiveInt = key("answers to each row, with seeds of their own", default=1)
    field: str | None = key(
        "prompts: the column of the question; null: the usual names are tried", default=None
    )
    ask: Literal["solution", "problem"] = key(
        "personas: solve the row's problem, or first invent one", default="solution"
    )
    system_prompt: str | None = key("the system turn of rows without one", default=None)

    def __post_init__(self) -> None:
        if (self.field is not None and self.kind != "prompts") or (
            self.ask == "problem" and self.kind != "personas"
        ):
            raise ValueError(
                f"field belongs to prompts and ask to personas, not to {self.kind}; leave it out"
            )


class AnswerSamplingConfig(Section):
    """How the tokens of an answer are drawn."""

    temperature: NonNegativeFloat = key("1: the target's own law; 0: greedy", default=1.0)
    top_p: Annotated[float, Field(gt=0, le=1)] = key("1: off", default=1.0)
    top_k: Annotated[int, Field(ge=-1)] | None = key(
        "null: the server's default; 0 is off (vLLM: -1, too)", default=None
    )
    max_tokens: PositiveInt = key("most tokens of one answer", default=2048)


class ServerConfig(Section):
    """OpenAI-compatible servers (vLLM, SGLang, transformers serve) of the same target."""

    urls: Some[Annotated[str, Field(pattern="^https?://")]] = key(
        "base URLs, such as http://host:8000/v1"
    )
    model: str | None = key("its name on the servers; null: target.path", default=None)
    concurrency: PositiveInt = key("requests under way at each URL", default=64)
    timeout_s: PositiveFloat = key(
        "a request may take timeout_s * (retries + 1) in all; thinking can take long",
        default=1800.0,
    )
    retries: NonNegativeInt = key("how often openai's client repeats a failed request", default=5)
    patience_s: PositiveFloat = key(
        "if no server answers for so long, the run stops", default=900.0
    )
    token_ids: bool | Literal["auto"] = key(
        "ask for the ids (vLLM: return_token_ids), which are then trained on; "
        "auto: if the server gives them",
        default="auto",
    )
    extra_body: dict[str, Any] = key(
        "sent with every request (min_p, chat_template_kwargs)", default_factory=dict
    )


Action = Literal["keep", "drop"]


class GateConfig(Section):
    """What to do with answers that have a flaw."""

    cut: Action = key(
        "an answer that ends at max_tokens; if kept, it has no end-of-turn token", default="drop"
    )
    empty: Action = key("an answer with nothing after the thinking", default="drop")
    loop: Action = key("an answer that says the same words over and over", default="drop")
    language: Action = key("an answer in another script than its question", default="drop")
    refusal: Action = key(
        "an answer that refuses; a draft head has to follow the target", default="keep"
    )
    repeated: Action = key("an invented problem that an earlier row has too", default="drop")


# a published set may be given by its name alone
by_name = BeforeValidator(lambda value: {"name": value} if isinstance(value, str) else value)


class QuestionsConfig(Section):
    """A set of questions."""

    name: Annotated[str, Field(min_length=1)] = key(
        "a published one (mt_bench, humaneval, gsm8k, ...), or a name of your own for the "
        "questions at `path`"
    )
    path: Place | None = key(
        "a file, a directory or a Hub data set (owner/name:subset:split); null: the published one",
        default=None,
    )
    revision: str | None = key("null: the published one's pinned commit", default=None)


class DistillConfig(Section):
    """Prompts that the target answers (RUN/distilled)."""

    sources: Some[SourceConfig] = key("where the prompts come from")
    server: ServerConfig | None = key(
        "null: this process, with the run's draft head if any", default=None
    )
    sampling: AnswerSamplingConfig = key("how the target answers", default=AnswerSamplingConfig())
    max_turns: PositiveInt | None = key("most questions of a conversation", default=None)
    exclude: Many[Annotated[QuestionsConfig, by_name]] = key(
        "questions that no prompt may overlap, beside the recipe's own", default=()
    )
    ngram: Annotated[int, Field(ge=3)] = key(
        "words in a row that no prompt may share with an evaluation question", default=13
    )
    gate: GateConfig = key("which answers are kept", default=GateConfig())
    seed: Seed = key("decides the prompts' order and each answer's draws", default=0)
