"""Trains a small LM by cross-entropy on tokens or, as a draft LM, on a target's laws too."""

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
from aerie.model.target import Target
from aerie.model.target_files import load_tokenizer, only_trains, require_same_token_ids
from aerie.model.vocab_weights import VocabWeights, final_transform, transformed
from aerie.train import losses
from aerie.train.losses import Piece, SumsAndCounts, argmax_in_chunks
from aerie.train.objectives import Objective, StepOutput, chosen_after, shifted
from aerie.train.workload import Load, MatrixSizes, Work, attention_operations


class LMObjective(Objective):
    """Cross-entropy on tokens, plus a loss to the target's law if there is a target.

    If one of the two vocabularies is padded, the softmax is over the tokens that both have, as in
    drafting.
    """

    def __init__(self, head: Any, target: VocabWeights | None, settings: DraftLMTrain) -> None:
        super().__init__(head, target, settings)
        # Rows of the LM's embedding; columns of the softmax, for tokens that both models have.
        self.num_rows = int(self.config.vocab_size)
        self.num_columns = self.num_rows
        self.weights = {"cross_entropy": settings.token_weight}
        if target is not None:
            self.num_columns = min(len(target.lm_head), self.num_rows)
            self.weights["distill"] = settings.distill_weight
        if settings.gradient_checkpointing:
            head.gradient_checkpointing_enable()

    def counts(self, batch: Batch) -> dict[str, Tensor]:
        return dict.fromkeys(self.weights, (batch.turn_ids[:, 1:] != 0).sum())

    def forward(self, batch: Batch) -> StepOutput:
        # The LM learns all tokens with a turn, except a row's first, which nothing predicts.
        mask = batch.turn_ids[:, 1:] != 0  # [B, T-1]
        tokens = batch.input_ids[:, 1:][mask]  # [S]
        states = self.states(batch.input_ids)[mask]  # [S, D], the LM's
        # The target's states [S, Dt]. Without a target nothing reads them.
        true = states.detach() if self.target is None else batch.features[:, :-1][mask]
        # In pieces, because the logits [S, V] of a whole batch would not fit.
        slots = Piece.of_own_states(true, states, tokens)
        pieces = losses.by_target_state(slots, self.chunk)
        sums = losses.added(list(losses.by_piece(self._sums, pieces)))
        return StepOutput.of_sums(sums, mask.sum(), self.weights)

    def _sums(self, piece: Piece) -> losses.Sums:
        (states,), (tokens,) = piece.columns
        log_q = self.logits(states).float().log_softmax(-1)  # [S, num_columns]
        choice = log_q.detach().argmax(-1)  # [S]
        # The LM cannot learn a token without a column, but it learns the law at its slot.
        is_known = tokens < self.num_columns
        columns = tokens.clamp(max=self.num_columns - 1)[:, None]
        of_text = log_q.gather(1, columns)[:, 0]  # [S]
        sums = {
            "cross_entropy": -(of_text * is_known).sum(),
            "token_accuracy": ((choice == tokens) & is_known).sum(),
        }
        if self.target is None:
            return sums
        # The target's softmax covers all its tokens; those that the LM lacks count as outside mass.
        law, target_choice = losses.drafted_law(
            piece.states, self.target, torch.arange(self.num_columns)
        )
        loss = losses.LOSSES[self.settings.distill](log_q, law, self.settings)  # [S]
        sums["distill"] = loss.sum()
        with torch.no_grad():
            sums["alpha"] = losses.acceptance_rate(log_q, law.whole).sum()
            sums["greedy_agreement"] = (choice == target_choice).sum()
        return sums

    def states(self, input_ids: Tensor) -> Tensor:
        """States [B, T-1, D], which predict the tokens after the first."""
        # An id that the LM lacks is read as its last token. Rows are padded on the right, where
        # causal attention never looks, so there is no mask.
        known_ids = input_ids[:, :-1].clamp(max=self.num_rows - 1)
        output = self.head.get_decoder()(input_ids=known_ids, use_cache=False)
        return cast(Tensor, output.last_hidden_state)

    def logits(self, states: Tensor) -> Tensor:
        """Logits [S, num_columns] of states [S, D], with the LM's own scale and softcap."""
        logits = self.head.get_output_embeddings()(states)
        logits = transformed(logits, *final_transform(self.config))
        return logits[:, : self.num_columns]

    def measure(self, batch: Batch) -> SumsAndCounts:
        return self(batch).sums() if self.target is None else super().measure(batch)

    def draft_greedily(self, batch: Batch) -> Iterator[Tensor]:
        # Along the text's own tokens, the draft at depth k is the first draft k tokens later, so
        # one forward pass gives all depths.
        choose = partial(argmax_in_chunks, self.logits, chunk=self.chunk)
        tokens = chosen_after(batch, self.states(batch.input_ids), choose)  # [B, T]
        for k in range(self.settings.eval_depths):
            yield shifted(tokens, 1 + k)[:, :-1][batch.supervised(k)[:, :-1]]

    def summarise(self, means: dict[str, float]) -> dict[str, float]:
        if "chain" in means:
            return super().summarise(means)
        return {"loss": means["cross_entropy"], "accuracy": means["token_accuracy"]}

    def work(self, load: Load) -> Work:
        lm_head = self.head.get_output_embeddings().weight.numel()
        shared = 0 if self.target is None else self.target.lm_head.numel()
        return Work(
            MatrixSizes.of(self.head).body * load.tokens,
            attention_operations(self.head.config, load.pairs),
            (2 * shared + 6 * lm_head) * load.slots[0],
        )


