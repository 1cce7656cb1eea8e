"""The optimisers and their rates: AdamW, or Muon for matrices and AdamW for the rest."""

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from aerie.configs.schema.heads import MuonSection, TrainConfig
from aerie.model.heads.eagle import LMHead


def build_optimizers(
    module: nn.Module, config: TrainConfig, join: Callable[..., torch.optim.Optimizer] | None = None
) -> list[torch.optim.Optimizer]:
    """[AdamW], or [Muon, AdamW] if the recipe names Muon. join makes one optimiser of both, for
    ZeRO."""
    # matrix_rate and momentum are only Muon's; learning_rate and betas are AdamW's.
    muon = config.optimizer if isinstance(config.optimizer, MuonSection) else None
    matrices = muon_matrices(module) if muon else []
    # Compared by identity, because == would compare tensors elementwise.
    of_muon = {id(matrix) for matrix in matrices}
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    rest = [parameter for parameter in trained if id(parameter) not in of_muon]
    # Norms and biases get no weight decay.
    groups = [
        {"params": [p for p in rest if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in rest if p.ndim < 2], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=config.learning_rate,
        betas=config.betas,
        fused=torch.cuda.is_available() or None,  # a kernel of torch itself, so nothing is compiled
    )
    if muon is None:
        return [adamw]
    group: dict[str, Any] = {
        "params": matrices,
        "use_muon": True,
        "lr": muon.matrix_rate,
        "momentum": muon.momentum,
        "weight_decay": muon.weight_decay,
    }
    # Two optimisers, each with its own rate. ZeRO takes only one, with the groups of both.
    return [Muon([group]), adamw] if join is None else [join(group, adamw)]


def muon_matrices(module: nn.Module) -> list[nn.Parameter]:
    """The matrices that Muon trains: all but embeddings and LM heads, which have a row per
    token."""
    tables = {
        id(part.weight) for part in module.modules() if isinstance(part, nn.Embedding | LMHead)
    }
    # Names count too, because other architectures use other classes for their tables.
    matrices = []
    for name, parameter in module.named_parameters():
        is_table = id(parameter) in tables or "embed" in name or "lm_head" in name
        if parameter.requires_grad and parameter.ndim == 2 and not is_table:
            matrices.append(parameter)
    return matrices


class Muon(torch.optim.Muon):
    """torch's Muon, with its rounds in float32 on CPUs. A CPU without bf16 units is many times
    slower in bf16."""

    def step(self, closure: Any = None) -> Any:
        is_cpu = self.param_groups[0]["params"][0].device.type == "cpu"
        # torch.optim.Muon has no option for this, but calls Tensor.bfloat16 in one place.
        with _KeptInFloat32() if is_cpu else nullcontext():
            return super().step(closure)


class _KeptInFloat32(TorchFunctionMode):
    """Makes Tensor.bfloat16 return a copy in the tensor's own dtype."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0].clone() if func is torch.Tensor.bfloat16 else func(*args, **(kwargs or {}))


def learning_rate(step: int, total_steps: int, config: TrainConfig, is_muon: bool = False) -> float:
    """The rate of AdamW, or of Muon, in optimiser step 0, 1, ..."""
    # A function, because accelerate would advance a scheduler object once per process.
    top = config.learning_rate
    if is_muon and isinstance(config.optimizer, MuonSection):
        top = config.optimizer.matrix_rate
    if config.scale_rates is not None:
        top *= (config.scale_rates.steps / total_steps) ** config.scale_rates.power
    # Step 0 has a rate above 0, and the first step after the warm-up has the full rate.
    warmup = min(config.warmup_steps, total_steps)
    if step < warmup:
        return top * (step + 1) / (warmup + 1)
    if config.schedule == "constant":
        return top
    done = (step - warmup) / max(total_steps - warmup, 1)
    # `left` falls from 1 to 0 over the steps after the warm-up.
    left = 1.0 - done if config.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return top * (config.final_rate + (1.0 - config.final_rate) * left)
