"""Ships a head to the Hub: weights as they are, records without local paths, and a model card made from both.

Refused are a head that does not load, results that were measured with another head, code that no commit holds, and a
repository that no push of this project has made. Conversations never leave the machine.
"""

import json
import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from aerie.configs.errors import UserError
from aerie.model.card import json_table, last_part, measured_rows, public, public_names, render_card
from aerie.model.export import TargetFacts
from aerie.model.formats.layouts import is_whole_model, read_config, recognise
from aerie.model.hub import is_on_hub, readable_errors
from aerie.model.inspection import inspect_head
from aerie.model.storage import CALIBRATOR, CONFIG, content_digest, digests, find_weights, read_json
from aerie.model.weights import tensor_names

TAG = "aerie"  # in the front matter of every card of this project
MEASURE = "measure with: aerie bench --overwrite, then aerie report; or ship without results: --without-results"
RECORDS = ("recipe.yaml", "provenance.json", "calibration.json", CALIBRATOR, "summary.json")
ANY_WEIGHTS = re.compile(r".*\.(safetensors|bin|pt|pth|ckpt|gguf|h5|msgpack|onnx)(\.index\.json)?")
OUR_WEIGHTS = re.compile(
    r"model(-\d+-of-\d+)?\.safetensors|pytorch_model(-\d+-of-\d+)?\.bin|(medusa|hydra)_lm_head\.pt"
    r"|(model\.safetensors|pytorch_model\.bin)\.index\.json"
)


@dataclass(frozen=True)
class Order:
    """What to ship where, and what the user allows although it is usually a mistake (the last two).

    run is the directory of the reports (None: the run that the head lies in). target is what the head is checked
    against, after_blocks are the taps of a head that names none.
    """

    directory: Path
    repo: str
    run: Path | None = None
    target_name: str | None = None
    licence: str | None = None
    target: TargetFacts | None = None
    after_blocks: tuple[int, ...] | None = None
    without_results: bool = False
    uncommitted: bool = False


@dataclass(frozen=True)
class Shipment:
    """Name in the repository -> local file or content, and what lies beside the head and stays."""

    files: dict[str, Path | bytes]
    left_behind: tuple[str, ...]
    notes: tuple[str, ...] = ()

    def text(self) -> str:
        """Every file with its size, for printing."""
        sizes = {name: len(f) if isinstance(f, bytes) else f.stat().st_size for name, f in sorted(self.files.items())}
        stays = f"\nstays here: {', '.join(self.left_behind)}" if self.left_behind else ""
        return "\n".join(f"  {size:>16,} bytes  {name}" for name, size in sizes.items()) + stays


def pack(order: Order, is_dirty: bool | None) -> Shipment:
    """The files of a push. is_dirty: this checkout differs from its commit. UserError for what is refused."""
    directory = order.directory
    _require_head(directory, order.repo)
    head = inspect_head(directory, order.target, order.after_blocks)
    if head["problems"]:
        raise UserError(head["problems"][0])
    if head["taps_open"] == "ambiguous":
        raise UserError(
            f"{directory}: only its target tells how its taps are numbered; give it with --target, or the taps with "
            f"--after-blocks"
        )
    run = order.run or (directory.parent.parent if (directory.parent.parent / "report").is_dir() else None)
    summary, calibration, notes = _results(order, run)
    has_results = bool(measured_rows(summary, (head["kind"],)))
    if not has_results and not order.without_results:
        raise UserError(f"{directory}: no measured results (RUN/report/summary.json), or no --run; {MEASURE}")
    places = {name: directory / name for name in (CONFIG, "recipe.yaml", "provenance.json")}
    if calibration is not None:
        places["calibration.json"] = calibration
    originals = {name: _record(place) for name, place in places.items() if place.is_file()}
    records = dict(originals)
    if run is not None and has_results:
        places["summary.json"] = run / "report" / "summary.json"
        originals["summary.json"], records["summary.json"] = json_table(places["summary.json"]), summary
    fix = "commit and train again, or ship it all the same: --uncommitted"
    if not order.uncommitted and records.get("provenance.json", {}).get("dirty"):
        raise UserError(f"{directory}: was trained from an uncommitted tree (provenance.json); {fix}")
    if not order.uncommitted and is_dirty:
        raise UserError(f"this checkout differs from its commit, which the card names; {fix}")
    target = order.target_name or head["target"]["recorded"] or head["target"].get("given")
    if target is None:
        raise UserError(f"{directory}: its files name no target; name it with --target-name, or give it with --target")
    if not is_on_hub(target):
        target = last_part(target)
        notes.append(
            f"the target is a local path: the card has no base_model; name it with --target-name user/{target}"
        )
    names = public_names(target, {**records, "summary.json": summary})
    cleaned = {name: public(record, names) for name, record in records.items()}
    changed = sorted(name for name in records if cleaned[name] != records[name])
    if changed:
        notes.append(f"local paths in {', '.join(changed)} are shipped as public names; the files here stay")
    files: dict[str, Path | bytes] = {path.name: path for path in _weights(directory)}
    for name, record in cleaned.items():
        if record:
            files[name] = places[name] if record == originals[name] else _written(name, record)
    files |= _calibrator(directory, files[CONFIG])
    card = render_card(order.repo, head, target, cleaned, public(summary, names), order.licence)
    files["README.md"] = card.encode()
    if order.licence is None:
        notes.append("no --license: the card states none")
    stays = sorted(path.name for path in directory.iterdir() if path.name not in files)
    return Shipment(files, tuple(stays), tuple(notes))


