"""What goes to the Hub: a card made from the reports, named files, never conversations; and what is refused."""

import dataclasses
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from aerie.configs.errors import UserError
from aerie.infer.decode import calibrator
from aerie.infer.decode.calibrator import Calibrator
from aerie.model.checkpoint import save_head
from aerie.model.export import export
from aerie.model.formats.sglang import CHECKED
from aerie.model.inspection import inspect_head, screen
from aerie.model.push import Order, pack
from aerie.model.storage import digests
from tests import tiny
from tests.model.formats import published
from tests.model.formats import test_multi_token as multi_token
from tests.model.formats.published import ends_facts

ROW = {
    "method": "eagle3",
    "task": "gsm8k",
    "temperature": 0.0,
    "prompts": 40,
    "tree": {"levels": 8, "k": 10, "nodes": 60},
    "tau": 4.0812,
    "tokens_per_s": 181.4,
    "speedup": 2.314,
    "speedup_ci95": [2.2, 2.43],
    "identical": 40,
    "status": "ok",
}
FAILED = {"method": "eagle3", "status": "error", "message": "out of memory", "tau": 99.0}


def write_json(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))


@pytest.fixture
def head(tmp_path: Path) -> Path:
    """A head in its run, with reports, and with files beside it that are nobody's business."""
    run = tmp_path / "run"
    place = run / "heads" / "eagle3"
    save_head(
        published.eagle3(), place, target_path="meta-llama/Llama-3.1-8B-Instruct", draft_vocabulary={"coverage": 0.9}
    )
    (place / "recipe.yaml").write_text(
        yaml.safe_dump({"data": {"conversations": ["HuggingFaceH4/ultrachat_200k", str(tmp_path / "secret.jsonl")]}})
    )
    provenance = {
        "commit": "0123456789ab",
        "dirty": False,
        "argv": ["main.py", "--config", "c.yaml"],
        "tokens": 1627195,
    }
    write_json(place / "provenance.json", {**provenance, "versions": {"torch": "2.13.0"}, "steps": 1150})
    (place / "conversations.jsonl").write_text('{"text": "a private conversation"}\n')
    (run / "conversations").mkdir()
    (run / "conversations" / "train.jsonl").write_text('{"text": "a private conversation"}\n')
    summary = {"schema": 1, "commit": "0123456789ab", "hardware": {"device": "a CPU", "threads": 2}}
    write_json(run / "report" / "summary.json", {**summary, "head": {"kind": "eagle3"}, "rows": [ROW, FAILED]})
    for stage in ("bench", "calibration"):
        write_json(run / stage / "provenance.json", {"inputs": {"head": [digests(place)]}})
    write_json(
        run / "calibration" / "calibration.json", {"temperature": 0.0, "ece": 0.0575, "brier": 0.0629, "bins": []}
    )
    return place


def content(file: Path | bytes) -> str:
    return (file if isinstance(file, bytes) else file.read_bytes()).decode(errors="replace")


def readme(directory: Path, **changes: Any) -> tuple[dict[str, Any], str]:
    """The card's front matter and its text."""
    order = Order(**{"directory": directory, "repo": "me/head", **changes})
    content = pack(dataclasses.replace(order, without_results=True), is_dirty=False).files["README.md"]
    assert isinstance(content, bytes)
    _, front, body = content.decode().split("---\n", maxsplit=2)
    return yaml.safe_load(front), body


def test_the_head_its_records_and_its_card_go_and_no_conversation(head: Path) -> None:
    shipment = pack(Order(head, "me/head"), is_dirty=False)
    assert shipment.files.keys() == {
        "config.json",
        "model.safetensors",
        "recipe.yaml",
        "provenance.json",
        "calibration.json",
        "summary.json",
        "README.md",
    }
    assert shipment.left_behind == ("conversations.jsonl",) and "stays here: conversations.jsonl" in shipment.text()
    for file in shipment.files.values():
        assert "private conversation" not in content(file)


