"""Which head a method drafts with, before anything is loaded."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from infer.choices import sized
from infer.config import MethodConfig, TreeConfig
from infer.methods import METHODS, USUAL, check_kind
from model.config import MULTI_TOKEN
from model.errors import UserError
from model.files import read_json

CONFIG = "config.json"


def kind_at(head: Path | str) -> str:
    """The kind of the head in a directory or a Hub repository; UserError where there is none.

    What is no head of any known layout, and transformers itself would load as a causal LM, is a draft LM.
    """
    place = Path(head)
    if not place.is_dir():
        from model.hub import head_directory  # the Hub's client: only for what is no directory

        place = head_directory(head)
    path = place / CONFIG
    if not path.is_file():
        raise UserError(f"{path}: no such file; train the head with: accelerate launch train/main.py --config RECIPE")
    values: Any = read_json(path)
    declared = values.get("aerie_kind") if isinstance(values, dict) else None
    if declared in USUAL:
        return str(declared)
    from model.checkpoint import kind_of  # torch: only where a head is told by its contents

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
    from model.hub import head_directory

    num_heads = read_json(head_directory(head) / CONFIG).get(
        "num_heads"
    )  # published layouts: told by the weights alone
    levels = sized(tree).levels
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
