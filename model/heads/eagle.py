"""The heads of EAGLE-1 (and EAGLE-2) and EAGLE-3, and EAGLE-3's draft vocabulary."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from aerie.configs.errors import UserError
from aerie.model.kv_cache import KeyValueCache
from aerie.model.layers import DecoderLayer, HeadLayer, Memory, Rotary
from aerie.model.vocab_weights import VocabWeights

EMBEDDING = "embed_tokens.weight"
TAP_CONVENTION = "hidden_states"  # of transformers: entry 0 is the embedding
DEFAULT_SIZE = 32_000  # of published draft vocabularies
Counts = NDArray[np.int64]


@dataclass(frozen=True)
class DraftVocabulary:
    """The Vd of V target tokens that an EAGLE-3 head drafts; draft ids ascend with target ids."""

    d2t: Tensor  # [Vd] int64, offsets: target id = draft id + d2t[draft id]
    t2d: Tensor  # [V] bool, whether each target id is in

    @classmethod
    def of_ids(cls, ids: Tensor, vocab_size: int) -> "DraftVocabulary":
        """ids [Vd]: distinct target ids in any order."""
        ordered = ids.long().sort().values
        t2d = torch.zeros(vocab_size, dtype=torch.bool)
        t2d[ordered] = True
        return cls(ordered - torch.arange(len(ordered)), t2d)

    @classmethod
    def of_tables(cls, d2t: Tensor, t2d: Tensor, path: str) -> "DraftVocabulary":
        """The vocabulary of a head's file at path; UserError if the tables do not agree."""
        if not d2t.ndim == t2d.ndim == 1 or (d2t.long() != d2t).any() or (t2d.bool() != t2d).any():
            raise UserError(
                f"{path}: d2t must be a list of integer offsets, and t2d a list of booleans"
            )
        vocabulary = cls(d2t.long(), t2d.bool())
        if not t2d.nonzero().flatten().equal(vocabulary.ids):
            raise UserError(
                f"{path}: d2t and t2d name different tokens; "
                "d2t must hold offsets (target id - draft id)"
            )
        return vocabulary

    @classmethod
    def most_frequent(
        cls, counts: Counts, size: int, forced: Collection[int] = ()
    ) -> "DraftVocabulary":
        """The forced ids, then the most frequent by counts [V]; of equal counts, the smaller id."""
        check_size(size, len(counts))
        if len(set(forced)) > size:
            raise UserError(
                f"head.draft_vocab_size: {size:,} has no room for "
                f"{len(set(forced)):,} special tokens"
            )
        # forced ids rank before all others
        rank = counts.astype(np.int64, copy=True)
        rank[list(forced)] = np.iinfo(np.int64).max
        return cls.of_ids(torch.from_numpy(np.argsort(-rank, kind="stable")[:size]), len(counts))

    @property
    def size(self) -> int:
        return len(self.d2t)

    @property
    def ids(self) -> Tensor:
        """The target ids [Vd], ascending."""
        return self.target_ids(torch.arange(self.size, device=self.d2t.device))

    def target_ids(self, draft_ids: Tensor) -> Tensor:
        return draft_ids + self.d2t[draft_ids]

    def coverage(self, counts: Counts) -> float:
        """The share of the counted tokens, counts [V], that are in the vocabulary."""
        total = int(counts.sum())
        return int(counts[self.t2d.cpu().numpy()].sum()) / total if total else 1.0

    def check_ends(self, end_ids: Collection[int], path: str) -> None:
        """UserError if none of the target's end_ids is in, so that no draft could end a turn."""
        known = sorted(number for number in end_ids if 0 <= number < len(self.t2d))
        if known and not self.t2d[known].any():
            raise UserError(
                f"{path}: none of the target's end-of-turn tokens {known} "
                "is in the draft vocabulary, so no draft can end a turn"
            )


def check_size(size: int | None, vocab_size: int) -> None:
    if size is not None and size > vocab_size:
        raise UserError(
            f"head.draft_vocab_size: {size:,} is larger than "
            f"the target's vocabulary of {vocab_size:,}"
        )


@dataclass(frozen=True, kw_only=True)
class LayerConfig:
    """The sizes of decoder layers in config.json, with Llama's keys."""

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    num_hidden_layers: int
    vocab_size: int  # the target's
    rms_norm_eps: float
    max_position_embeddings: int
    rope_theta: float
    rope_scaling: dict[str, Any] | None = None
    hidden_act: str = "silu"


@dataclass(frozen=True, kw_only=True)
class Eagle1Config(LayerConfig):
    """config.json, with the published keys."""

    bias: bool = False  # whether fc has one
    qkv_bias: bool = False
    tie_word_embeddings: bool = False
    model_type: str = "llama"


