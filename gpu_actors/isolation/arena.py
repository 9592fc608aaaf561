"""Arena: memory that two processes share, given out in blocks.

A memfd and not a named segment: it has no name that could be left behind, no /dev/shm whose size a container limits,
and it goes with the last process that has it, however that process ends. It is as large as the machine's memory and
sparse, so that it never has to grow; pages that no block uses any more are given back to the system.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
import weakref
from bisect import bisect_right, insort
from collections import deque
from typing import Any

import numpy as np

__all__ = ["Arena", "Host"]

Host = np.ndarray[Any, Any]

_PAGE = mmap.PAGESIZE

# Bytes of free pages that are kept for the next blocks, which then find them mapped.
_KEPT = 64 << 20


class Arena:
    """Blocks of shared memory. One process takes and gives them; the other one maps the same descriptor.

    fd: of a memfd, which the arena owns; None makes one. size: bytes, of a new one.
    A block is free again once it has been given as often as it was taken and held.
    """

    shared: bool = True

    def __init__(self, fd: int | None = None, size: int | None = None) -> None:
        if fd is None:
            fd = os.memfd_create("gpu_actors", os.MFD_CLOEXEC)
            os.ftruncate(fd, _page_up(size) if size is not None else _memory())
        self._fd = fd
        self._lock = threading.Lock()
        self.size: int = os.fstat(fd).st_size
        self._map = mmap.mmap(fd, self.size)
        self.address: int = np.frombuffer(self._map, np.uint8, 1).__array_interface__["data"][0]
        self._blocks: dict[int, list[int]] = {}  # by their start: size, holds
        self._starts: list[int] = []
        self._free: list[tuple[int, int]] = [(0, self.size)]
        self._dropped: deque[int] = deque()  # by finalizers, which may run where this thread holds the lock
        self._resident = 0  # bytes of free pages that may still be in memory

    @property
    def fd(self) -> int:
        return self._fd

    def close(self) -> None:
        """Close the descriptor. The memory stays mapped for the arrays that lie in it."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def unmap(self) -> None:
        """Close the mapping too, which has a descriptor of its own, unless an array lies in it."""
        self.close()
        with contextlib.suppress(BufferError):
            self._map.close()

    def take(self, nbytes: int) -> int:
        """The start of a new block, held once. Raises MemoryError where the arena is full."""
        self._clear()
        room = _page_up(max(nbytes, 1))
        with self._lock:
            for index, (begin, end) in enumerate(self._free):
                if end - begin >= room:
                    if end - begin == room:
                        del self._free[index]
                    else:
                        self._free[index] = (begin + room, end)
                    self._resident = max(0, self._resident - room)
                    self._blocks[begin] = [room, 1]
                    insort(self._starts, begin)
                    return begin
        raise MemoryError(f"no room for {nbytes} bytes in {self.size} bytes of shared memory")

    def room(self, start: int) -> int:
        """Bytes of a block."""
        return self._blocks[start][0]

    def hold(self, start: int) -> None:
        """One more user of a block, who will `give` it."""
        with self._lock:
            self._blocks[start][1] += 1

    def give(self, start: int) -> None:
        """One user fewer; the last one frees the block."""
        with self._lock:
            block = self._blocks.get(start)
            if block is None:
                return
            block[1] -= 1
            if block[1]:
                return
            del self._blocks[start]
            self._starts.remove(start)
            self._release(start, start + block[0])

    def used(self) -> int:
        """Bytes in blocks."""
        self._clear()
        with self._lock:
            return sum(size for size, _ in self._blocks.values())

    def find(self, address: int) -> int | None:
        """The start of the block that an address of this process lies in."""
        place = address - self.address
        if not 0 <= place < self.size:
            return None
        with self._lock:
            index = bisect_right(self._starts, place) - 1
            if index < 0:
                return None
            start = self._starts[index]
            return start if place < start + self._blocks[start][0] else None

    def memory(self, start: int, nbytes: int) -> Host:
        """The bytes of a block, as an array that all arrays made of it keep alive."""
        return np.frombuffer(self._map, np.uint8, nbytes, start)

    def empty(self, shape: int | tuple[int, ...], dtype: Any = np.float32) -> Host:
        """An array in a block of its own, which is given with the array."""
        wanted = np.dtype(dtype)
        extents = (shape,) if isinstance(shape, int) else tuple(shape)
        count = 1
        for extent in extents:
            count *= extent
        start = self.take(count * wanted.itemsize)
        memory = self.memory(start, max(count * wanted.itemsize, 1))
        weakref.finalize(memory, self._dropped.append, start).atexit = False
        return np.ndarray(extents, wanted, memory)

    def _clear(self) -> None:
        while self._dropped:
            self.give(self._dropped.popleft())

    def _release(self, begin: int, end: int) -> None:
        self._resident += end - begin
        index = bisect_right(self._free, (begin, end))
        # Punched before it is joined with its neighbours, which have had their turn.
        if self._resident > _KEPT:
            self._map.madvise(mmap.MADV_REMOVE, begin, end - begin)
            self._resident -= end - begin
        if index < len(self._free) and self._free[index][0] == end:
            end = self._free.pop(index)[1]
        if index > 0 and self._free[index - 1][1] == begin:
            begin = self._free.pop(index - 1)[0]
            index -= 1
        self._free.insert(index, (begin, end))


def _page_up(nbytes: int) -> int:
    return -(-nbytes // _PAGE) * _PAGE


def _memory() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
