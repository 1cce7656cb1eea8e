"""The processes of a run: the Accelerator, with or without DeepSpeed, on CPUs and GPUs; sums over all of them."""

import logging
import os
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from accelerate import Accelerator, InitProcessGroupKwargs
from accelerate.utils import DistributedType
from torch import Tensor, nn

from aerie.configs.errors import UserError
from aerie.configs.schema.train import TrainConfig


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


def world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def device() -> str:
    """Where this process's share of the target goes."""
    return f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if torch.cuda.is_available() else "cpu"


def build_accelerator(config: TrainConfig, directory: Path) -> Accelerator:
    """The Accelerator of this process; UserError when the launcher started processes that do not know each other."""
    quiet_deepspeed()
    is_cpu_process = "LOCAL_RANK" in os.environ and not torch.cuda.is_available()
    uses_deepspeed = os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true"
    accelerator = Accelerator(
        # Under torchrun on CPUs this must be said: else the processes find each other and keep their gradients apart.
        cpu=is_cpu_process and not uses_deepspeed,
        gradient_accumulation_steps=config.accumulation,
        log_with=list(config.trackers) or None,
        project_dir=str(directory),
        # Without the gloo backend DeepSpeed on CPUs believes in one process; on a GPU it would take NCCL's place.
        kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")] if is_cpu_process else [],
    )
    together = 1 if accelerator.distributed_type == DistributedType.NO else accelerator.num_processes
    if together != world_size():
        raise UserError(
            f"WORLD_SIZE: the launcher asked for {world_size()} processes that train together and {together} does; "
            f"launch with --config_file configs/accelerate/zero2.yaml, or with torchrun"
        )
    if accelerator.state.deepspeed_plugin is not None:
        accelerator.state.deepspeed_plugin.deepspeed_config |= {
            "gradient_clipping": config.clip_norm,  # accelerator.clip_grad_norm_ clips nothing under DeepSpeed
            "gradient_accumulation_steps": config.accumulation,
            "train_micro_batch_size_per_gpu": config.batch_size,
        }
    return accelerator


def quiet_deepspeed() -> None:
    """Keeps DeepSpeed's start-up to warnings, and its shared-memory C++ op (a 70 s build) from CPU runs."""
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    if not torch.cuda.is_available():
        with suppress(ImportError):
            import deepspeed.ops

            # A private name; where it is gone gloo serves as well.
            getattr(deepspeed.ops, "__compatible_ops__", {})["deepspeed_shm_comm"] = False


def be_quiet() -> None:
    """No advice and no loading bars of the libraries."""
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else DeepSpeed prints that it found no GPU
    # What these say at start-up is meant for their developers.
    logging.getLogger("accelerate").setLevel(logging.ERROR)
    logging.getLogger("torch.distributed").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module=r"(deepspeed|accelerate|torch)\b")
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()


def engine_of(accelerator: Accelerator) -> str:
    """How the optimiser's states are laid out over the processes: 'plain float32', 'ZeRO-2 bf16'."""
    plugin = accelerator.state.deepspeed_plugin
    name = "plain" if plugin is None else f"ZeRO-{plugin.zero_stage}"
    return f"{name} {accelerator.mixed_precision if accelerator.mixed_precision != 'no' else 'float32'}"


def machine_of(device: torch.device) -> str:
    """What decides the last bits of a sum: 'cpu with 2 threads, torch 2.13.0'."""
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}"
    threads = torch.get_num_threads()
    return f"{device.type} with {threads} {'thread' if threads == 1 else 'threads'}, torch {torch.__version__}"


def are_many() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def all_reduce(values: Tensor) -> Tensor:
    """values summed over the processes (themselves where there is one)."""
    if are_many():
        torch.distributed.all_reduce(values)
    return values


def most_of_all(count: int, device: torch.device) -> int:
    """The largest count of all processes."""
    if not are_many():
        return count
    most = torch.tensor(count, device=device)
    torch.distributed.all_reduce(most, op=torch.distributed.ReduceOp.MAX)
    return int(most)


def raise_together(error: UserError | None, num_errors: float, device: torch.device) -> None:
    """Where any process has an error all raise: it its own, the others one that points at what it printed.

    Every process must call it with the same number of errors, which all_reduce has counted.
    """
    if num_errors:
        # Who leaves first closes the connections, so all must have come this far.
        with suppress(RuntimeError):
            all_reduce(torch.zeros(1, device=device))
        raise error or UserError("train: another process failed; the line that it printed says why")


def full_weights(accelerator: Accelerator, prepared: nn.Module) -> dict[str, Tensor]:
    """Every parameter, whole, in float32 masters where there are some, on the CPU of every process.

    All processes must call it: under ZeRO each parameter is gathered in turn.
    """
    # DeepSpeed keeps float32 masters beside bf16 parameters; without it the parameters are the masters.
    module = accelerator.unwrap_model(prepared)
    gather = _gathered if accelerator.distributed_type == DistributedType.DEEPSPEED else _copied
    return {name: gather(parameter) for name, parameter in module.named_parameters()}


def _copied(parameter: nn.Parameter) -> Tensor:
    return parameter.detach().cpu().clone()


def _gathered(parameter: nn.Parameter) -> Tensor:
    from deepspeed.runtime.zero import GatheredParameters
    from deepspeed.utils import safe_get_full_fp32_param

    master = safe_get_full_fp32_param(parameter) if parameter.requires_grad else None
    if master is not None:
        return master.detach().float().cpu().clone()
    if hasattr(parameter, "ds_id"):  # ZeRO-3, frozen
        context: Any = GatheredParameters([parameter])
        with context:
            return _copied(parameter)
    return _copied(parameter)
