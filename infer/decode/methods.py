"""From a method's name and a head's directory to the proposer that drafts with them, and the head's calibrator."""

from collections.abc import Sequence
from dataclasses import field, replace
from pathlib import Path
from typing import Any

import torch
from pydantic import PositiveFloat
from torch import Tensor
from torch.nn import functional as F

from aerie.configs.errors import UserError, warn
from aerie.configs.read import Section, validate
from aerie.configs.schema import decode as schema
from aerie.configs.schema.decode import METHODS, USUAL, Fit, MethodConfig, TreeConfig
from aerie.configs.schema.heads import KINDS, Share
from aerie.configs.schema.recipe import fitted
from aerie.infer.decode.drafters import Lookahead, PromptLookup, load_draft_lm
from aerie.infer.decode.roles import Calibrate, Drafter, Proposer, TreeProposer, unchanged
from aerie.infer.decode.sampling import token_ids
from aerie.infer.decode.shape import make_shape
from aerie.model.checkpoint import check_sizes, head_facts, load_head, position_warnings
from aerie.model.formats.layouts import recognise, tensor_names
from aerie.model.heads import DRAFT_MODELS, Head
from aerie.model.heads.eagle import Eagle3Head
from aerie.model.hub import head_directory
from aerie.model.storage import CALIBRATOR, CONFIG, digests, read_json
from aerie.model.target import Target, context_of, default_taps, other_weights

FLOOR = 1e-4  # no token is impossible because a few held-out prompts never had it


def kind_at(head: Path | str) -> str:
    """The kind of the head in a directory or on the Hub; UserError where there is none."""
    path = head_directory(head) / CONFIG
    values: Any = read_json(path)
    table = values if isinstance(values, dict) else {}
    if table.get("aerie_kind") in USUAL:
        return str(table["aerie_kind"])
    try:
        return recognise(table, tensor_names(path.parent), path)[1]
    except UserError:
        # no head, but a causal LM that transformers loads: a draft LM
        causal = any(
            str(n).endswith(("ForCausalLM", "LMHeadModel"))
            for n in table.get("architectures") or []
        )
        if "aerie_kind" not in table and "draft_vocab_size" not in table and causal:
            return "draft_lm"
        raise


def check_kind(method: str, kind: str, place: str) -> None:
    if not (heads := METHODS[method].heads):
        raise UserError(f"{place}: {method} needs no head; leave it out")
    if kind not in heads:
        fix = f"give another head, or method {USUAL.get(kind, 'vanilla')}"
        raise UserError(
            f"{place}: {method} drafts with a head of kind {' or '.join(heads)}, not {kind}; {fix}"
        )


def find_head(
    asked: MethodConfig, heads: Path, preferred: str, given: Path | None, place: str
) -> str | None:
    """The method's own head, else `given` where its kind fits, else a run's; None: it needs no head."""
    kinds = sorted(METHODS[asked.method].heads, key=lambda kind: kind != preferred)
    if asked.head is not None:
        check_kind(
            asked.method, kind_at(asked.head) if kinds else "draft", f"{place}: {asked.head}"
        )
    if asked.head is not None or not kinds:
        return asked.head
    if given is not None and kind_at(given) in kinds:
        return str(given)
    for kind in kinds:
        if (heads / kind / CONFIG).is_file():
            return str(heads / kind)
    if given is not None:
        check_kind(asked.method, kind_at(given), f"{place}: {given}")
    needed = f"a head of kind {' or '.join(kinds)}"
    raise UserError(
        f"{place}: {asked.method} drafts with {needed}, and {heads / kinds[0]} holds none; give --head"
    )


def check_levels(asked: MethodConfig, head: str | None, place: str) -> MethodConfig:
    """asked, with its tree `fitted` to its head."""
    if asked.tree is None or head is None:
        return asked
    most = (
        KINDS[kind_at(head)].levels_of(read_json(head_directory(head) / CONFIG))
        or asked.tree.levels
    )
    return replace(asked, tree=fitted(asked.tree, asked.method, most, f"{place}: tree", head))


def heads_by_kind(given: Sequence[Path], heads: Path | None) -> dict[str, str]:
    """The heads given (UserError for two of a kind), and a run's, by kind."""
    named: dict[str, str] = {}
    for head in given:
        kind = kind_at(head)
        if kind in named:
            raise UserError(
                f"--head {head}: is of kind {kind}, as {named[kind]} is; give one head per kind"
            )
        named[kind] = str(head)
    kinds = dict.fromkeys(kind for method in METHODS.values() for kind in method.heads)
    return {
        kind: str(heads / kind) for kind in kinds if heads and (heads / kind / CONFIG).is_file()
    } | named


class LoadedHeads:
    def __init__(self, target: Target) -> None:
        self.target = target
        self._loaded: dict[str, tuple[str, Any]] = {}

    def of(self, head: str) -> Drafter:
        # a head is loaded once, and each decoder has a drafter of its own
        if head not in self._loaded:
            kind = kind_at(head)
            load = load_draft_lm if kind == "draft_lm" else load_head_for
            self._loaded[head] = kind, load(self.target, head)
        kind, module = self._loaded[head]
        drafter: Drafter = DRAFT_MODELS[kind].drafter(module, self.target)
        return drafter


