"""A GPU suite from its device to its JSON, over a fake driver and a fake CuPy in place of a GPU machine's."""

from __future__ import annotations

import ctypes
import functools
import json
import math
import struct
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from fakes.cuda import FakeCuda, Geometry
from fakes.cupy import fake_cupy
from fakes.memory import FakeMemory
from inside.compiling import load_nvrtc
from inside.cuda import CudaDevice
from inside.kernels import forward_layout
from support.structs import fields_of

from gpu_actors.bench import arrays, ceilings, report, stage
from gpu_actors.bench.cases import Case
from gpu_actors.bench.suite import KERNEL, SERVICE
from gpu_actors.reference import attention_forward

CASE = Case(batch=2, rows=80, keys=80, heads=4, kv_heads=2, head_dim=64, causal=True)
MILLISECONDS = 4.0


@pytest.fixture
def wrong() -> list[bool]:
    return [False]


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch, wrong: list[bool]) -> FakeCuda:
    load_nvrtc()  # before a fake replaces CuPy

    def attend(memory: FakeMemory, params: bytes, geometry: Geometry) -> None:
        fields = fields_of(params, forward_layout())

        def operand(name: str, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
            return memory.at(int(fields[name]), 2 * math.prod(shape)).view(ml_dtypes.bfloat16).reshape(shape)

        q, k, v = (operand(n, s) for n, s in (("q", CASE.q_shape), ("k", CASE.kv_shape), ("v", CASE.kv_shape)))
        out = operand("out", CASE.q_shape)
        out[...] = attention_forward(q, k, v, causal=True).out.astype(out.dtype)
        if wrong[0]:
            out[0, 0, 0, 0] += 1
        runtime.now += MILLISECONDS

    def hold(memory: FakeMemory, params: bytes, geometry: Geometry) -> None:
        address, _ = struct.unpack("<Qq", params)
        assert ctypes.c_int32.from_address(address).value == 1, "the stream went on before everything was enqueued"

    driver = FakeCuda({"forward_mma": attend, "hold": hold}, capability=80)
    module, inner = fake_cupy(driver)
    runtime: Any = inner.runtime
    monkeypatch.setitem(sys.modules, "cupy", module)
    monkeypatch.setitem(sys.modules, "cupy.cuda", inner)
    monkeypatch.setitem(sys.modules, "torch", None)  # type: ignore[arg-type]
    monkeypatch.setattr("gpu_actors.context.open_device", lambda spec, given: CudaDevice(0, given, api=driver))
    monkeypatch.setattr(stage, "cuda_usable", lambda index: None)
    monkeypatch.setattr(arrays, "_POOL", 1009)
    monkeypatch.setattr(ceilings, "_COPY", 1 << 12)
    monkeypatch.setattr(ceilings, "_SIDE", 16)
    monkeypatch.setattr(stage, "forward", functools.partial(stage.run_suite, "forward", lambda quick: [CASE]))
    monkeypatch.setattr(stage, "peers_for", lambda kind: [])
    # The fake driver answers only this case, not the problems that qualify a kernel.
    monkeypatch.setattr(stage, "ContextOptions", functools.partial(stage.ContextOptions, qualify="off"))
    return driver


def test_a_suite_runs_from_its_device_to_its_json(cuda: FakeCuda) -> None:
    result = stage.forward(quick=True)
    assert json.loads(json.dumps(result, allow_nan=False)) == result
    kernel, service = result["rows"]
    assert (kernel["subject"], service["subject"]) == (KERNEL, SERVICE)
    assert (kernel["status"], service["status"]) == ("timed", "timed"), (kernel["reason"], service["reason"])
    assert kernel["kernels"] == ["forward_mma"]
    assert kernel["times_ms"]["median"] == kernel["times_ms"]["p90"] == MILLISECONDS
    assert kernel["back_to_back"]
    assert result["ceilings"]["copy"] == pytest.approx(2 * (1 << 12) / 0.5 / 1e6)
    assert "cupy, float16" in result["ceilings"]["how"]
    assert result["gpu"]["name"] == "Fake"
    assert result["settings"]["rotate"] == 4 << 12
    assert list(report.table(result))
    assert {name: count for name, count in cuda.leaks().items() if name != "blocks"} == {}


def test_a_wrong_kernel_on_a_device_is_not_timed(cuda: FakeCuda, wrong: list[bool]) -> None:
    wrong[0] = True
    (row,) = stage.forward()["rows"]
    assert (row["status"], row["times_ms"]) == ("wrong", None)
    assert "out is wrong" in row["reason"]


def test_random_arrays_repeat_no_row_and_poison_is_everywhere(cuda: FakeCuda, tmp_path: Path) -> None:
    pool = arrays.CupyArrays()
    x = pool.host(pool.random((40, 64), "float32"))
    assert len({row.tobytes() for row in x}) == 40
    assert abs(float(x.mean())) < 0.2
    assert 0.8 < float(x.std()) < 1.2
    for dtype in ("bfloat16", "float16", "float32", "float8_e4m3fn"):
        poison = pool.host(pool.poisoned((3, 5), dtype))
        assert poison.dtype.name == dtype
        assert np.isnan(poison.astype(np.float32)).all()
        assert pool.host(pool.random((3, 5), dtype)).dtype.name == dtype