def test_the_card_tells_target_data_tokens_tau_speedup_hardware_and_three_ways_to_use_it(head: Path) -> None:
    front, body = readme(head, licence="apache-2.0")
    assert front["license"] == "apache-2.0" and front["base_model"] == "meta-llama/Llama-3.1-8B-Instruct"
    assert {"eagle3", "speculative-decoding"} <= set(front["tags"])
    assert front["datasets"] == ["HuggingFaceH4/ultrachat_200k"]
    assert "| eagle3 | 8 levels, k 10, nodes 60 | gsm8k | 0 | 40 | 4.08 | 2.31 (2.20-2.43) | 181 | 40/40 |" in body
    assert "99.00" not in body  # a row that failed has no figures
    assert "Hardware: device a CPU, threads 2. Commit 0123456789ab." in body
    assert "1,627,195 tokens, 1,150 steps" in body and "ECE 0.0575" in body and "90.00% of the training answers" in body
    assert "`secret.jsonl`" in body and str(head.parents[2]) not in body  # no paths of this machine
    assert "aerie generate --target meta-llama/Llama-3.1-8B-Instruct --head me/head" in body
    assert "convert me/head --to speculators" in body and "vllm serve draft" in body
    assert "convert me/head --to sglang" in body and "--speculative-algorithm EAGLE3" in body


@pytest.mark.parametrize("layout", ["aerie", "speculators"])
def test_no_local_path_and_nobodys_name_leaves_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str
) -> None:
    home = tmp_path / "home" / "alice"
    run = home / "secret-project" / "runs" / "mine"
    place, target = run / "heads" / "eagle3", home / "models" / "tiny-llama"
    save_head(published.eagle3(), place, target_path=str(target))
    conversations = [str(home / "chats" / "train.jsonl"), "~/chats/more.jsonl", "../alice/odd.json", "someone/public"]
    recipe = {"run": str(run), "target": {"path": str(target)}, "data": {"conversations": conversations}}
    (place / "recipe.yaml").write_text(yaml.safe_dump({**recipe, "head": {"init_from": str(home)}}))
    argv = ["main.py", "--config", str(home / "c.yaml"), f"--run={run}", f"--data.conversations=[{conversations[0]}]"]
    inputs = {"target": {"path": str(target)}, "files": {conversations[0]: "0123"}}
    write_json(place / "provenance.json", {"commit": "01", "dirty": False, "argv": argv, "inputs": inputs, "tokens": 5})
    head = {"kind": "eagle3", "name": str(place)}
    summary = {"run": str(run), "head": head, "target": {"name": str(target)}, "rows": [ROW]}
    write_json(run / "report" / "summary.json", summary)
    write_json(run / "calibration" / "calibration.json", {"temperature": 0.0, "ece": 0.1, "brier": 0.1, "of": str(run)})
    for stage in ("bench", "calibration"):
        write_json(run / stage / "provenance.json", {"inputs": {"head": [digests(place)]}})
    monkeypatch.setenv("HOME", str(home))
    if layout != "aerie":
        facts = ends_facts()
        facts = dataclasses.replace(facts, destination=dataclasses.replace(facts.destination, target=str(target)))
        export(place, layout, tmp_path / "out", facts)
        place = tmp_path / "out"
    for name in (None, "someone/tiny-llama"):
        order = Order(place, "me/head", run=run, target_name=name, licence="mit")
        shipment = pack(order, is_dirty=False)
        texts = {file: content(shipment.files[file]) for file in shipment.files if not file.endswith(".safetensors")}
        assert len(texts) == 6
        for file, text in texts.items():
            for private in (str(tmp_path), "alice", "secret-project", "/home", "~/"):
                assert private not in text, (file, private)
            assert re.search(r"(^|[\s\"'\[=,])/\w", text) is None, file
        assert ("base_model: someone/tiny-llama" in texts["README.md"]) == (name is not None)
        told = name or "tiny-llama"
        assert f"--target {told} " in texts["README.md"] and yaml.safe_load(texts["recipe.yaml"])["run"] == "mine"
        config = json.loads(texts["config.json"])
        assert config["aerie"]["target_path"] == told
        if layout == "speculators":
            assert config["speculators_config"]["verifier"]["name_or_path"] == told
        assert json.loads(texts["summary.json"])["head"]["name"] == "mine/heads/eagle3"
        assert yaml.safe_load(texts["recipe.yaml"])["data"]["conversations"] == [
            *("train.jsonl", "more.jsonl", "odd.json", "someone/public")
        ]
        assert any("config.json" in note and "shipped as public names" in note for note in shipment.notes)
    assert str(target) in (place / "config.json").read_text()  # what is here stays


