"""How heads and small LMs draft: EAGLE, Medusa, Hydra, block heads, a draft LM.

All of them keep the contract of `Drafter` (roles.py):

    reset    begins a prompt; it makes new caches only if the old ones have no room
    commit   reads known tokens, and the target's feature before each: first the prompt, then in
             each cycle the accepted tokens and the bonus token, which is the next root
    start    begins a tree; it gives the distribution of the root's children
    step     gives the distributions of the children of some nodes of the level before

A captured cycle replays these calls as CUDA graphs. So a call copies the state that it leaves for
the next call into the tensor that held the old state, and it reads no number of a tensor on the
host. Only the draft LM does, and its calls are not captured.
"""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from aerie.configs.schema.heads import DType, TargetConfig
from aerie.infer.decode.check import checked_lm
from aerie.infer.decode.roles import UNBOUNDED, Drafter
from aerie.model.heads.block import BlockForward, BlockHead
from aerie.model.heads.eagle import Eagle1Head, Eagle3Head, EagleForward
from aerie.model.hub import head_directory, require_whole_weights
from aerie.model.kv_cache import KeptRows, KeyValueCache
from aerie.model.target import Target
from aerie.model.target_files import context_of, load_tokenizer, require_same_token_ids


class LayeredDrafter(Drafter):
    """A head of decoder layers, with a cache of their keys and values."""

    def __init__(self, head: Any) -> None:
        self.head = head
        self.max_positions = head.config.max_position_embeddings
        weight = head.fc.weight
        # the cache of the text that `reset` began
        self._cache = KeyValueCache({}, KeptRows(0, weight.device, weight.dtype))

    def reset(self, prompt: Tensor, kept: KeptRows, slots: int) -> None:
        if self._cache.kept is kept:
            return
        weight = self.head.fc.weight
        config = self.head.config
        self._cache = KeyValueCache.empty(config.num_hidden_layers, config, kept, weight)
        # tabulated once for all positions: a captured cycle must not read the text's length
        rotary = self.head.rotary.table(len(kept.positions), weight)
        self._rotary = torch.stack(rotary)  # [2, positions, head_dim] cosines and sines


class EagleDrafter(LayeredDrafter):
    """An EAGLE head. Slot p holds the feature of t_p and the token t_{p+1}.

    Its output stands for the feature of t_{p+1}, and gives the distribution of t_{p+2}. The
    target's features of drafted tokens are not known yet, so a drafted slot takes its parent's
    output.
    """

    def __init__(self, head: Eagle1Head | Eagle3Head, target: Target) -> None:
        super().__init__(head)
        self._forward = EagleForward(head)
        # from the head's outputs [n, D]; `papers.analysis.Features` wraps this attribute
        self.logits: Callable[[Tensor], Tensor] = target.logits
        self.forwards = ((self, "_forward"), (self, "_log_q"))
        if isinstance(head, Eagle3Head):
            self.after_blocks = head.config.after_blocks
            # EAGLE-3 has an LM head of its own, over the draft vocabulary
            self.logits = head.logits
            self._fuse = head.fuse
            self.forwards += ((self, "_fuse"),)
            self.ids = head.vocabulary.ids
        self._last = torch.empty(0)  # [1, D] the head's output at the last committed slot

    def reset(self, prompt: Tensor, kept: KeptRows, slots: int) -> None:
        super().reset(prompt, kept, slots)
        self._slots = slots

    def commit(self, tokens: Tensor, features: Tensor, last: Tensor | None = None) -> None:
        if self.after_blocks:
            features = self._fuse(features)  # [n, D]
        # Drafted slots hold the head's own outputs, so none outlives its cycle.
        self._cache.pending = 0
        positions = self._cache.begin(tokens.shape[0])
        mask = causal_mask(features, self._cache)
        rotary = self._rotary.index_select(1, positions)
        outputs = self._forward(tokens, features, rotary, mask, self._cache)  # [n, D]
        # The next draft starts from this output alone.
        self._last = keep_last(self._last, outputs, last)

    def start(self) -> Tensor:
        kept = self._cache.kept
        self._cache.pending = 0  # number of drafted slots
        self._level = 0
        self._outputs = self._last  # [rows of the last call, D]
        # additive [1, 1, rows of the last call, W]; the root's row sees the committed slots
        width = kept.visible.shape[0] + self._slots
        self._mask = kept.mask[None, None, None, :width]
        self._rotary_ahead = self._rotary.index_select(1, kept.free[: self._slots])  # by level
        return self._log_q()

    def step(self, tokens: Tensor, parents: Tensor) -> Tensor:
        positions = self._cache.begin(tokens.shape[0])
        # A drafted slot sees all committed slots, the drafted slots that its parent saw, and
        # itself.
        self._mask = rows_at(self._mask, 2, parents)
        self._mask = self._mask.scatter(3, positions.view(1, 1, -1, 1), 0.0)
        mask = self._mask.narrow(3, 0, self._cache.width)
        features = rows_at(self._outputs, 0, parents)  # [n, D]
        # All slots of a level are rotated alike: they stand at one position of the text.
        rotary = self._rotary_ahead.narrow(1, self._level, 1)
        self._outputs = self._forward(tokens, features, rotary, mask, self._cache)
        self._cache.pending += tokens.shape[0]
        self._level += 1
        return self._log_q()

    def _log_q(self) -> Tensor:
        return self.logits(self._outputs).float().log_softmax(-1)


