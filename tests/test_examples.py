"""Runs the code of README.md and the notebook on a tiny target; and which prompts are accepted."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from aerie.configs.errors import UserError
from aerie.configs.schema.heads import TargetConfig
from aerie.infer import SpeculativeDecoder
from aerie.model.checkpoint import save_head
from aerie.model.target import Target
from tests import tiny

ROOT = Path(__file__).resolve().parent.parent
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
    assert block is not None
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
    with pytest.raises(UserError, match="tokenizer="):
        half.generate(TEXT)
    with pytest.raises(UserError, match="leave dtype out"):
        SpeculativeDecoder.from_pretrained(model, dtype="bfloat16")