def new_causal_lm(config: DraftLMSection, tokenizer: Any, seed: int, vocab_size: int) -> Any:
    """A Llama with tied embeddings of vocab_size rows, or the LM of config.init_from; UserError if
    that cannot draft."""
    if config.init_from is not None:
        try:
            return _load_causal_lm(config.init_from, tokenizer)
        except UserError as error:
            raise UserError(f"head.init_from: {error}") from error
    # A small Llama with the section's sizes.
    sizes = as_dict(config)
    del sizes["kind"], sizes["init_from"]
    sizes |= {"rope_theta": config.rope_theta or 10000.0, "vocab_size": vocab_size}
    llama = LlamaConfig(
        **sizes, rms_norm_eps=1e-6, tie_word_embeddings=True, **_special_tokens(tokenizer)
    )
    # transformers draws weights from the global generator; the fork restores it afterwards.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        lm = LlamaForCausalLM(llama)
    # Smaller output matrices keep the scale of the residual stream over the layers (GPT-2).
    for name, parameter in lm.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            parameter.data.mul_((2 * config.num_hidden_layers) ** -0.5)
    return lm


def _load_causal_lm(path: str, tokenizer: Any) -> Any:
    """The LM of a directory or Hub id; UserError if it cannot draft for a target with this
    tokenizer."""
    source = TargetConfig(path, dtype="float32")
    lm: Any = Target.load(source).model  # with the checks of drafting; this also freezes it
    if why := only_trains(lm.config):
        raise UserError(f"{path}: {why}")
    token_ids = load_tokenizer(source).get_vocab()
    num_rows = lm.get_input_embeddings().weight.shape[0]
    require_same_token_ids(token_ids, tokenizer.get_vocab(), num_rows, path, "the target")
    return lm.requires_grad_(True).train()


def _special_tokens(tokenizer: Any) -> dict[str, Any]:
    return {
        name: getattr(tokenizer, name) for name in ("eos_token_id", "pad_token_id", "bos_token_id")
    }


def save_causal_lm(tokenizer: Any, lm: Any, directory: Path, **_: Any) -> None:
    lm.generation_config = GenerationConfig(**_special_tokens(tokenizer))
    lm.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
