"""The commands on a tiny run: bench, calibrate, report, compare, generate, errors, and a kill."""

import io
import json
import shlex
import shutil
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from tokenizers.processors import TemplateProcessing

from aerie.infer import main as infer_main
from aerie.infer.decode.engine import SpeculativeDecoder
from aerie.infer.measure.generate import ColouredStreamer, typed_lines
from aerie.model import main as model_main
from aerie.model.checkpoint import save_head
from aerie.model.storage import WEIGHTS
from tests import tiny

TREE = {"levels": 3, "k": 3, "nodes": 8}
BOATS, OWLS = "Please count 4 boats.", "Please sort 9 owls."
CONVERSATION = [
    ("user", BOATS),
    ("assistant", "Four."),
    ("user", OWLS),
    ("assistant", "to be written anew"),
]
ROWS_OF_PROMPTS: list[Any] = [{"question": BOATS}, {"prompt": OWLS}, {"turns": [BOATS, OWLS]}]
ROWS_OF_PROMPTS.append(
    {"messages": [{"role": role, "content": text} for role, text in CONVERSATION]}
)
Command = Callable[..., tuple[int, str, str]]


def write_recipe(root: Path) -> None:
    """Writes a target, heads of every kind (Medusa with two), files of trees, and a recipe."""
    torch.manual_seed(0)
    target, heads = tiny.target(root / "target"), root / "run" / "heads"
    embedding = tiny.llama().get_input_embeddings().weight.detach()
    save_head(tiny.head(embedding, scale=8.0), heads / "eagle1")
    save_head(tiny.eagle3_head(embedding, ids=torch.arange(200), scale=8.0), heads / "eagle3")
    save_head(tiny.multi_token_head("medusa", tiny.vocab(), num_heads=2), heads / "medusa")
    tiny.target(heads / "draft_lm")
    for name, paths in {"deep": "[0], [0, 0], [0, 0, 0]", "shallow": "[0], [1], [0, 0]"}.items():
        (root / f"{name}.yaml").write_text(f"choices: [{paths}]\n")
    (root / "q.txt").write_text("Please count 2 boats.\nPlease count 3 boats.\n")
    tiny.write_rows(root / "rows.jsonl", ROWS_OF_PROMPTS)
    prompts = {"path": str(root / "q.txt"), "num_prompts": 2, "max_new_tokens": 8}
    measured = {
        "warmup_prompts": 1,
        "sampling": [{"temperature": 0.0}, {"temperature": 1.0}],
        "rows": [
            {"method": "vanilla"},
            {"method": "eagle2", "tree": TREE},
            {"method": "eagle-chain", "tree": {"levels": 3}},
        ],
    }
    values: dict[str, Any] = {
        "run": str(root / "run"),
        "threads": 1,
        "target": {"path": str(target)},
        "data": {"conversations": ["none.jsonl"]},
        "head": {"kind": "eagle1"},
        "tree": TREE,
        "calibrate": {"prompts": prompts, "tree": TREE},
        "bench": {"prompts": prompts, **measured},
    }
    tiny.recipe(root / "recipe.yaml", values)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run directory that tests only read, or write in order."""
    root = tmp_path_factory.mktemp("run")
    write_recipe(root)
    return root


@pytest.fixture
def command(shared: Path) -> Command:
    """One command line on the shared recipe, in this process: exit code, stdout and stderr."""

    def on_shared(name: str, *words: str, config: bool = True) -> tuple[int, str, str]:
        is_asked = name != "generate" or {"--prompt", "--prompts"} & {*words}
        prompt = [] if is_asked else ["--prompt", "Please count 4 boats."]
        given = ["--config", str(shared / "recipe.yaml")] if config else []
        line = [*given, *prompt, *(word.replace("{root}", str(shared)) for word in words)]
        out, err = io.StringIO(), io.StringIO()
        with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
            patch.setattr("aerie.infer.main.stop_on_signals", lambda: None)
            code = tiny.call(infer_main, name, *line)
        return code, out.getvalue(), err.getvalue()

    return on_shared


@pytest.fixture
def plan(command: Command, monkeypatch: pytest.MonkeyPatch) -> Command:
    """The same with --plan; the test fails if a model is loaded."""
    forbidden = Mock(side_effect=AssertionError("a plan loads no model"))
    monkeypatch.setattr("aerie.model.target.Target.load", forbidden)
    monkeypatch.setattr("aerie.model.checkpoint.load_head", forbidden)
    return lambda name, *words, **changes: command(name, "--plan", *words, **changes)


ROWS = "--bench.rows '[{{method: vanilla}}, {{{}}}]'"


@pytest.mark.parametrize(
    ("line", "message", "remedy"),
    [  # command line, message, options that work
        (
            "generate --method medusa --tree.shape dynamic",
            "drafts at most 2; set tree.levels to 2",
            "--method medusa --tree.shape dynamic --tree.levels 2",
        ),
        ("generate --top-k 5", "--top-k and --top-p: greedy decoding", "--top-k 5 --temperature 1"),
        (
            "generate --head {root}/run",
            "run: a run and no head; name {root}/run/heads/draft_lm or {root}/run/heads/eagle1",
            "--head {root}/run/heads/eagle1",
        ),
        ("generate --prompts {root}/rows.jsonl --prompt x", "needs either --prompt TEXT", None),
        (
            "generate --prompts {root}/rows.jsonl --raw",
            "several turns need the chat template; leave --raw out",
            None,
        ),
        ("generate --prompts {root}/q.txt", "q.txt: cannot be read; expected .json", None),
        (
            "generate --method svip --head {root}/run/heads/medusa",
            "with a head of kind eagle1 or eagle3",
            "--method svip --head {root}/run/heads/eagle3",
        ),
        (
            f"bench {ROWS.format('method: medusa, tree: {choices: {root}/deep.yaml}')}",
            "bench.rows.1: tree: is 3",
            ROWS.format("method: medusa, tree: {choices: {root}/shallow.yaml}"),
        ),
        (
            f"bench {ROWS.format('method: eagle2, head: {root}/run/heads/eagle3')}",
            "of kind eagle1, not eagle3",
            ROWS.format("method: eagle3, head: {root}/run/heads/eagle3"),
        ),
        ("generate --head {root}/run/heads/eagel1", "did you mean {root}/run/heads/eagle1?", None),
        (
            "verify --methods eagle4",
            "--methods: method: unknown 'eagle4'; did you mean",
            "--methods eagle2",
        ),
    ],
)
def test_plan_refuses(
    line: str, message: str, remedy: str | None, plan: Command, shared: Path
) -> None:
    """A plan refuses in one line what cannot work, and its remedy works."""
    name, *words = shlex.split(line)
    code, _, err = plan(name, *words)
    assert code == 2 and err.count("\n") == 1 and message.replace("{root}", str(shared)) in err, err
    if remedy is not None:
        code, _, err = plan(name, *shlex.split(remedy))
        assert (code, err) == (0, "")


def test_plan_of_row(plan: Command, shared: Path, tmp_path: Path) -> None:
    """A plan says which tree and head a method has, and writes nothing."""
    heads, row = shared / "run" / "heads", tmp_path / "row.yaml"
    row.write_text(f"method: deagle\nhead: {heads / 'eagle3'}\n")
    alone = ("--target", "{root}/target", "--head", "{root}/run/heads/eagle3")
    for words, told in {
        (): "'levels': 3, 'k': 3, 'nodes': 8",
        ("--method", "pld", "--lookup.length", "4"): "pld with no head, no tree",
        ("--method", "deagle", "--tree.levels", "4"): "'levels': 4, 'k': 10, 'nodes': 60",
        ("--head.kind", "eagle3"): f"eagle3 with {heads / 'eagle3'}",
        ("--row", str(row)): f"deagle with {heads / 'eagle3'},",
        (
            "--row",
            str(row),
            "--head",
            "{root}/run/heads/eagle1",
        ): f"deagle with {heads / 'eagle1'},",
        alone: "eagle3 with",  # the head's directory names the method
    }.items():
        assert told in plan("generate", *words, config="--target" not in words)[1], words
    assert f", {heads / 'eagle1'} -> " in plan("calibrate")[1]
    assert "needs --config" in plan("generate", config=False)[2]
    assert sorted(path.name for path in (shared / "run").iterdir()) == [
        "heads"
    ]  # a plan writes nothing


def test_foreign_head(command: Command, tmp_path: Path) -> None:
    """A head of another target is refused."""
    other = tiny.target(tmp_path / "other", hidden_size=64)
    assert "belongs to another target" in command("generate", "--target", str(other))[2]


def test_generate(command: Command) -> None:
    """It streams the same text with every method."""
    texts = set()
    for method in ("vanilla", "eagle2", "eagle3", "eagle-chain", "pld"):
        words = ("--show-tree", "--profile") if method == "eagle2" else ()
        code, out, err = command("generate", "--max-new-tokens", "12", "--method", method, *words)
        assert (
            code == 0
            and "tau" in err
            and (method != "eagle2" or ("  survival " in err and "a cycle:" in err))
        )
        texts.add(out)
    assert len(texts) == 1


def written(*turns: str) -> list[str]:
    """The greedy answers of transformers' generate to each turn, at most 12 tokens each."""
    model, tokenizer = tiny.llama(), tiny.tokenizer()
    history: list[dict[str, str]] = []
    for turn in turns:
        history.append({"role": "user", "content": turn})
        ids = tokenizer.apply_chat_template(
            history, add_generation_prompt=True, return_tensors="pt"
        )["input_ids"]
        out = model.generate(ids, do_sample=False, max_new_tokens=12)[0, ids.shape[1] :]
        text = tokenizer.decode(out, skip_special_tokens=True).rstrip("\ufffd")
        history.append({"role": "assistant", "content": text})
    return [message["content"] for message in history[1::2]]


