"""The driver's calls as NVIDIA documents them: what they do, what they refuse, and faults on demand."""

from __future__ import annotations

import ctypes
import threading
import time
from typing import Any

import cupy
import numpy as np
import pytest
from cupy.cuda import driver, runtime

from gpu_actors.devices.cuda.cupy_api import CupyApi
from gpu_actors.devices.cuda.errors import NOT_READY, CudaFailure
from gpu_actors.devices.cuda.tensor_map import encode_tensor_map
from gpu_actors.devices.interface import TensorMap
from softgpu import control

BYTES = 4096


def array_at(address: int, count: int = BYTES) -> Any:
    return np.ctypeslib.as_array((ctypes.c_uint8 * count).from_address(address))


@pytest.fixture
def memory() -> Any:
    made = cupy.empty(BYTES, cupy.uint8)
    runtime.deviceSynchronize()
    return made


def test_new_memory_holds_nans() -> None:
    address = runtime.malloc(BYTES)
    host = np.zeros(BYTES // 4, np.float32)
    runtime.memcpy(host.ctypes.data, address, BYTES, runtime.memcpyDeviceToHost)
    assert np.isnan(host).all()
    runtime.free(address)


def test_a_page_locked_source_is_read_when_the_copy_runs(memory: Any, stream: int) -> None:
    pinned = runtime.hostAlloc(BYTES, 0)
    array_at(pinned)[:] = 1
    control.slow_copy(0.3)
    runtime.memcpyAsync(memory.data.ptr, memory.data.ptr, BYTES, runtime.memcpyDeviceToDevice, stream)
    runtime.memcpyAsync(memory.data.ptr, pinned, BYTES, runtime.memcpyHostToDevice, stream)
    array_at(pinned)[:] = 2
    runtime.streamSynchronize(stream)
    assert set(memory.get().tolist()) == {2}
    runtime.freeHost(pinned)


def test_a_pageable_source_is_staged_before_the_call_returns(memory: Any, stream: int) -> None:
    host = np.full(BYTES, 1, np.uint8)
    control.slow_copy(0.3)
    runtime.memcpyAsync(memory.data.ptr, memory.data.ptr, BYTES, runtime.memcpyDeviceToDevice, stream)
    runtime.memcpyAsync(memory.data.ptr, host.ctypes.data, BYTES, runtime.memcpyHostToDevice, stream)
    host[:] = 2
    runtime.streamSynchronize(stream)
    assert set(memory.get().tolist()) == {1}


def test_a_pageable_target_is_written_before_the_call_returns(memory: Any, stream: int) -> None:
    host = np.zeros(BYTES, np.uint8)
    runtime.memsetAsync(memory.data.ptr, 7, BYTES, stream)
    runtime.memcpyAsync(host.ctypes.data, memory.data.ptr, BYTES, runtime.memcpyDeviceToHost, stream)
    assert set(host.tolist()) == {7}


def test_handle_2_is_another_stream_on_each_thread(memory: Any) -> None:
    """It waits for the legacy default stream, which waits for those of all threads."""
    events = [runtime.eventCreateWithFlags(runtime.eventDisableTiming) for _ in range(2)]
    control.slow_copy(0.3)
    runtime.memcpyAsync(memory.data.ptr, memory.data.ptr, BYTES, runtime.memcpyDeviceToDevice, 2)

    def record() -> None:
        for event, handle in zip(events, (2, 1), strict=True):
            runtime.eventRecord(event, handle)
        runtime.streamSynchronize(2)

    thread = threading.Thread(target=record)
    thread.start()
    thread.join()
    assert [runtime.eventQuery(event) for event in events] == [0, NOT_READY]
    runtime.eventSynchronize(events[1])
    assert runtime.streamQuery(2) == 0
    for event in events:
        runtime.eventDestroy(event)


def test_a_copy_beyond_a_block_is_refused(stream: int) -> None:
    address = runtime.malloc(BYTES)
    with pytest.raises(runtime.CUDARuntimeError, match="InvalidValue"):
        runtime.memsetAsync(address, 0, BYTES + 1, stream)
    runtime.free(address)
    with pytest.raises(runtime.CUDARuntimeError, match="InvalidValue"):
        runtime.memcpyAsync(address, np.zeros(8).ctypes.data, 64, runtime.memcpyHostToDevice, stream)
    assert len(control.take_findings()) == 2
    with pytest.raises(runtime.CUDARuntimeError, match="InvalidValue"):
        runtime.free(address)


def test_memory_runs_out_and_comes_back() -> None:
    free, total = runtime.memGetInfo()
    held = runtime.malloc(free - BYTES)
    with pytest.raises(runtime.CUDARuntimeError, match="MemoryAllocation"):
        runtime.malloc(2 * BYTES)
    runtime.free(held)
    assert runtime.memGetInfo() == (free, total)


# ---- captures


def test_a_captured_step_runs_when_the_graph_is_launched(memory: Any, stream: int) -> None:
    runtime.memsetAsync(memory.data.ptr, 1, BYTES, stream)
    runtime.streamSynchronize(stream)
    runtime.streamBeginCapture(stream, runtime.streamCaptureModeThreadLocal)
    runtime.memsetAsync(memory.data.ptr, 2, BYTES, stream)
    graph = runtime.streamEndCapture(stream)
    run = runtime.graphInstantiate(graph)
    runtime.graphDestroy(graph)
    assert set(memory.get().tolist()) == {1}
    for _ in range(2):
        runtime.graphLaunch(run, stream)
    runtime.streamSynchronize(stream)
    assert set(memory.get().tolist()) == {2}
    runtime.graphExecDestroy(run)


@pytest.mark.parametrize("call", ["malloc", "synchronize", "wait"])
def test_what_a_capture_cannot_hold_breaks_it(memory: Any, stream: int, other: int, call: str) -> None:
    outside = runtime.eventCreateWithFlags(runtime.eventDisableTiming)
    runtime.eventRecord(outside, other)
    runtime.streamBeginCapture(stream, runtime.streamCaptureModeThreadLocal)
    forbidden: Any = {
        "malloc": lambda: runtime.malloc(BYTES),
        "synchronize": lambda: runtime.streamSynchronize(stream),
        "wait": lambda: runtime.streamWaitEvent(stream, outside),
    }[call]
    with pytest.raises(runtime.CUDARuntimeError, match="StreamCapture"):
        forbidden()
    with pytest.raises(runtime.CUDARuntimeError, match="StreamCaptureInvalidated"):
        runtime.streamEndCapture(stream)
    runtime.eventDestroy(outside)


def test_another_thread_may_allocate_while_one_captures(stream: int) -> None:
    runtime.streamBeginCapture(stream, runtime.streamCaptureModeThreadLocal)
    addresses: list[int] = []
    thread = threading.Thread(target=lambda: addresses.append(runtime.malloc(BYTES)))
    thread.start()
    thread.join()
    runtime.graphDestroy(runtime.streamEndCapture(stream))
    runtime.free(addresses[0])


def test_a_pool_without_room_leaves_a_capture_of_another_thread_whole(stream: int) -> None:
    """Its free blocks are freed before it asks again. cudaFree is no call for a thread beside a global capture."""
    api = CupyApi(0)
    api.bind()
    api.free(api.allocate(BYTES))
    outcome: list[Any] = []

    def allocate() -> None:
        api.bind()
        try:
            control.fail_allocation()
            block = api.allocate(1 << 21)
            outcome.append(block.address)
            api.free(block)
        except CudaFailure as failure:
            outcome.append(failure)

    runtime.streamBeginCapture(stream, runtime.streamCaptureModeGlobal)
    thread = threading.Thread(target=allocate)
    thread.start()
    thread.join()
    runtime.graphDestroy(runtime.streamEndCapture(stream))
    assert isinstance(outcome[0], int)
    api.close()


@pytest.mark.parametrize("flags", [0, runtime.streamNonBlocking])
def test_the_legacy_stream_is_not_used_while_a_blocking_one_is_captured(memory: Any, flags: int) -> None:
    """A question whether it is being captured fails, too, and breaks no capture."""
    captured = runtime.streamCreateWithFlags(flags)
    event = runtime.eventCreateWithFlags(runtime.eventDisableTiming)
    uses: list[Any] = [
        lambda: runtime.memsetAsync(memory.data.ptr, 1, BYTES, 0),
        lambda: runtime.eventRecord(event, 1),
        lambda: runtime.streamSynchronize(0),
    ]
    for use in (lambda: runtime.streamIsCapturing(0), *uses):
        runtime.streamBeginCapture(captured, runtime.streamCaptureModeRelaxed)
        if flags == runtime.streamNonBlocking:
            use()
        else:
            with pytest.raises(runtime.CUDARuntimeError, match="StreamCaptureImplicit"):
                use()
        if flags == runtime.streamNonBlocking or use not in uses:
            runtime.graphDestroy(runtime.streamEndCapture(captured))
        else:
            with pytest.raises(runtime.CUDARuntimeError, match="StreamCaptureInvalidated"):
                runtime.streamEndCapture(captured)
    runtime.eventDestroy(event)
    runtime.streamDestroy(captured)


# ---- kernels

SHARED = cupy.RawKernel(
    'extern "C" __global__ void shared(float* x) { extern __shared__ float mine[]; mine[0] = 1; x[0] = mine[0]; }',
    "shared",
)


def test_more_than_48_kib_must_be_asked_for(memory: Any) -> None:
    with pytest.raises(driver.CUDADriverError, match="InvalidValue"):
        SHARED((1,), (32,), (memory,), shared_mem=50 << 10)
    SHARED.max_dynamic_shared_size_bytes = 50 << 10
    SHARED((1,), (32,), (memory,), shared_mem=50 << 10)
    with pytest.raises(driver.CUDADriverError, match="InvalidValue"):
        SHARED.max_dynamic_shared_size_bytes = 228 << 10


@pytest.mark.parametrize(("grid", "block"), [((1, 65536), (1,)), ((1,), (1025,)), ((1,), (1, 1, 65)), ((0,), (1,))])
def test_a_launch_beyond_the_limits_is_refused(memory: Any, grid: Any, block: Any) -> None:
    function = SHARED.kernel.ptr
    pointers = (ctypes.c_void_p * 1)(ctypes.addressof(ctypes.c_uint64(memory.data.ptr)))
    where = ctypes.addressof(pointers)
    grids, blocks = (*grid, 1, 1)[:3], (*block, 1, 1)[:3]
    with pytest.raises(driver.CUDADriverError, match="InvalidValue"):
        driver.launchKernel(function, *grids, *blocks, 0, 0, where, 0)


def test_a_cubin_of_unknown_source_is_refused() -> None:
    from gpu_actors.compiling.elf import whole_cubin

    image = bytearray(compiled())
    image[-1] ^= 1
    assert whole_cubin(bytes(image)) == bytes(image)
    with pytest.raises(driver.CUDADriverError, match="InvalidKernelImage"):
        driver.moduleLoadData(bytes(image))
    assert "neither this package nor a test compiled" in control.take_findings()[0]


def compiled() -> bytes:
    from gpu_actors.compiling.compiler import Compiler
    from gpu_actors.compiling.source import KernelSource

    source = KernelSource("none.cu", 'extern "C" __global__ void none() {}', ("none",))
    return Compiler().compile(source, "sm_90a").data


MAP = TensorMap(0, "float16", (64, 8), (128,), (64, 8), "128B")


@pytest.mark.parametrize(
    "wrong",
    [
        {"address": 8},
        {"shape": (0, 8)},
        {"strides": (136,)},
        {"strides": (1 << 40,)},
        {"box": (64, 257)},
        {"box": (4, 8)},
        {"box": (128, 8)},
    ],
    ids=str,
)
def test_a_tensor_map_is_refused_where_the_documentation_says_so(memory: Any, wrong: dict[str, Any]) -> None:
    right = MAP._replace(address=memory.data.ptr)
    assert len(encode_tensor_map(right)) == 128
    if "address" in wrong:
        wrong = {"address": memory.data.ptr + wrong["address"]}
    with pytest.raises(CudaFailure):
        encode_tensor_map(right._replace(**wrong))


# ---- faults on demand


def test_the_nth_allocation_fails() -> None:
    control.fail_allocation(2)
    held = [runtime.malloc(BYTES)]
    with pytest.raises(runtime.CUDARuntimeError, match="MemoryAllocation"):
        runtime.malloc(BYTES)
    held.append(runtime.malloc(BYTES))
    control.fail_pinned()
    with pytest.raises(runtime.CUDARuntimeError, match="MemoryAllocation"):
        runtime.hostAlloc(BYTES, 0)
    for address in held:
        runtime.free(address)


def test_an_event_never_completes(stream: int) -> None:
    control.lose_event()
    api = CupyApi(0)
    api.bind()
    event = api.create_event()
    api.record_event(event, stream)
    runtime.streamSynchronize(stream)
    assert not api.event_done(event)
    api.record_event(event, stream)
    runtime.streamSynchronize(stream)
    assert api.event_done(event)
    api.destroy_event(event)


def test_a_copy_takes_its_time(memory: Any, stream: int) -> None:
    control.slow_copy(0.2)
    began = time.monotonic()
    runtime.memcpyAsync(memory.data.ptr, memory.data.ptr, BYTES, runtime.memcpyDeviceToDevice, stream)
    runtime.streamSynchronize(stream)
    assert time.monotonic() - began >= 0.2
