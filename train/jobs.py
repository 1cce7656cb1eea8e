"""What a recipe trains: rows, a module with its objective, and how it is saved."""

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate.tracking import get_available_trackers

from aerie.configs.errors import UserError, rank, warn
from aerie.configs.read import as_dict
from aerie.configs.schema.recipe import Recipe
from aerie.data import tokens
from aerie.data.batches import Batch, BatchRow, Order, ShardPools, check_padding, with_states
from aerie.data.cache import FeatureCache, rows_digest
from aerie.data.conversations import Tally
from aerie.data.features import check_rows, within_context
from aerie.data.inputs import FEATURES_COMMAND
from aerie.model import target as targets
from aerie.model.checkpoint import new_head, position_warnings, save_head
from aerie.model.heads import DRAFT_MODELS, HEADS
from aerie.model.target import VocabWeights
from aerie.train import costs, lm
from aerie.train.objectives import Objective
from aerie.train.processes import world_size
from aerie.train.resume import needs_target, reads_cache, state_name
from aerie.train.workload import Load


@dataclass(frozen=True)
class Rows:
    train: Sequence[BatchRow]
    held_out: Sequence[BatchRow]
    lengths: Sequence[int]  # of the training rows, in tokens
    tokens: Callable[[], Iterable[tuple[Any, Any]]]  # (input_ids, turn_ids) of the training rows
    digest: str  # of the training rows' ids
    pools: ShardPools | None = None  # None: one pool, the whole cache


@dataclass(frozen=True)
class Job:
    kind: str
    objective: Objective
    rows: Rows
    output: Path
    state: Path
    metrics: Path
    save: Callable[..., None]  # (head with whole weights, directory, **facts)
    features: Callable[[Batch], Batch] | None = None  # adds the target's states; None: cached
    target: targets.Target | None = None  # if it is loaded whole
    trunk: Any = None  # in a plan: the target's model without weights, if training would load it
    overwrite: bool = False

    def order(self, world: int) -> tuple[Order, int]:
        """The rows of each optimiser step, and the number of steps."""
        config, rows = self.objective.settings, self.rows
        order = Order(
            rows.lengths, config.seed, config.batch_size, config.accumulation, world, rows.pools
        )
        steps = config.epochs * order.steps_per_epoch
        return order, steps if config.max_steps is None else min(steps, config.max_steps)


