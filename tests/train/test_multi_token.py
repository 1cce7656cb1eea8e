"""Laws of the objective of Medusa and Hydra heads: label shifts, and that nothing else moves what is learnt."""

from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from aerie.configs.schema.target_and_head import HeadKind
from aerie.configs.schema.train import LossName, TrainConfig
from aerie.data.batches import Batch, collate
from aerie.data.cache import CachedRow
from aerie.train.evaluate import evaluate
from aerie.train.log import means
from aerie.train.objectives.multi_token import KeyedDropout, MultiTokenModule, MultiTokenObjective
from tests import tiny

ENDS = tiny.ends()
HEADS = 3
CONFIG = TrainConfig(label_weight=0.7, law_weight=0.3, eval_depths=5)
KINDS: list[tuple[HeadKind, dict[str, Any]]] = [
    ("medusa", {}),
    ("medusa", {"lm_head": "target", "num_layers": 2}),
    ("hydra", {}),
    ("hydra", {"prefix_layer": True, "num_layers": 2}),
]


def _module(kind: HeadKind, config: TrainConfig = CONFIG, noise: float = 0.05, **keys: Any) -> MultiTokenModule:
    return MultiTokenModule(tiny.multi_token_head(kind, ENDS, noise, num_heads=HEADS, **keys), config).train()


def _objective(config: TrainConfig = CONFIG) -> MultiTokenObjective:
    return MultiTokenObjective(ENDS, config, HEADS)


def _prepared(rows: list[CachedRow], numbers: list[int], config: TrainConfig = CONFIG, epoch: int = 1) -> Batch:
    return _objective(config).prepare(collate([rows[n] for n in numbers], numbers), epoch)


def _loss_and_gradient(
    batches: list[Batch], kind: HeadKind, config: TrainConfig = CONFIG, **keys: Any
) -> tuple[Tensor, Tensor]:
    """The whole loss and all gradients in one vector, divided as the loop divides."""
    module, objective = _module(kind, config, **keys), _objective(config)
    found = [objective.divisors(batch) for batch in batches]
    scales = {name: 1.0 / max(sum(each[name] for each in found), 1) for name in found[0]}
    loss = torch.stack([objective(module, batch).total(scales) for batch in batches]).sum()
    loss.backward()
    return loss.detach(), torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None])


