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
    """A made-up corpus, with its tokenizer and measuring prompts."""

    num_conversations: PositiveInt = key("number of conversations to train on", default=12000)
    num_prompts: PositiveInt = key(
        "number of measuring prompts; none of them is in the conversations", default=120
    )
    vocab_size: Annotated[int, Field(ge=300)] = key(
        "size of the byte-level BPE vocabulary that is trained on the corpus", default=2048
    )
    seed: Seed = key("decides the draws", default=0)


# Arguments that the chat template gets from transformers or from another key.
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
    """The values with each date as text: YAML reads 2026-11-27 as a date, and a template needs
    text."""
    if not isinstance(values, dict):
        return values
    is_date = datetime.date
    return {key: str(v) if isinstance(v, is_date) else v for key, v in values.items()}


# An empty key is left out of records, so that records older than the key stay valid.
unless_set = Field(exclude_if=lambda value: not value)


class RenderConfig(Section, kw_only=True):
    """What the chat template gets besides the conversation."""

    template_arguments: Annotated[
        dict[str, JsonValue], BeforeValidator(_without_dates), unless_set
    ] = key(
        "arguments that all stages give to the chat template, such as {enable_thinking: false}. "
        "On the command line: --data.template_arguments.KEY VALUE",
        default_factory=dict,
    )
    date: Annotated[datetime.date | None, unless_set] = key(
        "the date that a chat template writes as today's; null means the day on which the run "
        "began, which RUN/date.txt keeps",
        default=None,
    )

    def __post_init__(self) -> None:
        taken = sorted(self.template_arguments.keys() & {*TAKEN})
        if taken:
            raise ValueError(
                f"template_arguments: aerie or transformers sets {taken[0]}; leave it out"
            )


class DataConfig(RenderConfig):
    """Which conversations to read, and how they become tokens and a loss mask."""

    conversations: Some[Place] = key(
        "files (.json, .jsonl, .parquet, .arrow or .csv), directories or Hub ids"
    )
    prompt_field: str | None = key(
        "the column of the prompt, in prompt/completion rows; null tries the usual names",
        default=None,
    )
    completion_field: str | None = key(
        "the column of the answer; set both fields or neither", default=None
    )
    system_prompt: str | None = key(
        "the system turn for conversations that have none", default=None
    )
    max_length: Annotated[int, Field(ge=8)] = key(
        "the most tokens of a conversation; longer ones are cut", default=2048
    )
    held_out: Annotated[float, Field(ge=0, lt=1)] = key(
        "the share of conversations that training never sees; a hash chooses them", default=0.05
    )
    limit: PositiveInt | None = key(
        "reading stops after this many conversations for training; null reads all", default=None
    )
    supervise: Literal["assistant", "all"] = key(
        "which tokens are learnt: the answers, or `all` tokens but the first", default="assistant"
    )
    min_supervised_share: Share = key(
        "the command stops if a smaller share of the tokens is supervised", default=0.01
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.prompt_field is None) != (self.completion_field is None):
            raise ValueError("prompt_field and completion_field go together; set both or neither")


class StateServersConfig(Section):
    """vLLM servers that give the target's states (extract_hidden_states)."""

    urls: Some[Annotated[str, Field(pattern="^https?://[^@]+$")]] = key(
        "base URLs, such as http://host:8000/v1; the variable OPENAI_API_KEY may hold their key"
    )
    states: Place = key(
        "the path, on this machine, of the folder to which the servers write (their "
        "shared_storage_path)"
    )
    concurrency: PositiveInt = key(
        "requests that each process keeps under way at each URL", default=16
    )
    timeout_s: PositiveFloat = key("the longest that a server may take for one row", default=600.0)
    retries: NonNegativeInt = key(
        "how often a row is asked again, of another server if there is one. While no server "
        "answers, the pauses are 1, 2, 4, ... s",
        default=5,
    )


class FeaturesConfig(Section):
    """Where the target's states come from, and how they are stored."""

    mode: Literal["cached", "online"] = key(
        "`cached` reads the states from RUN/features; `online` makes them in the training step",
        default="cached",
    )
    after_blocks: Annotated[Many[NonNegativeInt], ascending] | None = key(
        "the taps: numbers of the blocks after which the head reads the residual stream; null "
        "takes what the head needs (EAGLE-3: 2, n//2 and n-3 of n blocks)",
        default=None,
    )
    batch_tokens: PositiveInt = key(
        "tokens in one forward pass of the target, padding included", default=8192
    )
    shard_tokens: PositiveInt = key("tokens in one safetensors shard", default=262144)
    dtype: Float | None = key(
        "the dtype of the states in training; null means the target's", default=None
    )
    storage: Literal["bf16", "fp8", "int8"] | None = key(
        "the format on disk; null means dtype. fp8 (E4M3) and int8 take one byte per value, and "
        "a float32 scale per token and state",
        default=None,
    )
    shuffle_shards: PositiveInt | None = key(
        "the number of shards from which training draws rows at a time; null means all",
        default=None,
    )
    server: Annotated[StateServersConfig | None, unless_set] = key(
        "servers that give the states; with null this process runs the target", default=None
    )

    def __post_init__(self) -> None:
        if self.mode == "online" and (self.storage or self.shuffle_shards):
            raise ValueError(
                "storage and shuffle_shards are a cache's; drop them, or set mode: cached"
            )


