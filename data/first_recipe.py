"""`aerie init`: a recipe that suits a target, its data and this machine, with the reasons as comments."""

import os
import shutil
import sys
from dataclasses import replace
from math import ceil, inf
from pathlib import Path
from typing import Any

import torch
import yaml

from aerie.configs.errors import warn
from aerie.configs.read import validate
from aerie.configs.schema.data import DataConfig
from aerie.configs.schema.heads import TargetConfig
from aerie.configs.schema.recipe import Recipe
from aerie.data.cache import CachePlan, Storage
from aerie.data.conversations import read_rows
from aerie.data.inputs import is_here
from aerie.data.progress import format_bytes
from aerie.data.tokens import tokenised
from aerie.model.heads import HEADS
from aerie.model.heads.eagle import DEFAULT_SIZE
from aerie.model.target import context_of, default_taps, load_config, weights_size

SAMPLE, MOST = 1000, 4096  # rows to measure; the longest max_length (SpecForge)
GPU_SPEED, CORE_SPEED = 400e12, 15e9  # operations a second (assumed; docs/scale.md)
# of the kinds that init chooses from
LAYOUT_FOR_VLLM = {
    name: kind.servers["vLLM"] for name, kind in HEADS.items() if kind.init_blocks < inf
}
COMMON = (
    "target",
    "model",
    "merged",
    "final",
    "hf",
    "output",
)  # folder names that say nothing: take the parent's
ONLY_AERIE = "no server loads it; aerie decodes with it"


