"""What a measurement ran on."""

import platform
from pathlib import Path
from typing import Any

import torch

from model.target import Target


def default_device() -> str:
    """A GPU where there is one."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def describe(target: Target) -> dict[str, Any]:
    """The device's name, torch's threads and the target's dtype, as summary.json has them."""
    if target.device.type == "cuda":
        device = torch.cuda.get_device_name(target.device)
    else:
        names = [line.split(":", 1)[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
        device = names[0] if names else platform.processor() or platform.machine()
    return {
        "device": device,
        "threads": torch.get_num_threads(),
        "dtype": str(target.dtype).removeprefix("torch."),
    }


def max_context(target: Target) -> int | None:
    """The positions that the target was trained for; null where its configuration does not say."""
    found = getattr(target.config, "max_position_embeddings", None)
    return None if found is None else int(found)


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
