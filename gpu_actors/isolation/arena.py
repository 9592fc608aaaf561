"""Arena: a memfd, as memory that two processes share, handed out in blocks.

It is as large as the machine's memory, or as the limits of the process allow, and sparse, so that it never has to grow.
Pages that no block uses any more are returned to the system.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import resource
import threading
import weakref
from bisect import bisect_right, insort
from collections import deque
from typing import Any

import numpy as np

from gpu_actors.catching import undo_on_error

__all__ = ["Arena", "Host"]

Host = np.ndarray[Any, Any]

_PAGE = mmap.PAGESIZE

# Bytes of free pages that stay in memory for the next blocks.
_WARM_BYTES = 64 << 20

# One arena may take 1 / _SHARE of the address space (ulimit -v). A context has two arenas.
_SHARE = 8
_LEAST = 1 << 20


class Arena:
    """Blocks of shared memory. One process takes them and gives them back; the other one maps the same descriptor.

    A block is free again once it has been given back as often as it was taken and held.

    fd: the descriptor of a memfd, which the arena then owns. None makes a new memfd.
    size: the bytes of a new memfd, None for as many as possible.

    Raises OSError if there is no room for a new memfd.
    """

    shared: bool = True

    def __init__(self, fd: int | None = None, size: int | None = None) -> None:
        self._fd, self._map = _new(size) if fd is None else (fd, mmap.mmap(fd, os.fstat(fd).st_size))
        self._lock = threading.Lock()
        self.size: int = len(self._map)
        self.address: int = np.frombuffer(self._map, np.uint8, 1).__array_interface__["data"][0]
        self._blocks: dict[int, list[int]] = {}  # by start: size and number of holds
        self._starts: list[int] = []
        self._free = _Spans()
        self._free.add(0, self.size)
        self._dropped: deque[int] = deque()  # by finalizers, which may run while this thread holds the lock
        self._warm = _Spans()  # free pages that may still be in memory

    @property
    def fd(self) -> int:
        return self._fd

    def close(self) -> None:
        """Close the descriptor. The memory stays mapped for the arrays that lie in it."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def unmap(self) -> None:
        """Close the descriptor. Close the mapping, which has its own descriptor, unless an array lies in it."""
        self.close()
        with contextlib.suppress(BufferError):
            self._map.close()

    def take(self, nbytes: int) -> int:
        """Return the start of a new block, held once. Raises MemoryError if the arena has no room."""
        self._clear()
        room = _page_up(max(nbytes, 1))
        with self._lock:
            begin = self._free.first(room)
            if begin is not None:
                self._free.remove(begin, begin + room)
                self._warm.remove(begin, begin + room)
                self._blocks[begin] = [room, 1]
                insort(self._starts, begin)
                return begin
        raise MemoryError(f"no room for {nbytes} bytes in {self.size} bytes of shared memory")

    def room(self, start: int) -> int:
        return self._blocks[start][0]

    def hold(self, start: int) -> None:
        with self._lock:
            self._blocks[start][1] += 1

    def give(self, start: int) -> None:
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
        self._clear()
        with self._lock:
            return sum(size for size, _ in self._blocks.values())

    def find(self, address: int) -> int | None:
        """The start of the block that contains an address of this process. None if no block does."""
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
        """The bytes of a block, as an array. Every array made of it keeps it alive."""
        return np.frombuffer(self._map, np.uint8, nbytes, start)

    def empty(self, shape: int | tuple[int, ...], dtype: Any = np.float32) -> Host:
        """Return an array in a block of its own. The block is given back when the array is freed."""
        element = np.dtype(dtype)
        extents = (shape,) if isinstance(shape, int) else tuple(shape)
        count = 1
        for extent in extents:
            count *= extent
        start = self.take(count * element.itemsize)
        memory = self.memory(start, max(count * element.itemsize, 1))
        weakref.finalize(memory, self._dropped.append, start).atexit = False
        return np.ndarray(extents, element, memory)

    def _clear(self) -> None:
        while self._dropped:
            self.give(self._dropped.popleft())

    def _release(self, begin: int, end: int) -> None:
        if self._warm.total + end - begin > _WARM_BYTES:
            self._map.madvise(mmap.MADV_REMOVE, begin, end - begin)
        else:
            self._warm.add(begin, end)
        self._free.add(begin, end)


class _Spans:
    """Spans of bytes that do not overlap, in order. total: bytes in all of them."""

    def __init__(self) -> None:
        self._spans: list[tuple[int, int]] = []
        self.total: int = 0

    def first(self, nbytes: int) -> int | None:
        return next((begin for begin, end in self._spans if end - begin >= nbytes), None)

    def add(self, begin: int, end: int) -> None:
        """Add a span that overlaps no other. It is joined with adjacent spans."""
        self.total += end - begin
        spans = self._spans
        index = bisect_right(spans, (begin, end))
        if index < len(spans) and spans[index][0] == end:
            end = spans.pop(index)[1]
        if index > 0 and spans[index - 1][1] == begin:
            index -= 1
            begin = spans.pop(index)[0]
        spans.insert(index, (begin, end))

    def remove(self, begin: int, end: int) -> None:
        """Remove the bytes from ``begin`` to ``end`` from all spans that contain any of them."""
        spans = self._spans
        first = bisect_right(spans, (begin, begin))
        if first > 0 and spans[first - 1][1] > begin:
            first -= 1
        last = first
        left: list[tuple[int, int]] = []
        while last < len(spans) and spans[last][0] < end:
            low, high = spans[last]
            self.total -= min(high, end) - max(low, begin)
            left += [span for span in ((low, min(high, begin)), (max(low, end), high)) if span[0] < span[1]]
            last += 1
        spans[first:last] = left


def _page_up(nbytes: int) -> int:
    return -(-nbytes // _PAGE) * _PAGE


def _new(size: int | None) -> tuple[int, mmap.mmap]:
    """A memfd and its mapping. size: in bytes; None for as large as possible."""
    least = _LEAST if size is None else size
    nbytes = _memory() if size is None else size
    fd = os.memfd_create("gpu_actors", os.MFD_CLOEXEC)
    with undo_on_error(os.close, fd):
        while True:
            try:
                os.ftruncate(fd, _page_up(nbytes))
                return fd, mmap.mmap(fd, _page_up(nbytes))
            except OSError:  # ulimit -f, or ulimit -v if the program has used most of it
                nbytes //= 2
                if nbytes < least:
                    raise


def _memory() -> int:
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    addresses = resource.getrlimit(resource.RLIMIT_AS)[0]
    return memory if addresses == resource.RLIM_INFINITY else min(memory, addresses // _SHARE)
