"""The command line of heads that travel: inspect, convert, push."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from huggingface_hub import constants

from aerie.configs.errors import exit_code
from aerie.model import main as commands
from aerie.model.checkpoint import load_head, save_head
from aerie.model.formats.layouts import WRITABLE
from tests import tiny
from tests.model.formats import published
from tests.model.formats.published import safeailab_eagle3
from tests.model.hub_server import Hub, Server
from tests.model.test_push import TOKEN, hub

__all__ = ["hub"]  # the fixture
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.target(tmp_path_factory.mktemp("target"), num_blocks=8)


def call(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    """The exit code of a command line, in this process."""
    monkeypatch.setattr(sys, "argv", ["model/main.py", *map(str, arguments)])
    return exit_code(commands.main)


def test_a_published_head_is_inspected_and_converted_to_every_layout(
    tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    head = safeailab_eagle3(tmp_path / "head")
    assert call(monkeypatch, "inspect", head, "--target", target) == 0
    assert "fits" in capsys.readouterr().out
    assert call(monkeypatch, "inspect", head, "--json") == 0
    assert json.loads(capsys.readouterr().out)["layout"] == "safeailab"
    for to in ("safeailab", "sglang", "speculators"):
        assert call(monkeypatch, "convert", head, "--to", to, "--target", target, "--out", tmp_path / to) == 0
        out = capsys.readouterr().out
        assert "note: names no taps; [2, 4, 5] are taken" in out and "equal bit for bit" in out
        assert load_head(tmp_path / to).kind == "eagle3"
    assert {"safeailab", "sglang", "speculators"} == set(WRITABLE)


def test_mistakes_are_one_line_and_exit_code_2(
    tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    head, out = safeailab_eagle3(tmp_path / "head"), tmp_path / "out"
    convert = ("convert", head, "--to", "sglang", "--target", target, "--out", out)
    out.mkdir()
    (out / "precious").write_text("do not touch")
    cases = [
        ((*convert,), "not empty; name a new directory, or replace it with --overwrite"),
        (("convert", tmp_path / "none", *convert[2:-1], tmp_path / "new"), "no such head directory"),
        ((*convert[:-1], tmp_path / "new", "--after-blocks", "2,x"), "must be ascending block numbers"),
        ((*convert[:-1], tmp_path / "new", "--after-blocks", "4,2"), "must be ascending"),
        ((*convert[:-1], head / "config.json" / "sub"), "config.json is no directory; name another place"),
        ((*convert[:-1], tmp_path / "new", "--speculative-tokens", "-1"), "a cycle drafts at least one token"),
        ((*convert[:-1], tmp_path / "new", "--speculative-tokens", "0"), "a cycle drafts at least one token"),
        (("inspect", target), "a whole language model and no draft head: a target, or a draft_lm"),
        (("convert", target, *convert[2:-1], tmp_path / "new"), "a whole language model and no draft head"),
        (("push", target, "--repo", "me/head"), "a whole language model (a draft_lm, or a target)"),
        (("inspect", head, "--target", tmp_path / "gone"), "no such target directory"),
        ((*convert[:-1], tmp_path / "new", "--target-name", "x y"), "--target-name 'x y': no name of a model"),
        (("push", head, "--repo", "me/head", "--target-name", "a\nb"), "no name of a model"),
        (("push", head, "--repo", "no-user"), "no repository name; it looks like user/name"),
        (("push", head, "--repo", "me/head"), "no measured results"),
        (("push", head, "--repo", "me/head", "--without-results", "--uncommitted"), "name it with --target-name"),
    ]
    for arguments, message in cases:
        assert call(monkeypatch, *arguments) == 2, arguments
        lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
        assert len(lines) == 1 and message in lines[0], lines
    assert (out / "precious").read_text() == "do not touch" and not (tmp_path / "new").exists()
    assert call(monkeypatch, *convert, "--overwrite") == 2 and (out / "precious").exists()  # it is no export
    above = (*convert[:-1], tmp_path, "--overwrite")  # the head's own parent
    assert call(monkeypatch, *above) == 2 and (head / "config.json").exists()
    assert "holds something else than an earlier export" in capsys.readouterr().err
    (out / "precious").unlink()
    assert call(monkeypatch, *convert) == 0 and call(monkeypatch, *convert) == 2
    assert call(monkeypatch, *convert, "--overwrite") == 0 and (out / "config.json").exists()


def test_a_head_that_does_not_fit_is_exit_code_1(
    tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save_head(tiny.head(tiny.vocab(vocab_size=400).embedding), tmp_path / "head")
    assert call(monkeypatch, "inspect", tmp_path / "head", "--target", target) == 1
    assert "PROBLEM" in capsys.readouterr().out


def run(address: str, home: Path, *arguments: object) -> "subprocess.CompletedProcess[str]":
    """The command in a process of its own, logged in at a Hub on loopback."""
    environment = {**os.environ, "HF_ENDPOINT": address, "HF_TOKEN": TOKEN, "HF_HOME": str(home), "HF_HUB_OFFLINE": "0"}
    environment |= {"HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "model/main.py", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)


def test_a_dry_run_tells_what_goes_and_who_sees_it_and_does_without_the_hub(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    head = tmp_path / "head"
    save_head(published.eagle3(), head, target_path="a/b")
    push = ("push", head, "--repo", "me/head", "--without-results", "--uncommitted")
    assert call(monkeypatch, *push) == 0
    assert "3 files to me/head: http" in capsys.readouterr().out
    files = hub.repositories["me/head"]["main"]
    files |= {"pytorch_model.bin": b"of an earlier push", "figure.png": b"a stranger's"}
    before, sent = dict(files), hub.count("POST|PUT")
    assert call(monkeypatch, *push, "--dry-run") == 0
    out = capsys.readouterr().out
    assert "would ship to me/head (public)" in out and "\ngoes there: pytorch_model.bin\n" in out
    assert hub.repositories["me/head"]["main"] == before and hub.count("POST|PUT") == sent
    assert call(monkeypatch, *push, "--private", "--dry-run") == 2
    assert "me/head: exists and is public" in capsys.readouterr().err
    assert call(monkeypatch, *push) == 0
    assert "removed pytorch_model.bin of an earlier push" in capsys.readouterr().out
    assert hub.repositories["me/head"]["main"].keys() == before.keys() - {"pytorch_model.bin"}
    files = hub.repositories["me/head"]["main"]
    files["README.md"] = b"# by hand"
    assert call(monkeypatch, *push, "--dry-run") == 2
    assert "me/head: is somebody else's: it holds README.md, config.json, model.safetensors" in capsys.readouterr().err
    files["README.md"] = b"---\ntags: [aerie]\n---\n"
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert call(monkeypatch, *push, "--dry-run") == 0
    out = capsys.readouterr().out
    assert "note: whether it is there, whose it is and what a push would remove is not known: me/head: " in out
    assert "would ship to me/head (public, if it is new)" in out and "half there" not in out
    assert call(monkeypatch, *push) == 2


def test_a_reader_that_goes_away_is_no_traceback(tmp_path: Path) -> None:
    script = "from aerie.configs.errors import exit_code\nraise SystemExit(exit_code(lambda: print('x' * 10**6) or 0))"
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        said = process.stderr.read()
    assert process.returncode == 141 and said == b""


@pytest.mark.slow
def test_a_push_is_shown_broken_off_repeated_and_fetched_and_the_token_is_nowhere(tmp_path: Path, target: Path) -> None:
    head, home, said = tmp_path / "head", tmp_path / "home", ""
    save_head(published.eagle3(), head, target_path=str(target))
    (head / "conversations.jsonl").write_text("private\n")
    push = ("push", head, "--repo", "me/head", "--without-results", "--uncommitted", "--private", "--revision", "v2")
    with Server() as hub:
        shown = run(hub.address, home, *push, "--dry-run")
        assert shown.returncode == 0 and "would ship to me/head@v2 (private)" in shown.stdout, shown.stderr
        assert "stays here: conversations.jsonl" in shown.stdout and hub.count("POST|PUT") == 0
        hub.failures[("POST", "/commit/")] = [500]
        broken = run(hub.address, home, *push)
        assert broken.returncode == 2 and broken.stderr.splitlines()[-1].startswith("error: me/head: the Hub refused")
        assert "Traceback" not in broken.stderr and hub.repositories["me/head"]["v2"] == {}
        done = run(hub.address, home, *push)
        assert done.returncode == 0 and "3 files to me/head@v2" in done.stdout, done.stderr
        names = {"README.md", "config.json", "model.safetensors"}
        assert hub.repositories["me/head"]["v2"].keys() == names and hub.private == {"me/head"}
        assert hub.count("PUT /upload/") == 1 and hub.tokens == {f"Bearer {TOKEN}"}
        fetched = run(hub.address, home, "inspect", "me/head@v2", "--target", target)
        assert fetched.returncode == 0 and "taps        hidden_states [2, 4, 5]" in fetched.stdout, fetched.stderr
        out = tmp_path / "out"
        made = run(hub.address, home, "convert", "me/head@v2", "--to", "speculators", "--target", target, "--out", out)
        assert made.returncode == 0, made.stderr
        for process in (shown, broken, done, fetched, made):
            said += process.stdout + process.stderr
        for files in hub.repositories["me/head"].values():
            assert all(TOKEN.encode() not in content for content in files.values())
    assert TOKEN not in said
    for path in tmp_path.rglob("*"):
        assert not path.is_file() or TOKEN.encode() not in path.read_bytes(), path
