"""Laws with known columns, for the tests of what is computed from them."""

from dataclasses import fields
from typing import Any

import numpy as np

from infer.calibration.laws import FLAGS, INTEGERS, LawArrays


def laws(count: int, **columns: Any) -> LawArrays:
    """Laws with these columns; what is left out is zero (ranked: one column)."""
    values: dict[str, Any] = {}
    for field in fields(LawArrays):
        kind = np.bool_ if field.name in FLAGS else np.int64 if field.name in INTEGERS else np.float64
        values[field.name] = np.zeros(count, dtype=kind)
        if field.name in columns:
            values[field.name] = np.array(columns[field.name], dtype=kind)
    if "ranked" not in columns:
        values["ranked"] = np.zeros((count, 1))
    return LawArrays(**values)
