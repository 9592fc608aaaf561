"""wgmma of every size, element, layout and operand place, against a product in NumPy."""

from __future__ import annotations

import dataclasses
import itertools
import struct
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
from fragments import DEPTH, a_fragment, small_values
from isa.formats import FORMATS
from isa.sums import hopper_fp8
from kernel_runs import KernelRun, Place, Runner, emulated_runner, pointer
from layouts import Operand, k_major, mn_major

FILE = "conformance/wgmma.cu"
Array = npt.NDArray[Any]


class Variant(NamedTuple):
    """One instruction: which are compiled into one module is a macro."""

    element: str
    n: int
    trans_a: bool = False
    trans_b: bool = False


EVERY_SIZE = [Variant("f16", n) for n in range(8, 257, 8)]
EVERY_KIND = [
    *(Variant(element, n) for element in ("bf16", "e4m3", "e5m2") for n in (8, 72, 256)),
    *(Variant("bf16", n, *trans) for n in (40, 192) for trans in itertools.product((False, True), repeat=2)),
    Variant("f16", 128, False, True),
]


def cases(variants: list[Variant]) -> dict[str, str]:
    def flag(value: bool) -> str:
        return str(value).lower()

    calls = (f"CASE({i}, {v.element}, {flag(v.trans_a)}, {flag(v.trans_b)}, {v.n})" for i, v in enumerate(variants))
    return {"WGMMA_CASES": " ".join(calls)}


