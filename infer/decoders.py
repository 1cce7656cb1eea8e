"""Decoders by the name of their method: the head is loaded and checked, and put into its tree."""

from collections.abc import Callable
from pathlib import Path

import torch

from infer.calibration.calibrator import Calibrate, calibrate_of, unchanged
from infer.choices import sized
from infer.config import MethodConfig, TreeConfig
from infer.drafters.draft_lm import DraftLMDrafter, load_draft_lm
from infer.drafters.eagle import EagleDrafter
from infer.drafters.hydra import HydraDrafter
from infer.drafters.lookahead import Lookahead
from infer.drafters.medusa import MedusaDrafter, check_level
from infer.drafters.prompt_lookup import PromptLookup
from infer.engine import SpeculativeDecoder, end_ids
from infer.guess_config import LookaheadConfig, PromptLookupConfig
from infer.heads import kind_at
from infer.methods import check_kind, tree_of, usual_tree
from infer.proposer import CachedDrafter, Drafting, Proposer
from infer.shape import make_shape
from model.checkpoint import Head, check_fits, head_facts, load_head
from model.errors import UserError, warn
from model.heads.eagle3 import Eagle3Head
from model.heads.hydra import HydraHead
from model.heads.medusa import MedusaHead
from model.hub import head_directory
from model.sizes import position_warnings
from model.target import Target, default_taps, fingerprints, load_ends

Making = Callable[[], CachedDrafter]


class Drafters:
    """Loads each head directory once for one target, and makes a drafter of it for every decoder."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self._makers: dict[str, Making] = {}

    def of(self, head: str) -> CachedDrafter:
        """A new drafter with the head in a directory or on the Hub."""
        if head not in self._makers:
            self._makers[head] = self._maker(head)
        return self._makers[head]()

    def _maker(self, head: str) -> Making:
        if kind_at(Path(head)) == "draft_lm":
            draft = load_draft_lm(self.target, head).draft
            return lambda: DraftLMDrafter(draft, self.target)
        module = load_head_for(self.target, head)
        return lambda: make_drafter(module, self.target)


def make_drafter(module: Head, target: Target) -> CachedDrafter:
    """The drafter of a loaded head."""
    if isinstance(module, MedusaHead):
        return MedusaDrafter(module)
    if isinstance(module, HydraHead):
        return HydraDrafter(module, target)
    return EagleDrafter(module, target)


def make_decoder(
    drafters: Drafters, asked: MethodConfig, head: str | None, place: str = "method"
) -> SpeculativeDecoder:
    """A decoder for a method as the recipe has it at this place; head: the directory, null where it needs none."""
    target, tree = drafters.target, tree_of(asked, place)
    if asked.method == "vanilla":
        return SpeculativeDecoder(target)
    proposer: Proposer
    if isinstance(asked.options, PromptLookupConfig):
        proposer = PromptLookup(asked.options)
    elif isinstance(asked.options, LookaheadConfig):
        proposer = Lookahead(asked.options, getattr(target.config, "max_position_embeddings", None))
    else:
        if head is None or tree is None:
            raise UserError(f"{place}: {asked.method} needs a head; give --head")
        check_kind(asked.method, kind_at(Path(head)), place)
        calibrate = calibrate_of(tree.calibrated, head_directory(head)) if tree.calibrated else unchanged
        proposer = drafting(drafters.of(head), tree, calibrate)
    return SpeculativeDecoder(target, proposer, asked.typical)


def usual_decoder(target: Target, head: str | None, tree: TreeConfig | None) -> SpeculativeDecoder:
    """A decoder with a head in this tree (null: the published one of its kind's usual method); no head: vanilla."""
    if head is None:
        return SpeculativeDecoder(target)
    tree = tree or usual_tree(kind_at(Path(head)))
    calibrate = calibrate_of(tree.calibrated, head_directory(head)) if tree.calibrated else unchanged
    return SpeculativeDecoder(target, drafting(Drafters(target).of(head), tree, calibrate))


def drafting(drafter: CachedDrafter, tree: TreeConfig, calibrate: Calibrate = unchanged) -> Drafting:
    """A drafter in a tree; UserError when the tree is deeper than a head with a fixed number of levels can draft.

    calibrate is what `tree.calibrated` names; without it the head's own confidence is used (in training, say).
    """
    tree = sized(tree)
    if isinstance(drafter, MedusaDrafter | HydraDrafter):
        check_level(tree.levels - 1, drafter.head.config.num_heads)
    return Drafting(
        drafter, make_shape(tree, calibrate), forwards_per_tree=1 if isinstance(drafter, MedusaDrafter) else None
    )


def load_head_for(target: Target, head: str) -> Head:
    """The head in a directory, checked against the target, in its dtype, on the device of its LM head.

    A published EAGLE-3 head that names no taps has the default ones.
    """
    published_taps = default_taps(target.num_blocks) if target.num_blocks >= 7 else None
    module = load_head(Path(head), dtype=target.dtype, ends=target.ends, after_blocks=published_taps)
    check_fits(module, target.ends, head, target.recipe.path)
    warn_of_another_target(head, target)
    for sentence in position_warnings(module.config, target.config, head):
        warn(sentence)
    if isinstance(module, Eagle3Head):
        taps = module.config.after_blocks
        if max(taps) >= target.num_blocks:
            raise UserError(
                f"{head}: reads the target's states after blocks {taps}, and {target.recipe.path} has "
                f"{target.num_blocks} blocks; give the target it was trained for"
            )
        module.vocabulary.check_ends(end_ids(target), head)
    return module.to(target.device).eval().requires_grad_(False)


def warn_of_another_target(head: str, target: Target) -> None:
    """Warns where a head was trained on a target of the same sizes and other weights: what it drafts is of no use."""
    recorded = head_facts(head).get("target")
    if recorded is None or recorded in fingerprints(target.config, target.ends):
        return
    if target.dtype != torch.float32:  # in fewer digits than the head may have been trained with: look at the files
        text_config, ends = load_ends(target.recipe, torch.float32)
        if recorded in fingerprints(text_config, ends):
            return
    warn(
        f"{head}: was trained on a target with other weights than {target.recipe.path} (fingerprint {recorded}, "
        f"not {target.fingerprint()}); answers stay the target's own, but few drafts will be accepted: give its target"
    )
