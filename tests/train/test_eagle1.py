"""Laws of the EAGLE-1 objective: padding, company and chunks move nothing; only supervised slots count."""

from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from aerie.configs.schema.train import LossName, TrainConfig
from aerie.data.batches import Batch, collate
from aerie.data.cache import CachedRow
from aerie.train.objectives.eagle import Eagle1Objective
from tests import tiny

ENDS = tiny.ends()
CONFIG = TrainConfig(learning_rate=1e-2, warmup_steps=0)


def _gradients(objective: Eagle1Objective, batches: list[Batch]) -> tuple[Tensor, Tensor]:
    """Loss and all gradients in one vector, summed over batches and divided by the supervised slots of all."""
    head = tiny.head(ENDS.embedding, scale=5.0).train()
    count = sum(objective.divisors(batch)["feature"] for batch in batches)
    losses = []
    for batch in batches:
        loss = objective(head, batch).total() / count
        loss.backward()
        losses.append(loss.detach())
    found = [p.grad.flatten() for p in head.parameters() if p.grad is not None]
    return torch.stack(losses).sum(), torch.cat(found)


def _prepared(objective: Eagle1Objective, rows: list[CachedRow], numbers: list[int]) -> Batch:
    return objective.prepare(collate([rows[n] for n in numbers], numbers), epoch=1)


@pytest.mark.parametrize(
    "groups", [[[0], [1], [2], [3], [4], [5], [6], [7]], [[0, 1, 2, 3], [4, 5, 6, 7]], [[7, 0], [5, 2, 1], [6, 3, 4]]]
)
def test_padding_company_and_accumulation_move_neither_loss_nor_gradient(groups: list[list[int]]) -> None:
    objective, rows = Eagle1Objective(ENDS, CONFIG), tiny.rows(8)
    loss, gradient = _gradients(objective, [_prepared(objective, rows, list(range(8)))])
    cut_loss, cut_gradient = _gradients(objective, [_prepared(objective, rows, group) for group in groups])
    assert cut_loss.item() == pytest.approx(loss.item(), rel=1e-6)
    assert (cut_gradient - gradient).norm() <= 1e-6 * gradient.norm()


def test_what_stands_in_padding_is_not_seen() -> None:
    objective, rows = Eagle1Objective(ENDS, CONFIG), tiny.rows(2)
    batch = _prepared(objective, rows, [0, 1])
    assert batch.features is not None
    filled, ids = batch.features.clone(), batch.input_ids.clone()
    for at, length in enumerate(batch.lengths.tolist()):
        filled[at, length:], ids[at, length:] = 1e3, 7
    loss, gradient = _gradients(objective, [batch])
    other_loss, other_gradient = _gradients(objective, [replace(batch, features=filled, input_ids=ids)])
    assert loss.equal(other_loss) and gradient.equal(other_gradient)


def test_features_that_no_supervised_slot_may_use_do_not_matter_and_the_others_do() -> None:
    objective, row = Eagle1Objective(ENDS, CONFIG), tiny.rows(1)[0]
    last = int(torch.as_tensor(row.turns).nonzero().max())  # the turn's end: its feature is neither given nor asked for
    for position, matters in ((last, False), (last - 1, True), (0, True)):
        features = row.last_hidden.clone()
        features[position] += 1.0
        moved = collate([replace(row, last_hidden=features)], [0])
        before, _ = _gradients(objective, [collate([row], [0])])
        after, _ = _gradients(objective, [moved])
        assert (before.item() != after.item()) == matters


def test_noise_belongs_to_seed_epoch_and_row_alone() -> None:
    objective, rows = Eagle1Objective(ENDS, CONFIG), tiny.rows(4)
    together, alone = _prepared(objective, rows, [0, 1, 2, 3]), _prepared(objective, rows, [2])
    length = len(rows[2].input_ids)
    assert together.noise is not None and alone.noise is not None
    assert together.noise[2, :length].equal(alone.noise[0]) and not together.noise[2, length:].any()
    assert not together.noise[1, :4].equal(together.noise[2, :4])
    later = objective.prepare(collate([rows[2]], [2]), epoch=2)
    reseeded = Eagle1Objective(ENDS, replace(CONFIG, seed=1)).prepare(collate([rows[2]], [2]), epoch=1)
    assert later.noise is not None and not later.noise.equal(alone.noise)
    assert reseeded.noise is not None and not reseeded.noise.equal(alone.noise)


def test_noise_is_uniform_with_the_recipes_half_width_and_scales_on_request() -> None:
    row = tiny.rows(1, hidden_size=2000)[0]
    length = len(row.input_ids)
    for scaling, width in ((False, 0.1), (True, 0.1 * 512 / length)):
        config = replace(CONFIG, feature_noise=0.1, noise_length_scaling=scaling)
        noise = Eagle1Objective(ENDS, config).prepare(collate([row], [0]), 0).noise
        assert noise is not None and 0.99 * width < noise.abs().max().item() <= width
        assert noise.std().item() == pytest.approx(width / 3**0.5, rel=0.03) and abs(noise.mean().item()) < 0.02 * width


