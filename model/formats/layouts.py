"""Recognises a head's layout; reads Medusa's, Hydra's and ours (others: the files beside this), and tensors."""

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
    Rule,
    configured,
    nested,
    read_rope,
    read_taps,
    renamed,
)
from aerie.model.formats.eagle_layouts import FIRST_LAYER, TYPE
from aerie.model.heads import HEADS
from aerie.model.heads.eagle import Eagle3Config
from aerie.model.heads.multi_token import HydraConfig, MedusaConfig
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
MULTI_TOKEN_NAMES: dict[str, tuple[Rule, ...]] = {  # FasterDecoding/Medusa, zankner/Hydra
    "medusa": (  # {future token}.{block}.linear and {future token}.{number of blocks}.weight
        (r"^(\d+)\.(\d+)\.linear\.", r"branches.\1.blocks.\2.linear."),
        (r"^(\d+)\.(\d+)\.weight$", r"laws.lm_heads.\1.weight"),
    ),
    "hydra": (  # every second module is a dropout; "embeding" is their spelling
        (r"^prefix_embeding_layer\.(embed_tokens\.weight|.*rotary_emb\.inv_freq)$", ""),
        (r"^prefix_embeding_layer\.(layers\.0\.)?", "prefix_layer."),
        (
            r"^hydra_mlp\.(\d+)\.(\d+)\.",
            lambda found: f"branches.{found[1]}.blocks.{int(found[2]) // 2}.",
        ),
        (r"\.res_connection\.", ".projection."),
        (r"^hydra_lm_head\.(\d+)\.1\.", r"laws.lm_heads.\1."),
    ),
}


def recognise(values: dict[str, Any], names: set[str], place: Path) -> tuple[str, str]:
    """The layout and the head's kind."""
    architectures = values.get("architectures") or [""]
    first, has = (
        str(architectures[0]),
        lambda *starts: any(name.startswith(starts) for name in names),
    )
    for key, known in ((KIND, tuple(HEADS)), (TYPE, tuple(SPECULATORS))):
        if key in values and values[key] not in known:
            raise UserError(f"{place}: {key} is {values[key]!r}; known here: {', '.join(known)}")
    signs = (
        (KIND in values, "aerie", values.get(KIND)),
        (TYPE in values, "speculators", SPECULATORS.get(values.get(TYPE, ""))),
        ("medusa_num_heads" in values or "0.0.linear.weight" in names, "medusa", "medusa"),
        ("hydra_num_heads" in values or has("hydra_mlp."), "hydra", "hydra"),
        ("dflash_config" in values, "z-lab", "block"),
        (first in SGLANG, "sglang", SGLANG.get(first)),
        (
            "draft_vocab_size" in values or FIRST_LAYER in names or has("midlayer."),
            "safeailab",
            "eagle3",
        ),
        ({"fc.weight", "layers.0.self_attn.q_proj.weight"} <= names, "safeailab", "eagle1"),
    )
    for applies, layout, kind in signs:
        if applies:
            return layout, str(kind)
    if has(*WHOLE_MODEL) or first.endswith(("ForCausalLM", "LMHeadModel")):
        fix = "it decodes as it is (--head), and hf upload ships it"
        raise UserError(
            f"{place}: a whole language model and no draft head: a target, or a draft_lm; {fix}"
        )
    raise UserError(f"{place}: not a head in a layout that is known here")


def read_content(
    directory: Path, after_blocks: tuple[int, ...] | None = None
) -> tuple[str, HeadFiles, HeadContent]:
    """Layout, files and content; after_blocks: used if the files name no taps."""
    require_whole_weights(directory)
    place = directory / CONFIG
    values, (weights, tensors) = nested(read_json(place)), read_tensors(directory)
    layout, kind = recognise(values, set(tensors), place)
    files = HeadFiles(place, values, weights, tensors, after_blocks)
    if layout in ("medusa", "hydra"):
        content = _read_multi_token(files, kind)
    elif layout != "aerie":
        content = HEADS[kind].formats.read(files, layout)
    else:
        schema = HEADS[kind].config
        if "after_blocks" in values or schema is Eagle3Config:
            values = {**values, "after_blocks": read_taps(values, None, place)[0]}
        config = configured(schema, values, place)
        content = HeadContent(config, tensors, is_embedding_optional=schema is Eagle3Config)
    return layout, files, content