def tree_proposer(
    drafter: Drafter, tree: TreeConfig, calibrate: Calibrate = unchanged, method: str = ""
) -> TreeProposer:
    tree = fitted(tree, method, drafter.max_levels, "tree", "the head")
    return TreeProposer(drafter, make_shape(tree, calibrate))


def make_proposer(drafters: LoadedHeads, asked: MethodConfig, head: str | None) -> Proposer | None:
    """The method's proposer (None: vanilla); head: from `find_head`."""
    options, tree = asked.options, asked.tree
    if isinstance(options, schema.LookaheadConfig):
        target = drafters.target  # no passenger may switch LongRoPE's factors
        return Lookahead(options, target.rope_switch or context_of(target.config))
    if options is not None:
        return PromptLookup(options)
    if tree is None:
        return None
    assert head is not None
    return tree_proposer(drafters.of(head), tree, calibrate_of(tree.calibrated, head), asked.method)


def load_head_for(target: Target, head: str) -> Head:
    """The head in the target's dtype, on the device of its LM head; UserError where it does not fit the target."""
    # a published EAGLE-3 head may name no taps
    module = load_head(
        head, dtype=target.dtype, vocab=target.vocab, after_blocks=default_taps(target.num_blocks)
    )
    check_sizes(module.config, target.vocab, head, target.recipe.path, target.config)
    for sentence in position_warnings(module.config, target.config, head):
        warn(sentence)
    taps = getattr(module.config, "after_blocks", ())
    if max(taps, default=0) >= target.num_blocks:
        where = f"{target.recipe.path} has {target.num_blocks} blocks"
        raise UserError(
            f"{head}: reads the target's states after blocks {taps}, and {where}; give its target"
        )
    if isinstance(module, Eagle3Head):
        module.vocabulary.check_ends(sorted(token_ids(target.generation_config.eos_token_id)), head)
    if other := other_weights(
        head_facts(head).get("target"), target.recipe, target.config, target.vocab
    ):
        warn(f"{head}: {other}; few drafts will fit: give its target")
    return module.to(target.device).eval().requires_grad_(False)


class Calibrator(Section):
    """Two monotone fits of acceptance to confidence."""

    temperature: PositiveFloat  # of sigmoid(logit(c) / temperature)
    confidence: tuple[Share, ...]  # the knots' places, ascending
    acceptance: tuple[Share, ...]  # their heights, never falling
    decoded_at: float = 0.0  # temperature of the decoding that it was fitted on
    head: dict[str, str] = field(default_factory=dict)  # digests of the head's files
    scores: dict[str, Any] = field(default_factory=dict)  # on prompts that it was not fitted on

    def __post_init__(self) -> None:
        knots = (self.confidence, self.acceptance)
        if len(knots[0]) != len(knots[1]) or any(
            list(values) != sorted(values) for values in knots
        ):
            raise ValueError("confidence and acceptance must have one length and ascend")

    def map(self, kind: Fit) -> Calibrate:
        knots = torch.tensor([self.confidence, self.acceptance])  # [2, K]
        if kind == "temperature":
            # logit(c) is +inf at c = 1
            return lambda log_q: F.logsigmoid(
                (log_q - torch.log1p(-log_q.exp().clamp(max=1.0))) / self.temperature
            )

        def isotonic(log_q: Tensor) -> Tensor:
            nonlocal knots
            knots = knots.to(log_q.device)
            # linear between the knots, level outside
            (places, heights), q = knots, log_q.exp()
            right = torch.searchsorted(places, q.contiguous()).clamp(max=places.shape[0] - 1)
            left = (right - 1).clamp(min=0)
            width = (places[right] - places[left]).clamp(min=torch.finfo(places.dtype).tiny)
            share = ((q - places[left]) / width).clamp(0.0, 1.0)
            mapped = torch.lerp(heights[left], heights[right], share).clamp(min=FLOOR).log()
            return torch.where(log_q == float("-inf"), log_q, mapped)

        return isotonic


def load_calibrator(head: Path) -> Calibrator:
    """UserError where there is no calibrator beside the head, or where it was fitted for other weights."""
    path, fix = head / CALIBRATOR, "fit it with: aerie calibrate --config RECIPE"
    if not path.is_file():
        raise UserError(f"{path}: no such file, and tree.calibrated needs it; {fix}")
    calibrator = validate(read_json(path), Calibrator, str(path), {})
    if calibrator.head != digests(head):
        raise UserError(f"{path}: was fitted for other weights than those beside it; {fix}")
    return calibrator


def calibrate_of(kind: Fit | None, head: str) -> Calibrate:
    return unchanged if kind is None else load_calibrator(head_directory(head)).map(kind)
