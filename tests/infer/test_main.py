"""The commands on a tiny run: bench, calibrate, report, compare, generate, errors, and a kill."""

import io
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from tokenizers.processors import TemplateProcessing

from aerie.infer.decode.engine import SpeculativeDecoder
from aerie.infer.measure.generate import ColouredStreamer, typed_lines
from aerie.model.checkpoint import save_head
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
Typing = Callable[..., str]


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
def typing(shared: Path, capsys: pytest.CaptureFixture[str]) -> Typing:
    """`tiny.session` with names for the shared run and for a question on its recipe."""
    config = f"--config {shared}/recipe.yaml"
    ask = f"aerie generate {config} --prompt '{BOATS}'"
    return partial(tiny.session, capsys=capsys, root=shared, config=config, ask=ask)


@pytest.fixture
def no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test fails if a model is loaded."""
    forbidden = Mock(side_effect=AssertionError("a plan loads no model"))
    monkeypatch.setattr("aerie.model.target.Target.load", forbidden)
    monkeypatch.setattr("aerie.model.checkpoint.load_head", forbidden)


MISTAKES = """
{ask} --plan --method medusa --tree.shape dynamic
    exit 2
    drafts at most 2; set tree.levels to 2
{ask} --plan --top-k 5
    exit 2
    --top-k and --top-p have no effect
{ask} --plan --head {root}/run
    exit 2
    run: a run and no head; name {root}/run/heads/draft_lm or {root}/run/heads/eagle1
{ask} --plan --prompts {root}/rows.jsonl
    exit 2
    needs either --prompt TEXT
aerie generate {config} --plan --prompts {root}/rows.jsonl --raw
    exit 2
    a system turn, tools or several turns need the chat template; leave out --raw
aerie generate {config} --plan --prompts {root}/q.txt
    exit 2
    q.txt: holds no rows; expected .json
{ask} --plan --method svip --head {root}/run/heads/medusa
    exit 2
    with a head of kind eagle1 or eagle3
{ask} --plan --head {root}/run/heads/eagel1
    exit 2
    did you mean {root}/run/heads/eagle1?
aerie bench {config} --plan --bench.rows '[{{method: vanilla}}, {{method: medusa, tree: {{choices: {root}/deep.yaml}}}}]'
    exit 2
    bench.rows.1: tree: is 3
aerie bench {config} --plan --bench.rows '[{{method: vanilla}}, {{method: eagle2, head: {root}/run/heads/eagle3}}]'
    exit 2
    of kind eagle1, not eagle3
aerie verify {config} --plan --methods eagle4
    exit 2
    --methods: method: unknown 'eagle4'; did you mean
aerie generate --plan --prompt x
    exit 2
    needs --config
"""  # noqa: E501
PLANS = """
{ask} --plan --method medusa --tree.shape dynamic --tree.levels 2
{ask} --plan --top-k 5 --temperature 1
{ask} --plan --head {root}/run/heads/eagle1
{ask} --plan --method svip --head {root}/run/heads/eagle3
aerie bench {config} --plan --bench.rows '[{{method: vanilla}}, {{method: medusa, tree: {{choices: {root}/shallow.yaml}}}}]'
aerie bench {config} --plan --bench.rows '[{{method: vanilla}}, {{method: eagle3, head: {root}/run/heads/eagle3}}]'
aerie verify {config} --plan --methods eagle2
{ask} --plan
    'levels': 3, 'k': 3, 'nodes': 8
{ask} --plan --method pld --lookup.length 4
    pld with no head, no tree
{ask} --plan --method deagle --tree.levels 4
    'levels': 4, 'k': 10, 'nodes': 60
{ask} --plan --head.kind eagle3
    eagle3 with {root}/run/heads/eagle3
{ask} --plan --row {root}/row.yaml
    deagle with {root}/run/heads/eagle3,
{ask} --plan --row {root}/row.yaml --head {root}/run/heads/eagle1
    deagle with {root}/run/heads/eagle1,
aerie generate --plan --prompt x --target {root}/target --head {root}/run/heads/eagle3
    eagle3 with
aerie calibrate {config} --plan
    , {root}/run/heads/eagle1 ->
