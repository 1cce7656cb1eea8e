"""Runs the GPU tests on one CUDA device, then times features, training and decoding at real sizes.

python -m tests.gpu [--out DIR]            # make gpu: 10 to 20 minutes; needs no CUDA toolkit
python -m tests.gpu --device cpu --tiny    # the same code in seconds

Weights are random and made in memory, so tau means nothing here, but a cycle's times do.
mfu: the share of the peak for dense bf16. bandwidth: a cycle's, as a share of a copy's.
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
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from accelerate import Accelerator
from transformers import AutoModelForCausalLM, LlamaConfig

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
from aerie.infer.decode.engine import SpeculativeDecoder
from aerie.infer.decode.proposers import tree_proposer
from aerie.infer.measure.bench import CYCLE_PHASES
from aerie.infer.measure.generate import copy_speed, cycle_work
from aerie.model.checkpoint import new_head
from aerie.model.heads import DRAFT_MODELS
from aerie.model.heads.eagle import DraftVocabulary
from aerie.model.target import Target
from aerie.model.target_files import default_taps
from aerie.train import costs, processes
from aerie.train.optimizers import build_optimizers
from aerie.train.workload import Load

Row = dict[str, Any]  # size, what (the timed work), tokens_per_s, ms, and other figures


@dataclass(frozen=True)
class Size:
    name: str
    target: dict[str, int]  # keys of a Llama's configuration
    draft_vocab: int
    rows: int  # in a batch
    length: int  # tokens in a row
    steps: int  # timed steps, after half as many untimed ones
    new_tokens: int
    tree: DynamicConfig = DynamicConfig(levels=6, k=10, nodes=60)


LLAMA_1B = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16}
LLAMA_8B = {"hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32}
TINY = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 7}
HEADS = {"num_attention_heads": 32, "num_key_value_heads": 8}
SIZES = [
    Size(
        "D 2048, I 8192, V 32k",
        LLAMA_1B | HEADS | {"vocab_size": 32_000},
        draft_vocab=32_000,
        rows=4,
        length=2048,
        steps=10,
        new_tokens=64,
    ),
    Size(
        "D 4096, I 14336, V 128k",
        LLAMA_8B | HEADS | {"vocab_size": 128_256},
        draft_vocab=32_000,
        rows=2,
        length=2048,
        steps=10,
        new_tokens=64,
    ),
]
SMALL = Size(
    "D 64, I 128, V 320",
    TINY | {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 320},
    draft_vocab=100,
    rows=2,
    length=32,
    steps=2,
    new_tokens=8,
    tree=DynamicConfig(levels=3, k=2, nodes=6),
)
RECIPE = Eagle3Section(fc_norm=True, norm_output=True, lm_head="frozen", fc_init="highest_tap")
MUON = MuonSection(matrix_rate=0.03)  # as in configs/eagle3


def main() -> int:
    summary = __doc__.split("\n", 1)[0]
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description=summary)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="use small sizes, run no tests")
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"), help="folder of gpu.json")
    arguments = parser.parse_args()
    hardware = f"a CPU, {torch.get_num_threads()} threads"
    if arguments.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    else:
        hardware = torch.cuda.get_device_name()  # fails without a GPU
    code = 0
    if not arguments.tiny:
        # In a process of their own, so that the tests' memory is free afterwards.
        tests = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider"]
        code = subprocess.run(tests, check=False).returncode % 5  # pytest's code 5: no test ran
    rows: list[Row] = []
    facts = {
        "hardware": hardware,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "tests": code,
        "rows": rows,
    }
    accelerator = processes.build_accelerator(Eagle1Train(), arguments.out)
    arguments.out.mkdir(parents=True, exist_ok=True)
    for size in [SMALL] if arguments.tiny else SIZES:
        for row in run_size(size, accelerator):
            rows.append(row)
            # Write after each row, as a later one may run out of memory.
            (arguments.out / "gpu.json").write_text(json.dumps(facts, indent=1) + "\n")
    print(pd.json_normalize(rows).round(3).to_string(na_rep=""))
    return code


def run_size(size: Size, accelerator: Accelerator) -> Iterator[Row]:
    """Times features, then the training of each head, then decoding with each head."""
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
    load = Load.of_rows(zip(ids.cpu(), turn_ids, strict=True), 3)

    def timed_row(what: str, work: Callable[[], Any], operations: float) -> Row:
        seconds, peak = timed(work, size.steps, device)
        return {
            "size": size.name,
            "what": what,
            "tokens_per_s": size.rows * size.length / seconds,
            "ms": 1000 * seconds,
            "mfu": operations / seconds / costs.PEAK,
            "peak_gib": peak / 2**30,
        }

    # features
    head = new_head(Eagle1Section(), config, target.vocab, 0)
    objective = DRAFT_MODELS["eagle1"].objective(head, target.vocab, Eagle1Train())
    forward = costs.operations(objective, load, model)["target"]
    yield timed_row("features with taps", lambda: target.features(ids, taps), forward)
    states = target.features(ids, taps)
    lengths = torch.full((size.rows,), size.length)
    batch = replace(
        Batch(ids.cpu(), turn_ids, lengths, tuple(range(size.rows))).to(device),
        # Clone them, because autograd cannot save inference tensors.
        features=states.last_hidden.clone(),
        taps=states.taps.clone(),
    )

    # training
    vocabulary = DraftVocabulary.of_ids(torch.arange(size.draft_vocab), size.target["vocab_size"])
    eagle3 = Eagle3Train(unroll_steps=3, optimizer=MUON)
    block = BlockTrain(anchors=size.length // 8, batch_size=size.rows)
    sections: dict[str, tuple[Any, Any]] = {
        "eagle1": (Eagle1Section(), Eagle1Train()),
        "eagle3": (RECIPE, eagle3),
        "block": (BlockSection(mask_token_id=0), block),
    }
    trained: dict[str, Any] = {}
    for name, (section, settings) in sections.items():
        draft_vocabulary = vocabulary if section.kind == "eagle3" else None
        head = new_head(section, config, target.vocab, 0, size.name, taps, draft_vocabulary)
        objective = DRAFT_MODELS[section.kind].objective(head.float(), target.vocab, settings)
        parts = costs.memory(objective, size.rows * size.length, dtype.itemsize, model)
        operations = sum(costs.operations(objective, load).values())
        step = training_step(accelerator, objective, settings, batch)
        row = timed_row(f"{name} training", step, operations)
        yield {**row, "planned_gib": (sum(parts.values()) - parts["copy that is measured"]) / 2**30}
        trained[section.kind] = objective.head.to(dtype).eval().requires_grad_(False)
        accelerator.free_memory()
        del objective, step

    # decoding
    cycles: dict[Any, tuple[str, ...]] = {"eager": ("vanilla", *trained)}
    if device.type == "cuda":
        cycles["captured"] = ("vanilla", *trained)
    cycles["compiled"] = ("vanilla", "eagle3")  # each takes a minute to compile
    for cycle, kinds in cycles.items():
        target.recipe = replace(target.recipe, cycle=cycle)
        for kind in kinds:
            yield run_decoding(size, target, kind, trained.get(kind), ids[:1, :128])


def training_step(
    accelerator: Accelerator, objective: Any, settings: Any, batch: Batch
) -> Callable[[], None]:
    """A training step like the loop's, without reading a batch."""
    module, *optimizers = accelerator.prepare(objective, *build_optimizers(objective, settings))
    batch = objective.prepare(batch, 0)
    scales = {name: 1.0 / float(count) for name, count in objective.counts(batch).items()}

    def take() -> None:
        accelerator.backward(module(batch).total(objective.weights, scales))
        accelerator.clip_grad_norm_(module.parameters(), 0.5)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    return take


