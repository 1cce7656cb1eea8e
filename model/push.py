"""Ships a head to the Hub: weights, records without local paths, and a card; no conversations."""

import json
import re
from collections.abc import Collection
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import yaml

from aerie.configs.errors import UserError, masked
from aerie.configs.read import read_yaml
from aerie.model.export import export
from aerie.model.formats.content import TARGET_DTYPE, TargetFacts, nested
from aerie.model.formats.eagle_layouts import CHECKED
from aerie.model.heads import HEADS
from aerie.model.hub import (
    PROVENANCE,
    SHIPPED_RECORDS,
    TRAINED_FOLDER,
    head_directory,
    is_on_hub,
    readable_errors,
)
from aerie.model.inspection import serve_command
from aerie.model.storage import (
    CALIBRATOR,
    CONFIG,
    WEIGHTS,
    content_digest,
    digests,
    is_dirty,
    read_json,
    weight_map,
)

Files = dict[str, Path | bytes]  # name in the repository -> local file or content
Records = dict[str, dict[str, Any]]  # name in the repository -> what the file says
TAG = "aerie"  # every card has it
MEASURE = "run aerie bench --overwrite and aerie report, or push --without-results"
DATA_FILES = (".json", ".jsonl", ".parquet")  # a card lists data sets of the Hub, but no files

ANY_WEIGHTS = re.compile(
    r".*\.(safetensors|bin|pt|pth|ckpt|gguf|h5|msgpack|onnx)(\.index\.json)?|config\.json"
)
# files that a push may write, and so replace or remove
OUR_FILES = re.compile(
    r"(pytorch_)?model(-\d+-of-\d+)?\.(safetensors|bin)(\.index\.json)?|\w+_lm_head\.pt"
    rf"|{TRAINED_FOLDER}/.*|summary\.json|" + "|".join(map(re.escape, SHIPPED_RECORDS))
)
SERVERS = {  # the tags that a card has for each layout
    "safeailab": ["eagle", "vllm"],
    "sglang": ["eagle", "sglang"],
    "speculators": ["speculators", "vllm"],
    "vllm": ["medusa", "vllm"],
}


def pack(
    head: dict[str, Any],  # inspect_head's
    repo: str,
    run: Path | None = None,
    target_name: str | None = None,
    licence: str | None = None,
    allowed: Collection[str] = (),  # "without_results", "uncommitted"
    # where to write the head in a server's layout, and its target
    server: tuple[Path, TargetFacts | None] | None = None,
) -> tuple[Files, list[str]]:
    """The files of a push, and notes; UserError if the head cannot be pushed.

    With `server`, the root is in the server's layout, and our own goes into TRAINED_FOLDER.
    """
    directory = head_directory(head["path"])
    if head["problems"]:
        raise UserError(head["problems"][0])
    if head["taps_open"] == "ambiguous":
        raise UserError(f"{directory}: {', '.join(head['guesses'])}")
    # --- what the head was made from, and what was measured with it
    run = run or directory.parent.parent
    records, notes = _records(directory, run, "without_results" in allowed)
    rows = _choose_results(head["kind"], records)
    if "summary.json" not in records and "without_results" not in allowed:
        raise UserError(
            f"{directory}: no measured results (RUN/report/summary.json); {MEASURE}, or give --run"
        )
    if "uncommitted" not in allowed:
        _require_commit(directory, records)
    # --- records without local paths
    target, target_notes = _public_target(head, directory, target_name)
    recipe_target = nested(records.get("recipe.yaml"), "target").get("path")
    spellings = (head["target"]["recorded"], recipe_target)
    names = {local: target for local in spellings if local and not is_on_hub(local)}
    records = {name: public(record, names) for name, record in records.items()}
    files: Files = {name: _as_bytes(name, record) for name, record in records.items()}
    files |= _weight_files(directory / head["weights"])
    _add_calibrator(directory, files)
    stays = sorted(path.name for path in directory.iterdir() if path.name not in files)
    # --- the layout of a server
    if server is not None:
        layout, server_notes = _export_for_server(head, target, *server)
        notes = [*server_notes, *notes]
        if layout:
            files = _below_server(files, server[0], names)
            head = _as_served(head, layout, server[0])
    files["README.md"] = _card(repo, head, target, records, rows, licence).encode()
    return files, [*notes, *target_notes, *(f"{name} stays here" for name in stays)]


