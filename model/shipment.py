"""What is shipped to the Hub: named files and a card, never conversations; refused where nothing was measured."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from model.card import CardFacts, measured_rows, render_card
from model.errors import UserError
from model.files import read_json
from model.head_files import CONFIG, digests, find_weights
from model.hub import HUB_ID
from model.inspection import inspect_head

FILES = (CONFIG, "recipe.yaml", "provenance.json")  # beside the weights; nothing that is not named here is shipped


@dataclass(frozen=True)
class Permissions:
    """What the user allows although it is usually a mistake."""

    without_results: bool = False
    uncommitted: bool = False


@dataclass(frozen=True)
class Shipment:
    """Name in the repository -> local file or content, and what lies beside the head and stays."""

    files: dict[str, Path | bytes]
    left_behind: tuple[str, ...]
    notes: tuple[str, ...] = ()

    def text(self) -> str:
        """For printing: every file with its size."""
        lines = [f"  {_size(file):>16,} bytes  {name}" for name, file in sorted(self.files.items())]
        stays = f"\nstays here: {', '.join(self.left_behind)}" if self.left_behind else ""
        return "\n".join(lines) + stays


@dataclass(frozen=True)
class Order:
    """What to ship where. run is the directory of the reports; default: the run that the head lies in, if it does."""

    directory: Path
    repo: str
    run: Path | None = None
    target_name: str | None = None
    licence: str | None = None


def pack(order: Order, permissions: Permissions, is_dirty: bool | None) -> Shipment:
    """The shipment; is_dirty says whether this checkout differs from its commit.

    UserError for a head that does not load, for one without measured results, for results of another head, and for
    code that no commit holds.
    """
    directory = order.directory
    found = inspect_head(directory)
    if found["problems"]:
        raise UserError(found["problems"][0])
    run = order.run or (directory.parent.parent if (directory.parent.parent / "report").is_dir() else None)
    summary = _summary(directory, run)
    provenance = _table(directory / "provenance.json")
    has_results = bool(measured_rows(summary, (found["kind"],)))
    if not has_results and not permissions.without_results:
        raise UserError(
            f"{directory}: no measured results (RUN/report/summary.json); measure with: python infer/main.py bench and "
            f"report, name the run with --run, or ship without: --without-results"
        )
    if not permissions.uncommitted:
        _require_committed(directory, provenance, is_dirty)
    calibration = {} if run is None else _table(run / "calibration" / "calibration.json")
    recipe_place = directory / "recipe.yaml"
    recipe = yaml.safe_load(recipe_place.read_text(encoding="utf-8")) if recipe_place.is_file() else {}
    target = order.target_name or found["target"]["recorded"]
    if target is None:
        raise UserError(f"{directory}: does not say which target it is for; name it with --target-name")
    card = CardFacts(order.repo, found, str(target), provenance, recipe or {}, summary, calibration, order.licence)
    files: dict[str, Path | bytes] = {path.name: path for path in _head_files(directory)}
    if run is not None and calibration:
        files["calibration.json"] = run / "calibration" / "calibration.json"
    if run is not None and has_results:
        files["summary.json"] = run / "report" / "summary.json"
    files["README.md"] = render_card(card).encode()
    stays = tuple(sorted(path.name for path in directory.iterdir() if path.name not in files))
    notes = [] if HUB_ID.fullmatch(str(target)) else [f"{target} is no Hub id, so the card has no base_model"]
    if order.licence is None:
        notes.append("no --license: the card states none")
    return Shipment(files, stays, tuple(notes))


def _head_files(directory: Path) -> list[Path]:
    weights = find_weights(directory)
    assert weights is not None
    shards = []
    if weights.name.endswith(".index.json"):
        shards = [directory / name for name in sorted(set(read_json(weights)["weight_map"].values()))]
    return [path for path in (weights, *shards, *(directory / name for name in FILES)) if path.is_file()]


def _summary(directory: Path, run: Path | None) -> dict[str, Any]:
    """report/summary.json of the run; UserError where it was measured with another head."""
    if run is None:
        return {}
    summary = _table(run / "report" / "summary.json")
    measured = _table(run / "bench" / "provenance.json").get("inputs", {}).get("head")
    if not summary or not measured:
        return summary
    origin = _table(directory / CONFIG).get("aerie", {}).get("exported_from", {}).get("files", {})
    heads = measured if isinstance(measured, list) else [measured]
    if not any(head.items() <= known.items() for head in heads for known in (digests(directory), origin)):
        raise UserError(
            f"{run / 'bench'}: was measured with another head than {directory}; measure this one with: "
            f"python infer/main.py bench --overwrite, then report"
        )
    return summary


def _require_committed(directory: Path, provenance: dict[str, Any], is_dirty: bool | None) -> None:
    fix = "commit and train again, or ship it all the same: --uncommitted"
    if provenance.get("dirty"):
        raise UserError(f"{directory}: was trained from an uncommitted tree (provenance.json); {fix}")
    if is_dirty:
        raise UserError("this checkout differs from its commit, which the card names; commit, or use --uncommitted")


def _table(path: Path) -> dict[str, Any]:
    """A JSON file's table, empty where there is no such file."""
    if not path.is_file():
        return {}
    found = read_json(path)
    return found if isinstance(found, dict) else {}


def _size(file: Path | bytes) -> int:
    return len(file) if isinstance(file, bytes) else file.stat().st_size
