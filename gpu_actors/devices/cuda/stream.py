"""CudaStream: one non-blocking stream of the device, and its launches in flight.

A launch becomes a `Flight`: waits for the inputs' producers, upload, kernels, download, event. The stream holds each
flight until its event is known to be done, even if its result is not needed any more, so that none of its memory is
freed early. `CudaSeries`, for launches on callers' streams, is here too, because the two classes use each other.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

from gpu_actors.arrays.device_array import DeviceArray
from gpu_actors.devices.cuda.api import CudaApi
from gpu_actors.devices.cuda.driver import Driver
from gpu_actors.devices.cuda.errors import CAPTURE_IMPLICIT, CudaFailure, WorkFailed
from gpu_actors.devices.cuda.memory import MemoryPools, leak
from gpu_actors.devices.cuda.module import CudaFunction
from gpu_actors.devices.cuda.operands import Kernels, Operands, Placement, StreamMemory, first_on_device
from gpu_actors.devices.interface import (
    Event,
    FinishedEvent,
    Launch,
    Outputs,
    Series,
    Step,
    Steps,
    Stream,
)
from gpu_actors.errors import ActorStopped, GpuActorsError, InvalidRequest, LaunchError

__all__ = ["CudaEvent", "CudaStream", "Flight"]

R = TypeVar("R")

_IDLE = 8
"""How many `StreamMemory` objects of ended series a stream keeps for its next series."""

_MOST_HELD = 256
"""How many arrays a series holds before it marks its launches so far, whose end then frees the arrays."""


class _Events:
    """The events of one stream. Its launches reuse them."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._idle: list[int] = []
        self._order: int | None = None
        self._closed = False

    def take(self) -> int:
        """Return an event that no launch uses. Raises `CudaFailure`."""
        return self._idle.pop() if self._idle else self._driver.api.create_event()

    def put_back(self, event: int) -> None:
        """Return an event for reuse. No thread may wait for it any more."""
        if self._closed:
            self._driver.destroy_event(event)
        else:
            self._idle.append(event)

    def order_after(self, producer: int, stream: int) -> None:
        """Make ``stream`` wait, on the device, for the current work on ``producer``. Raises `CudaFailure`."""
        api = self._driver.api
        if self._order is None:
            self._order = api.create_event(asked=False)
        # A wait refers to the latest record before it, so the event may be recorded again at once.
        api.record_event(self._order, producer)
        api.wait_event(stream, self._order)

    def close(self) -> None:
        """Destroy the events. No launch may be in flight. A thread that waited for one may still put an event back."""
        self._closed = True
        events, self._idle = self._idle, []
        if self._order is not None:
            events.append(self._order)
            self._order = None
        for event in events:
            self._driver.api.destroy_event(event)


