"""Trains a small LM: by cross-entropy, or also by a target's laws (a draft LM)."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from aerie.configs.errors import UserError
from aerie.configs.read import as_dict
from aerie.configs.schema.heads import DraftLMSection, DraftLMTrain, TargetConfig
from aerie.data.batches import Batch
from aerie.model import target as targets
from aerie.model.target import Target, VocabWeights, load_tokenizer
from aerie.train import losses
from aerie.train.losses import SumsAndCounts, Totals, argmax_in_chunks
from aerie.train.objectives import Objective, StepOutput, chosen_after, shifted
from aerie.train.workload import Load, MatrixSizes, Work, attention_operations


class LMObjective(Objective):
    """If a vocabulary is padded, the softmax is over the tokens that both have, as in drafting."""

    def __init__(self, head: Any, target: VocabWeights | None, settings: DraftLMTrain) -> None:
        super().__init__(head, target, settings)
        self.num_rows = int(self.config.vocab_size)
        self.num_columns = (
            self.num_rows if target is None else min(len(target.lm_head), self.num_rows)
        )
        self.weights = {"cross_entropy": settings.token_weight}
        if target is not None:
            self.weights["distill"] = settings.distill_weight
        if settings.gradient_checkpointing:
            head.gradient_checkpointing_enable()

    def counts(self, batch: Batch) -> dict[str, Tensor]:
        return dict.fromkeys(self.weights, (batch.turn_ids[:, 1:] != 0).sum())

    def forward(self, batch: Batch) -> StepOutput:
        slots = (
            batch.turn_ids[:, 1:] != 0
        )  # [B, T-1]: tokens with a turn, the row's first token excepted
        tokens = batch.input_ids[:, 1:][slots]  # [S]
        known = tokens < self.num_columns  # [S]
        columns = [self.states(batch.input_ids)[slots], tokens, known]
        if self.target is not None and batch.features is not None:
            columns.append(batch.features[:, :-1][slots])
        pieces = losses.in_chunks(columns, self.chunk)
        found, count = losses.summed([*losses.by_piece(self._sums, pieces)]), slots.sum()
        names = [*self.weights, "token_accuracy", "alpha", "greedy_agreement"]
        named = {name: (value, count) for name, value in zip(names, found, strict=False)}
        return StepOutput({name: named.pop(name) for name in self.weights}, named)

    def _sums(
        self, states: Tensor, tokens: Tensor, known: Tensor, goals: Tensor | None = None
    ) -> Totals:
        """Sums over S slots: the LM's states [S, D], tokens, whether to learn them, the target's states [S, Dt]."""
        log_q = self.logits(states).float().log_softmax(-1)  # [S, num_columns]
        drafted = log_q.detach().argmax(-1)
        # A token without a column cannot be learnt; the law at its slot still is.
        told = log_q.gather(1, tokens.clamp(max=self.num_columns - 1)[:, None])[:, 0]  # [S]
        token_loss, correct = -(told * known).sum(), ((drafted == tokens) & known).sum()
        if self.target is None or goals is None or self.settings.distill is None:
            return token_loss, correct
        law, choice = losses.drafted_law(goals, self.target, torch.arange(self.num_columns))
        law_loss = losses.LOSSES[self.settings.distill](log_q, law, self.settings).sum()
        with torch.no_grad():
            return (
                token_loss,
                law_loss,
                correct,
                losses.acceptance_rate(log_q, law.whole).sum(),
                (drafted == choice).sum(),
            )

    def states(self, input_ids: Tensor) -> Tensor:
        """States [B, T-1, D] that predict the tokens after the first."""
        # An id from the target's padding is read as the LM's last token. Rows are padded on the right, where causal
        # attention never looks, so there is no mask.
        given = input_ids[:, :-1].clamp(max=self.num_rows - 1)
        return cast(
            Tensor, self.head.get_decoder()(input_ids=given, use_cache=False).last_hidden_state
        )

    def logits(self, states: Tensor) -> Tensor:
        """[S, num_columns], with the LM's own scale and softcap."""
        logits = self.head.get_output_embeddings()(states)
        return targets.transformed(logits, *targets.final_transform(self.config))[
            :, : self.num_columns
        ]

    def measure(self, batch: Batch) -> SumsAndCounts:
        return self(batch).sums() if self.target is None else super().measure(batch)

    def drafted(self, batch: Batch) -> Iterator[Tensor]:
        # On the conversation's own tokens, a deeper draft is the first draft some tokens later: one forward has all.
        own = partial(argmax_in_chunks, self.logits, chunk=self.chunk)
        tokens, depths = (
            chosen_after(batch, self.states(batch.input_ids), own),
            range(self.settings.eval_depths),
        )
        return (shifted(tokens, 1 + k)[:, :-1][batch.supervised(k)[:, :-1]] for k in depths)

    def summarise(self, means: dict[str, float]) -> dict[str, float]:
        if "chain" in means:
            return super().summarise(means)
        return {"loss": means["cross_entropy"], "accuracy": means["token_accuracy"]}

    def work(self, load: Load) -> Work:
        slots = load.slots[0]
        own = self.head.get_output_embeddings().weight.numel()
        shared = 0 if self.target is None else self.target.lm_head.numel()
        return Work(
            MatrixSizes.of(self.head).body * load.tokens,
            attention_operations(self.head.config, load.pairs),
            2 * shared * slots + 6 * own * slots,
        )


def new_causal_lm(
    config: DraftLMSection, tokenizer: Any, seed: int, vocab_size: int | None = None
) -> Any:
    """A Llama with tied embeddings of vocab_size rows (None: the tokenizer's size), or the LM of config.init_from."""
    if config.init_from is not None:
        source = TargetConfig(config.init_from, dtype="float32")
        try:
            lm: Any = Target.load(source).model  # refused and frozen as in drafting
            if why := targets.only_trains(lm.config):
                raise UserError(f"{config.init_from}: {why}")
            own, rows = (
                load_tokenizer(source).get_vocab(),
                lm.get_input_embeddings().weight.shape[0],
            )
            targets.require_same_token_ids(
                own, tokenizer.get_vocab(), rows, config.init_from, "the target"
            )
        except UserError as error:
            raise UserError(f"head.init_from: {error}") from error
        return lm.requires_grad_(True).train()
    sizes = {
        name: value for name, value in as_dict(config).items() if name not in ("kind", "init_from")
    }
    sizes["rope_theta"] = config.rope_theta or 10000.0
    fixed = {
        "vocab_size": vocab_size or len(tokenizer),
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        lm = LlamaForCausalLM(LlamaConfig(**sizes, **fixed, **_special_tokens(tokenizer)))
    for name, parameter in lm.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            parameter.data.mul_(
                (2 * config.num_hidden_layers) ** -0.5
            )  # the residual stream keeps its scale (GPT-2)
    return lm


def _special_tokens(tokenizer: Any) -> dict[str, Any]:
    return {
        name: getattr(tokenizer, name) for name in ("eos_token_id", "pad_token_id", "bos_token_id")
    }


def save_causal_lm(tokenizer: Any, lm: Any, directory: Path, **_: Any) -> None:
    lm.generation_config = GenerationConfig(**_special_tokens(tokenizer))
    lm.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
