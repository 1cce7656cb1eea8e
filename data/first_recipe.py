"""The recipe that `aerie init` writes for a target, its data and this machine, with the reasons.

Each function settles one part: the sizes of target and data, the head, then each section.
"""

import os
import sys
from dataclasses import replace
from itertools import chain
from math import ceil, inf
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml

from aerie.configs.errors import UserError, warn
from aerie.configs.read import validate
from aerie.configs.schema.data import DataConfig
from aerie.configs.schema.heads import TargetConfig
from aerie.configs.schema.recipe import Recipe
from aerie.data.feature_cache import Storage, StorageForm
from aerie.data.inputs import is_here
from aerie.data.progress import format_bytes, free_bytes
from aerie.data.rendering import CLOCK, names_read
from aerie.data.rows import read_rows
from aerie.data.served_recipe import Servers, measuring_prompts, start_lines, with_servers
from aerie.data.tokens import tokenize_for_target
from aerie.model.heads import HEADS
from aerie.model.heads.eagle import DEFAULT_SIZE
from aerie.model.target_files import (
    context_of,
    default_taps,
    load_config,
    load_tokenizer,
    only_trains,
    weights_size,
)

LONGEST = 4096  # the largest max_length that init writes, in tokens (SpecForge's)
GPU_SPEED = 400e12  # operations a second (assumed; docs/scale.md)
CORE_SPEED = 15e9
# of each kind that init chooses from
LAYOUT_FOR_VLLM = {
    name: kind.servers["vLLM"] for name, kind in HEADS.items() if kind.init_blocks < inf
}
# Folder names that say nothing: a run is called after their parent.
EMPTY_NAMES = ("target", "model", "merged", "final", "hf", "output")
MEMORY_SHARE = 0.8  # of the memory, which the target's weights may take
BENCH_PROMPTS = 80  # for each of calibrate and bench
FEW_PROMPTS = 20  # the same without a GPU
COMMENTS: dict[str, str] = {  # above sections of a recipe with servers
    "distill": "servers answer the data's questions; the data's own answers are not learnt",
    "last_stage": "only the servers can decode the target, so the run ends with the trained head "
    "(docs/served.md tells how much of its drafts vLLM accepts)",
    "calibrate": "on questions of the data that aerie distill leaves out",
    "bench": "on other such questions",
}
# AdamW's published rates are for this width; a narrower head takes larger ones. Muon's rates suit
# every width.
PUBLISHED_WIDTH = 4096

Requested = dict[str, Any]  # sections of the recipe, as the command line gives them


class Machine(NamedTuple):
    gpus: int
    cores: int
    memory: int  # bytes of one GPU, or of the host if there is no GPU
    speed: float  # operations a second, of all GPUs or cores together


class TargetSizes(NamedTuple):
    text_config: Any
    params: int
    dtype: torch.dtype
    context: int  # tokens
    is_decoded_here: bool  # whether this machine can decode it, by its size and layers


class Corpus(NamedTuple):
    num_rows: int  # 0: a data set on the Hub, which is not counted
    num_train: int  # of num_rows: not held out
    held_out: float  # share
    max_length: int  # tokens
    longest: int  # tokens that 99 % of the rows do not exceed
    mean_length: float  # tokens, once rows are cut

    @property
    def num_tokens(self) -> float:
        return self.num_rows * self.mean_length


class HeadChoice(NamedTuple):
    section: dict[str, Any]
    taps: tuple[int, ...]  # () for kinds that read the last state alone
    params: int  # that are trained
    learning_rate: float
    train: dict[str, Any]  # the rest of the section `train`


class Part(NamedTuple):
    """A section and the comment above it."""

    values: dict[str, Any]
    comment: str


