"""Laws of every objective: its terms are those of plain forms, slot by slot and drafting step by step; padding,
company, chunks and recomputation move nothing; noise and dropout are keyed."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from aerie.configs.schema.train import DraftLMTrain, Eagle1Train, Eagle3Train, MultiTokenTrain, TrainConfig
from aerie.data.batches import Batch, collate
from aerie.data.cache import CachedRow
from aerie.model.heads.eagle import EagleDraft
from aerie.model.layers import KeyValueBuffer
from aerie.train.lm import LMObjective
from aerie.train.loop import means
from aerie.train.objectives import Eagle1Objective, Eagle3Objective, KeyedDropout, MultiTokenObjective, Objective
from tests import tiny

VOCAB = tiny.vocab()
STEPS, NUM_HEADS = 4, 3
MULTI: dict[str, Any] = {"label_weight": 0.7, "law_weight": 0.3, "dropout": 0.3}
SETTINGS: dict[str, TrainConfig] = {
    "eagle1": Eagle1Train(),
    "eagle3": Eagle3Train(unroll_steps=STEPS),
    "eagle3-deep": Eagle3Train(unroll_steps=STEPS),
    "medusa": MultiTokenTrain(kind="medusa", **MULTI),
    "hydra": MultiTokenTrain(kind="hydra", **MULTI),
    "hydra++": MultiTokenTrain(kind="hydra", **MULTI),
    "lm": DraftLMTrain(),
    "draft_lm": DraftLMTrain(distill="kl", distill_weight=2.0, token_weight=0.5),
}
# What differs from the small heads of tests/tiny.py.
KEYS: dict[str, dict[str, Any]] = {
    "eagle3-deep": {"num_hidden_layers": 2, "qk_norm": True, "norm_output": True},
    "hydra++": {"prefix_layer": True, "num_layers": 2},
}
MULTI_TOKEN = [kind for kind, settings in SETTINGS.items() if isinstance(settings, MultiTokenTrain)]


def objective(kind: str, keys: dict[str, Any] | None = None, **changes: Any) -> Objective:
    """Around a head of its own, with the weights of every other of its kind."""
    settings: Any = replace(SETTINGS[kind], **changes)
    keys = KEYS.get(kind, {}) if keys is None else keys
    made: Objective
    if kind == "eagle1":
        made = Eagle1Objective(tiny.head(VOCAB.embedding, scale=5.0), VOCAB, settings)
    elif kind.startswith("eagle3"):
        made = Eagle3Objective(tiny.eagle3_head(VOCAB.embedding, scale=8.0, **keys), VOCAB, settings)
    elif kind in MULTI_TOKEN:
        head = tiny.multi_token_head(settings.kind, VOCAB, 0.05, num_heads=NUM_HEADS, **keys)
        made = MultiTokenObjective(head, VOCAB, settings)
    else:
        made = LMObjective(tiny.llama(num_blocks=1, seed=7), None if kind == "lm" else VOCAB, settings)
    return made.train()


def rows_with_taps(count: int) -> list[CachedRow]:
    generator = torch.Generator().manual_seed(100)
    return [replace(row, taps=torch.randn(len(row.input_ids), 64, generator=generator)) for row in tiny.rows(count)]


def prepared(made: Objective, rows: list[CachedRow], numbers: Any, packed: bool = False) -> Batch:
    return made.prepare(collate([rows[n] for n in numbers], numbers, packed), 1)


def terms(made: Objective, rows: list[CachedRow]) -> dict[str, Tensor]:
    return {name: value for name, (value, _) in made(collate(rows, range(len(rows)))).terms.items()}


def numbers(values: dict[str, Tensor]) -> dict[str, float]:
    return {name: value.item() for name, value in values.items()}


# The slow forms: drafting from each slot on, step by step, as the head is asked in decoding.


def drafted(head: Any, row: CachedRow, slot: int, steps: int) -> Tensor:
    """[steps, D] outputs of drafting from `slot`: true features for the prefix, then own outputs and given tokens."""
    assert row.taps is not None
    config, draft = head.config, EagleDraft(head)
    buffers = [KeyValueBuffer.allocate(1, config, 64, row.taps) for _ in range(config.num_hidden_layers)]
    features = head.fuse(row.taps) if head.kind == "eagle3" else row.last_hidden
    outputs, x, first, count = [], features[None, : slot + 1], 0, slot + 1
    for _ in range(steps):
        end = first + count
        mask = torch.full((count, end), float("-inf")).triu_(first + 1)[None, None]
        x = draft(row.input_ids[None, first + 1 : end + 1], x, (first, end), mask, buffers)[:, -1:]
        for buffer in buffers:
            buffer.length = end
        outputs.append(x[0, 0])
        first, count = end, 1
    return torch.stack(outputs)


def starts(row: CachedRow) -> list[tuple[int, int]]:
    """(slot, number of supervised steps) of every slot where a chain starts, by the turns alone."""
    turns, found = row.turns.tolist(), []
    for slot in range(len(turns) - 2):
        if turns[slot + 1]:
            alive = 0
            while slot + 2 + alive < len(turns) and turns[slot + 2 + alive] == turns[slot + 1]:
                alive += 1
            if alive:
                found.append((slot, alive))
    return found


def log_law(head: Any, row: CachedRow, slot: int, index: int) -> Tensor:
    """log q [V] of one Medusa or Hydra head at one slot, asked of the head as drafting asks it."""
    if head.kind == "medusa":
        head.laws.vocab = VOCAB
        return head(row.last_hidden[slot])[index].log_softmax(-1)
    state = head.prefix(row.last_hidden[None, : slot + 1], (0, slot + 1))[:, -1]
    embeddings = VOCAB.embedding[row.input_ids[slot + 1 : slot + 2 + index]].flatten()[None]
    return head.step(index, state, embeddings)[0].log_softmax(-1)


def choices(head: Any, row: CachedRow, slot: int, steps: int) -> Tensor:
    """The tokens [steps] that a head, or a small LM, drafts greedily from a slot on, along the row's own tokens."""
    if not hasattr(head, "kind"):
        return head(row.input_ids[None, : slot + 1 + steps]).logits[0, slot + 1 :].argmax(-1)
    if head.kind in ("medusa", "hydra"):
        return torch.stack([log_law(head, row, slot, k).argmax() for k in range(steps)])
    outputs = drafted(head, row, slot, steps)
    if head.kind == "eagle3":
        return head.vocabulary.target_ids(head.logits(outputs).argmax(-1))
    return VOCAB.logits(outputs).argmax(-1)


