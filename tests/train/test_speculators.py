"""Parity with vllm-project/speculators 0.9.0, which is not among the dependencies: same weights, same conversation.

Its mask marks the position before the predicted one and knows no turns, so the conversation is one turn after one
token. It is run in an environment of its own that has aerie's dependencies too (pip install speculators==0.9.0).
"""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, Qwen3Config

from aerie.configs.schema.target_and_head import TargetConfig
from aerie.configs.schema.train import Eagle3Train
from aerie.data.batches import collate
from aerie.data.cache import CachedRow
from aerie.model.heads.eagle import Eagle3Head
from aerie.model.target import Target
from aerie.train.objectives.eagle import Eagle3Objective
from tests import tiny

speculators = pytest.importorskip("speculators", reason="speculators is not installed; parity with it is not checked")
STEPS, LENGTH = 4, 24
THEIR_LOSSES = {"kl": "kl_div", "reverse_kl": "rkl", "total_variation": "tv", "lk_hybrid": "lk_hybrid"}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    directory = tmp_path_factory.mktemp("target")
    return Target.load(TargetConfig(path=str(tiny.target(directory, num_blocks=7)), dtype="float32"))


def _row(target: Target) -> tuple[CachedRow, Tensor]:
    """One conversation with the target's states, and its final states before the norm [T, D]."""
    ids = torch.randint(5, 320, (1, LENGTH), generator=torch.Generator().manual_seed(0))
    before: list[Tensor] = []
    with target.decoder.norm.register_forward_pre_hook(lambda module, given: before.append(given[0])):
        found = target.features(ids, None, (2, 3, 4))
    assert found.taps is not None
    turns = torch.ones(LENGTH, dtype=torch.int)
    turns[0] = 0
    return CachedRow(ids[0], turns, found.last_hidden[0].clone(), found.taps[0].clone(), 0), before[0][0].clone()


def _theirs(head: Eagle3Head, target: Target) -> Any:
    """Their model with the head's weights; also what they freeze takes part in the gradient."""
    core = pytest.importorskip("speculators.models.eagle3.core")
    values = {name: value for name, value in target.model.config.to_dict().items() if name != "model_type"}
    flavour = Qwen3Config if head.config.qk_norm else LlamaConfig
    depth, eps = head.config.num_hidden_layers, head.config.rms_norm_eps
    config = flavour(**{**values, "num_hidden_layers": depth, "rms_norm_eps": eps, "head_dim": head.config.head_dim})
    ids = head.vocabulary.ids
    made = core.Eagle3DraftModel.from_training_args(
        config,
        t2d=head.vocabulary.t2d,
        d2t=ids - torch.arange(len(ids)),
        verifier_name_or_path=target.recipe.path,
        draft_vocab_size=len(ids),
        norm_before_residual=False,
        norm_output=head.config.norm_output,
        fc_norm=head.config.fc_norm,
        ttt_steps=STEPS,
        draft_attn_impl="sdpa",
        target_layer_ids=[2, 3, 4],
    )
    renamed = {_their_name(name): p for name, p in head.named_parameters()}
    found = made.load_state_dict(renamed, strict=False)
    assert not found.unexpected_keys and set(found.missing_keys) <= {
        "verifier_norm.weight",
        "verifier_lm_head.weight",
        "d2t",
        "t2d",
    }
    made.lm_head.weight.requires_grad_(True)
    return made.train()


def _their_name(name: str) -> str:
    """The name of a parameter of ours in their model, where all layers are numbered."""
    if name.startswith("layers."):
        _, number, rest = name.split(".", 2)
        return f"layers.{int(number) + 1}.{rest}"
    return name.replace("midlayer.", "layers.0.")


def _their_loss(theirs: Any, row: CachedRow, before_norm: Tensor, loss: str) -> Tensor:
    assert row.taps is not None
    named = pytest.importorskip("speculators.losses").resolve_loss_config(loss, "eager")
    _, expected, _ = theirs(
        hidden_states=row.taps[None, :-1],
        input_ids=row.input_ids[None, 1:],
        document_ids=torch.zeros(1, LENGTH - 1, dtype=torch.long),
        loss_mask=torch.cat([torch.ones(1, LENGTH - 2), torch.zeros(1, 1)], dim=1).bool(),
        position_ids=torch.arange(1, LENGTH)[None],
        verifier_last_hidden_states=before_norm[None, 1:],
        ttt_steps=STEPS,
        ttt_step_loss_decay=0.8,
        loss_config=named,
    )
    assert isinstance(expected, Tensor)
    return expected


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "loss"),
    [
        ({}, "kl"),
        ({"norm_output": True}, "kl"),
        ({"fc_norm": True}, "kl"),
        ({"qk_norm": True}, "kl"),
        ({"num_hidden_layers": 2}, "kl"),
        # theirs renormalise p over the draft vocabulary for every loss, so these need the whole vocabulary
        ({"ids": torch.arange(320)}, "reverse_kl"),
        ({"ids": torch.arange(320)}, "total_variation"),
        ({"ids": torch.arange(320)}, "lk_hybrid"),
    ],
)
def test_loss_and_gradients_are_those_of_speculators(target: Target, changes: dict[str, Any], loss: Any) -> None:
    head = tiny.eagle3_head(target.vocab.embedding, scale=6.0, after_blocks=(2, 3, 4), **changes).train()
    row, before_norm = _row(target)
    theirs = _theirs(head, target)
    expected = _their_loss(theirs, row, before_norm, THEIR_LOSSES[loss])
    expected.backward()
    config = Eagle3Train(unroll_steps=STEPS, loss=loss, mask_outside_vocabulary=False)
    objective, batch = Eagle3Objective(head, target.vocab, config), collate([row], [0])
    output = objective(batch)
    # Theirs divide each step by its own slots.
    scales = {f"loss_at_{k + 1}": 1.0 / int(batch.supervised(k).sum()) for k in range(STEPS)}
    found = output.total(objective.weights, scales)
    found.backward()
    assert found.item() == pytest.approx(expected.item(), rel=1e-5)
    gradients = {_their_name(name): p.grad for name, p in head.named_parameters()}
    compared = 0
    for name, parameter in theirs.named_parameters():
        if parameter.grad is not None:
            ours = gradients[name]
            assert ours is not None and (ours - parameter.grad).norm() <= 1e-5 * parameter.grad.norm(), name
            compared += 1
    assert compared == sum(p.requires_grad for p in head.parameters()) >= 13
    shared = output.total(objective.weights, dict.fromkeys(scales, scales["loss_at_1"]))
    assert abs(shared.item() / expected.item() - 1) > 1e-2  # the check sees another divisor