def _records(directory: Path, run: Path, without_results: bool) -> tuple[Records, list[str]]:
    """The records of a push, and notes: the head's own, and what was measured with the head."""
    notes: list[str] = []
    records = {name: _read_record(directory / name) for name in (CONFIG, *PROVENANCE)}
    # Only what was measured with this head, or with its original, may be shipped.
    heads_files = [digests(directory), nested(records[CONFIG], "aerie", "exported_from", "files")]
    for path, stage in (
        (run / "report/summary.json", "bench"),
        (run / "calibration/calibration.json", "calibration"),
    ):
        measured = nested(_read_record(run / stage / "provenance.json"), "inputs").get("head")
        if _was_measured(measured, heads_files):
            records[path.name] = _read_record(path)
        elif path.is_file():
            doubt = f"{run / stage}: was measured with another head than {directory}"
            if stage == "bench" and not without_results:
                raise UserError(f"{doubt}; {MEASURE}")
            notes.append(f"{path.name} is left out: {doubt}")
    return {name: record for name, record in records.items() if record}, notes


def _was_measured(measured: Any, heads_files: list[dict[str, Any]]) -> bool:
    """Whether one of the measured heads is one of these; a bench may have measured several.

    Heads are told by the digests of their files.
    """
    for files in measured if isinstance(measured, list) else [measured]:
        if files and any(files.items() <= known.items() for known in heads_files):
            return True
    return False


def _choose_results(kind: str, records: Records) -> list[dict[str, Any]]:
    """The rows of summary.json for a card.

    Drops the summary from the records if no row is of a head of this kind.
    """
    summary = records.pop("summary.json", {})
    rows = [
        row
        for row in summary.get("rows", ())
        if row["status"] == "ok" and row["head"] in (None, kind)
    ]
    if any(row["head"] for row in rows):
        if "calibration.json" not in records:  # it was made with another head
            summary.pop("calibration", None)
        records["summary.json"] = summary
    return rows


def _require_commit(directory: Path, records: Records) -> None:
    if is_dirty() or records.get("provenance.json", {}).get("dirty"):
        dirty = "this checkout" if is_dirty() else "the tree that trained it"
        raise UserError(
            f"{directory}: {dirty} differs from the card's commit; "
            "train from a commit, or push with --uncommitted"
        )


def _public_target(
    head: dict[str, Any], directory: Path, target_name: str | None
) -> tuple[str, list[str]]:
    """What the card calls the target, and notes."""
    target = target_name or head["target"]["recorded"] or head["target"].get("given")
    if target is None:
        raise UserError(f"{directory}: its files name no target; give --target-name")
    if is_on_hub(target):
        return target, []
    target = last_part(target)
    return target, [
        "its target is a local path, so the card names no base_model and its commands say TARGET; "
        f"if it is on the Hub, give --target-name user/{target}"
    ]


def _weight_files(weights: Path) -> Files:
    shards = weight_map(weights).values() if weights.suffix == ".json" else ()  # of an index
    return {name: weights.with_name(name) for name in {weights.name, *shards}}


def _add_calibrator(directory: Path, files: Files) -> None:
    """Adds the calibrator, which names its head by digests, with those of the shipped files."""
    calibrator = _read_record(directory / CALIBRATOR)
    known = digests(directory)
    if calibrator.get("head") == known:
        calibrator["head"] = {**known, CONFIG: content_digest(bytes(files[CONFIG]))}
        files[CALIBRATOR] = _as_bytes(CALIBRATOR, calibrator)


