"""Sums of floating-point products as tensor cores compute them.

NVIDIA does not document this. The model was measured bit for bit on the hardware (Xie et al., "MMA-Sim: Bit-Accurate
Reference Model of Tensor Cores and Matrix Cores", arXiv 2511.10909). In Hopper's sums of 8-bit products, the 32
products and the accumulator are aligned to the largest exponent among them, each is cut to 13 fraction bits there, the
sum of these is exact, and the result is cut to 13 fraction bits (E8M13). Sums of 16-bit and tf32 products are alike,
with 24 (Ampere) or 25 (Hopper) fraction bits a term and the 23 of a float in the result.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from isa import formats

FRACTION_BITS: Final = 13
"""For 8-bit products: bits below the largest exponent that a term keeps, and fraction bits of the result."""

ZERO_EXPONENT: Final = -133
"""The exponent of a term of value zero."""


def _split(
    values: npt.NDArray[np.float64], least_exponent: int
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]:
    """Significands in [1, 2), below 1 for subnormal numbers, and exponents not below `least_exponent`."""
    _, exponents = np.frexp(values)
    exponent = np.maximum(exponents.astype(np.int64) - 1, least_exponent)
    return np.ldexp(values, -exponent), exponent


def hopper_fp8(
    a: npt.NDArray[np.float64],
    b: npt.NDArray[np.float64],
    c: npt.NDArray[np.float32],
    form: formats.Format,
    b_form: formats.Format | None = None,
) -> npt.NDArray[np.float32]:
    """`cut_off` for the 32 products of one instruction of Hopper."""
    return cut_off(a, b, c, form, FRACTION_BITS, FRACTION_BITS, b_form)


def cut_off(
    a: npt.NDArray[np.float64],
    b: npt.NDArray[np.float64],
    c: npt.NDArray[np.float32],
    form: formats.Format,
    term_bits: int,
    result_bits: int,
    b_form: formats.Format | None = None,
) -> npt.NDArray[np.float32]:
    """c + a b^T, each element one sum.

    A product's exponent is the sum of its factors' exponents: it is not normalised again, so its significand lies
    below 4. Finite values only.

    a (m, k) and b (n, k): float64 values of `form`, or of b_form. term_bits: fraction bits below the largest exponent
    that a term keeps. result_bits: those of the result.
    """
    if not (np.isfinite(a).all() and np.isfinite(b).all() and np.isfinite(c).all()):
        raise ValueError("the model covers finite values only")
    a_significand, a_exponent = _split(a, form.least_exponent)
    b_significand, b_exponent = _split(b, (b_form or form).least_exponent)
    c_significand, c_exponent = _split(c.astype(np.float64), -126)
    significands = np.concatenate(
        [a_significand[:, None, :] * b_significand[None, :, :], c_significand[..., None]], axis=2
    )
    exponents = np.concatenate([a_exponent[:, None, :] + b_exponent[None, :, :], c_exponent[..., None]], axis=2)
    exponents = np.where(significands == 0, ZERO_EXPONENT, exponents)
    largest = exponents.max(axis=2)
    kept = np.trunc(np.ldexp(significands, exponents - largest[..., None] + term_bits))
    total = np.ldexp(kept.sum(axis=2), largest - term_bits)
    significand, exponent = _split(total, -126)
    cut = np.trunc(np.ldexp(significand, np.full_like(exponent, result_bits)))
    return np.ldexp(cut, exponent - result_bits).astype(np.float32)
