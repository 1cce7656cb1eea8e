"""The command `verify`: its options, what it would prove, and the table and exit code of what it proved."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from infer.config import Method, MethodConfig, PromptsConfig
from infer.methods import METHODS
from infer.proof import ALPHA, Proof, rows_of, table
from infer.quiet import prepare
from model.config import TargetConfig
from model.errors import UserError
from model.files import write_json

MIN_DRAWS = 200  # fewer leave the law hardly a cell to be wrong in


@dataclass(frozen=True)
class Options:
    """What is proven, and how thoroughly."""

    methods: tuple[Method, ...]
    prompts: int
    draws: int
    seed: int
    json: Path | None
    plan: bool


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of `verify` beside those of every command."""
    parser.add_argument("--head", type=Path, action="append", default=[], help="a head directory; one of each kind")
    parser.add_argument("--methods", default=",".join(METHODS), help="eagle2,sps,...; default: all")
    parser.add_argument("--prompts", type=int, default=20, help="prompts answered greedily (default 20)")
    parser.add_argument("--draws", type=int, default=2000, help="sampled answers for each p-value (default 2000)")
    parser.add_argument("--seed", type=int, default=0, help="of the sampled answers")
    parser.add_argument("--json", type=Path, help="write what was found to this file too")


def options_of(arguments: argparse.Namespace) -> Options:
    """The options as given; UserError for one that proves nothing."""
    names = [name.strip() for name in arguments.methods.split(",") if name.strip()]
    foreign = [name for name in names if name not in METHODS]
    if foreign or not names:
        wrong = foreign[0] if foreign else "nothing"
        raise UserError(f"--methods {arguments.methods}: {wrong} is no method; methods are {', '.join(METHODS)}")
    if arguments.prompts < 1:
        raise UserError(f"--prompts {arguments.prompts}: at least one prompt is needed")
    if arguments.draws < MIN_DRAWS:
        raise UserError(f"--draws {arguments.draws}: at least {MIN_DRAWS} are needed to tell a law from another")
    methods = cast(tuple[Method, ...], tuple(dict.fromkeys(names)))
    return Options(methods, arguments.prompts, arguments.draws, arguments.seed, arguments.json, arguments.plan)


def demonstrate(
    options: Options,
    target: TargetConfig,
    heads: dict[str, str],
    prompts: PromptsConfig | None = None,
    others: Sequence[MethodConfig] = (),
    threads: int | None = None,
) -> int:
    """Proves, prints and writes what was asked for; 1 when any row fails, else 0.

    heads: directories by kind. prompts: where they come from, null: questions of its own. others: a recipe's rows.
    """
    rows = rows_of(options.methods, heads, others)
    if options.plan:
        names = [f"{row.asked.method} ({row.kind})" if row.kind else row.asked.method for row in rows]
        print(
            f"verify: {target.path} in {target.dtype}, {options.prompts} prompts greedily and 2 x {options.draws} "
            f"sampled answers for each of {len(rows)} rows: {', '.join(names)}"
        )
        return 0
    prepare(threads)
    from infer.prove import GreedyProver, prove

    greedy = GreedyProver(target, prompts, options.prompts)
    proofs = prove(rows, greedy, options.draws, options.seed)
    print(table(proofs))
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        write_json(options.json, _record(options, target, proofs))
    return 0 if all(proof.holds for proof in proofs) else 1


def _record(options: Options, target: TargetConfig, proofs: Sequence[Proof]) -> dict[str, object]:
    return {
        "schema": 1,
        "target": target.path,
        "dtype": target.dtype,
        "draws": options.draws,
        "seed": options.seed,
        "p_values": sum(len(proof.laws) for proof in proofs),
        "family_error": ALPHA,
        "rows": [proof.as_dict() for proof in proofs],
        "holds": all(proof.holds for proof in proofs),
    }
