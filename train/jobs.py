"""What a draft head is trained on: rows, and the target's states of them, from a cache or from the target itself."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig

from aerie.configs.errors import UserError, warn
from aerie.configs.read import as_dict
from aerie.configs.schema.data import DataConfig, FeaturesConfig
from aerie.configs.schema.target_and_head import MULTI_TOKEN, DraftLMSection, HeadConfig, TargetConfig
from aerie.configs.schema.train import TrainConfig
from aerie.data.batches import OnlineFeatures, Order, ShardPools, TokenisedRow
from aerie.data.cache import FeatureCache, rows_digest
from aerie.data.chat import end_of_turn_ids
from aerie.data.conversations import Tally
from aerie.data.features import check_rows
from aerie.data.inputs import COMMAND, INDEX, conversation_inputs, sampled_digest, target_inputs
from aerie.data.tokens import (
    CountedVocabulary,
    draft_vocabulary,
    forced_ids,
    given_vocabulary,
    statistics,
    text_fingerprint,
    tokenize,
)
from aerie.model.checkpoint import new_head, position_warnings
from aerie.model.heads import Head
from aerie.model.heads.eagle import Eagle1Head, Eagle3Head
from aerie.model.hub import head_directory
from aerie.model.storage import FILE, Manifest, digest, sound_record
from aerie.model.target import Target, TargetEnds, fingerprint, load_ends, load_tokenizer, taps_of
from aerie.model.vocab import DraftVocabulary
from aerie.train.loop import Job, Measure, Save, Supply, total_steps
from aerie.train.objectives.eagle import Eagle1Objective, Eagle3Objective, UnrolledHead
from aerie.train.objectives.lm import (
    CausalLM,
    CausalLMObjective,
    DistilledLM,
    DraftLMObjective,
    OnPolicySupply,
    new_causal_lm,
)
from aerie.train.objectives.multi_token import MultiTokenModule, MultiTokenObjective


@dataclass(frozen=True)
class Request:
    """What a recipe asks for."""

    head: HeadConfig
    target: TargetConfig
    data: DataConfig
    features: FeaturesConfig


@dataclass(frozen=True)
class Source:
    """Rows of both splits and everything of the target that training needs."""

    request: Request
    text_config: Any
    ends: TargetEnds
    after_blocks: tuple[int, ...]
    train: Sequence[TokenisedRow]
    held_out: Sequence[TokenisedRow]
    lengths: Sequence[int]  # of the training rows, in tokens
    tokens: Iterable[tuple[Any, Any]]  # (input_ids, turns) of the training rows
    origin: dict[str, Any]  # what the tokens were made from
    target: Target | None = None  # where it is loaded whole
    supply: OnlineFeatures | None = None  # where nothing is cached
    pools: ShardPools | None = None  # where rows are drawn from some shards of the cache at a time

    @property
    def fingerprint(self) -> str:
        """The target's."""
        return fingerprint(self.text_config, self.ends)

    def draft_vocabulary(self) -> CountedVocabulary:
        """A new head's, counted on the training rows."""
        vocab_size, tokenizer = int(self.ends.embedding.shape[0]), load_tokenizer(self.request.target)
        forced = forced_ids(tokenizer, _end_ids(self.request.target, tokenizer), vocab_size)
        return draft_vocabulary(
            self.tokens, getattr(self.request.head, "draft_vocab_size", None), vocab_size, forced, self.origin
        )

    def kept_vocabulary(self, vocabulary: DraftVocabulary) -> CountedVocabulary:
        """A warm start's, counted on the training rows; UserError when it cannot end a turn of this target."""
        end_ids = _end_ids(self.request.target, load_tokenizer(self.request.target))
        vocabulary.check_ends(end_ids, f"head.init_from: {self.request.head.init_from}")
        return given_vocabulary(vocabulary, self.tokens, self.origin)


def cached_source(directory: Path, request: Request, whole: Target | None = None) -> Source:
    """Rows of the feature cache in directory; UserError when it is another's. whole: the target, if it is loaded."""
    text_config, ends, taps = _target_of(request, whole)
    expected = {"target": fingerprint(text_config, ends), "after_blocks": list(taps), "data": as_dict(request.data)}
    cache = FeatureCache.open(directory, {**expected, "storage": request.features.storage})
    train, at_once = cache.split("train"), request.features.shuffle_shards
    return Source(
        request=request,
        text_config=text_config,
        ends=ends,
        after_blocks=taps,
        train=train,
        held_out=cache.split("held_out"),
        lengths=train.lengths,
        tokens=train.tokens(),
        origin={name: cache.fingerprint.get(name) for name in ("rows", "tokenizer", "template")},
        target=whole,
        pools=None if at_once is None else ShardPools(train.shards, at_once),
    )


