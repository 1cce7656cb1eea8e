"""Drafters of heads: laws in the right places, only true features, and heads that do not fit.

A draft LM: whatever was accepted, its laws are those of plain forwards on the same text.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig

from aerie.configs.schema.decode import (
    MethodConfig,
    published_tree,
)
from aerie.configs.schema.heads import TargetConfig
from aerie.infer.decode.drafters import DraftLMDrafter, load_draft_lm
from aerie.infer.decode.find_head import check_levels
from aerie.infer.decode.loaded_heads import load_head_for
from aerie.model.checkpoint import save_head
from aerie.model.heads import DRAFT_MODELS
from aerie.model.kv_cache import KeptRows
from aerie.model.miniature import small_model
from aerie.model.target import Target
from tests import tiny
from tests.infer.draws import TREES, decoder_of, greedy, make_head, make_target, prompts, steered
from tests.model.drafted import log_laws

LOADED = [  # kind, options
    ("eagle1", {}),
    ("eagle3", {"num_hidden_layers": 2, "qk_norm": True, "fc_norm": True, "norm_output": True}),
    ("eagle3", {"norm_before_residual": True, "norm_before_fc": True, "num_key_value_heads": 4}),
    ("medusa", {}),
    ("hydra", {}),
    ("hydra", {"prefix_layer": True}),
    ("block", {"num_hidden_layers": 2, "anchor_feature": True, "markov_order": 3}),
    (
        "block",
        {"in_block": "causal", "sample_from_anchor": True, "markov_head": "gated", "block_size": 6},
    ),
    ("block", {"markov_rank": 0}),
]


def ready(drafter: Any, target: Target, text: Tensor) -> Any:
    """The drafter after it got the text [T]: its last token is the root."""
    features = target.features(text[None, :-1], after_blocks=drafter.after_blocks)
    known = features.last_hidden if features.taps is None else features.taps
    drafter.reset(text[:-1], kept := KeptRows(256, text.device, torch.float32), 5)
    drafter.commit(text[1:], known[0])
    kept.advance(len(text) - 1)
    return drafter


@pytest.mark.parametrize(("kind", "options"), LOADED)
@torch.inference_mode()
def test_laws_below_nodes(kind: str, options: dict[str, Any]) -> None:
    target = make_target()
    head, text = (
        make_head(target, kind, **options),
        torch.cat([prompts(3)[-1][0], torch.tensor([9])]),
    )
    drafter = ready(DRAFT_MODELS[kind].drafter(head, target), target, text)
    drafter.start()
    drafter.step(torch.tensor([11, 12, 13]), torch.tensor([0, 0, 0]))
    both = drafter.step(torch.tensor([21, 22]), torch.tensor([2, 0]))
    known = target.features(text[None, :-1], after_blocks=drafter.after_blocks)
    states = known.last_hidden[0], None if known.taps is None else known.taps[0]
    for law, path in zip(both, [(13, 21), (11, 22)], strict=True):
        expected = log_laws(head, target.vocab, torch.cat([text, torch.tensor(path)]), *states)[-1]
        torch.testing.assert_close(law, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("kind", "options"), LOADED)
def test_true_features(kind: str, options: dict[str, Any]) -> None:
    """Its law equals that of a drafter that got the whole text at once, after many cycles.

    The target reads each drafted node once.
    """
    target, ids = make_target(), prompts(3)[-1]
    more = options | ({"ids": torch.arange(320)} if kind == "eagle3" else {})
    decoder, text = decoder_of(target, TREES["small"], kind, **more), greedy(target, ids, 24)[0]
    drafter = decoder.proposer.drafter  # type: ignore[union-attr]
    read: list[int] = []
    paths: list[list[int]] = []
    hook = target.decoder.register_forward_pre_hook(
        lambda _, __, keywords: read.append(keywords["input_ids"].shape[1]), with_kwargs=True
    )
    found = steered(decoder, [(ids, text[ids.shape[1] :])], right=True).generate(
        ids,
        do_sample=False,
        max_new_tokens=24,
        on_cycle=lambda cycle: paths.append(cycle.verdict.path),
    )
    hook.remove()
    assert found.sequences[0].tolist() == text
    assert [width - 1 for width in read[1:]] == found.statistics.cycle_nodes
    assert any(path[-1] > len(path) for path in paths)  # the accepted rows are not the first ones
    with torch.inference_mode():
        fresh = ready(DRAFT_MODELS[kind].drafter(drafter.head, target), target, found.sequences[0])
        torch.testing.assert_close(drafter.start(), fresh.start(), rtol=1e-4, atol=1e-4)


def test_misfits(tmp_path: Path) -> None:
    target = make_target()
    save_head(make_head(target, "eagle3", after_blocks=(1, 4)), tmp_path / "deep")
    tiny.refused(
        r"states after blocks \(1, 4\), but tiny has only 4 blocks",
        load_head_for,
        target,
        str(tmp_path / "deep"),
    )
    target.generation_config.eos_token_id = [7, 8]
    save_head(make_head(target, "eagle3", ids=torch.tensor([1, 2, 9])), tmp_path / "endless")
    tiny.refused(
        r"none of the target's end-of-turn tokens \[7, 8\] is in the draft vocabulary",
        load_head_for,
        target,
        str(tmp_path / "endless"),
    )
    save_head(make_head(target, "block", block_size=5), tmp_path / "short")
    short = str(tmp_path / "short")
    for method in ("block-tree", "block-chain"):  # their default depth is 7
        cut = check_levels(MethodConfig.of(method), short, "here").tree
        assert cut == published_tree(method, levels=4)
        tiny.refused(
            r"here: tree: is 5 levels deep, and .*/short drafts at most 4",
            check_levels,
            MethodConfig.of(method, levels=5),
            short,
            "here",
        )


def load(path: Path, dtype: Any = "float32") -> Target:
    return Target.load(TargetConfig(str(path), dtype=dtype))


def saved(target: Target, directory: Path, **changes: Any) -> str:
    """Saves a head with this target's fingerprint; returns the directory."""
    save_head(
        tiny.head(target.vocab.embedding.float(), **changes), directory, target=target.fingerprint()
    )
    return str(directory)


