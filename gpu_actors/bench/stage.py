"""Opens a device for a suite, measures its ceilings and runs the suite."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, TypeAlias

from gpu_actors.bench.arrays import HostArrays
from gpu_actors.bench.cases import Case, Kind, backward_cases, decode_cases, forward_cases
from gpu_actors.bench.ceilings import Ceilings, measure_ceilings, measure_host_copy
from gpu_actors.bench.peers import peers_for
from gpu_actors.bench.recorder import RecordingContext
from gpu_actors.bench.report import figures, gpu_record
from gpu_actors.bench.suite import Row, Settings, Stage, run_cases
from gpu_actors.bench.timing import CudaClock, HostClock, Plan
from gpu_actors.devices.cuda import CudaDevice, cuda_usable
from gpu_actors.devices.forwarding import ForwardingDevice
from gpu_actors.devices.select import check_device
from gpu_actors.errors import GpuActorsError, InvalidRequest
from gpu_actors.options import ContextOptions

__all__ = ["Keep", "Opened", "backward", "cuda_index", "decode", "forward", "open_stage", "run_suite"]

Keep: TypeAlias = Callable[[dict[str, Any]], None]

_ROTATED = 4  # the operands are this many times as large as the L2
_FEW = Settings(plan=Plan(warmup=1, repeats=3, turns=1), most_sets=1, requests=1, in_flight=1)
"""The settings of a device on the host. Its times say nothing about a GPU, so few are enough."""


def run_suite(
    kind: Kind,
    cases: Callable[[bool], list[Case]],
    device: str = "auto",
    quick: bool = False,
    minutes: float | None = None,
    keep: Keep | None = None,
) -> dict[str, Any]:
    """The figures of a suite, from `report.figures`.

    device: "auto", "cuda" or "cuda:N".
    quick: only the few most important cases.
    minutes: no further case begins after this time.
    keep: called with the figures before each case, in case the run is interrupted.
    Raises GpuActorsError if there is no GPU, and InvalidRequest for another device.
    """
    index = cuda_index(kind, device)
    with open_stage(f"cuda:{index}", ContextOptions(default_timeout=None)) as (stage, settings, ceilings, gpu):
        settings = replace(settings, minutes=minutes)

        def keep_rows(rows: list[Row]) -> None:
            if keep is not None:
                keep(figures(kind, rows, settings, ceilings, gpu))

        rows = run_cases(cases(quick), stage, settings, peers_for(kind), keep_rows)
    return figures(kind, rows, settings, ceilings, gpu)


forward = partial(run_suite, "forward", forward_cases)
backward = partial(run_suite, "backward", backward_cases)
decode = partial(run_suite, "decode", decode_cases)


class Opened(NamedTuple):
    """A stage, the settings that suit its device, and the properties of the device.

    gpu: the properties of a GPU, empty for a device on the host.
    """

    stage: Stage
    settings: Settings
    ceilings: Ceilings
    gpu: dict[str, Any]


@contextmanager
def open_stage(device: str, options: ContextOptions) -> Iterator[Opened]:
    """Open a context on a device, with everything that `run_cases` needs. device: "cuda:N", "emulated" or "mock"."""
    make = _on_gpu if device.startswith("cuda") else _on_host
    with make(device, options) as opened:
        yield opened


@contextmanager
def _on_gpu(device: str, options: ContextOptions) -> Iterator[Opened]:
    import cupy

    from gpu_actors.bench.arrays import CupyArrays
    from gpu_actors.devices.cuda.stream import CudaStream

    index = int(device.partition(":")[2] or 0)
    opening = RecordingContext(device, options)
    # The context opens first: if the device cannot be used, its error says what to do, and CuPy's does not.
    with opening as context, cupy.cuda.Device(index):
        inner = opening.recorder.inner
        while isinstance(inner, ForwardingDevice):  # a fault plan adds one
            inner = inner.inner
        assert isinstance(inner, CudaDevice)
        stream = inner.open_stream("bench")
        assert isinstance(stream, CudaStream)
        assert stream.handle is not None
        clock = CudaClock(inner, stream)
        arrays = CupyArrays()
        gpu = gpu_record(index)
        ceilings = measure_ceilings(arrays, clock, stream.handle)
        clock.reuse()
        stage = Stage(context, opening.recorder, stream, clock, arrays, stream.handle, clock.reuse)
        yield Opened(stage, Settings(rotate=_ROTATED * gpu["l2_bytes"]), ceilings, gpu)
        clock.close()


@contextmanager
def _on_host(device: str, options: ContextOptions) -> Iterator[Opened]:
    opening = RecordingContext(device, options)
    with opening as context:
        clock = HostClock(opening.recorder.inner.open_stream("bench"))
        stage = Stage(context, opening.recorder, clock, clock, HostArrays())
        yield Opened(stage, _FEW, measure_host_copy(clock), {})


def cuda_index(suite: str, device: str) -> int:
    """The index of the CUDA device that a suite measures. Raises as `run_suite` does."""
    spec = "cuda" if check_device(device) == "auto" else device
    if not spec.startswith("cuda"):
        reason = f"must be cuda or cuda:N: the {suite} suite measures a GPU"
        raise InvalidRequest("device", device, reason)
    index = int(spec.partition(":")[2] or 0)
    obstacle = cuda_usable(index)
    if obstacle is not None:
        raise GpuActorsError(
            f"the {suite} suite measures a GPU, and there is none to be used here: {obstacle}; "
            f"in a clone, python -m benchmarks.model {suite} estimates without one"
        )
    return index
