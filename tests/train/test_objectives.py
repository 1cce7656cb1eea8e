"""Laws of every objective: padding, company, chunks and recomputation move nothing; label shifts and keyed dropout."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from aerie.configs.schema.train import DraftLMTrain, Eagle1Train, Eagle3Train, MultiTokenTrain, TrainConfig
from aerie.data.batches import Batch, collate
from aerie.data.cache import CachedRow
from aerie.train.lm import LMObjective
from aerie.train.loop import means
from aerie.train.objectives import Eagle1Objective, Eagle3Objective, KeyedDropout, MultiTokenObjective, Objective
from tests import tiny
from tests.train import unrolls

VOCAB = tiny.vocab()
MULTI: dict[str, Any] = {"label_weight": 0.7, "law_weight": 0.3, "dropout": 0.3}
SETTINGS: dict[str, TrainConfig] = {
    "eagle1": Eagle1Train(),
    "eagle3": Eagle3Train(unroll_steps=4),
    "eagle3-deep": Eagle3Train(unroll_steps=3),
    "medusa": MultiTokenTrain(kind="medusa", **MULTI),
    "hydra": MultiTokenTrain(kind="hydra", **MULTI),
    "hydra++": MultiTokenTrain(kind="hydra", **MULTI),
    "lm": DraftLMTrain(),
    "draft_lm": DraftLMTrain(distill="kl", distill_weight=2.0, token_weight=0.5),
}


def objective(kind: str, **changes: Any) -> Objective:
    """Around a head of its own, with the weights of every other of its kind."""
    settings: Any = replace(SETTINGS[kind], **changes)
    made: Objective
    if kind == "eagle1":
        made = Eagle1Objective(tiny.head(VOCAB.embedding, scale=5.0), VOCAB, settings)
    elif kind.startswith("eagle3"):
        deep: dict[str, Any] = {"num_hidden_layers": 2, "qk_norm": True, "norm_output": True} if "-" in kind else {}
        made = Eagle3Objective(tiny.eagle3_head(VOCAB.embedding, scale=8.0, **deep), VOCAB, settings)
    elif kind in ("medusa", "hydra", "hydra++"):
        keys: dict[str, Any] = {"prefix_layer": True, "num_layers": 2} if kind == "hydra++" else {}
        head = tiny.multi_token_head(settings.kind, VOCAB, 0.05, num_heads=3, **keys)
        made = MultiTokenObjective(head, VOCAB, settings)
    else:
        lm = tiny.llama(num_blocks=1, seed=7)
        made = LMObjective(lm, None if kind == "lm" else VOCAB, settings)
    return made.train()


def prepared(made: Objective, rows: list[CachedRow], numbers: Any, packed: bool = False) -> Batch:
    return made.prepare(collate([rows[n] for n in numbers], numbers, packed), 1)


def filled(batch: Batch) -> Batch:
    """With something in the padding, which nothing may see."""
    assert batch.features is not None and batch.taps is not None
    if batch.documents is not None:
        return batch
    padding = torch.arange(batch.input_ids.shape[1]) >= batch.lengths[:, None]  # [B, T]
    features, taps = (states.masked_fill(padding[..., None], 1e3) for states in (batch.features, batch.taps))
    return replace(batch, features=features, taps=taps, input_ids=batch.input_ids.masked_fill(padding, 7))


def loss_and_gradient(made: Objective, batches: list[Batch]) -> tuple[Tensor, Tensor]:
    counts = [made.counts(batch) for batch in batches]
    scales = {name: 1.0 / max(sum(int(count[name]) for count in counts), 1) for name in counts[0]}
    losses = []
    for batch in batches:
        loss = made(batch).total(made.weights, scales)
        loss.backward()
        losses.append(loss.detach())
    gradients = [p.grad.flatten() for p in made.parameters() if p.grad is not None]
    return torch.stack(losses).sum(), torch.cat(gradients)


def assert_same(found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor], tolerance: float = 5e-6) -> None:
    assert found[0].item() == pytest.approx(expected[0].item(), rel=tolerance)
    assert (found[1] - expected[1]).norm() <= tolerance * expected[1].norm()


@pytest.mark.parametrize("kind", SETTINGS)
def test_padding_company_packing_chunks_and_recomputation_move_neither_loss_nor_gradient(kind: str) -> None:
    rows = unrolls.rows(6)
    whole = loss_and_gradient(objective(kind), [prepared(objective(kind), rows, range(6))])
    packed = kind.startswith("eagle3")
    singles, mixed = [[0], [1], [2], [3], [4], [5]], [[5, 0], [4, 2, 1], [3]]
    for groups, is_packed in ((singles, False), (mixed, False), (mixed, packed)):
        made = objective(kind)
        cut = [filled(prepared(made, rows, group, is_packed)) for group in groups]
        assert_same(loss_and_gradient(made, cut), whole)
    for changes in ({"loss_chunk_slots": 7}, {"loss_chunk_slots": 1}, {"gradient_checkpointing": True}):
        made = objective(kind, **changes)
        assert_same(loss_and_gradient(made, [prepared(made, rows, range(6), packed)]), whole)


@pytest.mark.parametrize("kind", SETTINGS)
def test_a_process_without_rows_gives_zero_gradients_for_every_trained_weight(kind: str) -> None:
    made = objective(kind)
    batch = prepared(made, [], [])
    made(batch).total(made.weights).backward()
    trained = [p for p in made.parameters() if p.requires_grad]
    assert all(p.grad is not None and not p.grad.any() for p in trained)
    assert set(map(int, made.counts(batch).values())) == {0}


def history(made: Objective, steps: int, rate: float) -> list[tuple[float, dict[str, float]]]:
    """(loss, terms) of some steps on one batch."""
    batch, found = prepared(made, unrolls.rows(2), [0, 1]), []
    optimizer = torch.optim.AdamW([p for p in made.parameters() if p.requires_grad], lr=rate)
    for _ in range(steps):
        output = made(batch)
        loss = output.total(made.weights)
        found.append((loss.item(), {name: value.item() for name, (value, _) in output.terms.items()}))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return found


@pytest.mark.parametrize("kind", SETTINGS)
def test_overfitting_one_batch_lowers_every_term_and_leaves_the_target_alone(kind: str) -> None:
    before = VOCAB.lm_head.clone()
    made = objective(kind, **({"dropout": 0.0} if kind in ("medusa", "hydra", "hydra++") else {}))
    found = history(made, 50, 3e-3)
    # The laws of random states are not those of the conversation's tokens, so a draft LM has to choose.
    low = 1.0 if kind == "draft_lm" else 0.9
    assert all(found[-1][1][name] < low * found[0][1][name] for name in made.weights)
    assert VOCAB.lm_head.equal(before)


def held_out(made: Objective, rows: list[CachedRow]) -> dict[str, float]:
    with torch.no_grad():
        sums = made.eval().measure(collate(rows, range(len(rows))))
    return made.summarise(means(sums, torch.device("cpu")))


@pytest.mark.parametrize("kind", [kind for kind in SETTINGS if kind != "lm"])
def test_predicted_tau_is_one_plus_the_mean_run_of_hits_of_drafting(kind: str) -> None:
    made, rows, runs, most = objective(kind, eval_depths=3).eval(), [], [], 3
    hits_at: list[list[float]] = [[] for _ in range(most)]
    with torch.no_grad():
        for row in unrolls.rows(5):
            states = row.last_hidden.clone()
            for slot, _ in unrolls.starts(row):
                if slot % 3:  # two of three states have as their likeliest token what the head drafts there
                    (token,) = unrolls.choices(made.head, VOCAB, replace(row, last_hidden=states), slot, 1)
                    states[slot + 1] = 5.0 * VOCAB.lm_head[token] / VOCAB.lm_head[token].norm()
            rows.append(replace(row, last_hidden=states))
            wanted = (states @ VOCAB.lm_head.T).argmax(-1)
            for slot, alive in unrolls.starts(row):
                drafted = unrolls.choices(made.head, VOCAB, rows[-1], slot, min(alive, most))
                hits = (drafted == wanted[slot + 1 : slot + 1 + len(drafted)]).float()
                runs.append(float(hits.cumprod(0).sum()))
                for depth, hit in enumerate(hits.tolist()):
                    hits_at[depth].append(hit)
    found = held_out(made, rows)
    assert 0 < sum(runs) < most * len(runs)  # neither all hits nor none
    assert found["predicted_tau"] == pytest.approx(1 + sum(runs) / len(runs), abs=1e-6)
    for depth, each in enumerate(hits_at):
        assert found[f"accuracy_at_{depth + 1}"] == pytest.approx(sum(each) / len(each), abs=1e-6)


NUM_HEADS = 3
KINDS: list[tuple[Any, dict[str, Any]]] = [
    ("medusa", {}),
    ("medusa", {"lm_head": "target", "num_layers": 2}),
    ("hydra", {}),
    ("hydra", {"prefix_layer": True, "num_layers": 2}),
]


def multi_token(kind: Any, noise: float = 0.05, keys: Any = None, **changes: Any) -> MultiTokenObjective:
    head = tiny.multi_token_head(kind, VOCAB, noise, num_heads=NUM_HEADS, **(keys or {}))
    settings = {"label_weight": 0.7, "law_weight": 0.3, **changes}
    return MultiTokenObjective(head, VOCAB, MultiTokenTrain(kind=kind, **settings)).train()


def supervised(row: CachedRow) -> list[tuple[int, int]]:
    """(k, slot) of every head that is supervised at a slot."""
    return [(k, slot) for slot, alive in unrolls.starts(row) for k in range(min(alive, NUM_HEADS))]


def by_hand(head: Any, rows: list[CachedRow]) -> dict[str, float]:
    sums = {f"{name}_at_{k + 1}": 0.0 for name in ("label", "law") for k in range(NUM_HEADS)}
    with torch.no_grad():
        for row in rows:
            for k, slot in supervised(row):
                log_q = unrolls.log_law(head, VOCAB, row, slot, k)
                place = slot + 2 + k
                sums[f"label_at_{k + 1}"] -= log_q[row.input_ids[place]].item()
                law = (row.last_hidden[place - 1] @ VOCAB.lm_head.T).softmax(-1)
                sums[f"law_at_{k + 1}"] -= (law * log_q).sum().item()
    return sums


@pytest.mark.parametrize(("kind", "keys"), KINDS)
def test_head_k_learns_the_token_and_the_law_two_plus_k_after_its_feature(kind: Any, keys: dict[str, Any]) -> None:
    made, rows = multi_token(kind, keys=keys), tiny.rows(4)
    output = made(collate(rows, range(4)))
    expected = by_hand(made.head, rows)
    assert {name: value.item() for name, (value, _) in output.terms.items()} == pytest.approx(expected, rel=2e-5)
    for k in range(NUM_HEADS):
        count = sum(k == head for row in rows for head, _ in supervised(row))
        for name, weight in (("label", 0.7), ("law", 0.3)):
            term = f"{name}_at_{k + 1}"
            assert made.weights[term] == pytest.approx(weight * 0.8 ** (k + 1)) and output.terms[term][1] == count > 0
            assert made.counts(collate(rows, range(4)))[term] == count


def test_dropout_belongs_to_seed_epoch_row_and_place_alone_and_not_to_held_out_rows() -> None:
    rows = tiny.rows(2)

    def masks(seed: int, epoch: int, branch: int, place: int) -> Tensor:
        batch = multi_token("medusa", dropout=0.4, seed=seed).prepare(collate(rows, range(2)), epoch)
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
    plain, dropped = multi_token("medusa"), multi_token("medusa", dropout=0.4)
    losses = [made(made.prepare(collate(rows, range(2)), 0)).total(made.weights).item() for made in (plain, dropped)]
    assert abs(losses[0] - losses[1]) > 1e-3 * losses[0] and held_out(plain, rows) == held_out(dropped, rows)
