"""What a run would do, in numbers, before anything is started."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from data.batches import Order
from train.config import TrainConfig
from train.loop import total_steps


@dataclass(frozen=True)
class Plan:
    """Steps and sizes of a run with this many processes."""

    rows: int
    held_out_rows: int
    tokens: int  # of one epoch
    processes: int
    steps_per_epoch: int
    steps: int
    trained: int  # parameters
    frozen: int
    vocab_size: int
    config: TrainConfig

    @classmethod
    def of(
        cls,
        module: nn.Module,
        lengths: Sequence[int],
        held_out_rows: int,
        config: TrainConfig,
        processes: int,
        vocab_size: int,
    ) -> "Plan":
        order = Order(lengths, config.seed, config.batch_size, config.accumulation, processes)
        trained = sum(p.numel() for p in module.parameters() if p.requires_grad)
        return cls(
            rows=len(lengths),
            held_out_rows=held_out_rows,
            tokens=sum(lengths),
            processes=processes,
            steps_per_epoch=order.steps_per_epoch,
            steps=total_steps(config, order.steps_per_epoch),
            trained=trained,
            frozen=sum(p.numel() for p in module.parameters()) - trained,
            vocab_size=vocab_size,
            config=config,
        )

    @property
    def state_bytes(self) -> int:
        """Weights, gradients and Adam's two moments in float32, and the frozen part, in one process without ZeRO."""
        return 16 * self.trained + 4 * self.frozen

    @property
    def law_bytes(self) -> int:
        """Both laws, their logarithm and gradient over one chunk of slots, in float32."""
        return 4 * 4 * self.config.loss_chunk_slots * self.vocab_size

    def text(self, output: str) -> str:
        """Four lines."""
        config = self.config
        processes = f"{self.processes} process{'es' if self.processes > 1 else ''}"
        rows = f"{config.batch_size} rows x {config.accumulation} x {processes}"
        epochs = self.steps / self.steps_per_epoch
        budget = "" if config.max_seconds is None else f", at most {config.max_seconds:g} s"
        return "\n".join(
            [
                f"data: {self.rows:,} rows, {self.tokens:,} tokens an epoch; {self.held_out_rows:,} held out",
                f"steps: {self.steps:,} of {rows}: {epochs:.2f} epochs, {round(epochs * self.tokens):,} tokens{budget}",
                f"weights: {self.trained:,} trained, {self.frozen:,} frozen; "
                f"{_mib(self.state_bytes)} with gradients and Adam, {_mib(self.law_bytes)} for a chunk of laws",
                f"output: {output}",
            ]
        )


def _mib(size: int) -> str:
    return f"{size / 2**20:,.1f} MiB" if size < 2**30 else f"{size / 2**30:,.2f} GiB"
