"""The optimiser and the learning rate of each step."""

import math

import torch
from torch import nn

from train.config import TrainConfig


def build_optimizer(module: nn.Module, config: TrainConfig) -> torch.optim.AdamW:
    """AdamW over what is trained; weight decay on matrices alone (not on biases and norms)."""
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]], lr=config.learning_rate, betas=config.betas
    )


def learning_rate(step: int, total_steps: int, config: TrainConfig) -> float:
    """The rate of optimiser step 0, 1, ...: linear warm-up, then the schedule, which would end at total_steps.

    Its end is final_rate (zero) times the recipe's rate. A pure function: no scheduler object, which accelerate would
    advance once per process.
    """
    warmup = min(config.warmup_steps, total_steps)
    if step < warmup:
        return config.learning_rate * (step + 1) / (warmup + 1)
    if config.schedule == "constant":
        return config.learning_rate
    done = (step - warmup) / max(total_steps - warmup, 1)
    left = 1.0 - done if config.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return config.learning_rate * (config.final_rate + (1.0 - config.final_rate) * left)
