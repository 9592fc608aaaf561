"""Rotary position embedding in float64. The append kernel's rotation is compared with it."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from gpu_actors.reference.arguments import Array

__all__ = ["apply_rope", "rope_angles"]


def rope_angles(positions: Array, inv_freq: Array) -> npt.NDArray[np.float64]:
    """Radians (rows, pairs). positions: (rows,) integers. inv_freq: (pairs,)."""
    return np.asarray(positions, np.float64)[:, None] * np.asarray(inv_freq, np.float64)


def apply_rope(x: Array, cos: Array, sin: Array, *, interleaved: bool = False) -> npt.NDArray[np.float64]:
    """x with its first columns rotated, in float64.

    x: (rows, heads, dim). cos, sin: (rows, pairs) of the rows' angles; 2 * pairs <= dim columns are rotated, the others
    stay. interleaved: columns 2i and 2i + 1 are a pair ("GPT-J"); else i and i + pairs ("NeoX", "rotate half").
    """
    out = np.array(x, np.float64)
    pairs = cos.shape[1]
    first, second = _columns(pairs, interleaved)
    c, s = (np.asarray(table, np.float64)[:, None, :] for table in (cos, sin))
    a, b = out[..., first].copy(), out[..., second].copy()
    out[..., first] = a * c - b * s
    out[..., second] = b * c + a * s
    return out


def _columns(pairs: int, interleaved: bool) -> tuple[slice, slice]:
    if interleaved:
        return slice(0, 2 * pairs, 2), slice(1, 2 * pairs, 2)
    return slice(0, pairs), slice(pairs, 2 * pairs)
