"""The Hugging Face Hub: heads fetched by repository name; its errors, without tokens."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from aerie.configs.errors import UserError
from aerie.model.storage import CALIBRATOR, CONFIG, find_weights, first_line

HUB_ID = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@(?P<revision>[\w./-]+))?")
RECORDS = ("recipe.yaml", "provenance.json", "calibration.json", CALIBRATOR)
OURS = "aerie"  # the folder of a head as it was trained, where a repository's root is a server's layout
SAFE, PICKLED = ("*.safetensors", "*.safetensors.index.json"), ("*.bin", "*.bin.index.json", "*_lm_head.pt")


def head_directory(path: Path | str) -> Path:
    """path, or else the snapshot of user/name[@revision] on the Hub."""
    found = HUB_ID.fullmatch(str(path))
    if found is None or Path(path).exists():
        return Path(path)
    from huggingface_hub import snapshot_download

    repo, revision = found["repo"], found["revision"]
    root = (CONFIG, *RECORDS, "README.md")
    with readable_errors(str(path)):  # a pickle only where there is nothing better
        for folder, patterns in ((OURS, (f"{OURS}/*",)), ("", (*root, *SAFE)), ("", (*root, *PICKLED))):
            place = Path(snapshot_download(repo, revision=revision, allow_patterns=list(patterns))) / folder
            if find_weights(place) is not None:
                break
    if not (place / CONFIG).is_file():
        raise UserError(f"{path}: the repository has no {CONFIG}; name one that holds a head")
    return place


def require_target(path: str) -> None:
    """UserError for a local path without a directory."""
    place = Path(path)
    if not place.is_dir() and (place.exists() or path.startswith((".", "/", "~")) or path.count("/") > 1):
        raise UserError(f"{path}: no such target directory; name a local one or a Hub id")


def quieten() -> None:
    """Silences transformers' log and progress bars."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


def is_on_hub(path: Path | str) -> bool:
    return not Path(path).exists() and HUB_ID.fullmatch(str(path)) is not None


@contextmanager
def readable_errors(repo: str) -> Iterator[None]:
    from huggingface_hub import errors, get_token

    try:
        yield
    except (errors.HTTPError, errors.HFValidationError, OSError, RuntimeError) as error:
        # snapshot_download hides the Hub's answer
        cause = error.__cause__ if isinstance(error.__cause__, errors.HfHubHTTPError) else error
        status = getattr(getattr(cause, "response", None), "status_code", None)
        may_not = "this login may not do that; use a token that may: hf auth login"
        nowhere = "no such local directory, and no such repository on the Hub (if it is private: hf auth login)"
        meanings = (
            (isinstance(cause, errors.GatedRepoError), "gated on the Hub; ask for access on its page: hf auth login"),
            (isinstance(cause, errors.RepositoryNotFoundError), nowhere),
            (isinstance(cause, errors.RevisionNotFoundError), "the repository has no such revision"),
            (status == 401, "the Hub does not accept this login; run: hf auth login"),
            (status == 403, f"{may_not}; if a link has expired, the same command goes on"),
            (True, f"the Hub is out of reach, refused or broke off: {first_line(cause)}; the same command goes on"),
        )
        text = next(meaning for applies, meaning in meanings if applies)
        token = get_token()
        raise UserError(f"{repo}: {text.replace(token, '***') if token else text}") from error
