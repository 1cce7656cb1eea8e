"""The commands inspect, convert and push; pushing and fetching heads with huggingface_hub and a Hub
on loopback: what is sent, what is not, what fails."""

import json
import shutil
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import yaml
from huggingface_hub import constants

from aerie.configs.errors import UserError
from aerie.configs.schema.heads import TargetConfig
from aerie.infer.decode.calibrator import Calibrator, load_calibrator
from aerie.model.checkpoint import load_head, save_head
from aerie.model.export import export
from aerie.model.formats.eagle_layouts import CHECKED
from aerie.model.formats.layouts import read_content
from aerie.model.hub import head_directory, readable_errors
from aerie.model.inspection import inspect_head
from aerie.model.push import SERVERS, Files, pack, public, upload
from aerie.model.storage import digests, write_json
from aerie.model.target_files import load_config, weights_size
from tests import tiny
from tests.model.formats import published
from tests.model.hub_server import Hub, served

TOKEN = "hf_madeUpForTheTests0123456789abcdefg"
CARD = b"---\ntags:\n- draft-head\n- aerie\n---\n"
LLAMA = "meta-llama/Llama-3.1-8B-Instruct"
ROW = {
    **{
        "method": "eagle3",
        "head": "eagle3",
        "task": "gsm8k",
        "temperature": 0.0,
        "prompts": 40,
        "status": "ok",
    },
    **{"tree": {"levels": 8, "k": 10, "nodes": 60}, "tau": 4.0812, "tokens_per_s": 181.4},
    **{"speedup": 2.314, "speedup_ci95": [2.2, 2.43], "identical": 40},
}
UNMEASURED = {"allowed": ["without_results"]}
FAILED = {
    "method": "eagle3",
    "head": "eagle3",
    "status": "error",
    "message": "out of memory",
    "tau": 99.0,
}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: Any) -> Iterator[Hub]:
    """A Hub to which huggingface_hub in this process connects, with its own login and cache."""
    with served() as running:
        changes = {
            "ENDPOINT": running.address,
            "HUGGINGFACE_CO_URL_TEMPLATE": constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(
                "https://huggingface.co", running.address
            ),
            "HF_HUB_OFFLINE": False,
        }
        for name, value in {
            **changes,
            "HF_HUB_DISABLE_XET": True,
            "HF_HUB_CACHE": str(tmp_path / "cache"),
        }.items():
            monkeypatch.setattr(constants, name, value)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        huggingface_hub.close_session()
        yield running
    huggingface_hub.close_session()


@pytest.fixture(autouse=True)
def committed(monkeypatch: Any) -> None:
    monkeypatch.setattr("aerie.model.push.is_dirty", lambda: False)


@pytest.fixture
def one(tmp_path: Path) -> Path:
    """A small head."""
    save_head(tiny.head(tiny.vocab().embedding), tmp_path / "me/one")
    return tmp_path / "me/one"


def files_of(directory: Path) -> Files:
    return {**{path.name: path for path in directory.iterdir()}, "README.md": CARD}


def packed(directory: Path, **options: Any) -> dict[str, str]:
    files, notes = pack(inspect_head(directory), "me/head", **options)
    texts = {name: file.decode() for name, file in files.items() if isinstance(file, bytes)}
    return {**texts, "notes": " | ".join(notes), "names": " ".join(files)}


