"""Laws of the report: summary.json's contract, a complete and self-contained page, tables, sweeps, DEAGLE's claim."""

import csv
import html
import itertools
import json
import re
import shutil
import subprocess
import xml.etree.ElementTree as ET
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pandas as pd
import pytest
from safetensors.numpy import save_file

from aerie.configs.errors import UserError
from aerie.configs.read import as_dict
from aerie.configs.schema.decode import (
    ConstantConfig,
    DynamicConfig,
    Method,
    MethodConfig,
    VoteConfig,
)
from aerie.infer import main as commands
from aerie.infer.decode.stop import Vote
from aerie.infer.measure.bench_files import SUITE, Cell, Record, SuiteFile, SweepPoint, line_of
from aerie.infer.measure.bootstrap import Estimate, Side, estimate, ratio_of_sums
from aerie.infer.measure.stage_facts import calibrations_of
from aerie.infer.measure.tree_shape import TreeShape, tree_shape
from aerie.infer.papers import claims
from aerie.infer.papers.appendix import claim_pictures, papers_appendix
from aerie.infer.papers.evidence import (
    CalibrationTables,
    Evidence,
    highest_of,
    modelled_ms,
    side_of_table,
)
from aerie.infer.papers.published import PUBLISHED, published_range
from aerie.infer.report.page import write_report
from aerie.model.storage import ROOT, Manifest, read_json, write_json, write_text
from tests.infer.draws import decoder_of, make_target
from tests.infer.made_up import FAILED, GREEDY, drafted, milliseconds, record, write_run
from tests.infer.test_calibrate import write_calibration
from tests.tiny import call, recipe

PROMPTS = (("sums", "a"), ("sums", "b"))
# trees: a level costs 1 ms, verifying 2 ms for one node and 4 for 60, the rest 0.5 a cycle, a plain cycle 3
COSTS = {
    "draft": {"1": [1.0, 1.0], "10": [1.0, 1.0]},
    "verify": {"1": 2.0, "60": 4.0},
    "rest": 0.5,
    "plain": 3.0,
}
PREDICTED = {
    "name": "eagle2, 6 levels, k 10, 60 nodes",
    "tau": 3.0,
    "ms_per_token": 2.0,
    "speedup": 1.5,
}
PREDICTIONS = {"choice": PREDICTED, "published": PREDICTED, "trees": [PREDICTED], "rules": []}
TUNING: dict[str, Any] = {
    "chosen": "eagle1",
    "heads": [{"kind": "eagle1", "costs_ms": COSTS, **PREDICTIONS}],
}
ROW_KEYS = set(
    "method head head_path task temperature top_k top_p prompts verify tree new_tokens tau tau_macro "
    "accepted_histogram tokens_per_s speedup speedup_ci95 speedup_mean_per_prompt speedup_with_prefill "
    "target_forwards draft_forwards draft_forwards_wasted draft_nodes accept_rate identical mismatch "
    "peak_memory_gib ms status".split()
)


def tree(method: Method, **changes: Any) -> TreeShape:
    """A record's entry for a method's tree with these changes."""
    shape = tree_shape(MethodConfig.of(method, **changes))
    assert shape is not None
    return shape


def voting() -> tuple[list[Record], SuiteFile]:
    """Fixed and voting trees of 2 and 4 levels on two prompts; in the sweep, those of 2 levels are also rows."""
    spent: list[tuple[Method, int, tuple[int, ...], int, int, float]] = [  # ..., forwards, wasted forwards, decode ms
        ("eagle2", 2, (3, 1), 4, 2, 20.0), ("deagle", 2, (3, 1), 3, 1, 20.0),
        ("eagle2", 4, (4,), 4, 4, 10.0), ("deagle", 4, (3, 1), 3, 2, 16.0),
    ]  # fmt: skip
    records = [
        record(prompt_id=name) for _, name in PROMPTS
    ]  # 4 tokens after the prefill's in 40 ms
    points = []
    for row, (method, levels, tokens, forwards, wasted, ms) in enumerate(spent, start=1):
        points.append(
            SweepPoint(row, **GREEDY, sweep="d", key="tree.levels", value=levels, prompts=PROMPTS)
        )
        for _, name in PROMPTS:
            drafts = {
                "draft_forwards": forwards,
                "draft_forwards_wasted": wasted,
                "draft_nodes": 59 * len(tokens),
            }
            drafts |= {"cycle_nodes": (59,) * len(tokens), "ms": milliseconds(10.0, 10.0 + ms)}
            named = {
                "row": row,
                "method": method,
                "tree": tree(method, levels=levels),
                "head": "eagle1",
            }
            records.append(drafted(tokens, prompt_id=name, **named, **drafts))
        records.append(drafted((9, 9), prompt_id="c", **named))  # the sweep leaves out this prompt
    return records, SuiteFile(tuple(Cell(row, **GREEDY) for row in (0, 1, 2)), tuple(points))


