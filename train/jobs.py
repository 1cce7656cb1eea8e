"""What a recipe trains: rows with the target's states, a module, its objective, and how it is saved."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from aerie.configs.errors import UserError, warn
from aerie.configs.read import as_dict
from aerie.configs.schema.recipe import Recipe, RunPaths
from aerie.configs.schema.target_and_head import MULTI_TOKEN, Eagle3Section
from aerie.data.batches import OnlineFeatures, Order, ShardPools, TokenisedRow
from aerie.data.cache import FeatureCache, rows_digest
from aerie.data.chat import target_end_ids
from aerie.data.conversations import Tally
from aerie.data.features import check_rows
from aerie.data.tokens import (
    CountedVocabulary,
    draft_vocabulary,
    forced_ids,
    given_vocabulary,
    statistics,
    text_fingerprint,
    tokenize,
)
from aerie.model.checkpoint import new_head, position_warnings, save_head
from aerie.model.target import Target, fingerprint, load_tokenizer, load_vocab, taps_of
from aerie.train.fingerprint import needs_target, reads_cache, state_name
from aerie.train.launch import device, rank, world_size
from aerie.train.loop import Job, total_steps
from aerie.train.objectives.base import Objective
from aerie.train.objectives.eagle import Eagle1Objective, Eagle3Objective
from aerie.train.objectives.lm import (
    CausalLMObjective,
    DraftLMObjective,
    OnPolicyFeatures,
    new_causal_lm,
    save_causal_lm,
)
from aerie.train.objectives.multi_token import MultiTokenObjective

OBJECTIVES: dict[str, type[Objective]] = {
    "eagle1": Eagle1Objective,
    "eagle3": Eagle3Objective,
    "medusa": MultiTokenObjective,
    "hydra": MultiTokenObjective,
    "draft_lm": DraftLMObjective,
}


@dataclass(frozen=True)
class Rows:
    """The rows of both splits, from a feature cache or as they were tokenised just now."""

    train: Sequence[TokenisedRow]
    held_out: Sequence[TokenisedRow]
    lengths: Sequence[int]  # of the training rows, in tokens
    tokens: Iterable[tuple[Any, Any]]  # (input_ids, turns) of the training rows
    origin: dict[str, Any]  # what the tokens were made from
    pools: ShardPools | None = None


def cached_rows(directory: Path, recipe: Recipe, text_config: Any, vocab: Any, taps: tuple[int, ...]) -> Rows:
    """Rows of the feature cache in directory; UserError when it was made of something else."""
    expected = {"target": fingerprint(text_config, vocab), "after_blocks": list(taps), "data": as_dict(recipe.data)}
    cache = FeatureCache.open(directory, {**expected, "storage": recipe.features.storage})
    train, at_once = cache.split("train"), recipe.features.shuffle_shards
    return Rows(
        train=train,
        held_out=cache.split("held_out"),
        lengths=train.lengths,
        tokens=train.tokens(),
        origin={name: cache.fingerprint.get(name) for name in ("rows", "tokenizer", "template")},
        pools=None if at_once is None else ShardPools(train.shards, at_once),
    )


def tokenised_rows(recipe: Recipe, tokenizer: Any, end_ids: set[int], text_config: Any) -> Rows:
    """The recipe's conversations as tokens; text_config is that of the target whose states they will get, or None."""
    speaks = rank() == 0
    rows = tokenize(recipe.data, tokenizer, end_ids, Tally(), speaks)
    if text_config is not None:
        check_rows([*rows.train, *rows.held_out], text_config, recipe.target.path)
    if speaks:
        print(f"train: {statistics(rows.train)}", flush=True)
    return Rows(
        train=rows.train,
        held_out=rows.held_out,
        lengths=[len(row.input_ids) for row in rows.train],
        tokens=((row.input_ids, row.turns) for row in rows.train),
        origin={"rows": rows_digest(rows.train), **text_fingerprint(tokenizer, recipe.data)},
    )


