"""tune from end to end on a tiny run: a choice that generate and bench accept, and its measurement."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from aerie.model.checkpoint import save_head
from tests import tiny

ROOT = Path(__file__).resolve().parents[3]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def call(*words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "infer/main.py", *map(str, words)],
        cwd=ROOT,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("tune")
    tiny.target(root / "target")
    head = tiny.head(tiny.llama().get_input_embeddings().weight.detach(), scale=8.0)
    save_head(head, root / "run/heads/eagle1")
    lines = {"a": range(4), "b": range(4, 8)}
    for name, numbers in lines.items():
        (root / f"{name}.jsonl").write_text(
            "".join(
                json.dumps({"question_id": n, "category": "x", "turns": [f"Count {n} boats."]}) + "\n" for n in numbers
            )
        )
    section = {
        "prompts": {"path": str(root / "a.jsonl"), "max_new_tokens": 12},
        "measure": {"path": str(root / "b.jsonl"), "max_new_tokens": 12},
        "levels": 3,
        "k": 3,
    }
    values = {
        "run": str(root / "run"),
        "threads": 1,
        "target": {"path": str(root / "target"), "dtype": "float32"},
        "data": {"conversations": [str(root / "none.jsonl")]},
        "bench": {"prompts": section["measure"], "rows": [{"method": "vanilla"}], "reference": False},
        "tune": section,
    }
    return tiny.recipe(root / "recipe.yaml", values)


@pytest.mark.slow
def test_the_choice_is_written_measured_and_taken_by_generate_and_bench(recipe: Path) -> None:
    done = call("tune", "--config", recipe)
    assert done.returncode == 0, done.stderr
    folder = recipe.parent / "run/tune"
    chosen = yaml.safe_load((folder / "tuned.yaml").read_text())
    measured, found = (json.loads((folder / name).read_text()) for name in ("measured.json", "tune.json"))
    assert found["chosen"] == "eagle1" and found["heads"][0]["choice"]["method"] == chosen["method"]
    assert measured["rows"][1]["method"]["method"] == chosen["method"] and measured["predicted_over_measured"] > 0
    assert {"1", "2", "60"} <= found["heads"][0]["costs_ms"]["verify"].keys()
    again = call("tune", "--config", recipe)
    assert again.returncode == 0 and "whole, reused" in again.stdout
    row = folder / "tuned.yaml"
    said = call("generate", "--config", recipe, "--row", row, "--prompt", "Count 3 boats.", "--max-new-tokens", 8)
    assert said.returncode == 0, said.stderr
    bench = call("bench", "--config", recipe, "--row", row)
    assert bench.returncode == 0 and "8 answers" in bench.stdout, bench.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--tune.levels", "1"], "levels and k are at least 2"),
        (["--tune.measure", "null", "--tune.grid", "true"], "set them"),
        (["--head", "nowhere"], "nowhere"),
        (["--tune.prompts.path", "nowhere.jsonl"], "nowhere.jsonl"),
    ],
)
def test_what_cannot_be_tuned_is_one_line(recipe: Path, words: list[str], said: str) -> None:
    done = call("tune", "--config", recipe, "--plan", *words)
    assert done.returncode == 2 and said in done.stderr and "Traceback" not in done.stderr
