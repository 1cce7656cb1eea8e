"""--plan refuses, before any model is loaded, everything that can be told from files, and names a remedy that works."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from aerie.configs.errors import exit_code
from aerie.infer import main as infer_main
from aerie.model.checkpoint import save_head
from aerie.model.storage import WEIGHTS
from tests import tiny

Command = Callable[..., tuple[int, str, str]]
DEEP = "choices:\n  - [0]\n  - [0, 0]\n  - [0, 0, 0]\n"


@pytest.fixture(scope="module")
def run_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, and heads of every kind; the Medusa heads are two."""
    root = tmp_path_factory.mktemp("plan")
    tiny.target(root / "target")
    ends, heads = tiny.ends(), root / "run" / "heads"
    save_head(tiny.head(ends.embedding), heads / "eagle1")
    save_head(tiny.eagle3_head(ends.embedding, ids=torch.arange(200)), heads / "eagle3")
    save_head(tiny.multi_token_head("medusa", ends, num_heads=2), heads / "medusa")
    tiny.target(heads / "draft_lm")
    questions = [{"question_id": n, "category": "count", "turns": [f"Please count {n} boats."]} for n in range(2)]
    (root / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in questions))
    (root / "deep.yaml").write_text(DEEP, encoding="utf-8")
    (root / "shallow.yaml").write_text("choices:\n  - [0]\n  - [1]\n  - [0, 0]\n", encoding="utf-8")
    (root / "broken.yaml").write_text("choices:\n  - [0]\n  - [1, 0]\n", encoding="utf-8")
    prompts = {"path": str(root / "questions.jsonl"), "num_prompts": 2, "max_new_tokens": 8}
    values: dict[str, Any] = {
        "run": str(root / "run"),
        "threads": 1,
        "target": {"path": str(root / "target")},
        "data": {"conversations": ["none.jsonl"]},
        "head": {"kind": "eagle1"},
        "tree": {"levels": 3, "k": 3, "nodes": 8},
        "calibrate": {"prompts": prompts, "tree": {"levels": 3}},
        "bench": {"prompts": prompts, "rows": [{"method": "vanilla"}, {"method": "eagle2"}]},
    }
    tiny.recipe(root / "recipe.yaml", values)
    return root


