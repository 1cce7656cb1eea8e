"""The sections `target` and `head` of a recipe."""

from typing import Annotated, Literal

from pydantic import BeforeValidator, Discriminator, Field

from aerie.configs.read import Section

DType = Literal["auto", "float32", "bfloat16", "float16"]
HeadKind = Literal["eagle1", "eagle3", "medusa", "hydra", "draft_lm"]
DEFAULT_KIND = "eagle1"
MULTI_TOKEN = ("medusa", "hydra")  # kinds with a head for each future token
Count = Annotated[int, Field(gt=0)]


class TargetConfig(Section):
    """The frozen causal LM that is sped up."""

    path: str  # local directory or Hub id
    revision: str | None = None
    dtype: DType = "auto"  # auto: what the checkpoint was saved in
    device_map: str | None = None  # "auto" spreads the target over the GPUs that are there
    trust_remote_code: bool = False
    chat_template: str | None = None  # a .jinja file, for targets whose tokenizer has none


class _AnyHead(Section, kw_only=True):
    init_from: str | None = None  # warm start: a directory or Hub id, in any published layout
    max_position_embeddings: Count | None = None  # null: the target's


class _LayerSizes(Section, kw_only=True):
    """Sizes of decoder layers. null: the target's."""

    intermediate_size: Count | None = None
    num_attention_heads: Count | None = None
    num_key_value_heads: Count | None = None
    head_dim: Annotated[int, Field(gt=0, multiple_of=2)] | None = None  # even: RoPE turns pairs of entries
    rope_theta: Annotated[float, Field(gt=0)] | None = None  # null: the target's base and scaling


class Eagle1Section(_LayerSizes, _AnyHead, kw_only=True):
    """EAGLE-1 and EAGLE-2's; as wide as the target."""

    kind: Literal["eagle1"] = "eagle1"
    num_hidden_layers: Count = 1
    bias: bool = False  # fc.bias, as published Vicuna and LLaMA-2 heads have; no server loads it


class Eagle3Section(_LayerSizes, _AnyHead, kw_only=True):
    kind: Literal["eagle3"] = "eagle3"
    num_hidden_layers: Count = 1
    hidden_size: Count | None = None  # null: the target's
    draft_vocab_size: Count | None = None  # null: 32,000, or the target's where that is smaller
    qk_norm: bool | None = None  # RMSNorm on queries and keys; null: as the target (Qwen3 has it)
    fc_norm: bool = False  # EAGLE-3.1: a norm per fused feature before fc
    norm_output: bool = False  # EAGLE-3.1: feed back the normed output
    lm_head_init: Literal["random", "target"] = "random"  # target: its rows

    def __post_init__(self) -> None:
        if self.init_from is not None and self.lm_head_init == "target":
            raise ValueError("lm_head_init begins a new head, init_from has one already; leave one of them out")


class _MultiToken(_AnyHead, kw_only=True):
    num_heads: Count = 4  # future tokens with a head of their own (the papers')
    num_layers: Count = 1  # residual blocks of each head
    lm_head: Literal["own", "target"] = "own"  # for each future token, or the target's frozen one


class MedusaSection(_MultiToken, kw_only=True):
    kind: Literal["medusa"] = "medusa"


class HydraSection(_LayerSizes, _MultiToken, kw_only=True):
    """Hydra heads; the sizes are the prefix layer's."""

    kind: Literal["hydra"] = "hydra"
    prefix_layer: bool = False  # Hydra++ (with num_layers 4): a decoder layer over last_hidden
    initializer_range: float = 0.02  # of the prefix layer's matrices

    def __post_init__(self) -> None:
        sizes = [name for name in _LayerSizes.__dataclass_fields__ if getattr(self, name) is not None]
        if sizes and not self.prefix_layer:
            raise ValueError(f"{sizes[0]} belongs to the prefix layer; set prefix_layer: true, or leave it out")


class DraftLMSection(_LayerSizes, _AnyHead, kw_only=True):
    """A small language model with the target's tokenizer."""

    kind: Literal["draft_lm"] = "draft_lm"
    num_hidden_layers: Count = 1
    hidden_size: Count | None = None
    initializer_range: float = 0.02  # of its matrices

    def __post_init__(self) -> None:
        needed = ("hidden_size", "intermediate_size", "num_attention_heads", "max_position_embeddings")
        missing = [name for name in needed if getattr(self, name) is None]
        if missing and self.init_from is None:
            raise ValueError(f"a draft_lm trained from scratch needs {', '.join(missing)} (or init_from)")


HeadConfig = Annotated[
    Eagle1Section | Eagle3Section | MedusaSection | HydraSection | DraftLMSection,
    Discriminator("kind"),
    BeforeValidator(lambda values: {"kind": DEFAULT_KIND, **values} if isinstance(values, dict) else values),
]