def report(run: Path, output: str = "report") -> dict[str, Any]:
    """Writes the report of a run; returns the content of its summary.json."""
    about = {"target": {"name": "tiny <target>", "blocks": 12}, "head": {"kind": "eagle1"}}
    hardware = {"device": "cpu", "threads": 1, "dtype": "float32"}
    facts = {
        "run": "runs/made-up",
        "commit": "0123abcd4567",
        **about,
        "hardware": hardware,
        "commands": ["a && b"],
    }
    write_report(run / "bench", run / "calibration", run / output, facts, 0, papers_appendix(run))
    return read_json(run / output / "summary.json")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of a report with two samplings, a failing row and an analysis of the calibration."""
    run = tmp_path_factory.mktemp("run")
    write_run(run)
    write_calibration(run / "calibration")
    report(run)
    return run


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of a report whose sweep is over fixed and voting depths, with a tuning."""
    run = tmp_path_factory.mktemp("swept")
    records, asked = voting()
    write_text(run / "bench" / "records.jsonl", "".join(map(line_of, records)))
    write_json(run / "bench" / SUITE, as_dict(asked))
    write_json(run / "tune" / "tune.json", TUNING)
    report(run)
    return run


def page(run: Path) -> str:
    return (run / "report" / "index.html").read_text(encoding="utf-8")


def words_of(run: Path) -> str:
    return " ".join(html.unescape(re.sub(r"(?s)<style.*?</style>|<[^>]+>", " ", page(run))).split())


def test_summary_follows_the_contract_to_the_key(whole: Path) -> None:
    summary = read_json(whole / "report" / "summary.json")
    assert set(summary) == set(
        "schema run commit target head hardware rows sweeps calibration".split()
    )
    assert summary["schema"] == 1 and set(summary["calibration"]) == {
        "temperature",
        "ece",
        "brier",
        "bins",
    }
    assert set(summary["calibration"]["bins"][0]) == {
        "low",
        "high",
        "count",
        "confidence",
        "acceptance",
    }
    for row in summary["rows"]:
        if row["status"] == "ok":
            assert set(row) == ROW_KEYS and len(row["speedup_ci95"]) == 2
            assert set(row["ms"]) == {"prefill", "draft", "verify", "commit", "other", "wall"}
            assert row["tree"] is None or set(row["tree"]) >= {"shape", "levels", "k", "nodes"}
        else:
            assert (
                not set(row) & {"ms", "tokens_per_s", "speedup", "tau"}
                and "530 positions" in row["message"]
            )
    assert [row["status"] for row in summary["rows"]].count("error") == 2


