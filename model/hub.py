"""The Hugging Face Hub: heads fetched by repository name; its errors in one line.

The endpoint and the login are huggingface_hub's own (HF_ENDPOINT, HF_TOKEN or `hf auth login`); no token is read, kept
or printed here. huggingface_hub is imported where it is used: a local path costs nothing.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from aerie.configs.errors import UserError
from aerie.model.storage import CALIBRATOR, find_weights

HUB_ID = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@(?P<revision>[\w./-]+))?")
SMALL = ("config.json", "recipe.yaml", "provenance.json", "calibration.json", CALIBRATOR, "README.md")
SAFE, PICKLED = ("*.safetensors", "*.safetensors.index.json"), ("*.bin", "*.bin.index.json", "*_lm_head.pt")


def head_directory(path: Path | str) -> Path:
    """The local directory of a head: the path itself, or the snapshot of the Hub repository that it names.

    "user/name" is a repository unless such a path exists; "user/name@revision" pins a branch, tag or commit.
    """
    place = Path(path)
    if place.exists():
        return place
    found = HUB_ID.fullmatch(str(path))
    return place if found is None else fetch(found["repo"], found["revision"])


def is_on_hub(path: Path | str) -> bool:
    """Whether a head's name is that of a Hub repository: nothing local is called so, and it is no path."""
    return not Path(path).exists() and HUB_ID.fullmatch(str(path)) is not None


def fetch(repo: str, revision: str | None = None) -> Path:
    """A snapshot with config.json, the weights (safetensors where there are any) and the small files beside them."""
    from huggingface_hub import snapshot_download

    with readable_errors(f"{repo}@{revision}" if revision else repo):
        place = Path(snapshot_download(repo, revision=revision, allow_patterns=[*SMALL, *SAFE]))
        if find_weights(place) is None:
            place = Path(snapshot_download(repo, revision=revision, allow_patterns=[*SMALL, *PICKLED]))
    if not (place / "config.json").is_file():
        raise UserError(f"{repo}: the repository has no config.json: it is no head")
    return place


def require_login() -> None:
    """UserError where huggingface_hub would find no token."""
    from huggingface_hub import get_token

    if not get_token():
        raise UserError("push: no login for the Hub; run: hf auth login (or set HF_TOKEN)")


@contextmanager
def readable_errors(repo: str, is_push: bool = False) -> Iterator[None]:
    """Turns what huggingface_hub raises into one line that names the repository and the fix, and never a token."""
    from huggingface_hub import errors, get_token

    here = "" if is_push else "no such local directory, and "
    try:
        yield
    except errors.GatedRepoError as error:
        raise UserError(f"{repo}: gated on the Hub; ask for access on its page, then run: hf auth login") from error
    except errors.RepositoryNotFoundError as error:
        raise UserError(f"{repo}: {here}no such repository on the Hub (if it is private: hf auth login)") from error
    except errors.RevisionNotFoundError as error:
        raise UserError(f"{repo}: the repository has no such revision") from error
    except (errors.HTTPError, errors.HFValidationError, OSError, RuntimeError) as error:
        cause: BaseException = error
        if isinstance(error, errors.LocalEntryNotFoundError):
            if not isinstance(error.__cause__, errors.HfHubHTTPError):
                raise UserError(f"{repo}: {here}the Hub cannot be reached") from error
            cause = error.__cause__  # it was reached, and answered
        response = getattr(cause, "response", None)
        address = str(getattr(response, "url", ""))
        is_hub = "/api/" in address or ".git/info/lfs" in address  # not the storage behind it, whose links expire
        fixes = {
            (401, True): "the Hub does not accept this login (its token may have expired); run: hf auth login",
            (403, True): "this login may not write there, and repeating will not help; use a token with write "
            "permission to it (hf auth login), or a repository of your own",
            (403, False): "this login may not read it; ask its owner for access, or run: hf auth login",
        }
        status = getattr(response, "status_code", None)
        fix = fixes.get((int(status or 0), is_push or status == 401)) if is_hub else None
        if fix is None:
            first = next((line for line in str(cause).splitlines() if line.strip()), type(cause).__name__)
            token = get_token()
            fix = f"the Hub refused or broke off: {first.replace(token, '***') if token else first}; "
            fix += "nothing is half there: the same command goes on" if is_push else "try again"
        raise UserError(f"{repo}: {fix}") from error
