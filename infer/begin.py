"""What a measurement depends on, and what it finds of an earlier one: its own answers stay, others are in the way."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from data.inputs import target_inputs
from data.provenance import Stage
from infer.config import MethodConfig, PromptsConfig, SamplingConfig
from infer.tasks import check_sources, prompt_inputs
from model.config import TargetConfig
from model.errors import UserError
from model.files import file_digest, read_json, remove_temporaries, write_json
from model.head_files import CALIBRATOR, digests, find_weights
from model.hub import head_directory, is_on_hub


def begin_bench(stage: Stage, overwrite: bool) -> None:
    """A bench that was killed goes on only under the same inputs."""
    job, records = stage.output / "job.json", stage.output / "records.jsonl"
    same = job.is_file() and read_json(job) == stage.inputs
    if records.is_file() and not same:
        if not overwrite:
            raise UserError(
                f"{records}: holds answers of another recipe, head or target; "
                f"measure anew with --overwrite, or choose another --run"
            )
        records.unlink()
    if not same:
        for left in ("cycles.jsonl", "overhead.json", "suite.json"):
            (stage.output / left).unlink(missing_ok=True)
    remove_temporaries(stage.output)
    write_json(job, stage.inputs)


def inputs_of(
    target: TargetConfig, seed: int, heads: Sequence[str | None], sections: dict[str, Any], prompts: PromptsConfig
) -> dict[str, Any]:
    """Everything that a measurement depends on, by content."""
    used = [head_directory(head) for head in dict.fromkeys(heads) if head is not None]
    return {
        "target": target_inputs(target),
        "head": [digests(head) for head in used],
        **sections,
        "prompts": prompt_inputs(prompts),
        "seed": seed,
    }


def calibrators_of(rows: Sequence[MethodConfig], heads: Sequence[str | None]) -> dict[str, Any]:
    """The digests of the calibrators that rows decode by; nothing where none does. UserError where one is missing."""
    asked = {head for row, head in zip(rows, heads, strict=True) if head is not None and row.tree.calibrated}
    paths = {head: head_directory(head) / CALIBRATOR for head in sorted(asked)}
    for path in paths.values():
        if not path.is_file():
            raise UserError(
                f"{path}: no such file, and tree.calibrated needs it; fit it with: "
                f"python infer/main.py calibrate --config RECIPE"
            )
    return {"calibrators": {head: file_digest(path) for head, path in paths.items()}} if paths else {}


def check_inputs(target: TargetConfig, heads: Sequence[str | None], prompts: PromptsConfig) -> None:
    """Everything that can be refused before torch is imported."""
    target_inputs(target)
    check_sources(prompts)
    check_weights(heads)


def check_settings(settings: dict[str, Any]) -> None:
    """UserError for sampling settings, by transformers' names, that no sampler can have; null: not given."""
    given = {name: value for name, value in settings.items() if value is not None}
    if given.pop("max_new_tokens", 1) < 1:
        raise UserError(f"--max-new-tokens: must be at least 1, not {settings['max_new_tokens']}")
    try:
        SamplingConfig(**given)
    except ValueError as error:
        option = next((name for name in given if str(error).startswith(name)), "sampling").replace("_", "-")
        raise UserError(f"--{option}: {error}") from error
    law = next((name for name in ("top_k", "top_p") if name in given), None)
    if law is not None and not given.get("temperature"):
        option = law.replace("_", "-")
        raise UserError(f"--{option}: shapes what is drawn, and greedy decoding draws nothing; add --temperature 1")


def check_weights(heads: Sequence[str | None]) -> None:
    """UserError for a head's directory without weights."""
    for head in heads:
        if head is not None and not is_on_hub(head) and find_weights(Path(head)) is None:
            raise UserError(
                f"{head}: holds no weights; train the head with: accelerate launch train/main.py --config RECIPE"
            )