def _require_head(directory: Path, repo: str) -> None:
    """UserError for what is no draft head; a whole language model is shipped as any other."""
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


def _results(order: Order, run: Path | None) -> tuple[dict[str, Any], Path | None, list[str]]:
    """The run's summary and calibration.json as far as they were measured with this head, and notes.

    provenance.json of bench/ and calibration/ hold the digests of the heads that were measured.
    """
    if run is None:
        return {}, None, []
    notes, summary = [], json_table(run / "report" / "summary.json")
    doubt = _doubt(order.directory, run / "bench") if summary else None
    if doubt is not None:
        if not order.without_results:
            raise UserError(f"{doubt}; {MEASURE}")
        notes.append(f"report/summary.json left out: {doubt}")
        summary = {}
    calibration = run / "calibration" / "calibration.json"
    doubt = _doubt(order.directory, run / "calibration")
    if doubt is None and calibration.is_file():
        return summary, calibration, notes
    if calibration.is_file() or "calibration" in summary:
        notes.append(f"calibration left out: {doubt or f'{calibration} is missing'}")
    return {name: value for name, value in summary.items() if name != "calibration"}, None, notes


def _doubt(directory: Path, stage: Path) -> str | None:
    """Why a stage's output was not measured with this head, or with the head that it was exported from."""
    inputs = json_table(stage / "provenance.json").get("inputs")
    used = inputs.get("head") if isinstance(inputs, dict) else None
    heads = [head for head in (used if isinstance(used, list) else [used]) if isinstance(head, dict) and head]
    if not heads:
        return f"{stage}: holds no record of the head that was measured (provenance.json)"
    origin = (json_table(directory / CONFIG).get("aerie") or {}).get("exported_from") or {}
    known = [digests(directory), origin.get("files") or {}]
    if any(head.items() <= files.items() for head in heads for files in known):
        return None
    return f"{stage}: was measured with another head than {directory}"


def _calibrator(directory: Path, config: Path | bytes) -> dict[str, Path | bytes]:
    """calibrator.json where it was fitted for this head, with the digest of the config.json that is shipped."""
    fitted, known = json_table(directory / CALIBRATOR), digests(directory)
    if not fitted or fitted.get("head") != known:
        return {}
    if isinstance(config, Path):
        return {CALIBRATOR: directory / CALIBRATOR}
    return {CALIBRATOR: _written(CALIBRATOR, {**fitted, "head": {**known, CONFIG: content_digest(config)}})}


