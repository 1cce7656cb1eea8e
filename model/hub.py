"""The Hugging Face Hub: fetches heads by repository name, explains errors, hides tokens."""

import difflib
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from aerie.configs.errors import UserError, rank
from aerie.model import storage
from aerie.model.storage import (
    CALIBRATOR,
    CONFIG,
    HEAD_WEIGHTS,
    find_weights,
    first_line,
    weight_map,
)

HUB_ID = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@(?P<revision>[\w./-]+))?")
PROVENANCE = ("recipe.yaml", "provenance.json")
SHIPPED_RECORDS = (*PROVENANCE, "calibration.json", CALIBRATOR)
# the folder of the head as it was trained, if the repository's root is in a server's layout
TRAINED_FOLDER = "aerie"
SHA256 = re.compile("[0-9a-f]{64}")
KEPT_BYTES = 2**26  # the digest of a file of this size or more is kept
ANNOUNCED_BYTES = 10**10  # hashing a file of this size or more is announced
SAFE = ("*.safetensors", "*.safetensors.index.json")
PICKLES = ("*.bin", "*.bin.index.json", "*_lm_head.pt")


def head_directory(path: Path | str) -> Path:
    """path (or TRAINED_FOLDER in it), else the snapshot of user/name[@revision] on the Hub.

    UserError if there is no head.
    """
    hub_id = HUB_ID.fullmatch(str(path))
    local = Path(path)
    if hub_id is None or local.exists():
        for directory in (local / TRAINED_FOLDER, local):
            if (directory / CONFIG).is_file():
                return directory
        raise UserError(f"{path}: {_why_no_head(local)}")
    directory = _download_head(hub_id["repo"], hub_id["revision"], str(path))
    if not (directory / CONFIG).is_file():
        raise UserError(f"{path}: the repository has no {CONFIG}; name one that holds a head")
    return directory


def _why_no_head(path: Path) -> str:
    heads = [str(config.parent) for config in sorted(path.glob(f"heads/*/{CONFIG}"))]
    if heads:
        return f"a run and no head; name {' or '.join(heads)}"
    neighbours = [config.parent.name for config in path.parent.glob(f"*/{CONFIG}")]
    close = difflib.get_close_matches(path.name, neighbours)
    fix = "train the head: aerie train --config RECIPE"
    if close:
        fix = f"did you mean {path.parent / close[0]}?"
    return f"holds no head (no {CONFIG}); {fix}"


def _download_head(repo: str, revision: str | None, path: str) -> Path:
    from huggingface_hub import snapshot_download

    records = (CONFIG, *SHIPPED_RECORDS, "README.md")
    # the head as it was trained, else the root; a pickle only if there are no safetensors
    choices = (
        (TRAINED_FOLDER, (f"{TRAINED_FOLDER}/*",)),
        ("", (*records, *SAFE)),
        ("", (*records, *PICKLES)),
    )
    directory = Path()
    with readable_errors(path):
        for folder, patterns in choices:
            snapshot = snapshot_download(repo, revision=revision, allow_patterns=list(patterns))
            directory = Path(snapshot, folder)
            if find_weights(directory) is not None:
                break
    return directory


