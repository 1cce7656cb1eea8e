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

# SafeAILab's EAGLE3-LLaMA3.1-Instruct-8B with D 32, I 64, 4 heads, 2 of keys and values, V 320, Vd 107, three taps.
PUBLISHED: dict[str, tuple[int, ...]] = {"d2t": (107,), "t2d": (320,), "fc.weight": (32, 96)}
PUBLISHED |= {f"midlayer.self_attn.{name}_proj.weight": (rows, 64) for name, rows in (("q", 32), ("k", 16), ("v", 16))}
PUBLISHED |= {"midlayer.self_attn.o_proj.weight": (32, 32), "midlayer.mlp.down_proj.weight": (32, 64)}
PUBLISHED |= {"midlayer.mlp.gate_proj.weight": (64, 32), "midlayer.mlp.up_proj.weight": (64, 32)}
NORMS = ("hidden_norm", "input_layernorm", "post_attention_layernorm")
PUBLISHED |= {"norm.weight": (32,), "lm_head.weight": (107, 32), **{f"midlayer.{n}.weight": (32,) for n in NORMS}}
TAPS = (2, 4, 5)


def head(**changes: Any) -> Eagle3Head:
    return tiny.eagle3_head(tiny.vocab().embedding, **{"after_blocks": TAPS, "scale": 6.0, **changes}).eval()


def random_norms(module: torch.nn.Module) -> None:
    generator = torch.Generator().manual_seed(5)
    for parameter in module.parameters():
        if parameter.ndim == 1:  # a norm in the wrong place shows
            parameter.data = 0.5 + torch.rand(parameter.shape, generator=generator)


def test_a_head_has_exactly_the_published_keys_and_shapes_and_an_embedding_only_where_it_is_its_own(
    tmp_path: Path,
) -> None:
    one, weights, again = head(), tmp_path / "head/model.safetensors", tmp_path / "again"
    save_head(one, tmp_path / "head")
    state = load_file(weights)
    assert {name: tuple(value.shape) for name, value in state.items()} == PUBLISHED
    assert state["d2t"].dtype == torch.int64 and state["t2d"].dtype == torch.bool
    for own, kept in ((tiny.vocab().embedding.clone(), False), (tiny.vocab(seed=1).embedding, True)):
        save_file({**state, "embed_tokens.weight": own}, weights)
        loaded: Any = load_head(tmp_path / "head", vocab=tiny.vocab())
        assert torch.equal(loaded.embed_tokens.weight, own) and loaded.saves_embedding == kept
        save_head(loaded, again)
        assert ("embed_tokens.weight" in load_file(again / "model.safetensors")) == kept


def test_a_head_of_another_width_trains_and_saves_its_own_embedding(tmp_path: Path) -> None:
    one = tiny.eagle3_head(tiny.vocab(hidden_size=48).embedding, hidden_size=32, head_dim=8)
    assert one.embed_tokens.weight.requires_grad and one.fc.weight.shape == (32, 2 * 48)
    save_head(one, tmp_path)
    two: Any = load_head(tmp_path)
    assert torch.equal(one.embed_tokens.weight, two.embed_tokens.weight)


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


def slots(count: int = 7, taps: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(0, 320, (1, count), generator=generator)
    return tokens, torch.randn(1, count, taps * 32, generator=generator), torch.arange(count)[None]


@torch.no_grad()
@pytest.mark.parametrize("changes", [{}, {"num_hidden_layers": 3}, {"norm_output": True, "qk_norm": True}])
def test_whole_sequence_buffered_and_unrolled_forwards_are_the_definition(changes: dict[str, Any]) -> None:
    made = head(**changes)
    random_norms(made)
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
    plain, normed, made = head(), head(norm_output=True), head(fc_norm=True)
    random_norms(plain)
    random_norms(made)
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


def test_equal_vocabularies_need_no_tables_in_the_file(tmp_path: Path) -> None:
    save_head(head(ids=torch.arange(320)), tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    save_file({k: v for k, v in state.items() if k not in ("d2t", "t2d")}, tmp_path / "model.safetensors")
    loaded: Any = load_head(tmp_path, vocab=tiny.vocab())
    assert loaded.vocabulary.ids.equal(torch.arange(320))
    save_file({k: v for k, v in state.items() if k != "d2t"}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match="one of d2t and t2d"):
        load_head(tmp_path, vocab=tiny.vocab())


# The draft vocabulary: most frequent tokens, ties by id, forced ones always in, and the published form of it.

COUNTS = np.array([0, 5, 2, 9, 2, 2, 0])
SOME = DraftVocabulary.of_ids(torch.tensor([9, 2, 5]), 12)


@pytest.mark.parametrize(
    ("size", "forced", "expected"),
    [
        (3, (), [1, 2, 3]),  # ties go to the smaller id
        (3, {6, 0}, [0, 3, 6]),
        (8, (), "draft_vocab_size: 8 is larger than the target's vocabulary of 7"),
    ],
)
def test_the_most_frequent_tokens_and_forced_ones_are_in(size: int, forced: Any, expected: Any) -> None:
    if isinstance(expected, str):
        with pytest.raises(UserError, match=expected):
            DraftVocabulary.most_frequent(COUNTS, size, forced)
    else:
        vocabulary = DraftVocabulary.most_frequent(COUNTS, size, forced)
        assert vocabulary.ids.tolist() == expected
        assert vocabulary.coverage(COUNTS) == COUNTS[expected].sum() / COUNTS.sum()


def test_d2t_holds_offsets_t2d_marks_the_same_tokens_and_what_are_no_tables_or_no_ends_are_refused() -> None:
    assert SOME.d2t.tolist() == [2, 4, 7] and SOME.t2d.nonzero().flatten().tolist() == [2, 5, 9]
    assert SOME.target_ids(torch.tensor([[2, 0], [1, 1]])).tolist() == [[9, 2], [5, 5]]
    assert DraftVocabulary.of_tables(SOME.d2t, SOME.t2d, "file").ids.equal(SOME.ids)
    with pytest.raises(UserError, match="file: d2t and t2d name other tokens; d2t holds offsets"):
        DraftVocabulary.of_tables(SOME.ids, SOME.t2d, "file")
    SOME.check_ends([1, 5], "head")
    with pytest.raises(UserError, match="none of the target's end-of-turn tokens"):
        SOME.check_ends([3, 1], "head")
