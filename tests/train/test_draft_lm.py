"""Laws of distilling a draft LM: the loss is the one between plain forwards, and only the target's turns count."""

import typing
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from aerie.configs.schema.target_and_head import TargetConfig
from aerie.configs.schema.train import LossName, TrainConfig
from aerie.data.batches import Batch, collate
from aerie.data.cache import CachedRow
from aerie.model.target import Target, TargetEnds
from aerie.train.objectives.lm import DistilledLM, DraftLMObjective
from tests import tiny

CONFIG = TrainConfig(distill="kl", distill_weight=2.0, token_weight=0.5, eval_depths=3)
LOSSES = typing.get_args(LossName)


def target(vocab_size: int = 320) -> Target:
    return Target(tiny.llama(vocab_size=vocab_size, num_blocks=2, seed=3), TargetConfig("target"))


def rows_of(source: Target, count: int = 4) -> list[CachedRow]:
    """Rows with the source's own states."""
    states = [replace(row, last_hidden=source.features(row.input_ids[None]).last_hidden[0]) for row in tiny.rows(count)]
    return [replace(row, last_hidden=row.last_hidden.clone()) for row in states]


def batch_of(rows: list[CachedRow], *numbers: int) -> Batch:
    numbers = numbers or tuple(range(len(rows)))
    return collate([rows[number] for number in numbers], numbers)


def parts(ends: TargetEnds, config: TrainConfig = CONFIG) -> tuple[DistilledLM, DraftLMObjective]:
    lm = tiny.llama(num_blocks=1, seed=7)
    return DistilledLM(lm, config, ends.lm_head.shape[0]), DraftLMObjective(ends, config)


def gradient(module: DistilledLM) -> Tensor:
    return torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None])


@pytest.mark.parametrize("vocab_size", [320, 340])
def test_both_terms_are_those_of_plain_forwards_at_the_targets_tokens(vocab_size: int) -> None:
    """The vocabulary of 340 is a padded one: the LM's softmax is over the common 320, the target's law over all."""
    source = target(vocab_size)
    rows = rows_of(source)
    module, objective = parts(source.ends)
    output = objective(module, batch_of(rows))
    expected = torch.zeros(5)  # cross-entropy, KL, correct, alpha, agreement
    count = 0
    for row in rows:
        with torch.no_grad():
            log_q = module.lm(row.input_ids[None]).logits[0].log_softmax(-1)
            p = source.model(row.input_ids[None]).logits[0].softmax(-1)
        for position in range(len(row.turns) - 1):
            token = row.input_ids[position + 1]
            if row.turns[position + 1]:
                count += 1
                inside = p[position, :320] / p[position, :320].sum()
                q, drafted = log_q[position], int(log_q[position].argmax())
                expected[0] -= q[token]
                expected[1] += (inside * (inside.log() - q)).sum()
                expected[2] += drafted == token
                expected[3] += torch.minimum(q.exp(), p[position, :320]).sum()
                expected[4] += drafted == p[position].argmax()
    values = [value for _, value, _ in output.terms.values()] + [value for value, _ in output.metrics.values()]
    found = torch.stack([torch.as_tensor(value).detach().float() for value in values])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert count == objective.divisors(batch_of(rows))["distill"] == int(output.terms["distill"][2])
    assert {name: weight for name, (weight, _, _) in output.terms.items()} == {"cross_entropy": 0.5, "distill": 2.0}


@pytest.mark.parametrize("chunk", [4096, 3])
def test_padding_and_chunks_move_neither_loss_nor_gradient(chunk: int) -> None:
    source = target()
    rows = rows_of(source)
    found = []
    for groups, slots in (([[0], [1], [2], [3]], 4096), ([[0, 1, 2, 3]], chunk)):
        module, objective = parts(source.ends, replace(CONFIG, loss_chunk_slots=slots))
        total = torch.zeros(())
        for group in groups:
            loss = objective(module, batch_of(rows, *group)).total()
            loss.backward()
            total += loss.detach()
        found.append((total, gradient(module)))
    assert found[1][0].item() == pytest.approx(found[0][0].item(), rel=1e-5)
    assert (found[1][1] - found[0][1]).norm() <= 1e-5 * found[0][1].norm()


def test_states_outside_the_targets_turns_count_for_nothing() -> None:
    source = target()
    rows = rows_of(source)
    module, objective = parts(source.ends)
    before = objective(module, batch_of(rows)).total()
    asked = torch.cat([rows[0].turns[1:] != 0, torch.zeros(1, dtype=torch.bool)])  # state j: token j + 1
    moved = torch.where(asked[:, None], rows[0].last_hidden, torch.randn(asked.shape[0], 32))
    after = objective(module, batch_of([replace(rows[0], last_hidden=moved), *rows[1:]])).total()
    assert after.equal(before)
    moved = torch.where(asked[:, None], torch.randn(asked.shape[0], 32), rows[0].last_hidden)
    assert not objective(module, batch_of([replace(rows[0], last_hidden=moved), *rows[1:]])).total().equal(before)


