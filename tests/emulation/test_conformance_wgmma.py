"""wgmma of every size, element, layout and operand place, against a product in NumPy."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from fragments import DEPTH, a_fragment, small_values
from kernel_runs import KernelRun, Place, Runner, pointer
from layouts import Operand, k_major, mn_major

FILE = "conformance/wgmma.cu"
Array = npt.NDArray[Any]
EVERY_SIZE = "".join(f" CASE({n})" for n in range(8, 257, 8))


class Product:
    """a (64, 2 steps of k), b (n, the same) and c; entry: which kernel multiplies them."""

    def __init__(
        self,
        element: str,
        n: int,
        layouts: tuple[str, str] = ("128B", "128B"),
        trans: tuple[bool, bool] = (False, False),
    ) -> None:
        rng = np.random.default_rng(n)
        depth = 2 * DEPTH[element]
        self.element, self.n, self.trans = element, n, trans
        self.a, self.b = small_values(rng, (64, depth), element), small_values(rng, (n, depth), element)
        self.c = (rng.integers(-64, 65, (64, n)) / 8).astype(np.float32)
        self.d = self.c + self.a.astype(np.float32) @ self.b.astype(np.float32).T
        self.placed_a = place(self.a, layouts[0], trans[0])
        self.placed_b = place(self.b, layouts[1], trans[1])

    def run(self, entry: str, sizes: str) -> KernelRun:
        start_b = -(-len(self.placed_a.image) // 1024) * 1024
        image = np.zeros(start_b + len(self.placed_b.image), np.uint8)
        image[: len(self.placed_a.image)] = self.placed_a.image
        image[start_b:] = self.placed_b.image
        a, b = self.placed_a, self.placed_b

        def params(place: Place) -> list[bytes]:
            numbers = (a.descriptor, b.descriptor + (start_b >> 4), a.step, b.step)
            head = pointer(place, "image") + struct.pack("<Ii4Q", len(image), self.n, *numbers)
            return [head + b"".join(pointer(place, name) for name in ("registers", "c", "d"))]

        arrays = {"image": image, "registers": self.registers(), "c": self.c, "d": np.zeros_like(self.c)}
        macros = {
            "WGMMA_ELEMENT": self.element,
            "WGMMA_TRANS_A": str(self.trans[0]).lower(),
            "WGMMA_TRANS_B": str(self.trans[1]).lower(),
            "WGMMA_SIZES": sizes,
        }
        return KernelRun(FILE, entry, arrays, params, block=128, shared_bytes=len(image), macros=macros)

    def registers(self) -> Array:
        """a as fragments: (2 K steps, 128 threads, 4 words)."""
        steps = np.split(self.a, 2, axis=1)
        return np.stack([np.concatenate([a_fragment(rows) for rows in np.split(step, 4)]) for step in steps])


def place(elements: Array, swizzle: str, transposed: bool) -> Operand:
    return mn_major(elements, swizzle) if transposed else k_major(elements, swizzle)


@pytest.mark.parametrize("n", range(8, 257, 8))
def test_every_size_multiplies_from_shared_memory_and_from_registers(runner: Runner, n: int) -> None:
    product = Product("f16", n)
    for entry in ("multiply_shared", "multiply_registers"):
        for result in runner(product.run(entry, EVERY_SIZE)):
            result.check(d=product.d)


@pytest.mark.parametrize("element", ["bf16", "e4m3", "e5m2"])
@pytest.mark.parametrize("n", [8, 72, 256])
def test_every_element_multiplies(runner: Runner, element: str, n: int) -> None:
    product = Product(element, n)
    for entry in ("multiply_shared", "multiply_registers"):
        for result in runner(product.run(entry, "CASE(8) CASE(72) CASE(256)")):
            result.check(d=product.d)


@pytest.mark.parametrize("a_layout", ["none", "32B", "64B", "128B"])
@pytest.mark.parametrize("b_layout", ["none", "32B", "64B", "128B"])
@pytest.mark.parametrize("trans", [(False, False), (False, True), (True, False), (True, True)], ids=str)
def test_every_layout_is_addressed(runner: Runner, a_layout: str, b_layout: str, trans: tuple[bool, bool]) -> None:
    for n in (40, 192):
        product = Product("bf16", n, (a_layout, b_layout), trans)
        for result in runner(product.run("multiply_shared", "CASE(40) CASE(192)")):
            result.check(d=product.d)


@pytest.mark.parametrize("layout", ["none", "32B", "64B", "128B"])
def test_a_transposed_b_goes_with_a_in_registers(runner: Runner, layout: str) -> None:
    product = Product("f16", 128, ("128B", layout), (False, True))
    for result in runner(product.run("multiply_registers", "CASE(128)")):
        result.check(d=product.d)


def test_groups_overlap_and_a_fresh_accumulator_is_not_read(runner: Runner) -> None:
    product = Product("f16", 64)
    a, b = (x.astype(np.float32) for x in (product.a, product.b))
    expected = 2 * a[:, :16] @ b[:, :16].T + a[:, 16:] @ b[:, 16:].T
    for result in runner(product.run("multiply_groups", EVERY_SIZE)):
        result.check(d=expected)


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
        macros=Product("f16", 8).run("descriptors", EVERY_SIZE).macros,
        block=1,
    )
    for result in runner(run):
        result.check(out=np.array(expected, np.uint64))