def test_generate_json(command: Command, shared: Path) -> None:
    """Rows of every shape are answered as lines of JSON."""
    words = ("--prompts", "{root}/rows.jsonl", "--json", "--max-new-tokens", "12")
    code, out, err = command("generate", *words)
    rows = [json.loads(line) for line in out.splitlines()]
    assert (
        code == 0
        and err.count("tau") == 5
        and [row["prompt"] for row in rows] == [BOATS, OWLS, BOATS, OWLS, OWLS]
    )
    assert [row["text"].rstrip("\ufffd") for row in rows[2:4]] == written(BOATS, OWLS)
    assert rows[0]["new_ids"] == rows[2]["new_ids"] and rows[3]["new_ids"] != rows[4]["new_ids"]
    assert rows[0]["statistics"]["decoding"]["eos_token_ids"] == [3]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.stdin", io.StringIO(BOATS + "\n"))
        assert (
            json.loads(command("generate", "--prompt", "-", *words[2:])[1])["new_ids"]
            == rows[0]["new_ids"]
        )


def test_chat(command: Command, shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chat answers as transformers does on the whole conversation."""
    lines = [BOATS, OWLS, "", "/reset", "boats " * 300, OWLS, "/exit", BOATS]
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(lines)))
    code, out, err = command("chat", "--max-new-tokens", "12")
    assert (
        code == 0
        and out.splitlines() == "\n".join([*written(BOATS, OWLS), *written(OWLS)]).splitlines()
    )
    assert err.count("tau") == 3 and err.count("context of 256 tokens is full; /reset") == 1


def test_ctrl_c(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C stops an answer, and the chat goes on."""
    put = ColouredStreamer.put

    def interrupted(streamer: ColouredStreamer, value: torch.Tensor) -> None:
        monkeypatch.setattr(ColouredStreamer, "put", put)
        raise KeyboardInterrupt

    monkeypatch.setattr(ColouredStreamer, "put", interrupted)
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{BOATS}\n{OWLS}\n"))
    code, _, err = command("chat", "--max-new-tokens", "4")
    assert code == 0 and "stopped" in err and err.count("tau") == 1


def test_ctrl_c_at_the_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C drops a line that is being typed; on an empty line it leaves."""
    events = iter([KeyboardInterrupt, " owls", KeyboardInterrupt, "never"])
    typed = iter(["half a line", ""])

    def typing(_: str) -> str:
        event = next(events)
        if isinstance(event, str):
            return event
        raise event

    monkeypatch.setattr("builtins.input", typing)
    monkeypatch.setattr("readline.get_line_buffer", lambda: next(typed))
    assert list(typed_lines()) == ["owls"]


def test_no_template(command: Command, tmp_path: Path) -> None:
    """A target without a chat template is refused with what to give."""
    target = str(tiny.target(tmp_path / "plain", chat_template=None))
    plain = ("--target", target, "--max-new-tokens", "2")
    for name in ("generate", "chat"):
        code, _, err = command(name, *plain, config=False)
        assert (
            code == 2
            and err.count("\n") == 1
            and "give --target.chat_template FILE.jinja, or generate --raw" in err
        )
    (tmp_path / "own.jinja").write_text(tiny.TEMPLATE)
    for fix in (("--raw",), ("--target.chat_template", str(tmp_path / "own.jinja"))):
        assert command("generate", *plain, *fix, config=False)[0] == 0


def test_a_doubled_beginning_of_text_is_said(command: Command, tmp_path: Path) -> None:
    """A raw prompt that spells what the tokenizer adds is read as it is, with a warning."""
    target = tiny.target(tmp_path / "target")
    tokenizer = tiny.tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|system|> $A", special_tokens=[("<|system|>", tiny.SPECIAL.index("<|system|>"))]
    )
    tokenizer.save_pretrained(target)
    words = ("generate", "--target", str(target), "--raw", "--max-new-tokens", "2", "--json")
    for prompt, times in (("count", 0), ("<|system|>count", 1)):
        code, _, err = command(*words, "--prompt", prompt, config=False)
        assert code == 0 and err.count("begins with <|system|> twice") == times
    sampled = command(*words, "--prompt", "count", "--temperature", "0.6", config=False)
    assert "at T 0.6, of all tokens" in sampled[2]
    assert json.loads(sampled[1])["statistics"]["decoding"]["top_k"] == 0


def test_stages(command: Command, shared: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """bench, calibrate, compare, report and push follow each other."""
    head, exported = shared / "run" / "heads" / "eagle1", shared / "exported"
    push = ("--repo", "me/head", "--uncommitted", "--dry-run", "--target-name", "someone/tiny")
    records = shared / "run" / "bench" / "records.jsonl"
    assert "no bench, or one that was stopped" in command("report")[2]
    code, out, err = command("bench")
    assert code == 0 and "bench: 12 answers" in out and "ms per token" in out, err
    first = tiny.read_rows(records)
    assert json.loads((records.parent / "suite.json").read_text())["max_context"] > 0
    assert all(
        row["identical"] and row["identical_to_generate"]
        for row in first
        if row["temperature"] == 0
    )
    (records.parent / "provenance.json").unlink()  # as a kill leaves it
    assert "no bench, or one that was stopped" in command("report")[2]
    assert command("bench")[0] == 0 and "whole, reused" in command("bench")[1]
    assert "--overwrite" in command("bench", "--bench.prompts.max_new_tokens", "6")[2]
    assert tiny.read_rows(records) == first
    code, out, _ = command("compare", "--of", "1", "--against", "0", "--temperature", "0")
    assert code == 0 and out.startswith(
        "row 1 (eagle2, 3 levels, k 3, 8 nodes) against row 0 (vanilla):\ntau "
    )
    assert command("calibrate")[0] == 0
    code, out, _ = command("report")
    assert code == 0 and "eagle2" in out and "index.html" in out
    summary = json.loads((shared / "run" / "report" / "summary.json").read_text())
    assert summary["schema"] == 1 and len(summary["rows"]) == 6 and summary["rows"][0]["tau"] == 1.0
    code, out, _ = command("results", str(shared / "run"), config=False)
    assert code == 0 and "commit" in out and out.count("| eagle2 |") == 2
    row = next(
        row for row in summary["rows"] if row["method"] == "eagle2" and row["temperature"] == 0
    )
    figures = f"| {row['task']} | 0 | {row['prompts']} | {row['tau']:.2f} |"
    convert = ("--to", "safeailab", "--target", shared / "target", "--out", exported)
    assert tiny.call(model_main, "convert", head, *convert) == 0
    for pushed in ((head,), (exported, "--run", shared / "run")):
        capsys.readouterr()
        assert tiny.call(model_main, "push", *pushed, *push) == 0
        said = capsys.readouterr().out
        assert figures in said and f"{row['identical']}/{row['prompts']}" in said and "ECE" in said
        assert {"calibration.json", "summary.json"} <= set(said.split())
    records.write_text(records.read_text().replace("7", "8", 1))
    for line in (["bench"], ["report"], ["compare", "--of", "1", "--against", "0"]):
        code, _, err = command(*line)
        assert code == 2 and "is damaged" in err and err.count("\n") == 1
    assert "run: aerie bench --config" in err
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SpeculativeDecoder, "generate", Mock(side_effect=RuntimeError("no memory")))
        code, _, err = command("bench", "--overwrite")
        assert code == 2 and "bench: all 12 answers failed: no memory\n" in err
    assert command("bench")[0] == 0  # what failed is measured again
    weights = (head / WEIGHTS).read_bytes()
    (head / WEIGHTS).write_bytes(weights[:-1] + b"!")
    for name, stage in {"calibrate": "calibration", "bench": "bench"}.items():
        fault = f"{stage}: measured {head} before it was trained anew; run: aerie {name} --config"
        assert fault in command("report")[2]
        shutil.rmtree(shared / "run" / stage)
    (head / WEIGHTS).write_bytes(weights)


def test_short_recipe(shared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run, a target, data and a head are enough: held-out questions are measured."""
    data = {
        "conversations": str(tiny.write_conversations(tmp_path / "rows.jsonl", 24)),
        "held_out": 0.4,
    }
    values = {
        "run": str(tmp_path),
        "target": {"path": str(shared / "target")},
        "data": data,
        "threads": 1,
    }
    config = tiny.recipe(tmp_path / "recipe.yaml", {**values, "head": {"kind": "eagle1"}})
    shutil.copytree(shared / "run" / "heads", tmp_path / "heads")
    (tmp_path / "heads").rename(tmp_path / "others")
    head = tmp_path / "others" / "eagle1"
    few = ["--bench.prompts.num_prompts=2", "--bench.prompts.max_new_tokens=6"]
    assert tiny.call(infer_main, "bench", "--config", config, *few, "--head", head) == 0
    assert tiny.call(infer_main, "report", "--config", config) == 0  # on the head that was measured
    summary = json.loads((tmp_path / "report" / "summary.json").read_text())
    assert [(row["method"], row["task"]) for row in summary["rows"]] == [
        ("vanilla", "held_out"),
        ("eagle2", "held_out"),
    ] and summary["head"]["name"] == str(head)
    other = tiny.target(tmp_path / "other", seed=5)
    assert tiny.call(infer_main, "report", "--config", config, "--target", other) == 2
    assert "measured another target (target.path:" in capsys.readouterr().err
