"""Laws of every objective: its terms equal plain forms, slot by slot and step by step; padding,
other rows, chunks and recomputation change nothing; every loss trains; noise and dropout depend on
keys."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
from torch import Tensor
from torch.func import functional_call
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.nn.attention import flex_attention
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from aerie.configs.schema.heads import (
    BlockTrain,
    DraftLMTrain,
    Eagle1Train,
    Eagle3Train,
    LossName,
    MultiTokenTrain,
    TrainConfig,
)
from aerie.data.batches import Batch, collate
from aerie.data.feature_cache import CachedRow
from aerie.model.heads import HEADS, block
from aerie.model.vocab_weights import VocabWeights
from aerie.train.lm import LMObjective
from aerie.train.loop import means
from aerie.train.losses import Piece
from aerie.train.objectives import KeyedDropout, Objective
from tests import tiny
from tests.model.drafted import drafted, log_laws

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
    "block": BlockTrain(label_weight=0.7, law_weight=0.3),
    "block-deep": BlockTrain(),
    "lm": DraftLMTrain(),
    "draft_lm": DraftLMTrain(distill="kl", distill_weight=2.0, token_weight=0.5),
}
# Changes to the small heads of tests/tiny.py.
KEYS: dict[str, dict[str, Any]] = {
    "eagle3-deep": {"num_hidden_layers": 2, "qk_norm": True, "norm_output": True},
    "hydra++": {"prefix_layer": True, "num_layers": 2},
    "block": {
        "block_size": STEPS,
        "sample_from_anchor": True,
        "anchor_feature": True,
        "markov_rank": 3,
    },
    "block-deep": {
        "block_size": STEPS + 1,
        "in_block": "causal",
        "markov_rank": 3,
        "markov_order": 3,
        "markov_head": "gated",
        "num_hidden_layers": 2,
    },
}
MULTI_TOKEN = [kind for kind, settings in SETTINGS.items() if isinstance(settings, MultiTokenTrain)]


def objective(kind: str, keys: dict[str, Any] | None = None, **changes: Any) -> Objective:
    """An objective with its own head; all heads of a kind have the same weights."""
    settings: Any = replace(SETTINGS[kind], **changes)
    keys = KEYS.get(kind, {}) if keys is None else keys
    if "lm" in kind:
        lm = tiny.llama(num_blocks=1, seed=7)
        return LMObjective(lm, None if kind == "lm" else VOCAB, settings).train()
    if kind == "eagle1":
        head = tiny.head(VOCAB.embedding, scale=5.0)
    elif kind.startswith("eagle3"):
        head = tiny.eagle3_head(VOCAB.embedding, scale=8.0, **keys)
    else:
        heads = {"num_heads": NUM_HEADS} if kind in MULTI_TOKEN else {}
        head = tiny.multi_token_head(settings.kind, VOCAB, 0.05, **heads, **keys)
    return HEADS[settings.kind].objective(head, VOCAB, settings).train()


def rows_with_taps(count: int) -> list[CachedRow]:
    generator = torch.Generator().manual_seed(100)
    return [
        replace(row, taps=torch.randn(len(row.input_ids), 64, generator=generator))
        for row in tiny.rows(count)
    ]


def prepared(made: Objective, rows: list[CachedRow], numbers: Any, packed: bool = False) -> Batch:
    return made.prepare(collate([rows[n] for n in numbers], numbers, packed), 1)


def starts(row: CachedRow) -> list[tuple[int, int]]:
    """(slot, number of supervised steps) of every slot where a chain starts, by the turn ids
    alone."""
    turn_ids = row.turn_ids.tolist()
    found = []
    for slot, turn in enumerate(turn_ids[1:]):
        alive = next(k for k, other in enumerate([*turn_ids[slot + 2 :], None]) if other != turn)
        if turn and alive:
            found.append((slot, alive))
    return found


def laws_of(head: Any, row: CachedRow, slot: int, steps: int) -> Tensor:
    """log q [steps, V or Vd] of a head or small LM that drafts from a slot on, given the row's own
    tokens."""
    tokens = row.input_ids[: slot + 1 + steps]
    if not hasattr(head, "kind"):
        return head(tokens[None]).logits[0, slot + 1 :].log_softmax(-1)
    return log_laws(head, VOCAB, tokens, row.last_hidden[: slot + 1], row.taps[: slot + 1])


@torch.no_grad()
@pytest.mark.parametrize(
    ("kind", "keys", "changes"),
    [
        ("eagle1", None, {}),
        ("eagle3", None, {"mask_outside_vocabulary": False}),
        ("eagle3", {"num_key_value_heads": 4, "fc_norm": True}, {}),
        ("eagle3-deep", None, {}),
        ("eagle3", {"norm_before_residual": True, "norm_before_fc": True}, {}),
        *((kind, None, {"dropout": 0.0}) for kind in MULTI_TOKEN),
        ("medusa", {"lm_head": "target", "num_layers": 2}, {"dropout": 0.0}),
        ("block", None, {}),
        ("block-deep", None, {}),
        ("block", {"block_size": STEPS + 1, "markov_rank": 0}, {}),
    ],
)
def test_terms_are_drafting(kind: str, keys: Any, changes: Any) -> None:
    """Terms are those of drafting step by step from every supervised slot."""
    made, rows, is_eagle3 = (
        objective(kind, keys, **changes),
        rows_with_taps(4),
        kind.startswith("eagle3"),
    )
    names = [*made.weights, *(["in_vocabulary"] if is_eagle3 else [])]
    head, sums, slots = made.head, dict.fromkeys(names, 0.0), dict.fromkeys(names, 0)
    most = 1 if kind == "eagle1" else STEPS if is_eagle3 or kind.startswith("block") else NUM_HEADS
    for row, slot, alive in ((text, *chain) for text in rows for chain in starts(text)):
        for k, log_q in enumerate(laws_of(head, row, slot, min(alive, most)), start=1):
            state = row.last_hidden[slot + k]
            found = {}
            logits = state @ VOCAB.lm_head.T
            law = logits.softmax(-1)
            if kind == "eagle1":
                made_by_head = drafted(
                    head, row.last_hidden[: slot + 1], row.input_ids[1 : slot + 2]
                )[0]
                found["feature"] = F.smooth_l1_loss(made_by_head, state)
            elif is_eagle3:
                inside = head.vocabulary.t2d[logits.argmax()].float()
                law = logits[head.vocabulary.ids].softmax(-1) * (
                    inside if made.settings.mask_outside_vocabulary else 1
                )
                found["in_vocabulary"] = inside if k == 1 else 0 * inside
            else:
                found[f"label_at_{k}"] = -log_q[row.input_ids[slot + 1 + k]]
            found |= dict.fromkeys(
                ("classification", f"loss_at_{k}", f"law_at_{k}"), -(law * log_q).sum()
            )
            for name in found.keys() & sums.keys():
                sums[name] += found[name].item()
                slots[name] += 1
    if is_eagle3:  # a choice outside the draft vocabulary is a miss, but counts in the divisor
        slots = dict.fromkeys(slots, slots["loss_at_1"])
        assert 0 < sums["in_vocabulary"] < slots["in_vocabulary"]
    if kind.startswith("block"):  # all places share a divisor
        slots = dict.fromkeys(
            slots, sum(count for name, count in slots.items() if name.startswith("law"))
        )
    output, counts = made(collate(rows, range(4))), made.counts(collate(rows, range(4)))
    outputs = {name: output.metrics.get(name) or output.terms[name] for name in names}
    assert {name: value.item() for name, (value, _) in outputs.items()} == pytest.approx(
        sums, rel=2e-5
    )
    assert {name: int(count) for name, (_, count) in outputs.items()} == slots and min(
        slots.values()
    ) > 0
    assert {name: int(count) for name, count in counts.items()}.items() <= slots.items()


@pytest.mark.parametrize("kind", ["block", "block-deep"])
def test_flex_attention(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Flex attention has the dense masks loss and gradients."""
    monkeypatch.setattr(block, "_flex", flex_attention.flex_attention)
    # torch refuses gradients on CPUs, although it has a slow form of them
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *_: None)
    found = []
    for is_sparse in (False, True):
        monkeypatch.setattr(block, "_is_sparse", lambda x, is_sparse=is_sparse: is_sparse)
        made = objective(kind, gradient_checkpointing=is_sparse)
        found.append(loss_and_gradient(made, [prepared(made, rows_with_taps(5), range(5))])[1])
    assert (found[1] - found[0]).norm() <= 1e-5 * found[0].norm()


