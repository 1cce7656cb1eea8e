"""What is shipped to the Hub: named files and a card, never conversations; refused where nothing was measured."""

import json
import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from aerie.configs.errors import UserError
from aerie.model.card import (
    CardFacts,
    json_table,
    last_part,
    measured,
    measured_rows,
    public,
    public_names,
    render_card,
)
from aerie.model.checkpoint import head_facts
from aerie.model.export import TargetFacts
from aerie.model.formats.layouts import is_whole_model, read_config, recognise
from aerie.model.hub import is_on_hub, readable_errors
from aerie.model.inspection import inspect_head
from aerie.model.storage import CALIBRATOR, CONFIG, content_digest, digests, find_weights, read_json
from aerie.model.weights import tensor_names


@dataclass(frozen=True)
class Permissions:
    """What the user allows although it is usually a mistake."""

    without_results: bool = False
    uncommitted: bool = False


@dataclass(frozen=True)
class Shipment:
    """Name in the repository -> local file or content, and what lies beside the head and stays.

    The weights go as they are; the records with public names for the target, the conversations and the run.
    """

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
    """What to ship where. run is the directory of the reports; default: the run that the head lies in, if it does.

    target is what the head is checked against, and after_blocks are the taps of a head that names none.
    """

    directory: Path
    repo: str
    run: Path | None = None
    target_name: str | None = None
    licence: str | None = None
    target: TargetFacts | None = None
    after_blocks: tuple[int, ...] | None = None


def pack(order: Order, permissions: Permissions, is_dirty: bool | None) -> Shipment:
    """The shipment; is_dirty says whether this checkout differs from its commit.

    UserError for a head that does not load or does not fit its target, for one without measured results, for results
    of another head, and for code that no commit holds.
    """
    directory = order.directory
    _require_head(directory, order.repo)
    found = inspect_head(directory, order.target, order.after_blocks)
    if found["problems"]:
        raise UserError(found["problems"][0])
    if found["taps_open"] == "ambiguous":
        raise UserError(
            f"{directory}: numbers its taps in a way that only its target tells; give it with --target, or the taps "
            f"with --after-blocks"
        )
    run = order.run or (directory.parent.parent if (directory.parent.parent / "report").is_dir() else None)
    results = measured(directory, run, permissions.without_results)
    has_results = bool(measured_rows(results.summary, (found["kind"],)))
    if not has_results and not permissions.without_results:
        raise UserError(
            f"{directory}: no measured results (RUN/report/summary.json); measure with: python infer/main.py bench and "
            f"report, name the run with --run, or ship without: --without-results"
        )
    places = {name: directory / name for name in (CONFIG, "recipe.yaml", "provenance.json")}
    if results.calibration is not None:
        places["calibration.json"] = results.calibration
    found_there = {name: _record(place) for name, place in places.items() if place.is_file()}
    records = dict(found_there)
    if run is not None and has_results:
        places["summary.json"] = run / "report" / "summary.json"
        found_there["summary.json"], records["summary.json"] = json_table(places["summary.json"]), results.summary
    if not permissions.uncommitted:
        _require_committed(directory, records.get("provenance.json", {}), is_dirty)
    target, notes = _target(order, found)
    notes = [*results.notes, *notes]
    names = public_names(target, {**records, "summary.json": results.summary})
    told = {name: public(entry, names) for name, entry in records.items()}
    changed = sorted(name for name in records if told[name] != records[name])
    if changed:
        notes.append(f"local paths in {', '.join(changed)} are shipped as public names; the files here stay")
    files: dict[str, Path | bytes] = {path.name: path for path in _weights(directory)}
    files |= {
        name: places[name] if told[name] == found_there[name] else _written(name, told[name])
        for name in records
        if told[name]
    }
    files |= _calibrator(directory, files[CONFIG])
    files["README.md"] = _card(order, found, target, told, public(results.summary, names))
    stays = tuple(sorted(path.name for path in directory.iterdir() if path.name not in files))
    if order.licence is None:
        notes.append("no --license: the card states none")
    return Shipment(files, stays, tuple(notes))


