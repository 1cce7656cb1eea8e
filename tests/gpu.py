"""Runs on one CUDA device: the tests that need it, then timed features, training and decoding at real sizes.

python -m tests.gpu [--out DIR]            # make gpu: 10 to 20 minutes; the driver and pip wheels are enough
python -m tests.gpu --device cpu --tiny    # the same code in seconds

Weights are random and made in memory, so tau means nothing here, but the shares of a cycle do. MFU: of dense bf16.
"""

import argparse
import gc
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from transformers import AutoModelForCausalLM, LlamaConfig

from aerie.configs.errors import UserError
from aerie.configs.schema.decode import DynamicConfig
from aerie.configs.schema.heads import (
    BlockSection,
    BlockTrain,
    Eagle1Section,
    Eagle1Train,
    Eagle3Section,
    Eagle3Train,
    MuonSection,
    TargetConfig,
)
from aerie.data.batches import Batch
from aerie.infer.decode.drafters import BlockDrafter, EagleDrafter
from aerie.infer.decode.engine import PHASES, SpeculativeDecoder
from aerie.infer.decode.methods import drafting
from aerie.infer.measure.generate import cycle_work
from aerie.model.checkpoint import new_head
from aerie.model.heads import DRAFT_MODELS
from aerie.model.heads.eagle import DraftVocabulary
from aerie.model.storage import first_line
from aerie.model.target import Target, default_taps
from aerie.train import costs, processes
from aerie.train.optimizers import build_optimizers
from aerie.train.workload import Load

Row = dict[str, Any]


@dataclass(frozen=True)
class Size:
    name: str
    target: dict[str, int]
    draft_vocab: int
    rows: int  # of a batch
    length: int  # tokens of a row
    steps: int  # timed, after half as many untimed
    new_tokens: int


LLAMA_1B = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "vocab_size": 32_000,
    "num_hidden_layers": 16,
}
LLAMA_8B = {
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "vocab_size": 128_256,
    "num_hidden_layers": 32,
}
TINY = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 320, "num_hidden_layers": 7}
HEADS = {"num_attention_heads": 32, "num_key_value_heads": 8}
SIZES = [
    Size(
        "D 2048, I 8192, V 32k",
        LLAMA_1B | HEADS,
        32_000,
        rows=4,
        length=2048,
        steps=10,
        new_tokens=64,
    ),
    Size(
        "D 4096, I 14336, V 128k",
        LLAMA_8B | HEADS,
        32_000,
        rows=2,
        length=2048,
        steps=10,
        new_tokens=64,
    ),
]
SMALL = Size(
    "D 64, I 128, V 320",
    {**TINY, "num_attention_heads": 4, "num_key_value_heads": 2},
    100,
    2,
    32,
    2,
    8,
)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.gpu", description=__doc__.split("\n", 1)[0]
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small sizes, and no tests first")
    parser.add_argument(
        "--out", type=Path, default=Path("runs/gpu"), help="where gpu.json and gpu.md go"
    )
    asked = parser.parse_args()
    if asked.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    elif not torch.cuda.is_available():
        print("error: --device cuda: torch sees no GPU; try --device cpu --tiny", file=sys.stderr)
        return 2
    code = 0
    if not asked.tiny:
        # In its own process, so that its memory is free afterwards; exit code 5: no test has the mark.
        tests = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider"]
        code = subprocess.run(tests, check=False).returncode
    rows, text, code = list[Row](), "", code if code != 5 else 0
    accelerator = processes.build_accelerator(Eagle1Train(), asked.out)
    name = (
        torch.cuda.get_device_name()
        if asked.device == "cuda"
        else f"a CPU, {torch.get_num_threads()} threads"
    )
    facts = {
        "hardware": name,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "tests": code,
        "rows": rows,
    }
    asked.out.mkdir(parents=True, exist_ok=True)
    for size in [SMALL] if asked.tiny else SIZES:
        found = measured(size, accelerator)
        while True:
            try:
                rows.append(next(found))
            except StopIteration:
                break
            except RuntimeError as error:  # also out of memory: earlier rows are kept
                rows.append(
                    {
                        "size": size.name,
                        "what": f"stopped: {first_line(error)}",
                        "tokens_per_s": 0,
                        "ms": 0,
                    }
                )
                code = code or 1
            (asked.out / "gpu.json").write_text(json.dumps(facts, indent=1) + "\n")
            (asked.out / "gpu.md").write_text(text := table(facts))
    print(text, end="")
    return code


