"""Draft, verify, measure, report."""

from aerie.infer.decode.engine import SpeculativeDecoder

__all__ = ["SpeculativeDecoder"]
