"""EAGLE's objectives against plain forms: slot by slot, drafting step by step, counting by hand."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from aerie.configs.schema.train import Eagle1Train, Eagle3Train
from aerie.data.batches import collate
from aerie.data.cache import CachedRow
from aerie.model.heads.eagle import Eagle3Head
from aerie.train.objectives import Eagle1Objective, Eagle3Objective, Objective
from tests import tiny
from tests.train import unrolls

VOCAB = tiny.vocab()
STEPS = 4
PLAIN = Eagle1Train(feature_noise=0.0, eval_depths=STEPS)
CONFIG = Eagle3Train(unroll_steps=STEPS, eval_depths=STEPS)
HEADS: list[dict[str, Any]] = [
    {},
    {"num_hidden_layers": 2},
    {"qk_norm": True, "norm_output": True},
    {"num_key_value_heads": 4, "fc_norm": True},
]


def eagle3(config: Eagle3Train = CONFIG, scale: float = 8.0, **changes: Any) -> Eagle3Objective:
    objective = Eagle3Objective(tiny.eagle3_head(VOCAB.embedding, scale=scale, **changes), VOCAB, config)
    return objective.train()


def sums(objective: Objective, batch: Any) -> Tensor:
    """[K] sums of the terms."""
    return torch.stack([value for value, _ in objective(batch).terms.values()])


def test_eagle1s_terms_are_those_of_each_supervised_slot_alone() -> None:
    row, head = tiny.rows(1)[0], tiny.head(VOCAB.embedding, scale=5.0)
    output = Eagle1Objective(head, VOCAB, PLAIN)(collate([row], [0]))
    turns, feature, classification = row.turns.tolist(), 0.0, 0.0
    for slot in range(len(turns) - 2):
        if turns[slot + 1] and turns[slot + 1] == turns[slot + 2]:
            given = (row.input_ids[None, 1 : slot + 2], row.last_hidden[None, : slot + 1], torch.arange(slot + 1)[None])
            predicted, true = head(*given)[0, -1], row.last_hidden[slot + 1]
            feature += torch.nn.functional.smooth_l1_loss(predicted, true).item()
            law = (true @ VOCAB.lm_head.T).softmax(-1)  # of t_{slot+2}
            classification -= (law * (predicted @ VOCAB.lm_head.T).log_softmax(-1)).sum().item()
    assert output.terms["feature"][0].item() == pytest.approx(feature, rel=1e-5)
    assert output.terms["classification"][0].item() == pytest.approx(classification, rel=1e-5)


def test_noise_is_uniform_and_belongs_to_seed_epoch_and_row_alone() -> None:
    rows, settings = tiny.rows(4, hidden_size=2000), Eagle1Train(feature_noise=0.1)
    vocab = tiny.vocab(20, 2000)

    def noise(numbers: list[int], epoch: int = 1, seed: int = 0) -> Tensor:
        objective = Eagle1Objective(tiny.head(VOCAB.embedding), vocab, replace(settings, seed=seed))
        found = objective.prepare(collate([rows[n] for n in numbers], numbers), epoch).noise
        assert found is not None
        return found

    together, alone, length = noise([0, 1, 2, 3]), noise([2]), len(rows[2].input_ids)
    assert together[2, :length].equal(alone[0]) and not together[2, length:].any()
    assert not together[1, :4].equal(together[2, :4])
    assert not noise([2], epoch=2).equal(alone) and not noise([2], seed=1).equal(alone)
    assert 0.099 < alone.abs().max() <= 0.1 and alone.std().item() == pytest.approx(0.1 / 3**0.5, rel=0.03)


def by_drafting(head: Eagle3Head, rows: list[CachedRow], masked: bool = True) -> list[float]:
    """[K] sums of the loss, each chain drafted on its own with a key/value buffer."""
    found = [0.0] * STEPS
    with torch.no_grad():
        for row in rows:
            for slot, alive in unrolls.starts(row):
                for step, output in enumerate(unrolls.drafted(head, row, slot, min(alive, STEPS))):
                    loss, inside = unrolls.cross_entropy(head, VOCAB, output, row.last_hidden[slot + 1 + step])
                    found[step] += loss if inside or not masked else 0.0
    return found


@pytest.mark.parametrize("changes", HEADS)
def test_the_parallel_unroll_is_drafting_step_by_step(changes: dict[str, Any]) -> None:
    objective, rows = eagle3(**changes), unrolls.rows(4)
    assert sums(objective, collate(rows, range(4))).tolist() == pytest.approx(
        by_drafting(objective.head, rows), rel=1e-5
    )


class Largest(TorchDispatchMode):
    """While it is entered: the most elements of a tensor that was made."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.elements = max([self.elements, *(made.numel() for made in tree_leaves(out) if isinstance(made, Tensor))])
        return out


def test_nothing_as_large_as_all_pairs_of_slots_or_as_the_full_vocabularys_logits_is_ever_made() -> None:
    length, width, generator = 300, 2000, torch.Generator().manual_seed(0)
    vocab, ids = tiny.vocab(width, 32), torch.randint(5, width, (length,), generator=generator)
    states, taps = (torch.randn(length, size, generator=generator) for size in (32, 64))
    batch = collate([CachedRow(ids, (torch.arange(length) >= 40).int(), states, taps, 0)], [0])
    drafted = torch.arange(0, width, 20)
    head = tiny.eagle3_head(vocab.embedding, ids=drafted, scale=4.0, max_position_embeddings=512).train()
    with Largest() as largest:
        sums(Eagle3Objective(head, vocab, replace(CONFIG, loss_chunk_slots=120)), batch).sum().backward()
    assert largest.elements < length * length


def test_the_gradient_flows_through_the_fed_back_outputs() -> None:
    batch, whole, cut = collate(unrolls.rows(2), range(2)), eagle3(), eagle3()
    sums(whole, batch)[-1].backward()
    assert whole.head.fc.weight.grad is not None and whole.head.fc.weight.grad.abs().max() > 1e-4
    unroll = cut.head.unroll
    cut.head.unroll = lambda tokens, x, *rest: unroll(tokens, x.detach(), *rest)  # type: ignore[method-assign]
    sums(cut, batch)[-1].backward()
    assert cut.head.fc.weight.grad is None


def test_choices_outside_the_draft_vocabulary_are_misses_and_stay_in_the_divisor() -> None:
    rows = unrolls.rows(4)
    batch = collate(rows, range(4))
    unmasked = eagle3(replace(CONFIG, mask_outside_vocabulary=False))
    assert sums(unmasked, batch).tolist() == pytest.approx(by_drafting(unmasked.head, rows, False), rel=1e-5)
    output = eagle3()(batch)
    inside, count = output.metrics["in_vocabulary"]
    assert 0 < inside < count == sum(len(unrolls.starts(row)) for row in rows)
    assert all(term[1] == count for term in output.terms.values())
    assert list(map(int, eagle3().counts(batch).values())) == [int(count)] * STEPS
