"""Next-token cross-entropy: how a small LM (the embedded target, a draft LM) is trained from scratch or tuned."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from aerie.configs.errors import UserError
from aerie.configs.schema.target_and_head import DraftLMSection, TargetConfig
from aerie.configs.schema.train import TrainConfig
from aerie.data.batches import Batch, empty_like, keyed_generator
from aerie.model.storage import directory_atomically
from aerie.model.target import Target, TargetEnds, final_transform, load_tokenizer, require_same_token_ids
from aerie.train import losses
from aerie.train.evaluate import chain_sums, likeliest, shifted, target_choices
from aerie.train.log import most_of_all
from aerie.train.losses import drafted_law
from aerie.train.objectives.step import StepOutput, Sums


class CausalLM(nn.Module):
    """A causal LM whose forward returns loss sums: its LM head is only whole inside its own forward (ZeRO-3)."""

    def __init__(self, lm: Any, chunk: int) -> None:
        super().__init__()
        self.lm = lm
        self.chunk = chunk

    @property
    def config(self) -> Any:
        return self.lm.config

    def forward(self, input_ids: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Summed cross-entropy in nats and correct guesses over targets [B, T-1] that are not negative."""
        slots = targets >= 0
        columns = [hidden_states(self.lm, input_ids)[slots], targets[slots]]  # [S, D], [S]
        loss, correct = chunked_sums(self._sums, columns, self.chunk)
        return loss, correct

    def _sums(self, states: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        logits = lm_logits(self.lm, states)  # [S, V]
        return losses.cross_entropy(logits, tokens).sum(), (logits.detach().argmax(-1) == tokens).sum()


def hidden_states(lm: Any, input_ids: Tensor) -> Tensor:
    """The states [B, T-1, D] from which the tokens after the first are predicted.

    No attention mask: rows are padded on the right, where causal attention never looks.
    """
    hidden: Tensor = lm.get_decoder()(input_ids=input_ids[:, :-1], use_cache=False).last_hidden_state
    return hidden


def lm_logits(lm: Any, states: Tensor) -> Tensor:
    """Logits [S, V] of states [S, D], with the LM's own scale and softcap."""
    logits: Tensor = lm.get_output_embeddings()(states)
    scale, softcap = final_transform(lm.config.get_text_config())
    if scale != 1.0:
        logits = logits * scale
    return logits if softcap is None else torch.tanh(logits / softcap) * softcap


def chunked_sums(sums: Callable[..., tuple[Tensor, ...]], columns: Sequence[Tensor], chunk: int) -> tuple[Tensor, ...]:
    """What `sums` adds up over the slots of all columns [S, ...], whose logits are held for `chunk` slots at a time."""
    pieces = list(zip(*(column.split(chunk) for column in columns), strict=True))
    # ZeRO-3 gathers the LM head at each call, so all processes must call it equally often
    missing = most_of_all(len(pieces), columns[0].device) - len(pieces)
    pieces += [tuple(column[:0] for column in columns)] * missing
    if len(pieces) <= 1:
        return sums(*columns)
    found = [checkpoint(sums, *piece, use_reentrant=False) for piece in pieces]
    return tuple(torch.stack(column).sum() for column in zip(*found, strict=True))


class CausalLMObjective:
    """Cross-entropy on the tokens with a turn, the row's first token excepted."""

    score_name = "-loss"

    def prepare(self, batch: Batch, epoch: int) -> Batch:
        return batch

    def divisors(self, batch: Batch) -> dict[str, int]:
        return {"cross_entropy": int((batch.turns[:, 1:] != 0).sum())}

    def __call__(self, module: nn.Module, batch: Batch) -> StepOutput:
        asked = batch.turns[:, 1:] != 0  # [B, T-1]
        targets = batch.input_ids[:, 1:].masked_fill(~asked, -1)  # [B, T-1]
        loss, correct = module(batch.input_ids, targets)
        count = asked.sum()
        return StepOutput({"cross_entropy": (1.0, loss, count)}, {"accuracy": (correct, count)})

    @torch.no_grad()
    def evaluate(self, module: Any, batch: Batch) -> Sums:
        return self(module, batch).sums()

    def summarise(self, means: dict[str, float]) -> dict[str, float]:
        return {"loss": means["cross_entropy"], "accuracy": means["accuracy"]}


def new_causal_lm(config: DraftLMSection, tokenizer: Any, seed: int, vocab_size: int | None = None) -> Any:
    """A Llama with tied embeddings, or the LM that config.init_from names, which must read the tokenizer's ids.

    vocab_size: rows of the embedding (a target may pad its own); null: as many as the tokenizer has tokens.
    """
    if config.init_from is not None:
        return _warm_start(config.init_from, tokenizer)
    sizes = LlamaConfig(
        vocab_size=vocab_size or len(tokenizer),
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_hidden_layers,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_key_value_heads or config.num_attention_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.max_position_embeddings,
        rope_theta=config.rope_theta or 10000.0,
        rms_norm_eps=1e-6,
        initializer_range=config.initializer_range,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        lm = LlamaForCausalLM(sizes)
    for name, parameter in lm.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            parameter.data.mul_((2 * config.num_hidden_layers) ** -0.5)  # the residual stream keeps its scale (GPT-2)
    return lm


def _warm_start(path: str, tokenizer: Any) -> Any:
    source = TargetConfig(path, dtype="float32")
    try:
        lm = Target.load(source).model  # refuses what drafting with it would refuse, and freezes it
        own = load_tokenizer(source)
    except UserError as error:
        raise UserError(f"head.init_from: {error}") from error
    rows = lm.get_input_embeddings().weight.shape[0]
    require_same_token_ids(own.get_vocab(), tokenizer.get_vocab(), rows, f"head.init_from: {path}", "the target")
    return lm.requires_grad_(True).train()


def save_causal_lm(lm: Any, tokenizer: Any, directory: Path) -> None:
    """Writes an ordinary Hugging Face directory (configurations, safetensors, tokenizer), whole or not at all."""
    lm.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, bos_token_id=tokenizer.bos_token_id
    )
    with directory_atomically(directory) as temporary:
        lm.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
        for path in temporary.iterdir():
            path.chmod(0o644)  # safetensors writes mode 0600


KEY = 7001  # tells these draws from others of the same (seed, epoch, row)


def marked(batch: Batch, config: TrainConfig, epoch: int) -> Batch:
    """The batch with `redrawn` and `seeds` for a share of its rows, and without turns behind what is redrawn.

    A function of (seed, epoch, row) alone.
    """
    redrawn, turns = torch.zeros_like(batch.turns, dtype=torch.bool), batch.turns.clone()  # [B, T]
    seeds = []
    for place, row in enumerate(batch.rows):
        generator = keyed_generator(KEY, config.seed, epoch, row)
        chosen = float(torch.rand((), generator=generator)) < config.on_policy
        seeds.append(int(torch.randint(2**62, (), generator=generator)))
        window = _window(turns[place], config.on_policy_tokens, generator) if chosen else None
        if window is not None:
            start, end = window
            redrawn[place, start:end] = True
            turns[place, end:] = 0
    return replace(batch, turns=turns, redrawn=redrawn, seeds=tuple(seeds))


def _window(turns: Tensor, longest: int, generator: torch.Generator) -> tuple[int, int] | None:
    """(start, end) of tokens of one turn of a row [T], end exclusive; None where nothing can be drawn."""
    places = turns[1:].nonzero()[:, 0] + 1  # the row's first token follows nothing
    if not len(places):
        return None
    start = int(places[int(torch.randint(len(places), (), generator=generator))])
    last = int((turns == turns[start]).nonzero()[-1])
    return start, min(start + longest, last + 1)


class OnPolicySupply:
    """Draws the tokens that a batch asks for, then has the target's states put in."""

    def __init__(self, lm: Any, supply: Callable[[Batch], Batch], num_columns: int, end_ids: Collection[int]) -> None:
        """num_columns: tokens that both vocabularies have; end_ids end a turn and are not drawn."""
        self.lm, self.supply, self.num_columns = lm, supply, num_columns
        self.barred = sorted(token for token in end_ids if token < num_columns)

    def __call__(self, batch: Batch) -> Batch:
        """The batch with its own tokens where nothing is asked for (in evaluation, say)."""
        if batch.redrawn is None or batch.features is not None or not bool(batch.redrawn.any()):
            return self.supply(batch)
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
        return self.supply(replace(batch, input_ids=ids))

    @torch.no_grad()
    def _drawn(self, prefix: Tensor, count: int, seed: int) -> Tensor:
        """Tokens [count] after the prefix [T] from the LM's law at temperature 1."""
        generator = torch.Generator(prefix.device).manual_seed(seed)
        rows = int(self.lm.config.get_text_config().vocab_size)
        ahead, cache, tokens = prefix.clamp(max=rows - 1)[None], None, []
        for _ in range(count):
            out = self.lm(input_ids=ahead, past_key_values=cache, use_cache=True, logits_to_keep=1)
            logits = out.logits[0, -1, : self.num_columns].float()  # [V]
            logits[self.barred] = float("-inf")
            ahead, cache = torch.multinomial(logits.softmax(-1), 1, generator=generator)[None], out.past_key_values
            tokens.append(ahead[0])
        return torch.cat(tokens)


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