def online_source(request: Request, whole: Target | None, speaks: bool) -> Source:
    """Tokenised rows, and the target for their states (None: for a plan); speaks: this process may print."""
    text_config, ends, taps = _target_of(request, whole)
    tokenizer = load_tokenizer(request.target)
    end_ids = _end_ids(request.target, tokenizer)
    rows = tokenize(request.data, tokenizer, end_ids, Tally(), speaks)
    check_rows([*rows.train, *rows.held_out], text_config, request.target.path)
    if speaks:
        print(f"train: {statistics(rows.train)}", flush=True)
    dtype = None if request.features.dtype is None else getattr(torch, request.features.dtype)
    return Source(
        request=request,
        text_config=text_config,
        ends=ends,
        after_blocks=taps,
        train=rows.train,
        held_out=rows.held_out,
        lengths=[len(row.input_ids) for row in rows.train],
        tokens=((row.input_ids, row.turns) for row in rows.train),
        origin={"rows": rows_digest(rows.train), **text_fingerprint(tokenizer, request.data)},
        target=whole,
        supply=None if whole is None else OnlineFeatures(whole, taps, dtype),
    )


def _target_of(request: Request, whole: Target | None) -> tuple[Any, TargetEnds, tuple[int, ...]]:
    text_config, ends = load_ends(request.target) if whole is None else (whole.config, whole.ends)
    taps = taps_of(request.head.kind, request.features.after_blocks, text_config.num_hidden_layers, request.target.path)
    return text_config, ends, taps


def _end_ids(target: TargetConfig, tokenizer: Any) -> set[int]:
    try:
        stops = GenerationConfig.from_pretrained(target.path, revision=target.revision).eos_token_id
    except OSError:  # the file is optional
        stops = None
    return end_of_turn_ids(tokenizer, stops)


@dataclass(frozen=True)
class Frame:
    """What every job has: its settings, where it writes, and whether this process speaks."""

    config: TrainConfig
    output: Path
    state: Path
    metrics: Path
    saver: Callable[..., Save]  # of facts that are known before training
    overwrite: bool
    speaks: bool

    def job(self, **parts: Any) -> Job:
        return Job(
            config=self.config,
            output=self.output,
            state=self.state,
            metrics=self.metrics,
            overwrite=self.overwrite,
            **parts,
        )


def draft_head_job(
    source: Source, frame: Frame, levels: int, measure: Callable[[Any], Measure] | None
) -> tuple[Job, int]:
    """The job, and how many tokens its laws are over.

    levels are those that decoding will draft; measure makes a measure by decoding for a new head.
    """
    request, config, ends, taps = source.request, frame.config, source.ends, source.after_blocks
    is_new = request.head.kind == "eagle3" and request.head.init_from is None
    counted = source.draft_vocabulary() if is_new else None
    vocabulary = None if counted is None else counted.vocabulary
    head = new_head(request.head, source.text_config, ends, config.seed, request.target.path, taps, vocabulary).float()
    if isinstance(head, Eagle3Head) and counted is None:
        counted = source.kept_vocabulary(head.vocabulary)
    _check_positions(source, config, head.config.max_position_embeddings, levels)
    if frame.speaks:
        _describe(head, counted, source)
    module, objective = _trained(head, ends, config, len(taps))
    job = frame.job(
        kind=request.head.kind,
        module=module,
        objective=objective,
        train=source.train,
        lengths=source.lengths,
        held_out=source.held_out,
        save=frame.saver(
            target=source.fingerprint, **({} if counted is None else {"draft_vocabulary": counted.facts()})
        ),
        save_dtype=ends.lm_head.dtype,
        supply=source.supply,
        pools=source.pools,
        rows=source.origin["rows"],
        measure=None if measure is None else measure(head),
    )
    return job, int(getattr(head.config, "draft_vocab_size", head.config.vocab_size))


def _trained(head: Head, ends: TargetEnds, config: TrainConfig, num_taps: int) -> tuple[nn.Module, Any]:
    """The module that is trained for a head, and its objective."""
    if isinstance(head, Eagle3Head):
        return UnrolledHead(head, config), Eagle3Objective(ends, config, num_taps)
    if config.packing:
        raise UserError(f"train.packing: packs rows for eagle3; leave it out for {head.kind}")
    if isinstance(head, Eagle1Head):
        head.gradient_checkpointing = config.gradient_checkpointing
        return head, Eagle1Objective(ends, config)
    return MultiTokenModule(head, config), MultiTokenObjective(ends, config, head.config.num_heads)


