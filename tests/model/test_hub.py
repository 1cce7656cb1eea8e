"""The Hub, spoken to on loopback by huggingface_hub itself: fetching, shipping, breaking off and going on."""

from collections.abc import Iterator
from pathlib import Path

import huggingface_hub
import pytest
import torch
from huggingface_hub import constants

from aerie.configs.errors import UserError
from aerie.configs.schema.target_and_head import Eagle3Section
from aerie.model.checkpoint import head_facts, load_head, new_head, save_head
from aerie.model.heads.eagle import Eagle3Head
from aerie.model.hub import head_directory, readable_errors, require_login
from aerie.model.push import look, upload
from tests import tiny
from tests.model.formats import published
from tests.model.formats.published import TAPS, safeailab_eagle3
from tests.model.hub_server import Hub, Server

TOKEN = "hf_madeUpForTheTests0123456789abcdefg"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A Hub that huggingface_hub in this process talks to, with a login and a cache of its own."""
    with Server() as served:
        monkeypatch.setattr(constants, "ENDPOINT", served.address)
        template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace("https://huggingface.co", served.address)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        for name, value in (("HF_HUB_DISABLE_XET", True), ("HF_HUB_CACHE", str(tmp_path / "cache"))):
            monkeypatch.setattr(constants, name, value)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        huggingface_hub.close_session()
        yield served
    huggingface_hub.close_session()


def files_of(directory: Path) -> dict[str, Path | bytes]:
    return {path.name: path for path in directory.iterdir()}


def test_a_shipped_head_is_fetched_by_name_and_equals_the_local_one(hub: Hub, tmp_path: Path) -> None:
    one = published.eagle3()
    save_head(one, tmp_path / "head", step=7)
    address = upload(look("me/head"), {**files_of(tmp_path / "head"), "README.md": b"---\n---\n"}, True, "a head")
    assert address.startswith(hub.address) and hub.private == {"me/head"}
    two = load_head("me/head", ends=tiny.ends())
    assert isinstance(two, Eagle3Head) and two.config == one.config and head_facts("me/head") == {"step": 7}
    for name, value in one.state_dict().items():
        assert torch.equal(value, two.state_dict()[name]), name
    warm = new_head(Eagle3Section(init_from="me/head"), tiny.llama().config, tiny.ends(), 0, after_blocks=TAPS)
    assert torch.equal(warm.fc.weight, one.fc.weight)


def test_a_revision_is_a_branch_of_its_own_and_is_fetched_with_an_at_sign(hub: Hub, tmp_path: Path) -> None:
    for step, revision in ((1, None), (2, "better"), (3, "better")):
        save_head(tiny.head(tiny.ends().embedding, seed=step), tmp_path / "head", step=step)
        card: Path | bytes = b"---\ntags: [aerie]\n---\n"
        upload(look("me/head", revision), {**files_of(tmp_path / "head"), "README.md": card}, False, "a head")
    assert head_facts("me/head") == {"step": 1} and head_facts("me/head@better") == {"step": 3}
    assert torch.equal(load_head("me/head@better").fc.weight, load_head(tmp_path / "head").fc.weight)
    assert not hub.private


def test_a_pickled_head_is_fetched_only_where_there_is_nothing_better(hub: Hub, tmp_path: Path) -> None:
    upload(look("me/pickle"), files_of(safeailab_eagle3(tmp_path / "head")), False, "a head")
    place = head_directory("me/pickle")
    assert (place / "pytorch_model.bin").is_file()
    assert isinstance(load_head("me/pickle", ends=tiny.ends(), after_blocks=TAPS), Eagle3Head)
    both = {**files_of(tmp_path / "head"), **files_of(safeailab_eagle3(tmp_path / "safe", pickled=False))}
    upload(look("me/both"), both, False, "a head")
    assert not (head_directory("me/both") / "pytorch_model.bin").exists()


@pytest.mark.parametrize(
    ("method", "pattern", "status"),
    [("PUT", "/upload/", 403), ("POST", "/commit/", 500), ("POST", "/preupload/", 400), ("POST", "/batch", 400)],
)
def test_a_push_that_broke_off_leaves_nothing_half_there_and_is_repeated(
    hub: Hub, tmp_path: Path, method: str, pattern: str, status: int
) -> None:
    save_head(tiny.head(tiny.ends().embedding), tmp_path / "head")
    hub.failures[(method, pattern)] = [status]
    with pytest.raises(UserError, match="nothing is half there: the same command goes on") as caught:
        upload(look("me/head"), files_of(tmp_path / "head"), False, "a head")
    assert "\n" not in str(caught.value) and TOKEN not in str(caught.value)
    assert hub.repositories["me/head"]["main"] == {}
    before = hub.count("PUT /upload/")
    upload(look("me/head"), files_of(tmp_path / "head"), False, "a head")
    assert hub.repositories["me/head"]["main"].keys() == files_of(tmp_path / "head").keys()
    again = hub.count("PUT /upload/") - before
    assert again == (0 if pattern == "/commit/" else 1)  # what had arrived is not sent again
    assert torch.equal(load_head("me/head").fc.weight, load_head(tmp_path / "head").fc.weight)


def test_names_that_are_nowhere_are_one_sentence(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"me/none: no such local directory, and no such repository on the Hub"):
        load_head("me/none")
    hub.repositories["me/empty"] = {"main": {}}
    with pytest.raises(UserError, match="me/empty@v9: the repository has no such revision"):
        load_head("me/empty@v9")
    with pytest.raises(UserError, match=r"me/empty: the repository has no config\.json"):
        load_head("me/empty")
    with pytest.raises(UserError, match="runs/x/heads/eagle1: no such head directory; train one"):
        load_head("runs/x/heads/eagle1")  # too deep for a repository
    assert hub.count("runs/x") == 0
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(UserError, match="me/unreachable: "):
        load_head("me/unreachable")


def test_a_local_directory_wins_over_a_repository_of_the_same_name(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    save_head(tiny.head(tiny.ends().embedding), Path("me/head"))
    assert load_head("me/head").kind == "eagle1" and hub.requests == []


def test_without_a_login_nothing_is_sent(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
    with pytest.raises(UserError, match="no login for the Hub; run: hf auth login"):
        require_login()
    assert hub.requests == []


def test_a_message_that_quotes_the_token_is_shown_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    with pytest.raises(UserError, match=r"me/head: .* bad credentials '\*\*\*'") as caught, readable_errors("me/head"):
        raise RuntimeError(f"bad credentials '{TOKEN}'\nand more")
    assert TOKEN not in str(caught.value)
