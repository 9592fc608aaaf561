"""PreparedAttention: a request that was checked, planned and compiled once, and that any thread launches at once.

    Prepare ──check, plan, compile, upload──> PreparedAttention ──run(q, k, v) ──> kernels on the caller's stream

FlashInfer calls these steps plan and run (arXiv 2501.01005, section 3.4). Here the arrays are the caller's own.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gpu_actors.actors.caller_launch import CallerLaunches
from gpu_actors.arrays.device_array import DeviceArray
from gpu_actors.arrays.layout import ArrayLayout, contiguous, read_arrays
from gpu_actors.attention.requests import Array, AttentionOutput, FlashForward, PagedForward
from gpu_actors.devices.interface import Event, Launch
from gpu_actors.fields import describe, expect
from gpu_actors.kernels.forward_sm90 import TMA_ALIGNMENT
from gpu_actors.planning.forward import attention_output
from gpu_actors.process import Local
from gpu_actors.runtime.cell import ActorCell
from gpu_actors.validation.overlap import check_output_memory
from gpu_actors.values import brief

__all__ = ["Prepare", "PreparedAttention"]


@dataclass(slots=True, eq=False)
class Prepare:
    """Check, plan and compile a request, to launch it many times. `FlashAttnHandle.prepare` sends it."""

    __repr__ = brief

    request: FlashForward | PagedForward


class PreparedAttention(Local):
    """A request that is ready to be launched again and again, as `FlashAttnHandle.prepare` returns it.

    Any thread may call `run`; the runs follow each other. Between runs, q, the keys and values, and ``out`` may change
    their contents and their places. The request's other arrays on the device, such as ``cache_seqlens`` and
    ``block_table``, may change their contents: each run reads them where they lie. Shapes, strides, dtypes and options
    may not change. The request's other arrays on the host are copied when it is prepared.
    """

    def __init__(
        self, cell: ActorCell, request: FlashForward | PagedForward, launch: Launch, out: Array | None
    ) -> None:
        """request: the adopted request. launch: its launch on its own arrays. out: ``out`` as the caller gave it.

        Raises `InvalidRequest` for keys and values that do not lie where q does.
        """
        paged = isinstance(request, PagedForward)
        names = ("k_cache", "v_cache") if paged else ("k", "v")
        self._names = names
        # The request's arrays are complete before the reply is, so runs need not wait for the streams of these arrays.
        inputs = {
            name: dataclasses.replace(array, stream=None)
            if isinstance(array, DeviceArray)
            else array
            if name in ("q", *names)
            else array.copy()
            for name, array in launch.inputs.items()
        }
        self._out = out
        self._first = dataclasses.replace(launch, inputs=inputs)
        self._cell = cell
        self._launches = CallerLaunches(cell)
        self._lock = threading.Lock()
        self._kept = {name: array for name, array in inputs.items() if isinstance(array, DeviceArray)}
        self._device_name = cell.environment.device.info.device_name
        device = request.q.device if isinstance(request.q, DeviceArray) else None
        spec = launch.outputs["out"]
        given: dict[str, Any] = {"q": request.q} | {name: getattr(request, name) for name in names}
        for name in names:
            alike = given[name] is None or isinstance(given[name], DeviceArray) == isinstance(request.q, DeviceArray)
            expect(alike, name, describe(given[name]), "must lie where q does, on the device or on the host")
        given["out"] = contiguous(spec.shape, spec.dtype, device) if request.out is None else request.out
        self._layouts = {
            name: ArrayLayout.of(array, TMA_ALIGNMENT) for name, array in given.items() if array is not None
        }
        self._launches.series.ready(launch)

    def __repr__(self) -> str:
        key = self._first.key
        return f"<PreparedAttention {key if key is None else key.kernel}>"

    def __del__(self) -> None:
        if hasattr(self, "_launches"):
            self._launches.series.drop()

    def ready(self) -> Event:
        """Return the event for the end of the uploads that `run` needs."""
        return self._launches.series.mark()

    def run(
        self, q: Array, k: Array | None = None, v: Array | None = None, *, out: Array | None = None, stream: Any = None
    ) -> AttentionOutput:
        """Launch on the calling thread, and return the output at once.

        q: shaped like the request's q. k, v: replace the request's k and v, or its k_cache and v_cache; None: the
        request's own. out: where the output goes; None: the request's own, or a new array. stream: a CUDA stream as an
        int, or torch's or CuPy's object. Default: the stream of q, which is its library's current stream. The output is
        complete in the order of that stream. With arrays on the host this call waits, and the output is complete when
        it returns. Write the arrays of the request in the order of the stream too.
        If the caller captures the stream, the capture records the launch. It needs ``out``. Keep this object as long as
        the graph. Replays of the graph use the memory of the runs: replay and run on one stream, or order the streams.
        Raises `InvalidRequest` for arrays that differ from those prepared, and `LaunchError`, `ContextLost`,
        `ActorStopped` and other errors of a launch.
        """
        out = self._out if out is None else out
        given = {"q": q, self._names[0]: k, self._names[1]: v, "out": out}
        arrays = {name: array for name, array in given.items() if array is not None}
        with self._lock:
            read, template = read_arrays(self._layouts, arrays, self._device_name, "this prepared request")
            make = functools.partial(self._launch, read)
            outputs = self._launches.run(self._first, self._kept, read, stream, make)
        (answer,) = attention_output(template, out, outputs)
        return answer

    def _launch(self, arrays: Mapping[str, Any]) -> Launch:
        """The launch on a caller's arrays. Raises `InvalidRequest` if ``out`` overlaps one, or cannot be written."""
        first = self._first
        inputs = {name: arrays.get(name, array) for name, array in first.inputs.items()}
        out = arrays.get("out")
        if out is not None:
            check_output_memory(out, inputs)
        outputs = {**first.outputs, "out": first.outputs["out"]._replace(into=out)}
        return dataclasses.replace(first, inputs=inputs, outputs=outputs)
