"""PipeChannel: a channel over a socket pair, with arrays in two shared arenas.

Each side writes one arena and reads the other. `post` writes to the socket on the caller's thread; what the socket does
not take goes to a backlog, which the thread in `serve` sends on. That thread reads, or one other in its place (see
`Substitute`).
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any, NamedTuple

from gpu_actors.errors import GpuActorsError
from gpu_actors.isolation.arena import Arena
from gpu_actors.isolation.packing import Argument, Packed, pack, unpack

__all__ = ["Pace", "PipeChannel", "Substitute", "Unreadable"]

_HEADER = struct.Struct("<IIQQ")  # bytes of the frame behind it, of the places in that; sequence; about
_READ = 1 << 18


class Unreadable(NamedTuple):
    """Received in place of a record that cannot be unpacked. about: the request it belongs to."""

    about: int
    error: BaseException

    @classmethod
    def of(cls, about: int, error: BaseException) -> Unreadable:
        """error: of unpacking. Its frames hold the record's memory, so they do not go along."""
        if isinstance(error, GpuActorsError):
            return cls(about, error.with_traceback(None))
        return cls(about, GpuActorsError(f"cannot be read: {error!r}"))


class _Parcel(NamedTuple):
    about: int
    parts: tuple[bytes, bytes]
    blocks: list[int]


class PipeChannel:
    """One side's end. Owns the socket.

    asks: whether this side makes the requests, and takes answers out of their blocks, or the other way round. mine: the
    arena that this side writes. theirs: the other one.
    received: called with a sequence number and a record, on the thread that reads.
    elsewhere: whether a substitute may receive a record. One that it may not is left to the thread in `serve`, with all
    that comes behind it until that thread has it.
    """

    def __init__(
        self,
        sock: socket.socket,
        asks: bool,
        mine: Arena,
        theirs: Arena,
        received: Callable[[int, Any], None],
        elsewhere: Callable[[Any], bool] = bool,
    ) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._asks = asks
        self._mine = mine
        self._theirs = theirs
        self._received = received
        self._elsewhere = elsewhere
        self._reading = threading.Lock()  # held by the thread that reads
        self._lent = False  # whether that is a substitute
        self._left: deque[tuple[int, Any]] = deque()  # by a substitute to the thread in `serve`
        self._error: BaseException | None = None  # of a substitute
        self._poll: select.epoll | None = None
        self._watched = 0
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
        with select.epoll() as poll:
            for descriptor in (*others, self._wake):
                poll.register(descriptor, select.EPOLLIN)
            poll.register(self._socket, 0)
            self._poll, self._watched = poll, 0
            try:
                return self._serve(poll, tick)
            finally:
                with self._lock:
                    self._poll = None

    def _serve(self, poll: select.epoll, tick: Callable[[], float]) -> int | None:
        while True:
            if self._left:
                with self._reading:
                    while self._left:
                        self._received(*self._left.popleft())
            if self._error is not None:
                raise self._error
            seconds = tick()
            if seconds < 0:
                return -1
            self._watch()
            ready = dict(poll.poll(seconds))
            if ready.pop(self._wake, 0):
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._wake)
            mine = ready.pop(self._socket.fileno(), 0)
            if mine & select.EPOLLOUT:
                self._flush()
            # Where another thread reads, it sees the end of the other side too, and leaves it to this one.
            if mine & ~select.EPOLLOUT and self._reading.acquire(blocking=False):
                try:
                    if not self._take_in():
                        return None
                finally:
                    self._reading.release()
            if ready:
                while self._take_in(once=True):
                    pass
                return next(iter(ready))

    def substitute(self, waker: int) -> Substitute:
        """For a thread that may read in place of the one in `serve`. waker: a descriptor that ends its wait."""
        return Substitute(self, self._socket, waker)

    def lend(self) -> bool:
        """Let the calling thread read, until it gives that back. False where another thread reads."""
        if not self._reading.acquire(blocking=False):
            return False
        if self._left or self._poll is None:
            self._reading.release()
            return False
        self._lent = True
        self._watch()
        return True

    def give_back(self, error: BaseException | None) -> None:
        """Let the thread in `serve` read again. error: what it is to raise."""
        self._lent = False
        self._reading.release()
        self._watch()
        if error is not None:
            self._error = error
            self.wake()

    def take_in(self) -> None:
        """Read what there is. At the end of the stream, the thread in `serve` is woken."""
        self._take_in()

    def _watch(self) -> None:
        """Have the thread in `serve` woken by the socket, as far as it is to act on it."""
        with self._lock:
            events = (0 if self._lent else select.EPOLLIN) | (select.EPOLLOUT if self._backlog else 0)
            if events != self._watched and self._poll is not None:
                self._poll.modify(self._socket, events)
                self._watched = events

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
        if self._closed:
            return ()
        poll = self._poll
        return (self._socket.fileno(), self._wake, *(() if poll is None else (poll.fileno(),)))

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
            self._hand_on(sequence, self._record(places, body, about))
        self._wanted = _HEADER.size
        return data[at:]

    def _hand_on(self, sequence: int, record: Any) -> None:
        if self._lent and (self._left or not self._elsewhere(record)):
            self._left.append((sequence, record))
            self.wake()
        else:
            self._received(sequence, record)

    def _record(self, places: bytes, body: bytes, about: int) -> Any:
        try:
            own: Sequence[Argument] = self._requests.pop(about, ()) if self._asks else ()
            record, arguments = unpack(
                places, body, self._theirs, self._returned.append, own, self._asks, self._take_back
            )
        except BaseException as error:
            return Unreadable.of(about, error)
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


