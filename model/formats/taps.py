"""Which of the target's states an EAGLE-3 head reads, in the two numberings that circulate.

"hidden_states": entries of transformers' hidden_states, k for what enters block k (this project, vLLM, speculators).
"Outputs": k - 1 for the same state, the output of block k - 1 (SpecForge, and SGLang for most targets: see
model/formats/sglang_taps.py). Mixing them costs three quarters of the acceptance, so a guess is always said.
"""

from pathlib import Path
from typing import Any

from model.errors import UserError
from model.formats.values import table
from model.heads.eagle3 import TAP_CONVENTION

NUMBERED = "eagle_aux_hidden_state_layer_ids"
COUNTS_OUTPUTS = "LlamaForCausalLMEagle3"  # the architecture of SpecForge's exports and of SGLang's draft module


def read_taps(
    values: dict[str, Any], fallback: tuple[int, ...] | None, place: Path, is_speculators: bool = False
) -> tuple[tuple[int, ...], str | None]:
    """after_blocks and, where the files leave it open, a sentence about what was taken.

    fallback are the taps to take where the files name none; numbers that mean these in either numbering are theirs.
    UserError where there is nothing to go by.
    """
    if values.get("after_blocks") is not None:
        return _own(values, place), None
    found = values.get(NUMBERED)
    if found is None:
        found = table(values, "eagle_config", place).get(NUMBERED)
    if found is None:
        if fallback is None:
            raise UserError(
                f"{place}: does not say which of the target's states this head reads; load it with its target, or add "
                f'"after_blocks" (entries of transformers\' hidden_states) and "tap_convention": "{TAP_CONVENTION}"'
            )
        return fallback, f"names no taps; {list(fallback)} are taken (entries of hidden_states)"
    ids = _ascending(found, NUMBERED, place)
    if is_speculators:
        return ids, None
    outputs = tuple(k + 1 for k in ids)
    theirs = fallback is not None and values.get("architectures") == [COUNTS_OUTPUTS]
    is_output = outputs == fallback or (ids != fallback and (ids[0] == 1 or theirs))
    taps, what = (outputs, "outputs of blocks") if is_output else (ids, "entries of hidden_states")
    return taps, f"{NUMBERED} {list(ids)} are taken as {what}: the head reads hidden_states {list(taps)}"


def open_taps(values: dict[str, Any], place: Path) -> str | None:
    """What config.json alone leaves open, None where it names the states that the head reads.

    "unnamed": it names none. "ambiguous": it names some, in a numbering that only the target's number of blocks tells.
    """
    if values.get("after_blocks") is not None:
        return None
    found = values.get(NUMBERED)
    if found is None:
        found = table(values, "eagle_config", place).get(NUMBERED)
    if found is None:
        return "unnamed"
    begins_with_one = isinstance(found, list) and found[:1] == [1]
    return "ambiguous" if values.get("architectures") == [COUNTS_OUTPUTS] and not begins_with_one else None


def _own(values: dict[str, Any], place: Path) -> tuple[int, ...]:
    if values.get("tap_convention") != TAP_CONVENTION:
        raise UserError(
            f"{place}: tap_convention is {values.get('tap_convention')!r}; after_blocks must be entries of "
            f"transformers' hidden_states ({TAP_CONVENTION!r})"
        )
    return _ascending(values["after_blocks"], "after_blocks", place)


def _ascending(found: Any, name: str, place: Path) -> tuple[int, ...]:
    if not isinstance(found, list | tuple) or not all(type(k) is int and k >= 0 for k in found):
        raise UserError(f"{place}: {name} is {found!r}; it must be a list of block numbers")
    if not found or list(found) != sorted(set(found)):
        raise UserError(f"{place}: {name} {list(found)} must ascend without repeats")
    return tuple(found)
