"""HostApi: a `CudaApi` without a GPU. Its work waits in streams, and the CPU runs it in an order that CUDA allows.

A copy reads its source when it runs, not when it is enqueued. A subclass has the memory and runs the kernels.
"""

from __future__ import annotations

import itertools
import logging
import random
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from gpu_actors.devices.cuda.api import Emulation
from gpu_actors.devices.cuda.errors import CudaFailure, WorkFailed
from gpu_actors.devices.interface import Buffer, LaunchGeometry, Params
from gpu_actors.errors import GpuActorsError, LaunchError, caused

__all__ = ["ILLEGAL_ADDRESS", "HostApi", "HostFunction", "HostOrder", "HostQueue", "Operation"]

logger: logging.Logger = logging.getLogger("gpu_actors")

V = TypeVar("V")

Bytes: TypeAlias = npt.NDArray[np.uint8]
HostOrder: TypeAlias = Literal["eager", "late", "random"]

ILLEGAL_ADDRESS = 700
_INVALID_VALUE, _INVALID_HANDLE = 1, 400
_POISON = 0xFF
_LONGEST_DELAY, _IDLE_SECONDS = 1e-3, 1.0


class Operation(NamedTuple):
    """Enqueued work.

    ready: whether it may run now. None: always.
    after_failure: whether it runs although an operation of the same launch has failed.
    """

    run: Callable[[], object]
    ready: Callable[[], bool] | None = None
    after_failure: bool = False


@dataclass(eq=False)
class HostQueue:
    """The work of one stream.

    captured: what a graph records instead, while one is captured.
    failure: why the rest of the current launch does not run. The next record of an event takes it.
    """

    operations: deque[Operation] = field(default_factory=deque)
    captured: list[Operation] | None = None
    failure: GpuActorsError | None = None


@dataclass(eq=False)
class _Event:
    """A wait is for the record before it. Records on several streams may be over in another order.

    pending: the records that are not over. waiters: the threads that sleep until the last of them is over.
    failure: of the work before the last record, on the same stream and behind the record before.
    """

    records: int = 0
    pending: set[int] = field(default_factory=set)
    waiters: int = 0
    failure: GpuActorsError | None = None

    @property
    def done(self) -> bool:
        return self.records not in self.pending


@dataclass(eq=False)
class HostFunction:
    """A kernel of a loaded image. shared_bytes: of dynamic shared memory, as far as they were allowed."""

    module: int
    image: Hashable
    name: str
    shared_bytes: int = 48 << 10


