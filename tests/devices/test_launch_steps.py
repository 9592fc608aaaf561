"""Launches of several kernels: their order, scratch, outputs that are added to, arrays changed in place."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest
from emulated.memory import host_view
from fakes.bench import IMAGE, KERNELS, Bench, pack, views
from fakes.cuda import FakeCuda, Geometry
from fakes.memory import FakeMemory
from inside.compiling import asset_headers

from gpu_actors import ContextOptions, Cubin, EmulationOptions, KernelSource, MockOptions
from gpu_actors.devices.cuda import CudaDevice
from gpu_actors.devices.emulation.emulated_api import EmulatedApi
from gpu_actors.devices.host import host_array
from gpu_actors.devices.interface import Buffer, Event, Kernel, Launch, LaunchGeometry, OutputSpec, ScratchSpec, Step
from gpu_actors.devices.mock import MockDevice
from gpu_actors.errors import InvalidRequest, LaunchError, OutOfDeviceMemory
from gpu_actors.testing import MockClock

# The first kernel doubles x into scratch; the second adds the scratch to the output and to the pool, both through a
# table of their addresses.
SOURCE = """
#include "ptx/types.cuh"
struct Params { const float* x; float* middle; float** table; int count; };
extern "C" __global__ void twice(const __grid_constant__ Params p) {
  if (threadIdx.x < p.count) p.middle[threadIdx.x] = 2 * p.x[threadIdx.x];
}
extern "C" __global__ void add(const __grid_constant__ Params p) {
  for (int i = 0; i < 2; i++)
    if (threadIdx.x < p.count) p.table[i][threadIdx.x] += p.middle[threadIdx.x];
}
"""


def pack_params(buffers: Mapping[str, Buffer]) -> bytes:
    addresses = (buffers[name].address for name in ("x", "middle", "table"))
    return struct.pack("<3Qi4x", *addresses, buffers["x"].shape[0])


def table(buffers: Mapping[str, Buffer]) -> bytes:
    return struct.pack("<2Q", buffers["out"].address, buffers["pool"].address)


def launch(kernels: list[Kernel], x: Any, pool: Any, pack: Any = pack) -> Launch:
    geometry = LaunchGeometry((1, 1, 1), (32, 1, 1), 0)
    return Launch(
        None,
        {"x": x, "pool": pool},
        {"out": OutputSpec(x.shape, "float32", zero=True)},
        lambda inputs: {},
        tuple(Step(kernel, geometry, pack) for kernel in kernels),
        {"middle": ScratchSpec(x.shape, "float32"), "table": ScratchSpec((2,), "uint64", contents=table)},
        ("pool",),
    )


@pytest.fixture
def emulated() -> Iterator[CudaDevice]:
    options = ContextOptions()
    device = CudaDevice(0, options, EmulatedApi("sm_80", EmulationOptions(), options))
    yield device
    device.close()


X = np.arange(1, 21, dtype=np.float32)


def test_steps_run_in_order_over_shared_scratch_and_change_arrays_in_place(emulated: CudaDevice) -> None:
    headers = asset_headers(SOURCE)
    kernels = [emulated.build(KernelSource("steps", SOURCE, (name,), headers), "sm_80") for name in ("twice", "add")]

    def run(kernels: list[Kernel], pool: Any) -> Any:
        event = emulated.open_stream("test").launch(launch(kernels, X, pool, pack_params))
        event.wait()
        return event.outputs["out"]

    memory, own = emulated.allocate((3, 20), "float32", zero=True), np.ones(20, np.float32)
    for pool in (memory[1], memory[1], own):
        assert (run(kernels, pool) == 2 * X).all()
    assert (host_view(memory)[1] == 4 * X).all()
    assert not host_view(memory)[::2].any()
    assert (own == 1 + 2 * X).all()
    # In the reverse order `add` finds poison in the scratch.
    assert not np.array_equal(run(kernels[::-1], memory[0]), 2 * X)


@pytest.mark.parametrize("kind", ["mock", "emulated", "cuda"])
def test_allocated_memory_is_cleared_or_poisoned(kind: str, emulated: CudaDevice) -> None:
    bench = Bench()
    devices = {"mock": MockDevice("sm_80", MockOptions(), MockClock()), "emulated": emulated, "cuda": bench.device}
    for dtype in ("float32", "bfloat16", "float8_e4m3fn", "int32"):
        cleared, fresh = (devices[kind].allocate((2, 3), dtype, zero) for zero in (True, False))
        assert (cleared.shape, cleared.dtype.name, fresh.dtype.name) == ((2, 3), dtype, dtype)
        if kind == "cuda":
            assert not bench.cuda.memory.at(cleared.address, cleared.nbytes).any()
        else:
            assert not host_view(cleared).view(np.uint8).any()
            assert (host_view(fresh).view(np.uint8) == 0xFF).all()
    assert not bench.cuda.open_streams[1:]  # the clearing's own stream is gone


def test_host_array_names_what_does_not_fit() -> None:
    with pytest.raises(OutOfDeviceMemory, match="float64"):
        host_array((1 << 50,), "float64", zero=True)


# On the fake driver


def twice(memory: FakeMemory, params: bytes, geometry: Geometry) -> None:
    operands = views(memory, params)
    operands["middle"][...] = 2 * operands["x"]


def add(memory: FakeMemory, params: bytes, geometry: Geometry) -> None:
    operands = views(memory, params)
    for address in operands["table"]:
        memory.at(int(address), 4 * len(X)).view(np.float32)[...] += operands["middle"]


@pytest.fixture(params=["late", "random"])
def bench(request: pytest.FixtureRequest) -> Bench:
    return Bench(FakeCuda({**KERNELS, "twice": twice, "add": add}, order=request.param, seed=3))


def cuda_kernels(bench: Bench) -> list[Kernel]:
    image = Cubin(b"steps", "sm_90a", ("twice", "add"), "", {})
    return [bench.device.load(image, name) for name in image.entry_points]


def test_cuda_runs_steps_in_order_and_uses_scratch_again(bench: Bench) -> None:
    kernels = cuda_kernels(bench)
    pool = bench.device.allocate((20,), "float32", zero=True)
    held = bench.cuda.leaks()["blocks"] + 1  # the stream's own
    events = [bench.stream.launch(launch(kernels, X, pool, pack)) for _ in range(3)]
    for event in events:
        event.wait()
        assert (event.outputs["out"] == 2 * X).all()
    assert (bench.cuda.memory.at(pool.address, 80).view(np.float32) == 6 * X).all()
    assert bench.cuda.leaks()["blocks"] == held
    del pool
    bench.device.close()
    assert bench.cuda.leaks() == {}


def test_cuda_changes_no_host_array_in_place(bench: Bench) -> None:
    with pytest.raises(InvalidRequest, match="must lie on the device") as caught:
        bench.stream.launch(launch(cuda_kernels(bench), X, np.zeros(20, np.float32), pack))
    assert caught.value.field == "pool"


def test_cuda_refuses_steps_of_which_one_is_anothers(bench: Bench) -> None:
    kernels = [*cuda_kernels(bench), Bench().device.load(IMAGE, "scale")]
    with pytest.raises(LaunchError, match="not loaded by this device"):
        bench.stream.launch(launch(kernels, X, bench.device.allocate((20,), "float32"), pack))


def test_a_step_that_fails_releases_the_scratch_of_all(bench: Bench) -> None:
    kernels = cuda_kernels(bench)
    pool = bench.device.allocate((20,), "float32", zero=True)
    held = bench.cuda.leaks()["blocks"] + 1  # the stream's own
    bench.cuda.fail("launch_kernel", 0, 1)  # the second step is refused
    with pytest.raises(LaunchError):
        bench.stream.launch(launch(kernels, X, pool, pack))
    bench.cuda.run_all()
    event = bench.stream.launch(launch(kernels, X, pool, pack))
    event.wait()
    assert bench.cuda.leaks()["blocks"] == held


# Scratch that kernels leave as 0


def draw(memory: FakeMemory, params: bytes, geometry: Geometry) -> None:
    """out = the number drawn from the counter, which is reset to 0."""
    operands = views(memory, params)
    operands["out"][...] = operands["counter"][0]
    operands["counter"][...] = 0


def drawing(kernel: Kernel, pack: Any = pack) -> Launch:
    counter = ScratchSpec((1,), "int32", zero=True, rearmed=True)
    step = Step(kernel, LaunchGeometry((1, 1, 1), (32, 1, 1), 0), pack)
    out = {"out": OutputSpec(X.shape, "float32")}
    return Launch(None, {"x": X}, out, lambda inputs: {}, (step,), {"counter": counter})


@pytest.mark.parametrize("order", ["late", "random"])
def test_a_stream_clears_what_kernels_leave_as_0_before_the_first_alone(order: Any) -> None:
    cuda = FakeCuda({**KERNELS, "draw": draw}, order=order, seed=5)
    bench = Bench(cuda)
    kernel = bench.device.load(Cubin(b"draws", "sm_90a", ("draw",), "", {}), "draw")
    cuda.fail("fill", 1)  # nothing is cleared by a launch that fails
    with pytest.raises(LaunchError):
        bench.stream.launch(drawing(kernel))
    cuda.calls.clear()
    held = []
    for stream in (bench.stream, bench.device.open_stream("other")):
        events = [stream.launch(drawing(kernel)) for _ in range(3)]
        for event in events:
            event.wait()
            assert not event.outputs["out"].any()
        held.append(cuda.calls.count("fill"))
    assert held == [1, 2], "once for each stream"
    bench.device.close()
    assert cuda.leaks() == {}


def count(memory: FakeMemory, params: bytes, geometry: Geometry) -> None:
    operands = views(memory, params)
    operands["counter"][...] += 1


@pytest.mark.parametrize("how", ["a launch", "a series", "the next series"])
def test_what_a_part_of_a_launch_left_is_cleared(how: str) -> None:
    """The second kernel, which puts the counter back to 0, could not be launched."""
    cuda = FakeCuda({**KERNELS, "draw": draw, "count": count})
    bench = Bench(cuda)
    cubin = Cubin(b"draws", "sm_90a", ("count", "draw"), "", {})
    launch = drawing(bench.device.load(cubin, "draw"))
    (step,) = launch.steps
    launch.steps = (step._replace(kernel=bench.device.load(cubin, "count")), step)
    x, out = (bench.device.memory.empty(X.shape, "float32") for _ in range(2))
    if how != "a launch":
        launch.inputs, launch.outputs = {"x": x}, {"out": OutputSpec(X.shape, "float32", out)}
    series = bench.stream.series()

    def run() -> Any:
        if how == "a launch":
            event = bench.stream.launch(launch)
            event.wait()
            return event.outputs["out"]
        series.add(launch)
        series.mark().wait()
        return cuda.memory.array(out.address, X.shape, np.dtype("float32"))

    for _ in range(3):
        assert (run() == 1).all()
        cuda.fail("launch_kernel", 0, 2)
        with pytest.raises(OutOfDeviceMemory):
            run()
        if how == "the next series":
            series.end().wait()
            series = bench.stream.series()
    assert (run() == 1).all()
    series.end().wait()
    bench.device.close()


DRAWS = """
#include "ptx/types.cuh"
struct Params { float* out; int* counter; int left; };
extern "C" __global__ void draw(const __grid_constant__ Params p) {
  if (threadIdx.x < 20) p.out[threadIdx.x] = *p.counter;
  __syncthreads();
  if (threadIdx.x == 0) {
    p.counter[0] = p.left % 2;
    if (p.left == 2) p.counter[1] = 1;
  }
}
"""


def test_a_kernel_that_leaves_something_else_is_found_out(emulated: CudaDevice) -> None:
    built = emulated.build(KernelSource("draws", DRAWS, ("draw",), asset_headers(DRAWS)), "sm_80")
    stream = emulated.open_stream("test")

    def draw(left: int) -> Event:
        def packed(buffers: Mapping[str, Buffer]) -> bytes:
            return struct.pack("<2Qi4x", buffers["out"].address, buffers["counter"].address, left)

        return stream.launch(drawing(built, packed))

    # All are in flight on the same memory. What one leaves there, or writes beside it, does not affect the next.
    findings = {0: None, 1: "left 'counter' other than 0", 2: "'counter' past its last byte"}
    for left, event in [(left, draw(left)) for left in (0, 1, 0, 2, 0, 1, 1, 2, 2, 0)]:
        if findings[left] is None:
            event.wait()
            assert not event.outputs["out"].any()
        else:
            with pytest.raises(LaunchError, match=findings[left]):
                event.wait()
