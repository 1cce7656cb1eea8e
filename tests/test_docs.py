"""Checks README.md and docs/ against the code.

Commands accept the command lines, with stand-in files. README.md's code and the notebook run on a
tiny target. Links, pictures and figures are right, and every kind of prompt is accepted.
"""

import json
import re
import shlex
import subprocess
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from accelerate.commands.launch import launch_command_parser
from transformers import AutoTokenizer

from aerie.configs.schema.heads import TargetConfig
from aerie.infer import SpeculativeDecoder
from aerie.model.checkpoint import save_head
from aerie.model.storage import ROOT
from aerie.model.target import Target
from tests import tiny
from tests.infer.test_main import write_recipe

PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))]
OTHERS = ("accelerate", "make", "pip", "python", "sbatch", "vllm")
# Each command is a function that prints its words with separators, and a number like sbatch's.
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
# What a command says if a file is missing that an earlier line of the docs makes.
FIRST = {
    "claims": "not finished",
    "compare": "records",
    "check": "index.json",
    "bench": "train the head",
    "train": "not a whole feature cache|no run has made|TARGET, which has 4 blocks",
    "report": "not finished",
    "features": "too few rows to time",
    "run": "no run has made",
    "push": "no measured results",
}


def lines() -> Iterator[tuple[str, list[str]]]:
    """(page, words) of each command in the pages' bash blocks."""
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


def anchors(page: Path) -> set[str]:
    """The names that GitHub gives to a page's headings."""
    text = re.sub(r"(?s)```.*?```", "", page.read_text())
    titles = re.findall(r"(?m)^#+ (.+)$", text)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_every_file_and_heading_that_a_page_links_is_there() -> None:
    for page in [*PAGES, ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md"]:
        for link in re.findall(r"\]\((?!https?:)([^)]+)\)", page.read_text()):
            name, _, heading = link.partition("#")
            linked = page.parent / name if name else page
            assert linked.exists(), f"{page.name}: {link}"
            assert not heading or heading in anchors(linked), f"{page.name}: {link}"


def test_every_picture_is_shown_in_a_page_and_follows_the_readers_colours() -> None:
    pages = "".join(page.read_text() for page in PAGES)
    for picture in ROOT.glob("docs/*.svg"):
        assert f"{picture.name})" in pages
        assert "prefers-color-scheme: dark" in picture.read_text()


RESULTS = ROOT / "docs/results.md"
OF_A_RUN = re.compile(r"`make (demo|bench|gpu)`|[Tt]he demo|results\.md")
COMMIT = re.compile(r"\b(?=\w*\d)[0-9a-f]{7,12}\b")  # such a paragraph has figures of its own
FIGURE = re.compile(r"(?<![\w.~/])(?<!Python )(\d+\.\d\d|\d+\.\d(?= tokens/s))(?!\w|\.\d)")
METHODS = {"EAGLE-2": "eagle2", "EAGLE-3": "eagle3"}  # other names stand as they are, in `code`
TAU = re.compile(r"(EAGLE-[23]|`[\w-]+`)(?: [\w`-]+){0,4} tau (?:of|is) (\d+\.\d\d)")


def tables(page: Path) -> dict[str, list[list[str]]]:
    """The cells of each table that `aerie results` fills, by run."""
    blocks = re.findall(r"(?s)<!-- results (\S+): .*? -->\n(.*?)\n\n", page.read_text())
    return {run: [line.split(" | ") for line in table.splitlines()] for run, table in blocks}


def test_the_readme_has_the_blocks_of_the_results() -> None:
    """Tables, and the lines below them: commit, hardware, verdicts."""
    blocks = re.findall(r"(?s)<!-- results .*?<!-- /results -->", (ROOT / "README.md").read_text())
    assert blocks and all(block in RESULTS.read_text() for block in blocks)


def test_no_page_has_a_figure_of_a_make_command_that_the_results_do_not_have() -> None:
    """numerics.md is exempt, because it tells older figures, each with its commit."""
    known = set(re.findall(r"\d+\.\d+", RESULTS.read_text()))
    taus = defaultdict[str, set[str]](set)  # by method
    for head, *rows in tables(RESULTS).values():
        column = head.index("tau")
        for row in rows[1:]:
            taus[row[0].strip("| ")].add(row[column])
    for page in [*PAGES, ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md"]:
        for paragraph in re.split(r"\n\n|\n- |\n\|", page.read_text()):
            if page.name == "numerics.md" or COMMIT.search(paragraph):
                continue
            if OF_A_RUN.search(paragraph):
                told = set(FIGURE.findall(paragraph))
                assert told <= known, f"{page.name}: {told - known}: {paragraph[:200]}"
                for name, tau in TAU.findall(" ".join(paragraph.split())):
                    method = METHODS.get(name, name.strip("`"))
                    assert tau in taus[method], f"{page.name}: {name} has no tau {tau}"


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small stand-in for every file that the docs name."""
    root = tmp_path_factory.mktemp("docs")
    write_recipe(root)
    rows = tiny.write_conversations(root / "conversations.jsonl", 12)
    tiny.write_conversations(root / "chats.jsonl", 12)
    for number, name in enumerate(
        ("FILE", "gsm8k", "gsm8k_1200", "gsm8k_train", "questions/gsm8k")
    ):
        tiny.write_rows(
            root / f"{name}.jsonl",
            [
                {"question": f"What are {n} and {number}?", "answer": f"It is {n}."}
                for n in range(12)
            ],
        )
    tiny.write_conversations(root / "runs/distilled/distilled/conversations.jsonl", 12)
    values = {
        **yaml.safe_load((root / "recipe.yaml").read_text()),
        "data": {"conversations": [str(rows)]},
        "distill": {"sources": [{"path": str(rows)}]},
        "tune": {"prompts": {"path": str(root / "q.txt")}},
    }
    for name in ("recipe.yaml", "RUN/recipe.yaml"):
        tiny.recipe(root / name, values)
    (root / "RUN/tune").mkdir()
    heads = root / "run/heads"
    (root / "RUN/tune/tuned.yaml").write_text(f"method: eagle-chain\nhead: {heads / 'eagle1'}\n")
    (root / "RUN/heads").symlink_to(heads)
    names = {
        **dict.fromkeys(
            (
                "TARGET",
                "meta-llama/Llama-3.1-8B-Instruct",
                "Qwen/Qwen3-8B",
                "Qwen/Qwen3-235B-A22B",
                "runs/embedded/target",
            ),
            root / "target",
        ),
        "HEAD": heads / "eagle1",
        "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B": heads / "eagle3",
        **dict.fromkeys(("runs/my", "runs/NAME", "runs/qwen3-8b-eagle3"), root / "run"),
        **dict.fromkeys(("runs/embedded/heads", "runs/gsm8k/heads"), heads),
        **dict.fromkeys(
            ("questions/alpaca.jsonl", "runs/embedded/conversations/prompts.jsonl"),
            root / "questions/gsm8k.jsonl",
        ),
        **dict.fromkeys(
            ("RECIPE", "my.yaml", "qwen3-8b.yaml", "served.yaml"), root / "recipe.yaml"
        ),
        "configs": ROOT / "configs",
    }
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
    code, *output = tiny.typed(shlex.join(words), capsys)
    is_waiting = re.search(FIRST.get(command, "nothing else"), "".join(output))
    assert code == 0 or "--is-whole" in words or is_waiting, output


TEXT = "Please count 4 boats."


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target and an EAGLE-1 head."""
    root = tmp_path_factory.mktemp("examples")
    embedding = tiny.llama().get_input_embeddings().weight.detach()
    target = tiny.target(root / "target")
    save_head(tiny.head(embedding, scale=8.0), root / "head")
    return target, root / "head"


def test_the_first_python_of_the_readme_and_the_notebook_run_as_they_stand(
    paths: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    block = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    code = re.sub(r"tokens=\d+", "tokens=8", block[1])
    call = 'from_pretrained("{}", "{}"'.format(*paths)
    code, replaced = re.subn(r'from_pretrained\(\s*"[^"]+",\s*"[^"]+"', call, code)
    exec(compile(code, "README.md", "exec"), {})  # noqa: S102
    assert replaced == 1 and capsys.readouterr().out.strip()
    for name, value in (("TARGET", paths[0]), ("HEAD", paths[1]), ("MAX_NEW_TOKENS", 8)):
        monkeypatch.setenv(f"AERIE_{name}", str(value))
    namespace: dict[str, Any] = {}
    for cell in json.loads((ROOT / "examples" / "quickstart.ipynb").read_text())["cells"]:
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), "quickstart.ipynb", "exec"), namespace)  # noqa: S102
    out = capsys.readouterr().out
    assert "same tokens: True" in out and "survival" in out and out.count("tau") == 2 + 5 + 3


