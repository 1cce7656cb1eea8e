"""What was skipped, mended or left out on the way from rows to tokens, and why: nothing disappears silently."""

from dataclasses import dataclass, field
from typing import Literal

Kind = Literal["skipped", "mended", "left out"]
MAX_REASONS = 40  # a template may put the text itself into its refusals; the rest is counted together


@dataclass
class Finding:
    """How often one reason occurred, and the first place where it did."""

    count: int
    example: str


@dataclass
class Tally:
    """Rows read, and per reason a count with its first example.

    skipped: the whole conversation is not used. mended: used after a change. left out: a turn or a token of a used
    conversation is not learnt.
    """

    rows: int = 0
    findings: dict[tuple[Kind, str], Finding] = field(default_factory=dict)

    def skip(self, reason: str, place: str, sentence: str = "") -> None:
        """Counts a conversation that is not used; place is 'file: row n', sentence what is special about this one."""
        self._count("skipped", reason, place, sentence)

    def mend(self, reason: str, place: str, sentence: str = "") -> None:
        """Counts a conversation that is used after a change."""
        self._count("mended", reason, place, sentence)

    def leave_out(self, reason: str, place: str, sentence: str = "") -> None:
        """Counts a turn or token of a used conversation that is not learnt."""
        self._count("left out", reason, place, sentence)

    def total(self, kind: Kind) -> int:
        """How often anything of this kind happened."""
        return sum(finding.count for (found, _), finding in self.findings.items() if found == kind)

    @property
    def kept(self) -> int:
        """Conversations read and not skipped."""
        return self.rows - self.total("skipped")

    def table(self) -> str:
        """The lines printed at the end: totals, then one line per reason, the most frequent first."""
        lines = [f"conversations: {self.rows:,} read, {self.kept:,} kept, {self.total('skipped'):,} skipped"]
        for kind in ("skipped", "mended", "left out"):
            for reason, finding in self._of(kind):
                lines.append(f"  {kind:<8} {finding.count:>9,}  {reason} ({finding.example})")
        return "\n".join(lines)

    def sentence(self) -> str:
        """The skipped reasons on one line, for an error."""
        reasons = [f"{finding.count:,} x {reason} ({finding.example})" for reason, finding in self._of("skipped")]
        return "; ".join([f"{self.rows:,} read, {self.kept:,} kept", *reasons])

    def _of(self, kind: Kind) -> list[tuple[str, Finding]]:
        rows = [(reason, finding) for (found, reason), finding in self.findings.items() if found == kind]
        return sorted(rows, key=lambda row: -row[1].count)

    def _count(self, kind: Kind, reason: str, place: str, sentence: str) -> None:
        key: tuple[Kind, str] = (kind, reason)
        if key not in self.findings and len(self.findings) >= MAX_REASONS:
            key = (kind, "other reasons")
        if key in self.findings:
            self.findings[key].count += 1
        else:
            self.findings[key] = Finding(1, f"{place}: {sentence}" if sentence else place)
