"""Reads the packed bytes of a kernel's parameter struct."""

from __future__ import annotations

from typing import Any

import numpy as np
from inside.kernels import ParamsLayout

__all__ = ["fields_of"]


def fields_of(data: Any, layout: ParamsLayout) -> np.void:
    """The fields by name, from the first bytes of ``data``."""
    dtype = np.dtype(
        {
            "names": [field.name for field in layout.fields],
            "formats": [np.dtype(field.code) for field in layout.fields],
            "offsets": [field.offset for field in layout.fields],
            "itemsize": layout.size,
        }
    )
    fields: np.void = np.frombuffer(data, dtype, count=1)[0]
    return fields
