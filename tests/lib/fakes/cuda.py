"""FakeCuda: the driver calls of a CudaDevice on the CPU, as late and as unforgiving as a GPU may be.

Work runs only when a thread waits or polls for it (``order="late"``), at random moments too ("random"), or when the
test calls ``step()`` ("manual"). Freed memory is poisoned and its address is never used again. A later access is an
error that loses the context, as on a GPU.

Kernels are Python callables ``kernel(memory, params, geometry)``, loaded by name from an "image" that is just a label.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Literal

import numpy as np
from fakes.memory import POISON, FakeBlock, FakeMemory
from inside.cuda import (
    CudaFailure,
    DeviceProperties,
    HostApi,
    HostFunction,
    HostQueue,
    MemoryBlock,
    Operation,
    driver_call,
)
from inside.devices import Buffer, LaunchGeometry, Params, TensorMap
from inside.emulation import encode_tensor_map

from gpu_actors.errors import GpuActorsError

__all__ = ["LEGACY", "FakeCuda", "Geometry", "Order"]

Geometry = LaunchGeometry
Kernel = Callable[["FakeMemory", bytes, "Geometry"], None]
Order = Literal["late", "random", "manual"]
LEGACY = 1
ANY_THREAD = {"bind", "free_pinned", "destroy_stream", "destroy_event", "event_done", "unload_module", "close"}
INVALID_VALUE, OUT_OF_MEMORY, NOT_FOUND = 1, 2, 500


class FakeCuda(HostApi):
    """One device, and methods with which a test steers it.

    kernels: the kernels in every image, by entry point. calls: the name of every call so far.
    """

    def __init__(
        self,
        kernels: dict[str, Kernel] | None = None,
        order: Order = "late",
        seed: int = 0,
        capability: int = 90,
        memory: int = 1 << 30,
    ) -> None:
        super().__init__(seed=seed)
        self.kernels = kernels or {}
        self.calls: list[str] = []
        self.memory = FakeMemory()
        self.total = memory
        self.idle_bytes = 0
        self._moment = order
        self._capability = capability
        self._streams[LEGACY] = HostQueue()
        self._hung: list[HostQueue] = []
        self._bound = threading.local()
        self._failures: dict[str, deque[int]] = {}
        self._execution_failures: deque[int | GpuActorsError] = deque()
        self._freed_pinned: list[np.ndarray[Any, Any]] = []
        self._polls = 0

    # Steering

    def fail(self, call: str, *statuses: int) -> None:
        """Have the next calls of that name return these statuses; 0 lets one pass."""
        self._failures.setdefault(call, deque()).extend(statuses)

    def fail_kernel(self, *statuses: int | GpuActorsError) -> None:
        """Have the next kernels fail with these while they run. 0 lets one pass; a GpuActorsError fails one launch."""
        self._execution_failures.extend(statuses)

    def hang(self, stream: int) -> None:
        with self._lock:
            self._hung.append(self._streams[stream])

    def resume(self, stream: int) -> None:
        with self._lock:
            self._hung.remove(self._streams[stream])
            self.wake()

    def step(self, stream: int | None = None) -> bool:
        """Do one operation, of that stream or of any. False if none can be done."""
        with self._lock:
            queues = [self._streams[stream]] if stream is not None else list(self._streams.values())
            self._random.shuffle(queues)
            return any(self.advance(queue) for queue in queues if queue not in self._hung)

    def run_all(self) -> None:
        while self.step():
            pass

    def enqueue(self, stream: int, work: Callable[[], object]) -> None:
        """Enqueue foreign work, such as a producer's kernel."""
        with self._lock:
            self._enqueue(stream, Operation(work))

    def new_stream(self) -> int:
        """A stream of the program, not of the device object."""
        return self._add(self._streams, HostQueue())

    def put(self, array: np.ndarray[Any, Any]) -> FakeBlock:
        """A block of the program that holds the array's bytes."""
        block = self.memory.add(array.nbytes)
        self.memory.at(block.address, array.nbytes)[:] = np.frombuffer(array.tobytes(), np.uint8)
        return block

    def leaks(self) -> dict[str, int]:
        """How many of each are still held, blocks of `put` and streams of `new_stream` included."""
        counts = {
            "blocks": sum(block.live for block in self.memory.blocks),
            "pinned": len(self._pinned),
            "streams": len(self._streams) - 1,
            "events": len(self._events),
            "modules": len(self._modules),
            "graphs": len(self._graphs),
        }
        return {name: count for name, count in counts.items() if count}

    @property
    def open_streams(self) -> list[int]:
        return [handle for handle in self._streams if handle != LEGACY]

    # Calls

    def called(self, name: str) -> None:
        self.calls.append(name)
        assert name in ANY_THREAD or getattr(self._bound, "yes", False), f"{name} on a thread that is not bound"
        super().called(name)
        statuses = self._failures.get(name)
        status = statuses.popleft() if statuses else 0
        if status:
            raise self._lose(CudaFailure(status, name, "injected"))
        if self._moment == "random":
            for _ in range(self._random.randrange(4)):
                self.step()
            super().called(name)

    def bind(self) -> None:
        super().bind()
        self._bound.yes = True

    @driver_call
    def properties(self) -> DeviceProperties:
        return DeviceProperties("Fake", self._capability, self.total, 4)

    @driver_call
    def allocate(self, nbytes: int) -> FakeBlock:
        used = sum(block.nbytes for block in self.memory.blocks if block.live)
        if used + nbytes + self.idle_bytes > self.total:
            raise CudaFailure(OUT_OF_MEMORY, "allocate", "out of memory")
        return self.memory.add(nbytes)

    def free(self, block: MemoryBlock) -> None:
        with self._lock:
            assert isinstance(block, FakeBlock)
            self.memory.remove(block)

    def trim(self) -> None:
        super().trim()
        self.idle_bytes = 0

    def free_pinned(self, address: int) -> None:
        memory = self._pinned[address]
        super().free_pinned(address)
        memory[:] = POISON
        # Kept, so that a late copy meets poison and not memory in use.
        self._freed_pinned.append(memory)

    @driver_call
    def encode_tensor_map(self, tensor_map: TensorMap) -> bytes:
        return encode_tensor_map(*tensor_map)

    def synchronize_event(self, event: int) -> None:
        with self._lock:
            awaited = self._find(self._events, event)
            awaited.waiters += 1
            try:
                super().synchronize_event(event)
                if self._moment == "manual":
                    # The thread wakes a little after the event, so that others can act first.
                    self._recorded.wait(0.01)
            finally:
                awaited.waiters -= 1

    def get_function(self, module: int, name: str) -> int:
        function = super().get_function(module, name)
        if name not in self.kernels:
            raise CudaFailure(NOT_FOUND, "get_function", f"named symbol not found: {name}")
        return function

    def allow_shared_memory(self, function: int, nbytes: int) -> None:
        super().allow_shared_memory(function, nbytes)
        if nbytes > 227 << 10:
            raise CudaFailure(INVALID_VALUE, "allow_shared_memory", "invalid argument")

    # Running

    def device_bytes(self, address: int, nbytes: int) -> np.ndarray[Any, Any]:
        return self.memory.at(address, nbytes)

    def run_kernel(
        self, function: HostFunction, geometry: Geometry, params: Params, operands: Mapping[str, Buffer]
    ) -> None:
        status = self._execution_failures.popleft() if self._execution_failures else 0
        if isinstance(status, GpuActorsError):
            raise status
        if status:
            raise CudaFailure(status, "kernel", "injected")
        self.kernels[function.name](self.memory, params, geometry)  # type: ignore[arg-type]

    def advance(self, queue: HostQueue) -> bool:
        ran = super().advance(queue)
        if ran:
            self.wake()
        return ran

    def progress(self, waits: bool) -> bool:
        if waits:
            return self._moment != "manual" and self.step()
        # A device makes progress while a thread polls.
        self._polls += 1
        return self._moment == "late" and self._polls % 4 == 0 and self.step()

    def wake(self) -> None:
        """Wake threads that sleep for an event, since no work runs by itself."""
        self._recorded.notify_all()