def measured(size: Size, accelerator: Accelerator) -> Iterator[Row]:
    device = accelerator.device
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    config = LlamaConfig(
        **size.target, max_position_embeddings=4096, bos_token_id=None, eos_token_id=None
    )
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    target = Target(model, TargetConfig(path=size.name))
    taps = default_taps(target.num_blocks) or ()
    ids = torch.randint(size.target["vocab_size"], (size.rows, size.length), device=device)
    turn_ids = torch.ones(size.rows, size.length, dtype=torch.long)
    turn_ids[:, : size.length // 4] = 0  # the prompt
    load = Load.of_rows(((row, turn) for row, turn in zip(ids.cpu(), turn_ids, strict=True)), 3)
    heads: dict[str, Any] = {}

    def row(
        what: str, work: Callable[[], Any], operations: float, tokens: int, plan: Any = None
    ) -> Row:
        seconds, peak = timed(work, size.steps, device)
        mfu = operations / seconds / costs.PEAK
        found = {
            "size": size.name,
            "what": what,
            "tokens_per_s": tokens / seconds,
            "ms": 1000 * seconds,
            "mfu": mfu,
        }
        return (
            found
            | {"peak_gib": peak / 2**30}
            | ({} if plan is None else {"planned_gib": plan / 2**30})
        )

    tokens = size.rows * size.length
    head = new_head(Eagle1Section(), config, target.vocab, 0)
    objective = DRAFT_MODELS["eagle1"].objective(head, target.vocab, Eagle1Train())
    forward = costs.operations(objective, load, model)["target"]
    yield row("features with taps", lambda: target.features(ids, taps), forward, tokens)
    states = target.features(ids, taps)
    batch = Batch(
        ids.cpu(), turn_ids, torch.full((size.rows,), size.length), tuple(range(size.rows))
    ).to(device)
    assert states.taps is not None  # clones: autograd cannot save inference tensors
    batch = replace(batch, features=states.last_hidden.clone(), taps=states.taps.clone())
    vocabulary = DraftVocabulary.of_ids(torch.arange(size.draft_vocab), size.target["vocab_size"])
    recipe = Eagle3Section(fc_norm=True, norm_output=True, lm_head="frozen", fc_init="highest_tap")
    settings: Any = Eagle3Train(
        unroll_steps=3, optimizer=MuonSection(matrix_rate=0.03)
    )  # as in configs/eagle3
    sections: dict[str, Any] = {
        "eagle1": (Eagle1Section(), Eagle1Train()),
        "eagle3": (recipe, settings),
    }
    sections["block"] = (
        BlockSection(mask_token_id=0),
        BlockTrain(anchors=size.length // 8, batch_size=size.rows),
    )
    with suppress(UserError):  # no such row without a C++ compiler
        processes.check_compiler()
        sections["compiled eagle3"] = (recipe, replace(settings, compile=True))
    for name, (section, settings) in sections.items():
        kind = section.kind
        head = new_head(
            section,
            config,
            target.vocab,
            0,
            size.name,
            taps,
            vocabulary if kind == "eagle3" else None,
        )
        objective = DRAFT_MODELS[kind].objective(head.float(), target.vocab, settings)
        if getattr(settings, "compile", False):
            for layer in head.blocks:
                layer.compile_parts()
        module, *optimizers = accelerator.prepare(objective, *build_optimizers(objective, settings))
        work, parts = (
            costs.operations(objective, load),
            costs.memory(objective, tokens, dtype.itemsize, model),
        )
        planned = sum(parts.values()) - parts["copy that is measured"]
        take = step(accelerator, module, optimizers, objective.prepare(batch, 0))
        yield row(f"{name} training", take, sum(work.values()), tokens, planned)
        heads[kind] = objective.head.to(dtype).eval().requires_grad_(False)
        accelerator.free_memory()
        del module, optimizers, objective, take
    cycles: tuple[Any, ...] = ("eager", "captured", "compiled")
    for cycle in cycles if device.type == "cuda" else ("eager", "compiled"):
        target.recipe = replace(target.recipe, cycle=cycle)
        kinds = (
            ("vanilla", "eagle3") if cycle == "compiled" else ("vanilla", *heads)
        )  # a minute each
        yield from (decoded(size, target, kind, heads.get(kind), ids[:1, :128]) for kind in kinds)


def step(
    accelerator: Accelerator, module: Any, optimizers: list[Any], batch: Batch
) -> Callable[[], None]:
    """A training step as in the loop, without reading its batch."""
    objective = accelerator.unwrap_model(module)
    scales = {name: 1.0 / float(count) for name, count in objective.counts(batch).items()}

    def take() -> None:
        accelerator.backward(module(batch).total(objective.weights, scales))
        accelerator.clip_grad_norm_(module.parameters(), 0.5)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    return take


def decoded(size: Size, target: Target, kind: str, head: Any, prompt: torch.Tensor) -> Row:
    tree = (
        DynamicConfig(levels=3, k=2, nodes=6)
        if size is SMALL
        else DynamicConfig(levels=6, k=10, nodes=60)
    )
    target.decodes |= {"tree", "chain"}  # skip the check: weights are random
    drafter = BlockDrafter if kind == "block" else EagleDrafter
    decoder = SpeculativeDecoder(target, head and drafting(drafter(head, target), tree))
    asked: Row = {
        "max_new_tokens": size.new_tokens,
        "do_sample": False,
        "eos_token_id": [],
        "timed": True,
    }
    decoder.generate(prompt, **asked)
    counted = decoder.generate(prompt, **asked).statistics
    cycles, phases = (
        max(counted.target_forwards, 1),
        [name for name in PHASES if name not in ("prefill", "wall")],
    )
    split = {name: counted.ms[name] / cycles for name in phases}
    method = {"eagle1": "eagle2", "block": "block-tree"}.get(
        kind, kind
    ) + f", {target.recipe.cycle}"
    kernels, _, share, _ = cycle_work(decoder, prompt, counted, {"do_sample": False})
    return {"size": size.name, "what": f"decode {method}", "tokens_per_s": counted.tokens_per_s, "tau": counted.tau,
            "ms": sum(split.values()), "cycle_ms": split, "kernels": kernels, "bandwidth": share}  # fmt: skip


def timed(work: Callable[[], Any], count: int, device: torch.device) -> tuple[float, float]:
    """(seconds of a call after warm-up, peak of allocated bytes; on a CPU, of the process)."""
    is_cuda = device.type == "cuda"
    gc.collect()
    for number in range(count // 2 + 1 + count):
        if number == count // 2 + 1:
            if is_cuda:
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
            started = time.perf_counter()
        work()
    if is_cuda:
        torch.cuda.synchronize()
    seconds = (time.perf_counter() - started) / count
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return seconds, torch.cuda.max_memory_allocated() if is_cuda else own


def table(facts: Row) -> str:
    lines = [
        f"{facts['hardware']}, torch {facts['torch']}, CUDA {facts['cuda']}; random weights",
        "",
    ]
    names = (
        "size, what, tokens/s, ms, MFU, peak GiB (planned), kernels, of a copy's bandwidth".split(
            ", "
        )
    )
    names.append("draft, verify, commit, other ms")
    lines += [f"| {' | '.join(names)} |", "|---" * len(names) + "|"]
    for row in facts["rows"]:
        mfu = f"{row['mfu']:.1%}" if "mfu" in row else ""
        memory = f"{row['peak_gib']:.1f}" if "peak_gib" in row else ""
        memory += f" ({row['planned_gib']:.1f})" if "planned_gib" in row else ""
        split = ", ".join(f"{ms:.2f}" for ms in row.get("cycle_ms", {}).values())
        cycle = [f"{row['kernels']:,.0f}", f"{row['bandwidth']:.0%}"] if split else ["", ""]
        speed = f"{row['tokens_per_s']:,.0f}", f"{row['ms']:.2f}"
        cells = [row["size"], row["what"], *speed, mfu, memory, *cycle, split]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
