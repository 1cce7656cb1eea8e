"""The processes of a run: their Accelerator, and sums over all of them."""

import logging
import os
import warnings
from contextlib import nullcontext, suppress
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, cast
from unittest.mock import patch

import torch
import torch.distributed
from accelerate import Accelerator, InitProcessGroupKwargs
from accelerate.utils import DistributedType
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from aerie.configs.errors import UserError, warn
from aerie.configs.schema.heads import MuonSection, TrainConfig
from aerie.model.heads.eagle import LMHead
from aerie.model.hub import quieten


def world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def be_quiet() -> None:
    for name in ("accelerate", "torch.distributed", "DeepSpeed"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module=r"(deepspeed|accelerate|torch)\b")
    quieten()


def build_accelerator(config: TrainConfig, directory: Path) -> Accelerator:
    is_cpu_process = "LOCAL_RANK" in os.environ and not torch.cuda.is_available()
    uses_deepspeed = os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true"
    if is_cpu_process and uses_deepspeed:
        # On CPUs, skip the build (70 s) of a shared-memory op: gloo serves as well.
        import deepspeed.ops

        getattr(deepspeed.ops, "__compatible_ops__", {})["deepspeed_shm_comm"] = False
    if has_gpu := torch.cuda.is_available():
        torch.set_float32_matmul_precision("high")  # TF32 for products not in bf16
    accelerator = Accelerator(
        mixed_precision=os.environ.get("ACCELERATE_MIXED_PRECISION", "bf16" if has_gpu else "no"),
        # Otherwise torchrun's processes on CPUs connect, but do not average their gradients.
        cpu=is_cpu_process and not uses_deepspeed,
        gradient_accumulation_steps=config.accumulation,
        log_with=list(config.trackers) or None,
        project_dir=str(directory),
        # Without gloo, DeepSpeed on CPUs sees only one process; on a GPU, gloo would replace NCCL.
        kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")] if is_cpu_process else [],
    )
    if has_gpu and accelerator.mixed_precision == "no":
        warn(
            "accelerate launch: trains in float32; add --mixed_precision bf16, unless that is what you want"
        )
    together = (
        1 if accelerator.distributed_type == DistributedType.NO else accelerator.num_processes
    )
    if together != world_size():
        fix = "launch with --config_file configs/accelerate/zero2.yaml, or with torchrun"
        raise UserError(
            f"WORLD_SIZE: the launcher asked for {world_size()} processes and {together} trains; {fix}"
        )
    plugin = accelerator.state.deepspeed_plugin
    if isinstance(config.optimizer, MuonSection):
        zero = plugin.deepspeed_config["zero_optimization"] if plugin else {}
        is_offloaded = (zero.get("offload_optimizer") or {}).get("device", "none") != "none"
        # In float16 the scale of gradients changes, and Muon's momentum would mix scales.
        if accelerator.mixed_precision == "fp16" or is_offloaded or zero.get("stage") == 0:
            what = "muon trains in float32 or bf16 and, under DeepSpeed, with ZeRO 1 to 3 without offload"
            raise UserError(f"train.optimizer: {what}; use configs/accelerate/zero2.yaml, or adamw")
        zero["reduce_scatter"] = zero.get("stage") != 3  # in stage 3 DeepSpeed's Muon refuses it
    if plugin is not None:
        # With both, two processes waited for each other forever.
        if getattr(config, "compile", False) and plugin.zero_stage == 3:
            fix = "use configs/accelerate/zero2.yaml, or leave it out"
            raise UserError(
                f"train.compile: ZeRO-3 gathers weights inside of what would be compiled; {fix}"
            )
        plugin.deepspeed_config |= {
            "gradient_clipping": config.clip_norm,  # accelerator.clip_grad_norm_ clips nothing under DeepSpeed
            "gradient_accumulation_steps": config.accumulation,
            "train_micro_batch_size_per_gpu": config.batch_size,
        }
    return accelerator


def check_compiler() -> None:
    """UserError, before the first step, if torch.compile does not work, as without a C++ compiler."""
    device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if torch.cuda.is_available() else "cpu"
    try:
        torch.compile(torch.sin)(torch.ones(2, device=device))
    except RuntimeError as error:
        reason = str(getattr(error, "inner_exception", error)).strip().split("\n", 1)[0]
        raise UserError(
            f"train.compile: {reason}; install a C++ compiler (g++), or leave train.compile out"
        ) from error


def engine_and_machine(accelerator: Accelerator) -> tuple[str, str]:
    """('ZeRO-2 bf16', 'cpu with 2 threads, torch 2.13.0')."""
    plugin, precision, device = (
        accelerator.state.deepspeed_plugin,
        accelerator.mixed_precision,
        accelerator.device,
    )
    engine = "plain" if plugin is None else f"ZeRO-{plugin.zero_stage}"
    threads = torch.get_num_threads()
    machine = f"{device.type} with {threads} {'thread' if threads == 1 else 'threads'}"
    if device.type == "cuda":
        machine = torch.cuda.get_device_name(device)
    return (
        f"{engine} {'float32' if precision == 'no' else precision}",
        f"{machine}, torch {torch.__version__}",
    )


def load_state(accelerator: Accelerator, folder: Path) -> None:
    """Loads a save, but only tensors, plain values and the classes below; DeepSpeed would load any pickle."""
    classes: list[Any] = []
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
        from deepspeed.runtime.zero.config import ZeroStageEnum
        from deepspeed.utils.tensor_fragment import fragment_address

        classes = [LossScaler, DynamicLossScaler, ZeroStageEnum, fragment_address]
    try:
        with (
            patch.dict(os.environ, TORCH_FORCE_WEIGHTS_ONLY_LOAD="1"),
            torch.serialization.safe_globals(classes),
        ):
            accelerator.load_state(str(folder))
    except UnpicklingError as error:
        what = "holds more than tensors and plain values, which is never loaded"
        raise UserError(f"{folder}: {what}; remove it, or start anew with --overwrite") from error


