"""The hardware's arithmetic, if a launch asks for it: how far functions err, and which bits sums keep."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from isa import formats, fragments, wgmma
from isa.sums import cut_off
from kernel_runs import Array, KernelRun, Order, emulated_module, launch_emulated, pointers
from second_reading import START, Kind, Products, encoded, module_of

from gpu_actors.devices.emulation import EmulatedBuffer, EmulatedModule, Toolchain, build_module
from gpu_actors.errors import InvalidRequest

FILE = "arithmetic.cu"
ORDER: Order = ("late", "greedy", 7)
Exact = Callable[[npt.NDArray[np.float64]], npt.NDArray[np.float64]]


@pytest.fixture(scope="module")
def module(module_cache: Path) -> EmulatedModule:
    return emulated_module(FILE, {}, module_cache)


def values(module: EmulatedModule, entry: str, x: Array, order: Order = ORDER, arithmetic: str = "hardware") -> Array:
    blocks = -(-len(x) // 128)
    padded = np.resize(x, blocks * 128)
    arrays = {"x": padded, "y": np.zeros_like(padded)}
    run = KernelRun(FILE, entry, arrays, pointers("x", "y"), block=128, grid=blocks)
    return np.asarray(launch_emulated(module, run, order, arithmetic=arithmetic)["y"])[: len(x)]


def steps(result: npt.NDArray[np.float32], true: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """How many floats each result is from the one nearest to the exact value: the ulps of NVIDIA's tables."""
    places = [np.abs(numbers).view(np.int32).astype(np.int64) for numbers in (result, true.astype(np.float32))]
    signs = [np.sign(numbers) for numbers in (result, true)]
    return np.where(signs[0] == signs[1], np.abs(places[0] - places[1]), np.inf)


