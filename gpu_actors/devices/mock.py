"""MockDevice: the same service with a NumPy oracle in place of the kernels.

Launches run one after the other on the stream's own thread, as on a GPU, so the arithmetic never delays the actor. With
``compute=False`` and no latency a launch is answered at once.
"""

from __future__ import annotations

import threading
from typing import Any

from gpu_actors.clock import Clock
from gpu_actors.compiling.source import Cubin
from gpu_actors.devices.host import HostStream, host_array, host_outputs
from gpu_actors.devices.interface import (
    Device,
    DeviceInfo,
    Event,
    FinishedEvent,
    Kernel,
    Launch,
    Outputs,
    Stream,
)
from gpu_actors.errors import MockModeError
from gpu_actors.options import MockOptions

__all__ = ["MockDevice"]


class MockDevice(Device):
    """Runs on any machine. arch: the architecture whose kernels it pretends to launch."""

    def __init__(self, arch: str, options: MockOptions, clock: Clock) -> None:
        self.info: DeviceInfo = DeviceInfo("mock", f"mock {arch}", arch, runs_kernels=False)
        self.options = options
        self._clock = clock
        self._streams: list[Stream] = []

    def is_current(self) -> bool:
        # A launch that computes takes longer than the actor's thread takes to wake, and gains more by sharing a launch
        # with requests that wait.
        return not (self.options.compute or self.options.latency)

    def open_stream(self, name: str) -> Stream:
        stream = _MockStream(name, self.options, self._clock)
        self._streams.append(stream)
        return stream

    def load(self, cubin: Cubin, entry: str) -> Kernel:
        return Kernel(entry, cubin)

    def allocate(self, shape: tuple[int, ...], dtype: str, zero: bool = False) -> Any:
        return host_array(shape, dtype, zero)

    def probe(self) -> None:
        return

    def close(self) -> None:
        for stream in self._streams:
            stream.close()


class _MockStream(HostStream):
    def __init__(self, name: str, options: MockOptions, clock: Clock) -> None:
        super().__init__(name)
        self._options = options
        self._clock = clock
        self._sleeping = threading.Condition()

    def launch(self, launch: Launch) -> Event:
        if self._options.compute or self._options.latency:
            return super().launch(launch)
        if self._closed:
            raise self._stopped()
        return FinishedEvent(error=MockModeError(_NOT_COMPUTING))

    def run(self, launch: Launch) -> Outputs:
        if self._options.latency:
            self._sleep(self._clock.now() + self._options.latency)
        if not self._options.compute:
            raise MockModeError(_NOT_COMPUTING)
        return host_outputs(launch, launch.oracle(launch.inputs))

    def close(self) -> None:
        super().close()
        with self._sleeping:
            self._sleeping.notify_all()

    def _sleep(self, until: float) -> None:
        with self._sleeping:
            while self._clock.now() < until and not self._closed:
                self._clock.wait(self._sleeping, until)


_NOT_COMPUTING = "this context runs on the mock device with MockOptions(compute=False)"
