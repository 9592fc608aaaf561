"""Opens a CUDA device for a GPU suite, measures its ceilings and runs the suite."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from gpu_actors.bench.cases import Case, Kind
from gpu_actors.bench.peers import peers_for
from gpu_actors.bench.recorder import RecordingContext
from gpu_actors.bench.report import figures, gpu_record
from gpu_actors.bench.suite import Row, Settings, Stage, run_cases
from gpu_actors.devices.cuda import CudaDevice, cuda_usable
from gpu_actors.devices.select import check_device
from gpu_actors.errors import GpuActorsError, InvalidRequest
from gpu_actors.options import ContextOptions

__all__ = ["Keep", "cuda_index", "run_suite"]

Keep: TypeAlias = Callable[[dict[str, Any]], None]

_ROTATED = 4  # times the L2


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
    minutes: no case is begun after so many.
    keep: called with the figures before each case, in case the run is interrupted.
    Raises GpuActorsError, in a sentence, if there is no GPU, and InvalidRequest for another device.
    """
    index = cuda_index(kind, device)
    import cupy

    from gpu_actors.bench.arrays import CupyArrays
    from gpu_actors.bench.ceilings import measure_ceilings
    from gpu_actors.bench.clock import CudaClock
    from gpu_actors.devices.cuda.stream import CudaStream

    opening = RecordingContext(f"cuda:{index}", ContextOptions(default_timeout=None, qualify="off"))
    with cupy.cuda.Device(index), opening as context:
        inner = opening.recorder.inner
        assert isinstance(inner, CudaDevice)
        stream = inner.open_stream("bench")
        assert isinstance(stream, CudaStream)
        assert stream.handle is not None
        clock = CudaClock(inner, stream)
        arrays = CupyArrays()
        gpu = gpu_record(index)
        ceilings = measure_ceilings(arrays, clock, stream.handle)
        clock.reuse()
        settings = Settings(rotate=_ROTATED * gpu["l2_bytes"], minutes=minutes)
        stage = Stage(context, opening.recorder, stream, clock, arrays, stream.handle, clock.reuse)

        def keep_rows(rows: list[Row]) -> None:
            if keep is not None:
                keep(figures(kind, rows, settings, ceilings, gpu))

        rows = run_cases(cases(quick), stage, settings, peers_for(kind), keep_rows)
        clock.close()
    return figures(kind, rows, settings, ceilings, gpu)


def cuda_index(suite: str, device: str) -> int:
    """The CUDA device that a suite measures. Raises as `run_suite` does."""
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