def causal_lm_job(request: Request, frame: Frame) -> tuple[Job, int]:
    """The job of a small LM on tokens alone, and the vocabulary's size."""
    config, data = frame.config, request.data
    tokenizer = load_tokenizer(request.target)
    rows = tokenize(data, tokenizer, end_of_turn_ids(tokenizer, None), Tally(), frame.speaks)
    if frame.speaks:
        print(f"train: {statistics(rows.train)}", flush=True)
    assert isinstance(request.head, DraftLMSection)
    lm = new_causal_lm(request.head, tokenizer, config.seed)
    _prepare_lm(lm, config, data.max_length)
    job = frame.job(
        kind=request.head.kind,
        module=CausalLM(lm, config.loss_chunk_slots),
        objective=CausalLMObjective(),
        train=rows.train,
        lengths=[len(row.input_ids) for row in rows.train],
        held_out=rows.held_out,
        save=frame.saver(),
        rows=rows_digest(rows.train),
    )
    return job, len(tokenizer)


def distilled_lm_job(source: Source, frame: Frame) -> tuple[Job, int]:
    """The job of a draft LM that learns a target's tokens and laws, and how many tokens its laws are over."""
    request, config, ends = source.request, frame.config, source.ends
    vocab_size = int(ends.embedding.shape[0])
    assert isinstance(request.head, DraftLMSection)
    lm = new_causal_lm(request.head, load_tokenizer(request.target), config.seed, vocab_size)
    _prepare_lm(lm, config, request.data.max_length)
    module = DistilledLM(lm, config, vocab_size)
    supply: Supply | None = source.supply
    if config.on_policy:
        if request.features.mode != "online":
            raise UserError(
                "train.on_policy: a cache has no states of tokens that are yet to be drawn; set features.mode online"
            )
        ends_of_turns = end_of_turn_ids(load_tokenizer(request.target), None)
        supply = None if supply is None else OnPolicySupply(lm, supply, module.num_columns, ends_of_turns)
    job = frame.job(
        kind=f"{request.head.kind}-{config.distill}",
        module=module,
        objective=DraftLMObjective(ends, config),
        train=source.train,
        lengths=source.lengths,
        held_out=source.held_out,
        save=frame.saver(),
        save_dtype=ends.lm_head.dtype,
        supply=supply,
        pools=source.pools,
        rows=source.origin["rows"],
    )
    return job, module.num_columns


def _prepare_lm(lm: Any, config: TrainConfig, max_length: int) -> None:
    """UserError for settings that a small LM has no use for, or a context that its data overrun."""
    if config.packing:
        raise UserError("train.packing: packs rows for eagle3; leave it out for draft_lm")
    if config.measure_prompts:
        raise UserError("train.measure_prompts: decodes with draft heads; set it to 0 for draft_lm")
    positions = getattr(lm.config.get_text_config(), "max_position_embeddings", None)
    if positions is not None and positions < max_length:
        raise UserError(
            f"data.max_length: {max_length:,} is beyond head.max_position_embeddings {positions:,}; lower it, or "
            f"raise that"
        )
    if config.gradient_checkpointing:
        lm.gradient_checkpointing_enable()


def _describe(head: Head, counted: CountedVocabulary | None, source: Source) -> None:
    """Prints a draft vocabulary's coverage, and warns of positions that are not the target's."""
    if counted is not None:
        print(counted.line(), flush=True)
    for sentence in position_warnings(head.config, source.text_config, source.request.head.init_from or "head"):
        warn(sentence)


def _check_positions(source: Source, config: TrainConfig, positions: int, levels: int) -> None:
    """UserError when a conversation and what is drafted after it run over the head's positions.

    Medusa and Hydra heads have none, or none below the last token that is kept.
    """
    length, kind = source.request.data.max_length, source.request.head.kind
    steps = config.unroll_steps if kind == "eagle3" else 0
    drafted = 0 if kind in MULTI_TOKEN else max(levels, config.eval_depths, steps)
    if positions < length + drafted:
        raise UserError(
            f"head.max_position_embeddings: {positions:,} is less than data.max_length {length:,} + {drafted} drafted "
            f"levels; set it to {length + drafted:,}"
        )


LOGGING_ONLY = ("log_every", "save_every", "keep_last", "keep_best", "trackers", "profile_steps")


