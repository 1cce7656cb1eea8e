"""Pushing and fetching heads over a Hub on loopback, by huggingface_hub itself: what goes, stays and breaks."""

import dataclasses
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
import yaml
from huggingface_hub import constants
from safetensors.torch import save_file

from aerie.configs.errors import UserError
from aerie.infer.decode import calibrator
from aerie.infer.decode.calibrator import Calibrator
from aerie.model.card import is_local_source, public, public_names
from aerie.model.checkpoint import head_facts, load_head, save_head
from aerie.model.export import export
from aerie.model.formats.sglang import CHECKED
from aerie.model.hub import head_directory, readable_errors, require_login
from aerie.model.push import Order, look, pack, upload
from aerie.model.storage import digests
from tests import tiny
from tests.model.formats import published
from tests.model.formats.published import TAPS, safeailab_eagle3, target_facts
from tests.model.hub_server import Hub, Server

TOKEN = "hf_madeUpForTheTests0123456789abcdefg"
CARD = b"---\ntags:\n- draft-head\n- aerie\n---\n"
ROW = {
    **{"method": "eagle3", "task": "gsm8k", "temperature": 0.0, "prompts": 40, "status": "ok", "identical": 40},
    **{"tree": {"levels": 8, "k": 10, "nodes": 60}, "tau": 4.0812, "tokens_per_s": 181.4},
    **{"speedup": 2.314, "speedup_ci95": [2.2, 2.43]},
}
FAILED = {"method": "eagle3", "status": "error", "message": "out of memory", "tau": 99.0}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A Hub that huggingface_hub in this process talks to, with a login and a cache of its own."""
    with Server() as served:
        monkeypatch.setattr(constants, "ENDPOINT", served.address)
        template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace("https://huggingface.co", served.address)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        for name, value in (("HF_HUB_DISABLE_XET", True), ("HF_HUB_CACHE", str(tmp_path / "cache"))):
            monkeypatch.setattr(constants, name, value)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        huggingface_hub.close_session()
        yield served
    huggingface_hub.close_session()


def write_json(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))


def files_of(directory: Path) -> dict[str, Path | bytes]:
    return {**{path.name: path for path in directory.iterdir()}, "README.md": CARD}


def content(file: Path | bytes) -> str:
    return (file if isinstance(file, bytes) else file.read_bytes()).decode(errors="replace")


@pytest.fixture
def head(tmp_path: Path) -> Path:
    """A head in its run, with reports, and with files beside it that are nobody's business."""
    run = tmp_path / "run"
    place = run / "heads" / "eagle3"
    target = "meta-llama/Llama-3.1-8B-Instruct"
    save_head(published.eagle3(), place, target_path=target, draft_vocabulary={"coverage": 0.9})
    conversations = ["HuggingFaceH4/ultrachat_200k", str(tmp_path / "secret.jsonl")]
    (place / "recipe.yaml").write_text(yaml.safe_dump({"data": {"conversations": conversations}}))
    provenance = {"commit": "0123456789ab", "dirty": False, "argv": ["main.py"], "tokens": 1627195, "steps": 1150}
    write_json(place / "provenance.json", {**provenance, "versions": {"torch": "2.13.0"}})
    (place / "conversations.jsonl").write_text('{"text": "a private conversation"}\n')
    summary = {"schema": 1, "commit": "0123456789ab", "hardware": {"device": "a CPU", "threads": 2}}
    write_json(run / "report" / "summary.json", {**summary, "head": {"kind": "eagle3"}, "rows": [ROW, FAILED]})
    for stage in ("bench", "calibration"):
        write_json(run / stage / "provenance.json", {"inputs": {"head": [digests(place)]}})
    write_json(run / "calibration/calibration.json", {"temperature": 0.0, "ece": 0.0575, "brier": 0.0629, "bins": []})
    return place