@pytest.fixture
def command(run_directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs one command on the recipe with --plan; exit code, stdout and stderr. Loading a model fails it."""

    def forbidden(*_: Any, **__: Any) -> None:
        raise AssertionError("a plan loads no model")

    monkeypatch.setattr("aerie.model.target.Target.load", forbidden)
    monkeypatch.setattr("aerie.model.checkpoint.load_head", forbidden)

    def run(name: str, *words: str) -> tuple[int, str, str]:
        prompt = ["--prompt", "hi"] if name == "generate" else []
        config = ["--config", str(run_directory / "recipe.yaml"), "--plan"]
        monkeypatch.setattr("sys.argv", ["main.py", name, *config, *prompt, *words])
        code = exit_code(infer_main.main)
        return code, *capsys.readouterr()

    return run


def bench_row(**row: Any) -> tuple[str, str]:
    return "--bench.rows", json.dumps([{"method": "vanilla"}, row])


WRONG: list[tuple[str, tuple[str, ...], str, tuple[str, ...]]] = [  # command, words, message, words that follow its fix
    (
        "generate",
        ("--method", "medusa", "--tree.levels", "2"),
        "--tree.levels: unknown key; it belongs to another kind of tree, leave it out",
        ("--method", "medusa", "--tree.choices", "{root}/shallow.yaml"),
    ),
    (
        "generate",
        ("--method", "pld", "--lookahead.window", "3"),
        "lookahead: pld does not read it; leave it out",
        ("--method", "lookahead", "--lookahead.window", "3"),
    ),
    (
        "generate",
        ("--method", "vanilla", "--typical.epsilon", "0.1"),
        "typical: judges drafted tokens, and vanilla drafts none; leave it out",
        ("--method", "vanilla"),
    ),
    (
        "generate",
        ("--method", "eagle2", "--tree.children", "sampled"),
        "--tree.children: unknown key; it belongs to another kind of tree, leave it out",
        ("--method", "eagle", "--tree.children", "sampled"),
    ),
    (
        "generate",
        ("--method", "sps", "--tree.shape", "dynamic", "--tree.children", "sampled"),
        "--tree.children: unknown key; it belongs to another kind of tree, leave it out",
        ("--method", "sps", "--tree.shape", "static", "--tree.choices", "eagle1", "--tree.children", "sampled"),
    ),
    (
        "generate",
        ("--method", "medusa", "--tree.choices", "{root}/deep.yaml"),
        "has 2 heads, one a level; give tree.choices without paths longer than 2, or train a head with head.num_heads",
        ("--method", "medusa", "--tree.choices", "{root}/shallow.yaml"),
    ),
    (
        "generate",
        ("--method", "medusa", "--tree.shape", "dynamic"),
        "is 6 levels deep, and {root}/run/heads/medusa has 2 heads, one a level; set tree.levels to 2",
        ("--method", "medusa", "--tree.shape", "dynamic", "--tree.levels", "2"),
    ),
    (
        "generate",
        ("--method", "eagle", "--tree.choices", "{root}/none.yaml"),
        "none.yaml: no such file (published trees: eagle1, medusa63)",
        ("--method", "eagle", "--tree.choices", "medusa63"),
    ),
    (
        "generate",
        ("--method", "eagle", "--tree.choices", "{root}/broken.yaml"),
        "broken.yaml: choices: [1, 0] is listed without its parent [1]; add the parent",
        ("--method", "eagle", "--tree.choices", "{root}/shallow.yaml"),
    ),
    ("generate", ("--top-p", "0"), "--top-p: top_p is a share", ("--top-p", "0.5", "--temperature", "1")),
    ("generate", ("--temperature", "-1"), "--temperature: temperature must not be negative", ("--temperature", "0")),
    ("generate", ("--max-new-tokens", "0"), "--max-new-tokens: must be at least 1", ("--max-new-tokens", "1")),
    (
        "generate",
        ("--method", "deagle", "--tree.stop.bonus", "-1"),
        "--tree.stop.bonus: input should be greater than or equal to 0, not -1",
        ("--method", "deagle", "--tree.stop.bonus", "1"),
    ),
    (
        "generate",
        ("--method", "svip", "--head", "{root}/run/heads/medusa"),
        "svip drafts with eagle1 or eagle3, and this is a medusa head; give another head, or method medusa",
        ("--method", "medusa", "--head", "{root}/run/heads/medusa", "--tree.choices", "{root}/shallow.yaml"),
    ),
    (
        "bench",
        bench_row(method="medusa", tree={"choices": "{root}/deep.yaml"}),
        "bench.rows.1: tree: is 3 levels deep, and",
        bench_row(method="medusa", tree={"choices": "{root}/shallow.yaml"}),
    ),
    (
        "bench",
        bench_row(method="eagle", tree={"choices": "{root}/none.yaml"}),
        "bench.rows.1.tree: tree.choices: {root}/none.yaml: no such file",
        bench_row(method="eagle", tree={"choices": "{root}/shallow.yaml"}),
    ),
    (
        "bench",
        bench_row(method="eagle2", head="{root}/run/heads/eagle3"),
        "eagle2 drafts with eagle1, and this is an eagle3 head; give another head, or method eagle3",
        bench_row(method="eagle3", head="{root}/run/heads/eagle3"),
    ),
    (
        "bench",
        ("--bench.sampling", "[{temperature: 1.0, top_p: 1.5}]"),
        "top_p is a share, more than 0 and at most 1, not 1.5",
        ("--bench.sampling", "[{temperature: 1.0, top_p: 0.5}]"),
    ),
    ("bench", ("--bench.sampling", "[]"), "sampling is a list of one or more", ("--bench.sampling", "[{}]")),
    (
        "bench",
        ("--bench.prompts.max_new_tokens", "0"),
        "num_prompts and max_new_tokens are at least 1",
        ("--bench.prompts.max_new_tokens", "1"),
    ),
    (
        "calibrate",
        ("--calibrate.method", "medusa", "--calibrate.tree", "{choices: {root}/deep.yaml}"),
        "calibrate: tree: is 3 levels deep",
        ("--calibrate.method", "medusa", "--calibrate.tree", "{choices: {root}/shallow.yaml}"),
    ),
    (
        "calibrate",
        ("--calibrate.method", "deagle", "--calibrate.tree", "{stop: {probability_threshold: 2}}"),
        "probability_threshold: input should be less than or equal to 1, not 2",
        ("--calibrate.method", "deagle", "--calibrate.tree", "{stop: {probability_threshold: 0.2}}"),
    ),
]


@pytest.mark.parametrize(("name", "words", "message", "remedy"), WRONG)
def test_a_plan_refuses_what_cannot_work_in_one_line_and_its_remedy_works(
    name: str, words: tuple[str, ...], message: str, remedy: tuple[str, ...], command: Command, run_directory: Path
) -> None:
    def here(text: str) -> str:
        return text.replace("{root}", str(run_directory))

    code, _, err = command(name, *map(here, words))
    lines = err.splitlines()
    assert code == 2 and len(lines) == 1 and here(message) in lines[0], err
    code, _, err = command(name, *map(here, remedy))
    assert (code, err) == (0, "")


def test_the_recipes_tree_is_that_of_its_heads_usual_method_alone(command: Command) -> None:
    assert "'levels': 3, 'k': 3, 'nodes': 8" in command("generate")[1]
    assert "'levels': 3, 'k': 2, 'nodes': 8" in command("generate", "--method", "eagle2", "--tree.k", "2")[1]
    for method, tree in (("eagle-chain", "'levels': 5"), ("eagle", "'choices': 'eagle1'"), ("pld", "no tree")):
        assert tree in command("generate", "--method", method)[1]
    code, out, _ = command("generate", "--method", "deagle", "--tree.levels", "4")
    assert code == 0 and "'levels': 4, 'k': 10, 'nodes': 60" in out


def test_the_files_tree_is_not_that_of_another_kind_of_head(command: Command) -> None:
    kind = ("--head.kind", "eagle3")
    assert "eagle3 with" in command("generate", *kind)[1] and "'levels': 8, 'k': 10" in command("generate", *kind)[1]
    assert "'levels': 4, 'k': 10" in command("generate", *kind, "--tree.levels", "4")[1]
    assert "'levels': 3, 'k': 3" in command("generate", "--head.kind", "eagle1")[1]


def test_the_files_tree_of_calibrate_is_not_that_of_another_method(command: Command) -> None:
    assert "eagle, {'shape': 'static', 'choices': 'eagle1'" in command("calibrate", "--calibrate.method", "eagle")[1]
    assert "eagle3, {'shape': 'dynamic', 'levels': 8, 'k': 10" in command("calibrate", "--head.kind", "eagle3")[1]
    assert "'levels': 3, 'k': 10" in command("calibrate", "--calibrate.method", "eagle2")[1]


def test_a_tree_on_the_command_line_that_a_command_does_not_read_is_warned_of(command: Command) -> None:
    for name in ("bench", "calibrate"):
        code, _, err = command(name, "--tree.levels", "4")
        assert code == 0 and f"warning: --tree.levels: {name} does not read it" in err


def test_a_head_without_weights_or_of_another_kind_than_its_directory_is_named(
    command: Command, run_directory: Path, tmp_path: Path
) -> None:
    shutil.copytree(run_directory / "run", tmp_path / "run")
    (tmp_path / "run" / "heads" / "eagle1" / WEIGHTS).unlink()
    code, _, err = command("generate", "--run", str(tmp_path / "run"))
    assert code == 2 and "eagle1: holds no weights; train the head" in err
    shutil.rmtree(tmp_path / "run" / "heads" / "eagle1")
    shutil.copytree(run_directory / "run" / "heads" / "eagle3", tmp_path / "run" / "heads" / "eagle1")
    for name in ("generate", "bench", "calibrate"):
        code, _, err = command(name, "--run", str(tmp_path / "run"))
        assert code == 2 and "eagle2 drafts with eagle1, and this is an eagle3 head" in err


def test_a_plan_says_that_typical_acceptance_is_not_lossless(command: Command, run_directory: Path) -> None:
    words = ("--method", "medusa", "--tree.choices", str(run_directory / "shallow.yaml"))
    assert "NOT lossless" in command("generate", *words, "--typical.epsilon", "0.1")[1]
    assert "lossless" not in command("generate", *words)[1]
