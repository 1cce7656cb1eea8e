"""Laws of the report: the contract of summary.json, an honest and self-contained page, pictures in both themes."""

import html.parser
import importlib
import json
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from aerie.configs.errors import UserError
from aerie.infer.measure.record import line_of, read_records
from aerie.infer.report.page import Facts, render, segments, verdict, write_report
from aerie.infer.report.plots import NAMES
from aerie.model.storage import write_json
from tests.infer.calibration.made_up import analysis
from tests.infer.made_up import drafted, write_run

ROW_KEYS = {
    "method", "head", "head_path", "task", "temperature", "top_k", "top_p", "prompts", "verify", "tree",
    "new_tokens", "tau", "tau_macro",
    "accepted_histogram", "tokens_per_s", "speedup", "speedup_ci95", "speedup_mean_per_prompt",
    "speedup_with_prefill", "target_forwards", "draft_forwards", "draft_forwards_wasted", "draft_nodes", "accept_rate",
    "identical", "mismatch", "peak_memory_gib", "ms", "status",
}  # fmt: skip
BROWSER = shutil.which("chromium-headless-shell") or shutil.which("chromium")


def facts() -> Facts:
    return Facts(
        run="runs/made-up",
        commit="0123abcd4567",
        target={"name": "tiny <target>", "blocks": 12},
        head={"kind": "eagle1"},
        hardware={"device": "cpu", "threads": 1, "dtype": "float32"},
        commands=("python infer/main.py bench --config a.yaml && true",),
    )


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The report of a run with two samplings and a failing row."""
    root = tmp_path_factory.mktemp("run")
    bench, calibration = write_run(root, temperatures=(0.0, 1.0), failing=True)
    return root / "report", write_report(bench, calibration, root / "report", facts())


class Page(html.parser.HTMLParser):
    """Tags with attributes, and all text, of a page."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(source)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def read_page(report: Path) -> Page:
    return Page((report / "index.html").read_text(encoding="utf-8"))


def test_summary_follows_the_contract_to_the_key(whole: tuple[Path, dict[str, Any]]) -> None:
    report, returned = whole
    summary = json.loads((report / "summary.json").read_text(encoding="utf-8"))
    assert summary == json.loads(json.dumps(returned, allow_nan=False))
    assert list(summary) == ["schema", "run", "commit", "target", "head", "hardware", "rows", "sweeps", "calibration"]
    assert (summary["schema"], summary["sweeps"]) == (1, [])
    assert set(summary["calibration"]) == {"temperature", "ece", "brier", "bins"}
    assert set(summary["calibration"]["bins"][0]) == {"low", "high", "count", "confidence", "acceptance"}
    for row in summary["rows"]:
        if row["status"] == "ok":
            assert set(row) == ROW_KEYS
            assert set(row["ms"]) == {"prefill", "draft", "verify", "commit", "other", "wall"}
            assert row["tree"] is None or set(row["tree"]) >= {"shape", "levels", "k", "nodes"}
            assert len(row["speedup_ci95"]) == 2
        else:
            assert not set(row) & {"ms", "tokens_per_s", "speedup", "tau"}
            assert "530 positions" in row["message"]
    assert [row["status"] for row in summary["rows"]].count("error") == 2


def test_the_page_asks_for_nothing_outside_itself_and_runs_no_script(whole: tuple[Path, dict[str, Any]]) -> None:
    page = read_page(whole[0])
    tags = {tag for tag, _ in page.tags}
    assert not tags & {"script", "iframe", "object", "embed", "img"}
    for tag, attributes in page.tags:
        assert not any(name.startswith("on") for name in attributes), tag
        for name in ("src", "href", "xlink:href"):
            target = attributes.get(name)
            assert target is None or target.startswith(("#", "data:,")) or (whole[0] / target).is_file(), target
    source = (whole[0] / "index.html").read_text(encoding="utf-8")
    assert "@import" not in source
    assert not re.search(r"url\((?!#)", source)


def test_model_text_messages_and_names_are_escaped(whole: tuple[Path, dict[str, Any]]) -> None:
    source = (whole[0] / "index.html").read_text(encoding="utf-8")
    assert "&lt;b&gt;Bold&lt;/b&gt;" in source
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in source
    assert "&lt;max_position_embeddings&gt;" in source
    assert "tiny &lt;target&gt;" in source
    assert "<b>Bold" not in source


def test_links_inside_the_pictures_point_at_one_place_each(whole: tuple[Path, dict[str, Any]]) -> None:
    page = read_page(whole[0])
    names = [attributes["id"] for _, attributes in page.tags if attributes.get("id")]
    assert len(names) == len(set(names))
    used = {str(a["xlink:href"])[1:] for _, a in page.tags if a.get("xlink:href")}
    assert used
    assert used <= set(names)


