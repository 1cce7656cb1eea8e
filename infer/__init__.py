"""Draft, verify, measure, report."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from aerie.infer.decode.engine import SpeculativeDecoder as SpeculativeDecoder


def __getattr__(name: str) -> Any:
    """Imports torch only if the decoder is asked for."""
    if name != "SpeculativeDecoder":
        raise AttributeError(name)
    from aerie.infer.decode import engine

    return engine.SpeculativeDecoder
