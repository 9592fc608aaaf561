"""A user's own kernels on a GPU: launched by the service, and by CuPy on the program's stream."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import gpu_actors as ga

pytestmark = pytest.mark.gpu

SOURCE = """
struct Line { float slope; int n; };
extern "C" __global__ void line(const __grid_constant__ Line line, const float* x, float* y) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < line.n) y[i] += line.slope * x[i];
}
"""
LINE = np.dtype([("slope", "f4"), ("n", "i4")])
N = 100_000


def vectors() -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    return np.arange(N, dtype=np.float32), np.ones(N, np.float32)


def test_arrays_of_the_host_are_written_in_place(context: Any) -> None:
    x, y = vectors()
    kernel = context.kernel(SOURCE, "line").result(120)
    assert kernel.parameter_bytes == (8, 8, 8)
    for _ in range(3):
        kernel.launch(-(-N // 256), 256, (np.array((2.0, N), LINE), x, y)).result(120)
    np.testing.assert_array_equal(y, 6 * x + 1)


def test_arrays_on_the_device_are_written_where_they_lie(context: Any) -> None:
    cupy = pytest.importorskip("cupy")
    x, y = (cupy.asarray(array) for array in vectors())
    kernel = context.kernel(SOURCE, "line").result(120)
    answer = kernel.launch(-(-N // 256), 256, (np.array((2.0, N), LINE), x, y)).result(120)
    assert answer["y"] is y
    np.testing.assert_array_equal(y.get(), 2 * x.get() + 1)


def test_a_launch_that_no_gpu_makes_is_a_typed_error(context: Any) -> None:
    source = 'extern "C" __global__ void wide() { __shared__ volatile char all[40000]; all[threadIdx.x] = 1; }'
    kernel = context.kernel(source, "wide").result(120)
    with pytest.raises(ga.LaunchError):
        kernel.launch(1, 32, shared_bytes=220_000).result(120)
    test_arrays_of_the_host_are_written_in_place(context)


def test_cupy_inspects_the_cubin_of_a_built_in_variant(context: Any) -> None:
    pytest.importorskip("cupy")
    q = np.ones((1, 64, 2, 64), np.float16)
    (warmed,) = context.nvrtc.warm([context.flash_attn.inspect_key(ga.FlashForward(q, q, q))]).result(120)
    (entry,) = warmed.cubin.entry_points
    function = context.nvrtc.raw_module(warmed.cubin).get_function(entry)
    assert function.name == entry
    assert function.max_threads_per_block >= 128
    resources = warmed.cubin.resources[entry]
    assert (function.num_regs, function.shared_size_bytes) == (resources.registers, resources.shared_bytes)


def test_cupy_launches_the_same_cubin_on_a_stream_of_its_own(context: Any) -> None:
    cupy = pytest.importorskip("cupy")
    kernel = context.kernel(SOURCE, "line").result(120)
    raw = kernel.raw_module().get_function("line")
    x, y = (cupy.asarray(array) for array in vectors())
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.get_current_stream().synchronize()
    with stream:
        raw((-(-N // 256),), (256,), (np.array([(2.0, N)], LINE), x, y))
    stream.synchronize()
    np.testing.assert_array_equal(y.get(), 2 * x.get() + 1)