def rows_at(x: Tensor, dim: int, indices: Tensor) -> Tensor:
    """x's rows at these indices; a view, without a copy, if x has only one row."""
    if x.shape[dim] > 1:
        return x.index_select(dim, indices)
    sizes = [-1] * x.ndim
    sizes[dim] = len(indices)
    return x.expand(sizes)


def keep_last(state: Tensor, rows: Tensor, last: Tensor | None) -> Tensor:
    """The last row [1, D], or the one at `last` [1]; copied into `state` if it fits there."""
    row = rows[-1:] if last is None else rows.index_select(0, last)
    return state.copy_(row) if state.shape == row.shape else row.clone()


def causal_mask(features: Tensor, cache: KeyValueCache) -> Tensor:
    """The additive mask [1, 1, n, W]: a new row sees all rows up to itself."""
    seen = cache.kept.positions[: cache.width] <= cache.written_at[:, None]
    return torch.where(seen, 0.0, float("-inf")).to(features.dtype)[None, None]


class MedusaDrafter(Drafter):
    """A Medusa head: one forward gives the distributions of all levels, one for each level."""

    forwards_per_tree = 1

    def __init__(self, head: Any, target: Target | None = None) -> None:
        self.head = head
        self.max_levels = head.config.num_heads
        self.forwards = ((head, "forward"),)
        self._feature = torch.empty(0)  # [1, D] the target's feature before the root

    def commit(self, tokens: Tensor, features: Tensor, last: Tensor | None = None) -> None:
        self._feature = keep_last(self._feature, features, last)

    def start(self) -> Tensor:
        self._level = 0
        # all levels at once; `step` only looks them up
        self._log_q = self.head(self._feature).float().log_softmax(-1)  # [num_heads, 1, V]
        return self._log_q[0]

    def step(self, tokens: Tensor, parents: Tensor) -> Tensor:
        self._level += 1
        return self._log_q[self._level].expand(tokens.shape[0], -1)  # [n, V]


class HydraDrafter(Drafter):
    """A Hydra head: the distribution of level k depends on a state and the path's k tokens.

    The state is the target's feature before the root, or the prefix layer's output there (Hydra++).
    """

    def __init__(self, head: Any, target: Target) -> None:
        self.head = head
        self.max_levels = head.config.num_heads
        self.forwards = ((head, "step"),)
        if head.config.prefix_layer:
            self.max_positions = head.config.max_position_embeddings
            self.forwards += ((head, "prefix"),)
        # A target that spans several devices may have its embedding elsewhere.
        self._embedding = target.vocab.embedding.to(target.device)
        self._cache: KeyValueCache | None = None  # of the prefix layer
        self._state = torch.empty(0)  # [1, D]
        self._root = torch.empty(0)  # [1, D] the root's embedding

    def reset(self, prompt: Tensor, kept: KeptRows, slots: int) -> None:
        is_new = self._cache is None or self._cache.kept is not kept
        if self.head.config.prefix_layer and is_new:
            self._cache = KeyValueCache.empty(1, self.head.config, kept, self._embedding)

    def commit(self, tokens: Tensor, features: Tensor, last: Tensor | None = None) -> None:
        if self._cache is not None:
            positions = self._cache.begin(tokens.shape[0])
            mask = causal_mask(features, self._cache)
            features = self.head.prefix(features[None], positions, mask, self._cache)[0]  # [n, D]
        self._state = keep_last(self._state, features, last)
        self._root = keep_last(self._root, F.embedding(tokens, self._embedding), last)

    def start(self) -> Tensor:
        self._level = 0
        self._paths = self._root  # [rows of the last call, (level + 1) * D] embeddings, root first
        return self._log_q()

    def step(self, tokens: Tensor, parents: Tensor) -> Tensor:
        self._level += 1
        # A node's path is its parent's path and its own token.
        above = self._paths.index_select(0, parents)
        self._paths = torch.cat([above, F.embedding(tokens, self._embedding)], dim=1)
        return self._log_q()

    def _log_q(self) -> Tensor:
        state = self._state.expand(self._paths.shape[0], -1)
        return self.head.step(self._level, state, self._paths).float().log_softmax(-1)


