"""Next-token cross-entropy: how a small LM (the embedded target, a draft LM) is trained from scratch or tuned."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from data.batches import Batch
from model.config import HeadConfig, TargetConfig
from model.errors import UserError
from model.files import directory_atomically
from model.target import Target, final_transform, load_tokenizer
from model.token_ids import require_same_token_ids
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


def new_causal_lm(config: HeadConfig, tokenizer: Any, seed: int, vocab_size: int | None = None) -> Any:
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