def _card(order: Order, found: dict[str, Any], target: str, told: dict[str, Any], summary: dict[str, Any]) -> bytes:
    """README.md; told and summary hold public names alone."""
    facts = CardFacts(
        repo=order.repo,
        found=found,
        target=target,
        provenance=told.get("provenance.json", {}),
        recipe=told.get("recipe.yaml", {}),
        summary=summary,
        calibration=told.get("calibration.json", {}),
        licence=order.licence,
        is_converted="exported_from" in head_facts(order.directory),
    )
    return render_card(facts).encode()


def _require_head(directory: Path, repo: str) -> None:
    """UserError for a whole language model, which is shipped as any other."""
    values, names = read_config(directory), tensor_names(directory)
    try:
        recognise(values, names, directory / CONFIG)
    except UserError as error:
        if not is_whole_model(values, names):
            raise
        raise UserError(
            f"{directory}: a whole language model (a draft_lm, or a target); push ships draft heads; ship it as any "
            f"model: hf upload {repo} {directory} --exclude provenance.json --exclude recipe.yaml"
        ) from error


def _calibrator(directory: Path, config: Path | bytes) -> dict[str, Path | bytes]:
    """calibrator.json for the head as it is shipped, where there is one that was fitted for it as it lies here.

    It names the head by digests, and the config.json that is shipped may be another.
    """
    place, known = directory / CALIBRATOR, digests(directory)
    found = json_table(place)
    if not found or found.get("head") != known:
        return {}
    if isinstance(config, Path):
        return {CALIBRATOR: place}
    return {CALIBRATOR: _written(CALIBRATOR, {**found, "head": {**known, CONFIG: content_digest(config)}})}


def _target(order: Order, found: dict[str, Any]) -> tuple[str, list[str]]:
    """What the world is told to load as the target, and notes; UserError where nobody says."""
    named = order.target_name or found["target"]["recorded"] or found["target"].get("given")
    if named is None:
        raise UserError(
            f"{order.directory}: does not say which target it is for; name it with --target-name, or "
            f"give it with --target"
        )
    if is_on_hub(named):
        return named, []
    name = last_part(named)
    how = "name it as on the Hub with --target-name user/name"
    return name, [f"the target is a local path: the card calls it {name!r} and has no base_model; {how}"]


def _written(name: str, entry: dict[str, Any]) -> bytes:
    """A record as its file holds it."""
    if name.endswith(".yaml"):
        return yaml.safe_dump(entry, sort_keys=False, allow_unicode=True).encode()
    return (json.dumps(entry, indent=1, ensure_ascii=False) + "\n").encode()


