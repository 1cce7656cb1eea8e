"""Laws of the papers' claims: what is measured for them, its interval, and the verdict."""

import itertools
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from aerie.infer.measure.bench_files import Record, line_of
from aerie.infer.measure.bootstrap import Estimate, Side, estimate
from aerie.infer.measure.stage_facts import calibrations_of
from aerie.infer.papers import claims
from aerie.infer.papers.evidence import (
    CalibrationTables,
    Evidence,
    highest_of,
    mean,
    modelled_ms,
    read_costs,
    side_of_table,
)
from aerie.infer.papers.published import PUBLISHED, published_range
from aerie.model.storage import ROOT, Manifest, write_text
from tests import tiny
from tests.infer.made_up import FAILED, PROMPTS, TUNING, drafted, record, tree_of, voting_answers

COSTS = read_costs(TUNING)


@pytest.fixture
def two_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two prompts are enough for a verdict."""
    monkeypatch.setattr(claims, "FEWEST_PROMPTS", 2)


def verdicts(records: Any = (), *calibrations: CalibrationTables) -> dict[str, tuple[Any, str]]:
    """The measured value and the verdict of each claim that the evidence has a figure for."""
    lines = claims.judge_claims(Evidence(records, COSTS, calibrations))
    return {line.id: (line.value, line.verdict) for line in lines if line.ours}


def answers_of(row: int, tokens: tuple[int, ...], **about: Any) -> list[Record]:
    """An answer to each prompt."""
    return [
        drafted(tokens, row=row, prompt_id=name, **{"head": "eagle1", **about})
        for _, name in PROMPTS
    ]


@pytest.mark.usefixtures("two_are_enough")
def test_votes_claims() -> None:
    """DEAGLE's claims hold the deepest vote against fixed trees, on the same prompts."""
    records = [answer for answer in voting_answers() if answer.prompt in PROMPTS]
    judged = verdicts(records)
    assert judged["deagle-waste"] == (4 / 8, "holds")
    assert judged["deagle-tau"] == (2 / 4, "does not hold")
    # 8 tokens in 4 cycles: drafting 4 + 4, verifying 16, the rest 2; the vote drafts two levels
    # fewer. 8 tokens in 2 cycles: drafting 2 + 6, verifying 8, the rest 1.
    assert modelled_ms(records[8:], COSTS) == pytest.approx(24.0)
    assert modelled_ms(records[6:8], COSTS) == pytest.approx(17.0)
    assert judged["deagle-deep"] == (pytest.approx(17 / 24), "does not hold")
    assert judged["deagle-flat"] == (pytest.approx(1.0), "holds")  # more levels make it no slower
    unpriced = [line for line in claims.judge_claims(Evidence(records)) if line.ours]
    assert "deagle-flat" not in {line.id for line in unpriced}
    failed = [replace(r, **FAILED) if r.method == "deagle" else r for r in records]
    assert "deagle-waste" not in verdicts(failed)


@pytest.mark.usefixtures("two_are_enough")
@pytest.mark.parametrize(
    "changes",
    [{"levels": 4, "children": "sampled"}, {"levels": 9, "k": 8}, {"levels": 9, "nodes": 48}],
)
def test_depth_alone(changes: dict[str, Any]) -> None:
    """No paper draws a tree's children; another k or size changes more than the depth."""
    records = [answer for answer in voting_answers() if answer.prompt in PROMPTS]
    more = answers_of(-1, (9, 9), tree=tree_of("eagle2", **changes))
    assert verdicts([*more, *records]) == verdicts(records)
    shallow = [answer for answer in records if answer.tree is None or answer.tree.levels == 2]
    assert "deagle-fixed-falls" not in verdicts([*more, *shallow])


@pytest.mark.usefixtures("two_are_enough")
@pytest.mark.parametrize(
    ("margin", "verdict"),
    [(0.0, "holds"), (1.0, "holds"), (1.1, "does not hold"), (None, "does not hold")],
)
def test_rounding(margin: float | None, verdict: str) -> None:
    """A difference between equal logits is rounding, and no counterexample."""
    assert verdicts(answers_of(1, (2, 2), identical=False, margin=margin))["lossless"][1] == verdict


def test_best_row() -> None:
    """Each resample picks its own best row."""
    values = ([2, 5], [4, 1])
    best = highest_of([Side(pd.DataFrame({"count": 1.0, "x": row}), mean) for row in values])
    table = best.table.to_numpy()
    assert [best.figure(table[chosen].sum(0)) for chosen in ([0], [1], [0, 1])] == [4, 5, 3.5]


