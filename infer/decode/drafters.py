"""How to draft: EAGLE, Medusa, Hydra and block heads, a small LM, n-grams of the text, lookahead's Jacobi window."""

import itertools
import math
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Any, cast

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from aerie.configs.schema.decode import LookaheadConfig, PromptLookupConfig
from aerie.configs.schema.heads import DType, TargetConfig
from aerie.infer.decode.check import checked_lm
from aerie.infer.decode.roles import Cycle, Drafter, Proposer, Traits
from aerie.infer.decode.sampling import Decoding, Sampler
from aerie.infer.decode.tree import Path, Tree, ancestors, root_only
from aerie.model.heads.block import BlockForward, BlockHead
from aerie.model.heads.eagle import Eagle1Head, Eagle3Head, EagleForward
from aerie.model.hub import head_directory, require_whole_weights
from aerie.model.kv_cache import KeptRows, KeyValueCache
from aerie.model.target import Target, context_of, load_tokenizer, require_same_token_ids


class EagleDrafter(Drafter):
    """An EAGLE head. Slot p holds (feature of t_p, token t_{p+1}); its output stands for the feature of t_{p+1}."""

    def __init__(self, head: Eagle1Head | Eagle3Head, target: Target) -> None:
        self.head, self._draft = head, EagleForward(head)
        self._logits: Callable[[Tensor], Tensor] = target.logits
        self.max_positions = head.config.max_position_embeddings
        self.forwards = ((self, "_draft"), (self, "_log_q"))
        if isinstance(head, Eagle3Head):
            self.after_blocks = head.config.after_blocks
            self._logits, self._fuse = head.logits, head.fuse
            self.forwards += ((self, "_fuse"),)
            self.ids = head.vocabulary.ids
        weight = head.fc.weight
        self._cache = KeyValueCache(
            {}, KeptRows(0, weight.device, weight.dtype)
        )  # of the text that `reset` began
        # the head's states [n, D]: of the last committed slot, and of the rows of the last call
        self._last = self._hidden = torch.empty(0)

    def reset(self, prompt: Tensor, kept: KeptRows, slots: int) -> None:
        self._slots = slots
        if self._cache.kept is kept:
            return
        like, config = self.head.fc.weight, self.head.config
        self._cache = KeyValueCache.empty(config.num_hidden_layers, config, kept, like)
        self._table = torch.stack(
            self.head.rotary.table(len(kept.positions), like)
        )  # [2, positions, hd]

    def commit(self, tokens: Tensor, features: Tensor, last: Tensor | None = None) -> None:
        if self.after_blocks:
            features = self._fuse(features)
        # drops the slots that were drafted from the head's own states: no guess outlives its cycle
        self._cache.pending = 0
        places = self._cache.begin(tokens.shape[0])
        mask, rope = causal(features, self._cache), self._table.index_select(1, places)
        self._last = held(self._last, self._draft(tokens, features, rope, mask, self._cache), last)

    def start(self) -> Tensor:
        self._cache.pending = self._level = 0  # drafted slots, and levels of them
        kept, self._hidden = self._cache.kept, self._last
        # additive [1, 1, rows of the last call, W]
        self._mask = kept.mask[None, None, None, : kept.visible.shape[0] + self._slots]
        self._ropes = self._table.index_select(1, kept.free[: self._slots])  # by level
        return self._log_q()

    def step(self, tokens: Tensor, parents: Tensor) -> Tensor:
        places = self._cache.begin(tokens.shape[0])
        # a drafted slot sees all committed slots, the drafted slots that its parent saw, and itself
        self._mask = rows_of(self._mask, 2, parents).scatter(3, places.view(1, 1, -1, 1), 0.0)
        features, mask = (
            rows_of(self._hidden, 0, parents),
            self._mask.narrow(3, 0, self._cache.width),
        )
        rope = self._ropes.narrow(1, self._level, 1)
        self._hidden = self._draft(tokens, features, rope, mask, self._cache)
        self._cache.pending += tokens.shape[0]
        self._level += 1
        return self._log_q()

    def _log_q(self) -> Tensor:
        return self._logits(self._hidden).float().log_softmax(-1)


