"""A draft LM's objective: cross-entropy on the target's tokens, and a loss to the target's laws after the same prefix.

Position j has read t_0 .. t_j and predicts t_{j+1}; the target's last_hidden of j gives the law to match. Both terms
count at the tokens of the target's turns, a turn's first token included: whoever drafts from the prompt on needs it.
Tokens that the LM has drawn itself (train/on_policy.py) are a prefix like any other for the laws; they are none of the
target's, so the cross-entropy leaves them out (they stay in its count).
Source of distilling a draft LM by a divergence per token, on mixed data: DistillSpec (arXiv 2310.08461).
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from data.batches import Batch, empty_like
from model.target import TargetEnds
from train import losses
from train.config import TrainConfig
from train.evaluate import chain_sums, likeliest, shifted, target_choices
from train.laws import drafted_law
from train.objectives.causal_lm import chunked_sums, hidden_states, lm_logits
from train.objectives.step import StepOutput, Sums
from train.on_policy import marked

Totals = tuple[Tensor, ...]  # sums of cross-entropy, loss to the laws, correct guesses, alpha, greedy agreement


class DistilledLM(nn.Module):
    """A causal LM whose forward returns sums: its LM head is only whole inside its own forward (ZeRO-3).

    Its laws are over the tokens that both vocabularies have, which differ in length when one of them is padded: the
    logits are cut before the softmax, as they are in drafting.
    """

    def __init__(self, lm: Any, config: TrainConfig, vocab_size: int) -> None:
        """vocab_size is the target's."""
        super().__init__()
        assert config.distill is not None
        self.lm = lm
        self.chunk = config.loss_chunk_slots
        self.loss = losses.loss_named(config.distill, config)
        self.num_rows = int(lm.config.get_text_config().vocab_size)
        self.num_columns = min(vocab_size, self.num_rows)

    @property
    def config(self) -> Any:
        return self.lm.config

    def forward(self, batch: Batch, ends: TargetEnds) -> Totals:
        """Sums over the tokens with a turn, the row's first token excepted."""
        assert batch.features is not None
        slots = batch.turns[:, 1:] != 0  # [B, T-1]
        tokens = batch.input_ids[:, 1:][slots]  # [S]
        known = tokens < self.num_columns  # [S]
        if batch.redrawn is not None:
            known &= ~batch.redrawn[:, 1:][slots]
        states = self.states(batch.input_ids)[slots]  # [S, D]
        goals = batch.features[:, :-1][slots]  # [S, D of the target]
        return chunked_sums(partial(self._sums, ends), [states, tokens, known, goals], self.chunk)

    def states(self, input_ids: Tensor) -> Tensor:
        """The LM's states [B, T-1, D]; a token of the target's padding, which it cannot know, is some other one."""
        return hidden_states(self.lm, input_ids.clamp(max=self.num_rows - 1))

    def logits(self, states: Tensor) -> Tensor:
        """Logits [S, num_columns] of the LM's own states [S, D]."""
        return lm_logits(self.lm, states)[:, : self.num_columns]

    def _sums(self, ends: TargetEnds, states: Tensor, tokens: Tensor, known: Tensor, goals: Tensor) -> Totals:
        target = drafted_law(goals, ends, torch.arange(self.num_columns, device=goals.device))
        log_q = losses.log_law(self.logits(states))  # [S, num_columns]
        told = log_q.gather(1, tokens.clamp(max=self.num_columns - 1)[:, None])[:, 0]  # [S]
        token_loss = -(told * known).sum()
        law_loss = self.loss(log_q, target.law).sum()
        with torch.no_grad():
            drafted = log_q.argmax(-1)
            alpha = losses.acceptance(log_q, target.law.whole).sum()
            return token_loss, law_loss, ((drafted == tokens) & known).sum(), alpha, (drafted == target.choice).sum()


class DraftLMObjective:
    """token_weight times the cross-entropy plus distill_weight times the loss to the laws."""

    score_name = "predicted_tau"

    def __init__(self, ends: TargetEnds, config: TrainConfig) -> None:
        self.ends = ends
        self.config = config
        self.weights = {"cross_entropy": config.token_weight, "distill": config.distill_weight}

    def prepare(self, batch: Batch, epoch: int) -> Batch:
        if batch.features is None and batch.num_tokens == 0:  # a process without rows
            return empty_like(batch, self.ends.embedding.shape[1], self.ends.embedding.dtype)
        return marked(batch, self.config, epoch) if self.config.on_policy else batch

    def divisors(self, batch: Batch) -> dict[str, int]:
        return dict.fromkeys(self.weights, int((batch.turns[:, 1:] != 0).sum()))

    def __call__(self, module: nn.Module, batch: Batch) -> StepOutput:
        token_loss, law_loss, correct, alpha, agreement = module(batch, self.ends)
        count = (batch.turns[:, 1:] != 0).sum()
        terms = {"cross_entropy": token_loss, "distill": law_loss}
        metrics = {"token_accuracy": correct, "alpha": alpha, "greedy_agreement": agreement}
        return StepOutput(
            {name: (self.weights[name], value, count) for name, value in terms.items()},
            {name: (value, count) for name, value in metrics.items()},
        )

    @torch.no_grad()
    def evaluate(self, module: Any, batch: Batch) -> Sums:
        hits, alive = self._chain_hits(module, batch)
        return {**chain_sums(hits, alive), **self(module, batch).sums()}

    def summarise(self, means: dict[str, float]) -> dict[str, float]:
        rest = {name: value for name, value in means.items() if name != "chain"}
        loss = sum(weight * means[name] for name, weight in self.weights.items())
        return {"predicted_tau": 1.0 + means["chain"], "loss": loss, **rest}

    def _chain_hits(self, module: DistilledLM, batch: Batch) -> tuple[Tensor, Tensor]:
        """What train.evaluate.chain_hits returns of a head, over the same slots.

        An LM that has read the conversation's own tokens drafts at depth k what it would draft at depth one k tokens
        on, so one forward answers for all depths.
        """
        assert batch.features is not None
        chunk, width = self.config.loss_chunk_slots, batch.input_ids.shape[1] - 1
        choices = target_choices(batch, lambda states: likeliest(self.ends.logits, states, chunk))  # [B, T]
        asked = shifted(batch.supervised(), -1)  # [B, T]: slot p asks for the law after t_{p+1}
        hit = torch.zeros_like(choices, dtype=torch.float32)  # [B, T]
        if bool(asked.any()):
            drafted = likeliest(module.logits, module.states(batch.input_ids)[asked[:, :-1]], chunk)
            hit[asked] = (drafted == choices[asked]).float()
        depths = range(self.config.eval_depths)
        alive = torch.stack([batch.supervised(k)[:, :width].float() for k in depths])  # [depths, B, T-1]
        return torch.stack([shifted(hit, 1 + k)[:, :width] for k in depths]) * alive, alive
