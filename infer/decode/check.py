"""Checks that a target decodes losslessly: the logits of drafts against plain forwards."""

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
from aerie.model.target import LARGE, Target, family, only_trains

Form = Literal["tree", "chain"]
MOST_COPIED = 10**9  # parameters of a target that is copied in float32


class Draft(NamedTuple):
    """A draft that is tried: its nodes' parents, and the paths whose logits are compared."""

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
    # once in a process, whatever its size
    if form in target.decodes:
        return CachedLM(target, after_blocks)
    if why := only_trains(target.model.config):
        raise UserError(f"{target.recipe.path}: {why}")
    is_large = target.model.num_parameters() >= LARGE
    # a small target is checked in a moment: there is nothing worth keeping
    record = _record_path(target, form) if is_large else None
    if record is None or not record.is_file():
        _require_lossless(target, form)
        if record is not None:
            with suppress(OSError, UserError):  # no room, no permission
                write_json(record, {"target": target.recipe.path, "decodes": form})
    target.decodes.add(form)
    return CachedLM(target, after_blocks)


def _record_path(target: Target, form: Form) -> Path:
    """Where the result is kept, by all that it depends on."""
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
    # what changes the arithmetic, or this check, makes another file
    return user_cache() / f"{digest(depends_on)}.json"


def _require_lossless(target: Target, form: Form) -> None:
    """UserError if the target, or a stand-in for what is too slow or too narrow, has a fault."""
    fault = _fault(target, form)
    seconds = max(lengths_to_check(target).values(), default=0)
    # a second, narrower look: bfloat16 hides small differences, and long texts take too long
    if fault is None and (target.dtype != torch.float32 or seconds > 1):
        stand_in = _stand_in(target)
        fault = None if stand_in is None else _fault(stand_in, form)
    if fault is not None:
        fix = "heads can be trained and exported for it"
        # a model that ignores the mask but keeps positions still decodes chains
        if form == "tree" and _fault(target, "chain") is None:
            fix = "use a method that drafts a chain (eagle-chain, sps, pld), or vanilla"
        raise UserError(f"{target.recipe.path}: {family(target.model)}: {fault}; {fix}")


def _stand_in(target: Target) -> Target | None:
    """A float32 model of its kind, as narrow dtypes round faults away.

    A small one if possible, for long texts; else a copy.
    """
    with suppress(Exception):
        if small := miniature(target.model.config, target.recipe):
            return small
        if target.dtype != torch.float32 and target.model.num_parameters() <= MOST_COPIED:
            return Target(deepcopy(target.model).float(), target.recipe)
    what = "to try its drafts in float32 and after long texts"
    fault = f"no small model of its kind can be built, {what}"
    advice = "compare its answers with vanilla's: aerie verify"
    warn(f"{target.recipe.path}: {family(target.model)}: {fault}; {advice}")
    return None


@torch.inference_mode()
def _fault(target: Target, form: Form) -> str | None:
    """What is wrong after a short prompt, or near a length where its configuration changes."""
    for length, seconds in lengths_to_check(target).items():
        is_long = length > SHORT
        if is_long and seconds > 1:
            continue
        try:
            error = _difference(target, length, DRAFTS[form])
        except torch.OutOfMemoryError:
            if is_long:  # no fault: shorter texts may fit
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
    """How far the logits of a draft after `length` tokens are from those of plain forwards."""
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
    # the rows of the text, as `generate` leaves them
    lm.prefill(text, kept)
    kept.advance(length)
    drafted: list[Tensor] = []
    plain: list[Tensor] = []
    for _ in range(2):  # the second time after rows were gathered out of order
        step = lm.extend(tokens, depth, mask)
        # the same paths as plain texts, each read from its beginning without a cache
        texts = torch.cat([text.expand(len(paths), -1), tokens[paths]], dim=-1)
        last_hidden = target.features(texts).last_hidden[:, -num_nodes:]
        drafted.append(step.logits[paths])
        plain.append(target.logits(last_hidden))
        # the first path is accepted: the next round starts from rows that were moved
        lm.cache.gather(paths[0])
        kept.advance(num_nodes)
        text = texts[0]
    compared = torch.ones_like(paths, dtype=torch.bool)
    # Rounding is judged by a median, which would hide the few rows that stand apart from their
    # positions. So only those are compared.
    stand_apart = paths != depth[paths]
    if target.dtype != torch.float32 and stand_apart.any():
        compared = stand_apart
    compared = compared.repeat(2, 1)
    return target.difference(torch.cat(drafted)[compared], torch.cat(plain)[compared])
