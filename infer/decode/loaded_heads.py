"""Loads heads and draft LMs for a target, and refuses those that do not fit it."""

from typing import Any

from aerie.configs.errors import UserError, warn
from aerie.infer.decode.drafters import load_draft_lm
from aerie.infer.decode.find_head import kind_at
from aerie.infer.decode.roles import Drafter
from aerie.infer.decode.sampling import token_ids
from aerie.model.checkpoint import check_sizes, head_facts, load_head, position_warnings
from aerie.model.heads import DRAFT_MODELS, Head
from aerie.model.heads.eagle import Eagle3Head
from aerie.model.target import Target
from aerie.model.target_files import default_taps, other_weights


class LoadedHeads:
    """A target's heads and draft LMs. Each is loaded once, and each decoder has its own drafter."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self._models: dict[str, Any] = {}  # by directory or Hub id

    def of(self, head: str) -> Drafter:
        """A new drafter: it holds the caches of one text, so decoders share the weights alone."""
        kind = DRAFT_MODELS[kind_at(head)]
        drafter: Drafter = kind.drafter(self.model_of(head), self.target)
        return drafter

    def model_of(self, head: str) -> Any:
        """The head's module, or a draft LM as a Target."""
        if head not in self._models:
            load = load_draft_lm if kind_at(head) == "draft_lm" else load_head_for
            self._models[head] = load(self.target, head)
        return self._models[head]


def load_head_for(target: Target, head: str) -> Head:
    """The head in the target's dtype, on the device of the target's LM head.

    UserError if the head does not fit the target.
    """
    # for a published EAGLE-3 head that names no taps
    taps = default_taps(target.num_blocks)
    module = load_head(head, dtype=target.dtype, vocab=target.vocab, after_blocks=taps)
    path = target.recipe.path
    check_sizes(module.config, target.vocab, head, path, target.config)
    for sentence in position_warnings(module.config, target.config, head):
        warn(sentence)
    # A head for a deeper model of the same width would read a block that the target lacks.
    taps = getattr(module.config, "after_blocks", ())
    if max(taps, default=0) >= target.num_blocks:
        fault = f"reads the target's states after blocks {taps}, but {path} has only"
        raise UserError(f"{head}: {fault} {target.num_blocks} blocks; give the head's own target")
    if isinstance(module, Eagle3Head):
        ends = sorted(token_ids(target.generation_config.eos_token_id))
        # Without the end token in its draft vocabulary, a head can never draft an answer's end.
        module.vocabulary.check_ends(ends, head)
    # A warning and no error: decoding stays lossless.
    trained_with = head_facts(head).get("target")
    difference = other_weights(trained_with, target.recipe, target.config, target.vocab)
    if difference:
        warn(f"{head}: {difference}; few drafts will be accepted; give the head's own target")
    return module.to(target.device).eval().requires_grad_(False)
