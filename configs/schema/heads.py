"""The sections `target`, `head` and `train` of a recipe: the last two have a class per kind of head."""

from dataclasses import field
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import (
    BeforeValidator,
    Discriminator,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
)

from aerie.configs.read import Many, Place, Section

SHORT = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "half": "float16",
    "fp32": "float32",
    "float": "float32",
}
spelt_out = BeforeValidator(
    lambda name: SHORT.get(str(name).removeprefix("torch."), str(name).removeprefix("torch."))
)
Float = Annotated[Literal["float32", "bfloat16", "float16"], spelt_out]
DType = Annotated[Literal["auto", "float32", "bfloat16", "float16"], spelt_out]
Share = Annotated[float, Field(ge=0, le=1)]
Seed = Annotated[int, Field(ge=0, lt=2**32)]
Tracker = Literal[
    "tensorboard", "wandb", "trackio", "mlflow", "aim", "comet_ml", "clearml", "dvclive", "swanlab"
]
DEFAULT_KIND = "eagle1"
EAGLE = ("eagle", "eagle-chain", "deagle", "svip", "ddd", "opt-tree")


class TargetConfig(Section):
    """The frozen causal LM that is sped up."""

    path: Place  # local directory or Hub id
    revision: str | None = None  # a branch, tag or commit of the Hub; null: main
    dtype: DType = "auto"  # auto: what the checkpoint was saved in
    device_map: str | None = None  # "auto" spreads the target over the GPUs that are there
    # how a cycle runs; captured: as CUDA graphs (seconds to record); compiled: by torch.compile (minutes, then faster);
    # auto: captured on a GPU, else eager
    cycle: Literal["auto", "eager", "captured", "compiled"] = "auto"
    trust_remote_code: bool = False  # true runs the Python files that come with the checkpoint
    chat_template: Place | None = None  # a .jinja file, for targets whose tokenizer has none
    # replaces settings of the model's generation_config (null: unset); on the command line: --generation.KEY VALUE
    generation: dict[str, Any] = field(default_factory=dict)


class _AnyHead(Section, kw_only=True):
    methods: ClassVar[tuple[str, ...]]  # that decode with it, the usual one first
    reads_taps: ClassVar[bool] = False  # learns from the target's taps, not from last_hidden
    init_from: Place | None = None  # warm start: a directory or Hub id, in any published layout
    max_position_embeddings: PositiveInt | None = (
        None  # null: the target's, or data.max_length and a draft, if more
    )

    @staticmethod
    def levels_of(values: dict[str, Any]) -> int | None:
        """The most levels that a head with this config.json can draft; None: no limit."""
        return None


class _LayerSizes(Section, kw_only=True):
    """Sizes of decoder layers. null: the target's."""

    intermediate_size: PositiveInt | None = None  # width of the MLP
    num_attention_heads: PositiveInt | None = None  # query heads
    num_key_value_heads: PositiveInt | None = (
        None  # fewer than the query heads: grouped-query attention
    )
    head_dim: Annotated[int, Field(gt=0, multiple_of=2)] | None = (
        None  # even: RoPE turns pairs of entries
    )
    rope_theta: PositiveFloat | None = None  # null: the target's base and scaling


class Eagle1Section(_LayerSizes, _AnyHead, kw_only=True):
    """EAGLE-1 and EAGLE-2's head, as wide as the target."""

    methods = ("eagle2", *EAGLE)
    kind: Literal["eagle1"] = "eagle1"
    num_hidden_layers: PositiveInt = 1  # decoder layers; the papers' heads have one
    bias: bool = False  # fc.bias, as in published Vicuna and LLaMA-2 heads; no server loads it


class _TapHead(_LayerSizes, _AnyHead, kw_only=True):
    reads_taps = True
    norm_init: Literal["ones", "target"] = "ones"  # target: the final norm starts as the target's
    fc_init: Literal["random", "highest_tap"] = (
        "random"  # highest_tap: fc starts by passing on the last tap only
    )

    def __post_init__(self) -> None:
        starts = {"lm_head_init": "random", "norm_init": "ones", "fc_init": "random"}
        begun = [
            f"{name} {value}"
            for name, value in starts.items()
            if getattr(self, name, value) != value
        ]
        if self.init_from is not None and begun:
            raise ValueError(f"init_from is a head that has begun already; set {', '.join(begun)}")


