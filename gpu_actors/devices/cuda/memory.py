"""Memory that a device hands to its launches: page-locked staging on the host, and blocks that Python owns.

No block is ever given to a second launch before the first one's event was seen to be over, on whatever streams they
run. That is stricter than the stream order that CuPy's and torch's allocators keep, and needs no streams at all.
"""

from __future__ import annotations

import ctypes
import math
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from gpu_actors.arrays.adopt import dtype_of
from gpu_actors.arrays.device_array import DeviceArray
from gpu_actors.arrays.dlpack import contiguous_strides
from gpu_actors.devices.cuda.api import CudaApi, MemoryBlock
from gpu_actors.devices.cuda.driver import Driver
from gpu_actors.devices.cuda.errors import OUT_OF_MEMORY, CudaFailure
from gpu_actors.errors import OutOfDeviceMemory

__all__ = ["DeviceMemory", "Layout", "MemoryPools", "StagingBlock", "StagingPool", "keep_for_ever"]

R = TypeVar("R")

ALIGNMENT = 256
"""Of each operand, in bytes: what cudaMalloc gives, which kernels rely on for vector loads and tensor maps."""


class Layout:
    """Lays operands out in one block. size: bytes so far."""

    __slots__ = ("size",)

    def __init__(self) -> None:
        self.size: int = 0

    def reserve(self, nbytes: int) -> int:
        """The offset of the next operand."""
        offset = self.size
        self.size += -(-nbytes // ALIGNMENT) * ALIGNMENT
        return offset


class StagingBlock:
    """Page-locked host memory. bytes: an ndarray over all of it."""

    __slots__ = ("address", "bytes", "capacity")

    def __init__(self, address: int, capacity: int) -> None:
        self.address: int = address
        self.capacity: int = capacity
        memory = (ctypes.c_uint8 * capacity).from_address(address)
        self.bytes: np.ndarray[Any, np.dtype[np.uint8]] = np.frombuffer(memoryview(memory), np.uint8)


class StagingPool:
    """Page-locked blocks in sizes of powers of two.

    Locking pages takes far longer than a copy, so blocks are kept, as many as ``keep`` bytes in all; what goes beyond
    is released when its launch is over.
    """

    SMALLEST = 1 << 12

    def __init__(self, api: CudaApi, keep: int = 1 << 28) -> None:
        self._api = api
        self._keep = keep
        self._kept = 0
        self._idle: dict[int, list[StagingBlock]] = {}
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> StagingBlock:
        """A block of at least ``nbytes``. Raises CudaFailure."""
        capacity = max(self.SMALLEST, 1 << (nbytes - 1).bit_length())
        with self._lock:
            idle = self._idle.get(capacity)
            if idle:
                self._kept -= capacity
                return idle.pop()
        return StagingBlock(self._api.allocate_pinned(capacity), capacity)

    def give(self, block: StagingBlock) -> None:
        """Take a block back. No copy to or from it may be under way."""
        with self._lock:
            if self._kept + block.capacity <= self._keep:
                self._kept += block.capacity
                self._idle.setdefault(block.capacity, []).append(block)
                return
        self._api.free_pinned(block.address)

    def trim(self) -> None:
        """Release the blocks that no launch uses."""
        with self._lock:
            idle, self._idle, self._kept = self._idle, {}, 0
        for blocks in idle.values():
            for block in blocks:
                self._api.free_pinned(block.address)

    def close(self) -> None:
        self.trim()
        self._keep = 0


class MemoryPools:
    """The memory of one device for launches, and their staging. Safe from any thread."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self._staging = StagingPool(driver.api)

    def empty(self, shape: tuple[int, ...], dtype: str) -> DeviceArray:
        """An array on the device with whatever was in its memory. Freed when it is dropped.

        For launches only: its memory is used again as soon as it is dropped, so work that others enqueued on it must
        be over by then. Raises OutOfDeviceMemory.
        """
        kind = dtype_of(dtype)
        nbytes = math.prod(shape) * kind.itemsize
        memory = DeviceMemory(self, nbytes) if nbytes else None
        address = memory.address if memory is not None else 0
        strides = contiguous_strides(shape, kind.itemsize)
        return DeviceArray(address, tuple(shape), strides, kind, self.driver.index, owner=memory)

    def take_block(self, nbytes: int) -> MemoryBlock:
        """Device memory. Raises OutOfDeviceMemory once the pool's unused blocks did not help either."""
        return self._spare(self.driver.api.allocate, nbytes, "device memory")

    def free(self, block: MemoryBlock) -> None:
        """Give a block back, from any thread. Its work must be over."""
        if self.driver.may_release:
            self.driver.api.free(block)
        else:
            keep_for_ever(block)

    def take_staging(self, nbytes: int) -> StagingBlock:
        return self._spare(self._staging.take, nbytes, "page-locked host memory")

    def give_staging(self, block: StagingBlock) -> None:
        if self.driver.may_release:
            self.driver.call(self._staging.give, block)

    def close(self) -> None:
        """Release the staging that no launch uses. Raises CudaFailure."""
        self._staging.close()

    def _spare(self, take: Callable[[int], R], nbytes: int, what: str) -> R:
        driver = self.driver
        try:
            return take(nbytes)
        except CudaFailure as failure:
            if failure.status != OUT_OF_MEMORY:
                raise driver.failed(failure) from failure
        driver.call(driver.api.trim)
        driver.call(self._staging.trim)
        try:
            return take(nbytes)
        except CudaFailure as failure:
            if failure.status != OUT_OF_MEMORY:
                raise driver.failed(failure) from failure
            message = f"cuda:{driver.index} has no {what} left for {nbytes} bytes: {failure.detail}"
            raise OutOfDeviceMemory(message) from failure


class DeviceMemory:
    """A block of device memory that goes back to the pool when the last reference to this goes."""

    __slots__ = ("_block", "_pools", "address")

    def __init__(self, pools: MemoryPools, nbytes: int) -> None:
        self._pools = pools
        self._block: MemoryBlock | None = None
        self._block = pools.take_block(nbytes)
        self.address: int = self._block.address

    def release(self) -> None:
        """Give the block back now."""
        block, self._block = self._block, None
        if block is not None:
            self._pools.free(block)

    def __del__(self) -> None:
        self.release()


def keep_for_ever(value: object) -> None:
    """Never release ``value``, not even when the interpreter ends.

    Freeing memory that a hung kernel may still use would block, or hand it to another launch.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))