def _read_multi_token(files: HeadFiles, kind: str) -> HeadContent:
    # config.json often lags behind the weights
    values, place = files.values, files.config_path
    if values.get("grounded_heads") is False or values.get("hidden_state_offset"):
        raise UserError(
            f"{place}: heads with grounded_heads false or a hidden_state_offset are not supported"
        )
    tensors, guesses = renamed(files.tensors, MULTI_TOKEN_NAMES[kind]), []
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
    for name, pattern in (
        ("heads", r"laws\.lm_heads\.(\d+)\.weight"),
        ("layers", r"branches\.0\.blocks\.(\d+)\..*"),
    ):
        numbers = [int(match[1]) for key in tensors if (match := re.fullmatch(pattern, key))]
        count = sizes[f"num_{name}"] = max(numbers, default=-1) + 1
        said = values.get(f"{kind}_num_{name}")
        if said not in (None, count):
            guesses.append(f"{kind}_num_{name} is {said}, the weights have {count}: all are taken")
    if kind == "medusa":
        return HeadContent(configured(MedusaConfig, sizes, place), tensors, tuple(guesses))
    sizes["lm_head_bias"] = "laws.lm_heads.0.bias" in tensors
    if "prefix_layer.mlp.up_proj.weight" in tensors:  # Hydra++
        mlp, keys = (
            tensors[f"prefix_layer.{name}_proj.weight"].shape[0]
            for name in ("mlp.up", "self_attn.k")
        )
        heads = values.get("num_attention_heads")
        if heads is None:
            if width % HEAD_DIM:
                raise UserError(f'{place}: add "num_attention_heads" of the target')
            heads = width // HEAD_DIM
            guesses.append(
                f"the prefix layer is taken to have {heads} attention heads of {HEAD_DIM}, as Vicuna has"
            )
        theta, scaling = read_rope(values, place)
        sizes |= {
            "prefix_layer": True,
            "intermediate_size": mlp,
            "num_attention_heads": heads,
            "num_key_value_heads": keys // (width // heads),
            "head_dim": width // heads,
            "rms_norm_eps": values.get("rms_norm_eps", 1e-6),
            "rope_theta": theta,
            "rope_scaling": scaling,
            "max_position_embeddings": values.get("max_position_embeddings", 2048),
        }
    return HeadContent(configured(HydraConfig, sizes, place), tensors, tuple(guesses))


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
            f"{directory}: holds no weights ({WEIGHTS} or {PICKLE}, whole or with an index of shards)"
        )
    if path.suffix != ".json":
        return path, _read_file(path)
    tensors: dict[str, Tensor] = {}
    for file in sorted(set(storage.weight_map(path).values())):
        tensors |= _read_file(path.parent / file)
    return path, tensors


def write_tensors(directory: Path, tensors: dict[str, Tensor], pickled: bool = False) -> Path:
    path = directory / (PICKLE if pickled else WEIGHTS)
    copies = {
        name: tensor.detach().cpu().clone() for name, tensor in tensors.items()
    }  # a view would save its base
    save = torch.save if pickled else partial(save_file, metadata={"format": "pt"})
    write_atomically(path, lambda temporary: save(copies, temporary))
    return path


def _read_file(path: Path, names_only: bool = False) -> dict[str, Any]:
    if path.suffix not in PICKLED:
        try:
            if not names_only:
                return load_file(path)
            with safe_open(path, framework="pt") as handle:
                return dict.fromkeys(handle.keys())
        except (OSError, SafetensorError) as error:
            raise UserError(
                f"{path}: cannot read the weights: {first_line(error)}; fetch it anew"
            ) from error
    try:
        tensors = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # noqa: BLE001 (a damaged file may raise anything)
        why = f"damaged, or holds more than tensors, which is never loaded; fetch it anew or get {WEIGHTS}"
        raise UserError(f"{path}: cannot read the weights: {why}") from error
    if not isinstance(tensors, dict) or not all(
        isinstance(value, Tensor) for value in tensors.values()
    ):
        raise UserError(f"{path}: is no table of tensors by name; save the state dict alone")
    return {str(name): value for name, value in tensors.items()}