def test_a_calibrator_goes_along_and_fits_the_head_as_it_is_fetched(tmp_path: Path) -> None:
    def shipped(place: Path, out: Path) -> Path:
        out.mkdir()
        files = pack(Order(place, "me/head", without_results=True), is_dirty=False).files
        for name, file in files.items():
            (out / name).write_bytes(file if isinstance(file, bytes) else file.read_bytes())
        return out

    for number, target in enumerate(("a/b", str(tmp_path / "target"))):  # with the second, config.json is another there
        place = tmp_path / f"head{number}"
        save_head(published.eagle3(), place, target_path=target)
        fitted = Calibrator(1.5, (0.1, 0.9), (0.2, 0.8), head=digests(place))
        calibrator.save(fitted, place)
        assert calibrator.load(shipped(place, tmp_path / f"out{number}")).temperature == 1.5
    save_head(published.eagle3(seed=3), place, target_path="a/b")
    assert "calibrator.json" not in {path.name for path in shipped(place, tmp_path / "other").iterdir()}
    done = export(place, "sglang", tmp_path / "export", ends_facts())
    assert any(note.startswith("calibrator.json left out") for note in done.notes)


def test_records_without_local_paths_are_shipped_as_they_are(head: Path) -> None:
    files = pack(Order(head, "me/head"), is_dirty=False).files
    assert files["config.json"] == head / "config.json" and files["model.safetensors"] == head / "model.safetensors"


@pytest.mark.parametrize("kind", ["medusa", "hydra"])
def test_a_published_medusa_or_hydra_head_ships_as_it_was_published(tmp_path: Path, kind: str) -> None:
    place = {"medusa": multi_token.medusa, "hydra": multi_token.hydra}[kind](tmp_path / "head")[1]
    order = Order(place, "me/head", target_name="lmsys/vicuna-7b-v1.3")
    shipment = pack(dataclasses.replace(order, without_results=True), is_dirty=False)
    assert shipment.files.keys() == {"config.json", f"{kind}_lm_head.pt", "README.md"}
    text = content(shipment.files["README.md"])
    assert (
        f"{kind.title()} draft head" in text and "aerie generate --target lmsys/vicuna-7b-v1.3 --head me/head" in text
    )


def test_a_draft_lm_is_no_draft_head_and_the_way_to_ship_it_is_told(tmp_path: Path) -> None:
    place = tiny.target(tmp_path / "draft_lm")
    with pytest.raises(UserError, match=r"a whole language model \(a draft_lm, or a target\).*hf upload me/head "):
        pack(Order(place, "me/head", target_name="a/b", without_results=True), is_dirty=False)


def test_the_card_names_the_sglang_whose_counting_the_files_follow(head: Path, tmp_path: Path) -> None:
    assert f"# SGLang {CHECKED}, by its counting of the target's states" in readme(head)[1]
    facts = ends_facts()
    deep = dataclasses.replace(facts.destination, architectures=("DeepseekV3ForCausalLM",))
    save_head(published.eagle3(after_blocks=(3, 4, 5), fc_norm=True), tmp_path / "head", target_path="a/b")
    export(tmp_path / "head", "sglang", tmp_path / "out", dataclasses.replace(facts, destination=deep))
    body = readme(tmp_path / "out")[1]
    assert "# SGLang 0.5.13 to 0.5.23, by its counting of the target's states; 0.5.12 at least, for fc_norm" in body
    assert "server" in screen(inspect_head(tmp_path / "out")) and "SGLang 0.5.13 to 0.5.23" in screen(
        inspect_head(tmp_path / "out")
    )


def test_records_that_cannot_be_parsed_are_one_sentence(head: Path) -> None:
    (head / "recipe.yaml").write_text("a: [\n")
    with pytest.raises(UserError, match=r"recipe\.yaml: not YAML"):
        pack(Order(head, "me/head"), is_dirty=False)
    (head / "recipe.yaml").write_text("- a list\n")
    write_json(head / "provenance.json", {"tokens": "many", "dirty": False})
    assert "recipe.yaml" not in pack(Order(head, "me/head"), is_dirty=False).files


