"""Every suite of configs/bench is planned by the command, without the Hub and without its heads' weights."""

import json
import sys
from pathlib import Path

import pytest

from aerie.configs.schema.decode import METHODS
from aerie.infer.main import main
from aerie.infer.measure.bench import suite_of
from tests.configs.test_recipes import CONFIGS, load

SUITES = {
    "eagle2-t1": "8 rows x 2 samplings x 480 prompts of mt_bench, humaneval, gsm8k, alpaca, cnn_dm, natural_questions",
    "eagle2-t2": "5 rows x 1 samplings x 80 prompts of mt_bench",
    "eagle2-t3": "5 rows x 1 samplings x 160 prompts of mt_bench, gsm8k",
    "deagle": "3 rows x 2 samplings x 320 prompts of mt_bench, humaneval, gsm8k, alpaca",
    "svip-mtbench": "10 rows x 1 samplings x 80 prompts of mt_bench",
    "svip-eagle2": "3 rows x 1 samplings x 80 prompts of mt_bench",
    "svip-qwq": "4 rows x 2 samplings x 471 prompts of math500, gpqa_diamond, aime",
    "seeds": "17 rows x 2 samplings x 21 prompts",
}


@pytest.mark.parametrize("name", SUITES)
def test_every_suite_is_planned(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    run = Path("runs/seeds")  # where the rows of seeds.yaml that name a head expect it
    for kind in dict.fromkeys(kind for method in METHODS.values() for kind in method.heads):
        head = run / "heads" / kind
        head.mkdir(parents=True)
        (head / "config.json").write_text(json.dumps({"aerie_kind": kind}))
        (head / "model.safetensors").write_bytes(b"")
    words = ["bench", "--plan", "--config", str(CONFIGS / "bench" / f"{name}.yaml"), "--run", str(run)]
    if name == "seeds":  # whose target and prompts `make bench` makes
        prompts = tmp_path / "prompts.jsonl"
        prompts.write_text('{"turns": ["x"]}\n')
        words += ["--target", "some/target", "--bench.prompts.path", str(prompts)]
    monkeypatch.setattr(sys, "argv", ["main.py", *words])
    assert main() == 0
    assert f"bench: {SUITES[name]}, at most" in capsys.readouterr().out


@pytest.mark.parametrize("path", sorted((CONFIGS / "bench").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_row_and_every_point_of_a_suite_is_a_way_of_decoding(path: Path) -> None:
    bench = load(path).bench
    assert bench is not None and (path.stem in SUITES or path.stem in ("embedded", "seeds-full", "svip-embedded"))
    suite = suite_of(bench)
    for row, place in zip(suite.rows, suite.places, strict=True):
        assert (row.tree is None) == (METHODS[row.method].tree is None), place
    assert all(sampling.top_k == 0 and sampling.top_p == 1.0 for sampling in suite.samplings)


@pytest.mark.parametrize(
    ("words", "nodes"), [((), 60), (("--bench.rows.7.tree.nodes", "50"), 50), (("--bench.rows.7.tree.nodes", "48"), 48)]
)
def test_the_papers_other_sizes_are_overrides_of_a_row(words: tuple[str, ...], nodes: int) -> None:
    bench = load(CONFIGS / "bench" / "eagle2-t1.yaml", *words).bench
    assert bench is not None and bench.rows[7].method == "eagle2" and bench.rows[7].tree.nodes == nodes
