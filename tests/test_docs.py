"""Every command line of README.md and docs/: its command accepts it, with stand-in files."""

import re
import subprocess
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest
import yaml
from accelerate.commands.launch import launch_command_parser

from aerie.__main__ import ALONE, COMMANDS
from aerie.model.storage import ROOT
from tests import tiny
from tests.infer.test_main import write_recipe

PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))]
OTHERS = ("accelerate", "make", "pip", "python", "sbatch", "vllm")
# Each command is a function that prints its words between separators, and a number, as sbatch.
BASH = "exec 3>&1; record() { printf '%s\\037' \"$@\" >&3; printf '\\036' >&3; echo 1; }; set -u\n"
BASH += "".join(f'{name}() {{ record {name} "$@"; }}; ' for name in ("aerie", *OTHERS))
AT_ONCE = (
    "check",
    "claims",
    "compare",
    "convert",
    "init",
    "inspect",
    "keys",
    "push",
    "results",
    "status",
)
# Files that a command needs, and that earlier lines make.
FIRST = {
    "claims": "no bench",
    "compare": "records",
    "check": "index.json",
    "bench": "train the head",
    "train": "no whole feature cache|no run has made",
    "features": "too few rows to time",
    "run": "no run has made",
    "push": "no measured results",
}


def lines() -> Iterator[tuple[str, list[str]]]:
    """(page, words) of each command in a bash block."""
    for page in PAGES:
        for block in re.findall(r"```bash\n(.*?)```", page.read_text(), re.S):
            text = re.sub(r"(?m)^\. .*activate$|&& \. .*$", "", block)
            done = subprocess.run(
                ["bash", "-c", BASH + text], capture_output=True, text=True, check=True, cwd="/"
            )
            assert not done.stderr, f"{page.name}: {done.stderr}"
            for record in done.stdout.split("\036")[:-1]:
                yield page.name, record.lstrip("1\n").split("\037")[:-1]


LINES = list(lines())


def test_every_file_that_a_page_links_is_there() -> None:
    for page in PAGES:
        for link in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
            assert (page.parent / link).exists(), f"{page.name}: {link}"


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small stand-in for every name in the docs."""
    root = tmp_path_factory.mktemp("docs")
    write_recipe(root)
    rows = tiny.write_conversations(root / "conversations.jsonl", 12)
    tiny.write_conversations(root / "chats.jsonl", 12)
    for number, name in enumerate(
        ("FILE", "gsm8k", "gsm8k_1200", "gsm8k_train", "questions/gsm8k")
    ):
        questions = [
            {"question": f"What are {n} and {number}?", "answer": f"It is {n}."} for n in range(12)
        ]
        tiny.write_rows(root / f"{name}.jsonl", questions)
    tiny.write_conversations(root / "runs/distilled/distilled/conversations.jsonl", 12)
    values = yaml.safe_load((root / "recipe.yaml").read_text())
    values["data"]["conversations"] = [str(rows)]
    values["distill"] = {"sources": [{"path": str(rows)}]}
    values["tune"] = {"prompts": {"path": str(root / "q.txt")}}
    tiny.recipe(root / "recipe.yaml", values)
    (root / "RUN/tune").mkdir(parents=True)
    heads = root / "run/heads"
    (root / "RUN/tune/tuned.yaml").write_text(f"method: eagle-chain\nhead: {heads / 'eagle1'}\n")
    (root / "RUN/heads").symlink_to(heads)
    tiny.recipe(root / "RUN/recipe.yaml", values)
    names = dict.fromkeys(
        ("TARGET", "meta-llama/Llama-3.1-8B-Instruct", "Qwen/Qwen3-8B"), root / "target"
    )
    names |= {"HEAD": heads / "eagle1", "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B": heads / "eagle3"}
    names |= dict.fromkeys(("runs/my", "runs/NAME", "runs/qwen3-8b-eagle3"), root / "run")
    names |= dict.fromkeys(("RECIPE", "my.yaml", "qwen3-8b.yaml"), root / "recipe.yaml")
    names["configs"] = ROOT / "configs"
    for name, stand_in in names.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).symlink_to(stand_in)
    return root


@pytest.mark.parametrize(
    ("page", "words"), LINES, ids=[f"{page}-{' '.join(words)[:60]}" for page, words in LINES]
)
def test_a_command_line_of_the_docs_is_taken(
    page: str,
    words: list[str],
    world: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if words[0] == "accelerate":
        known = launch_command_parser().parse_args(words[2:])
        script, words = known.training_script, known.training_script_args
        assert (ROOT / script).is_file() and Path(known.config_file or ROOT).exists()
        words = ["aerie", *(["train"] if script.startswith("train") else []), *words]
    if words[0] == "make":
        subprocess.run(["make", "-n", words[1]], cwd=ROOT, capture_output=True, check=True)
    elif words[0] == "sbatch":
        assert (ROOT / next(word for word in words if word.endswith(".sbatch"))).is_file()
    if words[0] != "aerie":
        return
    command = words[1]
    monkeypatch.chdir(world)
    if command == "init":
        words = [word.replace(".yaml", "-new.yaml") for word in words]
    words += [] if command in AT_ONCE or "--plan" in words else ["--plan"]
    code = tiny.call(
        import_module(f"aerie.{COMMANDS[command].module}"), *words[1 + (command in ALONE) :]
    )
    output = "".join(capsys.readouterr())
    is_waiting = re.search(FIRST.get(command, "nothing else"), output)
    assert code == 0 or "--is-whole" in words or is_waiting, output
