"""Which head a row drafts with: the kind of a directory, and whether it fits method and tree.

`source` is where a row was read, as errors name it.
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
    """The kind of the head in a directory or on the Hub; UserError where there is none."""
    path = head_directory(head) / CONFIG
    values: Any = read_json(path)
    config = values if isinstance(values, dict) else {}
    if config.get("aerie_kind") in USUAL:
        return str(config["aerie_kind"])
    try:
        # a published head says its kind by the names and shapes of its tensors
        return recognise(config, tensor_names(path.parent), path)[1]
    except UserError:
        # no head, but a causal LM that transformers loads: a draft LM
        endings = ("ForCausalLM", "LMHeadModel")
        classes = config.get("architectures") or []
        is_causal = any(str(name).endswith(endings) for name in classes)
        if is_causal and not {"aerie_kind", "draft_vocab_size"}.intersection(config):
            return "draft_lm"
        raise


def check_kind(method: str, kind: str, source: str) -> None:
    kinds = METHODS[method].heads
    if not kinds:
        raise UserError(f"{source}: {method} needs no head; leave it out")
    if kind not in kinds:
        wanted = f"a head of kind {' or '.join(kinds)}, not {kind}"
        fix = f"give another head, or method {USUAL.get(kind, 'vanilla')}"
        raise UserError(f"{source}: {method} drafts with {wanted}; {fix}")


def find_head(
    row: MethodConfig, directory: Path, preferred: str, option: Path | None, source: str
) -> str | None:
    """The row's own head, else `option` if its kind fits, else a run's; None: it needs no head.

    directory: of a run's heads, a folder for each kind, of which the preferred one comes first.
    """
    kinds = sorted(METHODS[row.method].heads, key=lambda kind: kind != preferred)
    if row.head is not None:
        # of a method without heads none is read; check_kind refuses it whatever it is
        kind = kind_at(row.head) if kinds else "draft"
        check_kind(row.method, kind, f"{source}: {row.head}")
        return row.head
    if not kinds:
        return None
    # one --head serves a bench of several methods: rows of other kinds take the run's
    if option is not None and kind_at(option) in kinds:
        return str(option)
    for kind in kinds:
        if (directory / kind / CONFIG).is_file():
            return str(directory / kind)
    # nothing else fits: say what is wrong with the head that was given
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
    # Medusa, Hydra and block heads have a module or a row for each level; others have no limit
    most = KINDS[kind_at(head)].levels_of(config)
    if most is None:
        return row
    return replace(row, tree=fitted(row.tree, row.method, most, f"{source}: tree", head))


def heads_by_kind(heads: Sequence[Path], directory: Path | None) -> dict[str, str]:
    """These heads, and those of a run's directory, by kind; UserError for two of a kind."""
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
    # a head that was given stands in for the run's of its kind
    return in_run | by_kind
