"""Tensors on disk as heads are published: safetensors or a pickle of tensors, in one file or sharded."""

from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from aerie.configs.errors import UserError
from aerie.model.storage import PICKLE, WEIGHTS, find_weights, first_line, read_json, write_atomically

PICKLED = (".bin", ".pt")


def tensor_names(directory: Path) -> set[str]:
    """The names of a directory's tensors, empty without weights; only a pickle has to be read whole for them."""
    path = find_weights(directory)
    if path is not None and path.name.endswith(".index.json"):
        return set(_weight_map(path))
    return set() if path is None else set(_read_file(path, names_only=True))


def read_tensors(directory: Path) -> tuple[Path, dict[str, Tensor]]:
    """The file that was read (an index for shards) and its tensors, on the CPU."""
    path = find_weights(directory)
    if path is None:
        raise UserError(f"{directory}: holds no weights ({WEIGHTS} or {PICKLE}, whole or with an index of shards)")
    if not path.name.endswith(".index.json"):
        return path, _read_file(path)
    tensors: dict[str, Tensor] = {}
    table = _weight_map(path)
    for file in sorted(set(table.values())):
        shard = _read_file(path.parent / file)
        if odd := sorted(shard.keys() ^ {name for name, where in table.items() if where == file}):
            raise UserError(f"{path}: {file} and the index disagree about {odd[0]!r}; fetch the head anew")
        tensors |= shard
    return path, tensors


def write_tensors(directory: Path, tensors: dict[str, Tensor], pickled: bool = False) -> Path:
    """Writes one file, whole or absent, and returns it; pickled: as readers of pytorch_model.bin want it."""
    path = directory / (PICKLE if pickled else WEIGHTS)
    copies = {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}  # a view saves what it views
    save = torch.save if pickled else partial(save_file, metadata={"format": "pt"})
    write_atomically(path, lambda temporary: save(copies, temporary))
    return path


def _weight_map(path: Path) -> dict[str, str]:
    index = read_json(path)
    table = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(table, dict) or any(Path(str(name)).name != name for name in table.values()):
        raise UserError(f"{path}: has no weight_map from tensor names to files beside it; refused")
    return dict(table)


def _read_file(path: Path, names_only: bool = False) -> dict[str, Any]:
    if path.suffix not in PICKLED:
        try:
            if not names_only:
                return load_file(path)
            with safe_open(path, framework="pt") as handle:
                return dict.fromkeys(handle.keys())
        except (OSError, SafetensorError) as error:
            raise UserError(f"{path}: cannot read the weights: {first_line(error)}; fetch the file anew") from error
    try:
        tensors = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # noqa: BLE001 (the unpickler of a damaged file stumbles over anything)
        why = f"truncated, damaged, or more than tensors, which is never loaded; fetch it anew, or get {WEIGHTS}"
        raise UserError(f"{path}: cannot read the weights: {why}") from error
    if not isinstance(tensors, dict) or not all(isinstance(value, Tensor) for value in tensors.values()):
        raise UserError(f"{path}: is no table of tensors by name; save the state dict alone")
    return {str(name): value for name, value in tensors.items()}
