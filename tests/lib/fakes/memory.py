"""The fake device's memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from inside.cuda import ILLEGAL_ADDRESS, CudaFailure

__all__ = ["FakeBlock", "FakeMemory"]

POISON = 0xCB


@dataclass(eq=False)
class FakeBlock:
    address: int
    nbytes: int
    live: bool = True


class FakeMemory:
    """The device's memory: addresses that the host cannot access, with a gap after each block."""

    def __init__(self) -> None:
        self.blocks: list[FakeBlock] = []
        self._bytes: dict[int, np.ndarray[Any, Any]] = {}
        self._next = 0x7F00_0000_0000

    def add(self, nbytes: int) -> FakeBlock:
        block = FakeBlock(self._next, nbytes)
        self._next += -(-(nbytes + 4096) // 4096) * 4096
        self.blocks.append(block)
        self._bytes[block.address] = np.full(nbytes, POISON, np.uint8)
        return block

    def remove(self, block: FakeBlock) -> None:
        assert block.live, f"block {block.address:#x} is freed twice"
        block.live = False
        self._bytes[block.address][:] = POISON

    def at(self, address: int, nbytes: int) -> np.ndarray[Any, Any]:
        """The bytes there. Raises a sticky failure for an address outside every live block."""
        for block in self.blocks:
            if block.live and block.address <= address and address + nbytes <= block.address + block.nbytes:
                start = address - block.address
                return self._bytes[block.address][start : start + nbytes]
        raise CudaFailure(ILLEGAL_ADDRESS, "kernel", f"{nbytes} bytes at {address:#x}")

    def array(self, address: int, shape: tuple[int, ...], dtype: Any) -> np.ndarray[Any, Any]:
        dtype = np.dtype(dtype)
        nbytes = int(np.prod(shape)) * dtype.itemsize
        return self.at(address, nbytes).view(dtype).reshape(shape)