class SourceConfig(Section):
    """Where prompts come from."""

    path: Place = key(
        "a file (.json, .jsonl, .parquet, .arrow or .csv), a directory or a Hub data set "
        "(owner/name:subset:split)"
    )
    kind: Literal["conversations", "prompts", "personas"] = key(
        "`conversations` gives human turns, each asked after the new answers to those before "
        "it; `prompts` one question per row; `personas` rows of PersonaHub, made into math "
        "problems",
        default="conversations",
    )
    revision: str | None = key("the commit of the Hub data set", default=None)
    num_rows: PositiveInt | None = key(
        "number of rows to draw with distill.seed; null takes all in their order", default=None
    )
    samples: PositiveInt = key("answers to each row, each with its own seed", default=1)
    field: str | None = key(
        "the column of the question, for `prompts`; null tries the usual names", default=None
    )
    ask: Literal["solution", "problem"] = key(
        "for `personas`: solve the row's problem, or first invent one", default="solution"
    )
    system_prompt: str | None = key("the system turn for rows that have none", default=None)

    def __post_init__(self) -> None:
        if (self.field is not None and self.kind != "prompts") or (
            self.ask == "problem" and self.kind != "personas"
        ):
            raise ValueError(
                f"field belongs to prompts and ask to personas, not to {self.kind}; leave it out"
            )


class AnswerSamplingConfig(Section):
    """How the target draws the tokens of an answer."""

    temperature: NonNegativeFloat = key(
        "1 keeps the target's own distribution; 0 is greedy", default=1.0
    )
    top_p: Annotated[float, Field(gt=0, le=1)] = key("1 switches it off", default=1.0)
    top_k: Annotated[int, Field(ge=-1)] | None = key(
        "0 switches it off (vLLM: -1, too); null leaves it to the server", default=None
    )
    max_tokens: PositiveInt = key("the most tokens of an answer", default=2048)


class ServerConfig(Section):
    """OpenAI-compatible servers (vLLM, SGLang, transformers serve) of the target."""

    urls: Some[Annotated[str, Field(pattern="^https?://")]] = key(
        "base URLs, such as http://host:8000/v1"
    )
    model: str | None = key(
        "the target's name on the servers; null means target.path", default=None
    )
    concurrency: PositiveInt = key("requests under way at each URL", default=64)
    timeout_s: PositiveFloat = key(
        "a request may take timeout_s * (retries + 1) in all; thinking can take long",
        default=1800.0,
    )
    retries: NonNegativeInt = key("how often openai's client repeats a failed request", default=5)
    patience_s: PositiveFloat = key(
        "the run stops if no server answers for this long", default=900.0
    )
    token_ids: bool | Literal["auto"] = key(
        "whether to ask for token ids, which training then uses (vLLM: return_token_ids); "
        "`auto` does so if the server gives them",
        default="auto",
    )
    extra_body: dict[str, Any] = key(
        "fields that go with every request (min_p, chat_template_kwargs)", default_factory=dict
    )


Action = Literal["keep", "drop"]


class GateConfig(Section):
    """What to do with answers that have a flaw."""

    cut: Action = key(
        "an answer that ends at max_tokens; if kept, it has no end-of-turn token", default="drop"
    )
    empty: Action = key("an answer with nothing after the thinking", default="drop")
    loop: Action = key("an answer that repeats the same words over and over", default="drop")
    language: Action = key("an answer in another script than its question", default="drop")
    refusal: Action = key(
        "an answer that refuses; a draft head should follow the target in this too", default="keep"
    )
    repeated: Action = key("an invented problem that an earlier row has already", default="drop")


# The name alone is enough for a published set.
by_name = BeforeValidator(lambda value: {"name": value} if isinstance(value, str) else value)


class QuestionsConfig(Section):
    """A set of questions."""

    name: Annotated[str, Field(min_length=1)] = key(
        "a published set (mt_bench, humaneval, gsm8k, ...), or a name of your own for the "
        "questions at `path`"
    )
    path: Place | None = key(
        "a file, a directory or a Hub data set (owner/name:subset:split); null means the "
        "published set",
        default=None,
    )
    revision: str | None = key(
        "the commit of the Hub data set; null means the published set's pinned one", default=None
    )


class DistillConfig(Section):
    """Prompts, and how the target answers them (RUN/distilled)."""

    sources: Some[SourceConfig] = key("where the prompts come from")
    server: ServerConfig | None = key(
        "servers that answer; with null this process answers, and drafts with the run's head if "
        "it has one",
        default=None,
    )
    sampling: AnswerSamplingConfig = key(
        "how the target draws its answers", default=AnswerSamplingConfig()
    )
    max_turns: PositiveInt | None = key("the most questions of a conversation", default=None)
    exclude: Many[Annotated[QuestionsConfig, by_name]] = key(
        "questions that no prompt may overlap, beside those of the recipe's own measurements",
        default=(),
    )
    ngram: Annotated[int, Field(ge=3)] = key(
        "a prompt may not share this many words in a row with a measuring or excluded question",
        default=13,
    )
    gate: GateConfig = key("which answers to keep", default=GateConfig())
    seed: Seed = key("decides the order of the prompts and each answer's draws", default=0)
