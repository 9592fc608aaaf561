"""Launches with the same steps: placed and packed once, without a new event, block or clearing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from fakes.bench import KERNELS, Bench, floats, on_device, pack
from fakes.cuda import FakeCuda
from inside.planning import backward_plan, bind_backward

from gpu_actors import ContextOptions, Cubin, FlashBackward
from gpu_actors.devices.cuda.api import DeviceProperties
from gpu_actors.devices.cuda.device import CudaDevice
from gpu_actors.devices.cuda.null_api import NullApi
from gpu_actors.devices.cuda.operands import Placement, StreamMemory
from gpu_actors.devices.interface import Buffer, Kernels, Launch, ScratchSpec, Steps


class Packing:
    """Counts how often parameters are packed."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, buffers: Mapping[str, Buffer]) -> bytes:
        self.count += 1
        return pack(buffers)


@pytest.fixture(params=["late", "random"])
def bench(request: pytest.FixtureRequest) -> Bench:
    return Bench(FakeCuda(dict(KERNELS), order=request.param, seed=3))


def like(first: Launch, x: Any, into: Any = None) -> Launch:
    """Another launch with the steps of the first."""
    (spec,) = first.outputs.values()
    return Launch(
        None, {"x": x}, {"out": spec._replace(shape=x.shape, into=into)}, first.oracle, first.steps, first.scratch
    )


def first_of(bench: Bench, x: Any, packing: Packing, into: Any = None) -> Launch:
    launch = bench.of(x, pack=packing, into=into)
    launch.steps = Steps(launch.steps)
    return launch


def value(bench: Bench, array: Any) -> np.ndarray[Any, Any]:
    return bench.cuda.memory.array(array.address, array.shape, np.float32)


def test_parameters_are_packed_once_for_the_same_addresses(bench: Bench) -> None:
    packing = Packing()
    xs = [on_device(bench, floats(4)) for _ in range(3)]
    outs = [on_device(bench, np.zeros(4, np.float32)) for _ in range(3)]
    launch = first_of(bench, xs[0], packing, outs[0])
    for round_ in range(2):
        events = [bench.stream.launch(like(launch, x, out)) for x, out in zip(xs, outs, strict=True)]
        for event, x, out in zip(events, xs, outs, strict=True):
            event.wait()
            np.testing.assert_array_equal(value(bench, out), 2 * value(bench, x))
            value(bench, out)[:] = 0
        assert packing.count == 3, round_


def test_host_arrays_are_staged_anew_though_their_place_is_known(bench: Bench) -> None:
    packing = Packing()
    xs = [floats(4) for _ in range(5)]
    launch = first_of(bench, xs[0], packing)
    events = [bench.stream.launch(like(launch, x)) for x in xs]
    for event, x in zip(events, xs, strict=True):
        event.wait()
        np.testing.assert_array_equal(event.outputs["out"], 2 * x)
    assert packing.count == 1


def test_operands_of_another_kind_are_placed_anew(bench: Bench) -> None:
    """They differ in shape, in strides, or in whether they lie on the host."""
    packing = Packing()
    on, host = on_device(bench, floats(4, 4)), floats(4, 4)
    outs = {shape: on_device(bench, np.zeros(shape, np.float32)) for shape in ((4, 4), (2, 4))}
    launch = first_of(bench, on, packing)
    given: list[Any] = [on, on.transpose(), on[:2], host, host[:2], on]
    block = value(bench, on).copy()
    wanted = [block, block.T, block[:2], host, host[:2], block]
    for number, (x, expected) in enumerate(zip(given, wanted, strict=True), 1):
        out = outs[x.shape]
        bench.stream.launch(like(launch, x, out)).wait()
        np.testing.assert_array_equal(value(bench, out), 2 * expected)
        assert packing.count == number


def test_a_launch_moves_with_the_streams_memory(bench: Bench) -> None:
    packing = Packing()
    small, large = floats(4), floats(4000)
    launch = first_of(bench, small, packing)
    bench.stream.launch(like(launch, small)).wait()
    bench.stream.launch(first_of(bench, large, packing)).wait()
    event = bench.stream.launch(like(launch, small))
    event.wait()
    np.testing.assert_array_equal(event.outputs["out"], 2 * small)


def test_another_stream_places_them_in_its_own_memory(bench: Bench) -> None:
    packing, x = Packing(), floats(4)
    launch = first_of(bench, x, packing)
    for stream in (bench.stream, bench.device.open_stream("other"), bench.stream):
        event = stream.launch(like(launch, x))
        event.wait()
        np.testing.assert_array_equal(event.outputs["out"], 2 * x)
    assert packing.count == 3


