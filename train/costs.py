"""Formulas for what a training takes: floating-point operations, hours and memory (`train --plan`)."""

from typing import Any

from aerie.train.objectives import Objective
from aerie.train.optimizers import muon_matrices
from aerie.train.workload import Load

# Dense bf16 operations per second of an H100 and an H200 (SXM; NVIDIA's data sheets), and the share that good training
# reaches (model FLOPs utilisation: recomputation takes time, but does not count as work).
PEAK, MFU = 989e12, 0.4
GPUS = {"H100": 80e9, "H200": 141e9}  # bytes of memory


def operations(objective: Objective, load: Load, trunk: Any = None) -> dict[str, float]:
    """Operations of the head's layers, the laws (LM heads) and, with online features (trunk), the target's forward.

    A row of a matrix product takes 2 operations per weight, and 4 more in the backward pass.
    """
    work = objective.work(load)
    totals = {"head": 6.0 * work.products + work.attention, "laws": float(work.laws)}
    if trunk is not None:
        text = trunk.config.get_text_config()
        weights = sum(parameter.numel() for parameter in trunk.get_decoder().parameters())
        weights -= trunk.get_input_embeddings().weight.numel()
        attention = 4 * load.pairs * text.num_hidden_layers * text.hidden_size
        totals["target"] = 2.0 * weights * load.tokens + attention
    return totals


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
    head, target = objective.head, objective.target
    tensors = [*head.parameters(), *head.buffers()]
    trained = [parameter.numel() for parameter in head.parameters() if parameter.requires_grad]
    count = sum(trained)
    shared: dict[int, int] = {}  # bytes of the target's weights, by address: they may be tied
    if target is not None:
        for weight in (target.embedding, target.lm_head):
            shared[weight.data_ptr()] = weight.nbytes
    precision = 4 if target is None else target.lm_head.itemsize
    parts = {"weights": 4 * count, "gradients": 4 * count, "moments": 8 * count}
    if objective.settings.optimizer.kind == "muon":  # Muon has one moment, AdamW two
        parts["moments"] -= 4 * sum(matrix.numel() for matrix in muon_matrices(head))
    frozen = sum(tensor.nbytes for tensor in tensors) - 4 * count
    parts["frozen"] = frozen + sum(shared.values())
    parts["copy that is measured"] = sum(
        tensor.numel() * min(precision, tensor.itemsize) for tensor in tensors
    )
    if trunk is not None:
        weights = sum(parameter.numel() for parameter in trunk.parameters())
        parts["target"] = weights * precision - sum(shared.values())
    activations = objective.activations(tokens)
    if activations is not None:
        parts["activations"] = itemsize * activations.numbers
        parts["laws"] = 4 * activations.law_numbers
    return parts
