"""The objectives of a small LM: next-token cross-entropy alone (the embedded target), or with a target's laws too
(a draft LM), on the target's tokens or on tokens of its own."""

from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from aerie.configs.errors import UserError
from aerie.configs.schema.target_and_head import DraftLMSection, TargetConfig
from aerie.configs.schema.train import DraftLMTrain
from aerie.data.batches import Batch, keyed_generator
from aerie.model import target as targets
from aerie.model.target import Target, VocabWeights, load_tokenizer
from aerie.train import losses
from aerie.train.objectives.base import Objective, StepOutput, Sums, chain_sums, likeliest, shifted, target_choices

KEY = 7001  # tells the draws of on-policy rows from others of the same (seed, epoch, row)


class CausalLMObjective(Objective):
    """Cross-entropy on the tokens with a turn, the row's first token excepted."""

    settings: DraftLMTrain

    def __init__(self, head: Any, target: VocabWeights | None, settings: DraftLMTrain) -> None:
        super().__init__(head, target, settings)
        self.weights = {"cross_entropy": 1.0}
        if settings.gradient_checkpointing:
            head.gradient_checkpointing_enable()

    def counts(self, batch: Batch) -> dict[str, Tensor]:
        return dict.fromkeys(self.weights, (batch.turns[:, 1:] != 0).sum())

    def forward(self, batch: Batch) -> StepOutput:
        slots = batch.turns[:, 1:] != 0  # [B, T-1]
        columns = [self.states(batch.input_ids)[slots], batch.input_ids[:, 1:][slots]]  # [S, D], [S]
        pieces = losses.in_chunks(columns, self.settings.loss_chunk_slots)
        sums = losses.remade(self._token_sums, pieces)
        loss, correct = losses.added([sums(*piece) for piece in pieces])
        count = slots.sum()
        return StepOutput({"cross_entropy": (loss, count)}, {"accuracy": (correct, count)})

    def _token_sums(self, states: Tensor, tokens: Tensor) -> tuple[Tensor, ...]:
        logits = self.logits(states)  # [S, V]
        loss = F.cross_entropy(logits.float(), tokens, reduction="none").sum()
        return loss, (logits.detach().argmax(-1) == tokens).sum()

    def states(self, input_ids: Tensor) -> Tensor:
        """The states [B, T-1, D] from which the tokens after the first are predicted."""
        # No attention mask: rows are padded on the right, where causal attention never looks.
        hidden: Tensor = self.head.get_decoder()(input_ids=input_ids[:, :-1], use_cache=False).last_hidden_state
        return hidden

    def logits(self, states: Tensor) -> Tensor:
        """Logits [S, V] of states [S, D], with the LM's own scale and softcap."""
        return targets.transformed(
            self.head.get_output_embeddings()(states), *targets.final_transform(self.head.config.get_text_config())
        )

    def measure(self, batch: Batch) -> Sums:
        return self(batch).sums()

    def summarise(self, means: dict[str, float]) -> dict[str, float]:
        return {"loss": means["cross_entropy"], "accuracy": means["accuracy"]}