def readme(directory: Path, **changes: Any) -> tuple[dict[str, Any], str]:
    """The card's front matter and its text."""
    card = content(pack(Order(directory, "me/head", without_results=True, **changes), False).files["README.md"])
    _, front, body = card.split("---\n", maxsplit=2)
    return yaml.safe_load(front), body


def test_the_head_its_records_and_its_card_go_and_no_conversation(head: Path) -> None:
    shipment = pack(Order(head, "me/head"), is_dirty=False)
    records = {"recipe.yaml", "provenance.json", "calibration.json", "summary.json", "README.md"}
    assert shipment.files.keys() == {"config.json", "model.safetensors", *records}
    assert shipment.left_behind == ("conversations.jsonl",) and "stays here: conversations.jsonl" in shipment.text()
    assert not any("private conversation" in content(file) for file in shipment.files.values())
    assert shipment.files["config.json"] == head / "config.json"  # without local paths a record goes as it is


def test_the_card_has_target_data_figures_hardware_and_three_ways_to_use_the_head(head: Path) -> None:
    front, body = readme(head, licence="apache-2.0")
    assert front["license"] == "apache-2.0" and front["base_model"] == "meta-llama/Llama-3.1-8B-Instruct"
    assert {"eagle3", "speculative-decoding", "aerie"} <= set(front["tags"]) and front["library_name"] == "aerie"
    assert front["datasets"] == ["HuggingFaceH4/ultrachat_200k"]
    metrics = front["model-index"][0]["results"][0]["metrics"]
    assert {metric["type"]: metric["value"] for metric in metrics} == {"tau": 4.0812, "speedup": 2.314}
    assert "| eagle3 | 8 levels, k 10, nodes 60 | gsm8k | 0 | 40 | 4.08 | 2.31 (2.20-2.43) | 181 | 40/40 |" in body
    assert "99.00" not in body  # a row that failed has no figures
    assert "Hardware: device a CPU, threads 2. Commit 0123456789ab." in body and "ECE 0.0575" in body
    assert "1,627,195 tokens, 1,150 steps" in body and "90.00% of the training answers" in body
    assert "`secret.jsonl`" in body and str(head.parents[2]) not in body
    assert "aerie generate --target meta-llama/Llama-3.1-8B-Instruct --head me/head" in body
    assert "convert me/head --to speculators" in body and "vllm serve draft" in body
    assert f"# SGLang {CHECKED}, by its counting of the target's states" in body and "EAGLE3" in body


