"""Rehearses one training step in miniature, so that a plan accepts only what can be trained."""

from dataclasses import fields, replace
from typing import Any

import torch

from aerie.configs.errors import UserError
from aerie.configs.schema.heads import TrainConfig
from aerie.data.batches import Batch
from aerie.model.checkpoint import config_for
from aerie.model.heads import HEADS, AnyConfig
from aerie.model.storage import first_line
from aerie.model.vocab_weights import VocabWeights
from aerie.train.objectives import Objective

TOKENS, WIDTH, VOCABULARY = 40, 32, 64  # of the miniature's row and head
SMALL_HEAD = {
    "hidden_size": WIDTH,
    "target_hidden_size": WIDTH,
    "intermediate_size": 2 * WIDTH,
    "vocab_size": VOCABULARY,
    "draft_vocab_size": VOCABULARY,
    "mask_token_id": 0,
}


def planned_config(section: Any, text_config: Any, taps: tuple[int, ...]) -> AnyConfig:
    """The configuration that a new head will get, except for its vocabulary."""
    if getattr(section, "mask_token_id", 0) is None:
        section = replace(section, mask_token_id=0)
    embedding = torch.empty(text_config.vocab_size, text_config.hidden_size, device="meta")
    vocab = VocabWeights(embedding, embedding, None, 1.0, None)
    return config_for(section, text_config, vocab, taps, text_config.vocab_size)


def rehearse_head(config: AnyConfig, settings: TrainConfig) -> None:
    """UserError if a head of this form cannot take a training step. The miniature keeps the form
    (heads, layers, taps, RoPE), with small widths and vocabularies."""
    kind = HEADS[settings.kind]
    names = {field.name for field in fields(config)}
    small: dict[str, Any] = {name: size for name, size in SMALL_HEAD.items() if name in names}
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(VOCABULARY, WIDTH, generator=generator)  # [V, D]
    bias = torch.zeros(VOCABULARY) if getattr(config, "lm_head_bias", False) else None
    vocab = VocabWeights(matrix, matrix, bias, 1.0, None)
    # Random weights do, because only whether a step can be taken matters.
    head: Any = kind.module(replace(config, **small))
    head.initialise(vocab, generator)
    rehearse(kind.objective(head, vocab, settings))


def rehearse(objective: Objective) -> None:
    """UserError if the objective cannot take a training step on a row of made-up states."""
    kind = objective.settings.kind
    try:
        output = objective(objective.prepare(_made_up(objective), epoch=0))
        loss = output.total(objective.weights)
        loss.backward()
    # torch raises these for shapes, sizes and indices that do not fit.
    except (RuntimeError, ValueError, TypeError, LookupError) as error:
        raise UserError(
            f"head: a {kind} head of this form cannot take a training step "
            f"({type(error).__name__}: {first_line(error)}); change the keys of section head"
        ) from error
    # A small LM rehearses itself, not a miniature, so its gradients must go.
    objective.zero_grad()
    if not loss.isfinite():
        raise UserError(
            f"head: the loss of a {kind} head of this form is {loss:g}; "
            "change the keys of section head"
        )


def _made_up(objective: Objective) -> Batch:
    """A row of four tokens and one answer, with random states."""
    config = objective.config
    length = min(TOKENS, getattr(config, "max_position_embeddings", TOKENS))
    turn_ids = torch.ones(1, length, dtype=torch.long)  # [1, T]
    turn_ids[:, :4] = 0
    ids = torch.arange(length)[None] % VOCABULARY  # [1, T]
    batch = Batch(ids, turn_ids, torch.tensor([length]), (0,))
    if objective.target is None:  # a small LM that learns from tokens alone
        return batch
    generator = torch.Generator().manual_seed(1)
    width = objective.target.embedding.shape[1]
    taps = len(getattr(config, "after_blocks", ()))
    states = torch.randn(1, length, (1 + taps) * width, generator=generator)  # [1, T, (1 + L) * D]
    return replace(batch, features=states[..., :width], taps=states[..., width:] if taps else None)