class NoWaiting(TorchDispatchMode):
    """Refuses operations that wait for the device: those between it and the host, except
    uploads."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        devices = {
            x.device for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor) and x.ndim
        }
        is_upload = func is torch.ops.aten._to_copy.default and kwargs.get("non_blocking", False)
        assert (
            is_upload or len(devices | {kwargs.get("device") or next(iter(devices), None)}) <= 1
        ), func
        return func(*args, **kwargs)


@pytest.mark.parametrize("kind", ["eagle3", "block"])
@pytest.mark.parametrize("chunk", [11, 4096])
def test_no_waiting(kind: str, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step never waits for the device."""
    monkeypatch.setattr(
        torch, "autocast", lambda *_, **__: nullcontext()
    )  # meta tensors have no autocast
    made = objective(kind, loss_chunk_slots=chunk, gradient_checkpointing=chunk < 99)
    batch = prepared(made, rows_with_taps(4), range(4)).to("meta")  # no values to wait for
    made.target, made = VOCAB.to("meta"), made.to("meta")
    made(batch)  # makes RoPE's table, once
    with NoWaiting():
        made(batch).total(made.weights).backward()
    assert all(p.grad is not None for p in made.parameters() if p.requires_grad)


class Peak(TorchDispatchMode):
    """The peak bytes of tensors made inside, without the storages of known tensors."""

    def __init__(self, known: Sequence[Tensor] = ()) -> None:
        super().__init__()
        self.known = {x.untyped_storage()._cdata for x in known}
        self.made: dict[int, Any] = {}
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        storages = [x.untyped_storage() for x in tree_leaves(made) if isinstance(x, Tensor)]
        self.made |= {
            x._cdata: (StorageWeakRef(x), x.nbytes())
            for x in storages
            if x._cdata not in self.known
        }
        self.made = {place: pair for place, pair in self.made.items() if not pair[0].expired()}
        self.most = max(self.most, sum(size for _, size in self.made.values()))
        return made