@pytest.mark.parametrize("part", ["static/calibration", "calibration", "tune"])
def test_refusals(part: str, tmp_path: Path, capsys: Any) -> None:
    """What is damaged, or measured another target, is refused by claims and report."""
    run = tmp_path / "run"
    target: dict[str, Any] = {"path": "some/target", "revision": None, "dtype": "auto"}
    values = {"run": str(run), "target": target, "data": {"conversations": ["x.jsonl"]}}
    config = tiny.recipe(tmp_path / "a.yaml", values)
    write_text(run / "bench" / "records.jsonl", line_of(record()) + line_of(drafted((3, 1))))
    write_text(run / part / "measured", "{}")
    for name, path in (("bench", "some/target"), (part, "some/new")):
        inputs = {"target": {**target, "path": path}}
        Manifest.of(run / name, inputs, {"argv": ["main.py", "redo", name]}).write(run / name)
    text = """
    aerie claims {run}
        exit 2
        {run}/{part}: measured another target
    aerie report --config {config}
        exit 2
        {run}/{part}: measured another target
    truncate -s 1 {run}/{part}/measured
    aerie claims {run}
        exit 2
        error: {run}/{part}/measured:
        run: aerie redo {part} --overwrite
    aerie report --config {config}
        exit 2
        error: {run}/{part}/measured:
        run: aerie redo {part} --overwrite
    """
    tiny.session(text, capsys, run=run, part=part, config=config)


def test_inverted_confidence() -> None:
    """A confidence that is inverted, and too few prompts, change a verdict."""
    chance = np.random.default_rng(0)
    confidence = chance.uniform(0.01, 0.99, 4000)
    nodes = pd.DataFrame({"prompt": np.repeat(np.arange(40), 100), "confidence": confidence})
    accepted = chance.uniform(size=4000) < confidence
    nodes = nodes.assign(place="0", acceptance=accepted.astype(float))

    def judge_nodes(table: pd.DataFrame, name: str) -> str:
        return verdicts((), CalibrationTables("eagle1", "eagle2", 0.0, {"nodes": table}))[name][1]

    inverted = nodes.assign(confidence=1 - confidence)
    for name in ("eagle2-correlation", "eagle2-calibrated", "eagle2-sure"):
        assert judge_nodes(nodes, name) == "holds"
        assert judge_nodes(inverted, name) == "does not hold"
    # only one prompt of 40 has a sure node
    alone = nodes[(nodes.confidence < 0.9) | (nodes.prompt < 1)]
    assert judge_nodes(alone, "eagle2-sure") == "open"


@pytest.mark.usefixtures("two_are_enough")
def test_ablations() -> None:
    """Trees without reranking are compared, though they have other nodes."""
    records = []
    ranks = itertools.product(("survival", "confidence"), (True, False))
    for row, (rank, rerank) in enumerate(ranks):
        records += answers_of(row, (2, 6 - row), tree=tree_of("eagle2", rank=rank, rerank=rerank))
    assert {name: value for name, (value, _) in verdicts(records).items()} == {
        "lossless": 1.0,
        "eagle2-value": 1.0,
        "eagle2-reranking": 0.5,
        "eagle2-both": 1.5,
    }


def test_cancelling_lengths() -> None:
    """Lengths that are too long and too short by turns fit the oracle on average alone."""
    cycles = pd.DataFrame(
        {"prompt": np.arange(40).repeat(2), "levels": [3, 7] * 40, "oracle": 5.0, "answered": 0}
    )
    judged = verdicts((), CalibrationTables("draft_lm", "sps-svip", 0.0, {"cycles": cycles}))
    assert judged["svip-oracle-fit"] == (0.0, "holds")
    assert judged["svip-oracle-gap"] == (2.0, "does not hold")


