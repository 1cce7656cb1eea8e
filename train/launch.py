"""The Accelerator, with or without DeepSpeed, on CPUs and GPUs; and the whole fp32 weights of what it has sharded."""

import logging
import os
import signal
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, TypeVar

import torch
from accelerate import Accelerator, InitProcessGroupKwargs
from accelerate.utils import DistributedType, broadcast_object_list
from torch import Tensor, nn

from aerie.configs.errors import UserError
from aerie.configs.schema.train import TrainConfig

T = TypeVar("T")


@dataclass(frozen=True)
class Launch:
    """What the launcher told this process; local_rank is None outside a launcher."""

    local_rank: int | None = None
    world_size: int = 1
    uses_deepspeed: bool = False


def build_accelerator(config: TrainConfig, launch: Launch, directory: Path) -> Accelerator:
    """The Accelerator of this process; UserError when the launcher started processes that do not know each other."""
    quiet_deepspeed()
    has_gpu = torch.cuda.is_available()
    # Without the gloo backend DeepSpeed on CPUs believes in one process; on a GPU it would take NCCL's place.
    handlers = [InitProcessGroupKwargs(backend="gloo")] if launch.local_rank is not None and not has_gpu else []
    accelerator = Accelerator(
        # torchrun on CPUs needs it said: else the processes find each other but keep their gradients to themselves.
        cpu=bool(handlers) and not launch.uses_deepspeed,
        gradient_accumulation_steps=config.accumulation,
        log_with=list(config.trackers) or None,
        project_dir=str(directory),
        kwargs_handlers=handlers,
    )
    apart = launch.world_size > 1 and accelerator.distributed_type == DistributedType.NO
    if apart or accelerator.num_processes != launch.world_size:
        raise UserError(
            f"WORLD_SIZE: the launcher asked for {launch.world_size} processes that train together and "
            f"{1 if apart else accelerator.num_processes} does; "
            f"launch with --config_file configs/accelerate/zero2.yaml, or with torchrun"
        )
    plugin = accelerator.state.deepspeed_plugin
    if plugin is not None:
        settings = plugin.deepspeed_config
        settings["gradient_clipping"] = config.clip_norm  # clip_grad_norm_ clips nothing under DeepSpeed
        settings["gradient_accumulation_steps"] = config.accumulation
        settings["train_micro_batch_size_per_gpu"] = config.batch_size
    return accelerator


def quiet_deepspeed() -> None:
    """Keeps DeepSpeed's start-up to warnings, and its shared-memory C++ op (a 70 s build) from CPU runs."""
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    if torch.cuda.is_available():
        return
    try:
        import deepspeed.ops
    except ImportError:
        return
    table = getattr(deepspeed.ops, "__compatible_ops__", None)  # a private name: gloo alone serves as well
    if isinstance(table, dict):
        table["deepspeed_shm_comm"] = False


def is_deepspeed(accelerator: Accelerator) -> bool:
    return bool(accelerator.distributed_type == DistributedType.DEEPSPEED)


def engine_of(accelerator: Accelerator) -> str:
    """How the optimiser's states are laid out over the processes: 'plain float32', 'ZeRO-2 bf16'."""
    plugin = accelerator.state.deepspeed_plugin if is_deepspeed(accelerator) else None
    name = "plain" if plugin is None else f"ZeRO-{plugin.zero_stage}"
    return f"{name} {accelerator.mixed_precision if accelerator.mixed_precision != 'no' else 'float32'}"


def machine_of(device: torch.device) -> str:
    """What decides the last bits of a sum: 'cpu with 2 threads, torch 2.13.0'."""
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}"
    threads = torch.get_num_threads()
    return f"{device.type} with {threads} {'thread' if threads == 1 else 'threads'}, torch {torch.__version__}"