@pytest.mark.parametrize("kind", ["eagle1", "eagle3"])
def test_chunk_memory(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """D 4096, V 128,256, Vd 32,000: forward and backward pass of one chunk, counted on meta
    tensors."""
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: nullcontext())
    sizes = {"hidden_size": 4096, "vocab_size": 128_256, "intermediate_size": 1}
    if kind == "eagle3":
        sizes |= {"draft_vocab_size": 32_000, "target_hidden_size": 4096}
    small: Any = objective(kind).head
    with torch.device("meta"):
        table = torch.empty(128_256, 4096, dtype=torch.bfloat16)
        head = type(small)(replace(small.config, **sizes)).requires_grad_(False)
        states, outputs = torch.empty(2, 8192, 4096, dtype=torch.bfloat16).requires_grad_()
    if kind == "eagle3":
        head.d2t = torch.zeros(32_000).long()
        head.t2d = torch.arange(128_256) < 32_000
    vocab = VocabWeights(table, table, None, 1.0, None)
    made: Any = HEADS[kind].objective(head, vocab, SETTINGS[kind]).to("meta")
    with Peak([*head.parameters(), *head.buffers(), table, states]) as peak:
        if kind == "eagle1":
            piece = Piece.of_own_states(states[: made.chunk], outputs[: made.chunk].float())
            made._sums(piece)["classification"].backward()
        else:
            n = made.chunk // STEPS
            piece = Piece(states[:n], [torch.arange(n)] * STEPS, [[outputs[:n]] * STEPS])
            made._soft_cross_entropy_sums(made._with_law(piece))["loss"].sum().backward()
    assert 2**28 < peak.most <= 2**30


def test_term_weights() -> None:
    """Head ks and step ks weights decay with k."""
    labels = {f"label_at_{k}": 0.7 * 0.8**k for k in range(1, 4)}
    laws = {f"law_at_{k}": 0.3 * 0.8**k for k in range(1, 4)}
    assert objective("medusa").weights == pytest.approx(labels | laws)
    assert objective("eagle3").weights == {f"loss_at_{k + 1}": 0.8**k for k in range(STEPS)}


@pytest.mark.parametrize("kind", SETTINGS)
def test_gradient_is_slope(
    kind: str,
) -> None:
    """The gradient of each weight is the slope of each loss through every fed back output."""
    totals = []
    before = VOCAB.lm_head.clone()
    for name in get_args(LossName) if kind != "lm" else [None]:
        made, losses = objective(kind, **{"distill" if "lm" in kind else "loss": name}), []
        batch = prepared(made, rows_with_taps(2), [0, 1])
        made(batch).total(made.weights).backward()
        slopes: dict[str, Any] = {
            name: p.grad for name, p in made.named_parameters() if p.requires_grad
        }
        with torch.no_grad():
            for step in (0.003, -0.003):
                moved = {
                    name: made.get_parameter(name) + step * slope / slope.norm()
                    for name, slope in slopes.items()
                }
                losses.append(functional_call(made, moved, (batch,)).total(made.weights).item())
        expected = sum(slope.norm().item() for slope in slopes.values())
        if name != "lk_hybrid":  # its mixture counts as constant
            assert (losses[0] - losses[1]) / 0.006 == pytest.approx(expected, rel=1e-2), name
        totals.append(round(sum(losses), 3))
    assert len({*totals}) == len(totals) and VOCAB.lm_head.equal(before)


