"""Draft, verify, measure, report. `from aerie.infer import SpeculativeDecoder` is the library's front door."""

from aerie.infer.decode.engine import SpeculativeDecoder

__all__ = ["SpeculativeDecoder"]