ls -A {root}/run | xargs test heads =
"""  # noqa: E501


@pytest.mark.usefixtures("no_model")
def test_plan(typing: Typing, shared: Path) -> None:
    """A plan refuses what cannot work, its remedy works; it tells tree and head, writes nothing."""
    (shared / "row.yaml").write_text(f"method: deagle\nhead: {shared}/run/heads/eagle3\n")
    typing(MISTAKES)
    typing(PLANS)


def test_generate(typing: Typing, tmp_path: Path) -> None:
    """It streams the same text with every method; a head of another target is refused."""
    shown = typing("{ask} --max-new-tokens 12 --show-tree --profile\n tau\n survival\n a cycle:")
    for method in ("vanilla", "eagle2", "eagle3", "eagle-chain", "pld"):
        assert typing(f"{{ask}} --max-new-tokens 12 --method {method}\n tau") == shown
    other = tiny.target(tmp_path / "other", hidden_size=64)
    typing("{ask} --target {other}\n exit 2\n belongs to another target", other=other)


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


def test_generate_json(typing: Typing, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of every shape are answered as lines of JSON."""
    words = "--json --max-new-tokens 12\n tau"
    out = typing("aerie generate {config} --prompts {root}/rows.jsonl " + words)
    rows = [json.loads(line) for line in out.splitlines()]
    assert [row["prompt"] for row in rows] == [BOATS, OWLS, BOATS, OWLS, OWLS]
    assert [row["text"].rstrip("\ufffd") for row in rows[2:4]] == written(BOATS, OWLS)
    assert rows[0]["new_ids"] == rows[2]["new_ids"] and rows[3]["new_ids"] != rows[4]["new_ids"]
    assert rows[0]["statistics"]["decoding"]["eos_token_ids"] == [3]
    monkeypatch.setattr("sys.stdin", io.StringIO(BOATS + "\n"))
    typed = json.loads(typing("aerie generate {config} --prompt - " + words))
    assert typed["new_ids"] == rows[0]["new_ids"]


def test_chat(typing: Typing, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chat answers as transformers does on the whole conversation."""
    lines = [BOATS, OWLS, "", "/reset", "boats " * 300, OWLS, "/exit", BOATS]
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(lines)))
    full = "\n context of 256 tokens is full; /reset"
    out = typing("aerie chat {config} --max-new-tokens 12" + full)
    assert out.splitlines() == "\n".join([*written(BOATS, OWLS), *written(OWLS)]).splitlines()


def test_ctrl_c(typing: Typing, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C stops an answer, and the chat goes on."""
    put = ColouredStreamer.put

    def interrupted(streamer: ColouredStreamer, value: torch.Tensor) -> None:
        monkeypatch.setattr(ColouredStreamer, "put", put)
        raise KeyboardInterrupt

    monkeypatch.setattr(ColouredStreamer, "put", interrupted)
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{BOATS}\n{OWLS}\n"))
    typing("aerie chat {config} --max-new-tokens 4\n stopped\n tau")


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


def test_no_template(typing: Typing, tmp_path: Path) -> None:
    """A target without a chat template is refused with what to give."""
    plain = f"--target {tiny.target(tmp_path / 'plain', chat_template=None)} --max-new-tokens 2"
    (tmp_path / "own.jinja").write_text(tiny.TEMPLATE)
    text = """
    aerie generate --prompt x {plain}
        exit 2
        give --target.chat_template FILE.jinja, or use generate --raw
    aerie chat {plain}
        exit 2
        give --target.chat_template FILE.jinja, or use generate --raw
    aerie generate --prompt x {plain} --raw
    aerie generate --prompt x {plain} --target.chat_template {tmp}/own.jinja
    """
    typing(text, plain=plain, tmp=tmp_path)


def test_a_doubled_beginning_of_text_is_said(typing: Typing, tmp_path: Path) -> None:
    """A raw prompt that spells what the tokenizer adds is read as it is, with a warning."""
    target = tiny.target(tmp_path / "target")
    tokenizer = tiny.tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|system|> $A", special_tokens=[("<|system|>", tiny.SPECIAL.index("<|system|>"))]
    )
    tokenizer.save_pretrained(target)
    raw = f"aerie generate --target {target} --raw --max-new-tokens 2 --json --prompt"
    twice = "begins with <|system|> twice"
    typing(f"{raw} '<|system|>count'\n {twice}")
    sampled = f'{raw} count --temperature 0.6\n at T 0.6, of all tokens\n "top_k": 0'
    typing(sampled, never=twice)


