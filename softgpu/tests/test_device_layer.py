"""The device layer of the package on the driver: operands, order, memory, failures, what is left behind.

The kernels are defined here. tests/gpu has those of the package.
"""

from __future__ import annotations

import gc
import struct
from collections.abc import Iterator, Mapping
from typing import Any

import cupy
import numpy as np
import pytest
from cupy.cuda import runtime

from gpu_actors.arrays.adopt import adopt, caller_streams
from gpu_actors.arrays.device_array import Joined
from gpu_actors.compiling.compiler import Compiler
from gpu_actors.compiling.source import KernelSource
from gpu_actors.devices.cuda import CudaDevice
from gpu_actors.devices.cuda.errors import NOT_READY
from gpu_actors.devices.interface import Buffer, Event, Launch, LaunchGeometry, OutputSpec, ScratchSpec, Step, Stream
from gpu_actors.errors import ActorStopped, LaunchError, OutOfDeviceMemory
from gpu_actors.options import ContextOptions
from softgpu import control

SOURCE = r"""
struct Params { const float *x, *y; float *out, *kept, *counts; const unsigned long long* table; long long n; };

// y is found in a table of addresses. kept is changed in place, counts is added to.
extern "C" __global__ void work(const __grid_constant__ Params p) {
    for (long long i = threadIdx.x; i < p.n; i += blockDim.x) {
        const float* y = reinterpret_cast<const float*>(p.table[0]);
        p.out[i] = p.x[i] + 2 * y[i] + p.kept[i];
        p.kept[i] += 1;
        p.counts[i] += 1;
    }
}

// Two parameters by value, and the last of the shared memory that was asked for.
extern "C" __global__ void shared(float* out, const float* x, long long n, int bytes) {
    extern __shared__ float block_memory[];
    float* last = block_memory + bytes / 4 - 32;
    for (long long i = threadIdx.x; i < n; i += blockDim.x) {
        last[threadIdx.x] = x[i];
        out[i] = last[threadIdx.x] + 1;
    }
}

extern "C" __global__ void hang(float* out) { while (*reinterpret_cast<volatile float*>(out) != 1) __nanosleep(100); }
"""
COUNTED = ("streams", "events", "graphs", "modules", "memory", "pinned")
N = 300


class Device:
    """A CudaDevice, and launches on it."""

    def __init__(self) -> None:
        self.device = CudaDevice(0, ContextOptions())
        self.driver = self.device.driver
        source = KernelSource("layer.cu", SOURCE, ("work", "shared", "hang"))
        self.cubin = Compiler().compile(source, self.device.info.arch)
        self.stream = self.device.open_stream("layer")
        self.packed = 0

    def work(
        self,
        x: Any,
        y: Any,
        kept: Any,
        into: Any = None,
        *,
        stream: Stream | None = None,
        cleared: bool = True,
    ) -> Event:
        def pack(buffers: Mapping[str, Buffer]) -> bytes:
            self.packed += 1
            names = ("x", "y", "out", "kept", "counts", "table")
            return struct.pack("<6Qq", *(buffers[name].address for name in names), N)

        step = Step(self.device.load(self.cubin, "work"), LaunchGeometry((1, 1, 1), (64, 1, 1), 0), pack)
        scratch = {
            "table": ScratchSpec((1,), "uint64", contents=lambda buffers: struct.pack("<Q", buffers["y"].address)),
            "unused": ScratchSpec((7,), "float32"),
        }
        outputs = {"out": OutputSpec((N,), "float32", into), "counts": OutputSpec((N,), "float32", zero=cleared)}
        launch = Launch(
            None,
            {"x": x, "y": y, "kept": kept},
            outputs,
            lambda inputs: {},
            (step, step),
            scratch,
            returned=("kept",),
        )
        return (stream or self.stream).launch(launch)

    def shared(self, x: Any, nbytes: int) -> Any:
        def pack(buffers: Mapping[str, Buffer]) -> tuple[bytes, ...]:
            first = (struct.pack("<Q", buffers[name].address) for name in ("out", "x"))
            return (*first, struct.pack("<q", N), struct.pack("<i", nbytes))

        step = Step(self.device.load(self.cubin, "shared"), LaunchGeometry((1, 1, 1), (32, 1, 1), nbytes), pack)
        event = self.stream.launch(Launch(None, {"x": x}, {"out": OutputSpec((N,), "float32")}, lambda i: {}, (step,)))
        event.wait()
        return event.outputs["out"]

    def hang(self) -> tuple[Event, Any]:
        x = cupy.zeros(1, cupy.float32)
        runtime.deviceSynchronize()
        step = Step(
            self.device.load(self.cubin, "hang"),
            LaunchGeometry((1, 1, 1), (1, 1, 1), 0),
            lambda buffers: struct.pack("<Q", buffers["x"].address),
        )
        array = adopt(x, "x").array
        return self.stream.launch(Launch(None, {"x": array}, {}, lambda i: {}, (step,), updates=("x",))), x


