"""Laws of EAGLE-3's objective: it is drafting step by step, whatever is packed, chunked or made again."""

from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from aerie.configs.schema.train import LossName, TrainConfig
from aerie.data.batches import Batch, collate
from aerie.data.cache import CachedRow
from aerie.model.heads.eagle import Eagle3Head
from aerie.model.unroll import unrolled_attention
from aerie.train.compare import compare, plain_sums
from aerie.train.evaluate import evaluate
from aerie.train.log import means
from aerie.train.objectives.eagle import Eagle3Objective, UnrolledHead
from tests import tiny
from tests.train import live_memory, unrolls
from tests.train.live_memory import LiveMemory

ENDS = tiny.ends()
STEPS = 4
LONG, WIDE = 300, 2000  # tokens of a row and of a vocabulary, where memory is counted
CONFIG = TrainConfig(unroll_steps=STEPS, eval_depths=STEPS, loss_chunk_slots=4096)


def _head(scale: float = 8.0, **changes: Any) -> Eagle3Head:
    return tiny.eagle3_head(ENDS.embedding, scale=scale, **changes).train()


def _objective(config: TrainConfig = CONFIG) -> Eagle3Objective:
    return Eagle3Objective(ENDS, config, num_taps=2)


def _sums(head: Eagle3Head, batch: Batch, config: TrainConfig = CONFIG) -> Tensor:
    """[K] sums of the loss."""
    output = _objective(config)(UnrolledHead(head, config), batch)
    return torch.stack([value for _, value, _ in output.terms.values()])


def _loss_and_gradient(batches: list[Batch], config: TrainConfig = CONFIG, **changes: Any) -> tuple[Tensor, Tensor]:
    """The whole loss and all gradients in one vector, divided as the loop divides."""
    head, objective = _head(**changes), _objective(config)
    module = UnrolledHead(head, config)
    found = [objective.divisors(batch) for batch in batches]
    scales = {name: 1.0 / max(sum(each[name] for each in found), 1) for name in found[0]}
    losses = [objective(module, batch).total(scales) for batch in batches]
    loss = torch.stack(losses).sum()
    loss.backward()
    return loss.detach(), torch.cat([p.grad.flatten() for p in head.parameters() if p.grad is not None])


def _assert_same(found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor], tolerance: float = 2e-6) -> None:
    assert found[0].item() == pytest.approx(expected[0].item(), rel=tolerance)
    assert (found[1] - expected[1]).norm() <= tolerance * expected[1].norm()


def _by_drafting(head: Eagle3Head, rows: list[CachedRow], masked: bool = True) -> list[float]:
    """[K] sums of the loss, each chain drafted on its own with a key/value buffer."""
    sums = [0.0] * STEPS
    with torch.no_grad():
        for row in rows:
            for slot, alive in unrolls.starts(row):
                outputs = unrolls.drafted(head, row, slot, min(alive, STEPS))
                for step, output in enumerate(outputs):
                    loss, inside = unrolls.cross_entropy(head, ENDS, output, row.last_hidden[slot + 1 + step])
                    sums[step] += loss if inside or not masked else 0.0
    return sums


HEADS = [
    {},
    {"num_hidden_layers": 2},
    {"qk_norm": True, "norm_output": True},
    {"num_key_value_heads": 4, "fc_norm": True},
]


@pytest.mark.parametrize("changes", HEADS)
def test_the_parallel_unroll_is_drafting_step_by_step(changes: dict[str, Any]) -> None:
    head, rows = _head(**changes), unrolls.rows(4)
    found = _sums(head, collate(rows, range(4)))
    assert found.tolist() == pytest.approx(_by_drafting(head, rows), rel=1e-5)


def test_the_check_against_drafting_sees_a_lost_position_diagonal_or_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    head, rows = _head(), unrolls.rows(4)
    expected, batch = torch.tensor(_by_drafting(head, rows)), collate(rows, range(4))

    def off() -> float:
        return float(((_sums(head, batch).detach() - expected) / expected).abs().max())

    assert off() < 1e-5
    unroll = head.unroll
    with monkeypatch.context() as patch:
        still = lambda tokens, x, positions, *rest: unroll(tokens, x, torch.arange(tokens.shape[1])[None], *rest)  # noqa: E731
        patch.setattr(head, "unroll", still)
        assert off() > 1e-3
    with monkeypatch.context() as patch:
        patch.setattr(
            "aerie.model.layers.unrolled_attention", lambda q, k, v, *rest: unrolled_attention(q, k[:1], v[:1], *rest)
        )
        assert off() > 1e-3
    one_turn = batch.turns.cummax(1).values.clamp(max=1) * (batch.positions < batch.lengths[:, None])
    batch = replace(batch, turns=one_turn)
    assert off() > 1e-3


