"""Biases that hide keys by large finite numbers, as frameworks' masks do. For tests."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

__all__ = ["FLOAT32_MIN", "LOW", "check_close", "hide_first", "hide_keys", "patterns"]

Array = npt.NDArray[Any]

FLOAT32_MIN = float(np.finfo(np.float32).min)
# The lowest numbers of three dtypes, with which Transformers masks; JAX's number; and numbers written by hand.
LOW = (
    FLOAT32_MIN,
    float(ml_dtypes.finfo(ml_dtypes.bfloat16).min),
    0.7 * FLOAT32_MIN,
    -1e30,
    -1e9,
    -65504.0,
    -1e4,
)


def patterns(keys: int, low: float) -> Array:
    """Rows of a bias, float32 (8, keys).

    ``low`` hides the first half of the keys; all keys; the second half; the second half, with the first hidden by -inf.
    -inf hides all keys. The last key is raised by -``low``. ``low`` hides the first half and twice ``low``, if float32
    has it, the second. No key is hidden.
    """
    half = keys // 2
    bias = np.zeros((8, keys), np.float32)
    bias[0, :half] = bias[1] = bias[2, half:] = bias[3] = low
    bias[3, :half] = bias[4] = -np.inf
    bias[5, -1] = -low
    bias[6, :half], bias[6, half:] = low, max(2.0 * low, FLOAT32_MIN)
    return bias


def hide_keys(bias: Array, seed: int, *, finite: bool = False) -> Array:
    """The same bias with keys hidden from a third of its rows, by one number a matrix: a run of them or all.

    finite: never by -inf.
    """
    rng = np.random.default_rng([seed, 1])
    hidden = bias.copy()
    lowest = float(ml_dtypes.finfo(bias.dtype).min)
    for matrix in hidden.reshape(-1, *bias.shape[-2:]):
        low = (max(LOW[rng.integers(len(LOW))], lowest), -np.inf)[int(rng.random() < 0.1 and not finite)]
        for row in matrix:
            begin, end = sorted(rng.integers(0, len(row) + 1, 2))
            if rng.random() < 0.25:
                row[begin:end] = low
            elif rng.random() < 0.1:
                row[:] = low
    return hidden


def hide_first(bias: Array) -> Array:
    """A float32 bias that hides the first half of the keys, from every fifth row all keys, by float's lowest number."""
    hidden = bias.astype(np.float32)
    hidden[..., : bias.shape[-1] // 2] = hidden[:, :, ::5] = FLOAT32_MIN
    return hidden


def check_close(name: str, actual: Any, expected: Any, absolute: float, relative: float = 0.0) -> None:
    """Check that NaN and infinities are the same, and the rest within the bounds."""
    actual, expected = (np.asarray(each).astype(np.float64) for each in (actual, expected))
    np.testing.assert_allclose(actual, expected, rtol=relative, atol=absolute, err_msg=name)
