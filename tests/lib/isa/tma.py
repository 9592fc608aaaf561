"""Tensor maps and the copies that read them: `cp.async.bulk.tensor` (PTX ISA 5.5, 9.7.9.27).

Tiled mode, no interleave, one to five dimensions. The rules of `UNIT` are not the ISA's: they were measured on an H100
in November 2026.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from isa import swizzle

UNIT = 16
"""Boxes begin at multiples of so many bytes of a row, and a store writes such a unit whole or not at all. Measured."""


@dataclass(frozen=True)
class TensorMap:
    """A tiled tensor map. Dimensions are innermost first.

    size: bytes of an element. strides: bytes from one index to the next along dimensions 1, 2, ...: one fewer than
    `dims`. box: extents of a box in elements. mode: swizzling mode of shared memory in bytes. base: byte address of the
    tensor in global memory. Raises ValueError if the box's rows are shorter than the swizzle: the CUDA C++ Programming
    Guide then asks for shared memory of "the full swizzle width", and no text says where their bytes lie in it.
    """

    size: int
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    mode: int = 0
    base: int = 0

    def __post_init__(self) -> None:
        inner = self.box[0] * self.size
        if self.mode and inner != self.mode:
            raise ValueError(f"where rows of {inner} bytes lie in a swizzle of {self.mode} is not said")

    @property
    def bytes(self) -> int:
        """Bytes of a box in shared memory, which a load reports to its mbarrier, those outside the tensor included
        (PTX ISA 9.7.9.27: complete-tx with "the amount of data copied in bytes"; filled elements are copied ones).
        """
        return math.prod(self.box) * self.size

    def pieces(
        self, coordinates: Sequence[int]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
        """Every element of the box at `coordinates` (innermost first; they may be negative).

        The box is linear in shared memory, dimension 0 innermost. Three arrays (elements,): byte offsets within the
        unswizzled box, byte addresses in global memory (-1 outside the tensor), and whether the element lies inside.
        """
        rest = np.arange(math.prod(self.box), dtype=np.int64)
        offsets = rest * self.size
        addresses = np.full(rest.shape, self.base, dtype=np.int64)
        inside = np.ones(rest.shape, dtype=np.bool_)
        for at, count, pitch, extent in zip(coordinates, self.box, (self.size, *self.strides), self.dims, strict=True):
            rest, index = np.divmod(rest, count)
            place = at + index
            inside &= (place >= 0) & (place < extent)
            addresses += place * pitch
        return offsets, np.where(inside, addresses, -1), inside

    def written(self) -> TensorMap:
        """The tensor as stores and reductions see it on an H100: its rows extend to the end of their last unit.

        Measured, and not in the ISA. If a row ends within a unit, the rest of the unit gets what shared memory holds
        there, or has it added; the next unit does not change.
        """
        in_a_unit = UNIT // self.size
        units = math.ceil(self.dims[0] / in_a_unit)
        return dataclasses.replace(self, dims=(units * in_a_unit, *self.dims[1:]))

    def check_start(self, coordinates: Sequence[int], writes: bool) -> None:
        """Raises ValueError for a box that is an illegal instruction on an H100.

        Measured, and not in the ISA: an innermost coordinate that is not at a unit's start, and for a store or
        reduction any negative coordinate, which the CUDA C++ Programming Guide forbids as well.
        """
        if writes and min(coordinates) < 0:
            raise ValueError(f"a store begins at {tuple(coordinates)}, before the tensor")
        if coordinates[0] % (UNIT // self.size):
            raise ValueError(f"a box begins at element {coordinates[0]} of a row, within {UNIT} bytes")

    def _addresses(
        self, coordinates: Sequence[int], shared_address: int
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
        """Swizzled addresses in shared memory, addresses in global memory (-1 outside), and what lies inside."""
        offsets, addresses, inside = self.pieces(coordinates)
        return swizzle.swizzled(shared_address + offsets, self.mode), addresses, inside

    def loaded(
        self,
        memory: npt.NDArray[np.uint8],
        coordinates: Sequence[int],
        shared: npt.NDArray[np.uint8],
        shared_address: int,
    ) -> npt.NDArray[np.uint8]:
        """Shared memory after `cp.async.bulk.tensor.*.shared::cluster.global.tile.mbarrier::complete_tx::bytes`.

        memory: global memory, uint8 (bytes,), from address 0. shared: shared memory before, uint8 (bytes,).
        shared_address: where the box goes. Elements out of bounds are zero. Raises as `check_start`.
        """
        self.check_start(coordinates, writes=False)
        targets, sources, inside = self._addresses(coordinates, shared_address)
        each = np.arange(self.size)
        after = shared.copy()
        after[targets[~inside][:, None] + each] = 0
        after[targets[inside][:, None] + each] = memory[sources[inside][:, None] + each]
        return after

    def stored(
        self,
        memory: npt.NDArray[np.uint8],
        coordinates: Sequence[int],
        shared: npt.NDArray[np.uint8],
        shared_address: int,
    ) -> npt.NDArray[np.uint8]:
        """Global memory after `cp.async.bulk.tensor.*.global.shared::cta.tile.bulk_group`, which writes only the tensor
        and the rest of the last unit of each of its rows. Raises as `check_start`.
        """
        self.check_start(coordinates, writes=True)
        sources, targets, inside = self.written()._addresses(coordinates, shared_address)
        each = np.arange(self.size)
        after = memory.copy()
        after[targets[inside][:, None] + each] = shared[sources[inside][:, None] + each]
        return after
