"""The shell commands that start vLLM servers of the target, for its answers or its states.

One server cannot give both.
"""

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch

from aerie.configs.errors import UserError
from aerie.configs.schema.heads import TargetConfig
from aerie.configs.schema.recipe import Recipe
from aerie.data.connector import CONNECTOR
from aerie.model.storage import template_path
from aerie.model.target_files import context_of, load_config, taps_of, weights_size

FITS_BYTES = 4 * 10**9  # of weights; a target up to this size is loaded here to compare states
USUAL_PORT = 8000  # vLLM's default


def answers_command(target: TargetConfig, url: str = "") -> str:
    """The command that starts a server of the target's answers at the URL's port."""
    words = _shared_words(target, url)
    if target.chat_template is not None:
        words += ["--chat-template", str(template_path(target.chat_template).absolute())]
    return shlex.join(words)


def states_command(
    target: TargetConfig,
    after_blocks: Sequence[int],
    states: str,
    longest: int | None = None,
    is_cpu: bool | None = None,
    url: str = "",
) -> str:
    """The command that starts a server of the target's states after these blocks.

    states: the folder that it writes to. longest: tokens of the longest row. is_cpu: whether it
    runs vLLM's CPU build (None: if this machine has no GPU).
    """
    text_config = load_config(target).get_text_config()
    ids = state_ids(target, after_blocks, text_config.num_hidden_layers)
    speculative = {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": [*ids]}},
    }
    transfer: dict[str, Any] = {
        "kv_connector": "ExampleHiddenStatesConnector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"shared_storage_path": str(Path(states).absolute())},
    }
    words = _shared_words(target, url)
    context = context_of(text_config)
    if longest is not None and (context is None or longest < context):
        words += ["--max-model-len", str(longest + 1)]  # a request generates one token
    environment = ""
    if not torch.cuda.is_available() if is_cpu is None else is_cpu:
        transfer |= {"kv_connector": CONNECTOR.name, "kv_connector_module_path": CONNECTOR.module}
        environment = f"PYTHONPATH={shlex.quote(str(CONNECTOR.folder))} "
    words += ["--disable-uvicorn-access-log"]  # which writes a line for each row
    words += ["--speculative-config", json.dumps(speculative)]
    words += ["--kv-transfer-config", json.dumps(transfer)]
    return environment + shlex.join(words)


def _shared_words(target: TargetConfig, url: str) -> list[str]:
    """The words that servers of answers and of states have in common."""
    words = ["vllm", "serve", target.path]
    try:
        port = urlsplit(url).port
    except ValueError as error:
        raise UserError(f"{url}: {error}; write a server as http://HOST:PORT/v1") from error
    if port not in (None, USUAL_PORT):
        words += ["--port", str(port)]
    if target.revision is not None:
        words += ["--revision", target.revision]
    if target.trust_remote_code:
        words += ["--trust-remote-code"]
    stored = getattr(load_config(target).get_text_config(), "dtype", None)
    dtype = target.dtype if target.dtype != "auto" else stored
    # vLLM's default narrows float32.
    return [*words, "--dtype", str(dtype or "auto").removeprefix("torch.")]


def state_ids(
    target: TargetConfig, after_blocks: Sequence[int], num_blocks: int
) -> tuple[int, ...]:
    """vLLM's ids of the states to ask for; id k is the state after k blocks, before any final norm.

    They include the embedding (id 0) if this machine cannot run the target for a comparison.
    """
    compared = set[int]() if can_run_here(target) else {0}
    return tuple(sorted({*after_blocks, num_blocks} | compared))


def can_run_here(target: TargetConfig) -> bool:
    """Whether the target's weights are here and small enough to be loaded for a comparison."""
    if not Path(target.path).is_dir() or not 0 < weights_size(target) <= FITS_BYTES:
        return False
    # Quantised weights may need a GPU.
    return getattr(load_config(target), "quantization_config", None) is None


# --- of a recipe's stages -------------------------------------------------------------------------


def urls_of_stage(recipe: Recipe, stage: str) -> tuple[str, ...]:
    """The servers that a stage asks; () if it asks none."""
    states = recipe.features.server
    is_cached = recipe.features.mode == "cached"
    if stage == "distill" and recipe.distill is not None and recipe.distill.server is not None:
        return recipe.distill.server.urls
    if states is not None and stage == ("features" if is_cached else "train"):
        return states.urls
    return ()


def command_of_stage(recipe: Recipe, stage: str, url: str = "") -> str:
    """The command that starts a server which this stage asks (urls_of_stage), at the URL's port."""
    if stage == "distill":
        return answers_command(recipe.target, url)
    assert recipe.features.server is not None
    num_blocks = load_config(recipe.target).get_text_config().num_hidden_layers
    taps = taps_of(recipe, num_blocks)
    states = recipe.features.server.states
    return states_command(recipe.target, taps, states, recipe.data.max_length, url=url)