def test_full_bench_links(tmp_path: Path) -> None:
    """make bench-full judges by the calibrations and costs of make bench."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    seeds = tmp_path / "runs" / "seeds"
    full = tmp_path / "runs" / "seeds-full"
    python = tmp_path / ".venv" / "bin" / "python"
    for name in ("calibration/provenance", "svip/calibration/provenance", "tune/tune"):
        write_text(seeds / f"{name}.json", "{}")
    for name in ("prompts", "calibration"):
        write_text(seeds / "conversations" / f"{name}.jsonl", '{"question_id": 1}\n')
    write_text(python, "#!/bin/sh\n")
    python.chmod(0o755)
    for _ in range(2):
        subprocess.run(
            ["make", "-o", "bench", "bench-full"], cwd=tmp_path, check=True, capture_output=True
        )
    linked = [path.resolve() for path in calibrations_of(full)]
    assert linked == calibrations_of(seeds) and len(linked) == 2
    assert (full / "tune" / "tune.json").is_file()


def test_intervals() -> None:
    """Prompts are clusters: an interval halves with four times the prompts, not the lines."""

    def side(prompts: int, alike: int) -> Side:
        """Means over `alike` equal lines per prompt: only the first adds information."""
        values = np.random.default_rng(1).normal(size=prompts).repeat(alike)
        table = pd.DataFrame({"prompt": np.arange(prompts).repeat(alike), "x": values})
        return side_of_table(table, {"value": "x"})

    once, repeated, more = (estimate([side(*size)]) for size in ((50, 1), (50, 30), (200, 1)))
    assert once[:3] == pytest.approx(repeated[:3])
    assert (more.high - more.low) / (once.high - once.low) == pytest.approx(0.5, abs=0.1)
    assert once.high - once.low == pytest.approx(2 * 1.96 / np.sqrt(50), rel=0.25)
    paired = estimate([side(50, 1), side(50, 1)])
    assert paired[:3] == (0.0, 0.0, 0.0)


GAIN = {"at_least": 0, "effect": 0.2}
EVERY = {"statistic": "share", "at_least": 1}
NONE = {"statistic": "share", "at_most": 0}


@pytest.mark.parametrize(
    ("claim", "interval", "verdict"),
    [
        (GAIN, (0.3, 0.1, 0.5), "holds"),
        (GAIN, (0.05, -0.1, 0.19), "does not hold"),  # an effect of 0.2 is ruled out
        (GAIN, (0.05, -0.1, 0.3), "160 prompts"),  # +-0.2 on 40 prompts: +-0.1 needs 160
        ({"at_least": 1, "effect": 0.02}, (1, 1, 1), "does not hold"),  # a tie is not faster
        ({"at_least": -0.1, "at_most": 0.1}, (0.0, -0.05, 0.05), "holds"),
        ({"at_least": -0.1, "at_most": 0.1}, (0.0, -0.2, 0.2), "160 prompts"),
        ({"at_most": 0}, (0.5, 0.4, 0.6), "does not hold"),
        ({"at_most": 0}, (0.0, 0.0, 0.0), "holds"),
        ({"at_most": 0}, (0.0, -0.1, 0.1), "more than 100,000 prompts"),
        ({"statistic": "share", "at_least": 0.93}, (1.0, 0.912, 1.0), "51 prompts"),
        ({"statistic": "share", "at_most": 0.09}, (0.0, 0.0, 0.088), "holds"),
        (EVERY, (1.0, 0.912, 1.0), "holds"),  # no counterexample
        (NONE, (0.01, 0.0, 0.03), "does not hold"),  # one is enough
    ],
)
def test_verdict_rules(claim: Any, interval: Any, verdict: str) -> None:
    """A verdict asks for the whole interval; without one, the prompts that settle it are told."""
    judged, why = claims.judge_estimate(claim, Estimate(*interval, 40))
    if "prompts" in verdict:
        assert f" {verdict} would settle it" in why
        verdict = "open"
    few, _ = claims.judge_estimate(claim, Estimate(*interval, 5))
    assert (judged, few) == (verdict, verdict if claim in (EVERY, NONE) else "open")


def test_published_figures() -> None:
    """The tables of the papers are complete, and the claims have different names."""
    rows = PUBLISHED.drop_duplicates(["source", "model", "method", "temperature", "key", "value"])
    counts = {
        **dict.fromkeys([f"DEAGLE table {number}" for number in (1, 2, 3, 4)], 28),
        **dict.fromkeys([f"SVIP table {number}" for number in (2, 3, 5)], 24),
        **{"EAGLE-2 table 1": 32, "EAGLE-2 table 2": 8, "EAGLE-2 table 3": 4},
    }
    assert counts.items() <= rows.source.value_counts().to_dict().items()
    entry = {"source": "EAGLE-2 table 1", "of": "eagle2", "against": "eagle", "figure": "tau"}
    assert published_range(entry, 1.0, is_ratio=False) == "+0.48 to +1.51 (28 figures)"
    assert pd.DataFrame(claims.all_claims()).id.is_unique