def test_values_and_gradients_are_those_of_one_dense_mask_over_all_steps() -> None:
    rows = unrolls.rows(3)
    head, total = _head(num_key_value_heads=4), torch.zeros(())
    for row in rows:
        outputs = unrolls.by_one_mask(head, row, STEPS)
        logits = row.last_hidden @ ENDS.lm_head.T  # [T, V]
        inside = head.vocabulary.t2d[logits.argmax(-1)]
        law = logits[:, head.vocabulary.ids].softmax(-1)
        for step, output in enumerate(outputs):
            log_q = head.lm_head(head.norm(output)).log_softmax(-1)  # [T-1, Vd]
            for slot, alive in unrolls.starts(row):
                at = slot + 1 + step
                if step < alive and inside[at]:
                    total = total - 0.8**step * (law[at] * log_q[slot]).sum()
    count = sum(len(unrolls.starts(row)) for row in rows)
    (total / count).backward()
    expected = torch.cat([p.grad.flatten() for p in head.parameters() if p.grad is not None])
    _assert_same(_loss_and_gradient([collate(rows, range(3))], num_key_value_heads=4), (total / count, expected), 1e-5)


@pytest.mark.parametrize("divisor", ["shared", "per_step"])
@pytest.mark.parametrize("groups", [[[0], [1], [2], [3], [4], [5]], [[5, 0], [4, 2, 1], [3]]])
def test_padding_company_packing_and_accumulation_move_neither_loss_nor_gradient(
    divisor: Any, groups: list[list[int]]
) -> None:
    rows, config = unrolls.rows(6), replace(CONFIG, divisor=divisor)
    whole = _loss_and_gradient([collate(rows, range(6))], config)
    for packed in (False, True):
        cut = [collate([rows[n] for n in group], group, packed) for group in groups]
        _assert_same(_loss_and_gradient(cut, config), whole)


def test_the_check_of_packing_sees_a_lost_border_of_documents() -> None:
    rows = unrolls.rows(4)
    whole, packed = _loss_and_gradient([collate(rows, range(4))]), collate(rows, range(4), packed=True)
    joined = replace(packed, documents=(sum(packed.documents or ()),))
    assert (_loss_and_gradient([joined])[1] - whole[1]).norm() > 1e-2 * whole[1].norm()


def test_chunks_and_recomputation_move_neither_loss_nor_gradient() -> None:
    batch = collate(unrolls.rows(6), range(6))
    whole = _loss_and_gradient([batch])
    for changes in ({"loss_chunk_slots": 9}, {"gradient_checkpointing": True}, {"loss_chunk_slots": 1}):
        _assert_same(_loss_and_gradient([batch], replace(CONFIG, **changes)), whole)
    deep: dict[str, Any] = {"num_hidden_layers": 2, "qk_norm": True, "norm_output": True}
    again = replace(CONFIG, gradient_checkpointing=True)
    for rows in (batch, collate(unrolls.rows(3), range(3), packed=True)):
        _assert_same(_loss_and_gradient([rows], again, **deep), _loss_and_gradient([rows], **deep))


def _long_memory(config: TrainConfig, plain: bool = False) -> LiveMemory:
    """Forward and backward over one row of LONG tokens, for a target of WIDE tokens."""
    generator = torch.Generator().manual_seed(0)
    ends = tiny.ends(WIDE, 32)
    turns = (torch.arange(LONG) >= 40).int()
    ids = torch.randint(5, WIDE, (LONG,), generator=generator)
    features, taps = (torch.randn(LONG, width, generator=generator) for width in (32, 64))
    batch = collate([CachedRow(ids, turns, features, taps, 0)], [0])
    drafted = torch.arange(0, WIDE, 20)
    head = tiny.eagle3_head(ends.embedding, ids=drafted, scale=4.0, max_position_embeddings=512).train()
    module = UnrolledHead(head, config)

    def loss() -> Tensor:
        return plain_sums(module, batch, ends).sum() if plain else module(batch, ends)[0].sum()

    return live_memory.run(loss)


