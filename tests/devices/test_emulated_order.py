"""Emulated launches run CUDA's host code, in every order of streams. Bugs of that code make answers wrong."""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, get_args

import numpy as np
import pytest
from emulated.memory import host_view
from inside.arrays import DeviceArray
from inside.compiling import asset_headers

from gpu_actors import ContextOptions, EmulationOptions, KernelSource
from gpu_actors.devices.cuda import CudaDevice, stream
from gpu_actors.devices.cuda.host_api import HostOrder
from gpu_actors.devices.cuda.operands import Operands
from gpu_actors.devices.emulation.emulated_api import EmulatedApi
from gpu_actors.devices.interface import Buffer, Event, Kernel, Launch, LaunchGeometry, OutputSpec, Step
from gpu_actors.errors import ContextLost

N = 1000
SOURCE = """
#include "ptx/types.cuh"
struct Params { const float* x; float* out; int count; };
extern "C" __global__ void twice(const __grid_constant__ Params p) {
  for (int i = threadIdx.x; i < p.count; i += 32)
    if (p.x[i] != 0) p.out[i] = 2 * p.x[i];
}
"""


class Opened:
    def __init__(self, order: HostOrder, seed: int) -> None:
        options = ContextOptions()
        self.api = EmulatedApi("sm_80", EmulationOptions(seed=seed), options, order)
        self.device = CudaDevice(0, options, self.api)
        source = KernelSource("twice", SOURCE, ("twice",), asset_headers(SOURCE))
        self.kernel: Kernel = self.device.build(source, "sm_80")
        self.streams = [self.device.open_stream(name) for name in ("one", "other")]
        self.producer = self.api.create_stream()

    def launch(self, index: int, x: Any, into: Any = None) -> Event:
        def pack(buffers: Mapping[str, Buffer]) -> bytes:
            return struct.pack("<2Qi4x", buffers["x"].address, buffers["out"].address, N)

        outputs = {"out": OutputSpec((N,), "float32", into)}
        step = Step(self.kernel, LaunchGeometry((1, 1, 1), (32, 1, 1), 0), pack)
        return self.streams[index % 2].launch(Launch(None, {"x": x}, outputs, lambda inputs: {}, (step,)))

    def produced(self, value: np.ndarray[Any, Any]) -> DeviceArray:
        """An array that the work of another stream has yet to write."""
        staged = self.api.allocate_pinned(value.nbytes)
        ctypes.memmove(staged, value.ctypes.data, value.nbytes)
        memory = self.device.memory.empty((N,), "float32")
        self.api.copy_to_device(memory.address, staged, value.nbytes, self.producer)
        return DeviceArray(memory.address, (N,), (4,), memory.dtype, 0, self.producer, owner=memory)


def right(order: HostOrder, seed: int) -> bool:
    """Whether launches that are in flight together all give their own answers."""
    opened, rng = Opened(order, seed), np.random.default_rng(seed)
    xs = [rng.standard_normal(N).astype(np.float32) for _ in range(9)]
    intos = [np.zeros(N, np.float32) if index % 2 else None for index in range(6)]
    events = [opened.launch(index, x, into) for index, (x, into) in enumerate(zip(xs, intos, strict=False))]
    produced = [opened.produced(x) for x in xs[6:]]
    events += [opened.launch(index, x) for index, x in enumerate(produced)]
    outs = []
    try:
        for event in events:
            event.wait()
            outs.append(host_view(event.outputs["out"]).copy())
        del events, event, produced
        opened.device.close()
    except (ContextLost, AssertionError):  # a copy found memory that was freed, or a stream was destroyed too early
        return False
    return all(np.array_equal(out, 2 * x) for out, x in zip(outs, xs, strict=True))


ORDERS: tuple[HostOrder, ...] = get_args(HostOrder)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("order", ORDERS)
def test_launches_are_right_in_every_order(order: HostOrder, seed: int) -> None:
    assert right(order, seed)


def test_an_output_holds_nothing_of_the_launch_before() -> None:
    opened = Opened("eager", 0)
    for value in (1, 0, 1, 0):
        event = opened.launch(0, np.full(N, value, np.float32))
        event.wait()
        assert np.array_equal(event.outputs["out"], np.full(N, 2 if value else np.nan, np.float32), equal_nan=True)


def staging_given_back_before_the_event(patch: pytest.MonkeyPatch) -> None:
    compute = stream._compute

    def early(api: Any, handle: int, operands: Operands) -> None:
        compute(api, handle, operands)
        if operands._staging_in is not None:
            operands._pools.release_staging(operands._staging_in)
            operands._staging_in = None

    patch.setattr(stream, "_compute", early)


def event_recorded_before_the_kernel(patch: pytest.MonkeyPatch) -> None:
    compute = stream._compute

    def late(api: Any, handle: int, operands: Operands) -> None:
        waiting.append(lambda: compute(api, handle, operands))

    def record(self: EmulatedApi, event: int, handle: int) -> None:
        recorded(self, event, handle)
        while waiting:
            waiting.pop()()

    waiting: list[Callable[[], None]] = []
    recorded = EmulatedApi.record_event
    patch.setattr(stream, "_compute", late)
    patch.setattr(EmulatedApi, "record_event", record)


def producer_not_waited_for(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(stream._Events, "order_after", lambda self, producer, handle: None)


@pytest.fixture
def patch() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        yield patch


@pytest.mark.parametrize(
    "bug", [staging_given_back_before_the_event, event_recorded_before_the_kernel, producer_not_waited_for]
)
def test_a_bug_of_the_host_shows_in_emulated_answers(
    bug: Callable[[pytest.MonkeyPatch], None], patch: pytest.MonkeyPatch
) -> None:
    bug(patch)
    assert not all(right(order, seed) for order in ORDERS for seed in range(3))


def test_work_that_comes_as_the_device_falls_asleep_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device's thread ends when it has had no work for a while. Work may come at that moment."""
    api = EmulatedApi("sm_80", EmulationOptions(), ContextOptions(), "eager")
    handle, event, done = api.create_stream(), api.create_event(), threading.Event()

    def waiter() -> None:
        api.record_event(event, handle)
        api.synchronize_event(event)
        done.set()

    def no_longer(seconds: float) -> bool:
        if not done.is_set():
            threading.Thread(target=waiter, daemon=True).start()
            api._recorded.wait(0.3)  # releases the lock, as a wait that ends does until it has it again
        return False

    monkeypatch.setattr(api._enqueued, "wait", no_longer)
    with api._lock:
        api.wake()
    assert done.wait(10)
