"""Drafting with a small LM that shares its target's tokenizer: SpS (arXiv 2211.17192, algorithm 1)."""

from typing import cast

import torch
from torch import Tensor

from aerie.configs.schema.target_and_head import DType, TargetConfig
from aerie.infer.decode.cache import CachedLM
from aerie.infer.decode.shape import Drafter
from aerie.model.target import Target, load_tokenizer, require_same_token_ids


class DraftLMDrafter(Drafter):
    # Laws are over the tokens that both vocabularies have; their lengths differ when one of them is padded
    # `commit` leaves the accepted tokens that drafting has not read to the forward of the next `start`
    def __init__(self, draft: Target, target: Target) -> None:
        self.draft, self._lm = draft, CachedLM(draft)
        self.forwards = ((draft.decoder, "forward"), (draft, "logits"))
        self.max_positions = int(getattr(draft.config, "max_position_embeddings", None) or 2**31)
        self._num_columns = min(int(draft.vocab.lm_head.shape[0]), int(target.vocab.lm_head.shape[0]))
        self._unread = torch.empty(0, dtype=torch.long)  # committed tokens
        self._num_repeated = 0  # tokens of the prompt that the next commit begins with
        self._root_law: Tensor | None = None  # [1, num_columns]
        self._steps: list[tuple[Tensor, Tensor]] = []  # tokens and parents of each level that was read in this cycle
        self._depth = self._seen = self._unread  # of the rows drafted so far, [m]; by the rows of the last call, [n, m]

    def reset(self, prompt: Tensor, capacity: int) -> None:
        self._lm.prefill(self._readable(prompt), capacity)
        self._num_repeated = prompt.shape[0] - 1
        self._unread, self._root_law, self._steps = prompt[:0], None, []

    def commit(self, tokens: Tensor, features: Tensor | None = None) -> None:
        tokens, self._num_repeated = tokens[self._num_repeated :], 0
        # the rows of the longest beginning that was read as a path, as offsets after `length`; one synchronisation
        parts = [tokens[:-1], *(column for step in self._steps for column in step)]
        path, *columns = (part.tolist() for part in torch.cat(parts).cpu().split([len(part) for part in parts]))
        rows: list[int] = []
        first, parent = 0, 0  # of a level's rows; the row of the level above that the path stands on
        for token, level, parents in zip(path, columns[::2], columns[1::2], strict=False):
            nodes = list(zip(level, parents, strict=True))
            if (token, parent) not in nodes:
                break
            parent = nodes.index((token, parent))
            rows.append(first + parent)
            first += len(level)
        self._lm.keep(rows)
        self._unread = torch.cat([self._unread, tokens[len(rows) :]])
        self._root_law, self._steps = None, []

    def start(self) -> Tensor:
        self._lm.keep([])
        self._steps, self._depth = [], self._unread[:0]
        self._seen = self._unread.new_empty(1, 0, dtype=torch.bool)
        if self._root_law is None:
            line = torch.arange(self._unread.shape[0], device=self._unread.device)
            below = line[:, None] >= line[None]  # [n, n]
            self._root_law = self._log_q(self._lm.append(self._readable(self._unread), line, below)[-1:])
            self._lm.keep(line.tolist())
            self._unread = self._unread[:0]
        return self._root_law

    def step(self, tokens: Tensor, parents: Tensor) -> Tensor:
        # a node sees the rows that its parent saw, and itself
        itself = torch.eye(tokens.shape[0], dtype=torch.bool, device=tokens.device)
        self._depth = torch.cat([self._depth, torch.full_like(tokens, len(self._steps))])
        self._seen = torch.cat([self._seen.index_select(0, parents), itself], dim=1)  # [n, m + n]
        self._steps.append((tokens, parents))
        return self._log_q(self._lm.append(self._readable(tokens), self._depth, self._seen))

    def _readable(self, tokens: Tensor) -> Tensor:
        return tokens.clamp(max=self.draft.vocab.embedding.shape[0] - 1)  # the target may write a padding row

    def _log_q(self, hidden: Tensor) -> Tensor:
        return self.draft.logits(hidden)[:, : self._num_columns].float().log_softmax(-1)


def load_draft_lm(target: Target, path: str) -> Target:
    """The LM in the target's dtype; UserError where its tokenizer is not the target's."""
    source = TargetConfig(path, dtype=cast(DType, str(target.dtype).removeprefix("torch.")))
    draft, tokenizer = Target.load(source, target.device), load_tokenizer(source)
    rows, vocabulary = int(draft.vocab.embedding.shape[0]), load_tokenizer(target.recipe).get_vocab()
    require_same_token_ids(tokenizer.get_vocab(), vocabulary, rows, f"draft LM: {path}", target.recipe.path)
    return draft
