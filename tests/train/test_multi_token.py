"""Laws of the objective of Medusa and Hydra heads: label shifts, keyed dropout, and tau counted by hand."""

from typing import Any

import pytest
import torch
from torch import Tensor

from aerie.configs.schema.train import MultiTokenTrain
from aerie.data.batches import collate
from aerie.data.cache import CachedRow
from aerie.train.objectives import KeyedDropout, MultiTokenObjective
from tests import tiny
from tests.train import unrolls
from tests.train.test_objectives import held_out

VOCAB = tiny.vocab()
HEADS = 3
KINDS: list[tuple[Any, dict[str, Any]]] = [
    ("medusa", {}),
    ("medusa", {"lm_head": "target", "num_layers": 2}),
    ("hydra", {}),
    ("hydra", {"prefix_layer": True, "num_layers": 2}),
]


def objective(kind: Any, noise: float = 0.05, keys: Any = None, **changes: Any) -> MultiTokenObjective:
    head = tiny.multi_token_head(kind, VOCAB, noise, num_heads=HEADS, **(keys or {}))
    settings = {"label_weight": 0.7, "law_weight": 0.3, **changes}
    return MultiTokenObjective(head, VOCAB, MultiTokenTrain(kind=kind, **settings)).train()


def starts(row: CachedRow) -> list[tuple[int, int]]:
    """(k, slot) of every head that is supervised at a slot."""
    return [(k, slot) for slot, alive in unrolls.starts(row) for k in range(min(alive, HEADS))]


def by_hand(head: Any, rows: list[CachedRow]) -> dict[str, float]:
    """Every term, slot by slot."""
    sums = {f"{name}_at_{k + 1}": 0.0 for name in ("label", "law") for k in range(HEADS)}
    with torch.no_grad():
        for row in rows:
            for k, slot in starts(row):
                log_q = unrolls.log_law(head, VOCAB, row, slot, k)
                place = slot + 2 + k
                sums[f"label_at_{k + 1}"] -= log_q[row.input_ids[place]].item()
                law = (row.last_hidden[place - 1] @ VOCAB.lm_head.T).softmax(-1)
                sums[f"law_at_{k + 1}"] -= (law * log_q).sum().item()
    return sums


@pytest.mark.parametrize(("kind", "keys"), KINDS)
def test_head_k_learns_the_token_and_the_law_two_plus_k_after_its_feature(kind: Any, keys: dict[str, Any]) -> None:
    made, rows = objective(kind, keys=keys), tiny.rows(4)
    output = made(collate(rows, range(4)))
    expected = by_hand(made.head, rows)
    assert {name: value.item() for name, (value, _) in output.terms.items()} == pytest.approx(expected, rel=2e-5)
    for k in range(HEADS):
        count = sum(k == head for row in rows for head, _ in starts(row))
        for name, weight in (("label", 0.7), ("law", 0.3)):
            term = f"{name}_at_{k + 1}"
            assert made.weights[term] == pytest.approx(weight * 0.8 ** (k + 1)) and output.terms[term][1] == count > 0
            assert made.counts(collate(rows, range(4)))[term] == count


def test_dropout_belongs_to_seed_epoch_row_and_place_alone_and_not_to_held_out_rows() -> None:
    rows = tiny.rows(2)

    def masks(seed: int, epoch: int, branch: int, place: int) -> Tensor:
        batch = objective("medusa", dropout=0.4, seed=seed).prepare(collate(rows, range(2)), epoch)
        assert batch.seeds is not None
        counts = tuple(batch.supervised().sum(1).tolist())
        return KeyedDropout(0.4, batch.seeds, counts, branch)(torch.ones(sum(counts), 500), place)

    counts = [len(unrolls.starts(row)) for row in rows]
    first = masks(0, 1, 0, 0)
    one, other = first.split(counts)
    assert not one[: min(counts)].equal(other[: min(counts)]) and first.equal(masks(0, 1, 0, 0))
    assert all(not first.equal(masks(*key)) for key in ((1, 1, 0, 0), (0, 2, 0, 0), (0, 1, 1, 0), (0, 1, 0, 1)))
    assert first.unique().tolist() == pytest.approx([0.0, 1 / 0.6])
    assert (first == 0).float().mean().item() == pytest.approx(0.4, abs=0.02)
    plain, dropped = objective("medusa"), objective("medusa", dropout=0.4)
    losses = [made(made.prepare(collate(rows, range(2)), 0)).total(made.weights).item() for made in (plain, dropped)]
    assert abs(losses[0] - losses[1]) > 1e-3 * losses[0] and held_out(plain, rows) == held_out(dropped, rows)