def test_eagle1s_terms_are_those_of_each_supervised_slot_alone() -> None:
    (row,), made, expected = tiny.rows(1), objective("eagle1"), {"feature": 0.0, "classification": 0.0}
    for slot, _ in starts(row):
        given = (row.input_ids[None, 1 : slot + 2], row.last_hidden[None, : slot + 1], torch.arange(slot + 1)[None])
        predicted, true = made.head(*given)[0, -1], row.last_hidden[slot + 1]
        expected["feature"] += torch.nn.functional.smooth_l1_loss(predicted, true).item()
        law = (true @ VOCAB.lm_head.T).softmax(-1)  # of t_{slot+2}
        expected["classification"] -= (law * (predicted @ VOCAB.lm_head.T).log_softmax(-1)).sum().item()
    assert numbers(terms(made, [row])) == pytest.approx(expected, rel=1e-5)


HEADS: list[dict[str, Any]] = [
    {},
    {"num_hidden_layers": 2},
    {"qk_norm": True, "norm_output": True},
    {"num_key_value_heads": 4, "fc_norm": True},
]


@pytest.mark.parametrize(("keys", "masked"), [*((keys, True) for keys in HEADS), ({}, False)])
def test_the_parallel_unroll_is_drafting_step_by_step(keys: dict[str, Any], masked: bool) -> None:
    """A target's choice outside the draft vocabulary is a miss that stays in the divisor."""
    made, rows = objective("eagle3", keys, mask_outside_vocabulary=masked), rows_with_taps(4)
    expected, inside, head = [0.0] * STEPS, 0, made.head
    with torch.no_grad():
        for row in rows:
            for slot, alive in starts(row):
                for step, output in enumerate(drafted(head, row, slot, min(alive, STEPS))):
                    logits = row.last_hidden[slot + 1 + step] @ VOCAB.lm_head.T
                    law, is_inside = logits[head.vocabulary.ids].softmax(-1), bool(head.vocabulary.t2d[logits.argmax()])
                    inside += is_inside and step == 0
                    if is_inside or not masked:
                        expected[step] -= (law * head.logits(output).log_softmax(-1)).sum().item()
    assert list(numbers(terms(made, rows)).values()) == pytest.approx(expected, rel=1e-5)
    batch, count = collate(rows, range(4)), sum(len(starts(row)) for row in rows)
    output = made(batch)
    assert tuple(map(int, output.metrics["in_vocabulary"])) == (inside, count) and 0 < inside < count
    assert {int(slots) for _, slots in output.terms.values()} == set(map(int, made.counts(batch).values())) == {count}


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
    row = CachedRow(ids, (torch.arange(length) >= 40).int(), states, taps, 0)
    drafted_ids = torch.arange(0, width, 20)
    head = tiny.eagle3_head(vocab.embedding, ids=drafted_ids, scale=4.0, max_position_embeddings=512).train()
    made = Eagle3Objective(head, vocab, Eagle3Train(unroll_steps=STEPS, loss_chunk_slots=120))
    with Largest() as largest:
        torch.stack([*terms(made, [row]).values()]).sum().backward()
    assert largest.elements < length * length


