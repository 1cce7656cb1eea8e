"""Finds the head that a row drafts with, and checks that the head fits the method and the tree.

`source` is where the row was read; errors name it.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from aerie.configs.errors import UserError
from aerie.configs.schema.decode import METHODS, USUAL, MethodConfig, fitted
from aerie.configs.schema.heads import KINDS
from aerie.model.formats.layouts import recognise, tensor_names
from aerie.model.hub import head_directory
from aerie.model.storage import CONFIG, read_json


def kind_at(head: Path | str) -> str:
    """The kind of the head in a directory or on the Hub; UserError if there is no head."""
    path = head_directory(head) / CONFIG
    values: Any = read_json(path)
    config = values if isinstance(values, dict) else {}
    if config.get("aerie_kind") in USUAL:
        return str(config["aerie_kind"])
    try:
        # A published head tells its kind by keys of its config and names of its tensors.
        return recognise(config, tensor_names(path.parent), path)[1]
    except UserError:
        # A causal LM of transformers that is no head is a draft LM.
        endings = ("ForCausalLM", "LMHeadModel")
        classes = config.get("architectures") or []
        is_causal = any(str(name).endswith(endings) for name in classes)
        if is_causal and not {"aerie_kind", "draft_vocab_size"}.intersection(config):
            return "draft_lm"
        raise


def check_kind(method: str, kind: str, source: str) -> None:
    """UserError unless the method drafts with heads of this kind."""
    kinds = METHODS[method].heads
    if not kinds:
        raise UserError(f"{source}: {method} needs no head; leave the head out")
    if kind not in kinds:
        wanted = f"a head of kind {' or '.join(kinds)}, not {kind}"
        fix = f"give another head, or method {USUAL.get(kind, 'vanilla')}"
        raise UserError(f"{source}: {method} drafts with {wanted}; {fix}")


def find_head(
    row: MethodConfig, directory: Path, preferred: str, option: Path | None, source: str
) -> str | None:
    """The row's own head, else `option` if its kind fits, else the run's; None: it needs no head.

    directory: the run's heads, a folder for each kind. preferred: the kind that is looked for
    first.
    """
    kinds = sorted(METHODS[row.method].heads, key=lambda kind: kind != preferred)
    if row.head is not None:
        # If the method takes no head, `check_kind` refuses any kind, so no file is read.
        kind = kind_at(row.head) if kinds else "draft"
        check_kind(row.method, kind, f"{source}: {row.head}")
        return row.head
    if not kinds:
        return None
    # One --head may serve a bench of several methods: rows of other kinds take the run's heads.
    if option is not None and kind_at(option) in kinds:
        return str(option)
    for kind in kinds:
        if (directory / kind / CONFIG).is_file():
            return str(directory / kind)
    # Nothing fits. If a head was given, say why it does not.
    if option is not None:
        check_kind(row.method, kind_at(option), f"{source}: {option}")
    wanted = f"a head of kind {' or '.join(kinds)}"
    fault = f"{row.method} drafts with {wanted}, and {directory / kinds[0]} holds none"
    raise UserError(f"{source}: {fault}; give --head")


def check_levels(row: MethodConfig, head: str | None, source: str) -> MethodConfig:
    """The row with a tree no deeper than its head drafts; see `fitted`."""
    if row.tree is None or head is None:
        return row
    config = read_json(head_directory(head) / CONFIG)
    # Medusa, Hydra and block heads have a module or a row for each level; others have no limit.
    most = KINDS[kind_at(head)].levels_of(config)
    if most is None:
        return row
    return replace(row, tree=fitted(row.tree, row.method, most, f"{source}: tree", head))


def heads_by_kind(heads: Sequence[Path], directory: Path | None) -> dict[str, str]:
    """These heads, and those of the run's directory, by kind; UserError for two of a kind."""
    by_kind: dict[str, str] = {}
    for head in heads:
        kind = kind_at(head)
        if kind in by_kind:
            fault = f"is of kind {kind}, as {by_kind[kind]} is; give one head per kind"
            raise UserError(f"--head {head}: {fault}")
        by_kind[kind] = str(head)
    in_run: dict[str, str] = {}  # in the order of the methods that draft with them
    for published in METHODS.values():
        for kind in published.heads:
            if directory is not None and (directory / kind / CONFIG).is_file():
                in_run[kind] = str(directory / kind)
    # A given head replaces the run's head of its kind.
    return in_run | by_kind