def recipe_files(
    requested: Requested, out: Path, servers: Servers | None = None
) -> dict[Path, str]:
    """The texts that `aerie init` writes: the recipe and, with servers, questions to measure with.

    requested: holds at least target.path and data.conversations. servers: of the target.
    """
    # (1) what is there
    machine = this_machine()
    target_config: TargetConfig = validate(requested["target"], TargetConfig, "--target", {})
    target = target_sizes(target_config, machine, as_stored=servers is not None)
    measure = measure_corpus if servers is None else expected_corpus
    corpus = measure(target_config, requested["data"], target.context)

    # (2) the head, and the name of the run
    kind, reason = choose_kind(requested, target)
    run = requested.get("run") or f"runs/{run_name(target_config.path)}-{kind}"
    data = requested["data"]
    if servers is not None:
        requested = with_servers(requested, servers, run, target.context)
    # A wrong key is refused here, before its value decides anything.
    validate(
        {**requested, "run": run, "head": {"kind": kind} | requested["head"]}, Recipe, "--out", {}
    )
    head = choose_head(kind, requested, target, corpus)
    measured = {} if machine.gpus else small_measurements(kind)
    questions = dict[Path, str]()
    if servers is not None and not target.is_decoded_here:
        measured = {}
        requested = {"last_stage": "train", **requested}
    elif servers is not None:
        most = BENCH_PROMPTS if machine.gpus else FEW_PROMPTS
        prompts, questions = measuring_prompts(data, out, most, corpus.max_length)
        requested = with_prompts(requested, measured, prompts)
        sections = [requested[name] or {} for name in prompts]
        paths = {section.get("prompts", {}).get("path") for section in sections}
        questions = {path: text for path, text in questions.items() if str(path) in paths}

    # (3) the sections
    features = features_part(requested, run, head, target, corpus, machine)
    parts = {
        "target": target_part(target, machine),
        "data": data_part(corpus, target_config),
        "features": features,
        "head": Part(head.section, f"{reason}; {servers_of(kind)}"),
        "train": train_part(requested, features.values, head, target, corpus, machine),
        **measured,
    }
    values = with_parts({**requested, "run": run}, parts)
    recipe = validate(values, Recipe, "--out", {})
    comments = {name: part.comment for name, part in parts.items()}
    starts = list[str]()
    if servers is not None:
        starts = start_lines(recipe, has_gpu=machine.gpus > 0)
        comments = {name: COMMENTS[name] for name in COMMENTS if name in values} | comments
    return {out: as_text(values, comments, machine, starts), **questions}


def with_parts(requested: Requested, parts: dict[str, Part]) -> Requested:
    """The sections with the parts' values; what was requested comes first, and wins."""
    values = dict(requested)
    for name, part in parts.items():
        section = requested.get(name, {})
        if section is not None:  # null: it is left out
            values[name] = section | part.values | section
    return values


# --- what is there ------------------------------------------------------------------------------


def this_machine() -> Machine:
    gpus = torch.cuda.device_count()
    cores = os.cpu_count() or 1
    if gpus:
        memory = torch.cuda.get_device_properties(0).total_memory
        return Machine(gpus, cores, memory, gpus * GPU_SPEED)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Machine(gpus, cores, memory, cores * CORE_SPEED)


def target_sizes(config: TargetConfig, machine: Machine, as_stored: bool) -> TargetSizes:
    """The target's sizes; as_stored: in the dtype of its files, which servers use, too."""
    hf_config = load_config(config)
    stored = getattr(hf_config, "dtype", None) or torch.float32
    params = weights_size(config) // stored.itemsize
    is_large = 4 * params > machine.memory / 2  # in float32
    dtype = torch.bfloat16 if machine.gpus or is_large else torch.float32
    if as_stored:
        dtype = stored
    text_config = hf_config.get_text_config()
    fits = params * dtype.itemsize <= MEMORY_SHARE * machine.memory * max(machine.gpus, 1)
    return TargetSizes(
        text_config,
        params,
        dtype,
        context_of(text_config) or LONGEST,
        is_decoded_here=fits and only_trains(hf_config) is None,
    )