def build(recipe: Recipe, output: Path, overwrite: bool, is_plan: bool = False) -> Job:
    """The recipe's job. A plan loads no more of the target than its embedding and LM head."""
    settings: Any = recipe.train
    paths, name, tokenizer = RunPaths(Path(recipe.run)), state_name(recipe), load_tokenizer(recipe.target)
    end_ids = target_end_ids(recipe.target, tokenizer)
    text_config: Any = None
    vocab: Any = None
    target: Target | None = None
    taps: tuple[int, ...] = ()
    if needs_target(recipe):
        is_online, is_measured = not reads_cache(recipe), bool(getattr(settings, "measure_prompts", 0))
        if recipe.target.device_map is not None and (is_online or is_measured) and world_size() > 1:
            raise UserError(
                f"target.device_map: {recipe.target.device_map} spreads the target over all GPUs, which "
                f"{world_size()} processes cannot share; start one process"
            )
        if (is_online or is_measured) and not is_plan:
            target = Target.load(recipe.target, device())
        text_config, vocab = load_vocab(recipe.target) if target is None else (target.config, target.vocab)
        asked, num_blocks = recipe.features.after_blocks, text_config.num_hidden_layers
        taps = taps_of(recipe.head.kind, asked, num_blocks, recipe.target.path)
    if reads_cache(recipe):
        rows = cached_rows(paths.features, recipe, text_config, vocab, taps)
    else:
        rows = tokenised_rows(recipe, tokenizer, end_ids, text_config)
    features: Any = None
    if target is not None and not reads_cache(recipe):
        dtype = None if recipe.features.dtype is None else getattr(torch, recipe.features.dtype)
        features = OnlineFeatures(target, taps, dtype)
    if recipe.head.kind == "draft_lm":
        lm = new_causal_lm(recipe.head, tokenizer, settings.seed, None if vocab is None else vocab.embedding.shape[0])
        _check_lm(recipe, lm)
        objective: Any = (CausalLMObjective if vocab is None else DraftLMObjective)(lm, vocab, settings)
        vocab_size = len(tokenizer) if vocab is None else objective.num_columns
        if settings.on_policy and features is not None:
            features = OnPolicyFeatures(lm, features, vocab_size, end_ids)
        save: Any = lambda lm, directory, facts: save_causal_lm(lm, tokenizer, directory)  # noqa: E731
    else:
        head, counted = _new_head(recipe, rows, tokenizer, end_ids, text_config, vocab, taps)
        objective = OBJECTIVES[recipe.head.kind](head, vocab, settings)
        vocab_size = int(getattr(head.config, "draft_vocab_size", head.config.vocab_size))
        known: dict[str, Any] = {"target_path": recipe.target.path, "target": fingerprint(text_config, vocab)}
        if counted is not None:
            known["draft_vocabulary"] = counted.facts()
        save = lambda head, directory, facts: save_head(head, directory, **known, **facts)  # noqa: E731
    return Job(
        kind=name,
        objective=objective,
        train=rows.train,
        lengths=rows.lengths,
        held_out=rows.held_out,
        output=output,
        state=paths.state(name),
        metrics=paths.root / "metrics.jsonl",
        save=save,
        save_dtype=torch.float32 if vocab is None else vocab.lm_head.dtype,
        features=features,
        target=target,
        overwrite=overwrite,
        pools=rows.pools,
        rows=rows.origin["rows"],
        vocab_size=vocab_size,
    )


