"""Who sees whom among the rows of one sequence."""

from __future__ import annotations

from typing import Any, Unpack

import numpy as np
import numpy.typing as npt

from gpu_actors.attention.key_mask import KeyMask, MaskOptions

__all__ = ["hide_by_tree", "visible_keys"]


def visible_keys(
    rows: npt.NDArray[Any], seqlen_q: int, seqlen_k: int, **mask: Unpack[MaskOptions]
) -> npt.NDArray[np.bool_] | None:
    """`KeyMask.visible_keys` of the mask with these options. Raises as `KeyMask`."""
    return KeyMask(**mask).visible_keys(rows, seqlen_q, seqlen_k)


def hide_by_tree(
    visible: npt.NDArray[np.bool_] | None, bits: npt.NDArray[Any], seqlen_q: int, seqlen_k: int
) -> npt.NDArray[np.bool_]:
    """What is left of ``visible`` (R, seqlen_k) once new keys that a row's tree does not hold are hidden from it.

    bits: uint64 (R,), of the rows in question. The last seqlen_q keys are new; bit j is new key j.
    """
    keys = np.arange(max(0, seqlen_k - seqlen_q), seqlen_k)
    held = np.ones((bits.size, seqlen_k), dtype=np.bool_) if visible is None else visible.copy()
    shifts = (keys - (seqlen_k - seqlen_q)).astype(np.uint64)
    held[:, keys] &= (bits.astype(np.uint64)[:, None] >> shifts & np.uint64(1)).astype(np.bool_)
    return held
