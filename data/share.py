"""One job's part of work that several jobs share, as an array job names it: --shard i/n."""

from dataclasses import dataclass

from model.errors import UserError


@dataclass(frozen=True)
class Share:
    """The index-th of count parts, counted from 1: every count-th item."""

    index: int = 1
    count: int = 1

    @classmethod
    def of(cls, text: str) -> "Share":
        """From 'i/n'; UserError for anything else."""
        first, separator, second = text.partition("/")
        if not separator or not first.isdecimal() or not second.isdecimal() or not 1 <= int(first) <= int(second):
            raise UserError(f"--shard: {text} is no share; write i/n with i from 1 to n (--shard 1/4)")
        return cls(int(first), int(second))

    def __contains__(self, position: int) -> bool:
        return position % self.count == self.index - 1

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"

    def part(self, count: int, rank: int = 0, world: int = 1) -> range:
        """The positions, out of `count`, of process `rank` of the `world` processes of this job."""
        return range(self.index - 1, count, self.count)[rank::world]
