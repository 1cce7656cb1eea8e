"""What there is to prove and what was found: a row for each method and head, a verdict, a table."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from infer.config import Method, MethodConfig, SamplingConfig
from infer.methods import METHODS
from infer.table import NOTHING

if TYPE_CHECKING:
    from infer.greedy import GreedyResult

SETTINGS = (SamplingConfig(1.0), SamplingConfig(0.6, top_p=0.8))
ALPHA = 1e-3  # chance that a proof fails by bad luck, over all its p-values (Bonferroni)
NOT_LOSSLESS = "not lossless (typical acceptance), not tested"


@dataclass(frozen=True)
class Row:
    """A method and the kind of head that it drafts with (null: it needs none)."""

    asked: MethodConfig
    kind: str | None
    head: str | None = None  # its directory; null where there is none, which leaves the sampled proof

    @property
    def is_testable(self) -> bool:
        return self.asked.typical is None

    @property
    def has_all(self) -> bool:
        """Whether a real target can decode with it."""
        return self.kind is None or self.head is not None


@dataclass(frozen=True)
class Law:
    """How well sampled answers at one setting fit the target's law."""

    temperature: float
    top_p: float
    p_value: float
    accepted_per_answer: float  # drafted tokens; without any there is nothing to prove


@dataclass(frozen=True)
class Proof:
    """What was found about one row."""

    row: Row
    greedy: "GreedyResult | None"  # null: there was no head
    laws: tuple[Law, ...]
    verdict: str
    holds: bool

    def as_dict(self) -> dict[str, Any]:
        return {
            "method": self.row.asked.method,
            "kind": self.row.kind,
            "head": self.row.head,
            "greedy": None if self.greedy is None else asdict(self.greedy),
            "laws": [asdict(law) for law in self.laws],
            "verdict": self.verdict,
            "holds": self.holds,
        }


def rows_of(methods: Sequence[Method], heads: dict[str, str], others: Sequence[MethodConfig] = ()) -> list[Row]:
    """A row for each method and each kind of head that it drafts with and that is there; else one without a head.

    heads: directories by kind. others: a recipe's rows, of which those with typical acceptance come last.
    """
    found = []
    for asked in (*map(MethodConfig, methods), *(other for other in others if other.typical is not None)):
        kinds = METHODS[asked.method].heads
        there = [Row(asked, kind, heads[kind]) for kind in kinds if kind in heads]
        found += there or [Row(asked, kinds[0] if kinds else None)]
    return found


def conclude(row: Row, greedy: "GreedyResult | None", laws: tuple[Law, ...], level: float, exact: bool) -> Proof:
    """A row's proof, which fails with a p-value below `level` or with greedy answers that differ.

    exact: also where they differ by no more than rounding.
    """
    if not row.is_testable:
        return Proof(row, None, (), NOT_LOSSLESS, True)
    wrong = [f"law at {setting_text(law.temperature, law.top_p)}" for law in laws if not law.p_value >= level]
    if greedy is not None and not greedy.holds(exact):
        wrong.insert(0, "greedy")
    if wrong:
        return Proof(row, greedy, laws, f"FAILED: {', '.join(wrong)}", False)
    if greedy is None:
        return Proof(row, greedy, laws, "lossless in law (no head for greedy)", True)
    return Proof(row, greedy, laws, "lossless up to rounding" if greedy.differences else "lossless", True)


def table(proofs: Sequence[Proof]) -> str:
    """The proofs as text, with a line for each greedy difference below."""
    settings = [f"p {setting_text(each.temperature, each.top_p)}" for each in SETTINGS]
    lines = [["method", "head", "greedy identical", *settings, "verdict"]]
    notes = []
    for proof in proofs:
        row, greedy = proof.row, proof.greedy
        identical = NOTHING if greedy is None else f"{greedy.identical}/{greedy.prompts}"
        p_values = [f"{law.p_value:.3g}" for law in proof.laws] or [NOTHING] * len(SETTINGS)
        lines.append([row.asked.method, row.kind or NOTHING, identical, *p_values, proof.verdict])
        for each in greedy.differences if greedy else ():
            notes.append(
                f"{row.asked.method}: prompt {each.prompt}, new token {each.position}: {each.ours} instead of "
                f"{each.theirs}, logits {each.gap:.3g} apart (rounding: up to {each.rounding:.3g})"
            )
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    lines.insert(1, ["─" * width for width in widths])
    text = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    return "\n".join([*text, *notes])


def setting_text(temperature: float, top_p: float) -> str:
    """'T=1', or 'T=0.6/p=0.8'."""
    return f"T={temperature:g}" + (f"/p={top_p:g}" if top_p < 1 else "")
