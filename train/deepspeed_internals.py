"""All code that reaches into DeepSpeed's private parts, as they are in version 0.19."""

from itertools import chain
from typing import Any, cast

import torch
from torch import Tensor

from aerie.configs.errors import UserError

KNOWN_VERSIONS = "0.19."  # the start of their names


def require_known_version() -> None:
    """UserError if DeepSpeed's private parts may differ from those that this file knows."""
    import deepspeed

    if not deepspeed.__version__.startswith(KNOWN_VERSIONS):
        raise UserError(
            f"deepspeed {deepspeed.__version__}: aerie needs private parts of {KNOWN_VERSIONS}*; "
            f"run: pip install 'deepspeed=={KNOWN_VERSIONS}*', or launch with torchrun"
        )


def skip_shared_memory_op() -> None:
    """Saves processes on CPUs a build of 70 s, of an operation that gloo does as well."""
    import deepspeed.ops

    require_known_version()
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def zero_muon(matrices: dict[str, Any], adamw: torch.optim.AdamW) -> torch.optim.Optimizer:
    """One optimiser, as ZeRO requires: DeepSpeed's Muon for the matrices, and AdamW for AdamW's
    groups."""
    from deepspeed.runtime.zero.muon import original_muon
    from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam

    require_known_version()
    if matrices["params"][0].device.type == "cpu":
        # On CPUs its rounds run in float32, as in aerie.train.optimizers.Muon.
        original_muon.ns_compute_dtype = lambda method: torch.float32
    for parameter in matrices["params"]:
        parameter.use_muon = True
    # As in torch.optim.Muon: five rounds, and the rate times sqrt(max(1, rows / columns)).
    groups = [{**matrices, "ns_method": "standard"}]
    groups += [{**group, "use_muon": False} for group in adamw.param_groups]
    return cast(torch.optim.Optimizer, MuonWithAuxAdam(groups, torch.optim.AdamW))


def clip_before_muon(zero: Any, clip_norm: float) -> None:
    """Makes ZeRO's optimiser clip the gradients. DeepSpeed would clip Muon's updates, whose norm is
    far above clip_norm, so it would cut every step."""
    require_known_version()
    # ZeRO 1 and 2 share a class that has no such groups.
    is_stage_3 = hasattr(zero, "fp16_groups")
    take_step = zero.step
    end_backward = zero.independent_gradient_partition_epilogue

    @torch.compiler.set_stance("force_eager")  # DeepSpeed would compile Muon at its first use
    def step() -> None:
        gradients, norm = _stage_3_gradients(zero) if is_stage_3 else _unpartitioned_gradients(zero)
        # As in torch.nn.utils.clip_grad_norm_, but over all processes.
        factor = ((norm + 1e-6) / clip_norm).clamp(min=1.0)
        for group in gradients.values():
            for gradient in group:
                gradient.div_(factor)
        if not is_stage_3:
            zero.finalize_gradient_accumulation_boundary()  # runs Muon
        take_step()
        zero._global_grad_norm = norm  # accelerator.clip_grad_norm_ reads this

    def keep_gradients() -> None:
        zero.set_gradient_accumulation_boundary(False)  # otherwise ZeRO 1 and 2 run Muon here
        end_backward()

    zero.step = step
    # DeepSpeed's own clipping, which comes after Muon, is off.
    zero.clip_grad = 0.0
    if not is_stage_3:
        zero.independent_gradient_partition_epilogue = keep_gradients


def _stage_3_gradients(zero: Any) -> tuple[dict[Any, list[Tensor]], Tensor]:
    """ZeRO-3's gradients by group, and their norm over all processes."""
    from deepspeed.runtime.utils import combine_grad_norm_groups

    return zero.averaged_gradients, combine_grad_norm_groups(zero._get_norm_groups())


def _unpartitioned_gradients(zero: Any) -> tuple[dict[Any, list[Tensor]], Tensor]:
    """The gradients of ZeRO 1 or 2 by group, and their norm over all processes. For the norm they
    are partitioned without Muon, and then put back."""
    # Partitioning empties this table, so a copy is put back.
    gradients = dict(zero.all_grad_tensors)
    trained = chain.from_iterable(zero.bit16_groups)
    matrices = [parameter for parameter in trained if getattr(parameter, "use_muon", False)]
    # Without the mark, DeepSpeed treats the matrices as AdamW's and leaves their gradients alone.
    for parameter in matrices:
        parameter.use_muon = False
    zero.finalize_gradient_accumulation_boundary()
    norm = zero.scaled_global_norm()
    for parameter in matrices:
        parameter.use_muon = True
    zero.all_grad_tensors.update(gradients)
    return gradients, norm