class CudaStream(Stream):
    """The stream of one actor, as `CudaDevice.open_stream` opens it."""

    def __init__(self, pools: MemoryPools, name: str) -> None:
        driver = pools.driver
        self.name = name
        self.handle: int | None = driver.call(driver.api.create_stream)
        self._driver = driver
        self._pools = pools
        self._flights: deque[Flight] = deque()
        self._ahead: list[Flight] = []  # flights on callers' streams: later work of this stream comes after them
        self._closed = False
        self._events = _Events(driver)
        self._memory = StreamMemory(pools)
        self._of_series: deque[tuple[Hashable, StreamMemory]] = deque(maxlen=_IDLE)
        self._memory_lock = threading.Lock()  # callers' threads take memory, and any thread puts it back
        self._open: set[CudaSeries] = set()
        self.dropped: deque[CudaSeries] = deque()
        # Held while work is enqueued, so that the stream is not destroyed meanwhile.
        self._lock = threading.Lock()

    def launch(self, launch: Launch) -> Event:
        driver = self._driver
        driver.enter()
        self._end_dropped()
        with self._lock:
            self._reap()
        return self._submit(Operands(self._pools, launch, self._placement(launch), self._memory))

    def series(self) -> Series:
        return CudaSeries(self)

    def close(self) -> None:
        for series in list(self._open):
            with contextlib.suppress(GpuActorsError):
                if series.capturing() is None:  # else the end would go into the graph, and not tell when work has ended
                    self.end(series)  # its work may continue on a caller's stream
        with self._lock:
            if self._closed:
                return
            self._closed = True
            for flight in self._flights:
                flight.stopped = True
        self.retire()

    def retire(self) -> bool:
        """Destroy the closed stream if nothing is in flight. Never blocks. Returns whether it is destroyed."""
        with self._lock:
            if self._driver.lost:
                return False
            while self._flights and self._flights[0].settle_if_over():
                self._flights.popleft()
            if self._flights or self._open or self._driver.lost:
                return False
            if self.handle is not None:
                try:
                    self._events.close()
                    self._driver.api.destroy_stream(self.handle)
                except CudaFailure as failure:
                    self._driver.failed(failure)
                    return False
                self.handle = None
                self._memory.release()
                self._of_series.clear()
            return True

    def _placement(self, launch: Launch) -> Placement:
        steps = launch.steps
        if isinstance(steps, Steps):
            known = steps.placement
            if isinstance(known, Placement) and known.fits(launch, self):
                return known
        emulated = self._driver.api.emulation is not None
        placement = Placement.of(launch, self, _checked(self._driver, launch), emulated=emulated)
        if isinstance(steps, Steps):
            steps.placement = placement
        return placement

    def _submit(self, operands: Operands) -> Event:
        """Enqueue a launch between the waits for its producers and the record of its event."""
        driver, api = self._driver, self._driver.api
        flight = Flight(driver, self.name, operands, self._events)
        event = CudaEvent(flight)
        with self._lock:
            if self._closed or self.handle is None:
                flight.release()
                if self.handle is None:
                    self._memory.release()
                raise self._stopped()
            try:
                flight.event = self._events.take()
                _prepare(api, operands.bound.kernels)
            except CudaFailure as failure:
                error = driver.failed(failure)
                flight.release()
                raise error from failure
            except BaseException:
                flight.release()
                raise
            try:
                self._follow()
                for producer in operands.producers:
                    self._order_after(producer, self.handle)
                _compute(api, self.handle, operands)
                api.record_event(flight.event, self.handle)
            except CudaFailure as failure:
                error = driver.failed(failure)
                self._keep_until_over(flight)
                raise error from failure
            except BaseException:  # Ctrl-C: part of the work may be enqueued
                self._keep_until_over(flight)
                raise
            self._flights.append(flight)
        return event

    # Launches that end together

    def prepare(self, launch: Launch) -> _Shared | None:
        """The state that launches with the same steps share. None if each of them has copies of its own."""
        self._driver.enter()
        self._end_dropped()
        placement = self._placement(launch)
        if not placement.stays:
            return None
        sizes = placement.pieces, placement.armed_pieces
        with self._memory_lock:
            memory = self._take_memory(sizes)
        return _Shared(launch.steps, Operands(self._pools, launch, placement, memory), memory, sizes)

    def launch_for(self, launch: Launch, target: int | None) -> Event:
        """Launch on this stream, after the work of ``target`` so far. Later work of ``target`` waits for the launch."""
        if target is None:
            return self.launch(launch)
        self._order(target, self.handle)
        event = self.launch(launch)
        self._order(self.handle, target)
        return event

    def _order(self, first: int | None, second: int | None) -> None:
        with self._lock:
            if self._closed or first is None or second is None:
                raise self._stopped()
            self._driver.call(self._events.order_after, first, second)

    def is_capturing(self, target: int | None) -> bool:
        """Whether ``target``, a caller's stream, is being captured."""
        self._driver.enter()
        return target is not None and self._driver.call(self._captured, target)

    def _captured(self, stream: int) -> bool:
        """The answer of `CudaApi.is_capturing`. Raises `InvalidRequest` if a capture forbids any use of the stream."""
        try:
            return self._driver.api.is_capturing(stream)
        except CudaFailure as failure:
            if failure.status != CAPTURE_IMPLICIT:
                raise
            reason = "is the default stream, which no work may use while a stream that it waits for is being captured"
            raise InvalidRequest("stream", stream, f"{reason}: make that one non-blocking") from failure

    def captured_end(self, series: CudaSeries) -> int | None:
        """The answer of `Series.capturing`. Also works while the device is being closed."""
        last = series.last
        if last is None or last == self.handle:
            return None
        try:
            return last if self._driver.call(self._captured, last) else None
        except InvalidRequest:
            return last
        except GpuActorsError:  # the stream was destroyed, and `end` raises that too
            return None

    def enqueue(
        self, series: CudaSeries, operands: Operands, arrays: Iterable[DeviceArray], target: int | None
    ) -> None:
        """Enqueue a launch of the series on ``target``, a caller's stream, or on this stream if it is None.

        arrays: the caller's. Arrays of another stream, or of none, are held until the series has finished.
        Raises `InvalidRequest` if the launch would wait for a stream that is being captured.
        """
        driver, api = self._driver, self._driver.api
        driver.enter()
        with self._lock:
            try:
                here = self._enter(series, target)
                for array in arrays:
                    made_on = array.stream
                    if made_on != here:
                        series.held.append(array)
                        if made_on is not None:
                            self._order_after(made_on, here)
                self._upload(series, operands, here)
                series.uploaded.remove(operands)  # what a launch leaves that fails is cleared by the next upload
                operands.launch(api, here)
                series.uploaded.add(operands)
            except CudaFailure as failure:
                raise driver.failed(failure) from failure

    def capture(self, operands: Operands, arrays: Iterable[DeviceArray], target: int) -> None:
        """Record a launch in the capture of a caller's stream.

        Raises `InvalidRequest` for an array of another stream.
        """
        for array in arrays:
            if array.stream not in (None, target):
                reason = f"is being captured, and cannot wait for stream {array.stream}, which an array belongs to"
                raise InvalidRequest("stream", target, reason)
        with self._lock:
            self._driver.call(operands.launch, self._driver.api, target)

    def upload(self, series: CudaSeries, target: int | None = None) -> None:
        """Upload what the launches of a series read from the host, on ``target``, or on this stream if it is None."""
        driver = self._driver
        driver.enter()
        with self._lock:
            try:
                here = self._enter(series, target)
                for operands in series.operands():
                    self._upload(series, operands, here)
            except CudaFailure as failure:
                raise driver.failed(failure) from failure

    def _enter(self, series: CudaSeries, target: int | None) -> int:
        """Order the next work of a series after its earlier work. Returns the stream for it. Raises `CudaFailure`."""
        if self._closed or self.handle is None:
            raise self._stopped()
        here = self.handle if target is None else target
        if series.last is not None or not self._is_idle():
            last = self.handle if series.last is None else series.last
            if self.handle in (last, here):
                self._follow()
            if last != here:
                self._order_after(last, here)
        self._open.add(series)
        series.last = here
        return here

    def _order_after(self, producer: int, here: int) -> None:
        """Make ``here`` wait for ``producer``. Raises `InvalidRequest` if a caller captures it, and `CudaFailure`."""
        if producer != self.handle and self._captured(producer):  # the record would go into the graph
            reason = "is being captured: another stream can wait for its work only once the capture has ended"
            raise InvalidRequest("stream", producer, reason)
        self._events.order_after(producer, here)

    def _is_idle(self) -> bool:
        """Whether all work of this stream, and all work that it waits for, is known to have finished."""
        self._reap()
        return all(flight.settled for flight in self._flights) and all(
            series.last != self.handle for series in self._open
        )

    def _follow(self) -> None:
        """Order the next work of this stream after the series that ended on callers' streams. Raises `CudaFailure`."""
        while self._ahead:
            flight = self._ahead[-1]
            event = flight.event
            if event is not None and not flight.settled and self.handle is not None:
                self._driver.api.wait_event(self.handle, event)
            self._ahead.pop()

    def _upload(self, series: CudaSeries, operands: Operands, here: int) -> None:
        if operands not in series.uploaded:
            _prepare(self._driver.api, operands.bound.kernels)
            operands.upload(self._driver.api, here)
            series.uploaded.add(operands)

    def end(self, series: CudaSeries, stays: bool = False) -> Event:
        """Return the event for the end of the launches of a series. stays: more launches may follow."""
        driver = self._driver
        with self._lock:
            if series not in self._open:
                return FinishedEvent()
            if not stays:
                self._open.remove(series)
            self._reap()
            flight = Flight(driver, self.name, series.take_held() if stays else series, self._events)
            event = CudaEvent(flight)
            try:
                if self._closed or self.handle is None:
                    raise self._stopped()
                flight.event = self._events.take()
                last = self.handle if series.last is None else series.last
                driver.api.record_event(flight.event, last)
                if last != self.handle:
                    # This stream waits at its next own work: steps that follow each other on a caller's stream need no
                    # wait between the two streams.
                    self._ahead = [*(each for each in self._ahead if not each.settled), flight]
            except CudaFailure as failure:
                leak(flight)
                raise driver.failed(failure) from failure
            except BaseException:
                leak(flight)
                raise
            self._flights.append(flight)
        return event

    def _end_dropped(self) -> None:
        for _ in range(len(self.dropped)):
            try:
                series = self.dropped.popleft()
            except IndexError:  # another thread has taken the last one
                return
            if series not in self._open:
                series.release()
                continue
            with contextlib.suppress(GpuActorsError):  # its stream may be destroyed, and other launches must not fail
                if series.capturing() is not None:
                    self.dropped.append(series)
                else:
                    self.end(series)

    def _take_memory(self, sizes: Hashable) -> StreamMemory:
        for index, (others, memory) in enumerate(self._of_series):
            if others == sizes:
                del self._of_series[index]
                return memory
        return StreamMemory(self._pools)

    def put_back(self, shared: _Shared) -> None:
        """Keep the memory of a series for the next series. The work of this one must have finished."""
        if self.handle is not None:
            with self._memory_lock:
                self._of_series.append((shared.sizes, shared.memory))

    def _keep_until_over(self, flight: Flight) -> None:
        """Hold the memory of an aborted launch until the part of it that was enqueued has finished."""
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
        """Settle finished launches whose events have no reference left, and forget the settled ones."""
        flights = self._flights
        while flights and (flights[0].settled or (flights[0].orphaned and flights[0].settle_if_over())):
            flights.popleft()

    def _stopped(self) -> ActorStopped:
        return ActorStopped(f"the stream of {self.name} is closed")