class DraftLMObjective(CausalLMObjective):
    """token_weight times the cross-entropy plus distill_weight times the loss to the target's laws.

    Laws are over the tokens that both vocabularies have, which differ in length when one of them is padded: the logits
    are cut before the softmax, as they are in drafting.
    """

    target: VocabWeights

    def __init__(self, head: Any, target: VocabWeights, settings: DraftLMTrain) -> None:
        super().__init__(head, target, settings)
        self.weights = {"cross_entropy": settings.token_weight, "distill": settings.distill_weight}
        self.num_rows = int(head.config.get_text_config().vocab_size)
        self.num_columns = min(target.lm_head.shape[0], self.num_rows)

    def prepare(self, batch: Batch, epoch: int) -> Batch:
        batch = super().prepare(batch, epoch)
        # A process without rows has nothing to redraw; what it has are features of padding.
        return marked(batch, self.settings, epoch) if self.settings.on_policy and batch.num_tokens else batch

    def forward(self, batch: Batch) -> StepOutput:
        assert batch.features is not None
        slots = batch.turns[:, 1:] != 0  # [B, T-1]
        tokens = batch.input_ids[:, 1:][slots]  # [S]
        known = tokens < self.num_columns  # [S]
        if batch.redrawn is not None:
            known &= ~batch.redrawn[:, 1:][slots]
        columns = [self.states(batch.input_ids)[slots], tokens, known, batch.features[:, :-1][slots]]
        pieces = losses.in_chunks(columns, self.settings.loss_chunk_slots)
        sums = losses.remade(self._law_sums, pieces)
        token_loss, law_loss, correct, alpha, agreement = losses.added([sums(*piece) for piece in pieces])
        count = slots.sum()
        return StepOutput(
            {"cross_entropy": (token_loss, count), "distill": (law_loss, count)},
            {
                "token_accuracy": (correct, count),
                "alpha": (alpha, count),
                "greedy_agreement": (agreement, count),
            },
        )

    def _law_sums(self, states: Tensor, tokens: Tensor, known: Tensor, goals: Tensor) -> tuple[Tensor, ...]:
        """Of S slots: the LM's states [S, D], its tokens, whether they are learnt, and the target's states [S, Dt]."""
        assert self.settings.distill is not None
        law, choice = losses.drafted_law(goals, self.target, torch.arange(self.num_columns, device=goals.device))
        log_q = losses.log_law(self.logits(states))  # [S, num_columns]
        # A token that the LM has no column for cannot be learnt; its law still is.
        told = log_q.gather(1, tokens.clamp(max=self.num_columns - 1)[:, None])[:, 0]  # [S]
        token_loss = -(told * known).sum()
        law_loss = losses.LOSSES[self.settings.distill](log_q, law, self.settings).sum()
        with torch.no_grad():
            drafted = log_q.argmax(-1)
            alpha = losses.acceptance(log_q, law.whole).sum()
            return token_loss, law_loss, ((drafted == tokens) & known).sum(), alpha, (drafted == choice).sum()

    def states(self, input_ids: Tensor) -> Tensor:
        # A token of the target's padding, which the LM cannot know, is read as its last one.
        return super().states(input_ids.clamp(max=self.num_rows - 1))

    def logits(self, states: Tensor) -> Tensor:
        return super().logits(states)[:, : self.num_columns]

    def measure(self, batch: Batch) -> Sums:
        # An LM that has read the conversation's own tokens drafts at depth k what it would draft at depth one k tokens
        # on, so one forward answers for all depths.
        chunk, width = self.settings.loss_chunk_slots, batch.input_ids.shape[1] - 1
        choices = target_choices(batch, lambda states: likeliest(self.target.logits, states, chunk))  # [B, T]
        asked = shifted(batch.supervised(), -1)  # [B, T]: slot p asks for the law after t_{p+1}
        hit = torch.zeros_like(choices, dtype=torch.float32)  # [B, T]
        if bool(asked.any()):
            drafted = likeliest(self.logits, self.states(batch.input_ids)[asked[:, :-1]], chunk)
            hit[asked] = (drafted == choices[asked]).float()
        depths = range(self.settings.eval_depths)
        alive = torch.stack([batch.supervised(k)[:, :width].float() for k in depths])  # [depths, B, T-1]
        hits = torch.stack([shifted(hit, 1 + k)[:, :width] for k in depths]) * alive
        return {**chain_sums(hits, alive), **self(batch).sums()}

    summarise = Objective.summarise


def new_causal_lm(config: DraftLMSection, tokenizer: Any, seed: int, vocab_size: int | None = None) -> Any:
    """A Llama with tied embeddings, or the LM that config.init_from names, which must read the tokenizer's ids.

    vocab_size: rows of the embedding (a target may pad its own); null: as many as the tokenizer has tokens.
    """
    if config.init_from is not None:
        return _warm_start(config.init_from, tokenizer)
    names: tuple[str, ...] = (
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "head_dim",
    )
    names += ("max_position_embeddings", "initializer_range")
    sizes = LlamaConfig(
        **{name: getattr(config, name) for name in names},
        **_special_tokens(tokenizer),
        vocab_size=vocab_size or len(tokenizer),
        num_key_value_heads=config.num_key_value_heads or config.num_attention_heads,
        rope_theta=config.rope_theta or 10000.0,
        rms_norm_eps=1e-6,
        tie_word_embeddings=True,
    )
    # transformers draws from the global generator, which is put back.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        lm = LlamaForCausalLM(sizes)
    for name, parameter in lm.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            parameter.data.mul_((2 * config.num_hidden_layers) ** -0.5)  # the residual stream keeps its scale (GPT-2)
    return lm


def _special_tokens(tokenizer: Any) -> dict[str, Any]:
    return {name: getattr(tokenizer, name) for name in ("eos_token_id", "pad_token_id", "bos_token_id")}