def _record(place: Path) -> dict[str, Any]:
    """A JSON or YAML record's table, empty for anything else; UserError for what cannot be parsed."""
    if place.suffix != ".yaml":
        return json_table(place)
    try:
        values = yaml.safe_load(place.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{place}: not YAML ({str(error).splitlines()[0]}); put the run's own back") from error
    return values if isinstance(values, dict) else {}


def _written(name: str, record: dict[str, Any]) -> bytes:
    if name.endswith(".yaml"):
        return yaml.safe_dump(record, sort_keys=False, allow_unicode=True).encode()
    return (json.dumps(record, indent=1, ensure_ascii=False) + "\n").encode()


def _weights(directory: Path) -> list[Path]:
    """The file of the weights, or the index and its shards."""
    weights = find_weights(directory)
    assert weights is not None
    if not weights.name.endswith(".index.json"):
        return [weights]
    return [weights, *(directory / name for name in sorted(set(read_json(weights)["weight_map"].values())))]


@dataclass(frozen=True)
class Repository:
    """A model repository at a revision, as a push finds it. A branch that is not there yet begins as main."""

    name: str
    revision: str | None = None
    exists: bool = False
    is_private: bool = False
    files: tuple[str, ...] = ()
    is_ours: bool = False  # its card has this project's tag: an earlier push wrote it
    has_blank_card: bool = False  # at most a licence, as the Hub makes it with a new repository

    def require_visibility(self, private: bool) -> None:
        """UserError where the user asked for a private repository and this one is public."""
        if private and self.exists and not self.is_private:
            raise UserError(
                f"{self.name}: exists and is public, and --private makes only a new one private; make it private on "
                f"its settings page first, or name a new one"
            )

    def removals(self, shipped: Collection[str]) -> tuple[str, ...]:
        """What an earlier push left and this one does not replace; UserError for a stranger's repository."""
        if self.is_ours:
            earlier = (name for name in self.files if OUR_WEIGHTS.fullmatch(name) or name in RECORDS)
            return tuple(sorted(name for name in earlier if name not in shipped))
        theirs = {name for name in self.files if ANY_WEIGHTS.fullmatch(name) or name in (*shipped, "README.md")}
        theirs -= {"README.md"} if self.has_blank_card else set()
        if theirs:
            raise UserError(
                f"{self.name}: is somebody else's: it holds {', '.join(sorted(theirs)[:4])}, which no push of this "
                f'project put there (its card has no tag "{TAG}"); name another repository, or empty this one'
            )
        return ()


def look(name: str, revision: str | None = None) -> Repository:
    """The repository as the Hub has it now; nothing is changed."""
    from huggingface_hub import HfApi, ModelCard, errors, hf_hub_download

    api = HfApi()
    with readable_errors(name, is_push=True):
        try:
            try:
                info = api.model_info(name, revision=revision)
            except errors.RevisionNotFoundError:
                info = api.model_info(name)
        except errors.RepositoryNotFoundError:
            return Repository(name, revision)
        files = tuple(sibling.rfilename for sibling in info.siblings or ())
        text = ""
        if "README.md" in files:
            text = Path(hf_hub_download(name, "README.md", revision=info.sha)).read_text("utf-8", errors="replace")
    try:
        card = ModelCard(text, ignore_metadata_errors=True)
        front, body = card.data.to_dict(), card.text
    except (ValueError, yaml.YAMLError, TypeError, AttributeError):  # front matter that is no table
        front, body = {"unreadable": True}, text
    is_blank = not body.strip() and front.keys() <= {"license"}
    return Repository(name, revision, True, bool(info.private), files, TAG in (front.get("tags") or ()), is_blank)


def upload(repository: Repository, files: dict[str, Path | bytes], private: bool, message: str) -> str:
    """Ships files (name in the repository -> content) in one commit and returns the commit's address.

    The same commit removes what an earlier push left, so that a repository never holds two heads. (HfApi.upload_folder
    may split a push into several commits.) After a break the same call goes on: the Hub knows uploaded files by hash.
    """
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

    repository.require_visibility(private)
    removed, api, name, revision = repository.removals(files), HfApi(), repository.name, repository.revision
    operations: list[Any] = [
        CommitOperationAdd(path_in_repo=path, path_or_fileobj=str(file) if isinstance(file, Path) else file)
        for path, file in sorted(files.items())
    ]
    operations += [CommitOperationDelete(path_in_repo=path) for path in removed]
    with readable_errors(name, is_push=True):
        if not repository.exists:
            api.create_repo(name, private=private or None, exist_ok=not private)
        if revision is not None:
            api.create_branch(name, branch=revision, exist_ok=True)
        commit: Any = api.create_commit(name, operations, commit_message=message, revision=revision)
    return str(commit.commit_url)