def test_every_kind_of_prompt_and_of_target_gives_the_same_answer(paths: tuple[Path, Path]) -> None:
    target, head = paths
    tokenizer = AutoTokenizer.from_pretrained(target)
    messages = [{"role": "user", "content": TEXT}]
    batch = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    ids = batch["input_ids"]
    model = tiny.llama()
    expected = model.generate(**batch, do_sample=False, max_new_tokens=12).tolist()
    kinds = [
        TEXT,
        messages,
        batch,
        {"input_ids": ids[0].tolist()},
        ids,
        ids[0],
        ids.tolist(),
        ids[0].tolist(),
    ]
    for decoder in (
        SpeculativeDecoder.from_pretrained(target, head, device="cpu", dtype=torch.float32),
        SpeculativeDecoder.from_pretrained(
            Target.load(TargetConfig(path=str(target))), head, method="svip"
        ),
        SpeculativeDecoder.from_pretrained(model, method="pld", tokenizer=tokenizer),
    ):
        for prompt in kinds:
            generation = decoder.generate(prompt, do_sample=False, max_new_tokens=12)
            assert generation.sequences.tolist() == expected
        assert generation.text == tokenizer.decode(generation.new_ids, skip_special_tokens=True)
    half = SpeculativeDecoder.from_pretrained(model.to(torch.bfloat16))
    assert half.target.dtype == torch.bfloat16
    assert half.generate([5, 6], max_new_tokens=2).statistics.new_tokens == 2
    tiny.refused("tokenizer=", half.generate, TEXT)
    tiny.refused("leave dtype out", SpeculativeDecoder.from_pretrained, model, dtype="bfloat16")
