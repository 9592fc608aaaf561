"""Number formats of multiplicands: bits to values (PTX ISA 5.2.2, 5.2.3, "Alternate Floating-Point Data Formats")."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class Format:
    """A multiplicand's type."""

    name: str
    bits: int
    exponent_bits: int
    fraction_bits: int

    @property
    def size(self) -> int:
        """Bytes of an element."""
        return self.bits // 8

    @property
    def k(self) -> int:
        """Elements in the 32 bytes that one `wgmma` takes along K (PTX ISA 9.7.15.2, "Matrix Shape")."""
        return 32 // self.size

    @property
    def least_exponent(self) -> int:
        """Exponent of the smallest normal number, which subnormal numbers share."""
        return 2 - (1 << (self.exponent_bits - 1))


FORMATS: Final[Mapping[str, Format]] = {
    "f16": Format("f16", 16, 5, 10),
    "bf16": Format("bf16", 16, 8, 7),
    "tf32": Format("tf32", 32, 8, 10),
    "e4m3": Format("e4m3", 8, 4, 3),
    "e5m2": Format("e5m2", 8, 5, 2),
}
"""Types of multiplicands by their PTX names."""


def decoded(bits: npt.NDArray[np.unsignedinteger], name: str) -> npt.NDArray[np.float64]:
    """Values of elements given as bits.

    e4m3 has no infinity and one NaN a sign (all bits set); e5m2 and the others follow IEEE 754; tf32 reads the upper
    19 of 32 bits. Every value of every format is exact in float64.
    """
    form = FORMATS[name]
    word = bits.astype(np.int64)
    if name == "tf32":
        word >>= 13
    whole = 1 + form.exponent_bits + form.fraction_bits
    sign = np.where(word >> (whole - 1) & 1, -1.0, 1.0)
    exponent = word >> form.fraction_bits & ((1 << form.exponent_bits) - 1)
    fraction = word & ((1 << form.fraction_bits) - 1)
    normal = exponent > 0
    significand = normal + fraction / float(1 << form.fraction_bits)
    scale = np.where(normal, exponent - 1, 0) + form.least_exponent
    values = sign * np.ldexp(significand, scale)
    top = exponent == (1 << form.exponent_bits) - 1
    if name == "e4m3":
        return np.where(top & (fraction == 7), np.nan, values)
    return np.where(top, np.where(fraction == 0, sign * np.inf, np.nan), values)
