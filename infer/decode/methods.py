"""From a method's name and a head's directory to the proposer that drafts with them."""

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
)
from aerie.configs.schema.target_and_head import MULTI_TOKEN
from aerie.infer.decode.calibrator import Calibrate, calibrate_of, unchanged
from aerie.infer.decode.drafters.eagle import EagleDrafter
from aerie.infer.decode.drafters.lm import DraftLMDrafter, load_draft_lm
from aerie.infer.decode.drafters.lookahead import Lookahead
from aerie.infer.decode.drafters.lookup import PromptLookup
from aerie.infer.decode.drafters.multi_token import HydraDrafter, MedusaDrafter
from aerie.infer.decode.sampling import token_ids
from aerie.infer.decode.shape import Drafter, Drafting, Proposer, make_shape
from aerie.model.checkpoint import check_sizes, head_facts, kind_of, load_head, position_warnings
from aerie.model.heads import Head
from aerie.model.heads.eagle import Eagle3Head
from aerie.model.hub import head_directory
from aerie.model.storage import read_json
from aerie.model.target import Target, default_taps, fingerprints, load_vocab

CONFIG = "config.json"
# Makes a drafter of a head (or of a draft LM, which is a Target) for a target, by the head's kind.
DRAFTERS: dict[str, Callable[[Any, Target], Drafter]] = {
    "eagle1": EagleDrafter,
    "eagle3": EagleDrafter,
    "medusa": MedusaDrafter,
    "hydra": HydraDrafter,
    "draft_lm": DraftLMDrafter,
}


def kind_at(head: Path | str) -> str:
    """The kind of the head in a directory or a Hub repository; UserError where there is none.

    What is no head of any known layout, and transformers itself would load as a causal LM, is a draft LM.
    """
    path = (Path(head) if Path(head).is_dir() else head_directory(head)) / CONFIG
    if not path.is_file():
        raise UserError(f"{path}: no such file; train the head with: accelerate launch train/main.py --config RECIPE")
    values: Any = read_json(path)
    # a head of this project says its kind; published layouts are recognised by their keys and weights
    table = values if isinstance(values, dict) else {}
    if table.get("aerie_kind") in USUAL:
        return str(table["aerie_kind"])
    try:
        return kind_of(values, path)
    except UserError:
        causal = any(str(n).endswith(("ForCausalLM", "LMHeadModel")) for n in table.get("architectures") or [])
        if "aerie_kind" not in table and "draft_vocab_size" not in table and causal:
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
        check_kind(asked.method, kind_at(asked.head), f"{place}: {asked.head}")
        return asked.head
    if given is not None and kind_at(given) in kinds:
        return str(given)
    # a run's own heads; a given head of another kind is named only when there is none
    ordered = sorted(kinds, key=lambda kind: kind != preferred)
    for kind in ordered:
        if (heads / kind / CONFIG).is_file():
            return str(heads / kind)
    if given is not None:
        check_kind(asked.method, kind_at(given), f"{place}: {given}")
    raise UserError(
        f"{place}: {asked.method} drafts with a head of kind {' or '.join(kinds)}, and {heads / ordered[0]} "
        f"holds none; train one with: accelerate launch train/main.py --config RECIPE, or give --head"
    )


def check_levels(tree: TreeConfig | None, head: str | None, place: str) -> None:
    """UserError for a tree that is deeper than a head with one module for each future token, as its config says."""
    if tree is not None and head is not None and kind_at(head) in MULTI_TOKEN:
        # a published layout has no num_heads: its weights alone tell
        num_heads = read_json(head_directory(head) / CONFIG).get("num_heads")
        require_heads(tree, num_heads, f"{place}: tree", head)


def require_heads(tree: TreeConfig, num_heads: int | None, place: str, head: str) -> None:
    """UserError for a tree that is deeper than so many heads; null: any depth will do."""
    if num_heads is not None and tree.levels > num_heads:
        static = f"give tree.choices without paths longer than {num_heads}"
        fix = static if tree.shape == "static" else f"set tree.levels to {num_heads}"
        raise UserError(
            f"{place}: is {tree.levels} levels deep, and {head} has {num_heads} heads, one a level; {fix}, or train a "
            f"head with head.num_heads {tree.levels}"
        )


