"""Recognises a head's layout, and reads our own; the files beside this one read the others."""

from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from aerie.configs.errors import UserError
from aerie.model import storage
from aerie.model.formats.content import (
    HeadContent,
    HeadFiles,
    configured,
    nested,
    read_taps,
)
from aerie.model.formats.eagle_layouts import FIRST_LAYER, TYPE
from aerie.model.heads import HEADS
from aerie.model.hub import require_whole_weights
from aerie.model.storage import (
    CONFIG,
    PICKLE,
    WEIGHTS,
    find_weights,
    first_line,
    read_json,
    write_atomically,
)

KIND = "aerie_kind"
PICKLED = (".bin", ".pt")
SPECULATORS = {"eagle": "eagle1", "eagle3": "eagle3", "dflash": "block", "dspark": "block"}
SGLANG = {"LlamaForCausalLMEagle": "eagle1", "LlamaForCausalLMEagle3": "eagle3"}
SGLANG |= {"Eagle3LlamaForCausalLM": "eagle3"}  # AngelSlim and ModelOpt write vLLM's name
WHOLE_MODEL = ("model.layers.", "transformer.h.", "model.decoder.layers.")


def recognise(values: dict[str, Any], names: set[str], path: Path) -> tuple[str, str]:
    """The layout and the head's kind, from config.json's values and the tensors' names.

    UserError for anything else than a head in a known layout.
    """
    architecture = str((values.get("architectures") or [""])[0])
    for key, known in ((KIND, tuple(HEADS)), (TYPE, tuple(SPECULATORS))):
        if key in values and values[key] not in known:
            raise UserError(f"{path}: {key} is {values[key]!r}; known here: {', '.join(known)}")

    def has(*starts: str) -> bool:
        return any(name.startswith(starts) for name in names)

    is_eagle3 = "draft_vocab_size" in values or FIRST_LAYER in names or has("midlayer.")
    is_eagle1 = {"fc.weight", "layers.0.self_attn.q_proj.weight"} <= names
    signs = (
        (KIND in values, "aerie", values.get(KIND)),
        (TYPE in values, "speculators", SPECULATORS.get(values.get(TYPE, ""))),
        ("lm_heads.0.weight" in names, "vllm", "medusa"),
        ("medusa_num_heads" in values or "0.0.linear.weight" in names, "medusa", "medusa"),
        ("hydra_num_heads" in values or has("hydra_mlp."), "hydra", "hydra"),
        ("dflash_config" in values, "z-lab", "block"),
        (architecture in SGLANG, "sglang", SGLANG.get(architecture)),
        (is_eagle3, "safeailab", "eagle3"),
        (is_eagle1, "safeailab", "eagle1"),
    )
    for applies, layout, kind in signs:
        if applies:
            return layout, str(kind)
    if has(*WHOLE_MODEL) or architecture.endswith(("ForCausalLM", "LMHeadModel")):
        raise UserError(
            f"{path}: a whole language model and no draft head; a draft_lm "
            "decodes as it is (--head), and hf upload ships it"
        )
    raise UserError(f"{path}: not a head in a layout that is known here")


def read_content(
    directory: Path, after_blocks: tuple[int, ...] | None = None
) -> tuple[str, HeadFiles, HeadContent]:
    """A head's layout, files and content; after_blocks: the taps if the files name none."""
    require_whole_weights(directory)
    path = directory / CONFIG
    values = nested(read_json(path))
    weights, tensors = read_tensors(directory)
    layout, kind = recognise(values, set(tensors), path)
    files = HeadFiles(path, values, weights, tensors, after_blocks)
    if layout != "aerie":
        return layout, files, HEADS[kind].formats.read(files, layout)
    is_optional = HEADS[kind].has_draft_vocabulary
    if "after_blocks" in values or is_optional:
        values = {**values, "after_blocks": read_taps(values, None, path)[0]}
    config = configured(HEADS[kind].config, values, path)
    return layout, files, HeadContent(config, tensors, is_embedding_optional=is_optional)


def tensor_names(directory: Path) -> set[str]:
    """The names of a directory's tensors; empty without weights."""
    path = find_weights(directory)
    if path is None:
        return set()
    return set(
        storage.weight_map(path) if path.suffix == ".json" else _read_file(path, names_only=True)
    )


def read_tensors(directory: Path) -> tuple[Path, dict[str, Tensor]]:
    """The file of weights (of shards, their index), and its tensors on the CPU."""
    path = find_weights(directory)
    if path is None:
        raise UserError(
            f"{directory}: holds no weights "
            f"({WEIGHTS} or {PICKLE}, whole or with an index of shards)"
        )
    shards = storage.weight_map(path).values() if path.suffix == ".json" else [path.name]
    tensors: dict[str, Tensor] = {}
    for name in sorted(set(shards)):
        tensors |= _read_file(path.with_name(name))
    return path, tensors


def write_tensors(directory: Path, tensors: dict[str, Tensor], pickled: bool = False) -> Path:
    path = directory / (PICKLE if pickled else WEIGHTS)
    # copies, because a view would save all of its base
    copies = {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}
    save = torch.save if pickled else partial(save_file, metadata={"format": "pt"})
    write_atomically(path, lambda temporary: save(copies, temporary))
    return path


def _read_file(path: Path, names_only: bool = False) -> dict[str, Any]:
    """Tensors by name; with names_only, values may be None."""
    if path.suffix in PICKLED:
        return _read_pickle(path)
    try:
        if not names_only:
            return load_file(path)
        with safe_open(path, framework="pt") as handle:
            return dict.fromkeys(handle.keys())
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"{path}: cannot read the weights: {first_line(error)}; fetch the file again"
        ) from error


def _read_pickle(path: Path) -> dict[str, Tensor]:
    try:
        tensors = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # noqa: BLE001 (a damaged file may raise anything)
        raise UserError(
            f"{path}: cannot read the weights: the file is damaged, or holds more than tensors, "
            f"which aerie never loads; fetch it again, or get {WEIGHTS}"
        ) from error
    is_table = isinstance(tensors, dict)
    if not is_table or not all(isinstance(value, Tensor) for value in tensors.values()):
        raise UserError(f"{path}: is no table of tensors by name; save the state dict alone")
    return tensors
