"""Formulas for what a training takes: floating-point operations, hours and memory (`train --plan`)."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from aerie.train.objectives import Objective
from aerie.train.optimizers import muon_matrices

# Dense bf16 operations per second of an H100 and an H200 (SXM; NVIDIA's data sheets), and the share that good training
# reaches (model FLOPs utilisation: recomputation takes time, but does not count as work).
PEAK, MFU = 989e12, 0.4
GPUS = {"H100": 80e9, "H200": 141e9}  # bytes of memory


@dataclass(frozen=True)
class Load:
    """Counts of some rows, which decide the costs."""

    tokens: int
    pairs: int  # of a query and a key in one row, causal or not, as torch's FlopCounterMode counts them
    slots: Sequence[int]  # supervised after 0, 1, ... unroll steps
    rows: int = 1

    @classmethod
    def of_rows(cls, rows: Iterable[tuple[Any, Any]], num_steps: int) -> "Load":
        """From rows of (input_ids, turn_ids)."""
        tokens, pairs, count, slots = 0, 0, 0, np.zeros(num_steps, dtype=np.int64)
        for count, (ids, turn_ids) in enumerate(rows, start=1):  # noqa: B007
            tokens, pairs = tokens + len(ids), pairs + len(ids) ** 2
            sizes = np.bincount(np.asarray(turn_ids)[1:])[
                1:
            ]  # of each turn, without the row's first token
            slots += np.clip(sizes[:, None] - 1 - np.arange(num_steps), 0, None).sum(0)
        return cls(tokens, pairs, slots.tolist(), count)


def operations(objective: Objective, load: Load, trunk: Any = None) -> dict[str, float]:
    """Operations of the head's layers, the laws (LM heads) and, with online features (trunk), the target's forward.

    A row of a matrix product takes 2 operations per weight, and 4 more in the backward pass.
    """
    head, settings, sizes = objective.head, objective.settings, objective.head.config
    matrices = {
        name: each.numel()
        for name, each in head.named_parameters()
        if each.ndim == 2 and "embed" not in name
    }

    def size_of(*parts: str) -> int:
        return sum(size for name, size in matrices.items() if any(part in name for part in parts))

    own, keys, markov = size_of("lm_head"), size_of("k_proj", "v_proj"), size_of("markov_w")
    body, fc = sum(matrices.values()) - own - markov, matrices.get("fc.weight", 0)
    first, count = load.slots[0], sum(load.slots)
    shared = 0 if objective.target is None else objective.target.lm_head.numel()
    width = (getattr(sizes, "num_attention_heads", None) or 0) * (
        getattr(sizes, "head_dim", None) or 0
    )
    attention = 12 * load.pairs * width * getattr(sizes, "num_hidden_layers", 0)
    laws = 2 * shared * first  # the target's
    match settings.kind:
        case "eagle1":
            work, laws = body * load.tokens, laws + 4 * shared * first
        case "eagle3":  # fc, keys and values of all tokens, the rest of supervised slots
            attention *= settings.unroll_steps
            work = fc * load.tokens + keys * (load.tokens - first) + (body - fc) * count
            laws += (6 if head.lm_head.weight.requires_grad else 4) * own * count
        case "medusa" | "hydra":
            work, laws = body * first, laws + (6 * own or 4 * shared * sizes.num_heads) * first
        case "block":  # fc, keys and values of all tokens; the rest, with attention's products, of the blocks' rows
            blocks = min(first, load.rows * settings.anchors)
            products = 2 * sizes.num_hidden_layers * width * (load.tokens // load.rows)
            attention, rows = 0, blocks * sizes.block_size
            work = (fc + keys) * load.tokens + (body - fc + products) * rows
            laws += (4 * shared + 3 * markov) * blocks * sizes.num_places
        case _:  # a draft LM
            own = head.get_output_embeddings().weight.numel()
            work, laws = (
                (body - own * ("lm_head.weight" in matrices)) * load.tokens,
                laws + 6 * own * first,
            )
    found = {"head": 6.0 * work + attention, "laws": float(laws)}
    if trunk is not None:
        decoder, text = trunk.get_decoder(), trunk.config.get_text_config()
        read = (
            sum(each.numel() for each in decoder.parameters())
            - trunk.get_input_embeddings().weight.numel()
        )
        found["target"] = (
            2.0 * read * load.tokens + 4 * load.pairs * text.num_hidden_layers * text.hidden_size
        )
    return found


def optimizer_operations(objective: Objective) -> float:
    """Operations of a Muon step in one process, for any batch: five rounds of Newton-Schulz (arXiv 2502.16982, eq. 2).

    A round for X [n, m] with n <= m computes A = X X^T, A A, and their sum times X.
    """
    if objective.settings.optimizer.kind != "muon":
        return 0.0
    sides = [sorted(matrix.shape) for matrix in muon_matrices(objective.head)]
    return float(sum(5 * (4 * n * n * m + 2 * n**3) for n, m in sides))


def memory(objective: Objective, tokens: int, itemsize: int, trunk: Any = None) -> dict[str, int]:
    """Peak bytes of each part on a GPU without ZeRO; tokens: of the largest batch; itemsize: of an activation."""
    head, settings, target, sizes = (
        objective.head,
        objective.settings,
        objective.target,
        objective.head.config,
    )
    whole = [*head.parameters(), *head.buffers()]
    trained = [(name, each) for name, each in head.named_parameters() if each.requires_grad]
    count = sum(each.numel() for _, each in trained)
    shared = (
        {}
        if target is None
        else {x.data_ptr(): x.nbytes for x in (target.embedding, target.lm_head)}
    )
    precision = 4 if target is None else target.lm_head.itemsize
    found = {"weights": 4 * count, "gradients": 4 * count, "moments": 8 * count}
    if settings.optimizer.kind == "muon":  # Muon has one moment, AdamW two
        found["moments"] -= 4 * sum(each.numel() for each in muon_matrices(head))
    found["frozen"] = sum(each.nbytes for each in whole) - 4 * count + sum(shared.values())
    found["copy that is measured"] = sum(
        each.numel() * min(precision, each.itemsize) for each in whole
    )
    if trunk is not None:
        found["target"] = sum(each.numel() for each in trunk.parameters()) * precision - sum(
            shared.values()
        )
    if settings.kind in ("eagle1", "eagle3", "block"):
        width, inner, steps = (
            sizes.hidden_size,
            sizes.intermediate_size,
            getattr(settings, "unroll_steps", 1),
        )
        heads, kv = (
            number * sizes.head_dim
            for number in (sizes.num_attention_heads, sizes.num_key_value_heads)
        )
        # What autograd keeps of a layer: its norms' and matrices' inputs, queries, keys, values, attention's output.
        layer, ends = (
            6 * width + 2 * heads + 2 * kv + 4 * inner,
            (5 if settings.kind == "eagle1" else 7) * width,
        )
        kept = sizes.num_hidden_layers * (
            width + 2 * kv if settings.gradient_checkpointing else layer
        )
        again = layer if settings.gradient_checkpointing else 0
        slots, chunk = tokens * steps, objective.chunk_on(is_gpu=True)
        if settings.kind == "block":  # not only its blocks' rows: fc, keys and values of the text
            slots = min(tokens, settings.batch_size * settings.anchors) * sizes.block_size
            ends += tokens * (5 * width + 2 * kv * sizes.num_hidden_layers) // slots
            chunk = (
                chunk * max(1, slots // tokens) // sizes.block_size
            )  # it counts states, which slots share
        found["activations"] = itemsize * (slots * (kept + ends) + tokens * again)
        # In float32: logits, both laws, what the loss makes of them, and gradients.
        columns = 4 * sizes.draft_vocab_size if settings.kind == "eagle3" else 6 * sizes.vocab_size
        found["laws"] = 4 * columns * min(slots, chunk)
    return found