def measure_corpus(target: TargetConfig, section: dict[str, Any], context: int) -> Corpus:
    """The sizes of the rows, estimated from a sample that is tokenised."""
    data: DataConfig = validate(section, DataConfig, "--data", {})
    if not all(map(is_here, data.conversations)):
        max_length = section.get("max_length") or min(LONGEST, context)
        return Corpus(0, 0, data.held_out, max_length, LONGEST, min(LONGEST, max_length))
    num_read = sum(1 for _ in chain.from_iterable(map(read_rows, data.conversations)))
    if "held_out" not in section and 0 < num_read < 800:
        data = replace(data, held_out=min(0.2, round(40 / num_read, 2)))  # enough to measure with
    sample, _, tally = tokenize_for_target(target, replace(data, max_length=2**20, limit=1000))
    print(tally.table(), file=sys.stderr)
    if len(sample.held_out) < 2:
        warn(
            f"--data: {num_read} rows leave too few to measure with; "
            "name questions in bench.prompts.path"
        )
    lengths = sorted(len(row.input_ids) for row in (*sample.train, *sample.held_out))
    num_train = round(num_read * len(sample.train) / tally.rows)
    num_train = min(num_train, data.limit or num_train)
    longest = lengths[int(0.99 * len(lengths))]
    max_length = section.get("max_length") or min(LONGEST, context, 64 * ceil(longest / 64))
    return Corpus(
        num_rows=round(num_train * len(lengths) / len(sample.train)),
        num_train=num_train,
        held_out=data.held_out,
        max_length=max_length,
        longest=longest,
        mean_length=sum(min(length, max_length) for length in lengths) / len(lengths),
    )


def expected_corpus(target: TargetConfig, section: dict[str, Any], context: int) -> Corpus:
    """The sizes of the rows that servers will answer, assumed to be about those of the data."""
    # A server of states generates a token after the row.
    max_length = section.get("max_length") or min(LONGEST, context - 1)
    section = {**section, "max_length": max_length}
    try:
        return measure_corpus(target, section, context)
    except UserError as error:
        warn(f"{error}; the recipe assumes how long the servers' answers will be")
    num_rows = sum(1 for _ in chain.from_iterable(map(read_rows, section["conversations"])))
    data: DataConfig = validate(section, DataConfig, "--data", {})
    num_train = min(round(num_rows * (1 - data.held_out)), data.limit or num_rows)
    return Corpus(num_rows, num_train, data.held_out, max_length, max_length, max_length / 2)


def run_name(target_path: str) -> str:
    parent, name = Path(target_path).absolute().parts[-2:]
    return (parent if name in EMPTY_NAMES else name).lower()


# --- the head -----------------------------------------------------------------------------------


def choose_kind(requested: Requested, target: TargetSizes) -> tuple[str, str]:
    """A kind of head, and why."""
    if kind := requested["head"].get("kind"):
        return kind, "as requested"
    blocks = target.text_config.num_hidden_layers
    kinds = [name for name, record in HEADS.items() if record.init_blocks <= blocks]
    return kinds[-1], "eagle3 reads states of three blocks, and needs a target of seven or more"


def servers_of(kind: str) -> str:
    if kind not in LAYOUT_FOR_VLLM:
        return "no server loads it; aerie decodes with it"
    return f"vLLM (aerie convert --to {LAYOUT_FOR_VLLM[kind]}) and SGLang (--to sglang) load it"


def choose_head(kind: str, requested: Requested, target: TargetSizes, corpus: Corpus) -> HeadChoice:
    text = target.text_config
    width = text.hidden_size
    inner_width = getattr(text, "intermediate_size", None) or 4 * width
    layer = width * (5 * width + 3 * inner_width)  # parameters of a decoder layer
    if kind == "eagle3":
        return _choose_eagle3(layer, requested, text, corpus)
    params = layer if kind in LAYOUT_FOR_VLLM else 4 * width * (width + text.vocab_size)
    # EAGLE's epochs, batch size and learning rate.
    rate = 5e-5 * PUBLISHED_WIDTH / width
    return HeadChoice({"kind": kind}, (), params, rate, {"epochs": 20, "batch_size": 4})


