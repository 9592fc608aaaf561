"""What the driver reports where a program leaves an order open, and what it accepts as ordered."""

from __future__ import annotations

import ctypes
import struct
from typing import Any

import cupy
import pytest
from cupy.cuda import runtime

from gpu_actors.devices.cuda.cupy_api import CupyApi
from softgpu import control
from softgpu.activate import driver

ADD = cupy.RawKernel('extern "C" __global__ void add(float* x, float y) { x[threadIdx.x] += y; }', "add")
N = 32
BYTES = 4 * N


def add(x: Any, value: float, stream: int) -> None:
    params = struct.pack("<Q", x.data.ptr), struct.pack("<f", value)
    CupyApi(0).launch_kernel(ADD.kernel.ptr, (1, 1, 1), (N, 1, 1), 0, stream, params)


def event() -> int:
    return int(runtime.eventCreateWithFlags(runtime.eventDisableTiming))


def finish(*streams: int) -> list[str]:
    for stream in streams:
        runtime.streamSynchronize(stream)
    return control.take_findings()


@pytest.fixture
def x() -> Any:
    made = cupy.zeros(N, cupy.float32)
    runtime.deviceSynchronize()
    return made


def test_a_stream_orders_its_own_work(x: Any, stream: int) -> None:
    for _ in range(5):
        add(x, 1, stream)
        runtime.memsetAsync(x.data.ptr, 0, BYTES, stream)
    add(x, 2, stream)
    assert finish(stream) == []
    assert x.get().tolist() == [2.0] * N


def test_kernels_of_two_streams_on_the_same_memory_are_a_race(x: Any, stream: int, other: int) -> None:
    add(x, 1, stream)
    add(x, 1, other)
    (found,) = finish(stream, other)
    assert found.startswith("race: kernel add on stream")
    assert "nothing orders them" in found


def test_an_event_orders_two_streams(x: Any, stream: int, other: int) -> None:
    done = event()
    add(x, 1, stream)
    runtime.eventRecord(done, stream)
    runtime.streamWaitEvent(other, done)
    runtime.eventDestroy(done)
    add(x, 1, other)
    assert finish(stream, other) == []
    assert x.get().tolist() == [2.0] * N


def test_an_event_that_is_recorded_too_early_does_not(x: Any, stream: int, other: int) -> None:
    done = event()
    runtime.eventRecord(done, stream)
    add(x, 1, stream)
    runtime.streamWaitEvent(other, done)
    add(x, 1, other)
    assert "race" in finish(stream, other)[0]


def test_a_copy_and_a_kernel_are_a_race(x: Any, stream: int, other: int) -> None:
    pinned = runtime.hostAlloc(BYTES, 0)
    add(x, 1, stream)
    runtime.memcpyAsync(pinned, x.data.ptr, BYTES, runtime.memcpyDeviceToHost, other)
    assert "race" in finish(stream, other)[0]
    runtime.freeHost(pinned)


def test_two_copies_over_the_same_page_locked_bytes_are_a_race(x: Any, stream: int, other: int) -> None:
    pinned = runtime.hostAlloc(BYTES, 0)
    y = cupy.zeros(N, cupy.float32)
    runtime.deviceSynchronize()
    runtime.memcpyAsync(pinned, x.data.ptr, BYTES, runtime.memcpyDeviceToHost, stream)
    runtime.memcpyAsync(y.data.ptr, pinned, BYTES, runtime.memcpyHostToDevice, other)
    assert "race" in finish(stream, other)[0]
    runtime.freeHost(pinned)


def test_readers_do_not_race(x: Any, stream: int, other: int) -> None:
    pinned = [runtime.hostAlloc(BYTES, 0) for _ in range(2)]
    for address, reader in zip(pinned, (stream, other), strict=True):
        runtime.memcpyAsync(address, x.data.ptr, BYTES, runtime.memcpyDeviceToHost, reader)
    assert finish(stream, other) == []
    for address in pinned:
        runtime.freeHost(address)


@pytest.mark.parametrize("how", ["synchronize", "query", "stream"])
def test_the_host_orders_what_it_has_waited_for(x: Any, stream: int, other: int, how: str) -> None:
    done = event()
    add(x, 1, stream)
    runtime.eventRecord(done, stream)
    if how == "synchronize":
        runtime.eventSynchronize(done)
    elif how == "stream":
        runtime.streamSynchronize(stream)
    while how == "query" and runtime.eventQuery(done):
        pass
    add(x, 1, other)
    assert finish(stream, other) == []


def test_the_legacy_default_stream_waits_for_blocking_streams_alone(x: Any, stream: int) -> None:
    blocking = runtime.streamCreate()
    for one, racing in ((blocking, False), (stream, True)):
        add(x, 1, one)
        runtime.memsetAsync(x.data.ptr, 0, BYTES, 0)
        assert bool(finish(one, 0)) == racing
    runtime.streamDestroy(blocking)


def test_memory_given_back_before_its_work_was_waited_for(x: Any, stream: int) -> None:
    address = ctypes.c_uint64(x.data.ptr)
    driver().softgpu_lease(address, ctypes.c_uint64(BYTES), ctypes.c_uint64(512))
    add(x, 1, stream)
    driver().softgpu_release(address)
    found = finish(stream)
    assert "freed too early" in found[0]
    assert "kernel add" in found[0]


def test_bytes_written_behind_a_lease_are_found(x: Any, stream: int) -> None:
    address = ctypes.c_uint64(x.data.ptr)
    driver().softgpu_lease(address, ctypes.c_uint64(BYTES - 4), ctypes.c_uint64(512))
    add(x, 1, stream)
    runtime.streamSynchronize(stream)
    driver().softgpu_release(address)
    assert "wrote behind" in control.take_findings()[0]
