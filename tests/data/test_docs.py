"""Every example of docs/data.md is read as the page says, and nothing is repaired or skipped."""

import json
import re
from pathlib import Path

import pytest

from aerie.configs.schema.data import DataConfig, DistillConfig, SourceConfig
from aerie.configs.schema.measure import PromptsConfig
from aerie.data.conversations import Tally, load_conversations
from aerie.data.distill.prompts import make_prompts
from aerie.infer.measure.tasks import load_prompts

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "data.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"^```json (\w+)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
assert {kind for kind, _ in EXAMPLES} == {"conversation", "question", "prompt", "persona"}
SOURCES = {
    "prompt": ({"kind": "prompts"},),
    "persona": ({"kind": "personas"}, {"kind": "personas", "ask": "problem"}),
}


@pytest.mark.parametrize(("kind", "text"), EXAMPLES)
def test_examples(kind: str, text: str, tmp_path: Path) -> None:
    """An example of the page is read."""
    row = json.loads(text)
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row) + "\n", encoding="utf-8")
    if kind == "conversation":
        tally = Tally()
        (conversation,) = load_conversations(DataConfig((str(path),)), tally)
        assert tally.rows == tally.kept == 1 and not tally.counts
        assert conversation.tokens or conversation.messages[-1]["role"] == "assistant"
    elif kind == "question":
        (prompt,) = load_prompts(PromptsConfig(path=str(path)))
        assert prompt.turns == tuple(row["turns"]) and prompt.task == row["category"]
    else:
        for keys in SOURCES[kind]:
            (asked,) = make_prompts(DistillConfig((SourceConfig(str(path), **keys),)), ())
            assert asked.skip is None and (asked.turns or asked.invent)
