"""FaultyDevice: any device, with the faults of a `FaultPlan` at its launches."""

from __future__ import annotations

import threading
from typing import Any

from gpu_actors.attention.problem import DispatchKey
from gpu_actors.clock import Clock
from gpu_actors.devices.fault_plan import Fault, FaultPlan
from gpu_actors.devices.forwarding import ForwardingDevice
from gpu_actors.devices.interface import (
    Device,
    Event,
    FinishedEvent,
    Launch,
    Outputs,
    RecordingStats,
    Stream,
)
from gpu_actors.errors import ActorStopped, ContextLost

__all__ = ["FaultyDevice"]


class FaultyDevice(ForwardingDevice):
    """Wraps a device. It forwards everything but launches."""

    def __init__(self, inner: Device, plan: FaultPlan, clock: Clock) -> None:
        super().__init__(inner)
        self.clock = clock
        self.lost: ContextLost | None = None
        self._plan = plan
        self._streams: list[_FaultyStream] = []
        self._lock = threading.Lock()
        self._launches = 0
        self._launches_of: dict[DispatchKey | None, int] = {}

    def faults(self, key: DispatchKey | None) -> list[Fault]:
        """Count a launch and return its faults."""
        with self._lock:
            self._launches += 1
            of_key = self._launches_of[key] = self._launches_of.get(key, 0) + 1
            return [
                fault
                for fault in self._plan.faults
                if (fault.key is None or fault.key == key)
                and fault.launch in (None, self._launches if fault.key is None else of_key)
            ]

    def open_stream(self, name: str) -> Stream:
        stream = _FaultyStream(self, self.inner.open_stream(name))
        self._streams.append(stream)
        return stream

    def allocate(self, shape: tuple[int, ...], dtype: str, zero: bool = False) -> Any:
        if self.lost is not None:
            raise self.lost
        return self.inner.allocate(shape, dtype, zero)

    def probe(self) -> None:
        if self.lost is not None:
            raise self.lost
        self.inner.probe()

    def close(self) -> None:
        for stream in self._streams:
            stream.close()
        self.inner.close()


class _FaultyStream(Stream):
    def __init__(self, device: FaultyDevice, inner: Stream) -> None:
        self._device = device
        self._inner = inner
        self.closed = False
        self.gate = threading.Condition()

    def launch(self, launch: Launch) -> Event:
        device = self._device
        faults = device.faults(launch.key)
        if device.lost is not None:
            return FinishedEvent(error=device.lost)
        delay = 0.0
        event: Event | None = None
        for fault in faults:
            if fault.kind == "delay":
                delay += fault.seconds
            elif event is None:
                event = self._faulty_event(fault)
        if event is None:
            event = self._inner.launch(launch)
        return _DelayedEvent(self, event, device.clock, device.clock.now() + delay) if delay else event

    def recording_stats(self) -> RecordingStats:
        return self._inner.recording_stats()

    def _faulty_event(self, fault: Fault) -> Event:
        """The end of a launch that never reaches the device."""
        if fault.kind == "hang":
            return _HungEvent(self)
        error = fault.make_error()
        if isinstance(error, ContextLost):
            self._device.lost = error
        return FinishedEvent(error=error)

    def close(self) -> None:
        with self.gate:
            self.closed = True
            self.gate.notify_all()
        self._inner.close()


class _HungEvent(Event):
    def __init__(self, stream: _FaultyStream) -> None:
        self.outputs: Outputs = {}
        self._stream = stream

    def done(self) -> bool:
        return self._stream.closed

    def wait(self) -> None:
        with self._stream.gate:
            while not self._stream.closed:
                self._stream.gate.wait()
        raise ActorStopped("the device was closed while the launch hung")


class _DelayedEvent(Event):
    def __init__(self, stream: _FaultyStream, inner: Event, clock: Clock, until: float) -> None:
        self._stream = stream
        self._inner = inner
        self._clock = clock
        self._until = until

    @property
    def outputs(self) -> Outputs:  # type: ignore[override]
        return self._inner.outputs

    def done(self) -> bool:
        return self._inner.done() and (self._clock.now() >= self._until or self._stream.closed)

    def wait(self) -> None:
        gate = self._stream.gate
        with gate:
            while self._clock.now() < self._until and not self._stream.closed:
                self._clock.wait(gate, self._until)
        self._inner.wait()
