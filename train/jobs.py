"""What a recipe trains: its rows, its module with the objective, and how the module is saved."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from accelerate.tracking import get_available_trackers

from aerie.configs.errors import UserError, rank, warn, warn_of_lone_process, world_size
from aerie.configs.read import as_dict
from aerie.configs.schema.recipe import Recipe
from aerie.data import tokens
from aerie.data.batches import Batch, BatchRow, Order, ShardPools, check_padding, with_states
from aerie.data.conversations import Tally
from aerie.data.feature_cache import FeatureCache, rows_digest
from aerie.data.features import check_rows, within_context
from aerie.data.inputs import FEATURES_COMMAND
from aerie.data.rendering import facts_of, recipe_tokenizer
from aerie.data.served_states import ServedRows, ServedStates
from aerie.model import target_files
from aerie.model.checkpoint import new_head, position_warnings, rope_notes, save_head
from aerie.model.heads import DRAFT_MODELS, HEADS
from aerie.model.target import Target, final_norm, load_vocab, local_device
from aerie.model.vocab_weights import VocabWeights
from aerie.train import lm
from aerie.train.objectives import Objective
from aerie.train.resume import (
    needs_target,
    reads_cache,
    reads_online,
    reads_servers,
    runs_target,
    state_name,
)


@dataclass(frozen=True)
class Rows:
    """The training and held-out rows of a job."""

    train: Sequence[BatchRow]
    held_out: Sequence[BatchRow]
    lengths: Sequence[int]  # the training rows' lengths in tokens
    tokens: Callable[[], Iterable[tuple[Any, Any]]]  # (input_ids, turn_ids) of the training rows
    digest: str  # of the training rows' token ids
    pools: ShardPools | None = None  # None if the whole cache is one pool
    held_out_tokens: Callable[[], Iterable[tuple[Any, Any]]] = tuple  # the same of held-out rows


@dataclass(frozen=True)
class Job:
    """A training before it starts."""

    kind: str  # of the head; a draft LM's also names its loss
    objective: Objective
    rows: Rows
    output: Path
    state: Path
    metrics: Path
    save: Callable[..., None]  # (head with complete weights, directory, **facts)
    features: Callable[[Batch], Batch] | None = None  # adds the target's states; None if cached
    target: Target | None = None  # if training needs its blocks, too
    trunk: Any = None  # in a plan, the target without weights, if training would load it
    overwrite: bool = False
    servers: ServedStates | None = None  # a context manager: servers that give the rows' states

    def order(self, world: int) -> tuple[Order, int]:
        """The rows of each optimiser step, and the number of steps."""
        config = self.objective.settings
        # A step draws its rows for all processes together, then deals them out.
        order = Order(
            self.rows.lengths,
            config.seed,
            config.batch_size,
            config.accumulation,
            world,
            self.rows.pools,
        )
        steps = config.epochs * order.steps_per_epoch
        return order, min(steps, config.max_steps or steps)


@dataclass(frozen=True)
class Source:
    """What a training knows of its target. A small LM that learns from tokens alone knows only the
    tokenizer."""

    tokenizer: Any
    end_ids: set[int]  # tokens that end a turn
    text_config: Any = None
    vocab: Any = None  # VocabWeights
    taps: tuple[int, ...] = ()
    model: Target | None = None  # with its blocks, if training runs them


def build_job(recipe: Recipe, output: Path, overwrite: bool, is_plan: bool = False) -> Job:
    """The recipe's job; UserError if it cannot be trained. A plan loads only the target's embedding
    and LM head."""
    _check_launch(recipe)
    # Cheap steps come first, so that a mistake shows before a head is built.
    source = _read_target(recipe, is_plan)
    rows = _read_cache(recipe, source) if reads_cache(recipe) else _tokenise_rows(recipe, source)
    features = _online_features(recipe, source)
    servers = None
    if reads_servers(recipe) and not is_plan:
        rows, servers = _serve_rows(recipe, source, rows)
    build = _build_head if recipe.head.kind in HEADS else _build_draft_lm
    objective, save = build(recipe, source, rows)
    return Job(
        kind=state_name(recipe),
        objective=objective,
        rows=rows,
        output=output,
        state=recipe.root / "state" / state_name(recipe),
        metrics=recipe.root / "metrics.jsonl",
        save=save,
        features=features,
        target=source.model,
        trunk=target_files.skeleton(recipe.target) if is_plan and runs_target(recipe) else None,
        overwrite=overwrite,
        servers=servers,
    )


def _check_launch(recipe: Recipe) -> None:
    """UserError if a tracker is not installed. accelerate would leave it out without a word."""
    for name in sorted({*recipe.train.trackers} - {*map(str, get_available_trackers())}):
        raise UserError(f"train.trackers: {name} is not installed; run: pip install {name}")
    warn_of_lone_process()


def _read_target(recipe: Recipe, is_plan: bool) -> Source:
    tokenizer = recipe_tokenizer(recipe.target, recipe.data)
    source = Source(tokenizer, target_files.target_end_ids(recipe.target, tokenizer))
    if not needs_target(recipe):
        return source
    model = None
    if runs_target(recipe) and recipe.target.device_map is not None and world_size() > 1:
        raise UserError(
            f"target.device_map: {world_size()} processes cannot share a spread target; "
            "start one process"
        )
    if runs_target(recipe) and not is_plan:
        model = Target.load(recipe.target, local_device())
        text_config, vocab = model.config, model.vocab
    else:
        text_config, vocab = load_vocab(recipe.target)
    # Checking taps needs the number of blocks, so a wrong tap shows only now.
    taps = target_files.taps_of(recipe, text_config.num_hidden_layers)
    return replace(source, text_config=text_config, vocab=vocab, taps=taps, model=model)


def _read_cache(recipe: Recipe, source: Source) -> Rows:
    directory = recipe.root / "features"
    # The cache refuses other data, taps or storage than those from which it was built.
    cache = FeatureCache.open(
        directory,
        {
            "data": as_dict(recipe.data),
            "after_blocks": list(source.taps),
            "storage": recipe.features.storage,
        },
    )
    # The cache fits only the weights with which it was built, whatever their path.
    difference = target_files.other_weights(
        cache.fingerprint["target"], recipe.target, source.text_config, source.vocab
    )
    if difference:
        raise UserError(f"{directory}: {difference}; rebuild with: {FEATURES_COMMAND} --overwrite")
    train = cache.split("train")
    at_once = recipe.features.shuffle_shards
    held_out = cache.split("held_out")
    return Rows(
        train=train,
        held_out=held_out,
        lengths=train.lengths,
        tokens=train.tokens,
        held_out_tokens=held_out.tokens,
        digest=cache.fingerprint["rows"],
        pools=None if at_once is None else ShardPools(train.shards, at_once),
    )


def _tokenise_rows(recipe: Recipe, source: Source) -> Rows:
    # Rows are cut to the target's context.
    data = tokens.tokenize(
        within_context(recipe.data, source.text_config), source.tokenizer, source.end_ids, Tally()
    )
    if source.text_config is not None:
        check_rows([*data.train, *data.held_out], source.text_config, recipe.target.path)
    if rank() == 0:
        print(f"train: {tokens.statistics(data.train)}", flush=True)
    return Rows(
        train=data.train,
        held_out=data.held_out,
        lengths=[len(row.input_ids) for row in data.train],
        tokens=lambda: ((row.input_ids, row.turn_ids) for row in data.train),
        held_out_tokens=lambda: ((row.input_ids, row.turn_ids) for row in data.held_out),
        digest=rows_digest(data.train),
    )


def _online_features(recipe: Recipe, source: Source) -> Callable[[Batch], Batch] | None:
    """A function that adds the target's states to a batch; None if they are cached or this is a
    plan."""
    model = source.model
    if model is None or not reads_online(recipe):
        return None
    # Refuses targets whose states of a row change with longer rows in the batch.
    check_padding(model)
    dtype = getattr(torch, recipe.features.dtype or "", model.dtype)
    return partial(with_states, model, source.taps, dtype)


def _serve_rows(recipe: Recipe, source: Source, rows: Rows) -> tuple[Rows, ServedStates]:
    """The rows with states from servers, and the servers."""
    config: Any = recipe.features.server
    splits: Any = (rows.train, rows.held_out)
    run = recipe.root / "state" / state_name(recipe)
    servers = ServedStates(config, recipe.target, source.taps, [*chain(*splits)], run)
    dtype = getattr(torch, recipe.features.dtype or "", servers.shell.dtype)
    train, held_out = (ServedRows(split, servers, dtype) for split in splits)
    return replace(rows, train=train, held_out=held_out), servers


Trained = tuple[Objective, Callable[..., None]]  # the objective, and what saves its head


def _build_draft_lm(recipe: Recipe, source: Source, rows: Rows) -> Trained:
    settings: Any = recipe.train
    section: Any = recipe.head
    # A draft LM's embedding has a row for each id of its target.
    vocab_size = len(source.tokenizer if source.vocab is None else source.vocab.embedding)
    head = lm.new_causal_lm(section, source.tokenizer, settings.seed, vocab_size)
    objective = lm.LMObjective(head, source.vocab, settings)
    _require_positions(objective, recipe, source)
    return objective, partial(lm.save_causal_lm, source.tokenizer)


def _build_head(recipe: Recipe, source: Source, rows: Rows) -> Trained:
    section: Any = recipe.head
    kind = HEADS[section.kind]
    vocab = source.vocab
    vocabulary = None
    facts: dict[str, Any] = {}  # about the draft vocabulary
    line = ""
    # (1) for a new head, what its section leaves to the target and the rows
    if section.init_from is None:
        if kind.has_draft_vocabulary:
            num_tokens = len(vocab.embedding)
            # A draft must be able to end a turn, even if such tokens are rare in the rows.
            size = section.draft_vocab_size
            forced = tokens.forced_ids(source.tokenizer, source.end_ids, num_tokens, size)
            vocabulary, facts, line = tokens.draft_vocabulary(
                rows.tokens(),
                num_tokens,
                size,
                forced,
                held_out=rows.held_out_tokens(),
                tokenizer=source.tokenizer,
            )
        section, vocab = _complete_section(recipe, source)
    # (2) the head
    head: Any = new_head(
        section,
        source.text_config,
        vocab,
        recipe.train.seed,
        recipe.target.path,
        source.taps,
        vocabulary,
    ).float()
    if section.init_from is not None and kind.has_draft_vocabulary:
        # A warm start keeps its draft vocabulary, which must be able to end a turn.
        head.vocabulary.check_ends(source.end_ids, f"head.init_from: {section.init_from}")
        _, facts, line = tokens.draft_vocabulary(
            rows.tokens(),
            len(head.vocabulary.t2d),
            warm_start=head.vocabulary,
            held_out=rows.held_out_tokens(),
            tokenizer=source.tokenizer,
        )
    # The head's weights are in float32; autocast and DeepSpeed compute in narrower dtypes.
    objective = kind.objective(head, vocab, recipe.train)
    _require_positions(objective, recipe, source)
    # These come only now, when nothing can be refused any more.
    if rank() == 0:
        origin = section.init_from or "head"
        for sentence in position_warnings(head.config, source.text_config, origin):
            warn(sentence)
        lines = [line] if line else []
        if section.init_from is None and hasattr(head.config, "rope_theta"):
            lines += rope_notes(source.text_config)
        for sentence in lines:
            print(sentence, flush=True)
    # (3) what is saved beside the weights, so that a loader can refuse another target
    fingerprint = target_files.fingerprint(recipe.target, source.text_config, vocab)
    known: dict[str, Any] = {"draft_vocabulary": facts} if facts else {}
    known |= facts_of(recipe.data)
    return objective, partial(
        save_head, target_path=recipe.target.path, target=fingerprint, **known
    )


def _complete_section(recipe: Recipe, source: Source) -> tuple[Any, VocabWeights]:
    """A new head's section with all that its target decides, and the weights from which the head
    starts."""
    section: Any = recipe.head
    vocab = source.vocab
    if getattr(section, "norm_init", None) == "target":
        # Read separately, because no other start needs this weight.
        vocab = replace(vocab, final_norm=final_norm(recipe.target))
    if getattr(section, "mask_token_id", 0) is None:
        mask = tokens.mask_token(source.tokenizer, source.end_ids, vocab.embedding)
        section = replace(section, mask_token_id=mask)
    # A draft goes on behind the longest row, so RoPE must cover its positions, too.
    if section.max_position_embeddings is None:
        context = target_files.context_of(source.text_config) or 0
        positions = max(context, sum(_needed_positions(recipe, source)))
        section = replace(section, max_position_embeddings=positions)
    return section, vocab


def _needed_positions(recipe: Recipe, source: Source) -> tuple[int, int]:
    """The positions of the longest row, and those of a draft behind its last token."""
    # The recipe and the target limit a row's length.
    max_length = recipe.data.max_length
    length = min(max_length, target_files.context_of(source.text_config) or max_length)
    positions_ahead = DRAFT_MODELS[recipe.head.kind].positions_ahead
    if positions_ahead is None or recipe.tree is None:
        return length, 0
    # Decoding, evaluation and training draft to different depths; the greatest counts.
    ahead = positions_ahead(recipe.head, recipe.train)
    return length, max(recipe.tree.levels, recipe.train.eval_depths, ahead)


def _require_positions(objective: Objective, recipe: Recipe, source: Source) -> None:
    """UserError if the head has too few positions for the longest row and a draft."""
    length, drafted = _needed_positions(recipe, source)
    needed = length + drafted
    positions = getattr(objective.config, "max_position_embeddings", None) or needed
    if positions < needed:
        raise UserError(
            f"head.max_position_embeddings: {positions:,} is less than data.max_length "
            f"{length:,} + {drafted} drafted levels; set it to {needed:,}"
        )