def test_stages(typing: Typing, shared: Path) -> None:
    """bench, calibrate, compare, report and push follow each other."""
    head, records = shared / "run/heads/eagle1", shared / "run/bench/records.jsonl"
    to_push = "--repo me/head --uncommitted --dry-run --target-name someone/tiny"
    measured = """
    aerie report {config}
        exit 2
        the stage is not finished
    aerie bench {config}
        bench: 12 answers
        ms per token
    grep max_context {root}/run/bench/suite.json
    cp {records} {root}/kept
    rm {root}/run/bench/provenance.json
    aerie report {config}
        exit 2
        the stage is not finished
    aerie bench {config}
    aerie bench {config}
        whole, reused
    aerie bench {config} --bench.prompts.max_new_tokens 6
        exit 2
        --overwrite
    cmp {records} {root}/kept
    aerie compare {config} --of 1 --against 0 --temperature 0
        row 1 (eagle2, 3 levels, k 3, 8 nodes) against row 0 (vanilla):
    aerie calibrate {config}
    aerie report {config}
        eagle2
        index.html
    aerie results {page}
    sed -i 's/tau at T 1/tau at T 7/' {page}
    aerie results {page}
        exit 2
        has no column 'tau at T 7', but method, tree
    sed -i 's/tau at T 7/tau at T 1/' {page}
    aerie bench {config} --run {root}/drawn --head {head} --bench.sampling "[{{temperature: 1.0}}]"
    aerie report {config} --run {root}/drawn --head {head}
        index.html
    aerie convert {head} --to safeailab --target {root}/target --out {root}/exported
    """
    page = shared / "results.md"
    mark = f"<!-- results {shared}/run: method, T, tau, tau at T 1 -->\n"
    away = "<!-- results runs/away: method -->\nkept\n<!-- /results -->\n"
    page.write_text(f"# Results\n\n{mark}before<!-- /results -->\n{away}")
    typing(measured, records=records, head=head, page=page)
    results = page.read_text()
    assert mark in results and "commit" in results
    assert away in results and "before" not in results
    summary = json.loads((shared / "run" / "report" / "summary.json").read_text())
    taus = [f"{row['tau']:.2f}" for row in summary["rows"] if row["method"] == "eagle2"]
    assert f"\n| eagle2 | 0 | {' | '.join(taus)} |\n" in results
    assert summary["schema"] == 1 and len(summary["rows"]) == 6 and summary["rows"][0]["tau"] == 1.0
    greedy = [row for row in tiny.read_rows(records) if row["temperature"] == 0]
    assert all(row["identical"] and row["identical_to_generate"] for row in greedy)
    row = summary["rows"][1]
    pushed = """
    aerie push {head} {to_push}
        | {row[task]} | 0 | {row[prompts]} | {row[tau]:.2f} |
        {row[identical]}/{row[prompts]}
        ECE
        calibration.json
        summary.json
    aerie push {root}/exported --run {root}/run {to_push}
        | {row[task]} | 0 | {row[prompts]} | {row[tau]:.2f} |
        ECE
        summary.json
    sed -i '0,/7/s//8/' {records}
    aerie report {config}
        exit 2
        is damaged
    aerie compare {config} --of 1 --against 0
        exit 2
        is damaged
        run: aerie bench --config
    aerie bench {config}
        exit 2
        is damaged
    """
    typing(pushed, records=records, head=head, to_push=to_push, row=row)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SpeculativeDecoder, "generate", Mock(side_effect=RuntimeError("no memory")))
        typing("aerie bench {config} --overwrite\n exit 2\n answers failed; the first: no memory")
    trained_anew = """
    aerie bench {config}
    cp {head}/model.safetensors {root}/kept
    echo more >> {head}/model.safetensors
    aerie report {config}
        exit 2
        calibration: measured other weights of {head}; run: aerie calibrate --config
    rm -r {root}/run/calibration
    aerie report {config}
        exit 2
        bench: measured other weights of {head}; run: aerie bench --config
    rm -r {root}/run/bench
    mv {root}/kept {head}/model.safetensors
    """
    typing(trained_anew, head=head)


def test_short_recipe(typing: Typing, shared: Path, tmp_path: Path) -> None:
    """A run, a target, data and a head are enough: held-out questions are measured."""
    rows = str(tiny.write_conversations(tmp_path / "rows.jsonl", 24))
    values = {
        "run": str(tmp_path),
        "target": {"path": str(shared / "target")},
        "data": {"conversations": rows, "held_out": 0.4},
        "threads": 1,
        "head": {"kind": "eagle1"},
    }
    tiny.recipe(tmp_path / "recipe.yaml", values)
    tiny.target(tmp_path / "other", seed=5)
    text = """
    cp -r {root}/run/heads {tmp}/others
    aerie bench {short} --bench.prompts.num_prompts=2 --bench.prompts.max_new_tokens=6 --head {head}
    aerie report {short}
    aerie report {short} --target {tmp}/other
        exit 2
        measured another target (target.path:
    """
    head = tmp_path / "others/eagle1"  # the report is on the head that was measured
    typing(text, tmp=tmp_path, short=f"--config {tmp_path}/recipe.yaml", head=head)
    summary = json.loads((tmp_path / "report" / "summary.json").read_text())
    measured = [(row["method"], row["task"]) for row in summary["rows"]]
    assert measured == [("vanilla", "held_out"), ("eagle2", "held_out")]
    assert summary["head"]["name"] == str(head)
