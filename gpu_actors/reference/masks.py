"""Who sees whom, and from how far: the visibility and distance of query rows and keys of one sequence."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["hide_by_tree", "key_distance", "visible_keys"]


def _diagonal(rows: npt.NDArray[Any], seqlen_q: int, seqlen_k: int, alignment: str) -> npt.NDArray[Any]:
    """(R, 1): the key index that lies on each row's diagonal."""
    offset = seqlen_k - seqlen_q if alignment == "bottom_right" else 0
    return rows[:, None] + offset


def visible_keys(
    rows: npt.NDArray[Any],
    seqlen_q: int,
    seqlen_k: int,
    *,
    causal: bool = False,
    alignment: str = "bottom_right",
    window_size: tuple[int, int] = (-1, -1),
    sink_tokens: int = 0,
) -> npt.NDArray[np.bool_] | None:
    """Which keys of a sequence each of its query rows sees.

    rows: (R,) row indices inside the sequence. The diagonal of row i is key i + seqlen_k - seqlen_q
        ("bottom_right") or key i ("top_left"). window_size is (left, right), inclusive, -1 unbounded.
        causal hides what lies right of the diagonal. The first sink_tokens keys are exempt from both window
        bounds, never from causal. Returns bool (R, seqlen_k), or None where every row sees every key.
    """
    left, right = window_size
    if not causal and left < 0 and right < 0:
        return None
    diagonal = _diagonal(rows, seqlen_q, seqlen_k, alignment)
    keys = np.arange(seqlen_k)
    visible = np.ones((rows.size, seqlen_k), dtype=np.bool_)
    if left >= 0:
        visible &= keys >= diagonal - left
    if right >= 0:
        visible &= keys <= diagonal + right
    visible |= keys < sink_tokens
    if causal:
        visible &= keys <= diagonal
    return visible


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


def key_distance(rows: npt.NDArray[Any], seqlen_q: int, seqlen_k: int, alignment: str) -> npt.NDArray[Any]:
    """(R, seqlen_k): how far each key is from a row's diagonal, what ALiBi's slopes multiply (arXiv
    2108.12409)."""
    return np.abs(_diagonal(rows, seqlen_q, seqlen_k, alignment) - np.arange(seqlen_k))
