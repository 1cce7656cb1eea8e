"""The Hugging Face Hub: fetches heads by repository name, explains errors, hides tokens."""

import difflib
import hashlib
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from aerie.configs.errors import UserError, rank
from aerie.model import storage
from aerie.model.storage import CALIBRATOR, CONFIG, ORDER, find_weights, first_line, weight_map

HUB_ID = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@(?P<revision>[\w./-]+))?")
PROVENANCE = ("recipe.yaml", "provenance.json")
SHIPPED_RECORDS = (*PROVENANCE, "calibration.json", CALIBRATOR)
TRAINED_FOLDER = "aerie"  # the folder of a head as it was trained, if a repository's root is in a server's layout
SHA256 = re.compile("[0-9a-f]{64}")
KEPT_BYTES, TOLD_BYTES = (
    2**26,
    10**10,
)  # from these sizes on a digest is kept, and hashing is announced
SAFE, PICKLED = (
    ("*.safetensors", "*.safetensors.index.json"),
    ("*.bin", "*.bin.index.json", "*_lm_head.pt"),
)


def head_directory(path: Path | str) -> Path:
    """path (or TRAINED_FOLDER in it), else the snapshot of user/name[@revision] on the Hub; UserError where there is no head."""
    found, place = HUB_ID.fullmatch(str(path)), Path(path)
    if found is None or place.exists():
        for head in (place / TRAINED_FOLDER, place):
            if (head / CONFIG).is_file():
                return head
        if heads := sorted(place.glob(f"heads/*/{CONFIG}")):
            raise UserError(
                f"{path}: a run and no head; name {' or '.join(str(head.parent) for head in heads)}"
            )
        close = difflib.get_close_matches(
            place.name, [other.parent.name for other in place.parent.glob(f"*/{CONFIG}")]
        )
        fix = (
            f"did you mean {place.parent / close[0]}?"
            if close
            else "train the head: aerie train --config RECIPE"
        )
        raise UserError(f"{path}: holds no head (no {CONFIG}); {fix}")
    from huggingface_hub import snapshot_download

    repo, revision = found["repo"], found["revision"]
    root = (CONFIG, *SHIPPED_RECORDS, "README.md")
    with readable_errors(str(path)):  # a pickle only where there is nothing better
        for folder, patterns in (
            (TRAINED_FOLDER, (f"{TRAINED_FOLDER}/*",)),
            ("", (*root, *SAFE)),
            ("", (*root, *PICKLED)),
        ):
            place = (
                Path(snapshot_download(repo, revision=revision, allow_patterns=list(patterns)))
                / folder
            )
            if find_weights(place) is not None:
                break
    if not (place / CONFIG).is_file():
        raise UserError(f"{path}: the repository has no {CONFIG}; name one that holds a head")
    return place


def require_target(path: str) -> None:
    """UserError for a local path that is no directory of a whole model."""
    place = Path(path)
    if place.suffix == ".gguf" or (any(place.glob("*.gguf")) and find_weights(place) is None):
        raise UserError(
            f"{path}: GGUF is not read; name the safetensors model that it was made from"
        )
    if (place / "adapter_config.json").is_file() and find_weights(place) is None:
        code = f"M.from_pretrained('{path}').merge_and_unload().save_pretrained('MERGED')"
        line = f'python -c "from peft import AutoPeftModelForCausalLM as M; {code}"'
        raise UserError(
            f"{path}: a LoRA adapter; merge it into its model, and add the model's tokenizer files: {line}"
        )
    for index in place.glob("*.index.json"):
        if index.name in ORDER:
            weight_map(index)  # transformers follows it wherever it points
    if not place.is_dir() and (
        place.exists() or path.startswith((".", "/", "~")) or path.count("/") > 1
    ):
        raise UserError(f"{path}: no such target directory; name a local one or a Hub id")


def quieten() -> None:
    """Silences transformers' log, and progress bars except on the first process's terminal."""
    from torch import cuda
    from transformers.utils import logging

    if not cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else DeepSpeed prints that it found no GPU
    logging.set_verbosity_error()
    if rank() != 0 or not sys.stderr.isatty():
        logging.disable_progress_bar()


