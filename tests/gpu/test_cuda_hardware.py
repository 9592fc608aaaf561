"""CudaDevice on a GPU: the real driver behaves as the fake driver of other tests does."""

from __future__ import annotations

import struct
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from inside.arrays import adopt, caller_streams, restore
from inside.compiling import Compiler
from inside.cuda import CudaDevice, cuda_usable
from inside.devices import Buffer, Event, Launch, LaunchGeometry, OutputSpec, Step, Stream

from gpu_actors import ContextOptions, Cubin, KernelSource
from gpu_actors.errors import OutOfDeviceMemory

pytestmark = pytest.mark.gpu

SOURCE = r"""
struct Params { const float* x; float* out; long long count; long long spin; };

__device__ void wait(long long cycles) {
    long long start = clock64();
    while (clock64() - start < cycles) {}
}

extern "C" __global__ void twice(const __grid_constant__ Params p) {
    wait(p.spin);
    for (long long i = blockIdx.x * blockDim.x + threadIdx.x; i < p.count; i += gridDim.x * blockDim.x)
        p.out[i] = 2 * p.x[i];
}

extern "C" __global__ void twice_through_shared(const __grid_constant__ Params p) {
    extern __shared__ float block_memory[];
    float* last = block_memory + 100 * 256 - 256;  // the last of 100 KiB
    for (long long i = threadIdx.x; i < p.count; i += blockDim.x) {
        last[threadIdx.x] = p.x[i];
        p.out[i] = 2 * last[threadIdx.x];
    }
}

extern "C" __global__ void stray(const __grid_constant__ Params p) {
    *reinterpret_cast<volatile float*>(16) = 1;
}
"""
SLOW_STORE = r"""
extern "C" __global__ void slow_store(float* x, long long cycles) {
    long long start = clock64();
    while (clock64() - start < cycles) {}
    x[0] = 3;
}
"""
ENTRIES = ("twice", "twice_through_shared", "stray")
LONG = 200_000_000
"""Cycles: about a tenth of a second."""


class Bench:
    def __init__(self) -> None:
        self.device = CudaDevice(0, ContextOptions())
        self.cubin = compiled(self.device.info.arch)
        self.stream = self.device.open_stream("test")

    def launch(
        self,
        x: Any,
        entry: str = "twice",
        spin: int = 0,
        into: Any = None,
        stream: Stream | None = None,
        grid: int = 64,
        shared_bytes: int = 0,
    ) -> Event:
        def pack(buffers: Mapping[str, Buffer]) -> bytes:
            return struct.pack("<QQqq", buffers["x"].address, buffers["out"].address, x.size, spin)

        launch = Launch(
            None,
            {"x": x},
            {"out": OutputSpec(x.shape, "float32", into)},
            lambda inputs: {},
            (Step(self.device.load(self.cubin, entry), LaunchGeometry((grid, 1, 1), (256, 1, 1), shared_bytes), pack),),
        )
        return (stream or self.stream).launch(launch)

    def run(self, x: Any, **how: Any) -> Any:
        event = self.launch(x, **how)
        event.wait()
        return event.outputs["out"]


def compiled(arch: str) -> Cubin:
    return Compiler().compile(KernelSource("hardware.cu", SOURCE, ENTRIES), arch)


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.device.close()