def rows_of(x: Tensor, dim: int, rows: Tensor) -> Tensor:
    """x's rows at these indices; a view if x has only one."""
    sizes = [len(rows) if at == dim else -1 for at in range(x.ndim)]
    return x.index_select(dim, rows) if x.shape[dim] > 1 else x.expand(sizes)


def held(state: Tensor, rows: Tensor, last: Tensor | None) -> Tensor:
    """The last row [1, D], copied into `state` if it fits: a captured cycle reads it there."""
    row = rows[-1:] if last is None else rows.index_select(0, last)
    return state.copy_(row) if state.shape == row.shape else row.clone()


def causal(features: Tensor, cache: KeyValueCache) -> Tensor:
    """The additive mask [1, 1, n, W] of new rows."""
    seen = cache.kept.positions[: cache.width] <= cache.positions[:, None]
    return torch.where(seen, 0.0, float("-inf")).to(features.dtype)[None, None]


class MedusaDrafter(Drafter):
    """A Medusa head: one forward gives all levels' laws; row k - 1 is the law of every node of level k."""

    forwards_per_tree = 1

    def __init__(self, head: Any, target: Target | None = None) -> None:
        self.head, self.max_levels, self.forwards = (
            head,
            head.config.num_heads,
            ((head, "forward"),),
        )
        self._feature = self._log_q = torch.empty(0)  # [1, D]; [num_heads, 1, V]

    def commit(self, tokens: Tensor, features: Tensor, last: Tensor | None = None) -> None:
        self._feature = held(self._feature, features, last)

    def start(self) -> Tensor:
        self._log_q, self._level = self.head(self._feature).float().log_softmax(-1), 0
        return self._log_q[0]

    def step(self, tokens: Tensor, parents: Tensor) -> Tensor:
        self._level += 1
        return self._log_q[self._level].expand(tokens.shape[0], -1)


class HydraDrafter(Drafter):
    """A Hydra head: a law sees the state before the root (Hydra++: a prefix layer's) and its path's embeddings."""

    def __init__(self, head: Any, target: Target) -> None:
        self.head, self.max_levels, self.forwards = head, head.config.num_heads, ((head, "step"),)
        if head.config.prefix_layer:
            self.max_positions = head.config.max_position_embeddings
            self.forwards += ((head, "prefix"),)
        # the target may span several devices
        self._embedding = target.vocab.embedding.to(target.device)
        self._cache: KeyValueCache | None = None  # of the prefix layer
        self._state = self._root = torch.empty(0)  # [1, D]; the root's embedding [1, D]
        self._embeddings = torch.empty(0)  # [rows of the last call, (level + 1) * D]

    def reset(self, prompt: Tensor, kept: KeptRows, slots: int) -> None:
        if self.head.config.prefix_layer and (self._cache is None or self._cache.kept is not kept):
            self._cache = KeyValueCache.empty(1, self.head.config, kept, self._embedding)

    def commit(self, tokens: Tensor, features: Tensor, last: Tensor | None = None) -> None:
        if self._cache is not None:
            places = self._cache.begin(tokens.shape[0])
            features = self.head.prefix(
                features[None], places, causal(features, self._cache), self._cache
            )[0]
        self._state = held(self._state, features, last)
        self._root = held(self._root, F.embedding(tokens, self._embedding), last)

    def start(self) -> Tensor:
        self._level, self._embeddings = 0, self._root
        return self._log_q()

    def step(self, tokens: Tensor, parents: Tensor) -> Tensor:
        self._level += 1
        above = self._embeddings.index_select(0, parents)
        self._embeddings = torch.cat([above, F.embedding(tokens, self._embedding)], dim=1)
        return self._log_q()

    def _log_q(self) -> Tensor:
        state = self._state.expand(self._embeddings.shape[0], -1)
        return self.head.step(self._level, state, self._embeddings).float().log_softmax(-1)


