"""The headers that kernels share, function by function: element types and special functions."""

from __future__ import annotations

import re
import struct
from typing import Any

import numpy as np
import pytest
from emulated.forward import key_of, ml_dtype, module_of, problem_of
from inside.compiling import Compiler
from inside.emulation import EmulatedBuffer
from support.gate import kernel_source

from gpu_actors import KernelSource

# One kernel for each function of the shared headers.
PROBE = """
#include "common/philox.cuh"
#include "ptx/math.cuh"
struct Arguments { const void* in; void* out; int count; };
#define PROBE(name, IN, OUT, expression)                                              \\
  extern "C" __global__ void name(const __grid_constant__ Arguments a) {             \\
    const auto in = static_cast<const IN*>(a.in);                                    \\
    const auto out = static_cast<OUT*>(a.out);                                       \\
    for (int n = threadIdx.x; n < a.count; n += blockDim.x) { const IN x = in[n]; out[n] = expression; } \\
  }
PROBE(widen_half, half_t, float, to_real(x))
PROBE(widen_bfloat16, bfloat16_t, float, to_real(x))
PROBE(widen_e4m3, e4m3_t, float, to_real(x))
PROBE(widen_e5m2, e5m2_t, float, to_real(x))
PROBE(narrow_half, float, half_t, from_real(Rounded<half_t>(), x))
PROBE(narrow_bfloat16, float, bfloat16_t, from_real(Rounded<bfloat16_t>(), x))
PROBE(narrow_e4m3, float, e4m3_t, from_real(Rounded<e4m3_t>(), x))
PROBE(narrow_e5m2, float, e5m2_t, from_real(Rounded<e5m2_t>(), x))
PROBE(tf32, float, float, round_significand<11>(x))
PROBE(ex2, float, float, ptx::ex2(x))
PROBE(lg2, float, float, ptx::lg2(x))
PROBE(rcp, float, float, ptx::rcp(x))
"""


ENTRIES = tuple(re.findall(r"^PROBE\((\w+)", PROBE, re.M))


def probe_source() -> KernelSource:
    q = np.zeros((1, 2, 1, 8), np.float32)
    source = kernel_source(key_of(problem_of(q, q, q), "sm_80"))
    return KernelSource("probe.cu", PROBE, ENTRIES, source.headers, source.macros)


def probe(entry: str, given: Any, out: Any) -> Any:
    source, result = EmulatedBuffer.of(given, "in"), EmulatedBuffer(out.itemsize * len(given), "out")
    params = struct.pack("<QQi4x", source.address, result.address, len(given))
    module_of(probe_source()).launch(entry, 1, 32, 0, params, [source, result])
    return result.view(out, len(given))


FORMATS = {
    "half": np.dtype(np.float16),
    "bfloat16": ml_dtype("bfloat16"),
    "e4m3": ml_dtype("float8_e4m3fn"),
    "e5m2": ml_dtype("float8_e5m2"),
}


def floats() -> Any:
    """Every exponent and sign, fractions around the ties of all formats, and the special values."""
    exponents = np.arange(256, dtype=np.uint32) << 23
    ties = [1 << bit for bit in range(23)] + [3 << bit for bit in range(21)] + [0, (1 << 23) - 1, 0x600000, 0x700000]
    near = (np.array(ties)[:, None] + np.arange(-1, 2)).ravel() & 0x7FFFFF
    bits = (exponents[:, None] | np.unique(near).astype(np.uint32)).ravel()
    return np.concatenate([bits, bits | np.uint32(1 << 31)]).view(np.float32)


class TestSharedHeaders:
    def test_the_probes_compile_for_the_gpu(self):
        cubin = Compiler().compile(probe_source(), "sm_80")
        assert set(cubin.resources) == set(ENTRIES)

    @pytest.mark.parametrize("name", FORMATS)
    def test_every_code_widens_to_the_value_that_ml_dtypes_gives_it(self, name):
        dtype = FORMATS[name]
        codes = np.arange(1 << 8 * dtype.itemsize).astype(f"u{dtype.itemsize}")
        widened = probe(f"widen_{name}", codes, np.dtype(np.float32))
        np.testing.assert_array_equal(widened, codes.view(dtype).astype(np.float32))
        assert (np.signbit(widened) == (codes >> 8 * dtype.itemsize - 1 == 1))[~np.isnan(widened)].all()

    @pytest.mark.parametrize("name", FORMATS)
    def test_floats_narrow_to_nearest_even(self, name):
        dtype, given = FORMATS[name], floats()
        limit = {"e4m3": 448.0, "e5m2": 57344.0}.get(name)  # fp8 saturates
        narrowed = probe(f"narrow_{name}", given, dtype)
        with np.errstate(over="ignore", invalid="ignore"):
            expected = (given if limit is None else np.clip(given, -limit, limit)).astype(dtype)
        nan = np.isnan(given)
        assert np.isnan(narrowed[nan].astype(np.float32)).all()
        codes = f"u{dtype.itemsize}"
        np.testing.assert_array_equal(narrowed[~nan].view(codes), expected[~nan].view(codes))

    def test_operands_round_to_11_significant_bits(self):
        given = floats()
        finite = given[np.isfinite(given) & (np.abs(given) >= 2.0**-126) & (np.abs(given) < 1e38)]
        mantissa, exponent = np.frexp(finite.astype(np.float64))
        expected = np.ldexp(np.rint(mantissa * 2**11), exponent - 11)
        np.testing.assert_array_equal(probe("tf32", finite, np.dtype(np.float32)), expected)
        special = given[~np.isfinite(given)]
        np.testing.assert_array_equal(probe("tf32", special, np.dtype(np.float32)), special)

    @pytest.mark.parametrize(("name", "exact"), [("ex2", np.exp2), ("lg2", np.log2), ("rcp", np.reciprocal)])
    def test_the_special_functions_flush_and_follow_ieee(self, name, exact):
        given = np.concatenate([np.linspace(-130, 130, 4001), [0.0, np.inf, -np.inf, np.nan, 1e-40]]).astype(np.float32)
        with np.errstate(all="ignore"):
            flushed = np.where(np.abs(given) < 2.0**-126, np.copysign(0, given), given)
            expected = exact(flushed.astype(np.float64))
            expected = np.where(np.abs(expected) < 2.0**-126, np.copysign(0, expected), expected).astype(np.float32)
        actual = probe(name, given, np.dtype(np.float32))
        np.testing.assert_allclose(actual, expected, rtol=3e-7, atol=0)