def test_other_targets(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def warnings(target: Target, head: str) -> list[str]:
        """The warnings about a head, without the loader's progress bars."""
        load_head_for(target, head)
        return [
            line
            for line in capsys.readouterr().err.splitlines()
            if line.startswith(f"warning: {head}: ")
        ]

    own, other = load(tiny.target(tmp_path / "own")), load(tiny.target(tmp_path / "other", seed=1))
    head = saved(own, tmp_path / "head")
    assert warnings(own, head) == []
    (line,) = warnings(other, head)
    assert (
        "made for a target with other weight files than" in line
        and "give the head's own target" in line
    )
    assert own.fingerprint() in line
    save_head(tiny.head(own.vocab.embedding.float()), tmp_path / "nameless")  # it names no target
    assert warnings(other, str(tmp_path / "nameless")) == []
    rope, longest = warnings(
        own, saved(own, tmp_path / "moved", rope_theta=5e5, max_position_embeddings=64)
    )
    assert (
        "rope_theta is 500,000" in rope
        and "max_position_embeddings is 64, its target's 256" in longest
    )
    # the same weights in another precision than the head was trained with are the same target
    for path, trained, used in (
        (tmp_path / "own", "bfloat16", "float32"),
        (tiny.target(tmp_path / "tied", tie_word_embeddings=True), "float32", "bfloat16"),
    ):
        head = saved(load(path, trained), tmp_path / f"{path.name} {trained}")
        assert warnings(load(path, used), head) == []


PROMPT = torch.arange(20, 40)


def made(model: Any) -> Target:
    return Target(model, TargetConfig("made"))


def draft_of(family: str) -> Target:
    """A small LM; of mistral and gemma2 every layer, or every other one, has a window."""
    return made(small_model(AutoConfig.for_model(family), vocab_size=320))


def drafter_of(draft: Target, vocab_size: int = 320) -> DraftLMDrafter:
    return DraftLMDrafter(draft, made(tiny.llama(vocab_size=vocab_size, num_blocks=1, seed=1)))


def after_prompt(drafter: DraftLMDrafter, first: int = 50) -> list[int]:
    """(the drafter after a prompt and the answer's first token, both as one text)."""
    drafter.reset(PROMPT, KeptRows(128, PROMPT.device, torch.float32), 8)
    drafter.commit(torch.cat([PROMPT[1:], torch.tensor([first])]), torch.zeros(len(PROMPT), 32))
    return [*PROMPT.tolist(), first]


def assert_law(law: Tensor, draft: Target, text: list[int]) -> None:
    """Asserts that law is log q [Vd] after the text, by the model's own forward without a cache."""
    logits = draft.model(torch.tensor([text])).logits[0, -1, : len(law)]
    torch.testing.assert_close(law, logits.log_softmax(-1), rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2"])
@pytest.mark.parametrize("path", [[], [2], [1, 3], [1, 3, 4], [0, 0, 0]])  # the rows of each level
@torch.inference_mode()
def test_laws_of_trees(family: str, path: list[int]) -> None:
    draft = draft_of(family)
    drafter = drafter_of(draft)
    text = after_prompt(drafter)
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
@torch.inference_mode()
def test_forwards(accepted: int, read: int) -> None:
    draft = draft_of("llama")
    drafter = drafter_of(draft)
    after_prompt(drafter)
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
@torch.inference_mode()
def test_padded_vocabularies(vocab_size: int) -> None:
    draft = draft_of("llama")
    drafter = drafter_of(draft, vocab_size)
    text = after_prompt(drafter)
    law = drafter.start()[0]
    assert law.shape == (min(320, vocab_size),)
    assert_law(law, draft, text)
    drafter.commit(
        torch.tensor([vocab_size - 1])
    )  # an id from the target's padding, if its vocabulary is larger
    assert drafter.start().isfinite().all()


@torch.inference_mode()
def test_loading(
    tmp_path: Path,
) -> None:
    target = Target.load(TargetConfig(str(tiny.target(tmp_path / "target")), dtype="bfloat16"))
    padded = tiny.target(tmp_path / "padded", num_blocks=2)
    tiny.llama(vocab_size=336, num_blocks=2).save_pretrained(padded)
    drafter = DraftLMDrafter(load_draft_lm(target, str(padded)), target)
    assert drafter.draft.dtype == torch.bfloat16 and drafter.draft.num_blocks == 2
    after_prompt(drafter)
    assert drafter.start().shape == (1, 320)
    small = tiny.target(tmp_path / "small", num_blocks=2)
    tiny.llama(vocab_size=300, num_blocks=2).save_pretrained(small)
    tiny.refused(
        r"has 300 token embeddings, and .*target has tokens beyond them",
        load_draft_lm,
        target,
        str(small),
    )
    text = (padded / "tokenizer.json").read_text(encoding="utf-8")
    (padded / "tokenizer.json").write_text(text.replace("<|system|>", "<|tool|>"), encoding="utf-8")
    tiny.refused(
        r"token '<\|tool\|>' has id 2 in its tokenizer, and another in that of .*target",
        load_draft_lm,
        target,
        str(padded),
    )
