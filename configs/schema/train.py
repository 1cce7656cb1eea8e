"""The section `train` of a recipe."""

from dataclasses import dataclass, fields
from typing import Literal

from aerie.configs.errors import UserError
from aerie.configs.read import STRICT
from aerie.configs.schema.target_and_head import MULTI_TOKEN

LossName = Literal[
    "soft_cross_entropy", "kl", "reverse_kl", "jsd", "total_variation", "negative_log_alpha", "lk_hybrid"
]
EAGLE1, EAGLE3, MULTI = ("eagle1",), ("eagle3",), MULTI_TOKEN
KINDS = {  # of heads whose training reads a key; a key that is not here is read by all, or refused where it is used
    **dict.fromkeys(("feature_weight", "classification_weight", "feature_noise", "noise_length_scaling"), EAGLE1),
    **dict.fromkeys(("unroll_steps", "unroll_decay", "divisor", "mask_outside_vocabulary"), EAGLE3),
    **dict.fromkeys(("label_weight", "law_weight", "head_decay", "dropout"), MULTI),
    **dict.fromkeys(("distill", "distill_weight", "token_weight", "on_policy", "on_policy_tokens"), ("draft_lm",)),
    "loss": (*EAGLE1, *EAGLE3, *MULTI),
}


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
    final_rate: float = 0.0  # share of the learning rate that linear and cosine end at, instead of zero
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.01
    clip_norm: float = 0.5  # by norm; the published accelerate script clips by value
    loss: LossName = "soft_cross_entropy"  # between the target's and the draft's law, for every draft head
    lk_eta: float = 3.0  # lk_hybrid: lambda = exp(-eta alpha) (LK losses, arXiv 2602.23881)
    feature_weight: float = 1.0  # EAGLE-1: Smooth-L1 between drafted and true feature (section 4.1)
    classification_weight: float = 0.1  # EAGLE-1: of the loss between the laws
    feature_noise: float = 0.1  # EAGLE-1: half-width of the uniform noise on input features; 0 switches it off
    noise_length_scaling: bool = False  # EAGLE-1: published code, noise times 512 / length
    distill: LossName | None = None  # draft_lm: this loss to the target's laws, beside cross-entropy on its tokens
    distill_weight: float = 1.0  # draft_lm: of that loss
    token_weight: float = 1.0  # draft_lm: of the cross-entropy, where `distill` is set
    jsd_beta: float = 0.5  # jsd: weight of the target's law in the mixture (DistillSpec, arXiv 2310.08461)
    on_policy: float = 0.0  # draft_lm: share of rows in which it writes tokens itself, to learn the target's laws there
    on_policy_tokens: int = 128  # draft_lm: so many of them, from a random place of an answer on
    unroll_steps: int = 7  # EAGLE-3: length of the training-time test
    unroll_decay: float = 0.8  # EAGLE-3: step k weighs unroll_decay ** k
    divisor: Literal["shared", "per_step"] = "shared"  # EAGLE-3: slots of the first step for all, or each step's own
    mask_outside_vocabulary: bool = True  # EAGLE-3: no loss where the target's choice cannot be drafted
    label_weight: float = 1.0  # Medusa, Hydra: of the cross-entropy to the conversation's own tokens
    law_weight: float = 0.0  # Medusa, Hydra: of the loss to the target's law (Hydra++: 1, with label_weight 0)
    head_decay: float = 0.8  # Medusa, Hydra: head k = 1, 2, ... weighs head_decay ** k (Medusa, eq. 1; Hydra: 1)
    dropout: float = 0.0  # Medusa, Hydra: share of each block's inputs that training puts to zero (Hydra++: 0.2)
    packing: bool = False  # EAGLE-3: conversations of a batch in one row, without padding
    loss_chunk_slots: int = 4096  # slots whose laws are held at once
    gradient_checkpointing: bool = False
    seed: int = 0
    log_every: int = 10
    eval_every: int = 500  # steps; 0: only at the end
    eval_conversations: int = 64
    eval_depths: int = 5  # drafted tokens per start slot of the predicted tau
    measure_prompts: int = 0  # held-out prompts decoded at each evaluation: the best weights are then by measured tau
    measure_new_tokens: int = 64  # of each of them
    save_every: int = 500
    keep_last: int = 2  # saves to go on from; with 2, a broken newest one costs the steps since the one before
    keep_best: int = 1  # best-measured weights; further ones than the output stay in RUN/state/KIND/best
    trackers: tuple[str, ...] = ()  # accelerate's: tensorboard, wandb, trackio
    profile_steps: tuple[int, int] | None = None  # (first step, how many): a torch.profiler trace

    def __post_init__(self) -> None:
        if min(self.epochs, self.batch_size, self.accumulation, self.loss_chunk_slots, self.log_every) < 1:
            raise ValueError("epochs, batch_size, accumulation, loss_chunk_slots and log_every must be at least 1")
        if min(self.save_every, self.keep_last, self.keep_best) < 1:
            raise ValueError("save_every, keep_last and keep_best must be at least 1")
        if self.learning_rate <= 0 or self.clip_norm <= 0:
            raise ValueError("learning_rate and clip_norm must be positive")
        if min(self.eval_depths, self.unroll_steps, self.measure_new_tokens) < 1 or self.measure_prompts < 0:
            raise ValueError("eval_depths, unroll_steps and measure_new_tokens must be at least 1, measure_prompts 0")
        if not 0.0 < self.unroll_decay <= 1.0 or self.lk_eta < 0.0:
            raise ValueError("unroll_decay is in (0, 1] and lk_eta is not negative")
        if not 0.0 < self.jsd_beta < 1.0 or not 0.0 <= self.on_policy <= 1.0 or self.on_policy_tokens < 1:
            raise ValueError("jsd_beta is in (0, 1), on_policy in [0, 1] and on_policy_tokens at least 1")
        if self.distill_weight <= 0.0 or self.token_weight < 0.0:
            raise ValueError("distill_weight is positive and token_weight is not negative (distill: null is without)")
        if not 0.0 < self.head_decay <= 1.0 or not 0.0 <= self.dropout < 1.0 or not 0.0 <= self.final_rate <= 1.0:
            raise ValueError("head_decay is in (0, 1], dropout in [0, 1) and final_rate in [0, 1]")
        if min(self.label_weight, self.law_weight) < 0.0 or self.label_weight + self.law_weight == 0.0:
            raise ValueError("label_weight and law_weight are not negative, and not both zero")


