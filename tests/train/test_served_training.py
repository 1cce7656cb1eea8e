"""Laws of online training from servers: its losses and weights are those of a local one."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from aerie.configs.schema.heads import TargetConfig
from aerie.data import servers
from aerie.model.storage import WEIGHTS
from aerie.model.target import Target
from aerie.train import main as train_main
from tests import tiny
from tests.data.state_server import StateStandIn
from tests.train.sittings import lines
from tests.train.test_main import TAPS, write_recipe

HEADS: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {  # the section, and the server's ids
    "eagle1": ({"kind": "eagle1"}, (7,)),
    "eagle3": ({"kind": "eagle3", "draft_vocab_size": 160}, (*TAPS, 7)),
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("served")
    tiny.target(root / "target", num_blocks=7)
    tiny.write_conversations(root / "train.jsonl", 60)
    for kind, (head, _) in HEADS.items():
        write_recipe(
            root / f"{kind}.yaml",
            root,
            {"learning_rate": 1e-3, "accumulation": 2, "save_every": 2},
            head=head,
            tree={"levels": 4},
            features={"mode": "online"},
        )
    return root


def server_of(root: Path, kind: str, **options: Any) -> StateStandIn:
    target = Target.load(TargetConfig(str(root / "target"), dtype="float32"))
    return StateStandIn(target.model, HEADS[kind][1], root / "states", **options)


def train(root: Path, kind: str, run: str, server: StateStandIn | None = None) -> int:
    words = ["--config", root / f"{kind}.yaml", "--run", root / run]
    if server is not None:
        words += ["--features.server.urls", f"[{server.url}]"]
        words += ["--features.server.states", server.states, "--features.server.retries", 0]
    return tiny.call(train_main, *words)


def losses(run: Path) -> list[float]:
    return [value for line in lines(run) for key, value in line.items() if key.endswith("loss")]


def weights(run: Path, kind: str) -> dict[str, torch.Tensor]:
    return load_file(run / "heads" / kind / WEIGHTS)


@pytest.mark.parametrize("kind", HEADS)
def test_the_same_training(kind: str, root: Path) -> None:
    """Losses and weights are those of a training that runs the target, to rounding."""
    assert train(root, kind, f"{kind}-local") == 0
    with server_of(root, kind) as server:
        assert train(root, kind, f"{kind}-served", server) == 0
    local, served = root / f"{kind}-local", root / f"{kind}-served"
    assert losses(served) == pytest.approx(losses(local), rel=1e-4) and losses(local)
    for name, weight in weights(local, kind).items():
        torch.testing.assert_close(weights(served, kind)[name], weight, atol=2e-3, rtol=0)
    assert [*server.states.iterdir()] == []


def test_the_blocks_stay_away(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A target that is only served is trained for without its blocks."""
    with server_of(root, "eagle3") as server:
        server.ids = (0, *server.ids)
        monkeypatch.setattr(servers, "FITS_BYTES", 0)
        monkeypatch.setattr(Target, "load", None)
        assert train(root, "eagle3", "apart", server) == 0


def test_a_server_that_ends(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The training ends in a line; the same command goes on from its save to the same weights."""
    with server_of(root, "eagle1") as server:
        assert train(root, "eagle1", "undisturbed", server) == 0
    with server_of(root, "eagle1", fault=lambda number: "die" if number > 80 else "") as server:
        assert train(root, "eagle1", "stopped", server) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert server.url.removesuffix("/v1") in error and "vllm serve" in error
    with server_of(root, "eagle1") as server:
        assert train(root, "eagle1", "stopped", server) == 0
    assert "going on from step" in capsys.readouterr().out
    for name, weight in weights(root / "undisturbed", "eagle1").items():
        assert weights(root / "stopped", "eagle1")[name].equal(weight)
    assert [*server.states.iterdir()] == []
