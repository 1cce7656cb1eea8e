"""The sections `synthetic`, `data`, `features` and `distill` of a recipe."""

from dataclasses import field
from typing import Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
)

from aerie.configs.read import Many, Place, Section, Some
from aerie.configs.schema.heads import Float, Seed, Share


class SyntheticConfig(Section):
    num_conversations: PositiveInt = 12000  # to train on
    num_prompts: PositiveInt = 120  # measuring prompts, disjoint from the conversations
    vocab_size: Annotated[int, Field(ge=300)] = 2048  # of the byte-level BPE trained on the corpus
    seed: Seed = 0  # of the draws


class DataConfig(Section):
    """Which conversations, and how they become tokens and a loss mask."""

    # .json, .jsonl, .parquet or .csv files, directories or Hub ids
    conversations: Some[Place]
    prompt_field: str | None = None  # for prompt/completion rows; null: the usual names are tried
    completion_field: str | None = None  # goes with prompt_field
    system_prompt: str | None = None  # for conversations without one
    max_length: Annotated[int, Field(ge=8)] = 2048  # tokens; longer conversations are cut
    held_out: Annotated[float, Field(ge=0, lt=1)] = (
        0.05  # share that training never sees, chosen by hash
    )
    limit: PositiveInt | None = None  # only the first conversations, after the hash split
    supervise: Literal["assistant", "all"] = "assistant"  # all: every token but the first
    min_supervised_share: Share = 0.01  # of the tokens; an error if less

    def __post_init__(self) -> None:
        if (self.prompt_field is None) != (self.completion_field is None):
            raise ValueError("prompt_field and completion_field go together")


class FeaturesConfig(Section):
    mode: Literal["cached", "online"] = "cached"  # online: the target runs in the training step
    # taps, the residual stream after k blocks; null: what the head needs (EAGLE-3: 2, n//2, n-3)
    after_blocks: Many[NonNegativeInt] | None = None
    batch_tokens: PositiveInt = 8192  # tokens of one target forward, padding included
    shard_tokens: PositiveInt = 262144  # tokens of one safetensors shard
    dtype: Float | None = None  # of what training reads; null: the target's
    # on disk; null: dtype. fp8 (E4M3) and int8 take a byte per value, and a float32 scale per token and state
    storage: Literal["bf16", "fp8", "int8"] | None = None
    shuffle_shards: PositiveInt | None = (
        None  # training draws rows from so many shards at a time; null: all
    )

    def __post_init__(self) -> None:
        blocks = list(self.after_blocks or ())
        if blocks != (meant := sorted(set(blocks))):
            raise ValueError(
                f"after_blocks must ascend without repeats, not {blocks}; did you mean {meant}?"
            )
        if self.mode == "online" and (self.storage or self.shuffle_shards):
            raise ValueError(
                "storage and shuffle_shards are of a cache: leave them out with mode: online"
            )


class SourceConfig(Section):
    """Where prompts come from."""

    path: Place  # a file (.json, .jsonl, .parquet, .csv), a directory or a Hub data set (owner/name:subset:split)
    # human turns, asked after the new answers; one question per row; or rows of PersonaHub, made into math problems
    kind: Literal["conversations", "prompts", "personas"] = "conversations"
    revision: str | None = None  # the Hub data set's commit
    num_rows: PositiveInt | None = None  # drawn with distill.seed; null: all, in their order
    samples: PositiveInt = 1  # answers to each row, with seeds of their own
    field: str | None = None  # prompts: the column of the question; null: the usual names are tried
    ask: Literal["solution", "problem"] = (
        "solution"  # personas: solve the row's problem, or first invent one
    )
    system_prompt: str | None = None  # for rows without one

    def __post_init__(self) -> None:
        if (self.field is not None and self.kind != "prompts") or (
            self.ask == "problem" and self.kind != "personas"
        ):
            raise ValueError(
                f"field belongs to prompts and ask to personas, not to {self.kind}; leave it out"
            )


class AnswerSamplingConfig(Section):
    temperature: NonNegativeFloat = 1.0  # 1: the target's own law; 0: greedy
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0  # 1: off
    top_k: Annotated[int, Field(ge=-1)] | None = (
        None  # null: the server's default; 0 is off (vLLM: -1, too)
    )
    max_tokens: PositiveInt = 2048  # of one answer


class ServerConfig(Section):
    """OpenAI-compatible servers (vLLM, SGLang, transformers serve) of the same target."""

    # base URLs, such as http://host:8000/v1
    urls: Some[Annotated[str, Field(pattern="^https?://")]]
    model: str | None = None  # its name on the servers; null: target.path
    concurrency: PositiveInt = 64  # requests under way at each URL
    timeout_s: PositiveFloat = 1800.0  # of one request, once connected; thinking can take long
    retries: NonNegativeInt = 5  # of one request, by openai's client
    patience_s: PositiveFloat = 900.0  # without any answer for so long, the run stops
    token_ids: bool = False  # ask for the ids (vLLM: return_token_ids), which are then trained on
    extra_body: dict[str, Any] = field(
        default_factory=dict
    )  # sent with every request (min_p, chat_template_kwargs)

    def __post_init__(self) -> None:
        if not isinstance(self.extra_body.get("chat_template_kwargs") or {}, dict):
            raise ValueError(
                "extra_body.chat_template_kwargs is an object, such as {enable_thinking: false}"
            )


Action = Literal["keep", "drop"]


class GateConfig(Section):
    """What to do with answers that have a flaw."""

    cut: Action = "drop"  # at max_tokens; if kept, it has no end-of-turn token
    empty: Action = "drop"  # nothing after the thinking
    loop: Action = "drop"  # the same words over and over
    language: Action = "drop"  # in another script than its question
    refusal: Action = "keep"  # a draft head has to follow the target
    repeated: Action = "drop"  # an invented problem that an earlier row has too


# a published set may be given by its name alone
by_name = BeforeValidator(lambda value: {"name": value} if isinstance(value, str) else value)


class QuestionsConfig(Section):
    """A set of questions."""

    # a published one (mt_bench, humaneval, gsm8k, ...), or a name of your own for the questions at `path`
    name: Annotated[str, Field(min_length=1)]
    # a file, a directory or a Hub data set (owner/name:subset:split); null: the published one
    path: Place | None = None
    revision: str | None = None  # null: the published one's pinned commit


class DistillConfig(Section):
    """Prompts that the target answers (RUN/distilled)."""

    sources: Some[SourceConfig]  # of the prompts
    server: ServerConfig | None = None  # null: this process, with the run's draft head if any
    sampling: AnswerSamplingConfig = AnswerSamplingConfig()  # how the target answers
    max_turns: PositiveInt | None = None  # most questions of a conversation
    # questions that no prompt may overlap, beside the recipe's own
    exclude: Many[Annotated[QuestionsConfig, by_name]] = ()
    ngram: Annotated[int, Field(ge=3)] = (
        13  # words in a row that no prompt may share with an evaluation question
    )
    gate: GateConfig = GateConfig()  # which answers are kept
    seed: Seed = 0  # of the prompts' order and of each answer's draws
