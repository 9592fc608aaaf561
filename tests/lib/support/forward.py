"""What the tests of forward requests share: small operands, and the oracle's answer to hold results against."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

import gpu_actors as ga
from gpu_actors.reference import attention_forward


def normal(*shape: int, dtype: Any = np.float32, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def operands(seed: int = 0, dtype: Any = np.float32) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """q, k, v of batch 2, 5 and 7 rows, 4 heads on 2, head_dim 16."""
    return (
        normal(2, 5, 4, 16, dtype=dtype, seed=seed),
        normal(2, 7, 2, 16, dtype=dtype, seed=seed + 1),
        normal(2, 7, 2, 16, dtype=dtype, seed=seed + 2),
    )


def forward(ctx: ga.GpuContext, *arrays: np.ndarray, **options: Any) -> ga.AttentionOutput:
    return ctx.flash_attn.forward(*arrays, **options).result(10.0)


def out_dtype(dtype: Any) -> np.dtype[Any]:
    return np.dtype(ml_dtypes.bfloat16) if np.dtype(dtype).name.startswith("float8") else np.dtype(dtype)


def agrees(result: ga.AttentionOutput, q: np.ndarray, k: np.ndarray, v: np.ndarray, **options: Any) -> None:
    """The mock device's answer is the oracle's, rounded once."""
    expected = attention_forward(q, k, v, **options)
    assert result.out.dtype == out_dtype(q.dtype)
    assert result.out.shape == (*q.shape[:-1], v.shape[-1])
    np.testing.assert_array_equal(result.out, expected.out.astype(result.out.dtype))
    if result.lse is not None:
        assert result.lse.dtype == np.float32
        np.testing.assert_array_equal(result.lse, expected.lse.astype(np.float32))
