"""The processes of a training: their Accelerator, sums over all of them, and weights that they
share."""

import logging
import os
import warnings
from contextlib import suppress
from pathlib import Path
from pickle import UnpicklingError
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed
from accelerate import Accelerator, InitProcessGroupKwargs
from accelerate.utils import DistributedType
from torch import Tensor, nn

from aerie.configs.errors import UserError, warn, world_size
from aerie.configs.schema.heads import MuonSection, TrainConfig
from aerie.model.hub import quieten
from aerie.train.deepspeed_internals import skip_shared_memory_op


def be_quiet() -> None:
    """Silences the logs and warnings of the libraries."""
    for name in ("accelerate", "torch.distributed", "DeepSpeed"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module=r"(deepspeed|accelerate|torch)\b")
    quieten()


def build_accelerator(config: TrainConfig, directory: Path) -> Accelerator:
    """The Accelerator of this process; UserError if the launch does not fit the recipe."""
    has_gpu = torch.cuda.is_available()
    # Whether a launcher started this process on a machine without a GPU.
    is_cpu_process = "LOCAL_RANK" in os.environ and not has_gpu
    uses_deepspeed = os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true"
    if is_cpu_process and uses_deepspeed:
        skip_shared_memory_op()
    if has_gpu:
        torch.set_float32_matmul_precision("high")  # TF32 for products that are not in bf16
    accelerator = Accelerator(
        mixed_precision=os.environ.get("ACCELERATE_MIXED_PRECISION", "bf16" if has_gpu else "no"),
        # Without this, torchrun's processes on CPUs connect but do not average their gradients.
        cpu=is_cpu_process and not uses_deepspeed,
        gradient_accumulation_steps=config.accumulation,
        log_with=list(config.trackers) or None,
        project_dir=str(directory),
        # DeepSpeed on CPUs needs gloo to see other processes; on a GPU, gloo would replace NCCL.
        kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")] if is_cpu_process else [],
    )
    if has_gpu and accelerator.mixed_precision == "no":
        warn(
            "accelerate launch: training in float32, which is slow on a GPU; "
            "to train in bf16, add --mixed_precision bf16"
        )
    # Under DistributedType.NO each process trains alone, even if the launcher started several.
    is_alone = accelerator.distributed_type == DistributedType.NO
    count = 1 if is_alone else accelerator.num_processes
    if count != world_size():
        raise UserError(
            f"WORLD_SIZE: the launcher asked for {world_size()} processes, but {count} trains; "
            "launch with --config_file configs/accelerate/zero2.yaml, or with torchrun"
        )
    if isinstance(config.optimizer, MuonSection):
        _prepare_for_muon(accelerator)
    _configure_deepspeed(accelerator, config)
    return accelerator


def _prepare_for_muon(accelerator: Accelerator) -> None:
    """UserError if Muon cannot train under this launch; otherwise sets what it needs."""
    plugin = accelerator.state.deepspeed_plugin
    zero = plugin.deepspeed_config["zero_optimization"] if plugin else {}
    is_offloaded = (zero.get("offload_optimizer") or {}).get("device", "none") != "none"
    # In float16 the gradients' scale changes, and Muon's momentum would mix scales.
    if accelerator.mixed_precision == "fp16" or is_offloaded or zero.get("stage") == 0:
        raise UserError(
            "train.optimizer: muon trains in float32 or bf16 and, under DeepSpeed, "
            "with ZeRO 1 to 3 without offload; use configs/accelerate/zero2.yaml, or adamw"
        )
    zero["reduce_scatter"] = zero.get("stage") != 3  # DeepSpeed's Muon refuses it in stage 3


def _configure_deepspeed(accelerator: Accelerator, config: TrainConfig) -> None:
    """Writes the recipe's settings into DeepSpeed's configuration."""
    plugin = accelerator.state.deepspeed_plugin
    if plugin is None:
        return
    # The recipe decides these settings, so accelerate's file leaves them out.
    plugin.deepspeed_config |= {
        # accelerator.clip_grad_norm_ clips nothing under DeepSpeed.
        "gradient_clipping": config.clip_norm,
        "gradient_accumulation_steps": config.accumulation,
        "train_micro_batch_size_per_gpu": config.batch_size,
    }


def engine_and_machine(accelerator: Accelerator) -> tuple[str, str]:
    """The engine and the machine in words, such as ('ZeRO-2 bf16', 'cpu with 2 threads, torch
    2.13.0')."""
    plugin = accelerator.state.deepspeed_plugin
    engine = "plain" if plugin is None else f"ZeRO-{plugin.zero_stage}"
    precision = accelerator.mixed_precision.replace("no", "float32")
    # On a CPU, the number of threads changes the last bits of sums.
    device = accelerator.device
    machine = f"{device.type} with {torch.get_num_threads()} threads"
    if device.type == "cuda":
        machine = torch.cuda.get_device_name(device)
    return f"{engine} {precision}", f"{machine}, torch {torch.__version__}"


def load_state(accelerator: Accelerator, folder: Path) -> None:
    """Loads a save, but only tensors, plain values and the classes below. DeepSpeed alone would
    load any pickle."""
    # The variable below makes every torch.load refuse other classes. DeepSpeed's saves hold these.
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
        raise UserError(
            f"{folder}: holds more than tensors and plain values, which aerie never loads; "
            "remove it, or start again with --overwrite"
        ) from error


def all_reduce(values: Tensor) -> Tensor:
    """The sums of values over all processes."""
    if world_size() > 1:
        torch.distributed.all_reduce(values)
    return values


def raise_together(error: UserError | None, num_errors: float, device: torch.device) -> None:
    """If any process has an error, every process raises: its own error, or one that says that
    another process failed."""
    if num_errors:
        # The first process to leave closes the connections, so all must arrive here first.
        with suppress(RuntimeError):
            all_reduce(torch.zeros(1, device=device))
        raise error or UserError(
            "train: another process failed; the error that it printed says why"
        )


def full_weights(accelerator: Accelerator, prepared: nn.Module) -> dict[str, Tensor]:
    """Every parameter, complete, on every process's CPU. All processes must call this, because ZeRO
    gathers the parameters one by one."""
    # The module's order is the same in every process.
    parameters = dict(accelerator.unwrap_model(prepared).named_parameters())
    if accelerator.distributed_type != DistributedType.DEEPSPEED:
        return {name: parameter.detach().cpu().clone() for name, parameter in parameters.items()}
    from deepspeed.runtime.zero import GatheredParameters
    from deepspeed.utils import safe_get_full_fp32_param

    weights = {}
    for name, parameter in parameters.items():
        # DeepSpeed keeps float32 masters of trained bf16 parameters, but not of frozen ones.
        master = safe_get_full_fp32_param(parameter) if parameter.requires_grad else None
        with GatheredParameters([parameter], enabled=master is None):  # gathers under ZeRO-3 only
            weight = parameter.detach() if master is None else master.detach().float()
            weights[name] = weight.cpu().clone()
    return weights
