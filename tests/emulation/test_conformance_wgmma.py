"""wgmma of every size, element, layout and operand place, against the second reading's product."""

from __future__ import annotations

import dataclasses
import itertools
import struct
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from isa import formats, fragments, sums, wgmma
from kernel_runs import ORDERS, KernelRun, Runner, emulated_runner, pointer
from second_reading import KINDS, MIXED, START, Kind, Products, image_of_values, registers_of

FILE = "conformance/wgmma.cu"
IMAGE = 1 << 16
# The widest operands of every layout lie in the image.
A = [wgmma.Descriptor(0, *places) for places in ((1024, 128, 0), (2048, 256, 32), (4096, 512, 64), (16, 1024, 128))]
B = [dataclasses.replace(a, start=16384) for a in A]


def product(kind: Kind, registers: bool, every_layout: bool = False) -> Products:
    rng = np.random.default_rng(kind.n)
    pairs = list(itertools.product(A, B) if every_layout else zip(A, B, strict=True))
    a = registers_of(rng, kind.element, len(pairs)) if registers else None
    before = (rng.integers(-64, 65, (len(pairs), 128, kind.n // 2)) / 8).astype(np.float32)
    return Products(kind, image_of_values(rng, kind.element, IMAGE), pairs, a, before)


def check(runner: Runner, made: Products) -> None:
    run, expected = made.case()
    for result in runner(run):
        result.check(**expected)


@pytest.mark.parametrize("element", ["f16", "bf16", "e4m3", "e5m2"])
def test_every_kind_multiplies_from_shared_memory_and_from_registers(quick_runner: Runner, element: str) -> None:
    for kind in (kind for kind in KINDS if kind.element == element):
        check(quick_runner, product(kind, False, every_layout=element == "bf16"))
        if not kind.trans_a:
            check(quick_runner, product(kind, True))


@pytest.mark.parametrize("registers", [False, True])
def test_a_product_is_the_same_in_every_order(runner: Runner, registers: bool) -> None:
    check(runner, product(Kind("bf16", False, True, 40), registers))


def test_groups_overlap_and_a_fresh_accumulator_is_not_read(runner: Runner) -> None:
    made = product(Kind("f16", False, False, 64), False)._replace(accumulate=False)
    first, second = made.expected()[:2]
    descriptors = np.array([x.encoded() for pair in made.pairs[:2] for x in pair], np.uint64)
    arrays = {"image": made.image, "descriptors": descriptors, "out": np.zeros_like(first)}
    run = KernelRun(
        FILE,
        "multiply_groups",
        arrays,
        lambda place: [
            pointer(place, "image"),
            struct.pack("<I", IMAGE),
            *(pointer(place, name) for name in ("descriptors", "out")),
        ],
        block=128,
        shared_bytes=IMAGE,
    )
    for result in runner(run):
        result.check(out=2 * first + second)


def check_mixed(runner: Runner, image: npt.NDArray[np.uint8]) -> None:
    """A of e4m3 in registers, B of e5m2."""
    made = product(MIXED, True)._replace(image=image)
    assert made.a is not None
    form, other, layout = formats.FORMATS["e4m3"], formats.FORMATS["e5m2"], fragments.wgmma_d(MIXED.n)
    memory = np.concatenate([np.zeros(START, np.uint8), image])
    wanted = []
    for a, (_, b), before in zip(made.a, made.pairs, made.before, strict=True):
        left = formats.decoded(fragments.wgmma_a(8).given(fragments.unpacked(a, np.uint8)), "e4m3")
        right = formats.decoded(b.moved(START).taken(memory, "k", MIXED.n, other), "e5m2")
        wanted.append(layout.taken(sums.hopper_fp8(left, right, layout.given(before), form, other)))
    for result in runner(made.run()):
        result.check(d=np.array(wanted))


def test_e4m3_in_registers_goes_with_e5m2(quick_runner: Runner) -> None:
    check_mixed(quick_runner, image_of_values(np.random.default_rng(2), "e5m2", IMAGE))


def test_emulated_sums_of_mixed_products_have_the_exponents_of_their_own_formats(module_cache: Path) -> None:
    """e5m2 numbers of 2^-14 and more are normal, and e4m3 ones of 2^-6 and more. This is a model, not for a GPU."""
    every = np.arange(256, dtype=np.uint8)
    finite = every[np.isfinite(formats.decoded(every, "e5m2"))]
    check_mixed(emulated_runner(module_cache, orders=ORDERS[:1]), np.random.default_rng(3).choice(finite, IMAGE))


@pytest.mark.parametrize("registers", [False, True])
def test_sums_of_8_bit_products_keep_infinities_and_nans(quick_runner: Runner, registers: bool) -> None:
    made = product(Kind("e4m3", False, False, 64), registers)
    nan = 0x7F
    made.image[[5, IMAGE - 1]] = nan
    made.image[16384 + 7] = nan
    if made.a is not None:
        made.a[0, 3, 0] = nan
    made.before[0, 4, 6], made.before[0, 5, 6] = np.inf, -np.inf
    expected = made.expected(truncated=False)
    assert 0 < np.isnan(expected).sum() < expected.size
    assert np.isinf(expected).any()
    for result in quick_runner(made.run()):
        result.check(d=expected)


def test_descriptors_hold_address_offsets_and_swizzle(quick_runner: Runner) -> None:
    address = 0x8C00
    made = [(128, 256, 0), (16, 256, 32), (4096, 512, 64), (16384, 1024, 128)]
    expected = np.array([wgmma.Descriptor(address, *places).encoded() for places in made], np.uint64)
    arrays = {"out": np.zeros(4, np.uint64)}
    run = KernelRun(
        FILE, "descriptors", arrays, lambda place: [struct.pack("<I", address), pointer(place, "out")], block=1
    )
    for result in quick_runner(run):
        result.check(out=expected)
