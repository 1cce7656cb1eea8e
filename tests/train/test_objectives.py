"""Laws of every objective: padding, company, chunks and recomputation move nothing, and what is learnt is learnt."""

from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from aerie.configs.schema.train import DraftLMTrain, Eagle1Train, Eagle3Train, LossName, MultiTokenTrain, TrainConfig
from aerie.data.batches import Batch, collate
from aerie.data.cache import CachedRow
from aerie.train.lm import LMObjective
from aerie.train.loop import means
from aerie.train.objectives import Eagle1Objective, Eagle3Objective, MultiTokenObjective, Objective
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
    """An objective in training around a head of its own, whose weights are those of every other of its kind."""
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


def loss_and_gradient(made: Objective, batches: list[Batch]) -> tuple[Tensor, Tensor]:
    """The whole loss and all gradients in one vector, divided as the loop divides."""
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
def test_padding_company_packing_and_accumulation_move_neither_loss_nor_gradient(kind: str) -> None:
    rows = unrolls.rows(6)
    whole = loss_and_gradient(objective(kind), [prepared(objective(kind), rows, range(6))])
    for groups in ([[0], [1], [2], [3], [4], [5]], [[5, 0], [4, 2, 1], [3]]):
        for packed in (False, True) if kind.startswith("eagle3") else (False,):
            made = objective(kind)
            cut = [prepared(made, rows, group, packed) for group in groups]
            assert_same(loss_and_gradient(made, cut), whole)


@pytest.mark.parametrize("kind", SETTINGS)
def test_chunks_and_recomputation_move_neither_loss_nor_gradient(kind: str) -> None:
    rows = unrolls.rows(6)
    whole = loss_and_gradient(objective(kind), [prepared(objective(kind), rows, range(6))])
    packed = kind.startswith("eagle3")
    for changes in ({"loss_chunk_slots": 7}, {"loss_chunk_slots": 1}, {"gradient_checkpointing": True}):
        made = objective(kind, **changes)
        assert_same(loss_and_gradient(made, [prepared(made, rows, range(6), packed)]), whole)


@pytest.mark.parametrize("kind", SETTINGS)
def test_what_stands_in_padding_is_not_seen(kind: str) -> None:
    made = objective(kind)
    batch = prepared(made, unrolls.rows(2), [0, 1])
    assert batch.features is not None and batch.taps is not None
    features, taps, ids = batch.features.clone(), batch.taps.clone(), batch.input_ids.clone()
    for at, length in enumerate(batch.lengths.tolist()):
        features[at, length:], taps[at, length:], ids[at, length:] = 1e3, 1e3, 7
    found = loss_and_gradient(objective(kind), [batch])
    other = loss_and_gradient(objective(kind), [replace(batch, features=features, taps=taps, input_ids=ids)])
    assert found[0].equal(other[0]) and found[1].equal(other[1])


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
    before = VOCAB.lm_head.clone(), VOCAB.embedding.clone()
    made = objective(kind, **({"dropout": 0.0} if kind in ("medusa", "hydra", "hydra++") else {}))
    found = history(made, 50, 3e-3)
    # The laws of random states are not those of the conversation's tokens, so a draft LM has to choose.
    low = 1.0 if kind == "draft_lm" else 0.9
    assert all(found[-1][1][name] < low * found[0][1][name] for name in made.weights)
    assert VOCAB.lm_head.equal(before[0]) and VOCAB.embedding.equal(before[1])
    if kind.startswith("eagle"):
        assert made.head.embed_tokens.weight.equal(VOCAB.embedding)


@pytest.mark.parametrize("kind", ["eagle1", "eagle3", "medusa", "draft_lm"])
def test_each_loss_between_laws_trains_and_is_another_one(kind: str) -> None:
    others: dict[str, Any] = {
        "eagle1": {"feature_weight": 0.0, "classification_weight": 1.0, "feature_noise": 0.0},
        "medusa": {"label_weight": 0.0, "law_weight": 1.0, "dropout": 0.0},
        "draft_lm": {"token_weight": 0.0},
    }.get(kind, {})
    key, first = "distill" if kind == "draft_lm" else "loss", set()
    for name in get_args(LossName):
        found = history(objective(kind, **{key: name}, **others), 8, 5e-3)
        assert found[-1][0] < 0.99 * found[0][0], name
        first.add(round(found[0][0], 3))
    assert len(first) == len(get_args(LossName))


@pytest.mark.parametrize("kind", ["eagle1", "eagle3", "medusa"])
def test_bf16_autocast_trains_and_stays_close(kind: str) -> None:
    made = objective(kind)
    batch = prepared(made, unrolls.rows(3), range(3))
    exact = made(batch).total(made.weights)
    with torch.autocast("cpu", torch.bfloat16):
        found = made(batch).total(made.weights)
    found.backward()
    assert found.dtype == torch.float32 and abs(found.item() / exact.item() - 1) < 0.05


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
