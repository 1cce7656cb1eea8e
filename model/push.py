"""Ships a head to the Hub: weights, records without local paths, and a card; never conversations."""

import json
import re
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from aerie.configs.errors import UserError, masked
from aerie.configs.read import read_yaml
from aerie.model.export import export
from aerie.model.formats.content import TargetFacts, table
from aerie.model.formats.eagle_layouts import CHECKED, LOST, SPECULATIVE_TOKENS
from aerie.model.heads import HEADS
from aerie.model.hub import OURS, RECORDS, head_directory, is_on_hub, readable_errors
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
TAG = "aerie"  # of every card
MEASURE = "run aerie bench --overwrite and aerie report, or ship --without-results"
FILES = (".json", ".jsonl", ".parquet")

ANY_WEIGHTS = re.compile(
    r".*\.(safetensors|bin|pt|pth|ckpt|gguf|h5|msgpack|onnx)(\.index\.json)?|config\.json"
)
OUR_WEIGHTS = re.compile(
    r"(pytorch_)?model(-\d+-of-\d+)?\.(safetensors|bin)(\.index\.json)?|\w+_lm_head\.pt"
)
SERVERS = {
    "safeailab": ["eagle", "vllm"],
    "sglang": ["eagle", "sglang"],
    "speculators": ["speculators", "vllm"],
}


def for_server(
    head: dict[str, Any], name: str, place: Path, target: TargetFacts | None
) -> tuple[str, list[str]]:
    """Writes a trained head to place in a server's layout; returns that layout ("": none), and notes."""
    notes, recorded = list[str](), head["target"]["recorded"]
    for server in (
        head["servers"].values() if head["layout"] == "aerie" and (target or recorded) else ()
    ):
        try:
            if server["refused"]:
                raise UserError(server["refused"][0])
            facts = replace(target or TargetFacts.load(recorded), name=name)
            return server["layout"], export(
                head["path"], server["layout"], place, facts, pickled=False
            )[1]
        except UserError as error:
            missing = "" if target or server["refused"] else " without --target"
            notes.append(f"not shipped in a server's layout{missing}: {error}")
    return "", [*dict.fromkeys(notes)]


def pack(
    head: dict[str, Any],  # inspect_head's
    repo: str,
    run: Path | None = None,
    target_name: str | None = None,
    licence: str | None = None,
    allowed: Collection[str] = (),  # "without_results", "uncommitted"
    server: tuple[Path, TargetFacts | None]
    | None = None,  # where to write a server's layout, and --target
) -> tuple[Files, list[str]]:
    """The files of a push, and notes; a server's layout is the root, and ours goes into the folder OURS."""
    directory = head_directory(head["path"])
    if head["problems"] or head["taps_open"] == "ambiguous":
        raise UserError([*head["problems"], f"{directory}: {', '.join(head['guesses'])}"][0])
    records, notes = _records(
        directory, run or directory.parent.parent, "without_results" in allowed
    )
    summary, provenance = records.pop("summary.json", {}), records.get("provenance.json", {})
    rows = [
        row
        for row in summary.get("rows", ())
        if row["status"] == "ok" and row["head"] in (None, head["kind"])
    ]
    if any(row["head"] for row in rows):
        shown = () if "calibration.json" in records else ("calibration",)
        records["summary.json"] = {
            name: value for name, value in summary.items() if name not in shown
        }
    elif "without_results" not in allowed:
        raise UserError(
            f"{directory}: no measured results (RUN/report/summary.json); {MEASURE}, or give --run"
        )
    dirty = (
        "this checkout"
        if is_dirty()
        else "the tree that trained it"
        if provenance.get("dirty")
        else None
    )
    if dirty and "uncommitted" not in allowed:
        raise UserError(
            f"{directory}: {dirty} differs from the card's commit; train from a commit, or --uncommitted"
        )
    recorded = head["target"]["recorded"]
    target = target_name or recorded or head["target"].get("given")
    if target is None:
        raise UserError(f"{directory}: its files name no target; name it with --target-name")
    if not is_on_hub(target):
        target = last_part(target)
        stands = "the card names no base_model and its commands say TARGET"
        notes.append(
            f"its target is a local path, so {stands}; if it is on the Hub, give --target-name user/{target}"
        )
    spellings = (recorded, table(records.get("recipe.yaml"), "target").get("path"))
    names = {spelling: target for spelling in spellings if spelling and not is_on_hub(spelling)}
    records = {name: public(record, names) for name, record in records.items()}
    files: Files = {name: _written(name, record) for name, record in records.items()}
    weights = directory / head["weights"]
    shards = set(weight_map(weights).values()) if weights.suffix == ".json" else set()
    files |= {name: directory / name for name in (weights.name, *shards)}
    known, fitted = digests(directory), _table(directory / CALIBRATOR)
    if fitted.get("head") == known:  # it must match the shipped config.json
        fitted["head"] = {**known, CONFIG: content_digest(bytes(files[CONFIG]))}
        files[CALIBRATOR] = _written(CALIBRATOR, fitted)
    stays = sorted(path.name for path in directory.iterdir() if path.name not in files)
    layout, about = for_server(head, target, *server) if server else ("", [])
    if layout and server:
        place = server[0]
        files = {
            name if name == "summary.json" else f"{OURS}/{name}": file
            for name, file in files.items()
        }
        files |= {
            CONFIG: _written(CONFIG, public(_table(place / CONFIG), names)),
            WEIGHTS: place / WEIGHTS,
        }
        head = {
            **head,
            "layout": layout,
            "weights": f"{WEIGHTS}; as it was trained, for aerie, in the folder {OURS}/",
        }
    files["README.md"] = _card(repo, head, target, records, rows, licence).encode()
    return files, [*about, *notes, *(f"{name} stays here" for name in stays)]