@pytest.fixture
def head(tmp_path: Path) -> Path:
    """A head in its run below a user's home, with reports, and private files beside it."""
    home = tmp_path / "home" / "alice"
    run, target = home / "secret-project" / "runs" / "mine", str(home / "models" / "tiny-llama")
    place = run / "heads" / "eagle3"
    save_head(published.eagle3(), place, target_path=target, draft_vocabulary={"coverage": 0.9})
    conversations = [
        "HuggingFaceH4/ultrachat_200k",
        str(home / "chats" / "train.jsonl"),
        "~/chats/more.jsonl",
    ]
    recipe = {
        "run": str(run),
        "target": {"path": target},
        "data": {"conversations": conversations},
        "distill": {
            "server": {
                "urls": ["http://bob:hunter2@host:8000/v1?key=hunter2"],
                "extra_body": {"pin": 4321, "key": "hunter2"},
            }
        },
        "head": {"init_from": str(home)},
    }
    (place / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    argv = [
        "main.py",
        "--config",
        str(home / "c.yaml"),
        f"--run={run}",
        f"--data.conversations=[{conversations[1]}]",
        "--distill.server.extra_body",
        "{headers: {x: hunter2}}",
        "--distill.server.urls=[http://hunter2@host]",
    ]
    facts = {
        "commit": "0123456789ab",
        "dirty": False,
        "argv": argv,
        "inputs": {"files": {conversations[1]: "01"}},
        "tokens": 1627195,
        "versions": {"torch": "2.13.0"},
    }
    write_json(place / "provenance.json", facts)
    (place / "conversations.jsonl").write_text('{"text": "a private conversation"}\n')
    summary = {
        "commit": "0123456789ab",
        "hardware": {"device": "a CPU", "threads": 2},
        "run": str(run),
        "head": {"name": str(place)},
        "target": {"name": target},
        "rows": [ROW, FAILED],
    }
    write_json(run / "report" / "summary.json", summary)
    for stage in ("bench", "calibration"):
        write_json(run / stage / "provenance.json", {"inputs": {"head": [digests(place)]}})
    write_json(
        run / "calibration/calibration.json", {"temperature": 0.0, "ece": 0.0575, "brier": 0.0629}
    )
    return place


def test_card(
    head: Path,
) -> None:
    """The card has target data figures hardware and three ways to use the head."""
    body = packed(head, licence="apache-2.0", target_name=LLAMA)["README.md"]
    front = next(yaml.safe_load_all(body))
    assert (
        front["license"] == "apache-2.0"
        and front["base_model"] == LLAMA
        and "aerie" in front["tags"]
    )
    assert front["datasets"] == ["HuggingFaceH4/ultrachat_200k"]
    assert {
        metric["type"]: metric["value"]
        for metric in front["model-index"][0]["results"][0]["metrics"]
    } == {
        "tau": 4.0812,
        "speedup": 2.314,
    }
    for said in (
        "4.08 | 2.31 (2.20-2.43) | 181 | 40/40 |",
        "Hardware: device a CPU, threads 2. Commit 0123456789ab.",
        "ECE 0.0575",
        f"aerie generate --target {LLAMA} --head me/head",
        "vllm serve draft",
        f"# SGLang {CHECKED}",
    ):
        assert said in body
    assert "99.00" not in body  # a row that failed has no figures


@pytest.mark.parametrize("layout", ["aerie", "speculators"])
def test_private(head: Path, tmp_path: Path, monkeypatch: Any, layout: str) -> None:
    """No conversation no local path and nobody's name leaves the machine."""
    run, target = head.parents[1], str(tmp_path / "home" / "alice" / "models" / "tiny-llama")
    monkeypatch.setenv("HOME", str(tmp_path / "home" / "alice"))
    place = head
    if layout != "aerie":
        place = tmp_path / "out"
        export(head, layout, place, replace(published.target_facts(), name=target))
    for name in (None, "someone/tiny-llama"):
        texts = packed(place, run=run, target_name=name)
        assert (
            set(texts.pop("names").split()) == {"model.safetensors", *texts} - {"notes"}
            and len(texts) == 7
        )
        assert ("conversations.jsonl stays here" in texts.pop("notes")) == (layout == "aerie")
        for file, text in texts.items():
            for private in (
                str(tmp_path),
                "alice",
                "secret-project",
                "/home",
                "~/",
                "private conversation",
                "hunter2",
            ):
                assert private not in text, (file, private)
        assert ("base_model: someone/tiny-llama" in texts["README.md"]) == (name is not None)
        assert json.loads(texts["config.json"])["aerie"]["target_path"] == (name or "tiny-llama")
        served = (
            "vllm serve me/head --dtype float32\n"
            if name
            else """vllm serve TARGET --speculative-config '{"model": "me/head","""
        )
        assert layout == "aerie" or served in texts["README.md"]
        assert (
            ("--target TARGET" in texts["README.md"])
            == ("Replace `TARGET`" in texts["README.md"])
            == (not name)
        )
        recipe = yaml.safe_load(texts["recipe.yaml"])
        assert recipe["run"] == "mine" and recipe["distill"]["server"] == {
            "urls": ["http://***@host:8000/v1?key=***"],
            "extra_body": {"pin": "***", "key": "***"},
        }
        assert recipe["data"]["conversations"] == [
            "HuggingFaceH4/ultrachat_200k",
            "train.jsonl",
            "more.jsonl",
        ]
    assert target in (place / "config.json").read_text()  # the local file keeps it


def test_public_paths() -> None:
    """A path of the machine gives way to its last part."""
    for text, shown in (
        ("/home/alice/my data/train.jsonl", "train.jsonl"),
        ("--run=/home/alice/my runs/x", "--run=x"),
        ("[/home/alice/a.jsonl,file:///srv/alice/b.jsonl]", "[a.jsonl,b.jsonl]"),
        ("read /home/alice/x.yaml and ~/y.yaml", "read x.yaml and y.yaml"),
        *((text, "home") for text in ("/Users/alice/", "~")),
        *((text, text) for text in ("https://huggingface.co/a/b", LLAMA, "4.2 tok/s", "configs/x")),
    ):
        assert public({text: [{"key": text}], 1: 2.5}, {}) == {shown: [{"key": shown}], 1: 2.5}
    assert public(["--target=models/tiny", "models/tiny2"], {"models/tiny": "x/y"}) == [
        "--target=x/y",
        "models/tiny2",
    ]


def test_calibrator(one: Path) -> None:
    """A calibrator of another head stays here."""
    made_for = Calibrator(1.5, (0.1, 0.9), (0.2, 0.8), head=digests(one))
    write_json(one / "calibrator.json", asdict(made_for))
    assert "calibrator.json" in packed(one, target_name="a/b", **UNMEASURED)["names"]
    save_head(tiny.head(tiny.vocab().embedding, seed=3), one)
    assert "calibrator.json" not in packed(one, target_name="a/b", **UNMEASURED)["names"]


def test_misleading(head: Path, tmp_path: Path, monkeypatch: Any) -> None:
    """What would mislead is refused."""
    numbered = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [3, 4, 6]}}
    write_json(
        head / "provenance.json",
        {**json.loads((head / "provenance.json").read_text()), "dirty": True},
    )
    assert (
        "Commit 0123456789ab, with uncommitted changes"
        in packed(head, allowed=["uncommitted"])["README.md"]
    )
    for place, message in (
        (published.specforge(tmp_path / "taps", numbered), "give it with --target"),
        (head, "the tree that trained it differs from the card's commit"),
    ):
        tiny.refused(message, packed, place, target_name="a/b", **UNMEASURED)
    monkeypatch.setattr("aerie.model.push.is_dirty", lambda: True)
    tiny.refused("this checkout differs from the card's commit", packed, head)


