"""Boxes of tensor maps, loaded, stored and added over every edge: the kernels' side against the second reading."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from isa import tma
from kernel_runs import ORDERS, Place, Runner, TensorMapArgument, emulated_module, emulated_runner
from second_reading import SWIZZLES, TENSORS_FILE, box_case, refusal

from gpu_actors.devices.emulation import EmulationFault

pytestmark = pytest.mark.timeout(300)  # the first test of a process builds the module of all

LARGEST_BOX = 16384


@st.composite
def tensor_maps(draw: st.DrawFn, rank: int) -> tma.TensorMap:
    """A tensor with gaps between its rows, and a box that a small piece of shared memory holds."""
    size = draw(st.sampled_from((1, 2, 4)))
    mode = draw(st.sampled_from(list(SWIZZLES)))
    units = mode // 16 or draw(st.integers(1, 8))
    box = [units * 16 // size]
    for _ in range(rank - 1):
        room = LARGEST_BOX // (int(np.prod(box)) * size)
        box.append(draw(st.integers(1, min(12, room))))
    dims = [draw(st.integers(1, 70)), *(draw(st.integers(1, 14 if rank < 4 else 5)) for _ in range(rank - 1))]
    strides = []
    pitch = dims[0] * size
    for extent in dims[1:]:
        pitch = -(-pitch // 16) * 16 + 16 * draw(st.integers(0, 2))
        strides.append(pitch)
        pitch *= extent
    return tma.TensorMap(size, tuple(dims), tuple(strides), tuple(box), mode)


@st.composite
def coordinates(draw: st.DrawFn, made: tma.TensorMap) -> tuple[int, ...]:
    """From boxes that end just before the tensor to boxes that begin just behind it."""
    return tuple(draw(st.integers(-count - 1, extent + 1)) for count, extent in zip(made.box, made.dims, strict=True))


@st.composite
def load_coordinates(draw: st.DrawFn, made: tma.TensorMap) -> tuple[int, ...]:
    """As `coordinates`, at the start of a unit of 16 bytes."""
    inner, *outer = draw(coordinates(made))
    return inner - inner % (16 // made.size), *outer


@st.composite
def store_coordinates(draw: st.DrawFn, made: tma.TensorMap) -> tuple[int, ...]:
    """From the first element to boxes just behind the tensor, because a GPU refuses stores that begin before it."""
    unit = 16 // made.size
    inner, *outer = (draw(st.integers(0, extent + 1)) for extent in (-(-made.dims[0] // unit), *made.dims[1:]))
    return inner * unit, *outer


def moved(runner: Runner, rank: int, data: st.DataObject) -> None:
    add = data.draw(st.booleans())
    made = data.draw(tensor_maps(rank))
    load, store = data.draw(load_coordinates(made)), data.draw(store_coordinates(made))
    case = box_case(made, load, store, add and made.size > 1, data.draw(st.integers(0, 99)))
    for result in runner(case.run):
        result.check(**case.expected)


@pytest.mark.parametrize("rank", range(1, 6))
@settings(max_examples=10, deadline=None)
@given(data=st.data())
def test_a_box_passes_over_every_edge_as_the_isa_says(quick_runner: Runner, rank: int, data: st.DataObject) -> None:
    moved(quick_runner, rank, data)


@pytest.mark.sweep
@pytest.mark.parametrize("rank", range(1, 6))
@settings(max_examples=400, deadline=None)
@given(data=st.data())
def test_many_boxes_pass_as_the_isa_says(quick_runner: Runner, rank: int, data: st.DataObject) -> None:
    moved(quick_runner, rank, data)


@pytest.mark.parametrize("rank", range(1, 6))
@settings(max_examples=10, deadline=None)
@given(data=st.data())
def test_both_refuse_the_same_places(module_cache: Path, rank: int, data: st.DataObject) -> None:
    """On a GPU each refusal would end the context."""
    made = data.draw(tensor_maps(rank))
    add = data.draw(st.booleans()) and made.size > 1
    load, store = data.draw(coordinates(made)), data.draw(coordinates(made))
    refusal(emulated_module(TENSORS_FILE, {}, module_cache), made, load, store, add)


def test_rows_shorter_than_the_swizzle_are_refused_by_both(module_cache: Path) -> None:
    """The driver takes such maps, and no document says where the bytes of their boxes lie."""
    with pytest.raises(ValueError, match="is not said"):
        tma.TensorMap(4, (40, 8), (160,), (16, 4), 128)
    case = box_case(tma.TensorMap(4, (40, 8), (160,), (32, 4), 128), (0, 0), (0, 0), False, 0)

    def params(place: Place) -> list[bytes]:
        narrow = TensorMapArgument("source", "float32", (40, 8), (160,), (16, 4), "128B")
        return [place.tensor_map(narrow)] * 2 + case.run.params(place)[2:]

    with pytest.raises(EmulationFault, match="rows of 64 bytes in a swizzle of 128") as caught:
        list(emulated_runner(module_cache, orders=ORDERS[:1])(dataclasses.replace(case.run, params=params)))
    assert caught.value.kind == "descriptor"
