"""CudaDevice over a fake driver that is as late and as strict as a GPU may be (see fake_cuda)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from fakes.bench import IMAGE, KERNELS, RNG, Bench, floats, in_thread, pack
from fakes.cuda import FakeCuda

from gpu_actors import Cubin
from gpu_actors.devices.interface import Buffer, Event
from gpu_actors.errors import InvalidRequest, LaunchError, Unsupported


@pytest.fixture
def bench() -> Bench:
    return Bench()


# What a launch does


def test_a_launch_goes_up_computes_and_comes_down_in_that_order(bench: Bench) -> None:
    x = floats(4, 5)
    launch = bench.of(x)
    bench.cuda.calls.clear()
    event = bench.stream.launch(launch)
    work = ("copy_to_device", "launch_kernel", "copy_to_host", "record_event")
    assert [call for call in bench.cuda.calls if call in work] == list(work)
    assert not event.done()
    event.wait()
    assert event.done()
    np.testing.assert_array_equal(event.outputs["out"], 2 * x)


@pytest.mark.parametrize(
    "dtype", ["float16", "bfloat16", "float32", "float64", "float8_e4m3fn", "float8_e5m2", "int32"]
)
def test_every_dtype_arrives_and_returns_bit_by_bit(bench: Bench, dtype: str) -> None:
    bits = RNG.integers(0, 256, (3, 7 * np.dtype(dtype).itemsize), np.uint8)
    out = bench.run(bits.view(dtype), entry="copy_bits")
    assert out.dtype == np.dtype(dtype)
    np.testing.assert_array_equal(out.view(np.uint8), bits)


@pytest.mark.parametrize(
    "cut",
    [lambda a: a[::2, 1:, ::-1], lambda a: a.transpose(2, 0, 1), lambda a: np.broadcast_to(a[:, :1], a.shape)],
    ids=["sliced and reversed", "transposed", "broadcast"],
)
def test_a_host_input_with_any_strides_arrives_in_row_major_order(bench: Bench, cut: Callable[[Any], Any]) -> None:
    x = cut(RNG.standard_normal((4, 5, 6)).astype(ml_dtypes.bfloat16))
    seen: list[Buffer] = []

    def spy(buffers: Mapping[str, Buffer]) -> bytes:
        seen.append(buffers["x"])
        return pack(buffers)

    np.testing.assert_array_equal(bench.run(x, entry="copy_bits", pack=spy), x)
    assert seen[0].strides == (x.shape[1] * x.shape[2], x.shape[2], 1)


def test_operands_are_aligned_for_vector_loads(bench: Bench) -> None:
    seen: dict[str, Buffer] = {}
    launch = bench.of(floats(3), entry="copy_bits")
    launch.inputs = {"odd": np.ones(3, np.int8), "x": floats(3)}

    def spy(buffers: Mapping[str, Buffer]) -> bytes:
        seen.update(buffers)
        return pack(buffers)

    launch.steps = (launch.steps[0]._replace(pack=spy),)
    bench.stream.launch(launch).wait()
    assert all(buffer.address % 256 == 0 for buffer in seen.values())
    assert len({buffer.address for buffer in seen.values()}) == 3


def test_the_callers_array_is_filled_in_place(bench: Bench) -> None:
    x, storage = floats(4, 6), np.full((6, 8), np.nan, np.float32)
    into = storage.T[1:5]
    assert bench.run(x, into=into) is into
    np.testing.assert_array_equal(into, 2 * x)
    assert np.isnan(storage.T[0]).all()
    assert np.isnan(storage.T[5:]).all()


@pytest.mark.parametrize(
    "into",
    [np.zeros((3, 4), np.float32), np.zeros((4, 3), np.float64), np.broadcast_to(np.float32(0), (4, 3))],
    ids=["shape", "dtype", "read-only"],
)
def test_an_output_that_does_not_fit_is_refused_by_name(bench: Bench, into: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        bench.launch(floats(4, 3), into=into)
    assert caught.value.field == "out"
    assert "launch_kernel" not in bench.cuda.calls


def test_nothing_is_launched_or_copied_for_empty_arrays(bench: Bench) -> None:
    out = bench.run(floats(0, 8), grid=(0, 4, 1))
    assert out.shape == (0, 8)
    assert not {"launch_kernel", "copy_to_device", "copy_to_host", "allocate"} & set(bench.cuda.calls)


def test_an_empty_grid_that_would_leave_an_output_unwritten_is_refused(bench: Bench) -> None:
    with pytest.raises(LaunchError, match="empty grid"):
        bench.launch(floats(2, 8), grid=(0, 4, 1))


def test_more_shared_memory_than_the_default_is_allowed_once(bench: Bench) -> None:
    x = floats(4)
    kernel = bench.device.load(IMAGE, "scale")
    for shared_bytes in (100 << 10, 90 << 10, 100 << 10):
        np.testing.assert_array_equal(bench.run(x, kernel=kernel, shared_bytes=shared_bytes), 2 * x)
    assert bench.cuda.calls.count("allow_shared_memory") == 1


def test_more_shared_memory_than_there_is_fails_that_launch_alone(bench: Bench) -> None:
    with pytest.raises(LaunchError, match="allow_shared_memory"):
        bench.launch(floats(4), shared_bytes=300 << 10)
    np.testing.assert_array_equal(bench.run(np.float32([1, 2])), [2, 4])


def test_a_launch_without_a_kernel_is_refused(bench: Bench) -> None:
    launch = bench.of(floats(2))
    launch.steps = ()
    with pytest.raises(LaunchError, match="needs a kernel"):
        bench.stream.launch(launch)


def test_a_failing_pack_leaves_nothing_behind(bench: Bench) -> None:
    def refuse(buffers: Mapping[str, Buffer]) -> bytes:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        bench.launch(floats(4), pack=refuse)
    bench.device.close()
    assert bench.cuda.leaks() == {}


# Kernels


def test_a_cubin_is_loaded_once_however_often_it_is_asked_for(bench: Bench) -> None:
    first = bench.device.load(IMAGE, "scale")
    again = bench.device.load(Cubin(bytes([*b"image"]), "sm_90a", ("scale",), "", {}), "scale")
    assert again.handle is first.handle
    bench.device.load(IMAGE, "bump")
    assert bench.cuda.calls.count("load_module") == 1
    bench.device.load(Cubin(b"another", "sm_90a", ("scale",), "", {}), "scale")
    assert bench.cuda.calls.count("load_module") == 2


def test_an_entry_point_that_is_not_there_is_a_launch_error(bench: Bench) -> None:
    with pytest.raises(LaunchError, match="nothing_of_the_kind"):
        bench.device.load(IMAGE, "nothing_of_the_kind")


def test_a_kernel_of_another_device_is_refused(bench: Bench) -> None:
    kernel = Bench().device.load(IMAGE, "scale")
    with pytest.raises(LaunchError, match="not loaded by this device"):
        bench.launch(floats(4), kernel=kernel)


@pytest.mark.parametrize(
    ("capability", "arch", "shown"),
    [(90, None, "sm_90a"), (86, None, "sm_86"), (86, "sm_80", "sm_80"), (90, "sm_90a", "sm_90a")],
)
def test_the_device_says_whose_kernels_it_runs(capability: int, arch: str | None, shown: str) -> None:
    info = Bench(FakeCuda(capability=capability), arch=arch).device.info
    assert (info.kind, info.name, info.arch, info.runs_kernels) == ("cuda", "Fake", shown, True)


@pytest.mark.parametrize(("capability", "arch"), [(90, "sm_80"), (80, "sm_86"), (89, "sm_90a"), (100, "sm_90a")])
def test_kernels_that_the_device_cannot_run_are_refused_when_it_is_opened(capability: int, arch: str) -> None:
    with pytest.raises(Unsupported) as caught:
        Bench(FakeCuda(capability=capability), arch=arch)
    assert caught.value.field == "arch"
    assert caught.value.nearest in ("sm_90a", "sm_80", "sm_89", "sm_100a")


# Staging


def test_staging_is_not_used_again_before_its_copies_have_happened(bench: Bench) -> None:
    inputs = [floats(64, 64) for _ in range(6)]
    events = [bench.launch(x) for x in inputs]
    for event, x in reversed(list(zip(events, inputs, strict=True))):
        event.wait()
        np.testing.assert_array_equal(event.outputs["out"], 2 * x)


def test_staging_is_used_again_once_its_launch_is_over(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench.device.memory._staging, "_max_idle_bytes", 1 << 15)
    bench.run(floats(64, 64))
    bench.cuda.calls.clear()
    for _ in range(10):
        bench.run(floats(64, 64))
    assert "allocate_pinned" not in bench.cuda.calls


def test_staging_beyond_the_bound_is_released_when_its_launch_is_over(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench.device.memory._staging, "_max_idle_bytes", 1 << 14)
    bench.run(floats(64, 64))
    assert bench.cuda.leaks().get("pinned", 0) == 1


def test_an_input_may_be_changed_once_launch_has_returned(bench: Bench) -> None:
    x = floats(16)
    expected = 2 * x
    event = bench.launch(x)
    x[:] = np.nan
    event.wait()
    np.testing.assert_array_equal(event.outputs["out"], expected)


@pytest.mark.parametrize("seed", range(5))
def test_results_are_right_in_any_order_that_streams_allow(seed: int) -> None:
    bench = Bench(FakeCuda(dict(KERNELS), order="random", seed=seed))
    random = np.random.default_rng(seed)
    streams = [bench.stream, bench.device.open_stream("other")]
    flying: list[tuple[Event, np.ndarray[Any, Any]]] = []
    for _ in range(30):
        x = floats(int(random.integers(1, 3000)))
        flying.append((bench.launch(x, streams[random.integers(2)]), x))
        if len(flying) > 5 or random.random() < 0.3:
            event, x = flying.pop(random.integers(len(flying)))
            event.wait()
            np.testing.assert_array_equal(event.outputs["out"], 2 * x)
    for event, x in flying:
        event.wait()
        np.testing.assert_array_equal(event.outputs["out"], 2 * x)
    bench.device.close()
    assert bench.cuda.leaks() == {}


# Threads


@pytest.mark.parametrize("seed", range(2))
def test_actors_and_completion_threads_share_a_device(seed: int) -> None:
    bench = Bench(FakeCuda(dict(KERNELS), order="random", seed=seed))
    wrong: list[BaseException] = []

    def actor(number: int) -> None:
        random = np.random.default_rng((seed, number))
        stream = bench.device.open_stream(f"actor-{number}")
        waiters = []

        def check(event: Event, x: np.ndarray[Any, Any]) -> None:
            try:
                event.wait()
                np.testing.assert_array_equal(event.outputs["out"], 2 * x)
            except BaseException as error:
                wrong.append(error)

        for _ in range(20):
            x = random.standard_normal(int(random.integers(1, 4000))).astype(np.float32)
            waiters.append(in_thread(functools.partial(check, bench.launch(x, stream), x))[0])
        for waiter in waiters:
            waiter.join(60)

    actors = [in_thread(functools.partial(actor, number)) for number in range(3)]
    for thread, _ in actors:
        thread.join(60)
    assert [ended for _, ended in actors] == [[None]] * 3
    assert wrong == []
    bench.device.close()
    assert bench.cuda.leaks() == {}