def test_pickled(hub: Hub, tmp_path: Path) -> None:
    """A pickled head is fetched where there is nothing better."""
    pickle, safe = (
        published.safeailab_eagle3(tmp_path / str(is_pickle), pickled=is_pickle)
        for is_pickle in (True, False)
    )
    upload("me/pickle", files_of(pickle))
    assert load_head("me/pickle", vocab=tiny.vocab(), after_blocks=published.TAPS).kind == "eagle3"
    upload("me/both", {**files_of(pickle), **files_of(safe)})
    assert not (head_directory("me/both") / "pytorch_model.bin").exists()
    tiny.refused(
        "me/both: exists and is public; make it private",
        upload,
        "me/both",
        files_of(safe),
        private=True,
    )


@pytest.mark.parametrize(
    ("kind", "changes", "layout", "command"),
    [
        ("eagle3", {}, "speculators", "vllm serve me/head --dtype float32\n"),
        (
            "medusa",
            {"noise": 0.2},
            "vllm",
            """'{"model": "me/head", "method": "medusa", "num_speculative_tokens": 4}' --dtype""",
        ),
        ("eagle1", {}, "safeailab", """'{"model": "me/head", "method": "eagle","""),
        ("block", {}, "speculators", "vllm serve me/head --dtype float32\n"),
        ("eagle1", {"bias": True}, "sglang", "--speculative-draft-model-path me/head "),
    ],
)
def test_repository(
    hub: Hub, tmp_path: Path, kind: str, changes: Any, layout: str, command: str
) -> None:
    """A pushed repository is a server's at its root and ours by its name."""
    head, place = published.made(kind, **changes), tmp_path / "head"
    save_head(head, place, target_path="someone/tiny")
    write_json(
        place / "calibrator.json",
        asdict(Calibrator(1.5, (0.1, 0.9), (0.2, 0.8), head=digests(place))),
    )
    (place / "recipe.yaml").write_text(
        "data: {conversations: ['a/chats:all:train', 'a/chats', 'no.jsonl']}\n"
    )
    server = (tmp_path / "server", published.target_facts())
    upload("me/head", pack(inspect_head(place), "me/head", server=server, **UNMEASURED)[0])
    assert (
        head_directory("me/head").name == "aerie"
        and load_calibrator(head_directory("me/head")).temperature == 1.5
    )
    published.same(load_head("me/head", vocab=tiny.vocab()), head)
    root = tmp_path / "root"
    (root / "aerie").mkdir(parents=True)
    for name, content in hub.repositories["me/head"]["main"].items():
        (root / name).write_bytes(content)
    assert load_calibrator(head_directory(root)).temperature == 1.5  # from the downloaded copy
    shutil.rmtree(root / "aerie")
    assert {path.name for path in root.iterdir()} == {
        "config.json",
        "model.safetensors",
        "README.md",
    }
    assert read_content(root)[0] == layout
    published.same(load_head(root), head)
    if layout == "speculators":
        values = json.loads((root / "config.json").read_text())
        assert values["speculators_config"]["verifier"]["name_or_path"] == "someone/tiny"
    card = huggingface_hub.ModelCard.load(root / "README.md")
    card.validate()
    assert command in card.text and "tiny --out draft\n" + command not in card.text
    assert ("# not possible: vLLM drops fc.bias in silence" in card.text) == (layout == "sglang")
    assert "No licence was given" in card.text and "Nothing was measured" in card.text
    assert card.data.base_model == "someone/tiny" and card.data.datasets == ["a/chats"]
    assert set(SERVERS[layout]) < set(card.data.tags)
    _, removed = upload(
        "me/head", files_of(place)
    )  # folders of an earlier push would be read first
    assert {"aerie/config.json", "aerie/model.safetensors", "aerie/recipe.yaml"} < set(removed)
    published.same(load_head("me/head", vocab=tiny.vocab()), head)


