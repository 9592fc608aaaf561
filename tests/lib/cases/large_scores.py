"""Problems whose scores are near the limits of float32: biases that hide keys, sinks, slopes and products.

The base of the exponents overflows there, or its rounding changes the weights. With products fused into sums, as ptxas
fuses them, this happens with much smaller scores.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from cases.finite_masks import FLOAT32_MIN, LOW, check_close, patterns
from emulated.contraction import fused_products
from emulated.forward import OPERANDS, problem_of, run
from inside.testing import cast

from gpu_actors.reference import attention_forward

__all__ = ["HEADS", "KEYS", "LARGE", "SINKS", "STEEP", "check_large", "masked"]

LARGE = ("low", "low with sinks", "steep", "large products")
KEYS, HEADS = 150, 3
SINKS = np.array([-3e38, 3e38, 0.5], np.float32)
STEEP = np.array([1e30, 3e38, -1e36], np.float32)  # ALiBi slopes


def masked(dtype: str, dim: int, low: float) -> tuple[list[Any], Any]:
    """q, k and v, and a bias that hides keys by ``low``.

    Queries of the second sequence are 0, so its scores are the bias alone and exact in float. The first sequence has no
    row with a large number added to all its visible scores, in which these would be lost.
    """
    rng = np.random.default_rng(0)
    inputs = [cast(rng.standard_normal((2, rows, HEADS, dim)), dtype) for rows in (8, KEYS, KEYS)]
    inputs[0][1] = 0
    bias = np.stack([patterns(KEYS, low)] * 2)[:, None]
    bias[0, :, [1, 3, 5, 6]] = bias[0, :, [0]]
    return inputs, bias


def _problems(name: str, dtype: str, dim: int) -> Iterator[tuple[list[Any], dict[str, Any]]]:
    if name == "steep":
        yield masked(dtype, dim, 0.0)[0], {"alibi_slopes": STEEP}
    elif name == "large products":
        # Scores beyond 2^28: keys are integers of 8 bits times 2^8, so that all products are exact in float.
        rng = np.random.default_rng(1)
        numbers = rng.integers(128, 256, (2, KEYS, 1, 1)) * rng.choice([-256.0, 256.0], (2, 1, HEADS, 1))
        q, k = np.full((2, 8, HEADS, dim), 2.0**15), np.broadcast_to(numbers, (2, KEYS, HEADS, dim))
        v = rng.standard_normal((2, KEYS, HEADS, dim))
        yield [cast(each, dtype) for each in (q, k, v)], {"softmax_scale": 0.15625}
    else:
        for low in (FLOAT32_MIN, -1e9) if "sinks" in name else LOW:
            inputs, bias = masked(dtype, dim, low)
            yield inputs, {"bias": bias} | ({"sinks": SINKS} if "sinks" in name else {})


def check_large(name: str, kernel: str, dtype: str, dim: int, arch: str, compute: str | None = None) -> None:
    """Compare a forward kernel with the oracle: the same NaN and infinities, and the rest within bounds."""
    eight_bits = dtype.startswith("float8")
    for inputs, options in _problems(name, dtype, dim):
        problem = problem_of(*inputs, compute=compute, **options)
        operands = {**dict(zip("qkv", inputs, strict=True)), **{n: options[n] for n in OPERANDS if n in options}}
        with fused_products():
            out, lse = run(problem, operands, kernel=kernel, arch=arch)
        expected = attention_forward(*inputs, **options)
        check_close("out", out, expected.out, 0.06 if eight_bits else 0.02)
        check_close("lse", lse, expected.lse, 1e-2 if eight_bits else 1e-3, 2.0**-22)
