"""Records the service's launches, to measure a kernel without the service.

A `RecordingContext` runs on a `RecordingDevice`, which forwards everything and can store launches. The launch of a
request, with all of its kernels, can then be repeated on another stream. This module does not depend on how requests
become launches.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from gpu_actors.arrays.device_array import DeviceArray
from gpu_actors.context import open_context
from gpu_actors.devices.forwarding import ForwardingDevice
from gpu_actors.devices.interface import Device, Event, Launch, Stream

__all__ = ["RecordingContext", "RecordingDevice", "for_timing"]


class RecordingContext(open_context):
    """`open_context` whose launches pass through ``recorder``. The recorder exists once the context is open."""

    recorder: RecordingDevice

    def make_device(self) -> Device:
        self.recorder = RecordingDevice(super().make_device())
        return self.recorder


class RecordingDevice(ForwardingDevice):
    """A device that can store the launches on it."""

    def __init__(self, inner: Device) -> None:
        super().__init__(inner)
        self._lock = threading.Lock()
        self._launches: list[Launch] | None = None

    @contextmanager
    def recording(self) -> Iterator[list[Launch]]:
        """A context manager with a list of the launches that are made within it, on all streams."""
        with self._lock:
            launches: list[Launch] = []
            self._launches = launches
        try:
            yield launches
        finally:
            with self._lock:
                self._launches = None

    def note(self, launch: Launch) -> None:
        with self._lock:
            if self._launches is not None:
                self._launches.append(launch)

    def open_stream(self, name: str) -> Stream:
        stream = self.inner.open_stream(name)
        # The launches that prove a kernel belong to no request.
        return stream if name == "qualify" else _RecordingStream(self, stream)


class _RecordingStream(Stream):
    def __init__(self, device: RecordingDevice, inner: Stream) -> None:
        self._device = device
        self._inner = inner

    def launch(self, launch: Launch) -> Event:
        self._device.note(launch)
        return self._inner.launch(launch)

    def close(self) -> None:
        self._inner.close()


def for_timing(launch: Launch, output: Callable[[str, tuple[int, ...], str], Any]) -> Launch:
    """The same launch into arrays of ``output(name, shape, dtype)``, without waits for other streams.

    The work on the streams of its inputs must have finished.
    """
    inputs = {name: _unordered(array) for name, array in launch.inputs.items()}
    outputs = {
        name: spec if name in inputs else spec._replace(into=_unordered(output(name, spec.shape, spec.dtype)))
        for name, spec in launch.outputs.items()
    }
    return dataclasses.replace(launch, inputs=inputs, outputs=outputs)


def _unordered(array: Any) -> Any:
    return dataclasses.replace(array, stream=None) if isinstance(array, DeviceArray) else array
