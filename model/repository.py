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