def test_the_gradient_flows_through_the_fed_back_outputs() -> None:
    rows, whole, cut = rows_with_taps(2), objective("eagle3"), objective("eagle3")
    [*terms(whole, rows).values()][-1].backward()
    assert whole.head.fc.weight.grad is not None and whole.head.fc.weight.grad.abs().max() > 1e-4
    forward = cut.head.forward
    cut.head.forward = lambda tokens, x, *rest: forward(tokens, x.detach(), *rest)
    [*terms(cut, rows).values()][-1].backward()
    assert cut.head.fc.weight.grad is None


MULTI_KEYS: list[tuple[str, dict[str, Any] | None]] = [*((kind, None) for kind in MULTI_TOKEN)]
MULTI_KEYS.append(("medusa", {"lm_head": "target", "num_layers": 2}))


@pytest.mark.parametrize(("kind", "keys"), MULTI_KEYS)
def test_head_k_learns_the_token_and_the_law_two_plus_k_after_its_feature(kind: str, keys: Any) -> None:
    made, rows = objective(kind, keys, dropout=0.0), tiny.rows(4)
    expected = {f"{name}_at_{k + 1}": 0.0 for name in ("label", "law") for k in range(NUM_HEADS)}
    slots = dict.fromkeys(expected, 0)
    with torch.no_grad():
        for row in rows:
            for k, slot in ((k, slot) for slot, alive in starts(row) for k in range(min(alive, NUM_HEADS))):
                log_q, place = log_law(made.head, row, slot, k), slot + 2 + k
                law = (row.last_hidden[place - 1] @ VOCAB.lm_head.T).softmax(-1)
                losses = {"label": -log_q[row.input_ids[place]].item(), "law": -(law * log_q).sum().item()}
                for name, loss in losses.items():
                    expected[f"{name}_at_{k + 1}"] += loss
                    slots[f"{name}_at_{k + 1}"] += 1
    batch = collate(rows, range(4))
    output = made(batch)
    assert numbers(terms(made, rows)) == pytest.approx(expected, rel=2e-5)
    assert {name: int(count) for name, (_, count) in output.terms.items()} == slots and min(slots.values()) > 0
    assert {name: int(count) for name, count in made.counts(batch).items()} == slots
    weights = {f"{name}_at_{k}": w * 0.8**k for name, w in (("label", 0.7), ("law", 0.3)) for k in range(1, 4)}
    assert made.weights == pytest.approx(weights)


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


@pytest.mark.parametrize("kind", SETTINGS)
def test_padding_company_packing_chunks_and_recomputation_move_neither_loss_nor_gradient(kind: str) -> None:
    rows, whole, packed = rows_with_taps(6), [range(6)], kind.startswith("eagle3")
    singles, mixed = [[0], [1], [2], [3], [4], [5]], [[5, 0], [4, 2, 1], [3]]
    cases: list[tuple[dict[str, Any], Any, bool]] = [({}, whole, False), ({}, singles, False), ({}, mixed, False)]
    cases += [({}, mixed, packed), ({"loss_chunk_slots": 7}, whole, packed), ({"loss_chunk_slots": 1}, whole, packed)]
    cases.append(({"gradient_checkpointing": True}, whole, packed))
    found = []
    for changes, groups, is_packed in cases:
        made = objective(kind, **changes)
        batches = [prepared(made, rows, group, is_packed) for group in groups]
        found.append(loss_and_gradient(made, [filled(batch) for batch in batches] if groups is not whole else batches))
    for loss, gradient in found[1:]:
        assert loss.item() == pytest.approx(found[0][0].item(), rel=5e-6)
        assert (gradient - found[0][1]).norm() <= 5e-6 * found[0][1].norm()


@pytest.mark.parametrize("kind", SETTINGS)
def test_a_process_without_rows_gives_zero_gradients_for_every_trained_weight(kind: str) -> None:
    made = objective(kind)
    batch = prepared(made, [], [])
    made(batch).total(made.weights).backward()
    trained = [p for p in made.parameters() if p.requires_grad]
    assert all(p.grad is not None and not p.grad.any() for p in trained)
    assert set(map(int, made.counts(batch).values())) == {0}


@pytest.mark.parametrize("kind", SETTINGS)
def test_overfitting_one_batch_lowers_every_term_and_leaves_the_target_alone(kind: str) -> None:
    before, rows = VOCAB.lm_head.clone(), rows_with_taps(2)
    made = objective(kind, **({"dropout": 0.0} if kind in MULTI_TOKEN else {}))
    optimizer = torch.optim.AdamW([p for p in made.parameters() if p.requires_grad], lr=3e-3)
    first = numbers(terms(made, rows))
    for _ in range(50):
        optimizer.zero_grad()
        made(prepared(made, rows, [0, 1])).total(made.weights).backward()
        optimizer.step()
    last = numbers(terms(made, rows))
    # The laws of random states are not those of the conversation's tokens, so a draft LM has to choose.
    low = 1.0 if kind == "draft_lm" else 0.9
    assert all(last[name] < low * first[name] for name in made.weights)
    assert VOCAB.lm_head.equal(before)