class BlockDrafter(Drafter):
    """A block head: one forward gives the logits of all levels, and each node's path corrects its children's."""

    forwards_per_tree = 1

    def __init__(self, head: BlockHead, target: Target) -> None:
        self.head, self._draft, self._target_logits = head, BlockForward(head), target.logits
        config, self._fuse, self._embedding = (
            head.config,
            head.fuse,
            target.vocab.embedding.to(target.device),
        )
        self.after_blocks, self.max_levels, self.draft_rows = (
            config.after_blocks,
            config.num_drafted,
            config.block_size,
        )
        self.max_positions = config.max_position_embeddings
        self.forwards = (
            (self, "_draft"),
            (self, "_target_logits"),
            (self, "_fuse"),
            (head, "correct"),
        )
        self._cache = KeyValueCache(
            {}, KeptRows(0, target.device, target.dtype)
        )  # of the text that `reset` began
        self._text = torch.zeros(
            config.markov_order, dtype=torch.long, device=target.device
        )  # its last tokens
        self._paths = torch.empty(0)  # [rows of the last call, n]: the last n tokens of each path
        self._back = torch.arange(1, config.markov_order + 1, device=target.device)
        self._before = torch.empty(0)  # the fused taps [1, D] before the root
        self._states = self._logits = torch.empty(
            0
        )  # [levels, D] and [levels, V] of the tree that `start` began
        self._zero, self._hides = head.fc.weight.new_tensor([0.0, float("-inf")])

    def reset(self, prompt: Tensor, kept: KeptRows, slots: int) -> None:
        self._text.copy_(prompt[:1])
        if self._cache.kept is kept:
            return
        like = self.head.fc.weight
        self._cache = KeyValueCache.empty(
            self.head.config.num_hidden_layers, self.head.config, kept, like
        )
        self._table = torch.stack(
            self.head.rotary.table(len(kept.positions), like)
        )  # [2, positions, hd]

    def commit(self, tokens: Tensor, features: Tensor, last: Tensor | None = None) -> None:
        # For accepted tokens a layer keeps keys and values of their true taps; the block's rows are overwritten here.
        places = self._cache.begin(tokens.shape[0])
        fused = self._fuse(features)
        self._draft.read(fused, self._table.index_select(1, places), self._cache)
        self._before, line = held(self._before, fused, last), torch.cat([self._text, tokens])
        self._text.copy_(
            line[-len(self._text) :] if last is None else line.index_select(0, last + self._back)
        )

    def start(self) -> Tensor:
        config, places = self.head.config, self._cache.begin(self.draft_rows)
        # a row sees the kept rows, and its block: all of it, or up to itself
        furthest = places[:, None] if config.in_block == "causal" else places[None, -1:]
        columns = self._cache.kept.positions[: self._cache.width]
        mask = torch.where(columns <= furthest, self._zero, self._hides)[None, None]
        rows = self.head.rows(self._text[-1:], self._embedding, self._before)[0]
        # the block's keys and values stand behind the kept rows, where the next commit writes
        self._states = self._draft(rows, self._table.index_select(1, places), mask, self._cache)[
            -self.max_levels :
        ]
        self._logits, self._level, self._paths = (
            self._target_logits(self._states),
            0,
            self._text[None],
        )
        return self._log_q()

    def step(self, tokens: Tensor, parents: Tensor) -> Tensor:
        self._level += 1
        self._paths = torch.cat([self._paths.index_select(0, parents), tokens[:, None]], dim=1)[
            :, 1:
        ]
        return self._log_q()

    def _log_q(self) -> Tensor:
        states = self._states[self._level].expand(len(self._paths), -1)
        log_q = self.head.correct(self._logits[self._level], self._paths, states).log_softmax(-1)
        return log_q.expand(
            len(states), -1
        )  # without a correction all nodes of a level share one law