def _assert_same(found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    assert found[0].item() == pytest.approx(expected[0].item(), rel=2e-6)
    assert (found[1] - expected[1]).norm() <= 2e-6 * expected[1].norm()


def _log_q(head: Any, row: CachedRow, slot: int, index: int) -> Tensor:
    """log q [V] of one head at one slot, asked of the head as drafting asks it."""
    if head.kind == "medusa":
        head.laws.ends = ENDS
        return head(row.last_hidden[slot])[index].log_softmax(-1)
    state = head.prefix(row.last_hidden[None, : slot + 1], (0, slot + 1))[:, -1]
    embeddings = ENDS.embedding[row.input_ids[slot + 1 : slot + 2 + index]].flatten()[None]
    return head.step(index, state, embeddings)[0].log_softmax(-1)


def _starts(row: CachedRow, index: int) -> list[int]:
    """The slots p where t_{p+1} ... t_{p+2+index} are all of one assistant turn."""
    turns = row.turns.tolist()
    spans = [(slot, turns[slot + 1 : slot + 3 + index]) for slot in range(len(turns) - 2 - index)]
    return [slot for slot, span in spans if span[0] and len(set(span)) == 1]


def _by_hand(module: MultiTokenModule, rows: list[CachedRow], shift: int = 0) -> dict[str, float]:
    """Every term, slot by slot; shift moves the token and the law that a slot is asked for."""
    sums = {f"{name}_at_{k + 1}": 0.0 for name in ("label", "law") for k in range(HEADS)}
    with torch.no_grad():
        for row in rows:
            for k in range(HEADS):
                for slot in _starts(row, k):
                    log_q = _log_q(module.head, row, slot, k)
                    place = min(slot + 2 + k + shift, len(row.input_ids) - 1)
                    sums[f"label_at_{k + 1}"] -= log_q[row.input_ids[place]].item()
                    law = (row.last_hidden[place - 1] @ ENDS.lm_head.T).softmax(-1)
                    sums[f"law_at_{k + 1}"] -= (law * log_q).sum().item()
    return sums


@pytest.mark.parametrize(("kind", "keys"), KINDS)
def test_head_k_learns_the_token_and_the_law_two_plus_k_after_its_feature(kind: HeadKind, keys: dict[str, Any]) -> None:
    module, rows = _module(kind, **keys), tiny.rows(4)
    batch = collate(rows, range(4))
    output = _objective()(module, batch)
    found = {name: value.item() for name, (_, value, _) in output.terms.items()}
    expected = _by_hand(module, rows)
    assert found == pytest.approx(expected, rel=2e-5)
    for shift in (-1, 1):
        off = _by_hand(module, rows, shift)
        moved = {name: abs(off[name] / expected[name] - 1) for name in expected}
        assert all(max(moved[f"label_at_{k}"], moved[f"law_at_{k}"]) > 1e-2 for k in (1, 2, 3))
    for k in range(HEADS):
        count = sum(len(_starts(row, k)) for row in rows)
        for name, weight in (("label", 0.7), ("law", 0.3)):
            term = output.terms[f"{name}_at_{k + 1}"]
            assert term[0] == pytest.approx(weight * 0.8 ** (k + 1)) and int(term[2]) == count > 0
            assert _objective().divisors(batch)[f"{name}_at_{k + 1}"] == count


def test_a_hydra_head_is_told_the_tokens_that_were_drafted_and_a_medusa_head_is_not() -> None:
    row = tiny.rows(1)[0]
    slot = _starts(row, HEADS - 1)[0]
    for kind, matters in (("medusa", False), ("hydra", True)):
        module = _module(kind)  # type: ignore[arg-type]
        for index in range(HEADS):
            for place in range(slot + 1, slot + 2 + index):
                ids = row.input_ids.clone()
                ids[place] += 1
                before, after = (
                    _log_q(module.head, replace(row, input_ids=each), slot, index) for each in (row.input_ids, ids)
                )
                assert before.equal(after) != matters


@pytest.mark.parametrize("groups", [[[0], [1], [2], [3], [4], [5]], [[5, 0], [3, 2, 1], [4]]])
@pytest.mark.parametrize("kind", ["medusa", "hydra"])
def test_padding_company_and_accumulation_move_neither_loss_nor_gradient(
    kind: HeadKind, groups: list[list[int]]
) -> None:
    config, rows = replace(CONFIG, dropout=0.3), tiny.rows(6)
    keys = {"prefix_layer": True} if kind == "hydra" else {}
    whole = _loss_and_gradient([_prepared(rows, list(range(6)), config)], kind, config, **keys)
    cut = _loss_and_gradient([_prepared(rows, group, config) for group in groups], kind, config, **keys)
    _assert_same(cut, whole)


@pytest.mark.parametrize("kind", ["medusa", "hydra"])
@pytest.mark.parametrize("changes", [{"loss_chunk_slots": 7}, {"gradient_checkpointing": True}], ids=str)
def test_chunks_and_recomputation_move_neither_loss_nor_gradient(kind: HeadKind, changes: dict[str, Any]) -> None:
    config = replace(CONFIG, dropout=0.2)
    batch = _prepared(tiny.rows(6), list(range(6)), config)
    whole = _loss_and_gradient([batch], kind, config)
    _assert_same(_loss_and_gradient([batch], kind, replace(config, **changes)), whole)


def test_what_stands_in_padding_is_not_seen() -> None:
    batch = _prepared(tiny.rows(2), [0, 1])
    assert batch.features is not None
    filled, ids = batch.features.clone(), batch.input_ids.clone()
    for at, length in enumerate(batch.lengths.tolist()):
        filled[at, length:], ids[at, length:] = 1e3, 7
    found = [
        _loss_and_gradient([each], "hydra", prefix_layer=True)
        for each in (batch, replace(batch, features=filled, input_ids=ids))
    ]
    assert found[0][0].equal(found[1][0]) and found[0][1].equal(found[1][1])


def test_dropout_belongs_to_seed_epoch_row_and_place_alone() -> None:
    config, rows = replace(CONFIG, dropout=0.4), tiny.rows(2)

    def masks(seed: int, epoch: int, branch: int, place: int) -> Tensor:
        batch = _prepared(rows, [0, 1], replace(config, seed=seed), epoch)
        drop = KeyedDropout.of(batch, batch.supervised(), 0.4, branch)
        assert drop is not None
        return drop(torch.ones(sum(drop.counts), 500), place)

    counts = [len(_starts(row, 0)) for row in rows]
    first = masks(0, 1, 0, 0)
    one, other = first.split(counts)
    assert not one[: min(counts)].equal(other[: min(counts)])
    assert first.equal(masks(0, 1, 0, 0))
    assert all(not first.equal(masks(*key)) for key in ((1, 1, 0, 0), (0, 2, 0, 0), (0, 1, 1, 0), (0, 1, 0, 1)))
    assert first.unique().tolist() == pytest.approx([0.0, 1 / 0.6])
    assert (first == 0).float().mean().item() == pytest.approx(0.4, abs=0.02)


def test_dropout_changes_training_and_not_the_held_out_measures() -> None:
    config, rows = replace(CONFIG, dropout=0.4), tiny.rows(4)
    plain = _loss_and_gradient([_prepared(rows, [0, 1, 2, 3])], "medusa")
    dropped = _loss_and_gradient([_prepared(rows, [0, 1, 2, 3], config)], "medusa", config)
    assert abs(plain[0] - dropped[0]) > 1e-3 * plain[0]
    measured = [_held_out(_module("medusa", each), _objective(each), rows) for each in (CONFIG, config)]
    assert measured[0] == measured[1]


def _held_out(module: MultiTokenModule, objective: MultiTokenObjective, rows: list[CachedRow]) -> dict[str, float]:
    reduce = lambda sums, _: means(sums, torch.device("cpu"))  # noqa: E731
    return evaluate(module.eval(), objective, rows, 2, (0, 1), lambda batch: batch, reduce)


@pytest.mark.parametrize(("kind", "keys"), KINDS)
def test_predicted_tau_is_one_plus_the_mean_run_of_hits(kind: HeadKind, keys: dict[str, Any]) -> None:
    module, rows, runs = _module(kind, noise=0.02, **keys), [], []
    generator = torch.Generator().manual_seed(5)
    for row in tiny.rows(6):  # a conversation whose features repeat, so that heads hit now and then
        features = row.last_hidden[torch.randint(0, 2, (len(row.input_ids),), generator=generator)]
        rows.append(replace(row, last_hidden=4 * features))
    hits_at: list[list[int]] = [[] for _ in range(HEADS)]
    with torch.no_grad():
        for row in rows:
            for slot in _starts(row, 0):
                run = []
                for k in range(HEADS):
                    if slot not in _starts(row, k):
                        break
                    choice = (row.last_hidden[slot + 1 + k] @ ENDS.lm_head.T).argmax()
                    run.append(int(_log_q(module.head, row, slot, k).argmax() == choice))
                    hits_at[k].append(run[-1])
                runs.append([*run, 0].index(0))
    found = _held_out(module, _objective(), rows)
    if kind == "medusa":
        assert 0 < sum(runs) < HEADS * len(runs)  # neither all hits nor none
    assert found["predicted_tau"] == pytest.approx(1 + sum(runs) / len(runs), abs=1e-6)
    for k, hits in enumerate(hits_at):
        assert found[f"accuracy_at_{k + 1}"] == pytest.approx(sum(hits) / len(hits), abs=1e-6)


@pytest.mark.parametrize("loss", get_args(LossName))
def test_every_loss_between_laws_trains_a_head(loss: LossName) -> None:
    config = replace(CONFIG, loss=loss, label_weight=0.0, law_weight=1.0)
    output = _objective(config)(_module("hydra", config), _prepared(tiny.rows(3), [0, 1, 2], config))
    assert set(output.terms) == {"law_at_1", "law_at_2", "law_at_3"}
    value = output.total()
    value.backward()
    assert torch.isfinite(value) and value > 0


def test_a_process_without_rows_gives_zero_gradients_for_every_trained_weight() -> None:
    for kind, keys in KINDS:
        module, config = _module(kind, **keys), replace(CONFIG, dropout=0.2)
        objective = _objective(config)
        objective(module, objective.prepare(collate([], []), 0)).total().backward()
        assert all(p.grad is not None and not p.grad.any() for p in module.parameters() if p.requires_grad)


@pytest.mark.parametrize(("kind", "keys"), KINDS)
def test_overfitting_one_batch_lowers_every_term_and_leaves_the_target_alone(
    kind: HeadKind, keys: dict[str, Any]
) -> None:
    module, batch = _module(kind, noise=0.0, **keys), collate(tiny.rows(2), [0, 1])
    before = ENDS.lm_head.clone()
    optimizer = torch.optim.AdamW(module.parameters(), lr=3e-3)
    history = []
    for _ in range(60):
        output = _objective()(module, batch)
        history.append({name: value.item() for name, (_, value, _) in output.terms.items()})
        optimizer.zero_grad()
        output.total().backward()
        optimizer.step()
    assert all(history[-1][name] < 0.8 * history[0][name] for name in history[0])
    assert ENDS.lm_head.equal(before)
