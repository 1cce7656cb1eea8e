"""The target's own greedy answers, with the states that heads draft from."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from aerie.data.batches import Batch, collate
from aerie.data.feature_cache import CachedRow
from aerie.data.progress import start_progress
from aerie.infer.decode.engine import SpeculativeDecoder
from aerie.model.target import Target

MOST_TOKENS = 96  # the most tokens of an answer


@dataclass(frozen=True)
class LearntText:
    """A text with training's loss mask, which marks the tokens that heads must draft."""

    ids: Tensor  # [T], on the host
    turn_ids: Tensor  # [T], as in Batch: above 0 for an answer's tokens

    @classmethod
    def of_answer(cls, prompt: Sequence[int], answer: Sequence[int]) -> "LearntText":
        turn_ids = torch.tensor([0] * len(prompt) + [1] * len(answer))
        return cls(torch.tensor([*prompt, *answer]), turn_ids)

    @property
    def prompt(self) -> Tensor:
        """The tokens before the first answer."""
        return self.ids[: int((self.turn_ids > 0).int().argmax())]


@dataclass(frozen=True)
class StatedText:
    """A text with the target's states."""

    text: LearntText
    last_hidden: Tensor  # [T, D], after the final norm
    states: dict[int, Tensor]  # tap -> transformers' hidden_states[tap], [T, D]
    before_norm: Tensor  # [T, D], before the final norm

    def batch(self, after_blocks: Sequence[int]) -> Batch:
        """The text as a training batch of one row, with these taps."""
        taps = None
        if after_blocks:
            taps = torch.cat([self.states[tap] for tap in after_blocks], dim=-1)  # [T, L*D]
        row = CachedRow(self.text.ids, self.text.turn_ids, self.last_hidden, taps)
        batch = collate([row], [0])
        return batch.to(self.last_hidden.device)


def answer_greedily(
    target: Target, prompts: Sequence[Sequence[int]], max_new_tokens: int = MOST_TOKENS
) -> list[LearntText]:
    """Each prompt (token ids) with the target's greedy answer."""
    decoder = SpeculativeDecoder(target)
    texts = []
    with start_progress(len(prompts), "prompts", "the target's answers") as progress:
        for prompt in prompts:
            room = min(decoder.limits.values()) - len(prompt)
            generation = decoder.generate(
                prompt, do_sample=False, max_new_tokens=max(1, min(max_new_tokens, room))
            )
            texts.append(LearntText.of_answer(prompt, generation.new_ids))
            progress.update()
    return texts


def state_texts(
    target: Target, texts: Sequence[LearntText], taps: Collection[int]
) -> list[StatedText]:
    """The texts with the target's states, from one forward for each text."""
    numbers = tuple(sorted(taps))
    inputs: list[Tensor] = []  # of the final norm
    hook = last_norm(target).register_forward_pre_hook(lambda _, given: inputs.append(given[0]))
    stated = []
    for text in texts:
        output = target.features(text.ids[None].to(target.device), numbers)
        parts = () if output.taps is None else output.taps[0].split(target.hidden_size, dim=-1)
        states = dict(zip(numbers, parts, strict=True))
        stated.append(StatedText(text, output.last_hidden[0], states, inputs.pop()[0]))
    hook.remove()
    return stated


def last_norm(target: Target) -> nn.Module:
    """The target's final norm, which makes last_hidden."""
    last = nn.Identity()
    for part in target.decoder.children():
        if getattr(getattr(part, "weight", None), "shape", None) == (target.hidden_size,):
            last = part
    return last