def run_decoding(size: Size, target: Target, kind: str, head: Any, prompt: torch.Tensor) -> Row:
    """Decodes twice; returns the second answer's speed and a cycle's work."""
    target.decodes |= {"tree", "chain"}  # skips the check, because the weights are random
    drafter = BlockDrafter if kind == "block" else EagleDrafter
    decoder = SpeculativeDecoder(target, head and tree_proposer(drafter(head, target), size.tree))
    generate = partial(decoder.generate, prompt, max_new_tokens=size.new_tokens, do_sample=False)
    generate(eos_token_id=[])
    counted = generate(eos_token_id=[], timed=True).statistics
    split = {name: counted.ms[name] / counted.target_forwards for name in CYCLE_PHASES}
    method = {"eagle1": "eagle2", "block": "block-tree"}.get(kind, kind)
    kernels, read = cycle_work(decoder, prompt, counted.prompt_tokens, {"do_sample": False})
    bytes_per_s = 1000 * read / sum(split.values())
    return {
        "size": size.name,
        "what": f"decode {method}, {target.recipe.cycle}",
        "tokens_per_s": counted.tokens_per_s,
        "tau": counted.tau,
        "ms": sum(split.values()),
        "cycle_ms": split,
        "kernels": kernels,
        "bandwidth": bytes_per_s / copy_speed(target.device),
    }


def timed(work: Callable[[], Any], count: int, device: torch.device) -> tuple[float, float]:
    """(seconds of a call after warm-up, peak of allocated bytes). On a CPU the process's peak."""
    is_cuda = device.type == "cuda"
    gc.collect()
    for _ in range(count // 2 + 1):
        work()
    if is_cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    started = time.perf_counter()
    for _ in range(count):
        work()
    if is_cuda:
        torch.cuda.synchronize()
    seconds = (time.perf_counter() - started) / count
    process_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return seconds, torch.cuda.max_memory_allocated() if is_cuda else process_bytes


if __name__ == "__main__":
    sys.exit(main())