def _record(place: Path) -> dict[str, Any]:
    """A record's table, empty for anything else; UserError for what cannot be parsed."""
    if place.suffix != ".yaml":
        return json_table(place)
    try:
        found = yaml.safe_load(place.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{place}: not YAML ({str(error).splitlines()[0]}); put the run's own back") from error
    return found if isinstance(found, dict) else {}


def _weights(directory: Path) -> list[Path]:
    """The file of the weights, or the index and its shards."""
    weights = find_weights(directory)
    assert weights is not None
    shards = []
    if weights.name.endswith(".index.json"):
        shards = [directory / name for name in sorted(set(read_json(weights)["weight_map"].values()))]
    return [weights, *shards]


def _require_committed(directory: Path, provenance: dict[str, Any], is_dirty: bool | None) -> None:
    fix = "commit and train again, or ship it all the same: --uncommitted"
    if provenance.get("dirty"):
        raise UserError(f"{directory}: was trained from an uncommitted tree (provenance.json); {fix}")
    if is_dirty:
        raise UserError("this checkout differs from its commit, which the card names; commit, or use --uncommitted")


def _size(file: Path | bytes) -> int:
    return len(file) if isinstance(file, bytes) else file.stat().st_size


TAG = "aerie"  # in the front matter of every card of this project
ANY_WEIGHTS = re.compile(r".*\.(safetensors|bin|pt|pth|ckpt|gguf|h5|msgpack|onnx)(\.index\.json)?")
WEIGHTS = re.compile(
    r"model(-\d+-of-\d+)?\.safetensors|pytorch_model(-\d+-of-\d+)?\.bin|(medusa|hydra)_lm_head\.pt"
    r"|(model\.safetensors|pytorch_model\.bin)\.index\.json"
)
FRONT = re.compile(r"\A---\r?\n(.*?)\r?\n---", re.DOTALL)  # a card's front matter
RECORDS = ("recipe.yaml", "provenance.json", "calibration.json", CALIBRATOR, "summary.json")


@dataclass(frozen=True)
class Repository:
    """A model repository at a revision, as a push finds it. A branch that is not there yet begins as main."""

    name: str
    revision: str | None = None
    exists: bool = False
    is_private: bool = False
    files: tuple[str, ...] = ()
    is_ours: bool = False  # its card says so: an earlier push wrote it
    has_blank_card: bool = False  # at most a licence and no word, as the Hub makes it with a new repository

    def require_visibility(self, private: bool) -> None:
        """UserError where the user asked for a private repository and this one is public."""
        if private and self.exists and not self.is_private:
            raise UserError(
                f"{self.name}: exists and is public, and --private makes only a new one private; make it private on "
                f"its settings page first, or name a new one"
            )

    def removals(self, shipped: Collection[str]) -> tuple[str, ...]:
        """What an earlier push put there and this one does not: weights, their indexes and the records beside them.

        UserError for a stranger's repository.
        """
        self._require_ours(shipped)
        if not self.is_ours:
            return ()
        earlier = (name for name in self.files if WEIGHTS.fullmatch(name) or name in RECORDS)
        return tuple(sorted(name for name in earlier if name not in shipped))

    def _require_ours(self, shipped: Collection[str]) -> None:
        """UserError for a card, weights or files to be replaced that no push of this project put there."""
        if self.is_ours:
            return
        card = {"README.md"}
        theirs = {name for name in self.files if ANY_WEIGHTS.fullmatch(name) or name in shipped} | card
        theirs &= set(self.files) - (card if self.has_blank_card else set())
        if theirs:
            raise UserError(
                f"{self.name}: is somebody else's: it holds {', '.join(sorted(theirs)[:4])}, which no push of this "
                f'project put there (its card has no tag "{TAG}"); name another repository, or empty this one'
            )


def upload(repository: Repository, files: dict[str, Path | bytes], private: bool, message: str) -> str:
    """Ships files (name in the repository -> content) in one commit and returns the address of the commit.

    The same commit removes what an earlier push left. The repository, and its branch, are made where they are missing.
    A commit is whole or absent, and what was uploaded before a break is known to the Hub by its hash: the same call
    goes on from there. UserError before anything is sent for a public repository that was to be private, and for a
    stranger's.
    """
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

    repository.require_visibility(private)
    removed, api, name, revision = repository.removals(files), HfApi(), repository.name, repository.revision
    with readable_errors(name, is_push=True):
        if not repository.exists:
            api.create_repo(name, private=private or None, exist_ok=not private)
        if revision is not None:
            api.create_branch(name, branch=revision, exist_ok=True)
        operations: list[Any] = [
            CommitOperationAdd(path_in_repo=path, path_or_fileobj=str(file) if isinstance(file, Path) else file)
            for path, file in sorted(files.items())
        ]
        operations += [CommitOperationDelete(path_in_repo=path) for path in removed]
        commit: Any = api.create_commit(name, operations, commit_message=message, revision=revision)
    return str(commit.commit_url)


def look(name: str, revision: str | None = None) -> Repository:
    """The repository as it is now, asked of the Hub; nothing is changed."""
    from huggingface_hub import HfApi, errors, hf_hub_download

    api = HfApi()
    with readable_errors(name, is_push=True):
        try:
            try:
                found = api.model_info(name, revision=revision)
            except errors.RevisionNotFoundError:
                found = api.model_info(name)
        except errors.RepositoryNotFoundError:
            return Repository(name, revision)
        files = tuple(sibling.rfilename for sibling in found.siblings or ())
        card = ""
        if "README.md" in files:
            place = hf_hub_download(name, "README.md", revision=found.sha)
            card = Path(place).read_text(encoding="utf-8", errors="replace")
    front = _front(card)
    is_blank = not FRONT.sub("", card).strip() and front.keys() <= {"license"}
    tags = front.get("tags")
    is_ours = isinstance(tags, list) and TAG in tags
    return Repository(name, revision, True, bool(found.private), files, is_ours, is_blank)


def _front(card: str) -> dict[str, Any]:
    """A card's front matter, empty where there is none or it cannot be read."""
    front = FRONT.match(card)
    try:
        values = yaml.safe_load(front[1]) if front else None
    except yaml.YAMLError:
        values = {"unreadable": True}
    return values if isinstance(values, dict) else {}
