"""Recognises a head's layout; reads Medusa's, Hydra's and ours (others: the files beside this),
and tensors."""

import re
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
    RenameRule,
    configured,
    nested,
    read_rope,
    read_taps,
    renamed,
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

NO_LIMIT = 2**20  # of positions, without attention
HEAD_DIM = 128  # Vicuna's
MULTI_TOKEN_NAMES: dict[str, tuple[RenameRule, ...]] = {  # FasterDecoding/Medusa, zankner/Hydra
    "medusa": (  # {future token}.{block}.linear and {future token}.{number of blocks}.weight
        (r"^(\d+)\.(\d+)\.linear\.", r"branches.\1.blocks.\2.linear."),
        (r"^(\d+)\.(\d+)\.weight$", r"laws.lm_heads.\1.weight"),
    ),
    "hydra": (  # every second module is a dropout; "embeding" is their spelling
        (r"^prefix_embeding_layer\.(embed_tokens\.weight|.*rotary_emb\.inv_freq)$", ""),
        (r"^prefix_embeding_layer\.(layers\.0\.)?", "prefix_layer."),
        (
            r"^hydra_mlp\.(\d+)\.(\d+)\.",
            lambda match: f"branches.{match[1]}.blocks.{int(match[2]) // 2}.",
        ),
        (r"\.res_connection\.", ".projection."),
        (r"^hydra_lm_head\.(\d+)\.1\.", r"laws.lm_heads.\1."),
    ),
}


def recognise(values: dict[str, Any], names: set[str], path: Path) -> tuple[str, str]:
    """The layout and the head's kind."""
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
            f"{path}: a whole language model and no draft head: a target, or a draft_lm; "
            "it decodes as it is (--head), and hf upload ships it"
        )
    raise UserError(f"{path}: not a head in a layout that is known here")


def read_content(
    directory: Path, after_blocks: tuple[int, ...] | None = None
) -> tuple[str, HeadFiles, HeadContent]:
    """Layout, files and content; after_blocks: used if the files name no taps."""
    require_whole_weights(directory)
    path = directory / CONFIG
    values = nested(read_json(path))
    weights, tensors = read_tensors(directory)
    layout, kind = recognise(values, set(tensors), path)
    files = HeadFiles(path, values, weights, tensors, after_blocks)
    if layout in MULTI_TOKEN_NAMES:
        return layout, files, _read_multi_token(files, kind)
    if layout != "aerie":
        return layout, files, HEADS[kind].formats.read(files, layout)
    is_optional = HEADS[kind].has_draft_vocabulary
    if "after_blocks" in values or is_optional:
        values = {**values, "after_blocks": read_taps(values, None, path)[0]}
    config = configured(HEADS[kind].config, values, path)
    return layout, files, HeadContent(config, tensors, is_embedding_optional=is_optional)


def _read_multi_token(files: HeadFiles, kind: str) -> HeadContent:
    """A Medusa or Hydra head; sizes come from the weights, as config.json often lags behind
    them."""
    values, path = files.values, files.config_path
    if values.get("grounded_heads") is False or values.get("hidden_state_offset"):
        raise UserError(
            f"{path}: heads with grounded_heads false or a hidden_state_offset are not supported"
        )
    tensors = renamed(files.tensors, MULTI_TOKEN_NAMES[kind])
    if "laws.lm_heads.0.weight" not in tensors:
        raise UserError(
            f"{files.weights_path}: has no LM head of the first future token ('0.L.weight')"
        )
    vocab_size, width = tensors["laws.lm_heads.0.weight"].shape
    sizes: dict[str, Any] = {
        "hidden_size": width,
        "vocab_size": vocab_size,
        "max_position_embeddings": NO_LIMIT,
    }
    guesses: list[str] = []
    for name, pattern in (
        ("heads", r"laws\.lm_heads\.(\d+)\.weight"),
        ("layers", r"branches\.0\.blocks\.(\d+)\..*"),
    ):
        matches = [re.fullmatch(pattern, key) for key in tensors]
        count = 1 + max((int(match[1]) for match in matches if match), default=-1)
        sizes[f"num_{name}"] = count
        recorded = values.get(f"{kind}_num_{name}")
        if recorded not in (None, count):
            guesses.append(
                f"{kind}_num_{name} is {recorded}, the weights have {count}: all are taken"
            )
    if kind == "hydra":
        sizes["lm_head_bias"] = "laws.lm_heads.0.bias" in tensors
    if "prefix_layer.mlp.up_proj.weight" in tensors:  # Hydra++
        prefix_sizes, prefix_guesses = _prefix_sizes(values, tensors, width, path)
        sizes |= prefix_sizes
        guesses += prefix_guesses
    config = configured(HEADS[kind].config, sizes, path)
    return HeadContent(config, tensors, tuple(guesses))


def _prefix_sizes(
    values: dict[str, Any], tensors: dict[str, Tensor], width: int, path: Path
) -> tuple[dict[str, Any], list[str]]:
    """The sizes of Hydra++'s decoder layer, and what was guessed."""
    guesses = []
    heads = values.get("num_attention_heads")
    if heads is None:
        if width % HEAD_DIM:
            raise UserError(f'{path}: add "num_attention_heads" of the target')
        heads = width // HEAD_DIM
        guesses.append(
            f"the prefix layer is taken to have {heads} attention heads of {HEAD_DIM}, "
            "as Vicuna has"
        )
    head_dim = width // heads
    theta, scaling = read_rope(values, path)
    return {
        "prefix_layer": True,
        "intermediate_size": tensors["prefix_layer.mlp.up_proj.weight"].shape[0],
        "num_attention_heads": heads,
        "num_key_value_heads": tensors["prefix_layer.self_attn.k_proj.weight"].shape[0] // head_dim,
        "head_dim": head_dim,
        "rms_norm_eps": values.get("rms_norm_eps", 1e-6),
        "rope_theta": theta,
        "rope_scaling": scaling,
        "max_position_embeddings": values.get("max_position_embeddings", 2048),
    }, guesses


def tensor_names(directory: Path) -> set[str]:
    path = find_weights(directory)
    if path is None:
        return set()
    return set(
        storage.weight_map(path) if path.suffix == ".json" else _read_file(path, names_only=True)
    )


def read_tensors(directory: Path) -> tuple[Path, dict[str, Tensor]]:
    """The file (an index for shards) and its tensors, on the CPU."""
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
    # copies, as a view would save all of its base
    copies = {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}
    save = torch.save if pickled else partial(save_file, metadata={"format": "pt"})
    write_atomically(path, lambda temporary: save(copies, temporary))
    return path


def _read_file(path: Path, names_only: bool = False) -> dict[str, Any]:
    """Tensors by name, or names alone."""
    if path.suffix in PICKLED:
        return _read_pickle(path)
    try:
        if not names_only:
            return load_file(path)
        with safe_open(path, framework="pt") as handle:
            return dict.fromkeys(handle.keys())
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"{path}: cannot read the weights: {first_line(error)}; fetch it anew"
        ) from error


def _read_pickle(path: Path) -> dict[str, Tensor]:
    try:
        tensors = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # noqa: BLE001 (a damaged file may raise anything)
        raise UserError(
            f"{path}: cannot read the weights: damaged, or holds more than tensors, "
            f"which is never loaded; fetch it anew or get {WEIGHTS}"
        ) from error
    is_table = isinstance(tensors, dict)
    if not is_table or not all(isinstance(value, Tensor) for value in tensors.values()):
        raise UserError(f"{path}: is no table of tensors by name; save the state dict alone")
    return tensors
