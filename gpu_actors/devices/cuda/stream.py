"""CudaStream: one non-blocking stream of the device, and its launches in flight.

A launch becomes a `Flight`: waits for the inputs' producers, upload, kernel, download, event. The stream holds each
flight until its event is known to be over, even if its result is not needed any more, so that none of its memory is
freed early.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Hashable, Sequence
from typing import TypeAlias

from gpu_actors.devices.cuda.api import CudaApi
from gpu_actors.devices.cuda.driver import Driver
from gpu_actors.devices.cuda.errors import CudaFailure
from gpu_actors.devices.cuda.memory import MemoryPools, leak
from gpu_actors.devices.cuda.module import CudaFunction
from gpu_actors.devices.cuda.operands import Armed, Operands
from gpu_actors.devices.cuda.recorded import RecordedLaunch, capture
from gpu_actors.devices.interface import Event, Launch, LaunchGeometry, Outputs, Params, RecordingStats, Stream
from gpu_actors.devices.recorded import Recordings, recording_key
from gpu_actors.errors import ActorStopped, GpuActorsError, LaunchError

__all__ = ["CudaEvent", "CudaStream", "Flight"]

_Kernels: TypeAlias = Sequence[tuple[CudaFunction, LaunchGeometry, Params]]


class CudaStream(Stream):
    """Opened by `CudaDevice.open_stream`."""

    def __init__(self, pools: MemoryPools, name: str) -> None:
        driver = pools.driver
        self.name = name
        self.handle: int | None = driver.call(driver.api.create_stream)
        self._driver = driver
        self._pools = pools
        self._flights: deque[Flight] = deque()
        self._closed = False
        self._armed: Armed | None = None
        self.recordings: Recordings[RecordedLaunch] = Recordings(lambda record: record.drop(driver))
        # Held while work is enqueued, so that the stream is not destroyed meanwhile.
        self._lock = threading.Lock()

    def launch(self, launch: Launch) -> Event:
        driver = self._driver
        driver.enter()
        functions = _checked(driver, launch)
        with self._lock:
            self._reap()
        key = recording_key(launch)
        if key is not None:
            return self._launch_recorded(key, launch, functions)
        operands = Operands(self._pools, launch, self._arm)
        try:
            kernels = _packed(functions, launch, operands)
        except BaseException:
            operands.release()
            raise
        flight = Flight(driver, self.name, launch, operands)
        event = CudaEvent(flight)
        with self._lock:
            if self._closed or self.handle is None:
                flight.release()
                raise self._stopped()
            self._enqueue(flight, operands, kernels)
        return event

    def recording_stats(self) -> RecordingStats:
        return self.recordings.stats()

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            for flight in self._flights:
                flight.stopped = True
        self.retire()

    def retire(self) -> bool:
        """Destroy the closed stream if nothing is in flight. Never blocks. True once it is destroyed."""
        self.recordings.close()
        with self._lock:
            if self._driver.lost:
                return False
            while self._flights and self._flights[0].settle_if_over():
                self._flights.popleft()
            if self._flights or self._driver.lost:
                return False
            if self.handle is not None:
                self._driver.api.destroy_stream(self.handle)
                self.handle = self._armed = None
            return True

    def _arm(self) -> Armed:
        with self._lock:
            if self._armed is None:
                self._armed = Armed(self._pools)
            return self._armed

    def _launch_recorded(self, key: Hashable, launch: Launch, functions: Sequence[CudaFunction]) -> Event:
        driver = self._driver
        recorded = self.recordings.acquire(key)
        if recorded is None:
            recorded = self._record(key, launch, functions)
        else:
            recorded.rebind(launch)
        flight = Flight(driver, self.name, launch, recorded)
        event = CudaEvent(flight)
        with self._lock:
            if self._closed or self.handle is None:
                flight.release()
                raise self._stopped()
            api, stream = driver.api, self.handle
            try:
                flight.event = api.create_event()
            except CudaFailure as failure:
                error = driver.failed(failure)
                flight.release()
                raise error from failure
            try:
                for producer in recorded.producers:
                    _order_after(driver, producer, stream)
                api.launch_graph(recorded.graph, stream)
                api.record_event(flight.event, stream)
            except CudaFailure as failure:
                error = driver.failed(failure)
                self._keep_until_over(flight)
                raise error from failure
            self._flights.append(flight)
        return event

    def _record(self, key: Hashable, launch: Launch, functions: Sequence[CudaFunction]) -> RecordedLaunch:
        """Record a launch as a graph, with its own memory for the launch's operands."""
        driver, api = self._driver, self._driver.api
        operands = Operands(self._pools, launch)
        try:
            kernels = _packed(functions, launch, operands)
            with self._lock:
                if self._closed or self.handle is None:
                    raise self._stopped()
                stream = self.handle

                def enqueue() -> None:
                    _compute(api, stream, operands, kernels)

                for function, geometry, _ in kernels:
                    function.prepare(api, geometry.shared_bytes)
                graph = capture(driver, stream, enqueue)
        except CudaFailure as failure:
            operands.release()
            raise driver.failed(failure) from failure
        except BaseException:
            operands.release()
            raise
        return RecordedLaunch(key, graph, functions, operands, self.recordings)

    def _enqueue(self, flight: Flight, operands: Operands, kernels: _Kernels) -> None:
        driver, stream = self._driver, self.handle
        assert stream is not None
        api = driver.api
        try:
            flight.event = api.create_event()
            for function, geometry, _ in kernels:
                function.prepare(api, geometry.shared_bytes)
        except CudaFailure as failure:
            error = driver.failed(failure)
            flight.release()
            raise error from failure
        try:
            for producer in operands.producers:
                _order_after(driver, producer, stream)
            _compute(api, stream, operands, kernels)
            api.record_event(flight.event, stream)
        except CudaFailure as failure:
            error = driver.failed(failure)
            self._keep_until_over(flight)
            raise error from failure
        self._flights.append(flight)

    def _keep_until_over(self, flight: Flight) -> None:
        """Hold the memory of an aborted launch: the part of it that was enqueued goes on."""
        assert flight.event is not None
        assert self.handle is not None
        flight.belongs_to(None)
        try:
            self._driver.api.record_event(flight.event, self.handle)
        except CudaFailure:
            leak(flight)
            return
        self._flights.append(flight)

    def _reap(self) -> None:
        """Settle finished launches whose events are dropped."""
        flights = self._flights
        while flights and (flights[0].settled or (flights[0].orphaned and flights[0].settle_if_over())):
            flights.popleft()

    def _stopped(self) -> ActorStopped:
        return ActorStopped(f"the stream of {self.name} is closed")