class Product:
    """a (64, 2 steps of k), b (n, the same) and c, placed in shared memory in the given layouts."""

    def __init__(self, variant: Variant, layouts: tuple[str, str] = ("128B", "128B")) -> None:
        rng = np.random.default_rng(variant.n)
        depth = 2 * DEPTH[variant.element]
        self.variant = variant
        self.a = small_values(rng, (64, depth), variant.element)
        self.b = small_values(rng, (variant.n, depth), variant.element)
        self.c = (rng.integers(-64, 65, (64, variant.n)) / 8).astype(np.float32)
        self.d = self.c + self.a.astype(np.float32) @ self.b.astype(np.float32).T
        self.placed_a = place(self.a, layouts[0], variant.trans_a)
        self.placed_b = place(self.b, layouts[1], variant.trans_b)

    def run(self, entry: str, among: list[Variant]) -> KernelRun:
        a, b = self.placed_a, self.placed_b
        start_b = -(-len(a.image) // 1024) * 1024
        image = np.zeros(start_b + len(b.image), np.uint8)
        image[: len(a.image)] = a.image
        image[start_b:] = b.image
        number = among.index(self.variant)

        def params(place: Place) -> list[bytes]:
            numbers = (a.descriptor, b.descriptor + (start_b >> 4), a.step, b.step)
            head = pointer(place, "image") + struct.pack("<Ii4Q", len(image), number, *numbers)
            return [head + b"".join(pointer(place, name) for name in ("registers", "c", "d"))]

        arrays = {"image": image, "registers": self.registers(), "c": self.c, "d": np.zeros_like(self.c)}
        return KernelRun(FILE, entry, arrays, params, block=128, shared_bytes=len(image), macros=cases(among))

    def registers(self) -> Array:
        """a as fragments: (2 K steps, 128 threads, 4 words)."""
        steps = np.split(self.a, 2, axis=1)
        return np.stack([np.concatenate([a_fragment(rows) for rows in np.split(step, 4)]) for step in steps])


def place(elements: Array, swizzle: str, transposed: bool) -> Operand:
    return mn_major(elements, swizzle) if transposed else k_major(elements, swizzle)


@pytest.mark.parametrize("variant", EVERY_SIZE, ids=lambda v: v.n)
def test_every_size_multiplies_from_shared_memory_and_from_registers(runner: Runner, variant: Variant) -> None:
    product = Product(variant)
    for entry in ("multiply_shared", "multiply_registers"):
        for result in runner(product.run(entry, EVERY_SIZE)):
            result.check(d=product.d)


@pytest.mark.parametrize("variant", [v for v in EVERY_KIND if not v.trans_a], ids=str)
def test_every_element_multiplies(runner: Runner, variant: Variant) -> None:
    product = Product(variant)
    for entry in ("multiply_shared", "multiply_registers"):
        for result in runner(product.run(entry, EVERY_KIND)):
            result.check(d=product.d)


LAYOUTS = ["none", "32B", "64B", "128B"]


@pytest.mark.parametrize("a_layout", LAYOUTS)
@pytest.mark.parametrize("b_layout", LAYOUTS)
@pytest.mark.parametrize("trans", list(itertools.product((False, True), repeat=2)), ids=str)
def test_every_layout_is_addressed(runner: Runner, a_layout: str, b_layout: str, trans: tuple[bool, bool]) -> None:
    for n in (40, 192):
        product = Product(Variant("bf16", n, *trans), (a_layout, b_layout))
        for result in runner(product.run("multiply_shared", EVERY_KIND)):
            result.check(d=product.d)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_transposed_b_goes_with_a_in_registers(runner: Runner, layout: str) -> None:
    product = Product(Variant("f16", 128, False, True), ("128B", layout))
    for result in runner(product.run("multiply_registers", EVERY_KIND)):
        result.check(d=product.d)


def test_groups_overlap_and_a_fresh_accumulator_is_not_read(runner: Runner) -> None:
    product = Product(Variant("f16", 64))
    a, b = (x.astype(np.float32) for x in (product.a, product.b))
    expected = 2 * a[:, :16] @ b[:, :16].T + a[:, 16:] @ b[:, 16:].T
    for result in runner(product.run("multiply_groups", EVERY_SIZE)):
        result.check(d=expected)


@pytest.mark.parametrize("element", ["e4m3", "e5m2"])
def test_emulated_sums_of_8_bit_products_lose_their_low_bits(module_cache: Path, element: str) -> None:
    """A sum is no more precise than 13 fraction bits of its largest number, and is cut off toward zero.

    Bit by bit, so not on a GPU: emulation/truncated_sum.cuh is a model.
    """
    product = Product(Variant(element, 72))
    rng = np.random.default_rng(1)
    a, b = (rng.standard_normal(shape) * 2.0 ** rng.integers(-3, 4, shape) for shape in ((64, 64), (72, 64)))
    product.a, product.b = a.astype(product.a.dtype), b.astype(product.b.dtype)
    product.a[0], product.c[:2] = 0, 1 + 2**-13 + 2**-14 + 2**-20  # alone, and beside products
    product.placed_a, product.placed_b = place(product.a, "128B", False), place(product.b, "128B", False)
    wanted = product.c
    for step in (slice(0, 32), slice(32, 64)):
        factors = (x[:, step].astype(np.float64) for x in (product.a, product.b))
        wanted = hopper_fp8(*factors, wanted, FORMATS[element])
    exact = product.c + product.a.astype(np.float64) @ product.b.astype(np.float64).T
    assert (wanted[0] == 1 + 2**-13).all()
    assert np.abs(wanted - exact).max() > 2**-10
    for entry in ("multiply_shared", "multiply_registers"):
        for result in emulated_runner(module_cache)(product.run(entry, EVERY_KIND)):
            result.check(d=wanted)


MIXED = [Variant("e4m3", 72)]


def mixed(variant: Variant) -> Product:
    """A of e4m3, B of e5m2."""
    product = Product(variant)
    product.b = small_values(np.random.default_rng(2), product.b.shape, "e5m2")
    product.placed_b = place(product.b, "128B", False)
    product.d = product.c + product.a.astype(np.float32) @ product.b.astype(np.float32).T
    return product


def run_mixed(product: Product) -> KernelRun:
    run = product.run("multiply_mixed", MIXED)
    return dataclasses.replace(run, macros={**run.macros, "WGMMA_MIXED": "1"})


@pytest.mark.parametrize("variant", MIXED, ids=str)
def test_e5m2_goes_with_e4m3_in_registers(runner: Runner, variant: Variant) -> None:
    product = mixed(variant)
    for result in runner(run_mixed(product)):
        result.check(d=product.d)


def test_emulated_sums_of_mixed_products_have_the_exponents_of_their_own_formats(module_cache: Path) -> None:
    """e5m2 numbers of 2^-14 and more are normal, beside e4m3 ones of 2^-6 and more."""
    product = mixed(MIXED[0])
    rng = np.random.default_rng(3)
    a, b = (rng.standard_normal(x.shape) * 2.0 ** rng.integers(-12, -3, x.shape) for x in (product.a, product.b))
    product.a, product.b = a.astype(product.a.dtype), b.astype(product.b.dtype)
    product.c[...] = 0
    product.placed_a, product.placed_b = place(product.a, "128B", False), place(product.b, "128B", False)
    wanted = product.c
    for step in (slice(0, 32), slice(32, 64)):
        factors = (x[:, step].astype(np.float64) for x in (product.a, product.b))
        wanted = hopper_fp8(*factors, wanted, FORMATS["e4m3"], FORMATS["e5m2"])
    for result in emulated_runner(module_cache)(run_mixed(product)):
        result.check(d=wanted)


def test_sums_of_8_bit_products_keep_infinities_and_nans(runner: Runner) -> None:
    product = Product(Variant("e4m3", 72))
    product.b[5, 40] = product.a[7, 3] = np.nan
    product.c[3, 6], product.c[4, 6] = np.inf, -np.inf
    product.placed_a, product.placed_b = place(product.a, "128B", False), place(product.b, "128B", False)
    product.d = product.c + product.a.astype(np.float32) @ product.b.astype(np.float32).T
    assert np.isnan(product.d[:, 5]).all()
    assert np.isnan(product.d[7]).all()
    for entry in ("multiply_shared", "multiply_registers"):
        for result in runner(product.run(entry, EVERY_KIND)):
            result.check(d=product.d)


def test_descriptors_hold_address_offsets_and_swizzle(runner: Runner) -> None:
    address = 0x8C00
    expected = [
        address >> 4 | 128 >> 4 << 16 | 256 >> 4 << 32,
        address >> 4 | 1 << 16 | 256 >> 4 << 32 | 3 << 62,
        address >> 4 | 4096 >> 4 << 16 | 512 >> 4 << 32 | 2 << 62,
        address >> 4 | 16384 >> 4 << 16 | 1024 >> 4 << 32 | 1 << 62,
    ]
    run = KernelRun(
        FILE,
        "descriptors",
        {"out": np.zeros(4, np.uint64)},
        lambda place: [struct.pack("<I", address), pointer(place, "out")],
        macros=cases(EVERY_SIZE),
        block=1,
    )
    for result in runner(run):
        result.check(out=np.array(expected, np.uint64))
