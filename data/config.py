"""The sections `synthetic`, `data` and `features` of a recipe."""

from dataclasses import dataclass
from typing import Literal

from model.recipe import STRICT


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
    supervise: str = "assistant"  # or "all": every token but the first (how a target is trained from scratch)
    min_supervised_share: float = 0.01  # refuse to go on below this share of supervised tokens

    def __post_init__(self) -> None:
        if not self.conversations:
            raise ValueError("conversations is empty: name at least one file")
        if not 0.0 <= self.held_out < 1.0:
            raise ValueError("held_out is a share in [0, 1)")
        if self.max_length < 8:
            raise ValueError("max_length must be at least 8 tokens")
        if self.supervise not in ("assistant", "all"):
            raise ValueError("supervise is 'assistant' or 'all'")
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
    dtype: Literal["float32", "bfloat16", "float16"] | None = (
        None  # of the states as training sees them; null: the target's
    )
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
