"""Checks that a target decodes losslessly: its logits of a draft's nodes against plain forwards of each path."""

from contextlib import suppress
from copy import deepcopy
from importlib.metadata import version
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from aerie.configs.errors import UserError, warn
from aerie.infer.decode.cached_lm import CachedLM
from aerie.infer.decode.tree import Tree, ancestors
from aerie.model.kv_cache import KeptRows
from aerie.model.miniature import SHORT, lengths_to_check, miniature
from aerie.model.storage import digest, file_digest, first_line, user_cache, write_json
from aerie.model.target import LARGE, Target, family, only_trains

Form = Literal["tree", "chain"]
COPIED = 10**9  # the most parameters of a target that is copied in float32
# Parents and paths. The tree's last rows are far from their depths: a model that takes rows for positions fails there.
FORMS: dict[Form, tuple[list[int], list[list[int]]]] = {
    "tree": ([0] * 13 + [12, 1], [[0, 12, 13], [0, 1, 14]]),
    "chain": ([0, 0, 1, 2], [[0, 1, 2, 3]]),
}


def checked_lm(target: Target, after_blocks: tuple[int, ...] = (), form: Form = "tree") -> CachedLM:
    """The target with its cache. UserError if drafts of this form are not lossless; a large target is checked once."""
    if form not in target.decodes:
        if why := only_trains(target.model.config):
            raise UserError(f"{target.recipe.path}: {why}")
        done = None
        if target.model.num_parameters() >= LARGE:
            code = [
                file_digest(Path(__file__).with_name(name)) for name in ("cache.py", "check.py")
            ]
            libraries = [
                version("torch"),
                version("transformers"),
                target.config._attn_implementation,
            ]
            where = [str(target.dtype), target.device.type, target.config.to_diff_dict()]
            done = (
                user_cache()
                / f"{digest([form, target.fingerprint(), *where, *libraries, *code])}.json"
            )
        if done is None or not done.is_file():
            is_all = (
                target.dtype == torch.float32
                and max(lengths_to_check(target).values(), default=0) <= 1
            )
            stand_in = None if is_all else _stand_in(target)
            if fault := _fault(target, form) or (stand_in and _fault(stand_in, form)):
                fix = "heads can be trained and exported for it"
                if form == "tree" and _fault(target, "chain") is None:
                    fix = "use a method that drafts a chain (eagle-chain, sps, pld), or vanilla"
                raise UserError(f"{target.recipe.path}: {family(target.model)}: {fault}; {fix}")
            if done is not None:
                with suppress(OSError, UserError):  # no room, no permission
                    write_json(done, {"target": target.recipe.path, "decodes": form})
        target.decodes.add(form)
    return CachedLM(target, after_blocks)


def _stand_in(target: Target) -> Target | None:
    """A float32 model of its kind, as narrow dtypes round faults away; a small one if possible, for long texts."""
    with suppress(Exception):
        if small := miniature(target.model.config, target.recipe):
            return small
        if target.dtype != torch.float32 and target.model.num_parameters() <= COPIED:
            return Target(deepcopy(target.model).float(), target.recipe)
    what = (
        "no small model of its kind can be built, to try its drafts in float32 and after long texts"
    )
    warn(
        f"{target.recipe.path}: {family(target.model)}: {what}; compare its answers with vanilla's: aerie verify"
    )
    return None


@torch.inference_mode()
def _fault(target: Target, form: Form) -> str | None:
    """What is wrong after a short prompt, or near a length at which the configuration names a change; or None."""
    for length, seconds in lengths_to_check(target).items():
        is_long = length > SHORT
        if is_long and seconds > 1:
            continue
        try:
            error = _difference(target, length, *map(torch.tensor, FORMS[form]))
        except torch.OutOfMemoryError:
            if is_long:  # no fault: shorter texts may fit
                return None
            raise
        except Exception as stumbled:  # the family's forwards may fail in any way
            return f"its forward fails on a draft {form} ({type(stumbled).__name__}: {first_line(stumbled)})"
        if error is not None:
            what = f"its logits for a draft {form} after {length} tokens differ by {error:.2g} from those of its paths"
            return f"{what}; decoding would not be lossless"
    return None


def _difference(target: Target, length: int, parents: Tensor, paths: Tensor) -> float | None:
    lm, rows, count = CachedLM(target), target.vocab.embedding.shape[0], len(parents)
    ids = torch.randint(rows, (length + count,), generator=torch.Generator().manual_seed(0)).to(
        target.device
    )
    known, tokens = ids[:length], ids[length:]
    parents, paths = parents.to(target.device), paths.to(target.device)
    levels, zeros = paths.shape[1] - 1, torch.zeros(count, device=target.device)
    mask = ancestors(parents, levels)
    tree = Tree(tokens, parents, mask.sum(-1) - 1, mask, zeros, zeros, levels, levels)
    ours, theirs = list[Tensor](), list[Tensor]()
    lm.prefill(
        known, kept := KeptRows(length + paths.shape[1] + count, target.device, target.dtype)
    )
    kept.advance(length)
    for _ in range(2):  # the second time after rows were gathered out of order
        step = lm.extend(tree.tokens, tree.depth, tree.mask)
        texts = torch.cat([known.expand(len(paths), -1), tokens[paths]], dim=-1)
        ours.append(step.logits[paths])
        theirs.append(target.logits(target.features(texts).last_hidden[:, -paths.shape[1] :]))
        lm.cache.gather(paths[0])
        kept.advance(len(paths[0]))
        known = texts[0]
    some = torch.ones_like(paths, dtype=torch.bool)
    if target.dtype != torch.float32 and (apart := paths != mask.sum(-1)[paths] - 1).any():
        some = apart  # a median would hide the few rows that stand apart from their positions
    some = some.repeat(2, 1)
    return target.difference(torch.cat(ours)[some], torch.cat(theirs)[some])