@pytest.mark.parametrize(
    ("make", "lines"),
    [
        (lambda: tiny.head(tiny.vocab().embedding), ['"method": "eagle"', "--speculative-algorithm EAGLE "]),
        (lambda: tiny.head(tiny.vocab().embedding, bias=True), ["vLLM's EAGLE-1 has no fc.bias", "algorithm EAGLE "]),
        (lambda: tiny.head(tiny.vocab().embedding, qkv_bias=True), ["SGLang's draft modules do not know qkv_bias"]),
        (lambda: tiny.multi_token_head("medusa", tiny.vocab()), ["SGLang has no Medusa; it decodes here"]),
        (lambda: tiny.multi_token_head("hydra", tiny.vocab()), ["no Hydra head for vLLM; it decodes here"]),
    ],
)
def test_the_card_says_where_a_head_cannot_be_served(tmp_path: Path, make: Any, lines: list[str]) -> None:
    save_head(make(), tmp_path / "head", target_path="lmsys/vicuna-7b-v1.3")
    body = readme(tmp_path / "head")[1]
    assert all(line in body for line in lines) and "No licence was given" in body and "Nothing was measured" in body


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
    summary = {"run": str(run), "head": {"kind": "eagle3", "name": str(place)}, "target": {"name": str(target)}}
    write_json(run / "report" / "summary.json", {**summary, "rows": [ROW]})
    write_json(run / "calibration" / "calibration.json", {"temperature": 0.0, "ece": 0.1, "brier": 0.1, "of": str(run)})
    for stage in ("bench", "calibration"):
        write_json(run / stage / "provenance.json", {"inputs": {"head": [digests(place)]}})
    monkeypatch.setenv("HOME", str(home))
    if layout != "aerie":
        facts = target_facts()
        facts = dataclasses.replace(facts, destination=dataclasses.replace(facts.destination, target=str(target)))
        export(place, layout, tmp_path / "out", facts)
        place = tmp_path / "out"
    for name in (None, "someone/tiny-llama"):
        shipment = pack(Order(place, "me/head", run=run, target_name=name, licence="mit"), is_dirty=False)
        texts = {file: content(shipment.files[file]) for file in shipment.files if not file.endswith(".safetensors")}
        assert len(texts) == 6
        for file, text in texts.items():
            for private in (str(tmp_path), "alice", "secret-project", "/home", "~/"):
                assert private not in text, (file, private)
            assert re.search(r"(^|[\s\"'\[=,])/\w", text) is None, file
        assert ("base_model: someone/tiny-llama" in texts["README.md"]) == (name is not None)
        assert yaml.safe_load(texts["recipe.yaml"])["run"] == "mine"
        assert json.loads(texts["config.json"])["aerie"]["target_path"] == (name or "tiny-llama")
        assert json.loads(texts["summary.json"])["head"]["name"] == "mine/heads/eagle3"
        names = yaml.safe_load(texts["recipe.yaml"])["data"]["conversations"]
        assert names == ["train.jsonl", "more.jsonl", "odd.json", "someone/public"]
    assert str(target) in (place / "config.json").read_text()  # what is here stays


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("/home/alice/my data/train.jsonl", "train.jsonl"),
        ("--run=/home/alice/my runs/x", "--run=x"),
        ("[/home/alice/a.jsonl,/srv/alice/b.jsonl]", "[a.jsonl,b.jsonl]"),
        *((text, "home") for text in ("/home/alice", "/Users/alice/", "/export/home/alice", "~")),
        *((text, "x.yaml") for text in ("~/x.yaml", "../../alice/x.yaml", "file:///home/alice/x.yaml")),
        ("nas:/home/alice/x.yaml", "nas:x.yaml"),
        *((text, "x.yaml") for text in ("C:\\Users\\alice\\x.yaml", "\\\\nas\\alice\\x.yaml")),
        ("read /home/alice/x.yaml and ~/y.yaml", "read x.yaml and y.yaml"),
        *((text, text) for text in ("https://huggingface.co/a/b", "meta-llama/Llama-3.1-8B", "4.2 tok/s", "and/or")),
        *((text, text) for text in ("a / b", "configs/embedded.yaml", "1/2")),
    ],
)
def test_a_path_of_the_machine_gives_way_to_its_last_part(text: str, shown: str) -> None:
    assert public({text: [{"key": text}], 1: 2.5}, {}) == {shown: [{"key": shown}], 1: 2.5}


def test_target_conversations_and_run_have_public_names() -> None:
    data = {"conversations": ["runs/mine/train.jsonl", "HuggingFaceH4/ultrachat_200k"]}
    recipe = {"run": "runs/mine", "target": {"path": "runs/mine/target"}, "data": data}
    names = public_names("meta/Llama", {"recipe.yaml": recipe})
    told = {"conversations": ["train.jsonl", "HuggingFaceH4/ultrachat_200k"]}
    assert public(recipe, names) == {"run": "mine", "target": {"path": "meta/Llama"}, "data": told}
    assert public(["--run", "runs/mine", "runs/mine2/heads"], names) == ["--run", "mine", "runs/mine2/heads"]
    local = {"a/b": False, "a/b:main:train": False, "a/b.jsonl": True, "x.jsonl": True, "tests/model": True}
    assert {name: is_local_source(name) for name in local} == local