def _new_head(
    recipe: Recipe, rows: Rows, tokenizer: Any, end_ids: set[int], text_config: Any, vocab: Any, taps: tuple[int, ...]
) -> tuple[Any, CountedVocabulary | None]:
    """A draft head, and its draft vocabulary as it was counted on the training rows."""
    config, path, counted = recipe.head, recipe.target.path, None
    if isinstance(config, Eagle3Section) and config.init_from is None:
        vocab_size = int(vocab.embedding.shape[0])
        forced = forced_ids(tokenizer, end_ids, vocab_size)
        counted = draft_vocabulary(rows.tokens, config.draft_vocab_size, vocab_size, forced, rows.origin)
    vocabulary = None if counted is None else counted.vocabulary
    head: Any = new_head(config, text_config, vocab, recipe.train.seed, path, taps, vocabulary).float()
    if config.kind == "eagle3" and counted is None:  # a warm start keeps its own
        head.vocabulary.check_ends(end_ids, f"head.init_from: {config.init_from}")
        counted = given_vocabulary(head.vocabulary, rows.tokens, rows.origin)
    # Medusa and Hydra heads have no positions, or none below the last token that is kept.
    assert recipe.tree is not None
    depths = (recipe.tree.levels, recipe.train.eval_depths, getattr(recipe.train, "unroll_steps", 0))
    drafted = 0 if config.kind in MULTI_TOKEN else max(depths)
    positions, length = head.config.max_position_embeddings, recipe.data.max_length
    if positions < length + drafted:
        raise UserError(
            f"head.max_position_embeddings: {positions:,} is less than data.max_length {length:,} + {drafted} drafted "
            f"levels; set it to {length + drafted:,}"
        )
    if rank() == 0:
        if counted is not None:
            print(counted.line(), flush=True)
        for sentence in position_warnings(head.config, text_config, config.init_from or "head"):
            warn(sentence)
    return head, counted


def _check_lm(recipe: Recipe, lm: Any) -> None:
    """UserError for a context that the data overrun, and for tokens that a cache cannot have states of."""
    positions, length = getattr(lm.config.get_text_config(), "max_position_embeddings", None), recipe.data.max_length
    if positions is not None and positions < length:
        raise UserError(
            f"data.max_length: {length:,} is beyond head.max_position_embeddings {positions:,}; lower it, or raise that"
        )
    if getattr(recipe.train, "on_policy", 0.0) and reads_cache(recipe):
        raise UserError(
            "train.on_policy: a cache has no states of tokens that are yet to be drawn; set features.mode online"
        )


def plan(job: Job) -> str:
    """Four lines with the steps and sizes of a job that is run by as many processes as there are now."""
    config, parameters = job.config, list(job.objective.parameters())
    processes = f"{world_size()} process{'es' if world_size() > 1 else ''}"
    per_epoch = Order(job.lengths, config.seed, config.batch_size, config.accumulation, world_size()).steps_per_epoch
    steps, tokens = total_steps(config, per_epoch), sum(job.lengths)
    epochs = steps / per_epoch
    trained = sum(p.numel() for p in parameters if p.requires_grad)
    frozen = sum(p.numel() for p in parameters) - trained
    # Weights, gradients and Adam's two moments in float32, and the frozen part, in one process without ZeRO; then both
    # laws, their logarithm and gradient over one chunk of slots, in float32.
    sizes = [_mib(size) for size in (16 * trained + 4 * frozen, 16 * config.loss_chunk_slots * job.vocab_size)]
    budget = "" if config.max_seconds is None else f", at most {config.max_seconds:g} s"
    return "\n".join(
        [
            f"data: {len(job.lengths):,} rows, {tokens:,} tokens an epoch; {len(job.held_out):,} held out",
            f"steps: {steps:,} of {config.batch_size} rows x {config.accumulation} x {processes}: "
            f"{epochs:.2f} epochs, {round(epochs * tokens):,} tokens{budget}",
            f"weights: {trained:,} trained, {frozen:,} frozen; "
            f"{sizes[0]} with gradients and Adam, {sizes[1]} for a chunk of laws",
            f"output: {job.output}",
        ]
    )


def _mib(size: int) -> str:
    return f"{size / 2**20:,.1f} MiB" if size < 2**30 else f"{size / 2**30:,.2f} GiB"
