"""FaultyDevice: wraps any device and injects the faults of a `FaultPlan` at its launches."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from gpu_actors.clock import Clock
from gpu_actors.devices.fault_plan import Fault, FaultPlan
from gpu_actors.devices.forwarding import ForwardingDevice
from gpu_actors.devices.interface import (
    Device,
    Event,
    FinishedEvent,
    Launch,
    Outputs,
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
        self._launches = [0] * len(plan.faults)

    @property
    def identity(self) -> tuple[str, ...]:
        # Verdicts about kernels that faults have spoiled must not count for the device without faults.
        return *self.inner.identity, repr(self._plan)

    def faults(self, launch: Launch) -> list[Fault]:
        """Count a launch, and return the faults that hit it."""
        kernels = {step.kernel.entry for step in launch.steps}
        if launch.key is not None:
            kernels.add(launch.key.kernel)
        found = []
        with self._lock:
            for number, fault in enumerate(self._plan.faults):
                if fault.hits(launch.key, kernels):
                    self._launches[number] += 1
                    if fault.launch in (None, self._launches[number]):
                        found.append(fault)
        return found

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
        faults = device.faults(launch)
        if device.lost is not None:
            return FinishedEvent(error=device.lost)
        delay = 0.0
        event: Event | None = None
        for fault in faults:
            if fault.kind == "delay":
                delay += fault.seconds
            elif fault.kind != "wrong" and event is None:
                event = self._faulty_event(fault)
        if event is None:
            event = self._inner.launch(launch)
            if any(fault.kind == "wrong" for fault in faults):
                event = _WrongEvent(event, launch, faults)
        return _DelayedEvent(self, event, device.clock, device.clock.now() + delay) if delay else event

    def _faulty_event(self, fault: Fault) -> Event:
        """The event of a launch that never reaches the device."""
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


class _WrongEvent(Event):
    """The end of a launch. The first `wait` changes an element of each array on the host that the launch wrote."""

    def __init__(self, inner: Event, launch: Launch, faults: Sequence[Fault]) -> None:
        self._inner = inner
        self._returned = [launch.inputs[name] for name in launch.returned]
        self._values = [fault.value for fault in faults if fault.kind == "wrong"]
        self._lock = threading.Lock()

    @property
    def outputs(self) -> Outputs:  # type: ignore[override]
        return self._inner.outputs

    def done(self) -> bool:
        return self._inner.done()

    def wait(self) -> None:
        self._inner.wait()
        with self._lock:
            values, self._values = self._values, []
        for array in [*self._inner.outputs.values(), *self._returned]:
            for value in values:
                _spoil(array, value)


def _spoil(array: Any, value: float | None) -> None:
    """Change the middle element of an array on the host."""
    if not isinstance(array, np.ndarray) or not array.size:
        return
    where = np.unravel_index(array.size // 2, array.shape)
    if value is not None:
        array[where] = value
        return
    bits = array.view(f"u{array.itemsize}")
    bits[where] ^= bits.dtype.type(1 << (8 * array.itemsize - 2))


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