def test_the_page_asks_for_nothing_outside_itself_and_escapes_what_others_wrote(
    whole: Path, swept: Path
) -> None:
    for run in (whole, swept):
        source = page(run)
        assert not re.search(
            r"<(script |iframe|object|embed|img)|<[^>]*\son\w+=|@import|url\((?!#)", source
        )
        assert source.count("<script>") == 1 and not re.search(
            r"fetch|https?:", source.split("<script>")[1]
        )
        for link in re.findall(r'(?:src|href)="([^"]*)"', source):
            assert link.startswith(("#", "data:,")) or (run / "report" / link).is_file(), link
        ids, used = (
            re.findall(r'\bid="([^"]+)"', source),
            set(re.findall(r'href="#([^"]+)"', source)),
        )
        assert len(ids) == len(set(ids)) and used and used <= set(ids)
        contents = re.findall(r'href="#([^"]+)"', re.findall(r"(?s)<nav>(.*?)</nav>", source)[0])
        assert (
            contents == re.findall(r'<(?:h2|details) id="([^"]+)"', source)
            and "<details open" not in source
        )
        assert source.count("<h2") + source.count("<details") == len(contents)
    for text in (
        "<b>Bold</b>",
        "<script>alert(1)</script>",
        "<max_position_embeddings>",
        "tiny <target>",
    ):
        assert text.replace("<", "&lt;").replace(">", "&gt;") in page(whole) and text not in page(
            whole
        )


def test_pictures_are_files_those_of_earlier_input_go_and_rows_may_be_by_task(
    tmp_path: Path, whole: Path
) -> None:
    kept = {"tau", "speedup", "depth"}
    laws = {f"calibration-{name}" for name in ("calibrator", "by-depth", "bounds", "rejections")}
    drawn = {path.stem: path for path in (whole / "report").glob("*.svg")}
    assert set(drawn) == kept | laws | {
        "reliability",
        *(f"claims-{name}" for name in ("figure-6", "drift", "kl")),
    }
    for path in drawn.values():
        assert ET.fromstring(path.read_text(encoding="utf-8")).tag.endswith("svg")  # noqa: S314 (our own file)
    run = shutil.copytree(whole, tmp_path / "run")
    shutil.rmtree(run / "calibration")
    (run / "bench" / "reference.json").unlink()
    write_json(
        run / "bench" / SUITE,
        as_dict(SuiteFile(tuple(Cell(row, **GREEDY) for row in (0, 1)), by_task=True)),
    )
    summary = report(run)
    assert (
        summary["calibration"] is None
        and {path.stem for path in (run / "report").glob("*.svg")} == kept
    )
    rows = [(row["method"], row["task"]) for row in summary["rows"]]
    assert rows == [
        (method, task) for method in ("vanilla", "eagle2") for task in ("sums", "units", "letters")
    ]
    for words in ("fair baseline", "Does a calibrator help?"):
        assert words in words_of(whole) and words not in words_of(run)


def test_the_headline_has_the_tuned_row_measured_where_it_was(swept: Path, tmp_path: Path) -> None:
    headline = "Tuned to this machine 1.50 × predicted, not measured eagle2, 6 levels, k 10, 60 nodes to use it:"
    assert (
        f"{headline} aerie chat --run runs/made-up --row {swept / 'tune' / 'tuned.yaml'}"
        in words_of(swept)
    )
    run = shutil.copytree(swept, tmp_path / "run")
    row = {"tau": 2.0, "speedup": 1.4, "speedup_ci95": [1.2, 1.6], "chosen_against_it": 1.0}
    figures = {
        "predicted_over_measured": 1.07,
        "predicted_tau_over_measured": 1.5,
        "names": ["vanilla", "a tree"],
    }
    row |= {"chosen_against_it_ci95": [1.0, 1.0]}
    write_json(run / "tune" / "measured.json", {**figures, "rows": [row | {"speedup": 1.0}, row]})
    report(run)
    assert "Tuned to this machine 1.40 × 95 % interval 1.20–1.60 eagle2, 6 levels" in words_of(run)
    assert read_json(run / "report" / "details.json")["tuning"]["measured"]["rows"][1] == row


