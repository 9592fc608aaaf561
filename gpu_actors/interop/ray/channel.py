"""Records as arguments and results of calls to a Ray actor.

Ray carries a parcel like any value: small ones in the call, large ones through its object store. This package pickles
records itself, so that a request that cannot be read gets an answer of its own and the call does not fail.
"""

from __future__ import annotations

import contextlib
import queue
import sys
import threading
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
import ray.cloudpickle

from gpu_actors.isolation.arena import Host
from gpu_actors.isolation.packing import Argument, pack, unpack
from gpu_actors.isolation.pipe import Unreadable
from gpu_actors.isolation.records import Request

__all__ = ["BATCH", "Crate", "Parcel", "Parcels", "RayChannel", "fill", "first_line"]

BATCH = 32 << 20
"""A call takes no more parcels once it has this many bytes."""

# The most calls with records in flight. More records wait here, where a worker that takes nothing more is noticed.
_CALLS = 4

_SPAN = 1 << 44  # addresses of one block


class Parcel(NamedTuple):
    """A record as Ray carries it. about: the request that it makes or answers. blocks: its arrays, as bytes."""

    sequence: int
    about: int
    places: bytes
    body: bytes
    blocks: tuple[Host, ...]

    @property
    def nbytes(self) -> int:
        return len(self.places) + len(self.body) + sum(block.nbytes for block in self.blocks)


class Crate:
    """The memory of one record's arrays, which is copied to the other side. A `gpu_actors.isolation.packing.Memory`.

    blocks: the received blocks. A block in Ray's object store is read-only, and is copied before it is used.
    """

    shared = False
    address = 0

    def __init__(self, blocks: Iterable[Host] = ()) -> None:
        self.blocks: list[Host] = list(blocks)

    def find(self, _: int) -> None:
        return None

    def take(self, nbytes: int) -> int:
        self.blocks.append(np.empty(max(nbytes, 1), np.uint8))
        return (len(self.blocks) - 1) * _SPAN

    def room(self, start: int) -> int:
        return self.blocks[start // _SPAN].nbytes

    def hold(self, start: int) -> None:
        raise AssertionError(start)

    def give(self, _: int) -> None:
        """Do nothing: a block is freed with its last array."""

    def memory(self, start: int, nbytes: int) -> Host:
        block = self.blocks[start // _SPAN]
        return (block if block.flags.writeable else block.copy())[start % _SPAN :][:nbytes]


class Parcels:
    """Packs and unpacks the records of one side. asks: whether this side makes the requests."""

    def __init__(self, asks: bool) -> None:
        self._asks = asks
        self._requests: dict[int, list[Argument]] = {}

    def pack(self, record: Any, about: int = 0) -> Parcel:
        known = () if self._asks else self._requests.pop(about, ())
        crate = Crate()
        packed = pack(_by_value(record) if type(record) is Request else record, crate, known)
        if self._asks and packed.arguments:
            self._requests[about] = [argument._replace(copy=None) for argument in packed.arguments]
        return Parcel(0, about, packed.places, packed.body, tuple(crate.blocks))

    def unpack(self, parcel: Parcel) -> Any:
        """The record, or `Unreadable` if it cannot be read."""
        about = parcel.about
        own = self._requests.pop(about, ()) if self._asks else ()
        try:
            crate = Crate(parcel.blocks)
            record, arguments = unpack(parcel.places, parcel.body, crate, _nothing, own, copies=self._asks)
        except BaseException as error:
            return Unreadable.of(about, error)
        if arguments and not self._asks:
            self._requests[about] = arguments
        return record

    def forget(self, about: int) -> None:
        self._requests.pop(about, None)


class RayChannel(Parcels):
    """The program's end: a `gpu_actors.remote.Channel` that calls ``actor.post``. Waiting parcels share a call.

    failed: called once, on any thread, with the error of a call that failed.
    """

    def __init__(self, actor: Any, failed: Callable[[BaseException], None]) -> None:
        super().__init__(asks=True)
        self._actor = actor
        self._failed = failed
        self._queue: queue.SimpleQueue[Parcel | None] = queue.SimpleQueue()
        self._free = threading.Semaphore(_CALLS)
        self._closed = False
        threading.Thread(target=self._send, name="gpu-actors-ray-send", daemon=True).start()

    def post(self, sequence: int, parcel: Parcel) -> None:
        if not self._closed:
            self._queue.put(parcel._replace(sequence=sequence))

    @property
    def waiting(self) -> int:
        return self._queue.qsize()

    def close(self) -> None:
        self._closed = True
        self._queue.put(None)
        self._free.release()
        self._requests.clear()

    def _send(self) -> None:
        while (first := self._queue.get()) is not None:
            self._free.acquire()
            batch = [tuple(parcel) for parcel in self._batch(first)]
            if self._closed:
                return
            try:
                call = self._actor.post.remote(batch)
            except Exception as error:
                self._failed(error)
                return
            call.future().add_done_callback(self._posted)

    def _batch(self, first: Parcel) -> list[Parcel]:
        batch, size = [first], first.nbytes
        with contextlib.suppress(queue.Empty):
            while size < BATCH and (parcel := self._queue.get_nowait()) is not None:
                batch.append(parcel)
                size += parcel.nbytes
        return batch

    def _posted(self, call: Any) -> None:
        self._free.release()
        error = call.exception()
        if error is not None:
            self._failed(error)


def fill(waiting: Any) -> list[Parcel]:
    """Take parcels for one call from the left of a deque."""
    batch, size = [], 0
    while waiting and size < BATCH:
        parcel = waiting.popleft()
        batch.append(parcel)
        size += parcel.nbytes
    return batch


def first_line(error: BaseException) -> str:
    """An error's type and first line, without Ray's traceback."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _by_value(request: Request) -> Request:
    """The request, with its function pickled by value, as Ray does it, if the worker cannot import the function."""
    if request.actor or not isinstance(request.message, tuple) or request.message[0] != "run":
        return request
    name, function, arguments = request.message
    if not _is_importable(function):
        function = _ByValue(ray.cloudpickle.dumps(function))
    return request._replace(message=(name, function, arguments))


def _is_importable(function: Any) -> bool:
    module = getattr(function, "__module__", None)
    name = getattr(function, "__qualname__", None)
    if module == "__main__" or name is None:
        return False
    found: Any = sys.modules.get(module or "")
    for part in name.split("."):
        found = getattr(found, part, None)
    return found is function


class _ByValue:
    def __init__(self, pickled: bytes) -> None:
        self._pickled = pickled

    def __reduce__(self) -> Any:
        return ray.cloudpickle.loads, (self._pickled,)


def _nothing(_: int) -> None:
    return
