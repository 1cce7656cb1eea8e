"""From a settled row to the proposer that drafts with it; each head of a target is loaded once."""

from typing import Any, cast

from aerie.configs.errors import UserError, warn
from aerie.configs.schema.decode import LookaheadConfig, MethodConfig, TreeConfig
from aerie.configs.schema.heads import DType, TargetConfig
from aerie.infer.decode.calibrator import calibrate_of
from aerie.infer.decode.find_head import kind_at
from aerie.infer.decode.roles import Calibrate, Drafter, Proposer, TreeProposer, unchanged
from aerie.infer.decode.sampling import token_ids
from aerie.infer.decode.shape import make_shape
from aerie.infer.decode.text_proposers import Lookahead, PromptLookup
from aerie.model.checkpoint import check_sizes, head_facts, load_head, position_warnings
from aerie.model.heads import DRAFT_MODELS, Head
from aerie.model.heads.eagle import Eagle3Head
from aerie.model.hub import head_directory, require_whole_weights
from aerie.model.target import (
    Target,
    context_of,
    default_taps,
    load_tokenizer,
    other_weights,
    require_same_token_ids,
)


class LoadedHeads:
    """A target's heads and draft LMs. Each is loaded once, and each decoder has its own drafter."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self._models: dict[str, Any] = {}  # by directory or Hub id

    def of(self, head: str) -> Drafter:
        kind = kind_at(head)
        if head not in self._models:
            load = load_draft_lm if kind == "draft_lm" else load_head_for
            self._models[head] = load(self.target, head)
        drafter: Drafter = DRAFT_MODELS[kind].drafter(self._models[head], self.target)
        return drafter


def make_proposer(heads: LoadedHeads, row: MethodConfig, head: str | None) -> Proposer | None:
    """The proposer of a row whose tree fits its head (see `check_levels`); None: vanilla."""
    if row.tree is not None:
        assert head is not None
        return tree_proposer(heads.of(head), row.tree, calibrate_of(row.tree.calibrated, head))
    if isinstance(row.options, LookaheadConfig):
        target = heads.target
        # no passenger may switch LongRoPE's factors
        return Lookahead(row.options, target.rope_switch or context_of(target.config))
    return None if row.options is None else PromptLookup(row.options)


def tree_proposer(
    drafter: Drafter, tree: TreeConfig, calibrate: Calibrate = unchanged
) -> TreeProposer:
    return TreeProposer(drafter, make_shape(tree, calibrate))


def load_head_for(target: Target, head: str) -> Head:
    """The head in the target's dtype, on the device of its LM head.

    UserError where it does not fit the target.
    """
    # a published EAGLE-3 head may name no taps
    taps = default_taps(target.num_blocks)
    module = load_head(head, dtype=target.dtype, vocab=target.vocab, after_blocks=taps)
    path = target.recipe.path
    check_sizes(module.config, target.vocab, head, path, target.config)
    for sentence in position_warnings(module.config, target.config, head):
        warn(sentence)
    taps = getattr(module.config, "after_blocks", ())
    if max(taps, default=0) >= target.num_blocks:
        fault = f"reads the target's states after blocks {taps}, and {path} has"
        raise UserError(f"{head}: {fault} {target.num_blocks} blocks; give its target")
    if isinstance(module, Eagle3Head):
        ends = sorted(token_ids(target.generation_config.eos_token_id))
        module.vocabulary.check_ends(ends, head)
    trained_with = head_facts(head).get("target")
    other = other_weights(trained_with, target.recipe, target.config, target.vocab)
    if other:
        warn(f"{head}: {other}; few drafts will fit: give its target")
    return module.to(target.device).eval().requires_grad_(False)


def load_draft_lm(target: Target, path: str) -> Target:
    """The LM in the target's dtype; UserError where its tokenizer is not the target's."""
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