def _records(
    directory: Path, run: Path, without_results: bool
) -> tuple[dict[str, dict[str, Any]], list[str]]:
    records, notes = (
        {name: _table(directory / name) for name in (CONFIG, "recipe.yaml", "provenance.json")},
        [],
    )
    # only what was measured with this head, or with its original
    known = [digests(directory), table(records[CONFIG], "aerie", "exported_from", "files")]
    for place, stage in (
        (run / "report/summary.json", "bench"),
        (run / "calibration/calibration.json", "calibration"),
    ):
        used = table(_table(run / stage / "provenance.json"), "inputs").get("head")
        heads = [head for head in (used if isinstance(used, list) else [used]) if head]
        doubt = f"{run / stage}: was measured with another head than {directory}"
        if any(head.items() <= files.items() for head in heads for files in known):
            records[place.name] = _table(place)
        elif place.is_file() and stage == "bench" and not without_results:
            raise UserError(f"{doubt}; {MEASURE}")
        elif place.is_file():
            notes.append(f"{place.name} is left out: {doubt}")
    return {name: record for name, record in records.items() if record}, notes


def _table(place: Path) -> dict[str, Any]:
    if not place.is_file():
        return {}
    return read_yaml(place)[0] if place.suffix == ".yaml" else table(read_json(place))


def _written(name: str, record: dict[str, Any]) -> bytes:
    if name.endswith(".yaml"):
        return yaml.safe_dump(record, sort_keys=False, allow_unicode=True).encode()
    return (json.dumps(record, indent=1, ensure_ascii=False) + "\n").encode()


def _card(
    repo: str,
    head: dict[str, Any],
    target: str,
    records: dict[str, Any],
    rows: list[Any],
    licence: str | None,
) -> str:
    from huggingface_hub import EvalResult, ModelCard, ModelCardData

    conversations = table(records.get("recipe.yaml"), "data").get("conversations") or []
    sources = dict.fromkeys(
        name.split(":")[0] for name in conversations
    )  # without subset and split
    results = [
        EvalResult(
            "text-generation",
            row["task"],
            row["task"],
            metric,
            round(row[metric], 4),
            metric_name=name,
        )
        for row in rows
        if row["head"]
        for metric in ("tau", "speedup")
        for name in [
            f"{metric} ({row['method']}, {row['tree']['nodes']} nodes, temperature {row['temperature']:g})"
        ]
        if row[metric] is not None
    ]
    data = ModelCardData(
        license=licence,
        base_model=target if is_on_hub(target) else None,
        library_name="aerie",
        pipeline_tag="text-generation",
        tags=[
            "speculative-decoding",
            "draft-head",
            head["kind"],
            TAG,
            *SERVERS.get(head["layout"], []),
        ],
        datasets=[name for name in sources if is_on_hub(name) and not name.endswith(FILES)] or None,
        model_name=repo.split("/")[1],
        eval_results=results or None,
    )
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
        drafts=head["sizes"].get("block_size", SPECULATIVE_TOKENS + 1)
        - ("sample_from_anchor" not in head["options"]),
        sglang=head["made_for"] or f"SGLang {CHECKED}",
        sglang_lacks=[name for name in LOST["sglang"] if name in head["options"]],
    ).content