def weights_digest(path: Path) -> str:
    """The SHA-256 of a file of weights: in the Hub's cache, its name; a large file's is kept, by size and time."""
    place = path.resolve()
    if place.parent.name == "blobs" and SHA256.fullmatch(place.name):
        return place.name
    status = place.stat()
    times = [status.st_mtime_ns, status.st_ctime_ns]
    kept = storage.user_cache() / "digests" / storage.digest([str(place), status.st_size, *times])
    with suppress(OSError, ValueError):
        if status.st_size >= KEPT_BYTES and SHA256.fullmatch(
            text := kept.read_text(encoding="utf-8")
        ):
            return text
    if status.st_size >= TOLD_BYTES:
        print(
            f"{path}: is hashed once ({status.st_size / 1e9:.1f} GB)", file=sys.stderr, flush=True
        )
    with place.open("rb") as handle:
        text = hashlib.file_digest(handle, "sha256").hexdigest()
    if status.st_size >= KEPT_BYTES:
        with suppress(OSError, UserError):  # no room, no permission
            storage.write_text(kept, text)
    return text


def weights_digests(path: str, revision: str | None, names: Sequence[str]) -> list[str]:
    """The SHA-256 (outside LFS: Git's id) of each weight file of a target; a Hub id's need no download."""
    from huggingface_hub import HfApi, try_to_load_from_cache

    if Path(path).is_dir():
        return [weights_digest(Path(path, name)) for name in names]
    cached = [try_to_load_from_cache(path, name, revision=revision) for name in names]
    here = [weights_digest(Path(file)) for file in cached if isinstance(file, str)]
    if len(here) == len(names):
        return here
    with readable_errors(path):
        files: list[Any] = HfApi().get_paths_info(path, list(names), revision=revision)
    return [file.lfs.sha256 if file.lfs else file.blob_id for file in files]


def require_whole_weights(head: Path) -> None:
    """UserError if weights differ from those in a trained head's manifest."""
    for name, (_, checksum) in storage.sound_record(head).get("files", {}).items():
        path = head / name
        if (
            name.endswith((".safetensors", ".bin", ".pt"))
            and path.is_file()
            and weights_digest(path)[:16] != checksum
        ):
            raise UserError(
                f"{path}: is damaged; train the head anew with --overwrite, or fetch it again"
            )


def is_on_hub(path: Path | str) -> bool:
    return not Path(path).exists() and HUB_ID.fullmatch(str(path)) is not None


@contextmanager
def readable_errors(repo: str) -> Iterator[None]:
    from huggingface_hub import errors, get_token

    try:
        yield
    except (errors.HTTPError, errors.HFValidationError, OSError, RuntimeError) as error:
        what, token = first_line(error.__cause__ or error), get_token()
        text = (
            hub_answer(error)
            or f"the Hub is out of reach, refused or broke off: {what}; run the same command again"
        )
        raise UserError(f"{repo}: {text.replace(token, '***') if token else text}") from error


def hub_answer(error: BaseException) -> str | None:
    """What the Hub's answer means, also if another error hides it; None: no answer, or an unknown one."""
    from huggingface_hub import constants, errors

    cause = error
    while cause.__cause__ is not None and not isinstance(cause, errors.HfHubHTTPError):
        cause = cause.__cause__
    status = getattr(getattr(cause, "response", None), "status_code", None)
    nowhere = "no such local directory, and no such repository on the Hub (if it is private: hf auth login)"
    may_not = "this login may not do that; use a token that may: hf auth login"
    offline = "not in the local cache, and HF_HUB_OFFLINE forbids to ask the Hub; unset it, or fetch it: hf download"
    is_away = isinstance(cause, errors.LocalEntryNotFoundError | errors.OfflineModeIsEnabled)
    meanings = (
        (
            isinstance(cause, errors.GatedRepoError),
            "gated on the Hub; ask for access on its page: hf auth login",
        ),
        (isinstance(cause, errors.RepositoryNotFoundError), nowhere),
        (isinstance(cause, errors.RevisionNotFoundError), "the repository has no such revision"),
        (status == 401, "the Hub does not accept this login; run: hf auth login"),
        (status == 403, f"{may_not}; if a link has expired, run the same command again"),
        (is_away and constants.HF_HUB_OFFLINE, offline),
    )
    return next((meaning for applies, meaning in meanings if applies), None)
