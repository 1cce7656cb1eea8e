"""A run in miniature: a random target of 8 tokens and a random head of every kind, small enough to enumerate.

Written as a user's run is, so that heads are found, loaded and put into their trees by the code that everybody uses.
"""

from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from model.checkpoint import new_head, save_head
from model.config import HeadConfig, HeadKind, TargetConfig
from model.target import Target
from model.vocab import DraftVocabulary

VOCABULARY = 8
AFTER_BLOCKS = (0, 1)
SPREAD = 0.38  # standard deviation of the target's matrices: three or four likely tokens at each place
DRAFT_NOISE = 0.08  # of the draft LM's matrices around the target's
HEAD_NOISE = 0.12  # added to every matrix of a new head, whose laws would be flat, or the target's own


def write_miniature(directory: Path, seed: int = 4, vocabulary: int = VOCABULARY) -> TargetConfig:
    """The target under directory/target, its recipe's section returned, and directory/heads/KIND for every kind.

    An EAGLE-3 head has no word for every third token.
    """
    generator = torch.Generator().manual_seed(seed)
    config = TargetConfig(str(directory / "target"), dtype="float32")
    model = _model(generator, vocabulary)
    draft_ids = torch.tensor([token for token in range(vocabulary) if token % 3 != 2])
    _save(model, directory / "target")
    target = Target(model, config)
    kinds: tuple[HeadKind, ...] = ("eagle1", "eagle3", "medusa", "hydra")
    for kind in kinds:
        three = kind == "eagle3"
        head = new_head(
            HeadConfig(kind=kind, prefix_layer=kind == "hydra"),
            target.config,
            target.ends,
            seed,
            after_blocks=AFTER_BLOCKS if three else (),
            vocabulary=DraftVocabulary.of_ids(draft_ids, vocabulary) if three else None,
        )
        for name, parameter in head.named_parameters():
            if parameter.ndim == 2 and name != "embed_tokens.weight":
                _disturb(parameter.data, HEAD_NOISE, generator)
        save_head(head, directory / "heads" / kind)
    for parameter in model.parameters():
        if parameter.ndim == 2:
            _disturb(parameter.data, DRAFT_NOISE, generator)
    _save(model, directory / "heads" / "draft_lm")
    return config


def _model(generator: torch.Generator, vocabulary: int) -> LlamaForCausalLM:
    """A Llama that never ends."""
    sizes = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=256,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    model = LlamaForCausalLM(sizes).eval()
    for parameter in model.parameters():
        if parameter.ndim == 2:
            parameter.data.normal_(0.0, SPREAD, generator=generator)
    return model


def _disturb(weight: Tensor, noise: float, generator: torch.Generator) -> None:
    weight.add_(torch.randn(weight.shape, generator=generator), alpha=noise)


def _save(model: PreTrainedModel, directory: Path) -> None:
    """The model with a tokenizer whose words are letters."""
    model.save_pretrained(directory)
    letters = Tokenizer(
        models.WordLevel({chr(ord("a") + token): token for token in range(model.config.vocab_size)}, unk_token="a")
    )
    letters.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=letters).save_pretrained(directory)