def test_unserved(tmp_path: Path) -> None:
    """A head that no server loads goes alone and each layout says why."""
    place, server = tmp_path / "head", (tmp_path / "server", None)
    save_head(
        tiny.multi_token_head("block", tiny.vocab(), in_block="causal"),
        place,
        target_path="someone/tiny",
    )
    shown = packed(place, server=server, **UNMEASURED)
    for said in (
        "--to speculators: cannot carry in_block causal; ",
        "--to sglang: cannot carry in_block causal, ",
    ):
        assert f"not shipped in a server's layout: {said}" in shown["notes"]
    assert (
        "# not possible: --to speculators: cannot carry" in shown["README.md"]
        and "aerie/" not in shown["names"]
    )


def test_second_push(hub: Hub, one: Path) -> None:
    """A second push removes what the first left and nothing of anybody else's."""
    head: Any = load_head(one)
    (one / "model.safetensors").unlink()
    shards = published.sharded(one, head.state_dict())
    sharded = pack(inspect_head(one), "me/head", target_name="a/b", **UNMEASURED)[0]
    hub.repositories["me/head"] = {
        "main": {".gitattributes": b"*.bin lfs", "README.md": b"", "figure.png": b"theirs"}
    }
    upload("me/head", {**sharded, "calibration.json": b"{}"})
    published.same(load_head("me/head"), head)  # both shards were fetched
    for left in one.glob("model*"):
        left.unlink()
    save_head(tiny.head(tiny.vocab().embedding, seed=9), one)
    _, removed = upload("me/head", files_of(one))
    assert len(removed) == 4 and {"calibration.json", shards.name} < set(removed)
    kept = {".gitattributes", "figure.png", "README.md", "config.json", "model.safetensors"}
    assert hub.repositories["me/head"]["main"].keys() == kept
    published.same(load_head("me/head"), load_head(one))


