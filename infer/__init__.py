"""Decoding with draft heads, its measurements and reports."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from aerie.infer.decode.engine import SpeculativeDecoder as SpeculativeDecoder


def __getattr__(name: str) -> Any:
    """Imports the decoder, and torch with it, only when somebody asks for it."""
    if name != "SpeculativeDecoder":
        raise AttributeError(name)
    from aerie.infer.decode import engine

    return engine.SpeculativeDecoder