def build(recipe: Recipe, output: Path, overwrite: bool, is_plan: bool = False) -> Job:
    """The recipe's job. A plan loads no more of the target than its embedding and LM head."""
    section: Any = recipe.head
    paths = recipe.paths
    settings: Any = recipe.train
    # Accelerate silently leaves out trackers that are not installed.
    if missing := set(settings.trackers) - set(map(str, get_available_trackers())):
        raise UserError(
            f"train.trackers: {min(missing)} is not installed; run: pip install {min(missing)}"
        )
    if {
        "ACCELERATE_MIXED_PRECISION",
        "MASTER_ADDR",
    } <= os.environ.keys() and "WORLD_SIZE" not in os.environ:
        several = "with --config_file configs/accelerate/zero2.yaml, or with torchrun"
        warn(
            f"accelerate launch: asked for several processes, started one; on a CPU launch them {several}"
        )
    tokenizer = targets.load_tokenizer(recipe.target)
    end_ids = targets.target_end_ids(recipe.target, tokenizer)
    is_online = needs_target(recipe) and not reads_cache(recipe)
    # Cached features need only the embedding and the LM head: 2 GB instead of 140 for a 70B target.
    measures = bool(getattr(settings, "measure_prompts", False))
    whole = _whole_target(recipe, is_plan) if is_online or measures else None
    text_config: Any = None
    vocab: Any = None
    features: Any = None
    taps: tuple[int, ...] = ()
    if needs_target(recipe):
        text_config, vocab = (
            targets.load_vocab(recipe.target) if whole is None else (whole.config, whole.vocab)
        )
        taps = targets.taps_of(recipe, text_config.num_hidden_layers)
    rows = _build_rows(recipe, tokenizer, end_ids, text_config, vocab, taps)
    length = min(recipe.data.max_length, targets.context_of(text_config) or recipe.data.max_length)
    drafted = _num_drafted(recipe)
    if is_online and whole is not None:
        check_padding(whole)
        features = partial(
            with_states, whole, taps, getattr(torch, recipe.features.dtype or "", whole.dtype)
        )
    if section.kind not in HEADS:  # a draft LM
        head: Any = lm.new_causal_lm(
            section, tokenizer, settings.seed, None if vocab is None else len(vocab.embedding)
        )
        objective: Any = lm.LMObjective(head, vocab, settings)
        save: Any = partial(lm.save_causal_lm, tokenizer)
    else:
        vocabulary, facts, counted = None, dict[str, Any](), ""
        has_draft_vocabulary = HEADS[section.kind].has_draft_vocabulary
        num_tokens, path = len(vocab.embedding), recipe.target.path
        if has_draft_vocabulary and section.init_from is None:
            forced = tokens.forced_ids(tokenizer, end_ids, num_tokens)
            size = section.draft_vocab_size
            vocabulary, facts, counted = tokens.draft_vocabulary(
                rows.tokens(), num_tokens, size, forced
            )
        if section.init_from is None:
            section, vocab = _complete_section(
                recipe, tokenizer, end_ids, text_config, vocab, length + drafted
            )
        head = new_head(section, text_config, vocab, settings.seed, path, taps, vocabulary).float()
        # A warm start keeps its vocabulary, which must be able to end a turn.
        if has_draft_vocabulary and vocabulary is None:
            own = head.vocabulary
            own.check_ends(end_ids, f"head.init_from: {section.init_from}")
            _, facts, counted = tokens.draft_vocabulary(rows.tokens(), len(own.t2d), warm_start=own)
        objective = HEADS[section.kind].objective(head, vocab, settings)
        known: dict[str, Any] = {
            "target_path": path,
            "target": targets.fingerprint(recipe.target, text_config, vocab),
        }
        known |= {"draft_vocabulary": facts} if facts else {}
        save = partial(save_head, **known)
    positions = getattr(objective.config, "max_position_embeddings", None) or length + drafted
    if positions < length + drafted:
        needed = (
            f"data.max_length {length:,} + {drafted} drafted levels; set it to {length + drafted:,}"
        )
        raise UserError(f"head.max_position_embeddings: {positions:,} is less than {needed}")
    if rank() == 0 and section.kind in HEADS:
        for sentence in position_warnings(head.config, text_config, section.init_from or "head"):
            warn(sentence)
        print(counted and f"{counted}\n", end="", flush=True)
    state, metrics = paths.state(state_name(recipe)), paths.root / "metrics.jsonl"
    trunk = targets.skeleton(recipe.target) if is_plan and (is_online or measures) else None
    return Job(
        state_name(recipe),
        objective,
        rows,
        output,
        state,
        metrics,
        save,
        features,
        whole,
        trunk,
        overwrite,
    )


def _complete_section(
    recipe: Recipe,
    tokenizer: Any,
    end_ids: set[int],
    text: Any,
    vocab: VocabWeights,
    positions: int,
) -> tuple[Any, VocabWeights]:
    """A new head's section with what its target decides, and the weights from which it starts."""
    section: Any = recipe.head
    if getattr(section, "norm_init", None) == "target":
        vocab = replace(vocab, final_norm=targets.final_norm(recipe.target))
    if getattr(section, "mask_token_id", 0) is None:
        section = replace(
            section, mask_token_id=tokens.mask_token(tokenizer, end_ids, vocab.embedding)
        )
    if section.max_position_embeddings is None:
        section = replace(
            section, max_position_embeddings=max(targets.context_of(text) or 0, positions)
        )
    return section, vocab


def _whole_target(recipe: Recipe, is_plan: bool) -> targets.Target | None:
    if recipe.target.device_map is not None and world_size() > 1:
        raise UserError(
            f"target.device_map: {world_size()} processes cannot share a spread target; start one"
        )
    device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if torch.cuda.is_available() else "cpu"
    return None if is_plan else targets.Target.load(recipe.target, device)


def _num_drafted(recipe: Recipe) -> int:
    """Positions that a head needs after the last token."""
    positions_ahead = DRAFT_MODELS[recipe.head.kind].positions_ahead
    if positions_ahead is None or recipe.tree is None:
        return 0
    ahead = positions_ahead(recipe.head, recipe.train)
    return max(recipe.tree.levels, recipe.train.eval_depths, ahead)


