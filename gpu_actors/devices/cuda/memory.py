"""The memory of launches: page-locked staging on the host, and device blocks that Python owns.

A block of the pool goes to another launch only when the event of the first launch is known to be done, whichever
streams they use. This rule is stricter than the stream order of CuPy's and torch's allocators. Only the memory that a
stream keeps for its own launches (`operands.StreamMemory`) is reused in the stream's order.
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

__all__ = ["BlockLayout", "DeviceMemory", "MemoryPools", "StagingBlock", "StagingPool", "leak"]

R = TypeVar("R")

ALIGNMENT = 256
"""The alignment of each operand, in bytes, as cudaMalloc's. Kernels' vector loads and tensor maps rely on it."""


class BlockLayout:
    """The layout of operands in one block. size: bytes so far."""

    __slots__ = ("size",)

    def __init__(self) -> None:
        self.size: int = 0

    def reserve(self, nbytes: int) -> int:
        """Reserve room for the next operand, and return its offset."""
        offset = self.size
        self.size += -(-nbytes // ALIGNMENT) * ALIGNMENT
        return offset


class StagingBlock:
    """Page-locked host memory. bytes: an ndarray of the whole block."""

    __slots__ = ("address", "bytes", "capacity")

    def __init__(self, address: int, capacity: int) -> None:
        self.address: int = address
        self.capacity: int = capacity
        memory = (ctypes.c_uint8 * capacity).from_address(address)
        self.bytes: np.ndarray[Any, np.dtype[np.uint8]] = np.frombuffer(memoryview(memory), np.uint8)


class StagingPool:
    """Page-locked blocks in sizes of powers of two.

    Locking pages takes far longer than a copy, so idle blocks are kept, at most ``max_idle_bytes`` in all. A block
    beyond that is freed when it is released.
    """

    SMALLEST = 1 << 12

    def __init__(self, api: CudaApi, max_idle_bytes: int = 1 << 28) -> None:
        self._api = api
        self._max_idle_bytes = max_idle_bytes
        self._idle_bytes = 0
        self._idle: dict[int, list[StagingBlock]] = {}
        self._lock = threading.Lock()

    def acquire(self, nbytes: int) -> StagingBlock:
        """Return a block of at least ``nbytes``. Raises CudaFailure."""
        capacity = max(self.SMALLEST, 1 << (nbytes - 1).bit_length())
        with self._lock:
            idle = self._idle.get(capacity)
            if idle:
                self._idle_bytes -= capacity
                return idle.pop()
        return StagingBlock(self._api.allocate_pinned(capacity), capacity)

    def release(self, block: StagingBlock) -> None:
        """Take a block back. All copies to and from it must have finished."""
        with self._lock:
            if self._idle_bytes + block.capacity <= self._max_idle_bytes:
                self._idle_bytes += block.capacity
                self._idle.setdefault(block.capacity, []).append(block)
                return
        self._api.free_pinned(block.address)

    def trim(self) -> None:
        """Free the idle blocks."""
        with self._lock:
            idle, self._idle, self._idle_bytes = self._idle, {}, 0
        for blocks in idle.values():
            for block in blocks:
                self._api.free_pinned(block.address)

    def close(self) -> None:
        self.trim()
        self._max_idle_bytes = 0


class MemoryPools:
    """The device memory and the staging memory for the launches of one device. Any thread may use it."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self._staging = StagingPool(driver.api)

    def empty(self, shape: tuple[int, ...], dtype: str) -> DeviceArray:
        """Allocate an array on the device with undefined contents. It is freed with its last reference.

        It is for launches: its memory is reused as soon as it is freed, so any other work on it must have finished by
        then. Raises OutOfDeviceMemory.
        """
        return self._array(shape, dtype, self.driver.api.allocate, None)

    def lend(self, shape: tuple[int, ...], dtype: str) -> DeviceArray:
        """Allocate an array like `empty`, for a caller, who may drop it while work of his own still reads it.

        Its memory is reused in the order of the legacy default stream. Raises OutOfDeviceMemory.
        """
        return self._array(shape, dtype, self.driver.api.lend, self.driver.api.lent_after)

    def _array(
        self, shape: tuple[int, ...], dtype: str, allocate: Callable[[int], MemoryBlock], stream: int | None
    ) -> DeviceArray:
        kind = dtype_of(dtype)
        nbytes = math.prod(shape) * kind.itemsize
        memory = DeviceMemory(self, nbytes, allocate=allocate) if nbytes else None
        address = memory.addresses[0] if memory is not None else 0
        strides = contiguous_strides(shape, kind.itemsize)
        return DeviceArray(address, tuple(shape), strides, kind, self.driver.index, stream, memory)

    def allocate(self, nbytes: int, allocate: Callable[[int], MemoryBlock] | None = None) -> MemoryBlock:
        """Allocate device memory. Raises OutOfDeviceMemory if it fails even after the pool's free blocks are freed.

        allocate: the call for it. Default: `CudaApi.allocate`.
        """
        return self._allocate_or_trim(allocate or self.driver.api.allocate, nbytes, "device memory")

    def free(self, block: MemoryBlock) -> None:
        """Free a block. Any thread may call it. Work on the block must have finished."""
        if self.driver.may_release:
            self.driver.api.free(block)
        else:
            leak(block)

    def acquire_staging(self, nbytes: int) -> StagingBlock:
        return self._allocate_or_trim(self._staging.acquire, nbytes, "page-locked host memory")

    def release_staging(self, block: StagingBlock) -> None:
        if self.driver.may_release:
            self.driver.call(self._staging.release, block)

    def close(self) -> None:
        """Free the idle staging. Raises CudaFailure."""
        self._staging.close()

    def _allocate_or_trim(self, allocate: Callable[[int], R], nbytes: int, what: str) -> R:
        driver = self.driver
        try:
            return allocate(nbytes)
        except CudaFailure as failure:
            if failure.status != OUT_OF_MEMORY:
                raise driver.failed(failure) from failure
        driver.call(driver.api.trim)
        driver.call(self._staging.trim)
        try:
            return allocate(nbytes)
        except CudaFailure as failure:
            if failure.status != OUT_OF_MEMORY:
                raise driver.failed(failure) from failure
            message = f"{driver.name} has no {what} left for {nbytes} bytes: {failure.detail}"
            raise OutOfDeviceMemory(message) from failure


class DeviceMemory:
    """Blocks of device memory, one for each size. They return to the pool with the last reference to this object."""

    __slots__ = ("_blocks", "_pools", "addresses")

    def __init__(self, pools: MemoryPools, *sizes: int, allocate: Callable[[int], MemoryBlock] | None = None) -> None:
        """allocate: as in `MemoryPools.allocate`."""
        self._pools = pools
        self._blocks: list[MemoryBlock] = []
        for nbytes in sizes:
            self._blocks.append(pools.allocate(nbytes, allocate))
        self.addresses: tuple[int, ...] = tuple([block.address for block in self._blocks])

    def release(self) -> None:
        """Return the blocks now."""
        while self._blocks:
            self._pools.free(self._blocks.pop())

    def __del__(self) -> None:
        self.release()


def leak(value: object) -> None:
    """Never free ``value``, not even when the interpreter exits.

    Freeing memory that a hung kernel may still use would block, or give the memory to another launch.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))
