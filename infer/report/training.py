"""What trainings left behind: how they ended, the size of their weights, their curves."""

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from huggingface_hub import get_local_safetensors_metadata, try_to_load_from_cache
from huggingface_hub.errors import NotASafetensorsRepoError

from aerie.model.hub import is_on_hub
from aerie.model.storage import CONFIG

# of a head's file: copies from its target, and tables
NO_PARAMETERS = ("embed_tokens.weight", "d2t", "t2d")
CURVE_NAMES = re.compile(r"(held_out_)?(loss|greedy_agreement|accuracy_at_\d+|predicted_tau|tau)")


def stopped_by_budget(trainings: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """'stopped by the time budget at step 483 of 1,050', by name of training."""
    words = "stopped by the time budget at step {steps:,} of {total_steps:,}"
    return {
        name: words.format_map(facts)
        for name, facts in trainings.items()
        if facts["ended"] == "budget"
    }


def count_parameters(directory: Path) -> int | None:
    """Parameters in the safetensors of a directory or cached repository; None without any.

    A head's copies from its target do not count.
    """
    cached = try_to_load_from_cache(str(directory), CONFIG) if is_on_hub(directory) else None
    weights = Path(cached).parent if isinstance(cached, str) else directory
    count = 0
    with suppress(OSError, NotASafetensorsRepoError):
        for file in get_local_safetensors_metadata(weights).files_metadata.values():
            for name, tensor in file.tensors.items():
                count += tensor.parameter_count if name not in NO_PARAMETERS else 0
        return count
    return None


def training_curves(metrics: Path) -> dict[str, dict[str, dict[str, list[Any]]]]:
    """metrics.jsonl by kind of training: figure -> its steps and values."""
    curves: dict[str, dict[str, dict[str, list[Any]]]] = {}
    if not metrics.is_file():
        return curves
    for line in metrics.read_text(encoding="utf-8", errors="replace").splitlines():
        with suppress(ValueError, TypeError, KeyError):  # a kill has cut it off
            record = json.loads(line)
            for name in filter(CURVE_NAMES.fullmatch, record):
                of_kind = curves.setdefault(record["kind"], {})
                curve = of_kind.setdefault(name, {"steps": [], "values": []})
                curve["steps"].append(record["step"])
                curve["values"].append(record[name])
    return curves
