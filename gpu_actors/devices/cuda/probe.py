"""Prober: proof that the device still works, within a time limit."""

from __future__ import annotations

import itertools
import threading
import time

from gpu_actors.clock import Clock
from gpu_actors.devices.cuda.memory import DeviceMemory, MemoryPools
from gpu_actors.errors import ContextLost

__all__ = ["Prober"]

_BYTES = 256
_SHORTEST_SLEEP, _LONGEST_SLEEP = 20e-6, 2e-3


class Prober:
    """Probes a device on its own stream, so that a busy actor does not look like a hung device.

    The constructor may raise CudaFailure.
    """

    def __init__(self, pools: MemoryPools, clock: Clock) -> None:
        self._driver = pools.driver
        self._pools = pools
        self._clock = clock
        self._memory = DeviceMemory(pools, _BYTES)
        self._staging = pools.acquire_staging(_BYTES)
        self._stream = self._driver.api.create_stream()
        self._values = itertools.cycle(range(1, 256))
        self._lock = threading.Lock()
        self._hung = False

    def run(self, timeout: float) -> None:
        """Fill device memory with a new value, copy it back and compare.

        Raises ContextLost if that takes more than ``timeout`` seconds or the value differs.
        """
        driver, api, stream = self._driver, self._driver.api, self._stream
        with self._lock:
            value = next(self._values)
            readback = self._staging.bytes[:_BYTES]
            readback[:] = 0
            event = driver.call(api.create_event)
            driver.call(api.fill, self._memory.addresses[0], value, _BYTES, stream)
            driver.call(api.copy_to_host, self._staging.address, self._memory.addresses[0], _BYTES, stream)
            driver.call(api.record_event, event, stream)
            # The event is polled, because a wait could not be interrupted.
            if not self._wait(event, timeout):
                self._hung = True
                raise self._lose(f"no progress in {timeout:g} s")
            driver.destroy_event(event)
            if not bool((readback == value).all()):
                raise self._lose("memory does not hold what was written to it")

    def close(self) -> bool:
        """Release everything, but nothing if a probe hung or the device is lost: returns False then. Never blocks."""
        with self._lock:
            if self._hung or self._driver.lost:
                return False
            self._driver.api.destroy_stream(self._stream)
            self._pools.release_staging(self._staging)
            self._memory.release()
            return True

    def _wait(self, event: int, timeout: float) -> bool:
        clock = self._clock
        until = clock.now() + timeout
        sleep = _SHORTEST_SLEEP
        while True:
            # The clock is read first: if the process is suspended in between, the event's state is newer than the time.
            now = clock.now()
            if self._driver.call(self._driver.api.event_done, event):
                return True
            if now >= until:
                return False
            time.sleep(sleep)
            sleep = min(2 * sleep, _LONGEST_SLEEP)

    def _lose(self, why: str) -> ContextLost:
        message = f"the device did not pass its probe: {why}"
        self._driver.lose(message)
        return ContextLost(message)