def test_a_calibrator_goes_along_and_fits_the_head_as_it_is_fetched(tmp_path: Path) -> None:
    for number, target in enumerate(("a/b", str(tmp_path / "target"))):  # with the second, config.json is another there
        place, out = tmp_path / f"head{number}", tmp_path / f"out{number}"
        save_head(published.eagle3(), place, target_path=target)
        calibrator.save(Calibrator(1.5, (0.1, 0.9), (0.2, 0.8), head=digests(place)), place)
        out.mkdir()
        for name, file in pack(Order(place, "me/head", without_results=True), is_dirty=False).files.items():
            (out / name).write_bytes(file if isinstance(file, bytes) else file.read_bytes())
        assert calibrator.load(out).temperature == 1.5
    save_head(published.eagle3(seed=3), place, target_path="a/b")  # another head: its calibrator stays
    assert "calibrator.json" not in pack(Order(place, "me/head", without_results=True), is_dirty=False).files


def test_results_of_another_head_are_refused_and_left_out_when_told(head: Path, tmp_path: Path) -> None:
    run = head.parents[1]
    export(head, "speculators", tmp_path / "out", target_facts())
    exported = pack(Order(tmp_path / "out", "me/head", run=run), is_dirty=False)
    assert "summary.json" in exported.files and "vllm serve me/head\n" in content(exported.files["README.md"])
    others = {"config.json": "another", "model.safetensors": "head"}
    for inputs in (None, {}, {"inputs": {"head": [{}]}}, {"inputs": {"head": [others]}}):
        shutil.rmtree(run / "bench", ignore_errors=True)
        if inputs is not None:
            write_json(run / "bench" / "provenance.json", inputs)
        with pytest.raises(UserError, match=r"bench: (holds no record of|was measured with).*--without-results"):
            pack(Order(head, "me/head"), is_dirty=False)
        shipment = pack(Order(head, "me/head", without_results=True), is_dirty=False)
        assert "summary.json" not in shipment.files and "4.08" not in content(shipment.files["README.md"])
    write_json(run / "bench" / "provenance.json", {"inputs": {"head": [others, digests(head)]}})
    write_json(run / "calibration" / "provenance.json", {"inputs": {"head": [others]}})
    shipment = pack(Order(head, "me/head"), is_dirty=False)
    assert "calibration.json" not in shipment.files and "ECE" not in content(shipment.files["README.md"])
    (run / "report" / "summary.json").unlink()
    with pytest.raises(UserError, match=r"no measured results .*--without-results"):
        pack(Order(head, "me/head"), is_dirty=False)


def test_mistakes_of_a_push_are_one_sentence(head: Path, tmp_path: Path) -> None:
    def refused(message: str, place: Path = head, is_dirty: bool = False, **changes: Any) -> None:
        with pytest.raises(UserError, match=message):
            pack(Order(place, "me/head", **changes), is_dirty)

    refused("this checkout differs from its commit", is_dirty=True)
    provenance = json.loads((head / "provenance.json").read_text())
    write_json(head / "provenance.json", {**provenance, "dirty": True})
    refused("was trained from an uncommitted tree")
    card = pack(Order(head, "me/head", uncommitted=True), is_dirty=True).files["README.md"]
    assert "Commit 0123456789ab, with uncommitted changes" in content(card)
    (head / "recipe.yaml").write_text("a: [\n")
    refused(r"recipe\.yaml: not YAML")
    refused("a whole language model.*hf upload me/head ", tiny.target(tmp_path / "lm"), target_name="a/b")
    numbered = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [3, 4, 6]}}
    refused("give it with --target", published.specforge(tmp_path / "taps", numbered), target_name="a/b")
    save_head(published.eagle3(), tmp_path / "bare")
    refused("name it with --target-name", tmp_path / "bare", without_results=True)
    values = json.loads((tmp_path / "bare" / "config.json").read_text())
    write_json(tmp_path / "bare" / "config.json", {**values, "intermediate_size": 96})
    refused("size mismatch", tmp_path / "bare")


