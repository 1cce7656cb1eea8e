"""Next-token cross-entropy: how a small LM (the embedded target, a draft LM) is trained from scratch or tuned."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig, LlamaForCausalLM

from data.batches import Batch
from model.config import HeadConfig
from model.errors import UserError
from model.files import directory_atomically
from train import losses
from train.metrics import most_of_all
from train.objectives.step import StepOutput, Sums


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
        """Summed cross-entropy in nats and correct guesses over targets [B, T-1] that are not negative.

        No attention mask: rows are padded on the right, where causal attention never looks.
        """
        hidden = self.lm.get_decoder()(input_ids=input_ids[:, :-1], use_cache=False).last_hidden_state  # [B, T-1, D]
        slots = targets >= 0
        states, tokens = hidden[slots], targets[slots]  # [S, D], [S]
        pieces = list(zip(states.split(self.chunk), tokens.split(self.chunk), strict=True))
        # ZeRO-3 gathers the LM head at each call, so all processes must call it equally often
        missing = most_of_all(len(pieces), states.device) - len(pieces)
        pieces += [(states[:0], tokens[:0])] * missing
        if len(pieces) <= 1:
            return self._sums(states, tokens)
        sums = [checkpoint(self._sums, state, token, use_reentrant=False) for state, token in pieces]
        loss, correct = (torch.stack(column).sum() for column in zip(*sums, strict=True))
        return loss, correct

    def _sums(self, states: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.lm.get_output_embeddings()(states)  # [S, V]
        return losses.cross_entropy(logits, tokens).sum(), (logits.detach().argmax(-1) == tokens).sum()


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


def new_causal_lm(config: HeadConfig, tokenizer: Any, seed: int) -> Any:
    """A Llama with tied embeddings and the tokenizer's vocabulary, or the LM that config.init_from names."""
    if config.init_from is not None:
        try:
            return AutoModelForCausalLM.from_pretrained(config.init_from, dtype=torch.float32)
        except (OSError, ValueError) as error:
            raise UserError(
                f"head.init_from: {config.init_from}: cannot load the LM: {str(error).splitlines()[0]}"
            ) from error
    sizes = LlamaConfig(
        vocab_size=len(tokenizer),
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
