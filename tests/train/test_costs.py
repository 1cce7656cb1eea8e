"""The plan's formulas against torch's counts: operations of a step, and bytes that its forward pass
keeps."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from aerie.configs.schema.heads import Eagle1Train, Eagle3Train, MuonSection
from aerie.data.batches import collate
from aerie.data.feature_cache import CachedRow
from aerie.train.costs import memory, operations, optimizer_operations
from aerie.train.objectives import Eagle1Objective, Eagle3Objective
from aerie.train.optimizers import build_optimizers
from aerie.train.workload import Load
from tests import tiny
from tests.train.test_objectives import Peak

VOCAB = tiny.vocab(320, 64)
LENGTH, COUNT = 200, 4


def forward(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return sdpa_flop_count(query, key, value)


def backward(gradient: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return sdpa_backward_flop_count(gradient, query, key, value)


ATTENTION = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: forward,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: backward,
}


@pytest.mark.parametrize("inner", [64, 256])
@pytest.mark.parametrize("kind", ["eagle1", "eagle3"])
def test_plan_is_torchs_count(kind: str, inner: int) -> None:
    """Operations and peak memory are what torch counts."""
    generator = torch.Generator().manual_seed(0)
    rows = [
        CachedRow(
            torch.randint(5, 320, (LENGTH,), generator=generator),
            torch.ones(LENGTH, dtype=torch.int32),
            torch.randn(LENGTH, 64),
            torch.randn(LENGTH, 128),
        )
        for _ in range(COUNT)
    ]
    if kind == "eagle1":
        head = tiny.head(VOCAB.embedding, intermediate_size=inner)
        objective = Eagle1Objective(head, VOCAB, Eagle1Train(feature_noise=0.0)).train()
    else:
        head = tiny.eagle3_head(VOCAB.embedding, intermediate_size=inner)
        objective = Eagle3Objective(head, VOCAB, Eagle3Train(unroll_steps=3)).train()
    batch, load = (
        collate(rows, range(COUNT)),
        Load.of_rows([(row.input_ids, row.turn_ids) for row in rows], 3),
    )
    assert (
        load.slots == [int(batch.supervised(k).sum()) for k in range(3)]
        and load.tokens == batch.num_tokens
    )
    with FlopCounterMode(display=False, custom_mapping=ATTENTION) as counted:
        objective(batch).total(objective.weights).backward()
    assert sum(operations(objective, load).values()) == pytest.approx(
        counted.get_total_flops(), rel=0.1
    )
    with Peak() as peak:  # gradients are allocated already
        objective(batch).total(objective.weights).backward()
    parts = memory(objective, batch.num_tokens, 4)
    assert parts["activations"] + parts["laws"] == pytest.approx(peak.most, rel=0.1)
    trained = [parameter for parameter in head.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained)
    optimizer.step()
    objective.settings = replace(objective.settings, optimizer=MuonSection())
    with FlopCounterMode(display=False) as counted:
        build_optimizers(objective, objective.settings)[0].step()
    assert optimizer_operations(objective) == counted.get_total_flops()
    moments = sum(x.nbytes for state in optimizer.state.values() for x in state.values() if x.ndim)
    gradients = sum(parameter.grad.nbytes for parameter in trained if parameter.grad is not None)
    assert (parts["moments"], parts["gradients"]) == (moments, gradients)
    frozen = sum(x.nbytes for x in [*head.parameters(), *head.buffers()]) - parts["weights"]
    assert parts["frozen"] == frozen + VOCAB.embedding.nbytes + VOCAB.lm_head.nbytes


def test_target_operations() -> None:
    """Operations of a target are what torch counts."""
    model = tiny.llama(hidden_size=64)
    ids = torch.randint(5, 320, (2, 100))
    with FlopCounterMode(display=False, custom_mapping=ATTENTION) as counted, torch.no_grad():
        model.model(input_ids=ids, use_cache=False)
    objective = Eagle1Objective(tiny.head(VOCAB.embedding), VOCAB, Eagle1Train())
    found = operations(objective, Load(200, 2 * 100**2, [0]), model)["target"]
    assert found == pytest.approx(counted.get_total_flops(), rel=0.1)
