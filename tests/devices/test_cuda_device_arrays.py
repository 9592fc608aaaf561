"""Arrays that lie on the device already: used in place, in the order of their producers' streams."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from typing import Any

import numpy as np
import pytest
from fakes.bench import Bench, floats, late_tensor, on_device
from fakes.cuda import LEGACY
from inside.arrays import DeviceArray, adopt

from gpu_actors.devices.interface import OutputSpec, ScratchSpec
from gpu_actors.errors import InvalidRequest, LaunchError


@pytest.fixture
def bench() -> Bench:
    return Bench()


# Arrays on the device


def test_the_producers_stream_is_waited_for_on_the_device(bench: Bench) -> None:
    x = floats(8, 3)
    tensor = late_tensor(bench, x)
    adopted = adopt(tensor, "q")
    event = bench.launch(adopted.array)
    assert tensor.asked == [LEGACY]
    while bench.cuda.step(bench.handle()):
        pass
    assert not event.done(), "the launch overtook the producer"
    event.wait()
    result = event.outputs["out"]
    np.testing.assert_array_equal(bench.cuda.memory.array(result.address, (8, 3), np.float32), 2 * x)
    assert not {"copy_to_device", "copy_to_host"} & set(bench.cuda.calls)


def test_an_output_in_the_callers_memory_waits_for_its_stream_too(bench: Bench) -> None:
    stream = bench.cuda.new_stream()
    x, into = on_device(bench, floats(4)), on_device(bench, floats(4), stream)
    still_reading = bench.cuda.memory.array(into.address, (4,), np.float32).copy()
    read: list[np.ndarray[Any, Any]] = []
    bench.cuda.enqueue(stream, lambda: read.append(bench.cuda.memory.array(into.address, (4,), np.float32).copy()))
    event = bench.launch(x, into=into)
    while bench.cuda.step(bench.handle()):
        pass
    event.wait()
    assert event.outputs["out"] is into
    np.testing.assert_array_equal(read[0], still_reading)


def test_a_stream_that_several_arrays_come_from_is_waited_for_once(bench: Bench) -> None:
    stream = bench.cuda.new_stream()
    launch = bench.of(on_device(bench, floats(4), stream))
    launch.inputs = {name: on_device(bench, floats(4), stream) for name in ("x", "y", "z")}
    bench.cuda.calls.clear()
    bench.stream.launch(launch).wait()
    assert bench.cuda.calls.count("wait_event") == 1


@pytest.mark.parametrize("last", range(3))
def test_each_of_several_producers_is_waited_for(bench: Bench, last: int) -> None:
    """Each array comes from its own stream, and one stream is behind the others."""
    streams = [bench.cuda.new_stream() for _ in range(3)]
    arrays = [on_device(bench, floats(4), stream) for stream in streams]
    launch, x = bench.of(arrays[last]), floats(4)
    launch.inputs = dict(zip("xyz", arrays[last:] + arrays[:last], strict=True))

    def write() -> None:
        bench.cuda.memory.array(arrays[last].address, (4,), np.float32)[:] = x

    bench.cuda.enqueue(streams[last], write)
    bench.cuda.hang(streams[last])
    event = bench.stream.launch(launch)
    bench.cuda.run_all()
    assert not event.done(), "the launch overtook a producer"
    bench.cuda.resume(streams[last])
    event.wait()
    out = event.outputs["out"]
    np.testing.assert_array_equal(bench.cuda.memory.array(out.address, (4,), np.float32), 2 * x)


def test_an_array_with_any_strides_is_read_where_it_lies(bench: Bench) -> None:
    x = floats(6, 4)
    array = on_device(bench, x).transpose()
    out = bench.run(array)
    np.testing.assert_array_equal(bench.cuda.memory.array(out.address, (4, 6), np.float32), 2 * x.T)


def test_a_cache_on_the_device_is_changed_in_place(bench: Bench) -> None:
    cache = on_device(bench, np.zeros(4, np.float32))
    launch = bench.of(cache, entry="bump")
    launch.inputs = {"cache": cache}
    launch.outputs = {"cache": OutputSpec((4,), "float32", cache), "out": OutputSpec((4,), "float32")}
    for count in (1, 2):
        event = bench.stream.launch(launch)
        event.wait()
        assert event.outputs["cache"] is cache
        out = event.outputs["out"]
        np.testing.assert_array_equal(bench.cuda.memory.array(out.address, (4,), np.float32), [count] * 4)


def test_a_host_array_cannot_be_changed_in_place(bench: Bench) -> None:
    cache = np.zeros(4, np.float32)
    launch = bench.of(cache, entry="bump")
    launch.inputs = {"cache": cache}
    launch.outputs = {"cache": OutputSpec((4,), "float32", cache)}
    with pytest.raises(LaunchError, match="in place"):
        bench.stream.launch(launch)


def test_a_cleared_output_with_gaps_is_refused(bench: Bench) -> None:
    wide = on_device(bench, floats(4, 8))
    x = on_device(bench, floats(4, 6))
    gaps = DeviceArray(wide.address, (4, 6), wide.strides, wide.dtype, 0, owner=wide)
    launch = bench.of(x, into=gaps)
    launch.outputs = {"out": OutputSpec((4, 6), "float32", gaps, zero=True)}
    with pytest.raises(LaunchError, match="must be contiguous"):
        bench.stream.launch(launch)


@pytest.mark.parametrize("given", [8, 24])
def test_scratch_contents_of_another_size_are_refused(bench: Bench, given: int) -> None:
    launch = bench.of(floats(4))
    launch.scratch = {"table": ScratchSpec((2,), "uint64", contents=lambda buffers: bytes(given))}
    with pytest.raises(LaunchError, match=f"'table' holds 16 bytes and was given {given}"):
        bench.stream.launch(launch)
    bench.device.close()
    assert bench.cuda.leaks() == {}


def test_host_and_device_arrays_mix_in_one_launch(bench: Bench) -> None:
    x, into = floats(5), np.zeros(5, np.float32)
    assert bench.run(on_device(bench, x), into=into) is into
    np.testing.assert_array_equal(into, 2 * x)


def test_outputs_lie_where_the_first_input_does_in_memory_of_its_library(bench: Bench) -> None:
    made: list[DeviceArray] = []

    def make(shape: tuple[int, ...], dtype: str) -> DeviceArray:
        made.append(on_device(bench, np.zeros(shape, dtype)))
        return made[-1]

    assert bench.run(on_device(bench, floats(5), make=make)) is made[0]
    own = bench.run(on_device(bench, floats(5)))
    assert isinstance(own, DeviceArray)
    assert isinstance(bench.run(floats(5)), np.ndarray)


def test_a_library_that_cannot_allocate_fails_the_launch_alone(bench: Bench) -> None:
    def make(shape: tuple[int, ...], dtype: str) -> DeviceArray:
        raise RuntimeError("device-side assert")

    x = on_device(bench, floats(4))
    with pytest.raises(LaunchError, match=r"out could not be allocated: RuntimeError\('device-side assert'\)"):
        bench.launch(dataclasses.replace(x, make=make))
    bench.run(x)


def test_an_array_on_another_device_is_refused_by_name(bench: Bench) -> None:
    x = DeviceArray(0x1000, (4,), (4,), np.dtype(np.float32), device=1)
    with pytest.raises(InvalidRequest, match="cuda:1") as caught:
        bench.launch(x)
    assert caught.value.field == "x"


def test_memory_that_the_device_made_is_freed_when_it_is_dropped(bench: Bench) -> None:
    array = bench.device.memory.empty((16, 4), "bfloat16")
    assert (array.shape, array.strides, array.dtype.name) == ((16, 4), (8, 2), "bfloat16")
    assert bench.cuda.leaks()["blocks"] == 1
    del array
    gc.collect()
    assert "blocks" not in bench.cuda.leaks()
    assert bench.device.memory.empty((0, 4), "float32").size == 0


def test_an_input_dropped_by_its_owner_lives_until_the_launch_is_over(bench: Bench) -> None:
    class Owner:
        pass

    owner = Owner()
    alive = weakref.ref(owner)
    x = floats(4)
    block = bench.cuda.put(x)
    event = bench.launch(DeviceArray(block.address, x.shape, x.strides, x.dtype, 0, owner=owner))
    del owner
    gc.collect()
    assert alive() is not None
    event.wait()
    gc.collect()
    assert alive() is None


def test_a_result_dropped_by_its_owner_is_freed_before_the_next_launch(bench: Bench) -> None:
    event = bench.launch(on_device(bench, floats(4)))
    event.wait()
    event.wait()
    assert event.outputs["out"].shape == (4,)
    assert bench.cuda.leaks()["blocks"] == 2  # the program's own input is one
    del event
    gc.collect()
    assert bench.cuda.leaks()["blocks"] == 1


def test_a_launch_that_nobody_waits_for_keeps_its_memory_until_it_is_over(bench: Bench) -> None:
    x = bench.device.memory.empty((4,), "float32")
    bench.cuda.memory.array(x.address, (4,), np.float32)[:] = 1
    bench.launch(x)  # the event is dropped at once
    del x
    gc.collect()
    bench.cuda.run_all()
    bench.run(floats(4))
    assert bench.device.lost is None
    bench.device.close()
    assert bench.cuda.leaks() == {}


def test_a_launch_that_nobody_waits_for_is_released_by_the_next_one(bench: Bench) -> None:
    bench.launch(floats(4))
    bench.cuda.run_all()
    gc.collect()
    event = bench.launch(floats(4))
    assert bench.cuda.leaks()["blocks"] == 1
    event.wait()
