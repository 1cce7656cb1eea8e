"""Tensors under this project's names: no two of a file may come to bear the same one."""

from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from model.errors import UserError


def renamed(tensors: dict[str, Tensor], rename: Callable[[str], str], place: Path) -> dict[str, Tensor]:
    """The tensors under their new names; UserError where two of the file at place would be one."""
    made: dict[str, Tensor] = {}
    origin: dict[str, str] = {}
    for name, value in tensors.items():
        new = rename(name)
        if new in made:
            raise UserError(
                f"{place}: {origin[new]!r} and {name!r} are the same tensor of a head by two names; take out the one "
                f"that is not its own"
            )
        made[new], origin[new] = value, name
    return made
