"""What trained weights depend on, and whether an output still is what its recipe would train: told without torch."""

from pathlib import Path
from typing import Any

from aerie.configs.errors import UserError
from aerie.configs.read import as_dict
from aerie.configs.schema.recipe import Recipe, RunPaths
from aerie.data.stage import COMMAND, changed_since, conversation_inputs, sampled_digest, target_inputs
from aerie.model.hub import head_directory
from aerie.model.storage import FILE, Stage, digest, sound_record

LOGGING_ONLY = ("log_every", "save_every", "keep_last", "trackers", "profile_steps")


def state_name(recipe: Recipe) -> str:
    """The name of a training: a run may hold the small LM that is its target, and one that drafts for it."""
    distill = getattr(recipe.train, "distill", None)
    return recipe.head.kind if distill is None else f"{recipe.head.kind}-{distill}"


def needs_target(recipe: Recipe) -> bool:
    """Whether training needs the target's states, and not only tokens."""
    return recipe.head.kind != "draft_lm" or state_name(recipe) != "draft_lm"


def reads_cache(recipe: Recipe) -> bool:
    """Whether training reads the target's states from a feature cache."""
    return needs_target(recipe) and recipe.features.mode != "online"


def stage_inputs(recipe: Recipe) -> dict[str, Any]:
    """Everything that the trained weights depend on, JSON-ready; a feature cache stands for its data."""
    # Settings that move no weight stay out, so that a finished training is whole also with other ones.
    section = {name: value for name, value in as_dict(recipe.train).items() if name not in LOGGING_ONLY}
    inputs: dict[str, Any] = {"target": target_inputs(recipe.target), "head": as_dict(recipe.head), "train": section}
    features = as_dict(recipe.features)
    if reads_cache(recipe):
        # The cache's own inputs hold the conversations, the target and the states' dtype.
        made = cache_record(recipe)
        inputs["features"] = None if made is None else made["inputs_digest"]
        asked = {name: features[name] for name in ("after_blocks", "shuffle_shards")}
        inputs |= {name: value for name, value in asked.items() if value is not None}
    else:
        inputs |= {"data": as_dict(recipe.data), "conversations": conversation_inputs(recipe.data.conversations)}
        if needs_target(recipe):
            inputs["features"] = {name: features[name] for name in ("mode", "after_blocks", "dtype")}
    if recipe.head.init_from is not None:
        place = head_directory(recipe.head.init_from)
        files = sorted(path for kind in ("config.json", "*.safetensors", "*.bin") for path in place.glob(kind))
        inputs["init_from"] = {path.name: sampled_digest(path) for path in files}
    # Measured tau chooses the weights, and it is that of this tree.
    if getattr(recipe.train, "measure_prompts", 0):
        inputs["tree"] = as_dict(recipe.tree)
    return inputs


def cache_record(recipe: Recipe) -> dict[str, Any] | None:
    """The provenance of the feature cache that training reads, None without one; UserError where it is damaged."""
    path = RunPaths(Path(recipe.run)).features / FILE
    if not reads_cache(recipe) or not path.is_file():
        return None
    if record := sound_record(path.parent):
        return record
    raise UserError(f"{path}: cannot be read; write it anew with: {COMMAND} --overwrite")


def changed_since_cached(recipe: Recipe, stage: Stage) -> str | None:
    """The name of a file of conversations or of the target that has changed since the feature cache was made of it.

    None for a cache of another section `data`: opening it tells of that.
    """
    record = cache_record(recipe)
    if record is None or digest(record["inputs"]["data"]) != digest(as_dict(recipe.data)):
        return None
    return changed_since(record["inputs"], stage.inputs["target"], conversation_inputs(recipe.data.conversations))


def is_whole(recipe: Recipe, stage: Stage) -> bool:
    """Whether nothing is left to do: the output is whole, and so is what it was made of."""
    # A cache of another section data is another one, though its digest may stand in the output's inputs.
    record = cache_record(recipe)
    same_data = record is None or digest(record["inputs"]["data"]) == digest(as_dict(recipe.data))
    return stage.is_whole() and same_data and changed_since_cached(recipe, stage) is None


def has_target(recipe: Recipe) -> bool:
    """False while the stage before has not written the target (or its tokenizer): then nothing can be whole."""
    path = recipe.target.path
    looks_local = Path(path).is_absolute() or path.startswith(".") or path.count("/") > 1
    return Path(path).is_dir() or not looks_local
