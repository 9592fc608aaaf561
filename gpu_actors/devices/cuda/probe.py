"""Prober: proof that the device still does work, within a time limit."""

from __future__ import annotations

import itertools
import threading
import time
from typing import TYPE_CHECKING

from gpu_actors.devices.cuda.memory import DeviceMemory
from gpu_actors.errors import ContextLost

if TYPE_CHECKING:
    from gpu_actors.devices.cuda.device import CudaDevice

__all__ = ["Prober"]

_BYTES = 256
_SHORTEST_SLEEP, _LONGEST_SLEEP = 20e-6, 2e-3


class Prober:
    """Has a stream of its own, so that a busy actor does not look like a hung device. Making one raises CudaFailure."""

    def __init__(self, device: CudaDevice) -> None:
        self._device = device
        self._memory = DeviceMemory(device, _BYTES)
        self._staging = device.take_staging(_BYTES)
        self._stream = device.api.create_stream()
        self._values = itertools.cycle(range(1, 256))
        self._lock = threading.Lock()
        self._hung = False

    def run(self, timeout: float) -> None:
        """Fill device memory with a new value, copy it back and compare.

        Raises ContextLost where that takes more than ``timeout`` seconds or gives another value.
        """
        device, api, stream = self._device, self._device.api, self._stream
        with self._lock:
            value = next(self._values)
            seen = self._staging.bytes[:_BYTES]
            seen[:] = 0
            event = device.call(api.create_event)
            device.call(api.fill, self._memory.address, value, _BYTES, stream)
            device.call(api.copy_to_host, self._staging.address, self._memory.address, _BYTES, stream)
            device.call(api.record_event, event, stream)
            # Polled rather than waited for: a wait cannot be given up.
            if not self._wait(event, timeout):
                self._hung = True
                raise self._lose(f"no progress in {timeout:g} s")
            device.destroy_event(event)
            if not bool((seen == value).all()):
                raise self._lose("memory does not hold what was written to it")

    def close(self) -> bool:
        """Release everything. Never blocks. False if the device still works on a probe."""
        with self._lock:
            if self._hung or self._device.lost:
                return False
            self._device.api.destroy_stream(self._stream)
            self._device.give_staging(self._staging)
            self._memory.release()
            return True

    def _wait(self, event: int, timeout: float) -> bool:
        clock = self._device.clock
        until = clock.now() + timeout
        sleep = _SHORTEST_SLEEP
        while True:
            # Before the device is asked: if this process stands still in between, the answer is not from then.
            now = clock.now()
            if self._device.call(self._device.api.event_done, event):
                return True
            if now >= until:
                return False
            time.sleep(sleep)
            sleep = min(2 * sleep, _LONGEST_SLEEP)

    def _lose(self, why: str) -> ContextLost:
        message = f"the device did not pass its probe: {why}"
        self._device.lose(message)
        return ContextLost(message)
