"""PipeChannel: a channel over a socket pair, with arrays in two shared arenas.

Each side writes one arena and reads the other. `post` writes to the socket on the caller's thread. Bytes that the
socket does not take go to a backlog, which the thread in `serve` sends later. That thread also reads, or one other
thread reads in its place (see `Substitute`).
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

__all__ = ["AdaptiveSpin", "PipeChannel", "Substitute", "Unreadable"]

_HEADER = struct.Struct("<IIQQ")  # bytes after the header, bytes of the places among them, sequence, about
_READ = 1 << 18


class Unreadable(NamedTuple):
    """Received in place of a record that cannot be unpacked. about: the number of its request."""

    about: int
    error: BaseException

    @classmethod
    def of(cls, about: int, error: BaseException) -> Unreadable:
        """error: the error of unpacking. The frames of its traceback hold the record's memory, so they are dropped."""
        if isinstance(error, GpuActorsError):
            return cls(about, error.with_traceback(None))
        return cls(about, GpuActorsError(f"cannot be read: {error!r}"))


class _Parcel(NamedTuple):
    about: int
    parts: tuple[bytes, bytes]
    blocks: list[int]


class PipeChannel:
    """One side's end of the channel. Owns the socket.

    is_client: whether this side makes the requests, and copies responses out of their blocks.
    outgoing: the arena that this side writes.
    incoming: the other side's arena.
    received: called with a sequence number and a record, on the thread that reads.
    may_substitute: whether a substitute may receive a record. Other records are deferred to the thread in `serve`. So
        are all later records, until that thread has received the deferred ones.
    """

    def __init__(
        self,
        sock: socket.socket,
        is_client: bool,
        outgoing: Arena,
        incoming: Arena,
        received: Callable[[int, Any], None],
        may_substitute: Callable[[Any], bool] = bool,
    ) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._is_client = is_client
        self._outgoing = outgoing
        self._incoming = incoming
        self._received = received
        self._may_substitute = may_substitute
        self._reading = threading.Lock()  # held by the thread that reads
        self._lent = False  # whether that thread is a substitute
        self._deferred: deque[tuple[int, Any]] = deque()  # records that a substitute leaves to `serve`
        self._error: BaseException | None = None  # that a substitute raised
        self._poll: select.epoll | None = None
        self._watched = 0
        self._lock = threading.Lock()
        self._backlog: deque[memoryview] = deque()
        self._closed = False
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._buffer = bytearray(_READ)
        self._partial = bytearray()
        self._needed = 0  # bytes that ``_partial`` must have for a whole frame
        self._requests: dict[int, list[Argument]] = {}
        self._returned: deque[int] = deque()
        self._held: dict[int, int] = {}  # how often the other side still has to give back each block of ours

    # Sending

    def pack(self, record: Any, about: int = 0) -> Any:
        known = () if self._is_client else self._requests.pop(about, ())
        returned = self._pop_returned()
        try:
            packed: Packed = pack(record, self._outgoing, known, returned)
        except BaseException:
            self._returned.extend(returned)
            raise
        if self._is_client and packed.arguments:
            self._requests[about] = packed.arguments
        return _Parcel(about, (packed.places, packed.body), packed.blocks)

    def post(self, sequence: int, parcel: _Parcel) -> None:
        places, body = parcel.parts
        head = _HEADER.pack(len(places) + len(body), len(places), sequence, parcel.about)
        with self._lock:
            if self._closed:
                for start in parcel.blocks:
                    self._outgoing.give(start)
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
        self._requests.pop(about, None)

    @property
    def waiting(self) -> int:
        return len(self._backlog)

    def wake(self) -> None:
        with contextlib.suppress(OSError):
            os.eventfd_write(self._wake, 1)

    # Receiving

    def serve(self, tick: Callable[[], float], *others: int) -> int | None:
        """Read, and send the backlog, until the other side has ended (None) or another descriptor is readable.

        tick: called now and then. Returns the seconds until the next call. If they are negative, `serve` returns -1.
        others: descriptors to watch. `serve` returns the one that is readable, once the rest of the socket is read.
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
            if self._deferred:
                with self._reading:
                    while self._deferred:
                        self._received(*self._deferred.popleft())
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
            events = ready.pop(self._socket.fileno(), 0)
            if events & select.EPOLLOUT:
                self._flush()
            # If another thread reads, it sees the end of the other side too, and leaves it to this thread.
            if events & ~select.EPOLLOUT and self._reading.acquire(blocking=False):
                try:
                    if not self.receive():
                        return None
                finally:
                    self._reading.release()
            if ready:
                while self.receive(once=True):
                    pass
                return next(iter(ready))

    def substitute(self, waker: int) -> Substitute:
        """The `Substitute` of a thread that may read in place of `serve`. waker: a descriptor that ends its wait."""
        return Substitute(self, self._socket, waker)

    def lend(self) -> bool:
        """Let the calling thread read until `give_back`. False if another thread reads, or has to read first."""
        if not self._reading.acquire(blocking=False):
            return False
        if self._deferred or self._poll is None:
            self._reading.release()
            return False
        self._lent = True
        self._watch()
        return True

    def give_back(self, error: BaseException | None) -> None:
        """Let the thread in `serve` read again. error: an error for that thread to raise, or None."""
        self._lent = False
        self._reading.release()
        self._watch()
        if error is not None:
            self._error = error
            self.wake()

    def _watch(self) -> None:
        """Set the events of the socket that wake the thread in `serve`."""
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
        """Free the blocks that the other side holds. Must be called only after its process has ended."""
        with self._lock:
            held, self._held = self._held, {}
        for start, times in held.items():
            for _ in range(times):
                self._outgoing.give(start)

    def descriptors(self) -> tuple[int, ...]:
        """The descriptors that a forked child has to close."""
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
            return len(frame)  # the reader sees the end of the other side

    def _flush(self) -> None:
        with self._lock:
            while self._backlog:
                frame = self._backlog[0]
                sent = self._send(frame)
                if sent < len(frame):
                    self._backlog[0] = frame[sent:]
                    return
                self._backlog.popleft()

    def receive(self, once: bool = False) -> bool:
        """Read what has arrived. False at the end of the stream, and with ``once`` if nothing is left."""
        try:
            count = self._socket.recv_into(self._buffer)
        except BlockingIOError:
            return not once
        except OSError:
            return False
        if not count:
            return False
        data = memoryview(self._buffer)[:count]
        if not self._partial:
            self._partial = bytearray(self._frames(data))
            return True
        self._partial += data
        if len(self._partial) >= self._needed:
            self._partial = bytearray(self._frames(memoryview(bytes(self._partial))))
        return True

    def _frames(self, data: memoryview) -> memoryview:
        """Deliver the whole frames. Returns the rest of the data."""
        at, end = 0, len(data)
        while end - at >= _HEADER.size:
            size, placed, sequence, about = _HEADER.unpack_from(data, at)
            begin = at + _HEADER.size
            if end - begin < size:
                self._needed = _HEADER.size + size
                return data[at:]
            at = begin + size
            places, body = bytes(data[begin : begin + placed]), bytes(data[begin + placed : at])
            self._deliver(sequence, self._record(places, body, about))
        self._needed = _HEADER.size
        return data[at:]

    def _deliver(self, sequence: int, record: Any) -> None:
        if self._lent and (self._deferred or not self._may_substitute(record)):
            self._deferred.append((sequence, record))
            self.wake()
        else:
            self._received(sequence, record)

    def _record(self, places: bytes, body: bytes, about: int) -> Any:
        try:
            known: Sequence[Argument] = self._requests.pop(about, ()) if self._is_client else ()
            record, arguments = unpack(
                places, body, self._incoming, self._returned.append, known, self._is_client, self._free_returned
            )
        except BaseException as error:
            return Unreadable.of(about, error)
        if arguments and not self._is_client:
            self._requests[about] = arguments
        return record

    # Blocks

    def _pop_returned(self) -> list[int]:
        returned: list[int] = []
        while self._returned:
            returned.append(self._returned.popleft())
        return returned

    def _free_returned(self, returned: list[int]) -> None:
        for start in returned:
            with self._lock:
                times = self._held.get(start, 0)
                if not times:
                    continue
                if times == 1:
                    del self._held[start]
                else:
                    self._held[start] = times - 1
            self._outgoing.give(start)


class AdaptiveSpin:
    """Decides whether to spin while waiting for the next request. docs/isolation.md says when, and why."""

    SPIN_SECONDS: float = 250e-6
    GAIN: float = 10e-6
    TRIALS: int = 16
    PERIOD: int = 512

    def __init__(self) -> None:
        self._several = len(os.sched_getaffinity(0)) > 1
        self._seconds: tuple[list[float], list[float]] = [], []  # of waits asleep, and of waits that spin
        self._better = False
        self._turn = 0
        self.spinning: bool = False

    def record(self, seconds: float) -> None:
        turn = self._turn
        if turn < self.TRIALS:
            self._seconds[self.spinning].append(seconds)
        self._turn = turn = (turn + 1) % (self.TRIALS + self.PERIOD)
        if turn == self.TRIALS:
            asleep, awake = self._seconds
            # One kind may be missing: the wait after a late request does not spin.
            self._better = bool(asleep and awake) and median(awake) + self.GAIN < median(asleep)
            self._seconds = [], []
        spin = turn % 2 == 1 if turn < self.TRIALS else self._better
        self.spinning = spin and self._several and seconds < self.SPIN_SECONDS


class Substitute:
    """Reads a channel on a thread that has nothing else to do, so that the thread in `serve` need not wake for it.

    It sleeps until a record arrives. Before that it may spin, for at most ``AdaptiveSpin.SPIN_SECONDS``, without the
    GIL.
    """

    def __init__(self, channel: PipeChannel, sock: socket.socket, waker: int) -> None:
        self._channel = channel
        self._waker = waker
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)
        self._poll.register(waker, select.POLLIN)
        self._spin = AdaptiveSpin()
        self.receives: int = 0  # the id of the thread that receives records here, or 0

    def read(self) -> bool:
        """Wait for records and receive them, or for the waker. False at once if `PipeChannel.lend` returns False."""
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
                channel.receive()
        except BaseException as error:
            failure = error
        finally:
            self.receives = 0
            channel.give_back(failure)
        return True

    def _wait(self) -> list[int]:
        began = time.perf_counter()
        ready: list[tuple[int, int]] = []
        if self._spin.spinning:
            while not (ready := self._poll.poll(0)) and time.perf_counter() - began < AdaptiveSpin.SPIN_SECONDS:
                pass
        ready = ready or self._poll.poll()
        self._spin.record(time.perf_counter() - began)
        return [descriptor for descriptor, _ in ready]
