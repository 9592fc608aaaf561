"""Conversions round to nearest even and keep infinities and NaN. Fast special functions stay within their error."""

from __future__ import annotations

import struct

import ml_dtypes
import numpy as np
from kernel_runs import KernelRun, Place, Runner, pointer

FILE = "conformance/convert.cu"
BLOCK = 128


def run_of(entry: str, arrays: dict[str, np.ndarray], n: int, file: str = FILE) -> KernelRun:
    def params(place: Place) -> list[bytes]:
        return [*(pointer(place, name) for name in arrays), struct.pack("<i", n)]

    return KernelRun(file, entry, arrays, params, block=BLOCK, grid=-(-n // BLOCK))


def floats() -> np.ndarray:
    """Many magnitudes, ties of both formats, the edges of their ranges, and values that are not finite."""
    rng = np.random.default_rng(0)
    spread = rng.standard_normal(800) * 2.0 ** rng.integers(-45, 30, 800)
    steps = np.arange(-8, 9) / 8
    ties = np.concatenate([1 + steps * 2.0**-10, 1 + steps * 2.0**-7, 2.0**-24 * (1 + steps), 2.0**-14 * (1 + steps)])
    edges = [0.0, -0.0, 65504, 65519.996, 65520, 65536, -65520, 3.4e38, 2.0**-25, 2.0**-149, np.inf, -np.inf, np.nan]
    return np.concatenate([spread, ties, -ties, edges]).astype(np.float32)


def same(got: np.ndarray, wanted: np.ndarray, order: str) -> None:
    """Assert equal values and signs. Any NaN equals any other."""
    got, wanted = got.astype(np.float32), wanted.astype(np.float32)
    np.testing.assert_array_equal(got, wanted, err_msg=order)
    finite = ~np.isnan(wanted)
    np.testing.assert_array_equal(np.signbit(got)[finite], np.signbit(wanted)[finite], err_msg=order)


def test_every_half_widens_to_its_value(runner: Runner) -> None:
    words = np.arange(1 << 16, dtype=np.uint16)
    arrays = {"in": words, "out": np.zeros(words.size, np.float32)}
    for result in runner(run_of("widen", arrays, words.size)):
        same(result["out"].view(np.float32), words.view(np.float16).astype(np.float32), result.order)


def test_floats_narrow_to_the_nearest_and_pack_low_word_first(runner: Runner) -> None:
    low = floats()
    high = low[::-1].copy()
    arrays = {"low": low, "high": high, "out": np.zeros(3 * low.size, np.uint32)}
    with np.errstate(over="ignore"):
        halves = [part.astype(np.float16) for part in (low, high)]
    for result in runner(run_of("narrow", arrays, low.size)):
        single, pairs, bfloats = result["out"].reshape(3, low.size).view(np.uint16).reshape(3, low.size, 2)
        same(single[:, 0].view(np.float16), halves[0], result.order)
        for part in range(2):
            same(pairs[:, part].view(np.float16), halves[part], result.order)
            wanted = (low, high)[part].astype(ml_dtypes.bfloat16)
            same(bfloats[:, part].view(ml_dtypes.bfloat16), wanted, result.order)


def test_floats_narrow_to_the_nearest_e4m3_and_to_the_largest_beyond_it(runner: Runner) -> None:
    """Every value, every midpoint with its neighbours, and values out of range. The first of four is the low byte."""
    codes = np.arange(127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    midpoints = (codes[1:] + codes[:-1]) / 2
    around = [np.nextafter(midpoints, np.float32(towards)) for towards in (0, 1000)]
    edges = np.float32([448.1, 463.9, 464, 465, 480, 1e4, 3e38, np.inf, 2.0**-30, 1e-45, np.nan])
    magnitudes = np.concatenate([codes, midpoints, *around, edges])
    values = np.concatenate([magnitudes, -magnitudes[::-1], np.zeros(-2 * magnitudes.size % 4, np.float32)])
    arrays = {"in": values, "out": np.zeros(values.size // 4, np.uint32)}
    wanted = np.clip(values, -448, 448).astype(ml_dtypes.float8_e4m3fn)
    for result in runner(run_of("narrow_e4m3", arrays, values.size // 4, "conformance/convert_fp8.cu")):
        same(result["out"].view(ml_dtypes.float8_e4m3fn), wanted, result.order)


def test_fast_functions_stay_within_their_error_and_flush_subnormals(runner: Runner) -> None:
    rng = np.random.default_rng(1)
    x = np.concatenate([rng.uniform(-120, 120, 500), 2.0 ** rng.uniform(-120, 120, 500)]).astype(np.float32)
    edges = np.float32([0.0, 1.0, -1.0, 2.0**-130, -200, 200, np.inf, -np.inf, np.nan])
    edges = np.concatenate([edges, np.float32([-126.5, -130, -140, 2.0**127, -1.5 * 2.0**127])])  # subnormal results
    values = np.concatenate([x, edges])
    arrays = {"in": values, "out": np.zeros(3 * values.size, np.float32)}
    exact = values.astype(np.float64)
    flushed = np.where(np.abs(exact) < 2.0**-126, 0.0, exact)
    with np.errstate(all="ignore"):
        wanted = np.stack([np.exp2(flushed), np.log2(flushed), 1 / flushed])
    wanted = np.where(np.abs(wanted) < 2.0**-126, 0.0, wanted)
    wanted = np.where(np.abs(wanted) >= 2.0**128, np.copysign(np.inf, wanted), wanted)
    error = [2.0**-21 * np.abs(wanted[0]), 2.0**-21 + 2.0**-22 * np.abs(wanted[1]), 2.0**-22 * np.abs(wanted[2])]
    for result in runner(run_of("special", arrays, values.size)):
        got = result["out"].view(np.float32).reshape(3, -1).astype(np.float64)
        for function in range(3):
            finite = np.isfinite(wanted[function])
            np.testing.assert_array_equal(got[function][~finite], wanted[function][~finite], err_msg=result.order)
            off = np.abs(got[function][finite] - wanted[function][finite])
            assert (off <= error[function][finite]).all(), (function, result.order, off.max())


def test_sines_and_cosines_of_half_turns_are_within_two_units(runner: Runner) -> None:
    x = np.concatenate([np.linspace(-1, 1, 513), np.random.default_rng(2).uniform(-1, 1, 500)]).astype(np.float32)
    arrays = {"in": x, "out": np.zeros(2 * x.size, np.float32)}
    exact = np.pi * x.astype(np.float64)
    wanted = np.stack([np.sin(exact), np.cos(exact)])
    for result in runner(run_of("circle", arrays, x.size)):
        off = np.abs(result["out"].view(np.float32).reshape(2, -1) - wanted)
        assert (off <= 2.0**-22 * np.abs(wanted) + 1e-15).all(), (result.order, off.max())


def test_products_of_pairs_round_to_nearest_and_keep_subnormals_and_signs(runner: Runner) -> None:
    """Every 16-bit word is multiplied by powers of two, in either half. Some products are subnormal."""
    for exponent, shift in ((8, 0), (-8, 1)):
        a = np.roll(np.arange(1 << 16, dtype=np.uint16), shift)
        factors = {kind: np.full(a.size, 2.0**exponent, kind) for kind in (np.float16, ml_dtypes.bfloat16)}
        for part, (kind, factor) in enumerate(factors.items()):
            b = factor.view(np.uint16)
            arrays = {"a": a.view(np.uint32), "b": b.view(np.uint32), "out": np.zeros(a.size, np.uint32)}
            with np.errstate(over="ignore", invalid="ignore", under="ignore"):
                wanted = (a.view(kind).astype(np.float32) * factor.astype(np.float32)).astype(kind)
            for result in runner(run_of("multiply_pairs", arrays, a.size // 2)):
                products = result["out"].view(np.uint16).reshape(2, a.size)[part].view(kind)
                same(products, wanted, result.order)
