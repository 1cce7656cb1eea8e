"""The features command below its options: what is planned, timed and written, and what it prints."""

from dataclasses import dataclass, replace
from typing import Any

from transformers import GenerationConfig

from data.chat import end_of_turn_ids
from data.config import DataConfig, FeaturesConfig
from data.features import Clock, extract, forward_speed, text_fingerprint
from data.inputs import state_inputs
from data.plan import CachePlan, estimate, plan_cache, require_own_shards, require_space
from data.provenance import Stage
from data.share import Share
from data.tally import Tally
from data.tokens import TokenisedData, statistics, tokenize
from model.config import HeadConfig, TargetConfig
from model.target import Target, load_config, load_tokenizer, taps_of
from model.vocab import check_size


@dataclass(frozen=True)
class Sitting:
    """What one call is asked for."""

    target: TargetConfig
    data: DataConfig
    features: FeaturesConfig
    head: HeadConfig
    stage: Stage
    share: Share
    overwrite: bool

    def may_replace(self) -> bool:
        """Whether another recipe's shards may be replaced; UserError when the directory is another run's."""
        self.stage.require_own_directory(self.overwrite)
        return self.overwrite or self.stage.is_whole()  # in a cache of this recipe another's is damage


def write(sitting: Sitting, state: Any) -> tuple[str, int]:
    """(state, exit code) of writing a share of the cache; state is accelerate's PartialState."""
    share, clock = sitting.share, Clock()
    plan, tokenizer, facts = planned(sitting, state.process_index)
    target = Target.load(sitting.target, state.device)
    fingerprint = text_fingerprint(tokenizer, sitting.data)
    index = extract(target, plan, state, fingerprint, share, clock, sitting.may_replace)
    speed = f"; {clock.line(state.num_processes)}" if clock.tokens else ""
    if index is not None:
        record = sitting.stage.finish(
            **facts, tokens=index.num_tokens, bytes=index.num_bytes, batch_tokens=sitting.features.batch_tokens
        )
        amount = f"{index.num_tokens:,} tokens, {index.num_bytes / 2**20:,.1f} MiB"
        where = sitting.stage.output
        print(f"features: {amount} in {record['seconds']:,.1f} s with the loading{speed}: {where}", flush=True)
        if index.error is not None:
            print(f"features: {plan.storage.name}: {index.error.line()}", flush=True)
    elif state.is_main_process:
        print(f"features: share {share} is written{speed}; {len(plan.missing()):,} shards are left", flush=True)
    return ("done" if share.count == 1 or index is not None else "share-done"), 0


def timed(sitting: Sitting, plan: CachePlan, device: str) -> None:
    """Prints the hours that the missing shards take, from some forwards of the target."""
    tokens = sum(map(plan.tokens_of, plan.missing(sitting.share.part(len(plan.shards)))))
    speed = forward_speed(Target.load(sitting.target, device), plan)
    print(
        f"features: {tokens:,} tokens at {speed:,.0f} tok/s (measured now, one process) take "
        f"{tokens / speed / 3600:,.2f} h; n equal processes or jobs (--shard i/n) take an n-th of it",
        flush=True,
    )


def planned(sitting: Sitting, rank: int) -> tuple[CachePlan, Any, dict[str, Any]]:
    """(plan, tokenizer, facts) after every check that needs no weights; rank 0 prints the estimate."""
    hf_config = load_config(sitting.target)
    text = hf_config.get_text_config()
    path, stage = sitting.target.path, sitting.stage
    taps = taps_of(sitting.head.kind, sitting.features.after_blocks, text.num_hidden_layers, path)
    check_size(sitting.head.draft_vocab_size, text.vocab_size)
    data, tokenizer, tally = tokenised(sitting.target, sitting.data, rank)
    origin = {**state_inputs(stage.inputs), "after_blocks": list(taps)}
    plan = plan_cache(stage.output, data, replace(sitting.features, after_blocks=taps), path, hf_config, origin)
    facts = {"train": statistics(data.train).line(), "held_out": statistics(data.held_out).line()}
    if rank == 0:
        lines = [tally.table(), *(f"{name}: {line}" for name, line in facts.items()), estimate(plan, sitting.share)]
        print("\n".join(lines), flush=True)
    require_own_shards(plan, sitting.may_replace())
    require_space(plan, sitting.share)
    return plan, tokenizer, facts


def tokenised(target: TargetConfig, config: DataConfig, rank: int) -> tuple[TokenisedData, Any, Tally]:
    """The recipe's conversations, the tokenizer that made their tokens, and what was left out."""
    tokenizer = load_tokenizer(target)
    try:
        stops = GenerationConfig.from_pretrained(target.path, revision=target.revision).eos_token_id
    except OSError:  # the file is optional
        stops = None
    tally = Tally()
    data = tokenize(
        config, tokenizer, end_of_turn_ids(tokenizer, stops), tally, disable_bar=None if rank == 0 else True
    )
    return data, tokenizer, tally
