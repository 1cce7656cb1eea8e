"""The Hugging Face Hub: heads fetched by repository name, and shipped in one commit.

The endpoint and the login are huggingface_hub's own (HF_ENDPOINT, HF_TOKEN or `hf auth login`); no token is read, kept
or printed here. huggingface_hub is imported where it is used: a local path costs nothing.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from model.errors import UserError

HUB_ID = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@(?P<revision>[\w./-]+))?")
SMALL = ("config.json", "recipe.yaml", "provenance.json", "calibration.json", "README.md")
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
        if not any(place.glob("*.safetensors")):
            place = Path(snapshot_download(repo, revision=revision, allow_patterns=[*SMALL, *PICKLED]))
    if not (place / "config.json").is_file():
        raise UserError(f"{repo}: the repository has no config.json: it is no head")
    return place


def upload(repo: str, files: dict[str, Path | bytes], private: bool, revision: str | None, message: str) -> str:
    """Ships files (name in the repository -> content) in one commit and returns the address of the commit.

    The repository, and the branch `revision`, are made where they are missing. A commit is whole or absent, and what
    was uploaded before a break is known to the Hub by its hash: the same call goes on from there.
    """
    from huggingface_hub import CommitOperationAdd, HfApi

    api = HfApi()
    with readable_errors(repo):
        api.create_repo(repo, private=private or None, exist_ok=True)
        if revision is not None:
            api.create_branch(repo, branch=revision, exist_ok=True)
        operations = [
            CommitOperationAdd(path_in_repo=name, path_or_fileobj=str(file) if isinstance(file, Path) else file)
            for name, file in sorted(files.items())
        ]
        commit: Any = api.create_commit(repo, operations, commit_message=message, revision=revision)
    return str(commit.commit_url)


def require_login() -> None:
    """UserError where huggingface_hub would find no token."""
    from huggingface_hub import get_token

    if not get_token():
        raise UserError("push: no login for the Hub; run: hf auth login (or set HF_TOKEN)")


@contextmanager
def readable_errors(repo: str) -> Iterator[None]:
    """Turns what huggingface_hub raises into one line that names the repository and the fix, and never a token."""
    from huggingface_hub import errors, get_token

    try:
        yield
    except errors.GatedRepoError as error:
        raise UserError(f"{repo}: gated on the Hub; ask for access on its page, then run: hf auth login") from error
    except errors.RepositoryNotFoundError as error:
        raise UserError(
            f"{repo}: no such local directory, and no such repository on the Hub (if it is private: hf auth login)"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise UserError(f"{repo}: the repository has no such revision") from error
    except errors.LocalEntryNotFoundError as error:
        raise UserError(f"{repo}: no such local directory, and the Hub cannot be reached") from error
    except (errors.HfHubHTTPError, errors.HFValidationError, OSError, RuntimeError) as error:
        lines = [line for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
        text, token = lines[0], get_token()
        raise UserError(
            f"{repo}: the Hub refused or broke off: {text.replace(token, '***') if token else text}; "
            f"nothing is half there: the same command goes on"
        ) from error