def filled(batch: Batch) -> Batch:
    """The batch with values in its padding, which must not matter."""
    padding = torch.arange(batch.input_ids.shape[1]) >= batch.lengths[:, None]  # [B, T]
    return replace(
        batch,
        features=batch.features.masked_fill(padding[..., None], 1e3),
        taps=batch.taps.masked_fill(padding[..., None], 1e3),
        input_ids=batch.input_ids.masked_fill(padding, 7),
    )


def loss_and_gradient(made: Objective, batches: list[Batch]) -> tuple[Tensor, Tensor]:
    counts = [made.counts(batch) for batch in batches]
    scales = {name: 1.0 / max(sum(int(count[name]) for count in counts), 1) for name in counts[0]}
    total = torch.zeros(())
    for batch in batches:
        loss = made(batch).total(made.weights, scales)
        loss.backward()
        total += loss.detach()
    return total, torch.cat([p.grad.flatten() for p in made.parameters() if p.grad is not None])


@pytest.mark.parametrize("kind", SETTINGS)
def test_batches_move_nothing(
    kind: str,
) -> None:
    """Padding company packing chunks and recomputation move neither loss nor gradient."""
    rows = rows_with_taps(6)
    whole = [range(6)]
    packed = kind.startswith("eagle3")
    mixed = [[5, 0], [4, 2, 1], [3]]
    cases: list[tuple[dict[str, Any], Any, bool]] = [
        ({}, whole, False),
        ({}, [[0], [1], [2], [3], [4], [5]], False),
        ({}, mixed, packed),
        ({"loss_chunk_slots": 7}, mixed, False),
        ({"loss_chunk_slots": 1}, whole, packed),
        ({"gradient_checkpointing": True}, whole, packed),
    ]
    found = []
    for changes, groups, is_packed in cases:
        made = objective(kind, **changes)
        batches = [prepared(made, rows, group, is_packed) for group in groups]
        if groups is not whole and not is_packed:
            batches = [*map(filled, batches)]
        found.append(loss_and_gradient(made, batches))
    for loss, gradient in found[1:]:
        assert loss.item() == pytest.approx(found[0][0].item(), rel=5e-6)
        assert (gradient - found[0][1]).norm() <= 5e-6 * found[0][1].norm()
    made = objective(kind)
    # A process without rows has all gradients, too.
    _, nothing = loss_and_gradient(made, [prepared(made, [], [])])
    assert len(nothing) == len(found[0][1]) and not nothing.any()


@pytest.mark.parametrize("kind", SETTINGS)
def test_bf16_autocast(kind: str) -> None:
    """Bf16 autocast trains and stays close."""
    made = objective(kind)
    batch = prepared(made, rows_with_taps(3), range(3))
    exact = made(batch).total(made.weights).item()
    with torch.autocast("cpu", torch.bfloat16):
        found = made(batch).total(made.weights)
    found.backward()
    assert found.dtype == torch.float32 and found.item() == pytest.approx(exact, rel=0.05)
    # As in evaluation with a target in bf16.
    measured = made.bfloat16().eval()(batch).total(made.weights)
    assert measured.item() == pytest.approx(exact, rel=0.05)


def held_out(made: Objective, rows: list[CachedRow]) -> dict[str, float]:
    with torch.no_grad():
        sums = made.eval().measure(collate(rows, range(len(rows))))
    return made.summarise(means(sums, torch.device("cpu")))


