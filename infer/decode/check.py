"""Whether a target decodes losslessly: its logits of a draft's nodes against plain forwards of each path."""

from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from aerie.configs.errors import UserError
from aerie.infer.decode.cache import CachedLM
from aerie.infer.decode.tree import Tree, ancestors
from aerie.model.miniature import miniature
from aerie.model.storage import digest, file_digest, first_line, user_cache, write_json
from aerie.model.target import LARGE, Target, context_of, family, only_trains

Form = Literal["tree", "chain"]
SHORT = 16  # tokens of a prompt
SPEED = {"cpu": 2e10, "cuda": 1e15}  # operations in the second that a check beside a limit may take
# Parents and paths. The tree's second path stands many rows behind its siblings: whatever counts rows is far off there.
FORMS: dict[Form, tuple[list[int], list[list[int]]]] = {
    "tree": ([0] * 13 + [12, 1], [[0, 12, 13], [0, 1, 14]]),
    "chain": ([0, 0, 1, 2], [[0, 1, 2, 3]]),
}


def checked_lm(target: Target, after_blocks: tuple[int, ...] = (), form: Form = "tree") -> CachedLM:
    """UserError, by the family's name, where drafts of that form are not lossless; a large target is checked once."""
    if form not in target.decodes:
        if why := only_trains(target.model.config):
            raise UserError(f"{target.recipe.path}: {why}")
        done = None
        if target.model.num_parameters() >= LARGE:
            code = [file_digest(Path(__file__).with_name(name)) for name in ("cache.py", "check.py")]
            libraries = [version("torch"), version("transformers"), target.config._attn_implementation]
            where = [str(target.dtype), target.device.type, target.config.to_diff_dict()]
            done = user_cache() / f"{digest([form, target.fingerprint(), *where, *libraries, *code])}.json"
        if done is None or not done.is_file():
            # a narrow dtype's rounding could hide what float32 shows, and a large target's long texts take too long
            is_all = target.dtype == torch.float32 and all(seconds <= 1 for seconds in _lengths(target).values())
            small = None if is_all else miniature(target.model.config, target.recipe)
            if fault := _fault(target, form) or (small and _fault(small, form)):
                fix = "heads can be trained and exported for it"
                if form == "tree" and _fault(target, "chain") is None:
                    fix = "use a method that drafts a chain (eagle-chain, sps, pld), or vanilla"
                raise UserError(f"{target.recipe.path}: {family(target.model)}: {fault}; {fix}")
            if done is not None:
                with suppress(OSError, UserError):  # no room, no permission
                    write_json(done, {"target": target.recipe.path, "decodes": form})
        target.decodes.add(form)
    return CachedLM(target, after_blocks)


@torch.inference_mode()
def _fault(target: Target, form: Form) -> str | None:
    """What is wrong, after a short prompt or beside a length at which the configuration names a change."""
    for length, seconds in _lengths(target).items():
        is_long = length > SHORT
        if is_long and seconds > 1:
            continue
        try:
            error = _difference(target, length, *map(torch.tensor, FORMS[form]))
        except torch.OutOfMemoryError:
            if is_long:  # shorter texts may fit
                return None
            raise
        except Exception as stumbled:  # whatever forwards of the family cannot do
            return f"its forward fails on a draft {form} ({type(stumbled).__name__}: {first_line(stumbled)})"
        if error is not None:
            what = f"its logits for a draft {form} after {length} tokens differ by {error:.2g} from those of its paths"
            return f"{what}; decoding would not be lossless"
    return None


def _lengths(target: Target) -> dict[int, float]:
    """Of the texts to check, and about how many seconds each takes."""
    room, cost = (context_of(target.config) or 2**31) - 8, 10 * target.model.num_parameters()  # operations a token
    beside = {limit - 2 for limit in _windows(target.config.to_dict())} | {(target.rope_switch or 2**31) + 8}
    lengths = sorted(length for length in {min(SHORT, room), *beside} if 0 < length <= room)
    return {length: cost * length / SPEED.get(target.device.type, 1e15) for length in lengths}


def _windows(values: dict[str, object]) -> set[int]:
    """The lengths that a configuration gives windows and chunks."""
    found = set[int]()
    for key, value in values.items():
        if isinstance(value, dict):
            found |= _windows(value)
        elif isinstance(value, int) and value > 8 and ("window" in key or "chunk" in key):
            found.add(value)
    return found


def _difference(target: Target, length: int, parents: Tensor, paths: Tensor) -> float | None:
    lm, rows, count = CachedLM(target), target.vocab.embedding.shape[0], len(parents)
    ids = torch.randint(rows, (length + count,), generator=torch.Generator().manual_seed(0)).to(target.device)
    known, tokens = ids[:length], ids[length:]
    parents, paths = parents.to(target.device), paths.to(target.device)
    levels, zeros = paths.shape[1] - 1, torch.zeros(count, device=target.device)
    mask = ancestors(parents, levels)
    tree = Tree(tokens, parents, mask.sum(-1) - 1, mask, zeros, zeros, levels, levels)
    ours, theirs = list[Tensor](), list[Tensor]()
    lm.prefill(known, length + paths.shape[1] + count)
    for _ in range(2):  # the second time after rows were gathered out of order
        step = lm.extend(tree)
        texts = torch.cat([known.expand(len(paths), -1), tokens[paths]], dim=-1)
        ours.append(step.logits[paths])
        theirs.append(target.logits(target.features(texts).last_hidden[:, -paths.shape[1] :]))
        lm.keep(paths[0].tolist())
        known = texts[0]
    return target.difference(torch.cat(ours), torch.cat(theirs))