def _packed(functions: Sequence[CudaFunction], launch: Launch, operands: Operands) -> _Kernels:
    return [
        (function, step.geometry, step.pack(operands.buffers))
        for function, step in zip(functions, launch.steps, strict=True)
    ]


def _compute(api: CudaApi, stream: int, operands: Operands, kernels: _Kernels) -> None:
    """Enqueue the copies and the kernels of a launch."""
    operands.upload(api, stream)
    for function, geometry, params in kernels:
        if 0 not in geometry.grid:
            api.launch_kernel(function.handle, *geometry, stream, params)
    operands.download(api, stream)


class Flight:
    """A launch in flight. It holds the launch's memory until `settle`.

    stopped: the stream was closed meanwhile.
    settled: the results are in place and the memory is freed.
    """

    def __init__(self, driver: Driver, stream: str, launch: Launch, operands: Operands | RecordedLaunch) -> None:
        self.driver = driver
        self.operands = operands
        self.event: int | None = None
        self.outputs: Outputs = {}
        self.stopped = False
        self.settled: bool = False
        self._stream = stream
        self._launch: Launch | None = launch
        self._owner: weakref.ref[CudaEvent] | None = None
        self._waiting = 0
        # Held while the event is queried, so that another thread that settles cannot destroy it meanwhile.
        self._lock = threading.Lock()

    @property
    def orphaned(self) -> bool:
        """True once there is no reference to the results."""
        return self._owner is None or self._owner() is None

    def belongs_to(self, event: CudaEvent | None) -> None:
        self._owner = None if event is None else weakref.ref(event)

    def over(self) -> bool:
        """Whether the launch has ended. Never blocks on the device. Raises what `Event.wait` does."""
        with self._lock:
            if self.settled or self.event is None:
                return True
            return self.driver.call(self.driver.api.event_done, self.event)

    def wait(self) -> None:
        """Sleep until the launch is over and settle it."""
        if self.settled:
            return
        self.driver.enter()
        if self.stopped and not self.over():
            raise ActorStopped(f"the stream of {self._stream} was closed before the launch had finished")
        with self._lock:
            event = self.event
            if event is None:
                return
            self._waiting += 1
        try:
            self.driver.call(self.driver.api.synchronize_event, event)
        finally:
            with self._lock:
                self._waiting -= 1
        self.settle()

    def settle_if_over(self) -> bool:
        """Settle if the launch has ended. Never blocks on the device."""
        try:
            over = self.over()
        except GpuActorsError:
            # The context is lost, and its memory with it.
            return False
        if over:
            self.settle()
        return over

    def settle(self) -> None:
        """Put the results in place and free the memory. The event must be over."""
        with self._lock:
            if not self.settled:
                self.outputs = self.operands.results()
                self.operands.release()
                self._launch = None
                self.settled = True
            if not self._waiting and self.event is not None:
                event, self.event = self.event, None
                self.driver.destroy_event(event)

    def hand_over(self, event: CudaEvent) -> None:
        """Move the results to the event. The stream may hold the flight until its next launch, but not the results."""
        with self._lock:
            if self.outputs:
                event.outputs, self.outputs = self.outputs, {}

    def release(self) -> None:
        """Free the memory of a launch of which nothing was enqueued."""
        self.operands.release()
        if self.event is not None:
            self.driver.destroy_event(self.event)