def _warm_start(path: str, tokenizer: Any) -> Any:
    source = TargetConfig(path, dtype="float32")
    try:
        lm = Target.load(source).model  # refuses what drafting with it would refuse, and freezes it
        own = load_tokenizer(source)
    except UserError as error:
        raise UserError(f"head.init_from: {error}") from error
    rows = lm.get_input_embeddings().weight.shape[0]
    targets.require_same_token_ids(
        own.get_vocab(), tokenizer.get_vocab(), rows, f"head.init_from: {path}", "the target"
    )
    return lm.requires_grad_(True).train()


def save_causal_lm(lm: Any, tokenizer: Any, directory: Path) -> None:
    """Writes an ordinary Hugging Face directory: configurations, safetensors, tokenizer."""
    lm.generation_config = GenerationConfig(**_special_tokens(tokenizer))
    lm.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def marked(batch: Batch, settings: DraftLMTrain, epoch: int) -> Batch:
    """The batch with `redrawn` and `seeds` for a share of its rows, and without turns behind what is redrawn.

    A function of (seed, epoch, row) alone.
    """
    redrawn, turns, seeds = torch.zeros_like(batch.turns, dtype=torch.bool), batch.turns.clone(), []  # [B, T] each
    for place, row in enumerate(batch.rows):
        generator = keyed_generator(KEY, settings.seed, epoch, row)
        chosen = float(torch.rand((), generator=generator)) < settings.on_policy
        seeds.append(int(torch.randint(2**62, (), generator=generator)))
        answers = turns[place, 1:].nonzero()[:, 0] + 1  # tokens of answers; the row's first token follows nothing
        if chosen and len(answers):
            # From a random token of an answer on, at most to the end of its turn.
            start = int(answers[int(torch.randint(len(answers), (), generator=generator))])
            last = int((turns[place] == turns[place, start]).nonzero()[-1])
            end = min(start + settings.on_policy_tokens, last + 1)
            redrawn[place, start:end] = True
            turns[place, end:] = 0
    return replace(batch, turns=turns, redrawn=redrawn, seeds=tuple(seeds))


class OnPolicyFeatures:
    """Draws the tokens that a batch asks for, then has the target's states put in."""

    def __init__(self, lm: Any, features: Callable[[Batch], Batch], num_columns: int, end_ids: Collection[int]) -> None:
        """num_columns: tokens that both vocabularies have; end_ids end a turn and are not drawn."""
        self.lm, self.features, self.num_columns = lm, features, num_columns
        self.barred = sorted(token for token in end_ids if token < num_columns)

    def __call__(self, batch: Batch) -> Batch:
        """The batch with its own tokens where nothing is asked for (in evaluation, say)."""
        if batch.redrawn is None or batch.features is not None or not bool(batch.redrawn.any()):
            return self.features(batch)
        if any(hasattr(parameter, "ds_id") for parameter in self.lm.parameters()):
            raise UserError(
                "train.on_policy: ZeRO-3 keeps no whole draft LM to write with; use configs/accelerate/zero2.yaml"
            )
        assert batch.seeds is not None
        ids, was_training = batch.input_ids.clone(), self.lm.training
        self.lm.eval()  # gradient checkpointing would switch the cache off
        for place, seed in enumerate(batch.seeds):
            wanted = batch.redrawn[place].nonzero()[:, 0]
            if len(wanted):
                start, end = int(wanted[0]), int(wanted[-1]) + 1
                ids[place, start:end] = self._drawn(ids[place, :start], end - start, seed)
        self.lm.train(was_training)
        return self.features(replace(batch, input_ids=ids))

    @torch.no_grad()
    def _drawn(self, prefix: Tensor, count: int, seed: int) -> Tensor:
        """Tokens [count] after the prefix [T] from the LM's law at temperature 1."""
        # The row's own generator, so that neighbours and restarts cannot move what is drawn.
        generator = torch.Generator(prefix.device).manual_seed(seed)
        rows = int(self.lm.config.get_text_config().vocab_size)
        ahead, cache, tokens = prefix.clamp(max=rows - 1)[None], None, []
        for _ in range(count):
            out = self.lm(input_ids=ahead, past_key_values=cache, use_cache=True, logits_to_keep=1)
            logits = out.logits[0, -1, : self.num_columns].float()  # [V]
            # An answer that ended early would leave nothing to learn behind it.
            logits[self.barred] = float("-inf")
            ahead, cache = torch.multinomial(logits.softmax(-1), 1, generator=generator)[None], out.past_key_values
            tokens.append(ahead[0])
        return torch.cat(tokens)