def floats(*shape: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(1).standard_normal(shape).astype(np.float32)


def test_cuda_is_usable_here() -> None:
    assert cuda_usable() is None
    assert "the driver shows" in str(cuda_usable(99))


def test_the_device_describes_itself(bench: Bench) -> None:
    info = bench.device.info
    assert info.kind == "cuda"
    assert info.name.isprintable()
    assert info.memory is not None
    assert info.memory > 1 << 30
    assert info.multiprocessors


@pytest.mark.parametrize("count", [1, 1000, 5_000_000])
def test_host_arrays_make_the_round_trip(bench: Bench, count: int) -> None:
    x = floats(count)
    np.testing.assert_array_equal(bench.run(x), 2 * x)
    into = np.zeros((2, count), np.float32).T[:, 0]
    assert bench.run(x[::-1], into=into) is into
    np.testing.assert_array_equal(into, 2 * x[::-1])


@pytest.mark.hardware("eight launches must be made in a tenth of a second, whatever else a CPU does")
def test_launches_return_before_they_have_run_and_keep_their_staging(bench: Bench) -> None:
    inputs = [floats(1000) + number for number in range(8)]
    events = [bench.launch(x, spin=LONG // 8) for x in inputs]
    assert not events[-1].done()
    for event, x in zip(events, inputs, strict=True):
        event.wait()
        np.testing.assert_array_equal(event.outputs["out"], 2 * x)


@pytest.mark.hardware("a launch must be quicker than half a second, which kernels on a busy CPU may not be")
def test_two_streams_overlap(bench: Bench) -> None:
    other = bench.device.open_stream("other")
    # Page-locking memory may wait for the device, so both streams' blocks are allocated before the measured launches.
    for event in [bench.launch(floats(1000)), bench.launch(floats(1000), stream=other)]:
        event.wait()
    slow = bench.launch(floats(4), spin=5 * LONG, grid=1)
    x = floats(1000)
    np.testing.assert_array_equal(bench.run(x, stream=other), 2 * x)
    assert not slow.done()
    slow.wait()


def test_waiting_leaves_the_interpreter_to_others(bench: Bench) -> None:
    event = bench.launch(floats(4), spin=5 * LONG, grid=1)
    turns, stop = [0], threading.Event()

    def count() -> None:
        while not stop.is_set():
            turns[0] += 1
            time.sleep(0.001)

    thread = threading.Thread(target=count)
    thread.start()
    event.wait()
    stop.set()
    thread.join()
    assert turns[0] > 50


def test_more_than_48_kib_of_shared_memory_is_allowed(bench: Bench) -> None:
    x = floats(1000)
    out = bench.run(x, entry="twice_through_shared", grid=1, shared_bytes=100 << 10)
    np.testing.assert_array_equal(out, 2 * x)


def test_a_probe_passes(bench: Bench) -> None:
    for _ in range(3):
        bench.device.probe()


def test_running_out_of_memory_fails_that_call_alone(bench: Bench) -> None:
    with pytest.raises(OutOfDeviceMemory):
        bench.device.memory.empty((1 << 46,), "float32")
    x = floats(100)
    np.testing.assert_array_equal(bench.run(x), 2 * x)


def test_a_cupy_array_still_being_written_is_waited_for_and_answered_in_kind(bench: Bench) -> None:
    import cupy

    used = cupy.get_default_memory_pool().used_bytes()
    stream = cupy.cuda.Stream(non_blocking=True)
    spin = cupy.RawKernel(SLOW_STORE, "slow_store")
    x = cupy.zeros(4, cupy.float32)
    cupy.cuda.runtime.deviceSynchronize()
    with stream:
        spin((1,), (1,), (x, np.int64(LONG)))
        adopted = adopt(x, "q", caller_streams(0))
    event = bench.launch(adopted.array)
    event.wait()
    result = restore(event.outputs["out"], adopted)
    assert isinstance(result, cupy.ndarray)
    assert result.get().tolist() == [6, 0, 0, 0]
    del event, result, adopted, x
    assert cupy.get_default_memory_pool().used_bytes() == used


def test_a_cupy_bfloat16_array_crosses_dlpack(bench: Bench) -> None:
    import cupy

    x = cupy.ones((2, 3), ml_dtypes.bfloat16)

    class Foreign:
        __dlpack__ = x.__dlpack__
        __dlpack_device__ = x.__dlpack_device__

    adopted = adopt(Foreign(), "q")
    assert (adopted.kind, adopted.device) == ("dlpack", "cuda:0")
    assert (adopted.array.address, adopted.array.dtype) == (x.data.ptr, ml_dtypes.bfloat16)  # type: ignore[union-attr]


def test_a_torch_tensor_on_a_side_stream_is_waited_for_and_answered_in_kind(bench: Bench) -> None:
    torch = pytest.importorskip("torch")
    side = torch.cuda.Stream()
    x = torch.zeros(1 << 20, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(LONG)
        x += 3
        streams = caller_streams(0)
    adopted = adopt(x, "q", streams)
    event = bench.launch(adopted.array)
    event.wait()
    result = restore(event.outputs["out"], adopted)
    assert isinstance(result, torch.Tensor)
    assert bool((result == 6).all())
    out = torch.zeros_like(x)
    assert restore(bench.run(adopted.array, into=adopt(out, "out").array), adopted) is out
    assert bool((out == 6).all())


def test_closing_gives_the_memory_back(bench: Bench) -> None:
    pool = bench.device.driver.api._pool  # type: ignore[attr-defined]
    bench.run(floats(1_000_000))
    assert pool.total_bytes() > 0
    bench.device.close()
    assert pool.total_bytes() == 0


def in_a_process(body: str) -> subprocess.CompletedProcess[str]:
    """Run the body in a child process, which may lose its CUDA context."""
    here = Path(__file__).resolve().parent
    script = f"import sys; sys.path[:0] = {[str(here), str(here.parent / 'lib')]!r}\n"
    script += "import time\nfrom test_cuda_hardware import *\nfrom gpu_actors.errors import *\nbench = Bench()\n"
    script += textwrap.dedent(body)
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=110)


def test_an_illegal_address_loses_the_context_for_good() -> None:
    ended = in_a_process(
        """
        from fakes.bench import losses
        stray = lambda: bench.launch(floats(4), entry="stray")
        lost = losses(stray, lambda: bench.launch(floats(4)), bench.device.probe)
        print(*lost, *("IllegalAddress" in words for words in lost.values()))
        bench.device.close()
        """
    )
    assert sorted(ended.stdout.split()) == sorted(["stray", "behind", "launch", "probe", *["True"] * 4]), ended.stderr


@pytest.mark.hardware("closing must take less than half a second, whatever else a CPU does")
def test_closing_over_a_launch_that_does_not_end_returns_at_once() -> None:
    ended = in_a_process(
        """
        event = bench.launch(floats(4), spin=30 * LONG, grid=1)
        start = time.monotonic()
        bench.device.close()
        print(time.monotonic() - start < 0.5)
        try:
            event.wait()
        except ActorStopped:
            print("stopped")
        """
    )
    assert ended.stdout.split() == ["True", "stopped"], ended.stderr


def test_a_device_can_be_opened_again() -> None:
    for _ in range(3):
        made = Bench()
        made.run(floats(10))
        made.device.close()
