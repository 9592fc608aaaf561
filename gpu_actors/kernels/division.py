"""Division by a number that a launch knows and its cubin does not, as a multiplication and a shift."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Divider", "divider"]


class Divider(NamedTuple):
    """n // divisor == (n * multiplier >> 32) >> shift for 0 <= n < 2^31; a multiplier of 0 stands for division by 1."""

    multiplier: int
    shift: int


def divider(divisor: int) -> Divider:
    """The numbers that replace a division by ``divisor``, 1 <= divisor < 2^31. Both fit 32 bits.

    Granlund and Montgomery, "Division by invariant integers using multiplication", PLDI 1994, theorem 4.2.
    """
    if divisor == 1:
        return Divider(0, 0)
    bits = (divisor - 1).bit_length()
    return Divider(((1 << (31 + bits)) + divisor - 1) // divisor, bits - 1)
