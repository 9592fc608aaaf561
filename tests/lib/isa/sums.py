"""Sums of 8-bit floating-point products as Hopper's tensor cores make them.

NVIDIA does not document this. The model is the one that was measured bit for bit on the hardware (Xie et al.,
"MMA-Sim: Bit-Accurate Reference Model of Tensor Cores and Matrix Cores", arXiv 2511.10909): the 32 products and the
accumulator are aligned to the largest exponent among them, each is cut to 13 fraction bits there, the sum of these is
exact, and the result is cut to 13 fraction bits (E8M13).
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from isa import formats

FRACTION_BITS: Final = 13
"""Bits below the largest exponent that a term keeps, and fraction bits of the result."""

ZERO_EXPONENT: Final = -133
"""Exponent that a term of value zero takes part with."""


def _split(
    values: npt.NDArray[np.float64], least_exponent: int
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]:
    """Significands in [1, 2), below 1 for subnormal numbers, and exponents not below `least_exponent`."""
    _, exponents = np.frexp(values)
    exponent = np.maximum(exponents.astype(np.int64) - 1, least_exponent)
    return np.ldexp(values, -exponent), exponent


def hopper_fp8(
    a: npt.NDArray[np.float64], b: npt.NDArray[np.float64], c: npt.NDArray[np.float32], form: formats.Format
) -> npt.NDArray[np.float32]:
    """c + a b^T for one instruction's 32 products.

    A product's exponent is the sum of its factors' exponents: it is not normalised again, so its significand lies
    below 4. Finite values only.

    Args:
        a: (m, 32), b: (n, 32), values of `form`, float64.
        c: accumulators, float32 (m, n).
        form: e4m3 or e5m2.

    Returns:
        float32 (m, n).

    Raises:
        ValueError: a value is not finite.
    """
    if not (np.isfinite(a).all() and np.isfinite(b).all() and np.isfinite(c).all()):
        raise ValueError("the model covers finite values only")
    a_significand, a_exponent = _split(a, form.least_exponent)
    b_significand, b_exponent = _split(b, form.least_exponent)
    c_significand, c_exponent = _split(c.astype(np.float64), -126)
    significands = np.concatenate(
        [a_significand[:, None, :] * b_significand[None, :, :], c_significand[..., None]], axis=2
    )
    exponents = np.concatenate([a_exponent[:, None, :] + b_exponent[None, :, :], c_exponent[..., None]], axis=2)
    exponents = np.where(significands == 0, ZERO_EXPONENT, exponents)
    largest = exponents.max(axis=2)
    kept = np.trunc(np.ldexp(significands, exponents - largest[..., None] + FRACTION_BITS))
    total = np.ldexp(kept.sum(axis=2), largest - FRACTION_BITS)
    significand, exponent = _split(total, -126)
    cut = np.trunc(np.ldexp(significand, np.full_like(exponent, FRACTION_BITS)))
    return np.ldexp(cut, exponent - FRACTION_BITS).astype(np.float32)
