"""A mistake with any command gives one line that begins with error:, code 2, and no lost file."""

import io
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests import tiny
from tests.infer.test_main import write_recipe

TEXTS = {  # the files in {bad}
    "date.yaml": "run: 2024-13-45\n",
    "keys.yaml": "[a]: 3\n",
    "code.yaml": "run: !!python/object/apply:os.system [id]\n",
    "empty.yaml": "",
    "numbers.jsonl": '{"messages": [{"role": "user", "content": 5}]}\n',
    "text.jsonl": '{"text": "no"}\n',
    "torn.jsonl": '{"messages": [\n',
    "bad.parquet": "PAR1 not",
    "odd/report/summary.json": "[]",
    "odd/report/details.json": "[]",
    "outside/config.json": "{}",
    "outside/model.safetensors.index.json": json.dumps(
        {"weight_map": {"a": "../../target/model.safetensors"}}
    ),
    "list/config.json": "[1]",
    "model.gguf": "GGUF",
}
SHORT = {
    "{data}": "{recipe} --plan --data.max_length 256 --data.conversations",
    "{recipe}": "--config {root}/recipe.yaml",
    "{bad}": "{root}/bad",
}
MISTAKES = r"""
run => no recipe; name one with --config
run {bad}/gone.yaml => gone.yaml: No such file or directory
run {bad} => bad: Is a directory
run {root}/recipe.yaml --processes many => --processes: invalid int value: 'many'
run {root}/recipe.yaml --confg x => --confg: unknown key; known here: run, target
keys no_section.key => no_section.key: no section or key of a recipe; aerie keys lists
run {root}/recipe.yaml --data.conversations a b => b: not an option; overrides look like
run {root}/recipe.yaml --data.conversations chats
    => no such file or directory; write a data set of the Hub as OWNER/NAME
run {root}/recipe.yaml => none.jsonl: no such file or directory
run {root}/recipe.yaml --plan --target.chat_template {bad}/latin.jsonl => latin.jsonl: not UTF-8
status {bad}/nowhere => nowhere: no run
init => the following arguments are required: --target, --data, --out
init --target {root}/target --data {bad}/gone.jsonl --out {root}/new.yaml
    => gone.jsonl: no such file
init --target {root}/target --data {root}/rows.jsonl --out {root}/recipe.yaml => exists already
init --target {root}/target --data {bad}/text.jsonl --out {root}/new.yaml => has keys text; expected
init --target {bad}/nowhere/x --data {root}/rows.jsonl --out {root}/new.yaml
    => no such target directory
init --target {bad}/model.gguf --data {root}/rows.jsonl --out {root}/new.yaml => GGUF is not read
init --target {bad}/outside --data {root}/rows.jsonl --out {root}/new.yaml
    => index.json: names '../../target
synthetic {recipe} => no section 'synthetic'
distill {recipe} => no section 'distill'
distill {recipe} --plan --distill.sources '[{path: {bad}/pipe.jsonl}]'
    => pipe.jsonl: a pipe or a device
distill {recipe} --distill.sources '[{path: {root}/rows.jsonl}]' --merge --retry-failed
    => leave out --retry-failed and
distill {recipe} --distill.sources '[{path: x, ask: problem}]' => ask to personas
features {recipe} --overwrite --features.after_blocks [2,1] => after_blocks: must ascend
features {recipe} --overwrite --shard 3/2 => --shard: 3/2 is not a share; write i/n
features {recipe} --plan --data.conversations {root}/rows.jsonl --head.kind eagle3
    => need at least 7; name its taps
features {data} {bad}/numbers.jsonl
    => no row is usable; conversations: 1 read, 0 kept, 1 skipped; skipped 1 a turn is not text
features {data} {bad}/text.jsonl --data.prompt_field a --data.completion_field b
    => has keys text; expected a and b
features {data} /dev/zero => /dev/zero: a pipe or a device
features {data} [] => --data.conversations: tuple should have at least 1 item
show {data} {bad}/torn.jsonl --limit 0 => --limit: must be at least 1, not 0
show {recipe} --data.conversations {bad}/torn.jsonl => torn.jsonl:1: not JSON (Expecting value
show {recipe} --data.conversations {bad}/bad.parquet => bad.parquet: cannot be read
show {recipe} --data.conversations {bad}/latin.jsonl => latin.jsonl: cannot be read ('utf-8' codec
show --config {bad}/keys.yaml => keys.yaml:1: not YAML (found unhashable key)
train {recipe} --lr 1 => --lr: unknown key; did you mean 'train.learning_rate'
train {recipe} --train.max_steps 0 => --train.max_steps: input should be greater than 0
train {recipe} --target {bad}/nowhere/x => no such target directory
train {recipe} --train.betas '[0.9]' => --train.betas: train.betas.1: required, and not set
bench {recipe} --plan --bench.prompts '{tasks: [gsm8k], task: x}' => leave one of them out
bench {recipe} --plan --bench.rows '[{method: vanilla}, {method: served, url: x}]' => should match
bench {recipe} --plan --bench.rows '[{method: vanilla}, {method: served, url: http://x, tree: {}}]'
    => tree: unknown key; it belongs to another kind of rows than served; leave it out
bench {recipe} --plan --bench.rows '[{method: eagle, url: http://x}]'
    => url: unknown key; it belongs to another kind of rows than eagle; leave it out
generate {recipe} => generate needs either --prompt TEXT
generate {recipe} --prompt - => --prompt: the prompt is empty or is not text
generate {recipe} --prompts {bad}/pipe.jsonl => pipe.jsonl: a pipe or a device
generate {recipe} --prompts {bad}/numbers.jsonl => turn 1 holds int
generate {recipe} --prompt x --target.device_map cuda:7 => cannot load the target
generate {recipe} --prompt x --head {bad}/bare => bare: holds no weights; train the head
generate {recipe} --prompt x --generation.num_beams 4
    => num_beams=4, which aerie does not apply; switch it off
generate {recipe} --prompt x --generation.repetition_penality null
    => generation: repetition_penality is no setting
generate {recipe} --prompt x --generation.repetition_penalty -1.5 --max-new-tokens 8
    => strictly positive float, but
generate {recipe} --prompt x --max-new-tokens 0 --plan => max_new_tokens must be at least 1
generate {recipe} --prompt x --head {bad}/list => list/config.json: has no
generate {recipe} --prompt x --target {bad}/lost
    => generation_config.json: is no regular file, or a broken link
generate {recipe} --prompt x --head {bad}/nowhere => nowhere: holds no head
generate {recipe} --prompt x --temperature -1
    => temperature: input should be greater than or equal to 0
generate {recipe} --prompt x --temperature 1 --top-p 0 => top_p: input should be greater than 0
generate --prompt x --run {bad}/nowhere => recipe.yaml: no such file
chat --config {bad}/pipe.yaml => pipe.yaml: a pipe or a device
calibrate {recipe} --calibrate.method pld => pld drafts without a head
tune --config {bad}/empty.yaml => empty.yaml: a recipe is a mapping of sections; this is NoneType
tune {recipe} --head {root}/run => run: a run and no head
report --config {bad}/date.yaml => date.yaml: not YAML (month must be in 1..12)
report {recipe} => bench: the stage is not finished
results {bad}/odd.md => report: is damaged; run: aerie report --run
results {bad}/text.jsonl => has no <!-- results RUN: method, tau -->
results => the following arguments are required: PAGE.md
claims {bad}/none => bench: the stage is not finished
compare {recipe} --of 0 --against 1 => records.jsonl
verify => verify needs --config RECIPE, or --target
verify {recipe} --draws 10 => needs at least 1 prompt and 200 draws
verify --config {bad}/code.yaml => code.yaml:1: not YAML (could not determine a constructor
inspect {bad}/nowhere => nowhere: holds no head
inspect {root}/run => run: a run and no head
inspect {root}/target => a whole language model and no draft head; a draft_lm
inspect {root}/run/heads/eagle3 --after-blocks 3,2 => --after-blocks: invalid taps value: '3,2'
convert {root}/run/heads/eagle1 --to vllm --target {root}/target --out {root}/run => run: not empty
convert {root}/run/heads/eagle1 --to sglang --target {root}/target --out {root}/q.txt/x
    => written (Not a directory)
push {root}/run/heads/eagle1 --repo noname => --repo noname: is no repository name
push {root}/run/heads/eagle1 --repo me/head --dry-run => no measured results
push {root}/run/heads/eagle1 --repo me/head --without-results --uncommitted
    => give --target-name
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("mistakes")
    write_recipe(root)
    for name, text in TEXTS.items():
        (root / "bad" / name).parent.mkdir(parents=True, exist_ok=True)
        (root / "bad" / name).write_text(text)
    mark = f"<!-- results {root}/bad/odd: tau -->\n<!-- /results -->\n"
    (root / "bad/odd.md").write_text(mark)
    (root / "bad/latin.jsonl").write_bytes(b'{"prompt": "\xff"}\n')
    shutil.copytree(root / "target", root / "bad/lost")
    (root / "bad/lost/generation_config.json").unlink(missing_ok=True)
    (root / "bad/lost/generation_config.json").mkdir()
    shutil.move(
        shutil.copytree(root / "run/heads/eagle1", root / "bad/bare") / "model.safetensors",
        root / "bad/list",
    )
    for name in ("pipe.jsonl", "pipe.yaml"):
        os.mkfifo(root / "bad" / name)
    return root


def state(root: Path) -> dict[Path, Any]:
    """Size and time of each file, except files that record how a stage ended."""
    files = (path for path in root.rglob("*") if not path.is_dir() and "status" not in path.name)
    return {path: (path.stat().st_size, path.stat().st_mtime_ns) for path in files}


LINES = MISTAKES.replace("\n    => ", " => ").strip().splitlines()


@pytest.mark.parametrize(("line", "message"), [line.split(" => ") for line in LINES])
def test_a_mistake_is_one_line_and_nothing_is_lost(
    line: str, message: str, root: Path, monkeypatch: Any, capsys: Any
) -> None:
    for name, text in {**SHORT, "{root}": str(root)}.items():
        line = line.replace(name, text)
    before = state(root)
    monkeypatch.setattr("sys.stdin", io.StringIO())
    code, _, err = tiny.typed(f"aerie {line}", capsys)
    assert (code, err.count("\n"), err[:7]) == (2, 1, "error: "), err
    assert message in err, err
    assert before.items() <= state(root).items()