def test_nothing_as_large_as_all_pairs_of_slots_or_as_the_full_vocabularys_logits_is_ever_made() -> None:
    config = replace(CONFIG, loss_chunk_slots=120)
    assert _long_memory(config).largest < LONG * LONG
    assert _long_memory(config, plain=True).largest >= (LONG - 1) * WIDE  # the count sees what the plain form makes


def test_recomputation_lowers_the_peak_of_the_whole_step() -> None:
    config = replace(CONFIG, loss_chunk_slots=210, unroll_steps=7)
    kept, made_again = (_long_memory(replace(config, gradient_checkpointing=flag)) for flag in (False, True))
    assert made_again.peak < 0.6 * kept.peak


@pytest.mark.parametrize("name", ["soft_cross_entropy", "lk_hybrid"])
def test_the_trimmed_form_has_the_loss_and_the_gradient_of_the_plain_one(name: Any) -> None:
    config = replace(CONFIG, loss=name, loss_chunk_slots=20)
    batch, found = collate(unrolls.rows(6), range(6)), []
    for form in (lambda module: plain_sums(module, batch, ENDS), lambda module: module(batch, ENDS)[0]):
        head = _head()
        loss = form(UnrolledHead(head, config)).sum()
        loss.backward()
        gradient = torch.cat([p.grad.flatten() for p in head.parameters() if p.grad is not None])
        found.append((loss.detach(), gradient))
    _assert_same(found[0], found[1], 1e-5)


def test_the_comparison_states_both_times_and_the_difference() -> None:
    batches = [collate(unrolls.rows(2, seed), [0, 1]) for seed in range(2)]
    found = compare(UnrolledHead(_head(), CONFIG), _objective(), batches, lambda batch: batch)
    assert found.loss_difference < 1e-5 and min(found.trimmed_ms, found.plain_ms) > 0
    assert 0 < found.supervised_share < 1 and "times as long" in found.text()


def test_the_gradient_flows_through_the_fed_back_outputs() -> None:
    batch = collate(unrolls.rows(2), range(2))
    head = _head()
    _sums(head, batch)[-1].backward()
    assert head.fc.weight.grad is not None and head.fc.weight.grad.abs().max() > 1e-4
    cut = _head()
    unroll = cut.unroll
    cut.unroll = lambda tokens, x, *rest: unroll(tokens, x.detach(), *rest)  # type: ignore[method-assign]
    _sums(cut, batch)[-1].backward()
    assert cut.fc.weight.grad is None


def test_choices_outside_the_draft_vocabulary_are_misses_and_stay_in_the_divisor() -> None:
    head, rows = _head(), unrolls.rows(4)
    batch = collate(rows, range(4))
    masked, unmasked = (replace(CONFIG, mask_outside_vocabulary=flag) for flag in (True, False))
    for config in (masked, unmasked):
        found = _sums(head, batch, config).tolist()
        assert found == pytest.approx(_by_drafting(head, rows, masked=config is masked), rel=1e-5)
    output = _objective()(UnrolledHead(head, CONFIG), batch)
    inside, count = output.metrics["in_vocabulary"]
    assert 0 < inside < count == sum(len(unrolls.starts(row)) for row in rows)
    assert all(term[2] == count for term in output.terms.values())
    assert output.metrics["accuracy_at_1"][1] == count
    # a head that knows the law can be right inside its vocabulary alone
    identity = tiny.eagle3_head(ENDS.embedding, ids=torch.arange(320), scale=8.0)
    assert _objective()(UnrolledHead(identity, CONFIG), batch).metrics["in_vocabulary"][0] == count


