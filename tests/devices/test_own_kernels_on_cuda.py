"""Kernels of a user's own on a CUDA device over a fake driver, and the same cubins handed to CuPy."""

from __future__ import annotations

import dataclasses
import gc
import struct
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cases.own_kernels import SAXPY
from fakes.cuda import FakeCuda, Geometry
from fakes.memory import FakeMemory
from fakes.service import service
from fakes.tensor import DeviceTensor

import gpu_actors as ga

RESULT_S = 60.0


def saxpy_on_host(memory: FakeMemory, params: Any, geometry: Geometry) -> None:
    assert [len(part) for part in params] == [4, 4, 8, 8]
    n, a, x, y = (struct.unpack(code, part)[0] for code, part in zip(("<i", "<f", "<Q", "<Q"), params, strict=True))
    assert geometry.grid[0] * geometry.block[0] >= n
    if n:
        memory.array(y, (n,), np.float32)[...] += np.float32(a) * memory.array(x, (n,), np.float32)


@pytest.fixture
def cuda() -> FakeCuda:
    return FakeCuda({"saxpy": saxpy_on_host})


def vectors(n: int = 1000) -> tuple[np.ndarray, np.ndarray]:
    return np.arange(n, dtype=np.float32), np.ones(n, np.float32)


@pytest.fixture
def ctx(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> Iterator[ga.GpuContext]:
    with service(cuda, monkeypatch) as made:
        yield made


def test_arrays_go_to_the_device_and_back(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    with service(cuda, monkeypatch) as ctx:
        launched_on_arrays_of_the_host(cuda, ctx)
    gc.collect()
    assert cuda.leaks() == {}


def launched_on_arrays_of_the_host(cuda: FakeCuda, ctx: ga.GpuContext) -> None:
    x, y = vectors()
    kernel = ctx.kernel(SAXPY, "saxpy").result(RESULT_S)
    assert kernel.parameter_bytes == (4, 4, 8, 8)
    with pytest.raises(ga.InvalidRequest, match="must be float32"):
        kernel.launch(4, 256, (1000, 2.0, x.astype(np.float64), y)).result(RESULT_S)
    assert "launch_kernel" not in cuda.calls
    assert kernel.launch(4, 256, (1000, 2.0, x, y), out=()).result(RESULT_S) == {}
    np.testing.assert_array_equal(y, 1)
    assert kernel.launch(4, 256, (1000, 2.0, x, y)).result(RESULT_S)["y"] is y
    np.testing.assert_array_equal(y, 2 * x + 1)
    kernel.launch(4, 256, (1000, 3.0, x, x)).result(RESULT_S)
    np.testing.assert_array_equal(x, 4 * np.arange(1000))
    kernel.launch(1, 32, (0, 3.0, x[:0], y[:0])).result(RESULT_S)


def test_arrays_on_the_device_are_written_where_they_lie(cuda: FakeCuda, ctx: ga.GpuContext) -> None:
    x, y = vectors()
    theirs = [DeviceTensor(cuda, array) for array in (x, y)]
    kernel = ctx.kernel(SAXPY, "saxpy").result(RESULT_S)
    assert kernel.launch(4, 256, (1000, 2.0, *theirs)).result(RESULT_S)["y"] is theirs[1]
    np.testing.assert_array_equal(theirs[1].read(np.float32, (1000,)), 2 * x + 1)


class RawModule:
    """CuPy's RawModule, as far as it is used here."""

    def __init__(self, *, path: str) -> None:
        self.path = Path(path)


def test_cupy_loads_the_same_cubin(ctx: ga.GpuContext, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = ctx.kernel(SAXPY, "saxpy").result(RESULT_S)
    other = ctx.kernel(SAXPY.replace("a * x", "a + x"), "saxpy").result(RESULT_S)
    monkeypatch.setitem(sys.modules, "cupy", types.SimpleNamespace(RawModule=RawModule))
    loaded = [one.raw_module().path for one in (kernel, kernel, other)]
    assert loaded[0] == loaded[1] != loaded[2]
    assert kernel.cubin is not None
    assert loaded[0].read_bytes() == kernel.cubin.data
    assert loaded[0].parent.stat().st_mode & 0o777 == 0o700


def test_cupy_loads_the_cubin_of_a_built_in_variant(ctx: ga.GpuContext, monkeypatch: pytest.MonkeyPatch) -> None:
    q = np.ones((1, 4, 2, 24), np.float32)
    (warmed,) = ctx.nvrtc.warm([ctx.flash_attn.inspect_key(ga.FlashForward(q, q, q))]).result(RESULT_S)
    monkeypatch.setitem(sys.modules, "cupy", types.SimpleNamespace(RawModule=RawModule))
    module = ctx.nvrtc.raw_module(warmed.cubin)
    assert isinstance(module, RawModule)
    assert module.path.read_bytes() == warmed.cubin.data
    other = dataclasses.replace(warmed.cubin, arch="sm_70")
    with pytest.raises(ga.Unsupported) as refusal:
        ctx.nvrtc.raw_module(other)
    assert (refusal.value.field, refusal.value.value, refusal.value.nearest) == ("cubin", "sm_70", warmed.cubin.arch)
