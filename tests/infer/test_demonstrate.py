"""The command `verify` as its code: a table and 0 for decoders that are lossless, 1 for one that is not."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from aerie.configs.schema.decode import MethodConfig, TypicalConfig
from aerie.configs.schema.target_and_head import TargetConfig
from aerie.infer.decode import engine, verify
from aerie.infer.decode.sampling import Sampler
from aerie.infer.decode.tree import Tree
from aerie.infer.decode.verify import Verdict
from aerie.infer.measure.lossless import Options, demonstrate, write_miniature
from aerie.model.storage import read_json


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[TargetConfig, dict[str, str]]:
    """A target whose answers are long enough to differ, and the heads to decode with."""
    directory = tmp_path_factory.mktemp("run")
    target = write_miniature(directory, vocabulary=48)
    return target, {kind: str(directory / "heads" / kind) for kind in ("eagle1",)}


def options(json: Path) -> Options:
    return Options(("vanilla", "eagle2"), prompts=2, draws=200, seed=0, json=json, plan=False)


def test_lossless_methods_give_a_table_and_code_0(
    run: tuple[TargetConfig, dict[str, str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A row with typical acceptance is listed, labelled and not tested."""
    typical = MethodConfig("medusa", typical=TypicalConfig())
    assert demonstrate(options(tmp_path / "proof.json"), *run, others=(typical,)) == 0
    head, _, *rows = capsys.readouterr().out.splitlines()
    assert head.split()[:2] == ["method", "head"]
    assert [row.split()[0] for row in rows] == ["vanilla", "eagle2", "medusa"]
    assert all("2/2" in row and row.endswith("lossless") for row in rows[:2]) and "not tested" in rows[2]
    written: Any = read_json(tmp_path / "proof.json")
    assert written["holds"] and [row["greedy"]["identical"] for row in written["rows"][:2]] == [2, 2]
    assert min(law["p_value"] for row in written["rows"] for law in row["laws"]) > 0


def test_a_decoder_that_drops_its_bonus_for_the_second_best_gives_code_1(
    run: tuple[TargetConfig, dict[str, str]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def second_best(tree: Tree, logits: Tensor, sampler: Sampler, typical: Any) -> Verdict:
        right = verify.verify(tree, logits, sampler, typical)
        return replace(right, bonus=int(logits[right.path[-1]].topk(2).indices[1]))

    monkeypatch.setattr(engine, "verify", second_best)
    assert demonstrate(options(tmp_path / "proof.json"), *run) == 1
    printed = capsys.readouterr().out
    assert printed.count("FAILED: greedy, law at T=0.6/p=0.8") == printed.count("0/2") == 2
    assert "vanilla: prompt 0, new token 1: " in printed and " logits " in printed
    assert not read_json(tmp_path / "proof.json")["holds"]
