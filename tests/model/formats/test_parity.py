"""Exports load in speculators 0.9.0 itself, which is no dependency, and have our laws there.

Run it in an environment of its own (pip install speculators==0.9.0 accelerate==1.15.0 pytest; no
torchaudio)."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from aerie.configs.schema.heads import BlockTrain
from aerie.data.batches import Batch
from aerie.model.checkpoint import save_head
from aerie.model.export import export
from aerie.model.formats.content import TargetFacts
from aerie.model.heads.eagle import Eagle3Head
from aerie.model.unrolled_attention import UnrollMemory
from aerie.train.block_objective import BlockObjective
from tests import tiny
from tests.model.formats import published

speculators = pytest.importorskip(
    "speculators", reason="speculators is not installed; that it loads our export is not checked"
)
STEPS, LENGTH = 3, 24


@pytest.fixture(scope="module")
def target(tmp_path_factory: Any) -> TargetFacts:
    return TargetFacts.load(str(tiny.target(tmp_path_factory.mktemp("target"), num_blocks=8)))


def _drafted(head: Eagle3Head, taps: torch.Tensor, ids: torch.Tensor) -> list[torch.Tensor]:
    """Draft ids of STEPS unroll steps at every slot; later steps get the true tokens, and zeros
    after the end."""
    memories = [
        UnrollMemory((LENGTH,), torch.arange(LENGTH)) for _ in range(head.config.num_hidden_layers)
    ]
    features, tokens, drafted = head.fuse(taps), ids, []
    for step in range(STEPS):
        features = head(tokens, features, torch.arange(LENGTH)[None] + step, memories)
        drafted.append(head.logits(features).argmax(-1))
        tokens = torch.cat([tokens[:, 1:], tokens.new_zeros(1, 1)], dim=1)
    return drafted


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        *(
            {},
            {"norm_before_residual": True},
            {"norm_before_fc": True},
            {"qk_norm": True, "num_hidden_layers": 2},
        ),
        *({"fc_norm": True, "norm_output": True}, {"ids": torch.arange(320)}),
        {"fc_norm": True, "norm_output": True, "norm_before_residual": True},
    ],
)
def test_speculators_eagle3(target: TargetFacts, tmp_path: Path, changes: dict[str, Any]) -> None:
    """The exported directory loads in speculators with every tensor and drafts the same tokens."""
    head = published.eagle3(**changes)
    head.embed_tokens.weight.data.copy_(target.vocab.embedding)
    save_head(head, tmp_path / "head")
    export(tmp_path / "head", "speculators", tmp_path / "out", target)
    config = speculators.SpeculatorModelConfig.from_pretrained(tmp_path / "out")
    config.transformer_layer_config._attn_implementation = "sdpa"
    theirs = speculators.SpeculatorModel.from_pretrained(tmp_path / "out", config=config).eval()
    written, loaded = load_file(tmp_path / "out" / "model.safetensors"), theirs.state_dict()
    for name, value in written.items():
        assert loaded[name].dtype == value.dtype and torch.equal(loaded[name], value), name
    assert loaded.keys() - written.keys() <= {
        "verifier_lm_head.weight",
        "verifier_norm.weight",
        "d2t",
        "t2d",
    }
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(5, 320, (1, LENGTH), generator=generator)
    taps = torch.randn(1, LENGTH, 3 * 32, generator=generator)
    with torch.no_grad():
        documents = torch.zeros(1, LENGTH, dtype=torch.long)
        expected = theirs(
            hidden_states=taps, input_ids=ids, document_ids=documents, ttt_steps=STEPS
        )
        ours = _drafted(head, taps, ids)
        for step in range(STEPS):
            assert torch.equal(ours[step], expected[step]), step
        assert len({int(token) for step in ours for token in step[0]}) > 10  # not constant
        head.config = type(head.config)(
            **{**vars(head.config), "norm_output": not head.config.norm_output}
        )
        other = _drafted(head, taps, ids)  # the check notices another head
    assert any(not torch.equal(other[step], expected[step]) for step in range(STEPS))


@pytest.mark.slow
@pytest.mark.parametrize(
    "keys",
    [
        {"markov_rank": 0},
        {"markov_rank": 5, "sample_from_anchor": True},
        {"markov_rank": 5, "markov_head": "gated", "num_hidden_layers": 2},
    ],
)
def test_speculators_block(target: TargetFacts, tmp_path: Path, keys: dict[str, Any]) -> None:
    """Block heads have the laws losses and gradients of speculators."""
    eager: Any = pytest.importorskip("speculators.losses.eager")
    size, (first, last), generator = 4, (6, 19), torch.Generator().manual_seed(3)
    head: Any = tiny.multi_token_head(
        "block", target.vocab, noise=0.2, block_size=size, **keys
    ).train()
    save_head(head, tmp_path / "head")
    export(tmp_path / "head", "speculators", tmp_path / "out", target)
    config = speculators.SpeculatorModelConfig.from_pretrained(tmp_path / "out")
    config.transformer_layer_config._attn_implementation = "sdpa"
    theirs = speculators.SpeculatorModel.from_pretrained(tmp_path / "out", config=config).train()
    ids = torch.randint(5, 320, (1, LENGTH), generator=generator)
    taps, raw = (torch.randn(1, LENGTH, width, generator=generator) for width in (64, 32))
    turn_ids, mask = torch.zeros(1, LENGTH).long(), torch.zeros(1, LENGTH).long()
    turn_ids[:, first : last + 1] = 1
    # their mask is at a row's own token, ours at the token that the row drafts
    is_shifted = keys.get("sample_from_anchor", False)
    mask[:, first : last + 1 - is_shifted] = 1
    batch = Batch(
        ids, turn_ids, torch.tensor([LENGTH]), (0,), theirs.verifier_norm(raw).detach(), taps
    )
    made = BlockObjective(head, target.vocab, BlockTrain(loss="kl", place_decay=math.exp(-1 / 4)))
    given = {
        "hidden_states": taps,
        "input_ids": ids,
        "loss_mask": mask,
        "verifier_last_hidden_states": raw,
        "document_ids": torch.zeros(1, LENGTH).long(),
        "max_anchors": (count := last + 1 - first),
    }
    # laws
    (anchors, _), places = made.blocks(batch), head.config.num_drafted
    states = head(ids.gather(1, anchors), taps, anchors, target.vocab.embedding)[0]
    before = ids[0, anchors[0, :, None] + torch.arange(places)]
    ours = head.correct(target.vocab.logits(states), before[..., None], states).softmax(
        -1
    )  # [A, K, V]
    hidden, logits, _, _, indices = theirs._backbone_forward(**given)
    hidden, logits = hidden.view(count, size, -1), logits.view(count, size, -1)
    if keys["markov_rank"]:
        tokens = ids[0, indices].view(count, size)
        tokens = tokens if is_shifted else torch.cat([tokens[:, :1], tokens[:, :-1]], dim=1)
        logits = logits + theirs.markov_head.block_bias(prev_token_ids=tokens, hidden_states=hidden)
    assert (ours - logits.softmax(-1)[: anchors.shape[1], size - places :]).abs().max() < 1e-6
    # losses and gradients
    _, expected, _ = theirs(
        **given,
        loss_config={"kl_div": (eager.kl_div_loss, 1.0)},
        **({"tv_loss_fn": eager.tv_loss} if keys["markov_rank"] else {}),
    )
    scales = {name: 1.0 / int(number) for name, number in made.counts(batch).items()}
    found = made(batch).total(made.weights, scales)
    assert found.item() == pytest.approx(expected.item(), rel=1e-5)
    found.backward()
    expected.backward()
    gradients = dict(theirs.named_parameters())
    for name, parameter in head.named_parameters():
        other = gradients[name].grad
        assert (
            parameter.grad is not None and (parameter.grad - other).norm() <= 1e-5 * other.norm()
        ), name