class HostApi(ABC):
    """Streams, events, graphs, copies and page-locked memory.

    order: when a thread of this device runs the work. "eager": as soon as it may. "late": once another thread waits for
        an event or asks for it. "random": after delays, by turns of the streams that differ with ``seed``.
    """

    @property
    def emulation(self) -> Emulation | None:
        return None

    def __init__(self, order: HostOrder = "eager", seed: int = 0) -> None:
        self._order = order
        self._random = random.Random(seed)
        self._handles = itertools.count(1000)
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
    def device_bytes(self, address: int, nbytes: int) -> Bytes:
        """The bytes of device memory there. Raises a sticky `CudaFailure` for an address outside every block."""

    @abstractmethod
    def run_kernel(
        self, function: HostFunction, geometry: LaunchGeometry, params: Params, operands: Mapping[str, Buffer]
    ) -> None:
        """Run a kernel to its end."""

    def called(self, name: str, bound: bool = True) -> None:
        """Begin a call, under the lock. bound: whether its thread must have called `bind`."""
        if self._lost is not None:
            raise CudaFailure(self._lost, name)

    # CudaApi

    def bind(self) -> None:
        with self._lock:
            self.called("bind", bound=False)

    def is_current(self) -> bool:
        return True

    def trim(self) -> None:
        with self._lock:
            self.called("trim")

    def allocate_pinned(self, nbytes: int) -> int:
        with self._lock:
            self.called("allocate_pinned")
            memory = np.full(nbytes, _POISON, np.uint8)
            address = int(memory.ctypes.data)
            self._pinned[address] = memory
            return address

    def free_pinned(self, address: int) -> None:
        with self._lock:
            self.called("free_pinned", bound=False)
            del self._pinned[address]

    def create_stream(self) -> int:
        with self._lock:
            self.called("create_stream")
            return self._add(self._streams, HostQueue())

    def destroy_stream(self, stream: int) -> None:
        with self._lock:
            self.called("destroy_stream", bound=False)
            assert not self._find(self._streams, stream).operations, "a busy stream is destroyed"
            del self._streams[stream]

    def copy_to_device(self, device: int, host: int, nbytes: int, stream: int) -> None:
        self._copy("copy_to_device", stream, self.device_bytes, device, self._host_bytes, host, nbytes)

    def copy_to_host(self, host: int, device: int, nbytes: int, stream: int) -> None:
        self._copy("copy_to_host", stream, self._host_bytes, host, self.device_bytes, device, nbytes)

    def copy_on_device(self, device: int, source: int, nbytes: int, stream: int) -> None:
        self._copy("copy_on_device", stream, self.device_bytes, device, self.device_bytes, source, nbytes)

    def fill(self, device: int, value: int, nbytes: int, stream: int) -> None:
        with self._lock:
            self.called("fill")
            self._enqueue(stream, Operation(lambda: self.device_bytes(device, nbytes).fill(value)))

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
        with self._lock:
            self.called("launch_kernel")
            kernel = self._find(self._functions, function)
            if 0 in grid or shared_bytes > kernel.shared_bytes:
                raise CudaFailure(_INVALID_VALUE, "launch_kernel", "invalid argument")
            geometry = LaunchGeometry(grid, block, shared_bytes)
            self._enqueue(stream, Operation(lambda: self.run_kernel(kernel, geometry, params, operands or {})))

    def begin_capture(self, stream: int) -> None:
        with self._lock:
            self.called("begin_capture")
            queue = self._find(self._streams, stream)
            assert queue.captured is None, "the stream is being captured"
            queue.captured = []

    def end_capture(self, stream: int) -> int:
        with self._lock:
            # It is over in any case, also where no graph comes of it.
            queue = self._find(self._streams, stream)
            captured, queue.captured = queue.captured, None
            self.called("end_capture")
            assert captured is not None, "nothing is being captured"
            return self._add(self._graphs, captured)

    def launch_graph(self, graph: int, stream: int) -> None:
        with self._lock:
            self.called("launch_graph")
            for operation in self._find(self._graphs, graph):
                self._enqueue(stream, operation)

    def destroy_graph(self, graph: int) -> None:
        with self._lock:
            self.called("destroy_graph")
            self._remove(self._graphs, graph)

    def create_event(self) -> int:
        with self._lock:
            self.called("create_event")
            return self._add(self._events, _Event())

    def destroy_event(self, event: int) -> None:
        with self._lock:
            self.called("destroy_event", bound=False)
            assert not self._find(self._events, event).waiters, "an event is destroyed under a waiter"
            del self._events[event]

    def record_event(self, event: int, stream: int) -> None:
        with self._lock:
            self.called("record_event")
            recorded = self._find(self._events, event)
            recorded.records += 1
            number = recorded.records
            recorded.pending.add(number)
            recorded.failure = None
            queue = self._find(self._streams, stream)

            def record() -> None:
                with self._lock:
                    recorded.pending.remove(number)
                    failure, queue.failure = queue.failure, None
                    if number == recorded.records:
                        recorded.failure = failure
                    self._awaited = False
                    self._recorded.notify_all()

            self._enqueue(stream, Operation(record, after_failure=True))

    def event_done(self, event: int) -> bool:
        with self._lock:
            self.called("event_done", bound=False)
            queried = self._find(self._events, event)
            done = queried.done
            if not done:
                self.progress(waits=False)
            elif queried.failure is not None:
                raise WorkFailed("event_done", queried.failure)
            return done

    def synchronize_event(self, event: int) -> None:
        with self._lock:
            self.called("synchronize_event")
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

    def wait_event(self, stream: int, event: int) -> None:
        with self._lock:
            self.called("wait_event")
            awaited = self._find(self._events, event)
            number = awaited.records
            self._enqueue(stream, Operation(lambda: None, lambda: number not in awaited.pending, True))

    def load_module(self, image: Hashable) -> int:
        with self._lock:
            self.called("load_module")
            return self._add(self._modules, image)

    def unload_module(self, module: int) -> None:
        with self._lock:
            self.called("unload_module", bound=False)
            self._remove(self._modules, module)
            for handle in [handle for handle, function in self._functions.items() if function.module == module]:
                del self._functions[handle]

    def get_function(self, module: int, name: str) -> int:
        with self._lock:
            self.called("get_function")
            return self._add(self._functions, HostFunction(module, self._find(self._modules, module), name))

    def allow_shared_memory(self, function: int, nbytes: int) -> None:
        with self._lock:
            self.called("allow_shared_memory")
            self._find(self._functions, function).shared_bytes = nbytes

    def close(self) -> None:
        with self._lock:
            self.called("close", bound=False)
            self._closed = True
            self._enqueued.notify_all()

    # Running

    def advance(self, queue: HostQueue) -> bool:
        """Run the first operation of a stream. False if there is none that may run now."""
        if self._lost is not None or not queue.operations:
            return False
        operation = queue.operations[0]
        if operation.ready is not None and not operation.ready():
            return False
        if operation.after_failure:
            with self._lock:  # a thread that sees a record knows that the stream has nothing left of it
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
        """A thread waits for an event, or asks for it. True if this call has run an operation."""
        self._awaited = True
        self.wake()
        return False

    def wake(self) -> None:
        """Have the thread of this device run the work."""
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
            # A thread that waits for work must not keep the last stream's alive.
            del queue

    def _wait_for_work(self) -> HostQueue | None:
        """The stream to go on with. None to end the thread, which the next work starts again."""
        with self._lock:
            while (queue := self._next()) is None:
                if self._closed or not self._enqueued.wait(_IDLE_SECONDS):
                    self._worker = None
                    return None
            if self._order == "random":
                self._enqueued.wait(self._random.uniform(0, _LONGEST_DELAY))
            return queue

    def _next(self) -> HostQueue | None:
        """A stream that has an operation that may run now."""
        if self._lost is not None or (self._order == "late" and not self._awaited):
            return None
        queues = [
            queue
            for queue in self._streams.values()
            if queue.operations and ((ready := queue.operations[0].ready) is None or ready())
        ]
        if self._order == "random" and queues:
            return self._random.choice(queues)
        return queues[0] if queues else None

    def _lose(self, failure: CudaFailure) -> CudaFailure:
        if failure.sticky:
            with self._lock:
                self._lost = failure.status
                self._recorded.notify_all()
        return failure

    # Inside

    def _copy(
        self,
        call: str,
        stream: int,
        target_bytes: Callable[[int, int], Bytes],
        target: int,
        source_bytes: Callable[[int, int], Bytes],
        source: int,
        nbytes: int,
    ) -> None:
        def copy() -> None:
            target_bytes(target, nbytes)[...] = source_bytes(source, nbytes)

        with self._lock:
            self.called(call)
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