def require_read(config: TrainConfig, kind: str) -> None:
    """UserError for a key, changed from its default, that the training of a head of this kind does not read."""
    plain = TrainConfig()
    changed = [field.name for field in fields(config) if getattr(config, field.name) != getattr(plain, field.name)]
    for name in changed:
        if kind not in KINDS.get(name, (kind,)):
            raise UserError(f"train.{name}: belongs to {' and '.join(KINDS[name])}, this head is {kind}; leave it out")
    losses = (config.loss, config.distill)
    unread = {
        "loss": kind in MULTI_TOKEN and config.law_weight == 0.0 and "train.law_weight, which is 0",
        "distill_weight": config.distill is None and "train.distill, which is not set",
        "token_weight": config.distill is None and "train.distill, which is not set",
        "on_policy": config.distill is None and "train.distill, which is not set",
        "on_policy_tokens": config.on_policy == 0.0 and "train.on_policy, which is 0",
        "jsd_beta": "jsd" not in losses and f"jsd, and train.loss is {config.loss}",
        "lk_eta": "lk_hybrid" not in losses and f"lk_hybrid, and train.loss is {config.loss}",
    }
    for name in changed:
        if unread.get(name):
            raise UserError(f"train.{name}: does nothing without {unread[name]}; set that, or leave it out")
