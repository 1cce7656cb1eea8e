"""Which head a method drafts with, before anything is loaded."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from aerie.configs.errors import UserError, warn
from aerie.configs.schema.decode import (
    METHODS,
    USUAL,
    LookaheadConfig,
    MethodConfig,
    PromptLookupConfig,
    TreeConfig,
    check_kind,
    published_tree,
)
from aerie.configs.schema.target_and_head import MULTI_TOKEN
from aerie.infer.decode.calibrator import Calibrate, calibrate_of, unchanged
from aerie.infer.decode.drafters.eagle import EagleDrafter
from aerie.infer.decode.drafters.lm import DraftLMDrafter, load_draft_lm
from aerie.infer.decode.drafters.lookahead import Lookahead
from aerie.infer.decode.drafters.lookup import PromptLookup
from aerie.infer.decode.drafters.multi_token import HydraDrafter, MedusaDrafter, check_level
from aerie.infer.decode.engine import SpeculativeDecoder, end_ids
from aerie.infer.decode.proposer import CachedDrafter, Drafting, Proposer
from aerie.infer.decode.shape import make_shape
from aerie.model.checkpoint import check_sizes, head_facts, load_head, position_warnings
from aerie.model.heads import Head
from aerie.model.heads.eagle import Eagle3Head
from aerie.model.heads.multi_token import HydraHead, MedusaHead
from aerie.model.hub import head_directory
from aerie.model.storage import read_json
from aerie.model.target import Target, default_taps, fingerprints, load_ends

CONFIG = "config.json"


def kind_at(head: Path | str) -> str:
    """The kind of the head in a directory or a Hub repository; UserError where there is none.

    What is no head of any known layout, and transformers itself would load as a causal LM, is a draft LM.
    """
    place = Path(head)
    if not place.is_dir():
        from aerie.model.hub import head_directory

        place = head_directory(head)
    path = place / CONFIG
    if not path.is_file():
        raise UserError(f"{path}: no such file; train the head with: accelerate launch train/main.py --config RECIPE")
    values: Any = read_json(path)
    declared = values.get("aerie_kind") if isinstance(values, dict) else None
    if declared in USUAL:
        return str(declared)
    from aerie.model.checkpoint import kind_of

    try:
        return kind_of(values, path)
    except UserError:
        if declared is None and isinstance(values, dict) and _is_causal_lm(values):
            return "draft_lm"
        raise


def find_head(asked: MethodConfig, heads: Path, preferred: str, given: Path | None, place: str) -> str | None:
    """The head of a method: its own, else `given` where its kind fits, else a run's under heads/KIND; null: needs none.

    Of two kinds that fit, the preferred one comes first. UserError, naming the place in the recipe, when none is there.
    """
    kinds = METHODS[asked.method].heads
    if not kinds:
        if asked.head is not None:
            check_kind(asked.method, "draft", place)
        return None
    if asked.head is not None:
        check_kind(asked.method, kind_at(Path(asked.head)), f"{place}: {asked.head}")
        return asked.head
    if given is not None and kind_at(given) in kinds:
        return str(given)
    ordered = sorted(kinds, key=lambda kind: kind != preferred)
    found = next((heads / kind for kind in ordered if (heads / kind / CONFIG).is_file()), None)
    if found is not None:
        return str(found)
    if given is not None:
        check_kind(asked.method, kind_at(given), f"{place}: {given}")
    raise UserError(
        f"{place}: {asked.method} drafts with a head of kind {' or '.join(kinds)}, and {heads / ordered[0]} "
        f"holds none; train one with: accelerate launch train/main.py --config RECIPE, or give --head"
    )


def check_levels(tree: TreeConfig | None, head: str | None, place: str) -> None:
    """UserError for a tree that is deeper than a head with one module for each future token, as its config says."""
    if tree is None or head is None or kind_at(head) not in MULTI_TOKEN:
        return
    from aerie.model.hub import head_directory

    num_heads = read_json(head_directory(head) / CONFIG).get(
        "num_heads"
    )  # published layouts: told by the weights alone
    levels = tree.levels
    if num_heads is not None and levels > num_heads:
        static = f"give tree.choices without paths longer than {num_heads}"
        fix = static if tree.shape == "static" else f"set tree.levels to {num_heads}"
        raise UserError(
            f"{place}: tree: is {levels} levels deep, and {head} has {num_heads} heads, one a level; {fix}, or train a "
            f"head with head.num_heads {levels}"
        )


def heads_by_kind(given: Sequence[Path], heads: Path | None) -> dict[str, str]:
    """The directories of the heads that are there by their kind: those given, then a run's under heads/KIND.

    UserError for two given ones of one kind.
    """
    found: dict[str, str] = {}
    for head in given:
        kind = kind_at(head)
        if kind in found:
            raise UserError(f"--head {head}: is of kind {kind}, as {found[kind]} is; give one of each kind")
        found[kind] = str(head)
    if heads is not None:
        kinds = dict.fromkeys(kind for published in METHODS.values() for kind in published.heads)
        there = {kind: str(heads / kind) for kind in kinds if (heads / kind / CONFIG).is_file()}
        found = {**there, **found}
    return found


def _is_causal_lm(values: dict[str, Any]) -> bool:
    names = values.get("architectures") or []
    return (
        any(str(name).endswith(("ForCausalLM", "LMHeadModel")) for name in names) and "draft_vocab_size" not in values
    )


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
    target, tree = drafters.target, asked.tree
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
    tree = tree or published_tree(USUAL[kind_at(Path(head))])
    assert tree is not None
    calibrate = calibrate_of(tree.calibrated, head_directory(head)) if tree.calibrated else unchanged
    return SpeculativeDecoder(target, drafting(Drafters(target).of(head), tree, calibrate))


def drafting(drafter: CachedDrafter, tree: TreeConfig, calibrate: Calibrate = unchanged) -> Drafting:
    """A drafter in a tree; UserError when the tree is deeper than a head with a fixed number of levels can draft.

    calibrate is what `tree.calibrated` names; without it the head's own confidence is used (in training, say).
    """
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
    check_sizes(module.config, target.ends, head, target.recipe.path)
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