def held_out(made: Objective, rows: list[CachedRow]) -> dict[str, float]:
    with torch.no_grad():
        sums = made.eval().measure(collate(rows, range(len(rows))))
    return made.summarise(means(sums, torch.device("cpu")))


@pytest.mark.parametrize("kind", [kind for kind in SETTINGS if kind != "lm"])
def test_predicted_tau_is_one_plus_the_mean_run_of_hits_of_drafting(kind: str) -> None:
    most, rows, runs = 3, [], []
    made, hits_at = objective(kind, eval_depths=most).eval(), [[] for _ in range(most)]  # type: ignore[var-annotated]
    with torch.no_grad():
        for row in rows_with_taps(5):
            states = row.last_hidden.clone()
            for slot, _ in starts(row):
                if slot % 3:  # two of three states have as their likeliest token what the head drafts there
                    (token,) = choices(made.head, replace(row, last_hidden=states), slot, 1)
                    states[slot + 1] = 5.0 * VOCAB.lm_head[token] / VOCAB.lm_head[token].norm()
            rows.append(replace(row, last_hidden=states))
            wanted = (states @ VOCAB.lm_head.T).argmax(-1)
            for slot, alive in starts(row):
                tokens = choices(made.head, rows[-1], slot, min(alive, most))
                hits = (tokens == wanted[slot + 1 : slot + 1 + len(tokens)]).float()
                runs.append(float(hits.cumprod(0).sum()))
                for depth, hit in enumerate(hits.tolist()):
                    hits_at[depth].append(hit)
    found = held_out(made, rows)
    assert 0 < sum(runs) < most * len(runs)  # neither all hits nor none
    assert found["predicted_tau"] == pytest.approx(1 + sum(runs) / len(runs), abs=1e-6)
    for depth, hits in enumerate(hits_at, start=1):
        assert found[f"accuracy_at_{depth}"] == pytest.approx(sum(hits) / len(hits), abs=1e-6)


def test_noise_is_uniform_and_belongs_to_seed_epoch_and_row_alone() -> None:
    rows = tiny.rows(4, hidden_size=2000)

    def noise(numbers: list[int], epoch: int = 1, seed: int = 0) -> Tensor:
        made = objective("eagle1", feature_noise=0.1, seed=seed)
        found = made.prepare(collate([rows[n] for n in numbers], numbers), epoch).noise
        assert found is not None
        return found

    together, alone, length = noise([0, 1, 2, 3]), noise([2]), len(rows[2].input_ids)
    assert together[2, :length].equal(alone[0]) and not together[2, length:].any()
    assert not together[1, :4].equal(together[2, :4])
    assert not noise([2], epoch=2).equal(alone) and not noise([2], seed=1).equal(alone)
    assert 0.099 < alone.abs().max() <= 0.1 and alone.std().item() == pytest.approx(0.1 / 3**0.5, rel=0.03)


def test_dropout_belongs_to_seed_epoch_row_and_place_alone_and_not_to_held_out_rows() -> None:
    rows = tiny.rows(2)
    counts = tuple(len(starts(row)) for row in rows)

    def masks(seed: int, epoch: int, branch: int, place: int) -> Tensor:
        batch = objective("medusa", dropout=0.4, seed=seed).prepare(collate(rows, range(2)), epoch)
        assert batch.seeds is not None
        return KeyedDropout(0.4, batch.seeds, counts, branch)(torch.ones(sum(counts), 500), place)

    first = masks(0, 1, 0, 0)
    one, other = first.split(counts)
    assert not one[: min(counts)].equal(other[: min(counts)]) and first.equal(masks(0, 1, 0, 0))
    assert all(not first.equal(masks(*key)) for key in ((1, 1, 0, 0), (0, 2, 0, 0), (0, 1, 1, 0), (0, 1, 0, 1)))
    assert first.unique().tolist() == pytest.approx([0.0, 1 / 0.6])
    assert (first == 0).float().mean().item() == pytest.approx(0.4, abs=0.02)
    plain, dropped = (objective("medusa", dropout=rate) for rate in (0.0, 0.4))
    losses = [made(prepared(made, rows, [0, 1])).total(made.weights).item() for made in (plain, dropped)]
    assert abs(losses[0] - losses[1]) > 1e-3 * losses[0] and held_out(plain, rows) == held_out(dropped, rows)
