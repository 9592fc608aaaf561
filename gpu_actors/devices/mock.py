"""MockDevice: the same service with a NumPy oracle in the kernel's place.

Launches run one after the other on the stream's own thread, as they would on a GPU: the actor is never held up by the
arithmetic. A launch that computes nothing and takes no time is answered on the spot.
"""

from __future__ import annotations

import queue
import threading
from typing import Any

from gpu_actors.clock import Clock
from gpu_actors.devices.interface import Device, DeviceInfo, Event, Kernel, Launch, Outputs, Stream
from gpu_actors.errors import ActorStopped, GpuActorsError, LaunchError, MockModeError
from gpu_actors.kernels.source import Cubin
from gpu_actors.options import MockOptions

__all__ = ["FinishedEvent", "HostEvent", "MockDevice"]


class FinishedEvent(Event):
    """A launch that ended as it began: with outputs, or with an error."""

    __slots__ = ("_error", "outputs")

    def __init__(self, outputs: Outputs | None = None, error: GpuActorsError | None = None) -> None:
        self.outputs = outputs if outputs is not None else {}
        self._error = error

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        if self._error is not None:
            raise self._error


class HostEvent(Event):
    """The end of a launch that a host thread works on."""

    def __init__(self) -> None:
        self.outputs = {}
        self._error: BaseException | None = None
        self._done = threading.Event()

    def succeed(self, outputs: Outputs) -> None:
        if not self._done.is_set():
            self.outputs = outputs
            self._done.set()

    def fail(self, error: BaseException) -> None:
        if not self._done.is_set():
            self._error = error
            self._done.set()

    def done(self) -> bool:
        return self._done.is_set()

    def wait(self) -> None:
        self._done.wait()
        if self._error is not None:
            raise self._error


class MockDevice(Device):
    """Runs on any machine. arch: whose kernels it pretends to launch."""

    def __init__(self, arch: str, options: MockOptions, clock: Clock) -> None:
        self.info = DeviceInfo("mock", f"mock {arch}", arch, runs_kernels=False)
        self.options = options
        self._clock = clock
        self._streams: list[HostStream] = []

    def open_stream(self, name: str) -> Stream:
        stream = MockStream(name, self.options, self._clock)
        self._streams.append(stream)
        return stream

    def load(self, cubin: Cubin, entry: str) -> Kernel:
        return Kernel(entry, cubin)

    def probe(self) -> None:
        return

    def close(self) -> None:
        for stream in self._streams:
            stream.close()


class HostStream(Stream):
    """An in-order queue of launches that one thread of the host works through. Subclasses say how."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._work: queue.SimpleQueue[tuple[Launch, HostEvent] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._lock = threading.Lock()
        self._current: HostEvent | None = None

    def run(self, launch: Launch) -> Outputs:
        """Compute the launch's outputs on the calling thread."""
        raise NotImplementedError

    def launch(self, launch: Launch) -> Event:
        event = HostEvent()
        with self._lock:
            if self._closed:
                raise ActorStopped(f"the stream of {self._name} is closed")
            if self._thread is None:
                self._thread = threading.Thread(target=self._loop, name=f"{self._name}-stream", daemon=True)
                self._thread.start()
            self._work.put((launch, event))
        return event

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._work.put(None)
        current = self._current
        if current is not None:
            current.fail(self._stopped())

    def _loop(self) -> None:
        while (item := self._work.get()) is not None:
            launch, event = item
            self._current = event
            if self._closed:
                event.fail(self._stopped())
                continue
            try:
                event.succeed(self.run(launch))
            except GpuActorsError as error:
                event.fail(error)
            except BaseException as error:
                failure = LaunchError(f"{self._name}: the launch raised {error!r}")
                failure.__cause__ = error
                event.fail(failure)
            self._current = None

    def _stopped(self) -> ActorStopped:
        return ActorStopped(f"the stream of {self._name} was closed before the launch had finished")


class MockStream(HostStream):
    def __init__(self, name: str, options: MockOptions, clock: Clock) -> None:
        super().__init__(name)
        self._options = options
        self._clock = clock
        self._sleeping = threading.Condition()

    def launch(self, launch: Launch) -> Event:
        if not self._options.compute and not self._options.latency:
            if self._closed:
                raise self._stopped()
            return FinishedEvent(error=MockModeError(_NOT_COMPUTING))
        return super().launch(launch)

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


def host_outputs(launch: Launch, results: Outputs) -> Outputs:
    """Round results to the dtypes asked for, into the caller's arrays where there are any."""
    outputs: dict[str, Any] = {}
    for name, spec in launch.outputs.items():
        result = results[name]
        if spec.into is not None:
            spec.into[...] = result.astype(spec.dtype)
            outputs[name] = spec.into
        else:
            outputs[name] = result.astype(spec.dtype)
    return outputs
