"""Checks that a target decodes losslessly: compares logits of drafts with plain forwards."""

from contextlib import suppress
from copy import deepcopy
from importlib.metadata import version
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from aerie.configs.errors import UserError, warn
from aerie.infer.decode.cached_lm import CachedLM
from aerie.infer.decode.tree import ancestors
from aerie.model.kv_cache import KeptRows
from aerie.model.miniature import SHORT, lengths_to_check, miniature
from aerie.model.storage import digest, file_digest, first_line, user_cache, write_json
from aerie.model.target import LARGE, Target, family
from aerie.model.target_files import only_trains

Form = Literal["tree", "chain"]
MOST_COPIED = 10**9  # parameters; a larger target is not copied in float32


class Draft(NamedTuple):
    """A draft to try: its nodes' parents, and the paths of nodes whose logits are compared."""

    parents: list[int]
    paths: list[list[int]]


# The tree's last rows are far from their depths: a model that takes rows for positions fails there.
DRAFTS: dict[Form, Draft] = {
    "tree": Draft([0] * 13 + [12, 1], [[0, 12, 13], [0, 1, 14]]),
    "chain": Draft([0, 0, 1, 2], [[0, 1, 2, 3]]),
}


def checked_lm(target: Target, after_blocks: tuple[int, ...] = (), form: Form = "tree") -> CachedLM:
    """The target with its cache.

    UserError if drafts of this form are not lossless. A large target is checked once, and the
    result is kept in the user's cache.
    """
    # once in a process, whatever the size
    if form in target.decodes:
        return CachedLM(target, after_blocks)
    if why := only_trains(target.model.config):
        raise UserError(f"{target.recipe.path}: {why}")
    is_large = target.model.num_parameters() >= LARGE
    # The check of a small target takes a moment, so its result is not kept.
    record = _record_path(target, form) if is_large else None
    if record is None or not record.is_file():
        _require_lossless(target, form)
        if record is not None:
            with suppress(OSError, UserError):  # no room, no permission
                write_json(record, {"target": target.recipe.path, "decodes": form})
    target.decodes.add(form)
    return CachedLM(target, after_blocks)


def _record_path(target: Target, form: Form) -> Path:
    """The file that keeps the result; its name is a digest of all that the result depends on."""
    here = Path(__file__)
    depends_on = [
        form,
        target.fingerprint(),
        str(target.dtype),
        target.device.type,
        target.config.to_diff_dict(),
        version("torch"),
        version("transformers"),
        target.config._attn_implementation,
        *(file_digest(here.with_name(name)) for name in ("cached_lm.py", "check.py")),
    ]
    return user_cache() / f"{digest(depends_on)}.json"


def _require_lossless(target: Target, form: Form) -> None:
    """UserError if drafts of this form give the target, or its stand-in, other logits."""
    fault = _fault(target, form)
    seconds = max(lengths_to_check(target).values(), default=0)
    # A second look at a stand-in: narrow dtypes hide small differences, and long texts take too
    # long.
    if fault is None and (target.dtype != torch.float32 or seconds > 1):
        stand_in = _stand_in(target)
        fault = None if stand_in is None else _fault(stand_in, form)
    if fault is not None:
        fix = "aerie trains and exports heads for it, but does not decode with it"
        # A model that ignores the mask but takes positions still decodes chains.
        if form == "tree" and _fault(target, "chain") is None:
            fix = "use a method that drafts a chain (eagle-chain, sps, pld), or vanilla"
        raise UserError(f"{target.recipe.path}: {family(target.model)}: {fault}; {fix}")


def _stand_in(target: Target) -> Target | None:
    """A small float32 model of the target's kind, else a float32 copy; None if both fail."""
    with suppress(Exception):
        if small := miniature(target.model.config, target.recipe):
            return small
        if target.dtype != torch.float32 and target.model.num_parameters() <= MOST_COPIED:
            return Target(deepcopy(target.model).float(), target.recipe)
    untried = "so its drafts were not tried in float32 and after long texts"
    fault = f"no small model of its kind can be built, {untried}"
    advice = "compare its answers with vanilla's: aerie verify"
    warn(f"{target.recipe.path}: {family(target.model)}: {fault}; {advice}")
    return None


@torch.inference_mode()
def _fault(target: Target, form: Form) -> str | None:
    """What is wrong with drafts after a short prompt, or near a limit of the configuration."""
    for length, seconds in lengths_to_check(target).items():
        is_long = length > SHORT
        if is_long and seconds > 1:
            continue
        try:
            error = _difference(target, length, DRAFTS[form])
        except torch.OutOfMemoryError:
            if is_long:  # no fault of the model, which may have room for shorter texts
                return None
            raise
        except Exception as raised:  # the family's forwards may fail in any way
            why = f"{type(raised).__name__}: {first_line(raised)}"
            return f"its forward fails on a draft {form} ({why})"
        if error is not None:
            return (
                f"its logits for a draft {form} after {length} tokens differ by {error:.2g} from "
                "those of its paths; decoding would not be lossless"
            )
    return None


def _difference(target: Target, length: int, draft: Draft) -> float | None:
    """How far the logits of a draft after `length` tokens are from plain forwards (None: not)."""
    lm = CachedLM(target)
    device = target.device
    parents = torch.tensor(draft.parents, device=device)  # [N]
    paths = torch.tensor(draft.paths, device=device)  # [paths, depth + 1] nodes
    count = len(parents)
    num_nodes = paths.shape[1]
    dice = torch.Generator().manual_seed(0)
    ids = torch.randint(target.vocab.embedding.shape[0], (length + count,), generator=dice)
    text, tokens = ids.to(device).split([length, count])
    mask = ancestors(parents, num_nodes - 1)  # [N, N]
    depth = mask.sum(-1) - 1
    kept = KeptRows(length + num_nodes + count, device, target.dtype)
    # the text's rows, as `generate` makes them
    lm.prefill(text, kept)
    kept.advance(length)
    drafted: list[Tensor] = []
    plain: list[Tensor] = []
    for _ in range(2):  # the second time after rows were moved
        step = lm.extend(tokens, depth, mask)
        # The same paths as plain texts: one forward reads each from its beginning, without a cache.
        texts = torch.cat([text.expand(len(paths), -1), tokens[paths]], dim=-1)
        last_hidden = target.features(texts).last_hidden[:, -num_nodes:]
        drafted.append(step.logits[paths])
        plain.append(target.logits(last_hidden))
        # The first path is accepted, which moves its rows.
        lm.cache.gather(paths[0])
        kept.advance(num_nodes)
        text = texts[0]
    compared = torch.ones_like(paths, dtype=torch.bool)
    # In narrow dtypes `difference` takes a median, which would hide faults of the few nodes whose
    # row is not their depth. So only these nodes are compared.
    stand_apart = paths != depth[paths]
    if target.dtype != torch.float32 and stand_apart.any():
        compared = stand_apart
    compared = compared.repeat(2, 1)
    return target.difference(torch.cat(drafted)[compared], torch.cat(plain)[compared])
