"""How far new rows of a KV cache may be from the oracle: not at all, or by one rounding if they are rotated."""

from __future__ import annotations

import numpy as np

from gpu_actors.reference.append import LARGEST
from gpu_actors.reference.arguments import Array
from gpu_actors.reference.tolerance import UNIT_ROUNDOFF

__all__ = ["assert_rows_close", "assert_same_bits"]

_SMALLEST = {
    "float16": 2.0**-25,
    "bfloat16": 2.0**-134,
    "float32": 0.0,
    "float8_e4m3fn": 2.0**-10,
    "float8_e5m2": 2.0**-17,
}


def assert_same_bits(name: str, actual: Array, expected: Array, repro: str = "") -> None:
    """Raise AssertionError, naming the first element, unless every bit is the same."""
    bits = [np.ascontiguousarray(x).view(f"u{x.dtype.itemsize}") for x in (actual, expected)]
    wrong = np.argwhere(bits[0] != bits[1])
    if len(wrong):
        where = tuple(int(n) for n in wrong[0])
        raise AssertionError(
            f"{name} differs in {len(wrong)} of {actual.size} elements, first at {where}: "
            f"{actual[where]!r} instead of {expected[where]!r}\n{repro}"
        )


def assert_rows_close(
    name: str, actual: Array, expected: Array, largest: float, least_descale: float = 1.0, repro: str = ""
) -> None:
    """Raise AssertionError unless rows are within one rounding of ``expected``, float64.

    Float arithmetic may miss a value by a few units of its operands. largest: the largest operand. least_descale: the
    smallest descale that operands were divided by.
    """
    dtype = actual.dtype.name
    limit = LARGEST.get(dtype, np.inf)
    slack = 2.0**-20 * largest * 1.5 / least_descale
    clipped = np.clip(expected, -limit, limit)
    bound = UNIT_ROUNDOFF[dtype] * (np.abs(clipped) + slack) + _SMALLEST[dtype] + slack
    with np.errstate(invalid="ignore"):
        error = np.abs(actual.astype(np.float64) - clipped)
    if not (error <= bound).all():
        worst = np.unravel_index(int(np.where(np.isnan(error), np.inf, error - bound).argmax()), error.shape)
        raise AssertionError(
            f"{name} differs: {actual[worst]!r} instead of {expected[worst]:.9g} at {tuple(map(int, worst))}, "
            f"{int((~(error <= bound)).sum())} elements in all\n{repro}"
        )
