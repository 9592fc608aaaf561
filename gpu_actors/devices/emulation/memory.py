"""Memory for emulated launches: mappings with inaccessible pages around them, and buffers in them."""

from __future__ import annotations

import bisect
import copy
import ctypes
import mmap
import os
import threading
import weakref
from typing import Any

import numpy as np
import numpy.typing as npt

from gpu_actors.errors import InvalidRequest, OutOfDeviceMemory

__all__ = ["CANARY", "PAGE", "POISON", "AddressSpace", "EmulatedBuffer", "Mapping"]

PAGE = 4096
POISON = 0xFF  # a NaN in every floating-point format, and -1
CANARY = 0xC5  # fills the bytes between a buffer and its pages' ends

# Address space is free: a wrong stride faults even when it misses the buffer by megabytes.
_GUARD = 64 << 20
_MAP_NORESERVE = 0x4000
_MAP_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


class Mapping:
    """Anonymous pages, usable from begin to end, with guard bytes of inaccessible pages on both sides.

    NumPy arrays over it (np.asarray) keep it alive. It is unmapped when the last of them is freed.
    """

    def __init__(self, nbytes: int, guard: int = _GUARD) -> None:
        usable = round_up(nbytes, PAGE)
        total = usable + 2 * guard
        base: int = _libc.mmap(None, total, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE, -1, 0)
        if base == _MAP_FAILED:
            raise OutOfDeviceMemory(f"cannot map {total} bytes of address space for an emulated buffer")
        self.map_begin: int = base
        self.map_end: int = base + total
        self.begin: int = base + guard
        self.end: int = base + guard + usable
        self.used = nbytes
        weakref.finalize(self, _libc.munmap, base, total)
        if usable:
            self.protect(self.begin, usable, mmap.PROT_READ | mmap.PROT_WRITE)

    def protect(self, address: int, nbytes: int, protection: int) -> None:
        """Set the protection of whole pages. Raises OutOfDeviceMemory if the system refuses."""
        if _libc.mprotect(address, nbytes, protection) != 0:
            raise OutOfDeviceMemory(f"cannot change the protection of {nbytes} bytes (errno {ctypes.get_errno()})")

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return {
            "version": 3,
            "typestr": "|u1",
            "shape": (self.end - self.begin,),
            "data": (self.begin, False),
        }


class EmulatedBuffer:
    """Global memory for emulated kernels: nbytes bytes that end at (or up to 15 bytes before) an inaccessible page.

    name: its name in faults.
    address: the 64-bit "device pointer". It is 16-byte aligned, as the address of a GPU tensor may be.
    array: its bytes, (nbytes,) uint8. New bytes are 0xFF, a NaN in every floating-point format.
    Raises InvalidRequest for a negative size, OutOfDeviceMemory if the pages cannot be mapped.
    """

    ALIGNMENT = 16

    def __init__(self, nbytes: int, name: str = "buffer") -> None:
        if nbytes < 0:
            raise InvalidRequest("nbytes", nbytes, "a buffer has zero or more bytes")
        self._attach(Mapping(nbytes), name)
        self.renew_canaries()
        self.array[...] = POISON

    def _attach(self, mapping: Mapping, name: str) -> None:
        self.name = name
        self.nbytes: int = mapping.used
        self._mapping = mapping
        self.address: int = mapping.end - round_up(self.nbytes, self.ALIGNMENT)
        everything = np.asarray(mapping)
        start = self.address - mapping.begin
        self._head = everything[:start]
        self._tail = everything[start + self.nbytes :]
        self.array: npt.NDArray[np.uint8] = everything[start : start + self.nbytes]

    @classmethod
    def of(cls, array: npt.NDArray[Any], name: str = "buffer") -> EmulatedBuffer:
        """A buffer with a copy of array, in C order."""
        buffer = cls(array.nbytes, name)
        buffer.array[...] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        return buffer

    def named(self, name: str) -> EmulatedBuffer:
        """The same buffer under another name."""
        buffer = copy.copy(self)
        buffer.name = name
        return buffer

    def view(self, dtype: npt.DTypeLike, shape: int | tuple[int, ...] = -1) -> npt.NDArray[Any]:
        """The same bytes as an array of dtype and shape. Writing to it writes to the buffer."""
        return self.array.view(dtype).reshape(shape)

    @property
    def map_range(self) -> tuple[int, int]:
        """The first and the past-the-last address of the buffer's pages, including the inaccessible ones."""
        return self._mapping.map_begin, self._mapping.map_end

    def renew_canaries(self) -> None:
        """Restore the canaries next to the buffer, and so forget what was written there."""
        self._head[...] = CANARY
        self._tail[...] = CANARY

    def stray_write(self) -> str | None:
        """Where a kernel wrote next to the buffer without reaching an inaccessible page. None if it did not."""
        if (self._head != CANARY).any():
            return "before its first byte"
        return "past its last byte" if (self._tail != CANARY).any() else None

    def __repr__(self) -> str:
        return f"EmulatedBuffer({self.nbytes}, {self.name!r})"


class AddressSpace:
    """Buffers by the addresses of their pages. Safe to use from any thread."""

    def __init__(self) -> None:
        self._begins: list[int] = []
        self._buffers: dict[int, EmulatedBuffer] = {}
        self._renew_lock()
        os.register_at_fork(after_in_child=self._renew_lock)  # a thread of the parent may hold it

    def _renew_lock(self) -> None:
        self._lock = threading.Lock()

    def add(self, buffer: EmulatedBuffer) -> None:
        begin, _ = buffer.map_range
        with self._lock:
            bisect.insort(self._begins, begin)
            self._buffers[begin] = buffer

    def remove(self, buffer: EmulatedBuffer) -> None:
        begin, _ = buffer.map_range
        with self._lock:
            del self._buffers[begin]
            del self._begins[bisect.bisect_left(self._begins, begin)]

    def find(self, address: int) -> EmulatedBuffer | None:
        """The buffer whose pages, inaccessible ones too, have this address. None if there is none."""
        with self._lock:
            index = bisect.bisect_right(self._begins, address) - 1
            buffer = self._buffers[self._begins[index]] if index >= 0 else None
        return buffer if buffer is not None and address < buffer.map_range[1] else None