@dataclass(frozen=True, kw_only=True)
class Eagle3Config(LayerConfig):
    """config.json, with the published keys."""

    draft_vocab_size: int
    target_hidden_size: int
    after_blocks: tuple[int, ...]
    qk_norm: bool = False  # Qwen3's flavour
    fc_norm: bool = False  # EAGLE-3.1: an RMSNorm for each tap before fc
    norm_output: bool = False  # EAGLE-3.1: the normed output is fed back
    norm_before_residual: bool = False  # the first layer's residual is the normed feature
    norm_before_fc: bool = False  # one RMSNorm over all the taps before fc
    tie_word_embeddings: bool = False


class EagleHead(nn.Module):
    """What EAGLE heads share. Slot p holds the feature of t_p and the token t_{p+1}."""

    kind: str
    blocks: list[DecoderLayer]  # all layers in order
    gradient_checkpointing = False  # recompute each layer in the backward pass

    def __init__(self, config: Eagle1Config | Eagle3Config, shares_embedding: bool = True) -> None:
        super().__init__()
        self.config: Any = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.embed_tokens.weight.requires_grad_(not shares_embedding)
        self.shares_embedding = shares_embedding  # with the target; then it is frozen
        # also set if a loaded head's file holds another embedding than the target's
        self.saves_embedding = not shares_embedding
        self.rotary = Rotary(config)

    def enter(self, tokens: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        """The first layer's hidden states and the embeddings, both [B, T, D]."""
        return features, self.embed_tokens(tokens).to(features.dtype)

    def leave(self, x: Tensor) -> Tensor:
        """The feature to feed back [B, T, D], from the last layer's output."""
        return x

    def initialise(
        self, vocab: VocabWeights, generator: torch.Generator, initializer_range: float = 0.02
    ) -> None:
        """Draws normal matrices, zeroes biases, and copies a shared embedding from the target."""
        for name, parameter in self.named_parameters():
            if name == EMBEDDING and self.shares_embedding:
                parameter.data.copy_(vocab.embedding)
            elif parameter.ndim == 2:
                nn.init.normal_(parameter, 0.0, initializer_range, generator)
            elif name.endswith("bias"):
                parameter.data.zero_()

    def start_from_target(self, section: Any, vocab: VocabWeights, path: str) -> None:
        """Takes those weights of the target with which the recipe lets the head start.

        path: the target's name, for errors.
        """

    def forward(
        self, tokens: Tensor, features: Tensor, positions: Tensor, memories: Sequence[Memory] = ()
    ) -> Tensor:
        """Outputs [B, T, D] of tokens [B, T], features [B, T, D] and positions [B, T].

        With memories, this is one step of the parallel unroll: each slot's chain takes its next
        token.
        """
        x, embedded = self.enter(tokens, features)
        # Later unroll steps may stand beyond the row's end.
        length = self.config.max_position_embeddings if memories else tokens.shape[1]
        rope = self.rotary.at(positions, length, x)
        each_memory = memories or [None] * len(self.blocks)
        for layer, memory in zip(self.blocks, each_memory, strict=True):
            # A memory collects keys, so a layer with one must not run twice.
            if self.gradient_checkpointing and self.training and memory is None:
                x = checkpoint(layer, x, embedded, rope, use_reentrant=False)
            else:
                x = layer(x, embedded, rope, memory=memory)
        return self.leave(x)


class EagleForward:
    """A head's forward for decoding with a cache; make it after the head is on its device.

    It holds tensors, because look-ups in modules are slow.
    """

    def __init__(self, head: EagleHead) -> None:
        self._embedding = head.embed_tokens.weight
        self._leave = head.leave
        # EAGLE-1 joins embedding and feature here; EAGLE-3's fc is in `fuse`
        self._fc = (head.fc.weight, head.fc.bias) if isinstance(head, Eagle1Head) else None
        self._layers = [HeadLayer(layer) for layer in head.blocks]

    def __call__(
        self, tokens: Tensor, features: Tensor, rope: Tensor, mask: Tensor, cache: KeyValueCache
    ) -> Tensor:
        """Outputs [n, D] of tokens [n] and features [n, D].

        rope [2, n or 1, hd]: cosines and sines. mask: as in HeadLayer.
        """
        embedded = F.embedding(tokens, self._embedding).to(features.dtype)
        x = features
        if self._fc is not None:
            x = F.linear(torch.cat([embedded, features], dim=-1), *self._fc)  # [n, D]
        for number, layer in enumerate(self._layers):
            x = layer(x, embedded, (rope[0], rope[1]), mask, (cache, number))
        return self._leave(x)


class Eagle1Head(EagleHead):
    """Predicts the feature of t_{p+1} from fc([embedding of t_{p+1}; feature of t_p]).

    Here a feature is the target's state after the final norm, so the target's LM head turns it into
    a law for t_{p+2} (arXiv 2401.15077, section 4.1).
    """

    kind = "eagle1"

    def __init__(self, config: Eagle1Config) -> None:
        super().__init__(config)
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=config.bias)
        others = (DecoderLayer(config) for _ in range(config.num_hidden_layers - 1))
        self.layers = nn.ModuleList([DecoderLayer(config, reads="raw"), *others])
        self.blocks = cast(list[DecoderLayer], list(self.layers))

    def enter(self, tokens: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        embedded = self.embed_tokens(tokens).to(features.dtype)
        return self.fc(torch.cat([embedded, features], dim=-1)), embedded


def pass_on_highest_tap(fc: nn.Linear, scale: Any = 1.0) -> None:
    """Sets fc [D, L*D] so that it gives `scale` times the highest tap."""
    fc.weight.data.zero_()[:, -fc.out_features :] = scale * torch.eye(fc.out_features)


class LMHead(nn.Linear):
    """Logits [..., Vd] of states [..., D]; with is_law, the mean rows p W [S, D] of laws p [S, Vd].

    Both are calls of the module, because only during these does ZeRO-3 gather W.
    """

    def forward(self, x: Tensor, is_law: bool = False) -> Tensor:
        return F.linear(x.to(self.weight.dtype), self.weight.T) if is_law else super().forward(x)


class Eagle3Head(EagleHead):
    """fc over the taps, a double-width layer, plain layers, and an LM head of its own.

    The LM head covers the draft vocabulary (arXiv 2503.01840, section 3). A head of another width
    than the target's trains and saves an embedding of its own.
    """

    kind = "eagle3"
    d2t: Tensor
    t2d: Tensor

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__(config, shares_embedding=config.target_hidden_size == config.hidden_size)
        width, eps = config.hidden_size, config.rms_norm_eps
        taps_width = len(config.after_blocks) * config.target_hidden_size
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(
                nn.RMSNorm(config.target_hidden_size, eps) for _ in config.after_blocks
            )
        if config.norm_before_fc:
            self.input_norm = nn.RMSNorm(taps_width, eps)
        self.fc = nn.Linear(taps_width, width, bias=False)
        self.midlayer = DecoderLayer(config, "pair", config.norm_before_residual)
        others = [DecoderLayer(config) for _ in range(config.num_hidden_layers - 1)]
        # a plain list: the published names of these layers are `midlayer` and `layers`
        self.blocks = [self.midlayer, *others]
        if others:
            self.layers = nn.ModuleList(others)
        self.norm = nn.RMSNorm(width, eps)
        self.lm_head = LMHead(width, config.draft_vocab_size, bias=False)
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.long))
        self.register_buffer("t2d", torch.ones(config.vocab_size, dtype=torch.bool))

    @property
    def vocabulary(self) -> DraftVocabulary:
        return DraftVocabulary(self.d2t, self.t2d)

    def start_from_target(self, section: Any, vocab: VocabWeights, path: str) -> None:
        starts = {
            "lm_head": "frozen",
            "lm_head_init": "target",
            "norm_init": "target",
            "fc_init": "highest_tap",
        }
        taken = [name for name, value in starts.items() if getattr(section, name) == value]
        width = self.config.hidden_size
        target_width = vocab.lm_head.shape[1]
        if taken and width != target_width:
            raise UserError(
                f"head.{taken[0]}: {path} is {target_width:,} wide, the head {width:,}; "
                f"leave head.hidden_size or head.{taken[0]} out"
            )
        if "lm_head" in taken or "lm_head_init" in taken:
            rows = vocab.lm_head[self.vocabulary.ids.to(vocab.lm_head.device)]  # [Vd, D]
            self.lm_head.weight.data.copy_(rows)
        self.lm_head.requires_grad_("lm_head" not in taken)
        if "norm_init" in taken:
            assert vocab.final_norm is not None
            self.norm.weight.data.copy_(vocab.final_norm)
        if "fc_init" in taken:
            # Normed taps get the size of the normed outputs that are fed back.
            is_normed = section.fc_norm and section.norm_output
            size = self.norm.weight.data.square().mean().sqrt()
            pass_on_highest_tap(self.fc, size if is_normed else 1.0)

    def fuse(self, taps: Tensor) -> Tensor:
        """Features [..., D], fused from the target's taps [..., L*Dt], low to high."""
        taps = taps.to(self.fc.weight.dtype)
        if self.config.fc_norm:
            pieces = taps.split(self.config.target_hidden_size, dim=-1)
            normed = [norm(piece) for norm, piece in zip(self.fc_norm, pieces, strict=True)]
            taps = torch.cat(normed, dim=-1)
        if self.config.norm_before_fc:
            taps = self.input_norm(taps)
        return self.fc(taps)

    def normed(self, hidden: Tensor) -> Tensor:
        """The LM head's input, from outputs [..., D]."""
        return hidden if self.config.norm_output else self.norm(hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [..., Vd] of outputs [..., D]."""
        return self.lm_head(self.normed(hidden))

    def leave(self, x: Tensor) -> Tensor:
        return self.norm(x) if self.config.norm_output else x