def _export_for_server(
    head: dict[str, Any], name: str, folder: Path, target: TargetFacts | None
) -> tuple[str, list[str]]:
    """Writes a trained head to folder in a server's layout.

    Returns the layout ("": none can carry the head), and notes.
    """
    recorded = head["target"]["recorded"]
    if head["layout"] != "aerie" or not (target or recorded):
        return "", []
    notes: dict[str, None] = {}  # a dict, so that each note comes once
    for server in head["servers"].values():
        try:
            if server["refused"]:
                raise UserError(server["refused"][0])
            facts = replace(target or TargetFacts.load(recorded), name=name)
            _, export_notes = export(head["path"], server["layout"], folder, facts, pickled=False)
        except UserError as error:
            missing = "" if target or server["refused"] else " without --target"
            notes[f"not shipped in a server's layout{missing}: {error}"] = None
        else:
            return server["layout"], export_notes
    return "", list(notes)


def _as_served(head: dict[str, Any], layout: str, folder: Path) -> dict[str, Any]:
    """The head's facts for the card, if folder holds it in a server's layout."""
    weights = f"{WEIGHTS}; as it was trained, for aerie, in the folder {TRAINED_FOLDER}/"
    dtype = nested(_read_record(folder / CONFIG), "aerie")[TARGET_DTYPE]
    target = {**head["target"], "dtype": dtype}
    return {**head, "layout": layout, "weights": weights, "target": target}


def _below_server(files: Files, folder: Path, names: dict[str, str]) -> Files:
    """The files of a push with the head of `folder` in its root, and the trained head below."""
    below: Files = {}
    for name, file in files.items():
        below[name if name == "summary.json" else f"{TRAINED_FOLDER}/{name}"] = file
    below[CONFIG] = _as_bytes(CONFIG, public(_read_record(folder / CONFIG), names))
    below[WEIGHTS] = folder / WEIGHTS
    return below


def _read_record(path: Path) -> dict[str, Any]:
    """The table in a JSON or YAML file; {} if there is no file."""
    if not path.is_file():
        return {}
    return read_yaml(path)[0] if path.suffix == ".yaml" else nested(read_json(path))


def _as_bytes(name: str, record: dict[str, Any]) -> bytes:
    if name.endswith(".yaml"):
        return yaml.safe_dump(record, sort_keys=False, allow_unicode=True).encode()
    return (json.dumps(record, indent=1, ensure_ascii=False) + "\n").encode()


def _card(
    repo: str,
    head: dict[str, Any],
    target: str,
    records: Records,
    rows: list[dict[str, Any]],
    licence: str | None,
) -> str:
    from huggingface_hub import ModelCard, ModelCardData

    conversations = nested(records.get("recipe.yaml"), "data").get("conversations") or []
    # the names of data sets, without subset and split
    sources = dict.fromkeys(name.split(":")[0] for name in conversations)
    datasets = [name for name in sources if is_on_hub(name) and not name.endswith(DATA_FILES)]
    layout_tags = SERVERS.get(head["layout"], [])
    data = ModelCardData(
        license=licence,
        base_model=target if is_on_hub(target) else None,
        library_name="aerie",
        pipeline_tag="text-generation",
        tags=["speculative-decoding", "draft-head", head["kind"], TAG, *layout_tags],
        datasets=datasets or None,
        model_name=repo.split("/")[1],
        eval_results=_eval_results(rows) or None,
    )
    path = target if is_on_hub(target) else "TARGET"
    served = {}
    for server, entry in head["servers"].items():
        layout = entry["layout"]
        names_target = layout == "speculators" and is_on_hub(target)  # config.json names it
        draft = repo if head["layout"] == layout else "draft"
        served[server] = serve_command(head, server, None if names_target else path, draft)
    return ModelCard.from_template(
        data,
        template_path=str(Path(__file__).with_name("card.md.jinja")),
        repo=repo,
        head=head,
        kind_name=HEADS[head["kind"]].title,
        target=target,
        is_on_hub=is_on_hub(target),
        conversations=conversations,
        records=records,
        rows=rows if "summary.json" in records else [],
        licence=licence,
        path=path,
        served=served,
        sglang=head["made_for"] or f"SGLang {CHECKED}",
    ).content


