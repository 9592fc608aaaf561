"""Tensor maps and the copies that read them: `cp.async.bulk.tensor`, `cp.reduce.async.bulk.tensor` (PTX ISA 5.5,
9.7.9.27).

Tiled mode, no interleave, one to five dimensions. What a tensor map may hold is from the CUDA driver API, "Tensor Map
Object Management".
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

from isa import swizzle

Fill = Literal["zero", "nan"]
"""What a load puts where the box leaves the tensor."""


@dataclass(frozen=True)
class TensorMap:
    """A tiled tensor map.

    Attributes:
        size: bytes of an element.
        dims: extents in elements, innermost first.
        strides: bytes from one index to the next along dimensions 1, 2, ...: one fewer than `dims`, multiples of 16.
        box: extents that a box spans along each dimension, in elements of the tensor, 1 to 256.
        steps: traversal strides, 1 to 8; the one of dimension 0 is ignored without interleave. All 1 by default.
        mode: swizzling mode of shared memory in bytes.
        fill: value outside the tensor.
        base: byte address of the tensor in global memory, a multiple of 16.

    Raises:
        ValueError: a number is outside what `cuTensorMapEncodeTiled` takes, or the box's rows are shorter than the
            swizzle: for these the CUDA C++ Programming Guide asks for shared memory of "the full swizzle width", and
            nothing says where their bytes lie in it.
    """

    size: int
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    mode: int = 0
    fill: Fill = "zero"
    steps: tuple[int, ...] = field(default=())
    base: int = 0

    def __post_init__(self) -> None:
        rank = len(self.dims)
        if not self.steps:
            object.__setattr__(self, "steps", (1,) * rank)
        if not 1 <= rank <= 5 or len(self.strides) != rank - 1 or len(self.box) != rank or len(self.steps) != rank:
            raise ValueError("dims, strides, box and steps do not agree, or the rank is not in 1..5")
        if self.base % 16:
            raise ValueError(f"the base {self.base:#x} is not a multiple of 16")
        if any(not 1 <= extent <= 1 << 32 for extent in self.dims):
            raise ValueError(f"dims {self.dims} are not in 1..2**32")
        if any(stride % 16 or not 0 <= stride < 1 << 40 for stride in self.strides):
            raise ValueError(f"strides {self.strides} are not multiples of 16 below 2**40")
        if any(not 1 <= extent <= 256 for extent in self.box):
            raise ValueError(f"box {self.box} is not in 1..256")
        if any(not 1 <= step <= 8 for step in self.steps):
            raise ValueError(f"steps {self.steps} are not in 1..8")
        inner = self.box[0] * self.size
        if inner % 16:
            raise ValueError(f"the box's inner {inner} bytes are not a multiple of 16")
        if self.mode and inner > self.mode:
            raise ValueError(f"the box's inner {inner} bytes exceed the swizzle of {self.mode}")
        if self.mode and inner < self.mode:
            raise ValueError(f"where rows of {inner} bytes lie in a swizzle of {self.mode} is not said")

    @property
    def counts(self) -> tuple[int, ...]:
        """Elements that a copy takes along each dimension: ceil(box / step), with step 1 along dimension 0."""
        return (self.box[0], *(math.ceil(b / s) for b, s in zip(self.box[1:], self.steps[1:], strict=True)))

    @property
    def bytes(self) -> int:
        """Bytes of a box in shared memory, which a load reports to its mbarrier whether they lie inside the tensor or
        not.

        (PTX ISA 9.7.9.27: complete-tx with "the amount of data copied in bytes"; filled elements are copied ones.)
        """
        return math.prod(self.counts) * self.size

    def pieces(
        self, coordinates: Sequence[int]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
        """Every element of the box at `coordinates` (innermost first; they may be negative).

        The box is linear in shared memory, dimension 0 innermost.

        Returns:
            Three arrays (elements,): byte offsets within the unswizzled box, byte addresses in global memory (-1
            outside the tensor), and whether the element lies inside the tensor.

        Raises:
            ValueError: there are not as many coordinates as dimensions.
        """
        if len(coordinates) != len(self.dims):
            raise ValueError(f"{len(coordinates)} coordinates for {len(self.dims)} dimensions")
        rest = np.arange(math.prod(self.counts), dtype=np.int64)
        offsets = rest * self.size
        addresses = np.full(rest.shape, self.base, dtype=np.int64)
        inside = np.ones(rest.shape, dtype=np.bool_)
        steps = (1, *self.steps[1:])
        pitches = (self.size, *self.strides)
        for at, count, step, pitch, extent in zip(coordinates, self.counts, steps, pitches, self.dims, strict=True):
            rest, index = np.divmod(rest, count)
            place = at + index * step
            inside &= (place >= 0) & (place < extent)
            addresses += place * pitch
        return offsets, np.where(inside, addresses, -1), inside

    def _addresses(
        self, coordinates: Sequence[int], shared_address: int
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
        """Swizzled addresses in shared memory, addresses in global memory (-1 outside), and what lies inside."""
        if shared_address % 128:
            raise ValueError(f"shared address {shared_address:#x} is not a multiple of 128")
        offsets, addresses, inside = self.pieces(coordinates)
        return swizzle.swizzled(shared_address + offsets, self.mode), addresses, inside

    def loaded(
        self,
        memory: npt.NDArray[np.uint8],
        coordinates: Sequence[int],
        shared: npt.NDArray[np.uint8],
        shared_address: int,
    ) -> npt.NDArray[np.uint8]:
        """`cp.async.bulk.tensor.*.shared::cluster.global.tile.mbarrier::complete_tx::bytes`.

        Args:
            memory: global memory, uint8 (bytes,); address 0 is its first byte.
            coordinates: where the box begins, innermost first.
            shared: shared memory before, uint8 (bytes,); it is not changed.
            shared_address: where the box goes, a multiple of 128.

        Returns:
            Shared memory after. Out-of-bounds elements are zero, or, with fill "nan", all bits but the sign (the ISA
            says only that it is a NaN).

        Raises:
            ValueError: a bad number of coordinates, or a shared address that is not aligned.
        """
        targets, sources, inside = self._addresses(coordinates, shared_address)
        each = np.arange(self.size)
        after = shared.copy()
        outside = np.zeros(self.size, dtype=np.uint8)
        if self.fill == "nan":
            outside[:] = 0xFF
            outside[-1] = 0x7F
        after[targets[~inside][:, None] + each] = outside
        after[targets[inside][:, None] + each] = memory[sources[inside][:, None] + each]
        return after

    def stored(
        self,
        memory: npt.NDArray[np.uint8],
        coordinates: Sequence[int],
        shared: npt.NDArray[np.uint8],
        shared_address: int,
    ) -> npt.NDArray[np.uint8]:
        """`cp.async.bulk.tensor.*.global.shared::cta.tile.bulk_group`: global memory after. Elements outside the
        tensor are not written.

        Arguments and errors as `loaded`.
        """
        sources, targets, inside = self._addresses(coordinates, shared_address)
        each = np.arange(self.size)
        after = memory.copy()
        after[targets[inside][:, None] + each] = shared[sources[inside][:, None] + each]
        return after