class Eagle3Section(_TapHead, kw_only=True):
    methods = ("eagle3", *EAGLE)
    kind: Literal["eagle3"] = "eagle3"
    num_hidden_layers: PositiveInt = 1  # decoder layers; the paper's head has one
    hidden_size: PositiveInt | None = None  # null: the target's
    draft_vocab_size: PositiveInt | None = (
        None  # null: 32,000, or the target's where that is smaller
    )
    qk_norm: bool | None = (
        False  # RMSNorm on queries and keys (SGLang does not load it); null: as the target
    )
    fc_norm: bool | None = (
        None  # EAGLE-3.1: a norm per fused feature before fc; null: off, or as init_from has it
    )
    norm_output: bool | None = None  # EAGLE-3.1: feed back the normed output
    norm_before_residual: bool | None = (
        None  # the first layer's residual is the normed feature; only vLLM loads it
    )
    norm_before_fc: bool | None = (
        None  # one norm over all fused features before fc; only vLLM loads it
    )
    lm_head: Literal["trained", "frozen"] = (
        "trained"  # frozen: keeps the target's rows, or init_from's
    )
    lm_head_init: Literal["random", "target"] = "random"  # target: the target's rows

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.fc_norm and self.norm_before_fc:
            raise ValueError(
                "fc_norm and norm_before_fc norm the same features, and no server does both; choose one"
            )
        if self.init_from is None:
            for name in ("fc_norm", "norm_output", "norm_before_residual", "norm_before_fc"):
                object.__setattr__(self, name, bool(getattr(self, name)))


class _MultiToken(_AnyHead, kw_only=True):
    num_heads: PositiveInt = 4  # future tokens, each with its own head (the papers' number)
    num_layers: PositiveInt = 1  # residual blocks of each head
    lm_head: Literal["own", "target"] = "own"  # one per future token, or the target's frozen one

    @staticmethod
    def levels_of(values: dict[str, Any]) -> int | None:
        return values.get("num_heads")  # missing in a published layout


class MedusaSection(_MultiToken, kw_only=True):
    methods = ("medusa",)
    kind: Literal["medusa"] = "medusa"


class HydraSection(_LayerSizes, _MultiToken, kw_only=True):
    """Hydra heads; the sizes are the prefix layer's."""

    methods = ("hydra",)
    kind: Literal["hydra"] = "hydra"
    prefix_layer: bool = False  # Hydra++ (with num_layers 4): a decoder layer over last_hidden
    initializer_range: PositiveFloat = 0.02  # deviation of the prefix layer's new matrices

    def __post_init__(self) -> None:
        sizes = [
            name for name in _LayerSizes.__dataclass_fields__ if getattr(self, name) is not None
        ]
        if sizes and not self.prefix_layer:
            raise ValueError(
                f"{sizes[0]} belongs to the prefix layer; set prefix_layer: true, or leave it out"
            )


class DraftLMSection(_LayerSizes, _AnyHead, kw_only=True):
    """A small language model with the target's tokenizer."""

    methods = ("sps", "sps-heuristic", "sps-svip", "sps-confidence")
    kind: Literal["draft_lm"] = "draft_lm"
    num_hidden_layers: PositiveInt = 1  # decoder layers
    hidden_size: PositiveInt | None = None  # width; needed without init_from
    initializer_range: PositiveFloat = 0.02  # standard deviation of new matrices

    def __post_init__(self) -> None:
        needed = (
            "hidden_size",
            "intermediate_size",
            "num_attention_heads",
            "max_position_embeddings",
        )
        missing = [name for name in needed if getattr(self, name) is None]
        if missing and self.init_from is None:
            raise ValueError(
                f"a draft_lm trained from scratch needs {', '.join(missing)} (or init_from)"
            )


class BlockSection(_TapHead, kw_only=True):
    """A block head (DFlash, arXiv 2602.06036): one forward drafts all levels; as wide as the target."""

    methods = ("block-tree", "block-chain")
    kind: Literal["block"] = "block"
    num_hidden_layers: PositiveInt = 1  # decoder layers; published heads for 8B have 5
    block_size: Annotated[int, Field(ge=2)] = (
        8  # rows of its forward: the last known token, then masks (z-lab: 16)
    )
    in_block: Literal["bidirectional", "causal"] = (
        "bidirectional"  # what a row sees of its block (JetSpec: causal)
    )
    anchor_feature: bool = (
        False  # true: adds the fused taps of the token before the block to each row
    )
    sample_from_anchor: bool = (
        False  # true: the known token's row drafts too, so block_size tokens (DSpark)
    )
    mask_token_id: NonNegativeInt | None = (
        None  # null: a row of the target's embedding that no text uses
    )
    markov_rank: NonNegativeInt = (
        64  # of the correction of logits by previous tokens; 0: none (DSpark, 8B: 256)
    )
    markov_order: PositiveInt = (
        1  # how many previous tokens it sees; no server loads more than DSpark's one
    )
    markov_head: Literal["vanilla", "gated"] = "vanilla"  # gated: by the row's state too

    @staticmethod
    def levels_of(values: dict[str, Any]) -> int | None:
        size = values.get("block_size")  # config.json is not checked yet
        return (
            size - 1 + bool(values.get("sample_from_anchor"))
            if isinstance(size, int) and size > 1
            else None
        )


