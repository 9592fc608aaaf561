"""Random block masks: the kinds of their blocks, the mask_mod of partial blocks, and torch's lists of both."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

__all__ = ["BLOCK", "kinds_of", "near", "ordered", "usually"]

BLOCK = 128


def near(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return abs(q - kv) * (1 + h) < 900 + 100 * b


def kinds_of(*shape: int) -> Any:
    """0 hidden, 1 partial, 2 full. shape: (batch, heads, blocks of rows, blocks of keys).

    The first block of rows of head 1 sees nothing. In sequence 0, heads 0 and 1 do not see the keys of block 2.
    """
    kinds = np.random.default_rng(3).integers(0, 3, shape)
    kinds[:, 1, 0] = 0
    kinds[0, :2, :, 2] = 0
    for place in np.ndindex(kinds.shape):
        if kinds[place] == 2 and not _shows_all(*place):
            kinds[place] = 1
    assert (kinds == 2).sum() > 10
    return kinds


def _shows_all(b: int, h: int, row: int, column: int) -> bool:
    """Whether `near` shows a whole block. Its row and key are furthest apart in one of two corners."""
    corners = ((row * BLOCK, column * BLOCK + BLOCK - 1), (row * BLOCK + BLOCK - 1, column * BLOCK))
    return all(near(b, h, q, kv) for q, kv in corners)


def ordered(listed: Any, rng: np.random.Generator) -> tuple[Any, Any]:
    """torch's counts, and indices in random order. The unused entries behind them are invalid."""
    counts = listed.sum(-1).astype(np.int32)
    indices = np.full(listed.shape, 2147480000, np.int32)
    for place in np.ndindex(counts.shape):
        indices[place][: counts[place]] = rng.permutation(np.flatnonzero(listed[place]))
    return counts, indices


def usually(*usual: tuple[bool, bool, bool]) -> list[Any]:
    """Cases (causal, with a mask_mod, with lists of full blocks). Only the sweep runs those that ``usual`` omits."""
    cases = ((True, True, True), (False, False, False), (False, True, True), (False, False, True))
    return [case if case in usual else pytest.param(*case, marks=pytest.mark.sweep) for case in cases]
