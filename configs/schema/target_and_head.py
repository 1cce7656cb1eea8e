"""The sections `target` and `head` of a recipe."""

from dataclasses import dataclass
from typing import Literal

from aerie.configs.read import STRICT

DType = Literal["auto", "float32", "bfloat16", "float16"]
HeadKind = Literal["eagle1", "eagle3", "medusa", "hydra", "draft_lm"]

MULTI_TOKEN = ("medusa", "hydra")  # kinds with a head for each future token


@dataclass(frozen=True)
class TargetConfig:
    """The frozen causal LM that is sped up."""

    __pydantic_config__ = STRICT
    path: str  # local directory or Hub id
    revision: str | None = None
    dtype: DType = "auto"  # auto: what the checkpoint was saved in
    device_map: str | None = None  # "auto" spreads the target over the GPUs that are there
    trust_remote_code: bool = False
    chat_template: str | None = None  # a .jinja file, for targets whose tokenizer has none


@dataclass(frozen=True)
class HeadConfig:
    """The trained module. Sizes left at null are the target's own."""

    __pydantic_config__ = STRICT
    kind: HeadKind = "eagle1"
    num_hidden_layers: int = 1
    hidden_size: int | None = None  # EAGLE-1's width is always the target's
    intermediate_size: int | None = None
    num_attention_heads: int | None = None
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    bias: bool = False  # fc.bias: false is what every server loads; published Vicuna and LLaMA-2 heads have it
    rope_theta: float | None = None  # null: the target's RoPE, base and scaling
    max_position_embeddings: int | None = None  # null: the target's
    initializer_range: float = 0.02  # standard deviation of a new module's matrices
    init_from: str | None = None  # warm start: a head directory, for EAGLE-3 a published one too
    draft_vocab_size: int | None = None  # EAGLE-3; null: 32,000, or the target's whole vocabulary where that is smaller
    qk_norm: bool | None = None  # EAGLE-3: RMSNorm on queries and keys; null: as the target (Qwen3 has it)
    fc_norm: bool = False  # EAGLE-3.1: a norm per fused feature before fc
    lm_head_init: Literal["random", "target"] = "random"  # EAGLE-3; target: its rows
    norm_output: bool = False  # EAGLE-3.1: feed back the normed output instead of the one before the norm
    num_heads: int = 4  # Medusa, Hydra: future tokens with a head of their own (the papers' trees are 4 deep)
    num_layers: int = 1  # Medusa, Hydra: residual blocks of each head (Hydra++: 4)
    prefix_layer: bool = False  # Hydra++: a decoder layer over last_hidden, whose output takes its place
    lm_head: Literal["own", "target"] = "own"  # Medusa, Hydra: one for each future token, or the target's frozen one

    def __post_init__(self) -> None:
        self._check_sizes()
        if self.kind == "draft_lm":
            needed = ("hidden_size", "intermediate_size", "num_attention_heads", "max_position_embeddings")
            missing = [name for name in needed if getattr(self, name) is None]
            if missing and self.init_from is None:
                raise ValueError(f"a draft_lm trained from scratch needs {', '.join(missing)} (or init_from)")
        elif self.kind != "eagle3" and self.hidden_size is not None:
            raise ValueError(f"hidden_size is set by the target for {self.kind}; leave it out")
        if self.kind != "eagle3":
            keys = ("draft_vocab_size", "qk_norm", "fc_norm", "norm_output", "lm_head_init")
            foreign = [name for name in keys if getattr(self, name) not in (None, False, "random")]
            if foreign:
                raise ValueError(f"{foreign[0]} belongs to eagle3, this head is {self.kind}; leave it out")
        elif self.draft_vocab_size is not None and self.draft_vocab_size < 1:
            raise ValueError("draft_vocab_size must be at least 1")
        elif self.bias:
            raise ValueError("an eagle3 head has no fc.bias; leave bias out")
        self._check_multi_token()

    def _check_sizes(self) -> None:
        """ValueError for sizes that no module can have, and for two ways to begin."""
        sizes = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
        for name in (*sizes, "head_dim", "max_position_embeddings", "rope_theta"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name} must be positive")
        if self.head_dim is not None and self.head_dim % 2:
            raise ValueError("head_dim must be even: RoPE turns pairs of entries")
        if self.init_from is not None and self.lm_head_init == "target":
            raise ValueError("lm_head_init begins a new head, init_from has one already; leave one of them out")

    def _check_multi_token(self) -> None:
        """ValueError for keys of Medusa and Hydra at other heads, and for theirs at these."""
        if self.kind not in MULTI_TOKEN:
            own = {"num_heads": 4, "num_layers": 1, "prefix_layer": False, "lm_head": "own"}
            foreign = [name for name, default in own.items() if getattr(self, name) != default]
            if foreign:
                raise ValueError(f"{foreign[0]} belongs to medusa and hydra, this head is {self.kind}; leave it out")
            return
        if min(self.num_heads, self.num_layers) < 1:
            raise ValueError("num_heads and num_layers must be at least 1")
        if self.prefix_layer and self.kind != "hydra":
            raise ValueError(f"prefix_layer belongs to hydra, this head is {self.kind}; leave it out")
        layer = ["intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "rope_theta"]
        unused = [name for name in layer if getattr(self, name) is not None and not self.prefix_layer]
        unused += ["num_hidden_layers"] if self.num_hidden_layers != 1 else []
        unused += ["bias"] if self.bias else []
        if unused:
            raise ValueError(f"{unused[0]} belongs to no part of this {self.kind} head; leave it out")
