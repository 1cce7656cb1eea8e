"""The section `train` of a recipe."""

from dataclasses import dataclass
from typing import Literal

from model.recipe import STRICT


@dataclass(frozen=True)
class TrainConfig:
    """Optimisation. Defaults are those of the EAGLE papers' code unless the comment says otherwise."""

    __pydantic_config__ = STRICT
    epochs: int = 20
    max_steps: int | None = None  # optimiser steps; null: epochs decide
    max_seconds: float | None = None  # this stage's budget: stops at the next step, saves, and says so
    batch_size: int = 4  # conversations per process and forward
    accumulation: int = 1
    learning_rate: float = 3e-5
    warmup_steps: int = 2000
    schedule: Literal["linear", "cosine", "constant"] = "linear"  # after the warm-up, to zero at the last step
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.01
    clip_norm: float = 0.5  # by norm; the published accelerate script clips by value
    feature_weight: float = 1.0  # Smooth-L1 between drafted and true feature (EAGLE-1, section 4.1)
    classification_weight: float = 0.1  # cross-entropy between the target's and the draft's law
    feature_noise: float = 0.1  # half-width of the uniform noise on input features; 0 switches it off
    noise_length_scaling: bool = False  # published code: noise times 512 / length
    loss_chunk_slots: int = 4096  # slots whose full-vocabulary laws are held at once
    gradient_checkpointing: bool = False
    seed: int = 0
    log_every: int = 10
    eval_every: int = 500  # steps; 0: only at the end
    eval_conversations: int = 64
    eval_depths: int = 5  # drafted tokens per start slot of the predicted tau
    save_every: int = 500
    trackers: tuple[str, ...] = ()  # accelerate's: tensorboard, wandb, trackio
    profile_steps: tuple[int, int] | None = None  # (first step, how many): a torch.profiler trace

    def __post_init__(self) -> None:
        if min(self.epochs, self.batch_size, self.accumulation, self.loss_chunk_slots, self.log_every) < 1:
            raise ValueError("epochs, batch_size, accumulation, loss_chunk_slots and log_every must be at least 1")
        if self.learning_rate <= 0 or self.clip_norm <= 0:
            raise ValueError("learning_rate and clip_norm must be positive")
        if self.eval_depths < 1:
            raise ValueError("eval_depths must be at least 1")