@pytest.fixture
def made() -> Iterator[Device]:
    """A device that leaves nothing behind."""
    forget()
    before = {what: control.count(what) for what in COUNTED}
    device = Device()
    yield device
    device.stream.close()
    device.device.close()
    forget()
    assert {what: control.count(what) for what in COUNTED} == before


def forget() -> None:
    """Free what CuPy itself keeps."""
    gc.collect()
    runtime.deviceSynchronize()
    cupy.get_default_memory_pool().free_all_blocks()
    cupy.get_default_pinned_memory_pool().free_all_blocks()


def floats(seed: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(-99, 99, N).astype(np.float32)


def check(event: Event, x: Any, y: Any, kept: Any, before: Any) -> None:
    """Compare with the expected results of two steps."""
    event.wait()
    np.testing.assert_allclose(np.asarray(get(event.outputs["out"])), x + 2 * y + before + 1, rtol=1e-6)
    np.testing.assert_array_equal(get(event.outputs["counts"]), np.full(N, 2, np.float32))
    np.testing.assert_allclose(get(kept), before + 2, rtol=1e-6)


def get(array: Any) -> Any:
    if isinstance(array, np.ndarray):
        return array
    if isinstance(array, cupy.ndarray):
        return array.get()
    memory = cupy.cuda.UnownedMemory(array.address, max(1, array.nbytes), array)
    return cupy.ndarray(array.shape, array.dtype, cupy.cuda.MemoryPointer(memory, 0)).get()


def test_operands_of_the_host(made: Device) -> None:
    for seed in range(3):
        x, y, kept = (floats(3 * seed + n) for n in range(3))
        before = kept.copy()
        check(made.work(x[::-1], y, kept), x[::-1], y, kept, before)


def test_results_lie_where_the_caller_says(made: Device) -> None:
    x, y, kept = (floats(n) for n in range(3))
    into = np.zeros((N, 2), np.float32)[:, 1]
    before = kept.copy()
    event = made.work(x, y, kept, into)
    check(event, x, y, kept, before)
    assert event.outputs["out"] is into


def test_operands_on_the_device(made: Device) -> None:
    host = [floats(n) for n in range(3)]
    x, y, kept = (cupy.asarray(array) for array in host)
    runtime.deviceSynchronize()
    adopted = [adopt(array, "x").array for array in (x, y, kept)]
    event = made.work(*adopted)
    check(event, host[0], host[1], kept, host[2])
    assert isinstance(event.outputs["out"], cupy.ndarray) or event.outputs["out"].address


@pytest.mark.parametrize("late", ["x", "y", "kept"])
def test_work_of_the_callers_stream_is_waited_for(made: Device, stream: int, late: str) -> None:
    """A launch waits for the copy to its operand that still runs on the caller's stream."""
    host = {name: floats(n) for n, name in enumerate(("x", "y", "kept"))}
    arrays = {name: cupy.asarray(array) for name, array in host.items()}
    source = cupy.asarray(floats(9))
    runtime.deviceSynchronize()
    control.slow_copy(0.15)
    mine = cupy.cuda.Stream.from_external(_Foreign(stream))
    with mine:
        runtime.memcpyAsync(arrays[late].data.ptr, source.data.ptr, 4 * N, runtime.memcpyDeviceToDevice, stream)
        streams = caller_streams(0)
        adopted: Any = {name: adopt(array, name, streams).array for name, array in arrays.items()}
    event = made.work(**adopted)
    host[late] = source.get()
    check(event, host["x"], host["y"], arrays["kept"], host["kept"])
    assert control.take_findings() == []


def test_each_of_several_streams_is_waited_for(made: Device, stream: int, other: int) -> None:
    """A launch waits for the copies to two operands that still run, each on a stream of its own."""
    host = {name: floats(n) for n, name in enumerate(("x", "y", "kept"))}
    arrays = {name: cupy.asarray(array) for name, array in host.items()}
    sources = {"x": cupy.asarray(floats(8)), "y": cupy.asarray(floats(9))}
    runtime.deviceSynchronize()
    adopted: Any = {"kept": adopt(arrays["kept"], "kept").array}
    for (name, source), own in zip(sources.items(), (stream, other), strict=True):
        control.slow_copy(0.15)
        with cupy.cuda.Stream.from_external(_Foreign(own)):
            runtime.memcpyAsync(arrays[name].data.ptr, source.data.ptr, 4 * N, runtime.memcpyDeviceToDevice, own)
            adopted[name] = adopt(arrays[name], name, caller_streams(0)).array
    event = made.work(**adopted)
    check(event, sources["x"].get(), sources["y"].get(), arrays["kept"], host["kept"])
    assert control.take_findings() == []


class _Foreign:
    def __init__(self, stream: int) -> None:
        self._stream = stream

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._stream


def test_arrays_of_several_requests_are_joined(made: Device, stream: int) -> None:
    """A launch of joined arrays waits for the one that is still being written."""
    parts = [cupy.asarray(floats(n)[:100]) for n in range(3)]
    source = cupy.asarray(floats(8)[:100])
    runtime.deviceSynchronize()
    control.slow_copy(0.15)
    with cupy.cuda.Stream.from_external(_Foreign(stream)):
        runtime.memcpyAsync(parts[2].data.ptr, source.data.ptr, 400, runtime.memcpyDeviceToDevice, stream)
        streams = caller_streams(0)
        adopted: Any = tuple(adopt(part, "x", streams).array for part in parts)
    y, kept = floats(4), floats(5)
    before = kept.copy()
    event = made.work(Joined(adopted), y, kept)
    check(event, np.concatenate([part.get() for part in (*parts[:2], source)]), y, kept, before)


def test_the_default_stream_is_not_waited_for(made: Device) -> None:
    x, y, kept = (floats(n) for n in range(3))
    made.work(x, y, kept).wait()
    before = kept.copy()
    busy = cupy.zeros(4, cupy.uint8)
    runtime.deviceSynchronize()
    control.slow_copy(3.0)
    runtime.memcpyAsync(busy.data.ptr, busy.data.ptr, 4, runtime.memcpyDeviceToDevice, 0)
    check(made.work(x, y, kept), x, y, kept, before)
    assert runtime.streamQuery(0) == NOT_READY
    runtime.deviceSynchronize()


def test_streams_do_not_mix_their_memory(made: Device) -> None:
    streams = [made.device.open_stream(f"s{n}") for n in range(4)]
    control.slow_copy(0.05)
    for _ in range(3):
        operands: Any = [[floats(10 * seed + n) for n in range(3)] for seed in range(len(streams))]
        before = [kept.copy() for *_, kept in operands]
        events = [made.work(*arrays, stream=s) for arrays, s in zip(operands, streams, strict=True)]
        for event, (x, y, kept), old in zip(events, operands, before, strict=True):
            check(event, x, y, kept, old)
    for one in streams:
        one.close()


def test_events_that_nobody_waits_for_are_settled(made: Device) -> None:
    control.slow_copy(0.05)
    for seed in range(20):
        made.work(floats(seed), floats(seed), floats(seed))
    x, y, kept = (floats(n) for n in range(3))
    before = kept.copy()
    check(made.work(x, y, kept), x, y, kept, before)


@pytest.mark.parametrize("kib", [1, 48, 100, 227])
def test_shared_memory_up_to_the_devices_limit(made: Device, kib: int) -> None:
    x = floats(1)
    np.testing.assert_allclose(made.shared(x, kib << 10), x + 1, rtol=1e-6)
    np.testing.assert_allclose(made.shared(x, 1 << 10), x + 1, rtol=1e-6)


def test_a_launch_that_is_refused_leaves_nothing(made: Device) -> None:
    with pytest.raises(LaunchError):
        made.shared(floats(1), 228 << 10)
    x = floats(2)
    np.testing.assert_allclose(made.shared(x, 64 << 10), x + 1, rtol=1e-6)


def test_new_memory_is_cleared_before_any_stream_sees_it(made: Device) -> None:
    for _ in range(3):
        array = made.device.allocate((N,), "float32", zero=True)
        assert not get(array).any()
        del array


def test_memory_is_spared_before_a_request_fails(made: Device) -> None:
    x, y, kept = (floats(n) for n in range(3))
    made.work(x, y, kept).wait()
    before = kept.copy()
    large = np.zeros((1 << 20,), np.float32)
    del large
    control.fail_allocation()
    array = made.device.allocate((1 << 20,), "float32")
    assert array.nbytes == 4 << 20
    control.fail_pinned()
    check(made.work(x, y, kept), x, y, kept, before)
    control.fail_pinned(0)


def test_a_full_device_refuses_one_request(made: Device) -> None:
    with pytest.raises(OutOfDeviceMemory, match="no device memory left"):
        made.device.allocate((1 << 40,), "uint8")
    x, y, kept = (floats(n) for n in range(3))
    before = kept.copy()
    check(made.work(x, y, kept), x, y, kept, before)


def test_probes_pass_and_see_a_slow_device(made: Device) -> None:
    for _ in range(3):
        made.device.probe()
    control.slow_copy(0.3)
    made.device.probe()


def test_the_driver_is_asked_for_no_more_than_once_a_cubin(made: Device) -> None:
    one, other = (made.device.load(made.cubin, entry) for entry in ("work", "shared"))
    assert one.handle.handle != other.handle.handle
    assert made.device.load(made.cubin, "work").handle is one.handle
    count = control.count("modules")
    del one, other
    made.device.load(made.cubin, "work")
    assert control.count("modules") == count


def test_closing_over_a_hung_launch_releases_nothing_and_returns() -> None:
    device = Device()
    event, x = device.hang()
    device.device.close()
    with pytest.raises(ActorStopped):
        event.wait()
    runtime.memcpy(x.data.ptr, np.ones(1, np.float32).ctypes.data, 4, runtime.memcpyHostToDevice)
    runtime.deviceSynchronize()
    # This test ends the kernel by a write that races with the kernel's read.
    assert all(found.startswith("race: ") and "kernel hang" in found for found in control.take_findings())


BODY = """
import sys
sys.path.insert(0, "softgpu/tests")
from test_device_layer import *
from gpu_actors.errors import ContextLost
device = Device()
x, y, kept = (floats(n) for n in range(3))
"""


def test_a_lost_event_is_a_hung_device(in_a_process: Any) -> None:
    ended = in_a_process(
        BODY
        + """
device = Device()
object.__setattr__(device.device._options, "hang_timeout", 0.5)
control.lose_event()
try:
    device.device.probe()
except ContextLost as error:
    print("no progress" in str(error))
try:
    device.work(x, y, kept)
except ContextLost:
    print("lost")
device.device.close()
"""
    )
    assert ended.stdout.split() == ["True", "lost"], ended.stderr


@pytest.mark.parametrize("status", [700, 719])
def test_a_failed_launch_loses_the_device_for_all(in_a_process: Any, status: int) -> None:
    ended = in_a_process(
        BODY
        + f"""
control.fail_launch({status})
events = []
for _ in range(2):
    try:
        events.append(device.work(x, y, kept))
    except ContextLost:
        print("lost")
for event in events:
    try:
        event.wait()
    except ContextLost:
        print("lost")
for call in (lambda: device.work(x, y, kept), device.device.probe, lambda: device.device.allocate((4,), "int8", True)):
    try:
        call()
    except ContextLost:
        print("lost")
print(device.device.lost is not None)
device.device.close()
"""
    )
    assert ended.stdout.split() == [*["lost"] * 5, "True"], ended.stdout + ended.stderr