def test_an_exported_head_ships_with_the_reports_of_the_head_it_was_made_from(head: Path, tmp_path: Path) -> None:
    export(head, "speculators", tmp_path / "out", ends_facts())
    order = Order(tmp_path / "out", "me/head", run=head.parents[1])
    assert "summary.json" in pack(order, is_dirty=False).files
    front, body = readme(tmp_path / "out", run=head.parents[1])
    assert "vllm" in front["tags"] and "vllm serve me/head\n" in body and "convert me/head --to speculators" not in body


def test_reports_of_another_head_are_refused(head: Path) -> None:
    save_head(published.eagle3(seed=9), head, target_path="a/b")
    with pytest.raises(UserError, match="was measured with another head"):
        pack(Order(head, "me/head"), is_dirty=False)


def test_results_without_a_record_of_the_head_are_nobodys(head: Path) -> None:
    run = head.parents[1]
    for wrong in (None, {}, {"inputs": {}}, {"inputs": {"head": [{}]}}, {"inputs": {"head": {"config.json": "x"}}}):
        shutil.rmtree(run / "bench", ignore_errors=True)
        if wrong is not None:
            write_json(run / "bench" / "provenance.json", wrong)
        with pytest.raises(UserError, match=r"bench: (holds no record of|was measured with).*--without-results"):
            pack(Order(head, "me/head"), is_dirty=False)
        shipment = pack(Order(head, "me/head", without_results=True), is_dirty=False)
        assert "summary.json" not in shipment.files and "4.08" not in content(shipment.files["README.md"])
        assert any(note.startswith("report/summary.json left out") for note in shipment.notes)


def test_the_calibration_of_another_head_stays_here(head: Path) -> None:
    run = head.parents[1]
    summary = json.loads((run / "report" / "summary.json").read_text())
    write_json(run / "report" / "summary.json", {**summary, "calibration": {"ece": 0.0575}})
    shipped = pack(Order(head, "me/head"), is_dirty=False).files
    assert shipped["summary.json"] == run / "report" / "summary.json" and "calibration.json" in shipped
    for wrong in (None, {"inputs": {"head": [{**digests(head), "model.safetensors": "another"}]}}):
        (run / "calibration" / "provenance.json").unlink()
        if wrong is not None:
            write_json(run / "calibration" / "provenance.json", wrong)
        else:
            write_json(run / "calibration" / "other.json", {})
        shipment = pack(Order(head, "me/head"), is_dirty=False)
        assert "calibration.json" not in shipment.files and "ECE" not in content(shipment.files["README.md"])
        assert "0.0575" not in content(shipment.files["summary.json"])
        assert any(note.startswith("calibration left out: ") for note in shipment.notes)
        write_json(run / "calibration" / "provenance.json", {})


def test_push_checks_the_target_that_it_is_given_and_asks_for_it_where_only_it_tells_the_taps(tmp_path: Path) -> None:
    numbered = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [3, 4, 6]}}
    place = published.specforge(tmp_path / "head", numbered)
    with pytest.raises(UserError, match="give it with --target"):
        pack(Order(place, "me/head", target_name="a/b", without_results=True), is_dirty=False)
    shipment = pack(
        Order(place, "me/head", target_name="a/b", target=ends_facts(), without_results=True), is_dirty=False
    )
    assert "hidden_states [4, 5, 7]" in content(shipment.files["README.md"])
    plain = pack(
        Order(published.specforge(tmp_path / "plain"), "me/head", target_name="a/b", without_results=True),
        is_dirty=False,
    )
    assert "not determined by its files: the default ones of its target" in content(plain.files["README.md"])
    save_head(published.eagle3(), tmp_path / "own", target="0123", target_path="a/b")
    with pytest.raises(UserError, match="other weights than tiny"):
        pack(Order(tmp_path / "own", "me/head", target=ends_facts(), without_results=True), is_dirty=False)


def test_the_card_says_what_this_project_had_to_do_with_the_head(head: Path, tmp_path: Path) -> None:
    assert "trained with aerie. Spec" in readme(head)[1]
    export(head, "sglang", tmp_path / "out", ends_facts())
    assert "in the sglang layout, converted with aerie" in readme(tmp_path / "out")[1]
    foreign = readme(published.specforge(tmp_path / "theirs"), target_name="a/b")[1]
    assert "in the sglang layout, pushed with aerie" in foreign and "made with" not in foreign