@pytest.mark.parametrize("kind", [kind for kind in SETTINGS if kind != "lm"])
def test_predicted_tau(kind: str) -> None:
    """Predicted tau is one plus the mean run of hits of drafting."""
    most = 3
    rows = []
    chains = []
    made = objective(kind, eval_depths=most).eval()

    def choices(row: CachedRow, slot: int, steps: int) -> Any:
        tokens = laws_of(made.head, row, slot, steps).argmax(-1)
        return made.head.vocabulary.target_ids(tokens) if kind.startswith("eagle3") else tokens

    with torch.no_grad():
        for row in rows_with_taps(5):
            states = row.last_hidden.clone()
            for slot, _ in starts(row):
                if (
                    slot % 3
                ):  # for two of three states, the target's likeliest token is the head's draft
                    (token,) = choices(replace(row, last_hidden=states), slot, 1)
                    states[slot + 1] = 5.0 * VOCAB.lm_head[token] / VOCAB.lm_head[token].norm()
            rows.append(replace(row, last_hidden=states))
            wanted = (states @ VOCAB.lm_head.T).argmax(-1)
            for slot, alive in starts(row):
                tokens = choices(rows[-1], slot, min(alive, most))
                chains.append((tokens == wanted[slot + 1 : slot + 1 + len(tokens)]).tolist())
    found, runs = held_out(made, rows), [[*hits, False].index(False) for hits in chains]
    assert 0 < sum(runs) < most * len(runs)  # neither all hits nor none
    assert found["predicted_tau"] == pytest.approx(1 + sum(runs) / len(runs), abs=1e-6)
    for depth in range(most):
        at_depth = [hits[depth] for hits in chains if depth < len(hits)]
        accuracy = sum(at_depth) / len(at_depth)
        assert found[f"accuracy_at_{depth + 1}"] == pytest.approx(accuracy, abs=1e-6)


def test_noise() -> None:
    """Noise is uniform and belongs to seed epoch and row."""
    rows = tiny.rows(2)

    def noise(seed: int = 0, epoch: int = 0) -> Any:
        made: Any = objective("eagle1", feature_noise=0.1, seed=seed)
        batch = made.prepare(collate(rows, range(2)), epoch)
        return made.noise(batch, batch.features)

    first = noise()
    length = len(rows[0].input_ids)
    assert (
        first.equal(noise()) and not first.equal(noise(seed=1)) and not first.equal(noise(epoch=1))
    )
    assert (
        not first[0, :4].equal(first[1, :4])
        and not first[0, length:].any()
        and 0.099 < first.abs().max() <= 0.1
    )
    assert first[0, :length].std().item() == pytest.approx(0.1 / 3**0.5, rel=0.05)


def test_dropout() -> None:
    """Dropout belongs to seed epoch row and place alone and not to held out rows."""
    rows = tiny.rows(2)
    counts = [len(starts(row)) for row in rows]

    def masks(seed: int = 0, epoch: int = 0, branch: int = 0, place: int = 0) -> Tensor:
        made = objective("medusa", dropout=0.4, seed=seed)
        batch: Any = made.prepare(collate(rows, range(2)), epoch)
        return KeyedDropout(0.4, batch.seeds, counts, branch)(torch.ones(sum(counts), 500), place)

    first = masks()
    one, other = first.split(counts)
    assert not one[:3].equal(other[:3]) and first.equal(masks())
    assert not any(first.equal(masks(**{key: 1})) for key in ("seed", "epoch", "branch", "place"))
    assert first.unique().tolist() == pytest.approx([0.0, 1 / 0.6])
    assert (first == 0).float().mean().item() == pytest.approx(0.4, abs=0.02)
    plain, dropped = (objective("medusa", dropout=rate) for rate in (0.0, 0.4))
    losses = [
        made(prepared(made, rows, [0, 1])).total(made.weights).item() for made in (plain, dropped)
    ]
    assert losses[0] != pytest.approx(losses[1], rel=1e-3) and held_out(plain, rows) == held_out(
        dropped, rows
    )


def test_drawn_blocks() -> None:
    """Blocks are drawn without repeats by seed epoch and row among supervised places."""
    rows = tiny.rows(2)

    def drawn(anchors: int = 2, numbers: Sequence[int] = (0, 1), **key: int) -> Tensor:
        made: Any = objective("block", anchors=anchors, seed=key.get("seed", 0))
        batch = made.prepare(collate([rows[n] for n in numbers], numbers), key.get("epoch", 0))
        return made.draw_blocks(batch)[0]

    every = [[slot + 1 for slot, _ in starts(row)] for row in rows]
    assert [[at for at in row if at] for row in drawn(anchors=99).tolist()] == every
    assert drawn()[1:].equal(drawn(numbers=(1,))) and not drawn().equal(drawn(epoch=1))
    many = [drawn(seed=seed) for seed in range(40)]
    assert all(row[0] < row[1] for found in many for row in found.tolist())
    assert [sorted({int(at) for found in many for at in found[row]}) for row in (0, 1)] == every
