"""What every layout reads into and writes from: a head's configuration and its tensors, by this project's names."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from model.errors import UserError
from model.heads.eagle1 import Eagle1Config
from model.heads.eagle3 import Eagle3Config
from model.heads.hydra import HydraConfig
from model.heads.medusa import MedusaConfig

EagleConfig = Eagle1Config | Eagle3Config
AnyConfig = EagleConfig | MedusaConfig | HydraConfig
SPECULATIVE_TOKENS = 5  # a server's drafts per cycle where nobody says (speculators' own default for EAGLE-3)
KINDS: dict[type[AnyConfig], str] = {
    Eagle1Config: "eagle1",
    Eagle3Config: "eagle3",
    MedusaConfig: "medusa",
    HydraConfig: "hydra",
}


@dataclass(frozen=True)
class HeadFiles:
    """A head's directory as read: config.json and every tensor of the weights."""

    config_place: Path
    values: dict[str, Any]
    weights_place: Path
    tensors: dict[str, Tensor]
    after_blocks: tuple[int, ...] | None = None  # the taps to take where the files name none

    @property
    def architecture(self) -> str:
        """The first of config.json's architectures, or ''."""
        found = self.values.get("architectures")
        return str(found[0]) if isinstance(found, list) and found else ""


@dataclass(frozen=True)
class HeadContent:
    """A head as the project knows it; tensors still lack what a file may leave out (embedding, equal vocabularies)."""

    config: AnyConfig
    tensors: dict[str, Tensor]
    guesses: tuple[str, ...] = ()  # what the files leave open and what was taken, a sentence each
    is_embedding_optional: bool = False  # a file without one means the target's
    speculative_tokens: int | None = None  # a server's drafts per cycle, where the files say

    @property
    def kind(self) -> str:
        return KINDS[type(self.config)]

    @property
    def eagle(self) -> EagleConfig:
        """The configuration of an EAGLE head, the only kind that servers' layouts carry; UserError for another."""
        if isinstance(self.config, MedusaConfig | HydraConfig):
            raise UserError(f"--to: servers' layouts carry EAGLE heads, and this is a {self.kind} head")
        return self.config


@dataclass(frozen=True)
class Destination:
    """What a written head has to know of its target and of its server."""

    target: str  # what servers are told to load
    architectures: tuple[str, ...]
    num_blocks: int
    max_position_embeddings: int
    speculative_tokens: int | None = None  # a server's drafts per cycle (default: the head's own)


@dataclass(frozen=True)
class Export:
    """The files of one layout: config.json, the tensors, and what a reader of it would have to be told."""

    values: dict[str, Any]
    tensors: dict[str, Tensor]
    pickled: bool = False
    notes: tuple[str, ...] = ()


def refuse(layout: str, what: str, instead: str) -> UserError:
    """The error for a head that a layout's readers would silently misread."""
    return UserError(f"--to {layout}: cannot carry {what}; {instead}")