class BlockDrafter(LayeredDrafter):
    """A block head: one forward gives the logits of all levels, which each node's path corrects."""

    forwards_per_tree = 1

    def __init__(self, head: BlockHead, target: Target) -> None:
        super().__init__(head)
        config = head.config
        self._forward = BlockForward(head)
        self._target_logits = target.logits
        self._fuse = head.fuse
        self._embedding = target.vocab.embedding.to(target.device)
        self.after_blocks = config.after_blocks
        self.max_levels = config.num_drafted
        self.draft_rows = config.block_size
        self.forwards = (
            (self, "_forward"),
            (self, "_target_logits"),
            (self, "_fuse"),
            (head, "correct"),
        )
        # the text's last tokens, as many as a correction looks back at
        device = target.device
        self._text = torch.zeros(config.markov_order, dtype=torch.long, device=device)
        self._back = torch.arange(1, config.markov_order + 1, device=device)
        self._feature = torch.empty(0)  # [1, D] the fused taps before the root
        self._visible, self._masked = head.fc.weight.new_tensor([0.0, float("-inf")])

    def reset(self, prompt: Tensor, kept: KeptRows, slots: int) -> None:
        super().reset(prompt, kept, slots)
        self._text.copy_(prompt[:1])

    def commit(self, tokens: Tensor, features: Tensor, last: Tensor | None = None) -> None:
        # The layers keep keys and values of the accepted tokens' true taps, which overwrite the
        # rows of the drafted block.
        positions = self._cache.begin(tokens.shape[0])
        fused = self._fuse(features)  # [n, D]
        self._forward.read(fused, self._rotary.index_select(1, positions), self._cache)
        self._feature = keep_last(self._feature, fused, last)
        text = torch.cat([self._text, tokens])
        if last is None:
            self._text.copy_(text[-len(self._text) :])
        else:  # the last known token stands at len(self._text) + last
            self._text.copy_(text.index_select(0, last + self._back))

    def start(self) -> Tensor:
        config = self.head.config
        # The block's keys and values stand behind the kept rows, where the next commit writes.
        positions = self._cache.begin(self.draft_rows)
        # A row sees the kept rows and its block, either whole or up to the row itself.
        furthest = positions[:, None] if config.in_block == "causal" else positions[None, -1:]
        columns = self._cache.kept.positions[: self._cache.width]
        mask = torch.where(columns <= furthest, self._visible, self._masked)[None, None]
        rows = self.head.rows(self._text[-1:], self._embedding, self._feature)[0]
        rotary = self._rotary.index_select(1, positions)
        outputs = self._forward(rows, rotary, mask, self._cache)
        self._states = outputs[-self.max_levels :]  # [levels, D]
        self._logits = self._target_logits(self._states)  # [levels, V]
        self._level = 0
        self._paths = self._text[None]  # [rows of the last call, n] the last n tokens of each path
        return self._log_q()

    def step(self, tokens: Tensor, parents: Tensor) -> Tensor:
        self._level += 1
        above = self._paths.index_select(0, parents)
        self._paths = torch.cat([above, tokens[:, None]], dim=1)[:, 1:]
        return self._log_q()

    def _log_q(self) -> Tensor:
        states = self._states[self._level].expand(len(self._paths), -1)
        logits = self.head.correct(self._logits[self._level], self._paths, states)
        # Without a correction, all nodes of a level share one distribution.
        return logits.log_softmax(-1).expand(len(states), -1)