def test_trainings_are_in_the_report_and_one_that_its_budget_ended_is_said_under_the_table(
    tmp_path: Path, capsys: Any
) -> None:
    run, words = tmp_path / "run", "stopped by the time budget at step 483 of 1,050"
    write_text(run / "bench" / "records.jsonl", "".join(map(line_of, [record(), drafted((3, 1))])))
    Manifest(facts={"stage": "bench"}).write(run / "bench")
    facts = {
        "stage": "train",
        "steps": 483,
        "total_steps": 1050,
        "tokens": 9000,
        "train_seconds": 90.0,
    }
    Manifest(facts={**facts, "ended": "budget"}).write(run / "heads" / "eagle1")
    Manifest(facts={**facts, "ended": "finished"}).write(run / "target")
    tensors = {"fc.weight": np.zeros((4, 8)), "embed_tokens.weight": np.zeros((50, 4))}
    save_file(tensors, run / "heads" / "eagle1" / "model.safetensors")
    lines = [{"step": step, "loss": 1 / step} for step in (100, 200)] + [
        {"step": 200, "held_out_tau": 2.5}
    ]
    text = "".join(json.dumps({"kind": "eagle1", **line}) + "\n" for line in lines)
    write_text(run / "metrics.jsonl", text + '5\n{"loss": 1}\n{"ki')
    values = {
        "run": str(run),
        "target": {"path": str(run / "target")},
        "data": {"conversations": ["x.jsonl"]},
    }
    assert call(commands, "report", "--config", recipe(tmp_path / "recipe.yaml", values)) == 0
    out = capsys.readouterr().out
    assert f"eagle1 head: training {words}\n" in out and "target: training" not in out
    assert f"eagle1 head {words} 32 483 9,000 90 s" in words_of(
        run
    )  # 32 parameters: the embedding is the target's
    curves = read_json(run / "report" / "details.json")["training"]["curves"]["eagle1"]
    assert curves["loss"] == {"steps": [100, 200], "values": [0.01, 0.005]} and len(curves) == 2
    assert "tau by decoding" in (run / "report" / "training-eagle1.svg").read_text()


def test_the_same_input_gives_the_same_bytes(swept: Path) -> None:
    report(swept, "again")
    first, again = (
        {p.name: p.read_bytes() for p in (swept / name).iterdir()} for name in ("report", "again")
    )
    assert first == again


def test_damaged_or_missing_input_is_an_error_with_the_command(tmp_path: Path) -> None:
    write_text(tmp_path / "bench" / "records.jsonl", line_of(record()))
    for name, text, message in (
        ("calibration/analysis.json", '{"schema": 99}', r"analysis\.json: .*calibrate --overwrite"),
        ("bench/suite.json", "{", "aerie bench --overwrite"),
        ("bench/records.jsonl", "", r"records\.jsonl: holds no whole record.*aerie bench"),
    ):
        write_text(tmp_path / name, text)
        with pytest.raises(UserError, match=message):
            report(tmp_path)