def test_strangers(hub: Hub, one: Path) -> None:
    """A stranger's weights are never written over."""
    for files in (
        {"README.md": CARD.replace(b"aerie", b"x") + b"words", "model.safetensors": b"1"},
        {"README.md": b"---\n: [\n---\n", "gguf/model-q4.gguf": b"1"},
        {"consolidated.safetensors": b"1", ".gitattributes": b""},
    ):
        hub.repositories["me/model"] = {"main": dict(files)}
        tiny.refused("me/model: is somebody else's: it holds ", upload, "me/model", files_of(one))
        assert hub.repositories["me/model"]["main"] == files and hub.count("POST") == 0


def test_hub_target(hub: Hub, monkeypatch: Any) -> None:
    """A target on the hub has a size and what keeps it away is one sentence."""
    index = json.dumps({"metadata": {"total_size": 16_400_000_000}}).encode()
    hub.repositories["me/two"] = {
        "main": {"model.safetensors.index.json": index, "adapter_config.json": b"{}"}
    }
    hub.repositories["me/one"] = {"main": {"model.safetensors": b"123456789"}}
    hub.gated.add("me/gated")
    assert [
        weights_size(TargetConfig(name)) for name in ("me/two", "me/one", "me/none", "me/gated")
    ] == [16_400_000_000, 9, 0, 0]
    for name, is_offline, message in (
        ("me/none", False, "no such local directory, and no such repository on the Hub"),
        ("me/gated", False, "gated on the Hub; ask for access on its page"),
        ("me/two", False, "cannot read the target's configuration: .*merge a LoRA adapter"),
        ("me/two", True, "not in the local cache, and HF_HUB_OFFLINE forbids to ask"),
    ):
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", is_offline)
        tiny.refused(f"^{name}: {message}", load_config, TargetConfig(name))


def test_nowhere(hub: Hub, one: Path, monkeypatch: Any) -> None:
    """Names that are nowhere are one sentence."""
    hub.repositories["me/words"] = {"main": {"README.md": b"words"}}
    for name, message in (
        ("me/words", "the repository has no config.json"),
        (
            "runs/x/heads/eagle1",
            r"holds no head \(no config.json\); train the head",
        ),  # too many parts for a repository
    ):
        tiny.refused(f"{name}: {message}", load_head, name)
    asked = len(hub.requests)
    monkeypatch.chdir(one.parents[1])
    assert (
        load_head("me/one").kind == "eagle1" and len(hub.requests) == asked
    )  # a local directory wins
    with (
        pytest.raises(UserError, match=r"me/head: .* bad credentials '\*\*\*'"),
        readable_errors("me/head"),
    ):
        raise RuntimeError(f"bad credentials '{TOKEN}'\nand more")


@pytest.fixture(scope="module")
def target(tmp_path_factory: Any) -> Path:
    return tiny.target(tmp_path_factory.mktemp("target"), num_blocks=8)