def _choose_eagle3(layer: int, requested: Requested, text: Any, corpus: Corpus) -> HeadChoice:
    # SpecForge's settings; for a new head, those that docs/studies.md found.
    section: dict[str, Any] = {"kind": "eagle3"}
    blocks = text.num_hidden_layers
    width = text.hidden_size
    taps = default_taps(blocks) or tuple(range(max(blocks - 3, 0), blocks))
    rate = 1e-4 * PUBLISHED_WIDTH / width
    train: dict[str, Any] = {
        "epochs": 10,
        "batch_size": max(1, min(16, int(LONGEST / corpus.mean_length))),
        "packing": True,
        "unroll_steps": 3,
    }
    if "init_from" not in requested["head"]:  # published heads have the usual taps
        taps = (*taps[:2], blocks - 1)
        section |= {
            "fc_norm": True,
            "norm_output": True,
            "lm_head": "frozen",
            "fc_init": "highest_tap",
        }
        if hasattr(text, "rms_norm_eps"):
            section["norm_init"] = "target"
        if requested.get("train", {}).get("optimizer", {}).get("kind", "muon") == "muon":
            rate = 6e-3
            train["optimizer"] = {"kind": "muon", "matrix_rate": 0.03}
            train["scale_rates"] = {"steps": 600}
    params = layer + width * (5 * width + min(DEFAULT_SIZE, text.vocab_size))
    return HeadChoice(section, taps, params, rate, train)


# --- the sections -------------------------------------------------------------------------------


def target_part(target: TargetSizes, machine: Machine) -> Part:
    text = target.text_config
    values = {"dtype": str(target.dtype).removeprefix("torch.")}
    num_bytes = target.params * target.dtype.itemsize
    if machine.gpus > 1 and num_bytes > MEMORY_SHARE * machine.memory:
        values["device_map"] = "auto"
    return Part(
        values,
        f"{text.num_hidden_layers} blocks of width {text.hidden_size:,}, "
        f"about {target.params:,} parameters",
    )


def data_part(corpus: Corpus, target: TargetConfig) -> Part:
    values = {"max_length": corpus.max_length, "held_out": corpus.held_out}
    counted = (
        f"{corpus.num_rows:,} rows, about {corpus.num_tokens:,.0f} tokens; "
        f"99 % of the rows have at most {corpus.longest:,}"
    )
    comment = counted if corpus.num_rows else "on the Hub: not counted"
    names = names_read(load_tokenizer(target).chat_template)
    if names.arguments:
        listed = ", ".join(sorted(names.arguments))
        comment += f"; the chat template reads {listed} (data.template_arguments)"
    if CLOCK in names.all:
        comment += "; the chat template writes the date (data.date)"
    return Part(values, comment)


def features_part(
    requested: Requested,
    run: str,
    head: HeadChoice,
    target: TargetSizes,
    corpus: Corpus,
    machine: Machine,
) -> Part:
    """Caches the states if they take less than half of the free disk, as int8 if only int8 does."""
    free = free_bytes(Path(run))
    are_served = "server" in requested.get("features", {})
    values: dict[str, Any] = {"mode": "online"}
    comment = "takes no disk: the target runs in the training step"
    if are_served:
        comment = "takes no disk: the servers run the target while the head is trained"
    # In rising quality; the last form that fits is taken.
    forms: tuple[StorageForm | None, ...] = ("int8", None)
    for form in forms:
        needed = corpus.num_tokens * Storage(target.dtype, form).token_bytes(
            target.text_config.hidden_size, 1 + len(head.taps)
        )
        if 0 < needed < free / 2 and requested.get("features", {}).get("mode") != "online":
            values = {"mode": "cached"} | ({"storage": form} if form else {})
            comment = f"takes about {format_bytes(needed)} of {format_bytes(free)} free disk"
    if head.taps:
        values["after_blocks"] = list(head.taps)
    if are_served:
        return Part(values, comment)
    seconds = 2 * target.params * corpus.num_tokens / machine.speed
    return Part(values, f"{comment}; one pass of the target: {_duration(seconds, corpus)}")


