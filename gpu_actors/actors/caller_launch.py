"""CallerLaunches: launches that the threads of callers make themselves, on their own streams, without the actor."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from gpu_actors.arrays.adopt import on_every_thread
from gpu_actors.arrays.device_array import DeviceArray
from gpu_actors.devices.interface import Launch, Outputs, Series
from gpu_actors.errors import GpuActorsError, InvalidRequest, LaunchError, RequestError, caused
from gpu_actors.fields import describe
from gpu_actors.runtime.cell import ActorCell
from gpu_actors.runtime.completion import as_answer
from gpu_actors.values import show

__all__ = ["CallerLaunches", "stream_of"]


class CallerLaunches:
    """Makes launches one after the other, on the device of an actor. One thread at a time may use it.

    series: the series that the launches belong to.
    """

    def __init__(self, cell: ActorCell) -> None:
        self.series: Series = (cell.stream or cell.open_stream()).series()
        self._cell = cell

    def run(
        self,
        known: Launch | None,
        kept: Mapping[str, Any],
        arrays: Mapping[str, Any],
        stream: Any,
        make: Callable[[], Launch],
    ) -> Outputs:
        """Launch on the calling thread. Returns the outputs: complete in the order of the stream, or on the host.

        known: an earlier launch with the same steps, or None. It is repeated if it was made on these addresses and
        ``out`` is its only output. kept: its arrays besides the caller's, by name. arrays: the caller's by name, with
        ``out`` if it is given. stream: a caller's stream, as in `stream_of`; None: the stream of q. make: returns a new
        launch.
        Raises `InvalidRequest` for arrays that cannot be used where they lie: then nothing was launched. Raises
        `LaunchError`, `ContextLost` and other errors of a launch.
        """
        handle = self._stream_for(arrays["q"], stream)
        device = self._cell.environment.device
        if device.info.kind == "cuda" and not isinstance(arrays["q"], DeviceArray) and not device.is_current():
            # Another device is current on this thread, and stays so. A thread of this package's own launches.
            with ThreadPoolExecutor(1) as pool:
                pool.submit(device.bind_thread).result()
                return pool.submit(self._run, known, kept, arrays, handle, make).result()
        return self._run(known, kept, arrays, handle, make)

    def _run(
        self,
        known: Launch | None,
        kept: Mapping[str, Any],
        arrays: Mapping[str, Any],
        handle: int | None,
        make: Callable[[], Launch],
    ) -> Outputs:
        try:
            if known is not None and "out" in arrays and self.series.repeat(known, kept, arrays, handle):
                return arrays
            event = self.series.add(make(), handle)
            self._cell.completion.wait(event)
            return event.outputs
        except RequestError:
            raise
        except Exception as error:
            raise self._failure(error) from None

    def replay(self, run: Callable[[], object], q: Any, stream: Any) -> None:
        """Upload what captured launches read, and then call ``run``, which enqueues them.

        Raises what the method `run` raises. An error of the function ``run`` becomes an error of a launch.
        """
        handle = self._stream_for(q, stream)
        try:
            self.series.upload(handle)
        except RequestError:
            raise
        except Exception as error:
            raise self._failure(error) from None
        try:
            run()
        except Exception as error:  # whatever its type: part of the graph may be enqueued
            failure = self._failure(error)
            if isinstance(failure, RequestError):
                failure = caused(LaunchError(f"the replay raised {show(error)}"), error)
            raise failure from error

    def _stream_for(self, q: Any, stream: Any) -> int | None:
        """The given stream, or q's. Raises `InvalidRequest`, also if q's device is not current on this thread."""
        device = self._cell.environment.device
        handle = stream_of(stream, device.info.device_name)
        if isinstance(q, DeviceArray):
            if not device.is_current():
                reason = "must be given on a thread whose current device is the array's"
                raise InvalidRequest("q", describe(q), reason)
            handle = q.stream if handle is None else handle
        self.series.keeps = q, stream
        return handle

    def _failure(self, error: Exception) -> GpuActorsError:
        """The error to raise for a failed launch. It also counts as a failed launch of the actor."""
        cell = self._cell
        cell.progress.launch_ended(error)
        return as_answer(error, cell.environment.context_lost, cell.name, "could not launch")


def stream_of(stream: Any, device: str) -> int | None:
    """The handle of a caller's CUDA stream on every thread, or None if none is given. Raises `InvalidRequest`.

    device: "cuda:N", which the stream must belong to, or "cpu".
    """
    if stream is None:
        return None
    handle = getattr(stream, "cuda_stream", getattr(stream, "ptr", stream))
    if type(handle) is not int or not 0 <= handle < 1 << 64:
        raise InvalidRequest("stream", show(stream), "must be an int, or a stream of torch or CuPy")
    index = getattr(stream, "device_id", getattr(getattr(stream, "device", None), "index", None))
    if index not in (None, -1) and device not in ("cpu", f"cuda:{index}"):
        raise InvalidRequest("stream", show(stream), f"must be a stream of {device}, not of cuda:{index}")
    return on_every_thread(handle)
