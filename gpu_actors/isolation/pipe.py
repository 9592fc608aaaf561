"""PipeChannel: a channel over a socket pair, with arrays in two shared arenas.

Each side writes one arena and reads the other. `post` writes to the socket on the caller's thread; what the socket does
not take goes to a backlog, which the thread in `serve` sends on. That thread alone reads.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from gpu_actors.errors import GpuActorsError
from gpu_actors.isolation.arena import Arena
from gpu_actors.isolation.packing import Argument, Packed, pack, unpack

__all__ = ["PipeChannel", "Unreadable"]

_HEADER = struct.Struct("<IIQQ")  # bytes of the frame behind it, of the places in that; sequence; about
_READ = 1 << 18


class Unreadable(NamedTuple):
    """Received in place of a record that cannot be unpacked. about: the request it belongs to."""

    about: int
    error: BaseException


class _Parcel(NamedTuple):
    about: int
    parts: tuple[bytes, bytes]
    blocks: list[int]


class PipeChannel:
    """One side's end. Owns the socket.

    asks: whether this side makes the requests, and takes answers out of their blocks, or the other way round. mine: the
    arena that this side writes. theirs: the other one.
    received: called with a sequence number and a record, on the thread in `serve`.
    """

    def __init__(
        self,
        sock: socket.socket,
        asks: bool,
        mine: Arena,
        theirs: Arena,
        received: Callable[[int, Any], None],
    ) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._asks = asks
        self._mine = mine
        self._theirs = theirs
        self._received = received
        self._lock = threading.Lock()
        self._backlog: deque[memoryview] = deque()
        self._closed = False
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._buffer = bytearray(_READ)
        self._begun = bytearray()
        self._wanted = 0  # bytes until another frame is whole
        self._requests: dict[int, list[Argument]] = {}
        self._returned: deque[int] = deque()
        self._held: dict[int, int] = {}  # blocks of ours that the other side has not given back, and how often

    # Sending

    def pack(self, record: Any, about: int = 0) -> Any:
        known = () if self._asks else self._requests.pop(about, ())
        returned = self._take_returned()
        try:
            packed: Packed = pack(record, self._mine, known, returned)
        except BaseException:
            self._returned.extend(returned)
            raise
        if self._asks and packed.arguments:
            self._requests[about] = packed.arguments
        return _Parcel(about, (packed.places, packed.body), packed.blocks)

    def post(self, sequence: int, parcel: _Parcel) -> None:
        places, body = parcel.parts
        head = _HEADER.pack(len(places) + len(body), len(places), sequence, parcel.about)
        with self._lock:
            if self._closed:
                for start in parcel.blocks:
                    self._mine.give(start)
                return
            for start in parcel.blocks:
                self._held[start] = self._held.get(start, 0) + 1
            frame = b"".join((head, places, body))
            if self._backlog:
                self._backlog.append(memoryview(frame))
                return
            sent = self._send(frame)
            if sent < len(frame):
                self._backlog.append(memoryview(frame)[sent:])
                self.wake()

    def forget(self, about: int) -> None:
        """That request is answered here: what still comes for it is not written into its arrays."""
        self._requests.pop(about, None)

    @property
    def waiting(self) -> int:
        """Frames that the socket has not taken yet."""
        return len(self._backlog)

    def wake(self) -> None:
        """Have the thread in `serve` go round once."""
        with contextlib.suppress(OSError):
            os.eventfd_write(self._wake, 1)

    # Receiving

    def serve(self, tick: Callable[[], float], *others: int) -> int | None:
        """Read, and send what waits, until the other side is gone (None) or another descriptor is readable.

        tick: called now and then; gives the seconds until it is to be called again, negative to leave with -1.
        others: descriptors to watch. Gives the one that was readable, once what the socket held has been read.
        """
        poll = select.poll()
        for descriptor in (*others, self._wake):
            poll.register(descriptor, select.POLLIN)
        wanted = 0
        while True:
            seconds = tick()
            if seconds < 0:
                return -1
            events = select.POLLIN | (select.POLLOUT if self._backlog else 0)
            if events != wanted:
                poll.register(self._socket, events)
                wanted = events
            ready = dict(poll.poll(seconds * 1e3))
            if ready.pop(self._wake, 0):
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._wake)
            mine = ready.pop(self._socket.fileno(), 0)
            if mine & select.POLLOUT:
                self._flush()
            if mine & ~select.POLLOUT and not self._take_in():
                return None
            if ready:
                while self._take_in(once=True):
                    pass
                return next(iter(ready))

    def close(self) -> None:
        """Close the socket. Blocks that the other side has not given back stay held: see `reclaim`."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._backlog.clear()
        self._requests.clear()
        self._socket.close()
        os.close(self._wake)

    def reclaim(self) -> None:
        """Take back what the other side holds. Only once its process has ended."""
        with self._lock:
            held, self._held = self._held, {}
        for start, times in held.items():
            for _ in range(times):
                self._mine.give(start)

    def descriptors(self) -> tuple[int, ...]:
        """What a forked child has to close."""
        return () if self._closed else (self._socket.fileno(), self._wake)

    def _send(self, frame: bytes | memoryview) -> int:
        try:
            return self._socket.send(frame, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except BlockingIOError:
            return 0
        except OSError:
            return len(frame)  # the reader sees the end of the other side, and tells of it

    def _flush(self) -> None:
        with self._lock:
            while self._backlog:
                frame = self._backlog[0]
                sent = self._send(frame)
                if sent < len(frame):
                    self._backlog[0] = frame[sent:]
                    return
                self._backlog.popleft()

    def _take_in(self, once: bool = False) -> bool:
        """Read what there is. False at the end of the stream, and with ``once`` where nothing is left."""
        try:
            count = self._socket.recv_into(self._buffer)
        except BlockingIOError:
            return not once
        except OSError:
            return False
        if not count:
            return False
        data = memoryview(self._buffer)[:count]
        if not self._begun:
            self._begun = bytearray(self._frames(data))
            return True
        self._begun += data
        if len(self._begun) >= self._wanted:
            self._begun = bytearray(self._frames(memoryview(bytes(self._begun))))
        return True

    def _frames(self, data: memoryview) -> memoryview:
        """Hand on the whole frames. Gives what is left."""
        at, end = 0, len(data)
        while end - at >= _HEADER.size:
            size, placed, sequence, about = _HEADER.unpack_from(data, at)
            begin = at + _HEADER.size
            if end - begin < size:
                self._wanted = _HEADER.size + size
                return data[at:]
            at = begin + size
            places, body = bytes(data[begin : begin + placed]), bytes(data[begin + placed : at])
            self._received(sequence, self._record(places, body, about))
        self._wanted = _HEADER.size
        return data[at:]

    def _record(self, places: bytes, body: bytes, about: int) -> Any:
        try:
            own: Sequence[Argument] = self._requests.pop(about, ()) if self._asks else ()
            record, arguments, returned = unpack(places, body, self._theirs, self._returned.append, own, self._asks)
        except BaseException as error:
            kept = error if isinstance(error, GpuActorsError) else GpuActorsError(f"cannot be read: {error!r}")
            return Unreadable(about, kept)
        self._take_back(returned)
        if arguments and not self._asks:
            self._requests[about] = arguments
        return record

    # Blocks

    def _take_returned(self) -> list[int]:
        returned: list[int] = []
        while self._returned:
            returned.append(self._returned.popleft())
        return returned

    def _take_back(self, returned: list[int]) -> None:
        for start in returned:
            with self._lock:
                times = self._held.get(start, 0)
                if not times:
                    continue
                if times == 1:
                    del self._held[start]
                else:
                    self._held[start] = times - 1
            self._mine.give(start)
