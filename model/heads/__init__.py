"""The draft heads, by kind."""

from collections.abc import Callable
from typing import Any, NamedTuple

from aerie.model.heads.block import BlockConfig, BlockHead
from aerie.model.heads.eagle import Eagle1Config, Eagle1Head, Eagle3Config, Eagle3Head
from aerie.model.heads.multi_token import HydraConfig, HydraHead, MedusaConfig, MedusaHead

Head = Eagle1Head | Eagle3Head | MedusaHead | HydraHead | BlockHead
AnyConfig = Eagle1Config | Eagle3Config | MedusaConfig | HydraConfig | BlockConfig


class Kind(NamedTuple):
    config: type[AnyConfig]  # of config.json's values
    module: Callable[[Any], Head]  # makes a head of a config
    architecture: str  # as config.json declares it


HEADS = {
    "eagle1": Kind(Eagle1Config, Eagle1Head, "LlamaForCausalLMEagle"),
    "eagle3": Kind(Eagle3Config, Eagle3Head, "LlamaForCausalLMEagle3"),
    "medusa": Kind(MedusaConfig, MedusaHead, "MedusaModel"),
    "hydra": Kind(HydraConfig, HydraHead, "HydraModel"),
    "block": Kind(BlockConfig, BlockHead, "DSparkDraftModel"),
}
