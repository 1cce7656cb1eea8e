"""Rows in which a draft LM writes tokens itself, so that it learns the target's laws where its own drafts lead.

From a random place of an answer on, up to so many tokens of the answer's are drawn from the LM's own law. What follows
them in the row is not learnt: it does not continue them. Source: mixed on-policy data, DistillSpec (arXiv 2310.08461).
"""

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from data.batches import Batch, keyed_generator
from model.errors import UserError
from train.config import TrainConfig

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
