"""CudaClock: an `EventClock` on a stream of a CUDA device. HostClock: on a stream of a device that is the host.

On CUDA, a kernel of one thread holds the stream: it polls a flag in page-locked memory until the flag is set.
"""

from __future__ import annotations

import ctypes
import struct
import time
from typing import Any

from gpu_actors.compiling.compiler import Compiler
from gpu_actors.compiling.source import KernelSource
from gpu_actors.devices.cuda.device import CudaDevice
from gpu_actors.devices.cuda.stream import CudaStream
from gpu_actors.devices.interface import Event, Launch, Stream

__all__ = ["CudaClock", "HostClock"]

_HOLD = """\
struct Params { volatile int* state; long long limit; };

extern "C" __global__ void hold(const __grid_constant__ Params p) {
  const long long start = clock64();
  while (p.state[0] == 0) {
    if (clock64() - start > p.limit) {
      p.state[1] = 1;
      return;
    }
    __nanosleep(500);
  }
}
"""
_LIMIT = 400_000_000
"""Cycles: about 0.2 s, far longer than enqueueing a turn takes."""
_STATE_BYTES = 8


class CudaClock:
    """Times a stream. Only the user of the clock may enqueue on it meanwhile.

    It needs NVRTC. Raises what compiling and loading a kernel raise.
    """

    def __init__(self, device: CudaDevice, stream: CudaStream) -> None:
        from cupy.cuda import runtime

        assert stream.handle is not None
        self.handle: Any = stream.handle
        self._device = device
        self._runtime = runtime
        cubin = Compiler().compile(KernelSource("hold.cu", _HOLD, ("hold",)), device.info.arch)
        self._hold = device.load(cubin, "hold")  # the whole kernel: without it, its module would be unloaded
        address = device.driver.call(device.driver.api.allocate_pinned, _STATE_BYTES)
        self._state = (ctypes.c_int32 * 2).from_address(address)
        self._address = address
        self._events: list[int] = []
        self._free: list[int] = []

    def hold(self) -> None:
        self._state[0] = self._state[1] = 0
        params = struct.pack("<Qq", self._address, _LIMIT)
        driver = self._device.driver
        driver.call(driver.api.launch_kernel, self._hold.handle.handle, (1, 1, 1), (1, 1, 1), 0, self.handle, params)

    def release(self) -> bool:
        late = bool(self._state[1])
        self._state[0] = 1
        return not late

    def mark(self) -> int:
        event = self._free.pop() if self._free else int(self._runtime.eventCreate())
        self._events.append(event)
        self._runtime.eventRecord(event, self.handle)
        return event

    def elapsed(self, begin: Any, end: Any) -> float:
        return float(self._runtime.eventElapsedTime(begin, end))

    def synchronize(self) -> None:
        self._runtime.streamSynchronize(self.handle)

    def reuse(self) -> None:
        """Reuse the events of all marks so far, which are not read any more."""
        self._free += self._events
        self._events = []

    def close(self) -> None:
        """Free everything. No work may be enqueued any more."""
        self.reuse()
        for event in self._free:
            self._runtime.eventDestroy(event)
        self._free = []
        self._device.driver.api.free_pinned(self._address)


class HostClock(Stream):
    """A stream with its clock, which holds nothing: a mark waits for what was launched before it."""

    def __init__(self, inner: Stream) -> None:
        self._inner = inner
        self._pending: list[Event] = []

    def launch(self, launch: Launch) -> Event:
        event = self._inner.launch(launch)
        self._pending.append(event)
        return event

    def close(self) -> None:
        self._inner.close()

    def hold(self) -> None:
        return

    def release(self) -> bool:
        return True

    def mark(self) -> float:
        self.synchronize()
        return time.perf_counter()

    def elapsed(self, begin: float, end: float) -> float:
        return (end - begin) * 1e3

    def synchronize(self) -> None:
        pending, self._pending = self._pending, []
        for event in pending:
            event.wait()