def _prepare(api: CudaApi, kernels: Kernels) -> None:
    for function, geometry, _ in kernels:
        function.prepare(api, geometry.shared_bytes)


def _compute(api: CudaApi, stream: int, operands: Operands) -> None:
    """Enqueue the copies and the kernels of a launch."""
    operands.upload(api, stream)
    operands.launch(api, stream)
    operands.download(api, stream)


class _Shared(NamedTuple):
    """The state that launches of a series with the same steps share. sizes: of the pieces of ``memory``, in bytes."""

    steps: Sequence[Step]
    operands: Operands
    memory: StreamMemory
    sizes: Hashable


class _Held:
    """Arrays that stay alive until launches of a series have finished."""

    producers: tuple[int, ...] = ()

    def __init__(self, arrays: list[DeviceArray]) -> None:
        self._arrays = arrays

    def results(self) -> Outputs:
        return {}

    def release(self) -> None:
        self._arrays = []


class CudaSeries(Series):
    """A series in which launches with the same steps differ only in their arrays on the device.

    Such launches use the memory of the first of them, one after the other.
    last: the stream of the latest launch, None before the first. uploaded: the operands whose host inputs are on the
    device. held: arrays that must stay alive until all launches have finished.
    """

    def __init__(self, stream: CudaStream) -> None:
        super().__init__(stream)
        self._cuda = stream
        self._shared: dict[int, _Shared] = {}  # by the identity of the steps
        self._moving: dict[int, Sequence[Step]] = {}  # steps whose launches have copies of their own
        self.producers: tuple[int, ...] = ()
        self.last: int | None = None
        self.uploaded: set[Operands] = set()
        self.held: list[DeviceArray] = []

    def operands(self) -> Iterable[Operands]:
        return [shared.operands for shared in self._shared.values()]

    def take_held(self) -> _Held:
        held, self.held = _Held(self.held), []
        return held

    def add(self, launch: Launch, stream: int | None = None) -> Event:
        self.captured = self._cuda.is_capturing(stream)
        shared = self._shared.get(id(launch.steps))
        if self.captured:
            fixed = id(launch.steps) not in self._moving
            _check_capture(launch, stream, shared is not None and shared.operands in self.uploaded, fixed)
        if first_on_device(launch) is None:
            return super().add(launch)
        if shared is not None:
            shared.operands.move(launch, shared.memory)
        else:
            shared = self._prepare(launch)
            if shared is None:
                return self._cuda.launch_for(launch, stream)
        operands = shared.operands
        self._enqueue(operands, operands.on_device(launch, launch.waited if self.captured else ()), stream)
        return FinishedEvent(operands.found)

    def repeat(
        self, launch: Launch, kept: Mapping[str, Any], arrays: Mapping[str, Any], stream: int | None = None
    ) -> bool:
        shared = self._shared.get(id(launch.steps))
        bound = None if shared is None else shared.operands.bound_before({**kept, **arrays})
        if shared is None or bound is None or shared.operands not in self.uploaded:
            return False
        self.captured = self._cuda.is_capturing(stream)
        shared.operands.bound = bound
        self._enqueue(shared.operands, arrays.values(), stream)
        return True

    def _enqueue(self, operands: Operands, arrays: Iterable[DeviceArray], stream: int | None) -> None:
        if self.captured and stream is not None:
            self._cuda.capture(operands, arrays, stream)
        else:
            self._cuda.enqueue(self, operands, arrays, stream)
            if len(self.held) > _MOST_HELD:
                self.mark()

    def ready(self, launch: Launch) -> None:
        if first_on_device(launch) is None:
            return
        if self._prepare(launch) is not None:
            self._cuda.upload(self)

    def _prepare(self, launch: Launch) -> _Shared | None:
        """The state that launches with the same steps share. None if each of them has copies of its own."""
        shared = self._cuda.prepare(launch)
        if shared is None:
            self._moving[id(launch.steps)] = launch.steps
        else:
            self._shared[id(launch.steps)] = shared
        return shared

    def renew(self, steps: Sequence[Step], launch: Launch) -> None:
        shared = self._shared.get(id(steps))
        if shared is not None:
            shared.operands.restage(launch)
            self.uploaded.discard(shared.operands)
            self.last = None  # the next launch waits for what this stream has done since

    def upload(self, stream: int | None = None) -> None:
        if self._cuda.is_capturing(stream):
            raise InvalidRequest("stream", stream, "is being captured, and a graph is replayed on one that is not")
        self._cuda.upload(self, stream)

    def capturing(self) -> int | None:
        return self._cuda.captured_end(self)

    def mark(self) -> Event:
        return self._cuda.end(self, stays=True)

    def end(self) -> Event:
        return self._cuda.end(self)

    def drop(self) -> None:
        self._cuda.dropped.append(self)

    def results(self) -> Outputs:
        return {}

    def release(self) -> None:
        """Free the memory. No enqueued work may use it any more."""
        self.held.clear()
        self.keeps = None
        while self._shared:
            _, shared = self._shared.popitem()
            shared.operands.release()
            self._cuda.put_back(shared)