class DraftLMDrafter(Drafter):
    """A small LM. The next `start` reads, in its forward, the accepted tokens that drafting has not read."""

    is_fixed = False  # which rows were accepted is found on the host

    def __init__(self, draft: Target, target: Target) -> None:
        self.draft, self._lm = draft, checked_lm(draft, form="chain")
        self.forwards = ((draft.decoder, "forward"), (draft, "logits"))
        self.max_positions = context_of(draft.config) or 2**31
        # laws are over the tokens that both vocabularies have: one of them may be padded
        self._num_columns = min(
            int(draft.vocab.lm_head.shape[0]), int(target.vocab.lm_head.shape[0])
        )
        self._unread = torch.empty(0, dtype=torch.long)  # committed tokens
        self._num_repeated = 0  # tokens of the prompt that the next commit begins with
        self._root_law: Tensor | None = None  # [1, num_columns]
        self._steps: list[
            tuple[Tensor, Tensor]
        ] = []  # tokens and parents of each level that was read in this cycle
        self._depth = self._seen = (
            self._unread
        )  # of the rows drafted so far [m]; which the last call's see [n, m]

    def reset(self, prompt: Tensor, kept: KeptRows, slots: int) -> None:
        self._lm.prefill(
            self._readable(prompt),
            own := KeptRows(len(kept.positions), prompt.device, self.draft.dtype),
        )
        own.advance(len(prompt))
        self._num_repeated = prompt.shape[0] - 1
        self._unread, self._root_law, self._steps = prompt[:0], None, []

    def commit(
        self, tokens: Tensor, features: Tensor | None = None, last: Tensor | None = None
    ) -> None:
        tokens, self._num_repeated = tokens[self._num_repeated :], 0
        # the rows, counted behind the kept ones, of the longest beginning that drafting has read; one synchronisation
        parts = [tokens[:-1], *(column for step in self._steps for column in step)]
        path, *columns = (
            part.tolist() for part in torch.cat(parts).cpu().split([len(part) for part in parts])
        )
        rows: list[int] = []
        first, parent = 0, 0  # the number of a level's first row; the path's row in the level above
        for token, level, parents in zip(path, columns[::2], columns[1::2], strict=False):
            nodes = list(zip(level, parents, strict=True))
            if (token, parent) not in nodes:
                break
            parent = nodes.index((token, parent))
            rows.append(first + parent)
            first += len(level)
        self._keep(torch.tensor(rows, dtype=torch.long, device=tokens.device))
        self._unread = torch.cat([self._unread, tokens[len(rows) :]])
        self._root_law, self._steps = None, []

    def start(self) -> Tensor:
        self._lm.cache.pending = 0
        self._steps, self._depth = [], self._unread[:0]
        self._seen = self._unread.new_empty(1, 0, dtype=torch.bool)
        if self._root_law is None:
            line = torch.arange(self._unread.shape[0], device=self._unread.device)
            below = line[:, None] >= line[None]  # [n, n]
            self._root_law = self._log_q(
                self._lm.append(self._readable(self._unread), line, below)[-1:]
            )
            self._keep(line)
            self._unread = self._unread[:0]
        return self._root_law

    def step(self, tokens: Tensor, parents: Tensor) -> Tensor:
        # a node sees the rows that its parent saw, and itself
        itself = torch.eye(tokens.shape[0], dtype=torch.bool, device=tokens.device)
        self._depth = torch.cat([self._depth, torch.full_like(tokens, len(self._steps))])
        self._seen = torch.cat([self._seen.index_select(0, parents), itself], dim=1)  # [n, m + n]
        self._steps.append((tokens, parents))
        return self._log_q(self._lm.append(self._readable(tokens), self._depth, self._seen))

    def _keep(self, rows: Tensor) -> None:
        self._lm.cache.gather(rows)
        self._lm.cache.kept.advance(len(rows))

    def _readable(self, tokens: Tensor) -> Tensor:
        # the target may write a padding token that the draft LM lacks
        return tokens.clamp(max=self.draft.vocab.embedding.shape[0] - 1)

    def _log_q(self, hidden: Tensor) -> Tensor:
        return self.draft.logits(hidden)[:, : self._num_columns].float().log_softmax(-1)