def _eval_results(rows: list[dict[str, Any]]) -> list[Any]:
    """What was measured, as metadata that the Hub shows."""
    from huggingface_hub import EvalResult

    return [
        EvalResult(
            "text-generation",
            row["task"],
            row["task"],
            metric,
            round(row[metric], 4),
            metric_name=f"{metric} ({row['method']}, {row['tree']['nodes']} nodes, "
            f"temperature {row['temperature']:g})",
        )
        for row, metric in product(rows, ("tau", "speedup"))
        if row["head"] and row[metric] is not None
    ]


# a text that is a local path, perhaps behind --option=
WHOLE_PATH = re.compile(r"(--?[\w.-]+=)?((?:~|/|\.\./).*)")
# a local path inside a text
INNER_PATH = re.compile(r"""(?<![\w./~-])(?!//)(?:~\w*|(?:\.\./)*\.\.)?/[^\s'"\[\](){}<>,;=|]+""")
HOME = re.compile(r"(~\w*|(/.*)?/(home|Users)/[^/]+|/root)/?")
SECRET_OPTION = re.compile(r"(?s)(--distill[\w.]*[= ]).*")


def public(value: Any, names: dict[str, str], is_secret: bool = False) -> Any:
    """A record without secrets and local paths, for publication.

    A path, also in a key, becomes its public name in `names`, else its last part.
    """
    if isinstance(value, dict):
        return {
            public(key, names): public(entry, names, is_secret or key in ("extra_body", "headers"))
            for key, entry in value.items()
        }
    if isinstance(value, list):
        return [  # the word after --distill.server.extra_body is secret, too
            public(entry, names, is_secret or str(option).startswith("--distill"))
            for option, entry in pairwise([None, *value])
        ]
    if is_secret:
        return None if value is None else "***"
    if not isinstance(value, str):
        return value
    text = SECRET_OPTION.sub(r"\1***", masked(value)).replace("file://", "")
    for local, name in names.items():
        if "/" in local:
            path = rf"(?<![\w./~-]){re.escape(local)}(?![\w.-])"
            text = re.sub(path, name.replace("\\", r"\\"), text)
        if text == local:
            text = name
    if match := WHOLE_PATH.fullmatch(text):
        return (match[1] or "") + last_part(match[2])
    return INNER_PATH.sub(lambda path: last_part(path[0]), text)


def last_part(path: str) -> str:
    return "home" if HOME.fullmatch(path) else Path(path).name.strip("~.") or "home"


def removals(repo: str, files: Files, revision: str | None = None) -> list[str]:
    """The files of an earlier push to remove; UserError if the repository is not a push of ours."""
    from huggingface_hub import HfApi, errors

    api = HfApi()
    with readable_errors(repo):
        try:
            info = api.model_info(repo, revision=revision)
        except errors.RevisionNotFoundError:  # a new branch begins as a copy of main
            info = api.model_info(repo)
        except errors.RepositoryNotFoundError:
            return []
    present = [sibling.rfilename for sibling in info.siblings or ()]
    if TAG not in (info.tags or ()):
        weights = sorted(name for name in present if ANY_WEIGHTS.fullmatch(name))
        if weights:
            raise UserError(
                f"{repo}: is somebody else's: it holds {', '.join(weights[:4])}, "
                f"but its card has no tag {TAG}; name another repository"
            )
        return []
    return sorted(name for name in present if name not in files and OUR_FILES.fullmatch(name))


def upload(
    repo: str, files: Files, revision: str | None = None, private: bool = False
) -> tuple[str, list[str]]:
    """Ships files in one commit; returns the commit's address, and the names of removed files."""
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

    removed = removals(repo, files, revision)
    # One commit, where upload_folder may make several: a repository must never hold two heads.
    operations: list[Any] = [CommitOperationAdd(name, file) for name, file in sorted(files.items())]
    operations += [CommitOperationDelete(name) for name in removed]
    api = HfApi()
    with readable_errors(repo):
        api.create_repo(repo, private=private or None, exist_ok=True)
        if private and not api.model_info(repo).private:
            raise UserError(f"{repo}: exists and is public; make it private, or name a new one")
        if revision is not None:
            api.create_branch(repo, branch=revision, exist_ok=True)
        commit: Any = api.create_commit(
            repo, operations, commit_message="A draft head", revision=revision
        )
    return str(commit.commit_url), removed
