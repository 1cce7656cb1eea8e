"""A push to the Hub: what its repository holds before, and one commit that ships a head and removes an earlier one."""

import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from model.errors import UserError
from model.head_files import CALIBRATOR
from model.hub import readable_errors

TAG = "aerie"  # in the front matter of every card of this project
WEIGHTS = re.compile(
    r"model(-\d+-of-\d+)?\.safetensors|pytorch_model(-\d+-of-\d+)?\.bin|(medusa|hydra)_lm_head\.pt"
    r"|(model\.safetensors|pytorch_model\.bin)\.index\.json"
)
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

    def require_visibility(self, private: bool) -> None:
        """UserError where the user asked for a private repository and this one is public."""
        if private and self.exists and not self.is_private:
            raise UserError(
                f"{self.name}: exists and is public, and --private makes only a new one private; make it private on "
                f"its settings page first, or name a new one"
            )

    def removals(self, shipped: Collection[str]) -> tuple[str, ...]:
        """What an earlier push put there and this one does not: weights, their indexes and the records beside them.

        UserError for a stranger's weights, which a reader would take for the head's.
        """
        weights = [name for name in self.files if WEIGHTS.fullmatch(name) and name not in shipped]
        if weights and not self.is_ours:
            raise UserError(
                f"{self.name}: holds {', '.join(sorted(weights)[:4])}, which no push of this project put there and "
                f"which readers would take for the head's weights; remove them there, or name another repository"
            )
        records = [name for name in self.files if name in RECORDS and name not in shipped and self.is_ours]
        return tuple(sorted(weights + records))

    def replaces_a_strangers_card(self) -> bool:
        return "README.md" in self.files and not self.is_ours


def upload(repository: Repository, files: dict[str, Path | bytes], private: bool, message: str) -> str:
    """Ships files (name in the repository -> content) in one commit and returns the address of the commit.

    The same commit removes what an earlier push left. The repository, and its branch, are made where they are missing.
    A commit is whole or absent, and what was uploaded before a break is known to the Hub by its hash: the same call
    goes on from there. UserError before anything is sent for a public repository that was to be private, and for one
    with a stranger's weights.
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
        is_ours = False
        if "README.md" in files:
            card = hf_hub_download(name, "README.md", revision=found.sha)
            is_ours = TAG in _tags(Path(card).read_text(encoding="utf-8", errors="replace"))
    return Repository(name, revision, True, bool(found.private), files, is_ours)


def _tags(card: str) -> list[str]:
    """The tags in a card's front matter."""
    front = re.match(r"---\r?\n(.*?)\r?\n---", card, re.DOTALL)
    try:
        values = yaml.safe_load(front[1]) if front else None
    except yaml.YAMLError:
        return []
    tags = values.get("tags") if isinstance(values, dict) else None
    return [str(tag) for tag in tags] if isinstance(tags, list) else []
