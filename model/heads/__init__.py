"""The draft heads, by kind. What trains, drafts with or exports a kind has registries of its own."""

from typing import NamedTuple

from aerie.model.heads.eagle import Eagle1Config, Eagle1Head, Eagle3Config, Eagle3Head
from aerie.model.heads.multi_token import HydraConfig, HydraHead, MedusaConfig, MedusaHead

Head = Eagle1Head | Eagle3Head | MedusaHead | HydraHead
AnyConfig = Eagle1Config | Eagle3Config | MedusaConfig | HydraConfig


class Kind(NamedTuple):
    """A kind of head: the class of its config.json and that of its module."""

    config: type[AnyConfig]
    module: type[Head]


HEADS = {
    "eagle1": Kind(Eagle1Config, Eagle1Head),
    "eagle3": Kind(Eagle3Config, Eagle3Head),
    "medusa": Kind(MedusaConfig, MedusaHead),
    "hydra": Kind(HydraConfig, HydraHead),
}