WHOLE = re.compile(r"(--?[\w.-]+=)?((?:~|/|\.\./).*)")
ROOTED = re.compile(r"""(?<![\w./~-])(?!//)(?:~\w*|(?:\.\./)*\.\.)?/[^\s'"\[\](){}<>,;=|]+""")
HOME = re.compile(r"(~\w*|(/.*)?/(home|Users)/[^/]+|/root)/?")


def public(value: Any, names: dict[str, str], is_secret: bool = False) -> Any:
    """A record without secrets; local paths, also in keys, become public names: from `names`, else the last part."""
    if isinstance(value, dict):
        secret = {key: is_secret or key in ("extra_body", "headers") for key in value}
        return {
            public(key, names): public(entry, names, secret[key]) for key, entry in value.items()
        }
    if isinstance(value, list):  # or words: hides what follows --distill.server.extra_body
        secrets = [
            False,
            *(isinstance(entry, str) and entry.startswith("--distill") for entry in value),
        ]
        return [
            public(entry, names, is_secret or secret)
            for entry, secret in zip(value, secrets, strict=False)
        ]
    if is_secret or not isinstance(value, str):
        return "***" if is_secret and value is not None else value
    text = re.sub(r"(?s)(--distill[\w.]*[= ]).*", r"\1***", masked(value)).replace("file://", "")
    for local, name in names.items():
        if "/" in local:
            text = re.sub(
                rf"(?<![\w./~-]){re.escape(local)}(?![\w.-])", name.replace("\\", r"\\"), text
            )
        text = name if text == local else text
    if whole := WHOLE.fullmatch(text):
        return (whole[1] or "") + last_part(whole[2])
    return ROOTED.sub(lambda path: last_part(path[0]), text)


def last_part(path: str) -> str:
    return "home" if HOME.fullmatch(path) else Path(path).name.strip("~.") or "home"


def removals(repo: str, files: Files, revision: str | None = None) -> list[str]:
    """Files of an earlier push to remove; UserError if the repository is another's."""
    from huggingface_hub import HfApi, errors, hf_hub_download, metadata_load

    api = HfApi()
    with readable_errors(repo):
        try:
            info = api.model_info(repo, revision=revision)
        except errors.RevisionNotFoundError:  # a new branch begins as main
            info = api.model_info(repo)
        except errors.RepositoryNotFoundError:
            return []
        there = [sibling.rfilename for sibling in info.siblings or ()]
        card = (
            hf_hub_download(repo, "README.md", revision=info.sha) if "README.md" in there else None
        )
    try:
        is_ours = card is not None and TAG in ((metadata_load(card) or {}).get("tags") or ())
    except (ValueError, yaml.YAMLError):  # front matter that is no table
        is_ours = False
    theirs = [name for name in there if ANY_WEIGHTS.fullmatch(name)]
    if theirs and not is_ours:
        held = ", ".join(sorted(theirs)[:4])
        raise UserError(
            f"{repo}: is somebody else's: it holds {held}, but no card of {TAG}; name another repository"
        )
    ours = (*RECORDS, "summary.json")
    earlier = [
        n for n in there if OUR_WEIGHTS.fullmatch(n) or n in ours or n.startswith(f"{OURS}/")
    ]
    return sorted(name for name in earlier if name not in files) if is_ours else []


def upload(
    repo: str, files: Files, revision: str | None = None, private: bool = False
) -> tuple[str, list[str]]:
    """Ships files in one commit; returns its address, and which files it removed."""
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

    # one commit (upload_folder may make several): a repository must never hold two heads
    removed, api = removals(repo, files, revision), HfApi()
    operations: list[Any] = [
        CommitOperationAdd(
            path_in_repo=path, path_or_fileobj=str(file) if isinstance(file, Path) else file
        )
        for path, file in sorted(files.items())
    ]
    operations += [CommitOperationDelete(path_in_repo=path) for path in removed]
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
