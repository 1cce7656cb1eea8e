"""A recipe's sections -> the job that the loop runs."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from data.chat import end_of_turn_ids
from data.frequency import CountedVocabulary
from data.shards import rows_digest
from data.tally import Tally
from data.tokens import statistics, tokenize
from model.checkpoint import Head, new_head
from model.config import MULTI_TOKEN
from model.errors import UserError, warn
from model.heads.eagle1 import Eagle1Head
from model.heads.eagle3 import Eagle3Head
from model.sizes import position_warnings
from model.target import TargetEnds, load_tokenizer
from train.config import TrainConfig
from train.loop import Job, Measure, Save, Supply
from train.objectives.causal_lm import CausalLM, CausalLMObjective, new_causal_lm
from train.objectives.draft_lm import DistilledLM, DraftLMObjective
from train.objectives.eagle1 import Eagle1Objective
from train.objectives.eagle3 import Eagle3Objective, UnrolledHead
from train.objectives.multi_token import MultiTokenModule, MultiTokenObjective
from train.on_policy import OnPolicySupply
from train.source import Request, Source


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
    disable_bar = None if frame.speaks else True
    rows = tokenize(data, tokenizer, end_of_turn_ids(tokenizer, None), Tally(), disable_bar=disable_bar)
    if frame.speaks:
        print(f"train: {statistics(rows.train).line()}", flush=True)
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
