"""A push into a repository that is there already: what goes with it, who sees it, and who may write."""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from aerie.configs.errors import UserError
from aerie.model.checkpoint import load_head, save_head
from aerie.model.push import Repository, look, upload
from tests import tiny
from tests.model.hub_server import Hub
from tests.model.test_hub import TOKEN, files_of, hub

__all__ = ["hub"]  # the fixture
CARD = b"---\ntags:\n- draft-head\n- aerie\n---\n"


def sharded(directory: Path) -> dict[str, Path | bytes]:
    """A head in two shards, as large ones are published."""
    save_head(tiny.head(tiny.ends().embedding), directory)
    state = {name: value.clone() for name, value in load_head(directory).state_dict().items()}
    names = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    table = {name: names[place % 2] for place, name in enumerate(sorted(state))}
    for shard in names:
        save_file({name: state[name] for name in state if table[name] == shard}, directory / shard)
    (directory / "model.safetensors").unlink()
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": table}))
    return {**files_of(directory), "README.md": CARD}


def test_a_second_push_removes_what_the_first_left_and_nothing_of_anybody_elses(hub: Hub, tmp_path: Path) -> None:
    upload(look("me/head"), {**sharded(tmp_path / "one"), "calibration.json": b"{}"}, False, "a head")
    assert torch.equal(load_head("me/head").fc.weight, load_head(tmp_path / "one").fc.weight)  # both shards came
    files = hub.repositories["me/head"]["main"]
    files |= {".gitattributes": b"*.bin lfs", "figure.png": b"a stranger's", "notes/model.safetensors": b"not on top"}
    save_head(tiny.head(tiny.ends().embedding, seed=9), tmp_path / "two")
    found = look("me/head")
    gone = ["calibration.json", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    assert list(found.removals(files_of(tmp_path / "two"))) == [*gone, "model.safetensors.index.json"]
    upload(found, {**files_of(tmp_path / "two"), "README.md": CARD}, False, "another head")
    kept = {".gitattributes", "figure.png", "notes/model.safetensors"}
    assert hub.repositories["me/head"]["main"].keys() == kept | {"README.md", "config.json", "model.safetensors"}
    assert torch.equal(load_head("me/head").fc.weight, load_head(tmp_path / "two").fc.weight)
    pickled = {
        "config.json": (tmp_path / "two" / "config.json").read_bytes(),
        "pytorch_model.bin": b"1",
        "README.md": CARD,
    }
    assert look("me/head").removals(pickled) == ("model.safetensors",)  # it would be read before the pickle


def test_a_branch_removes_only_what_lies_on_it(hub: Hub, tmp_path: Path) -> None:
    upload(look("me/head"), sharded(tmp_path / "one"), False, "a head")
    save_head(tiny.head(tiny.ends().embedding, seed=9), tmp_path / "two")
    upload(look("me/head", "whole"), {**files_of(tmp_path / "two"), "README.md": CARD}, False, "a head")
    assert "model.safetensors.index.json" in hub.repositories["me/head"]["main"]
    assert hub.repositories["me/head"]["whole"].keys() == {"README.md", "config.json", "model.safetensors"}
    assert not look("me/head", "whole").removals(files_of(tmp_path / "two"))


def test_a_strangers_weights_are_neither_removed_nor_left_to_be_read(hub: Hub, tmp_path: Path) -> None:
    theirs = {"README.md": b"---\ntags: [llama]\n---\n", "pytorch_model.bin": b"1", "summary.json": b"{}"}
    hub.repositories["me/model"] = {"main": dict(theirs)}
    save_head(tiny.head(tiny.ends().embedding), tmp_path / "head")
    with pytest.raises(UserError, match=r"it holds README\.md, pytorch_model\.bin, which no push of this project put"):
        upload(look("me/model"), files_of(tmp_path / "head"), False, "a head")
    assert hub.repositories["me/model"]["main"] == theirs


@pytest.mark.parametrize(
    ("files", "named"),
    [
        ({"README.md": b"their words", "summary.json": b"{}"}, "README.md"),
        ({"README.md": CARD.replace(b"aerie", b"x") + b"words", "model.safetensors": b"1"}, "README.md"),
        ({"model.safetensors": b"1"}, "model.safetensors"),
        ({"config.json": b"{}"}, "config.json"),
        ({"consolidated.safetensors": b"1", ".gitattributes": b""}, "consolidated.safetensors"),
        ({"gguf/model-q4.gguf": b"1"}, "gguf/model-q4.gguf"),
    ],
)
def test_a_strangers_repository_is_never_written(hub: Hub, tmp_path: Path, files: dict[str, bytes], named: str) -> None:
    hub.repositories["me/model"] = {"main": dict(files)}
    save_head(tiny.head(tiny.ends().embedding), tmp_path / "head")
    with pytest.raises(UserError, match=f"me/model: is somebody else's: it holds {re.escape(named)}"):
        upload(look("me/model"), files_of(tmp_path / "head"), False, "a head")
    assert hub.repositories["me/model"]["main"] == files and hub.count("POST|PUT") == 0


@pytest.mark.parametrize("card", [b"", b"---\nlicense: mit\n---\n"])
def test_a_repository_as_the_hub_makes_it_is_nobodys_yet(hub: Hub, tmp_path: Path, card: bytes) -> None:
    hub.repositories["me/new"] = {"main": {".gitattributes": b"*.bin lfs", "README.md": card}}
    save_head(tiny.head(tiny.ends().embedding), tmp_path / "head")
    upload(look("me/new"), {**files_of(tmp_path / "head"), "README.md": CARD}, False, "a head")
    assert hub.repositories["me/new"]["main"]["README.md"] == CARD and look("me/new").is_ours


@pytest.mark.parametrize("card", [b"", b"---\n: [\n---\n", b"---\n- aerie\n---\n", b"aerie", b"\xff\xfe"])
def test_a_card_that_does_not_say_so_is_not_ours(hub: Hub, card: bytes) -> None:
    hub.repositories["me/head"] = {"main": {"README.md": card}}
    assert not look("me/head").is_ours


def test_private_is_refused_for_a_public_repository_and_nothing_is_sent(hub: Hub, tmp_path: Path) -> None:
    save_head(tiny.head(tiny.ends().embedding), tmp_path / "head")
    hub.repositories["me/head"] = {"main": {}}
    with pytest.raises(UserError, match=r"me/head: exists and is public, .*make it private on its settings page first"):
        upload(look("me/head"), files_of(tmp_path / "head"), True, "a head")
    assert hub.repositories["me/head"]["main"] == {} and hub.count("POST|PUT") == 0
    hub.private.add("me/head")
    for private in (True, False):  # whoever does not ask changes nothing
        upload(look("me/head"), {**files_of(tmp_path / "head"), "README.md": CARD}, private, "a head")
    assert hub.private == {"me/head"}
    with pytest.raises(
        UserError, match="me/head: "
    ):  # made public behind our back: an old look does not create it anew
        upload(Repository("me/head"), files_of(tmp_path / "head"), True, "a head")


@pytest.mark.parametrize("pattern", ["/preupload/", "/batch", "/commit/", "/repos/create", "/branch/"])
def test_a_login_that_may_not_write_is_told_so_and_not_to_repeat(hub: Hub, tmp_path: Path, pattern: str) -> None:
    save_head(tiny.head(tiny.ends().embedding), tmp_path / "head")
    hub.failures[("POST", pattern)] = [403]
    with pytest.raises(
        UserError, match="this login may not write there, and repeating will not help; use a token"
    ) as caught:
        upload(look("me/head", "v2"), files_of(tmp_path / "head"), False, "a head")
    assert "\n" not in str(caught.value) and TOKEN not in str(caught.value)
    assert "same command" not in str(caught.value)


def test_a_login_that_is_not_known_is_told_so(hub: Hub, tmp_path: Path) -> None:
    save_head(tiny.head(tiny.ends().embedding), tmp_path / "head")
    hub.failures[("POST", "/repos/create")] = [401]
    with pytest.raises(UserError, match=r"the Hub does not accept this login .*run: hf auth login"):
        upload(look("me/head"), files_of(tmp_path / "head"), False, "a head")


def test_a_head_that_may_not_be_read_is_told_so(hub: Hub, tmp_path: Path) -> None:
    hub.repositories["me/head"] = {"main": {"config.json": b"{}"}}
    hub.failures[("GET", "/api/models/me/head")] = [403]
    with pytest.raises(UserError, match="me/head: this login may not read it"):
        load_head("me/head")