def _build_rows(
    recipe: Recipe, tokenizer: Any, end_ids: set[int], text: Any, vocab: Any, taps: tuple[int, ...]
) -> Rows:
    if reads_cache(recipe):
        asked = {
            "data": as_dict(recipe.data),
            "after_blocks": list(taps),
            "storage": recipe.features.storage,
        }
        cache = FeatureCache.open(recipe.paths.features, asked)
        if other := targets.other_weights(cache.fingerprint["target"], recipe.target, text, vocab):
            raise UserError(
                f"{recipe.paths.features}: {other}; rebuild with: {FEATURES_COMMAND} --overwrite"
            )
        train, at_once = cache.split("train"), recipe.features.shuffle_shards
        pools = None if at_once is None else ShardPools(train.shards, at_once)
        return Rows(
            train,
            cache.split("held_out"),
            train.lengths,
            train.tokens,
            cache.fingerprint["rows"],
            pools,
        )
    config = within_context(recipe.data, text)
    data = tokens.tokenize(config, tokenizer, end_ids, Tally())
    if text is not None:
        check_rows([*data.train, *data.held_out], text, recipe.target.path)
    if rank() == 0:
        print(f"train: {tokens.statistics(data.train)}", flush=True)
    pairs = lambda: ((row.input_ids, row.turn_ids) for row in data.train)  # noqa: E731
    lengths = [len(row.input_ids) for row in data.train]
    return Rows(data.train, data.held_out, lengths, pairs, rows_digest(data.train))


def plan(recipe: Recipe, job: Job) -> str:
    config, rows, world = job.objective.settings, job.rows, world_size()
    order, steps = job.order(world)
    load = Load.of_rows(rows.tokens(), getattr(config, "unroll_steps", 1))
    runs, largest = (
        None if reads_cache(recipe) else job.trunk,
        config.batch_size * max(rows.lengths),
    )
    work = costs.operations(job.objective, load, runs)
    if muon := costs.optimizer_operations(job.objective):  # every process turns the same matrices
        work["Muon"] = muon * order.steps_per_epoch * world
    parts = costs.memory(job.objective, largest, 2, job.trunk)
    apart = parts.pop("target", 0) if recipe.target.device_map is not None else 0
    total, peak = sum(work.values()), sum(parts.values())
    unit, name = (2**30, "GiB") if peak > 2**30 else (2**20, "MiB")
    spread = f", beside {apart / unit:,.1f} {name} of the target over all GPUs" if apart else ""
    fits = " and ".join(gpu for gpu, size in costs.GPUS.items() if peak < 0.95 * size)
    cap = (
        ""
        if config.max_seconds is None
        else f", and at most {config.max_seconds:,g} s (train.max_seconds)"
    )
    if scaled := config.scale_rates:
        cap += f"; rates x {(scaled.steps / steps) ** scaled.power:.3g} (train.scale_rates)"
    return (
        f"data: {len(rows.lengths):,} rows, {sum(rows.lengths):,} tokens an epoch; {len(rows.held_out):,} held out\n"
        f"steps: {steps:,} of {config.batch_size} rows x {config.accumulation} x {world} processes: "
        f"{steps / order.steps_per_epoch:.2f} epochs{cap}\n"
        f"work: {total:.3g} operations an epoch ({_listed(work, total / 100, ' %')}): "
        f"{total / costs.PEAK / costs.MFU / 3600:,.2f} hours of an H100 or H200 ({costs.MFU:.0%} of its "
        f"{costs.PEAK / 1e12:,.0f} TFLOP/s, dense bf16)\n"
        f"memory: about {peak / unit:,.1f} {name} a process in bf16, without ZeRO ({_listed(parts, unit, '')})"
        f"{spread}, at {largest:,} tokens a batch; {f'fits {fits}' if fits else 'more than an H200 has'}\n"
        f"output: {job.output}"
    )


def _listed(parts: dict[str, Any], unit: float, suffix: str) -> str:
    return ", ".join(f"{name} {value / unit:,.3g}{suffix}" for name, value in parts.items())
