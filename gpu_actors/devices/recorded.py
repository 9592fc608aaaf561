"""Recordings: launches that a stream has recorded and can replay, with their memory.

A step of decoding is the same few operations every time: upload, kernels, download. A device records them once, over
memory that it retains. Later it copies new operands to the place of the old ones and replays the record. Launches with
equal `recording_key` share a record. One launch uses it at a time.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

import numpy as np

from gpu_actors.arrays.device_array import DeviceArray
from gpu_actors.devices.interface import Launch, RecordingStats

__all__ = ["Recordings", "recording_key"]

R = TypeVar("R")

_CAPACITY = 32


def recording_key(launch: Launch) -> Hashable | None:
    """Launches with equal keys can replay each other. None for one that should not or cannot be recorded.

    Arrays on the device must stay in place, as the pages of a cache do: their addresses are part of the key. Arrays of
    callers, and outputs on the device, do not stay.
    """
    if launch.recording is None:
        return None
    inputs: list[Hashable] = []
    for name, array in launch.inputs.items():
        if isinstance(array, DeviceArray):
            if array.stream is not None or array.source is not None:
                return None
            inputs.append((name, array.shape, array.strides, array.dtype, array.address))
        else:
            address = array.ctypes.data if name in launch.recording_keeps else None
            inputs.append((name, array.shape, array.dtype, address))
    if launch.outputs and not isinstance(next(iter(launch.inputs.values())), np.ndarray):
        return None
    if any(isinstance(spec.into, DeviceArray) for spec in launch.outputs.values()):
        return None
    outputs = tuple((name, spec.shape, spec.dtype, spec.zero) for name, spec in launch.outputs.items())
    scratch = tuple((name, spec.shape, spec.dtype, spec.zero) for name, spec in launch.scratch.items())
    steps = tuple((step.kernel.entry, id(step.kernel.handle), step.geometry) for step in launch.steps)
    return launch.recording, tuple(inputs), outputs, scratch, steps


class Recordings(Generic[R]):
    """The records of one stream, least recently used first. Safe to use from any thread.

    drop: frees a record's memory. It may be called on any thread that releases a record.
    """

    def __init__(self, drop: Callable[[R], None] = lambda record: None) -> None:
        self._drop = drop
        self._lock = threading.Lock()
        self._idle: OrderedDict[Hashable, list[R]] = OrderedDict()
        self._count = 0
        self._closed = False
        self._recorded = self._replayed = self._dropped = 0

    def stats(self) -> RecordingStats:
        with self._lock:
            return RecordingStats(self._recorded, self._replayed, self._dropped)

    def acquire(self, key: Hashable) -> R | None:
        """A record that is not in use, or None if the launch must be recorded."""
        with self._lock:
            idle = self._idle.get(key)
            if not idle:
                self._recorded += 1
                return None
            self._replayed += 1
            self._count -= 1
            record = idle.pop()
            if not idle:
                del self._idle[key]
            return record

    def release(self, key: Hashable, record: R) -> None:
        """Return a record when the launch that used it, or made it, has ended."""
        dropped: list[R] = []
        with self._lock:
            if self._closed:
                dropped.append(record)
            else:
                self._idle.setdefault(key, []).append(record)
                self._idle.move_to_end(key)
                self._count += 1
                while self._count > _CAPACITY:
                    oldest = next(iter(self._idle))
                    dropped.append(self._idle[oldest].pop())
                    self._count -= 1
                    if not self._idle[oldest]:
                        del self._idle[oldest]
            self._dropped += len(dropped)
        for unused in dropped:
            self._drop(unused)

    def close(self) -> None:
        """Drop every record, and from now on each one that is released."""
        with self._lock:
            self._closed = True
            records = [record for idle in self._idle.values() for record in idle]
            self._idle.clear()
            self._dropped += len(records)
        for record in records:
            self._drop(record)