@pytest.mark.parametrize("name", LOSSES)
def test_each_loss_pulls_the_lm_towards_the_targets_laws(name: LossName) -> None:
    source = target()
    batch = batch_of(rows_of(source))
    module, objective = parts(source.ends, TrainConfig(distill=name, token_weight=0.0))
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)
    values = []
    for _ in range(4):
        output = objective(module, batch)
        values.append(output.total().item())
        optimizer.zero_grad()
        output.total().backward()
        optimizer.step()
    assert values[-1] < values[0]


def test_the_target_itself_is_its_own_perfect_draft() -> None:
    source = target()
    batch = batch_of(rows_of(source))
    objective = DraftLMObjective(source.ends, CONFIG)
    sums = objective.evaluate(DistilledLM(source.model, CONFIG, 320), batch)
    means = {name: float(value / count) for name, (value, count) in sums.items()}
    assert means["distill"] == pytest.approx(0.0, abs=1e-5)
    assert means["alpha"] == pytest.approx(1.0, abs=1e-4) and means["greedy_agreement"] == 1.0
    assert means["accuracy_at_1"] == means["accuracy_at_3"] == 1.0
    alive = sum(float(batch.supervised(k).sum()) for k in range(3))
    assert means["chain"] == pytest.approx(alive / float(batch.supervised().sum()))
    assert objective.summarise(means)["predicted_tau"] == 1.0 + means["chain"]


def test_the_predicted_tau_is_that_of_chains_drafted_one_after_the_other() -> None:
    source = target()
    rows = rows_of(source, 6)
    lm: Any = tiny.llama(num_blocks=2, seed=3)  # the target with a little noise: some drafts hit, some miss
    with torch.no_grad():
        noise = torch.Generator().manual_seed(0)
        for parameter in lm.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=noise))
        accepted, starts = 0, 0
        for row in rows:
            ids, turns = row.input_ids, row.turns.tolist()
            drafted, wanted = (model(ids[None]).logits[0].argmax(-1).tolist() for model in (lm, source.model))
            for first in range(1, len(turns) - 1):  # t_first is known, t_(first + 1) is the first to be drafted
                if turns[first] and turns[first] == turns[first + 1]:
                    starts += 1
                    for position in range(first, min(first + 3, len(turns) - 1)):
                        if turns[position + 1] != turns[first] or drafted[position] != wanted[position]:
                            break
                        accepted += 1
        sums = DraftLMObjective(source.ends, CONFIG).evaluate(DistilledLM(lm, CONFIG, 320), batch_of(rows))
    assert 0 < accepted < 2 * starts
    assert [int(x) for x in sums["chain"]] == [accepted, starts]


def test_a_process_without_rows_adds_nothing() -> None:
    source = target()
    module, objective = parts(source.ends)
    batch = objective.prepare(collate([], []), 0)
    output = objective(module, batch)
    assert output.total().item() == 0.0 and set(objective.divisors(batch).values()) == {0}
    assert float(objective.evaluate(module, batch)["chain"][1]) == 0.0


@pytest.mark.parametrize(("drafts", "targets"), [(151_936, 152_064), (152_064, 151_936)])
def test_qwens_two_paddings_meet_in_their_common_prefix(drafts: int, targets: int) -> None:
    """Qwen2.5 up to 3B has 151,936 rows, above 152,064, for one tokenizer (here two entries wide)."""
    sizes: dict[str, Any] = {"hidden_size": 8, "num_blocks": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    source = Target(tiny.llama(vocab_size=targets, seed=3, **sizes), TargetConfig("target"))
    lm = tiny.llama(vocab_size=drafts, seed=7, **sizes)
    module, objective = DistilledLM(lm, CONFIG, targets), DraftLMObjective(source.ends, CONFIG)
    ids = torch.tensor([7, 151_600, 9, min(targets, 152_000) - 1])  # the last: a padding row, if the target has more
    states = source.features(ids[None]).last_hidden[0].clone()
    output = objective(module, batch_of([CachedRow(ids, torch.tensor([0, 1, 1, 1]), states, None, 0)]))
    with torch.no_grad():
        log_q = lm(ids[None, :3].clamp(max=drafts - 1)).logits[0, :, :151_936].log_softmax(-1)
        log_p = source.model(ids[None]).logits[0, :3, :151_936].log_softmax(-1)
    expected = (log_p.exp() * (log_p - log_q)).sum()
    torch.testing.assert_close(output.terms["distill"][1].detach(), expected, rtol=1e-3, atol=1e-3)
    known = [place for place in range(3) if int(ids[place + 1]) < 151_936]
    told = -sum(log_q[place, ids[place + 1]] for place in known)
    torch.testing.assert_close(output.terms["cross_entropy"][1].detach(), told, rtol=1e-4, atol=1e-4)
