"""wgmma by any descriptor: the kernels' side against the second reading, on raw registers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from isa import formats, swizzle, wgmma
from kernel_runs import Runner, launch_emulated
from second_reading import KINDS, ORDER, START, Kind, Products, image_of_values, module_of, registers_of

from gpu_actors.devices.emulation import EmulationFault

pytestmark = pytest.mark.timeout(300)  # the first test of a process builds the module of all

IMAGE = 1 << 16
PAIRS = 6

seeds = st.integers(0, 1 << 32)
offsets = st.one_of(
    st.integers(0, 60).map(lambda unit: 16 * unit), st.sampled_from([1024, 1536, 2048, 4096, 8192, 10240])
)


@st.composite
def descriptors(draw: st.DrawFn, major: wgmma.Major, mn: int, size: int) -> wgmma.Descriptor:
    """Any descriptor whose matrix lies within the image and starts in the first line of its swizzle's pattern."""
    mode = draw(st.sampled_from(list(swizzle.TABLES)))
    unit = draw(st.integers(0, 7)) if mode else draw(st.integers(0, 63))
    start = swizzle.period(mode) * draw(st.integers(0, 12)) + 16 * unit
    made = wgmma.Descriptor(start, draw(offsets), draw(offsets), mode)
    if made.addresses(major, mn, 32 // size, size).max() + size <= IMAGE:
        return made
    return wgmma.Descriptor(start, made.leading % 1024, made.stride % 1024, mode)


@st.composite
def products(draw: st.DrawFn) -> Products:
    kind = draw(st.sampled_from(KINDS))
    registers = not kind.trans_a and draw(st.booleans())
    rng = np.random.default_rng(draw(seeds))
    size = formats.FORMATS[kind.element].size
    a = descriptors("mn" if kind.trans_a else "k", 64, size)
    b = descriptors("mn" if kind.trans_b else "k", kind.n, size)
    pairs = draw(st.lists(st.tuples(a, b), min_size=PAIRS, max_size=PAIRS))
    return Products(
        kind,
        image_of_values(rng, kind.element, IMAGE),
        pairs,
        registers_of(rng, kind.element, PAIRS) if registers else None,
        rng.integers(-99, 100, (PAIRS, 128, kind.n // 2)).astype(np.float32),
        draw(st.booleans()),
    )


def check(runner: Runner, made: Products) -> None:
    run, expected = made.case()
    for result in runner(run):
        result.check(**expected)


@settings(max_examples=30, deadline=None)
@given(made=products())
def test_a_product_is_the_one_of_the_isa(quick_runner: Runner, made: Products) -> None:
    check(quick_runner, made)


@pytest.mark.sweep
@settings(max_examples=1500, deadline=None)
@given(made=products())
def test_many_products_are_those_of_the_isa(quick_runner: Runner, made: Products) -> None:
    check(quick_runner, made)


def finite_image(rng: np.random.Generator, element: str) -> np.ndarray:
    """Random finite patterns of 8 bits."""
    every = np.arange(256, dtype=np.uint8)
    finite = every[np.isfinite(formats.decoded(every, element))]
    return rng.choice(finite, IMAGE)


@pytest.mark.parametrize("element", ["e4m3", "e5m2"])
@settings(max_examples=4, deadline=None)
@given(seed=seeds, spread=st.sampled_from([0.0, 1e-6, 1.0, 1e4]))
def test_a_sum_of_8_bit_products_keeps_the_bits_that_were_measured(
    quick_runner: Runner, element: str, seed: int, spread: float
) -> None:
    """Sums of finite elements, also subnormal ones, with and without an accumulator."""
    rng = np.random.default_rng(seed)
    kind = Kind(element, False, False, 64)
    pairs = [
        (wgmma.Descriptor(8192 * i, 16, 1024, 128), wgmma.Descriptor(32768 + 8192 * i, 16, 512, 64)) for i in (0, 1, 2)
    ]
    before = (spread * rng.standard_normal((3, 128, 32))).astype(np.float32)
    check(quick_runner, Products(kind, finite_image(rng, element), pairs, None, before))


@pytest.mark.parametrize(
    "made",
    [
        wgmma.Descriptor(1024 + 128, 16, 1024, 128),
        wgmma.Descriptor(1024, 16, 1024, 128, base_offset=1),
        wgmma.Descriptor(512 + 256, 16, 512, 64),
        wgmma.Descriptor(128, 16, 256, 32),
    ],
    ids=str,
)
def test_what_the_emulation_cannot_read_it_refuses(module_cache: Path, made: wgmma.Descriptor) -> None:
    """The ISA has patterns that begin elsewhere. Our kernels do not use them, and they are refused."""
    kind = KINDS[0]
    rng = np.random.default_rng(0)
    plain = wgmma.Descriptor(0, 16, 1024, 128)
    image = image_of_values(rng, kind.element, IMAGE)
    before = np.zeros((1, 128, kind.n // 2), np.float32)
    with pytest.raises(EmulationFault) as caught:
        launch_emulated(module_of(module_cache), Products(kind, image, [(plain, made)], None, before).run(), ORDER)
    assert caught.value.kind == "descriptor"
    assert made.moved(START).addresses("k", 8, 16, 2).max() < IMAGE + START