class DraftLMDrafter(Drafter):
    """A small LM with the target's token ids.

    `commit` keeps the accepted rows that the draft has read already. The next `start` reads the
    other accepted tokens in its own forward, so no token is read twice and no forward is added.
    """

    reads_no_device = False  # `commit` finds the accepted rows on the host

    def __init__(self, draft: Target, target: Target) -> None:
        self.draft = draft
        self._lm = checked_lm(draft, form="chain")
        self.forwards = ((draft.decoder, "forward"), (draft, "logits"))
        self.max_positions = context_of(draft.config) or UNBOUNDED
        # Distributions are over the tokens of both vocabularies, one of which may be padded.
        num_ids = (draft.vocab.lm_head.shape[0], target.vocab.lm_head.shape[0])
        self._num_columns = min(map(int, num_ids))

    def reset(self, prompt: Tensor, kept: KeptRows, slots: int) -> None:
        kept_by_draft = KeptRows(len(kept.positions), prompt.device, self.draft.dtype)
        self._lm.prefill(self._readable(prompt), kept_by_draft)
        kept_by_draft.advance(len(prompt))
        # how many of the next commit's tokens this prefill has read
        self._num_repeated = prompt.shape[0] - 1
        self._unread = prompt[:0]  # committed tokens that no forward has read
        self._begin_tree()

    def _begin_tree(self) -> None:
        self._root_law: Tensor | None = None  # [1, num_columns] log q
        self._levels: list[Tensor] = []  # [n, 2] tokens and parents of each level that was read

    def commit(
        self, tokens: Tensor, features: Tensor | None = None, last: Tensor | None = None
    ) -> None:
        tokens = tokens[self._num_repeated :]
        self._num_repeated = 0
        # keeps the accepted rows that the draft has read
        rows = self._rows_read(tokens)
        self._keep(torch.tensor(rows, dtype=torch.long, device=tokens.device))
        self._unread = torch.cat([self._unread, tokens[len(rows) :]])
        self._begin_tree()

    def _rows_read(self, tokens: Tensor) -> list[int]:
        """The rows, counted behind the kept ones, of the first tokens: those read by the draft."""
        path = tokens[:-1]  # the bonus token was not drafted
        parts = [path, *(level.flatten() for level in self._levels)]
        sizes = [len(part) for part in parts]
        path, *levels = torch.cat(parts).cpu().split(sizes)  # the only wait for the device
        rows: list[int] = []
        row_above = 0  # the previous token's row in its level
        first = 0  # the number of the level's first row
        for token, level in zip(path.tolist(), levels, strict=False):
            nodes = level.view(-1, 2).tolist()
            # Neither this token nor any after it was drafted on this path.
            if [token, row_above] not in nodes:
                break
            row_above = nodes.index([token, row_above])
            rows.append(first + row_above)
            first += len(nodes)
        return rows

    def start(self) -> Tensor:
        self._lm.cache.pending = 0
        self._levels = []
        self._depth = self._unread[:0]  # [m] of the rows drafted so far
        # [n, m] which of them the last call's rows see
        self._seen = self._unread.new_empty(1, 0, dtype=torch.bool)
        if self._root_law is None:
            depth = torch.arange(self._unread.shape[0], device=self._unread.device)
            mask = depth[:, None] >= depth[None]  # [n, n]
            hidden = self._lm.append(self._readable(self._unread), depth, mask)
            self._root_law = self._log_q(hidden[-1:])
            self._keep(depth)
            self._unread = self._unread[:0]
        return self._root_law

    def step(self, tokens: Tensor, parents: Tensor) -> Tensor:
        level = torch.full_like(tokens, len(self._levels))
        self._depth = torch.cat([self._depth, level])
        # A node sees the rows that its parent saw, and itself.
        itself = torch.eye(tokens.shape[0], dtype=torch.bool, device=tokens.device)
        self._seen = torch.cat([self._seen.index_select(0, parents), itself], dim=1)  # [n, m + n]
        self._levels.append(torch.stack([tokens, parents], dim=1))
        return self._log_q(self._lm.append(self._readable(tokens), self._depth, self._seen))

    def _keep(self, rows: Tensor) -> None:
        self._lm.cache.gather(rows)
        self._lm.cache.kept.advance(len(rows))

    def _readable(self, tokens: Tensor) -> Tensor:
        # The target may write a padding token that the draft LM lacks.
        return tokens.clamp(max=self.draft.vocab.embedding.shape[0] - 1)

    def _log_q(self, hidden: Tensor) -> Tensor:
        return self.draft.logits(hidden)[:, : self._num_columns].float().log_softmax(-1)


def load_draft_lm(target: Target, path: str) -> Target:
    """The draft LM in the target's dtype; UserError if it has another tokenizer than the target."""
    dtype = str(target.dtype).removeprefix("torch.")
    source = TargetConfig(path, dtype=cast(DType, dtype))
    draft = Target.load(source, target.device)
    require_whole_weights(head_directory(path))
    require_same_token_ids(
        load_tokenizer(source).get_vocab(),
        load_tokenizer(target.recipe).get_vocab(),
        int(draft.vocab.embedding.shape[0]),
        f"draft LM: {path}",
        target.recipe.path,
    )
    return draft