HeadConfig = Annotated[
    Eagle1Section | Eagle3Section | MedusaSection | HydraSection | DraftLMSection | BlockSection,
    Discriminator("kind"),
    BeforeValidator(
        lambda values: {"kind": DEFAULT_KIND, **values} if isinstance(values, dict) else values
    ),
]
KINDS: dict[str, type[_AnyHead]] = {
    section.kind: section for section in get_args(get_args(HeadConfig)[0])
}
LossName = Literal[
    "soft_cross_entropy",
    "kl",
    "reverse_kl",
    "jsd",
    "total_variation",
    "negative_log_alpha",
    "lk_hybrid",
]
Beta = Annotated[float, Field(ge=0, lt=1)]
Decay = Annotated[float, Field(gt=0, le=1)]


class AdamWSection(Section, kw_only=True):
    """All parameters by AdamW."""

    kind: Literal["adamw"] = "adamw"


class MuonSection(Section, kw_only=True):
    """Matrices of layers and fc by Muon with Nesterov momentum (arXiv 2502.16982), all else by AdamW."""

    kind: Literal["muon"] = "muon"
    matrix_rate: PositiveFloat = (
        0.02  # Muon's learning rate, with the same schedule as AdamW's train.learning_rate
    )
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.95  # weight of earlier gradients
    weight_decay: NonNegativeFloat = (
        0.1  # of these matrices (the paper's); train.weight_decay is AdamW's
    )


class RateScaling(Section, kw_only=True):
    """rate = given rate * (steps / steps of this run) ** power."""

    steps: PositiveInt  # number of optimiser steps that the given rates suit
    power: Annotated[float, Field(gt=0, le=1)] = (
        0.25  # how fast the rates fall with the number of steps
    )


class TrainConfig(Section, kw_only=True):
    """The defaults are those of EAGLE's code unless noted."""

    kind: str  # of the head
    epochs: PositiveInt = (
        20  # passes over the training conversations; EAGLE's README advises 20 to 40
    )
    max_steps: PositiveInt | None = None  # optimiser steps; null: epochs decide
    max_seconds: NonNegativeFloat | None = (
        None  # this stage's budget: stops at the next step and saves
    )
    batch_size: PositiveInt = 4  # conversations per process and forward
    accumulation: PositiveInt = 1  # batches of one optimiser step
    learning_rate: PositiveFloat = (
        3e-5  # at the end of the warm-up (EAGLE's DeepSpeed script: 5e-5)
    )
    warmup_steps: NonNegativeInt = 2000  # optimiser steps in which the rate rises from zero
    schedule: Literal["linear", "cosine", "constant"] = (
        "linear"  # after the warm-up; to final_rate, or constant
    )
    final_rate: Share = 0.0  # share of the learning rate at which linear and cosine end
    scale_rates: RateScaling | None = None  # to the number of steps; null: rates as given
    optimizer: Annotated[AdamWSection | MuonSection, Discriminator("kind")] = (
        AdamWSection()
    )  # AdamW, or Muon and AdamW
    betas: tuple[Beta, Beta] = (0.9, 0.95)  # AdamW's decay rates of the two moments
    weight_decay: NonNegativeFloat = 0.01  # AdamW's (EAGLE's DeepSpeed script: 0)
    clip_norm: PositiveFloat = 0.5  # of the gradient (EAGLE's accelerate script clips values)
    lk_eta: NonNegativeFloat = 3.0  # lk_hybrid: lambda = exp(-eta alpha) (arXiv 2602.23881)
    jsd_beta: Annotated[float, Field(gt=0, lt=1)] = (
        0.5  # jsd: the target's weight in the mixture (arXiv 2310.08461)
    )
    loss_chunk_slots: PositiveInt | None = (
        None  # slots whose laws are held at once; null: what fits 1 GiB (GPU: 4 GiB)
    )
    gradient_checkpointing: bool = (
        False  # recompute the layers in the backward pass: less memory, more time
    )
    seed: Seed = 0  # of new weights, the order of the rows and the noise
    log_every: PositiveInt = (
        10  # steps between lines of metrics.jsonl; the terminal shows at most one in 5 s
    )
    eval_every: NonNegativeInt = 500  # steps between evaluations; 0: only at the end
    eval_conversations: NonNegativeInt = 64  # held-out rows of an evaluation
    eval_depths: PositiveInt = 5  # drafted tokens per start slot for the predicted tau
    save_every: PositiveInt = 500  # steps between saves, to go on from
    keep_last: PositiveInt = 2  # saves; with 2, a broken newest one costs save_every steps
    trackers: Many[Tracker] = ()  # tensorboard, wandb, trackio or another of accelerate's

    def __post_init__(self) -> None:
        weights = {name: value for name, value in vars(self).items() if name.endswith("_weight")}
        if len(weights) > 1 and not any(weights.values()):
            raise ValueError(f"{' and '.join(weights)} are both zero: nothing would be learnt")


