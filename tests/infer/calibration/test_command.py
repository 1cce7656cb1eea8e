"""calibrate as a user runs it: the calibrator beside the head, rows that decode by it, and what is refused."""

import json
from pathlib import Path

import pytest

from tests.infer.test_main import recipe, refused, run

__all__ = ["recipe"]
CALIBRATED = (
    "--bench.rows", '[{"method": "vanilla"}, {"method": "eagle2", "tree": {"calibrated": "isotonic"}}]',
    "--bench.sampling", '[{"temperature": 0}]', "--bench.reference", "false",
)  # fmt: skip


@pytest.mark.slow
def test_a_calibrator_is_fitted_used_and_refused_for_other_weights(recipe: Path, tmp_path: Path) -> None:
    head, config = tmp_path / "run" / "heads" / "eagle1", ("--config", str(recipe))
    assert "calibrator.json" in refused("bench", *config, *CALIBRATED)
    out = run("calibrate", *config, "--calibrate.oracle_levels", "4").stdout
    assert "not fitted on" in out and (head / "calibrator.json").is_file()
    analysis = json.loads((tmp_path / "run" / "calibration" / "analysis.json").read_text())
    assert analysis["oracle"]["all"]["cycles"] > 0 and analysis["laws"]["inequalities"]["tv_above_bound"] == 0.0
    run("bench", *config, *CALIBRATED)
    rows = [json.loads(line) for line in (tmp_path / "run" / "bench" / "records.jsonl").read_text().splitlines()]
    drafted = [row for row in rows if row["method"] == "eagle2"]
    assert drafted and all(row["identical"] for row in drafted)
    assert all(row["tree"]["settings"]["calibrated"] == "isotonic" for row in drafted)
    run("report", *config, *CALIBRATED)
    assert ">Calibration<" in (tmp_path / "run" / "report" / "index.html").read_text()
    answer = ("generate", *config, "--prompt", "Please count 4 boats.", "--max-new-tokens", "8")
    assert run(*answer, "--tree.calibrated", "temperature").stdout == run(*answer).stdout
    values = json.loads((head / "calibrator.json").read_text())
    (head / "calibrator.json").write_text(json.dumps({**values, "head": {"model.safetensors": "0"}}))
    assert "other weights" in refused(*answer, "--tree.calibrated", "temperature")
