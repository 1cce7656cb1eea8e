"""Laws of the objective of Medusa and Hydra heads: label shifts, keyed dropout, and tau counted by hand."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from aerie.configs.schema.train import MultiTokenTrain
from aerie.data.batches import collate
from aerie.data.cache import CachedRow
from aerie.train.objectives import KeyedDropout, MultiTokenObjective
from tests import tiny
from tests.train.test_eagle import held_out

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


def log_law(head: Any, row: CachedRow, slot: int, index: int) -> Tensor:
    """log q [V] of one head at one slot, asked of the head as drafting asks it."""
    if head.kind == "medusa":
        head.laws.vocab = VOCAB
        return head(row.last_hidden[slot])[index].log_softmax(-1)
    state = head.prefix(row.last_hidden[None, : slot + 1], (0, slot + 1))[:, -1]
    embeddings = VOCAB.embedding[row.input_ids[slot + 1 : slot + 2 + index]].flatten()[None]
    return head.step(index, state, embeddings)[0].log_softmax(-1)


def starts(row: CachedRow, index: int) -> list[int]:
    """The slots p where t_{p+1} ... t_{p+2+index} are all of one assistant turn."""
    turns = row.turns.tolist()
    spans = [(slot, turns[slot + 1 : slot + 3 + index]) for slot in range(len(turns) - 2 - index)]
    return [slot for slot, span in spans if span[0] and len(set(span)) == 1]


def by_hand(head: Any, rows: list[CachedRow], shift: int = 0) -> dict[str, float]:
    """Every term, slot by slot; shift moves the token and the law that a slot is asked for."""
    sums = {f"{name}_at_{k + 1}": 0.0 for name in ("label", "law") for k in range(HEADS)}
    with torch.no_grad():
        for row in rows:
            for k, slot in [(k, slot) for k in range(HEADS) for slot in starts(row, k)]:  # noqa: B020
                log_q = log_law(head, row, slot, k)
                place = min(slot + 2 + k + shift, len(row.input_ids) - 1)
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
    for shift in (-1, 1):
        off = by_hand(made.head, rows, shift)
        moved = {name: abs(off[name] / expected[name] - 1) for name in expected}
        assert all(max(moved[f"label_at_{k}"], moved[f"law_at_{k}"]) > 1e-2 for k in (1, 2, 3))
    for k in range(HEADS):
        count = sum(len(starts(row, k)) for row in rows)
        for name, weight in (("label", 0.7), ("law", 0.3)):
            term = f"{name}_at_{k + 1}"
            assert made.weights[term] == pytest.approx(weight * 0.8 ** (k + 1)) and output.terms[term][1] == count > 0
            assert made.counts(collate(rows, range(4)))[term] == count


def test_a_hydra_head_is_told_the_tokens_that_were_drafted_and_a_medusa_head_is_not() -> None:
    row = tiny.rows(1)[0]
    slot = starts(row, HEADS - 1)[0]
    for kind, matters in (("medusa", False), ("hydra", True)):
        head = objective(kind).head
        for index in range(HEADS):
            for place in range(slot + 1, slot + 2 + index):
                ids = row.input_ids.clone()
                ids[place] += 1
                before, after = log_law(head, row, slot, index), log_law(head, replace(row, input_ids=ids), slot, index)
                assert before.equal(after) != matters


def test_dropout_belongs_to_seed_epoch_row_and_place_alone_and_not_to_held_out_rows() -> None:
    rows = tiny.rows(2)

    def masks(seed: int, epoch: int, branch: int, place: int) -> Tensor:
        batch = objective("medusa", dropout=0.4, seed=seed).prepare(collate(rows, range(2)), epoch)
        assert batch.seeds is not None
        counts = tuple(batch.supervised().sum(1).tolist())
        return KeyedDropout(0.4, batch.seeds, counts, branch)(torch.ones(sum(counts), 500), place)

    counts = [len(starts(row, 0)) for row in rows]
    first = masks(0, 1, 0, 0)
    one, other = first.split(counts)
    assert not one[: min(counts)].equal(other[: min(counts)]) and first.equal(masks(0, 1, 0, 0))
    assert all(not first.equal(masks(*key)) for key in ((1, 1, 0, 0), (0, 2, 0, 0), (0, 1, 1, 0), (0, 1, 0, 1)))
    assert first.unique().tolist() == pytest.approx([0.0, 1 / 0.6])
    assert (first == 0).float().mean().item() == pytest.approx(0.4, abs=0.02)
    plain, dropped = objective("medusa"), objective("medusa", dropout=0.4)
    losses = [made(made.prepare(collate(rows, range(2)), 0)).total(made.weights).item() for made in (plain, dropped)]
    assert abs(losses[0] - losses[1]) > 1e-3 * losses[0] and held_out(plain, rows) == held_out(dropped, rows)


@pytest.mark.parametrize(("kind", "keys"), KINDS)
def test_predicted_tau_is_one_plus_the_mean_run_of_hits(kind: Any, keys: dict[str, Any]) -> None:
    made, rows, runs = objective(kind, 0.02, keys), [], []
    generator = torch.Generator().manual_seed(5)
    for row in tiny.rows(6):  # conversations whose features repeat, so that heads hit now and then
        features = row.last_hidden[torch.randint(0, 2, (len(row.input_ids),), generator=generator)]
        rows.append(replace(row, last_hidden=4 * features))
    hits_at: list[list[int]] = [[] for _ in range(HEADS)]
    with torch.no_grad():
        for row in rows:
            for slot in starts(row, 0):
                run = []
                for k in range(HEADS):
                    if slot not in starts(row, k):
                        break
                    choice = (row.last_hidden[slot + 1 + k] @ VOCAB.lm_head.T).argmax()
                    run.append(int(log_law(made.head, row, slot, k).argmax() == choice))
                    hits_at[k].append(run[-1])
                runs.append([*run, 0].index(0))
    found = held_out(made, rows)
    assert kind == "hydra" or 0 < sum(runs) < HEADS * len(runs)  # neither all hits nor none
    assert found["predicted_tau"] == pytest.approx(1 + sum(runs) / len(runs), abs=1e-6)
    for k, hits in enumerate(hits_at):
        assert found[f"accuracy_at_{k + 1}"] == pytest.approx(sum(hits) / len(hits), abs=1e-6)
