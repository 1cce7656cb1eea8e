"""Draft, verify, measure, report. `from infer import SpeculativeDecoder` is the library's front door."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from infer.engine import SpeculativeDecoder

__all__ = ["SpeculativeDecoder"]


def __getattr__(name: str) -> Any:
    """Import torch and transformers only when the decoder is asked for; `infer.config` stays light."""
    if name == "SpeculativeDecoder":
        from infer.engine import SpeculativeDecoder

        return SpeculativeDecoder
    raise AttributeError(f"module 'infer' has no attribute {name!r}")
