"""Keys of a config.json that change how a head drafts and that this project does not follow: said, never ignored."""

from typing import Any

NESTED = ("transformer_layer_config", "eagle_config")
FULL = "full_attention"


def unread(values: dict[str, Any]) -> tuple[str, ...]:
    """A sentence for each, wherever in the file it stands."""
    found: list[str] = []
    for part in (values, *(values[name] for name in NESTED if isinstance(values.get(name), dict))):
        found += _of_a_table(part)
    return tuple(dict.fromkeys(found))


def _of_a_table(values: dict[str, Any]) -> list[str]:
    found = []
    kinds = values.get("layer_types")
    odd = sorted({str(kind) for kind in kinds} - {FULL}) if isinstance(kinds, list) else []
    if odd:
        found.append(f"layer_types names {', '.join(odd)}: it drafts with full attention here")
    window = values.get("sliding_window")
    is_used = values.get("use_sliding_window", True) and not (isinstance(kinds, list) and not odd)
    if window is not None and is_used:
        found.append(f"sliding_window is {window}: it drafts with full attention here")
    if values.get("parallel_drafting"):
        found.append("parallel_drafting is true: it was trained to draft several tokens at once, and drafts one here")
    if values.get("quantization_config"):
        found.append("quantization_config is there: the weights are read as they lie, without its scales")
    return found
