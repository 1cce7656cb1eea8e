"""Draft, verify, measure, report. `from aerie.infer import SpeculativeDecoder` is the library's front door."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from aerie.infer.decode.engine import SpeculativeDecoder

__all__ = ["SpeculativeDecoder"]


def __getattr__(name: str) -> Any:
    """Import torch and transformers only when the decoder is asked for; the package stays light."""
    if name == "SpeculativeDecoder":
        from aerie.infer.decode.engine import SpeculativeDecoder

        return SpeculativeDecoder
    raise AttributeError(f"module 'aerie.infer' has no attribute {name!r}")