class DraftHeadTrain(TrainConfig, kw_only=True):
    """For all heads that read the target's features."""

    loss: LossName = "soft_cross_entropy"  # between the target's and the draft's law
    measure_prompts: NonNegativeInt = (
        0  # held-out prompts decoded at each evaluation: their tau picks the best weights
    )
    measure_new_tokens: PositiveInt = 64  # of each such prompt


class EagleTrain(DraftHeadTrain, kw_only=True):
    compile: bool = False  # torch.compile the layers except attention: needs a C++ compiler, and a minute at the start


class Eagle1Train(EagleTrain, kw_only=True):
    """EAGLE (arXiv 2401.15077), section 4.1."""

    kind: Literal["eagle1"] = "eagle1"
    feature_weight: NonNegativeFloat = 1.0  # of the Smooth-L1 between drafted and true feature
    classification_weight: NonNegativeFloat = 0.1  # of the loss between the laws
    feature_noise: NonNegativeFloat = (
        0.1  # half-width of the uniform noise on input features; 0 switches it off
    )


class Eagle3Train(EagleTrain, kw_only=True):
    """The training-time test (EAGLE-3, arXiv 2503.01840)."""

    kind: Literal["eagle3"] = "eagle3"
    unroll_steps: PositiveInt = 7  # length of the training-time test
    unroll_decay: Decay = 0.8  # step k weighs unroll_decay ** k
    mask_outside_vocabulary: bool = True  # no loss where the target's choice cannot be drafted
    packing: bool = False  # conversations of a batch in one row, without padding


class MultiTokenTrain(DraftHeadTrain, kw_only=True):
    """Medusa (arXiv 2401.10774) and Hydra (arXiv 2402.05109)."""

    kind: Literal["medusa", "hydra"]
    label_weight: NonNegativeFloat = 1.0  # of the cross-entropy to the conversation's own tokens
    law_weight: NonNegativeFloat = (
        0.0  # of the loss to the target's law (Hydra++: 1, with label_weight 0)
    )
    head_decay: Decay = 0.8  # head k = 1, 2, ... weighs head_decay ** k (Medusa, eq. 1; Hydra: 1)
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0  # of each block's inputs (Hydra++: 0.2)


class BlockTrain(DraftHeadTrain, kw_only=True):
    """DFlash (arXiv 2602.06036) as in speculators 0.9, trained on the target's law."""

    kind: Literal["block"] = "block"
    anchors: PositiveInt = 512  # blocks per conversation, at places drawn anew in each step
    place_decay: Decay = (
        0.7788  # place k = 1, 2, ... weighs place_decay ** (k - 1); DFlash: exp(-1 / 4)
    )
    label_weight: NonNegativeFloat = (
        0.0  # of the cross-entropy to the conversation's own tokens (DFlash's loss)
    )
    law_weight: NonNegativeFloat = 1.0  # of the loss to the target's law


class DraftLMTrain(TrainConfig, kw_only=True):
    """A small LM, trained on tokens alone, or with `distill` on a target's laws too."""

    kind: Literal["draft_lm"] = "draft_lm"
    distill: LossName | None = (
        None  # this loss to the target's laws, beside cross-entropy on the tokens
    )
    distill_weight: PositiveFloat = 1.0  # of that loss
    token_weight: NonNegativeFloat = 1.0  # of the cross-entropy, where `distill` is set

    def __post_init__(self) -> None:
        if self.distill is None and (self.distill_weight, self.token_weight) != (1.0, 1.0):
            raise ValueError("distill_weight and token_weight do nothing without distill; set it")


Train = Annotated[
    Eagle1Train | Eagle3Train | MultiTokenTrain | BlockTrain | DraftLMTrain,
    Field(discriminator="kind"),
]