def load_draft_lm(target: Target, path: str) -> Target:
    """The LM in the target's dtype; UserError where its tokenizer is not the target's."""
    source = TargetConfig(path, dtype=cast(DType, str(target.dtype).removeprefix("torch.")))
    draft, tokenizer = Target.load(source, target.device), load_tokenizer(source)
    require_whole_weights(head_directory(path))
    rows, vocabulary = (
        int(draft.vocab.embedding.shape[0]),
        load_tokenizer(target.recipe).get_vocab(),
    )
    require_same_token_ids(
        tokenizer.get_vocab(), vocabulary, rows, f"draft LM: {path}", target.recipe.path
    )
    return draft


Name = Path | int


class Trie:
    """Builds a tree: a guessed node is named by its path, a passenger by a number."""

    def __init__(self) -> None:
        self._guesses: Counter[Path] = Counter()  # how many pass through each path
        self._nodes: dict[Name, tuple[int, int, Name]] = {(): (0, 0, ())}  # token, depth and parent

    def guess(self, tokens: Sequence[int]) -> None:
        self._guesses.update(tuple(tokens[:count]) for count in range(len(tokens) + 1))

    def ride(self, token: int, parent: Name) -> Name:
        self._nodes[len(self._nodes)] = token, self._nodes[parent][1] + 1, parent
        return len(self._nodes) - 1

    def tree(self, root: Tensor) -> tuple[Tree, dict[Name, int]]:
        """The tree under root [1], and each named node's index in it."""
        guesses: Counter[Any] = self._guesses
        nodes = self._nodes | {path: (path[-1], len(path), path[:-1]) for path in guesses if path}
        order = sorted(nodes, key=lambda name: nodes[name][1])
        places = {name: place for place, name in enumerate(order)}
        if len(order) == 1:
            return root_only(root), places
        # of each node: token, parent, depth, and whether it is a passenger
        columns = [(nodes[n][0], places[nodes[n][2]], nodes[n][1], n not in guesses) for n in order]
        tokens, parents, depth, rides = torch.tensor(columns, device=root.device).unbind(
            1
        )  # [N] each
        rides[0] = 0
        # confidence: the share of the parent's guesses that pass through the node; survival: that of all guesses
        counts = [
            (guesses[n], guesses[nodes[n][2]], guesses[()]) if n in guesses else (1, 1, 1)
            for n in order
        ]
        shares = [
            (math.log(through / parent), math.log(through / all_))
            for through, parent, all_ in counts
        ]
        confidence, survival = torch.tensor(shares, device=root.device).unbind(1)
        tokens, mask = (
            torch.cat([root, tokens[1:].to(root.dtype)]),
            ancestors(parents, nodes[order[-1]][1]),
        )
        levels, passengers = (
            max(map(len, guesses), default=0),
            rides.bool() if len(self._nodes) > 1 else None,
        )
        return Tree(
            tokens, parents, depth, mask, confidence, survival, levels, 0, passengers=passengers
        ), places


def continuation(
    text: NDArray[np.int64], config: PromptLookupConfig, end_ids: Collection[int] = ()
) -> list[int]:
    """What followed the longest final n-gram of the text where it stood before (PromptLookupCandidateGenerator)."""
    for size in range(min(config.ngram, len(text) - 1), config.min_ngram - 1, -1):
        starts = (
            np.flatnonzero((sliding_window_view(text[:-1], size) == text[-size:]).all(axis=1))
            + size
        )
        if len(starts):
            start = starts[0] if config.match == "first" else starts[-1]
            return [
                *itertools.takewhile(
                    lambda t: t not in end_ids, text[start : start + config.length].tolist()
                )
            ]
    return []


