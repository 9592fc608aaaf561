"""NullApi: a `CudaApi` that computes nothing, to measure the cost of a request on the host."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import time
from collections import Counter
from collections.abc import Hashable, Mapping

import numpy as np

from gpu_actors.devices.cuda.api import DeviceProperties, MemoryBlock
from gpu_actors.devices.cuda.parameters import kernel_params
from gpu_actors.devices.interface import Buffer, Params, TensorMap

__all__ = ["NullApi"]

_FIRST_ADDRESS, _APART = 1 << 40, 1 << 32


class _Block:
    __slots__ = ("address",)

    def __init__(self, address: int) -> None:
        self.address = address


class NullApi:
    """A device of compute capability 9.0 with invented addresses. A copy to the host gives the last value of `fill`.

    seconds: how long after its record an event is done, as after a kernel of this duration. With 0 all work has
        finished as soon as it is enqueued.
    calls: how often each call was made.
    """

    emulation: None = None
    lent_after: int | None = None

    def __init__(self, seconds: float = 0.0) -> None:
        self.calls: Counter[str] = Counter()
        self._seconds = seconds
        self._handles = itertools.count(1)
        self._addresses = itertools.count(_FIRST_ADDRESS, _APART)
        self._freed: list[int] = []
        self._pinned: dict[int, np.ndarray[tuple[int], np.dtype[np.uint8]]] = {}
        self._filled: dict[int, int] = {}
        self._ends: dict[int, float] = {}
        self._capturing: set[int] = set()

    def bind(self) -> None:
        self.calls["bind"] += 1

    def allow_captures(self) -> None:
        self.calls["allow_captures"] += 1

    def relaxed(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def is_current(self) -> bool:
        return True  # not counted: the runtime only reads a thread-local variable

    def properties(self) -> DeviceProperties:
        self.calls["properties"] += 1
        return DeviceProperties("null", 90, 80 << 30, 132)

    # Memory

    def allocate(self, nbytes: int) -> MemoryBlock:
        self.calls["allocate"] += 1
        return _Block(self._freed.pop() if self._freed else next(self._addresses))

    def lend(self, nbytes: int) -> MemoryBlock:
        return self.allocate(nbytes)

    def free(self, block: MemoryBlock) -> None:
        self.calls["free"] += 1
        self._freed.append(block.address)

    def trim(self) -> None:
        self.calls["trim"] += 1

    def allocate_pinned(self, nbytes: int) -> int:
        self.calls["allocate_pinned"] += 1
        memory = np.empty(nbytes, np.uint8)
        address = int(memory.ctypes.data)
        self._pinned[address] = memory
        return address

    def free_pinned(self, address: int) -> None:
        self.calls["free_pinned"] += 1
        del self._pinned[address]

    # Work

    def create_stream(self) -> int:
        return self._new_handle("create_stream")

    def destroy_stream(self, stream: int) -> None:
        self.calls["destroy_stream"] += 1

    def copy_to_device(self, device: int, host: int, nbytes: int, stream: int) -> None:
        self.calls["copy_to_device"] += 1

    def copy_to_host(self, host: int, device: int, nbytes: int, stream: int) -> None:
        self.calls["copy_to_host"] += 1
        if device in self._filled:
            ctypes.memset(host, self._filled[device], nbytes)

    def copy_on_device(self, device: int, source: int, nbytes: int, stream: int) -> None:
        self.calls["copy_on_device"] += 1

    def fill(self, device: int, value: int, nbytes: int, stream: int) -> None:
        self.calls["fill"] += 1
        self._filled[device] = value

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
        self.calls["launch_kernel"] += 1
        kernel_params(params)

    def begin_capture(self, stream: int) -> None:
        self.calls["begin_capture"] += 1
        self._capturing.add(stream)

    def is_capturing(self, stream: int) -> bool:
        self.calls["is_capturing"] += 1
        return stream in self._capturing

    def end_capture(self, stream: int) -> int:
        self._capturing.discard(stream)
        return self._new_handle("end_capture")

    def launch_graph(self, graph: int, stream: int) -> None:
        self.calls["launch_graph"] += 1

    def destroy_graph(self, graph: int) -> None:
        self.calls["destroy_graph"] += 1

    # Order

    def create_event(self, asked: bool = True) -> int:
        return self._new_handle("create_event")

    def destroy_event(self, event: int) -> None:
        self.calls["destroy_event"] += 1
        self._ends.pop(event, None)

    def record_event(self, event: int, stream: int) -> None:
        self.calls["record_event"] += 1
        if self._seconds:
            self._ends[event] = time.perf_counter() + self._seconds

    def event_done(self, event: int) -> bool:
        self.calls["event_done"] += 1
        return event not in self._ends or time.perf_counter() >= self._ends[event]

    def synchronize_event(self, event: int) -> None:
        self.calls["synchronize_event"] += 1
        if event in self._ends and (remaining := self._ends[event] - time.perf_counter()) > 0:
            time.sleep(remaining)

    def wait_event(self, stream: int, event: int) -> None:
        self.calls["wait_event"] += 1

    def encode_tensor_map(self, tensor_map: TensorMap) -> bytes:
        self.calls["encode_tensor_map"] += 1
        return bytes(128)

    # Code

    def load_module(self, image: Hashable) -> int:
        return self._new_handle("load_module")

    def unload_module(self, module: int) -> None:
        self.calls["unload_module"] += 1

    def get_function(self, module: int, name: str) -> int:
        return self._new_handle("get_function")

    def allow_shared_memory(self, function: int, nbytes: int) -> None:
        self.calls["allow_shared_memory"] += 1

    def close(self) -> None:
        self.calls["close"] += 1

    def _new_handle(self, call: str) -> int:
        self.calls[call] += 1
        return next(self._handles)
