"""The sections `target`, `head` and `train` of a recipe. `head` and `train` have a class for each
kind of head."""

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
    """The frozen causal LM that aerie speeds up."""

    path: Place = key("a local directory or a Hub id")
    revision: str | None = key("a branch, tag or commit on the Hub; null means main", default=None)
    dtype: DType = key(
        "the target's dtype; `auto` takes the one in which the checkpoint was saved", default="auto"
    )
    device_map: str | None = key(
        '"auto" spreads the target over all visible GPUs; null loads it on one device', default=None
    )
    cycle: Literal["auto", "eager", "captured", "compiled"] = key(
        "how a decoding cycle runs. `captured` replays CUDA graphs, which take seconds to "
        "record. `compiled` uses torch.compile, which takes minutes and then runs faster. "
        "`auto` is `captured` on a GPU and `eager` elsewhere",
        default="auto",
    )
    trust_remote_code: bool = key(
        "whether to run the Python files that come with the checkpoint", default=False
    )
    chat_template: Place | None = key(
        "a .jinja file, for a target whose tokenizer has no template; data.template_arguments "
        "sets its arguments",
        default=None,
    )
    generation: dict[str, Any] = key(
        "settings that replace those of the model's generation_config; null unsets one. On the "
        "command line: --generation.KEY VALUE",
        default_factory=dict,
    )


class HeadSection(Section, kw_only=True):
    """Keys of every kind of head."""

    methods: ClassVar[tuple[str, ...]]  # which decode with this head; the usual one is first
    reads_taps: ClassVar[bool] = False  # whether it reads the target's taps; else last_hidden
    init_from: Place | None = key(
        "the head from which training starts: a directory or Hub id, in any published layout",
        default=None,
    )
    max_position_embeddings: PositiveInt | None = key(
        "the longest text in tokens; null takes the target's, or data.max_length plus a draft if "
        "that is longer",
        default=None,
    )

    @staticmethod
    def levels_of(values: dict[str, Any]) -> int | None:
        """The most levels that a head with these values of its config.json can draft; None if there
        is no limit."""
        return None


class _LayerSizes(Section, kw_only=True):
    """Sizes of the head's decoder layers. null takes the target's."""

    intermediate_size: PositiveInt | None = key("width of the MLP", default=None)
    num_attention_heads: PositiveInt | None = key("number of query heads", default=None)
    num_key_value_heads: PositiveInt | None = key(
        "number of key and value heads; with fewer than query heads, attention is grouped-query",
        default=None,
    )
    head_dim: Annotated[int, Field(gt=0, multiple_of=2)] | None = key(
        "width of an attention head; it is even because RoPE rotates pairs of entries", default=None
    )
    rope_theta: PositiveFloat | None = key(
        "base of the head's RoPE; null takes the target's base and scaling", default=None
    )


class Eagle1Section(_LayerSizes, HeadSection, kw_only=True):
    """The head of EAGLE-1 and EAGLE-2, as wide as the target."""

    methods = ("eagle2", *EAGLE)
    kind: Literal["eagle1"] = "eagle1"
    num_hidden_layers: PositiveInt = key(
        "number of decoder layers; the papers' heads have one", default=1
    )
    bias: bool = key(
        "whether fc has a bias, as in published Vicuna and LLaMA-2 heads; vLLM ignores it",
        default=False,
    )


class _TapHead(_LayerSizes, HeadSection, kw_only=True):
    """A head that reads the target's taps."""

    reads_taps = True
    norm_init: Literal["ones", "target"] = key(
        "where the final norm starts; `target` copies the target's final norm", default="ones"
    )
    fc_init: Literal["random", "highest_tap"] = key(
        "where fc starts; with `highest_tap` it first passes on the last tap only", default="random"
    )

    def __post_init__(self) -> None:
        starts = (self.norm_init, self.fc_init, getattr(self, "lm_head_init", "random"))
        if self.init_from is not None and starts != ("ones", "random", "random"):
            raise ValueError(
                "init_from gives the head its weights, so it cannot start from others; "
                "set norm_init: ones, fc_init: random and lm_head_init: random"
            )