def test_the_page_says_lossless_only_when_every_greedy_output_is_identical(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aerie.infer.report.page.draw_pictures", lambda *_: {})
    good = drafted((3, 1))
    for answers, state, words in (
        ([good], "good", "1 of 1 greedy outputs are token-identical to the vanilla row, 1 of 1 to"),
        ([replace(good, identical=False)], "bad", "0 of 1 greedy outputs"),
        ([replace(good, identical_to_generate=False)], "bad", "Not lossless"),
        (
            [replace(good, identical=False, margin=0.5)],
            "rounding",
            "1 of the 1 answer that differ (margin up to 0.50",
        ),
        ([replace(good, identical=False, margin=1.5)], "bad", "Not lossless"),
        ([good, replace(good, row=2, **FAILED)], "partial", "Failed, so no figure"),
        ([replace(good, **FAILED)], "unknown", "Not checked"),
    ):
        write_text(
            tmp_path / "bench" / "records.jsonl", "".join(map(line_of, [record(), *answers]))
        )
        report(tmp_path)
        assert f"verdict box {state}" in page(tmp_path) and words in words_of(tmp_path)


def test_the_page_has_a_line_for_every_claim_and_its_tables_hold_the_points(swept: Path) -> None:
    shown, lines = words_of(swept), read_json(swept / "report" / "details.json")["claims"]["lines"]
    assert {line["number"] for line in lines} == set(range(1, len(claims.all_claims()) + 1))
    assert {line["verdict"] for line in lines} == {
        "holds",
        "open",
        "out of reach",
    }  # too few prompts to refute any
    for line in lines:
        assert line["claim"] in shown and line["why"] in shown and line["why"].endswith(".")
    assert "wastes at most half" in (swept / "report" / "claims.md").read_text()
    with (swept / "report" / "sweeps.csv").open(newline="") as file:
        points = [(p["value"], p["method"], float(p["tau"])) for p in csv.DictReader(file)]
    assert points == [
        ("2", "eagle2", 2.0),
        ("2", "deagle", 2.0),
        ("4", "eagle2", 4.0),
        ("4", "deagle", 2.0),
    ]


def verdicts(**parts: Any) -> dict[str, tuple[Any, str]]:
    """claim -> (measured value, verdict); here two prompts are enough for a verdict."""
    with patch.object(claims, "FEWEST_PROMPTS", 2):
        lines = claims.judge_claims(Evidence(**parts))
    return {line.id: (line.value, line.verdict) for line in lines if line.ours}


def test_deagles_claims_are_of_the_vote_on_the_same_prompts() -> None:
    records = [one for one in voting()[0] if one.prompt in PROMPTS]
    found = verdicts(records=records, tuning=TUNING)
    assert found["deagle-waste"] == (4 / 8, "holds") and found["deagle-tau"] == (
        2 / 4,
        "does not hold",
    )
    # 8 tokens in 4 cycles: drafting 4 + 4, verifying 16, the rest 2; the vote drafts two levels fewer
    # 8 tokens in 2 cycles: drafting 2 + 6, verifying 8, the rest 1
    deep, fixed = modelled_ms(records[8:], TUNING), modelled_ms(records[6:8], TUNING)
    assert deep is not None and fixed is not None and "deagle-flat" not in verdicts(records=records)
    assert (deep, fixed) == (pytest.approx(24.0), pytest.approx(17.0))
    assert found["deagle-deep"] == (pytest.approx(17 / 24), "does not hold")
    assert found["deagle-flat"] == (
        pytest.approx(1.0),
        "holds",
    )  # no slower with more levels allowed
    failed = [replace(one, **FAILED) if one.method == "deagle" else one for one in records]
    assert "deagle-waste" not in verdicts(records=failed)
    # no paper draws a tree's children; another k or number of nodes changes more than the depth
    for change in (
        {"levels": 4, "children": "sampled"},
        {"levels": 9, "k": 8},
        {"levels": 9, "nodes": 48},
    ):
        named: dict[str, Any] = {"row": -1, "head": "eagle1", "tree": tree("eagle2", **change)}
        more = [drafted((9, 9), prompt_id=name, **named) for _, name in PROMPTS]
        assert verdicts(records=[*more, *records], tuning=TUNING) == found
        shallow = [one for one in records if one.tree is None or one.tree.levels == 2]
        assert "deagle-fixed-falls" not in verdicts(records=[*more, *shallow], tuning=TUNING)


@pytest.mark.parametrize(
    ("margin", "verdict"),
    [(0.0, "holds"), (1.0, "holds"), (1.1, "does not hold"), (None, "does not hold")],
)
def test_a_difference_between_equal_logits_is_rounding(margin: float | None, verdict: str) -> None:
    answers = [
        drafted((2, 2), prompt_id=name, head="eagle1", identical=False, margin=margin)
        for _, name in PROMPTS
    ]
    assert verdicts(records=answers)["lossless"][1] == verdict


def test_a_vote_that_is_not_heard_changes_verdicts(monkeypatch: pytest.MonkeyPatch) -> None:
    def found(*depths: int) -> dict[str, str]:
        records, rows = (
            [],
            itertools.product(depths, (("eagle2", ConstantConfig()), ("deagle", VoteConfig()))),
        )
        for row, (levels, (method, stop)) in enumerate(rows, start=1):
            decoder = decoder_of(make_target(), DynamicConfig(levels=levels, stop=stop))
            for number, (_, name) in enumerate(PROMPTS):
                made = decoder.generate([7, 9, 11 + number], max_new_tokens=12).statistics
                spent = {
                    word: getattr(made, word)
                    for word in ("draft_forwards", "draft_forwards_wasted")
                }
                named = {
                    "row": row,
                    "method": method,
                    "tree": tree(method, levels=levels),
                    "head": "eagle1",
                }
                records.append(drafted(tuple(made.cycle_tokens), prompt_id=name, **named, **spent))
        judged = verdicts(records=records, tuning=TUNING)
        return {
            claim: judged[claim][1] for claim in ("deagle-waste", "deagle-deep") if claim in judged
        }

    assert (
        found(2, 8) == {"deagle-waste": "holds", "deagle-deep": "holds"} and found(8) == {}
    )  # no largest depth
    monkeypatch.setattr(Vote, "ends", lambda *_: False)
    assert found(2, 8) == {"deagle-waste": "does not hold", "deagle-deep": "does not hold"}


def test_the_best_row_is_that_of_the_prompts_drawn() -> None:
    sides = [
        Side(pd.DataFrame({"forwards": 1.0, "tokens": row}), ratio_of_sums)
        for row in ([2, 5], [4, 1])
    ]
    best = highest_of(sides)
    assert [best.figure(best.table.to_numpy()[chosen].sum(0)) for chosen in ([0], [1], [0, 1])] == [
        4,
        5,
        3.5,
    ]


def test_claims_and_report_refuse_what_is_damaged_or_of_another_target_or_head(
    tmp_path: Path, capsys: Any
) -> None:
    run, head = tmp_path / "run", tmp_path / "head"
    of_bench, foreign = (
        {"target": {"path": f"someone/{name}", "revision": None, "dtype": "auto"}} for name in "ab"
    )
    config = recipe(
        tmp_path / "recipe.yaml",
        {"run": str(run), "data": {"conversations": ["x.jsonl"]}, **foreign},
    )

    def stage(place: str, inputs: dict[str, Any], **facts: Any) -> None:
        (run / place / "provenance.json").unlink(missing_ok=True)
        Manifest.of(run / place, inputs, {"argv": ["main.py", "redo", place], **facts}).write(
            run / place
        )

    def said(*words: Any) -> str:
        assert call(commands, *words) == 2
        return str(capsys.readouterr().err)

    write_text(run / "bench" / "records.jsonl", "".join(map(line_of, [record(), drafted((3, 1))])))
    write_json(run / "tune" / "tune.json", TUNING)
    for name in ("config.json", "model.safetensors"):
        write_text(head / name, "{}")
    parts = ("static/calibration", "calibration", "tune")
    for place in parts[:2]:
        write_text(run / place / "laws.parquet", "PAR1")
    for place in parts:
        for whole in ("bench", *parts):
            stage(whole, of_bench)
        stage(place, foreign)
        assert f"{run / place}: measured another target" in said("claims", run)
        stage(place, of_bench, heads={str(head): {"model.safetensors": "0"}})
        for words in (("claims", run), ("report", "--config", config)):
            assert (
                f"{run / place}: measured {head} before it was trained anew; run: aerie redo"
                in said(*words)
            )
        stage(place, of_bench)
        content = next(path for path in (run / place).iterdir() if path.name != "provenance.json")
        content.write_text(content.read_text()[:-1])
        for words in (("claims", run), ("report", "--config", config)):
            told = said(*words)
            assert f"{content}: " in told and told.endswith(
                f"run: aerie redo {place} --overwrite\n"
            ), told
            assert told.count("\n") == 1


def test_a_confidence_that_is_inverted_and_too_few_prompts_change_a_verdict() -> None:
    chance = np.random.default_rng(0)
    confidence = chance.uniform(0.01, 0.99, 4000)
    nodes = pd.DataFrame(
        {"prompt": np.repeat(np.arange(40), 100), "place": "0", "confidence": confidence}
    )
    nodes["acceptance"] = (chance.uniform(size=4000) < confidence).astype(float)

    def judged(table: pd.DataFrame) -> dict[str, str]:
        calibration = CalibrationTables("eagle1", "eagle2", 0.0, {"nodes": table})
        return {
            name: verdict
            for name, (_, verdict) in verdicts(records=[], calibrations=[calibration]).items()
        }

    names = ("eagle2-correlation", "eagle2-calibrated", "eagle2-sure")
    assert [judged(nodes)[name] for name in names] == ["holds"] * 3
    assert [judged(nodes.assign(confidence=1 - confidence))[name] for name in names] == [
        "does not hold"
    ] * 3
    alone = nodes[(nodes.confidence < 0.9) | (nodes.prompt < 1)]
    assert judged(alone)["eagle2-sure"] == "open"  # only one prompt of 40 has such nodes
    # a share of 1 on all prompts proves nothing yet: 0.025 ** (1 / n) is above 0.93 only from 51 prompts on
    always = nodes[:51].assign(prompt=range(51), confidence=0.99, acceptance=1.0)
    assert [judged(always[:prompts])["eagle2-sure"] for prompts in (2, 50, 51)] == [
        "open",
        "open",
        "holds",
    ]
    few = judged(nodes[(nodes.prompt < 4) & (nodes.index % 100 < 8)])
    assert (
        few["eagle2-correlation"] == "open" == judged(nodes[nodes.prompt < 1])["eagle2-calibrated"]
    )
    (line,) = [line for line in claims.judge_claims(Evidence([])) if line.id == "eagle2-speed"]
    assert line.verdict == "out of reach"


def test_ablations_are_compared_though_trees_without_reranking_have_other_nodes() -> None:
    records = []
    for row, (rank, rerank) in enumerate(
        itertools.product(("survival", "confidence"), (True, False))
    ):
        named: dict[str, Any] = {
            "row": row,
            "head": "eagle1",
            "tree": tree("eagle2", rank=rank, rerank=rerank),
        }
        records += [drafted((2, 6 - row), prompt_id=name, **named) for _, name in PROMPTS]
    found = {name: value for name, (value, _) in verdicts(records=records).items()}
    assert found == {
        "lossless": 1.0,
        "eagle2-value": 1.0,
        "eagle2-reranking": 0.5,
        "eagle2-both": 1.5,
    }


def test_lengths_that_cancel_fit_the_oracle_on_average_alone() -> None:
    cycles = pd.DataFrame(
        {"prompt": np.arange(40).repeat(2), "levels": [3, 7] * 40, "oracle": 5.0, "answered": 0}
    )
    svip = CalibrationTables("draft_lm", "sps-svip", 0.0, {"cycles": cycles})
    found = {
        name: one
        for name, one in verdicts(records=[], calibrations=[svip]).items()
        if "oracle" in name
    }
    assert found == {"svip-oracle-fit": (0.0, "holds"), "svip-oracle-gap": (2.0, "does not hold")}


def test_pictures_compare_rows_on_the_prompts_that_all_have() -> None:
    def chain(row: int, method: Method, nodes: int, prompts: str) -> list[Record]:
        named: dict[str, Any] = {
            "row": row,
            "method": method,
            "tree": tree(method),
            "head": "draft_lm",
        }
        return [
            drafted((2, 2), prompt_id=p, draft_nodes=2 * nodes if p < "c" else 99, **named)
            for p in prompts
        ]

    run = Evidence([*chain(1, "sps", 5, "abcd"), *chain(2, "sps-svip", 3, "ab")])
    (constant,), (svip,) = (
        line["points"] for line in claim_pictures(run)["claims-figure-7a"]["lines"]
    )
    assert (constant[:2], svip[:2]) == ((5.0, 2.0), (3.0, 2.0))


def test_make_bench_full_judges_by_the_calibrations_and_costs_of_make_bench(tmp_path: Path) -> None:
    shutil.copy(ROOT / "Makefile", tmp_path)
    seeds, python = tmp_path / "runs" / "seeds", tmp_path / ".venv" / "bin" / "python"
    for name in (
        "calibration/provenance.json",
        "svip/calibration/provenance.json",
        "tune/tune.json",
    ):
        write_text(seeds / name, "{}")
    for name in ("prompts", "calibration"):
        write_text(seeds / "conversations" / f"{name}.jsonl", '{"question_id": 1}\n')
    write_text(python, "#!/bin/sh\n")
    python.chmod(0o755)
    for _ in range(2):
        subprocess.run(
            ["make", "-o", "bench", "bench-full"], cwd=tmp_path, check=True, capture_output=True
        )
    of_bench, full = (
        calibrations_of(seeds),
        calibrations_of(tmp_path / "runs" / "seeds-full"),
    )
    assert [path.resolve() for path in full] == of_bench and len(full) == 2
    assert (tmp_path / "runs" / "seeds-full" / "tune" / "tune.json").is_file()


def test_intervals_are_of_prompts_as_clusters_and_halve_with_four_times_the_prompts() -> None:
    def side(prompts: int, alike: int) -> Side:
        """Means over `alike` equal lines per prompt: only the first adds information."""
        values = np.random.default_rng(1).normal(size=prompts).repeat(alike)
        table = pd.DataFrame({"prompt": np.arange(prompts).repeat(alike), "x": values})
        return side_of_table(table, {"value": "x"})

    one, same, more = (estimate([side(*size)]) for size in ((50, 1), (50, 30), (200, 1)))
    assert one is not None and same is not None and more is not None
    assert (one.value, one.low, one.high) == pytest.approx((same.value, same.low, same.high))
    assert (more.high - more.low) / (one.high - one.low) == pytest.approx(0.5, abs=0.1)
    assert one.high - one.low == pytest.approx(2 * 1.96 / np.sqrt(50), rel=0.25)
    paired = estimate([side(50, 1), side(50, 1)])
    assert paired is not None and (paired.value, paired.low, paired.high) == (0.0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("claim", "interval", "verdict", "needed"),
    [
        (
            {"at_least": 0, "effect": 0.2},
            (0.3, 0.1, 0.5),
            "holds",
            160,
        ),  # +-0.2 on 40 prompts: +-0.1 needs 160
        (
            {"at_least": 0, "effect": 0.2},
            (0.05, -0.1, 0.19),
            "does not hold",
            85,
        ),  # an effect of 0.2 is ruled out
        ({"at_least": 0, "effect": 0.2}, (0.05, -0.1, 0.3), "open", 160),
        ({"at_least": 1, "effect": 0.02}, (1, 1, 1), "does not hold", 6),  # a tie is not faster
        ({"at_least": -0.1, "at_most": 0.1}, (0.0, -0.05, 0.05), "holds", 10),
        ({"at_most": 0}, (0.5, 0.4, 0.6), "does not hold", 6),
        ({"at_most": 0}, (0.0, 0.0, 0.0), "holds", None),
        ({"statistic": "share", "at_least": 0.93}, (1.0, 0.912, 1.0), "open", 51),
        ({"statistic": "share", "at_most": 0.09}, (0.0, 0.0, 0.088), "holds", 40),
        (
            {"statistic": "share", "at_least": 1},
            (1.0, 0.912, 1.0),
            "holds",
            None,
        ),  # no counterexample
        (
            {"statistic": "share", "at_most": 0},
            (0.01, 0.0, 0.03),
            "does not hold",
            None,
        ),  # one is enough
    ],
)
def test_a_verdict_asks_for_the_whole_interval(
    claim: Any, interval: Any, verdict: str, needed: int | None
) -> None:
    assert claims.judge_estimate(claim, Estimate(*interval, 40))[::2] == (verdict, needed)
    few = (
        verdict if needed is None and "statistic" in claim else "open"
    )  # except for a claim on every answer
    assert claims.judge_estimate(claim, Estimate(*interval, 5))[0] == few


def test_what_the_papers_published_is_complete() -> None:
    counts = Counter(row["source"] for row in PUBLISHED)
    complete = {
        "EAGLE-2 table 1": 32,
        "EAGLE-2 table 2": 8,
        "EAGLE-2 table 3": 4,
        "DEAGLE table 4": 28,
    }
    complete |= {f"DEAGLE table {number}": 28 for number in (1, 2, 3)} | {
        "SVIP table 2": 24,
        "SVIP table 5": 24,
    }
    assert complete.items() <= counts.items() and counts["SVIP table 3"] == 24
    entry = {"source": "EAGLE-2 table 1", "of": "eagle2", "against": "eagle", "figure": "tau"}
    assert published_range(entry, 1.0, is_ratio=False) == "+0.48 to +1.51 (28 figures)"
    assert len({claim["id"] for claim in claims.all_claims()}) == len(claims.all_claims())