class CudaEvent(Event):
    """The end of a flight."""

    def __init__(self, flight: Flight) -> None:
        self.outputs: Outputs = {}
        self._flight = flight
        flight.belongs_to(self)

    def done(self) -> bool:
        flight = self._flight
        if flight.settled or flight.stopped or flight.driver.lost or flight.driver.closed:
            return True
        try:
            return flight.over()
        except GpuActorsError:
            return True

    def wait(self) -> None:
        self._flight.wait()
        self._flight.hand_over(self)


def _checked(driver: Driver, launch: Launch) -> list[CudaFunction]:
    if not launch.steps and not all(spec.zero for spec in launch.outputs.values()):
        raise LaunchError("a launch on CUDA needs a kernel, a geometry and a way to pack its parameters")
    functions: list[CudaFunction] = []
    for step in launch.steps:
        function = step.kernel.handle
        if not isinstance(function, CudaFunction) or function.driver is not driver:
            raise LaunchError(f"kernel {step.kernel.entry!r} was not loaded by this device")
        functions.append(function)
    empty = all(0 in step.geometry.grid for step in launch.steps)
    if empty and any(0 not in spec.shape and not spec.zero for spec in launch.outputs.values()):
        # An empty grid would leave the outputs unwritten.
        entry = launch.steps[0].kernel.entry
        raise LaunchError(f"kernel {entry!r} has an empty grid and outputs that are not empty")
    return functions


def _order_after(driver: Driver, producer: int, stream: int) -> None:
    """Make ``stream`` wait, on the device, for the current work on ``producer``."""
    api = driver.api
    event = api.create_event()
    try:
        api.record_event(event, producer)
        api.wait_event(stream, event)
    finally:
        api.destroy_event(event)