def test_chunks_of_laws_move_neither_loss_nor_gradient() -> None:
    rows = tiny.rows(6)
    whole, chunked = (Eagle1Objective(ENDS, replace(CONFIG, loss_chunk_slots=chunk)) for chunk in (4096, 5))
    loss, gradient = _gradients(whole, [_prepared(whole, rows, list(range(6)))])
    other_loss, other_gradient = _gradients(chunked, [_prepared(chunked, rows, list(range(6)))])
    assert other_loss.item() == pytest.approx(loss.item(), rel=1e-6)
    assert (other_gradient - gradient).norm() <= 1e-6 * gradient.norm()


def test_terms_are_those_of_each_supervised_slot_alone() -> None:
    row, head = tiny.rows(1)[0], tiny.head(ENDS.embedding, scale=5.0)
    output = Eagle1Objective(ENDS, CONFIG)(head, collate([row], [0]))
    turns, feature, classification = row.turns.tolist(), 0.0, 0.0
    for slot in range(len(turns) - 2):
        if turns[slot + 1] and turns[slot + 1] == turns[slot + 2]:
            given = (row.input_ids[None, 1 : slot + 2], row.last_hidden[None, : slot + 1], torch.arange(slot + 1)[None])
            predicted, true = head(*given)[0, -1], row.last_hidden[slot + 1]
            feature += torch.nn.functional.smooth_l1_loss(predicted, true).item()
            law = (true @ ENDS.lm_head.T).softmax(-1)  # of t_{slot+2}
            classification -= (law * (predicted @ ENDS.lm_head.T).log_softmax(-1)).sum().item()
    assert output.terms["feature"][1].item() == pytest.approx(feature, rel=1e-5)
    assert output.terms["classification"][1].item() == pytest.approx(classification, rel=1e-5)
    assert (output.terms["feature"][0], output.terms["classification"][0]) == (1.0, 0.1)


def test_gradient_checkpointing_moves_no_gradient() -> None:
    objective, batch = Eagle1Objective(ENDS, CONFIG), collate(tiny.rows(3), [0, 1, 2])
    found = []
    for checkpointing in (False, True):
        head = tiny.head(ENDS.embedding, scale=5.0).train()
        head.gradient_checkpointing = checkpointing
        objective(head, batch).total().backward()
        assert head.fc.weight.grad is not None
        found.append(head.fc.weight.grad)
    assert found[0].equal(found[1])


def test_a_process_without_rows_gives_zero_gradients_for_every_trained_weight() -> None:
    objective, head = Eagle1Objective(ENDS, CONFIG), tiny.head(ENDS.embedding)
    objective(head, objective.prepare(collate([], []), 0)).total().backward()
    trained = [p for p in head.parameters() if p.requires_grad]
    assert all(p.grad is not None and not p.grad.any() for p in trained)


def test_overfitting_one_batch_lowers_both_terms_and_the_embedding_stays() -> None:
    objective, head = Eagle1Objective(ENDS, CONFIG), tiny.head(ENDS.embedding)
    batch = collate(tiny.rows(2), [0, 1])
    optimizer = torch.optim.AdamW([p for p in head.parameters() if p.requires_grad], lr=1e-2)
    history = []
    for _ in range(60):
        output = objective(head, batch)
        history.append({name: value.item() for name, (_, value, _) in output.terms.items()})
        optimizer.zero_grad()
        output.total().backward()
        optimizer.step()
    assert history[-1]["feature"] < 0.3 * history[0]["feature"]
    assert history[-1]["classification"] < 0.3 * history[0]["classification"]
    assert head.embed_tokens.weight.equal(ENDS.embedding)


@pytest.mark.parametrize("name", get_args(LossName))
def test_every_loss_between_laws_trains_an_eagle1_head(name: Any) -> None:
    config = replace(CONFIG, loss=name, feature_weight=0.0, classification_weight=1.0, feature_noise=0.0)
    objective, head = Eagle1Objective(ENDS, config), tiny.head(ENDS.embedding, scale=5.0).train()
    batch = _prepared(objective, tiny.rows(2), [0, 1])
    optimizer = torch.optim.AdamW([p for p in head.parameters() if p.requires_grad], lr=5e-3)
    history = []
    for _ in range(20):
        loss = objective(head, batch).total()
        history.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert history[-1] < 0.95 * history[0]
    others = [replace(config, loss=other) for other in get_args(LossName) if other != name]
    head = tiny.head(ENDS.embedding, scale=5.0).train()
    assert all(abs(Eagle1Objective(ENDS, each)(head, batch).total().item() - history[0]) > 1e-3 for each in others)
