"""On-policy rows: the tokens are the draft LM's own, the laws the target's, and the rest of the data is as it was."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from aerie.configs.errors import UserError
from aerie.configs.schema.target_and_head import TargetConfig
from aerie.configs.schema.train import TrainConfig
from aerie.data.batches import Batch, OnlineFeatures, collate
from aerie.model.target import Target
from aerie.train.objectives.lm import DistilledLM, DraftLMObjective, OnPolicySupply, marked
from tests import tiny

CONFIG = TrainConfig(distill="kl", on_policy=1.0, on_policy_tokens=3)
END = 3  # <|end|>


def target(vocab_size: int = 320) -> Target:
    return Target(tiny.llama(vocab_size=vocab_size, num_blocks=2, seed=3), TargetConfig("target"))


def draft(**sizes: Any) -> Any:
    return tiny.llama(num_blocks=1, seed=7, **sizes)


def plain(count: int = 6) -> Batch:
    rows = [replace(row, last_hidden=None) for row in tiny.rows(count)]  # type: ignore[arg-type]
    return collate(rows, range(count))


def drawn(batch: Batch, lm: Any, source: Target) -> Batch:
    return OnPolicySupply(lm, OnlineFeatures(source, ()), 320, {END})(batch)


def test_a_window_of_an_answer_is_redrawn_and_nothing_behind_it_is_learnt() -> None:
    before, lengths = plain(40), set()
    batch = marked(before, CONFIG, 0)
    assert batch.redrawn is not None
    for old, turns, redrawn in zip(before.turns, batch.turns, batch.redrawn, strict=True):
        places = redrawn.nonzero()[:, 0].tolist()
        lengths.add(len(places))
        assert places == list(range(places[0], places[-1] + 1)) and places[0] > 0
        assert len(set(old[places].tolist())) == 1 and int(old[places[0]]) > 0
        assert turns[: places[-1] + 1].equal(old[: places[-1] + 1]) and not turns[places[-1] + 1 :].any()
    assert lengths == {1, 2, 3}


def test_the_recipe_says_how_many_rows_and_the_same_ones_come_again() -> None:
    batch = plain(200)
    half = replace(CONFIG, on_policy=0.5)
    first, again, later = (marked(batch, half, epoch) for epoch in (0, 0, 1))
    assert first.redrawn is not None and again.redrawn is not None and later.redrawn is not None
    assert first.redrawn.equal(again.redrawn) and first.seeds == again.seeds and not first.redrawn.equal(later.redrawn)
    assert 70 < int(first.redrawn.any(1).sum()) < 130
    picked = collate([replace(row, last_hidden=None) for row in tiny.rows(200)[17:18]], [17])  # type: ignore[arg-type]
    assert marked(picked, half, 0).redrawn.equal(first.redrawn[17:18, : picked.turns.shape[1]])  # type: ignore[union-attr]


def test_tokens_are_drawn_from_the_lms_law_after_its_own_ones() -> None:
    source, lm = target(), draft()
    batch = marked(plain(), CONFIG, 0)
    found = drawn(batch, lm, source)
    assert batch.redrawn is not None and batch.seeds is not None
    assert found.input_ids[~batch.redrawn].equal(batch.input_ids[~batch.redrawn])
    for ids, redrawn, seed in zip(found.input_ids, batch.redrawn, batch.seeds, strict=True):
        generator = torch.Generator().manual_seed(seed)
        for place in redrawn.nonzero()[:, 0].tolist():
            with torch.no_grad():
                logits = lm(ids[None, :place]).logits[0, -1].float()
            logits[END] = float("-inf")
            assert int(ids[place]) == int(torch.multinomial(logits.softmax(-1), 1, generator=generator))
    assert found.features is not None
    for row, (ids, length) in enumerate(zip(found.input_ids, found.lengths.tolist(), strict=True)):
        states = source.features(ids[None, :length]).last_hidden[0]
        torch.testing.assert_close(found.features[row, :length], states, rtol=1e-4, atol=1e-4)


def test_an_end_of_a_turn_is_never_drawn() -> None:
    source, lm = target(), draft()
    batch = marked(plain(), CONFIG, 0)
    assert batch.redrawn is not None
    likely = set(drawn(batch, lm, source).input_ids[batch.redrawn].tolist())
    other = OnPolicySupply(lm, OnlineFeatures(source, ()), 320, likely)(batch)
    assert likely and not likely & set(other.input_ids[batch.redrawn].tolist())


def losses(batch: Batch, lm: Any, source: Target) -> dict[str, Tensor]:
    output = DraftLMObjective(source.ends, CONFIG)(DistilledLM(lm, CONFIG, 320), batch)
    return {name: value.detach() for name, (_, value, _) in output.terms.items()}


def test_the_cross_entropy_leaves_out_what_the_lm_has_written_and_the_laws_do_not() -> None:
    source, lm = target(), draft()
    batch = drawn(marked(plain(), CONFIG, 0), lm, source)
    cross_entropy, law = torch.zeros(()), torch.zeros(())
    assert batch.redrawn is not None
    for ids, turns, redrawn in zip(batch.input_ids, batch.turns, batch.redrawn, strict=True):
        with torch.no_grad():
            log_q = lm(ids[None]).logits[0].log_softmax(-1)
            p = source.model(ids[None]).logits[0].softmax(-1)
        for place in range(len(ids) - 1):
            if turns[place + 1]:
                law += (p[place] * (p[place].log() - log_q[place])).sum()
                cross_entropy -= 0.0 if redrawn[place + 1] else log_q[place, ids[place + 1]]
    found = losses(batch, lm, source)
    torch.testing.assert_close(found["cross_entropy"], cross_entropy, rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(found["distill"], law, rtol=1e-4, atol=1e-3)


def test_an_evaluation_batch_and_one_without_rows_are_left_alone() -> None:
    source, lm = target(), draft()
    batch = plain()
    assert drawn(batch, lm, source).input_ids.equal(batch.input_ids)
    objective = DraftLMObjective(source.ends, CONFIG)
    empty = objective.prepare(collate([], []), 0)
    assert drawn(empty, lm, source) is empty
    none = marked(batch, replace(CONFIG, on_policy=0.0), 0)
    assert drawn(none, lm, source).input_ids.equal(batch.input_ids) and none.turns.equal(batch.turns)


def test_drawing_leaves_the_lm_in_training() -> None:
    source, lm = target(), draft().train()
    lm.gradient_checkpointing_enable()
    drawn(marked(plain(), CONFIG, 0), lm, source)
    assert lm.training and all(parameter.grad is None for parameter in lm.parameters())


def test_a_sharded_lm_is_refused_with_the_topology_that_works() -> None:
    lm = draft()
    lm.lm_head.weight.ds_id = 0  # what ZeRO-3 puts on each parameter
    with pytest.raises(UserError, match=r"train\.on_policy: ZeRO-3 keeps no whole draft LM .*zero2\.yaml"):
        drawn(marked(plain(), CONFIG, 0), lm, target())