class Eagle3Section(_TapHead, kw_only=True):
    """EAGLE-3's head, with an LM head over a draft vocabulary."""

    methods = ("eagle3", *EAGLE)
    kind: Literal["eagle3"] = "eagle3"
    num_hidden_layers: PositiveInt = key(
        "number of decoder layers; the paper's head has one", default=1
    )
    hidden_size: PositiveInt | None = key(
        "width of the head; null takes the target's", default=None
    )
    draft_vocab_size: PositiveInt | None = key(
        "number of tokens that the head can draft; null means 32,000, or all if the target has "
        "fewer",
        default=None,
    )
    qk_norm: bool | None = key(
        "whether queries and keys pass an RMSNorm, which SGLang does not load; null does as the "
        "target does",
        default=False,
    )
    fc_norm: bool | None = key(
        "whether each tap passes a norm of its own before fc (EAGLE-3.1); null means false, or "
        "as in init_from",
        default=None,
    )
    norm_output: bool | None = key(
        "whether the head feeds back its output after the final norm (EAGLE-3.1); null means "
        "false, or as in init_from",
        default=None,
    )
    norm_before_residual: bool | None = key(
        "whether the first layer's residual is the feature after its norm, which only vLLM "
        "loads; null means false, or as in init_from",
        default=None,
    )
    norm_before_fc: bool | None = key(
        "whether one norm over all taps comes before fc, which only vLLM loads; null means "
        "false, or as in init_from",
        default=None,
    )
    lm_head: Literal["trained", "frozen"] = key(
        "`frozen` keeps the LM head's rows as they start: the target's, or those of init_from",
        default="trained",
    )
    lm_head_init: Literal["random", "target"] = key(
        "where the LM head starts; `target` copies the target's rows", default="random"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.fc_norm and self.norm_before_fc:
            raise ValueError(
                "fc_norm and norm_before_fc normalise the same features, and no server does both; "
                "set one of them to false"
            )


class _MultiToken(HeadSection, kw_only=True):
    """Medusa and Hydra: each head drafts one future token."""

    num_heads: PositiveInt = key(
        "number of heads, one per future token; the default is the papers' number", default=4
    )
    num_layers: PositiveInt = key("number of residual blocks in each head", default=1)
    lm_head: Literal["own", "target"] = key(
        "`own` gives each head an LM head; `target` makes all use the target's frozen one",
        default="own",
    )

    @staticmethod
    def levels_of(values: dict[str, Any]) -> int | None:
        return values.get("num_heads")  # published layouts may lack it


class MedusaSection(_MultiToken, kw_only=True):
    """Medusa heads."""

    methods = ("medusa",)
    kind: Literal["medusa"] = "medusa"


class HydraSection(_LayerSizes, _MultiToken, kw_only=True):
    """Hydra heads. Sizes such as intermediate_size are those of the prefix layer."""

    methods = ("hydra",)
    kind: Literal["hydra"] = "hydra"
    prefix_layer: bool = key(
        "whether a decoder layer over last_hidden comes before the heads (Hydra++, with "
        "num_layers 4)",
        default=False,
    )
    initializer_range: PositiveFloat = key(
        "standard deviation of the prefix layer's initial weights", default=0.02
    )

    def __post_init__(self) -> None:
        sizes = [key for key in _LayerSizes.__dataclass_fields__ if getattr(self, key) is not None]
        if sizes and not self.prefix_layer:
            raise ValueError(
                f"{sizes[0]} is the prefix layer's, which is off; "
                f"set prefix_layer: true, or leave {sizes[0]} out"
            )


class DraftLMSection(_LayerSizes, HeadSection, kw_only=True):
    """A small language model that drafts with the target's tokenizer."""

    methods = ("sps", "sps-heuristic", "sps-svip", "sps-confidence")
    kind: Literal["draft_lm"] = "draft_lm"
    num_hidden_layers: PositiveInt = key("number of decoder layers", default=1)
    hidden_size: PositiveInt | None = key(
        "width of the model; required without init_from", default=None
    )
    initializer_range: PositiveFloat = key(
        "standard deviation of the initial weights", default=0.02
    )

    def __post_init__(self) -> None:
        needed = "hidden_size intermediate_size num_attention_heads max_position_embeddings"
        missing = [name for name in needed.split() if getattr(self, name) is None]
        if missing and self.init_from is None:
            raise ValueError(
                f"a draft_lm trained from scratch needs {', '.join(missing)}; "
                "set them, or set init_from"
            )


class BlockSection(_TapHead, kw_only=True):
    """A block head (DFlash, arXiv 2602.06036), as wide as the target. One forward pass drafts all
    levels."""

    methods = ("block-tree", "block-chain")
    kind: Literal["block"] = "block"
    num_hidden_layers: PositiveInt = key(
        "number of decoder layers; published heads for 8B targets have 5", default=1
    )
    block_size: Annotated[int, Field(ge=2)] = key(
        "rows of a block: the last known token, then mask tokens (z-lab: 16)", default=8
    )
    in_block: Literal["bidirectional", "causal"] = key(
        "whether a row attends to its whole block, or only to itself and the rows before it "
        "(JetSpec: causal)",
        default="bidirectional",
    )
    anchor_feature: bool = key(
        "whether each row adds the fused taps of the token before the block", default=False
    )
    sample_from_anchor: bool = key(
        "whether the known token's row drafts too, so that a block drafts block_size tokens "
        "(DSpark)",
        default=False,
    )
    mask_token_id: NonNegativeInt | None = key(
        "id of the mask token; null takes a row of the target's embedding that no text uses",
        default=None,
    )
    markov_rank: NonNegativeInt = key(
        "rank of the matrices with which previous tokens correct the logits; 0 means no "
        "correction (DSpark, 8B: 256)",
        default=64,
    )
    markov_order: PositiveInt = key(
        "number of previous tokens that correct the logits; servers load only DSpark's, which is 1",
        default=1,
    )
    markov_head: Literal["vanilla", "gated"] = key(
        "`gated` lets the row's state weigh the correction", default="vanilla"
    )

    @staticmethod
    def levels_of(values: dict[str, Any]) -> int | None:
        size = values.get("block_size")  # of any type: config.json is not checked yet
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
    """AdamW trains all parameters."""

    kind: Literal["adamw"] = "adamw"


class MuonSection(Section, kw_only=True):
    """Muon with Nesterov momentum (arXiv 2502.16982) trains the matrices of layers and fc; AdamW
    trains the rest."""

    kind: Literal["muon"] = "muon"
    matrix_rate: PositiveFloat = key(
        "Muon's learning rate; it follows the schedule of train.learning_rate", default=0.02
    )
    momentum: Annotated[float, Field(ge=0, lt=1)] = key("weight of earlier gradients", default=0.95)
    weight_decay: NonNegativeFloat = key(
        "weight decay of Muon's matrices (the paper's); train.weight_decay is AdamW's", default=0.1
    )


class RateScaling(Section, kw_only=True):
    """Multiplies each rate by (steps / steps of this run) ** power."""

    steps: PositiveInt = key("number of optimiser steps for which the given rates were chosen")
    power: Annotated[float, Field(gt=0, le=1)] = key(
        "how fast the rates fall as the number of steps grows", default=0.25
    )


class TrainConfig(Section, kw_only=True):
    """Training of any head. Defaults are those of EAGLE's code unless noted."""

    kind: str = key("the kind of head, from head.kind")
    epochs: PositiveInt = key(
        "passes over the training conversations; EAGLE's README advises 20 to 40", default=20
    )
    max_steps: PositiveInt | None = key(
        "the most optimiser steps; null means that epochs decide", default=None
    )
    max_seconds: NonNegativeFloat | None = key(
        "the training's time budget in seconds; when it is spent, training ends after the "
        "current step and saves",
        default=None,
    )
    batch_size: PositiveInt = key("conversations per process and forward pass", default=4)
    accumulation: PositiveInt = key("batches per optimiser step", default=1)
    learning_rate: PositiveFloat = key(
        "AdamW's rate at the end of the warm-up (EAGLE's DeepSpeed script: 5e-5)", default=3e-5
    )
    warmup_steps: NonNegativeInt = key(
        "optimiser steps in which the rate rises from zero", default=2000
    )
    schedule: Literal["linear", "cosine", "constant"] = key(
        "how the rate falls to final_rate after the warm-up; `constant` keeps it", default="linear"
    )
    final_rate: Share = key(
        "the share of the rate that is left when `linear` and `cosine` end", default=0.0
    )
    scale_rates: RateScaling | None = key(
        "scales the rates of AdamW and Muon to the number of steps; null leaves them as given",
        default=None,
    )
    optimizer: Annotated[AdamWSection | MuonSection, Discriminator("kind")] = key(
        "AdamW for all parameters, or Muon for the matrices and AdamW for the rest",
        default=AdamWSection(),
    )
    betas: tuple[Beta, Beta] = key("AdamW's decay rates of its two moments", default=(0.9, 0.95))
    weight_decay: NonNegativeFloat = key(
        "AdamW's weight decay (EAGLE's DeepSpeed script: 0)", default=0.01
    )
    clip_norm: PositiveFloat = key(
        "the norm to which the gradient is clipped (EAGLE's accelerate script clips each value)",
        default=0.5,
    )
    lk_eta: NonNegativeFloat = key(
        "eta of the loss lk_hybrid, whose lambda is exp(-eta alpha) (arXiv 2602.23881)", default=3.0
    )
    jsd_beta: Annotated[float, Field(gt=0, lt=1)] = key(
        "the target's weight in the mixture of the loss jsd (arXiv 2310.08461)", default=0.5
    )
    loss_chunk_slots: PositiveInt | None = key(
        "slots whose distributions are in memory at once; null takes as many as fit into 1 GiB "
        "(GPU: 4 GiB)",
        default=None,
    )
    gradient_checkpointing: bool = key(
        "whether the backward pass recomputes the layers, which saves memory and takes time",
        default=False,
    )
    seed: Seed = key("decides the initial weights, the order of the rows and the noise", default=0)
    log_every: PositiveInt = key(
        "steps between lines of metrics.jsonl; the terminal shows at most one line in 5 s",
        default=10,
    )
    eval_every: NonNegativeInt = key(
        "steps between evaluations; 0 evaluates only at the end", default=500
    )
    eval_conversations: NonNegativeInt = key(
        "number of held-out conversations that an evaluation reads", default=64
    )
    eval_depths: PositiveInt = key(
        "number of tokens that an evaluation drafts from each slot to predict tau", default=5
    )
    save_every: PositiveInt = key(
        "steps between saves, from which a stopped training goes on", default=500
    )
    keep_last: PositiveInt = key(
        "number of saves to keep; with 2, a broken newest save costs save_every steps", default=2
    )
    trackers: Many[Tracker] = key(
        "accelerate's trackers to which the metrics go, such as tensorboard, wandb or trackio",
        default=(),
    )

    def __post_init__(self) -> None:
        weights = {key: value for key, value in vars(self).items() if key.endswith("_weight")}
        if weights and not any(weights.values()):
            raise ValueError(
                f"{' and '.join(weights)} are zero: nothing would be learnt; raise one"
            )


class DraftHeadTrain(TrainConfig, kw_only=True):
    """Training of heads that read the target's features."""

    loss: LossName = key(
        "the loss between the target's and the draft's distribution", default="soft_cross_entropy"
    )
    measure_prompts: NonNegativeInt = key(
        "number of held-out prompts that each evaluation decodes; their tau chooses the best "
        "weights",
        default=0,
    )
    measure_new_tokens: PositiveInt = key("new tokens for each of these prompts", default=64)


class Eagle1Train(DraftHeadTrain, kw_only=True):
    """Training of EAGLE-1 heads (arXiv 2401.15077, section 4.1)."""

    kind: Literal["eagle1"] = "eagle1"
    feature_weight: NonNegativeFloat = key(
        "weight of the Smooth-L1 loss between the drafted and the true feature", default=1.0
    )
    classification_weight: NonNegativeFloat = key(
        "weight of the loss between the two distributions", default=0.1
    )
    feature_noise: NonNegativeFloat = key(
        "half-width of the uniform noise on input features; 0 switches it off", default=0.1
    )


class Eagle3Train(DraftHeadTrain, kw_only=True):
    """Training of EAGLE-3 heads: the training-time test (arXiv 2503.01840)."""

    kind: Literal["eagle3"] = "eagle3"
    unroll_steps: PositiveInt = key("number of steps of the training-time test", default=7)
    unroll_decay: Decay = key(
        "the loss of step k = 0, 1, ... weighs unroll_decay ** k", default=0.8
    )
    mask_outside_vocabulary: bool = key(
        "whether to skip slots where the head cannot draft the target's most likely token",
        default=True,
    )
    packing: bool = key(
        "whether to put the conversations of a batch into one row, without padding", default=False
    )


class MultiTokenTrain(DraftHeadTrain, kw_only=True):
    """Training of Medusa (arXiv 2401.10774) and Hydra heads (arXiv 2402.05109)."""

    kind: Literal["medusa", "hydra"]
    label_weight: NonNegativeFloat = key(
        "weight of the cross-entropy to the conversation's own tokens", default=1.0
    )
    law_weight: NonNegativeFloat = key(
        "weight of the loss to the target's distribution (Hydra++: 1, with label_weight 0)",
        default=0.0,
    )
    head_decay: Decay = key(
        "the loss of head k = 1, 2, ... weighs head_decay ** k (Medusa, eq. 1; Hydra: 1)",
        default=0.8,
    )
    dropout: Annotated[float, Field(ge=0, lt=1)] = key(
        "dropout rate of each block's input (Hydra++: 0.2)", default=0.0
    )


class BlockTrain(DraftHeadTrain, kw_only=True):
    """Training of block heads: DFlash (arXiv 2602.06036) as in speculators 0.9, but on the target's
    distributions."""

    kind: Literal["block"] = "block"
    anchors: PositiveInt = key(
        "the most blocks per conversation; each step draws their positions", default=512
    )
    place_decay: Decay = key(
        "the loss of position k = 1, 2, ... weighs place_decay ** (k - 1); DFlash: exp(-1 / 4)",
        default=0.7788,
    )
    label_weight: NonNegativeFloat = key(
        "weight of the cross-entropy to the conversation's own tokens (DFlash's loss)", default=0.0
    )
    law_weight: NonNegativeFloat = key(
        "weight of the loss to the target's distribution", default=1.0
    )


class DraftLMTrain(TrainConfig, kw_only=True):
    """Training of a small LM: on tokens alone or, with `distill`, on a target's distributions
    too."""

    kind: Literal["draft_lm"] = "draft_lm"
    distill: LossName | None = key(
        "the loss to the target's distribution, beside cross-entropy on the tokens; null means "
        "none",
        default=None,
    )
    distill_weight: PositiveFloat = key("weight of that loss", default=1.0)
    token_weight: NonNegativeFloat = key(
        "weight of the cross-entropy if `distill` is set", default=1.0
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.distill is None and (self.distill_weight, self.token_weight) != (1.0, 1.0):
            raise ValueError(
                "distill_weight and token_weight weigh nothing without distill; "
                "set distill, or leave the weights out"
            )


Train = Annotated[
    Eagle1Train | Eagle3Train | MultiTokenTrain | BlockTrain | DraftLMTrain,
    Field(discriminator="kind"),
]
