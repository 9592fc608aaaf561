"""How far a merge of partials and its gradient may be from float64: by the rounding of their sums."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from gpu_actors.partial import MergeGradients, Partial, merge, oracle_merge, oracle_merge_gradients
from gpu_actors.reference.tolerance import UNIT_ROUNDOFF

__all__ = ["assert_merge_close", "assert_merge_gradients_close"]

_SUBNORMAL = {"float16": 2.0**-25}


def assert_merge_close(merged: Partial, partials: Sequence[Partial], sinks: Any = None) -> None:
    """Raise AssertionError if a merge differs from a merge in float64 by more than the rounding of its sums."""
    wanted = merge(partials, sinks=sinks, out_dtype="float64")
    u, sums = UNIT_ROUNDOFF[merged.out.dtype.name], 2.0**-21 if merged.lse.dtype == np.float32 else 2.0**-49
    largest = max(
        float(np.abs(np.where(np.isfinite(p.out.astype(float)), p.out.astype(float), 0)).max()) for p in partials
    )
    bound = u * np.abs(wanted.out) + sums * largest
    out = merged.out.astype(np.float64)
    np.testing.assert_array_equal(np.isnan(out), np.isnan(wanted.out), "out is NaN elsewhere")
    with np.errstate(invalid="ignore"):
        assert np.all((np.abs(out - wanted.out) <= bound) | ~np.isfinite(wanted.out)), "out differs"
    np.testing.assert_array_equal(np.isneginf(merged.lse), np.isneginf(wanted.lse), "lse is -inf elsewhere")
    seen = np.isfinite(wanted.lse)
    limit = 2.0**-20 if merged.lse.dtype == np.float32 else 1e-12
    scale = np.maximum(1.0, np.abs(wanted.lse[seen]))
    assert np.all(np.abs(merged.lse[seen] - wanted.lse[seen]) <= limit * scale), "lse differs"


def assert_merge_gradients_close(
    gradients: MergeGradients, partials: Sequence[Partial], dout: Any, dlse: Any = None, sinks: Any = None
) -> None:
    """Raise AssertionError if gradients of a merge differ from float64 by more than the rounding of their sums."""
    wanted = oracle_merge_gradients(partials, dout, dlse, sinks)
    narrow = "float64" not in (dout.dtype.name, partials[0].out.dtype.name, partials[0].lse.dtype.name)
    unit = 2.0**-20 if narrow else 2.0**-48
    wide = dout.astype(np.float64)
    # The sums of the products' magnitudes, per row and head: the rounding of a sum is relative to them.
    made = [np.abs(wide * np.nan_to_num(p.out.astype(float), posinf=0, neginf=0)).sum(-1) for p in partials]
    largest = np.max(made, axis=0) + (0 if dlse is None else np.abs(np.swapaxes(dlse, -1, -2)))
    for index, (mine, theirs) in enumerate(zip(gradients.partials, wanted.partials, strict=True)):
        u = UNIT_ROUNDOFF[mine.out.dtype.name]
        bound = (u + 4 * unit) * np.abs(theirs.out) + _SUBNORMAL.get(mine.out.dtype.name, 0)
        _close(mine.out, theirs.out, bound, f"dout.{index}")
        u = UNIT_ROUNDOFF[mine.lse.dtype.name]
        with np.errstate(divide="ignore", invalid="ignore"):
            shares = np.nan_to_num(np.abs(theirs.out / wide)).max(-1)
        bound = u * np.abs(theirs.lse) + np.swapaxes(8 * unit * shares * largest, -1, -2)
        _close(mine.lse, theirs.lse, bound, f"dlse.{index}")
    if sinks is None:
        assert gradients.dsinks is None
    else:
        lse = oracle_merge(partials, sinks).lse
        shares = np.swapaxes(np.exp(sinks.astype(float)[:, None] - np.maximum(lse, -1e9)), -1, -2)
        lost = (8 * unit * shares * largest).reshape(-1, sinks.size).sum(axis=0)
        _close(gradients.dsinks, wanted.dsinks, 2.0**-23 * np.abs(wanted.dsinks) + lost, "dsinks")


def _close(mine: Any, wanted: Any, bound: Any, name: str) -> None:
    found = mine.astype(np.float64)
    np.testing.assert_array_equal(np.isnan(found), np.isnan(wanted), f"{name} is NaN elsewhere")
    with np.errstate(invalid="ignore"):
        # Subnormal weights of float32 lose digits or become 0.
        assert np.all((np.abs(found - wanted) <= bound + 2.0**-126) | ~np.isfinite(wanted)), f"{name} differs"
    np.testing.assert_array_equal(found[~np.isfinite(wanted)], wanted[~np.isfinite(wanted)], f"{name} differs")
