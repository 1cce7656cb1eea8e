"""Block heads load in speculators 0.9.0 itself, which is no dependency, and have our laws there.

Run it in an environment of its own (pip install speculators==0.9.0 accelerate==1.15.0 pytest; no
torchaudio)."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from aerie.configs.schema.heads import BlockTrain
from aerie.data.batches import Batch
from aerie.model.checkpoint import save_head
from aerie.model.export import export
from aerie.model.formats.content import TargetFacts
from aerie.train.block_objective import BlockObjective
from tests import tiny

speculators = pytest.importorskip(
    "speculators", reason="speculators is not installed; that it loads our export is not checked"
)
LENGTH = 24


@pytest.fixture(scope="module")
def target(tmp_path_factory: Any) -> TargetFacts:
    return TargetFacts.load(str(tiny.target(tmp_path_factory.mktemp("target"), num_blocks=8)))


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
