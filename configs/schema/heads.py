"""The sections `target`, `head` and `train` of a recipe: the last two have a class per kind of
head."""

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

from aerie.configs.read import Many, Place, Section, key

FULL_NAMES = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "half": "float16",
    "fp32": "float32",
    "float": "float32",
}
spelt_out = BeforeValidator(
    lambda name: FULL_NAMES.get(str(name).removeprefix("torch."), str(name).removeprefix("torch."))
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

    path: Place = key("local directory or Hub id")
    revision: str | None = key("a branch, tag or commit of the Hub; null: main", default=None)
    dtype: DType = key("auto: what the checkpoint was saved in", default="auto")
    device_map: str | None = key(
        '"auto" spreads the target over the GPUs that are there', default=None
    )
    cycle: Literal["auto", "eager", "captured", "compiled"] = key(
        "how a cycle runs; captured: as CUDA graphs (seconds to record); compiled: by "
        "torch.compile (minutes, then faster); auto: captured on a GPU, else eager",
        default="auto",
    )
    trust_remote_code: bool = key(
        "true runs the Python files that come with the checkpoint", default=False
    )
    chat_template: Place | None = key(
        "a .jinja file, for targets whose tokenizer has none (its arguments: "
        "data.template_arguments)",
        default=None,
    )
    generation: dict[str, Any] = key(
        "replaces settings of the model's generation_config (null: unset); on the command "
        "line: --generation.KEY VALUE",
        default_factory=dict,
    )


class HeadSection(Section, kw_only=True):
    """What every kind of head has."""

    methods: ClassVar[tuple[str, ...]]  # that decode with it, the usual one first
    reads_taps: ClassVar[bool] = False  # learns from the target's taps, not from last_hidden
    init_from: Place | None = key(
        "warm start: a directory or Hub id, in any published layout", default=None
    )
    max_position_embeddings: PositiveInt | None = key(
        "longest text; null: the target's, or data.max_length and a draft, if more", default=None
    )

    @staticmethod
    def levels_of(values: dict[str, Any]) -> int | None:
        """The most levels that a head with this config.json can draft; None: no limit."""
        return None


class _LayerSizes(Section, kw_only=True):
    """Sizes of decoder layers. null: the target's."""

    intermediate_size: PositiveInt | None = key("width of the MLP", default=None)
    num_attention_heads: PositiveInt | None = key("query heads", default=None)
    num_key_value_heads: PositiveInt | None = key(
        "key and value heads; fewer than the query heads: grouped-query attention", default=None
    )
    head_dim: Annotated[int, Field(gt=0, multiple_of=2)] | None = key(
        "even: RoPE turns pairs of entries", default=None
    )
    rope_theta: PositiveFloat | None = key(
        "base of the head's RoPE; null: the target's base and scaling", default=None
    )


class Eagle1Section(_LayerSizes, HeadSection, kw_only=True):
    """EAGLE-1 and EAGLE-2's head, as wide as the target."""

    methods = ("eagle2", *EAGLE)
    kind: Literal["eagle1"] = "eagle1"
    num_hidden_layers: PositiveInt = key("decoder layers; the papers' heads have one", default=1)
    bias: bool = key(
        "fc.bias, as in published Vicuna and LLaMA-2 heads; no server loads it", default=False
    )


class _TapHead(_LayerSizes, HeadSection, kw_only=True):
    """A head that reads the target's taps."""

    reads_taps = True
    norm_init: Literal["ones", "target"] = key(
        "target: the final norm starts as the target's", default="ones"
    )
    fc_init: Literal["random", "highest_tap"] = key(
        "highest_tap: fc starts by passing on the last tap only", default="random"
    )

    def __post_init__(self) -> None:
        starts = (self.norm_init, self.fc_init, getattr(self, "lm_head_init", "random"))
        if self.init_from is not None and starts != ("ones", "random", "random"):
            raise ValueError(
                "init_from is a head that has begun already; set norm_init ones, "
                "fc_init random and lm_head_init random, or leave them out"
            )


class Eagle3Section(_TapHead, kw_only=True):
    """EAGLE-3's head, with an LM head over a draft vocabulary."""

    methods = ("eagle3", *EAGLE)
    kind: Literal["eagle3"] = "eagle3"
    num_hidden_layers: PositiveInt = key("decoder layers; the paper's head has one", default=1)
    hidden_size: PositiveInt | None = key("null: the target's", default=None)
    draft_vocab_size: PositiveInt | None = key(
        "null: 32,000, or the target's where that is smaller", default=None
    )
    qk_norm: bool | None = key(
        "RMSNorm on queries and keys (SGLang does not load it); null: as the target", default=False
    )
    fc_norm: bool | None = key(
        "EAGLE-3.1: a norm per fused feature before fc; null: off, or as init_from has it",
        default=None,
    )
    norm_output: bool | None = key("EAGLE-3.1: feed back the normed output", default=None)
    norm_before_residual: bool | None = key(
        "the first layer's residual is the normed feature; only vLLM loads it", default=None
    )
    norm_before_fc: bool | None = key(
        "one norm over all fused features before fc; only vLLM loads it", default=None
    )
    lm_head: Literal["trained", "frozen"] = key(
        "frozen: keeps the target's rows, or init_from's", default="trained"
    )
    lm_head_init: Literal["random", "target"] = key("target: the target's rows", default="random")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.fc_norm and self.norm_before_fc:
            raise ValueError(
                "fc_norm and norm_before_fc norm the same features, and no server does both; "
                "choose one"
            )


class _MultiToken(HeadSection, kw_only=True):
    """Heads that each draft one future token."""

    num_heads: PositiveInt = key(
        "future tokens, each with its own head (the papers' number)", default=4
    )
    num_layers: PositiveInt = key("residual blocks of each head", default=1)
    lm_head: Literal["own", "target"] = key(
        "one per future token, or the target's frozen one", default="own"
    )

    @staticmethod
    def levels_of(values: dict[str, Any]) -> int | None:
        return values.get("num_heads")  # missing in a published layout


class MedusaSection(_MultiToken, kw_only=True):
    """Medusa heads."""

    methods = ("medusa",)
    kind: Literal["medusa"] = "medusa"


class HydraSection(_LayerSizes, _MultiToken, kw_only=True):
    """Hydra heads; the sizes are the prefix layer's."""

    methods = ("hydra",)
    kind: Literal["hydra"] = "hydra"
    prefix_layer: bool = key(
        "Hydra++ (with num_layers 4): a decoder layer over last_hidden", default=False
    )
    initializer_range: PositiveFloat = key(
        "deviation of the prefix layer's new matrices", default=0.02
    )

    def __post_init__(self) -> None:
        sizes = [key for key in _LayerSizes.__dataclass_fields__ if getattr(self, key) is not None]
        if sizes and not self.prefix_layer:
            raise ValueError(
                f"{sizes[0]} is the prefix layer's; set prefix_layer: true, or drop it"
            )


class DraftLMSection(_LayerSizes, HeadSection, kw_only=True):
    """A small language model with the target's tokenizer."""

    methods = ("sps", "sps-heuristic", "sps-svip", "sps-confidence")
    kind: Literal["draft_lm"] = "draft_lm"
    num_hidden_layers: PositiveInt = key("decoder layers", default=1)
    hidden_size: PositiveInt | None = key("width; needed without init_from", default=None)
    initializer_range: PositiveFloat = key("standard deviation of new matrices", default=0.02)

    def __post_init__(self) -> None:
        needed = "hidden_size intermediate_size num_attention_heads max_position_embeddings"
        missing = [name for name in needed.split() if getattr(self, name) is None]
        if missing and self.init_from is None:
            raise ValueError(
                f"a draft_lm trained from scratch needs {', '.join(missing)} (or init_from)"
            )


class BlockSection(_TapHead, kw_only=True):
    """A block head (DFlash, arXiv 2602.06036): one forward drafts all levels; as wide as the
    target."""

    methods = ("block-tree", "block-chain")
    kind: Literal["block"] = "block"
    num_hidden_layers: PositiveInt = key("decoder layers; published heads for 8B have 5", default=1)
    block_size: Annotated[int, Field(ge=2)] = key(
        "rows of the head's forward: the last known token, then masks (z-lab: 16)", default=8
    )
    in_block: Literal["bidirectional", "causal"] = key(
        "what a row sees of its block (JetSpec: causal)", default="bidirectional"
    )
    anchor_feature: bool = key(
        "true: adds the fused taps of the token before the block to each row", default=False
    )
    sample_from_anchor: bool = key(
        "true: the known token's row drafts too, so block_size tokens (DSpark)", default=False
    )
    mask_token_id: NonNegativeInt | None = key(
        "null: a row of the target's embedding that no text uses", default=None
    )
    markov_rank: NonNegativeInt = key(
        "rank of the correction of logits by previous tokens; 0: none (DSpark, 8B: 256)", default=64
    )
    markov_order: PositiveInt = key(
        "how many previous tokens the correction sees; servers load DSpark's one alone", default=1
    )
    markov_head: Literal["vanilla", "gated"] = key(
        "gated: the row's state weighs the correction", default="vanilla"
    )

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
KINDS: dict[str, type[HeadSection]] = {
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
    """Matrices of layers and fc by Muon with Nesterov momentum (arXiv 2502.16982), all else by
    AdamW."""

    kind: Literal["muon"] = "muon"
    matrix_rate: PositiveFloat = key(
        "Muon's learning rate, with the same schedule as AdamW's train.learning_rate", default=0.02
    )
    momentum: Annotated[float, Field(ge=0, lt=1)] = key("weight of earlier gradients", default=0.95)
    weight_decay: NonNegativeFloat = key(
        "decay of these matrices (the paper's); train.weight_decay is AdamW's", default=0.1
    )


class RateScaling(Section, kw_only=True):
    """rate = given rate * (steps / steps of this run) ** power."""

    steps: PositiveInt = key("number of optimiser steps that the given rates suit")
    power: Annotated[float, Field(gt=0, le=1)] = key(
        "how fast the rates fall with the number of steps", default=0.25
    )


class TrainConfig(Section, kw_only=True):
    """The defaults are those of EAGLE's code unless noted."""

    kind: str = key("of the head")
    epochs: PositiveInt = key(
        "passes over the training conversations; EAGLE's README advises 20 to 40", default=20
    )
    max_steps: PositiveInt | None = key("optimiser steps; null: epochs decide", default=None)
    max_seconds: NonNegativeFloat | None = key(
        "this stage's budget: stops at the next step and saves", default=None
    )
    batch_size: PositiveInt = key("conversations per process and forward", default=4)
    accumulation: PositiveInt = key("batches of one optimiser step", default=1)
    learning_rate: PositiveFloat = key(
        "at the end of the warm-up (EAGLE's DeepSpeed script: 5e-5)", default=3e-5
    )
    warmup_steps: NonNegativeInt = key(
        "optimiser steps in which the rate rises from zero", default=2000
    )
    schedule: Literal["linear", "cosine", "constant"] = key(
        "after the warm-up; to final_rate, or constant", default="linear"
    )
    final_rate: Share = key(
        "share of the learning rate at which linear and cosine end", default=0.0
    )
    scale_rates: RateScaling | None = key(
        "scales both rates to the number of steps; null: rates as given", default=None
    )
    optimizer: Annotated[AdamWSection | MuonSection, Discriminator("kind")] = key(
        "AdamW, or Muon and AdamW", default=AdamWSection()
    )
    betas: tuple[Beta, Beta] = key("AdamW's decay rates of the two moments", default=(0.9, 0.95))
    weight_decay: NonNegativeFloat = key("AdamW's (EAGLE's DeepSpeed script: 0)", default=0.01)
    clip_norm: PositiveFloat = key(
        "greatest norm of the gradient (EAGLE's accelerate script clips values)", default=0.5
    )
    lk_eta: NonNegativeFloat = key(
        "lk_hybrid: lambda = exp(-eta alpha) (arXiv 2602.23881)", default=3.0
    )
    jsd_beta: Annotated[float, Field(gt=0, lt=1)] = key(
        "jsd: the target's weight in the mixture (arXiv 2310.08461)", default=0.5
    )
    loss_chunk_slots: PositiveInt | None = key(
        "slots whose distributions are held at once; null: as many as fit 1 GiB (GPU: 4 GiB)",
        default=None,
    )
    gradient_checkpointing: bool = key(
        "recompute the layers in the backward pass: less memory, more time", default=False
    )
    seed: Seed = key("decides new weights, the order of the rows and the noise", default=0)
    log_every: PositiveInt = key(
        "steps between lines of metrics.jsonl; the terminal shows at most one in 5 s", default=10
    )
    eval_every: NonNegativeInt = key("steps between evaluations; 0: only at the end", default=500)
    eval_conversations: NonNegativeInt = key("held-out rows of an evaluation", default=64)
    eval_depths: PositiveInt = key("drafted tokens per start slot for the predicted tau", default=5)
    save_every: PositiveInt = key("steps between saves, to go on from", default=500)
    keep_last: PositiveInt = key(
        "how many saves stay; with 2, a broken newest one costs save_every steps", default=2
    )
    trackers: Many[Tracker] = key(
        "tensorboard, wandb, trackio or another of accelerate's", default=()
    )

    def __post_init__(self) -> None:
        weights = {key: value for key, value in vars(self).items() if key.endswith("_weight")}
        if weights and not any(weights.values()):
            raise ValueError(f"{' and '.join(weights)} are zero: nothing would be learnt")


class DraftHeadTrain(TrainConfig, kw_only=True):
    """How heads that read the target's features are trained."""

    loss: LossName = key(
        "the loss between the target's and the draft's distribution", default="soft_cross_entropy"
    )
    measure_prompts: NonNegativeInt = key(
        "held-out prompts decoded at each evaluation: their tau picks the best weights", default=0
    )
    measure_new_tokens: PositiveInt = key("new tokens of each such prompt", default=64)


class Eagle1Train(DraftHeadTrain, kw_only=True):
    """EAGLE (arXiv 2401.15077), section 4.1."""

    kind: Literal["eagle1"] = "eagle1"
    feature_weight: NonNegativeFloat = key(
        "weight of the Smooth-L1 between drafted and true feature", default=1.0
    )
    classification_weight: NonNegativeFloat = key(
        "weight of the loss between the distributions", default=0.1
    )
    feature_noise: NonNegativeFloat = key(
        "half-width of the uniform noise on input features; 0 switches it off", default=0.1
    )


class Eagle3Train(DraftHeadTrain, kw_only=True):
    """The training-time test (EAGLE-3, arXiv 2503.01840)."""

    kind: Literal["eagle3"] = "eagle3"
    unroll_steps: PositiveInt = key("length of the training-time test", default=7)
    unroll_decay: Decay = key("step k weighs unroll_decay ** k", default=0.8)
    mask_outside_vocabulary: bool = key(
        "no loss where the target's choice cannot be drafted", default=True
    )
    packing: bool = key("conversations of a batch in one row, without padding", default=False)


class MultiTokenTrain(DraftHeadTrain, kw_only=True):
    """Medusa (arXiv 2401.10774) and Hydra (arXiv 2402.05109)."""

    kind: Literal["medusa", "hydra"]
    label_weight: NonNegativeFloat = key(
        "weight of the cross-entropy to the conversation's own tokens", default=1.0
    )
    law_weight: NonNegativeFloat = key(
        "weight of the loss to the target's distribution (Hydra++: 1, with label_weight 0)",
        default=0.0,
    )
    head_decay: Decay = key(
        "head k = 1, 2, ... weighs head_decay ** k (Medusa, eq. 1; Hydra: 1)", default=0.8
    )
    dropout: Annotated[float, Field(ge=0, lt=1)] = key(
        "dropout of each block's inputs (Hydra++: 0.2)", default=0.0
    )


class BlockTrain(DraftHeadTrain, kw_only=True):
    """DFlash (arXiv 2602.06036) as in speculators 0.9, trained on the target's law."""

    kind: Literal["block"] = "block"
    anchors: PositiveInt = key(
        "blocks per conversation, at places drawn anew in each step", default=512
    )
    place_decay: Decay = key(
        "place k = 1, 2, ... weighs place_decay ** (k - 1); DFlash: exp(-1 / 4)", default=0.7788
    )
    label_weight: NonNegativeFloat = key(
        "weight of the cross-entropy to the conversation's own tokens (DFlash's loss)", default=0.0
    )
    law_weight: NonNegativeFloat = key(
        "weight of the loss to the target's distribution", default=1.0
    )


class DraftLMTrain(TrainConfig, kw_only=True):
    """A small LM, trained on tokens alone, or with `distill` on a target's laws too."""

    kind: Literal["draft_lm"] = "draft_lm"
    distill: LossName | None = key(
        "a loss to the target's distribution beside cross-entropy on the tokens; null: none",
        default=None,
    )
    distill_weight: PositiveFloat = key("weight of that loss", default=1.0)
    token_weight: NonNegativeFloat = key(
        "weight of the cross-entropy, where `distill` is set", default=1.0
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.distill is None and (self.distill_weight, self.token_weight) != (1.0, 1.0):
            raise ValueError(
                "distill_weight and token_weight weigh nothing without distill; set it"
            )


Train = Annotated[
    Eagle1Train | Eagle3Train | MultiTokenTrain | BlockTrain | DraftLMTrain,
    Field(discriminator="kind"),
]
