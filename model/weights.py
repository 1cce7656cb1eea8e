"""Tensors on disk as heads are published: safetensors or a pickle of tensors, in one file or sharded."""

import pickle
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from aerie.configs.errors import UserError
from aerie.model.storage import PICKLE, WEIGHTS, find_weights, read_json, write_atomically

PICKLED = (".bin", ".pt")
BROKEN = (OSError, RuntimeError, EOFError, ValueError, TypeError, LookupError, AttributeError, pickle.UnpicklingError)


def tensor_names(directory: Path) -> set[str]:
    """The names of a directory's tensors, empty without weights; only a pickle has to be read whole for them."""
    place = find_weights(directory)
    if place is None:
        return set()
    if place.name.endswith(".index.json"):
        return set(_weight_map(place))
    if place.suffix in PICKLED:
        return set(_read_pickle(place))
    try:
        with safe_open(place, framework="pt") as handle:
            return set(handle.keys())
    except (OSError, SafetensorError) as error:
        raise UserError(f"{place}: cannot read the weights: {_first_line(error)}; fetch the file anew") from error


def read_tensors(directory: Path) -> tuple[Path, dict[str, Tensor]]:
    """The file that was read (an index for shards) and its tensors, on the CPU.

    UserError for a file that is missing, truncated or otherwise unreadable, and for a pickle of more than tensors.
    """
    place = find_weights(directory)
    if place is None:
        raise UserError(f"{directory}: holds no weights ({WEIGHTS} or {PICKLE}, whole or with an index of shards)")
    if not place.name.endswith(".index.json"):
        return place, _read_file(place)
    tensors: dict[str, Tensor] = {}
    table = _weight_map(place)
    for name in sorted(set(table.values())):
        shard = _read_file(place.parent / name)
        listed = {key for key, where in table.items() if where == name}
        if shard.keys() != listed:
            odd = sorted(shard.keys() ^ listed)[0]
            raise UserError(f"{place}: {name} and the index disagree about {odd!r}; fetch the head anew")
        tensors |= shard
    return place, tensors


def write_tensors(directory: Path, tensors: dict[str, Tensor], pickled: bool = False) -> Path:
    """Writes one file, whole or absent, and returns it; pickled: as readers of pytorch_model.bin want it."""
    path = directory / (PICKLE if pickled else WEIGHTS)
    whole = {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}  # views would save what they view
    if pickled:
        write_atomically(path, lambda temporary: torch.save(whole, temporary))
    else:
        write_atomically(path, lambda temporary: save_file(whole, temporary, metadata={"format": "pt"}))
    return path


def _weight_map(place: Path) -> dict[str, str]:
    """Tensor name -> shard; UserError for a file outside the directory."""
    index = read_json(place)
    table = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(table, dict) or not all(isinstance(name, str) for name in table.values()):
        raise UserError(f"{place}: has no weight_map from tensor names to files; fetch the head anew")
    for name in table.values():
        if Path(name).name != name:
            raise UserError(f"{place}: weight_map names {name!r}, which is no file beside it; refused")
    return dict(table)


def _read_file(path: Path) -> dict[str, Tensor]:
    if path.suffix in PICKLED:
        return _read_pickle(path)
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path}: cannot read the weights: {_first_line(error)}; fetch the file anew") from error


def _read_pickle(path: Path) -> dict[str, Tensor]:
    """The tensors of a pickle, of which nothing else is ever loaded."""
    try:
        found: Any = torch.load(path, map_location="cpu", weights_only=True)
    except BROKEN as error:  # the unpickler of a damaged file stumbles over anything
        if "unsupported" in str(error).lower():
            raise UserError(
                f"{path}: holds more than tensors, and loading it could run its code; refused: get {WEIGHTS} of this "
                f"head instead"
            ) from error
        raise UserError(
            f"{path}: cannot read the weights: {path.stat().st_size:,} bytes that are no whole pickle of tensors "
            f"(truncated or damaged); fetch the file anew"
        ) from error
    if not isinstance(found, dict):
        raise UserError(f"{path}: holds a {type(found).__name__} and no table of tensors by name")
    odd = next((name for name, value in found.items() if not isinstance(value, Tensor)), None)
    if odd is not None:
        raise UserError(f"{path}: {odd!r} is a {type(found[odd]).__name__} and no tensor; save the state dict alone")
    return {str(name): value for name, value in found.items()}


def _first_line(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
