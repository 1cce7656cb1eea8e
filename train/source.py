"""What a draft head is trained on: rows, and the target's states of them, from a cache or from the target itself."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig

from data.batches import ShardPools, TokenisedRow
from data.cache import FeatureCache
from data.chat import end_of_turn_ids
from data.config import DataConfig, FeaturesConfig
from data.features import text_fingerprint
from data.frequency import CountedVocabulary, draft_vocabulary, forced_ids, given_vocabulary
from data.online import OnlineFeatures
from data.plan import check_rows
from data.shards import rows_digest
from data.tally import Tally
from data.tokens import statistics, tokenize
from model.config import HeadConfig, TargetConfig
from model.recipe import as_dict
from model.target import Target, TargetEnds, fingerprint, load_ends, load_tokenizer, taps_of
from model.vocab import DraftVocabulary


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
        return draft_vocabulary(self.tokens, self.request.head.draft_vocab_size, vocab_size, forced, self.origin)

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
    rows = tokenize(request.data, tokenizer, end_ids, Tally(), disable_bar=None if speaks else True)
    check_rows([*rows.train, *rows.held_out], text_config, request.target.path)
    if speaks:
        print(f"train: {statistics(rows.train).line()}", flush=True)
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
