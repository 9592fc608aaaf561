"""HostApi: a `CudaApi` without a GPU. Its work waits in streams, and the CPU runs it in an order that CUDA allows.

A copy reads its source when it runs, not when it is enqueued. A subclass provides the memory and runs the kernels.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import random
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, Concatenate, Literal, NamedTuple, ParamSpec, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from gpu_actors.devices.cuda.api import Emulation, MemoryBlock
from gpu_actors.devices.cuda.errors import CudaFailure, WorkFailed
from gpu_actors.devices.interface import Buffer, LaunchGeometry, Params
from gpu_actors.errors import GpuActorsError, LaunchError, caused

__all__ = ["ILLEGAL_ADDRESS", "HostApi", "HostFunction", "HostOrder", "HostQueue", "Operation", "driver_call"]

logger: logging.Logger = logging.getLogger("gpu_actors")

H = TypeVar("H", bound="HostApi")
P = ParamSpec("P")
R = TypeVar("R")
V = TypeVar("V")

Bytes: TypeAlias = npt.NDArray[np.uint8]
Find: TypeAlias = Callable[[int, int], Bytes]
HostOrder: TypeAlias = Literal["eager", "late", "random"]

ILLEGAL_ADDRESS = 700
_INVALID_VALUE, _INVALID_HANDLE = 1, 400
_POISON = 0xFF
_LONGEST_DELAY, _IDLE_SECONDS = 1e-3, 1.0


def driver_call(call: Callable[Concatenate[H, P], R]) -> Callable[Concatenate[H, P], R]:
    """Make a method a call of the driver: it holds the device's lock, and calls `HostApi.called` first."""

    @functools.wraps(call)
    def locked(self: H, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with self._lock:
            self.called(call.__name__)
            return call(self, *args, **kwargs)

    return locked


class Operation(NamedTuple):
    """Enqueued work.

    ready: tells whether the operation may run now. None: it always may.
    after_failure: whether the operation runs even if another operation of the same launch has failed.
    """

    run: Callable[[], object]
    ready: Callable[[], bool] | None = None
    after_failure: bool = False


@dataclass(eq=False)
class HostQueue:
    """The work of one stream.

    captured: the operations recorded for a graph while the stream is being captured, else None.
    failure: the error that keeps the rest of the current launch from running. It moves to the next recorded event that
        has ``asked`` set.
    turn: the number of the stream's latest turn.
    """

    operations: deque[Operation] = field(default_factory=deque)
    captured: list[Operation] | None = None
    failure: GpuActorsError | None = None
    turn: int = 0


@dataclass(eq=False)
class _Event:
    """An event. A wait refers to the latest record before it. Records on several streams may run in another order.

    asked: whether the host asks for the event. records: how often it was recorded. pending: the numbers of the records
    that have not run. waiters: the number of threads that wait for the last record. failure: the error of the work
    between the last two records on the same stream. passed: errors by record if the host does not ask for the event:
    then the work that waits for the record fails too.
    """

    asked: bool = True
    records: int = 0
    pending: set[int] = field(default_factory=set)
    waiters: int = 0
    failure: GpuActorsError | None = None
    passed: dict[int, GpuActorsError] = field(default_factory=dict)

    @property
    def done(self) -> bool:
        return self.records not in self.pending


@dataclass(eq=False)
class HostFunction:
    """A kernel of a loaded image. shared_bytes: the dynamic shared memory that a block may have."""

    module: int
    image: Hashable
    name: str
    shared_bytes: int = 48 << 10


class HostApi(ABC):
    """Streams, events, copies, page-locked memory, and graphs as a program captures them on its own streams.

    order: when the thread of this device runs the work. "eager": as soon as the work may run, with the streams taking
        turns. "late": once another thread waits or asks for an event, one stream as far as possible. "random": after
        random delays, any stream, by ``seed``.
    """

    lent_after: int | None = None

    @property
    def emulation(self) -> Emulation | None:
        return None

    def __init__(self, order: HostOrder = "eager", seed: int = 0) -> None:
        self._order = order
        self._random = random.Random(seed)
        self._handles = itertools.count(1000)
        self._turns = itertools.count(1)
        self._streams: dict[int, HostQueue] = {}
        self._events: dict[int, _Event] = {}
        self._graphs: dict[int, list[Operation]] = {}
        self._modules: dict[int, Hashable] = {}
        self._functions: dict[int, HostFunction] = {}
        self._pinned: dict[int, Bytes] = {}
        self._lost: int | None = None
        self._closed = False
        self._awaited = False
        self._worker: threading.Thread | None = None
        self._lock = threading.RLock()
        self._enqueued = threading.Condition(self._lock)
        self._recorded = threading.Condition(self._lock)

    # What a subclass has

    @abstractmethod
    def allocate(self, nbytes: int) -> MemoryBlock:
        """See `CudaApi.allocate`."""

    def lend(self, nbytes: int) -> MemoryBlock:
        return self.allocate(nbytes)

    @abstractmethod
    def device_bytes(self, address: int, nbytes: int) -> Bytes:
        """The device memory at this address. Raises a sticky `CudaFailure` for an address outside every block."""

    @abstractmethod
    def run_kernel(
        self, function: HostFunction, geometry: LaunchGeometry, params: Params, operands: Mapping[str, Buffer]
    ) -> None:
        """Run a kernel to its end."""

    def called(self, name: str) -> None:
        """Each call of the driver begins with this, under the lock. Raises `CudaFailure` once the device is lost."""
        if self._lost is not None:
            raise CudaFailure(self._lost, name)

    # CudaApi

    def bind(self) -> None:
        with self._lock:
            self.called("bind")

    def allow_captures(self) -> None:
        return  # no thread breaks another one's capture here

    def relaxed(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def is_current(self) -> bool:
        return True

    def trim(self) -> None:
        with self._lock:
            self.called("trim")

    @driver_call
    def allocate_pinned(self, nbytes: int) -> int:
        memory = np.full(nbytes, _POISON, np.uint8)
        address = int(memory.ctypes.data)
        self._pinned[address] = memory
        return address

    @driver_call
    def free_pinned(self, address: int) -> None:
        del self._pinned[address]

    @driver_call
    def create_stream(self) -> int:
        return self._add(self._streams, HostQueue())

    @driver_call
    def destroy_stream(self, stream: int) -> None:
        assert not self._find(self._streams, stream).operations, "a busy stream is destroyed"
        del self._streams[stream]

    @driver_call
    def copy_to_device(self, device: int, host: int, nbytes: int, stream: int) -> None:
        self._copy(self.device_bytes, device, self._host_bytes, host, nbytes, stream)

    @driver_call
    def copy_to_host(self, host: int, device: int, nbytes: int, stream: int) -> None:
        self._copy(self._host_bytes, host, self.device_bytes, device, nbytes, stream)

    @driver_call
    def copy_on_device(self, device: int, source: int, nbytes: int, stream: int) -> None:
        self._copy(self.device_bytes, device, self.device_bytes, source, nbytes, stream)

    @driver_call
    def fill(self, device: int, value: int, nbytes: int, stream: int) -> None:
        self._enqueue(stream, Operation(lambda: self.device_bytes(device, nbytes).fill(value)))

    @driver_call
    def launch_kernel(
        self,
        function: int,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        shared_bytes: int,
        stream: int,
        params: Params,
        operands: Mapping[str, Buffer] | None = None,
    ) -> None:
        kernel = self._find(self._functions, function)
        if 0 in grid or shared_bytes > kernel.shared_bytes:
            raise CudaFailure(_INVALID_VALUE, "launch_kernel", "invalid argument")
        geometry = LaunchGeometry(grid, block, shared_bytes)
        self._enqueue(stream, Operation(lambda: self.run_kernel(kernel, geometry, params, operands or {})))

    @driver_call
    def begin_capture(self, stream: int) -> None:
        queue = self._find(self._streams, stream)
        assert queue.captured is None, "the stream is being captured"
        queue.captured = []

    @driver_call
    def is_capturing(self, stream: int) -> bool:
        return self._find(self._streams, stream).captured is not None

    def end_capture(self, stream: int) -> int:
        with self._lock:
            # The capture ends in any case, even if it makes no graph.
            queue = self._find(self._streams, stream)
            captured, queue.captured = queue.captured, None
            self.called("end_capture")
            assert captured is not None, "nothing is being captured"
            return self._add(self._graphs, captured)

    @driver_call
    def launch_graph(self, graph: int, stream: int) -> None:
        for operation in self._find(self._graphs, graph):
            self._enqueue(stream, operation)

    @driver_call
    def destroy_graph(self, graph: int) -> None:
        self._remove(self._graphs, graph)

    @driver_call
    def create_event(self, asked: bool = True) -> int:
        return self._add(self._events, _Event(asked))

    @driver_call
    def destroy_event(self, event: int) -> None:
        assert not self._find(self._events, event).waiters, "an event is destroyed under a waiter"
        del self._events[event]

    @driver_call
    def record_event(self, event: int, stream: int) -> None:
        recorded, queue = self._find(self._events, event), self._find(self._streams, stream)
        recorded.records += 1
        number = recorded.records
        recorded.pending.add(number)
        recorded.failure = None

        def record() -> None:
            recorded.pending.remove(number)
            failure = queue.failure
            if recorded.asked:
                queue.failure = None
            elif failure is not None:
                recorded.passed[number] = failure
            if number == recorded.records:
                recorded.failure = failure
            self._awaited = False
            self._recorded.notify_all()

        self._enqueue(stream, Operation(record, after_failure=True))

    @driver_call
    def event_done(self, event: int) -> bool:
        queried = self._find(self._events, event)
        done = queried.done
        if not done:
            self.progress(waits=False)
        elif queried.failure is not None:
            raise WorkFailed("event_done", queried.failure)
        return done

    @driver_call
    def synchronize_event(self, event: int) -> None:
        awaited = self._find(self._events, event)
        awaited.waiters += 1
        try:
            while not awaited.done:
                if not self.progress(waits=True):
                    self._recorded.wait()
                if self._lost is not None:
                    raise CudaFailure(self._lost, "synchronize_event")
        finally:
            awaited.waiters -= 1
        if awaited.failure is not None:
            raise WorkFailed("synchronize_event", awaited.failure)

    @driver_call
    def wait_event(self, stream: int, event: int) -> None:
        awaited, queue = self._find(self._events, event), self._find(self._streams, stream)
        number = awaited.records

        def pass_on() -> None:
            queue.failure = queue.failure or awaited.passed.pop(number, None)

        self._enqueue(stream, Operation(pass_on, lambda: number not in awaited.pending, True))

    @driver_call
    def load_module(self, image: Hashable) -> int:
        return self._add(self._modules, image)

    @driver_call
    def unload_module(self, module: int) -> None:
        self._remove(self._modules, module)
        for handle in [handle for handle, function in self._functions.items() if function.module == module]:
            del self._functions[handle]

    @driver_call
    def get_function(self, module: int, name: str) -> int:
        return self._add(self._functions, HostFunction(module, self._find(self._modules, module), name))

    @driver_call
    def allow_shared_memory(self, function: int, nbytes: int) -> None:
        self._find(self._functions, function).shared_bytes = nbytes

    @driver_call
    def close(self) -> None:
        self._closed = True
        self._enqueued.notify_all()

    # Running

    def advance(self, queue: HostQueue) -> bool:
        """Run the first operation of a stream. Returns False if none may run now."""
        if self._lost is not None or not queue.operations:
            return False
        operation = queue.operations[0]
        if operation.ready is not None and not operation.ready():
            return False
        if operation.after_failure:
            with self._lock:  # a thread that sees the event done must find the record gone from the stream
                self._run(queue, operation)
        else:
            self._run(queue, operation)
        return True

    def _run(self, queue: HostQueue, operation: Operation) -> None:
        try:
            if queue.failure is None or operation.after_failure:
                operation.run()
        except CudaFailure as failure:
            self._lose(failure)
        except GpuActorsError as error:
            queue.failure = error.with_traceback(None)
        finally:
            with self._lock:
                queue.operations.popleft()

    def progress(self, waits: bool) -> bool:
        """Called when a thread waits or asks for a pending event. Returns whether this call has run an operation."""
        self._awaited = True
        self.wake()
        return False

    def wake(self) -> None:
        """Wake the thread of this device, which runs the work. Start the thread if there is none."""
        if self._worker is None:
            worker = threading.Thread(target=self._work, name="gpu-actors-emulated", daemon=True)
            worker.start()  # may raise: the next call tries again
            self._worker = worker
        self._enqueued.notify_all()

    def _enqueue(self, stream: int, operation: Operation) -> None:
        queue = self._find(self._streams, stream)
        if queue.captured is not None:
            queue.captured.append(operation)
            return
        queue.operations.append(operation)
        self.wake()

    def _work(self) -> None:
        while (queue := self._wait_for_work()) is not None:
            try:
                self.advance(queue)
            except BaseException as error:
                logger.exception("the emulated device: a launch raised")
                queue.failure = caused(LaunchError(f"the launch raised {error!r}"), error.with_traceback(None))
            # A thread that waits for work must not keep the last stream's work alive.
            del queue

    def _wait_for_work(self) -> HostQueue | None:
        """Wait for the stream to advance next. None: the thread ends, and the next work starts another."""
        with self._lock:
            while (queue := self._next()) is None:
                # Work may be enqueued after the wait has timed out and before this thread has the lock again.
                if self._closed or not (self._enqueued.wait(_IDLE_SECONDS) or self._next()):
                    self._worker = None
                    return None
            if self._order == "random":
                self._enqueued.wait(self._random.uniform(0, _LONGEST_DELAY))
            queue.turn = next(self._turns)
            return queue

    def _next(self) -> HostQueue | None:
        """The stream to advance next, of those whose first operation may run now. None if there is none."""
        if self._lost is not None or (self._order == "late" and not self._awaited):
            return None
        queues = [
            queue
            for queue in self._streams.values()
            if queue.operations and ((ready := queue.operations[0].ready) is None or ready())
        ]
        if self._order == "random" and queues:
            return self._random.choice(queues)
        if self._order == "late":
            return max(queues, key=lambda queue: queue.turn, default=None)
        # In turns, so that a busy stream does not hold up the others.
        return min(queues, key=lambda queue: queue.turn, default=None)

    def _lose(self, failure: CudaFailure) -> CudaFailure:
        if failure.sticky:
            with self._lock:
                self._lost = failure.status
                self._recorded.notify_all()
        return failure

    # Inside

    def _copy(self, target_bytes: Find, target: int, source_bytes: Find, source: int, nbytes: int, stream: int) -> None:
        def copy() -> None:
            target_bytes(target, nbytes)[...] = source_bytes(source, nbytes)

        self._enqueue(stream, Operation(copy))

    def _host_bytes(self, address: int, nbytes: int) -> Bytes:
        with self._lock:
            for start, memory in self._pinned.items():
                if start <= address and address + nbytes <= start + memory.nbytes:
                    return memory[address - start : address - start + nbytes]
        raise CudaFailure(ILLEGAL_ADDRESS, "copy", f"{nbytes} host bytes at {address:#x} are not page-locked")

    def _add(self, table: dict[int, V], value: V) -> int:
        with self._lock:
            handle = next(self._handles)
            table[handle] = value
            return handle

    def _find(self, table: dict[int, V], handle: int) -> V:
        if handle not in table:
            raise CudaFailure(_INVALID_HANDLE, "handle", f"there is no {handle}")
        return table[handle]

    def _remove(self, table: dict[int, Any], handle: int) -> None:
        self._find(table, handle)
        del table[handle]
