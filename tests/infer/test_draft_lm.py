"""A draft LM: whatever was accepted, its laws are those of plain forwards on the same text."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig

from aerie.configs.errors import UserError
from aerie.configs.schema.heads import TargetConfig
from aerie.infer.decode.drafters import DraftLMDrafter, load_draft_lm
from aerie.model.kv_cache import KeptRows
from aerie.model.miniature import small_model
from aerie.model.target import Target
from tests import tiny

PROMPT = torch.arange(20, 40)


def made(model: Any) -> Target:
    return Target(model, TargetConfig("made"))


def draft_of(family: str) -> Target:
    """A small LM; of mistral and gemma2 every layer, or every other one, has a window."""
    return made(small_model(AutoConfig.for_model(family), vocab_size=320))


def drafter_of(draft: Target, vocab_size: int = 320) -> DraftLMDrafter:
    return DraftLMDrafter(draft, made(tiny.llama(vocab_size=vocab_size, num_blocks=1, seed=1)))


def ready(drafter: DraftLMDrafter, first: int = 50) -> list[int]:
    """(the drafter after a prompt and the answer's first token, both as one text)."""
    drafter.reset(PROMPT, KeptRows(128, PROMPT.device, torch.float32), 8)
    drafter.commit(torch.cat([PROMPT[1:], torch.tensor([first])]), torch.zeros(len(PROMPT), 32))
    return [*PROMPT.tolist(), first]


def assert_law(law: Tensor, draft: Target, text: list[int]) -> None:
    """Asserts that law is log q [Vd] after the text, by the model's own forward without a cache."""
    logits = draft.model(torch.tensor([text])).logits[0, -1, : len(law)]
    torch.testing.assert_close(law, logits.log_softmax(-1), rtol=0, atol=1e-5)


@pytest.fixture(autouse=True)
def _no_gradient() -> Any:
    with torch.inference_mode():
        yield


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2"])
@pytest.mark.parametrize("path", [[], [2], [1, 3], [1, 3, 4], [0, 0, 0]])  # the rows of each level
def test_laws_of_trees(family: str, path: list[int]) -> None:
    draft = draft_of(family)
    drafter = drafter_of(draft)
    text = ready(drafter)
    levels = [
        [[0, 0, 0], [61, 62, 63]],
        [[0, 2, 1, 1, 0], [71, 72, 73, 74, 75]],
        [[0, 3, 3, 4, 3], [81, 82, 83, 84, 85]],
    ]
    for first in (0, 100):  # a second tree, when the first one's cache rows have been gathered
        paths: list[list[int]] = [[]]
        assert_law(drafter.start()[0], draft, text)
        for parents, tokens in levels:
            laws = drafter.step(torch.tensor(tokens) + first, torch.tensor(parents))
            paths = [
                [*paths[parent], token + first]
                for parent, token in zip(parents, tokens, strict=True)
            ]
            for law, below in zip(laws, paths, strict=True):
                assert_law(law, draft, text + below)
        kept = [tokens[row] + first for row, (_, tokens) in zip(path, levels, strict=False)]
        unread = [250] if len(path) == len(levels) else []  # a leaf, whose law was never computed
        drafter.commit(torch.tensor([*kept, *unread, 300]))
        text += [*kept, *unread, 300]
    assert_law(drafter.start()[0], draft, text)


@pytest.mark.parametrize(("accepted", "read"), [(0, 1), (2, 1), (3, 1), (4, 2)])
def test_forwards(accepted: int, read: int) -> None:
    draft = draft_of("llama")
    drafter = drafter_of(draft)
    ready(drafter)
    widths: list[int] = []
    hook = draft.decoder.register_forward_pre_hook(
        lambda _, args, kwargs: widths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    zero = torch.zeros(1, dtype=torch.long)
    drafter.start()
    for token in (60, 61, 62):
        drafter.step(torch.tensor([token]), zero)
    drafter.commit(torch.tensor([*[60, 61, 62, 63][:accepted], 99]))
    drafter.start()
    hook.remove()
    assert widths == [1, 1, 1, 1, read]


@pytest.mark.parametrize("vocab_size", [300, 320, 340])
def test_padded_vocabularies(vocab_size: int) -> None:
    draft = draft_of("llama")
    drafter = drafter_of(draft, vocab_size)
    text = ready(drafter)
    law = drafter.start()[0]
    assert law.shape == (min(320, vocab_size),)
    assert_law(law, draft, text)
    drafter.commit(
        torch.tensor([vocab_size - 1])
    )  # an id from the target's padding, if its vocabulary is larger
    assert drafter.start().isfinite().all()


def test_loading(
    tmp_path: Path,
) -> None:
    target = Target.load(TargetConfig(str(tiny.target(tmp_path / "target")), dtype="bfloat16"))
    padded = tiny.target(tmp_path / "padded", num_blocks=2)
    tiny.llama(vocab_size=336, num_blocks=2).save_pretrained(padded)
    drafter = DraftLMDrafter(load_draft_lm(target, str(padded)), target)
    assert drafter.draft.dtype == torch.bfloat16 and drafter.draft.num_blocks == 2
    ready(drafter)
    assert drafter.start().shape == (1, 320)
    small = tiny.target(tmp_path / "small", num_blocks=2)
    tiny.llama(vocab_size=300, num_blocks=2).save_pretrained(small)
    with pytest.raises(
        UserError, match=r"has 300 token embeddings, and .*target has tokens beyond them"
    ):
        load_draft_lm(target, str(small))
    text = (padded / "tokenizer.json").read_text(encoding="utf-8")
    (padded / "tokenizer.json").write_text(text.replace("<|system|>", "<|tool|>"), encoding="utf-8")
    with pytest.raises(UserError, match=r"token '<\|tool\|>' has id 2, in .*target another"):
        load_draft_lm(target, str(padded))
