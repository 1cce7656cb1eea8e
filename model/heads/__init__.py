"""The kinds of draft heads. One record of the table HEADS says all about a kind."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pkgutil import resolve_name
from typing import Any

from aerie.configs.schema import heads as sections
from aerie.model.heads.block import BlockConfig, BlockHead
from aerie.model.heads.eagle import Eagle1Config, Eagle1Head, Eagle3Config, Eagle3Head
from aerie.model.heads.multi_token import (
    HydraConfig,
    HydraHead,
    MedusaConfig,
    MedusaHead,
    hydra_values,
)

Head = Eagle1Head | Eagle3Head | MedusaHead | HydraHead | BlockHead
AnyConfig = Eagle1Config | Eagle3Config | MedusaConfig | HydraConfig | BlockConfig


@dataclass(frozen=True, kw_only=True)
class Kind:
    """Anything that is trained to draft.

    It has only the names of classes for training and decoding, because this package imports
    neither.
    """

    section: Any  # the class of the recipe's section `head`
    objective_name: str  # the class of the training objective: what the head learns from, and costs
    drafter_name: str  # the class that drafts with it
    # (sections `head` and `train`) -> how many positions training reaches beyond a text; None:
    # drafts have no positions
    positions_ahead: Callable[[Any, Any], int] | None = None

    @property
    def objective(self) -> Any:
        return resolve_name(self.objective_name)

    @property
    def drafter(self) -> Any:
        return resolve_name(self.drafter_name)


@dataclass(frozen=True, kw_only=True)
class HeadKind(Kind):
    """A draft head: a module that reads the target's states."""

    title: str  # the kind's name on a card
    config: type[AnyConfig]  # config.json; `config_for` fills it from the recipe and the target
    module: Callable[[Any], Head]  # makes a head from a config
    architecture: str  # config.json's `architectures`
    # (section, values of the recipe and the target) -> config.json's values; None: these values
    adapt: Callable[[Any, dict[str, Any]], dict[str, Any]] | None = None
    sizes: tuple[str, ...]  # keys of config.json that `aerie inspect` shows
    has_draft_vocabulary: bool = False  # it drafts only the target's most frequent tokens
    formats_name: str  # the `Formats` object: how other programs lay the head out
    servers: dict[str, str] = field(default_factory=dict)  # the layout that each server loads
    method: str = ""  # vLLM's name of its method; "": vLLM has none
    # `aerie init` takes the table's last kind for which the target has so many blocks.
    init_blocks: float = math.inf  # never, unless the user names the kind

    @property
    def formats(self) -> Any:
        return resolve_name(self.formats_name)


LAYER_SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
)

_KINDS = (
    HeadKind(
        section=sections.Eagle1Section,
        title="EAGLE-1 / EAGLE-2",
        config=Eagle1Config,
        module=Eagle1Head,
        architecture="LlamaForCausalLMEagle",
        sizes=(*LAYER_SIZES, "num_hidden_layers"),
        objective_name="aerie.train.objectives.Eagle1Objective",
        drafter_name="aerie.infer.decode.drafters.EagleDrafter",
        positions_ahead=lambda head, train: 0,
        formats_name="aerie.model.formats.eagle_layouts.EAGLE1",
        servers={"vLLM": "safeailab", "SGLang": "sglang"},
        method="eagle",
        init_blocks=0,
    ),
    HeadKind(
        section=sections.Eagle3Section,
        title="EAGLE-3",
        config=Eagle3Config,
        module=Eagle3Head,
        architecture="LlamaForCausalLMEagle3",
        sizes=(*LAYER_SIZES, "num_hidden_layers"),
        has_draft_vocabulary=True,
        objective_name="aerie.train.objectives.Eagle3Objective",
        drafter_name="aerie.infer.decode.drafters.EagleDrafter",
        positions_ahead=lambda head, train: int(train.unroll_steps),
        formats_name="aerie.model.formats.eagle_layouts.EAGLE3",
        servers={"vLLM": "speculators", "SGLang": "sglang"},
        method="eagle3",
        init_blocks=7,  # as many as three default taps need
    ),
    HeadKind(
        section=sections.MedusaSection,
        title="Medusa",
        config=MedusaConfig,
        module=MedusaHead,
        architecture="MedusaModel",
        sizes=("hidden_size", "num_heads", "num_layers"),
        objective_name="aerie.train.objectives.MultiTokenObjective",
        drafter_name="aerie.infer.decode.drafters.MedusaDrafter",
        formats_name="aerie.model.formats.multi_token_layouts.MULTI_TOKEN_FORMATS",
        servers={"vLLM": "vllm"},
        method="medusa",
    ),
    HeadKind(
        section=sections.HydraSection,
        title="Hydra",
        config=HydraConfig,
        module=HydraHead,
        architecture="HydraModel",
        adapt=hydra_values,
        sizes=(*LAYER_SIZES, "num_heads", "num_layers"),
        objective_name="aerie.train.objectives.MultiTokenObjective",
        drafter_name="aerie.infer.decode.drafters.HydraDrafter",
        formats_name="aerie.model.formats.multi_token_layouts.MULTI_TOKEN_FORMATS",
    ),
    HeadKind(
        section=sections.BlockSection,
        title="Block (DFlash)",
        config=BlockConfig,
        module=BlockHead,
        architecture="DSparkDraftModel",
        sizes=(*LAYER_SIZES, "num_hidden_layers", "block_size", "markov_rank", "markov_order"),
        objective_name="aerie.train.block_objective.BlockObjective",
        drafter_name="aerie.infer.decode.drafters.BlockDrafter",
        positions_ahead=lambda head, train: int(head.block_size),
        formats_name="aerie.model.formats.block_layouts.BLOCK",
        servers={"vLLM": "speculators", "SGLang": "sglang"},
        method="dflash",  # with a path correction, dspark
    ),
)
HEADS = {kind.section.kind: kind for kind in _KINDS}
DRAFT_LM = Kind(
    section=sections.DraftLMSection,
    objective_name="aerie.train.lm.LMObjective",
    drafter_name="aerie.infer.decode.drafters.DraftLMDrafter",
)
DRAFT_MODELS: dict[str, Kind] = {**HEADS, DRAFT_LM.section.kind: DRAFT_LM}