class PromptLookup(Proposer):
    levels = None

    def __init__(self, config: PromptLookupConfig) -> None:
        self.config, self.max_nodes = config, config.length + 1

    def traits(self, decoding: Decoding) -> Traits:
        return Traits("anything")

    def reset(self, prompt: Tensor, kept: KeptRows, sampler: Sampler) -> None:
        self._text, self._length = np.zeros(len(kept.positions), dtype=np.int64), len(prompt)
        self._text[: self._length] = prompt.cpu().numpy()
        self._end_ids = sampler.decoding.eos_token_ids

    def propose(self, root: Tensor, max_levels: int) -> Tree:
        trie = Trie()
        trie.guess(
            continuation(self._text[: self._length], self.config, self._end_ids)[:max_levels]
        )
        return trie.tree(root)[0]

    def learn(self, new: list[int], cycle: Cycle | None) -> None:
        self._text[self._length : self._length + len(new)] = new
        self._length += len(new)


class Lookahead(Proposer):
    """Lookahead decoding (arXiv 2402.02057, section 3); window, pool and warm-up are those of the published code.

    The window has N - 1 rows of W tokens: row l, column i stands l + i places after the root, which is 0, 0. A token
    sees row 0 up to its column, and what is above it in its column. Until it is full, each forward drops column 0.
    """

    is_chain = False
    levels = None

    def __init__(self, config: LookaheadConfig, context: int | None = None) -> None:
        self.config, self._context, self.max_nodes = config, context or 2**31, config.sizes[2]

    def traits(self, decoding: Decoding) -> Traits:
        return Traits("anything")

    def reset(self, prompt: Tensor, kept: KeptRows, sampler: Sampler) -> None:
        config, self._text = self.config, prompt.tolist()
        generator = torch.Generator().manual_seed(config.seed)
        chosen = torch.randint(
            len(self._text), (config.window + config.ngram - 2,), generator=generator
        )
        self.window: list[list[int]] = [[self._text[place] for place in chosen.tolist()]]
        # the last different continuations of each token, oldest first
        self.pool: dict[int, dict[Path, None]] = {}
        self._newest: list[
            int
        ] = []  # nodes of the last tree that the window's next tokens are read from
        self._read(len(self._text))

    def propose(self, root: Tensor, max_levels: int) -> Tree:
        trie, token, first = Trie(), self._text[-1], self.window[0]
        newest: list[Any] = []
        # passengers: row 0 is a chain below the root, each column a chain below its node; all must fit the context
        if len(self._text) + len(self.window) + len(first) - 2 <= self._context:
            first[0], newest = token, [()]
            for guessed in first[1:]:
                newest.append(trie.ride(guessed, newest[-1]))
            for row in self.window[1:]:
                newest = [
                    trie.ride(guessed, node) for guessed, node in zip(row, newest, strict=True)
                ]
        if len(self.window) == self.config.ngram - 1:
            for guess in self.pool.get(token, ()):
                trie.guess(guess[:max_levels])
        tree, places = trie.tree(root)
        self._newest = [places[node] for node in newest]
        return tree

    def learn(self, new: list[int], cycle: Cycle | None) -> None:
        if cycle is not None and self._newest:
            rows = [*self.window, cycle.step.logits[self._newest].argmax(-1).tolist()]
            if len(rows) == self.config.ngram:
                self.window = rows[1:]
                for ngram in zip(*rows, strict=True):
                    self._add(ngram)
            else:
                self.window = [row[1:] for row in rows]
        self._newest = []
        self._text += new
        self._read(len(new))

    def _read(self, new: int) -> None:
        if self.config.pool_from_text:
            size = self.config.ngram
            for end in range(max(len(self._text) - new, size - 1), len(self._text)):
                self._add(tuple(self._text[end + 1 - size : end + 1]))

    def _add(self, ngram: Path) -> None:
        kept = self.pool.setdefault(ngram[0], {})
        kept.pop(ngram[1:], None)
        kept[ngram[1:]] = None
        if len(kept) > self.config.guesses:
            del kept[next(iter(kept))]
