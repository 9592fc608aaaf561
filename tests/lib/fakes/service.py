"""A context on a CUDA device over a fake driver, and a forward kernel that reads the packed parameters."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from fakes.cuda import FakeCuda, Geometry
from fakes.memory import FakeMemory
from inside.cuda import CudaDevice
from inside.kernels import forward_layout
from support.structs import fields_of

import gpu_actors as ga
from gpu_actors.reference import attention_forward

# With a head dim that only forward_simple takes.
SHAPE = (2, 24, 4, 12)
KV_SHAPE = (2, 40, 2, 12)


def forward_on_host(memory: FakeMemory, params: bytes, geometry: Geometry) -> None:
    """forward_simple for bf16 of the shapes above. It finds its operands through the packed parameters alone."""
    fields = fields_of(params, forward_layout())
    bf16 = np.dtype(ml_dtypes.bfloat16)

    def operand(name: str, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
        steps = [int(fields[f"{name}_strides.{axis}"]) for axis in ("batch", "row", "head")]
        reach = sum((extent - 1) * step for extent, step in zip(shape, (*steps, 1), strict=True)) + 1
        flat = memory.at(int(fields[name]), reach * 2)
        return np.ndarray(shape, bf16, flat, 0, [2 * step for step in (*steps, 1)])

    q, k, v = operand("q", SHAPE), operand("k", KV_SHAPE), operand("v", KV_SHAPE)
    result = attention_forward(q, k, v, softmax_scale=float(fields["softmax_scale"]))
    operand("out", SHAPE)[...] = result.out.astype(bf16)


@contextmanager
def service(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, **options: Any) -> Iterator[ga.GpuContext]:
    monkeypatch.setattr("gpu_actors.context.open_device", lambda spec, given: CudaDevice(0, given, api=cuda))
    # CuPy, once NVRTC has been loaded through it, would call the driver, which is missing.
    monkeypatch.setattr("gpu_actors.devices.cuda.device.caller_streams", lambda index: None)
    # The kernel is right for the shapes above alone, so experiments would fail.
    with ga.open_context("cuda", ga.ContextOptions(**{"qualify": "off", **options})) as ctx:
        yield ctx


def operands() -> tuple[np.ndarray[Any, Any], ...]:
    rng = np.random.default_rng(7)
    return tuple(rng.standard_normal(shape).astype(ml_dtypes.bfloat16) for shape in (SHAPE, KV_SHAPE, KV_SHAPE))