def recipe_text(asked: dict[str, Any]) -> str:
    """A complete recipe from the asked sections, which need target.path and data.conversations."""
    target: TargetConfig = validate(asked["target"], TargetConfig, "--target", {})
    hf_config = load_config(target)
    text, gpus, cores = hf_config.get_text_config(), torch.cuda.device_count(), os.cpu_count() or 1
    blocks, width, vocab_size = text.num_hidden_layers, text.hidden_size, text.vocab_size
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    memory = torch.cuda.get_device_properties(0).total_memory if gpus else memory
    params = weights_size(target) // (getattr(hf_config, "dtype", None) or torch.float32).itemsize
    dtype = torch.bfloat16 if gpus or 4 * params > memory / 2 else torch.float32

    data: DataConfig = validate(asked["data"], DataConfig, "--data", {})
    data, rows, trained_rows, lengths = _measured(target, data, "held_out" not in asked["data"])
    longest, context = lengths[int(0.99 * len(lengths))], context_of(text) or MOST
    max_length = asked["data"].get("max_length") or min(MOST, context, 64 * ceil(longest / 64))
    mean = sum(min(length, max_length) for length in lengths) / len(lengths)
    counted = (
        f"{rows:,} rows, about {rows * mean:,.0f} tokens; 99 % of the rows have at most {longest:,}"
    )

    kind, why = asked["head"].get("kind"), "as asked"
    if kind is None:
        kind = [name for name, record in HEADS.items() if record.init_blocks <= blocks][-1]
        why = "eagle3 reads states of three blocks, and needs seven or more"
    parent, name = Path(target.path).absolute().parts[-2:]
    name = (
        parent if name in COMMON else f"{parent}-{name}" if name.startswith("checkpoint-") else name
    )
    run = asked.get("run") or f"runs/{name.lower()}-{kind}"
    validate({**asked, "run": run, "head": {"kind": kind} | asked["head"]}, Recipe, "--out", {})
    # AdamW's published rates are for a width of 4,096; a narrower head takes larger steps. Muon's suit every width.
    taps: tuple[int, ...] = ()
    train: dict[str, Any] = {"epochs": 20, "batch_size": 4}  # EAGLE's, with 5e-5
    layer = width * (5 * width + 3 * (getattr(text, "intermediate_size", None) or 4 * width))
    trained = layer if kind in LAYOUT_FOR_VLLM else 4 * width * (width + vocab_size)
    head: dict[str, Any] = {"kind": kind}
    rate = 5e-5 * 4096 / width
    if kind == "eagle3":  # SpecForge's
        taps, rate = (
            default_taps(blocks) or tuple(range(max(blocks - 3, 0), blocks)),
            1e-4 * 4096 / width,
        )
        train = {
            "epochs": 10,
            "batch_size": max(1, min(16, int(MOST / mean))),
            "packing": True,
            "unroll_steps": 3,
        }
        if "init_from" not in asked["head"]:  # for a new head, what docs/studies.md found
            taps = (*taps[:2], blocks - 1)
            head |= {
                "fc_norm": True,
                "norm_output": True,
                "lm_head": "frozen",
                "fc_init": "highest_tap",
            }
            head |= {"norm_init": "target"} if hasattr(text, "rms_norm_eps") else {}
            if asked.get("train", {}).get("optimizer", {}).get("kind", "muon") == "muon":
                rate, muon = 6e-3, {"kind": "muon", "matrix_rate": 0.03}
                train |= {"optimizer": muon, "scale_rates": {"steps": 600}}
        trained += width * (5 * width + min(DEFAULT_SIZE, vocab_size))
    train |= asked.get("train", {})
    epoch_steps = ceil(
        trained_rows / (train["batch_size"] * train.get("accumulation", 1) * max(gpus, 1))
    )
    steps = min(train["epochs"] * epoch_steps, train.get("max_steps") or inf)
    train |= {"learning_rate": float(f"{rate:.1e}"), "warmup_steps": min(2000, steps // 20) or 2000}

    free = shutil.disk_usage(
        next(place for place in Path(run).absolute().parents if place.exists())
    ).free
    features: dict[str, Any] = {"mode": "online"}
    place = "takes no disk: the target runs in the training step"
    for form in ("int8", None):  # the second is better, where it fits
        needed = (
            rows * mean * CachePlan(Path(), [], 0, width, taps, Storage(dtype, form), 0).token_bytes
        )
        if 0 < needed < free / 2 and asked.get("features", {}).get("mode") != "online":
            features = {"mode": "cached"} | ({"storage": form} if form else {})
            place = f"about {format_bytes(needed)} of the {format_bytes(free)} that are free"
    features |= {"after_blocks": list(taps)} if taps else {}
    is_online = features["mode"] == "online"
    # Operations a token: EAGLE-3 unrolls its head three times, others call the target's LM head.
    work = 6 * (3 * trained if taps else trained + vocab_size * width) + 2 * params * is_online
    speed = gpus * GPU_SPEED or cores * CORE_SPEED
    needed = 16 * trained + 8 * vocab_size * width + params * dtype.itemsize * is_online
    seconds = [
        2 * params * rows * mean / speed,
        steps / max(epoch_steps, 1) * work * trained_rows * mean / speed,
    ]
    if (
        gpus and seconds[1]
    ):  # evaluate and save every ten minutes, at least four times, at round steps
        every = int(float(f"{max(steps * min(600 / seconds[1], 0.25), 1):.1g}"))
        train = {"eval_every": every, "save_every": every} | train
    took = [
        f"{each / 3600:,.1f} h" if each > 3600 else f"{ceil(each / 60)} min" if rows else "? h"
        for each in seconds
    ]
    spread = {"device_map": "auto"} if gpus > 1 and params * dtype.itemsize > 0.8 * memory else {}
    few = {"prompts": {"num_prompts": 20, "max_new_tokens": 128}}
    model = f"{blocks} blocks of width {width:,}, about {params:,} parameters"
    served = (
        f"vLLM (aerie convert --to {LAYOUT_FOR_VLLM.get(kind)}) and SGLang (--to sglang) load it"
    )
    sections: dict[str, tuple[dict[str, Any], str]] = {
        "target": ({"dtype": str(dtype)[6:]} | spread, model),
        "data": (
            {"max_length": max_length, "held_out": data.held_out},
            counted if rows else "on the Hub: not counted",
        ),
        "features": (features, f"{place}; one pass of the target: {took[0]}"),
        "head": (head, f"{why}; {served if kind in LAYOUT_FOR_VLLM else ONLY_AERIE}"),
        "train": (
            train,
            f"{steps:,} steps, {took[1]}; {format_bytes(needed)} plus the batch, of {format_bytes(memory)}",
        ),
    }
    if not gpus:
        sections["calibrate"] = (
            few,
            "fewer and shorter answers than on a GPU, to questions of held-out rows",
        )
        sections["bench"] = few, "the same for other held-out rows"
    if not gpus and kind in LAYOUT_FOR_VLLM:
        sections["tree"] = (
            {"levels": 6, "k": 2, "nodes": 12},
            "a CPU pays for every node; aerie tune finds the best",
        )
    values = {
        name: asked.get(name, {}) | value | asked.get(name, {})
        for name, (value, _) in sections.items()
    }
    validate(values := {**asked, **values, "run": run}, Recipe, "--out", {})
    lines = [
        f"# By aerie init, for {cores} cores, {gpus} GPUs. Hours, sizes and memory are estimates (docs/scale.md)."
    ]
    for name in sorted(values, key=["run", *sections, *values].index):
        flow = yaml.safe_dump(
            values[name], default_flow_style=True, sort_keys=False, width=inf
        ).partition("\n")[0]
        lines += [*([f"# {sections[name][1]}"] if name in sections else []), f"{name}: {flow}"]
    return "\n".join(lines) + "\n"


def _measured(
    target: TargetConfig, data: DataConfig, is_free: bool
) -> tuple[DataConfig, int, int, list[int]]:
    """data (is_free: with held_out), numbers of all and of training rows (0: on the Hub), a sample's lengths."""
    if not all(is_here(name) for name in data.conversations):
        return data, 0, 0, [MOST]
    read = sum(1 for name in data.conversations for _ in read_rows(name))
    if is_free and 0 < read < 800:
        data = replace(data, held_out=min(0.2, round(40 / read, 2)))  # to measure with
    sample, _, tally = tokenised(target, replace(data, max_length=2**20, limit=SAMPLE))
    print(tally.table(), file=sys.stderr)
    if len(sample.held_out) < 2:
        warn(
            f"--data: {read} rows leave too few to measure with; name questions in bench.prompts.path"
        )
    first, trained = [*sample.train, *sample.held_out], round(read * len(sample.train) / tally.rows)
    trained = min(trained, data.limit or trained)
    return (
        data,
        round(trained * len(first) / len(sample.train)),
        trained,
        sorted(len(row.input_ids) for row in first),
    )