# ------------------------------------------------------------------------------------------------------ the Hub


def sharded(directory: Path) -> dict[str, Path | bytes]:
    """A head in two shards, as large ones are published."""
    save_head(tiny.head(tiny.vocab().embedding), directory)
    state = {name: value.clone() for name, value in load_head(directory).state_dict().items()}
    names = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    table = {name: names[place % 2] for place, name in enumerate(sorted(state))}
    for shard in names:
        save_file({name: state[name] for name in state if table[name] == shard}, directory / shard)
    (directory / "model.safetensors").unlink()
    write_json(directory / "model.safetensors.index.json", {"weight_map": table})
    return files_of(directory)


def test_a_shipped_head_is_fetched_by_name_and_revision_and_equals_the_local_one(hub: Hub, tmp_path: Path) -> None:
    for step, revision in ((1, None), (2, "better"), (3, "better")):
        save_head(tiny.head(tiny.vocab().embedding, seed=step), tmp_path / "head", step=step)
        address = upload(look("me/head", revision), files_of(tmp_path / "head"), True, "a head")
        assert address.startswith(hub.address)
    assert hub.private == {"me/head"}
    assert head_facts("me/head") == {"step": 1} and head_facts("me/head@better") == {"step": 3}
    assert torch.equal(load_head("me/head@better").fc.weight, load_head(tmp_path / "head").fc.weight)
    upload(look("me/pickle"), files_of(safeailab_eagle3(tmp_path / "pickle")), False, "a head")
    assert load_head("me/pickle", vocab=tiny.vocab(), after_blocks=TAPS).kind == "eagle3"
    both = {**files_of(tmp_path / "pickle"), **files_of(safeailab_eagle3(tmp_path / "safe", pickled=False))}
    upload(look("me/both"), both, False, "a head")
    assert not (head_directory("me/both") / "pytorch_model.bin").exists()  # a pickle only where there is nothing better


def test_a_second_push_removes_what_the_first_left_and_nothing_of_anybody_elses(hub: Hub, tmp_path: Path) -> None:
    upload(look("me/head"), {**sharded(tmp_path / "one"), "calibration.json": b"{}"}, False, "a head")
    assert torch.equal(load_head("me/head").fc.weight, load_head(tmp_path / "one").fc.weight)  # both shards came
    hub.repositories["me/head"]["main"] |= {".gitattributes": b"*.bin lfs", "figure.png": b"a stranger's"}
    save_head(tiny.head(tiny.vocab().embedding, seed=9), tmp_path / "two")
    upload(look("me/head"), files_of(tmp_path / "two"), False, "another head")
    kept = {".gitattributes", "figure.png", "README.md", "config.json", "model.safetensors"}
    assert hub.repositories["me/head"]["main"].keys() == kept
    assert torch.equal(load_head("me/head").fc.weight, load_head(tmp_path / "two").fc.weight)


@pytest.mark.parametrize(
    ("files", "named"),
    [
        ({"README.md": b"their words", "summary.json": b"{}"}, "README.md"),
        ({"README.md": CARD.replace(b"aerie", b"x") + b"words", "model.safetensors": b"1"}, "README.md"),
        ({"README.md": b"---\n: [\n---\n"}, "README.md"),
        ({"README.md": b"---\n- aerie\n---\n"}, "README.md"),
        ({"config.json": b"{}"}, "config.json"),
        ({"consolidated.safetensors": b"1", ".gitattributes": b""}, "consolidated.safetensors"),
        ({"gguf/model-q4.gguf": b"1"}, "gguf/model-q4.gguf"),
    ],
)
def test_a_strangers_repository_is_never_written(hub: Hub, tmp_path: Path, files: dict[str, bytes], named: str) -> None:
    hub.repositories["me/model"] = {"main": dict(files)}
    save_head(tiny.head(tiny.vocab().embedding), tmp_path / "head")
    with pytest.raises(UserError, match=f"me/model: is somebody else's: it holds {re.escape(named)}"):
        upload(look("me/model"), files_of(tmp_path / "head"), False, "a head")
    assert hub.repositories["me/model"]["main"] == files and hub.count("POST|PUT") == 0


