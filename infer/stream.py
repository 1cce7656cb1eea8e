"""Text as it is decoded: a transformers streamer that colours the accepted draft tokens."""

import sys
from typing import Any, TextIO

from torch import Tensor
from transformers.generation.streamers import BaseStreamer

from infer.proposer import Cycle

GREEN, PLAIN = "\033[32m", "\033[0m"


class ColouredStreamer(BaseStreamer):
    """Prints the answer; drafted tokens that the target accepted are green, its own tokens plain.

    Pass it as streamer and its `on_cycle` as on_cycle.
    """

    def __init__(self, tokenizer: Any, out: TextIO = sys.stdout, coloured: bool = True) -> None:
        self.tokenizer = tokenizer
        self.out = out
        self.coloured = coloured
        self._ids: list[int] = []
        self._printed = ""
        self._accepted = 0
        self._is_prompt = True

    def on_cycle(self, cycle: Cycle) -> None:
        self._accepted = cycle.verdict.accepted

    def put(self, value: Tensor) -> None:
        if self._is_prompt:
            self._is_prompt = False
            return
        ids = value.tolist()
        drafted = min(self._accepted, len(ids))
        self._write(ids[:drafted], GREEN)
        self._write(ids[drafted:], "")
        self._accepted = 0

    def end(self) -> None:
        self.out.write("\n")
        self.out.flush()

    def _write(self, ids: list[int], colour: str) -> None:
        if not ids:
            return
        self._ids += ids
        text = self.tokenizer.decode(self._ids, skip_special_tokens=True)
        if text.endswith("\ufffd"):  # half a character: wait for the rest
            return
        piece, self._printed = text[len(self._printed) :], text
        self.out.write(f"{colour}{piece}{PLAIN}" if colour and self.coloured else piece)
        self.out.flush()