@pytest.mark.parametrize("divisor", ["shared", "per_step"])
def test_divisors_are_counted_from_the_turns(divisor: Any) -> None:
    rows = unrolls.rows(5)
    chains = [alive for row in rows for _, alive in unrolls.starts(row)]
    each = [sum(alive > step for alive in chains) for step in range(STEPS)]
    batch, objective = collate(rows, range(5)), _objective(replace(CONFIG, divisor=divisor))
    expected = each if divisor == "per_step" else [each[0]] * STEPS
    assert list(objective.divisors(batch).values()) == expected
    terms = objective(UnrolledHead(_head(), objective.config), batch).terms
    assert [int(count) for _, _, count in terms.values()] == expected
    assert [weight for weight, _, _ in terms.values()] == pytest.approx([0.8**step for step in range(STEPS)])


def test_a_process_without_rows_gives_zero_gradients_for_every_trained_weight() -> None:
    head, objective = _head(), _objective()
    objective(UnrolledHead(head, CONFIG), objective.prepare(collate([], []), 0)).total().backward()
    trained = [p for p in head.parameters() if p.requires_grad]
    assert len(trained) == 13 and all(p.grad is not None and not p.grad.any() for p in trained)


@pytest.mark.parametrize("name", get_args(LossName))
def test_every_loss_trains_the_head(name: Any) -> None:
    config = replace(CONFIG, loss=name)
    head, batch = _head(), collate(unrolls.rows(2), range(2))
    module, objective = UnrolledHead(head, config), _objective(config)
    optimizer = torch.optim.AdamW([p for p in head.parameters() if p.requires_grad], lr=5e-3)
    history = []
    for _ in range(25):
        output = objective(module, batch)
        history.append(output.total().item())
        optimizer.zero_grad()
        output.total().backward()
        optimizer.step()
    assert history[-1] < 0.9 * history[0]
    assert head.embed_tokens.weight.equal(ENDS.embedding)


def test_predicted_tau_is_counted_by_drafting() -> None:
    head = _head(scale=15.0).eval()
    rows = [_with_own_choices(head, row) for row in unrolls.rows(5)]
    runs, right = [], [0] * STEPS
    with torch.no_grad():
        for row in rows:
            choices = (row.last_hidden @ ENDS.lm_head.T).argmax(-1)
            for slot, alive in unrolls.starts(row):
                outputs = unrolls.drafted(head, row, slot, min(alive, STEPS))
                tokens = head.vocabulary.target_ids(head.logits(outputs).argmax(-1))
                hits = (tokens == choices[slot + 1 : slot + 1 + len(tokens)]).long()
                runs.append(int(hits.cumprod(0).sum()))
                for step, hit in enumerate(hits.tolist()):
                    right[step] += hit
        found = evaluate(
            UnrolledHead(head, CONFIG),
            _objective(),
            rows,
            2,
            (0, 1),
            lambda batch: batch,
            lambda sums, _: means(sums, torch.device("cpu")),
        )
    assert 0 < sum(runs) < STEPS * len(runs)
    assert found["predicted_tau"] == pytest.approx(1 + sum(runs) / len(runs), abs=1e-6)
    counts = list(_objective(replace(CONFIG, divisor="per_step")).divisors(collate(rows, range(5))).values())
    accuracies = [found[f"accuracy_at_{step + 1}"] for step in range(STEPS)]
    assert accuracies == pytest.approx([hit / count for hit, count in zip(right, counts, strict=True)], abs=1e-6)
    trained = _objective()(UnrolledHead(head, CONFIG), collate(rows, range(5))).metrics
    assert [int(trained[f"accuracy_at_{step + 1}"][0]) for step in range(STEPS)] == right


def _with_own_choices(head: Eagle3Head, row: CachedRow) -> CachedRow:
    """The row with states whose likeliest token is, for two of three, what the head drafts there."""
    states = row.last_hidden.clone()
    with torch.no_grad():
        for slot, _ in unrolls.starts(row):
            if slot % 3:
                token = head.vocabulary.target_ids(head.logits(unrolls.drafted(head, row, slot, 1)).argmax(-1))
                states[slot + 1] = 5.0 * ENDS.lm_head[token[0]]
    return replace(row, last_hidden=states)


def test_bf16_autocast_trains_and_stays_close() -> None:
    batch, head = collate(unrolls.rows(3), range(3)), _head(scale=3.0)
    exact = _sums(head, batch)
    with torch.autocast("cpu", torch.bfloat16):
        found = _sums(head, batch)
    found.sum().backward()
    assert found.dtype == torch.float32 and (found - exact).abs().max() < 0.02 * exact.abs().max()