def absolute(result: Array, true: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    return np.abs(result - true)


WIDE = np.concatenate([np.linspace(-20, 20, 4001), np.exp2(np.linspace(-60, 60, 997))]).astype(np.float32)
POSITIVE = np.exp2(np.linspace(-60, 60, 5003)).astype(np.float32)
NEAR_ONE = np.linspace(0.5, 2, 3002).astype(np.float32)
TURNS = np.linspace(-9.87, 9.91, 3001).astype(np.float32)
FAR = np.linspace(-300.3, 300.1, 3001).astype(np.float32)
Distance = Callable[[Any, Any], npt.NDArray[np.float64]]
Bound = Callable[[Any, Any], Any]  # of the operand and the exact value
BOUNDS: list[tuple[str, Array, Exact, Distance, Bound]] = [
    ("ex2", WIDE[np.abs(WIDE) < 100], np.exp2, steps, lambda x, y: 2),
    ("lg2", POSITIVE[POSITIVE != 1], np.log2, absolute, lambda x, y: 2.0**-22 * np.where(np.abs(y) < 1, 1, np.abs(y))),
    ("rcp", WIDE[WIDE != 0], np.reciprocal, steps, lambda x, y: 1),
    ("exp_", WIDE[np.abs(WIDE) < 80], np.exp, steps, lambda x, y: 2),
    ("log_", POSITIVE[POSITIVE != 1], np.log, steps, lambda x, y: 1),
    ("tanh_", WIDE[WIDE != 0], np.tanh, steps, lambda x, y: 2),
    ("erf_", WIDE[WIDE != 0], np.vectorize(math.erf), steps, lambda x, y: 2),
    ("sinpi", TURNS, lambda x: np.sin(np.pi * x), steps, lambda x, y: 1),
    ("cospi", TURNS, lambda x: np.cos(np.pi * x), steps, lambda x, y: 1),
    ("rsqrt_", POSITIVE, lambda x: 1 / np.sqrt(x), steps, lambda x, y: 2),
    ("fast_exp", WIDE[np.abs(WIDE) < 80], np.exp, steps, lambda x, y: 2 + np.floor(np.abs(1.173 * x))),
    ("fast_log", POSITIVE[(POSITIVE < 0.5) | (POSITIVE > 2)], np.log, steps, lambda x, y: 3),
    ("fast_log", NEAR_ONE, np.log, absolute, lambda x, y: 2.0**-21.41),
    ("fast_log2", POSITIVE[(POSITIVE < 0.5) | (POSITIVE > 2)], np.log2, steps, lambda x, y: 2),
    ("fast_log2", NEAR_ONE, np.log2, absolute, lambda x, y: 2.0**-22),
    ("fast_third", WIDE[WIDE != 0], lambda x: x / 3, steps, lambda x, y: 2),
    ("fast_sin", TURNS[np.abs(TURNS) < 3.14], np.sin, absolute, lambda x, y: 2.0**-21.41),
    ("fast_sin", TURNS[np.abs(TURNS) < 6.28], np.sin, absolute, lambda x, y: 2.0**-20.5),
    ("fast_sin", FAR, np.sin, absolute, lambda x, y: 2.0**-14.7),
    ("fast_cos", TURNS[np.abs(TURNS) < 3.14], np.cos, absolute, lambda x, y: 2.0**-21.19),
    ("fast_tanh", WIDE[WIDE != 0], np.tanh, absolute, lambda x, y: 2.0**-11 * np.abs(y)),
]


@pytest.mark.parametrize(("entry", "x", "exact", "distance", "bound"), BOUNDS)
def test_a_function_errs_up_to_its_bound_and_no_further(
    module: EmulatedModule, entry: str, x: Array, exact: Exact, distance: Distance, bound: Bound
) -> None:
    true = exact(x.astype(np.float64))
    share = distance(values(module, entry, x), true) / bound(x, true)
    assert 0.8 < share.max() <= 1
    assert steps(values(module, entry, x, arithmetic="nearest"), true).max() <= 2


def test_an_error_belongs_to_the_operand_and_the_seed(module: EmulatedModule) -> None:
    x = np.resize(np.linspace(0.1, 0.9, 128), 1024).astype(np.float32)
    first = values(module, "ex2", x)
    np.testing.assert_array_equal(first, np.resize(first[:128], 1024))
    np.testing.assert_array_equal(values(module, "ex2", x, ("late", "lane", 7)), first)
    assert (values(module, "ex2", x, ("late", "greedy", 8)) != first).mean() > 0.5


@pytest.mark.parametrize("entry", ["ex2", "lg2", "rcp"])
def test_infinities_zeros_and_subnormals_are_those_of_the_isa(module: EmulatedModule, entry: str) -> None:
    x = np.array([0.0, -0.0, 1e-40, -1e-40, np.inf, -np.inf, np.nan], np.float32)
    exact = {
        "ex2": [1, 1, 1, 1, np.inf, 0, np.nan],
        "lg2": [-np.inf, -np.inf, -np.inf, -np.inf, np.inf, np.nan, np.nan],
        "rcp": [np.inf, -np.inf, np.inf, -np.inf, 0, -0.0, np.nan],
    }[entry]
    np.testing.assert_array_equal(values(module, entry, x), np.array(exact, np.float32))


def test_additions_to_global_memory_flush_subnormals(module: EmulatedModule) -> None:
    x = np.array([1e-40, -1e-40, 1.5e-38, 1.0], np.float32)
    y = np.array([1e-40, 1.0, -1.2e-38, 2.0], np.float32)
    run = KernelRun(FILE, "add", {"x": x, "y": y}, pointers("x", "y"), block=4)
    hardware = launch_emulated(module, run, ORDER, arithmetic="hardware")["y"]
    np.testing.assert_array_equal(hardware, np.array([0, 1, 0, 3], np.float32))
    np.testing.assert_array_equal(launch_emulated(module, run, ORDER)["y"], x + y)


# ---- sums of tensor cores


def drawn(rng: np.random.Generator, shape: tuple[int, ...], element: str) -> tuple[Array, Array]:
    """Values of many sizes that the element holds, and their bits."""
    form = formats.FORMATS[element]
    patterns = rng.integers(0, 1 << form.bits, shape, dtype=np.uint64).astype(f"u{form.size}")
    if element == "tf32":
        patterns = (rng.standard_normal(shape) * 2.0 ** rng.integers(-6, 7, shape)).astype(np.float32).view(np.uint32)
        patterns &= ~np.uint32(0x1FFF)
    elif element == "bf16":
        patterns = (rng.standard_normal(shape) * 2.0 ** rng.integers(-6, 7, shape)).astype(np.float32).view(np.uint32)
        patterns = (patterns >> 16).astype(np.uint16)
    known = formats.decoded(patterns, element)
    patterns = np.where(np.isfinite(known), patterns, patterns.dtype.type(0))
    return formats.decoded(patterns, element), patterns


def mma_sum(cache: Path, element: str, a_bits: Array, b_bits: Array, c: Array, wanted: Array) -> None:
    form = formats.FORMATS[element]
    arrays = {
        "a": fragments.packed(fragments.mma_a(form.k, form.bits).taken(a_bits)),
        "b": fragments.packed(fragments.mma_b(form.k, form.bits).taken(b_bits)),
        "c": fragments.mma_c().taken(c),
        "d": np.zeros((32, 4), np.float32),
    }
    run = KernelRun("conformance/copies.cu", f"mma_{element}", arrays, pointers("a", "b", "c", "d"))
    result = launch_emulated(emulated_module(run.file, {}, cache), run, ORDER, arithmetic="hardware")
    result.check(d=fragments.mma_c().taken(wanted))


@pytest.mark.parametrize("element", ["f16", "bf16", "tf32", "e4m3", "e5m2"])
def test_mma_cuts_its_sums_off(module_cache: Path, element: str) -> None:
    """Ampere sums 16 bytes of k at once, with 24 fraction bits. Ada's 8-bit products keep 13."""
    rng = np.random.default_rng(3)
    form = formats.FORMATS[element]
    (a, a_bits), (b, b_bits) = drawn(rng, (16, form.k), element), drawn(rng, (form.k, 8), element)
    c = (rng.standard_normal((16, 8)) * 2.0 ** rng.integers(-6, 7, (16, 8))).astype(np.float32)
    wanted, step = c, form.k // 2
    bits = (13, 13) if form.bits == 8 else (24, 23)
    for first in (0, step):
        wanted = cut_off(a[:, first : first + step], b[first : first + step].T, wanted, form, *bits)
    assert (wanted != (c + a @ b).astype(np.float32)).mean() > 0.1
    mma_sum(module_cache, element, a_bits, b_bits, c, wanted)


@pytest.mark.parametrize("registers", [False, True])
@pytest.mark.parametrize("kind", [Kind("f16", False, True, 128), Kind("bf16", False, False, 40)], ids=str)
def test_wgmma_cuts_its_sums_off(module_cache: Path, kind: Kind, registers: bool) -> None:
    """Hopper sums the 16 products of an instruction at once, with 25 fraction bits."""
    rng, form, layout = np.random.default_rng(4), formats.FORMATS[kind.element], fragments.wgmma_d(kind.n)
    _, image = drawn(rng, (1 << 15,), kind.element)
    pair = (wgmma.Descriptor(0, 16, 1024, 128), wgmma.Descriptor(16384, 4096, 1024, 128))
    memory = np.concatenate([np.zeros(START, np.uint8), image.view(np.uint8)])
    a_bits, b_bits = (
        descriptor.moved(START).taken(memory, "mn" if turned else "k", rows, form)
        for descriptor, turned, rows in zip(pair, (False, kind.trans_b), (64, kind.n), strict=True)
    )
    c = (rng.standard_normal((64, kind.n)) * 2.0 ** rng.integers(-9, 10, (64, kind.n))).astype(np.float32)
    a, b = (formats.decoded(bits, kind.element) for bits in (a_bits, b_bits))
    wanted = cut_off(a, b, c, form, 25, 23)
    assert (wanted != (c + a @ b.T).astype(np.float32)).mean() > 0.1
    given = fragments.packed(fragments.wgmma_a(16).taken(a_bits))[None] if registers else None
    run = Products(kind, image.view(np.uint8), [pair], given, layout.taken(c)[None]).run()
    launch_emulated(module_of(module_cache), run, ORDER, arithmetic="hardware").check(d=layout.taken(wanted)[None])


def test_cut_off_sums_keep_infinities_and_nans(module_cache: Path) -> None:
    c = np.zeros((16, 8), np.float32)
    c[0, 0], c[1, 1] = np.inf, np.nan
    a_bits, b_bits = encoded(np.ones((16, 16)), "f16"), encoded(np.ones((16, 8)), "f16")
    a_bits[2, 3], a_bits[3, 3] = 0x7C00, 0x7E00
    wanted = np.full((16, 8), 16, np.float32)
    wanted[0, 0], wanted[1, 1], wanted[2], wanted[3] = np.inf, np.nan, np.inf, np.nan
    mma_sum(module_cache, "f16", a_bits, b_bits, c, wanted)


# ---- products fused here and there

BLOCKS = "".join(f"  if (threadIdx.x == {i}) {{\n    y[{i}] = x[0] * x[1] + x[2];\n  }}\n" for i in range(4))
PRODUCTS = f'extern "C" __global__ void products(const float* x, float* y) {{\n{BLOCKS}}}\n'


@pytest.mark.timeout(180)  # zig builds parts of its own first
def test_products_are_fused_in_blocks_that_a_seed_picks(module_cache: Path) -> None:
    """Only where the product is fused, (1 + 2^-12)^2 is more than its rounded value."""
    x = EmulatedBuffer.of(np.array([1 + 2**-12, 1 + 2**-12, -(1 + 2**-11)], np.float32), "x")
    y = EmulatedBuffer(16, "y")

    def places(seed: int) -> list[bool]:
        module = build_module(PRODUCTS, toolchain=Toolchain.fusing_at_random(seed), cache_dir=module_cache)
        module.launch("products", 1, 4, 0, [struct.pack("<Q", at.address) for at in (x, y)], [x, y])
        return [bool(found) for found in y.view(np.float32)]

    found = [places(seed) for seed in (0, 1)]
    assert found[0] != found[1]
    assert len({fuses for one in found for fuses in one}) == 2


def test_a_compiler_that_cannot_fuse_here_and_there_says_so() -> None:
    with pytest.raises(InvalidRequest, match=r"clang\+\+ or zig can"):
        _ = Toolchain("g++", ("g++",), "12", contraction=True, fused_places=0).flags


def test_an_arithmetic_that_there_is_not_is_refused(module: EmulatedModule) -> None:
    run: Any = KernelRun(FILE, "add", {"x": np.zeros(4, np.float32), "y": np.zeros(4, np.float32)}, pointers("x", "y"))
    with pytest.raises(InvalidRequest, match="nearest, hardware"):
        launch_emulated(module, run, ORDER, arithmetic="exact")