def train_part(
    requested: Requested,
    features: dict[str, Any],
    head: HeadChoice,
    target: TargetSizes,
    corpus: Corpus,
    machine: Machine,
) -> Part:
    values = head.train | requested.get("train", {})
    rows_per_step = values["batch_size"] * values.get("accumulation", 1) * max(machine.gpus, 1)
    epoch_steps = ceil(corpus.num_train / rows_per_step)
    steps = min(values["epochs"] * epoch_steps, values.get("max_steps") or inf)
    values["learning_rate"] = float(f"{head.learning_rate:.1e}")
    values["warmup_steps"] = min(2000, steps // 20) or 2000

    # Operations per token: EAGLE-3 unrolls its head three times, others call the target's LM head.
    lm_head = target.text_config.vocab_size * target.text_config.hidden_size
    operations = 6 * (3 * head.params if head.taps else head.params + lm_head)
    memory = 16 * head.params + 8 * lm_head
    are_served = "server" in requested.get("features", {})
    if features["mode"] == "online" and not are_served:
        operations += 2 * target.params
        memory += target.params * target.dtype.itemsize
    epochs = steps / max(epoch_steps, 1)
    seconds = epochs * operations * corpus.num_train * corpus.mean_length / machine.speed

    if machine.gpus and seconds:
        # Evaluate and save every ten minutes, and at least four times, at round steps.
        every = int(float(f"{max(steps * min(600 / seconds, 0.25), 1):.1g}"))
        values = {"eval_every": every, "save_every": every} | values
    return Part(
        values,
        f"{steps:,} steps, {_duration(seconds, corpus)}; "
        f"{format_bytes(memory)} plus the batch, of {format_bytes(machine.memory)}",
    )


def small_measurements(kind: str) -> dict[str, Part]:
    """Sections that keep measuring short without a GPU."""
    prompts = {"prompts": {"num_prompts": FEW_PROMPTS, "max_new_tokens": 128}}
    parts = {
        "calibrate": Part(
            prompts, "fewer and shorter answers than on a GPU, to questions that are not learnt"
        ),
        "bench": Part(prompts, "the same for other such questions"),
    }
    if kind in LAYOUT_FOR_VLLM:
        parts["tree"] = Part(
            {"levels": 6, "k": 2, "nodes": 12},
            "a CPU pays for every node; aerie tune finds the best",
        )
    return parts


def with_prompts(
    requested: Requested, parts: dict[str, Part], prompts: dict[str, dict[str, Any]]
) -> Requested:
    """The requested sections; they measure on these prompts unless they name others."""
    requested = dict(requested)
    for name, source in prompts.items():
        section = requested.get(name, {})
        if section is None:  # null: the recipe leaves this stage out
            continue
        named = section.get("prompts") or {}
        if not named.keys() & {"path", "tasks"}:
            named = source | named
        usual = parts[name].values["prompts"] if name in parts else {}
        requested[name] = {**section, "prompts": usual | named}
    return requested


def _duration(seconds: float, corpus: Corpus) -> str:
    if seconds > 3600:
        return f"{seconds / 3600:,.1f} h"
    return f"{ceil(seconds / 60)} min" if corpus.num_rows else "? h"


def as_text(
    values: dict[str, Any], comments: dict[str, str], machine: Machine, starts: list[str]
) -> str:
    """The recipe as YAML, with a comment and a line for each section; those with a comment first.

    starts: lines on how the servers are started.
    """
    text = (
        f"# Written by aerie init for {machine.cores} cores and {machine.gpus} GPUs. "
        "Hours, sizes and memory are estimates (docs/scale.md).\n"
    )
    text += "".join(f"# {line}\n" for line in starts)
    for name in dict.fromkeys(["run", *comments, *values]):
        if name in comments:
            text += f"# {comments[name]}\n"
        flow = yaml.safe_dump(values[name], default_flow_style=True, sort_keys=False, width=inf)
        text += f"{name}: {flow.splitlines()[0]}\n"  # a bare value ends with a line "..."
    return text
