"""The recorded arrays as one compressed file, so that a figure can be made again without decoding again."""

import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from model.errors import UserError
from model.files import write_atomically

T = TypeVar("T")


def write_arrays(path: Path, groups: Mapping[str, Any]) -> None:
    """Writes dataclasses of arrays atomically, each field as GROUP.FIELD."""
    values = {
        f"{name}.{field.name}": getattr(group, field.name) for name, group in groups.items() for field in fields(group)
    }

    def write(temporary: Path) -> None:
        with temporary.open("wb") as handle:  # a path without .npz would get the suffix appended
            np.savez_compressed(handle, **values)

    write_atomically(path, write)


def read_arrays(path: Path, group: str, kind: type[T]) -> T:
    """The dataclass of arrays that was written under this name; UserError when the file does not hold it."""
    fix = "collect it again with: python infer/main.py calibrate"
    try:
        with np.load(path, allow_pickle=False) as file:
            names = {field.name: f"{group}.{field.name}" for field in fields(kind)}  # type: ignore[arg-type]
            missing = sorted(set(names.values()) - set(file.files))
            if missing:
                raise UserError(f"{path}: missing {', '.join(missing)}; {fix}")
            return kind(**{field: file[name] for field, name in names.items()})
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}; {fix}") from error
    except (ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise UserError(f"{path}: not an npz file of arrays ({error}); {fix}") from error
