"""Problems whose scores are all equal and large, which show the error of a kernel's correction for the maximum.

If the maximum stays, earlier sums are multiplied by 1. A factor of 1 + e instead, once a tile of keys, does not show in
the output, whose numerator and denominator share it, but is an error of tiles * e / 2 in the LSE. If a product is fused
into the correction's exponent, e is the product's rounding error: up to 4e-5 for scores near 1000. For tests.
"""

from __future__ import annotations

from typing import Any, Literal

import ml_dtypes
import numpy as np
from cases.cached_batches import Batch
from emulated.contraction import fused_products
from emulated.decode import DecodeCase
from emulated.decode import check as check_decode
from emulated.forward import problem_of, run

from gpu_actors.testing import check_output

__all__ = ["check_steady", "check_steady_decode", "steady"]

KEYS = 16_384  # 85 of the largest tiles, so that the error is at least 1.5 times the tolerance of the LSE
_LOG2_E = np.float32(1.4426950408889634)


def steady(rows: int, keys: int, head_dim: int, dtype: str) -> tuple[Any, Any, Any]:
    """q, k, v of a sequence and head, (1, rows or keys, 1, head_dim), whose scores are equal for a scale of 1.

    The score is that of a few bits near 1000 whose product with log2(e) is rounded most.
    """
    scores = np.arange(960, 1017, 8, dtype=np.float32)
    lost = np.abs((scores * _LOG2_E).astype(np.float64) - scores.astype(np.float64) * np.float64(_LOG2_E))
    score = scores[lost.argmax()]
    assert lost.max() > 0.75 * 2.0**-14
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    q, k = np.zeros((1, rows, 1, head_dim), kind), np.zeros((1, keys, 1, head_dim), kind)
    q[..., :2] = 32
    k[..., 0], k[..., 1] = 28, score / 32 - 28
    assert k[0, 0, 0].astype(np.float64).sum() * 32 == score
    v = np.random.default_rng(5).standard_normal((1, keys, 1, head_dim)).astype(kind)
    return q, k, v


def check_steady(
    kernel: str, dtype: str = "float16", *, arch: str = "sm_90a", fused: bool | Literal["random"] = True, **launch: Any
) -> None:
    """Compare a forward kernel with the oracle."""
    q, k, v = steady(3, KEYS, 64, dtype)
    with fused_products(fused):
        problem = problem_of(q, k, v, softmax_scale=1.0)
        out, lse = run(problem, {"q": q, "k": k, "v": v}, kernel=kernel, arch=arch, **launch)
    check_output(out, lse, q, k, v, softmax_scale=1.0)


def check_steady_decode(*, fused: bool | Literal["random"] = True, **launch: Any) -> None:
    """Compare decode_mma with the oracle, with all keys in one block."""
    q, k, v = steady(1, KEYS, 64, "float16")
    options = {"softmax_scale": 1.0, "num_splits": 1}
    with fused_products(fused):
        check_decode(DecodeCase(Batch(q, list(k), list(v)), options=options), **launch)
