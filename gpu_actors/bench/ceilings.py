"""The GPU's ceilings, measured in the same run: a large matrix product and a large copy on the device."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from gpu_actors.bench.arrays import CupyArrays
from gpu_actors.bench.timing import Call, EventClock, Plan, measure_in_turns

__all__ = ["REPEATS", "Ceilings", "measure_ceilings", "measure_host_copy"]

_SIDE = 8192
_COPY, _HOST_COPY = 1 << 30, 1 << 24
REPEATS = 12
"""The number of calls per ceiling. The median time counts."""
_PLAN = Plan(warmup=2, repeats=REPEATS, turns=3)


@dataclass(frozen=True, slots=True)
class Ceilings:
    """The ceilings of one run. A ceiling that could not be measured is None.

    matmul: TFLOP/s of an 8192^3 product on random data, in the dtype and by the library that `how` names.
    copy: GB/s. Bytes read and bytes written both count.
    how: how they were measured, or why they were not.
    """

    matmul: float | None = None
    copy: float | None = None
    how: str = "not measured"


def measure_ceilings(arrays: CupyArrays, clock: EventClock, handle: int) -> Ceilings:
    """Measure the ceilings of a GPU. handle: the handle of the clock's stream."""
    notes: list[str] = []
    copy = _median(functools.partial(_copy, arrays, handle), clock, notes)
    matmul = None
    for name, product in (("torch", _torch_matmul), ("cupy", _cupy_matmul)):
        if importlib.util.find_spec(name) is None:
            notes.append(f"{name} is not installed")
            continue
        matmul = _median(functools.partial(product, arrays, handle), clock, notes)
        if matmul is not None:
            notes.append(f"matmul by {name}, {'bfloat16' if name == 'torch' else 'float16'}")
            break
    arrays.trim()
    return Ceilings(
        None if matmul is None else 2 * _SIDE**3 / matmul / 1e9,
        None if copy is None else 2 * _COPY / copy / 1e6,
        "; ".join(notes),
    )


def measure_host_copy(clock: EventClock) -> Ceilings:
    """Measure the ceiling of a copy in the host's memory, for devices that run on the host."""
    source, target = np.ones(_HOST_COPY, np.uint8), np.zeros(_HOST_COPY, np.uint8)
    milliseconds = _median(lambda: functools.partial(np.copyto, target, source), clock, [])
    return Ceilings(None, None if milliseconds is None else 2 * _HOST_COPY / milliseconds / 1e6, "on the host")


def _median(make: Callable[[], Call], clock: EventClock, notes: list[str]) -> float | None:
    try:
        timing = measure_in_turns({"": [make()]}, clock, _PLAN)[""]
    except Exception as error:  # an installed library may be broken
        notes.append(f"{type(error).__name__}: {error}")
        return None
    if timing.times is None:
        notes.append(timing.error or "")
        return None
    return timing.times.median


def _copy(arrays: CupyArrays, handle: int) -> Call:
    from cupy.cuda import runtime

    source, target = (arrays.random((_COPY // 2,), "float16") for _ in range(2))
    arrays.ready()

    def copy() -> None:
        runtime.memcpyAsync(target.data.ptr, source.data.ptr, _COPY, runtime.memcpyDeviceToDevice, handle)

    return copy


def _torch_matmul(arrays: CupyArrays, handle: int) -> Call:
    import ml_dtypes
    import torch

    a, b = (arrays.random((_SIDE, _SIDE), "bfloat16") for _ in range(2))
    assert a.dtype == ml_dtypes.bfloat16
    tensors = [torch.from_dlpack(x.view(np.int16)).view(torch.bfloat16) for x in (a, b)]
    out = torch.empty_like(tensors[0])
    stream = torch.cuda.ExternalStream(handle)
    arrays.ready()

    def product() -> Any:
        with torch.cuda.stream(stream):
            return torch.matmul(*tensors, out=out)

    return product


def _cupy_matmul(arrays: CupyArrays, handle: int) -> Call:
    import cupy

    a, b = (arrays.random((_SIDE, _SIDE), "float16") for _ in range(2))
    out = cupy.empty_like(a)
    stream = cupy.cuda.ExternalStream(handle)
    arrays.ready()

    def product() -> Any:
        with stream:
            return cupy.matmul(a, b, out=out)

    return product