def require_target(path: str) -> None:
    """UserError for a local path that is no directory of a whole model."""
    directory = Path(path)
    has_weights = find_weights(directory) is not None
    if directory.suffix == ".gguf" or (not has_weights and any(directory.glob("*.gguf"))):
        raise UserError(
            f"{path}: GGUF is not read; name the safetensors model that it was made from"
        )
    if not has_weights and (directory / "adapter_config.json").is_file():
        code = f"M.from_pretrained('{path}').merge_and_unload().save_pretrained('MERGED')"
        raise UserError(
            f"{path}: a LoRA adapter; merge it into its model, "
            "and add the model's tokenizer files: "
            f'python -c "from peft import AutoPeftModelForCausalLM as M; {code}"'
        )
    for index in directory.glob("*.index.json"):
        if index.name in HEAD_WEIGHTS:
            weight_map(index)  # transformers would follow it to any folder
    is_local = path.startswith((".", "/", "~")) or path.count("/") > 1 or directory.exists()
    if is_local and not directory.is_dir():
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
    """The SHA-256 of a file of weights.

    In the Hub's cache it is the file's name. The digest of a large file is kept, by size and times.
    """
    file = path.resolve()
    if file.parent.name == "blobs" and SHA256.fullmatch(file.name):
        return file.name
    status = file.stat()
    if status.st_size < KEPT_BYTES:
        return storage.file_digest(file, 64)
    key = storage.digest([str(file), status.st_size, status.st_mtime_ns, status.st_ctime_ns])
    kept = storage.user_cache() / "digests" / key
    with suppress(OSError):
        return kept.read_text(encoding="utf-8")  # which is written whole or not at all
    if status.st_size >= ANNOUNCED_BYTES:
        print(
            f"{path}: is hashed once ({status.st_size / 1e9:.1f} GB)", file=sys.stderr, flush=True
        )
    text = storage.file_digest(file, 64)
    with suppress(OSError, UserError):  # no room, no permission
        storage.write_text(kept, text)
    return text


def weights_digests(path: str, revision: str | None, names: Sequence[str]) -> list[str]:
    """The SHA-256 of each weight file of a target (Git's id for files outside LFS).

    The Hub tells those of a repository without a download.
    """
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
    """UserError if weights differ from what a trained head's manifest records."""
    for name, (_, checksum) in storage.sound_record(head).get("files", {}).items():
        path = head / name
        is_weights = name.endswith((".safetensors", ".bin", ".pt")) and path.is_file()
        if is_weights and weights_digest(path)[:16] != checksum:
            raise UserError(
                f"{path}: is damaged; train the head again with --overwrite, or fetch it again"
            )


def is_on_hub(path: Path | str) -> bool:
    """Whether path can only be an id on the Hub; does not ask the Hub."""
    return not Path(path).exists() and HUB_ID.fullmatch(str(path)) is not None


@contextmanager
def readable_errors(repo: str) -> Iterator[None]:
    """Turns the Hub's errors into one line that shows no token."""
    from huggingface_hub import errors, get_token

    try:
        yield
    except (errors.HTTPError, errors.HFValidationError, OSError, RuntimeError) as error:
        reason = first_line(error.__cause__ or error)
        text = hub_answer(error) or (
            f"the Hub is out of reach, refused or broke off: {reason}; run the same command again"
        )
        token = get_token()
        if token:
            text = text.replace(token, "***")
        raise UserError(f"{repo}: {text}") from error


def hub_answer(error: BaseException) -> str | None:
    """What the Hub's answer means, even if another error hides it; None: no known answer."""
    from huggingface_hub import constants, errors

    cause = error
    while cause.__cause__ is not None and not isinstance(cause, errors.HfHubHTTPError):
        cause = cause.__cause__
    status = getattr(getattr(cause, "response", None), "status_code", None)
    is_away = isinstance(cause, errors.LocalEntryNotFoundError | errors.OfflineModeIsEnabled)
    answers = (  # the first that applies
        (
            isinstance(cause, errors.GatedRepoError),
            "gated on the Hub; ask for access on its page, then log in: hf auth login",
        ),
        (
            isinstance(cause, errors.RepositoryNotFoundError),
            "no such local directory, and no such repository on the Hub "
            "(if it is private: hf auth login)",
        ),
        (
            isinstance(cause, errors.RevisionNotFoundError),
            "the repository has no such revision",
        ),
        (status == 401, "the Hub does not accept this login; run: hf auth login"),
        (
            status == 403,
            "this login may not do that; use a token that may: hf auth login; "
            "if a link has expired, run the same command again",
        ),
        (
            is_away and constants.HF_HUB_OFFLINE,
            "not in the local cache, and HF_HUB_OFFLINE forbids to ask the Hub; "
            "unset HF_HUB_OFFLINE, or fetch the files first: hf download",
        ),
    )
    return next((answer for applies, answer in answers if applies), None)