def test_inspect_and_convert(tmp_path: Path, target: Path, capsys: Any) -> None:
    """A published head is inspected and converted to every layout."""
    head = published.safeailab_eagle3(tmp_path / "head")
    shown = json.loads(tiny.session(f"aerie inspect {head} --json", capsys))
    assert (shown["layout"], shown["taps"], shown["problems"]) == ("safeailab", None, [])
    assert shown["left_out"] == ["embed_tokens.weight"]
    assert shown["vocabulary"] == {"draft": 107, "target": 320, "coverage": None}
    assert [server["as_it_is"] for server in shown["servers"].values()] == [True, False]
    for to in ("safeailab", "sglang", "speculators"):
        text = """
        aerie convert {head} --to {to} --target {target} --out {tmp}/{to}
            note: names no taps; [2, 4, 5] are taken
            equal bit for bit
        """
        tiny.session(text, capsys, head=head, to=to, target=target, tmp=tmp_path)
    save_head(tiny.head(tiny.vocab(vocab_size=400).embedding), tmp_path / "other")
    tiny.session(f"aerie inspect {tmp_path}/other --target {target}\n exit 1", capsys)


def test_convert_overwrites(tmp_path: Path, target: Path, capsys: Any) -> None:
    """An export replaces an earlier one alone and only where that is asked."""
    head = published.safeailab_eagle3(tmp_path / "head")
    text = """
    mkdir {tmp}/out
    echo precious > {tmp}/out/precious
    {convert} {tmp}/out --overwrite
        exit 2
        it is no earlier export; name a new directory
    grep precious {tmp}/out/precious
    {convert} {tmp}/new
    {convert} {tmp}/new
        exit 2
    {convert} {tmp}/new --overwrite
    ls {tmp}/new/config.json
    """
    convert = f"aerie convert {head} --to sglang --target {target} --out"
    tiny.session(text, capsys, tmp=tmp_path, convert=convert)


def test_push(hub: Hub, tmp_path: Path, target: Path, capfd: Any) -> None:
    """A push is shown broken off repeated and fetched and the token is nowhere."""
    head, options = tmp_path / "head", "--without-results --uncommitted --private --revision v2"
    save_head(published.eagle3(), head, target_path=str(target))
    (head / "conversations.jsonl").write_text("private\n")
    names: dict[str, Any] = {"target": target, "out": tmp_path / "out", "never": TOKEN}
    names["push"] = f"aerie push {head} --repo me/head {options}"
    shown = """
    {push} --dry-run
        push: would remove nothing, and ship to me/head@v2:
        conversations.jsonl stays here
    """
    tiny.session(shown, capfd, **names)
    assert hub.count("POST") == 0
    hub.failures |= {
        ("POST", "/repos/create"): [401],
        ("POST", "/preupload/"): [403],
        ("POST", "/commit/"): [500],
    }
    for said in (
        "the Hub does not accept this login; run: hf auth login",
        "this login may not do that; use a token that may",
        "the Hub is out of reach, refused or broke off",
    ):
        tiny.session(f"{{push}}\n exit 2\n error: me/head: {said}", capfd, **names)
        assert not any(hub.repositories.get("me/head", {}).values())  # nothing half uploaded
    fetched = """
    {push}
        5 files to me/head@v2
        conversations.jsonl stays here
    aerie inspect me/head@v2 --target {target}
        taps hidden_states [2, 4, 5]
    aerie convert me/head@v2 --to speculators --target {target} --out {out}
        bit for bit
    aerie generate --target {target} --head me/head@v2 --prompt Hi --max-new-tokens 4
    """
    tiny.session(fetched, capfd, **names)
    files = hub.repositories["me/head"]["v2"]
    own = {"aerie/config.json", "aerie/model.safetensors"}
    assert files.keys() == {"README.md", "config.json", "model.safetensors", *own}
    assert hub.private == {"me/head"} and hub.tokens == {f"Bearer {TOKEN}"}
    contents = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert not any(TOKEN.encode() in content for content in [*contents, *files.values()])