def test_every_picture_is_a_file_and_follows_the_theme(whole: tuple[Path, dict[str, Any]]) -> None:
    names = {path.stem for path in whole[0].glob("*.svg")}
    assert names == {"tau", "speedup", "milliseconds", "depth", "lengths", "reliability"}
    for path in whole[0].glob("*.svg"):
        text = path.read_text(encoding="utf-8")
        assert ET.fromstring(text).tag.endswith("svg")  # noqa: S314 (our own file)
        drawn = text.split("</style>", 1)[1]
        assert "var(--ink)" in drawn
        assert not re.findall(r"#[0-9a-f]{6}\b", drawn), path
        assert "prefers-color-scheme:dark" in text


def test_the_same_input_gives_the_same_bytes(tmp_path: Path) -> None:
    bench, calibration = write_run(tmp_path)
    for name in ("one", "two"):
        write_report(bench, calibration, tmp_path / name, facts())
    files = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert files == sorted(path.name for path in (tmp_path / "two").iterdir())
    for name in files:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes(), name


def test_a_report_without_calibration_and_reference_leaves_them_out(tmp_path: Path) -> None:
    bench, calibration = write_run(tmp_path)
    write_report(bench, calibration, tmp_path / "report", facts())
    assert (tmp_path / "report" / "reliability.svg").is_file()
    (bench / "reference.json").unlink()
    summary = write_report(bench, tmp_path / "none", tmp_path / "report", facts())
    assert summary["calibration"] is None
    assert not (tmp_path / "report" / "reliability.svg").exists()
    assert "honest baseline" not in " ".join(read_page(tmp_path / "report").words)


def test_a_report_of_failures_only_is_still_a_page(tmp_path: Path) -> None:
    bench, calibration = write_run(tmp_path, failing=True)
    path = bench / "records.jsonl"
    kept = [record for record in read_records(path) if record.row == 4]
    path.write_text("".join(line_of(record) for record in kept))
    summary = write_report(bench, calibration, tmp_path / "report", facts())
    assert [row["status"] for row in summary["rows"]] == ["error"]
    assert "Failed, so no figure" in " ".join(read_page(tmp_path / "report").words)


def test_no_record_is_an_error_with_the_command(tmp_path: Path) -> None:
    (tmp_path / "records.jsonl").write_text("")
    with pytest.raises(UserError, match=r"records\.jsonl: holds no whole record.*infer/main\.py bench"):
        write_report(tmp_path, tmp_path, tmp_path / "report", facts())


def test_the_page_says_lossless_only_when_every_greedy_output_is_identical(tmp_path: Path) -> None:
    bench, calibration = write_run(tmp_path)
    write_report(bench, calibration, tmp_path / "report", facts())
    text = " ".join(read_page(tmp_path / "report").words)
    assert "36 of 36 greedy outputs are token-identical to the vanilla row and to transformers’ generate." in text
    assert "Not lossless" not in text
    path = bench / "records.jsonl"
    records = read_records(path)
    records[1] = replace(records[1], identical=False)
    path.write_text("".join(line_of(record) for record in records))
    write_report(bench, calibration, tmp_path / "report", facts())
    text = " ".join(read_page(tmp_path / "report").words)
    assert "Not lossless" in text
    assert "35 of 36 greedy outputs are token-identical to the vanilla row, 36 of 36 to" in text
    assert "11/12" in text


def test_a_failed_row_or_an_unmade_comparison_is_named_in_the_verdict() -> None:
    row = {"status": "ok", "tree": {}, "temperature": 0.0, "identical": 3, "mismatch": 0}
    compared = {"identical_to_generate": 3, "compared_to_generate": 3}
    alone = {"identical_to_generate": None, "compared_to_generate": None}
    assert verdict([row], [compared]).state == "good"
    assert verdict([row], [{**compared, "identical_to_generate": 2}]).state == "bad"
    assert "none was compared with transformers’ generate" in verdict([row], [alone]).sentence
    partial = verdict([row, {"status": "error"}], [compared, alone])
    assert partial.state == "partial"
    assert partial.sentence.endswith(" 1 of 2 rows failed and is not counted.")
    assert verdict([{**row, "temperature": 1.0}], [alone]).state == "unknown"


def test_segments_spell_the_answer_and_deepen_with_acceptance() -> None:
    answer = drafted((5, 1, 3), cycle_texts=("a", "bcdef", "g", "hij"), text="abcdefghij")
    parts = segments(answer)
    assert "".join(part.text for part in parts) == answer.text
    assert [part.tint for part in parts] == [0, 4, 0, 2]


def test_without_matplotlib_the_report_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for name in (
        "aerie.infer.report.page",
        "aerie.infer.report.page",
        "aerie.infer.report.plots",
        "aerie.infer.report.plots",
    ):
        monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.raises(UserError, match=r"pip install aerie\[report\]"):
        importlib.import_module("aerie.infer.report.page")