class Pace:
    """Whether to wait for the next request awake: where requests come back to back, and sooner for it.

    A thread that sleeps takes 20 to 40 us to wake on a quiet virtual machine, and its CPU with it. On a busy one a
    thread that stays awake takes the CPU from the program that is to send the request. So both are tried in turn on
    ``TRIED`` requests, and the better one is kept for the next ``KEPT``. Staying awake must let a request come
    ``GAIN`` seconds sooner, at the median.
    """

    AWAKE: float = 250e-6
    GAIN: float = 10e-6
    TRIED: int = 16
    KEPT: int = 512

    def __init__(self) -> None:
        self._several = len(os.sched_getaffinity(0)) > 1
        self._came: tuple[list[float], list[float]] = [], []  # seconds asleep, and awake
        self._better = False
        self._turn = 0
        self.awake: bool = False

    def came(self, seconds: float) -> None:
        """A request came after that time."""
        turn = self._turn
        if turn < self.TRIED:
            self._came[self.awake].append(seconds)
        self._turn = turn = (turn + 1) % (self.TRIED + self.KEPT)
        if turn == self.TRIED:
            asleep, awake = self._came
            # One kind may be missing: after a late request none is waited for awake.
            self._better = bool(asleep and awake) and median(awake) + self.GAIN < median(asleep)
            self._came = [], []
        wanted = turn % 2 == 1 if turn < self.TRIED else self._better
        self.awake = wanted and self._several and seconds < self.AWAKE


class Substitute:
    """Reads a channel on a thread that has nothing else to do, so that the thread in `serve` need not wake for it.

    It sleeps until something comes, or looks for it without sleeping: see `Pace`. It looks for ``Pace.AWAKE`` seconds
    at most, without the GIL.
    """

    def __init__(self, channel: PipeChannel, sock: socket.socket, waker: int) -> None:
        self._channel = channel
        self._waker = waker
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)
        self._poll.register(waker, select.POLLIN)
        self._pace = Pace()
        self.receives: int = 0  # the thread that receives records in here

    def read(self) -> bool:
        """Wait for records and receive them, or for the waker. False at once where another thread reads."""
        channel = self._channel
        if not channel.lend():
            return False
        failure: BaseException | None = None
        try:
            for descriptor in self._wait():
                if descriptor == self._waker:
                    os.read(self._waker, 8)
                    continue
                self.receives = threading.get_ident()
                channel.take_in()
        except BaseException as error:
            failure = error
        finally:
            self.receives = 0
            channel.give_back(failure)
        return True

    def _wait(self) -> list[int]:
        began = time.perf_counter()
        ready: list[tuple[int, int]] = []
        if self._pace.awake:
            while not (ready := self._poll.poll(0)) and time.perf_counter() - began < Pace.AWAKE:
                pass
        ready = ready or self._poll.poll()
        self._pace.came(time.perf_counter() - began)
        return [descriptor for descriptor, _ in ready]
