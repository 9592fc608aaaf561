"""`wgmma.mma_async`: descriptors of matrices in shared memory, and what one instruction computes (PTX ISA 9.7.15.5)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final, Literal

import numpy as np
import numpy.typing as npt

from isa import formats, fragments, sums, swizzle

Major = Literal["k", "mn"]
"""The index along contiguous memory: K (`imm-trans` 0) or M or N (`imm-trans` 1)."""

MODES: Final[Mapping[int, int]] = {0: 0, 1: 128, 2: 64, 3: 32}
"""Bits 62 and 63 of a descriptor to the swizzling mode in bytes (9.7.15.5.1.2.2)."""

_WORDS: Final[Mapping[int, type[np.unsignedinteger]]] = {8: np.uint8, 16: np.uint16, 32: np.uint32}
_USED: Final = (0x3FFF << 0) | (0x3FFF << 16) | (0x3FFF << 32) | (0x7 << 49) | (0x3 << 62)


def _encoded(number: int) -> int:
    return (number & 0x3FFFF) >> 4


@dataclass(frozen=True)
class Descriptor:
    """A matrix descriptor (PTX ISA 9.7.15.5.1.2.2, "Matrix Descriptor Format").

    start, and the byte offsets of the leading and the stride dimension: multiples of 16 below 2**18. base_offset: line
    of 128 bytes in which the pattern begins. mode: swizzling mode in bytes, 0, 32, 64 or 128.
    """

    start: int
    leading: int
    stride: int
    mode: int
    base_offset: int = 0

    @classmethod
    def decoded(cls, bits: int) -> Descriptor:
        """The descriptor in a 64-bit register. Raises ValueError if a bit outside the five fields is set."""
        if bits & ~_USED:
            raise ValueError(f"descriptor {bits:#018x} sets bits outside its fields")
        return cls(
            start=(bits & 0x3FFF) << 4,
            leading=(bits >> 16 & 0x3FFF) << 4,
            stride=(bits >> 32 & 0x3FFF) << 4,
            base_offset=bits >> 49 & 0x7,
            mode=MODES[bits >> 62 & 0x3],
        )

    def encoded(self) -> int:
        """The 64-bit register."""
        mode = {size: code for code, size in MODES.items()}[self.mode]
        return (
            _encoded(self.start)
            | _encoded(self.leading) << 16
            | _encoded(self.stride) << 32
            | self.base_offset << 49
            | mode << 62
        )

    def moved(self, amount: int) -> Descriptor:
        """The same matrix `amount` bytes further on."""
        return replace(self, start=self.start + amount)

    def addresses(self, major: Major, mn: int, k: int, size: int) -> npt.NDArray[np.int64]:
        """Byte address of each element of the matrix (PTX ISA 9.7.15.5.1.2.1.3, "Canonical Layouts").

        The layouts there are in units of elements, T of which make 16 bytes; they are written below in bytes. The
        swizzle is applied last, to the address itself. mn: extent along M or N. size: bytes of an element; only
        elements of 2 bytes can be transposed (9.7.15.5.2, "imm-trans").
        """
        t = 16 // size
        rows = np.arange(mn, dtype=np.int64)[:, None]
        columns = np.arange(k, dtype=np.int64)[None, :]
        if major == "k":
            if self.mode == 0:
                # ((8, m), (T, 2k)) : ((1T, SBO), (1, LBO))
                offset = rows % 8 * 16 + rows // 8 * self.stride + columns % t * size + columns // t * self.leading
            else:
                # ((8, m), (T, 2k)) : ((2T | 4T | 8T, SBO), (1, T))
                offset = rows % 8 * self.mode + rows // 8 * self.stride + columns % t * size + columns // t * 16
        else:
            if self.mode == 0:
                # ((T, 1, m), (8, k)) : ((1, T, SBO), (1T, LBO))
                offset = rows % t * size + rows // t * self.stride + columns % 8 * 16 + columns // 8 * self.leading
            else:
                # ((T, 2 | 4 | 8, m), (8, k)) : ((1, T, LBO), (2T | 4T | 8T, SBO))
                cells = self.mode // 16
                offset = (
                    rows % t * size
                    + rows // t % cells * 16
                    + rows // (t * cells) * self.leading
                    + columns % 8 * self.mode
                    + columns // 8 * self.stride
                )
        return swizzle.swizzled(self.start + offset, self.mode, self.base_offset)

    def taken(
        self, memory: npt.NDArray[np.uint8], major: Major, mn: int, form: formats.Format
    ) -> npt.NDArray[np.unsignedinteger]:
        """Elements of the matrix as bits (mn, 32 bytes of K) out of shared memory (bytes,)."""
        addresses = self.addresses(major, mn, form.k, form.size)
        whole = memory[addresses[..., None] + np.arange(form.size)]
        return np.ascontiguousarray(whole).view(_WORDS[form.bits])[..., 0]


def multiplied(
    memory: npt.NDArray[np.uint8],
    a: Descriptor | npt.NDArray[np.uint32],
    b: Descriptor,
    accumulators: npt.NDArray[np.float32] | None,
    n: int,
    name: str,
    a_major: Major = "k",
    b_major: Major = "k",
    truncated: bool = False,
) -> npt.NDArray[np.float32]:
    """D of one `wgmma.mma_async.sync.aligned.m64n{n}k*.f32.{name}.{name}` (PTX ISA 9.7.15.5.2), float32 (128, n / 2).

    memory: shared memory, uint8 (bytes,). a: a descriptor, or registers uint32 (128, 4). accumulators: D before; None
    stands for `scale-d` = 0. A major is "mn" if `imm-trans-a` or `imm-trans-b` is 1. truncated: sums of 8-bit products
    are Hopper's (`sums.hopper_fp8`); else a sum is computed in float64 and rounded once.
    """
    form = formats.FORMATS[name]
    if isinstance(a, Descriptor):
        left_bits = a.taken(memory, a_major, 64, form)
    else:
        left_bits = fragments.wgmma_a(form.bits).given(fragments.unpacked(a, _WORDS[form.bits]))
    left = formats.decoded(left_bits, name)
    right = formats.decoded(b.taken(memory, b_major, n, form), name)
    layout = fragments.wgmma_d(n)
    before = np.zeros((64, n), dtype=np.float32) if accumulators is None else layout.given(accumulators)
    if truncated:
        return layout.taken(sums.hopper_fp8(left, right, before, form))
    return layout.taken((left @ right.T + before.astype(np.float64)).astype(np.float32))