def train_inputs(
    head: HeadConfig,
    target: TargetConfig,
    data: DataConfig,
    features: FeaturesConfig,
    train: TrainConfig,
    cache: Path,
) -> dict[str, Any]:
    """JSON-ready; cache is the feature cache's directory, which stands for its data where training reads it."""
    section = {name: value for name, value in as_dict(train).items() if name not in LOGGING_ONLY}
    inputs: dict[str, Any] = {"target": target_inputs(target), "head": as_dict(head), "train": section}
    online, without_target = features.mode == "online", _is_without_target(head, train)
    if without_target or online:
        inputs |= {"data": as_dict(data), "conversations": conversation_inputs(data)}
    if online:
        asked = as_dict(features)
        inputs["features"] = {name: asked[name] for name in ("mode", "after_blocks", "dtype")}
    elif not without_target:
        made = cache_record(cache)
        inputs["features"] = None if made is None else made["inputs_digest"]
        if features.after_blocks is not None:
            inputs["after_blocks"] = list(features.after_blocks)
        if features.shuffle_shards is not None:
            inputs["shuffle_shards"] = features.shuffle_shards
    if head.init_from is not None:
        place = head_directory(head.init_from)
        files = sorted(path for kind in ("config.json", "*.safetensors", "*.bin") for path in place.glob(kind))
        inputs["init_from"] = {path.name: sampled_digest(path) for path in files}
    return inputs


def reads_cache(head: HeadConfig, features: FeaturesConfig, train: TrainConfig) -> bool:
    """Whether training reads the target's states from a feature cache."""
    return features.mode != "online" and not _is_without_target(head, train)


def cache_states(cache: Path) -> str:
    """A digest of every bit of the feature cache's rows.

    Caches that were made of the same inputs may differ in it by rounding.
    """
    return digest(Manifest.read(cache, INDEX).files)


def cache_record(cache: Path) -> dict[str, Any] | None:
    """What a feature cache's provenance.json says, None without one; UserError where it is damaged."""
    if not (cache / FILE).is_file():
        return None
    if record := sound_record(cache):
        return record
    raise UserError(f"{cache / FILE}: cannot be read; write it anew with: {COMMAND} --overwrite")


def _is_without_target(head: HeadConfig, train: TrainConfig) -> bool:
    return head.kind == "draft_lm" and train.distill is None


@dataclass(frozen=True)
class Plan:
    """Steps and sizes of a run with this many processes."""

    rows: int
    held_out_rows: int
    tokens: int  # of one epoch
    processes: int
    steps_per_epoch: int
    steps: int
    trained: int  # parameters
    frozen: int
    vocab_size: int
    config: TrainConfig

    @classmethod
    def of(
        cls,
        module: nn.Module,
        lengths: Sequence[int],
        held_out_rows: int,
        config: TrainConfig,
        processes: int,
        vocab_size: int,
    ) -> "Plan":
        order = Order(lengths, config.seed, config.batch_size, config.accumulation, processes)
        trained = sum(p.numel() for p in module.parameters() if p.requires_grad)
        return cls(
            rows=len(lengths),
            held_out_rows=held_out_rows,
            tokens=sum(lengths),
            processes=processes,
            steps_per_epoch=order.steps_per_epoch,
            steps=total_steps(config, order.steps_per_epoch),
            trained=trained,
            frozen=sum(p.numel() for p in module.parameters()) - trained,
            vocab_size=vocab_size,
            config=config,
        )

    @property
    def state_bytes(self) -> int:
        """Weights, gradients and Adam's two moments in float32, and the frozen part, in one process without ZeRO."""
        return 16 * self.trained + 4 * self.frozen

    @property
    def law_bytes(self) -> int:
        """Both laws, their logarithm and gradient over one chunk of slots, in float32."""
        return 4 * 4 * self.config.loss_chunk_slots * self.vocab_size

    def text(self, output: str) -> str:
        """Four lines."""
        config = self.config
        processes = f"{self.processes} process{'es' if self.processes > 1 else ''}"
        rows = f"{config.batch_size} rows x {config.accumulation} x {processes}"
        epochs = self.steps / self.steps_per_epoch
        budget = "" if config.max_seconds is None else f", at most {config.max_seconds:g} s"
        return "\n".join(
            [
                f"data: {self.rows:,} rows, {self.tokens:,} tokens an epoch; {self.held_out_rows:,} held out",
                f"steps: {self.steps:,} of {rows}: {epochs:.2f} epochs, {round(epochs * self.tokens):,} tokens{budget}",
                f"weights: {self.trained:,} trained, {self.frozen:,} frozen; "
                f"{_mib(self.state_bytes)} with gradients and Adam, {_mib(self.law_bytes)} for a chunk of laws",
                f"output: {output}",
            ]
        )


def _mib(size: int) -> str:
    return f"{size / 2**20:,.1f} MiB" if size < 2**30 else f"{size / 2**30:,.2f} GiB"
