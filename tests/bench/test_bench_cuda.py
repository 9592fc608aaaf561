"""The benchmark's use of CuPy, without a GPU: the clock over a fake driver, and that every call exists."""

from __future__ import annotations

import re
import struct
from typing import Any

import cupy
import numpy as np
import pytest
from fakes.cuda import FakeCuda, Geometry
from fakes.memory import FakeMemory
from inside.cuda import CudaDevice, CudaStream

from gpu_actors import ContextOptions, Cubin
from gpu_actors.bench.timing import CudaClock

RUNTIME = {  # with how many arguments the benchmark gives
    "eventCreate": 0,
    "eventRecord": 2,
    "eventElapsedTime": 2,
    "eventDestroy": 1,
    "streamSynchronize": 1,
    "deviceSynchronize": 0,
    "memcpyAsync": 5,
    "getDeviceProperties": 1,
    "driverGetVersion": 0,
    "runtimeGetVersion": 0,
}


@pytest.mark.parametrize(("name", "given"), RUNTIME.items())
def test_every_call_of_the_runtime_takes_what_it_is_given(name: str, given: int) -> None:
    signature = re.match(rf"{name}\((.*?)\)", getattr(cupy.cuda.runtime, name).__doc__)
    assert signature is not None
    parameters = [one for one in signature[1].split(", ") if one]
    required = [one for one in parameters if "=" not in one]
    assert len(required) <= given <= len(parameters)


def test_the_rest_of_cupy_that_is_used_is_there() -> None:
    assert cupy.cuda.runtime.memcpyDeviceToDevice == 3
    for name, parameters in {"copy_from_device": "src, size_t size", "memset": "int value, size_t size"}.items():
        assert parameters in getattr(cupy.cuda.MemoryPointer, name).__doc__
    for owner, name in (
        (cupy, "asnumpy"),
        (cupy, "get_default_memory_pool"),
        (cupy, "empty"),
        (cupy, "matmul"),
        (cupy.cuda, "ExternalStream"),
        (cupy.cuda, "Device"),
    ):
        assert callable(getattr(owner, name))


class FakeRuntime:
    """Timing events over the fake driver's streams."""

    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda = cuda
        self.now = 0.0
        self.times: dict[int, float] = {}
        self.made = 0

    def eventCreate(self) -> int:
        self.made += 1
        return self.made

    def eventRecord(self, event: int, stream: int) -> None:
        def record() -> None:
            self.times[event] = self.now

        self.cuda.enqueue(stream, record)

    def eventElapsedTime(self, begin: int, end: int) -> float:
        return self.times[end] - self.times[begin]

    def eventDestroy(self, event: int) -> None:
        self.made -= 1

    def streamSynchronize(self, stream: int) -> None:
        self.cuda.run_all()


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> tuple[FakeCuda, FakeRuntime, CudaClock, list[int]]:
    seen: list[int] = []

    def hold(memory: FakeMemory, params: bytes, geometry: Geometry) -> None:
        address, limit = struct.unpack("<Qq", params)
        assert limit > 0
        state = np.ctypeslib.as_array(clock._state)
        assert state.ctypes.data == address
        seen.append(int(state[0]))
        if state[0] == 0:
            state[1] = 1

    cuda = FakeCuda({"hold": hold})
    runtime = FakeRuntime(cuda)
    monkeypatch.setattr(cupy.cuda, "runtime", runtime)
    device = CudaDevice(0, ContextOptions(), api=cuda)
    stream = device.open_stream("bench")
    assert isinstance(stream, CudaStream)
    clock = CudaClock(device, stream)
    return cuda, runtime, clock, seen


def test_what_is_enqueued_behind_a_hold_runs_back_to_back(parts: Any) -> None:
    cuda, runtime, clock, seen = parts
    clock.hold()
    begin = clock.mark()

    def work() -> None:
        runtime.now += 3.0

    cuda.enqueue(clock.handle, work)
    end = clock.mark()
    assert clock.release()
    clock.synchronize()
    assert seen == [1]
    assert clock.elapsed(begin, end) == 3.0


def test_a_hold_that_ended_by_itself_is_told(parts: Any) -> None:
    cuda, _, clock, seen = parts
    clock.hold()
    cuda.run_all()
    assert not clock.release()
    assert seen == [0]
    clock.hold()
    assert clock.release(), "an earlier hold's end is taken for this one's"


def test_the_stream_can_be_held_after_other_modules_were_loaded(parts: Any) -> None:
    """Loading a module unloads those that nothing holds."""
    cuda, _, clock, seen = parts
    cuda.kernels["other"] = cuda.kernels["hold"]
    clock._device.load(Cubin(b"other", "sm_90a", ("other",), "", {}), "other")
    clock.hold()
    assert clock.release()
    clock.synchronize()
    assert seen == [1]


def test_events_are_used_again_and_given_back(parts: Any) -> None:
    cuda, runtime, clock, _ = parts
    first = {clock.mark() for _ in range(4)}
    clock.reuse()
    assert {clock.mark() for _ in range(4)} == first
    clock.synchronize()
    clock.close()
    assert runtime.made == 0
    assert "pinned" not in cuda.leaks()
