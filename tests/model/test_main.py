"""The commands inspect, convert and push."""

import json
from pathlib import Path
from typing import Any

import pytest

from aerie.infer import main as inference
from aerie.model import main as commands
from aerie.model.checkpoint import save_head
from tests import tiny
from tests.model.formats import published
from tests.model.hub_server import Hub
from tests.model.test_push import TOKEN, hub
from tests.tiny import call

__all__ = ["hub"]  # the fixture


@pytest.fixture(scope="module")
def target(tmp_path_factory: Any) -> Path:
    return tiny.target(tmp_path_factory.mktemp("target"), num_blocks=8)


def test_inspect_and_convert(tmp_path: Path, target: Path, capsys: Any) -> None:
    """A published head is inspected and converted to every layout."""
    head = published.safeailab_eagle3(tmp_path / "head")
    assert call(commands, "inspect", head, "--json") == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["layout"], shown["taps"], shown["left_out"]) == (
        "safeailab",
        None,
        ["embed_tokens.weight"],
    )
    assert (
        shown["vocabulary"] == {"draft": 107, "target": 320, "coverage": None}
        and shown["problems"] == []
    )
    for to in ("safeailab", "sglang", "speculators"):
        assert (
            call(commands, "convert", head, "--to", to, "--target", target, "--out", tmp_path / to)
            == 0
        )
        out = capsys.readouterr().out
        assert "note: names no taps; [2, 4, 5] are taken" in out and "equal bit for bit" in out
    save_head(tiny.head(tiny.vocab(vocab_size=400).embedding), tmp_path / "other")
    assert call(commands, "inspect", tmp_path / "other", "--target", target) == 1


def test_convert_overwrites(tmp_path: Path, target: Path, capsys: Any) -> None:
    """An export replaces an earlier one alone and only where that is asked."""
    head, out, new = (
        published.safeailab_eagle3(tmp_path / "head"),
        tmp_path / "out",
        tmp_path / "new",
    )
    convert = ("convert", head, "--to", "sglang", "--target", target, "--overwrite", "--out")
    out.mkdir()
    (out / "precious").write_text("do not touch")
    assert call(commands, *convert, out) == 2 and (out / "precious").exists()
    assert "it is no earlier export; name a new directory" in capsys.readouterr().err
    assert (
        call(commands, *convert, new) == 0
        and call(commands, *convert[:-2], *convert[-1:], new) == 2
    )
    assert call(commands, *convert, new) == 0 and (new / "config.json").exists()


def test_push(hub: Hub, tmp_path: Path, target: Path, capfd: Any) -> None:
    """A push is shown broken off repeated and fetched and the token is nowhere."""
    head, said = tmp_path / "head", ""
    save_head(published.eagle3(), head, target_path=str(target))
    (head / "conversations.jsonl").write_text("private\n")
    push = (
        "push",
        head,
        "--repo",
        "me/head",
        "--without-results",
        "--uncommitted",
        "--private",
        "--revision",
        "v2",
    )
    convert = (
        "convert",
        "me/head@v2",
        "--to",
        "speculators",
        "--target",
        target,
        "--out",
        tmp_path / "out",
    )
    hub.failures |= {
        ("POST", "/repos/create"): [401],
        ("PUT", "/upload/"): [403],
        ("POST", "/commit/"): [500],
    }
    for command, code, expected in (
        ((*push, "--dry-run"), 0, "push: would remove nothing, and ship to me/head@v2:"),
        (push, 2, "error: me/head: the Hub does not accept this login; run: hf auth login"),
        (push, 2, "error: me/head: this login may not do that; use a token that may"),
        (push, 2, "error: me/head: the Hub is out of reach, refused or broke off"),
        (push, 0, "5 files to me/head@v2"),
        (("inspect", "me/head@v2", "--target", target), 0, "taps        hidden_states [2, 4, 5]"),
        (convert, 0, "bit for bit"),
    ):
        assert call(commands, *command) == code
        out = "".join(capfd.readouterr())
        assert expected in out and ("conversations.jsonl stays here" in out) == (
            command[0] == "push"
        )
        assert ("--dry-run" in command) <= (hub.count("POST|PUT") == 0)
        assert code == 0 or not any(
            hub.repositories.get("me/head", {}).values()
        )  # nothing half uploaded
        said += out
    files = {
        "README.md",
        "config.json",
        "model.safetensors",
        "aerie/config.json",
        "aerie/model.safetensors",
    }
    assert hub.repositories["me/head"]["v2"].keys() == files
    words = (
        "generate",
        "--target",
        target,
        "--head",
        "me/head@v2",
        "--prompt",
        "Hi",
        "--max-new-tokens",
        "4",
    )
    assert call(inference, *words) == 0
    assert hub.private == {"me/head"} and hub.tokens == {f"Bearer {TOKEN}"}
    assert hub.count("PUT /upload/") == 3  # two, and a failed one; arrived files are not sent again
    contents = [
        content for files in hub.repositories["me/head"].values() for content in files.values()
    ]
    contents += [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert not any(TOKEN.encode() in content for content in [*contents, said.encode()])