def first_process_finds(accelerator: Accelerator, find: Callable[[], T]) -> T:
    """What find returns on the first process, on all of them; its UserError, too."""
    outcome: list[Any] = [None, None]
    if accelerator.is_main_process:
        try:
            outcome[0] = find()
        except UserError as error:
            outcome[1] = str(error)
    if accelerator.num_processes > 1:
        broadcast_object_list(outcome)
    if outcome[1] is not None:
        raise UserError(outcome[1])
    found: T = outcome[0]
    return found


def full_weights(accelerator: Accelerator, prepared: nn.Module) -> dict[str, Tensor]:
    """Every parameter, whole, in float32 masters where there are some, on the CPU of every process.

    All processes must call it: under ZeRO each parameter is gathered in turn.
    """
    module = accelerator.unwrap_model(prepared)
    if not is_deepspeed(accelerator):
        return {name: p.detach().cpu().clone() for name, p in module.named_parameters()}
    return {name: _gathered(parameter) for name, parameter in module.named_parameters()}


def load_weights(module: nn.Module, weights: dict[str, Tensor]) -> None:
    """Copies full_weights into an unsharded twin of the module."""
    own = dict(module.named_parameters())
    if own.keys() != weights.keys():
        raise ValueError(f"weights do not belong to the module: {sorted(own.keys() ^ weights.keys())[:4]}")
    with torch.no_grad():
        for name, parameter in own.items():
            parameter.copy_(weights[name])


def _gathered(parameter: nn.Parameter) -> Tensor:
    from deepspeed.runtime.zero import GatheredParameters
    from deepspeed.utils import safe_get_full_fp32_param

    master = safe_get_full_fp32_param(parameter) if parameter.requires_grad else None
    if master is not None:
        return master.detach().float().cpu().clone()
    if hasattr(parameter, "ds_id"):  # ZeRO-3, frozen
        context: Any = GatheredParameters([parameter])
        with context:
            return parameter.detach().cpu().clone()
    return parameter.detach().cpu().clone()


def be_quiet() -> None:
    """No advice and no loading bars of the libraries."""
    import torch

    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else DeepSpeed prints that it found no GPU
    logging.getLogger("accelerate").setLevel(logging.ERROR)
    logging.getLogger("torch.distributed").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module=r"(deepspeed|accelerate|torch)\b")
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()


# What becomes of the run: after Ctrl-C somebody decides; a scheduler's signal means that the same command follows.
STATES = {signal.SIGINT: "interrupted", signal.SIGTERM: "requeue", signal.SIGUSR1: "requeue"}
CODES = {"interrupted": 130, "requeue": 75}
PATIENCE_SECONDS = (
    5.0  # a launcher repeats the terminal's Ctrl-C to its children at once: only a later one is impatience
)


class StopRequest:
    """While entered, remembers the first of the signals; a second Ctrl-C after some seconds ends at once."""

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._since = 0.0
        self._before: dict[signal.Signals, Any] = {}

    @property
    def state(self) -> str | None:
        """'interrupted', 'requeue', or None while no signal has come."""
        return None if self.received is None else STATES[self.received]

    def __enter__(self) -> "StopRequest":
        for number in STATES:
            self._before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.received is None:
            self.received, self._since = signal.Signals(number), time.monotonic()
        elif number == signal.SIGINT and time.monotonic() - self._since > PATIENCE_SECONDS:
            raise KeyboardInterrupt


class _Stopped(BaseException):
    """A scheduler's signal came where nothing has to be saved."""


def answered(run: Callable[[], tuple[str, int]]) -> tuple[str, int]:
    """run's (state, exit code); those of a requeue when a scheduler's signal comes before or after the steps.

    Nothing is trained there, so it ends at once. While a StopRequest is entered it hears the signals instead.
    """
    before = {number: signal.signal(number, _stop) for number, state in STATES.items() if state == "requeue"}
    try:
        return run()
    except _Stopped:
        return "requeue", CODES["requeue"]
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _stop(number: int, frame: FrameType | None) -> None:
    raise _Stopped
