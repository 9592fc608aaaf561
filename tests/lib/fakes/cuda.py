"""FakeCuda: the driver calls of a CudaDevice on the CPU, as late and as unforgiving as a GPU may be.

When what is enqueued happens is told in `fake_queues`. A copy reads its source when it happens, not when it is asked
for. Freed memory is poisoned, its address never used again, and touching it later is an error that loses the context,
as on a GPU.

Kernels are Python callables ``kernel(memory, params, geometry)``, loaded by name from an "image" that is just a label.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from fakes.memory import ILLEGAL_ADDRESS, POISON, FakeBlock, FakeMemory
from fakes.queues import LEGACY, FakeQueues, FakeStream, Operation, Order
from inside.cuda import CudaFailure, DeviceProperties, MemoryBlock
from inside.devices import Params, TensorMap
from inside.emulation import encode_tensor_map

__all__ = ["LEGACY", "FakeCuda", "Geometry"]

Kernel = Callable[["FakeMemory", bytes, "Geometry"], None]
INVALID_VALUE, OUT_OF_MEMORY = 1, 2
DEFAULT_SHARED = 48 << 10


@dataclass(frozen=True)
class Geometry:
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int


@dataclass(eq=False)
class FakeEvent:
    """A wait is for the record before it. Records on several streams may be over in another order."""

    records: int = 0
    waiters: int = 0
    ended: set[int] = field(default_factory=set)

    @property
    def done(self) -> bool:
        return self.records == 0 or self.records in self.ended


@dataclass
class FakeFunction:
    kernel: Kernel
    module: int
    shared_bytes: int = DEFAULT_SHARED


class FakeCuda(FakeQueues):
    """One device. Implements `CudaApi`, plus what a test needs to steer it.

    kernels: what the images hold, by entry point.
    """

    def __init__(
        self,
        kernels: dict[str, Kernel] | None = None,
        order: Order = "late",
        seed: int = 0,
        capability: int = 90,
        memory: int = 1 << 30,
    ) -> None:
        super().__init__(order, seed)
        self.kernels = kernels or {}
        self.memory = FakeMemory()
        self.total = memory
        self.idle_bytes = 0
        self._capability = capability
        self._events: dict[int, FakeEvent] = {}
        self._modules: dict[int, bytes] = {}
        self._graphs: dict[int, list[Operation]] = {}
        self._functions: dict[int, FakeFunction] = {}
        self._pinned: dict[int, np.ndarray[Any, Any]] = {}
        self._freed_pinned: list[np.ndarray[Any, Any]] = []
        self._polls = 0

    # Steering

    def new_stream(self) -> int:
        """A stream of the program's own."""
        return self._add(self._streams, FakeStream())

    def put(self, array: np.ndarray[Any, Any]) -> FakeBlock:
        """A block of the program's own that holds the array's bytes."""
        block = self.memory.add(array.nbytes)
        self.memory.at(block.address, array.nbytes)[:] = np.frombuffer(array.tobytes(), np.uint8)
        return block

    def leaks(self) -> dict[str, int]:
        """What is still held, without the program's own blocks and streams made by `put` and `new_stream`."""
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

    # CudaApi

    def bind(self) -> None:
        with self._call("bind", bound=False):
            self._bound.yes = True

    def is_current(self) -> bool:
        return True

    def properties(self) -> DeviceProperties:
        with self._call("properties"):
            return DeviceProperties("Fake", self._capability, self.total, 4)

    def allocate(self, nbytes: int) -> FakeBlock:
        with self._call("allocate"):
            used = sum(block.nbytes for block in self.memory.blocks if block.live)
            if used + nbytes + self.idle_bytes > self.total:
                raise CudaFailure(OUT_OF_MEMORY, "allocate", "out of memory")
            return self.memory.add(nbytes)

    def free(self, block: MemoryBlock) -> None:
        with self._changed:
            assert isinstance(block, FakeBlock)
            self.memory.remove(block)

    def trim(self) -> None:
        with self._call("trim"):
            self.idle_bytes = 0

    def allocate_pinned(self, nbytes: int) -> int:
        with self._call("allocate_pinned"):
            memory = np.full(nbytes, POISON, np.uint8)
            address = int(memory.ctypes.data)
            self._pinned[address] = memory
            return address

    def free_pinned(self, address: int) -> None:
        with self._call("free_pinned", bound=False):
            memory = self._pinned.pop(address)
            memory[:] = POISON
            # Kept, so that a late copy meets poison and not somebody else's memory.
            self._freed_pinned.append(memory)

    def create_stream(self) -> int:
        with self._call("create_stream"):
            return self._add(self._streams, FakeStream())

    def destroy_stream(self, stream: int) -> None:
        with self._call("destroy_stream", bound=False):
            assert not self._find(self._streams, stream).queue, "a busy stream is destroyed"
            del self._streams[stream]

    def copy_to_device(self, device: int, host: int, nbytes: int, stream: int) -> None:
        with self._call("copy_to_device"):

            def copy() -> None:
                self.memory.at(device, nbytes)[:] = self._host(host, nbytes)

            self.enqueue(stream, copy)

    def copy_on_device(self, device: int, source: int, nbytes: int, stream: int) -> None:
        with self._call("copy_on_device"):

            def copy() -> None:
                self.memory.at(device, nbytes)[:] = self.memory.at(source, nbytes)

            self.enqueue(stream, copy)

    def copy_to_host(self, host: int, device: int, nbytes: int, stream: int) -> None:
        with self._call("copy_to_host"):

            def copy() -> None:
                self._host(host, nbytes)[:] = self.memory.at(device, nbytes)

            self.enqueue(stream, copy)

    def fill(self, device: int, value: int, nbytes: int, stream: int) -> None:
        with self._call("fill"):

            def fill() -> None:
                self.memory.at(device, nbytes)[:] = value

            self.enqueue(stream, fill)

    def launch_kernel(
        self,
        function: int,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        shared_bytes: int,
        stream: int,
        params: Params,
    ) -> None:
        with self._call("launch_kernel"):
            loaded = self._find(self._functions, function)
            self._find(self._modules, loaded.module)  # a function goes with its module
            if 0 in grid or shared_bytes > loaded.shared_bytes:
                raise CudaFailure(INVALID_VALUE, "launch_kernel", "invalid argument")
            geometry, copied = Geometry(grid, block, shared_bytes), params

            def run() -> None:
                status = self._execution_failures.popleft() if self._execution_failures else 0
                if status:
                    raise CudaFailure(status, "kernel", "injected")
                loaded.kernel(self.memory, copied, geometry)

            self.enqueue(stream, run)

    def encode_tensor_map(self, tensor_map: TensorMap) -> bytes:
        with self._call("encode_tensor_map"):
            return encode_tensor_map(*tensor_map)

    def begin_capture(self, stream: int) -> None:
        with self._call("begin_capture"):
            target = self._find(self._streams, stream)
            assert target.captured is None, "the stream is being captured"
            target.captured = []

    def end_capture(self, stream: int) -> int:
        # Over it is in any case, also where no graph comes of it.
        target = self._find(self._streams, stream)
        captured, target.captured = target.captured, None
        with self._call("end_capture"):
            assert captured is not None, "nothing is being captured"
            return self._add(self._graphs, captured)

    def launch_graph(self, graph: int, stream: int) -> None:
        with self._call("launch_graph"):
            operations = self._find(self._graphs, graph)
            target = self._find(self._streams, stream)
            assert target.captured is None
            target.queue.extend(operations)

    def destroy_graph(self, graph: int) -> None:
        with self._call("destroy_graph"):
            self._find(self._graphs, graph)
            del self._graphs[graph]

    def create_event(self) -> int:
        with self._call("create_event"):
            return self._add(self._events, FakeEvent())

    def destroy_event(self, event: int) -> None:
        with self._call("destroy_event", bound=False):
            assert not self._find(self._events, event).waiters, "an event is destroyed under a waiter"
            del self._events[event]

    def record_event(self, event: int, stream: int) -> None:
        with self._call("record_event"):
            recorded = self._find(self._events, event)
            recorded.records += 1
            number = recorded.records

            def record() -> None:
                recorded.ended.add(number)

            self._find(self._streams, stream)
            self.enqueue(stream, record)

    def event_done(self, event: int) -> bool:
        with self._call("event_done", bound=False):
            queried = self._find(self._events, event)
            if queried.done:
                return True
            # Late, but a device does get on with its work while somebody polls.
            self._polls += 1
            if self._order == "late" and self._polls % 4 == 0:
                self.step()
            return False

    def synchronize_event(self, event: int) -> None:
        with self._call("synchronize_event"):
            awaited = self._find(self._events, event)
            awaited.waiters += 1
            try:
                while not awaited.done:
                    if self._order == "manual" or not self.step():
                        self._changed.wait()
                    if self._lost is not None:
                        raise CudaFailure(self._lost, "synchronize_event")
                if self._order == "manual":
                    # The thread wakes a little after the event: others get to act first.
                    self._changed.wait(0.01)
            finally:
                awaited.waiters -= 1

    def wait_event(self, stream: int, event: int) -> None:
        with self._call("wait_event"):
            awaited = self._find(self._events, event)
            number = awaited.records

            def wait() -> bool:
                return number == 0 or number in awaited.ended

            self._find(self._streams, stream).queue.append(wait)

    def load_module(self, image: bytes) -> int:
        with self._call("load_module"):
            return self._add(self._modules, image)

    def unload_module(self, module: int) -> None:
        with self._call("unload_module", bound=False):
            self._find(self._modules, module)
            del self._modules[module]

    def get_function(self, module: int, name: str) -> int:
        with self._call("get_function"):
            self._find(self._modules, module)
            if name not in self.kernels:
                raise CudaFailure(500, "get_function", f"named symbol not found: {name}")
            return self._add(self._functions, FakeFunction(self.kernels[name], module))

    def allow_shared_memory(self, function: int, nbytes: int) -> None:
        with self._call("allow_shared_memory"):
            if nbytes > 227 << 10:
                raise CudaFailure(INVALID_VALUE, "allow_shared_memory", "invalid argument")
            self._find(self._functions, function).shared_bytes = max(DEFAULT_SHARED, nbytes)

    def close(self) -> None:
        with self._call("close", bound=False):
            pass

    # Inside

    def _host(self, address: int, nbytes: int) -> np.ndarray[Any, Any]:
        for start, memory in self._pinned.items():
            if start <= address and address + nbytes <= start + memory.nbytes:
                return memory[address - start : address - start + nbytes]
        raise CudaFailure(ILLEGAL_ADDRESS, "copy", f"{nbytes} host bytes at {address:#x} are not page-locked")