def heads_by_kind(given: Sequence[Path], heads: Path | None) -> dict[str, str]:
    """The directories of the heads that are there by their kind: those given, then a run's under heads/KIND.

    UserError for two given ones of one kind.
    """
    named: dict[str, str] = {}
    for head in given:
        kind = kind_at(head)
        if kind in named:
            raise UserError(f"--head {head}: is of kind {kind}, as {named[kind]} is; give one of each kind")
        named[kind] = str(head)
    kinds = [] if heads is None else dict.fromkeys(kind for method in METHODS.values() for kind in method.heads)
    there = {kind: str(heads / kind) for kind in kinds if heads is not None and (heads / kind / CONFIG).is_file()}
    return {**there, **named}


class Drafters:
    """Loads each head directory once for one target, and makes a drafter of it for every decoder."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self._loaded: dict[str, tuple[str, Any]] = {}

    def of(self, head: str) -> Drafter:
        """A new drafter with the head in a directory or on the Hub."""
        if head not in self._loaded:
            kind = kind_at(head)
            load = load_draft_lm if kind == "draft_lm" else load_head_for
            self._loaded[head] = kind, load(self.target, head)
        kind, module = self._loaded[head]
        return DRAFTERS[kind](module, self.target)


def drafting(drafter: Drafter, tree: TreeConfig, calibrate: Calibrate = unchanged) -> Drafting:
    """A drafter in a tree; UserError when the tree is deeper than a head with a fixed number of levels can draft.

    calibrate is what `tree.calibrated` names; without it the head's own confidence is used (in training, say).
    """
    num_heads = drafter.head.config.num_heads if isinstance(drafter, MedusaDrafter | HydraDrafter) else None
    require_heads(tree, num_heads, "tree", "the head")
    return Drafting(drafter, make_shape(tree, calibrate), 1 if isinstance(drafter, MedusaDrafter) else None)


def make_proposer(drafters: Drafters, asked: MethodConfig, head: str | None, place: str = "method") -> Proposer | None:
    """What drafts for a method as the recipe has it at this place; null: vanilla. head: null where it needs none."""
    match asked.options:
        case PromptLookupConfig() as options:
            return PromptLookup(options)
        case LookaheadConfig() as options:
            return Lookahead(options, getattr(drafters.target.config, "max_position_embeddings", None))
    if asked.tree is None:
        return None
    if head is None:
        raise UserError(f"{place}: {asked.method} needs a head; give --head")
    check_kind(asked.method, kind_at(head), place)
    kind = asked.tree.calibrated
    return drafting(drafters.of(head), asked.tree, calibrate_of(kind, head_directory(head)) if kind else unchanged)


def load_head_for(target: Target, head: str) -> Head:
    """The head in a directory, checked against the target, in its dtype, on the device of its LM head.

    A published EAGLE-3 head that names no taps has the default ones.
    """
    published_taps = default_taps(target.num_blocks) if target.num_blocks >= 7 else None
    module = load_head(head, dtype=target.dtype, vocab=target.vocab, after_blocks=published_taps)
    check_sizes(module.config, target.vocab, head, target.recipe.path)
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
        module.vocabulary.check_ends(sorted(token_ids(target.generation_config.eos_token_id)), head)
    return module.to(target.device).eval().requires_grad_(False)


def warn_of_another_target(head: str, target: Target) -> None:
    """Warns where a head was trained on a target of the same sizes and other weights: what it drafts is of no use."""
    recorded = head_facts(head).get("target")
    if recorded is None or recorded in fingerprints(target.config, target.vocab):
        return
    if target.dtype != torch.float32:  # in fewer digits than the head may have been trained with: look at the files
        text_config, vocab = load_vocab(target.recipe, torch.float32)
        if recorded in fingerprints(text_config, vocab):
            return
    warn(
        f"{head}: was trained on a target with other weights than {target.recipe.path} (fingerprint {recorded}, "
        f"not {target.fingerprint()}); answers stay the target's own, but few drafts will be accepted: give its target"
    )