def test_few_bound_launches_are_remembered(bench: Bench) -> None:
    packing = Packing()
    xs = [on_device(bench, floats(4)) for _ in range(Placement.MOST_BOUND + 1)]
    out = on_device(bench, np.zeros(4, np.float32))
    launch = first_of(bench, xs[0], packing, out)
    for x in (*xs, xs[-1], xs[0]):
        bench.stream.launch(like(launch, x, out)).wait()
        np.testing.assert_array_equal(value(bench, out), 2 * value(bench, x))
    assert packing.count == len(xs) + 1
    placement = launch.steps.placement  # type: ignore[attr-defined]
    assert len(placement.bound) == Placement.MOST_BOUND


def test_a_warm_launch_creates_allocates_and_clears_nothing(bench: Bench) -> None:
    packing = Packing()
    producer = bench.cuda.new_stream()
    x, out = on_device(bench, floats(4), producer), on_device(bench, np.zeros(4, np.float32), producer)
    launch = first_of(bench, x, packing, out)
    launch.scratch = {
        "middle": ScratchSpec((64,), "float32"),
        "counter": ScratchSpec((1,), "int32", zero=True, rearmed=True),
    }
    bench.stream.launch(launch).wait()
    bench.cuda.calls.clear()
    bench.stream.launch(like(launch, x, out)).wait()
    calls = Counter(bench.cuda.calls)
    for asked in ("event_done", "synchronize_event"):
        calls.pop(asked, None)
    assert calls == {"is_capturing": 1, "record_event": 2, "wait_event": 1, "launch_kernel": 1}


@pytest.mark.parametrize(("capability", "kernel"), [(80, "backward_mma"), (90, "backward_sm90")])
@pytest.mark.parametrize(
    ("dtype", "bias", "options"),
    [
        ("float16", None, {"causal": True}),
        ("bfloat16", None, {"deterministic": True}),
        ("float16", "float16", {"deterministic": True}),
        ("bfloat16", "float32", {}),
    ],
)
def test_a_warm_backward_allocates_its_answers_alone(
    monkeypatch: pytest.MonkeyPatch,
    capability: int,
    kernel: str,
    dtype: str,
    bias: str | None,
    options: dict[str, Any],
) -> None:
    properties = DeviceProperties("null", capability, 80 << 30, 132)
    monkeypatch.setattr(NullApi, "properties", lambda api: properties)
    api = NullApi()
    device = CudaDevice(0, ContextOptions(), api)
    dout, q, k, v, out = (device.allocate((2, 256, 8, 128), dtype) for _ in range(5))
    request = FlashBackward(
        q, k, v, dout=dout, out=out, lse=device.allocate((2, 8, 256), "float32"),
        bias=None if bias is None else device.allocate((1, 8, 256, 256), bias), **options,
    )  # fmt: skip
    plan = backward_plan(request, device, "float64")
    assert plan.program is not None
    names = [key.kernel for key in plan.program.keys]
    assert kernel in names
    kernels = Kernels(device.load(Cubin(b"image", device.info.arch, (name,), "", {}), name) for name in names)
    stream = device.open_stream("test")
    answers = 0
    for _ in range(3):  # the answers' memory has two orders, and then the first again
        api.calls.clear()
        event = stream.launch(bind_backward(plan, request, kernels))
        event.wait()
        answers = len(event.outputs)
        del event
    calls = Counter(api.calls)
    for asked in ("event_done", "synchronize_event"):
        calls.pop(asked, None)
    assert answers == (3 if bias is None else 4)
    assert calls == {"allocate": answers, "free": answers, "launch_kernel": 3, "record_event": 1}


def test_a_large_launch_has_memory_of_its_own(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StreamMemory, "MOST", 1 << 12)
    packing = Packing()
    before = bench.cuda.leaks().get("blocks", 0)
    for size, blocks in ((4, 1), (400, 1), (4000, 1), (4, 1)):
        x = floats(size)
        event = bench.stream.launch(first_of(bench, x, packing))
        event.wait()
        np.testing.assert_array_equal(event.outputs["out"], 2 * x)
        del event
        assert bench.cuda.leaks()["blocks"] == before + blocks, size
    bench.device.close()
    assert bench.cuda.leaks() == {}


def test_an_event_that_comes_back_to_a_closed_stream_is_destroyed(bench: Bench) -> None:
    event = bench.launch(floats(4))
    event.wait()
    events = bench.stream._events  # type: ignore[attr-defined]
    late = events.take()
    bench.device.close()
    events.put_back(late)
    assert bench.cuda.leaks() == {}
