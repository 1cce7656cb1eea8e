"""The EAGLE-3 head: the published tensors, its layer against plain formulas and transformers' Qwen3, its switches."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

from aerie.configs.errors import UserError
from aerie.configs.schema.target_and_head import Eagle3Section
from aerie.model.checkpoint import load_head, new_head, save_head
from aerie.model.heads.eagle import DraftVocabulary, Eagle3Head, EagleDraft
from aerie.model.layers import KeyValueBuffer, UnrollMemory
from tests import tiny
from tests.model.formats.published import EAGLE3, TAPS, eagle3


def test_a_head_has_exactly_the_published_keys_and_shapes_and_an_embedding_only_where_it_is_its_own(
    tmp_path: Path,
) -> None:
    one, weights, again = eagle3(), tmp_path / "head/model.safetensors", tmp_path / "again"
    save_head(one, tmp_path / "head")
    state = load_file(weights)
    assert {name: tuple(value.shape) for name, value in state.items()} == EAGLE3
    assert state["d2t"].dtype == torch.int64 and state["t2d"].dtype == torch.bool
    for own, kept in ((tiny.vocab().embedding.clone(), False), (tiny.vocab(seed=1).embedding, True)):
        save_file({**state, "embed_tokens.weight": own}, weights)
        loaded: Any = load_head(tmp_path / "head", vocab=tiny.vocab())
        assert torch.equal(loaded.embed_tokens.weight, own) and loaded.saves_embedding == kept
        save_head(loaded, again)
        assert ("embed_tokens.weight" in load_file(again / "model.safetensors")) == kept


def test_a_head_of_another_width_trains_its_own_embedding() -> None:
    one = tiny.eagle3_head(tiny.vocab(hidden_size=48).embedding, hidden_size=32, head_dim=8)
    assert one.embed_tokens.weight.requires_grad and one.fc.weight.shape == (32, 2 * 48)


def expected_output(made: Eagle3Head, tokens: Tensor, taps: Tensor) -> tuple[Tensor, Tensor]:
    """(output before the final norm [T, D], logits [T, Vd]) from the definition of the layer."""
    eps, layer = made.config.rms_norm_eps, made.midlayer

    def normed(x: Tensor, weight: Tensor) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight

    h = taps @ made.fc.weight.T
    e = made.embed_tokens.weight[tokens]
    x = torch.cat([normed(e, layer.input_layernorm.weight), normed(h, layer.hidden_norm.weight)], dim=-1)
    h = h + layer.self_attn(x[None], made.rotary.between(0, len(tokens), x))[0]  # as Llama's: test_layers
    x = normed(h, layer.post_attention_layernorm.weight)
    gate, up, down = (getattr(layer.mlp, name).weight for name in ("gate_proj", "up_proj", "down_proj"))
    h = h + (F.silu(x @ gate.T) * (x @ up.T)) @ down.T
    return h, normed(h, made.norm.weight) @ made.lm_head.weight.T


def slots() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(0, 320, (1, 7), generator=generator)
    return tokens, torch.randn(1, 7, 3 * 32, generator=generator), torch.arange(7)[None]


@torch.no_grad()
@pytest.mark.parametrize("changes", [{}, {"num_hidden_layers": 3}, {"norm_output": True, "qk_norm": True}])
def test_whole_sequence_buffered_and_unrolled_forwards_are_the_definition(changes: dict[str, Any]) -> None:
    made = eagle3(**changes)
    tokens, taps, positions = slots()
    features = made.fuse(taps)
    whole = made(tokens, features, positions)
    if not changes:
        hidden, logits = expected_output(made, tokens[0], taps[0])
        torch.testing.assert_close(whole[0], hidden, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(made.logits(whole)[0], logits, rtol=1e-4, atol=1e-4)
    mask = torch.ones(7, 7, dtype=torch.bool).tril()
    memories = [UnrollMemory() for _ in range(made.config.num_hidden_layers)]
    unrolled = made.unroll(tokens, features, positions, memories)
    torch.testing.assert_close(unrolled, whole, rtol=1e-4, atol=1e-4)
    draft = EagleDraft(made)
    buffers = [KeyValueBuffer.allocate(1, made.config, 16, features) for _ in range(made.config.num_hidden_layers)]
    for first, last in ((0, 4), (4, 7)):
        part = slice(first, last)
        seen = torch.zeros(last - first, last).masked_fill(~mask[part, :last], float("-inf"))[None, None]
        out = draft(tokens[:, part], features[:, part], (first, last), seen, buffers)
        for buffer in buffers:
            buffer.length = last
        torch.testing.assert_close(out, whole[:, part], rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_norm_output_feeds_back_the_normed_state_and_fc_norm_norms_each_fused_feature_alone() -> None:
    plain, normed, made = eagle3(), eagle3(norm_output=True), eagle3(fc_norm=True)
    normed.load_state_dict(plain.state_dict())
    tokens, taps, positions = slots()
    before, after = (one(tokens, one.fuse(taps), positions) for one in (plain, normed))
    torch.testing.assert_close(after, plain.norm(before))
    torch.testing.assert_close(normed.logits(after), plain.logits(before))
    assert not torch.allclose(after, before, atol=1e-2)
    weights = [made.state_dict()[f"fc_norm.{i}.weight"] for i in range(3)]
    pieces = [F.rms_norm(taps[..., 32 * i : 32 * i + 32], (32,), weights[i], 1e-6) for i in range(3)]
    torch.testing.assert_close(made.fuse(taps), torch.cat(pieces, dim=-1) @ made.fc.weight.T)
    assert {f"fc_norm.{i}.weight" for i in range(3)} == made.state_dict().keys() - plain.state_dict().keys()


def test_an_lm_head_started_from_the_target_has_its_rows_of_the_draft_vocabulary() -> None:
    target, vocab = tiny.llama(num_blocks=8), tiny.vocab()
    vocabulary = DraftVocabulary.of_ids(torch.arange(5, 320, 2), 320)
    taken, own = (
        new_head(section, target.config, vocab, seed=1, after_blocks=TAPS, vocabulary=vocabulary).state_dict()
        for section in (Eagle3Section(lm_head_init="target"), Eagle3Section())
    )
    assert torch.equal(taken["lm_head.weight"], vocab.lm_head[5::2])
    assert torch.equal(taken["fc.weight"], own["fc.weight"])  # nothing else moved


def test_a_head_with_one_of_its_two_tables_is_refused(tmp_path: Path) -> None:
    save_head(eagle3(ids=torch.arange(320)), tmp_path)  # without either it has the whole vocabulary
    state = load_file(tmp_path / "model.safetensors")
    save_file({name: state[name] for name in state if name != "d2t"}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match="one of d2t and t2d"):
        load_head(tmp_path, vocab=tiny.vocab())


# The draft vocabulary: most frequent tokens, ties by id, forced ones always in, and the published form of it.

COUNTS = np.array([0, 5, 2, 9, 2, 2, 0])
SOME = DraftVocabulary.of_ids(torch.tensor([9, 2, 5]), 12)


@pytest.mark.parametrize(
    ("forced", "expected"),
    [((), [1, 2, 3]), ({6, 0}, [0, 3, 6])],  # ties go to the smaller id
)
def test_the_most_frequent_tokens_and_forced_ones_are_in(forced: Any, expected: Any) -> None:
    vocabulary = DraftVocabulary.most_frequent(COUNTS, 3, forced)
    assert vocabulary.ids.tolist() == expected
    assert vocabulary.coverage(COUNTS) == COUNTS[expected].sum() / COUNTS.sum()


def test_d2t_holds_offsets_t2d_marks_the_same_tokens() -> None:
    assert SOME.d2t.tolist() == [2, 4, 7] and SOME.t2d.nonzero().flatten().tolist() == [2, 5, 9]
    assert SOME.target_ids(torch.tensor([[2, 0], [1, 1]])).tolist() == [[9, 2], [5, 5]]
    assert DraftVocabulary.of_tables(SOME.d2t, SOME.t2d, "file").ids.equal(SOME.ids)