def test_a_report_of_several_heads_ships_with_each_and_shows_its_own_rows(head: Path) -> None:
    run, others = head.parents[1], {"config.json": "another", "model.safetensors": "head"}
    write_json(run / "bench" / "provenance.json", {"inputs": {"head": [others, digests(head)]}})
    chain = {**ROW, "head": "eagle3", "tree": {"shape": "chain", "levels": 5, "k": 1, "nodes": 6}}
    rows = [
        {**ROW, "method": "vanilla", "head": None, "tree": None},
        chain,
        {**ROW, "method": "medusa", "head": "medusa"},
    ]
    write_json(run / "report" / "summary.json", {"rows": rows})
    body = readme(head)[1]
    assert "| eagle3 | chain, 5 levels |" in body and "| vanilla | - |" in body and "| medusa |" not in body
    write_json(run / "report" / "summary.json", {"rows": rows[:1] + rows[2:]})
    with pytest.raises(UserError, match="no measured results"):
        pack(Order(head, "me/head"), is_dirty=False)
    write_json(run / "bench" / "provenance.json", {"inputs": {"head": [others]}})
    with pytest.raises(UserError, match="was measured with another head"):
        pack(Order(head, "me/head"), is_dirty=False)


@pytest.mark.parametrize("kind", ["medusa", "hydra"])
def test_a_medusa_or_hydra_head_ships_with_a_card_that_says_where_it_decodes(tmp_path: Path, kind: Any) -> None:
    save_head(tiny.multi_token_head(kind, tiny.ends()), tmp_path / "head", target_path="lmsys/vicuna-7b-v1.3")
    front, body = readme(tmp_path / "head")
    assert kind in front["tags"] and "--head me/head" in body and "it decodes here" in body


def test_without_results_only_when_told(head: Path) -> None:
    shutil.rmtree(head.parents[1] / "report")
    with pytest.raises(UserError, match=r"no measured results .*--without-results"):
        pack(Order(head, "me/head"), is_dirty=False)
    assert "Nothing was measured with this head yet." in readme(head)[1]


def test_an_uncommitted_tree_only_when_told(head: Path) -> None:
    with pytest.raises(UserError, match="this checkout differs from its commit"):
        pack(Order(head, "me/head"), is_dirty=True)
    provenance = json.loads((head / "provenance.json").read_text())
    write_json(head / "provenance.json", {**provenance, "dirty": True})
    with pytest.raises(UserError, match="was trained from an uncommitted tree"):
        pack(Order(head, "me/head"), is_dirty=False)
    card = pack(Order(head, "me/head", uncommitted=True), is_dirty=True).files["README.md"]
    assert isinstance(card, bytes) and b"Commit 0123456789ab, with uncommitted changes" in card


def test_a_broken_head_and_one_without_a_target_are_refused(tmp_path: Path) -> None:
    save_head(published.eagle3(), tmp_path / "head")
    with pytest.raises(UserError, match="name it with --target-name"):
        pack(Order(tmp_path / "head", "me/head", without_results=True), is_dirty=False)
    named = pack(
        Order(tmp_path / "head", "me/head", target_name="local/deep/path", without_results=True), is_dirty=False
    )
    assert any("no base_model" in note for note in named.notes)
    values = json.loads((tmp_path / "head" / "config.json").read_text())
    write_json(tmp_path / "head" / "config.json", {**values, "intermediate_size": 96})
    with pytest.raises(UserError, match="has shape"):
        pack(Order(tmp_path / "head", "me/head", without_results=True), is_dirty=False)


@pytest.mark.parametrize(
    ("changes", "vllm", "sglang"),
    [
        ({}, '"method": "eagle"', "--speculative-algorithm EAGLE "),
        ({"bias": True}, "not possible: vLLM's EAGLE-1 has no fc.bias", "--speculative-algorithm EAGLE "),
        ({"qkv_bias": True}, '"method": "eagle"', "not possible: SGLang's draft modules do not know qkv_bias"),
    ],
)
def test_the_card_of_an_eagle1_head_says_where_it_cannot_be_served(
    tmp_path: Path, changes: dict[str, Any], vllm: str, sglang: str
) -> None:
    save_head(tiny.head(tiny.ends().embedding, **changes), tmp_path / "head", target_path="lmsys/vicuna-7b-v1.3")
    _, body = readme(tmp_path / "head")
    assert vllm in body and sglang in body and "No licence was given" in body
