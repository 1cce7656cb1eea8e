"""Estimates what a training takes: operations, hours and memory (`train --plan`)."""

from collections.abc import Mapping
from typing import Any

from aerie.configs.errors import world_size
from aerie.configs.schema.recipe import Recipe
from aerie.train.jobs import Job
from aerie.train.objectives import Objective
from aerie.train.optimizers import muon_matrices
from aerie.train.resume import reads_cache
from aerie.train.workload import Load

# Dense bf16 operations per second of an H100 and an H200 (SXM; NVIDIA's data sheets).
PEAK = 989e12
# Model FLOPs utilisation: the share of PEAK that good training reaches. Recomputation takes time,
# but does not count as work.
MFU = 0.4
GPUS = {"H100": 80e9, "H200": 141e9}  # bytes of memory


def plan_text(recipe: Recipe, job: Job) -> str:
    """The text of `train --plan`: rows, steps, work and memory."""
    lengths = job.rows.lengths
    lines = [
        f"data: {len(lengths):,} rows, {sum(lengths):,} tokens an epoch; "
        f"{len(job.rows.held_out):,} held out",
        f"steps: {_plan_steps(job)}",
        f"work: {_plan_work(recipe, job)}",
        f"memory: {_plan_memory(recipe, job)}",
        f"output: {job.output}",
    ]
    return "\n".join(lines)


def _plan_steps(job: Job) -> str:
    config = job.objective.settings
    # Without a launcher, the world size is the user's WORLD_SIZE or one.
    order, steps = job.order(world_size())
    text = (
        f"{steps:,} of {config.batch_size} rows x {config.accumulation} x {world_size()} "
        f"processes: {steps / order.steps_per_epoch:.2f} epochs"
    )
    if config.max_seconds is not None:
        text += f", and at most {config.max_seconds:,g} s (train.max_seconds)"
    scaling = config.scale_rates
    if scaling is not None:
        factor = (scaling.steps / steps) ** scaling.power
        text += f"; rates x {factor:.3g} (train.scale_rates)"
    return text


def _plan_work(recipe: Recipe, job: Job) -> str:
    load = Load.of_rows(job.rows.tokens(), getattr(job.objective.settings, "unroll_steps", 1))
    work = operations(job.objective, load, None if reads_cache(recipe) else job.trunk)
    muon = optimizer_operations(job.objective)
    if muon:  # every process computes the step for all matrices
        work["Muon"] = muon * job.order(world_size())[0].steps_per_epoch * world_size()
    total = sum(work.values())
    hours = total / PEAK / MFU / 3600
    return (
        f"{total:.3g} operations an epoch ({_listed(work, total / 100, ' %')}): "
        f"{hours:,.2f} hours of an H100 or H200 "
        f"({MFU:.0%} of its {PEAK / 1e12:,.0f} TFLOP/s, dense bf16)"
    )


def _plan_memory(recipe: Recipe, job: Job) -> str:
    # The worst batch holds only rows of the greatest length.
    largest = job.objective.settings.batch_size * max(job.rows.lengths)  # tokens of a batch
    parts = memory(job.objective, largest, 2, job.trunk)
    # A target that is spread over GPUs is not on the GPU of the head.
    spread = parts.pop("target", 0) if recipe.target.device_map is not None else 0
    peak = sum(parts.values())
    unit, name = (2**30, "GiB") if peak > 2**30 else (2**20, "MiB")
    text = (
        f"about {peak / unit:,.1f} {name} a process in bf16, without ZeRO "
        f"({_listed(parts, unit, '')})"
    )
    if spread:
        text += f", beside {spread / unit:,.1f} {name} of the target over all GPUs"
    # CUDA's context, the kernels' work space and fragmentation take a twentieth.
    fitting = [gpu for gpu, size in GPUS.items() if peak < 0.95 * size]
    fits = f"fits {' and '.join(fitting)}" if fitting else "more than an H200 has"
    return f"{text}, at {largest:,} tokens a batch; {fits}"


def _listed(parts: Mapping[str, float], unit: float, suffix: str) -> str:
    return ", ".join(f"{name} {value / unit:,.3g}{suffix}" for name, value in parts.items())


def operations(objective: Objective, load: Load, trunk: Any = None) -> dict[str, float]:
    """The operations of the head's layers, of the laws (LM heads) and, if trunk is given, of the
    target's forward pass.

    A row of a matrix product takes 2 operations per weight, and 4 more in the backward pass.
    """
    work = objective.work(load)
    totals = {"head": 6.0 * work.products + work.attention, "laws": float(work.laws)}
    if trunk is not None:
        text = trunk.config.get_text_config()
        weights = sum(parameter.numel() for parameter in trunk.get_decoder().parameters())
        weights -= trunk.get_input_embeddings().weight.numel()
        # Two products per pair, only in the forward pass, because the target is frozen.
        attention = 4 * load.pairs * text.num_hidden_layers * text.hidden_size
        totals["target"] = 2.0 * weights * load.tokens + attention
    return totals


def optimizer_operations(objective: Objective) -> float:
    """The operations of one Muon step in one process: five rounds of Newton-Schulz (arXiv
    2502.16982, eq. 2). 0 without Muon.

    A round for X [n, m] with n <= m computes A = X X^T, A A, and their sum times X.
    """
    if objective.settings.optimizer.kind != "muon":
        return 0.0
    sides = [sorted(matrix.shape) for matrix in muon_matrices(objective.head)]
    # As n <= m, each of the two products with X takes 2 n n m operations, and A A takes 2 n n n.
    return float(sum(5 * (4 * n * n * m + 2 * n**3) for n, m in sides))


def memory(objective: Objective, tokens: int, itemsize: int, trunk: Any = None) -> dict[str, int]:
    """The peak bytes of each part on a GPU, without ZeRO.

    tokens: of the largest batch; itemsize: bytes of one number of an activation.
    """
    head = objective.head
    target = objective.target
    tensors = [*head.parameters(), *head.buffers()]
    trained = [parameter.numel() for parameter in head.parameters() if parameter.requires_grad]
    count = sum(trained)
    shared: dict[int, int] = {}  # address -> bytes, of the target's weights
    precision = 4
    if target is not None:
        precision = target.lm_head.itemsize
        # Embedding and LM head may be one tensor, which counts once.
        for weight in (target.embedding, target.lm_head):
            shared[weight.data_ptr()] = weight.nbytes
    # Trained weights, gradients and AdamW's two moments are in float32, even if bf16 computes.
    parts = {"weights": 4 * count, "gradients": 4 * count, "moments": 8 * count}
    if objective.settings.optimizer.kind == "muon":  # Muon has one moment, AdamW two
        parts["moments"] -= 4 * sum(matrix.numel() for matrix in muon_matrices(head))
    head_bytes = sum(tensor.nbytes for tensor in tensors)
    parts["frozen"] = head_bytes - 4 * count + sum(shared.values())
    # The loop measures a twin in the target's dtype, in which the head will be used.
    parts["copy that is measured"] = sum(
        tensor.numel() * min(precision, tensor.itemsize) for tensor in tensors
    )
    if trunk is not None:
        weights = sum(parameter.numel() for parameter in trunk.parameters())
        parts["target"] = weights * precision - sum(shared.values())
    # The two peaks add up, because a chunk's laws and all activations are held together.
    activations = objective.activations(tokens)
    if activations is not None:
        parts["activations"] = itemsize * activations.numbers
        parts["laws"] = 4 * activations.law_numbers
    return parts