def test_render_needs_nothing_but_its_arguments(whole: tuple[Path, dict[str, Any]]) -> None:
    details = json.loads((whole[0] / "details.json").read_text(encoding="utf-8"))
    assert "eagle1 head for tiny" in render(whole[1], details, {}, [])


def laid_out(report: Path, folder: Path, width: int, dark: bool = False) -> tuple[Any, ...]:
    """What a browser makes of a page: its scroll width, what is too wide, its background, which pictures are drawn."""
    # the probe writes what the browser laid out into the title; the page itself has no script
    probe = (
        "<script>addEventListener('load',()=>{const e=document.documentElement;"
        "const wide=[...document.querySelectorAll('main *')].filter(x=>!x.closest('.scroll,.columns>div,svg,pre')"
        f"&&x.getBoundingClientRect().right>{width}+0.5).map(x=>x.tagName+'.'+x.className);"
        "document.title=JSON.stringify([e.scrollWidth,wide,getComputedStyle(document.body).backgroundColor,"
        "[...document.querySelectorAll('figure svg')].map(x=>x.getBoundingClientRect().height>100)])})</script>"
    )
    source = (report / "index.html").read_text(encoding="utf-8")
    probed = folder / "probed.html"
    # an iframe has the width that is asked for in every build of Chromium; a window may have a minimum
    probed.write_text(source.replace("</body>", f"{probe}</body>"), encoding="utf-8")
    frame = folder / "frame.html"
    frame.write_text(
        f"<body style='margin:0'><iframe src='probed.html' style='border:0;width:{width}px;height:4000px'></iframe>"
        "<script>addEventListener('load',()=>setTimeout(()=>{document.body.append(Object.assign("
        "document.createElement('output'),{textContent:document.querySelector('iframe').contentDocument.title}))},50))"
        "</script></body>"
    )
    dumped = subprocess.run(
        [*_browser(width, dark), "--dump-dom", frame.as_uri()], capture_output=True, text=True, timeout=60, check=True
    ).stdout
    match = re.search(r"<output>(.*?)</output>", dumped)
    assert match is not None
    return tuple(json.loads(match.group(1).replace("&gt;", ">")))


def _browser(width: int, dark: bool) -> list[str]:
    theme = ["--blink-settings=preferredColorScheme=0"] if dark else []
    common = [str(BROWSER), "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--allow-file-access-from-files"]
    return [*common, *theme, f"--window-size={width},4000", "--virtual-time-budget=3000"]


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="no chromium on this machine: apt-get install chromium-headless-shell")
@pytest.mark.parametrize(("width", "dark"), [(1200, False), (1200, True), (390, False), (390, True)])
def test_a_browser_shows_the_page_without_overflow(
    whole: tuple[Path, dict[str, Any]], tmp_path: Path, width: int, dark: bool
) -> None:
    scroll_width, wide, background, drawn = laid_out(whole[0], tmp_path, width, dark)
    assert scroll_width <= width, wide
    assert wide == []
    assert background == ("rgb(15, 18, 22)" if dark else "rgb(248, 246, 241)")
    assert drawn == [True] * 6
    picture = tmp_path / "page.png"
    subprocess.run(
        [*_browser(width, dark), f"--screenshot={picture}", (whole[0] / "index.html").as_uri()],
        capture_output=True, timeout=60, check=True,
    )  # fmt: skip
    assert picture.stat().st_size > 50_000


def test_the_calibrations_section_shows_its_tables_and_pictures_and_nothing_without_an_analysis(
    tmp_path: Path, whole: tuple[Path, dict[str, Any]]
) -> None:
    bench, calibration = write_run(tmp_path)
    write_json(calibration / "analysis.json", analysis())
    write_report(bench, calibration, tmp_path / "report", facts())
    page = (tmp_path / "report" / "index.html").read_text()
    assert ">Calibration<" in page and "on prompts that it has not seen" in page and "the oracle" in page
    assert "<script>" not in page  # a token's text is escaped
    drawn = sorted(path.name for path in (tmp_path / "report").glob("calibration-*.svg"))
    assert drawn == sorted(f"calibration-{name}.svg" for name in NAMES)
    for path in (tmp_path / "report").glob("calibration-*.svg"):
        ET.fromstring(path.read_text().split("\n", 1)[1])  # noqa: S314 (our own file)
    assert ">Calibration<" not in (whole[0] / "index.html").read_text()
    (calibration / "analysis.json").unlink()
    write_report(bench, calibration, tmp_path / "report", facts())
    assert not list((tmp_path / "report").glob("calibration-*.svg"))
    write_json(calibration / "analysis.json", {"schema": 99})
    with pytest.raises(UserError, match="calibrate --overwrite"):
        write_report(bench, calibration, tmp_path / "report", facts())
