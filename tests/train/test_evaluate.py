"""The parallel unroll against drafting step by step, and the predicted tau against counting by hand."""

import pytest
import torch
from torch import Tensor

from aerie.configs.schema.train import TrainConfig
from aerie.data.batches import collate
from aerie.data.cache import CachedRow
from aerie.model.heads.eagle import Eagle1Head
from aerie.model.layers import KeyValueBuffer, UnrollMemory
from aerie.train.evaluate import chain_hits, evaluate, likeliest, target_choices
from aerie.train.log import means
from aerie.train.objectives.eagle import Eagle1Objective
from tests import tiny

ENDS = tiny.ends()
STEPS = 4


def _unrolled(head: Eagle1Head, ids: Tensor, features: Tensor, shift: int = 1) -> Tensor:
    """[STEPS, T] outputs of all slots at once; shift 0 forgets that a step moves its position."""
    slots = len(ids) - STEPS
    start = torch.arange(slots)
    mask = (start[:, None] >= start)[None, None]
    memories = [UnrollMemory() for _ in head.layers]
    outputs, x = [], features[None, :slots]
    for step in range(STEPS):
        tokens = ids[None, 1 + step : 1 + step + slots]
        x = head.unroll(tokens, x, (start + shift * step)[None], mask, memories)
        outputs.append(x[0])
    return torch.stack(outputs)


def _drafted(head: Eagle1Head, ids: Tensor, features: Tensor, slot: int) -> Tensor:
    """[STEPS, D]: the prefix with true features, then the head's own outputs with the conversation's tokens."""
    buffers = [KeyValueBuffer.allocate(1, head.config.sizes(), 64, features) for _ in head.layers]
    draft = head.fused()
    outputs, x, first, count = [], features[None, : slot + 1], 0, slot + 1
    for _ in range(STEPS):
        end = first + count
        mask = torch.full((count, end), float("-inf")).triu_(first + 1)[None, None]
        x = draft(ids[None, first + 1 : end + 1], x, (first, end), mask, buffers)[:, -1:]
        for buffer in buffers:
            buffer.length = end
        outputs.append(x[0, 0])
        first, count = end, 1
    return torch.stack(outputs)


@pytest.mark.parametrize("layers", [1, 2])
def test_unrolling_all_slots_at_once_is_drafting_step_by_step(layers: int) -> None:
    head = tiny.head(ENDS.embedding, scale=15.0, num_hidden_layers=layers).eval()
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 320, (12,), generator=generator)
    features = torch.randn(12, 32, generator=generator)
    with torch.no_grad():
        unrolled, unshifted = _unrolled(head, ids, features), _unrolled(head, ids, features, shift=0)
        for slot in (0, 3, 7):
            drafted = _drafted(head, ids, features, slot)
            scale = drafted.abs().max()
            assert (unrolled[:, slot] - drafted).abs().max() < 1e-5 * scale
            assert (unshifted[1:, slot] - drafted[1:]).abs().max() > 1e-3 * scale  # the check sees a lost position
            assert (_drafted(head, ids.roll(1), features, slot) - drafted).abs().max() > 1e-2 * scale


def test_predicted_tau_is_one_plus_the_mean_run_of_hits() -> None:
    head, rows = tiny.head(ENDS.embedding, scale=15.0).eval(), tiny.rows(5)
    # features whose laws the head hits now and then: its own predictions mixed in
    config = TrainConfig(eval_depths=STEPS)
    runs, hits_at = [], [[0, 0] for _ in range(STEPS)]
    with torch.no_grad():
        rows = [_with_own_predictions(head, row) for row in rows]
        for row in rows:
            turns = row.turns.tolist()
            for slot in range(len(turns) - 2):
                if turns[slot + 1] == 0 or turns[slot + 1] != turns[slot + 2]:
                    continue
                run, alive = 0, 1
                x = _draft_from(head, row.input_ids, row.last_hidden, slot)
                for step in range(STEPS):
                    goal = slot + 2 + step
                    if goal >= len(turns) or turns[goal] != turns[slot + 1]:
                        break
                    hit = int(ENDS.logits(x[step]).argmax() == ENDS.logits(row.last_hidden[goal - 1]).argmax())
                    hits_at[step][0] += hit
                    hits_at[step][1] += 1
                    alive *= hit
                    run += alive
                runs.append(run)
    reduce = lambda sums, _: means(sums, torch.device("cpu"))  # noqa: E731
    found = evaluate(head, Eagle1Objective(ENDS, config), rows, 2, (0, 1), lambda batch: batch, reduce)
    assert 0 < sum(runs) < STEPS * len(runs)  # neither all hits nor none
    assert found["predicted_tau"] == pytest.approx(1 + sum(runs) / len(runs), abs=1e-6)
    for step, (hit, count) in enumerate(hits_at):
        assert found[f"accuracy_at_{step + 1}"] == pytest.approx(hit / count, abs=1e-6)


def _with_own_predictions(head: Eagle1Head, row: CachedRow) -> CachedRow:
    """The row with two of three features replaced by what the head predicts for them."""
    features = row.last_hidden.clone()
    for position in range(1, len(features)):
        if position % 3:
            predicted = head(
                row.input_ids[None, 1 : position + 1], features[None, :position], torch.arange(position)[None]
            )
            features[position] = predicted[0, -1]
    return CachedRow(row.input_ids, row.turns, features, None, row.number)


def _draft_from(head: Eagle1Head, ids: Tensor, features: Tensor, slot: int) -> Tensor:
    padded = torch.cat([ids, ids.new_zeros(STEPS)])
    return _drafted(head, padded, features, slot)


def test_a_chain_counts_only_while_its_turn_lasts() -> None:
    head, batch = tiny.head(ENDS.embedding), collate(tiny.rows(3), [0, 1, 2])
    assert batch.features is not None
    choose = lambda states: likeliest(ENDS.logits, states, 7)  # noqa: E731
    with torch.no_grad():
        hits, alive = chain_hits(head, batch, batch.features[:, :-1], target_choices(batch, choose), choose, STEPS)
    for step in range(STEPS):
        assert alive[step].bool().equal(batch.supervised(step)[:, :-1])
    assert not (hits * (1 - alive)).any()