class Muon(torch.optim.Muon):
    """torch's Muon with its rounds in float32 on CPUs: a CPU without bf16 units is many times slower in bf16."""

    def step(self, closure: Any = None) -> Any:
        is_cpu = self.param_groups[0]["params"][0].device.type == "cpu"
        with _KeptInFloat32() if is_cpu else nullcontext():
            return super().step(closure)


class _KeptInFloat32(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0].clone() if func is torch.Tensor.bfloat16 else func(*args, **(kwargs or {}))


def zero_muon(matrices: dict[str, Any], adamw: torch.optim.AdamW) -> torch.optim.Optimizer:
    """One optimiser, as ZeRO requires: DeepSpeed's Muon for the group of matrices, AdamW for its own groups."""
    from deepspeed.runtime.zero.muon import original_muon
    from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam

    if matrices["params"][0].device.type == "cpu":
        original_muon.ns_compute_dtype = lambda method: torch.float32  # see Muon
    for parameter in matrices["params"]:
        parameter.use_muon = True
    # As torch.optim.Muon: five rounds, the rate times sqrt(max(1, rows / columns)).
    groups = [
        {**matrices, "ns_method": "standard"},
        *({**group, "use_muon": False} for group in adamw.param_groups),
    ]
    return cast(torch.optim.Optimizer, MuonWithAuxAdam(groups, torch.optim.AdamW))


def turned(module: nn.Module) -> list[nn.Parameter]:
    """The matrices that Muon trains: all but embeddings and LM heads, which have a row per token."""
    tables = {
        id(part.weight) for part in module.modules() if isinstance(part, nn.Embedding | LMHead)
    }
    named = [
        (name, each)
        for name, each in module.named_parameters()
        if each.requires_grad and id(each) not in tables
    ]
    return [
        each
        for name, each in named
        if each.ndim == 2 and "embed" not in name and "lm_head" not in name
    ]


def clip_before_muon(zero: Any, clip_norm: float) -> None:
    """Makes ZeRO's optimiser clip the gradients; DeepSpeed would clip the updates that Muon computes from them.

    Their norm is far above clip_norm, so every step would be cut.
    """
    from deepspeed.runtime.utils import combine_grad_norm_groups

    take_step, epilogue = zero.step, zero.independent_gradient_partition_epilogue
    is_stage_3 = hasattr(zero, "fp16_groups")

    def keep_gradients() -> None:
        zero.set_gradient_accumulation_boundary(False)  # else ZeRO 1 and 2 run Muon here
        epilogue()

    @torch.compiler.set_stance("force_eager")  # DeepSpeed would compile Muon at its first use
    def step() -> None:
        if is_stage_3:
            gradients, norm = (
                zero.averaged_gradients,
                combine_grad_norm_groups(zero._get_norm_groups()),
            )
        else:
            # Partitioned without Muon for the norm, then with it.
            gradients = dict(zero.all_grad_tensors)
            matrices = [
                p for group in zero.bit16_groups for p in group if getattr(p, "use_muon", False)
            ]
            for parameter in matrices:
                parameter.use_muon = False
            zero.finalize_gradient_accumulation_boundary()
            norm = zero.scaled_global_norm()
            for parameter in matrices:
                parameter.use_muon = True
            zero.all_grad_tensors.update(gradients)
        for gradient in (gradient for group in gradients.values() for gradient in group):
            gradient.div_(((norm + 1e-6) / clip_norm).clamp(min=1.0))
        if not is_stage_3:
            zero.finalize_gradient_accumulation_boundary()
        take_step()
        zero._global_grad_norm = norm

    zero.step, zero.clip_grad = step, 0.0
    if not is_stage_3:
        zero.independent_gradient_partition_epilogue = keep_gradients


def all_reduce(values: Tensor) -> Tensor:
    if world_size() > 1:
        torch.distributed.all_reduce(values)
    return values


def raise_together(error: UserError | None, num_errors: float, device: torch.device) -> None:
    """If all_reduce has counted errors, every process raises its own, or one about another process's."""
    if num_errors:
        # The first to leave closes the connections, so all must get here first.
        with suppress(RuntimeError):
            all_reduce(torch.zeros(1, device=device))
        raise error or UserError("train: another process failed; the line that it printed says why")


def full_weights(accelerator: Accelerator, prepared: nn.Module) -> dict[str, Tensor]:
    """Every parameter, whole, on every process's CPU; all must call it, as ZeRO gathers one by one."""
    parameters = dict(accelerator.unwrap_model(prepared).named_parameters())
    if accelerator.distributed_type != DistributedType.DEEPSPEED:
        return {name: parameter.detach().cpu().clone() for name, parameter in parameters.items()}
    from deepspeed.runtime.zero import GatheredParameters
    from deepspeed.utils import safe_get_full_fp32_param

    weights = {}
    for name, parameter in parameters.items():
        # DeepSpeed keeps float32 masters beside bf16 parameters, but none of frozen ones.
        master = safe_get_full_fp32_param(parameter) if parameter.requires_grad else None
        with GatheredParameters([parameter], enabled=master is None):  # matters only under ZeRO-3
            weights[name] = (
                (parameter.detach() if master is None else master.detach().float()).cpu().clone()
            )
    return weights