def test_a_new_repository_of_the_hub_is_nobodys_yet_and_a_public_one_is_not_made_private(
    hub: Hub, tmp_path: Path
) -> None:
    save_head(tiny.head(tiny.vocab().embedding), tmp_path / "head")
    for number, card in enumerate((b"", b"---\nlicense: mit\n---\n")):
        name = f"me/new{number}"
        hub.repositories[name] = {"main": {".gitattributes": b"*.bin lfs", "README.md": card}}
        with pytest.raises(UserError, match=r"exists and is public, .*make it private on its settings page first"):
            upload(look(name), files_of(tmp_path / "head"), True, "a head")
        upload(look(name), files_of(tmp_path / "head"), False, "a head")
        assert look(name).is_ours


@pytest.mark.parametrize(
    ("method", "pattern", "status", "message"),
    [
        *(("PUT", "/upload/", 403, "same command goes on"), ("POST", "/commit/", 500, "same command goes on")),
        *(("POST", path, 403, "use a token with write permission") for path in ("/preupload/", "/batch", "/commit/")),
        ("POST", "/repos/create", 401, "the Hub does not accept this login .*run: hf auth login"),
    ],
)
def test_a_push_that_broke_off_leaves_nothing_half_there_and_is_repeated(
    hub: Hub, tmp_path: Path, method: str, pattern: str, status: int, message: str
) -> None:
    save_head(tiny.head(tiny.vocab().embedding), tmp_path / "head")
    hub.failures[(method, pattern)] = [status]
    with pytest.raises(UserError, match=message) as caught:
        upload(look("me/head"), files_of(tmp_path / "head"), False, "a head")
    assert "\n" not in str(caught.value) and TOKEN not in str(caught.value)
    assert hub.repositories.get("me/head", {"main": {}})["main"] == {}
    before = hub.count("PUT /upload/")
    upload(look("me/head"), files_of(tmp_path / "head"), False, "a head")
    assert torch.equal(load_head("me/head").fc.weight, load_head(tmp_path / "head").fc.weight)
    if pattern == "/commit/":
        assert hub.count("PUT /upload/") == before  # what had arrived is not sent again


def test_names_that_are_nowhere_are_one_sentence(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.repositories["me/empty"] = {"main": {}}
    for name, message in (
        ("me/none", r"me/none: no such local directory, and no such repository on the Hub"),
        ("me/empty@v9", "me/empty@v9: the repository has no such revision"),
        ("me/empty", r"me/empty: the repository has no config\.json"),
        ("runs/x/heads/eagle1", "runs/x/heads/eagle1: no such head directory; train one"),  # too deep for a repository
    ):
        with pytest.raises(UserError, match=message):
            load_head(name)
    hub.failures[("GET", "/api/models/me/empty")] = [403]
    with pytest.raises(UserError, match="me/empty: this login may not read it"):
        load_head("me/empty")
    asked = len(hub.requests)
    monkeypatch.chdir(tmp_path)
    save_head(tiny.head(tiny.vocab().embedding), Path("me/head"))
    assert load_head("me/head").kind == "eagle1" and len(hub.requests) == asked  # a local directory wins
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(UserError, match="me/unreachable: "):
        load_head("me/unreachable")
    with pytest.raises(UserError, match=r"me/head: .* bad credentials '\*\*\*'"), readable_errors("me/head"):
        raise RuntimeError(f"bad credentials '{TOKEN}'\nand more")
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
    with pytest.raises(UserError, match="no login for the Hub; run: hf auth login"):
        require_login()
