"""The base of devices that compute on the host: an in-order stream with its own thread, and events."""

from __future__ import annotations

import logging
import queue
import threading
from abc import abstractmethod
from typing import Any

import numpy as np

from gpu_actors.arrays.adopt import dtype_of
from gpu_actors.devices.interface import Event, Launch, Outputs, Stream
from gpu_actors.errors import ActorStopped, GpuActorsError, LaunchError, OutOfDeviceMemory, caused

__all__ = ["HostEvent", "HostStream", "host_array", "host_outputs"]

logger: logging.Logger = logging.getLogger("gpu_actors")


class HostEvent(Event):
    """The end of a launch that a host thread runs. The first `succeed` or `fail` counts; later ones do nothing."""

    def __init__(self) -> None:
        self.outputs: Outputs = {}
        self._error: BaseException | None = None
        self._lock = threading.Lock()
        self._done = threading.Event()

    def succeed(self, outputs: Outputs) -> None:
        with self._lock:
            if not self._done.is_set():
                self.outputs = outputs
                self._done.set()

    def fail(self, error: BaseException) -> None:
        with self._lock:
            if not self._done.is_set():
                self._error = error
                self._done.set()

    def done(self) -> bool:
        return self._done.is_set()

    def wait(self) -> None:
        error = self.failure()
        if error is not None:
            raise error

    def failure(self) -> BaseException | None:
        self._done.wait()
        return self._error


class HostStream(Stream):
    """An in-order queue of launches that one thread of the host runs. Subclasses implement `run`."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._work: queue.SimpleQueue[tuple[Launch, HostEvent] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._lock = threading.Lock()
        self._current: HostEvent | None = None

    @abstractmethod
    def run(self, launch: Launch) -> Outputs:
        """Compute the launch's outputs on the stream's thread."""

    def launch(self, launch: Launch) -> Event:
        event = HostEvent()
        with self._lock:
            if self._closed:
                raise self._stopped()
            if self._thread is None:
                thread = threading.Thread(target=self._loop, name=f"{self._name}-stream", daemon=True)
                thread.start()  # may raise: the next launch tries again
                self._thread = thread
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
            self._work_on(*item)
            # A thread that waits for work must not keep the last launch's arrays alive.
            del item

    def _work_on(self, launch: Launch, event: HostEvent) -> None:
        with self._lock:
            closed = self._closed
            self._current = event
        if closed:
            event.fail(self._stopped())
            return
        try:
            event.succeed(self.run(launch))
        except GpuActorsError as error:
            event.fail(error)
        except BaseException as error:
            logger.exception("%s: a launch raised", self._name)
            # The traceback has been logged. It would keep the launch's arrays alive through this frame.
            failure = LaunchError(f"{self._name}: the launch raised {error!r}")
            event.fail(caused(failure, error.with_traceback(None)))
        self._current = None

    def _stopped(self) -> ActorStopped:
        return ActorStopped(f"the stream of {self._name} was closed before the launch had finished")


def host_array(shape: tuple[int, ...], dtype: str, zero: bool) -> Any:
    """Host memory for `Device.allocate`. Without ``zero`` every byte is 0xFF, a NaN in every floating-point format."""
    try:
        array = np.empty(shape, dtype_of(dtype))
    except MemoryError as error:
        raise OutOfDeviceMemory(f"{dtype}{list(shape)} does not fit into the host's memory") from error
    array.reshape(-1).view(np.uint8)[...] = 0 if zero else 0xFF
    return array


def host_outputs(launch: Launch, results: Outputs) -> Outputs:
    """Return the results rounded to the outputs' dtypes, in the caller's arrays where an output gives one."""
    outputs: dict[str, Any] = {}
    # A result beyond the dtype's range becomes infinite without a warning, as on a GPU.
    with np.errstate(over="ignore", invalid="ignore"):
        for name, spec in launch.outputs.items():
            rounded = results[name].astype(spec.dtype)
            if spec.into is not None:
                spec.into[...] = rounded
                rounded = spec.into
            outputs[name] = rounded
    return outputs