def _check_capture(launch: Launch, stream: int | None, uploaded: bool, fixed: bool) -> None:
    """Raise `InvalidRequest` for a launch that a graph cannot repeat.

    A graph allocates no memory, and the host copies nothing for its replays. uploaded: what the launch reads from the
    host is on the device. fixed: the host writes no bytes for each launch.
    """
    for name, spec in launch.outputs.items():
        if spec.into is None:
            if name == "lse":
                raise InvalidRequest("return_lse", True, "is not captured: an LSE is allocated at each launch")
            reason = "must be given while its stream is captured: nothing is allocated there"
            raise InvalidRequest(name, None, reason)
    if not fixed:
        reason = "is being captured, and these kernels need addresses that the host writes for each launch"
        others = "a request with pack_gqa=False and a step with max_length, which is no cascade, take others"
        raise InvalidRequest("stream", stream, f"{reason}: {others}")
    if not uploaded:
        reason = "is being captured: launch once on arrays of the device before, for its memory and tables"
        raise InvalidRequest("stream", stream, reason)


class Flight:
    """A launch in flight. It holds the launch's memory until `settle`.

    stopped: the stream was closed while the launch was in flight.
    settled: the results are in place and the memory is freed.
    failure: the error with which the launch ended although the device still works. There are no results then.
    """

    def __init__(self, driver: Driver, stream: str, operands: _Work, events: _Events) -> None:
        self.driver = driver
        self.operands: _Work | None = operands
        self.event: int | None = None
        self.outputs: Outputs = {}
        self.failure: GpuActorsError | None = None
        self.stopped = False
        self.settled: bool = False
        self._ended = False  # whether the driver has said that the event is done
        self._stream = stream
        self._events = events
        self._owner: weakref.ref[CudaEvent] | None = None
        self._waiting = 0
        # Held while the event is queried, so that another thread that settles cannot give the event away meanwhile.
        self._lock = threading.Lock()

    @property
    def orphaned(self) -> bool:
        """Whether no reference to the results is left."""
        return self._owner is None or self._owner() is None

    def belongs_to(self, event: CudaEvent | None) -> None:
        self._owner = None if event is None else weakref.ref(event)

    def over(self) -> bool:
        """Whether the launch has ended. Never blocks on the device. Raises what `Event.wait` does."""
        with self._lock:
            if self.settled or self._ended or self.event is None:
                return True
            done = self._ask(self.driver.api.event_done, self.event)
            self._ended = done is None or done
            return self._ended

    def wait(self) -> None:
        """Sleep until the launch has ended, and settle it. The launch's own error is put in `failure`."""
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
            if not self._ended:
                self._ask(self.driver.api.synchronize_event, event)
        finally:
            with self._lock:
                self._waiting -= 1
        self.settle()

    def settle_if_over(self) -> bool:
        """Settle if the launch has ended. Never blocks on the device."""
        try:
            over = self.over()
        except GpuActorsError:
            # The context is lost, and the memory with it.
            return False
        if over:
            self.settle()
        return over

    def settle(self) -> None:
        """Put the results in place and free the memory. The event must be done."""
        with self._lock:
            if self.operands is not None:
                if self.failure is None:
                    self.outputs = self.operands.results()
                self.operands.release()
                # The stream may hold the flight until its next launch, but not the kernels.
                self.operands = None
                self.settled = True
            if not self._waiting and self.event is not None:
                event, self.event = self.event, None
                self._events.put_back(event)

    def _ask(self, call: Callable[[int], R], event: int) -> R | None:
        """Make a driver call about the event. Returns its answer, or None if the launch failed but the device works."""
        try:
            return call(event)
        except WorkFailed as failure:
            self.failure = failure.error
            return None
        except CudaFailure as failure:
            raise self.driver.failed(failure) from failure

    def hand_over(self, event: CudaEvent) -> None:
        """Move the results to the event. The stream may hold the flight until its next launch, but not the results."""
        with self._lock:
            if self.outputs:
                event.outputs, self.outputs = self.outputs, {}

    def release(self) -> None:
        """Free the memory of a launch that has enqueued nothing."""
        if self.operands is not None:
            self.operands.release()
        if self.event is not None:
            self._events.put_back(self.event)


_Work: TypeAlias = Operands | CudaSeries | _Held
"""The owner of the memory that a flight holds."""


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
        error = self.failure()
        if error is not None:
            raise error

    def failure(self) -> BaseException | None:
        try:
            self._flight.wait()
        except BaseException as error:
            return error
        self._flight.hand_over(self)
        return self._flight.failure


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
        # With empty grids only, nothing would write the outputs.
        entry = launch.steps[0].kernel.entry
        raise LaunchError(f"kernel {entry!r} has an empty grid and outputs that are not empty")
    return functions
